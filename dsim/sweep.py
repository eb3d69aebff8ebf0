"""Many runs of one scenario, here or on a cluster, in a table whose bytes do not depend on where.

What a run left behind may be kept in a store (`dsim.store`), so that a sweep that was interrupted, or that grows, makes
only the runs that are missing.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dsim.compiled import warm_up
from dsim.cost import StepCost
from dsim.errors import InputError
from dsim.identity import UnknowableError, arm_identity, callable_identity, run_key
from dsim.kernel.cache import is_warm
from dsim.probe import StepProbe
from dsim.scenario import Point, Result, check_scenario, compiles, cost_of, simulate, trace_of
from dsim.schema import MIN_WARMUP, Scenario
from dsim.serve import ENGINES
from dsim.store import Outcome, Store, plain, plain_number, value_of
from dsim.workers import Workers, check_backend, workers

if TYPE_CHECKING:
    import pandas as pd

#: How often a run may take its process down with it, nobody else running there, before the sweep gives up.
MOST_DEATHS = 3


@dataclass(frozen=True)
class Sweep:
    """Rows in canonical order (arms as in the scenario, then load, then seed), and extracts beside them."""

    table: pd.DataFrame
    extracts: list[Any]


def grid(
    scenario: Scenario,
    *,
    arms: Sequence[str] | None = None,
    users: Iterable[int] | None = None,
    rate_scales: Iterable[float] | None = None,
    seeds: Iterable[int] | None = None,
) -> list[Point]:
    """All runs of a scenario in canonical order: closed loop over `users`, or open loop over `rate_scales`."""
    names = [arm.name for arm in scenario.arms] if arms is None else list(arms)
    for name in names:
        scenario.arm(name)
    seeds = list(range(scenario.measure.seeds) if seeds is None else seeds)
    if rate_scales is not None:
        return [Point(arm, seed, rate_scale=scale) for arm in names for scale in rate_scales for seed in seeds]
    loads = list(scenario.load.users if users is None else users)
    return [Point(arm, seed, users=n) for arm in names for n in loads for seed in seeds]


def run(
    scenario: Scenario,
    points: Sequence[Point],
    *,
    jobs: int = 1,
    progress: bool = True,
    extract: Callable[[Result], Any] | None = None,
    probe: Callable[[], StepProbe] | None = None,
    engine: str = "auto",
    store: str | Path | None = None,
    backend: str = "loky",
    address: str | None = None,
) -> Sweep:
    """Make the runs, or take them from a store.

    Parameters
    ----------
    jobs
        Worker processes on this machine; 1 runs in this process. A cluster has as many as it has.
    extract
        Called with each `Result` where it was made (a module-level function); what it returns comes back too.
        The records themselves stay in the worker.
    probe
        Makes a probe for each run (a class, such as `dsim.probe.StepRegret`); its columns come into the table.
    engine
        See `dsim.serve.serve`: the table is the same whichever loop runs.
    store
        Folder in which results are kept and looked for (`dsim.store`). None: every run is made.
    backend, address
        Where runs are made: see `dsim.workers.workers`.

    Raises
    ------
    InputError
        Whatever a run refuses; an extract that cannot be kept in the store; files or code that a worker has otherwise
        than this process; a run whose process was killed again and again. The runs that were done until then are kept.

    Notes
    -----
    Fits happen once, here, and are shipped; banks are opened in each worker as memory maps of the same cache
    files. Long runs start first, so that no worker is left with the longest one at the end. A run whose process is
    killed is made again, then with nothing else under way, so that it is known which run it was.
    """
    if jobs < 1:
        raise InputError(field="jobs", value=jobs, expected="an integer >= 1")
    if engine not in ENGINES:
        raise InputError(field="engine", value=engine, expected=f"one of {', '.join(ENGINES)}")
    check_backend(backend, address)
    arms = sorted({point.arm for point in points})
    check_scenario(scenario, arms)
    study = _Study(scenario, extract, probe, engine)
    if store is not None or backend != "loky":
        study = _identified(study, points)
    # After the hashes: a profile that is changed in between is noticed, as whatever a run reads (`_agreed`).
    study = replace(study, cost=cost_of(scenario))
    kept = _Kept(None if store is None else Store(store), study, points)
    outcomes = kept.found(show=progress)
    missing = [i for i in range(len(points)) if i not in outcomes]
    if missing:
        for i, outcome in _runs(study, points, missing, jobs, backend, address, progress=progress):
            outcomes[i] = kept.keep(i, outcome)
    if len(outcomes) != len(points):
        raise RuntimeError(f"sweep invariant violated: {len(points) - len(outcomes)} runs are missing")
    # Workers, which make no table, start sooner without it.
    import pandas as pd

    done = [outcomes[i] for i in range(len(points))]
    return Sweep(pd.DataFrame([row for row, _ in done]), [extra for _, extra in done])


@dataclass(frozen=True)
class _Study:
    """What all runs of a sweep share: it goes to the workers with each of them."""

    scenario: Scenario
    extract: Callable[[Result], Any] | None
    probe: Callable[[], StepProbe] | None
    engine: str
    cost: StepCost | None = None
    #: What the runs of each arm depend on (`dsim.identity`); an arm that is not there depends on what cannot be told.
    identities: dict[tuple[str, bool], dict[str, str]] = field(default_factory=dict)


# -- one run ---------------------------------------------------------------------------------------------

#: Threads of one process (a Dask worker may have several) take turns: compiled code is not made for less.
_TURN = threading.Lock()


def _attempt(study: _Study, point: Point) -> Outcome | InputError:
    """The run, or why there is none. As a value, because not every backend brings an error home as it was."""
    try:
        return _agreed(study, point)
    except InputError as error:
        return error


def _agreed(study: _Study, point: Point) -> Outcome:
    with _TURN:
        known = study.identities.get((point.arm, point.users is None))
        if known is None:
            return _made(study, point)
        # Before, so that the reason comes before what other files lead to; after, because the run has read them since.
        _must_agree(known, study, point)
        outcome = _made(study, point)
        _must_agree(known, study, point)
        return outcome


def _made(study: _Study, point: Point) -> Outcome:
    probe = None if study.probe is None else study.probe()
    result = simulate(study.scenario, point, cost=study.cost, probe=probe, engine=study.engine)
    row = {name: plain_number(value) for name, value in result.row.items()}
    return row, None if study.extract is None else study.extract(result)


def _must_agree(known: dict[str, str], study: _Study, point: Point) -> None:
    """A worker has other files than the sweep's own process where they lie elsewhere, or have been changed since."""
    try:
        mine = _arm_identity(study, point)
        for name, made in (("extract", study.extract), ("probe", study.probe)):
            # What is defined in a script itself was shipped as it is: it has no module here.
            if getattr(made, "__module__", None) != "__main__":
                mine[name] = callable_identity(made, name)
    except UnknowableError as error:
        raise InputError(f"{error}, while the sweep was running", field="arm", value=point.arm) from None
    for name, value in known.items():
        if mine.get(name, value) != value:
            raise InputError(
                f"arm '{point.arm}': a worker's {name} is not that of the process that started the sweep",
                field=name,
                value=_cut(mine[name], value),
                expected=f"{_cut(value, mine[name])}; versions, code and files must be the same until the sweep ends",
            )


