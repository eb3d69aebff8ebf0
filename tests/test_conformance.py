"""The conformance suite: built-in policies pass, and every rule catches the policy that breaks it."""

from __future__ import annotations

import copy
import doctest
import pickle
from dataclasses import replace

import numpy as np
import pytest

import dsim.conformance
from dsim.conformance import RULES, ConformanceError, check_policy
from dsim.errors import InputError
from dsim.lossless.controls import PeekOthers
from dsim.planning import cumulative_value, top_k
from dsim.policy import BUILTIN_POLICIES, BasePolicy, Traits, load_policy
from policies.dspark import DSpark
from policies.dspark_alg1 import DSparkAlgorithm1
from policies.fixed import Fixed
from policies.goodput import Goodput
from policies.oracle import Oracle


@pytest.mark.parametrize("gamma", [1, 5, 16])
@pytest.mark.parametrize("spec", [*BUILTIN_POLICIES, "threshold:on=survival", "dspark:lag=0", "fixed:k=2"])
def test_built_in_policies_conform(spec, gamma):
    applied = check_policy(spec, gamma=gamma, seed=1)
    traits = load_policy(spec).traits
    assert ("lossless" in applied) == traits.lossless
    assert ("flat cost" in applied) == traits.cost_driven == ("prices unread" not in applied)


# --- policies that use what the built-ins do not, and conform ---------------------------------------------


class Floored(BasePolicy):
    """A floor for everyone, then the paper's global search over the rest."""

    def __init__(self, floor: int = 1) -> None:
        self.floor = floor
        self.traits = Traits(floor=floor, lossless=False)

    def plan(self, view):
        floor = np.minimum(view.caps, self.floor)
        return np.maximum(DSpark(lag=0).plan(view), floor)


class Padded(BasePolicy):
    """The global search, then the best drafts that fit into the captured size that is paid for anyway."""

    traits = Traits(pads_to_captured=True, lossless=False)

    def plan(self, view):
        best = int(DSpark(lag=0).plan(view).sum())
        sizes = view.captured_sizes
        index = np.searchsorted(sizes, view.base_tokens + best)
        if index < sizes.size:
            best = int(sizes[index]) - view.base_tokens
        return top_k(view.survival(), best, view.caps)


class Guarded(BasePolicy):
    """Trims only for a predicted gain of at least 1 %."""

    traits = Traits(gain_guard=0.01, lossless=False)

    def plan(self, view):
        if view.requests == 0:
            return np.zeros(0, dtype=np.int64)
        tau = cumulative_value(view.survival(), start=view.requests)
        theta = tau / view.verify_ms[view.base_tokens :][: tau.size]
        trim = theta.max() >= 1.01 * theta[-1]
        return top_k(view.survival(), int(theta.argmax()) if trim else tau.size, view.caps)


class Lagging(BasePolicy):
    """Reads current confidences only but answers with what it found two calls ago, if that still fits."""

    traits = Traits(lossless=True)

    def __init__(self) -> None:
        self.budgets = []

    def plan(self, view):
        self.budgets.append(int(DSpark(lag=0).plan(view).sum()))
        return top_k(view.survival(), self.budgets[-3] if len(self.budgets) >= 3 else 0, view.caps)


@pytest.mark.parametrize("policy", [Floored(1), Floored(2), Floored(9), Padded(), Guarded(), Lagging()])
def test_floors_padding_guards_and_state_conform(policy):
    assert "infinite cost" in check_policy(policy)


def test_state_is_left_alone():
    policy = Oracle()
    policy.tokens, policy.elapsed_ms = 7, 3.5
    check_policy(policy)
    assert (policy.tokens, policy.elapsed_ms) == (7, 3.5)


# --- one broken policy a rule -----------------------------------------------------------------------------


class NoTraits:
    traits = None

    def plan(self, view):
        return np.zeros(view.requests, dtype=np.int64)


class Floats(Fixed):
    def plan(self, view):
        return super().plan(view).astype(np.float64)


class Lists(Fixed):
    def plan(self, view):
        return super().plan(view).tolist()


class OneShort(Fixed):
    def plan(self, view):
        return super().plan(view)[:-1]


class AboveCaps(Fixed):
    def plan(self, view):
        return np.full(view.requests, self.k)


