"""SmolLM2 itself, where its file is in the cache: it answers, and its text is likely under its own logits."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch

from dsim.drafter import smollm2
from dsim.drafter.build import read_drafter
from dsim.drafter.corpus import Corpus, generate_corpus
from dsim.drafter.live import LiveDrafts
from dsim.drafter.prompts import Prompt, generate_prompts
from dsim.drafter.target import LlamaTarget
from dsim.drafts import load_bank, read_bank
from experiments import record_banks, train_drafter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not smollm2.model_path().is_file(), reason="needs `make target-model`"),
]


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    return smollm2.load()


def test_sizes(target: LlamaTarget) -> None:
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (49152, 576, 30)
    assert target.eos == {2}
    assert target.head is target.embedding


def test_a_greedy_answer(target: LlamaTarget) -> None:
    tokens = target.tokenizer.chat("What is 2+2? Answer with the number only.")
    cache = target.new_cache(1, len(tokens) + 24)
    start = torch.zeros(1, dtype=torch.int64)
    _, hidden = target.extend(torch.tensor([tokens]), cache, start)
    answer: list[int] = []
    while len(answer) < 24:
        answer.append(int(target.logits(hidden[0, -1]).argmax()))
        if answer[-1] in target.eos:
            break
        start[:] = len(tokens) + len(answer) - 1
        _, hidden = target.extend(torch.tensor([answer[-1:]]), cache, start)
    assert answer[-1] in target.eos
    assert "4" in target.tokenizer.decode(answer)


def test_its_own_text_is_likely(target: LlamaTarget, tmp_path: Path) -> None:
    prompts = [Prompt("chat", text, "x") for text in ("Why is the sky blue?", "Write a Python function that adds.")]
    generate_corpus(
        target,
        prompts,
        tmp_path,
        split="train",
        taps=(2, 11, 20, 29),
        temperature=0.6,
        max_new_tokens=48,
        rows=2,
        progress=False,
    )
    corpus = Corpus(tmp_path)
    for i in range(len(corpus)):
        found = corpus[i]
        # Some channels are large: they have to fit into the float16 of the file.
        assert np.isfinite(found.features).all()
        hidden = torch.from_numpy(found.features[found.prompt - 1 : -1, -1].astype(np.float32))
        logits = target.logits(hidden)
        answer = torch.from_numpy(found.tokens[found.prompt :])
        assert torch.nn.functional.cross_entropy(logits, answer) < 1.5
        log_z = torch.logsumexp(logits / 0.6, dim=-1)
        np.testing.assert_allclose(found.log_z[found.prompt - 1 : -1], log_z, atol=0.05)


def test_from_prompts_to_a_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, training, recording and replay, each of them for seconds."""
    model = smollm2.model_path()
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models").mkdir(parents=True)
    smollm2.model_path().symlink_to(model)
    text = ("train=6", "vocabulary=3", "calibration=3", "shard=3", "rows=6", "max_new_tokens=24")
    settings = [f"text.{item}" for item in text]
    settings += ["drafter.vocabulary=1024", "drafter.rank=8", "drafter.layers=1", "training.anchors=400"]
    command = ["--recipe", "quick", "--jobs", "1", "--out", str(tmp_path / "drafter")]
    train_drafter.main([*command, *(part for item in settings for part in ("--set", item))])
    curve = pd.read_csv(tmp_path / "drafter" / "learning_curve.csv")
    assert curve["tv"].iloc[-1] < curve["tv"].iloc[0]
    record_banks.main(
        [
            *("--drafter", f"quick={tmp_path / 'drafter' / 'drafter.safetensors'}", "--prompts", "3"),
            *("--calibration", "3", "--shard", "3", "--max-new-tokens", "24", "--jobs", "1"),
            *("--out", str(tmp_path / "banks")),
        ]
    )
    bank = read_bank(tmp_path / "banks" / "quick.npz")
    assert bank.header.target == smollm2.NAME
    assert bank.header.domains == ("math", "code", "chat")
    assert np.all(bank.alpha[:, 0] <= 1)
    # The accepted count is one draw of what alpha says; both are small here, and agree within chance.
    used = np.concatenate([np.arange(a, b - 8) for a, b in zip(bank.bounds[:-1], bank.bounds[1:], strict=True)])
    alpha, accepted = bank.alpha[used, 0], bank.accepted[used] >= 1
    assert abs(alpha.mean() - accepted.mean()) < 4 * np.sqrt((alpha * (1 - alpha)).sum() + 1) / len(used)


def ratio(top: npt.NDArray[np.int64], bottom: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Tokens a step over independent texts, and the variance of that (delta method)."""
    tau = float(top.sum() / bottom.sum())
    return tau, float((top - tau * bottom).var(ddof=1) / len(top) / bottom.mean() ** 2)


def test_the_shipped_bank_replays_what_the_shipped_drafter_does_live(target: LlamaTarget) -> None:
    """tau of full verification: speculative decoding of new answers to the bank's prompts against the replay."""
    texts = int(os.environ.get("DSIM_TEST_LIVE_TEXTS", "48"))
    bank = load_bank("smollm2-dspark")
    gamma = bank.header.gamma
    recorded = np.zeros((2, bank.domain.size), dtype=np.int64)
    for text, (first, usable) in enumerate(zip(bank.bounds[:-1], bank.usable(), strict=True)):
        position = 0
        while position < usable:
            gained = int(bank.accepted[first + position]) + 1
            recorded[:, text] += gained, 1
            position += gained

    file = resources.files("dsim") / "data" / "drafters" / "smollm2-dspark.safetensors"
    drafter, about = read_drafter(Path(str(file)), target)
    prompts = generate_prompts(json.loads(bank.header.notes)["prompts_asked"], seed=0, split="evaluation")
    source = LiveDrafts(target, drafter, prompts, seed=5, temperatures=about.temperatures, max_rows=texts)
    for request in range(texts):
        source.open(request, request % len(source.domains), 2 * source.max_tokens)
    steps: list[list[tuple[int, int]]] = [[] for _ in range(texts)]
    positions = np.zeros(texts, dtype=np.int64)
    lengths = np.zeros(texts, dtype=np.int64)  # 0: not ended yet
    while (active := np.flatnonzero(lengths == 0)).size:
        _, accepted = source.draft(active, positions[active])
        source.observe(active, positions[active], np.full(active.size, gamma), accepted)
        for request, gained in zip(active.tolist(), (accepted + 1).tolist(), strict=True):
            steps[request].append((int(positions[request]), gained))
            positions[request] += gained
            answer = source.text(request)
            ends = np.flatnonzero(np.isin(answer, sorted(target.eos)))
            if ends.size or answer.size >= source.max_tokens:
                lengths[request] = min(ends[0] + 1 if ends.size else source.max_tokens, source.max_tokens)
    live = np.zeros((2, texts), dtype=np.int64)
    for request, length in enumerate(lengths.tolist()):
        inside = [gained for position, gained in steps[request] if position < length - (gamma + 1)]
        live[:, request] = sum(inside), len(inside)

    live = live[:, live[1] > 0]  # the bank leaves out answers too short for a block, too
    (replayed, one), (tau, two) = ratio(*recorded), ratio(*live)
    sigma = np.sqrt(one + two)
    print(f"tau: replayed {replayed:.3f}, live {tau:.3f} ({live.shape[1]} texts), sigma {sigma:.3f}")
    assert abs(replayed - tau) < 3 * sigma
    assert sigma < 0.1
