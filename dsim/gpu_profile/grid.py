"""What is timed, in which order, and what of it fits into memory.

No torch here. Sizes are visited from coarse to fine, so that a run that is broken off has timed the ends and some sizes
between them, at every context alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dsim.errors import InputError
from dsim.gpu_profile.shapes import DecoderShape, DrafterShape
from dsim.profile import IntArray

#: Share of the free memory that is used at most, and what is left aside for libraries and the allocator.
USED_SHARE, RESERVED_BYTES = 0.92, 1 << 30
#: Fewest layers whose weights must be held: one layer's alone could stay in a cache between its uses.
FEWEST_LAYERS = 2


@dataclass(frozen=True)
class Case:
    """One size to be timed.

    Parameters
    ----------
    kind
        ``verify``, ``draft`` or ``prefill``, as in a profile.
    tokens
        In the pass.
    requests
        That share them: lengths differ by at most one (`lengths`).
    context
        Tokens of each request in the KV cache before the pass; 0 for a prefill.
    graph
        Replayed as a captured graph.
    """

    kind: str
    tokens: int
    requests: int
    context: int
    graph: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest request in the pass."""
        return -(-self.tokens // self.requests)

    def __str__(self) -> str:
        at = f" at context {self.context}" if self.context else ""
        return f"{self.kind} of {self.tokens} tokens, {self.requests} requests{at}"


@dataclass(frozen=True)
class Grid:
    """The sizes of one profile.

    Parameters
    ----------
    contexts
        Of the verify steps, tokens, ascending.
    capture_limit
        Largest captured size: the verify sizes up to it are `captured_sizes`.
    eager
        Verify sizes above it, ascending.
    tokens_per_request
        l + 1 of a verify step: B tokens are split over ceil(B / (l + 1)) requests, but never over more than
        `max_requests`. With several values a token count is timed with several request counts, which only the additive
        fit takes.
    max_requests
        Most requests in a step; drafts are timed at `draft_sizes` up to it.
    draft_context
        One of `contexts`: the cost model knows one context of drafts.
    prefill
        Prompt lengths, ascending.

    Raises
    ------
    InputError
        Anything that the description rules out.
    """

    contexts: tuple[int, ...]
    capture_limit: int
    eager: tuple[int, ...]
    tokens_per_request: tuple[int, ...]
    max_requests: int
    draft_context: int
    prefill: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in ("contexts", "eager", "tokens_per_request", "prefill"):
            values = getattr(self, field)
            if any(one < 1 for one in values) or list(values) != sorted(set(values)):
                raise InputError(field=field, value=list(values), expected="integers >= 1, each above the one before")
        if not self.contexts or not self.tokens_per_request:
            field = "tokens_per_request" if self.contexts else "contexts"
            raise InputError(field=field, value=[], expected="at least one")
        captured_sizes(self.capture_limit)
        if self.eager and self.eager[0] <= self.capture_limit:
            raise InputError(
                field="eager", value=self.eager[0], expected=f"sizes above the capture limit, {self.capture_limit}"
            )
        if self.max_requests < 1:
            raise InputError(field="max_requests", value=self.max_requests, expected="an integer >= 1")
        if self.draft_context not in self.contexts:
            known = ", ".join(str(one) for one in self.contexts)
            raise InputError(field="draft_context", value=self.draft_context, expected=f"one of {known}")

    @property
    def largest(self) -> int:
        """Most tokens in a verify step or prefill."""
        return max((self.capture_limit, *self.eager[-1:], *self.prefill[-1:]))


def captured_sizes(limit: int) -> tuple[int, ...]:
    """Token counts that vLLM captures up to `limit`: 1, 2, 4, every 8 up to 256, every 16 above.

    Source: https://github.com/vllm-project/vllm/blob/main/vllm/config/vllm.py (cudagraph_capture_sizes).

    >>> captured_sizes(24)
    (1, 2, 4, 8, 16, 24)
    """
    known = [1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)]
    if limit not in known:
        raise InputError(
            field="capture_limit", value=limit, expected="1, 2, 4, a multiple of 8 up to 256, or one of 16 above"
        )
    return tuple(size for size in known if size <= limit)


def draft_sizes(max_requests: int) -> tuple[int, ...]:
    """Request counts at which a draft is timed: 1, 2, 4, every 8, and the largest.

    >>> draft_sizes(20)
    (1, 2, 4, 8, 16, 20)
    """
    below = (size for size in (1, 2, 4, *range(8, max_requests, 8)) if size < max_requests)
    return (*below, max_requests)


