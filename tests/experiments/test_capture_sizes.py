"""Captured sizes from the command line."""

from __future__ import annotations

import argparse
import doctest

import numpy as np
import pandas as pd
import pytest

from dsim.errors import InputError
from dsim.profile import load_profile, read_profile
from experiments import _loads, capture_sizes
from experiments._common import run_main
from experiments._loads import parse_loads

NAME = "b300x4-dsv4-flash-0731"
TINY = [*("--set", "load.scored_min=12", "--set", "load.scored_per_user=2"), "--seeds", "2", "--jobs", "1"]


def run(*arguments: str) -> int:
    """Exit code of the script."""
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: capture_sizes.main(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(autouse=True)
def quickly(request, monkeypatch):
    """Without the figure, but where a test asks for it."""
    if "figure" not in request.fixturenames:
        monkeypatch.setattr(capture_sizes, "draw", lambda *_args: None)


@pytest.fixture
def figure():
    """Draw it."""


@pytest.mark.parametrize("arguments", ["--lengths 3 --loads 16:0.5,64:0.5 --graphs 4", "--lengths 5 --loads 1,16,128"])
def test_what_the_points_are_can_be_read_where_they_lie_on_each_other(figure, tmp_path, monkeypatch, arguments):
    drawn = []
    monkeypatch.setattr(capture_sizes, "save_figure", lambda fig, *_rest: drawn.append(fig))
    capture_sizes.main(["--out", str(tmp_path / "o"), *arguments.split()])
    (fig,) = drawn
    fig.canvas.draw()
    left = fig.axes[0]
    assert not left.texts
    box = left.get_legend().get_window_extent()
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert labels[0] == "best sets"
    assert sorted(label.split(":")[0] for label in labels[1:]) == [
        "best, as allowed",
        "every 64th",
        "powers of two",
        "the profile's own",
    ]
    assert all(label.endswith("% lost") for label in labels[1:])
    # No point, and no piece of the curve at a number of graphs, lies behind it.
    for line in left.lines:
        for x, y in left.transData.transform(np.column_stack(line.get_data())):
            assert not (box.x0 <= x <= box.x1 and box.y0 <= y <= box.y1)
    title = fig._suptitle
    assert title.get_window_extent().x1 <= fig.bbox.x1
    assert title.get_text().startswith(f"{NAME}: its own 83 graphs lose ")


def table(folder):
    return pd.read_csv(folder / "capture_sizes.csv")


def test_loads_on_the_command_line():
    assert parse_loads("16:1,1:3") == {1: 0.75, 16: 0.25}
    assert parse_loads("0:1", lowest=0) == {0: 1.0}
    for bad in ("", "x", "0", "4:-1", "4:nan", "4:0", "4,4", "1.5:1", "1000001", "4:1e308,5:1e308"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_loads(bad)
    assert sum(parse_loads(_loads.DEFAULT_LOADS).values()) == pytest.approx(1.0)
    assert not doctest.testmod(_loads).failed


def test_fixed_blocks_need_a_graph_a_batch_size(figure, tmp_path, capsys):
    """Steps of R x 6 tokens and no other: as many graphs as loads lose nothing."""
    arguments = ["--lengths", "5", "--loads", "1,16,128", "--graphs", "3"]
    capture_sizes.main(["--out", str(tmp_path), *arguments])
    assert "capture: 6, 96, 768" in capsys.readouterr().out
    found = table(tmp_path).set_index("set")
    assert found.loc["best, as allowed", "lost_throughput"] == 0
    assert found.loc["best, as allowed", "padding"] == 0
    assert found.loc[capture_sizes.OWN, "graphs"] == 83
    assert 0 < found.loc[capture_sizes.OWN, "lost_throughput"] < 0.02  # 6 runs as 8
    assert set(found["drafts_source"]) == {"given:lengths:5: 1"}
    steps = pd.read_csv(tmp_path / "steps.csv")
    assert steps["tokens"].tolist() == [6, 96, 768]
    assert steps["own_runs_as"].tolist() == [8, 96, 768]
    assert steps["best_runs_as"].tolist() == [6, 96, 768]
    best = read_profile(tmp_path / f"{NAME}-best.csv")
    assert best.captured_sizes.tolist() == [6, 96, 768]
    assert read_profile(tmp_path / f"{NAME}-own.csv").captured_sizes.size == 83
    pictures = {tmp_path / f"capture_sizes.{kind}": 5_000 for kind in ("png", "svg")}
    assert all(path.stat().st_size > size for path, size in pictures.items())


def test_the_loss_is_of_whole_steps(tmp_path):
    """Padding 16 tokens to 96 costs what the fitted curve says, and drafting is in both."""
    capture_sizes.main(["--out", str(tmp_path), "--lengths", "5", "--loads", "12,16", "--graphs", "1"])
    row = table(tmp_path).set_index("set").loc["best, as allowed"]
    expected = 1 - (row["ideal_ms"] + row["other_ms"]) / (row["verify_ms"] + row["other_ms"])
    assert row["lost_throughput"] == pytest.approx(expected)
    assert row["other_ms"] == pytest.approx(1.3171)  # a draft of 16 requests, to which 12 are padded
    assert row["sizes"] == "96"


def test_limits(tmp_path, capsys):
    base = ["--out", str(tmp_path), "--lengths", "0:1,1:1,5:1", "--loads", "8,64"]
    capture_sizes.main([*base, "--memory-mib", "100", "--graph-mib", "30", "--multiple", "16"])
    row = table(tmp_path).set_index("set").loc["best, as allowed"]
    assert (row["graphs"], row["memory_mib"]) == (3, 90)
    assert all(int(size) % 16 == 0 for size in row["sizes"].split())
    capture_sizes.main([*base, "--graphs", "2", "--memory-mib", "100", "--graph-mib", "30"])
    assert table(tmp_path).set_index("set").loc["best, as allowed", "graphs"] == 2
    capsys.readouterr()
    capture_sizes.main(["--out", str(tmp_path), "--lengths", "5", "--loads", "64,256", "--graphs", "2"])
    assert "50.0 % of the steps lie above the largest size that was timed in a graph (1,024): --largest 1536" in (
        capsys.readouterr().out
    )
    capture_sizes.main(
        ["--out", str(tmp_path), "--lengths", "5", "--loads", "64,256", "--graphs", "2", "--largest", "1536"]
    )
    row = table(tmp_path).set_index("set").loc["best, as allowed"]
    assert row["sizes"] == "384 1536"
    assert row["extrapolated"]


def test_steps_from_a_file(tmp_path):
    (tmp_path / "mine.csv").write_text("tokens,steps\n20,3\n40,1\n")
    capture_sizes.main(["--out", str(tmp_path / "o"), "--steps", str(tmp_path / "mine.csv"), "--graphs", "1"])
    found = table(tmp_path / "o").set_index("set")
    assert found.loc["best, as allowed", "sizes"] == "40"
    assert set(found["drafts_source"]) == {"file:mine.csv"}
    capture_sizes.main(
        [
            *("--out", str(tmp_path / "m"), "--steps", str(tmp_path / "mine.csv")),
            *("--graphs", "2", "--curve", "measured"),
        ]
    )
    assert table(tmp_path / "m").set_index("set").loc["best, as allowed", "sizes"] == "24 40"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens,wieght\n8,1\n", r"line 1, field 'wieght': unknown column, expected tokens, and weight or steps"),
        ("tokens,tokens\n8,9\n", r"line 1, field 'tokens': column is named twice"),
        ("tokens,weight,steps\n8,1,2\n", r"line 1, field 'steps': says the same as 'weight', expected one of the two"),
        ("tokens,weight\n8,1,9\n", r"line 2: got '3 cells', expected 2, as the header"),
        ("tokens,weight\n8\n", r"line 2: got '1 cells', expected 2"),
        ("tokens,weight\n8,1\n\n9,x\n", r"line 4, field 'weight': got 'x', expected a number from 0 to 1e\+12"),
        ("tokens,weight\n8,1e308\n", r"line 2, field 'weight': got '1e308'"),
        ("tokens,weight\n8,\n", r"line 2, field 'weight': got ''"),
        ("tokens,weight\n8,0\n", r"field 'weight': no step has any weight"),
        ("tokens\nTrue\n", r"line 2, field 'tokens': got 'True', expected an integer in 1\.\.4194304"),
        ("tokens\n1e30\n", r"line 2, field 'tokens': got '1e30'"),
        ("tokens\n1_0\n", r"line 2, field 'tokens': got '1_0'"),
        ('tokens\n"8\n', r"line 2, field '--steps': is no CSV \(unexpected end of data\)"),
    ],
)
def test_bad_steps_are_named_with_their_line(text, message, tmp_path):
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(InputError, match=rf"mine\.csv, {message}"):
        capture_sizes.read_steps(tmp_path / "mine.csv")


