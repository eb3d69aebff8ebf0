"""What every reader produces (`Rows`), what it must offer (`TraceFormat`), and the checks that all share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from traces.base import MAX_SECONDS, MAX_TOKENS, FloatArray, IntArray, Trace
from traces.rawtext import RawText


@dataclass(frozen=True)
class Rows:
    """The rows of one file as they stand there, row `i` on line ``first_line + i``; checked by `to_trace`.

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


def to_trace(
    rows: Rows, text: RawText, *, name: str, source: str, sort: bool = False, drop_zero: bool = False
) -> Trace:
    """Check `rows` and make them a `Trace`.

    Parameters
    ----------
    sort
        Repair rows that are out of order in time (stable sort) instead of refusing them.
    drop_zero
        Leave out rows with a length of 0 (failed requests in some logs) instead of refusing them.
    """
    if rows.arrival_s.size == 0:
        raise InputError("the file holds no request, only a header", file=text.file, expected="at least one request")
    _check_values(rows, text, least=0 if drop_zero else 1)
    arrival, blocks = rows.arrival_s, rows.prefix_blocks
    prompt, output = rows.prompt_tokens.astype(np.int64), rows.output_tokens.astype(np.int64)
    line_of = np.arange(arrival.size) + rows.first_line
    if drop_zero:
        kept = (prompt > 0) & (output > 0)
        if not kept.any():
            raise InputError("every request has a length of 0", file=text.file, field=rows.fields[1])
        if not kept.all():
            source += f"; {int((~kept).sum())} of {kept.size} rows with a length of 0 left out"
            order = np.flatnonzero(kept)
            arrival, prompt, output, line_of = arrival[order], prompt[order], output[order], line_of[order]
            blocks = None if blocks is None else tuple(blocks[row] for row in order)
    back = np.flatnonzero(np.diff(arrival) < 0.0)
    if back.size and not sort:
        _refuse_order(rows, text, int(line_of[back[0]]), int(line_of[back[0] + 1]))
    if back.size:
        source += "; rows sorted by arrival"
        order = np.argsort(arrival, kind="stable")
        arrival, prompt, output = arrival[order], prompt[order], output[order]
        blocks = None if blocks is None else tuple(blocks[row] for row in order)
    return Trace(
        name=name,
        kind="recorded",
        source=source,
        arrival_s=arrival - arrival[0],
        prompt_tokens=prompt,
        output_tokens=output,
        prefix_blocks=blocks,
    )


def _check_values(rows: Rows, text: RawText, least: int) -> None:
    """Refuse the first row that holds a time or a length out of range (NaN fails each comparison)."""
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
        file=text.file,
        line=row + rows.first_line,
        field=rows.fields[which],
        value=_shown(rows, row, rows.fields[which], columns[which]),
        expected=expected,
    )


def _refuse_order(rows: Rows, text: RawText, before: int, line: int) -> None:
    field = rows.fields[0]
    previous = _shown(rows, before - rows.first_line, field, rows.arrival_s)
    raise InputError(
        "time goes backwards",
        file=text.file,
        line=line,
        field=field,
        value=_shown(rows, line - rows.first_line, field, rows.arrival_s),
        expected=f"not before {previous!r} of line {before} (sort=True puts the rows in order)",
    )


def _shown(rows: Rows, row: int, field: str, parsed: npt.NDArray[np.generic]) -> object:
    return parsed[row].item() if rows.raw is None else rows.raw(row, field)
