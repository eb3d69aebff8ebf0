"""Looking on: what a probe sees, that it changes nothing, and the regret worked out by hand."""

from __future__ import annotations

import copy
import doctest

import numpy as np
import pytest
from standins import ConstantCost, ScriptedDrafts, ScriptedPolicy, fixed_arrivals

import dsim.drafts.quality
import dsim.drafts.reliability
import dsim.probe
from dsim.cluster import run_cluster
from dsim.errors import InputError
from dsim.options import HostCost, ReplicaConfig
from dsim.policy import load_policy, make_view
from dsim.prices import DraftCost
from dsim.probe import StepRegret, watched
from dsim.scenario import Point, simulate
from dsim.schema import load_scenario
from dsim.sweep import grid, run
from dsim.telemetry import Records
from dsim.workload import ClosedLoop, RequestStream

SMALL = {"load.scored_min": 20, "load.scored_per_user": 1}


class Notes:
    """A probe that keeps everything."""

    def __init__(self):
        self.seen = []

    def step(self, view, lengths, alpha):
        self.seen.append((view, lengths.copy(), alpha))

    def columns(self, records):
        return {"noted": float(len(self.seen))}


class KnownDrafts(ScriptedDrafts):
    """Scripted outcomes; the chance of draft k of request r at position p is a number that says so."""

    def alpha(self, requests, positions):
        return (requests[:, None] + 1) / 10 + positions[:, None] / 1000 + np.arange(self.gamma) / 100


def bytes_of(records):
    return b"".join(column.tobytes() for part in (records.steps, records.requests) for column in part.values())


def served(drafts, policy, replicas=1, users=2):
    trace = fixed_arrivals([0.0, 0.0, 0.0, 0.0], prompt=8, output=5)
    return run_cluster(
        replicas=replicas,
        config=ReplicaConfig(max_seqs=4, token_budget=64),
        cost=ConstantCost(step_ms=2.0, token_ms=0.1),
        drafts=drafts,
        draft_cost=DraftCost(),
        policy=policy,
        stream=RequestStream(trace, {"any": 1.0}, order_seed=1, domain_seed=2, order="trace"),
        load=ClosedLoop(users=users, scored=4, warmup_per_user=1, steady=False),
    )


def test_the_docstrings_examples():
    for module in (dsim.probe, dsim.drafts.quality, dsim.drafts.reliability):
        found = doctest.testmod(module)
        assert found.attempted >= 2
        assert found.failed == 0


# -- regret ----------------------------------------------------------------------------------------------


def losses(confidence, prices, lengths, alpha, **changes):
    regret = StepRegret()
    view = make_view(confidence, prices)._replace(**changes)
    regret.step(view, np.array(lengths), np.array(alpha))
    return regret.loss


def test_regret_of_two_requests():
    # Survivals 0.8, 0.4 | 0.5, 0.05. Tokens by drafts: 2, 2.8, 3.3, 3.7, 3.75; milliseconds: 10, 10, 11, 15, 16, so
    # 0.2, 0.28, 0.3, 0.247, 0.234 a millisecond: the best is two drafts.
    prices, alpha = [0, 0, 10, 10, 11, 15, 16], [[0.8, 0.5], [0.5, 0.1]]
    seen = np.full((2, 2), 0.5)
    best = 3.3 / 11
    assert losses(seen, prices, [1, 1], alpha) == pytest.approx([0.0])
    assert losses(seen, prices, [0, 0], alpha) == pytest.approx([1 - 0.2 / best])
    assert losses(seen, prices, [2, 0], alpha) == pytest.approx([1 - (3.2 / 11) / best])
    assert losses(seen, prices, [0, 1], alpha) == pytest.approx([1 - (2.5 / 10) / best])
    assert losses(seen, prices, [2, 2], alpha) == pytest.approx([1 - (3.75 / 16) / best])


