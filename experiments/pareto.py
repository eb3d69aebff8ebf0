"""Which policy gives more tokens a second at the same speed for each user?

Runs every arm of a scenario (drafter + policy + block size) over a range of loads with the same requests and the
same luck, and charts throughput per GPU against tokens per second and user, in the manner of Fig. 7 of the DSpark
paper (arXiv 2607.05147). Closed loop by default: the load is a number of users. With --open-loop requests arrive
at the trace's own times, sped up; telemetry windows are the dots and a fitted frontier the line. With --beside the
same is run with drafts of another source, and both fronts are drawn in one figure.
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
    drafts_note,
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
    from matplotlib.axes import Axes

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
    "trace_source",
    "extrapolated",
    "n_scored",
]
DEFAULT_OUT = "results/pareto"
#: Sources of drafts that can stand side by side, and what their panels are called.
PANELS = {
    "tilted": "Drafts tilted to a published level",
    "recorded": "Drafts as recorded",
    "synthetic": "Synthetic drafts",
}
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
    cli.add_argument(
        "--beside",
        choices=tuple(PANELS),
        metavar="DRAFTS",
        help=f"run the same with drafts of another source too ({', '.join(PANELS)}), and draw both fronts side by "
        "side: pareto_beside.png, with the second one's pareto_beside.csv and scenario_beside.toml",
    )
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
        beside = "" if args.beside is None else f"-beside-{args.beside}"
        args.out = Path(f"{DEFAULT_OUT}{other}{'-open-loop' if args.open_loop else ''}{drafts}{beside}")
    if args.baseline not in arms:
        raise InputError(field="--baseline", value=args.baseline, expected=f"one of the arms: {', '.join(arms)}")
    scenarios = [scenario] if args.beside is None else [scenario, beside_of(args, scenario)]
    with staged_output(args.out) as out:
        studies = []
        for one, ending in zip(scenarios, ("", "_beside"), strict=False):
            if args.beside is not None:
                print(f"\ndrafts: {one.drafts.source}")
            studies.append(study(one, arms, args))
            table, cloud = studies[-1]
            write_csv(table[COLUMNS].astype({"n_scored": int, "steps": int}), out / f"pareto{ending}.csv")
            if cloud is not None:
                write_csv(cloud, out / f"pareto_windows{ending}.csv")
            write_scenario(one, out / f"scenario{ending}.toml")
        draw(*studies[0], scenario, arms, args, out)
        if args.beside is not None:
            draw_beside(studies, scenarios, arms, args, out)
        written(out)
    print(f"written to {args.out}")


def beside_of(args: argparse.Namespace, scenario: Scenario) -> Scenario:
    """The scenario with drafts of the source ``--beside``."""
    if scenario.drafts.source not in PANELS or args.beside == scenario.drafts.source:
        expected = f"two different ones of {', '.join(PANELS)}"
        value = f"{args.beside} beside {scenario.drafts.source}"
        raise InputError(field="--beside", value=value, expected=expected)
    overrides = {key: value for key, value in args.overrides.items() if key != "drafts.source"}
    return scenario_of(argparse.Namespace(**vars(args) | {"drafts": args.beside, "overrides": overrides}))


def study(
    scenario: Scenario, arms: Sequence[str], args: argparse.Namespace
) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Run one scenario and print its tables: a row a run, and in open loop a row a window."""
    load = "rate_scale" if args.open_loop else "concurrency"
    points = grid(scenario, arms=arms, rate_scales=scenario.load.rate_scales if args.open_loop else None)
    sweep = run(scenario, points, extract=windows_of if args.open_loop else None, **run_options(args, scenario))
    table = sweep.table
    if table["tps_per_user"].isna().any():
        raise InputError("tok/s/user is not defined: no scored request has two output tokens", field="workload")
    report(table, args.baseline, load)
    return table, window_table(sweep, load) if args.open_loop else None


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
    from dsim.figures import caption, new_figure, overlay_published, save_figure

    kind = "" if cloud is None else ", open loop"
    fig, axes = new_figure(width=8.2, height=5.4, title=f"Throughput against speed: {scenario.name}{kind}")
    caption(fig, f"{sources_note(scenario, table)} {marks_note(table, scenario, arms, args)}")
    panel(axes[0, 0], table, cloud, arms, args)
    if args.published:
        overlay_published(axes[0, 0], "frontier")
        axes[0, 0].legend(loc="upper right", fontsize=7)
    save_figure(fig, out, "pareto")


