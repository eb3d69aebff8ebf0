"""vLLM's adaptive verification: a budget one step old at captured-size prices, spent by current confidences."""

from __future__ import annotations

import numpy as np

from dsim.kernel import Kernel, ages_to
from dsim.lookup import PriceMemo, captured_then_linear
from dsim.planning import best_count, top_k
from dsim.policy import BasePolicy, FloatArray, IntArray, PolicyView, Traits
from policies._parameters import need_int
from policies._tables import need_block, pinned_table

PROFILED = "profiled"


class VllmAdaptive(BasePolicy):
    """As many drafts as maximize (tokens expected) / (draft + target pass) by old confidences; which, by current ones.

    Expected are one token of every request that samples in this step (prompts whose last chunk is in it
    included, earlier chunks not) and the `lag` steps old survivals of the b best drafts; the price is the draft
    pass plus the target pass over T + b tokens, T the tokens without drafts, prompt chunks included. The
    smallest b wins where values are equal. The b drafts of the highest current survival are verified.

    The engine times its captured sizes and, above them, 1.5, 2, 4, ... times the largest. A step costs what the
    next captured size costs, under a running maximum; above the capture limit the price is linear between the
    sizes timed there, and from the limit to the first of them that one's price holds: the cliff is not blended.

    Parameters
    ----------
    table
        ``"profiled"``: the step's own prices, timed at the engine's sizes (at every size where nothing is captured); or
        the path of an engine file (`dsim.engines`), whose prices, draft pass included, are then all that counts.
    lag
        Age of the confidences that set the budget, >= 0. With 0 the search is retrospective, not lossless.

    Raises
    ------
    InputError
        `lag` is not an integer >= 0, or `table` is neither ``"profiled"`` nor an engine's price table.

    Examples
    --------
    Captured are 2 and 4 tokens: the third token costs as much as the fourth, so both are taken or none.

    >>> from dsim.policy import make_view
    >>> now = [[0.5, 0.25], [0.75, 0.5]]
    >>> prices = [0.0, 10.0, 10.0, 16.0, 16.0, 30.0, 30.0]
    >>> view = make_view(now, prices, history=(now,), captured_sizes=[2, 4, 6])
    >>> VllmAdaptive().plan(view).tolist()
    [1, 1]

    References
    ----------
    vLLM, https://github.com/vllm-project/vllm/pull/47808 (``enable_adaptive_verification``), file
    ``vllm/v1/worker/gpu/spec_decode/adaptive_verification.py``.

    Differences from the paper (DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, section 5.2): the
    draft pass is in the price, prompt chunks are in the step, the budget is one step old instead of two.
    Differences from the engine: the draft pass costs what this batch's costs (the engine's own table of it is
    stepped by captured size); a draft of survival 0 is no candidate; the sampler's limit on logits is left out.
    """

    def __init__(self, table: str = PROFILED, lag: int = 1) -> None:
        need_int("lag", lag, 0)
        self.table = table
        self.lag = lag
        self._file = pinned_table(table, (PROFILED,))
        # Given the budget, a draft's rank depends on nothing drafted after it.
        self.traits = Traits(confidence_age=lag, lossless=lag > 0, cost_driven=self._file is None)
        self._memo = PriceMemo()

    def plan(self, view: PolicyView) -> IntArray:
        if view.requests == 0:
            return np.zeros(0, dtype=np.int64)
        budget = best_count(view.survival(self.lag), view.sampling, self._prices(view))
        return top_k(view.survival(), budget)

    def kernel(self) -> Kernel | None:
        """See `dsim.kernel.Kernel`. A table from a file has none."""
        if self._file is not None:
            return None
        from policies import _kernels

        return Kernel(
            _kernels.budgeted,
            params=(1, 1),
            ages=ages_to(self.lag),
            prices=lambda curve, captured, _: captured_prices(curve, captured),
        )

    def _prices(self, view: PolicyView) -> FloatArray:
        """float64[R * gamma + 1]: milliseconds by number of drafts, the draft pass included."""
        first = view.base_tokens
        last = first + view.requests * view.gamma
        if self._file is not None:
            need_block(self._file, self.table, view.gamma)
            return self._file.prices(view.requests, last)[first:]
        target = self._memo.get(
            view.verify_ms, view.gamma, lambda curve, _: captured_prices(curve, view.captured_sizes)
        )
        return view.draft_ms + target[first : last + 1]


def captured_prices(curve: FloatArray, captured: IntArray) -> FloatArray:
    """float64[n]: what vLLM believes of a price curve float64[n] with these captured sizes (int64[S] ascending).

    Without captured sizes nothing is padded, and the curve is believed as it is, under the running maximum.

    >>> captured_prices(np.array([0.0, 5.0, 6.0, 7.0, 8.0, 40.0, 41.0, 42.0, 43.0]), np.array([2, 4])).tolist()
    [6.0, 6.0, 6.0, 8.0, 8.0, 41.0, 41.0, 42.0, 43.0]
    """
    last = curve.size - 1
    if not captured.size or last < 1:
        return np.maximum.accumulate(curve)
    limit = int(captured[-1])
    above = [limit + limit // 2, *(limit << power for power in range(1, last.bit_length() + 1))]
    timed = np.unique(np.minimum([*captured.tolist(), *above], last))
    return captured_then_linear(timed, curve[timed], limit, last)
