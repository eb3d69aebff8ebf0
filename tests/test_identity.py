"""The hash of a run: other for whatever can change its result, the same for what cannot."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from banks import recorded_bank

from dsim import identity
from dsim.drafts import write_bank
from dsim.errors import InputError
from dsim.identity import ABOVE_RUNS, UnknowableError, arm_identity, callable_identity, run_key
from dsim.probe import StepRegret
from dsim.profile import load_profile, write_profile
from dsim.scenario import Point
from dsim.schema import load_scenario
from experiments._common import windows_of

ROOT = Path(__file__).resolve().parents[1]


def key(overrides=None, *, arm="dspark", users=8, rate=None, seed=0, **options):
    scenario = load_scenario("decode-node", overrides or {})
    point = Point(arm, seed, users=None if rate else users, rate_scale=rate)
    return run_key(arm_identity(scenario, arm, open_loop=rate is not None, **options), scenario, point)


@pytest.fixture(scope="module")
def usual():
    return key()


@pytest.mark.parametrize(
    "overrides",
    [
        {"name": "another study"},
        {"measure.seeds": 50},
        {"load.users": [8, 9, 10]},
        {"load.rate_scales": [3.0]},
        {"load.window_s": 3.0},
        {"load.requests": 7},
        {"load.scored_min": 150},  # 8 users score 200 requests either way
        {"load.scored_per_user": 5, "load.scored_min": 200},
        {"arms.0.policy": "fixed:k=2"},
        {"arms.6.gamma": 5},  # as the scenario's
        {"drafters.mtp.cost_scale": 2.0},
    ],
)
def test_what_a_run_does_not_read_is_no_part_of_it(usual, overrides):
    overrides = {"load.scored_min": 200} | overrides
    if overrides.get("load.scored_min") == 150:
        overrides["load.scored_per_user"] = 25
    assert key(overrides) == key({"load.scored_min": 200})


@pytest.mark.parametrize(
    "overrides",
    [
        {"arms.6.policy": "dspark:lag=3"},
        {"arms.6.gamma": 4},
        {"drafts.gamma": 4},
        {"arms.6.drafter": "dflash"},
        {"drafters.dspark.cost_scale": 2.0},
        {"drafters.dspark.confidence": "perfect"},
        {"drafts.spread": 1.0},
        {"drafts.tilt.alpha": [0.5]},
        {"drafts.domains": {"math": 1.0}},
        {"drafts.preset": "qwen3-4b"},
        {"cost.fit": "additive"},
        {"cost.profile": "rtx5090-qwen3-4b-dflash16"},
        {"cost.allow_extrapolation": True},
        {"cluster.replicas": 2},
        {"cluster.max_seqs": 128},
        {"cluster.host": {"base_ms": 1.0, "hidden_fraction": 0.5}},
        {"workload.trace": "azure2023-code"},
        {"workload.window_s": [0.0, 600.0]},
        {"workload.order": "trace"},
        {"load.scored_min": 201},
        {"load.think_s": 1.0},
        {"load.stagger_s": 1.0},
        {"measure.mode": "whole-run"},
        {"slo.tpot_ms": 21.0},
    ],
)
def test_whatever_a_run_reads_is_part_of_it(usual, overrides):
    assert key(overrides) != usual


def test_point_engine_and_kind_of_load_are_part_of_it(usual):
    others = [key(users=9), key(seed=1), key(rate=8.0), key(rate=4.0), key(engine="step"), key(arm="mtp1")]
    assert len({usual, *others}) == 7
    assert key(engine="compiled") == usual
    assert key({"load.requests": 7}, rate=4.0) != key(rate=4.0)
    assert key({"load.scored_min": 7}, rate=4.0) == key(rate=4.0)
    # The width of windows matters to those who look at them.
    assert key({"load.window_s": 3.0}, windows=True) != key(windows=True)


# -- files --------------------------------------------------------------------------------------------------


def pair_of_keys(tmp_path, write, overrides):
    """Keys with a file as it is, elsewhere, and with other content."""
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, folder == "c")
    return [key(overrides(tmp_path / folder)) for folder in ("a", "b", "c")]


def write_vidur(folder, other):
    rows = "".join(f"{i},{100 + i},{10 + other}\n" for i in range(300))
    (folder / "t.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}")


def write_other_profile(folder, other):
    profile = load_profile("rtx5090-qwen3-4b-dflash16")
    path = write_profile(profile, folder / "rtx5090-qwen3-4b-dflash16.csv")
    if other:
        path.write_text(path.read_text().replace(",0\n", ",7\n", 1))


def write_note(folder, other):
    write_other_profile(folder, False)
    if other:
        toml = folder / "rtx5090-qwen3-4b-dflash16.toml"
        toml.write_text(toml.read_text() + "\n# a remark\n")


def write_one_bank(folder, other):
    write_bank(recorded_bank(7, seed=int(other)), folder / "bank.npz")


def write_curve(folder, other):
    (folder / "curve.json").write_text(f'{{"math": [0.9, 0.{8 - other}]}}')


def write_temperatures(folder, other):
    (folder / "t.json").write_text(f'{{"temperatures": [1.1, 1.{2 + other}]}}')


@pytest.mark.parametrize(
    ("write", "overrides"),
    [
        (write_vidur, lambda folder: {"workload.trace": str(folder / "t.csv")}),
        (write_other_profile, lambda folder: {"cost.profile": str(folder / "rtx5090-qwen3-4b-dflash16.csv")}),
        (write_note, lambda folder: {"cost.profile": str(folder / "rtx5090-qwen3-4b-dflash16.csv")}),
        (
            write_one_bank,
            lambda folder: (
                {"drafts.source": "recorded", "drafters.dspark.bank": str(folder / "bank.npz")}
                | {"drafters.mtp.bank": "smollm2-mtp5", "drafts.preset": None}
            ),
        ),
        (
            write_curve,
            lambda folder: {"drafts.source": "tilted", "drafters.dspark.tilt_to": str(folder / "curve.json")},
        ),
        (write_temperatures, lambda folder: {"drafters.dspark.calibration": str(folder / "t.json")}),
    ],
)
def test_a_file_counts_by_its_content_not_by_its_place(tmp_path, write, overrides):
    here, elsewhere, other = pair_of_keys(tmp_path, write, overrides)
    assert here == elsewhere
    assert here != other


POLICY = """
from dsim.policy import BasePolicy

