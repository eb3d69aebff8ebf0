"""Where runs are made: the same bytes on a real local cluster of two workers, and clear errors without one."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsim import workers as places
from dsim.errors import InputError
from dsim.workers import Workers, check_backend, workers

ROOT = Path(__file__).resolve().parents[1]
STUDY = ["--arms", "none,dspark", "--seeds", "2", "--set", "load.users=[2, 6]"]
STUDY += ["--set", "load.scored_min=12", "--set", "load.scored_per_user=2"]
FILES = ("pareto.csv", "pareto.png", "pareto.svg", "scenario.toml")


@pytest.mark.parametrize(("backend", "library"), [("dask", "distributed"), ("ray", "ray")])
def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch, backend, library):
    monkeypatch.setitem(sys.modules, library, None)
    expected = rf"needs '{library}', which is not installed: pip install 'dspark-sim\[{backend}\]', got '{backend}'"
    with pytest.raises(InputError, match=expected), workers(backend, 2, "127.0.0.1:1"):
        pass


def test_a_size_is_looked_at_now_and_then(monkeypatch):
    clock, sizes = [100.0], [0, 3, 8]
    monkeypatch.setattr(places.time, "monotonic", lambda: clock[0])
    size = places._looked_at(lambda: sizes.pop(0))
    assert size() == 1  # nobody there yet: one task waits
    clock[0] += 1.0
    assert size() == 1
    clock[0] += 4.0
    assert size() == 3
    clock[0] += 5.0
    assert size() == 8


def test_processes_here_have_one_thread_each_and_end_with_an_error():
    with workers("loky", 2) as pool:
        pids = {pool.submit(os.getpid).result() for _ in range(8)}
        assert os.getpid() not in pids
        assert pool.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
        assert pool.room() == 3
    started = []

    def fails(pool: Workers) -> Future[int]:
        started.append(pool.submit(os.getpid).result())
        raise KeyError("a defect")

    with pytest.raises(KeyError, match="a defect"), workers("loky", 2) as pool:
        fails(pool)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and Path(f"/proc/{started[0]}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{started[0]}/exe").exists()


def test_a_process_that_dies_is_told_from_a_task_that_fails():
    with workers("loky", 2) as pool:
        assert pool.died(pool.submit(signal.raise_signal, signal.SIGKILL).exception())
        assert pool.submit(abs, -3).result() == 3  # others have taken its place
        failed = pool.submit(abs, "x").exception()
        assert not pool.died(failed)
        assert isinstance(pool.original(failed), TypeError)


# -- clusters -----------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def processes(*commands, log, environment=None):
    """Run commands until the block ends; each is the head of a session of its own, which ends with it."""
    with log.open("wb") as out:
        started = [
            subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment)
            for command in commands
        ]
        try:
            yield
        finally:
            for process in reversed(started):
                process.terminate()
            for process in reversed(started):
                try:
                    process.wait(40)
                finally:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def dask_cluster(folder):
    address = f"127.0.0.1:{free_port()}"
    dask = [sys.executable, "-m", "dask"]
    host, port = address.split(":")
    scheduler = [*dask, "scheduler", "--host", host, "--port", port, "--no-dashboard"]
    worker = [*dask, "worker", f"tcp://{address}", "--nworkers", "2", "--nthreads", "1", "--no-dashboard"]
    with processes(scheduler, [*worker, "--local-directory", str(folder)], log=folder / "log"):
        yield address, os.environ


@contextmanager
def ray_cluster(folder):
    port = free_port()
    # Of this cluster alone: what talks to it has to have it too.
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    ray = Path(sys.executable).with_name("ray")
    head = [str(ray), "start", "--head", "--num-cpus=2", f"--port={port}", "--include-dashboard=false", "--block"]
    head += ["--object-store-memory=100000000", f"--temp-dir={folder}"]
    with processes(head, log=folder / "log", environment=environment):
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in (folder / "log").read_text():
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", environment


CLUSTERS = [
    pytest.param("dask", "distributed", dask_cluster, id="dask"),
    pytest.param("ray", "ray", ray_cluster, id="ray"),
]


def pareto(*options, environment=None):
    command = [sys.executable, str(ROOT / "experiments" / "pareto.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.fixture
def short_path(tmp_path_factory):
    """A folder whose path leaves room for the sockets that Ray puts below it."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ds") as folder:
        yield Path(folder)


