"""Drawing tokens: inverse transform sampling, speculative acceptance, and drafts coupled to a known text."""

from __future__ import annotations

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
