"""What the experiments on draft banks share: opening banks, sums by text, intervals over texts.

The independent unit is a text (a trajectory; where a bank holds several draws of a text, all of them together):
blocks of one text overlap and share its difficulty. Texts are resampled within each domain, banks of the same texts
together, and the mean over domains weighs domains equally.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.drafts import Bank, load_bank, shipped_banks
from dsim.drafts.reliability import visited_rows
from dsim.errors import InputError
from dsim.figures_drafts import ALL, drafter_of, drafter_style
from experiments._common import OneLineParser, positive_int
from experiments._sources import drafter_words

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

#: The banks that dsim ships, in the order of figures; those at another temperature have texts of their own.
SHIPPED = (
    "smollm2-dspark",
    "smollm2-dspark-rnn",
    "smollm2-dflash",
    "smollm2-eagle3",
    "smollm2-mtp5",
    "smollm2-dspark-t1",
)
#: The order of domains in figures and tables; others follow as the bank lists them.
DOMAINS = ("math", "code", "chat")
#: Fewest texts of a domain for an interval.
MIN_TEXTS = 5
#: Fewest blocks of every domain for a position to count in a mean over positions: with 100, the standard error of a
#: share is 0.05 at most, as far as blocks are independent.
MIN_BLOCKS = 100
LEVEL = 0.95
# An interval needs a value in nearly all resamples; a position that hardly any text reaches has none.
_MOST_UNDEFINED = 0.05
VISITED, EVERY = "visited", "all"
TEMPERATURE = "temperature"


@dataclass(frozen=True, eq=False)
class Opened:
    """A bank, and what figures and statistics need to know about it.

    Attributes
    ----------
    name
        As given: a shipped name or a path.
    drafter
        Key of the drafter's look (`dsim.figures_drafts.drafter_style`), or the header's own text.
    label
        What figures call it; distinct in a study.
    temperature
        Of text and drafts; None where the bank does not say.
    draws
        Trajectories a text.
    group
        Banks with the same texts have the same number: they are compared text by text.
    anchors
        Blocks that its drafter was trained on, those of the drafter that it began from included; None where the bank
        does not say.
    """

    name: str
    bank: Bank
    drafter: str
    label: str
    temperature: float | None
    draws: int
    group: int = 0
    anchors: int | None = None

    @property
    def source(self) -> str:
        """The label of the drafts, as in the column ``drafts_source``."""
        header = self.bank.header
        return f"{header.kind}:{header.source}:{header.drafter}"

    @property
    def gamma(self) -> int:
        """Drafted tokens a block."""
        return self.bank.header.gamma

    @property
    def domains(self) -> tuple[str, ...]:
        """The bank's domains in the order of figures."""
        return domain_order(self.bank.header.domains)

    def texts(self) -> IntArray:
        """int64[T]: the text of each trajectory."""
        return np.arange(self.bank.domain.size, dtype=np.int64) // self.draws

    def text_domain(self) -> IntArray:
        """int64[texts]: index of each text's domain in `domains`."""
        order = np.array([self.domains.index(name) for name in self.bank.header.domains])
        return np.asarray(order[self.bank.domain[:: self.draws]], dtype=np.int64)

    def rows(self, which: str = VISITED, stops: npt.NDArray[np.integer[Any]] | None = None) -> IntArray:
        """int64[n]: rows of the blocks that decoding comes by, or of all positions that replay uses.

        Parameters
        ----------
        which
            ``visited`` (from each text's start, accepted + 1 tokens a step) or ``all``.
        stops
            [N] tokens accepted of each block, where not the whole block is verified.
        """
        bank = self.bank
        usable = bank.usable()
        if which == VISITED:
            return visited_rows(bank.accepted if stops is None else stops, bank.bounds, usable)
        return np.concatenate([np.arange(a, a + n) for a, n in zip(bank.bounds[:-1], usable, strict=True)])


def domain_order(names: Sequence[str]) -> tuple[str, ...]:
    """Math, code and chat first, others behind them as they come."""
    return tuple(sorted(names, key=lambda name: DOMAINS.index(name) if name in DOMAINS else len(DOMAINS)))


