"""Every timing goes with the machine's speed at that moment, so that two files of results can be compared by ratio."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dsim.policy import load_policy
from dsim.scenario import cost_of
from dsim.schema import load_scenario

ROWS = (1_000, 10_000)


def calibration_s() -> float:
    """Seconds of a fixed piece of work, now: sorts and sums in NumPy, a loop in Python; the best of five."""
    values = np.random.default_rng(0).random(4096)

    def work() -> float:
        start = time.perf_counter()
        total = 0.0
        for i in range(40):
            total += float(np.cumsum(values[np.argsort(values, kind="stable")])[-1])
            for j in range(200):
                total += i ^ j
        return time.perf_counter() - start

    return min(work() for _ in range(5))


@pytest.fixture(autouse=True)
def _calibrated(request):
    """`calibration_s` beside every timing: the best of before and after."""
    benchmark = request.getfixturevalue("benchmark") if "benchmark" in request.fixturenames else None
    before = calibration_s()
    yield
    if benchmark is not None:
        benchmark.extra_info["calibration_s"] = min(before, calibration_s())


def best_of(call, repeats: int) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.fixture(scope="session")
def warm():
    """The compiled loop and all kernels are there."""
    from dsim.compiled import warm_up, why_not

    warm_up()
    for spec in ("none", "fixed:k=1", "dspark", "vllm-adaptive"):
        assert why_not(load_policy(spec), None) is None
    cost_of(load_scenario("decode-node"))