def test_steps_as_they_were_written(tmp_path):
    (tmp_path / "steps.csv").write_bytes(b"\xef\xbb\xbftokens,weight,own_runs_as\r\n8,0.25,8\r\n\r\n9,0.75,\r\n")
    load = capture_sizes.read_steps(tmp_path / "steps.csv")
    assert (load.tokens.tolist(), load.weight.tolist()) == ([8, 9], [0.25, 0.75])


def test_simulated_steps_and_the_check(tmp_path, capsys):
    arguments = ["--loads", "2:1,4:1", "--graphs", "4", "--check", *TINY]
    capture_sizes.main(["--out", str(tmp_path), *arguments])
    assert "simulated, dspark: throughput with the best set" in capsys.readouterr().out
    steps = pd.read_csv(tmp_path / "steps.csv")
    assert steps["weight"].sum() == pytest.approx(1)
    # A graph for every size: the policy is not drawn to the engine's own ones.
    assert not set(steps["tokens"]) <= set(load_profile(NAME).captured_sizes.tolist())
    check = pd.read_csv(tmp_path / "check.csv")
    assert check["users"].tolist() == [2, 4]
    assert (check["own_tok_s"] > 0).all()
    assert set(check["interval"]) == {"range"}
    found = table(tmp_path)
    assert set(found["drafts_source"]) == {"tilted:dsv4:recorded:dsim:dspark markov 2 layers:first-5-of-7"}
    assert (found["other_ms"] > 0).all()


