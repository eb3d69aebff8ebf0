"""What the experiments on banks share: which banks share texts, sums by text, intervals over texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from study_banks import hand_bank, header, saved, study_bank

from dsim.drafts import Bank, make_bank, write_bank
from dsim.errors import InputError
from experiments._banks import (
    EVERY,
    MIN_TEXTS,
    Opened,
    enough_texts,
    interval,
    open_banks,
    ratio,
    resampled,
    shipped_or_given,
    sums_by_text,
    training_note,
    with_all,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))


def opened(bank: Bank, draws: int = 1, group: int = 0) -> Opened:
    return Opened("x", bank, "dspark", "DSpark", 0.6, draws, group)


def test_rows_and_sums_by_text() -> None:
    block = ([0.5, 0.5], [0.5, 0.5])
    texts = [[(*block, a) for a in accepted] for accepted in ([2, 0, 0, 1, 0], [0, 1, 0])]
    bank = hand_bank(texts, [0, 1], domains=("chat", "math"))
    one = opened(bank)
    # Rows 0..4 and 8..10 can be replayed. Text 0: 0 -> 3 -> 5 (end); text 1: 8, 9 -> 11 (end).
    assert one.rows().tolist() == [0, 3, 8, 9]
    assert one.rows(EVERY).tolist() == [0, 1, 2, 3, 4, 8, 9, 10]
    # Stopped after one draft: 0 -> 2 -> 3 -> 5.
    assert one.rows(stops=np.minimum(bank.accepted, 1)).tolist() == [0, 2, 3, 8, 9]
    assert one.domains == ("math", "chat")  # the order of figures
    assert one.text_domain().tolist() == [1, 0]
    sums = sums_by_text(one, one.rows(), np.stack([np.ones(4), bank.accepted[one.rows()]], axis=1))
    assert sums.tolist() == [[2.0, 3.0], [2.0, 1.0]]
    drawn = resampled(one, sums, resamples=3, seed=0)
    assert drawn[0].tolist() == [[2.0, 1.0], [2.0, 3.0]]
    assert (drawn[1:] == drawn[0]).all()  # one text a domain: nothing else can be drawn


def test_draws_of_a_text_are_one_unit(tmp_path: Path) -> None:
    bank = study_bank(0.0, texts=4)
    lengths = np.repeat(np.diff(bank.bounds)[::2], 2)
    rows = int(lengths.sum())
    twice = make_bank(
        header(3, notes=json.dumps({"temperature": 1.0, "draws": 2})),
        confidence_logit=np.zeros((rows, 3)),
        alpha=np.full((rows, 3), 0.5),
        accepted=np.ones(rows, dtype=np.int64),
        bounds=np.concatenate([[0], np.cumsum(lengths)]),
        domain=bank.domain,
    )
    other = replace(bank, header=header(3, notes=json.dumps({"draws": 2})))
    (one, two) = (open_banks([path])[0] for path in saved(tmp_path, twice=twice, other=other))
    assert (one.draws, one.text_domain().tolist()) == (2, [0, 0, 1, 1, 2, 2])
    assert (two.draws, two.temperature) == (1, None)  # these trajectories are not pairs of equal length
    assert sums_by_text(one, one.rows(EVERY), np.ones((int(twice.usable().sum()), 1)))[:, 0].tolist() == [
        float(2 * (n - 4)) for n in lengths[::2]
    ]


def test_banks_of_the_same_texts_are_paired_and_others_are_not(tmp_path: Path) -> None:
    warm = json.dumps({"temperature": 1.0, "draws": 1})
    paths = saved(
        tmp_path,
        a=study_bank(0.5),
        b=study_bank(0.0, drafter="dflash 2 layers"),
        short=study_bank(0.0, gamma=2, drafter="mtp 1 layers"),
        other=study_bank(0.5, seed=1, notes=warm),
        same=study_bank(0.5, drafter="mine", target="another"),
    )
    banks = open_banks(paths)
    assert [one.group for one in banks] == [0, 0, 0, 1, 2]
    assert [one.drafter for one in banks] == ["dspark", "dflash", "mtp", "dspark", "mine"]
    assert [one.label for one in banks] == ["DSpark, T = 0.6", "DFlash", "MTP", "DSpark, T = 1", "mine"]
    a, b = (
        resampled(one, sums_by_text(one, one.rows(), np.ones((one.rows().size, 1))), resamples=50, seed=0)
        for one in (banks[0], replace(banks[0], group=1))
    )
    again = resampled(banks[0], sums_by_text(banks[0], banks[0].rows(), np.ones((banks[0].rows().size, 1))),
                      resamples=50, seed=0)  # fmt: skip
    assert (ratio(a, again) == 1).all()
    assert (ratio(a, b)[1:] != 1).any()
    two = open_banks(saved(tmp_path, x=study_bank(0.5), y=study_bank(0.1)))
    assert [one.label for one in two] == ["DSpark (x)", "DSpark (y)"]


def test_banks_that_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = saved(tmp_path, a=study_bank(0.0), b=study_bank(0.0, domains=("math", "code")))
    with pytest.raises(InputError, match="each bank once"):
        open_banks([paths[0], paths[0]])
    with pytest.raises(InputError, match=r"b\.npz, field 'domains': has other domains"):
        open_banks(paths)
    with pytest.raises(InputError, match="at least one bank"):
        open_banks(shipped_or_given(" , "))
    with pytest.raises(InputError, match="unknown bank"):
        open_banks(["nope"])
    monkeypatch.setattr("experiments._banks.shipped_banks", lambda: ())
    with pytest.raises(InputError, match="no bank is shipped"):
        shipped_or_given(None)
    monkeypatch.setattr("experiments._banks.shipped_banks", lambda: ("smollm2-dflash", "smollm2-dspark", "z"))
    assert shipped_or_given(None) == ["smollm2-dspark", "smollm2-dflash"]


def test_the_mean_over_domains_and_few_texts() -> None:
    values = np.arange(6, dtype=float).reshape(1, 3, 2)
    assert with_all(values)[0, 3].tolist() == [2.0, 3.0]
    bank = study_bank(0.0, texts=MIN_TEXTS - 1)
    assert enough_texts(opened(bank)).tolist() == [False] * 4
    samples = np.tile(np.linspace(0, 1, 101)[:, None], (1, 4))
    low, high = interval(samples, np.array([True, True, False, True]))
    assert low[[0, 3]] == pytest.approx([0.0345] * 2, abs=1e-3)  # of the hundred resamples 0.01 ... 1
    assert high[0] == pytest.approx(0.97525, abs=1e-3)
    assert np.isnan([low[2], high[2]]).all()
    samples[:7, 1] = np.nan
    assert np.isnan(interval(samples, np.ones(4, dtype=bool))[0][1])


def test_intervals_over_texts_cover_the_truth() -> None:
    """Texts differ (p of each is 0.3 or 0.7), blocks of a text do not: 1 + E p + E p^2 is covered 95 times in 100."""
    rng = np.random.default_rng(5)
    texts, length, truth = 24, 25, 1 + 0.5 + (0.09 + 0.49) / 2
    hits, naive = 0, 0
    for trial in range(120):
        p = np.repeat(rng.choice([0.3, 0.7], texts), length)[:, None]
        accepted = np.logical_and.accumulate(rng.random((texts * length, 2)) < p, axis=1).sum(axis=1)
        bank = make_bank(
            header(2, domains=("any",)),
            confidence_logit=np.zeros((texts * length, 2)),
            alpha=np.broadcast_to(p, (texts * length, 2)),
            accepted=accepted,
            bounds=np.arange(texts + 1) * length,
            domain=np.zeros(texts),
        )
        one = opened(bank)
        rows = one.rows(EVERY)
        drawn = resampled(
            one,
            sums_by_text(one, rows, np.stack([np.ones(rows.size), accepted[rows]], axis=1)),
            resamples=300,
            seed=trial,
        )
        tau = with_all(1 + ratio(drawn[..., 1], drawn[..., 0]))
        low, high = interval(tau, enough_texts(one))
        hits += bool(low[0] <= truth <= high[0])
        half = 1.96 * accepted[rows].std() / np.sqrt(rows.size)  # blocks as if they were independent
        naive += bool(abs(tau[0, 0] - truth) <= half)
    assert 0.88 <= hits / 120 <= 0.99
    assert naive / 120 < 0.75


@pytest.mark.parametrize(
    ("notes", "anchors"),
    [
        ({"anchors": 7}, 7),
        ({"anchors": 7, "started_from": {"anchors": 100, "hash": "x"}}, 107),
        ({}, None),
        ({"anchors": None}, None),
        ({"anchors": True}, None),
        ({"anchors": 7, "started_from": "x"}, None),
        ({"anchors": 7, "started_from": {}}, None),
    ],
)
def test_anchors_that_a_bank_tells(notes: dict[str, Any], anchors: int | None, tmp_path: Path) -> None:
    write_bank(study_bank(0.0, notes=json.dumps(notes)), tmp_path / "bank.npz")
    assert open_banks([str(tmp_path / "bank.npz")])[0].anchors == anchors


def test_unequal_training_is_said() -> None:
    bank = study_bank(0.0)
    one, near, far, untold = (
        replace(opened(bank), label=label, anchors=anchors)
        for label, anchors in (("A", 1000), ("B", 1010), ("C", 240), ("D", None))
    )
    assert training_note([one, near]) == training_note([one]) == training_note([one, untold]) == ""
    assert training_note([one, far, untold]) == (
        "Not trained alike (anchors: A 1,000, C 240), so ratios are not the architecture's alone."
    )
