"""Draft sources: for each request at its position, the drafter's confidences and what would be accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dsim.drafts.bank import Bank
from dsim.drafts.luck import hash64_int, uniform
from dsim.drafts.quality import Quality, graded
from dsim.drafts.tilt import DomainTilt, Tilt, alpha_of, alpha_table, tilted_bank
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

    A source may also have ``observe(requests, positions, verified, accepted)``, int64[R] each: the replica calls it
    when a step ends, with the drafts verified of each request and the accepted ones among them.

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


@dataclass(frozen=True)
class ReplayTables:
    """What `BankDrafts` reads, for a compiled loop that replays it without Python.

    Attributes
    ----------
    confidence
        float32[N, >= gamma]: by row of the bank.
    accepted
        int64[N]: recorded outcomes, over the bank's whole block; they count where `limits` is None.
    limits
        uint64[N, gamma]: a draft survives if its luck (53 bits of the hash of seed + 1, request, position, k) is
        below.
    starts, usable
        int64[texts]: first row of each text, and its rows that are replayed.
    members, member_bounds
        int64[texts], int64[domains + 1]: texts by domain, one domain after the other.
    seed
        Of the trajectories.
    """

    confidence: Float32Array
    accepted: IntArray
    limits: npt.NDArray[np.uint64] | None
    starts: IntArray
    usable: IntArray
    members: IntArray
    member_bounds: IntArray
    seed: int


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
        Optional `Tilt`, or the `DomainTilt` that `dsim.drafts.tilt` solves for a curve.
    quality
        Optional `dsim.drafts.quality.Quality`: other confidences for the same drafts, on top of the tilt.
    """

    paired = True

    def __init__(
        self,
        bank: Bank,
        *,
        gamma: int | None = None,
        seed: int = 0,
        tilt: Tilt | DomainTilt | None = None,
        quality: Quality | None = None,
    ) -> None:
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
        self._alpha_bytes = bank.alpha_bytes
        # Where alpha is tilted: what is accepted, by place; the place of position 0 by request, as `_base`.
        self._outcomes = None
        self._limits: npt.NDArray[np.uint64] | None = None
        if tilt is not None:
            tilted = tilted_bank(bank, tilt, wanted)
            self.label = tilt.marked(self.label)
            self._confidence, self._limits = tilted.confidence, tilted.limits
            self._outcomes = tilted.outcomes(seed + 1)
        if quality is not None:
            self.label += f":{quality.label}"
            self._confidence = graded(bank, tilt, wanted, quality)
        self._alpha = alpha_table(bank, tilt, wanted)
        # By request number: row of its position 0 in the current trajectory, and the positions that lie in it.
        self._base = np.zeros(1024, dtype=np.int64)
        self._first = np.zeros(1024, dtype=np.int64)
        self._end = np.zeros(1024, dtype=np.int64)
        self._domain = np.full(1024, -1, dtype=np.int64)
        self._length = np.zeros(1024, dtype=np.int64)
        self._place = np.zeros(1024, dtype=np.int64)
        self._splices = False

    def open(self, request: int, domain: int, output_tokens: int) -> None:
        """Choose the request's first trajectory."""
        if request >= self._base.size:
            grow = max(2 * self._base.size, request + 1) - self._base.size
            for name in ("_base", "_first", "_end", "_domain", "_length", "_place"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.full(grow, -1, dtype=np.int64)]))
        self._domain[request] = domain
        self._length[request] = output_tokens
        self._enter(request, 0, 0)
        if output_tokens > self._end[request]:
            self._splices = True

    def _enter(self, request: int, segment: int, first: int) -> None:
        members = self._members[self._domain[request]]
        trajectory = members[hash64_int(self._seed, request, segment) % members.size]
        self._base[request] = self._bounds[trajectory] - first
        self._first[request] = first
        self._end[request] = first + self._usable[trajectory]
        if self._outcomes is not None:
            here = int(min(self._end[request], self._length[request])) - first
            self._place[request] = self._outcomes.place(request, first, int(self._bounds[trajectory]), here) - first

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
        if self._outcomes is not None:
            places = self._place.take(requests)
            places += positions
            accepted = self._outcomes.accepted.take(places).astype(np.int64)
        else:
            accepted = self._accepted.take(rows)
            if self._truncated:
                np.minimum(accepted, self.gamma, out=accepted)
        # Whole rows first: taking from a slice would copy all of it every time.
        confidence = self._confidence.take(rows, axis=0)
        return confidence[:, : self.gamma] if self._truncated else confidence, accepted

    def replay_tables(self) -> ReplayTables:
        """All that drafting reads."""
        counts = [members.size for members in self._members]
        return ReplayTables(
            confidence=self._confidence,
            accepted=self._accepted,
            limits=self._limits,
            starts=np.asarray(self._bounds[:-1], dtype=np.int64),
            usable=np.asarray(self._usable, dtype=np.int64),
            members=np.concatenate(self._members).astype(np.int64),
            member_bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            seed=self._seed,
        )

    def alpha(self, requests: IntArray, positions: IntArray) -> npt.NDArray[np.float64]:
        """float64[R, gamma]: acceptance probabilities of the drafts at the positions last asked for."""
        stored = self._alpha_bytes[self._base[requests] + positions, : self.gamma]
        return np.asarray(self._alpha[self._domain[requests][:, None], np.arange(self.gamma), stored])

    def luck(self, requests: IntArray, positions: IntArray) -> npt.NDArray[np.float64]:
        """float64[R, gamma]: u_k such that "accepted = leading run of u_k < alpha_k" is the recorded outcome.

        Drafts up to the recorded count have u in [0, alpha_k), the one after it u in [alpha_k, 1), and the rest
        are free; the hash of (seed, request, position, k) places them.
        """
        rows = self._base[requests] + positions
        k = np.arange(self.gamma)
        raw = uniform(self._seed + 1, requests[:, None], positions[:, None], k[None, :])
        alpha = alpha_of(self._alpha_bytes[rows, : self.gamma])
        accepted = self._accepted[rows][:, None]
        return np.where(k < accepted, raw * alpha, np.where(k == accepted, alpha + raw * (1 - alpha), raw))
