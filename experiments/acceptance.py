"""How much of a draft does the target accept, by position, domain and drafter?

Compares recorded draft banks: conditional acceptance by draft position (paper, arXiv 2607.05147, Fig. 2) and accepted
length (Table 1), each beside the published curve. The paper's target is Qwen3-4B at temperature 1, so shapes and
ratios between drafters compare, levels do not.

Acceptance at position k is the mean of alpha_k (the target's acceptance probability of the drafted token) over the
blocks whose first k - 1 drafts were accepted; the share that *was* accepted stands beside it in the CSV. The accepted
length tau is 1 + the mean number of accepted drafts (the bonus token counts).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsim.errors import InputError
from dsim.figures_drafts import (
    ALL,
    DRAFTERS,
    PAPER_TARGET,
    comparable,
    drafter_key,
    drafter_style,
    end_labels,
    grouped_points,
    one_title_a_column,
    positions_axes,
    published_acceptance,
    published_lengths,
    room_at_right,
    row_name,
    share_limits,
    value_line,
)
from dsim.plotstyle import SOFT, caption, new_figure, panel_title, save_figure
from experiments._banks import (
    MIN_BLOCKS,
    VISITED,
    Opened,
    add_blocks,
    bank_parser,
    blocks_note,
    domain_names,
    enough_texts,
    interval,
    interval_note,
    kinds,
    open_banks,
    provenance,
    ratio,
    resampled,
    shipped_or_given,
    sums_by_text,
    targets,
    title,
    training_note,
    with_all,
)
from experiments._common import print_table, run_main, staged_output, write_csv, written

FloatArray = npt.NDArray[np.float64]
#: Columns of `comparisons.csv` that say how much the two drafters were trained; empty where a bank does not say.
ANCHORS = ["anchors", "against_anchors"]


@dataclass(frozen=True, eq=False)
class Acceptance:
    """One bank's acceptance; index 0 of the first axis is the value, the rest are resamples.

    Attributes
    ----------
    conditional, outcome
        float64[1 + resamples, domains + 1, gamma]: mean alpha_k, and share accepted, given that k - 1 were.
    tau
        float64[1 + resamples, domains + 1].
    blocks
        int64[domains + 1, gamma + 1]: blocks whose first k drafts were accepted (0: all blocks).
    """

    conditional: FloatArray
    outcome: FloatArray
    tau: FloatArray
    blocks: npt.NDArray[np.int64]


def measure(one: Opened, *, blocks: str = VISITED, resamples: int = 2000, seed: int = 0) -> Acceptance:
    """Acceptance of a bank with resamples over its texts.

    Parameters
    ----------
    blocks
        ``visited`` or ``all``: see `Opened.rows`.
    """
    gamma = one.gamma
    rows = one.rows(blocks)
    accepted = one.bank.accepted[rows]
    # reached[:, k]: the first k drafts were accepted.
    reached = accepted[:, None] >= np.arange(gamma + 1)
    alpha = one.bank.alpha_bytes[rows] / 255.0 * reached[:, :-1]
    sums = sums_by_text(one, rows, np.concatenate([reached, alpha], axis=1))
    drawn = resampled(one, sums, resamples=resamples, seed=seed)
    counts, alphas = drawn[:, :, : gamma + 1], drawn[:, :, gamma + 1 :]
    tau = 1 + ratio(counts[:, :, 1:].sum(axis=2), counts[:, :, 0])
    found = counts[0].round().astype(np.int64)
    return Acceptance(
        conditional=with_all(ratio(alphas, counts[:, :, :-1])),
        outcome=with_all(ratio(counts[:, :, 1:], counts[:, :, :-1])),
        tau=with_all(tau),
        blocks=np.concatenate([found, found.sum(axis=0, keepdims=True)]),
    )


def last_reached(*found: Acceptance) -> int:
    """The last position that every domain of each reaches in `MIN_BLOCKS` blocks or more; 0: not even the first."""
    # Fewer blocks get to k + 1 than to k.
    return min(int((got.blocks[:-1, :-1].min(axis=0) >= MIN_BLOCKS).sum()) for got in found)


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = bank_parser(__doc__, "results/acceptance")
    cli.add_argument(
        "--banks",
        metavar="A,B,...",
        help="names of shipped banks or paths of others' .npz, in the order of the figure (default: all that dsim "
        "ships)",
    )
    cli.add_argument(
        "--reference",
        metavar="BANK",
        help="the bank that others are compared with in the figure (default: the first DFlash among them, or the last)",
    )
    add_blocks(cli)
    return cli


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the files."""
    args = options().parse_args(argv)
    banks = open_banks(shipped_or_given(args.banks))
    reference = reference_of(banks, args.reference)
    found = [measure(one, blocks=args.blocks, resamples=args.resamples, seed=args.seed) for one in banks]
    curves, lengths = curve_table(banks, found), length_table(banks, found)
    pairs = pair_table(banks, found)
    with staged_output(args.out) as out:
        report(banks, curves, lengths, pairs, reference)
        write_csv(curves, out / "acceptance.csv")
        write_csv(lengths, out / "accepted_length.csv")
        if len(banks) > 1:
            write_csv(pairs, out / "comparisons.csv")
        sentences = (provenance(banks), training_note(banks), blocks_note(args.blocks), interval_note(args.resamples))
        notes = " ".join(sentence for sentence in sentences if sentence)
        draw_curves(banks, curves, f"{notes} {few_blocks_note(banks, found)}".rstrip(), out)
        draw_lengths(banks, lengths, pairs, reference, f"{notes} {pairs_note(banks, reference)}".rstrip(), out)
        written(out)
    print(f"written to {args.out}")


