"""Cache rows for requests that come and go: what the target and the drafter remember of each one's text."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsim.drafter.drafter import Context
from dsim.drafter.target import Target


class CacheRows:
    """One row a request in the target's KV cache and in the drafter's context; the least recently used goes first.

    A row that was given up is made again by running the request's text. Memory grows to what has been needed at
    once, `most` rows at most; growing gives up all rows.

    Parameters
    ----------
    target
        Makes the KV cache.
    capacity
        Positions a row holds.
    most
        Rows at most.
    """

    def __init__(self, target: Target, capacity: int, most: int) -> None:
        self.capacity, self.most = capacity, most
        self._target = target
        self._size = 0
        self._cache: Any = None
        self._context: Context | None = None
        # Request to row, least recently used first; and the rows that nobody has, as a heap.
        self._held: OrderedDict[int, int] = OrderedDict()
        self._free: list[int] = []

    def __getitem__(self, request: int) -> int:
        """Row of a request that has one."""
        return self._held[request]

    @property
    def cache(self) -> Any:
        """The target's cache of all rows; None before the first `place`."""
        return self._cache

    def place(self, requests: Sequence[int]) -> list[int]:
        """Give every request a row (at most `most` requests); returns those that lost theirs."""
        assert len(requests) <= self.most
        lost: list[int] = []
        for request in requests:
            if request in self._held:
                self._held.move_to_end(request)
        wanted = [request for request in requests if request not in self._held]
        need = len(self._held) + len(wanted)
        if need > self._size and self._size < self.most:
            lost, wanted = list(self._held), list(requests)
            self._allocate(min(self.most, max(need, 2 * self._size)))
        for request in wanted:
            if not self._free:
                # Never one of `requests`: those have been used last.
                victim, row = self._held.popitem(last=False)
                lost.append(victim)
                heapq.heappush(self._free, row)
            self._held[request] = heapq.heappop(self._free)
        return lost

    def release(self, request: int) -> None:
        """The request needs no row any more."""
        row = self._held.pop(request, None)
        if row is not None:
            heapq.heappush(self._free, row)

    def _allocate(self, size: int) -> None:
        self._cache = self._context = None  # before the new ones: both at once may not fit
        self._cache = self._target.new_cache(size, self.capacity)
        self._size = size
        self._held.clear()
        self._free = list(range(size))

    def runs(self, rows: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        """Stretches of neighbors in ascending `rows`: first, last (indices into `rows`) and the target's cache."""
        first = 0
        for last in range(1, len(rows) + 1):
            if last == len(rows) or rows[last] != rows[last - 1] + 1:
                yield first, last, self._cache.rows(rows[first], rows[last - 1] + 1)
                first = last

    def write(self, rows: Tensor, first: Tensor, new: Context) -> None:
        """Store what the drafter prepared.

        Parameters
        ----------
        rows, first
            int64[C]: rows, and each one's first new position.
        new
            Of S positions a text; what lies beyond a text's end is overwritten before it is seen.
        """
        if self._context is None:

            def empty(part: Tensor) -> Tensor:
                return torch.zeros(self._size, self.capacity, *part.shape[2:], dtype=part.dtype, device=part.device)

            extra = None if new.extra is None else empty(new.extra)
            self._context = Context([empty(k) for k in new.k], [empty(v) for v in new.v], extra)
        positions = first[:, None] + torch.arange(new.k[0].shape[1], device=first.device)
        for mine, theirs in zip(_parts(self._context), _parts(new), strict=True):
            mine[rows[:, None], positions] = theirs.to(mine.dtype)

    def read(self, rows: Sequence[int], length: int) -> Context:
        """The drafter's context of ascending `rows`, the first `length` positions."""
        assert self._context is not None
        dense = rows[-1] - rows[0] == len(rows) - 1
        chosen = slice(rows[0], rows[-1] + 1) if dense else list(rows)
        context = self._context
        return Context(
            [k[chosen, :length] for k in context.k],
            [v[chosen, :length] for v in context.v],
            None if context.extra is None else context.extra[chosen, :length],
        )


def _parts(context: Context) -> list[Tensor]:
    return [*context.k, *context.v, *([] if context.extra is None else [context.extra])]
