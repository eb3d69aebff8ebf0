"""Recording draft banks: what a drafter drafts at every position of texts that the target generated.

The text was drawn from the target; the draft at a position is drawn *jointly* with it (`dsim.drafter.sampling.couple`),
so that the recorded accepted length is that of speculative decoding whose outcome is this text. After the first
rejection the block goes on as the drafter would, and the target scores the rest of it too: alpha_k of every drafted
token is exact, given the drafted block before it.

Several drafters are recorded at once on the same texts and with the same uniforms. What costs most is the target's
pass over the tokens after a rejection; blocks that share such a token path, whatever their anchor or drafter, share
the pass.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsim.drafter.build import Drafter, check_target
from dsim.drafter.corpus import Corpus
from dsim.drafter.drafter import FINAL, Block
from dsim.drafter.sampling import CoupledDraws
from dsim.drafter.target import Target
from dsim.drafter.vocabulary import Vocabulary, vocabulary_of
from dsim.errors import InputError


@dataclass(frozen=True)
class Rows:
    """What was recorded of one drafter on some trajectories, one after the other.

    Attributes
    ----------
    confidence_logit, alpha
        float32[N, gamma].
    accepted
        uint8[N].
    lengths
        int64[T]: rows of each trajectory: its answer tokens. The last gamma of them hold zeros: fewer than gamma
        tokens follow there, and replay never uses them. (gamma is the drafter's own.)
    """

    confidence_logit: npt.NDArray[np.float32]
    alpha: npt.NDArray[np.float32]
    accepted: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]


def joined(parts: Sequence[Rows]) -> Rows:
    """Parts one after the other."""
    return Rows(
        np.concatenate([part.confidence_logit for part in parts]),
        np.concatenate([part.alpha for part in parts]),
        np.concatenate([part.accepted for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


@dataclass(frozen=True)
class _Job:
    """One drafter's blocks at all anchors of one text, and the vocabulary that they were drawn from."""

    vocabulary: Vocabulary
    draws: CoupledDraws
    block: Block


@dataclass(frozen=True)
class _Tree:
    """Distinct token paths that leave the text, as nodes (parents before children).

    Attributes
    ----------
    token, parent, root, depth
        int64[M]: token, parent node (-1: the text), the text position where the path's first token stands, and how
        many tokens after that one this is.
    """

    token: npt.NDArray[np.int64]
    parent: npt.NDArray[np.int64]
    root: npt.NDArray[np.int64]
    depth: npt.NDArray[np.int64]


def _grow(paths: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]], vocab: int) -> tuple[_Tree, list[Any]]:
    """The tree of all paths.

    Parameters
    ----------
    paths
        By drafter: leave int64[A], the text position where a block's first rejected token stands, and tokens
        int64[A, depth], -1 beyond the path's end.

    Returns
    -------
    tree, nodes
        `nodes`: by drafter int64[A, depth], -1 beyond the end.
    """
    nodes = [np.full(tokens.shape, -1, dtype=np.int64) for _, tokens in paths]
    found: list[npt.NDArray[np.int64]] = []
    depth, base = 0, 0
    while True:
        rows = [np.flatnonzero(tokens[:, depth : depth + 1] >= 0) for _, tokens in paths]
        if not any(r.size for r in rows):
            break
        parents, roots, tokens_here = [], [], []
        for (leave, tokens), own, r in zip(paths, nodes, rows, strict=True):
            if len(r):
                parents.append(own[r, depth - 1] if depth else -1 - leave[r])
                roots.append(leave[r])
                tokens_here.append(tokens[r, depth])
        parent, root, token = (np.concatenate(part) for part in (parents, roots, tokens_here))
        low = parent.min()
        _, first, inverse = np.unique((parent - low) * vocab + token, return_index=True, return_inverse=True)
        found.append(np.stack([token[first], np.maximum(parent[first], -1), root[first], np.full(first.size, depth)]))
        start = 0
        for own, r in zip(nodes, rows, strict=True):
            if len(r):
                own[r, depth] = base + inverse[start : start + len(r)]
                start += len(r)
        base += first.size
        depth += 1
    table = np.concatenate(found, axis=1) if found else np.zeros((4, 0), dtype=np.int64)
    return _Tree(*table), nodes


def _chunks(tree: _Tree, most: int) -> Iterable[npt.NDArray[np.int64]]:
    """Node indices in groups of about `most`; a root's whole subtree stays together, parents first."""
    order = np.lexsort((np.arange(tree.root.size), tree.depth, tree.root))
    _, sizes = np.unique(tree.root, return_counts=True)
    start, count = 0, 0
    for size in sizes.tolist():
        if count and count + size > most:
            yield np.sort(order[start : start + count])
            start, count = start + count, 0
        count += size
    if count:
        yield np.sort(order[start:])


