"""Array helpers of the planners against plain references."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dsim.planning
from dsim.planning import (
    allowed,
    best_count,
    count_rows,
    cumulative_value,
    descending,
    first_non_gain,
    leading_run,
    top_k,
)

# Few levels, so that ties, zeros and ones are common; 0.1 and 0.7 are not exact in float32.
LEVELS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.7, 1.0])


@st.composite
def survivals(draw, max_requests=6, max_gamma=6, levels=LEVELS):
    shape = (draw(st.integers(0, max_requests)), draw(st.integers(0, max_gamma)))
    confidence = draw(hnp.arrays(np.float32, shape, elements=levels.map(np.float32)))
    return np.multiply.accumulate(confidence, axis=1)


def reference_top_k(survival, k, caps=None):
    """The definition: the first k of a stable argsort of the candidates that exist."""
    requests, gamma = survival.shape
    exists = survival > 0
    if caps is not None:
        exists &= np.arange(gamma) < np.asarray(caps)[:, None]
    keys = np.where(exists, -survival, np.inf).ravel()
    best = np.argsort(keys, kind="stable")[: min(k, int(exists.sum()))]
    return np.bincount(best // max(gamma, 1), minlength=requests)[:requests]


def assert_prefixes_are_best(survival, lengths):
    """What is admitted is worth at least as much as what is not."""
    admitted = np.arange(survival.shape[1]) < lengths[:, None]
    if admitted.any() and not admitted.all():
        assert survival[admitted].min() >= survival[~admitted].max()


@settings(deadline=None)
@given(survivals(), st.integers(0, 40))
def test_top_k_equals_the_stable_argsort(survival, k):
    lengths = top_k(survival, k)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == reference_top_k(survival, k).tolist()
    assert_prefixes_are_best(survival, lengths)


@settings(deadline=None)
@given(survivals(), st.integers(0, 40), st.data())
def test_top_k_under_caps(survival, k, data):
    requests, gamma = survival.shape
    caps = data.draw(hnp.arrays(np.int64, requests, elements=st.integers(0, gamma)))
    assert top_k(survival, k, caps).tolist() == reference_top_k(survival, k, caps).tolist()
    assert top_k(survival * allowed(caps, gamma), k).tolist() == top_k(survival, k, caps).tolist()


@pytest.mark.parametrize("requests", [1, 8, 51, 52, 256])
@pytest.mark.parametrize("digits", [1, 7])
def test_top_k_in_batches_small_and_large(requests, digits):
    # 51 and 52 requests of 5 drafts lie on either side of the switch from sorting to partitioning.
    rng = np.random.default_rng(requests)
    confidence = rng.uniform(0, 1, (requests, 5)).round(digits).astype(np.float32)
    confidence[::3, 0] = 1.0
    survival = np.multiply.accumulate(confidence, axis=1)
    for k in {0, 1, requests, 2 * requests, 5 * requests - 1, 5 * requests, 6 * requests}:
        assert top_k(survival, k).tolist() == reference_top_k(survival, k).tolist()


def test_top_k_breaks_ties_in_reading_order():
    survival = np.array([[0.5, 0.5, 0.25], [1.0, 0.5, 0.5]], dtype=np.float32)
    assert [top_k(survival, k).tolist() for k in range(7)] == [
        [0, 0], [0, 1], [1, 1], [2, 1], [2, 2], [2, 3], [3, 3],
    ]  # fmt: skip


def test_top_k_of_certain_drafts_fills_whole_prefixes():
    assert top_k(np.ones((3, 4), dtype=np.float32), 6).tolist() == [4, 2, 0]


def test_top_k_reads_columns_order_alike():
    survival = np.asfortranarray(np.array([[0.5, 0.5], [0.5, 0.5]], dtype=np.float32))
    assert top_k(survival, 3).tolist() == [2, 1]


def test_top_k_admits_no_candidate_of_value_zero():
    assert top_k(np.array([[0.5, 0.0], [0.0, 0.0]]), 3).tolist() == [1, 0]


def test_top_k_leaves_its_input_alone():
    survival = np.array([[0.5, 0.5], [0.5, 0.25]])
    survival.flags.writeable = False
    assert top_k(survival, 2, np.array([1, 1])).tolist() == [1, 1]


@settings(deadline=None)
@given(survivals(), st.integers(0, 300))
def test_cumulative_value_is_the_sequential_sum(survival, start):
    expected, total = [float(start)], float(start)
    for value in sorted((float(v) for v in survival.ravel() if v > 0), reverse=True):
        total += value
        expected.append(total)
    assert cumulative_value(survival, start).tolist() == expected  # bit for bit


def test_cumulative_value_adds_in_double_precision():
    thirds = np.full((100, 5), 1 / 3, dtype=np.float32)
    assert cumulative_value(thirds)[-1] == pytest.approx(500 * float(np.float32(1 / 3)), rel=1e-14)


@settings(deadline=None)
@given(survivals())
def test_descending(survival):
    result = descending(survival)
    assert result.dtype == np.float64
    assert result.tolist() == sorted(survival.ravel().tolist(), reverse=True)


def test_rows_and_runs():
    mask = np.array([[True, True, False, True], [False, True, True, True], [True] * 4])
    assert count_rows(mask).tolist() == [3, 3, 4]
    assert leading_run(mask).tolist() == [2, 0, 4]
    assert count_rows(mask).dtype == leading_run(mask).dtype == np.int64


@pytest.mark.parametrize(
    ("objective", "stop"),
    [
        ([5.0], 0),
        ([1.0, 2.0], 1),
        ([2.0, 1.0, 9.0], 0),
        ([1.0, 1.0, 9.0], 0),
        ([1.0, 2.0, 3.0], 2),
        ([1.0, 2.0, 2.0, 3.0], 1),
    ],
)
def test_first_non_gain(objective, stop):
    assert first_non_gain(np.array(objective)) == stop


def test_nothing_to_plan():
    for shape in ((0, 5), (3, 0), (0, 0)):
        empty = np.ones(shape, dtype=np.float32)
        assert top_k(empty, 4).tolist() == [0] * shape[0]
        assert cumulative_value(empty, start=3).tolist() == [3.0]
        assert count_rows(empty > 0).tolist() == [0] * shape[0]
        assert leading_run(empty > 0).tolist() == [0] * shape[0]


def test_examples_in_the_docstrings():
    result = doctest.testmod(dsim.planning)
    assert result.attempted >= 7
    assert result.failed == 0


@pytest.mark.parametrize("gamma", [1, 3, 5, 7])
@pytest.mark.parametrize("requests", [1, 2, 6, 9, 40])
def test_lists_and_arrays_give_the_same_answers(requests, gamma, monkeypatch):
    """Small batches take a path through lists; it must not be told apart, ties and zeros included."""
    rng = np.random.default_rng(requests * 10 + gamma)
    for _ in range(60):
        confidence = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0, *rng.random(3)], size=(requests, gamma))
        survival = np.multiply.accumulate(confidence.astype(np.float32), axis=1)
        steps = rng.choice([0.0, 0.0, 0.1, 0.5], size=requests * gamma + 1)
        prices = 5.0 + np.cumsum(steps)
        k = int(rng.integers(0, requests * gamma + 2))
        answers = []
        for limit in (0, 10_000):
            monkeypatch.setattr(dsim.planning, "_LIST_UP_TO", limit)
            answers.append((best_count(survival, requests, prices), top_k(survival, k).tolist()))
        assert answers[0] == answers[1]
        tau = [float(requests)]
        for value in sorted((float(v) for v in survival.ravel() if v > 0), reverse=True):
            tau.append(tau[-1] + value)
        rates = [t / ms for t, ms in zip(tau, prices.tolist(), strict=False)]
        assert answers[0][0] == rates.index(max(rates))
