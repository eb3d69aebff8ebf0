"""From raw samples to one point a size, and from points to a price for every size between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from dsim.profile import MISSING, FloatArray, IntArray, Profile, Samples


@dataclass(frozen=True, eq=False)
class Points:
    """Typical verify time by size, at one context length.

    Parameters
    ----------
    tokens, requests
        int64[P], in (tokens, requests) order; `requests` is `MISSING` where the profile does not give it.
    ms
        float64[P]: warm median.
    limit
        Largest captured size; points above it ran eagerly. 0 where nothing is captured.
    """

    tokens: IntArray
    requests: IntArray
    ms: FloatArray
    limit: int

    @property
    def eager(self) -> npt.NDArray[np.bool_]:
        """bool[P]: above the capture limit (nowhere, where nothing is captured)."""
        return self.tokens > self.limit if self.limit else np.zeros(self.tokens.size, dtype=bool)

    def take(self, keep: npt.NDArray[np.bool_]) -> Points:
        """The points where `keep` is true."""
        return Points(self.tokens[keep], self.requests[keep], self.ms[keep], self.limit)


def warm_median(ms: FloatArray, repeat: IntArray) -> float:
    """Upper median of the repeats without the first one.

    The first pass at a size is cold (on the B300 profile about 19 % above the others), so it is dropped where
    at least three repeats leave two to choose from. The upper median is a value that was observed; with five
    repeats of which the first is the slowest it equals the plain median of all five, which is what vLLM's
    table holds.

    >>> warm_median(np.array([23.1518, 20.5493, 20.634, 20.5916, 20.6765]), np.arange(5))
    20.634
    """
    order = np.argsort(repeat, kind="stable")
    warm = ms[order][1:] if ms.size >= 3 else ms
    return float(np.sort(warm)[warm.size // 2])


def verify_points(profile: Profile) -> tuple[IntArray, tuple[Points, ...]]:
    """The profiled contexts (int64[C], empty where not given) and the `Points` of each.

    A sample between two captured sizes ran padded to the upper one and is counted there.
    """
    samples = profile.samples.of("verify")
    contexts = np.unique(samples.context_tokens)
    points = tuple(_points_at(profile, samples, int(context)) for context in contexts)
    return contexts[contexts != MISSING], points


def _points_at(profile: Profile, samples: Samples, context: int) -> Points:
    here = samples.context_tokens == context
    tokens, requests = samples.tokens[here], samples.requests[here]
    ms, repeat = samples.ms[here], samples.repeat[here]

    pooled: dict[tuple[int, int], list[float]] = {}
    for size in sorted(set(zip(tokens.tolist(), requests.tolist(), strict=True))):
        of_size = (tokens == size[0]) & (requests == size[1])
        first = repeat[of_size].min()
        warm = of_size & (repeat > first) if np.count_nonzero(of_size) >= 3 else of_size
        padded = (_padded(size[0], profile.captured_sizes), size[1])
        pooled.setdefault(padded, []).extend(ms[warm].tolist())
    sizes = sorted(pooled)
    points = Points(
        np.array([size[0] for size in sizes], dtype=np.int64),
        np.array([size[1] for size in sizes], dtype=np.int64),
        np.array([sorted(pooled[size])[len(pooled[size]) // 2] for size in sizes]),
        profile.capture_limit,
    )
    eager = points.eager
    if eager.any() and (eager.all() or points.tokens[~eager][-1] != profile.capture_limit):
        largest = "none" if eager.all() else int(points.tokens[~eager][-1])
        raise InputError(
            "samples above the capture limit need samples up to it",
            file=profile.name,
            field="tokens",
            value=largest,
            expected=f"verify samples at the largest captured size, {profile.capture_limit}",
        )
    return points


def _padded(tokens: int, captured: IntArray) -> int:
    """The captured size that a step of so many tokens runs at; itself above the limit."""
    index = int(np.searchsorted(captured, tokens))
    return int(captured[index]) if index < captured.size else tokens


def one_request_count(points: Points, profile: Profile, model: str) -> None:
    """Refuse profiles in which a token count was timed with several request counts."""
    repeated = points.tokens[1:][np.diff(points.tokens) == 0]
    if repeated.size:
        raise InputError(
            f"the {model} fit prices tokens only; this profile has several request counts at one of them",
            file=profile.name,
            field="tokens",
            value=int(repeated[0]),
            expected="one request count for each token count, or the additive fit",
        )


@dataclass(frozen=True, eq=False)
class Curve:
    """Milliseconds by size (draft by requests, prefill by tokens): stepped or linear between the points."""

    sizes: IntArray
    ms: FloatArray
    stepped: bool

    def at(self, size: int) -> float:
        """Price of one size, milliseconds, to the nanosecond."""
        price = price_between(self.sizes, self.ms, np.array([size], dtype=np.int64), stepped=self.stepped)
        return round(float(price[0]), 6)


def curve(profile: Profile, kind: str, *, stepped: bool, running_max: bool) -> Curve | None:
    """Warm medians of the draft (by requests) or prefill (by tokens) samples; None where there are none."""
    samples = profile.samples.of(kind)
    if not len(samples):
        return None
    contexts = np.unique(samples.context_tokens)
    if contexts.size > 1:
        raise InputError(
            f"the {kind} samples have several contexts, which the cost model does not tell apart",
            file=profile.name,
            field="context_tokens",
            value=contexts.tolist(),
            expected="one context",
        )
    size = samples.requests if kind == "draft" else samples.tokens
    sizes = np.unique(size)
    ms = np.array([warm_median(samples.ms[size == one], samples.repeat[size == one]) for one in sizes])
    return Curve(sizes, np.maximum.accumulate(ms) if running_max else ms, stepped)


def price_between(sizes: IntArray, ms: FloatArray, at: IntArray, *, stepped: bool) -> FloatArray:
    """Prices at `at` from points in ascending `sizes`.

    Below the first size the first price holds (a smaller step is padded to it, or assumed no cheaper).
    Stepped: the price of the next size. Linear: between the neighbors. Above the last size both continue the
    line through the last two points, and never fall below the last price.
    """
    if stepped:
        price = ms[np.minimum(np.searchsorted(sizes, at), sizes.size - 1)]
    else:
        price = np.interp(at, sizes, ms)
    beyond = at > sizes[-1]
    if beyond.any():
        if sizes.size < 2:
            raise InputError(
                "cannot be extrapolated from a single profiled size",
                field="size",
                value=int(at.max()),
                expected=f"at most {int(sizes[-1])}",
            )
        slope = (ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2])
        price = np.where(beyond, ms[-1] + max(slope, 0.0) * (at - sizes[-1]), price)
    return np.asarray(price, dtype=np.float64)


def price_in_branches(sizes: IntArray, ms: FloatArray, limit: int, at: IntArray, *, stepped: bool) -> FloatArray:
    """Prices at `at` where captured and eager steps are two curves that never mix.

    Up to `limit` only the captured points count. Above it only the eager ones do, linearly, and from the
    limit to the first of them that one's price holds: the cliff between the two is not a slope. Without a
    limit, or without eager points, there is one curve.
    """
    eager = sizes > limit
    if not limit or not eager.any():
        return price_between(sizes, ms, at, stepped=stepped)
    low = at <= limit
    price = np.empty(at.size)
    price[low] = price_between(sizes[~eager], ms[~eager], at[low], stepped=stepped)
    price[~low] = price_between(sizes[eager], ms[eager], at[~low], stepped=False)
    return price
