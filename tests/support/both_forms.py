"""A policy's `plan` and its compiled form, asked the same."""

from __future__ import annotations

import importlib.util

from dsim.kernel.cache import kernel_of, kernel_plan


def planned(policy, view):
    """list[int]: what `plan` answers. Where there is a compiled form that serves the view, it answers the same."""
    kernel = None
    if view.requests and view.gamma and importlib.util.find_spec("numba") is not None:
        kernel = kernel_of(policy)  # before it plans: with what it remembers now
    if kernel is None or view.gamma > (kernel.most_gamma or view.gamma):
        return policy.plan(view).tolist()
    state = kernel.memory(view.requests)
    compiled, answer = kernel_plan(kernel, view, state).tolist(), policy.plan(view).tolist()
    assert compiled == answer
    assert state.tolist() == kernel_of(policy).memory(view.requests).tolist()
    return answer
