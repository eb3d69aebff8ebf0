"""Where the runs of a sweep are made: processes on this machine, or a cluster that the user has (Dask or Ray)."""

from __future__ import annotations

import importlib
import re
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dsim.errors import InputError

BACKENDS = ("loky", "dask", "ray")

#: Seconds after which an idle process on this machine ends by itself.
_IDLE_S = 60
#: One thread in each process: there are as many processes as there should be.
_THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
#: Seconds between two looks at how large a cluster is.
_LOOK_S = 5.0
#: Seconds to wait for somebody who listens at an address, and then for a process to join the cluster there.
_CONNECT_S, _JOIN_S = 20, 40
#: ``[scheme://]HOST:PORT``; a host in brackets is an IPv6 address.
_ADDRESS = re.compile(r"(?:(?P<scheme>[a-z]+)://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>[0-9]{1,5})")
_SCHEMES = {"dask": ("tcp", "tls", "ws", "wss"), "ray": ("ray",)}


@dataclass(frozen=True)
class Workers:
    """Somewhere to run tasks.

    Attributes
    ----------
    submit
        ``submit(function, *arguments)`` starts a task (a function at the top level of a module).
    room
        How many tasks should be under way: all workers busy, and few tasks waiting in them.
    died
        Whether a future's error says that the process of its task ended, and not that the task failed.
    original
        The error that the task raised, without what the backend put around it.
    """

    submit: Callable[..., Future[Any]]
    room: Callable[[], int]
    died: Callable[[BaseException], bool]
    original: Callable[[BaseException], BaseException] = lambda error: error


def check_backend(backend: str, address: str | None) -> None:
    """Raise InputError unless the backend is known, and has an address if and only if it needs one."""
    if backend not in BACKENDS:
        raise InputError(field="backend", value=backend, expected=f"one of {', '.join(BACKENDS)}")
    if backend == "loky" and address is not None:
        raise InputError("is not used by backend 'loky'", field="address", value=address, expected="dask or ray")
    if backend != "loky" and address is None:
        raise InputError(
            f"is missing for backend '{backend}'", field="address", expected="HOST:PORT of the cluster's scheduler"
        )
    if address is not None:
        _host_and_port(backend, address)


def _host_and_port(backend: str, address: str) -> tuple[str, int]:
    """Raise InputError unless it is an address of that form: the libraries wait long for others."""
    found = _ADDRESS.fullmatch(address)
    scheme = None if found is None else found["scheme"]
    if found is None or not 1 <= int(found["port"]) <= 65535 or scheme not in (None, *_SCHEMES[backend]):
        expected = f"HOST:PORT of the cluster's scheduler, such as 10.0.0.5:8786 ({', '.join(_SCHEMES[backend])}://)"
        raise InputError(field="address", value=address, expected=expected)
    return found["host"].strip("[]"), int(found["port"])


def _must_listen(backend: str, address: str) -> None:
    """Raise InputError unless somebody takes connections at an address, or begins to soon."""
    where, until = _host_and_port(backend, address), time.monotonic() + _CONNECT_S
    while True:
        try:
            socket.create_connection(where, timeout=max(0.1, until - time.monotonic())).close()
            return
        except (OSError, UnicodeError) as error:  # the latter: a name that cannot be one
            if time.monotonic() >= until or isinstance(error, socket.gaierror | UnicodeError):
                raise _no_answer(backend, address, error) from None
            time.sleep(0.2)


@contextmanager
def workers(backend: str, jobs: int, address: str | None = None) -> Iterator[Workers]:
    """Connect to workers; tasks that are still under way when the block raises are given up.

    Parameters
    ----------
    backend
        One of `BACKENDS`: ``loky`` starts `jobs` processes here, the others use the workers of a cluster.
    address
        ``HOST:PORT`` of the cluster's scheduler.

    Raises
    ------
    InputError
        A library that is not installed, or nobody who answers at the address.
    """
    check_backend(backend, address)
    if backend == "loky":
        made = _loky(jobs)
    elif backend == "dask":
        made = _dask(str(address))
    else:
        made = _ray(str(address))
    with made as found:
        yield found


#: Processes by their number, kept for the next sweep; they end by themselves when idle.
_PROCESSES: dict[int, Any] = {}


