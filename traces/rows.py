"""What every reader produces (`Rows`), what it must offer (`TraceFormat`), and the checks that all share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from traces.base import (
    MAX_SECONDS,
    MAX_TOKENS,
    FloatArray,
    IntArray,
    Trace,
    check_window,
    check_window_fits,
    window_note,
)
from traces.rawtext import RawText


@dataclass(frozen=True)
class Rows:
    """The rows of one text as they stand there, row `i` on line ``first_line + i``; checked by `to_trace`.

    Parameters
    ----------
    arrival_s
        float64[n]: seconds from any origin.
    prompt_tokens, output_tokens
        int64[n] (or float64[n] that may hold fractions or NaN, which `to_trace` refuses).
    fields
        What the file calls the arrival time, the prompt length and the output length.
    first_line
        Line (from 1) of the first row.
    prefix_blocks
        Block ids of each prompt, or None.
    raw
        ``raw(row, name)`` is the value as written in the file, for error messages. Left out, the parsed value
        is shown.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray | FloatArray
    output_tokens: IntArray | FloatArray
    fields: tuple[str, str, str]
    first_line: int
    prefix_blocks: tuple[tuple[int, ...], ...] | None = None
    raw: Callable[[int, str], object] | None = None


class TraceFormat(Protocol):
    """One file format. `docs/traces.md` has a complete example.

    Attributes
    ----------
    name
        What ``read_trace(..., format=name)`` and messages call it.
    fields
        The names that a file of this format must have in its first line (column names, JSON keys).
    rowwise
        May be left out, and counts as False then. True: a row means the same whatever rows come after it. A large file
        is then read in blocks: `rows` is called with the lines up to the first row and some later ones behind them.
    """

    @property
    def name(self) -> str: ...

    @property
    def fields(self) -> tuple[str, ...]: ...

    def names(self, text: RawText) -> list[str]:
        """The names in the first line, read the way this format reads it; empty where that makes no sense."""
        ...

    def rows(self, text: RawText) -> Rows:
        """All rows; raises InputError with file, line, field, value where one cannot be parsed."""
        ...


@dataclass(frozen=True)
class Part:
    """Some of a file's rows, and where they lie in it.

    Parameters
    ----------
    rows
        The rows; the first `skip` of them belong to an earlier part.
    skip, line
        The row `skip` stands on line `line` of the file.
    """

    rows: Rows
    skip: int
    line: int

    def line_of(self, row: int) -> int:
        """The file's line that a row stands on."""
        return self.line + row - self.skip


@dataclass
class _Found:
    """What a walk through the file has found: the rows to keep, and what there is to say of all of them."""

    arrival: list[FloatArray] = field(default_factory=list)
    prompt: list[IntArray] = field(default_factory=list)
    output: list[IntArray] = field(default_factory=list)
    blocks: list[tuple[int, ...]] | None = None
    rows: int = 0
    dropped: int = 0
    unsorted: bool = False
    origin: float = np.nan
    earliest: float = np.inf
    latest: float = -np.inf

    @property
    def kept(self) -> int:
        return sum(array.size for array in self.arrival)


def to_trace(
    parts: Callable[[], Iterable[Part]],
    *,
    file: str,
    name: str,
    source: Callable[[], str],
    sort: bool = False,
    drop_zero: bool = False,
    window: tuple[float, float] | None = None,
) -> Trace:
    """Check all rows of a file and make them, or those of a window, a `Trace`.

    Parameters
    ----------
    parts
        Goes through the file once, and again at a second call.
    source
        The trace's source; called when the file has been read.
    sort
        Repair rows that are out of order in time (stable sort) instead of refusing them.
    drop_zero
        Leave out rows with a length of 0 (failed requests in some logs) instead of refusing them.
    window
        As in `Trace.window`, which gives the same of the whole trace; only its rows are held in memory.
    """
    if window is not None:
        check_window(*window)
    found = _walk(parts(), file, sort=sort, drop_zero=drop_zero, window=window)
    if found.rows == 0:
        raise InputError("the file holds no request, only a header", file=file, expected="at least one request")
    if window is not None and found.earliest < found.origin:
        # The clock starts at a row that came late: the window was looked for in the wrong place.
        found = _walk(parts(), file, sort=sort, drop_zero=drop_zero, window=window, origin=found.earliest)
    duration = found.latest - found.earliest
    if duration > MAX_SECONDS:
        raise InputError(
            "the file spans too long a time", file=file, value=duration, expected=f"at most {MAX_SECONDS:g} seconds"
        )
    if window is not None:
        check_window_fits(name, duration, *window, requests=found.kept, file=file)
    arrival = np.concatenate(found.arrival)
    prompt, output = np.concatenate(found.prompt), np.concatenate(found.output)
    blocks = found.blocks
    if found.unsorted:
        order = np.argsort(arrival, kind="stable")
        arrival, prompt, output = arrival[order], prompt[order], output[order]
        blocks = None if blocks is None else [blocks[row] for row in order]
    arrival -= found.earliest
    notes = [
        text
        for text, applies in (
            (f"{found.dropped} of {found.rows} rows with a length of 0 left out", found.dropped),
            ("rows sorted by arrival", found.unsorted),
            ("" if window is None else window_note(*window), window),
        )
        if applies
    ]
    return Trace(
        name=name,
        kind="recorded",
        source="; ".join([source(), *notes]),
        # Twice, as a trace and a window of it do: in floating point that is not the same as once.
        arrival_s=arrival - arrival[0],
        prompt_tokens=prompt,
        output_tokens=output,
        prefix_blocks=None if blocks is None else tuple(blocks),
    )


