"""Whole runs without Python between the steps: the same bytes as the step-by-step loop, many times faster.

`dsim.cluster` and `dsim.replica` are the reference and say what is right. A run can be compiled where its policy offers
a `dsim.kernel.Kernel` and its drafts are replayed from a bank; Numba is optional, and only imported where a run is
compiled.
"""

from dsim.compiled.run import run_compiled, warm_up, why_not

__all__ = ["run_compiled", "warm_up", "why_not"]
