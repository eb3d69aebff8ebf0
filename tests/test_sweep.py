from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import dsim.sweep as sweeps
from dsim.errors import InputError
from dsim.metrics import windows
from dsim.probe import StepRegret
from dsim.profile import load_profile, write_profile
from dsim.scenario import Point
from dsim.schema import load_scenario
from dsim.store import Store
from dsim.sweep import grid, run
from dsim.workers import Workers

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"load.users": [2, 6], "load.scored_min": 12, "load.scored_per_user": 2, "measure.seeds": 2}


@pytest.fixture(scope="module")
def scenario():
    return load_scenario("decode-node", SMALL)


def steps_of(result):
    return int(result.records.steps["end_ns"][-1])


def windows_of(result):
    return windows(result.records, result.window_s)


def made(monkeypatch):
    """The points that are run from now on, in this process."""
    points, real = [], sweeps.simulate

    def simulate(scenario, point, **options):
        points.append(point)
        return real(scenario, point, **options)

    monkeypatch.setattr(sweeps, "simulate", simulate)
    return points


def test_grid_is_canonical(scenario):
    points = grid(scenario, arms=["dspark", "mtp1"])
    assert points[:4] == [
        Point("dspark", 0, users=2),
        Point("dspark", 1, users=2),
        Point("dspark", 0, users=6),
        Point("dspark", 1, users=6),
    ]
    assert grid(scenario, arms=["none"], rate_scales=[2.0], seeds=[7]) == [Point("none", 7, rate_scale=2.0)]
    assert len(grid(scenario)) == 8 * 2 * 2
    with pytest.raises(InputError, match="unknown arm"):
        grid(scenario, arms=["mtp9"])


def test_same_bytes_for_one_and_two_workers(scenario, tmp_path):
    points = grid(scenario, arms=["dspark", "mtp1", "none"])
    one = run(scenario, points, jobs=1, progress=False, extract=steps_of)
    two = run(scenario, points, jobs=2, progress=False, extract=steps_of)
    assert one.table.to_csv() == two.table.to_csv()
    assert one.extracts == two.extracts
    assert one.table["arm"].tolist() == [point.arm for point in points]


def test_errors_from_workers_keep_their_fields(scenario, tmp_path):
    policy = tmp_path / "bad.py"
    policy.write_text(
        "import numpy as np\nfrom dsim.policy import BasePolicy\n"
        "class Bad(BasePolicy):\n    def plan(self, view):\n        return np.full(view.requests, 99)\n"
    )
    broken = load_scenario("decode-node", SMALL | {"arms.6.policy": f"{policy}:Bad"})
    with pytest.raises(InputError, match=r"policy Bad\(\).*got 99, expected 0\.\.5") as caught:
        run(broken, grid(broken, arms=["dspark"]), jobs=2, progress=False)
    assert caught.value.field == "verify length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "field 'jobs': got 0"),
        ({"engine": "fast"}, "field 'engine': got 'fast', expected one of auto, step, compiled"),
        ({"backend": "slurm"}, "field 'backend': got 'slurm', expected one of loky, dask, ray"),
        ({"backend": "dask"}, "field 'address': is missing for backend 'dask'"),
        ({"address": "127.0.0.1:1"}, "field 'address': is not used by backend 'loky'"),
    ],
)
def test_bad_options(scenario, options, message):
    with pytest.raises(InputError, match=message):
        run(scenario, [], progress=False, **options)


# -- what is kept -----------------------------------------------------------------------------------------


