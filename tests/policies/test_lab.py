"""Hand-computed: one knob at a time; with DSpark's settings it is DSpark."""

from __future__ import annotations

import numpy as np
import pytest

from dsim import check_policy, load_policy
from dsim.errors import InputError
from dsim.policy import Traits, make_view
from dsim.scenario import Point, simulate
from dsim.schema import load_scenario
from policies.lab import Lab

GOOD = [[1.0, 1.0], [1.0, 1.0]]
BAD = [[0.0, 0.0], [0.0, 0.0]]
# 10 ms with two requests and no draft, then 2 ms a draft.
LINEAR = [0, 0, 10, 12, 14, 16, 18]


def plan(policy, now, *older, verify_ms=LINEAR, **kwargs):
    return policy.plan(make_view(now, verify_ms, history=older, **kwargs)).tolist()


def random_views(depth, seed):
    rng = np.random.default_rng(seed)
    for requests in (1, 2, 5, 16, 40, 97):
        for _ in range(6):
            blocks = rng.choice([0.0, 0.3, 0.5, 0.8, 0.9, 1.0], (depth + 1, requests, 4))
            jumps = np.add.accumulate(rng.choice([0.0, 0.0, 0.05, 0.8], requests * 5 + 9)) + 4
            caps = rng.integers(0, 5, requests) if rng.random() < 0.5 else None
            prefill = int(rng.integers(0, 9)) if rng.random() < 0.5 else 0
            yield make_view(blocks[0], jumps, history=tuple(blocks[1:]), caps=caps, prefill_tokens=prefill)


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_with_dsparks_settings_it_is_dspark(lag):
    ours, theirs = Lab(capacity_lag=lag), load_policy(f"dspark:lag={lag}")
    assert ours.traits == theirs.traits
    for view in random_views(lag, seed=lag):
        assert ours.plan(view).tolist() == theirs.plan(view).tolist()


def test_with_algorithm_1s_settings_it_is_algorithm_1():
    ours, theirs = Lab(search="early-stop", capacity_lag=0), load_policy("dspark-alg1")
    assert ours.traits == theirs.traits
    for view in random_views(0, seed=9):
        assert ours.plan(view).tolist() == theirs.plan(view).tolist()


@pytest.mark.parametrize(
    ("ours", "theirs"), [("lab", "dspark:lag=2"), ("lab:search=early-stop,capacity_lag=0", "dspark-alg1")]
)
def test_a_run_of_it_is_a_run_of_theirs(ours, theirs):
    steps = []
    for policy in (ours, theirs):
        keys = {"load.scored_min": 20, "load.scored_per_user": 1, "arms.6.policy": policy}
        steps.append(simulate(load_scenario("decode-node", keys), Point("dspark", 0, users=20)).records.steps)
    assert steps[0].keys() == steps[1].keys()
    for name, column in steps[0].items():
        assert np.array_equal(column, steps[1][name]), name


def test_the_two_lags_are_two():
    # Capacity: 4 drafts if it goes by GOOD (2/10 < 3/12 < ... < 6/18), none if it goes by BAD.
    half = [[0.5, 0.0], [0.5, 0.5]]
    assert plan(Lab(capacity_lag=2, allocation_lag=0), half, BAD, GOOD) == [1, 2]
    assert plan(Lab(capacity_lag=1, allocation_lag=0), half, BAD, GOOD) == [0, 0]
    # Ranking: K = 2 from GOOD's first position a step ago, spent by what was best two steps ago.
    first = [[1.0, 0.0], [1.0, 0.0]]
    assert plan(Lab(capacity_lag=1, allocation_lag=2), GOOD, first, [[0.9, 0.9], [0.1, 0.1]]) == [2, 0]
    assert plan(Lab(capacity_lag=1, allocation_lag=2), GOOD, first, [[0.1, 0.1], [0.9, 0.9]]) == [0, 2]


def test_a_new_request_counts_as_certain_in_an_old_ranking():
    view = make_view([[0.1, 0.1], [0.9, 0.9]], LINEAR, history=([[1.0, 1.0], [0.6, 0.6]],))
    # Old survivals 1, 1 | 0.6, 0.36: 2/10 < 3/12 < 4/14 < 4.6/16 = 0.2875 > 4.96/18, so K = 3.
    assert Lab(capacity_lag=1, allocation_lag=1).plan(view).tolist() == [2, 1]


