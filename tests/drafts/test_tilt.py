"""Tilting: the wanted curve, the same luck, the same texts."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest
from banks import DOMAINS, recorded_bank
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.drafts import (
    BankDrafts,
    BankHeader,
    DomainTilt,
    Tilt,
    bank_report,
    expected_acceptance,
    make_bank,
    preset_curves,
    published_curve,
    read_curve,
    tilt,
)
from dsim.drafts.luck import block_luck, uniform
from dsim.drafts.reliability import ece
from dsim.drafts.tilt import survival_limits, tilted_bank
from dsim.errors import InputError

MODULE = importlib.import_module("dsim.drafts.tilt")  # the package's own `tilt` is the function
CURVE = {
    "math": (0.9, 0.85, 0.8, 0.75, 0.7),
    "code": (0.84, 0.8, 0.75, 0.7, 0.71),
    "chat": (0.6, 0.62, 0.55, 0.5, 0.5),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def bank():
    return recorded_bank()


def opened(bank, requests=60, tokens=150, **options):
    """A source with requests of the domains in turn."""
    drafts = BankDrafts(bank, **options)
    for request in range(requests):
        drafts.open(request, request % len(drafts.domains), tokens)
    return drafts


def grid(requests=60, tokens=150):
    return (a.ravel() for a in np.meshgrid(np.arange(requests), np.arange(tokens)))


def walk(bank, requests=None, **options):
    """Full verification of requests that read a text each: request, confidences and accepted of every step."""
    tokens = int(bank.usable().min())
    many = bank.domain.size if requests is None else requests
    drafts = opened(bank, many, tokens, **options)
    position, found = np.zeros(many, dtype=np.int64), []
    alive = np.arange(many)
    while alive.size:
        confidence, accepted = drafts.draft(alive, position[alive])
        found.append((alive, confidence, accepted))
        position[alive] += accepted + 1
        alive = alive[position[alive] < tokens]
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


def conditional(accepted, gamma):
    reached = np.array([np.mean(accepted >= k) for k in range(gamma + 1)])
    return reached[1:] / reached[:-1]


# -- the curve -------------------------------------------------------------------------------------------


def test_the_curve_holds_by_domain_and_position(bank):
    tilted = tilt(bank, to=CURVE)
    assert (tilted.gamma, tilted.domains) == (5, DOMAINS)
    for domain, values in expected_acceptance(bank, tilted).items():
        np.testing.assert_allclose(values, CURVE[domain], atol=1e-9)


def test_without_a_tilt_the_expectation_is_the_record(bank):
    report = bank_report(bank)
    for domain, values in expected_acceptance(bank).items():
        np.testing.assert_allclose(values, report[domain]["acceptance"], rtol=1e-12)


def test_replay_over_seeds_comes_to_the_curve():
    """Drawn luck and drawn texts; all of one length, so that a request reads each to its end."""
    bank = recorded_bank(seed=3, ragged=0)
    tilted = tilt(bank, to=CURVE)
    seeds = 24
    found = {domain: np.empty((seeds, 5)) for domain in DOMAINS}
    for seed in range(seeds):
        request, _, accepted = walk(bank, 240, gamma=5, seed=seed, tilt=tilted)
        for i, domain in enumerate(DOMAINS):
            found[domain][seed] = conditional(accepted[request % 3 == i], 5)
    for domain, values in found.items():
        error = values.std(axis=0, ddof=1) / np.sqrt(seeds)
        assert np.all(np.abs(values.mean(axis=0) - CURVE[domain]) < 3 * error), domain
        assert error.max() < 0.006


def test_only_replayed_rows_count(bank):
    """What lies within gamma + 1 of a text's end changes nothing."""
    tail = np.zeros(bank.accepted.size, dtype=bool)
    for end in bank.bounds[1:]:
        tail[end - 8 : end] = True
    other = replace(
        bank,
        alpha_bytes=np.where(tail[:, None], 255 - bank.alpha_bytes, bank.alpha_bytes),
        accepted=np.where(tail, 7 - bank.accepted, bank.accepted),
        confidence=np.where(tail[:, None], 1 - bank.confidence, bank.confidence),
    )
    assert tilt(other, to=CURVE) == tilt(bank, to=CURVE)


