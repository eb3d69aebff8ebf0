"""Draft vocabularies: the tokens a drafter may propose.

A small vocabulary makes the LM head, most of a small drafter's cost, cheaper. Tokens outside are never drafted, so
the acceptance probability is bounded by the target's mass inside; the prompt's own tokens are always inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsim.errors import InputError


def choose_vocabulary(counts: npt.NDArray[np.int64], size: int, always: frozenset[int]) -> npt.NDArray[np.int64]:
    """The `size` most frequent tokens, ascending; `always` (the end tokens) are among them.

    Parameters
    ----------
    counts
        int64[V]: occurrences in text that is used for nothing else.
    size
        Tokens in the vocabulary; V or more takes all.
    """
    if size < max(1, len(always)):
        raise InputError(field="vocabulary", value=size, expected=f"at least {max(1, len(always))} tokens")
    if size >= counts.size:
        return np.arange(counts.size)
    ranked = counts.astype(np.float64)
    ranked[list(always)] = np.inf
    # Ties keep the lower token: byte-level vocabularies put the commoner ones first.
    return np.sort(np.argsort(-ranked, kind="stable")[:size])


def covered(counts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> float:
    """Share of the counted tokens that lie in the vocabulary."""
    return float(counts[tokens].sum() / max(1, counts.sum()))


@dataclass(frozen=True)
class Vocabulary:
    """What one sequence may be drafted from: the static vocabulary, then further tokens of its prompt.

    Attributes
    ----------
    tokens
        int64[E]: target tokens; the first `static` are the drafter's own.
    static
        Size of the drafter's own vocabulary.
    local
        int64[V]: index into `tokens`, E where a token is outside.
    """

    tokens: Tensor
    static: int
    local: Tensor

    @property
    def size(self) -> int:
        """Tokens in it."""
        return int(self.tokens.numel())

    @property
    def extra(self) -> Tensor:
        """int64[E - static]: tokens of the prompt that the drafter's own vocabulary lacks."""
        return self.tokens[self.static :]


def vocabulary_of(tokens: Tensor, vocab_size: int, prompt: Tensor | None = None) -> Vocabulary:
    """The vocabulary of a sequence with this prompt (None: the static one).

    Parameters
    ----------
    tokens
        int64[Vd], distinct.
    vocab_size
        Tokens of the target.
    prompt
        int64[P].
    """
    static = int(tokens.numel())
    local = torch.full((vocab_size,), -1, dtype=torch.int64, device=tokens.device)
    local[tokens] = torch.arange(static, device=tokens.device)
    if prompt is not None:
        extra = torch.unique(prompt[local[prompt] < 0])
        local[extra] = static + torch.arange(extra.numel(), device=tokens.device)
        tokens = torch.cat([tokens, extra])
    local[local < 0] = tokens.numel()
    return Vocabulary(tokens, static, local)


def batch_vocabulary(tokens: Tensor, vocab_size: int, extras: Sequence[Tensor]) -> tuple[Vocabulary, Tensor | None]:
    """The vocabulary of several sequences that draft together, and which of it each may draft.

    Parameters
    ----------
    tokens, vocab_size
        As in `vocabulary_of`.
    extras
        By sequence: int64[n], the tokens of its prompt that lie outside `tokens`.

    Returns
    -------
    vocabulary, allowed
        All that some sequence may draft; float32[R, E] of 1 and 0, or None where each may draft all of it.
    """
    vocabulary = vocabulary_of(tokens, vocab_size, torch.cat(list(extras)))
    if not vocabulary.extra.numel():
        return vocabulary, None
    allowed = torch.ones(len(extras), vocabulary.size, device=tokens.device)
    allowed[:, vocabulary.static :] = 0.0
    for row, own in zip(allowed, extras, strict=True):
        row[vocabulary.local[own]] = 1.0
    return vocabulary, allowed
