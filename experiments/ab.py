"""Is policy B better than policy A, here, or is that luck?

Runs both on the same requests with the same drafts and luck, seed by seed, and compares the pairs: paired t
intervals over seeds, Holm-corrected over the list of metrics, one primary metric named beforehand, one line of
verdict. The same spec twice (--a X --b X) is the A/A check: B then runs on other seeds, and a difference should be
shown about one time in twenty only.

A SPEC is the name of one of the scenario's arms, or a policy spec with an optional drafter and block size:
"dspark", "fixed:k=3@mtp/3", "path/to/file.py:MyPolicy:margin=0.1@dspark/5". docs/policies.md lists the policies and
their parameters; "lab" has those that engines choose differently.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from dsim.compare import compare, verdict
from dsim.errors import InputError
from dsim.figures import caption, new_figure, save_figure
from dsim.schema import Scenario
from dsim.sweep import grid, run
from dsim.wording import signed
from experiments._common import (
    arm_of,
    override,
    parser,
    positive_int,
    print_table,
    refuse_loads,
    run_main,
    run_options,
    scenario_of,
    sources_note,
    staged_output,
    with_arms,
    write_csv,
    write_scenario,
    written,
)

#: Compared metrics; the first is the primary one unless --primary says otherwise.
METRICS = (
    "throughput_tok_s_gpu",
    "tps_per_user",
    "ttft_p50_ms",
    "tpot_p50_ms",
    "tpot_p90_ms",
    "tpot_p99_ms",
    "goodput_rps",
    "wasted_tokens_per_step",
)
#: Concurrent users where neither an option nor the scenario says how many.
DEFAULT_USERS = 64
# Far from every seed that a study would use for itself.
_OTHER_SEEDS = 1_000_000
# Differences beyond this many percent are drawn as arrows at the figure's edge.
_EDGE = 150.0


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = parser(__doc__, default_seeds="10", out="results/ab")
    cli.add_argument("--a", metavar="SPEC", required=True, help="the one to beat")
    cli.add_argument("--b", metavar="SPEC", required=True, help="the challenger")
    cli.add_argument(
        "--users",
        metavar="N",
        type=positive_int,
        help="concurrent users (default: those of a scenario with one load, else 64; live: the scenario's most)",
    )
    cli.add_argument(
        "--primary", metavar="METRIC", choices=METRICS, default=METRICS[0], help="primary metric (default: %(default)s)"
    )
    cli.add_argument("--alpha", metavar="P", type=_rate, default=0.05, help="error rate (default: %(default)s)")
    return cli


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got '{text}', expected a number between 0 and 1")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    """Run both arms, print the table and the verdict, write the files."""
    args = options().parse_args(argv)
    scenario = at_one_load(args)
    (args.users,) = scenario.load.users
    a, b = arm_of(scenario, args.a), arm_of(scenario, args.b)
    gammas = [scenario.drafts.gamma if arm["gamma"] is None else arm["gamma"] for arm in (a, b)]
    same = (a["policy"], a["drafter"], gammas[0]) == (b["policy"], b["drafter"], gammas[1])
    if same:
        # Two names, one arm: an A/A check needs B to have luck of its own.
        a["name"], b["name"] = f"{a['name']} (A)", f"{b['name']} (B)"
    study = with_arms(scenario, (a, b))
    seeds = range(scenario.measure.seeds)
    other = [seed + _OTHER_SEEDS for seed in seeds] if same else list(seeds)
    points = grid(study, arms=[a["name"]], seeds=seeds)
    points += grid(study, arms=[b["name"]], seeds=other)
    with staged_output(args.out) as out:
        table = run(study, points, **run_options(args, study)).table
        table.insert(6, "replication", [*seeds, *seeds])
        sides = [table[table["arm"] == arm["name"]] for arm in (a, b)]
        result = compare(*sides, list(METRICS), args.primary, alpha=args.alpha, unit="replication")
        result.attrs["paired"] = bool(table["paired"].all())
        line = verdict(result, a["name"], b["name"])
        report(result, study, args, same)
        print(f"\n{line}")
        write_csv(result, out / "ab.csv")
        write_csv(table, out / "ab_runs.csv")
        write_scenario(study, out / "scenario.toml")
        draw(result, table, study, line, args, same, out)
        written(out)
    print(f"written to {args.out}")


def at_one_load(args: argparse.Namespace) -> Scenario:
    """The scenario of the options, with one load: that of --users, or the scenario's own where it has one.

    Raises
    ------
    InputError
        ``--set load.users=...`` beside --users or with several loads, or a key of open loops.
    """
    refuse_loads(args, None)
    override(args, "load.users", None if args.users is None else [args.users], "--users")
    scenario = scenario_of(args, seeds=10)
    loads = scenario.load.users
    if len(loads) == 1:
        return scenario
    if "load.users" in args.overrides:
        expected = "one number, or --users"
        raise InputError("arms are compared at one load", field="load.users", value=list(loads), expected=expected)
    users = max(loads) if scenario.drafts.source == "live" else DEFAULT_USERS
    return scenario.model_copy(update={"load": scenario.load.model_copy(update={"users": (users,)})})


def report(result: pd.DataFrame, scenario: Scenario, args: argparse.Namespace, same: bool) -> None:
    """The table of metrics."""
    slo = scenario.slo
    print(f"\nA = {args.a}, B = {args.b}; {args.users} users, {scenario.measure.seeds} seeds")
    targets = [f"{name} <= {ms:g} ms" for name, ms in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)) if ms is not None]
    print(f"goodput: requests a second with {' and '.join(targets)}" if targets else "goodput: no SLO in the scenario")
    if not result.attrs["paired"]:
        print(
            "not paired: the two arms saw the same requests, not the same drafts and luck; intervals are wider for it"
        )
    if same:
        print("A/A check: both are the same arm; B runs on other seeds")
    shown = result[["metric"]].copy()
    for name in ("mean_a", "mean_b"):
        # Metrics have different units: four digits each, not as many decimals for all.
        shown[name] = [f"{value:.4g}" for value in result[name]]
    for name in ("relative", "relative_lo", "relative_hi"):
        shown[f"{name} %"] = [signed(value) for value in result[name]]
    shown["p (Holm)"] = result["p_adjusted"]
    shown["outcome"] = result["outcome"]
    print_table(shown)


def _units(result: pd.DataFrame, same: bool) -> str:
    """What one difference is made of."""
    if same:
        return "replications (A/A: B runs on other seeds)"
    return "paired seeds" if result.attrs["paired"] else "seeds (the same requests, drafts and luck not paired)"


def draw(
    result: pd.DataFrame,
    table: pd.DataFrame,
    scenario: Scenario,
    line: str,
    args: argparse.Namespace,
    same: bool,
    out: Path,
) -> None:
    """Relative differences with their intervals, one row a metric."""
    shown = result[result["relative"].notna()].iloc[::-1].reset_index(drop=True)
    fig, axes = new_figure(
        width=7.6, height=1.6 + 0.38 * max(len(shown), 3), title=f"B = {args.b} against A = {args.a}"
    )
    caption(
        fig,
        f"{line}.\n{sources_note(scenario, table)} {args.users} users; bars: {int(100 * (1 - args.alpha))} % "
        f"intervals over {_units(result, same)} (a range below 5). "
        "Filled: shown after Holm's correction, green better, red worse. Arrows: beyond the axis.",
    )
    ax = axes[0, 0]
    ax.axvline(0, color="0.4", linewidth=1)
    for i, row in shown.iterrows():
        color = {"B better": "#1b7f4c", "B worse": "#b2432f"}.get(row["outcome"], "0.45")
        low, mid, high = (100 * row[name] for name in ("relative_lo", "relative", "relative_hi"))
        ax.plot(np.clip([low, high], -_EDGE, _EDGE), [i, i], color=color, linewidth=1.6)
        if abs(mid) <= _EDGE:
            ax.plot([mid], [i], "o", color=color, markersize=6, markerfacecolor=color if color != "0.45" else "white")
        else:
            # One metric that multiplies must not flatten the others.
            side = float(np.sign(mid))
            ax.plot([side * _EDGE], [i], ">" if side > 0 else "<", color=color, markersize=7)
            ax.annotate(
                f"{mid:+.0f} %",
                (side * _EDGE, i),
                xytext=(-8 * side, 6),
                textcoords="offset points",
                ha="right" if side > 0 else "left",
                color=color,
                fontsize=8,
            )
    ax.set_yticks(
        range(len(shown)),
        [f"{m} *" if r == "primary" else m for m, r in zip(shown["metric"], shown["role"], strict=True)],
    )
    ax.set_ylim(-0.6, len(shown) - 0.4)
    ax.set_xlabel("B against A, %   (* primary metric)")
    save_figure(fig, out, "ab")


if __name__ == "__main__":
    run_main(main)
