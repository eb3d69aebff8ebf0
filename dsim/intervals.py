"""Mean and interval over seeds: the one place that says how spread is reported.

The replication (seed) is the independent unit everywhere in dsim. Requests and telemetry windows of one run
share batches and are not independent, so no interval is ever taken over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy

from dsim.errors import InputError

#: Fewest seeds for which a t interval and a verdict are given; below that only the range is.
MIN_SEEDS = 5
LEVEL = 0.95
RANGE = "range"
NO_INTERVAL = "none"


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and what surrounds it.

    Attributes
    ----------
    n
        Seeds with a value (NaN means "not measured" or "not reached" and is not counted).
    mean, lo, hi
        NaN where ``n`` is 0.
    kind
        ``"95 % t"`` (Student's t with n - 1 degrees of freedom), ``"range"`` (smallest and largest value,
        fewer than `MIN_SEEDS` seeds) or ``"none"``.
    """

    n: int
    mean: float
    lo: float
    hi: float
    kind: str


def mean_interval(values: npt.ArrayLike, *, level: float = LEVEL, min_seeds: int = MIN_SEEDS) -> Interval:
    """Mean over seeds with a t interval, or with the range when there are too few seeds for one.

    Parameters
    ----------
    values
        [seeds] one number a seed; NaN where the seed has none.
    level
        Coverage of the t interval, 0 < level < 1.
    min_seeds
        Fewest values for a t interval, at least 2.

    Raises
    ------
    InputError
        A level outside (0, 1), ``min_seeds`` < 2, or an infinite value.

    Examples
    --------
    >>> mean_interval([1.0, 2.0, 3.0])
    Interval(n=3, mean=2.0, lo=1.0, hi=3.0, kind='range')
    >>> found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> round(found.lo, 4), round(found.hi, 4), found.kind
    (1.0368, 4.9632, '95 % t')
    """
    if not 0.0 < level < 1.0:
        raise InputError(field="level", value=level, expected="a number between 0 and 1")
    if min_seeds < 2:
        raise InputError(field="min_seeds", value=min_seeds, expected="an integer >= 2")
    array = np.asarray(values, dtype=np.float64).ravel()
    if np.isinf(array).any():
        raise InputError("an infinite value has no interval", field="values", expected="finite numbers or NaN")
    array = array[~np.isnan(array)]
    n = array.size
    if n == 0:
        return Interval(0, float("nan"), float("nan"), float("nan"), NO_INTERVAL)
    low, high = float(array.min()), float(array.max())
    # A constant is returned as it is: its computed mean could differ from it in the last bit.
    mean = low if low == high else float(array.mean())
    if n < min_seeds:
        return Interval(n, mean, low, high, RANGE)
    # The quantile of Student's distribution: scipy.stats would take longer to import than the rest of a report.
    half = 0.0 if low == high else float(scipy.special.stdtrit(n - 1, 0.5 + level / 2) * array.std(ddof=1) / np.sqrt(n))
    return Interval(n, mean, mean - half, mean + half, f"{100 * level:g} % t")
