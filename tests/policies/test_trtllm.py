"""Hand-computed: one feature of the engine a test."""

from __future__ import annotations

import json

import numpy as np
import pytest
from both_forms import planned

from dsim import check_policy
from dsim.engines.checks import digest
from dsim.errors import InputError
from dsim.kernel.cache import kernel_of
from dsim.policy import Traits, load_policy, make_view
from policies.trtllm import Trtllm, _profiled

R = 8
# With eight requests whole blocks of 2, 3, 4 tokens were timed: 16, 24 and 32 tokens in the step.


def same(*survivals):
    """float[8, gamma]: confidences of eight requests that are all worth this."""
    values = np.array(survivals)
    return np.tile(values / np.concatenate([[1.0], np.maximum(values[:-1], 1e-9)]), (R, 1))


def line(*milliseconds):
    """Prices linear between 16, 24, 32, ... tokens, level below."""
    sizes = [16 + 8 * i for i in range(len(milliseconds))]
    return np.interp(range(sizes[-1] + 1), sizes, milliseconds)


def plan(policy, old, prices, now=None, **kwargs):
    """The answer with `old` two steps old; what came since is of no use."""
    since = np.zeros_like(old)
    return planned(policy, make_view(since if now is None else now, prices, history=(since, old), **kwargs))


def test_everyone_gets_the_floor_at_any_price():
    steep = line(1.0, 1e6, 1e9)
    assert plan(Trtllm(), same(0.0, 0.0, 0.0), steep) == [1] * R
    assert plan(Trtllm(floor=2), same(0.9, 0.1, 0.1), steep) == [2] * R
    assert plan(Trtllm(floor=0), same(0.9, 0.1, 0.1), steep) == [0] * R
    assert plan(Trtllm(), same(0.9, 0.1, 0.1), steep, caps=[0, 3, 3, 3, 3, 3, 3, 3]) == [0] + [1] * 7


def test_the_floor_counts_in_the_tokens_expected():
    # 16/10, 20/13, 24/16.2: no more than the floor. Without its eight tokens it would be 8/10, 12/13, 16/16.2.
    assert plan(Trtllm(), same(1.0, 0.5, 0.5), line(10.0, 13.0, 16.2)) == [1] * R


# Survivals 1, 0.9, 0.8 of four requests and 1, 0.1, 0 of the others.
MIXED = [[1.0, 0.9, 8 / 9]] * 4 + [[1.0, 0.1, 0.0]] * 4


def test_a_tier_is_a_total_and_not_a_length():
    # 16/10, 22.8/14, 23.2/18: eight drafts above the floor, as if everyone verified two, go to the best ones.
    assert plan(Trtllm(), MIXED, line(10.0, 14.0, 18.0)) == [3] * 4 + [1] * 4


def test_only_the_tiers_are_looked_at():
    old = [[1.0, 0.9, 0.0]] * 4 + [[1.0, 0.1, 0.0]] * 4
    # 16/10, 19.6/12 (four drafts, no tier), 20/14, 20/18.
    assert plan(Trtllm(), old, line(10.0, 14.0, 18.0)) == [1] * R
    assert plan(Trtllm(tiers="global"), old, line(10.0, 14.0, 18.0)) == [2] * 4 + [1] * 4


def test_the_ladder_is_floor_half_and_whole_block():
    # gamma = 5: 1, 3 and 5, so 0, 16 or 32 drafts; sizes 16, 24, 32, 40, 48 tokens. The price jumps after 40 tokens.
    old, prices = same(1.0, 1.0, 1.0, 1.0, 1.0), line(1.0, 1.0, 1.0, 1.0, 1e6)
    # Budgets of 16 of 24 possible drafts, by position.
    assert plan(Trtllm(), old, prices) == [3] * R
    assert plan(Trtllm(tiers="1-4-5"), old, prices) == [4] * R
    assert plan(Trtllm(tiers="global"), old, prices) == [4] * R
    assert plan(Trtllm(floor=3), old, prices) == [3] * R
    # A ladder of one's own need not hold the whole block: there is nothing to fall back to then.
    assert plan(Trtllm(tiers="1-2"), old, line(1.0, 1.0, 1.0, 1.0, 1.001)) == [2] * R


GUARDS = [("min_predicted_gain", 0.02), ("min_predicted_gain", 0.0), ("drain", 1.0)]


