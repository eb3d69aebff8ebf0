from __future__ import annotations

import numpy as np
import pytest

from dsim.errors import InputError
from dsim.policy import make_view
from policies.threshold import Threshold

# Survivals: [0.9, 0.45, 0.405], [0.6, 0.36, 0.324], [0.4, 0.4, 0.4].
BLOCK = [[0.9, 0.5, 0.9], [0.6, 0.6, 0.9], [0.4, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("t", "on", "lengths"),
    [
        (0.6, "confidence", [1, 3, 0]),
        (0.5, "confidence", [3, 3, 0]),
        (0.4, "confidence", [3, 3, 3]),
        (0.4, "survival", [3, 1, 3]),
        (0.5, "survival", [1, 1, 0]),
        (1.0, "survival", [0, 0, 0]),
        (0, "confidence", [3, 3, 3]),
        (0, "survival", [3, 3, 3]),
    ],
)
def test_run_above_the_threshold(t, on, lengths):
    assert Threshold(t=t, on=on).plan(make_view(BLOCK, np.ones(13))).tolist() == lengths


def test_a_later_good_draft_does_not_resume_the_run():
    assert Threshold(t=0.5).plan(make_view([[0.9, 0.1, 0.9]], np.ones(5))).tolist() == [1]


def test_the_threshold_itself_counts_as_reached():
    # 0.7 is not exact in binary: the comparison must happen in the precision of the confidences.
    assert Threshold(t=0.7).plan(make_view([[0.7, 0.7]], np.ones(4))).tolist() == [2]


def test_zero_threshold_verifies_hopeless_drafts_too():
    assert Threshold(t=0.0).plan(make_view([[0.0, 0.0]], np.ones(4))).tolist() == [2]


@pytest.mark.parametrize("on", ["confidence", "survival"])
def test_caps(on):
    view = make_view(BLOCK, np.ones(13), caps=[2, 0, 3])
    assert Threshold(t=0.4, on=on).plan(view).tolist() == [2, 0, 3]


@pytest.mark.parametrize("t", [-0.01, 1.01, float("nan"), float("inf"), "0.5", True, None])
def test_threshold_outside_its_range(t):
    with pytest.raises(InputError, match=r"field 't'.*expected a number in"):
        Threshold(t=t)


def test_unknown_signal():
    with pytest.raises(InputError, match="field 'on': got 'luck', expected one of confidence, survival"):
        Threshold(on="luck")
