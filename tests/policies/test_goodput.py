"""Hand-computed: the estimator of acceptance, and the uniform length that it makes best."""

from __future__ import annotations

import numpy as np
import pytest
from both_forms import planned

from dsim.errors import InputError
from dsim.kernel.cache import kernel_observe, kernel_of, kernel_plan
from dsim.policy import Traits, load_policy, make_view
from policies.goodput import Goodput

# One request, three drafts: 10 ms and 2 ms a draft.
LINEAR = [0, 10, 12, 14, 16]


def view(verify_ms=LINEAR, requests=1, gamma=3, **kwargs):
    return make_view(np.full((requests, gamma), 0.5), verify_ms, **kwargs)


def plan(policy, *args, **kwargs):
    return planned(policy, view(*args, **kwargs))


def policy_of(alpha, **params):
    return Goodput(prior=alpha, **({"interval": 1, "margin": 0.0} | params))


def told(policy, *outcomes):
    for verified, accepted in outcomes:
        policy.observe(np.array(verified), np.array(accepted))
    return policy.alpha


# -- the estimator -----------------------------------------------------------------------------------------


def test_alpha_moves_towards_the_accepted_share_of_the_drafts_that_were_tried():
    # Request 0: 2 of 5 accepted, so 3 tried; request 1: all 2; request 2: none of 4, 1 tried. 4 of 6.
    assert told(Goodput(prior=0.0, weight=1.0), ([5, 2, 4], [2, 2, 0])) == pytest.approx(4 / 6)
    assert told(Goodput(prior=0.9, weight=0.5), ([5, 2, 4], [2, 2, 0])) == pytest.approx((0.9 + 4 / 6) / 2)


def test_later_outcomes_fade_earlier_ones():
    assert told(Goodput(prior=0.0, weight=0.25), ([1], [1]), ([1], [1])) == pytest.approx(1 - 0.75**2)


def test_a_step_without_verified_drafts_says_nothing():
    assert told(Goodput(prior=0.5), ([0, 0], [0, 0]), ([], [])) == 0.5
    # A request that had none is no evidence either.
    assert told(Goodput(prior=0.0, weight=1.0), ([0, 2], [0, 2])) == 1.0


def test_confidences_are_not_read():
    for confidence in (0.0, 1.0, np.nan):
        found = planned(policy_of(0.75), make_view(np.full((1, 3), confidence), LINEAR))
        assert found == [3]


# -- the choice --------------------------------------------------------------------------------------------


def test_the_best_k_by_hand():
    # Tokens 1, 1.5, 1.75, 1.875: per ms 0.1, 0.125, 0.125, 0.1172: the smallest of the equal ones.
    assert plan(policy_of(0.5)) == [1]
    # 1, 1.75, 2.3125, 2.734: 0.1, 0.146, 0.165, 0.171.
    assert plan(policy_of(0.75)) == [3]
    # 1, 1.125, 1.14: 0.1, 0.094.
    assert plan(policy_of(0.125)) == [0]


def test_the_length_is_that_of_all_and_their_drafts_are_priced():
    # Two requests, so a k is two drafts and brings 1 or 1.5 tokens: 2, 3, 3.5 in 10, 13, 30 ms, per ms 0.2, 0.231.
    assert plan(policy_of(0.5), [0, 0, 10, 10.5, 13, 20, 30], requests=2, gamma=2) == [1, 1]
    # At 16 ms 0.1875.
    assert plan(policy_of(0.5), [0, 0, 10, 10.5, 16, 20, 30], requests=2, gamma=2) == [0, 0]


def test_certain_and_hopeless_drafts():
    # Tokens 1, 2, 3, 4 in 10, 12, 14, 16 ms.
    assert plan(policy_of(1.0)) == [3]
    assert plan(policy_of(0.0)) == [0]
    assert plan(policy_of(0.0), [0, 10, 10, 10, 10]) == [0]


def test_speculation_must_beat_none_by_the_margin():
    # 0.1 against 0.125: up to a quarter more.
    assert plan(policy_of(0.5, margin=0.24)) == [1]
    assert plan(policy_of(0.5, margin=0.26)) == [0]


def test_the_search_crosses_a_stair_unless_it_stops_early():
    # Tokens 1, 1.75, 2.3125, 2.734 in 10, 20, 20, 20 ms: 0.1, 0.0875, 0.116, 0.137.
    stair = [0, 10, 20, 20, 20]
    assert plan(policy_of(0.75), stair) == [3]
    assert plan(policy_of(0.75, search="early-stop"), stair) == [0]
    assert plan(policy_of(0.75, search="early-stop")) == [3]
    # A tie is no rise: 0.1, 0.125, 0.125, and 1.875 tokens in 14.5 ms are 0.129.
    assert plan(policy_of(0.5), [0, 10, 12, 14, 14.5]) == [3]
    assert plan(policy_of(0.5, search="early-stop"), [0, 10, 12, 14, 14.5]) == [1]


def test_the_price_is_the_whole_steps():
    # 0.1, 0.125 with the target's pass alone; with 20 ms of drafting 1/30, 1.5/32, 1.75/34, 1.875/36: all worth it.
    assert plan(policy_of(0.5), draft_ms=20.0) == [3]
    # Where the host needs 20 ms anyway, drafts are free up to there.
    hidden = view()._replace(host_hidden_ms=16.0)
    assert planned(policy_of(0.5), hidden) == [3]


