"""The exact audit: laws worked out by hand, a second enumeration that merges nothing, leaks that must be found."""

from __future__ import annotations

import copy
import doctest
import importlib
import itertools
import re
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from standins import ConstantCost, fixed_arrivals

from dsim.cluster import Cluster
from dsim.conformance import ConformanceError, check_policy
from dsim.errors import InputError
from dsim.lossless import (
    CONTROLS,
    Case,
    Tables,
    appendix_a,
    audit,
    contexts,
    decisions,
    describe,
    distribution,
    everywhere,
    examine,
    numbered_case,
    output_law,
    random_case,
    smallest_counterexample,
    target_law,
    total_variation,
)
from dsim.lossless.case import LIMITS
from dsim.lossless.cases import SIZES
from dsim.lossless.controls import PeekOthers
from dsim.options import ReplicaConfig
from dsim.planning import cumulative_value, top_k
from dsim.policy import BUILTIN_POLICIES, BasePolicy, Traits, load_policy, make_view
from dsim.prices import DraftCost
from dsim.workload import OpenLoop, RequestStream
from experiments.lossless import builtin_specs
from policies.dspark_alg1 import DSparkAlgorithm1

HALF = distribution(1, 1)
A, B = (0,), (1,)


def fractions(law):
    """A law of one request's text, as text."""
    return {"".join("AB"[token] for token in outputs[0]): str(p) for outputs, p in sorted(law.items())}


def world(*, requests=1, gamma=2, tokens=1, target=HALF, drafter=HALF, second=(1.0, 0.0), prices=None, **more):
    """Requests that are alike: laws that do not look back, c_1 = 1, and c_2 (and later ones) after A and after B."""
    later = dict(zip((A, B), second, strict=True))
    tables = Tables(
        everywhere(target, 2), everywhere(drafter, 2), ({(): 1.0, A: 1.0, B: 1.0}, *[later] * (gamma - 1))[:gamma]
    )
    longest = more.get("prefill", 0) + requests * (1 + gamma)
    return Case(2, gamma, tokens, (tables,) * requests, prices or (0.0, *[10.0] * longest), **more)


# -- laws by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [CONTROLS["without-break"](), load_policy("dspark:lag=0")], ids=repr)
def test_appendix_a_without_the_break(policy):
    assert fractions(output_law(appendix_a(), policy)) == {"A": "17/20", "B": "3/20"}
    assert fractions(target_law(appendix_a())) == {"A": "7/10", "B": "3/10"}
    assert audit(appendix_a(), policy).distance == Fraction(3, 20)
    log = decisions(appendix_a(), policy)
    assert [(entry.drafts[0], entry.lengths, str(entry.probability)) for entry in log] == [
        (frozenset({(0, 0), (0, 1)}), (2,), "1/2"),
        (frozenset({(1, 0), (1, 1)}), (0,), "1/2"),
    ]


@pytest.mark.parametrize("spec", ["dspark-alg1", "dspark:lag=1", "dspark:lag=2"])
def test_appendix_a_with_the_break_or_with_old_confidences(spec):
    assert output_law(appendix_a(), load_policy(spec)) == target_law(appendix_a())


def test_the_target_law_of_two_requests_that_look_back():
    target = {(): distribution(3, 1), A: distribution(1, 3), B: distribution(1, 1)}
    plain = world(gamma=1).requests[0]
    case = replace(world(requests=2, gamma=1, tokens=2), requests=(replace(plain, target=target), plain))
    law = target_law(case)
    assert law[(0, 1), (0, 0)] == Fraction(3, 4) * Fraction(3, 4) * Fraction(1, 4)
    assert law[(1, 0), (1, 0)] == Fraction(1, 4) * Fraction(1, 2) * Fraction(1, 4)
    assert sum(law.values()) == 1


def test_a_peeking_policy_by_hand():
    # Drafter and target agree, so a verified draft is output. A is verified (c_2 = 1), B is drawn anew.
    law = output_law(world(target=distribution(7, 3), drafter=distribution(7, 3)), CONTROLS["peek"]())
    assert fractions(law) == {"A": "91/100", "B": "9/100"}  # 7/10 + 3/10 * 7/10


