"""The objective: eqs. 8 to 12 by hand, and the closed gradient against autograd of a plain implementation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsim.drafter.losses import LossWeights, _DraftLoss, draft_losses, position_weights

TEMPERATURE = 0.7


def laws(blocks: int, gamma: int, size: int, mass: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft logits, confidence logits, target laws (whose sum is `mass`) and tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(blocks, gamma, size, generator=generator, dtype=torch.float64)
    confidence = torch.randn(blocks, gamma, generator=generator, dtype=torch.float64)
    target = torch.softmax(2 * torch.randn(blocks, gamma, size, generator=generator, dtype=torch.float64), -1) * mass
    token = torch.randint(0, size + 1, (blocks, gamma), generator=generator)
    return logits, confidence, target, token


def plain(
    logits: Tensor, confidence: Tensor, target: Tensor, token: Tensor, weights: LossWeights, temperature: float
) -> Tensor:
    """Eqs. 8 to 12 as they are written, autograd does the rest. What `target` lacks of 1 is on further tokens."""
    blocks, gamma, size = logits.shape
    p = torch.softmax(logits / temperature, dim=-1)
    outside = 1 - target.sum(dim=-1)
    l1 = (p - target).abs().sum(dim=-1) + outside
    total = logits.new_zeros(())
    for block in range(blocks):
        for k in range(gamma):
            w = math.exp(-k / gamma)
            x = int(token[block, k])
            ce = -torch.log(p[block, k, x]) if x < size else p.new_zeros(())
            label = 1 - l1[block, k].detach() / 2
            c = torch.sigmoid(confidence[block, k])
            bce = -(label * torch.log(c) + (1 - label) * torch.log(1 - c))
            total = total + w * (weights.ce * ce + weights.tv * l1[block, k] + weights.confidence * bce)
    return total / blocks


def test_two_tokens_by_hand() -> None:
    # p_d = (3/4, 1/4), p_t = (1/2, 1/2), the text's token is the second; gamma = 1, so w = 1.
    logits = torch.tensor([[[math.log(3.0), 0.0]]])
    confidence = torch.tensor([[math.log(4.0)]])  # c = 0.8
    found = draft_losses(
        logits,
        confidence,
        torch.tensor([[[0.5, 0.5]]]),
        torch.tensor([[1]]),
        temperature=1.0,
        weights=LossWeights(),
    )
    assert found.alpha.item() == pytest.approx(0.75)
    assert found.ce.item() == pytest.approx(math.log(4))
    assert found.tv.item() == pytest.approx(0.5)
    bce = -(0.75 * math.log(0.8) + 0.25 * math.log(0.2))
    assert found.confidence.item() == pytest.approx(bce)
    assert found.total.item() == pytest.approx(0.1 * math.log(4) + 0.9 * 0.5 + bce)


def test_the_temperature_divides_the_logits() -> None:
    logits, confidence, target, token = laws(2, 3, 5)
    cold = draft_losses(logits, confidence, target, token, temperature=0.5, weights=LossWeights())
    twice = draft_losses(2 * logits, confidence, target, token, temperature=1.0, weights=LossWeights())
    assert cold.total.item() == pytest.approx(twice.total.item())


@pytest.mark.parametrize("gamma", [1, 5, 7])
def test_position_weights(gamma: int) -> None:
    assert position_weights(gamma).tolist() == pytest.approx([math.exp(-k / gamma) for k in range(gamma)])


def test_later_positions_weigh_less() -> None:
    gamma = 4
    logits, confidence, target, token = laws(1, 1, 6)
    one = draft_losses(logits, confidence, target, token, temperature=1.0, weights=LossWeights()).total
    tiled = [part.expand(1, gamma, *part.shape[2:]) for part in (logits, confidence, target, token)]
    many = draft_losses(*tiled, temperature=1.0, weights=LossWeights()).total
    assert many.item() / one.item() == pytest.approx(sum(math.exp(-k / gamma) for k in range(gamma)))


@pytest.mark.parametrize("mass", [1.0, 0.6])
def test_alpha_is_one_minus_the_total_variation(mass: float) -> None:
    logits, confidence, target, token = laws(3, 4, 6, mass)
    found = draft_losses(logits, confidence, target, token, temperature=TEMPERATURE, weights=LossWeights())
    p = torch.softmax(logits / TEMPERATURE, dim=-1)
    # All that the vocabulary lacks, as one more token that is never drafted.
    rest = (1 - target.sum(dim=-1, keepdim=True)).clamp(min=0)
    wide_d, wide_t = torch.cat([p, torch.zeros_like(rest)], -1), torch.cat([target, rest], -1)
    torch.testing.assert_close(found.alpha, 1 - (wide_d - wide_t).abs().sum(dim=-1) / 2)
    torch.testing.assert_close(found.alpha, torch.minimum(p, target).sum(dim=-1))
    assert not found.alpha.requires_grad


@pytest.mark.parametrize("mass", [1.0, 0.7])
@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(1, 0, 0), LossWeights(0, 1, 0), LossWeights(0, 0, 1)])
def test_value_and_gradient_are_those_of_the_plain_formulas(mass: float, weights: LossWeights) -> None:
    logits, confidence, target, token = laws(3, 4, 6, mass)
    assert (token == 6).any()  # some tokens are outside the vocabulary
    ours, theirs = (
        [part.clone().requires_grad_() for part in (logits, confidence)],
        [part.clone().requires_grad_() for part in (logits, confidence)],
    )
    found = draft_losses(*ours, target, token, temperature=TEMPERATURE, weights=weights)
    expected = plain(*theirs, target, token, weights, TEMPERATURE)
    torch.testing.assert_close(found.total, expected)
    found.total.backward()
    expected.backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_gradcheck() -> None:
    logits, _, target, token = laws(1, 5, 4, 0.8, seed=3)
    weights = LossWeights(0.3, 0.6)

    def loss(x: Tensor) -> Tensor:
        return _DraftLoss.apply(x, target[0], token[0], TEMPERATURE, weights)[0]

    assert torch.autograd.gradcheck(loss, logits[0].clone().requires_grad_())


def test_a_token_outside_the_vocabulary_has_no_cross_entropy() -> None:
    logits, confidence, target, _ = laws(2, 3, 5)
    found = draft_losses(
        logits.requires_grad_(),
        confidence,
        target,
        torch.full((2, 3), 5),
        temperature=1.0,
        weights=LossWeights(1.0, 0.0, 0.0),
    )
    found.total.backward()
    assert found.ce.item() == found.total.item() == 0
    assert not logits.grad.any()


def test_a_target_outside_the_vocabulary_gives_no_gradient_but_full_loss() -> None:
    # p_t holds nothing of the vocabulary: whatever is drafted is rejected, and no logit helps.
    logits, confidence, target, token = laws(1, 2, 4)
    found = draft_losses(
        logits.requires_grad_(),
        confidence,
        torch.zeros_like(target),
        torch.full_like(token, 4),
        temperature=1.0,
        weights=LossWeights(0.1, 1.0, 0.0),
    )
    assert found.alpha.tolist() == [[0.0, 0.0]]
    assert found.tv.item() == pytest.approx(2 * (1 + math.exp(-0.5)))
    found.total.backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits))


def test_a_perfect_draft() -> None:
    logits, confidence, _, token = laws(2, 3, 5)
    target = torch.softmax(logits, dim=-1)
    found = draft_losses(
        logits.requires_grad_(), confidence, target, token, temperature=1.0, weights=LossWeights(0.0, 1.0, 0.0)
    )
    torch.testing.assert_close(found.alpha, torch.ones(2, 3, dtype=torch.float64))
    assert found.total.item() == pytest.approx(0, abs=1e-12)
    found.total.backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits))


def test_a_hopeless_draft_stays_finite() -> None:
    logits = torch.tensor([[[200.0, -200.0]]], requires_grad=True)
    target = torch.tensor([[[0.0, 1.0]]])
    found = draft_losses(
        logits, torch.tensor([[60.0]]), target, torch.tensor([[1]]), temperature=0.5, weights=LossWeights()
    )
    assert torch.isfinite(found.total)
    found.total.backward()
    # The cross-entropy still pulls, by ce * (p - 1 at the token) / temperature.
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.2, -0.2]]]))


def test_the_confidence_learns_alpha_and_alpha_does_not_learn_from_it() -> None:
    logits, confidence, target, token = laws(2, 3, 5)
    found = draft_losses(
        logits.requires_grad_(),
        confidence.requires_grad_(),
        target,
        token,
        temperature=1.0,
        weights=LossWeights(0.0, 0.0, 1.0),
    )
    found.total.backward()
    assert not logits.grad.any()
    weight = position_weights(3).double()
    torch.testing.assert_close(confidence.grad, (torch.sigmoid(confidence.detach()) - found.alpha) * weight / 2)


def test_no_gradient_is_kept_where_none_is_asked_for() -> None:
    logits, confidence, target, token = laws(2, 3, 5)
    with torch.no_grad():
        found = draft_losses(logits, confidence, target, token, temperature=1.0, weights=LossWeights())
    assert not found.total.requires_grad
    assert found.total.item() == pytest.approx(plain(logits, confidence, target, token, LossWeights(), 1.0).item())
