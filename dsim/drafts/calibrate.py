"""Calibration of confidences: Sequential Temperature Scaling (STS), fitted offline and kept up online.

The scheduler needs the *size* of a survival probability, not only its rank (DSpark paper, arXiv 2607.05147,
section 3.2.1, "Post-hoc Calibration"). A confidence is c_k = sigmoid(z_k / T_k); the order within a position is that
of the logits z_k whatever the temperature T_k > 0 is.

- `fit_sts` finds the temperatures on held-out blocks, left to right, as in the paper; `fit_bank`, `split_blocks` and
  `calibrated` do it with banks, `read_temperatures` and `write_temperatures` exchange them with engines.
- `OnlineSts` follows a drifting workload from the outcomes that an engine sees; `OnlineCalibration` puts it around a
  draft source.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from dsim.drafts.bank import Bank, recalibrated
from dsim.drafts.reliability import RELIABILITY_BINS, auc, bin_gaps, ece, visited_rows
from dsim.drafts.source import DraftSource
from dsim.errors import InputError

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Temperatures that a fit may choose, lowest and highest.
BOUNDS = (0.25, 4.0)
#: Temperatures in between, evenly on a log scale: steps of 2 %.
GRID = 129
#: Blocks that a bin must hold.
MIN_BIN = 50


# -- offline ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StsFit:
    """Temperatures, and what they do to the blocks they were fitted on.

    Attributes
    ----------
    temperatures
        Divisors of the confidence logits by position.
    ece_before, ece_after
        Calibration error of the cumulative product by position, with all temperatures 1 and with the fitted ones:
        the published definition (equal-width bins, none joined).
    auc
        Discrimination of the calibrated cumulative product by position; NaN where one class is empty.
    survivors
        Blocks whose first k drafts were accepted.
    n
        Blocks.
    at_bound
        Whether a temperature was moved towards the lowest or highest allowed, where the error is still falling: it
        takes wider bounds, more blocks, or more than a temperature.
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    auc: tuple[float, ...]
    survivors: tuple[int, ...]
    n: int
    at_bound: tuple[bool, ...]


