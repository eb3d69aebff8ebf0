"""Routers by name, and the draws of the one that is random."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError

ROUTERS = ("round-robin", "least-tokens", "power-of-two")


def check_router(kind: str) -> None:
    """Raise InputError for a name that is no router's."""
    if kind not in ROUTERS:
        raise InputError(field="router", value=kind, expected=f"one of {', '.join(ROUTERS)}")


def replica_pairs(rng: np.random.Generator, replicas: int, count: int) -> npt.NDArray[np.int64]:
    """int64[count, 2]: two different replicas for each of the next requests, as power-of-two draws them."""
    pairs = [rng.choice(replicas, size=2, replace=False) for _ in range(count)]
    return np.array(pairs, dtype=np.int64).reshape(count, 2)
