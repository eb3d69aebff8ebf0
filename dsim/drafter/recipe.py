"""A training from text to drafter as one validated TOML file, and the folders that its text lives in."""

from __future__ import annotations

import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsim.drafter.drafter import FINAL, DrafterConfig
from dsim.drafter.target import Target
from dsim.drafter.train import Recipe
from dsim.errors import InputError
from dsim.files import cache_dir


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_Model = TypeVar("_Model", bound=_Section)


class TextSection(_Section):
    """The text: prompts that the target answers, in three parts that share no prompt.

    Attributes
    ----------
    train, vocabulary, calibration
        Prompts to train on; others of the same split, before them in its order, whose answers only choose the draft
        vocabulary; and prompts for held-out curves and calibration.
    temperature
        Of the sampling, and so of the drafter.
    max_new_tokens, max_prompt_tokens
        Answers are cut at the first, longer prompts are refused.
    taps
        Layers whose states are kept (0 = embedding); the final state is always kept.
    shard, rows
        Prompts a shard, and sequences decoded at once.
    seed
        Of prompts and sampling.
    """

    train: int = Field(default=2816, ge=1)
    vocabulary: int = Field(default=768, ge=1)
    calibration: int = Field(default=512, ge=1)
    temperature: float = Field(default=0.6, gt=0)
    max_new_tokens: int = Field(default=256, ge=2)
    max_prompt_tokens: int = Field(default=256, ge=1)
    taps: list[int] = [2, 11, 20, 29]
    shard: int = Field(default=256, ge=1)
    rows: int = Field(default=96, ge=1)
    seed: int = Field(default=0, ge=0)

    def check(self) -> None:
        """Raise InputError where a part is no whole number of shards: it would depend on what the cache holds."""
        for name in ("train", "vocabulary", "calibration"):
            if getattr(self, name) % self.shard:
                expected = f"a multiple of text.shard ({self.shard})"
                raise InputError(field=f"text.{name}", value=getattr(self, name), expected=expected)


class DrafterSection(_Section):
    """The drafter's architecture; see `DrafterConfig`."""

    kind: str = "dspark"
    head: str = "markov"
    gamma: int = Field(default=7, ge=1)
    layers: int = Field(default=2, ge=1)
    rank: int = Field(default=128, ge=0)
    vocabulary: int = Field(default=8192, ge=1)
    taps: list[int] = [2, 11, 20, 29, FINAL]


class ConfidenceSection(_Section):
    """The fit of the confidence head at the end (`dsim.drafter.confidence`).

    Attributes
    ----------
    sequences
        Answers to fit it on, of those that the draft vocabulary was chosen by; 0: it stays as it was trained.
    seed
        Of the drafts.
    """

    sequences: int = Field(default=256, ge=0)
    seed: int = Field(default=0, ge=0)


class RecipeFile(_Section):
    """A whole recipe."""

    target: str = "smollm2"
    text: TextSection = TextSection()
    drafter: DrafterSection = DrafterSection()
    training: Recipe = Recipe()
    confidence: ConfidenceSection = ConfidenceSection()

    def config(self, target: Target) -> DrafterConfig:
        """The drafter's description for a target.

        Raises
        ------
        InputError
            The parts contradict each other, or the target.
        """
        drafter = self.drafter
        for tap in drafter.taps:
            if tap != FINAL and tap not in self.text.taps:
                expected = f"layers of text.taps, {self.text.taps}, or {FINAL}"
                raise InputError(
                    "the text does not hold this layer", field="drafter.taps", value=tap, expected=expected
                )
        sequential = drafter.kind == "dspark"
        return DrafterConfig(
            kind=drafter.kind,
            gamma=drafter.gamma,
            layers=drafter.layers,
            taps=tuple(drafter.taps),
            head=drafter.head,
            rank=drafter.rank if sequential else 0,
            vocab_size=min(drafter.vocabulary, target.vocab_size),
            temperature=self.text.temperature,
            shape=target.shape,
            target=target.name,
            fingerprint=target.fingerprint,
        )


def recipe_path(name: str) -> Path:
    """A recipe file, or the shipped one of that name.

    Raises
    ------
    InputError
        There is neither; the shipped names are listed.
    """
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise InputError("is not there", file=path, field="recipe")
        return path
    folder = Path(str(resources.files("experiments") / "recipes"))
    known = sorted(file.stem for file in folder.glob("*.toml"))
    if name not in known:
        raise InputError(field="recipe", value=name, expected=f"a .toml file, or one of {', '.join(known)}")
    return folder / f"{name}.toml"


def load_recipe(name: str, overrides: dict[str, Any]) -> RecipeFile:
    """Read a recipe; `overrides` are dotted keys ("training.anchors") that replace its values.

    Raises
    ------
    InputError
        Not TOML, unknown keys, values out of range: by name.
    """
    path = recipe_path(name)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not TOML ({error})", file=path) from None
    for key, value in overrides.items():
        *sections, last = key.split(".")
        place = raw
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise InputError(field=key, value=value, expected="a key of the recipe")
        place[last] = value
    return _validated(RecipeFile, raw, path)


def text_section(**values: Any) -> TextSection:
    """A `TextSection`; InputError by name where a value is out of range."""
    return _validated(TextSection, values)


def _validated(model: type[_Model], raw: Any, file: Path | None = None) -> _Model:
    try:
        # As JSON: in Python's strict mode pydantic takes no table for a dataclass.
        return model.model_validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        inner = first.get("ctx", {}).get("error")
        if isinstance(inner, InputError):  # from the checks of a dataclass
            raise InputError(
                inner.message, file=file, field=f"{where}.{inner.field}", value=inner.value, expected=inner.expected
            ) from None
        value = None if first["type"] == "missing" else first["input"]
        # A dataclass's word for what sections call an extra input.
        unknown = first["type"] == "unexpected_keyword_argument"
        what = "Extra inputs are not permitted" if unknown else first["msg"]
        raise InputError(what, file=file, field=where, value=value) from None


def text_folder(target: Target, text: TextSection, split: str) -> Path:
    """Where a split's shards are kept: in the cache, one folder for all text made alike.

    The first shards of more prompts are those of fewer, so recipes share them. What is not as in `TextSection` is in
    the folder's name.
    """
    usual = TextSection()
    parts = [f"{split}-t{text.temperature:g}"]
    for name in ("max_new_tokens", "shard", "seed", "taps"):
        value = getattr(text, name)
        if value != getattr(usual, name):
            parts.append(name + "_".join(map(str, value)) if isinstance(value, list) else f"{name}{value}")
    return cache_dir() / "corpus" / target.fingerprint / "-".join(parts)