DEADLY = """
import os, signal
from pathlib import Path
from dsim.policy import BasePolicy

class Deadly(BasePolicy):
    def plan(self, view):
        flag = Path(__file__).with_name("died")
        if view.requests == 5 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return view.caps
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "library", "cluster"), CLUSTERS)
def test_a_real_cluster_gives_the_same_bytes_and_survives_a_killed_worker(
    backend, library, cluster, tmp_path, short_path
):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    here = pareto(*STUDY, "--jobs", "1", "--out", str(tmp_path / "here"))
    assert here.returncode == 0, here.stderr
    policy = tmp_path / "deadly.py"
    policy.write_text(DEADLY)
    bad = tmp_path / "bad.py"
    bad.write_text(DEADLY.replace("return view.caps", "return view.caps + 99"))
    with cluster(short_path) as (address, environment):
        there = ["--backend", backend, "--address", address]
        ran = pareto(*STUDY, *there, "--out", str(tmp_path / "there"), environment=environment)
        assert ran.returncode == 0, ran.stderr
        for name in FILES:
            assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes(), name
        killed = [*STUDY, "--set", f"arms.6.policy={policy}:Deadly"]
        ran = pareto(*killed, *there, "--out", str(tmp_path / "killed"), environment=environment)
        assert ran.returncode == 0, ran.stderr
        assert (tmp_path / "died").exists()
        # A policy's mistake comes back as the error that it is.
        ran = pareto(*STUDY, "--set", f"arms.6.policy={bad}:Deadly", *there, "--out", "x", environment=environment)
        assert ran.returncode == 2
        assert "error: field 'verify length': policy Deadly() returned a verify length out of bounds" in ran.stderr
    undisturbed = pareto(*killed, "--jobs", "1", "--out", str(tmp_path / "undisturbed"))
    assert undisturbed.returncode == 0, undisturbed.stderr
    for name in FILES:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


# -- addresses at which there is no cluster ----------------------------------------------------------------


@pytest.mark.parametrize("backend", ["dask", "ray"])
@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        ":",
        ":8786",
        "a b:1",
        "http://x",
        "http://x:80",
        "x:y",
        "x:0",
        "x:65536",
        "x:1:2",
        "",
        "[::1]",
        "auto",
    ],
)
def test_what_is_no_address_is_refused_at_once(backend, address):
    with pytest.raises(InputError, match=r"field 'address': got .*, expected HOST:PORT of the cluster's scheduler"):
        check_backend(backend, address)


def test_addresses():
    assert places._host_and_port("dask", "tcp://10.0.0.5:8786") == ("10.0.0.5", 8786)
    assert places._host_and_port("ray", "ray://head-1.local:10001") == ("head-1.local", 10001)
    assert places._host_and_port("ray", "[::1]:6379") == ("::1", 6379)
    with pytest.raises(InputError, match="field 'address'"):
        check_backend("ray", "tcp://10.0.0.5:6379")


@pytest.mark.parametrize(("backend", "library"), [("dask", "distributed"), ("ray", "ray")])
def test_nobody_at_the_address(monkeypatch, backend, library):
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(places, "_CONNECT_S", 0.3)
    for address, why in ((f"127.0.0.1:{free_port()}", "refused"), ("no-such-host.invalid:1", "")):
        start = time.monotonic()
        message = rf"field 'address': no {backend} cluster answers \(.*{why}.*\), got '{address}'"
        with pytest.raises(InputError, match=message), workers(backend, 2, address):
            pass
        assert time.monotonic() - start < 10


@pytest.fixture
def silent():
    """Somebody who takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(("backend", "library"), [("dask", "distributed"), ("ray", "ray")])
def test_somebody_who_says_nothing(monkeypatch, silent, backend, library):
    pytest.importorskip(library)
    monkeypatch.setattr(places, "_JOIN_S", 2)
    message = rf"no {backend} cluster answers \(nothing was heard within 2 s\), got '{silent}'"
    with pytest.raises(InputError, match=message), workers(backend, 2, silent):
        pass


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_what_a_cluster_says_of_a_refusal_is_passed_on(monkeypatch, silent, backend):
    monkeypatch.setitem(places._JOINS, backend, "raise RuntimeError('wrong\\n token for ' + sys.argv[1])")
    message = rf"no {backend} cluster answers \(wrong token for {silent}\)"
    with pytest.raises(InputError, match=message):
        places._must_let_join(backend, silent)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "library"), [("dask", "distributed"), ("ray", "ray")])
def test_a_script_ends_where_nobody_listens(backend, library, tmp_path):
    pytest.importorskip(library)
    start = time.monotonic()
    ran = pareto(*STUDY, "--backend", backend, "--address", f"127.0.0.1:{free_port()}", "--out", str(tmp_path / "x"))
    assert ran.returncode == 2
    assert f"error: field 'address': no {backend} cluster answers" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "x").exists()
    assert time.monotonic() - start < 60
