"""Drawing tokens: inverse transform sampling, speculative acceptance, and drafts coupled to a known text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def pick(probabilities: Tensor, u: Tensor) -> Tensor:
    """Inverse transform sampling: the first token whose cumulative probability exceeds u times the total.

    Parameters
    ----------
    probabilities
        [..., V], non-negative; they need not sum to one (residuals do not).
    u
        float64[...] in [0, 1).

    Returns
    -------
    Tensor
        int64[...]. Tokens of probability zero are never drawn.
    """
    cumulative = probabilities.double().cumsum(dim=-1)
    level = u.double().unsqueeze(-1) * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, level, right=True).squeeze(-1)
    # u just below 1 can round past the last token that has any mass.
    last = (probabilities > 0).long() * torch.arange(probabilities.shape[-1], device=probabilities.device)
    return torch.minimum(index, last.amax(dim=-1))


def rejected(p_draft: Tensor, p_target: Tensor, u: Tensor) -> Tensor:
    """Whether a drafted token is rejected: accepted with probability min(1, p_t / p_d) (arXiv 2211.17192).

    Parameters
    ----------
    p_draft, p_target
        [...]: probabilities of the drafted token.
    u
        [...] in [0, 1).
    """
    return u.double() * p_draft.double() >= p_target.double()


def residual(first: Tensor, second: Tensor) -> Tensor:
    """max(0, first - second) over the last axis, unnormalized; `first` itself where nothing is left of it."""
    left = (first - second).clamp(min=0)
    empty = left.sum(dim=-1, keepdim=True) <= 0
    return torch.where(empty, first, left)


class Drawn:
    """Draws drafted tokens with given uniforms, and keeps the laws that they were drawn from.

    Parameters
    ----------
    u
        float64[A, gamma] in [0, 1); drafts beyond gamma are not drawn (token 0 stands there).
    allowed
        float32[A, E] of 1 and 0: what each sequence may draft; None: everything.
    """

    def __init__(self, u: Tensor, allowed: Tensor | None) -> None:
        self._u, self._allowed = u, allowed
        self._laws: list[Tensor] = []

    def __call__(self, k: int, probabilities: Tensor) -> Tensor:
        """See `dsim.drafter.drafter.Choose`."""
        if k >= self._u.shape[1]:
            return torch.zeros(len(self._u), dtype=torch.int64, device=self._u.device)
        if self._allowed is not None:
            probabilities = probabilities * self._allowed
        # A softmax over the allowed tokens alone; also away with what rounding left.
        self._laws.append(probabilities / probabilities.sum(dim=-1, keepdim=True))
        return pick(self._laws[-1], self._u[:, k])

    @property
    def laws(self) -> Tensor:
        """[A, gamma, E]: laws of the drafts drawn so far."""
        return torch.stack(self._laws, dim=1)


@dataclass(frozen=True)
class Drafts:
    """What D sequences drafted.

    Attributes
    ----------
    tokens, local
        int64[D, gamma]: drafted tokens, and the same as indices into the draft vocabulary.
    laws
        float32[D, gamma, E]: what they were drawn from.
    vocabulary
        int64[E]: the draft vocabulary.
    """

    tokens: Tensor
    local: Tensor
    laws: Tensor
    vocabulary: Tensor


def speculate(
    logits: Tensor, lengths: Sequence[int], drafts: Drafts | None, u_accept: Tensor, u_next: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative acceptance of the drafts that were verified, and of no others (arXiv 2211.17192, algorithm 1).

    Parameters
    ----------
    logits
        float32[T, V], already divided by the temperature: the target's, after the anchor and after each verified
        draft of the first sequence, then of the second, ...; T = sum(1 + lengths).
    lengths
        By sequence (R of them): how many of its drafts were verified. Those of the first D sequences are `drafts`;
        the others verify none.
    u_accept, u_next
        float64[D, gamma] and float64[R] in [0, 1): for the drafts, and for the token after them.

    Returns
    -------
    accepted, following
        int64[R]: verified drafts before the first rejection, and the token after them: from the residual where a
        draft was rejected, from the target's law otherwise.
    """
    device = logits.device
    count = torch.tensor(lengths, dtype=torch.int64, device=device)
    first = (1 + count).cumsum(dim=0) - 1 - count
    accepted = torch.zeros_like(count)
    most = max(lengths, default=0)
    if drafts is not None and most:
        drafting, k = len(drafts.tokens), torch.arange(most, device=device)
        inside = k < count[:drafting, None]
        row = torch.where(inside, first[:drafting, None] + k, 0)
        log_z = torch.logsumexp(logits, dim=-1)
        p_target = torch.exp(logits[row, drafts.tokens[:, :most]] - log_z[row])
        p_draft = drafts.laws[:, :most].gather(2, drafts.local[:, :most, None]).squeeze(2)
        follows = inside & ~rejected(p_draft, p_target, u_accept[:, :most])
        accepted[:drafting] = follows.long().cumprod(dim=1).sum(dim=1)
    law = torch.softmax(logits[first + accepted], dim=-1)
    cut = torch.nonzero(accepted < count).squeeze(1)
    if drafts is not None and len(cut):
        wide = torch.zeros_like(law[: len(cut)])
        wide[:, drafts.vocabulary] = drafts.laws[cut, accepted[cut]]
        law[cut] = residual(law[cut], wide)
    return accepted, pick(law, u_next)


