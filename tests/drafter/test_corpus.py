"""Corpora: the target's own text by its own law, the same bytes however it is made, and nothing damaged gets in."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dsim.drafter.corpus import Corpus, generate_corpus, shard_folder
from dsim.drafter.prompts import Prompt, prompts_hash
from dsim.drafter.target import LlamaTarget
from dsim.drafter.tiny import tiny_target
from dsim.errors import InputError

TAPS = (0, 2)
TEMPERATURE = 0.8
NEW = 9
PROMPTS = [
    Prompt(domain, f"{'ab' * (i % 4)} what about the {i}?", "x")
    for i, domain in enumerate(["math", "chat", "code", "chat", "math"] * 3)
]


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    # Several ends, so that answers stop at all lengths: at once, in the middle, and at the limit.
    return replace(tiny_target(seed=2, num_layers=2), eos=frozenset({0, 5, 9}))


def generate(target: LlamaTarget, folder: Path, **options: Any) -> None:
    options = {"shard_size": 6, "rows": 4, "temperature": TEMPERATURE, "seed": 3, "max_new_tokens": NEW, **options}
    prompts = options.pop("prompts", PROMPTS)
    generate_corpus(target, prompts, folder, split="train", taps=options.pop("taps", TAPS), progress=False, **options)


@pytest.fixture(scope="module")
def folder(target: LlamaTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    generate(target, path)
    return path


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return Corpus(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def texts(folder: Path) -> list[list[int]]:
    corpus = Corpus(folder)
    return [corpus[i].tokens.tolist() for i in range(len(corpus))]


def test_what_is_in_it(corpus: Corpus, target: LlamaTarget) -> None:
    assert len(corpus) == len(PROMPTS)
    assert corpus.header.domains == ("math", "chat", "code")
    assert (corpus.header.target, corpus.header.fingerprint) == (target.name, target.fingerprint)
    assert (corpus.header.taps, corpus.header.temperature, corpus.header.split) == (TAPS, TEMPERATURE, "train")
    assert corpus.header.prompts == prompts_hash(PROMPTS[:6])
    for i, prompt in enumerate(PROMPTS):
        found = corpus[i]
        turn = target.tokenizer.chat(prompt.text)
        assert (found.index, found.domain, found.prompt) == (i, prompt.domain, len(turn))
        assert found.tokens[: found.prompt].tolist() == turn
        assert found.features.shape == (found.tokens.size, 3, 32)


def test_answers_end_at_the_first_end_token_or_at_the_limit(corpus: Corpus, target: LlamaTarget) -> None:
    lengths = Counter()
    for i in range(len(corpus)):
        answer = corpus[i].tokens[corpus[i].prompt :].tolist()
        assert 1 <= len(answer) <= NEW
        assert not target.eos.intersection(answer[:-1])
        assert answer[-1] in target.eos or len(answer) == NEW
        lengths[len(answer)] += 1
    # All three ways to end are among these answers.
    assert lengths[1]
    assert lengths[NEW]
    assert lengths.total() > lengths[1] + lengths[NEW]


@pytest.mark.parametrize("limit", [1, 2])
def test_short_limits(limit: int, target: LlamaTarget, tmp_path: Path) -> None:
    generate(target, tmp_path, max_new_tokens=limit)
    corpus = Corpus(tmp_path)
    assert {corpus[i].tokens.size - corpus[i].prompt for i in range(len(corpus))} == set(range(1, limit + 1))


def test_features_and_log_z_are_those_of_a_plain_pass(corpus: Corpus, target: LlamaTarget) -> None:
    for i in range(len(corpus)):
        found = corpus[i]
        tokens = torch.from_numpy(found.tokens)[None]
        cache = target.new_cache(1, tokens.shape[1])
        features, hidden = target.extend(tokens, cache, torch.zeros(1, dtype=torch.int64), TAPS)
        expected = torch.cat([features, hidden[:, :, None]], dim=2)[0]
        assert found.features.dtype == np.float16
        np.testing.assert_allclose(found.features[:-1], expected[:-1], rtol=2e-3, atol=2e-3)
        log_z = torch.logsumexp(target.logits(hidden)[0] / TEMPERATURE, dim=-1)
        np.testing.assert_allclose(found.log_z[:-1], log_z[:-1], atol=2e-4)
        assert not found.features[-1].any()
        assert found.log_z[-1] == 0


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_texts_do_not_depend_on_the_rows(rows: int, folder: Path, target: LlamaTarget, tmp_path: Path) -> None:
    generate(target, tmp_path, rows=rows)
    assert texts(tmp_path) == texts(folder)


def test_same_bytes_again_and_in_parts(folder: Path, target: LlamaTarget, tmp_path: Path) -> None:
    generate(target, tmp_path, part=(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["shard-000006"]
    generate(target, tmp_path, part=(0, 2))
    assert contents(tmp_path) == contents(folder)


def test_texts_do_not_depend_on_the_shards(folder: Path, target: LlamaTarget, tmp_path: Path) -> None:
    generate(target, tmp_path, shard_size=100)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-000000"]
    assert texts(tmp_path) == texts(folder)


def test_another_seed_is_another_text(folder: Path, target: LlamaTarget, tmp_path: Path) -> None:
    generate(target, tmp_path, seed=4)
    same = [ours == theirs for ours, theirs in zip(texts(tmp_path), texts(folder), strict=True)]
    assert np.mean(same) < 0.5


def test_copies_of_a_prompt_get_answers_of_their_own(target: LlamaTarget, tmp_path: Path) -> None:
    generate(replace(target, eos=frozenset()), tmp_path, prompts=[PROMPTS[0]] * 12)
    assert len({tuple(text) for text in texts(tmp_path)}) == 12


def test_the_first_two_tokens_follow_the_law_of_the_target(tmp_path: Path) -> None:
    target = tiny_target(seed=1, vocab_size=6, hidden_size=16, num_layers=2, sharpness=1.2)
    copies = 1500
    prompts = [Prompt("chat", "hello", "x")] * copies
    generate(target, tmp_path, prompts=prompts, shard_size=copies, rows=50, max_new_tokens=2)
    prompt = target.tokenizer.chat("hello")

    def law(tokens: list[int]) -> Tensor:
        cache = target.new_cache(1, len(tokens))
        _, hidden = target.extend(torch.tensor([tokens]), cache, torch.zeros(1, dtype=torch.int64))
        return torch.softmax(target.logits(hidden[0, -1]).double() / TEMPERATURE, dim=-1)

    first = law(prompt)
    expected = {(a, b): float(first[a] * p) for a in range(1, 6) for b, p in enumerate(law([*prompt, a]))}
    expected[(0,)] = float(first[0])  # 0 ends the answer
    counts = Counter(tuple(text[len(prompt) :]) for text in texts(tmp_path))
    assert set(counts) <= set(expected)
    singles = [sum(count for answer, count in counts.items() if answer[0] == a) for a in range(6)]
    assert stats.chisquare(singles, first.numpy() * copies).pvalue > 0.01
    rare = [answer for answer, share in expected.items() if share * copies < 5]
    cells = [[answer] for answer in expected if answer not in rare] + ([rare] if rare else [])
    found = [sum(counts[answer] for answer in cell) for cell in cells]
    wanted = [sum(expected[answer] for answer in cell) * copies for cell in cells]
    assert len(cells) > 15
    assert stats.chisquare(found, wanted).pvalue > 0.01


def test_a_broken_run_goes_on(folder: Path, target: LlamaTarget, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "shard-000006")
    kept = [path.stat() for path in sorted((tmp_path / "c").rglob("*.np*"))]
    generate(target, tmp_path / "c")
    assert contents(tmp_path / "c") == contents(folder)
    after = [path.stat() for path in sorted((tmp_path / "c").rglob("*.np*")) if path.parent.name != "shard-000006"]
    assert [(s.st_ino, s.st_mtime_ns) for s in after] == [(s.st_ino, s.st_mtime_ns) for s in kept]


def test_a_run_that_stops_leaves_whole_shards_only(folder: Path, target: LlamaTarget, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    class Tiring:
        """The target, until it has run so many passes."""

        passes = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def extend(self, *args: Any) -> tuple[Tensor, Tensor]:
            self.passes += 1
            if self.passes > 24:
                raise Stop
            return target.extend(*args)

    with pytest.raises(Stop):
        generate(Tiring(), tmp_path)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["shard-000000"]
    generate(target, tmp_path)
    assert contents(tmp_path) == contents(folder)


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("temperature", 1.0, "temperature"),
        ("seed", 4, "seed"),
        ("max_new_tokens", 8, "max_new_tokens"),
        ("taps", (1,), "taps"),
        ("prompts", PROMPTS[1:] + PROMPTS[:1], "domains"),
        ("prompts", [replace(prompt, text="another") for prompt in PROMPTS], "prompts"),
    ],
)
def test_a_run_with_other_options_does_not_go_on(
    option: str, value: Any, field: str, folder: Path, target: LlamaTarget
) -> None:
    before = contents(folder)
    with pytest.raises(InputError, match=f"shard-000000, field '{field}': the shard there was generated otherwise"):
        generate(target, folder, **{option: value})
    assert contents(folder) == before


def test_a_prompt_that_is_too_long(target: LlamaTarget, tmp_path: Path) -> None:
    length = len(target.tokenizer.chat(PROMPTS[3].text))
    message = (
        rf"the prompt is too long for the recipe, got '{length} tokens: ababab what .*expected at most {length - 1}"
    )
    with pytest.raises(InputError, match=message):
        generate(target, tmp_path, max_prompt_tokens=length - 1)
    assert list(tmp_path.iterdir()) == []


def test_states_that_do_not_fit_into_float16(tmp_path: Path) -> None:
    target = tiny_target(seed=2, num_layers=2)
    target.embedding.data *= 1e6
    with pytest.raises(InputError, match=r"not finite in float16, got 'answer 0', expected other layers"):
        generate(target, tmp_path, rows=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "field 'rows': got 0, expected 1 or more"),
        ({"shard_size": 0}, "field 'shard_size': got 0, expected 1 or more"),
        ({"max_new_tokens": 0}, "field 'max_new_tokens': got 0, expected 1 or more"),
        ({"part": (2, 2)}, "field 'part': got (2, 2), expected (i, n) with 0 <= i < n"),
        ({"part": (0, 0)}, "field 'part': got 0, expected 1 or more"),
        ({"temperature": 0.0}, "field 'temperature': got 0.0, expected a number > 0"),
        ({"seed": -1}, "field 'seed': got -1, expected 0 or more"),
        ({"taps": (0, 3)}, "field 'taps': got (0, 3), expected layers 0 to 2 of tiny-2 (random weights)"),
        ({"prompts": []}, "field 'prompts': got 0, expected 1 or more"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str, target: LlamaTarget, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        generate(target, tmp_path, **options)
    assert str(error.value) == message
    assert list(tmp_path.iterdir()) == []


# Reading.


def test_counts(corpus: Corpus) -> None:
    answers = np.concatenate([corpus[i].tokens[corpus[i].prompt :] for i in range(len(corpus))])
    assert corpus.answer_tokens == answers.size
    assert corpus.answer_counts(40).tolist() == np.bincount(answers, minlength=40).tolist()


def test_tokens_beyond_the_vocabulary(corpus: Corpus) -> None:
    with pytest.raises(InputError, match=r"shard-000000/shard\.npz, field 'tokens': got 31, expected tokens below 20"):
        corpus.answer_counts(20)


@pytest.mark.parametrize(
    ("first", "last", "indices"), [(0, 2, range(12)), (1, None, range(6, 15)), (1, 2, range(6, 12))]
)
def test_some_shards_only(first: int, last: int | None, indices: range, folder: Path) -> None:
    corpus = Corpus(folder, first=first, last=last)
    assert [corpus[i].index for i in range(len(corpus))] == list(indices)


def test_an_index_counts_in_the_list_of_prompts(folder: Path, tmp_path: Path) -> None:
    for name in ("shard-000006", "shard-000012"):
        shutil.copytree(folder / name, tmp_path / name)
    corpus = Corpus(tmp_path)
    assert [corpus[i].index for i in range(len(corpus))] == list(range(6, 15))


def test_two_runs_at_once(folder: Path, target: LlamaTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both make the same shard; the slower one takes what the faster one has put there, if it is the same."""
    real = os.rename

    def too_late(source: Path, goal: Path) -> None:
        shutil.copytree(folder / "shard-000000", goal, dirs_exist_ok=True)
        real(source, goal)

    monkeypatch.setattr("os.rename", too_late)
    generate(target, tmp_path / "same", prompts=PROMPTS[:6])
    assert contents(tmp_path / "same" / "shard-000000") == contents(folder / "shard-000000")
    assert [path.name for path in (tmp_path / "same").iterdir()] == ["shard-000000"]
    with pytest.raises(InputError, match="field 'seed': the shard there was generated otherwise"):
        generate(target, tmp_path / "other", prompts=PROMPTS[:6], seed=4)


