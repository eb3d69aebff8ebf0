"""Do a drafter's confidences mean what they say, before and after Sequential Temperature Scaling (STS)?

At draft position k the *cumulative* confidence c_1 ... c_k is held against the event "the first k drafts were
accepted", over all blocks (paper, arXiv 2607.05147, Fig. 6): reliability diagrams, calibration error (ECE, 20 equal
bins), discrimination (AUC) and the histogram of the prediction. "Before" has all temperatures 1; "after" has those of
the bank's header, which were fitted on other prompts, or those of --temperatures. The paper's figure (Qwen3-4B on
Alpaca) stands below.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from dsim.drafts import read_temperatures, recalibrated
from dsim.drafts.reliability import RELIABILITY_BINS, Reliability, reliability_table
from dsim.errors import InputError
from dsim.figures_drafts import (
    ALL,
    PAPER_TARGET,
    drafter_style,
    histogram_axes,
    one_title_a_column,
    reliability_axes,
    row_name,
    share_limits,
    text_in,
)
from dsim.plotstyle import SOFT, caption, legend, new_figure, save_figure
from dsim.published import published
from experiments._banks import (
    VISITED,
    Opened,
    add_bank,
    add_blocks,
    bank_parser,
    blocks_note,
    kinds,
    open_bank,
    provenance,
    targets,
)
from experiments._common import print_table, run_main, staged_output, write_csv, written

STAGES = ("before", "after")
#: Positions of the paper's figure.
SHOWN = (1, 3, 5, 7)
#: Bins with fewer blocks are drawn faint.
FEW = 10


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = bank_parser(__doc__, "results/reliability", intervals=False)
    add_bank(cli)
    cli.add_argument(
        "--temperatures",
        metavar="FILE.json",
        type=Path,
        help='try these instead of the bank\'s: {"temperatures": [one a position]}, as engines read them',
    )
    cli.add_argument("--domain", metavar="NAME", help="draw only this domain's blocks (default: all blocks, pooled)")
    add_blocks(cli)
    return cli


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files."""
    args = options().parse_args(argv)
    one = open_bank(args.bank)
    shown = ALL if args.domain is None else args.domain
    if shown not in (ALL, *one.domains):
        raise InputError(field="--domain", value=shown, expected=f"one of {', '.join(one.domains)}")
    if args.temperatures is not None:
        after = read_temperatures(args.temperatures, one.gamma)
    else:
        after = one.bank.header.temperatures
    stages = {
        "before": replace(one, bank=recalibrated(one.bank, np.ones(one.gamma))),
        "after": replace(one, bank=recalibrated(one.bank, after)),
    }
    found = {stage: measure(other, blocks=args.blocks) for stage, other in stages.items()}
    table = position_table(one, found, after)
    with staged_output(args.out) as out:
        report(table, shown, unchanged=all(value == 1 for value in after))
        write_csv(table, out / "reliability.csv")
        write_csv(bin_table(found), out / "reliability_bins.csv")
        draw(one, found, shown, args, out)
        written(out)
    print(f"written to {args.out}")


Measured = dict[str, tuple[tuple[Reliability, ...], tuple[float, ...]]]


def measure(one: Opened, *, blocks: str = VISITED) -> Measured:
    """Reliability by position for each domain and for all blocks pooled (`ALL`).

    Returns
    -------
    {domain: (reliability by position, ECE by position against the known acceptance probabilities)}
        The second has the product alpha_1 ... alpha_k in place of the outcome: the same expectation, less noise.
    """
    rows = one.rows(blocks)
    owner = one.text_domain()[one.texts()[np.searchsorted(one.bank.bounds, rows, side="right") - 1]]
    parts = {name: rows[owner == i] for i, name in enumerate(one.domains)} | {ALL: rows}
    found = {}
    for name, own in parts.items():
        confidence, accepted = one.bank.confidence[own], one.bank.accepted[own]
        exact = reliability_table(confidence, accepted, alpha=one.bank.alpha_bytes[own] / 255.0)
        found[name] = (reliability_table(confidence, accepted), tuple(entry.ece for entry in exact))
    return found


