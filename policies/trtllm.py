"""TensorRT-LLM's DSpark planner: a floor for everybody, few sizes to choose from, and guards against trimming."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dsim.engines.trtllm import DEFAULT_GAIN, TrtllmV1, TrtllmV2
from dsim.errors import InputError
from dsim.kernel import Kernel
from dsim.lookup import PriceMemo, sampled
from dsim.planning import Survival, count_rows
from dsim.policy import BasePolicy, FloatArray, IntArray, PolicyView, Traits
from policies._parameters import need_int, need_number
from policies._tables import need_block, pinned_table

PROFILED = "profiled"


class Trtllm(BasePolicy):
    """Maximize tau / (draft + target pass) over confidences `lag` steps old, but verify everything where in doubt.

    Every request gets `floor` drafts, whose survivals count in tau. Of the drafts above it the b best by the old
    survivals are verified, ties by position, then request: which drafts, not only how many, is decided by old
    confidences. Only some b are looked at (`tiers`), and the largest wins where values are equal. Everything is
    verified

    - in the first `lag` steps, when no confidences have landed yet;
    - where no number of drafts changes the price: a flat table is one that nobody measured;
    - unless the best b promises a share of `min_predicted_gain` more tokens a second than everything;
    - with a drain guard, unless what the step saves outweighs what committing fewer tokens costs later:
      T(all) - T(b) - `drain` * (tau(all) - tau(b)) / R * T(tail) / `drain_tokens` > `drain_least_ms`, where T(tail) is
      the step of `drain_tail` requests that verify everything. Of the b that pass, the one with the largest such
      value wins instead of the best ratio.

    Parameters
    ----------
    table
        ``"profiled"``: draft pass plus target pass, the latter timed with whole blocks of 8, 16, 32, ... requests of 2
        to 1 + gamma tokens each and at the largest step there is, linear between these sizes, level outside; or the
        path of an engine file (`dsim.engines`), whose prices are then all that counts. A file of exact graphs
        (``trtllm-v2``) brings its sizes and its drain guard, and without the latter the engine never trims.
    lag
        Age of the confidences, >= 0: 1 or 2 in the engine, the latter with its overlap scheduler. With 0 the choice
        is retrospective, not lossless.
    floor
        Drafts that every request gets, >= 0 (``min_verify_len``, at least 1 in the engine).
    tiers
        ``"graph"``: the numbers of drafts that come from one length for all, `floor`, half the block (rounded up)
        or the whole one, which is the engine's default ladder of captured graphs; other lengths as ``"1-2-5"``,
        beginning with the floor; ``"global"``: every number, and then the smallest wins where values are equal.
        Lengths that do not reach the whole block leave nothing to fall back to: neither guard applies then, as in the
        engine, and asking for one is an error.
    min_predicted_gain
        See above, >= 0; None: the file's, or 0.01.
    drain, drain_tokens, drain_tail, drain_least_ms
        The drain guard: how much later steps count, >= 0 (0: no guard); tokens that a request commits a step,
        on average, > 0; requests in the tail, >= 1; least value in milliseconds, >= 0.

    Raises
    ------
    InputError
        A parameter outside its range, one of the drain guard without the guard, or `table` is neither a name nor
        an engine's price table. From `plan`: a guard that is given although `tiers` end before the block does.

    Examples
    --------
    Eight requests, two drafts each, of which the second survives by half. tau / ms is 16 / 10 at the floor. For 14 ms,
    20 tokens are no better; for 12.6 ms they are not either, but by less than the guard; for 12.4 ms they are.

    >>> from dsim.policy import make_view
    >>> old = [[1.0, 0.5]] * 8
    >>> for ms in (14.0, 12.6, 12.4):
    ...     view = make_view(old, np.interp(range(25), [16, 24], [10.0, ms]), history=(old, old))
    ...     print(Trtllm().plan(view)[0], Trtllm(min_predicted_gain=0.0).plan(view)[0])
    1 1
    2 1
    2 2

    References
    ----------
    TensorRT-LLM, https://github.com/NVIDIA/TensorRT-LLM/pull/17056, files ``dspark_planner.py``, ``dspark_verify.py``,
    ``dspark_schedule.py`` and ``dspark_sps_profiler.py`` in ``tensorrt_llm/_torch/speculative``; drain guard:
    https://github.com/NVIDIA/TensorRT-LLM/pull/18392 (both open).

    Differences from the paper (DSpark, arXiv 2607.05147, https://arxiv.org/abs/2607.05147, section 5.2): floor,
    tiers, guards, the draft pass in the price, old confidences for the ranking too. Differences from the
    engine: whether a copy has landed is a matter of timing there, here it takes `lag` steps; it drops drafts
    with a survival below 1e-6, here only those at 0; ranks of an attention-DP group, which agree on one shape, are
    one here. Prompt chunks are not in its price.
    """

    def __init__(
        self,
        table: str = PROFILED,
        lag: int = 2,
        floor: int = 1,
        tiers: str = "graph",
        min_predicted_gain: float | None = None,
        drain: float = 0.0,
        drain_tokens: float = 4.0,
        drain_tail: int = 1,
        drain_least_ms: float = 0.0,
    ) -> None:
        for name, count, least in (("lag", lag, 0), ("floor", floor, 0), ("drain_tail", drain_tail, 1)):
            need_int(name, count, least)
        gain = 0.0 if min_predicted_gain is None else min_predicted_gain
        for name, value in (("min_predicted_gain", gain), ("drain", drain), ("drain_least_ms", drain_least_ms)):
            need_number(name, value)
        need_number("drain_tokens", drain_tokens, zero=False)
        self.table, self.lag, self.floor, self.tiers = table, lag, floor, tiers
        self.min_predicted_gain = min_predicted_gain
        self.drain, self.drain_tokens = drain, drain_tokens
        self.drain_tail, self.drain_least_ms = drain_tail, drain_least_ms
        own = (drain, drain_tokens, drain_tail, drain_least_ms) != (0.0, 4.0, 1, 0.0)
        if own and not drain:
            raise InputError("the drain guard's other parameters need it", field="drain", value=drain, expected="> 0")
        self._ladder = _ladder(tiers, floor)
        self._file = pinned_table(table, (PROFILED,))
        self._gain = DEFAULT_GAIN if min_predicted_gain is None else float(min_predicted_gain)
        #: Multiplier, tokens a step, least ms, and milliseconds of the tail's step if they are known.
        self._guard: tuple[float, float, float, float | None] | None = None
        if drain:
            self._guard = float(drain), float(drain_tokens), float(drain_least_ms), None
        self._refuses = False
        if self._file is not None:
            self._take_from_file(own)
        self.traits = Traits(
            confidence_age=lag,
            cost_driven=self._file is None,
            floor=floor,
            # A ladder of one's own need not hold the whole block, and the guard compares with nothing else.
            gain_guard=0.0 if self._ladder else self._gain,
            coarse_prices=table == PROFILED,
            # Nothing current is read at all.
            lossless=lag > 0,
            needs_gamma=max(floor, *(self._ladder or (0,))),
        )
        self._memo = PriceMemo()

    def _take_from_file(self, own_guard: bool) -> None:
        """The minimum gain of a file, and the sizes and the drain guard of one of exact graphs."""
        if self.min_predicted_gain is None and isinstance(self._file, TrtllmV1 | TrtllmV2):
            self._gain = self._file.gain
        if not isinstance(self._file, TrtllmV2):
            return
        if self.tiers != "graph":
            raise InputError("the file has sizes of its own", field="tiers", value=self.tiers, expected="graph")
        self._ladder = None
        if own_guard:
            raise InputError("the file decides on the drain guard", field="drain", value=self.drain, expected="0")
        guard = self._file.iteration_drain_guard
        if guard is None:
            self._refuses = True
            return
        self._guard = (
            float(guard["loss_multiplier"]),
            float(guard["mean_output_tokens_per_request_iteration"]),
            float(guard["minimum_group_value_ms"]),
            self._file.native_ms(guard["tail_graph_batch_size"]),
        )

    def plan(self, view: PolicyView) -> IntArray:
        self._refuse_idle_guards(view.gamma)
        need_block(self._file, self.table, view.gamma)
        requests, floor, caps = view.requests, self.floor, view.caps
        granted = np.minimum(caps, floor)
        if view.caps_bind:
            first = requests + int(granted.sum())
            spare = requests + int(caps.sum()) - first
        else:
            first, spare = requests * (1 + floor), requests * max(0, view.gamma - floor)
        if not spare or view.step < self.lag or self._refuses:
            return caps.copy()
        ms = self._prices(view, first, first + spare)
        if ms[0] == ms[-1] and ms.min() == ms.max():
            return caps.copy()
        survival = view.survival(self.lag)
        rest = survival[:, floor:]
        ranked = rest.flatten()
        ranked.sort()
        # One by one, the floor's first: the bits of a sum depend on the order.
        tau = np.empty(requests * floor + spare + 1)
        tau[0] = requests
        tau[1 : requests * floor + 1] = survival[:, :floor].ravel()
        tau[requests * floor + 1 :] = ranked[::-1][:spare]
        tau = np.add.accumulate(tau, out=tau)[requests * floor :]
        numbers = self._numbers(view, first)
        if numbers is None:
            taken = self._best(view, tau, ms, whole=True)
        else:
            taken = numbers[self._best(view, tau[numbers], ms[numbers], whole=numbers[-1] == spare)]
        granted += _spread(rest, ranked, taken)
        return granted

    def kernel(self) -> Kernel | None:
        """See `dsim.kernel.Kernel`. A table from a file has none."""
        if self._file is not None:
            return None
        from policies import _kernels

        ladder, asked = self._ladder or (), self.min_predicted_gain is not None or self.drain
        return Kernel(
            _kernels.trtllm,
            params=(
                *(self.lag, self.floor, self._gain, self._ladder is None),
                *(self.drain, self.drain_tokens, self.drain_least_ms, self.drain_tail),
                *ladder,
            ),
            ages=(self.lag,),
            prices=lambda curve, _, gamma: _profiled(curve, gamma),
            most_gamma=ladder[-1] if ladder and asked else None,
        )

    def _refuse_idle_guards(self, gamma: int) -> None:
        """A guard that was asked for, on a ladder without the whole block that it would fall back to."""
        if not self._ladder or self._ladder[-1] >= gamma:
            return
        for name, value in (("min_predicted_gain", self.min_predicted_gain), ("drain", self.drain or None)):
            if value is not None:
                raise InputError(
                    f"is not used with tiers = '{self.tiers}', which end before the whole block of {gamma} drafts",
                    field=name,
                    value=value,
                    expected=f"tiers that end with {gamma}, or no {name}",
                )

    def _prices(self, view: PolicyView, first: int, last: int) -> FloatArray:
        """float64[last - first + 1]: milliseconds by tokens of the requests in decode, from `first` on."""
        if self._file is not None:
            return self._file.prices(view.requests, last)[first:]
        return view.draft_ms + self._memo.get(view.verify_ms, view.gamma, _profiled)[first : last + 1]

    def _tail_ms(self, view: PolicyView) -> float:
        """Milliseconds of the step of the tail's requests that verify everything."""
        last = self.drain_tail * (1 + view.gamma)
        if self._file is not None:
            return float(self._file.prices(self.drain_tail, last)[last])
        believed = self._memo.get(view.verify_ms, view.gamma, _profiled)
        return view.draft_ms + float(believed[min(last, believed.size - 1)])

    def _numbers(self, view: PolicyView, first: int) -> list[int] | None:
        """Numbers of drafts above the floor to choose from, ascending; None for every one."""
        if self._ladder is None:
            return None
        ladder = self._ladder or (self.floor, -(-view.gamma // 2), view.gamma)
        lengths = [length for length in ladder if self.floor <= length <= view.gamma]
        if view.caps_bind:
            return [view.requests + int(np.minimum(view.caps, length).sum()) - first for length in lengths]
        return [view.requests * (1 + length) - first for length in lengths]

    def _best(self, view: PolicyView, tau: FloatArray, ms: FloatArray, *, whole: bool) -> int:
        """Which of the numbers of drafts is best by its tokens and price; the last one is everything if `whole`."""
        rate = tau / ms
        last = rate.size - 1
        if self._ladder is None:
            best = int(rate.argmax())
        else:
            # From behind: the largest of equal ones. Where every number is looked at, the smallest.
            best = last - int(rate[::-1].argmax())
        if not whole:
            return best
        if rate[best] < rate[-1] * (1 + self._gain):
            return last
        return best if self._guard is None else self._drained(view, tau, ms, rate)

    def _drained(self, view: PolicyView, tau: FloatArray, ms: FloatArray, rate: FloatArray) -> int:
        """Which of the numbers of drafts is of the largest value to the whole group; the last one where none passes."""
        assert self._guard is not None
        multiplier, tokens_a_step, least_ms, tail_ms = self._guard
        if tail_ms is None:
            tail_ms = self._tail_ms(view)
        everything = float(rate[-1])
        wanted = everything * (1 + self._gain)
        passes = rate >= wanted if wanted > everything else rate > everything
        value = ms[-1] - ms
        value -= (tau[-1] - tau) * (multiplier * tail_ms / tokens_a_step / view.requests)
        passes &= value > least_ms
        passing = np.flatnonzero(passes)
        if not passing.size:
            return int(rate.size) - 1
        value = value[passing]
        best = passing[value == value.max()]
        # Of equal values the best ratio, of equal ratios the most drafts.
        return int(best[::-1][rate[best[::-1]].argmax()])


def _ladder(tiers: object, floor: int) -> tuple[int, ...] | None:
    """The lengths that `tiers` names; none where they follow from the block, None where every number counts."""
    if tiers == "global":
        return None
    if tiers == "graph":
        return ()
    parts = tiers.split("-") if isinstance(tiers, str) else [str(tiers)]
    if all(part.isdecimal() for part in parts):
        lengths = tuple(int(part) for part in parts)
        if lengths[0] == floor and all(low < high for low, high in pairwise(lengths)):
            return lengths
    expected = f"graph, global or increasing lengths such as {floor}-{floor + 2}, the first one the floor"
    raise InputError(field="tiers", value=tiers, expected=expected)


def _profiled(curve: FloatArray, gamma: int) -> FloatArray:
    """The curve as believed from whole blocks of 2 to 1 + gamma tokens of 8, 16, 32, ... requests."""
    last = curve.size - 1
    batches = 1 << np.arange(3, max(4, last.bit_length()))
    sizes = np.unique(np.append(np.multiply.outer(batches, np.arange(2, gamma + 2)), last))
    return sampled(curve, sizes, "linear", hold=True).prices(last)


def _spread(survival: Survival, ranked: Survival, k: int) -> IntArray:
    """int64[R]: `top_k` with ties by position, then request: of certain drafts everyone gets the first one first.

    `ranked` holds all survivals, smallest first; k is at most as many.
    """
    if k <= 0:
        return np.zeros(survival.shape[0], dtype=np.int64)
    worst = ranked[-k]
    if not worst > 0:
        return count_rows(survival > 0)
    admitted = survival >= worst
    surplus = np.count_nonzero(admitted) - k
    if surplus:
        positions, requests = np.nonzero((survival == worst).T)
        admitted[requests[-surplus:], positions[-surplus:]] = False
    return count_rows(admitted)
