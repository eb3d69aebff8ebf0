"""Hand-computed: capacity from old confidences, ranking from the current ones."""

from __future__ import annotations

import numpy as np
import pytest

from dsim.errors import InputError
from dsim.policy import Traits, make_view
from policies.dspark import DSpark

# 10 ms with two requests and no draft, then 2 ms a draft.
LINEAR = [0, 0, 10, 12, 14, 16, 18]
GOOD = [[1.0, 1.0], [1.0, 1.0]]
BAD = [[0.0, 0.0], [0.0, 0.0]]


def plan(policy, now, *older, verify_ms=LINEAR, **kwargs):
    return policy.plan(make_view(now, verify_ms, history=older, **kwargs)).tolist()


def test_capacity_is_set_by_the_confidences_two_steps_old():
    now = [[0.75, 0.5], [0.5, 0.5]]
    # Certain drafts: 2/10 < 3/12 < 4/14 < 5/16 < 6/18, so K = 4, whatever the current block is worth.
    assert plan(DSpark(lag=2), now, BAD, GOOD) == [2, 2]
    # Hopeless ones: K = 0, however good the current block is.
    assert plan(DSpark(lag=2), GOOD, GOOD, BAD) == [0, 0]
    # Old survivals 0.75, 0.375 | 0.5, 0.25 give K = 2 (see test_dspark_alg1), to the best two of now.
    assert plan(DSpark(lag=2), [[0.1, 0.1], [0.9, 0.9]], BAD, now) == [0, 2]


def test_the_lag_picks_the_age():
    assert plan(DSpark(lag=1), GOOD, BAD, GOOD) == [0, 0]
    assert plan(DSpark(lag=1), GOOD, GOOD, BAD) == [2, 2]
    assert plan(DSpark(lag=0), [[0.75, 0.5], [0.5, 0.5]]) == [1, 1]


def test_a_new_request_counts_as_certain():
    # Request 0 is old and was hopeless; request 1 did not exist two steps ago (c = 1, as the engine fills in).
    # Old survivals 0, 0 | 1, 1: 2/10 < 3/12 < 4/14, so K = 2, spent by the current ranking.
    old = [[0.0, 0.0], [1.0, 1.0]]
    assert plan(DSpark(lag=2), [[0.9, 0.9], [0.3, 0.3]], BAD, old) == [2, 0]
    # Both new: make_view pads the history with ones, so everything is admitted.
    view = make_view([[0.2, 0.2], [0.1, 0.1]], LINEAR, depth=2)
    assert DSpark(lag=2).plan(view).tolist() == [2, 2]


def test_the_search_crosses_a_valley():
    # Theta: 1, 2/3, 3/2.5 = 1.2: the early stop of Algorithm 1 would stay at 0.
    assert plan(DSpark(lag=1), [[1.0, 1.0]], [[1.0, 1.0]], verify_ms=[0, 1, 3, 2.5]) == [2]


def test_smallest_capacity_where_maxima_are_equal():
    # Theta: 1/1, 2/2, 3/3.
    assert plan(DSpark(lag=1), [[1.0, 1.0]], [[1.0, 1.0]], verify_ms=[0, 1, 2, 3]) == [0]
    # Theta: 1/2, 2/2, 3/3.
    assert plan(DSpark(lag=1), [[1.0, 1.0]], [[1.0, 1.0]], verify_ms=[0, 2, 2, 3]) == [1]


def test_drafts_hopeless_two_steps_ago_are_no_capacity_even_where_they_would_be_cheaper():
    assert plan(DSpark(lag=1), [[1.0, 1.0]], [[0.5, 0.0]], verify_ms=[0, 4, 4, 1]) == [1]


def test_no_more_than_there_is_now():
    assert plan(DSpark(lag=2), [[0.5, 0.0], [0.0, 0.0]], GOOD, GOOD) == [1, 0]


def test_caps_bind_both_the_capacity_and_the_ranking():
    # One draft exists for request 0 and none for request 1: K <= 1.
    assert plan(DSpark(lag=1), GOOD, GOOD, caps=[1, 0]) == [1, 0]
    # What looked good a step ago is capped away: no capacity, though request 1 has room and good drafts.
    assert plan(DSpark(lag=1), GOOD, [[1.0, 1.0], [0.0, 0.0]], caps=[0, 2]) == [0, 0]
    # K = 2 comes from request 1 alone (request 0 is capped to 0), though request 0 ranks higher now.
    assert plan(DSpark(lag=1), [[0.9, 0.9], [0.5, 0.5]], GOOD, caps=[0, 2]) == [0, 2]


def test_prefill_chunks_count_in_the_step():
    verify_ms = [0, 1, 1, 1, 1, 9, 9, 9]
    assert plan(DSpark(lag=0), [[0.9, 0.9]], verify_ms=verify_ms) == [2]
    assert plan(DSpark(lag=0), [[0.9, 0.9]], verify_ms=verify_ms, prefill_tokens=3) == [0]


def test_traits_follow_the_lag():
    assert DSpark().traits == Traits(confidence_age=2)
    assert DSpark(lag=0).traits == Traits(confidence_age=0, lossless=False)


@pytest.mark.parametrize("lag", [-1, 1.0, True, "2", None])
def test_lag_that_is_no_count(lag):
    with pytest.raises(InputError, match=r"field 'lag'.*expected an integer >= 0"):
        DSpark(lag=lag)


def test_linear_prices_of_more_requests():
    # 64 requests, all survivals equal at their position: a draft pays if a / tau > slope / step, so one
    # position is admitted whole or (apart from the last crossing) not at all.
    confidence = np.tile(np.array([0.75, 0.5, 0.5], dtype=np.float32), (64, 1))
    verify_ms = 1 + 0.01 * np.arange(64 * 4 + 1)
    # Survivals 0.75, 0.375, 0.1875. Theta at 0, 64, 128, 192 drafts: 64/1.64 = 39.0, 112/2.28 = 49.1,
    # 136/2.92 = 46.6. Between them Theta is monotone, so K = 64.
    assert plan(DSpark(lag=1), confidence, confidence, verify_ms=verify_ms) == [1] * 64
