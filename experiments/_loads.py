"""A distribution of loads on the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

#: Closed-loop users and the share of the time that a server spends there (assumed): a day with quiet and busy hours.
DEFAULT_LOADS = "1:0.05,8:0.1,32:0.2,64:0.25,128:0.2,192:0.1,256:0.1"

#: The scenario's own limit on users; and of shares, whose sum is to be finite.
MOST_USERS, MOST_SHARE = 1_000_000, 1e12


def parse_loads(text: str, lowest: int = 1) -> dict[int, float]:
    """``16:0.4,64:0.3`` as {16: 0.571..., 64: 0.428...}: ascending, shares add up to 1. One without a share counts 1.

    Raises
    ------
    argparse.ArgumentTypeError
        Not that form, an integer below `lowest`, one given twice, or no share above 0.

    Examples
    --------
    >>> parse_loads("64,16:3")
    {16: 0.75, 64: 0.25}
    """
    found: dict[int, float] = {}
    for item in text.split(","):
        name, colon, share = item.partition(":")
        try:
            value, weight = int(name), float(share) if colon else 1.0
        except ValueError:
            value, weight = lowest - 1, math.nan
        if value < lowest or not (math.isfinite(weight) and weight >= 0):
            raise argparse.ArgumentTypeError(f"got '{item.strip()}', expected N:SHARE, N >= {lowest} and SHARE >= 0")
        if value > MOST_USERS or weight > MOST_SHARE:
            limits = f"N at most {MOST_USERS} and SHARE at most {MOST_SHARE:g}"
            raise argparse.ArgumentTypeError(f"got '{item.strip()}', expected {limits}")
        if value in found:
            raise argparse.ArgumentTypeError(f"{value} is given twice")
        found[value] = weight
    total = sum(found.values())
    if not total > 0:
        raise argparse.ArgumentTypeError(f"got '{text}', expected a share > 0")
    return {value: found[value] / total for value in sorted(found)}


def loads_within(loads: Mapping[int, float], most: int) -> dict[int, float]:
    """Those loads of at most `most` users, shares added up to 1 again; the largest of all where none is.

    >>> loads_within({8: 0.25, 64: 0.25, 256: 0.5}, 64)
    {8: 0.5, 64: 0.5}
    """
    kept = {users: share for users, share in loads.items() if users <= most and share > 0} or {most: 1.0}
    total = sum(kept.values())
    return {users: share / total for users, share in kept.items()}
