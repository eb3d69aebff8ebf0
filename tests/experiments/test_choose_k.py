"""The k advisor: its answer from tables worked out by hand, and the script on small runs."""

from __future__ import annotations

import doctest

import numpy as np
import pandas as pd
import pytest
from banks import write_shipped

from dsim import scenario as runs
from dsim.errors import InputError
from dsim.schema import load_scenario
from experiments import choose_k
from experiments._common import run_main
from experiments.choose_k import Answer, advice, load_table, overall_table, speculation_off

TINY = [*("--set", "load.scored_min=12", "--set", "load.scored_per_user=2"), "--seeds", "2", "--jobs", "1"]
ARMS = ("off", "k=1", "k=2", "mine")


def answer(rates, loads, seeds=5, spread=0.01):
    """From {arm: throughput by load}; the seeds lie around it, in the same way for all arms."""
    around = 1 + spread * np.linspace(-1, 1, seeds)
    rows = [
        {
            "arm": arm,
            "concurrency": users,
            "seed": seed,
            "throughput_tok_s": rate * around[seed],
            "cost_source": f"cost:{arm}",
            "drafts_source": f"drafts:{arm}",
            "trace_source": "trace",
            "extrapolated": False,
            "n_scored": 7.0,
        }
        for arm, values in rates.items()
        for users, rate in zip(loads, values, strict=True)
        for seed in range(seeds)
    ]
    return Answer(pd.DataFrame(rows), loads, tuple(rates))


RATES = {"off": [10.0, 100.0], "k=1": [16.0, 110.0], "k=2": [20.0, 60.0], "mine": [19.0, 121.0]}
LOADS = {1: 0.5, 64: 0.5}


def test_the_best_k_at_each_load_and_over_all():
    found = answer(RATES, LOADS)
    assert found.best == {1: "k=2", 64: "k=1"}
    assert found.single == "k=1"  # 63 tok/s in a mean second, against 55 and 40
    assert (found.fixed, found.adaptive) == (["off", "k=1", "k=2"], ["mine"])
    # Another day, another k: at one user 95 % of the time.
    assert answer(RATES, {1: 0.95, 64: 0.05}).single == "k=2"
    table = overall_table(found).set_index("arm")
    assert table.loc["best k at each load", "throughput_tok_s"] == pytest.approx((20 + 110) / 2)
    assert table.loc["k=1", "over_each_load"] == pytest.approx(126 / 130 - 1)
    assert table.loc["mine", "over_each_load"] == pytest.approx(140 / 130 - 1)
    assert table.loc["mine", "over_best_single"] == pytest.approx(140 / 126 - 1)
    assert table.loc["k=1", "worst_load_over_best_fixed"] == pytest.approx(16 / 20 - 1)
    assert table.loc["k=1", "best_single"]
    assert not table.loc["k=2", "best_single"]
    assert set(table["cost_source"]) == {"cost:k=1|cost:k=2|cost:mine"}
    assert set(table["n_scored"]) == {7}


def test_examples():
    assert not doctest.testmod(choose_k).failed


def test_a_tie_goes_to_the_fewer_drafts():
    assert answer({"off": [10.0], "k=1": [20.0], "k=2": [20.0]}, {4: 1.0}).best == {4: "k=1"}


def test_intervals_are_paired():
    # All arms move together by 1 %: their ratio is constant, and so is the interval but for the scale.
    pair = answer(RATES, LOADS).gain(64, "mine", "k=1")
    assert pair.relative == pytest.approx(0.1)
    assert pair.relative_hi - pair.relative_lo < 0.01
    table = load_table(answer(RATES, LOADS))
    row = table[(table["arm"] == "mine") & (table["users"] == 64)].iloc[0]
    assert row["over_best_fixed"] == pytest.approx(0.1)
    assert row["over_off"] == pytest.approx(0.21)
    assert row["interval"] == "95 % t"
    ranks = table[table["users"] == 1].set_index("arm")["rank_of_fixed"]
    assert ranks[["k=2", "k=1", "off"]].tolist() == [1, 2, 3]
    assert pd.isna(ranks["mine"])