def reference_of(banks: Sequence[Opened], name: str | None) -> Opened:
    """The bank of that name; without one the first DFlash, or the last bank."""
    if name is None:
        return next((one for one in banks if one.drafter == "dflash"), banks[-1])
    for one in banks:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in banks)
    raise InputError(field="--reference", value=name, expected=f"one of the banks: {known}")


def pairs_note(banks: Sequence[Opened], reference: Opened) -> str:
    """Which of the banks are compared text by text."""
    apart = [one.label for one in banks if one.group != reference.group]
    if not apart:
        return "Ratios are paired: all drafters on the same texts." if len(banks) > 1 else ""
    return f"Ratios are paired, on the same texts; {', '.join(apart)}: other texts, no ratio drawn."


def few_blocks_note(banks: Sequence[Opened], found: Sequence[Acceptance]) -> str:
    """From which position on a curve stands on few blocks, by drafter; empty where none does."""
    parts = []
    lasts = [last_reached(got) for got in found]
    for last in sorted(set(lasts)):
        names = [one.label for one, its in zip(banks, lasts, strict=True) if its == last < one.gamma]
        if names:
            parts.append(f"k = {last + 1} ({'; '.join(names)})")
    return f"Fewer than {MIN_BLOCKS} blocks of some domain from {', '.join(parts)}." if parts else ""


# -- tables ----------------------------------------------------------------------------------------------


def curve_table(banks: Sequence[Opened], found: Sequence[Acceptance]) -> pd.DataFrame:
    """One row a bank, domain and position."""
    paper = comparable(published_acceptance(), banks[0].domains)
    known = paper.set_index(["drafter", "domain", "position"])["acceptance"]
    rows = []
    for one, got in zip(banks, found, strict=True):
        enough = enough_texts(one)
        low, high = interval(got.conditional, enough)
        out_low, out_high = interval(got.outcome, enough)
        for i, domain in enumerate(domain_names(one)):
            for k in range(one.gamma):
                rows.append(
                    {
                        "bank": one.name,
                        "drafter": one.label,
                        "domain": domain,
                        "position": k + 1,
                        "acceptance": got.conditional[0, i, k],
                        "low": low[i, k],
                        "high": high[i, k],
                        "outcome": got.outcome[0, i, k],
                        "outcome_low": out_low[i, k],
                        "outcome_high": out_high[i, k],
                        "blocks": got.blocks[i, k],
                        "published": known.get((one.drafter, domain, k + 1), np.nan),
                        "drafts_source": one.source,
                    }
                )
    return pd.DataFrame(rows)


