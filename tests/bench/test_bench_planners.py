"""What a plan() costs, against U: a stable argsort and a cumulative sum of R * gamma float32.

`make bench` prints the table; one group a batch size. A planner may cost 3 U at 256 requests, whatever the step is
like: on a straight price line, on a real staircase with its captured sizes, with caps, with a prompt in the step, with
newcomers, and pinned to an engine's file.
"""

from __future__ import annotations

import json
import timeit
from time import process_time

import numpy as np
import pytest
from timed import CONSTANT, PLANNERS

from dsim.convert import from_profile
from dsim.cost import fit
from dsim.engines import write_engine_file
from dsim.engines.checks import digest
from dsim.policy import load_policy, make_view
from dsim.profile import load_profile

pytestmark = pytest.mark.bench

GAMMA = 5
REQUESTS = (1, 16, 64, 256)
SPECS = (*CONSTANT, *PLANNERS)


def view_of(requests, policy):
    rng = np.random.default_rng(requests)
    blocks = rng.uniform(0.3, 1.0, (3, requests, GAMMA)).astype(np.float32)
    verify_ms = 5 + 0.01 * np.arange(requests * (1 + GAMMA) + 1)
    view = make_view(blocks[0], verify_ms, history=tuple(blocks[1:]))
    if policy is not None and policy.traits.clairvoyant:
        view = view._replace(accepted=rng.integers(0, GAMMA + 1, requests))
    return view


def unit(survival):
    np.cumsum(survival[np.argsort(survival, kind="stable")])


@pytest.mark.parametrize("requests", REQUESTS)
def test_unit(benchmark, requests):
    benchmark.group = f"plan() at R = {requests:3d}, gamma = {GAMMA}"
    benchmark.name = f"U[{requests}]"
    benchmark(unit, view_of(requests, None).survival().ravel())


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("spec", SPECS)
def test_plan(benchmark, spec, requests):
    policy = load_policy(spec)
    benchmark.group = f"plan() at R = {requests:3d}, gamma = {GAMMA}"
    benchmark.name = f"{spec}[{requests}]"
    benchmark(policy.plan, view_of(requests, policy))


def units(policy, view):
    """CPU time of a plan() in U: the best of many short tries of both, in turn.

    U is that of drafts without caps, whatever the view's: what is 0 sorts faster.
    """
    survival = view_of(view.requests, None).survival().ravel()
    policy.plan(view)  # what is worked out once a price curve
    plan, one = (timeit.Timer(call, timer=process_time) for call in (lambda: policy.plan(view), lambda: unit(survival)))
    tries = [(plan.timeit(20), one.timeit(20)) for _ in range(100)]
    return min(ms for ms, _ in tries) / min(ms for _, ms in tries)


def kinds(requests, policy):
    """Views of the same batch: what makes planners take other branches."""
    straight, rng = view_of(requests, policy), np.random.default_rng(1)
    profile = load_profile("b300x4-dsv4-flash-0731")
    most = requests * (1 + GAMMA) + 512
    prices, captured = fit(profile, allow_extrapolation=True).verify_table(requests, most), profile.captured_sizes
    limit = {"captured_sizes": captured, "capture_limit": int(captured[-1]), "draft_ms": 5.0}
    stairs = straight._replace(verify_ms=prices, **limit)
    return {
        "straight": straight,
        "stairs": stairs,
        "caps": stairs._replace(caps=rng.integers(0, GAMMA + 1, requests), caps_bind=True),
        "prompt": stairs._replace(base_tokens=requests + 512, sampling=requests + 1),
        "newcomers": stairs._replace(step=9, born=np.where(rng.random(requests) < 0.02, 8, 0)),
    }


#: Settings that have more to do than the defaults, or something else.
MORE = ("atom:full_on_change=false,lag=1", "atom:ragged=false,buckets=1/3", "trtllm:tiers=global", "trtllm:drain=0.5")


@pytest.mark.parametrize("kind", ["straight", "stairs", "caps", "prompt", "newcomers"])
@pytest.mark.parametrize("spec", [*SPECS, *MORE])
def test_three_units_at_256_requests(spec, kind):
    policy = load_policy(spec)
    assert units(policy, kinds(256, policy)[kind]) <= 3


def exact_graphs(path):
    """A v2 table of two graphs with four compact cells each, of blocks of `GAMMA`."""
    sha = "a" * 64
    tables = {graph: [0, *(graph * (1 + GAMMA) * i // 5 for i in range(1, 5))] for graph in (128, 256)}
    fingerprint = dict.fromkeys(("gpu", "runtime_snapshot", "source_head", "topology"), "x")
    fingerprint |= dict.fromkeys(("gpu_snapshot_sha256", "source_diff_sha256"), sha) | {"gpu_count": 1}
    fingerprint |= {key: [*tables] for key in ("global_graph_batch_sizes", "rank_local_graph_batch_sizes")}
    fingerprint |= {"max_draft_len": GAMMA}
    price = lambda graph, budget: 5 + 0.01 * (budget or graph * (1 + GAMMA))  # noqa: E731
    guard = {"loss_multiplier": 0.5, "mean_output_tokens_per_request_iteration": 3.0, "minimum_group_value_ms": 0.0}
    found = {
        "schema_version": 2,
        "minimum_predicted_gain": 0.01,
        "cost_tables": {
            str(graph): {"token_counts": budgets, "step_time_ms": [price(graph, budget) for budget in budgets]}
            for graph, budgets in tables.items()
        },
        "engine_fingerprint": fingerprint,
        "engine_fingerprint_sha256": digest(fingerprint),
        "measurements": [
            {
                "rank_local_graph_batch_size": graph,
                "rank_local_verifier_budget": budget,
                "step_time_ms": price(graph, budget),
                "source_result_sha256": sha,
            }
            for graph, budgets in tables.items()
            for budget in budgets
        ],
        "iteration_drain_guard": guard | {"tail_graph_batch_size": 128, "source_result_sha256": sha},
    }
    path.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Paths of the shipped profile as every engine's table."""
    folder, profile = tmp_path_factory.mktemp("tables"), load_profile("b300x4-dsv4-flash-0731")
    found = {}
    for name in ("sglang-diagonal", "sglang-additive", "trtllm-v1", "vllm"):
        found[name] = folder / f"{name}.json"
        write_engine_file(from_profile(profile, name)[0], found[name])
    found["trtllm-v2"] = folder / "trtllm-v2.json"
    exact_graphs(found["trtllm-v2"])
    return found


@pytest.mark.parametrize("kind", ["stairs", "caps", "prompt", "newcomers"])
@pytest.mark.parametrize("table", ["sglang-diagonal", "sglang-additive", "trtllm-v1", "trtllm-v2", "vllm"])
@pytest.mark.parametrize("name", ["sglang", "vllm-adaptive", "trtllm", "atom"])
def test_three_units_where_the_planner_is_pinned_to_a_table(name, table, kind, tables):
    policy = load_policy(f"{name}:table={tables[table]}")
    assert units(policy, kinds(256, policy)[kind]) <= 3
