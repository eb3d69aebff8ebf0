"""Conformance suite: generic checks that every policy must pass, yours included.

`check_policy("my/policy.py:Mine:floor=1")` runs the rules in `RULES` that the policy's traits make
applicable and raises `ConformanceError` at the first one broken. All of them work on copies of the policy,
so the object that is passed in keeps its state.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from dsim.kernel.cache import kernel_observe, kernel_of, kernel_plan
from dsim.policy import BasePolicy, FloatArray, IntArray, Policy, PolicyView, Traits, load_policy, make_view

#: Marginal price, in milliseconds a token, of the price curves that most rules try (the step alone is 1 ms).
SLOPES = (0.003, 0.01, 0.03, 0.1)

#: Drafts that survive at least this often are worth verifying when verification costs nothing.
WORTHWHILE = 0.01


class ConformanceError(InputError):
    """A policy broke a rule of the contract.

    Attributes
    ----------
    policy, rule, detail
        Spec or `repr` of the policy, the name of the rule (one of `RULES`) and what happened.
    """

    def __init__(self, policy: str, rule: str, detail: str) -> None:
        self.policy = policy
        self.rule = rule
        self.detail = detail
        super().__init__(f"policy {policy} breaks rule '{rule}': {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return (ConformanceError, (self.policy, self.rule, self.detail))


class _Broken(Exception):
    """What a rule raises; `check_policy` adds who and which rule."""


@dataclass(frozen=True)
class _Subject:
    """The policy under test and the generator of its views."""

    policy: Policy
    gamma: int
    rng: np.random.Generator

    @property
    def traits(self) -> Traits:
        return self.policy.traits

    def ask(self, *views: PolicyView, bounds: bool = True) -> list[IntArray]:
        """Answers of one fresh copy to consecutive views, their form (and bounds) checked."""
        twin = copy.deepcopy(self.policy)
        answers = []
        for view in views:
            answer = twin.plan(view)
            _check_form(answer, view)
            if bounds:
                _check_bounds(answer, view)
            answers.append(answer)
        return answers

    def view(
        self,
        requests: int,
        prices: FloatArray | None = None,
        confidence: npt.ArrayLike | None = None,
        caps: npt.ArrayLike | None = None,
        captured_sizes: npt.ArrayLike = (),
    ) -> PolicyView:
        """A random view, exactly as deep as the traits say; `confidence` given is that of all ages."""
        shape = (requests, self.gamma)
        age = self.traits.confidence_age
        if confidence is None:
            blocks = [self.rng.uniform(0.2, 0.995, shape) for _ in range(age + 1)]
        else:
            blocks = [np.asarray(confidence)] * (age + 1)
        if prices is None:
            prices = _prices(requests * (1 + self.gamma), SLOPES[1])
        view = make_view(
            blocks[0], prices, history=tuple(blocks[1:]), caps=caps, draft_ms=0.25, captured_sizes=captured_sizes
        )
        accepted = self.rng.integers(0, self.gamma + 1, requests) if self.traits.clairvoyant else None
        return view._replace(
            step=age + 1,
            accepted=accepted,
        )

    def sloped_views(self, requests: int) -> Iterator[PolicyView]:
        """One random view a slope, so that a cost-driven policy trims little in some and a lot in others."""
        for slope in SLOPES:
            yield self.view(requests, _prices(requests * (1 + self.gamma), slope))

    def settle(self, view: PolicyView, then: PolicyView | None = None) -> IntArray:
        """The answer (to `then`) once `view` has come often enough to fill whatever the policy remembers."""
        return self.ask(*[view] * (self.traits.confidence_age + 3), view if then is None else then)[-1]


def check_policy(policy: Policy | str, *, gamma: int = 5, seed: int = 0) -> tuple[str, ...]:
    """Hold a policy to the contract.

    Parameters
    ----------
    policy
        A policy object or a spec (``"dspark:lag=2"``, ``"my/policy.py:Mine"``). Its class must be importable
        (not defined inside a function), or it cannot be pickled.
    gamma
        Block size of the views, >= 1.
    seed
        Seed of the views. Another one tries other numbers, never other rules.

    Returns
    -------
    tuple of str
        Names of the rules that applied.

    Raises
    ------
    ConformanceError
        The first rule that the policy breaks.
    InputError
        The spec names no policy, or `gamma` is not an integer >= 1.

    Examples
    --------
    >>> "flat cost" in check_policy("dspark:lag=2"), "flat cost" in check_policy("fixed:k=3")
    (True, False)
    """
    if type(gamma) is not int or gamma < 1:
        raise InputError(field="gamma", value=gamma, expected="an integer >= 1")
    name = policy if isinstance(policy, str) else _name(policy)
    subject_policy = load_policy(policy) if isinstance(policy, str) else policy
    applied: list[str] = []
    for index, (rule, applies, test) in enumerate(_RULES):
        # A stream a rule: what one rule draws does not change what another one sees.
        subject = _Subject(subject_policy, gamma, np.random.default_rng([seed, index]))
        try:
            if not applies(subject_policy):
                continue
            test(subject)
        except _Broken as broken:
            raise ConformanceError(name, rule, str(broken)) from None
        except Exception as error:
            raise ConformanceError(name, rule, f"raised {type(error).__name__}: {error}") from error
        applied.append(rule)
    return tuple(applied)


# --- rules -----------------------------------------------------------------------------------------------


def _traits(subject: _Subject) -> None:
    traits = getattr(subject.policy, "traits", None)
    if not isinstance(traits, Traits):
        raise _Broken(f"traits is {traits!r}, expected a dsim.policy.Traits")
    if not callable(getattr(subject.policy, "plan", None)):
        raise _Broken("there is no method plan(view)")
    if traits.confidence_age < 0 or traits.floor < 0 or traits.gain_guard < 0:
        raise _Broken(f"confidence_age, floor and gain_guard must be >= 0, got {traits}")
    if traits.clairvoyant and traits.lossless:
        raise _Broken("a clairvoyant policy cannot claim to be lossless")


def _copies(subject: _Subject) -> None:
    views = list(subject.sloped_views(8))
    expected = subject.ask(*views)
    for how, twin in (
        ("deepcopy", copy.deepcopy(subject.policy)),
        ("pickle", pickle.loads(pickle.dumps(subject.policy))),
    ):
        if type(twin) is not type(subject.policy):
            raise _Broken(f"{how} gives a {type(twin).__name__}")
        if isinstance(twin, BasePolicy) and twin != subject.policy:
            raise _Broken(f"{how} gives {twin!r}")
        for view, answer in zip(views, expected, strict=True):
            if not np.array_equal(twin.plan(view), answer):
                raise _Broken(f"its {how} decides differently")


def _repr(subject: _Subject) -> None:
    text = repr(subject.policy)
    namespace = dict(vars(sys.modules[type(subject.policy).__module__]))
    if eval(text, namespace) != subject.policy:
        raise _Broken(f"{text} does not rebuild the policy")


def _determinism(subject: _Subject) -> None:
    views = list(subject.sloped_views(16))
    for first, second in zip(subject.ask(*views, bounds=False), subject.ask(*views, bounds=False), strict=True):
        _same(first, second, "two copies in the same state decide differently")


def _form(subject: _Subject) -> None:
    subject.ask(*subject.sloped_views(8), bounds=False)


def _bounds(subject: _Subject) -> None:
    caps = np.arange(8) % (subject.gamma + 1)
    easy = np.full((8, subject.gamma), 0.99)
    subject.ask(
        *subject.sloped_views(8),
        subject.view(8, caps=caps),
        subject.view(8, np.ones(8 * (1 + subject.gamma) + 1), easy, caps=caps),
        subject.view(8, caps=np.zeros(8, dtype=np.int64)),
    )


def _read_only(subject: _Subject) -> None:
    for view in subject.sloped_views(8):
        before = copy.deepcopy(view)
        subject.ask(view)
        for field in view._fields:
            old, new = getattr(before, field), getattr(view, field)
            if field == "history":
                old, new = np.stack(old), np.stack(new)
            if not np.array_equal(old, new, equal_nan=field == "slo_tpot_ms"):
                raise _Broken(f"plan() changed view.{field}")


def _empty_batch(subject: _Subject) -> None:
    subject.ask(subject.view(0), subject.view(0))


def _batch_of_one(subject: _Subject) -> None:
    subject.ask(*subject.sloped_views(1))


def _changing_batch(subject: _Subject) -> None:
    subject.ask(*(subject.view(requests) for requests in (16, 5, 1, 0, 7, 16)))


def _permutation(subject: _Subject) -> None:
    order = subject.rng.permutation(12)
    for view in subject.sloped_views(12):
        view = view._replace(caps=subject.rng.integers(0, subject.gamma + 1, 12), caps_bind=True)
        straight, permuted = subject.settle(view), subject.settle(_permute(view, order))
        if subject.traits.clairvoyant:
            # Every useful draft is worth one token, so all candidates tie.
            _same_sum(straight, permuted, "permuting the requests changes the number of drafts")
        else:
            _same(straight[order], permuted, "permuting the requests does not permute the answer")
    for slope in SLOPES:
        ties = subject.rng.choice([0.5, 1.0], (12, subject.gamma))
        view = subject.view(12, _prices(12 * (1 + subject.gamma), slope), ties)
        straight, permuted = subject.settle(view), subject.settle(_permute(view, order))
        _same_sum(straight, permuted, "permuting requests that tie changes the number of drafts")


def _flat_cost(subject: _Subject) -> None:
    prices = np.full(16 * (1 + subject.gamma) + 1, 7.0)
    confidence = subject.rng.uniform(0.05, 1.0, (16, subject.gamma))
    view = subject.view(16, prices, confidence)
    if view.accepted is None:
        expected = np.count_nonzero(view.survival() >= WORTHWHILE, axis=1)
        what = f"survival >= {WORTHWHILE}"
    else:
        expected, what = view.accepted, "acceptance ahead"
    answer = subject.settle(view)
    if (answer < expected).any():
        raise _Broken(
            f"extra tokens cost nothing, yet only {answer.tolist()} of the {expected.tolist()} drafts with "
            f"{what} are verified"
        )


def _infinite_cost(subject: _Subject) -> None:
    # A table of few sizes hides some tokens' price, but not that of half the drafts of a batch this large.
    coarse = subject.traits.coarse_prices
    requests, floor = 24 if coarse else 4, subject.traits.floor
    tokens = requests * (1 + subject.gamma)
    confidence = subject.rng.uniform(0.8, 1.0, (requests, subject.gamma))
    owed = np.full(requests, min(floor, subject.gamma))
    # Every token beyond the base costs a hundred times the step without it.
    steep = 10.0 ** np.minimum(2.0 * np.maximum(np.arange(tokens + 1) - requests, 0), 300)
    answer = subject.settle(subject.view(requests, steep, confidence))
    if coarse:
        extra, most = int((answer - owed).sum()), (requests * subject.gamma - int(owed.sum())) // 2
        if (answer < owed).any() or extra > most:
            raise _Broken(
                f"no draft can be worth its price, expected the floor {owed[0]} and at most {most} drafts more that "
                f"a table of few sizes lets through, got {answer.tolist()}"
            )
        return
    if not np.array_equal(answer, owed):
        raise _Broken(f"no draft can be worth its price, expected the floor {owed.tolist()}, got {answer.tolist()}")
    if not subject.traits.pads_to_captured:
        return
    used = requests + int(owed.sum())
    sizes = np.arange(used + 2, tokens + 8, 4)
    steep = 10.0 ** np.minimum(4.0 * np.searchsorted(sizes, np.arange(tokens + 1)), 300)
    answer = subject.settle(subject.view(requests, steep, confidence, captured_sizes=sizes))
    if (answer < owed).any() or answer.sum() > sizes[0] - requests:
        raise _Broken(
            f"beyond {sizes[0]} tokens no draft can be worth its price, expected the floor {owed.tolist()} and "
            f"padding up to there, got {answer.tolist()}"
        )


def _gain_guard(subject: _Subject) -> None:
    requests, guard = 16, subject.traits.gain_guard
    # The last draft costs half of what the guard ignores, so trimming can never gain as much as the guard.
    prices = np.full(requests * (1 + subject.gamma) + 1, 100.0)
    prices[-1] *= 1 + guard / 2
    confidence = np.ones((requests, subject.gamma))
    confidence[:, -1] = 2 * WORTHWHILE
    answer = subject.settle(subject.view(requests, prices, confidence))
    if not subject.traits.clairvoyant and (answer < subject.gamma).any():
        raise _Broken(f"it trims to {answer.tolist()} for a gain below its declared guard of {guard}")


def _confidence_age(subject: _Subject) -> None:
    age, floor = subject.traits.confidence_age, subject.traits.floor
    # With 16 requests a table of few sizes may have one price for all numbers of drafts.
    requests = 24 if subject.traits.coarse_prices else 16
    reacts = False
    for view in subject.sloped_views(requests):
        noise = tuple(subject.rng.uniform(0, 1, (requests, subject.gamma)).astype(np.float32) for _ in range(2))
        exact = subject.settle(view)
        deeper = subject.settle(view._replace(history=view.history + noise))
        _same(exact, deeper, f"confidences older than the declared {age} steps change the answer")
        for level in (0.05, 1.0):
            oldest = np.full((requests, subject.gamma), level, dtype=np.float32)
            moved = subject.settle(view._replace(history=(*view.history[:-1], oldest)))
            reacts = reacts or not np.array_equal(exact, moved)
    if age > 0 and not reacts and floor < subject.gamma:  # else nothing is left to decide
        raise _Broken(f"it declares confidences {age} steps old, but none that old changes its answer")


def _accepted(subject: _Subject) -> None:
    for view in subject.sloped_views(16):
        blind = subject.settle(view)
        for accepted in (0, subject.gamma):
            seen = view._replace(accepted=np.full(16, accepted, dtype=np.int64))
            _same(blind, subject.settle(seen), "view.accepted changes the answer of a policy not clairvoyant")


def _prices_unread(subject: _Subject) -> None:
    view = subject.view(16)
    answer = subject.settle(view)
    for slope in SLOPES:
        other = view._replace(verify_ms=_prices(16 * (1 + subject.gamma), slope), draft_ms=100 * slope)
        _same(answer, subject.settle(other), "prices change the answer of a policy that is not cost-driven")


def _lossless(subject: _Subject) -> None:
    """min(l_r, k) must be a function of c_{r,1..k}, of what other requests had verified, and of the past alone.

    Draft x_k is drawn before c_{k+1}, which may depend on it; whether x_k is verified must not. Nor may x_k decide
    about other requests unless it is verified itself: their outputs would no longer be independent of its own.
    """
    gamma = subject.gamma
    # Three at once in more cases than one alone: one request must have nothing verified while others have.
    for requests in (1, 3, 3):
        tokens = requests * (1 + gamma)
        # A jump at the first draft and nothing after it: worth it for whole blocks, not for single drafts.
        jumps = [np.where(np.arange(tokens + 1) > requests, height, 1.0) for height in (1.3, 1.6, 2.1, 3.0)]
        for prices in (*(_prices(tokens, 10 * slope) for slope in SLOPES), *jumps):
            view = subject.view(requests, prices)
            answer = subject.settle(view)
            for row, known in np.ndindex(requests, gamma):
                for level in (0.0, 0.5, 1.0):
                    current = view.history[0].copy()
                    current[row, known:] = level
                    changed = subject.settle(view, then=view._replace(history=(current, *view.history[1:])))
                    if min(changed[row], known) != min(answer[row], known):
                        raise _Broken(
                            f"confidences after draft {known} change how many of the drafts up to it are "
                            f"verified ({answer[row]} becomes {changed[row]}), so the choice depends on the "
                            "tokens it is about"
                        )
                    if answer[row] < known and not np.array_equal(np.delete(changed, row), np.delete(answer, row)):
                        raise _Broken(
                            f"confidences after draft {known} of a request, which is not verified, change the lengths "
                            f"of the others ({answer.tolist()} becomes {changed.tolist()})"
                        )


def _feedback(subject: _Subject) -> None:
    """Rounds of plan and outcome: nothing, some, everything accepted, in batches that change, none among them."""
    if not callable(observe := getattr(subject.policy, "observe", None)):
        raise _Broken(f"observe is {observe!r}, expected a method observe(verified, accepted)")
    first: Any = copy.deepcopy(subject.policy)
    second: Any = copy.deepcopy(subject.policy)
    views = [view for requests in (16, 0, 1) for view in subject.sloped_views(requests)]
    for share in (0.0, 0.5, 1.0, 0.0):
        for view in views:
            view = view._replace(caps=subject.rng.integers(0, subject.gamma + 1, view.requests), caps_bind=True)
            verified = first.plan(view)
            _check_form(verified, view)
            _check_bounds(verified, view)
            _same(verified, second.plan(view), "two copies that were told the same decide differently")
            accepted = subject.rng.binomial(verified, share)
            for twin in (first, second):
                twin.observe(verified.astype(np.int64), accepted.astype(np.int64))
        # A copy takes along what was learned.
        second = pickle.loads(pickle.dumps(second))


def _kernel(subject: _Subject) -> None:
    """A compiled form answers as `plan` does, in batches of all sizes, and keeps what it has to remember."""
    kernel = kernel_of(subject.policy)
    learns = getattr(subject.policy, "observe", None) is not None
    if kernel is None or (learns and kernel.observe is None):
        return  # never used
    if max(kernel.ages) > subject.traits.confidence_age:
        raise _Broken(f"the kernel reads ages {kernel.ages}, the traits say {subject.traits.confidence_age}")
    twin: Any = copy.deepcopy(subject.policy)
    batches = (1, 2, 3, 12, 40, 256)
    state = kernel.memory(max(batches))
    for requests in batches:
        last = requests * (1 + subject.gamma)
        stairs = _prices(last, SLOPES[1])
        stairs[last // 2 + 1 :] += 2.0
        captured = tuple(range(4, last // 2 + 1, 4))
        caps = subject.rng.integers(0, subject.gamma + 1, requests)
        few = subject.rng.choice([0.0, 0.5, 1.0], (requests, subject.gamma))
        views = [
            *subject.sloped_views(requests),
            subject.view(requests, stairs, captured_sizes=captured),
            subject.view(requests, caps=caps),
            subject.view(requests, confidence=few),
        ]
        for view in views:
            reference = twin.plan(view)
            _check_form(reference, view)
            _same(np.asarray(reference), kernel_plan(kernel, view, state), "the kernel does not answer as plan does")
            if learns:
                accepted = subject.rng.integers(0, reference + 1)
                twin.observe(reference.astype(np.int64), accepted)
                kernel_observe(kernel, reference, accepted, state)


def _has_kernel(policy: Any) -> bool:
    return getattr(policy, "kernel", None) is not None and importlib.util.find_spec("numba") is not None


def _always(_: Policy) -> bool:
    return True


_Rule = tuple[str, Callable[[Any], bool], Callable[[_Subject], None]]

_RULES: tuple[_Rule, ...] = (
    ("traits", _always, _traits),
    ("integer lengths", _always, _form),
    ("bounds", _always, _bounds),
    ("read-only view", _always, _read_only),
    ("determinism", _always, _determinism),
    ("copies", _always, _copies),
    ("repr", lambda policy: isinstance(policy, BasePolicy), _repr),
    ("empty batch", _always, _empty_batch),
    ("batch of one", _always, _batch_of_one),
    ("changing batch", _always, _changing_batch),
    ("confidence age", _always, _confidence_age),
    ("permutation", _always, _permutation),
    ("flat cost", lambda policy: policy.traits.cost_driven, _flat_cost),
    ("infinite cost", lambda policy: policy.traits.cost_driven, _infinite_cost),
    ("gain guard", lambda policy: policy.traits.cost_driven and policy.traits.gain_guard > 0, _gain_guard),
    ("prices unread", lambda policy: not policy.traits.cost_driven, _prices_unread),
    ("accepted unread", lambda policy: not policy.traits.clairvoyant, _accepted),
    ("feedback", lambda policy: getattr(policy, "observe", None) is not None, _feedback),
    ("lossless", lambda policy: policy.traits.lossless, _lossless),
    ("kernel", _has_kernel, _kernel),
)

#: Names of all rules, in the order in which they are checked.
RULES: tuple[str, ...] = tuple(name for name, _, _ in _RULES)


# --- parts -----------------------------------------------------------------------------------------------


def _prices(tokens: int, slope: float) -> FloatArray:
    """float64[tokens + 1]: 1 ms a step and `slope` ms a token."""
    return 1.0 + slope * np.arange(tokens + 1, dtype=np.float64)


def _permute(view: PolicyView, order: IntArray) -> PolicyView:
    return view._replace(
        history=tuple(block[order] for block in view.history),
        caps=view.caps[order],
        born=view.born[order],
        produced=view.produced[order],
        first_ns=view.first_ns[order],
        accepted=None if view.accepted is None else view.accepted[order],
    )


def _check_form(answer: object, view: PolicyView) -> None:
    if not isinstance(answer, np.ndarray):
        raise _Broken(f"plan() returned a {type(answer).__name__}, expected an integer array")
    if not np.issubdtype(answer.dtype, np.integer):
        raise _Broken(f"plan() returned {answer.dtype}, expected an integer array")
    if answer.shape != (view.requests,):
        raise _Broken(f"plan() returned shape {answer.shape}, expected ({view.requests},)")


def _check_bounds(answer: IntArray, view: PolicyView) -> None:
    if (answer < 0).any() or (answer > view.caps).any():
        raise _Broken(f"plan() returned {answer.tolist()}, expected 0..caps = {view.caps.tolist()}")


def _same(first: IntArray, second: IntArray, message: str) -> None:
    if not np.array_equal(first, second):
        raise _Broken(f"{message}: {first.tolist()} and {second.tolist()}")


def _same_sum(first: IntArray, second: IntArray, message: str) -> None:
    if first.sum() != second.sum():
        raise _Broken(f"{message}: {first.sum()} and {second.sum()}")


def _name(policy: object) -> str:
    try:
        return repr(policy)
    except Exception:
        return type(policy).__name__
