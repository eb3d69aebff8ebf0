"""Prices in whole nanoseconds: a cost model, an arm's drafter and the host, rounded once for a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsim.cost import StepCost
from dsim.errors import InputError
from dsim.options import ReplicaConfig

NS_PER_MS = 1_000_000
#: Prices that depend on the batch's mean context are made once for each stretch of this many tokens.
CONTEXT_STEP = 64
# No step takes eleven days; the clock of a run counts whole nanoseconds.
_LONGEST_MS = 1e9


@dataclass(frozen=True)
class DraftCost:
    """What a draft costs, in passes of the profile's measured drafter.

    Parameters
    ----------
    scale
        Cost of one pass relative to the measured drafter (a one-layer head against a three-layer one: 1/3).
    per_token
        True: autoregressive, one pass a drafted token; False: one pass drafts the block.
    """

    scale: float = 1.0
    per_token: bool = False


class ArmPrices:
    """A cost model's prices in whole nanoseconds, rounded once, for one arm.

    Parameters
    ----------
    cost
        The fitted cost model.
    config
        Engine options.
    gamma
        Drafts a request (0: no drafter).
    draft
        Draft cost; ignored where gamma is 0.
    max_running
        Most requests that can ever be in the batch.
    """

    def __init__(self, cost: StepCost, config: ReplicaConfig, gamma: int, draft: DraftCost, max_running: int) -> None:
        self._cost = cost
        running = min(config.max_seqs, max_running)
        self.max_tokens = running * (1 + gamma) + (config.token_budget if config.colocated else 0)
        self.max_tokens = min(self.max_tokens, max(config.token_budget, running * (1 + gamma)))
        self.depends_on_context = cost.depends_on_context
        self.captured_sizes = cost.captured_sizes
        self.capture_limit = cost.capture_limit
        passes = gamma if draft.per_token else 1
        self.draft_ns = [0]
        if gamma:
            self.draft_ns += [nanoseconds(draft.scale * cost.draft_ms(r, passes)) for r in range(1, running + 1)]
        else:
            self.draft_ns += [0] * running
        host = [nanoseconds(config.host.ms(r)) for r in range(running + 1)]
        hidden = [round(h * config.host.hidden_fraction) if config.overlapped else 0 for h in host]
        self.host_hidden_ns = hidden
        self.host_exposed_ns = [h - x for h, x in zip(host, hidden, strict=True)]
        self.left_contexts = False  # a step's mean context lay outside the profiled ones
        self.one_table = not (cost.depends_on_context or cost.depends_on_requests)
        self._tables: dict[tuple[int, float | None], tuple[list[int], npt.NDArray[np.float64]]] = {}

    def verify(self, requests: int, context: float) -> tuple[list[int], npt.NDArray[np.float64]]:
        """Nanoseconds and milliseconds of the target's pass by tokens in the step."""
        mean = self._context(context) if self.depends_on_context else None
        key = (requests if self._cost.depends_on_requests else 0, mean)
        table = self._tables.get(key)
        if table is None:
            ms = np.asarray(self._cost.verify_table(max(1, requests), self.max_tokens, mean))
            _check_table(ms, self.max_tokens, max(1, key[0]))
            ns = np.rint(ms * NS_PER_MS).astype(np.int64)
            rounded = ns / NS_PER_MS
            rounded.flags.writeable = False
            table = self._tables[key] = (ns.tolist(), rounded)
        return table

    def _context(self, mean: float) -> float:
        """The mean context to price: rounded, but never out of the profiled contexts by the rounding."""
        rounded = round(mean / CONTEXT_STEP) * CONTEXT_STEP
        low, high = float(self._cost.contexts[0]), float(self._cost.contexts[-1])
        if low <= mean <= high:
            return min(max(rounded, low), high)
        self.left_contexts = True
        return float(rounded)


def _check_table(ms: npt.NDArray[np.float64], last: int, first: int) -> None:
    """Refuse a table that would end a run in an index error, or in prices that no policy can divide by.

    `first` is the smallest step that there can be: a token a request.
    """
    if ms.shape != (last + 1,):
        raise InputError(
            "the cost model's table does not reach the largest step",
            field="verify_table",
            value=list(ms.shape),
            expected=f"an array [{last + 1}]",
        )
    wrong = ~((ms[first:] * NS_PER_MS >= 1) & (ms[first:] < _LONGEST_MS))
    if wrong.any():
        tokens = first + int(np.argmax(wrong))
        raise InputError(
            f"the cost model's price of {tokens} tokens is no duration",
            field="verify_table",
            value=float(ms[tokens]),
            expected=f"milliseconds from 1e-6 to {_LONGEST_MS:g}",
        )


def nanoseconds(ms: float) -> int:
    """Milliseconds as whole nanoseconds."""
    return round(ms * NS_PER_MS)
