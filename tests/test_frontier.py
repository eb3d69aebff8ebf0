"""Pareto fronts and matched comparisons: hand-computed numbers, invariants, bad input."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dsim.errors import InputError
from dsim.frontier import (
    SPEED,
    THROUGHPUT,
    default_anchors,
    fitted_frontier,
    frontier_curve,
    hypervolume,
    hypervolume_ratio,
    matched_runs,
    matched_table,
    matched_text,
    nondominated,
    speed_at,
    throughput_at,
)
from dsim.intervals import mean_interval


def runs(arms: dict[str, tuple[list[float], list[float]]], seeds: int = 5, spread: float = 0.0) -> pd.DataFrame:
    """One row a run: each arm's points at loads 1, 2, ...; seed s multiplies throughput by 1 + spread * s."""
    rows = [
        (arm, seed, load, x, y * (1 + spread * seed))
        for arm, (xs, ys) in arms.items()
        for seed in range(seeds)
        for load, (x, y) in enumerate(zip(xs, ys, strict=True), start=1)
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "concurrency", SPEED, THROUGHPUT])


# Throughput = 1000 / speed for the baseline; the other arm has 1.5 times that at every speed.
TWO = {
    "mtp1": ([100.0, 50.0, 20.0, 10.0], [10.0, 20.0, 50.0, 100.0]),
    "dspark": ([120.0, 60.0, 24.0, 12.0], [12.5, 25.0, 62.5, 125.0]),
}


def test_nondominated_keeps_exactly_the_front() -> None:
    x = [1.0, 2.0, 3.0, 2.0, 3.0, 1.0]
    y = [5.0, 4.0, 1.0, 4.5, 0.5, 5.0]
    #    kept  beaten kept  kept  beaten duplicate of the first
    assert nondominated(x, y).tolist() == [True, False, True, True, False, False]


def test_nondominated_of_equal_x_or_equal_y_keeps_one() -> None:
    assert nondominated([1, 1, 1], [1, 3, 2]).tolist() == [False, True, False]
    assert nondominated([1, 3, 2], [1, 1, 1]).tolist() == [False, True, False]
    assert nondominated([], []).tolist() == []


points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


@given(points)
def test_nondominated_agrees_with_the_definition(pairs: list[tuple[int, int]]) -> None:
    x, y = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    expected = []
    for i, (a, b) in enumerate(pairs):
        beaten = any(c >= a and d >= b and (c, d) != (a, b) for c, d in pairs)
        expected.append(not beaten and (a, b) not in pairs[:i])
    assert nondominated(x, y).tolist() == expected


@given(points)
def test_hypervolume_is_the_area_of_the_union(pairs: list[tuple[int, int]]) -> None:
    cells = {(i, j) for a, b in pairs for i in range(a) for j in range(b)}
    assert hypervolume([float(a) for a, _ in pairs], [float(b) for _, b in pairs]) == len(cells)


def test_throughput_is_log_log_linear_between_points_and_nothing_outside() -> None:
    curve = frontier_curve([10.0, 40.0], [100.0, 25.0])
    found = throughput_at([10.0, 20.0, 40.0, 9.99, 40.01], curve)
    np.testing.assert_allclose(found[:3], [100.0, 50.0, 25.0], rtol=1e-12)
    assert np.isnan(found[3:]).all()
    np.testing.assert_allclose(speed_at([100.0, 50.0, 25.0], curve), [10.0, 20.0, 40.0], rtol=1e-12)
    assert np.isnan(speed_at([24.9, 100.1], curve)).all()


def test_dominated_points_do_not_bend_the_curve() -> None:
    # The middle point has both less speed and less throughput than the last one.
    curve = frontier_curve([40.0, 12.0, 10.0], [50.0, 45.0, 100.0])
    assert curve.speed.tolist() == [10.0, 40.0]
    assert curve.throughput.tolist() == [100.0, 50.0]


def test_a_curve_of_one_point_is_reached_only_there() -> None:
    curve = frontier_curve([10.0], [100.0])
    assert float(throughput_at(10.0, curve)) == pytest.approx(100.0)
    assert np.isnan(throughput_at(10.1, curve))