def test_two_requests_that_decide_about_each_other_lose_the_joint_law_only():
    law = output_law(world(requests=2), CONTROLS["peek-others"]())
    # Both draft A: both are output. Both draft B: both are drawn anew. A and B: the B is output, the A drawn anew.
    assert {outputs: str(p) for outputs, p in law.items()} == {
        (A, A): "5/16",  # 1/4 + 1/4 * 1/4
        (A, B): "3/16",  # 1/4 * 1/4 + 1/4 * 1/2
        (B, A): "3/16",
        (B, B): "5/16",  # 1/4 * 1/4 + 1/4 * 1/2 * 2
    }
    for r in range(2):
        own = defaultdict(Fraction)
        for outputs, p in law.items():
            own[outputs[r]] += p
        assert dict(own) == {A: Fraction(1, 2), B: Fraction(1, 2)}


class ClaimingPeekOthers(PeekOthers):
    traits = Traits(cost_driven=False)


def test_requests_that_decide_about_each_other_are_caught_by_the_audit_and_by_the_conformance_rule():
    case = world(requests=2)
    assert audit(case, ClaimingPeekOthers()).distance == Fraction(1, 8)
    with pytest.raises(ConformanceError, match="which is not verified, change the lengths of the others"):
        check_policy(ClaimingPeekOthers())


def test_a_confidence_of_the_draft_itself():
    # The unlikely second token is dropped by a threshold, and the target draws afresh: 0.5 + 0.1 * 0.5.
    probability = {A: 0.9, B: 0.1}
    tables = Tables(everywhere(HALF, 2), everywhere(distribution(9, 1), 2), (probability,))
    case = Case(2, 1, 1, (tables,), (0.0, 1.0, 1.0), own_token=True)
    assert fractions(output_law(case, load_policy("threshold:t=0.5"))) == {"A": "11/20", "B": "9/20"}
    # A stop that verifies the token that fails the test decides about no token by itself.
    assert audit(case, load_policy("disco:t=0.5")).distance == 0


def test_what_is_accepted_is_known_to_a_clairvoyant_only():
    # The drafter draws A only, half of which the target takes; who verifies just those never draws a B in its place.
    case = world(gamma=1, drafter=distribution(1, 0), leave=False)
    assert fractions(output_law(case, load_policy("oracle"))) == {"A": "3/4", "B": "1/4"}


class Seen(BasePolicy):
    """Clairvoyant, and verifies as many drafts as it is told to be acceptable."""

    traits = Traits(clairvoyant=True, cost_driven=False, lossless=False)

    def plan(self, view):
        return np.asarray(view.accepted)


def test_acceptable_drafts_are_cut_at_the_end_of_an_output_that_ends():
    case = world(tokens=2, target=distribution(1, 0), drafter=distribution(1, 0))
    assert {entry.lengths for entry in decisions(case, Seen())} == {(1,)}
    assert {entry.lengths for entry in decisions(replace(case, leave=False), Seen())} == {(2,)}


# -- a second enumeration ----------------------------------------------------------------------------------


def verified(case, r, text, drafts, length):
    """[(tokens, drafts accepted, probability)]: standard rejection sampling, a draft at a time."""
    ways, survived = [], Fraction(1)
    for k in range(length):
        here = case.context(text + drafts[:k])
        p, q = case.requests[r].target[here], case.requests[r].drafter[here]
        accept = min(Fraction(1), p[drafts[k]] / q[drafts[k]])
        if accept < 1:
            excess = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
            for token, mass in enumerate(excess):
                ways.append(((*drafts[:k], token), k, survived * (1 - accept) * mass / sum(excess)))
        survived *= accept
    here = case.context(text + drafts[:length])
    for token, mass in enumerate(case.requests[r].target[here]):
        ways.append(((*drafts[:length], token), length, survived * mass))
    return [way for way in ways if way[2]]


