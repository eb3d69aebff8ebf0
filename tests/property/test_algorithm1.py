"""Properties of Algorithm 1: equal to brute force where it must be, blind to what it must not see."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsim.policy import make_view
from policies.dspark_alg1 import DSparkAlgorithm1

# Certain, hopeless and equal drafts often; anything else now and then.
CONFIDENCE = st.one_of(
    st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), st.floats(0, 1, width=32, allow_subnormal=False)
).map(np.float32)


@st.composite
def blocks(draw, max_requests=5, max_gamma=5, elements=CONFIDENCE):
    shape = (draw(st.integers(1, max_requests)), draw(st.integers(1, max_gamma)))
    return draw(hnp.arrays(np.float32, shape, elements=elements))


@st.composite
def rough_prices(draw, tokens):
    """Any positive prices, ties and falls included."""
    return np.array([0.0, *draw(st.lists(st.integers(1, 40), min_size=tokens, max_size=tokens))]) / 4


@st.composite
def convex_prices(draw, tokens):
    """Prices that rise ever faster: Theta then rises to one maximum and falls."""
    base, slope, bend = draw(st.tuples(st.floats(0.5, 20), st.floats(0.01, 1), st.floats(0, 0.05)))
    index = np.arange(tokens + 1)
    return base + slope * index + bend * index**2


def transcription(confidence, verify_ms):
    """Algorithm 1 line by line, one candidate at a time."""
    requests, gamma = confidence.shape
    candidates = []
    for r in range(requests):
        survival = np.float32(1)
        for j in range(gamma):
            survival = np.float32(survival * confidence[r, j])
            if survival > 0:
                candidates.append((-float(survival), r, j + 1))
    candidates.sort()
    lengths, selected = [0] * requests, [0] * requests
    batch, tau = requests, float(requests)
    best = tau / verify_ms[batch]
    for negative, r, j in candidates:
        lengths[r] = j
        batch += 1
        tau += -negative
        theta = tau / verify_ms[batch]
        if theta > best:
            best = theta
            selected = lengths.copy()
        else:
            break
    return selected


def plan(confidence, verify_ms):
    return DSparkAlgorithm1().plan(make_view(confidence, verify_ms)).tolist()


def theta_of(confidence, verify_ms, lengths):
    survival = np.multiply.accumulate(confidence, axis=1).astype(np.float64)
    tau = len(lengths) + sum(survival[r, :n].sum() for r, n in enumerate(lengths))
    return tau / verify_ms[len(lengths) + sum(lengths)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_equals_its_transcription(data):
    confidence = data.draw(blocks())
    verify_ms = data.draw(rough_prices(confidence.shape[0] * (1 + confidence.shape[1])))
    lengths = plan(confidence, verify_ms)
    event(f"admits {min(sum(lengths), 3)} or more")
    assert lengths == transcription(confidence, verify_ms)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equals_brute_force_where_theta_has_one_peak(data):
    confidence = data.draw(blocks(max_requests=3, max_gamma=4))
    requests, gamma = confidence.shape
    verify_ms = data.draw(convex_prices(requests * (1 + gamma)))
    survival = np.sort(np.multiply.accumulate(confidence, axis=1).ravel().astype(np.float64))[::-1]
    tau = requests + np.concatenate([[0.0], np.cumsum(survival[survival > 0])])
    climb = np.diff(tau / verify_ms[requests : requests + tau.size])
    # Strictly up, then strictly down, nothing near level.
    assume((np.abs(climb) > 1e-9).all())
    assume(not (np.diff(np.sign(climb)) > 0).any())

    lengths = plan(confidence, verify_ms)
    every = list(itertools.product(range(gamma + 1), repeat=requests))
    values = [theta_of(confidence, verify_ms, allocation) for allocation in every]
    best = max(values)
    assert abs(theta_of(confidence, verify_ms, lengths) - best) < 1e-12 * best
    assert sum(lengths) == sum(every[int(np.argmax(values))])
    event(f"admits {min(sum(lengths), 3)} or more")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_nothing_behind_the_stop_matters(data):
    """Arbitrary confidences behind the first draft that is not admitted, for all requests at once."""
    confidence = data.draw(blocks())
    requests, gamma = confidence.shape
    verify_ms = data.draw(rough_prices(requests * (1 + gamma)))
    lengths = plan(confidence, verify_ms)
    noise = data.draw(hnp.arrays(np.float32, confidence.shape, elements=CONFIDENCE))
    behind = np.arange(gamma) > np.array(lengths)[:, None]
    assert plan(np.where(behind, noise, confidence), verify_ms) == lengths


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_drafts_not_admitted_may_as_well_be_worse(data):
    confidence = data.draw(blocks())
    requests, gamma = confidence.shape
    verify_ms = data.draw(rough_prices(requests * (1 + gamma)))
    lengths = plan(confidence, verify_ms)
    factor = data.draw(hnp.arrays(np.float32, confidence.shape, elements=CONFIDENCE))
    rejected = np.arange(gamma) >= np.array(lengths)[:, None]
    assert plan(np.where(rejected, confidence * factor, confidence), verify_ms) == lengths


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_draft_decides_about_the_ones_before_it(data):
    """Non-anticipation: min(l_r, k) depends on c_{r,1..k} only, whatever comes later."""
    confidence = data.draw(blocks())
    requests, gamma = confidence.shape
    verify_ms = data.draw(rough_prices(requests * (1 + gamma)))
    row = data.draw(st.integers(0, requests - 1))
    known = data.draw(st.integers(0, gamma))
    changed = confidence.copy()
    changed[row, known:] = data.draw(hnp.arrays(np.float32, gamma - known, elements=CONFIDENCE))
    assert min(plan(confidence, verify_ms)[row], known) == min(plan(changed, verify_ms)[row], known)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_certain_drafts_tie_and_fill_prefixes_in_order(data):
    """c = 1 exactly: all candidates tie, so they are admitted request by request, position by position."""
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    verify_ms = data.draw(rough_prices(shape[0] * (1 + shape[1])))
    lengths = plan(np.ones(shape, dtype=np.float32), verify_ms)
    admitted = sum(lengths)
    assert lengths == [min(max(admitted - r * shape[1], 0), shape[1]) for r in range(shape[0])]
    assert lengths == transcription(np.ones(shape, dtype=np.float32), verify_ms)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_higher_value_is_never_passed_over(data):
    confidence = data.draw(blocks(elements=st.sampled_from([0.5, 1.0]).map(np.float32)))
    requests, gamma = confidence.shape
    verify_ms = data.draw(convex_prices(requests * (1 + gamma)))
    lengths = np.array(plan(confidence, verify_ms))
    survival = np.multiply.accumulate(confidence, axis=1)
    admitted = np.arange(gamma) < lengths[:, None]
    if admitted.any() and not admitted.all():
        assert survival[admitted].min() >= survival[~admitted].max()