def test_regret_prices_the_whole_step():
    # 1 token in 4 ms or 1.2 in 5: none is best. With 2 ms of drafting: 1 in 6 or 1.2 in 7, and the draft is.
    assert losses([[0.5]], [0, 4, 5], [0], [[0.2]]) == pytest.approx([0.0])
    assert losses([[0.5]], [0, 4, 5], [0], [[0.2]], draft_ms=2.0) == pytest.approx([1 - (1 / 6) / (1.2 / 7)])
    # Host time that hides it all: the draft is free.
    assert losses([[0.5]], [0, 4, 5], [0], [[0.2]], host_hidden_ms=9.0) == pytest.approx([1 - 1 / 1.2])


def test_regret_knows_caps_prompts_that_end_and_clairvoyance():
    # The second draft is out of reach: it is no loss not to take it.
    caps = {"caps": np.array([1]), "caps_bind": True}
    assert losses([[0.5, 0.5]], [0, 4, 4, 4], [1], [[0.9, 0.9]], **caps) == pytest.approx([0.0])
    assert losses([[0.5, 0.5]], [0, 4, 4, 4], [1], [[0.9, 0.9]]) == pytest.approx([1 - 1.9 / 2.71])
    # A prompt that ends in the step has its token whatever is verified: 2 in 4 ms or 2.3 in 5.
    assert losses([[0.5]], [0, 4, 5], [1], [[0.3]], sampling=2) == pytest.approx([1 - (2.3 / 5) / (2 / 4)])
    assert losses([[0.5]], [0, 4, 5], [1], [[0.3]], accepted=np.array([1])) == []
    assert losses(np.zeros((0, 2)), [0.0], [], np.zeros((0, 2))) == []


def records(low, high):
    return Records(
        steps={}, requests={}, scored=(0, 1), window_ns=(low, high), end_ns=high, replicas=1, colocated=False, gpus=1,
        extrapolated=False,
    )  # fmt: skip


def test_regret_of_the_measuring_window():
    regret = StepRegret()
    regret.start_s, regret.loss = [0.0, 1.0, 2.0, 3.0], [0.9, 0.1, 0.3, 0.8]
    found = regret.columns(records(1_000_000_000, 3_000_000_000))
    assert found == pytest.approx({"regret_mean": 0.2, "regret_p90": 0.28, "regret_p99": 0.298})
    assert np.isnan(list(StepRegret().columns(records(0, 1)).values())).all()


# -- the seams -------------------------------------------------------------------------------------------


def test_a_probe_sees_every_decision_and_the_drafts_it_was_about():
    drafts = KnownDrafts([[1, 0, 1, 1, 0]] * 4, gamma=2)
    policy, notes = ScriptedPolicy(lambda view: np.arange(view.requests) % 3), Notes()
    plain = served(drafts, copy.deepcopy(policy))
    looked_at = served(*watched(drafts, policy, notes))
    assert bytes_of(plain) == bytes_of(looked_at)
    assert len(notes.seen) == len(plain.steps["end_ns"])
    assert [int(lengths.sum()) for _, lengths, _ in notes.seen] == plain.steps["drafts"].tolist()
    view, lengths, alpha = notes.seen[0]
    assert (view.requests, lengths.tolist()) == (2, [0, 1])
    assert alpha == pytest.approx(np.array([[0.1, 0.11], [0.2, 0.21]]))
    view, _, alpha = notes.seen[1]
    # Request 0 verified nothing and moved by one, request 1 had one draft accepted and moved by two.
    assert alpha == pytest.approx(np.array([[0.101, 0.111], [0.202, 0.212]]))


