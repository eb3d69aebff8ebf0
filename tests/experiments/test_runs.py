"""The experiments from the command line: files, columns, bytes, help, and what bad input leaves behind (nothing)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from banks import write_shipped

from dsim import scenario as runs
from dsim.errors import InputError
from dsim.profile import load_profile, write_profile
from dsim.schema import load_scenario
from experiments import ab, capture_sizes, load_adaptive, pareto
from experiments._common import scenario_of, write_scenario

ROOT = Path(__file__).resolve().parents[2]
SHORT = [
    *("--set", "load.scored_min=12"),
    *("--set", "load.scored_per_user=2"),
    *("--seeds", "2"),
    *("--jobs", "1"),
]
TINY = ["--set", "load.users=[2, 6]", *SHORT]
PARETO_COLUMNS = (
    "arm,policy,drafter,gamma,concurrency,rate_scale,seed,tps_per_user,throughput_tok_s,throughput_tok_s_gpu,"
    "tpot_p50_ms,tpot_p99_ms,ttft_p50_ms,ttft_p99_ms,accepted_length,verification_budget,acceptance_rate,"
    "wasted_tokens_per_step,steps,sim_seconds,cost_source,drafts_source,trace_source,extrapolated,n_scored"
)


def script(name, *args, cwd=None):
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / f"{name}.py"), *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        check=False,
    )


def test_pareto_writes_what_it_says(tmp_path, capsys):
    pareto.main(["--out", str(tmp_path), "--arms", "mtp1,dspark,none", *TINY])
    names = ["pareto.csv", "pareto.png", "pareto.svg", "scenario.toml"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    text = (tmp_path / "pareto.csv").read_text()
    assert text.splitlines()[0] == PARETO_COLUMNS
    df = pd.read_csv(tmp_path / "pareto.csv")
    assert len(df) == 3 * 2 * 2
    assert df["arm"].drop_duplicates().tolist() == ["mtp1", "dspark", "none"]
    assert df["rate_scale"].isna().all()
    shown = capsys.readouterr().out
    assert f"files: {', '.join(names)}" in shown
    for heading in ("at the same tok/s/user", "at the same throughput", "hypervolume"):
        assert heading in shown


def test_a_saved_scenario_runs_again_to_the_same_bytes(tmp_path):
    first, again = tmp_path / "1", tmp_path / "2"
    pareto.main(["--out", str(first), "--arms", "mtp1,dspark", *TINY])
    pareto.main(
        ["--out", str(again), "--arms", "mtp1,dspark", "--scenario", str(first / "scenario.toml"), "--jobs", "2"]
    )
    for name in ("pareto.csv", "pareto.png", "pareto.svg", "scenario.toml"):
        assert (first / name).read_bytes() == (again / name).read_bytes(), name


def test_open_loop_writes_windows(tmp_path):
    args = ["--open-loop", "--set", "load.rate_scales=[2.0, 8.0]", "--set", "load.requests=120"]
    pareto.main(["--out", str(tmp_path), "--arms", "mtp1,dspark", *args, *SHORT])
    df = pd.read_csv(tmp_path / "pareto.csv")
    assert df["concurrency"].isna().all()
    assert set(df["rate_scale"]) == {2.0, 8.0}
    cloud = pd.read_csv(tmp_path / "pareto_windows.csv")
    assert list(cloud.columns[:4]) == ["arm", "rate_scale", "seed", "time_s"]
    assert (cloud["throughput_tok_s_gpu"] >= 0).all()


def test_load_adaptive(tmp_path, capsys):
    load_adaptive.main(["--out", str(tmp_path), "--published", "V4-Flash", "--windows", *TINY])
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [
        "load_adaptive.csv",
        "load_adaptive.png",
        "load_adaptive.svg",
        "load_adaptive_windows.csv",
        "scenario.toml",
    ]
    df = pd.read_csv(tmp_path / "load_adaptive.csv")
    assert set(df.loc[df["arm"] == "mtp1", "verification_budget"]) == {2.0}
    assert "verification_budget" in capsys.readouterr().out


def test_ab_and_its_verdict(tmp_path, capsys):
    arms = ["--a", "mtp1", "--b", "fixed:k=3@dspark/3"]
    ab.main([*arms, "--users", "4", *SHORT, "--seeds", "5", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "fixed:k=3@dspark/3 is better than mtp1 by" in shown
    runs = pd.read_csv(tmp_path / "ab_runs.csv")
    assert set(runs["seed"]) == {0, 1, 2, 3, 4}
    assert set(runs.loc[runs["arm"] != "mtp1", "gamma"]) == {3}
    table = pd.read_csv(tmp_path / "ab.csv")
    assert table.loc[0, "role"] == "primary"
    assert set(table["metric"]) == set(ab.METRICS)


def test_a_against_a_uses_other_seeds(tmp_path, capsys):
    ab.main(["--a", "dspark", "--b", "dspark:lag=2", "--users", "4", "--out", str(tmp_path), *SHORT, "--seeds", "5"])
    shown = capsys.readouterr().out
    assert "A/A check" in shown
    runs = pd.read_csv(tmp_path / "ab_runs.csv")
    assert len(set(runs["seed"])) == 10
    assert any(line.startswith("no difference shown between dspark (A)") for line in shown.splitlines())


def test_below_five_seeds_there_is_no_verdict(tmp_path, capsys):
    ab.main(["--a", "mtp1", "--b", "dspark", "--users", "4", "--out", str(tmp_path), *SHORT])
    assert "2 seeds: range only, no verdict" in capsys.readouterr().out


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Small banks in the place of those that ship, and an empty working directory."""
    write_shipped(tmp_path / "banks")
    monkeypatch.setattr("dsim.drafts.bank._shipped_folder", lambda: tmp_path / "banks")
    monkeypatch.chdir(tmp_path)
    runs._bank.cache_clear()
    yield
    runs._bank.cache_clear()