def test_caps_bind_an_old_ranking_too():
    assert plan(Lab(capacity_lag=1, allocation_lag=1), GOOD, GOOD, caps=[1, 0]) == [1, 0]


def test_the_early_stop_stays_before_a_valley_that_the_global_search_crosses():
    # Theta: 1, 2/3, 3/2.5.
    for lag in (0, 1):
        view = make_view([[1.0, 1.0]], [0, 1, 3, 2.5], history=([[1.0, 1.0]],) * lag)
        assert Lab(capacity_lag=lag).plan(view).tolist() == [2]
        assert Lab(capacity_lag=lag, search="early-stop").plan(view).tolist() == [0]


def test_a_priced_draft_makes_drafts_worth_more():
    # 1/4 > 1.2/5 without the drafter's 2 ms, 1/6 < 1.2/7 with them.
    for price, expected in (("verify", 0), ("draft", 1), ("step", 1)):
        policy = Lab(capacity_lag=0, price=price)
        assert plan(policy, [[0.2]], verify_ms=[0, 4, 5], draft_ms=2.0) == [expected]


def test_the_whole_step_has_host_time():
    # 9 ms of host hide everything up to 9 ms: the draft is free. Only `step` sees that.
    view = make_view([[0.01]], [0, 4, 5], draft_ms=2.0)._replace(host_hidden_ms=9.0)
    assert [Lab(capacity_lag=0, price=price).plan(view).tolist() for price in ("draft", "step")] == [[0], [1]]
    # Exposed host time is paid by every step: 1/(6 + 100) < 1.1/(7 + 100).
    view = make_view([[0.1]], [0, 4, 5], draft_ms=2.0)._replace(host_exposed_ms=100.0)
    assert [Lab(capacity_lag=0, price=price).plan(view).tolist() for price in ("draft", "step")] == [[0], [1]]


@pytest.mark.parametrize(
    ("lookup", "believed"),
    [
        # Timed at 2, 4 and 6 tokens: 10, 14 and 20 ms; tokens 1 to 6 in the step.
        ("next", [10, 10, 14, 14, 20, 20]),
        ("linear", [10, 10, 12, 14, 17, 20]),
        ("floor", [10, 10, 10, 14, 14, 20]),
    ],
)
def test_a_table_is_read_by_its_rule(lookup, believed):
    real = [0.0, 9.0, 10.0, 13.0, 14.0, 19.0, 20.0]
    view = make_view(np.full((1, 5), 0.9), real)
    policy = Lab(capacity_lag=0, lookup=lookup, probes=2)
    assert policy._prices(view).tolist() == believed
    assert Lab(capacity_lag=0)._prices(view).tolist() == real[1:]
    # It decides by what it believes: theta of 0 to 5 drafts at the survivals 0.9, 0.81, ...
    tau = np.add.accumulate([1.0, *np.float32(0.9) ** np.arange(1, 6)])
    assert policy.plan(view).tolist() == [int(np.argmax(tau / believed))]


def test_a_table_knows_the_cliff_but_not_what_a_wide_net_misses():
    # Captured up to 4 tokens; beyond that everything takes 50 ms.
    real = np.array([0.0, 5.0, 5.0, 6.0, 6.0, 50.0, 50.0, 50.0, 50.0])
    view = make_view(np.ones((2, 3)), real, captured_sizes=[1, 2, 4])
    captured = Lab(capacity_lag=0, lookup="linear")
    assert captured._prices(view).tolist() == [5.0, 5.5, 6.0, 50.0, 50.0, 50.0, 50.0]
    doubling = Lab(capacity_lag=0, lookup="linear", probes="doubling")
    assert doubling._prices(view).tolist() == [5.0, 5.5, 6.0, 17.0, 28.0, 39.0, 50.0]
    # Timed sizes beyond the curve are left out; where none is left its end is taken.
    assert Lab(capacity_lag=0, lookup="linear", probes=100)._prices(view).tolist() == [50.0] * 7


def test_where_nothing_is_captured_every_size_was_timed():
    view = make_view(np.ones((2, 2)), [0, 9, *LINEAR[2:]])
    for lookup in ("next", "linear", "floor"):
        assert Lab(lookup=lookup)._prices(view).tolist() == LINEAR[2:]


