"""On captured-size prices Algorithm 1 is caught by its early stop: why the production variant exists.

A step is padded to the next captured size and costs what that costs. If R is a captured size, the first
draft opens the next one; if it is not, the padding up to there is free.
"""

from __future__ import annotations

import numpy as np
import pytest

from dsim.cost import fit
from dsim.policy import make_view
from dsim.profile import load_profile
from policies.dspark import DSpark
from policies.dspark_alg1 import DSparkAlgorithm1

GAMMA = 5
#: vLLM's captured sizes up to 1024, carried on to hold 256 whole blocks.
SIZES = np.array([1, 2, 4, *range(8, 257, 8), *range(272, 1601, 16)])
MAX_TOKENS = 1600
ON_SIZE = (16, 32, 48, 64, 96, 128, 256)


@pytest.fixture(scope="module")
def staircase():
    """Strictly rising prices: 5 ms and 0.05 ms a token of the captured size, by tokens in the step."""
    padded = SIZES[np.searchsorted(SIZES, np.arange(MAX_TOKENS + 1))]
    table = 5.0 + 0.05 * padded
    table[0] = 0.0
    return table


@pytest.fixture(scope="module")
def measured():
    """The shipped B300 profile, priced at the next captured size, running maximum."""
    model = fit(load_profile("b300x4-dsv4-flash-0731"), model="staircase", running_max=True)
    assert {16, 32, 48, 64, 96, 128, 256} <= set(model.captured_sizes.tolist())
    return model.verify_table(1, MAX_TOKENS)


def confidences(requests, kind):
    if kind == "certain":
        return np.ones((requests, GAMMA), dtype=np.float32)
    # Acceptance as the presets have it: about 0.9 at first, less and less certain along the block.
    rng = np.random.default_rng(requests)
    logits = rng.normal([2.2, 1.9, 1.7, 1.6, 1.5], 1.2, (requests, GAMMA))
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def admitted(policy, confidence, prices):
    age = policy.traits.confidence_age
    view = make_view(confidence, prices, history=(confidence,) * age)
    return int(policy.plan(view).sum())


@pytest.mark.parametrize("kind", ["certain", "typical"])
@pytest.mark.parametrize("requests", ON_SIZE)
def test_on_a_captured_size_nothing_is_admitted(requests, kind, staircase, measured):
    confidence = confidences(requests, kind)
    for prices in (staircase, measured):
        assert admitted(DSparkAlgorithm1(), confidence, prices) == 0
        # The production variant crosses the step: on both curves drafts are worth their price.
        assert admitted(DSpark(lag=2), confidence, prices) >= requests / 2


@pytest.mark.parametrize("kind", ["certain", "typical"])
def test_between_captured_sizes_no_more_than_the_free_padding(kind, staircase):
    for requests in range(16, 257):
        drafts = admitted(DSparkAlgorithm1(), confidences(requests, kind), staircase)
        assert drafts == free_padding(staircase, requests)


@pytest.mark.parametrize("kind", ["certain", "typical"])
def test_between_measured_sizes_only_gentle_steps_are_crossed(kind, measured):
    """The measured steps are uneven: some rise by less than one draft can gain (1 / tokens in the step)."""
    crossed = 0
    for requests in range(16, 257):
        drafts = admitted(DSparkAlgorithm1(), confidences(requests, kind), measured)
        free = free_padding(measured, requests)
        if drafts > free:
            full = requests + free
            assert measured[full + 1] / measured[full] - 1 < 1 / full
            crossed += 1
    # 40 of 241 with certain drafts, 29 with typical ones.
    assert crossed < 0.2 * 241


@pytest.mark.parametrize("kind", ["certain", "typical"])
def test_what_the_early_stop_costs(kind, measured):
    """Drafts admitted on the measured staircase, all batch sizes from 16 to 256 together."""
    totals = dict.fromkeys((DSparkAlgorithm1(), DSpark(lag=2)), 0)
    for requests in range(16, 257):
        for policy in totals:
            totals[policy] += admitted(policy, confidences(requests, kind), measured)
    assert totals[DSpark(lag=2)] > 20 * totals[DSparkAlgorithm1()]


def free_padding(prices, requests):
    """Drafts that fit before the price rises (over several captured sizes where they cost the same)."""
    return int(np.searchsorted(prices[requests:], prices[requests], side="right")) - 1
