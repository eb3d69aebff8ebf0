"""Pareto fronts of speed (tok/s/user) against throughput (tok/s/GPU), and what two arms have at equal speed.

A run gives one point: `tps_per_user` to the right, `throughput_tok_s_gpu` upwards, both to be maximized.
The runs of one arm and one seed over all loads give a curve. Arms are compared where they are equal in one of
the two quantities, seed by seed, and never beyond the points that were run. `docs/statistics.md` gives the
reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy

from dsim.errors import InputError
from dsim.intervals import LEVEL, mean_interval
from dsim.wording import signed

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SPEED = "tps_per_user"
THROUGHPUT = "throughput_tok_s_gpu"
LOAD = "concurrency"

#: Most and fewest default anchors for one arm.
MAX_ANCHORS = 5
MIN_ANCHORS = 3


def nondominated(x: npt.ArrayLike, y: npt.ArrayLike) -> BoolArray:
    """Which points no other point beats, when both coordinates are to be maximized.

    A point is dominated when another one is at least as good in both coordinates and better in one. Of
    several equal points the first in input order is kept.

    Parameters
    ----------
    x, y
        [n] coordinates, finite.

    Returns
    -------
    bool[n]

    Raises
    ------
    InputError
        Different lengths or a value that is not finite.

    Examples
    --------
    >>> nondominated([1, 2, 3, 2], [3, 2, 1, 1]).tolist()
    [True, True, True, False]
    """
    xs, ys = _points(x, y, "x", "y")
    mask = np.zeros(xs.size, dtype=np.bool_)
    best = -np.inf
    # From right to left, higher first among equal x, input order among equal points: a point stays exactly
    # when it is higher than everything that is at least as far to the right.
    for index in np.lexsort((np.arange(xs.size), -ys, -xs)):
        if ys[index] > best:
            mask[index] = True
            best = ys[index]
    return mask


@dataclass(frozen=True, slots=True)
class Curve:
    """Non-dominated points of one arm and one seed.

    Attributes
    ----------
    speed
        float64[m] tok/s/user, strictly rising.
    throughput
        float64[m] tok/s/GPU, strictly falling.
    """

    speed: FloatArray
    throughput: FloatArray


def frontier_curve(speed: npt.ArrayLike, throughput: npt.ArrayLike) -> Curve:
    """The non-dominated points of one seed, in order of speed.

    Parameters
    ----------
    speed, throughput
        [n] tok/s/user and tok/s/GPU of the runs of one arm and one seed; n >= 1, finite and > 0 (logarithms
        are taken).

    Raises
    ------
    InputError
        No point, different lengths, or a value that is not a finite number above 0.
    """
    xs, ys = _points(speed, throughput, SPEED, THROUGHPUT)
    if xs.size == 0:
        raise InputError("no run", field=SPEED, expected="at least one point for a curve")
    for name, values in ((SPEED, xs), (THROUGHPUT, ys)):
        if (values <= 0).any():
            raise InputError(field=name, value=float(values.min()), expected="numbers > 0")
    keep = np.flatnonzero(nondominated(xs, ys))
    keep = keep[np.argsort(xs[keep], kind="stable")]
    return Curve(xs[keep], ys[keep])


def throughput_at(speed: npt.ArrayLike, curve: Curve) -> FloatArray:
    """Throughput of one seed at given speeds: linear between neighboring points in log-log coordinates.

    Parameters
    ----------
    speed
        tok/s/user, any shape, > 0.
    curve
        From `frontier_curve`.

    Returns
    -------
    float64 in the shape of `speed`
        tok/s/GPU; NaN ("not reached") outside the curve's own range: nothing is extrapolated.

    Examples
    --------
    >>> curve = frontier_curve([10, 40], [100, 25])
    >>> throughput_at([20, 5], curve).round(9).tolist()
    [50.0, nan]
    """
    return _log_log(speed, curve.speed, curve.throughput, SPEED)


def speed_at(throughput: npt.ArrayLike, curve: Curve) -> FloatArray:
    """Speed (tok/s/user) of one seed at given throughputs (tok/s/GPU): the reverse of `throughput_at`."""
    return _log_log(throughput, curve.throughput[::-1], curve.speed[::-1], THROUGHPUT)


def _log_log(at: npt.ArrayLike, known: FloatArray, wanted: FloatArray, field: str) -> FloatArray:
    asked = np.asarray(at, dtype=np.float64)
    if not (np.isfinite(asked) & (asked > 0)).all():
        raise InputError(field=field, value=asked.tolist(), expected="finite numbers > 0")
    found = np.exp(np.interp(np.log(asked), np.log(known), np.log(wanted)))
    inside = (asked >= known[0]) & (asked <= known[-1])
    return np.asarray(np.where(inside, found, np.nan), dtype=np.float64)


def matched_runs(
    df: pd.DataFrame,
    baseline: str = "mtp1",
    speeds: Sequence[float] | None = None,
    throughputs: Sequence[float] | None = None,
    *,
    load: str = LOAD,
) -> pd.DataFrame:
    """Seed by seed, what every arm and the baseline have at equal speed and at equal throughput.

    Parameters
    ----------
    df
        One row a run with the columns ``arm``, ``seed``, `load`, ``tps_per_user``, ``throughput_tok_s_gpu``.
    baseline
        The arm that the others are divided by.
    speeds, throughputs
        Anchors in tok/s/user and tok/s/GPU for all arms. None: `default_anchors`; ``()``: none of that kind.
    load
        Column that tells the runs of one curve apart (``concurrency``, or ``rate_scale`` in open loop).

    Returns
    -------
    DataFrame
        Columns: arm, baseline, matched_on (the quantity held equal), anchor (its value), seed, value and
        baseline_value (the other quantity; NaN: not reached), ratio (value / baseline_value).

    Raises
    ------
    InputError
        A missing column, an unknown baseline, a value that is not a finite number > 0, a load that one seed
        has twice, or arms with different seeds.
    """
    curves = _curves(df, baseline, load)
    anchors: dict[str, dict[str, FloatArray]] = {}
    for matched_on, given in ((SPEED, speeds), (THROUGHPUT, throughputs)):
        if given is None:
            anchors[matched_on] = default_anchors(df, baseline, matched_on, load=load)
        else:
            fixed = np.unique(np.asarray(given, dtype=np.float64))
            if not (np.isfinite(fixed) & (fixed > 0)).all():
                raise InputError("bad anchors", field=matched_on, value=list(given), expected="numbers > 0")
            anchors[matched_on] = {arm: fixed for arm in curves if arm != baseline}
    rows = []
    for arm, by_seed in curves.items():
        if arm == baseline:
            continue
        for matched_on, look_up in ((SPEED, throughput_at), (THROUGHPUT, speed_at)):
            for anchor in anchors[matched_on][arm]:
                for seed, curve in by_seed.items():
                    value = float(look_up(anchor, curve))
                    base = float(look_up(anchor, curves[baseline][seed]))
                    rows.append((arm, baseline, matched_on, float(anchor), seed, value, base, value / base))
    columns = ["arm", "baseline", "matched_on", "anchor", "seed", "value", "baseline_value", "ratio"]
    return pd.DataFrame(rows, columns=columns)


def matched_table(
    df: pd.DataFrame,
    baseline: str = "mtp1",
    speeds: Sequence[float] | None = None,
    throughputs: Sequence[float] | None = None,
    *,
    load: str = LOAD,
    level: float = LEVEL,
) -> pd.DataFrame:
    """Throughput at equal tok/s/user, and tok/s/user at equal throughput, as ratios to the baseline.

    Ratios are formed within a seed; means and intervals are over the seeds in which both arms reach the
    anchor. Parameters and errors are those of `matched_runs`.

    Returns
    -------
    DataFrame
        One row an arm and anchor: arm, baseline, matched_on, anchor, n_seeds, n_reached, value and
        baseline_value (means over the reached seeds), ratio, ratio_lo, ratio_hi, interval (``"95 % t"``, or
        ``"range"`` below five reached seeds, or ``"none"``). ``n_reached`` 0 means "not reached": all numbers
        are NaN. An arm without any common range with the baseline keeps one row with a NaN anchor.
    """
    runs = matched_runs(df, baseline, speeds, throughputs, load=load)
    given = {SPEED: speeds, THROUGHPUT: throughputs}
    rows: list[dict[str, object]] = []
    for arm in _arms(df):
        if arm == baseline:
            continue
        n_seeds = df.loc[df["arm"] == arm, "seed"].nunique()
        for matched_on, asked in given.items():
            part = runs[(runs["arm"] == arm) & (runs["matched_on"] == matched_on)]
            head = {"arm": arm, "baseline": baseline, "matched_on": matched_on}
            if part.empty and asked is None:
                rows.append({**head, "anchor": np.nan, "n_seeds": n_seeds, **_summary(part, level)})
            for anchor, group in part.groupby("anchor", sort=True):
                rows.append({**head, "anchor": anchor, "n_seeds": n_seeds, **_summary(group, level)})
    return pd.DataFrame(rows, columns=_MATCHED_COLUMNS)


_MATCHED_COLUMNS = [
    "arm",
    "baseline",
    "matched_on",
    "anchor",
    "n_seeds",
    "n_reached",
    "value",
    "baseline_value",
    "ratio",
    "ratio_lo",
    "ratio_hi",
    "interval",
]


def _summary(group: pd.DataFrame, level: float) -> dict[str, object]:
    reached = group[group["ratio"].notna()]
    ratio = mean_interval(reached["ratio"].to_numpy(), level=level)
    return {
        "n_reached": ratio.n,
        "value": mean_interval(reached["value"].to_numpy()).mean,
        "baseline_value": mean_interval(reached["baseline_value"].to_numpy()).mean,
        "ratio": ratio.mean,
        "ratio_lo": ratio.lo,
        "ratio_hi": ratio.hi,
        "interval": ratio.kind,
    }


def matched_text(table: pd.DataFrame, matched_on: str = SPEED) -> pd.DataFrame:
    """`matched_table` as a grid to read: arms down, anchors across, ``+35 % [+31, +39]`` in the cells.

    Parameters
    ----------
    table
        From `matched_table`.
    matched_on
        ``tps_per_user`` (throughput gained at equal speed) or ``throughput_tok_s_gpu`` (the reverse).

    Returns
    -------
    DataFrame
        Texts. ``not reached`` where no seed has both arms there, ``(3/5)`` behind the interval where only
        three of five have, ``r`` before it where it is a range and not an interval, empty where the anchor
        was not asked of that arm.
    """
    if matched_on not in (SPEED, THROUGHPUT):
        raise InputError(field="matched_on", value=matched_on, expected=f"'{SPEED}' or '{THROUGHPUT}'")
    unit = "tok/s/user" if matched_on == SPEED else "tok/s/GPU"
    part = table[table["matched_on"] == matched_on]
    anchors = sorted(part["anchor"].dropna().unique())
    grid: dict[str, list[str]] = {"arm": [str(arm) for arm in dict.fromkeys(part["arm"])]}
    for anchor in anchors:
        cells = []
        for arm in grid["arm"]:
            row = part[(part["arm"] == arm) & (part["anchor"] == anchor)]
            cells.append("" if row.empty else _cell(row.iloc[0]))
        grid[f"{anchor:g} {unit}"] = cells
    return pd.DataFrame(grid)


def _cell(row: pd.Series) -> str:
    if row["n_reached"] == 0:
        return "not reached"
    gain, lo, hi = (signed(row[name] - 1, 0) for name in ("ratio", "ratio_lo", "ratio_hi"))
    mark = "r " if row["interval"] == "range" else ""
    part = "" if row["n_reached"] == row["n_seeds"] else f" ({row['n_reached']}/{row['n_seeds']})"
    return f"{gain} % [{mark}{lo}, {hi}]{part}"


def default_anchors(
    df: pd.DataFrame, baseline: str = "mtp1", matched_on: str = SPEED, *, load: str = LOAD
) -> dict[str, FloatArray]:
    """Where to compare when nobody says: the baseline's own operating points, rounded to two digits.

    For each arm, up to five of those that lie in the range that every seed of both the arm and the baseline
    covers, spread over the baseline's range. All arms choose in the same order of preference, so arms that
    cover the same range are compared at the same anchors. Fewer than three are topped up with round numbers
    spread evenly (in logarithm) over the common range.

    Returns
    -------
    dict
        Anchors in rising order by arm, the baseline left out; an empty array where there is no common range.
    """
    if matched_on not in (SPEED, THROUGHPUT):
        raise InputError(field="matched_on", value=matched_on, expected=f"'{SPEED}' or '{THROUGHPUT}'")
    curves = _curves(df, baseline, load)
    own = df[df["arm"] == baseline].groupby(load, sort=True)[matched_on].mean().to_numpy(dtype=np.float64)
    preference = _farthest_first(np.unique([_round(value, 2) for value in own]))
    found = {}
    for arm, by_seed in curves.items():
        if arm == baseline:
            continue
        both = [*by_seed.values(), *curves[baseline].values()]
        spans = [curve.speed if matched_on == SPEED else curve.throughput for curve in both]
        lo = max(float(span.min()) for span in spans)
        hi = min(float(span.max()) for span in spans)
        chosen = [value for value in preference if lo <= value <= hi][:MAX_ANCHORS]
        if lo < hi and len(chosen) < MIN_ANCHORS:
            chosen = _top_up(chosen, lo, hi)
        found[arm] = np.sort(np.array(chosen, dtype=np.float64))
    return found


def _top_up(chosen: list[float], lo: float, hi: float) -> list[float]:
    chosen = list(chosen)
    for digits in (2, 3):
        for value in np.geomspace(lo, hi, MIN_ANCHORS + 2)[1:-1]:
            rounded = _round(float(value), digits)
            if len(chosen) < MIN_ANCHORS and lo <= rounded <= hi and rounded not in chosen:
                chosen.append(rounded)
    return chosen


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")


def _farthest_first(values: FloatArray) -> list[float]:
    """All values, ordered so that any first few of them are spread widely (in logarithm)."""
    logs = np.log(values)
    order = [int(np.argmin(np.abs(logs - (logs[0] + logs[-1]) / 2)))]
    while len(order) < values.size:
        distance = np.abs(logs[:, None] - logs[order]).min(axis=1)
        order.append(int(np.argmax(distance)))
    return [float(values[index]) for index in order]


def hypervolume(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Area that the points dominate, reference point (0, 0).

    The union of the rectangles [0, x_i] x [0, y_i]; in the units of x times y.

    Parameters
    ----------
    x, y
        [n] coordinates, finite and >= 0.

    Examples
    --------
    >>> hypervolume([1, 2], [3, 1])
    4.0
    """
    xs, ys = _points(x, y, "x", "y")
    if xs.size and min(xs.min(), ys.min()) < 0:
        raise InputError(field="hypervolume", value=float(min(xs.min(), ys.min())), expected="coordinates >= 0")
    keep = np.flatnonzero(nondominated(xs, ys))
    keep = keep[np.argsort(xs[keep], kind="stable")]
    return float(np.sum(np.diff(xs[keep], prepend=0.0) * ys[keep]))


