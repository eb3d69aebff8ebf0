"""Do longer blocks pay, and what does the sequential head cost?

Charts accepted length against the block size gamma, by domain, and the time that the sequential head adds to a draft,
beside the paper's Fig. 4 (arXiv 2607.05147; Qwen3-4B, T = 1, 5 layers), where DSpark's gain over DFlash grows with
gamma for 0.2 to 1.3 % more latency a round. Reads two CSVs of drafters trained and timed here, as drafter_study.py
makes them:

--results, one row a drafter and domain: drafter, head (none, markov, gated, rnn), layers, gamma, anchors (trained on),
temperature, domain, tau, tau_low, tau_high (95 % interval over held-out texts, or empty), alpha_1, alpha_2, ...

--latency, one row a timing: head, gamma, layers, vocab (draft vocabulary), device, draft_ms (a whole block's draft, the
head included), head_ms (the head's part of it), verify_ms (the target's pass over the block), repeats.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from dsim.figures_drafts import (
    PAPER_TARGET,
    comparable,
    drafter_style,
    end_labels,
    one_title_a_column,
    published_draft_length,
    published_round,
    room_at_right,
    value_line,
)
from dsim.plotstyle import caption, new_figure, panel_title, save_figure
from experiments._banks import bank_parser, title
from experiments._common import positive_int, print_table, run_main, staged_output, write_csv, written
from experiments._trained import (
    domains_of,
    draw_lines,
    draw_published,
    label_lines,
    name_rows,
    only,
    read_latency,
    read_results,
    shipped_results,
    trained_note,
    unambiguous,
    whole_ticks,
)


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = bank_parser(__doc__, "results/draft_length", intervals=False, banks=False)
    cli.add_argument(
        "--results", metavar="FILE.csv", type=Path, help="results to chart (default: those that dsim ships)"
    )
    cli.add_argument(
        "--latency",
        metavar="FILE.csv",
        type=Path,
        help="timings to chart (default: those that dsim ships; none with --results alone)",
    )
    cli.add_argument(
        "--layers", metavar="N", type=positive_int, help="depth to compare at, where the results have several"
    )
    return cli


def main(argv: Sequence[str] | None = None) -> None:
    """Read the results, print the tables, write the files."""
    args = options().parse_args(argv)
    results = unambiguous(only(read_results(args.results, "length.csv"), "layers", args.layers, "--layers"), ["gamma"])
    latency = None
    if args.latency is not None or (args.results is None and shipped_results("latency.csv") is not None):
        latency = read_latency(args.latency, "latency.csv")
        latency = latency.assign(line=timing_labels(latency))
    table = length_table(results)
    with staged_output(args.out) as out:
        report(table, latency)
        write_csv(table, out / "draft_length.csv")
        if latency is not None:
            write_csv(latency_table(latency), out / "latency.csv")
        draw(results, out)
        if latency is not None:
            draw_latency(latency, out)
        written(out)
    print(f"written to {args.out}")


def length_table(results: pd.DataFrame) -> pd.DataFrame:
    """One row a drafter, block size and domain: tau, and its gain over DFlash, here and published."""
    paper = comparable(published_draft_length(), domains_of(results)).set_index(["drafter", "domain", "gamma"])[
        "accepted_length"
    ]
    ours = results.set_index(["key", "domain", "gamma"])["tau"]
    rows = []
    for row in results.to_dict("records"):
        at = (row["domain"], row["gamma"])
        known = float(paper.get((row["key"], *at), np.nan))
        rows.append(
            {
                "drafter": row["label"],
                "gamma": row["gamma"],
                "layers": row["layers"],
                "anchors": row["anchors"],
                "temperature": row["temperature"],
                "domain": row["domain"],
                "tau": row["tau"],
                "tau_low": row["tau_low"],
                "tau_high": row["tau_high"],
                "over_dflash": row["tau"] / float(ours.get(("dflash", *at), np.nan)),
                "published": known,
                "published_over_dflash": known / float(paper.get(("dflash", *at), np.nan)),
            }
        )
    return pd.DataFrame(rows)


def latency_table(latency: pd.DataFrame) -> pd.DataFrame:
    """The timings, and what the head adds to a round without it, here and in the paper."""
    paper = published_round().set_index(["drafter", "gamma"])["overhead"]
    names = ["head", "gamma", "layers", "vocab", "device", "draft_ms", "head_ms", "verify_ms", "repeats", "overhead"]
    known = [float(paper.get((row["key"], row["gamma"]), np.nan)) for row in latency.to_dict("records")]
    return latency[names].assign(published_round_overhead=known)


def report(table: pd.DataFrame, latency: pd.DataFrame | None) -> None:
    """The tables for the terminal."""
    print("accepted length tau by block size; ratios to DFlash (no interval: each was trained once)")
    print_table(table.drop(columns=["layers", "anchors", "temperature"]))
    if latency is not None:
        print("\nwhat the sequential head adds to a round, draft and verification, that has none")
        print_table(latency_table(latency))


def timing_labels(latency: pd.DataFrame) -> list[str]:
    """What tells each timing's line from the others: the head, and those columns that vary."""
    vary = [name for name in ("layers", "vocab", "device") if latency[name].nunique() > 1]
    words = {"layers": "{} layers", "vocab": "vocab {:,}", "device": "{}"}
    return [
        ", ".join([str(row["head"]), *(words[name].format(row[name]) for name in vary)])
        for row in latency.to_dict("records")
    ]


