"""The paper's Appendix A: what the early stop of Algorithm 1 is for, by exact enumeration.

One request, two drafts, SPS = 1, 0.5, 0.45 by tokens in the step, a_1 = 0.8. The vocabulary is {A, B}; the
target draws A with probability 0.7, the drafter with 0.5. After x_1 = A the drafter is sure of its second
token (c_2 = 0.9), after B it has no idea (c_2 = 0).
"""

from __future__ import annotations

import numpy as np
import pytest

from dsim.policy import BasePolicy, Traits, make_view
from policies.dspark import DSpark
from policies.dspark_alg1 import DSparkAlgorithm1

TARGET = {"A": 0.7, "B": 0.3}
DRAFT = {"A": 0.5, "B": 0.5}
NEXT_CONFIDENCE = {"A": 0.9, "B": 0.0}
STEPS_PER_SECOND = [1.0, 0.5, 0.45]


class WithoutBreak(BasePolicy):
    """Algorithm 1 with the break left out: goes on to the end and keeps the best it has seen."""

    traits = Traits(lossless=False)

    def plan(self, view):
        (survival,) = view.survival().astype(np.float64)
        tau, best, length = 1.0, 1.0 / view.verify_ms[1], 0
        for j, value in enumerate(survival, start=1):
            tau += value
            if value > 0 and tau / view.verify_ms[1 + j] > best:
                best, length = tau / view.verify_ms[1 + j], j
        return np.array([length])


def verify_length(policy, first_token, steps_per_second=STEPS_PER_SECOND):
    verify_ms = [0.0, *(1000.0 / sps for sps in steps_per_second)]
    view = make_view([[0.8, NEXT_CONFIDENCE[first_token]]], verify_ms)
    return int(policy.plan(view)[0])


def first_output(policy, steps_per_second=STEPS_PER_SECOND):
    """Distribution of the first output token, over x_1, acceptance and the residual distribution."""
    output = dict.fromkeys(TARGET, 0.0)
    shortfall = {token: max(0.0, TARGET[token] - DRAFT[token]) for token in TARGET}
    for first, drawn in DRAFT.items():
        if verify_length(policy, first, steps_per_second) == 0:
            for token, probability in TARGET.items():
                output[token] += drawn * probability
            continue
        accepted = min(1.0, TARGET[first] / DRAFT[first])
        output[first] += drawn * accepted
        for token, missing in shortfall.items():
            output[token] += drawn * (1 - accepted) * missing / sum(shortfall.values())
    return output


def test_the_assumed_acceptance():
    assert sum(min(TARGET[token], DRAFT[token]) for token in TARGET) == pytest.approx(0.8, abs=1e-12)


@pytest.mark.parametrize("policy", [WithoutBreak(), DSpark(lag=0)], ids=repr)
def test_without_the_break_the_search_is_biased(policy):
    assert verify_length(policy, "A") == 2  # Theta 1, 0.9, 1.134
    assert verify_length(policy, "B") == 0  # Theta 1, 0.9, 0.81
    output = first_output(policy)
    assert output["A"] == pytest.approx(0.85, abs=1e-12)
    assert output["B"] == pytest.approx(0.15, abs=1e-12)
    assert not policy.traits.lossless


def test_with_the_break_the_target_distribution_is_kept():
    policy = DSparkAlgorithm1()
    assert verify_length(policy, "A") == verify_length(policy, "B") == 0
    output = first_output(policy)
    assert output["A"] == pytest.approx(0.7, abs=1e-12)
    assert output["B"] == pytest.approx(0.3, abs=1e-12)
    assert policy.traits.lossless


def test_it_is_kept_as_well_where_drafts_are_admitted():
    # SPS(2) = 0.6: Theta is 1, 1.08 and 1.134 after A or 0.81 after B. The first draft is admitted either way.
    curve = [1.0, 0.6, 0.45]
    policy = DSparkAlgorithm1()
    assert (verify_length(policy, "A", curve), verify_length(policy, "B", curve)) == (2, 1)
    assert first_output(policy, curve) == pytest.approx(TARGET, abs=1e-12)


def test_the_production_variant_keeps_it_by_looking_at_the_past_only():
    """Whatever the old block was, the choice is the same for both x_1."""
    verify_ms = [0.0, *(1000.0 / sps for sps in STEPS_PER_SECOND)]
    for old, expected in (([[0.8, 0.9]], {"A": 2, "B": 1}), ([[0.8, 0.0]], {"A": 0, "B": 0})):
        for first, length in expected.items():
            now = [[0.8, NEXT_CONFIDENCE[first]]]
            view = make_view(now, verify_ms, history=(now, old))
            # After B the second draft is hopeless; the first one is verified all the same.
            assert DSpark(lag=2).plan(view).tolist() == [length]