@pytest.mark.parametrize(("guard", "value"), GUARDS)
def test_a_guard_without_a_whole_block_to_fall_back_to_is_refused(guard, value):
    policy, prices = Trtllm(tiers="1-2", **{guard: value}), line(10.0, 12.6, 20.0)
    expected = rf"field '{guard}': is not used with tiers = '1-2', which end before the whole block of 3 .*got {value}"
    for confidences in (same(1.0, 0.5, 0.0), np.ones((0, 3))):
        with pytest.raises(InputError, match=expected):
            plan(policy, confidences, prices)
    # Where the block is that short the ladder holds it, and the guard counts: 16/10 against 20/12.6, 0.8 %.
    whole = [2] * R if value else [1] * R
    assert plan(policy, same(1.0, 0.5), line(10.0, 12.6)) == whole


def test_the_largest_of_equal_ones_with_tiers_and_the_smallest_without():
    # 16/10 = 32/20, and 24/20 between.
    old, prices = same(1.0, 1.0, 1.0), line(10.0, 20.0, 20.0)
    assert plan(Trtllm(min_predicted_gain=0.0), old, prices) == [3] * R
    assert plan(Trtllm(tiers="global", min_predicted_gain=0.0), old, prices) == [1] * R


def test_a_gain_below_one_percent_is_no_reason_to_trim():
    # 16/10 against 20/12.6, better by 0.8 %, and 20/12.7, by 1.6 %.
    old = same(1.0, 0.5)
    assert plan(Trtllm(), old, line(10.0, 12.6)) == [2] * R
    assert plan(Trtllm(), old, line(10.0, 12.7)) == [1] * R
    assert plan(Trtllm(min_predicted_gain=0.02), old, line(10.0, 12.7)) == [2] * R
    assert plan(Trtllm(min_predicted_gain=0.0), old, line(10.0, 12.6)) == [1] * R
    for tiers in ("graph", "global"):
        assert plan(Trtllm(tiers=tiers), old, line(10.0, 12.6)) == [2] * R


def test_a_flat_table_is_no_reason_to_trim():
    hopeless = same(0.0, 0.0, 0.0)
    for tiers in ("graph", "global"):
        assert plan(Trtllm(tiers=tiers), hopeless, line(10.0, 10.0, 10.0)) == [3] * R
        assert plan(Trtllm(tiers=tiers), hopeless, line(10.0, 10.0, 10.5)) == [1] * R


def test_before_the_first_confidences_have_landed_everything_is_verified():
    old, prices = same(0.0, 0.0, 0.0), line(10.0, 20.0, 30.0)
    view = make_view(old, prices, history=(old, old))
    for step, length in ((0, 3), (1, 3), (2, 1), (3, 1)):
        assert planned(Trtllm(), view._replace(step=step)) == [length] * R
        assert planned(Trtllm(lag=1), view._replace(step=step)) == [3 if step == 0 else 1] * R


def test_the_table_is_linear_between_its_sizes():
    old = [[1.0, 0.9, 0.0]] * 4 + [[1.0, 0.1, 0.0]] * 4
    # Stairs: 14 ms from the 17th token on. Believed are 12 ms for 20 tokens, so 19.6/12 beats 16/10.
    stairs = np.repeat([10.0, 14.0, 18.0], [17, 8, 8])
    assert plan(Trtllm(tiers="global"), old, stairs) == [2] * 4 + [1] * 4


def test_the_sizes_that_are_timed():
    # gamma = 2: 2 and 3 tokens of 8, 16, 32, ... requests, and the largest step.
    curve = np.arange(101.0) ** 2
    sizes = [16, 24, 32, 48, 64, 96, 100]
    assert _profiled(curve, 2).tolist() == np.interp(range(101), sizes, np.square(sizes)).tolist()
    # Smaller steps than any of them: the largest one's price, a flat table.
    assert _profiled(np.arange(8.0) ** 2, 2).tolist() == [49.0] * 8


def test_the_draft_pass_is_in_the_price():
    # 16/10 > 20/13, but 16/20 < 20/23.
    assert plan(Trtllm(), same(1.0, 0.5), line(10.0, 13.0)) == [1] * R
    assert plan(Trtllm(), same(1.0, 0.5), line(10.0, 13.0), draft_ms=10.0) == [2] * R