class BelowZero(Fixed):
    def plan(self, view):
        return super().plan(view) - 1


class Scribbles(Fixed):
    def plan(self, view):
        view.history[0][:, 0] = 0.5
        return super().plan(view)


class ShiftsPrices(Fixed):
    def plan(self, view):
        view.verify_ms[-1] += 1
        return super().plan(view)


class Dice(BasePolicy):
    traits = Traits(cost_driven=False)

    def plan(self, view):
        return np.random.default_rng().integers(0, view.caps + 1)


class ForgetsItsParameter(Fixed):
    def __getstate__(self):
        return {"k": 0}


class ForgetsOnPickling(Fixed):
    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def __deepcopy__(self, memo):
        return copy.copy(self)

    def __reduce__(self):
        return (_pickled, ())

    def __copy__(self):
        twin = type(self)()
        twin.first = self.first
        return twin

    def plan(self, view):
        return super().plan(view) if self.first else np.zeros(view.requests, dtype=np.int64)


def _pickled():
    twin = ForgetsOnPickling()
    twin.first = False
    return twin


class Chameleon(Fixed):
    def __deepcopy__(self, memo):
        return Fixed(self.k)


class HalfRepr(Fixed):
    def __repr__(self):
        return "HalfRepr()"


class Unspeakable(Fixed):
    def __repr__(self):
        return "<a policy>"


class NeedsRequests(Fixed):
    def plan(self, view):
        assert view.confidence.max() <= 1
        return super().plan(view)


class NeedsCompany(Fixed):
    def plan(self, view):
        return (super().plan(view) * (np.argsort(view.confidence[:, 0]) != view.requests)).squeeze()


class FirstBatchForever(Fixed):
    """Sizes a buffer in its first step."""

    def __init__(self, k: int = 5) -> None:
        super().__init__(k)
        self.buffer = None

    def plan(self, view):
        if self.buffer is None:
            self.buffer = np.full(view.requests, self.k)
        return np.minimum(self.buffer, view.caps)


class ReadsDeeper(Fixed):
    """Declares current confidences only, reads the oldest there are."""

    def plan(self, view):
        return np.minimum(np.count_nonzero(view.history[-1] > 0.5, axis=1), view.caps)


class ReadsTwoBack(DSpark):
    """Declares one step, reads two."""

    def __init__(self) -> None:
        super().__init__(lag=2)
        self.traits = Traits(confidence_age=1)


class ClaimsAge(DSparkAlgorithm1):
    traits = Traits(confidence_age=2)


class FavorsTheFirst(Fixed):
    def plan(self, view):
        return np.where(np.arange(view.requests) < 3, super().plan(view), 0)


class TieCounter(Fixed):
    """Distinct survivals are treated alike; among ties it counts those next to each other."""

    def plan(self, view):
        first = view.confidence[:, 0]
        lengths = super().plan(view)
        lengths[1:][first[1:] == first[:-1]] = 0
        return lengths


class Stingy(BasePolicy):
    """Never more than two, though more would be free."""

    def plan(self, view):
        return np.minimum(DSparkAlgorithm1().plan(view), 2)


class Generous(BasePolicy):
    """Always one at least, undeclared."""

    def plan(self, view):
        return np.maximum(DSparkAlgorithm1().plan(view), np.minimum(view.caps, 1))


class BreaksItsFloor(DSparkAlgorithm1):
    traits = Traits(floor=1)


class PadsUndeclared(Padded):
    """Rounds the step up to a multiple of eight tokens whatever that costs."""

    traits = Traits(lossless=False)

    def plan(self, view):
        best = int(DSpark(lag=0).plan(view).sum())
        return top_k(view.survival(), best + -(view.base_tokens + best) % 8, view.caps)


class PadsTooFar(Padded):
    """One captured size beyond the one that is paid for."""

    def plan(self, view):
        best = int(DSpark(lag=0).plan(view).sum())
        sizes = view.captured_sizes
        index = np.searchsorted(sizes, view.base_tokens + best) + 1
        if index < sizes.size:
            best = int(sizes[index]) - view.base_tokens
        return top_k(view.survival(), best, view.caps)


class HidesBehindACoarseTable(BasePolicy):
    """Verifies everything, at any price."""

    traits = Traits(coarse_prices=True)

    def plan(self, view):
        return view.caps.copy()


