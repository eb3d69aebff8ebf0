"""The engine: the text's law under every policy, steps that can be worked out by hand, batches, bad input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dsim.drafter.drafter import FINAL
from dsim.drafter.engine import PARTS, Engine, EngineOptions, EngineRequest, serve_closed_loop
from dsim.drafter.sampling import Drafts, speculate
from dsim.drafter.target import LlamaTarget
from dsim.drafter.tiny import tiny_target
from dsim.errors import InputError
from dsim.metrics import summarize
from dsim.policy import BasePolicy, PolicyView, Traits, load_policy

VOCAB, GAMMA, HEAT = 8, 3, 0.8
PROMPT = (1, 6, 4, 1)


@cache
def target() -> LlamaTarget:
    """One token in eight ends an answer."""
    return replace(tiny_target(seed=5, vocab_size=VOCAB, num_layers=2, sharpness=1.2), eos=frozenset({0}))


@pytest.fixture(scope="module")
def drafter(make_noisy: Any) -> Any:
    """A bad drafter that says something about everything; tokens 6 and 7 are none of its own."""
    return make_noisy("markov", target=target(), gamma=GAMMA, taps=(1, 2, FINAL), temperature=HEAT)


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(**{"max_requests": 4, "max_prompt": 12, "max_tokens": 9, "temperature": HEAT, **changes})


def requests(count: int, prompt: tuple[int, ...] = PROMPT) -> list[EngineRequest]:
    return [EngineRequest(number, prompt, number % 2) for number in range(count)]


def engine(drafter: Any, policy: Any, **changes: Any) -> Engine:
    made = load_policy(policy) if isinstance(policy, str) else policy
    return Engine(target(), drafter, policy=made, prices=None, options=options(**changes))


class Peeking(BasePolicy):
    """l of a block looks at no confidence beyond c_{l+1}, and at nothing else."""

    traits = Traits(cost_driven=False)

    def plan(self, view: PolicyView) -> Any:
        return (view.confidence > 0.5).cumprod(axis=1).sum(axis=1).astype(np.int64)


class Told(BasePolicy):
    """Verify lengths in turn, the same for all requests, or those of a function."""

    traits = Traits(cost_driven=False)

    def __init__(self, say: Callable[[PolicyView], Any]) -> None:
        self.say = say
        self.heard: list[tuple[list[int], list[int]]] = []

    def __deepcopy__(self, memo: Any) -> Told:
        return self

    def plan(self, view: PolicyView) -> Any:
        return self.say(view)

    def observe(self, verified: Any, accepted: Any) -> None:
        self.heard.append((verified.tolist(), accepted.tolist()))


# -- the law of the text ---------------------------------------------------------------------------------


@cache
def law(tokens: tuple[int, ...]) -> Any:
    """The target's law of the next token, from scratch."""
    model = target()
    _, hidden = model.extend(torch.tensor([tokens]), model.new_cache(1, len(tokens)), torch.zeros(1, dtype=torch.int64))
    return torch.softmax(model.logits(hidden[0, -1]).double() / HEAT, dim=-1).numpy()


@cache
def joint(length: int = 3) -> dict[tuple[int, ...], float]:
    """Law of the first output tokens of an answer; those that end earlier are shorter."""
    table: dict[tuple[int, ...], float] = {}

    def fill(output: tuple[int, ...], p: float) -> None:
        if len(output) == length or (output and output[-1] in target().eos):
            table[output] = p
            return
        for token, q in enumerate(law(PROMPT + output)):
            fill((*output, token), p * float(q))

    fill((), 1.0)
    return table


def p_value(texts: Any) -> float:
    expected = joint()
    counts = dict.fromkeys(expected, 0)
    for text in texts:
        counts[tuple(text[:3])] += 1
    keys = sorted(expected, key=lambda key: -expected[key])
    found, wanted = (np.array([table[key] for key in keys], dtype=float) for table in (counts, expected))
    wanted *= found.sum()
    few = int(np.searchsorted(-wanted, -5.0))  # the rarest ones together
    found, wanted = (np.append(part[:few], part[few:].sum()) for part in (found, wanted))
    return float(stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue)