class Mine(BasePolicy):
    def __init__(self, table=""):
        self.table = table

    def plan(self, view):
        import helper_of_mine
        return view.caps
"""


def test_a_policy_counts_with_all_that_it_imports_and_opens(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(identity, "_STARTED_NS", 2**63)
    policy, helper, table = tmp_path / "mine.py", tmp_path / "helper_of_mine.py", tmp_path / "t.json"
    policy.write_text(POLICY)
    helper.write_text("import further_of_mine as further\n")
    (tmp_path / "further_of_mine.py").write_text("X = 1\n")
    table.write_text("{}")
    overrides = {"arms.6.policy": f"{policy}:Mine:table={table}"}
    keys = [key(overrides)]
    for file, text in (
        (policy, POLICY + "\n"),
        (helper, "import further_of_mine as further  # more\n"),
        (tmp_path / "further_of_mine.py", "X = 2\n"),
        (table, '{"a": 1}'),
    ):
        file.write_text(text)
        keys.append(key(overrides))
        assert key(overrides) == keys[-1]
    assert len(set(keys)) == 5


def test_a_policy_of_the_package_does_not_count_for_the_others():
    scenario = load_scenario("decode-node")
    parts = {arm: arm_identity(scenario, arm, open_loop=False) for arm in ("dspark", "threshold")}
    assert parts["dspark"]["code"] == parts["threshold"]["code"]
    assert parts["dspark"]["policy"] != parts["threshold"]["policy"]


def test_code_that_was_written_after_it_was_read_cannot_be_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "fresh_of_mine.py"
    module.write_text(POLICY)
    importlib.import_module("fresh_of_mine")
    with pytest.raises(UnknowableError, match=r"fresh_of_mine\.py was written while this process was running"):
        key({"arms.6.policy": "fresh_of_mine:Mine"})
    os.utime(module, (1e9, 1e9))
    assert len(key({"arms.6.policy": "fresh_of_mine:Mine"})) == 64
    # A policy by its file's path is read again when it has changed.
    again = tmp_path / "again_of_mine.py"
    again.write_text(POLICY)
    assert len(key({"arms.6.policy": f"{again}:Mine"})) == 64


def test_functions_count_by_name_and_source(tmp_path, monkeypatch):
    assert callable_identity(None, "extract") == ""
    assert callable_identity(windows_of, "extract") != callable_identity(StepRegret, "extract")
    for given in (lambda _: 1, print, StepRegret().step):
        with pytest.raises(InputError, match="field 'extract': cannot be told from others by its name"):
            callable_identity(given, "extract")


# -- the code -----------------------------------------------------------------------------------------------


def test_what_is_left_out_of_the_code_is_what_no_run_may_import():
    """The import contracts' layers above `dsim.scenario`, and live drafting."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(c["layers"] for c in config["contracts"] if c["name"] == "imports point one way")
    above = []
    for layer in layers:
        names = [name.strip() for name in layer.split("|")]
        if "dsim.scenario" in names:
            above += [name for name in names if name != "dsim.scenario"]
            break
        above += names
    packages = {name.removeprefix("dsim.") for name in above if name.startswith("dsim.")}
    assert packages | {"drafter"} == set(ABOVE_RUNS)


def test_no_run_imports_what_is_left_out():
    code = """
        import sys
        from dsim.scenario import Point, load_scenario, simulate
        scenario = load_scenario("decode-node", {"load.scored_min": 12, "load.scored_per_user": 2})
        for engine in ("step", "auto"):
            simulate(scenario, Point("dspark", 0, users=2), engine=engine)
        print(*(name for name in sys.modules if name.startswith("dsim.")))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = {name.split(".")[1] for name in ran.stdout.split()}
    assert "scenario" in loaded
    assert not loaded & set(ABOVE_RUNS)
