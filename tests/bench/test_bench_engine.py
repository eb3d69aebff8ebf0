"""Speed of the whole: real traces end to end, an engine step at several batch sizes, growth, memory, start-up.

Run by `make bench`. Warm process; imports and compilation excluded; trace parsing, the cost model's look-ups and the
report (all metrics) included. Each test asserts its bound from the project's targets. They are absolute: on a slow
machine, or in a slow hour of a shared one, they fail; `calibration_s` beside the figures says how slow it was.
"""

from __future__ import annotations

import subprocess
import sys
import time
import timeit
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

from dsim import scenario as runs
from dsim.compiled.run import _Run, kernel_of
from dsim.metrics import summarize
from dsim.options import ReplicaConfig
from dsim.policy import load_policy, make_view
from dsim.prices import DraftCost
from dsim.scenario import Point, cost_of, simulate
from dsim.schema import load_scenario
from dsim.serve import serve
from dsim.sweep import grid, run
from dsim.workload import ClosedLoop, RequestStream
from traces import read_trace

pytestmark = [pytest.mark.bench, pytest.mark.usefixtures("warm")]

#: Requests a second that the fastest peer replays, which decides nothing in its steps (compiled, 2-core machine).
PEER = {1_000: 10_600, 10_000: 14_400}
ARMS = {"none": "none", "mtp1": "fixed:k=1", "dspark": "dspark", "vllm": "vllm-adaptive"}


@pytest.fixture(scope="module", params=sorted(PEER))
def conv(request, tmp_path_factory):
    """The first rows of Azure 2023 conv as a three-column file (Vidur's form of the same trace), and how many."""
    trace = read_trace("azure2023-conv").head(request.param)
    path = tmp_path_factory.mktemp("conv") / f"conv{request.param}.csv"
    rows = zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    text = "".join(f"{at!r},{prompt},{output}\n" for at, prompt, output in rows)
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + text)
    return path, request.param


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.benchmark(group="requests at their own rate, one replica, colocated prefill")
def test_conv(benchmark, conv, arm, monkeypatch):
    """At least as many requests a second as the fastest peer."""
    path, rows = conv
    monkeypatch.setattr(runs, "open_trace", read_trace)  # the file is parsed every time, not taken from the cache
    overrides = {"workload.trace": str(path), "workload.order": "trace", "load.requests": "all"}
    arms = [
        {"name": name, "policy": spec, "drafter": "mtp", "gamma": 1}
        if name == "mtp1"
        else {"name": name, "policy": spec, "drafter": "dspark", "gamma": 0 if name == "none" else 5}
        for name, spec in ARMS.items()
    ]
    scenario = load_scenario("colocated", overrides | {"measure.mode": "whole-run", "arms": arms})
    cost = cost_of(scenario)
    point = Point(arm, 0, rate_scale=1.0)

    def replay():
        runs._trace.cache_clear()
        return simulate(scenario, point, cost=cost, engine="compiled")

    result = benchmark.pedantic(replay, rounds=9, warmup_rounds=2)
    assert result.row["n_scored"] == rows
    steps, best = len(result.records.steps["end_ns"]), benchmark.stats.stats.min
    benchmark.extra_info |= {"steps": steps, "us_per_step": best / steps * 1e6, "requests_per_s": rows / best}
    assert rows / best >= PEER[rows]


def one_replica(users, requests, policy, output=800):
    """Options of a decode replica whose batch stays full while it is timed (long outputs)."""
    scenario = load_scenario("decode-node", {"drafts.source": "synthetic"})
    drafts = runs._drafts(scenario, scenario.arm("dspark"), 1)
    stream = RequestStream(
        read_trace("azure2023-conv"), dict.fromkeys(drafts.domains, 1.0), order_seed=1, domain_seed=2
    )
    stream._output = [output] * len(stream)
    return {
        "replicas": 1,
        "config": ReplicaConfig(max_seqs=256, kv_blocks=1 << 20),
        "cost": cost_of(scenario),
        "drafts": drafts,
        "draft_cost": DraftCost(),
        "policy": load_policy(policy),
        "stream": stream,
        "load": ClosedLoop(users=users, scored=requests, warmup_per_user=1),
    }


