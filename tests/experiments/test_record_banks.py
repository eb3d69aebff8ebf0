"""The recording script from its command line, on the tiny target: banks that replay, going on, bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dsim.drafter.build import DrafterFile, drafter_hash, read_drafter, write_drafter
from dsim.drafter.corpus import Corpus
from dsim.drafter.drafter import FINAL, DrafterConfig
from dsim.drafter.prompts import generate_prompts, prompts_hash, read_prompts, split_prompts
from dsim.drafter.target import LlamaTarget
from dsim.drafter.tiny import tiny_target
from dsim.drafter.train import new_drafter
from dsim.drafts import Bank, BankDrafts, read_bank, read_temperatures
from dsim.drafts.reliability import visited_rows
from dsim.errors import InputError
from dsim.scenario import Point, simulate
from dsim.schema import load_scenario
from experiments import record_banks

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--target", "tiny", "--prompts", "30", "--calibration", "12", "--shard", "12", "--max-new-tokens", "40"]
GAMMAS = {"dspark": 4, "mtp": 2}
OUTPUTS = ["banks.csv", "dspark.npz", "dspark.temperatures.json", "mtp.npz", "mtp.temperatures.json", "parts"]


def make(target: LlamaTarget, kind: str) -> Any:
    """An untrained drafter whose confidences say something."""
    config = DrafterConfig(
        kind=kind,
        gamma=GAMMAS[kind],
        layers=1,
        taps=(FINAL,) if kind == "mtp" else (1, 3, FINAL),
        head="markov" if kind == "dspark" else "none",
        rank=4 if kind == "dspark" else 0,
        vocab_size=30,
        temperature=0.6,
        shape=target.shape,
        target=target.name,
        fingerprint=target.fingerprint,
    )
    drafter = new_drafter(config, target, torch.arange(30), 0)
    with torch.no_grad():
        drafter.confidence.linear.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    return drafter


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the text of all tests here; and one thread."""
    folder, before = tmp_path_factory.mktemp("cache"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSIM_CACHE_DIR", str(folder))
        yield folder
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file for each of two drafters of different block sizes."""
    folder, target = tmp_path_factory.mktemp("drafters"), tiny_target()
    for kind in GAMMAS:
        drafter = make(target, kind)
        write_drafter(drafter, folder / f"{kind}.safetensors", DrafterFile(drafter.config, {"anchors": 5}))
    return {kind: folder / f"{kind}.safetensors" for kind in GAMMAS}


def run(out: Path, files: dict[str, Path], *options: str, deadline: float | None = None) -> None:
    given = [part for name, file in files.items() for part in ("--drafter", f"{name}={file}")]
    record_banks.main([*given, *OPTIONS, "--jobs", "1", "--out", str(out), *options], deadline=deadline)


@pytest.fixture(scope="module")
def recorded(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both drafters, recorded."""
    out = tmp_path_factory.mktemp("recorded") / "out"
    run(out, files)
    return out


def results(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}


# -- what comes out ---------------------------------------------------------------------------------------


def test_the_files(recorded: Path) -> None:
    assert sorted(path.name for path in recorded.iterdir()) == OUTPUTS
    table = pd.read_csv(recorded / "banks.csv")
    assert table["drafter"].tolist() == ["dspark", "mtp"]
    assert table.columns[:4].tolist() == ["drafter", "positions", "steps", "tau"]


@pytest.mark.parametrize("name", GAMMAS)
def test_the_header(name: str, recorded: Path, files: dict[str, Path]) -> None:
    bank = read_bank(recorded / f"{name}.npz")
    header, target = bank.header, tiny_target()
    drafter, _ = read_drafter(files[name], target)
    assert (header.gamma, header.kind, header.target, header.source) == (GAMMAS[name], "recorded", target.name, "dsim")
    assert header.drafter == {"dspark": "dspark markov 1 layers", "mtp": "mtp 1 layers"}[name]
    assert header.domains == ("math", "code", "chat")
    notes = json.loads(header.notes)
    assert notes["drafter_hash"] == drafter_hash(drafter)
    assert notes["target_fingerprint"] == target.fingerprint
    assert notes["prompts"] == prompts_hash(generate_prompts(30, seed=0, split="evaluation"))
    # Which texts answer which prompts.
    assert notes["prompts_asked"] - len(notes["left_out"]) == bank.domain.size
    assert (notes["temperature"], notes["trained_at_temperature"], notes["draws"]) == (0.6, 0.6, 1)
    assert (notes["seed"], notes["device"], notes["anchors"]) == (0, "cpu", 5)
    assert read_temperatures(recorded / f"{name}.temperatures.json", GAMMAS[name]) == header.temperatures


def test_what_a_drafter_began_from_and_its_file_with_temperatures(files: dict[str, Path], tmp_path: Path) -> None:
    target = tiny_target()
    drafter, about = read_drafter(files["mtp"], target)
    began = {"anchors": 3, "hash": "x"}
    write_drafter(drafter, tmp_path / "mtp.safetensors", replace(about, training={"anchors": 5, "started_from": began}))
    run(tmp_path / "out", {"mtp": tmp_path / "mtp.safetensors"}, "--with-drafters")
    header = read_bank(tmp_path / "out" / "mtp.npz").header
    assert json.loads(header.notes)["started_from"] == began
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("banks.csv", "mtp.npz", "mtp.safetensors", "mtp.temperatures.json", "parts")
    ]
    half, told = read_drafter(tmp_path / "out" / "mtp.safetensors", target)
    assert told.temperatures == header.temperatures
    for (name, value), other in zip(drafter.state_dict().items(), half.state_dict().values(), strict=True):
        np.testing.assert_array_equal(value.half().float(), other.float(), err_msg=name)