def drafted(case, r, text):
    """[(drafts, probability)]."""
    blocks = [((), Fraction(1))]
    for _ in range(case.gamma):
        blocks = [
            ((*drafts, token), chance * q)
            for drafts, chance in blocks
            for token, q in enumerate(case.requests[r].drafter[case.context(text + drafts)])
            if q
        ]
    return blocks


def slow_law(case, policy):
    """The joint law of the first n tokens by plain recursion over whole texts: every path on its own."""
    law = defaultdict(Fraction)
    starts = case.starts or (0,) * len(case.requests)
    past = len(case.past)

    def ask(policy, number, texts, present, confidence, history):
        done = [number if number < 0 else len(texts[r]) for r in present]
        caps = [min(case.gamma, case.tokens - d - 1) if case.clip and number >= 0 else case.gamma for d in done]
        older = [[block.get(r, [1.0] * case.gamma) for r in present] for block in history]
        view = make_view(
            np.asarray(confidence).reshape(-1, case.gamma),
            np.asarray(case.verify_ms),
            history=tuple(older[: policy.traits.confidence_age]),
            depth=policy.traits.confidence_age,
            prefill_tokens=case.prefill,
            draft_ms=case.draft_ms,
            caps=caps,
            captured_sizes=case.captured_sizes,
            step=past + number,
        )
        view = view._replace(born=np.array([starts[r] and past + starts[r] for r in present]))
        return policy.plan(view)

    def walk(policy, number, texts, history, chance):
        if all(len(text) >= case.tokens for text in texts):
            law[tuple(text[: case.tokens] for text in texts)] += chance
            return
        present = [
            r for r in range(len(texts)) if starts[r] <= number and not (case.leave and len(texts[r]) >= case.tokens)
        ]
        if not present:
            walk(policy, number + 1, texts, history, chance)
            return
        for blocks in itertools.product(*(drafted(case, r, texts[r]) for r in present)):
            twin = copy.deepcopy(policy)
            rows = [case.confidences(r, texts[r], block) for r, (block, _) in zip(present, blocks, strict=True)]
            lengths = ask(twin, number, texts, present, rows, history)
            drawn = chance
            for _, share in blocks:
                drawn *= share
            ways = [
                verified(case, r, texts[r], block, int(length))
                for r, (block, _), length in zip(present, blocks, lengths, strict=True)
            ]
            for endings in itertools.product(*ways):
                after, odds, told = list(texts), drawn, copy.deepcopy(twin)
                for r, (tokens, _, share) in zip(present, endings, strict=True):
                    after[r] = after[r] + tokens
                    odds *= share
                if hasattr(told, "observe"):
                    told.observe(np.array(lengths), np.array([hits for _, hits, _ in endings]))
                walk(told, number + 1, after, [dict(zip(present, rows, strict=True)), *history], odds)

    mind, history = copy.deepcopy(policy), []
    early = [r for r in range(len(case.requests)) if starts[r] == 0]
    for number, block in enumerate(case.past, start=-past):
        lengths = ask(mind, number, [], early, block, history)
        if hasattr(mind, "observe"):
            mind.observe(np.array(lengths), np.zeros(len(early), dtype=np.int64))
        history = [dict(zip(early, block, strict=True)), *history]
    walk(mind, 0, [()] * len(case.requests), history, Fraction(1))
    return dict(law)


class Moody(BasePolicy):
    """Peeks, and remembers: verifies more the more of its drafts were accepted last time, and every other step."""

    traits = Traits(confidence_age=1, cost_driven=False, lossless=False)

    def __init__(self):
        self.mood, self.calls = 0, [0]

    def plan(self, view):
        self.calls[0] += 1
        if not view.requests:
            return np.zeros(0, dtype=np.int64)
        peeked = view.confidence.min(axis=1) + view.aged(1).max(axis=1) > 1.1
        eager = int(view.age_steps.sum() + self.mood + self.calls[0]) % 2
        return np.minimum(view.caps, peeked * (1 + eager))

    def observe(self, verified, accepted):
        self.mood = int(accepted.sum())


