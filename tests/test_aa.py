"""The A/A check on the simulator itself: the same arm against itself on other seeds."""

from __future__ import annotations

import numpy as np
import pytest

from dsim.compare import paired
from dsim.schema import load_scenario
from dsim.sweep import grid, run


@pytest.mark.slow
def test_a_against_a_is_called_different_about_one_time_in_twenty():
    """48 replications, many random pairs of ten against ten others: the rate of "differences" is near alpha."""
    scenario = load_scenario("decode-node", {"load.scored_min": 40, "load.scored_per_user": 4})
    points = grid(scenario, arms=["dspark"], users=[8], seeds=range(48))
    values = run(scenario, points, jobs=2, progress=False).table["throughput_tok_s_gpu"].to_numpy()
    assert np.unique(values).size == 48
    rng = np.random.default_rng(0)
    draws = [rng.permutation(48)[:20] for _ in range(600)]
    shown = np.mean([paired(values[draw[:10]], values[draw[10:]]).p < 0.05 for draw in draws])
    # The draws share runs, so the rate scatters more than 600 independent ones would.
    assert 0.01 < shown < 0.10