@pytest.mark.parametrize("source", ["recorded", "tilted", "synthetic"])
def test_every_experiment_takes_a_source_of_drafts(shipped, source, tmp_path):
    """Results lie beside those of the scenario's own source, and rows say which it is."""
    label = {"recorded": "recorded:tiny:", "tilted": "tilted:dsv4:recorded:tiny:", "synthetic": "synthetic:dsv4:"}[
        source
    ]
    pareto.main(["--drafts", source, "--arms", "mtp1,dspark", *TINY])
    df = pd.read_csv(tmp_path / "results" / f"pareto-{source}" / "pareto.csv")
    assert df["drafts_source"].str.startswith(label).all()
    saved = tmp_path / "results" / f"pareto-{source}" / "scenario.toml"
    assert load_scenario(saved).drafts.source == source
    load_adaptive.main(["--drafts", source, *TINY])
    assert (
        pd.read_csv(tmp_path / "results/load_adaptive/load_adaptive.csv")["drafts_source"].str.startswith(label).all()
    )
    ab.main(["--drafts", source, "--a", "mtp1", "--b", "dspark", "--users", "4", *SHORT])
    assert pd.read_csv(tmp_path / "results/ab/ab_runs.csv")["drafts_source"].str.startswith(label).all()


def test_two_fronts_side_by_side(shipped, tmp_path, capsys):
    """The second one's rows are those of its own study; the figure is drawn on one scale."""
    pareto.main(["--beside", "recorded", "--arms", "mtp1,dspark", *TINY])
    out = tmp_path / "results" / "pareto-beside-recorded"
    names = [f"pareto{end}" for end in (".csv", ".png", ".svg", "_beside.csv", "_beside.png", "_beside.svg")]
    assert sorted(file.name for file in out.iterdir()) == sorted([*names, "scenario.toml", "scenario_beside.toml"])
    shown = capsys.readouterr().out
    assert shown.index("drafts: tilted") < shown.index("drafts: recorded")
    assert load_scenario(out / "scenario_beside.toml").drafts.source == "recorded"
    pareto.main(["--drafts", "recorded", "--arms", "mtp1,dspark", *TINY])
    alone = tmp_path / "results" / "pareto-recorded"
    assert (out / "pareto_beside.csv").read_bytes() == (alone / "pareto.csv").read_bytes()
    pareto.main(["--beside", "recorded", "--arms", "mtp1,dspark", "--out", str(tmp_path / "again"), *TINY])
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_side_by_side_in_open_loop(shipped, tmp_path):
    args = ["--open-loop", "--beside", "synthetic", "--set", "load.rate_scales=[4.0]", "--set", "load.requests=120"]
    pareto.main([*args, "--arms", "mtp1,dspark", *SHORT])
    out = tmp_path / "results" / "pareto-open-loop-beside-synthetic"
    assert pd.read_csv(out / "pareto_beside.csv")["drafts_source"].str.startswith("synthetic:").all()
    assert len(pd.read_csv(out / "pareto_windows_beside.csv"))
    assert (out / "pareto_beside.png").is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--beside", "tilted"], "'--beside': got 'tilted beside tilted'"),
        (["--beside", "recorded", "--set", 'drafts.source="recorded"'], "got 'recorded beside recorded'"),
        (["--beside", "recorded", "--drafts", "live"], "got 'recorded beside live'"),
    ],
)
def test_beside_wants_another_source(given, message, tmp_path):
    with pytest.raises(InputError, match=message):
        pareto.main([*given, "--out", str(tmp_path / "out"), *TINY])
    assert not (tmp_path / "out").exists()