class DecidesAboutOthers(PeekOthers):
    """Lossless for each request by itself; only the others' drafts decide."""

    traits = Traits(cost_driven=False, lossless=True)


class GuardUnheeded(DSpark):
    def __init__(self) -> None:
        super().__init__(lag=0)
        self.traits = Traits(gain_guard=0.01, lossless=False)


class SecretlyCostDriven(DSparkAlgorithm1):
    traits = Traits(cost_driven=False)


class Peeks(Fixed):
    """Uses the answer if somebody left it lying around."""

    def plan(self, view):
        lengths = super().plan(view)
        return lengths if view.accepted is None else np.minimum(lengths, view.accepted)


class NeedsTheAnswer(Fixed):
    def plan(self, view):
        return np.minimum(super().plan(view), view.accepted)


class Grows(Fixed):
    """One draft more after every step in which all were accepted, beyond all caps in the end."""

    def __init__(self) -> None:
        super().__init__(k=1)

    def plan(self, view):
        return np.minimum(view.caps, self.k) if self.k < 3 else np.full(view.requests, self.k)

    def observe(self, verified, accepted):
        self.k += bool(accepted.sum() == verified.sum())


class RollsAfterwards(Fixed):
    """Draws lots, but only once it was told something."""

    def __init__(self) -> None:
        super().__init__(k=1)
        self.told = False

    def plan(self, view):
        return np.random.default_rng().integers(0, view.caps + 1) if self.told else super().plan(view)

    def observe(self, verified, accepted):
        self.told = True


class ForgetsWhatItLearned(Fixed):
    """A pickle of it starts anew."""

    def __init__(self) -> None:
        super().__init__(k=1)

    def __getstate__(self):
        return {"k": 1}

    def observe(self, verified, accepted):
        self.k += 1


class NotACallback(Fixed):
    observe = True


class ClaimsLossless(DSpark):
    """The synchronous global search of Appendix A."""

    def __init__(self) -> None:
        super().__init__(lag=0)
        self.traits = Traits()


class LooksAhead(BasePolicy):
    """Verifies a block only if its last draft is promising."""

    traits = Traits(cost_driven=False)

    def plan(self, view):
        return np.where(view.confidence[:, -1:].prod(axis=1) > 0.5, view.caps, 0)


class ClaimsLosslessOracle(Oracle):
    traits = Traits(clairvoyant=True)


class AnotherKernel(BasePolicy):
    """Its compiled form verifies one draft less than it."""

    traits = Traits(cost_driven=False)

    def plan(self, view):
        return np.minimum(view.caps, 3)

    def kernel(self):
        return Fixed(k=2).kernel()


class KernelReadsDeeper(AnotherKernel):
    def kernel(self):
        return DSpark(lag=2).kernel()


class NotAKernel(AnotherKernel):
    def kernel(self):
        return len


class KernelLearnsAlone(AnotherKernel):
    def kernel(self):
        return replace(Fixed(k=3).kernel(), observe=Goodput().kernel().observe)


class KernelLearnsFaster(Goodput):
    def kernel(self):
        twin = Goodput(**self.params() | {"weight": 1.0})
        return twin.kernel()