def test_what_is_kept_gives_the_same_bytes_and_is_not_made_again(scenario, tmp_path, monkeypatch):
    points = grid(scenario, arms=["dspark", "none"])
    plain = run(scenario, points, progress=False, extract=windows_of)
    points_made = made(monkeypatch)
    first = run(scenario, points, progress=False, extract=windows_of, store=tmp_path / "runs")
    assert sorted(points_made, key=points.index) == points
    points_made.clear()
    again = run(scenario, points, progress=False, extract=windows_of, store=tmp_path / "runs")
    assert points_made == []
    for other in (first, again):
        assert other.table.to_csv() == plain.table.to_csv()
        assert other.table.dtypes.tolist() == plain.table.dtypes.tolist()
        for found, expected in zip(other.extracts, plain.extracts, strict=True):
            assert list(found) == list(expected)
            for name in expected:
                assert found[name].dtype == expected[name].dtype
                assert found[name].tobytes() == expected[name].tobytes()


def test_a_larger_study_makes_what_is_missing(scenario, tmp_path, monkeypatch):
    run(scenario, grid(scenario, arms=["mtp1"]), progress=False, store=tmp_path)
    points_made = made(monkeypatch)
    larger = load_scenario("decode-node", SMALL | {"load.users": [2, 3, 6], "measure.seeds": 3, "name": "another"})
    points = grid(larger, arms=["none", "mtp1"])
    found = run(larger, points, progress=False, store=tmp_path)
    old = {Point("mtp1", seed, users=users) for seed in (0, 1) for users in (2, 6)}
    assert set(points_made) == set(points) - old
    assert found.table.to_csv() == run(larger, points, progress=False).table.to_csv()


def test_a_renamed_arm_takes_its_runs_along(scenario, tmp_path, monkeypatch):
    run(scenario, grid(scenario, arms=["mtp1"]), progress=False, store=tmp_path)
    points_made = made(monkeypatch)
    renamed = load_scenario("decode-node", SMALL | {"arms.1.name": "baseline"})
    points = grid(renamed, arms=["baseline"])
    found = run(renamed, points, progress=False, store=tmp_path).table
    assert points_made == []
    assert set(found["arm"]) == {"baseline"}
    assert found.to_csv() == run(renamed, points, progress=False).table.to_csv()


def test_a_probe_or_another_extract_is_another_result(scenario, tmp_path, monkeypatch):
    points = grid(scenario, arms=["mtp1"], seeds=[0])
    run(scenario, points, progress=False, store=tmp_path)
    points_made = made(monkeypatch)
    probed = run(scenario, points, progress=False, store=tmp_path, probe=StepRegret)
    run(scenario, points, progress=False, store=tmp_path, extract=steps_of)
    run(scenario, points, progress=False, store=tmp_path, extract=windows_of)
    run(scenario, points, progress=False, store=tmp_path, engine="step")
    assert len(points_made) == 4 * len(points)
    assert run(scenario, points, progress=False, store=tmp_path, probe=StepRegret).table.equals(probed.table)
    assert "regret_mean" in probed.table
    assert len(points_made) == 4 * len(points)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_lies_there_and_is_no_file_is_named_and_not_waited_for(scenario, tmp_path, capsys, kind):
    points = grid(scenario, arms=["mtp1"], seeds=[0], users=[2])
    good = run(scenario, points, progress=False, store=tmp_path)
    (file,) = (path for path in tmp_path.glob("*.json") if len(path.stem) == 64)
    file.unlink()
    (os.mkfifo if kind == "pipe" else os.mkdir)(file)
    assert run(scenario, points, progress=False, store=tmp_path).table.to_csv() == good.table.to_csv()
    assert f"made again: {file}: is no file" in capsys.readouterr().err
    assert file.is_file() == (kind == "pipe")


@pytest.mark.parametrize("damage", ["cut", "other", "digit", "empty", "not JSON", "swapped"])
def test_a_damaged_result_is_made_again_and_named(scenario, tmp_path, monkeypatch, capsys, damage):
    points = grid(scenario, arms=["mtp1"], seeds=[0])
    good = run(scenario, points, progress=False, store=tmp_path)
    file, second = sorted(path for path in tmp_path.glob("*.json") if len(path.stem) == 64)
    text = file.read_text()
    file.write_text(
        {
            "cut": text[:-40],
            "other": '{"hello": 1}',
            "digit": text.replace('"steps":', '"steps":1'),
            "empty": "",
            "not JSON": "[" * 5000,
            "swapped": second.read_text(),
        }[damage]
    )
    points_made = made(monkeypatch)
    again = run(scenario, points, progress=False, store=tmp_path)
    assert len(points_made) == 1
    assert again.table.to_csv() == good.table.to_csv()
    assert f"made again: {file}" in capsys.readouterr().err
    assert file.read_text() == text


