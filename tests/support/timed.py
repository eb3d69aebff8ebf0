"""What the benchmarks time: policies, and a replica whose batch stays full."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dsim import scenario as runs
from dsim.compiled.run import _Run, kernel_of
from dsim.options import ReplicaConfig
from dsim.policy import load_policy
from dsim.prices import DraftCost
from dsim.scenario import cost_of
from dsim.schema import load_scenario
from dsim.workload import ClosedLoop, RequestStream
from traces import read_trace

#: Policies with a kernel that look at their requests in every step.
PLANNERS = (
    "threshold:t=0.5",
    "threshold:t=0.5,on=survival",
    "dspark-alg1",
    "dspark",
    "tetris:capacity=768",
    "disco",
    "goodput:interval=1",
    "marginal",
    "vllm-ascend:interval=1",
    "vllm-adaptive",
    "vllm-verify-adaptive",
    "sglang",
    "sglang:table=additive,fill=true,min_predicted_gain=0.05",
    "trtllm",
    "trtllm:tiers=global,drain=0.5",
    "atom",
    "lab",
    "lab:price=step,lookup=linear",
    "oracle",
)
#: Policies whose plan() is a constant or one look-up, 1 to 2 us at 256 requests: no step can cost only 1.5 times that,
#: because drafts, outcomes and the record of 256 requests alone take 5. 3 U and 8 us hold for them, too.
CONSTANT = ("none", "fixed:k=5", "batch-table")


def one_replica(users, requests, policy, output=800):
    """Options of a decode replica whose batch stays full while it is timed (long outputs)."""
    scenario = load_scenario("decode-node", {"drafts.source": "synthetic"})
    drafts = runs._drafts(scenario, scenario.arm("dspark"), 1)
    trace = read_trace("azure2023-conv")
    trace = replace(trace, output_tokens=np.full_like(trace.output_tokens, output))
    stream = RequestStream(trace, dict.fromkeys(drafts.domains, 1.0), order_seed=1, domain_seed=2)
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


def compiled_run(options):
    """The compiled loop of such options before its first step."""
    names = ("replicas", "config", "cost", "drafts", "draft_cost", "policy")
    kernel = kernel_of(options["policy"])
    router = options.get("router", "round-robin")
    return _Run(*(options[name] for name in names), kernel, options["stream"], options["load"], router, 0)