SURE = ["--set", 'drafters.sure={like="dspark", confidence="perfect"}']


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "options", "low", "high"),
    [
        ("lab:search=early-stop,capacity_lag=0", "lab:capacity_lag=0", [], 90, 120),
        ("lab:capacity_lag=1", "lab:capacity_lag=2", [], -0.15, 0.15),
        ("lab", "lab:allocation_lag=1", [], -2.7, -1.7),
        ("lab", "lab:price=draft", [], -0.15, 0.15),
        ("lab:lookup=linear", "lab", [], -0.1, 0.25),
        ("lab", "lab@sure", SURE, 5.8, 6.6),
    ],
)
def test_the_questions_of_the_readme_have_its_answers(a, b, options, low, high, tmp_path):
    ab.main(["--a", a, "--b", b, *options, "--seeds", "5", "--out", str(tmp_path)])
    found = pd.read_csv(tmp_path / "ab.csv").iloc[0]
    assert found["metric"] == "throughput_tok_s_gpu"
    assert low <= 100 * found["relative"] <= high


@pytest.mark.slow
def test_padding_in_the_price_pays_where_few_sizes_are_captured(tmp_path):
    capture_sizes.main(["--graphs", "8", "--out", str(tmp_path)])
    few = str(tmp_path / "b300x4-dsv4-flash-0731-best.toml")
    for users, low, high in (("64", 1.5, 3.5), ("150", 7, 11)):
        arms = ["--a", "lab:lookup=linear", "--b", "lab", "--users", users]
        ab.main([*arms, "--set", f"cost.profile={few}", "--seeds", "5", "--out", str(tmp_path)])
        assert low <= 100 * pd.read_csv(tmp_path / "ab.csv").loc[0, "relative"] <= high


def test_ab_specs_and_bad_ones(tmp_path):
    scenario = load_scenario("decode-node")
    assert ab.arm_of(scenario, "mtp5")["policy"] == "fixed:k=5"
    found = ab.arm_of(scenario, "x/y.py:P:k=1@mtp/3")
    assert (found["policy"], found["drafter"], found["gamma"]) == ("x/y.py:P:k=1", "mtp", 3)
    for bad in ("dspark@", "dspark@mtp/x", "@mtp"):
        with pytest.raises(InputError, match="no arm spec"):
            ab.arm_of(scenario, bad)
    with pytest.raises(InputError, match=r"arms\.1\.gamma"):
        ab.main(["--a", "mtp1", "--b", "fixed:k=3@mtp/99", "--out", str(tmp_path / "o"), *SHORT])
    with pytest.raises(SystemExit):
        ab.options().parse_args(["--a", "x", "--b", "y", "--alpha", "3"])


def test_ab_takes_its_seeds_from_anywhere(tmp_path, capsys):
    args = ab.options().parse_args(["--a", "x", "--b", "y"])
    assert scenario_of(args, seeds=10).measure.seeds == 10
    args = ab.options().parse_args(["--a", "x", "--b", "y", "--set", "measure.seeds=3"])
    assert scenario_of(args, seeds=10).measure.seeds == 3
    args = ab.options().parse_args(["--a", "x", "--b", "y", "--set", "measure.seeds=3", "--seeds", "4"])
    with pytest.raises(InputError, match="given twice"):
        scenario_of(args, seeds=10)


