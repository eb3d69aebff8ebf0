"""What the tests of the drafters share: a tiny target, a small corpus of its text, drafters, and live decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsim.drafter.build import Drafter
from dsim.drafter.corpus import Corpus, generate_corpus
from dsim.drafter.drafter import FINAL, DrafterConfig
from dsim.drafter.prompts import Prompt
from dsim.drafter.sampling import pick, rejected, residual
from dsim.drafter.target import LlamaTarget
from dsim.drafter.tiny import tiny_target
from dsim.drafter.train import Recipe, Trainer, new_drafter
from dsim.drafter.vocabulary import vocabulary_of

VOCAB, GAMMA, HEAT, TAPS = 12, 4, 0.9, (0, 1, 3)
#: Kind, head and taps of every sort of drafter.
SORTS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "markov": ("dspark", "markov", (0, 3, FINAL)),
    "gated": ("dspark", "gated", (3,)),
    "rnn": ("dspark", "rnn", (1, FINAL)),
    "dflash": ("dflash", "none", (0, 1, 3)),
    "eagle3": ("eagle3", "none", (1, 3)),
    "mtp": ("mtp", "none", (FINAL,)),
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Many tiny operations: a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> LlamaTarget:
    """12 tokens, 3 layers of 32."""
    return tiny_target(seed=1, vocab_size=VOCAB, num_layers=3, sharpness=3.0)


def some_prompts(first: int, last: int) -> list[Prompt]:
    """Prompts of two domains in turn."""
    return [Prompt(("code", "chat")[i % 2], f"{i * i} things, {i} ways", "test") for i in range(first, last)]


@pytest.fixture(scope="session")
def corpora(tiny: LlamaTarget, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Corpus]:
    """Text to train on and held-out text: 72 and 24 answers of up to 40 tokens, in shards of 24."""
    folder = tmp_path_factory.mktemp("corpus")
    for split, prompts in (("train", some_prompts(0, 72)), ("calibration", some_prompts(100, 124))):
        generate_corpus(
            tiny,
            prompts,
            folder / split,
            split=split,
            taps=TAPS,
            temperature=HEAT,
            shard_size=24,
            max_new_tokens=40,
            max_prompt_tokens=32,
            progress=False,
        )
    return Corpus(folder / "train"), Corpus(folder / "calibration")


def config_of(target: LlamaTarget, sort: str, **changes: Any) -> DrafterConfig:
    """A description for a tiny target; the draft vocabulary lacks the target's last two tokens."""
    kind, head, taps = SORTS[sort]
    usual: dict[str, Any] = {
        "kind": kind,
        "gamma": GAMMA,
        "layers": 1,
        "taps": taps,
        "head": head,
        "rank": 6 if head != "none" else 0,
        "vocab_size": target.vocab_size - 2,
        "temperature": HEAT,
        "shape": target.shape,
        "target": target.name,
        "fingerprint": target.fingerprint,
    }
    return DrafterConfig(**{**usual, **changes})


def fresh(target: LlamaTarget, sort: str, *, seed: int = 0, **changes: Any) -> Drafter:
    """A drafter as training starts from it."""
    config = config_of(target, sort, **changes)
    return new_drafter(config, target, torch.arange(config.vocab_size), seed)


def noisy(target: LlamaTarget, sort: str, *, seed: int = 0, **changes: Any) -> Drafter:
    """An untrained drafter all of whose weights say something (some start at zero, norms at one)."""
    drafter = fresh(target, sort, seed=seed, **changes)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return drafter.eval()


Make = Callable[..., Drafter]


@pytest.fixture(scope="session")
def make_fresh(tiny: LlamaTarget) -> Make:
    """`fresh` drafters of the tiny target or another: make_fresh("rnn", gamma=2)."""
    return lambda sort, target=tiny, **options: fresh(target, sort, **options)


@pytest.fixture(scope="session")
def make_noisy(tiny: LlamaTarget) -> Make:
    """`noisy` drafters of the tiny target."""
    return lambda sort, target=tiny, **options: noisy(target, sort, **options)


@pytest.fixture(scope="session")
def trainer(tiny: LlamaTarget, corpora: tuple[Corpus, Corpus]) -> Trainer:
    """A DSpark drafter with a Markov head that was trained for some seconds; leave it as it is."""
    recipe = Recipe(anchors=4800, sequences=2, anchors_per_sequence=32, learning_rate=6e-3)
    made = Trainer(fresh(tiny, "markov"), tiny, *corpora, recipe)
    made.curve.append(made.evaluate())
    made.run(progress=False, evaluations=1)
    made.drafter.eval().requires_grad_(False)
    return made


@pytest.fixture(scope="session")
def trained(trainer: Trainer) -> Drafter:
    """The drafter of `trainer`."""
    return trainer.drafter


# -- live speculative decoding, many requests at once ------------------------------------------------------