def test_all_banks_are_on_the_same_texts(recorded: Path) -> None:
    one, two = (read_bank(recorded / f"{name}.npz") for name in GAMMAS)
    np.testing.assert_array_equal(one.bounds, two.bounds)
    np.testing.assert_array_equal(one.domain, two.domain)
    assert np.diff(one.bounds).min() > 5
    assert 5 < len(one.domain) <= 30


def test_a_drafter_of_shorter_blocks_alone_gets_the_same_texts_if_asked(
    recorded: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    alone = {"mtp": files["mtp"]}
    run(tmp_path / "asked", alone, "--longest-block", str(max(GAMMAS.values())))
    assert (tmp_path / "asked" / "mtp.npz").read_bytes() == (recorded / "mtp.npz").read_bytes()
    run(tmp_path / "not", alone)
    assert len(read_bank(tmp_path / "not" / "mtp.npz").domain) > len(read_bank(recorded / "mtp.npz").domain)


@pytest.mark.parametrize("name", GAMMAS)
def test_every_row_that_replay_uses_was_recorded(name: str, recorded: Path) -> None:
    bank = read_bank(recorded / f"{name}.npz")
    for first, usable in zip(bank.bounds[:-1], bank.usable(), strict=True):
        rows = slice(first, first + usable)
        # Zeros stand where nothing was recorded: alpha 0, and a logit of 0 in the middle of the 256 bytes.
        nothing = (np.abs(bank.confidence_bytes[rows] - 127.5) < 1) & (bank.alpha_bytes[rows] == 0)
        assert not nothing.all(axis=1).any()


@pytest.mark.parametrize("name", GAMMAS)
def test_the_table_is_what_decoding_with_full_verification_gives(name: str, recorded: Path) -> None:
    bank = read_bank(recorded / f"{name}.npz")
    row = pd.read_csv(recorded / "banks.csv").set_index("drafter").loc[name]
    visited = visited_rows(bank.accepted, bank.bounds, bank.usable())
    assert row["positions"] == bank.usable().sum()
    assert row["steps"] == visited.size
    assert row["tau"] == pytest.approx(1 + bank.accepted[visited].mean())
    assert row["alpha_1"] == pytest.approx(bank.alpha[visited, 0].mean(), abs=2e-3)
    second = visited[bank.accepted[visited] >= 1]
    assert row["alpha_2"] == pytest.approx(bank.alpha[second, 1].mean(), abs=2e-3)


def test_a_scenario_replays_it(recorded: Path) -> None:
    small = {
        "load.users": [4],
        "load.scored_min": 8,
        "load.scored_per_user": 1,
        "measure.seeds": 1,
        "drafters.dspark.bank": str(recorded / "dspark.npz"),
        "drafts.source": "recorded",
        "drafts.gamma": 4,
    }
    scenario = load_scenario("decode-node", small)
    row = simulate(scenario, Point("dspark", 0, users=4)).row
    assert row["drafts_source"] == BankDrafts(read_bank(recorded / "dspark.npz"), seed=0).label
    assert row["drafts_source"].startswith("recorded:dsim:dspark markov 1 layers")
    assert 1 < row["accepted_length"] < 5


# -- the same bytes ---------------------------------------------------------------------------------------


def test_twice_the_same_bytes(recorded: Path, files: dict[str, Path], tmp_path: Path) -> None:
    run(tmp_path / "out", files)
    assert results(tmp_path / "out") == results(recorded)
    # Parts are there: nothing is recorded again.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").rglob("*.npz")}
    run(tmp_path / "out", files)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert results(tmp_path / "out") == results(recorded)


def test_broken_off_and_gone_on_with(
    recorded: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The size of the parts is no matter, so small ones will do.
    monkeypatch.setattr(record_banks, "PART", 5)
    real, calls = record_banks.record_part, []

    def record_part(*args: Any, **options: Any) -> None:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(args)
        real(*args, **options)

    monkeypatch.setattr(record_banks, "record_part", record_part)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", files)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["parts"]
    assert len(list((tmp_path / "out").rglob("*.npz"))) == 3
    monkeypatch.setattr(record_banks, "record_part", real)
    run(tmp_path / "out", files)
    assert results(tmp_path / "out") == results(recorded)


def test_more_prompts_go_on_where_fewer_ended(
    recorded: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_banks, "PART", 5)
    # 22 prompts of the 30 that there is text for.
    run(tmp_path / "out", files, "--prompts", "22")
    few = read_bank(tmp_path / "out" / "dspark.npz")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("part-*.npz")}
    run(tmp_path / "out", files)
    assert results(tmp_path / "out") == results(recorded)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    many = read_bank(tmp_path / "out" / "dspark.npz")
    assert len(few.domain) < len(many.domain)
    rows = few.accepted.size
    np.testing.assert_array_equal(many.accepted[:rows], few.accepted)


def test_other_draws_seeds_and_drafters_are_other_work(files: dict[str, Path], recorded: Path, tmp_path: Path) -> None:
    one = {"dspark": files["dspark"]}
    kept = {}
    for name, options in (("plain", []), ("seed", ["--seed", "1"]), ("draws", ["--draws", "2"])):
        run(tmp_path / "out", one, *options)
        kept[name] = read_bank(tmp_path / "out" / "dspark.npz")
    both = read_bank(recorded / "dspark.npz")
    # Alone the same tokens as among others (numbers that went through other matrix shapes may round otherwise).
    np.testing.assert_array_equal(kept["plain"].accepted, both.accepted)
    assert np.abs(kept["plain"].alpha_bytes.astype(int) - both.alpha_bytes).max() <= 1
    assert not np.array_equal(kept["seed"].accepted, both.accepted)
    assert len(kept["draws"].domain) == 2 * len(both.domain)
    np.testing.assert_array_equal(kept["draws"].domain, np.repeat(both.domain, 2))
    np.testing.assert_array_equal(np.diff(kept["draws"].bounds), np.repeat(np.diff(both.bounds), 2))
    assert len(list((tmp_path / "out" / "parts").iterdir())) == 6


@pytest.mark.slow
def test_several_answers_a_prompt(files: dict[str, Path], tmp_path: Path) -> None:
    given = {"dspark": files["dspark"]}
    run(tmp_path / "one", given, "--prompts", "6")
    run(tmp_path / "three", given, "--prompts", "6", "--answers", "3")
    one, three = (read_bank(tmp_path / name / "dspark.npz") for name in ("one", "three"))
    notes = json.loads(three.header.notes)
    assert (notes["prompts_asked"], notes["answers"]) == (6, 3)
    assert notes["prompts"] == json.loads(one.header.notes)["prompts"]
    assert set(notes["left_out"]) <= set(range(18))
    assert three.domain.size == 18 - len(notes["left_out"])
    kept = [i for i in range(18) if i not in notes["left_out"]]
    assert three.domain.tolist() == [i % 6 % 3 for i in kept]
    # The first answers are those of before, the others are other texts.
    assert three.accepted[: one.accepted.size].tolist() == one.accepted.tolist()
    lengths = {i: int(n) for i, n in zip(kept, np.diff(three.bounds), strict=True)}
    assert any(lengths.get(i) != lengths.get(i + 6) for i in range(6))
    # What is kept of other counts is another folder: all of it again, byte by byte.
    run(tmp_path / "again", given, "--prompts", "6", "--answers", "3")
    assert results(tmp_path / "three") == results(tmp_path / "again")


def test_two_processes(files: dict[str, Path], recorded: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", files, "--jobs", "2")
    assert results(tmp_path / "out") == results(recorded)


# -- until a deadline -------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the parts move, by ten seconds each; parts of three texts."""
    now, real = [0.0], record_banks.record_part

    def record_part(*args: Any, **options: Any) -> None:
        real(*args, **options)
        now[0] += 10.0

    monkeypatch.setattr(record_banks, "PART", 3)
    monkeypatch.setattr(record_banks, "record_part", record_part)
    monkeypatch.setattr(record_banks.time, "monotonic", lambda: now[0])
    return now


def without_notes(bank: Bank, *names: str) -> tuple[Any, ...]:
    notes = json.loads(bank.header.notes)
    for name in names:
        del notes[name]
    arrays = (bank.confidence_bytes, bank.alpha_bytes, bank.accepted, bank.bounds, bank.domain)
    return [array.tobytes() for array in arrays], replace(bank.header, notes=json.dumps(notes))


def test_a_deadline_leaves_the_bank_of_fewer_prompts(
    files: dict[str, Path], recorded: Path, tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "cut", files, deadline=60.0)
    # Four parts of the 30 prompts and two of the 12.
    assert clock[0] == 60
    cut = {name: read_bank(tmp_path / "cut" / f"{name}.npz") for name in GAMMAS}
    notes = json.loads(cut["dspark"].header.notes)
    (asked, wanted), (calibrated, of) = (notes["cut_by_deadline"][split] for split in ("evaluation", "calibration"))
    assert (wanted, of) == (30, 12)
    assert notes["prompts"] == prompts_hash(generate_prompts(asked, seed=0, split="evaluation"))
    assert f"the time was up: {asked} of 30 prompts of the split 'evaluation' were recorded" in capsys.readouterr().out
    run(tmp_path / "few", files, "--prompts", str(asked), "--calibration", str(calibrated))
    for name, bank in cut.items():
        assert bank.domain.size == 12
        few = read_bank(tmp_path / "few" / f"{name}.npz")
        assert without_notes(bank, "cut_by_deadline") == without_notes(few)
    # Without a deadline the same command goes on to the end.
    run(tmp_path / "cut", files)
    assert results(tmp_path / "cut") == results(recorded)


def test_a_deadline_that_is_past_leaves_a_part_of_each_split(
    files: dict[str, Path], tmp_path: Path, clock: list[float]
) -> None:
    run(tmp_path / "out", files, deadline=-5.0)
    assert clock[0] == 20
    assert read_bank(tmp_path / "out" / "mtp.npz").domain.size == 3


def test_a_deadline_is_for_one_answer_a_prompt(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'--answers': recording to a deadline has one answer a prompt, got 2"):
        run(tmp_path / "out", files, "--answers", "2", deadline=10_000.0)


def test_a_deadline_that_is_far_changes_nothing(
    files: dict[str, Path], recorded: Path, tmp_path: Path, clock: list[float]
) -> None:
    run(tmp_path / "out", files, deadline=10_000.0)
    assert results(tmp_path / "out") == results(recorded)


# -- own prompts ------------------------------------------------------------------------------------------


def own_file(folder: Path, count: int = 120, what: str = "number") -> Path:
    file = folder / "own.jsonl"
    lines = [json.dumps({"prompt": f"Tell me about the {what} {i * 7}.", "domain": "own"}) for i in range(count)]
    file.write_text("\n".join(lines))
    return file


def test_own_prompts(files: dict[str, Path], tmp_path: Path) -> None:
    file, text = own_file(tmp_path), tmp_path / "text"
    parts = split_prompts(read_prompts(file), seed=0)
    own = ("--prompts-file", str(file), "--text", str(text))
    run(tmp_path / "out", files, *own)
    assert sorted(path.name for path in text.iterdir()) == ["calibration", "evaluation"]
    header = read_bank(tmp_path / "out" / "dspark.npz").header
    notes = json.loads(header.notes)
    assert header.domains == ("own",)
    count = len(parts["evaluation"])
    assert 2 < count < 30
    assert notes["prompts_asked"] == count
    assert notes["prompts"] == prompts_hash(parts["evaluation"])
    assert len(Corpus(text / "calibration")) == min(12, len(parts["calibration"]))
    # Fewer of them if asked; not those of the generator, whose work has the same options.
    run(tmp_path / "out", files, *own, "--prompts", "2")
    notes = json.loads(read_bank(tmp_path / "out" / "mtp.npz").header.notes)
    assert notes["prompts"] == prompts_hash(parts["evaluation"][:2])
    run(tmp_path / "out", files)
    assert read_bank(tmp_path / "out" / "mtp.npz").header.domains == ("math", "code", "chat")
    assert len(list((tmp_path / "out" / "parts").iterdir())) == 4


def test_own_prompts_with_several_answers(files: dict[str, Path], tmp_path: Path) -> None:
    own = ("--prompts-file", str(own_file(tmp_path)), "--text", str(tmp_path / "text"), "--prompts", "3")
    run(tmp_path / "out", files, *own, "--answers", "2")
    notes = json.loads(read_bank(tmp_path / "out" / "mtp.npz").header.notes)
    assert (notes["prompts_asked"], notes["answers"]) == (3, 2)
    corpus = Corpus(tmp_path / "text" / "evaluation-2answers-to3")
    asked = [corpus[i].tokens[: corpus[i].prompt].tolist() for i in range(6)]
    assert asked[:3] == asked[3:]


def test_own_prompts_are_split_as_the_training_did(files: dict[str, Path], tmp_path: Path) -> None:
    target = tiny_target()
    for name, seed in (("one", 1), ("two", 2)):
        drafter, about = read_drafter(files["mtp"], target)
        write_drafter(drafter, tmp_path / name, replace(about, training={"corpus": {"seed": seed}}))
    own = ("--prompts-file", str(own_file(tmp_path)), "--text", str(tmp_path / "text"))
    run(tmp_path / "out", {"one": tmp_path / "one"}, *own)
    notes = json.loads(read_bank(tmp_path / "out" / "one.npz").header.notes)
    split = [split_prompts(read_prompts(tmp_path / "own.jsonl"), seed=seed)["evaluation"] for seed in (0, 1)]
    assert notes["prompts"] == prompts_hash(split[1]) != prompts_hash(split[0])
    assert notes["text_seed"] == 1
    with pytest.raises(InputError, match="field '--drafter': the drafters were trained with several seeds of the text"):
        run(tmp_path / "out", {"one": tmp_path / "one", "two": tmp_path / "two"}, *own)


def test_own_prompts_that_were_changed_are_noticed(files: dict[str, Path], tmp_path: Path) -> None:
    own = ("--prompts-file", str(own_file(tmp_path)), "--text", str(tmp_path / "text"))
    run(tmp_path / "out", files, *own)
    own_file(tmp_path, what="letter")
    # Fewer than the shard holds, so that its hash does not tell.
    with pytest.raises(InputError, match="text/evaluation, field 'prompts': answers other prompts, got 'answer 0'"):
        run(tmp_path / "out", files, *own, "--prompts", "2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts-file", "FILE"], "field '--prompts-file, --text': own prompts need a text folder of their own"),
        (["--text", "TEXT"], "field '--prompts-file, --text': own prompts need a text folder of their own"),
        (["--prompts-file", "absent.jsonl", "--text", "TEXT"], "absent.jsonl: cannot be read"),
        (
            ["--prompts-file", "FILE", "--text", "TEXT"],
            "own.jsonl, field '--prompts-file': the split 'evaluation' comes out empty, got 2, expected more prompts",
        ),
    ],
)
def test_own_prompts_given_wrongly(options: list[str], message: str, files: dict[str, Path], tmp_path: Path) -> None:
    places = {"FILE": str(own_file(tmp_path, count=2)), "TEXT": str(tmp_path / "text")}
    with pytest.raises(InputError) as error:
        run(tmp_path / "out", files, *(places.get(option, option) for option in options))
    assert message in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.jsonl"]


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["dspark"], "field '--drafter': got 'dspark', expected NAME=FILE"),
        (["=FILE"], "field '--drafter': got '=FILE', expected NAME=FILE"),
        (["dspark="], "field '--drafter': got 'dspark=', expected NAME=FILE"),
        (["a/b=FILE"], "field '--drafter': got 'a/b=FILE', expected NAME=FILE"),
        (["a=FILE", "a=FILE"], "field '--drafter': got 'a=FILE', expected 'a' once"),
        (["a=absent.safetensors"], "absent.safetensors: is not there"),
    ],
)
def test_drafters_given_wrongly(given: list[str], message: str, tmp_path: Path) -> None:
    drafters = [part for text in given for part in ("--drafter", text)]
    with pytest.raises(InputError) as error:
        record_banks.main([*drafters, *OPTIONS, "--out", str(tmp_path / "out")])
    assert str(error.value) == message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0"], "field 'temperature': Input should be greater than 0, got 0.0"),
        (["--temperature", "nan"], "field 'temperature': Input should be a finite number, got nan"),
        (["--seed", "-1"], "field '--seed': got -1, expected 0 or more"),
        (["--max-new-tokens", "1"], "field 'max_new_tokens': Input should be greater than or equal to 2, got 1"),
        (["--taps", "9"], "field 'taps': got (9,), expected layers 0 to 3"),
        (["--target", "tony"], "field 'target': got 'tony', expected one of smollm2, tiny, hf:PATH"),
        (["--max-new-tokens", "5"], "field '--prompts': no answer has more than 5 tokens, got 30"),
    ],
)
def test_values_that_make_no_sense(options: list[str], message: str, files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        run(tmp_path / "out", files, *options)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_drafter_of_another_target(tmp_path: Path) -> None:
    drafter = make(tiny_target(seed=1), "mtp")
    write_drafter(drafter, tmp_path / "other.safetensors", DrafterFile(drafter.config))
    with pytest.raises(
        InputError, match=r"other.safetensors, field 'fingerprint': was made for tiny-1 .*not for tiny-0"
    ):
        run(tmp_path / "out", {"x": tmp_path / "other.safetensors"})
    assert not (tmp_path / "out").exists()


def test_text_for_fewer_prompts_is_not_taken_for_more(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    run(tmp_path / "out", files, "--prompts", "10")
    with pytest.raises(InputError, match="shard-000000, field 'prompts': holds fewer prompts, got 10, expected 12"):
        run(tmp_path / "out", files)
    for shard in (tmp_path / "cache").rglob("evaluation*/shard-000000"):
        shutil.rmtree(shard)
    run(tmp_path / "out", files)


def test_a_damaged_part_is_named(recorded: Path, files: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(recorded, tmp_path / "out")
    part = next((tmp_path / "out" / "parts").rglob("part-*.npz"))
    part.write_bytes(part.read_bytes()[:-40])
    with pytest.raises(InputError, match=f"{part}: is no recording of 'dspark'"):
        run(tmp_path / "out", files)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --drafter"),
        (["--drafter", "a=b", "--taps", "1,x"], "argument --taps: got '1,x', expected layers as in 2,11,20"),
        (["--drafter", "a=b", "--prompts", "0"], "argument --prompts: got '0', expected an integer >= 1"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        record_banks.main(options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        record_banks.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--drafter NAME=FILE", "--draws N", "Example: python experiments/record_banks.py"):
        assert part in shown


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    script = str(ROOT / "experiments" / "record_banks.py")
    done = subprocess.run(
        [sys.executable, script, "--target", "tiny", "--drafter", "a=absent.safetensors"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "error: absent.safetensors: is not there\n")
    assert not list(tmp_path.iterdir())