def fit_sts(
    logits: npt.NDArray[np.floating[Any]],
    accepted: npt.NDArray[np.integer[Any]],
    *,
    alpha: npt.NDArray[np.floating[Any]] | None = None,
    grid: int = GRID,
    bins: int = RELIABILITY_BINS,
    min_bin: int = MIN_BIN,
    bounds: tuple[float, float] = BOUNDS,
    noise: float = 1.0,
) -> StsFit:
    """Sequential Temperature Scaling on held-out blocks.

    Position by position, left to right: the temperature on a 1-D grid whose cumulative product c_1 ... c_k has the
    smallest ECE over *all* blocks against "the first k drafts were accepted", earlier temperatures fixed (paper,
    section 3.2.1). Ties go to the temperature nearest to 1 on a log scale.

    Two rules are ours, because the plain minimum runs to the ends of the grid where few blocks survive:

    - neighboring bins are joined until each holds `min_bin` blocks;
    - errors that differ by less than chance are ties. One temperature fitted to pure noise lowers the ECE by about
      s / sqrt(K), with s the standard error of the mean label and K the number of bins. The choice is the
      temperature nearest to 1 whose ECE is within ``noise`` times that of the smallest. With many blocks this
      vanishes; with few the position stays as it is until the blocks show that it should not.

    Parameters
    ----------
    logits
        [N, gamma] confidence logits before any temperature.
    accepted
        [N] drafts accepted when the whole block is verified.
    alpha
        [N, gamma] acceptance probabilities. If given, the label of position k is alpha_1 ... alpha_k instead of the
        outcome: the exact probability of that outcome for the block as it was drafted (alpha_k past a rejection is
        conditional on the drafts before it, which is what the product needs). It has the same expectation and much
        less noise. Engines do not see it.
    grid
        Temperatures, evenly spaced on a log scale between the bounds (1 is always among them).
    bins
        Equal-width bins of [0, 1].
    min_bin
        Blocks that a bin must hold; 0 joins none.
    bounds
        Lowest and highest temperature.
    noise
        Standard errors that make a tie; 0 for the plain minimum of the paper. Blocks count as independent, which
        neighboring ones are not quite: a larger value is more careful.

    Raises
    ------
    InputError
        Arrays out of shape or range, or options that contradict each other.
    """
    z, counts, known = _checked_blocks(logits, accepted, alpha)
    values = _grid(grid, bounds)
    _need(bins >= 1, "bins", bins, "an integer >= 1")
    _need(min_bin >= 0, "min_bin", min_bin, "an integer >= 0")
    _need(0 <= noise < float("inf"), "noise", noise, "a number >= 0")
    n, gamma = z.shape
    distance = np.round(np.abs(np.log(values)), 9)
    survival, raw = np.ones(n), np.ones(n)
    chosen, before, after, areas, at_bound = [], [], [], [], []
    for k in range(gamma):
        label = counts > k
        target = label.astype(np.float64) if known is None else known[:, k]
        errors, chance = np.empty(values.size), np.empty(values.size)
        for i, temperature in enumerate(values):
            product = survival * expit(z[:, k] / temperature)
            gaps, held = bin_gaps(product, target, bins, min_bin)
            errors[i] = np.abs(gaps).sum() / n
            # Variance of the labels if this temperature were the right one.
            spread = product * (1 - product) if known is None else (target - product) ** 2
            chance[i] = np.sqrt(spread.sum() / held) / n
        tied = errors <= errors.min() + noise * chance + 1e-12
        best = int(np.lexsort((errors, distance, ~tied))[0])
        chosen.append(float(values[best]))
        moved = distance[best] > distance.min()
        at_bound.append(bool(moved and np.argmin(errors) in (0, values.size - 1)))
        survival, raw = survival * expit(z[:, k] / values[best]), raw * expit(z[:, k])
        before.append(ece(raw, target, bins))
        after.append(ece(survival, target, bins))
        areas.append(auc(survival, label))
    return StsFit(
        temperatures=tuple(chosen),
        ece_before=tuple(before),
        ece_after=tuple(after),
        auc=tuple(areas),
        survivors=tuple(int(np.count_nonzero(counts > k)) for k in range(gamma)),
        n=n,
        at_bound=tuple(at_bound),
    )


def _need(condition: bool, field: str, value: object, expected: str) -> None:
    if not condition:
        raise InputError(field=field, value=value, expected=expected)


def _checked_blocks(
    logits: npt.ArrayLike, accepted: npt.ArrayLike, alpha: npt.ArrayLike | None
) -> tuple[FloatArray, IntArray, FloatArray | None]:
    """Logits, counts, and the cumulative product of alpha."""
    z, counts = np.asarray(logits, dtype=np.float64), np.asarray(accepted)
    _need(z.ndim == 2 and z.size > 0, "logits", z.shape, "an array [N, gamma]")
    _need(bool(np.all(np.isfinite(z))), "logits", "a number that is not finite", "finite numbers")
    n, gamma = z.shape
    whole = counts.shape == (n,) and np.issubdtype(counts.dtype, np.integer)
    _need(whole, "accepted", f"{counts.dtype}{list(counts.shape)}", f"integers [{n}]")
    low, high = int(counts.min()), int(counts.max())
    _need(low >= 0 and high <= gamma, "accepted", low if low < 0 else high, f"0..gamma = {gamma}")
    if alpha is None:
        return z, counts.astype(np.int64), None
    probability = np.asarray(alpha, dtype=np.float64)
    _need(probability.shape == z.shape, "alpha", probability.shape, f"an array {z.shape}")
    inside = bool(np.all((probability >= 0) & (probability <= 1)))
    _need(inside, "alpha", "a number out of range", "probabilities in [0, 1]")
    return z, counts.astype(np.int64), np.multiply.accumulate(probability, axis=1)


def _grid(size: int, bounds: tuple[float, float]) -> FloatArray:
    _need(len(bounds) == 2 and 0 < bounds[0] < bounds[1] < float("inf"), "bounds", bounds, "0 < low < high, finite")
    _need(size >= 2, "grid", size, "an integer >= 2")
    values = np.geomspace(*bounds, size)
    values[np.abs(np.log(values)) < 1e-9] = 1.0
    if bounds[0] < 1 < bounds[1] and not np.any(values == 1):
        values = np.sort(np.append(values, 1.0))
    return values


