"""Several drafters trained, measured and timed by one command, on the tiny target."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dsim.drafter.build import read_drafter
from dsim.drafter.tiny import tiny_target
from dsim.drafter.train import Trainer
from dsim.drafts import read_bank
from dsim.errors import InputError
from experiments import draft_length, drafter_depth, drafter_study, gpu_drafters, record_banks, train_drafter

RECIPE = """
target = "tiny"
[text]
train = 16
vocabulary = 16
calibration = 16
temperature = 1.0
max_new_tokens = 40
taps = [1, 3]
shard = 16
rows = 16
[drafter]
gamma = 3
layers = 1
rank = 4
vocabulary = 28
taps = [1, 3, -1]
[training]
anchors = 200
anchors_per_sequence = 8
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe that takes a second, its text in a cache of its own."""
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "study.toml"
    file.write_text(RECIPE)
    return str(file)


def test_study_makes_the_tables_that_the_reports_read(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "study"
    command = ["--recipe", recipe, "--anchors", "64", "--drafters", "dspark,dflash", "--depths", "1,2"]
    command += ["--lengths", "2,3", "--prompts", "24", "--repeats", "3", "--jobs", "1", "--out", str(out)]
    drafter_study.main(command)
    depth, length = pd.read_csv(out / "depth.csv"), pd.read_csv(out / "length.csv")
    assert set(zip(depth["drafter"], depth["layers"], strict=True)) == {
        (drafter, layers) for drafter in ("dspark", "dflash") for layers in (1, 2)
    }
    assert set(length["gamma"]) == {2, 3}
    for table in (depth, length):
        assert ((table["tau_low"] <= table["tau"]) & (table["tau"] <= table["tau_high"])).all()
        assert (table["tau"] > 1).all()
        assert (table["tau"] < table["gamma"] + 1).all()
    # The mean over domains is just that.
    own = depth[(depth["drafter"] == "dflash") & (depth["layers"] == 2)].set_index("domain")
    assert np.isclose(own.loc["all", "tau"], own.drop("all")["tau"].mean())
    # A drafter of both studies is one drafter.
    both = [t[(t["drafter"] == "dspark") & (t["layers"] == 1) & (t["gamma"] == 3)]["tau"] for t in (depth, length)]
    assert both[0].tolist() == both[1].tolist()
    timings = pd.read_csv(out / "latency.csv")
    assert (timings.loc[timings["head"] == "none", "head_ms"] == 0).all()
    assert (timings["draft_ms"] > 0).all()
    assert (timings["verify_ms"] > 0).all()

    before = (out / "depth.csv").read_bytes()
    kept = sorted(out.glob("*/measured.npz"))
    assert len(kept) == 6
    whole = bytearray(kept[0].read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    kept[0].write_bytes(whole)
    np.savez(kept[1], key=np.array("another drafter's"))
    recorded: list[Any] = []
    real = drafter_study.record_text
    monkeypatch.setattr(drafter_study, "record_text", lambda *a, **k: recorded.append(0) or real(*a, **k))
    drafter_study.main(command)  # all is there: only what is damaged, or of another drafter, is measured again
    assert (out / "depth.csv").read_bytes() == before
    assert len(recorded) == sum(np.load(file)["blocks"].size for file in kept[:2])
    recorded.clear()
    drafter_study.main(command)
    assert not recorded
    fewer = [{"24": "21"}.get(word, word) for word in command]
    drafter_study.main(fewer)  # other texts
    assert len(recorded) == sum(np.load(file)["blocks"].size for file in kept)
    recorded.clear()
    kept[1].write_bytes(kept[0].read_bytes())  # another drafter's, on the same texts
    drafter_study.main(fewer)
    assert len(recorded) == np.load(kept[1])["blocks"].size > 0

    drafter_depth.main(["--results", str(out / "depth.csv"), "--out", str(tmp_path / "depth")])
    draft_length.main(
        ["--results", str(out / "length.csv"), "--latency", str(out / "latency.csv"), "--out", str(tmp_path / "length")]
    )
    assert (tmp_path / "depth" / "drafter_depth.png").is_file()
    assert (tmp_path / "length" / "draft_length.png").is_file()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--drafters", "dspark,medusa", "--drafters': got 'medusa'"),
        ("--drafters", "dspark,dspark", "each once"),
        ("--depths", "1,x", "--depths"),
        ("--depths", "0", "--depths"),
        ("--lengths", "3,3", "distinct integers"),
    ],
)
def test_study_bad_input(option: str, value: str, message: str, recipe: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        drafter_study.main(["--recipe", recipe, option, value, "--out", str(tmp_path / "study")])


def test_gpu_script_runs_on_a_cpu(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "gpu"
    command = ["--recipe", recipe, "--anchors", "64", "--prompts", "24", "--calibration", "16"]
    gpu_drafters.main([*command, "--device", "cpu", "--jobs", "1", "--out", str(out)])
    dspark, dflash = (read_bank(out / "banks" / f"{name}.npz") for name in ("dspark", "dflash"))
    assert dspark.header.drafter.startswith("dspark markov")
    assert dflash.header.drafter.startswith("dflash")
    assert dspark.bounds.tolist() == dflash.bounds.tolist()
    assert '"device": "cpu"' in dspark.header.notes


def test_gpu_script_ends_training_in_time_to_record(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []
    real = train_drafter.train

    def train(*args: Any, deadline: float | None = None, **options: Any) -> None:
        asked.append(deadline)
        # Past already: one step is made, and what there is then is recorded.
        real(*args, deadline=None if deadline is None else 0.0, **options)

    monkeypatch.setattr(gpu_drafters.train_drafter, "train", train)
    out, began = tmp_path / "gpu", time.monotonic()
    command = ["--recipe", recipe, "--anchors", "100000", "--prompts", "8", "--calibration", "8", "--minutes", "12"]
    gpu_drafters.main([*command, "--device", "cpu", "--jobs", "1", "--out", str(out)])
    first, second = asked
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(3 * 60)
    assert first - began == pytest.approx(4 * 60, abs=5)
    trained = json.loads(read_bank(out / "banks" / "dspark.npz").header.notes)["anchors"]
    assert 0 < trained < 1000


def test_gpu_script_is_done_when_the_time_is_up(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A clock that only steps and parts move: a second and ten seconds.
    clock = [0.0]

    def slow(real: Any, seconds: float) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            clock[0] += seconds
            return found

        return called

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Trainer, "train_step", slow(Trainer.train_step, 1.0))
    monkeypatch.setattr(record_banks, "record_part", slow(record_banks.record_part, 10.0))
    monkeypatch.setattr(record_banks, "PART", 2)
    out = tmp_path / "gpu"
    command = ["--recipe", recipe, "--anchors", "100000", "--prompts", "48", "--calibration", "16", "--minutes", "4"]
    gpu_drafters.main([*command, "--device", "cpu", "--jobs", "1", "--out", str(out)])
    shown = capsys.readouterr().out
    # A third and a quarter for the trainings, the rest for ten parts of both splits.
    assert clock[0] == 240
    for name, seconds in (("dspark", 80), ("dflash", 60)):
        _, about = read_drafter(out / name / "drafter.safetensors", tiny_target())
        assert about.training["step"] == seconds
        assert 0.7 < about.training["fell_from"] / about.training["anchors"] < 0.9
        assert about.training["confidence"]["drafts"] > 0
    banks = [read_bank(out / "banks" / f"{name}.npz") for name in ("dspark", "dflash")]
    assert banks[0].bounds.tolist() == banks[1].bounds.tolist()
    assert len(banks[0].domain) == 14  # seven parts of two texts
    for bank in banks:
        notes = json.loads(bank.header.notes)
        (asked, wanted), (calibrated, of) = (notes["cut_by_deadline"][split] for split in ("evaluation", "calibration"))
        assert (wanted, of) == (48, 16)
        assert notes["prompts_asked"] == asked == 14 + len(notes["left_out"])
        for split, recorded, whole in (("evaluation", asked, 48), ("calibration", calibrated, 16)):
            assert f"the time was up: {recorded} of {whole} prompts of the split '{split}' were recorded" in shown


def test_gpu_script_needs_a_gpu_unless_told_otherwise(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="there is no CUDA device"):
        gpu_drafters.main(["--recipe", recipe, "--out", str(tmp_path)])
