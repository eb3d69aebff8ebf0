"""What the readers of engine files share: values checked by name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from dsim.errors import InputError

#: A number as the file has it: an integer stays one, so that a round trip changes no digit.
Number = int | float

#: Largest size (tokens, requests) of a step that is taken for one. Prices are arrays as long as the largest step.
LARGEST_SIZE = 1 << 22
#: Numbers outside this range are no time, rate or temperature, in any unit; sums and quotients inside it are finite.
SMALLEST, LARGEST = 1e-12, 1e12


def need(condition: bool, field: str, value: object, expected: str) -> None:
    """InputError by field unless the condition holds."""
    if not condition:
        raise InputError(field=field, value=_shown(value), expected=expected)


def _shown(value: object) -> object:
    # None would read as "no value", and a file has lists.
    return repr(value) if value is None else list(value) if isinstance(value, tuple) else value


def require(raw: Mapping[str, Any], keys: Collection[str], prefix: str = "") -> None:
    """Refuse an object without one of the keys."""
    for key in keys:
        if key not in raw:
            raise InputError("is missing", field=prefix + key)


def only(raw: Mapping[str, Any], keys: Collection[str], prefix: str = "") -> None:
    """Refuse an object with other keys."""
    for key in raw:
        if key not in keys:
            raise InputError("unknown field", field=prefix + key, expected=f"one of {', '.join(keys)}")


def is_int(value: object) -> bool:
    """Whether a value is an integer (True and False are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number that a double can hold (True and False are none)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def need_int(value: object, field: str, least: int) -> None:
    """Refuse what is no integer of at least `least`, or larger than any step."""
    need(isinstance(value, int) and is_int(value) and value >= least, field, value, f"an integer >= {least}")
    _need_small(value, field)


def _need_small(size: Any, field: str) -> None:
    need(size <= LARGEST_SIZE, field, size, f"at most {LARGEST_SIZE}")


def need_number(value: Any, field: str, *, zero: bool) -> None:
    """Refuse what is no finite number above 0 (or, with `zero`, of at least 0), or an absurd one."""
    expected = "a finite number >= 0" if zero else "a finite number > 0"
    need(is_number(value) and (value > 0 or (zero and value == 0)), field, value, expected)
    need(value == 0 or SMALLEST <= value <= LARGEST, field, value, f"a number from {SMALLEST:g} to {LARGEST:g}")


def need_list(value: object, field: str, length: int | None = None, of: str = "values") -> None:
    """Refuse what is no list, an empty one, or one of another length."""
    expected = f"a list of {of}" if length is None else f"{length} {of}, one a size"
    held = isinstance(value, list | tuple) and len(value) > 0 and (length is None or len(value) == length)
    need(held, field, value, expected)


def need_sizes(values: Any, field: str, least: int = 1) -> None:
    """Refuse sizes that are no integers of at least `least`, or do not increase."""
    need_list(values, field, of="integers")
    last = least - 1
    for i, value in enumerate(values):
        expected = f"an integer >= {least}" if i == 0 else f"an integer > {last} (sizes must increase)"
        need(is_int(value) and value > last, f"{field}[{i}]", value, expected)
        _need_small(value, f"{field}[{i}]")
        last = value


def need_numbers(values: Any, field: str, length: int, *, zero: bool) -> None:
    """Refuse anything but so many finite numbers above 0 (or, with `zero`, of at least 0)."""
    need_list(values, field, length, "numbers")
    for i, value in enumerate(values):
        need_number(value, f"{field}[{i}]", zero=zero)


def need_text(value: object, field: str) -> None:
    """Refuse what is no text, or an empty one."""
    need(isinstance(value, str) and bool(value), field, value, "text that is not empty")


def need_sha256(value: object, field: str) -> None:
    """Refuse what is no SHA-256 in lower-case hexadecimal digits."""
    digits = isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
    need(digits, field, value, "a SHA-256, 64 lower-case hexadecimal digits")


def need_finite(value: object, field: str) -> None:
    """Refuse NaN and infinity anywhere inside a JSON value: no JSON file may hold them."""
    if isinstance(value, dict):
        for key, item in value.items():
            need_finite(item, f"{field}.{key}" if field else key)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            need_finite(item, f"{field}[{i}]")
    elif isinstance(value, float):
        need(math.isfinite(value), field, value, "a finite number")


def rest_of(raw: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields that a format does not know, as they stand."""
    extra = {key: value for key, value in raw.items() if key not in known}
    need_finite(extra, "")
    return extra


def digest(value: object) -> str:
    """SHA-256 of a JSON value in the canonical form of vLLM and TensorRT-LLM: sorted keys, no spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
