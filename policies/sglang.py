"""SGLang's DSpark scheduler: a budget from a profiled table, two steps old, spent by current confidences."""

from __future__ import annotations

import numpy as np

from dsim.errors import InputError
from dsim.kernel import Kernel, ages_to
from dsim.lookup import PriceMemo, sampled
from dsim.planning import cumulative_value, top_k
from dsim.policy import BasePolicy, FloatArray, IntArray, PolicyView, Traits
from policies._parameters import need_bool, need_int, need_number
from policies._tables import captured_or_all, need_block, pinned_table

TABLES = ("diagonal", "additive", "none")


class Sglang(BasePolicy):
    """The budget of drafts that maximizes tau * SPS(R + b) over confidences `lag` steps old; the best ones of now.

    tau is R plus the b best old survivals, SPS comes from a table, and the smallest b wins where values are equal.
    The target runs in the captured graph of the next size, a *tier*: its padding is paid for and stays empty, or is
    filled with the next best drafts (`fill`). A budget beyond the largest captured size has no graph, and then every
    request is verified in full.

    Parameters
    ----------
    table
        What SPS is believed to be:

        - ``"diagonal"``: the target pass, timed with whole blocks of 1, 2, 4, 8, 16, 24, ..., 64, 80, ..., 128, 160,
          ..., 256, 320, ... requests, so at that many times 1 + gamma tokens; a step costs what the next *smaller* of
          these sizes does. Between two of them more tokens look free.
        - ``"additive"``: draft pass plus target pass, the latter timed at the captured sizes (at every size where
          nothing is captured), linear between them, the last one's price beyond.
        - ``"none"``: no table, which is a flat one: everything is verified.
        - the path of an engine file (`dsim.engines`), read by its own rule; the step's own prices do not matter then.
    lag
        Age of the confidences that set the budget, >= 0. With 0 the search is retrospective, not lossless.
    fill
        Raise the budget to the tier (``speculative_dspark_align_verify_tokens_to_graph_tier``).
    min_predicted_gain
        Verify everything unless the best budget promises at least this share more tokens a second, >= 0. The
        engine's default is 0, and 0.05 where it derives the table from its captured graphs.

    Raises
    ------
    InputError
        A parameter outside its range, or `table` is neither a name nor an engine's price table.

    Examples
    --------
    One request, two drafts: whole blocks of one and two requests were timed, 3 and 6 tokens. So a step of one to
    five tokens is believed to cost what 3 tokens do, and all drafts are verified, though the third token is dear:

    >>> from dsim.policy import make_view
    >>> now = [[0.5, 0.5]]
    >>> view = make_view(now, [0.0, 10.0, 11.0, 30.0], history=(now, now))
    >>> Sglang().plan(view).tolist(), Sglang(table="additive").plan(view).tolist()
    ([2], [1])

    References
    ----------
    SGLang, https://github.com/sgl-project/sglang, directory ``python/sglang/srt/speculative/dspark_components``
    (``dspark_planner.py``, ``dspark_sps.py``) and ``python/sglang/benchmark/dspark_sps_profiler.py``; tables from
    captured graphs and `min_predicted_gain`: https://github.com/sgl-project/sglang/pull/35413 (open).

    Differences from the paper (DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, section 5.2): the
    table, the tiers and the guard. Differences from the engine: it times whole steps along the diagonal, so that
    the draft pass of *that many* requests is in the price, here it is the target pass alone; it smooths the
    additive curve; it drops drafts with a survival below 1e-6, here only those at 0. Prompt chunks are not in its
    price, as it runs prompts in steps of their own.
    """

    def __init__(
        self, table: str = "diagonal", lag: int = 2, fill: bool = False, min_predicted_gain: float = 0.0
    ) -> None:
        need_int("lag", lag, 0)
        need_bool("fill", fill)
        need_number("min_predicted_gain", min_predicted_gain)
        self.table = table
        self.lag = lag
        self.fill = fill
        self.min_predicted_gain = min_predicted_gain
        self._file = pinned_table(table, TABLES)
        if table == "none":
            for name, value, idle in (
                ("lag", lag, 2),
                ("fill", fill, False),
                ("min_predicted_gain", min_predicted_gain, 0),
            ):
                if value != idle:
                    raise InputError("is not used with table = 'none'", field=name, value=value)
            self.traits = Traits(cost_driven=False)
        else:
            self.traits = Traits(
                confidence_age=lag,
                cost_driven=self._file is None,
                gain_guard=float(min_predicted_gain),
                pads_to_captured=fill,
                coarse_prices=table == "diagonal",
                # The budget is old, and given it a draft's rank depends on nothing drafted after it.
                lossless=lag > 0,
            )
        self._memo = PriceMemo()

    def plan(self, view: PolicyView) -> IntArray:
        requests = view.requests
        if requests == 0 or self.table == "none":
            return view.caps.copy()
        tau = cumulative_value(view.survival(self.lag), start=requests)
        rate = tau / self._prices(view)[: tau.size]
        budget = int(rate.argmax())
        if rate[budget] < rate[-1] * (1 + self.min_predicted_gain):
            budget = tau.size - 1
        tiers = view.captured_sizes
        if tiers.size:
            tier = tiers.searchsorted(requests + budget)
            if tier == tiers.size:
                return view.caps.copy()
            if self.fill:
                budget = int(tiers[tier]) - requests
        return top_k(view.survival(), budget)

    def kernel(self) -> Kernel | None:
        """See `dsim.kernel.Kernel`. A table from a file has none."""
        if self._file is not None:
            return None
        from policies import _kernels

        if self.table == "none":
            return Kernel(_kernels.whole)
        diagonal = self.table == "diagonal"

        def prices(curve: FloatArray, captured: IntArray, gamma: int) -> FloatArray:
            return _diagonal(curve, gamma) if diagonal else _additive(curve, captured)

        # The diagonal holds the draft.
        params = (not diagonal, self.fill, self.min_predicted_gain)
        return Kernel(_kernels.sglang, params=params, ages=ages_to(self.lag), prices=prices)

    def _prices(self, view: PolicyView) -> FloatArray:
        """float64[R * gamma + 1 or more]: milliseconds by number of drafts; prompt chunks are not seen."""
        requests, gamma = view.requests, view.gamma
        if self._file is not None:
            need_block(self._file, self.table, gamma)
            return self._file.prices(requests, requests * (1 + gamma))[requests:]
        if self.table == "diagonal":
            return self._memo.get(view.verify_ms, gamma, _diagonal)[requests:]
        target = self._memo.get(view.verify_ms, gamma, lambda curve, _: _additive(curve, view.captured_sizes))
        return view.draft_ms + target[requests : requests * (1 + gamma) + 1]


def _diagonal(curve: FloatArray, gamma: int) -> FloatArray:
    """The curve as believed from whole blocks of few batch sizes, each size's price up to the next one."""
    last = curve.size - 1
    batches = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, last + 1, 64)]
    return sampled(curve, np.array(batches) * (1 + gamma), "floor").prices(last)


def _additive(curve: FloatArray, captured: IntArray) -> FloatArray:
    """The curve as believed from its captured sizes, linear between them and level beyond."""
    last = curve.size - 1
    return sampled(curve, captured_or_all(captured, last), "linear", hold=True).prices(last)
