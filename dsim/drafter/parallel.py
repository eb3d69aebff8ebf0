"""Parallel drafters: the DFlash backbone, and DSpark, which is that backbone with a sequential head on top.

Backbone (paper, eqs. 2 and 3): the target's hidden states of some layers are concatenated, projected and normed,
and every draft layer makes further keys and values of them; the block (anchor and gamma - 1 masks) attends to
these and, both ways, to itself. As in DSpark the anchor is the first prediction position, for DFlash too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsim.drafter.drafter import (
    FINAL,
    Block,
    Choose,
    Context,
    DrafterConfig,
    VocabularyHead,
    attend_context,
    draft_probabilities,
    normed_taps,
)
from dsim.drafter.heads import ConfidenceHead, MarkovHead, RnnHead
from dsim.drafter.llama import LlamaLayer, RmsNorm, layers_of, rotary
from dsim.drafter.target import Target
from dsim.drafter.vocabulary import Vocabulary


class ParallelDrafter(nn.Module):
    """DSpark (with a sequential head) or DFlash (without).

    Parameters
    ----------
    config
        Its description.
    target
        Gives the frozen embedding and LM head, and the weights to start from.
    tokens
        int64[Vd]: draft vocabulary.
    """

    def __init__(self, config: DrafterConfig, target: Target, tokens: Tensor) -> None:
        super().__init__()
        shape = config.shape
        hidden = shape.hidden_size
        self.config = config
        self.project = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.context_norm = RmsNorm(hidden, shape.norm_eps)
        self.mask = nn.Parameter(target.embedding.detach().float().mean(dim=0))
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(config.layers))
        self.norm = RmsNorm(hidden, shape.norm_eps)
        self.sequential: MarkovHead | RnnHead | None = None
        if config.head == "rnn":
            self.sequential = RnnHead(config.vocab_size, config.rank, hidden)
        elif config.head != "none":
            gated = config.head == "gated"
            self.sequential = MarkovHead(config.vocab_size, config.rank, hidden, gated=gated)
        self.confidence = ConfidenceHead(hidden, config.rank)
        self.vocabulary_head = VocabularyHead(target.head, tokens)
        self._embedding = target.embedding.detach()
        self._start_from(target)

    def _start_from(self, target: Target) -> None:
        """The target's last layers, and a projection that passes on the deepest tapped layer."""
        hidden = self.config.shape.hidden_size
        nn.init.normal_(self.project.weight, std=0.02 / len(self.config.taps))
        depth = [target.num_layers if tap == FINAL else tap for tap in self.config.taps]
        # The final state is normed otherwise than what the layers are used to: prefer the deepest raw one.
        raw = [d if tap != FINAL else -1 for d, tap in zip(depth, self.config.taps, strict=True)]
        deepest = max(range(len(depth)), key=lambda i: raw[i])
        with torch.no_grad():
            self.project.weight[:, deepest * hidden : (deepest + 1) * hidden] += torch.eye(hidden)
            for index, layer in enumerate(layers_of(self.layers)):
                # A drafter deeper than the target begins with copies of the target's first layer.
                weights = target.layer_weights(max(0, target.num_layers - self.config.layers + index))
                if weights is not None:
                    layer.load_state_dict({name: value.float() for name, value in weights.items()})

    def prepare(self, features: Tensor, tokens: Tensor, *, first: int | Tensor = 0) -> Context:
        """Keys and values of texts.

        Parameters
        ----------
        features
            [C, L, taps, H]: hidden states of the configured layers.
        tokens
            int64[C, L + 1]: the texts with one token more; not used here.
        first
            Position of the first one (live drafting appends): one for all texts, or int64[C].
        """
        merged = self.context_norm(self.project(normed_taps(features, self.mask.dtype)))
        start = first[:, None] if isinstance(first, Tensor) else first
        positions = torch.arange(features.shape[1], device=features.device) + start
        cos, sin = rotary(positions, self.config.shape)
        pairs = [layer.keys_values(layer.input_norm(merged), cos, sin) for layer in layers_of(self.layers)]
        return Context([k for k, _ in pairs], [v for _, v in pairs])

    def backbone(self, context: Context, anchors: Tensor, seen: Tensor) -> Tensor:
        """Hidden states of blocks.

        Parameters
        ----------
        context
            Of one text (C = 1) or one an anchor.
        anchors
            int64[A]: anchor tokens.
        seen
            int64[A]: positions of the anchors; the text before them is seen.

        Returns
        -------
        Tensor
            [A, gamma, H] after the final norm: h_k.
        """
        gamma = self.config.gamma
        embedded = self._embedding[anchors].to(self.mask.dtype)
        x = torch.cat([embedded[:, None], self.mask.expand(len(anchors), gamma - 1, -1)], dim=1)
        cos, sin = rotary(seen[:, None] + torch.arange(gamma, device=seen.device), self.config.shape)
        for index, layer in enumerate(layers_of(self.layers)):
            normed = layer.input_norm(x)
            own = layer.keys_values(normed, cos, sin)
            q = layer.queries(normed, cos, sin)
            x = layer.finish(x, attend_context(q, (context.k[index], context.v[index]), seen, own, None))
        return self.norm(x)

    def teacher(
        self, context: Context, anchors: Tensor, seen: Tensor, following: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits and confidences where the block's tokens are known.

        Parameters
        ----------
        context, anchors, seen
            As in `backbone`.
        following
            int64[A, gamma]: the text after the anchors.
        vocabulary
            Of the text.

        Returns
        -------
        logits, confidence_logit
            [A, gamma, E] and [A, gamma].
        """
        hidden = self.backbone(context, anchors, seen)
        logits = self.vocabulary_head(hidden, vocabulary)
        embedded = None
        if self.sequential is not None:
            previous = vocabulary.local[torch.cat([anchors[:, None], following[:, :-1]], dim=1)]
            embedded = self.sequential.embed(previous, vocabulary)
            logits = logits + self.sequential.biases(embedded, hidden, vocabulary)
        return logits, self.confidence(hidden, embedded)

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
        """Draft blocks left to right; `choose` draws (see `dsim.drafter.drafter.Choose`)."""
        hidden = self.backbone(context, anchors, seen)
        logits = self.vocabulary_head(hidden, vocabulary)
        head = self.sequential
        previous = vocabulary.local[anchors]
        state = head.start(len(anchors), hidden) if head is not None else None
        local, confidence = [], []
        for k in range(self.config.gamma):
            scores, embedded = logits[:, k], None
            if head is not None and state is not None:
                embedded = head.embed(previous, vocabulary)
                state, bias = head.step(state, embedded, hidden[:, k], vocabulary)
                scores = scores + bias
            confidence.append(self.confidence(hidden[:, k], embedded))
            previous = choose(k, draft_probabilities(scores, temperature))
            local.append(previous)
        drafted = torch.stack(local, dim=1)
        return Block(vocabulary.tokens[drafted], drafted, torch.stack(confidence, dim=1))