def apply_temperatures(logits: npt.ArrayLike, temperatures: npt.ArrayLike) -> FloatArray:
    """float64[N, gamma]: conditional confidences sigmoid(logits / temperatures).

    Parameters
    ----------
    logits
        [N, gamma] confidence logits.
    temperatures
        gamma divisors > 0.

    Examples
    --------
    >>> apply_temperatures([[0.0, 2.0]], (1.0, 2.0)).round(3).tolist()
    [[0.5, 0.731]]
    """
    z = np.asarray(logits, dtype=np.float64)
    _need(z.ndim == 2, "logits", z.shape, "an array [N, gamma]")
    return np.asarray(expit(z / np.asarray(checked_temperatures(temperatures, z.shape[1]))), dtype=np.float64)


# -- files -----------------------------------------------------------------------------------------------


def checked_temperatures(
    temperatures: Any, gamma: int | None = None, *, file: str | Path | None = None
) -> tuple[float, ...]:
    """The temperatures as floats, or an InputError that names the one that is none.

    Parameters
    ----------
    temperatures
        A sequence of finite numbers > 0, one a position.
    gamma
        How many there must be; None: at least one.
    file
        Where they stand, for the message.
    """
    values = temperatures.tolist() if isinstance(temperatures, np.ndarray) else temperatures
    expected = "a list of finite numbers > 0" if gamma is None else f"{gamma} finite numbers > 0"
    if not isinstance(values, list | tuple) or not values or (gamma is not None and len(values) != gamma):
        raise InputError(file=file, field="temperatures", value=values, expected=expected)
    found = []
    for i, value in enumerate(values):
        number = _number(value)
        if number is None:
            raise InputError(file=file, field=f"temperatures[{i}]", value=repr(value), expected="a finite number > 0")
        found.append(number)
    return tuple(found)


def _number(value: object) -> float | None:
    """A finite number > 0 as a float, or None. True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if 0 < number < float("inf") else None


def read_temperatures(path: str | Path, gamma: int) -> tuple[float, ...]:
    """Temperatures of a file in the engines' format, ``{"temperatures": [T_1, ..., T_gamma]}``.

    Raises
    ------
    InputError
        No such file, no JSON, other keys, another length, or a value that is no finite number > 0.
    """
    path = Path(path)
    try:
        raw = json.loads(path.read_bytes(), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise InputError(f"temperatures cannot be read ({error.strerror})", file=path) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", file=path, expected='{"temperatures": [...]}') from None
    if not isinstance(raw, dict):
        raise InputError(file=path, value=raw, expected='an object {"temperatures": [...]}')
    for key in raw:
        if key != "temperatures":
            raise InputError("unknown key", file=path, field=key, expected="temperatures only")
    if "temperatures" not in raw:
        raise InputError("missing key", file=path, field="temperatures")
    return checked_temperatures(raw["temperatures"], gamma, file=path)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def write_temperatures(path: str | Path, temperatures: npt.ArrayLike | StsFit) -> None:
    """Write temperatures in the engines' format, atomically; numbers survive the round trip exactly."""
    path = Path(path)
    values = temperatures.temperatures if isinstance(temperatures, StsFit) else temperatures
    text = json.dumps({"temperatures": list(checked_temperatures(values))}) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# -- banks -----------------------------------------------------------------------------------------------


def split_blocks(bank: Bank, fraction: float, seed: int = 0) -> tuple[Bank, Bank]:
    """Two banks without a text in common: one to fit on, one to evaluate on.

    Blocks of one text overlap and share its difficulty, so whole trajectories are drawn, domain by domain.

    Parameters
    ----------
    bank
        The bank to split. Domains need two trajectories each.
    fraction
        Share of each domain's trajectories in the first bank, in (0, 1); each side gets at least one.
    seed
        Seed of the draw. Banks with the same texts (drafters of one preset) are split alike.
    """
    _need(0 < fraction < 1, "fraction", fraction, "a number strictly between 0 and 1")
    first = np.zeros(bank.domain.size, dtype=np.bool_)
    for i, name in enumerate(bank.header.domains):
        members = np.flatnonzero(bank.domain == i)
        if members.size < 2:
            raise InputError(
                f"domain '{name}' cannot be split", field="domain", value=members.size, expected="2 trajectories"
            )
        taken = min(max(round(fraction * members.size), 1), members.size - 1)
        rng = np.random.default_rng(np.random.SeedSequence([seed, i]))
        first[rng.permutation(members)[:taken]] = True
    return _of_trajectories(bank, np.flatnonzero(first)), _of_trajectories(bank, np.flatnonzero(~first))


