"""One call of a kernel, on a policy's view or an outcome: for tests, notebooks and `check_policy`."""

from __future__ import annotations

import numpy as np
from numba import njit

from dsim import kernel as k


@njit(cache=True)
def _once(
    plan, counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths
):
    return plan(
        counts, times, confidence, verify_ms, prices, captured, age, caps, accepted, params, state, work, lengths
    )


@njit(cache=True)
def _tell(observe, requests, verified, accepted, params, state):
    return observe(requests, verified, accepted, params, state)


def plan_once(kernel: k.Kernel, view, state=None):
    """int64[R]: what a kernel answers to a `dsim.policy.PolicyView`.

    Parameters
    ----------
    state
        As of `Kernel.memory`, for this many requests or more, changed in place; None: as a run begins.
    """
    requests, gamma = view.requests, view.gamma
    counts = [requests, gamma, view.base_tokens, view.sampling, view.caps_bind, view.queue_length, view.step]
    times = [view.draft_ms, view.host_hidden_ms, view.host_exposed_ms, view.slo_tpot_ms, view.time_s]
    prices = view.verify_ms if kernel.prices is None else kernel.prices(view.verify_ms, view.captured_sizes, gamma)
    lengths = np.zeros(requests, dtype=np.int64)
    _once(
        kernel.plan,
        np.array([*counts, view.capture_limit], dtype=np.int64),
        np.array(times, dtype=np.float64),
        np.array([view.history[age] for age in kernel.ages], dtype=np.float32).reshape(-1, requests, gamma),
        np.array(view.verify_ms, dtype=np.float64),
        np.array(prices, dtype=np.float64),
        np.array(view.captured_sizes, dtype=np.int64),
        np.array(view.age_steps, dtype=np.int64),
        np.array(view.caps, dtype=np.int64),
        np.zeros(requests, dtype=np.int64) if view.accepted is None else np.array(view.accepted, dtype=np.int64),
        np.array(kernel.params, dtype=np.float64),
        kernel.memory(requests) if state is None else state,
        np.zeros((6, requests * gamma + 1024), dtype=np.float32),
        lengths,
    )
    return lengths


def observe_once(kernel: k.Kernel, verified, accepted, state):
    """Tell a kernel what became of the drafts of a step.

    Parameters
    ----------
    verified, accepted
        int64[R]: drafts verified of each request, and the accepted ones among them.
    state
        As of `Kernel.memory`, changed in place.
    """
    _tell(
        kernel.observe,
        len(verified),
        np.array(verified, dtype=np.int64),
        np.array(accepted, dtype=np.int64),
        np.array(kernel.params, dtype=np.float64),
        state,
    )
