"""The compiled loop against the step-by-step one: the same bytes, on random clusters, loads, banks and policies."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from banks import recorded_bank
from standins import ConstantCost, fixed_arrivals

from dsim.cluster import run_cluster
from dsim.drafts import BankDrafts, Tilt
from dsim.errors import InputError
from dsim.kernel import Kernel
from dsim.kernel.cache import kernel_of
from dsim.options import HostCost, ReplicaConfig
from dsim.policy import load_policy
from dsim.prices import DraftCost
from dsim.serve import serve
from dsim.telemetry import Records
from dsim.workload import ClosedLoop, OpenLoop, RequestStream

pytest.importorskip("numba")

from dsim.compiled import run_compiled, why_not

POLICIES = (
    "none",
    "fixed:k=1",
    "fixed:k=3",
    "threshold:t=0.6",
    "threshold:t=0.3,on=survival",
    "threshold:t=0",
    "dspark-alg1",
    "dspark",
    "dspark:lag=0",
    "dspark:lag=5",
    "vllm-adaptive",
    "vllm-adaptive:lag=3",
    "oracle",
    "tetris:capacity=9",
    "tetris:capacity=2,per_request=true",
    "disco:t=0.7",
    "batch-table:table=1-2=3/3-6=1/7-=0",
    "marginal",
    "marginal:rate=0.9,lag=0",
    "sglang",
    "sglang:table=none",
    "sglang:table=additive,fill=true,min_predicted_gain=0.05",
    "atom",
    "atom:lag=0",
    "atom:ragged=false",
    "vllm-verify-adaptive",
    "vllm-verify-adaptive:batch_step=3,query_step=1,max_batch=4,lag=2",
    "vllm-ascend",
    "vllm-ascend:floor=0,interval=3,threshold=0.5",
    "lab",
    "lab:search=early-stop,allocation_lag=1,price=step",
    "lab:price=draft,lookup=linear,running_max=true",
    "trtllm",
    "trtllm:tiers=global,floor=0,min_predicted_gain=0",
    "trtllm:tiers=1-3,lag=1,drain=1.5,drain_tail=4,drain_tokens=2",
    "goodput",
    "goodput:interval=1,prior=0.5,margin=0",
    "goodput:interval=3,search=early-stop,weight=1",
)
#: Of these every draft source, batch and load by turns: what they do hangs on most of them.
MANY_OPTIONS = (
    "trtllm:lag=0,floor=2",
    "trtllm:lag=4,floor=0,min_predicted_gain=0.2",
    "trtllm:tiers=0-1,floor=0,lag=1",
    "trtllm:tiers=1-3-4,min_predicted_gain=0,lag=1",
    "trtllm:drain=0.7,floor=0,lag=1",
    "trtllm:tiers=global,drain=3,drain_tail=9,drain_tokens=1.5,drain_least_ms=0.01,min_predicted_gain=0,lag=0",
    "goodput:interval=1,weight=0.4,margin=0",
    "goodput:interval=2,search=early-stop,prior=1",
    "atom:lag=1",
    "atom:full_on_change=false,lag=0,floor=1",
    "atom:anchor=false,lag=1",
    "atom:ragged=false,buckets=1/3,lag=1",
    "atom:ragged=false,anchor=false,floor=1,lag=0",
)


class VaryingCost(ConstantCost):
    """Prices by tokens, requests and context; captured sizes are stairs."""

    def __init__(self, *, by_requests, by_context, captured=(), **options):
        super().__init__(captured=captured, **options)
        self.depends_on_requests, self.depends_on_context = by_requests, by_context
        self.contexts = np.array([100, 130, 1000]) if by_context else np.zeros(0, dtype=np.int64)

    def verify_table(self, requests, max_tokens, context=None):
        sizes = np.arange(max_tokens + 1)
        if self.captured_sizes.size:
            place = np.searchsorted(self.captured_sizes, sizes)
            padded = self.captured_sizes[np.minimum(place, self.captured_sizes.size - 1)]
            sizes = np.where(sizes <= self.captured_sizes[-1], padded, sizes + 5)
        table = self.step_ms + self.token_ms * sizes
        if self.depends_on_requests:
            table = table + 0.013 * requests
        if self.depends_on_context:
            table = table + 0.0007 * context
        table[0] = 0.0
        return table

    def prefill_ms(self, tokens):
        return self.prefill * tokens


def random_run(seed, policies=POLICIES):
    """Options of a cluster, all drawn."""
    rng = np.random.default_rng(seed)

    def pick(*choices):
        return choices[int(rng.integers(len(choices)))]

    gamma = pick(*[gamma for gamma in (1, 3, 4) if any(fits(spec, gamma) for spec in policies)])
    colocated = bool(rng.integers(2))
    overlapped = bool(rng.integers(2))
    max_seqs = pick(1, 3, 8, 20)
    block = pick(1, 4, 16)
    longest = 40 + 90
    least = -(-(longest + 1 + gamma) // block)
    requests = 60
    config = ReplicaConfig(
        max_seqs=max_seqs,
        token_budget=max_seqs * (1 + gamma) + pick(0, 1, 30),
        prefill_chunk=pick(1, 16, 500),
        colocated=colocated,
        block_tokens=block,
        kv_blocks=pick(least, 2 * least, 10_000),
        overlapped=overlapped,
        host=pick(
            HostCost(), HostCost(0.2, 0.05, 0.5, 0.3), HostCost(per_request_ms=0.4, power=1.0, hidden_fraction=1)
        ),
        clip_to_remaining=bool(rng.integers(2)),
        admit_ahead=colocated and overlapped and bool(rng.integers(2)),
    )
    if config.token_budget - max_seqs * (1 + gamma) == 0 and colocated:
        # A full batch of whole blocks would leave no token for a prompt, for ever.
        config = ReplicaConfig(**{**vars_of(config), "token_budget": config.token_budget + 5})
    cost = VaryingCost(
        by_requests=bool(rng.integers(2)),
        by_context=bool(rng.integers(2)),
        captured=pick((), (1, 2, 4, 8, 16), (8, 24, 40)),
        step_ms=pick(1.0, 0.37),
        token_ms=pick(0.0, 0.05, 0.0713),
        draft=pick(0.0, 0.25),
        prefill=pick(0.0, 0.01, 1.0),
    )
    # Times in whole milliseconds meet the ends of steps.
    arrival = np.cumsum(pick(rng.exponential(0.004, requests), rng.integers(0, 8, requests) * 1e-3))
    trace = fixed_arrivals(
        arrival - arrival[0],
        pick(rng.integers(1, 40, requests), np.full(requests, 7)),
        pick(rng.integers(1, 90, requests), rng.integers(1, 4, requests), np.full(requests, 12)),
    )
    load = pick(
        OpenLoop(requests=requests),
        OpenLoop(requests=requests, warmup=5, cooldown=20),
        ClosedLoop(users=5, scored=30),
        ClosedLoop(users=17, scored=70, think_s=0.0123, stagger_s=0.004),
        ClosedLoop(users=7, scored=40, think_s=0.002, steady=False),
        ClosedLoop(users=9, scored=9, steady=False, stagger_s=0.05),
    )
    policy = load_policy(pick(*[spec for spec in policies if fits(spec, gamma)]))
    drafts = None
    if pick(True, True, True, False):
        bank = recorded_bank(4, texts=2, length=30, ragged=25, seed=seed, over=pick(0.0, 2.0))
        tilt = pick(None, None, Tilt(alpha=(0.7,), confidence=(0.3,)), Tilt(confidence=(-1.0,)))
        drafts = lambda: BankDrafts(bank, gamma=gamma, seed=seed - 3, tilt=tilt)  # noqa: E731
    domains = ("chat", "code", "math") if drafts else ("any",)
    return {
        "replicas": pick(1, 2, 5),
        "config": config,
        "cost": cost,
        "drafts": drafts or (lambda: None),
        "draft_cost": DraftCost(pick(1.0, 0.3), bool(rng.integers(2))),
        "policy": policy,
        "stream": RequestStream(trace, dict.fromkeys(domains, 1.0), order_seed=seed, domain_seed=seed, order="trace"),
        "load": load,
        "router": pick("round-robin", "least-tokens", "power-of-two"),
        "router_seed": seed,
        "slo_tpot_ms": 5.0,
    }


def fits(spec, gamma):
    """Whether a policy can be used with blocks of gamma drafts."""
    policy = load_policy(spec)
    most = kernel_of(policy).most_gamma
    return policy.traits.needs_gamma <= gamma and (most is None or gamma <= most)


def vars_of(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def outcome(run, options):
    try:
        return run(**{**options, "drafts": options["drafts"]()})
    except (InputError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def assert_same(one, two):
    assert type(one) is type(two), (one, two)
    if not isinstance(one, Records):
        assert one == two
        return
    for table in ("steps", "requests"):
        left, right = getattr(one, table), getattr(two, table)
        assert list(left) == list(right)
        for name in left:
            assert left[name].dtype == right[name].dtype
            np.testing.assert_array_equal(left[name], right[name], err_msg=f"{table}.{name}")
    for name in ("scored", "window_ns", "end_ns", "replicas", "gpus", "colocated", "extrapolated"):
        assert getattr(one, name) == getattr(two, name), name


@pytest.mark.parametrize("seed", range(200))
def test_random_clusters(seed):
    options = random_run(seed)
    assert_same(outcome(run_cluster, options), outcome(run_compiled, options))


@pytest.mark.parametrize("seed", range(200, 212))
@pytest.mark.parametrize("spec", MANY_OPTIONS)
def test_random_clusters_with_each_of_their_options(spec, seed):
    options = random_run(seed, (spec,))
    assert_same(outcome(run_cluster, options), outcome(run_compiled, options))


# -- what stops a run ------------------------------------------------------------------------------------


def plain(**changes):
    trace = fixed_arrivals(np.arange(20) * 0.002, 10, 30)
    options = {
        "replicas": 1,
        "config": ReplicaConfig(max_seqs=4, token_budget=64, block_tokens=4, kv_blocks=100),
        "cost": VaryingCost(by_requests=False, by_context=False, step_ms=1.0),
        "drafts": lambda: BankDrafts(recorded_bank(3, texts=2, length=30, ragged=25), seed=1),
        "draft_cost": DraftCost(),
        "policy": load_policy("dspark"),
        "stream": RequestStream(trace, dict.fromkeys(("math", "code", "chat"), 1.0), order_seed=0, domain_seed=0),
        "load": ClosedLoop(users=4, scored=8),
    }
    return options | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": ReplicaConfig(max_seqs=4, token_budget=64, block_tokens=4, kv_blocks=10)}, "needs 11 KV blocks"),
        ({"load": ClosedLoop(users=4, scored=8, stagger_s=50.0)}, "before the last of 4 users"),
        ({"router": "random"}, "round-robin"),
        ({"config": ReplicaConfig(max_seqs=4, token_budget=8)}, "a full batch with whole blocks"),
    ],
)
def test_both_refuse_the_same_with_the_same_words(changes, message):
    options = plain(**changes)
    first = outcome(run_cluster, options)
    assert isinstance(first, str)
    assert message in first
    assert outcome(run_compiled, options) == first


def test_a_prompt_that_has_no_price_is_refused_when_it_comes_and_not_before():
    class Short(VaryingCost):
        def prefill_ms(self, tokens):
            if tokens > 10:
                raise InputError(field="tokens", value=tokens, expected="at most 10")
            return 1.0

    def run(last):
        trace = fixed_arrivals(np.arange(20) * 0.002, [10] * 19 + [last], 30)
        stream = RequestStream(
            trace, dict.fromkeys(("math", "code", "chat"), 1.0), order_seed=0, domain_seed=0, order="trace"
        )
        cost = Short(by_requests=False, by_context=False)
        options = plain(stream=stream, cost=cost, load=ClosedLoop(users=2, scored=6))
        results = [outcome(each, options) for each in (run_cluster, run_compiled)]
        assert_same(*results)
        return results[1]

    assert isinstance(run(11), Records)  # request 19 is never issued
    assert run(10).requests["prompt_tokens"].max() == 10
    options = plain(cost=Short(by_requests=False, by_context=False), load=OpenLoop(requests=20))
    trace = fixed_arrivals(np.arange(20) * 0.002, [10] * 19 + [11], 30)
    options["stream"] = RequestStream(trace, dict.fromkeys(("math", "code", "chat"), 1.0), order_seed=0, domain_seed=0)
    first = outcome(run_cluster, options)
    assert "at most 10" in first
    assert outcome(run_compiled, options) == first


# -- which runs are compiled -----------------------------------------------------------------------------


def kernel_that(length):
    from numba import cfunc

    from dsim.kernel import REQUESTS, signature

    @cfunc(signature())
    def plan(counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths):
        for r in range(counts[REQUESTS]):
            lengths[r] = length
        return 0

    return plan


class Mine:
    """A policy of a user, with a kernel."""

    def __init__(self, length):
        self.traits = load_policy("fixed:k=1").traits
        self.length = length

    def __repr__(self):
        return f"Mine({self.length})"

    def plan(self, view):
        return np.full(view.requests, self.length)

    def kernel(self):
        return Kernel(kernel_that(self.length))


def test_a_kernel_of_ones_own():
    options = plain(policy=Mine(2))
    assert why_not(options["policy"], None) is None
    assert_same(outcome(run_cluster, options), outcome(run_compiled, options))


@pytest.mark.parametrize("length", [4, -1])
def test_a_kernel_out_of_bounds_is_refused_as_its_policy_is(length):
    options = plain(policy=Mine(length))
    first = outcome(run_cluster, options)
    assert "returned a verify length out of bounds" in first
    assert outcome(run_compiled, options) == first


@pytest.mark.parametrize(
    ("policy", "memory"),
    [
        ("oracle", {"tokens": 1e9, "elapsed_ms": 1.0}),
        ("marginal", {"tokens": 1e9, "elapsed_ms": 1.0}),
        ("vllm-ascend:interval=9", {"steps": 5, "length": 2}),
        ("goodput:interval=9,prior=0", {"alpha": 1.0, "length": 2, "steps": 5}),
    ],
)
def test_a_policy_that_served_before_goes_on_with_what_it_remembers(policy, memory):
    def served():
        made = load_policy(policy)
        for name, value in memory.items():
            assert hasattr(made, name)
            setattr(made, name, value)
        return made

    cost = VaryingCost(by_requests=False, by_context=False, step_ms=1.0, token_ms=0.1)
    new, first = (outcome(run_cluster, plain(policy=made, cost=cost)) for made in (load_policy(policy), served()))
    assert new.steps["drafts"].tolist() != first.steps["drafts"].tolist()
    assert_same(first, outcome(run_compiled, plain(policy=served(), cost=cost)))


def test_what_cannot_be_compiled_is_named():
    class Quiet(Mine):
        kernel = None

    class Learning(Mine):
        def observe(self, verified, accepted):
            pass

    class Wrong(Mine):
        def kernel(self):
            return "fast"

    class Live:
        label = "live:tiny"

    class Halved(BankDrafts):
        def draft(self, *arguments):
            raise AssertionError

    class Changed(Mine):
        def plan(self, view):
            return np.zeros(view.requests, dtype=np.int64)

    assert "has no kernel" in why_not(Quiet(1), None)
    assert "has no kernel" in why_not(Changed(1), None)
    assert "learns" in why_not(Learning(1), None)
    assert "not replayed" in why_not(Mine(1), Live())
    bank = recorded_bank(3, texts=2, length=30, ragged=25)
    assert why_not(Mine(1), BankDrafts(bank, seed=1)) is None
    assert "not replayed" in why_not(Mine(1), Halved(bank, seed=1))
    with pytest.raises(InputError, match="offers no kernel"):
        why_not(Wrong(1), None)
    assert outcome(run_compiled, plain(policy=Quiet(1))).startswith("InputError: field 'engine': this run cannot be")


def test_blocks_that_a_policy_refuses_are_left_to_its_plan():
    policy = load_policy("trtllm:tiers=1-2,drain=1")
    bank = recorded_bank(3, texts=2, length=30, ragged=25)
    assert why_not(policy, BankDrafts(bank, seed=1, gamma=2)) is None
    assert "has no kernel for blocks of 3 drafts" in why_not(policy, BankDrafts(bank, seed=1, gamma=3))
    options = plain(policy=policy)
    assert "before the whole block of 3 drafts" in outcome(run_cluster, options)
    assert outcome(partial(serve, "auto"), options) == outcome(run_cluster, options)


def test_everything_runs_without_numba():
    code = (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('numba', 'llvmlite'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'numba' else found(name, package)\n"
        "from dsim import check_policy, load_scenario, simulate\n"
        "from dsim.errors import InputError\n"
        "from dsim.scenario import Point\n"
        "scenario = load_scenario('decode-node', {'load.scored_min': 20, 'load.scored_per_user': 1})\n"
        "print(simulate(scenario, Point('dspark', 0, users=2)).row['n_scored'], 'kernel' in check_policy('dspark'))\n"
        "try:\n"
        "    simulate(scenario, Point('dspark', 0, users=2), engine='compiled')\n"
        "except InputError as error:\n"
        "    print(error)\n"
        "print('numba' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "20.0 False",
        "field 'engine': this run cannot be compiled: Numba is not installed (extra 'fast'), expected 'auto' or 'step'",
        "False",
    ]


def test_an_engine_is_one_of_three():
    with pytest.raises(InputError, match="one of auto, step, compiled"):
        serve("fast", **plain())
    options = plain()
    assert_same(*(serve(engine, **{**options, "drafts": options["drafts"]()}) for engine in ("auto", "step")))