def draw(results: pd.DataFrame, out: Path) -> None:
    """A column a domain: ours above, published below."""
    names = domains_of(results)
    paper = comparable(published_draft_length(), names)
    shown = len(paper) > 0
    fig, axes = new_figure(
        len(names),
        2 if shown else 1,
        width=2.7 * len(names) + 1.3,
        height=5.8 if shown else 3.4,
        title="Accepted length against block size",
    )
    caption(
        fig,
        f"{trained_note(results)} {layers_text(results)}. Below: the paper's Fig. 4 (published; {PAPER_TARGET}, T = 1, "
        "5 layers; means of a domain's three benchmarks): shapes compare, levels do not.",
    )
    one_title_a_column(axes, [title(name) for name in names])
    sizes = np.concatenate([results["gamma"].to_numpy(), paper["gamma"].to_numpy() if shown else []])
    for i, name in enumerate(names):
        draw_lines(axes[0, i], results, name, "gamma")
        if shown:
            draw_published(axes[1, i], paper, name, "gamma")
        for ax in axes[:, i]:
            whole_ticks(ax, sizes)
        axes[-1, i].set_xlabel("block size gamma")
    name_rows(axes, results)
    room_at_right(fig, 0.95)
    label_lines(axes[0, -1], results, "gamma", "tau", float(sizes.max()))
    if shown:
        label_lines(axes[1, -1], paper, "gamma", "accepted_length", float(sizes.max()))
    save_figure(fig, out, "draft_length")


def layers_text(results: pd.DataFrame) -> str:
    """1 layer, 2 layers."""
    layers = int(results["layers"].iloc[0])
    return f"{layers} layer{'' if layers == 1 else 's'}"


def draw_latency(latency: pd.DataFrame, out: Path) -> None:
    """The head's cost: ours at the left, the paper's at the right."""
    fig, axes = new_figure(2, width=10.4, height=3.9, title="What the sequential head adds")
    devices = ", ".join(dict.fromkeys(latency["device"]))
    repeats = latency["repeats"]
    many = f"{repeats.min()}" if repeats.min() == repeats.max() else f"{repeats.min()} to {repeats.max()}"
    caption(
        fig,
        "Both: the head's time over a round without it, the draft and the target's pass over the block. Left: measured "
        f"here on {devices}, one request at a time, medians of {many} repeats. Right: the paper's Fig. 4 (published; "
        f"{PAPER_TARGET}, batch size 128).",
    )
    left, right = axes[0]
    paper = published_round()
    ends = []
    latency = latency[latency["head"] != "none"]
    dashes = dict.fromkeys(latency["line"])
    for line in dashes:
        part = latency[latency["line"] == line].sort_values("gamma")
        look = drafter_style(part["key"].iloc[0])
        same = latency[latency["key"] == part["key"].iloc[0]]
        value_line(left, part["gamma"], part["overhead"], look, dashed=line != same["line"].iloc[0])
        ends.append((float(part["gamma"].iloc[-1]), float(part["overhead"].iloc[-1]), str(line), look.color))
    paper = paper[paper["drafter"] != "dflash"]
    for key, part in paper.groupby("drafter", sort=False):
        value_line(right, part["gamma"], part["overhead"], drafter_style(str(key)), hollow=True)
    for ax, sizes in ((left, latency["gamma"]), (right, paper["gamma"])):
        whole_ticks(ax, sizes)
        ax.set_xlabel("block size gamma")
        ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    left.set_ylabel("round / round without the head - 1")
    right.set_ylabel("round / DFlash's round - 1")
    panel_title(left, f"Measured: {devices}")
    panel_title(right, f"Published: {PAPER_TARGET}, whole round")
    # Names lie over the panels' right margins: both have room there.
    for ax, share in ((left, 0.48), (right, 0.28)):
        low, high = ax.get_xlim()
        ax.set_xlim(low, high + share * (high - low))
    end_labels(left, ends, at=float(latency["gamma"].max()))
    label_lines(right, paper, "gamma", "overhead", float(paper["gamma"].max()))
    save_figure(fig, out, "sequential_head")


if __name__ == "__main__":
    run_main(main)