SMALL = [(1, 2, 2, 3), (1, 2, 3, 2), (1, 3, 2, 2), (2, 1, 2, 2), (2, 2, 2, 1), (3, 1, 2, 1)]


@pytest.mark.parametrize("policy", [Moody(), CONTROLS["without-break"](), load_policy("dspark:lag=1")], ids=repr)
def test_merging_states_changes_nothing(policy):
    lossy = 0
    for number, size in enumerate(SMALL * 2):
        case = random_case(np.random.default_rng([7, number]), size)
        slow, law = slow_law(case, policy), output_law(case, policy)
        assert slow == law, (number, size)
        assert audit(case, policy).distance == total_variation(slow, target_law(case))
        lossy += slow != target_law(case)
    assert lossy or policy.traits.lossless


class PeekInCompany(BasePolicy):
    """Verifies a block whose last draft looks good; a request alone gets everything."""

    traits = Traits(cost_driven=False, lossless=False)

    def plan(self, view):
        return view.gamma * ((view.confidence[:, -1] >= 0.5) | (view.requests == 1))


class SlotMood(BasePolicy):
    """Keeps its state where no attribute dictionary shows it: peeks in every other step."""

    __slots__ = ("calls",)
    traits = Traits(cost_driven=False, lossless=False)

    def __init__(self):
        self.calls = 0

    def plan(self, view):
        self.calls += 1
        return view.gamma * ((view.confidence[:, -1] >= 0.5) | (self.calls % 2 == 1))


def test_state_is_kept_wherever_a_policy_keeps_it():
    case = world(tokens=3, target=distribution(3, 1))
    assert slow_law(case, SlotMood()) == output_law(case, SlotMood()) != target_law(case)


def test_a_drafter_without_chance_leaks_nothing():
    """What is drafted is then no news: whatever decides about it could have known it before."""
    case = world(target=distribution(3, 1), drafter=distribution(1, 0))
    assert audit(case, CONTROLS["peek"]()).distance == 0


def test_a_request_that_has_its_tokens_stays_or_leaves():
    case = world(requests=2, tokens=2, target=distribution(3, 1))
    leaving, staying = (replace(case, leave=leave) for leave in (True, False))
    laws = [output_law(one, PeekInCompany()) for one in (leaving, staying)]
    # Where it stays, nobody is ever alone.
    assert laws[0] != laws[1]
    assert laws == [slow_law(one, PeekInCompany()) for one in (leaving, staying)]
    assert max(len(entry.lengths) for entry in decisions(leaving, PeekInCompany()) if entry.step) == 2
    assert {len(entry.lengths) for entry in decisions(leaving, PeekInCompany())} == {1, 2}
    assert {len(entry.lengths) for entry in decisions(staying, PeekInCompany())} == {2}


# -- what the policy is shown ------------------------------------------------------------------------------

LOG = []


class Recorder(BasePolicy):
    """Verifies one draft of each request in even steps, two in odd ones, and writes down what it was shown."""

    traits = Traits(confidence_age=2, cost_driven=False)

    def plan(self, view):
        LOG.append(
            (
                [block.tolist() for block in view.history],
                view.base_tokens,
                view.sampling,
                view.caps.tolist(),
                view.step,
                view.born.tolist(),
                view.produced.tolist(),
                view.verify_ms[: view.base_tokens + view.requests * view.gamma + 1].tolist(),
                view.captured_sizes.tolist(),
                view.capture_limit,
                view.draft_ms,
            )
        )
        return np.minimum(view.caps, 1 + view.step % 2)

    def observe(self, verified, accepted):
        LOG.append((verified.tolist(), accepted.tolist()))


class TableDrafts:
    """Drafts without chance: texts are ABAB..., request 0 drafts just that, request 1 is always wrong."""

    paired, domains, label = True, ("any",), "scripted"

    def __init__(self, case):
        self.case, self.gamma = case, case.gamma

    def open(self, request, domain, output_tokens):
        pass

    def draft(self, requests, positions):
        rows = []
        for r, position in zip(requests.tolist(), positions.tolist(), strict=True):
            text = tuple(i % 2 for i in range(position))
            block = ((position % 2, (position + 1) % 2), ((position - 1) % 2,) * 2)[r]
            rows.append(self.case.confidences(r, text, block))
        return np.array(rows, dtype=np.float32), np.where(requests == 0, self.gamma, 0)


