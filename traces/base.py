"""A request trace: when requests arrive and how long they are. Nothing of the cluster is known here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Tokens that one entry of `Trace.prefix_blocks` stands for (the block size of the Mooncake traces).
PREFIX_BLOCK_TOKENS = 512

#: Longest prompt or output that is taken for a length and not for a broken file.
MAX_TOKENS = 2**31 - 1

#: Latest arrival, seconds: what int64 nanoseconds can count.
MAX_SECONDS = 9.0e9

KINDS = ("recorded", "synthetic")


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival.

    Parameters
    ----------
    name
        Short name, for columns and captions.
    kind
        ``"recorded"`` (a public log) or ``"synthetic"`` (drawn from a model).
    source
        One line of provenance: where the rows come from and what was done to them since.
    arrival_s
        float64[n], n >= 1: seconds from the first row, so ``arrival_s[0] == 0``; non-decreasing, at most
        `MAX_SECONDS`.
    prompt_tokens, output_tokens
        int64[n], each from 1 to `MAX_TOKENS`.
    prefix_blocks
        For each request the ids of its prompt's blocks of `PREFIX_BLOCK_TOKENS` tokens in order (the last may
        be partly filled): two requests share a prefix as far as their ids agree. None where it is not known.

    Raises
    ------
    InputError
        Where a field is not as above.

    Examples
    --------
    >>> trace = Trace("three", "synthetic", "by hand", [0.0, 1.0, 4.0], [10, 20, 30], [1, 2, 3])
    >>> len(trace), trace.duration_s, trace.mean_rate
    (3, 4.0, 0.5)
    >>> trace.scaled(2.0).arrival_s.tolist()
    [0.0, 0.5, 2.0]
    """

    name: str
    kind: str
    source: str
    arrival_s: FloatArray = field(repr=False)
    prompt_tokens: IntArray = field(repr=False)
    output_tokens: IntArray = field(repr=False)
    prefix_blocks: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for key in ("name", "source"):
            if not isinstance(getattr(self, key), str) or not getattr(self, key).strip():
                raise InputError(field=key, value=getattr(self, key), expected="a text that is not empty")
        if self.kind not in KINDS:
            raise InputError(field="kind", value=self.kind, expected=f"one of {', '.join(KINDS)}")
        arrival = _arrivals(self.arrival_s)
        prompt = _lengths("prompt_tokens", self.prompt_tokens, arrival.size)
        output = _lengths("output_tokens", self.output_tokens, arrival.size)
        for key, array in (("arrival_s", arrival), ("prompt_tokens", prompt), ("output_tokens", output)):
            array.setflags(write=False)
            object.__setattr__(self, key, array)
        if self.prefix_blocks is not None:
            object.__setattr__(self, "prefix_blocks", _blocks(self.prefix_blocks, prompt))

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1])

    @property
    def mean_rate(self) -> float:
        """Requests a second: (n - 1) gaps over the time from the first arrival to the last.

        Raises
        ------
        InputError
            Where all requests arrive at one instant (also: a single request), so that no rate exists.
        """
        if self.duration_s == 0.0:
            raise InputError(
                f"trace '{self.name}' has no mean rate: all its requests arrive at one instant",
                field="arrival_s",
                expected="requests at two different times",
            )
        return (len(self) - 1) / self.duration_s

    def window(self, start_s: float = 0.0, end_s: float = math.inf) -> Trace:
        """The requests that arrive in [start_s, end_s), with time counted anew from the first of them.

        Parameters
        ----------
        start_s, end_s
            Seconds of this trace's clock. ``end_s`` may be infinite ("to the end") but not lie beyond the
            last arrival: a window that the trace cannot fill would be shorter than it says.
        """
        check_window(start_s, end_s)
        first, last = np.searchsorted(self.arrival_s, [start_s, end_s], side="left")
        check_window_fits(self.name, self.duration_s, start_s, end_s, requests=int(last - first))
        return self._cut(slice(int(first), int(last)), window_note(start_s, end_s))

    def scaled(self, rate: float) -> Trace:
        """The same requests at `rate` times the arrival rate: every arrival time is divided by `rate`."""
        if not _is_number(rate) or not math.isfinite(rate) or rate <= 0.0:
            raise InputError(field="rate", value=rate, expected="a finite factor > 0")
        return replace(self, arrival_s=self.arrival_s / rate, source=f"{self.source}; rate x {rate:g}")

    def head(self, n: int) -> Trace:
        """The first `n` requests."""
        if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or not 1 <= n <= len(self):
            raise InputError(
                field="head",
                value=n,
                expected=f"an integer from 1 to {len(self)} (requests of '{self.name}')",
            )
        return self._cut(slice(0, int(n)), f"first {n} requests")

    def _cut(self, rows: slice, what: str) -> Trace:
        arrival = self.arrival_s[rows]
        return replace(
            self,
            source=f"{self.source}; {what}",
            arrival_s=arrival - arrival[0],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            prefix_blocks=None if self.prefix_blocks is None else self.prefix_blocks[rows],
        )


