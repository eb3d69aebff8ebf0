"""The four vLLM runs: their data, the schedule that is held fast, and a fit that finds what it should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dsim.cost.work import Machine, StepWork
from dsim.errors import InputError
from experiments import _vllm_runs as runs
from experiments import validate
from experiments._validate import error_summary
from experiments._validate_vllm_runs import statistics

WORK = StepWork(weight_bytes=15e9, token_flop=14e9, kv_bytes=131072)
TRUTH = Machine(bandwidth_gb_s=850.0, compute_tflop_s=150.0, overhead_ms=4.0, request_ms=0.05)


def made(requests=40, **changes):
    """A run whose measurements are a replay with `TRUTH`: what a perfect model would see."""
    rng = np.random.default_rng(3)
    arrival = np.concatenate([[0.0], np.cumsum(rng.exponential(0.15, requests - 1))])
    blank = runs.Run(
        name="made",
        title="made",
        work=WORK,
        memory_gb_s=1000.0,
        max_seqs=8,
        token_budget=1024,
        block_tokens=16,
        kv_blocks=None,
        arrival_s=np.round(arrival, 6),
        first_s=np.zeros(requests),
        last_s=np.zeros(requests),
        prompt=rng.integers(100, 1500, requests),
        output=rng.integers(20, 120, requests),
        series=pd.DataFrame(),
    )
    blank = replace(blank, **changes)
    first, last = runs.times_of(runs.replay(blank, runs.cost_of(blank, TRUTH)))
    return replace(blank, first_s=first, last_s=last)


def test_the_shipped_runs_are_what_was_published():
    found = {run.name: run for run in runs.load_runs()}
    assert list(found) == [
        "pro6000-llama-3.1-8b",
        "pro6000x2-qwen3-32b",
        "pro6000x2-qwen3-30b-a3b",
        "rtx4090-llama-3.1-8b",
    ]
    small, full = found["pro6000-llama-3.1-8b"], found["rtx4090-llama-3.1-8b"]
    assert {run.arrival_s.size for run in found.values()} == {300}
    # The sums and medians that the source prints for the whole run (milliseconds).
    assert (small.prompt.sum(), small.output.sum()) == (257239, 195753)
    everything = slice(0, 300)
    printed = {"pro6000-llama-3.1-8b": (9442.7, 33.4, 29615.6), "rtx4090-llama-3.1-8b": (60110.9, 30.8, 83413.3)}
    for name, medians in printed.items():
        run = found[name]
        mine = [np.median(v) for v in runs.latencies(run, run.first_s, run.last_s, everything).values()]
        assert mine == pytest.approx(medians, rel=0.002)
    # Each second's tokens add up to all of them.
    assert all(run.series["output_tokens"].sum() == run.output.sum() for run in found.values())
    assert full.kv_blocks == 2588
    assert runs.engine_of(full).kv_blocks == 2587
    pair = runs.engine_of(found["pro6000x2-qwen3-30b-a3b"])
    assert (pair.max_seqs, pair.token_budget) == (256, 4096)


def test_a_broken_file_is_named():
    names = ("a", "b")
    with pytest.raises(InputError, match=r"x\.csv, line 1.*expected a, b"):
        runs._columns("a,c\n1,2\n", "x.csv", names)
    for text, field in (("a,b\n1,2\n3,x\n", "b"), ("a,b\n1,2\n-1,2\n", "a"), ("a,b\n1,2\nnan,1\n", "a")):
        with pytest.raises(InputError, match=rf"x\.csv, line 3, field '{field}'"):
            runs._columns(text, "x.csv", names)
    with pytest.raises(InputError, match="line 2"):
        runs._columns("a,b\n1,2,3\n", "x.csv", names)


@pytest.mark.parametrize("changes", [{}, {"kv_blocks": 250}])
def test_a_schedule_held_fast_gives_back_the_replay(changes):
    run = made(**changes)
    cost = runs.cost_of(run, replace(TRUTH, overhead_ms=7.0))
    records = runs.replay(run, cost, only_half=True)
    assert (records.requests["preemptions"].sum() > 0) == bool(changes)
    replayed = runs.residuals(run, *runs.times_of(records))
    held = runs.Schedule(run, records).residuals(cost)
    assert np.abs(replayed).max() > 0.05  # the law is another one than the truth
    # The engine prices mean contexts to the nearest 64 tokens.
    assert np.abs(held - replayed).max() < 0.004


def test_only_the_fitted_half_is_replayed_and_read():
    run = made()
    cost = runs.cost_of(run, TRUTH)
    half = runs.replay(run, cost, only_half=True)
    assert (half.requests["finish_ns"][: run.half] > 0).all()
    assert half.end_ns < runs.replay(run, cost).end_ns
    # Times of the other half make no difference.
    blind = replace(run, first_s=run.first_s.copy(), last_s=run.last_s.copy())
    blind.first_s[run.half :], blind.last_s[run.half :] = 1e6, 2e6
    assert runs.fit(run, replays=4).machine == runs.fit(blind, replays=4).machine


def test_the_fit_finds_the_law_that_made_the_data():
    run = made(120)
    assert runs.misfit(runs.residuals(run, run.first_s, run.last_s)) == 0.0
    found = runs.fit(run)
    assert found.misfit < 0.003
    part = slice(run.half, run.arrival_s.size)
    records = runs.replay(run, found.cost)
    predicted = statistics(run, *runs.times_of(records), part)
    measured = statistics(run, run.first_s, run.last_s, part)
    for metric, value in predicted.items():
        assert value == pytest.approx(measured[metric], rel=0.01), metric
    assert found.machine.compute_tflop_s == pytest.approx(TRUTH.compute_tflop_s, rel=0.03)


def test_without_a_mechanism_that_matters_the_misfit_grows():
    run = made(120)
    variants = {variant.name: variant for variant in runs.ABLATIONS}
    full = runs.fit(run).misfit
    assert runs.fit(run, variants["no-compute"]).misfit > 20 * full
    assert runs.fit(run, variants["admit-at-once"]).misfit > 5 * full
    assert not variants["no-link"].applies(run)
    assert not variants["no-kv-limit"].applies(run)


def test_statistics_by_hand():
    run = made(requests=4)
    run = replace(
        run,
        arrival_s=np.array([0.0, 1.0, 2.0, 3.0]),
        output=np.array([5, 5, 11, 21]),
        first_s=np.array([0.5, 1.5, 3.0, 5.0]),
        last_s=np.array([1.0, 2.0, 4.0, 7.0]),
    )
    found = statistics(run, run.first_s, run.last_s, slice(2, 4))
    assert found["throughput_tok_s"] == pytest.approx(32 / 5)
    assert found["ttft_p50_ms"] == pytest.approx(1500.0)
    assert found["tpot_p50_ms"] == pytest.approx(100.0)
    assert found["e2e_p99_ms"] == pytest.approx(2000 + 0.99 * 2000)


@pytest.mark.slow
def test_the_case_predicts_again_what_is_shipped(tmp_path):
    """Every fit and replay; the shipped numbers come from the same code, perhaps on another machine."""
    validate.main(["--case", "vllm-four-runs", "--out", str(tmp_path)])
    table = pd.read_csv(tmp_path / "validation.csv", keep_default_na=False, na_values=[""])
    overall = error_summary(table).set_index("metric").loc["all"]
    assert (overall["within"], overall["n_target"]) == (12, 12)
    known = validate.shipped()["vllm-four-runs"][1]["validation"]
    assert table["predicted"].to_numpy() == pytest.approx(known["predicted"].to_numpy(), rel=0.05)