def _cut(text: str, other: str) -> str:
    """The part of a text from where it differs from another."""
    start = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), 0)
    return text[max(0, start - 40) : start + 80]


def _arm_identity(study: _Study, point: Point) -> dict[str, str]:
    return arm_identity(
        study.scenario,
        point.arm,
        open_loop=point.users is None,
        engine=study.engine,
        windows=study.extract is not None,
    )


# -- the store -------------------------------------------------------------------------------------------


def _identified(study: _Study, points: Sequence[Point]) -> _Study:
    known: dict[tuple[str, bool], dict[str, str]] = {}
    unknown: dict[str, list[str]] = {}
    for kind, point in {(point.arm, point.users is None): point for point in points}.items():
        try:
            known[kind] = _arm_identity(study, point) | {
                "extract": callable_identity(study.extract, "extract"),
                "probe": callable_identity(study.probe, "probe"),
            }
        except UnknowableError as error:
            unknown.setdefault(str(error), []).append(point.arm)
    for reason, arms in unknown.items():
        print(f"not kept: {', '.join(arms)} ({reason})", file=sys.stderr)
    return replace(study, identities=known)


class _Kept:
    """The part of a sweep that lies in a store."""

    def __init__(self, store: Store | None, study: _Study, points: Sequence[Point]) -> None:
        self._store, self._study, self._points = store, study, points
        known = {} if store is None else study.identities
        self._keys: dict[int, str] = {}
        for i, point in enumerate(points):
            arm = known.get((point.arm, point.users is None))
            if arm is not None:
                self._keys[i] = run_key(arm, study.scenario, point)

    def found(self, *, show: bool) -> dict[int, Outcome]:
        """What is there already, by the run's place in the sweep."""
        outcomes: dict[int, Outcome] = {}
        if self._store is None:
            return outcomes
        refuses = {arm for arm in {point.arm for point in self._points} if self._must_be_refused(arm)}
        for i, key in self._keys.items():
            if self._points[i].arm in refuses:
                continue
            try:
                outcome = self._store.get(key)
            except InputError as error:
                print(f"made again: {error}", file=sys.stderr)
                continue
            if outcome is not None:
                outcomes[i] = self._named(i, outcome)
        if outcomes and show:
            print(f"{len(outcomes)} of {len(self._points)} runs are in {self._store.folder}", file=sys.stderr)
        return outcomes

    def _must_be_refused(self, arm: str) -> bool:
        """Whether the compiled loop was asked for and cannot run an arm: the run says so better than a result would."""
        study = self._study
        return study.engine == "compiled" and (study.probe is not None or not compiles(study.scenario, arm))

    def _named(self, i: int, outcome: Outcome) -> Outcome:
        """The name of an arm is not part of what its runs depend on, nor where its policy lies."""
        point, (row, extra) = self._points[i], outcome
        return row | {"arm": point.arm, "policy": self._study.scenario.arm(point.arm).policy}, extra

    def keep(self, i: int, outcome: Outcome) -> Outcome:
        """Put a result into the store; what comes back is what would be found there."""
        if self._store is None:
            return outcome
        row, extra = outcome
        outcome = row, value_of(plain(extra))
        if i in self._keys:
            try:
                self._store.put(self._keys[i], outcome)
            except OSError as error:
                print(f"no longer kept: {self._store.folder} ({error.strerror or error})", file=sys.stderr)
                self._keys.clear()
        return outcome


