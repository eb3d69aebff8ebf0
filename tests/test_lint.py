"""The lint's yardstick and its checks: for each a profile that has the fault, one that has not, and the numbers."""

from __future__ import annotations

import doctest
import importlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from banks import recorded_bank

from dsim.drafts import write_bank
from dsim.errors import InputError
from dsim.lint import (
    GLOSSES,
    DraftSample,
    Mixture,
    Setting,
    draft_sample,
    lint,
    make_case,
    noise,
    noise_band,
    usual_concurrency,
)
from dsim.lint.checks import (
    beyond_table,
    captured_sizes,
    cliff,
    draft_cost,
    flat_table,
    flattened_dips,
    hidden_stair,
    resolution,
    thin_evidence,
)
from dsim.lint.decision import best_budget, loss_of
from dsim.lint.experts import dummy_tokens
from dsim.profile import MISSING, Profile, Samples, load_profile, shipped_profiles

B300 = "b300x4-dsv4-flash-0731"
COIN = DraftSample(np.array([[0.5]]), "one draft, accepted half the time")
FIVE = draft_sample("0.9,0.8,0.7,0.6,0.5")


def profile(verify, draft=None, *, captured=(), **fields):
    """A profile from {tokens: ms or passes} and {requests: ms}."""
    rows = []
    for kind, curve in (("verify", verify), ("draft", draft or {})):
        for size, ms in curve.items():
            for repeat, one in enumerate(np.atleast_1d(ms).tolist()):
                tokens, requests = (size, MISSING) if kind == "verify" else (MISSING, size)
                rows.append((kind, tokens, requests, MISSING, one, repeat))
    made = {
        "name": "made-up",
        "hardware": "none",
        "gpus": 1,
        "model": "none",
        "engine": "none",
        "captured_sizes": np.array(captured, dtype=np.int64),
        "capture_limit": captured[-1] if captured else 0,
        "source": "test",
        "license": "CC0-1.0",
        "kind": "measured",
        "samples": Samples(*(np.array(column) for column in zip(*rows, strict=True))),
    }
    return Profile(**(made | fields))


def on_two_axes(*rows):
    """A profile from (tokens, requests, ms)."""
    tokens, requests, ms = (np.array(column) for column in zip(*rows, strict=True))
    none, first = np.full(len(rows), MISSING), np.zeros(len(rows), dtype=np.int64)
    samples = Samples(np.full(len(rows), "verify"), tokens, requests, none, ms, first)
    return replace(profile({1: 1.0}), samples=samples)


def case(given, sample=FIVE, concurrency=8, at=None, **setting):
    return make_case(given, Setting(sample, concurrency, concurrency if at is None else at, **setting))


def checks(found):
    return [(item.check, item.severity) for item in found]


# -- the yardstick ---------------------------------------------------------------------------------------


def test_best_drafts_first_and_exact_at_the_samples_proportions():
    sample = DraftSample(np.array([[0.8, 0.6], [0.4, 0.2]]), "two")
    assert sample.step_tokens(2).round(12).tolist() == [2.0, 2.8, 3.4, 3.8, 4.0]
    # One request: half of each kind, so the better half of the drafts comes first.
    assert sample.step_tokens(1).round(12).tolist() == [1.0, 1.7, 2.0]
    assert DraftSample(np.array([[0.5, 0.005]]), "x").worthwhile == 1.0


def test_the_loss_of_deciding_on_wrong_prices():
    sample = DraftSample(np.array([[0.8, 0.6]]), "one")
    true, wrong = np.array([10.0, 10.0, 30.0]), np.array([10.0, 20.0, 20.0])
    # tokens 1, 1.8, 2.4: the wrong prices take both drafts (0.12 a ms), the true ones the first (0.18); paid 0.08.
    assert (best_budget(sample.step_tokens(1), wrong), best_budget(sample.step_tokens(1), true)) == (2, 1)
    loss = loss_of(
        sample, [1, 2], 1, lambda r: np.repeat(wrong, r)[: 2 * r + 1], lambda r: np.repeat(true, r)[: 2 * r + 1]
    )
    assert loss.at == pytest.approx(1 - 0.08 / 0.18)
    assert loss.worst == max(loss.at, loss.worst)
    assert loss.mean <= loss.worst


