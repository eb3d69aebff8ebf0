from __future__ import annotations

import numpy as np

from dsim.policy import make_view
from policies.dspark_alg1 import DSparkAlgorithm1


def plan(confidence, verify_ms, **kwargs):
    return DSparkAlgorithm1().plan(make_view(confidence, verify_ms, **kwargs)).tolist()


def test_by_hand():
    # Survivals 0.75, 0.375 | 0.5, 0.25; descending 0.75, 0.5, 0.375, 0.25. Step: 10 ms + 2 ms a draft.
    # Theta: 2/10 = 0.2, 2.75/12 = 0.2292, 3.25/14 = 0.2321, 3.625/16 = 0.2266: stop after two.
    verify_ms = [0, 0, 10, 12, 14, 16, 18]
    assert plan([[0.75, 0.5], [0.5, 0.5]], verify_ms) == [1, 1]


def test_a_tie_of_theta_stops():
    # tau 1, 2, 3 and 1, 2, 2.5 ms: the first draft leaves Theta at 1 and the second would raise it.
    assert plan([[1.0, 1.0]], [0, 1, 2, 2.5]) == [0]


def test_it_stops_before_a_valley():
    # Theta: 1, 2/3, 3/2.5 = 1.2: the best is never seen.
    assert plan([[1.0, 1.0]], [0, 1, 3, 2.5]) == [0]


def test_it_runs_to_the_end():
    assert plan([[1.0, 1.0], [1.0, 0.5]], np.full(7, 3.0)) == [2, 2]


def test_hopeless_drafts_are_no_candidates_even_where_they_would_make_the_step_cheaper():
    assert plan([[0.5, 0.0]], [0, 4, 4, 1]) == [1]


def test_prefill_chunks_count_in_the_step():
    # A draft opens the dearer half of the curve only where 3 prefill tokens are in the step already.
    verify_ms = [0, 1, 1, 1, 1, 9, 9, 9]
    assert plan([[0.9, 0.9]], verify_ms) == [2]
    assert plan([[0.9, 0.9]], verify_ms, prefill_tokens=3) == [0]


def test_tau_starts_at_the_requests_in_decode():
    # 2/10 -> 2.5/12 rises; with a finished prompt counted it would not: 3/10 -> 3.5/12.
    view = make_view([[0.5], [0.0]], [0, 0, 10, 12, 14])._replace(sampling=3)
    assert DSparkAlgorithm1().plan(view).tolist() == [1, 0]


def test_caps():
    assert plan([[0.9, 0.9], [0.8, 0.8]], np.ones(7), caps=[0, 1]) == [0, 1]


def test_draft_cost_does_not_count():
    verify_ms = [0, 0, 10, 12, 14, 16, 18]
    assert plan([[0.75, 0.5], [0.5, 0.5]], verify_ms, draft_ms=1000.0) == [1, 1]
