"""What compiled policies share: the functions of `dsim.planning`, over plain arrays and without allocation.

Same values, same order of additions, same ties: the verify lengths are those of the functions they stand for.
"""

from __future__ import annotations

import numpy as np
from numba import njit

#: Up to this many values insertion is quicker than three passes over the bits.
_INSERT_UP_TO = 64
_DIGIT = 10
_BUCKETS = 1 << _DIGIT


@njit(cache=True)
def survival(confidence, requests, gamma, caps, tight, out):
    """Survivals of the first rows of float32[max_seqs, gamma] into float32[R * gamma], 0 beyond a request's cap."""
    place = 0
    for r in range(requests):
        product = np.float32(1.0)
        for j in range(gamma):
            product = confidence[r, j] if j == 0 else product * confidence[r, j]
            out[place] = np.float32(0.0) if tight and j >= caps[r] else product
            place += 1


@njit(cache=True)
def _insertion(values, size):
    for i in range(1, size):
        value = values[i]
        j = i - 1
        while j >= 0 and values[j] < value:
            values[j + 1] = values[j]
            j -= 1
        values[j + 1] = value


@njit(cache=True)
def _radix(values, size, spare, counts):
    """Sort values of 0..1, largest first: their bits are in the order of the values, and the highest two are 0."""
    source, target = values.view(np.uint32), spare.view(np.uint32)
    for turn in range(3):
        shift = np.uint32(turn * _DIGIT)
        for b in range(_BUCKETS):
            counts[b] = 0
        for i in range(size):
            counts[(source[i] >> shift) & np.uint32(_BUCKETS - 1)] += 1
        # Largest digits first.
        total = np.uint32(0)
        for b in range(_BUCKETS - 1, -1, -1):
            count = counts[b]
            counts[b] = total
            total += count
        for i in range(size):
            digit = (source[i] >> shift) & np.uint32(_BUCKETS - 1)
            target[counts[digit]] = source[i]
            counts[digit] += np.uint32(1)
        source, target = target, source
    # After three passes the order is in `spare`.
    for i in range(size):
        values[i] = spare[i]


@njit(cache=True)
def descending(values, size, spare, room):
    """Sort the first values of float32[n], each in 0..1, largest first.

    `spare` is float32[n] and `room` float32[1024], both scratch.
    """
    if size <= _INSERT_UP_TO:
        _insertion(values, size)
    else:
        _radix(values, size, spare, room.view(np.uint32))


@njit(cache=True)
def positive(values, size):
    """How many of the sorted values are above 0."""
    count = size
    while count > 0 and not values[count - 1] > np.float32(0.0):
        count -= 1
    return count


@njit(cache=True)
def best_count(ranked, count, start, prices, first, extra):
    """`dsim.planning.best_count` of sorted values above 0; a step of b drafts costs ``extra + prices[first + b]``."""
    tau = start
    best = tau / (extra + prices[first])
    best_at = 0
    for b in range(1, count + 1):
        tau += np.float64(ranked[b - 1])
        rate = tau / (extra + prices[first + b])
        if rate > best:
            best = rate
            best_at = b
    return best_at


@njit(cache=True)
def _kth(values, size, k, spare, counts):
    """The k-th largest of float32[n] in 0..1 (k in 1..size), in two passes over the bits and a sort of what is left."""
    source, target = values.view(np.uint32), spare.view(np.uint32)
    left = size
    for turn in range(2):
        shift = np.uint32(20 - turn * _DIGIT)
        for b in range(_BUCKETS):
            counts[b] = 0
        for i in range(left):
            counts[(source[i] >> shift) & np.uint32(_BUCKETS - 1)] += np.uint32(1)
        digit = _BUCKETS - 1
        while counts[digit] < k:
            k -= np.int64(counts[digit])
            digit -= 1
        kept = 0
        for i in range(left):
            if (source[i] >> shift) & np.uint32(_BUCKETS - 1) == np.uint32(digit):
                target[kept] = source[i]
                kept += 1
        left = kept
        source = target
        if left == 1:
            break
    _insertion(spare, left)
    return spare[k - 1]


@njit(cache=True)
def top_k(values, requests, gamma, k, spare, room, lengths):
    """`dsim.planning.top_k` of float32[R * gamma] survivals, rows non-increasing, in 0..1."""
    size = requests * gamma
    for r in range(requests):
        lengths[r] = 0
    if k <= 0:
        return
    worst = np.float32(0.0)
    if k < size:
        if size <= _INSERT_UP_TO:
            for i in range(size):
                spare[i] = values[i]
            _insertion(spare, size)
            worst = spare[k - 1]
        else:
            worst = _kth(values, size, k, spare, room.view(np.uint32))
    if not worst > np.float32(0.0):
        for r in range(requests):
            for j in range(gamma):
                if not values[r * gamma + j] > np.float32(0.0):
                    break
                lengths[r] += 1
        return
    above = 0
    for r in range(requests):
        for j in range(gamma):
            if not values[r * gamma + j] > worst:
                break
            lengths[r] += 1
            above += 1
    # Of those that tie with the worst, the first in reading order get in.
    spots = k - above
    r = 0
    while spots > 0 and r < requests:
        j = lengths[r]
        while spots > 0 and j < gamma and values[r * gamma + j] == worst:
            spots -= 1
            j += 1
        lengths[r] = j
        r += 1