def test_ties_take_the_fewest_drafts():
    assert best_budget(np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 2.0])) == 0


def test_drafts_by_description(tmp_path):
    write_bank(recorded_bank(4), tmp_path / "b.npz")
    bank = draft_sample(str(tmp_path / "b.npz"))
    assert bank.label == "recorded:tiny:dspark"
    assert bank.gamma == 4
    (tmp_path / "c.json").write_text('{"code": [0.9, 0.5], "chat": [0.5, 0.5]}')
    assert draft_sample(str(tmp_path / "c.json")).survival.tolist() == [[0.9, 0.45], [0.5, 0.25]]
    cut = bank.cut(2)
    assert cut.survival.tolist() == bank.survival[:, :2].tolist()
    assert cut.label.endswith(":first-2-of-4")
    assert bank.cut(4) is bank


@pytest.mark.parametrize("spec", ["nonsense", "0.5,1.5", "", "0.5,x", "qwen3-4b:nobody", "no.npz", "no.json"])
def test_bad_descriptions_of_drafts(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        draft_sample(spec)


@pytest.mark.parametrize("survival", [np.zeros((0, 2)), np.array([0.5]), np.array([[0.5, 0.6]]), np.array([[1.2]])])
def test_bad_samples(survival):
    with pytest.raises(InputError):
        DraftSample(survival, "bad")


def test_bad_settings():
    for change in (
        {"concurrency": 0, "at": 0},
        {"at": 9},
        {"at": 0},
        {"lookup": "guess"},
        {"noise": 0.0},
        {"noise": float("nan")},
        {"draws": 0},
        {"draws": 100_001},
        {"concurrency": 700_000},  # times 6 tokens
        {"seed": -1},
    ):
        with pytest.raises(InputError):
            Setting(**({"sample": FIVE, "concurrency": 8, "at": 2} | change))
    for given in ((8, 8), (8, 0), (8, 2, 10.0, None), (8, 2, 10.0, float("nan"))):
        with pytest.raises(InputError):
            Mixture(*given)
    with pytest.raises(InputError, match="gamma"):
        FIVE.cut(6)
    with pytest.raises(InputError, match="context"):
        make_case(load_profile(B300), Setting(FIVE, 8, 2), context=1)


def test_what_a_profile_was_made_for():
    assert usual_concurrency(load_profile(B300), 5) == 256  # its largest draft batch
    assert usual_concurrency(load_profile("gb10x2-inkling-small-nvfp4"), 5) == 16  # its largest verify batch
    assert usual_concurrency(profile({1: 1.0, 60: 2.0}), 5) == 10  # whole blocks
    assert usual_concurrency(profile({1: 1.0, 2: 2.0}), 5) == 1


def test_loads_hold_the_operating_point_and_stay_few():
    assert Setting(FIVE, 3, 2).loads == [1, 2, 3]
    loads = Setting(FIVE, 5000, 17).loads
    assert loads[0] == 1
    assert loads[-1] == 5000
    assert 17 in loads
    assert len(loads) <= 257


# -- the shape of the table ------------------------------------------------------------------------------


def test_a_flat_table_is_an_error():
    found = flat_table(case(profile(dict.fromkeys((1, 8, 48), 10.0), {8: 1.0})))
    assert checks(found) == [("flat-table", "error")]
    assert "at most 0.00 % more" in found[0].evidence
    # One size is as flat as it gets.
    assert checks(flat_table(case(profile({16: 10.0}, {8: 1.0})))) == [("flat-table", "error")]


def test_flat_is_what_rises_less_than_the_noise():
    # 8 requests, 5 drafts: 8 to 48 tokens, 10.0 to 10.2 ms.
    given = case(profile({8: 10.0, 48: 10.2}))
    assert checks(flat_table(given)) == [("flat-table", "error")]
    assert checks(flat_table(case(profile({8: 10.0, 48: 10.2}), noise=0.01))) == [("flat-table", "warning")]


def test_nearly_flat_is_where_everything_is_verified_at_every_load():
    # 10 % for 40 more drafts, the worst of which is worth 0.15: all are verified.
    found = flat_table(case(profile({1: 10.0, 8: 10.0, 48: 11.0})))
    assert checks(found) == [("flat-table", "warning")]
    assert "10.0 % more" in found[0].evidence
    assert flat_table(case(profile({1: 5.0, 48: 50.0}))) == []
    assert flat_table(case(load_profile(B300), concurrency=256)) == []


def test_steps_beyond_the_table():
    table = profile({1: 5.0, 24: 20.0})
    assert beyond_table(case(table, concurrency=4)) == []  # 4 x 6 = 24
    found = beyond_table(case(table, concurrency=8, at=4))
    assert checks(found) == [("beyond-table", "warning")]
    assert "8 requests x 6 = 48 tokens" in found[0].evidence
    assert "more than 4 requests" in found[0].evidence
    assert found[0].tokens == (24, 48)
    # Worse where the usual load is beyond it.
    assert checks(beyond_table(case(table, concurrency=8, at=8))) == [("beyond-table", "error")]


def test_steps_below_the_table():
    table = {8: 5.0, 48: 20.0}
    found = beyond_table(case(profile(table), at=4))
    assert checks(found) == [("beyond-table", "warning")]
    assert "look free" in found[0].evidence
    assert beyond_table(case(profile(table), at=8)) == []
    # A captured graph is padded to: the price is right.
    assert beyond_table(case(profile(table, captured=(8, 48)), at=4)) == []


def test_resolution_where_the_decision_falls():
    # 4 requests: between 4 and 24 tokens.
    none = resolution(case(profile({1: 5.0, 32: 20.0}), at=4))
    assert checks(none) == [("resolution", "error")]
    assert none[0].tokens == (4, 24)
    assert "0 timed sizes in between" in none[0].evidence
    assert "(5 drafts a request)" in none[0].evidence
    some = resolution(case(profile({1: 5.0, 8: 9.0, 20: 12.0, 32: 20.0}), at=4))
    assert checks(some) == [("resolution", "warning")]
    assert some[0].tokens == (8, 20)
    fine = profile({size: 5.0 + size for size in (4, 8, 12, 16, 20, 24)})
    assert resolution(case(fine, at=4)) == []


def test_a_profile_without_captured_sizes():
    table = {1: 5.0, 48: 20.0}
    assert checks(captured_sizes(case(profile(table)))) == [("captured-sizes", "warning")]
    assert captured_sizes(case(profile(table, captured=(1, 48)))) == []


STAIRS = profile({2: 10.0, 4: 20.0}, captured=(2, 4))


def test_a_lookup_that_does_not_see_the_next_stair():
    # 2 requests, one draft each, worth 0.5: tokens 2, 2.5, 3. A third token runs as four and costs 20 ms, so no
    # draft pays (0.2 a ms); the floor rule believes 10 ms, takes one (0.25) and gets 2.5 / 20 = 0.125.
    (found,) = hidden_stair(case(STAIRS, COIN, concurrency=2, lookup="floor"))
    assert (found.check, found.severity) == ("hidden-stair", "error")
    assert found.loss.at == pytest.approx(1 - 0.125 / 0.2)
    assert (
        "a step of 3 tokens (2 requests) is believed to cost 10.00 ms; it runs as 4 and costs 20.00 ms"
        in found.evidence
    )
    assert found.tokens == (3, 4)
    # Between the sizes the straight line believes 15 ms: still none, nothing is lost.
    assert hidden_stair(case(STAIRS, COIN, concurrency=2, lookup="linear")) == []
    assert hidden_stair(case(STAIRS, COIN, concurrency=2, lookup="next")) == []
    # Where nobody says that the table is read like this it is a warning.
    assert [item.severity for item in hidden_stair(case(STAIRS, COIN, concurrency=2))] == ["warning"]


def test_without_captured_sizes_a_rule_is_held_against_the_straight_line():
    table = profile({2: 10.0, 4: 20.0})
    assert hidden_stair(case(table, COIN, concurrency=2)) == []
    assert hidden_stair(case(table, COIN, concurrency=2, lookup="linear")) == []
    (found,) = hidden_stair(case(table, COIN, concurrency=2, lookup="floor"))
    # Believed 10 ms, 15 on the line: 2.5 / 15 in place of 2 / 10.
    assert found.loss.at == pytest.approx(1 - (2.5 / 15) / 0.2)
    assert "on the straight line between the timed sizes it costs 15.00 ms" in found.evidence


def test_a_lookup_of_a_table_with_several_batches():
    found = hidden_stair(case(load_profile("unnamed-dsv4-pro-trtllm"), concurrency=256, at=64, lookup="floor"))
    assert checks(found) == [("hidden-stair", "error")]


def test_a_lookup_that_walks_over_the_cliff():
    floor, linear = hidden_stair(case(load_profile(B300), concurrency=256, at=64))
    assert {floor.check, linear.check} == {"hidden-stair"}
    # Whole blocks: beyond the graphs everything up to the next timed size looks free.
    assert (
        "a step of 1,176 tokens (196 requests) is believed to cost 20.63 ms; it runs eagerly and costs 104.49 ms"
        in (floor.evidence)
    )
    assert floor.loss.worst > 0.5


@pytest.mark.parametrize("rule", ["floor", "linear"])
@pytest.mark.parametrize("most", [8, 64, 256])
def test_the_step_that_is_shown_is_one_of_the_batch_that_loses_most(rule, most):
    (found,) = hidden_stair(case(load_profile(B300), concurrency=most, at=min(most, 64), lookup=rule))
    tokens, requests = map(
        int, re.findall(r"a step of ([\d,]+) tokens \((\d+) requests\)", found.evidence.replace(",", ""))[0]
    )
    assert requests == found.loss.worst_at
    assert requests <= tokens <= requests * 6
    if rule == "linear":
        # So few requests never get to the cliff: it is a stair between two captured sizes.
        assert tokens < 1025


def test_flattened_dips_and_what_they_cost():
    # 2 requests, one draft worth 0.5: 2, 2.5, 3 tokens for 10, 20, 12 ms measured: both (0.25 a ms). A running
    # maximum charges 20 for four tokens, takes none and gets 0.2.
    dip = {2: 10.0, 3: 20.0, 4: 12.0}
    (found,) = flattened_dips(case(profile(dip, captured=(2, 3, 4)), COIN, concurrency=2))
    assert (found.check, found.severity) == ("flattened-dips", "error")
    assert found.loss.at == pytest.approx(0.2)
    assert "1 of 3 sizes" in found.evidence
    assert "66.7 % too much at 4 tokens (20.00 ms for 12.00)" in found.evidence
    assert "timed once" in found.evidence
    assert flattened_dips(case(profile({2: 10.0, 3: 20.0, 4: 20.0}, captured=(2, 3, 4)), COIN, concurrency=2)) == []


def test_a_dip_is_told_from_noise_by_its_passes():
    steady = {2: [9.0, 10.0, 10.0], 3: [30.0, 20.0, 20.0], 4: [30.0, 12.0, 13.0]}
    shaky = {2: [9.0, 10.0, 10.0], 3: [30.0, 20.0, 20.0], 4: [30.0, 10.0, 19.0, 21.0]}
    for passes, words in ((steady, "at 1 of 1 of them every warm pass"), (shaky, "at 0 of 1 of them")):
        (found,) = flattened_dips(case(profile(passes, captured=(2, 3, 4)), COIN, concurrency=2))
        assert words in found.evidence


def test_dips_beyond_the_largest_step_do_not_count():
    dip = {2: 10.0, 4: 12.0, 100: 90.0, 104: 80.0}
    assert flattened_dips(case(profile(dip, captured=tuple(dip)), COIN, concurrency=2)) == []


def test_the_cliff_of_the_b300():
    b300 = load_profile(B300)
    (found,) = cliff(case(b300, concurrency=256, at=64))
    assert found.severity == "warning"
    assert "1,024 -> eager: a step of 1,024 tokens costs 20.6 ms" in found.evidence
    assert "costs 104.5 ms (5.1x)" in found.evidence
    assert "256 requests x 6 = 1,536 tokens" in found.evidence
    assert "above 170 requests" in found.evidence
    assert found.tokens == (1024, 1536)
    assert cliff(case(b300, concurrency=170)) == []  # 1,020 tokens
    assert len(cliff(case(b300, concurrency=171))) == 1
    # Beyond it with the first token of everybody.
    assert [item.severity for item in cliff(case(b300, concurrency=1025))] == ["error"]


def test_a_cliff_that_nobody_timed_is_an_error():
    table = profile({8: 5.0, 16: 6.0}, captured=(8, 16))
    (found,) = cliff(case(table, concurrency=4))
    assert found.severity == "error"
    assert "no larger step was timed" in found.evidence
    assert cliff(case(profile({8: 5.0, 16: 6.0}), concurrency=4)) == []  # nothing is captured


def test_a_single_eager_size_has_its_price_beyond_it_too():
    given = case(profile({8: 5.0, 16: 6.0, 32: 30.0}, captured=(8, 16)), concurrency=16)
    assert given.table(given.law, 1)[[16, 17, 32, 96]].tolist() == [6.0, 30.0, 30.0, 30.0]
    (found,) = cliff(given)
    assert "costs 30.0 ms (5.0x)" in found.evidence
    lint(given)


def test_a_fit_without_any_price_is_refused():
    # bias + alpha = 1, bias + theta = 1 and bias + alpha + theta = 2: a step of one token would take no time.
    given = on_two_axes((1, 2, 1.0), (8, 1, 1.0), (8, 2, 2.0))
    with pytest.raises(InputError, match=r"the fit's price of 1 tokens and 1 requests is no duration, got 0\.0"):
        lint(case(given, concurrency=2))


# -- the drafter -----------------------------------------------------------------------------------------


def test_a_drafter_without_a_price():
    both = DraftSample(np.array([[1.0, 1.0]]), "certain")
    (found,) = draft_cost(case(load_profile("m5max-nemotronh-30b"), both, concurrency=1))
    assert (found.check, found.severity) == ("draft-cost", "error")
    # Two drafts: 3 tokens in d + 15.64 ms against one in 8.47.
    assert "a draft of up to 9.77 ms" in found.evidence
    dear = profile({1: 1.0, 2: 10.0})
    (found,) = draft_cost(case(dear, COIN, concurrency=1))
    assert "does not pay there even if drafting is free" in found.evidence


def test_a_drafter_inside_the_steps():
    found = draft_cost(case(profile({1: 5.0, 48: 20.0}, draft_included=True)))
    assert checks(found) == [("draft-cost", "info")]


def test_a_drafter_timed_for_too_few():
    verify = {1: 5.0, 48: 20.0}
    assert checks(draft_cost(case(profile(verify, {4: 1.0}))))[0] == ("draft-cost", "warning")
    assert "draft-cost" not in [item.check for item in draft_cost(case(profile(verify, {1: 0.9, 8: 1.0})))]


def test_a_draft_that_is_left_out_of_the_price():
    # One request, one draft worth 0.5, 10 ms to draft, 10 or 16 to verify. Alone 1 / 10 beats 1.5 / 16; with the draft
    # 1.5 / 26 beats 1 / 20.
    (found,) = draft_cost(case(profile({1: 10.0, 2: 16.0}, {1: 10.0}), COIN, concurrency=1))
    assert (found.check, found.severity) == ("draft-unpriced", "error")
    assert found.loss.at == pytest.approx(1 - (1 / 20) / (1.5 / 26))
    assert draft_cost(case(profile({1: 10.0, 2: 16.0}, {1: 0.1}), COIN, concurrency=1)) == []


# -- is it to be believed? -------------------------------------------------------------------------------


def test_a_profile_that_says_dummy():
    table = {1: 5.0, 8: 9.0, 48: 20.0}
    found = dummy_tokens(case(profile(table, notes="Timed on Dummy tokens.")))
    assert checks(found) == [("dummy-profile", "warning")]
    assert dummy_tokens(case(profile(table))) == []


DENSE = {1: 10.0, 2: 10.01, 4: 10.03, 8: 10.1, 64: 12.0, 128: 16.0}


def test_a_mixture_that_bends_like_a_dense_model():
    assert checks(dummy_tokens(case(profile(DENSE)))) == [("dummy-profile", "info")]
    found = dummy_tokens(case(profile(DENSE), mixture=Mixture(64, 4)))
    assert checks(found) == [("dummy-profile", "warning")]
    # From 1 to 8 tokens 0.1 ms / 7, from 64 to 128 tokens 4 ms / 64.
    assert "14.3 us between 1 and 8 tokens and 62.5 us above 64" in found[0].evidence
    concave = {1: 10.0, 2: 11.0, 4: 12.8, 8: 15.5, 64: 18.0, 128: 20.0}
    assert dummy_tokens(case(profile(concave), mixture=Mixture(64, 4))) == []
    # All experts are read by the smallest step: the shape says nothing.
    assert dummy_tokens(case(profile({64: 12.0, 128: 16.0, 256: 30.0}), mixture=Mixture(64, 4))) == []


def test_a_token_count_timed_for_several_batches_has_no_slope():
    # Batch and tokens rise together, so that the law has no alpha; no batch was timed at three sizes.
    given = case(on_two_axes((4, 1, 5.0), (4, 2, 5.5), (8, 3, 6.0), (64, 4, 20.0)))
    assert not given.law.depends_on_requests
    assert dummy_tokens(given) == []


def test_reads_that_take_longer_than_was_timed():
    # 1 of 2 experts a token, 20 GB at 1 TB/s: 10 ms for one token, 15 for two, 17.5 for three.
    mixture = Mixture(2, 1, 20.0, 1.0)
    assert mixture.read_ms(2) == pytest.approx(15.0)
    fast = profile({1: 11.0, 2: 12.0, 3: 13.0})
    found = dummy_tokens(case(fast, mixture=mixture))
    assert ("dummy-profile", "error") in checks(found)
    assert "reads 87.5 % of the experts, which takes 17.50 ms at 1 TB/s, and was timed at 13.00 ms" in found[0].evidence


def test_a_rise_that_has_no_room_for_the_reads():
    mixture = Mixture(2, 1, 20.0, 1.0)  # reads grow by 5 ms from one token to two, by 7.5 to three
    slow = {1: 100.0, 2: 105.0, 3: 107.5}
    assert dummy_tokens(case(profile(slow), mixture=mixture, noise=0.001)) == []
    found = dummy_tokens(case(profile({1: 100.0, 2: 102.5, 3: 103.0}), mixture=mixture, noise=0.001))
    assert checks(found) == [("dummy-profile", "warning")]
    assert "7.50 ms more; timed were 3.00 ms more: the rise is under-priced 2.5x" in found[0].evidence
    found = dummy_tokens(case(profile({1: 100.0, 2: 100.5, 3: 100.6}), mixture=mixture, noise=0.001))
    assert checks(found) == [("dummy-profile", "error")]


def test_thin_evidence():
    assert checks(thin_evidence(case(profile({1: 5.0, 48: [20.0, 19.0, 19.5]})))) == [("thin-evidence", "info")]
    assert thin_evidence(case(profile({1: [6.0, 5.0, 5.1], 48: [20.0, 19.0, 19.5]}))) == []
    derived = thin_evidence(case(profile({1: 5.0, 48: 20.0}, kind="derived")))
    assert "not timed steps" in derived[0].evidence


def test_noise_on_a_knife_edge():
    # 1 / 10 against 1.5 / 15.1: a table within 3 % prefers the draft about half of the time, for a loss of 0.7 %.
    (found,) = noise(case(profile({1: 10.0, 2: 15.1}, {1: 1e-6}), COIN, concurrency=1, draws=500))
    share = float(found.evidence.split("changes in ")[1].split(" %")[0])
    assert 30 < share < 60
    assert found.severity == "info"
    assert found.loss.worst == pytest.approx(share / 100 * (1 - (1.5 / 15.1) / 0.1), rel=0.01)


def test_noise_goes_both_ways():
    # 5.3 % apart: only a table with one size near -3 % and the other near +3 % decides otherwise.
    given = case(profile({1: 10.0, 2: 15.8}, {1: 1e-6}), COIN, concurrency=1, draws=2000)
    assert 0.001 < (noise_band(given).chosen == 1).mean() < 0.03


def test_noise_that_changes_nothing():
    given = case(profile({1: 10.0, 2: 12.0}, {1: 1.0}), COIN, concurrency=1)
    assert noise(given) == []  # 1.5 / 13 against 1 / 11: 27 % apart
    assert checks(noise(replace_noise(given, 0.4))) != []


def replace_noise(given, width):
    return make_case(given.profile, replace(given.setting, noise=width))


def test_noise_is_seeded_and_never_gains():
    given = case(load_profile(B300), concurrency=64, at=16, draws=30)
    one, two = noise_band(given), noise_band(given)
    np.testing.assert_array_equal(one.chosen, two.chosen)
    assert (one.losses >= 0).all()
    assert (one.losses[one.chosen == one.clean[:, None]] == 0).all()
    other = noise_band(make_case(given.profile, replace(given.setting, seed=1)))
    assert (one.chosen != other.chosen).any()


# -- all of it -------------------------------------------------------------------------------------------


def test_findings_come_gravest_first():
    found = lint(case(load_profile("h200-qwen3-14b-partial"), concurrency=128, at=32))
    order = ["error", "warning", "info"]
    assert [item.severity for item in found] == sorted((item.severity for item in found), key=order.index)
    assert all(item.evidence and item.advice for item in found)


#: What the shipped profiles are found to have, beside noise, at the load that they were made for.
SHIPPED = {
    "b300x4-dsv4-flash-0731": {"hidden-stair", "flattened-dips", "cliff", "draft-unpriced"},
    "gb10x2-inkling-small-nvfp4": {"beyond-table", "resolution", "captured-sizes", "draft-cost", "thin-evidence"},
    "h200-qwen3-14b-partial": {
        *("resolution", "captured-sizes", "dummy-profile", "draft-unpriced", "thin-evidence"),
    },
    "m5max-nemotronh-30b": {"draft-cost", "resolution", "captured-sizes", "thin-evidence"},
    "rtx5090-qwen3-4b-dflash16": {
        *("beyond-table", "resolution", "captured-sizes", "flat-table", "dummy-profile", "thin-evidence"),
    },
    "unnamed-dsv4-pro-trtllm": {"resolution", "captured-sizes", "draft-cost", "dummy-profile", "thin-evidence"},
}


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles(name):
    given = load_profile(name)
    most = usual_concurrency(given, FIVE.gamma)
    found = lint(case(given, concurrency=most, at=max(1, most // 4), draws=20))
    assert {item.check for item in found} - {"noise"} == SHIPPED[name]
    assert [item.check for item in found if item.severity == "error"] == {
        "h200-qwen3-14b-partial": ["resolution"],
        "m5max-nemotronh-30b": ["draft-cost"],
    }.get(name, [])


def test_every_finding_is_documented():
    root = Path(__file__).parents[1]
    source = "".join(path.read_text() for path in (root / "dsim" / "lint").glob("*.py"))
    table = (root / "docs" / "profile-lint.md").read_text().split("## What it looks for")[1].split("\n## ")[0]
    checks = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source))
    assert set(re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE)) == checks == set(GLOSSES)


def test_a_gloss_says_by_which_rule_a_table_would_be_read():
    given = load_profile(B300)
    words = GLOSSES["hidden-stair"]
    found = hidden_stair(case(given, concurrency=256, at=64))
    assert [item.gloss for item in found] == [f"{words} if read by 'floor'", f"{words} if read by 'linear'"]
    (declared,) = hidden_stair(case(given, concurrency=256, at=64, lookup="floor"))
    assert declared.gloss == words


@pytest.mark.parametrize("module", ["dsim.lint", "dsim.lint.decision", "dsim.lint.case", "dsim.lint.finding"])
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed
