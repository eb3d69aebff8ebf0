"""The drafters: blocks against direct transcriptions, training against drafting, and what a block may see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dsim.drafter.autoregressive import AutoregressiveDrafter
from dsim.drafter.build import Drafter
from dsim.drafter.corpus import Corpus
from dsim.drafter.drafter import FINAL, Block, Context, attend_context
from dsim.drafter.llama import LlamaLayer
from dsim.drafter.losses import LossWeights
from dsim.drafter.parallel import ParallelDrafter
from dsim.drafter.target import LlamaTarget
from dsim.drafter.tiny import tiny_target
from dsim.drafter.train import block_losses, example, tap_columns
from dsim.drafter.vocabulary import vocabulary_of
from dsim.errors import InputError

SORTS = ("markov", "gated", "rnn", "dflash", "eagle3", "mtp")
LENGTH, PROMPT = 17, 4
ANCHORS = (4, 5, 9, 12)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    """int64[3, LENGTH + 1]: any tokens do."""
    return torch.randint(2, 12, (3, LENGTH + 1), generator=torch.Generator().manual_seed(4))


class Text:
    """One text with what a drafter needs of it."""

    def __init__(self, target: LlamaTarget, drafter: Drafter, tokens: Tensor) -> None:
        taps = tuple(range(target.num_layers + 1))
        cache = target.new_cache(1, len(tokens))
        features, hidden = target.extend(tokens[None, :-1], cache, torch.zeros(1, dtype=torch.int64), taps)
        everything = torch.cat([features, hidden[:, :, None]], dim=2)
        columns = [target.num_layers + 1 if tap == FINAL else tap for tap in drafter.config.taps]
        self.drafter, self.tokens, self.features = drafter, tokens, everything[:, :, columns].clone()
        self.vocabulary = vocabulary_of(drafter.vocabulary_head.tokens, target.vocab_size, tokens[:PROMPT])

    def context(self) -> Context:
        return self.drafter.prepare(self.features, self.tokens[None])

    def teacher(self, at: tuple[int, ...], context: Context | None = None) -> tuple[Tensor, Tensor]:
        where = torch.tensor(at)
        following = self.tokens[where[:, None] + 1 + torch.arange(self.drafter.config.gamma)]
        found = self.context() if context is None else context
        return self.drafter.teacher(found, self.tokens[where], where, following, self.vocabulary)

    def draft(self, at: tuple[int, ...], choose: Any = None, context: Context | None = None) -> Block:
        where = torch.tensor(at)
        following = self.vocabulary.local[self.tokens[where[:, None] + 1 + torch.arange(self.drafter.config.gamma)]]
        found = self.context() if context is None else context
        chosen = choose or (lambda k, _: following[:, k])
        return self.drafter.draft(found, self.tokens[where], where, self.vocabulary, 0.9, chosen)


@pytest.fixture(params=SORTS)
def text(request: pytest.FixtureRequest, tiny: LlamaTarget, make_noisy: Any, tokens: Tensor) -> Text:
    # gamma 3, and every token of the texts can be drafted: 10 and 11 are in the prompt.
    own = tokens[0].clone()
    own[:2] = torch.tensor([10, 11])
    return Text(tiny, make_noisy(request.param, gamma=3), own)


# -- shapes, batches, teacher and draft -------------------------------------------------------------------


def test_shapes(text: Text) -> None:
    assert text.vocabulary.size == 12
    assert text.vocabulary.static == 10
    logits, confidence = text.teacher(ANCHORS)
    assert (logits.shape, logits.dtype) == ((4, 3, 12), torch.float32)
    assert (confidence.shape, confidence.dtype) == ((4, 3), torch.float32)
    block = text.draft(ANCHORS)
    assert block.tokens.shape == block.local.shape == block.confidence_logit.shape == (4, 3)
    assert torch.equal(text.vocabulary.tokens[block.local], block.tokens)
    assert logits.std() > 0.1
    assert confidence.std() > 0.01


def test_a_batch_of_anchors_is_one_anchor_at_a_time(text: Text) -> None:
    logits, confidence = text.teacher(ANCHORS)
    block = text.draft(ANCHORS)
    for row, anchor in enumerate(ANCHORS):
        one, sure = text.teacher((anchor,))
        torch.testing.assert_close(one[0], logits[row])
        torch.testing.assert_close(sure[0], confidence[row])
        torch.testing.assert_close(text.draft((anchor,)).confidence_logit[0], block.confidence_logit[row])


def test_drafting_the_text_itself_is_training(text: Text) -> None:
    logits, confidence = text.teacher(ANCHORS)
    seen: list[Tensor] = []
    where = torch.tensor(ANCHORS)

    def choose(k: int, probabilities: Tensor) -> Tensor:
        assert len(seen) == k
        seen.append(probabilities)
        return text.vocabulary.local[text.tokens[where + k + 1]]

    block = text.draft(ANCHORS, choose)
    torch.testing.assert_close(torch.stack(seen, dim=1), torch.softmax(logits / 0.9, dim=-1))
    torch.testing.assert_close(block.confidence_logit, confidence)
    assert torch.equal(block.tokens, text.tokens[where[:, None] + 1 + torch.arange(3)])


def test_a_draft_depends_on_the_drafts_before_it_and_on_no_later_one(text: Text) -> None:
    def drafted(second: int) -> tuple[list[Tensor], Block]:
        laws: list[Tensor] = []

        def choose(k: int, probabilities: Tensor) -> Tensor:
            laws.append(probabilities)
            return torch.tensor([3 if k != 1 else second])

        block = text.draft((9,), choose)
        return laws, block

    (one, first), (other, second) = drafted(2), drafted(7)
    for k in (0, 1):
        assert torch.equal(one[k], other[k])
        assert torch.equal(first.confidence_logit[:, k], second.confidence_logit[:, k])
    depends = text.drafter.config.kind != "dflash"
    assert torch.allclose(one[2], other[2]) != depends
    assert torch.allclose(first.confidence_logit[:, 2], second.confidence_logit[:, 2]) != depends


def test_nothing_after_the_anchor_is_seen(text: Text, tiny: LlamaTarget) -> None:
    before = text.draft((9,), lambda k, p: p.argmax(dim=-1))
    changed = Text(tiny, text.drafter, text.tokens)
    changed.tokens = text.tokens.clone()
    changed.tokens[10:] = 2
    # The state at the anchor itself is not known when the block is drafted either.
    changed.features[:, 9:] = 1e3 * torch.randn(changed.features[:, 9:].shape)
    after = changed.draft((9,), lambda k, p: p.argmax(dim=-1))
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.confidence_logit, after.confidence_logit)
    # What is before the anchor counts, up to the last state.
    changed.features[:, 8] += 1
    assert not torch.allclose(
        changed.draft((9,), lambda k, p: p.argmax(dim=-1)).confidence_logit, before.confidence_logit
    )


def test_a_context_of_several_texts_is_that_of_each(
    text: Text, tiny: LlamaTarget, tokens: Tensor, make_noisy: Any
) -> None:
    others = [text, *(Text(tiny, text.drafter, row) for row in tokens[1:])]
    for one in others[1:]:
        one.vocabulary = text.vocabulary
    where = torch.tensor([9, 12, 5])
    # Padded: what stands behind a text's anchor is not looked at.
    features = torch.cat([one.features for one in others])
    for row, at in enumerate(where.tolist()):
        features[row, at:] = 7.0
    together = text.drafter.prepare(features, torch.stack([one.tokens for one in others]))
    following = torch.stack(
        [one.tokens[at + 1 : at + 4] for one, at in zip(others, where.tolist(), strict=True)], dim=0
    )
    anchors = torch.stack([one.tokens[at] for one, at in zip(others, where.tolist(), strict=True)])
    logits, confidence = text.drafter.teacher(together, anchors, where, following, text.vocabulary)
    for row, (one, at) in enumerate(zip(others, where.tolist(), strict=True)):
        alone, sure = one.teacher((at,))
        torch.testing.assert_close(logits[row], alone[0])
        torch.testing.assert_close(confidence[row], sure[0])


@pytest.mark.parametrize("split", [1, 6])
def test_a_context_is_made_in_pieces(text: Text, split: int) -> None:
    whole = text.context()
    first = text.drafter.prepare(text.features[:, :split], text.tokens[None, : split + 1])
    rest = text.drafter.prepare(text.features[:, split:], text.tokens[None, split:], first=torch.tensor([split]))
    parts = [(first.k, rest.k, whole.k), (first.v, rest.v, whole.v)]
    if whole.extra is not None:
        assert first.extra is not None
        assert rest.extra is not None
        parts.append(([first.extra], [rest.extra], [whole.extra]))
    for one, two, both in parts:
        for left, right, expected in zip(one, two, both, strict=True):
            torch.testing.assert_close(torch.cat([left, right], dim=1), expected)


# -- direct transcriptions --------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-5) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, position: int, base: float) -> Tensor:
    """Rotary embedding of one vector: coordinates j and j + d/2 turn by position * base^(-2j/d)."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for j in range(half):
        angle = torch.tensor(position * base ** (-j / half))
        out[j] = x[j] * angle.cos() - x[j + half] * angle.sin()
        out[j + half] = x[j + half] * angle.cos() + x[j] * angle.sin()
    return out


