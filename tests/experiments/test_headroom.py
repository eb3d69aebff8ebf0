"""The headroom study: its variants, its arithmetic on made-up runs, its files."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from banks import recorded_bank
from matplotlib.figure import Figure

from dsim.drafts import write_bank, write_temperatures
from dsim.errors import InputError
from dsim.policy import load_policy
from dsim.scenario import check_scenario
from dsim.schema import load_scenario, parse_scenario
from dsim.sweep import grid, run
from experiments import headroom
from experiments.headroom import FIXED, TODAY, WATERFALL, study_of, variants

SCENARIO = load_scenario("decode-node")
TINY = """\
name = "tiny"
[drafts]
source = "recorded"
gamma = 3
[drafters.dspark]
bank = "small.npz"
[workload.synthetic]
requests = 200
lengths = "fixed"
prompt_mean = 64.0
output_mean = 20.0
[load]
scored_min = 10
scored_per_user = 1
[measure]
seeds = 2
[[arms]]
name = "dspark"
policy = "dspark:lag=2"
"""


@pytest.fixture
def tiny(tmp_path):
    """A scenario file whose runs take no time."""
    write_bank(recorded_bank(3), tmp_path / "small.npz")
    (tmp_path / "tiny.toml").write_text(TINY)
    return str(tmp_path / "tiny.toml")


@pytest.fixture(autouse=True)
def few_batches(monkeypatch):
    monkeypatch.setattr(headroom, "loss_table", lambda *args, **kwargs: LOSSES)


LOSSES = pd.DataFrame({"requests": [8], "captured": [True], "planner": ["p"], "loss": [0.1], "loss_if_exact": [0.0]})


# -- the variants ----------------------------------------------------------------------------------------


def test_every_variant_is_an_arm_of_a_scenario_that_can_be_saved(tiny):
    study, lines = study_of(load_scenario(tiny), "dspark")
    assert parse_scenario(study.canonical()) == study
    check_scenario(study)
    arms = {arm.name: arm for arm in study.arms}
    assert set(arms) == {variant.arm for variant in lines}
    for variant in lines:
        arm = arms[variant.arm]
        assert (arm.policy, arm.gamma) == (variant.policy, variant.gamma)
        assert study.drafters[arm.drafter].confidence == variant.confidence
        assert study.drafters[arm.drafter].passes == "block"
    # Every group but the fixed lengths holds today's policy, or the one that it is to be compared with.
    groups = {variant.group for variant in lines} - {FIXED}
    assert groups == {
        "best possible",
        "confidence quality",
        "staleness of the budget",
        "staleness of the allocation",
        "staleness of both",
        "search",
        "look-up",
        "what is priced",
        "bias by domain",
    }


def test_ages_of_budget_and_allocation():
    lines = variants(5, ["a", "b"], None)
    for group, own in (("budget", "capacity_lag"), ("allocation", "allocation_lag")):
        ages = {}
        for variant in (v for v in lines if v.group == f"staleness of the {group}"):
            policy = load_policy(variant.policy.replace(TODAY, "lab"))
            ages[variant.name] = (policy.capacity_lag, policy.allocation_lag)
            assert getattr(policy, own) == int(variant.name.split()[0])
        other = 0 if group == "budget" else 2
        assert {pair[own == "capacity_lag"] for pair in ages.values()} == {other}
        assert len(ages) == 5


def test_what_does_not_apply_is_left_out():
    alone = variants(1, ["mixed"], None)
    assert "bias by domain" not in {variant.group for variant in alone}
    assert not [variant.name for variant in alone if "domain" in variant.name]
    assert [variant.name for variant in alone if variant.group == FIXED] == ["no speculation", "k = 1"]
    assert "recorded, raw" not in {variant.name for variant in alone}
    weights = load_scenario("decode-node", {"drafts.domains": {"code": 1.0, "chat": 2.0, "math": 0.0}})
    _, lines = study_of(weights, "dspark")
    assert [v.confidence for v in lines if v.name == "code +1, chat -1 logits"] == [{"code": 1.0, "chat": -1.0}]


def test_biases_balance_over_the_domains():
    for domains in (["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]):
        for variant in variants(5, domains, None):
            if variant.group == "bias by domain" and variant.confidence != "recorded":
                assert sum(variant.confidence.values()) == pytest.approx(0.0)
                assert max(variant.confidence.values()) in (0.5, 1.0, 2.0)


def test_only_the_waterfall():
    study, lines = study_of(SCENARIO, "dspark", only_waterfall=True)
    assert [arm.name for arm in study.arms] == [
        "none/0",
        *(f"fixed:k={k}" for k in range(1, 6)),
        TODAY,
        "lab:capacity_lag=0",
        "lab:capacity_lag=0 perfect",
        "oracle",
    ]
    assert {variant.group for variant in lines} == {FIXED, "best possible"}


def test_recorded_banks_show_the_raw_head(tmp_path):
    write_bank(recorded_bank(5, temperatures=(2.0,) * 5), tmp_path / "cooled.npz")
    write_bank(recorded_bank(5), tmp_path / "plain.npz")
    write_temperatures(tmp_path / "t.json", (1.5,) * 5)
    raw = {}
    for name in ("cooled", "plain"):
        for calibration in ("bank", str(tmp_path / "t.json"), "none"):
            if (name, calibration) == ("plain", "none"):
                continue  # changes nothing, which is an error of the scenario
            keys = {"drafts.source": "recorded", "drafters.dspark.bank": str(tmp_path / f"{name}.npz")}
            study, lines = study_of(
                load_scenario("decode-node", keys | {"drafters.dspark.calibration": calibration}), "dspark"
            )
            found = [study.drafters[f"dspark-{v.drafter}"].calibration for v in lines if v.name == "recorded, raw"]
            raw[name, calibration.rpartition(".")[2]] = found
            assert all(section.like is None for key, section in study.drafters.items() if key.startswith("dspark-"))
    assert raw == {
        ("cooled", "bank"): ["none"],
        ("cooled", "json"): ["none"],
        ("cooled", "none"): [],
        ("plain", "bank"): [],
        ("plain", "json"): ["bank"],
    }


@pytest.mark.parametrize(
    ("overrides", "drafter", "message"),
    [
        ({}, "nobody", r"field '--drafter': got 'nobody', expected one of dspark, dflash"),
        ({"drafts.source": "live"}, "dspark", "live drafts are not paired"),
        ({"drafts.gamma": 0}, "dspark", "nothing to decide without drafts"),
        ({"drafters.dspark.confidence": "perfect"}, "dspark", r"drafters\.dspark\.confidence.*varies this itself"),
        ({"drafters.dspark.calibration": "online"}, "dspark", r"drafters\.dspark\.calibration.*varies this itself"),
    ],
)
def test_what_cannot_be_studied(overrides, drafter, message):
    with pytest.raises(InputError, match=message):
        study_of(load_scenario("decode-node", overrides), drafter)


@pytest.mark.parametrize("users", ["", "8,", "0", "8,8", "many"])
def test_users_out_of_range(users, tmp_path):
    with pytest.raises(InputError, match=r"field '--users'.*expected distinct integers >= 1"):
        headroom.main(["--out", str(tmp_path / "o"), "--users", users])
    assert not (tmp_path / "o").exists()


# -- the arithmetic --------------------------------------------------------------------------------------

#: tok/s/GPU at 8 users, by arm and seed (0 to 4); the other load is twice that.
RATES = {
    "none/0": 50.0,
    "fixed:k=1": 80.0,
    "fixed:k=2": 100.0,
    TODAY: 110.0,
    "lab:capacity_lag=0": 111.0,
    "lab:capacity_lag=0 perfect": 115.0,
    "oracle": 130.0,
}


@pytest.fixture
def made_up():
    """Runs of a waterfall with blocks of two, and its table."""
    _, lines = study_of(load_scenario("decode-node", {"drafts.gamma": 2}), "dspark", only_waterfall=True)
    rows = [
        {
            "arm": arm, "concurrency": users, "seed": seed, "gamma": 2,
            "throughput_tok_s_gpu": rate * users / 8 + shared + (0.5 * (-1) ** seed if arm == "oracle" else 0.0),
            "tps_per_user": rate / 2, "cost_source": "c", "drafts_source": f"d:{arm}", "trace_source": "t",
            "extrapolated": users == 16 and seed == 1, "n_scored": 10.0,
            **dict.fromkeys(headroom.MEANS, 0.25),
        }
        for arm, rate in RATES.items()
        for users in (8, 16)
        for seed, shared in enumerate((-4.0, 0.0, 4.0, 1.0, -1.0))  # what all arms of a seed have in common
    ]  # fmt: skip
    runs = pd.DataFrame(rows)
    confidences = {"": (0.02, 0.8), "perfect": (0.0, 0.9)}
    return runs, lines, headroom.headroom_table(runs, lines, confidences)


def test_the_waterfall_adds_up(made_up):
    _, _, table = made_up
    rungs = table[(table["group"] == WATERFALL) & (table["concurrency"] == 8)]
    assert rungs["variant"].tolist() == [
        "best fixed length: k = 2",
        "today's policy (dspark, lag 2)",
        "no staleness (lag 0)",
        "perfect probabilities",
        "knowing the outcome (oracle)",
    ]
    assert rungs["throughput_tok_s_gpu"].tolist() == pytest.approx([100, 110, 111, 115, 130.1])
    assert rungs["gain"].tolist() == pytest.approx([0.0, 0.10, 0.01, 0.04, 0.151])
    assert rungs["gain"].sum() == pytest.approx(rungs["throughput_vs_fixed"].iloc[-1])
    assert rungs["throughput_vs_today"].iloc[-1] == pytest.approx(130.1 / 110 - 1)
    # What the arms of a seed share drops out of the intervals; the oracle's own spread stays.
    assert rungs["gain_lo"].iloc[1] == pytest.approx(0.10)
    assert rungs["gain_lo"].iloc[4] < 0.151 < rungs["gain_hi"].iloc[4]
    assert rungs["tps_vs_fixed"].tolist() == pytest.approx([0.0, 0.1, 0.11, 0.15, 0.3])
    assert set(rungs["interval"]) == {"95 % t"}
    assert rungs["confidence_ece"].tolist() == [0.02, 0.02, 0.02, 0.0, 0.02]


def test_one_row_a_group_variant_and_load(made_up):
    _, lines, table = made_up
    assert len(table) == 2 * (len(lines) + 5)
    assert table["group"].drop_duplicates().tolist() == [WATERFALL, FIXED, "best possible"]
    fixed = table[table["group"] == FIXED].set_index(["variant", "concurrency"])
    assert fixed.loc[("k = 1", 8), "throughput_vs_today"] == pytest.approx(80 / 110 - 1)
    assert fixed.loc[("no speculation", 8), "throughput_vs_fixed"] == pytest.approx(-0.5)
    assert fixed["gain"].isna().all()
    # Six other arms at a load: all differ from today's for sure.
    assert (fixed["p_holm"] < 1e-3).all()
    assert table.groupby("concurrency")["extrapolated"].any().to_dict() == {8: False, 16: True}
    assert set(table["n_scored"]) == {50}


def test_the_verdict(made_up):
    _, _, table = made_up
    first, second = headroom.verdict(table[table["group"] == WATERFALL]).splitlines()
    assert first == (
        "8 users: today's policy is +10.0 % over the best fixed length (k = 2). The oracle is 18.3 % above it; of that "
        "way (in % of the fixed length's throughput) +1.0 is staleness, +4.0 better probabilities, +15.1 the outcomes, "
        "which nobody can know."
    )
    assert second.startswith("16 users:")


def test_the_figure_shows_each_gain_between_its_ends(made_up, tmp_path, monkeypatch):
    runs, _, table = made_up
    drawn: list[Figure] = []
    monkeypatch.setattr(headroom, "save_figure", lambda fig, *rest: drawn.append(fig))
    headroom.draw(table[table["group"] == WATERFALL], runs, SCENARIO, tmp_path)
    (fig,) = drawn
    assert len(fig.axes) == 2
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in fig.axes[0].patches]
    assert np.array(bars) == pytest.approx(np.array([[0, 10], [10, 11], [11, 15], [15, 30.1]]))
    assert [text.get_text() for text in fig.axes[0].texts] == [
        "k = 2: 100 tok/s/GPU", "+10.0 %", "+1.0 %", "+4.0 %", "+15.1 %",
    ]  # fmt: skip


@pytest.mark.parametrize("loads", [1, 2, 3, 5])
def test_the_title_fits_whatever_the_number_of_loads(made_up, tmp_path, monkeypatch, loads):
    runs, _, table = made_up
    rungs = table[table["group"] == WATERFALL]
    first = rungs[rungs["concurrency"] == rungs["concurrency"].iloc[0]]
    drawn: list[Figure] = []
    monkeypatch.setattr(headroom, "save_figure", lambda fig, *rest: drawn.append(fig))
    headroom.draw(pd.concat([first.assign(concurrency=8 + n) for n in range(loads)]), runs, SCENARIO, tmp_path)
    (fig,) = drawn
    fig.canvas.draw()
    title = fig._suptitle.get_window_extent()
    assert title.x0 >= 0
    assert title.x1 <= fig.bbox.x1
    assert " ".join(fig._suptitle.get_text().split()) == headroom._TITLE


@pytest.mark.slow
def test_a_table_that_ends_before_the_cliff_is_worse_than_any_fixed_length():
    """The bold numbers of docs/headroom.md, at fewer seeds: 1, 2, 4, 8, ... at 256 users, every 64th at 64."""
    specs = (TODAY, "lab:lookup=next,probes=doubling", "lab:lookup=floor,probes=64")
    arms = [{"name": spec, "policy": spec, "drafter": "dspark"} for spec in specs]
    study = load_scenario("decode-node", {"arms": arms, "measure.seeds": 2})
    runs = run(study, grid(study, users=[64, 256]), jobs=1, progress=False).table
    means = runs.groupby(["arm", "concurrency"])[headroom.THROUGHPUT].mean()
    change = {key: means[key] / means[TODAY, key[1]] - 1 for key in means.index}
    assert change[specs[1], 256] < -0.25
    assert change[specs[1], 64] == pytest.approx(-0.036, abs=0.01)
    assert change[specs[2], 64] == pytest.approx(-0.095, abs=0.01)
    assert change[specs[2], 256] == pytest.approx(-0.010, abs=0.01)


# -- the script ------------------------------------------------------------------------------------------


def test_files_columns_and_sources(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    headroom.main(["--scenario", tiny, "--users", "2,5", "--out", str(out), "--jobs", "1"])
    names = [
        "headroom.csv",
        "headroom.png",
        "headroom.svg",
        "headroom_losses.csv",
        "headroom_runs.csv",
        "scenario.toml",
    ]
    assert sorted(path.name for path in out.iterdir()) == names
    table, runs = pd.read_csv(out / "headroom.csv"), pd.read_csv(out / "headroom_runs.csv")
    study, lines = study_of(load_scenario(tiny), "dspark")
    assert len(runs) == len(study.arms) * 2 * 2
    assert len(table) == 2 * (len(lines) + 5)
    assert set(table["concurrency"]) == {2, 5}
    assert set(table["interval"]) == {"range"}
    assert table["cost_source"].str.startswith("measured:").all()
    sources = table.set_index("variant")["drafts_source"]
    assert set(sources["today"]) == {"recorded:tiny:dspark"}
    assert set(sources["constant by domain"]) == {"recorded:tiny:dspark:constant-by-domain"}
    assert set(sources["no speculation"]) == {"none"}
    assert not table["extrapolated"].any()
    assert (table["n_scored"] == 2 * 10).all()
    quality = table[table["group"] == "confidence quality"].drop_duplicates("variant").set_index("variant")
    assert quality.loc["perfect", "confidence_ece"] < 1e-5
    assert quality.loc["overconfident, ECE 20 %", "confidence_ece"] == pytest.approx(0.2, abs=0.01)
    assert quality.loc["constant", "confidence_auc"] == 0.5
    assert quality["confidence_auc"].idxmax() == "perfect"
    judged = ~table["policy"].isin(["oracle", "none"])
    assert table.loc[judged, "regret_mean"].between(0, 1).all()
    assert table.loc[~judged, "regret_mean"].isna().all()
    # The table of captured sizes, read at the next one, is the curve itself.
    same = table[table["variant"].isin(["exact", "next, captured sizes"]) & (table["group"] == "look-up")]
    assert (same["throughput_vs_today"] == 0).all()
    shown = capsys.readouterr().out
    assert "2 users: today's policy is" in shown
    assert "range of fewer than five seeds" in shown
    assert f"files: {', '.join(names)}" in shown


def test_its_scenario_runs_again_to_the_same_bytes_with_two_workers(tiny, tmp_path):
    first, again = tmp_path / "1", tmp_path / "2"
    common = ["--users", "3", "--waterfall"]
    headroom.main(["--scenario", tiny, "--out", str(first), "--jobs", "1", *common])
    headroom.main(["--scenario", str(first / "scenario.toml"), "--out", str(again), "--jobs", "2", *common])
    for name in ("headroom.csv", "headroom_runs.csv", "headroom.png", "scenario.toml"):
        assert (first / name).read_bytes() == (again / name).read_bytes(), name


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        headroom.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--users", "--drafter", "--waterfall", "--seeds", "--jobs", "--quick", "--set", "--out", "--drafts"):
        assert option in shown
