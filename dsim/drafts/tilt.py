"""Tilting a bank: the drafter of its texts, better or worse, with the same luck.

A tilt shifts logit(alpha_k) and logit(c_k) by position, for all domains alike (`Tilt`) or by domain (`DomainTilt`,
which `tilt` solves so that a published acceptance curve holds). Texts, positions, the order of confidences at a
position and the luck stay what they are in the bank.

Given the recorded number n of accepted drafts, luck u_k is uniform in [0, alpha_k) for k <= n, in [alpha_k, 1) for
k = n + 1, and free beyond. With u_k = luck placed there (`BankDrafts.luck`), draft k survives under alpha'_k if
u_k < alpha'_k, that is, if the unplaced luck lies below

    min(1, alpha'_k / alpha_k)                        for k <= n
    max(0, (alpha'_k - alpha_k) / (1 - alpha_k))      for k = n + 1
    alpha'_k                                          beyond

These limits are also the exact chances of survival, so a curve is solved for without drawing a number.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import scipy

from dsim.drafts.bank import Bank
from dsim.drafts.luck import BITS, block_luck
from dsim.errors import InputError
from dsim.files import cache_dir
from dsim.sigmoid import expit, logit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Largest shift, logits: beyond it every probability is 0 or 1.
MAX_TILT = 20.0

# Alpha by stored byte. 0 and 255 stand for "within half a unit of the edge", so that a logit exists.
_ALPHA = np.clip(np.arange(256) / 255, 0.5 / 255, 1 - 0.5 / 255)
# What the record says of a draft: accepted, the first rejected, or never tested.
_OUTCOMES = 3
_CELLS = _OUTCOMES * 256
_ROUNDS = 100
_SETTLED = 1e-9
# Outcomes that are kept for other runs of the same seeds, bytes; beyond that they are worked out again.
_KEPT = 1 << 25


# -- shifts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tilt:
    """Shift the drafter's quality: logit(alpha_k) and logit(c_k) by position, luck unchanged.

    Parameters
    ----------
    alpha, confidence
        Shifts in logits; one for all positions, or one a position. 0 changes nothing.
    """

    alpha: tuple[float, ...] = (0.0,)
    confidence: tuple[float, ...] = (0.0,)

    def by_position(self, gamma: int, name: str) -> FloatArray:
        """float64[gamma] of one of the two shifts."""
        values = np.asarray(getattr(self, name), dtype=np.float64)
        if values.size == 1:
            values = np.repeat(values, gamma)
        if values.shape != (gamma,) or not np.all(np.abs(values) <= MAX_TILT):
            expected = f"1 or {gamma} numbers between -{MAX_TILT:g} and {MAX_TILT:g}"
            raise InputError(field=f"tilt.{name}", value=values.tolist(), expected=expected)
        return values

    def by_domain(self, domains: tuple[str, ...], gamma: int) -> tuple[FloatArray, FloatArray]:
        """float64[domains, gamma] twice: the shifts of logit(alpha) and of logit(c)."""
        alpha, confidence = (np.tile(self.by_position(gamma, name), (len(domains), 1)) for name in _SHIFTS)
        return alpha, confidence

    def marked(self, label: str) -> str:
        """A bank's label, and that it is tilted, if it is."""
        return f"{label}:tilted" if np.any(self.alpha) or np.any(self.confidence) else label