def test_replicas_have_their_own_policy_and_share_the_probe():
    class Counts(ScriptedPolicy):
        def __init__(self):
            self.calls, self.told = 0, 0

        def plan(self, view):
            self.calls += 1
            return np.zeros(view.requests, dtype=np.int64) + self.calls % 2

        def observe(self, verified, accepted):
            self.told += 1
            assert verified.max() <= 1

    policy, notes = Counts(), Notes()
    looked_at = served(*watched(KnownDrafts([[1] * 5] * 4, gamma=2), policy, notes), replicas=2)
    assert bytes_of(looked_at) == bytes_of(served(KnownDrafts([[1] * 5] * 4, gamma=2), Counts(), replicas=2))
    assert set(looked_at.steps["replica"]) == {0, 1}
    assert len(notes.seen) == len(looked_at.steps["end_ns"])
    assert (policy.calls, policy.told) == (0, 0)


@pytest.mark.parametrize("answer", [5, -1, lambda view: "two", lambda view: np.zeros(99, dtype=np.int64)])
def test_an_answer_that_the_engine_refuses_is_the_engines_to_name(answer):
    notes = Notes()
    with pytest.raises(InputError, match=r"policy ScriptedPolicy\(answer="):
        served(*watched(KnownDrafts([[1] * 5] * 4, gamma=2), ScriptedPolicy(answer), notes))
    assert not notes.seen


def test_drafts_whose_chances_are_not_known_have_no_regret():
    with pytest.raises(InputError, match=r"drafts of 'scripted' have no known acceptance probabilities"):
        watched(ScriptedDrafts([[1]], gamma=1), load_policy("none"), StepRegret())


@pytest.mark.parametrize("policy", ["dspark:lag=2", "goodput"])
@pytest.mark.parametrize("calibration", ["bank", "online"])
def test_a_run_that_is_watched_is_the_same_run(policy, calibration):
    keys = {"arms.6.policy": policy, "drafters.dspark.calibration": calibration}
    scenario = load_scenario("decode-node", SMALL | keys)
    point = Point("dspark", 1, users=6)
    plain, seen = simulate(scenario, point), simulate(scenario, point, probe=StepRegret())
    assert bytes_of(plain.records) == bytes_of(seen.records)
    added = {name: value for name, value in seen.row.items() if name not in plain.row}
    assert set(added) == {"regret_mean", "regret_p90", "regret_p99"}
    assert 0 < added["regret_mean"] < added["regret_p99"] < 1
    assert {name: repr(value) for name, value in plain.row.items()} == {
        name: repr(value) for name, value in seen.row.items() if name not in added
    }


def test_regret_is_nothing_for_one_who_knows_and_prices_everything():
    keys = SMALL | {"drafters.dspark.confidence": "perfect", "arms.6.policy": "lab:capacity_lag=0,price=step"}
    row = simulate(load_scenario("decode-node", keys), Point("dspark", 0, users=20), probe=StepRegret()).row
    assert row["regret_p99"] < 1e-6
    host = HostCost(base_ms=2.0, hidden_fraction=0.5)
    keys |= {"cluster.host.base_ms": host.base_ms, "cluster.host.hidden_fraction": host.hidden_fraction}
    row = simulate(load_scenario("decode-node", keys), Point("dspark", 0, users=20), probe=StepRegret()).row
    assert row["regret_p99"] < 1e-6
    keys["arms.6.policy"] = "fixed:k=1"
    row = simulate(load_scenario("decode-node", keys), Point("dspark", 0, users=20), probe=StepRegret()).row
    assert row["regret_mean"] > 0.2


def test_a_sweep_brings_it_back_whatever_the_workers():
    scenario = load_scenario("decode-node", SMALL | {"measure.seeds": 1})
    points = grid(scenario, arms=["none", "fixed5", "oracle"], users=[3])
    tables = [run(scenario, points, jobs=jobs, progress=False, probe=StepRegret).table for jobs in (1, 2)]
    assert tables[0].equals(tables[1])
    assert tables[0].set_index("arm")["regret_mean"].notna().to_dict() == {
        "none": False,  # nothing is drafted
        "fixed5": True,
        "oracle": False,  # knows more than anybody can
    }
    assert "regret_mean" not in run(scenario, points[:1], progress=False).table