def test_old_confidences_decide_which_drafts_too():
    now = MIXED[::-1]
    assert plan(Trtllm(), MIXED, line(10.0, 14.0, 18.0), now=now) == [3] * 4 + [1] * 4
    since = np.ones((R, 3))
    view = make_view(now, line(10.0, 14.0, 18.0), history=(MIXED, since))
    assert planned(Trtllm(lag=1), view) == [3] * 4 + [1] * 4
    assert planned(Trtllm(lag=2), view) == [3] * R


def test_equal_drafts_are_granted_by_position():
    # New requests are certain. Up to 16 tokens it costs the same, so eight drafts: one each, not two of the first four.
    policy = Trtllm(floor=0, tiers="global")
    view = make_view(same(0.1, 0.1), line(10.0, 100.0), depth=2, step=2)
    assert planned(policy, view) == [1] * R
    # Nine: the first position of all, then the second one of the first request.
    prices = np.append(line(10.0, 100.0)[:17], np.full(8, 100.0))
    certain = np.ones((R, 2))
    assert planned(policy, make_view(certain, prices, history=(certain, certain))) == [1] * R
    five = Trtllm(floor=0, tiers="global", min_predicted_gain=0.0)
    capped = make_view(certain, prices, history=(certain, certain), caps=[2, 2, 2, 2, 2, 0, 0, 0])
    assert planned(five, capped) == [2, 2, 2, 1, 1, 0, 0, 0]


def test_drain_guard_charges_the_steps_that_fewer_tokens_now_cost_later():
    # Trimming to the floor saves 4 of 14 ms and loses half a token a request. The step of eight requests that verify
    # everything is 14 ms, that of one is 10 ms (the smallest timed).
    old, prices = same(1.0, 0.5), line(10.0, 14.0)
    trimmed, everything = [1] * R, [2] * R
    assert plan(Trtllm(), old, prices) == trimmed
    # 4 - 1 * 0.5 * 14 / 4 = 2.25 ms, 4 - 3 * 0.5 * 14 / 4 < 0.
    assert plan(Trtllm(drain=1.0, drain_tail=8), old, prices) == trimmed
    assert plan(Trtllm(drain=3.0, drain_tail=8), old, prices) == everything
    # 4 - 0.5 * 14 / 1 < 0.
    assert plan(Trtllm(drain=1.0, drain_tail=8, drain_tokens=1.0), old, prices) == everything
    # More than 2.2 ms, not more than 2.25.
    assert plan(Trtllm(drain=1.0, drain_tail=8, drain_least_ms=2.2), old, prices) == trimmed
    assert plan(Trtllm(drain=1.0, drain_tail=8, drain_least_ms=2.25), old, prices) == everything
    # 4 - 0.5 * 10 / 4 = 2.75 ms.
    assert plan(Trtllm(drain=1.0, drain_tail=1, drain_least_ms=2.7), old, prices) == trimmed
    # The tail drafts too: 4 - 0.5 * 16 / 4 = 2 ms.
    assert plan(Trtllm(drain=1.0, drain_tail=8, drain_least_ms=2.1), old, prices, draft_ms=2.0) == everything
    assert plan(Trtllm(drain=1.0, drain_tail=8, drain_least_ms=1.9), old, prices, draft_ms=2.0) == trimmed


def test_drain_guard_prefers_the_largest_value_to_the_best_ratio():
    # 16/10, 20/11, 24/20: eight drafts have the best ratio. Values: 10 - 1 * 20/20 = 9 ms, 9 - 0.5 * 20/20 = 8.5 ms.
    old, prices = same(1.0, 0.5, 0.5), line(10.0, 11.0, 20.0)
    assert plan(Trtllm(), old, prices) == [2] * R
    assert plan(Trtllm(drain=1.0, drain_tail=8, drain_tokens=20.0), old, prices) == [1] * R
    # Later steps at twice the price: 8 and 8 ms, and then the better ratio counts.
    assert plan(Trtllm(drain=2.0, drain_tail=8, drain_tokens=20.0), old, prices) == [2] * R
    # Also where that is the smaller number: 16/10, 20/14, 24/24, and 14 - 8 = 10 - 4 = 6 ms.
    assert plan(Trtllm(drain=4.0, drain_tail=8, drain_tokens=12.0), old, line(10.0, 14.0, 24.0)) == [1] * R
    # The guard chooses among what gains at least the minimum only: 16/10 is 33 % better than 24/20, 20/11 52 %.
    policy = Trtllm(drain=1.0, drain_tail=8, drain_tokens=20.0, min_predicted_gain=0.4)
    assert plan(policy, old, prices) == [2] * R


