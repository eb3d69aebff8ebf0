"""The timed drafter: one pass of DSpark over a batch, at full size with random weights.

The same computation as `dsim.drafter.parallel.ParallelDrafter` (tests hold one against the other), arranged as an
engine does it: the hidden states of the tokens that the last step verified are projected and injected into the
drafter's KV cache, the block of anchor and masks runs through the backbone over that cache, and the Markov head draws
the tokens of the block left to right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dsim.gpu_profile.decoder import Batch, Layer, TimedDecoder, make_batch, norm, rotary, turn
from dsim.gpu_profile.shapes import DrafterShape


@dataclass
class DraftBatch:
    """Fixed tensors of a draft of R requests.

    Attributes
    ----------
    block
        Of the backbone: R requests of gamma tokens.
    features
        [R * injected, taps, W]: hidden states to inject.
    slots, cos, sin
        Where they go in the cache, and their rotary factors, as in `Batch`.
    noise
        float32[R, vocabulary], exponential: a token is drawn as argmax(p / noise). The same for all positions.
    """

    block: Batch
    features: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    noise: Tensor


class TimedDrafter:
    """A DSpark drafter with random weights on a timed target, whose embedding, LM head and cache it uses.

    Parameters
    ----------
    drafter
        Its sizes.
    target
        The target.
    """

    def __init__(self, drafter: DrafterShape, target: TimedDecoder) -> None:
        maker, width, rank = target.maker, target.shape.width, drafter.rank
        self.drafter, self.target = drafter, target
        self.shape = drafter.layer_shape(target.shape)
        self.project = maker.matrix(width, drafter.taps * width)
        self.context_norm = maker.ones(width)
        self.mask = maker.normal(width)
        self.layers = [Layer.random(self.shape, maker) for _ in range(drafter.layers)]
        self.norm = maker.ones(width)
        self.head = target.head[: drafter.vocabulary]
        self.markov_in = maker.normal(drafter.vocabulary + 1, rank, std=rank**-0.5)
        self.markov_out = maker.matrix(drafter.vocabulary, rank)
        self.confidence = maker.matrix(1, width + rank)

    def batch(self, requests: int, context: int, injected: int) -> DraftBatch:
        """The fixed part of a pass: R requests, `context` tokens before each anchor, the last `injected` new."""
        maker, gamma = self.target.maker, self.drafter.gamma
        block = make_batch(self.shape, maker, tokens=requests * gamma, requests=requests, context=context, scored=gamma)
        position = torch.arange(context - injected, context).repeat(requests)
        owner = torch.arange(requests).repeat_interleave(injected)
        cos, sin = rotary(position, self.shape)
        return DraftBatch(
            block=block,
            features=maker.normal(requests * injected, self.drafter.taps, self.shape.width),
            slots=(owner * block.keys + position).to(maker.device),
            cos=cos.to(maker.device, maker.dtype),
            sin=sin.to(maker.device, maker.dtype),
            noise=maker.exponential(requests, self.drafter.vocabulary),
        )

    def inject(self, batch: DraftBatch) -> None:
        """Write keys and values of the features into the caches of all layers (eqs. 2 and 3 of the paper)."""
        shape, first = self.shape, self.shape.heads * self.shape.head_dim
        # Each tapped layer is brought to the same size first, as in `dsim.drafter.drafter.normed_taps`.
        taps = norm(batch.features, None, shape.norm_eps, shape.width).flatten(1)
        merged = norm(functional.linear(taps, self.project), self.context_norm, shape.norm_eps, shape.width)
        for index, layer in enumerate(self.layers):
            normed = norm(merged, layer.norm, shape.norm_eps, shape.width)
            heads = functional.linear(normed, layer.qkv[first:]).unflatten(-1, (-1, shape.head_dim))
            turn(heads[:, : shape.kv_heads], batch.cos, batch.sin, shape)
            self.target.cache_of(index, batch.block).index_copy_(0, batch.slots, heads)

    def backbone(self, anchors: Tensor, batch: DraftBatch) -> Tensor:
        """int64[R] -> [R, gamma, W]: hidden states of the blocks after the final norm."""
        shape, gamma = self.shape, self.drafter.gamma
        start = functional.embedding(anchors, self.target.embedding)
        x = torch.cat([start[:, None], self.mask.expand(len(anchors), gamma - 1, -1)], dim=1).flatten(0, 1)
        for index, layer in enumerate(self.layers):
            x = self.target.layer(x, layer, self.target.cache_of(index, batch.block), batch.block, shape)
        return norm(x, self.norm, shape.norm_eps, shape.width).unflatten(0, (-1, gamma))

    def step(self, anchors: Tensor, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """int64[R] -> drafted tokens int64[R, gamma] and their confidence logits [R, gamma]: a whole draft pass."""
        self.inject(batch)
        hidden = self.backbone(anchors, batch)
        logits = functional.linear(hidden, self.head)
        # A token outside the draft vocabulary has the last row.
        previous = anchors.clamp(max=self.drafter.vocabulary)
        drafted, confident = [], []
        for k in range(self.drafter.gamma):
            embedded = functional.embedding(previous, self.markov_in)
            scores = logits[:, k] + functional.linear(embedded, self.markov_out)
            confident.append(functional.linear(torch.cat([hidden[:, k], embedded], dim=-1), self.confidence))
            previous = (scores.float().softmax(dim=-1) / batch.noise).argmax(dim=-1)
            drafted.append(previous)
        return torch.stack(drafted, dim=1), torch.cat(confident, dim=1)
