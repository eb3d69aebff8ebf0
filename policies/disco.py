"""A stop in the manner of DISCO: draft on until a token is not likely enough, and verify that one too."""

from __future__ import annotations

import numpy as np

from dsim.kernel import Kernel
from dsim.planning import leading_run
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits
from policies._parameters import need_number


class Disco(BasePolicy):
    """Verify a request's drafts up to and including the first one whose confidence is below `t`.

    A dynamic speculation length stops the *drafter*: it looks at a token that is drawn already and decides
    whether to draw another one. So the token that fails the test is in the block and is verified, and no block
    is empty. That is one draft more than ``threshold:on=confidence`` and makes another difference: no token
    decides about itself. The claim to be lossless therefore holds for a signal that depends on the token too,
    such as its probability in the drafter; ``threshold`` needs one that does not.

    An example of why (one position; target (1/2, 1/2), drafter (9/10, 1/10), t = 1/2): where the unlikely
    second token is dropped instead of verified, the target draws afresh, and the first token comes out with
    probability 0.5 + 0.1 * 0.5 = 0.55.

    Parameters
    ----------
    t
        Threshold in [0, 1]; 0 verifies whole blocks.

    Raises
    ------
    InputError
        `t` is not a number in [0, 1].

    Examples
    --------
    >>> from dsim.policy import make_view
    >>> view = make_view([[0.75, 0.25, 0.75], [0.25, 0.75, 0.75]], verify_ms=np.ones(9))
    >>> Disco(t=0.5).plan(view).tolist()
    [2, 1]

    References
    ----------
    Mamou et al., Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language Models
    (DISCO), arXiv 2405.04304, https://arxiv.org/abs/2405.04304. The threshold on the token's probability is
    what Hugging Face Transformers made of it, ``assistant_confidence_threshold`` = 0.4,
    https://huggingface.co/blog/dynamic_speculation_lookahead. The confidence is DSpark's (arXiv 2607.05147,
    https://arxiv.org/abs/2607.05147, eq. 7).

    Differences from the paper: DISCO compares a classifier of the drafter's distribution and the position with
    its threshold, Transformers the drafter's softmax probability of the drawn token; the drafter's confidence
    c_k stands in for both. Transformers moves the threshold after each block, by the ROC curve of the tokens so
    far; here it stays. An autoregressive drafter that stops saves passes; here the arm's whole block is drafted
    and paid for, so only the target's work is saved. The comparison is in float32, the precision of the
    confidences.
    """

    traits = Traits(cost_driven=False, floor=1)

    def __init__(self, t: float = 0.4) -> None:
        need_number("t", t, most=1)
        self.t = t

    def plan(self, view: PolicyView) -> IntArray:
        # The cap also takes back the one that is too many where the whole block is likely enough.
        return np.minimum(leading_run(view.confidence >= np.float32(self.t)) + 1, view.caps)

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        return Kernel(_kernels.disco, params=(self.t,))
