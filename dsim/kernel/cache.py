"""Ways to compiled code: a policy's kernel, one call of it, and the folder in which it is kept between runs."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from dsim.files import cache_dir
from dsim.kernel import Kernel

#: Modules whose functions are compiled, and those that these take numbers from.
_SOURCES = (
    ("dsim.kernel", ("__init__.py", "planning.py", "call.py")),
    ("dsim.compiled", ("layout.py", "loop.py")),
    ("policies", ("_kernels.py",)),
)
#: Those whose code is compiled when they are imported.
_COMPILED = (("dsim.compiled", "loop.py"), ("policies", "_kernels.py"))


def kernel_of(policy: Any) -> Kernel | None:
    """The compiled form that a policy offers (Numba must be there); None: it has none.

    It counts only where the policy's own class defines it: a subclass may have changed what `plan` does.

    Raises
    ------
    InputError
        It offers something else.
    """
    offer = getattr(policy, "kernel", None)
    if (
        offer is None
        or "kernel" not in vars(type(policy))
        or {"plan", "observe"} & getattr(policy, "__dict__", {}).keys()
    ):
        return None
    with kernel_cache():
        found = offer()
    if found is not None and not isinstance(found, Kernel):
        raise InputError(
            f"policy {type(policy).__name__} offers no kernel",
            field="kernel()",
            value=type(found).__name__,
            expected="a dsim.kernel.Kernel, or None",
        )
    if found is not None and found.observe is not None and getattr(policy, "observe", None) is None:
        raise InputError(
            f"the kernel of policy {type(policy).__name__} learns, and its plan does not",
            field="kernel().observe",
            value=type(found.observe).__name__,
            expected="None, or a method observe(verified, accepted) of the policy",
        )
    return found


def kernel_plan(kernel: Kernel, view: Any, state: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.int64]:
    """int64[R]: see `dsim.kernel.call.plan_once`."""
    with kernel_cache():
        call = importlib.import_module("dsim.kernel.call")
    answer: npt.NDArray[np.int64] = call.plan_once(kernel, view, state)
    return answer


def kernel_observe(
    kernel: Kernel, verified: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64], state: npt.NDArray[np.float64]
) -> None:
    """See `dsim.kernel.call.observe_once`."""
    with kernel_cache():
        importlib.import_module("dsim.kernel.call").observe_once(kernel, verified, accepted, state)


@contextmanager
def kernel_cache() -> Iterator[None]:
    """Code that is compiled in here is kept on disk, one folder for each version of its sources.

    Numba looks only at the file that a function is in; what it takes from other files would go unnoticed.
    """
    import numba

    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_cache_folder())
    try:
        with warnings.catch_warnings():
            # Functions as arguments are announced as experimental in every process.
            warnings.simplefilter("ignore", numba.NumbaExperimentalFeatureWarning)
            yield
    finally:
        numba.config.CACHE_DIR = before


def is_warm() -> bool:
    """Whether a process has said that all built-in code is in the cache, as it is here and now.

    Asked before processes are started: where the code is there, each reads it at once, and where it is not, one
    compiles it and the others wait. A wrong answer costs time and nothing else. Imports no Numba.
    """
    try:
        return _mark().exists()
    except OSError:  # sources that are no files
        return False


def note_warm() -> None:
    """Say so to processes to come, if it is all there."""
    if all(f"{package}.{name.removesuffix('.py')}" in sys.modules for package, name in _COMPILED):
        with suppress(OSError):
            _mark().touch()


def _mark() -> Path:
    """A file whose name says what Numba looks at before it takes code from its cache (of the CPU: the host's name)."""
    files = [Path(str(file)) for file in _source_files()]
    state = (
        [_version(name) for name in ("numba", "llvmlite", "numpy")],
        [sys.version, platform.node(), platform.machine()],
        [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files],
    )
    return _cache_folder() / f"warm-{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_files() -> list[Traversable]:
    return [resources.files(package) / name for package, names in _SOURCES for name in names]


@cache
def _cache_folder() -> Path:
    digest = hashlib.sha256()
    for file in _source_files():
        digest.update(file.read_bytes())
    folder = cache_dir() / "kernels-1" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="dsim-kernels-"))  # nowhere to keep it: for this process alone
