"""Calibration: STS finds temperatures that are known, the files of the engines, and a map that keeps up with drift."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, logit
from standins import ConstantCost, ScriptedDrafts, ScriptedPolicy, fixed_arrivals

from dsim.cluster import Cluster
from dsim.drafts import (
    BankHeader,
    DraftSource,
    OnlineCalibration,
    OnlineSts,
    StsFit,
    apply_temperatures,
    calibrated,
    check_bank,
    fit_bank,
    fit_sts,
    make_bank,
    read_temperatures,
    recalibrated,
    split_blocks,
    write_temperatures,
)
from dsim.drafts.luck import uniform
from dsim.drafts.reliability import auc, ece, merged_bins, reliability_table
from dsim.errors import InputError
from dsim.options import ReplicaConfig
from dsim.prices import DraftCost
from dsim.workload import OpenLoop, RequestStream

TRUE = (1.6, 0.7, 1.3, 1.0)


def blocks(n, temperatures=TRUE, mean=1.8, spread=1.5, seed=0):
    """Blocks whose acceptance is sigmoid(logit / temperature): logits, accepted, alpha."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(mean, spread, (n, len(temperatures)))
    alpha = expit(truth)
    accepted = np.logical_and.accumulate(rng.random(truth.shape) < alpha, axis=1).sum(axis=1)
    return truth * np.asarray(temperatures), accepted, alpha


# -- reliability -----------------------------------------------------------------------------------------


def test_ece_by_hand():
    predicted, observed = np.array([0.05, 0.15, 0.15, 0.95]), np.array([0, 1, 0, 1])
    # Bins of 0.1: |0 - 0.05|, |1 - 0.30|, |1 - 0.95|, over four blocks.
    assert ece(predicted, observed, bins=10) == pytest.approx(0.80 / 4)
    # Two a bin: the first two bins hold three, and the last joins them: |(1 - 0.35) + (1 - 0.95)|.
    assert ece(predicted, observed, bins=10, min_bin=2) == pytest.approx(0.70 / 4)
    assert ece(np.array([1.0, 1.0]), np.array([1, 0])) == pytest.approx(0.5)
    # One bin sees the level only.
    assert ece(np.array([0.0, 1.0]), np.array([1, 0]), bins=1) == 0.0


def test_bins_are_merged_until_they_hold_enough():
    assert merged_bins(np.array([3, 1, 0, 1, 2, 1]), 2).tolist() == [0, 1, 1, 1, 2, 2]
    assert merged_bins(np.array([0, 1, 0]), 2).tolist() == [0, 0, 0]
    assert merged_bins(np.array([2, 2, 2]), 2).tolist() == [0, 1, 2]


def test_the_reliability_table_by_hand():
    confidence = np.array([[0.9, 0.5], [0.9, 0.5], [0.3, 0.5], [0.3, 0.1]])
    accepted = np.array([2, 1, 1, 0])
    first, second = reliability_table(confidence, accepted, bins=10)
    assert (first.position, second.position) == (1, 2)
    # Bin 0.3: 0.6 predicted, 1 observed; bin 0.9: 1.8 predicted, 2 observed.
    assert first.ece == pytest.approx((0.4 + 0.2) / 4)
    assert first.counts.tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 2]
    assert first.observed[[3, 9]].tolist() == [0.5, 1.0]
    assert first.predicted[[3, 9]] == pytest.approx([0.3, 0.9])
    assert np.isnan(first.observed[0])
    assert first.observed_mean == 0.75
    assert first.predicted_mean == pytest.approx(0.6)
    # One positive at 0.3, ranked above 0.03, tied with one, below one: pairs (1, 2), (1, 3), (1, 4), (.., 1) for k = 1.
    assert first.auc == pytest.approx((1 + 1 + 0.5) / 3)
    # Products 0.45, 0.45, 0.15, 0.03 against the outcome 1, 0, 0, 0.
    assert second.auc == pytest.approx((0.5 + 1 + 1) / 3)
    assert second.ece == pytest.approx((0.1 + 0.15 + 0.03) / 4)
    known = reliability_table(confidence, accepted, alpha=np.full((4, 2), 0.5), bins=10)
    assert known[1].observed_mean == 0.25
    assert known[1].auc == second.auc


def test_a_temperature_of_the_first_position_leaves_its_auc():
    logits, accepted, _ = blocks(3000)
    tables = [reliability_table(apply_temperatures(logits, (t, 1.0, 1.0, 1.0)), accepted) for t in (0.5, 1.0, 1.7, 3.0)]
    assert len({table[0].auc for table in tables}) == 1
    assert len({table[0].ece for table in tables}) == 4
    # Later products weigh the first confidence differently, so their order moves.
    assert len({table[1].auc for table in tables}) == 4


