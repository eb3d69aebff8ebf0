"""Array helpers that planners share: rank candidates, add up their worth, hand out a number of drafts.

A *candidate* is (request r, position j); its value is the survival a_{r,j} = prod_{i<=j} c_{r,i}. Rows of
`survival` never increase, so the best candidates always form valid prefixes. A candidate of value 0 does
not exist (the paper's candidate set holds a > 0 only), nor does one beyond its request's cap.

The functions cost a few NumPy calls each: in a small batch a planner's time is the number of calls.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate
from operator import neg
from typing import Any

import numpy as np
import numpy.typing as npt

Survival = npt.NDArray[np.floating[Any]]
Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Up to this many values a full sort is quicker than a partition (measured: NumPy 2.4, x86-64).
_SORT_UP_TO = 256

#: Up to this many values a Python list is quicker than a handful of NumPy calls.
_LIST_UP_TO = 48


def allowed(caps: IntArray, gamma: int) -> Float32Array:
    """float32[R, gamma]: 1 at the positions that each request's cap leaves open, 0 beyond.

    Survivals are multiplied with it: a draft beyond its cap is then a candidate of value 0.

    >>> allowed(np.array([2, 1, 0]), gamma=2).tolist()
    [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    """
    return _prefixes(gamma).take(caps, axis=0)


def descending(values: Survival) -> FloatArray:
    """float64[n]: all values, flat, largest first.

    >>> descending(np.array([[0.5, 0.25], [0.75, 0.0]])).tolist()
    [0.75, 0.5, 0.25, 0.0]
    """
    flat = values.flatten()
    flat.sort()
    return flat[::-1].astype(np.float64)


def cumulative_value(survival: Survival, start: float = 0.0) -> FloatArray:
    """float64[n + 1]: `start` plus the value of the b best candidates, by b; n candidates have a value > 0.

    The sum is sequential in float64, in descending order of value: the tau of Algorithm 1 when `start` is
    the number of requests.

    >>> cumulative_value(np.array([[0.5, 0.25], [0.75, 0.0]]), start=2).tolist()
    [2.0, 2.75, 3.25, 3.5]
    """
    flat = survival.flatten()
    flat.sort()
    if flat.size and flat[0] <= 0:
        flat = flat[np.count_nonzero(flat <= 0) :]
    total = np.empty(flat.size + 1)
    total[0] = start
    total[:0:-1] = flat
    return np.add.accumulate(total, out=total)


def best_count(survival: Survival, start: float, prices: FloatArray) -> int:
    """How many of the best candidates to take so that (start + their value) / price is largest; the fewest on ties.

    Parameters
    ----------
    survival
        float[R, gamma].
    start
        Value of the step without any candidate (the number of requests).
    prices
        float64[>= R * gamma + 1]: milliseconds by number of candidates taken.

    Examples
    --------
    >>> best_count(np.array([[0.5, 0.25]]), 1, np.array([10.0, 16.0, 16.5]))
    2
    """
    if survival.size <= _LIST_UP_TO:
        # The same sums and quotients in the same order, without the fixed cost of ten NumPy calls.
        values = survival.ravel().tolist()
        values.sort(reverse=True)
        if values and values[-1] <= 0:
            values = [value for value in values if value > 0]
        milliseconds = prices[: len(values) + 1].tolist()
        tau = accumulate(values, initial=float(start))
        rates = [value / ms for value, ms in zip(tau, milliseconds, strict=True)]
        return rates.index(max(rates))
    tau_by_count = cumulative_value(survival, start=start)
    # argmax takes the first of equal maxima: the fewest.
    return int((tau_by_count / prices[: tau_by_count.size]).argmax())


def top_k(survival: Survival, k: int, caps: IntArray | None = None) -> IntArray:
    """int64[R]: verify lengths that admit the k best candidates, keyed (value descending, request, position).

    Equal to the first k of a stable argsort, without sorting: a partition finds the k-th value, and of the
    candidates that tie with it the first ones in reading order get in. Fewer than k are admitted if fewer
    have a value above 0.

    Parameters
    ----------
    survival
        float[R, gamma], rows non-increasing.
    k
        Drafts to admit in all.
    caps
        int64[R]: most drafts for each request (0..gamma); None where `survival` is cut already.

    Examples
    --------
    >>> top_k(np.array([[0.9, 0.5], [0.5, 0.5]]), k=2).tolist()
    [2, 0]
    """
    if caps is not None:
        survival = survival * allowed(caps, survival.shape[1])
    size = survival.size
    if k <= 0 or size == 0:
        return np.zeros(survival.shape[0], dtype=np.int64)
    if k < size <= _LIST_UP_TO:
        return _top_k_list(survival, k)
    if k < size:
        flat = survival.flatten()
        if size <= _SORT_UP_TO:
            flat.sort()
        else:
            flat.partition(size - k)
        worst = flat[size - k]
        if worst > 0:
            admitted = survival >= worst
            surplus = np.count_nonzero(admitted) - k
            if surplus:
                admitted.flat[np.flatnonzero(survival == worst)[-surplus:]] = False
            return count_rows(admitted)
    return count_rows(survival > 0)


def _top_k_list(survival: Survival, k: int) -> IntArray:
    """`top_k` of a small batch: the k-th value from a list, without the fixed cost of three NumPy calls."""
    ranked = survival.ravel().tolist()
    ranked.sort(reverse=True)
    worst = ranked[k - 1]
    if worst <= 0:
        return count_rows(survival > 0)
    if ranked[k] < worst:
        return count_rows(survival >= worst)
    # Of those that tie with the worst, the first in reading order get in.
    spare = k - bisect_left(ranked, -worst, key=neg)
    lengths = []
    for row in survival.tolist():
        length = 0
        for value in row:
            if value < worst or (value == worst and not spare):
                break
            spare -= value == worst
            length += 1
        lengths.append(length)
    return np.array(lengths, dtype=np.int64)


def count_rows(mask: BoolArray) -> IntArray:
    """int64[R]: True entries of each row.

    >>> count_rows(np.array([[True, False], [True, True]])).tolist()
    [1, 2]
    """
    # A product with ones takes half the time of a reduction along so short an axis.
    counts: IntArray = mask.dot(_ones(mask.shape[1]))
    return counts


def leading_run(mask: BoolArray) -> IntArray:
    """int64[R]: length of the run of True that each row starts with.

    >>> leading_run(np.array([[True, False, True], [False, True, True]])).tolist()
    [1, 0]
    """
    return count_rows(np.logical_and.accumulate(mask, axis=1))


def first_non_gain(objective: FloatArray) -> int:
    """Index where a climb from the left ends: the last one before the first step that does not rise.

    >>> first_non_gain(np.array([1.0, 2.0, 3.0, 3.0, 9.0]))
    2
    """
    rises = objective[1:] > objective[:-1]
    return int(np.count_nonzero(np.logical_and.accumulate(rises)))


@lru_cache(maxsize=64)
def _ones(size: int) -> IntArray:
    ones = np.ones(size, dtype=np.int64)
    ones.flags.writeable = False
    return ones


@lru_cache(maxsize=64)
def _prefixes(gamma: int) -> Float32Array:
    """float32[gamma + 1, gamma]: row n holds n ones, then zeros."""
    table = np.tril(np.ones((gamma + 1, gamma), dtype=np.float32), -1)
    table.flags.writeable = False
    return table
