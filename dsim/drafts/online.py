"""Calibration that follows a drifting workload from the outcomes that an engine sees.

`OnlineSts` is the map and its estimate; `OnlineCalibration` puts it around a draft source. The offline fit that it
starts from is `dsim.drafts.calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.drafts.calibrate import BOUNDS, checked_temperatures, need
from dsim.drafts.source import DraftSource
from dsim.errors import InputError
from dsim.sigmoid import expit

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

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
        need(len(bounds) == 2 and 0 < bounds[0] < bounds[1] < float("inf"), "bounds", bounds, "0 < low < high, finite")
        inside = bool(np.all((offline >= bounds[0]) & (offline <= bounds[1])))
        need(inside, "temperatures", offline.tolist(), f"within the bounds {bounds}")
        need(0 < half_life < float("inf"), "half_life", half_life, "a number > 0")
        need(0 < prior < float("inf"), "prior", prior, "a number > 0")
        need(refit >= 1, "refit", refit, "an integer >= 1")
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
        need(sts.gamma == source.gamma, "temperatures", sts.gamma, f"gamma = {source.gamma} of the draft source")
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