def open_bank(name: str) -> Opened:
    """A shipped bank by name, or another one by the path of its file."""
    bank = load_bank(name)
    notes = _notes(bank)
    temperature, draws = notes.get(TEMPERATURE), notes.get("draws")
    known = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    several = type(draws) is int and draws > 0 and bank.domain.size % draws == 0 and _repeated(bank, draws)
    drafter = drafter_of(bank.header.drafter) or drafter_of(Path(name).stem) or bank.header.drafter
    return Opened(
        name=name,
        bank=bank,
        drafter=drafter,
        label=drafter_style(drafter).label,
        temperature=float(temperature) if known else None,  # type: ignore[arg-type]
        draws=draws if several else 1,  # type: ignore[arg-type]
        anchors=_anchors(notes),
    )


def _notes(bank: Bank) -> dict[str, Any]:
    """What the recorder wrote down; empty for any other text."""
    try:
        found = json.loads(bank.header.notes)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _anchors(notes: dict[str, Any]) -> int | None:
    """Anchors in the notes, with those of the drafter that the training began from; None where they are not told."""
    began = notes.get("started_from", {"anchors": 0})
    found = (notes.get("anchors"), began.get("anchors") if isinstance(began, dict) else None)
    return sum(found) if all(type(count) is int for count in found) else None  # type: ignore[arg-type]


def _repeated(bank: Bank, draws: int) -> bool:
    """Whether each run of `draws` trajectories can be one text: equally long, of one domain."""
    lengths, domain = np.diff(bank.bounds).reshape(-1, draws), bank.domain.reshape(-1, draws)
    return bool(np.all(lengths == lengths[:, :1]) and np.all(domain == domain[:, :1]))


def open_banks(names: Sequence[str]) -> list[Opened]:
    """Banks to compare: distinct labels, and one group number for those that share their texts.

    Raises
    ------
    InputError
        No such bank, a bank twice, or banks of different domains.
    """
    found: list[Opened] = []
    for name in names:
        if names.count(name) > 1:
            raise InputError(field="--banks", value=name, expected="each bank once")
        new = open_bank(name)
        if found and set(new.domains) != set(found[0].domains):
            raise InputError(
                f"has other domains than {found[0].name}",
                file=name,
                field="domains",
                value=list(new.domains),
                expected=", ".join(found[0].domains),
            )
        like = [other.group for other in found if same_texts(other, new)]
        group = like[0] if like else len({other.group for other in found})
        found.append(replace(new, group=group))
    if not found:
        raise InputError(field="--banks", value="", expected="at least one bank")
    return _labeled(found)


def same_texts(a: Opened, b: Opened) -> bool:
    """Whether two banks were recorded on the same texts, as far as lengths, domains, target and temperature tell."""
    x, y = a.bank, b.bank
    return (
        x.header.target == y.header.target
        and a.temperature == b.temperature
        and a.draws == b.draws
        and np.array_equal(x.bounds, y.bounds)
        and np.array_equal(a.text_domain(), b.text_domain())
    )


def _labeled(banks: list[Opened]) -> list[Opened]:
    """Labels made distinct by the temperature, or by the bank's name."""
    labeled = []
    for one in banks:
        alike = [other for other in banks if other.label == one.label]
        temperatures = {other.temperature for other in alike}
        label = one.label
        if len(alike) > 1:
            distinct = len(temperatures) == len(alike) and None not in temperatures
            label += f", T = {one.temperature:g}" if distinct else f" ({Path(one.name).stem})"
        labeled.append(replace(one, label=label))
    names = [one.label for one in labeled]
    return [
        replace(one, label=f"{one.label} #{i + 1}") if names.count(one.label) > 1 else one
        for i, one in enumerate(labeled)
    ]


# -- command line ----------------------------------------------------------------------------------------


