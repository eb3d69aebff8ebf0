"""The measured B300 server: its data, its prices, a replay worked out by hand, and fits that find what they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dsim.errors import InputError
from experiments import _b300_flash as b300
from experiments import _validate_b300 as case
from experiments import validate
from experiments._validate import RunOptions, error_summary

TINY = (("requests", 48), ("requests_one_user", 8), ("output_tokens", 48))
SMALL = b300.Variant("small", "a short run", workload=TINY)
K5, ADAPTIVE = b300.SPECULATIVE[2], b300.SPECULATIVE[-1]


def test_the_shipped_cells_are_those_that_may_be_known():
    cells = b300.load_measured()
    everywhere = {(arm, users) for arm in ("nospec", "k1") for users in (1, 16, 32, 64, 128, 256)}
    assert set(cells) == everywhere | {(arm, 1) for arm in ("k3", "k5", "k7", "adaptive")}
    assert cells["k1", 256] == b300.Cell(43.1, 9977.9)
    work = b300.load_workload()
    assert (work.count(1), work.count(16), work.output_tokens) == (240, 880, 512)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "line 1.*expected arm, concurrency, tps_per_user, throughput_tok_s"),
        ("arm,users\n", "line 1"),
        ("{}k2,16,1,1\n", "line 2, field 'arm'.*got 'k2'.*nospec, k1"),
        ("{}k1,17,1,1\n", "line 2, field 'concurrency'.*got '17'"),
        ("{}k1,16,1,1\nk1,32,x,1\n", "line 3, field 'tps_per_user'.*got 'x'"),
        ("{}k1,16,1,-2\n", "line 2, field 'throughput_tok_s'.*got '-2'"),
        ("{}k1,16,nan,2\n", "line 2, field 'tps_per_user'"),
        ("{}k1,16,1\n", "line 2.*expected 4 cells"),
        ("{}k1,16,1,1\nk1,16,1,1\n", "line 3.*each arm and load once"),
    ],
)
def test_bad_cells_are_named(rows, message):
    with pytest.raises(InputError, match=r"x\.csv, " + message):
        b300.read_measured(rows.format("arm,concurrency,tps_per_user,throughput_tok_s\n"), "x.csv")


# -- prices and prompts ----------------------------------------------------------------------------------


def test_prices_are_the_warm_medians_and_variants_change_what_they_say():
    full = b300.prices()
    table = full.verify_table(1, 8192)
    # Measured medians at 168, 176 and 1024 tokens; the next size is paid for; beyond the graphs a step runs eagerly.
    assert table[[168, 169, 176, 1024, 1025]].tolist() == [11.3904, 10.4052, 10.4052, 20.634, 104.489]
    assert b300.prices(running_max=True).verify_table(1, 176)[176] == 11.3904
    # The first passes of their sizes.
    cold = b300.prices(cold=True)
    assert cold.verify_table(1, 8)[[1, 2, 8]].tolist() == [7.4271, 7.7867, 7.0116]
    assert (full.draft_ms(1), cold.draft_ms(1)) == (0.8829, 2.2)
    # 15.0341 ms at 512 tokens: 20.634 + 512 x (20.634 - 15.0341) / 512 at 1,536.
    endless = b300.prices(graphs_end=False).verify_table(1, 2048)
    assert endless[1536] == pytest.approx(20.634 + (20.634 - 15.0341), abs=1e-6)
    assert endless[1024] == 20.634


def test_prompts_have_the_mean_and_the_cache_leaves_a_rest():
    work = replace(b300.load_workload(), prompt_tokens=300.0)
    drawn = b300.prompt_tokens(work, 100_000, seed=3)
    assert drawn.mean() == pytest.approx(300, rel=0.02)
    assert np.std(np.log(drawn)) == pytest.approx(1.0, rel=0.02)
    rest = b300.prompt_tokens(work, 100_000, seed=3, cached_block=256)
    assert (rest.min(), rest.max()) == (1, 256)
    assert ((drawn - rest) % 256 == 0).all()
    equal = b300.prompt_tokens(replace(work, prompt_sigma=0.0), 5, seed=0)
    assert equal.tolist() == [300] * 5


# -- the replay ------------------------------------------------------------------------------------------


def alone(**changes):
    """Two requests of three tokens, one user, one-token prompts."""
    work = (("requests_one_user", 2), ("output_tokens", 3))
    return b300.Variant("alone", "by hand", workload=work, prompts=False, **changes)


def test_a_replay_by_hand():
    # Prompt of 1 token with nobody in decode: 5.1087 + offset. Two steps of one request: 5.1087 + offset + root.
    constants = b300.Constants(offset_ms=-0.1087, root_ms=2.0, gap_ms=6.0)
    run = b300.play(b300.NOSPEC, 1, constants, variant=alone())
    assert run.cell.tps_per_user == pytest.approx(1e3 / 7.0)
    # Twice 5 + 7 + 7 ms, and one gap between.
    assert run.cell.throughput_tok_s == pytest.approx(6 / 0.044)
    assert run.drafts_source == "none"
    assert run.eager == 0.0


def test_host_time_by_tokens_and_by_powers():
    constants = b300.Constants(offset_ms=0.0, root_ms=3.0, gap_ms=0.0)
    run = b300.play(b300.NOSPEC, 1, constants, variant=alone(by_tokens=True))
    # The prompt's step has one token too.
    assert run.summary["ttft_mean_ms"] == pytest.approx(5.1087 + 3.0)
    assert run.cell.tps_per_user == pytest.approx(1e3 / (5.1087 + 3.0))
    many = b300.Variant("many", "16 at once", workload=(("requests", 16), ("output_tokens", 3)), prompts=False)
    for variant, host in ((many, 4 * 3.0), (replace(many, power=1.0), 16 * 3.0), (replace(many, by_tokens=True), 12.0)):
        cell = b300.play(b300.NOSPEC, 16, constants, variant=variant).cell
        assert cell.tps_per_user == pytest.approx(1e3 / (5.5924 + host)), variant


def test_a_draft_costs_what_the_profile_says_and_nothing_where_it_is_free():
    constants = b300.Constants(0.0, 0.0, 0.0)
    steps = {}
    for scale in (1.0, 0.0):
        run = b300.play(K5, 1, constants, variant=replace(SMALL, prompts=False, draft_scale=scale))
        steps[scale] = run.records.steps["step_ns"]
    # Steps without a prompt: six tokens, priced at eight.
    assert set(steps[1.0].tolist()) == {5_108_700, 5_345_100 + 882_900}
    assert set(steps[0.0].tolist()) == {5_108_700, 5_345_100}


def test_prompts_push_steps_beyond_the_graphs():
    constants = b300.Constants(0.0, 1.0, 50.0)
    whole = b300.Variant("whole", "", workload=(("requests", 256), ("output_tokens", 64)))
    k7 = b300.SPECULATIVE[3]
    with_prompts = b300.play(k7, 128, constants, variant=whole)
    steps = with_prompts.records.steps
    full = steps["requests"] == 128
    assert ((steps["batch_tokens"] > 1024) == (steps["prefill_tokens"] > 0))[full].all()
    assert with_prompts.eager > 0.05
    assert b300.play(k7, 128, constants, variant=replace(whole, prompts=False)).eager == 0.0


# -- the fits --------------------------------------------------------------------------------------------


def test_the_fit_finds_the_constants_that_made_the_row():
    truth, loads = b300.Constants(-0.5, 1.6, 40.0), (1, 4, 16, 64)
    row = {("nospec", n): b300.play(b300.NOSPEC, n, truth, variant=SMALL).cell for n in loads}
    found = b300.fit_constants(SMALL, loads=loads, seeds=(0,), measured=row)
    assert found.misfit < 0.002
    assert found.constants.offset_ms == pytest.approx(-0.5, abs=0.05)
    assert found.constants.root_ms == pytest.approx(1.6, rel=0.02)
    assert found.constants.gap_ms == pytest.approx(40.0, rel=0.03)


def test_what_is_fixed_is_not_fitted():
    row = {
        ("nospec", n): b300.play(b300.NOSPEC, n, b300.Constants(0.0, 1.0, 20.0), variant=SMALL).cell for n in (1, 16)
    }
    fixed = (("offset_ms", 0.0), ("root_ms", 0.0), ("gap_ms", 5.0))
    found = b300.fit_constants(replace(SMALL, fixed=fixed), loads=(1, 16), seeds=(0,), measured=row)
    assert found.constants == b300.Constants(0.0, 0.0, 5.0)
    assert (found.replays, found.misfit > 0.2) == (1, True)


def test_a_run_shorter_than_its_decode_is_refused():
    with pytest.raises(InputError, match=r"throughput_tok_s.*got 300.0.*expected at most 198"):
        b300.gap_ms(b300.Cell(200.0, 300.0), 20.0, b300.load_workload())


@pytest.mark.parametrize("arm", [K5, ADAPTIVE], ids=lambda arm: arm.name)
def test_the_level_is_found_again(arm):
    constants = b300.Constants(-0.3, 1.0, 50.0)
    longer = replace(SMALL, workload=(("requests_one_user", 60), ("output_tokens", 200)))
    cell = b300.play(arm, 1, constants, level=0.4, variant=longer).cell
    found = b300.fit_level(arm, constants, variant=longer, seeds=(0,), target=cell)
    again = b300.play(arm, 1, constants, level=found, variant=longer).cell
    assert np.abs(np.mean(again.log_ratio(cell))) < 2e-3
    assert found == pytest.approx(0.4, abs=0.03)


def test_a_speed_beyond_all_accepted_drafts_is_refused():
    constants = b300.Constants(-0.3, 1.0, 50.0)
    with pytest.raises(InputError, match=r"no level of acceptance gives arm 'k5'.*got 2000\.0"):
        b300.fit_level(K5, constants, variant=SMALL, seeds=(0,), target=b300.Cell(2000.0, 1900.0))


# -- the published positions -----------------------------------------------------------------------------


def test_published_counts_and_what_78_drafts_leave_open():
    accepted, reached = b300.published_counts()
    # 0.739 x 23 = 17 and 0.691 x 55 = 38; 0.478 x 23 = 11 and 0.418 x 55 = 23.
    assert accepted[:2].tolist() == [55, 34]
    assert reached[:2].tolist() == [78, 55]
    assert b300.published_curve() == pytest.approx(accepted / reached)
    assert b300.mean_length(np.array([0.5, 0.4])) == pytest.approx(1 + 0.5 + 0.2)
    low, high = b300.published_levels(1)
    lengths = [b300.mean_length(b300.curve_at(level, 1)) for level in (low, high)]
    # A binomial share of 55 of 78: 0.705 +- 1.96 x sqrt(0.705 x 0.295 / 78) = 0.101, and the prior pulls by 0.003.
    assert lengths == pytest.approx([1.604, 1.806], abs=0.01)
    widths = [
        np.diff([b300.mean_length(b300.curve_at(s, k)) for s in b300.published_levels(k)])[0] for k in (1, 3, 5, 7)
    ]
    assert widths == sorted(widths)


# -- the case --------------------------------------------------------------------------------------------


def test_what_a_fit_has_seen_is_not_scored():
    arms = {arm.name: arm for arm in (b300.NOSPEC, *b300.SPECULATIVE)}
    uses = {(name, users): case.use_of(arm, users) for name, arm in arms.items() for users in b300.LOADS}
    assert {key for key, use in uses.items() if use == "scored"} == {("k1", n) for n in (16, 32, 64, 128, 256)}
    assert {name for (name, users), use in uses.items() if use == "unknown"} == {"k3", "k5", "k7", "adaptive"}
    assert all(use == "fitted" for (name, users), use in uses.items() if name == "nospec" or users == 1)


def shipped():
    return validate.shipped()["vllm-b300-flash"][1]


def test_shipped_predictions_meet_what_was_asked():
    tables = shipped()
    overall = error_summary(tables["validation"]).set_index("metric").loc["all"]
    assert (overall["n"], overall["within"]) == (10, 10)
    assert overall["median"] <= 0.05
    assert overall["worst"] <= 0.15
    cells = tables["cells"].set_index(["arm", "concurrency"])["throughput_tok_s"]
    for users in (16, 32, 64, 128, 256):
        assert cells["adaptive", users] >= 0.95 * max(cells["k5", users], cells["k7", users]), users
    assert cells["k7", 128] < min(cells["k7", 64], cells["nospec", 128])


def test_shipped_tables_agree():
    tables = shipped()
    cells, long = tables["cells"], tables["validation"]
    assert len(cells) == 36
    wide = long.pivot_table(index=["arm", "load"], columns="metric", values="predicted")
    for _, row in cells.iterrows():
        load = "1 user" if row["concurrency"] == 1 else f"{row['concurrency']} users"
        assert wide.loc[(row["arm"], load)].to_dict() == {name: row[name] for name in b300.METRICS}
    # No measurement is shipped beyond what is known.
    assert set(map(tuple, cells[cells["use"] != "unknown"][["arm", "concurrency"]].to_numpy())) == set(
        b300.load_measured()
    )
    assert tables["ablation"]["variant"].tolist() == [variant.name for variant in (b300.FULL, *b300.ABLATIONS)]
    # More accepted drafts never make a run slower.
    spec = cells[cells["arm"] != "nospec"]
    for metric in b300.METRICS:
        assert (spec[f"{metric}_published_low"] <= spec[f"{metric}_published"]).all()
        assert (spec[f"{metric}_published"] <= spec[f"{metric}_published_high"]).all()


def test_what_the_page_says_in_words_is_what_the_ablations_show():
    table = shipped()["ablation"].set_index("variant")
    full = table.loc["full"]
    for name in ("no-host", "flat-host", "linear-host", "power-0.4", "power-0.6", "chunks-2048"):
        assert table.loc[name, "misfit"] > 1.3 * full["misfit"], name
    assert table.loc["host-by-tokens", "k1_mean_error"] < -0.08
    assert table.loc["cold-steps", "k1_worst_error"] > 2 * full["k1_worst_error"]
    assert table.loc["prompts-100", "k1_worst_error"] < full["k1_worst_error"] / 2
    for name in ("no-prompts", "no-graph-end"):
        assert (table.loc[name, ["k5_128", "k7_128"]] > 1.2 * full[["k5_128", "k7_128"]]).all(), name
        assert abs(table.loc[name, "k5_16"] / full["k5_16"] - 1) < 0.03
    for name in ("chunks-16384", "admit-at-once", "running-max"):
        assert abs(table.loc[name, "k1_worst_error"] - full["k1_worst_error"]) < 0.02, name
    cells = shipped()["cells"].set_index(["arm", "concurrency"])["throughput_tok_s_error"]
    assert cells["nospec", 128] > 0 > cells["k1", 128]


@pytest.mark.slow
def test_a_quick_run_is_the_same_on_one_process_and_two():
    one, two = (case.run_case(RunOptions(jobs=jobs, quick=True)) for jobs in (1, 2))
    assert list(one) == list(two)
    for name, table in one.items():
        pd.testing.assert_frame_equal(table, two[name])


@pytest.mark.slow
def test_the_case_predicts_again_what_is_shipped(tmp_path):
    """Every fit and replay; the shipped numbers come from the same code, perhaps on another machine."""
    validate.main(["--case", "vllm-b300-flash", "--out", str(tmp_path)])
    table = pd.read_csv(tmp_path / "validation.csv", keep_default_na=False, na_values=[""])
    assert table["predicted"].to_numpy() == pytest.approx(shipped()["validation"]["predicted"].to_numpy(), rel=0.02)
