"""What all drafters share: their description, their contexts and blocks, and how logits become a drafted block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsim.drafter.llama import LlamaConfig
from dsim.drafter.vocabulary import Vocabulary
from dsim.errors import InputError

KINDS = ("dspark", "dflash", "eagle3", "mtp")
HEADS = ("none", "markov", "gated", "rnn")
#: Stands for the final normed hidden state in `DrafterConfig.taps`.
FINAL = -1


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's architecture and what it was made for.

    Parameters
    ----------
    kind
        ``dspark`` or ``dflash`` (parallel backbone, with or without sequential head), ``eagle3`` or ``mtp``
        (autoregressive).
    gamma
        Drafted tokens a block.
    layers
        Of the drafter; autoregressive ones have 1.
    taps
        Target layers whose outputs the drafter sees (0 = embedding, -1 = final normed hidden state).
    head, rank
        Sequential head and its rank r; ``none`` and 0 without.
    vocab_size
        Draft vocabulary.
    temperature
        The drafter's distribution is softmax(logits / temperature); the one it was trained at.
    shape
        Sizes taken over from the target.
    target, fingerprint
        `Target.name` and `Target.fingerprint`.
    """

    kind: str
    gamma: int
    layers: int
    taps: tuple[int, ...]
    head: str
    rank: int
    vocab_size: int
    temperature: float
    shape: LlamaConfig
    target: str
    fingerprint: str

    def __post_init__(self) -> None:
        """Raise InputError where the description contradicts itself."""

        def need(condition: bool, field: str, expected: str) -> None:
            if not condition:
                raise InputError(field=field, value=getattr(self, field), expected=expected)

        need(self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}")
        need(self.head in HEADS, "head", f"one of {', '.join(HEADS)}")
        need(1 <= self.gamma <= 64, "gamma", "1 to 64")
        need(self.layers >= 1, "layers", "at least 1")
        need((self.head != "none") == (self.kind == "dspark"), "head", "a sequential head for dspark, none otherwise")
        need((self.rank > 0) == (self.head != "none"), "rank", "> 0 with a sequential head, 0 without")
        need(self.kind in ("dspark", "dflash") or self.layers == 1, "layers", "1 for autoregressive drafters")
        need(1 <= self.vocab_size <= self.shape.vocab_size, "vocab_size", f"1 to {self.shape.vocab_size}")
        need(0 < self.temperature < float("inf"), "temperature", "a finite number > 0")
        top = self.shape.num_layers
        need(
            bool(self.taps) and all(tap == FINAL or 0 <= tap <= top for tap in self.taps),
            "taps",
            f"layers 0 to {top}, or {FINAL} (final normed hidden state)",
        )
        need(self.kind != "mtp" or self.taps == (FINAL,), "taps", f"({FINAL},) for mtp")


@dataclass
class Context:
    """What a drafter knows of C texts: keys and values of every layer, padded to the longest.

    Attributes
    ----------
    k, v
        One tensor a layer, [C, L, kv_heads, head_dim].
    extra
        [C, L, H] or None: further state by position (autoregressive drafters: the fused features).
    """

    k: list[Tensor]
    v: list[Tensor]
    extra: Tensor | None = None


@dataclass
class Block:
    """A drafted block of A anchors.

    Attributes
    ----------
    tokens
        int64[A, gamma]: target tokens.
    local
        int64[A, gamma]: the same as indices into the vocabulary.
    confidence_logit
        float32[A, gamma].
    """

    tokens: Tensor
    local: Tensor
    confidence_logit: Tensor


#: Draws the next token of every anchor: (k from 0, probabilities [A, E]) -> indices into the vocabulary, int64[A].
Choose = Callable[[int, Tensor], Tensor]


def attend_context(
    q: Tensor, context: tuple[Tensor, Tensor], seen: Tensor, own: tuple[Tensor, Tensor], own_mask: Tensor | None
) -> Tensor:
    """Attention of blocks to the text before them and to themselves.

    Parameters
    ----------
    q
        [A, S, heads, head_dim].
    context
        Keys and values [C, L, kv_heads, head_dim]; C is 1 (all anchors in one text) or A.
    seen
        int64[A]: anchor a sees context positions below seen[a].
    own
        Keys and values [A, S', kv_heads, head_dim] of the block itself.
    own_mask
        bool[S, S'], true where a block position sees another; None: all do.

    Returns
    -------
    Tensor
        [A, S, heads * head_dim].
    """
    anchors, length, heads, width = q.shape
    kv = context[0].shape[2]
    q = q.unflatten(2, (kv, heads // kv)) * width**-0.5
    far = torch.einsum("askgd,clkd->akgscl" if context[0].shape[0] == 1 else "askgd,alkd->akgsl", q, context[0])
    far = far.reshape(anchors, kv, heads // kv, length, -1)
    hidden = torch.arange(far.shape[-1], device=q.device) >= seen[:, None]
    far = far.masked_fill(hidden[:, None, None, None, :], float("-inf"))
    near = torch.einsum("askgd,atkd->akgst", q, own[0])
    if own_mask is not None:
        near = near.masked_fill(~own_mask, float("-inf"))
    weights = torch.cat([far, near], dim=-1).softmax(dim=-1)
    split = far.shape[-1]
    if context[1].shape[0] == 1:
        out = torch.einsum("akgsl,lkd->askgd", weights[..., :split], context[1][0])
    else:
        out = torch.einsum("akgsl,alkd->askgd", weights[..., :split], context[1])
    out = out + torch.einsum("akgst,atkd->askgd", weights[..., split:], own[1])
    return out.reshape(anchors, length, heads * width)


def normed_taps(features: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., m, H] hidden states -> [..., m * H], each layer's divided by its RMS.

    Layers differ in scale by orders of magnitude; eq. 2 of the paper norms only after the projection.
    """
    return functional.rms_norm(features.float(), features.shape[-1:]).to(dtype).flatten(-2)


class VocabularyHead(nn.Module):
    """The target's LM head, frozen, restricted to a vocabulary."""

    def __init__(self, head: Tensor, tokens: Tensor) -> None:
        super().__init__()
        self.tokens: Tensor
        self.register_buffer("tokens", tokens)
        head = head.detach()
        self._full = head
        self._static = head if tokens.numel() == head.shape[0] else head[tokens].contiguous()

    def forward(self, hidden: Tensor, vocabulary: Vocabulary) -> Tensor:
        """[..., H] -> float32[..., E] logits."""
        # A bfloat16 target's logits are computed in its own type, whatever the drafter's is.
        hidden = hidden.to(self._static.dtype)
        logits = functional.linear(hidden, self._static)
        if vocabulary.extra.numel():
            logits = torch.cat([logits, functional.linear(hidden, self._full[vocabulary.extra])], dim=-1)
        return logits.float()


def draft_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature), float32."""
    return torch.softmax(logits.float() / temperature, dim=-1)