@pytest.mark.parametrize(
    ("speed", "throughput"),
    [([], []), ([1.0, 0.0], [1.0, 1.0]), ([1.0, np.nan], [1.0, 1.0]), ([1.0], [np.inf]), ([1.0, 2.0], [1.0])],
)
def test_a_curve_refuses_what_has_no_logarithm(speed: list[float], throughput: list[float]) -> None:
    with pytest.raises(InputError):
        frontier_curve(speed, throughput)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_asking_at_a_bad_speed_is_an_error_and_not_a_gap(bad: float) -> None:
    with pytest.raises(InputError):
        throughput_at(bad, frontier_curve([10.0], [100.0]))


def test_matched_table_by_hand() -> None:
    table = matched_table(runs(TWO), speeds=[20.0, 100.0, 110.0], throughputs=[50.0])
    assert table["arm"].unique().tolist() == ["dspark"]
    at_20, at_100, at_110, at_thr = (table.iloc[i] for i in range(4))
    # At 20 tok/s/user the baseline has 50; the arm, log-log between (12, 125) and (24, 62.5), has 75.
    assert at_20["baseline_value"] == pytest.approx(50.0)
    assert at_20["value"] == pytest.approx(75.0)
    assert at_20["ratio"] == pytest.approx(1.5)
    assert (at_20["n_reached"], at_20["n_seeds"], at_20["interval"]) == (5, 5, "95 % t")
    assert at_100["ratio"] == pytest.approx(1.5)
    # The baseline never reached 110: no number is made up.
    assert at_110["n_reached"] == 0
    assert np.isnan([at_110["value"], at_110["ratio"], at_110["ratio_lo"]]).all()
    # At 50 tok/s/GPU the baseline has 20 tok/s/user and the arm 30.
    assert at_thr["matched_on"] == THROUGHPUT
    assert at_thr["ratio"] == pytest.approx(1.5)


def test_ratios_are_formed_within_a_seed() -> None:
    """A seed that is faster in both arms must not widen the interval: its ratio is the same."""
    table = matched_table(runs(TWO, spread=0.2), speeds=[50.0], throughputs=())
    assert table["ratio"].item() == pytest.approx(1.5)
    assert table["ratio_hi"].item() - table["ratio_lo"].item() == pytest.approx(0.0, abs=1e-9)
    assert table["baseline_value"].item() == pytest.approx(20.0 * 1.4)


def test_interval_over_seeds_is_student_t() -> None:
    df = runs(TWO)
    df.loc[df["arm"] == "dspark", THROUGHPUT] *= 1 + 0.01 * df.loc[df["arm"] == "dspark", "seed"]
    row = matched_table(df, speeds=[50.0], throughputs=()).iloc[0]
    ratios = 1.5 * np.array([1.0, 1.01, 1.02, 1.03, 1.04])
    half = stats.t.ppf(0.975, 4) * ratios.std(ddof=1) / np.sqrt(5)
    assert row["ratio"] == pytest.approx(ratios.mean())
    assert row["ratio_lo"] == pytest.approx(ratios.mean() - half)
    assert row["ratio_hi"] == pytest.approx(ratios.mean() + half)


def test_few_seeds_give_the_range() -> None:
    df = runs(TWO, seeds=3)
    df.loc[df["arm"] == "dspark", THROUGHPUT] *= 1 + 0.1 * df.loc[df["arm"] == "dspark", "seed"]
    row = matched_table(df, speeds=[50.0], throughputs=()).iloc[0]
    assert row["interval"] == "range"
    assert (row["ratio_lo"], row["ratio_hi"]) == (pytest.approx(1.5), pytest.approx(1.8))


def test_seeds_that_do_not_reach_an_anchor_are_counted() -> None:
    df = runs(TWO, seeds=6)
    short = (df["arm"] == "dspark") & (df["seed"] == 0) & (df["concurrency"] == 1)
    df = df[~short]  # this seed stops at 60 tok/s/user
    row = matched_table(df, speeds=[80.0], throughputs=()).iloc[0]
    assert (row["n_reached"], row["n_seeds"]) == (5, 6)
    text = matched_text(matched_table(df, speeds=[80.0, 110.0], throughputs=()))
    assert text["80 tok/s/user"].item() == "+50 % [+50, +50] (5/6)"
    assert text["110 tok/s/user"].item() == "not reached"


