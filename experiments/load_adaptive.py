"""How do throughput and the verification budget follow the load?

Charts, in the manner of Fig. 8 of the DSpark paper (arXiv 2607.05147), throughput per GPU and the verification
budget (target tokens a request and step, bonus token included) against concurrency. MTP-1 verifies 2 tokens at
any load; a load-adaptive policy gives drafts up as the machine fills. Dots are runs (or telemetry windows); lines are
fitted; on the measured staircase, which no smooth line follows, they join the means and the fit is drawn thin.
--published overlays the paper's own budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from dsim.figures import (
    arm_styles,
    caption,
    legend,
    load_axes,
    load_fit,
    new_figure,
    overlay_published,
    save_figure,
)
from dsim.schema import Scenario
from dsim.sweep import grid, run
from experiments._common import (
    arms_of,
    parser,
    print_table,
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

DEFAULT_ARMS = ("mtp1", "dspark")
COLUMNS = [
    "arm",
    "policy",
    "drafter",
    "gamma",
    "concurrency",
    "seed",
    "mean_batch_requests",
    "throughput_tok_s_gpu",
    "verification_budget",
    "accepted_length",
    "acceptance_rate",
    "tps_per_user",
    "fallback_steps",
    "steps",
    "cost_source",
    "drafts_source",
    "extrapolated",
    "n_scored",
]


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = parser(__doc__, out="results/load_adaptive")
    cli.add_argument(
        "--arms", metavar="A,B,...", default=",".join(DEFAULT_ARMS), help="which arms (default: %(default)s)"
    )
    cli.add_argument("--windows", action="store_true", help="dots are telemetry windows of load.window_s, not runs")
    cli.add_argument(
        "--published",
        choices=("V4-Flash", "V4-Pro"),
        help="overlay the paper's Fig. 8 lines of that model: budget as it stands, throughput scaled (see --scale)",
    )
    cli.add_argument(
        "--scale",
        type=float,
        metavar="X",
        help="factor on the published throughput (other hardware); without it only the budget is overlaid",
    )
    return cli


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sweep, print the table, write the files."""
    cli = options()
    args = cli.parse_args(argv)
    if args.scale is not None and args.published is None:
        cli.error("--scale needs --published")
    scenario = scenario_of(args)
    arms = arms_of(scenario, args.arms)
    with staged_output(args.out) as out:
        points, extract = grid(scenario, arms=arms), windows_of if args.windows else None
        sweep = run(scenario, points, extract=extract, **run_options(args, scenario))
        report(sweep.table)
        write_csv(sweep.table[COLUMNS].astype({"n_scored": int, "steps": int}), out / "load_adaptive.csv")
        cloud = None
        if args.windows:
            cloud = window_table(sweep, "concurrency")
            write_csv(cloud, out / "load_adaptive_windows.csv")
        write_scenario(scenario, out / "scenario.toml")
        draw(sweep.table, cloud, scenario, arms, args, out)
        written(out)
    print(f"written to {args.out}")


def report(table: pd.DataFrame) -> None:
    """Means over seeds, by arm and concurrency."""
    print("\nmeans over seeds")
    shown = ["mean_batch_requests", "throughput_tok_s_gpu", "verification_budget", "accepted_length", "acceptance_rate"]
    print_table(table.groupby(["arm", "concurrency"], sort=False)[shown].mean().reset_index())


def draw(
    table: pd.DataFrame,
    cloud: pd.DataFrame | None,
    scenario: Scenario,
    arms: Sequence[str],
    args: argparse.Namespace,
    out: Path,
) -> None:
    """Two panels: throughput above, verification budget below."""
    fig, axes = new_figure(nrows=2, width=7.2, height=6.6, title=f"Load-adaptive verification: {scenario.name}")
    data = table if cloud is None else cloud
    dots = "runs" if cloud is None else f"windows of {scenario.load.window_s:g} s"
    # A smooth line through a staircase's jumps would show what is not there.
    enough = cloud is not None or table["concurrency"].nunique() >= 6
    smooth = enough and (cloud is not None or scenario.cost.fit != "staircase")
    lines = "fitted through them" if smooth else "joining their means" + (" (thin dashed: fitted)" if enough else "")
    published = (
        f" Dotted: the paper's Fig. 8, {args.published} (published, hardware not named)." if args.published else ""
    )
    caption(fig, f"{sources_note(scenario, table)} Dots: {dots}; lines: {lines}.{published}")
    xlabel = "concurrent users" if cloud is None else "requests in decode"
    load_axes(axes[0, 0], data, arms, "throughput_tok_s_gpu", xlabel=xlabel, fit=smooth)
    load_axes(axes[1, 0], data, arms, "verification_budget", xlabel=xlabel, fit=smooth)
    if enough and not smooth:
        for ax, column in ((axes[0, 0], "throughput_tok_s_gpu"), (axes[1, 0], "verification_budget")):
            _add_fits(ax, table, arms, column)
    if args.published:
        overlay_published(axes[1, 0], "budget", args.published)
        if args.scale is not None:
            overlay_published(axes[0, 0], "throughput", args.published, scale=args.scale)
    for ax in axes[:, 0]:
        legend(ax)
    save_figure(fig, out, "load_adaptive")


def _add_fits(ax: Axes, table: pd.DataFrame, arms: Sequence[str], column: str) -> None:
    """The fitted line beside the joined means: what a smooth reading of the same runs would be."""
    styles = arm_styles(arms)
    for arm in arms:
        rows = table[table["arm"] == arm]
        x, y = load_fit(rows["concurrency"].to_numpy(dtype=float), rows[column].to_numpy(dtype=float))
        ax.plot(x, y, color=styles[arm].color, linewidth=0.9, linestyle=(0, (5, 3)), alpha=0.7, zorder=2.5)


if __name__ == "__main__":
    run_main(main)
