"""Do more layers or a sequential head help a drafter more?

Charts accepted length against the drafter's number of layers, by domain, beside the curve of the paper's Fig. 3 (arXiv
2607.05147; Qwen3-4B, T = 1, blocks of 7), where a 2-layer DSpark beats a 5-layer DFlash. Reads a CSV of drafters that
were trained here (drafter_study.py makes it), one row a drafter and domain: drafter, head (none, markov, gated, rnn),
layers, gamma, anchors (trained on), temperature, domain, tau, tau_low, tau_high (95 % interval over held-out texts, or
empty), alpha_1, alpha_2, ...
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from dsim.figures_drafts import (
    PAPER_TARGET,
    comparable,
    drafter_style,
    one_title_a_column,
    published_depth,
    room_at_right,
)
from dsim.plotstyle import caption, new_figure, save_figure
from experiments._banks import bank_parser, title
from experiments._common import positive_int, print_table, run_main, staged_output, write_csv, written
from experiments._trained import (
    domains_of,
    draw_lines,
    draw_published,
    label_lines,
    name_rows,
    only,
    read_results,
    trained_note,
    unambiguous,
    whole_ticks,
)


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = bank_parser(__doc__, "results/drafter_depth", intervals=False, banks=False)
    cli.add_argument(
        "--results", metavar="FILE.csv", type=Path, help="results to chart (default: those that dsim ships)"
    )
    cli.add_argument(
        "--gamma", metavar="N", type=positive_int, help="block size to compare at, where the results have several"
    )
    return cli


def main(argv: Sequence[str] | None = None) -> None:
    """Read the results, print the table, write the files."""
    args = options().parse_args(argv)
    results = unambiguous(only(read_results(args.results, "depth.csv"), "gamma", args.gamma, "--gamma"), ["layers"])
    table = depth_table(results)
    with staged_output(args.out) as out:
        report(table)
        write_csv(table, out / "drafter_depth.csv")
        draw(results, out)
        written(out)
    print(f"written to {args.out}")


def depth_table(results: pd.DataFrame) -> pd.DataFrame:
    """One row a drafter, depth and domain: tau, and its ratio to the deepest DFlash, here and published."""
    rows = []
    paper = comparable(published_depth(), domains_of(results)).set_index(["drafter", "domain", "layers"])[
        "accepted_length"
    ]
    deepest = results.loc[results["key"] == "dflash", "layers"].max()
    for row in results.to_dict("records"):
        base = results[
            (results["key"] == "dflash") & (results["layers"] == deepest) & (results["domain"] == row["domain"])
        ]
        known = float(paper.get((row["key"], row["domain"], row["layers"]), np.nan))
        rows.append(
            {
                "drafter": row["label"],
                "layers": row["layers"],
                "gamma": row["gamma"],
                "anchors": row["anchors"],
                "temperature": row["temperature"],
                "domain": row["domain"],
                "tau": row["tau"],
                "tau_low": row["tau_low"],
                "tau_high": row["tau_high"],
                "over_deepest_dflash": row["tau"] / float(base["tau"].iloc[0]) if len(base) else np.nan,
                "published": known,
                "published_over_5_layer_dflash": known / float(paper.get(("dflash", row["domain"], 5), np.nan)),
            }
        )
    return pd.DataFrame(rows)


def report(table: pd.DataFrame) -> None:
    """The table for the terminal."""
    print("accepted length tau by drafter depth; ratios to the deepest DFlash (no interval: each was trained once)")
    print_table(table.drop(columns=["gamma", "anchors", "temperature"]))


def draw(results: pd.DataFrame, out: Path) -> None:
    """A column a domain: ours above, published below."""
    names = domains_of(results)
    paper = comparable(published_depth(), names)
    shown = len(paper) > 0
    fig, axes = new_figure(
        len(names),
        2 if shown else 1,
        width=2.7 * len(names) + 1.3,
        height=5.8 if shown else 3.4,
        title="Accepted length against drafter depth",
    )
    caption(
        fig,
        f"{trained_note(results)} Blocks of {results['gamma'].iloc[0]}. Below: the paper's Fig. 3 (published; "
        f"{PAPER_TARGET}, T = 1, blocks of 7; means of a domain's three benchmarks): shapes compare, levels do not. "
        "Horizontal: the deepest DFlash.",
    )
    one_title_a_column(axes, [title(name) for name in names])
    layers = np.concatenate([results["layers"].to_numpy(), paper["layers"].to_numpy() if shown else []])
    for i, name in enumerate(names):
        draw_lines(axes[0, i], results, name, "layers")
        floor(axes[0, i], results[(results["key"] == "dflash") & (results["domain"] == name)], "tau", layers)
        if shown:
            draw_published(axes[1, i], paper, name, "layers")
            floor(
                axes[1, i], paper[(paper["drafter"] == "dflash") & (paper["domain"] == name)], "accepted_length", layers
            )
        for ax in axes[:, i]:
            whole_ticks(ax, layers)
        axes[-1, i].set_xlabel("layers")
    name_rows(axes, results)
    room_at_right(fig, 0.95)
    label_lines(axes[0, -1], results, "layers", "tau", float(layers.max()))
    if shown:
        label_lines(axes[1, -1], paper, "layers", "accepted_length", float(layers.max()))
    save_figure(fig, out, "drafter_depth")


def floor(ax: Axes, rows: pd.DataFrame, column: str, layers: npt.NDArray[np.floating[Any]]) -> None:
    """A thin line at the level of the deepest of these drafters."""
    if len(rows):
        level = float(rows.sort_values("layers")[column].iloc[-1])
        color = drafter_style("dflash").color
        ax.hlines(level, layers.min(), layers.max(), color=color, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1.5)


if __name__ == "__main__":
    run_main(main)
