"""The one error that bad input raises, anywhere in the project."""

from __future__ import annotations

from pathlib import Path

#: Longest field or value that an error message shows whole: a file that holds one list is one value.
_LONGEST = 300


class InputError(ValueError):
    """Something the user gave (a file, a key, an option) is not what was expected.

    Parameters
    ----------
    message
        One sentence that says what is wrong. Left out, it is made from ``value`` and ``expected``.
    file, line, field, value, expected
        Where it is, what stands there, and what should. ``line`` counts from 1.

    Examples
    --------
    >>> str(InputError(file="a.csv", line=3, field="tokens", value="-1", expected="an integer >= 1"))
    "a.csv, line 3, field 'tokens': got '-1', expected an integer >= 1"
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        file: str | Path | None = None,
        line: int | None = None,
        field: str | None = None,
        value: object = None,
        expected: str | None = None,
    ) -> None:
        self.message = message
        self.file = None if file is None else str(file)
        self.line = line
        self.field = field
        self.value = value
        self.expected = expected
        where = [
            part
            for part in (
                self.file,
                None if line is None else f"line {line}",
                None if field is None else f"field '{_cut(field)}'",
            )
            if part is not None
        ]
        what = [] if message is None else [message]
        if value is not None:
            what.append(f"got {_shown(value)}")
        if expected is not None:
            what.append(f"expected {expected}")
        super().__init__(": ".join(part for part in (", ".join(where), ", ".join(what)) if part))

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the trip back from a worker process (keyword arguments are lost by default)."""
        return (_rebuild, (self.message, self.file, self.line, self.field, self.value, self.expected))


def _shown(value: object) -> str:
    try:
        return _cut(repr(value))
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        return f"a value of type {type(value).__name__} that is too long to show"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 60]} ... {text[-55:]}"


def _rebuild(
    message: str | None,
    file: str | None,
    line: int | None,
    field: str | None,
    value: object,
    expected: str | None,
) -> InputError:
    return InputError(message, file=file, line=line, field=field, value=value, expected=expected)