# -- STS -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_known_temperatures_are_recovered(seed):
    logits, accepted, _ = blocks(30_000, seed=seed)
    fit = fit_sts(logits, accepted)
    np.testing.assert_allclose(fit.temperatures, TRUE, rtol=0.12)
    assert fit.temperatures[0] == pytest.approx(TRUE[0], rel=0.05)
    assert not any(fit.at_bound)
    assert fit.n == 30_000
    assert fit.survivors == tuple(int((accepted >= k).sum()) for k in (1, 2, 3, 4))
    assert max(fit.ece_after) < 0.012
    assert fit.ece_before[0] > 3 * fit.ece_after[0]
    # A temperature keeps the order.
    assert fit.auc[0] == pytest.approx(auc(expit(logits[:, 0]), accepted >= 1), rel=1e-9)


def test_expected_labels_say_the_same_with_less_noise():
    fits, expected = [], []
    for seed in range(5):
        logits, accepted, alpha = blocks(3000, seed=seed)
        fits.append(fit_sts(logits, accepted, noise=0.0).temperatures)
        expected.append(fit_sts(logits, accepted, alpha=alpha, noise=0.0).temperatures)
    error, smaller = (np.sqrt(np.mean(np.log(np.array(f) / TRUE) ** 2, axis=0)) for f in (fits, expected))
    assert np.all(smaller < error)
    assert np.all(smaller < 0.02)


def test_without_our_rules_it_is_the_plain_minimum_left_to_right():
    logits, accepted, _ = blocks(2000)
    fit = fit_sts(logits, accepted, noise=0.0, min_bin=0, grid=33)
    grid, product = np.geomspace(0.25, 4.0, 33), np.ones(2000)
    for k in range(4):
        errors = [ece(product * expit(logits[:, k] / t), accepted > k) for t in grid]
        assert fit.temperatures[k] == pytest.approx(grid[int(np.argmin(errors))])
        assert fit.ece_after[k] == pytest.approx(min(errors))
        product = product * expit(logits[:, k] / fit.temperatures[k])
        assert fit.ece_before[k] == pytest.approx(ece(np.prod(expit(logits[:, : k + 1]), axis=1), accepted > k))


def test_the_order_of_positions_matters():
    """With an overconfident first position left as it is, the second would have to make up for it."""
    logits, accepted, _ = blocks(30_000, (2.5, 1.0))
    fit = fit_sts(logits, accepted, noise=0.0)
    assert fit.temperatures == pytest.approx((2.5, 1.0), rel=0.06)
    grid = np.geomspace(0.25, 4.0, 129)
    raw = expit(logits[:, 0])
    alone = grid[int(np.argmin([ece(raw * expit(logits[:, 1] / t), accepted > 1) for t in grid]))]
    assert alone > 1.25
    # A first position that is calibrated beforehand changes nothing for the second.
    again = fit_sts(np.column_stack([logits[:, 0] / fit.temperatures[0], logits[:, 1]]), accepted, noise=0.0)
    assert again.temperatures == pytest.approx((1.0, fit.temperatures[1]), rel=1e-6)


def test_few_survivors_do_not_drive_temperatures_to_the_ends():
    true, plain_ends, ends, worst = (1.3,) * 7, 0, 0, 0.0
    for seed in range(6):
        logits, accepted, _ = blocks(400, true, mean=-0.5, seed=seed)
        assert np.count_nonzero(accepted >= 5) < 15
        plain_ends += sum(fit_sts(logits, accepted, noise=0.0, min_bin=0).at_bound)
        fit = fit_sts(logits, accepted)
        ends += sum(t in (0.25, 4.0) for t in fit.temperatures)
        worst = max(worst, float(np.abs(np.log(fit.temperatures)).max()))
        # Where hardly a block survives there is nothing to go by.
        assert fit.temperatures[6] == 1.0
    assert plain_ends >= 6
    assert ends == 0
    assert worst < np.log(2.5)


