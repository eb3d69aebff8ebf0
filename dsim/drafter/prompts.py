"""Prompts for the small model that a draft is trained on: generated ones, a user's own, and their splits.

A generated prompt is a template with its slots filled from word lists and small integers, and now and then an ending
that asks for another form of answer. Templates and lists are in ``prompts_math``, ``prompts_code`` and
``prompts_chat``; all sentences were written for this project.

A slot is one of

``{table}``
    An entry of that table, another one at each place where the text has it. ``{Table}`` starts with a capital.
``{table1}``
    The same, but one entry for all places with this digit.
``{2..9}``, ``{5..95/5}``, ``{a:2..9}``
    An integer of the range, in steps of the number behind the slash; with a letter, ``{a}`` repeats it.
    A capital, ``{A:2..9}``, only sets the letter and shows nothing.
``{=a*b+1}``
    An expression of such letters.
``{this|that}``
    One of the alternatives.

An entry of a table may have slots itself. ``a(n)`` becomes "a" or "an" by the word that follows.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from dsim.drafter import prompts_chat, prompts_code, prompts_math
from dsim.errors import InputError
from dsim.strictjson import RepeatedKeyError, distinct

DOMAINS = ("math", "code", "chat")
SPLITS = ("train", "calibration", "evaluation")

_FRACTIONS = (0.8, 0.1, 0.1)
_CONTENT = {"math": prompts_math, "code": prompts_code, "chat": prompts_chat}
_WORDS = (8, 120)  # fewest and most words of a generated prompt
_PLAIN = 0.45  # share of prompts without an ending
_TRIES = 20_000  # draws in a row that find nothing new before a domain counts as used up
_DOMAIN_NAME = re.compile(r"[a-z0-9_-]+")
_NAME_EXPECTED = "a name of the characters a-z, 0-9, _ and -"
_SLOT = re.compile(
    r"\{(?:(?P<letter>[A-Za-z]):)?(?P<low>-?\d+)\.\.(?P<high>-?\d+)(?:/(?P<step>\d+))?\}"
    r"|\{=(?P<expression>[a-z0-9+*/%() -]+)\}"
    r"|\{(?P<table>[A-Za-z_]+)(?P<bind>\d?)\}"
    r"|\{(?P<choices>[^\s{}|][^{}|\n]*(?:\|[^{}|\n]*)+)\}"
)
_ARTICLE = re.compile(r"\b([Aa])\(n\)(\s+[\"'(]?)(us|uni|URL|\w)")


@dataclass(frozen=True)
class Prompt:
    """One user turn.

    Parameters
    ----------
    domain
        ``"math"``, ``"code"`` or ``"chat"`` for generated prompts; whatever name the user gave for others.
    text
        What the user says.
    shape
        Short, stable name of the template, and of its ending behind a ``+``: ``"math/discount+show3"``.
    """

    domain: str
    text: str
    shape: str


@dataclass(frozen=True)
class _Template:
    shape: str
    text: str
    endings: tuple[str, ...]
    ending_name: str


@dataclass
class _Filling:
    """What the slots of one prompt have been filled with so far."""

    rng: random.Random
    letters: dict[str, int] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)

    def below(self, count: int) -> int:
        # Only random() is promised to give the same numbers in every version of Python.
        return int(self.rng.random() * count)

    def entry(self, table: str) -> str:
        entries = _tables()[table]
        found = entries[self.below(len(entries))]
        for _ in range(8):
            if (table, found) not in self.used:
                break
            found = entries[self.below(len(entries))]
        self.used.add((table, found))
        return self.fill(found)

    def fill(self, text: str) -> str:
        return _SLOT.sub(self._slot, text)

    def _slot(self, match: re.Match[str]) -> str:
        if match["low"] is not None:
            low, high, step = int(match["low"]), int(match["high"]), int(match["step"] or 1)
            number = low + step * self.below((high - low) // step + 1)
            letter = match["letter"] or ""
            if letter:
                self.letters[letter.lower()] = number
            return "" if letter.isupper() else str(number)
        if match["expression"] is not None:
            # The expressions are those of the templates in this package; no user's text gets here.
            return str(eval(_code(match["expression"]), {"__builtins__": {}}, self.letters))
        if match["choices"] is not None:
            choices = match["choices"].split("|")
            return choices[self.below(len(choices))]
        name, bind = match["table"], match["bind"]
        if len(name) == 1:
            return str(self.letters[name])
        table = name.lower()
        key = table + bind
        text = self.bound[key] if bind and key in self.bound else self.entry(table)
        if bind:
            self.bound[key] = text
        return text[0].upper() + text[1:] if name[0].isupper() else text


def generate_prompts(count: int, *, seed: int, split: str, domains: Sequence[str] = DOMAINS) -> list[Prompt]:
    """Distinct prompts of one split, the domains in turn.

    The split of a text is decided by a hash of the text, so no text is ever in two splits, whatever the seeds and
    the counts are.

    Parameters
    ----------
    count
        How many, 1 or more. More prompts of the same seed begin with the same ones.
    seed
        Any integer.
    split
        ``"train"`` (80 % of all texts), ``"calibration"`` or ``"evaluation"`` (10 % each).
    domains
        Which domains, in the order in which they take turns.

    Raises
    ------
    InputError
        Unknown split or domain, a domain twice, a count below 1, or more prompts than the templates can give.

    Examples
    --------
    >>> [prompt.domain for prompt in generate_prompts(4, seed=1, split="train")]
    ['math', 'code', 'chat', 'math']
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(field="count", value=count, expected="an integer >= 1")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(field="seed", value=seed, expected="an integer")
    if split not in SPLITS:
        raise InputError("unknown split", field="split", value=split, expected=f"one of {', '.join(SPLITS)}")
    if isinstance(domains, str) or not domains:
        raise InputError(field="domains", value=domains, expected=f"a list with some of {', '.join(DOMAINS)}")
    for domain in domains:
        if domain not in DOMAINS:
            raise InputError("unknown domain", field="domains", value=domain, expected=f"one of {', '.join(DOMAINS)}")
    if len(set(domains)) < len(domains):
        raise InputError(field="domains", value=list(domains), expected="each domain once")
    streams = [_draws(domain, seed, split) for domain in domains]
    seen: set[bytes] = set()
    found: list[Prompt] = []
    for number in range(count):
        turn = number % len(streams)
        for _ in range(_TRIES):
            prompt = next(streams[turn])
            key = _digest(0, prompt.text)
            if key not in seen and SPLITS[_part(key, _FRACTIONS)] == split:
                break
        else:
            raise InputError(
                f"the templates give no more than {number // len(streams)} distinct prompts of the domain "
                f"'{domains[turn]}' in the split '{split}'",
                field="count",
                value=count,
                expected="fewer prompts",
            )
        seen.add(key)
        found.append(prompt)
    return found


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a user's prompts from a JSONL file.

    Parameters
    ----------
    path
        One JSON object a line, UTF-8: ``{"prompt": "..."}`` or
        ``{"messages": [{"role": "user", "content": "..."}]}`` with exactly one message, and with or without
        ``"domain": "..."`` (characters a-z, 0-9, _ and -; ``"user"`` if left out).

    Returns
    -------
    list of Prompt
        In the order of the file, the texts unchanged.

    Raises
    ------
    InputError
        With file, line, field, value and what was expected, at the first thing that is wrong.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", file=path, expected="a JSONL file with one prompt a line"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", file=path, line=data[: error.start].count(b"\n") + 1) from None
    lines = text.split("\n")
    if not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InputError("has no prompts", file=path, expected="one JSON object a line")
    prompts: list[Prompt] = []
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        prompt = _parse_line(line, path, number)
        if prompt.text in first:
            raise InputError(
                f"the same prompt as in line {first[prompt.text]}",
                file=path,
                line=number,
                field="prompt",
                value=_short(prompt.text),
                expected="each prompt once",
            )
        first[prompt.text] = number
        prompts.append(prompt)
    return prompts