class WindowError(InputError):
    """A window that is none, or that a trace cannot fill."""


def check_window(start_s: float, end_s: float) -> None:
    """Raise WindowError unless these are seconds, the first before the second."""
    for key, value in (("start_s", start_s), ("end_s", end_s)):
        if not _is_number(value) or math.isnan(value):
            raise WindowError(field=key, value=value, expected="seconds")
    if not 0.0 <= start_s < end_s:
        raise WindowError(
            field="window", value=(start_s, end_s), expected="0 <= start_s < end_s (seconds of the trace)"
        )


def check_window_fits(
    name: str, duration_s: float, start_s: float, end_s: float, *, requests: int, file: str | None = None
) -> None:
    """Raise WindowError where a window of a trace ends after its last arrival, or holds no request."""
    if duration_s < end_s < math.inf:
        raise WindowError(
            f"the window ends after trace '{name}'",
            file=file,
            field="end_s",
            value=end_s,
            expected=f"at most {duration_s!r} (the last arrival), or inf for 'to the end'",
        )
    if requests == 0:
        raise WindowError(
            f"the window holds no request of trace '{name}'",
            file=file,
            field="window",
            value=(start_s, end_s),
            expected=f"a window with a request (arrivals run from 0.0 to {duration_s!r} s)",
        )


def window_note(start_s: float, end_s: float) -> str:
    """What a trace's source says of the window that was cut."""
    return f"window [{start_s:g}, {end_s:g}) s"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _array(key: str, values: npt.ArrayLike) -> npt.NDArray[np.generic]:
    try:
        array = np.array(values)
    except ValueError as error:
        raise InputError(f"not an array ({error})", field=key, expected="one number a request") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuf"):
        raise InputError(
            field=key, value=f"{array.dtype} {list(array.shape)}", expected="one number a request, in one row"
        )
    return array


def _arrivals(values: npt.ArrayLike) -> FloatArray:
    key = "arrival_s"
    array = _array(key, values).astype(np.float64)
    if array.size == 0:
        raise InputError("the trace holds no request", field=key, expected="at least one request")
    good = np.abs(array) <= MAX_SECONDS
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise InputError(
            f"request {row}",
            field=key,
            value=float(array[row]),
            expected=f"finite seconds, at most {MAX_SECONDS:g}",
        )
    if array[0] != 0.0:
        raise InputError(field=key, value=float(array[0]), expected="0.0 for the first request (time counts from it)")
    back = np.flatnonzero(np.diff(array) < 0.0)
    if back.size:
        row = int(back[0]) + 1
        raise InputError(
            f"request {row} arrives before the one in front of it",
            field=key,
            value=float(array[row]),
            expected=f"at least {float(array[row - 1])!r}",
        )
    return array


def _lengths(key: str, values: npt.ArrayLike, requests: int) -> IntArray:
    array = _array(key, values)
    if array.size != requests:
        raise InputError(field=key, value=array.size, expected=f"{requests} lengths, one a request")
    # NaN fails every comparison, so it is caught here with the fractions.
    good = (array >= 1) & (array <= MAX_TOKENS) & (array == np.rint(array))  # type: ignore[operator]
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise InputError(
            f"request {row}",
            field=key,
            value=array[row].item(),
            expected=f"an integer from 1 to {MAX_TOKENS}",
        )
    return array.astype(np.int64)


def _blocks(values: Sequence[Sequence[int]], prompt: IntArray) -> tuple[tuple[int, ...], ...]:
    key = "prefix_blocks"
    blocks = tuple(tuple(ids) for ids in values)
    if len(blocks) != prompt.size:
        raise InputError(field=key, value=len(blocks), expected=f"{prompt.size} tuples, one a request")
    full = -(-prompt // PREFIX_BLOCK_TOKENS)  # rounded up: the last block may be partly filled
    for row, (ids, most) in enumerate(zip(blocks, full.tolist(), strict=True)):
        if len(ids) > most:
            raise InputError(
                f"request {row}",
                field=key,
                value=f"{len(ids)} blocks",
                expected=f"at most {most} (blocks of {PREFIX_BLOCK_TOKENS} tokens, prompt of {prompt[row]})",
            )
        if ids and (set(map(type, ids)) != {int} or min(ids) < 0):
            raise InputError(f"request {row}", field=key, value=ids, expected="block ids: integers >= 0")
    return blocks
