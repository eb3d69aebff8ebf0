"""vLLM Ascend: a length from the mean number of promising drafts, every 16 steps, forced odd."""

from __future__ import annotations

import math

import numpy as np

from dsim.errors import InputError
from dsim.kernel import Kernel
from dsim.planning import top_k
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits
from policies._parameters import need_int, need_number


class VllmAscend(BasePolicy):
    """K drafts a request, the same K for `interval` steps; the batch's R * K go to the best ones.

    Every `interval` steps, the first time in step number `interval`, K becomes the mean over the requests of
    how many of their drafts have a survival of at least `threshold`, rounded up; an even K below gamma is raised
    by one, and the result is at least `floor`. Prices are not looked at. In every step each request gets `floor`
    drafts, and what is left of R * K goes to the highest current survivals beyond those.

    It is **not lossless** with a floor. In the steps that renew K the very drafts it is about decide it. Without a
    floor that does no harm: R * K is at least the number of promising drafts, so these are verified whatever K is,
    and the others have no say in it. But a request without a promising draft counts 0 and takes its floor from the
    rest. Then a promising x_2 may be left out, unless c_3, which was computed from it, is high enough to raise K.
    In the steps between K is old and the choice clean.

    Parameters
    ----------
    threshold
        Survival from which on a draft counts, in [0, 1] (the engine's ``budget_threshold``).
    interval
        Steps from one K to the next, >= 1 (``budget_update_interval``).
    initial
        K of the steps before the first one, >= 0; at most gamma is used (``initial_verify_budget_per_req``).
    floor
        Drafts that every request gets, >= 0 (``min_verify_tokens``).

    Attributes
    ----------
    length, steps
        K, and the steps since it was renewed.

    Raises
    ------
    InputError
        A parameter outside its range.

    Examples
    --------
    Survivals 0.9, 0.81, 0.73 and 0.5, 0.25, 0.13: three and one reach 0.3, the mean is 2, made 3. All six are
    verified, where K = 2 would have left out the two of the second request beyond its first.

    >>> from dsim.policy import make_view
    >>> view = make_view([[0.9, 0.9, 0.9], [0.5, 0.5, 0.5]], verify_ms=np.ones(9))
    >>> policy = VllmAscend(interval=2, initial=1)
    >>> policy.plan(view).tolist(), policy.plan(view).tolist(), policy.length
    ([1, 1], [3, 3], 3)

    References
    ----------
    vLLM Ascend, https://github.com/vllm-project/vllm-ascend (``DynamicSpecScheduler``), pull requests
    https://github.com/vllm-project/vllm-ascend/pull/13216 and
    https://github.com/vllm-project/vllm-ascend/pull/13819. The odd K is there because adjacent lengths cost
    nearly the same on that hardware and an odd one makes the tokens of a request even.

    Differences from the engine: it raises every confidence to at least 1e-6, so that R * K is spent to the last
    draft; here a draft of survival 0 is no candidate. Ties go by request, then position; there as the sort
    leaves them. Caps (a request near its end) are ours: what a capped request leaves goes to the others.
    Differences from the paper (DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147): no prices, no search.
    """

    def __init__(self, threshold: float = 0.3, interval: int = 16, initial: int = 5, floor: int = 1) -> None:
        need_number("threshold", threshold, most=1)
        for name, value, least in (("interval", interval, 1), ("initial", initial, 0), ("floor", floor, 0)):
            need_int(name, value, least)
        if interval == 1 and initial != 5:
            raise InputError("is not used: every step renews K", field="initial", value=initial)
        self.threshold = threshold
        self.interval = interval
        self.initial = initial
        self.floor = floor
        self.traits = Traits(cost_driven=False, floor=floor, lossless=floor == 0, needs_gamma=floor)
        self.length = max(initial, floor)
        self.steps = 0

    def plan(self, view: PolicyView) -> IntArray:
        requests, gamma = view.requests, view.gamma
        survival = view.survival()
        self.steps += 1
        if self.steps >= self.interval and survival.size:
            self.steps = 0
            promising = np.count_nonzero(survival >= np.float32(self.threshold))
            length = math.ceil(promising / requests)
            self.length = max(self.floor, min(length + (length % 2 == 0), gamma))
        lengths = np.minimum(view.caps, self.floor)
        # A K above gamma asks for more than there is: everything.
        lengths += top_k(survival[:, self.floor :], int(requests * self.length - lengths.sum()))
        return lengths

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        params = (self.threshold, self.interval, self.floor)
        return Kernel(_kernels.ascend, params=params, state=(self.steps, self.length))