def split_prompts(
    prompts: Iterable[Prompt], *, seed: int = 0, fractions: tuple[float, float, float] = _FRACTIONS
) -> dict[str, list[Prompt]]:
    """Divide prompts among the splits by a hash of each text, so that no text is in two of them.

    Parameters
    ----------
    prompts
        In each split they keep their order.
    seed
        Another seed, another division. Seed 0 is that of `generate_prompts`.
    fractions
        Expected share of train, calibration and evaluation, each above 0, sum 1.

    Raises
    ------
    InputError
        Fractions that are not such, or a split that comes out empty.
    """
    expected = "three shares above 0 with the sum 1: train, calibration, evaluation"
    numbers = all(isinstance(share, int | float) and 0 < share < 1 for share in fractions)
    if len(fractions) != len(SPLITS) or not numbers or not math.isclose(sum(fractions), 1, abs_tol=1e-9):
        raise InputError(field="fractions", value=fractions, expected=expected)
    parts: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
    total = 0
    for prompt in prompts:
        parts[SPLITS[_part(_digest(seed, prompt.text), fractions)]].append(prompt)
        total += 1
    for split, part in parts.items():
        if not part:
            raise InputError(
                f"the split '{split}' comes out empty",
                field="prompts",
                value=total,
                expected="more prompts, larger fractions or another seed",
            )
    return parts


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """16 hex digits that name these prompts: their domains and texts, in this order.

    >>> prompts_hash([Prompt("user", "Say hello to the people in the room.", "user")])
    'e43d95554f26ac1f'
    """
    state = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        for part in (prompt.domain, prompt.text):
            data = part.encode()
            state.update(len(data).to_bytes(8, "little"))
            state.update(data)
    return state.hexdigest()


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _digest(seed: int, text: str) -> bytes:
    return hashlib.blake2b(f"{seed}\n{_normal(text)}".encode(), digest_size=16).digest()


