"""Many runs of one scenario, on one core or several, in a table whose bytes do not depend on how many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import joblib
import pandas as pd
from tqdm import tqdm

from dsim.compiled import warm_up
from dsim.cost import StepCost
from dsim.errors import InputError
from dsim.probe import StepProbe
from dsim.scenario import Point, Result, check_scenario, compiles, cost_of, simulate
from dsim.schema import MIN_WARMUP, Scenario

#: What a task brings back: the table's row, and what `extract` made of the records.
Outcome = tuple[dict[str, Any], Any]


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
) -> Sweep:
    """Run the points.

    Parameters
    ----------
    jobs
        Worker processes (loky); 1 runs in this process.
    extract
        Called with each `Result` where it was made (a module-level function); what it returns comes back too.
        The records themselves stay in the worker.
    probe
        Makes a probe for each run (a class, such as `dsim.probe.StepRegret`); its columns come into the table.
    engine
        See `dsim.serve.serve`: the table is the same whichever loop runs.

    Notes
    -----
    Fits happen once, here, and are shipped; banks are opened in each worker as memory maps of the same cache
    files. Long runs start first, so that no worker is left with the longest one at the end.
    """
    if jobs < 1:
        raise InputError(field="jobs", value=jobs, expected="an integer >= 1")
    arms = sorted({point.arm for point in points})
    check_scenario(scenario, arms)
    cost = cost_of(scenario)
    if engine != "step" and probe is None and jobs > 1 and any(compiles(scenario, arm) for arm in arms):
        warm_up()  # or every worker would compile for itself
    order = sorted(range(len(points)), key=lambda i: (-_effort(scenario, points[i]), i))
    outcomes: list[Outcome | None] = [None] * len(points)
    tasks = (joblib.delayed(_task)(scenario, points[i], cost, extract, probe, engine, i) for i in order)
    parallel = joblib.Parallel(n_jobs=min(jobs, max(1, len(points))), return_as="generator_unordered", batch_size=1)
    bar = tqdm(
        total=len(points),
        desc="simulating",
        unit="run",
        disable=not progress,
        file=sys.stderr,
        mininterval=0.5,
        dynamic_ncols=True,
    )
    with bar:
        for i, outcome in parallel(tasks):
            outcomes[i] = outcome
            bar.update()
    done = [outcome for outcome in outcomes if outcome is not None]
    if len(done) != len(points):
        raise RuntimeError(f"sweep invariant violated: {len(points) - len(done)} runs are missing")
    return Sweep(pd.DataFrame([row for row, _ in done]), [extra for _, extra in done])


def _task(
    scenario: Scenario,
    point: Point,
    cost: StepCost,
    extract: Callable[[Result], Any] | None,
    probe: Callable[[], StepProbe] | None,
    engine: str,
    index: int,
) -> tuple[int, Outcome]:
    result = simulate(scenario, point, cost=cost, probe=None if probe is None else probe(), engine=engine)
    return index, (result.row, None if extract is None else extract(result))


def _effort(scenario: Scenario, point: Point) -> float:
    """Rough number of engine steps, for the order of the work only."""
    speed = 1.0 if scenario.gamma(scenario.arm(point.arm)) == 0 else 0.5
    if point.users is None:
        return speed * 1e3
    requests = scenario.scored(point.users) + point.users * MIN_WARMUP
    return speed * requests * (1.0 / point.users + 0.02)
