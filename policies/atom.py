"""ROCm ATOM's DSpark scheduler: Algorithm 1 on a straight-line table, its lengths adopted steps later."""

from __future__ import annotations

import numpy as np

from dsim.errors import InputError
from dsim.kernel import Kernel
from dsim.lookup import PriceMemo
from dsim.planning import Survival, cumulative_value, first_non_gain, top_k
from dsim.policy import BasePolicy, FloatArray, IntArray, PolicyView, Traits
from policies._parameters import need_bool, need_int
from policies._tables import captured_or_all, need_block, pinned_table

CAPTURED, ALL = "captured", "all"
#: Largest block anywhere in dsim, its anchor included.
_MOST_TOKENS = 65


class Atom(BasePolicy):
    """The lengths that Algorithm 1 found `lag` steps ago, on a table linear between the captured sizes.

    Drafts are admitted by descending survival until one does not raise tau * SPS(B). SPS, steps a second, is timed at
    the captured sizes and linear in B between them, level outside, so the early stop meets slopes where the real curve
    has stairs. The lengths themselves are `lag` steps old: what was found for one block is used for a later
    one of the same request. What becomes of them is the engine's choice of two layouts.

    - **Ragged** (the engine's documented configuration): each request has its own length, but only in a step whose
      requests are exactly those of the step before. After every newcomer, departure or prompt chunk whole blocks are
      verified once, and so are those of a request that has no length yet. Of requests that last a hundred steps, three
      hundred make a new batch in nearly every one: under load nothing is trimmed.
    - **Uniform**: one query length q for the whole batch, the longest request's drafts and one, rounded up to one of
      `buckets`. A single request without a length makes it the whole block; a departure changes nothing.

    A step with prompt chunks verifies whole blocks in either.

    Parameters
    ----------
    table
        ``"captured"``: the step's own prices at the captured sizes (at every size where nothing is captured), or the
        path of an engine file (`dsim.engines`), whose prices are then all that counts.
    lag
        Age of the lengths, in engine steps, >= 0. The default is the usual description, "two steps back". In the source
        that counts from the top of a step, where one back is the block about to be verified: in the counting of
        `PolicyView.history` it would be ``lag=1``.
    ragged
        Which of the two layouts.
    full_on_change
        Ragged only: whole blocks after every change of the batch. False asks what the rule costs.
    anchor
        No request gets fewer drafts than it had accepted in the step before (uniform: than any had). The engine finds
        its next token at that place of the segment. In a batch that has changed nobody's count is known.
    floor
        Least drafts of a request, >= 0. 0 in the engine; 1 in its first version, which was not in use.
    buckets
        Uniform only: query lengths (tokens a request, >= 1) with a captured graph, ``"1/3/6"``; the whole block is
        always one. ``"all"``: every length. The engine's own default is none, so that nothing is ever trimmed:
        ``buckets=65`` is that.

    Raises
    ------
    InputError
        A parameter outside its range or of the other layout, or `table` is neither ``"captured"`` nor an engine's
        price table. From `plan`: a table that is for blocks of another size.

    Examples
    --------
    Captured are 2, 4 and 6 tokens at 10, 14 and 20 ms, so 3 tokens are believed to make 85.7 steps a second. The first
    draft pays (2.75 * 85.7 > 2 * 100), the second one too (3.375 * 71.4), the third does not (3.625 * 60.7).
    What the drafts are worth by now does not matter. In its first step a batch is verified in full.

    >>> from dsim.policy import make_view
    >>> old, now = [[0.75, 0.25], [0.625, 0.4]], [[0.1, 0.1], [0.9, 0.9]]
    >>> prices = [0.0, 10.0, 10.0, 14.0, 14.0, 20.0, 20.0]
    >>> policy, view = Atom(), make_view(now, prices, history=(now, old), captured_sizes=[2, 4, 6])
    >>> policy.plan(view).tolist(), policy.plan(view).tolist()
    ([2, 2], [1, 1])

    References
    ----------
    ROCm ATOM, https://github.com/ROCm/ATOM/pull/1414, files ``atom/spec_decode/dspark_scheduler.py`` (the search, the
    table, ``ragged_verify_lens``), ``dspark_verify.py`` (which lengths are adopted) and
    ``atom/model_engine/model_runner.py`` (``_dspark_apply_q_bucket``, ``_dspark_apply_ragged``: the two layouts), in
    https://github.com/ROCm/ATOM; ``recipes/DSpark.md`` there for the configuration.

    Differences from the paper (DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147): Algorithm 1 there is
    synchronous and section 5.2 replaces the early stop by a global search; here the early stop stayed and
    the lengths are old. Differences from the engine: the old lengths are found again from the old confidences
    of the requests that are still there, at today's prices; a reordered batch is no change here; without captured
    graphs it takes a made-up straight line; in the version that was merged first a ragged request was anchored by
    the most that any had accepted, as the uniform ones are.
    """

    def __init__(
        self,
        table: str = CAPTURED,
        lag: int = 2,
        ragged: bool = True,
        full_on_change: bool = True,
        anchor: bool = True,
        floor: int = 0,
        buckets: str | int = ALL,
    ) -> None:
        for name, count in (("lag", lag), ("floor", floor)):
            need_int(name, count, 0)
        for name, switch in (("ragged", ragged), ("full_on_change", full_on_change), ("anchor", anchor)):
            need_bool(name, switch)
        self.table, self.lag, self.ragged, self.full_on_change = table, lag, ragged, full_on_change
        self.anchor, self.floor, self.buckets = anchor, floor, buckets
        self._queries = _queries(buckets)
        if ragged and buckets != ALL:
            expected = "ragged=false with it"
            raise InputError("belongs to uniform lengths", field="buckets", value=buckets, expected=expected)
        if not ragged and not full_on_change:
            raise InputError(
                "belongs to ragged lengths: uniform ones do not look at who was there before",
                field="full_on_change",
                value=full_on_change,
                expected="true with ragged=false",
            )
        self._file = pinned_table(table, (CAPTURED,))
        # With lag 0 it is Algorithm 1, lossless by its early stop; with more by the age of all that it reads.
        self.traits = Traits(
            confidence_age=lag,
            cost_driven=self._file is None,
            floor=self._rounded(floor, _MOST_TOKENS - 1),
            needs_gamma=floor,
        )
        self._memo = PriceMemo()
        # Requests of the step before (-1: it held a prompt chunk, or there was none), and what they had accepted.
        self._before = -1
        self._accepted: IntArray | None = None

    def plan(self, view: PolicyView) -> IntArray:
        need_block(self._file, self.table, view.gamma)
        requests = view.requests
        prompts = view.base_tokens > requests
        age = view.age_steps
        # Rows keep their order: with nobody new and equally many, they are the same requests.
        same = not prompts and requests == self._before and not (requests and age.min() <= 0)
        accepted = self._accepted
        self._before, self._accepted = -1 if prompts else requests, None
        known = age >= self.lag
        if prompts or not requests or not known.any() or (self.ragged and self.full_on_change and not same):
            return view.caps.copy()
        if not self.ragged and not known.all():
            return view.caps.copy()
        survival = view.survival(self.lag)
        if known.all():
            lengths = self._lengths(survival, view)
        else:
            lengths = view.caps.copy()
            lengths[known] = self._lengths(survival[known], view)
        if self.ragged:
            if self.anchor and same and accepted is not None:
                np.maximum(lengths, accepted, out=lengths)
            if self.floor:
                np.maximum(lengths, self.floor, out=lengths)
            return np.minimum(lengths, view.caps)
        longest = max(int(lengths.max()), self.floor)
        if self.anchor and accepted is not None and accepted.size:
            longest = max(longest, int(accepted.max()))
        return np.minimum(view.caps, self._rounded(longest, view.gamma))

    def observe(self, verified: IntArray, accepted: IntArray) -> None:
        """Remember what each request of the step had accepted, int64[R]: the place of its next token."""
        self._accepted = accepted

    def kernel(self) -> Kernel | None:
        """See `dsim.kernel.Kernel`. A table from a file has none."""
        if self._file is not None:
            return None
        from policies import _kernels

        return Kernel(
            _kernels.atom,
            params=(self.lag, self.ragged, self.full_on_change, self.anchor, self.floor, *(self._queries or ())),
            ages=(self.lag,),
            state=(-1.0, -1.0),
            per_request=1,
            prices=lambda curve, captured, _: _linear(curve, captured),
            observe=_kernels.atom_observe,
        )

    def _rounded(self, drafts: int, gamma: int) -> int:
        """Drafts of everybody in the smallest graph that has room for so many; the whole block where none has."""
        if self._queries is None:
            return min(drafts, gamma)
        return min(next((query - 1 for query in self._queries if query > drafts), gamma), gamma)

    def _lengths(self, survival: Survival, view: PolicyView) -> IntArray:
        """int64[n]: what Algorithm 1 gives the n requests that were there, by their survivals of then."""
        requests = survival.shape[0]
        steps_per_second = self._steps_per_second(view, requests)
        if not survival.size:
            return np.zeros(requests, dtype=np.int64)
        tau = cumulative_value(survival, start=requests)
        return top_k(survival, first_non_gain(tau * steps_per_second[: tau.size]))

    def _steps_per_second(self, view: PolicyView, requests: int) -> FloatArray:
        """float64[n * gamma + 1 or more]: believed steps a second by number of drafts of n requests."""
        if self._file is not None:
            return np.asarray(1000.0 / self._file.prices(requests, requests * (1 + view.gamma))[requests:])
        believed = self._memo.get(view.verify_ms, 0, lambda curve, _: _linear(curve, view.captured_sizes))
        return believed[requests:]


def _queries(buckets: object) -> tuple[int, ...] | None:
    """The query lengths that `buckets` names, ascending; None where every length is one."""
    if buckets == ALL:
        return None
    parts = buckets.split("/") if isinstance(buckets, str) else [str(buckets)]
    number = all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts) and type(buckets) is not bool
    found = tuple(int(part) for part in parts) if number else (0,)
    if list(found) != sorted(set(found)) or found[0] < 1 or found[-1] > _MOST_TOKENS:
        expected = f"'all', or increasing query lengths in 1..{_MOST_TOKENS} such as 1/3/6"
        raise InputError(field="buckets", value=buckets, expected=expected)
    return found


def _linear(curve: FloatArray, captured: IntArray) -> FloatArray:
    """float64[n]: steps a second, linear between the captured sizes and level outside them."""
    last = curve.size - 1
    sizes = captured_or_all(captured, last)
    return np.asarray(np.interp(np.arange(last + 1), sizes, 1000.0 / curve[sizes]))
