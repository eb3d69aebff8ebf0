"""The staircase: what the engine pays, captured size by captured size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsim.cost.points import Points, price_in_branches
from dsim.profile import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Staircase:
    """Warm medians; a step costs what the next captured size costs.

    Parameters
    ----------
    points
        The medians.
    ms
        float64[P]: their prices, i.e. the running maximum of the medians, or the medians themselves.
    running_max
        Larger never cheaper. vLLM's table is built so; with False the dips of the measurement stay, and a
        step may cost less than a smaller one.

    Notes
    -----
    A captured size without samples is priced as the next one that has some. Where the profile names no
    captured sizes the prices are interpolated linearly.
    """

    points: Points
    ms: FloatArray
    running_max: bool

    @property
    def depends_on_requests(self) -> bool:
        """Never."""
        return False

    def price(self, requests: int, tokens: IntArray) -> FloatArray:
        """Milliseconds at each of `tokens`; `requests` has no effect."""
        limit = self.points.limit
        return price_in_branches(self.points.tokens, self.ms, limit, tokens, stepped=limit > 0)

    def refit(self, points: Points) -> Staircase:
        """The staircase through other points."""
        return fit_staircase(points, running_max=self.running_max)


def fit_staircase(points: Points, *, running_max: bool) -> Staircase:
    """Build a `Staircase` from warm medians."""
    return Staircase(points, np.maximum.accumulate(points.ms) if running_max else points.ms, running_max)
