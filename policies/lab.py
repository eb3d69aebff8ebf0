"""The planner of the headroom study: DSpark's scheduler with every choice that engines make differently as a knob."""

from __future__ import annotations

import numpy as np

from dsim.errors import InputError
from dsim.kernel import Kernel
from dsim.lookup import LOOKUP_RULES, PriceMemo, sampled
from dsim.planning import best_count, cumulative_value, first_non_gain, top_k
from dsim.policy import BasePolicy, FloatArray, IntArray, PolicyView, Traits
from policies._parameters import MOST_INT, need_bool, need_int

SEARCHES = ("global", "early-stop")
PRICES = ("verify", "draft", "step")
PROBES = ("captured", "doubling")


class Lab(BasePolicy):
    """Capacity K from one look at the confidences, the K best drafts from another, prices as a knob says.

    K is the number of admitted drafts at the maximum of tau * SPS(B) along the descending order of the survivals of
    `capacity_lag` steps ago; the K drafts of the highest survival `allocation_lag` steps ago are verified. A request
    that did not exist then counts c = 1. With the defaults this is ``dspark:lag=2``, and with
    ``search=early-stop,capacity_lag=0`` it is ``dspark-alg1``, draft by draft.

    Parameters
    ----------
    search
        ``global``: the maximum, the fewest drafts where maxima are equal; ``early-stop``: the last draft before the
        first that does not raise the objective.
    capacity_lag, allocation_lag
        Ages, in engine steps, of the confidences that set K and of those that rank, >= 0.
    price
        What a step is believed to cost, beside its number of tokens: ``verify`` the target's pass alone (as in the
        paper), ``draft`` the drafter's pass too, ``step`` all of it, host time included (`PolicyView.step_ms`).
    lookup
        How the target's pass is priced: ``exact`` is the real curve; ``next``, ``floor`` and ``linear`` read a table
        of a few timed sizes by that rule (`dsim.lookup.StepTable`).
    probes
        The timed sizes, in tokens (only with a table): ``captured`` (the default: the captured sizes, the first size
        above them and the largest there is, so that the cliff is not blended; every size where nothing is captured),
        ``doubling`` (1, 2, 4, ...), or an integer n for n, 2n, 3n, ...
    running_max
        A larger step is believed never to be cheaper.

    Raises
    ------
    InputError
        A value that is none of the above, or `probes` without a table.

    Examples
    --------
    Two requests; a step takes 10 ms up to 3 tokens and 14 ms from the fourth on. One draft is free, the others are not
    worth 4 ms. An engine that timed steps of 4 tokens only thinks that all of them cost the same:

    >>> from dsim.policy import make_view
    >>> view = make_view([[0.5, 0.1], [0.1, 0.1]], [0.0, 10.0, 10.0, 10.0, 14.0, 14.0, 14.0])
    >>> Lab(capacity_lag=0).plan(view).tolist()
    [1, 0]
    >>> Lab(capacity_lag=0, lookup="linear", probes=4).plan(view).tolist()
    [2, 2]

    References
    ----------
    DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, Algorithm 1 and section 5.2.

    Differences from the paper: everything that is not at its default. A coarse table may believe a step free that is
    not (``probes=64`` with fewer than 64 tokens in the step), and then verifies it: that is what is studied.
    """

    def __init__(
        self,
        search: str = "global",
        capacity_lag: int = 2,
        allocation_lag: int = 0,
        price: str = "verify",
        lookup: str = "exact",
        probes: str | int | None = None,
        running_max: bool = False,
    ) -> None:
        for name, value, known in (
            ("search", search, SEARCHES),
            ("price", price, PRICES),
            ("lookup", lookup, ("exact", *LOOKUP_RULES)),
        ):
            if value not in known:
                raise InputError(field=name, value=value, expected=f"one of {', '.join(known)}")
        for name, lag in (("capacity_lag", capacity_lag), ("allocation_lag", allocation_lag)):
            need_int(name, lag, 0)
        if probes is not None:
            if lookup == "exact":
                raise InputError("is not used by lookup = 'exact'", field="probes", value=probes)
            if probes not in PROBES and (type(probes) is not int or not 1 <= probes <= MOST_INT):
                expected = f"{', '.join(PROBES)} or an integer >= 1, at most {MOST_INT}"
                raise InputError(field="probes", value=probes, expected=expected)
        need_bool("running_max", running_max)
        self.search, self.price, self.lookup, self.probes = search, price, lookup, probes
        self.capacity_lag, self.allocation_lag, self.running_max = capacity_lag, allocation_lag, running_max
        # Old confidences cannot depend on the tokens that are decided about. With current ones only the early stop
        # keeps the count from depending on drafts that are not admitted, and only if it goes by the same ranking.
        kept = capacity_lag > 0 or (search == "early-stop" and allocation_lag == 0)
        age = max(capacity_lag, allocation_lag)
        self.traits = Traits(confidence_age=age, coarse_prices=lookup != "exact", lossless=kept)
        self._memo = PriceMemo()

    def plan(self, view: PolicyView) -> IntArray:
        requests = view.requests
        if requests == 0:
            return np.zeros(0, dtype=np.int64)
        survival, prices = view.survival(self.capacity_lag), self._prices(view)
        if self.search == "global":
            capacity = best_count(survival, requests, prices)
        else:
            tau = cumulative_value(survival, start=requests)
            capacity = first_non_gain(tau / prices[: tau.size])
        return top_k(view.survival(self.allocation_lag), capacity)

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        seen = self.lookup != "exact" or self.running_max
        return Kernel(
            _kernels.lab,
            params=(self.search == "early-stop", PRICES.index(self.price)),
            ages=(self.capacity_lag, self.allocation_lag),
            prices=(lambda curve, captured, _: self._believed(curve, captured)) if seen else None,
        )

    def _prices(self, view: PolicyView) -> FloatArray:
        """float64[drafts + 1 or more]: what a step is believed to cost by admitted drafts, milliseconds."""
        if self.lookup != "exact" or self.running_max:
            believed = self._memo.get(
                view.verify_ms, view.gamma, lambda curve, _: self._believed(curve, view.captured_sizes)
            )
            view = view._replace(verify_ms=believed)
        if self.price == "verify":
            return view.verify_ms[view.base_tokens :]
        if self.price == "draft":
            drafts = view.requests * view.gamma
            return view.draft_ms + view.verify_ms[view.base_tokens : view.base_tokens + drafts + 1]
        return view.step_ms()

    def _believed(self, curve: FloatArray, captured: IntArray) -> FloatArray:
        """The believed price of the target's pass by tokens in the step, as long as the real one."""
        if self.lookup == "exact":
            return np.maximum.accumulate(curve)
        table = sampled(curve, self._sizes(curve.size - 1, captured), self.lookup, running_max=self.running_max)
        return table.prices(curve.size - 1)

    def _sizes(self, last: int, captured: IntArray) -> IntArray:
        """int64[S] ascending: the token counts that the engine timed."""
        if isinstance(self.probes, int):
            return np.arange(self.probes, last + 1, self.probes)
        if self.probes == "doubling":
            return 1 << np.arange(max(1, last).bit_length())
        if not captured.size:
            return np.arange(1, last + 1)
        return np.unique([*captured.tolist(), int(captured[-1]) + 1, last])