def test_matched_runs_has_one_row_a_seed_and_anchor() -> None:
    found = matched_runs(runs(TWO), speeds=[20.0, 50.0], throughputs=[50.0])
    assert len(found) == 5 * 3
    assert found["ratio"].to_numpy() == pytest.approx(1.5)


def test_default_anchors_are_round_operating_points_in_the_common_range() -> None:
    df = runs({"mtp1": ([104.0, 51.2, 20.4, 10.1], [10.0, 20.0, 50.0, 100.0]), "dspark": TWO["dspark"]})
    # Rounded: 100, 51, 20, 10; the arm covers 12..120 and the baseline 10.1..104.
    assert default_anchors(df)["dspark"].tolist() == [20.0, 51.0, 100.0]
    assert set(matched_table(df)["n_reached"]) == {5}


def test_default_anchors_are_at_most_five_and_shared_by_arms_of_equal_range() -> None:
    speed = np.geomspace(300.0, 40.0, 11)
    curve = (speed.tolist(), (10000 / speed).tolist())
    better = (speed.tolist(), (13000 / speed).tolist())
    anchors = default_anchors(runs({"mtp1": curve, "a": better, "b": better}))
    assert len(anchors["a"]) == 5
    assert anchors["a"].tolist() == anchors["b"].tolist()
    assert np.all(np.diff(np.log(anchors["a"])) > 0.25)  # spread, not bunched at one end


def test_default_anchors_are_topped_up_with_round_numbers() -> None:
    df = runs({"mtp1": ([100.0, 10.0], [10.0, 100.0]), "dspark": ([90.0, 20.0], [20.0, 90.0])})
    assert default_anchors(df)["dspark"].tolist() == [29.0, 42.0, 62.0]


def test_arms_without_common_range_are_listed_as_not_reached() -> None:
    df = runs({"mtp1": ([100.0, 80.0], [10.0, 20.0]), "slow": ([20.0, 10.0], [50.0, 60.0])})
    table = matched_table(df)
    assert table["n_reached"].tolist() == [0, 0]
    assert table["anchor"].isna().all()
    assert matched_text(table)["arm"].tolist() == ["slow"]


def test_hypervolume_ratio_by_hand() -> None:
    # mtp1: 10 x 100 + 10 x 50 + 30 x 20 + 50 x 10 = 2600; dspark: 12 x 125 + 12 x 62.5 + 36 x 25 + 60 x 12.5 = 3900.
    table = hypervolume_ratio(runs(TWO)).set_index("arm")
    assert table.loc["mtp1", "hypervolume"] == pytest.approx(2600.0)
    assert table.loc["dspark", "hypervolume"] == pytest.approx(3900.0)
    assert table.loc["dspark", "ratio"] == pytest.approx(1.5)
    assert table.loc["mtp1", "ratio"] == 1.0


def test_hypervolume_refuses_different_grids() -> None:
    df = runs(TWO)
    df = df[~((df["arm"] == "dspark") & (df["seed"] == 2) & (df["concurrency"] == 3))]
    with pytest.raises(InputError, match=r"arm 'dspark', seed 2.*same load grid"):
        hypervolume_ratio(df)
    with pytest.raises(InputError):
        hypervolume([-1.0], [1.0])


def _with(df: pd.DataFrame, row: int, column: str, value: float) -> pd.DataFrame:
    changed = df.copy()
    changed.loc[row, column] = value
    return changed


