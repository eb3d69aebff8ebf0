"""Confidences of another quality: what becomes of them, by hand, and what does not change."""

from __future__ import annotations

import numpy as np
import pytest
from banks import recorded_bank
from study_banks import hand_bank

from dsim.drafts import BankDrafts, Tilt, tilt
from dsim.drafts.quality import (
    Quality,
    alpha_by_row,
    ece_shift,
    graded,
    measured,
    parse_quality,
    tilted_confidence,
)
from dsim.drafts.reliability import auc, ece, visited_rows, weighted_auc, weighted_ece
from dsim.drafts.tilt import visit_weights
from dsim.errors import InputError

#: Two texts, gamma 2, usable rows 0-2 and 6-8. Read from its start, the first visits rows 0 and 2 (one draft
#: accepted), the second row 6 only (two accepted).
BANK = hand_bank(
    [
        [([0.9, 0.8], [0.8, 0.4], 1), ([0.1, 0.1], [0.2, 0.2], 0), ([0.5, 0.6], [0.4, 0.6], 0)],
        [([0.7, 0.3], [0.6, 0.8], 2), ([0.2, 0.2], [0.2, 0.2], 1), ([0.2, 0.2], [0.2, 0.2], 0)],
    ],
    [0, 1],
    domains=("math", "code"),
)
FIRST, SECOND = slice(0, 6), slice(6, 12)
VISITED = [0, 2, 6]


def made(text, bank=BANK, gamma=2, shift=None):
    return graded(bank, shift, gamma, parse_quality(text))


def test_the_blocks_that_count():
    assert np.flatnonzero(visit_weights(BANK, None, 2)).tolist() == VISITED
    assert set(visit_weights(BANK, None, 2)) == {0.0, 1.0}
    # In blocks of one the second text goes on at row 8.
    assert np.flatnonzero(visit_weights(BANK, None, 1)).tolist() == [0, 2, 6, 8]
    bank = recorded_bank(4)
    assert (
        np.flatnonzero(visit_weights(bank, None, 4)).tolist()
        == visited_rows(bank.accepted, bank.bounds, bank.usable()).tolist()
    )


def test_perfect_is_alpha():
    assert made("perfect")[VISITED] == pytest.approx(np.array([[0.8, 0.4], [0.4, 0.6], [0.6, 0.8]]))
    assert made("perfect").dtype == np.float32
    # Within half a unit of the edge: a stored 0 is not impossible.
    assert made("perfect")[3].tolist() == pytest.approx([0.5 / 255] * 2)


def test_constant_has_the_mean_survival_of_the_blocks_that_count():
    # a_1: 0.8, 0.4, 0.6; a_2: 0.32, 0.24, 0.48.
    assert made("constant") == pytest.approx(np.tile([0.6, (1.04 / 3) / 0.6], (12, 1)))
    by_domain = made("constant:domain")
    assert by_domain[FIRST] == pytest.approx(np.tile([0.6, 0.28 / 0.6], (6, 1)))
    assert by_domain[SECOND] == pytest.approx(np.tile([0.6, 0.8], (6, 1)))


def test_shuffled_draws_whole_blocks_that_count():
    seen = {tuple(row) for row in BANK.confidence[VISITED].tolist()}
    assert {tuple(row) for row in made("shuffled").tolist()} == seen
    within = made("shuffled:domain")
    assert {tuple(row) for row in within[FIRST].tolist()} == {tuple(row) for row in BANK.confidence[[0, 2]].tolist()}
    assert {tuple(row) for row in within[SECOND].tolist()} == {tuple(BANK.confidence[6].tolist())}


def test_shuffled_is_right_on_average_where_decoding_goes():
    bank = recorded_bank(4, texts=40)
    weights = visit_weights(bank, None, 4)
    rows = np.flatnonzero(weights)
    for text, domains in (("shuffled", [None]), ("shuffled:domain", [0, 1, 2])):
        drawn = made(text, bank, 4)
        owner = np.repeat(bank.domain, np.diff(bank.bounds))
        for domain in domains:
            mine = rows if domain is None else rows[owner[rows] == domain]
            drawn_a, own_a = (np.multiply.accumulate(c[mine], axis=1).mean(axis=0) for c in (drawn, bank.confidence))
            assert drawn_a == pytest.approx(own_a, abs=0.02)
            # A permutation of all rows would not be: decoding visits hard text more often.
        assert abs(np.corrcoef(drawn[rows, 0], bank.alpha[rows, 0])[0, 1]) < (0.05 if domains == [None] else 0.5)
    everywhere = np.multiply.accumulate(bank.confidence, axis=1).mean(axis=0)
    assert everywhere[0] > np.multiply.accumulate(bank.confidence[rows], axis=1).mean(axis=0)[0] + 0.01