def length_table(banks: Sequence[Opened], found: Sequence[Acceptance]) -> pd.DataFrame:
    """One row a bank and domain."""
    known = comparable(published_lengths(), banks[0].domains).set_index(["drafter", "domain"])["accepted_length"]
    rows = []
    for one, got in zip(banks, found, strict=True):
        low, high = interval(got.tau, enough_texts(one))
        texts = np.bincount(one.text_domain(), minlength=len(one.domains))
        for i, domain in enumerate(domain_names(one)):
            rows.append(
                {
                    "bank": one.name,
                    "drafter": one.label,
                    "gamma": one.gamma,
                    "anchors": one.anchors,
                    "temperature": np.nan if one.temperature is None else one.temperature,
                    "domain": domain,
                    "tau": got.tau[0, i],
                    "low": low[i],
                    "high": high[i],
                    "blocks": got.blocks[i, 0],
                    "texts": texts.sum() if domain == ALL else texts[i],
                    "published": known.get((one.drafter, domain), np.nan),
                    "drafts_source": one.source,
                }
            )
    return pd.DataFrame(rows)


def pair_table(banks: Sequence[Opened], found: Sequence[Acceptance]) -> pd.DataFrame:
    """One row an ordered pair of banks, domain and metric: the ratio of the first to the second.

    Metrics: ``tau``; ``alpha_1``; ``alpha_rest``, the mean acceptance over positions 2 to the last one that every
    domain of both banks reaches in `MIN_BLOCKS` blocks or more (column ``positions``; no row where that is the first).
    The positions are those of the pair, the same for all domains. Published ratios are those of the drafters in
    Table 1 and Fig. 2, over the same positions.
    """
    rows, paper = [], Published(banks[0].domains)
    for a, one in enumerate(banks):
        for b, other in enumerate(banks):
            if a == b:
                continue
            enough = enough_texts(one, other)
            last = last_reached(found[a], found[b])
            order = [domain_names(other).index(name) for name in domain_names(one)]
            for metric in ("tau", "alpha_1", "alpha_rest"):
                if metric == "alpha_rest" and last < 2:
                    continue
                above, below = (metric_of(got, metric, last) for got in (found[a], found[b]))
                samples = ratio(above, below[:, order])
                low, high = interval(samples, enough)
                known = paper.ratios(one.drafter, other.drafter, metric, last)
                for i, domain in enumerate(domain_names(one)):
                    rows.append(
                        {
                            "bank": one.name,
                            "drafter": one.label,
                            "against": other.name,
                            "against_drafter": other.label,
                            "domain": domain,
                            "metric": metric,
                            "positions": {"tau": "", "alpha_1": "1", "alpha_rest": f"2-{last}"}[metric],
                            "ratio": samples[0, i],
                            "low": low[i],
                            "high": high[i],
                            "paired": one.group == other.group,
                            "anchors": one.anchors,
                            "against_anchors": other.anchors,
                            "published": known.get(domain, np.nan),
                        }
                    )
    columns = ["bank", "drafter", "against", "against_drafter", "domain", "metric", "positions"]
    return pd.DataFrame(rows, columns=[*columns, "ratio", "low", "high", "paired", "published", *ANCHORS])


def metric_of(got: Acceptance, metric: str, last: int) -> FloatArray:
    """float64[1 + resamples, domains + 1]."""
    if metric == "tau":
        return got.tau
    return got.conditional[:, :, 0] if metric == "alpha_1" else got.conditional[:, :, 1:last].mean(axis=2)


class Published:
    """The paper's ratios of two drafters, of Table 1 (tau) and Fig. 2 (alpha), for some domains."""

    def __init__(self, domains: Sequence[str]) -> None:
        self._tau = comparable(published_lengths(), domains).set_index(["drafter", "domain"])["accepted_length"]
        self._alpha = comparable(published_acceptance(), domains)

    def ratios(self, one: str, other: str, metric: str, last: int) -> dict[str, float]:
        """By domain; nothing where the paper has no such drafter, or they are one and the same."""
        if metric == "tau":
            table = self._tau
        else:
            first, end = (1, 1) if metric == "alpha_1" else (2, last)
            part = self._alpha[self._alpha["position"].between(first, end)]
            table = part.groupby(["drafter", "domain"])["acceptance"].mean()
        known = set(table.index.get_level_values("drafter"))
        if one == other or not {one, other} <= known:
            return {}
        return {str(domain): float(value) for domain, value in (table[one] / table[other]).items()}


