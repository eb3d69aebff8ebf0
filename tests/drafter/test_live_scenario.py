"""Live drafting from a scenario: keys, labels, errors, the cluster around it, and the experiments."""

from __future__ import annotations

import importlib

import numpy as np
import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from dsim.drafter.build import DrafterFile, write_drafter  # noqa: E402
from dsim.drafter.sources import _drafter, open_live  # noqa: E402
from dsim.errors import InputError  # noqa: E402
from dsim.scenario import Point, check_scenario, simulate  # noqa: E402
from dsim.schema import load_scenario, parse_scenario  # noqa: E402
from experiments import ab, pareto  # noqa: E402
from experiments._common import parser, scenario_of  # noqa: E402

torch.set_num_threads(1)

LABEL = "live:tiny-0 (random weights):dspark:first-3-of-7:untrained:cpu"
RAW = {
    "name": "alive",
    "cluster": {"max_seqs": 4},
    "drafts": {"source": "live", "gamma": 3, "live": {"target": "tiny", "device": "cpu"}},
    "workload": {"synthetic": {"lengths": "fixed", "prompt_mean": 200.0, "output_mean": 20.0, "requests": 100}},
    "load": {"users": (1, 3), "scored_min": 6, "scored_per_user": 2},
    "measure": {"mode": "whole-run", "seeds": 1},
    "arms": (
        {"name": "fixed", "policy": "fixed:k=3"},
        {"name": "none", "policy": "none"},
        {"name": "dspark", "policy": "dspark:lag=2"},
        {"name": "mtp1", "policy": "fixed:k=1", "drafter": "mtp", "gamma": 1},
    ),
}


def scenario(**changes):
    raw = {**RAW, **{key: value for key, value in changes.items() if "." not in key}}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if name:
            raw[section] = {**raw.get(section, {}), name: value}
    return parse_scenario(raw)


def test_a_cluster_runs_live():
    rows = {name: simulate(scenario(), Point(name, 0, users=3)).row for name in ("fixed", "none", "dspark", "mtp1")}
    assert rows["fixed"]["drafts_source"] == LABEL
    assert rows["mtp1"]["drafts_source"] == "live:tiny-0 (random weights):mtp:first-1-of-7:untrained:cpu"
    assert all(row["paired"] is False for row in rows.values())
    assert rows["none"]["accepted_length"] == 1.0
    assert 1.05 < rows["fixed"]["accepted_length"] < 4.0
    assert 1.0 < rows["mtp1"]["accepted_length"] < 2.0


def test_a_run_is_the_same_again():
    first, again, other = (simulate(scenario(), Point("dspark", seed, users=3)).records for seed in (0, 0, 1))
    for name, column in first.steps.items():
        np.testing.assert_array_equal(column, again.steps[name])
    assert first.steps["accepted"].tolist() != other.steps["accepted"].tolist()


@pytest.mark.parametrize("prefill", ["colocated", "disaggregated"])
def test_preempted_requests_go_on(prefill):
    small = {"max_seqs": 4, "prefill": prefill, "block_tokens": 4, "kv_blocks": 158}
    result = simulate(scenario(cluster=small), Point("fixed", 0, users=4))
    assert result.records.requests["preemptions"].sum() > 0
    assert 1.05 < result.row["accepted_length"] < 4.0


def test_replicas_share_one_source():
    row = simulate(scenario(cluster={"max_seqs": 4, "replicas": 2}), Point("fixed", 0, users=3)).row
    assert 1.05 < row["accepted_length"] < 4.0


def test_the_online_calibration_wraps_it():
    online = scenario(drafters={"dspark": {"calibration": "online"}})
    assert simulate(online, Point("dspark", 0, users=1)).row["drafts_source"] == f"{LABEL}:online-sts"


def test_a_drafter_file_with_temperatures(tmp_path):
    model, _ = _drafter("tiny", "cpu", "dspark", None)
    path = tmp_path / "mine.safetensors"
    write_drafter(model, path, DrafterFile(model.config, {}, (2.0,) * 7))
    made = {"weights": str(path)}
    row = simulate(scenario(drafters={"dspark": made}), Point("fixed", 0, users=1)).row
    assert row["drafts_source"] == "live:tiny-0 (random weights):dspark:first-3-of-7:cpu"
    plain = scenario(drafters={"dspark": {**made, "calibration": "none"}})
    assert simulate(plain, Point("fixed", 0, users=1)).row["drafts_source"].endswith(":uncalibrated:cpu")
    (tmp_path / "own.json").write_text('{"temperatures": [2, 2, 2, 2, 2, 2, 2]}')
    same = scenario(drafters={"dspark": {**made, "calibration": str(tmp_path / "own.json")}})
    with pytest.raises(InputError, match="the drafter file has these temperatures already"):
        check_scenario(same)


