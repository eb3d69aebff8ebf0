from __future__ import annotations

import pytest

from dsim.errors import InputError
from dsim.scenario import Point
from dsim.schema import load_scenario
from dsim.sweep import grid, run

SMALL = {"load.users": [2, 6], "load.scored_min": 12, "load.scored_per_user": 2, "measure.seeds": 2}


@pytest.fixture(scope="module")
def scenario():
    return load_scenario("decode-node", SMALL)


def steps_of(result):
    return int(result.records.steps["end_ns"][-1])


def test_grid_is_canonical(scenario):
    points = grid(scenario, arms=["dspark", "mtp1"])
    assert points[:4] == [
        Point("dspark", 0, users=2),
        Point("dspark", 1, users=2),
        Point("dspark", 0, users=6),
        Point("dspark", 1, users=6),
    ]
    assert grid(scenario, arms=["none"], rate_scales=[2.0], seeds=[7]) == [Point("none", 7, rate_scale=2.0)]
    assert len(grid(scenario)) == 8 * 2 * 2
    with pytest.raises(InputError, match="unknown arm"):
        grid(scenario, arms=["mtp9"])


def test_same_bytes_for_one_and_two_workers(scenario, tmp_path):
    points = grid(scenario, arms=["dspark", "mtp1", "none"])
    one = run(scenario, points, jobs=1, progress=False, extract=steps_of)
    two = run(scenario, points, jobs=2, progress=False, extract=steps_of)
    assert one.table.to_csv() == two.table.to_csv()
    assert one.extracts == two.extracts
    assert one.table["arm"].tolist() == [point.arm for point in points]


def test_errors_from_workers_keep_their_fields(scenario, tmp_path):
    policy = tmp_path / "bad.py"
    policy.write_text(
        "import numpy as np\nfrom dsim.policy import BasePolicy\n"
        "class Bad(BasePolicy):\n    def plan(self, view):\n        return np.full(view.requests, 99)\n"
    )
    broken = load_scenario("decode-node", SMALL | {"arms.6.policy": f"{policy}:Bad"})
    with pytest.raises(InputError, match=r"policy Bad\(\).*got 99, expected 0\.\.5") as caught:
        run(broken, grid(broken, arms=["dspark"]), jobs=2, progress=False)
    assert caught.value.field == "verify length"
    with pytest.raises(InputError, match="jobs"):
        run(scenario, [], jobs=0)