def chance(entry: Reliability) -> float:
    """About the ECE that outcomes drawn with exactly the predicted chances would have: noise, not error.

    The mean of |N(0, s)| is s sqrt(2 / pi), with s of a bin's mean outcome. Blocks count as independent, which those
    of one text are not quite: the true floor is a little higher.
    """
    held = entry.counts > 0
    blocks, p = entry.counts[held], entry.predicted[held]
    return float(np.sum(np.sqrt(2 / np.pi * blocks * p * (1 - p))) / blocks.sum())


def position_table(one: Opened, found: Mapping[str, Measured], after: Sequence[float]) -> pd.DataFrame:
    """One row a domain, stage and position."""
    paper = published("paper_fig6_ece_auc").set_index("position")
    rows = []
    for name in (*one.domains, ALL):
        for stage in STAGES:
            table, exact = found[stage][name]
            for k, entry in enumerate(table):
                known = entry.position in paper.index
                rows.append(
                    {
                        "bank": one.name,
                        "domain": name,
                        "stage": stage,
                        "position": entry.position,
                        "temperature": 1.0 if stage == "before" else after[k],
                        "blocks": int(entry.counts.sum()),
                        "accepted_blocks": round(entry.observed_mean * int(entry.counts.sum())),
                        "ece": entry.ece,
                        "ece_chance": chance(entry),
                        "ece_expected": exact[k],
                        "auc": entry.auc,
                        "predicted_mean": entry.predicted_mean,
                        "observed_mean": entry.observed_mean,
                        "published_ece": paper.loc[entry.position, f"ece_{stage}_pct"] / 100 if known else np.nan,
                        "published_auc": paper.loc[entry.position, "auc"] if known else np.nan,
                        "drafts_source": one.source,
                    }
                )
    return pd.DataFrame(rows)


def bin_table(found: Mapping[str, Measured]) -> pd.DataFrame:
    """The diagrams and histograms: one row a domain, stage, position and bin that holds blocks."""
    rows = []
    for stage in STAGES:
        for name, (table, _) in found[stage].items():
            for entry in table:
                for i in np.flatnonzero(entry.counts):
                    rows.append(
                        {
                            "domain": name,
                            "stage": stage,
                            "position": entry.position,
                            "bin_low": round(int(i) / RELIABILITY_BINS, 9),
                            "blocks": int(entry.counts[i]),
                            "predicted": entry.predicted[i],
                            "observed": entry.observed[i],
                        }
                    )
    return pd.DataFrame(rows)


def report(table: pd.DataFrame, domain: str, *, unchanged: bool) -> None:
    """The table for the terminal: a row a position, before and after side by side."""
    part = table[table["domain"] == domain]
    before, after = (part[part["stage"] == stage].set_index("position") for stage in STAGES)
    shown = pd.DataFrame(
        {
            "position": after.index,
            "T": after["temperature"].to_numpy(),
            "accepted": after["observed_mean"].to_numpy(),
            "ECE before %": 100 * before["ece"].to_numpy(),
            "ECE after %": 100 * after["ece"].to_numpy(),
            "chance %": 100 * after["ece_chance"].to_numpy(),
            "AUC before": before["auc"].to_numpy(),
            "AUC after": after["auc"].to_numpy(),
            "paper: before %": 100 * before["published_ece"].to_numpy(),
            "after %": 100 * after["published_ece"].to_numpy(),
            "AUC": after["published_auc"].to_numpy(),
        }
    )
    print(
        f"cumulative confidence against 'the first k drafts were accepted'; blocks: {domain}, {after['blocks'].iloc[0]}"
    )
    print_table(shown, digits=3)
    means = [(stage, 100 * frame["ece"].mean()) for stage, frame in (("before", before), ("after", after))]
    print("mean ECE over positions: " + ", ".join(f"{stage} {value:.2f} %" for stage, value in means))
    print("chance: about the ECE of exactly calibrated confidences with as many blocks")
    if unchanged:
        print("all temperatures are 1: after is before")


