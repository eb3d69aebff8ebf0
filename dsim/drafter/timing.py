"""Timing an engine's steps at given sizes: the passes of a profile.

A timed pass is a whole `Engine.step` over requests that were put into decode with texts of a given length, under a
policy that verifies what the pass's size says. So the clock is read where a run reads it, and one pass tells what the
target's pass, the draft and the host cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsim.drafter.build import Drafter
from dsim.drafter.engine import PARTS, Engine, EngineOptions, EngineRequest
from dsim.drafter.target import LlamaTarget
from dsim.errors import InputError
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits
from dsim.profile import MISSING, SAMPLE_KINDS, Samples


@dataclass(frozen=True, order=True)
class Size:
    """What a pass holds.

    Attributes
    ----------
    kind
        ``verify``, ``draft`` or ``prefill`` (one prompt alone).
    context
        Tokens of each request's text; 0 for prompts.
    requests, tokens
        Requests in decode (1 for prompts), and tokens of the target's pass.
    """

    kind: str
    context: int
    requests: int
    tokens: int


@dataclass(frozen=True)
class Pass:
    """A timed pass: its size, and nanoseconds by part in the order of `PARTS`."""

    size: Size
    ns: tuple[int, ...]

    def ms(self, *parts: str) -> float:
        """Milliseconds of some parts together."""
        return sum(self.ns[PARTS.index(part)] for part in parts) * 1e-6


def batch_sizes(users: Iterable[int], gamma: int, chunk: int) -> list[int]:
    """Numbers of requests to time: those of the runs, one whose blocks fill the largest step of a run, some between.

    A step of the most users with whole blocks can hold a prompt chunk besides; its price is that of as many verified
    tokens of a larger batch. Neighbors are no further apart than half a block, so that they share token counts.

    >>> batch_sizes([4, 1], gamma=7, chunk=32)
    [1, 4, 8]
    >>> batch_sizes([1], gamma=1, chunk=6)
    [1, 2, 4]
    """
    own = sorted(set(users))
    found, step = own[:1], max(2, (1 + gamma) // 2)
    for batch in [*own[1:], own[-1] + -(-chunk // (1 + gamma))]:
        while batch > step * found[-1]:
            found.append(step * found[-1])
        found.append(batch)
    return sorted(set(found))


def verify_sizes(batches: Sequence[int], gamma: int, contexts: Sequence[int]) -> list[Size]:
    """Verify passes of every batch: at 1, 2, 3, ... tokens a request, and at the token counts of other batches.

    Batches share token counts, so that a fit can tell what a request costs from what a token costs.

    >>> [size.tokens for size in verify_sizes([1, 2], gamma=3, contexts=[64])]
    [1, 2, 3, 4, 2, 3, 4, 6, 8]
    """
    each = sorted({*range(1, min(gamma, 7) + 1), *(round(1 + gamma * part / 4) for part in range(5))})
    knots = sorted({batch * tokens for batch in batches for tokens in each})
    return [
        Size("verify", context, batch, tokens)
        for context in contexts
        for batch in batches
        for tokens in knots
        if batch <= tokens <= batch * (1 + gamma)
    ]


def profile_sizes(
    batches: Sequence[int], gamma: int, *, contexts: tuple[int, int], usual: int, prompts: Sequence[int]
) -> list[Size]:
    """All passes of a profile.

    Parameters
    ----------
    batches
        Numbers of requests.
    gamma
        Drafted tokens.
    contexts
        Shortest and longest text that the runs have: verify passes at both, prices between.
    usual
        A text in the middle of a run: drafts are timed there.
    prompts
        Lengths of prompts.
    """
    drafts = [Size("draft", usual, batch, batch) for batch in batches]
    alone = [Size("prefill", 0, 1, tokens) for tokens in sorted(set(prompts))]
    return [*verify_sizes(batches, gamma, contexts), *drafts, *alone]


class StoppableClock:
    """A clock that stands still while something else is done: between two steps of a run, passes are timed.

    Parameters
    ----------
    clock
        Nanoseconds; goes on all the time.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._left_out = 0

    def __call__(self) -> int:
        return self._clock() - self._left_out

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The time of the block is left out."""
        began = self._clock()
        try:
            yield
        finally:
            self._left_out += self._clock() - began


class _Told(BasePolicy):
    """Verifies what it was told, on the same object in every copy."""

    traits = Traits(cost_driven=False)

    def __init__(self) -> None:
        self.lengths: IntArray = np.empty(0, dtype=np.int64)

    def __deepcopy__(self, memo: Any) -> _Told:
        return self

    def plan(self, view: PolicyView) -> IntArray:
        return self.lengths


class EngineBench:
    """An engine for timed passes.

    Parameters
    ----------
    target, drafter
        As in `Engine`.
    options
        Of the runs; `max_requests`, `max_prompt` and `max_tokens` are set to what the passes need.
    sizes
        The passes that there will be.
    prompts
        Of the runs: what the requests of a pass ask.
    clock
        Nanoseconds.
    """

    def __init__(
        self,
        target: LlamaTarget,
        drafter: Drafter,
        options: EngineOptions,
        sizes: Sequence[Size],
        prompts: Sequence[EngineRequest],
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if not sizes or not prompts:
            raise InputError(field="sizes, prompts", value=(len(sizes), len(prompts)), expected="at least one each")
        longest = max(size.tokens if size.kind == "prefill" else size.context for size in sizes)
        self._policy, self._prompts = _Told(), prompts
        self.engine = Engine(
            target,
            drafter,
            policy=self._policy,
            prices=None,
            options=replace(
                options,
                max_requests=max(size.requests for size in sizes),
                max_prompt=longest,
                max_tokens=drafter.config.gamma + 3,  # no pass ends a text
            ),
            clock=clock,
        )

    def time(self, size: Size, random: np.random.Generator) -> Pass:
        """One pass; its prompts, and who verifies how much, are drawn."""
        chosen = random.permutation(len(self._prompts))
        asked = [self._prompts[chosen[i % chosen.size]].prompt for i in range(size.requests)]
        engine = self.engine
        if size.kind == "prefill":
            engine.clear()
            prompt = tuple(asked[0][i % len(asked[0])] for i in range(size.tokens))
            engine.submit(EngineRequest(0, prompt))
            return Pass(size, engine.step().ns)
        engine.fill([EngineRequest(number, prompt) for number, prompt in enumerate(asked)], size.context)
        self._policy.lengths = composition(size.requests, size.tokens - size.requests, engine.gamma, random)
        return Pass(size, engine.step().ns)


def composition(requests: int, drafts: int, gamma: int, random: np.random.Generator) -> IntArray:
    """int64[R]: verify lengths with a given sum, drawn evenly from the gamma drafts of all requests.

    >>> composition(3, 6, 2, np.random.default_rng(0)).tolist()
    [2, 2, 2]
    """
    places = random.permutation(requests * gamma)[:drafts]
    return np.bincount(places // max(1, gamma), minlength=requests).astype(np.int64)


#: Parts of a pass that its kind is about.
_OF_KIND = {"verify": ("verify",), "draft": ("draft",), "prefill": ("verify", "prefill")}


def pass_ms(one: Pass) -> float:
    """Milliseconds of what the pass was timed for.

    Verify: the target's pass with its sampling. Draft: the drafter's, its context included. Prefill: a prompt alone,
    target and drafter.
    """
    return one.ms(*_OF_KIND[one.size.kind])


def samples_of(passes: Sequence[Pass]) -> Samples:
    """The passes as a profile's samples (`pass_ms`); the repeats of a size are numbered in their order."""

    def place(size: Size) -> tuple[int, int, int, int]:
        sizes = (size.requests, size.tokens) if size.kind == "draft" else (size.tokens, size.requests)
        return (SAMPLE_KINDS.index(size.kind), size.context, *sizes)

    found: dict[Size, list[float]] = {}
    for one in passes:
        found.setdefault(one.size, []).append(pass_ms(one))
    rows = [(size, repeat, ms) for size in sorted(found, key=place) for repeat, ms in enumerate(found[size])]
    return Samples(
        kind=np.array([size.kind for size, _, _ in rows], dtype=np.str_),
        tokens=np.array([size.tokens for size, _, _ in rows], dtype=np.int64),
        requests=np.array([size.requests for size, _, _ in rows], dtype=np.int64),
        context_tokens=np.array([size.context or MISSING for size, _, _ in rows], dtype=np.int64),
        ms=np.array([ms for _, _, ms in rows]),
        repeat=np.array([repeat for _, repeat, _ in rows], dtype=np.int64),
    )