def test_the_acceptance_of_a_bank_itself_is_no_shift(bank):
    """Its own curve, solved for, is within the rounding of the solver of doing nothing."""
    tilted = tilt(bank, to=expected_acceptance(bank))
    assert np.max(np.abs(tilted.alpha)) < 1e-9
    assert np.max(np.abs(tilted.confidence)) < 1e-9


def test_a_bank_whose_steps_swing_to_and_fro_settles():
    """Rows reject and accept in turn, alpha = 0.5: a step on an accepting row survives with x = alpha' / 0.5 and lands
    on the next such row, else on a rejecting one between them. Share accepted x / (2 - x) = 0.9: x = 1.8 / 1.9."""
    rows = 4000
    header = BankHeader(1, "recorded", "d", "t", "s", "x", ("any",), -10.0, 10.0, (1.0,))
    bank = make_bank(
        header,
        confidence_logit=np.zeros((rows, 1)),
        alpha=np.full((rows, 1), 0.5),
        accepted=(np.arange(rows) + 1) % 2,
        bounds=np.array([0, rows]),
        domain=np.array([0]),
    )
    ((shift,),) = tilt(bank, to={"any": (0.9,)}).alpha
    stored = 128 / 255
    moved = stored * 1.8 / 1.9
    assert shift == pytest.approx(np.log(moved / (1 - moved)) - np.log(stored / (1 - stored)), abs=2e-3)


@settings(max_examples=25, deadline=None)
@given(
    curve=st.lists(st.floats(0.2, 0.9), min_size=1, max_size=3),
    seed=st.integers(0, 5),
)
def test_any_curve_is_reached(curve, seed):
    bank = recorded_bank(4, domains=("any",), texts=5, length=300, seed=seed)
    tilted = tilt(bank, to={"any": tuple(curve)})
    np.testing.assert_allclose(expected_acceptance(bank, tilted)["any"], curve, atol=1e-7)


# -- luck ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-1.5, -0.2, 0.3, 2.0])
@pytest.mark.parametrize("tokens", [150, 400])
def test_replay_is_the_leading_run_of_placed_luck_below_alpha(bank, shift, tokens):
    """The limits on unplaced luck say the same as u_k < alpha'_k, in spliced texts too."""
    drafts = opened(bank, tokens=tokens, seed=5, tilt=Tilt(alpha=(shift,)))
    differ = 0
    for position in range(0, tokens, 7):
        requests, positions = np.arange(60), np.full(60, position)
        _, accepted = drafts.draft(requests, positions)
        alpha = np.clip(bank.alpha_bytes[drafts._base[requests] + positions] / 255, 0.5 / 255, 1 - 0.5 / 255)
        moved = 1 / (1 + np.exp(-(np.log(alpha / (1 - alpha)) + shift)))
        expected = np.logical_and.accumulate(drafts.luck(requests, positions) < moved, axis=1).sum(axis=1)
        differ += np.count_nonzero(accepted != expected)
    assert differ == 0


def test_block_luck_is_the_counter_based_hash():
    k = np.arange(6)
    expected = uniform(9, 4, np.arange(17, 40)[:, None], k)
    np.testing.assert_array_equal(block_luck(9, 4, 17, 23, 6) * 2.0**-53, expected)


def test_survival_limits_by_hand():
    """alpha = 51/255 = 0.2 (odds 1/4) with odds doubled: 1/3. Halved: 1/9."""
    up, down = (survival_limits(s)[:, 51] for s in (np.log(2), -np.log(2)))
    np.testing.assert_allclose(up, [1, (1 / 3 - 0.2) / 0.8, 1 / 3], rtol=1e-12)
    np.testing.assert_allclose(down, [(1 / 9) / 0.2, 0, 1 / 9], rtol=1e-12)
    nothing = survival_limits(0.0)
    assert set(nothing[0]) == {1.0}
    assert set(nothing[1]) == {0.0}


def test_a_higher_curve_never_lowers_what_is_accepted(bank):
    requests, positions = grid()
    low = tilt(bank, to=CURVE)
    high = tilt(bank, to={domain: tuple(v + 0.05 for v in values) for domain, values in CURVE.items()})
    few, many = (opened(bank, gamma=5, seed=2, tilt=t).draft(requests, positions)[1] for t in (low, high))
    assert np.all(many >= few)
    assert many.mean() > few.mean() + 0.1