def hypervolume_ratio(
    df: pd.DataFrame, baseline: str = "mtp1", *, load: str = LOAD, level: float = LEVEL
) -> pd.DataFrame:
    """Dominated area of every arm as a ratio to the baseline's, per seed and then over seeds.

    Parameters
    ----------
    df, baseline, load
        As in `matched_runs`.

    Returns
    -------
    DataFrame
        arm, n_seeds, hypervolume (mean, tok/s/user x tok/s/GPU), ratio, ratio_lo, ratio_hi, interval; the
        baseline's own row included (ratio 1).

    Raises
    ------
    InputError
        As in `matched_runs`, or when one arm and seed was run at other loads than the baseline: areas over
        different grids say nothing.
    """
    curves = _curves(df, baseline, load)
    first = df[df["arm"] == baseline]
    grid = sorted(first.loc[first["seed"] == first["seed"].iloc[0], load])
    for (arm, seed), group in df.groupby(["arm", "seed"], sort=False):
        if sorted(group[load]) != grid:
            raise InputError(
                f"arm '{arm}', seed {seed}: hypervolumes need the same load grid in all arms",
                field=load,
                value=sorted(group[load].tolist()),
                expected=f"{grid}",
            )
    area = {
        arm: np.array([hypervolume(curve.speed, curve.throughput) for curve in by_seed.values()])
        for arm, by_seed in curves.items()
    }
    rows = []
    for arm, values in area.items():
        ratio = mean_interval(values / area[baseline], level=level)
        rows.append((arm, ratio.n, mean_interval(values).mean, ratio.mean, ratio.lo, ratio.hi, ratio.kind))
    columns = ["arm", "n_seeds", "hypervolume", "ratio", "ratio_lo", "ratio_hi", "interval"]
    return pd.DataFrame(rows, columns=columns)