def couple(
    p_draft: Tensor, p_target: Tensor, text: Tensor, p_text: Tensor, alive: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw drafts jointly with a text whose token was drawn from the target: the maximal coupling of both laws.

    Given the text's token v, the draft is v with probability min(1, p_d(v) / p_t(v)), else it comes from
    norm(max(0, p_d - p_t)). So the draft has the law p_d, and is v exactly when speculative decoding accepts it.

    Parameters
    ----------
    p_draft, p_target
        [A, E]: probabilities over the draft vocabulary.
    text
        int64[A]: the text's tokens as indices, E where outside the vocabulary.
    p_text
        [A]: target probabilities of the text's tokens.
    alive
        bool[A]: blocks that follow the text so far; the others draw from p_draft.
    u
        float64[A, 2] in [0, 1).

    Returns
    -------
    chosen, alive
        int64[A] drafts as indices, and which blocks follow the text still.
    """
    size = p_draft.shape[-1]
    inside = text < size
    p_own = p_draft.gather(1, text.clamp(max=size - 1)[:, None]).squeeze(1) * inside
    follows = alive & ~rejected(p_text, p_own, u[:, 0])
    source = torch.where(alive[:, None], residual(p_draft, p_target), p_draft)
    return torch.where(follows, text, pick(source, u[:, 1])), follows


class CoupledDraws:
    """Draws the blocks at consecutive anchors of one text jointly with it: a `Choose` that keeps what became of them.

    Parameters
    ----------
    p_target
        [P, E]: the target's law of each token after the first anchor, over the draft vocabulary. Draft k (from 0) of
        anchor a stands at row a + k.
    text
        int64[P]: the text's tokens there, as indices, E where outside the vocabulary.
    p_text
        [P]: target probabilities of these tokens (of those outside it is not asked).
    u
        float64[A, gamma, 2] in [0, 1).

    Attributes
    ----------
    accepted
        int64[A]: drafts that follow the text, of those drawn so far.
    alpha
        [A, gamma]: chance that a draft is accepted, right where the block follows the text up to it (k <= accepted).
    p_draft
        One [A, E] a position: what the drafts were drawn from.
    """

    def __init__(self, p_target: Tensor, text: Tensor, p_text: Tensor, u: Tensor) -> None:
        self._p_target, self._text, self._p_text, self._u = p_target, text, p_text, u
        anchors, gamma, _ = u.shape
        self._alive = torch.ones(anchors, dtype=torch.bool, device=u.device)
        self.accepted = torch.zeros(anchors, dtype=torch.int64, device=u.device)
        self.alpha = torch.zeros(anchors, gamma, device=u.device)
        self.p_draft: list[Tensor] = []

    def __call__(self, k: int, p_draft: Tensor) -> Tensor:
        """See `dsim.drafter.drafter.Choose`."""
        rows = torch.arange(k, k + len(p_draft), device=p_draft.device)
        p_target = self._p_target[rows]
        self.alpha[:, k] = torch.minimum(p_draft, p_target).sum(dim=1)
        self.p_draft.append(p_draft)
        chosen, self._alive = couple(
            p_draft, p_target, self._text[rows], self._p_text[rows], self._alive, self._u[:, k]
        )
        self.accepted += self._alive
        return chosen
