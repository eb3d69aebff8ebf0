from __future__ import annotations

import itertools

import numpy as np
import pytest

from dsim.policy import make_view
from policies.oracle import Oracle


def view_of(accepted, verify_ms, gamma=2, **kwargs):
    requests = len(accepted)
    return make_view(np.full((requests, gamma), 0.5), verify_ms, accepted=accepted, **kwargs)


def test_first_step_takes_the_best_ratio():
    # Base 2 tokens; by drafts: 2/10, 3/11, 4/20, 5/21.
    oracle = Oracle()
    assert oracle.plan(view_of([1, 2], [0, 0, 10, 11, 20, 21, 99])).tolist() == [1, 0]
    assert (oracle.tokens, oracle.elapsed_ms) == (3, 11.0)


def test_later_steps_trade_tokens_against_time_at_the_going_rate():
    oracle = Oracle()
    oracle.tokens, oracle.elapsed_ms = 10, 100.0  # 0.1 token a ms
    # tokens - 0.1 ms: 2 - 1, 3 - 1.1, 4 - 2, 5 - 2.1 = 2.9: all three, though the ratio prefers one.
    assert oracle.plan(view_of([1, 2], [0, 0, 10, 11, 20, 21, 99])).tolist() == [1, 2]
    assert (oracle.tokens, oracle.elapsed_ms) == (15, 121.0)


def test_only_what_will_be_accepted_is_verified():
    assert Oracle().plan(view_of([0, 2, 1], np.full(10, 5.0))).tolist() == [0, 2, 1]


def test_fewest_drafts_where_values_are_equal():
    # At 0.5 token a ms a draft of 2 ms is worth exactly its time.
    oracle = Oracle()
    oracle.tokens, oracle.elapsed_ms = 1, 2.0
    assert oracle.plan(view_of([2], [0, 10, 12, 14])).tolist() == [0]


def test_drafts_go_round_the_requests():
    # Up to 8 tokens are free, more are not: five drafts for three requests.
    verify_ms = [0] + [10.0] * 8 + [1000.0] * 8
    view = view_of([3, 1, 3], verify_ms, gamma=4)
    assert Oracle().plan(view).tolist() == [2, 1, 2]
    assert Oracle().plan(view._replace(caps=np.array([1, 0, 4]))).tolist() == [1, 0, 3]


def test_it_sees_through_a_valley_of_the_price_curve():
    # A cliff at the second draft and a cheaper graph behind it.
    assert Oracle().plan(view_of([2, 2], [0, 0, 10, 10, 30, 30, 11])).tolist() == [2, 2]


def test_finished_prompts_count_and_so_does_the_whole_step():
    view = view_of([1], [0, 4, 5, 6])._replace(sampling=3, draft_ms=1.0, host_hidden_ms=5.5, host_exposed_ms=0.5)
    oracle = Oracle()
    oracle.plan(view)
    # 3 tokens in max(1 + 4, 5.5) + 0.5 or 4 in max(1 + 5, 5.5) + 0.5.
    assert (oracle.tokens, oracle.elapsed_ms) == (4, 6.5)


@pytest.mark.parametrize("seed", range(20))
def test_best_of_all_allocations_on_the_true_curve(seed):
    rng = np.random.default_rng(seed)
    gamma, requests = 3, 3
    verify_ms = rng.choice([1.0, 1.5, 2.0, 5.0], requests * (1 + gamma) + 1).cumsum()
    verify_ms[rng.integers(4, 13)] *= 0.5  # not monotone
    accepted, caps = rng.integers(0, gamma + 1, (2, requests))
    view = view_of(accepted.tolist(), verify_ms, gamma=gamma, caps=caps, draft_ms=0.5)
    oracle = Oracle()
    oracle.tokens, oracle.elapsed_ms = int(rng.integers(1, 50)), 20.0
    rate = oracle.tokens / oracle.elapsed_ms
    lengths = oracle.plan(view)

    def value(allocation):
        tokens = requests + sum(min(n, a) for n, a in zip(allocation, accepted, strict=True))
        return tokens - rate * (0.5 + verify_ms[requests + sum(allocation)])

    # Verifying a draft that will be rejected can pay where the curve falls; the oracle never does that.
    useful = max(
        value(allocation)
        for allocation in itertools.product(*(range(min(a, c) + 1) for a, c in zip(accepted, caps, strict=True)))
    )
    assert value(lengths.tolist()) == pytest.approx(useful, abs=1e-12)


def test_rate_settles_at_the_best_long_run_ratio():
    """Dinkelbach: the rate converges to the maximum of tokens / time over stationary choices."""
    verify_ms = 5 + 0.5 * np.arange(8 * 6 + 1)
    blocks = [np.full(8, 5), np.array([5, 0, 0, 0, 0, 0, 0, 0]), np.zeros(8, dtype=int)]
    oracle = Oracle()
    for step in range(600):
        oracle.plan(view_of(blocks[step % 3].tolist(), verify_ms, gamma=5))

    # All stationary rules "verify b_i useful drafts in a step of kind i".
    drafts = [range(41), range(6), range(1)]
    best = max(
        sum(8 + b for b in choice) / sum(verify_ms[8 + b] for b in choice) for choice in itertools.product(*drafts)
    )
    assert oracle.tokens / oracle.elapsed_ms == pytest.approx(best, rel=0.005)


def test_an_empty_step_changes_nothing():
    oracle = Oracle()
    view = make_view(np.ones((0, 2)), [0.0, 1.0], accepted=np.zeros(0, dtype=np.int64))
    assert oracle.plan(view).tolist() == []
    assert (oracle.tokens, oracle.elapsed_ms) == (0, 0.0)


def test_a_step_of_prefill_alone_takes_time():
    view = make_view(np.ones((0, 2)), [0, 1, 2, 3.0], prefill_tokens=3, accepted=np.zeros(0, dtype=np.int64))
    oracle = Oracle()
    oracle.plan(view._replace(sampling=1))
    assert (oracle.tokens, oracle.elapsed_ms) == (1, 3.0)


def test_it_says_what_it_needs():
    with pytest.raises(RuntimeError, match="accepted"):
        Oracle().plan(make_view([[0.5]], np.ones(3)))
