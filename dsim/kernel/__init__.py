"""The contract of compiled policies: what ``Policy.kernel()`` returns. Needs no Numba to be imported.

A policy may offer a second form of its ``plan``: a function compiled by Numba that works on plain arrays. A whole run
then needs no Python between its steps. `plan` stays the reference: a kernel returns the same verify lengths, bit for
bit, and the tests hold both against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Places in `counts`, the first argument of a kernel.
REQUESTS, BLOCK, BASE, SAMPLING, CAPS_BIND, QUEUE, AGE, CAPTURED = range(8)
#: Places in `times`, milliseconds (the last in seconds).
DRAFT_MS, HOST_HIDDEN_MS, HOST_EXPOSED_MS, SLO_MS, TIME_S = range(5)


@dataclass(frozen=True)
class Kernel:
    """A compiled form of a policy's ``plan``.

    Parameters
    ----------
    plan
        A ``numba.cfunc`` of `signature`, called as ``plan(counts, times, confidence, verify_ms, prices, captured, age,
        caps, accepted, params, state, work, lengths)``:

        counts
            int64[8]: R, gamma, tokens before any draft, requests that sample, whether a cap is below gamma, requests
            that wait, the step's number, the largest captured size.
        times
            float64[5]: draft, hidden host and exposed host milliseconds, the TPOT target (NaN: none), seconds of
            simulated time.
        confidence
            float32[ages, max_seqs, gamma]: rows 0..R - 1 hold the conditional confidences, one layer for each of
            `ages`; 1 where a request is younger than that.
        verify_ms, prices
            float64[n]: milliseconds of the target's pass by tokens in the step, and what `prices` made of them.
        captured
            int64[S] ascending: sizes with a captured graph.
        age
            int64[max_seqs]: decode steps that each request has been through.
        caps, accepted
            int64[max_seqs]: most drafts of each request; useful ones (clairvoyant policies only).
        params, state
            float64: `params`, and the replica's own numbers, the kernel's to change: at first `memory`.
        work
            float32[6, max_seqs * gamma + 1024]: scratch.
        lengths
            int64[max_seqs]: the answer, in rows 0..R - 1.

        It returns 0, and is not called for an empty batch.
    params
        Numbers for it.
    ages
        Ages, in steps, of the confidences that it reads.
    state
        What it remembers, as it is when a run begins: what the policy object remembers when it is asked for its kernel.
    per_request
        Numbers that it remembers of each request, 0 at first: behind `state` come so many for every place of the batch.
    prices
        ``prices(verify_ms, captured_sizes, gamma)``: what the policy believes of a price curve, once a curve; None:
        the curve itself.
    observe
        The compiled form of the policy's ``observe``, which a policy with one needs: a ``numba.cfunc`` of
        `feedback_signature`, called at the end of every step that drafted, as ``observe(requests, verified, accepted,
        params, state)``: R, int64[max_seqs] drafts verified of each request and the accepted ones among them (in rows
        0..R - 1, as in that step's plan), `params` and the replica's state. It returns 0.
    most_gamma
        Largest block that it serves, where ``plan`` refuses longer ones; None: any.
    """

    plan: Any
    params: tuple[float, ...] = ()
    ages: tuple[int, ...] = (0,)
    state: tuple[float, ...] = ()
    per_request: int = 0
    prices: Callable[[FloatArray, IntArray, int], FloatArray] | None = None
    observe: Any = None
    most_gamma: int | None = None

    def memory(self, places: int) -> FloatArray:
        """float64[len(state) + places * per_request]: what the kernel remembers as a run begins, of a largest batch."""
        return np.concatenate([np.array(self.state, dtype=np.float64), np.zeros(places * self.per_request)])


def ages_to(lag: int) -> tuple[int, ...]:
    """Current confidences, and those `lag` steps old."""
    return (0, lag) if lag else (0,)


@cache
def signature() -> Any:
    """The Numba signature of `Kernel.plan`."""
    from numba import types

    ints = types.Array(types.int64, 1, "C")
    reals = types.Array(types.float64, 1, "C")
    return types.int64(
        ints,
        reals,
        types.Array(types.float32, 3, "C"),
        reals,
        reals,
        ints,
        ints,
        ints,
        ints,
        reals,
        reals,
        types.Array(types.float32, 2, "C"),
        ints,
    )


@cache
def feedback_signature() -> Any:
    """The Numba signature of `Kernel.observe`."""
    from numba import types

    ints, reals = types.Array(types.int64, 1, "C"), types.Array(types.float64, 1, "C")
    return types.int64(types.int64, ints, ints, reals, reals)
