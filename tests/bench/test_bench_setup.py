"""What the benchmarks time, looked at without a clock: part of every test run, so that `make bench` does not rot."""

import pytest
from timed import compiled_run, one_replica

from dsim.serve import serve


@pytest.mark.parametrize("engine", ["step", "auto"])
def test_the_replica_that_is_timed_serves_long_outputs(engine):
    records = serve(engine=engine, **one_replica(2, 3, "dspark"))
    assert set(records.requests["output_tokens"]) == {800}
    assert len(records.steps["end_ns"]) > 3 * 800 / 6 / 2


def test_the_compiled_run_that_is_timed_is_full():
    pytest.importorskip("numba")
    run = compiled_run(one_replica(4, 8, "dspark"))
    run.go()
    steps, _, _ = run.tables()
    assert (steps["requests"] >= 4).mean() > 0.8