def _of_trajectories(bank: Bank, which: IntArray) -> Bank:
    lengths = np.diff(bank.bounds)[which]
    rows = np.concatenate([np.arange(bank.bounds[t], bank.bounds[t + 1]) for t in which])
    return replace(
        bank,
        confidence=bank.confidence[rows],
        confidence_bytes=bank.confidence_bytes[rows],
        alpha_bytes=bank.alpha_bytes[rows],
        accepted=bank.accepted[rows],
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        domain=bank.domain[which],
    )


def fit_bank(bank: Bank, *, expected: bool = False, **options: Any) -> StsFit:
    """`fit_sts` on the blocks of a bank that decoding with full verification visits.

    The temperatures that the bank already has are left out: those found replace them.

    Parameters
    ----------
    bank
        Not the one to evaluate on (`split_blocks`).
    expected
        Labels from the bank's alpha instead of its outcomes (`fit_sts`, ``alpha``).
    options
        Of `fit_sts`.
    """
    header = bank.header
    rows = visited_rows(bank.accepted, bank.bounds, bank.usable())
    step = (header.logit_high - header.logit_low) / 255
    logits = header.logit_low + bank.confidence_bytes[rows] * step
    alpha = bank.alpha_bytes[rows] / 255.0 if expected else None
    return fit_sts(logits, bank.accepted[rows], alpha=alpha, **options)


def calibrated(bank: Bank, calibration: Bank | StsFit | Sequence[float] | npt.NDArray[np.floating[Any]]) -> Bank:
    """The same bank with calibrated confidences.

    Parameters
    ----------
    bank
        The bank to calibrate.
    calibration
        Temperatures by position, an `StsFit`, or a bank of other texts of the same drafter to fit them on
        (`fit_bank`; `split_blocks` makes one).
    """
    if isinstance(calibration, Bank):
        calibration = fit_bank(calibration)
    if isinstance(calibration, StsFit):
        calibration = calibration.temperatures
    return recalibrated(bank, checked_temperatures(calibration, bank.header.gamma))


# -- online ----------------------------------------------------------------------------------------------

# Confidences of 0 and 1 have no logit; the nearest float32 stands for them.
_EDGE = 2.0**-24
# Bins of the logit in which outcomes are counted. Their sums of logits are kept too, so the width hardly matters.
_LOW, _WIDTH, _BINS = -10.0, 0.25, 80
_CENTERS = _LOW + _WIDTH * (np.arange(_BINS) + 0.5)
# Where the pseudo-observations of the prior lie.
_PRIOR_RANGE = 4.0
# Newton's method ends when no parameter moves by more than this. From the last refit's map that takes two steps.
_SETTLED = 1e-3
# A longer step may overshoot and is checked.
_SURE = 0.25
_NEWTON_STEPS, _HALVINGS = 12, 40
# The largest bias, logits: it takes c = 0.5 to 0.98.
_MOST_BIAS = 4.0
# Added to the mean curvature, which vanishes where a map is saturated.
_RIDGE = 1e-4


