"""Timed passes: which sizes, what they hold, what is read off the clock, and the profile that they make."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from dsim.drafter.drafter import FINAL
from dsim.drafter.engine import PARTS, EngineOptions, EngineRequest
from dsim.drafter.target import LlamaTarget
from dsim.drafter.timing import (
    EngineBench,
    Pass,
    Size,
    StoppableClock,
    batch_sizes,
    composition,
    pass_ms,
    profile_sizes,
    samples_of,
    verify_sizes,
)
from dsim.drafter.tiny import tiny_target
from dsim.errors import InputError
from dsim.profile import MISSING, Profile

GAMMA = 3
PROMPTS = [EngineRequest(0, (1, 5, 6, 1)), EngineRequest(1, (1, 2, 3, 4, 5, 1))]


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    return tiny_target(seed=3, vocab_size=12, num_layers=2)


def ns(**parts: int) -> tuple[int, ...]:
    return tuple(parts.get(part, 0) for part in PARTS)


# -- sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("users", "gamma", "chunk"), [([1, 2, 4, 8, 16], 7, 128), ([1], 7, 128), ([3, 40], 1, 9)])
def test_batches_reach_the_largest_step_and_share_token_counts(users: list[int], gamma: int, chunk: int) -> None:
    batches = batch_sizes(users, gamma, chunk)
    assert set(users) <= set(batches)
    assert batches[-1] * (1 + gamma) >= users[-1] * (1 + gamma) + chunk
    sizes = verify_sizes(batches, gamma, [64])
    for first, second in pairwise(batches):
        of = [{size.tokens for size in sizes if size.requests == batch} for batch in (first, second)]
        assert of[0] & of[1]
    assert all(size.requests <= size.tokens <= size.requests * (1 + gamma) for size in sizes)
    whole = {(size.requests, size.tokens) for size in sizes}
    assert {(batch, batch * (1 + gamma)) for batch in batches} | {(batch, batch) for batch in batches} <= whole


def test_a_profile_has_both_contexts_for_the_target_and_one_for_drafts() -> None:
    sizes = profile_sizes([1, 2], 3, contexts=(20, 60), usual=40, prompts=[16, 8, 8])
    assert {size.context for size in sizes if size.kind == "verify"} == {20, 60}
    assert [(size.context, size.requests, size.tokens) for size in sizes if size.kind == "draft"] == [
        (40, 1, 1),
        (40, 2, 2),
    ]
    assert [size.tokens for size in sizes if size.kind == "prefill"] == [8, 16]
    assert len(set(sizes)) == len(sizes)


def test_compositions_have_the_sum_and_stay_in_the_block() -> None:
    random = np.random.default_rng(1)
    drawn = np.array([composition(4, 6, 3, random) for _ in range(400)])
    assert set(drawn.sum(axis=1)) == {6}
    assert (drawn.min(), drawn.max()) == (0, 3)
    # 6 of 12 places, 3 of them a request's: 1.5 on average, variance 3 x 1/4 x (12 - 3) / 11.
    assert drawn.mean(axis=0) == pytest.approx(1.5, abs=0.15)
    assert drawn.var() == pytest.approx(0.75 * 9 / 11, abs=0.08)


# -- passes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sort", ["markov", "mtp"])
def test_a_pass_holds_what_its_size_says(
    target: LlamaTarget, make_noisy: Any, sort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_noisy(sort, target=target, gamma=GAMMA, taps=(FINAL,) if sort == "mtp" else (1, FINAL))
    sizes = [Size("verify", 30, 3, 8), Size("draft", 20, 2, 2), Size("prefill", 0, 1, 9), Size("verify", 5, 1, 4)]
    bench = EngineBench(target, drafter, EngineOptions(1, 1, 1), sizes, PROMPTS)
    seen: list[tuple[list[tuple[int, int]], int, int]] = []
    packed, logits = LlamaTarget.packed, LlamaTarget.logits

    def spy(self: Any, tokens: Any, segments: Any, cache: Any, taps: Any = ()) -> Any:
        seen.append(([(s.start, s.length) for s in segments], len(tokens), len({s.row for s in segments})))
        return packed(self, tokens, segments, cache, taps)

    scored: list[int] = []
    monkeypatch.setattr(LlamaTarget, "packed", spy)
    monkeypatch.setattr(LlamaTarget, "logits", lambda self, h: scored.append(len(h)) or logits(self, h))
    random = np.random.default_rng(0)
    for _ in range(3):
        passes = [bench.time(size, random) for size in sizes]
        assert [one.size for one in passes] == sizes
        verify, draft, prefill, alone = seen[-4:]
        assert [start for start, _ in verify[0]] == [29] * 3
        assert verify[1:] == (8, 3)
        assert draft == ([(19, 1)] * 2, 2, 2)
        assert prefill == ([(0, 9)], 9, 1)
        assert alone == ([(4, 4)], 4, 1)
        assert scored[-4:] == [8, 2, 1, 4]
        assert all(min(one.ns) >= 0 for one in passes)
        assert all((pass_ms(one) > 0) for one in passes)
    assert len({tuple(length for _, length in found[0]) for found in seen if found[1] == 8}) > 1


def test_parts_of_a_pass_by_kind() -> None:
    parts = ns(draft=1_000_000, plan=2_000_000, verify=4_000_000, prefill=8_000_000, rest=16_000_000)
    assert pass_ms(Pass(Size("verify", 9, 1, 1), parts)) == 4.0
    assert pass_ms(Pass(Size("draft", 9, 1, 1), parts)) == 1.0
    assert pass_ms(Pass(Size("prefill", 0, 1, 5), parts)) == 12.0
    assert Pass(Size("draft", 9, 1, 1), parts).ms("plan", "rest") == 18.0


def test_a_clock_that_stands_still() -> None:
    real = iter([0, 10, 100, 130, 200, 205])
    clock = StoppableClock(lambda: next(real))
    assert (clock(), clock()) == (0, 10)
    with clock.stopped():  # from 100 to 130
        pass
    assert (clock(), clock()) == (170, 175)


def test_passes_become_samples_that_a_profile_takes() -> None:
    passes = [
        Pass(Size("prefill", 0, 1, 9), ns(verify=5_000_000, prefill=1_000_000)),
        Pass(Size("verify", 30, 2, 6), ns(verify=3_000_000)),
        Pass(Size("draft", 20, 2, 2), ns(draft=1_500_000)),
        Pass(Size("verify", 30, 1, 4), ns(verify=2_000_000)),
        Pass(Size("verify", 30, 2, 6), ns(verify=2_500_000)),
        Pass(Size("verify", 5, 2, 6), ns(verify=2_250_000)),
    ]
    samples = samples_of(passes)
    assert samples.kind.tolist() == ["verify"] * 4 + ["draft", "prefill"]
    assert samples.context_tokens.tolist() == [5, 30, 30, 30, 20, MISSING]
    assert samples.tokens.tolist() == [6, 4, 6, 6, 2, 9]
    assert samples.ms.tolist() == [2.25, 2.0, 3.0, 2.5, 1.5, 6.0]
    assert samples.repeat.tolist() == [0, 0, 0, 1, 0, 0]
    Profile("here", "cpu", 1, "m", "e", np.empty(0, int), 0, "s", "l", "measured", samples)


def test_benches_that_time_nothing_and_fills_that_do_not_fit_are_refused(target: LlamaTarget, make_noisy: Any) -> None:
    drafter = make_noisy("markov", target=target, gamma=GAMMA, taps=(1,))
    for sizes, prompts in (([], PROMPTS), ([Size("draft", 9, 1, 1)], [])):
        with pytest.raises(InputError, match="at least one each"):
            EngineBench(target, drafter, EngineOptions(1, 1, 1), sizes, prompts)
    bench = EngineBench(target, drafter, EngineOptions(1, 1, 1), [Size("draft", 9, 1, 1)], PROMPTS)
    with pytest.raises(InputError, match=r"'requests'.*got 2"):
        bench.engine.fill(PROMPTS, 9)
    with pytest.raises(InputError, match=r"'context'.*got 99"):
        bench.engine.fill(PROMPTS[:1], 99)
    with pytest.raises(InputError, match=r"'context'.*got 1"):
        bench.engine.fill(PROMPTS[:1], 1)


def test_timing_leaves_no_trace(target: LlamaTarget, make_noisy: Any) -> None:
    """The same pass again and again: rows are given back, texts start anew."""
    drafter = make_noisy("markov", target=target, gamma=GAMMA, taps=(1,))
    sizes = [Size("verify", 12, 4, 10), Size("prefill", 0, 1, 6)]
    bench = EngineBench(target, drafter, EngineOptions(1, 1, 1), sizes, PROMPTS)
    random = np.random.default_rng(0)
    for _ in range(5):
        for size in sizes:
            bench.time(size, random)
    bench.engine.clear()
    assert not bench.engine.busy
    assert torch.isfinite(bench.engine._rows.cache.k).all()
