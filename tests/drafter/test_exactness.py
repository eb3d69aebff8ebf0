"""What replaying coupled recordings is worth: its law against that of live speculative decoding (docs/drafts.md).

A target of 10 tokens, a trained DSpark drafter, one prompt and four tokens that the target writes alone. Live:
`Speculation.live` of the conftest. Replay: a fresh text of the target for every request, a block drafted jointly with
it at every position visited, decoding as the policy says, the text fixed. Compared are joint distributions over two
steps in a row of (verify length l, tokens gained, c_1 in three bins, c_{l+1} in two): chi-square tests of homogeneity.

Full verification and causal truncation (l looks at c_1 ... c_{l+1}) must pass. A policy that takes l from all of the
*previous* block's confidences, those beyond its cut included, must only be near: live decoding draws the token behind
the cut afresh, replay finds the one that the draft there was coupled with.

Measured with 48,000 requests a side (total variation of the joint law of two steps, and what noise alone gives):

========= ============ =================== ==================================================================
policy    tau, live    tau, replay - live  law of steps 1 and 2
========= ============ =================== ==================================================================
full      3.925        +0.06 % +- 0.16 %   p = 0.24
causal    1.354        +0.03 % +- 0.37 %   p = 0.62
shared    2.779         0.00 % +- 0.18 %   variation 0.041 (noise 0.030): `dspark` with a lag, in batches of 8
lagged    2.844        -0.03 % +- 0.15 %   p = 0, variation 0.112 (noise 0.028): `dspark` with a lag, one request
lurching  2.405        -2.15 % +- 0.18 %   p = 0, variation 0.180 (noise 0.025): all or one by c_gamma alone
========= ============ =================== ==================================================================

So the law is not exact with stale confidences; tau is moved by a policy that is made for it, and not by a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torch import Tensor

from dsim.drafter.corpus import Corpus, generate_corpus
from dsim.drafter.drafter import FINAL
from dsim.drafter.prompts import Prompt
from dsim.drafter.record import record_text
from dsim.drafter.sampling import couple, pick
from dsim.drafter.tiny import tiny_target
from dsim.drafter.train import Recipe, Trainer

HEAT, GAMMA, STEPS, REQUESTS, VOCAB = 0.9, 4, 3, 4000, 10
#: Of a verified token, where a step without any costs 1; and requests that share a capacity.
COST, BATCH = 0.5, 8

Cells = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def machine(make_fresh: Any, speculation: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Small, so that thousands of requests are cheap; no token ends a text."""
    target = tiny_target(seed=4, vocab_size=VOCAB, hidden_size=16, num_layers=2, sharpness=2.5)
    target = replace(target, eos=frozenset())
    folder, texts = tmp_path_factory.mktemp("exactness"), []
    for split, first, last in (("train", 0, 48), ("calibration", 100, 104)):
        prompts = [Prompt("chat", f"{i * i} things, {i} ways", "test") for i in range(first, last)]
        generate_corpus(
            target,
            prompts,
            folder / split,
            split=split,
            taps=(0, 1, 2),
            temperature=HEAT,
            max_new_tokens=48,
            max_prompt_tokens=32,
            progress=False,
        )
        texts.append(Corpus(folder / split))
    drafter = make_fresh("markov", target=target, taps=(0, 1, 2, FINAL), rank=8)
    recipe = Recipe(anchors=9600, sequences=1, anchors_per_sequence=48, learning_rate=6e-3, warmup=0.0)
    Trainer(drafter, target, *texts, recipe).run(progress=False, evaluations=1)
    return speculation(target, drafter.eval(), target.tokenizer.chat("0 things"), HEAT, alone=4)


# -- replay -----------------------------------------------------------------------------------------------


