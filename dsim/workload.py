"""Which request comes next: a numbered sequence drawn from a trace, and when each is issued.

The i-th request of a seed is the same whatever the policy, the load, the replica or the order of completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dsim.drafts.luck import uniform
from dsim.errors import InputError
from traces import Trace

IntArray = npt.NDArray[np.int64]


class Workload(Protocol):
    """A numbered sequence of requests: what the cluster asks for. `RequestStream` is one; see `docs/extending.md`.

    Attributes
    ----------
    domains
        Names of the text domains, in the order of `domain`'s indices.
    """

    domains: tuple[str, ...]

    def lengths(self, i: int) -> tuple[int, int]:
        """Prompt and output tokens of request i, each >= 1."""
        ...

    def domain(self, i: int) -> int:
        """Index into `domains` of request i."""
        ...

    def arrival_ns(self, i: int) -> int:
        """Arrival of request i in an open loop, nanoseconds, non-decreasing in i."""
        ...


@dataclass(frozen=True)
class ClosedLoop:
    """N users, each with one request at a time.

    Parameters
    ----------
    users
        Concurrent users.
    think_s
        Pause between a user's last token and the next request, seconds.
    stagger_s
        The first requests are spread evenly over this time.
    warmup_per_user
        Requests a user that are discarded before scoring starts (at least 3 in a steady measurement).
    scored
        Requests that are scored.
    steady
        True: the population is kept full until the last scored request ends. False: a benchmark client that
        issues exactly ``scored`` requests, ramp and drain included.
    """

    users: int
    think_s: float = 0.0
    stagger_s: float = 0.0
    warmup_per_user: int = 3
    scored: int = 200
    steady: bool = True

    @property
    def first_scored(self) -> int:
        """Number of the first scored request."""
        return self.users * self.warmup_per_user if self.steady else 0

    @property
    def last_start_ns(self) -> int:
        """When the last user starts, nanoseconds."""
        return round(self.stagger_s * (self.users - 1) / self.users * 1e9)


def scored_too_early(load: ClosedLoop, now_ns: int) -> InputError:
    """The error of a closed loop whose first scored request is issued before all users have started."""
    return InputError(
        f"the first scored request comes at {now_ns / 1e9:g} s, before the last of {load.users} users "
        f"starts at {load.last_start_ns / 1e9:g} s",
        field="load.stagger_s",
        value=load.stagger_s,
        expected="less, or more load.warmup_per_user",
    )


@dataclass(frozen=True)
class OpenLoop:
    """Arrivals at the trace's own times, whatever the server does.

    Parameters
    ----------
    requests
        How many are issued.
    warmup, cooldown
        Requests at the start and at the end that are not scored.
    """

    requests: int
    warmup: int = 0
    cooldown: int = 0

    @property
    def scored(self) -> int:
        """Requests that are scored."""
        return self.requests - self.warmup - self.cooldown


@dataclass(frozen=True)
class RequestBlock:
    """Some consecutive requests of a workload, int64[n] each; `arrival_ns` is empty in a closed loop."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    domain: IntArray
    arrival_ns: IntArray


def request_block(stream: Workload, start: int, stop: int, *, due: bool) -> RequestBlock:
    """Requests ``start`` to ``stop`` - 1 of any workload; with their arrivals where `due`."""
    if isinstance(stream, RequestStream):
        return stream.block(start, stop, due=due)
    numbers = range(start, stop)
    lengths = np.array([stream.lengths(i) for i in numbers], dtype=np.int64).reshape(-1, 2)
    domain = np.array([stream.domain(i) for i in numbers], dtype=np.int64)
    arrival = np.array([stream.arrival_ns(i) for i in numbers] if due else [], dtype=np.int64)
    return RequestBlock(lengths[:, 0], lengths[:, 1], domain, arrival)


class RequestStream:
    """The numbered sequence: prompt, output, domain and (open loop) arrival of request i.

    Parameters
    ----------
    trace
        Where lengths and arrivals come from.
    domain_weights
        Relative weight by domain. Domains are drawn in alphabetical order, so that drafters which list them in
        another order still see the same requests.
    order_seed, domain_seed
        Seeds of the two streams.
    order
        ``"shuffled"``: a permutation of the rows; ``"trace"``: the rows in order.
    offset
        ``True``: start at a row drawn by the order seed (the sequence wraps around).
    """

    def __init__(
        self,
        trace: Trace,
        domain_weights: Mapping[str, float],
        *,
        order_seed: int,
        domain_seed: int,
        order: str = "shuffled",
        offset: bool = False,
    ) -> None:
        rows = len(trace)
        rng = np.random.default_rng(order_seed)
        index = rng.permutation(rows) if order == "shuffled" else np.arange(rows)
        if offset:
            index = np.roll(index, -int(rng.integers(rows)))
        self.domains = tuple(sorted(domain_weights))
        weights = np.array([domain_weights[name] for name in self.domains], dtype=np.float64)
        if weights.size == 0 or not np.all((weights >= 0) & np.isfinite(weights)) or not weights.max() > 0:
            raise InputError(field="domains", value=dict(domain_weights), expected="weights >= 0 with a sum > 0")
        self._edges = np.cumsum(weights / weights.max() / (weights / weights.max()).sum())[:-1]
        self._domain_seed = domain_seed
        self._prompt, self._output = trace.prompt_tokens[index], trace.output_tokens[index]
        self._domain: list[int] = []
        self._rows = rows
        # Arrivals keep their gaps when the start is moved; the wrap-around gap is the mean one.
        gaps = np.diff(trace.arrival_s, append=trace.arrival_s[-1] + _mean_gap(trace.arrival_s))
        start = np.concatenate([[0.0], np.cumsum(gaps[index])[:-1]]) if order == "trace" else trace.arrival_s
        self._arrival_ns = np.rint(start * 1e9).astype(np.int64)

    def __len__(self) -> int:
        return self._rows

    def lengths(self, i: int) -> tuple[int, int]:
        """Prompt and output tokens of request i."""
        row = i % self._rows
        return int(self._prompt[row]), int(self._output[row])

    def domain(self, i: int) -> int:
        """Index of the domain of request i."""
        while i >= len(self._domain):
            n = len(self._domain)
            u = uniform(self._domain_seed, np.arange(n, n + 1024))
            self._domain.extend(np.searchsorted(self._edges, u, side="right").tolist())
        return self._domain[i]

    def arrival_ns(self, i: int) -> int:
        """When request i arrives in an open loop, from the first one's arrival."""
        return int(self._arrival_ns[i])

    def block(self, start: int, stop: int, *, due: bool) -> RequestBlock:
        """Requests ``start`` to ``stop`` - 1 in one go."""
        rows = np.arange(start, stop) % self._rows
        if stop > start:
            self.domain(stop - 1)  # drawn up to there
        return RequestBlock(
            self._prompt[rows],
            self._output[rows],
            np.asarray(self._domain[start:stop], dtype=np.int64),
            self._arrival_ns[start:stop] if due else np.zeros(0, dtype=np.int64),
        )


def _mean_gap(arrival_s: np.ndarray) -> float:
    return float(arrival_s[-1] - arrival_s[0]) / max(1, arrival_s.size - 1)
