"""What all experiments share: the command line, output that is whole or absent, tables and CSV files."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import joblib
import numpy as np
import tomli_w

from dsim.errors import InputError
from dsim.metrics import windows
from dsim.profile import Profile, load_profile
from dsim.scenario import Result, bank_of, trace_of
from dsim.schema import (
    SOURCES,
    HostSection,
    Scenario,
    load_scenario,
    parse_override,
    parse_scenario,
    resolve_files,
    scenario_path,
)
from dsim.serve import ENGINES
from dsim.store import Store, default_store
from dsim.sweep import Sweep
from dsim.workers import BACKENDS
from experiments._sources import cost_words, drafts_words, requests_words

if TYPE_CHECKING:  # the first run of a sweep need not wait for it
    import pandas as pd

DEFAULT_SCENARIO = "decode-node"
#: What ``--drafts live`` runs unless ``--scenario`` says otherwise: small, because the models run for every step.
LIVE_SCENARIO = "live-node"


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit code 2, like those of `run_main`."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help shows the options)\n")


def parser(
    description: str, *, default_seeds: str = "the scenario's", out: str = "results", scenario: str = DEFAULT_SCENARIO
) -> argparse.ArgumentParser:
    """The options that every experiment has; a script adds its own.

    Parameters
    ----------
    description
        What the experiment answers.
    default_seeds
        What the help says of ``--seeds``.
    out, scenario
        Defaults of the options of those names.

    Returns
    -------
    ArgumentParser
        Parsed options: ``scenario`` (Path), ``seeds`` and ``jobs`` (int >= 1), ``out`` (Path), ``drafts`` (a source or
        None), ``quick`` (bool), ``overrides`` (dict of dotted scenario key to value, from ``--set``), and those of
        `add_run_options`.
    """
    made = OneLineParser(description=description)
    made.add_argument(
        "--scenario",
        metavar="FILE",
        type=_argument(scenario_path),
        action=_Given,
        default=scenario,
        help=f"scenario file (TOML), or the name of a shipped one (default: %(default)s; with --drafts live: "
        f"{LIVE_SCENARIO})",
    )
    made.add_argument("--seeds", metavar="N", type=positive_int, help=f"replications (default: {default_seeds})")
    cores = joblib.cpu_count()
    made.add_argument(
        "--jobs",
        metavar="N",
        type=positive_int,
        action=_Given,
        default=cores,
        help=f"processes (default: {cores}); live: threads",
    )
    made.add_argument(
        "--out", metavar="DIR", type=Path, default=Path(out), help="folder for the results (default: %(default)s)"
    )
    made.add_argument(
        "--drafts",
        choices=SOURCES,
        help="drafts as recorded, recorded and tilted to published levels, synthetic, or live: drafter and target run "
        "(default: the scenario's)",
    )
    made.add_argument("--quick", action="store_true", help="a smaller grid, to see whether it works")
    made.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action=_Overrides,
        default={},
        help="change one key of the scenario; may be repeated",
    )
    add_run_options(made)
    return made


def add_run_options(cli: argparse.ArgumentParser) -> None:
    """The options that say how runs are made (`run_options`); they change nothing in the results."""
    group = cli.add_argument_group("how runs are made (the results are the same bytes)")
    group.add_argument(
        "--store",
        metavar="DIR",
        help="folder in which the result of every run is kept, and looked for before it is made; 'none': every run is "
        "made (default: $DSIM_STORE, or a folder of the user's cache)",
    )
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default=BACKENDS[0],
        help="where runs are made: by processes on this machine (loky), or on a Dask or Ray cluster (default: "
        "%(default)s)",
    )
    group.add_argument("--address", metavar="HOST:PORT", help="scheduler of the Dask or Ray cluster")
    group.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="compiled where possible (auto), step by step in Python (step), or compiled and an error where that is "
        "not possible (default: %(default)s)",
    )


def run_options(options: argparse.Namespace, scenario: Scenario) -> dict[str, Any]:
    """What `dsim.sweep.run` is to be told by the parsed options, after `scenario_of`.

    Raises
    ------
    InputError
        Options that contradict each other, or a ``--store`` that is none.
    """
    if options.backend == "loky":
        if options.address is not None:
            raise InputError("needs --backend dask or ray", field="--address", value=options.address)
    elif options.address is None:
        raise InputError("needs --address", field="--backend", value=options.backend, expected="HOST:PORT")
    elif scenario.drafts.source == "live":
        raise InputError("live drafts run in this process", field="--backend", value=options.backend, expected="loky")
    elif getattr(options, "jobs_given", False):
        raise InputError(
            f"is not used with --backend {options.backend}: the cluster has the workers that it has",
            field="--jobs",
            value=options.jobs,
        )
    return {
        "jobs": options.jobs,
        "engine": options.engine,
        "store": _store_of(options.store),
        "backend": options.backend,
        "address": options.address,
    }


def _store_of(given: str | None) -> Path | None:
    folder = given or default_store()
    if folder == "none":
        return None
    try:
        return Store(folder).folder
    except InputError as error:
        if given is not None:
            raise
        # Nobody asked for it, so nobody has to do without a result.
        print(f"results are not kept: {error}", file=sys.stderr)
        return None


def positive_int(text: str) -> int:
    """An option's value as an integer >= 1 (an argparse type)."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got '{text}', expected an integer >= 1")
    return value


