"""Recording: every number against a recomputation token by token, and tau against live speculative decoding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dsim.drafter.build import Drafter
from dsim.drafter.corpus import Corpus, generate_corpus
from dsim.drafter.drafter import FINAL
from dsim.drafter.prompts import Prompt
from dsim.drafter.record import (
    Rows,
    _chunks,
    _grow,
    _visible,
    joined,
    read_part,
    record_part,
    record_text,
    recordable,
)
from dsim.drafter.target import LlamaTarget
from dsim.drafter.tiny import tiny_target
from dsim.drafter.vocabulary import vocabulary_of
from dsim.errors import InputError

HEAT = 0.9
PROMPT = 3


def text_of(target: LlamaTarget, length: int, seed: int) -> npt.NDArray[np.int64]:
    """A prompt of three tokens (one of them outside the drafters' vocabulary) and an answer at temperature 0.9."""
    rng = np.random.default_rng(seed)
    tokens = [1, 11, 4]
    while len(tokens) < PROMPT + length:
        tokens.append(int(rng.choice(12, p=law(target, tokens))))
    return np.array(tokens)


def law(target: LlamaTarget, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """The target's law of the next token: one plain pass over the whole text."""
    cache = target.new_cache(1, len(tokens))
    _, hidden = target.extend(torch.tensor([list(tokens)]), cache, torch.zeros(1, dtype=torch.int64))
    p = torch.softmax(target.logits(hidden[0, -1]).double() / HEAT, dim=-1).numpy()
    return p / p.sum()


@pytest.fixture(scope="module")
def text(tiny: LlamaTarget) -> npt.NDArray[np.int64]:
    return text_of(tiny, 11, 0)


def recorded(
    target: LlamaTarget, drafters: Sequence[Drafter], tokens: npt.NDArray[np.int64], seed: int = 5, **options: Any
) -> list[Rows]:
    random = np.random.default_rng(seed)
    return record_text(target, drafters, tokens, PROMPT, temperature=HEAT, random=random, **options)


def same(one: Rows, two: Rows) -> bool:
    names = ("confidence_logit", "alpha", "accepted", "lengths")
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in names)


def close(one: Rows, two: Rows) -> None:
    """The same blocks; numbers that went through other matrix shapes may differ in the last bits."""
    np.testing.assert_array_equal(one.accepted, two.accepted)
    np.testing.assert_array_equal(one.lengths, two.lengths)
    np.testing.assert_allclose(one.confidence_logit, two.confidence_logit, atol=1e-4)
    np.testing.assert_allclose(one.alpha, two.alpha, atol=1e-5)


# -- block by block ---------------------------------------------------------------------------------------


class Brute:
    """Blocks as docs/drafter.md says them, in plain Python with a whole pass of the target for every token."""

    def __init__(self, target: LlamaTarget, drafter: Drafter, tokens: npt.NDArray[np.int64]) -> None:
        self.target, self.drafter, self.tokens = target, drafter, tokens
        taps = tuple(range(target.num_layers + 1))
        whole = torch.from_numpy(tokens)[None]
        features, hidden = target.extend(
            whole, target.new_cache(1, len(tokens)), torch.zeros(1, dtype=torch.int64), taps
        )
        columns = [len(taps) if tap == FINAL else tap for tap in drafter.config.taps]
        self.states = torch.cat([features, hidden[:, :, None]], dim=2)[:, :, columns]
        static = drafter.vocabulary_head.tokens
        self.vocabulary = vocabulary_of(static, target.vocab_size, torch.from_numpy(tokens[:PROMPT]))

    def draft_law(self, anchor: int, drafted: list[int]) -> tuple[npt.NDArray[np.float64], float]:
        """p_d over all target tokens after some drafts, and the confidence logit said before the next one is drawn."""
        known = [*drafted, *[0] * (self.drafter.config.gamma - len(drafted))]
        context = self.drafter.prepare(self.states[:, :-1], torch.from_numpy(self.tokens)[None])
        with torch.no_grad():
            logits, confidence = self.drafter.teacher(
                context,
                torch.tensor([int(self.tokens[anchor])]),
                torch.tensor([anchor]),
                torch.tensor([known]),
                self.vocabulary,
            )
        p = np.zeros(self.target.vocab_size)
        p[self.vocabulary.tokens.numpy()] = torch.softmax(logits[0, len(drafted)].double() / HEAT, dim=-1).numpy()
        return p, float(confidence[0, len(drafted)])

    def block(self, anchor: int, u: npt.NDArray[np.float64]) -> tuple[list[int], list[float], list[float], int]:
        """Drafts, alphas, confidence logits and accepted length of one anchor; u [gamma, 2]."""
        drafted: list[int] = []
        alphas, logits, accepted, alive = [], [], 0, True
        for k in range(self.drafter.config.gamma):
            p_d, logit = self.draft_law(anchor, drafted)
            p_t = law(self.target, [*self.tokens[: anchor + 1], *drafted])
            v = int(self.tokens[anchor + k + 1])
            alphas.append(float(np.minimum(p_d, p_t).sum()))
            logits.append(logit)
            if alive and u[k, 0] < min(1.0, p_d[v] / p_t[v]):
                drafted.append(v)
                accepted += 1
                continue
            left = np.maximum(0, p_d - p_t) if alive else p_d
            alive = False
            # Inverse transform over the drafter's own order of tokens.
            order = self.vocabulary.tokens.numpy()
            cumulative = np.cumsum(left[order])
            drafted.append(int(order[np.searchsorted(cumulative, u[k, 1] * cumulative[-1], side="right")]))
        return drafted, alphas, logits, accepted


@pytest.mark.parametrize("sort", ["markov", "gated", "rnn", "dflash", "eagle3", "mtp"])
def test_every_block_is_what_a_recomputation_gives(
    sort: str, tiny: LlamaTarget, make_noisy: Any, text: npt.NDArray[np.int64]
) -> None:
    drafter = make_noisy(sort, gamma=3, seed=3)
    rows = recorded(tiny, [drafter], text)[0]
    random = np.random.default_rng(5)
    u = np.stack([random.random((1, 11, 2)) for _ in range(3)], axis=2)[0]
    brute = Brute(tiny, drafter, text)
    for row in range(11 - 3):
        _, alphas, logits, accepted = brute.block(PROMPT + row, u[row])
        assert rows.accepted[row] == accepted
        np.testing.assert_allclose(rows.alpha[row], alphas, atol=2e-5)
        np.testing.assert_allclose(rows.confidence_logit[row], logits, atol=2e-4)


def test_all_cases_are_among_them(trained: Drafter, tiny: LlamaTarget) -> None:
    # Trained, so that blocks are rejected at every place, and accepted whole.
    counts = np.zeros(5, dtype=np.int64)
    for seed in range(2):
        text = text_of(tiny, 14, seed)
        rows = recorded(tiny, [trained], text)[0]
        random = np.random.default_rng(5)
        u = np.stack([random.random((1, 14, 2)) for _ in range(4)], axis=2)[0]
        brute = Brute(tiny, trained, text)
        for row in range(14 - 4):
            _, alphas, logits, accepted = brute.block(PROMPT + row, u[row])
            assert rows.accepted[row] == accepted
            np.testing.assert_allclose(rows.alpha[row], alphas, atol=2e-5)
            np.testing.assert_allclose(rows.confidence_logit[row], logits, atol=2e-4)
            counts[accepted] += 1
    assert (counts > 0).all()


def test_rows_and_their_last_ones(tiny: LlamaTarget, trained: Drafter, text: npt.NDArray[np.int64]) -> None:
    rows = recorded(tiny, [trained], text)[0]
    assert rows.lengths.tolist() == [11]
    assert (rows.alpha.shape, rows.alpha.dtype) == ((11, 4), np.float32)
    assert (rows.confidence_logit.shape, rows.confidence_logit.dtype) == ((11, 4), np.float32)
    assert (rows.accepted.shape, rows.accepted.dtype) == ((11,), np.uint8)
    # The last block lies whole in the text; the gamma rows after it hold nothing.
    assert (rows.alpha[:7] > 0).all()
    assert (rows.alpha <= 1).all()
    assert rows.confidence_logit[:7].all()
    for part in (rows.alpha[7:], rows.confidence_logit[7:], rows.accepted[7:]):
        assert not part.any()


def test_a_drafter_of_shorter_blocks_has_more_rows(
    tiny: LlamaTarget, make_noisy: Any, text: npt.NDArray[np.int64]
) -> None:
    # Replay leaves out gamma + 1 rows of the bank's own gamma, so the others must hold something.
    drafters = [make_noisy("markov", gamma=5), make_noisy("mtp", gamma=2)]
    long, short = recorded(tiny, drafters, text)
    assert (long.alpha[:6] > 0).all()
    assert not long.alpha[6:].any()
    assert (short.alpha[:9] > 0).all()
    assert not short.alpha[9:].any()


# -- what it depends on -----------------------------------------------------------------------------------


def test_twice_the_same(tiny: LlamaTarget, trained: Drafter, text: npt.NDArray[np.int64]) -> None:
    one, two, *others = (recorded(tiny, [trained], text, seed)[0] for seed in (5, 5, *range(6, 14)))
    assert same(one, two)
    # Of drafts this likely, a seed or two may well agree.
    assert not all(same(one, other) for other in others)
    # What was said before anything was drawn is the same.
    for other in others:
        np.testing.assert_array_equal(one.alpha[:, 0], other.alpha[:, 0])
        np.testing.assert_array_equal(one.confidence_logit[:, 0], other.confidence_logit[:, 0])


def test_a_drafter_alone_or_among_others(
    tiny: LlamaTarget, trained: Drafter, make_noisy: Any, text: npt.NDArray[np.int64]
) -> None:
    others = [make_noisy("rnn", gamma=5), make_noisy("mtp", gamma=2), make_noisy("eagle3")]
    together = recorded(tiny, [others[0], trained, *others[1:]], text)
    for drafter, rows in zip([others[0], trained, *others[1:]], together, strict=True):
        close(recorded(tiny, [drafter], text)[0], rows)


@pytest.mark.parametrize("at_once", [1, 5, 40])
def test_how_many_tokens_the_target_scores_at_once(
    at_once: int, tiny: LlamaTarget, trained: Drafter, make_noisy: Any, text: npt.NDArray[np.int64]
) -> None:
    drafters = [trained, make_noisy("mtp", gamma=2)]
    for one, two in zip(
        recorded(tiny, drafters, text), recorded(tiny, drafters, text, nodes_at_once=at_once), strict=True
    ):
        close(one, two)


def test_several_draws(tiny: LlamaTarget, trained: Drafter, make_noisy: Any, text: npt.NDArray[np.int64]) -> None:
    drafters = [trained, make_noisy("dflash")]
    for rows in recorded(tiny, drafters, text, draws=3):
        assert rows.lengths.tolist() == [11, 11, 11]
        parts = [slice(11 * draw, 11 * draw + 11) for draw in range(3)]
        assert len({rows.accepted[part].tobytes() for part in parts}) == 3
        for part in parts[1:]:
            np.testing.assert_array_equal(rows.alpha[part, 0], rows.alpha[parts[0], 0])
        assert not rows.alpha[7:11].any()
        assert not rows.alpha[-4:].any()


def test_blocks_of_one_token(tiny: LlamaTarget, make_noisy: Any, text: npt.NDArray[np.int64]) -> None:
    drafter = make_noisy("mtp", gamma=1)
    rows = recorded(tiny, [drafter], text)[0]
    assert rows.alpha.shape == (11, 1)
    assert set(rows.accepted.tolist()) <= {0, 1}
    brute = Brute(tiny, drafter, text)
    u = np.random.default_rng(5).random((1, 11, 2))[0]
    for row in range(10):
        _, alphas, _, accepted = brute.block(PROMPT + row, u[row, None])
        assert rows.accepted[row] == accepted
        np.testing.assert_allclose(rows.alpha[row], alphas, atol=2e-5)


@pytest.mark.parametrize("length", [3, 5])
def test_answers_too_short_for_replay(length: int, tiny: LlamaTarget, trained: Drafter) -> None:
    with pytest.raises(InputError, match=f"the answer is too short, got {length}, expected more than 5 tokens"):
        recorded(tiny, [trained], text_of(tiny, length, 0))
    assert recorded(tiny, [trained], text_of(tiny, 6, 0))[0].lengths.tolist() == [6]


# -- trees of tokens --------------------------------------------------------------------------------------


def test_paths_that_share_their_beginning_share_nodes() -> None:
    one = (np.array([5, 5, 6]), np.array([[7, 8, 9], [7, 8, 4], [7, 8, -1]]))
    two = (np.array([5, 6, 6]), np.array([[7, 1], [-1, -1], [7, 8]]))
    tree, (first, second) = _grow([one, two], 10)
    # At 5: 7 - 8 - 9, 7 - 8 - 4, 7 - 1. At 6: 7 - 8.
    assert tree.token.size == 7
    assert first[0, 0] == first[1, 0] == second[0, 0]
    assert first[0, 1] == first[1, 1]
    assert first[0, 2] != first[1, 2]
    assert first[2, 0] == second[2, 0] != first[0, 0]
    assert first[2, 1] == second[2, 1] != first[0, 1]
    assert second[0, 1] not in first
    assert first[2, 2] == -1
    assert second[1].tolist() == [-1, -1]
    for leave, tokens, nodes in ((*one, first), (*two, second)):
        for row in range(3):
            for depth in range(tokens.shape[1]):
                node = nodes[row, depth]
                if tokens[row, depth] < 0:
                    assert node == -1
                    continue
                assert tree.token[node] == tokens[row, depth]
                assert tree.root[node] == leave[row]
                assert tree.depth[node] == depth
                assert tree.parent[node] == (nodes[row, depth - 1] if depth else -1)
                assert tree.parent[node] < node


def test_no_paths_no_nodes() -> None:
    tree, nodes = _grow([(np.array([3, 4]), np.full((2, 3), -1)), (np.array([3]), np.empty((1, 0), dtype=int))], 10)
    assert tree.token.size == 0
    assert [own.shape for own in nodes] == [(2, 3), (1, 0)]
    assert not list(_chunks(tree, 5))


@pytest.mark.parametrize("most", [1, 4, 9, 1000])
def test_chunks_keep_the_nodes_of_a_root_together(most: int) -> None:
    rng = np.random.default_rng(most)
    tree, _ = _grow(
        [(rng.integers(0, 9, 40), rng.integers(0, 3, (40, 4))), (np.arange(20), rng.integers(0, 3, (20, 3)))], 3
    )
    chunks = list(_chunks(tree, most))
    assert sorted(np.concatenate(chunks).tolist()) == list(range(tree.token.size))
    for chunk in chunks:
        inside = set(chunk.tolist())
        assert chunk.tolist() == sorted(inside)
        assert all(tree.parent[node] in inside for node in inside if tree.parent[node] >= 0)
        # More than `most` only where one root has more.
        assert len(chunk) <= most or len(set(tree.root[chunk].tolist())) == 1
    roots = [set(tree.root[chunk].tolist()) for chunk in chunks]
    assert sum(len(part) for part in roots) == len(set.union(*roots))


def test_a_node_sees_its_ancestors_and_itself() -> None:
    seen = _visible(np.array([-1, 0, -1, 1, 0, 2]))
    expected = [{0}, {0, 1}, {2}, {0, 1, 3}, {0, 4}, {2, 5}]
    assert [set(np.flatnonzero(row).tolist()) for row in seen] == expected


# -- the law ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tiny: LlamaTarget, trained: Drafter, speculation: Any) -> tuple[Rows, npt.NDArray[np.int64]]:
    """70 texts of 24 tokens after one prompt, end tokens among them, recorded."""
    machine = speculation(tiny, trained, [1, 11, 4], HEAT)
    texts, _, _ = machine.plain(70, 24, np.random.default_rng(8))
    parts = [recorded(tiny, [trained], row, seed)[0] for seed, row in enumerate(texts.numpy())]
    return joined(parts), texts.numpy()


def test_drafts_are_accepted_as_often_as_alpha_says(many: tuple[Rows, npt.NDArray[np.int64]]) -> None:
    # Blocks of one text overlap, but each draft's outcome is drawn for itself: the differences are uncorrelated.
    rows, _ = many
    alpha, accepted = rows.alpha.reshape(70, 24, 4)[:, :20], rows.accepted.reshape(70, 24)[:, :20]
    for k in range(4):
        reached = accepted >= k
        excess = ((accepted > k) - alpha[..., k])[reached]
        sigma = np.sqrt((alpha[..., k] * (1 - alpha[..., k]))[reached].sum())
        assert reached.sum() > 200
        assert abs(excess.sum()) < 4 * sigma


def test_tau_is_that_of_live_decoding(
    many: tuple[Rows, npt.NDArray[np.int64]], tiny: LlamaTarget, trained: Drafter, speculation: Any
) -> None:
    usable = 24 - 5
    rows, _ = many
    gained = rows.accepted.reshape(70, 24).astype(np.int64) + 1
    tokens, steps = np.zeros(70), np.zeros(70)
    position = np.zeros(70, dtype=np.int64)
    while (active := position < usable).any():
        now = gained[np.arange(70), np.minimum(position, usable - 1)] * active
        tokens, steps, position = tokens + now, steps + active, position + now
    machine = speculation(tiny, trained, [1, 11, 4], HEAT)
    live = machine.live(400, usable, lambda step, c, before: torch.full((len(c),), 4), np.random.default_rng(9))
    inside = (live.position < usable).numpy()
    live_tokens, live_steps = (live.gained.numpy() * inside).sum(axis=1), inside.sum(axis=1)

    def ratio(top: npt.NDArray[Any], bottom: npt.NDArray[Any]) -> tuple[float, float]:
        """Mean tokens a step, and the variance of it over independent texts (delta method)."""
        tau = float(top.sum() / bottom.sum())
        return tau, float((top - tau * bottom).var(ddof=1) / len(top) / bottom.mean() ** 2)

    (here, one), (there, two) = ratio(tokens, steps), ratio(live_tokens, live_steps)
    print(f"tau: recorded {here:.3f}, live {there:.3f}, sigma {np.sqrt(one + two):.3f}")
    assert abs(here - there) < 3 * np.sqrt(one + two)
    assert 2 < there < 4.5


# -- parts ------------------------------------------------------------------------------------------------


def test_which_sequences_can_be_recorded(corpora: tuple[Corpus, Corpus]) -> None:
    corpus = corpora[0]
    lengths = [corpus[i].tokens.size - corpus[i].prompt for i in range(len(corpus))]
    assert recordable(corpus, 4) == [i for i, length in enumerate(lengths) if length > 5]
    assert recordable(corpus, 39) == []
    assert min(lengths) < 6


def test_parts_in_any_order_are_the_whole(
    tiny: LlamaTarget, trained: Drafter, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    corpus, indices = corpora[1], recordable(corpora[1], 4)[:4]
    drafters = {"a": trained}
    record_part(tiny, drafters, corpus, indices, tmp_path / "whole.npz", seed=3)
    for number, chunk in ((1, indices[2:]), (0, indices[:2])):
        record_part(tiny, drafters, corpus, chunk, tmp_path / f"{number}.npz", seed=3)
    found, whole = read_part(tmp_path / "whole.npz", "a")
    parts = [read_part(tmp_path / f"{number}.npz", "a") for number in range(2)]
    assert found.tolist() == indices == [*parts[0][0], *parts[1][0]]
    assert same(whole, joined([rows for _, rows in parts]))
    assert whole.lengths.tolist() == [corpus[i].tokens.size - corpus[i].prompt for i in indices]
    # The random numbers belong to the sequence and the seed.
    random = np.random.Generator(np.random.Philox(key=[3, corpus[indices[1]].index]))
    sequence = corpus[indices[1]]
    alone = record_text(tiny, [trained], sequence.tokens, sequence.prompt, temperature=HEAT, random=random)[0]
    first = int(whole.lengths[0])
    np.testing.assert_array_equal(whole.alpha[first : first + int(whole.lengths[1])], alone.alpha)


def test_a_part_that_is_there_stays(
    tiny: LlamaTarget, trained: Drafter, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    file, indices = tmp_path / "parts" / "p.npz", recordable(corpora[1], 4)[:2]
    record_part(tiny, {"a": trained}, corpora[1], indices, file)
    content, stamp = file.read_bytes(), os.stat(file).st_mtime_ns
    record_part(tiny, {"a": trained}, corpora[1], indices, file)
    assert os.stat(file).st_mtime_ns == stamp
    file.unlink()
    record_part(tiny, {"a": trained}, corpora[1], indices, file)
    assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]


def test_a_broken_recording_leaves_no_part(
    tiny: LlamaTarget, trained: Drafter, corpora: tuple[Corpus, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(stream: Any, **arrays: Any) -> None:
        stream.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        record_part(tiny, {"a": trained}, corpora[1], recordable(corpora[1], 4)[:1], tmp_path / "p.npz")
    assert not list(tmp_path.iterdir())


def test_text_and_drafters_of_other_targets(
    tiny: LlamaTarget, trained: Drafter, make_fresh: Any, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    other = tiny_target(seed=7, vocab_size=12, num_layers=3, sharpness=3.0)
    file = tmp_path / "p.npz"
    with pytest.raises(InputError, match=r"mine, field 'fingerprint': was made for tiny-7 .*, not for tiny-1"):
        record_part(tiny, {"mine": make_fresh("markov", target=other)}, corpora[1], [1], file)
    generate_corpus(
        other, [Prompt("chat", "x", "x")], tmp_path / "c", split="t", taps=(), temperature=HEAT, progress=False
    )
    corpus = Corpus(tmp_path / "c")
    with pytest.raises(InputError, match=r"c, field 'fingerprint': was generated by tiny-7 .*, not by tiny-1"):
        record_part(tiny, {"mine": trained}, corpus, [0], file)
    assert not file.exists()


def test_bad_part_files(tiny: LlamaTarget, trained: Drafter, corpora: tuple[Corpus, Corpus], tmp_path: Path) -> None:
    file = tmp_path / "p.npz"
    record_part(tiny, {"a": trained}, corpora[1], recordable(corpora[1], 4)[:1], file)
    with pytest.raises(InputError, match=f"{file}: is no recording of 'b'"):
        read_part(file, "b")
    raw = file.read_bytes()
    middle = len(raw) // 3
    for content in (
        b"",
        raw[:-30],
        raw[:100],
        b"PK" + raw[2:50],
        raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :],
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=f"{file}: is no recording of 'a'"):
            read_part(file, "a")
    with pytest.raises(InputError, match="is no recording of 'a'"):
        read_part(tmp_path / "absent.npz", "a")


def test_a_bfloat16_target(make_fresh: Any, text: npt.NDArray[np.int64]) -> None:
    low = tiny_target(seed=1, vocab_size=12, num_layers=3, sharpness=3.0)
    low.model.to(torch.bfloat16)
    low.model.head = low.model.embedding
    drafters = [make_fresh(sort, target=low).eval() for sort in ("markov", "eagle3")]
    for rows in recorded(low, drafters, text):
        assert np.isfinite(rows.alpha).all()
        assert rows.alpha[:7].all()


def test_rows_join() -> None:
    part = Rows(np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32), np.ones(2, np.uint8), np.array([2]))
    both = joined([part, replace(part, lengths=np.array([1, 1]))])
    assert both.lengths.tolist() == [2, 1, 1]
    assert both.alpha.shape == (4, 3)