def _visible(parent: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """bool[M, M]: every node sees its ancestors and itself (parents come before children)."""
    seen = np.eye(parent.size, dtype=bool)
    for node, above in enumerate(parent.tolist()):
        if above >= 0:
            seen[node] |= seen[above]
    return seen


@torch.inference_mode()
def record_text(
    target: Target,
    drafters: Sequence[Drafter],
    tokens: npt.NDArray[np.int64],
    prompt: int,
    *,
    temperature: float,
    random: np.random.Generator,
    draws: int = 1,
    nodes_at_once: int | None = None,
) -> list[Rows]:
    """Record all drafters on one text.

    Parameters
    ----------
    target
        The model that generated the text, at `temperature`.
    drafters
        All for this target.
    tokens
        int64[S]: prompt, then answer.
    prompt
        Prompt tokens.
    random
        Uniforms come from here: the same ones for every drafter, whatever others there are.
    draws
        Independent blocks at every position; each draw is a trajectory of its own.
    nodes_at_once
        Drafted tokens in a pass of the target: None is what measured fastest here (small chunks see less of each
        other on a CPU; a GPU wants large ones).

    Returns
    -------
    list of Rows
        By drafter; of `draws` trajectories each.

    Raises
    ------
    InputError
        The answer is too short for replay (see `recordable`).
    """
    device = target.device
    at_once = nodes_at_once or (128 if device.type == "cpu" else 1024)
    text = torch.from_numpy(tokens).to(device)
    rows = tokens.size - prompt
    # Position by position of the block: a drafter of shorter blocks uses the first ones.
    most = max(drafter.config.gamma for drafter in drafters)
    if rows <= most + 1:
        raise InputError("the answer is too short", field="tokens", value=rows, expected=f"more than {most + 1} tokens")
    uniforms = np.stack([random.random((draws, rows, 2)) for _ in range(most)], axis=2)
    taps = sorted({tap for drafter in drafters for tap in drafter.config.taps if tap != FINAL})
    cache = target.new_cache(1, tokens.size)
    features, hidden = target.extend(
        text[None, :-1], cache, torch.zeros(1, dtype=torch.int64, device=device), tuple(taps)
    )
    everything = torch.cat([features, hidden[:, :, None]], dim=2)
    # Row i is the law of the token after position prompt + i, that is of anchor i's first draft.
    p_target = torch.softmax(target.logits(hidden[0, prompt:]) / temperature, dim=-1)
    after = text[prompt + 1 :]
    p_text = p_target.gather(1, after[:, None]).squeeze(1)
    jobs: list[_Job] = []
    for drafter in drafters:
        gamma = drafter.config.gamma
        at = torch.arange(prompt, tokens.size - gamma, device=device)
        columns = [len(taps) if tap == FINAL else taps.index(tap) for tap in drafter.config.taps]
        context = drafter.prepare(everything[:, :, columns], text[None])
        vocabulary = vocabulary_of(drafter.vocabulary_head.tokens, target.vocab_size, text[:prompt])
        for draw in range(draws):
            own = torch.from_numpy(uniforms[draw, : len(at), :gamma]).to(device)
            state = CoupledDraws(p_target[:, vocabulary.tokens], vocabulary.local[after], p_text, own)
            block = drafter.draft(context, text[at], at, vocabulary, temperature, state)
            jobs.append(_Job(vocabulary, state, block))
    _score_rest(target, cache, jobs, prompt, temperature, at_once)
    return [
        joined([_rows(jobs[index * draws + draw], rows) for draw in range(draws)]) for index in range(len(drafters))
    ]


def _score_rest(
    target: Target,
    cache: Any,
    jobs: Sequence[_Job],
    first: int,
    temperature: float,
    at_once: int,
) -> None:
    """Fill in alpha of the drafts after each block's first rejection; `first` is the position of the first anchor."""
    paths = []
    for job in jobs:
        drafted = job.block.tokens.cpu().numpy()
        accepted = job.draws.accepted.cpu().numpy()
        gamma = drafted.shape[1]
        # The first rejected draft is number accepted (from 0); the last draft's successor is not asked for.
        place = accepted[:, None] + np.arange(gamma - 1)
        inside = place < gamma - 1
        path = np.where(inside, np.take_along_axis(drafted, np.minimum(place, gamma - 1), axis=1), -1)
        paths.append((first + 1 + np.arange(len(accepted)) + accepted, path))
    tree, nodes = _grow(paths, target.vocab_size)
    device = target.device
    for chunk in _chunks(tree, at_once):
        local = np.full(tree.token.size, -1, dtype=np.int64)
        local[chunk] = np.arange(chunk.size)
        parent = np.where(tree.parent[chunk] >= 0, local[tree.parent[chunk]], -1)

        def on_device(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        hidden = target.branch(
            on_device(tree.token[chunk]),
            on_device(tree.root[chunk] + tree.depth[chunk]),
            on_device(tree.root[chunk]),
            on_device(_visible(parent)),
            cache,
        )
        p_target = torch.softmax(target.logits(hidden) / temperature, dim=-1)
        for job, own in zip(jobs, nodes, strict=True):
            state = job.draws
            where, depth = np.nonzero((own >= 0) & (local[own] >= 0))
            if not where.size:
                continue
            accepted = state.accepted.cpu().numpy()
            k = accepted[where] + 1 + depth
            node = on_device(local[own[where, depth]])
            rows, columns = on_device(where), on_device(k)
            # One draft position at a time: all rows at once would copy the whole vocabulary for each.
            for position in np.unique(k).tolist():
                mine = columns == position
                laws = p_target[node[mine]][:, job.vocabulary.tokens]
                drawn = state.p_draft[position][rows[mine]]
                state.alpha[rows[mine], position] = torch.minimum(drawn, laws).sum(dim=1)


def _rows(job: _Job, rows: int) -> Rows:
    state, block = job.draws, job.block
    anchors, gamma = state.alpha.shape
    confidence = np.zeros((rows, gamma), dtype=np.float32)
    alpha = np.zeros((rows, gamma), dtype=np.float32)
    accepted = np.zeros(rows, dtype=np.uint8)
    confidence[:anchors] = block.confidence_logit.float().cpu().numpy()
    alpha[:anchors] = state.alpha.clamp(0, 1).cpu().numpy()
    accepted[:anchors] = state.accepted.cpu().numpy()
    return Rows(confidence, alpha, accepted, np.array([rows], dtype=np.int64))


def recordable(corpus: Corpus, gamma: int) -> list[int]:
    """Sequences whose answers are long enough for replay: more than gamma + 1 tokens."""
    lengths = [corpus[i].tokens.size - corpus[i].prompt for i in range(len(corpus))]
    return [i for i, length in enumerate(lengths) if length > gamma + 1]


def record_part(
    target: Target,
    drafters: Mapping[str, Drafter],
    corpus: Corpus,
    indices: Sequence[int],
    file: Path,
    *,
    seed: int = 0,
    draws: int = 1,
) -> None:
    """Record some sequences of a corpus to a part file, unless it is there.

    The uniforms of a sequence are keyed by (seed, its index), so parts may be made in any order and process.

    Raises
    ------
    InputError
        A drafter or the corpus is not of this target.
    """
    if file.is_file():
        return
    for name, drafter in drafters.items():
        check_target(drafter.config, target, name)
    if corpus.header.fingerprint != target.fingerprint:
        raise InputError(
            f"was generated by {corpus.header.target}, not by {target.name}",
            file=corpus.folder,
            field="fingerprint",
            value=corpus.header.fingerprint,
            expected=target.fingerprint,
        )
    parts: dict[str, list[Rows]] = {name: [] for name in drafters}
    for index in indices:
        sequence = corpus[index]
        random = np.random.Generator(np.random.Philox(key=[seed, sequence.index]))
        rows = record_text(
            target,
            list(drafters.values()),
            sequence.tokens,
            sequence.prompt,
            temperature=corpus.header.temperature,
            random=random,
            draws=draws,
        )
        for name, part in zip(drafters, rows, strict=True):
            parts[name].append(part)
    arrays: dict[str, Any] = {"indices": np.array(indices, dtype=np.int64)}
    for name, rows in parts.items():
        whole = joined(rows)
        for member in ("confidence_logit", "alpha", "accepted", "lengths"):
            arrays[f"{name}/{member}"] = getattr(whole, member)
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, **arrays)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_part(file: Path, name: str) -> tuple[npt.NDArray[np.int64], Rows]:
    """Sequence indices and rows of one drafter from a part file."""
    try:
        # Opened here: NumPy leaves a file open that turns out to be no archive.
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            members = [archive[f"{name}/{member}"] for member in ("confidence_logit", "alpha", "accepted", "lengths")]
            return archive["indices"], Rows(*members)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"is no recording of '{name}' ({error})", file=file) from None
