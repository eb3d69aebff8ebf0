"""What is said of the banks that come with dsim: the same texts, the drafters' hashes, sizes, the table of figures."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from importlib import resources
from typing import Any

import numpy as np
import pytest

from dsim.drafter.prompts import generate_prompts, prompts_hash
from dsim.drafts import Bank, load_bank, shipped_banks
from dsim.drafts.reliability import visited_rows

DATA = resources.files("dsim") / "data"
MEGABYTE = 1_000_000
BANKS = (
    "smollm2-dflash",
    "smollm2-dspark",
    "smollm2-dspark-rnn",
    "smollm2-dspark-t1",
    "smollm2-eagle3",
    "smollm2-mtp5",
)
#: At T = 0.6, on the same texts.
ALIKE = tuple(name for name in BANKS if name != "smollm2-dspark-t1")
#: The shipped drafter file that a bank was recorded with, where it is shipped.
WEIGHTS = {
    "smollm2-dspark-rnn": "smollm2-dspark-rnn",
    "smollm2-dspark": "smollm2-dspark",
    "smollm2-dspark-t1": "smollm2-dspark",
    "smollm2-mtp5": "smollm2-mtp5",
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bank]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSIM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return {name: load_bank(name) for name in BANKS}


def notes(bank: Bank) -> dict[str, Any]:
    found = json.loads(bank.header.notes)
    assert isinstance(found, dict)
    return found


def table(folder: str) -> dict[str, list[str]]:
    """Rows of the table in a PROVENANCE.md: the name in the first cell, and the other cells."""
    text = (DATA / folder / "PROVENANCE.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name.strip("`"): others for name, *others in cells}


def first_number(cell: str) -> int:
    return int(cell.split()[0].replace(",", ""))


def drafter_file(name: str) -> tuple[dict[str, Any], str]:
    """Header of a shipped drafter file, and the `drafter_hash` of the drafter in it, without torch.

    Over the names and bytes of the state dict as `read_drafter` fills it: float32, and the vocabulary in int64.
    """
    content = (DATA / "drafters" / f"{name}.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    members, data = json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :]
    header = json.loads(members.pop("__metadata__")["dsim"])
    state = {}
    for key, about in members.items():
        start, end = about["data_offsets"]
        stored = np.frombuffer(data[start:end], {"F16": "<f2", "I32": "<i4"}[about["dtype"]])
        if key == "vocabulary":
            state["vocabulary_head.tokens"] = stored.astype("<i8")
        else:
            state[key] = stored.astype("<f4")
    digest = hashlib.sha256()
    for key, value in sorted(state.items()):
        digest.update(key.encode())
        digest.update(value.tobytes())
    return header, digest.hexdigest()[:16]


def test_these_are_shipped_and_recorded(opened: dict[str, Bank]) -> None:
    assert shipped_banks() == BANKS
    assert {bank.header.kind for bank in opened.values()} == {"recorded"}


def test_the_banks_at_one_temperature_stand_on_the_same_texts(opened: dict[str, Bank]) -> None:
    one = opened["smollm2-dspark"]
    said = ("prompts", "prompts_asked", "left_out", "draws", "seed", "text_seed", "temperature", "target_fingerprint")
    assert notes(one)["temperature"] == 0.6
    for name in ALIKE:
        bank = opened[name]
        assert {key: notes(bank)[key] for key in said} == {key: notes(one)[key] for key in said}, name
        assert (bank.header.target, bank.header.domains) == (one.header.target, one.header.domains), name
        # The one with shorter blocks too: it leaves out the texts that are too short for the longest.
        assert bank.header.gamma == (5 if name == "smollm2-mtp5" else 7)
        np.testing.assert_array_equal(bank.bounds, one.bounds, err_msg=name)
        np.testing.assert_array_equal(bank.domain, one.domain, err_msg=name)
    other = notes(opened["smollm2-dspark-t1"])
    assert (other["temperature"], other["prompts"], other["left_out"]) == (1.0, notes(one)["prompts"], [])


@pytest.mark.parametrize("name", BANKS)
def test_the_texts_are_answers_to_the_generated_prompts(opened: dict[str, Bank], name: str) -> None:
    bank, said = opened[name], notes(opened[name])
    prompts = generate_prompts(said["prompts_asked"], seed=said["text_seed"], split="evaluation")
    assert prompts_hash(prompts) == said["prompts"]
    kept = [prompt.domain for i, prompt in enumerate(prompts) if i not in said["left_out"]]
    assert said["draws"] == 1
    assert [bank.header.domains[i] for i in bank.domain] == kept
    assert np.diff(bank.bounds).max() == 256


@pytest.mark.parametrize(
    ("folder", "suffix", "names", "most"),
    [("banks", ".npz", set(BANKS), 6 * MEGABYTE), ("drafters", ".safetensors", set(WEIGHTS.values()), 32 * MEGABYTE)],
)
def test_no_file_is_too_large(folder: str, suffix: str, names: set[str], most: int) -> None:
    """What a clone and a wheel can bear."""
    sizes = {item.name: len(item.read_bytes()) for item in (DATA / folder).iterdir() if item.name.endswith(suffix)}
    assert set(sizes) == {name + suffix for name in names}
    assert {name: size for name, size in sizes.items() if size > most} == {}


def test_banks_were_recorded_with_the_shipped_drafters(opened: dict[str, Bank]) -> None:
    files = {file: drafter_file(file) for file in sorted(set(WEIGHTS.values()))}
    anchors = table("drafters")
    assert set(anchors) == {f"{file}.safetensors" for file in files}
    for name, bank in opened.items():
        said = notes(bank)
        if name not in WEIGHTS:
            assert said["drafter_hash"] not in {digest for _, digest in files.values()}, name
            continue
        header, digest = files[WEIGHTS[name]]
        assert said["drafter_hash"] == digest, name
        config = header["config"]
        assert (config["gamma"], config["target"]) == (bank.header.gamma, bank.header.target), name
        assert config["fingerprint"] == said["target_fingerprint"], name
        listed = first_number(anchors[f"{WEIGHTS[name]}.safetensors"][1])
        assert header["training"]["anchors"] == said["anchors"] == listed, name
        # Live and replayed, confidences are calibrated alike.
        assert (tuple(header["temperatures"]) == bank.header.temperatures) == (said["temperature"] == 0.6), name


def test_the_table_of_figures_is_true(opened: dict[str, Bank]) -> None:
    listed = table("banks")
    assert set(listed) == set(BANKS)
    for name, (drafter, trained, positions, tau, acceptance) in listed.items():
        bank = opened[name]
        rows = visited_rows(bank.accepted, bank.bounds, bank.usable())
        accepted, alpha = bank.accepted[rows], bank.alpha_bytes[rows] / 255
        reached = [alpha[accepted >= k, k].mean() for k in range(bank.header.gamma)]
        assert positions == f"{int(bank.usable().sum()):,}", name
        assert tau == f"{1 + accepted.mean():.3f}", name
        assert acceptance == " ".join(f"{value:.3f}" for value in reached), name
        assert first_number(trained) == notes(bank)["anchors"], name
        assert re.findall(r"gamma (\d+)", drafter) in ([], [str(bank.header.gamma)]), name