def report(
    banks: Sequence[Opened], curves: pd.DataFrame, lengths: pd.DataFrame, pairs: pd.DataFrame, reference: Opened
) -> None:
    """The tables for the terminal."""
    print("conditional acceptance by position (mean alpha_k, given that the drafts before were accepted)")
    wide = curves.pivot_table(
        index=["drafter", "domain"], columns="position", values="acceptance", sort=False
    ).reset_index()
    print_table(wide.rename(columns=lambda name: f"k={name}" if isinstance(name, int) else name), digits=3)
    print("\naccepted length tau (bonus token included)")
    shown = with_brackets(lengths)
    print_table(shown[["drafter", "domain", "tau", "interval", "published", "blocks", "texts"]])
    if len(banks) > 1:
        first = banks[0] if banks[0] is not reference else None
        shown = pairs[(pairs["against"] == reference.name) | (pairs["bank"] == (first.name if first else ""))]
        shown = shown[shown["domain"] == ALL]
        shown = with_brackets(shown)
        names = ["drafter", "against_drafter", "metric", "positions", "ratio", "interval"]
        print(
            f"\nratios, domain '{ALL}' (by domain: comparisons.csv; alpha_rest: mean acceptance over the positions "
            f"after the first that every domain of both reaches in {MIN_BLOCKS} blocks or more)"
        )
        print_table(shown[[*names, "published", "paired"]])
        if note := training_note(banks):
            print(note)
    print(f"\n'{ALL}': mean over domains, equally weighted; [..]: 95 % interval over texts; published: {PAPER_TARGET}")


def with_brackets(table: pd.DataFrame) -> pd.DataFrame:
    """The table with a column ``interval``, to read."""
    bounds = zip(table["low"], table["high"], strict=True)
    return table.assign(interval=["-" if np.isnan(low + high) else f"[{low:.3f}, {high:.3f}]" for low, high in bounds])


# -- figures ---------------------------------------------------------------------------------------------


def second_of_its_kind(banks: Sequence[Opened], one: Opened) -> bool:
    """Whether an earlier bank has the same drafter, so that this one is drawn dashed."""
    return any(other.drafter == one.drafter for other in banks[: banks.index(one)])


def draw_curves(banks: Sequence[Opened], curves: pd.DataFrame, notes: str, out: Path) -> None:
    """Conditional acceptance by position: recorded above, published below, a column a domain."""
    names = domain_names(banks[0])
    table = comparable(published_acceptance(), names)
    shown = [name for name in names if name in set(table["domain"])]
    fig, axes = new_figure(
        len(names),
        2 if shown else 1,
        width=2.05 * len(names) + 1.2,
        height=5.6 if shown else 3.2,
        title="Conditional acceptance by draft position",
    )
    caption(
        fig,
        f"{notes} Points: mean alpha_k over blocks whose first k - 1 drafts were accepted; bars may run beyond the "
        f"frame. Below: the paper's Fig. 2 (published; {PAPER_TARGET}, T = 1, share accepted): shapes compare, levels "
        "do not.",
    )
    gamma = max(one.gamma for one in banks)
    one_title_a_column(axes, [title(name) for name in names])
    for i, name in enumerate(names):
        for one in banks:
            part = curves[(curves["bank"] == one.name) & (curves["domain"] == name)]
            value_line(
                axes[0, i],
                part["position"],
                part["acceptance"],
                drafter_style(one.drafter),
                low=part["low"],
                high=part["high"],
                dashed=second_of_its_kind(banks, one),
            )
        positions_axes(axes[0, i], gamma)
        if not shown:
            continue
        for drafter, part in table[table["domain"] == name].groupby("drafter", sort=False):
            value_line(axes[1, i], part["position"], part["acceptance"], drafter_style(str(drafter)), hollow=True)
        positions_axes(axes[1, i], gamma)
        axes[1, i].set_xlabel("draft position k")
    row_name(axes[0, 0], f"{kinds(banks)}:\n{targets(banks, brief=True)}", "acceptance at k, given 1..k-1")
    if shown:
        row_name(axes[1, 0], f"published:\n{PAPER_TARGET}, T = 1", "acceptance at k, given 1..k-1")
    # By the points: an interval at a position that few texts reach would flatten all curves.
    room = 0.06 + 0.1 * float(curves["acceptance"].max() - curves["acceptance"].min())
    low, high = float(curves["acceptance"].min()) - room, float(curves["acceptance"].max()) + room
    share_limits(axes[0], low=max(low, -0.02), high=min(high, 1.02))
    if shown:
        share_limits(axes[1])
    last = curves[(curves["domain"] == names[-1])]
    ends = [last[last["bank"] == one.name].dropna(subset="acceptance").iloc[-1:] for one in banks]
    room_at_right(fig, 1.0)
    end_labels(
        axes[0, -1],
        [
            (float(end["position"].iloc[0]), float(end["acceptance"].iloc[0]), one.label, color_of(one))
            for one, end in zip(banks, ends, strict=True)
            if len(end)
        ],
        # Behind the longest line: the name of a shorter one would stand on it.
        at=float(last["position"].max()),
    )
    if shown:
        last = table[table["domain"] == ALL]
        rows = [part.iloc[-1] for _, part in last.groupby("drafter", sort=False)]
        looks = [drafter_style(str(row["drafter"])) for row in rows]
        end_labels(
            axes[1, -1],
            [
                (row["position"], row["acceptance"], look.label, look.color)
                for row, look in zip(rows, looks, strict=True)
            ],
        )
    save_figure(fig, out, "acceptance")


