"""The policies that the benchmarks time."""

from __future__ import annotations

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
