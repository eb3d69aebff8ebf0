"""What the result of a run depends on, as one hash: its part of the scenario, the files behind it, and the code.

Two runs with the same hash have the same result, byte for byte, so that one of them need not be made. Whatever can
change a result has to be in here; what cannot (other arms, other loads, how many seeds, how figures are drawn) is left
out, so that a study that grows keeps what it has.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from dsim.drafts.bank import shipped_bank_file
from dsim.errors import InputError
from dsim.files import file_digest
from dsim.policy import Policy, load_policy
from dsim.scenario import Point
from dsim.schema import SHIPPED_BANKS, ArmSection, LiveSection, Scenario

#: Part of every hash: another number, and nothing that was kept is found again.
VERSION = 1

#: What no run reaches: the layers above `dsim.scenario` (the import contracts keep them there), and live drafting,
#: which counts where drafts are live.
ABOVE_RUNS = (
    "compare",
    "convert",
    "drafter",
    "figures",
    "figures_drafts",
    "frontier",
    "gpu_profile",
    "identity",
    "intervals",
    "plotstyle",
    "store",
    "sweep",
    "workers",
)
#: Those of them that may have a part in what a script makes of a run.
_OF_SCRIPTS = ("compare", "convert", "figures", "figures_drafts", "frontier", "intervals", "plotstyle")
#: Data that is large, or that only scripts read; a run's own banks and drafters are looked at one by one.
_OTHER_DATA = ("banks", "drafters", "validation")
#: About when this process read its code.
_STARTED_NS = time.time_ns()
_LIBRARIES = ("numpy", "scipy", "pandas", "simpy", "numba")


class UnknowableError(Exception):
    """What a run depends on cannot be told; the message says why."""


def arm_identity(
    scenario: Scenario, arm: str, *, open_loop: bool, engine: str = "auto", windows: bool = False
) -> dict[str, str]:
    """What all runs of one arm depend on, by kind.

    Parameters
    ----------
    open_loop
        Whether the loads are multiples of the trace's rate.
    engine
        As in `dsim.sweep.run`. ``step`` has hashes of its own: who asks for the reference does not want what the
        compiled loop left behind.
    windows
        Whether something is made of the run's telemetry, which may depend on the width of windows.

    Returns
    -------
    dict
        Texts and digests.

    Raises
    ------
    UnknowableError
        Live drafting with a target from a hub; a source file that was written while this process was running, so that
        what runs may be what stood there before.
    """
    section = scenario.arm(arm)
    found = {
        "version": str(VERSION),
        "environment": environment(),
        "code": code_digest(),
        "engine": "step" if engine == "step" else "fast",
        "scenario": _text(_relevant(scenario, section, open_loop=open_loop, windows=windows)),
        "bank": _bank_digest(scenario, section),
        "policy": _text(sorted({digest for file in _policy_files(section) for digest in _sources(file)})),
    }
    if scenario.drafts.source == "live" and scenario.gamma(section):
        found["live"] = _text(_live(scenario, section))
    return found


def run_key(arm: dict[str, str], scenario: Scenario, point: Point) -> str:
    """64 hex digits: the hash of one run, given what `arm_identity` (and whatever else matters) says of its arm."""
    load: dict[str, Any] = {"rate_scale": point.rate_scale}
    if point.users is not None:
        load = {"users": point.users, "scored": scenario.scored(point.users)}
    return hashlib.sha256(_text([arm, load, point.seed]).encode()).hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# -- the scenario ----------------------------------------------------------------------------------------


def _relevant(scenario: Scenario, arm: ArmSection, *, open_loop: bool, windows: bool) -> dict[str, Any]:
    """What a run reads of a scenario, with files by their content. A key that is not known here counts."""
    found = scenario.canonical()
    for name in ("name", "arms"):
        del found[name]
    found["arm"] = {"policy": arm.policy, "drafter": arm.drafter, "gamma": scenario.gamma(arm)}
    found["drafters"] = {name: section for name, section in found["drafters"].items() if name == arm.drafter}
    found["drafts"].pop("gamma")
    found["measure"].pop("seeds")
    load = found["load"]
    # The users' scored requests are part of the run's own load.
    for name in ("users", "rate_scales", "scored_min", "scored_per_user"):
        load.pop(name)
    for name in ("requests", "edge_fraction") if not open_loop else ("think_s", "stagger_s", "warmup_per_user"):
        load.pop(name, None)
    if not windows:
        load.pop("window_s")
    pinned: dict[str, Any] = _pinned(found)
    return pinned


def _pinned(value: Any) -> Any:
    """The same values, each file in them as its name and the digest of its content."""
    if isinstance(value, dict):
        return {key: _pinned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_pinned(item) for item in value]
    if not isinstance(value, str):
        return value
    # Paths stand alone or within a policy's spec: file.py:Class:table=prices.json,lag=2
    return "".join(_pinned_word(word) for word in re.split(r"([:=,])", value))


def _pinned_word(word: str) -> str:
    if not ("/" in word or "." in word):
        return word
    path = Path(word)
    try:
        if not path.is_file():
            return word
        files = [path]
        if path.suffix in (".toml", ".csv"):  # a profile has two
            files += [other for other in (path.with_suffix(".csv"), path.with_suffix(".toml")) if other.is_file()]
        return f"{path.name}#" + "+".join(sorted({file_digest(file) for file in files}))
    except (OSError, ValueError):
        return word


def _bank_digest(scenario: Scenario, arm: ArmSection) -> str:
    """Digest of a bank that comes with dsim; empty without one. (A bank of the user's is a file of the scenario.)"""
    drafter = scenario.drafters.get(arm.drafter)
    if drafter is None or not scenario.gamma(arm) or scenario.drafts.source == "live":
        return ""
    name = drafter.bank
    if name is None and scenario.drafts.source != "synthetic":
        name = SHIPPED_BANKS.get(drafter.like or arm.drafter)
    if name is None or not shipped_bank_file(name).is_file():
        return ""
    with resources.as_file(shipped_bank_file(name)) as path:
        return file_digest(path)


def _live(scenario: Scenario, arm: ArmSection) -> dict[str, str]:
    models, drafter = scenario.drafts.live or LiveSection(), scenario.drafters[arm.drafter]
    own = drafter.like or arm.drafter
    shipped = None if models.target == "tiny" else SHIPPED_BANKS.get(own)
    found: dict[str, str] | None = importlib.import_module("dsim.drafter.sources").live_identity(
        target=models.target, device=models.device, weights=drafter.weights or shipped
    )
    if found is None:
        raise UnknowableError(f"live drafts of '{models.target}': its files are not in a folder of that name")
    return found | {"code": _digest(list(_files(resources.files("dsim") / "drafter")))}


# -- the code --------------------------------------------------------------------------------------------


@cache
def environment() -> str:
    """Versions, and the vector instructions that NumPy found here: with others, last digits may differ."""
    versions = []
    for name in _LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    simd: Any = np.show_config(mode="dicts").get("SIMD Extensions", {})
    vectors = " ".join(simd.get("found", ()))
    return f"python {platform.python_version()}, {', '.join(versions)}, {platform.machine()} {vectors}"


@cache
def code_digest() -> str:
    """Digest of the code and the small tables that every run can reach, as they lie there when first asked for."""
    parts = []
    for item in resources.files("dsim").iterdir():
        name = item.name.removesuffix(".py")
        if name in ABOVE_RUNS or name == "data":
            continue
        parts += list(_files(item))
    for item in (resources.files("dsim") / "data").iterdir():
        if item.name not in _OTHER_DATA:
            parts += list(_files(item, everything=True))
    parts += list(_files(resources.files("traces"), everything=True))
    return _digest(parts)


def _files(item: Traversable, prefix: str = "", *, everything: bool = False) -> Iterator[tuple[str, Traversable]]:
    name = f"{prefix}/{item.name}"
    if item.is_dir():
        for inner in item.iterdir():
            if inner.name != "__pycache__":
                yield from _files(inner, name, everything=everything)
    elif everything or item.name.endswith(".py"):
        yield name, item


def _digest(parts: list[tuple[str, Traversable]]) -> str:
    total = hashlib.sha256()
    for name, item in sorted(parts, key=lambda part: part[0]):
        if isinstance(item, Path):
            _must_be_older(item)
        total.update(f"{name} {hashlib.sha256(item.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def callable_identity(made: Callable[..., Any] | None, field: str) -> str:
    """A function or class by its name, and the digest of what its module is made of; empty for None.

    Raises
    ------
    InputError
        It is not found by its name in a module (a lambda, an inner function, a partial one): what it would do cannot
        be told by looking at files.
    UnknowableError
        See `arm_identity`.
    """
    if made is None:
        return ""
    name, module = getattr(made, "__qualname__", ""), sys.modules.get(getattr(made, "__module__", ""))
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, name, None) is not made:
        raise InputError(
            "cannot be told from others by its name, so that its results cannot be kept",
            field=field,
            value=repr(made),
            expected="a function or class at the top level of a module, or no store",
        )
    return _text([name, sorted(set(_sources(Path(file))))])


def _policy_files(arm: ArmSection) -> Iterator[Path]:
    """The files in which an arm's policy, and those that it holds, are defined."""
    yield from _class_files(load_policy(arm.policy))


def _class_files(policy: object) -> Iterator[Path]:
    for level in type(policy).__mro__[:-1]:
        file = getattr(sys.modules.get(level.__module__), "__file__", None)
        if file is not None:
            yield Path(file)
    for part in getattr(policy, "__dict__", {}).values():
        if isinstance(part, Policy):
            yield from _class_files(part)


def _sources(file: Path) -> Iterator[str]:
    """Digests of a source file and of all local ones that it imports, directly or not."""
    file = file.resolve()
    for path in _reached(file, file_digest(file)):
        # A policy's own file is loaded again when it has changed, anything else is not.
        if path != file or file not in _policies_from_files():
            _must_be_older(path)
        yield file_digest(path)


def _must_be_older(path: Path) -> None:
    if path.stat().st_mtime_ns > _STARTED_NS:
        raise UnknowableError(f"{path} was written while this process was running")


def _policies_from_files() -> set[Path]:
    return {
        Path(str(module.__file__)).resolve()
        for name, module in list(sys.modules.items())
        if name.startswith("dsim_policy_") and getattr(module, "__file__", None)
    }


@cache
def _reached(file: Path, _content: str) -> tuple[Path, ...]:
    """A source file, and the files of local modules that it imports; ones that every run can reach are left out."""
    found, waiting, own = [file], [file], _package_of(file)[:1]
    while waiting:
        path = waiting.pop()
        for name in _imports(path):
            other = _local_file(name, tuple(own))
            if other is not None and other not in found:
                found.append(other)
                waiting.append(other)
    return tuple(found)


def _imports(path: Path) -> Iterator[str]:
    """Dotted names that a source file may import, wherever in it; names out of a module count as its parts too."""
    if path.suffix != ".py":
        return
    package = _package_of(path)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called == "import_module" and node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def _package_of(path: Path) -> list[str]:
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


#: Where code lies that somebody else wrote and a version number stands for.
_INSTALLED = tuple(
    Path(folder).resolve()
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


def _local_file(name: str, own: tuple[str, ...]) -> Path | None:
    """The source of a module; None where every run reaches it, where it is installed, or where there is none.

    Nothing is imported on the way. `own` are packages that count wherever they are.
    """
    top, *parts = name.split(".")
    if top == "traces" or (top == "dsim" and (not parts or parts[0] not in _OF_SCRIPTS)):
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, AttributeError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    path = Path(spec.origin).resolve()
    if top not in ("dsim", "policies", "experiments", *own) and any(path.is_relative_to(old) for old in _INSTALLED):
        return None
    for part in parts:
        inside = path.parent
        if path.name != "__init__.py":
            return None
        module, package = inside / f"{part}.py", inside / part / "__init__.py"
        if not (module.is_file() or package.is_file()):
            return None
        path = package if package.is_file() else module
    return path
