"""Paired A/B statistics: is B better than A, by how much, and is that more than the seeds' own spread?

Both arms replay the same requests with the same luck under each seed, so the seed is the pair and the
replication is the unit: one difference a seed, a paired t interval over seeds. One primary metric is
named before the runs and tested on its own; all others are corrected together (Holm). `docs/statistics.md`
has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy

from dsim.errors import InputError
from dsim.intervals import MIN_SEEDS, NO_INTERVAL, RANGE, mean_interval

FloatArray = npt.NDArray[np.float64]
Better = Literal["higher", "lower", "neither"]

PRIMARY = "primary"
SECONDARY = "secondary"

B_BETTER = "B better"
B_WORSE = "B worse"
B_HIGHER = "B higher"  # for metrics of which neither direction is better
B_LOWER = "B lower"
NO_DIFFERENCE = "no difference shown"
RANGE_ONLY = "range only"
NOT_MEASURED = "not measured"

# Names are matched from the start, longest prefix first, so `tpot_p99_ms` and `goodput_tok_s` need no entry.
_DIRECTIONS: dict[str, Better] = {
    "tps": "higher",
    "throughput": "higher",
    "request_throughput": "higher",
    "goodput": "higher",
    "slo_attainment": "higher",
    "accepted_length": "higher",
    "acceptance_rate": "higher",
    "ttft": "lower",
    "tpot": "lower",
    "itl": "lower",
    "e2e": "lower",
    "queue": "lower",
    "wasted": "lower",
    "fallback": "lower",
    "preemption": "lower",
    "verification_budget": "neither",
    "steps": "neither",
    "step_ms": "lower",
}
_SPEED_WORDS = ("tps", "ttft", "tpot", "itl", "e2e", "step_ms")


def better_direction(metric: str) -> Better:
    """Which way is better for a metric, from its name.

    Raises
    ------
    InputError
        A name that starts with none of the known prefixes; `compare` takes the direction from a mapping then.

    Examples
    --------
    >>> better_direction("tpot_p99_ms"), better_direction("throughput_tok_s_gpu")
    ('lower', 'higher')
    """
    for prefix in sorted(_DIRECTIONS, key=len, reverse=True):
        if metric.startswith(prefix):
            return _DIRECTIONS[prefix]
    raise InputError(
        f"it is not known which way is better for '{metric}'",
        field="metrics",
        expected="a mapping of the metric to 'higher', 'lower' or 'neither', or a name that starts with "
        + ", ".join(sorted(_DIRECTIONS)),
    )


@dataclass(frozen=True, slots=True)
class Paired:
    """One metric in A and B, paired by seed. Differences are B - A, in the metric's unit.

    Attributes
    ----------
    n, n_seeds
        Pairs in which both were measured (what everything below is over), and all pairs.
    mean_a, mean_b, difference
        Means over the n pairs.
    lo, hi
        Paired t interval of the difference, or its range below `MIN_SEEDS` pairs.
    relative, relative_lo, relative_hi
        The three numbers above divided by the absolute value of ``mean_a``, which is taken as given, so that
        the relative interval holds 0 exactly when the absolute one does. NaN where ``mean_a`` is 0 and the
        difference is not.
    p
        Two-sided paired t test; NaN below `MIN_SEEDS` pairs.
    kind
        What ``lo`` and ``hi`` are: ``"95 % t"``, ``"range"`` or ``"none"``.
    """

    n: int
    n_seeds: int
    mean_a: float
    mean_b: float
    difference: float
    lo: float
    hi: float
    relative: float
    relative_lo: float
    relative_hi: float
    p: float
    kind: str


def paired(a: pd.Series[float] | npt.ArrayLike, b: pd.Series[float] | npt.ArrayLike, *, alpha: float = 0.05) -> Paired:
    """Paired comparison of one metric.

    Parameters
    ----------
    a, b
        One value a seed. Series are paired by index (the seed), plain sequences by position. NaN is "not
        measured": the pair is left out and counted in ``n_seeds`` only.
    alpha
        One minus the coverage of the interval.

    Raises
    ------
    InputError
        Different or repeated seeds, different lengths, an infinite value, or alpha outside (0, 1).

    Examples
    --------
    >>> found = paired([10, 20, 30, 40, 50], [11, 22, 33, 44, 55])
    >>> found.difference, round(found.lo, 3), round(found.hi, 3), round(found.p, 4)
    (3.0, 1.037, 4.963, 0.0132)
    """
    if not 0.0 < alpha < 1.0:
        raise InputError(field="alpha", value=alpha, expected="a number between 0 and 1")
    before, after = _aligned(a, b)
    if np.isinf(before).any() or np.isinf(after).any():
        raise InputError("a metric is infinite", expected="finite numbers, or NaN where it was not measured")
    both = ~(np.isnan(before) | np.isnan(after))
    x, y = before[both], after[both]
    gap = mean_interval(y - x, level=1.0 - alpha)
    mean_a, mean_b = mean_interval(x).mean, mean_interval(y).mean
    scale = abs(mean_a)
    relative, relative_lo, relative_hi = (_ratio(value, scale) for value in (gap.mean, gap.lo, gap.hi))
    return Paired(
        n=gap.n,
        n_seeds=before.size,
        mean_a=mean_a,
        mean_b=mean_b,
        difference=gap.mean,
        lo=gap.lo,
        hi=gap.hi,
        relative=relative,
        relative_lo=relative_lo,
        relative_hi=relative_hi,
        p=_p_value(y - x),
        kind=gap.kind,
    )


def _ratio(value: float, scale: float) -> float:
    if value == 0.0:
        return 0.0
    return value / scale if scale > 0.0 else float("nan")


def _p_value(differences: FloatArray) -> float:
    """Two-sided paired t test. Constant differences have no spread: p is 1 at zero and 0 elsewhere."""
    n = differences.size
    if n < MIN_SEEDS:
        return float("nan")
    if differences.min() == differences.max():
        return 1.0 if differences[0] == 0.0 else 0.0
    t = differences.mean() / (differences.std(ddof=1) / np.sqrt(n))
    # Student's distribution function: scipy.stats would take longer to import than the rest of a report.
    return float(2.0 * scipy.special.stdtr(n - 1, -abs(t)))


def _aligned(a: pd.Series[float] | npt.ArrayLike, b: pd.Series[float] | npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    if isinstance(a, pd.Series) and isinstance(b, pd.Series):
        for name, series in (("A", a), ("B", b)):
            if series.index.has_duplicates:
                twice = series.index[series.index.duplicated()][0]
                raise InputError(f"{name} has seed {twice} twice", field="seed", expected="one run a seed")
        if set(a.index) != set(b.index):
            raise InputError(
                "A and B were run with different seeds, so there are no pairs",
                field="seed",
                value=f"A {sorted(a.index)}, B {sorted(b.index)}",
                expected="the same seeds in both",
            )
        b = b.reindex(a.index)
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise InputError("A and B do not match", value=(x.shape, y.shape), expected="two equally long lists")
    return x, y


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: reject where the adjusted value is at most alpha.

    NaN (not tested) stays NaN and does not count in the family.
    Source: S. Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(p.size, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    factor = np.arange(order.size, 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factor), 1.0)
    return [float(value) for value in adjusted]


def compare(
    df_a: pd.DataFrame,
    df_b: pd.DataFrame,
    metrics: Sequence[str] | Mapping[str, Better],
    primary: str,
    alpha: float = 0.05,
    *,
    unit: str = "seed",
) -> pd.DataFrame:
    """All metrics of B against A, one row each, the primary one first.

    Parameters
    ----------
    df_a, df_b
        One row a run, with the column `unit` and one column a metric.
    metrics
        Names (directions then come from `better_direction`), or a mapping of names to ``"higher"``,
        ``"lower"`` or ``"neither"``. The primary one may be left out of it.
    primary
        The one metric that the verdict is about. It is tested at `alpha` on its own; the rest at `alpha`
        together (Holm).
    alpha
        Error rate; intervals cover 1 - alpha each (they are not widened for the number of metrics).
    unit
        Column that pairs the runs. Runs that were made with different seeds on purpose (an A/A check) are
        paired by a column that numbers the replications.

    Returns
    -------
    DataFrame
        metric, role ("primary" or "secondary"), better, n, n_seeds, mean_a, mean_b, difference, lo, hi,
        relative, relative_lo, relative_hi, p, p_adjusted (the primary's own p; Holm for the rest), interval
        ("95 % t", "range", "none"), outcome ("B better", "B worse", "B higher", "B lower", "no difference
        shown", "range only", "not measured").

    Raises
    ------
    InputError
        A missing column, a metric that is not a number, an unknown direction, different or repeated seeds,
        an infinite value, or alpha outside (0, 1).
    """
    directions = _directions(metrics, primary)
    for name, df in (("A", df_a), ("B", df_b)):
        for column in (unit, *directions):
            if column not in df.columns:
                raise InputError(
                    f"the runs of {name} have no column '{column}'",
                    field=column,
                    expected=f"one of {', '.join(map(str, df.columns))}",
                )
            if column != unit and not pd.api.types.is_numeric_dtype(df[column]):
                raise InputError(f"the metric '{column}' of {name} does not hold numbers", field=column)
    a, b = df_a.set_index(unit), df_b.set_index(unit)
    results = {metric: paired(a[metric], b[metric], alpha=alpha) for metric in directions}
    secondary = [metric for metric in directions if metric != primary]
    adjusted = dict(zip(secondary, holm([results[metric].p for metric in secondary]), strict=True))
    adjusted[primary] = results[primary].p
    rows = []
    for metric in (primary, *secondary):
        found = results[metric]
        rows.append(
            {
                "metric": metric,
                "role": PRIMARY if metric == primary else SECONDARY,
                "better": directions[metric],
                "n": found.n,
                "n_seeds": found.n_seeds,
                "mean_a": found.mean_a,
                "mean_b": found.mean_b,
                "difference": found.difference,
                "lo": found.lo,
                "hi": found.hi,
                "relative": found.relative,
                "relative_lo": found.relative_lo,
                "relative_hi": found.relative_hi,
                "p": found.p,
                "p_adjusted": adjusted[metric],
                "interval": found.kind,
                "outcome": _outcome(found, directions[metric], adjusted[metric], alpha),
            }
        )
    return pd.DataFrame(rows)


def _directions(metrics: Sequence[str] | Mapping[str, Better], primary: str) -> dict[str, Better]:
    if isinstance(metrics, str):
        raise InputError(field="metrics", value=metrics, expected="a list of names")
    names = list(dict.fromkeys([primary, *metrics]))
    given: Mapping[str, Better] = metrics if isinstance(metrics, Mapping) else {}
    directions = {name: given[name] if name in given else better_direction(name) for name in names}
    for name, direction in directions.items():
        if direction not in ("higher", "lower", "neither"):
            raise InputError(
                f"direction of '{name}'",
                field="metrics",
                value=direction,
                expected="higher, lower or neither",
            )
    return directions


def _outcome(found: Paired, better: Better, p_adjusted: float, alpha: float) -> str:
    if found.kind == NO_INTERVAL:
        return NOT_MEASURED
    if found.kind == RANGE:
        return RANGE_ONLY
    if p_adjusted > alpha or found.difference == 0.0:
        return NO_DIFFERENCE
    rises = found.difference > 0
    if better == "neither":
        return B_HIGHER if rises else B_LOWER
    return B_BETTER if rises == (better == "higher") else B_WORSE


def verdict(table: pd.DataFrame, name_a: str = "A", name_b: str = "B") -> str:
    """One line about the primary metric, which says so when nothing was shown.

    Parameters
    ----------
    table
        From `compare`.
    name_a, name_b
        What the two arms are called.

    Examples
    --------
    >>> a = pd.DataFrame({"seed": range(5), "tpot_p50_ms": [10.0, 20.0, 30.0, 40.0, 50.0]})
    >>> print(verdict(compare(a, a, ["tpot_p50_ms"], "tpot_p50_ms")))
    no difference shown between A and B on tpot_p50_ms: 0.0 % [0.0, 0.0] (5 seeds, p = 1.00)
    """
    chosen = table[table["role"] == PRIMARY]
    if len(chosen) != 1:
        raise InputError("no primary metric in the table", field="role", expected="a table from compare()")
    row = chosen.iloc[0]
    metric, outcome = str(row["metric"]), str(row["outcome"])
    n, n_seeds = int(row["n"]), int(row["n_seeds"])
    seeds = f"{n} seed{'' if n == 1 else 's'}" if n == n_seeds else f"{n} of {n_seeds} seeds"
    if outcome == NOT_MEASURED:
        return f"not measured: {metric} has a value in both {name_a} and {name_b} in {seeds}"
    amounts, unit = _amounts(row)
    if outcome == RANGE_ONLY:
        lo, hi = _format(amounts[1:])
        return f"{seeds}: range only, no verdict: {name_b} - {name_a} on {metric} is {lo} to {hi}{unit}"
    p = float(row["p"])
    p_text = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    if outcome == NO_DIFFERENCE:
        middle, lo, hi = _format(amounts)
        return (
            f"no difference shown between {name_a} and {name_b} on {metric}: {middle}{unit} [{lo}, {hi}] "
            f"({seeds}, {p_text})"
        )
    # Said in the direction of the word: "faster by" and "slower by" are followed by a positive amount.
    amounts = amounts if amounts[0] > 0 else (-amounts[0], -amounts[2], -amounts[1])
    middle, lo, hi = _format(amounts, plus=False)
    return (
        f"{name_b} is {_word(metric, outcome)} than {name_a} by {middle}{unit} [{lo}, {hi}] on {metric} "
        f"({seeds}, {p_text})"
    )


def _word(metric: str, outcome: str) -> str:
    if metric.startswith(_SPEED_WORDS):
        return {B_BETTER: "faster", B_WORSE: "slower"}.get(outcome, outcome.removeprefix("B "))
    return outcome.removeprefix("B ")


def _amounts(row: pd.Series) -> tuple[tuple[float, float, float], str]:
    """Difference and its interval in percent, or in the metric's own unit where A's mean is 0."""
    values = tuple(float(row[name]) for name in ("relative", "relative_lo", "relative_hi"))
    if not np.isnan(values).any():
        return cast(tuple[float, float, float], tuple(100 * value for value in values)), " %"
    values = tuple(float(row[name]) for name in ("difference", "lo", "hi"))
    return cast(tuple[float, float, float], values), ""


def _format(values: Sequence[float], *, plus: bool = True) -> list[str]:
    """All with the digits that give the largest of them two; +0.0 and -0.0 are 0.0."""
    largest = max(abs(value) for value in values)
    digits = 1 if largest == 0 else int(np.clip(1 - np.floor(np.log10(largest)), 1, 6))
    texts = [f"{value:{'+' if plus else ''}.{digits}f}" for value in values]
    return [text if float(text) else f"{0.0:.{digits}f}" for text in texts]