def test_drain_guard_and_equal_ratios():
    old = same(1.0, 0.5, 0.5)
    # 16/10 = 20/12.5, and 10 - 1 * 8 * 20/4/8 = 7.5 - 1 * 4 * 20/4/8 = 5 ms: of equal ratios the most drafts.
    assert plan(Trtllm(drain=1.0, drain_tail=8), old, line(10.0, 12.5, 20.0)) == [2] * R
    # 16/10 = 24/15: to be worth 5 - 8 * 15/20/8 ms is not enough, also where no gain is asked for.
    guard = {"drain": 1.0, "drain_tail": 8, "drain_tokens": 20.0, "min_predicted_gain": 0.0}
    assert plan(Trtllm(**guard), old, line(10.0, 20.0, 15.0)) == [3] * R
    assert plan(Trtllm(**guard), old, line(10.0, 20.0, 15.1)) == [1] * R


def test_prompt_chunks_are_not_in_the_price():
    prices = np.append(line(10.0, 14.0, 18.0), np.full(100, 1e6))
    assert plan(Trtllm(), MIXED, prices, prefill_tokens=100) != [1] * R


def test_caps_nan_one_draft_and_no_request():
    prices, nan = line(10.0, 14.0, 18.0), float("nan")
    good = same(1.0, 1.0, 1.0)
    assert plan(Trtllm(), good, prices, caps=[0, 1, 2, 3, 3, 3, 3, 3]) == [0, 1, 2, 3, 3, 3, 3, 3]
    assert plan(Trtllm(), good, prices, caps=[0] * R) == [0] * R
    assert plan(Trtllm(), [[1.0, nan, 1.0]] * R, line(10.0, 11.0, 12.0)) == [1] * R
    assert plan(Trtllm(), same(0.0), line(1.0)[:17]) == [1] * R
    assert plan(Trtllm(), np.ones((0, 3)), [0.0]) == []
    # A capped tier is what everyone's length, cut at its cap, comes to: 0, 6 or 11 drafts. 15/10, 21/13, 25/15.5: all.
    capped = [2, 2, 3, 3, 3, 3, 3, 0]
    assert plan(Trtllm(), good, line(10.0, 14.0, 18.0), caps=capped) == capped


def v1(tmp_path, **extra):
    path = tmp_path / "sps.json"
    table = {"token_counts": [16, 24], "step_time_ms": [8.0, 10.6], "fixed_overhead_ms": 1.0}
    path.write_text(json.dumps(table | {"batch_sizes": [8], "batch_overhead_ms": [1.0]} | extra))
    return str(path)


def test_pinned_to_a_table_it_takes_its_prices_and_its_minimum_gain(tmp_path):
    # 16/10 against 20/12.6, as above; what the step costs is not looked at.
    old = same(1.0, 0.5)
    for prices in (np.ones(25), line(1.0, 1e6)):
        assert plan(Trtllm(table=v1(tmp_path)), old, prices, draft_ms=99.0) == [2] * R
        assert plan(Trtllm(table=v1(tmp_path, minimum_predicted_gain=0.0)), old, prices, draft_ms=99.0) == [1] * R
        policy = Trtllm(table=v1(tmp_path, minimum_predicted_gain=0.0), min_predicted_gain=0.01)
        assert plan(policy, old, prices) == [2] * R
    policy = Trtllm(table=v1(tmp_path, minimum_predicted_gain=0.03))
    assert policy.traits == Traits(confidence_age=2, cost_driven=False, floor=1, gain_guard=0.03, needs_gamma=1)
    # The tail's price is the file's as well: 2.6 - 0.5 * 12.6 / 4 = 1.025 ms.
    table = v1(tmp_path, minimum_predicted_gain=0.0)
    for least, length in ((1.0, 1), (1.05, 2)):
        policy = Trtllm(table=table, drain=1.0, drain_tail=8, drain_least_ms=least)
        assert plan(policy, old, np.ones(25)) == [length] * R
    # Beyond its last size the table is level, as in the engine: everything looks free there.
    many = np.full((32, 2), 0.5)
    assert plan(Trtllm(table=table), many, np.ones(97)) == [2] * 32


