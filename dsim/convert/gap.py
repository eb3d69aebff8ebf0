"""How far the prices that an engine's planner will read are from those it was given."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsim.engines import PriceTable, TrtllmV2
from dsim.profile import FloatArray, IntArray

#: Request counts at which prices are compared, at most.
_LEVELS = 5
# Differences that rounding makes.
_SAME = 1e-6


def gap(
    prices: Callable[[int, int], FloatArray], sizes: IntArray, levels: IntArray, limit: int, table: PriceTable
) -> list[str]:
    """Sentences on the largest differences of a table's prices from others; none where there are none.

    Parameters
    ----------
    prices
        Milliseconds by tokens, of so many requests, up to a last index.
    sizes
        Token counts, ascending; what lies outside them is not compared.
    levels
        Request counts; some of them are compared.
    limit
        Capture limit, above which prices are compared apart; 0 where there is none.
    table
        What the engine will read.
    """
    if isinstance(table, TrtllmV2):
        levels = np.array(sorted(table.cost_tables))
    chosen = levels[np.unique(np.linspace(0, levels.size - 1, _LEVELS).round().astype(np.int64))]
    smallest, largest = int(sizes[0]), min(int(sizes[-1]), table.largest)
    ranges = [(smallest, largest, "")]
    if smallest <= limit < largest:
        ranges = [(smallest, limit, f" up to {limit} tokens"), (limit + 1, largest, " above")]
    told = []
    for start, last, where in ranges:
        found = []
        for requests in chosen.tolist():
            first = max(start, requests)
            if first > last:
                continue
            ratio = table.prices(requests, last)[first:] / prices(requests, last)[first:] - 1
            for at in (int(ratio.argmin()), int(ratio.argmax())):
                found.append((float(ratio[at]), requests, first + at))
        if found and max(abs(share) for share, _, _ in found) > _SAME:
            ends = [f"{100 * share:+.2f} % ({r} requests, {m} tokens)" for share, r, m in (min(found), max(found))]
            told.append(f"what a planner reads from OUT differs from IN{where} by {ends[0]} to {ends[1]}")
    return told