def test_positions_are_never_resampled(bank):
    """The same rows are read, tilted or not: confidences keep their order, and texts their seams."""
    plain, tilted = (opened(bank, tokens=400, seed=4, gamma=5, tilt=t) for t in (None, tilt(bank, to=CURVE)))
    for position in range(0, 400, 13):
        at = np.arange(60), np.full(60, position)
        before, after = plain.draft(*at)[0], tilted.draft(*at)[0]
        np.testing.assert_array_equal(plain._base, tilted._base)
        for i in range(3):
            rows = np.arange(i, 60, 3)
            for k in range(5):
                np.testing.assert_array_equal(
                    np.argsort(before[rows, k], kind="stable"), np.argsort(after[rows, k], kind="stable")
                )


def test_runs_of_one_seed_share_what_was_worked_out(bank):
    requests, positions = grid()
    shift = Tilt(alpha=(0.4,))
    one = opened(bank, seed=1, tilt=shift)
    size = one._outcomes.size
    two = opened(bank, seed=1, tilt=shift)
    assert two._outcomes is one._outcomes
    assert two._outcomes.size == size
    np.testing.assert_array_equal(one.draft(requests, positions)[1], two.draft(requests, positions)[1])
    # A longer request needs more of it, and answers the same where both are.
    three = BankDrafts(bank, seed=1, tilt=shift)
    for request in range(60):
        three.open(request, request % 3, 152)
    np.testing.assert_array_equal(one.draft(requests, positions)[1], three.draft(requests, positions)[1])
    other = opened(bank, seed=2, tilt=shift)
    assert np.any(other.draft(requests, positions)[1] != one.draft(requests, positions)[1])


def test_shared_outcomes_do_not_pile_up(bank, monkeypatch):
    monkeypatch.setattr(MODULE, "_KEPT", 5000)
    shift = Tilt(alpha=(0.7,))
    requests, positions = grid()
    answers = [opened(bank, seed=seed, tilt=shift).draft(requests, positions)[1] for seed in (0, 1, 0)]
    held = tilted_bank(bank, shift, 7)._outcomes
    assert len(held) == 1
    np.testing.assert_array_equal(answers[0], answers[2])


# -- confidences -----------------------------------------------------------------------------------------


def calibration_errors(bank, tilted, seeds):
    parts = [walk(bank, gamma=5, seed=seed, tilt=tilted) for seed in range(seeds)]
    confidence, accepted = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    survival = np.multiply.accumulate(confidence.astype(np.float64), axis=1)
    return [ece(survival[:, k], accepted > k) for k in range(5)], confidence, accepted


def test_a_calibrated_bank_stays_calibrated():
    """ECE of the cumulative confidence, 20 bins, 50,000 steps: at most 1.2 % before, at most 1.1 % after."""
    bank = recorded_bank(texts=120, length=150)
    before, _, _ = calibration_errors(bank, None, seeds=3)
    after, confidence, accepted = calibration_errors(bank, tilt(bank, to=CURVE), seeds=3)
    assert max(before) < 0.012
    assert max(after) < 0.012
    # In the large: of those that reach a position, as many survive as the confidences say.
    for k in range(5):
        reached = accepted >= k
        assert confidence[reached, k].mean() == pytest.approx(np.mean(accepted[reached] > k), abs=0.012)


def test_an_overconfident_bank_stays_as_overconfident():
    bank = recorded_bank(texts=60, over=0.5)
    before, after = expected_gaps(bank, None), expected_gaps(bank, tilt(bank, to=CURVE))
    assert np.all(before > 0.02)
    np.testing.assert_allclose(after, before, atol=0.012)


def expected_gaps(bank, tilted):
    """mean(c_k) - share accepted among the blocks that reach k, first domain."""
    requests, confidence, accepted = walk(bank, gamma=5, seed=0, tilt=tilted)
    first = requests % 3 == 0
    c, n = confidence[first], accepted[first]
    return np.array([c[n >= k, k].mean() - np.mean(n[n >= k] > k) for k in range(3)])