def test_no_shards(tmp_path: Path) -> None:
    (tmp_path / ".shard-x").mkdir()
    with pytest.raises(InputError, match="holds no shards, expected folders named shard-NNNNNN"):
        Corpus(tmp_path)


def test_shards_of_two_runs(folder: Path, target: LlamaTarget, tmp_path: Path) -> None:
    generate(target, tmp_path, seed=4)
    shutil.copytree(folder / "shard-000000", tmp_path / "shard-000000", dirs_exist_ok=True)
    message = "shard-000006, field 'header': was generated otherwise than the first shard"
    with pytest.raises(InputError, match=message):
        Corpus(tmp_path)


def test_a_shard_twice(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    shutil.copytree(folder / "shard-000000", tmp_path / "c" / "shard-000100")
    with pytest.raises(
        InputError, match="shard-000100, field 'first': got 0, expected 15 or more, after the prompts of"
    ):
        Corpus(tmp_path / "c")


Members = dict[str, Any]


def changed(folder: Path, change: Callable[[Members], object]) -> None:
    """Rewrite the second shard's npz with other members."""
    file = shard_folder(folder, 6) / "shard.npz"
    with np.load(file) as archive:
        members = dict(archive)
    change(members)
    np.savez_compressed(file, **members)


def set_header(**keys: Any) -> Callable[[Members], object]:
    def change(members: Members) -> None:
        raw = json.loads(bytes(members["header"]).decode())
        raw |= keys
        members["header"] = np.frombuffer(
            json.dumps({key: value for key, value in raw.items() if value is not ...}).encode(), dtype=np.uint8
        )

    return change


def set_item(name: str, at: int, value: Any) -> Callable[[Members], object]:
    def change(members: Members) -> None:
        members[name] = members[name].copy()
        members[name][at] = value

    return change


def set_member(name: str, make: Callable[[Any], Any]) -> Callable[[Members], object]:
    return lambda members: members.update({name: make(members[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda members: members.pop("log_z"), "is no corpus shard ('log_z is not a file in the archive')"),
        (lambda members: members.pop("header"), "is no corpus shard ('header is not a file in the archive')"),
        (set_member("header", lambda h: h[:-5]), "is no corpus shard ("),
        (set_member("header", lambda h: h[:0]), "is no corpus shard ("),
        (set_member("tokens", lambda t: t.astype(object)), "is no corpus shard (Object arrays cannot be loaded"),
        (set_header(format="dsim-bank"), "field 'format': got 'dsim-bank', expected 'dsim-corpus'"),
        (set_header(format=...), "field 'format': got 'none', expected 'dsim-corpus'"),
        (set_header(version=2), "field 'version': got 2, expected 1"),
        (set_header(extra=1), "field 'header': got ['device', 'domains', 'extra'"),
        (set_header(split=...), "field 'header': got ['device'"),
        (set_header(taps=[0, "1"]), "field 'taps': got \"[0, '1']\", expected a list of integers >= 0"),
        (set_header(taps=5), "field 'taps': got '5', expected a list of integers >= 0"),
        (set_header(domains=[]), "field 'domains': got '[]', expected a list of distinct names"),
        (set_header(domains=["a", "b", "a"]), "field 'domains': got"),
        (set_header(temperature="0.6"), "field 'temperature': got '0.6', expected a number > 0"),
        (set_header(temperature=0), "field 'temperature': got '0', expected a number > 0"),
        (set_header(first=-6), "field 'first': got '-6', expected an integer >= 0"),
        (set_header(max_new_tokens=True), "field 'max_new_tokens': got 'True', expected an integer >= 1"),
        (set_header(target=None), "field 'target': got 'None', expected text"),
        (set_member("tokens", lambda t: t.astype(np.int64)), "field 'tokens': got 'int64["),
        (set_member("log_z", lambda z: z[:, None]), "field 'log_z': got 'float32["),
        (set_member("domain", lambda d: d.astype(np.float32)), "field 'domain': got 'float32[6]', expected uint8[n]"),
        (set_member("tokens", lambda t: t[:-1]), "field 'bounds': got '7 bounds from 0 to "),
        (set_member("bounds", lambda b: b[:0]), "field 'bounds': got 'nothing', expected 2 or more, from 0 to "),
        (set_member("bounds", lambda b: b[:-1]), "field 'bounds': got '6 bounds from 0 to "),
        (set_item("bounds", 0, 1), "field 'bounds': got '7 bounds from 1 to "),
        (set_item("bounds", 3, 0), "field 'bounds[3]': got 0, expected an increasing sequence"),
        (set_item("bounds", 2, 10_000), "field 'bounds[3]': got "),
        (set_member("prompts", lambda p: p[1:]), "field 'prompts': got (5,), expected shape (6,)"),
        (set_member("domain", lambda d: d[1:]), "field 'domain': got (5,), expected shape (6,)"),
        (set_member("log_z", lambda z: z[1:]), "field 'log_z': got ("),
        (set_item("prompts", 4, 0), "field 'prompts[4]': got 0, expected 1 or more, and fewer than the sequence"),
        (set_item("prompts", 1, 999), "field 'prompts[1]': got 999, expected 1 or more, and fewer than the sequence"),
        (set_item("domain", 5, 3), "field 'domain[5]': got 3, expected an index into the 3 domains"),
        (set_item("tokens", 7, -1), "field 'tokens[7]': got -1, expected 0 or more"),
        (set_item("log_z", 2, np.nan), "field 'log_z': expected finite numbers"),
    ],
)
def test_damaged_members_are_refused_by_name(
    change: Callable[[Members], object], message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "c")
    changed(tmp_path / "c", change)
    with pytest.raises(InputError) as error:
        Corpus(tmp_path / "c")
    file = tmp_path / "c" / "shard-000006" / "shard.npz"
    assert str(error.value).startswith(f"{file}{',' if message.startswith('field') else ':'} {message}")


def test_a_prompt_as_long_as_its_sequence(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    changed(tmp_path / "c", lambda members: set_item("prompts", 0, np.diff(members["bounds"])[0])(members))
    with pytest.raises(InputError, match=r"field 'prompts\[0\]'"):
        Corpus(tmp_path / "c")


@pytest.mark.parametrize("raw", [[1, 2], "text", None, 5])
def test_foreign_json(raw: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    header = np.frombuffer(json.dumps(raw).encode(), dtype=np.uint8)
    changed(tmp_path / "c", lambda members: members.update(header=header))
    with pytest.raises(InputError, match=r"shard\.npz, field 'format': got .*, expected 'dsim-corpus'"):
        Corpus(tmp_path / "c")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99])
def test_a_truncated_npz(share: float, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    file = tmp_path / "c" / "shard-000006" / "shard.npz"
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(InputError, match=r"shard-000006/shard\.npz: is no corpus shard \(.+\)$"):
        Corpus(tmp_path / "c")


def test_flipped_bytes_in_the_npz(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    file = tmp_path / "c" / "shard-000006" / "shard.npz"
    data = bytearray(file.read_bytes())
    at = data.index(b"log_z.npy") + 60
    data[at : at + 8] = bytes(value ^ 0xFF for value in data[at : at + 8])
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"shard-000006/shard\.npz: is no corpus shard"):
        Corpus(tmp_path / "c")


@pytest.mark.parametrize("name", ["shard.npz", "features.npy"])
def test_missing_files(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    (tmp_path / "c" / "shard-000006" / name).unlink()
    with pytest.raises(InputError, match=r"shard-000006/shard\.npz: is no corpus shard \(.*No such file"):
        Corpus(tmp_path / "c")


def test_an_array_instead_of_an_archive(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    shard = tmp_path / "c" / "shard-000006"
    shutil.copy(shard / "features.npy", shard / "shard.npz")
    with pytest.raises(InputError, match="is no corpus shard"):
        Corpus(tmp_path / "c")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda features: features.astype(np.float32), r"float32\[\d+, 3, 32\]"),
        (lambda features: features[:-1], r"float16\[\d+, 3, 32\]"),
        (lambda features: features[:, :2], r"float16\[\d+, 2, 32\]"),
        (lambda features: features[:, 0], r"float16\[\d+, 32\]"),
    ],
)
def test_other_features(make: Callable[[Any], Any], found: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    file = tmp_path / "c" / "shard-000006" / "features.npy"
    np.save(file, make(np.load(file)))
    with pytest.raises(
        InputError, match=rf"features\.npy, field 'shape': got '{found}', expected float16\[\d+, 3, H\]"
    ):
        Corpus(tmp_path / "c")


def test_features_of_another_width(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    file = tmp_path / "c" / "shard-000006" / "features.npy"
    np.save(file, np.load(file)[:, :, :16])
    with pytest.raises(InputError, match=r"features\.npy, field 'shape'.*expected float16\[N, m \+ 1, 32\]"):
        Corpus(tmp_path / "c")


def test_truncated_features(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    file = tmp_path / "c" / "shard-000006" / "features.npy"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(InputError, match=r"shard-000006.*is no corpus shard"):
        Corpus(tmp_path / "c")