@dataclass(frozen=True)
class DomainTilt:
    """Shifts by domain and position: what `tilt` returns.

    Parameters
    ----------
    domains
        Names; a bank's domains must be among them.
    alpha, confidence
        [domains][positions] shifts in logits. Blocks may be cut to fewer positions, never to more.
    to
        Where the level of acceptance comes from: a name for labels.
    then
        A further shift by position on top of it.
    """

    domains: tuple[str, ...]
    alpha: tuple[tuple[float, ...], ...]
    confidence: tuple[tuple[float, ...], ...]
    to: str = "curve"
    then: Tilt = Tilt()

    @property
    def gamma(self) -> int:
        """Positions that have a shift."""
        return len(self.alpha[0])

    def by_domain(self, domains: tuple[str, ...], gamma: int) -> tuple[FloatArray, FloatArray]:
        """float64[domains, gamma] twice: the shifts of logit(alpha) and of logit(c)."""
        if gamma > self.gamma:
            raise InputError(
                f"the curve '{self.to}' ends at position {self.gamma}",
                field="gamma",
                value=gamma,
                expected=f"1 to {self.gamma}",
            )
        for name in domains:
            if name not in self.domains:
                raise InputError(f"the tilt has no domain '{name}'", expected=f"one of {', '.join(self.domains)}")
        rows = [self.domains.index(name) for name in domains]
        more = self.then.by_domain(domains, gamma)
        alpha, confidence = (np.asarray(getattr(self, name))[rows, :gamma] for name in _SHIFTS)
        return alpha + more[0], confidence + more[1]

    def marked(self, label: str) -> str:
        """A bank's label, and where the level comes from."""
        return self.then.marked(f"tilted:{self.to}:{label}")


_SHIFTS = ("alpha", "confidence")


def alpha_of(stored: npt.NDArray[np.uint8]) -> FloatArray:
    """Acceptance probabilities of stored bytes, within (0, 1)."""
    return np.asarray(_ALPHA[stored], dtype=np.float64)


def survival_limits(shift: float) -> FloatArray:
    """float64[3, 256]: unplaced luck below this survives, by recorded outcome and stored byte of alpha.

    The outcomes are: accepted, the first rejected, never tested.
    """
    new = _ALPHA if shift == 0 else expit(logit(_ALPHA) + shift)
    return np.stack([np.minimum(1, new / _ALPHA), np.maximum(0, (new - _ALPHA) / (1 - _ALPHA)), new])


def _cells(bank: Bank, gamma: int) -> npt.NDArray[np.uint16]:
    """uint16[N, gamma]: index into the flat `survival_limits` of each draft."""
    k = np.arange(gamma, dtype=np.int16)
    accepted = bank.accepted.astype(np.int16)[:, None]
    outcome = (k >= accepted).astype(np.uint16) + (k > accepted)
    return np.asarray(outcome * np.uint16(256) + bank.alpha_bytes[:, :gamma], dtype=np.uint16)


def shifted(probability: npt.NDArray[np.floating], by: npt.ArrayLike) -> FloatArray:
    """Probabilities with their logits shifted. 0 and 1 have no logit; the nearest float32 stands for them."""
    logits = logit(np.clip(np.asarray(probability, dtype=np.float64), 2.0**-24, 1 - 2.0**-24))
    return np.asarray(expit(logits + by), dtype=np.float64)


# -- solving ---------------------------------------------------------------------------------------------


