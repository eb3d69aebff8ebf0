"""Paired A/B statistics: hand-computed numbers, the verdict's words, and the error rates that it claims."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from dsim.compare import better_direction, compare, holm, paired, verdict
from dsim.errors import InputError

TPOT = "tpot_p50_ms"
THR = "throughput_tok_s_gpu"


def frame(values: dict[str, list[float]], seeds: list[int] | None = None) -> pd.DataFrame:
    n = len(next(iter(values.values())))
    return pd.DataFrame({"seed": seeds if seeds is not None else list(range(n)), **values})


def test_paired_by_hand() -> None:
    # Differences 1, 2, 3, 4, 5: mean 3, standard error sqrt(2.5 / 5), t = 4.2426 on 4 degrees of freedom.
    found = paired([10, 20, 30, 40, 50], [11, 22, 33, 44, 55])
    assert (found.n, found.n_seeds, found.kind) == (5, 5, "95 % t")
    assert (found.mean_a, found.mean_b, found.difference) == (30.0, 33.0, 3.0)
    half = 2.7764451 * np.sqrt(0.5)
    assert (found.lo, found.hi) == (pytest.approx(3 - half), pytest.approx(3 + half))
    assert found.relative == pytest.approx(0.1)
    assert found.relative_lo == pytest.approx((3 - half) / 30)
    assert found.p == pytest.approx(0.013236, abs=1e-6)


def test_paired_agrees_with_scipy() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(100, 5, 12), rng.normal(101, 5, 12)
    found = paired(a, b)
    wanted = stats.ttest_rel(b, a)
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-9)
    assert (found.lo, found.hi) == pytest.approx(tuple(wanted.confidence_interval(0.95)), rel=1e-9)


def test_pairs_go_by_seed_and_not_by_row() -> None:
    a = pd.Series([1.0, 2.0, 3.0, 4.0, 5.0], index=[3, 1, 4, 0, 2])
    b = (a + 1)[::-1]
    found = paired(a, b)
    assert (found.difference, found.lo, found.hi) == (1.0, 1.0, 1.0)


def test_identical_arms_give_exactly_nothing() -> None:
    values = [0.1, 0.2, 0.3, 0.1 + 0.2, 1e-9, 7.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = paired(values, values)
        table = compare(frame({TPOT: values}), frame({TPOT: values}), [TPOT], TPOT)
    assert (found.difference, found.lo, found.hi, found.relative, found.p) == (0.0, 0.0, 0.0, 0.0, 1.0)
    assert table["outcome"].item() == "no difference shown"
    assert verdict(table) == (
        "no difference shown between A and B on tpot_p50_ms: 0.0 % [0.0, 0.0] (6 seeds, p = 1.00)"
    )


def test_a_constant_difference_needs_no_spread_to_be_one() -> None:
    found = paired([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0, 6.0])
    assert (found.difference, found.lo, found.hi, found.p) == (1.0, 1.0, 1.0, 0.0)


def test_unmeasured_pairs_are_left_out_and_counted() -> None:
    found = paired([1, 2, np.nan, 4, 5, 6, 7], [2, 4, 6, np.nan, 10, 12, 14])
    assert (found.n, found.n_seeds) == (5, 7)
    assert found.difference == pytest.approx((1 + 2 + 5 + 6 + 7) / 5)
    nothing = paired([np.nan] * 6, [1.0] * 6)
    assert (nothing.n, nothing.kind) == (0, "none")
    assert np.isnan(nothing.p)


def test_relative_difference_to_nothing_is_not_a_number() -> None:
    found = paired([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert np.isnan(found.relative)
    text = verdict(compare(frame({"wasted": [0.0] * 5}), frame({"wasted": [1.0, 2, 3, 4, 5]}), ["wasted"], "wasted"))
    assert text == "B is worse than A by 3.0 [1.0, 5.0] on wasted (5 seeds, p = 0.013)"


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (pd.Series([1.0, 2.0], index=[0, 1]), pd.Series([1.0, 2.0], index=[0, 2]), "different seeds"),
        (pd.Series([1.0, 2.0], index=[0, 0]), pd.Series([1.0, 2.0], index=[0, 1]), "seed 0 twice"),
        ([1.0, 2.0], [1.0], "do not match"),
        ([1.0, np.inf], [1.0, 2.0], "infinite"),
    ],
)
def test_bad_pairs_are_errors(a: object, b: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        paired(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1])
def test_bad_alpha_is_an_error(alpha: float) -> None:
    with pytest.raises(InputError, match="alpha"):
        paired([1.0], [1.0], alpha=alpha)


def test_holm_by_hand() -> None:
    # 0.01 x 4, 0.013 x 3 (not below the one before), 0.03 x 2, 0.5 x 1.
    assert holm([0.03, 0.01, 0.5, 0.013]) == pytest.approx([0.06, 0.04, 0.5, 0.04])
    adjusted = holm([0.01, float("nan"), 0.02])
    assert adjusted[0] == pytest.approx(0.02)
    assert np.isnan(adjusted[1])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_directions_come_from_names_or_from_the_caller() -> None:
    assert better_direction("ttft_p99_ms") == "lower"
    assert better_direction("goodput_tok_s") == "higher"
    assert better_direction("verification_budget") == "neither"
    with pytest.raises(InputError, match="which way is better for 'color'"):
        better_direction("color")
    same = frame({"color": [1.0] * 5})
    assert compare(same, same, {"color": "lower"}, "color")["better"].item() == "lower"
    with pytest.raises(InputError, match="direction of 'color'"):
        compare(same, same, {"color": "up"}, "color")  # type: ignore[dict-item]
    with pytest.raises(InputError, match="metrics"):
        compare(same, same, "color", "color")


def test_primary_is_tested_alone_and_the_rest_by_holm() -> None:
    a = {name: [0.0] * 6 for name in ("throughput", "tpot", "ttft", "goodput")}
    moves = np.array([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])  # p = 0.0028
    weak = np.array([2.0, -1.0, 3.0, 0.5, 2.5, -0.5])  # p = 0.17
    edge = np.array([1.0, 0.2, 3.0, -0.2, 2.0, 0.6])  # p = 0.074
    b = {"throughput": edge, "tpot": moves, "ttft": weak, "goodput": np.full(6, np.nan)}
    table = compare(frame(a), frame({k: list(v) for k, v in b.items()}), list(a), "throughput").set_index("metric")
    assert table.index[0] == "throughput"
    assert table["role"].tolist() == ["primary", "secondary", "secondary", "secondary"]
    p = {name: stats.ttest_1samp(values, 0.0).pvalue for name, values in b.items() if name != "goodput"}
    assert table.loc["throughput", "p_adjusted"] == pytest.approx(p["throughput"])
    assert table.loc["tpot", "p_adjusted"] == pytest.approx(2 * p["tpot"])  # two tested: goodput was not
    assert table.loc["ttft", "p_adjusted"] == pytest.approx(max(p["ttft"], 2 * p["tpot"]))
    assert table["outcome"].tolist() == ["no difference shown", "B worse", "no difference shown", "not measured"]


def test_verdict_says_faster_better_worse_and_by_how_much() -> None:
    base = np.array([100.0, 110.0, 90.0, 105.0, 95.0])
    a, b = frame({TPOT: list(base), THR: list(base)}), frame({TPOT: list(0.9 * base), THR: list(1.1 * base)})
    assert verdict(compare(a, b, [THR], TPOT)).startswith("B is faster than A by 10.0 % [9.0, 11.0] on tpot_p50_ms")
    assert verdict(compare(b, a, [THR], TPOT)).startswith("B is slower than A by 11.1 %")
    assert verdict(compare(a, b, [TPOT], THR), "mtp1", "dspark").startswith("dspark is better than mtp1 by 10.0 %")
    assert verdict(compare(b, a, [TPOT], THR)).startswith("B is worse than A by 9.1 %")
    assert "(5 seeds, p < 0.001)" in verdict(compare(a, b, [TPOT], THR))
    neutral = compare(a, b, {TPOT: "neither"}, TPOT)
    assert neutral["outcome"].item() == "B lower"
    assert verdict(neutral).startswith("B is lower than A by 10.0 %")


def test_below_five_seeds_there_is_a_range_and_no_verdict() -> None:
    a, b = frame({THR: [100.0, 200.0, 300.0]}), frame({THR: [110.0, 205.0, 330.0]})
    table = compare(a, b, [THR], THR)
    assert table["outcome"].item() == "range only"
    assert np.isnan(table["p"].item())
    assert (table["lo"].item(), table["hi"].item()) == (5.0, 30.0)
    assert verdict(table) == ("3 seeds: range only, no verdict: B - A on throughput_tok_s_gpu is +2.5 to +15.0 %")
    one = compare(a[:1], b[:1], [THR], THR)
    assert verdict(one).startswith("1 seed: range only, no verdict")


def test_a_metric_that_was_never_measured_is_said_to_be_so() -> None:
    a = frame({"ttft_p50_ms": [np.nan] * 6})
    assert verdict(compare(a, a, [], "ttft_p50_ms")) == (
        "not measured: ttft_p50_ms has a value in both A and B in 0 of 6 seeds"
    )


def test_an_a_a_check_pairs_by_replication() -> None:
    a, b = frame({THR: [1.0] * 5}, [0, 1, 2, 3, 4]), frame({THR: [1.0] * 5}, [5, 6, 7, 8, 9])
    with pytest.raises(InputError, match="different seeds"):
        compare(a, b, [THR], THR)
    a["replication"] = b["replication"] = range(5)
    assert compare(a, b, [THR], THR, unit="replication")["n"].item() == 5


def test_bad_tables_are_errors() -> None:
    a = frame({THR: [1.0] * 5})
    with pytest.raises(InputError, match="runs of B have no column 'throughput_tok_s_gpu'"):
        compare(a, a.drop(columns=THR), [THR], THR)
    with pytest.raises(InputError, match="does not hold numbers"):
        compare(a, a.assign(**{THR: "x"}), [THR], THR)
    with pytest.raises(InputError, match="primary"):
        verdict(compare(a, a, [THR], THR)[:0])


def _draw(rng: np.random.Generator, seeds: int, metrics: int) -> tuple[np.ndarray, np.ndarray]:
    """A/A data as replications give it: a common part a seed (the trace slice), a part a run, metrics correlated."""
    common = rng.normal(0, 5, (seeds, 1))

    def noise() -> np.ndarray:
        return rng.normal(0, 1, (seeds, 1)) * 0.7 + rng.normal(0, 1, (seeds, metrics))

    return 100 + common + noise(), 100 + common + noise()


@pytest.mark.parametrize("seeds", [5, 10])
def test_a_a_draws_are_called_different_about_alpha_of_the_time(seeds: int) -> None:
    rng = np.random.default_rng(20)
    draws = 1500
    called = inside = 0
    for _ in range(draws):
        a, b = _draw(rng, seeds, 1)
        found = paired(a[:, 0], b[:, 0])
        called += found.p <= 0.05
        inside += found.lo <= 0.0 <= found.hi
    four_sigma = 4 * np.sqrt(0.05 * 0.95 / draws)
    assert abs(called / draws - 0.05) < four_sigma
    assert inside == draws - called  # the interval and the test are the same statement


def test_a_real_difference_is_found_and_covered() -> None:
    rng = np.random.default_rng(21)
    found, covered, draws = 0, 0, 1000
    for _ in range(draws):
        a, b = _draw(rng, 10, 1)
        result = paired(a[:, 0], b[:, 0] + 3.0)
        found += result.p <= 0.05 and result.difference > 0
        covered += result.lo <= 3.0 <= result.hi
    assert found / draws > 0.9
    assert abs(covered / draws - 0.95) < 4 * np.sqrt(0.05 * 0.95 / draws)


@pytest.mark.slow
def test_no_secondary_metric_is_called_different_more_often_than_alpha() -> None:
    """Eight secondary metrics together stay at or below alpha; untouched p-values would be at about 0.25."""
    rng = np.random.default_rng(22)
    names = ["throughput", *(f"tpot_{i}" for i in range(8))]
    family, uncorrected, primary, draws = 0, 0, 0, 600
    for _ in range(draws):
        a, b = _draw(rng, 10, len(names))
        a_df = pd.DataFrame(a, columns=names).assign(seed=range(10))
        b_df = pd.DataFrame(b, columns=names).assign(seed=range(10))
        table = compare(a_df, b_df, names, "throughput")
        shown = table["outcome"].isin(["B better", "B worse"])
        primary += bool(shown[0])
        family += bool(shown[1:].any())
        uncorrected += bool((table["p"][1:] <= 0.05).any())
    margin = 4 * np.sqrt(0.05 * 0.95 / draws)
    assert abs(primary / draws - 0.05) < margin
    assert family / draws < 0.05 + margin
    assert uncorrected / draws > 0.12
