"""Watch a run step by step: what a policy saw, what it chose, and how good that was.

A probe sits in the two seams that a replica has, its draft source and its policy: `watched` wraps both, and a run
without a probe has no trace of it.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dsim.drafts import DraftSource
from dsim.errors import InputError
from dsim.planning import allowed, cumulative_value
from dsim.policy import FloatArray, IntArray, Policy, PolicyView, policy_name
from dsim.telemetry import Records


class StepProbe(Protocol):
    """What looks over a policy's shoulder. One probe serves all replicas of one run."""

    def step(self, view: PolicyView, lengths: IntArray, alpha: FloatArray) -> None:
        """A policy has decided.

        Parameters
        ----------
        view
            What it saw, confidences of whatever quality included.
        lengths
            int64[R]: what it chose, 0..caps.
        alpha
            float64[R, gamma]: the exact acceptance probabilities of the drafts, each given those before it.
        """
        ...

    def columns(self, records: Records) -> dict[str, float]:
        """The run is over: numbers for its row."""
        ...


class StepRegret:
    """Expected tokens a millisecond against the best budget, step by step.

    Under the exact probabilities alpha, verify lengths l are worth the step's bonus tokens and, of each request, the
    products alpha_1 ... alpha_j, j <= l; the step takes `PolicyView.step_ms` on the real curve (draft, target and
    host). The best budget is the number of drafts, taken in the order of these products, with the most expected
    tokens a millisecond. The regret of a step is the relative loss 1 - rate / best rate, in 0..1.

    It judges each step by itself: the ratio of one step is not quite the throughput of many, so that a policy could
    have the higher throughput and the higher regret. It knows what a scheduler could know at best, so it says nothing
    of a clairvoyant policy: the columns are NaN there, and where nothing is drafted.

    Attributes
    ----------
    start_s, loss
        Of every step so far: simulated time at its start, and the regret.

    Examples
    --------
    One request, a draft that is accepted half the time; the step takes 4 ms, and 5 with the draft. Expected are 1
    token in 4 ms or 1.5 in 5:

    >>> from dsim.policy import make_view
    >>> regret = StepRegret()
    >>> regret.step(make_view([[0.9]], [0.0, 4.0, 5.0]), np.array([0]), np.array([[0.5]]))
    >>> round(regret.loss[0], 6)  # 1 - (1 / 4) / (1.5 / 5)
    0.166667
    """

    def __init__(self) -> None:
        self.start_s: list[float] = []
        self.loss: list[float] = []

    def step(self, view: PolicyView, lengths: IntArray, alpha: FloatArray) -> None:
        """See `StepProbe.step`."""
        if view.accepted is not None or not view.requests:
            return
        survival = np.multiply.accumulate(alpha, axis=1)
        if view.caps_bind:
            survival *= allowed(view.caps, view.gamma)
        step_ms = view.step_ms()
        tokens = cumulative_value(survival, start=view.sampling)
        best = float((tokens / step_ms[: tokens.size]).max())
        expected = view.sampling + float((survival * allowed(lengths, view.gamma)).sum())
        self.start_s.append(view.time_s)
        # Two ways to add the same numbers up: not below 0 by rounding.
        self.loss.append(max(0.0, 1 - expected / float(step_ms[int(lengths.sum())]) / best))

    def columns(self, records: Records) -> dict[str, float]:
        """``regret_mean``, ``regret_p90``, ``regret_p99`` over the steps that begin in the measuring window."""
        low, high = (ns * 1e-9 for ns in records.window_ns)
        start = np.array(self.start_s)
        loss = np.array(self.loss)[(start >= low) & (start < high)]
        if not loss.size:
            return dict.fromkeys(("regret_mean", "regret_p90", "regret_p99"), float("nan"))
        p90, p99 = np.percentile(loss, (90, 99))
        return {"regret_mean": float(loss.mean()), "regret_p90": float(p90), "regret_p99": float(p99)}


def watched(drafts: DraftSource, policy: Policy, probe: StepProbe) -> tuple[DraftSource, Policy]:
    """The same drafts and policy, with a probe looking on.

    Raises
    ------
    InputError
        A draft source that does not know its acceptance probabilities before verification (live drafting).
    """
    source = getattr(drafts, "source", drafts)  # what calibration wraps
    if not hasattr(source, "alpha"):
        raise InputError(
            f"the drafts of '{drafts.label}' have no known acceptance probabilities",
            field="drafts.source",
            expected="drafts replayed from a bank",
        )
    tap = _Tap(drafts, source.alpha)
    return tap, _Watched(policy, tap, probe)


class _Tap:
    """A draft source that remembers where it drafted last."""

    def __init__(self, drafts: DraftSource, alpha: Any) -> None:
        self._drafts, self._alpha = drafts, alpha
        self.gamma, self.paired, self.domains, self.label = drafts.gamma, drafts.paired, drafts.domains, drafts.label
        self.open = drafts.open
        # Optional methods are found by their presence: None is as good as none.
        self.observe = getattr(drafts, "observe", None)

    def draft(self, requests: IntArray, positions: IntArray) -> tuple[npt.NDArray[np.float32], IntArray]:
        """See `DraftSource.draft`."""
        self._last = requests, positions
        return self._drafts.draft(requests, positions)

    def alpha(self) -> FloatArray:
        """float64[R, gamma] of the latest draft."""
        found: FloatArray = self._alpha(*self._last)
        return found


class _Watched:
    """A policy whose decisions a probe sees. A replica drafts and plans in one go: the tap's latest is this view's."""

    def __init__(self, policy: Policy, tap: _Tap, probe: StepProbe) -> None:
        self._policy, self._tap, self._probe = policy, tap, probe
        self.traits = policy.traits
        self.observe = getattr(policy, "observe", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watched:
        # Each replica has a policy of its own; the probe is one for all of them.
        return _Watched(copy.deepcopy(self._policy, memo), self._tap, self._probe)

    def __repr__(self) -> str:
        return policy_name(self._policy)

    def plan(self, view: PolicyView) -> IntArray:
        """The policy's own answer. One that the replica will refuse is not shown to the probe."""
        lengths = self._policy.plan(view)
        sound = isinstance(lengths, np.ndarray) and lengths.shape == view.caps.shape and lengths.dtype.kind in "iu"
        if sound and not ((lengths < 0) | (lengths > view.caps)).any():
            self._probe.step(view, lengths, self._tap.alpha())
        return lengths
