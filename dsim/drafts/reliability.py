"""How good are confidences: discrimination (AUC) and calibration error (ECE) of prefix survival.

Both are stated, as in Fig. 6 of the DSpark paper (arXiv 2607.05147), for the *cumulative* product
a_k = prod_{i<=k} c_i against the event "the first k drafts were accepted".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

RELIABILITY_BINS = 20


def auc(scores: npt.NDArray[np.floating[Any]], labels: npt.NDArray[np.bool_]) -> float:
    """Area under the ROC curve, ties counted half (Mann-Whitney). NaN where one class is empty.

    >>> auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    positive = int(np.count_nonzero(labels))
    negative = labels.size - positive
    if positive == 0 or negative == 0:
        return float("nan")
    ranks = rankdata(scores)
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


def ece(predicted: npt.NDArray[np.floating[Any]], observed: npt.NDArray[Any], bins: int = RELIABILITY_BINS) -> float:
    """Expected calibration error: mean |observed - predicted| over equal-width bins, weighted by their counts.

    Parameters
    ----------
    predicted
        [n] probabilities in [0, 1].
    observed
        [n] outcomes (bool), or their known probabilities: the same expectation with less noise.
    """
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=observed, minlength=bins) - np.bincount(index, weights=predicted, minlength=bins)
    return float(np.abs(gap).sum() / predicted.size)


def visited_rows(
    accepted: npt.NDArray[np.integer[Any]], bounds: npt.NDArray[np.int64], usable: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Rows that decoding with full verification visits: from each trajectory's start, accepted + 1 a step.

    Published acceptance figures are averages over these, not over all positions: a hard stretch of text takes
    more steps and so weighs more.

    Returns
    -------
    int64[n], ordered by trajectory and position.
    """
    position = np.zeros(usable.size, dtype=np.int64)
    alive = np.flatnonzero(position < usable)
    found = []
    while alive.size:
        rows = bounds[alive] + position[alive]
        found.append(rows)
        position[alive] += accepted[rows].astype(np.int64) + 1
        alive = alive[position[alive] < usable[alive]]
    return np.sort(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)
