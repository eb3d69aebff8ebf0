"""`[drafters.NAME] confidence` and `like`: what a scenario file may say, and what its runs then do."""

from __future__ import annotations

import numpy as np
import pytest
from banks import recorded_bank, write_shipped

from dsim import scenario as runs
from dsim.drafts import write_bank
from dsim.errors import InputError
from dsim.scenario import Point, check_scenario, simulate
from dsim.schema import load_scenario, parse_scenario

SMALL = {"load.scored_min": 30, "load.scored_per_user": 2, "drafts.source": "synthetic"}


def scenario(**overrides):
    return load_scenario("decode-node", SMALL | {key.replace("__", "."): value for key, value in overrides.items()})


def drafter(name, **keys):
    """The arm `dspark` with a drafter of its own that is like dspark."""
    return {"arms.6.drafter": name, f"drafters.{name}": {"like": "dspark", **keys}}


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Small banks in the place of those that ship."""
    write_shipped(tmp_path / "banks")
    monkeypatch.setattr("dsim.drafts.bank._shipped_folder", lambda: tmp_path / "banks")
    runs._bank.cache_clear()
    yield
    runs._bank.cache_clear()


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ("recorded", "recorded:tiny:dspark:first-5-of-7"),
        ("tilted", "tilted:dsv4:recorded:tiny:dspark:first-5-of-7"),
        ("synthetic", "synthetic:dsv4:dspark"),
    ],
)
def test_a_drafter_like_another_drafts_the_same_and_knows_otherwise(shipped, source, label):
    at = Point("fixed5", 0, users=4)
    plain = simulate(scenario(drafts__source=source), at)
    for confidence, ending in (
        ("recorded", ""),
        ("perfect", ":perfect"),
        ("constant:domain", ":constant-by-domain"),
        ("shuffled", ":shuffled"),
        ("overconfident:0.3", ":overconfident-0.3"),
        ({"chat": -1.5}, ":bias(chat-1.5)"),
    ):
        keys = {"arms.3.drafter": "own", "drafters.own": {"like": "dspark", "confidence": confidence}}
        study = load_scenario("decode-node", SMALL | {"drafts.source": source} | keys)
        assert parse_scenario(study.canonical()) == study
        found = simulate(study, at)
        assert found.row["drafts_source"] == label + ending
        # A policy that does not look at confidences cannot tell them apart.
        for name, column in plain.records.steps.items():
            assert np.array_equal(column, found.records.steps[name]), name


def test_a_policy_that_looks_decides_otherwise_and_better_the_more_it_knows(shipped):
    point, found = Point("dspark", 0, users=32), {}
    for confidence in ("recorded", "perfect", "shuffled"):
        study = load_scenario("decode-node", SMALL | drafter("own", confidence=confidence))
        found[confidence] = simulate(study, point).row
    assert found["perfect"]["throughput_tok_s"] > found["recorded"]["throughput_tok_s"]
    assert found["recorded"]["throughput_tok_s"] > 1.03 * found["shuffled"]["throughput_tok_s"]
    assert found["perfect"]["acceptance_rate"] > found["shuffled"]["acceptance_rate"] + 0.05


def test_online_calibration_learns_on_top_of_a_distortion():
    point, keys = Point("fixed5", 0, users=16), {"arms.3.policy": "threshold:t=0.6,on=survival"}
    budgets = {}
    for name, confidence, calibration in (
        ("own", "recorded", "bank"),
        ("worse", "overconfident:0.3", "bank"),
        ("mended", "overconfident:0.3", "online"),
    ):
        more = {"drafters.dspark.confidence": confidence, "drafters.dspark.calibration": calibration}
        row = simulate(load_scenario("decode-node", SMALL | keys | more), point).row
        budgets[name] = row["verification_budget"]
    assert row["drafts_source"] == "synthetic:dsv4:dspark:overconfident-0.3:online-sts"
    assert budgets["own"] < budgets["mended"] < budgets["worse"]


def test_raw_confidences_are_a_matter_of_calibration(tmp_path):
    write_bank(recorded_bank(5, temperatures=(2.0,) * 5), tmp_path / "cooled.npz")
    keys = {"drafters.dspark.bank": str(tmp_path / "cooled.npz"), "drafts.source": "recorded"}
    keys |= {"drafters.dspark.calibration": "none", "drafters.dspark.confidence": {"chat": 1.0}}
    row = simulate(load_scenario("decode-node", SMALL | keys), Point("threshold", 0, users=4)).row
    assert row["drafts_source"] == "recorded:tiny:dspark:bias(chat+1):uncalibrated"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"drafters.dspark.confidence": "best"},
            r"'drafters\.dspark\.confidence'.*got 'best', expected recorded, perf",
        ),
        ({"drafters.dspark.confidence": "overconfident:2"}, r"drafters\.dspark\.confidence.*0 < ECE < 0\.5"),
        ({"drafters.dspark.confidence": {"chat": 0}}, r"drafters\.dspark\.confidence.*changes nothing"),
        ({"drafters.dspark.confidence": {"chat": "x"}}, r"confidence\.chat.*got 'x', expected a number"),
        (
            {"drafters.dspark.confidence": "perfect", "drafters.dspark.calibration": "none"},
            "'calibration' is not used by confidence = 'perfect'",
        ),
        (
            {"drafters.dspark.confidence": "constant:domain", "drafters.dspark.calibration": "t.json"},
            "'calibration' is not used by confidence = 'constant:domain'",
        ),
        ({"drafters.own": {"like": "own"}}, r"'drafters\.own\.like' changes nothing"),
        ({"drafters.own": {"like": "dspark", "bank": "x.npz"}}, r"'drafters\.own\.like' changes nothing"),
        (
            {"drafts.source": "tilted", "drafters.own": {"like": "dspark", "bank": "x.npz", "tilt_to": "dsv4:mtp"}},
            r"'drafters\.own\.like' changes nothing",
        ),
        (
            {"drafts.source": "live", "drafters.own": {"like": "dspark", "weights": "x.safetensors"}},
            r"'drafters\.own\.like' changes nothing",
        ),
        (
            {"drafts.source": "live", "drafters.dspark.confidence": "perfect"},
            r"'drafters\.dspark\.confidence' is not used by drafts\.source = 'live'",
        ),
        (
            {"drafts.source": "recorded", **drafter("own", confidence="perfect"), "drafters.own.like": "mine"},
            r"drafter 'own' has no bank: 'drafters\.own\.bank' is missing for 'recorded'",
        ),
        (
            {f"drafters.{name}.confidence": "perfect" for name in ("dspark", "mtp")}
            | {"drafts.tilt": {"confidence": [0.5]}},
            r"'drafts\.tilt\.confidence' is not used: every drafter's confidences are replaced",
        ),
    ],
)
def test_what_a_scenario_may_not_say(overrides, message):
    with pytest.raises(InputError, match=message):
        load_scenario("decode-node", SMALL | overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"drafters.dspark.confidence": {"poetry": 1.0}},
            r"'drafters\.dspark\.confidence\.poetry': the bank has no such domain, got 1\.0, expected one of code",
        ),
        (
            {"drafters.dspark.confidence": "overconfident:0.001"},
            r"'drafters\.dspark\.confidence': the confidences of drafter 'dspark' cannot have this ECE, got 0\.001",
        ),
        (drafter("own") | {"drafters.own.like": "eagle3"}, r"preset 'dsv4' has no drafter 'eagle3'"),
    ],
)
def test_what_the_bank_cannot_do(overrides, message):
    study = load_scenario("decode-node", SMALL | overrides)
    with pytest.raises(InputError, match=message):
        check_scenario(study, ["dspark"])