def test_a_temperature_at_its_bound_is_flagged_and_ties_go_to_one():
    logits, accepted, _ = blocks(20_000, (3.0, 1.0))
    fit = fit_sts(logits, accepted, bounds=(0.5, 2.0))
    assert fit.at_bound == (True, False)
    assert 1.9 < fit.temperatures[0] <= 2.0
    assert fit_sts(logits, accepted, bounds=(0.5, 2.0), noise=0.0).temperatures[0] == 2.0
    # Logits of 0 are the same at all temperatures.
    assert fit_sts(np.zeros((50, 2)), np.arange(50) % 3, noise=0.0).temperatures == (1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": np.zeros(4)}, r"field 'logits': got \(4,\), expected an array \[N, gamma\]"),
        ({"logits": np.full((4, 2), np.nan)}, "field 'logits': .*expected finite numbers"),
        ({"accepted": np.zeros(3, int)}, r"field 'accepted': got 'int64\[3\]', expected integers \[4\]"),
        ({"accepted": np.zeros(4)}, r"field 'accepted': got 'float64\[4\]'"),
        ({"accepted": np.array([0, 1, 2, 3])}, r"field 'accepted': got 3, expected 0..gamma = 2"),
        ({"accepted": np.array([0, 1, 2, -1])}, "field 'accepted': got -1"),
        ({"alpha": np.zeros((4, 3))}, "field 'alpha'"),
        ({"alpha": np.full((4, 2), 1.5)}, "field 'alpha': .*probabilities"),
        ({"bounds": (2.0, 1.0)}, r"field 'bounds': got \(2.0, 1.0\), expected 0 < low < high"),
        ({"bounds": (0.0, 1.0)}, "field 'bounds'"),
        ({"grid": 1}, "field 'grid': got 1"),
        ({"bins": 0}, "field 'bins': got 0"),
        ({"min_bin": -1}, "field 'min_bin': got -1"),
        ({"noise": -1.0}, "field 'noise': got -1.0"),
    ],
)
def test_bad_blocks_and_options(changes, message):
    given = {"logits": np.zeros((4, 2)), "accepted": np.zeros(4, dtype=np.int64)} | changes
    with pytest.raises(InputError, match=message):
        fit_sts(given.pop("logits"), given.pop("accepted"), **given)


# -- files -----------------------------------------------------------------------------------------------


