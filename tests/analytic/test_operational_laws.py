"""Laws that every run obeys, on runs of all kinds; closed forms of closed networks and of several servers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from standins import BernoulliDrafts, ConstantCost, ScriptedPolicy, fixed_arrivals

from dsim.cluster import Cluster
from dsim.cost.work import Machine, WorkCost, decoder_work
from dsim.gpu_profile.shapes import PRESETS
from dsim.metrics import summarize
from dsim.options import ReplicaConfig
from dsim.prices import DraftCost
from dsim.workload import ClosedLoop, OpenLoop, RequestStream
from experiments import validate

MS = 1_000_000


def build(trace, load, *, cost=None, drafts=None, policy=0, replicas=1, draft_cost=None, **config):
    options = {"max_seqs": 8, "token_budget": 64, "block_tokens": 4, "kv_blocks": 10_000} | config
    return Cluster(
        replicas=replicas,
        config=ReplicaConfig(**options),
        cost=cost or ConstantCost(),
        drafts=drafts,
        draft_cost=draft_cost or DraftCost(),
        policy=ScriptedPolicy(policy),
        stream=RequestStream(trace, {"any": 1.0}, order_seed=0, domain_seed=0, order="trace"),
        load=load,
    )


def exponential(n, mean, rng):
    """Stratified: every quantile once, in random order, so that the sample's mean is the law's."""
    return rng.permutation(-np.log1p(-(np.arange(n) + 0.5) / n)) * mean


def geometric_steps(n, mean, rng):
    """Steps of a request, geometric with that mean: the exponential law in units of a step."""
    return np.maximum(1, np.ceil(exponential(n, -1 / math.log1p(-1 / mean), rng))).astype(np.int64)


# -- the audit that every run goes through ---------------------------------------------------------------


LOADS = (
    OpenLoop(requests=60),
    OpenLoop(requests=60, warmup=5, cooldown=20),
    ClosedLoop(users=5, scored=30),
    ClosedLoop(users=5, scored=30, think_s=0.0123, stagger_s=0.004),
    ClosedLoop(users=7, scored=40, think_s=0.002, steady=False),
)


@pytest.mark.parametrize(
    ("load", "colocated", "speculates", "replicas"),
    list(itertools.product(LOADS, (True, False), (True, False), (1, 3))),
)
def test_every_kind_of_run_passes_the_audit(load, colocated, speculates, replicas):
    rng = np.random.default_rng(1)
    arrival = np.cumsum(rng.exponential(0.003, 60))
    trace = fixed_arrivals(arrival - arrival[0], rng.integers(1, 40, 60), rng.integers(1, 30, 60))
    for kv_blocks, ahead in ((10_000, False), (40, False), (40, colocated)):  # the small cache preempts
        records = build(
            trace,
            load,
            drafts=BernoulliDrafts(0.7, 3) if speculates else None,
            policy=2 if speculates else 0,
            replicas=replicas,
            colocated=colocated,
            kv_blocks=kv_blocks,
            admit_ahead=ahead,
            cost=ConstantCost(step_ms=1.3, token_ms=0.01, prefill=0.7, draft=0.2),
        ).run()
        assert (records.requests["finish_ns"] >= 0).sum() >= 15


def test_the_audit_sees_a_step_that_says_more_requests_than_there_were():
    run = build(fixed_arrivals([0.0, 0.0], 4, 5), OpenLoop(requests=2), colocated=True)
    original = run.steps.append
    run.steps.append = lambda row: original((*row[:3], row[3] + (row[0] == 2 * MS), *row[4:]))
    with pytest.raises(RuntimeError, match=r"Little's law: requests in decode \(9000000 against 8000000\)"):
        run.run()


def test_the_audit_sees_a_user_who_comes_late():
    run = build(fixed_arrivals([0.0], 4, 5), ClosedLoop(users=2, scored=6, think_s=0.01))
    issue = run._issue_next
    run._issue_next = lambda: run._later(1 if len(run.requests) == 5 else 0, issue)
    with pytest.raises(RuntimeError, match=r"response time law: .* \([1-9]"):
        run.run()


# -- several servers -------------------------------------------------------------------------------------


def erlang_c(servers, load):
    """Probability that an arrival waits in M/M/c, load = lambda / mu."""
    top = load**servers / math.factorial(servers) * servers / (servers - load)
    return top / (sum(load**k / math.factorial(k) for k in range(servers)) + top)


def kiefer_wolfowitz(arrival, service, servers):
    """Waits of a first come, first served queue with several servers, exactly."""
    free = np.zeros(servers)
    wait = np.empty(arrival.size)
    for i, (at, takes) in enumerate(zip(arrival, service, strict=True)):
        start = max(at, free[0])
        wait[i], free[0] = start - at, start + takes
        free.sort()
    return wait


@pytest.mark.parametrize("servers", [2, 4])
def test_m_m_c_waiting_time(servers):
    """A replica without prefill is c servers: a sequence a server, and steps that cost the same whatever is in them."""
    rng = np.random.default_rng(5)
    # Long enough for the formula, with the exact recursion; then the engine on the same law, against the recursion.
    n, mean, utilization = 200_000, 1.0, 0.8
    arrival, service = np.cumsum(exponential(n, mean / utilization / servers, rng)), exponential(n, mean, rng)
    load = utilization * servers
    formula = erlang_c(servers, load) * mean / (servers - load)
    assert kiefer_wolfowitz(arrival, service, servers).mean() == pytest.approx(formula, rel=0.03)

    n, steps = 1500, 60
    takes = geometric_steps(n, steps, rng)
    arrival = np.cumsum(exponential(n, steps * 1e-3 / utilization / servers, rng))
    arrival -= arrival[0]
    requests = build(
        fixed_arrivals(arrival, 1, takes + 1), OpenLoop(requests=n), max_seqs=servers, cost=ConstantCost(step_ms=1.0)
    ).run().requests  # fmt: skip
    wait = (requests["finish_ns"] - requests["arrival_ns"]) / 1e6 - takes
    exact = kiefer_wolfowitz(arrival * 1e3, takes, servers)
    # Service starts with a step: up to one step later than an ideal server would, half of one on average.
    assert (wait >= exact - 1e-6).all()
    assert wait.mean() - exact.mean() == pytest.approx(0.5, abs=0.35)


# -- closed networks -------------------------------------------------------------------------------------


def mean_value_analysis(users, think, service):
    """Throughput of a delay of any law and one exponential server (machine repair), by Reiser and Lavenberg."""
    queue = 0.0
    for n in range(1, users + 1):
        response = service * (1 + queue)
        rate = n / (think + response)
        queue = rate * response
    return rate


@pytest.mark.parametrize(("users", "think_steps"), [(2, 40), (4, 120)])
def test_machine_repair_model(users, think_steps):
    """N users who think for a fixed time before one sequence: exponential service, any law of thinking."""
    rng = np.random.default_rng(11)
    n, steps = 2500, 40
    takes = geometric_steps(n, steps, rng)
    records = build(
        fixed_arrivals(np.zeros(n), 1, takes + 1),
        ClosedLoop(users=users, scored=n, think_s=think_steps * 1e-3, steady=False),
        max_seqs=1,
    ).run()
    rate = n / (records.end_ns / 1e9)
    assert rate == pytest.approx(mean_value_analysis(users, think_steps * 1e-3, steps * 1e-3), rel=0.025)
    # Response time law: N = X (R + Z).
    response = (records.requests["finish_ns"] - records.requests["arrival_ns"]).mean() / 1e9
    assert rate * (response + think_steps * 1e-3) == pytest.approx(users, rel=0.005)


@pytest.mark.parametrize(("users", "think_s"), [(1, 0.0), (1, 0.05), (3, 0.05), (5, 0.05), (9, 0.05), (9, 0.0)])
def test_a_closed_loop_without_chance_reaches_its_asymptotes(users, think_s):
    """Constant service S on one server, constant thinking Z: X = min(N / (Z + S), 1 / S)."""
    service_s = 0.01
    records = build(
        fixed_arrivals([0.0], 1, 11),
        ClosedLoop(users=users, scored=200, think_s=think_s, stagger_s=users * service_s),
        max_seqs=1,
    ).run()
    row = summarize(records)
    expected = min(users / (think_s + service_s), 1 / service_s)
    assert row["request_throughput"] == pytest.approx(expected, rel=0.03)
    # Utilization law: U = X S.
    assert row["busy_fraction"] == pytest.approx(expected * service_s, rel=0.03)


# -- speculation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "gamma", "share"), [(0.8, 4, 0.1), (0.6, 2, 0.25), (0.9, 7, 0.05)])
def test_the_speedup_of_one_user_is_the_published_one(p, gamma, share):
    """(1 - a^(g+1)) / ((1 - a)(g c + 1)), Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8.

    A drafted token costs c steps of the target, and a step costs the same whatever it verifies.
    """
    trace = fixed_arrivals([0.0], 1, 6000)

    def tpot(drafts, policy):
        records = build(
            trace,
            ClosedLoop(users=1, scored=1, steady=False),
            drafts=drafts,
            policy=policy,
            cost=ConstantCost(step_ms=10.0, draft=10.0 * share),
            draft_cost=DraftCost(per_token=True),
        ).run()
        return summarize(records)["tpot_p50_ms"]

    speedup = tpot(None, 0) / tpot(BernoulliDrafts(p, gamma, seed=2), gamma)
    assert speedup == pytest.approx((1 - p ** (gamma + 1)) / ((1 - p) * (gamma * share + 1)), rel=0.02)


# -- roofline limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_no_simulated_step_is_below_its_floors(name):
    shape, machine = PRESETS[name], Machine(1500.0, 300.0, overhead_ms=1.0, request_ms=0.02)
    law = WorkCost("test:law", decoder_work(shape), machine, 2048, 64, np.array([0, 1 << 16]))
    rng = np.random.default_rng(2)
    n = 80
    trace = fixed_arrivals(np.arange(n) * 0.05, rng.integers(200, 3000, n), rng.integers(10, 100, n))
    steps = build(
        trace,
        OpenLoop(requests=n),
        cost=law,
        colocated=True,
        max_seqs=64,
        token_budget=2048,
        prefill_chunk=2048,
        block_tokens=16,
        kv_blocks=100_000,
    ).run().steps  # fmt: skip
    # Counted here once more: a step reads at least its attention, its head and the cache, at 1.5 TB/s ...
    attention = shape.layers * shape.width * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    cache = shape.layers * shape.kv_elements * steps["context_tokens"]
    memory_ms = 2 * (attention + shape.width * shape.vocabulary + cache) / 1.5e12 * 1e3
    # ... and computes with what one token meets, at 300 TFLOP/s.
    active = shape.layers * (shape.layer_elements(active=True) - 2 * shape.width)
    compute_ms = 2 * active * steps["batch_tokens"] / 3e14 * 1e3
    took = steps["step_ns"] / 1e6
    # The mean context is priced to the nearest 64 tokens.
    grain = 2 * shape.layers * shape.kv_elements * 32 * steps["requests"] / 1.5e12 * 1e3
    assert (took >= memory_ms - grain).all()
    assert (took >= compute_ms).all()
    assert (compute_ms > memory_ms).any()
    assert (compute_ms < memory_ms).any()


def test_no_predicted_request_of_the_vllm_runs_is_faster_than_its_memory():
    from experiments._vllm_runs import load_runs

    requests = validate.shipped()["vllm-four-runs"][1]["requests"].set_index("arm")
    for run in load_runs():
        floor_ms = run.work.weight_bytes / run.memory_gb_s * 1e-6
        assert requests.loc[run.name, "tpot_predicted_ms"].min() > floor_ms
        assert requests.loc[run.name, "tpot_measured_ms"].min() > floor_ms
