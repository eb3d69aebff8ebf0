"""vLLM's adaptive verifier length (D-Cut style) for DFlash and PARD: few profiled sizes, everything one step old."""

from __future__ import annotations

import numpy as np

from dsim.kernel import Kernel
from dsim.planning import Survival, cumulative_value, top_k
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits
from policies._parameters import need_int


class VllmVerifyAdaptive(BasePolicy):
    """The best of a few profiled step sizes Q by the confidences of `lag` steps ago, which also say whose drafts.

    Profiled are batches of `batch_step`, 2 `batch_step`, ... requests with 1, 2, 2 + `query_step`, ... and 1 + gamma
    tokens each. A batch of R requests is looked up at the next larger profiled one, bs: the candidates are Q = bs,
    2 bs, ... tokens, each priced by the target pass alone. Q leaves room for S = Q - R drafts, and the Q with the
    largest (R + the S best survivals) / price is taken, the smallest where values are equal. All of this is
    computed when a block is drafted and used for a later one, `lag` steps on: lengths, not only their sum, are
    old. A request that did not exist then is verified in full.

    Between two profiled batches the smallest Q holds more than R tokens, so that up to bs - R drafts are verified
    whatever they cost.

    Parameters
    ----------
    batch_step, query_step
        Steps of the two profiled axes, >= 1.
    max_batch
        Largest profiled batch; None: as large as any. A larger batch is looked up at this one.
    lag
        Age of the confidences, in engine steps, >= 0. With 0 the choice is retrospective, not lossless.

    Raises
    ------
    InputError
        A parameter that is no integer in its range.

    Examples
    --------
    Two requests, three drafts each: Q is 2, 4 or 8 tokens, so 0, 2 or 6 drafts. Two pay: tokens / ms are 2 / 10,
    3.4 / 12 and 4.35 / 20. Which two is decided by the old confidences as well.

    >>> from dsim.policy import make_view
    >>> old, now = [[0.8, 0.75, 0.5], [0.5, 0.5, 0.2]], [[0.1, 0.1, 0.1], [0.9, 0.9, 0.9]]
    >>> prices = [0.0, 9.0, 10.0, 11.0, 12.0, 14.0, 16.0, 18.0, 20.0]
    >>> VllmVerifyAdaptive().plan(make_view(now, prices, history=(old,))).tolist()
    [2, 0]

    References
    ----------
    vLLM, https://github.com/vllm-project/vllm/pull/44885 (``verify_adaptive``, closed), files
    ``vllm/v1/spec_decode/verify_adaptive_controller.py`` and ``verify_adaptive_config.py``.

    Differences from the paper (DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, section 5.2): few sizes
    instead of all, lengths as old as their sum, and the drafter's probability of each token for a confidence
    (here: whatever the drafts offer). Differences from the engine: it decided when R, the requests and the
    prices were those of `lag` steps ago, here with those requests of then that are still there, and today's prices; a
    draft of survival 0 is no candidate; a Q beyond the prices that the step offers costs what the last one does.
    A later version of it profiles the captured sizes up to 32 requests (``max_batch=32``).
    """

    def __init__(self, batch_step: int = 2, query_step: int = 2, max_batch: int | None = None, lag: int = 1) -> None:
        for name, value, least in (
            ("batch_step", batch_step, 1),
            ("query_step", query_step, 1),
            ("max_batch", 1 if max_batch is None else max_batch, 1),
            ("lag", lag, 0),
        ):
            need_int(name, value, least)
        self.batch_step = batch_step
        self.query_step = query_step
        self.max_batch = max_batch
        self.lag = lag
        self.traits = Traits(confidence_age=lag, lossless=lag > 0)

    def plan(self, view: PolicyView) -> IntArray:
        lengths = view.caps.copy()
        known = view.age_steps >= self.lag
        survival = view.survival(self.lag)
        if known.all():
            return self._lengths(survival, view) if survival.size else lengths
        if known.any():
            lengths[known] = self._lengths(survival[known], view)
        return lengths

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        params = (self.lag, self.batch_step, self.query_step, self.max_batch or 0)
        return Kernel(_kernels.verify_adaptive, params=params, ages=(self.lag,))

    def _lengths(self, survival: Survival, view: PolicyView) -> IntArray:
        """int64[n]: lengths of the n requests that were there, by their survivals of then."""
        requests, gamma = survival.shape
        batch = -(-requests // self.batch_step) * self.batch_step
        if self.max_batch is not None:
            batch = min(batch, self.max_batch)
        sizes = batch * np.unique([1, *range(2, gamma + 2, self.query_step), gamma + 1])
        sizes = sizes[sizes >= requests]
        if not sizes.size:  # a batch beyond every profiled size
            return np.zeros(requests, dtype=np.int64)
        tau = cumulative_value(survival, start=requests)
        drafts = np.minimum(sizes - requests, tau.size - 1)
        rate = tau[drafts] / view.verify_ms[np.minimum(sizes, view.verify_ms.size - 1)]
        return top_k(survival, int(drafts[rate.argmax()]))