def test_temperatures_survive_the_file(tmp_path):
    path = tmp_path / "sts.json"
    values = (1.1, 1 / 3, 2.0)
    write_temperatures(path, values)
    assert json.loads(path.read_text()) == {"temperatures": list(values)}
    assert read_temperatures(path, 3) == values
    write_temperatures(path, np.array([1.5, 1.0]))  # replaces it
    assert read_temperatures(path, 2) == (1.5, 1.0)
    assert [p.name for p in tmp_path.iterdir()] == ["sts.json"]
    path.write_text('{"temperatures": [1, 2]}')  # integers are numbers
    assert read_temperatures(path, 2) == (1.0, 2.0)
    fit = StsFit((1.2, 0.8), (0.0,) * 2, (0.0,) * 2, (0.5,) * 2, (1, 1), 1, (False,) * 2)
    write_temperatures(path, fit)
    assert read_temperatures(path, 2) == (1.2, 0.8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"sts.json, line 1: is not JSON, or cut off \(.*, expected {\"temperatures\": \[...\]}"),
        ('{"temperatures": [1.0, 1.0]', "is not JSON"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        ("[" * 100_000, "is nested too deeply"),
        ("[1.0, 1.0]", r"got \[1.0, 1.0\], expected an object"),
        ('{"temperatures": [1.0, 1.0], "scale": 2}', "field 'scale': unknown key, expected temperatures only"),
        ('{"temperatures": [1.0, 1.0], "temperatures": [2.0, 2.0]}', "the key .temperatures. stands there twice"),
        ("{}", "field 'temperatures': missing key"),
        ('{"temperatures": 1.0}', "field 'temperatures': got 1.0, expected 2 finite numbers > 0"),
        ('{"temperatures": [1.0]}', r"field 'temperatures': got \[1.0\], expected 2 finite numbers > 0"),
        ('{"temperatures": [1.0, 1.0, 1.0]}', "expected 2 finite numbers > 0"),
        ('{"temperatures": [1.0, "1.0"]}', r"field 'temperatures\[1\]': got \"'1.0'\", expected a finite number > 0"),
        ('{"temperatures": [1.0, null]}', r"field 'temperatures\[1\]': got 'None'"),
        ('{"temperatures": [true, 1.0]}', r"field 'temperatures\[0\]': got 'True'"),
        ('{"temperatures": [1.0, NaN]}', r"field 'temperatures\[1\]': got 'nan'"),
        ('{"temperatures": [1.0, Infinity]}', r"field 'temperatures\[1\]': got 'inf'"),
        ('{"temperatures": [1.0, 1e999]}', r"field 'temperatures\[1\]': got 'inf'"),
        ('{"temperatures": [1.0, 0]}', r"field 'temperatures\[1\]': got '0'"),
        ('{"temperatures": [-1.0, 1.0]}', r"field 'temperatures\[0\]': got '-1.0', expected a finite number > 0"),
        ('{"temperatures": [1.0, [1.0]]}', r"field 'temperatures\[1\]'"),
        ('{"temperatures": [1.0, 1' + "0" * 400 + "]}", r"field 'temperatures\[1\]'"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "sts.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message) as error:
        read_temperatures(path, 2)
    assert error.value.file == str(path)


def test_a_file_that_is_not_there_or_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.json: cannot be read \(No such file"):
        read_temperatures(tmp_path / "nowhere.json", 2)
    with pytest.raises(InputError, match=r"cannot be read .*expected {\"temperatures\""):
        read_temperatures(tmp_path, 2)
    for bad in ((), (1.0, -1.0), (1.0, np.nan), (True, 1.0), 3.0):
        with pytest.raises(InputError, match="temperatures"):
            write_temperatures(tmp_path / "sts.json", bad)
    assert list(tmp_path.iterdir()) == []


# -- banks -----------------------------------------------------------------------------------------------


def bank(texts=24, length=300, temperatures=TRUE):
    logits, accepted, alpha = blocks(texts * length, temperatures)
    gamma = len(temperatures)
    header = BankHeader(gamma, "recorded", "d", "t", "s", "x", ("code", "chat"), -10.0, 10.0, (1.0,) * gamma)
    return make_bank(
        header,
        confidence_logit=logits,
        alpha=alpha,
        accepted=accepted,
        bounds=np.arange(texts + 1) * length,
        domain=np.arange(texts) % 3 // 2,
    )


def test_a_split_shares_no_text():
    whole = bank()
    first, second = split_blocks(whole, 0.25, seed=3)
    for part, texts in ((first, [4, 2]), (second, [12, 6])):
        check_bank(part, "part")
        assert np.bincount(part.domain).tolist() == texts
        assert part.header == whole.header
        assert np.diff(part.bounds).tolist() == [300] * sum(texts)
    # Every text of the whole is in one of the two, all of it.
    key = whole.confidence_bytes.reshape(24, -1)
    parts = [part.confidence_bytes.reshape(-1, 1200) for part in (first, second)]
    found = [[int(np.flatnonzero((key == row).all(axis=1))[0]) for row in part] for part in parts]
    assert sorted(found[0] + found[1]) == list(range(24))
    np.testing.assert_array_equal(first.accepted.reshape(-1, 300), whole.accepted.reshape(-1, 300)[found[0]])
    np.testing.assert_array_equal(first.confidence.reshape(-1, 300, 4), whole.confidence.reshape(-1, 300, 4)[found[0]])
    np.testing.assert_array_equal(split_blocks(whole, 0.25, seed=3)[0].accepted, first.accepted)
    assert not np.array_equal(split_blocks(whole, 0.25, seed=4)[0].accepted, first.accepted)
    assert np.bincount(split_blocks(whole, 0.001)[0].domain).tolist() == [1, 1]
    assert np.bincount(split_blocks(whole, 0.999)[1].domain).tolist() == [1, 1]


def test_a_split_needs_a_share_and_two_texts_a_domain():
    for fraction in (0.0, 1.0, -0.5):
        with pytest.raises(InputError, match="field 'fraction'"):
            split_blocks(bank(), fraction)
    with pytest.raises(InputError, match="domain 'chat' cannot be split, got 1, expected 2 trajectories"):
        split_blocks(bank(texts=3), 0.5)


def test_a_bank_is_calibrated_on_one_part_and_judged_on_the_other():
    ours, others = split_blocks(bank(texts=48, length=600), 0.5)
    fit = fit_bank(ours)
    np.testing.assert_allclose(fit.temperatures, TRUE, rtol=0.15)
    np.testing.assert_allclose(fit_bank(ours, expected=True, noise=0.0).temperatures, TRUE, rtol=0.05)
    # Temperatures that a bank has are replaced, not multiplied.
    assert fit_bank(recalibrated(ours, (2.0,) * 4)) == fit
    after = calibrated(others, ours)
    assert after.header.temperatures == fit.temperatures
    for same in (calibrated(others, fit), calibrated(others, fit.temperatures)):
        np.testing.assert_array_equal(same.confidence, after.confidence)
    before, now = (
        max(row.ece for row in reliability_table(b.confidence, b.accepted, alpha=b.alpha)) for b in (others, after)
    )
    assert before > 0.04
    assert now < 0.012
    with pytest.raises(InputError, match="4 finite numbers > 0"):
        calibrated(others, (1.0, 1.0))
    assert fit_bank(ours, bounds=(0.9, 1.1)).at_bound[0]


# -- online ----------------------------------------------------------------------------------------------

GAMMA, ROWS = 4, 64


def traffic(n, code, rng, shift=0.7):
    """Blocks of a mix: the head is too shy on code and too sure on chat, by `shift` logits."""
    is_code = (rng.random(n) < code)[:, None]
    z = rng.normal(np.where(is_code, 1.6, 0.9), 1.4, (n, GAMMA))
    alpha = expit(z + np.where(is_code, shift, -shift))
    accepted = np.logical_and.accumulate(rng.random(z.shape) < alpha, axis=1).sum(axis=1)
    return z, alpha, accepted


@cache
def drift(mixes, steps=300, seed=0, shift=0.7, bias=True):
    """ECE (mean over positions) in the last two thirds of the last mix: frozen offline temperatures, online map."""
    rng = np.random.default_rng(seed)
    z, _, accepted = traffic(20_000, mixes[0], rng, shift)
    offline = fit_sts(z, accepted).temperatures
    sts = OnlineSts(offline, bias=bias)
    frozen, online, truth = [], [], []
    for code in mixes:
        frozen, online, truth = [], [], []
        for step in range(steps):
            z, alpha, accepted = traffic(ROWS, code, rng, shift)
            raw = expit(z).astype(np.float32)
            seen = sts.apply(raw)
            if step >= steps // 3:
                frozen.append(apply_temperatures(z, offline).cumprod(axis=1))
                online.append(seen.astype(float).cumprod(axis=1))
                truth.append(alpha.cumprod(axis=1))
            verified = np.logical_and.accumulate(seen > 0.4, axis=1).sum(axis=1)
            sts.update(raw, verified, np.minimum(accepted, verified))
    outcome = np.concatenate(truth)
    scores = [
        np.mean([ece(p[:, k], outcome[:, k]) for k in range(GAMMA)])
        for p in (np.concatenate(frozen), np.concatenate(online))
    ]
    return float(scores[0]), float(scores[1]), offline, sts


def test_online_keeps_up_when_the_mix_turns_from_chat_to_code():
    frozen, online, _, _ = drift((0.1, 0.9))
    assert frozen > 0.15
    assert online < 0.03
    # And back again: what was learned on code is forgotten.
    frozen, online, _, _ = drift((0.1, 0.9, 0.1))
    assert frozen > 0.04
    assert online < 0.03


def test_a_level_shift_needs_the_bias():
    frozen, both, _, sts = drift((0.1, 0.9))
    _, temperature, _, tempered = drift((0.1, 0.9), bias=False)
    assert temperature < 0.6 * frozen
    assert both < 0.4 * temperature
    assert tempered.bias == (0.0,) * GAMMA
    assert min(sts.bias) > 0.3


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_a_stationary_mix_is_served_as_well_as_offline(shift):
    frozen, online, _, _ = drift((0.3, 0.3), shift=shift)
    assert online < frozen + 0.005
    if shift == 0.0:
        assert frozen < 0.015


def test_code_makes_it_lenient_and_chat_tightens_it():
    _, _, offline, after_code = drift((0.3, 0.9))
    _, _, same, after_chat = drift((0.3, 0.05))
    assert offline == same
    c = np.full((1, GAMMA), 0.7, dtype=np.float32)
    before = apply_temperatures(logit(c), offline)
    lenient, tight = after_code.apply(c) - before, before - after_chat.apply(c)
    assert np.all((lenient > 0) & (tight > 0))
    assert lenient.mean() > 0.07
    assert tight.mean() > 0.07


def feed(sts, steps, law, verify, *, rng, rows=200, tell=None):
    """Steps of a stationary law alpha(z): `verify` chooses lengths by confidence; `tell` changes what is reported."""
    for _ in range(steps):
        z = rng.normal(0.8, 1.5, (rows, sts.gamma))
        raw = expit(z).astype(np.float32)
        accepted = np.logical_and.accumulate(rng.random(z.shape) < law(z), axis=1).sum(axis=1)
        verified = verify(raw)
        sts.update(raw, verified if tell is None else tell(verified), np.minimum(accepted, verified))


def confident(raw):
    return np.logical_and.accumulate(raw > 0.5, axis=1).sum(axis=1)


def test_censored_observations_do_not_bias():
    def law(z):
        return expit(z / 1.5 - 0.4)

    options = {"half_life": 1e6, "prior": 1.0}
    sts, naive = OnlineSts((1.0,) * 3, **options), OnlineSts((1.0,) * 3, **options)
    feed(sts, 300, law, confident, rng=np.random.default_rng(1))
    # Only what is above 0.5 was ever verified; the law is found, and holds below too.
    np.testing.assert_allclose(sts.temperatures, (1.5,) * 3, rtol=0.12)
    np.testing.assert_allclose(sts.bias, (-0.4,) * 3, atol=0.12)
    c = np.linspace(0.2, 0.95, 16, dtype=np.float32)[:, None] * np.ones(3, dtype=np.float32)
    np.testing.assert_allclose(sts.apply(c), law(logit(c)), atol=0.02)
    # The same outcomes with everything unverified counted as rejected: far off.
    feed(naive, 300, law, confident, rng=np.random.default_rng(1), tell=lambda v: np.full_like(v, 3))
    assert np.all(naive.apply(c)[8] < law(logit(c))[8] - 0.15)


def test_counts_by_hand():
    sts = OnlineSts((1.0, 1.0, 1.0), half_life=4.0, refit=2)
    c = np.full((2, 3), 0.5, dtype=np.float32)
    # Verified 2 of 3, accepted 1: positions 1 (accepted) and 2 (rejected). Verified 3, accepted 3: all three.
    sts.update(c, np.array([2, 3]), np.array([1, 3]))
    assert sts.observations.tolist() == [2.0, 2.0, 1.0]
    # Nothing verified is no block. One verified and rejected: position 1. Verified 1, accepted 1: position 1 only.
    sts.update(c, np.array([0, 1]), np.array([0, 0]))
    assert sts.observations.tolist() == [2.0, 2.0, 1.0]  # one block pending
    sts.update(c[:1], np.array([1]), np.array([1]))
    # Two blocks of a half-life of four: sqrt(1/2) of the old ones.
    np.testing.assert_allclose(sts.observations, np.array([2.0, 2.0, 1.0]) * 0.5**0.5 + [2.0, 0.0, 0.0])


def test_the_map_is_the_optimum():
    rng = np.random.default_rng(0)
    sts = OnlineSts((1.2, 0.8), half_life=1e9, prior=30.0, refit=1000)
    z = rng.normal(0.5, 2.0, (1000, 2))
    accepted = np.logical_and.accumulate(rng.random(z.shape) < expit(1.4 * z - 1.0), axis=1).sum(axis=1)
    sts.update(expit(z), np.full(1000, 2), accepted)
    grid = np.arange(-3.875, 4, 0.25)  # the pseudo-observations of the prior
    for k, seen in enumerate((accepted >= 0, accepted >= 1)):
        x = np.concatenate([z[seen, k], grid])
        weight = np.concatenate([np.ones(seen.sum()), np.full(grid.size, 30 / grid.size)])
        y = np.concatenate([(accepted[seen] > k).astype(float), expit(grid / (1.2, 0.8)[k])])

        def loss(theta, x=x, weight=weight, y=y):
            logits = theta[0] * x + theta[1]
            return float((weight * (np.logaddexp(0, logits) - y * logits)).sum())

        slope, shift = minimize(loss, (1.0, 0.0)).x
        assert 1 / sts.temperatures[k] == pytest.approx(slope, abs=0.02)
        assert sts.bias[k] == pytest.approx(shift, abs=0.02)


def test_positions_without_observations_keep_or_return_to_the_offline_temperatures():
    offline = (1.5, 0.7, 1.2)
    sts = OnlineSts(offline, half_life=300.0)
    rng = np.random.default_rng(0)

    def first_only(raw):
        return np.ones(len(raw), dtype=np.int64)

    feed(sts, 40, lambda z: expit(z - 1.5), first_only, rng=rng)
    assert sts.bias[0] < -1.0
    assert sts.temperatures[1:] == pytest.approx(offline[1:], rel=1e-3)
    assert sts.bias[1:] == pytest.approx((0.0, 0.0), abs=1e-3)
    feed(sts, 40, lambda z: expit(z - 1.5), lambda raw: np.full(len(raw), 3), rng=rng)
    assert sts.bias[1] < -0.5
    # 80 steps of 200 blocks later the half-life has passed 53 times.
    feed(sts, 80, lambda z: expit(z - 1.5), first_only, rng=rng)
    assert sts.temperatures[1:] == pytest.approx(offline[1:], rel=1e-3)
    assert sts.bias[0] < -1.0


def test_the_map_stays_in_its_bounds_and_keeps_the_order():
    rng = np.random.default_rng(0)
    sts = OnlineSts((1.0, 1.0), bounds=(0.8, 1.25), half_life=1e5, prior=1e-3)
    c = np.sort(rng.random((500, 2)).astype(np.float32), axis=0)
    for outcome in (0, 2, 1):
        for _ in range(10):
            sts.update(c, np.full(500, 2), np.full(500, outcome))
            assert all(0.8 - 1e-9 <= t <= 1.25 + 1e-9 for t in sts.temperatures)
            assert all(abs(b) <= 4.0 for b in sts.bias)
            assert np.all(np.diff(sts.apply(c), axis=0) >= 0)
    edge = sts.apply(np.array([[0.0, 1.0]], dtype=np.float32))
    assert edge.dtype == np.float32
    assert np.all((edge >= 0) & (edge <= 1))
    assert np.all(OnlineSts((1.0,)).apply(np.array([[0.3]], dtype=np.float32)) == np.float32(0.3))


def test_the_same_updates_give_the_same_map():
    maps = []
    for _ in range(2):
        sts = OnlineSts((1.0, 1.0))
        feed(sts, 30, lambda z: expit(z - 0.5), confident, rng=np.random.default_rng(5))
        maps.append((sts.temperatures, sts.bias))
    assert maps[0] == maps[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": (1.0, -1.0)}, r"field 'temperatures\[1\]'"),
        ({"temperatures": (1.0, 9.0)}, r"field 'temperatures': got \[1.0, 9.0\], expected within the bounds"),
        ({"half_life": 0.0}, "field 'half_life': got 0.0"),
        ({"prior": 0.0}, "field 'prior': got 0.0"),
        ({"refit": 0}, "field 'refit': got 0"),
        ({"bounds": (2.0, 0.5)}, "field 'bounds'"),
    ],
)
def test_bad_options_of_the_online_map(changes, message):
    with pytest.raises(InputError, match=message):
        OnlineSts(**({"temperatures": (1.0, 1.0)} | changes))


@pytest.mark.parametrize(
    ("shape", "verified", "accepted", "message"),
    [
        ((2, 3), [1, 1], [0, 0], r"expected \[R, 2\], R, R"),
        ((3, 2), [1, 1], [0, 0], r"expected \[R, 2\], R, R"),
        ((2, 2), [1, 1], [0], r"expected \[R, 2\], R, R"),
        ((2, 2), [1, 1], [0, 2], "got '2 accepted of 1', expected 0 <= accepted <= verified <= 2"),
        ((2, 2), [1, 3], [0, 2], "got '2 accepted of 3'"),
        ((2, 2), [1, 1], [0, -1], "got '-1 accepted of 1'"),
    ],
)
def test_outcomes_that_cannot_be(shape, verified, accepted, message):
    with pytest.raises(InputError, match=message):
        OnlineSts((1.0, 1.0)).update(np.full(shape, 0.5), np.array(verified), np.array(accepted))


# -- in the simulation -----------------------------------------------------------------------------------


class Watched(ScriptedDrafts):
    """Scripted drafts that keep what they are told."""

    def __init__(self, accepted, gamma, confidence=0.5):
        super().__init__(accepted, gamma, confidence)
        self.told = []

    def observe(self, requests, positions, verified, accepted):
        assert all(array.dtype == np.int64 for array in (requests, positions, verified, accepted))
        self.told.append((requests, positions, verified, accepted))


class Sure:
    """Every draft is accepted with probability p, and the drafter is always `c` sure."""

    paired, domains, label = True, ("any",), "scripted:sure"

    def __init__(self, p, c, gamma):
        self.p, self.c, self.gamma = p, c, gamma

    def open(self, request, domain, output_tokens):
        pass

    def draft(self, requests, positions):
        u = uniform(1, requests[:, None], positions[:, None], np.arange(self.gamma))
        accepted = np.logical_and.accumulate(u < self.p, axis=1).sum(axis=1)
        return np.full(u.shape, self.c, dtype=np.float32), accepted


def run(drafts, policy, requests=1, output=7, replicas=1, **config):
    trace = fixed_arrivals([0.0] * requests, 4, output)
    options = {"max_seqs": 8, "token_budget": 64, "block_tokens": 4, "kv_blocks": 1000} | config
    return Cluster(
        replicas=replicas,
        config=ReplicaConfig(**options),
        cost=ConstantCost(),
        drafts=drafts,
        draft_cost=DraftCost(),
        policy=policy,
        stream=RequestStream(trace, {"any": 1.0}, order_seed=0, domain_seed=0, order="trace"),
        load=OpenLoop(requests=requests),
        router="round-robin",
    ).run()


def test_a_source_is_told_what_became_of_its_drafts():
    drafts = Watched([[3, 0, 0, 0, 1, 0, 0], [0, 0, 2, 0, 0, 0, 0]], gamma=3)
    records = run(drafts, ScriptedPolicy(2), requests=2)
    told = [tuple(array.tolist() for array in step) for step in drafts.told]
    # Of 3 acceptable drafts 2 are verified; the last token of request 0 comes with its third step (1 + 3 + 1 + 2 = 7).
    assert told == [
        ([0, 1], [0, 0], [2, 2], [2, 0]),
        ([0, 1], [3, 1], [2, 2], [0, 0]),
        ([0, 1], [4, 2], [2, 2], [1, 2]),
        ([1], [5], [2], [0]),
    ]
    np.testing.assert_array_equal(records.steps["drafts"], [v.sum() for _, _, v, _ in drafts.told])
    np.testing.assert_array_equal(records.steps["accepted"], [a.sum() for _, _, _, a in drafts.told])


@pytest.mark.parametrize("config", [{}, {"replicas": 3}, {"kv_blocks": 12}, {"colocated": True, "prefill_chunk": 8}])
def test_online_calibration_in_a_run(config):
    """Counts agree with the step table whatever the batch does, the sure drafter is brought down to the truth."""
    told = []

    class Listening(Sure):
        def observe(self, requests, positions, verified, accepted):
            told.append((len(requests), int(verified.sum()), int(accepted.sum())))

    def once():
        told.clear()
        drafts = OnlineCalibration(Listening(p=0.6, c=0.9, gamma=3), OnlineSts((1.0,) * 3, refit=64))
        assert isinstance(drafts, DraftSource)
        assert drafts.label == "scripted:sure:online-sts"
        return drafts, run(drafts, ScriptedPolicy(lambda v: v.caps.copy()), requests=24, output=40, **config)

    drafts, records = once()
    steps = {name: np.asarray(records.steps[name]) for name in ("requests", "drafts", "accepted")}
    decoding = steps["requests"] > 0
    assert sorted(told) == sorted(zip(*(steps[n][decoding].tolist() for n in steps), strict=True))
    if "kv_blocks" in config:
        assert records.requests["preemptions"].sum() > 0
    learned = drafts.sts.apply(np.full((1, 3), 0.9, dtype=np.float32))[0]
    assert learned[0] == pytest.approx(0.6, abs=0.08)
    assert np.all(learned < 0.75)
    again = once()[1]
    for name, column in records.steps.items():
        np.testing.assert_array_equal(column, again.steps[name])


def test_the_policy_sees_the_calibrated_confidences_and_the_outcomes_stay():
    sources = [Sure(p=0.6, c=0.9, gamma=3), OnlineCalibration(Sure(p=0.6, c=0.9, gamma=3), OnlineSts((2.0,) * 3))]
    ids, positions = np.arange(2000), np.zeros(2000, dtype=np.int64)
    for request in range(2000):  # more than a source has room for at first
        sources[1].open(request, 0, 10)
    (plain, accepted), (seen, same) = (source.draft(ids, positions) for source in sources)
    np.testing.assert_array_equal(accepted, same)
    np.testing.assert_allclose(seen, expit(logit(plain.astype(float)) / 2), rtol=1e-6)
    assert np.all(plain == np.float32(0.9))


def test_a_wrapper_that_does_not_fit_or_is_told_of_another_draft():
    with pytest.raises(InputError, match="field 'temperatures': got 2, expected gamma = 3 of the draft source"):
        OnlineCalibration(Sure(0.6, 0.9, 3), OnlineSts((1.0, 1.0)))
    drafts = OnlineCalibration(Sure(0.6, 0.9, 2), OnlineSts((1.0, 1.0)))
    one = np.ones(1, dtype=np.int64)
    drafts.open(1, 0, 10)
    drafts.draft(one, 4 * one)
    with pytest.raises(RuntimeError, match="an outcome without the draft it belongs to"):
        drafts.observe(one, 5 * one, one, one)
    drafts.observe(one, 4 * one, one, one)
