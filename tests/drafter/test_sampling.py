"""Inverse transform sampling: its law, zero probabilities, the edges of u, weights that do not sum to one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dsim.drafter.sampling import pick


def draw(weights: list[float], u: list[float]) -> list[int]:
    return pick(torch.tensor(weights).expand(len(u), -1), torch.tensor(u, dtype=torch.float64)).tolist()


def test_the_first_token_whose_cumulative_probability_exceeds_u() -> None:
    assert draw([0.25, 0.5, 0.25], [0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999]) == [0, 0, 1, 1, 2, 2]


def test_law_over_many_draws() -> None:
    weights = torch.softmax(torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2, dim=0)
    u = torch.from_numpy(np.random.default_rng(5).random(40_000))
    counts = np.bincount(pick(weights.expand(len(u), -1), u).numpy(), minlength=12)
    expected = weights.double().numpy()
    assert stats.chisquare(counts, expected / expected.sum() * len(u)).pvalue > 0.01


def test_an_even_grid_of_u_gives_each_token_its_share_exactly() -> None:
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = pick(torch.tensor([0.1, 0.0, 0.7, 0.2]).expand(1000, -1), u)
    assert np.bincount(drawn.numpy(), minlength=4).tolist() == [100, 0, 700, 200]


@pytest.mark.parametrize("u", [0.0, 0.3, 0.5, 1 - 2**-53])
def test_tokens_of_probability_zero_are_never_drawn(u: float) -> None:
    assert draw([0.0, 0.0, 1.0, 0.0], [u]) == [2]
    assert draw([0.0, 0.5, 0.0, 0.5, 0.0], [u]) == [1 if u < 0.5 else 3]


def test_u_just_below_one_ends_at_the_last_token_with_mass() -> None:
    # u times the total rounds up to the total itself: no cumulative probability exceeds it.
    edge = 1 - 2**-53
    for total in (1.0, 0.1, 3e-30):
        weights = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64) * total
        assert pick(weights, torch.tensor(edge, dtype=torch.float64)).item() == 1
    many = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    many[-7:] = 0
    assert pick(many, torch.tensor(1.0, dtype=torch.float64)).item() == 4992


def test_weights_need_not_sum_to_one() -> None:
    u = [0.0, 0.2, 0.24, 0.26, 0.7, 0.76]
    assert draw([0.1, 0.2, 0.1], u) == draw([25.0, 50.0, 25.0], u) == [0, 0, 0, 1, 1, 2]


def test_leading_dimensions_are_kept() -> None:
    weights = torch.eye(4).reshape(2, 2, 4)
    drawn = pick(weights, torch.full((2, 2), 0.5, dtype=torch.float64))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [[0, 1], [2, 3]]


def test_half_precision_weights_are_added_up_in_double() -> None:
    # In bfloat16 the running sum would stop growing at 256 times the step.
    drawn = pick(torch.ones(4096, dtype=torch.bfloat16), torch.tensor(0.75, dtype=torch.float64))
    assert drawn.item() == 3072
