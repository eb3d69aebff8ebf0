from __future__ import annotations

import numpy as np
import pytest

from dsim.errors import InputError
from dsim.metrics import Slo, summarize, windows
from dsim.telemetry import REQUEST_COLUMNS, STEP_COLUMNS, Records, StepLog

MS = 1_000_000


def records():
    """Two requests, three steps, by hand (milliseconds)."""
    log = StepLog(block_rows=2)
    #       end     took   rep R  pre dr acc com first batch queue context
    log.append((10 * MS, 10 * MS, 0, 1, 0, 2, 1, 2, 0, 3, 0, 0))
    log.append((20 * MS, 10 * MS, 0, 2, 0, 4, 2, 4, 0, 6, 1, 0))
    log.append((40 * MS, 20 * MS, 0, 2, 0, 0, 0, 2, 0, 2, 0, 0))
    requests = {
        "arrival_ns": [0, 2 * MS],
        "first_ns": [1 * MS, 12 * MS],
        "finish_ns": [40 * MS, 40 * MS],
        "prompt_tokens": [5, 5],
        "output_tokens": [6, 4],
        "generated_tokens": [6, 4],
        "domain": [0, 0],
        "replica": [0, 0],
        "preemptions": [0, 1],
    }
    assert tuple(requests) == REQUEST_COLUMNS
    return Records(
        steps=log.table(),
        requests={k: np.asarray(v, dtype=np.int64) for k, v in requests.items()},
        scored=(0, 2),
        window_ns=(0, 40 * MS),
        end_ns=40 * MS,
        replicas=1,
        gpus=2,
        colocated=False,
        extrapolated=False,
    )


def test_definitions_by_hand():
    row = summarize(records(), Slo(ttft_ms=5.0, tpot_ms=8.0))
    assert row["throughput_tok_s"] == pytest.approx((8 + 2) / 0.040)  # 8 in steps, 2 first tokens from prefill
    assert row["throughput_tok_s_gpu"] == pytest.approx(125.0)
    assert row["ttft_p50_ms"] == pytest.approx((1 + 10) / 2)
    assert row["tpot_mean_ms"] == pytest.approx((39 / 5 + 28 / 3) / 2)
    assert row["tps_per_user"] == pytest.approx(1e3 / ((39 / 5 + 28 / 3) / 2))
    assert row["e2e_p50_ms"] == pytest.approx(39.0)
    assert row["accepted_length"] == pytest.approx(1 + 3 / 5)
    assert row["verification_budget"] == pytest.approx(1 + 6 / 5)
    assert row["acceptance_rate"] == pytest.approx(0.5)
    assert row["acceptance_rate_with_bonus"] == pytest.approx(8 / 11)
    assert row["wasted_tokens_per_step"] == pytest.approx(1.0)
    assert row["fallback_steps"] == 1
    assert row["goodput_rps"] == pytest.approx(1 / 0.040)  # the second misses its TTFT
    assert row["preemptions"] == 1
    # Gaps between bursts: one of 10 ms, two of 10, two of 20.
    assert row["itl_p50_ms"] == 10.0
    assert row["itl_p90_ms"] == 20.0
    assert row["itl_mean_ms"] == pytest.approx(70 / 5)
    assert row["mean_batch_requests"] == pytest.approx((1 * 10 + 2 * 10 + 2 * 20) / 40)


def test_nothing_to_stand_on_is_nan_not_zero():
    row = summarize(records())
    assert np.isnan(row["goodput_rps"])
    base = records()
    base.steps["drafts"][:] = 0
    base.steps["accepted"][:] = 0
    assert np.isnan(summarize(base)["acceptance_rate"])


def test_windows_by_hand():
    w = windows(records(), 0.020)
    assert w["time_s"].tolist() == [0.0, 0.02]
    np.testing.assert_allclose(w["throughput_tok_s_gpu"], [(6 + 2) / 0.02 / 2, 2 / 0.02 / 2])
    np.testing.assert_allclose(w["tps_per_user"], [6 / 0.030, 2 / 0.040])
    np.testing.assert_allclose(w["concurrency"], [1.5, 2.0])
    np.testing.assert_allclose(w["verification_budget"], [3.0, 1.0])
    with pytest.raises(InputError, match="window_s"):
        windows(records(), 0.0)


def test_step_log_blocks_keep_order_and_type():
    log = StepLog(block_rows=3)
    for i in range(10):
        log.append(tuple(range(i, i + len(STEP_COLUMNS))))
    table = log.table()
    assert len(log) == 10
    assert table["end_ns"].tolist() == list(range(10))
    assert all(column.dtype == np.int64 for column in table.values())
    assert StepLog().table()["end_ns"].size == 0