def test_where_speculation_is_off():
    loads = {1: 0.25, 16: 0.25, 64: 0.25, 256: 0.25}
    rates = {"off": [10.0, 10, 10, 10], "k=1": [15.0, 11, 10, 9], "k=2": [20.0, 9, 9, 5]}
    found = answer(rates, loads)
    assert speculation_off(found) == [(1, "on"), (16, "on"), (64, "open"), (256, "off")]
    text = " ".join(advice(found, load_table(found), overall_table(found)))
    assert "at 256 users every k loses against no speculation: speculation off there" in text
    assert "at 64 users no k is shown to be better than none: speculation off there" in text
    assert "to be switched off between 16 and 64 users" in text
    assert "at 256 users: no speculation" in text


def test_the_advice_in_sentences():
    found = answer(RATES, LOADS)
    lines = advice(found, load_table(found), overall_table(found))
    assert lines[0].startswith("at 1 user: k = 2, +100.0 % [")
    assert "over no speculation; against that mine -5.0 % [" in lines[0]
    assert "speculation pays at every load up to 64 users, with the right k" in lines[2]
    assert "k = 2 loses against no speculation at 64 users" in lines[2]
    assert lines[3].startswith("one k for all these loads: k = 1, -3.1 % [")
    assert lines[3].endswith("-20.0 % at its worst load")
    assert lines[4].startswith("mine over all loads: +7.7 % [")
    assert "+11.1 % [" in lines[4]
    assert "against k = 1 everywhere" in lines[4]
    assert "+75.0 % [" in lines[4]  # against the largest block, k = 2
    # Nearly as good is said to be so, beyond the noise it is not.
    close = answer({"off": [10.0], "k=1": [20.0], "k=2": [20.001]}, {4: 1.0})
    noisy = close.table.copy()
    rows = noisy["arm"] == "k=1"
    noisy.loc[rows, "throughput_tok_s"] += np.array([0.5, -0.5, 0.3, -0.3, 0.0])
    found = Answer(noisy, {4: 1.0}, ("off", "k=1", "k=2"))
    assert "(k = 1: no difference shown)" in advice(found, load_table(found), overall_table(found))[0]


def test_arms_and_policies():
    scenario = choose_k.study(load_scenario("decode-node"), "mtp", 3, ["dspark:lag=1"])
    arms = {arm.name: (arm.policy, arm.drafter, scenario.gamma(arm)) for arm in scenario.arms}
    assert arms["off"] == ("none", "dspark", 0)
    assert arms["k=2"] == ("fixed:k=2", "mtp", 2)
    assert arms["dspark:lag=1"] == ("dspark:lag=1", "mtp", 3)
    assert list(arms) == ["off", "k=1", "k=2", "k=3", "dspark:lag=1"]
    assert choose_k.adaptive_specs("none") == []
    assert choose_k.adaptive_specs("dspark ; threshold:t=0.5,on=survival") == ["dspark", "threshold:t=0.5,on=survival"]
    assert choose_k.adaptive_specs(None)[0] == "dspark:lag=2"
    for bad in ("", "dspark;", "dspark;dspark"):
        with pytest.raises(InputError, match="--adaptive"):
            choose_k.adaptive_specs(bad)


def test_default_loads_stay_in_the_profile():
    scenario = load_scenario("decode-node")
    assert list(choose_k.default_loads(scenario)) == [1, 8, 32, 64, 128, 192, 256]
    small = load_scenario("decode-node", {"cost.profile": "rtx5090-qwen3-4b-dflash16"})
    assert choose_k.default_loads(small) == pytest.approx({1: 1 / 3, 8: 2 / 3})
    assert list(choose_k.default_loads(load_scenario("decode-node", {"cluster.max_seqs": 32}))) == [1, 8, 32]
    # Two replicas serve twice the users.
    assert list(
        choose_k.default_loads(load_scenario("decode-node", {"cluster.max_seqs": 32, "cluster.replicas": 2}))
    ) == [
        *(1, 8, 32, 64),
    ]


