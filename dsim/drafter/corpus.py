"""Text that the target itself generated, with the hidden states it had: what drafters are trained and recorded on.

A corpus is a folder of shards. A shard is a folder with two files, written whole or not at all:

================= ======================== ===========================================================
file              dtype, shape             meaning
================= ======================== ===========================================================
``shard.npz``     ``header`` uint8[bytes]  UTF-8 JSON: `CorpusHeader`
                  ``tokens`` int32[N]      prompt and answer of every sequence, one after the other
                  ``bounds`` int64[T + 1]  first token of each sequence, and the end
                  ``prompts`` int64[T]     prompt tokens of each sequence
                  ``domain`` uint8[T]      index into the header's domains
                  ``log_z`` float32[N]     log sum exp of logits / temperature at each token
``features.npy``  float16[N, m + 1, H]     outputs of the tapped layers, then the final normed hidden state
================= ======================== ===========================================================

The hidden state at token s predicts token s + 1: ``p_t(v) = exp(head[v] . hidden[s] / temperature - log_z[s])``.
The last token of an answer was sampled and never run, so its features and ``log_z`` are zero.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from dsim.drafter.prompts import Prompt, prompts_hash
from dsim.drafter.sampling import pick
from dsim.drafter.target import Target
from dsim.errors import InputError

FORMAT = "dsim-corpus"
VERSION = 1


@dataclass(frozen=True)
class CorpusHeader:
    """What a shard says about itself.

    Parameters
    ----------
    target, fingerprint
        `Target.name` and `Target.fingerprint` of the model that generated it.
    temperature, seed
        Of the sampling.
    taps
        Layers whose outputs are in the features (0 = embedding).
    domains
        Names, in the order of the domain indices.
    prompts
        `prompts_hash` of the prompts of this shard.
    split
        ``train``, ``calibration`` or ``evaluation``, or a user's word.
    first
        Index of the shard's first prompt in the list.
    max_new_tokens
        Answers are cut there.
    device
        Where it was generated, in words.
    """

    target: str
    fingerprint: str
    license: str
    temperature: float
    seed: int
    taps: tuple[int, ...]
    domains: tuple[str, ...]
    prompts: str
    split: str
    first: int
    max_new_tokens: int
    device: str
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True)
class Trajectory:
    """One prompt with the answer of the target.

    Attributes
    ----------
    index
        Of the prompt in its list.
    tokens
        int64[S]: prompt, then answer.
    prompt
        Prompt tokens.
    domain
        Name.
    log_z
        float32[S].
    features
        float16[S, m + 1, H].
    """

    index: int
    tokens: npt.NDArray[np.int64]
    prompt: int
    domain: str
    log_z: npt.NDArray[np.float32]
    features: npt.NDArray[np.float16]


def generate_shard(
    target: Target,
    prompts: Sequence[Prompt],
    folder: Path,
    header: CorpusHeader,
    *,
    rows: int = 64,
    max_prompt_tokens: int = 256,
    progress: bool = True,
) -> None:
    """Answer prompts with the target, `rows` at a time, and write the shard `folder`.

    Every sequence draws from a random stream of its own, keyed by (seed, its index). A shard that is there already
    stays as it is.

    Raises
    ------
    InputError
        A prompt is too long, or the shard that is there was generated otherwise.
    """
    if folder.is_dir():
        _must_be_alike(folder, header)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".shard-"))
    try:
        done = sorted(
            _answers(target, prompts, header, rows, max_prompt_tokens, progress), key=lambda sequence: sequence.index
        )
        _write(done, temporary, header)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another process has made it meanwhile.
            _must_be_alike(folder, header)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _must_be_alike(folder: Path, header: CorpusHeader) -> None:
    """Raise InputError where the shard that lies there was generated otherwise."""
    found = _read(folder).header
    for item in fields(CorpusHeader):
        ours, theirs = getattr(header, item.name), getattr(found, item.name)
        if item.name != "device" and ours != theirs:
            raise InputError(
                "the shard there was generated otherwise",
                file=folder,
                field=item.name,
                value=theirs,
                expected=f"{ours!r}, or another folder",
            )


class _Row:
    """A sequence being generated in one row of the cache."""

    def __init__(self, index: int, prompt: Prompt, tokens: list[int], seed: int) -> None:
        self.index = index
        self.prompt = prompt
        self.tokens = list(tokens)
        self.prompt_tokens = len(tokens)
        self.random = np.random.Generator(np.random.Philox(key=[seed, index]))
        self.features: list[Tensor] = []
        self.log_z: list[Tensor] = []


def _answers(
    target: Target,
    prompts: Sequence[Prompt],
    header: CorpusHeader,
    rows: int,
    max_prompt_tokens: int,
    progress: bool,
) -> Iterator[Trajectory]:
    waiting = []
    for offset, prompt in enumerate(prompts):
        turn = target.tokenizer.chat(prompt.text)
        if len(turn) > max_prompt_tokens:
            raise InputError(
                "the prompt is too long for the recipe",
                field="prompt",
                value=f"{len(turn)} tokens: {prompt.text[:60]}",
                expected=f"at most {max_prompt_tokens} tokens in the chat template",
            )
        waiting.append(_Row(header.first + offset, prompt, turn, header.seed))
    waiting.reverse()
    cache = target.new_cache(rows, max_prompt_tokens + header.max_new_tokens)
    active: list[_Row] = []
    taps, device = header.taps, target.device

    def advance(members: list[_Row], features: Tensor, hidden: Tensor) -> None:
        # features [B, S, m, H], hidden [B, S, H]: stored, and the next token drawn from the last position.
        logits = target.logits(hidden) / header.temperature
        log_z = torch.logsumexp(logits, dim=-1)
        stored = torch.cat([features, hidden[:, :, None]], dim=2).to(torch.float16).cpu()
        u = torch.tensor([row.random.random() for row in members], dtype=torch.float64)
        drawn = pick(torch.softmax(logits[:, -1], dim=-1), u.to(device)).tolist()
        for i, row in enumerate(members):
            row.features.append(stored[i])
            row.log_z.append(log_z[i].cpu())
            row.tokens.append(drawn[i])

    def finished(row: _Row) -> bool:
        return row.tokens[-1] in target.eos or len(row.tokens) - row.prompt_tokens >= header.max_new_tokens

    with tqdm(total=len(waiting), unit="answer", disable=not progress, desc=f"shard from {header.first}") as bar:
        while waiting or active:
            while waiting and len(active) < rows:
                row = waiting.pop()
                slot = len(active)
                tokens = torch.tensor([row.tokens], device=device)
                features, hidden = target.extend(
                    tokens, cache.rows(slot, slot + 1), torch.zeros(1, dtype=torch.int64, device=device), taps
                )
                advance([row], features, hidden)
                if finished(row):
                    yield _sequence(row)
                    bar.update()
                else:
                    active.append(row)
            if not active:
                continue
            start = torch.tensor([len(row.tokens) - 1 for row in active], device=device)
            last = torch.tensor([[row.tokens[-1]] for row in active], device=device)
            features, hidden = target.extend(last, cache.rows(0, len(active)), start, taps)
            advance(active, features, hidden)
            for slot in reversed(range(len(active))):
                row = active[slot]
                if finished(row):
                    yield _sequence(row)
                    bar.update()
                    # The last row moves into the gap: the batch stays dense.
                    moved = active.pop()
                    if moved is not row:
                        cache.copy_row(len(active), slot, len(moved.tokens) - 1)
                        active[slot] = moved


def _sequence(row: _Row) -> Trajectory:
    features = torch.cat(row.features)
    log_z = torch.cat(row.log_z)
    if not bool(torch.isfinite(features).all() and torch.isfinite(log_z).all()):
        raise InputError(
            "the target's states or logits are not finite in float16",
            field="taps",
            value=f"answer {row.index}",
            expected="other layers",
        )
    return Trajectory(
        index=row.index,
        tokens=np.asarray(row.tokens, dtype=np.int64),
        prompt=row.prompt_tokens,
        domain=row.prompt.domain,
        log_z=torch.cat([log_z, log_z.new_zeros(1)]).numpy(),
        features=torch.cat([features, features.new_zeros((1, *features.shape[1:]))]).numpy(),
    )


def _write(done: Sequence[Trajectory], folder: Path, header: CorpusHeader) -> None:
    bounds = np.cumsum([0, *(sequence.tokens.size for sequence in done)])
    shape = (int(bounds[-1]), *done[0].features.shape[1:])
    features = np.lib.format.open_memmap(folder / "features.npy", mode="w+", dtype=np.float16, shape=shape)
    for sequence, first, last in zip(done, bounds[:-1], bounds[1:], strict=True):
        features[first:last] = sequence.features
    features.flush()
    np.savez_compressed(
        folder / "shard.npz",
        header=np.frombuffer(json.dumps(asdict(header), sort_keys=True).encode(), dtype=np.uint8),
        tokens=np.concatenate([sequence.tokens for sequence in done]).astype(np.int32),
        bounds=bounds.astype(np.int64),
        prompts=np.array([sequence.prompt for sequence in done], dtype=np.int64),
        domain=np.array([header.domains.index(sequence.domain) for sequence in done], dtype=np.uint8),
        log_z=np.concatenate([sequence.log_z for sequence in done]),
    )


def shard_folder(folder: Path, first: int) -> Path:
    """Folder of the shard whose first prompt has this index."""
    return folder / f"shard-{first:06d}"


class Corpus:
    """The shards of a folder, opened; features are memory-mapped.

    Parameters
    ----------
    folder
        Folder of shards.
    first, last
        Use shards first..last - 1 only, counted from 0 in the order of their prompts.

    Raises
    ------
    InputError
        No shard there, a damaged one, or shards that do not belong together.
    """

    def __init__(self, folder: str | Path, *, first: int = 0, last: int | None = None) -> None:
        self.folder = Path(folder)
        paths = sorted(self.folder.glob("shard-[0-9]*"))[first:last]
        if not paths:
            raise InputError("holds no shards", file=self.folder, expected="folders named shard-NNNNNN")
        shards = [_read(path) for path in paths]
        self.header = shards[0].header
        for before, shard in pairwise(shards):
            own = {name: getattr(self.header, name) for name in ("first", "prompts", "device")}
            if replace(shard.header, **own) != self.header:
                raise InputError("was generated otherwise than the first shard", file=shard.path, field="header")
            end = before.header.first + before.prompts.size
            if shard.header.first < end:
                expected = f"{end} or more, after the prompts of {before.path.name}"
                raise InputError(file=shard.path, field="first", value=shard.header.first, expected=expected)
            if shard.features.shape[2] != shards[0].features.shape[2]:
                expected = f"float16[N, m + 1, {shards[0].features.shape[2]}] as in {shards[0].path.name}"
                raise InputError(
                    file=shard.path / "features.npy", field="shape", value=shard.features.shape, expected=expected
                )
        self._shards = shards
        self._place = [(s, i) for s, shard in enumerate(shards) for i in range(shard.prompts.size)]

    def __len__(self) -> int:
        return len(self._place)

    @property
    def answer_tokens(self) -> int:
        """Generated tokens in all."""
        return sum(int(np.diff(shard.bounds).sum() - shard.prompts.sum()) for shard in self._shards)

    def __getitem__(self, index: int) -> Trajectory:
        shard_index, i = self._place[index]
        shard = self._shards[shard_index]
        first, last = int(shard.bounds[i]), int(shard.bounds[i + 1])
        return Trajectory(
            index=self.header.first + index if shard_index == 0 else shard.header.first + i,
            tokens=shard.tokens[first:last].astype(np.int64),
            prompt=int(shard.prompts[i]),
            domain=self.header.domains[shard.domain[i]],
            log_z=shard.log_z[first:last],
            features=shard.features[first:last],
        )

    def answer_counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """int64[V]: how often each token occurs in the answers.

        Raises
        ------
        InputError
            A shard has tokens that are not in the vocabulary.
        """
        counts = np.zeros(vocab_size, dtype=np.int64)
        for shard in self._shards:
            largest = int(shard.tokens.max())
            if largest >= vocab_size:
                expected = f"tokens below {vocab_size}"
                raise InputError(file=shard.path / "shard.npz", field="tokens", value=largest, expected=expected)
            for i, prompt in enumerate(shard.prompts.tolist()):
                answer = shard.tokens[shard.bounds[i] + prompt : shard.bounds[i + 1]]
                counts += np.bincount(answer, minlength=vocab_size)
        return counts


@dataclass(frozen=True)
class _Shard:
    path: Path
    header: CorpusHeader
    tokens: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    domain: npt.NDArray[np.uint8]
    log_z: npt.NDArray[np.float32]
    features: npt.NDArray[np.float16]


_MEMBERS = {"tokens": np.int32, "bounds": np.int64, "prompts": np.int64, "domain": np.uint8, "log_z": np.float32}
#: What NumPy and zipfile raise when a file is not what its name says.
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error)


def _read(path: Path) -> _Shard:
    file = path / "shard.npz"
    try:
        # Opened here: NumPy leaves a file open that turns out to be no archive.
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            raw = json.loads(bytes(archive["header"]).decode())
            arrays: dict[str, Any] = {name: np.asarray(archive[name]) for name in _MEMBERS}
        features = np.load(path / "features.npy", mmap_mode="r", allow_pickle=False)
    except _UNREADABLE as error:
        # A truncated member has several lines of message in some versions of NumPy.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"is no corpus shard ({reason})", file=file) from None
    header = _parse_header(raw, file)
    for name, dtype in _MEMBERS.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != 1:
            found = f"{arrays[name].dtype}{list(arrays[name].shape)}"
            raise InputError(file=file, field=name, value=found, expected=f"{np.dtype(dtype).name}[n]")
    _check_arrays(arrays, header, file)
    total = arrays["tokens"].size
    if features.dtype != np.float16 or features.ndim != 3 or features.shape[:2] != (total, len(header.taps) + 1):
        raise InputError(
            file=path / "features.npy",
            field="shape",
            value=f"{features.dtype}{list(features.shape)}",
            expected=f"float16[{total}, {len(header.taps) + 1}, H]",
        )
    return _Shard(path=path, header=header, features=features, **arrays)


def _parse_header(raw: Any, file: Path) -> CorpusHeader:
    found = raw.get("format") if isinstance(raw, dict) else raw
    if not isinstance(raw, dict) or found != FORMAT:
        raise InputError(file=file, field="format", value=found or "none", expected=f"'{FORMAT}'")
    if raw.get("version") != VERSION:
        raise InputError(file=file, field="version", value=raw.get("version"), expected=str(VERSION))
    names = {item.name for item in fields(CorpusHeader)}
    if set(raw) != names:
        raise InputError(file=file, field="header", value=sorted(raw), expected=f"the keys {sorted(names)}")

    def need(condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise InputError(file=file, field=name, value=str(raw[name]), expected=expected)

    for name in ("target", "fingerprint", "license", "prompts", "split", "device"):
        need(isinstance(raw[name], str), name, "text")
    for name, lowest in (("first", 0), ("max_new_tokens", 1), ("seed", 0)):
        need(_is_count(raw[name], lowest), name, f"an integer >= {lowest}")
    temperature = raw["temperature"]
    plain = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    need(plain and 0 < temperature < float("inf"), "temperature", "a number > 0")
    taps, domains = raw["taps"], raw["domains"]
    need(isinstance(taps, list) and all(_is_count(tap, 0) for tap in taps), "taps", "a list of integers >= 0")
    named = isinstance(domains, list) and bool(domains) and all(isinstance(name, str) for name in domains)
    need(named and len(set(domains)) == len(domains), "domains", "a list of distinct names")
    return CorpusHeader(**{**raw, "taps": tuple(taps), "domains": tuple(domains)})


def _is_count(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _check_arrays(arrays: dict[str, Any], header: CorpusHeader, file: Path) -> None:
    tokens, bounds, prompts, domain = (arrays[name] for name in ("tokens", "bounds", "prompts", "domain"))

    def need(wrong: npt.NDArray[np.bool_], name: str, expected: str) -> None:
        if wrong.any():
            at = int(wrong.argmax())
            raise InputError(file=file, field=f"{name}[{at}]", value=int(arrays[name][at]), expected=expected)

    if bounds.size < 2 or bounds[0] != 0 or bounds[-1] != tokens.size:
        found = "nothing" if bounds.size == 0 else f"{bounds.size} bounds from {bounds[0]} to {bounds[-1]}"
        raise InputError(file=file, field="bounds", value=found, expected=f"2 or more, from 0 to {tokens.size}")
    need(np.diff(bounds, prepend=-1) <= 0, "bounds", "an increasing sequence")
    for name, size in (("prompts", bounds.size - 1), ("domain", bounds.size - 1), ("log_z", tokens.size)):
        if arrays[name].size != size:
            raise InputError(file=file, field=name, value=arrays[name].shape, expected=f"shape ({size},)")
    need((prompts < 1) | (prompts >= np.diff(bounds)), "prompts", "1 or more, and fewer than the sequence has tokens")
    need(domain >= len(header.domains), "domain", f"an index into the {len(header.domains)} domains")
    need(tokens < 0, "tokens", "0 or more")
    if not np.isfinite(arrays["log_z"]).all():
        raise InputError(file=file, field="log_z", expected="finite numbers")


def generate_corpus(
    target: Target,
    prompts: Sequence[Prompt],
    folder: str | Path,
    *,
    split: str,
    taps: tuple[int, ...],
    temperature: float,
    seed: int = 0,
    shard_size: int = 512,
    max_new_tokens: int = 256,
    rows: int = 64,
    max_prompt_tokens: int = 256,
    part: tuple[int, int] = (0, 1),
    device: str = "cpu",
    progress: bool = True,
) -> None:
    """Answer all prompts, shard by shard; shards that are there already are left alone, so a broken run goes on.

    Parameters
    ----------
    part
        (i, n): this process makes every n-th shard, from the i-th on. The shards do not depend on n.

    Raises
    ------
    InputError
        A size, a temperature or a part that makes no sense, no prompts, a prompt that is too long, or a shard in the
        folder that was generated otherwise.
    """
    sizes = {"shard_size": shard_size, "max_new_tokens": max_new_tokens, "rows": rows, "part": part[1]}
    for name, size in sizes.items():
        if size < 1:
            raise InputError(field=name, value=size, expected="1 or more")
    if not 0 <= part[0] < part[1]:
        raise InputError(field="part", value=part, expected="(i, n) with 0 <= i < n")
    if not 0 < temperature < float("inf"):
        raise InputError(field="temperature", value=temperature, expected="a number > 0")
    if any(not 0 <= tap <= target.num_layers for tap in taps):
        raise InputError(field="taps", value=taps, expected=f"layers 0 to {target.num_layers} of {target.name}")
    if seed < 0:
        raise InputError(field="seed", value=seed, expected="0 or more")
    if not prompts:
        raise InputError(field="prompts", value=0, expected="1 or more")
    domains = tuple(dict.fromkeys(prompt.domain for prompt in prompts))
    for number, first in enumerate(range(0, len(prompts), shard_size)):
        if number % part[1] != part[0]:
            continue
        header = CorpusHeader(
            target=target.name,
            fingerprint=target.fingerprint,
            license=target.license,
            temperature=temperature,
            seed=seed,
            taps=taps,
            domains=domains,
            prompts=prompts_hash(prompts[first : first + shard_size]),
            split=split,
            first=first,
            max_new_tokens=max_new_tokens,
            device=device,
        )
        generate_shard(
            target,
            prompts[first : first + shard_size],
            shard_folder(Path(folder), first),
            header,
            rows=rows,
            max_prompt_tokens=max_prompt_tokens,
            progress=progress,
        )
