"""How far prices that are read by one rule are from those read by another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsim.profile import FloatArray, IntArray

#: Request counts at which prices are compared, at most.
_LEVELS = 5
# Differences that rounding makes.
_SAME = 1e-6

#: Milliseconds by tokens, float64[last + 1], of so many requests up to a last index.
Prices = Callable[[int, int], FloatArray]


def gap(
    before: Prices,
    after: Prices,
    sizes: IntArray,
    levels: IntArray,
    limit: int,
    reach: Callable[[int], int],
    what: str,
) -> list[str]:
    """Sentences on the largest differences of prices; none where there are none.

    Parameters
    ----------
    before, after
        Prices of IN, and of OUT.
    sizes
        Token counts, ascending; what lies outside them is not compared.
    levels
        Request counts, ascending; some of them are compared.
    limit
        Capture limit, above which prices are compared apart; 0 where there is none.
    reach
        Largest token count that is compared, by the number of requests.
    what
        The sentences' subject and verb: what of OUT differs from what of IN.
    """
    chosen = levels[np.unique(np.linspace(0, levels.size - 1, _LEVELS).round().astype(np.int64))]
    smallest, largest = int(sizes[0]), min(int(sizes[-1]), max(map(reach, chosen.tolist())))
    ranges = [(smallest, largest, "")]
    if smallest <= limit < largest:
        ranges = [(smallest, limit, f" up to {limit} tokens"), (limit + 1, largest, " above")]
    told = []
    for start, end, where in ranges:
        found = []
        for requests in chosen.tolist():
            first, last = max(start, requests), min(end, reach(requests))
            if first > last:
                continue
            ratio = after(requests, last)[first:] / before(requests, last)[first:] - 1
            for at in (int(ratio.argmin()), int(ratio.argmax())):
                found.append((float(ratio[at]), requests, first + at))
        if found and max(abs(share) for share, _, _ in found) > _SAME:
            ends = [f"{100 * share:+.2f} % ({r} requests, {m} tokens)" for share, r, m in (min(found), max(found))]
            told.append(f"{what}{where} by {ends[0]} to {ends[1]}")
    return told
