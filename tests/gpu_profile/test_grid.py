"""What is timed, in which order, and what fits."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dsim.errors import InputError
from dsim.gpu_profile.grid import (
    Case,
    Grid,
    Memory,
    captured_sizes,
    coarse_to_fine,
    draft_sizes,
    layer_cache_elements,
    lengths,
    plan_memory,
    schedule,
    scored_tokens,
    split,
    working_elements,
)
from dsim.gpu_profile.shapes import models
from dsim.profile import load_profile

GRID = Grid(
    contexts=(16, 32),
    capture_limit=16,
    eager=(24, 32),
    tokens_per_request=(4,),
    max_requests=4,
    draft_context=16,
    prefill=(8, 16, 24),
)
TARGET, DRAFTER = models("tiny")


def test_captured_sizes_are_those_of_the_profiled_vllm() -> None:
    measured = load_profile("b300x4-dsv4-flash-0731")
    assert captured_sizes(1024) == tuple(measured.captured_sizes.tolist())
    drafts = measured.samples.of("draft")
    assert draft_sizes(256) == tuple(sorted(set(drafts.requests.tolist())))


@pytest.mark.parametrize("limit", [0, 3, 12, 264, 1000, -8])
def test_only_sizes_of_the_list_can_be_the_limit(limit: int) -> None:
    with pytest.raises(InputError, match=f"field 'capture_limit': got {limit}"):
        captured_sizes(limit)


def test_a_step_is_split_evenly() -> None:
    assert [split(tokens, 4, 8) for tokens in (1, 4, 5, 32, 33, 100)] == [1, 1, 2, 8, 8, 8]
    for tokens, requests in ((1, 1), (10, 4), (33, 8), (100, 7)):
        each = lengths(tokens, requests)
        assert (each.sum(), each.max() - each.min() <= 1) == (tokens, True)
    assert scored_tokens(Case("verify", 10, 4, 16, False), gamma=1) == 8
    assert scored_tokens(Case("verify", 10, 4, 16, False), gamma=7) == 10
    assert scored_tokens(Case("prefill", 10, 1, 0, False), gamma=7) == 1


@pytest.mark.parametrize("count", range(1, 40))
def test_levels_visit_everything_once_and_halve_the_gaps(count: int) -> None:
    levels = coarse_to_fine(count)
    flat = [index for level in levels for index in level]
    assert sorted(flat) == list(range(count))
    assert levels[0] == [count - 1, 0][: min(count, 2)]
    gap = count - 1
    for end in range(2, len(levels) + 1):
        seen = sorted(index for level in levels[:end] for index in level)
        gap = -(-gap // 2)
        assert max(b - a for a, b in pairwise(seen)) == gap


def test_nothing_to_time_has_no_levels() -> None:
    assert coarse_to_fine(0) == []


def test_the_order_of_a_small_grid() -> None:
    cases = schedule(GRID, DRAFTER, graphs=True)
    first = [(case.kind[0], case.tokens, case.requests, case.context, case.graph) for case in cases[:14]]
    assert first == [
        ("v", 16, 4, 16, True),
        ("v", 16, 4, 32, True),
        ("v", 1, 1, 16, True),
        ("v", 1, 1, 32, True),
        ("d", 28, 4, 16, True),
        ("d", 7, 1, 16, True),
        ("p", 24, 1, 0, False),
        ("p", 8, 1, 0, True),
        ("v", 32, 4, 16, False),
        ("v", 32, 4, 32, False),
        ("v", 24, 4, 16, False),
        ("v", 24, 4, 32, False),
        # Next level: of 1, 2, 4, 8, 16 the middle one.
        ("v", 4, 1, 16, True),
        ("v", 4, 1, 32, True),
    ]
    assert len(cases) == len(set(cases)) == 2 * (5 + 2) + 3 + 3
    assert not any(case.graph for case in schedule(GRID, DRAFTER, graphs=False))


def test_several_splits_of_a_token_count_are_each_timed_once() -> None:
    grid = replace(GRID, contexts=(16,), tokens_per_request=(1, 4, 8))
    found = [(c.tokens, c.requests) for c in schedule(grid, DRAFTER, graphs=True) if c.kind == "verify"]
    assert [pair for pair in found if pair[0] == 8] == [(8, 4), (8, 2), (8, 1)]
    assert [pair for pair in found if pair[0] == 1] == [(1, 1)]
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contexts": ()}, "field 'contexts': got [], expected at least one"),
        ({"contexts": (32, 16)}, "field 'contexts': got [32, 16], expected integers >= 1, each above the one before"),
        ({"contexts": (0, 16)}, "field 'contexts': got [0, 16]"),
        ({"tokens_per_request": ()}, "field 'tokens_per_request': got [], expected at least one"),
        ({"eager": (16,)}, "field 'eager': got 16, expected sizes above the capture limit, 16"),
        ({"max_requests": 0}, "field 'max_requests': got 0"),
        ({"draft_context": 17}, "field 'draft_context': got 17, expected one of 16, 32"),
        ({"capture_limit": 17}, "field 'capture_limit': got 17"),
        ({"prefill": (8, 8)}, "field 'prefill': got [8, 8]"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        replace(GRID, **change)


def test_memory_by_hand() -> None:
    target, drafter = models("qwen3-8b")
    cases = [Case("verify", 1024, 256, 8192, True), Case("draft", 1792, 256, 2048, True)]
    # 256 requests of 8196 keys, 2 x 8 x 128 numbers each.
    assert layer_cache_elements(cases[0], target) == 256 * 8196 * 2048
    plan = plan_memory(target, drafter, cases, item_bytes=2, free_bytes=140 * 2**30)
    assert plan.held_layers == 36
    weights = target.elements() + drafter.elements(target)
    assert 10 * layer_cache_elements(cases[0], target) < plan.cache_elements
    used = 2 * (weights + plan.cache_elements + max(working_elements(case, target, drafter) for case in cases))
    assert used + 2**30 <= 0.92 * 140 * 2**30
    # With room for all, every layer has a cache of its own and no more is taken.
    plan = plan_memory(target, drafter, cases, item_bytes=2, free_bytes=10**12)
    assert plan == Memory(36, 36 * 256 * 8196 * 2048)


def test_a_small_device_holds_some_layers_and_a_smaller_one_none() -> None:
    target, drafter = models("qwen3-8b")
    cases = [Case("verify", 256, 64, 2048, True)]
    plan = plan_memory(target, drafter, cases, item_bytes=2, free_bytes=16 * 2**30)
    assert 2 < plan.held_layers < 36
    least = layer_cache_elements(cases[0], target)
    assert least <= plan.cache_elements < least + target.layer_elements()
    with pytest.raises(InputError, match=r"Qwen3-8B does not fit: \d+\.\d GiB are needed at least.*--max-requests"):
        plan_memory(target, drafter, cases, item_bytes=2, free_bytes=4 * 2**30)