def bank_parser(description: str, out: str, *, intervals: bool = True, banks: bool = True) -> argparse.ArgumentParser:
    """A parser with ``--out``, and for intervals ``--resamples`` and ``--seed``; its help lists the shipped banks."""
    cli = OneLineParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"shipped banks: {', '.join(shipped_banks()) or 'none'}" if banks else None,
    )
    cli.add_argument(
        "--out", metavar="DIR", type=Path, default=Path(out), help="folder for the results (default: %(default)s)"
    )
    if not intervals:
        return cli
    cli.add_argument(
        "--resamples",
        metavar="N",
        type=positive_int,
        default=2000,
        help="bootstrap resamples of the texts for the 95 %% intervals (default: %(default)s)",
    )
    cli.add_argument("--seed", metavar="N", type=int, default=0, help="of the resampling (default: %(default)s)")
    return cli


def add_bank(cli: argparse.ArgumentParser) -> None:
    """The option ``--bank``: one bank."""
    cli.add_argument(
        "--bank",
        metavar="BANK",
        default=SHIPPED[0],
        help="name of a shipped bank, or the path of another one's .npz (default: %(default)s)",
    )


def add_blocks(cli: argparse.ArgumentParser) -> None:
    """The option ``--blocks``: which rows count."""
    cli.add_argument(
        "--blocks",
        choices=(VISITED, EVERY),
        default=VISITED,
        help="blocks that decoding with full verification comes by, as in published figures, or those at all "
        "positions that replay may use (default: %(default)s)",
    )


def shipped_or_given(given: str | None) -> list[str]:
    """Names of ``--banks A,B,...``; without it the shipped ones, in the order of figures."""
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    there = shipped_banks()
    names = [name for name in SHIPPED if name in there]
    if not names:
        raise InputError("no bank is shipped", field="--banks", expected="paths of banks' .npz files, with commas")
    return names


# -- statistics ------------------------------------------------------------------------------------------


def sums_by_text(opened: Opened, rows: IntArray, values: npt.NDArray[Any]) -> FloatArray:
    """float64[texts, K]: sums of `values` [n, K] over the rows of each text."""
    bank = opened.bank
    trajectory = np.searchsorted(bank.bounds, rows, side="right") - 1
    text = opened.texts()[trajectory]
    many = bank.domain.size // opened.draws
    return np.stack([np.bincount(text, np.asarray(column, dtype=np.float64), many) for column in values.T], axis=1)


def resampled(opened: Opened, sums: FloatArray, *, resamples: int, seed: int) -> FloatArray:
    """float64[1 + resamples, domains, K]: sums over all texts (first), then over texts drawn with replacement.

    Texts are drawn within each domain. The draws are keyed by (seed, group, domain), so that banks of one group draw
    the same texts: a ratio of two of them, resample by resample, is paired. Banks of different groups are
    independent.
    """
    return resampled_sums(sums, opened.text_domain(), len(opened.domains), resamples, (seed, opened.group))


def resampled_sums(
    sums: FloatArray, domain: npt.NDArray[np.int64], domains: int, resamples: int, key: Sequence[int]
) -> FloatArray:
    """float64[1 + resamples, domains, K]: as `resampled`, of sums [T, K] by text whose domains are `domain` [T]."""
    found = np.empty((1 + resamples, domains, sums.shape[1]))
    for i in range(domains):
        own = sums[domain == i]
        rng = np.random.default_rng(np.random.SeedSequence([*key, i]))
        found[0, i] = own.sum(axis=0)
        for start in range(0, resamples, 256):  # 256 at a time: the counts of many texts take room
            many = min(256, resamples - start)
            counts = rng.multinomial(own.shape[0], np.full(own.shape[0], 1 / own.shape[0]), size=many)
            found[1 + start : 1 + start + many, i] = counts @ own
    return found


def ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    """Quotient, NaN where nothing is counted."""
    return np.divide(above, below, out=np.full(np.broadcast(above, below).shape, np.nan), where=below > 0)


def with_all(values: FloatArray) -> FloatArray:
    """[B, domains, ...] -> [B, domains + 1, ...]: the mean over domains, equally weighted, behind them."""
    return np.concatenate([values, values.mean(axis=1, keepdims=True)], axis=1)


def enough_texts(*banks: Opened) -> npt.NDArray[np.bool_]:
    """bool[domains + 1]: whether there are texts enough for an interval."""
    counts = np.min([np.bincount(one.text_domain(), minlength=len(one.domains)) for one in banks], axis=0)
    return np.append(counts >= MIN_TEXTS, counts.min() >= MIN_TEXTS)


