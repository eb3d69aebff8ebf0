"""Hand-computed: the best drafts under a capacity."""

from __future__ import annotations

import numpy as np
import pytest

from dsim.errors import InputError
from dsim.policy import Traits, load_policy, make_view
from policies.tetris import Tetris

# Survivals 0.75, 0.5625, 0.28125 | 0.5, 0.375, 0.09375.
NOW = [[0.75, 0.75, 0.5], [0.5, 0.75, 0.25]]


def plan(policy, now=NOW, **kwargs):
    return policy.plan(make_view(now, np.ones(64), **kwargs)).tolist()


def test_capacity_is_that_of_the_batch():
    assert [plan(Tetris(capacity=k)) for k in range(7)] == [[0, 0], [1, 0], [2, 0], [2, 1], [2, 2], [3, 2], [3, 3]]


def test_ranks_by_survival_and_not_by_confidence():
    # The third draft of the first request is surer (0.9) than any of the second, but its survival is 0.09.
    assert plan(Tetris(capacity=3), [[0.2, 0.5, 0.9], [0.5, 0.5, 0.5]]) == [1, 2]


def test_capacity_a_request_grows_with_the_batch():
    assert plan(Tetris(capacity=1, per_request=True)) == [2, 0]
    assert plan(Tetris(capacity=2, per_request=True)) == [2, 2]
    assert plan(Tetris(capacity=1, per_request=True), NOW[:1]) == [1]
    assert plan(Tetris(capacity=1), NOW[:1]) == plan(Tetris(capacity=1), NOW[:1] * 1) == [1]


def test_more_capacity_than_drafts_and_drafts_that_cannot_survive():
    assert plan(Tetris(capacity=100)) == [3, 3]
    assert plan(Tetris(capacity=100), [[0.5, 0.0, 0.9], [np.nan, 0.9, 0.9]]) == [1, 0]


def test_caps_leave_the_capacity_to_others():
    assert plan(Tetris(capacity=3), caps=[1, 3]) == [1, 2]
    assert plan(Tetris(capacity=3), caps=[0, 0]) == [0, 0]


def test_prices_and_prefill_chunks_do_not_matter():
    dear = make_view(NOW, np.arange(64.0) ** 4, prefill_tokens=20)
    assert Tetris(capacity=3).plan(dear).tolist() == [2, 1]


def test_spec_and_traits():
    assert load_policy("tetris:capacity=3,per_request=true") == Tetris(capacity=3, per_request=True)
    assert Tetris().traits == Traits(cost_driven=False)


@pytest.mark.parametrize("capacity", [-1, 1.0, True, "3", None])
def test_capacity_that_is_no_count(capacity):
    with pytest.raises(InputError, match=r"field 'capacity'.*expected an integer >= 0"):
        Tetris(capacity=capacity)


@pytest.mark.parametrize("per_request", [1, "yes", None])
def test_per_request_that_is_no_bool(per_request):
    with pytest.raises(InputError, match=r"field 'per_request'.*expected true or false"):
        Tetris(per_request=per_request)