def test_an_extract_that_cannot_be_kept(scenario, tmp_path):
    points = grid(scenario, arms=["mtp1"], seeds=[0])
    with pytest.raises(InputError, match="field 'extract': cannot be told from others by its name"):
        run(scenario, points, progress=False, store=tmp_path, extract=lambda _: 1)
    with pytest.raises(InputError, match="field 'extract': cannot be kept in a store, got 'Records'"):
        run(scenario, points, progress=False, store=tmp_path, extract=records_of)


def records_of(result):
    return result.records


def test_asking_for_what_cannot_be_compiled_is_refused_whatever_is_kept(scenario, tmp_path):
    pytest.importorskip("numba")
    points = grid(scenario, arms=["mtp1"], seeds=[0])
    run(scenario, points, progress=False, store=tmp_path, probe=StepRegret)
    with pytest.raises(InputError, match="cannot be compiled"):
        run(scenario, points, progress=False, store=tmp_path, probe=StepRegret, engine="compiled")


def test_a_full_disk_costs_no_result(scenario, tmp_path, monkeypatch, capsys):
    def put(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "put", put)
    points = grid(scenario, arms=["mtp1"], seeds=[0])
    assert len(run(scenario, points, progress=False, store=tmp_path).table) == 2
    assert capsys.readouterr().err.count("no longer kept") == 1


def test_numpys_numbers_are_the_same_points(scenario, tmp_path, monkeypatch):
    plain = grid(scenario, arms=["mtp1"], users=[2, 6], seeds=[0, 1])
    points = grid(scenario, arms=["mtp1"], users=np.array([2, 6]), seeds=np.arange(2))
    assert points == plain
    assert {type(value) for point in points for value in (point.users, point.seed)} == {int}
    assert Point("none", 0, rate_scale=np.float32(2)) == Point("none", 0, rate_scale=2)
    first = run(scenario, points, progress=False, store=tmp_path)
    points_made = made(monkeypatch)
    assert run(scenario, plain, progress=False, store=tmp_path).table.to_csv() == first.table.to_csv()
    assert points_made == []
    for wrong in ({"seed": 0.5}, {"seed": None}, {"seed": 0, "users": "2"}, {"seed": 0, "rate_scale": "x"}):
        with pytest.raises(InputError, match=rf"field '{list(wrong)[-1]}'"):
            Point("none", **wrong)


# -- files that change meanwhile ----------------------------------------------------------------------------


def profile_at(folder, latency):
    """A profile of the user's; its steps take `latency` times as long as the shipped one's."""
    profile = load_profile("b300x4-dsv4-flash-0731")
    samples = dataclasses.replace(profile.samples, ms=profile.samples.ms * latency)
    return write_profile(dataclasses.replace(profile, name="mine", samples=samples), folder / "mine.csv")


def test_a_profile_that_is_changed_between_its_hash_and_its_fit_is_noticed(tmp_path, monkeypatch):
    path = profile_at(tmp_path, 1.0)
    scenario = load_scenario("decode-node", SMALL | {"cost.profile": str(path)})
    points, real = grid(scenario, arms=["none"], seeds=[0]), sweeps._identified
    monkeypatch.setattr(sweeps, "_identified", lambda *given: [real(*given), profile_at(tmp_path, 2.0)][0])
    with pytest.raises(InputError, match=r"arm 'none': a worker's scenario is not .*mine\.csv#"):
        run(scenario, points, progress=False, store=tmp_path / "runs")
    assert kept(tmp_path / "runs") == 0


