"""acceptance.py: numbers worked out by hand, agreement with the package's own report, ratios, files, bad input."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from study_banks import DOMAINS, hand_bank, saved, study_bank

from dsim.drafts import bank_report
from experiments import acceptance, draft_length, drafter_depth, reliability, threshold_sweep
from experiments._banks import EVERY, MIN_BLOCKS, open_banks, with_all
from experiments._common import run_main

FILES = [
    "acceptance.csv",
    "acceptance.png",
    "acceptance.svg",
    "accepted_length.csv",
    "accepted_length.png",
    "accepted_length.svg",
    "comparisons.csv",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments: str) -> int:
    """Exit code of the script."""
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: acceptance.main(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def by_hand() -> dict[str, list[list[tuple[list[float], list[float], int]]]]:
    c = [0.5, 0.5]
    math = [(c, [0.8, 0.6], 2), (c, [0, 0], 0), (c, [0, 0], 0), (c, [0.4, 0.2], 0), (c, [0.6, 1.0], 1)]
    chat = [(c, [0.2, 0.4], 0), (c, [0.6, 0.2], 1)]
    return {"texts": [chat, math]}


def test_a_bank_worked_out_by_hand(tmp_path: Path) -> None:
    """Math: full verification comes by rows 0, 3 and 4; chat: by both."""
    (one,) = open_banks(saved(tmp_path, a=hand_bank(**by_hand(), domain=[0, 1], domains=("chat", "math"))))
    got = acceptance.measure(one, resamples=2)
    assert got.conditional[0] == pytest.approx(np.array([[0.6, 0.8], [0.4, 0.2], [0.5, 0.5]]))
    assert got.outcome[0] == pytest.approx(np.array([[2 / 3, 1 / 2], [1 / 2, 0], [7 / 12, 1 / 4]]))
    assert got.tau[0] == pytest.approx([2.0, 1.5, 1.75])
    assert got.blocks.tolist() == [[3, 2, 1], [2, 1, 0], [5, 3, 1]]
    every = acceptance.measure(one, blocks=EVERY, resamples=2)
    assert every.tau[0] == pytest.approx([1.6, 1.5, 1.55])
    assert every.conditional[0, 0] == pytest.approx([1.8 / 5, 0.8])


def test_outcomes_are_those_of_the_bank_report(tmp_path: Path) -> None:
    bank = study_bank(0.4, texts=3, length=80)
    (one,) = open_banks(saved(tmp_path, a=bank))
    got, report = acceptance.measure(one, resamples=2), bank_report(bank)
    for i, name in enumerate(DOMAINS):
        assert got.outcome[0, i] == pytest.approx(report[name]["acceptance"])
        assert got.tau[0, i] == pytest.approx(report[name]["tau"][0])
    assert got.conditional[0] == pytest.approx(got.outcome[0], abs=0.15)  # the same expectation


def test_ratios_of_paired_banks(tmp_path: Path) -> None:
    banks = open_banks(
        saved(
            tmp_path,
            dspark=study_bank(0.8, texts=24),
            dflash=study_bank(0.6, texts=24, fade=0.4, drafter="dflash"),
            mtp=study_bank(0.2, texts=24, gamma=2, drafter="mtp"),
            apart=study_bank(0.8, texts=24, seed=3, drafter="eagle3"),
        )
    )
    found = [acceptance.measure(one, resamples=400) for one in banks]
    pairs = acceptance.pair_table(banks, found)
    assert len(pairs) == 4 * 3 * 3 * 4
    table = pairs.set_index(["drafter", "against_drafter", "domain", "metric"])
    tau = table.loc[("DSpark", "DFlash", "all", "tau")]
    assert tau["ratio"] == pytest.approx(found[0].tau[0, 3] / found[1].tau[0, 3])
    assert tau["low"] < tau["ratio"] < tau["high"]
    assert tau["published"] == pytest.approx(1.163, abs=5e-4)  # the paper: +16.3 %
    back = table.loc[("DFlash", "DSpark", "all", "tau")]
    assert (back["ratio"], back["low"], back["high"]) == pytest.approx(
        (1 / tau["ratio"], 1 / tau["high"], 1 / tau["low"])
    )
    rest = table.loc[("DSpark", "DFlash", "math", "alpha_rest")]
    assert rest["positions"] == "2-3"
    assert rest["ratio"] == pytest.approx(found[0].conditional[0, 0, 1:].mean() / found[1].conditional[0, 0, 1:].mean())
    assert table.loc[("DSpark", "MTP", "all", "alpha_rest"), "positions"] == "2-2"
    assert set(pairs.loc[pairs["against_drafter"] == "Eagle3", "paired"]) == {False}
    assert set(pairs.loc[pairs["against_drafter"] == "MTP", "published"].isna()) == {True}
    # The same texts: what makes a text hard cancels.
    width = pairs.assign(width=pairs["high"] - pairs["low"]).set_index(
        ["drafter", "against_drafter", "domain", "metric"]
    )
    assert (
        width.loc[("DSpark", "DFlash", "all", "tau"), "width"]
        < 0.7 * width.loc[("DSpark", "Eagle3", "all", "tau"), "width"]
    )


def counted(*blocks: list[int]) -> acceptance.Acceptance:
    """Acceptance with these numbers of blocks, a list a domain; alpha_k is 1 / k, NaN where no block gets to k."""
    many = np.array([*blocks, np.sum(blocks, axis=0)])
    alpha = np.where(many[:-1, :-1] > 0, 1 / np.arange(1.0, many.shape[1]), np.nan)
    curves = np.repeat(with_all(alpha[None]), 3, axis=0)
    return acceptance.Acceptance(conditional=curves, outcome=curves, tau=1 + curves.sum(axis=2), blocks=many)


def test_positions_count_as_far_as_every_domain_has_blocks() -> None:
    enough, few = MIN_BLOCKS, MIN_BLOCKS - 1
    rich, poor = counted([9999, 900, 500, 400], [enough] * 4), counted([9999, 900, 500, 400], [enough, enough, few, 0])
    assert acceptance.last_reached(rich) == 3  # blocks of which all three were accepted are at no position
    assert acceptance.last_reached(poor) == 2
    assert acceptance.last_reached(rich, poor) == acceptance.last_reached(poor, rich) == 2
    assert acceptance.last_reached(rich, counted([enough] * 2, [enough] * 2)) == 1  # a shorter block
    assert acceptance.last_reached(counted([few, 9, 0], [enough, 9, 0])) == 0


def test_a_mean_over_positions_leaves_out_those_that_few_blocks_reach(tmp_path: Path) -> None:
    """In one domain no block of DFlash gets to position 3, and few of MTP to position 2."""
    banks = open_banks(
        saved(
            tmp_path,
            **{name: study_bank(0.8, drafter=name, domains=("math", "code")) for name in ("dspark", "dflash", "mtp")},
        )
    )
    found = [
        counted([900] * 4, [900] * 4),
        counted([900, 800, 700, 0], [900, 800, 0, 0]),
        counted([900] * 4, [900, 9, 9, 9]),
    ]
    pairs = acceptance.pair_table(banks, found)
    rest = pairs[pairs["metric"] == "alpha_rest"]
    assert set(zip(rest["drafter"], rest["against_drafter"], strict=True)) == {
        ("DSpark", "DFlash"),
        ("DFlash", "DSpark"),
    }
    assert set(rest["positions"]) == {"2-2"}
    assert rest["domain"].tolist() == ["math", "code", "all"] * 2
    assert rest["ratio"].tolist() == [1.0] * 6
    assert acceptance.few_blocks_note(banks, found) == (
        f"Fewer than {MIN_BLOCKS} blocks of some domain from k = 2 (MTP), k = 3 (DFlash)."
    )
    assert acceptance.few_blocks_note(banks[:1], found[:1]) == ""


def test_files_columns_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    banks = saved(
        tmp_path,
        dspark=study_bank(0.8),
        t1=study_bank(0.1, seed=2, notes='{"temperature": 1.0}'),
        dflash=study_bank(0.6, fade=0.4, drafter="dflash"),
    )
    for name in ("a", "b"):
        assert run("--banks", ",".join(banks), "--out", str(tmp_path / name), "--resamples", "60") == 0
    shown = capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == FILES
    for file in FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    curves = pd.read_csv(tmp_path / "a" / "acceptance.csv")
    assert list(curves) == [
        "bank", "drafter", "domain", "position", "acceptance", "low", "high", "outcome", "outcome_low", "outcome_high",
        "blocks", "published", "drafts_source",
    ]  # fmt: skip
    assert len(curves) == 3 * 4 * 3
    assert set(curves["drafts_source"]) == {"recorded:dsim:dspark markov 2 layers", "recorded:dsim:dflash"}
    first = curves[(curves["drafter"] == "DFlash") & (curves["domain"] == "math")].iloc[0]
    assert first["published"] == 0.88497
    lengths = pd.read_csv(tmp_path / "a" / "accepted_length.csv")
    assert lengths["temperature"].tolist() == [0.6] * 4 + [1.0] * 4 + [0.6] * 4
    assert lengths.loc[lengths["domain"] == "all", "texts"].tolist() == [18] * 3
    assert lengths["tau"].between(lengths["low"], lengths["high"]).all()
    assert re.search(r"^DSpark, T = 1 +DFlash +tau .* no$", shown, re.MULTILINE)
    assert re.search(r"^DSpark, T = 0.6 +DFlash +tau .* yes$", shown, re.MULTILINE)


def test_the_legend_has_ours_and_the_published_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    monkeypatch.setattr(acceptance, "save_figure", lambda fig, _out, stem: drawn.update({stem: fig}))
    banks = saved(tmp_path, dspark=study_bank(0.8), mtp=study_bank(0.2, gamma=2, drafter="mtp 1 layers"))
    assert run("--banks", ",".join(banks), "--out", str(tmp_path / "out"), "--resamples", "20") == 0
    fig = drawn["accepted_length"]
    (key,) = fig.legends
    names = [text.get_text() for text in key.get_texts()]
    assert set(names) == {"DSpark", "MTP", "DFlash", "Eagle3", "filled: recorded", "hollow: published"}
    faces = {handle.get_label(): handle.get_markerfacecolor() for handle in key.legend_handles}
    assert (faces["DFlash"], faces["DSpark"]) == ("white", "#D55E00")
    # What is drawn for a drafter looks like its entry.
    hollow = {line.get_marker() for line in fig.axes[1].lines if line.get_markerfacecolor() == "white"}
    assert hollow == {"o", "s", "v"}
    fig.draw_without_rendering()
    boxes = [ax._left_title.get_window_extent() for ax in fig.axes]
    assert all(a.x1 < b.x0 for a, b in pairwise(boxes))


def test_a_bank_alone_and_other_domains_than_published(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, mine=study_bank(0.5, domains=("poems",), drafter="mine"))
    assert run("--banks", path, "--out", str(tmp_path / "out"), "--resamples", "20", "--blocks", "all") == 0
    assert "comparisons.csv" not in [file.name for file in (tmp_path / "out").iterdir()]
    lengths = pd.read_csv(tmp_path / "out" / "accepted_length.csv")
    assert lengths["domain"].tolist() == ["poems", "all"]
    assert lengths["tau"].nunique() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--banks", "nope"], "unknown bank"),
        (["--banks", "absent.npz"], "bank not found"),
        (["--banks", "{bank}", "--reference", "smollm2-dflash"], "--reference"),
        (["--banks", "{bank}", "--resamples", "0"], "--resamples"),
        (["--banks", ""], "at least one bank"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    (bank,) = saved(tmp_path, a=study_bank(0.0, texts=1))
    given = [part.format(bank=bank) for part in arguments]
    assert run(*given, "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "own"),
    [
        (acceptance, ["--banks", "--reference", "--blocks", "--resamples", "--seed"]),
        (threshold_sweep, ["--bank", "--on", "--steps", "--resamples", "--seed"]),
        (reliability, ["--bank", "--temperatures", "--domain", "--blocks"]),
        (drafter_depth, ["--results", "--gamma"]),
        (draft_length, ["--results", "--latency", "--layers"]),
    ],
)
def test_help_documents_every_option(module: ModuleType, own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ["--out", *own])
    assert "2607.05147" in text
