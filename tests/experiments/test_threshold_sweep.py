"""threshold_sweep.py: by hand, against the policy in the simulator's own draft source, files, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from study_banks import hand_bank, header, saved, study_bank

from dsim import load_policy
from dsim.drafts import BankDrafts, make_bank
from dsim.figures_drafts import published_sweep
from dsim.policy import make_view
from experiments import threshold_sweep
from experiments._banks import Opened, open_bank
from experiments._common import run_main

FILES = ["threshold_sweep.csv", "threshold_sweep.png", "threshold_sweep.svg"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments: str) -> int:
    """Exit code of the script."""
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: threshold_sweep.main(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_text_worked_out_by_hand() -> None:
    """At t = 0.5 row 0 verifies one of its two drafts (both would be accepted), so that row 2 is next and not row 3."""
    a = [0.0, 0.0]
    text = [([0.9, 0.2], a, 2), ([0.9, 0.9], a, 2), ([0.7, 0.7], a, 1), ([0.3, 0.9], a, 2), ([0.6, 0.1], a, 0)]
    one = Opened("x", hand_bank([text], [0], domains=("any",)), "dspark", "DSpark", None, 1)
    found = threshold_sweep.sweep(one, [0.0, 0.5, 1.0], resamples=2)[0, 0]
    # t = 0: rows 0 (2 of 2), 3 (2 of 2), then the end. t = 0.5: rows 0 (1 of 1), 2 (1 of 2), 4 (0 of 1).
    # t = 1: rows 0 to 4, nothing verified.
    want = [[2, 0, 2, 3, 1.0], [2 / 3, 2 / 3, 4 / 3, 5 / 3, 5 / 7], [0, 0, 0, 1, 1.0]]
    assert found == pytest.approx(np.array(want))
    # On the survival (0.9, 0.18; 0.7, 0.49; 0.6): rows 0 (1 of 1), 2 (1 of 1), 4 (0 of 1).
    survival = threshold_sweep.sweep(one, [0.5], on="survival", resamples=2)[0, 0, 0]
    assert survival == pytest.approx([2 / 3, 1 / 3, 1.0, 5 / 3, 5 / 6])


@pytest.mark.parametrize("on", ["confidence", "survival"])
def test_it_is_what_the_simulator_would_do(on: str) -> None:
    """One request walks each text: the draft source answers, the policy decides, one block at a time."""
    rng = np.random.default_rng(3)
    bank = study_bank(0.5, texts=1, length=60)
    # Confidences of few different values, some of them thresholds to the last bit.
    bank = replace(bank, confidence=rng.choice([0.1, 0.3, 0.5, 0.7, 0.9], bank.confidence.shape).astype(np.float32))
    one = Opened("x", bank, "dspark", "DSpark", None, 1)
    for t in (0.0, 0.09, 0.3, 0.5, 0.7, 0.9, 1.0):
        policy = load_policy(f"threshold:t={t},on={on}")
        want = []
        for domain, usable in enumerate(bank.usable().tolist()):
            source = BankDrafts(bank, seed=1)
            source.open(0, domain, usable)
            position, rounds, kept, verified = 0, 0, 0, 0
            while position < usable:
                confidence, accepted = source.draft(np.array([0]), np.array([position]))
                length = int(policy.plan(make_view(confidence, verify_ms=np.ones(9)))[0])
                done = min(int(accepted[0]), length)
                rounds, kept, verified = rounds + 1, kept + done, verified + length
                position += done + 1
            want.append([kept / rounds, (verified - kept) / rounds, verified / rounds, kept / rounds + 1,
                         (kept + rounds) / (verified + rounds)])  # fmt: skip
        found = threshold_sweep.sweep(one, [t], on=on, resamples=2)[0, :, 0]
        assert found[:3] == pytest.approx(np.array(want), rel=1e-12)
        assert found[3] == pytest.approx(np.mean(want, axis=0), rel=1e-12)


def test_lengths_are_the_policys_on_random_confidences() -> None:
    rng = np.random.default_rng(0)
    rows = 400
    bank = make_bank(
        header(4, domains=("any",)),
        confidence_logit=rng.normal(0, 2, (rows, 4)),
        alpha=np.ones((rows, 4)),
        accepted=np.zeros(rows, dtype=np.int64),
        bounds=np.array([0, rows]),
        domain=np.array([0]),
    )
    one = Opened("x", bank, "dspark", "DSpark", None, 1)
    for on in ("confidence", "survival"):
        for t in (0.2, 0.55, float(bank.confidence[7, 0])):
            c = bank.confidence if on == "confidence" else np.multiply.accumulate(bank.confidence, axis=1)
            want = [next((k for k in range(4) if row[k] < np.float32(t)), 4) for row in c]
            assert threshold_sweep.verify_lengths(one, t, on).tolist() == want


def test_files_columns_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = saved(tmp_path, a=study_bank(0.5, gamma=7))
    assert run("--bank", path, "--out", str(tmp_path / "out"), "--steps", "20", "--resamples", "50") == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == FILES
    table = pd.read_csv(tmp_path / "out" / "threshold_sweep.csv")
    assert len(table) == 4 * 21
    at = table.set_index(["domain", "threshold"])
    assert at.loc[("math", 0.0), "verified"] == 7
    assert at.loc[("all", 1.0), "tau"] == pytest.approx(1.0, abs=0.05)
    parts = table["accepted"] + table["rejected"]
    assert parts.to_numpy() == pytest.approx(table["verified"].to_numpy())
    assert (table["tau_low"] <= table["tau"]).all()
    rates = at.loc["all", "acceptance_rate"].to_numpy()
    assert rates[0] < rates[8] < rates[-1]
    assert at.loc[("chat", 0.9), "published_acceptance_rate"] == pytest.approx(0.95664)
    assert np.isnan(at.loc[("chat", 0.05), "published_tau"])
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("math ")] == [
        f"{i / 10:.4f}"[:5] for i in range(11)
    ]
    one = open_bank(path)
    rows = one.rows()
    own = rows[one.bank.domain[np.searchsorted(one.bank.bounds, rows, "right") - 1] == 1]
    assert at.loc[("code", 0.0), "tau"] == pytest.approx(1 + one.bank.accepted[own].mean())


def test_the_published_rate_is_that_of_its_tokens() -> None:
    table = published_sweep()
    known = table[table["domain"] != "all"]
    rate = known["tau"] / (known["tau"] + known["rejected"])
    assert rate.to_numpy() == pytest.approx(known["acceptance_rate"].to_numpy(), abs=2e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bank", "nope"], "unknown bank"),
        (["--steps", "0"], "--steps"),
        (["--on", "luck"], "--on"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(*arguments, "--out", str(tmp_path / "out")) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