def tilt(bank: Bank, to: Mapping[str, tuple[float, ...]], name: str = "curve") -> DomainTilt:
    """The shifts under which full verification accepts as a curve says.

    Position by position, left to right, for each domain:

    - logit(alpha_k) is shifted so that, of the blocks whose first k - 1 drafts survive in the tilted replay, the
      curve's share also survives the k-th. The blocks are those that decoding with full verification visits, from
      the start of each text to its end (hard stretches take more steps and weigh more, as in any published figure).
      Luck is marginalized exactly, in the chances of survival and in the chances of a visit: nothing is drawn.
    - logit(c_k) is shifted so that mean(c_k) - mean(alpha'_k) over the same blocks stays what mean(c_k) -
      mean(alpha_k) is in the bank. Calibration in the large is kept: a bank that is right on average stays so,
      one that is overconfident stays as overconfident. Bin by bin the two shifts need not match.

    Parameters
    ----------
    bank
        An opened bank. Rows that are never replayed (the last gamma + 1 of a text) do not count.
    to
        Conditional acceptance at positions 1, 2, ... by domain of the bank, each in (0, 1), equally many everywhere.
        Of a curve longer than the bank's blocks the beginning is used; a shorter one gives shorter blocks.
    name
        What labels call the curve.

    Returns
    -------
    DomainTilt
        For ``BankDrafts(bank, tilt=...)``. Solved once (seconds for a large bank) and then found in the cache folder.

    Raises
    ------
    InputError
        A curve that is none, or a value that no shift within 20 logits reaches; domain and position are named.
    """
    curve = check_curve(to)
    for domain in bank.header.domains:
        if domain not in curve:
            expected = f"one curve for each of {', '.join(bank.header.domains)}"
            raise InputError(f"the curve '{name}' has no domain '{domain}'", field="curve", expected=expected)
    for domain in curve:
        if domain not in bank.header.domains:
            expected = f"one of {', '.join(bank.header.domains)}"
            raise InputError(f"the bank has no domain '{domain}'", field="curve", value=domain, expected=expected)
    gamma = min(bank.header.gamma, len(next(iter(curve.values()))))
    wanted = tuple(curve[domain][:gamma] for domain in bank.header.domains)
    key = hashlib.sha256(repr((wanted, _code(), np.__version__)).encode())
    key.update(repr(sorted(asdict(bank.header).items())).encode())
    for array in (bank.alpha_bytes, bank.accepted, bank.bounds, bank.domain, bank.confidence):
        key.update(array.tobytes())
    file = cache_dir() / "tilts-1" / f"{key.hexdigest()[:40]}.json"
    shifts = _read_shifts(file, len(wanted), gamma)
    if shifts is None:
        cells = _cells(bank, gamma)
        found = [_solve(_Texts(bank, cells, i), bank.header.domains[i], values) for i, values in enumerate(wanted)]
        shifts = tuple(alpha for alpha, _ in found), tuple(confidence for _, confidence in found)
        _write_shifts(file, shifts)
    return DomainTilt(bank.header.domains, *shifts, to=name)


