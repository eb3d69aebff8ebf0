"""A clairvoyant bound: knows which drafts will be accepted, step by step."""

from __future__ import annotations

import numpy as np

from dsim.kernel import Kernel
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits


class Oracle(BasePolicy):
    """Admit b drafts that will all be accepted, with b maximizing tokens - lambda * time of this step.

    A draft of request r at a position up to accepted[r] is worth exactly one token, any other none, so only
    the number b matters. Time is the whole step's (`PolicyView.step_ms`: draft, target and host), by b.
    lambda is the throughput so far, tokens / elapsed ms over the steps this object has planned (Dinkelbach's
    iteration for the long-run ratio, one update a step); in the first step it is the best ratio that this
    step can reach. The smallest b wins where values are equal. The b drafts go to all first positions in
    order of request, then to the second ones, and so on, so that nobody is left far behind.

    It is a *myopic* bound: each step is the best one by itself at the going rate, but what a choice does to
    later steps (who finishes when, what is drafted next) is not looked at, so no policy is proven to stay
    below it, though in practice none should get past it by much.

    Attributes
    ----------
    tokens, elapsed_ms
        Tokens committed and time spent so far, as far as this object planned them.

    Examples
    --------
    A step costs 10 ms up to 3 tokens and 30 ms beyond: of three useful drafts one is worth its time.

    >>> from dsim.policy import make_view
    >>> view = make_view(np.ones((2, 2)), [0.0, 10.0, 10.0, 10.0, 30.0, 30.0, 30.0], accepted=[1, 2])
    >>> oracle = Oracle()
    >>> oracle.plan(view).tolist(), oracle.tokens, oracle.elapsed_ms
    ([1, 0], 3, 10.0)

    References
    ----------
    W. Dinkelbach, On nonlinear fractional programming, Management Science 13 (1967),
    https://doi.org/10.1287/mnsc.13.7.492. The objective is the paper's Theta (arXiv 2607.05147,
    https://arxiv.org/abs/2607.05147, section 3.2.2) with acceptance known instead of predicted.

    Differences from the paper: the paper has no oracle. The price is the step's, not the target pass's alone.
    """

    traits = Traits(clairvoyant=True, lossless=False)

    def __init__(self) -> None:
        self.tokens = 0
        self.elapsed_ms = 0.0

    def plan(self, view: PolicyView) -> IntArray:
        if view.accepted is None:
            raise RuntimeError("oracle needs view.accepted; the engine gives it to clairvoyant policies")
        useful = np.minimum(view.accepted, view.caps)
        total = int(useful.sum())
        if view.base_tokens == 0:
            return np.zeros(view.requests, dtype=np.int64)
        step_ms = view.step_ms()[: total + 1]
        tokens = np.arange(view.sampling, view.sampling + total + 1)
        rate = self.tokens / self.elapsed_ms if self.tokens else float((tokens / step_ms).max())
        drafts = int((tokens - rate * step_ms).argmax())
        self.tokens += int(tokens[drafts])
        self.elapsed_ms += float(step_ms[drafts])
        # Position-major order: [gamma, R] flattened.
        worth = np.arange(view.gamma)[:, None] < useful
        granted: IntArray = np.add.reduce(
            worth & (np.cumsum(worth).reshape(worth.shape) <= drafts), axis=0, dtype=np.int64
        )
        return granted

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        return Kernel(_kernels.oracle, state=(self.tokens, self.elapsed_ms))