@contextmanager
def _loky(jobs: int) -> Iterator[Workers]:
    from joblib.externals.loky.process_executor import BrokenProcessPool, ProcessPoolExecutor, ShutdownExecutorError

    def executor() -> Any:
        # Not loky's own reusable one: joblib takes that for one of its kind.
        found = _PROCESSES.get(jobs)
        if found is None:
            # An idle worker may end just when a run is given to it; loky then starts another one, and says so.
            warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)
            found = _PROCESSES[jobs] = ProcessPoolExecutor(max_workers=jobs, timeout=_IDLE_S, env=_THREADS)
        return found

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        for _ in range(5):
            try:
                started: Future[Any] = executor().submit(function, *arguments)
                return started
            except (BrokenProcessPool, ShutdownExecutorError):  # a process of it was killed: with new ones, then
                _PROCESSES.pop(jobs, None)
        raise RuntimeError("worker processes end as soon as they are started")

    try:
        yield Workers(submit, lambda: jobs + 1, lambda error: isinstance(error, BrokenProcessPool))
    except BaseException:
        if (given_up := _PROCESSES.pop(jobs, None)) is not None:
            given_up.shutdown(wait=False, kill_workers=True)
        raise


@contextmanager
def _dask(address: str) -> Iterator[Workers]:
    distributed = _library("distributed", "dask")
    _must_let_join("dask", address)
    try:
        client = distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise _no_answer("dask", address, error) from None
    try:
        executor = client.get_executor(pure=False)
        yield Workers(
            executor.submit,
            _looked_at(lambda: 2 * len(client.nthreads())),
            lambda error: isinstance(error, distributed.KilledWorker),
        )
    finally:
        # What is under way is cancelled with it.
        client.close()


@contextmanager
def _ray(address: str) -> Iterator[Workers]:
    ray = _library("ray", "ray")
    ours = not ray.is_initialized()
    if ours:
        _must_let_join("ray", address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise _no_answer("ray", address, error) from None
    under_way: set[Any] = set()

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        reference = ray.remote(max_retries=0, num_cpus=1)(function).remote(*arguments)
        under_way.add(reference)
        started: Future[Any] = reference.future()
        started.add_done_callback(lambda _: under_way.discard(reference))
        return started

    def died(error: BaseException) -> bool:
        crashed = isinstance(error, ray.exceptions.RayError)
        return crashed and not isinstance(error, ray.exceptions.RayTaskError)

    try:
        yield Workers(
            submit,
            _looked_at(lambda: 2 * int(ray.cluster_resources().get("CPU", 1))),
            died,
            lambda error: getattr(error, "cause", None) or error,
        )
    except BaseException:
        for reference in list(under_way):
            ray.cancel(reference, force=True)
        raise
    finally:
        if ours:
            ray.shutdown()


#: What is tried first, in a process of its own.
_JOIN = """
import os, sys
try:
    {}
except BaseException as error:
    print(*str(error).split(), file=sys.stderr, flush=True)
    os._exit(1)
os._exit(0)
"""
_JOINS = {
    "dask": "import distributed; distributed.Client(sys.argv[1]).close()",
    "ray": "import ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR'); ray.shutdown()",
}


def _must_let_join(backend: str, address: str) -> None:
    """Raise InputError unless the cluster lets a process join.

    Where somebody listens and nobody answers both libraries wait for minutes, deaf to their own limits and to signals.
    """
    _must_listen(backend, address)
    code = _JOIN.format(_JOINS[backend])
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-c", code, address], capture_output=True, timeout=_JOIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _no_answer(backend, address, TimeoutError(f"nothing was heard within {_JOIN_S} s")) from None
    if tried.returncode:
        said = [line for line in tried.stderr.decode(errors="replace").splitlines() if line.strip()]
        why = said[-1] if said else f"exit status {tried.returncode}"
        raise _no_answer(backend, address, ConnectionError(why))


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"needs '{error.name}', which is not installed: pip install 'dspark-sim[{extra}]'",
            field="backend",
            value=extra,
        ) from None


def _no_answer(backend: str, address: str, error: BaseException) -> InputError:
    why = " ".join(str(error).split())
    return InputError(
        f"no {backend} cluster answers ({why})", field="address", value=address, expected="HOST:PORT of its scheduler"
    )


def _looked_at(size: Callable[[], int]) -> Callable[[], int]:
    """`size`, asked for at most every few seconds; at least 1, so that something waits for the first worker."""
    seen: list[float] = [float("-inf"), 1]

    def latest() -> int:
        if time.monotonic() - seen[0] >= _LOOK_S:
            seen[:] = time.monotonic(), max(1, size())
        return int(seen[1])

    return latest
