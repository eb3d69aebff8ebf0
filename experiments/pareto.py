"""Which policy gives more tokens a second at the same speed for each user?

Runs every arm of a scenario (drafter + policy + block size) over a range of loads with the same requests and the
same luck, and charts throughput per GPU against tokens per second and user, in the manner of Fig. 7 of the DSpark
paper (arXiv 2607.05147). Closed loop by default: the load is a number of users. With --open-loop requests arrive
at the trace's own times, sped up; telemetry windows are the dots and a fitted frontier the line.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dsim.errors import InputError
from dsim.schema import Scenario
from dsim.sweep import grid, run
from experiments._common import (
    arms_of,
    parser,
    print_table,
    refuse_loads,
    refuse_sets,
    run_main,
    run_options,
    scenario_of,
    sources_note,
    staged_output,
    window_table,
    windows_of,
    write_csv,
    write_scenario,
    written,
)

# What makes figures and tables is imported where that is done: the first run need not wait for it.
if TYPE_CHECKING:
    import pandas as pd

COLUMNS = [
    "arm",
    "policy",
    "drafter",
    "gamma",
    "concurrency",
    "rate_scale",
    "seed",
    "tps_per_user",
    "throughput_tok_s",
    "throughput_tok_s_gpu",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "accepted_length",
    "verification_budget",
    "acceptance_rate",
    "wasted_tokens_per_step",
    "steps",
    "sim_seconds",
    "cost_source",
    "drafts_source",
    "extrapolated",
    "n_scored",
]
DEFAULT_OUT = "results/pareto"
_SHOWN = [
    "tps_per_user",
    "throughput_tok_s_gpu",
    "accepted_length",
    "verification_budget",
    "acceptance_rate",
    "tpot_p99_ms",
]


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = parser(__doc__, out=DEFAULT_OUT)
    cli.add_argument("--arms", metavar="A,B,...", help="only these arms (default: all of the scenario)")
    cli.add_argument("--baseline", metavar="ARM", help="arm to compare with (default: mtp1, or the first arm)")
    cli.add_argument("--open-loop", action="store_true", help="replay arrivals at load.rate_scales times their rate")
    cli.add_argument("--published", action="store_true", help="overlay the paper's Fig. 7 lines (other hardware)")
    return cli


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sweep, print the tables, write the files."""
    args = options().parse_args(argv)
    if args.open_loop:
        refuse_sets(args, dict.fromkeys(("load.users", "load.think_s", "load.stagger_s"), "a key of open loops"))
    else:
        refuse_loads(args, None)
    scenario = scenario_of(args)
    arms = arms_of(scenario, args.arms)
    if args.baseline is None:
        args.baseline = "mtp1" if "mtp1" in arms else arms[0]
    if args.out == Path(DEFAULT_OUT):
        # Another scenario, kind of load or source of drafts is another study; its results lie beside the default one's.
        other = "" if scenario.name == "decode-node" else f"-{re.sub(r'[^A-Za-z0-9._-]+', '-', scenario.name)}"
        drafts = "" if args.drafts is None else f"-{args.drafts}"
        args.out = Path(f"{DEFAULT_OUT}{other}{'-open-loop' if args.open_loop else ''}{drafts}")
    if args.baseline not in arms:
        raise InputError(field="--baseline", value=args.baseline, expected=f"one of the arms: {', '.join(arms)}")
    load = "rate_scale" if args.open_loop else "concurrency"
    points = grid(scenario, arms=arms, rate_scales=scenario.load.rate_scales if args.open_loop else None)
    with staged_output(args.out) as out:
        sweep = run(scenario, points, extract=windows_of if args.open_loop else None, **run_options(args, scenario))
        table = sweep.table
        if table["tps_per_user"].isna().any():
            raise InputError("tok/s/user is not defined: no scored request has two output tokens", field="workload")
        report(table, args.baseline, load)
        write_csv(table[COLUMNS].astype({"n_scored": int, "steps": int}), out / "pareto.csv")
        cloud = window_table(sweep, load) if args.open_loop else None
        if cloud is not None:
            write_csv(cloud, out / "pareto_windows.csv")
        write_scenario(scenario, out / "scenario.toml")
        draw(table, cloud, scenario, arms, args, out)
        written(out)
    print(f"written to {args.out}")


