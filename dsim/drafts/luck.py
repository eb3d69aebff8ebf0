"""Counter-based random numbers: the same key gives the same number, in whatever order it is asked for.

Common random numbers across policies need luck that belongs to (seed, request, position, k) and not to the
moment it is drawn. The mixer is SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014, https://doi.org/10.1145/2660193.2660195), applied once a key component.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1

UIntArray = npt.NDArray[np.uint64]


#: Bits of a uniform number.
BITS = 53


def _mix(value: UIntArray) -> UIntArray:
    """The finalizer, in place (products wrap around); returns its argument."""
    scratch = value >> np.uint64(30)
    value ^= scratch
    value *= _M1
    np.right_shift(value, np.uint64(27), out=scratch)
    value ^= scratch
    value *= _M2
    np.right_shift(value, np.uint64(31), out=scratch)
    value ^= scratch
    return value


def hash64(seed: int, *key: npt.ArrayLike) -> UIntArray:
    """uint64 of the key components, broadcast together.

    Parameters
    ----------
    seed
        Any integer; taken modulo 2**64.
    key
        Integer arrays (>= 0) or scalars.
    """
    state: UIntArray = np.atleast_1d(np.asarray(seed & _MASK, dtype=np.uint64))
    for component in key:
        with np.errstate(over="ignore"):
            state = _mix(state + _GOLDEN * (np.asarray(component).astype(np.uint64) + np.uint64(1)))
    return state


def hash64_int(seed: int, *key: int) -> int:
    """`hash64` of integers, without the fixed cost of arrays."""
    state = seed & _MASK
    for component in key:
        state = (state + int(_GOLDEN) * (component + 1)) & _MASK
        state = (state ^ (state >> 30)) * int(_M1) & _MASK
        state = (state ^ (state >> 27)) * int(_M2) & _MASK
        state ^= state >> 31
    return state


def uniform(seed: int, *key: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """float64 in [0, 1) by key: 53 random bits."""
    return (hash64(seed, *key) >> np.uint64(64 - BITS)).astype(np.float64) * 2.0**-BITS


def block_luck(seed: int, request: int, first: int, positions: int, gamma: int) -> UIntArray:
    """uint64[positions, gamma]: ``uniform(seed, request, position, k)`` from `first` on, times 2**53.

    The same numbers, without the fixed costs of `hash64`: a request's luck is asked for once, in one piece.
    """
    state = np.arange(first + 1, first + positions + 1, dtype=np.uint64)
    state *= _GOLDEN
    state += np.uint64(hash64_int(seed, request))
    _mix(state)
    luck = state[:, None] + _GOLDEN * np.arange(1, gamma + 1, dtype=np.uint64)
    _mix(luck)
    luck >>= np.uint64(64 - BITS)
    return luck
