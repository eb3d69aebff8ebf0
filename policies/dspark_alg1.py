"""The paper's Algorithm 1: greedy admission with an early stop, synchronous and non-anticipating."""

from __future__ import annotations

import numpy as np

from dsim.kernel import Kernel
from dsim.planning import cumulative_value, first_non_gain, top_k
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits


class DSparkAlgorithm1(BasePolicy):
    """Admit drafts by descending survival; stop at the first one that does not raise tau * SPS(B).

    Candidates (r, j) with a_{r,j} > 0 are ranked by value, then request, then position. tau starts at R and
    gains a_{r,j} with each admission; B starts at the step's base tokens and gains 1; SPS(B) is
    1000 / verify_ms[B]. Since a draft's rank depends on nothing that is drafted after it, stopping (instead
    of searching on) keeps the decision about x_k independent of x_k: that makes it lossless.

    On captured-size prices the early stop is a trap: where the next token opens a dearer graph, nothing is
    admitted; elsewhere often no more than the padding that is free. `policies.dspark` is the way out.

    Examples
    --------
    Appendix A: SPS = 1, 0.5, 0.45 and a_1 = 0.8. One draft lowers Theta from 1 to 0.9, so the search stops
    there, although two drafts would reach 1.134:

    >>> from dsim.policy import make_view
    >>> prices = [0.0, 1000 / 1.0, 1000 / 0.5, 1000 / 0.45]
    >>> DSparkAlgorithm1().plan(make_view([[0.8, 0.9]], verify_ms=prices)).tolist()
    [0]
    >>> DSparkAlgorithm1().plan(make_view([[0.8, 0.9]], verify_ms=[0.0, 10.0, 11.0, 12.0])).tolist()
    [2]

    References
    ----------
    DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, Algorithm 1 and Appendix A.

    Differences from the paper: B counts everything in the step, so prefill chunks make drafts dearer (the
    paper's decode nodes have none and start at B = R); tau starts at R as in the paper and does not count
    the first tokens of prompts that end in the step. Theta is compared in float64 as tau / verify_ms: a rise
    below its resolution is no rise.
    """

    traits = Traits(confidence_age=0)

    def plan(self, view: PolicyView) -> IntArray:
        requests, base = view.requests, view.base_tokens
        if requests == 0:
            return np.zeros(0, dtype=np.int64)
        survival = view.survival()
        tau = cumulative_value(survival, start=requests)
        throughput = tau / view.verify_ms[base : base + tau.size]
        return top_k(survival, first_non_gain(throughput))

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        return Kernel(_kernels.dspark_alg1)