def split(tokens: int, tokens_per_request: int, max_requests: int) -> int:
    """Requests of a verify step of so many tokens.

    >>> split(64, 4, 256), split(6, 4, 256), split(2048, 4, 256)
    (16, 2, 256)
    """
    return min(max_requests, -(-tokens // tokens_per_request))


def lengths(tokens: int, requests: int) -> IntArray:
    """int64[requests]: tokens of each request; they differ by at most one, longer ones first.

    >>> lengths(6, 4).tolist()
    [2, 2, 1, 1]
    """
    each, over = divmod(tokens, requests)
    return each + (np.arange(requests, dtype=np.int64) < over)


def coarse_to_fine(count: int) -> list[list[int]]:
    """Positions 0..count-1 in levels: the last and the first, then the middle of every gap, again and again.

    Within a level the larger come first.

    >>> coarse_to_fine(6)
    [[5, 0], [2], [3, 1], [4]]
    """
    if count < 1:
        return []
    levels = [list(dict.fromkeys((count - 1, 0)))]
    gaps = [(0, count - 1)]
    while gaps := [(low, high) for low, high in gaps if high - low > 1]:
        middles = [(low + high) // 2 for low, high in gaps]
        levels.append(middles[::-1])
        gaps = [half for (low, high), at in zip(gaps, middles, strict=True) for half in ((low, at), (at, high))]
    return levels


def schedule(grid: Grid, drafter: DrafterShape, *, graphs: bool) -> tuple[Case, ...]:
    """All cases in the order they are timed in.

    Level by level of `coarse_to_fine`: captured verify sizes, drafts, prefills, eager verify sizes; each verify size at
    all contexts before the next. The capture limit comes first, because no profile can do without it, and because of
    graphs that share a memory pool the largest is to be captured first.

    Parameters
    ----------
    grid, drafter
        What is timed.
    graphs
        Whether this machine replays graphs: verify steps and prefills up to the capture limit, and all drafts.
    """

    def verify(tokens: int) -> Iterator[Case]:
        spread = dict.fromkeys(split(tokens, each, grid.max_requests) for each in grid.tokens_per_request)
        for context in grid.contexts:
            for requests in spread:
                yield Case("verify", tokens, requests, context, graphs and tokens <= grid.capture_limit)

    def draft(requests: int) -> Iterator[Case]:
        yield Case("draft", requests * drafter.gamma, requests, grid.draft_context, graphs)

    def prefill(tokens: int) -> Iterator[Case]:
        yield Case("prefill", tokens, 1, 0, graphs and tokens <= grid.capture_limit)

    parts = [
        _levels(captured_sizes(grid.capture_limit), verify),
        _levels(draft_sizes(grid.max_requests), draft),
        _levels(grid.prefill, prefill),
        _levels(grid.eager, verify),
    ]
    deepest = max(len(part) for part in parts)
    return tuple(case for level in range(deepest) for part in parts if level < len(part) for case in part[level])


def _levels(sizes: Sequence[int], cases: Callable[[int], Iterator[Case]]) -> list[list[Case]]:
    return [list(chain.from_iterable(cases(sizes[index]) for index in level)) for level in coarse_to_fine(len(sizes))]


@dataclass(frozen=True)
class Memory:
    """What is allocated.

    Parameters
    ----------
    held_layers
        Layers of the target whose weights are held; with fewer than it has they are used in turn.
    cache_elements
        Numbers in the one KV cache that all cases share. A case whose layers do not all fit uses the parts in turn.
    """

    held_layers: int
    cache_elements: int


def layer_cache_elements(case: Case, target: DecoderShape) -> int:
    """Numbers in the KV cache of one layer in this case (target and drafter have the same heads)."""
    return case.requests * (case.context + case.longest) * target.kv_elements


def plan_memory(
    target: DecoderShape, drafter: DrafterShape, cases: Iterable[Case], *, item_bytes: int, free_bytes: int
) -> Memory:
    """Share memory between weights and cache.

    All weights if they fit beside one layer's cache of the largest case, else as many layers as do. What is left goes
    to the cache, up to one of its own for every layer. Weights or caches that take turns cost what distinct ones do as
    long as all that is read between two uses is larger than the on-chip caches.

    Parameters
    ----------
    target, drafter, cases
        What is timed.
    item_bytes
        Bytes of one number: 2 in bfloat16.
    free_bytes
        Memory that may be used.

    Raises
    ------
    InputError
        Not even `FEWEST_LAYERS` layers (or all of a smaller model) fit.
    """
    cases = list(cases)
    layers = {"draft": drafter.layers}
    least = max(layer_cache_elements(case, target) for case in cases)
    most = max(layers.get(case.kind, target.layers) * layer_cache_elements(case, target) for case in cases)
    layer = target.layer_elements()
    fixed = target.elements() - target.layers * layer + drafter.elements(target)
    work = max(working_elements(case, target, drafter) for case in cases)
    room = int((USED_SHARE * free_bytes - RESERVED_BYTES) // item_bytes) - fixed - work
    held = min(target.layers, (room - least) // layer)
    if held < min(FEWEST_LAYERS, target.layers):
        needed = fixed + work + least + min(FEWEST_LAYERS, target.layers) * layer
        raise InputError(
            f"{target.name} does not fit: {needed * item_bytes / 2**30:.1f} GiB are needed at least, "
            f"{least * item_bytes / 2**30:.1f} of them for one layer's KV cache of the largest step",
            field="memory",
            value=f"{free_bytes / 2**30:.1f} GiB free",
            expected="fewer requests (--max-requests), shorter contexts, a smaller shape or a larger device",
        )
    return Memory(held, min(most, room - held * layer))


def working_elements(case: Case, target: DecoderShape, drafter: DrafterShape) -> int:
    """Upper estimate of the numbers that live at once during a pass, weights and cache aside."""
    shape = drafter.layer_shape(target) if case.kind == "draft" else target
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    networks = max(1, shape.experts_per_token)
    token = 6 * heads + 6 * shape.width + networks * (2 * shape.width + 4 * shape.ffn)
    if case.kind == "draft":
        injected = case.requests * (drafter.gamma + 1)
        ends = injected * (4 * drafter.taps + 6) * shape.width + (case.tokens + 12 * case.requests) * drafter.vocabulary
    else:
        ends = 2 * scored_tokens(case, drafter.gamma) * shape.vocabulary
    # Twice: the warm-up's blocks and those of the graphs' pool may both be there.
    return 2 * (case.tokens * token + ends)


def scored_tokens(case: Case, gamma: int) -> int:
    """Tokens whose logits are computed: gamma + 1 a request at most; the last one of a prefill.

    In a step with more tokens than that the rest stands for chunks of prompts, of which an engine scores none.
    """
    return 1 if case.kind == "prefill" else int(np.minimum(lengths(case.tokens, case.requests), gamma + 1).sum())
