"""The exact joint law of what a batch outputs under a policy, by enumeration.

All weights are integers over a common denominator, so a distance of zero is zero and not a rounding error. The
decisions are the policy's own: it gets float32 confidences and float64 prices, as from the engine.
"""

from __future__ import annotations

import itertools
import marshal
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from dsim.lossless.case import Case, Context, Distribution, Row
from dsim.policy import Float32Array, Policy, PolicyView, policy_name

#: First n tokens of every request.
Outputs = tuple[Context, ...]
#: Probability of each joint output that has one.
Law = dict[Outputs, Fraction]


class _Request(NamedTuple):
    """A request between two steps: its output as far as it is compared, and what its tables are looked up by."""

    out: Context
    context: Context


#: One way in which a step can end for a request: its next state, accepted drafts of those verified, weight.
_Ending = tuple[_Request, int, int]


class _Block(NamedTuple):
    """Blocks that a policy cannot tell apart."""

    row: Row
    #: Drafts that the target would accept, cut at the end of the output; only the clairvoyant can tell.
    accepted: int
    drafts: frozenset[Context]
    #: By verify length.
    endings: tuple[tuple[_Ending, ...], ...]


#: Blocks of earlier steps, one step old first; a row a request, None where there was none or it has left.
_History = tuple[tuple[Row | None, ...], ...]


class _State(NamedTuple):
    """All that the next step depends on."""

    requests: tuple[_Request, ...]
    history: _History
    mind: int