BAD_TABLES = {
    "a missing column": (lambda df: df.drop(columns=THROUGHPUT), "no column 'throughput_tok_s_gpu'"),
    "no baseline": (lambda df: df[df["arm"] != "mtp1"], "'mtp1' is not among the arms"),
    "no rows": (lambda df: df[:0], "table is empty"),
    "NaN": (lambda df: _with(df, 0, SPEED, np.nan), r"arm 'mtp1', seed 0.*got nan"),
    "zero": (lambda df: _with(df, 0, THROUGHPUT, 0.0), r"numbers > 0"),
    "no load": (lambda df: _with(df, 0, "concurrency", np.nan), "has no concurrency"),
    "a load twice": (lambda df: _with(df, 1, "concurrency", 1), "two runs at concurrency 1"),
    "other seeds": (lambda df: df[~((df["arm"] == "dspark") & (df["seed"] == 4))], "different seeds"),
    "text": (lambda df: df.assign(**{SPEED: "x"}), "does not hold numbers"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables_are_named(case: str) -> None:
    change, message = BAD_TABLES[case]
    with pytest.raises(InputError, match=message):
        matched_table(change(runs(TWO)))


def test_bad_anchors_and_directions_are_errors() -> None:
    with pytest.raises(InputError, match="bad anchors"):
        matched_table(runs(TWO), speeds=[-1.0])
    with pytest.raises(InputError, match="matched_on"):
        default_anchors(runs(TWO), matched_on="load")


def _cloud(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Windows below the true edge throughput = 5000 - 20 x speed; 10 % of them lie above it (q = 0.9)."""
    rng = np.random.default_rng(seed)
    speed = rng.uniform(20, 200, n)
    return speed, (5000 - 20 * speed) * np.exp(0.05 * (rng.standard_normal(n) - stats.norm.ppf(0.9)))


def test_fitted_frontier_finds_a_known_edge() -> None:
    x, y = fitted_frontier(*_cloud(8000))
    assert np.all(np.diff(x) > 0)
    assert np.all(np.diff(y) <= 0)
    inner = (x > 35) & (x < 180)
    np.testing.assert_allclose(y[inner], (5000 - 20 * x)[inner], rtol=0.03)


def test_fitted_frontier_is_falling_even_where_the_windows_rise() -> None:
    rng = np.random.default_rng(1)
    speed = rng.uniform(20, 200, 1000)
    x, y = fitted_frontier(speed, 1000 + speed)
    assert np.all(np.diff(y) <= 0)
    assert x[0] < 40
    assert x[-1] > 180


def test_fitted_frontier_resists_a_few_wild_windows() -> None:
    speed, throughput = _cloud(2000)
    wild = throughput.copy()
    wild[:10] *= 50
    _, y = fitted_frontier(speed, throughput)
    _, shifted = fitted_frontier(speed, wild)
    np.testing.assert_allclose(shifted, y, rtol=0.03)


def test_fitted_frontier_does_not_depend_on_the_order_of_windows() -> None:
    speed, throughput = _cloud(500)
    order = np.random.default_rng(2).permutation(500)
    for a, b in zip(fitted_frontier(speed, throughput), fitted_frontier(speed[order], throughput[order]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_fitted_frontier_draws_nothing_from_too_little() -> None:
    for speed, throughput in (([], []), ([10.0] * 100, list(range(1, 101))), ([np.nan] * 99, [1.0] * 99)):
        x, y = fitted_frontier(speed, throughput)
        assert x.size == y.size == 0


def test_fitted_frontier_leaves_idle_windows_out() -> None:
    speed, throughput = _cloud(500)
    with_idle = (np.r_[speed, [np.nan] * 50], np.r_[throughput, [0.0] * 50])
    np.testing.assert_array_equal(fitted_frontier(*with_idle)[1], fitted_frontier(speed, throughput)[1])


@pytest.mark.parametrize(
    "options", [{"quantile": 1.0}, {"quantile": 0.0}, {"bin_points": 1}, {"max_bins": 1}, {"points": 1}]
)
def test_fitted_frontier_refuses_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        fitted_frontier(*_cloud(100), **options)  # type: ignore[arg-type]


def test_fitted_frontier_refuses_bad_windows() -> None:
    for speed, throughput in (([1.0], [-1.0]), ([np.inf], [1.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(InputError):
            fitted_frontier(speed, throughput)


def test_mean_interval_by_hand() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0, np.nan, 5.0])
    assert (found.n, found.mean) == (5, 3.0)
    assert found.hi - found.mean == pytest.approx(2.776445 * np.sqrt(2.5 / 5), rel=1e-6)
    assert mean_interval([np.nan]).kind == "none"
    assert mean_interval([2.0]) == mean_interval([2.0, 2.0]).__class__(1, 2.0, 2.0, 2.0, "range")
    constant = mean_interval([0.1] * 7)
    assert (constant.mean, constant.lo, constant.hi) == (0.1, 0.1, 0.1)


@pytest.mark.parametrize("options", [{"level": 1.0}, {"level": 0.0}, {"min_seeds": 1}])
def test_mean_interval_refuses_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        mean_interval([1.0], **options)  # type: ignore[arg-type]


def test_mean_interval_refuses_infinity() -> None:
    with pytest.raises(InputError):
        mean_interval([1.0, np.inf])