class OnlineSts:
    """Calibration that follows the workload, from nothing but what an engine observes.

    Position k maps a confidence's logit z to z / T_k + b_k: a temperature and a bias, both estimated from outcomes
    by maximum likelihood with exponential forgetting. The map is increasing, so the order within a position stays.

    **Observations.** A step that verifies l drafts of a request and accepts m of them says something of position k
    only if k <= l and the k - 1 drafts before it were accepted; then it says whether m >= k. Everything else is
    censored and is not counted. This is the conditional event that c_k is a probability of. Policies choose l by
    confidence and load, never by the outcome; given the confidences the outcomes that are seen are therefore
    distributed like those that are not, and the choice does not bias the map. What it does choose is *where* the
    map is known: if only confident drafts are verified, unconfident ones are extrapolated. (A clairvoyant policy
    chooses by outcome, and does bias it.)

    **Why a bias.** A drifting mix moves the *level* of a confidence: code drafts survive more often than the head
    says, chat drafts less often. A temperature leaves the logit 0 where it is and can only stretch around it; it
    cannot say "all a little likelier". Under such a shift (`tests/drafts/test_calibrate.py`) the temperature alone
    removes part of the added calibration error, both together nearly all of it. ``bias=False`` gives what the
    engines' file of temperatures can hold.

    **Estimate.** Outcomes are counted in bins of the logit, position by position. All counts decay with one half-life,
    in verified blocks, so that it means the same under any batch size. The offline temperatures enter as ``prior``
    pseudo-observations that do not decay, spread evenly over logits of -4 to 4: a position that is rarely reached,
    or not any more, goes back to them. Newton's method solves the penalized logistic regressions of all positions
    together, once every ``refit`` blocks, from where it stood. No random numbers: the same updates give the same map.

    Parameters
    ----------
    temperatures
        Offline temperatures by position, divisors of the logits of the confidences that are given to `apply`: all 1
        where those are calibrated already (a bank with temperatures in its header).
    half_life
        Verified blocks after which an observation counts half.
    prior
        Observations that the offline temperatures count as.
    refit
        Verified blocks between two refits.
    bounds
        Lowest and highest temperature.
    bias
        False: temperatures only.
    """

    def __init__(
        self,
        temperatures: Sequence[float] | npt.NDArray[np.floating[Any]],
        *,
        half_life: float = 2000.0,
        prior: float = 50.0,
        refit: int = 512,
        bounds: tuple[float, float] = BOUNDS,
        bias: bool = True,
    ) -> None:
        offline = np.asarray(checked_temperatures(temperatures))
        _need(len(bounds) == 2 and 0 < bounds[0] < bounds[1] < float("inf"), "bounds", bounds, "0 < low < high, finite")
        inside = bool(np.all((offline >= bounds[0]) & (offline <= bounds[1])))
        _need(inside, "temperatures", offline.tolist(), f"within the bounds {bounds}")
        _need(0 < half_life < float("inf"), "half_life", half_life, "a number > 0")
        _need(0 < prior < float("inf"), "prior", prior, "a number > 0")
        _need(refit >= 1, "refit", refit, "an integer >= 1")
        self.gamma = offline.size
        self._half_life, self._refit, self._with_bias = half_life, refit, bias
        self._slopes = (1 / bounds[1], 1 / bounds[0])
        self._slope = 1 / offline
        self._shift = np.zeros(self.gamma)
        self._k = np.arange(self.gamma)
        # By position and bin: observations, accepted ones, sums of logits; and those of the prior.
        shape = (self.gamma, _BINS)
        self._seen, self._hits, self._sums = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        weight = np.where(np.abs(_CENTERS) < _PRIOR_RANGE, 1.0, 0.0)
        self._prior_seen = np.broadcast_to(prior * weight / weight.sum(), shape)
        self._prior_hits = self._prior_seen * expit(_CENTERS * self._slope[:, None])
        self._pending: list[tuple[npt.NDArray[np.floating[Any]], IntArray, IntArray]] = []
        self._pending_blocks = 0

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Divisors of the logits by position, now."""
        return tuple((1 / self._slope).tolist())

    @property
    def bias(self) -> tuple[float, ...]:
        """What is added to the divided logits by position, now."""
        return tuple(self._shift.tolist())

    @property
    def observations(self) -> FloatArray:
        """float64[gamma]: what the remembered outcomes count as, by position; the prior is not among them."""
        return np.asarray(self._seen.sum(axis=1))

    def apply(self, confidence: npt.NDArray[np.floating[Any]]) -> Float32Array:
        """float32[R, gamma]: calibrated confidences. A new array; within a position the order stays."""
        z = _logit(confidence)
        z *= self._slope
        z += self._shift
        return np.asarray(expit(z), dtype=np.float32)

    def update(
        self,
        confidence: npt.NDArray[np.floating[Any]],
        verified: npt.NDArray[np.integer[Any]],
        accepted: npt.NDArray[np.integer[Any]],
    ) -> None:
        """Take in the outcomes of one step.

        Parameters
        ----------
        confidence
            [R, gamma] confidences of the drafts, as they were given to `apply` (not as it returned them).
        verified
            [R] drafts verified, 0 to gamma.
        accepted
            [R] of these, how many were accepted.

        Raises
        ------
        InputError
            Shapes that do not fit together, or more accepted than verified.
        """
        rows = len(verified)
        if confidence.shape != (rows, self.gamma) or len(accepted) != rows:
            shapes = f"{confidence.shape}, {len(verified)}, {len(accepted)}"
            raise InputError(field="confidence, verified, accepted", value=shapes, expected=f"[R, {self.gamma}], R, R")
        bad = (accepted < 0) | (accepted > verified) | (verified > self.gamma)
        if bad.any():
            wrong = int(np.flatnonzero(bad)[0])
            pair = f"{accepted[wrong]} accepted of {verified[wrong]}"
            raise InputError(field="accepted", value=pair, expected=f"0 <= accepted <= verified <= {self.gamma}")
        self._pending.append((np.array(confidence), np.array(verified), np.array(accepted)))
        self._pending_blocks += int(np.count_nonzero(verified))
        if self._pending_blocks >= self._refit:
            self._absorb()
            self._solve()

    def _absorb(self) -> None:
        """Age the counts by what is pending, and add it."""
        confidence, verified, accepted = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        decay = 2.0 ** (-self._pending_blocks / self._half_life)
        self._pending, self._pending_blocks = [], 0
        # Position k is observed if it was verified and the k - 1 drafts before it were accepted.
        seen = np.flatnonzero(self._k < np.minimum(verified, accepted + 1)[:, None])
        row, k = np.divmod(seen, self.gamma)
        z = _logit(confidence.take(seen))
        cell = np.minimum(np.maximum((z - _LOW) * (1 / _WIDTH), 0), _BINS - 1).astype(np.int64)
        cell += k * _BINS
        hit = k < accepted.take(row)
        for total, weights in ((self._seen, None), (self._hits, hit), (self._sums, z)):
            total *= decay
            total += np.bincount(cell, weights=weights, minlength=total.size).reshape(total.shape)

    def _solve(self) -> None:
        """Maximize the penalized log likelihood of every position, slopes kept within the bounds."""
        weight, hits = self._seen + self._prior_seen, self._hits + self._prior_hits
        z = np.where(weight > 0, (self._sums + self._prior_seen * _CENTERS) / np.maximum(weight, 1e-300), _CENTERS)
        ridge = _RIDGE * weight.sum(axis=1)
        slope, shift = self._slope, self._shift
        for _ in range(_NEWTON_STEPS):
            p = expit(slope[:, None] * z + shift[:, None])
            gap, curve = hits - weight * p, weight * p * (1 - p)
            tilted = curve * z
            by_slope, slope_slope = (gap * z).sum(axis=1), (tilted * z).sum(axis=1) + ridge
            if self._with_bias:
                # The slope with the bias eliminated; the bias for the slope that the bounds allow; the slope again
                # for the bias that the limit allows.
                by_shift, both, shift_shift = gap.sum(axis=1), tilted.sum(axis=1), curve.sum(axis=1) + ridge
                move = (by_slope - both * by_shift / shift_shift) / (slope_slope - both**2 / shift_shift)
                move = np.clip(slope + move, *self._slopes) - slope
                free = (by_shift - both * move) / shift_shift
                lift = np.clip(shift + free, -_MOST_BIAS, _MOST_BIAS) - shift
                move = np.where(lift == free, move, (by_slope - both * lift) / slope_slope)
            else:
                move, lift = by_slope / slope_slope, np.zeros(self.gamma)
            move = np.clip(slope + move, *self._slopes) - slope
            longest = max(np.abs(move).max(), np.abs(lift).max())
            if longest > _SURE:
                share = _climbing(weight, hits, z, slope, shift, move, lift)
                move, lift = share * move, share * lift
            slope, shift = np.clip(slope + move, *self._slopes), shift + lift
            if longest < _SETTLED:
                break
        self._slope, self._shift = slope, shift


def _climbing(
    weight: FloatArray,
    hits: FloatArray,
    z: FloatArray,
    slope: FloatArray,
    shift: FloatArray,
    move: FloatArray,
    lift: FloatArray,
) -> FloatArray:
    """float64[gamma]: the share of a step that each position can take without a loss of likelihood."""

    def value(share: FloatArray) -> FloatArray:
        logits = (slope + share * move)[:, None] * z + (shift + share * lift)[:, None]
        return np.asarray((hits * logits - weight * np.logaddexp(0.0, logits)).sum(axis=1))

    start, share = value(np.zeros(slope.size)), np.ones(slope.size)
    for _ in range(_HALVINGS):
        worse = value(share) < start
        if not worse.any():
            return share
        share = np.where(worse, share / 2, share)
    return np.where(worse, 0.0, share)


def _logit(confidence: npt.NDArray[np.floating[Any]]) -> FloatArray:
    # A new float64 array.
    c = confidence.astype(np.float64)
    np.minimum(np.maximum(c, _EDGE, out=c), 1 - _EDGE, out=c)
    c /= 1 - c
    return np.log(c, out=c)


class OnlineCalibration:
    """A draft source whose confidences are calibrated online.

    Outcomes are those of the wrapped source, so pairing keeps: the drafts and the luck at (request, position) are
    the same in every arm. The confidences are not, since the map depends on what this arm has verified so far.

    One source serves all replicas of a cluster: they share one map, and each sees at once what the others learned,
    as with a collector that has no delay. Requests of all replicas must have distinct numbers, as a cluster's do.

    Parameters
    ----------
    source
        A `DraftSource`. If it observes outcomes itself, they are passed on to it.
    sts
        The map, as of the start of the run. It is changed by the run: give every run its own.
    """

    def __init__(self, source: DraftSource, sts: OnlineSts) -> None:
        _need(sts.gamma == source.gamma, "temperatures", sts.gamma, f"gamma = {source.gamma} of the draft source")
        self.gamma, self.paired, self.domains = source.gamma, source.paired, source.domains
        self.label = f"{source.label}:online-sts"
        self.source, self.sts = source, sts
        self._pass_on: Callable[[IntArray, IntArray, IntArray, IntArray], None] | None = getattr(
            source, "observe", None
        )
        # By request number: the source's confidences of its latest draft, and where that was.
        self._raw = np.zeros((1024, self.gamma), dtype=np.float32)
        self._at = np.full(1024, -1, dtype=np.int64)

    def open(self, request: int, domain: int, output_tokens: int) -> None:
        """See `DraftSource.open`."""
        if request >= self._at.size:
            grow = max(self._at.size, request + 1 - self._at.size)
            self._raw = np.concatenate([self._raw, np.zeros((grow, self.gamma), dtype=np.float32)])
            self._at = np.concatenate([self._at, np.full(grow, -1, dtype=np.int64)])
        self.source.open(request, domain, output_tokens)

    def draft(self, requests: IntArray, positions: IntArray) -> tuple[Float32Array, IntArray]:
        """See `DraftSource.draft`."""
        confidence, accepted = self.source.draft(requests, positions)
        self._raw[requests] = confidence
        self._at[requests] = positions
        return self.sts.apply(confidence), accepted

    def observe(self, requests: IntArray, positions: IntArray, verified: IntArray, accepted: IntArray) -> None:
        """Learn from a step: of each request's draft at its position, `verified` drafts and `accepted` of them.

        Raises
        ------
        RuntimeError
            The latest draft of a request was made at another position.
        """
        if not np.array_equal(self._at.take(requests), positions):
            raise RuntimeError("calibration invariant violated: an outcome without the draft it belongs to")
        self.sts.update(self._raw.take(requests, axis=0), verified, accepted)
        if self._pass_on is not None:
            self._pass_on(requests, positions, verified, accepted)
