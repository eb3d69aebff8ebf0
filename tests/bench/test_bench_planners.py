"""What a plan() costs, against U: a stable argsort and a cumulative sum of R * gamma float32.

`make bench` prints the table; one group a batch size. A planner may cost 3 U at 256 requests.
"""

from __future__ import annotations

import timeit

import numpy as np
import pytest

from dsim.policy import load_policy, make_view

pytestmark = pytest.mark.bench

GAMMA = 5
REQUESTS = (1, 16, 64, 256)
SPECS = (
    "none",
    "fixed:k=5",
    "threshold:t=0.5",
    "threshold:t=0.5,on=survival",
    "dspark-alg1",
    "dspark",
    "tetris:capacity=768",
    "disco",
    "batch-table",
    "goodput:interval=1",
    "marginal",
    "vllm-ascend:interval=1",
    "vllm-adaptive",
    "vllm-verify-adaptive",
    "sglang",
    "sglang:table=additive,fill=true,min_predicted_gain=0.05",
    "trtllm",
    "trtllm:tiers=global,drain=0.5",
    "atom",
    "lab",
    "lab:price=step,lookup=linear",
    "oracle",
)


def view_of(requests, policy):
    rng = np.random.default_rng(requests)
    blocks = rng.uniform(0.3, 1.0, (3, requests, GAMMA)).astype(np.float32)
    verify_ms = 5 + 0.01 * np.arange(requests * (1 + GAMMA) + 1)
    view = make_view(blocks[0], verify_ms, history=tuple(blocks[1:]))
    if policy is not None and policy.traits.clairvoyant:
        view = view._replace(accepted=rng.integers(0, GAMMA + 1, requests))
    return view


def unit(survival):
    np.cumsum(survival[np.argsort(survival, kind="stable")])


@pytest.mark.parametrize("requests", REQUESTS)
def test_unit(benchmark, requests):
    benchmark.group = f"plan() at R = {requests:3d}, gamma = {GAMMA}"
    benchmark.name = f"U[{requests}]"
    benchmark(unit, view_of(requests, None).survival().ravel())


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("spec", SPECS)
def test_plan(benchmark, spec, requests):
    policy = load_policy(spec)
    benchmark.group = f"plan() at R = {requests:3d}, gamma = {GAMMA}"
    benchmark.name = f"{spec}[{requests}]"
    benchmark(policy.plan, view_of(requests, policy))


@pytest.mark.parametrize("spec", SPECS)
def test_three_units_at_256_requests(spec):
    policy = load_policy(spec)
    view = view_of(256, policy)
    survival = view.survival().ravel()

    def best(call):
        return min(timeit.repeat(call, number=200, repeat=15))

    assert best(lambda: policy.plan(view)) <= 3 * best(lambda: unit(survival))
