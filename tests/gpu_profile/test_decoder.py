"""The timed decoder does a decoder's work: held against the project's own Llama, and against plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsim.drafter.llama import Llama, LlamaConfig, LlamaLayer, attend, layers_of, rotary
from dsim.gpu_profile.decoder import Batch, Maker, TimedDecoder, experts, graphable, grouped, make_batch, turn
from dsim.gpu_profile.grid import Case, Memory, lengths
from dsim.gpu_profile.measure import Bench
from dsim.gpu_profile.shapes import DecoderShape, models

CPU = torch.device("cpu")
SHAPE = DecoderShape(
    "small",
    layers=3,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    vocabulary=40,
    qk_norm=False,
    rope_base=10_000.0,
    norm_eps=1e-5,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def timed(shape: DecoderShape = SHAPE, *, cache: int = 1 << 16, held: int | None = None) -> TimedDecoder:
    maker = Maker(CPU, torch.float32, seed=3)
    return TimedDecoder(shape, maker, held_layers=held or shape.layers, cache_elements=cache, fused=False)


def llama(decoder: TimedDecoder) -> Llama:
    """The project's Llama with the timed decoder's weights."""
    s = decoder.shape
    model = Llama(LlamaConfig(s.vocabulary, s.width, s.layers, s.heads, s.kv_heads, s.ffn, s.rope_base, s.norm_eps))
    model.embedding.data = decoder.embedding
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for layer, ours in zip(layers_of(model.layers), decoder.layers, strict=True):
        names = ("q", "k", "v", "o", "gate", "up", "down")
        parts = (*ours.qkv.split((q, kv, kv)), ours.out, *ours.up.chunk(2), ours.down)
        for name, part in zip(names, parts, strict=True):
            getattr(layer, name).weight.data = part
    return model.requires_grad_(False)


def batch_of(decoder: TimedDecoder, tokens: int, requests: int, context: int, **options: int) -> Batch:
    return make_batch(
        decoder.shape,
        decoder.maker,
        **{"tokens": tokens, "requests": requests, "context": context, "scored": 99, **options},
    )


def test_a_prefill_is_llama() -> None:
    decoder = timed()
    model = llama(decoder)
    ids = torch.arange(11) % SHAPE.vocabulary
    ours = decoder.hidden(ids, batch_of(decoder, 11, 1, 0, causal=True))
    _, theirs = model.extend(ids[None], model.new_cache(1, 11), torch.zeros(1, dtype=torch.int64), ())
    torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-5)


def test_one_token_a_request_is_llama_over_a_cache() -> None:
    # With one own token there is nothing to see both ways: the step is an ordinary decode step.
    decoder = timed()
    model = llama(decoder)
    requests, context = 3, 7
    texts = torch.randint(SHAPE.vocabulary, (requests, context + 1), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(requests, context + 1)
    start = torch.zeros(requests, dtype=torch.int64)
    _, theirs = model.extend(texts, cache, start, ())
    batch = batch_of(decoder, requests, requests, context)
    assert batch.keys == context + 1
    for index in range(SHAPE.layers):
        mine = decoder.cache_of(index, batch).view(requests, batch.keys, 2, SHAPE.kv_heads, SHAPE.head_dim)
        mine[:, :context, 0] = cache.k[index, :, :, :context].transpose(1, 2)
        mine[:, :context, 1] = cache.v[index, :, :, :context].transpose(1, 2)
    ours = decoder.hidden(texts[:, -1], batch)
    torch.testing.assert_close(ours, theirs[:, -1], rtol=1e-4, atol=1e-5)


def both_ways(layer: LlamaLayer, x: Tensor, k: Tensor, v: Tensor, first: int, config: LlamaConfig) -> Tensor:
    """A layer over one request: tokens [n, W] at positions `first` and up, cached keys and values [first, kv, D]."""
    cos, sin = rotary(torch.arange(first, first + len(x)), config)
    normed = layer.input_norm(x)
    own_k, own_v = layer.keys_values(normed, cos, sin)
    keys, values = (torch.cat(pair).transpose(0, 1)[None] for pair in ((k, own_k), (v, own_v)))
    mask = torch.ones(1, len(x), keys.shape[2], dtype=torch.bool)
    return layer.finish(x, attend(layer.queries(normed, cos, sin)[None], keys, values, mask)[0])


@pytest.mark.parametrize(("tokens", "requests", "context"), [(12, 3, 5), (10, 4, 6), (7, 7, 3), (5, 1, 4)])
def test_a_verify_step_is_each_request_by_itself(tokens: int, requests: int, context: int) -> None:
    # Requests of equal and of unequal length. The cache's random content is what each request sees before its tokens.
    decoder = timed()
    model = llama(decoder)
    batch = batch_of(decoder, tokens, requests, context)
    shape = (requests, batch.keys, 2, SHAPE.kv_heads, SHAPE.head_dim)
    caches = [decoder.cache_of(index, batch).view(shape).clone() for index in range(SHAPE.layers)]
    ids = torch.randperm(SHAPE.vocabulary, generator=torch.Generator().manual_seed(2))[:tokens]
    ours = decoder.hidden(ids, batch)
    begin = 0
    for request, count in enumerate(lengths(tokens, requests).tolist()):
        x = decoder.embedding[ids[begin : begin + count]]
        first = batch.keys - count
        for layer, cache in zip(layers_of(model.layers), caches, strict=True):
            x = both_ways(layer, x, cache[request, :first, 0], cache[request, :first, 1], first, model.config)
        torch.testing.assert_close(ours[begin : begin + count], model.norm(x), rtol=1e-4, atol=1e-5)
        begin += count
    # The tokens' own keys and values now stand in the cache, and the rest of it is as it was.
    after = decoder.cache_of(0, batch).view(shape)
    changed = (after != caches[0]).flatten(2).any(dim=2).sum(dim=1)
    assert changed.tolist() == lengths(tokens, requests).tolist()


def test_logits_of_the_last_tokens_of_each_request() -> None:
    decoder = timed()
    ids = torch.arange(10)
    every, some = batch_of(decoder, 10, 4, 6), batch_of(decoder, 10, 4, 6, scored=2)
    assert every.scored is None
    assert some.scored is not None
    # Lengths 3, 3, 2, 2: the first token of the first two requests is not scored.
    assert some.scored.tolist() == [1, 2, 4, 5, 6, 7, 8, 9]
    decoder.cache.zero_()
    hidden = decoder.hidden(ids, every)
    decoder.cache.zero_()
    likeliest = (hidden @ decoder.head.T).argmax(dim=-1)
    assert torch.equal(decoder.step(ids, some), likeliest[some.scored])


def test_keys_are_normed_and_turned_by_their_position() -> None:
    shape = replace(SHAPE, qk_norm=True)
    decoder = timed(shape)
    raw = decoder.maker.normal(1, 3, shape.head_dim).expand(6, -1, -1).contiguous()
    batch = batch_of(decoder, 6, 1, 20)
    turned = turn(raw.clone(), batch.cos, batch.sin, shape)
    torch.testing.assert_close(turned.square().mean(dim=-1), torch.ones(6, 3), rtol=1e-3, atol=1e-3)
    # The product of two turned copies depends on their distance only.
    products = torch.einsum("ahd,bhd->hab", turned, turned)
    for distance in range(5):
        along = products.diagonal(distance, 1, 2)
        torch.testing.assert_close(along, along[:, :1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(products[:, 0, 0], products[:, 0, 4])


MOE = replace(SHAPE, layers=2, ffn=16, experts=6, experts_per_token=2)


def test_experts_are_each_token_through_its_own() -> None:
    decoder = timed(MOE)
    layer, batch = decoder.layers[0], batch_of(decoder, 9, 3, 4)
    x = decoder.maker.normal(9, MOE.width)
    assert layer.router is not None
    wanted = torch.zeros_like(x)
    for token in range(9):
        chance = torch.softmax(layer.router @ x[token], dim=0)
        best = chance.argsort(descending=True)[:2]
        for expert in best:
            gate, up = (layer.up[expert] @ x[token]).chunk(2)
            wanted[token] += chance[expert] / chance[best].sum() * (layer.down[expert] @ (gate.sigmoid() * gate * up))
    torch.testing.assert_close(experts(x, layer, batch, MOE, fused=False), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="PyTorch 2.8")
def test_the_fused_product_is_the_loop() -> None:
    # One group is empty, which random routing of few tokens often does.
    maker = Maker(CPU, torch.float32, seed=0)
    rows, weights = maker.normal(7, 16), maker.matrix(4, 8, 16)
    ends = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    looped = grouped(rows, weights, ends, fused=False)
    torch.testing.assert_close(grouped(rows, weights, ends, fused=True), looped)
    torch.testing.assert_close(looped[2:6], rows[2:6] @ weights[2].T)


def test_distinct_tokens_reach_as_many_experts_as_chance_says() -> None:
    # A dummy batch (one token again and again) would touch 2 of 32 experts: such profiles price a mixture too low.
    shape = replace(MOE, width=64, heads=8, ffn=8, vocabulary=512, experts=32)
    decoder = timed(shape)
    batch = batch_of(decoder, 16, 4, 8)
    found = []
    for layer in decoder.layers:
        for _ in range(20):
            x = decoder.embedding[decoder.maker.distinct(16, 512)]
            assert layer.router is not None
            found.append((x @ layer.router.T).topk(2).indices.unique().numel())
    assert batch.experts is not None
    expected = 32 * (1 - (1 - 2 / 32) ** 16)  # 20.6
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.07)


def test_no_grouped_graphs_on_the_host() -> None:
    assert not graphable(CPU)


def test_layers_and_caches_take_turns() -> None:
    one = 2 * 10 * SHAPE.kv_elements  # two requests of ten keys
    decoder = timed(cache=2 * one + 5, held=2)
    batch = batch_of(decoder, 4, 2, 8)
    first, second, third = (decoder.cache_of(index, batch) for index in range(3))
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()
    assert first.shape == (20, 2 * SHAPE.kv_heads, SHAPE.head_dim)
    # The third layer has the first one's weights.
    full = timed(cache=1 << 16)
    full.embedding.copy_(decoder.embedding)
    for index in range(3):
        full.layers[index] = decoder.layers[index % 2]
    ids = torch.arange(4)
    causal = batch_of(full, 4, 1, 0, causal=True)
    torch.testing.assert_close(decoder.hidden(ids, causal), full.hidden(ids, causal))


@pytest.mark.parametrize("preset", ["qwen3-8b", "qwen3-4b", "qwen3-14b", "olmoe-1b-7b", "qwen3-30b-a3b"])
def test_full_size_passes_ask_nothing_of_the_host(preset: str) -> None:
    # On device meta there are shapes and no data: any number that the host asked for would be an error, as it would be
    # in the capture of a graph.
    target, drafter = models(preset, {"layers": 2})  # of full size
    if target.experts and not hasattr(torch, "_grouped_mm"):
        pytest.skip("PyTorch 2.8")
    memory = Memory(held_layers=target.layers, cache_elements=256 * (2048 + 16) * target.kv_elements)
    bench = Bench(
        target, drafter, memory, device=torch.device("meta"), dtype=torch.bfloat16, seed=0, fused=target.experts > 0
    )
    held = [bench.target.embedding, bench.target.norm, *(() if target.tied else (bench.target.head,))]
    for layer in bench.target.layers:
        held += [layer.norm, layer.ffn_norm, layer.qkv, layer.out, layer.up, layer.down]
        held += [] if layer.router is None else [layer.router]
    assert sum(tensor.numel() for tensor in held) == target.elements()
    step = bench.step(Case("verify", 1030, 256, 2048, graph=True))
    out = step.run()
    assert isinstance(out, Tensor)
    assert (out.shape, out.dtype) == ((1030,), torch.int64)
    out = bench.step(Case("verify", 4096, 256, 512, graph=False)).run()
    assert isinstance(out, Tensor)
    assert out.shape == (256 * 8,)  # gamma + 1 of each request's 16
    out = bench.step(Case("prefill", 1024, 1, 0, graph=True)).run()
    assert isinstance(out, Tensor)
    assert out.shape == (1,)
    drafted, confidence = bench.step(Case("draft", 256 * 7, 256, 2048, graph=True)).run()  # type: ignore[misc]
    assert (drafted.shape, confidence.shape) == ((256, 7), (256, 7))


def test_refreshed_tokens_are_distinct_and_others() -> None:
    target, drafter = models("tiny")
    bench = Bench(target, drafter, Memory(2, 1 << 16), device=CPU, dtype=torch.float32, seed=0)
    seen: list[Tensor] = []
    bench.target.step = lambda ids, batch: seen.append(ids.clone()) or ids  # type: ignore[method-assign,func-returns-value]
    step = bench.step(Case("verify", 300, 4, 8, graph=False))
    for _ in range(2):
        step.refresh()
        step.run()
    assert [ids.unique().numel() for ids in seen] == [300, 300]
    assert not torch.equal(*seen)
