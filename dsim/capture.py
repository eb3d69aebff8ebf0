"""Which graph sizes to capture: an exact answer for a given distribution of step sizes.

A step runs padded to the next captured size and costs what that costs; above the largest it runs eagerly. With the
steps of a workload given, the sizes that lose least are found by dynamic programming over the candidates. The steps are
taken as they are: a policy that adapts to the captured sizes makes other ones (`experiments/capture_sizes.py --check`
runs it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from dsim.cost import Points, RooflineModel, fit, verify_points
from dsim.cost.points import one_request_count
from dsim.errors import InputError
from dsim.lookup import StepTable
from dsim.profile import MISSING, Profile, Samples

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

CURVES = ("smooth", "measured")

#: Largest step, tokens: prices are arrays as long as it.
LARGEST_STEP = 1 << 22
#: Most sizes to choose from: the search holds a matrix of their pairs.
MOST_CANDIDATES = 4096
#: Most tokens of a step whose requests verify different lengths: the distribution is a convolution.
_LARGEST_SUM = 1 << 16


@dataclass(frozen=True, eq=False)
class StepLoad:
    """How often a step has how many tokens. Built by `step_load`.

    Parameters
    ----------
    tokens
        int64[T] ascending, >= 1.
    weight
        float64[T] > 0, adding up to 1.
    """

    tokens: IntArray
    weight: FloatArray


def step_load(tokens: npt.ArrayLike, weight: npt.ArrayLike) -> StepLoad:
    """A distribution from token counts and their weights, in any order; equal counts are added up.

    Raises
    ------
    InputError
        No weight at all, a negative one, or a token count below 1.

    Examples
    --------
    >>> load = step_load([8, 4, 8], [1, 2, 1])
    >>> load.tokens.tolist(), load.weight.tolist()
    ([4, 8], [0.5, 0.5])
    """
    sizes, weights = np.asarray(tokens, dtype=np.int64), np.asarray(weight, dtype=np.float64)
    if sizes.ndim != 1 or sizes.shape != weights.shape:
        raise InputError(field="weight", value=weights.shape, expected=f"one weight for each of {sizes.shape} counts")
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise InputError(field="weight", expected="finite numbers >= 0")
    kept = weights > 0
    if not kept.any():
        raise InputError("no step has any weight", field="weight", expected="at least one number > 0")
    sizes, weights = sizes[kept], weights[kept]
    if sizes.min() < 1:
        raise InputError(field="tokens", value=int(sizes.min()), expected="integers >= 1")
    if sizes.max() > LARGEST_STEP:
        raise InputError(field="tokens", value=int(sizes.max()), expected=f"at most {LARGEST_STEP}")
    different, place = np.unique(sizes, return_inverse=True)
    total = np.bincount(place, weights=weights)
    return StepLoad(different, total / total.sum())


def load_of_lengths(loads: Mapping[int, float], lengths: Mapping[int, float]) -> StepLoad:
    """Steps of R requests that verify `lengths` each, independently, with R from `loads`.

    Parameters
    ----------
    loads
        Requests and their share of the steps.
    lengths
        Verify lengths and their shares. One length alone gives R x (1 + length) tokens exactly.

    Examples
    --------
    Two requests, each with no draft or one:

    >>> load = load_of_lengths({2: 1.0}, {0: 0.5, 1: 0.5})
    >>> load.tokens.tolist(), load.weight.round(9).tolist()
    ([2, 3, 4], [0.25, 0.5, 0.25])
    """
    for name, given, lowest in (("loads", loads, 1), ("lengths", lengths, 0)):
        bad = [key for key, share in given.items() if key < lowest or not (np.isfinite(share) and share >= 0)]
        if bad or not sum(given.values()) > 0:
            raise InputError(field=name, value=dict(given), expected=f"integers >= {lowest} with shares >= 0")
    most = max(loads) * (1 + max(lengths))
    limit = LARGEST_STEP if len(lengths) == 1 else _LARGEST_SUM
    if most > limit:
        raise InputError(
            f"{max(loads)} requests of up to {1 + max(lengths)} tokens are no step",
            field="lengths",
            value=f"{most} tokens",
            expected=f"at most {limit}",
        )
    if len(lengths) == 1:
        (length,) = lengths
        return step_load([requests * (1 + length) for requests in loads], list(loads.values()))
    one = np.zeros(max(lengths) + 1)
    for length, share in lengths.items():
        one[length] += share
    one /= one.sum()
    weight = np.zeros(max(loads) * one.size + 1)
    for requests, share in loads.items():
        drafts = _power(one, requests)
        weight[requests : requests + drafts.size] += share * drafts
    # What a sum of products leaves in place of 0 is no step.
    weight[weight < 1e-15 * weight.max()] = 0.0
    return step_load(np.arange(weight.size), weight)


def _power(one: FloatArray, times: int) -> FloatArray:
    """The distribution of a sum of `times` independent draws, by repeated squaring."""
    total, square = np.ones(1), one
    while times:
        if times & 1:
            total = np.convolve(total, square)
        times >>= 1
        if times:
            square = np.convolve(square, square)
    return total


@dataclass(frozen=True, eq=False)
class GraphPrices:
    """What a step costs in a graph of its own size, and eagerly.

    Parameters
    ----------
    graph
        float64[n + 1]: milliseconds of a graph by its size; inf where no graph of that size can be had.
    eager
        float64[n + 1]: milliseconds of an eager step by its tokens; None where that is not known, so that every step
        needs a graph.
    label
        Where the prices come from.
    known
        Largest size that was timed in a graph; beyond it `graph` is a continued law.
    """

    graph: FloatArray
    eager: FloatArray | None
    label: str
    known: int

    def ideal(self, load: StepLoad) -> float:
        """Mean milliseconds where every step takes the cheapest graph that holds it, or runs eagerly for less."""
        cheapest = np.minimum.accumulate(self.graph[::-1])[::-1]
        if self.eager is not None:
            cheapest = np.minimum(cheapest, self.eager)
        return float(load.weight @ cheapest[load.tokens])

    def padded(self, load: StepLoad, sizes: IntArray) -> float:
        """Mean milliseconds with these captured sizes (ascending); inf where a step is too large and has no price."""
        place = np.searchsorted(sizes, load.tokens)
        inside = place < sizes.size
        total = float(load.weight[inside] @ self.graph[sizes[place[inside]]]) if inside.any() else 0.0
        if inside.all():
            return total
        return (
            total + float(load.weight[~inside] @ self.eager[load.tokens[~inside]]) if self.eager is not None else np.inf
        )


def graph_prices(
    profile: Profile, last: int, *, curve: str = "smooth", eager_factor: float | None = None
) -> GraphPrices:
    """Prices from a profile, at its first context.

    Parameters
    ----------
    profile
        One request count a token count.
    last
        Largest step to price, tokens.
    curve
        ``smooth``: any size can be captured, at the price of a fitted law (``roofline-moe``, ``roofline``, or straight
        lines between the medians, whichever first has enough sizes). ``measured``: only timed sizes, at their medians,
        dips included.
    eager_factor
        An eager step costs so many times its graph; None: as timed above the capture limit, and from there downwards
        no less than the first such step (launches do not get fewer in a smaller step).

    Raises
    ------
    InputError
        Unknown curve, a factor below 1 or beside timed eager steps, a profile with several request counts at a size,
        or with ``measured`` no timed size that holds the largest step and no eager price either.
    """
    if curve not in CURVES:
        raise InputError(field="curve", value=curve, expected=f"one of {', '.join(CURVES)}")
    points = verify_points(profile)[1][0]
    one_request_count(points, profile, curve)
    if eager_factor is not None and points.eager.any():
        raise InputError(
            "the profile has timed eager steps", field="eager_factor", value=eager_factor, expected="no factor"
        )
    if eager_factor is not None and not 1 <= eager_factor <= 1e6:
        raise InputError(field="eager_factor", value=eager_factor, expected="a number from 1 to 1e6")
    if last > LARGEST_STEP:
        raise InputError("is no step", field="largest", value=last, expected=f"at most {LARGEST_STEP}")
    inside = points.take(~points.eager)
    name, smooth = _smooth(profile, inside, last)
    graph = smooth
    if curve == "measured":
        name, graph = "medians", np.full(last + 1, np.inf)
        held = inside.tokens <= last
        graph[inside.tokens[held]] = inside.ms[held]
    eager = None
    if eager_factor is not None:
        eager, name = eager_factor * smooth, f"{name};eager={eager_factor:g}x:assumed"
    elif points.eager.any():
        sizes, ms = points.tokens[points.eager], np.maximum.accumulate(points.ms[points.eager])
        eager = np.maximum(np.interp(np.arange(last + 1), sizes, ms), smooth)
    return GraphPrices(graph, eager, f"{profile.kind}:{profile.name}:{name}", int(inside.tokens[-1]))


def _smooth(profile: Profile, inside: Points, last: int) -> tuple[str, FloatArray]:
    tokens = np.arange(last + 1)
    for form in ("roofline-moe", "roofline"):
        try:
            model = fit(profile, form, allow_extrapolation=True)
        except InputError:
            continue  # too few sizes for this form
        assert isinstance(model, RooflineModel)
        ms = model.laws[0].smooth(np.maximum(tokens, inside.tokens[0]))
        return form, np.maximum.accumulate(ms)
    return "lines", StepTable(inside.tokens, inside.ms, "linear", running_max=True).prices(last)


def candidate_sizes(load: StepLoad, prices: GraphPrices, *, multiple: int = 1, largest: int | None = None) -> IntArray:
    """Sizes worth considering, ascending: the steps' own token counts, rounded up to a multiple.

    No other size can be better where a larger graph never costs less: it could shrink to the next smaller of these
    and hold the same steps. Where prices have dips every size that has a price is a candidate.

    Parameters
    ----------
    multiple
        Sizes are multiples of it (engines capture every 8 or 16 tokens, or whole blocks).
    largest
        None larger; None: the largest that was timed in a graph (a larger one has an extrapolated price).
    """
    if multiple < 1:
        raise InputError(field="multiple", value=multiple, expected="an integer >= 1")
    if largest is not None and largest < 1:
        raise InputError(field="largest", value=largest, expected="an integer >= 1")
    known = np.flatnonzero(np.isfinite(prices.graph))
    top = prices.known if largest is None else largest
    known = known[(known >= 1) & (known <= top) & (known % multiple == 0)]
    finite = prices.graph[known]
    if not (np.diff(finite) < 0).any():
        # The smallest priced size that holds each step.
        place = np.searchsorted(known, load.tokens)
        known = known[np.unique(place[place < known.size])]
    if not known.size:
        raise InputError(
            "no size that may be captured holds a step",
            field="largest",
            value=top,
            expected=f"at least {int(load.tokens[0])} tokens, the smallest step",
        )
    return np.asarray(known, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class CaptureSets:
    """The best sets of up to n sizes, for every n.

    Parameters
    ----------
    candidates
        int64[N]: what could be chosen.
    ms
        float64[K + 1]: mean milliseconds of a target pass with the best set of at most n sizes; inf where n sizes
        cannot hold all steps and nothing else does.
    """

    candidates: IntArray
    ms: FloatArray
    _last: IntArray
    _before: IntArray

    def sizes(self, count: int) -> IntArray:
        """int64[<= count], ascending: the best set of at most `count` sizes; the fewest and smallest where sets tie."""
        if not 0 <= count < self.ms.size:
            raise InputError(field="count", value=count, expected=f"0 to {self.ms.size - 1} sizes")
        count = int(np.argmin(self.ms[: count + 1]))  # the first of equals
        found = []
        place = int(self._last[count])
        while count > 0:
            found.append(int(self.candidates[place]))
            place = int(self._before[count, place])
            count -= 1
        return np.array(found[::-1], dtype=np.int64)


def best_sets(load: StepLoad, prices: GraphPrices, candidates: IntArray, most: int) -> CaptureSets:
    """The sets of at most 0, 1, ... `most` sizes with the least mean time, exactly.

    With F(n, i) the cost of all steps up to candidate i by n sizes of which i is the largest,

        F(n, i) = min over j < i of F(n - 1, j) + graph(i) (W(i) - W(j)),    F(1, i) = graph(i) W(i),

    W the steps' cumulative weight; what lies above the largest size runs eagerly. Time N^2 x `most`.

    Parameters
    ----------
    most
        Sizes at most, >= 1 (more than there are candidates do not help).

    Examples
    --------
    One size for steps of 1 and 4 tokens must hold both; the second one saves the padding of the small ones:

    >>> load = step_load([1, 4], [0.5, 0.5])
    >>> prices = GraphPrices(np.array([0.0, 2.0, 3.0, 4.0, 6.0]), None, "example", 4)
    >>> sets = best_sets(load, prices, np.array([1, 4]), 2)
    >>> sets.ms.tolist(), sets.sizes(1).tolist(), sets.sizes(2).tolist()
    ([inf, 6.0, 4.0], [4], [1, 4])
    """
    if most < 1:
        raise InputError(field="count", value=most, expected="an integer >= 1")
    if candidates.size > MOST_CANDIDATES:
        raise InputError(
            "too many sizes to choose from",
            field="multiple",
            value=f"{candidates.size} sizes",
            expected=f"at most {MOST_CANDIDATES}: take multiples of a larger number, or a smaller largest size",
        )
    most = min(most, candidates.size)
    cumulative = np.concatenate([[0.0], np.cumsum(load.weight)])
    held = cumulative[np.searchsorted(load.tokens, candidates, side="right")]
    graph = prices.graph[candidates]
    above = np.zeros(candidates.size)
    if prices.eager is None:
        above[candidates < load.tokens[-1]] = np.inf
        none = np.inf
    else:
        eager = np.concatenate([[0.0], np.cumsum(load.weight * prices.eager[load.tokens])])
        above = eager[-1] - eager[np.searchsorted(load.tokens, candidates, side="right")]
        none = float(eager[-1])
    ms, last = np.full(most + 1, none), np.zeros(most + 1, dtype=np.int64)
    before = np.zeros((most + 1, candidates.size), dtype=np.int64)
    cost = graph * held
    # [i, j]: what size i adds for the steps above size j; only j < i makes sense.
    added = graph[:, None] * (held[:, None] - held[None, :])
    added[np.triu_indices(candidates.size)] = np.inf
    for count in range(1, most + 1):
        if count > 1:
            through = added + cost[None, :]
            before[count] = through.argmin(axis=1)
            cost = through[np.arange(candidates.size), before[count]]
        total = cost + above
        last[count] = int(total.argmin())
        ms[count] = float(total[last[count]])
    return CaptureSets(candidates, np.minimum.accumulate(ms), last, before)


def lost_throughput(ms: float, ideal: float, other_ms: float = 0.0) -> float:
    """Share of the throughput lost by steps of `ms` where `ideal` was possible, with `other_ms` in both.

    >>> lost_throughput(10.0, 8.0), lost_throughput(10.0, 8.0, other_ms=10.0)
    (0.19999999999999996, 0.09999999999999998)
    """
    return 1.0 - (ideal + other_ms) / (ms + other_ms) if np.isfinite(ms) else float("nan")


def captured_profile(profile: Profile, prices: GraphPrices, sizes: IntArray, name: str) -> Profile:
    """The profile with other captured sizes, priced by `prices`: derived, to be simulated.

    Draft samples and eager samples above the graphs stay. Prompts keep the prices that they have in `profile`, so that
    a comparison is about decode steps.

    Raises
    ------
    InputError
        No size.
    """
    if not sizes.size:
        raise InputError("captures nothing", field="sizes", value=[], expected="at least one size")
    limit = int(sizes[-1])
    old = profile.samples
    timed = _kept(old, (old.kind == "verify") & (old.tokens > max(limit, profile.capture_limit)))
    points = verify_points(profile)[1][0]
    parts = [_rows("verify", sizes, prices.graph[sizes])]
    if points.eager.any():
        first = int(verify_points(profile)[0][0]) if old.of("verify").context_tokens[0] != MISSING else MISSING
        timed = _kept(timed, timed.context_tokens == first)
        parts.append(_rows("verify", timed.tokens, timed.ms, timed.repeat))
    elif prices.eager is not None and limit + 1 < prices.eager.size:
        above = np.unique(np.linspace(limit + 1, prices.eager.size - 1, 16).round().astype(np.int64))
        parts.append(_rows("verify", above, prices.eager[above]))
    parts += [old.of("draft"), old.of("prefill") if "prefill" in old.kind else _prompts(points)]
    return replace(
        profile,
        name=name,
        kind="derived",
        captured_sizes=sizes,
        capture_limit=limit,
        samples=_joined(parts),
        notes=f"Captured sizes chosen by dsim; their prices are {prices.label}. {profile.notes}".strip(),
    )


def _prompts(points: Points) -> Samples:
    """Prompts at the prices of the verify steps, the cliff included."""
    tokens, ms = points.tokens, np.maximum.accumulate(points.ms)
    if points.eager.any():
        # Between the limit and the first eager size that one's price holds.
        place = int(np.argmax(points.eager))
        if tokens[place] > points.limit + 1:
            tokens, ms = np.insert(tokens, place, points.limit + 1), np.insert(ms, place, ms[place])
    return _rows("prefill", tokens, ms)


def _rows(kind: str, tokens: IntArray, ms: FloatArray, repeat: IntArray | None = None) -> Samples:
    missing = np.full(tokens.size, MISSING, dtype=np.int64)
    passes = np.zeros(tokens.size, dtype=np.int64) if repeat is None else repeat
    return Samples(np.full(tokens.size, kind), tokens, missing, missing, ms, passes)


def _kept(samples: Samples, mask: npt.NDArray[np.bool_]) -> Samples:
    return Samples(**{item.name: getattr(samples, item.name)[mask] for item in fields(samples)})


def _joined(parts: list[Samples]) -> Samples:
    return Samples(
        **{item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Samples)}
    )