def v2(tmp_path, guard=None):
    sha = "a" * 64
    fingerprint = {
        "gpu": "B300",
        "gpu_count": 1,
        "gpu_snapshot_sha256": sha,
        "global_graph_batch_sizes": [8],
        "max_draft_len": 2,
        "rank_local_graph_batch_sizes": [8],
        "runtime_snapshot": "now",
        "source_diff_sha256": sha,
        "source_head": "head",
        "topology": "TP1",
    }
    cells = {0: 14.0, 16: 10.0, 20: 11.0}
    table = {
        "schema_version": 2,
        "minimum_predicted_gain": 0.01,
        "cost_tables": {"8": {"token_counts": list(cells), "step_time_ms": list(cells.values())}},
        "engine_fingerprint": fingerprint,
        "engine_fingerprint_sha256": digest(fingerprint),
        "measurements": [
            {
                "rank_local_graph_batch_size": 8,
                "rank_local_verifier_budget": tokens,
                "source_result_sha256": sha,
                "step_time_ms": ms,
            }
            for tokens, ms in cells.items()
        ],
    }
    if guard is not None:
        table["iteration_drain_guard"] = guard | {"tail_graph_batch_size": 8, "source_result_sha256": sha}
    path = tmp_path / "exact.json"
    path.write_text(json.dumps(table))
    return str(path)


def test_pinned_to_exact_graphs_it_takes_their_sizes_and_their_drain_guard(tmp_path):
    guard = {
        "loss_multiplier": 1.0,
        "mean_output_tokens_per_request_iteration": 4.0,
        "minimum_group_value_ms": 1.0,
    }
    # 16 tokens in 10 ms, 20 in 11, 24 in 14: 16/10, 18/11, 20/14. The tail is 14 ms: 4 - 0.5 * 14 / 4 = 2.25 ms and
    # 3 - 0.25 * 14 / 4 = 2.125 ms, so the floor is of more value.
    old = same(1.0, 0.5)
    assert plan(Trtllm(table=v2(tmp_path, guard)), old, np.ones(25)) == [1] * R
    # Later steps at twice the price: 0.5 and 1.25 ms.
    dear = guard | {"loss_multiplier": 2.0}
    assert plan(Trtllm(table=v2(tmp_path, dear)), old, np.ones(25)) == [2] * 4 + [1] * 4
    # Ten times: everything.
    dear = guard | {"loss_multiplier": 10.0}
    assert plan(Trtllm(table=v2(tmp_path, dear)), old, np.ones(25)) == [2] * R
    # Without a guard the engine never trims.
    assert plan(Trtllm(table=v2(tmp_path)), same(0.0, 0.0), np.ones(25)) == [2] * R
    # More requests than the table has a graph for.
    with pytest.raises(InputError, match=r"no graph for so many requests.*expected at most 8"):
        plan(Trtllm(table=v2(tmp_path, guard)), np.ones((9, 2)), np.ones(28))
    for tiers in ("1-2", "global"):
        with pytest.raises(InputError, match=r"field 'tiers'.*the file has sizes of its own"):
            Trtllm(table=v2(tmp_path, guard), tiers=tiers)
    with pytest.raises(InputError, match=r"field 'drain'.*the file decides on the drain guard"):
        Trtllm(table=v2(tmp_path, guard), drain=1.0)


def test_a_pinned_policy_conforms(tmp_path):
    path = tmp_path / "sps.json"
    tokens = list(range(8, 400, 8))
    path.write_text(json.dumps({"token_counts": tokens, "step_time_ms": [1 + 0.05 * n for n in tokens]}))
    assert {"prices unread", "lossless"} <= set(check_policy(f"trtllm:table={path}"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("table", "profile"),
        ("lag", -1),
        ("lag", 1.5),
        ("floor", -1),
        ("floor", True),
        ("tiers", "all"),
        ("tiers", "2-3"),
        ("tiers", "1-3-2"),
        ("tiers", "1-"),
        ("tiers", 2),
        ("tiers", None),
        ("min_predicted_gain", -0.01),
        ("min_predicted_gain", float("inf")),
        ("drain", -1.0),
        ("drain", "1"),
        ("drain_tokens", 0),
        ("drain_tail", 0),
        ("drain_least_ms", float("nan")),
    ],
)
def test_parameters_out_of_range(name, value):
    with pytest.raises(InputError, match=f"field '{name}'.*expected"):
        Trtllm(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("drain_tokens", 3.0), ("drain_tail", 2), ("drain_least_ms", 1.0)])
