"""The training script from its command line, on the tiny target: files, going on, and what is refused before work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from dsim.drafter.build import drafter_hash, read_drafter
from dsim.drafter.corpus import Corpus
from dsim.drafter.drafter import FINAL
from dsim.drafter.recipe import load_recipe
from dsim.drafter.tiny import tiny_target
from dsim.drafter.train import Trainer
from dsim.errors import InputError
from experiments import train_drafter

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "target": '"tiny"',
    "text.train": "24",
    "text.vocabulary": "12",
    "text.calibration": "12",
    "text.shard": "12",
    "text.max_new_tokens": "24",
    "text.taps": "[0, 1, 3]",
    "drafter.taps": "[1, 3, -1]",
    "drafter.gamma": "3",
    "drafter.layers": "1",
    "drafter.rank": "4",
    "drafter.vocabulary": "28",
    "training.anchors": "160",
    "training.anchors_per_sequence": "8",
}
FILES = ["drafter.safetensors", "learning_curve.csv", "learning_curve.png", "learning_curve.svg", "recipe.toml"]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the text of all tests here; and one thread."""
    folder, before = tmp_path_factory.mktemp("cache"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSIM_CACHE_DIR", str(folder))
        yield folder
    torch.set_num_threads(before)


def run(out: Path | None, *options: str, **changes: str | None) -> None:
    """The script with the tiny recipe; `changes` have __ for the dot, None takes a key out."""
    keys = {**TINY, **{key.replace("__", "."): value for key, value in changes.items()}}
    sets = [part for key, value in keys.items() if value is not None for part in ("--set", f"{key}={value}")]
    where = [] if out is None else ["--out", str(out)]
    train_drafter.main([*sets, "--jobs", "1", *where, *options])


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from start to end."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(out)
    return out


def without_clock(out: Path) -> pd.DataFrame:
    return pd.read_csv(out / "learning_curve.csv").drop(columns="seconds")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_starting_from_another_drafter(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--start", str(whole / "drafter.safetensors"), drafter__head='"rnn"')
    _, about = read_drafter(tmp_path / "out" / "drafter.safetensors", tiny_target())
    assert about.training["started_from"]["head"] == "markov"
    # Without --start the checkpoint is another training's.
    with pytest.raises(InputError, match="began with the weights of another drafter"):
        run(tmp_path / "out", drafter__head='"rnn"')


# -- what comes out ---------------------------------------------------------------------------------------


def test_the_files(whole: Path) -> None:
    assert names(whole) == ["checkpoint.safetensors", *FILES]
    curve = pd.read_csv(whole / "learning_curve.csv")
    expected = [
        "anchors",
        "seconds",
        "tau_teacher",
        "ce",
        "tv",
        "confidence",
        "blocks",
        "alpha_1",
        "alpha_2",
        "alpha_3",
    ]
    assert curve.columns.tolist() == expected
    assert curve["anchors"].is_monotonic_increasing
    assert 160 <= curve["anchors"].iloc[-1] < 180
    assert curve.filter(like="alpha_").stack().between(0, 1).all()


def test_the_drafter(whole: Path) -> None:
    target = tiny_target()
    drafter, about = read_drafter(whole / "drafter.safetensors", target)
    config = drafter.config
    assert (config.kind, config.head, config.gamma, config.rank, config.vocab_size) == ("dspark", "markov", 3, 4, 28)
    assert (config.taps, config.temperature) == ((1, 3, FINAL), 0.6)
    assert 0 in drafter.vocabulary_head.tokens  # the end token
    assert about.temperatures == ()
    assert about.training["device"] == "cpu"
    assert 0.7 < about.training["vocabulary_mass"] <= 1
    assert about.training["recipe"]["anchors"] == 160
    assert about.training["corpus"]["sequences"] == 24
    # Half precision, and no optimizer state.
    assert (whole / "drafter.safetensors").stat().st_size < (whole / "checkpoint.safetensors").stat().st_size / 4


def test_the_recipe_is_saved(whole: Path) -> None:
    saved = load_recipe(str(whole / "recipe.toml"), {})
    assert saved.training.anchors == 160
    assert saved.text.taps == [0, 1, 3]
    assert saved.training.learning_rate == load_recipe("quick", {}).training.learning_rate


def test_the_text(whole: Path, cache: Path) -> None:
    folders = sorted(path.name for path in (cache / "corpus" / tiny_target().fingerprint).iterdir())
    assert folders[0].startswith("calibration-t0.6-max_new_tokens24-shard12")
    assert folders[-1].startswith("train-t0.6-max_new_tokens24-shard12")
    for name, count in ((folders[0], 12), (folders[-1], 36)):
        corpus = Corpus(cache / "corpus" / tiny_target().fingerprint / name)
        assert len(corpus) == count
        assert corpus.header.domains == ("math", "code", "chat")


def test_the_same_command_goes_on(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (whole / name).read_bytes() for name in FILES}
    run(whole)
    shown = capsys.readouterr().out
    assert "goes on from" in shown
    assert ", done; " in shown
    assert {name: (whole / name).read_bytes() for name in FILES} == before


# -- broken off -------------------------------------------------------------------------------------------


def steps_take(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A clock that goes by the steps, not by how often it is asked: threads of other tests ask it, too."""
    clock, real = [0.0], Trainer.train_step

    def step(self: Trainer) -> Any:
        clock[0] += seconds
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", step)
    monkeypatch.setattr(train_drafter.time, "monotonic", lambda: clock[0])


def test_stopped_after_some_minutes(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps_take(monkeypatch, 20.0)
    run(tmp_path / "out", "--minutes", "1")
    assert "not done: the same command goes on" in capsys.readouterr().out
    assert names(tmp_path / "out") == ["checkpoint.safetensors", *FILES]
    part = pd.read_csv(tmp_path / "out" / "learning_curve.csv")
    assert part["anchors"].iloc[-1] < 80
    monkeypatch.undo()
    run(tmp_path / "out")
    assert "goes on from" in capsys.readouterr().out
    same_result(tmp_path / "out", whole)


def test_a_deadline_ends_a_whole_training(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A second a step: sixty steps of some fifteen anchors.
    clock, real, rates = [0.0], Trainer.train_step, []

    def step(self: Trainer) -> Any:
        losses = real(self)
        clock[0] += 1.0
        rates.append(self.optimizer.param_groups[0]["lr"])
        return losses

    monkeypatch.setattr(Trainer, "train_step", step)
    monkeypatch.setattr(train_drafter.time, "monotonic", lambda: clock[0])
    run(tmp_path / "out", "--minutes", "1", training__anchors="100000", training__warmup="0.0")
    assert len(rates) == 60
    usual = load_recipe("quick", {}).training.learning_rate
    assert rates[:47] == [usual] * 47
    assert rates[-1] < usual / 10
    assert "not done: the same command goes on from " in capsys.readouterr().out
    training = read_drafter(tmp_path / "out" / "drafter.safetensors", tiny_target())[1].training
    assert training["confidence"]["drafts"] > 0
    assert 0.7 < training["fell_from"] / training["anchors"] < 0.9
    # The curve ends with the drafter that was written.
    assert pd.read_csv(tmp_path / "out" / "learning_curve.csv")["anchors"].iloc[-1] == training["anchors"]


def same_result(out: Path, other: Path) -> None:
    pd.testing.assert_frame_equal(without_clock(out), without_clock(other))
    found = [drafter_hash(read_drafter(folder / "drafter.safetensors", tiny_target())[0]) for folder in (out, other)]
    assert found[0] == found[1]


def test_stopped_before_the_first_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps_take(monkeypatch, 61.0)
    run(tmp_path / "out", "--minutes", "1", training__anchors="100000")
    assert "no measurement yet" in capsys.readouterr().out
    assert names(tmp_path / "out") == ["checkpoint.safetensors", "drafter.safetensors", "recipe.toml"]


def test_interrupted(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Trainer.train_step

    def step(self: Trainer) -> Any:
        if self.step == 4:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", step)
    monkeypatch.setitem(Trainer.run.__kwdefaults__, "every_s", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out")
    assert names(tmp_path / "out") == ["checkpoint.safetensors"]
    monkeypatch.undo()
    run(tmp_path / "out")
    same_result(tmp_path / "out", whole)


def test_fresh(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "out", training__anchors="32", training__seed="3")
    with pytest.raises(InputError, match="field 'seed': was trained otherwise, got 3, expected 0"):
        run(tmp_path / "out")
    run(tmp_path / "out", "--fresh")
    assert "goes on from" not in capsys.readouterr().out
    same_result(tmp_path / "out", whole)


def test_text_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "out", "--text-only")
    assert capsys.readouterr().out.startswith("text: ")
    assert not (tmp_path / "out").exists()


def test_the_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(None, drafter__kind="eagle3", drafter__head="none", training__anchors="16")
    assert names(tmp_path / "results" / "train_drafter" / "eagle3-none") == ["checkpoint.safetensors", *FILES]


# -- own prompts ------------------------------------------------------------------------------------------

OWN: dict[str, str | None] = {"text__train": None, "text__calibration": None, "text__vocabulary": "12"}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"Tell me about the number {i * 7}.", "domain": "numbers"}) for i in range(60)]
    file.write_text("\n".join(lines))
    return file


def test_own_prompts(prompts: Path, tmp_path: Path) -> None:
    options = ("--prompts", str(prompts), "--text", str(tmp_path / "text"))
    run(tmp_path / "out", *options, training__anchors="32", **OWN)
    assert names(tmp_path / "text") == ["calibration", "train"]
    train, held_out = (Corpus(tmp_path / "text" / split) for split in ("train", "calibration"))
    assert train.header.domains == ("numbers",)
    assert len(train) > 4 * len(held_out)
    assert len(train) + len(held_out) < 60  # the rest is for evaluation
    assert {train[i].index for i in range(len(train))} == set(range(len(train)))
    # The last 12 prompts or fewer chose the vocabulary.
    used = pd.read_csv(tmp_path / "out" / "learning_curve.csv")
    assert used["anchors"].iloc[-1] >= 32
    # Other prompts do not go into the same folder in silence.
    prompts.write_text(prompts.read_text().replace("number", "letter"))
    with pytest.raises(InputError, match="field 'prompts'"):
        run(tmp_path / "out", *options, training__anchors="32", **OWN)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (["--prompts", "FILE"], OWN, "field '--prompts, --text': own prompts need a text folder of their own"),
        (["--text", "TEXT"], {}, "field '--prompts, --text': own prompts need a text folder of their own"),
        (["--prompts", "FILE", "--text", "TEXT"], {}, "field 'text.train': does not apply to own prompts, got 24"),
        (
            ["--prompts", "FILE", "--text", "TEXT"],
            {"text__train": None},
            "field 'text.calibration': does not apply to own prompts, got 12",
        ),
        (
            ["--prompts", "FILE", "--text", "TEXT"],
            {**OWN, "text__vocabulary": "100"},
            "field 'text.vocabulary': leaves nothing to train on",
        ),
        (["--prompts", "absent.jsonl", "--text", "TEXT"], OWN, "absent.jsonl"),
    ],
)
def test_own_prompts_given_wrongly(
    options: list[str], changes: dict[str, str | None], message: str, prompts: Path, tmp_path: Path
) -> None:
    places = {"FILE": str(prompts), "TEXT": str(tmp_path / "text")}
    with pytest.raises(InputError) as error:
        run(tmp_path / "out", *(places.get(option, option) for option in options), **changes)
    assert message in str(error.value)
    assert names(tmp_path) == ["prompts.jsonl"]


# -- refused before any work ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__lerning_rate": "1"}, "field 'training.lerning_rate': Extra inputs are not permitted, got 1"),
        ({"training__anchors": "0"}, "field 'training.anchors': got 0, expected at least 1"),
        ({"training__warmup": "0.9"}, "field 'training.decay': got 0.2, expected warmup and decay together at most 1"),
        ({"training__seed": "-1"}, "field 'training.seed': got -1, expected at least 0"),
        ({"target": '"smollm3"'}, "field 'target': got 'smollm3', expected one of smollm2, tiny, hf:PATH"),
        ({"drafter__kind": "dflash"}, "field 'head': got 'markov', expected a sequential head for dspark, none other"),
        ({"drafter__head": "lstm"}, "field 'head': got 'lstm', expected one of none, markov, gated, rnn"),
        ({"drafter__taps": "[2]"}, "field 'drafter.taps': the text does not hold this layer, got 2, expected layers"),
        ({"text__taps": "[0, 1, 3, 9]"}, "field 'taps': got (0, 1, 3, 9), expected layers 0 to 3"),
        ({"text__train": "25"}, "field 'text.train': got 25, expected a multiple of text.shard (12)"),
        ({"text__temperature": "0"}, "field 'text.temperature'"),
    ],
)
def test_a_recipe_that_cannot_work(
    changes: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(InputError) as error:
        run(tmp_path / "out", **changes)
    assert message in str(error.value)
    # No text was made for it, and no folder.
    assert not list(tmp_path.rglob("shard-*"))
    assert not (tmp_path / "out").exists()


def test_text_that_was_made_otherwise_is_not_taken(prompts: Path, tmp_path: Path) -> None:
    options = ("--prompts", str(prompts), "--text", str(tmp_path / "text"), "--text-only")
    run(tmp_path / "out", *options, **OWN)
    for changes, message in (
        ({"text__max_new_tokens": "20"}, "field 'max_new_tokens': the text there was made otherwise, got 24, expected"),
        ({"text__temperature": "0.7"}, "field 'temperature': the text there was made otherwise, got 0.6"),
        ({"text__taps": "[1, 3]"}, r"field 'taps': the text there was made otherwise, got \(0, 1, 3\)"),
        ({"text__seed": "1"}, "field 'seed': the text there was made otherwise, got 0"),
    ):
        with pytest.raises(InputError, match=message):
            run(tmp_path / "out", *options, **{**OWN, **changes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "quik"], "expected a .toml file, or one of "),
        (["--set", "novalue"], "expected KEY=VALUE"),
        (["--minutes", "0"], "argument --minutes: got '0', expected an integer >= 1"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, InputError)) as stop:
        train_drafter.main(options)
    text = capsys.readouterr().err if stop.type is SystemExit else str(stop.value)
    assert message in text


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        train_drafter.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.count("--") > 10
    for part in ("--recipe NAME", "--minutes M", "Ten minutes on two cores", "--set drafter.kind=dflash"):
        assert part in shown


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "train_drafter.py"), "--set", "training.anchrs=3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "field 'training.anchrs'" in done.stderr
    assert not list(tmp_path.iterdir())
