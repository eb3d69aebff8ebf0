"""The marginal rule: expected tokens less a rate times the step's time, instead of their ratio."""

from __future__ import annotations

import math

import numpy as np

from dsim.errors import InputError
from dsim.kernel import Kernel, ages_to
from dsim.planning import cumulative_value, top_k
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits
from policies._parameters import need_int, need_number


class Marginal(BasePolicy):
    """Capacity K at the maximum of E - rate * cost over confidences `lag` steps old, then the K best current drafts.

    E is the requests in decode plus the survivals of the admitted drafts, cost the whole step's milliseconds
    (`PolicyView.step_ms`: draft, target and host). A draft is then worth its extra time at the going rate, tokens
    per millisecond, and the draft cost and whatever else every choice shares drop out. Ratio and marginal rule
    agree when the rate is the best ratio that this very step can reach (Dinkelbach); they differ in a step that is
    unlike the others, for example one with a large prefill chunk: its ratio is poor whatever is admitted, so the
    ratio rule buys drafts that the rate does not pay for.

    As in ``dspark`` the old confidences make the global search lossless and the current ones only rank.

    Parameters
    ----------
    rate
        Tokens per millisecond that a millisecond is worth, >= 0 (0: every draft is admitted). None: the running
        throughput, expected tokens over milliseconds of the steps this object has planned, both with the weight
        of a step fading by ``1 - weight`` with each later one; in the first step the best ratio that it can reach.
    lag
        Age, in engine steps, of the confidences that set K, >= 0. With 0 the choice is not lossless: on a stair of
        the price curve a promising second draft pays for the first.
    weight
        Weight of the last step in the running rate, in (0, 1]; an error with a fixed `rate`, where nothing runs.

    Attributes
    ----------
    tokens, elapsed_ms
        Running means of a step's expected tokens and milliseconds; 0 before the first step.

    Raises
    ------
    InputError
        A parameter outside its range.

    Examples
    --------
    One request, 10 ms and 2 ms a draft. At 0.25 tokens a millisecond a draft must survive with more than 1/2:

    >>> from dsim.policy import make_view
    >>> view = make_view([[0.75, 0.75, 0.75]], [0, 10, 12, 14, 16])
    >>> Marginal(rate=0.25, lag=0).plan(view).tolist(), Marginal(rate=0.5, lag=0).plan(view).tolist()
    ([2], [0])

    References
    ----------
    W. Dinkelbach, On nonlinear fractional programming, Management Science 13 (1967),
    https://doi.org/10.1287/mnsc.13.7.492: the maximum of a ratio of sums is where the sum of tokens less rate times
    time is largest, at the rate that makes that maximum 0. The search and the staleness are DSpark's (arXiv
    2607.05147, https://arxiv.org/abs/2607.05147, section 5.2).

    Differences from the paper: the difference replaces the ratio tau * SPS(B), and the step's time the target
    pass's. No engine is known to ship it. The running rate is the one that the confidences promise, not the one
    achieved, as both sides of the comparison should err alike.
    """

    def __init__(self, rate: float | None = None, lag: int = 2, weight: float = 0.05) -> None:
        if rate is not None:
            need_number("rate", rate)
        need_int("lag", lag, 0)
        need_number("weight", weight, most=1, zero=False)
        if rate is not None and weight != 0.05:
            raise InputError("is not used with a fixed rate", field="weight", value=weight)
        self.rate = rate
        self.lag = lag
        self.weight = weight
        self.traits = Traits(confidence_age=lag, lossless=lag > 0)
        self.tokens = 0.0
        self.elapsed_ms = 0.0

    def plan(self, view: PolicyView) -> IntArray:
        if view.requests == 0:
            return np.zeros(0, dtype=np.int64)
        expected = cumulative_value(view.survival(self.lag), start=view.requests)
        step_ms = view.step_ms()[: expected.size]
        rate = self.rate
        if rate is None:
            rate = self.tokens / self.elapsed_ms if self.tokens else float((expected / step_ms).max())
        drafts = int((expected - rate * step_ms).argmax())
        if self.rate is None:
            weight = self.weight if self.tokens else 1.0
            self.tokens += weight * (float(expected[drafts]) - self.tokens)
            self.elapsed_ms += weight * (float(step_ms[drafts]) - self.elapsed_ms)
        return top_k(view.survival(), drafts)

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        rate = math.nan if self.rate is None else self.rate
        return Kernel(
            _kernels.marginal, params=(rate, self.weight), ages=ages_to(self.lag), state=(self.tokens, self.elapsed_ms)
        )
