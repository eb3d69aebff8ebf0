"""Policies that are lossy on purpose, each in a way in which a real one could be: what an audit must catch.

They show that the random cases have teeth. None of them is meant for use.
"""

from __future__ import annotations

import numpy as np

from dsim.planning import best_count, count_rows, cumulative_value, top_k
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits


class WithoutBreak(BasePolicy):
    """Algorithm 1 that goes on to the end and keeps the best it has seen (Appendix A, "without early-stopping").

    References
    ----------
    DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, Appendix A.
    """

    traits = Traits(lossless=False)

    def plan(self, view: PolicyView) -> IntArray:
        survival = view.survival()
        tau = cumulative_value(survival, start=view.requests)
        theta = tau / view.verify_ms[view.base_tokens : view.base_tokens + tau.size]
        return top_k(survival, int(theta.argmax()))


class Peek(BasePolicy):
    """A block is verified if its *last* draft looks good: every token before it has a say in its own admission."""

    traits = Traits(cost_driven=False, lossless=False)

    def plan(self, view: PolicyView) -> IntArray:
        return np.minimum(view.caps, view.gamma * _sure_of_the_last(view))


class PeekOthers(BasePolicy):
    """A block is verified if the last draft of some *other* request looks good.

    What a request outputs by itself has the target's law, as nobody looks at the drafts of its own. But two
    requests decide about each other, and their outputs become dependent: only the joint law shows it.
    """

    traits = Traits(cost_driven=False, lossless=False)

    def plan(self, view: PolicyView) -> IntArray:
        good = _sure_of_the_last(view)
        others: IntArray = np.minimum(good.sum() - good, 1)
        return np.minimum(view.caps, view.gamma * others)


def _sure_of_the_last(view: PolicyView) -> IntArray:
    """int64[R]: 1 where the confidence of a block's last draft is at least 1/2."""
    return count_rows(view.confidence[:, -1:] >= 0.5)


class WholeBlocks(BasePolicy):
    """The capacity is one step old and clean, but spent on whole blocks, by the value of the block."""

    traits = Traits(confidence_age=1, lossless=False)

    def plan(self, view: PolicyView) -> IntArray:
        if view.requests == 0:
            return np.zeros(0, dtype=np.int64)
        capacity = best_count(view.survival(1), view.requests, view.verify_ms[view.base_tokens :])
        survival = view.survival()
        lengths = count_rows(survival > 0)
        order = np.argsort(-survival.sum(axis=1), kind="stable")
        left = np.maximum(capacity - (np.cumsum(lengths[order]) - lengths[order]), 0)
        granted = np.zeros_like(lengths)
        granted[order] = np.minimum(lengths[order], left)
        return granted


class MeanGuard(BasePolicy):
    """The capacity is one step old, but given up where the mean of all current survivals is low."""

    traits = Traits(confidence_age=1, lossless=False)

    def plan(self, view: PolicyView) -> IntArray:
        if view.requests == 0:
            return np.zeros(0, dtype=np.int64)
        capacity = best_count(view.survival(1), view.requests, view.verify_ms[view.base_tokens :])
        survival = view.survival()
        return top_k(survival, capacity if survival.size and survival.mean() >= 0.25 else 0)


#: Name and class of each.
CONTROLS: dict[str, type[BasePolicy]] = {
    "without-break": WithoutBreak,
    "peek": Peek,
    "peek-others": PeekOthers,
    "whole-blocks": WholeBlocks,
    "mean-guard": MeanGuard,
}