def interval(samples: FloatArray, enough: npt.NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    """Percentile interval of resampled values.

    Parameters
    ----------
    samples
        [1 + resamples, domains + 1, ...], the value itself first.
    enough
        bool[domains + 1] of `enough_texts`.

    Returns
    -------
    low, high
        [domains + 1, ...]; NaN without enough texts, and where the value is undefined in many resamples.
    """
    drawn = samples[1:]
    undefined = np.isnan(drawn).mean(axis=0)
    usable = (undefined <= _MOST_UNDEFINED) & enough.reshape(-1, *[1] * (drawn.ndim - 2))
    low, high = np.full((2, *undefined.shape), np.nan)
    tail = 50 * (1 - LEVEL)
    low[usable], high[usable] = np.nanpercentile(drawn[:, usable], [tail, 100 - tail], axis=0)
    return low, high


def domain_names(opened: Opened) -> list[str]:
    """The domains, and `ALL` for their mean."""
    return [*opened.domains, ALL]


def blocks_note(blocks: str) -> str:
    """The sentence of a caption that says which blocks count."""
    return "Blocks: those that full verification comes by." if blocks == VISITED else "Blocks: at every position."


def interval_note(resamples: int) -> str:
    """The sentence of a caption that says what bars and bands are."""
    return (
        f"Bars: {100 * LEVEL:g} % intervals, {resamples:,} bootstrap resamples of the texts within each domain "
        f"('{ALL}': the mean over domains, equally weighted)."
    )


def provenance(banks: Sequence[Opened]) -> str:
    """The sentences of a caption that say what was recorded or made, and where."""
    parts = []
    for kind in dict.fromkeys(one.bank.header.kind for one in banks):
        own = [one for one in banks if one.bank.header.kind == kind]
        targets = ", ".join(dict.fromkeys(one.bank.header.target for one in own))
        sources = []
        for source in dict.fromkeys(one.bank.header.source for one in own):
            theirs = [one.bank.header.drafter for one in own if one.bank.header.source == source]
            names = "; ".join(drafter_words(text) for text in dict.fromkeys(theirs))
            whose = "this project's own drafters" if source == "dsim" else source
            sources.append(f"{whose} ({names})")
        known = sorted({one.temperature for one in own if one.temperature is not None})
        at = f" at T = {' and '.join(f'{t:g}' for t in known)}" if known else ""
        word = {"recorded": "Recorded", "visited": "Visited (a log)"}.get(kind, "Synthetic, not recorded")
        parts.append(f"{word}: {', '.join(sources)}; target {targets}{at}.")
    return " ".join(parts)


def training_note(banks: Sequence[Opened]) -> str:
    """How much each drafter was trained, where that is not the same for all: no ratio then is the architecture's alone.

    Empty for one bank, and where all had the same number of anchors to within 1 %.
    """
    known = [one for one in banks if one.anchors is not None]
    counts = [one.anchors or 0 for one in known]
    if len(known) < 2 or max(counts) <= 1.01 * min(counts):
        return ""
    each = ", ".join(f"{one.label} {count:,}" for one, count in zip(known, counts, strict=True))
    return f"Not trained alike (anchors: {each}), so ratios are not the architecture's alone."


def title(domain: str) -> str:
    """A panel's title: the domain, or what the mean over domains is."""
    return "Mean of the domains" if domain == ALL else domain.capitalize()


def kinds(banks: Sequence[Opened]) -> str:
    """Recorded, synthetic, or both."""
    return " and ".join(dict.fromkeys(one.bank.header.kind for one in banks))


def targets(banks: Sequence[Opened], *, brief: bool = False) -> str:
    """The target, and the temperature where it is one for all; `brief`: without the format in parentheses."""
    full = dict.fromkeys(one.bank.header.target for one in banks)
    names = ", ".join(dict.fromkeys(name.partition(" (")[0] if brief else name for name in full))
    known = {one.temperature for one in banks}
    (common,) = known if len(known) == 1 else (None,)
    return names if common is None else f"{names}, T = {common:g}"
