"""Hand-computed: one feature of the engine a test."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dsim import check_policy
from dsim.errors import InputError
from dsim.policy import Traits, make_view
from policies.sglang import Sglang, _additive, _diagonal

GOOD = [[1.0, 1.0], [1.0, 1.0]]
BAD = [[0.0, 0.0], [0.0, 0.0]]
# Two requests: 10 ms without drafts, 2 ms a draft.
LINEAR = [0, 9, 10, 12, 14, 16, 18]


def plan(policy, now, old, verify_ms=LINEAR, **kwargs):
    """The answer with `old` two steps old, and the opposite of use one step old."""
    between = np.where(np.asarray(old) > 0.5, 0.0, 1.0)
    return policy.plan(make_view(now, verify_ms, history=(between, old), **kwargs)).tolist()


def test_the_diagonal_is_timed_with_whole_blocks_of_few_batches():
    # gamma = 1: 1, 2, 4, 8, 16, 24, ..., 56, 64, 80, ..., 112, 128, 160, ..., 256, 320 requests of two tokens each.
    curve = np.arange(700.0)
    believed = _diagonal(curve, 1)
    sizes = np.unique(believed)
    assert sizes[:11].tolist() == [2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128]
    assert sizes[11:].tolist() == [160, 192, 224, 256, 320, 384, 448, 512, 640]
    # The next smaller size, and the smallest below it.
    assert believed[[0, 1, 2, 3, 4, 7, 8, 159, 160, 699]].tolist() == [2, 2, 2, 2, 4, 4, 8, 128, 160, 640]


def test_between_two_sizes_of_the_diagonal_tokens_look_free():
    # One request, gamma = 5: 6 and 12 tokens are timed, so all of its drafts look free.
    one = [[0.5] * 5]
    assert plan(Sglang(), one, one, 10.0 ** np.arange(7)) == [5]
    # Three requests, two drafts each: 3, 6 and 12 tokens are timed. Up to the fifth token it is 10 ms, then 14:
    # 3/10 < 4.8/10 (two drafts) > 6/14.
    old = [[0.9, 0.4], [0.9, 0.4], [0.6, 0.4]]
    assert plan(Sglang(), old, old, [0, 9, 9, 10, 12, 13, 14, 20, 20, 20]) == [1, 1, 0]


def test_the_additive_table_is_linear_between_captured_sizes_and_has_the_draft_pass():
    # 2, 4 and 6 tokens are timed at 10, 12 and 20 ms; 3 tokens are 11 ms whatever they are.
    old = [[0.5, 0.0], [0.1, 0.0]]
    prices = [0, 10, 10, 12, 12, 20, 20]
    # 2/10, 2.5/11, 2.6/12: one draft. At its real 12 ms it would be 2/10 < 2.5/12 < 2.6/12: two.
    assert plan(Sglang("additive"), old, old, prices, captured_sizes=[2, 4, 6]) == [1, 0]
    # With 100 ms of drafting: 2/110, 2.5/111, 2.6/112.
    assert plan(Sglang("additive"), old, old, prices, captured_sizes=[2, 4, 6], draft_ms=100.0) == [1, 1]
    # Beyond the last size its price holds; sizes beyond the prices count as the last one.
    assert _additive(np.array([0, 10, 10, 12, 12, 20, 20.0]), np.array([2, 4])).tolist() == [10, 10, 10, 11, 12, 12, 12]
    assert _additive(np.array([0, 10, 10, 12.0]), np.array([2, 16])).tolist() == [10, 10, 10, 12]


def test_the_diagonal_has_no_draft_pass_of_this_batch():
    # Timed are 3 and 6 tokens: 10 ms up to the fifth token, 14 ms for the sixth. 5/10 > 5.9/14, so three drafts; with
    # a draft pass of 100 ms in the price it would be all four.
    old = [[1.0, 1.0], [1.0, 0.9]]
    assert plan(Sglang(), old, old, [0, 9, 9, 10, 12, 13, 14], draft_ms=100.0) == [2, 1]


def test_the_budget_is_two_steps_old_and_the_allocation_current():
    policy = Sglang("additive")
    assert plan(policy, [[0.1, 0.1], [0.9, 0.9]], [[1.0, 1.0], [0.0, 0.0]]) == [0, 2]
    assert plan(policy, GOOD, BAD) == [0, 0]
    assert plan(policy, GOOD, GOOD) == [2, 2]
    assert plan(Sglang("additive", lag=1), GOOD, GOOD) == [0, 0]


def test_a_new_request_counts_as_certain():
    view = make_view([[0.5, 0.5], [0.4, 0.4]], LINEAR, depth=2)
    assert Sglang("additive").plan(view).tolist() == [2, 2]


def test_the_fewest_drafts_where_values_are_equal():
    assert plan(Sglang("additive"), GOOD, GOOD, [0, 9, 10, 15, 21, 27, 33]) == [0, 0]


def test_prompt_chunks_are_not_in_the_price():
    # Behind a chunk of four the first draft is the seventh token, at 99 ms; it is priced as the third.
    prices = [0, 9, 10, 12, 14, 16, 18, 99, 99, 99, 99]
    assert plan(Sglang("additive"), GOOD, GOOD, prices, prefill_tokens=4) == [2, 2]
    # On the diagonal 6 tokens are timed, and 9: 2/10 ... 5/10, 6/16 without the chunk.
    assert plan(Sglang(), GOOD, GOOD, [0, 9, 9, 10, 10, 10, 16, 99, 99, 99, 99], prefill_tokens=4) == [2, 1]


def test_padding_stays_empty_or_is_filled():
    # Captured: 2, 5, 6 tokens; believed 10, 11, 12, 13 and 20 ms. Old survivals 1, 1, 0, 0: 2/10, 3/11, 4/12, so two
    # drafts, four tokens, which run in the graph of five.
    old, now = [[1.0, 0.0], [1.0, 0.0]], [[0.9, 0.8], [0.9, 0.7]]
    prices, sizes = [0, 10, 10, 13, 13, 13, 20], [2, 5, 6]
    assert plan(Sglang("additive"), now, old, prices, captured_sizes=sizes) == [1, 1]
    assert plan(Sglang("additive", fill=True), now, old, prices, captured_sizes=sizes) == [2, 1]
    # On a tier there is nothing to fill: nothing is worth it at two tokens.
    assert plan(Sglang("additive", fill=True), now, BAD, prices, captured_sizes=sizes) == [0, 0]
    # No more than there is: the tier of eight holds six.
    assert plan(Sglang("additive", fill=True), now, GOOD, LINEAR, captured_sizes=[2, 8]) == [2, 2]
    assert plan(Sglang("additive", fill=True), now, old, prices, captured_sizes=sizes, caps=[1, 1]) == [1, 1]


def test_a_budget_beyond_the_captured_sizes_falls_back_to_whole_blocks():
    # Three drafts are five tokens, and the largest graph holds four.
    old, now = [[1.0, 1.0], [1.0, 0.0]], [[0.9, 0.8], [0.9, 0.0]]
    assert plan(Sglang("additive"), now, old, captured_sizes=[2, 4]) == [2, 2]
    assert plan(Sglang("additive"), now, old, captured_sizes=[2, 4], caps=[2, 1]) == [2, 1]
    assert plan(Sglang("additive"), now, old, captured_sizes=[2, 5]) == [2, 1]
    # Two are four tokens.
    assert plan(Sglang("additive"), now, [[1.0, 1.0], [0.0, 0.0]], captured_sizes=[2, 4]) == [1, 1]


def test_no_table_verifies_everything():
    policy = Sglang(table="none")
    for now in (GOOD, BAD):
        assert plan(policy, now, BAD, 10.0 ** np.arange(7)) == [2, 2]
    assert plan(policy, GOOD, GOOD, caps=[1, 0]) == [1, 0]
    assert policy.traits == Traits(cost_driven=False)


def test_trimming_wants_a_minimum_gain():
    # 2/10, 2.5/12, 2.95/14, 3.15/15: the best is 2.95/14 = 0.2107, which beats everything (0.21) by 0.34 %.
    old = [[0.5, 0.4], [0.45, 0.0]]
    prices = [0, 9, 10, 12, 14, 15, 30]
    everything = [2, 1]
    assert plan(Sglang("additive"), old, old, prices) == [1, 1]
    assert plan(Sglang("additive", min_predicted_gain=0.003), old, old, prices) == [1, 1]
    assert plan(Sglang("additive", min_predicted_gain=0.004), old, old, prices) == everything


def test_caps_nan_one_draft_and_no_request():
    policy, nan = Sglang("additive"), float("nan")
    assert plan(policy, GOOD, GOOD, caps=[1, 0]) == [1, 0]
    assert plan(policy, GOOD, GOOD, caps=[0, 0]) == [0, 0]
    assert plan(policy, GOOD, [[1.0, nan], [nan, 1.0]]) == [1, 0]
    assert plan(policy, [[1.0, nan], [nan, 1.0]], GOOD) == [1, 0]
    assert plan(policy, np.ones((0, 2)), np.ones((0, 2)), [0]) == []
    assert plan(policy, [[0.9]], [[0.9]], [0, 10, 18]) == [1]
    assert plan(policy, [[0.9]], [[0.9]], [0, 10, 20]) == [0]


def test_pinned_to_a_diagonal_table(tmp_path):
    path = tmp_path / "sps.json"
    # 10 ms up to four tokens, 20 ms from five on; 2/10, 3/10, 4/10, 5/20.
    table = {"sample_batch_tokens": [2, 5], "sample_steps_per_sec": [100.0, 50.0], "max_batch_tokens": 8}
    path.write_text(json.dumps(table))
    policy = Sglang(table=str(path))
    for prices in (np.ones(7), 10.0 ** np.arange(7)):
        assert plan(policy, GOOD, GOOD, prices, draft_ms=9.0) == [2, 0]
    assert policy.traits == Traits(confidence_age=2, cost_driven=False)
    # A batch beyond the last probe costs what it does, as in the engine: everything looks free.
    many = [[1.0, 1.0]] * 8
    assert plan(policy, many, many, np.ones(25)) == [2] * 8


def test_pinned_to_an_additive_table(tmp_path):
    path = tmp_path / "sps.json"
    table = {"bias_seconds": 0.001, "bs_probes": [2], "alpha_seconds": [0.004], "m_probes": [2, 6]}
    # 5 + 5 ms at two tokens and 2 ms a token more; the draft pass is in the file, not added.
    path.write_text(json.dumps(table | {"theta_seconds": [0.005, 0.013]}))
    policy = Sglang(table=str(path))
    old = [[0.45, 0.0], [0.0, 0.0]]
    # 2/10 < 2.45/12; with 10 ms more it would be far from even.
    assert plan(policy, GOOD, old, np.ones(7)) == [1, 0]
    old = [[0.39, 0.0], [0.0, 0.0]]
    assert plan(policy, GOOD, old, np.ones(7), draft_ms=100.0) == [0, 0]


def test_a_pinned_policy_conforms(tmp_path):
    path = tmp_path / "sps.json"
    tokens = list(range(4, 300, 4))
    table = {"sample_batch_tokens": tokens, "sample_steps_per_sec": [1000 / (1 + 0.05 * n) for n in tokens]}
    path.write_text(json.dumps(table | {"max_batch_tokens": 300}))
    assert {"prices unread", "lossless"} <= set(check_policy(f"sglang:table={path}"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("table", "diagnal"),
        ("table", None),
        ("lag", -1),
        ("lag", 2.0),
        ("fill", 1),
        ("min_predicted_gain", -0.1),
        ("min_predicted_gain", float("nan")),
        ("min_predicted_gain", True),
    ],
)
def test_parameters_out_of_range(name, value):
    with pytest.raises(InputError, match=f"field '{name}'"):
        Sglang(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("lag", 1), ("fill", True), ("min_predicted_gain", 0.1)])
def test_without_a_table_the_other_parameters_are_refused(name, value):
    with pytest.raises(InputError, match=f"field '{name}'.*is not used with table = 'none'"):
        Sglang(table="none", **{name: value})


def test_traits_follow_the_parameters():
    assert Sglang().traits == Traits(confidence_age=2, coarse_prices=True)
    assert Sglang("additive", lag=0, fill=True, min_predicted_gain=0.05).traits == Traits(
        gain_guard=0.05, pads_to_captured=True, lossless=False
    )