@pytest.mark.parametrize("clip", [False, True])
def test_the_audit_shows_a_policy_what_the_engine_shows_it(clip):
    first, second = distribution(1, 0), distribution(0, 1)
    text = {(): first, A: second, B: first}
    never = {(): second, A: first, B: second}
    confidence = ({(): 0.5, A: 0.25, B: 0.75}, {A: 0.125, B: 0.875})
    other = ({(): 0.375, A: 0.25, B: 0.625}, {A: 0.5, B: 1.0})
    case = Case(
        vocabulary=2,
        gamma=2,
        tokens=4,
        requests=(Tables(text, text, confidence), Tables(text, never, other)),
        verify_ms=(0.0, *(2.0 + 0.5 * tokens for tokens in range(1, 7))),
        draft_ms=0.25,
        captured_sizes=(2, 4),
        starts=(0, 1),
        clip=clip,
    )
    LOG.clear()
    assert audit(case, Recorder()).distance == 0
    seen = list(LOG)
    LOG.clear()
    stream = RequestStream(
        fixed_arrivals([0.0, 0.0005], 1, 5), {"any": 1.0}, order_seed=0, domain_seed=0, order="trace"
    )
    Cluster(
        replicas=1,
        config=ReplicaConfig(max_seqs=8, token_budget=64, block_tokens=4, kv_blocks=1000, clip_to_remaining=clip),
        cost=ConstantCost(step_ms=2.0, token_ms=0.5, draft=0.25, captured=(2, 4)),
        drafts=TableDrafts(case),
        draft_cost=DraftCost(),
        policy=Recorder(),
        stream=stream,
        load=OpenLoop(requests=2),
        router="round-robin",
    ).run()
    engine, enumerated = ([entry for entry in log if len(entry) > 2] for log in (LOG, seen))
    assert engine == enumerated
    # Request 0 has its 4 tokens after steps of 2 and 3 (capped: 2, then 2); request 1 gets one a step.
    assert [len(entry[3]) for entry in engine] == [1, 2, 1, 1, 1]
    # What is learnt in the last step is of no use any more.
    lessons = [str(entry) for entry in LOG if len(entry) == 2]
    assert {str(entry) for entry in seen if len(entry) == 2} == set(lessons[:-1])


class Counting(BasePolicy):
    """Verifies as many drafts as it has been asked before."""

    traits = Traits(cost_driven=False)

    def __init__(self):
        self.asked = 0

    def plan(self, view):
        self.asked += 1
        return np.minimum(view.caps, self.asked - 1)


def test_the_policy_has_been_through_the_past():
    past = (((0.5, 0.25),), ((0.75, 0.125),))
    case = world(requests=2, tokens=2, past=past, starts=(0, 1), target=distribution(1, 0), drafter=distribution(1, 0))
    assert {entry.lengths for entry in decisions(case, Counting()) if entry.step == 0} == {(2,)}
    LOG.clear()
    audit(case, Recorder())
    views = [entry for entry in LOG if len(entry) > 2]
    # history, tokens, ..., step, born, produced: two steps of the past, step 0, and step 1 with a second request.
    assert views[0][0] == [[[0.5, 0.25]], [[1.0, 1.0]], [[1.0, 1.0]]]
    assert views[1][0] == [[[0.75, 0.125]], [[0.5, 0.25]], [[1.0, 1.0]]]
    assert views[2][0] == [[[1.0, 1.0]], [[0.75, 0.125]], [[0.5, 0.25]]]
    assert [entry[4:7] for entry in views[:3]] == [(0, [0], [0]), (1, [0], [1]), (2, [0], [2])]
    # The first request has both of its tokens by then; the second one knows no past.
    assert views[3][0] == [[[1.0, 1.0]]] * 3
    assert views[3][4:7] == (3, [3], [0])