def _walk(
    parts: Iterable[Part],
    file: str,
    *,
    sort: bool,
    drop_zero: bool,
    window: tuple[float, float] | None,
    origin: float | None = None,
) -> _Found:
    """Check every row, and keep those of the window on a clock that starts at `origin` (None: at the first row)."""
    found, before = _Found(), None
    fields: tuple[str, str, str] | None = None
    for part in parts:
        rows = part.rows
        fields = rows.fields
        _check_values(part, file, least=0 if drop_zero else 1)
        index = np.arange(part.skip, rows.arrival_s.size)
        found.rows += index.size
        if drop_zero:
            whole = (rows.prompt_tokens[index] > 0) & (rows.output_tokens[index] > 0)
            found.dropped += int(np.count_nonzero(~whole))
            index = index[whole]
        if index.size == 0:
            continue
        arrival = rows.arrival_s[index]
        last = arrival[:1] if before is None else before[0].rows.arrival_s[before[1] :][:1]
        back = np.flatnonzero(np.diff(arrival, prepend=last) < 0.0)
        if back.size and not sort:
            place = int(back[0])
            previous = (part, int(index[place - 1])) if place else before
            assert previous is not None
            _refuse_order(previous, (part, int(index[place])), file)
        before = (part, int(index[-1]))
        found.unsorted |= bool(back.size)
        found.earliest = min(found.earliest, float(arrival.min()))
        found.latest = max(found.latest, float(arrival.max()))
        if np.isnan(found.origin):
            found.origin = float(arrival[0]) if origin is None else origin
        if window is not None:
            clock = arrival - found.origin
            inside = (clock >= window[0]) & (clock < window[1])
            index, arrival = index[inside], arrival[inside]
        found.arrival.append(arrival)
        found.prompt.append(rows.prompt_tokens[index].astype(np.int64))
        found.output.append(rows.output_tokens[index].astype(np.int64))
        if rows.prefix_blocks is not None:
            found.blocks = [] if found.blocks is None else found.blocks
            found.blocks.extend(rows.prefix_blocks[row] for row in index)
    if found.rows and before is None:
        raise InputError("every request has a length of 0", file=file, field=fields[1] if fields else None)
    return found


def _check_values(part: Part, file: str, least: int) -> None:
    """Refuse the first row that holds a time or a length out of range (NaN fails each comparison)."""
    rows = part.rows
    columns: list[npt.NDArray[np.generic]] = [rows.arrival_s, rows.prompt_tokens, rows.output_tokens]
    good = [np.abs(rows.arrival_s) <= MAX_SECONDS]
    for tokens in (rows.prompt_tokens, rows.output_tokens):
        good.append((tokens >= least) & (tokens <= MAX_TOKENS) & (tokens == np.rint(tokens)))
    fine = good[0] & good[1] & good[2]
    if fine.all():
        return
    row = int(np.flatnonzero(~fine)[0])
    which = next(index for index in range(3) if not good[index][row])
    expected = f"a finite number of seconds, at most {MAX_SECONDS:g}"
    if which > 0:
        expected = f"an integer from {least} to {MAX_TOKENS}"
        if columns[which][row] == 0:
            expected += " (drop_zero=True leaves such rows out)"
    raise InputError(
        file=file,
        line=part.line_of(row),
        field=rows.fields[which],
        value=_shown(rows, row, rows.fields[which], columns[which]),
        expected=expected,
    )


def _refuse_order(before: tuple[Part, int], now: tuple[Part, int], file: str) -> None:
    lines = [part.line_of(row) for part, row in (before, now)]
    previous, value = (_shown(part.rows, row, part.rows.fields[0], part.rows.arrival_s) for part, row in (before, now))
    raise InputError(
        "time goes backwards",
        file=file,
        line=lines[1],
        field=now[0].rows.fields[0],
        value=value,
        expected=f"not before {previous!r} of line {lines[0]} (sort=True puts the rows in order)",
    )


def _shown(rows: Rows, row: int, field: str, parsed: npt.NDArray[np.generic]) -> object:
    return parsed[row].item() if rows.raw is None else rows.raw(row, field)
