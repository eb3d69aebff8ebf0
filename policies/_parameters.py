"""Checks of the parameters that policies share; each raises `InputError` with name, value and what was expected."""

from __future__ import annotations

from typing import Any

from dsim.errors import InputError

#: Larger counts and numbers are nothing that a batch has, and smaller ones above 0 no time; sums and products of those
#: in between stay finite.
MOST_INT, LEAST, MOST = 1_000_000_000, 1e-12, 1e12


def need_int(name: str, value: object, least: int) -> None:
    """Refuse what is no integer of at least `least`, and of at most `MOST_INT`."""
    if type(value) is not int or value < least:
        raise InputError(field=name, value=value, expected=f"an integer >= {least}")
    if value > MOST_INT:
        raise InputError(field=name, value=value, expected=f"an integer of at most {MOST_INT}")


def need_bool(name: str, value: object) -> None:
    """Refuse what is neither true nor false; a 1 is a number."""
    if type(value) is not bool:
        raise InputError(field=name, value=value, expected="true or false")


def need_number(name: str, value: Any, *, most: float = MOST, zero: bool = True) -> None:
    """Refuse what is no number from 0 (or, without `zero`, from `LEAST`) to `most`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (0 if zero else LEAST) <= value <= most:
        return
    expected = f"a number in {'[0' if zero else '(0'}, {most:g}]"
    if number and 0 < value < LEAST:
        expected += f", at least {LEAST:g}"
    raise InputError(field=name, value=value, expected=expected)