def test_runs_count_by_their_share_of_the_time():
    # Half of the time 100 steps of one token a second, a quarter 8 and a quarter 4 of two tokens, by two seeds each.
    runs = [(np.array([0, 200]), 2e3, 2.0), (np.array([0, 0, 8]), 1e3, 1.0), (np.array([0, 0, 8]), 2e3, 2.0)]
    total, spent = capture_sizes.pooled([1, 8, 8], runs, {1: 0.5, 8: 0.25})
    assert total.tolist() == [0, 50, 3]
    assert spent == 500 + 250 + 250


def test_fast_loads_make_more_steps(tmp_path):
    """A share is one of the time: one user alone makes steps of one size, and many of them."""
    capture_sizes.main(
        ["--out", str(tmp_path), "--loads", "1:1,8:1", "--arm", "fixed:k=1@dspark/1", "--graphs", "4", *TINY]
    )
    steps = pd.read_csv(tmp_path / "steps.csv").set_index("tokens")["weight"]
    assert steps.loc[2] > 0.5
    assert set(steps.index) <= set(range(1, 17))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "none.csv"], "none.csv"),
        (["--steps", "bad.csv"], "line 3, field 'tokens': got '2.5'"),
        (["--steps", "empty.csv"], "line 1, field 'tokens': column is missing"),
        (["--steps", "other.csv"], "line 1, field 'size': unknown column"),
        (["--steps", "."], "cannot be read (Is a directory)"),
        (["--lengths", "1", "--loads", "4", "--largest", "99999999"], "'largest': is no step, got 99999999"),
        (["--lengths", "1", "--loads", "99999999"], "got '99999999', expected N at most 1000000"),
        (["--lengths", "1,2", "--loads", "99999"], "got '299997 tokens', expected at most 65536"),
        (
            ["--lengths", "1", "--loads", "4", "--check", "--profile", "m5max-nemotronh-30b"],
            "field '--check': needs two sets to compare",
        ),
        (["--steps", "bad.csv", "--lengths", "1"], "do not apply"),
        (["--lengths", "x"], "N:SHARE"),
        (["--memory-mib", "5", "--lengths", "1"], "need each other"),
        (["--memory-mib", "5", "--graph-mib", "10", "--lengths", "1", "--loads", "4"], "no graph fits"),
        (["--graph-mib", "0", "--memory-mib", "1"], "a number > 0"),
        (["--lengths", "1", "--loads", "4", "--eager-factor", "3"], "timed eager steps"),
        (["--lengths", "1", "--loads", "4", "--largest", "2"], "at least 8 tokens, the smallest step"),
        (["--lengths", "1", "--loads", "4", "--profile", "nope"], "unknown profile"),
        (["--profile", "x", "--set", "cost.profile=y"], "given twice"),
        (["--arm", "oops@"], "no arm spec"),
        (["--arm", ""], "no arm spec"),
        (
            ["--set", "cost.fit=roofline"],
            "'cost.fit': is not used by this script, got 'roofline', expected --curve says",
        ),
        (["--set", "cost.running_max=false"], "'cost.running_max': is not used by this script"),
        (["--lengths", "1", "--arm", "dspark"], "--arm is about simulated steps"),
        (["--lengths", "1", "--seeds", "3"], "--seeds is about simulated steps"),
        (["--lengths", "1", "--drafts", "tilted"], "--drafts is about simulated steps"),
        (["--lengths", "1", "--quick"], "--quick is about simulated steps"),
        (["--lengths", "1", "--set", "drafts.preset=qwen3-4b"], "'--set drafts.preset': is not used, got 'qwen3-4b'"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("tokens,weight\n1,1\n2.5,1\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "other.csv").write_text("size\n1\n")
    assert run(*arguments, "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_every_step_is_padded_to_a_graph_that_holds_it():
    load = capture_sizes.step_load([1, 5, 9], [1, 1, 2])
    assert capture_sizes._padding(load, np.array([5])) == pytest.approx(1 - 6 / 10)
    assert capture_sizes._padding(load, np.array([1, 5, 9])) == 0
    assert capture_sizes._padding(load, np.array([], dtype=int)) == 0