def view_like(users, policy):
    rng = np.random.default_rng(users)
    blocks = rng.uniform(0.3, 1.0, (3, users, 5)).astype(np.float32)
    return make_view(blocks[0], 5 + 0.01 * np.arange(users * 6 + 1), history=tuple(blocks[1:]))


@pytest.mark.parametrize("users", [1, 16, 64, 256])
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.benchmark(group="engine step, compiled")
def test_engine_step(benchmark, users, arm):
    """A step with a planner in it against that planner's own plan() and against U, in one process."""

    def setup():
        o = one_replica(users, max(2 * users, 8), ARMS[arm])
        names = ("replicas", "config", "cost", "drafts", "draft_cost", "policy")
        made = _Run(*(o[name] for name in names), kernel_of(o["policy"]), o["stream"], o["load"], "round-robin", 0)
        return (made,), {}

    done = []

    def go(made):
        made.go()
        done.append(made)

    benchmark.pedantic(go, setup=setup, rounds=9, warmup_rounds=1)
    steps, _, _ = done[-1].tables()
    count = len(steps["end_ns"])
    assert np.count_nonzero(steps["requests"] >= 0.9 * users) > 0.8 * count
    step = benchmark.stats.stats.min / count
    view, policy = view_like(users, ARMS[arm]), load_policy(ARMS[arm])
    survival = view.survival().ravel()
    plan = min(timeit.repeat(lambda: policy.plan(view), number=100, repeat=20)) / 100
    unit = min(timeit.repeat(lambda: np.cumsum(survival[np.argsort(survival, kind="stable")]), number=100, repeat=20))
    unit /= 100
    benchmark.extra_info |= {"steps": count, "us_per_step": step * 1e6, "plan_us": plan * 1e6, "unit_us": unit * 1e6}
    if arm in ("dspark", "vllm") and users == 256:
        assert step <= 1.5 * plan
        assert step <= 3 * unit
    if users == 16:
        assert step <= 8e-6


@pytest.mark.parametrize("users", [1, 16, 64, 256])
@pytest.mark.benchmark(group="engine step, step by step")
def test_engine_step_of_the_reference(benchmark, users):
    """Policies without a kernel: at most 200 us a step at 256 running requests (dspark's plan included)."""

    def setup():
        return (), {"engine": "step", **one_replica(users, users, "dspark")}

    records = benchmark.pedantic(serve, setup=setup, rounds=5, warmup_rounds=1)
    steps = len(records.steps["end_ns"])
    per_step = benchmark.stats.stats.min / steps * 1e6
    benchmark.extra_info |= {"steps": steps, "us_per_step": per_step}
    assert users < 256 or per_step <= 200


@pytest.mark.benchmark(group="growth")
def test_time_is_linear_in_steps(benchmark):
    """Steps from 10^5 to 10^6 cost what those from 10^4 to 10^5 do, within 10 %."""

    def seconds(requests):
        options = one_replica(16, requests, "dspark")
        start = time.process_time()
        records = serve(engine="compiled", **options)
        summarize(records)
        return time.process_time() - start, len(records.steps["end_ns"])

    seconds(100)
    found = []

    def measure():
        found.append([min(seconds(n) for _ in range(rounds)) for n, rounds in ((560, 5), (5_600, 4), (56_000, 3))])

    benchmark.pedantic(measure, rounds=1)
    (t1, n1), (t2, n2), (t3, n3) = found[-1]
    assert n1 < 12_000
    assert n3 > 900_000
    early, late = (t2 - t1) / (n2 - n1), (t3 - t2) / (n3 - n2)
    benchmark.extra_info |= {"steps": n3, "early_us": early * 1e6, "late_us": late * 1e6}
    assert late <= 1.1 * early


