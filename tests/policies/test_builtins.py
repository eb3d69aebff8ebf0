"""What all built-in policies have in common."""

from __future__ import annotations

import doctest
import importlib
import re

import numpy as np
import pytest
from engine_files import FILES, write

from dsim.kernel.cache import kernel_of
from dsim.policy import BUILTIN_POLICIES, load_policy, make_view

SPECS = [
    "none",
    "fixed:k=3",
    "threshold:t=0.6",
    "threshold:t=0.3,on=survival",
    "dspark-alg1",
    "dspark:lag=0",
    "dspark:lag=2",
    "tetris:capacity=3",
    "tetris:capacity=2,per_request=true",
    "disco:t=0.5",
    "batch-table:table=1-4=3/5-=1",
    "goodput",
    "goodput:search=early-stop,interval=1",
    "marginal",
    "marginal:rate=0.5,lag=0",
    "vllm-ascend",
    "vllm-ascend:interval=1,floor=2",
    "vllm-adaptive",
    "vllm-verify-adaptive",
    "sglang",
    "sglang:table=none",
    "sglang:table=additive,fill=true,lag=1,min_predicted_gain=0.05",
    "trtllm",
    "trtllm:tiers=global,floor=0,min_predicted_gain=0,drain=0.5",
    "atom",
    "atom:ragged=false,buckets=1/3,floor=1",
    "lab",
    "lab:search=early-stop,capacity_lag=0,price=step",
    "lab:allocation_lag=4,lookup=linear",
    "oracle",
]
COST_DRIVEN = [spec for spec in SPECS if load_policy(spec).traits.cost_driven]
# Drafts that cannot survive are among those they verify: `goodput` gives every request the same length, `trtllm`
# refuses to trim where the price is flat.
UNIFORM = ("goodput", "trtllm")
# As long as the longest request's, and rounded up.
LONGEST = "atom:ragged=false"


def view_for(policy, confidence, verify_ms, **kwargs):
    """A view with a history as deep as the policy reads, all of it equal to `confidence`."""
    confidence = np.asarray(confidence)
    return make_view(
        confidence,
        verify_ms,
        history=(confidence,) * policy.traits.confidence_age,
        accepted=np.full(confidence.shape[0], confidence.shape[1]) if policy.traits.clairvoyant else None,
        **kwargs,
    )


def test_every_built_in_is_covered():
    assert {spec.split(":")[0] for spec in SPECS} == set(BUILTIN_POLICIES)


@pytest.mark.parametrize("spec", SPECS)
def test_no_drafts_and_no_requests(spec):
    policy = load_policy(spec)
    for requests, gamma in ((3, 0), (0, 5), (0, 0)):
        view = view_for(policy, np.ones((requests, gamma)), np.arange(requests * (1 + gamma) + 1.0))
        lengths = policy.plan(view)
        assert lengths.tolist() == [0] * requests
        assert lengths.dtype == np.int64


@pytest.mark.parametrize("requests", [1, 16, 256])
@pytest.mark.parametrize("spec", COST_DRIVEN)
def test_constant_cost_verifies_everything_that_can_survive(spec, requests):
    rng = np.random.default_rng(7)
    confidence = rng.uniform(0.05, 1.0, (requests, 5)).astype(np.float32)
    confidence[rng.random((requests, 5)) < 0.2] = 0.0
    policy = load_policy(spec)
    view = view_for(policy, confidence, np.full(requests * 6 + 1, 8.0))
    alive = np.count_nonzero(np.multiply.accumulate(confidence, axis=1) > 0, axis=1)
    if policy.traits.clairvoyant:
        view = view._replace(accepted=alive)
    expected = [5] * requests if spec.startswith(UNIFORM) else alive.tolist()
    policy.plan(view)  # `atom` trims nothing in a batch's first step
    answer = policy.plan(view)
    if spec.startswith(LONGEST):
        assert len(set(answer.tolist())) == 1
        assert alive.max() <= answer.min()
        return
    assert answer.tolist() == expected


@pytest.fixture
def short(tmp_path):
    """Paths of engine tables that end long before the batch does."""
    found = {}
    for name in ("sglang-diagonal", "sglang-additive", "trtllm-v1", "vllm"):
        found[name] = write(tmp_path, FILES[name](), f"{name}.json")
    return found


PINNED = [
    *(f"{policy}:table={{{name}}}" for policy in ("sglang", "atom") for name in ("sglang-diagonal", "sglang-additive")),
    *("trtllm:table={trtllm-v1}", "trtllm:table={trtllm-v1},tiers=global,drain=1", "vllm-adaptive:table={vllm}"),
]


@pytest.mark.parametrize("spec", [*SPECS, *PINNED])
def test_no_length_is_negative_or_beyond_its_cap(spec, short):
    """Whatever comes: no room, no hope, NaN, captured sizes below the batch, a pinned table that ends before it."""
    policy = load_policy(re.sub(r"\{([\w-]+)\}", lambda found: str(short[found[1]]), spec))
    rng = np.random.default_rng(11)
    for trial in range(60):
        requests, gamma = int(rng.choice((1, 2, 7, 40))), int(rng.integers(max(1, policy.traits.needs_gamma), 8))
        blocks = rng.choice((0.0, 0.3, 0.999, 1.0, np.nan), (1 + policy.traits.confidence_age, requests, gamma))
        prices = np.cumsum(rng.choice((1e-6, 0.1, 50.0), requests * (1 + gamma) + 1 + 9))
        view = make_view(
            blocks[0],
            prices,
            history=tuple(blocks[1:]),
            caps=rng.integers(0, gamma + 1, requests) * (trial % 5 > 0),
            captured_sizes=np.unique(rng.integers(1, 2 * requests + 2, 3)) if trial % 2 else (),
            prefill_tokens=int(rng.choice((0, 9))),
            step=int(rng.integers(0, 9)),
        )
        if policy.traits.clairvoyant:
            view = view._replace(accepted=rng.integers(0, gamma + 1, requests))
        lengths = policy.plan(view)
        assert ((lengths >= 0) & (lengths <= view.caps)).all()
        if hasattr(policy, "observe"):
            policy.observe(lengths, rng.integers(0, lengths + 1))


@pytest.mark.parametrize("spec", SPECS)
def test_every_built_in_has_a_compiled_form(spec):
    pytest.importorskip("numba")
    policy = load_policy(spec)
    assert (kernel_of(policy).observe is not None) == hasattr(policy, "observe")


@pytest.mark.parametrize("spec", SPECS)
def test_reference_and_equation_are_named(spec):
    text = type(load_policy(spec)).__doc__
    for part in ("Examples\n", "References\n", "2607.05147", "Differences from the paper"):
        assert part in text


@pytest.mark.parametrize("target", sorted(BUILTIN_POLICIES.values()))
def test_examples_in_the_docstrings(target):
    result = doctest.testmod(importlib.import_module(target.split(":")[0]))
    assert result.attempted >= 2
    assert result.failed == 0
