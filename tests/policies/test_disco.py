"""Hand-computed: up to and including the first draft below the threshold."""

from __future__ import annotations

import numpy as np
import pytest

from dsim.errors import InputError
from dsim.policy import Traits, load_policy, make_view
from policies.disco import Disco
from policies.threshold import Threshold


def plan(policy, now, **kwargs):
    return policy.plan(make_view(now, np.ones(64), **kwargs)).tolist()


def test_the_draft_that_fails_is_verified_too():
    now = [[0.75, 0.75, 0.25, 0.75], [0.25, 0.75, 0.75, 0.75], [0.75, 0.75, 0.75, 0.25], [0.75, 0.75, 0.75, 0.75]]
    assert plan(Disco(t=0.5), now) == [3, 1, 4, 4]
    assert plan(Threshold(t=0.5), now) == [2, 0, 3, 4]


def test_the_threshold_itself_goes_on():
    assert plan(Disco(t=0.5), [[0.5, 0.49, 0.9]]) == [2]


def test_the_signal_is_the_confidence_and_not_the_survival():
    # Survivals 0.6, 0.36, 0.216: a stop at 0.5 by survival would be after the second.
    assert plan(Disco(t=0.5), [[0.6, 0.6, 0.6, 0.6]]) == [4]


def test_no_draft_decides_about_itself():
    # Whatever its own confidence, draft k is verified as the ones before it say.
    for k in range(3):
        lengths = set()
        for own in (0.0, 1.0):
            now = [0.9, 0.9, 0.9]
            now[k] = own
            lengths.add(min(plan(Disco(t=0.5), [now])[0], k + 1))
        assert lengths == {k + 1}


def test_caps_blocks_of_one_and_unknown_confidences():
    assert plan(Disco(t=0.5), [[0.9, 0.9], [0.1, 0.1], [0.9, 0.9]], caps=[0, 0, 1]) == [0, 0, 1]
    assert plan(Disco(t=0.5), [[0.9], [0.1]]) == [1, 1]
    assert plan(Disco(t=0.5), [[np.nan, 0.9]]) == [1]
    assert plan(Disco(t=0), [[0.0, 0.0]]) == [2]


def test_spec_and_traits():
    assert load_policy("disco:t=0.25") == Disco(t=0.25)
    assert Disco().t == 0.4
    assert Disco().traits == Traits(cost_driven=False, floor=1)


@pytest.mark.parametrize("t", [-0.1, 1.1, float("nan"), True, "0.5", None])
def test_threshold_that_is_no_probability(t):
    with pytest.raises(InputError, match=r"field 't'.*expected a number in \[0, 1\]"):
        Disco(t=t)
