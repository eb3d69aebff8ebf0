"""A fixed number of drafts for every request, whatever the load."""

from __future__ import annotations

import numpy as np

from dsim.kernel import Kernel
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits
from policies._parameters import need_int


class Fixed(BasePolicy):
    """Verify the first `k` drafts of every request.

    With an MTP drafter and k = 1 this is the paper's production baseline (MTP-1): two target tokens a
    request a step. With k = gamma it verifies whole blocks.

    Parameters
    ----------
    k
        Drafts to verify for each request, >= 0. The arm's block must hold as many (`Traits.needs_gamma`); a
        request never gets more than its cap.

    Raises
    ------
    InputError
        `k` is not an integer >= 0.

    Examples
    --------
    >>> from dsim.policy import make_view
    >>> view = make_view([[0.9, 0.1, 0.1], [0.9, 0.9, 0.9]], verify_ms=np.ones(9), caps=[3, 1])
    >>> Fixed(k=2).plan(view).tolist()
    [2, 1]

    References
    ----------
    DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, section 5.3 (MTP-1, MTP-3 and MTP-5).
    Differences from the paper: none.
    """

    def __init__(self, k: int = 5) -> None:
        need_int("k", k, 0)
        self.k = k
        self.traits = Traits(cost_driven=False, needs_gamma=k)

    def plan(self, view: PolicyView) -> IntArray:
        return np.minimum(view.caps, self.k)

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        return Kernel(_kernels.fixed, params=(self.k,))