def test_confidence_shifts_are_by_domain_and_keep_logits_apart(bank):
    tilted = tilt(bank, to=CURVE)
    plain, moved = (opened(bank, gamma=5, seed=1, tilt=t) for t in (None, tilted))
    at = np.arange(60), np.full(60, 20)
    c, d = plain.draft(*at)[0].astype(float), moved.draft(*at)[0].astype(float)
    shift = np.log(d / (1 - d)) - np.log(c / (1 - c))
    for i in range(3):
        np.testing.assert_allclose(shift[i::3], np.tile(tilted.confidence[i], (20, 1)), atol=5e-3)


# -- labels, blocks, caches ------------------------------------------------------------------------------


def test_labels_say_tilted_and_where_the_level_comes_from(bank):
    tilted = tilt(bank, to=CURVE, name="dsv4")
    assert BankDrafts(bank, gamma=5, tilt=tilted).label == "tilted:dsv4:recorded:tiny:dspark:first-5-of-7"
    assert BankDrafts(bank, gamma=2, tilt=tilted).label == "tilted:dsv4:recorded:tiny:dspark:first-2-of-7"
    more = replace(tilted, then=Tilt(alpha=(0.5,)))
    assert BankDrafts(bank, gamma=5, tilt=more).label == "tilted:dsv4:recorded:tiny:dspark:first-5-of-7:tilted"
    assert BankDrafts(bank, tilt=Tilt()).label == "recorded:tiny:dspark"


def test_shorter_blocks_are_the_beginning_of_longer_ones(bank):
    tilted = tilt(bank, to=CURVE)
    requests, positions = grid()
    whole, cut = (opened(bank, gamma=g, seed=6, tilt=tilted).draft(requests, positions) for g in (5, 2))
    np.testing.assert_array_equal(np.minimum(whole[1], 2), cut[1])
    np.testing.assert_array_equal(whole[0][:, :2], cut[0])
    with pytest.raises(InputError, match=r"the curve 'curve' ends at position 5.*got 6, expected 1 to 5"):
        BankDrafts(bank, gamma=6, tilt=tilted)
    with pytest.raises(InputError, match=r"expected 1 to 5"):
        BankDrafts(bank, tilt=tilted)


def test_of_a_longer_curve_the_beginning_is_used():
    bank = recorded_bank(3)
    assert tilt(bank, to=CURVE).gamma == 3
    assert BankDrafts(bank, tilt=tilt(bank, to=CURVE)).gamma == 3


def test_a_further_shift_adds_up(bank):
    tilted = tilt(bank, to=CURVE)
    same = replace(
        tilted,
        alpha=tuple(tuple(v + 0.5 for v in row) for row in tilted.alpha),
        confidence=tuple(tuple(v - 1.0 for v in row) for row in tilted.confidence),
    )
    requests, positions = grid()
    one, two = (
        opened(bank, gamma=5, tilt=t).draft(requests, positions)
        for t in (replace(tilted, then=Tilt((0.5,), (-1.0,))), same)
    )
    np.testing.assert_array_equal(one[1], two[1])
    np.testing.assert_allclose(one[0], two[0], rtol=1e-6)


def test_shifts_are_solved_once_and_found_again(bank, tmp_path, monkeypatch):
    first = tilt(bank, to=CURVE)
    (file,) = (tmp_path / "cache" / "tilts-1").glob("*.json")
    monkeypatch.setattr(MODULE, "_solve", lambda *_: pytest.fail("solved again"))
    assert tilt(bank, to=CURVE, name="other") == replace(first, to="other")
    monkeypatch.undo()
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    for damage in ("", "{", "[[[1.0]]]", json.dumps(np.full((2, 3, 5), 99.0).tolist())):
        file.write_text(damage)
        assert tilt(bank, to=CURVE) == first
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "file"))
    assert tilt(bank, to=CURVE) == first


def test_banks_of_other_confidences_have_other_shifts(bank):
    warm = replace(bank, confidence=bank.confidence**1.1)
    one, two = tilt(bank, to=CURVE), tilt(warm, to=CURVE)
    assert one.alpha == two.alpha
    assert one.confidence != two.confidence


