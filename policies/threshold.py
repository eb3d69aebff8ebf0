"""A static confidence threshold: the load-blind way to cut a block short."""

from __future__ import annotations

import numpy as np

from dsim.errors import InputError
from dsim.kernel import Kernel
from dsim.planning import count_rows, leading_run
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits
from policies._parameters import need_number

SIGNALS = ("confidence", "survival")


class Threshold(BasePolicy):
    """Verify a request's drafts for as long as the signal is at least `t`.

    Parameters
    ----------
    t
        Threshold in [0, 1]; 0 verifies whole blocks.
    on
        ``"confidence"``: the conditional c_k of each draft; ``"survival"``: the product a_k = c_1 ... c_k.

    Raises
    ------
    InputError
        `t` outside [0, 1], or an unknown signal.

    Examples
    --------
    >>> from dsim.policy import make_view
    >>> view = make_view([[0.75, 0.75, 0.25], [0.5, 0.875, 0.875]], verify_ms=np.ones(9))
    >>> Threshold(t=0.75).plan(view).tolist(), Threshold(t=0.5, on="survival").plan(view).tolist()
    ([2, 0], [2, 1])

    References
    ----------
    DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, section 3.2.2 (static thresholds) and Fig. 5
    (sweep of the threshold).

    Differences from the paper: none known; the paper does not say on which of the two signals it sweeps, so
    both are offered. The comparison is in float32, the precision of the confidences.
    """

    traits = Traits(cost_driven=False)

    def __init__(self, t: float = 0.5, on: str = "confidence") -> None:
        need_number("t", t, most=1)
        if on not in SIGNALS:
            raise InputError(field="on", value=on, expected=f"one of {', '.join(SIGNALS)}")
        self.t = t
        self.on = on

    def plan(self, view: PolicyView) -> IntArray:
        if self.on == "survival":
            lengths = count_rows(view.survival() >= np.float32(self.t))
        else:
            lengths = leading_run(view.confidence >= np.float32(self.t))
        return np.minimum(lengths, view.caps)

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        return Kernel(_kernels.threshold, params=(self.t, self.on == "survival"))