def test_bias_shifts_logits_by_domain():
    found = made({"code": -1.0})
    odds = BANK.confidence[SECOND].astype(float) / (1 - BANK.confidence[SECOND].astype(float)) / np.e
    assert found[FIRST] == pytest.approx(BANK.confidence[FIRST])
    assert found[SECOND] == pytest.approx(odds / (1 + odds), abs=1e-6)


@pytest.mark.parametrize(
    ("text", "sign"), [("overconfident:0.1", 1), ("overconfident:0.25", 1), ("underconfident:0.1", -1)]
)
def test_the_ece_that_was_asked_for(text, sign):
    bank = recorded_bank(4, texts=60)
    quality = parse_quality(text)
    found = made(text, bank, 4)
    shift = ece_shift(bank, None, 4, quality.ece, up=sign > 0)
    assert np.sign(shift) == sign
    logits = np.log(found.astype(float) / (1 - found)) - np.log(bank.confidence.astype(float) / (1 - bank.confidence))
    assert logits[bank.confidence < 0.99] == pytest.approx(shift, abs=1e-3)
    # By the definition that the reports use, on the blocks that count.
    rows = visited_rows(bank.accepted, bank.bounds, bank.usable())
    errors = [
        ece(
            np.multiply.accumulate(found[rows].astype(float), axis=1)[:, k],
            np.multiply.accumulate(alpha_by_row(bank, None, 4)[rows], axis=1)[:, k],
        )
        for k in range(4)
    ]
    assert np.mean(errors) == pytest.approx(quality.ece, abs=0.003)
    own, ours = measured(bank, None, 4, None), measured(bank, None, 4, quality)
    assert ours[0] == pytest.approx(errors)
    assert ours[1] == pytest.approx(own[1], abs=0.01)  # the order within a position is kept


def test_an_ece_that_no_shift_gives():
    bank = recorded_bank(4, texts=20, over=1.0)
    with pytest.raises(InputError, match=r"field 'confidence'.*got 0\.01, expected more than 0\.2.*without a shift"):
        made("overconfident:0.01", bank, 4)
    with pytest.raises(InputError, match="less than"):
        made("underconfident:0.49", hand_bank([[([0.5], [0.3], 0)] * 3], [0], gamma=1, domains=("math",)), 1)


def test_a_domain_that_the_bank_does_not_have():
    with pytest.raises(
        InputError, match=r"'confidence\.chat': the bank has no such domain, got 1\.0, expected one of math"
    ):
        made({"chat": 1.0})


def test_measures_with_weights():
    rng = np.random.default_rng(1)
    predicted, label = rng.random(400), rng.random(400) < 0.4
    predicted = predicted.round(1)  # ties
    weights = rng.integers(0, 4, 400)
    repeated = np.repeat(np.arange(400), weights)
    probability = label.astype(float)
    assert weighted_ece(predicted, probability, weights) == pytest.approx(ece(predicted[repeated], label[repeated]))
    assert weighted_auc(predicted, probability, weights) == pytest.approx(auc(predicted[repeated], label[repeated]))
    # A block that is accepted half the time is half a hit and half a miss: of 0.5 x 1.5 pairs 0.5 are in order and
    # 0.25 tie.
    found = weighted_auc(np.array([0.2, 0.7]), np.array([0.0, 0.5]), np.ones(2))
    assert found == pytest.approx((0.5 + 0.25 / 2) / 0.75)
    assert np.isnan(weighted_auc(np.array([0.2, 0.7]), np.ones(2), np.ones(2)))


# -- replay ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["perfect", "constant", "shuffled:domain", "overconfident:0.2", {"chat": 2.0}])
@pytest.mark.parametrize("shift", [None, Tilt(alpha=(-0.5,), confidence=(0.3,))])
def test_drafts_and_luck_stay_what_they_are(text, shift):
    bank = recorded_bank(4)
    plain, other = (BankDrafts(bank, gamma=3, seed=5, tilt=shift, quality=q) for q in (None, parse_quality(text)))
    requests = np.arange(6)
    for source in (plain, other):
        for request in range(6):
            source.open(request, request % 3, 300)
    moved = False
    for position in (0, 1, 50, 170, 290):  # the last ones lie in second and third texts
        at = np.full(6, position)
        (c1, a1), (c2, a2) = plain.draft(requests, at), other.draft(requests, at)
        assert a1.tolist() == a2.tolist()
        assert plain.luck(requests, at).tolist() == other.luck(requests, at).tolist()
        assert plain.alpha(requests, at).tolist() == other.alpha(requests, at).tolist()
        assert c2.shape == (6, 3)
        assert c2.dtype == np.float32
        moved = moved or not np.array_equal(c1, c2)
        if text == "perfect":
            assert c2 == pytest.approx(plain.alpha(requests, at), abs=1e-6)
    assert moved
    assert other.label == f"{plain.label}:{parse_quality(text).label}"


def test_alpha_is_the_banks_or_the_tilted_one():
    source = BankDrafts(BANK, seed=0)
    shifted = BankDrafts(BANK, seed=0, tilt=Tilt(alpha=(np.log(2.0), 0.0)))
    for one in (source, shifted):
        one.open(0, 1, 3)
        one.draft(np.array([0]), np.array([0]))
    assert source.alpha(np.array([0]), np.array([0]))[0] == pytest.approx([0.6, 0.8])
    assert shifted.alpha(np.array([0]), np.array([0]))[0] == pytest.approx([0.75, 0.8])  # odds 1.5 become 3


def test_after_a_tilt_perfect_is_the_tilted_alpha_and_right_on_average():
    bank = recorded_bank(4, texts=30)
    curve = {"math": (0.9, 0.85, 0.8), "code": (0.8, 0.8, 0.8), "chat": (0.6, 0.5, 0.5)}
    level = tilt(bank, to=curve)
    truth = alpha_by_row(bank, level, 3)
    assert made("perfect", bank, 3, level) == pytest.approx(truth, abs=1e-6)
    assert not np.allclose(truth, alpha_by_row(bank, None, 3), atol=0.02)
    for text in ("perfect", "constant", "constant:domain"):
        errors, _ = measured(bank, level, 3, parse_quality(text))
        assert errors == pytest.approx(np.zeros(3), abs=1e-5)
    assert measured(bank, level, 3, parse_quality("overconfident:0.15"))[0].mean() == pytest.approx(0.15, abs=0.004)
    assert np.array_equal(tilted_confidence(bank, None, 3), bank.confidence[:, :3])


def test_replayed_outcomes_have_the_perfect_probabilities():
    """Of the tilted drafts that alpha says survive with probability p, a share p survives."""
    bank = recorded_bank(3, texts=40, length=300)
    source = BankDrafts(bank, seed=3, tilt=Tilt(alpha=(-0.7,)))
    expected, hits = [], []
    for request in range(240):
        source.open(request, request % 3, 200)
    requests = np.arange(240)
    for position in range(0, 190, 5):
        at = np.full(240, position)
        _, accepted = source.draft(requests, at)
        expected.append(source.alpha(requests, at)[:, 0])
        hits.append(accepted > 0)
    p, hit = np.concatenate(expected), np.concatenate(hits)
    for low in (0.0, 0.25, 0.5, 0.75):
        inside = (p >= low) & (p < low + 0.25)
        assert hit[inside].mean() == pytest.approx(p[inside].mean(), abs=0.04)


# -- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "quality", "label"),
    [
        ("perfect", Quality("perfect"), "perfect"),
        ("constant", Quality("constant"), "constant"),
        ("constant:domain", Quality("constant", by_domain=True), "constant-by-domain"),
        ("shuffled:domain", Quality("shuffled", by_domain=True), "shuffled-by-domain"),
        ("overconfident:0.05", Quality("overconfident", ece=0.05), "overconfident-0.05"),
        ("underconfident:0.2", Quality("underconfident", ece=0.2), "underconfident-0.2"),
        ({"a": 0.5, "b": -2}, Quality("bias", bias=(("a", 0.5), ("b", -2.0))), "bias(a+0.5/b-2)"),
    ],
)
def test_qualities_by_name(given, quality, label):
    assert parse_quality(given) == quality
    assert quality.label == label


def test_recorded_is_no_quality():
    assert parse_quality("recorded") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("raw", "got 'raw', expected recorded, perfect, constant"),
        ("perfect:domain", "expected recorded"),
        ("constant:", "expected recorded"),
        ("shuffled:text", "expected recorded"),
        ("overconfident", r"expected overconfident:ECE with 0 < ECE < 0\.5"),
        ("overconfident:-0.1", r"0 < ECE < 0\.5"),
        ("underconfident:nan", r"expected underconfident:ECE"),
        ("overconfident:0.5", r"0 < ECE < 0\.5"),
        (3, "got 3, expected recorded"),
        (None, "expected recorded"),
        ({}, "changes nothing"),
        ({"code": 0.0}, "changes nothing"),
        ({"code": "1"}, r"field 'confidence\.code': got '1', expected a number between -20 and 20"),
        ({"code": True}, r"field 'confidence\.code': got True"),
        ({"code": float("nan")}, r"field 'confidence\.code': got nan"),
        ({"code": 21}, r"field 'confidence\.code': got 21"),
    ],
)
def test_bad_qualities(given, message):
    with pytest.raises(InputError, match=message):
        parse_quality(given)
