"""What does a static confidence threshold keep, and what does it lose?

Sweeps the threshold t of the policy `threshold` from 0 to 1 over a draft bank: drafts are verified for as long as their
confidence is at least t. Every threshold is replayed on its own, text by text, exactly as the simulator would: the
policy itself decides, and the next block starts behind the accepted drafts and the bonus token. Charts accepted and
rejected tokens a round and the acceptance rate (accepted + 1) / (verified + 1), beside the curves of the paper's Fig. 5
(arXiv 2607.05147; Qwen3-4B, T = 1).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsim.figures_drafts import (
    PAPER_TARGET,
    DrafterStyle,
    comparable,
    drafter_style,
    end_labels,
    one_title_a_column,
    published_sweep,
    room_at_right,
    row_name,
    share_limits,
    sweep_line,
)
from dsim.plotstyle import SOFT, caption, new_figure, save_figure
from dsim.policy import make_view
from experiments._banks import (
    Opened,
    add_bank,
    bank_parser,
    domain_names,
    enough_texts,
    interval,
    open_bank,
    provenance,
    ratio,
    resampled,
    sums_by_text,
    title,
    with_all,
)
from experiments._common import positive_int, print_table, run_main, staged_output, write_csv, written
from policies.threshold import SIGNALS, Threshold

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: What is measured at each threshold, a round (one draft and one verification); the rates are shares.
QUANTITIES = ("accepted", "rejected", "verified", "tau", "acceptance_rate")
RATE = "acceptance_rate"


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = bank_parser(__doc__, "results/threshold_sweep")
    add_bank(cli)
    cli.add_argument(
        "--on",
        choices=SIGNALS,
        default=SIGNALS[0],
        help="what is compared with the threshold: the confidence of each draft, given those before it, or their "
        "product (default: %(default)s)",
    )
    cli.add_argument(
        "--steps",
        metavar="N",
        type=positive_int,
        default=40,
        help="thresholds are 0, 1/N, ..., 1 (default: %(default)s)",
    )
    return cli


def verify_lengths(one: Opened, t: float, on: str = SIGNALS[0]) -> IntArray:
    """int64[N]: drafts of each row that the policy `threshold` verifies."""
    confidence = one.bank.confidence
    view = make_view(confidence, verify_ms=np.ones(len(confidence) + confidence.size + 1))
    return Threshold(t=t, on=on).plan(view)


def sweep(
    one: Opened, thresholds: Sequence[float], *, on: str = SIGNALS[0], resamples: int = 2000, seed: int = 0
) -> FloatArray:
    """Replay every threshold.

    Returns
    -------
    float64[1 + resamples, domains + 1, thresholds, 5]
        `QUANTITIES`; the values, then resamples over texts. The mean over domains (last) is the mean of the domains'
        values, of the rate too.
    """
    accepted, sums = one.bank.accepted, []
    for t in thresholds:
        lengths = verify_lengths(one, t, on)
        kept = np.minimum(accepted, lengths)
        rows = one.rows(stops=kept)
        sums.append(sums_by_text(one, rows, np.stack([np.ones(rows.size), kept[rows], lengths[rows]], axis=1)))
    drawn = resampled(one, np.concatenate(sums, axis=1), resamples=resamples, seed=seed)
    counts = drawn.reshape(*drawn.shape[:2], len(thresholds), 3)
    rounds, kept, verified = (counts[..., i] for i in range(3))
    found = [
        ratio(kept, rounds),
        ratio(verified - kept, rounds),
        ratio(verified, rounds),
        ratio(kept + rounds, rounds),
        ratio(kept + rounds, verified + rounds),
    ]
    return with_all(np.stack(found, axis=-1))


def main(argv: Sequence[str] | None = None) -> None:
    """Replay, print the table, write the files."""
    args = options().parse_args(argv)
    one = open_bank(args.bank)
    thresholds = [round(i / args.steps, 9) for i in range(args.steps + 1)]
    found = sweep(one, thresholds, on=args.on, resamples=args.resamples, seed=args.seed)
    table = sweep_table(one, thresholds, found, args.on)
    with staged_output(args.out) as out:
        report(table)
        write_csv(table, out / "threshold_sweep.csv")
        draw(one, table, args, out)
        written(out)
    print(f"written to {args.out}")


def sweep_table(one: Opened, thresholds: Sequence[float], found: FloatArray, on: str) -> pd.DataFrame:
    """One row a domain and threshold."""
    low, high = interval(found, enough_texts(one))
    known = comparable(published_sweep(), one.domains)
    rows = []
    for i, domain in enumerate(domain_names(one)):
        paper = known[known["domain"] == domain]
        for j, t in enumerate(thresholds):
            row: dict[str, object] = {"domain": domain, "on": on, "threshold": t}
            for q, name in enumerate(QUANTITIES):
                row[name] = found[0, i, j, q]
                if name in ("tau", "acceptance_rate"):
                    row |= {f"{name}_low": low[i, j, q], f"{name}_high": high[i, j, q]}
            there = paper[np.isclose(paper["threshold"], t)]
            for name in ("tau", "rejected", "acceptance_rate"):
                row[f"published_{name}"] = float(there[name].iloc[0]) if len(there) else np.nan
            rows.append(row | {"drafts_source": one.source})
    return pd.DataFrame(rows)


def report(table: pd.DataFrame) -> None:
    """The table for the terminal: tenths, or all of a coarser sweep."""
    tenths = table[np.isclose(table["threshold"] * 10, np.round(table["threshold"] * 10))]
    shown = table if table["threshold"].nunique() <= 11 else tenths
    print("a round: accepted and rejected drafts, tau = accepted + 1; acceptance rate (accepted + 1) / (verified + 1)")
    names = ["domain", "threshold", *QUANTITIES, "published_tau", "published_rejected", "published_acceptance_rate"]
    print_table(shown[names], digits=4)


def draw(one: Opened, table: pd.DataFrame, args: argparse.Namespace, out: Path) -> None:
    """A column a domain: tokens a round above, acceptance rate below."""
    names = domain_names(one)
    look, known = drafter_style(one.drafter), comparable(published_sweep(), one.domains)
    fig, axes = new_figure(
        len(names),
        2,
        width=2.05 * len(names) + 1.2,
        height=5.4,
        title=f"Sweep of a static threshold on the {args.on}: {one.label}",
    )
    caption(
        fig,
        f"{provenance([one])} Solid: every threshold replayed text by text (policy threshold, on = {args.on}, "
        f"confidences with the bank's temperatures); bands: 95 % intervals, {args.resamples:,} bootstrap resamples of "
        "the texts; the mean weighs domains equally. Dotted, hollow: the paper's Fig. 5 (published; "
        f"{PAPER_TARGET}, T = 1, blocks of 7; GSM8K, HumanEval and MT-Bench).",
    )
    one_title_a_column(axes, [title(name) for name in names])
    grey = DrafterStyle("rejected", SOFT, "s")
    for i, name in enumerate(names):
        part, paper = table[table["domain"] == name], known[known["domain"] == name]
        for ax, column, style in ((axes[0, i], "tau", look), (axes[0, i], "rejected", grey), (axes[1, i], RATE, look)):
            bars = (part[f"{column}_low"], part[f"{column}_high"]) if f"{column}_low" in part else None
            sweep_line(ax, part["threshold"], part[column], style, band=bars)
            sweep_line(ax, paper["threshold"], paper[column], style, hollow=True)
        axes[1, i].set_xlabel("threshold t")
        for ax in axes[:, i]:
            ax.set_xlim(-0.02, 1.02)
            ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
        axes[1, i].yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    row_name(axes[0, 0], "tokens a round", "accepted (with bonus), rejected")
    row_name(axes[1, 0], "acceptance rate", "(accepted + 1) / (verified + 1)")
    share_limits(axes[0], low=-0.1)
    share_limits(axes[1], high=1.02)
    room_at_right(fig, 1.05)
    last = table[table["domain"] == names[-1]].iloc[-1]
    paper = known[known["domain"] == names[-1]]
    ends = [
        (axes[0, -1], "tau", "accepted", look.color),
        (axes[0, -1], "rejected", "rejected", SOFT),
        (axes[1, -1], RATE, "rate", look.color),
    ]
    for ax in axes[:, -1]:
        labels = [
            (1.0, float(last[column]), f"{words}, here", color) for own, column, words, color in ends if own is ax
        ]
        if len(paper):
            end = paper.iloc[-1]
            labels += [
                (float(end["threshold"]), float(end[column]), f"{words}, paper", color)
                for own, column, words, color in ends
                if own is ax
            ]
        end_labels(ax, labels, at=1.0)
    save_figure(fig, out, "threshold_sweep")


if __name__ == "__main__":
    run_main(main)