def _part(digest: bytes, fractions: Sequence[float]) -> int:
    """The index of the split: where the hash, read as a number from 0 to 1, falls among the fractions."""
    unit = (int.from_bytes(digest[:8], "little") >> 11) / 2**53
    if unit < fractions[0]:
        return 0
    return 1 if unit < fractions[0] + fractions[1] else 2


def _draws(domain: str, seed: int, split: str) -> Iterator[Prompt]:
    rng = random.Random(f"prompts/{domain}/{split}/{seed}")
    templates = _templates(domain)
    while True:
        filling = _Filling(rng)
        template = templates[filling.below(len(templates))]
        text, shape = filling.fill(template.text), template.shape
        if template.endings and rng.random() >= _PLAIN:
            number = filling.below(len(template.endings))
            gap = "\n\n" if "\n" in template.text else " "  # an ending never runs into a snippet
            text = f"{text}{gap}{filling.fill(template.endings[number])}"
            shape = f"{shape}+{template.ending_name}{number + 1}"
        text = _ARTICLE.sub(_article, text)
        if _WORDS[0] <= len(text.split()) <= _WORDS[1]:
            yield Prompt(domain, text, shape)


def _article(match: re.Match[str]) -> str:
    return match[1] + ("n" if match[3] in "aeiouAEIOU" else "") + match[2] + match[3]


@cache
def _code(expression: str) -> CodeType:
    return compile(expression, "<slot>", "eval")


@cache
def _tables() -> Mapping[str, tuple[str, ...]]:
    tables: dict[str, tuple[str, ...]] = {}
    for module in _CONTENT.values():
        listed = {name: tuple(part.strip() for part in text.split(";")) for name, _, text in _blocks(module.TABLES)}
        for name, entries in {**listed, **getattr(module, "SNIPPETS", {})}.items():
            if name in tables or not all(entries) or len(set(entries)) < len(entries):
                raise RuntimeError(f"table '{name}': twice, or with an entry that is empty or there twice")
            tables[name] = entries
    return tables


@cache
def _templates(domain: str) -> tuple[_Template, ...]:
    module = _CONTENT[domain]
    endings = {name: tuple(part.strip() for part in text.split(";")) for name, _, text in _blocks(module.ENDINGS)}
    found = []
    for name, ending, text in _blocks(module.TEMPLATES):
        text = text.replace("\\n", "\n")
        found.append(_Template(f"{domain}/{name}", text, endings[ending] if ending else (), ending))
    if len({template.shape for template in found}) < len(found):
        raise RuntimeError(f"domain '{domain}': two templates of one name")
    return tuple(found)


def _blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, ending, text) of each block ``name @ending: text``; lines that go on with a block are indented."""
    for block in re.split(r"\n(?=\S)", text.strip("\n")):
        head, _, body = block.partition(":")
        name, _, ending = head.partition("@")
        yield name.strip(), ending.strip(), " ".join(body.split())


def _parse_line(line: str, path: str | Path, number: int) -> Prompt:
    def error(field: str | None, value: object, expected: str, message: str | None = None) -> InputError:
        return InputError(message, file=path, line=number, field=field, value=_short(value), expected=expected)

    expected = 'a JSON object like {"prompt": "..."}'
    try:
        found = json.loads(line, object_pairs_hook=distinct)
    except RepeatedKeyError as repeated:
        raise error(repeated.key, None, "each key once", "key is there twice") from None
    except (ValueError, RecursionError):
        raise error(None, line.strip(), expected, "is not valid JSON" if line.strip() else "is blank") from None
    if not isinstance(found, dict):
        raise error(None, found, expected)
    for key in found:
        if key not in ("prompt", "messages", "domain"):
            raise error(key, found[key], "only prompt or messages, and domain", "unknown key")
    if ("prompt" in found) == ("messages" in found):
        raise error("prompt", None, "either 'prompt' or 'messages'", "both" if "prompt" in found else "missing")
    name, text = "prompt", found.get("prompt")
    if "messages" in found:
        name, text = "messages", _user_content(found["messages"], error)
    if not isinstance(text, str) or not text.strip():
        raise error(name, "null" if text is None else text, "text that is not blank")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise error(name, ascii(text), "text without half of a surrogate pair")
    domain = found.get("domain", "user")
    if not isinstance(domain, str) or not _DOMAIN_NAME.fullmatch(domain):
        raise error("domain", "null" if domain is None else domain, _NAME_EXPECTED)
    return Prompt(domain, text, domain)


def _user_content(messages: Any, error: Any) -> Any:
    expected = 'one message, {"role": "user", "content": "..."}'
    if not isinstance(messages, list) or len(messages) != 1:
        what = f"{len(messages)} messages" if isinstance(messages, list) else messages
        raise error("messages", "null" if what is None else what, expected)
    message = messages[0]
    if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] != "user":
        raise error("messages", "null" if message is None else message, expected)
    return message["content"]


def _short(value: object) -> object:
    return value if not isinstance(value, str) or len(value) <= 60 else value[:57] + "..."
