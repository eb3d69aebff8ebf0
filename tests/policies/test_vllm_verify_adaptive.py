"""Hand-computed: one feature of the engine a test."""

from __future__ import annotations

import numpy as np
import pytest

from dsim.errors import InputError
from dsim.policy import Traits, make_view
from policies.vllm_verify_adaptive import VllmVerifyAdaptive

FLAT = np.ones(40)


def plan(now, old, verify_ms, policy=None, **kwargs):
    view = make_view(now, verify_ms, history=(old,), **kwargs)
    return (policy or VllmVerifyAdaptive()).plan(view).tolist()


def block(*survivals):
    """Confidences whose products are these survivals."""
    values = np.array(survivals)
    return values / np.concatenate([[1.0], np.maximum(values[:-1], 1e-9)])


# Two requests, three drafts each: survivals 0.9, 0.8, 0.7 and 0.6, 0, 0.
OLD = [block(0.9, 0.8, 0.7), block(0.6, 0.0, 0.0)]
NOW = [[0.1, 0.1, 0.1], [0.9, 0.9, 0.9]]


def test_only_profiled_sizes_are_chosen_from():
    # Q is 2, 4 or 8 tokens (1, 2 or 4 a request): 0, 2 or 4 of the drafts (the last two are worth nothing).
    # tokens / ms: 2/10, 3.7/12, 5/16.3. Three drafts would be 4.4/12 = 0.37, but 5 tokens were never timed.
    assert plan(NOW, OLD, [0, 9, 10, 11, 12, 12, 14, 15, 16.3]) == [2, 0]
    # 5/16 beats 3.7/12: then all that is worth anything.
    assert plan(NOW, OLD, [0, 9, 10, 11, 12, 12, 14, 15, 16.0]) == [3, 1]


def test_budget_and_allocation_are_one_step_old():
    prices = [0, 9, 10, 11, 12, 12, 14, 15, 16.3]
    assert plan(OLD, NOW, prices) == [0, 2]
    # Nothing was worth it then, or everything.
    assert plan(OLD, np.zeros((2, 3)), prices) == [0, 0]
    assert plan(np.zeros((2, 3)), np.ones((2, 3)), prices) == [3, 3]
    # Not two steps.
    view = make_view(NOW, prices, history=(OLD, np.zeros((2, 3))))
    assert VllmVerifyAdaptive().plan(view).tolist() == [2, 0]
    assert VllmVerifyAdaptive(lag=2).plan(view).tolist() == [0, 0]


def test_between_two_profiled_batches_the_next_larger_one_counts():
    # Three requests are looked up at four: Q is 4, 8 tokens, so one draft at least, at any price.
    old = [[0.5], [0.9], [0.7]]
    steep = 10.0 ** np.arange(8)
    assert plan(old, old, steep) == [0, 1, 0]
    # Three are profiled themselves with steps of one: Q is 3, 6.
    assert plan(old, old, steep, policy=VllmVerifyAdaptive(batch_step=1)) == [0, 0, 0]
    # Steps of six: Q is 6, 12.
    assert plan(old, old, steep, policy=VllmVerifyAdaptive(batch_step=6)) == [1, 1, 1]


def test_the_price_is_that_of_the_profiled_size():
    # Three requests at four, two drafts each: Q is 4, 8, 12, and 12 holds more than the 3 + 6 tokens of the batch, but
    # is what was timed. tokens / ms: 4/10, 8/21, 9/40.
    old = np.ones((3, 2))
    prices = [0, 9, 9, 9, 10, 20, 20, 20, 21, 22, 40, 40, 40]
    assert plan(old, old, prices) == [1, 0, 0]
    # Where the step's prices end before, their last one stands for it: 9/22.
    assert plan(old, old, prices[:10]) == [2, 2, 2]


def test_profiled_lengths():
    # gamma = 6: 1, 2, 4, 6 and 7 tokens a request; every draft is certain, and the price jumps after one size.
    old = np.ones((2, 6))
    for step, lengths in ((2, (1, 2, 4, 6, 7)), (3, (1, 2, 5, 7)), (10, (1, 2, 7))):
        for length in range(1, 8):
            prices = np.where(np.arange(15) <= 2 * length, 1.0, 1e9)
            expected = max(held for held in lengths if held <= length) - 1
            drafts = VllmVerifyAdaptive(query_step=step).plan(make_view(old, prices, history=(old,)))
            assert drafts.sum() == 2 * expected


def test_a_batch_beyond_the_largest_profiled_one():
    # Looked up at two: Q is 2, 4, 6 tokens of which five requests fill all but one.
    old = [[0.5, 0.1]] * 4 + [[0.6, 0.2]]
    for prices in (FLAT, 10.0 ** np.arange(16)):
        assert plan(old, old, prices, policy=VllmVerifyAdaptive(max_batch=2)) == [0, 0, 0, 0, 1]
    # Seven do not fit into any.
    many = [[0.5, 0.1]] * 7
    assert plan(many, many, FLAT, policy=VllmVerifyAdaptive(max_batch=2)) == [0] * 7
    # In a larger grid they do.
    assert plan(many, many, FLAT) == [2] * 7


def test_a_request_that_was_not_there_is_verified_in_full():
    prices = 10.0 ** np.arange(17)
    old = [*np.zeros((2, 3)), [1.0, 1.0, 1.0]]
    view = make_view(np.zeros((3, 3)), prices, history=(old,))._replace(born=np.array([0, 0, 1]))
    # The two others are decided about as a batch of two, for which nothing pays.
    assert VllmVerifyAdaptive().plan(view).tolist() == [0, 0, 3]
    assert VllmVerifyAdaptive().plan(view._replace(born=np.array([1, 1, 1]))).tolist() == [3, 3, 3]
    capped = view._replace(caps=np.array([3, 3, 1]), caps_bind=True)
    assert VllmVerifyAdaptive().plan(capped).tolist() == [0, 0, 1]


def test_the_draft_pass_is_not_in_the_price():
    # 2/10 > 2.9/16 (two drafts); with a draft pass of 100 ms in both it would be the other way round.
    old = [[0.5], [0.4]]
    assert plan(old, old, [0, 9, 10, 11, 16], draft_ms=100.0) == [0, 0]


def test_the_smallest_size_where_values_are_equal():
    assert plan([[1.0], [1.0]], [[1.0], [1.0]], [0, 9, 10, 12, 20]) == [0, 0]


def test_caps_nan_one_draft_and_no_request():
    old, nan = np.ones((2, 3)), float("nan")
    assert plan(old, old, FLAT, caps=[1, 3]) == [1, 3]
    assert plan(old, old, FLAT, caps=[0, 0]) == [0, 0]
    assert plan(old, [[nan, 1, 1], [1, nan, 1]], FLAT) == [0, 1]
    assert plan(np.ones((0, 3)), np.ones((0, 3)), FLAT) == []
    assert plan([[1.0]], [[1.0]], FLAT) == [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_step", 0), ("query_step", 1.0), ("max_batch", 0), ("max_batch", "8"), ("lag", -1), ("lag", True)],
)
def test_parameters_that_are_no_counts(name, value):
    with pytest.raises(InputError, match=rf"field '{name}'.*expected an integer >= "):
        VllmVerifyAdaptive(**{name: value})


def test_traits_follow_the_lag():
    assert VllmVerifyAdaptive().traits == Traits(confidence_age=1)
    assert VllmVerifyAdaptive(lag=0).traits == Traits(lossless=False)
