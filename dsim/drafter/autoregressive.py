"""Autoregressive drafters of one layer: Eagle3 style (arXiv 2503.01840) and multi-token prediction (MTP).

Position i of the text feeds the layer the target's state at i and the embedding of token i + 1. At the anchor the
drafter's own output takes the state's place, step after step. Eagle3 fuses several layers' states and its attention
sees state and embedding side by side; MTP (DeepSeek-V3, arXiv 2412.19437, section 2.2) takes the final state,
merges both in one projection and is a plain layer from there on. Both are trained unrolled over the whole block
(Eagle3's training-time test); MTP's one module is used again at every depth, as serving engines do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsim.drafter.drafter import (
    Block,
    Choose,
    Context,
    DrafterConfig,
    VocabularyHead,
    attend_context,
    draft_probabilities,
    normed_taps,
)
from dsim.drafter.heads import ConfidenceHead
from dsim.drafter.llama import LlamaLayer, RmsNorm, rotary
from dsim.drafter.target import Target
from dsim.drafter.vocabulary import Vocabulary


class _WideLayer(LlamaLayer):
    """A layer whose queries, keys and values read 2H inputs (Eagle3)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config.shape)
        hidden, kv = config.shape.hidden_size, config.shape.num_kv_heads * config.shape.head_dim
        self.q = nn.Linear(2 * hidden, hidden, bias=False)
        self.k = nn.Linear(2 * hidden, kv, bias=False)
        self.v = nn.Linear(2 * hidden, kv, bias=False)


class AutoregressiveDrafter(nn.Module):
    """Eagle3 or MTP; see the module's text. Parameters as in `ParallelDrafter`."""

    def __init__(self, config: DrafterConfig, target: Target, tokens: Tensor) -> None:
        super().__init__()
        shape = config.shape
        hidden = shape.hidden_size
        self.config = config
        self.wide = config.kind == "eagle3"
        self.fuse = nn.Linear(len(config.taps) * hidden, hidden, bias=False) if self.wide else None
        self.state_norm = RmsNorm(hidden, shape.norm_eps)
        self.embedding_norm = RmsNorm(hidden, shape.norm_eps)
        self.merge = None if self.wide else nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = _WideLayer(config) if self.wide else LlamaLayer(shape)
        self.norm = RmsNorm(hidden, shape.norm_eps)
        self.confidence = ConfidenceHead(hidden, 0)
        self.vocabulary_head = VocabularyHead(target.head, tokens)
        self._embedding = target.embedding.detach()
        self._start_from(target)

    def _start_from(self, target: Target) -> None:
        hidden = self.config.shape.hidden_size
        weights = target.layer_weights(target.num_layers - 1)
        with torch.no_grad():
            if self.fuse is not None:
                nn.init.normal_(self.fuse.weight, std=0.02)
                self.fuse.weight[:, -hidden:] += torch.eye(hidden)
            if self.merge is not None:
                nn.init.normal_(self.merge.weight, std=0.02)
                self.merge.weight[:, :hidden] += torch.eye(hidden)
            if weights is None:
                return
            own = self.layer.state_dict()
            for name, value in weights.items():
                if own[name].shape == value.shape:
                    own[name].copy_(value)
                else:
                    # The state's half starts as the target's; the embedding's half starts small.
                    nn.init.normal_(own[name], std=0.02)
                    own[name][:, :hidden] += value.to(own[name])

    def _inputs(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """State [..., H] and next tokens [...] -> what attention reads, and the residual stream [..., H]."""
        embedded = self.embedding_norm(self._embedding[tokens].to(state.dtype))
        both = torch.cat([self.state_norm(state), embedded], dim=-1)
        if self.merge is None:
            return both, state
        merged = self.merge(both)
        return self.layer.input_norm(merged), merged

    def prepare(self, features: Tensor, tokens: Tensor, *, first: int | Tensor = 0) -> Context:
        """Keys, values and fused states of texts; shapes as in `ParallelDrafter.prepare`."""
        state = normed_taps(features, self.norm.weight.dtype)
        if self.fuse is not None:
            state = self.fuse(state)
        start = first[:, None] if isinstance(first, Tensor) else first
        positions = torch.arange(features.shape[1], device=features.device) + start
        cos, sin = rotary(positions, self.config.shape)
        read, _ = self._inputs(state, tokens[:, 1:])
        k, v = self.layer.keys_values(read, cos, sin)
        return Context([k], [v], extra=state)

    def _steps(self, context: Context, seen: Tensor) -> _Steps:
        return _Steps(self, context, seen)

    def teacher(
        self, context: Context, anchors: Tensor, seen: Tensor, following: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits and confidences where the block's tokens are known; see `ParallelDrafter.teacher`."""
        steps = self._steps(context, seen)
        given = torch.cat([anchors[:, None], following[:, :-1]], dim=1)
        hidden = torch.stack([steps.next(given[:, k]) for k in range(self.config.gamma)], dim=1)
        return self.vocabulary_head(hidden, vocabulary), self.confidence(hidden, None)

    @torch.inference_mode()
    def draft(
        self,
        context: Context,
        anchors: Tensor,
        seen: Tensor,
        vocabulary: Vocabulary,
        temperature: float,
        choose: Choose,
    ) -> Block:
        """Draft blocks left to right; see `ParallelDrafter.draft`."""
        steps = self._steps(context, seen)
        previous, local, confidence = anchors, [], []
        for k in range(self.config.gamma):
            hidden = steps.next(previous)
            confidence.append(self.confidence(hidden, None))
            chosen = choose(k, draft_probabilities(self.vocabulary_head(hidden, vocabulary), temperature))
            local.append(chosen)
            previous = vocabulary.tokens[chosen]
        drafted = torch.stack(local, dim=1)
        return Block(vocabulary.tokens[drafted], drafted, torch.stack(confidence, dim=1))


class _Steps:
    """The recurrence over a block: one call of `next` a drafted token."""

    def __init__(self, drafter: AutoregressiveDrafter, context: Context, seen: Tensor) -> None:
        assert context.extra is not None
        self.drafter = drafter
        self.context = (context.k[0], context.v[0])
        row = torch.arange(len(seen), device=seen.device) if context.extra.shape[0] > 1 else torch.zeros_like(seen)
        # The anchor's entry (state before it, embedding of it) is the block's own first one.
        self.position = seen - 1
        self.first = self.position
        self.state = context.extra[row, self.position]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def next(self, tokens: Tensor) -> Tensor:
        """int64[A] tokens just drafted (the anchor at first) -> normed hidden state [A, H]."""
        layer = self.drafter.layer
        read, residual = self.drafter._inputs(self.state, tokens)
        cos, sin = rotary(self.position[:, None], self.drafter.config.shape)
        k, v = layer.keys_values(read[:, None], cos, sin)
        self.keys.append(k)
        self.values.append(v)
        own = (torch.cat(self.keys, dim=1), torch.cat(self.values, dim=1))
        q = layer.queries(read[:, None], cos, sin)
        attended = attend_context(q, self.context, self.first, own, None)[:, 0]
        self.state = layer.finish(residual, attended)
        self.position = self.position + 1
        return self.drafter.norm(self.state)
