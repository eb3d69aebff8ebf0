"""The logistic function and its inverse, of SciPy: importing it takes as long as a run, and many runs need neither."""

from __future__ import annotations

from typing import Any


def expit(x: Any) -> Any:
    """1 / (1 + exp(-x)), element by element, in the precision of `x`."""
    import scipy.special

    return scipy.special.expit(x)


def logit(p: Any) -> Any:
    """log(p / (1 - p)), element by element, in the precision of `p`."""
    import scipy.special

    return scipy.special.logit(p)