@pytest.mark.benchmark(group="memory")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
def test_memory_of_a_million_steps(benchmark):
    """Peak memory of a fresh process that runs a million steps at 64 requests of 800 tokens."""
    code = (
        "import pathlib, re, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_bench_engine import one_replica\n"
        "from dsim.metrics import summarize\n"
        "from dsim.serve import serve\n"
        "records = serve(engine='compiled', **one_replica(64, 240_000, 'dspark'))\n"
        "summarize(records)\n"
        # Not getrusage: its peak is at least what the parent had when it started this process.
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(len(records.steps['end_ns']), 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]))\n"
    )
    folder = __file__.rpartition("/")[0]

    def measure():
        return subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)

    steps, peak = (int(part) for part in benchmark.pedantic(measure, rounds=1).stdout.split())
    benchmark.extra_info |= {"steps": steps, "peak_mib": peak / 2**20}
    assert steps >= 1_000_000
    assert peak <= 500 * 2**20


@pytest.mark.parametrize("replicas", [1, 8, 64])
@pytest.mark.benchmark(group="fleet: microseconds a step by replicas of 256 requests, least-tokens router")
def test_fleet(benchmark, replicas):
    router = {"cluster.router": "least-tokens", "cluster.replicas": replicas} if replicas > 1 else {}
    load = {"load.users": [256 * replicas], "load.scored_min": 600 * replicas, "load.scored_per_user": 1}
    scenario = load_scenario("decode-node", router | load | {"drafts.source": "synthetic"})
    cost, point = cost_of(scenario), Point("dspark", 0, users=256 * replicas)
    result = benchmark.pedantic(
        lambda: simulate(scenario, point, cost=cost, engine="compiled"), rounds=3, warmup_rounds=1
    )
    steps = len(result.records.steps["end_ns"])
    benchmark.extra_info |= {"steps": steps, "us_per_step": benchmark.stats.stats.min / steps * 1e6}


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.benchmark(group="sweep: 6 arms x 12 loads x 3 seeds, 1,000 requests each")
def test_sweep(benchmark, jobs):
    """`pareto.py`'s grid: at most 60 s on two cores."""
    users = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256]
    load = {"load.users": users, "load.scored_min": 1000, "load.scored_per_user": 1, "measure.seeds": 3}
    scenario = load_scenario("decode-node", load)
    arms = [arm.name for arm in scenario.arms][:6]
    points = grid(scenario, arms=arms)
    assert len(points) == 216
    table = benchmark.pedantic(
        lambda: run(scenario, points, jobs=jobs, progress=False).table, rounds=1, warmup_rounds=0
    )
    assert len(table) == 216
    benchmark.extra_info |= {"runs_per_s": 216 / benchmark.stats.stats.min}
    assert jobs < 2 or benchmark.stats.stats.min <= 60


@pytest.mark.benchmark(group="start-up")
@pytest.mark.parametrize(
    "what", ["import dsim", "import dsim.scenario", "import dsim.compiled.loop, policies._kernels"]
)
def test_start_up(benchmark, what):
    """Seconds of a fresh process."""
    benchmark.pedantic(lambda: subprocess.run([sys.executable, "-c", what], check=True), rounds=3, warmup_rounds=1)


@pytest.mark.benchmark(group="figures")
def test_figure(benchmark, tmp_path):
    """A front of six arms, drawn and saved."""
    from experiments import pareto

    scenario = load_scenario("decode-node", {"load.users": [16, 64], "measure.seeds": 2, "load.scored_min": 60})
    table = run(scenario, grid(scenario), jobs=1, progress=False).table

    args, arms = pareto.options().parse_args([]), [arm.name for arm in scenario.arms]
    args.baseline = "mtp1"

    def draw():
        pareto.draw(table, None, scenario, arms, args, tmp_path)
        plt.close("all")

    benchmark.pedantic(draw, rounds=3, warmup_rounds=1)
