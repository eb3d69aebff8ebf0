"""What a step costs: the `StepCost` contract, and the model that every fit becomes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from dsim.cost.points import Curve, Points
from dsim.errors import InputError
from dsim.profile import MISSING, FloatArray, IntArray

if TYPE_CHECKING:
    import pandas as pd


@runtime_checkable
class StepCost(Protocol):
    """Prices, in milliseconds, of the forward passes that one replica runs.

    Attributes
    ----------
    label
        Where the prices come from, e.g. ``measured:b300x4-dsv4-flash-0731:staircase``.
    gpus
        Accelerators of the replica.
    depends_on_requests, depends_on_context
        Whether `verify_table` varies with those arguments.
    captured_sizes, capture_limit
        int64[S] ascending (may be empty), and its last value (0 where nothing is captured).
    min_tokens
        Smallest profiled verify step (tokens). Below it its price is held; where nothing is captured, so that this is
        no padding, runs say ``extrapolated``.
    max_tokens, max_requests
        Largest profiled verify step (tokens) and draft batch (requests; 0 where no draft was profiled). Where
        the verify samples include the draft, `max_requests` is the largest verify batch.
    max_prefill_tokens
        Longest prompt (tokens) that the profile prices.
    max_verify_requests, contexts
        Largest profiled number of requests in a verify step, and the profiled contexts (int64, ascending). Only
        looked at where the prices depend on requests or on context.

    Examples
    --------
    >>> from dsim.cost import fit
    >>> from dsim.profile import load_profile
    >>> cost = fit(load_profile("b300x4-dsv4-flash-0731"))
    >>> table = cost.verify_table(requests=16, max_tokens=1025)
    >>> table.shape, float(table[0]), float(table[1024]), float(table[1025])
    ((1026,), 0.0, 20.634, 104.489)
    >>> cost.draft_ms(16), cost.draft_ms(16, passes=2)
    (1.3171, 2.6342)
    """

    @property
    def label(self) -> str: ...
    @property
    def gpus(self) -> int: ...
    @property
    def depends_on_requests(self) -> bool: ...
    @property
    def depends_on_context(self) -> bool: ...
    @property
    def captured_sizes(self) -> IntArray: ...
    @property
    def capture_limit(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def max_requests(self) -> int: ...
    @property
    def max_prefill_tokens(self) -> int: ...
    @property
    def max_verify_requests(self) -> int: ...
    @property
    def contexts(self) -> IntArray: ...

    def verify_table(self, requests: int, max_tokens: int, context: float | None = None) -> FloatArray:
        """float64[max_tokens + 1]: ms of a target pass by the tokens in it; entry 0 is 0."""
        ...

    def draft_ms(self, requests: int, passes: int = 1) -> float:
        """Milliseconds of `passes` passes of the drafter over a batch of so many requests."""
        ...

    def prefill_ms(self, tokens: int) -> float:
        """Milliseconds that a prompt of so many tokens takes alone."""
        ...


class Fit(Protocol):
    """One fitted price law for verify steps at one context length."""

    @property
    def points(self) -> Points: ...
    @property
    def depends_on_requests(self) -> bool: ...

    def price(self, requests: int, tokens: IntArray) -> FloatArray:
        """Milliseconds at each of `tokens` (>= 1), for a batch of so many requests."""
        ...

    def refit(self, points: Points) -> Fit | None:
        """The same law fitted to other points; None where they do not determine it."""
        ...


@dataclass(frozen=True)
class ErrorSummary:
    """Distribution of absolute relative errors, as fractions; NaN where `n` is 0."""

    n: int
    median: float
    p90: float
    max: float

    @classmethod
    def of(cls, errors: pd.DataFrame, branch: str | None = None) -> ErrorSummary:
        """Summary of a frame from `StepModel.residuals` or `StepModel.loo`, optionally of one branch."""
        kept = errors if branch is None else errors[errors["branch"] == branch]
        values = kept["relative_error"].abs().to_numpy(dtype=np.float64)
        if not values.size:
            return cls(0, np.nan, np.nan, np.nan)
        median, p90, largest = np.quantile(values, (0.5, 0.9, 1.0))
        return cls(int(values.size), float(median), float(p90), float(largest))


@dataclass(frozen=True, eq=False)
class StepModel:
    """A `StepCost` made of one `Fit` for every profiled context, a draft curve and a prefill curve.

    Built by `dsim.cost.fit`. Tables are rounded to the nanosecond once, kept, and handed out read-only; they
    are left out when the model is pickled.

    Parameters
    ----------
    label, gpus, captured_sizes, capture_limit
        See `StepCost`.
    contexts
        int64[C]: profiled context lengths, tokens, ascending. With none or one the context has no effect.
    fits
        One law for each context (or a single one).
    draft, prefill
        Curves, or None where the profile has no such samples.
    draft_included
        The verify prices contain the draft, so `draft_ms` is 0.
    allow_extrapolation
        Go on in a straight line where the profile ends, instead of raising.
    notes
        What the fit wants its user to know.
    """

    label: str
    gpus: int
    captured_sizes: IntArray
    capture_limit: int
    contexts: IntArray
    fits: tuple[Fit, ...]
    draft: Curve | None
    prefill: Curve | None
    draft_included: bool
    allow_extrapolation: bool
    notes: tuple[str, ...] = ()
    _tables: dict[tuple[int, int], FloatArray] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}

    @property
    def depends_on_requests(self) -> bool:
        """Whether `verify_table` varies with `requests`."""
        return any(law.depends_on_requests for law in self.fits)

    @property
    def depends_on_context(self) -> bool:
        """Whether `verify_table` varies with `context`."""
        return len(self.fits) > 1

    @property
    def min_tokens(self) -> int:
        """Smallest profiled number of tokens in a verify step (the largest such, over the contexts)."""
        return max(int(law.points.tokens[0]) for law in self.fits)

    @property
    def max_tokens(self) -> int:
        """Largest profiled number of tokens in a verify step (the smallest such, over the contexts)."""
        return min(int(law.points.tokens[-1]) for law in self.fits)

    @property
    def max_requests(self) -> int:
        """Largest profiled draft batch; 0 where no draft was profiled.

        Where the verify samples include the draft it is the largest verify batch, of at most one request a
        token where the profile does not tell.
        """
        if self.draft_included:
            batches = [int(law.points.requests.max()) for law in self.fits]
            return self.max_tokens if MISSING in batches else min(batches)
        return 0 if self.draft is None else int(self.draft.sizes[-1])

    @property
    def max_prefill_tokens(self) -> int:
        """Longest prompt that `prefill_ms` prices without extrapolation."""
        return self.max_tokens if self.prefill is None else int(self.prefill.sizes[-1])

    @property
    def max_verify_requests(self) -> int:
        """Largest request count that the verify prices know; 0 where they do not depend on it."""
        return min(int(law.points.requests.max()) for law in self.fits) if self.depends_on_requests else 0

    @property
    def prefill_source(self) -> str:
        """What `prefill_ms` is read from."""
        if self.prefill is not None:
            return "prefill samples"
        at = f" at a context of {int(self.contexts[0])}" if self.depends_on_context else ""
        return f"verify curve{at}"

    def verify_table(self, requests: int, max_tokens: int, context: float | None = None) -> FloatArray:
        """Milliseconds of a target pass by the number of tokens in it.

        Parameters
        ----------
        requests
            Requests in the step. Without effect unless `depends_on_requests`.
        max_tokens
            Last index of the table.
        context
            Mean context length of the batch, tokens. Needed where `depends_on_context`, otherwise without
            effect.

        Returns
        -------
        float64[max_tokens + 1], read-only; entry 0 is 0.

        Raises
        ------
        InputError
            Outside what was profiled, unless the model allows extrapolation.
        """
        if max_tokens < 0:
            raise InputError(field="max_tokens", value=max_tokens, expected="an integer >= 0")
        if max_tokens > self.max_tokens:
            self._leaving("tokens", max_tokens, f"at most {self.max_tokens}")
        key = 0
        if self.depends_on_requests:
            if requests < 0:
                raise InputError(field="requests", value=requests, expected="an integer >= 0")
            if requests > self.max_verify_requests:
                self._leaving("requests", requests, f"at most {self.max_verify_requests}")
            key = int(requests)
        if not self.depends_on_context:
            return self._table(0, key, max_tokens)
        return self._between_contexts(key, max_tokens, context)

    def _between_contexts(self, requests: int, max_tokens: int, context: float | None) -> FloatArray:
        known = f"{int(self.contexts[0])} to {int(self.contexts[-1])}"
        if context is None or not np.isfinite(context):
            raise InputError(
                f"{self.label} was profiled at several contexts",
                field="context",
                value=context,
                expected=f"the batch's mean context, {known} tokens",
            )
        if not self.contexts[0] <= context <= self.contexts[-1]:
            self._leaving("context", context, known)
        if context <= self.contexts[0]:
            return self._table(0, requests, max_tokens)
        right = min(int(np.searchsorted(self.contexts, context)), self.contexts.size - 1)
        share = (context - self.contexts[right - 1]) / (self.contexts[right] - self.contexts[right - 1])
        low = self._table(right - 1, requests, max_tokens)
        high = self._table(right, requests, max_tokens)
        if share > 1.0:  # extrapolated: never cheaper than the longest profiled context
            mixed = np.maximum(high, low + share * (high - low))
        else:
            mixed = (1.0 - share) * low + share * high
        table: FloatArray = np.round(mixed, 6)
        table.setflags(write=False)
        return table

    def _table(self, index: int, requests: int, max_tokens: int) -> FloatArray:
        table = self._tables.get((index, requests))
        if table is None or table.size <= max_tokens:
            last = self.max_tokens if max_tokens <= self.max_tokens else 2 * max_tokens
            table = np.zeros(last + 1)
            table[1:] = np.round(self.fits[index].price(requests, np.arange(1, last + 1)), 6)
            table.setflags(write=False)
            self._tables[index, requests] = table
        return table[: max_tokens + 1]

    def draft_ms(self, requests: int, passes: int = 1) -> float:
        """Milliseconds of `passes` passes of the measured drafter over a batch of `requests`.

        0 for an empty batch, and where the profile says that its verify samples include the draft.
        """
        if requests < 0 or passes < 0:
            bad, value = ("requests", requests) if requests < 0 else ("passes", passes)
            raise InputError(field=bad, value=value, expected="an integer >= 0")
        if requests == 0 or passes == 0:
            return 0.0
        if self.draft is None and not self.draft_included:
            raise InputError(
                f"{self.label} has no draft samples, so drafting has no price",
                field="requests",
                value=requests,
                expected="a profile with draft samples, or one whose verify samples include the draft",
            )
        if requests > self.max_requests:
            self._leaving("requests", requests, f"at most {self.max_requests}")
        return 0.0 if self.draft is None else round(passes * self.draft.at(requests), 6)

    def prefill_ms(self, tokens: int) -> float:
        """Milliseconds that a prompt of `tokens` takes alone (see `prefill_source`)."""
        if tokens < 0:
            raise InputError(field="tokens", value=tokens, expected="an integer >= 0")
        if tokens == 0:
            return 0.0
        if tokens > self.max_prefill_tokens:
            self._leaving("tokens", tokens, f"at most {self.max_prefill_tokens} in one prefill")
        if self.prefill is not None:
            return self.prefill.at(tokens)
        return float(self._table(0, 1 if self.depends_on_requests else 0, tokens)[tokens])

    def residuals(self) -> pd.DataFrame:
        """Fitted against measured at every profiled size.

        Columns: context_tokens, requests (`MISSING` where not given), tokens, branch (``captured``,
        ``eager``, or ``all`` where nothing is captured), measured_ms, fitted_ms, relative_error
        (fitted / measured - 1).
        """
        import pandas as pd

        rows = []
        for context, law in self._by_context():
            for i in range(law.points.tokens.size):
                rows.append(_error_row(context, law, law.points, i))
        return pd.DataFrame(rows, columns=_ERROR_COLUMNS)

    def loo(self) -> pd.DataFrame:
        """Leave-one-size-out: each size priced by the same law fitted to all the others.

        Columns as in `residuals`. Sizes that the others do not enclose (the ends of the captured and of the
        eager branch, the largest request count), or without which the law is not determined, are left out.
        """
        import pandas as pd

        rows = []
        for context, law in self._by_context():
            for i in range(law.points.tokens.size):
                keep = np.arange(law.points.tokens.size) != i
                if not _enclosed(law.points, keep, i):
                    continue
                other = law.refit(law.points.take(keep))
                if other is not None:
                    rows.append(_error_row(context, other, law.points, i))
        return pd.DataFrame(rows, columns=_ERROR_COLUMNS)

    def _by_context(self) -> Iterator[tuple[int, Fit]]:
        contexts = self.contexts.tolist() or [MISSING]
        return zip(contexts, self.fits, strict=True)

    def _leaving(self, name: str, value: float, expected: str) -> None:
        if not self.allow_extrapolation:
            raise InputError(
                f"{self.label} was not profiled there (allow_extrapolation goes on in a straight line)",
                field=name,
                value=value,
                expected=expected,
            )


_ERROR_COLUMNS = [
    "context_tokens",
    "requests",
    "tokens",
    "branch",
    "measured_ms",
    "fitted_ms",
    "relative_error",
]


def _error_row(context: int, law: Fit, points: Points, i: int) -> tuple[int, int, int, str, float, float, float]:
    tokens, requests, measured = int(points.tokens[i]), int(points.requests[i]), float(points.ms[i])
    branch = "all" if not points.limit else "eager" if points.eager[i] else "captured"
    fitted = float(law.price(max(requests, 0), np.array([tokens], dtype=np.int64))[0])
    return context, requests, tokens, branch, measured, fitted, fitted / measured - 1.0


def _enclosed(points: Points, keep: np.ndarray[Any, np.dtype[np.bool_]], i: int) -> bool:
    """Whether the other points of its branch reach to both sides of point `i` in tokens and in requests."""
    branch = keep & (points.eager == points.eager[i])
    if not branch.any():
        return False
    tokens, requests = points.tokens[branch], points.requests[keep]
    return bool(tokens[0] <= points.tokens[i] <= tokens[-1] and requests.min() <= points.requests[i] <= requests.max())