class _Situation(NamedTuple):
    """All that a policy knows before it sees the current block."""

    mind: int
    step: int
    present: tuple[int, ...]
    older: tuple[tuple[Row, ...], ...]
    emitted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy was asked, what it answered, and how likely that was to come about.

    One entry a request in the batch each: `requests` (its number), `before` (its output so far), `drafts` (the blocks
    that look like this one to the policy), `rows` (their confidences), `lengths` (the answer). `older` has the
    confidences of earlier steps that it saw, one step old first.
    """

    step: int
    requests: tuple[int, ...]
    before: tuple[Context, ...]
    drafts: tuple[frozenset[Context], ...]
    rows: tuple[Row, ...]
    older: tuple[tuple[Row, ...], ...]
    lengths: tuple[int, ...]
    probability: Fraction


@dataclass(frozen=True, slots=True)
class Audit:
    """What enumeration says of one policy in one case.

    Attributes
    ----------
    distance
        Total variation distance between the joint law of the outputs and the product of the targets' laws: 0 if
        and only if they are the same.
    adapts
        Whether blocks of one and the same step got different verify lengths for what was drafted in them. Where
        they never do, a policy is lossless for want of occasion.
    """

    distance: Fraction
    adapts: bool


class World:
    """A case, and what does not depend on the policy computed once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        #: By request: a step's weights are in units of one over this.
        self.denominators: list[int] = []
        self._target: list[dict[Context, list[int]]] = []
        self._drafter: list[dict[Context, list[int]]] = []
        self._units: list[int] = []
        self._finals: list[int] = []
        for tables in case.requests:
            rows = [*tables.target.values(), *tables.drafter.values()]
            unit = math.lcm(*(p.denominator for row in rows for p in row))
            target, drafter = _scaled(tables.target, unit), _scaled(tables.drafter, unit)
            missing = {sum(_missing(p, q)) for p in target.values() for q in drafter.values()} - {0}
            final = math.lcm(unit, *missing)
            self._target.append(target)
            self._drafter.append(drafter)
            self._units.append(unit)
            self._finals.append(final)
            self.denominators.append(unit**case.gamma * final)
        self.verify_ms = _fixed(np.array(case.verify_ms, dtype=np.float64))
        self.captured_sizes = _fixed(np.array(case.captured_sizes, dtype=np.int64))
        # Of this object only: they go when the case has been audited.
        self.blocks = cache(self._blocks)
        self._drafted = cache(self._drafted_after)
        self.frame = cache(self._frame)
        self.array = cache(self._array)

    def left(self, request: _Request) -> bool:
        """Whether the request has left the batch."""
        return self.case.leave and len(request.out) == self.case.tokens

    def target_law(self) -> tuple[dict[Outputs, int], int]:
        """The product of the targets' laws of the first n tokens: weights and their denominator."""
        case = self.case
        product: dict[Outputs, int] = {(): 1}
        for target in self._target:
            own: dict[Context, int] = {(): 1}
            for _ in range(case.tokens):
                own = {
                    (*out, token): weight * p
                    for out, weight in own.items()
                    for token, p in enumerate(target[case.context(out)])
                    if p
                }
            product = {(*outs, out): w * own_w for outs, w in product.items() for out, own_w in own.items()}
        return product, math.prod(self._units) ** case.tokens

    def _array(self, rows: tuple[Row, ...]) -> Float32Array:
        return _fixed(np.array(rows, dtype=np.float32).reshape(-1, self.case.gamma))

    def _frame(self, step: int, present: tuple[int, ...], emitted: tuple[int, ...]) -> PolicyView:
        """The view as `dsim.replica` makes it, confidences left out; time, queue and SLO are not modeled."""
        case, past, count = self.case, len(self.case.past), len(present)
        caps = np.full(count, case.gamma, dtype=np.int64)
        if case.clip and step >= 0:
            caps = np.minimum(caps, case.tokens - 1 - np.array(emitted))
        enters = np.array([case.enters[r] for r in present], dtype=np.int64)
        return PolicyView(
            history=(),
            verify_ms=self.verify_ms,
            draft_ms=case.draft_ms,
            base_tokens=count + case.prefill,
            sampling=count,
            caps=_fixed(caps),
            captured_sizes=self.captured_sizes,
            capture_limit=case.captured_sizes[-1] if case.captured_sizes else 0,
            host_hidden_ms=0.0,
            host_exposed_ms=0.0,
            step=past + step,
            born=_fixed(np.where(enters > 0, past + enters, 0)),
            slo_tpot_ms=math.nan,
            produced=_fixed(np.array(emitted, dtype=np.int64) + np.where(enters > 0, 0, past)),
            first_ns=_fixed(np.zeros(count, dtype=np.int64)),
            queue_length=0,
            time_s=0.0,
            caps_bind=bool((caps < case.gamma).any()),
        )

    def _blocks(self, r: int, request: _Request, foresight: bool, counting: bool) -> tuple[_Block, ...]:
        """What can be drafted for request `r`, as far as its policy can tell it apart.

        With `foresight` the policy knows how many drafts are acceptable; with `counting` it will learn how many of
        the verified ones were.
        """
        case = self.case
        useful = case.tokens - len(request.out) - 1 if case.leave else case.gamma
        found: dict[tuple[Row, int], tuple[set[Context], list[dict[tuple[_Request, int], int]]]] = {}
        for row, accepted, drafts, endings in self._drafted(r, request.context):
            look = (row, min(accepted, useful) if foresight else -1)
            alike, sums = found.setdefault(look, (set(), [{} for _ in endings]))
            alike.add(drafts)
            for ways, total in zip(endings, sums, strict=True):
                for tokens, gained, weight in ways:
                    after = _Request((request.out + tokens)[: case.tokens], case.context(request.context + tokens))
                    if self.left(after):
                        after = after._replace(context=())
                    key = (after, gained if counting else 0)
                    total[key] = total.get(key, 0) + weight
        return tuple(
            _Block(*look, frozenset(alike), tuple(tuple((*key, w) for key, w in total.items()) for total in sums))
            for look, (alike, sums) in found.items()
        )

    def _drafted_after(
        self, r: int, context: Context
    ) -> list[tuple[Row, int, Context, list[list[tuple[Context, int, int]]]]]:
        """Every block drafted after `context`, with every number of acceptable drafts.

        Returns the confidences, the number, the block, and by verify length the committed tokens, how many of
        them are drafts, and the weight. Draft k is drawn from q and accepted with min(1, p/q): together
        min(p, q), and max(0, q - p) for drawn and refused. A refused one that was verified is replaced by a
        draw from norm(max(0, p - q)); where all verified ones are accepted a token from p follows. What is
        drafted behind the first refused draft comes from q as well.
        """
        case, target, drafter = self.case, self._target[r], self._drafter[r]
        gamma, final, unit = case.gamma, self._finals[r], self._units[r]
        found = []
        for drafts in itertools.product(range(case.vocabulary), repeat=gamma):
            ends = [case.context(context + drafts[:k]) for k in range(gamma + 1)]
            p, q = [target[end] for end in ends], [drafter[end] for end in ends]
            row = case.confidences(r, context, drafts)
            for accepted in range(gamma + 1):
                weight = 1
                for k, token in enumerate(drafts):
                    if k < accepted:
                        weight *= min(p[k][token], q[k][token])
                    else:
                        weight *= max(0, q[k][token] - p[k][token]) if k == accepted else q[k][token]
                if not weight:
                    continue
                endings = []
                for length in range(gamma + 1):
                    kept = min(accepted, length)
                    if length <= accepted:
                        last = [mass * (final // unit) for mass in p[length]]
                    else:
                        missing = _missing(p[accepted], q[accepted])
                        last = [mass * (final // sum(missing)) for mass in missing]
                    endings.append(
                        [((*drafts[:kept], token), kept, weight * mass) for token, mass in enumerate(last) if mass]
                    )
                found.append((row, accepted, drafts, endings))
        return found


#: Attributes of these types are a policy's state as they are.
_PLAIN = (int, float, str, bool, type(None))


class _Minds:
    """The states of mind that a policy gets into, numbered; a decision depends on nothing else but the view."""

    def __init__(self, policy: Policy) -> None:
        self._numbers: dict[bytes, int] = {}
        self._saved: list[bytes] = []
        try:
            # Through a file once: later round trips then give the same bytes for the same state.
            self._policy: Policy = pickle.loads(pickle.dumps(policy))
        except Exception as error:
            raise InputError(f"policy {policy_name(policy)} cannot be pickled ({error})", field="policy") from error
        kind: Any = type(self._policy)
        own_way = kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__getstate__ is not object.__getstate__
        slots = any(getattr(base, "__slots__", ()) for base in kind.__mro__)
        #: Whether all of its state is in its attributes.
        self._simple = not own_way and not slots and hasattr(self._policy, "__dict__")
        self._traits = self._policy.traits
        self._mind = self._number()

    def learn(self, mind: int, verified: tuple[int, ...], accepted: tuple[int, ...]) -> int:
        """The state of mind after the policy was told how a step ended (`observe`)."""
        policy: Any = self._wake(mind)
        try:
            policy.observe(np.array(verified, dtype=np.int64), np.array(accepted, dtype=np.int64))
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            what = f"policy {policy_name(policy)} raised {type(error).__name__}: {error}"
            raise InputError(what, field="observe(verified, accepted)") from error
        self._mind = self._number()
        return self._mind

    def _number(self) -> int:
        """The number of the state of mind that the policy is in."""
        known = None
        if self._simple:
            own = [item for item in vars(self._policy).items() if item[1] is not self._traits]
            if all(type(value) in _PLAIN for _, value in own):
                # A fraction of pickle's time, which would be half of that of an audit. Version 2 has no
                # references: equal values give equal bytes.
                known = marshal.dumps(own, 2)
        if known is None:
            known = pickle.dumps(self._policy)
        if known not in self._numbers:
            self._numbers[known] = len(self._saved)
            self._saved.append(pickle.dumps(self._policy))
        return self._numbers[known]

    def _wake(self, mind: int) -> Policy:
        if mind != self._mind:
            self._policy, self._mind = pickle.loads(self._saved[mind]), mind
            self._traits = self._policy.traits
        return self._policy

    def plan(self, mind: int, view: PolicyView) -> tuple[tuple[int, ...], int]:
        """The verify lengths, and the state of mind afterwards."""
        try:
            answer = self._wake(mind).plan(view)
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            what = f"policy {policy_name(self._policy)} raised {type(error).__name__}: {error}"
            raise InputError(what, field="plan(view)") from error
        lengths = np.asarray(answer)
        if lengths.shape != (view.requests,) or lengths.dtype.kind not in "iu":
            raise InputError(
                f"policy {policy_name(self._policy)} returned no verify lengths",
                field="plan(view)",
                value=f"{lengths.dtype}{list(lengths.shape)}",
                expected=f"an integer array [{view.requests}]",
            )
        found, caps = lengths.tolist(), view.caps.tolist()
        if not all(0 <= length <= cap for length, cap in zip(found, caps, strict=True)):
            what = f"policy {policy_name(self._policy)} returned verify lengths out of bounds"
            raise InputError(what, field="plan(view)", value=found, expected=f"0..{caps}")
        self._mind = self._number()
        return tuple(found), self._mind


class _Run:
    """One policy in one world."""

    def __init__(self, world: World, policy: Policy, log: list[Decision] | None = None) -> None:
        self.world, self.case, self.log = world, world.case, log
        if policy.traits.needs_gamma > world.case.gamma:
            raise InputError(
                f"policy {policy_name(policy)} needs a longer block",
                field="gamma",
                value=world.case.gamma,
                expected=f">= {policy.traits.needs_gamma}",
            )
        self.minds = _Minds(policy)
        self.depth, self.foresight = policy.traits.confidence_age, policy.traits.clairvoyant
        self.learns = callable(getattr(policy, "observe", None))
        self._lessons: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
        #: Every request in the batch gets a token a step, so this is the last step that may be needed.
        self.last = self.case.tokens - 1 + max(self.case.enters)
        self.adapts = False
        self._answers: dict[Any, tuple[tuple[int, ...], int]] = {}

    def law(self) -> tuple[dict[Outputs, int], int]:
        """Weights of the joint outputs and their denominator."""
        case, scale = self.case, math.prod(self.world.denominators)
        level = {self._begin(): 1}
        finished: dict[Outputs, int] = {}
        for step in range(self.last + 1):
            # Whoever has finished waits for the others, so that all weights keep one denominator.
            finished = {outputs: weight * scale for outputs, weight in finished.items()}
            following: dict[_State, int] = {}
            for state, weight in level.items():
                self._step(step, state, weight, scale ** (step + 1), following)
            level = {}
            for state, weight in following.items():
                outputs = tuple(request.out for request in state.requests)
                if all(len(out) == case.tokens for out in outputs):
                    finished[outputs] = finished.get(outputs, 0) + weight
                else:
                    level[state] = weight
        return finished, scale ** (self.last + 1)

    def _begin(self) -> _State:
        """The state before step 0: the policy has been through the steps of the past."""
        case, count = self.case, len(self.case.requests)
        early = tuple(r for r in range(count) if case.enters[r] == 0)
        state = _State((_Request((), ()),) * count, ((None,) * count,) * self.depth, 0)
        for step, rows in enumerate(case.past, start=-len(case.past)):
            situation = _Situation(state.mind, step, early, _rows(state.history, early, case), (step,) * len(early))
            accepted = (0,) * len(early) if self.foresight else None
            lengths, mind = self.minds.plan(state.mind, self._view(situation, rows, accepted))
            mind = self._learned(mind, lengths, (0,) * len(early))
            state = _State(state.requests, self._remember(state.history, early, rows), mind)
        return state

    def _step(self, step: int, state: _State, weight: int, scale: int, following: dict[_State, int]) -> None:
        """Draft, plan, verify: everything that can happen in one step, added to `following`."""
        world, case, requests = self.world, self.case, state.requests
        present = tuple(r for r, request in enumerate(requests) if case.enters[r] <= step and not world.left(request))
        emitted = tuple(len(requests[r].out) for r in present)
        situation = _Situation(state.mind, step, present, _rows(state.history, present, case), emitted)
        # A request that is not in the batch has one ending: it stays as it is.
        endings: list[tuple[_Ending, ...]] = [
            ((request, 0, own),) for request, own in zip(requests, world.denominators, strict=True)
        ]
        first: tuple[int, ...] | None = None
        for blocks in itertools.product(*(world.blocks(r, requests[r], self.foresight, self.learns) for r in present)):
            rows = tuple(block.row for block in blocks)
            accepted = tuple(block.accepted for block in blocks) if self.foresight else None
            lengths, mind = self._decide(situation, rows, accepted)
            self.adapts |= first is not None and first != lengths
            first = lengths
            for r, block, length in zip(present, blocks, lengths, strict=True):
                endings[r] = block.endings[length]
            ways: list[tuple[tuple[_Request, ...], tuple[int, ...], int]] = [
                ((to,), (hit,), weight * share) for to, hit, share in endings[0]
            ]
            for own in endings[1:]:
                ways = [((*done, to), (*hits, hit), w * share) for done, hits, w in ways for to, hit, share in own]
            if self.log is not None:
                self.log.append(
                    Decision(
                        step,
                        present,
                        tuple(requests[r].out for r in present),
                        tuple(block.drafts for block in blocks),
                        rows,
                        situation.older,
                        lengths,
                        Fraction(sum(w for _, _, w in ways), scale),
                    )
                )
            if step == self.last:  # every request has its tokens now; what else there is to know does not matter
                for afterwards, _, w in ways:
                    key = _State(afterwards, (), 0)
                    following[key] = following.get(key, 0) + w
                continue
            history = self._remember(state.history, present, rows)
            for afterwards, hits, w in ways:
                wiser = self._learned(mind, lengths, tuple(hits[r] for r in present)) if self.learns else mind
                key = _State(afterwards, self._forget(history, afterwards) if self.depth else history, wiser)
                following[key] = following.get(key, 0) + w

    def _learned(self, mind: int, verified: tuple[int, ...], accepted: tuple[int, ...]) -> int:
        """The policy's state of mind once it has been told how the step ended."""
        if not self.learns or not verified:
            return mind
        lesson = (mind, verified, accepted)
        if lesson not in self._lessons:
            self._lessons[lesson] = self.minds.learn(*lesson)
        return self._lessons[lesson]

    def _decide(
        self, situation: _Situation, rows: tuple[Row, ...], accepted: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...], int]:
        """The policy's answer, and its state of mind afterwards; it is asked once for each question."""
        if not situation.present:  # an idle engine takes no step
            return (), situation.mind
        question = (situation, rows, accepted)
        if question not in self._answers:
            answer = self.minds.plan(situation.mind, self._view(situation, rows, accepted))
            self._answers[question] = answer
        return self._answers[question]

    def _view(self, situation: _Situation, rows: tuple[Row, ...], accepted: tuple[int, ...] | None) -> PolicyView:
        frame = self.world.frame(situation.step, situation.present, situation.emitted)
        history = tuple(map(self.world.array, (rows, *situation.older)))
        return frame._replace(history=history, accepted=None if accepted is None else _fixed(np.array(accepted)))

    def _remember(self, history: _History, present: tuple[int, ...], rows: tuple[Row, ...]) -> _History:
        """The history with the newest block in front, as deep as the policy reads."""
        if not self.depth:
            return ()
        newest: list[Row | None] = [None] * len(self.case.requests)
        for r, row in zip(present, rows, strict=True):
            newest[r] = row
        return (tuple(newest), *history[:-1])

    def _forget(self, history: _History, requests: tuple[_Request, ...]) -> _History:
        """The history without the rows of requests that have left: states that differ in them only are one."""
        if not self.case.leave:
            return history
        gone = [len(request.out) == self.case.tokens for request in requests]
        if True not in gone:
            return history
        return tuple(tuple(None if left else row for row, left in zip(block, gone, strict=True)) for block in history)


def _rows(history: _History, present: tuple[int, ...], case: Case) -> tuple[tuple[Row, ...], ...]:
    """Older confidences of the requests in the batch: 1 where a request did not exist."""
    unknown: Row = (1.0,) * case.gamma
    return tuple(tuple(block[r] or unknown for r in present) for block in history)


# --- what is asked of it ---------------------------------------------------------------------------------


def output_law(case: Case | World, policy: Policy) -> Law:
    """Joint law of the first n output tokens of all requests under a policy, exactly.

    Raises
    ------
    InputError
        The policy raises, returns no verify lengths or ones out of bounds, needs a longer block, or cannot be
        pickled (its state is saved where the enumeration branches).

    Examples
    --------
    >>> from dsim.lossless import appendix_a
    >>> from dsim.policy import load_policy
    >>> law = output_law(appendix_a(), load_policy("dspark:lag=0"))
    >>> {outputs[0][0]: str(p) for outputs, p in sorted(law.items())}
    {0: '17/20', 1: '3/20'}
    """
    weights, total = _Run(_world(case), policy).law()
    return {outputs: Fraction(weight, total) for outputs, weight in weights.items() if weight}


def target_law(case: Case | World) -> Law:
    """The product of the targets' laws of the first n tokens: what a lossless policy outputs."""
    weights, total = _world(case).target_law()
    return {outputs: Fraction(weight, total) for outputs, weight in weights.items()}


def total_variation(first: Law, second: Law) -> Fraction:
    """Half the sum of the absolute differences of two laws: 0 if they are equal, 1 if they share nothing."""
    zero = Fraction(0)
    return sum((abs(first.get(key, zero) - second.get(key, zero)) for key in {**first, **second}), zero) / 2


def audit(case: Case | World, policy: Policy) -> Audit:
    """Distance between a policy's output law and the target's, in one case.

    Raises
    ------
    InputError
        As in `output_law`.
    """
    world = _world(case)
    run = _Run(world, policy)
    weights, total = run.law()
    aim, aim_total = world.target_law()
    if sum(weights.values()) != total:
        raise RuntimeError("enumeration invariant violated: the weights do not add up to 1")
    apart = sum(abs(weights.get(key, 0) * aim_total - aim.get(key, 0) * total) for key in {**weights, **aim})
    return Audit(Fraction(apart, 2 * total * aim_total), run.adapts)


def decisions(case: Case | World, policy: Policy) -> list[Decision]:
    """Every decision that a policy can be asked for in a case, with its probability, in order of steps."""
    log: list[Decision] = []
    _Run(_world(case), policy, log).law()
    return log


def _world(case: Case | World) -> World:
    return case if isinstance(case, World) else World(case)


def _scaled(law: Mapping[Context, Distribution], unit: int) -> dict[Context, list[int]]:
    """The probabilities as integers, in units of 1 / `unit`."""
    return {context: [int(p * unit) for p in row] for context, row in law.items()}


def _missing(p: Sequence[int], q: Sequence[int]) -> list[int]:
    """max(0, p - q): what refused drafts are replaced by, up to normalization."""
    return [max(0, mass - drawn) for mass, drawn in zip(p, q, strict=True)]


def _fixed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, made read-only: policies see it."""
    array.flags.writeable = False
    return array
