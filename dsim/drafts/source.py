"""Draft sources: for each request at its position, the drafter's confidences and what would be accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logit

from dsim.drafts.bank import Bank
from dsim.drafts.luck import hash64_int, uniform
from dsim.errors import InputError

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@runtime_checkable
class DraftSource(Protocol):
    """What a replica asks for drafts.

    Attributes
    ----------
    gamma
        Drafted tokens a block.
    paired
        True where the same (request, position) always gives the same draft and luck, whatever the policy.
    domains
        Names of the text domains a request can belong to.
    label
        Goes to the column ``drafts_source``: kind, origin, and what was done to it.

    Examples
    --------
    >>> class Always:
    ...     gamma, paired, domains, label = 2, True, ("any",), "scripted"
    ...     def open(self, request, domain, output_tokens): pass
    ...     def draft(self, requests, positions):
    ...         n = len(requests)
    ...         return np.full((n, 2), 0.9, np.float32), np.full(n, 2)
    >>> isinstance(Always(), DraftSource)
    True
    """

    gamma: int
    paired: bool
    domains: tuple[str, ...]
    label: str

    def open(self, request: int, domain: int, output_tokens: int) -> None:
        """Announce a request (its number, the index of its domain, its output length) before its first draft."""
        ...

    def draft(self, requests: IntArray, positions: IntArray) -> tuple[Float32Array, IntArray]:
        """Confidences float32[R, gamma] and accepted int64[R] if the whole block were verified.

        ``positions`` counts the output tokens that a request already has (>= 1), less one.
        """
        ...


#: Largest shift, logits: beyond it every probability is 0 or 1.
MAX_TILT = 20.0


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

    def by_position(self, gamma: int, name: str) -> npt.NDArray[np.float64]:
        """float64[gamma] of one of the two shifts."""
        values = np.asarray(getattr(self, name), dtype=np.float64)
        if values.size == 1:
            values = np.repeat(values, gamma)
        if values.shape != (gamma,) or not np.all(np.abs(values) <= MAX_TILT):
            expected = f"1 or {gamma} numbers between -{MAX_TILT:g} and {MAX_TILT:g}"
            raise InputError(field=f"tilt.{name}", value=values.tolist(), expected=expected)
        return values


class BankDrafts:
    """Drafts replayed from a bank.

    A request walks along a trajectory of its domain, chosen by a hash of (seed, request); where its output is
    longer than the trajectory's usable part it goes on in another, chosen likewise. So the draft and the luck at
    (request, position) do not depend on the policy, the replica, or the order of events.

    Parameters
    ----------
    bank
        An opened bank.
    gamma
        Block size of the arm; at most the bank's (the tail of every block is cut off and the label says so).
    seed
        Seed of this run's trajectories and luck.
    tilt
        Optional `Tilt`.
    """

    paired = True

    def __init__(self, bank: Bank, *, gamma: int | None = None, seed: int = 0, tilt: Tilt | None = None) -> None:
        header = bank.header
        wanted = header.gamma if gamma is None else gamma
        if not 1 <= wanted <= header.gamma:
            raise InputError(
                f"the bank of drafter '{header.drafter}' holds blocks of {header.gamma}",
                field="gamma",
                value=wanted,
                expected=f"1 to {header.gamma}",
            )
        self.gamma = wanted
        self.domains = header.domains
        self.label = f"{header.kind}:{header.source}:{header.drafter}"
        if wanted < header.gamma:
            self.label += f":first-{wanted}-of-{header.gamma}"
        self._seed = seed
        self._bounds = bank.bounds
        self._usable = bank.usable()
        self._members = [np.flatnonzero(bank.domain == i) for i in range(len(header.domains))]
        self._confidence = bank.confidence
        self._accepted = bank.accepted
        self._truncated = wanted < header.gamma
        self._alpha_bytes = bank.alpha_bytes[:, :wanted]
        self._shift_alpha: npt.NDArray[np.float64] | None = None
        if tilt is not None:
            shift_c, shift_a = tilt.by_position(wanted, "confidence"), tilt.by_position(wanted, "alpha")
            if np.any(shift_c):
                # The tail of a truncated block is never seen; its shift is arbitrary.
                whole = np.resize(shift_c, header.gamma)
                self._confidence = _shift(np.asarray(bank.confidence, dtype=np.float64), whole).astype(np.float32)
            if np.any(shift_a):
                self._shift_alpha = shift_a
            if np.any(shift_a) or np.any(shift_c):
                self.label += ":tilted"
        # By request number: row of its position 0 in the current trajectory, and the positions that lie in it.
        self._base = np.zeros(1024, dtype=np.int64)
        self._first = np.zeros(1024, dtype=np.int64)
        self._end = np.zeros(1024, dtype=np.int64)
        self._domain = np.full(1024, -1, dtype=np.int64)
        self._splices = False

    def open(self, request: int, domain: int, output_tokens: int) -> None:
        """Choose the request's first trajectory."""
        if request >= self._base.size:
            grow = max(2 * self._base.size, request + 1) - self._base.size
            for name, fill in (("_base", 0), ("_first", 0), ("_end", 0), ("_domain", -1)):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.full(grow, fill, dtype=np.int64)]))
        self._domain[request] = domain
        self._enter(request, 0, 0)
        if output_tokens > self._end[request]:
            self._splices = True

    def _enter(self, request: int, segment: int, first: int) -> None:
        members = self._members[self._domain[request]]
        trajectory = members[hash64_int(self._seed, request, segment) % members.size]
        self._base[request] = self._bounds[trajectory] - first
        self._first[request] = first
        self._end[request] = first + self._usable[trajectory]

    def _seek(self, request: int, position: int) -> None:
        segment, first = 0, 0
        self._enter(request, 0, 0)
        while position >= self._end[request]:
            segment, first = segment + 1, int(self._end[request])
            self._enter(request, segment, first)

    def draft(self, requests: IntArray, positions: IntArray) -> tuple[Float32Array, IntArray]:
        """See `DraftSource.draft`."""
        if self._splices:
            outside = (positions >= self._end[requests]) | (positions < self._first[requests])
            for i in np.flatnonzero(outside):
                self._seek(int(requests[i]), int(positions[i]))
        rows = self._base.take(requests)
        rows += positions
        if self._shift_alpha is not None:
            accepted = self._tilted(requests, positions, self._shift_alpha)
        else:
            accepted = self._accepted.take(rows)
            if self._truncated:
                np.minimum(accepted, self.gamma, out=accepted)
        # Whole rows first: taking from a slice would copy all of it every time.
        confidence = self._confidence.take(rows, axis=0)
        return confidence[:, : self.gamma] if self._truncated else confidence, accepted

    def luck(self, requests: IntArray, positions: IntArray) -> npt.NDArray[np.float64]:
        """float64[R, gamma]: u_k such that "accepted = leading run of u_k < alpha_k" is the recorded outcome.

        Drafts up to the recorded count have u in [0, alpha_k), the one after it u in [alpha_k, 1), and the rest
        are free; the hash of (seed, request, position, k) places them.
        """
        rows = self._base[requests] + positions
        k = np.arange(self.gamma)
        raw = uniform(self._seed + 1, requests[:, None], positions[:, None], k[None, :])
        alpha = _clipped(self._alpha_bytes[rows] / 255)
        accepted = self._accepted[rows][:, None]
        return np.where(k < accepted, raw * alpha, np.where(k == accepted, alpha + raw * (1 - alpha), raw))

    def _tilted(self, requests: IntArray, positions: IntArray, shift: npt.NDArray[np.float64]) -> IntArray:
        rows = self._base[requests] + positions
        alpha = _shift(_clipped(self._alpha_bytes[rows] / 255), shift)
        survives = np.logical_and.accumulate(self.luck(requests, positions) < alpha, axis=1)
        return np.asarray(survives.sum(axis=1), dtype=np.int64)


def _clipped(alpha: npt.ArrayLike) -> npt.NDArray[np.float64]:
    # Stored in units of 1/255: 0 and 1 stand for "below half a unit", so that a logit exists.
    return np.clip(np.asarray(alpha, dtype=np.float64), 0.5 / 255, 1 - 0.5 / 255)


def _shift(probability: npt.NDArray[np.float64], by: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # 0 and 1 have no logit; the nearest float32 stands for them.
    logits = logit(np.clip(probability, 2.0**-24, 1 - 2.0**-24))
    return np.asarray(expit(logits + by), dtype=np.float64)
