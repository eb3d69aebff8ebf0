"""Random small cases, made so that a leak shows: prices with jumps, confidences that hang on what was drafted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsim.lossless.case import Case, Distribution, Row, Tables, contexts, distribution

#: Requests, gamma, vocabulary, tokens.
Size = tuple[int, int, int, int]

#: How often each size is drawn. Weights follow the time that a size takes.
SIZES: dict[Size, int] = {
    (1, 1, 2, 2): 1,
    (1, 2, 2, 1): 8,
    (1, 2, 2, 2): 6,
    (1, 2, 2, 3): 6,
    (1, 2, 3, 1): 4,
    (1, 2, 3, 2): 2,
    (1, 3, 2, 1): 6,
    (1, 3, 2, 2): 3,
    (1, 3, 2, 3): 2,
    (1, 3, 3, 1): 1,
    (1, 3, 3, 2): 1,
    (2, 1, 2, 1): 1,
    (2, 1, 2, 2): 3,
    (2, 1, 2, 3): 1,
    (2, 2, 2, 1): 12,
    (2, 2, 2, 2): 4,
    (2, 2, 2, 3): 1,
    (2, 2, 3, 1): 2,
    (2, 3, 2, 1): 3,
    (2, 3, 2, 2): 3,
    (3, 1, 2, 1): 1,
    (3, 1, 2, 2): 2,
    (3, 2, 2, 1): 6,
}

#: Probabilities are multiples of one over this.
_PARTS = 8
#: Confidences: few different ones, so that ties come up; all exact in float32.
_LEVELS = (0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0)
#: What one more token adds to a pass that takes `_BASE_MS` with one: mostly nothing, or a jump; seldom it saves.
_RISES = (0.0,) * 11 + (1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0, -1.0)
_BASE_MS = 8.0


def random_case(rng: np.random.Generator, size: Size | None = None, *, own_token: bool = False) -> Case:
    """A random case.

    Parameters
    ----------
    rng
        Where it comes from; equal generators give equal cases.
    size
        (requests, gamma, vocabulary, tokens); None: drawn from `SIZES`.
    own_token
        As in `Case`.

    Examples
    --------
    >>> random_case(np.random.default_rng(1), size=(2, 1, 2, 2)).size
    (2, 1, 2, 2)
    """
    if size is None:
        names, weights = list(SIZES), np.array(list(SIZES.values()), dtype=np.float64)
        size = names[int(rng.choice(len(names), p=weights / weights.sum()))]
    requests, gamma, vocabulary, tokens = size
    order = 2 if max(gamma, tokens) > 1 and rng.random() < 0.1 else 1
    starts: tuple[int, ...] = ()
    if requests > 1 and tokens > 1 and rng.random() < 0.25:
        starts = (*(0,) * (requests - 1), 1)
    leave = bool(rng.random() < 0.7)
    prefill = int(rng.choice((0, 0, 0, 0, 1, 2)))
    early = sum(start == 0 for start in starts) or requests
    depth = int(rng.choice((0, 0, 0, 1, 1, 2, 2, 3)))
    longest = prefill + requests * (1 + gamma)
    return Case(
        vocabulary=vocabulary,
        gamma=gamma,
        tokens=tokens,
        requests=tuple(_tables(rng, vocabulary, gamma, order, own_token) for _ in range(requests)),
        verify_ms=_prices(rng, longest),
        order=order,
        draft_ms=float(rng.choice((0.0, 0.0, 1.0, 4.0))),
        captured_sizes=_captured(rng, longest),
        prefill=prefill,
        starts=starts,
        past=tuple(tuple(_row(rng, gamma) for _ in range(early)) for _ in range(depth)),
        leave=leave,
        clip=leave and bool(rng.random() < 0.15),
        own_token=own_token,
    )


def _tables(rng: np.random.Generator, vocabulary: int, gamma: int, order: int, own_token: bool) -> Tables:
    known = list(contexts(vocabulary, order))
    return Tables(
        target={context: _simplex(rng, vocabulary) for context in known},
        drafter={context: _simplex(rng, vocabulary) for context in known},
        confidence=tuple(
            {context: _pick(rng, _LEVELS) for context in contexts(vocabulary, order, shortest=k + own_token)}
            for k in range(gamma)
        ),
    )


def _simplex(rng: np.random.Generator, vocabulary: int) -> Distribution:
    cuts = np.sort(rng.integers(0, _PARTS + 1, vocabulary - 1))
    return distribution(*np.diff(cuts, prepend=0, append=_PARTS).tolist())


def _row(rng: np.random.Generator, gamma: int) -> Row:
    return tuple(_pick(rng, _LEVELS) for _ in range(gamma))


def _pick(rng: np.random.Generator, values: Sequence[float]) -> float:
    return values[int(rng.integers(len(values)))]


def _prices(rng: np.random.Generator, longest: int) -> tuple[float, ...]:
    """Milliseconds for 0 .. `longest` tokens."""
    ms = [0.0, _BASE_MS]
    while len(ms) <= longest:
        ms.append(max(1.0, ms[-1] + _pick(rng, _RISES)))
    return tuple(ms)


def _captured(rng: np.random.Generator, longest: int) -> tuple[int, ...]:
    """Captured sizes: none in two cases of five, else about every second count up to a little beyond the step's."""
    if rng.random() < 0.4:
        return ()
    return tuple(size for size in range(1, longest + 3) if rng.random() < 0.5)