def test_a_profile_that_is_changed_before_its_hash_counts_as_it_is(tmp_path, monkeypatch):
    path = profile_at(tmp_path, 1.0)
    scenario = load_scenario("decode-node", SMALL | {"cost.profile": str(path)})
    points, real = grid(scenario, arms=["none"], seeds=[0]), sweeps._identified
    monkeypatch.setattr(sweeps, "_identified", lambda *given: [profile_at(tmp_path, 2.0), real(*given)][1])
    found = run(scenario, points, progress=False, store=tmp_path / "runs").table
    monkeypatch.undo()
    assert found.to_csv() == run(scenario, points, progress=False).table.to_csv()


def test_a_trace_that_is_changed_before_a_run_reads_it_is_noticed(tmp_path, monkeypatch):
    path, real = tmp_path / "t.csv", sweeps.simulate

    def write(tokens):
        rows = "".join(f"{i},{100 + i},{tokens}\n" for i in range(80))
        path.write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}")

    def edited_first(*given, **options):
        write(12)
        return real(*given, **options)

    write(10)
    scenario = load_scenario("decode-node", SMALL | {"workload.trace": str(path)})
    monkeypatch.setattr(sweeps, "simulate", edited_first)
    with pytest.raises(InputError, match=r"arm 'none': a worker's scenario is not .*t\.csv#"):
        run(scenario, grid(scenario, arms=["none"], seeds=[0]), progress=False, store=tmp_path / "runs")
    assert kept(tmp_path / "runs") == 0


# -- processes that are killed ------------------------------------------------------------------------------

STUDY = SMALL | {"load.users": [2, 6, 12], "measure.seeds": 4}
SCRIPT = """
import sys
from dsim.schema import load_scenario
from dsim.sweep import grid, run
out, store, jobs = sys.argv[1:]
scenario = load_scenario("decode-node", {study!r})
points = grid(scenario, arms=["dspark", "mtp1", "none"])
table = run(scenario, points, jobs=int(jobs), store=store, engine="step", progress=False).table
open(out, "w").write(table.to_csv(index=False))
"""


def kept(folder):
    return sum(len(path.stem) == 64 for path in folder.glob("*.json")) if folder.is_dir() else 0


def test_a_sweep_that_is_killed_three_times_ends_with_the_same_bytes(tmp_path):
    script, store, out = tmp_path / "study.py", tmp_path / "runs", tmp_path / "out.csv"
    script.write_text(SCRIPT.format(study=STUDY))
    command = [sys.executable, str(script), str(out), str(store)]
    chance = random.Random(7)
    for more, jobs in ((chance.randint(1, 8), 1), (chance.randint(2, 8), 2), (chance.randint(1, 8), 1)):
        wanted = kept(store) + more
        process = subprocess.Popen([*command, str(jobs)], start_new_session=True)
        while process.poll() is None and kept(store) < wanted:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1))
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert wanted <= kept(store) < 36
        assert not out.exists()
    subprocess.run([*command, "1"], check=True, timeout=120)
    scenario = load_scenario("decode-node", STUDY)
    points = grid(scenario, arms=["dspark", "mtp1", "none"])
    assert out.read_text() == run(scenario, points, progress=False).table.to_csv(index=False)
    assert kept(store) == 36


DEADLY = """
import os, signal
from pathlib import Path
from dsim.policy import BasePolicy

class Deadly(BasePolicy):
    def plan(self, view):
        deaths = sorted(Path({folder!r}).glob("*"))
        if len(deaths) < {times} and view.requests == {requests}:
            (Path({folder!r}) / str(len(deaths))).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return view.caps
"""


def deadly(tmp_path, times, requests):
    (tmp_path / "deaths").mkdir()
    policy = tmp_path / "deadly.py"
    policy.write_text(DEADLY.format(folder=str(tmp_path / "deaths"), times=times, requests=requests))
    return load_scenario("decode-node", SMALL | {"arms.6.policy": f"{policy}:Deadly"})


