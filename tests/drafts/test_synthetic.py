"""Generated samples have the asked-for acceptance curve, discrimination and calibration error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsim.drafts import SyntheticSpec, bank_report, generate, preset_curves, preset_spec
from dsim.drafts.reliability import auc, ece, visited_rows
from dsim.errors import InputError

SPEC = SyntheticSpec(
    drafter="x",
    source="test",
    acceptance={"chat": (0.7, 0.65, 0.6), "code": (0.9, 0.85, 0.8)},
    auc=(0.80, 0.80, 0.82),
    ece=(0.03, 0.025, 0.02),
    trajectories=96,
    length=600,
)


@pytest.fixture(scope="module")
def bank():
    return generate(SPEC)


def test_the_curve_is_met_in_every_domain(bank):
    report = bank_report(bank)
    for domain, curve in SPEC.acceptance.items():
        np.testing.assert_allclose(report[domain]["acceptance"], curve, atol=0.012)


def test_auc_and_ece_are_met_on_the_reference_domain(bank):
    report = bank_report(bank)["chat"]
    np.testing.assert_allclose(report["auc"], SPEC.auc, atol=0.004)
    np.testing.assert_allclose(report["ece"], SPEC.ece, atol=0.003)


def test_ece_is_met_in_the_other_domains_as_far_as_a_calibrated_head_can(bank):
    report = bank_report(bank)["code"]
    assert np.all(np.array(report["ece"]) >= np.array(SPEC.ece) - 0.003)
    np.testing.assert_allclose(report["ece"], SPEC.ece, atol=0.01)


def test_other_seeds_meet_them_too():
    report = bank_report(generate(replace(SPEC, seed=11)))["chat"]
    np.testing.assert_allclose(report["acceptance"], SPEC.acceptance["chat"], atol=0.015)
    np.testing.assert_allclose(report["auc"], SPEC.auc, atol=0.004)


def test_confidences_err_towards_overconfidence(bank):
    visited = visited_rows(bank.accepted, bank.bounds, bank.usable())
    survival = np.multiply.accumulate(bank.confidence[visited].astype(float), axis=1)
    truth = np.multiply.accumulate(bank.alpha[visited].astype(float), axis=1)
    assert np.all(survival.mean(axis=0) > truth.mean(axis=0))


def test_less_discrimination_and_more_error_on_demand():
    worse = bank_report(generate(replace(SPEC, auc=(0.65,) * 3, ece=(0.12, 0.12, 0.10))))["chat"]
    np.testing.assert_allclose(worse["auc"], 0.65, atol=0.006)
    np.testing.assert_allclose(worse["ece"], (0.12, 0.12, 0.10), atol=0.004)


def _lag_correlation(bank, lag):
    alpha = bank.alpha[:, 0].reshape(-1, SPEC.length).astype(float)
    logit = np.log(np.clip(alpha, 0.01, 0.99) / (1 - np.clip(alpha, 0.01, 0.99)))[:96]
    return np.corrcoef(logit[:, :-lag].ravel(), logit[:, lag:].ravel())[0, 1]


def test_autocorrelation_and_spread_between_requests(bank):
    flat = generate(replace(SPEC, text_share=0.0, request_share=0.0))
    assert abs(_lag_correlation(flat, 1)) < 0.02
    # request share 0.2 + text share 0.5 x 0.8 ** lag, a little less for the clipped logit.
    assert _lag_correlation(bank, 1) == pytest.approx(0.2 + 0.5 * 0.8, abs=0.08)
    assert _lag_correlation(bank, 20) == pytest.approx(0.2, abs=0.08)
    means = bank.alpha[:, 0].reshape(-1, SPEC.length)[:96].mean(axis=1)
    flat_means = flat.alpha[:, 0].reshape(-1, SPEC.length)[:96].mean(axis=1)
    assert means.std() > 4 * flat_means.std()


def test_same_spec_same_bytes_and_drafters_share_their_texts(bank):
    again = generate(SPEC)
    np.testing.assert_array_equal(again.confidence_bytes, bank.confidence_bytes)
    np.testing.assert_array_equal(again.accepted, bank.accepted)
    other = generate(replace(SPEC, drafter="y"))
    same = np.corrcoef(bank.alpha_bytes[:, 0], other.alpha_bytes[:, 0])[0, 1]
    assert 0.5 < same < 0.95  # the text is shared (70 % of the variance), the draft's own part is not


def test_unreachable_wishes_name_the_range():
    with pytest.raises(InputError, match=r"x, chat, position 1.*got 0.99, expected between 0\.\d+ and 0\.\d+"):
        generate(replace(SPEC, auc=(0.99,) * 3, trajectories=16))
    relaxed = bank_report(generate(replace(SPEC, auc=(0.99,) * 3, trajectories=16, strict=False)))["chat"]
    assert relaxed["auc"][0] < 0.9


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"acceptance": {"chat": (0.7, 1.0, 0.6)}}, "acceptance.chat"),
        ({"acceptance": {"chat": (0.7, 0.6, 0.6), "code": (0.5,)}}, "acceptance.code"),
        ({"auc": (0.8, 0.8)}, "auc"),
        ({"ece": (0.1, 0.1, 0.9)}, "ece"),
        ({"spread": 0.0}, "spread"),
        ({"autocorrelation": 1.0}, "autocorrelation"),
        ({"request_share": 0.7, "text_share": 0.7}, "text_share"),
        ({"length": 4}, "length"),
    ],
)
def test_bad_specs(changes, field):
    with pytest.raises(InputError) as caught:
        replace(SPEC, **changes)
    assert caught.value.field == field


def test_auc_and_ece_by_hand():
    assert auc(np.array([0.9, 0.8, 0.3, 0.3]), np.array([True, False, True, False])) == pytest.approx((1 + 1 + 0.5) / 4)
    assert np.isnan(auc(np.array([0.1, 0.2]), np.array([True, True])))
    # Two bins of 20 are used: 0.52 (2 outcomes, 1 hit) and 0.97 (2 outcomes, 2 hits).
    predicted = np.array([0.52, 0.52, 0.97, 0.97])
    assert ece(predicted, np.array([1, 0, 1, 1])) == pytest.approx((2 * 0.02 + 2 * 0.03) / 4)


def test_visited_rows_by_hand():
    accepted = np.array([2, 0, 0, 1, 0, 0, 0, 0])
    rows = visited_rows(accepted, np.array([0, 5, 8]), np.array([4, 2]))
    # Text 1: 0 -> 3 -> beyond 4. Text 2 (rows 5..): 0 -> 1 -> 2 = end.
    assert rows.tolist() == [0, 3, 5, 6]


def test_presets_are_the_published_curves():
    golden = preset_curves("dsv4")["dspark"]["code"]
    survival = np.cumprod(golden)
    np.testing.assert_allclose(1 + np.cumsum(survival), [1.84, 2.51, 3.01, 3.36, 3.61], atol=1e-9)
    mtp = np.cumprod(preset_curves("dsv4")["mtp"]["code"])
    np.testing.assert_allclose(1 + np.cumsum(mtp), [1.79, 2.27, 2.49, 2.54, 2.55], atol=1e-9)
    qwen = preset_curves("qwen3-4b")
    assert qwen["dspark"]["math"][0] == 0.9053
    assert qwen["eagle3"]["chat"][6] == 0.73253
    # Shift of chat against code at position 1, in logits, is that of Fig. 2.
    shift = np.log(0.7353 / 0.2647) - np.log(0.8857 / 0.1143)
    chat = preset_curves("dsv4")["dspark"]["chat"][0]
    assert np.log(chat / (1 - chat)) - np.log(0.84 / 0.16) == pytest.approx(shift, abs=1e-9)
    pooled = preset_curves("dsv4-flash-0731")["dspark"]["mixed"]
    assert pooled[0] == pytest.approx(55 / 78)
    assert pooled[1] == pytest.approx(34 / 55)


def test_preset_wishes_and_errors():
    spec = preset_spec("dsv4", "dspark")
    assert spec.auc[0] == 0.818
    assert spec.ece[2] == pytest.approx(0.017)
    assert not spec.strict
    assert preset_spec("dsv4", "dspark", auc=(0.7,)).auc == (0.7,) * 5
    with pytest.raises(InputError, match="expected one of dsv4, qwen3-4b, dsv4-flash-0731"):
        preset_spec("gpt", "dspark")
    with pytest.raises(InputError, match="expected one of dspark, mtp"):
        preset_spec("dsv4", "eagle3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "drafter"),
    [
        ("dsv4", "dspark"),
        ("dsv4", "mtp"),
        ("qwen3-4b", "dspark"),
        ("qwen3-4b", "dflash"),
        ("qwen3-4b", "eagle3"),
        ("dsv4-flash-0731", "dspark"),
    ],
)
def test_every_preset_has_its_curve_and_discrimination(preset, drafter):
    spec = preset_spec(preset, drafter)
    report = bank_report(generate(spec))
    for domain, curve in spec.acceptance.items():
        np.testing.assert_allclose(report[domain]["acceptance"], curve, atol=0.015)
    reference = report[spec.reference]
    np.testing.assert_allclose(reference["auc"], spec.auc, atol=0.025)
    np.testing.assert_allclose(reference["ece"], spec.ece, atol=0.014)