BROKEN = [
    ("traits", NoTraits(), "expected a dsim.policy.Traits"),
    ("traits", ClaimsLosslessOracle(), "clairvoyant policy cannot claim"),
    ("integer lengths", Floats(), "returned float64"),
    ("integer lengths", Lists(), "returned a list"),
    ("integer lengths", OneShort(), r"shape \(7,\), expected \(8,\)"),
    ("bounds", AboveCaps(), r"expected 0\.\.caps"),
    ("bounds", BelowZero(k=0), r"-1, .*expected 0\.\.caps"),
    ("read-only view", Scribbles(), "changed view.history"),
    ("read-only view", ShiftsPrices(), "changed view.verify_ms"),
    ("determinism", Dice(), "decide differently"),
    ("copies", ForgetsItsParameter(), r"deepcopy gives ForgetsItsParameter\(k=0\)"),
    ("copies", ForgetsOnPickling(), "pickle decides differently"),
    ("copies", Chameleon(), "deepcopy gives a Fixed"),
    ("repr", HalfRepr(k=3), "does not rebuild"),
    ("repr", Unspeakable(), "SyntaxError"),
    ("empty batch", NeedsRequests(), "raised ValueError"),
    ("batch of one", NeedsCompany(), r"shape \(\), expected \(1,\)"),
    ("changing batch", FirstBatchForever(), "raised ValueError|shape"),
    ("confidence age", ReadsDeeper(), "older than the declared 0 steps"),
    ("confidence age", ClaimsAge(), "none that old changes"),
    ("permutation", FavorsTheFirst(), "does not permute the answer"),
    ("permutation", TieCounter(), "requests that tie"),
    ("flat cost", Stingy(), "extra tokens cost nothing"),
    ("infinite cost", Generous(), r"expected the floor \[0, 0, 0, 0\], got \[1, 1, 1, 1\]"),
    ("infinite cost", BreaksItsFloor(), r"expected the floor \[1, 1, 1, 1\], got \[0, 0, 0, 0\]"),
    ("infinite cost", PadsUndeclared(), r"expected the floor"),
    ("infinite cost", PadsTooFar(), "padding up to there"),
    ("infinite cost", HidesBehindACoarseTable(), "at most 60 drafts more that a table of few sizes lets through"),
    ("gain guard", GuardUnheeded(), "declared guard of 0.01"),
    ("prices unread", SecretlyCostDriven(), "not cost-driven"),
    ("accepted unread", Peeks(), "not clairvoyant"),
    ("feedback", Grows(), r"expected 0\.\.caps"),
    ("feedback", RollsAfterwards(), "told the same decide differently"),
    ("feedback", ForgetsWhatItLearned(), "told the same decide differently"),
    ("feedback", NotACallback(), r"observe is True, expected a method"),
    ("lossless", ClaimsLossless(), "depends on the tokens it is about"),
    ("lossless", LooksAhead(), "depends on the tokens it is about"),
    ("lossless", DecidesAboutOthers(), "which is not verified, change the lengths of the others"),
    ("kernel", AnotherKernel(), "the kernel does not answer as plan does"),
    ("kernel", KernelReadsDeeper(), r"the kernel reads ages \(0, 2\), the traits say 0"),
    ("kernel", NotAKernel(), "offers no kernel"),
    ("kernel", KernelLearnsAlone(), "the kernel of policy KernelLearnsAlone learns, and its plan does not"),
    ("kernel", KernelLearnsFaster(interval=1, weight=0.1), "the kernel does not answer as plan does"),
]


@pytest.mark.parametrize(("rule", "policy", "detail"), BROKEN, ids=lambda value: type(value).__name__)
def test_broken_policies_are_caught(rule, policy, detail):
    with pytest.raises(ConformanceError, match=detail) as caught:
        check_policy(policy)
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"policy {policy!r} breaks rule '{rule}': ")


def test_every_rule_has_a_broken_policy():
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


def test_reading_beyond_the_history_is_caught_wherever_it_happens():
    with pytest.raises(ConformanceError, match="raised IndexError"):
        check_policy(ReadsTwoBack())


def test_policies_without_plan_and_local_classes():
    class Planless:
        traits = Traits()

    class Local(Fixed):
        pass

    with pytest.raises(ConformanceError, match=r"breaks rule 'traits': there is no method plan\(view\)"):
        check_policy(Planless())
    with pytest.raises(ConformanceError, match="breaks rule 'copies': raised"):
        check_policy(Local())


def test_policies_need_not_derive_from_the_base():
    assert "repr" not in check_policy(BareHands())


class BareHands:
    traits = Traits(cost_driven=False)

    def plan(self, view):
        return np.minimum(view.caps, 1)


def test_error_survives_a_worker_process():
    error = ConformanceError("mine:k=1", "bounds", "too long")
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.policy, twin.rule, twin.detail, str(twin)) == ("mine:k=1", "bounds", "too long", str(error))


def test_bad_arguments():
    with pytest.raises(InputError, match="unknown policy 'nine'"):
        check_policy("nine")
    for gamma in (0, 1.5, True):
        with pytest.raises(InputError, match="field 'gamma'"):
            check_policy("none", gamma=gamma)


def test_examples_in_the_docstrings():
    result = doctest.testmod(dsim.conformance)
    assert result.attempted >= 1
    assert result.failed == 0