# -- leaks are found, and what does not leak is not accused ------------------------------------------------


def caught(policy, cases, **options):
    """Numbers of the random cases in which a policy is caught."""
    ((*audits,),) = examine([policy], 0, range(cases), **options)
    return [number for number, found in enumerate(audits) if found is not None and found.distance > 0]


def test_a_block_too_short_for_the_policy_is_passed_over():
    ((*audits,),) = examine([load_policy("fixed:k=3")], 0, range(30))
    gammas = [numbered_case(0, number).gamma for number in range(30)]
    assert [found is None for found in audits] == [gamma < 3 for gamma in gammas]


LOSSLESS = ("dspark-alg1", "dspark:lag=1", "dspark:lag=2", "threshold:t=0.5", "tetris:capacity=2", "none", "fixed:k=1")


@pytest.fixture(scope="module")
def audits():
    """What becomes of the controls and of policies that are lossless, in the same cases."""
    policies = {name: control() for name, control in CONTROLS.items()} | {spec: load_policy(spec) for spec in LOSSLESS}
    return dict(zip(policies, examine(list(policies.values()), 0, range(120)), strict=True))


@pytest.mark.parametrize("name", CONTROLS)
def test_every_lossy_control_is_caught(audits, name):
    assert any(found.distance > 0 for found in audits[name])


@pytest.mark.parametrize("spec", LOSSLESS)
def test_early_stop_and_old_capacity_are_lossless(audits, spec):
    assert not any(found.distance for found in audits[spec])


def test_the_cases_have_occasions(audits):
    for spec in ("dspark-alg1", "dspark:lag=1", "dspark:lag=2", "threshold:t=0.5", "tetris:capacity=2"):
        assert sum(found.adapts for found in audits[spec]) > 12, spec
    assert not any(found.adapts for found in audits["fixed:k=1"])


def test_the_page_names_the_sizes_of_the_random_cases():
    text = " ".join((Path(__file__).parents[1] / "docs" / "lossless.md").read_text(encoding="utf-8").split())
    words = (
        r"a vocabulary of (\d) or (\d) tokens, blocks of (\d) to (\d) drafts, (\d) to (\d) requests in one batch, "
        r"(\d) to (\d) output tokens each \(a case of your own may have (\d);"
    )
    *ranges, most = map(int, re.search(words, text).groups())
    requests, gamma, vocabulary, tokens = zip(*SIZES, strict=True)
    assert ranges == [bound for axis in (vocabulary, gamma, requests, tokens) for bound in (min(axis), max(axis))]
    assert most == LIMITS["tokens"]


#: Every built-in that claims to be lossless, in all the settings that `experiments/lossless.py` audits.
CLAIMING = [spec for spec in builtin_specs() if load_policy(spec).traits.lossless]
#: Random cases that each of them is audited in, in slices that share what does not depend on the policy.
MANY, SLICE = 4000, 500


def test_every_built_in_that_claims_it_is_among_them():
    names = {name for name in BUILTIN_POLICIES if load_policy(name).traits.lossless}
    # Lossless with a setting of its own only.
    assert {spec.split(":")[0] for spec in CLAIMING} == names | {"vllm-ascend"}
    assert set(LOSSLESS) <= set(CLAIMING)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MANY, SLICE))
def test_every_claim_holds_in_thousands_of_cases(first):
    """Two minutes and a half of one core for all slices together."""
    numbers = range(first, first + SLICE)
    audits = examine([load_policy(spec) for spec in CLAIMING], 0, numbers)
    audited = 0
    for spec, row in zip(CLAIMING, audits, strict=True):
        for number, found in zip(numbers, row, strict=True):
            assert found is None or found.distance == 0, (spec, number)
            audited += found is not None
    # A block is too short for some settings in a ninth of the cases.
    assert audited > 0.95 * len(CLAIMING) * SLICE


