"""The goodput-optimal uniform draft length of SmartSpec and TurboSpec: learns acceptance from outcomes."""

from __future__ import annotations

import numpy as np

from dsim.errors import InputError
from dsim.kernel import Kernel
from dsim.planning import first_non_gain
from dsim.policy import BasePolicy, FloatArray, IntArray, PolicyView, Traits
from policies._parameters import need_int, need_number

SEARCHES = ("global", "early-stop")


class Goodput(BasePolicy):
    """The k, the same for all requests, with the most expected tokens per millisecond of the whole step.

    With an acceptance rate alpha, the same for every position, a request of k drafts is expected to get
    1 + alpha + ... + alpha^k tokens. Time is the whole step's (`PolicyView.step_ms`: draft, target and host) at
    the number of drafts that k means. k is decided in the first step and then every `interval` steps.

    **The estimator.** No confidence is read. alpha is learned from outcomes (`observe`): each step's share of
    accepted drafts among those that were *tried* moves it by `weight`. Tried are the accepted ones and the first
    rejected one of each request; whether later ones would have been accepted is not known. A step in which
    nothing was verified says nothing, so while k is 0 alpha stays, and only other prices (another batch size)
    bring k back up.

    Decisions depend on prices and on earlier steps alone, so the policy is lossless although the search is global.

    Parameters
    ----------
    prior
        alpha before the first outcome, in [0, 1].
    weight
        Weight of a step's share in the running alpha, in (0, 1].
    interval
        Steps from one decision to the next, >= 1.
    margin
        By how much speculation must beat no speculation, relative, >= 0: the goodput of k = 0 is raised by it.
    search
        ``global``: the best k of all, the smallest where maxima are equal. ``early-stop``: up from 0 for as long
        as the goodput rises, as the published code does.

    Attributes
    ----------
    alpha
        The running acceptance rate.
    length, steps
        k, and the steps until it is decided anew.

    Raises
    ------
    InputError
        A parameter outside its range.

    Examples
    --------
    Two requests, 10 ms and 1 ms a draft. At alpha = 1/2 one draft each is expected to give 3 tokens in 12 ms, two
    3.5 in 14 ms; no more than that, so one. After a step in which both were accepted alpha is 3/4:

    >>> from dsim.policy import make_view
    >>> policy = Goodput(prior=0.5, weight=0.5, interval=1, margin=0.0)
    >>> view = make_view(np.ones((2, 2)), [0, 0, 10, 11, 12, 13, 14])
    >>> policy.plan(view).tolist()
    [1, 1]
    >>> policy.observe(np.array([1, 1]), np.array([1, 1]))
    >>> policy.alpha, policy.plan(view).tolist()
    (0.75, [2, 2])

    References
    ----------
    Liu et al., Optimizing Speculative Decoding for Serving Large Language Models Using Goodput (SmartSpec; in
    later versions TurboSpec: Closed-loop Speculation Control System for Optimizing LLM Serving Goodput),
    arXiv 2406.14066, https://arxiv.org/abs/2406.14066. The defaults (0.9, 0.15, every 20 steps, 1.1 times the
    goodput of k = 0) and the early stop are those of an author's code,
    https://github.com/cakeng/vllm_dsd (``vllm/spec_decode/dsd.py``).

    Differences from it: there k is how many tokens are drafted, so drafting costs nothing at k = 0; here the arm's
    block has been drafted and is in the price of every k. There the batch's time comes from a profile of its own,
    by context length and batch size; here from the step's price table, which counts prefill chunks. Requests
    whose cap is below k count with what they can take. Differences from the paper of DSpark (arXiv 2607.05147,
    https://arxiv.org/abs/2607.05147): uniform lengths, outcomes in place of confidences, the step's time in place
    of the target pass's.
    """

    traits = Traits()

    def __init__(
        self,
        prior: float = 0.9,
        weight: float = 0.15,
        interval: int = 20,
        margin: float = 0.1,
        search: str = "global",
    ) -> None:
        need_number("prior", prior, most=1)
        need_number("weight", weight, most=1, zero=False)
        need_int("interval", interval, 1)
        need_number("margin", margin)
        if search not in SEARCHES:
            raise InputError(field="search", value=search, expected=f"one of {', '.join(SEARCHES)}")
        self.prior = prior
        self.weight = weight
        self.interval = interval
        self.margin = margin
        self.search = search
        self.alpha = float(prior)
        self.length = 0
        self.steps = 0

    def plan(self, view: PolicyView) -> IntArray:
        if view.requests == 0:
            return np.zeros(0, dtype=np.int64)
        if self.steps == 0:
            goodput = self._goodput(view)
            self.length = first_non_gain(goodput) if self.search == "early-stop" else int(goodput.argmax())
            self.steps = self.interval
        self.steps -= 1
        return np.minimum(view.caps, self.length)

    def observe(self, verified: IntArray, accepted: IntArray) -> None:
        """Move alpha towards the share of accepted drafts among those that were tried.

        Parameters
        ----------
        verified, accepted
            int64[R]: drafts verified of each request, and the accepted ones among them.
        """
        tried = int(np.minimum(accepted + 1, verified).sum())
        if tried:
            self.alpha += self.weight * (int(accepted.sum()) / tried - self.alpha)

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        return Kernel(
            _kernels.goodput,
            params=(self.weight, self.interval, self.margin, self.search == "early-stop"),
            state=(self.alpha, self.length, self.steps),
            observe=_kernels.goodput_observe,
        )

    def _goodput(self, view: PolicyView) -> FloatArray:
        """float64[gamma + 1]: expected tokens per millisecond of the step, by k."""
        reach = np.full(view.gamma, view.requests)
        if view.caps_bind:
            reach = np.count_nonzero(view.caps[:, None] > np.arange(view.gamma), axis=0)
        drafts, tokens = np.zeros(view.gamma + 1, dtype=np.int64), np.full(view.gamma + 1, float(view.requests))
        drafts[1:] = np.cumsum(reach)
        # Powers by multiplication, which is the same to the last bit wherever it is done.
        tokens[1:] += np.cumsum(reach * np.multiply.accumulate(np.full(view.gamma, self.alpha)))
        goodput: FloatArray = tokens / view.step_ms()[drafts]
        goodput[0] *= 1 + self.margin
        return goodput
