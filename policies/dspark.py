"""DSpark as deployed: how many drafts from old confidences, which ones from the current confidences."""

from __future__ import annotations

import numpy as np

from dsim.kernel import Kernel, ages_to
from dsim.planning import best_count, top_k
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits
from policies._parameters import need_int


class DSpark(BasePolicy):
    """Capacity K by a global search over confidences `lag` steps old, then the K best current drafts.

    K is the number of admitted drafts at the global maximum of tau * SPS(B) along the descending order of
    the old survivals, for the requests that are in decode now; the smallest K where maxima are equal. The
    old confidences cannot depend on the tokens being decided about, so the search needs no early stop and
    crosses the steps of a jagged price curve. The K drafts of the highest current survival are verified.

    Parameters
    ----------
    lag
        Age, in engine steps, of the confidences that set K, >= 0. A request that did not exist then counts
        c = 1. With 0 the search is retrospective, hence not lossless (Appendix A); the traits say so.

    Raises
    ------
    InputError
        `lag` is not an integer >= 0.

    Examples
    --------
    Two steps ago both drafts of the first request looked good, so two are admitted; by now the better ones
    are one of each:

    >>> from dsim.policy import make_view
    >>> now = [[0.75, 0.25], [0.5, 0.25]]
    >>> old = [[1.0, 1.0], [0.0, 0.0]]
    >>> view = make_view(now, verify_ms=np.arange(7) + 8.0, history=(now, old))
    >>> DSpark(lag=2).plan(view).tolist()
    [1, 1]

    References
    ----------
    DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, section 5.2.

    Differences from the paper: B counts prefill chunks (the paper's decode nodes have none). The paper does
    not say how a request without old confidences counts; c = 1 is what vLLM and SGLang take. tau starts at
    the R requests in decode; Theta is compared in float64 as tau / verify_ms.
    """

    def __init__(self, lag: int = 2) -> None:
        need_int("lag", lag, 0)
        self.lag = lag
        self.traits = Traits(confidence_age=lag, lossless=lag > 0)

    def plan(self, view: PolicyView) -> IntArray:
        requests, base = view.requests, view.base_tokens
        if requests == 0:
            return np.zeros(0, dtype=np.int64)
        capacity = best_count(view.survival(self.lag), requests, view.verify_ms[base:])
        return top_k(view.survival(), capacity)

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        return Kernel(_kernels.budgeted, params=(0, 0), ages=ages_to(self.lag))