# -- what is wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ({}, "field 'curve': got {}, expected an acceptance curve for each domain"),
        ([0.5], "an acceptance curve for each domain"),
        ({"math": (0.5,), "code": (0.5,)}, r"the curve 'mine' has no domain 'chat'"),
        (dict.fromkeys((*DOMAINS, "poetry"), (0.5,)), r"the bank has no domain 'poetry'"),
        (dict.fromkeys(DOMAINS, ()), r"curve.math.*a list of numbers strictly between 0 and 1"),
        (dict.fromkeys(DOMAINS, 0.5), r"curve.math.*got 0.5, expected a list"),
        (dict.fromkeys(DOMAINS, (0.5, 1.0)), r"strictly between 0 and 1"),
        (dict.fromkeys(DOMAINS, (0.0,)), r"strictly between 0 and 1"),
        (dict.fromkeys(DOMAINS, (float("nan"),)), r"strictly between 0 and 1"),
        (dict.fromkeys(DOMAINS, ("0.5",)), r"strictly between 0 and 1"),
        (dict.fromkeys(DOMAINS, (True,)), r"strictly between 0 and 1"),
        (dict.fromkeys(DOMAINS[:2], (0.5, 0.5)) | {"chat": (0.5,)}, r"as many positions in every domain"),
        (
            CURVE | {"code": (0.84, 0.8, 1e-14, 0.7, 0.71)},
            r"field 'curve.code': no shift reaches this acceptance at position 3 of domain 'code', got 1e-14, "
            r"expected between .* and ",
        ),
    ],
)
def test_bad_curves_are_one_clear_error(bank, curve, message):
    with pytest.raises(InputError, match=message):
        tilt(bank, to=curve, name="mine")


def test_a_level_of_confidence_that_cannot_be_kept_is_named():
    """c = 0.99 where alpha = 0.5; at alpha' = 0.9 the confidences would have to be 1.39."""
    rows = 400
    header = BankHeader(1, "recorded", "d", "t", "s", "x", ("any",), -10.0, 10.0, (1.0,))
    sure = make_bank(
        header,
        confidence_logit=np.full((rows, 1), 4.6),
        alpha=np.full((rows, 1), 0.5),
        accepted=np.random.default_rng(0).integers(0, 2, rows),
        bounds=np.array([0, rows]),
        domain=np.array([0]),
    )
    with pytest.raises(InputError, match=r"no shift reaches this mean confidence at position 1 of domain 'any'"):
        tilt(sure, to={"any": (0.9,)})


def test_a_tilt_of_other_domains_is_named(bank):
    other = DomainTilt(("math", "code"), ((0.0,),) * 2, ((0.0,),) * 2)
    with pytest.raises(InputError, match=r"the tilt has no domain 'chat', expected one of math, code"):
        BankDrafts(bank, gamma=1, tilt=other)


# -- published curves and files --------------------------------------------------------------------------


def test_published_curves_by_name():
    assert published_curve("dsv4", "mtp") == preset_curves("dsv4")["mtp"]
    assert published_curve("qwen3-4b:dflash", "mtp") == preset_curves("qwen3-4b")["dflash"]
    with pytest.raises(InputError, match=r"'dsv4' has no acceptance curve of drafter 'eagle3'.*dsv4:dspark, dsv4:mtp"):
        published_curve("dsv4", "eagle3")
    with pytest.raises(InputError, match=r"drafter 'x'.*got 'qwen3-4b:x', expected one of qwen3-4b:dspark"):
        published_curve("qwen3-4b:x", "dspark")
    with pytest.raises(InputError, match=r"got 'gpt', expected one of dsv4"):
        published_curve("gpt", "dspark")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"c.json.*is not JSON"),
        ('{"code": [0.5], "code": [0.6]}', r"the key .code. stands there twice"),
        ("[0.5]", r"c.json, field 'curve': got \[0.5\], expected an acceptance curve"),
        ('{"code": [0.5, 2]}', r"c.json, field 'curve.code'.*strictly between 0 and 1"),
        ('{"code": [0.5], "chat": [0.5, 0.4]}', r"as many positions in every domain"),
    ],
)
def test_curve_files(tmp_path, content, message):
    path = tmp_path / "c.json"
    path.write_text('{"code": [0.5, 0.25]}')
    assert read_curve(path) == {"code": (0.5, 0.25)}
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_curve(path)
    with pytest.raises(InputError, match=r"none.json: cannot be read .*expected an acceptance curve"):
        read_curve(tmp_path / "none.json")
