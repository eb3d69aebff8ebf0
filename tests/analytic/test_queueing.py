"""The engine against closed forms: waiting times, geometric acceptance, no speculation."""

from __future__ import annotations

import numpy as np
import pytest
from standins import BernoulliDrafts, ConstantCost, ScriptedPolicy, fixed_arrivals

from dsim.cluster import Cluster
from dsim.metrics import summarize
from dsim.options import ReplicaConfig
from dsim.prices import DraftCost
from dsim.workload import ClosedLoop, OpenLoop, RequestStream


def single_server(arrival_s, output, step_ms=1.0):
    """One sequence at a time: a FIFO queue whose service is (output - 1) steps."""
    trace = fixed_arrivals(arrival_s, 1, output)
    records = Cluster(
        replicas=1,
        config=ReplicaConfig(max_seqs=1, token_budget=8),
        cost=ConstantCost(step_ms=step_ms),
        drafts=None,
        draft_cost=DraftCost(),
        policy=ScriptedPolicy(0),
        stream=RequestStream(trace, {"any": 1.0}, order_seed=0, domain_seed=0, order="trace"),
        load=OpenLoop(requests=len(trace)),
    ).run()
    requests = records.requests
    service = (requests["output_tokens"] - 1) * round(step_ms * 1e6)
    return requests["arrival_ns"], service, requests["finish_ns"] - requests["arrival_ns"] - service


def exponential_gaps(n, mean_s, rng):
    """Exponential gaps, stratified (every quantile once, in random order): the sample's mean is the law's."""
    return rng.permutation(-np.log1p(-(np.arange(n) + 0.5) / n)) * mean_s


def lindley(arrival_ns, service_ns):
    """Exact waiting times of the same queue: W[i + 1] = max(0, W[i] + S[i] - gap)."""
    wait = np.zeros_like(arrival_ns)
    for i in range(1, arrival_ns.size):
        wait[i] = max(0, wait[i - 1] + service_ns[i - 1] - (arrival_ns[i] - arrival_ns[i - 1]))
    return wait


def test_m_d_1_waiting_time():
    rng = np.random.default_rng(7)
    n, service_s, load = 50_000, 0.001, 0.5
    arrivals = np.cumsum(exponential_gaps(n, service_s / load, rng))
    arrival_ns, service, wait = single_server(arrivals - arrivals[0], 2)
    np.testing.assert_array_equal(wait, lindley(arrival_ns, service))
    # Pollaczek-Khinchine with a constant service: rho S / (2 (1 - rho)).
    assert wait.mean() / 1e9 == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.02)


def test_m_g_1_waiting_time():
    rng = np.random.default_rng(7)
    n, load = 40_000, 0.5
    tokens = rng.permutation(np.repeat([1, 2, 4], [n // 2, 3 * n // 10, n // 5]))  # steps of service
    mean, square = (0.5 * 1 + 0.3 * 2 + 0.2 * 4), (0.5 * 1 + 0.3 * 4 + 0.2 * 16)
    arrivals = np.cumsum(exponential_gaps(n, mean * 1e-3 / load, rng))
    arrival_ns, service, wait = single_server(arrivals - arrivals[0], tokens + 1)
    np.testing.assert_array_equal(wait, lindley(arrival_ns, service))
    # W = lambda E[S^2] / (2 (1 - rho)).
    expected = load / (mean * 1e-3) * square * 1e-6 / (2 * (1 - load))
    assert wait.mean() / 1e9 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("p", "gamma"), [(0.5, 3), (0.8, 5), (0.95, 7)])
def test_geometric_acceptance(p, gamma):
    trace = fixed_arrivals([0.0], 1, 4000)
    records = Cluster(
        replicas=1,
        config=ReplicaConfig(max_seqs=8, token_budget=64),
        cost=ConstantCost(),
        drafts=BernoulliDrafts(p, gamma, seed=1),
        draft_cost=DraftCost(),
        policy=ScriptedPolicy(gamma),
        stream=RequestStream(trace, {"any": 1.0}, order_seed=0, domain_seed=0),
        load=ClosedLoop(users=8, scored=16, steady=False),
    ).run()
    steps = int(records.steps["requests"].sum())
    tau = 1 + records.steps["accepted"].sum() / steps
    k = np.arange(gamma + 1)
    law = np.where(k < gamma, p**k * (1 - p), p**gamma)
    mean = float((k * law).sum())
    assert 1 + mean == pytest.approx((1 - p ** (gamma + 1)) / (1 - p))
    sigma = np.sqrt(float((k**2 * law).sum()) - mean**2) / np.sqrt(steps)
    assert abs(tau - (1 + mean)) < 3 * sigma
    assert summarize(records)["accepted_length"] == pytest.approx(tau, rel=1e-12)


def test_round_trip_of_a_saturated_closed_loop():
    """N users without think time keep N requests in decode: throughput = N / step, TPOT = step."""
    trace = fixed_arrivals([0.0], 1, 101)
    records = Cluster(
        replicas=1,
        config=ReplicaConfig(max_seqs=4, token_budget=8),
        cost=ConstantCost(step_ms=2.0, gpus=4),
        drafts=None,
        draft_cost=DraftCost(),
        policy=ScriptedPolicy(0),
        stream=RequestStream(trace, {"any": 1.0}, order_seed=0, domain_seed=0),
        load=ClosedLoop(users=4, scored=40),
    ).run()
    row = summarize(records)
    # 101 tokens take 100 steps (the first comes with the prompt): 4 x 101 / 200 ms.
    assert row["throughput_tok_s"] == pytest.approx(4 * 101 / 0.2, rel=0.003)
    assert row["throughput_tok_s_gpu"] == row["throughput_tok_s"] / 4
    assert row["tpot_p50_ms"] == row["itl_p50_ms"] == 2.0
    assert row["tps_per_user"] == 500.0
    assert row["busy_fraction"] == pytest.approx(1.0)