def attention(layer: LlamaLayer, query: Tensor, at: int, entries: list[tuple[Tensor, int]]) -> Tensor:
    """One query (what q reads) at a position over entries (what k and v read, position): heads side by side."""
    c = layer.config
    width, groups, outs = c.head_dim, c.num_heads // c.num_kv_heads, []
    for head in range(c.num_heads):
        q = rotated((layer.q.weight @ query)[head * width :][:width], at, c.rope_base)
        part = slice(head // groups * width, (head // groups + 1) * width)
        keys = torch.stack([rotated((layer.k.weight @ x)[part], p, c.rope_base) for x, p in entries])
        values = torch.stack([(layer.v.weight @ x)[part] for x, _ in entries])
        outs.append(torch.softmax(keys @ q / width**0.5, dim=0) @ values)
    return torch.cat(outs)


def rest_of(layer: LlamaLayer, x: Tensor, attended: Tensor) -> Tensor:
    """Residual and SwiGLU."""
    x = x + layer.o.weight @ attended
    y = rms(x, layer.post_norm.weight)
    return x + layer.down.weight @ (functional.silu(layer.gate.weight @ y) * (layer.up.weight @ y))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_parallel_backbone_is_equations_2_and_3(
    layers: int, tiny: LlamaTarget, make_noisy: Any, tokens: Tensor
) -> None:
    drafter = make_noisy("dflash", gamma=3, layers=layers)
    assert isinstance(drafter, ParallelDrafter)
    text = Text(tiny, drafter, tokens[0])
    at = 6
    with torch.no_grad():
        found = drafter.backbone(text.context(), text.tokens[at : at + 1], torch.tensor([at]))[0]
        taps = [torch.cat([rms(tap, eps=0) for tap in text.features[0, i]]) for i in range(at)]
        injected = [rms(drafter.project.weight @ tap, drafter.context_norm.weight) for tap in taps]
        block = [tiny.embedding[text.tokens[at]], drafter.mask, drafter.mask]
        for module in drafter.layers:
            assert isinstance(module, LlamaLayer)
            norm = module.input_norm.weight
            far = [(rms(h, norm), i) for i, h in enumerate(injected)]
            # Both ways: every position of the block sees all of it.
            near = [(rms(x, norm), at + k) for k, x in enumerate(block)]
            block = [
                rest_of(module, x, attention(module, rms(x, norm), at + k, far + near)) for k, x in enumerate(block)
            ]
        expected = torch.stack([rms(x, drafter.norm.weight) for x in block])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sort", ["eagle3", "mtp"])
def test_the_recurrence_is_one_causal_pass_over_text_and_drafts(
    sort: str, tiny: LlamaTarget, make_noisy: Any, tokens: Tensor
) -> None:
    drafter = make_noisy(sort, gamma=3)
    assert isinstance(drafter, AutoregressiveDrafter)
    text = Text(tiny, drafter, tokens[0])
    at, layer = 6, drafter.layer
    assert isinstance(layer, LlamaLayer)

    def entry(state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual: of a state and the embedding of the token after it."""
        parts = [rms(state, drafter.state_norm.weight), rms(tiny.embedding[token], drafter.embedding_norm.weight)]
        both = torch.cat(parts)
        if sort == "eagle3":
            return both, state
        merged = drafter.merge.weight @ both
        return rms(merged, layer.input_norm.weight), merged

    with torch.no_grad():
        logits, confidence = text.teacher((at,))
        states = [torch.cat([rms(tap, eps=0) for tap in text.features[0, i]]) for i in range(at)]
        if sort == "eagle3":
            states = [drafter.fuse.weight @ state for state in states]
        hidden = []
        for _ in range(3):
            # Entries 0 to len(states) - 1, each with the token after it; the last one's output is the next state.
            entries = [entry(state, text.tokens[i + 1]) for i, state in enumerate(states)]
            read, residual = entries[-1]
            seen = [(x, i) for i, (x, _) in enumerate(entries)]
            states.append(rest_of(layer, residual, attention(layer, read, len(states) - 1, seen)))
            hidden.append(rms(states[-1], drafter.norm.weight))
        expected = torch.stack(hidden)
        head = tiny.head[text.vocabulary.tokens]
        torch.testing.assert_close(logits[0], expected @ head.T, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(confidence[0], drafter.confidence(expected, None), rtol=1e-3, atol=1e-4)


def test_the_sequential_head_is_added_to_the_backbone(tiny: LlamaTarget, make_noisy: Any, tokens: Tensor) -> None:
    drafter = make_noisy("markov", gamma=3)
    text = Text(tiny, drafter, tokens[0])
    with torch.no_grad():
        logits, confidence = text.teacher((6,))
        hidden = drafter.backbone(text.context(), text.tokens[6:7], torch.tensor([6]))[0]
        previous = text.vocabulary.local[text.tokens[6:9]]  # x_0 (the anchor), x_1, x_2
        embedded = drafter.sequential.embedding.weight[previous.clamp(max=10)]
        bias = functional.pad(embedded @ drafter.sequential.out.weight.T, (0, text.vocabulary.size - 10))
        torch.testing.assert_close(logits[0], hidden @ tiny.head[text.vocabulary.tokens].T + bias)
        torch.testing.assert_close(confidence[0], drafter.confidence(hidden, embedded))


def test_attention_of_blocks_with_a_mask_of_their_own() -> None:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, keys, values = some(2, 3, 4, 5), some(1, 6, 2, 5), some(1, 6, 2, 5)
    own_k, own_v, seen = some(2, 3, 2, 5), some(2, 3, 2, 5), torch.tensor([0, 4])
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    found = attend_context(q, (keys, values), seen, (own_k, own_v), mask)
    for a in range(2):
        for s in range(3):
            for head in range(4):
                far = int(seen[a])
                k = torch.cat([keys[0, :far, head // 2], own_k[a, : s + 1, head // 2]])
                v = torch.cat([values[0, :far, head // 2], own_v[a, : s + 1, head // 2]])
                expected = torch.softmax(k @ q[a, s, head] / 5**0.5, dim=0) @ v
                torch.testing.assert_close(found[a, s, head * 5 : head * 5 + 5], expected)
    several = attend_context(q, (keys.expand(2, -1, -1, -1), values.expand(2, -1, -1, -1)), seen, (own_k, own_v), mask)
    torch.testing.assert_close(several, found)


# -- where training starts, and what it leaves alone ------------------------------------------------------


def test_parallel_drafters_start_from_the_last_layers(tiny: LlamaTarget, make_fresh: Any) -> None:
    drafter = make_fresh("markov", layers=2)
    for own, index in zip(drafter.layers, (1, 2), strict=True):
        expected = tiny.layer_weights(index)
        assert expected is not None
        for name, value in own.state_dict().items():
            assert torch.equal(value, expected[name]), name
    # Of the layers 0, 3 and the final state, layer 3 is passed on.
    passed = drafter.project.weight[:, 32:64] - torch.eye(32)
    assert passed.abs().max() < 0.1
    assert drafter.project.weight[:, :32].abs().max() < 0.1
    torch.testing.assert_close(drafter.mask.detach(), tiny.embedding.mean(dim=0))


def test_a_drafter_deeper_than_the_target_starts_with_its_first_layer(make_fresh: Any, tiny: LlamaTarget) -> None:
    drafter = make_fresh("dflash", layers=5)
    first = tiny.layer_weights(0)
    assert first is not None
    for layer in drafter.layers[:3]:
        assert torch.equal(layer.q.weight, first["q.weight"])


@pytest.mark.parametrize("sort", ["eagle3", "mtp"])
def test_autoregressive_drafters_start_from_the_last_layer(sort: str, tiny: LlamaTarget, make_fresh: Any) -> None:
    drafter = make_fresh(sort)
    expected = tiny.layer_weights(2)
    assert expected is not None
    for name, value in drafter.layer.state_dict().items():
        if sort == "eagle3" and name in ("q.weight", "k.weight", "v.weight"):
            assert (value[:, :32] - expected[name]).abs().max() < 0.1  # the state's half
            assert value[:, 32:].abs().max() < 0.1  # the embedding's
        else:
            assert torch.equal(value, expected[name]), name
    into = drafter.fuse.weight[:, -32:] if sort == "eagle3" else drafter.merge.weight[:, :32]
    assert (into - torch.eye(32)).abs().max() < 0.1


@pytest.mark.parametrize("sort", SORTS)
def test_confidences_start_at_one_half_and_seeds_matter(sort: str, tiny: LlamaTarget, make_fresh: Any) -> None:
    one, same, other = make_fresh(sort), make_fresh(sort), make_fresh(sort, seed=1)
    assert not any(p.any() for p in one.confidence.parameters())
    states = [drafter.state_dict() for drafter in (one, same, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


@pytest.mark.parametrize("sort", SORTS)
def test_embedding_and_head_are_the_targets_and_stay(
    sort: str, tiny: LlamaTarget, make_fresh: Any, corpora: tuple[Corpus, Corpus]
) -> None:
    drafter = make_fresh(sort)
    before = tiny.embedding.clone()
    shapes = {tuple(value.shape) for value in drafter.state_dict().values()} | {
        tuple(p.shape) for p in drafter.parameters()
    }
    assert not shapes & {(12, 32), (10, 32)}
    assert drafter._embedding.data_ptr() == tiny.embedding.data_ptr()
    corpus = corpora[0]
    columns = tap_columns(corpus.header.taps, drafter.config.taps, corpus.folder)
    item = example(corpus[1], tiny, drafter, columns, 0.9)
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.1)
    anchors = torch.arange(item.first, item.first + 8)
    changed = {name: value.clone() for name, value in drafter.named_parameters()}
    # Twice: at first some parts get no gradient, because what follows them starts at zero.
    for _ in range(2):
        optimizer.zero_grad()
        block_losses(drafter, item, anchors, 0.9, LossWeights()).total.backward()
        optimizer.step()
    assert torch.equal(tiny.embedding, before)
    assert not tiny.embedding.requires_grad
    assert torch.equal(drafter.vocabulary_head._static, before[:10])
    # All else was trained (Eagle3's layer reads what its own norms made: the layer's input norm has no work).
    for name, value in drafter.named_parameters():
        assert torch.equal(value, changed[name]) == (sort == "eagle3" and name == "layer.input_norm.weight"), name


def test_the_head_scores_own_tokens_and_those_of_the_prompt(tiny: LlamaTarget, make_noisy: Any) -> None:
    head = make_noisy("dflash").vocabulary_head
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    vocabulary = vocabulary_of(head.tokens, 12, torch.tensor([11, 2]))
    torch.testing.assert_close(head(hidden, vocabulary), hidden @ tiny.head[[*range(10), 11]].T)


def test_a_bfloat16_target_is_trained_on_and_drafted_for(
    tokens: Tensor, make_fresh: Any, corpora: tuple[Corpus, Corpus]
) -> None:
    # As on a GPU: the target in bfloat16, the drafter in float32 or under autocast.
    low = tiny_target(seed=1, vocab_size=12, num_layers=3, sharpness=3.0)
    low.model.to(torch.bfloat16)
    low.model.head = low.model.embedding
    for sort in ("markov", "eagle3"):
        drafter = make_fresh(sort, target=low)
        text = Text(low, drafter, tokens[0])
        block = text.draft(ANCHORS, lambda k, p: p.argmax(dim=-1))
        assert torch.isfinite(block.confidence_logit).all()
        columns = tap_columns(corpora[0].header.taps, drafter.config.taps, "here")
        item = example(corpora[0][1], low, drafter, columns, 0.9)
        assert item.target.dtype == torch.float32
        for bf16 in (False, True):
            losses = block_losses(drafter, item, torch.tensor([item.first]), 0.9, LossWeights(), bf16=bf16)
            losses.total.backward()
            assert torch.isfinite(losses.total)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "medusa"}, "field 'kind': got 'medusa', expected one of dspark, dflash, eagle3, mtp"),
        ({"head": "lstm"}, "field 'head': got 'lstm', expected one of none, markov, gated, rnn"),
        ({"gamma": 0}, "field 'gamma': got 0, expected 1 to 64"),
        ({"layers": 0}, "field 'layers': got 0, expected at least 1"),
        ({"head": "none", "rank": 0}, "field 'head': got 'none', expected a sequential head for dspark"),
        ({"kind": "dflash"}, "field 'head': got 'markov', expected a sequential head for dspark, none otherwise"),
        ({"rank": 0}, "field 'rank': got 0, expected > 0 with a sequential head"),
        ({"kind": "eagle3", "head": "none", "rank": 0, "layers": 2}, "field 'layers': got 2, expected 1 for autoregr"),
        ({"vocab_size": 13}, "field 'vocab_size': got 13, expected 1 to 12"),
        ({"temperature": 0.0}, "field 'temperature': got 0.0, expected a finite number > 0"),
        ({"temperature": float("inf")}, "field 'temperature': got inf, expected a finite number > 0"),
        ({"temperature": float("nan")}, "field 'temperature': got nan, expected a finite number > 0"),
        ({"taps": ()}, "field 'taps': got (), expected layers 0 to 3, or -1"),
        ({"taps": (4,)}, "field 'taps': got (4,), expected layers 0 to 3, or -1"),
        ({"kind": "mtp", "head": "none", "rank": 0, "taps": (3,)}, "field 'taps': got (3,), expected (-1,) for mtp"),
    ],
)
def test_a_description_that_contradicts_itself(changes: dict[str, Any], message: str, make_fresh: Any) -> None:
    with pytest.raises(InputError) as error:
        make_fresh("markov", **changes)
    assert message in str(error.value)
