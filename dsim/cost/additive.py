"""The additive law of SGLang and TensorRT-LLM: bias + alpha(requests) + theta(tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy

from dsim.cost.points import Points, price_between, price_in_branches
from dsim.profile import MISSING, FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Additive:
    """bias + alpha(requests) + theta(tokens), piecewise linear and non-decreasing in both.

    Parameters
    ----------
    points
        The medians that were fitted.
    bias
        Milliseconds at the smallest profiled step. alpha and theta are 0 there: only their sum with the bias
        can be told from step times.
    tokens, theta
        int64[M], float64[M]: knots of theta, milliseconds. Captured and eager knots are two curves, as in the
        staircase.
    requests, alpha
        int64[S], float64[S]: knots of alpha, milliseconds; empty where alpha is 0 for want of data.

    Notes
    -----
    Format of SGLang's additive table: ``bias_seconds``, ``bs_probes``/``alpha_seconds``,
    ``m_probes``/``theta_seconds``.
    """

    points: Points
    bias: float
    tokens: IntArray
    theta: FloatArray
    requests: IntArray
    alpha: FloatArray

    @property
    def depends_on_requests(self) -> bool:
        """Whether there is an alpha at all."""
        return bool(self.alpha.size)

    def price(self, requests: int, tokens: IntArray) -> FloatArray:
        """Milliseconds at each of `tokens`, for a batch of `requests`."""
        ms = self.bias + price_in_branches(self.tokens, self.theta, self.points.limit, tokens, stepped=False)
        if self.alpha.size:
            at = np.array([requests], dtype=np.int64)
            ms = ms + price_between(self.requests, self.alpha, at, stepped=False)
        return ms

    def refit(self, points: Points) -> Additive | None:
        """The same law through other points; None where they cannot tell alpha from theta any more."""
        other, _ = fit_additive(points)
        return other if other.depends_on_requests == self.depends_on_requests else None


def fit_additive(points: Points) -> tuple[Additive, str | None]:
    """Least squares over non-negative increments, relative errors.

    Returns
    -------
    The law, and why alpha is 0 where it is not fitted.
    """
    knots, token_step = np.unique(points.tokens, return_inverse=True)
    levels, request_step = np.unique(points.requests, return_inverse=True)
    # One column for the bias, then one for every increment of theta and of alpha: a point holds all the
    # increments up to its own knot, so non-negative coefficients make non-decreasing curves.
    base = np.ones((points.ms.size, 1))
    theta_columns = (token_step[:, None] >= np.arange(1, knots.size)).astype(np.float64)
    alpha_columns = (request_step[:, None] >= np.arange(1, levels.size)).astype(np.float64)

    why = None
    if levels[0] == MISSING:
        why = "alpha = 0: the profile does not give the requests of its verify steps"
    elif levels.size == 1:
        why = "alpha = 0: all verify steps have the same number of requests"
    else:
        both = np.hstack([base, theta_columns, alpha_columns])
        if np.linalg.matrix_rank(both) < both.shape[1]:
            why = "alpha = 0: requests and tokens rise together, so their shares cannot be told apart"
    if why is not None:
        levels, alpha_columns = levels[:0], alpha_columns[:, :0]

    design = np.hstack([base, theta_columns, alpha_columns])
    found = scipy.optimize.lsq_linear(
        design / points.ms[:, None], np.ones(points.ms.size), bounds=(0, np.inf), method="bvls"
    )
    increments = np.maximum(found.x, 0.0)
    theta = np.concatenate([[0.0], np.cumsum(increments[1 : knots.size])])
    alpha = np.concatenate([[0.0], np.cumsum(increments[knots.size :])]) if levels.size else np.empty(0)
    return Additive(points, float(increments[0]), knots, theta, levels, alpha), why