def draw(one: Opened, found: Mapping[str, Measured], domain: str, args: argparse.Namespace, out: Path) -> None:
    """Diagrams and histograms at positions 1, 3, 5, 7: ours above, the paper's below."""
    positions = [k for k in SHOWN if k <= one.gamma]
    color = drafter_style(one.drafter).color
    fig, axes = new_figure(
        len(positions),
        4,
        width=2.1 * len(positions) + 0.9,
        height=7.8,
        title=f"Reliability of confidences: {one.label}" + ("" if domain == ALL else f", {domain}"),
    )
    whose = "All domains, pooled" if domain == ALL else f"Domain {domain}"
    used = "temperatures of --temperatures" if args.temperatures is not None else "the bank's temperatures"
    caption(
        fig,
        f"{provenance([one])} {blocks_note(args.blocks)} {whose}. Before: temperatures 1; after: {used}. 20 equal "
        f"bins; those with fewer than {FEW} blocks faint and not joined. Below: the paper's Fig. 6 (published; "
        f"{PAPER_TARGET} on Alpaca, T = 1). Histograms: after.",
    )
    axes[0, 0].get_gridspec().set_height_ratios([3, 1, 3, 1])
    one_title_a_column(axes, [f"Position {k}" for k in positions])
    diagrams = published("paper_fig6")
    bars = published("paper_fig6_hist")
    numbers = published("paper_fig6_ece_auc").set_index("position")
    edges = np.arange(RELIABILITY_BINS) / RELIABILITY_BINS
    for i, k in enumerate(positions):
        before, after = (found[stage][domain][0][k - 1] for stage in STAGES)
        reliability_axes(
            axes[0, i],
            [
                ("before", before.predicted, before.observed, before.counts, SOFT, False),
                ("after", after.predicted, after.observed, after.counts, color, False),
            ],
            few=FEW,
        )
        text_in(axes[0, i], numbers_text(before.ece, after.ece, after.auc))
        histogram_axes(axes[1, i], edges, after.counts / after.counts.sum(), color)
        own = diagrams[diagrams["position"] == k]
        lines = [own[own["stage"] == stage] for stage in STAGES]
        reliability_axes(
            axes[2, i],
            [
                (stage, line["predicted"], line["observed"], None, tint, True)
                for stage, line, tint in zip(STAGES, lines, (SOFT, color), strict=True)
            ],
        )
        row = numbers.loc[k]
        text_in(axes[2, i], numbers_text(row["ece_before_pct"] / 100, row["ece_after_pct"] / 100, row["auc"]))
        own = bars[bars["position"] == k]
        shares = np.zeros(RELIABILITY_BINS)
        shares[np.round(own["bin_lo"].to_numpy() * RELIABILITY_BINS).astype(int)] = own["fraction"]
        histogram_axes(axes[3, i], edges, shares, color, hollow=True)
        axes[3, i].set_xlabel("predicted, c_1 ... c_k" if k > 1 else "predicted, c_1")
    row_name(axes[0, 0], f"{kinds([one])}:\n{targets([one], brief=True)}", "observed share accepted")
    row_name(axes[2, 0], f"published:\n{PAPER_TARGET}, Alpaca, T = 1", "observed share accepted")
    for r in (1, 3):
        axes[r, 0].set_ylabel("blocks")
    for r, row in enumerate(axes):
        share_limits(row, low=0.0 if r % 2 else None)
    for r in (0, 2):
        legend(axes[r, -1], "lower right")
    save_figure(fig, out, "reliability")


def numbers_text(before: float, after: float, auc: float) -> str:
    """ECE before and after, and AUC, for a panel."""
    return f"ECE {100 * before:.1f} → {100 * after:.1f} %\nAUC {'-' if np.isnan(auc) else f'{auc:.2f}'}"


if __name__ == "__main__":
    run_main(main)
