"""The sequential heads and the confidence head: eqs. 5, 6 and 7, written out once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsim.drafter.heads import ConfidenceHead, MarkovHead, RnnHead
from dsim.drafter.vocabulary import Vocabulary, vocabulary_of

ANCHORS, GAMMA, STATIC, RANK, HIDDEN = 3, 5, 7, 4, 6
#: Target tokens 2..8 are the drafter's own; the prompt adds 0 and 11; 1, 9 and 10 are outside.
OWN = torch.arange(2, 9)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return vocabulary_of(OWN, 12, torch.tensor([11, 3, 0, 0]))


@pytest.fixture
def previous(vocabulary: Vocabulary) -> Tensor:
    """Local indices: own tokens, tokens of the prompt, and tokens outside."""
    tokens = torch.tensor([[2, 8, 11, 0, 5], [1, 2, 2, 9, 3], [10, 0, 8, 7, 11]])
    return vocabulary.local[tokens]


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(ANCHORS, GAMMA, HIDDEN, generator=torch.Generator().manual_seed(1))


def filled(head: nn.Module) -> Any:
    """The head with all weights random: what starts at zero would show nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head.requires_grad_(False)


def heads() -> dict[str, Any]:
    return {
        "markov": filled(MarkovHead(STATIC, RANK, HIDDEN)),
        "gated": filled(MarkovHead(STATIC, RANK, HIDDEN, gated=True)),
        "rnn": filled(RnnHead(STATIC, RANK, HIDDEN)),
    }


def row_of(local: int) -> int:
    """Row of W1: one for each own token, and the last one for all others."""
    return min(local, STATIC)


def test_markov_is_equation_5(vocabulary: Vocabulary, previous: Tensor, hidden: Tensor) -> None:
    head = heads()["markov"]
    w1, w2 = head.embedding.weight, head.out.weight.T
    assert w1.shape == (STATIC + 1, RANK)
    found = head.biases(head.embed(previous, vocabulary), hidden, vocabulary)
    assert found.shape == (ANCHORS, GAMMA, vocabulary.size)
    for a in range(ANCHORS):
        for k in range(GAMMA):
            torch.testing.assert_close(found[a, k, :STATIC], w1[row_of(int(previous[a, k]))] @ w2)


def test_gated_scales_the_embedding_first(vocabulary: Vocabulary, previous: Tensor, hidden: Tensor) -> None:
    head = heads()["gated"]
    found = head.biases(head.embed(previous, vocabulary), hidden, vocabulary)
    for a in range(ANCHORS):
        for k in range(GAMMA):
            e = head.embedding.weight[row_of(int(previous[a, k]))]
            gate = torch.sigmoid(head.gate.weight @ torch.cat([e, hidden[a, k]]) + head.gate.bias)
            torch.testing.assert_close(found[a, k, :STATIC], head.out.weight @ (gate * e))


def test_rnn_is_equation_6(vocabulary: Vocabulary, previous: Tensor, hidden: Tensor) -> None:
    head = heads()["rnn"]
    found = head.biases(head.embed(previous, vocabulary), hidden, vocabulary)
    w_g, w_c, w_o = head.joint.weight.chunk(3)
    b_g, b_c, b_o = head.joint.bias.chunk(3)
    for a in range(ANCHORS):
        s = torch.zeros(RANK)
        for k in range(GAMMA):
            z = torch.cat([s, head.embedding.weight[row_of(int(previous[a, k]))], hidden[a, k]])
            g = torch.sigmoid(w_g @ z + b_g)
            s = g * s + (1 - g) * torch.tanh(w_c @ z + b_c)
            torch.testing.assert_close(found[a, k, :STATIC], head.out.weight @ torch.tanh(w_o @ z + b_o))


@pytest.mark.parametrize("name", ["markov", "gated", "rnn"])
def test_step_by_step_is_all_at_once(name: str, vocabulary: Vocabulary, previous: Tensor, hidden: Tensor) -> None:
    head = heads()[name]
    embedded = head.embed(previous, vocabulary)
    state, steps = head.start(ANCHORS, hidden), []
    for k in range(GAMMA):
        state, bias = head.step(state, embedded[:, k], hidden[:, k], vocabulary)
        steps.append(bias)
    torch.testing.assert_close(torch.stack(steps, dim=1), head.biases(embedded, hidden, vocabulary))


@pytest.mark.parametrize("name", ["markov", "gated", "rnn"])
def test_further_tokens_of_the_prompt_get_no_bias(
    name: str, vocabulary: Vocabulary, previous: Tensor, hidden: Tensor
) -> None:
    head = heads()[name]
    found = head.biases(head.embed(previous, vocabulary), hidden, vocabulary)
    assert found[..., :STATIC].all()
    assert vocabulary.size == STATIC + 2
    assert not found[..., STATIC:].any()
    static = vocabulary_of(OWN, 12)
    assert head.biases(head.embed(previous, static), hidden, static).shape[-1] == STATIC


@pytest.mark.parametrize("name", ["markov", "gated", "rnn"])
def test_all_tokens_outside_the_own_vocabulary_are_one(name: str, vocabulary: Vocabulary, hidden: Tensor) -> None:
    head = heads()[name]
    found = [
        head.biases(head.embed(torch.full((ANCHORS, GAMMA), local), vocabulary), hidden, vocabulary)
        for local in (STATIC, STATIC + 1, vocabulary.size, STATIC - 1)
    ]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    assert not torch.allclose(found[0], found[3])


def test_what_a_head_remembers(vocabulary: Vocabulary, previous: Tensor, hidden: Tensor) -> None:
    # Another first token: the Markov head forgets it after one position, the RNN head does not.
    other = previous.clone()
    other[:, 0] = (previous[:, 0] + 1) % STATIC
    for name, head in heads().items():
        one, two = (head.biases(head.embed(tokens, vocabulary), hidden, vocabulary) for tokens in (previous, other))
        assert not torch.allclose(one[:, 0], two[:, 0])
        assert torch.equal(one[:, 1:], two[:, 1:]) == (name != "rnn")


@pytest.mark.parametrize("head", [MarkovHead(STATIC, RANK, HIDDEN), RnnHead(STATIC, RANK, HIDDEN)])
def test_an_untrained_head_changes_nothing(head: Any, vocabulary: Vocabulary, previous: Tensor, hidden: Tensor) -> None:
    assert not head.biases(head.embed(previous, vocabulary), hidden, vocabulary).any()


@pytest.mark.parametrize("rank", [RANK, 0])
def test_confidence_is_equation_7(rank: int, hidden: Tensor) -> None:
    head = filled(ConfidenceHead(HIDDEN, rank))
    embedded = torch.randn(ANCHORS, GAMMA, rank, generator=torch.Generator().manual_seed(2)) if rank else None
    found = head(hidden, embedded)
    assert (found.shape, found.dtype) == ((ANCHORS, GAMMA), torch.float32)
    w, b = head.linear.weight[0], head.linear.bias[0]
    for a in range(ANCHORS):
        for k in range(GAMMA):
            z = hidden[a, k] if embedded is None else torch.cat([hidden[a, k], embedded[a, k]])
            torch.testing.assert_close(found[a, k], w @ z + b)


def test_an_untrained_confidence_is_one_half(hidden: Tensor) -> None:
    assert not ConfidenceHead(HIDDEN, 0)(hidden, None).any()
