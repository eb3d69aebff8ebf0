"""How good are confidences: discrimination (AUC) and calibration error (ECE) of prefix survival.

Both are stated, as in Fig. 6 of the DSpark paper (arXiv 2607.05147), for the *cumulative* product
a_k = prod_{i<=k} c_i against the event "the first k drafts were accepted".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

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
    ranks = scipy.stats.rankdata(scores)
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


def ece(
    predicted: npt.NDArray[np.floating[Any]],
    observed: npt.NDArray[Any],
    bins: int = RELIABILITY_BINS,
    min_bin: int = 0,
) -> float:
    """Expected calibration error: mean |observed - predicted| over equal-width bins, weighted by their counts.

    Parameters
    ----------
    predicted
        [n] probabilities in [0, 1].
    observed
        [n] outcomes (bool), or their known probabilities: the same expectation with less noise.
    bins
        Equal-width bins of [0, 1] (Naeini et al., AAAI 2015).
    min_bin
        Neighboring bins are joined until each holds that many blocks (`merged_bins`); 0 joins none.
    """
    return float(np.abs(bin_gaps(predicted, observed, bins, min_bin)[0]).sum() / predicted.size)


def bin_gaps(
    predicted: npt.NDArray[np.floating[Any]], observed: npt.NDArray[Any], bins: int, min_bin: int
) -> tuple[FloatArray, int]:
    """Sums of observed - predicted by bin, as in `ece`, and how many bins hold anything."""
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=observed, minlength=bins) - np.bincount(index, weights=predicted, minlength=bins)
    counts = np.bincount(index, minlength=bins)
    held = int(np.count_nonzero(counts))
    if min_bin:
        group = merged_bins(counts, min_bin)
        gap, held = np.bincount(group, weights=gap), int(group[-1]) + 1
    return np.asarray(gap, dtype=np.float64), held


def merged_bins(counts: npt.NDArray[np.integer[Any]], min_bin: int) -> IntArray:
    """Group of each bin when neighbors are joined, from the left, until every group holds `min_bin`.

    What is left over at the right end joins the last group.

    >>> merged_bins(np.array([5, 1, 1, 4, 0, 2]), 4).tolist()
    [0, 1, 1, 1, 1, 1]
    """
    group = np.zeros(counts.size, dtype=np.int64)
    current = held = 0
    for i, count in enumerate(counts.tolist()):
        group[i] = current
        held += count
        if held >= min_bin:
            current, held = current + 1, 0
    return np.minimum(group, current - 1) if held < min_bin and current else group


def weighted_ece(predicted: FloatArray, observed: FloatArray, weights: FloatArray) -> float:
    """`ece` of blocks that count `weights` times.

    >>> round(weighted_ece(np.array([0.91, 0.92, 0.31]), np.array([1.0, 0.5, 0.5]), np.array([1.0, 3.0, 4.0])), 5)
    0.24125
    """
    bins = np.minimum((predicted * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
    gaps = np.bincount(bins, weights=weights * (observed - predicted))
    return float(np.abs(gaps).sum() / weights.sum())


def weighted_auc(score: FloatArray, probability: FloatArray, weights: FloatArray) -> float:
    """`auc` of blocks that count `weights` times and are positives with a known probability.

    >>> weighted_auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0.0, 0.0, 1.0, 1.0]), np.ones(4))
    0.75
    """
    _, level = np.unique(score, return_inverse=True)
    positive = np.bincount(level, weights=weights * probability)
    negative = np.bincount(level, weights=weights * (1 - probability))
    below = np.add.accumulate(negative) - negative / 2
    total = float(positive.sum() * negative.sum())
    return float((positive * below).sum() / total) if total > 0 else float("nan")


@dataclass(frozen=True, eq=False)
class Reliability:
    """How good the cumulative confidence of one position is: a panel of the paper's Fig. 6.

    Attributes
    ----------
    position
        Draft position, from 1.
    ece, auc
        See `ece` and `auc`.
    predicted_mean, observed_mean
        Means over all blocks: a level error is their difference.
    counts
        int64[bins]: blocks by bin of the prediction (the histogram).
    predicted, observed
        float64[bins]: means by bin, NaN where a bin is empty (the diagram).
    """

    position: int
    ece: float
    auc: float
    predicted_mean: float
    observed_mean: float
    counts: IntArray
    predicted: FloatArray
    observed: FloatArray


def reliability_table(
    confidence: npt.NDArray[np.floating[Any]],
    accepted: npt.NDArray[np.integer[Any]],
    *,
    alpha: npt.NDArray[np.floating[Any]] | None = None,
    bins: int = RELIABILITY_BINS,
) -> tuple[Reliability, ...]:
    """Reliability of the cumulative confidence at every position, over all the blocks given.

    Parameters
    ----------
    confidence
        [N, gamma] conditional confidences c_k. Of a bank: ``bank.confidence[rows]`` with the rows of `visited_rows`.
    accepted
        [N] drafts accepted if the whole block is verified.
    alpha
        [N, gamma] acceptance probabilities, if known: then their cumulative product stands for the outcome
        everywhere but in the AUC, with less noise.
    bins
        Equal-width bins of [0, 1].
    """
    survival = np.multiply.accumulate(np.asarray(confidence, dtype=np.float64), axis=1)
    known = None if alpha is None else np.multiply.accumulate(np.asarray(alpha, dtype=np.float64), axis=1)
    table = []
    for k in range(survival.shape[1]):
        predicted, label = survival[:, k], np.asarray(accepted) > k
        observed = label.astype(np.float64) if known is None else known[:, k]
        index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
        counts = np.bincount(index, minlength=bins)
        blocks = np.where(counts > 0, counts, np.nan)
        table.append(
            Reliability(
                position=k + 1,
                ece=ece(predicted, observed, bins),
                auc=auc(predicted, label),
                predicted_mean=float(predicted.mean()),
                observed_mean=float(observed.mean()),
                counts=counts,
                predicted=np.bincount(index, weights=predicted, minlength=bins) / blocks,
                observed=np.bincount(index, weights=observed, minlength=bins) / blocks,
            )
        )
    return tuple(table)


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