def test_runs_of_a_killed_worker_are_made_again(tmp_path):
    scenario = deadly(tmp_path, times=1, requests=5)
    points = grid(scenario, arms=["dspark", "none"])
    found = run(scenario, points, jobs=2, progress=False, store=tmp_path / "runs", engine="step")
    assert len(list((tmp_path / "deaths").iterdir())) == 1
    assert found.table.to_csv() == run(scenario, points, progress=False).table.to_csv()
    assert kept(tmp_path / "runs") == len(points)


@pytest.mark.slow
def test_a_run_that_always_kills_its_process_is_named(tmp_path):
    scenario = deadly(tmp_path, times=1000, requests=5)
    points = grid(scenario, arms=["dspark", "none"])
    with pytest.raises(InputError, match=r"its process was killed 3 times, got \"arm 'dspark', 6 users, seed [01]\""):
        run(scenario, points, jobs=2, progress=False, store=tmp_path / "runs", engine="step")
    # Whoever ran beside it was made again, and is not blamed.
    assert kept(tmp_path / "runs") >= 1


def test_a_policy_that_is_edited_while_the_sweep_runs_is_noticed(tmp_path):
    policy = tmp_path / "edited.py"
    text = """
        from pathlib import Path
        from dsim.policy import BasePolicy

        class Edited(BasePolicy):
            def plan(self, view):
                if view.step == 3:
                    Path(__file__).write_text(Path(__file__).read_text() + "# more")
                return view.caps
    """
    policy.write_text(textwrap.dedent(text))
    scenario = load_scenario("decode-node", SMALL | {"arms.6.policy": f"{policy}:Edited"})
    with pytest.raises(InputError, match=r"arm 'dspark': a worker's scenario is not .*edited\.py#"):
        run(scenario, grid(scenario, arms=["dspark"]), progress=False, store=tmp_path / "runs")


