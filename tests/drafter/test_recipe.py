"""Recipes: the shipped ones, overrides, and what is wrong with a file, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from dsim.drafter.drafter import FINAL
from dsim.drafter.recipe import RecipeFile, TextSection, load_recipe, recipe_path, text_folder, text_section
from dsim.drafter.target import LlamaTarget
from dsim.drafter.train import Recipe
from dsim.errors import InputError


@pytest.mark.parametrize("name", ["quick", "long"])
def test_shipped_recipes(name: str) -> None:
    recipe = load_recipe(name, {})
    assert recipe.target == "smollm2"
    assert (recipe.drafter.kind, recipe.drafter.head, recipe.drafter.gamma) == ("dspark", "markov", 7)
    assert set(recipe.drafter.taps) - {FINAL} <= set(recipe.text.taps)
    assert recipe.training.anchors >= 30_000
    recipe.text.check()
    assert recipe.text.train >= recipe.text.shard


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("")
    assert load_recipe(str(file), {}) == RecipeFile()
    assert RecipeFile().training == Recipe()


def test_a_saved_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("quick", {"training.anchors": 77, "drafter.taps": [2, -1], "text.temperature": 1.0})
    file = tmp_path / "again.toml"
    file.write_text(tomli_w.dumps(recipe.model_dump()))
    assert load_recipe(str(file), {}) == recipe


def test_overrides_win() -> None:
    recipe = load_recipe("quick", {"target": "tiny", "training.bf16": True, "text.temperature": 1})
    assert (recipe.target, recipe.training.bf16, recipe.text.temperature) == ("tiny", True, 1.0)
    assert recipe.training.anchors == load_recipe("quick", {}).training.anchors


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"training.lerning_rate": 1.0}, ("field 'training.lerning_rate'", "Extra inputs are not permitted")),
        ({"trainng.anchors": 1}, ("field 'trainng'", "Extra inputs are not permitted")),
        ({"training.anchors": "many"}, ("field 'training.anchors'", "valid integer", "got 'many'")),
        ({"training.anchors": 1.5}, ("field 'training.anchors'", "valid integer", "got 1.5")),
        ({"text.temperature": 0.0}, ("field 'text.temperature'", "greater than 0", "got 0.0")),
        ({"text.temperature": float("inf")}, ("field 'text.temperature'", "finite number", "got inf")),
        ({"training.anchors": 0}, ("field 'training.anchors'", "got 0", "expected at least 1")),
        ({"training.warmup": 0.9}, ("field 'training.decay'", "warmup and decay together at most 1")),
        ({"training.clip": float("nan")}, ("field 'training.clip'", "finite number", "got nan")),
        ({"text.seed": -1}, ("field 'text.seed'", "greater than or equal to 0", "got -1")),
        ({"text.train": 0}, ("field 'text.train'", "greater than or equal to 1", "got 0")),
        ({"text.taps": [1, "x"]}, ("field 'text.taps.1'", "valid integer", "got 'x'")),
        ({"drafter": 3}, ("field 'drafter'", "got 3")),
        ({"target.name": "x"}, ("field 'target.name'", "got 'x', expected a key of the recipe")),
    ],
)
def test_bad_values_by_name(overrides: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as error:
        load_recipe("quick", overrides)
    for part in parts:
        assert part in str(error.value)


def test_bad_files_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[training\nanchors = 1")
    with pytest.raises(InputError, match=f"{file}: is not TOML"):
        load_recipe(str(file), {})
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=f"{file}: is not TOML"):
        load_recipe(str(file), {})
    file.write_text('[drafter]\nkind = 3\n[text]\nwords = "few"')
    with pytest.raises(InputError, match=rf"{file}, field 'text.words': Extra inputs .*got 'few'"):
        load_recipe(str(file), {})
    with pytest.raises(InputError, match=r"absent\.toml, field 'recipe': is not there"):
        recipe_path("absent.toml")
    with pytest.raises(InputError, match=r"got 'quik', expected a .toml file, or one of gpu, long, quick"):
        recipe_path("quik")


def tiny_recipe(**changes: Any) -> RecipeFile:
    return load_recipe(
        "quick",
        {"target": "tiny", "text.taps": [0, 2, 3], "drafter.taps": [2, -1], **changes},
    )


def test_the_description_of_its_drafter(tiny: LlamaTarget) -> None:
    recipe = tiny_recipe(**{"drafter.rank": 5, "drafter.gamma": 3, "text.temperature": 0.7})
    config = recipe.config(tiny)
    assert (config.kind, config.head, config.rank, config.gamma, config.layers) == ("dspark", "markov", 5, 3, 2)
    assert (config.taps, config.temperature) == ((2, FINAL), 0.7)
    assert (config.target, config.fingerprint, config.shape) == (tiny.name, tiny.fingerprint, tiny.shape)
    # More tokens than the target has: all.
    assert config.vocab_size == 12
    assert tiny_recipe(**{"drafter.vocabulary": 8}).config(tiny).vocab_size == 8


def test_the_rank_belongs_to_the_head(tiny: LlamaTarget) -> None:
    recipe = tiny_recipe(**{"drafter.kind": "dflash", "drafter.head": "none"})
    assert recipe.config(tiny).rank == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"drafter.kind": "dflash"},
            "field 'head': got 'markov', expected a sequential head for dspark, none otherwise",
        ),
        ({"drafter.head": "none"}, "field 'head': got 'none', expected a sequential head for dspark, none otherwise"),
        ({"drafter.kind": "eagle3", "drafter.head": "none"}, "field 'layers': got 2, expected 1 for autoregressive"),
        (
            {"drafter.kind": "mtp", "drafter.head": "none", "drafter.layers": 1},
            "field 'taps': got (2, -1), expected (-1,)",
        ),
        ({"drafter.taps": [1]}, "field 'drafter.taps': the text does not hold this layer, got 1, expected layers of "),
        ({"drafter.taps": [7], "text.taps": [7]}, "field 'taps': got (7,), expected layers 0 to 3, or -1"),
        ({"drafter.gamma": 65}, "field 'gamma': got 65, expected 1 to 64"),
    ],
)
def test_parts_that_contradict_each_other_or_the_target(
    changes: dict[str, Any], message: str, tiny: LlamaTarget
) -> None:
    with pytest.raises(InputError) as error:
        tiny_recipe(**changes).config(tiny)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["train", "vocabulary", "calibration"])
def test_parts_of_the_text_are_whole_shards(name: str) -> None:
    text = TextSection(train=64, vocabulary=64, calibration=64, shard=32)
    text.check()
    with pytest.raises(InputError, match=rf"field 'text.{name}': got 40, expected a multiple of text.shard \(32\)"):
        text.model_copy(update={name: 40}).check()


def test_a_text_section_from_options() -> None:
    assert text_section(temperature=0.5).temperature == 0.5
    with pytest.raises(InputError, match="field 'temperature': Input should be greater than 0, got -1"):
        text_section(temperature=-1.0)
    with pytest.raises(InputError, match=r"field 'max_new_tokens': .* greater than or equal to 2, got 1"):
        text_section(max_new_tokens=1)


def test_folders_of_text(tiny: LlamaTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path))
    usual = text_folder(tiny, TextSection(), "train")
    assert usual == tmp_path / "corpus" / tiny.fingerprint / "train-t0.6"
    # How many prompts there are, and in how many rows they are decoded, is no matter.
    assert text_folder(tiny, TextSection(train=256, calibration=1, rows=7, max_prompt_tokens=9), "train") == usual
    others = [
        text_folder(tiny, TextSection(**changes), split)
        for changes, split in (
            ({}, "calibration"),
            ({"temperature": 1.0}, "train"),
            ({"max_new_tokens": 128}, "train"),
            ({"shard": 64}, "train"),
            ({"seed": 1}, "train"),
            ({"taps": [2, 11]}, "train"),
            ({"taps": []}, "train"),
        )
    ]
    assert len({usual, *others}) == 8
    assert text_folder(tiny, TextSection(shard=64, max_new_tokens=9), "x").name == "x-t0.6-max_new_tokens9-shard64"
    # What one recipe leaves in the cache does not stand in another's way.
    quick, long = (text_folder(tiny, load_recipe(name, {}).text, "train") for name in ("quick", "long"))
    assert quick != long
    assert long == usual