@pytest.mark.slow
def test_three_requests_of_two_drafts_over_two_steps():
    """The size that is too slow to be among the random ones."""
    specs = ("dspark-alg1", "dspark:lag=1", "tetris:capacity=2", "dspark:lag=0")
    policies = [load_policy(spec) for spec in specs]
    distances = []
    for number in range(25):
        case = random_case(np.random.default_rng([11, number]), (3, 2, 2, 2))
        distances.append([audit(case, policy).distance for policy in policies])
    *lossless, lossy = zip(*distances, strict=True)
    assert not any(map(any, lossless))
    assert any(lossy)


def test_an_early_stop_turned_into_a_global_search_is_caught(monkeypatch):
    monkeypatch.setattr("policies.dspark_alg1.first_non_gain", lambda objective: int(objective.argmax()))
    assert caught(DSparkAlgorithm1(), 100)


def test_ranking_by_what_comes_later_is_caught(monkeypatch):
    """The K best, but by the value of a draft *and its successor*."""

    def short_sighted(survival, k, caps=None):
        ahead = np.concatenate([survival[:, 1:], np.zeros((survival.shape[0], 1))], axis=1)
        # Still valid prefixes: rows never rise.
        return top_k(np.minimum.accumulate(survival + ahead, axis=1) * (survival > 0), k, caps)

    monkeypatch.setattr("policies.dspark.top_k", short_sighted)
    assert caught(load_policy("dspark:lag=1"), 100)


def test_old_confidences_read_off_by_one_are_caught(monkeypatch):
    monkeypatch.setattr("policies.dspark.DSpark.plan", _one_too_young)
    assert caught(load_policy("dspark:lag=1"), 100)


def _one_too_young(self, view):
    capacity = cumulative_value(view.survival(self.lag - 1), start=view.requests)
    theta = capacity / view.verify_ms[view.base_tokens : view.base_tokens + capacity.size]
    return top_k(view.survival(), int(theta.argmax()))


def test_confidences_of_the_drafts_themselves_break_the_claim():
    assert caught(load_policy("dspark-alg1"), 60, own_token=True)
    assert not caught(load_policy("disco"), 60, own_token=True)


# -- the smallest counterexample ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        # One draft needs no second, and a confidence of the second draft is the first that depends on a draft.
        (CONTROLS["without-break"](), (1, 2, 2, 1)),
        (CONTROLS["peek"](), (1, 2, 2, 1)),
        (CONTROLS["peek-others"](), (2, 2, 2, 1)),
    ],
    ids=repr,
)
def test_the_smallest_counterexample(policy, size):
    cases = [numbered_case(0, number) for number in caught(policy, 60)]
    found = smallest_counterexample(policy, cases, seed=1, tries=8)
    assert found.case.size == size
    assert audit(found.case, policy).distance == found.distance > 0
    assert slow_law(found.case, policy) == output_law(found.case, policy)
    # Nothing that can be left out is left in.
    assert (found.case.prefill, found.case.draft_ms, found.case.captured_sizes) == (0, 0.0, ())
    assert (found.case.past, found.case.starts, found.case.clip, found.case.leave) == ((), (), False, True)


def test_without_a_counterexample_there_is_no_smallest_one():
    with pytest.raises(InputError, match="at least one counterexample"):
        smallest_counterexample(load_policy("none"), [numbered_case(0, 1)], seed=0)


def test_a_description_has_tables_decisions_and_laws():
    case = replace(world(requests=2, tokens=2, prefill=1, captured_sizes=(4,)), past=(((1.0, 0.5), (0.5, 0.25)),))
    text = describe(case, CONTROLS["whole-blocks"](), "mine")
    assert text.startswith("mine: total variation distance ")
    for part in (
        "law of the first 2 tokens of each",
        "captured sizes: 4",
        "prefill tokens in every step: 1",
        "a request that has its tokens leaves the batch",
        "  1 0.5  0.5 0.25",
        "1 step old",
        "AA | AB",
    ):
        assert part in text, part


# -- cases, and what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["case", "cases", "controls", "describe", "law", "search"])
def test_the_examples_in_the_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"dsim.lossless.{module}"))
    assert result.failed == 0
    assert result.attempted or module == "controls"


