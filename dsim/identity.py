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
import pkgutil
import platform
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from importlib.machinery import PathFinder
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dsim.drafts.bank import shipped_bank_file
from dsim.errors import InputError
from dsim.files import file_digest
from dsim.policy import Policy, load_policy, parse_spec, policy_module
from dsim.scenario import Point
from dsim.schema import SHIPPED_BANKS, ArmSection, LiveSection, Scenario

#: Part of every hash: another number, and nothing that was kept is found again.
VERSION = 2

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
        "policy": _text(sorted({part for module in _policy_modules(section) for part in _sources(module)})),
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
    arm_part = {"policy": _pinned_spec(arm.policy), "drafter": arm.drafter, "gamma": scenario.gamma(arm)}
    return {**_pinned(found), "arm": arm_part}


def _pinned(value: Any) -> Any:
    """The same values, each file in them as its name and the digest of its content."""
    if isinstance(value, dict):
        return {key: _pinned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_pinned(item) for item in value]
    return _pinned_text(value) if isinstance(value, str) else value


def _pinned_spec(spec: str) -> list[Any]:
    """A policy's name and parameters, files among them by their content; they may lie beside the policy's own."""
    name, parameters = parse_spec(spec)
    place, _, what = name.rpartition(":")
    if place.endswith(".py"):
        name = f"{_pinned_text(place)}:{what}"
    source = getattr(policy_module(spec), "__file__", None)
    beside = () if source is None else (Path(source).parent,)
    return [
        name,
        {key: _pinned_text(value, *beside) if isinstance(value, str) else value for key, value in parameters.items()},
    ]


def _pinned_text(text: str, *folders: Path) -> str:
    """A path, from here or from one of the folders, as the file's name and digest; anything else as it is.

    What happens to be called like a file counts as one: that costs a run, the other way round would cost the truth.
    """
    files: set[Path] = set()
    try:
        for path in (folder / text for folder in (Path(), *folders)):
            if not path.is_file():
                continue
            files.add(path.resolve())
            if path.suffix in (".toml", ".csv"):  # a profile has two
                pair = (path.with_suffix(".csv"), path.with_suffix(".toml"))
                files |= {other.resolve() for other in pair if other.is_file()}
        if not files:
            return text
        return f"{Path(text).name}#" + "+".join(sorted({f"{file_digest(file)}{file.suffix}" for file in files}))
    except (OSError, ValueError):
        return text


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
    if module is None or getattr(module, "__file__", None) is None or getattr(module, name, None) is not made:
        raise InputError(
            "cannot be told from others by its name, so that its results cannot be kept",
            field=field,
            value=repr(made),
            expected="a function or class at the top level of a module, or no store",
        )
    return _text([name, sorted(set(_sources(module)))])


def _policy_modules(arm: ArmSection) -> Iterator[ModuleType]:
    """The modules that an arm's policy comes from: the one that its spec names, and those of all classes in it."""
    yield policy_module(arm.policy)
    waiting: list[Any] = [load_policy(arm.policy)]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        elif not isinstance(item, str | int | float | np.ndarray) and isinstance(item, Policy):
            for level in type(item).__mro__[:-1]:
                if level.__module__ in sys.modules:
                    yield sys.modules[level.__module__]
                slots = level.__dict__.get("__slots__", ())
                waiting += [getattr(item, slot, None) for slot in ([slots] if isinstance(slots, str) else slots)]
            waiting += getattr(item, "__dict__", {}).values()


