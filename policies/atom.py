"""ROCm ATOM's DSpark scheduler: Algorithm 1 on a straight-line table, its lengths adopted steps later."""

from __future__ import annotations

import numpy as np

from dsim.kernel import Kernel
from dsim.lookup import PriceMemo
from dsim.planning import Survival, cumulative_value, first_non_gain, top_k
from dsim.policy import BasePolicy, FloatArray, IntArray, PolicyView, Traits
from policies._parameters import need_int
from policies._tables import captured_or_all, pinned_table

CAPTURED = "captured"


class Atom(BasePolicy):
    """The lengths that Algorithm 1 found `lag` steps ago, on a table linear between the captured sizes.

    Drafts are admitted by descending survival until one does not raise tau * SPS(B). SPS, steps a second, is timed at
    the captured sizes and linear in B between them, level outside, so the early stop meets slopes where the real curve
    has stairs. The lengths themselves are `lag` steps old: what was found for one block is used for a later
    one of the same request. A request without such a length, and every request of a step that holds prompt chunks, is
    verified in full.

    Parameters
    ----------
    table
        ``"captured"``: the step's own prices at the captured sizes (at every size where nothing is captured), or the
        path of an engine file (`dsim.engines`), whose prices are then all that counts.
    lag
        Age of the lengths, in engine steps, >= 0. The default is the usual description, "two steps back". In the source
        that counts from the top of a step, where one back is the block about to be verified: in the counting of
        `PolicyView.history` it would be ``lag=1``.

    Raises
    ------
    InputError
        `lag` is not an integer >= 0, or `table` is neither ``"captured"`` nor an engine's price table.

    Examples
    --------
    Captured are 2, 4 and 6 tokens at 10, 14 and 20 ms, so 3 tokens are believed to make 85.7 steps a second. The first
    draft pays (2.75 * 85.7 > 2 * 100), the second one too (3.375 * 71.4), the third does not (3.625 * 60.7).
    What the drafts are worth by now does not matter.

    >>> from dsim.policy import make_view
    >>> old, now = [[0.75, 0.25], [0.625, 0.4]], [[0.1, 0.1], [0.9, 0.9]]
    >>> prices = [0.0, 10.0, 10.0, 14.0, 14.0, 20.0, 20.0]
    >>> Atom().plan(make_view(now, prices, history=(now, old), captured_sizes=[2, 4, 6])).tolist()
    [1, 1]

    References
    ----------
    ROCm ATOM, https://github.com/ROCm/ATOM/pull/1414, files ``atom/spec_decode/dspark_scheduler.py`` (the search and
    the table), ``dspark_verify.py`` (which lengths are adopted) and ``atom/model_engine/model_runner.py``.

    Differences from the paper (DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147): Algorithm 1 there is
    synchronous and section 5.2 replaces the early stop by a global search; here the early stop stayed and
    the lengths are old. Differences from the engine: the old lengths are found again from the old confidences
    of the requests that are still there, at today's prices; it gives every request at least as many drafts as
    any had accepted in the step before, and it verifies in full after every change of the batch, which are both left
    out; without captured graphs it takes a made-up straight line.
    """

    def __init__(self, table: str = CAPTURED, lag: int = 2) -> None:
        need_int("lag", lag, 0)
        self.table = table
        self.lag = lag
        self._file = pinned_table(table, (CAPTURED,))
        # With lag 0 it is Algorithm 1, lossless by its early stop; with more by the age of all that it reads.
        self.traits = Traits(confidence_age=lag, cost_driven=self._file is None)
        self._memo = PriceMemo()

    def plan(self, view: PolicyView) -> IntArray:
        lengths = view.caps.copy()
        if view.base_tokens > view.requests:
            return lengths
        known = view.age_steps >= self.lag
        survival = view.survival(self.lag)
        if known.all():
            return self._lengths(survival, view) if survival.size else lengths
        if known.any():
            lengths[known] = self._lengths(survival[known], view)
        return lengths

    def kernel(self) -> Kernel | None:
        """See `dsim.kernel.Kernel`. A table from a file has none."""
        if self._file is not None:
            return None
        from policies import _kernels

        return Kernel(
            _kernels.atom,
            params=(self.lag,),
            ages=(self.lag,),
            prices=lambda curve, captured, _: _linear(curve, captured),
        )

    def _lengths(self, survival: Survival, view: PolicyView) -> IntArray:
        """int64[n]: what Algorithm 1 gives the n requests that were there, by their survivals of then."""
        requests = survival.shape[0]
        tau = cumulative_value(survival, start=requests)
        throughput = tau * self._steps_per_second(view, requests)[: tau.size]
        return top_k(survival, first_non_gain(throughput))

    def _steps_per_second(self, view: PolicyView, requests: int) -> FloatArray:
        """float64[n * gamma + 1 or more]: believed steps a second by number of drafts of n requests."""
        if self._file is not None:
            return np.asarray(1000.0 / self._file.prices(requests, requests * (1 + view.gamma))[requests:])
        believed = self._memo.get(view.verify_ms, 0, lambda curve, _: _linear(curve, view.captured_sizes))
        return believed[requests:]


def _linear(curve: FloatArray, captured: IntArray) -> FloatArray:
    """float64[n]: steps a second, linear between the captured sizes and level outside them."""
    last = curve.size - 1
    sizes = captured_or_all(captured, last)
    return np.asarray(np.interp(np.arange(last + 1), sizes, 1000.0 / curve[sizes]))
