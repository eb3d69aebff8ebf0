"""Speed of the whole: a real trace end to end, an engine step at several batch sizes, growth with simulated time.

Run by `make bench`. Warm process; imports excluded; trace parsing, the cost model's look-ups and the report (all
metrics) included. Each test asserts its bound from the project's targets. They are absolute: on a slow
machine (or in a slow hour of a shared one) they fail, and `slowness` beside the figures says how slow it was.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from dsim import scenario as runs
from dsim.cluster import Cluster
from dsim.metrics import summarize
from dsim.options import ReplicaConfig
from dsim.policy import load_policy
from dsim.prices import DraftCost
from dsim.scenario import Point, cost_of, simulate
from dsim.schema import load_scenario
from dsim.telemetry import StepLog
from dsim.workload import ClosedLoop, RequestStream
from traces import read_trace

pytestmark = pytest.mark.bench

REFERENCE_S = 0.8e-6


def small_add(repeats: int = 2000) -> float:
    """Seconds that NumPy takes to add 1 to three integers, now: what a step at few requests is made of."""
    array = np.arange(3)
    start = time.perf_counter()
    for _ in range(repeats):
        array + 1
    return (time.perf_counter() - start) / repeats


def slowness() -> float:
    """How much slower than the reference the machine is, at least 1."""
    return max(1.0, min(small_add() for _ in range(20)) / REFERENCE_S)


@pytest.fixture(scope="module")
def conv1000(tmp_path_factory):
    """The first 1,000 requests of Azure 2023 conv as a three-column file (Vidur's form of the same trace)."""
    trace = read_trace("azure2023-conv").head(1000)
    path = tmp_path_factory.mktemp("conv1000") / "conv1000.csv"
    rows = zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    text = "".join(f"{at!r},{prompt},{output}\n" for at, prompt, output in rows)
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + text)
    return path


@pytest.mark.benchmark(group="end to end")
def test_conv1000(benchmark, conv1000):
    """1,000 requests at their own rate, one replica, colocated prefill, dspark: >= 1,000 requests a second."""
    overrides = {"workload.trace": str(conv1000), "workload.order": "trace", "load.requests": "all"}
    scenario = load_scenario("colocated", overrides | {"measure.mode": "whole-run"})
    cost = cost_of(scenario)
    point = Point("dspark", 0, rate_scale=1.0)

    def replay():
        runs._trace.cache_clear()  # the trace is parsed every time
        return simulate(scenario, point, cost=cost)

    before = slowness()
    result = benchmark.pedantic(replay, rounds=7, warmup_rounds=2)
    machine = max(before, slowness())
    assert result.row["n_scored"] == 1000
    steps = len(result.records.steps["end_ns"])
    best = benchmark.stats.stats.min
    benchmark.extra_info |= {"steps": steps, "us_per_step": best / steps * 1e6, "slowness": machine}
    assert best <= 1.0


def one_replica(users: int, requests: int, policy: str, output: int = 800):
    scenario = load_scenario("decode-node")
    trace = runs.trace_of(scenario)
    lengths = read_trace("azure2023-conv")
    drafts = runs._drafts(scenario, scenario.arm("dspark"), 1)
    stream = RequestStream(lengths, dict.fromkeys(drafts.domains, 1.0), order_seed=1, domain_seed=2)
    stream._output = [output] * len(trace)  # long outputs: the batch stays full while it is timed
    return Cluster(
        replicas=1,
        config=ReplicaConfig(max_seqs=256, kv_blocks=1 << 20),
        cost=cost_of(scenario),
        drafts=drafts,
        draft_cost=DraftCost(),
        policy=load_policy(policy),
        stream=stream,
        load=ClosedLoop(users=users, scored=requests, warmup_per_user=1),
    )


@pytest.mark.parametrize("users", [1, 16, 64, 256])
@pytest.mark.benchmark(group="engine step")
def test_engine_step(benchmark, users):
    """Microseconds a step under dspark: at most 200 at 256 running requests."""

    def setup():
        return (one_replica(users, users, "dspark"),), {}

    records = benchmark.pedantic(lambda cluster: cluster.run(), setup=setup, rounds=7, warmup_rounds=1)
    full = np.count_nonzero(records.steps["requests"] >= 0.9 * users)
    steps = len(records.steps["end_ns"])
    assert full > 0.8 * steps
    per_step = benchmark.stats.stats.min / steps * 1e6
    benchmark.extra_info |= {"steps": steps, "us_per_step": per_step}
    if users == 256:
        assert per_step <= 200


class _Clocked(StepLog):
    """A step log that notes the wall clock, and the machine's speed, at every thousandth step."""

    def __init__(self):
        super().__init__()
        self.clock = []

    def append(self, row):
        super().append(row)
        if len(self) % 1000 == 0:
            now = time.perf_counter()
            self.clock.append((now, small_add(500), time.perf_counter()))


@pytest.mark.benchmark(group="growth")
def test_a_step_costs_the_same_late_in_a_run(benchmark):
    """A hundred thousand steps at 16 users: the last third as fast as the first."""

    def replay():
        cluster = one_replica(16, 8000, "dspark", output=800)
        log = _Clocked()
        cluster.steps = log
        for replica in cluster.replicas:
            replica.steps = log
        return cluster.run(), log

    records, log = benchmark.pedantic(replay, rounds=1)
    summarize(records)
    steps = len(records.steps["end_ns"])
    assert steps >= 100_000
    # Microseconds a step in units of the machine's speed around it: a shared machine drifts.
    started, speed, ended = np.array(log.clock).T
    each = (started[1:] - ended[:-1]) / 1000 / ((speed[1:] + speed[:-1]) / 2) * REFERENCE_S
    third = each.size // 3
    early, late = float(np.median(each[:third])), float(np.median(each[-third:]))
    benchmark.extra_info |= {"steps": steps, "early_us": early * 1e6, "late_us": late * 1e6}
    assert late <= 1.1 * early


def test_memory_of_a_million_steps():
    """Peak memory of a fresh process that runs a million steps at one user: below 1 GiB, all of it included."""
    code = (
        "import resource\n"
        "from dsim.scenario import Point, simulate\n"
        "from dsim.schema import load_scenario\n"
        "overrides = {'load.scored_min': 4900, 'measure.mode': 'whole-run', 'load.scored_per_user': 1}\n"
        "records = simulate(load_scenario('decode-node', overrides), Point('none', 0, users=1)).records\n"
        "print(len(records.steps['end_ns']), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    steps, peak = (int(part) for part in done.stdout.split())
    assert steps >= 1_000_000
    assert peak < 2**30
    print(f"{steps} steps: {peak / 2**20:.0f} MiB")
