"""Prompts: fixed by seed and split, never in two splits, varied; a user's file is read or refused with its place."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from dsim.drafter import prompts as prompts_module
from dsim.drafter.prompts import (
    DOMAINS,
    SPLITS,
    Prompt,
    generate_prompts,
    prompts_hash,
    read_prompts,
    split_prompts,
)
from dsim.errors import InputError

# Enough of them that every template and nearly every ending has come up.
TRAIN = 12_000


@pytest.fixture(scope="module")
def train() -> list[Prompt]:
    return generate_prompts(TRAIN, seed=3, split="train")


def normal(text: str) -> str:
    return " ".join(text.casefold().split())


def template(prompt: Prompt) -> str:
    return prompt.shape.split("+")[0]


# Generated prompts


def test_the_same_seed_gives_the_same_prompts() -> None:
    first = generate_prompts(300, seed=5, split="evaluation")
    assert generate_prompts(300, seed=5, split="evaluation") == first
    other = generate_prompts(300, seed=6, split="evaluation")
    assert len({p.text for p in first} & {p.text for p in other}) < 30


def test_the_prompts_of_a_seed_never_change() -> None:
    # Drafts were trained on these: a change of the templates or of the draws must be a decision.
    assert prompts_hash(generate_prompts(500, seed=0, split="train")) == "1423d89e1b82f33b"


def test_more_prompts_begin_with_fewer(train: list[Prompt]) -> None:
    assert generate_prompts(701, seed=3, split="train") == train[:701]


def test_one_domain_gives_its_part_of_all_domains(train: list[Prompt]) -> None:
    assert generate_prompts(50, seed=3, split="train", domains=["chat"]) == train[2:150:3]


def test_domains_take_turns_in_the_given_order(train: list[Prompt]) -> None:
    assert [p.domain for p in train] == list(DOMAINS) * (TRAIN // 3)
    found = generate_prompts(5, seed=1, split="train", domains=("chat", "math"))
    assert [p.domain for p in found] == ["chat", "math", "chat", "math", "chat"]


def test_texts_are_distinct_even_when_case_and_spaces_are_ignored(train: list[Prompt]) -> None:
    assert len({normal(p.text) for p in train}) == TRAIN


def test_splits_share_no_text_whatever_the_seeds() -> None:
    texts = {
        split: {normal(p.text) for seed in range(3) for p in generate_prompts(400, seed=seed, split=split)}
        for split in SPLITS
    }
    assert not texts["train"] & texts["calibration"]
    assert not texts["train"] & texts["evaluation"]
    assert not texts["calibration"] & texts["evaluation"]


def test_splits_of_generated_prompts_are_those_of_split_prompts_with_seed_0() -> None:
    found = [p for split in SPLITS for p in generate_prompts(200, seed=9, split=split)]
    assert split_prompts(found) == {split: found[200 * i : 200 * i + 200] for i, split in enumerate(SPLITS)}


def test_every_domain_has_many_templates_that_all_come_up(train: list[Prompt]) -> None:
    used = Counter(template(p) for p in train)
    for domain in DOMAINS:
        names = {t.shape for t in prompts_module._templates(domain)}
        assert len(names) >= 120
        assert {name for name in used if name.startswith(f"{domain}/")} == names
        assert len({p.shape for p in train if p.domain == domain}) >= 400
        assert max(used[name] for name in names) < 0.02 * TRAIN / 3
    assert len(used) >= 400


def test_prompts_have_8_to_120_words_and_no_open_slot(train: list[Prompt]) -> None:
    for prompt in train:
        assert 8 <= len(prompt.text.split()) <= 120, prompt
        assert not re.search(r"\{[A-Za-z_]{2,}\d?\}|\.\.\d|\{=|\ba\(n\)|\s\s(?!\s)\S", prompt.text.split("\n")[0]), (
            prompt
        )
        assert prompt.text == prompt.text.strip()


def test_articles_fit_the_next_word(train: list[Prompt]) -> None:
    # English spelling only; words like "user" and "one" have a vowel that is not heard.
    for prompt in train:
        if "\n" not in prompt.text and prompt.domain == "chat":
            assert not re.search(r"\b[Aa] [aeio](?!ne\b)|\b[Aa]n [bcdfgjkpqtvwyz]", prompt.text), prompt


def test_every_slot_of_every_entry_can_be_filled() -> None:
    # A misspelt table name in a rare entry would stop a long run, so all of them are tried.
    texts = [entry for entries in prompts_module._tables().values() for entry in entries]
    for domain in DOMAINS:
        for found in prompts_module._templates(domain):
            texts += found.endings
            for seed in range(3):
                prompts_module._Filling(random.Random(seed)).fill(found.text)
    for text in texts:
        prompts_module._Filling(random.Random(0), letters={"a": 5, "b": 7}).fill(text)


@pytest.mark.parametrize("each", [6000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_there_are_enough_train_prompts(each: int) -> None:
    found = generate_prompts(3 * each, seed=0, split="train")
    assert Counter(p.domain for p in found) == dict.fromkeys(DOMAINS, each)


def test_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"fruit": ("apple", "pear"), "meal": ("soup with {fruit}",)}
    monkeypatch.setattr(prompts_module, "_tables", lambda: tables)

    def fill(text: str) -> str:
        return prompts_module._Filling(random.Random(1)).fill(text)

    assert fill("{a:7..7} and {a} make {=2*a+1}") == "7 and 7 make 15"
    assert fill("{B:4..4}{=b*b}") == "16"
    assert {prompts_module._Filling(random.Random(i)).fill("{5..15/5}") for i in range(50)} == {"5", "10", "15"}
    assert {prompts_module._Filling(random.Random(i)).fill("{-1..0}") for i in range(50)} == {"-1", "0"}
    assert {prompts_module._Filling(random.Random(i)).fill("{on|off}") for i in range(50)} == {"on", "off"}
    assert sorted(fill("{fruit} {fruit}").split()) == ["apple", "pear"]
    assert len(set(fill("{fruit1} {fruit1} {fruit1}").split())) == 1
    assert fill("{Meal}") in ("Soup with apple", "Soup with pear")
    assert fill("f(x) { return x; } {}") == "f(x) { return x; } {}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "field 'count': got 0, expected an integer >= 1"),
        ({"count": True}, "field 'count': got True, expected an integer >= 1"),
        ({"count": 1.5}, "field 'count': got 1.5, expected an integer >= 1"),
        ({"seed": "a"}, "field 'seed': got 'a', expected an integer"),
        (
            {"split": "test"},
            "field 'split': unknown split, got 'test', expected one of train, calibration, evaluation",
        ),
        ({"domains": ["math", "law"]}, "field 'domains': unknown domain, got 'law', expected one of math, code, chat"),
        ({"domains": []}, "field 'domains': got [], expected a list with some of math, code, chat"),
        ({"domains": "math"}, "field 'domains': got 'math', expected a list with some of math, code, chat"),
        ({"domains": ["math", "math"]}, "field 'domains': got ['math', 'math'], expected each domain once"),
    ],
)
def test_what_cannot_be_generated(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        generate_prompts(**{"count": 3, "seed": 1, "split": "train", **changes})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_templates_that_are_used_up_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (prompts_module._Template("math/few", "Please add the numbers {1..9} and {1..9} for me.", (), ""),)
    monkeypatch.setattr(prompts_module, "_templates", lambda _: few)
    monkeypatch.setattr(prompts_module, "_TRIES", 2000)
    with pytest.raises(InputError) as caught:
        generate_prompts(82, seed=1, split="train", domains=["math"])
    match = re.fullmatch(
        r"field 'count': the templates give no more than (\d+) distinct prompts of the domain 'math' in the split "
        r"'train', got 82, expected fewer prompts",
        str(caught.value),
    )
    assert match
    available = int(match[1])
    assert 50 < available < 80  # about 80 % of 81
    assert len(generate_prompts(available, seed=2, split="train", domains=["math"])) == available


# A user's prompts


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def test_reading_both_forms(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mine.jsonl",
        {"prompt": "What is a tide?"},
        {"prompt": " What is an ebb?\n", "domain": "sea_1-b"},
        {"messages": [{"role": "user", "content": "Où est la mer\u2028?"}], "domain": "fr"},
    )
    assert read_prompts(file) == [
        Prompt("user", "What is a tide?", "user"),
        Prompt("sea_1-b", " What is an ebb?\n", "sea_1-b"),
        Prompt("fr", "Où est la mer\u2028?", "fr"),
    ]


def test_raw_line_separators_a_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode())
    assert [p.text for p in read_prompts(str(file))] == ["a\u2028b", "c"]


EXPECTED_LINE = 'expected a JSON object like {"prompt": "..."}'
EXPECTED_NAME = "expected a name of the characters a-z, 0-9, _ and -"
EXPECTED_MESSAGE = 'expected one message, {"role": "user", "content": "..."}'
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2: is not valid JSON, got '{oops', " + EXPECTED_LINE),
        ("", "line 2: is blank, got '', " + EXPECTED_LINE),
        (["x"], "line 2: got ['x'], " + EXPECTED_LINE),
        ('"x"', "line 2: got 'x', " + EXPECTED_LINE),
        ("[" * 100_000, "line 2: is not valid JSON, got '" + "[" * 57 + "...', " + EXPECTED_LINE),
        (
            {"prompt": "x", "text": 1},
            "line 2, field 'text': unknown key, got 1, expected only prompt or messages, and domain",
        ),
        ('{"prompt": "x", "prompt": "y"}', "line 2, field 'prompt': key is there twice, expected each key once"),
        ({"domain": "x"}, "line 2, field 'prompt': missing, expected either 'prompt' or 'messages'"),
        (
            {"prompt": "x", "messages": [USER]},
            "line 2, field 'prompt': both, expected either 'prompt' or 'messages'",
        ),
        ({"prompt": " \n"}, "line 2, field 'prompt': got ' \\n', expected text that is not blank"),
        ({"prompt": None}, "line 2, field 'prompt': got 'null', expected text that is not blank"),
        ({"prompt": 5}, "line 2, field 'prompt': got 5, expected text that is not blank"),
        (
            '{"prompt": "\\ud800"}',
            "line 2, field 'prompt': got \"'\\\\ud800'\", expected text without half of a surrogate pair",
        ),
        ({"prompt": "x", "domain": "My Own"}, f"line 2, field 'domain': got 'My Own', {EXPECTED_NAME}"),
        ({"prompt": "x", "domain": ""}, f"line 2, field 'domain': got '', {EXPECTED_NAME}"),
        ({"prompt": "x", "domain": "a\n"}, f"line 2, field 'domain': got 'a\\n', {EXPECTED_NAME}"),
        ({"prompt": "x", "domain": None}, f"line 2, field 'domain': got 'null', {EXPECTED_NAME}"),
        ({"messages": []}, f"line 2, field 'messages': got '0 messages', {EXPECTED_MESSAGE}"),
        ({"messages": [USER, USER]}, f"line 2, field 'messages': got '2 messages', {EXPECTED_MESSAGE}"),
        ({"messages": "hi"}, f"line 2, field 'messages': got 'hi', {EXPECTED_MESSAGE}"),
        ({"messages": None}, f"line 2, field 'messages': got 'null', {EXPECTED_MESSAGE}"),
        ({"messages": ["hi"]}, f"line 2, field 'messages': got 'hi', {EXPECTED_MESSAGE}"),
        ({"messages": [{"role": "user"}]}, f"line 2, field 'messages': got {{'role': 'user'}}, {EXPECTED_MESSAGE}"),
        (
            {"messages": [{**USER, "role": "system"}]},
            f"line 2, field 'messages': got {{'role': 'system', 'content': 'hi'}}, {EXPECTED_MESSAGE}",
        ),
        (
            {"messages": [{**USER, "content": ""}]},
            "line 2, field 'messages': got '', expected text that is not blank",
        ),
        (
            {"prompt": "first"},
            "line 2, field 'prompt': the same prompt as in line 1, got 'first', expected each prompt once",
        ),
        (
            {"messages": [{**USER, "content": "first"}]},
            "line 2, field 'prompt': the same prompt as in line 1, got 'first', expected each prompt once",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    file = write(tmp_path / "mine.jsonl", {"prompt": "first"}, line, {"prompt": "last"})
    with pytest.raises(InputError) as caught:
        read_prompts(file)
    assert str(caught.value) == f"{file}, {message}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", ": has no prompts, expected one JSON object a line"),
        (b'{"prompt": "x"}\n\xff\n', ", line 2: is not UTF-8 text"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_prompts(file)
    assert str(caught.value) == f"{file}{message}"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "none.jsonl"
    with pytest.raises(InputError) as caught:
        read_prompts(file)
    expected = "cannot be read (No such file or directory), expected a JSONL file with one prompt a line"
    assert str(caught.value) == f"{file}: {expected}"


def own(count: int) -> list[Prompt]:
    return [Prompt("user", f"Tell me about number {i}, please.", "user") for i in range(count)]


def test_own_prompts_are_divided_once_each_and_in_order() -> None:
    prompts = own(5000)
    place = {prompt: number for number, prompt in enumerate(prompts)}
    parts = split_prompts(prompts)
    assert list(parts) == list(SPLITS)
    assert sorted((p for part in parts.values() for p in part), key=place.__getitem__) == prompts
    for part in parts.values():
        assert part == sorted(part, key=place.__getitem__)
    assert 3850 < len(parts["train"]) < 4150
    assert 400 < len(parts["calibration"]) < 600


def test_the_split_of_a_text_depends_on_the_text_and_the_seed_only() -> None:
    prompts = own(400)
    train = split_prompts(prompts)["train"]
    shouted = [Prompt("other", f"  {p.text.upper()} ", "x") for p in reversed(prompts)]
    assert [p.text.strip().casefold() for p in reversed(split_prompts(shouted)["train"])] == [
        p.text.casefold() for p in train
    ]
    assert split_prompts(prompts, seed=1)["train"] != train


def test_fractions_are_those_asked_for() -> None:
    parts = split_prompts(own(5000), fractions=(0.2, 0.3, 0.5))
    assert [round(len(part) / 5000, 1) for part in parts.values()] == [0.2, 0.3, 0.5]


@pytest.mark.parametrize(
    "fractions", [(0.8, 0.2), (0.8, 0.2, 0.0), (0.5, 0.2, 0.1), (1.2, -0.1, -0.1), (0.8, 0.1, "x")]
)
def test_bad_fractions(fractions: tuple[float, ...]) -> None:
    with pytest.raises(InputError) as caught:
        split_prompts(own(100), fractions=fractions)  # type: ignore[arg-type]
    expected = "three shares above 0 with the sum 1: train, calibration, evaluation"
    assert str(caught.value) == f"field 'fractions': got {fractions!r}, expected {expected}"


def test_an_empty_split_is_an_error() -> None:
    with pytest.raises(InputError) as caught:
        split_prompts([])
    expected = "the split 'train' comes out empty, got 0, expected more prompts, larger fractions or another seed"
    assert str(caught.value) == f"field 'prompts': {expected}"
    with pytest.raises(InputError, match=r"comes out empty, got 2, expected more prompts"):
        split_prompts(own(2))


# Hash


def test_the_hash_names_domains_texts_and_order() -> None:
    one, two = Prompt("user", "ab", "s"), Prompt("user", "c", "s")
    base = prompts_hash([one, two])
    assert re.fullmatch(r"[0-9a-f]{16}", base)
    assert prompts_hash([one, two]) == base
    assert prompts_hash([Prompt("user", "ab", "other"), two]) == base
    others = [
        [two, one],
        [one],
        [],
        [Prompt("user", "a", "s"), Prompt("user", "bc", "s")],
        [Prompt("chat", "ab", "s"), two],
        [Prompt("use", "rab", "s"), two],
    ]
    assert len({prompts_hash(found) for found in others} | {base}) == 7