def answers(made: Engine, count: int = 800) -> Any:
    return serve_closed_loop(made, requests(count), made.options.max_requests).texts


@pytest.mark.parametrize("policy", ["none", "fixed:k=1", "fixed:k=3", Peeking()], ids=str)
def test_the_text_has_the_targets_law_whatever_is_verified(drafter: Any, policy: Any) -> None:
    assert p_value(answers(engine(drafter, policy, max_requests=32, max_tokens=3))) > 1e-3


def test_without_a_drafter_the_target_writes_alone() -> None:
    assert p_value(answers(engine(None, "none", max_requests=32, max_tokens=3))) > 1e-3


def test_the_test_of_the_law_can_fail(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(logits: Any, lengths: Any, drafts: Any, u_accept: Any, u_next: Any) -> Any:
        # A classic mistake: after a rejection the next token is drawn from the target's law, not from the residual.
        monkeypatch.setattr("dsim.drafter.sampling.residual", lambda first, second: first)
        return speculate(logits, lengths, drafts, u_accept, u_next)

    monkeypatch.setattr("dsim.drafter.engine.speculate", careless)
    assert p_value(answers(engine(drafter, "fixed:k=3", max_requests=32, max_tokens=3))) < 1e-6


# -- acceptance by hand ----------------------------------------------------------------------------------


def test_acceptance_by_hand() -> None:
    # Three tokens. Sequence 0 verifies two drafts, sequence 1 one, sequence 2 drafts nothing.
    laws = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.2, 0.8], [0.5, 0.5]]])
    drafts = Drafts(torch.tensor([[2, 0], [2, 0]]), torch.tensor([[1, 0], [1, 0]]), laws, torch.tensor([0, 2]))
    p = torch.tensor(
        [[0.2, 0.4, 0.4], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2], [0.3, 0.3, 0.4], [0.0, 1.0, 0.0]]
    )
    u_next = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64)

    def found(u: list[list[float]]) -> Any:
        u_accept = torch.tensor(u, dtype=torch.float64)
        return [part.tolist() for part in speculate(torch.log(p), [2, 1, 0], drafts, u_accept, u_next)]

    # 0: u p_d = 0.79 x 0.5 < 0.4 accepts, 0.59 x 1 < 0.6 accepts; then p[2], of which half is token 2.
    # 1: 0.24 x 0.8 < 0.2 accepts; then p[4]: 0.3, 0.6 -> token 1. 2: always token 1.
    assert found([[0.79, 0.59], [0.24, 0.0]]) == [[2, 1, 0], [2, 1, 1]]
    # 0: 0.81 x 0.5 >= 0.4 rejects: residual of p[0] - (0.5, 0, 0.5) is token 1. The second draft counts no more.
    # 1: 0.26 x 0.8 >= 0.2 rejects: p[3] - (0.2, 0, 0.8) = (0.3, 0.3, 0): half of it is token 0, so u = 0.5 gives 1.
    assert found([[0.81, 0.0], [0.26, 0.0]]) == [[0, 0, 0], [1, 1, 1]]
    # 0: the second one is rejected: p[1] - (1, 0, 0) = (0, 0.3, 0.1) -> token 1.
    assert found([[0.0, 0.61], [0.0, 0.0]])[0] == [1, 1, 0]


# -- steps -----------------------------------------------------------------------------------------------