@pytest.mark.slow
def test_pareto_that_is_killed_ten_times_ends_with_the_same_bytes(tmp_path):
    """At any moment: while it reads its code, while workers start, while results are written, while it draws."""
    study = ["--arms", "none,mtp1,dspark", "--seeds", "4", "--set", "load.users=[2,6,12,24]", "--engine", "step"]
    study += ["--set", "load.scored_min=40", "--set", "load.scored_per_user=2", "--jobs", "2"]
    command = [sys.executable, str(ROOT / "experiments" / "pareto.py"), *study]
    begin = time.monotonic()
    subprocess.run([*command, "--store", "none", "--out", str(tmp_path / "plain")], check=True, timeout=600)
    took = time.monotonic() - begin
    chance = random.Random(11)
    for _ in range(10):
        process = subprocess.Popen(
            [*command, "--store", str(tmp_path / "runs"), "--out", str(tmp_path / "out")], start_new_session=True
        )
        time.sleep(chance.uniform(0.0, took))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(
        [*command, "--store", str(tmp_path / "runs"), "--out", str(tmp_path / "out")], check=True, timeout=600
    )
    for name in ("pareto.csv", "pareto.png", "pareto.svg", "scenario.toml"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    assert kept(tmp_path / "runs") == 48


# -- what is shown ------------------------------------------------------------------------------------------


def test_the_longest_runs_come_first(scenario, monkeypatch):
    points_made = made(monkeypatch)
    run(scenario, grid(scenario, arms=["none"], users=[6, 1, 2], seeds=[0]), progress=False, engine="step")
    assert [point.users for point in points_made] == [1, 2, 6]


ODD = """
import os, signal
from pathlib import Path
from dsim.policy import BasePolicy

class Odd(BasePolicy):
    def plan(self, view):
        return view.caps

    def kernel(self):
        # Asked first by a worker, for the order of the work.
        if {kill} and os.getpid() != {parent} and not Path({mark!r}).exists():
            Path({mark!r}).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {answer}
"""


def odd(tmp_path, *, kill=False, answer="None"):
    policy = tmp_path / "odd.py"
    policy.write_text(ODD.format(kill=kill, parent=os.getpid(), mark=str(tmp_path / "killed"), answer=answer))
    return load_scenario("decode-node", SMALL | {"arms.6.policy": f"{policy}:Odd"})


def test_the_order_of_the_work_is_found_by_workers(scenario, monkeypatch):
    monkeypatch.setattr(sweeps, "_efforts", None)  # workers have their own
    points = grid(scenario, arms=["none"])
    assert len(run(scenario, points, jobs=2, progress=False).table) == len(points)


@pytest.mark.parametrize(
    ("engine", "warm", "estimates"), [("auto", True, 3), ("auto", False, 1), ("step", True, 3), ("step", False, 3)]
)
def test_code_that_is_not_in_the_cache_is_compiled_by_one_worker(scenario, monkeypatch, engine, warm, estimates):
    monkeypatch.setattr(sweeps, "is_warm", lambda: warm)
    given = []

    def submit(function, *arguments):
        given.append(function)
        future = Future()
        future.set_result(function(*arguments))
        return future

    pool = Workers(submit, lambda: 3, lambda error: False)
    study = sweeps._Study(scenario, None, None, engine)
    points = grid(scenario, arms=["none"])
    assert sweeps._estimated_there(pool, study, points, 3) == sweeps._efforts(study, points)
    assert given == [sweeps._estimated] * estimates + [sweeps._wake] * (3 - estimates)


def test_an_order_without_any_worker_left_to_find_it(scenario, monkeypatch):
    def submit(function, *arguments):
        future = Future()
        future.set_exception(RuntimeError("killed"))
        return future

    monkeypatch.setattr(sweeps, "_efforts", None)  # what killed them is not tried here
    pool = Workers(submit, lambda: 3, lambda error: True)
    points = grid(scenario, arms=["none"])
    assert min(sweeps._estimated_there(pool, sweeps._Study(scenario, None, None, "auto"), points, 3)) > 0


def test_a_worker_that_is_killed_before_the_first_run(tmp_path):
    pytest.importorskip("numba")
    scenario = odd(tmp_path, kill=True)
    points = grid(scenario, arms=["dspark"])
    found = run(scenario, points, jobs=2, progress=False)
    assert (tmp_path / "killed").exists()
    assert found.table.to_csv() == run(scenario, points, progress=False).table.to_csv()


def test_what_a_worker_refuses_before_the_first_run_is_named(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(sweeps, "_efforts", None)  # workers have their own
    scenario = odd(tmp_path, answer="42")
    with pytest.raises(InputError, match=r"field 'kernel\(\)': .*offers no kernel, got 'int'"):
        run(scenario, grid(scenario, arms=["dspark"]), jobs=2, progress=False)


def test_progress_shows_runs_rate_and_time_left(scenario, tmp_path, capsys):
    points = grid(scenario, arms=["mtp1"])
    run(scenario, points[:2], progress=False, store=tmp_path)
    assert capsys.readouterr().err == ""
    run(scenario, points, store=tmp_path)
    shown = capsys.readouterr().err
    assert f"2 of 4 runs are in {tmp_path}" in shown
    assert "simulating 2/4 runs" in shown
    last = shown.strip().splitlines()[-1].split("\r")[-1]
    assert last.startswith("simulating 4/4 runs, ")
    assert " runs/s, 00:00 left" in last
    assert last.endswith("100%")


def test_a_row_has_no_numpy_numbers(scenario):
    table = run(scenario, grid(scenario, arms=["mtp1"], seeds=[0]), progress=False).table
    assert not any(isinstance(value, np.generic) for value in table.astype(object).iloc[0])
    assert table.columns[:3].tolist() == ["arm", "policy", "drafter"]
