"""Hand-computed: one feature of the engine a test."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dsim import check_policy
from dsim.errors import InputError
from dsim.policy import Traits, make_view
from policies.atom import Atom, _linear

GOOD = [[1.0, 1.0], [1.0, 1.0]]
BAD = [[0.0, 0.0], [0.0, 0.0]]
# Two requests: 10 ms without drafts, 2 ms a draft.
LINEAR = [0, 9, 10, 12, 14, 16, 18]


def plan(policy, now, old, verify_ms=LINEAR, **kwargs):
    """The answer with `old` two steps old, and the opposite of use one step old."""
    between = np.where(np.asarray(old) > 0.5, 0.0, 1.0)
    return policy.plan(make_view(now, verify_ms, history=(between, old), **kwargs)).tolist()


def test_the_search_stops_at_the_first_draft_that_does_not_pay():
    # 2/10, 3/16, 4/16.5: the global maximum is behind a draft that does not pay. Then 3/14: it pays.
    assert plan(Atom(), GOOD, [[1.0, 1.0], [0.0, 0.0]], [0, 9, 10, 16, 16.5, 17, 18]) == [0, 0]
    assert plan(Atom(), GOOD, [[1.0, 1.0], [0.0, 0.0]], [0, 9, 10, 14, 14.5, 17, 18]) == [2, 0]
    # A draft that leaves the rate as it is does not raise it: 2/10 = 3/15.
    assert plan(Atom(), GOOD, GOOD, [0, 9, 10, 15, 15, 15, 15]) == [0, 0]


def test_the_table_is_linear_in_steps_a_second_between_captured_sizes():
    # Captured are 2 and 4: 100 and 50 steps a second, so three tokens make 75 of them (13.3 ms; 15 ms on a straight
    # line in milliseconds, 20 ms in the graph of four). 2 * 100 < 2.7 * 75: the draft is taken.
    old = [[0.7, 0.0], [0.0, 0.0]]
    prices = [0, 10, 10, 20, 20, 50, 50]
    assert plan(Atom(), GOOD, old, prices, captured_sizes=[2, 4, 6]) == [1, 0]
    assert plan(Atom(), GOOD, old, prices) == [0, 0]
    # 2.6 * 75 does not pay.
    assert plan(Atom(), GOOD, [[0.6, 0.0], [0.0, 0.0]], prices, captured_sizes=[2, 4, 6]) == [0, 0]


def test_the_table_is_level_outside_the_captured_sizes():
    curve = np.array([0, 5, 10, 15, 20, 100, 200.0])
    assert _linear(curve, np.array([2, 4])).tolist() == [100, 100, 100, 75, 50, 50, 50]
    assert _linear(curve, np.array([2, 16])).tolist() == [100, 100, 100, 76.25, 52.5, 28.75, 5]
    assert _linear(curve[:3], np.zeros(0, dtype=np.int64)).tolist() == [200, 200, 100]
    # What lies beyond looks free.
    assert plan(Atom(), GOOD, GOOD, curve * 0.1 + 10, captured_sizes=[2, 4]) == [2, 2]


def test_the_lengths_are_two_steps_old():
    old = [[1.0, 1.0], [0.0, 0.0]]
    # 2/10, 3/12, 4/14: both drafts of the first request, though today's are of no use.
    assert plan(Atom(), [[0.0, 0.0], [0.9, 0.9]], old) == [2, 0]
    assert plan(Atom(lag=1), [[0.0, 0.0], [0.9, 0.9]], old) == [0, 2]
    assert plan(Atom(lag=0), [[0.0, 0.0], [0.9, 0.9]], old) == [0, 2]


def test_a_request_without_such_lengths_is_verified_in_full():
    prices = [0, 9, 10, 15, 21, 28, 36, 45, 55, 66]
    old = [[0.0, 0.0], [0.9, 0.0], [1.0, 1.0]]
    view = make_view(np.zeros((3, 2)), prices, history=(old, old))
    # The third joined a step ago. The others are a batch of two of then: 2/10 > 2.9/15.
    young = view._replace(born=np.array([0, 0, 1]))
    assert Atom().plan(young).tolist() == [0, 0, 2]
    assert Atom(lag=1).plan(young).tolist() == [0, 0, 0]
    assert Atom().plan(young._replace(caps=np.array([2, 2, 1]), caps_bind=True)).tolist() == [0, 0, 1]
    # Nobody has any: the first two steps.
    assert Atom().plan(view._replace(step=1)).tolist() == [2, 2, 2]
    assert Atom().plan(view).tolist() == [0, 0, 0]


def test_a_step_with_a_prompt_in_it_verifies_whole_blocks():
    prices = 10.0 ** np.arange(12)
    assert plan(Atom(), BAD, BAD, prices) == [0, 0]
    assert plan(Atom(), BAD, BAD, prices, prefill_tokens=3) == [2, 2]
    assert plan(Atom(), BAD, BAD, prices, prefill_tokens=3, caps=[2, 1]) == [2, 1]


def test_no_draft_pass_in_the_price():
    # 2/10 > 2.5/13, but 2/110 < 2.5/113.
    assert plan(Atom(), GOOD, [[0.5, 0.0], [0.0, 0.0]], [0, 9, 10, 13, 30, 30, 30], draft_ms=100.0) == [0, 0]


def test_caps_nan_one_draft_and_no_request():
    nan = float("nan")
    assert plan(Atom(), GOOD, GOOD, caps=[1, 0]) == [1, 0]
    assert plan(Atom(), GOOD, GOOD, caps=[0, 0]) == [0, 0]
    assert plan(Atom(), GOOD, [[1.0, nan], [nan, 1.0]]) == [1, 0]
    assert plan(Atom(), np.ones((0, 2)), np.ones((0, 2)), [0]) == []
    assert plan(Atom(), [[0.9]], [[0.9]], [0, 10, 18]) == [1]
    assert plan(Atom(), [[0.9]], [[0.9]], [0, 10, 20]) == [0]


def test_pinned_to_a_table(tmp_path):
    path = tmp_path / "sps.json"
    # 10 ms up to three tokens, 20 ms from four on: 2/10, 3/10, and 4/20 does not pay.
    table = {"sample_batch_tokens": [2, 4], "sample_steps_per_sec": [100.0, 50.0], "max_batch_tokens": 4}
    path.write_text(json.dumps(table))
    policy = Atom(table=str(path))
    for prices in (np.ones(7), 10.0 ** np.arange(7)):
        assert plan(policy, GOOD, GOOD, prices) == [1, 0]
    assert policy.traits == Traits(confidence_age=2, cost_driven=False)
    many = [[1.0, 1.0]] * 8
    assert plan(policy, many, many, np.ones(25)) == [2] * 8


def test_a_pinned_policy_conforms(tmp_path):
    path = tmp_path / "sps.json"
    tokens = list(range(1, 300))
    table = {"sample_batch_tokens": tokens, "sample_steps_per_sec": [1000 / (1 + 0.05 * n) for n in tokens]}
    path.write_text(json.dumps(table | {"max_batch_tokens": 300}))
    assert {"prices unread", "lossless"} <= set(check_policy(f"atom:table={path}"))


@pytest.mark.parametrize(("name", "value"), [("table", "graphs"), ("table", 1), ("lag", -1), ("lag", True)])
def test_parameters_out_of_range(name, value):
    with pytest.raises(InputError, match=f"field '{name}'.*expected"):
        Atom(**{name: value})


def test_lossless_whatever_the_lag():
    # Without lag by the early stop, with one by the age of all that is read.
    assert Atom().traits == Traits(confidence_age=2)
    assert Atom(lag=0).traits == Traits()