#: (step, confidences [N, gamma] now, confidences of the block before or None) -> verify lengths int64[N].
Policy = Callable[[int, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Steps:
    """What N requests went through, step by step.

    Attributes
    ----------
    confidence
        float32[N, steps, gamma].
    length, gained
        int64[N, steps]: verify lengths, and tokens gained (accepted drafts and one more).
    tokens
        int64[N, S]: the text.
    position
        int64[N, steps]: output tokens known before each step, less one.
    """

    confidence: Tensor
    length: Tensor
    gained: Tensor
    tokens: Tensor
    position: Tensor


class Speculation:
    """A target and a drafter, run for N requests with one prompt at once; end tokens are tokens like others.

    The target writes the first `alone` tokens by itself.
    """

    #: What `live` returns.
    steps_of = Steps

    def __init__(
        self, target: LlamaTarget, drafter: Drafter, prompt: list[int], temperature: float, alone: int = 1
    ) -> None:
        self.target, self.drafter, self.prompt, self.temperature = target, drafter, prompt, temperature
        #: Position of the first anchor.
        self.start = len(prompt) + alone - 1
        self.taps = tuple(range(target.num_layers + 1))
        config = drafter.config
        self.columns = [target.num_layers + 1 if tap == FINAL else tap for tap in config.taps]
        self.gamma = config.gamma
        self.vocabulary = vocabulary_of(drafter.vocabulary_head.tokens, target.vocab_size, torch.tensor(prompt))

    def read(self, tokens: Tensor, cache: Any, start: Tensor) -> tuple[Tensor, Tensor]:
        """The target's pass: states of the drafter's layers [N, S, taps, H], laws of the next tokens [N, S, V]."""
        features, hidden = self.target.extend(tokens, cache, start, self.taps)
        states = torch.cat([features, hidden[:, :, None]], dim=2)[:, :, self.columns]
        return states, torch.softmax(self.target.logits(hidden) / self.temperature, dim=-1)

    def plain(self, requests: int, length: int, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Texts written by the target alone: tokens [N, P + length], their states and laws [N, P + length - 1, ...]."""
        tokens = torch.tensor(self.prompt).expand(requests, -1)
        cache = self.target.new_cache(requests, len(self.prompt) + length)
        new, start, states, laws = tokens, 0, [], []
        for _ in range(length):
            found, law = self.read(new, cache, torch.full((requests,), start))
            states.append(found)
            laws.append(law)
            start += new.shape[1]
            new = pick(law[:, -1], torch.from_numpy(random.random(requests)))[:, None]
            tokens = torch.cat([tokens, new], dim=1)
        return tokens, torch.cat(states, dim=1), torch.cat(laws, dim=1)

    def live(self, requests: int, steps: int, policy: Policy, random: np.random.Generator) -> Steps:
        """Decode: draft, verify what the policy says, commit (arXiv 2211.17192, algorithm 1)."""
        first, states, _ = self.plain(requests, self.start - len(self.prompt) + 1, random)
        width = self.start + 1 + (steps + 1) * (self.gamma + 1)
        tokens = torch.zeros(requests, width, dtype=torch.int64)
        tokens[:, : first.shape[1]] = first
        known = torch.zeros(requests, width, *states.shape[2:])
        known[:, : states.shape[1]] = states
        cache = self.target.new_cache(requests, width)
        self.read(first[:, :-1], cache, torch.zeros(requests, dtype=torch.int64))
        row = torch.arange(requests)
        at = torch.full((requests,), self.start)
        before: Tensor | None = None
        kept: list[tuple[Tensor, ...]] = []
        for step in range(steps):
            laws: list[Tensor] = []

            def choose(k: int, p_draft: Tensor, laws: list[Tensor] = laws) -> Tensor:
                laws.append(p_draft)
                return pick(p_draft, torch.from_numpy(random.random(requests)))

            context = self.drafter.prepare(known[:, :-1], tokens)
            block = self.drafter.draft(context, tokens[row, at], at, self.vocabulary, self.temperature, choose)
            confidence = torch.sigmoid(block.confidence_logit)
            length = policy(step, confidence, before)
            states, p_target = self.read(torch.cat([tokens[row, at][:, None], block.tokens], dim=1), cache, at)
            p_draft = torch.stack(laws, dim=1)
            u = torch.from_numpy(random.random((requests, self.gamma)))
            of_draft = p_draft.gather(2, block.local[..., None]).squeeze(2)
            of_target = p_target[:, :-1].gather(2, block.tokens[..., None]).squeeze(2)
            follows = ~rejected(of_draft, of_target, u) & (torch.arange(self.gamma) < length[:, None])
            accepted = follows.long().cumprod(dim=1).sum(dim=1)
            wide = torch.zeros_like(p_target[:, 0])
            wide[:, self.vocabulary.tokens] = p_draft[row, accepted.clamp(max=self.gamma - 1)]
            law = p_target[row, accepted]
            law = torch.where((accepted < length)[:, None], residual(law, wide), law)
            extra = pick(law, torch.from_numpy(random.random(requests)))
            place = at[:, None] + torch.arange(self.gamma + 1)
            known[row[:, None], place] = states
            tokens[row[:, None], place[:, 1:]] = block.tokens
            kept.append((confidence, length, accepted + 1, at - len(self.prompt)))
            at = at + accepted + 1
            tokens[row, at] = extra
            before = confidence
        confidence, length, gained, position = (torch.stack(part, dim=1) for part in zip(*kept, strict=True))
        return Steps(confidence, length, gained, tokens, position)


@pytest.fixture(scope="session")
def speculation() -> type[Speculation]:
    """The class `Speculation`."""
    return Speculation


@pytest.fixture(scope="session")
def corpus_folder(corpora: tuple[Corpus, Corpus]) -> Path:
    """Folder of the text to train on."""
    return corpora[0].folder
