"""Hand-computed: one feature of the engine a test."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dsim import check_policy
from dsim.errors import InputError
from dsim.policy import Traits, load_policy, make_view
from policies.vllm_adaptive import VllmAdaptive, captured_prices

GOOD = [[1.0, 1.0], [1.0, 1.0]]
BAD = [[0.0, 0.0], [0.0, 0.0]]
# Two requests whose drafts are worth 0.6 and 0.3.
OLD = [[0.6, 0.0], [0.3, 0.0]]


def plan(now, old, verify_ms, policy=None, **kwargs):
    view = make_view(now, verify_ms, history=(old,), **kwargs)
    return (policy or VllmAdaptive()).plan(view).tolist()


def test_the_draft_pass_is_in_the_price():
    one, prices = [[0.5, 0.5]], [0, 10, 16, 19]
    # 1/10, 1.5/16, 1.75/19: no draft pays. With 10 ms of drafting: 1/20, 1.5/26, 1.75/29, so both do.
    assert plan(one, one, prices) == [0]
    assert plan(one, one, prices, draft_ms=10.0) == [2]


def test_a_size_costs_what_the_next_captured_one_does():
    # Captured are 2 and 4. The third token is priced as the fourth: 2/10, 2.6/14, 2.9/14, so two drafts. At its real
    # 11 ms, or at 12 ms on a straight line, one would be best (2.6/11, 2.6/12 > 2.9/14).
    prices = [0, 10, 10, 11, 14, 20, 20]
    assert plan(GOOD, OLD, prices, captured_sizes=[2, 4, 6]) == [2, 0]


def test_prices_never_fall():
    # Four tokens are measured at 12 ms, below the 14 ms of three: 2.6/12 would pay, 2.6/14 does not (2/10).
    old = [[0.3, 0.0], [0.3, 0.0]]
    assert plan(GOOD, old, [0, 10, 10, 14, 12, 30, 30], captured_sizes=[2, 3, 4, 6]) == [0, 0]
    assert plan(GOOD, old, [0, 10, 10, 14, 12, 30, 30]) == [0, 0]


def test_the_budget_is_one_step_old():
    prices = [0, 10, 10, 12, 14, 16, 18]
    assert plan(BAD, GOOD, prices) == [0, 0]  # four granted, none left worth it
    assert plan(GOOD, BAD, prices) == [0, 0]
    # Not the confidences of two steps ago.
    view = make_view(GOOD, prices, history=(GOOD, BAD))
    assert VllmAdaptive().plan(view).tolist() == [2, 2]
    assert VllmAdaptive(lag=2).plan(view).tolist() == [0, 0]


def test_the_allocation_is_current():
    # Old: both drafts of the first request; 2/10, 3/12, 4/14. Now the second one's are better.
    assert plan([[0.1, 0.1], [0.9, 0.9]], [[1.0, 1.0], [0.0, 0.0]], [0, 10, 10, 12, 14, 16, 18]) == [0, 2]


def test_a_new_request_counts_as_certain():
    view = make_view([[0.5, 0.5], [0.4, 0.4]], [0, 10, 10, 12, 14, 16, 18], depth=1)
    assert VllmAdaptive().plan(view).tolist() == [2, 2]


def test_prompt_chunks_are_in_the_step_but_not_in_the_tokens_expected():
    one, prices = [[0.5]], [0, 10, 11, 11, 10, 13]
    # 1/10 < 1.5/11 alone; behind a chunk of three tokens the draft is the fifth token: 1/11 < 1.5/13, under the
    # running maximum.
    assert plan(one, one, prices) == [1]
    assert plan(one, one, prices, prefill_tokens=3) == [1]
    # A chunk that makes the draft dear: the step is priced with it.
    assert plan(one, one, [0, 10, 11, 11, 11, 20], prefill_tokens=3) == [0]
    # A prompt that ends in the step samples a token: 2/11 > 2.5/14 where 1/11 < 1.5/14.
    view = make_view(one, [0, 11, 11, 11, 11, 14], history=(one,), prefill_tokens=3)
    assert VllmAdaptive().plan(view).tolist() == [1]
    assert VllmAdaptive().plan(view._replace(sampling=2)).tolist() == [0]


def test_the_fewest_drafts_where_values_are_equal():
    # 2/10 = 3/15, and less beyond.
    assert plan(GOOD, GOOD, [0, 10, 10, 15, 21, 27, 33]) == [0, 0]


def test_above_the_capture_limit_prices_are_linear_and_the_cliff_is_not_blended():
    # Captured: 2 and 4. Timed above: 6, 8, 16 (1.5, 2 and 4 times the limit). 5 costs what 6 does; 7 is halfway.
    curve = np.array([0, 9, 10, 11, 12, 50, 16, 99, 20, 99, 99, 99, 99, 99, 99, 99, 36.0])
    expected = [10, 10, 10, 12, 12, 16, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36]
    assert captured_prices(curve, np.array([2, 4])).tolist() == expected
    # Four requests at the limit, one good draft: 4/12 > 4.9/16. Blended (14 ms) it would be taken.
    prices = [0, 10, 10, 12, 12, 14, 16, 18, 20]
    now = [[0.9], [0.0], [0.0], [0.0]]
    assert plan(now, now, prices, captured_sizes=[2, 4]) == [0, 0, 0, 0]
    # Three good drafts: 4/12, 4.9/16, 5.8/16, 6.7/18. At the next size's 20 ms the third would not pay.
    now = [[0.9], [0.9], [0.9], [0.0]]
    assert plan(now, now, prices, captured_sizes=[2, 4]) == [1, 1, 1, 0]


def test_captured_sizes_beyond_the_prices_count_as_the_last_one():
    assert captured_prices(np.array([0.0, 5, 6, 7, 9]), np.array([2, 16])).tolist() == [6, 6, 6, 9, 9]
    assert captured_prices(np.array([0.0, 5, 6, 4]), np.zeros(0, dtype=np.int64)).tolist() == [0, 5, 6, 6]
    # One size above the limit only.
    assert captured_prices(np.array([0.0, 5, 6, 7, 8, 9]), np.array([4])).tolist() == [8, 8, 8, 8, 8, 9]


def test_caps_bind_budget_and_allocation():
    prices = [0, 10, 10, 12, 14, 16, 18]
    assert plan(GOOD, GOOD, prices, caps=[1, 0]) == [1, 0]
    assert plan(GOOD, [[1.0, 1.0], [0.0, 0.0]], prices, caps=[0, 2]) == [0, 0]
    assert plan(GOOD, GOOD, prices, caps=[0, 0]) == [0, 0]


def test_nan_counts_as_nothing():
    nan = [[1.0, float("nan")], [float("nan"), 1.0]]
    prices = [0, 10, 10, 12, 14, 16, 18]
    # Old: one draft of value 1 is left, 2/10 < 3/12.
    assert plan(GOOD, nan, prices) == [1, 0]
    assert plan(nan, GOOD, prices) == [1, 0]


def test_the_belief_is_made_once_a_curve():
    policy = VllmAdaptive()
    prices = np.array([0.0, 10, 10, 12, 14, 16, 18])
    view = make_view(GOOD, prices, history=(GOOD,))
    assert policy.plan(view).tolist() == [2, 2]
    first = policy._memo.get(view.verify_ms, 2, lambda *_: pytest.fail("made twice"))
    assert first.tolist() == prices.tolist()
    # Another array is another curve.
    assert policy.plan(make_view(GOOD, [0, 10, 10, 90, 90, 90, 90], history=(GOOD,))).tolist() == [0, 0]


def test_pinned_to_a_profile(tmp_path):
    path = tmp_path / "cache.json"
    curves = {"draft_curve": [[1, 1.0], [4, 2.0]], "verify_curve": [[2, 8.0], [4, 10.0], [6, 30.0]]}
    path.write_text(json.dumps(curves))
    policy = VllmAdaptive(table=str(path))
    assert load_policy(f"vllm-adaptive:table={path}") == policy
    # Draft 2 ms, target 8, 10, 10, 30, 30: 2/10, 2.6/12, 2.9/12, so two drafts; what the step costs is not looked at.
    for prices in (np.ones(7), 10.0 ** np.arange(7)):
        assert plan(GOOD, OLD, prices, policy=policy, draft_ms=500.0) == [2, 0]
    assert policy.traits == Traits(confidence_age=1, cost_driven=False)
    # A batch that the profile does not reach: the line through the last two sizes goes on, as in the engine.
    many = [[1.0]] * 8
    assert plan(many, many, np.ones(17), policy=policy) == [0] * 8


def test_a_pinned_policy_conforms(tmp_path):
    path = tmp_path / "cache.json"
    verify = [[tokens, 1 + 0.03 * tokens] for tokens in range(8, 257, 8)]
    path.write_text(json.dumps({"draft_curve": [[1, 0.1], [16, 0.2]], "verify_curve": verify}))
    assert {"prices unread", "lossless"} <= set(check_policy(f"vllm-adaptive:table={path}"))


@pytest.mark.parametrize("table", ["profile", "no/such/file.json", 3, None, True])
def test_table_that_is_none(table):
    with pytest.raises(InputError, match=r"field 'table'.*expected profiled or the path of an engine file"):
        VllmAdaptive(table=table)


def test_a_file_that_is_no_table_is_named(tmp_path):
    path = tmp_path / "sts.json"
    path.write_text('{"temperatures": [1.0, 1.0]}')
    with pytest.raises(InputError, match=r"sts\.json"):
        VllmAdaptive(table=str(path))


@pytest.mark.parametrize("lag", [-1, 1.0, True, None])
def test_lag_that_is_no_count(lag):
    with pytest.raises(InputError, match=r"field 'lag'.*expected an integer >= 0"):
        VllmAdaptive(lag=lag)


def test_traits_follow_the_lag():
    assert VllmAdaptive().traits == Traits(confidence_age=1)
    assert VllmAdaptive(lag=0).traits == Traits(lossless=False)