def _sources(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Name and digest of a module's source file and of all local ones that it imports, directly or not."""
    if getattr(module, "__file__", None) is None:
        return
    file = Path(str(module.__file__)).resolve()
    for name, path in _reached(_name_of(module), file, _digest_of(file)):
        digest = _digest_of(path)
        # A policy's own file is loaded again when it has changed, anything else is not.
        if path != file or file not in _policies_from_files():
            _must_be_older(path)
        yield name, digest


def _name_of(module: ModuleType) -> str:
    """A module's full name; ``./file.py`` for one that was not found by its name (a policy's file, a script)."""
    name = module.__name__ if module.__spec__ is None else module.__spec__.name
    if name == "__main__" or name.startswith(_FROM_FILE):
        return f"./{Path(str(module.__file__)).name}"
    return name


def _digest_of(path: Path) -> str:
    if not path.is_file():
        raise UnknowableError(f"{path} is no file of its own")
    return file_digest(path)


def _must_be_older(path: Path) -> None:
    if path.stat().st_mtime_ns > _STARTED_NS:
        raise UnknowableError(f"{path} was written while this process was running")


#: How names begin of modules that `dsim.policy` made of files.
_FROM_FILE = "dsim_policy_"


def _policies_from_files() -> set[Path]:
    return {
        Path(str(module.__file__)).resolve()
        for name, module in list(sys.modules.items())
        if name.startswith(_FROM_FILE) and getattr(module, "__file__", None)
    }


@cache
def _reached(name: str, file: Path, _content: str) -> tuple[tuple[str, Path], ...]:
    """A module, the packages that it is in, and the local modules that they import; each as its name and its file.

    Modules that every run can reach are left out. Names belong to it: two files that change places change what runs.
    """
    by_name = not name.startswith("./")
    own = name.partition(".")[0] if by_name else _package_of(file)
    found = {name: file}
    wanted = [*([name] if by_name else []), *_imports(name, file)]
    while wanted:
        for other, path in _local_files(wanted.pop(), own):
            if other not in found:
                found[other] = path
                wanted += _imports(other, path)
    return tuple(found.items())


def _imports(module: str, path: Path) -> Iterator[str]:
    """Full names that a module may import, wherever in it; names out of a module count as its parts too."""
    try:
        found = list(ast.walk(ast.parse(path.read_bytes()))) if path.suffix == ".py" and path.is_file() else []
    except (SyntaxError, ValueError, RecursionError):
        return  # it cannot be run: what it would import does not matter
    package = [] if module.startswith("./") else module.split(".")[: None if path.stem == "__init__" else -1]

    def absolute(name: str, level: int) -> str:
        above = package[: max(0, len(package) - level + 1)] if level else []
        return ".".join([*above, *([name] if name else [])])

    importers = {"import_module", "__import__"} | {
        name.asname
        for node in found
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.name == "import_module" and name.asname
    }
    for node in found:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level)
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
            if called not in importers or not given or not isinstance(given[0], ast.Constant):
                continue
            text = str(given[0].value)
            name = text.lstrip(".")
            yield absolute(name, len(text) - len(name))


def _package_of(path: Path) -> str:
    """The outermost package that a file lies in; empty where it lies in none."""
    name, folder = "", path.parent
    while (folder / "__init__.py").is_file():
        name, folder = folder.name, folder.parent
    return name


#: Where code lies that somebody else wrote and a version number stands for.
_INSTALLED = tuple(
    Path(folder).resolve()
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


def _local_files(name: str, own: str) -> Iterator[tuple[str, Path]]:
    """Name and file of a module and of the packages that it is in, as far as there are such.

    Left out is what every run reaches, and what is installed. Nothing is imported on the way. `own` is a package that
    counts wherever it is.
    """
    dotted, *parts = name.split(".")
    if dotted == "traces" or (dotted == "dsim" and (not parts or parts[0] not in _OF_SCRIPTS)):
        return
    counts = dotted in ("dsim", "policies", "experiments", own)
    try:
        spec = importlib.util.find_spec(dotted)
    except (ImportError, AttributeError, ValueError):
        return
    while spec is not None:
        if spec.origin is not None and spec.has_location:
            path = Path(spec.origin).resolve()
            if not counts and any(path.is_relative_to(folder) for folder in _INSTALLED):
                return
            yield dotted, path
        # A package without an __init__.py has folders, too, and no file.
        if not parts or spec.submodule_search_locations is None:
            return
        folders = list(spec.submodule_search_locations)
        part = parts.pop(0)
        if part == "*":
            for item in pkgutil.iter_modules(folders):
                yield from _local_files(f"{dotted}.{item.name}", own)
            return
        dotted = f"{dotted}.{part}"
        spec = PathFinder.find_spec(part, folders)
