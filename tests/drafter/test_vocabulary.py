"""Draft vocabularies: the most frequent tokens, end tokens always, and what a prompt adds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsim.drafter.vocabulary import choose_vocabulary, covered, vocabulary_of
from dsim.errors import InputError

COUNTS = np.array([0, 5, 3, 9, 3, 0, 1])


def test_the_most_frequent_tokens_in_ascending_order() -> None:
    assert choose_vocabulary(COUNTS, 2, frozenset()).tolist() == [1, 3]
    assert choose_vocabulary(COUNTS, 4, frozenset()).tolist() == [1, 2, 3, 4]


def test_of_tokens_that_are_equally_frequent_the_lower_one_is_taken() -> None:
    assert choose_vocabulary(COUNTS, 3, frozenset()).tolist() == [1, 2, 3]
    assert choose_vocabulary(np.zeros(6, dtype=np.int64), 2, frozenset()).tolist() == [0, 1]


def test_end_tokens_are_always_in_it() -> None:
    assert choose_vocabulary(COUNTS, 3, frozenset({5, 0})).tolist() == [0, 3, 5]
    assert choose_vocabulary(COUNTS, 2, frozenset({5, 0})).tolist() == [0, 5]


@pytest.mark.parametrize("size", [7, 8, 10_000])
def test_all_tokens(size: int) -> None:
    assert choose_vocabulary(COUNTS, size, frozenset({2})).tolist() == list(range(7))


@pytest.mark.parametrize(("size", "always", "least"), [(0, frozenset(), 1), (1, frozenset({0, 2}), 2)])
def test_too_small(size: int, always: frozenset[int], least: int) -> None:
    with pytest.raises(InputError, match=f"field 'vocabulary': got {size}, expected at least {least} tokens"):
        choose_vocabulary(COUNTS, size, always)


def test_the_counts_stay_as_they_are() -> None:
    before = COUNTS.copy()
    choose_vocabulary(COUNTS, 3, frozenset({0}))
    assert np.array_equal(COUNTS, before)


def test_covered() -> None:
    assert covered(COUNTS, np.array([1, 3])) == pytest.approx(14 / 21)
    assert covered(COUNTS, np.arange(7)) == 1.0
    assert covered(np.zeros(7, dtype=np.int64), np.arange(3)) == 0.0


def test_a_vocabulary_without_a_prompt() -> None:
    found = vocabulary_of(torch.tensor([4, 1, 6]), 8)
    assert (found.static, found.size, found.extra.tolist()) == (3, 3, [])
    assert found.tokens.tolist() == [4, 1, 6]
    assert found.local.tolist() == [3, 1, 3, 3, 0, 3, 2, 3]


def test_the_prompt_adds_its_own_tokens_once_and_in_order() -> None:
    found = vocabulary_of(torch.tensor([4, 1, 6]), 8, torch.tensor([7, 4, 0, 7, 1, 0]))
    assert (found.static, found.size, found.extra.tolist()) == (3, 5, [0, 7])
    assert found.tokens.tolist() == [4, 1, 6, 0, 7]
    # 2, 3 and 5 are outside.
    assert found.local.tolist() == [3, 1, 5, 5, 0, 5, 2, 4]
    inside = found.local[found.local < found.size]
    assert torch.equal(found.local[found.tokens], torch.arange(5))
    assert len(inside) == 5


def test_a_prompt_of_known_tokens_adds_nothing() -> None:
    tokens = torch.tensor([4, 1, 6])
    found = vocabulary_of(tokens, 8, torch.tensor([1, 6, 6]))
    assert (found.size, found.extra.numel()) == (3, 0)
    assert torch.equal(found.local, vocabulary_of(tokens, 8).local)