def draw_beside(
    studies: Sequence[tuple[pd.DataFrame, pd.DataFrame | None]],
    scenarios: Sequence[Scenario],
    arms: Sequence[str],
    args: argparse.Namespace,
    out: Path,
) -> None:
    """Two fronts of one scenario, with drafts of two sources, on one scale."""
    from dsim.figures import caption, new_figure, panel_title, save_figure

    kind = ", open loop" if args.open_loop else ""
    title = f"Throughput against speed: {scenarios[0].name}{kind}"
    fig, axes = new_figure(2, width=8.6, height=5.4, title=title, sharey=True)
    (table, _), (other, _) = studies
    if [one.drafts.source for one in scenarios] == ["tilted", "recorded"]:
        right = "these drafts as recorded, at their own level."
    else:
        right = drafts_note(scenarios[1], other).replace("Drafts: ", "drafts ")
    note = sources_note(scenarios[0], table).replace("Drafts: ", "Drafts at the left: ")
    caption(
        fig,
        f"The same requests and loads on one scale. {note} At the right: {right} "
        f"{marks_note(table, scenarios[0], arms, args)}",
    )
    # A unit is as long in both panels: each is as wide as its own fronts are.
    wide = [float(runs["tps_per_user"].max()) for runs, _ in studies]
    axes[0, 0].get_gridspec().set_width_ratios([max(value, 0.3 * max(wide)) for value in wide])
    outer = wide.index(max(wide))
    for i, (ax, one, (runs, cloud)) in enumerate(zip(axes[0], scenarios, studies, strict=True)):
        panel_title(ax, PANELS[one.drafts.source])
        panel(ax, runs, cloud, arms, args, legend_loc="upper right" if i == outer else None)
    axes[0, 1].set_ylabel("")
    save_figure(fig, out, "pareto_beside")


def marks_note(table: pd.DataFrame, scenario: Scenario, arms: Sequence[str], args: argparse.Namespace) -> str:
    """The sentences of a caption that say what is drawn."""
    from dsim.figures import seeds_note

    if args.open_loop:
        rates = ", ".join(f"{scale:g}" for scale in scenario.load.rate_scales)
        edge = "lines: their fitted upper edge (90 %)"
        return f"Dots: windows of {scenario.load.window_s:g} s at {rates} times the trace's own rate; {edge}."
    lead = leading(arms, args.baseline)
    arrows = "" if lead is None else f" Arrows: {lead} against {args.baseline}."
    marks = "Labels: concurrent users; hollow: dominated within the arm; lines: log-log between points."
    return f"{seeds_note(table)} {marks}{arrows}"


def leading(arms: Sequence[str], baseline: str) -> str | None:
    """The arm that the arrows compare with the baseline."""
    return next((arm for arm in ("dspark", *reversed(arms)) if arm in arms and arm != baseline), None)


def panel(
    ax: Axes,
    table: pd.DataFrame,
    cloud: pd.DataFrame | None,
    arms: Sequence[str],
    args: argparse.Namespace,
    *,
    legend_loc: str | None = "upper right",
) -> None:
    """One front: windows of an open loop as a cloud, or runs of a closed loop with a comparison."""
    from dsim.figures import annotate_match, cloud_axes, frontier_axes

    if cloud is not None:
        cloud_axes(ax, cloud, arms, legend_loc=legend_loc)
        return
    frontier_axes(ax, table, arms, legend_loc=legend_loc)
    lead = leading(arms, args.baseline)
    if lead is not None:
        at = anchors(table, args.baseline, "tps_per_user", "concurrency")
        for row in chosen_matches(table, lead, args.baseline, at):
            annotate_match(ax, row)


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
