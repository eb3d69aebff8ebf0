"""Checks of the parameters that policies share; each raises `InputError` with name, value and what was expected."""

from __future__ import annotations

from math import inf
from typing import Any

from dsim.errors import InputError


def need_int(name: str, value: object, least: int) -> None:
    """Refuse what is no integer of at least `least`."""
    if type(value) is not int or value < least:
        raise InputError(field=name, value=value, expected=f"an integer >= {least}")


def need_bool(name: str, value: object) -> None:
    """Refuse what is neither true nor false; a 1 is a number."""
    if type(value) is not bool:
        raise InputError(field=name, value=value, expected="true or false")


def need_number(name: str, value: Any, *, most: float = inf, zero: bool = True) -> None:
    """Refuse what is no finite number from 0 (or, without `zero`, from above 0) to `most`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 <= value <= most and value < inf and (zero or value > 0):
        return
    expected = f"a number in {'[' if zero else '('}0, {most:g}]"
    if most == inf:
        expected = f"a finite number {'>=' if zero else '>'} 0"
    raise InputError(field=name, value=value, expected=expected)
