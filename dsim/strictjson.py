"""JSON without surprises: UTF-8, every key once, and errors that say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsim.errors import InputError

#: Most objects and lists within each other. What is read is walked through, shown or written again later, which takes
#: stack as well: what the parser just about manages would fail there.
DEEPEST = 64


class RepeatedKeyError(ValueError):
    """An object has a key twice, where `json` by itself would keep the last of the two.

    Attributes
    ----------
    key
        The key.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the key '{key}' stands there twice")
        self.key = key


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json.loads` that refuses a key that is there twice.

    Raises
    ------
    RepeatedKeyError
        With the first such key.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKeyError(key)
        found[key] = value
    return found


def load_json(path: str | Path, expected: str) -> Any:
    """The value that a JSON file holds; `expected` says in errors what it should be.

    Raises
    ------
    InputError
        A file that cannot be read, is no UTF-8 (a byte order mark is allowed), or what `parse_json` refuses.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path, expected=expected) from None
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text", file=path, expected=expected) from None
    return parse_json(text, path, expected=expected)


def parse_json(text: str, file: str | Path | None, line: int | None = None, *, expected: str = "an object") -> Any:
    """The JSON value in a text; `line` is its line in the file, where the file has one value a line.

    A NaN passes, so that whoever checks its field can name it.

    Raises
    ------
    InputError
        No JSON (with the line), a key twice, or values nested deeper than `DEEPEST`.

    Examples
    --------
    >>> parse_json('{"a": [1, 2.5]}', None)
    {'a': [1, 2.5]}
    """
    try:
        found = json.loads(text, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        at = error.lineno if line is None else line
        raise InputError(f"is not JSON, or cut off ({error.msg})", file=file, line=at, expected=expected) from None
    except RecursionError:
        raise InputError("is nested too deeply", file=file, line=line, expected=expected) from None
    except ValueError as error:  # a key twice, or an integer of thousands of digits
        raise InputError(f"is not JSON ({error})", file=file, line=line, expected=expected) from None
    if _depth(found) > DEEPEST:
        raise InputError("is nested too deeply", file=file, line=line, expected=expected)
    return found


def need_object(
    value: Any, file: str | Path | None, line: int | None = None, *, expected: str = "a JSON object"
) -> dict[str, Any]:
    """The value, if it is an object."""
    if not isinstance(value, dict):
        raise InputError(file=file, line=line, value="null" if value is None else value, expected=expected)
    return value


def _depth(value: Any) -> int:
    """How many objects and lists lie within each other."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list) and item]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth
