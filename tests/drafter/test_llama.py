"""The small Llama: the same numbers as transformers, and every way through the cache gives those of one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsim.drafter.llama import Llama, LlamaConfig, Segment

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    ffn_size=80,
    rope_base=5_000.0,
    norm_eps=1e-4,
)
LENGTH = 11


def random_llama(config: LlamaConfig, seed: int = 0) -> Llama:
    model = Llama(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter.ndim == 1 else 1.5 * noise * parameter.shape[1] ** -0.5
    model.head = model.embedding
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_llama(CONFIG)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(CONFIG.vocab_size, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def zeros(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64)


def one_pass(model: Llama, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Features and hidden states of whole sequences."""
    return model.extend(tokens, model.new_cache(*tokens.shape), zeros(len(tokens)), taps)


def close(ours: Tensor, theirs: Tensor, limit: float = 1e-4) -> bool:
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() < limit)


@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (6, 1), (4, 4)])
def test_logits_and_taps_equal_those_of_transformers(heads: int, kv: int, tokens: Tensor) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = LlamaConfig(
        vocab_size=50, hidden_size=48, num_layers=3, num_heads=heads, num_kv_heads=kv, ffn_size=80, norm_eps=1e-4
    )
    ours = random_llama(config)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            intermediate_size=80,
            rms_norm_eps=1e-4,
            tie_word_embeddings=True,
        )
    ).eval()
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    names |= {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    state = {
        "model.embed_tokens.weight": ours.embedding,
        "lm_head.weight": ours.head,
        "model.norm.weight": ours.norm.weight,
    }
    for index, layer in enumerate(ours.layers):
        for name, value in layer.state_dict().items():
            state[f"model.layers.{index}.{names[name.removesuffix('.weight')]}.weight"] = value
    theirs.load_state_dict(state)
    features, hidden = one_pass(ours, tokens, (0, 1, 2))
    with torch.inference_mode():
        expected = theirs(tokens, output_hidden_states=True)
    logits = ours.logits(hidden)
    assert logits.std() > 0.5
    assert close(logits, expected.logits, 1e-4)
    assert close(features, torch.stack(expected.hidden_states[:3], dim=2), 1e-4)


def test_the_last_tap_is_the_last_layer_before_the_norm(model: Llama, tokens: Tensor) -> None:
    features, hidden = one_pass(model, tokens, (3, 0))
    assert features.shape == (3, LENGTH, 2, 48)
    assert torch.equal(model.norm(features[:, :, 0]), hidden)
    assert torch.equal(features[:, :, 1], model.embedding[tokens])


def test_no_taps_no_features(model: Llama, tokens: Tensor) -> None:
    assert one_pass(model, tokens)[0].shape == (3, LENGTH, 0, 48)


def test_what_comes_later_changes_nothing_before(model: Llama, tokens: Tensor) -> None:
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1) % CONFIG.vocab_size
    first, second = one_pass(model, tokens)[1], one_pass(model, other)[1]
    assert close(first[:, :7], second[:, :7])
    assert not close(first[:, 7:], second[:, 7:], 1e-2)


@pytest.mark.parametrize("steps", [(1,) * LENGTH, (4, 1, 6), (10, 1)])
def test_token_by_token_is_the_same_as_at_once(model: Llama, tokens: Tensor, steps: tuple[int, ...]) -> None:
    cache = model.new_cache(3, LENGTH + 5)
    parts, at = [], 0
    for step in steps:
        parts.append(model.extend(tokens[:, at : at + step], cache, zeros(3) + at, (1, 3)))
        at += step
    features, hidden = one_pass(model, tokens, (1, 3))
    assert close(torch.cat([part[0] for part in parts], dim=1), features)
    assert close(torch.cat([part[1] for part in parts], dim=1), hidden)


def test_rows_go_on_at_places_of_their_own_and_overwrite_what_stood_there(model: Llama, tokens: Tensor) -> None:
    cache = model.new_cache(3, LENGTH)
    junk = (tokens + 17) % CONFIG.vocab_size
    model.extend(junk, cache, zeros(3), ())
    start = torch.tensor([2, 7, 4])
    for row, first in enumerate(start.tolist()):
        model.extend(tokens[row : row + 1, :first], cache.rows(row, row + 1), zeros(1), ())
    new = torch.stack([tokens[row, first : first + 4] for row, first in enumerate(start.tolist())])
    _, hidden = model.extend(new, cache, start, ())
    expected = one_pass(model, tokens)[1]
    for row, first in enumerate(start.tolist()):
        assert close(hidden[row], expected[row, first : first + 4])


def test_rows_are_views(model: Llama, tokens: Tensor) -> None:
    cache = model.new_cache(3, LENGTH)
    before = cache.k.clone()
    model.extend(tokens[1:2], cache.rows(1, 2), zeros(1), ())
    assert not torch.equal(cache.k[:, 1], before[:, 1])
    assert torch.equal(cache.k[:, [0, 2]], before[:, [0, 2]])
    assert cache.rows(1, 3).k.shape[1] == 2
    assert cache.rows(1, 3).capacity == cache.capacity == LENGTH


def test_a_copied_row_goes_on_like_the_first(model: Llama, tokens: Tensor) -> None:
    cache = model.new_cache(3, LENGTH)
    model.extend(tokens[2:], cache.rows(2, 3), zeros(1), ())
    cache.copy_row(2, 0, 8)
    assert torch.equal(cache.k[:, 0, :, :8], cache.k[:, 2, :, :8])
    assert torch.equal(cache.v[:, 0, :, :8], cache.v[:, 2, :, :8])
    assert not cache.k[:, 0, :, 8:].any()
    assert not cache.k[:, 1].any()
    _, hidden = model.extend(tokens[2:, 8:], cache.rows(0, 1), zeros(1) + 8, ())
    assert close(hidden, one_pass(model, tokens[2:])[1][:, 8:])


def test_a_branch_that_is_a_chain_is_what_extend_gives(model: Llama, tokens: Tensor) -> None:
    cache = model.new_cache(1, LENGTH)
    model.extend(tokens[:1, :6], cache, zeros(1), ())
    kept = cache.k.clone(), cache.v.clone()
    positions = torch.arange(6, LENGTH)
    chain = torch.ones(5, 5, dtype=torch.bool).tril()
    hidden = model.branch(tokens[0, 6:], positions, torch.full((5,), 6), chain, cache)
    assert torch.equal(cache.k, kept[0])
    assert torch.equal(cache.v, kept[1])
    assert close(hidden, model.extend(tokens[:1, 6:], cache, zeros(1) + 6, ())[1][0])


def test_two_branches_from_different_depths_are_two_chains(model: Llama, tokens: Tensor) -> None:
    cache = model.new_cache(1, LENGTH)
    model.extend(tokens[:1], cache, zeros(1), ())
    chains = {3: tokens[1, :4], 8: tokens[2, :5]}
    nodes = [(prefix, depth) for prefix, chain in chains.items() for depth in range(len(chain))]
    tree = torch.tensor([[a[0] == b[0] and b[1] <= a[1] for b in nodes] for a in nodes])
    prefix = torch.tensor([node[0] for node in nodes])
    positions = prefix + torch.tensor([node[1] for node in nodes])
    # A third leaf that leaves the second chain after its first two tokens.
    together = torch.cat([*chains.values(), tokens[1, 9:10]])
    tree = torch.nn.functional.pad(tree, (0, 1, 0, 1))
    tree[-1, [4, 5, 9]] = True
    hidden = model.branch(
        together, torch.cat([positions, torch.tensor([10])]), torch.cat([prefix, torch.tensor([8])]), tree, cache
    )
    for first, chain, part in ((3, chains[3], hidden[:4]), (8, chains[8], hidden[4:9])):
        alone = torch.cat([tokens[0, :first], chain])[None]
        assert close(part, one_pass(model, alone)[1][0, first:])
    leaf = torch.cat([tokens[0, :8], chains[8][:2], tokens[1, 9:10]])[None]
    assert close(hidden[9], one_pass(model, leaf)[1][0, -1])


def test_the_order_of_the_nodes_does_not_matter(model: Llama, tokens: Tensor) -> None:
    cache = model.new_cache(1, LENGTH)
    model.extend(tokens[:1, :6], cache, zeros(1), ())
    order = torch.tensor([3, 0, 4, 2, 1])
    chain = torch.ones(5, 5, dtype=torch.bool).tril()
    prefix = torch.full((5,), 6)
    straight = model.branch(tokens[0, 6:], torch.arange(6, 11), prefix, chain, cache)
    mixed = model.branch(tokens[0, 6:][order], torch.arange(6, 11)[order], prefix, chain[order][:, order], cache)
    assert close(mixed, straight[order])


def test_grouped_heads_are_repeated_keys_and_values() -> None:
    grouped = random_llama(CONFIG)
    full = random_llama(LlamaConfig(**{**CONFIG.__dict__, "num_kv_heads": 6}))
    for few, many in zip(grouped.layers, full.layers, strict=True):
        state = few.state_dict()
        for name in ("k.weight", "v.weight"):
            state[name] = state[name].reshape(2, 8, 48).repeat_interleave(3, dim=0).reshape(48, 48)
        many.load_state_dict(state)
    full.embedding.data = grouped.embedding.data
    full.head = full.embedding
    full.norm.load_state_dict(grouped.norm.state_dict())
    tokens = torch.arange(9)[None]
    assert close(one_pass(grouped, tokens)[1], one_pass(full, tokens)[1])


def test_logits_are_float32_in_any_precision() -> None:
    model = random_llama(CONFIG).to(torch.bfloat16)
    model.head = model.embedding
    hidden = one_pass(model, torch.arange(4)[None])[1]
    assert hidden.dtype == torch.bfloat16
    assert model.logits(hidden).dtype == torch.float32


# -- packed: another number of tokens for every sequence ----------------------------------------------------


@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (6, 1), (4, 4)])
def test_a_packed_pass_is_one_pass_over_each_sequence(heads: int, kv: int, tokens: Tensor) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=48, num_layers=3, num_heads=heads, num_kv_heads=kv, ffn_size=80, norm_eps=1e-4
    )
    model = random_llama(config)
    cache = model.new_cache(4, LENGTH)
    # Rows out of order, one left out; a prompt from its start, one token, and a block over what stood there.
    segments = [Segment(3, 0, 7), Segment(0, 6, 1), Segment(2, 4, 5)]
    texts = {3: tokens[0], 0: tokens[1], 2: tokens[2]}
    model.extend(tokens[1:2, :6], cache.rows(0, 1), zeros(1), ())
    model.extend(torch.cat([tokens[2:, :4], tokens[:1, 4:]], dim=1), cache.rows(2, 3), zeros(1), ())
    new = torch.cat([texts[s.row][s.start : s.start + s.length] for s in segments])
    features, hidden = model.packed(new, segments, cache, (0, 2))
    first = 0
    for s in segments:
        alone, state = one_pass(model, texts[s.row][None, : s.start + s.length], (0, 2))
        assert close(hidden[first : first + s.length], state[0, s.start :])
        assert close(features[first : first + s.length], alone[0, s.start :])
        first += s.length
    assert first == len(hidden)
    assert not cache.k[:, 1].any()


def test_what_a_packed_pass_writes_is_what_extend_writes(model: Llama, tokens: Tensor) -> None:
    packed, padded = model.new_cache(3, LENGTH), model.new_cache(3, LENGTH)
    model.packed(tokens.flatten(), [Segment(row, 0, LENGTH) for row in range(3)], packed, ())
    model.extend(tokens, padded, zeros(3), ())
    assert close(packed.k, padded.k)
    assert close(packed.v, padded.v)


def test_no_token_of_a_packed_pass_sees_a_later_one(model: Llama, tokens: Tensor) -> None:
    def states(text: Tensor) -> Tensor:
        cache = model.new_cache(2, LENGTH)
        segments = [Segment(0, 0, LENGTH), Segment(1, 0, LENGTH)]
        return model.packed(torch.cat([text, tokens[1]]), segments, cache, ())[1]

    other = tokens[0].clone()
    other[6:] = (other[6:] + 1) % CONFIG.vocab_size
    one, two = states(tokens[0]), states(other)
    assert close(one[:6], two[:6])
    assert not close(one[6:LENGTH], two[6:LENGTH], 1e-2)
    assert close(one[LENGTH:], two[LENGTH:])