def check_curve(curve: object, file: str | Path | None = None) -> dict[str, tuple[float, ...]]:
    """The curve as floats, or an InputError that names what is wrong with it.

    Parameters
    ----------
    curve
        By domain: numbers in (0, 1), as many everywhere.
    file
        Where it stands, for the message.
    """
    if not isinstance(curve, Mapping) or not curve:
        raise InputError(file=file, field="curve", value=curve, expected="an acceptance curve for each domain")
    found: dict[str, tuple[float, ...]] = {}
    for domain, values in curve.items():
        if not isinstance(values, list | tuple) or not values or not all(_inside(value) for value in values):
            expected = "a list of numbers strictly between 0 and 1"
            raise InputError(file=file, field=f"curve.{domain}", value=values, expected=expected)
        found[str(domain)] = tuple(float(value) for value in values)
    lengths = {domain: len(values) for domain, values in found.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(file=file, field="curve", value=lengths, expected="as many positions in every domain")
    return found


def _inside(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1


class _Texts:
    """The texts of one domain, laid end to end."""

    def __init__(self, bank: Bank, cells: npt.NDArray[np.uint16], domain: int) -> None:
        members = np.flatnonzero(bank.domain == domain)
        lengths = np.diff(bank.bounds)[members]
        rows = np.concatenate([np.arange(bank.bounds[t], bank.bounds[t + 1]) for t in members])
        self.rows, self.gamma = rows, cells.shape[1]
        self.cells = np.ascontiguousarray(cells[rows].T)
        self.confidence = np.ascontiguousarray(bank.confidence[rows, : self.gamma].T.astype(np.float64))
        # Longest first: those that are still read at a position come before the others.
        order = np.argsort(-lengths, kind="stable")
        self._starts = (np.cumsum(lengths) - lengths)[order]
        self._usable = (lengths - (bank.header.gamma + 1))[order]
        self._replayed = np.zeros(rows.size, dtype=np.bool_)
        for start, usable in zip(self._starts, self._usable, strict=True):
            self._replayed[start : start + usable] = True

    def survival(self, shifts: FloatArray) -> FloatArray:
        """float64[gamma, rows]: chance that draft k survives, given that those before it did."""
        return np.stack([survival_limits(s).ravel()[cells] for s, cells in zip(shifts, self.cells, strict=True)])

    def alpha(self, k: int, shift: float) -> FloatArray:
        """float64[rows]: shifted acceptance probability at a position."""
        return np.asarray(survival_limits(shift)[2][self.cells[k] % 256], dtype=np.float64)

    def visits(self, survival: FloatArray) -> FloatArray:
        """float64[rows]: expected visits of each row when every text is decoded from its start."""
        reached = np.multiply.accumulate(survival, axis=0)
        counts = np.empty((reached.shape[1], self.gamma + 1))
        counts[:, 0] = 1 - reached[0]
        counts[:, 1:-1] = (reached[:-1] - reached[1:]).T
        counts[:, -1] = reached[-1]
        visits = np.zeros(reached.shape[1])
        visits[self._starts] = 1
        ahead = np.arange(1, self.gamma + 2)
        reading = np.searchsorted(-self._usable, -np.arange(int(self._usable.max())), side="left")
        for t, texts in enumerate(reading):
            rows = self._starts[:texts] + t
            # gamma + 1 rows at a text's end are not replayed, so no step leads into another text.
            visits[rows[:, None] + ahead] += visits[rows][:, None] * counts[rows]
        return np.where(self._replayed, visits, 0)


def _solve(texts: _Texts, domain: str, curve: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    shifts = np.zeros(texts.gamma)
    gaps = _gaps(texts, texts.survival(shifts))
    # What is visited depends on what survives, which depends on the shifts: some rounds settle it (fixed-point
    # iteration, with Anderson's extrapolation from the round before).
    before: tuple[FloatArray, FloatArray] | None = None
    for _ in range(_ROUNDS):
        solved = _round(texts, shifts, curve, domain)
        rest = solved - shifts
        if np.max(np.abs(rest)) < _SETTLED:
            break
        shifts = solved
        if before is not None:
            turn = rest - before[1]
            part = float(np.clip(rest @ turn / max(float(turn @ turn), 1e-300), -3.0, 0.9))
            shifts = solved - part * (solved - before[0])
        before = solved, rest
    else:
        raise InputError(
            f"the tilt of domain '{domain}' does not settle", field="curve", value=list(curve), expected="another curve"
        )
    shifts, survival = solved, texts.survival(solved)
    weight, moves = texts.visits(survival), []
    for k in range(texts.gamma):
        level = _mean(texts.alpha(k, shifts[k]), weight) + gaps[k]
        moves.append(_confidence_shift(texts.confidence[k], weight, level, domain, k))
        weight = weight * survival[k]
    return tuple(shifts.tolist()), tuple(moves)


def _round(texts: _Texts, shifts: FloatArray, curve: tuple[float, ...], domain: str) -> FloatArray:
    """The shifts that give the curve on the blocks that are visited under these shifts."""
    weight, solved = texts.visits(texts.survival(shifts)), np.zeros(texts.gamma)
    for k, wanted in enumerate(curve):
        blocks = np.bincount(texts.cells[k], weight, _CELLS).astype(np.float64)
        solved[k] = _alpha_shift(blocks, wanted, domain, k)
        weight = weight * survival_limits(solved[k]).ravel()[texts.cells[k]]
    return solved


def _gaps(texts: _Texts, survival: FloatArray) -> FloatArray:
    """mean(c_k) - mean(alpha_k) in the bank, among the blocks that survive to each position; NaN where none does."""
    weight, gaps = texts.visits(survival), np.zeros(texts.gamma)
    for k in range(texts.gamma):
        gaps[k] = _mean(texts.confidence[k] - texts.alpha(k, 0.0), weight)
        weight = weight * survival[k]
    return gaps


def _mean(values: FloatArray, weight: FloatArray) -> float:
    total = float(weight.sum())
    return float(values @ weight) / total if total > 0 else float("nan")


def _alpha_shift(blocks: FloatArray, wanted: float, domain: str, k: int) -> float:
    """The shift with sum(blocks x survival) / sum(blocks) = wanted; blocks by outcome and byte."""
    total = float(blocks.sum())

    def gap(shift: float) -> float:
        return float(blocks @ survival_limits(shift).ravel()) / total - wanted

    if not total > 0:
        raise InputError(
            f"no block of domain '{domain}' reaches position {k + 1}", field=f"curve.{domain}", value=wanted
        )
    return _root(gap, wanted, f"curve.{domain}", f"acceptance at position {k + 1} of domain '{domain}'")


def _confidence_shift(confidence: FloatArray, weight: FloatArray, wanted: float, domain: str, k: int) -> float:
    used = weight > 0
    logits = logit(np.clip(confidence[used], 2.0**-24, 1 - 2.0**-24))
    share = weight[used] / weight[used].sum()
    if not np.isfinite(wanted):
        return 0.0  # nothing recorded survives to here: there is no level to keep

    def gap(shift: float) -> float:
        return float(share @ expit(logits + shift)) - wanted

    return _root(gap, wanted, f"curve.{domain}", f"mean confidence at position {k + 1} of domain '{domain}'")


def _root(gap: Callable[[float], float], wanted: float, field: str, what: str) -> float:
    low, high = gap(-MAX_TILT), gap(MAX_TILT)
    if not low < 0 < high:
        between = f"between {low + wanted:.3g} and {high + wanted:.3g}"
        raise InputError(f"no shift reaches this {what}", field=field, value=float(f"{wanted:.6g}"), expected=between)
    if gap(0.0) == 0:
        return 0.0
    return float(scipy.optimize.brentq(gap, -MAX_TILT, MAX_TILT, xtol=1e-13, rtol=1e-14, maxiter=200))


def expected_acceptance(bank: Bank, tilt: Tilt | DomainTilt | None = None) -> dict[str, tuple[float, ...]]:
    """Conditional acceptance by domain and position under full verification, luck marginalized.

    Over the steps that decoding visits, as in `tilt`. Without a tilt it is the recorded acceptance of `bank_report`.
    """
    gamma = tilt.gamma if isinstance(tilt, DomainTilt) else bank.header.gamma
    shifts, _ = (tilt or Tilt()).by_domain(bank.header.domains, gamma)
    cells, found = _cells(bank, gamma), {}
    for i, domain in enumerate(bank.header.domains):
        texts = _Texts(bank, cells, i)
        survival = texts.survival(shifts[i])
        weight, curve = texts.visits(survival), []
        for k in range(gamma):
            curve.append(_mean(survival[k], weight))
            weight = weight * survival[k]
        found[domain] = tuple(curve)
    return found


def visit_weights(bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int) -> FloatArray:
    """float64[N]: expected visits of each row when every text is decoded from its start, whole blocks verified.

    Blocks are cut to `gamma`. Luck is marginalized, as in `tilt`; without a tilt the visits are those of the record,
    0 or 1. Rows that are never replayed have 0.
    """
    shifts, _ = (tilt or Tilt()).by_domain(bank.header.domains, gamma)
    cells, weights = _cells(bank, gamma), np.zeros(bank.accepted.size)
    for i in range(len(bank.header.domains)):
        texts = _Texts(bank, cells, i)
        weights[texts.rows] = texts.visits(texts.survival(shifts[i]))
    return weights


def alpha_table(bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int) -> FloatArray:
    """float64[domains, gamma, 256]: acceptance probability by domain, position and stored byte."""
    shifts, _ = (tilt or Tilt()).by_domain(bank.header.domains, gamma)
    return np.array([[survival_limits(shift)[2] for shift in row] for row in shifts])


# -- the cache of shifts ---------------------------------------------------------------------------------


@cache
def _code() -> str:
    """The text of this module: another way to solve makes new shifts."""
    return (resources.files("dsim.drafts") / "tilt.py").read_text(encoding="utf-8")


_Shifts = tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]


def _read_shifts(file: Path, domains: int, gamma: int) -> _Shifts | None:
    try:
        values = np.asarray(json.loads(file.read_bytes()), dtype=np.float64)
    except (OSError, ValueError, TypeError):
        return None
    if values.shape != (2, domains, gamma) or not np.all(np.abs(values) <= MAX_TILT):
        return None
    alpha, confidence = (tuple(tuple(row) for row in part) for part in values.tolist())
    return alpha, confidence


def _write_shifts(file: Path, shifts: _Shifts) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".tilt-")
    except OSError:
        return  # solved again next time
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(shifts, stream)
        os.replace(temporary, file)
    except OSError:
        pass
    finally:
        Path(temporary).unlink(missing_ok=True)


# -- replay ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def tilted_bank(bank: Bank, tilt: Tilt | DomainTilt, gamma: int) -> TiltedBank:
    """A bank under a tilt in blocks of `gamma`, made once a process."""
    return TiltedBank(bank, tilt, gamma)


class TiltedBank:
    """A bank under a tilt, as replay needs it.

    Attributes
    ----------
    confidence
        float32[N, gamma]: shifted confidences.
    limits
        uint64[N, gamma]: a draft survives if its unplaced luck (53 bits) is below. None where no alpha is shifted:
        the recorded outcomes stand.
    """

    def __init__(self, bank: Bank, tilt: Tilt | DomainTilt, gamma: int) -> None:
        by_alpha, by_confidence = tilt.by_domain(bank.header.domains, gamma)
        lengths = np.diff(bank.bounds)
        self.gamma = gamma
        self.confidence = bank.confidence if gamma == bank.header.gamma else bank.confidence[:, :gamma].copy()
        self.limits: npt.NDArray[np.uint64] | None = None
        if np.any(by_confidence):
            self.confidence = np.empty((bank.accepted.size, gamma), dtype=np.float32)
            for domain, start, length in zip(bank.domain, bank.bounds[:-1], lengths, strict=True):
                text = slice(start, start + length)
                self.confidence[text] = shifted(bank.confidence[text, :gamma], by_confidence[domain])
        if np.any(by_alpha):
            # One table a domain, and one look-up a draft.
            chances = np.array([[survival_limits(s) for s in row] for row in by_alpha])
            table = np.ceil(chances * 2.0**BITS).astype(np.uint64).reshape(len(by_alpha), -1)
            cells = np.add(_cells(bank, gamma), np.arange(0, gamma * _CELLS, _CELLS, dtype=np.uint16))
            self.limits = np.empty(cells.shape, dtype=np.uint64)
            for domain, start, length in zip(bank.domain, bank.bounds[:-1], lengths, strict=True):
                text = slice(start, start + length)
                self.limits[text] = table[domain].take(cells[text])
        self._outcomes: dict[int, Outcomes] = {}

    def outcomes(self, seed: int) -> Outcomes | None:
        """Where the accepted drafts of one seed's requests are written down; None where they are the bank's."""
        if self.limits is None:
            return None
        found = self._outcomes.get(seed)
        if found is None:
            if sum(other.size for other in self._outcomes.values()) > _KEPT:
                self._outcomes.clear()
            found = self._outcomes[seed] = Outcomes(self.limits, seed)
        return found


class Outcomes:
    """Accepted drafts of the requests of one seed, worked out a stretch of text at a time.

    All arms and loads of a study meet the same requests with the same luck, so that most of it is computed once.

    Attributes
    ----------
    accepted
        uint8[...]: by place, which `place` tells.
    """

    def __init__(self, limits: npt.NDArray[np.uint64], seed: int) -> None:
        self.accepted = np.zeros(1 << 12, dtype=np.uint8)
        self.size = 0
        self._limits, self._seed = limits, seed
        self._places: dict[tuple[int, int, int], tuple[int, int]] = {}

    def place(self, request: int, first: int, row: int, positions: int) -> int:
        """Index in `accepted` of position `first`, at which the request reads `row`; as many positions follow."""
        place, known = self._places.get((request, first, row), (0, 0))
        if known < positions:
            place, self.size = self.size, self.size + positions
            if self.size > self.accepted.size:
                self.accepted = np.resize(self.accepted, 2 * self.size)
            limits = self._limits[row : row + positions]
            gamma = limits.shape[1]
            # A last column that never survives: the first False is the number of leading True.
            survives = np.zeros((positions, gamma + 1), dtype=np.bool_)
            np.less(block_luck(self._seed, request, first, positions, gamma), limits, out=survives[:, :gamma])
            self.accepted[place : self.size] = survives.argmin(axis=1)
            self._places[request, first, row] = place, positions
        return place