# -- the work --------------------------------------------------------------------------------------------


def _runs(
    study: _Study,
    points: Sequence[Point],
    missing: Sequence[int],
    jobs: int,
    backend: str,
    address: str | None,
    *,
    progress: bool,
) -> Iterator[tuple[int, Outcome]]:
    """Make the runs of these places in the list of points, the longest first; gives them as they are done."""
    here = backend == "loky" and jobs == 1
    wanted = [points[i] for i in missing]
    with nullcontext() if here else workers(backend, min(jobs, len(missing)), address) as pool:
        if pool is not None and backend == "loky":
            estimates = _estimated_there(pool, study, wanted, min(jobs, len(wanted)))
        else:
            estimates = _efforts(study, wanted)
        efforts = dict(zip(missing, estimates, strict=True))
        order = sorted(missing, key=lambda i: (-efforts[i], i))
        made = ((i, _agreed(study, points[i])) for i in order) if pool is None else _drive(pool, study, points, order)
        with _Progress(efforts, len(points), show=progress) as bar:
            for i, outcome in made:
                bar.done(i)
                yield i, outcome


def _estimated_there(pool: Workers, study: _Study, points: Sequence[Point], jobs: int) -> list[float]:
    """`_efforts`, by worker processes on this machine: they need compiled code for it, which this process does not."""
    # Where the code is not in the cache yet, one compiles it and the others wait.
    at_once = jobs if study.engine == "step" or is_warm() else 1
    under_way = {pool.submit(_estimated, study, points) for _ in range(at_once)}
    for _ in range(jobs - at_once):
        pool.submit(_wake)
    while under_way:
        ended, under_way = concurrent.futures.wait(under_way, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in ended:
            try:
                found: list[float] | InputError = future.result()
            except Exception as error:
                if not pool.died(error):
                    raise
            else:
                if isinstance(found, InputError):
                    raise found
                return found
    # Whatever ended them may end this process, too. The runs go on; their order is the only thing that suffers.
    return [_effort(study.scenario, point, compiled=False) for point in points]


def _estimated(study: _Study, points: Sequence[Point]) -> list[float] | InputError:
    try:
        return _efforts(study, points)
    except InputError as error:
        return error


def _wake() -> None:
    """Nothing: a worker that can do this has read its code, all but what is compiled."""


def _drive(
    pool: Workers, study: _Study, points: Sequence[Point], missing: Sequence[int]
) -> Iterator[tuple[int, Outcome]]:
    """Keep the workers busy; runs whose process died are made again, one at a time."""
    waiting, suspects = deque(missing), deque[int]()
    under_way: dict[concurrent.futures.Future[Any], int] = {}
    deaths: Counter[int] = Counter()
    while waiting or suspects or under_way:
        while waiting and not suspects and len(under_way) < pool.room():
            i = waiting.popleft()
            under_way[pool.submit(_attempt, study, points[i])] = i
        if suspects and not under_way:
            i = suspects.popleft()
            under_way[pool.submit(_attempt, study, points[i])] = i
        alone = len(under_way) == 1
        ended, _ = concurrent.futures.wait(under_way, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in ended:
            i = under_way.pop(future)
            try:
                outcome = future.result()
            except Exception as error:
                if not pool.died(error):
                    raise pool.original(error)  # noqa: B904 (it is the same error, without the backend's wrapping)
                deaths[i] += alone
                if deaths[i] >= MOST_DEATHS:
                    raise InputError(
                        f"its process was killed {deaths[i]} times",
                        field="run",
                        value=_said(points[i]),
                        expected="a run that its machine has the memory for",
                    ) from error
                suspects.append(i)
            else:
                if isinstance(outcome, InputError):
                    raise outcome
                yield i, outcome


def _said(point: Point) -> str:
    load = f"{point.users} users" if point.users is not None else f"{point.rate_scale:g} times the trace's rate"
    return f"arm '{point.arm}', {load}, seed {point.seed}"


class _Progress:
    """A bar on standard error: runs done, runs a second, and the time left by the efforts of those that are left."""

    def __init__(self, efforts: Mapping[int, float], runs: int, *, show: bool) -> None:
        self._efforts, self._before, self._all = efforts, runs - len(efforts), runs
        self._made, self._spent, self._total = 0, 0.0, sum(efforts.values())
        self._start = time.monotonic()
        self._bar = tqdm(
            total=self._total,
            disable=not show,
            file=sys.stderr,
            mininterval=0.5,
            dynamic_ncols=True,
            bar_format="{desc} |{bar}| {percentage:3.0f}%",
            desc=f"simulating {self._before}/{self._all} runs",
        )

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def done(self, i: int) -> None:
        """One more run is there."""
        self._made += 1
        self._spent += self._efforts[i]
        seconds = time.monotonic() - self._start
        left = seconds * (self._total - self._spent) / self._spent
        rate = self._made / seconds if seconds else 0.0
        self._bar.set_description_str(
            f"simulating {self._before + self._made}/{self._all} runs, {rate:.1f} runs/s, "
            f"{tqdm.format_interval(max(0.0, left))} left",
            refresh=False,
        )
        # Rounding must not fill the bar beyond its end.
        self._bar.update(min(self._efforts[i], self._total - self._bar.n))


def _efforts(study: _Study, points: Sequence[Point]) -> list[float]:
    """Rough seconds of each run, for the order of the work and the time that is left only."""
    fast = study.engine != "step" and study.probe is None
    compiled = {arm: fast and compiles(study.scenario, arm) for arm in sorted({point.arm for point in points})}
    if any(compiled.values()):
        warm_up()  # or all processes that come after this one would compile the loop
    return [_effort(study.scenario, point, compiled=compiled[point.arm]) for point in points]


def _effort(scenario: Scenario, point: Point, *, compiled: bool) -> float:
    drafts = scenario.gamma(scenario.arm(point.arm)) > 0
    if point.users is None:
        # About as many requests at a time as a middling load has.
        users, requests = 16, len(trace_of(scenario)) if scenario.load.requests == "all" else scenario.load.requests
    else:
        users = point.users
        requests = scenario.scored(users) + users * MIN_WARMUP
    # About 210 tokens a request, three of them a step where something is drafted.
    steps = requests * (70 if drafts else 210) / users
    if compiled:
        return 0.005 + steps * (1e-6 + 8e-8 * users) + 2.5e-5 * requests
    return 0.005 + 1e-4 * steps * (1 + 0.02 * users)