def test_prefill_chunks_move_along_the_prices():
    # Without prompts steps of 1 to 4 tokens take 10 ms. 5 prompt tokens: 6 take 10 ms, 7 and more 100 ms.
    prices = [10] * 7 + [100] * 3
    assert plan(policy_of(0.5), prices) == [3]
    assert plan(policy_of(0.5), prices, prefill_tokens=5) == [0]


def test_caps_cut_what_a_length_costs_and_brings():
    # Caps 1 and 3, alpha 1: tokens 2, 4, 5, 6 with 0, 2, 3, 4 drafts, in 10, 11, 12, 30 ms: best 5 / 12.
    prices = [0, 0, 10, 10.5, 11, 12, 30, 30, 30]
    assert plan(policy_of(1.0), prices, requests=2, caps=[1, 3]) == [1, 2]
    # Without caps: 2, 4, 6, 8 with 0, 2, 4, 6 drafts: 4 / 11.
    assert plan(policy_of(1.0), prices, requests=2) == [1, 1]
    assert plan(policy_of(1.0), requests=1, caps=[0]) == [0]


# -- when --------------------------------------------------------------------------------------------------


def test_it_decides_in_the_first_step_and_then_every_interval():
    policy = Goodput(prior=1.0, weight=1.0, interval=3, margin=0.0)
    lengths = [plan(policy)[0]]
    policy.observe(np.array([3]), np.array([0]))
    lengths += [plan(policy)[0] for _ in range(4)]
    assert lengths == [3, 3, 3, 0, 0]


def test_the_length_is_kept_for_other_batches_and_cut_by_their_caps():
    policy = Goodput(prior=1.0, interval=9, margin=0.0)
    assert plan(policy) == [3]
    assert plan(policy, np.arange(20.0) ** 3, requests=3, caps=[0, 2, 3]) == [0, 2, 3]


def test_at_zero_it_learns_nothing_and_cheaper_prices_bring_it_back():
    policy = policy_of(0.125)
    assert plan(policy) == [0]
    told(policy, ([0], [0]))
    assert plan(policy) == [0]
    assert plan(policy, [0, 10, 10, 10, 10]) == [3]


def test_empty_batches_are_not_a_step():
    policy = Goodput(prior=1.0, interval=2, margin=0.0)
    assert plan(policy, [1.0], requests=0) == []
    assert plan(policy) == [3]


def test_blocks_of_one_and_none():
    assert plan(policy_of(0.5), [0, 10, 11], gamma=1) == [1]
    assert plan(policy_of(0.5), [0, 10], gamma=0) == [0]


def test_spec_and_traits():
    assert load_policy("goodput") == Goodput(prior=0.9, weight=0.15, interval=20, margin=0.1, search="global")
    assert Goodput().traits == Traits()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"prior": -0.1}, r"'prior'.*\[0, 1\]"),
        ({"prior": True}, "'prior'"),
        ({"prior": "0.5"}, "'prior'"),
        ({"prior": float("nan")}, "'prior'"),
        ({"weight": 0}, r"'weight'.*\(0, 1\]"),
        ({"weight": 1.5}, "'weight'"),
        ({"interval": 0}, "'interval'.*integer >= 1"),
        ({"interval": 2.0}, "'interval'"),
        ({"margin": -1}, r"'margin'.*\[0, 1e\+12\]"),
        ({"margin": float("inf")}, r"'margin'.*\[0, 1e\+12\]"),
        ({"search": "greedy"}, "'search'.*global, early-stop"),
    ],
)
def test_parameters_outside_their_range(params, expected):
    with pytest.raises(InputError, match=expected):
        Goodput(**params)


@pytest.mark.parametrize(
    "spec",
    ["goodput:interval=1,margin=0", "goodput:interval=3,prior=1", "goodput:interval=1,search=early-stop,weight=1"],
)
def test_the_compiled_form_answers_as_plan_does_and_learns_the_same(spec):
    pytest.importorskip("numba")
    policy = load_policy(spec)
    kernel, rng = kernel_of(policy), np.random.default_rng(5)
    state, seen = kernel.memory(30), set()
    for trial in range(400):
        requests, gamma = int(rng.choice((1, 3, 30))), int(rng.choice((1, 5)))
        verify_ms = 8.0 + np.append(0.0, np.cumsum(rng.choice((0.0, 0.1, 1.0), requests * (1 + gamma) + 2)))
        caps = rng.integers(0, gamma + 1, requests) if trial % 3 == 0 else None
        drawn = view(verify_ms, requests, gamma, caps=caps, prefill_tokens=int(rng.choice((0, 2))), draft_ms=0.5)
        drawn = drawn._replace(host_hidden_ms=float(rng.choice((0.0, 9.0))), host_exposed_ms=0.25)
        verified = policy.plan(drawn)
        assert kernel_plan(kernel, drawn, state).tolist() == verified.tolist()
        accepted = rng.binomial(verified, rng.choice((0.2, 0.9)))
        policy.observe(verified, accepted)
        kernel_observe(kernel, verified, accepted, state)
        assert state.tolist() == [policy.alpha, policy.length, policy.steps]
        seen.add(policy.length)
    assert len(seen) >= 3