def test_parameters_of_the_drain_guard_without_it(name, value):
    with pytest.raises(InputError, match=r"field 'drain'.*the drain guard's other parameters need it"):
        Trtllm(**{name: value})


def test_traits_follow_the_parameters():
    own = Traits(confidence_age=2, floor=1, gain_guard=0.01, coarse_prices=True, needs_gamma=1)
    assert Trtllm().traits == own
    assert Trtllm(tiers="1-3").traits == Traits(confidence_age=2, floor=1, coarse_prices=True, needs_gamma=3)
    assert Trtllm(tiers=1).traits == Traits(confidence_age=2, floor=1, coarse_prices=True, needs_gamma=1)
    assert Trtllm(lag=0, floor=2, min_predicted_gain=0.0).traits == Traits(
        floor=2, coarse_prices=True, lossless=False, needs_gamma=2
    )


# -- the compiled form -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "trtllm",
        "trtllm:lag=0,floor=2",
        "trtllm:floor=0,min_predicted_gain=0.2",
        "trtllm:tiers=1-2",
        "trtllm:tiers=0-1-5,floor=0,min_predicted_gain=0",
        "trtllm:tiers=global,min_predicted_gain=0",
        "trtllm:drain=0.5,floor=0",
        "trtllm:tiers=1-3-5,drain=2,drain_tail=3,drain_tokens=1.5,min_predicted_gain=0",
        "trtllm:tiers=global,floor=0,drain=0.8,drain_least_ms=0.5",
    ],
)
def test_the_compiled_form_answers_as_plan_does(spec):
    pytest.importorskip("numba")
    policy = load_policy(spec)
    kernel, rng = kernel_of(policy), np.random.default_rng(3)
    lengths = [n for n in (1, 2, 5) if policy.traits.needs_gamma <= n <= (kernel.most_gamma or 5)]
    answers = {"floor": 0, "between": 0, "everything": 0}
    for trial in range(400):
        requests, gamma = int(rng.choice((1, 8, 16, 60))), int(rng.choice(lengths))
        shape = (1 + policy.traits.confidence_age, requests, gamma)
        # Many equal survivals, or none.
        blocks = rng.choice((0.0, 0.5, 0.75, 1.0, 1.0, np.nan), shape) if trial % 2 else rng.uniform(0.2, 1.0, shape)
        last = requests * (1 + gamma) + 5
        steps = rng.choice((0.0, 0.02, 0.5, 5.0)) * rng.choice((0.0, 1.0, 1.0, 3.0), last)
        view = make_view(
            blocks[0],
            8.0 + np.append(0.0, np.cumsum(steps)),
            history=tuple(blocks[1:]),
            caps=rng.integers(0, gamma + 1, requests) if trial % 3 == 0 else None,
            draft_ms=float(rng.choice((0.0, 0.7))),
            prefill_tokens=int(rng.choice((0, 5))),
            step=int(rng.integers(0, 9)),
        )
        total, least = sum(planned(policy, view)), np.minimum(view.caps, policy.floor).sum()
        if least < view.caps.sum():
            answers["floor" if total == least else "everything" if total == view.caps.sum() else "between"] += 1
    assert min(answers.values()) >= 10, answers


def test_a_guard_on_a_ladder_that_ends_before_the_block_has_no_compiled_form():
    pytest.importorskip("numba")
    # That `plan` refuses such a block is for it to say.
    assert kernel_of(Trtllm(tiers="1-2", min_predicted_gain=0.02)).most_gamma == 2
    assert kernel_of(Trtllm(tiers="1-2", drain=1.0)).most_gamma == 2
    assert kernel_of(Trtllm(tiers="1-2")).most_gamma is None
    assert kernel_of(Trtllm(drain=1.0)).most_gamma is None


def test_a_table_from_a_file_has_no_compiled_form(tmp_path):
    pytest.importorskip("numba")
    assert kernel_of(Trtllm(table=v1(tmp_path))) is None
