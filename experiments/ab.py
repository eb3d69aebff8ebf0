"""Is policy B better than policy A, here, or is that luck?

Runs both on the same requests with the same drafts and luck, seed by seed, and compares the pairs: paired t
intervals over seeds, Holm-corrected over the list of metrics, one primary metric named beforehand, one line of
verdict. The same spec twice (--a X --b X) is the A/A check: B then runs on other seeds, and a difference should be
shown about one time in twenty only.

A SPEC is the name of one of the scenario's arms, or a policy spec with an optional drafter and block size:
"dspark", "fixed:k=3@mtp/3", "path/to/file.py:MyPolicy:margin=0.1@dspark/5".
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dsim.compare import compare, verdict
from dsim.errors import InputError
from dsim.figures import caption, new_figure, save_figure
from dsim.schema import ArmSection, Scenario, parse_scenario
from dsim.sweep import grid, run
from experiments._common import (
    parser,
    positive_int,
    print_table,
    run_main,
    scenario_of,
    sources_note,
    staged_output,
    write_csv,
    write_scenario,
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
# Far from every seed that a study would use for itself.
_OTHER_SEEDS = 1_000_000


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = parser(__doc__, seeds=10, out="results/ab")
    cli.add_argument("--a", metavar="SPEC", required=True, help="the one to beat")
    cli.add_argument("--b", metavar="SPEC", required=True, help="the challenger")
    cli.add_argument("--users", metavar="N", type=positive_int, default=64, help="concurrent users (default: 64)")
    cli.add_argument(
        "--primary", metavar="METRIC", choices=METRICS, default=METRICS[0], help="primary metric (default: %(default)s)"
    )
    cli.add_argument("--alpha", metavar="P", type=float, default=0.05, help="error rate (default: %(default)s)")
    return cli


def main(argv: Sequence[str] | None = None) -> None:
    """Run both arms, print the table and the verdict, write the files."""
    args = options().parse_args(argv)
    scenario = scenario_of(args)
    a, b = arm_of(scenario, args.a), arm_of(scenario, args.b)
    same = (a.policy, a.drafter, scenario.gamma(a)) == (b.policy, b.drafter, scenario.gamma(b))
    if same:
        # Two names, one arm: an A/A check needs B to have luck of its own.
        a, b = (arm.model_copy(update={"name": f"{arm.name} ({side})"}) for arm, side in ((a, "A"), (b, "B")))
    elif a.name == b.name:
        raise InputError(field="--b", value=args.b, expected="a spec that differs from --a")
    study = _study(scenario, a, b)
    seeds = range(scenario.measure.seeds)
    other = [seed + _OTHER_SEEDS for seed in seeds] if same else list(seeds)
    points = grid(study, arms=[a.name], users=[args.users], seeds=seeds)
    points += grid(study, arms=[b.name], users=[args.users], seeds=other)
    with staged_output(args.out) as out:
        table = run(study, points, jobs=args.jobs).table
        table.insert(6, "replication", [*seeds, *seeds])
        sides = [table[table["arm"] == arm.name] for arm in (a, b)]
        result = compare(*sides, list(METRICS), args.primary, alpha=args.alpha, unit="replication")
        line = verdict(result, a.name, b.name)
        report(result, study, args, same)
        print(f"\n{line}")
        write_csv(result, out / "ab.csv")
        write_csv(table, out / "ab_runs.csv")
        write_scenario(study, out / "scenario.toml")
        draw(result, table, study, line, args, out)
    print(f"\nwritten to {args.out}: ab.csv, ab_runs.csv, ab.png, ab.svg, scenario.toml")


def arm_of(scenario: Scenario, spec: str) -> ArmSection:
    """The arm that a SPEC names: one of the scenario's, or ``POLICY[@DRAFTER][/GAMMA]``."""
    for arm in scenario.arms:
        if arm.name == spec:
            return arm
    policy, at, rest = spec.partition("@")
    drafter, slash, gamma = rest.partition("/")
    if (at and not drafter) or (slash and not gamma.isdigit()):
        raise InputError("is no arm spec", value=spec, expected="an arm's name, or POLICY[@DRAFTER[/GAMMA]]")
    return ArmSection(name=spec, policy=policy, drafter=drafter or "dspark", gamma=int(gamma) if slash else None)


def _study(scenario: Scenario, a: ArmSection, b: ArmSection) -> Scenario:
    """The scenario with these two arms, validated again."""
    raw = scenario.model_dump(mode="python") | {"arms": (a.model_dump(), b.model_dump())}
    return parse_scenario(raw)


def report(result: pd.DataFrame, scenario: Scenario, args: argparse.Namespace, same: bool) -> None:
    """The table of metrics."""
    slo = scenario.slo
    print(f"\nA = {args.a}, B = {args.b}; {args.users} users, {scenario.measure.seeds} seeds")
    print(f"goodput: requests with TTFT <= {slo.ttft_ms or 'any'} ms and TPOT <= {slo.tpot_ms or 'any'} ms")
    if same:
        print("A/A check: both are the same arm; B runs on other seeds")
    shown = result[["metric", "mean_a", "mean_b"]].copy()
    for name in ("relative", "relative_lo", "relative_hi"):
        shown[f"{name} %"] = 100 * result[name]
    shown["p (Holm)"] = result["p_adjusted"]
    shown["outcome"] = result["outcome"]
    print_table(shown)


def draw(
    result: pd.DataFrame, table: pd.DataFrame, scenario: Scenario, line: str, args: argparse.Namespace, out: Path
) -> None:
    """Relative differences with their intervals, one row a metric."""
    shown = result[result["relative"].notna()].iloc[::-1].reset_index(drop=True)
    fig, axes = new_figure(
        width=7.6, height=1.6 + 0.38 * max(len(shown), 3), title=f"B = {args.b} against A = {args.a}"
    )
    caption(
        fig,
        f"{line}.\n{sources_note(scenario, table)} {args.users} users; bars: {int(100 * (1 - args.alpha))} % paired "
        "intervals over seeds (a range below 5 seeds). Filled: shown after Holm's correction.",
    )
    ax = axes[0, 0]
    ax.axvline(0, color="0.4", linewidth=1)
    for i, row in shown.iterrows():
        color = {"B better": "#1b7f4c", "B worse": "#b2432f"}.get(row["outcome"], "0.45")
        low, mid, high = (100 * row[name] for name in ("relative_lo", "relative", "relative_hi"))
        ax.plot([low, high], [i, i], color=color, linewidth=1.6)
        ax.plot([mid], [i], "o", color=color, markersize=6, markerfacecolor=color if color != "0.45" else "white")
    ax.set_yticks(
        range(len(shown)),
        [f"{m} *" if r == "primary" else m for m, r in zip(shown["metric"], shown["role"], strict=True)],
    )
    ax.set_ylim(-0.6, len(shown) - 0.4)
    ax.set_xlabel("B against A, %   (* primary metric)")
    save_figure(fig, out, "ab")


if __name__ == "__main__":
    run_main(main)