def test_another_temperature():
    hot = scenario(
        drafts={"source": "live", "gamma": 3, "live": {"target": "tiny", "device": "cpu", "temperature": 2.0}}
    )
    assert ":T=2:" in simulate(hot, Point("fixed", 0, users=1)).row["drafts_source"]


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts.preset": "dsv4"}, "'preset' is not used by source = 'live'"),
        ({"drafts.tilt": {"alpha": (0.5,)}}, "'tilt' is not used by source = 'live'"),
        ({"drafts.auc": (0.8,)}, "'auc' shapes synthetic drafts; it is not used by source = 'live'"),
        ({"drafts.source": "synthetic"}, "'live' is not used by source = 'synthetic'"),
        ({"drafts.live": {"target": "large"}}, "got 'large', expected smollm2, tiny or hf:PATH"),
        ({"drafts.live": {"device": "tpu"}}, "device"),
        ({"drafts.live": {"temperature": 0.0}}, "temperature"),
        ({"drafters": {"dspark": {"bank": "x.npz"}}}, "'drafters.dspark.bank' is not used by drafts.source = 'live'"),
        ({"drafters": {"dspark": {"tilt_to": "dsv4"}}}, "'drafters.dspark.tilt_to' is not used"),
        (
            {"arms": ({"name": "a", "policy": "none", "drafter": "own"},), "drafters": {"own": {}}},
            "own.weights' is miss",
        ),
        (
            {"drafts": {}, "drafters": {"dspark": {"weights": "x.safetensors"}}},
            "'drafters.dspark.weights' is not used by drafts.source = 'tilted'",
        ),
    ],
)
def test_keys_without_effect_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        scenario(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": {"source": "live", "gamma": 9, "live": {"target": "tiny"}}}, "drafts blocks of 7, got 9"),
        ({"drafters": {"dspark": {"calibration": "none"}}}, "changes nothing"),
        ({"drafters": {"dspark": {"weights": "absent.safetensors"}}}, "absent.safetensors: is not there"),
        ({"drafters": {"dspark": {"weights": "absent"}}}, "unknown drafter weights, got 'absent', expected one of"),
        ({"drafts.domains": {"poems": 1.0}}, "the draft source has no such domain"),
        (
            {"drafts": {"source": "live", "gamma": 3, "live": {"target": "hf:/absent/model", "device": "cpu"}}},
            "is not there",
        ),
    ],
)
def test_what_is_not_there_is_named_before_the_work(changes, message):
    with pytest.raises(InputError, match=message):
        check_scenario(scenario(**changes))


def test_a_missing_target_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path))
    options = {"device": "cpu", "drafter": "dspark", "weights": "smollm2-dspark", "gamma": 3, "seed": 0}
    with pytest.raises(InputError, match="run `make target-model`"):
        open_live(target="smollm2", **options)


@pytest.mark.parametrize("name", ["torch", "gguf"])
def test_a_missing_library_says_what_to_install(name, monkeypatch):
    real = importlib.import_module

    def absent(module, package=None):
        if module == "dsim.drafter.sources":
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(module, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    message = rf"needs '{name}', which is not installed: pip install 'dspark-sim\[drafter\]'"
    with pytest.raises(InputError, match=message):
        check_scenario(scenario())


# -- the experiments -------------------------------------------------------------------------------------

TINY = [
    *("--set", "drafts.live.target=tiny"),
    *("--set", "drafts.live.device=cpu"),
    *("--set", "load.scored_min=4"),
    *("--set", "workload.synthetic.output_mean=12"),
    *("--jobs", "1"),
]


def test_live_has_a_scenario_of_its_own():
    shipped = scenario_of(parser("x").parse_args(["--drafts", "live"]))
    assert shipped.name == "live-node"
    assert load_scenario("live-node") == shipped
    assert scenario_of(parser("x").parse_args([])).name == "decode-node"
    named = parser("x").parse_args(["--drafts", "live", "--scenario", "decode-node", "--jobs", "1"])
    assert (scenario_of(named).name, named.jobs) == ("decode-node", 1)


def test_live_runs_stay_in_one_process():
    args = parser("x").parse_args(["--drafts", "live", "--jobs", "2"])
    scenario_of(args)
    try:
        assert (args.jobs, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(1)


def test_pareto_runs_live(tmp_path, capsys):
    pareto.main(["--drafts", "live", "--out", str(tmp_path), "--set", "load.users=[1, 3]", *TINY])
    df = pd.read_csv(tmp_path / "pareto.csv")
    assert df["arm"].drop_duplicates().tolist() == ["none", "mtp1", "fixed5", "dspark"]
    assert set(df.loc[df["arm"] == "dspark", "drafts_source"]) == {
        "live:tiny-0 (random weights):dspark:first-5-of-7:untrained:cpu"
    }
    assert (df.loc[df["arm"] == "fixed5", "accepted_length"] > 1.0).all()
    assert "means over seeds" in capsys.readouterr().out


def test_an_unpaired_comparison_says_so(tmp_path, capsys):
    ab.main(
        [
            "--drafts",
            "live",
            "--a",
            "mtp1",
            "--b",
            "dspark",
            "--users",
            "2",
            "--seeds",
            "5",
            "--out",
            str(tmp_path),
            *TINY,
        ]
    )
    assert "not paired: the two arms saw the same requests" in capsys.readouterr().out
    assert not pd.read_csv(tmp_path / "ab_runs.csv")["paired"].any()