class Blocks:
    """Blocks at one position of each of many texts, drafted jointly with what follows there."""

    def __init__(self, machine: Any, tokens: Tensor, states: Tensor, laws: Tensor) -> None:
        self.machine, self.tokens, self.laws = machine, tokens, laws
        self.row = torch.arange(len(tokens))
        self.context = machine.drafter.prepare(states, tokens)

    def coupled(self, at: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Confidence logits [N, gamma] and accepted lengths int64[N] at positions `at`, with uniforms [N, gamma, 2]."""
        vocabulary = self.machine.vocabulary
        alive, accepted = torch.ones(len(at), dtype=torch.bool), torch.zeros(len(at), dtype=torch.int64)

        def choose(k: int, p_draft: Tensor) -> Tensor:
            nonlocal alive, accepted
            p_target, token = self.laws[self.row, at + k], self.tokens[self.row, at + k + 1]
            p_text = p_target.gather(1, token[:, None]).squeeze(1)
            inside = p_target[:, vocabulary.tokens]
            chosen, alive = couple(p_draft, inside, vocabulary.local[token], p_text, alive, u[:, k])
            accepted = accepted + alive
            return chosen

        return self._draft(at, choose).confidence_logit, accepted

    def independent(self, at: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The same of drafts that know nothing of the text: right for themselves, each accepted as often."""
        laws: list[Tensor] = []

        def choose(k: int, p_draft: Tensor) -> Tensor:
            laws.append(p_draft)
            return pick(p_draft, u[:, k, 0])

        block, machine = self._draft(at, choose), self.machine
        cache = machine.target.new_cache(len(at), self.tokens.shape[1] + GAMMA)
        machine.read(self.tokens[:, :-1], cache, torch.zeros_like(at))
        _, p_target = machine.read(torch.cat([self.tokens[self.row, at][:, None], block.tokens], dim=1), cache, at)
        of_draft = torch.stack(laws, dim=1).gather(2, block.local[..., None]).squeeze(2)
        of_target = p_target[:, :-1].gather(2, block.tokens[..., None]).squeeze(2)
        return block.confidence_logit, (u[..., 1] * of_draft < of_target).long().cumprod(dim=1).sum(dim=1)

    def _draft(self, at: Tensor, choose: Callable[[int, Tensor], Tensor]) -> Any:
        machine = self.machine
        return machine.drafter.draft(
            self.context, self.tokens[self.row, at], at, machine.vocabulary, machine.temperature, choose
        )


def replayed(machine: Any, policy: Any, random: np.random.Generator, *, requests: int, how: str = "coupled") -> Any:
    """Steps as of `Speculation.live`, from recordings."""
    alone = machine.start - len(machine.prompt) + 1
    blocks = Blocks(machine, *machine.plain(requests, alone + STEPS * (GAMMA + 1) + GAMMA, random))
    at = torch.full((requests,), machine.start)
    kept: list[tuple[Tensor, ...]] = []
    before: Tensor | None = None
    for step in range(STEPS):
        logits, accepted = getattr(blocks, how)(at, torch.from_numpy(random.random((requests, GAMMA, 2))))
        confidence = torch.sigmoid(logits)
        length = policy(step, confidence, before)
        gained = torch.minimum(accepted, length) + 1
        kept.append((confidence, length, gained, at - len(machine.prompt)))
        at, before = at + gained, confidence
    confidence, length, gained, position = (torch.stack(part, dim=1) for part in zip(*kept, strict=True))
    return type(machine).steps_of(confidence, length, gained, blocks.tokens, position)


def test_the_replay_of_this_test_is_the_recorder(machine: Any) -> None:
    tokens, states, laws = machine.plain(8, 16, np.random.default_rng(1))
    prompt = len(machine.prompt)
    for seed, text in enumerate(tokens):
        random = np.random.default_rng(seed)
        rows = record_text(machine.target, [machine.drafter], text.numpy(), prompt, temperature=HEAT, random=random)[0]
        random = np.random.default_rng(seed)
        u = torch.from_numpy(np.stack([random.random((1, 16, 2)) for _ in range(GAMMA)], axis=2)[0, :12])
        repeated = [part[seed : seed + 1].expand(12, *part.shape[1:]) for part in (tokens, states, laws)]
        logits, accepted = Blocks(machine, *repeated).coupled(torch.arange(12) + prompt, u)
        assert accepted.tolist() == rows.accepted[:12].tolist()
        np.testing.assert_allclose(logits, rows.confidence_logit[:12], atol=1e-4)


# -- policies ---------------------------------------------------------------------------------------------


def full(step: int, confidence: Tensor, before: Tensor | None) -> Tensor:
    """Verify everything."""
    return torch.full((len(confidence),), GAMMA)


def causal(step: int, confidence: Tensor, before: Tensor | None) -> Tensor:
    """Verify while c_k >= 0.9: what is decided at k looks at c_1 ... c_k."""
    return (confidence >= 0.9).long().cumprod(dim=1).sum(dim=1)


def lagged(step: int, confidence: Tensor, before: Tensor | None) -> Tensor:
    """As `dspark` with a lag of one: the length with the largest tau / cost by the block before, cut or not."""
    if before is None:
        return torch.ones(len(confidence), dtype=torch.int64)
    tau = 1 + torch.cat([torch.zeros(len(before), 1), before.cumprod(dim=1).cumsum(dim=1)], dim=1)
    return (tau / (1 + COST * torch.arange(GAMMA + 1))).argmax(dim=1)


def shared(step: int, confidence: Tensor, before: Tensor | None) -> Tensor:
    """As `dspark` in a batch of eight: the capacity by the blocks before, who gets it by the current ones."""
    now = confidence.cumprod(dim=1).view(-1, BATCH * GAMMA)
    if before is None:
        capacity = torch.full((len(now),), BATCH)
    else:
        ranked = before.cumprod(dim=1).view(-1, BATCH * GAMMA).sort(dim=1, descending=True).values
        tau = BATCH + torch.cat([torch.zeros(len(now), 1), ranked.cumsum(dim=1)], dim=1)
        capacity = (tau / (BATCH + COST * torch.arange(BATCH * GAMMA + 1))).argmax(dim=1)
    place = now.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (place < capacity[:, None]).view(-1, GAMMA).sum(dim=1)


def lurching(step: int, confidence: Tensor, before: Tensor | None) -> Tensor:
    """All or one, by the last confidence of the block before: nothing but what lies beyond the cut decides."""
    if before is None:
        return torch.ones(len(confidence), dtype=torch.int64)
    return torch.where(before[:, -1] >= 0.9, GAMMA, 1)


# -- tests of homogeneity ---------------------------------------------------------------------------------


def cells(steps: Any, first: int) -> Cells:
    """One number for what happened in the steps first and first + 1 of each request."""
    number = torch.zeros(len(steps.length), dtype=torch.int64)
    for step in (first, first + 1):
        c, length = steps.confidence[:, step], steps.length[:, step]
        following = c.gather(1, length.clamp(max=GAMMA - 1)[:, None]).squeeze(1)
        sure, next_sure = (c[:, 0] > 0.88).long() + (c[:, 0] > 0.92), (following > 0.9).long()
        for value, size in ((length, GAMMA + 1), (steps.gained[:, step] - 1, GAMMA + 1), (sure, 3), (next_sure, 2)):
            number = number * size + value
    return number.numpy()


def table(one: Cells, two: Cells) -> npt.NDArray[np.int64]:
    """Counts [2, cells]; cells that both together have less than ten times are one."""
    known, place = np.unique(np.concatenate([one, two]), return_inverse=True)
    counts = np.stack([np.bincount(part, minlength=known.size) for part in (place[: one.size], place[one.size :])])
    rare = counts.sum(axis=0) < 10
    joined = np.concatenate([counts[:, ~rare], counts[:, rare].sum(axis=1, keepdims=True)], axis=1)
    return joined[:, joined.sum(axis=0) > 0]


def p_value(one: Cells, two: Cells) -> float:
    return float(stats.chi2_contingency(table(one, two)).pvalue)


def distance(one: Cells, two: Cells) -> tuple[float, float]:
    """Total variation between the two samples, and its mean where both have one law."""

    def variation(counts: npt.NDArray[np.int64]) -> float:
        shares = counts / counts.sum(axis=1, keepdims=True)
        return float(np.abs(shares[0] - shares[1]).sum() / 2)

    counts = table(one, two)
    pooled = counts.sum(axis=0) / counts.sum()
    random = np.random.default_rng(0)
    noise = [variation(random.multinomial(one.size, pooled, size=2)) for _ in range(200)]
    return variation(counts), float(np.mean(noise))


def both(machine: Any, policy: Any, seed: int, requests: int = REQUESTS, how: str = "coupled") -> tuple[Any, Any]:
    live = machine.live(requests, STEPS, policy, np.random.default_rng([seed, 1]))
    return live, replayed(machine, policy, np.random.default_rng([seed, 2]), requests=requests, how=how)


@pytest.mark.parametrize("policy", [full, causal], ids=lambda policy: policy.__name__)
def test_replay_has_the_law_of_live_decoding(policy: Any, machine: Any) -> None:
    live, replay = both(machine, policy, seed=0)
    # Lengths and gains of all sizes are there.
    assert len(np.unique(live.gained)) == GAMMA + 1
    assert len(np.unique(live.length)) == (1 if policy is full else GAMMA + 1)
    for first in range(STEPS - 1):
        p = p_value(cells(live, first), cells(replay, first))
        print(f"{policy.__name__}, steps {first + 1} and {first + 2}: p = {p:.3f}")
        assert p > 1e-3
    tau, sigma = bias(live, replay)[1:]
    print(
        f"{policy.__name__}: tau {live.gained.double().mean():.3f}, replay off by {tau:+.3f} = {tau / sigma:+.1f} sigma"
    )
    assert abs(tau) < 3 * sigma


def bias(live: Any, replay: Any, batch: int = 1) -> tuple[float, float, float]:
    """tau of live decoding over all steps, that of replay minus it, and the standard error of the difference."""
    here, there = (steps.gained.double().mean(dim=1).view(-1, batch).mean(dim=1) for steps in (live, replay))
    sigma = (here.var() / len(here) + there.var() / len(there)).sqrt()
    return float(here.mean()), float(there.mean() - here.mean()), float(sigma)


@pytest.mark.parametrize(("policy", "most"), [(shared, 0.03), (lagged, 0.03), (lurching, 0.05)])
def test_the_bias_of_stale_confidences_is_small(policy: Any, most: float, machine: Any) -> None:
    live, replay = both(machine, policy, seed=0)
    tau, off, sigma = bias(live, replay, BATCH)
    print(f"{policy.__name__}: tau {tau:.3f}, replay off by {off:+.4f} ({off / tau:+.2%}) = {off / sigma:+.1f} sigma")
    for first in range(STEPS - 1):
        one, two = cells(live, first), cells(replay, first)
        found, noise = distance(one, two)
        print(f"  steps {first + 1} and {first + 2}: total variation {found:.3f} (noise alone: {noise:.3f})", end="")
        # Requests of one batch are not independent.
        print("" if policy is shared else f", p = {p_value(one, two):.1e}")
    assert abs(off) < most * tau


def test_drafts_that_know_nothing_of_the_text_fail(machine: Any) -> None:
    # The control: each block for itself has the right law, how it goes with the text has not.
    requests = 2000
    live, replay = both(machine, full, seed=0, requests=requests, how="independent")
    first = [steps.gained[:, 0].double() for steps in (live, replay)]
    assert abs(first[0].mean() - first[1].mean()) < 4 * ((first[0].var() + first[1].var()) / requests).sqrt()
    for step in range(STEPS - 1):
        p = p_value(cells(live, step), cells(replay, step))
        print(f"independent drafts, steps {step + 1} and {step + 2}: p = {p:.1e}")
        assert p < 1e-6


@pytest.mark.parametrize("policy", [causal, lurching], ids=lambda policy: policy.__name__)
def test_live_decoding_is_lossless_with_these_policies(policy: Any, machine: Any) -> None:
    live = machine.live(3000, 2, policy, np.random.default_rng(7))
    plain, _, _ = machine.plain(3000, 6, np.random.default_rng(8))
    # The first anchor and two tokens after it: two steps give at least these.
    at = machine.start
    texts = [((t[:, at] * VOCAB + t[:, at + 1]) * VOCAB + t[:, at + 2]).numpy() for t in (live.tokens, plain)]
    assert p_value(*texts) > 1e-3
