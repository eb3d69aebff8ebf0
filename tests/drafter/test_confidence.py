"""The confidence head fitted on text that was not trained on: what it is fitted to, and what that does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dsim.drafter.build import Drafter, drafter_hash
from dsim.drafter.confidence import fit_confidence, fit_head, survivors
from dsim.drafter.corpus import Corpus, Trajectory
from dsim.drafter.record import record_text, recordable
from dsim.drafter.target import LlamaTarget
from dsim.errors import InputError
from dsim.sigmoid import expit

SORTS = ["markov", "rnn", "dflash", "eagle3", "mtp"]


def head(drafter: Drafter) -> np.ndarray:
    linear = drafter.confidence.linear
    return torch.cat([linear.weight.detach().flatten(), linear.bias.detach()]).double().numpy()


class Some:
    """The sequences of a corpus that can be recorded, as a corpus."""

    def __init__(self, corpus: Corpus, gamma: int) -> None:
        self.header, self.folder = corpus.header, corpus.folder
        self.chosen = [corpus[i] for i in recordable(corpus, gamma)[:3]]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Trajectory:
        return self.chosen[index]


class Given:
    """Uniforms as the recorder asks for them: those of all anchors, one place of the block after the other."""

    def __init__(self, uniforms: np.ndarray) -> None:
        self.places = iter(uniforms.swapaxes(0, 1))

    def random(self, shape: tuple[int, ...]) -> np.ndarray:
        out, here = np.zeros(shape), next(self.places)
        out[0, : len(here)] = here
        return out


@pytest.mark.parametrize("sort", SORTS)
def test_survivors_are_what_a_recording_says(
    sort: str, tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_noisy: Any
) -> None:
    """The drafts that the recorder draws with these uniforms, their alphas and confidences, rejected ones left out."""
    drafter = make_noisy(sort)
    gamma, w = drafter.config.gamma, head(drafter)
    corpus = Some(corpora[1], gamma)
    inputs, alpha = survivors(drafter, tiny, corpus, sequences=9, seed=5, progress=False)  # type: ignore[arg-type]
    seen = 0
    for sequence in corpus.chosen:
        random = np.random.Generator(np.random.Philox(key=[5, sequence.index]))
        anchors = sequence.tokens.size - sequence.prompt - gamma
        rows = record_text(
            tiny,
            [drafter],
            sequence.tokens,
            sequence.prompt,
            temperature=drafter.config.temperature,
            random=Given(random.random((anchors, gamma, 2))),  # type: ignore[arg-type]
        )[0]
        followed = rows.accepted[:anchors, None] >= np.arange(gamma)
        expected = rows.alpha[:anchors][followed]
        here = slice(seen, seen + expected.size)
        # The corpus holds its hidden states in float16.
        np.testing.assert_allclose(alpha[here], expected, atol=5e-3)
        logits = inputs[here] @ w[:-1] + w[-1]
        np.testing.assert_allclose(logits, rows.confidence_logit[:anchors][followed], atol=5e-2)
        seen += expected.size
    assert seen == alpha.size == len(inputs)


def test_the_head_finds_the_law_that_made_the_labels() -> None:
    random = np.random.default_rng(1)
    truth = np.array([1.5, -0.7, 0.0, 0.4])
    inputs = random.normal(size=(20_000, 3)).astype(np.float32)
    alpha = expit(inputs @ truth[:-1] + truth[-1]).astype(np.float32)
    found, before, after = fit_head(inputs, alpha, np.zeros(4), ridge=0.0)
    np.testing.assert_allclose(found, truth, atol=1e-3)
    entropy = -np.mean(alpha * np.log(alpha) + (1 - alpha) * np.log(1 - alpha))
    assert before == pytest.approx(np.log(2))
    assert after == pytest.approx(entropy, abs=1e-5)


def test_what_the_inputs_do_not_tell_stays_as_it_was() -> None:
    """The bias is free; a weight whose input never differs from 0 keeps its value."""
    inputs = np.zeros((100, 1), dtype=np.float32)
    found, _, _ = fit_head(inputs, np.full(100, 0.2, dtype=np.float32), np.array([3.0, 1.0]))
    assert found[0] == 3.0
    assert expit(found[1]) == pytest.approx(0.2, abs=1e-4)


@pytest.mark.parametrize("sort", SORTS)
def test_fitting_mends_the_level_and_touches_nothing_else(
    sort: str, tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_noisy: Any
) -> None:
    drafter = make_noisy(sort)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    note = fit_confidence(drafter, tiny, corpora[1], sequences=100, progress=False)
    changed = {name for name, value in drafter.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"confidence.linear.weight", "confidence.linear.bias"}
    assert note["nats_after"] < note["nats_before"]
    assert note["sequences"] == len(corpora[1])
    inputs, alpha = survivors(drafter, tiny, corpora[1], sequences=100, progress=False)
    w = head(drafter)
    assert expit(inputs @ w[:-1] + w[-1]).mean() == pytest.approx(alpha.mean(), abs=1e-3)
    assert note["acceptance"] == pytest.approx(float(alpha.mean()), abs=1e-5)
    assert note["drafts"] == alpha.size


def test_the_same_seed_gives_the_same_head(tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_noisy: Any) -> None:
    heads = []
    for seed in (0, 0, 1):
        drafter = make_noisy("markov")
        fit_confidence(drafter, tiny, corpora[1], sequences=4, seed=seed, progress=False)
        heads.append(drafter_hash(drafter))
    assert heads[0] == heads[1] != heads[2]


def test_texts_that_are_too_short(tiny: LlamaTarget, corpora: tuple[Corpus, Corpus], make_noisy: Any) -> None:
    with pytest.raises(InputError, match="field 'gamma': no answer is longer than a block"):
        survivors(make_noisy("markov", gamma=60), tiny, corpora[1], sequences=5, progress=False)