def test_a_run_step_by_step(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft accepted, no ends: two users, three requests, prompts of 4 tokens in chunks of 6."""
    monkeypatch.setattr("dsim.drafter.sampling.rejected", lambda p, q, u: torch.zeros_like(p, dtype=torch.bool))
    monkeypatch.setattr(target(), "eos", frozenset())
    told = Told(lambda view: np.full(view.requests, 2))
    made = engine(drafter, told, max_tokens=7, prefill_chunk=6)
    run = serve_closed_loop(made, requests(3), 2)
    steps = {name: column.tolist() for name, column in run.records.steps.items()}
    # 1: prompt 0 and half of prompt 1; 2: request 0 decodes, the rest of prompt 1; 3: 0 has 1 + 3 + 3 = 7: it ends.
    # 4: 2 is asked in its place; 1 ends with it, 3 + 3 + 1; then 2 alone.
    assert steps["requests"] == [0, 1, 2, 1, 1, 1]
    assert steps["prefill_tokens"] == [6, 2, 0, 4, 0, 0]
    assert steps["drafts"] == [0, 2, 4, 2, 2, 2]
    assert steps["accepted"] == steps["drafts"]
    assert steps["committed"] == [0, 3, 6, 3, 3, 3]
    assert steps["first_tokens"] == [1, 1, 0, 1, 0, 0]
    assert steps["batch_tokens"] == [6, 5, 6, 7, 3, 3]
    # Contexts hold the anchor: prompt + output so far.
    assert steps["context_tokens"] == [0, 5, 8 + 5, 8, 5, 8]
    assert told.heard == [([2], [2]), ([2, 2], [2, 2]), ([2], [2]), ([2], [2]), ([2], [2])]
    assert [len(text) for text in run.texts] == [7, 7, 7]
    ends = run.records.steps["end_ns"]
    assert run.records.requests["first_ns"].tolist() == [ends[0], ends[1], ends[3]]
    assert run.records.requests["finish_ns"].tolist() == [ends[2], ends[3], ends[5]]
    assert run.records.requests["arrival_ns"].tolist() == [0, 0, ends[2]]
    assert np.array_equal(sum(run.parts.values()), run.records.steps["step_ns"])
    assert summarize(run.records)["accepted_length"] == 3.0


def test_every_nanosecond_belongs_to_a_part(drafter: Any) -> None:
    ticks = iter(range(0, 10**9, 1000))
    made = Engine(
        target(), drafter, policy=load_policy("fixed:k=2"), prices=None, options=options(), clock=lambda: next(ticks)
    )
    run = serve_closed_loop(made, requests(5), 3)
    # A reading ends each part; the one that ends a step begins the next, so a step has as many ticks as readings.
    decoding = run.records.steps["requests"] > 0
    assert run.parts["draft"].tolist() == run.parts["plan"].tolist() == (1000 * decoding).tolist()
    assert set(run.parts["verify"].tolist()) == set(run.parts["prefill"].tolist()) == {1000}
    assert set(run.parts["rest"].tolist()) == {2000}
    assert tuple(run.parts) == PARTS
    assert int(run.records.steps["step_ns"].sum()) == run.records.end_ns


def test_the_same_requests_make_the_same_steps_again(drafter: Any) -> None:
    made = engine(drafter, Peeking())
    one, two = serve_closed_loop(made, requests(12), 4), serve_closed_loop(made, requests(12), 4)
    assert one.texts == two.texts
    for name in ("requests", "prefill_tokens", "drafts", "accepted", "committed", "context_tokens"):
        assert one.records.steps[name].tolist() == two.records.steps[name].tolist()
    other = serve_closed_loop(engine(drafter, Peeking(), seed=1), requests(12), 4)
    assert other.texts != one.texts


@pytest.mark.parametrize("sort", ["markov", "rnn", "dflash", "eagle3", "mtp"])
def test_a_text_does_not_depend_on_who_else_is_in_the_batch(make_noisy: Any, sort: str) -> None:
    """Prompts in one chunk or many, alone or with others: the caches of target and drafter hold the same."""
    taps = (FINAL,) if sort == "mtp" else (1, 2)
    drafter = make_noisy(sort, target=target(), gamma=GAMMA, taps=taps, temperature=HEAT)
    # Token 7 and 6 are outside the drafters' vocabulary: some may draft them, others not.
    prompts = [(1, 6, 4, 1), (1, 7, 2, 3, 5, 1), (1, 2, 1), (1, 3, 7, 6, 2, 4, 5, 1)] * 2
    asked = [EngineRequest(number, prompt) for number, prompt in enumerate(prompts)]
    told = Told(lambda view: view.produced % (GAMMA + 1))
    with_others = serve_closed_loop(engine(drafter, told, prefill_chunk=5), asked, 4)
    alone = serve_closed_loop(engine(drafter, told, max_requests=1), asked, 1)
    assert with_others.texts == alone.texts
    assert with_others.records.steps["accepted"].sum() == alone.records.steps["accepted"].sum() > 0


def test_aged_confidences_of_newcomers_are_one(drafter: Any) -> None:
    class Aged(Told):
        traits = Traits(cost_driven=False, confidence_age=2)

    seen: list[Any] = []

    def say(view: PolicyView) -> Any:
        seen.append((view.born.tolist(), view.step, [view.aged(n).copy() for n in range(3)]))
        return np.zeros(view.requests, dtype=np.int64)

    serve_closed_loop(engine(drafter, Aged(say), max_tokens=4, prefill_chunk=4), requests(2), 2)
    # Nothing verified: request 0 is in decode in steps 0, 1, 2, request 1 a step later (unless ends come first).
    born, step, (_, first, second) = seen[0]
    assert (born, step) == ([0], 0)
    assert first.tolist() == second.tolist() == [[1.0] * GAMMA]
    for (_, _, (now, _, _)), (born, step, (_, one, _)) in pairwise(seen):
        for row, since in enumerate(born):
            if since == step:
                assert one[row].tolist() == [1.0] * GAMMA
            elif len(now) == len(born):
                assert one[row].tolist() == now[row].tolist()
    assert any(len(born) == 2 for born, _, _ in seen)


def test_a_view_is_read_only_and_says_what_is_in_the_step(drafter: Any) -> None:
    seen: list[PolicyView] = []

    def say(view: PolicyView) -> Any:
        seen.append(view)
        return np.zeros(view.requests, dtype=np.int64)

    serve_closed_loop(engine(drafter, Told(say), prefill_chunk=4, max_tokens=3), requests(3), 3)
    # The first request decodes while the second one's four tokens are processed, whole.
    assert (seen[0].requests, seen[0].base_tokens, seen[0].sampling) == (1, 5, 2)
    with pytest.raises(ValueError, match="read-only"):
        seen[0].confidence[0, 0] = 0.0


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_requests": 0}, "'max_requests'.*got 0"),
        ({"prefill_chunk": 0}, "'prefill_chunk'"),
        ({"temperature": 0.0}, "'temperature'.*got 0.0"),
        ({"temperature": float("nan")}, "'temperature'"),
        ({"seed": -1}, "'seed'.*got -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        options(**changes)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("oracle", "no real engine does"),
        ("fixed:k=5", "needs longer blocks.*got 3"),
        ("dspark", "decides by prices"),
    ],
)
def test_policies_that_it_cannot_run_are_refused(drafter: Any, policy: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine(drafter, policy)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (lambda view: np.full(view.requests, GAMMA + 1), r"out of bounds for request 0.*got 4.*0\.\.3"),
        (lambda view: np.full(view.requests, -1), "out of bounds.*got -1"),
        (lambda view: np.zeros(view.requests + 1, dtype=int), "no verify lengths"),
        (lambda view: np.zeros(view.requests), "no verify lengths.*float64"),
    ],
)
def test_lengths_that_are_none_are_refused(drafter: Any, lengths: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        serve_closed_loop(engine(drafter, Told(lengths)), requests(2), 2)


def test_requests_and_users_that_do_not_fit_are_refused(drafter: Any) -> None:
    made = engine(drafter, "none")
    with pytest.raises(InputError, match=r"request 3 does not fit.*13 tokens.*max_prompt = 12"):
        made.submit(EngineRequest(3, (1,) * 13))
    for users in (0, 5, 3):
        with pytest.raises(InputError, match=f"'users'.*got {users}"):
            serve_closed_loop(made, requests(2), users)
    with pytest.raises(InputError, match="stands there twice"):
        serve_closed_loop(made, [*requests(2), EngineRequest(0, PROMPT)], 2)


def test_drafters_of_other_targets_and_other_types_are_refused(make_noisy: Any) -> None:
    foreign = make_noisy("markov", gamma=GAMMA)
    with pytest.raises(InputError, match="drafter"):
        engine(foreign, "none")
    half = copy.deepcopy(target())
    half.model = half.model.half()
    half.model.head = half.model.embedding
    with pytest.raises(InputError, match="float32"):
        Engine(half, None, policy=load_policy("none"), prices=None, options=options())
