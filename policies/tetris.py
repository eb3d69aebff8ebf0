"""TETRIS: the most promising drafts of the batch under a capacity that is fixed in advance."""

from __future__ import annotations

from dsim.kernel import Kernel
from dsim.planning import top_k
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits
from policies._parameters import need_bool, need_int


class Tetris(BasePolicy):
    """Verify the `capacity` drafts of the highest survival in the batch, whatever the price.

    The drafts are ranked as in `dspark`; only their number comes from elsewhere: it is a constant of the
    server, so it depends on no draft, and with it fixed a draft's rank depends on nothing drafted after it.

    Parameters
    ----------
    capacity
        Drafts to verify, >= 0: of the whole batch or, with `per_request`, on average of each request in decode.
    per_request
        Count the capacity a request, so that it grows with the batch.

    Raises
    ------
    InputError
        `capacity` is not an integer >= 0, or `per_request` is not a bool.

    Examples
    --------
    Two drafts for two requests: both go to the one that is sure of its own.

    >>> from dsim.policy import make_view
    >>> view = make_view([[0.9, 0.9], [0.5, 0.5]], verify_ms=[1.0] * 7)
    >>> Tetris(capacity=2).plan(view).tolist(), Tetris(capacity=1, per_request=True).plan(view).tolist()
    ([2, 0], [2, 0])

    References
    ----------
    Wu et al., TETRIS: Optimal Draft Token Selection for Batch Speculative Decoding, arXiv 2502.15197,
    https://arxiv.org/abs/2502.15197, and its code, https://github.com/ZhaoxuanWu/Tetris
    (``vllm/spec_decode/tetris.py``): the top `capacity` of all cumulative log-probabilities of a batch. In
    ports of it the capacity is a constant or the base length times the batch: `per_request`. The survival is
    DSpark's (arXiv 2607.05147, https://arxiv.org/abs/2607.05147, section 3.2).

    Differences from the paper: a draft's score is the product of the confidences, which stand in for the
    drafter's probability of each drafted token. The difference matters: that probability depends on the drafted
    token itself, so with a drafter that samples the token decides its own admission and the output distribution
    moves, while c_k is known before x_k is drawn. The trait ``lossless`` is about the rule on confidences. The
    drafts that TETRIS makes on top of the base length are the arm's block size here. A draft of survival 0 is no
    candidate; ties go by request, then position. TETRIS is switched on from some batch size on and leaves the
    base length to smaller ones; here it is always on.
    """

    traits = Traits(cost_driven=False)

    def __init__(self, capacity: int = 64, per_request: bool = False) -> None:
        need_int("capacity", capacity, 0)
        need_bool("per_request", per_request)
        self.capacity = capacity
        self.per_request = per_request

    def plan(self, view: PolicyView) -> IntArray:
        return top_k(view.survival(), self.capacity * view.requests if self.per_request else self.capacity)

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        return Kernel(_kernels.tetris, params=(self.capacity, self.per_request))