def test_what_it_writes(tmp_path, capsys):
    arguments = ["--max-k", "2", "--loads", "2:0.25,6:0.75", "--domains", "code:1,chat:3", *TINY]
    choose_k.main(["--out", str(tmp_path), "--adaptive", "dspark:lag=2", *arguments])
    names = {"choose_k.png", "choose_k.svg", "choose_k.csv", "choose_k_loads.csv", "choose_k_overall.csv", "advice.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names | {"scenario.toml"}
    text = capsys.readouterr().out
    assert "throughput against the best fixed k of each load" in text
    assert "ranges over seeds, no verdict" in text
    assert (tmp_path / "advice.txt").read_text() in text
    rows = pd.read_csv(tmp_path / "choose_k.csv")
    assert list(rows.columns) == choose_k.COLUMNS
    assert len(rows) == 4 * 2 * 2
    assert set(rows.loc[rows["concurrency"] == 6, "share"]) == {0.75}
    assert set(rows.loc[rows["arm"] == "k=1", "drafts_source"]) == {
        "tilted:dsv4:recorded:dsim:dspark markov 2 layers:first-1-of-7"
    }
    assert set(rows.loc[rows["arm"] == "off", "drafts_source"]) == {"none"}
    saved = load_scenario(tmp_path / "scenario.toml")
    assert saved.drafts.domains == {"code": 1.0, "chat": 3.0}
    by_load = pd.read_csv(tmp_path / "choose_k_loads.csv")
    best = by_load[by_load["rank_of_fixed"] == 1]
    assert best["arm"].tolist() == best["best_fixed"].tolist()
    means = rows.groupby(["arm", "concurrency"])["throughput_tok_s"].mean()
    assert (best["throughput_tok_s"].to_numpy() == [means[["off", "k=1", "k=2"]][:, n].max() for n in (2, 6)]).all()


def test_same_bytes_whatever_the_workers(tmp_path):
    arguments = ["--max-k", "1", "--loads", "2", "--adaptive", "none", *TINY[:-2]]
    for jobs in ("1", "2"):
        choose_k.main(["--out", str(tmp_path / jobs), *arguments, "--jobs", jobs])
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes(), path.name


def test_the_figure_says_where_its_colors_end(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(choose_k, "save_figure", lambda fig, *_rest: drawn.append(fig))
    choose_k.main(["--out", str(tmp_path / "o"), "--max-k", "1", "--loads", "2", "--adaptive", "none", *TINY])
    (ax,) = drawn[0].axes
    (image,) = ax.images
    low, high = image.norm.vmin, image.norm.vmax
    assert f"(colors end at {low:+g} and {high:+g})" in ax.get_title(loc="left")
    assert low <= image.get_array().min()
    assert image.get_array().max() <= high


@pytest.mark.parametrize("source", ["recorded", "tilted"])
def test_it_answers_from_banks(source, tmp_path, monkeypatch):
    write_shipped(tmp_path / "banks")
    monkeypatch.setattr("dsim.drafts.bank._shipped_folder", lambda: tmp_path / "banks")
    monkeypatch.setattr(choose_k, "draw", lambda *_args: None)
    monkeypatch.chdir(tmp_path)
    runs._bank.cache_clear()
    choose_k.main(["--drafts", source, "--max-k", "2", "--loads", "2", "--adaptive", "dspark", *TINY])
    runs._bank.cache_clear()
    rows = pd.read_csv(tmp_path / "results" / "choose_k" / "choose_k.csv")
    sources = rows.loc[rows["arm"] != "off", "drafts_source"]
    assert sources.str.startswith({"recorded": "recorded:tiny:", "tilted": "tilted:dsv4:recorded:tiny:"}[source]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loads", "0"], "N:SHARE"),
        (["--loads", "500:1", "--set", "cluster.max_seqs=500"], "was not profiled there"),
        (["--max-k", "9"], "the curve 'dsv4' ends at position 5"),
        (["--max-k", "0"], "--max-k"),
        (["--drafter", "nobody"], "no drafter 'nobody'"),
        (["--domains", "code:-1"], "NAME:SHARE"),
        (["--domains", "law"], "no such domain"),
        (["--adaptive", "sorcery"], "unknown policy"),
        (["--adaptive", ";"], "--adaptive"),
        (["--profile", "nope"], "unknown profile"),
        (["--profile", "x", "--set", "cost.profile=y"], "given twice"),
        (["--profile", "m5max-nemotronh-30b", "--set", "cost.allow_extrapolation=true"], "no draft samples"),
        (["--set", "drafts.gamma=0"], "nothing to choose"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: choose_k.main([*arguments, "--out", str(tmp_path / "out"), *TINY]))
    assert ended.value.code == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(error) == 1
    assert message in error[0]
    assert not (tmp_path / "out").exists()