def test_cases_are_numbered_and_random_ones_are_valid():
    assert numbered_case(3, 5) == numbered_case(3, 5)
    assert numbered_case(3, 5) != numbered_case(3, 6)
    assert numbered_case(3, 5) != numbered_case(4, 5)
    sizes = {numbered_case(0, number).size for number in range(200)}
    assert {size[0] for size in sizes} == {1, 2, 3}
    assert {size[1] for size in sizes} == {1, 2, 3}
    assert {size[2] for size in sizes} == {2, 3}


def test_contexts():
    assert list(contexts(2, 1)) == [(), A, B]
    assert list(contexts(2, 1, shortest=5)) == [A, B]
    assert len(list(contexts(3, 2))) == 1 + 3 + 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": 4}, "'vocabulary': got 4, expected an integer in 2..3"),
        ({"gamma": 0}, "'gamma'"),
        ({"tokens": 9}, "'tokens'"),
        ({"order": 1.0}, "'order'"),
        ({"requests": ()}, "'requests': got 0"),
        ({"verify_ms": (0.0, 1.0, 1.0)}, "at least 4 milliseconds"),
        ({"verify_ms": (0.0, 1.0, 1.0, 0.0)}, "> 0 from the second on"),
        ({"starts": (1,)}, "the first of them 0"),
        ({"starts": (0, 0)}, "'starts'"),
        ({"past": (((1.0,),),)}, "1 rows of 2 confidences"),
        ({"past": (((1.0, 2.0),),)}, "confidences in [0, 1]"),
        ({"prefill": -1}, "'prefill'"),
        ({"draft_ms": -1.0}, "'draft_ms'"),
        ({"captured_sizes": (4, 2)}, "'captured_sizes'"),
        ({"leave": False, "clip": True}, "'clip'"),
    ],
)
def test_a_bad_case_names_the_field(change, message):
    with pytest.raises(InputError) as error:
        replace(world(), **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": {(): HALF}}, "requests.0.target[A]"),
        ({"drafter": everywhere((Fraction(1, 2), Fraction(1, 3)), 2)}, "requests.0.drafter[-]"),
        ({"confidence": ({(): 1.0, A: 1.0, B: 1.0},)}, "requests.0.confidence': got 1, expected 2 tables"),
        ({"confidence": ({(): 1.0, A: 1.0, B: 1.0}, {A: 1.0})}, "requests.0.confidence[1][B]"),
        ({"confidence": ({(): 1.5, A: 1.0, B: 1.0}, {A: 1.0, B: 1.0})}, "requests.0.confidence[0][-]': got 1.5"),
    ],
)
def test_a_bad_table_names_the_context(change, message):
    with pytest.raises(InputError) as error:
        replace(world(), requests=(replace(world().requests[0], **change),))
    assert message in str(error.value)


def test_weights_that_are_no_distribution():
    with pytest.raises(InputError, match="weights"):
        distribution(0, 0)
    with pytest.raises(InputError, match="weights"):
        distribution(-1, 2)


class Answer(BasePolicy):
    traits = Traits(cost_driven=False)

    def __init__(self, answer=None):
        self.answer = answer

    def plan(self, view):
        if self.answer is None:
            raise KeyError("lost")
        return np.asarray(self.answer)


class Deaf(Answer):
    def observe(self, verified, accepted):
        raise KeyError("deaf")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Answer(), "policy Answer(answer=None) raised KeyError"),
        (Answer([1, 1]), "returned no verify lengths"),
        (Answer([0.5]), "returned no verify lengths, got 'float64[1]'"),
        (Answer([3]), "out of bounds"),
        (Answer([-1]), "out of bounds"),
        (Deaf([0]), "observe(verified, accepted)"),
        (Answer(lambda: 1), "cannot be pickled"),
        (load_policy("fixed:k=3"), "policy Fixed(k=3) needs a longer block"),
    ],
)
def test_a_policy_that_fails_is_named(policy, message):
    with pytest.raises(InputError) as error:
        audit(world(tokens=2), policy)
    assert message in str(error.value)