@pytest.mark.parametrize(
    ("options", "users"),
    [
        ([], 64),
        (["--users", "4"], 4),
        (["--set", "load.users=[4]"], 4),
        (["--scenario", "one-load.toml"], 7),
        (["--scenario", "one-load.toml", "--users", "4"], 4),
        (["--scenario", "one-load.toml", "--set", "load.users=[5]"], 5),
        (["--scenario", "live-node"], 16),
    ],
)
def test_ab_takes_its_load_from_anywhere(options, users, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scenario(load_scenario("decode-node", {"load.users": [7]}), "one-load.toml")
    args = ab.options().parse_args(["--a", "x", "--b", "y", *options])
    assert ab.at_one_load(args).load.users == (users,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--set", "load.users=[2, 6]"],
            r"'load.users': arms are compared at one load, got \[2, 6\], expected one",
        ),
        (["--users", "4", "--set", "load.users=[6]"], "'--users': is given twice, here and by --set load.users"),
        (["--set", "load.rate_scales=[2.0]"], r"'load.rate_scales': is not used by this script, got \[2.0\]"),
        (
            ["--set", "load.requests=all"],
            "'load.requests': is not used by this script, got 'all', expected a key of c",
        ),
    ],
)
def test_loads_that_ab_could_not_use_are_refused(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        ab.main(["--a", "mtp1", "--b", "dspark", "--out", str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_a_saved_comparison_runs_again_at_its_load(tmp_path):
    first, again = tmp_path / "1", tmp_path / "2"
    ab.main(["--a", "mtp1", "--b", "dspark", "--users", "3", "--out", str(first), *SHORT])
    ab.main(["--a", "mtp1", "--b", "dspark", "--scenario", str(first / "scenario.toml"), "--out", str(again), *SHORT])
    for name in ("ab.csv", "ab_runs.csv", "scenario.toml"):
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    assert set(pd.read_csv(again / "ab_runs.csv")["concurrency"]) == {3}


def test_quick_is_smaller():
    args = pareto.options().parse_args(["--quick"])
    scenario = scenario_of(args)
    assert scenario.load.users == (1, 32, 160, 256)
    assert scenario.measure.seeds == 2
    assert scenario_of(pareto.options().parse_args(["--quick", "--seeds", "3"])).measure.seeds == 3


@pytest.mark.parametrize("name", ["pareto", "load_adaptive", "ab", "profile_report"])
def test_help_documents_every_option(name, tmp_path):
    done = script(name, "--help", cwd=tmp_path)
    assert done.returncode == 0
    for option in ["--out"] + (
        ["--scenario", "--seeds", "--jobs", "--quick", "--set"] if name != "profile_report" else []
    ):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--scenario", "nowhere.toml"], "scenario not found"),
        (["--set", "load.usrs=[1]"], "field 'load.usrs': unknown key"),
        (["--set", "cost.profile=a100"], "a100"),
        (["--seeds", "0"], "--seeds"),
        (["--jobs", "-1"], "--jobs"),
        (["--arms", "mtp1,nope"], "unknown arm"),
        (["--arms", "dspark", "--baseline", "mtp1"], "--baseline"),
        (["--set", "arms.6.policy=oops.py:Bad"], "policy file not found"),
        (["--set", "workload.trace=empty.csv"], "empty.csv"),
        (["--set", "cost.profile=falling.csv"], "falling.csv"),
        (["--set", "drafts.gamma=7"], "holds blocks of 5"),
        (["--set", "arms.6.policy=sys:exit"], "policy"),
        (["--set", "load.think_s=1e300"], "--set, field 'load.think_s'"),
        (["--drafts", "guessed"], "argument --drafts: invalid choice: 'guessed'"),
        (["--drafts", "tilted", "--set", "drafts.source=recorded"], "'--drafts': is given twice"),
        (
            ["--arms", "dspark", "--drafts", "recorded", "--set", "drafters.dspark.bank=nope"],
            "unknown bank, got 'nope'",
        ),
        (["--drafts", "recorded", "--set", "drafts.preset=dsv4"], "'preset' is not used by source = 'recorded'"),
        (["--drafts", "tilted", "--set", "drafts.auc=[0.8]"], "'auc' shapes synthetic drafts"),
        (["--drafts", "synthetic", "--set", "drafters.mtp.tilt_to=dsv4"], "'drafters.mtp.tilt_to' is not used"),
        (["--set", "drafters.dspark.calibration=offline"], "--set, field 'drafters.dspark.calibration'"),
    ],
)
def test_bad_input_exits_2_with_one_line_and_leaves_nothing(args, message, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "empty.csv").write_text("")
    write_profile(replace(load_profile("gb10x2-inkling-small-nvfp4"), name="falling"), tmp_path / "falling.csv")
    rows = (tmp_path / "falling.csv").read_text().splitlines()
    (tmp_path / "falling.csv").write_text("\n".join([rows[0], *reversed(rows[1:])]))
    done = script("pareto", "--out", str(out), *args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("simulating")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.68,374\n", "GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,-4\n", "line 2, field 'GeneratedTokens'"),
    ],
)
def test_a_bad_trace_names_file_line_and_field(content, message, tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text(content)
    with pytest.raises(InputError) as caught:
        pareto.main(["--out", str(tmp_path / "out"), "--set", f"workload.trace={trace}", *TINY])
    assert str(trace) in str(caught.value)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_policy_that_fails_midway_leaves_earlier_results_alone(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "pareto.csv").write_text("before")
    policy = tmp_path / "late.py"
    policy.write_text(
        "import numpy as np\nfrom dsim.policy import BasePolicy\n"
        "class Late(BasePolicy):\n    def plan(self, view):\n"
        "        return np.zeros(view.requests + (view.time_s > 5), dtype=np.int64)\n"
    )
    done = script("pareto", "--out", str(out), "--set", f"arms.6.policy={policy}:Late", *TINY)
    assert done.returncode == 2
    assert "returned no verify lengths" in done.stderr
    assert [p.name for p in out.iterdir()] == ["pareto.csv"]
    assert (out / "pareto.csv").read_text() == "before"


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_terminated_run_leaves_nothing(tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "experiments" / "pareto.py"), "--out", str(out), "--jobs", "1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    # The stage exists as soon as the sweep runs.
    for _ in range(600):
        if out.is_dir() and list(out.iterdir()):
            break
        time.sleep(0.05)
    process.terminate()
    process.wait(timeout=30)
    process.stderr.close()
    assert process.returncode == 128 + signal.SIGTERM
    assert not out.exists()


def test_importing_dsim_is_quick_and_light():
    code = (
        "import sys, time; t = time.perf_counter(); import dsim; dt = time.perf_counter() - t;"
        "heavy = [m for m in ('torch', 'matplotlib', 'scipy', 'pandas', 'simpy') if m in sys.modules];"
        "print(dt, heavy); dsim.load_policy; dsim.Traits; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert float(first.split()[0]) < 0.5
    assert first.endswith("[]")
    assert second == "False"


@pytest.mark.slow
def test_the_wheel_runs_outside_the_checkout(tmp_path):
    """Build the wheel, install it alone in a fresh environment (dependencies borrowed), run pareto elsewhere."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True
    )
    wheel = next(tmp_path.glob("dspark_sim-*.whl"))
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    # Path files of the borrowed folder are not followed, so the editable checkout stays invisible.
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where = subprocess.run(
        [python, "-c", "import dsim, experiments.pareto as p; print(dsim.__file__); print(p.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(ROOT) not in where.stdout
    done = subprocess.run(
        [python, "-m", "experiments.pareto", "--out", "results", "--arms", "mtp1,dspark", *TINY],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "pareto.csv").is_file()


@pytest.mark.parametrize(
    ("flags", "key"), [([], "load.rate_scales=[2.0]"), (["--open-loop"], "load.users=[3]"), ([], "load.window_s=1.0")]
)
def test_pareto_refuses_loads_of_the_other_kind(tmp_path, flags, key):
    with pytest.raises(InputError, match="is not used by this script"):
        pareto.main([*flags, "--set", key, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
