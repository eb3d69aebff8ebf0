"""reliability.py: what before and after mean, definitions, files, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from study_banks import hand_bank, saved, study_bank

from dsim.drafts import recalibrated
from dsim.drafts.reliability import auc, ece, reliability_table
from experiments import reliability
from experiments._banks import EVERY, Opened, open_bank
from experiments._common import run_main

FILES = ["reliability.csv", "reliability.png", "reliability.svg", "reliability_bins.csv"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments: str) -> int:
    """Exit code of the script."""
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: reliability.main(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_blocks_worked_out_by_hand() -> None:
    """Four blocks; at position 2 the products are 0.54, 0.54, 0.02 and 0.02, accepted 1, 0, 0, 0."""
    high, low = [0.9, 0.6], [0.1, 0.2]
    text = [(high, [1.0, 0.6], 2), ([0.5, 0.5], [0, 0], 0), ([0.5, 0.5], [0, 0], 0)]
    text += [(high, [0.8, 0.4], 1), ([0.5, 0.5], [0, 0], 0), (low, [0.2, 0.2], 0), (low, [0.0, 0.2], 0)]
    one = Opened("x", hand_bank([text], [0], domains=("any",)), "dspark", "DSpark", None, 1)
    table, exact = reliability.measure(one)["all"]
    assert one.rows().tolist() == [0, 3, 5, 6]
    first, second = table
    assert (first.auc, first.ece) == pytest.approx((1.0, 0.1), abs=0.01)
    assert second.auc == pytest.approx(5 / 6)
    assert second.ece == pytest.approx(0.5 * 0.04 + 0.5 * 0.02, abs=0.01)
    assert exact[1] == pytest.approx(0.5 * (0.54 - 0.46) + 0.5 * (0.02 - 0.02), abs=0.01)
    assert reliability.measure(one, blocks=EVERY)["all"][0][0].counts.sum() == 7


def test_before_has_no_temperatures_and_after_the_banks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    temperatures = (2.0, 0.5, 1.25, 1.0, 1.0)
    bank = study_bank(0.4, gamma=5, texts=4, temperatures=temperatures)
    (path,) = saved(tmp_path, a=bank)
    assert run("--bank", path, "--out", str(tmp_path / "out")) == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == FILES
    table = pd.read_csv(tmp_path / "out" / "reliability.csv")
    assert len(table) == 4 * 2 * 5
    own = open_bank(path)
    rows = own.rows()
    for stage, divisors in (("before", (1.0,) * 5), ("after", temperatures)):
        confidence = recalibrated(bank, divisors).confidence[rows]
        want = reliability_table(confidence, bank.accepted[rows])
        found = table[(table["domain"] == "all") & (table["stage"] == stage)]
        assert found["temperature"].tolist() == list(divisors)
        assert found["ece"].to_numpy() == pytest.approx([entry.ece for entry in want])
        assert found["auc"].to_numpy() == pytest.approx([entry.auc for entry in want])
        product = np.multiply.accumulate(confidence.astype(float), axis=1)
        assert found["ece"].iloc[2] == pytest.approx(ece(product[:, 2], bank.accepted[rows] > 2))
        assert found["auc"].iloc[2] == pytest.approx(auc(product[:, 2], bank.accepted[rows] > 2))
    third = table[(table["domain"] == "all") & (table["position"] == 3)]
    assert third["published_ece"].tolist() == pytest.approx([0.082, 0.017])
    assert table.loc[table["position"] == 2, "published_auc"].isna().all()
    bins = pd.read_csv(tmp_path / "out" / "reliability_bins.csv")
    part = bins[(bins["domain"] == "all") & (bins["stage"] == "after") & (bins["position"] == 1)]
    assert part["blocks"].sum() == rows.size
    assert (part["blocks"] * (part["predicted"] - part["observed"]).abs()).sum() / rows.size == pytest.approx(
        table.loc[(table["domain"] == "all") & (table["stage"] == "after"), "ece"].iloc[0]
    )
    first = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["1"])
    assert first.split()[1] == "2.00"


def test_other_temperatures_a_domain_and_positions_that_no_block_reaches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = saved(tmp_path, a=study_bank(-3.5, texts=2, temperatures=(3.0, 3.0, 3.0)))
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"temperatures": [1.0, 1.0, 1.0]}))
    given = ["--temperatures", str(file), "--domain", "chat", "--blocks", "all"]
    assert run("--bank", path, *given, "--out", str(tmp_path / "out")) == 0
    table = pd.read_csv(tmp_path / "out" / "reliability.csv")
    before, after = (table[table["stage"] == stage]["ece"].to_numpy() for stage in ("before", "after"))
    assert (before == after).all()
    assert table["auc"].isna().any()
    assert "all temperatures are 1: after is before" in capsys.readouterr().out


def test_the_chance_level_is_the_error_of_calibrated_confidences() -> None:
    rng = np.random.default_rng(1)
    found, claimed = [], []
    for _ in range(30):
        confidence = rng.beta(2, 2, (800, 1))
        accepted = (rng.random(800) < confidence[:, 0]).astype(int)
        (entry,) = reliability_table(confidence, accepted)
        found.append(entry.ece)
        claimed.append(reliability.chance(entry))
    assert np.mean(claimed) == pytest.approx(np.mean(found), rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bank", "nope"], "unknown bank"),
        (["--bank", "{bank}", "--domain", "poems"], "expected one of math, code, chat"),
        (["--bank", "{bank}", "--temperatures", "{short}"], "expected 3 finite numbers > 0"),
        (["--bank", "{bank}", "--temperatures", "absent.json"], "cannot be read"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    (bank,) = saved(tmp_path, a=study_bank(0.0, texts=1))
    (tmp_path / "short.json").write_text('{"temperatures": [1.0]}')
    given = [part.format(bank=bank, short=tmp_path / "short.json") for part in arguments]
    assert run(*given, "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
