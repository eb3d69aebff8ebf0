"""No speculation: the target decodes one token a request a step."""

from __future__ import annotations

import numpy as np

from dsim.kernel import Kernel
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits


class NoSpeculation(BasePolicy):
    """Verify no draft.

    The yardstick of every speed-up. It ignores what the drafter offers; whether a drafter runs at all (and
    costs time) is the arm's business, not the policy's.

    Examples
    --------
    >>> from dsim.policy import make_view
    >>> NoSpeculation().plan(make_view([[0.9, 0.9], [0.9, 0.9]], verify_ms=np.ones(7))).tolist()
    [0, 0]

    References
    ----------
    The paper's autoregressive baseline, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, section 2.
    Differences from the paper: none.
    """

    traits = Traits(cost_driven=False)

    def plan(self, view: PolicyView) -> IntArray:
        return np.zeros(view.requests, dtype=np.int64)

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        return Kernel(_kernels.none)