def test_a_running_maximum_hides_a_dip():
    view = make_view([[0.9, 0.1]], [0.0, 10.0, 14.0, 12.0])
    assert Lab(capacity_lag=0).plan(view).tolist() == [2]  # 1.99 / 12 > 1.9 / 14 > 1 / 10
    flat = Lab(capacity_lag=0, running_max=True)
    assert flat._prices(view).tolist() == [10.0, 14.0, 14.0]
    assert Lab(capacity_lag=0, lookup="next", probes=1, running_max=True)._prices(view).tolist() == [10.0, 14.0, 14.0]


def test_a_table_is_the_views_own():
    policy = Lab(capacity_lag=0, lookup="next", probes=2)
    for scale in (1.0, 2.0, 1.0):
        view = make_view([[0.5, 0.5]], scale * np.array([0.0, 5.0, 6.0, 7.0]))
        # Timed at 2 tokens only: its price holds below, and there is no second size to go on from.
        assert policy._prices(view).tolist() == [6.0 * scale] * 3


def test_what_is_claimed_to_be_lossless():
    def claims(**knobs):
        return Lab(**knobs).traits.lossless

    assert claims()
    assert claims(capacity_lag=1, allocation_lag=3)
    assert claims(capacity_lag=1, search="early-stop")
    assert claims(capacity_lag=0, search="early-stop")
    assert not claims(capacity_lag=0)
    # The count depends on the current confidences of drafts that the old ranking need not admit.
    assert not claims(capacity_lag=0, search="early-stop", allocation_lag=1)
    assert Lab(capacity_lag=1, allocation_lag=3).traits == Traits(confidence_age=3)


@pytest.mark.parametrize(
    "spec",
    [
        "lab",
        "lab:capacity_lag=0",
        "lab:search=early-stop,capacity_lag=0",
        "lab:search=early-stop,capacity_lag=4",
        "lab:allocation_lag=16",
        "lab:capacity_lag=16,allocation_lag=1,price=step",
        "lab:lookup=next",
        "lab:lookup=linear,price=draft",
        "lab:lookup=floor,running_max=true",
        "lab:lookup=next,probes=64",
        "lab:lookup=linear,probes=doubling",
    ],
)
def test_conforms(spec):
    rules = check_policy(spec)
    assert ("lossless" in rules) == load_policy(spec).traits.lossless


def test_the_unclaimed_ones_do_leak():
    from dsim.conformance import ConformanceError

    for knobs in ({"capacity_lag": 0}, {"capacity_lag": 0, "search": "early-stop", "allocation_lag": 1}):
        policy = Lab(**knobs)
        policy.traits = Traits(confidence_age=policy.traits.confidence_age, lossless=True)
        with pytest.raises(ConformanceError, match=r"depends on the tokens it is about|which is not verified"):
            check_policy(policy)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"search": "local"}, r"field 'search': got 'local', expected one of global, early-stop"),
        ({"price": "all"}, r"field 'price': got 'all', expected one of verify, draft, step"),
        ({"lookup": "ceil"}, r"field 'lookup': got 'ceil', expected one of exact, next, floor, linear"),
        ({"capacity_lag": -1}, r"field 'capacity_lag': got -1, expected an integer >= 0"),
        ({"allocation_lag": True}, r"field 'allocation_lag': got True"),
        ({"probes": 8}, r"field 'probes'.*is not used by lookup = 'exact'"),
        ({"lookup": "next", "probes": 0}, r"field 'probes': got 0, expected captured, doubling or an integer >= 1"),
        ({"lookup": "next", "probes": True}, r"field 'probes': got True"),
        ({"lookup": "next", "probes": "some"}, r"field 'probes': got 'some'"),
        ({"running_max": 1}, r"field 'running_max': got 1, expected true or false"),
    ],
)
def test_knobs_out_of_range(knobs, message):
    with pytest.raises(InputError, match=message):
        Lab(**knobs)


def test_from_a_spec():
    found = load_policy("lab:search=early-stop,capacity_lag=0,lookup=linear,probes=64,price=step")
    assert found == Lab(search="early-stop", capacity_lag=0, price="step", lookup="linear", probes=64)