def _argument(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def converted(text: str) -> Any:
        try:
            return convert(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


class _Given(argparse.Action):
    """Stores the value, and in ``NAME_given`` that somebody gave it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


class _Overrides(argparse.Action):
    """``--set a.b=3`` collected as {"a.b": 3}."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            key, value = parse_override(values)
        except InputError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        found = dict(getattr(namespace, self.dest))
        if key in found:
            raise argparse.ArgumentError(self, f"'{key}' is set twice")
        setattr(namespace, self.dest, {**found, key: value})


def scenario_of(options: argparse.Namespace, seeds: int | None = None) -> Scenario:
    """The scenario that the options of `parser` describe: file, ``--set``, ``--seeds``, ``--drafts`` and ``--quick``.

    `seeds` is the script's own number of replications, where neither ``--seeds`` nor ``--set`` gives one.

    ``--quick`` keeps at most four of the loads (first and last among them), two seeds and a few requests.

    Live drafts run in this process, where the models are loaded once: ``options.jobs`` becomes 1, and PyTorch gets the
    threads.
    """
    overrides = dict(options.overrides)
    if options.seeds is not None:
        if "measure.seeds" in overrides:
            raise InputError("is given twice", field="--seeds", value=options.seeds, expected="--seeds or --set")
        overrides["measure.seeds"] = options.seeds
    elif seeds is not None:
        overrides.setdefault("measure.seeds", seeds)
    if options.drafts is not None:
        if "drafts.source" in overrides:
            raise InputError("is given twice", field="--drafts", value=options.drafts, expected="--drafts or --set")
        overrides["drafts.source"] = options.drafts
    file = options.scenario
    if options.drafts == "live" and not getattr(options, "scenario_given", False):
        file = scenario_path(LIVE_SCENARIO)
    scenario = load_scenario(file, overrides)
    if scenario.drafts.source == "live":
        with suppress(ImportError):  # which the run will report
            importlib.import_module("torch").set_num_threads(options.jobs)
        options.jobs = 1
    if not options.quick:
        return scenario
    load = scenario.load
    quick = load.model_copy(
        update={
            "users": _few(load.users),
            "rate_scales": _few(load.rate_scales),
            "scored_min": min(load.scored_min, 60),
            "scored_per_user": min(load.scored_per_user, 1),
            "requests": min(len(trace_of(scenario)) if load.requests == "all" else load.requests, 300),
        }
    )
    measure = scenario.measure.model_copy(update={"seeds": options.seeds or min(2, scenario.measure.seeds)})
    return scenario.model_copy(update={"load": quick, "measure": measure})


def override(options: argparse.Namespace, key: str, value: object, option: str) -> None:
    """An option that is short for ``--set KEY=VALUE``; both at once are refused."""
    if value is None:
        return
    if key in options.overrides:
        raise InputError(f"is given twice, here and by --set {key}", field=option, value=value, expected="one of them")
    options.overrides = {**options.overrides, key: value}


def refuse_sets(options: argparse.Namespace, unused: Mapping[str, str]) -> None:
    """Refuse a ``--set`` that would change nothing in a script: of one of these keys, or below it.

    Parameters
    ----------
    unused
        By key, what to use instead, or why it is not used.
    """
    for key, value in options.overrides.items():
        for name, expected in unused.items():
            if key == name or key.startswith(f"{name}."):
                raise InputError("is not used by this script", field=key, value=value, expected=expected)


#: Keys of open loops only.
_OPEN_LOOP = ("load.rate_scales", "load.requests", "load.edge_fraction", "load.window_s")


def refuse_loads(options: argparse.Namespace, option: str | None) -> None:
    """Refuse a ``--set`` of keys of open loops and, in scripts whose loads are an `option`, of ``load.users``."""
    own = {} if option is None else {"load.users": option}
    refuse_sets(options, own | dict.fromkeys(_OPEN_LOOP, "a key of closed loops: this script runs no other"))


def arm_of(scenario: Scenario, spec: str) -> dict[str, Any]:
    """The arm (as a section) that a SPEC names: one of the scenario's, or ``POLICY[@DRAFTER[/GAMMA]]``."""
    for arm in scenario.arms:
        if arm.name == spec:
            return arm.model_dump()
    policy, at, rest = spec.partition("@")
    drafter, slash, gamma = rest.partition("/")
    if not policy or (at and not drafter) or (slash and not gamma.isdecimal()):
        raise InputError("is no arm spec", value=spec, expected="an arm's name, or POLICY[@DRAFTER[/GAMMA]]")
    return {"name": spec, "policy": policy, "drafter": drafter or "dspark", "gamma": int(gamma) if slash else None}


def with_arms(scenario: Scenario, arms: Iterable[dict[str, Any]]) -> Scenario:
    """The scenario with these arms (as sections) only, validated again; policy files are found from here."""
    return resolve_files(parse_scenario(scenario.model_dump(mode="python") | {"arms": tuple(arms)}), Path())


def arms_of(scenario: Scenario, names: str | None) -> list[str]:
    """The arms that ``--arms a,b`` names, in that order; all of the scenario's without it."""
    if names is None:
        return [arm.name for arm in scenario.arms]
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        scenario.arm(name)
        if chosen.count(name) > 1:
            raise InputError(field="--arms", value=names, expected=f"'{name}' once")
    return chosen


def sources_note(scenario: Scenario, table: pd.DataFrame) -> str:
    """The sentences of a caption that say which inputs are measured, recorded, synthetic or assumed."""
    host = scenario.cluster.host
    silent = host.base_ms == 0 and host.per_request_ms == 0
    whose = table["drafter"] if "drafter" in table else ["some arms'"] * len(table)
    parts = [
        cost_words(dict(zip(table["cost_source"], whose, strict=True)), _profile_of(scenario)),
        drafts_note(scenario, table),
        requests_words(str(table["trace_source"].iloc[0])),
        "Prompts are prefilled elsewhere at the profile's times, without a queue (assumed)."
        if scenario.cluster.prefill == "disaggregated"
        else "",
        "No host overhead (assumed)." if silent else f"Host overhead {_host_text(host)} (the scenario's).",
        "Some steps lie outside the profiled sizes (extrapolated)." if table["extrapolated"].any() else "",
    ]
    return " ".join(part for part in parts if part)


def drafts_note(scenario: Scenario, table: pd.DataFrame) -> str:
    """The sentences of a caption about drafts: which drafters, on whose texts, and at which level."""
    targets = {}
    for name in scenario.drafters if scenario.drafts.source in ("recorded", "tilted") else ():
        with suppress(InputError):  # a drafter of no arm, whose bank does not ship
            header = bank_of(scenario, name).header
            if header.target != "not named":  # a log's, of which nobody said it
                targets[f"{header.kind}:{header.source}:{header.drafter}"] = header.target.partition(" (")[0]
    return drafts_words(sorted(set(table["drafts_source"])), targets)


def _profile_of(scenario: Scenario) -> Profile | None:
    """The scenario's profile; None where it was a file that is gone by now (it was made for the study)."""
    try:
        return load_profile(scenario.cost.profile)
    except InputError:
        return None


def _host_text(host: HostSection) -> str:
    each = f" + {host.per_request_ms:g} ms x R^{host.power or 0.5:g}" if host.per_request_ms else ""
    hidden = f", {100 * host.hidden_fraction:g} % hidden" if host.hidden_fraction else ""
    return f"{host.base_ms:g} ms{each}{hidden}"


def written(out: Path) -> None:
    """Say what an experiment wrote (call inside `staged_output`, with the staging folder)."""
    print(f"\nfiles: {', '.join(sorted(file.name for file in out.iterdir()))}")


def windows_of(result: Result) -> dict[str, np.ndarray]:
    """What a sweep brings back where telemetry windows are drawn (its `extract`)."""
    return windows(result.records, result.window_s)


def window_table(sweep: Sweep, load: str) -> pd.DataFrame:
    """One row a telemetry window: arm, the run's own load, seed, and the columns of `dsim.metrics.windows`.

    In a closed loop the run's load is the column ``users``; ``concurrency`` is the window's own.
    """
    import pandas as pd

    name = "users" if load == "concurrency" else load
    parts = [
        pd.DataFrame({"arm": row["arm"], name: row[load], "seed": row["seed"], **found})
        for (_, row), found in zip(sweep.table.iterrows(), sweep.extracts, strict=True)
    ]
    table = pd.concat(parts, ignore_index=True)
    if table.empty:
        raise InputError("no telemetry window is filled", field="load.window_s", expected="shorter, or a longer run")
    return table


def _few(values: tuple[Any, ...], most: int = 4) -> tuple[Any, ...]:
    if len(values) <= most:
        return values
    return tuple(values[round(i * (len(values) - 1) / (most - 1))] for i in range(most))


def write_scenario(scenario: Scenario, path: str | Path) -> None:
    """Save the scenario that was run, and the versions it was run with, as a file that can be run again."""
    names = ("dspark-sim", "numpy", "scipy", "pandas", "simpy", "matplotlib")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    head = f"# written by dsim: python {platform.python_version()}, {versions}\n"
    Path(path).write_text(head + tomli_w.dumps(scenario.canonical()), encoding="utf-8")


@contextmanager
def staged_output(out_dir: str | Path) -> Iterator[Path]:
    """Collect result files, and put them into `out_dir` only when all of them are there.

    The block writes below the path it is given, a hidden folder in `out_dir` itself (so that the final
    renames stay on one file system even where `out_dir` is a mount). When the block ends, each file is renamed into
    place and replaces one of the same name; other files of `out_dir` stay. When it raises, everything it wrote is
    removed, and so are the folders that were made for it.

    Raises
    ------
    InputError
        `out_dir` (or a folder above it) is a file, cannot be written, or holds a folder where a result file
        should go (or the reverse).
    """
    out = Path(out_dir)
    made = _make_folders(out)
    try:
        try:
            stage = Path(tempfile.mkdtemp(prefix=".partial-", dir=out))
        except OSError as error:
            raise _unusable(out, error) from error
        try:
            # mkdtemp folders are private; results get the usual permissions.
            (stage / "files").mkdir()
            yield stage / "files"
            _move_all(stage / "files", out)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except BaseException:
        _remove_empty(made)
        raise


def _make_folders(out: Path) -> list[Path]:
    """Create `out` and what is missing above it; returns what was created, outermost first."""
    made: list[Path] = []
    try:
        missing = []
        folder = out
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        if not folder.is_dir():
            raise InputError("is a file", file=folder, field="--out", expected="a folder for the results")
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.append(folder)
    except OSError as error:
        _remove_empty(made)
        raise _unusable(out, error) from error
    return made


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, innermost first, as far as they are empty."""
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()


def _unusable(out: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot be written ({error.strerror})", file=out, field="--out", expected="a folder for the results"
    )


def _move_all(stage: Path, out: Path) -> None:
    files = sorted(path for path in stage.rglob("*") if path.is_file())
    moves = [(file, out / file.relative_to(stage)) for file in files]
    for _, target in moves:  # all checks before the first move
        if target.is_dir():
            raise InputError("is a folder", file=target, field="--out", expected="a file to replace")
        above = next(folder for folder in target.parents if folder.exists())
        if not above.is_dir():
            raise InputError("is a file", file=above, field="--out", expected="a folder")
    for file, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run an experiment's `main` and end the process with the right exit code.

    0 (or what `main` returns), 2 after one ``error: ...`` line for bad input, 130 when interrupted. Anything
    else is a defect and keeps its traceback.
    """
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            # As an exception, so that staged files are removed and workers end.
            signal.signal(getattr(signal, name), lambda number, _frame: sys.exit(128 + number))
    try:
        code = main()
    except (InputError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except MemoryError as error:
        print(f"error: out of memory ({error}); a size in the scenario is too large", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(code or 0)


def write_csv(df: pd.DataFrame, path: str | Path) -> None:
    """Write a table whose bytes depend on its values only.

    Floats have the shortest text that reads back as the same number, lines end with a bare newline, missing values
    are empty, the index is left out.
    """
    Path(path).write_bytes(df.to_csv(index=False, lineterminator="\n").encode("utf-8"))


def format_table(df: pd.DataFrame, digits: int = 4) -> str:
    """A table to read: aligned columns, numbers with about `digits` significant digits, ``-`` for no value.

    All numbers of a column have the same decimals, chosen for its largest, so that they line up; one that
    would be rounded to nothing is shown with two digits of its own.

    Examples
    --------
    >>> import pandas as pd
    >>> print(format_table(pd.DataFrame({"arm": ["a", "bb"], "ms": [1.23456, 100.0]})))
    arm     ms
    a      1.2
    bb   100.0
    """
    import pandas as pd

    columns = []
    for name in df.columns:
        cells = _cells(df[name], digits)
        numeric = pd.api.types.is_numeric_dtype(df[name]) and not pd.api.types.is_bool_dtype(df[name])
        width = max(len(text) for text in (str(name), *cells))
        columns.append([f"{text:>{width}}" if numeric else f"{text:<{width}}" for text in (str(name), *cells)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def _cells(column: pd.Series, digits: int) -> list[str]:
    import pandas as pd

    if pd.api.types.is_bool_dtype(column):
        return ["yes" if value else "no" for value in column]
    if not pd.api.types.is_float_dtype(column):
        return ["-" if pd.isna(value) else " ".join(str(value).split()) for value in column]
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    finite = np.abs(values[np.isfinite(values)])
    if finite.size and (finite == np.round(finite)).all() and finite.max() < 10**digits:
        decimals = 0  # counts that became floats because some are missing
    else:
        largest = finite.max(initial=0.0)
        decimals = 0 if largest == 0 else int(np.clip(digits - 1 - np.floor(np.log10(largest)), 0, 8))
    return [_cell(float(value), decimals) for value in values]


def _cell(value: float, decimals: int) -> str:
    if np.isnan(value):
        return "-"
    text = f"{value:.{decimals}f}"
    if value != 0 and float(text) == 0:
        return f"{value:.1e}"
    return text.removeprefix("-") if float(text) == 0 else text


def print_table(df: pd.DataFrame, *, digits: int = 4, file: TextIO | None = None) -> None:
    """Print `format_table` (to standard output unless `file` says otherwise)."""
    print(format_table(df, digits), file=file)
