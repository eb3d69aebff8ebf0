"""The timed draft pass computes what the project's own DSpark drafter computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dsim.drafter.drafter import DrafterConfig
from dsim.drafter.heads import MarkovHead
from dsim.drafter.llama import layers_of
from dsim.drafter.parallel import ParallelDrafter
from dsim.drafter.tiny import tiny_target
from dsim.drafter.vocabulary import Vocabulary
from dsim.gpu_profile.decoder import Maker, TimedDecoder
from dsim.gpu_profile.drafter import TimedDrafter
from dsim.gpu_profile.shapes import DecoderShape, DrafterShape

VOCABULARY, DRAFTED, GAMMA, CONTEXT, REQUESTS = 24, 16, 4, 6, 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def pair() -> tuple[TimedDrafter, ParallelDrafter]:
    """A timed drafter and one of `dsim.drafter` with the same weights."""
    target = tiny_target(seed=2, vocab_size=VOCABULARY, num_layers=3)
    c = target.shape
    shape = DecoderShape(
        "target",
        layers=3,
        width=c.hidden_size,
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        ffn=c.ffn_size,
        vocabulary=VOCABULARY,
        tied=True,
        qk_norm=False,
        rope_base=c.rope_base,
        norm_eps=c.norm_eps,
    )
    decoder = TimedDecoder(
        shape, Maker(torch.device("cpu"), torch.float32, seed=4), held_layers=1, cache_elements=1 << 14, fused=False
    )
    sizes = DrafterShape(layers=2, gamma=GAMMA, taps=3, rank=5, vocabulary=DRAFTED, ffn=shape.ffn)
    ours = TimedDrafter(sizes, decoder)
    config = DrafterConfig(
        kind="dspark",
        gamma=GAMMA,
        layers=2,
        taps=(0, 1, 3),
        head="markov",
        rank=5,
        vocab_size=DRAFTED,
        temperature=1.0,
        shape=c,
        target=target.name,
        fingerprint=target.fingerprint,
    )
    theirs = ParallelDrafter(config, target, torch.arange(DRAFTED)).requires_grad_(False)
    decoder.embedding.copy_(target.embedding)
    theirs.project.weight.data = ours.project
    theirs.mask.data = ours.mask
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for layer, mine in zip(layers_of(theirs.layers), ours.layers, strict=True):
        layer.input_norm.weight.data = torch.ones(c.hidden_size)
        layer.post_norm.weight.data = torch.ones(c.hidden_size)
        names = ("q", "k", "v", "o", "gate", "up", "down")
        parts = (*mine.qkv.split((q, kv, kv)), mine.out, *mine.up.chunk(2), mine.down)
        for name, part in zip(names, parts, strict=True):
            getattr(layer, name).weight.data = part
    assert isinstance(theirs.sequential, MarkovHead)
    theirs.sequential.embedding.weight.data = ours.markov_in
    theirs.sequential.out.weight.data = ours.markov_out
    theirs.confidence.linear.weight.data = ours.confidence
    return ours, theirs


def test_a_draft_is_the_project_s_dspark() -> None:
    ours, theirs = pair()
    # All of the context is injected, so that nothing of the cache is left to chance.
    batch = ours.batch(REQUESTS, CONTEXT, injected=CONTEXT)
    anchors = torch.tensor([3, 11, 20])  # the last one is outside the draft vocabulary
    drafted, confidence = ours.step(anchors, batch)

    features = batch.features.view(REQUESTS, CONTEXT, 3, -1)
    context = theirs.prepare(features, torch.zeros(REQUESTS, CONTEXT + 1, dtype=torch.int64))
    vocabulary = Vocabulary(
        tokens=torch.arange(DRAFTED),
        static=DRAFTED,
        local=torch.arange(VOCABULARY).clamp(max=DRAFTED),
    )
    seen = torch.full((REQUESTS,), CONTEXT)
    block = theirs.draft(context, anchors, seen, vocabulary, 1.0, lambda k, p: (p / batch.noise).argmax(dim=-1))
    torch.testing.assert_close(ours.backbone(anchors, batch), theirs.backbone(context, anchors, seen))
    assert torch.equal(drafted, block.tokens)
    torch.testing.assert_close(confidence, block.confidence_logit)
    assert len({tuple(row) for row in drafted.tolist()}) > 1


def test_only_the_new_tokens_are_injected() -> None:
    ours, _ = pair()
    batch = ours.batch(REQUESTS, CONTEXT, injected=2)
    cache = ours.target.cache_of(0, batch.block).view(REQUESTS, CONTEXT + GAMMA, -1)
    before = cache.clone()
    ours.inject(batch)
    changed = (cache != before).any(dim=2)
    assert changed.tolist() == [[False] * 4 + [True] * 2 + [False] * GAMMA] * REQUESTS