def report(table: pd.DataFrame, baseline: str, load: str) -> None:
    """Means over seeds, matched comparisons, hypervolumes."""
    from dsim.frontier import hypervolume_ratio, matched_table, matched_text

    print("\nmeans over seeds")
    print_table(table.groupby(["arm", load], sort=False)[_SHOWN].mean().reset_index())
    if table["arm"].nunique() < 2:
        return
    matched = matched_table(
        table,
        baseline,
        speeds=anchors(table, baseline, "tps_per_user", load),
        throughputs=anchors(table, baseline, "throughput_tok_s_gpu", load),
        load=load,
    )
    print(f"\nthroughput (tok/s/GPU) against {baseline} at the same tok/s/user")
    print_table(matched_text(matched, "tps_per_user"))
    print(f"\ntok/s/user against {baseline} at the same throughput")
    print_table(matched_text(matched, "throughput_tok_s_gpu"))
    print("[lo, hi]: 95 % interval over seeds, or with r the range of fewer than five; (k/n): k of n seeds reach it")
    print(f"\ndominated area (hypervolume from (0, 0), tok/s/user x tok/s/GPU) against {baseline}")
    print_table(hypervolume_ratio(table, baseline, load=load))


def anchors(table: pd.DataFrame, baseline: str, column: str, load: str, most: int = 5) -> list[float]:
    """Where to compare all arms: operating points of the baseline, two digits, spread over its range of loads."""
    from dsim.frontier import nondominated

    means = table[table["arm"] == baseline].groupby(load, sort=True)[["tps_per_user", "throughput_tok_s_gpu"]].mean()
    values = means.loc[nondominated(means["tps_per_user"], means["throughput_tok_s_gpu"]), column].to_numpy()
    picked = values[np.unique(np.linspace(0, len(values) - 1, most + 2).round().astype(int))[1:-1]]
    digits = 1 - np.floor(np.log10(picked)).astype(int)
    return sorted({round(float(v), int(d)) for v, d in zip(picked, digits, strict=True)})


def draw(
    table: pd.DataFrame,
    cloud: pd.DataFrame | None,
    scenario: Scenario,
    arms: Sequence[str],
    args: argparse.Namespace,
    out: Path,
) -> None:
    """The chart: one panel, closed loop or open loop."""
    from dsim.figures import (
        annotate_match,
        caption,
        cloud_axes,
        frontier_axes,
        new_figure,
        overlay_published,
        save_figure,
        seeds_note,
    )

    kind = "" if cloud is None else ", open loop"
    fig, axes = new_figure(width=8.2, height=5.4, title=f"Throughput against speed: {scenario.name}{kind}")
    ax = axes[0, 0]
    note = sources_note(scenario, table)
    if cloud is not None:
        seconds = scenario.load.window_s
        rates = ", ".join(f"{scale:g}" for scale in scenario.load.rate_scales)
        edge = "lines: their fitted upper edge (90 %)"
        caption(fig, f"{note} Dots: windows of {seconds:g} s at {rates} times the trace's own rate; {edge}.")
        cloud_axes(ax, cloud, arms)
    else:
        lead = next((arm for arm in ("dspark", *reversed(arms)) if arm in arms and arm != args.baseline), None)
        arrows = "" if lead is None else f" Arrows: {lead} against {args.baseline}."
        marks = "Labels: concurrent users; hollow: dominated within the arm; lines: log-log between points."
        caption(fig, f"{note} {seeds_note(table)} {marks}{arrows}")
        frontier_axes(ax, table, arms)
        if lead is not None:
            at = anchors(table, args.baseline, "tps_per_user", "concurrency")
            for row in chosen_matches(table, lead, args.baseline, at):
                annotate_match(ax, row)
    if args.published:
        overlay_published(ax, "frontier")
        ax.legend(loc="upper right", fontsize=7)
    save_figure(fig, out, "pareto")


def chosen_matches(table: pd.DataFrame, arm: str, baseline: str, speeds: Sequence[float]) -> list[pd.Series]:
    """One comparison at equal speed (a column of the table) and one at equal throughput, from the same point."""
    from dsim.frontier import matched_table

    pair = table[table["arm"].isin([arm, baseline])]
    at_speed = matched_table(pair, baseline, speeds=speeds, throughputs=())
    at_speed = at_speed[at_speed["n_reached"] == at_speed["n_seeds"]]
    if at_speed.empty:
        return []
    middle = at_speed.iloc[len(at_speed) // 2]
    level = float(middle["baseline_value"])
    at_throughput = matched_table(pair, baseline, speeds=(), throughputs=(level,))
    return [middle, *(row for _, row in at_throughput.iterrows())]


if __name__ == "__main__":
    run_main(main)
