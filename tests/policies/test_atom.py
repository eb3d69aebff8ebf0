"""Hand-computed: one feature of the engine a test."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dsim import check_policy
from dsim.errors import InputError
from dsim.policy import Traits, make_view
from dsim.scenario import Point, simulate
from dsim.schema import load_scenario
from policies.atom import Atom, _linear

GOOD = [[1.0, 1.0], [1.0, 1.0]]
BAD = [[0.0, 0.0], [0.0, 0.0]]
# Two requests: 10 ms without drafts, 2 ms a draft.
LINEAR = [0, 9, 10, 12, 14, 16, 18]


def plan(policy, now, old, verify_ms=LINEAR, **kwargs):
    """The second answer, when the batch is that of the step before, with `old` two steps old.

    What is one step old would say the opposite.
    """
    between = np.where(np.asarray(old) > 0.5, 0.0, 1.0)
    view = make_view(now, verify_ms, history=(between, old), **kwargs)
    policy.plan(view)
    return policy.plan(view).tolist()


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


ALIVE = [0, 9, 10, 12, 14, 16, 18, 20, 22, 24]
#: Three requests, no draft of which pays.
HOPELESS = make_view(np.zeros((3, 2)), ALIVE, history=(np.zeros((3, 2)), np.zeros((3, 2))))


def of(view, rows, **changes):
    """The view of some of its requests."""
    past = tuple(block[rows] for block in view.history)
    left = {"history": past, "base_tokens": len(rows), "sampling": len(rows), "caps": view.caps[rows]}
    return view._replace(**left, born=view.born[rows])._replace(**changes)


def test_a_batch_is_verified_in_full_after_every_change():
    policy = Atom()
    answers = [policy.plan(HOPELESS).tolist() for _ in range(3)]
    assert answers == [[2, 2, 2], [0, 0, 0], [0, 0, 0]]
    # One leaves; then nobody does.
    two = of(HOPELESS, [0, 1])
    assert [policy.plan(two).tolist() for _ in range(2)] == [[2, 2], [0, 0]]
    # One leaves and one comes, born in this step: as many as before, and not the same.
    swapped = HOPELESS._replace(step=7, born=np.array([0, 0, 7]))
    assert policy.plan(HOPELESS).tolist() == [2, 2, 2]
    assert policy.plan(HOPELESS).tolist() == [0, 0, 0]
    assert policy.plan(swapped).tolist() == [2, 2, 2]
    assert policy.plan(swapped._replace(step=8)).tolist() == [0, 0, 2]  # no length of the newcomer yet
    assert policy.plan(swapped._replace(step=9)).tolist() == [0, 0, 0]
    # So does a step without requests, and one after a prompt chunk.
    assert policy.plan(of(HOPELESS, [])).tolist() == []
    assert policy.plan(HOPELESS).tolist() == [2, 2, 2]
    chunk = HOPELESS._replace(base_tokens=5, verify_ms=np.arange(12.0) + 9)
    assert [policy.plan(view).tolist() for view in (chunk, HOPELESS, HOPELESS)] == [[2] * 3, [2] * 3, [0] * 3]


def test_without_that_rule_only_requests_without_a_length_are_verified_in_full():
    policy = Atom(full_on_change=False)
    assert policy.plan(HOPELESS).tolist() == [0, 0, 0]
    assert policy.plan(of(HOPELESS, [0, 1])).tolist() == [0, 0]
    assert policy.plan(HOPELESS._replace(born=np.array([0, 0, 1]))).tolist() == [0, 0, 2]


def test_a_request_without_a_length_is_verified_in_full():
    prices = [0, 9, 10, 15, 21, 28, 36, 45, 55, 66]
    old = [[0.0, 0.0], [0.9, 0.0], [1.0, 1.0]]
    view = make_view(np.zeros((3, 2)), prices, history=(old, old))

    def second(policy, view):
        policy.plan(view)
        return policy.plan(view).tolist()

    # The third joined a step ago. The others are a batch of two of then: 2/10 > 2.9/15.
    young = view._replace(born=np.array([0, 0, 1]))
    assert second(Atom(), young) == [0, 0, 2]
    assert second(Atom(lag=1), young) == [0, 0, 0]
    assert second(Atom(), young._replace(caps=np.array([2, 2, 1]), caps_bind=True)) == [0, 0, 1]
    # Nobody has any: the first two steps.
    assert second(Atom(), view._replace(step=1)) == [2, 2, 2]
    assert second(Atom(), view) == [0, 0, 0]


def told(policy, view, accepted):
    """The answer to `view` after a step of it in which so many drafts were accepted."""
    verified = policy.plan(view)
    policy.observe(verified, np.asarray(accepted))
    return policy.plan(view).tolist()


def test_a_request_keeps_room_for_what_it_had_accepted_in_the_step_before():
    # Each its own, not the most of all.
    assert told(Atom(), HOPELESS, [1, 0, 2]) == [1, 0, 2]
    assert told(Atom(anchor=False), HOPELESS, [1, 0, 2]) == [0, 0, 0]
    assert told(Atom(), HOPELESS._replace(caps=np.array([2, 2, 1]), caps_bind=True), [1, 0, 1]) == [1, 0, 1]
    # Of the step before only.
    policy = Atom()
    assert told(policy, HOPELESS, [2, 2, 2]) == [2, 2, 2]
    policy.observe(np.array([2, 2, 2]), np.array([0, 1, 0]))
    assert policy.plan(HOPELESS).tolist() == [0, 1, 0]
    # In a batch that has changed nobody's is known.
    policy = Atom(full_on_change=False)
    policy.observe(policy.plan(HOPELESS), np.array([2, 2, 2]))
    assert policy.plan(of(HOPELESS, [0, 1])).tolist() == [0, 0]


def test_uniform_lengths_are_those_of_the_longest_request():
    old = [[1.0, 0.0], [0.0, 0.0]]
    # 2/10, 3/12: one draft of the first request.
    assert plan(Atom(), GOOD, old) == [1, 0]
    assert plan(Atom(ragged=False), GOOD, old) == [1, 1]
    assert plan(Atom(ragged=False), GOOD, old, caps=[2, 0]) == [1, 0]
    assert plan(Atom(ragged=False), GOOD, BAD) == [0, 0]


def test_uniform_lengths_are_rounded_up_to_a_captured_query_length():
    one, none = [[1.0, 0.0], [0.0, 0.0]], BAD
    # Query lengths count the anchor: 1 is no draft, 2 one draft, 3 the whole block.
    for buckets, after_one, after_none in (
        ("1/2/3", 1, 0),
        ("1/3", 2, 0),
        ("2", 1, 1),
        (3, 2, 2),
        (65, 2, 2),  # none but the whole block: the engine's default
        ("all", 1, 0),
    ):
        policy = Atom(ragged=False, buckets=buckets)
        assert plan(policy, GOOD, one) == [after_one] * 2
        assert plan(policy, GOOD, none) == [after_none] * 2
    # A graph that is longer than the block holds the block.
    assert plan(Atom(ragged=False, buckets="1/65"), GOOD, one) == [2, 2]


def test_uniform_lengths_do_not_look_at_who_was_there_before():
    policy = Atom(ragged=False)
    assert policy.plan(HOPELESS).tolist() == [0, 0, 0]
    # A departure changes nothing; a request without a length makes it the whole block for all.
    assert policy.plan(of(HOPELESS, [0, 1])).tolist() == [0, 0]
    young = HOPELESS._replace(born=np.array([0, 0, 1]))
    assert policy.plan(young).tolist() == [2, 2, 2]
    assert policy.plan(young._replace(caps=np.array([2, 2, 1]), caps_bind=True)).tolist() == [2, 2, 1]


def test_uniform_lengths_have_room_for_the_most_that_any_had_accepted():
    assert told(Atom(ragged=False), HOPELESS, [0, 1, 0]) == [1, 1, 1]
    assert told(Atom(ragged=False, buckets="1/3"), HOPELESS, [0, 1, 0]) == [2, 2, 2]
    assert told(Atom(ragged=False, anchor=False), HOPELESS, [0, 1, 0]) == [0, 0, 0]
    # It may have left since.
    policy = Atom(ragged=False)
    policy.observe(policy.plan(HOPELESS), np.array([0, 0, 1]))
    assert policy.plan(of(HOPELESS, [0, 1])).tolist() == [1, 1]


def test_the_first_versions_floor():
    for ragged in (True, False):
        assert plan(Atom(ragged=ragged), BAD, BAD) == [0, 0]
        assert plan(Atom(ragged=ragged, floor=1), BAD, BAD) == [1, 1]
        assert plan(Atom(ragged=ragged, floor=1), BAD, BAD, caps=[0, 2]) == [0, 1]


def test_a_step_with_a_prompt_in_it_verifies_whole_blocks():
    prices = 10.0 ** np.arange(12)
    assert plan(Atom(), BAD, BAD, prices) == [0, 0]
    for policy in (Atom(), Atom(ragged=False), Atom(full_on_change=False)):
        assert plan(policy, BAD, BAD, prices, prefill_tokens=3) == [2, 2]
        assert plan(policy, BAD, BAD, prices, prefill_tokens=3, caps=[2, 1]) == [2, 1]


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("table", value) for value in ("graphs", 1)),
        *((name, value) for name in ("lag", "floor") for value in (-1, True, 1.5)),
        *((name, value) for name in ("ragged", "full_on_change", "anchor") for value in (1, "yes")),
    ],
)
def test_parameters_out_of_range(name, value):
    with pytest.raises(InputError, match=f"field '{name}'.*expected"):
        Atom(**{name: value})


@pytest.mark.parametrize("value", ["", "some", "3/1", "0/3", "1/1", "1/66", 0, True, 2.5, "1-3"])
def test_query_lengths_that_are_none(value):
    with pytest.raises(InputError, match=r"field 'buckets'.*expected 'all', or increasing query lengths in 1\.\.65"):
        Atom(ragged=False, buckets=value)


def test_parameters_of_the_other_layout_are_refused():
    with pytest.raises(InputError, match=r"field 'buckets': belongs to uniform lengths.*expected ragged=false"):
        Atom(buckets="1/3")
    with pytest.raises(InputError, match="field 'full_on_change': belongs to ragged lengths"):
        Atom(ragged=False, full_on_change=False)


def test_lossless_whatever_the_lag():
    # Without lag by the early stop, with one by the age of all that is read.
    assert Atom().traits == Traits(confidence_age=2)
    assert Atom(lag=0).traits == Traits()
    # A smallest graph is a floor.
    assert Atom(ragged=False, buckets="3/5").traits == Traits(confidence_age=2, floor=2)
    assert Atom(floor=1).traits == Traits(confidence_age=2, floor=1, needs_gamma=1)


def test_the_compiled_form_remembers_each_outcome():
    pytest.importorskip("numba")
    from dsim.kernel.cache import kernel_observe, kernel_plan

    rng, policy = np.random.default_rng(3), Atom(lag=1)
    kernel, state = policy.kernel(), policy.kernel().memory(30)
    for requests in (1, 7, 8, 30, 30):
        old = np.zeros((requests, 64))
        view = make_view(old, np.arange(requests * 65 + 1.0) + 9, history=(old,), step=4)
        for _ in range(3):
            answer = policy.plan(view)
            assert kernel_plan(kernel, view, state).tolist() == answer.tolist()
            accepted = rng.integers(answer // 2, answer + 1)
            policy.observe(answer, accepted)
            kernel_observe(kernel, answer, accepted, state)
        assert 0 < answer.min() < 64


@pytest.mark.slow
def test_under_load_the_engine_verifies_whole_blocks():
    """The table of docs/policies.md, at one seed: tokens verified a request and step, and throughput."""
    specs = ("dspark:lag=2", "atom", "atom:full_on_change=false", "atom:ragged=false")
    arms = [{"name": spec, "policy": spec, "drafter": "dspark"} for spec in specs]
    scenario = load_scenario("decode-node", {"arms": arms})
    rows = {(spec, n): simulate(scenario, Point(spec, 0, users=n)).row for spec in specs for n in (64, 256)}

    def against_today(spec, users):
        return rows[spec, users]["throughput_tok_s"] / rows[specs[0], users]["throughput_tok_s"] - 1

    tokens = {key: row["verification_budget"] for key, row in rows.items()}
    assert tokens["atom", 64] == pytest.approx(5.6, abs=0.1)
    assert tokens["atom:full_on_change=false", 64] == pytest.approx(2.4, abs=0.1)
    assert tokens["atom", 256] > 5.95
    assert tokens["atom:ragged=false", 64] > 5.95
    assert against_today("atom", 64) == pytest.approx(-0.102, abs=0.02)
    assert against_today("atom:full_on_change=false", 64) == pytest.approx(-0.258, abs=0.02)
    assert against_today("atom", 256) < -0.6