def fitted_frontier(
    speed: npt.ArrayLike,
    throughput: npt.ArrayLike,
    *,
    quantile: float = 0.9,
    bin_points: int = 20,
    max_bins: int = 8,
    points: int = 200,
) -> tuple[FloatArray, FloatArray]:
    """A smooth falling line along the upper edge of a cloud of telemetry windows (for drawing only).

    The windows are cut into bins of equal count by speed. In each bin the `quantile` of log throughput is
    taken at the median speed, after the bin's own slope has been removed. A falling isotonic regression,
    weighted by count, pools bins that would rise; each pooled run becomes one knot, and a monotone cubic
    (PCHIP) joins the knots in log-log coordinates. A few outlying windows move no quantile, every step is
    deterministic, and the line ends in the middle of the first and last bin: it is not extended to windows
    that stand alone.

    Parameters
    ----------
    speed, throughput
        [n] tok/s/user and tok/s/GPU of the windows. Windows without a speed or throughput (NaN, or 0: nothing
        was served) are left out; infinite and negative values are errors.
    quantile
        Height of the edge within a bin, between 0 and 1.
    bin_points, max_bins
        Fewest windows in a bin (>= 2) and most bins (>= 2).
    points
        Length of the line (>= 2).

    Returns
    -------
    x, y
        float64[points] speed rising and throughput not rising; two empty arrays where there are fewer
        windows than two bins take or all have one speed: no line is better than an invented one.

    Raises
    ------
    InputError
        Different lengths, infinite or negative values, or an option out of range.
    """
    for name, value, least in (
        ("bin_points", bin_points, 2),
        ("max_bins", max_bins, 2),
        ("points", points, 2),
    ):
        if value < least:
            raise InputError(field=name, value=value, expected=f"an integer >= {least}")
    if not 0.0 < quantile < 1.0:
        raise InputError(field="quantile", value=quantile, expected="a number between 0 and 1")
    xs, ys = np.asarray(speed, dtype=np.float64).ravel(), np.asarray(throughput, dtype=np.float64).ravel()
    if xs.size != ys.size:
        raise InputError(f"{xs.size} speeds but {ys.size} throughputs", expected="as many of one as of the other")
    for name, values in ((SPEED, xs), (THROUGHPUT, ys)):
        if np.isinf(values).any() or (values < 0).any():
            raise InputError(field=name, expected="windows with finite numbers >= 0, or NaN")
    usable = (xs > 0) & (ys > 0)
    empty = np.empty(0)
    if usable.sum() < 2 * bin_points:
        return empty, empty.copy()
    log_x, log_y = np.log(xs[usable]), np.log(ys[usable])
    order = np.lexsort((log_y, log_x))
    bins = min(max_bins, order.size // bin_points)
    knots_x, knots_y, weight = [], [], []
    for part in np.array_split(order, bins):
        middle, level = _edge(log_x[part], log_y[part], quantile)
        knots_x.append(middle)
        knots_y.append(level)
        weight.append(float(part.size))
    x, y, w = _merge_equal(np.array(knots_x), np.array(knots_y), np.array(weight))
    if x.size < 2:
        return empty, empty.copy()
    falling = np.asarray(scipy.optimize.isotonic_regression(y, weights=w, increasing=False).x, dtype=np.float64)
    x, y = _pool(x, falling, w)
    grid = np.linspace(x[0], x[-1], points)
    line = scipy.interpolate.PchipInterpolator(x, y)(grid)
    # PCHIP keeps monotone data monotone up to rounding; the accumulated minimum removes the rounding.
    return np.exp(grid), np.exp(np.minimum.accumulate(line))


def _edge(x: FloatArray, y: FloatArray, quantile: float) -> tuple[float, float]:
    """Middle of a bin and the upper quantile there, the bin's own slope taken out.

    Without that a steep bin would be judged by its left end, where everything is higher. The slope is that of
    Tukey's resistant line (medians of the outer thirds), and at most 0. `x` is sorted.
    """
    middle = float(np.median(x))
    third = max(x.size // 3, 1)
    run = float(np.median(x[-third:]) - np.median(x[:third]))
    rise = float(np.median(y[-third:]) - np.median(y[:third]))
    slope = min(rise / run, 0.0) if run > 0 else 0.0
    return middle, float(np.quantile(y - slope * (x - middle), quantile))


def _merge_equal(x: FloatArray, y: FloatArray, w: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bins with the same median speed become one (many windows may share a speed)."""
    unique, where = np.unique(x, return_inverse=True)
    total = np.asarray(np.bincount(where, weights=w), dtype=np.float64)
    return unique, np.bincount(where, weights=w * y) / total, total


def _pool(x: FloatArray, y: FloatArray, w: FloatArray) -> tuple[FloatArray, FloatArray]:
    """One knot a run of equal values, at its weighted mean; the outermost knots keep the full width."""
    starts = np.flatnonzero(np.r_[True, np.diff(y) != 0])
    total = np.add.reduceat(w, starts)
    middle = np.add.reduceat(w * x, starts) / total
    height = y[starts]
    if middle[0] > x[0]:
        middle, height = np.r_[x[0], middle], np.r_[height[0], height]
    if middle[-1] < x[-1]:
        middle, height = np.r_[middle, x[-1]], np.r_[height, height[-1]]
    return middle, height


def _points(x: npt.ArrayLike, y: npt.ArrayLike, x_name: str, y_name: str) -> tuple[FloatArray, FloatArray]:
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if xs.ndim != 1 or xs.shape != ys.shape:
        raise InputError(
            f"{x_name} and {y_name} do not match",
            value=(xs.shape, ys.shape),
            expected="two equally long lists",
        )
    for name, values in ((x_name, xs), (y_name, ys)):
        if not np.isfinite(values).all():
            bad = float(values[~np.isfinite(values)][0])
            raise InputError(field=name, value=bad, expected="finite numbers")
    return xs, ys


def _arms(df: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(df["arm"]))


def _curves(df: pd.DataFrame, baseline: str, load: str) -> dict[str, dict[int, Curve]]:
    """Checked per-run frame -> curve by arm (order of appearance) and seed (rising)."""
    for column in ("arm", "seed", load, SPEED, THROUGHPUT):
        if column not in df.columns:
            raise InputError(
                f"the table of runs has no column '{column}'",
                field=column,
                expected=f"arm, seed, {load}, {SPEED}, {THROUGHPUT}",
            )
    arms = _arms(df)
    if baseline not in arms:
        known = ", ".join(map(str, arms)) or "an arm (the table is empty)"
        raise InputError(
            f"the baseline '{baseline}' is not among the arms", field="baseline", expected=f"one of {known}"
        )
    for column in ("arm", "seed", load):
        if df[column].isna().any():
            raise InputError(f"a run has no {column}", field=column, expected="a value for every run")
    for column in (SPEED, THROUGHPUT):
        if not pd.api.types.is_numeric_dtype(df[column]):
            raise InputError(f"the column '{column}' does not hold numbers", field=column, expected="numbers")
    twice = df.duplicated(["arm", "seed", load])
    if twice.any():
        row = df[twice].iloc[0]
        raise InputError(
            f"arm '{row['arm']}', seed {row['seed']} has two runs at {load} {row[load]:g}",
            field=load,
            expected="one run an arm, seed and load",
        )
    wanted = set(df.loc[df["arm"] == baseline, "seed"])
    curves: dict[str, dict[int, Curve]] = {}
    for arm in arms:
        rows = df[df["arm"] == arm]
        if set(rows["seed"]) != wanted:
            raise InputError(
                f"arm '{arm}' and the baseline '{baseline}' were run with different seeds",
                field="seed",
                value=sorted(set(rows["seed"])),
                expected=f"{sorted(wanted)}",
            )
        curves[arm] = {}
        for seed in sorted(wanted):
            mine = rows[rows["seed"] == seed]
            try:
                curves[arm][int(seed)] = frontier_curve(mine[SPEED].to_numpy(), mine[THROUGHPUT].to_numpy())
            except InputError as error:
                raise InputError(
                    f"arm '{arm}', seed {seed}",
                    field=error.field,
                    value=error.value,
                    expected=error.expected,
                ) from error
    return curves
