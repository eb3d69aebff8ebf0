"""Step tables as engines keep them: milliseconds at a few token counts, and a rule for the counts between.

What a planner believes a step costs is not what it costs. An engine times a few sizes and reads its table
by a rule; the rule decides which steps of the real curve the planner can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: How a table is read between its sizes: the next larger size's price (what a captured graph costs), the
#: next smaller one's, or a straight line between the two.
LOOKUP_RULES = ("next", "floor", "linear")


@dataclass(frozen=True, eq=False)
class StepTable:
    """Milliseconds of a step at some token counts, and how counts between them are priced.

    Parameters
    ----------
    tokens
        int64[S] strictly increasing, >= 0.
    ms
        float64[S], > 0.
    rule
        One of `LOOKUP_RULES`.
    running_max
        Price a size at the dearest of the sizes up to it, so that a larger step is never cheaper.
    hold
        The largest size's price holds beyond it, whatever the rule.

    Raises
    ------
    InputError
        Anything that the description above rules out.

    Examples
    --------
    >>> table = StepTable(np.array([2, 4]), np.array([10.0, 20.0]), "linear")
    >>> table.prices(6).tolist()
    [10.0, 10.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    >>> StepTable(np.array([2, 4]), np.array([10.0, 20.0]), "floor").prices(5).tolist()
    [10.0, 10.0, 10.0, 10.0, 20.0, 20.0]
    """

    tokens: IntArray
    ms: FloatArray
    rule: str
    running_max: bool = False
    hold: bool = False

    def __post_init__(self) -> None:
        tokens = np.array(self.tokens, dtype=np.int64)
        ms = np.array(self.ms, dtype=np.float64)
        if tokens.ndim != 1 or tokens.size == 0 or tokens[0] < 0 or (np.diff(tokens) <= 0).any():
            raise InputError(field="tokens", value=tokens.tolist(), expected="strictly increasing integers >= 0")
        if ms.shape != tokens.shape or not (np.isfinite(ms) & (ms > 0)).all():
            raise InputError(field="ms", value=ms.tolist(), expected=f"{tokens.size} finite numbers > 0")
        if self.rule not in LOOKUP_RULES:
            raise InputError(field="rule", value=self.rule, expected=f"one of {', '.join(LOOKUP_RULES)}")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "ms", np.maximum.accumulate(ms) if self.running_max else ms)

    def prices(self, last: int) -> FloatArray:
        """float64[last + 1]: milliseconds by tokens in the step.

        Below the smallest size its price holds. Beyond the largest one ``floor`` and `hold` hold its price; the
        other rules go on in the straight line through the last two sizes, never downwards.
        """
        counts = np.arange(last + 1)
        if self.rule == "floor":
            place = np.searchsorted(self.tokens, counts, side="right") - 1
            return self.ms[np.maximum(place, 0)]
        if self.rule == "next":
            inside = self.ms[np.minimum(np.searchsorted(self.tokens, counts), self.tokens.size - 1)]
        else:
            inside = np.interp(counts, self.tokens, self.ms)
        slope = 0.0
        if self.tokens.size > 1 and not self.hold:
            slope = max(0.0, float((self.ms[-1] - self.ms[-2]) / (self.tokens[-1] - self.tokens[-2])))
        return np.asarray(inside + slope * np.maximum(counts - self.tokens[-1], 0))


def sampled(
    prices: FloatArray, tokens: IntArray, rule: str, *, running_max: bool = False, hold: bool = False
) -> StepTable:
    """The table that an engine would hold that timed a price curve at `tokens` (those that the curve reaches).

    Parameters
    ----------
    prices
        float64[n]: milliseconds by tokens in the step.
    tokens
        int64[S] ascending. Sizes beyond the curve are left out; where none is left its last one is taken.

    >>> sampled(np.array([0.0, 5.0, 6.0, 9.0]), np.array([1, 3, 8]), "linear").prices(3).tolist()
    [5.0, 5.0, 7.0, 9.0]
    """
    kept = np.asarray(tokens, dtype=np.int64)
    kept = kept[(kept >= 1) & (kept < prices.size)]
    if kept.size == 0:
        kept = np.array([max(1, prices.size - 1)], dtype=np.int64)
    return StepTable(kept, prices[kept], rule, running_max, hold)


def captured_then_linear(tokens: IntArray, ms: FloatArray, limit: int, last: int) -> FloatArray:
    """float64[last + 1]: milliseconds by tokens in the step, as vLLM reads what it timed at `tokens`.

    Up to the capture limit the next size's price, and above it straight lines between the sizes that were timed there,
    all under a running maximum. From the limit to the first size above it that one's price holds: the cliff is not
    blended. Without a limit (0) every step has the next size's price.

    >>> captured_then_linear(np.array([2, 4, 6, 8]), np.array([1.0, 2.0, 6.0, 8.0]), 4, 9).tolist()
    [1.0, 1.0, 1.0, 2.0, 2.0, 6.0, 6.0, 7.0, 8.0, 9.0]
    """
    table = StepTable(tokens, ms, "next", running_max=True)
    prices = table.prices(last)
    above = table.tokens > limit
    if limit and above.any():
        eager = slice(limit + 1, int(table.tokens[-1]) + 1)
        prices[eager] = StepTable(table.tokens[above], table.ms[above], "linear").prices(last)[eager]
    return prices


class PriceMemo:
    """What a policy believes of price curves, made once a curve.

    A curve is known by its identity: the engine hands out one read-only array for as long as the prices stay what
    they are. Copies and pickles start empty, so a memo is no part of a policy's state.
    """

    #: Curves held; where prices depend on the batch, one a batch size comes along.
    CURVES = 256

    def __init__(self) -> None:
        # The curve is held beside what was made of it, so that no other array can take its place.
        self._held: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}

    def get(self, curve: FloatArray, gamma: int, make: Callable[[FloatArray, int], FloatArray]) -> FloatArray:
        """``make(curve, gamma)``, or what it gave for the same curve and block size before."""
        key = id(curve), gamma
        held = self._held.get(key)
        if held is None or held[0] is not curve:
            if len(self._held) >= self.CURVES:
                self._held.clear()
            held = self._held[key] = curve, make(curve, gamma)
        return held[1]

    def __reduce__(self) -> tuple[type[PriceMemo], tuple[()]]:
        return type(self), ()
