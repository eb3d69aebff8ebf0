"""A `Profile` as an engine's cost table, fitted or sampled as that engine does it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsim.convert.gap import gap
from dsim.cost import StepCost, fit
from dsim.cost.additive import fit_additive
from dsim.cost.points import Curve, Points, curve, price_between, verify_points
from dsim.engines import EngineFile, PriceTable, SglangAdditive, SglangDiagonal, TrtllmV1, TrtllmV2, VllmProfileCache
from dsim.engines.checks import digest
from dsim.engines.trtllm import DEFAULT_GAIN
from dsim.engines.vllm import SCHEMA
from dsim.errors import InputError
from dsim.profile import MISSING, FloatArray, IntArray, Profile

#: SGLang refuses a bias of 0, and has this in the tables that it makes itself.
LEAST_BIAS_S = 1e-9
#: TensorRT-LLM refuses a step time of 0; its profiler puts this there.
LEAST_THETA_MS = 1e-4


def from_profile(
    profile: Profile,
    format: str,
    *,
    gamma: int | None = None,
    context: int | None = None,
    like: EngineFile | None = None,
    source_sha256: str | None = None,
    original: PriceTable | None = None,
) -> tuple[PriceTable, list[str]]:
    """A profile in an engine's format.

    Parameters
    ----------
    profile
        Timed steps.
    format
        ``sglang-diagonal``: medians, the draft pass added where it has a price. ``sglang-additive`` and
        ``trtllm-v1``: the additive fit of `dsim.cost`, the draft curve added to alpha. ``trtllm-v2``: the cells of
        `like`, timed or from the additive fit. ``vllm``: medians by size, draft apart.
    gamma
        Block size: a diagonal is timed at (gamma + 1) tokens a request.
    context
        Which context of a profile with several.
    like
        A file of the same format, from the engine that is to read the new one. What prices do not determine is taken
        from it, and for ``vllm`` and ``trtllm-v2`` the sizes are.
    source_sha256
        SHA-256 of what the profile was read from: the origin that a v2 table gives for its cells.
    original
        The engine's table that the profile was made of, if it was: prices are compared with its own.

    Returns
    -------
    The table, and what was lost or assumed.

    Raises
    ------
    InputError
        What the format cannot express at all.
    """
    if like is not None and like.format != format:
        raise InputError("is of another format", field="--like", value=like.format, expected=f"a file of {format}")
    here, told = _at_context(profile, context)
    told += _dropped(profile) if original is None else []
    made: dict[str, Callable[[], tuple[PriceTable, list[str]]]] = {
        "sglang-diagonal": lambda: _diagonal(here, gamma, like),
        "sglang-additive": lambda: _sglang_additive(here, like),
        "trtllm-v1": lambda: _trtllm_additive(here, like),
        "trtllm-v2": lambda: _exact(here, like, source_sha256),
        "vllm": lambda: _curves(here, like),
    }
    if format not in made:
        raise InputError(
            "a profile cannot become that", field="--format", value=format, expected=f"one of {', '.join(made)}"
        )
    if gamma is not None and format != "sglang-diagonal":
        raise InputError("only a diagonal table has one", field="--gamma", value=gamma, expected="no --gamma")
    table, more = made[format]()
    told += more
    prices = here.prices if original is None else original.prices
    levels = _levels(here, table)
    told += gap(prices, table.prices, here.sizes, levels, here.points.limit, table.reach, _READ)
    return table, told


#: What `gap` says of a table that an engine is to read, and of a profile that dsim is to read.
_READ = "what a planner reads from OUT differs from IN"
_CHARGED = "what dsim charges for a step of OUT ({}) differs from what the engine reads from IN"


def charged(profile: Profile, table: PriceTable) -> list[str]:
    """How far a profile's prices (its staircase, or the additive fit where it has two axes) are from its table's.

    Parameters
    ----------
    profile
        Made of `table` by `dsim.convert.to_profile`: sizes are the table's, but not its rule for those between.
    table
        What the engine's own planner reads.

    Returns
    -------
    list of str
        Nothing where both rules agree.
    """
    here, _ = _at_context(profile, None)
    what = _CHARGED.format("additive fit" if here.two_axes else "staircase")
    told = gap(table.prices, here.prices, here.sizes, _levels(here, table), here.points.limit, table.reach, what)
    if told:
        told.append("a profile says what steps cost: a policy that is to believe what its engine reads takes table=IN")
    return told


def _levels(here: _Here, table: PriceTable) -> IntArray:
    """Request counts at which prices are worth comparing: those of exact graphs have no others."""
    return np.array(sorted(table.cost_tables)) if isinstance(table, TrtllmV2) else here.levels


# -- one context of a profile ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Here:
    """A profile at one context: medians, the draft curve, and its prices by the usual fit."""

    profile: Profile
    points: Points
    draft: Curve | None
    cost: StepCost

    @property
    def two_axes(self) -> bool:
        """Whether some token count was timed with several request counts."""
        return bool((np.diff(self.points.tokens) == 0).any())

    @property
    def sizes(self) -> IntArray:
        return np.unique(self.points.tokens)

    @property
    def levels(self) -> IntArray:
        """Request counts that the profile has prices for, ascending; [1] where it names none."""
        known = self.points.requests if self.two_axes else np.zeros(0, dtype=np.int64)
        if self.draft is not None:
            known = np.concatenate([known, self.draft.sizes])
        known = np.unique(known[known != MISSING])
        return known if known.size else np.array([1])

    def prices(self, requests: int, last: int) -> FloatArray:
        """Milliseconds of a step by its tokens, drafting included where it has a price."""
        context = self.profile.samples.of("verify").context_tokens[0]
        verify = self.cost.verify_table(requests, last, float(context))
        return verify + (0.0 if self.draft is None else self.cost.draft_ms(requests))


def _at_context(profile: Profile, context: int | None) -> tuple[_Here, list[str]]:
    contexts, points = verify_points(profile)
    told = []
    chosen = 0
    if context is not None and contexts.size < 2:
        raise InputError(
            "the profile has one context at most", field="--context", value=context, expected="no --context"
        )
    if contexts.size > 1:
        known = contexts.tolist()
        if context is not None and context not in known:
            raise InputError(
                field="--context", value=context, expected=f"one of {', '.join(str(size) for size in known)}"
            )
        chosen = 0 if context is None else known.index(context)
        others = ", ".join(str(size) for i, size in enumerate(known) if i != chosen)
        told.append(f"contexts dropped: {others}; prices are those at {known[chosen]} tokens (--context)")
        samples = profile.samples
        keep = (samples.kind != "verify") | (samples.context_tokens == known[chosen])
        kept = {name: getattr(samples, name)[keep] for name in _COLUMNS}
        profile = replace(profile, samples=type(samples)(**kept))
    here = points[chosen]
    cost = fit(profile, "additive" if (np.diff(here.tokens) == 0).any() else "staircase", allow_extrapolation=True)
    return _Here(profile, here, curve(profile, "draft", stepped=False, running_max=False), cost), told


_COLUMNS = ("kind", "tokens", "requests", "context_tokens", "ms", "repeat")


def _dropped(profile: Profile) -> list[str]:
    told = ["hardware, model, source, license and notes are dropped"]
    if (profile.samples.repeat != profile.samples.repeat[0]).any():
        told.append("repeats are dropped: a size has its warm median")
    if not profile.draft_included and not len(profile.samples.of("draft")):
        told.append("the profile has no price of drafting: a step costs what verifying costs")
    prefills = len(profile.samples.of("prefill"))
    if prefills:
        told.append(f"prefill samples are dropped ({prefills})")
    return told


def _no_captures(profile: Profile, rule: str) -> list[str]:
    count = profile.captured_sizes.size
    return [f"captured sizes are dropped ({count}): {rule}"] if count else []


# -- SGLang ------------------------------------------------------------------------------------------------


def steps_per_second(ms: float) -> float:
    """The rate of which `ms` is the time: of those that 1000 / rate turns into `ms`, the one with the fewest digits.

    Taking 1000 / ms would change the last digit of a table that goes to milliseconds and back.

    >>> steps_per_second(1000 / 950.1), 1000 / (1000 / 950.1)
    (950.1, 950.1)
    """
    guess = 1000.0 / ms
    near, low, high = [guess], guess, guess
    for _ in range(3):
        low, high = math.nextafter(low, 0.0), math.nextafter(high, math.inf)
        near += [low, high]
    exact = [rate for rate in near if 1000.0 / rate == ms]
    return min(exact, key=lambda rate: (len(repr(rate)), abs(rate - guess))) if exact else guess


def _diagonal(here: _Here, gamma: int | None, like: EngineFile | None) -> tuple[SglangDiagonal, list[str]]:
    points, told = here.points, []
    tokens, requests, ms = points.tokens, points.requests, points.ms
    if here.two_axes:
        if gamma is None:
            raise InputError(
                "the profile has several request counts at one token count, and a diagonal table has one",
                field="--gamma",
                expected="a block size: the diagonal has (gamma + 1) tokens a request",
            )
        law, _ = fit_additive(points)
        requests = np.unique(points.requests)
        tokens = requests * (gamma + 1)
        inside = (tokens >= points.tokens[0]) & (tokens <= points.tokens[-1])
        if not inside.any():
            raise InputError(
                "no profiled batch size has its diagonal within the profiled tokens",
                field="--gamma",
                value=gamma,
                expected=f"(gamma + 1) x requests in {points.tokens[0]}..{points.tokens[-1]}",
            )
        dropped = requests[~inside].tolist()
        if dropped:
            told.append(f"batch sizes whose diagonal was not profiled are dropped: {', '.join(map(str, dropped))}")
        requests, tokens = requests[inside], tokens[inside]
        ms = np.array([law.price(r, np.array([m]))[0] for r, m in zip(requests.tolist(), tokens.tolist(), strict=True)])
        told.append(f"prices off the diagonal of {gamma + 1} tokens a request are dropped")
    elif gamma is not None:
        if here.draft is None or requests[0] != MISSING:
            why = "there is no draft curve to fold in" if here.draft is None else "the profile gives the requests"
            raise InputError(f"changes nothing: {why}", field="--gamma", value=gamma, expected="no --gamma")
        requests = -(-tokens // (gamma + 1))
    if here.draft is not None:
        tokens, ms, more = _with_draft(here.draft, tokens, requests, ms)
        told += more
    rates = tuple(steps_per_second(float(value)) for value in ms)
    dips = sum(after > before for before, after in itertools.pairwise(rates))
    if dips:
        told.append(f"{dips} probes are faster than the one before (dips), which SGLang's profiler warns about")
    if len(rates) == 1:
        told.append("a single probe: the engine takes the table for uninitialized and verifies everything")
    told += _no_captures(here.profile, "a step has the price of the next smaller probe")
    last = int(tokens[-1])
    extra: dict[str, Any] = {}
    most = last
    if isinstance(like, SglangDiagonal):
        most, extra = max(last, like.max_batch_tokens), dict(like.extra)
    table = SglangDiagonal(
        sample_batch_tokens=tuple(tokens.tolist()), sample_steps_per_sec=rates, max_batch_tokens=most, extra=extra
    )
    return table, told


def _with_draft(
    draft: Curve, tokens: IntArray, requests: IntArray, ms: FloatArray
) -> tuple[IntArray, FloatArray, list[str]]:
    """The draft pass of each step added to its time."""
    if requests[0] == MISSING:
        return tokens, ms, [f"draft curve dropped ({draft.sizes.size} sizes): --gamma N folds it in"]
    priced = requests <= draft.sizes[-1]
    told = []
    if not priced.any():
        raise InputError(
            "no size of the diagonal has a draft price",
            field="requests",
            value=int(requests[0]),
            expected=f"at most {int(draft.sizes[-1])}, the largest draft sample",
        )
    if not priced.all():
        told.append(f"{int((~priced).sum())} sizes above {int(tokens[priced][-1])} tokens have no draft price: dropped")
    drafts = price_between(draft.sizes, draft.ms, requests[priced], stepped=False)
    told.append(
        "the draft pass is folded in along the diagonal: off it, it is charged for the wrong number of requests"
    )
    return tokens[priced], ms[priced] + drafts, told


@dataclass(frozen=True)
class _Sum:
    """bias + alpha(requests) + theta(tokens), milliseconds; alpha and theta are 0 at their smallest size."""

    bias: float
    requests: IntArray
    alpha: FloatArray
    tokens: IntArray
    theta: FloatArray


def _summed(here: _Here) -> tuple[_Sum, list[str]]:
    law, why = fit_additive(here.points)
    told = []
    if why is not None and here.draft is None:
        told.append(why)
    bias, requests, alpha = law.bias, law.requests, law.alpha
    if here.draft is not None:
        drafts = np.maximum.accumulate(here.draft.ms)
        if (drafts != here.draft.ms).any():
            told.append("dips of the draft curve are flattened (running maximum)")
        sizes = np.union1d(requests, here.draft.sizes)
        own = price_between(requests, alpha, sizes, stepped=False) if requests.size else np.zeros(sizes.size)
        total = own + price_between(here.draft.sizes, drafts, sizes, stepped=False)
        told.append("the draft curve is part of alpha")
        bias, requests, alpha = bias + float(total[0]), sizes, total - total[0]
    fitted = np.array(
        [law.price(max(r, 0), np.array([m]))[0] for r, m in zip(here.points.requests, here.points.tokens, strict=True)]
    )
    off = np.abs(fitted / here.points.ms - 1)
    if off.max() > 1e-6:
        told.append(
            f"dips are flattened and what is not a sum is dropped: the fit is off by {100 * off.max():.2f} % at most, "
            f"{100 * float(np.median(off)):.2f} % in the median"
        )
    limit = here.points.limit
    if limit and here.points.eager.any():
        first = int(here.points.tokens[here.points.eager][0])
        told.append(f"the jump at the capture limit becomes a slope from {limit} to {first} tokens")
    told += _no_captures(here.profile, "between its sizes a step has the price on a straight line")
    return _Sum(bias, requests, alpha, law.tokens, law.theta), told


def _sglang_additive(here: _Here, like: EngineFile | None) -> tuple[SglangAdditive, list[str]]:
    law, told = _summed(here)

    def seconds(values: FloatArray) -> tuple[float, ...]:
        return tuple(round(float(value) / 1000, 12) for value in values)

    table = SglangAdditive(
        bias_seconds=max(round(law.bias / 1000, 12), LEAST_BIAS_S),
        bs_probes=tuple(law.requests.tolist()) or (1,),
        alpha_seconds=seconds(law.alpha) or (0.0,),
        m_probes=tuple(law.tokens.tolist()),
        theta_seconds=seconds(law.theta),
        extra=dict(like.extra) if isinstance(like, SglangAdditive) else {},
    )
    if isinstance(like, SglangAdditive):
        same = _same_sums(table, like, (table.bs_probes, table.m_probes), (like.bs_probes, like.m_probes))
        if same and (table.bias_seconds, table.alpha_seconds) != (like.bias_seconds, like.alpha_seconds):
            return replace(like), [*told, _SPLIT]
    return table, told


_SPLIT = "sizes and sums are those of --like: bias, alpha and theta are split as there"
#: Sums as near as this are the same: a profile and the rounding of the usual split change the last digits.
_SAME_SUM = 1e-9
_Axes = tuple[tuple[int, ...], tuple[int, ...]]


def _same_sums(table: PriceTable, like: PriceTable, axes: _Axes, likes: _Axes) -> bool:
    """Whether two additive tables have the same sizes (requests, tokens) and the same price at every pair of them."""
    batches, tokens = axes
    if axes != likes:
        return False
    pairs = [[found.prices(r, tokens[-1])[list(tokens)] for r in batches or (1,)] for found in (table, like)]
    return np.allclose(pairs[0], pairs[1], rtol=_SAME_SUM, atol=0.0)


# -- TensorRT-LLM ------------------------------------------------------------------------------------------


def _trtllm_additive(here: _Here, like: EngineFile | None) -> tuple[TrtllmV1, list[str]]:
    law, told = _summed(here)
    # As the engine's profiler does: theta is what a line through its first two sizes leaves at 0 tokens.
    lift = LEAST_THETA_MS
    if law.tokens.size > 1:
        lift = max(lift, float(law.theta[1] / (law.tokens[1] - law.tokens[0]) * law.tokens[0]))
    lift = min(lift, law.bias)
    if lift <= 0:
        raise InputError("a step without any tokens takes no time", field="ms", expected="a profile with a constant")

    def milliseconds(values: FloatArray) -> tuple[float, ...]:
        return tuple(round(float(value), 9) for value in values)

    given = like if isinstance(like, TrtllmV1) else None
    table = TrtllmV1(
        token_counts=tuple(law.tokens.tolist()),
        step_time_ms=milliseconds(law.theta + lift),
        fixed_overhead_ms=round(law.bias - lift, 9),
        batch_sizes=tuple(law.requests.tolist()),
        batch_overhead_ms=milliseconds(law.alpha),
        minimum_predicted_gain=None if given is None else given.minimum_predicted_gain,
        extra={"_meta": {"lookup": "interp", "encoding": "decomposed"}} if given is None else dict(given.extra),
    )
    if given is None:
        told.append(f"minimum_predicted_gain is not set: the engine works with {DEFAULT_GAIN:g}")
    if table.is_flat:
        told.append("the table is flat: the engine refuses to trim")
    if given is not None:
        # A file without batch sizes has no such axis.
        axes, likes = ((one.batch_sizes or (), one.token_counts) for one in (table, given))
        same = _same_sums(table, given, axes, likes)
        if same and (table.fixed_overhead_ms, table.step_time_ms) != (given.fixed_overhead_ms, given.step_time_ms):
            return replace(given), [*told, _SPLIT]
    return table, told


def _exact(here: _Here, like: EngineFile | None, sha256: str | None) -> tuple[TrtllmV2, list[str]]:
    if not isinstance(like, TrtllmV2):
        raise InputError(
            "a v2 table is bound to one engine by its fingerprint, and holds exactly that engine's graphs",
            field="--like",
            expected="a v2 table of the engine that is to read this one",
        )
    if here.draft is not None or not here.profile.draft_included:
        raise InputError(
            "a v2 table holds whole steps, and the profile's verify samples do not include the draft",
            field="draft_included",
            value=False,
            expected="true, or the format trtllm-v1",
        )
    points = here.points
    timed = {
        (m, r): t for m, r, t in zip(points.tokens.tolist(), points.requests.tolist(), points.ms.tolist(), strict=True)
    }
    law, _ = fit_additive(points)
    tables, fitted = {}, []
    for graph, (budgets, _) in like.cost_tables.items():
        row = []
        for budget in budgets:
            tokens = budget or graph * (like.max_draft_len + 1)
            if (tokens, graph) in timed:
                row.append(timed[tokens, graph])
                continue
            known = law.requests if law.depends_on_requests else np.array([graph])
            inside = points.tokens[0] <= tokens <= points.tokens[-1] and known[0] <= graph <= known[-1]
            if not inside:
                raise InputError(
                    f"the engine has a graph of {graph} requests and {tokens} tokens, which the profile does not reach",
                    field="tokens",
                    value=tokens,
                    expected=f"tokens {points.tokens[0]}..{points.tokens[-1]} and requests {known[0]}..{known[-1]}",
                )
            fitted.append(f"({graph}, {budget})")
            row.append(round(float(law.price(graph, np.array([tokens]))[0]), 6))
        tables[graph] = budgets, tuple(row)
    origin = sha256 or digest(here.profile.samples.ms.tolist())
    told = ["graphs, fingerprint, minimum_predicted_gain and iteration_drain_guard are those of --like"]
    told.append(f"the origin of every cell is the SHA-256 of IN, {origin}")
    if fitted:
        shown = f"{', '.join(fitted[:6])}{' ...' if len(fitted) > 6 else ''}"
        told.append(f"{len(fitted)} cells (G, V) were not profiled and come from the additive fit: {shown}")
    measurements = tuple(
        {
            "rank_local_graph_batch_size": graph,
            "rank_local_verifier_budget": budget,
            "source_result_sha256": origin,
            "step_time_ms": time,
        }
        for graph, (budgets, row) in tables.items()
        for budget, time in zip(budgets, row, strict=True)
    )
    return replace(like, cost_tables=tables, measurements=measurements), told


# -- vLLM --------------------------------------------------------------------------------------------------


def _curves(here: _Here, like: EngineFile | None) -> tuple[VllmProfileCache, list[str]]:
    profile, points = here.profile, here.points
    if here.two_axes:
        raise InputError(
            "vLLM prices a step by its tokens alone; the profile has several request counts at one token count",
            field="requests",
            value=np.unique(points.requests).tolist(),
            expected="one request count for each token count, or another format",
        )
    if here.draft is None:
        why = "its verify samples include the draft" if profile.draft_included else "it has no draft samples"
        raise InputError(
            f"vLLM prices the draft pass by itself, and of this profile {why}",
            field="draft_included",
            value=profile.draft_included,
            expected="a profile with draft samples, or another format",
        )
    told: list[str] = []
    dips = int((np.maximum.accumulate(points.ms) > points.ms).sum())
    if dips:
        told.append(f"{dips} verify sizes are dips: they are kept, and the engine flattens them (running maximum)")
    if (points.requests != MISSING).any():
        told.append("requests of the verify samples are dropped")
    if isinstance(like, VllmProfileCache):
        verify = _at_sizes(
            here.cost.verify_table, "tokens", [m for m, _ in like.verify_curve], points.tokens, points.ms
        )
        draft = _at_sizes(
            _drafts(here.cost), "requests", [r for r, _ in like.draft_curve], here.draft.sizes, here.draft.ms
        )
        for name, (_, filled) in (("verify", verify), ("draft", draft)):
            if filled:
                told.append(f"{len(filled)} sizes of the engine's {name} curve were not profiled; the fit prices them")
        told.append("sizes, factors and fingerprint are those of --like")
        return replace(like, verify_curve=verify[0], draft_curve=draft[0], signed=True), told
    cache = VllmProfileCache(
        draft_curve=tuple(zip(here.draft.sizes.tolist(), here.draft.ms.tolist(), strict=True)),
        verify_curve=tuple(zip(points.tokens.tolist(), points.ms.tolist(), strict=True)),
    )
    told.append("the engine takes only a file that names its own factors (--like FILE, a cache that it wrote)")
    return _with_captures(cache, profile), told


def _with_captures(cache: VllmProfileCache, profile: Profile) -> VllmProfileCache:
    """The cache with captured sizes and context among its factors: else its reader would not know where graphs end."""
    if not profile.captured_sizes.size:
        return cache
    known = {"capture_sizes": profile.captured_sizes.tolist()}
    context = int(profile.samples.of("verify").context_tokens[0])
    factors = {"schema": SCHEMA, "profile": known if context == MISSING else known | {"context_len": context}}
    return replace(cache, schema=SCHEMA, factors=factors, fingerprint=digest(factors), signed=True)


def _drafts(cost: StepCost) -> Callable[[int, int], FloatArray]:
    return lambda _, last: np.array([cost.draft_ms(n) for n in range(last + 1)])


def _at_sizes(
    priced: Callable[[int, int], FloatArray], field: str, sizes: list[int], known: IntArray, ms: FloatArray
) -> tuple[tuple[tuple[int, float], ...], list[int]]:
    """Times at the engine's own sizes: medians where there are any, else the fit; and which sizes those are."""
    timed = dict(zip(known.tolist(), ms.tolist(), strict=True))
    for size in sizes:
        if not known[0] <= size <= known[-1]:
            raise InputError(
                f"the engine profiled a size of {size} {field}, which the profile does not reach",
                field=field,
                value=size,
                expected=f"sizes in {int(known[0])}..{int(known[-1])}",
            )
    prices = priced(1, max(sizes))
    curve = tuple((size, timed[size] if size in timed else float(prices[size])) for size in sizes)
    return curve, [size for size in sizes if size not in timed]
