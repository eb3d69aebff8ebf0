"""CSV traces with a header: three columns are read, further ones are allowed and left alone.

pandas parses a block of lines at once. Only if something is wrong is the block walked line by line, to say where.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

import numpy as np

from dsim.errors import InputError
from traces.base import MAX_SECONDS, FloatArray, IntArray
from traces.rawtext import RawText
from traces.rows import Rows

if TYPE_CHECKING:
    import pandas as pd

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LOCAL = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]*)?")
_ZONED = re.compile(_LOCAL.pattern + r"(Z|[+-]([01][0-9]|2[0-3])(:?[0-5][0-9])?)")
_WANTED = {
    "iso": "a date and time from 1970 to 2261 like 2023-11-16 18:15:46.680590, optionally with Z or an offset",
    "s": f"a finite number of seconds, at most {MAX_SECONDS:g}",
    "tokens": "an integer >= 1",
}


@dataclass(frozen=True)
class CsvFormat:
    """A CSV format (implements `traces.rows.TraceFormat`).

    Parameters
    ----------
    name
        Name of the format.
    time, prompt, output
        Columns of the arrival time, the prompt tokens and the output tokens.
    clock
        How times are written: ``"iso"`` (date and time, any number of fraction digits, optionally with an
        offset from UTC on every row) or ``"s"`` (seconds from any origin).
    """

    name: str
    time: str
    prompt: str
    output: str
    clock: Literal["iso", "s"]

    rowwise: ClassVar[bool] = True

    @property
    def fields(self) -> tuple[str, str, str]:
        return (self.time, self.prompt, self.output)

    def names(self, text: RawText) -> list[str]:
        try:
            return [name.strip() for name in next(csv.reader([text.first_line], strict=True))]
        except (csv.Error, StopIteration):
            return []

    def rows(self, text: RawText) -> Rows:
        names = self.names(text)
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise InputError(
                "two columns have one name", file=text.file, line=1, field=repeated[0], value=", ".join(names)
            )
        # A file that is a rectangle has this many commas; one that has not, or has quotes, is walked.
        commas = (len(names) - 1) * (text.data.count(b"\n") + 1)
        if b'"' in text.data or text.data.count(b",") != commas:
            _check_shape(text, names)
        try:
            frame = self._parse(text, names)
            arrival_s = self._seconds(frame[self.time])
            prompt, output = _tokens(frame[self.prompt]), _tokens(frame[self.output])
        except (ValueError, OverflowError) as error:  # pandas' ParserError is a ValueError
            self._refuse(text, names, error)
        return Rows(
            arrival_s=arrival_s,
            prompt_tokens=prompt,
            output_tokens=output,
            fields=self.fields,
            first_line=2,
            raw=lambda row, field: _split(text, row + 2)[names.index(field)],
        )

    def _parse(self, text: RawText, names: list[str]) -> pd.DataFrame:
        import pandas as pd

        # Number types are left to pandas and checked after: told to expect int64, it turns "True" into 1.
        return pd.read_csv(
            io.BytesIO(text.data),
            header=0,
            names=names,
            index_col=False,
            dtype={self.time: object} if self.clock == "iso" else None,
            keep_default_na=False,
            skip_blank_lines=False,
            low_memory=False,
        )

    def _seconds(self, column: pd.Series) -> FloatArray:
        if self.clock == "s":
            seconds = _numbers(column).astype(np.float64)
            if not (np.abs(seconds) <= MAX_SECONDS).all():
                raise ValueError("a time is not finite or too large")
            return seconds
        # Whole nanoseconds are subtracted before they become float seconds: no digit of the file is lost.
        nanoseconds = _iso_nanoseconds(column.tolist())
        return (nanoseconds - nanoseconds[:1]) / 1e9

    def _refuse(self, text: RawText, names: list[str], error: Exception) -> NoReturn:
        """Walk the file to the first value that cannot be read, and say so."""
        _check_shape(text, names)
        zoned: bool | None = None
        for line in range(2, len(text.lines) + 1):
            row = dict(zip(names, _split(text, line), strict=True))
            for field, kind in zip(self.fields, (self.clock, "tokens", "tokens"), strict=True):
                if not _readable(row[field], kind):
                    raise InputError(
                        file=text.file, line=line, field=field, value=row[field], expected=_WANTED[kind]
                    ) from error
            if self.clock == "iso":
                offset = _ZONED.fullmatch(row[self.time]) is not None
                if zoned not in (None, offset):
                    raise InputError(
                        "times with and without an offset from UTC in one file",
                        file=text.file,
                        line=line,
                        field=self.time,
                        value=row[self.time],
                        expected="an offset on every row or on none",
                    ) from error
                zoned = offset
        raise InputError(f"cannot be read as a CSV file ({error})", file=text.file) from error


def _numbers(column: pd.Series) -> IntArray | FloatArray:
    if len(column) and column.dtype not in (np.int64, np.float64):
        raise ValueError(f"column '{column.name}' holds {column.dtype}, not numbers")
    return column.to_numpy()


def _tokens(column: pd.Series) -> IntArray:
    values = _numbers(column)
    if values.dtype == np.float64 and not ((values == np.rint(values)) & (np.abs(values) < 2.0**63)).all():
        raise ValueError(f"column '{column.name}' holds fractions")
    return values.astype(np.int64)


def _check_shape(text: RawText, names: list[str]) -> None:
    for line in range(2, len(text.lines) + 1):
        found = len(_split(text, line))
        if found != len(names):
            raise InputError(
                f"{found} fields" if text.line(line).strip() else "blank line",
                file=text.file,
                line=line,
                value=text.line(line)[:120],
                expected=f"{len(names)} fields, as in the header",
            )


def _split(text: RawText, line: int) -> list[str]:
    """The fields of one line. A quoted line break would make lines and rows differ, and is refused."""
    content = text.line(line)
    try:
        return next(csv.reader([content], strict=True), [])
    except csv.Error as error:
        raise InputError(
            f"quotes that do not close on this line ({error})", file=text.file, line=line, value=content[:120]
        ) from error


def _readable(value: str, kind: str) -> bool:
    if kind == "iso":
        if not (_LOCAL.fullmatch(value) or _ZONED.fullmatch(value)):
            return False
        try:
            # Not pandas here: one call a value would take minutes in a long file.
            return 1970 <= datetime.fromisoformat(value[:19]).year <= 2261
        except ValueError:
            return False
    if not _NUMBER.fullmatch(value.strip(" \t")):
        return False
    number = float(value)
    if kind == "s":
        return abs(number) <= MAX_SECONDS
    return number.is_integer() and abs(number) < 2.0**63


def _iso_nanoseconds(values: list[str]) -> IntArray:
    """int64[n]: nanoseconds since 1970 in UTC, >= 0. ValueError unless each value is a full date and time."""
    # pandas alone would also take "2023", "now" or a mix of times with and without an offset.
    if not all(map(_LOCAL.fullmatch, values)) and not all(map(_ZONED.fullmatch, values)):
        raise ValueError("a time is no full date and time like the others")
    import pandas as pd

    parsed = pd.DatetimeIndex(pd.to_datetime(values, format="ISO8601", utc=True))
    nanoseconds = parsed.as_unit("ns").asi8
    if (nanoseconds < 0).any():
        # From 1970 on, the difference of two times cannot overflow.
        raise ValueError("a time is before 1970")
    return nanoseconds