def color_of(one: Opened) -> str:
    """The drafter's color."""
    return drafter_style(one.drafter).color


def draw_lengths(
    banks: Sequence[Opened], lengths: pd.DataFrame, pairs: pd.DataFrame, reference: Opened, notes: str, out: Path
) -> None:
    """Accepted length: recorded, published, and both as ratios to the reference drafter."""
    names = domain_names(banks[0])
    table = comparable(published_lengths(), names)
    shown = [name for name in names if name in set(table["domain"])]
    others = [one for one in banks if one is not reference and one.group == reference.group]
    panels = 1 + bool(shown) + bool(others)
    heading = "Accepted length: tokens a target pass, bonus included"
    fig, axes = new_figure(panels, width=max(3.05 * panels, 5.2), height=4.0, title=heading)
    caption(
        fig,
        f"{notes} Hollow: the paper's Table 1 (published; {PAPER_TARGET}, T = 1, blocks of 7, mean of the domain's "
        "three benchmarks).",
    )
    recorded = [
        (drafter_style(one.drafter), values(lengths[lengths["bank"] == one.name], "domain", "tau"), False, dashed)
        for one in banks
        for dashed in (second_of_its_kind(banks, one),)
    ]
    ax = axes[0, 0]
    grouped_points(ax, names, recorded)
    ax.set_ylabel("accepted length tau")
    panel_title(ax, f"{kinds(banks).capitalize()}:\n{targets(banks, brief=True)}")
    ax.set_ylim(bottom=1.0)
    ours = {one.drafter for one in banks}
    drafter_key(
        fig,
        [(one.label, drafter_style(one.drafter), second_of_its_kind(banks, one)) for one in banks],
        published=[drafter_style(name) for name in DRAFTERS if name in set(table["drafter"]) - ours and shown],
        kinds=(kinds(banks), "published") if shown else None,
    )
    if shown:
        ax = axes[0, 1]
        grouped_points(
            ax,
            shown,
            [
                (drafter_style(drafter), values(part, "domain", "accepted_length"), True, False)
                for drafter in DRAFTERS
                for part in (table[table["drafter"] == drafter],)
                if len(part)
            ],
        )
        ax.set_ylim(bottom=1.0)
        panel_title(ax, f"Published:\n{PAPER_TARGET}, T = 1")
    if others:
        ax = axes[0, -1]
        ratios = pairs[(pairs["against"] == reference.name) & (pairs["metric"] == "tau")]
        series = []
        for one in others:
            part = ratios[ratios["bank"] == one.name]
            second = second_of_its_kind(banks, one)
            series.append((drafter_style(one.drafter), values(part, "domain", "ratio"), False, second))
            known = part.dropna(subset="published")
            if len(known) and not second:
                series.append((drafter_style(one.drafter), values(known, "domain", "published"), True, False))
        grouped_points(ax, names, series)
        ax.axhline(1.0, color=SOFT, linewidth=0.9, zorder=1.5)
        panel_title(ax, f"Ratio of tau to that\nof {reference.label}")
    save_figure(fig, out, "accepted_length")


def values(part: pd.DataFrame, key: str, value: str) -> dict[str, tuple[float, float, float]]:
    """{group: (value, low, high)}; bars only where the table has them and they belong to the value."""
    bars = value != "published" and {"low", "high"} <= set(part.columns)
    return {
        str(row[key]): (float(row[value]), float(row["low"]), float(row["high"]))
        if bars
        else (float(row[value]), float("nan"), float("nan"))
        for _, row in part.iterrows()
    }


if __name__ == "__main__":
    run_main(main)
