"""The lint from the command line: files, exit codes, engine tables, and what bad input leaves behind (nothing)."""

from __future__ import annotations

import json

import engine_files
import pandas as pd
import pytest

from experiments import profile_lint
from experiments._common import run_main

FILES = ["findings.csv", "profile_lint.png", "profile_lint.svg"]
SMALL = "gb10x2-inkling-small-nvfp4"
CURVE = ("--acceptance", "0.9,0.8,0.7,0.6,0.5", "--draws", "10")


def run(*arguments: str) -> int:
    """Exit code of the script."""
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: profile_lint.main(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(autouse=True)
def quickly(request, monkeypatch):
    """Without the figure, but where a test asks for it."""
    if "figure" not in request.fixturenames:
        monkeypatch.setattr(profile_lint, "draw", lambda *_args: None)


@pytest.fixture
def figure():
    """Draw it."""


def test_the_default_profile(figure, tmp_path, capsys):
    assert run(*CURVE, "--out", str(tmp_path / "out")) == 0
    text = capsys.readouterr().out
    assert "up to 256 requests in decode, usually 64; 5 drafts each" in text
    assert "1,024 -> eager" in text
    assert "do: " in text
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == FILES
    found = pd.read_csv(tmp_path / "out" / "findings.csv")
    assert found["number"].tolist() == list(range(1, len(found) + 1))
    cliff = found[found["check"] == "cliff"].iloc[0]
    assert (cliff["tokens_low"], cliff["tokens_high"], cliff["requests"], cliff["gamma"]) == (1024, 1536, 64, 5)
    assert set(found["cost_source"]) == {"measured:b300x4-dsv4-flash-0731:staircase"}
    assert set(found["drafts_source"]) == {"curve:0.9,0.8,0.7,0.6,0.5"}
    assert set(found["extrapolated"]) == {False}


@pytest.mark.parametrize("name", ["b300x4-dsv4-flash-0731", SMALL, "h200-qwen3-14b-partial"])
def test_findings_are_named_in_words_within_the_panel(figure, name, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(profile_lint, "save_figure", lambda fig, *_args: drawn.append(fig))
    run(name, "--draws", "10", "--fail-on", "never", "--out", str(tmp_path))
    (fig,) = drawn
    fig.draw_without_rendering()
    left, right = fig.axes
    words = [text for text in left.texts if ": " in text.get_text()]
    found = pd.read_csv(tmp_path / "findings.csv")
    placed = found[found["tokens_low"].notna()]
    assert [text.get_text().partition(":")[0] for text in words] == placed["check"].tolist()
    renderer = fig.canvas.get_renderer()
    assert all(text.get_window_extent(renderer).x1 <= left.get_window_extent().x1 + 1 for text in words)
    # The words have not pressed the panel together.
    assert left.get_window_extent().width > 0.9 * right.get_window_extent().width


def test_same_bytes_twice(figure, tmp_path):
    for name in ("a", "b"):
        run(SMALL, *CURVE, "--out", str(tmp_path / name))
    for file in FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("fail_on", "code"), [("error", 0), ("warning", 1), ("info", 1), ("never", 0)]
)  # warnings, no errors
def test_exit_codes(fail_on, code, tmp_path):
    assert run(SMALL, *CURVE, "--fail-on", fail_on, "--out", str(tmp_path)) == code
    assert (tmp_path / "findings.csv").is_file()


def test_an_error_fails_by_default(tmp_path):
    assert run("m5max-nemotronh-30b", *CURVE, "--out", str(tmp_path)) == 1
    assert run("m5max-nemotronh-30b", *CURVE, "--out", str(tmp_path), "--fail-on", "never") == 0


def test_the_options_reach_the_checks(tmp_path, capsys):
    arguments = ("--concurrency", "512:8", "--gamma", "2", "--lookup", "floor", "--noise", "1", "--seed", "3")
    assert run(*CURVE, *arguments, "--out", str(tmp_path)) == 1  # a look-up that was declared is an error
    text = capsys.readouterr().out
    assert "up to 512 requests in decode, usually 8; 2 drafts each" in text
    assert "first-2-of-5" in text
    assert "+-1.0 % noise" in text
    assert "the table is read by 'floor'" in text
    assert "'linear'" not in text
    run(
        "h200-qwen3-14b-partial",
        *CURVE,
        "--experts",
        "64:4",
        "--expert-gb",
        "1",
        "--bandwidth",
        "4",
        "--out",
        str(tmp_path),
    )
    assert "a dense model's shape" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["diagonal", "additive", "trtllm_v1", "trtllm_v2"])
def test_engine_tables(name, tmp_path, capsys):
    path = tmp_path / f"My Table {name}.json"
    path.write_text(json.dumps(getattr(engine_files, name)()))
    run(str(path), *CURVE, "--out", str(tmp_path / "out"))
    text = capsys.readouterr().out
    assert f"my-table-{name}: " in text
    found = pd.read_csv(tmp_path / "out" / "findings.csv")
    assert "captured-sizes" in set(found["check"])
    # SGLang reads its diagonal table by the last size passed.
    assert ("the table is read by 'floor'" in text) == (name == "diagonal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "unknown profile"),
        (["missing.json"], "missing.json"),
        ([SMALL, "--acceptance", "often"], "acceptance"),
        ([SMALL, "--acceptance", "0.5", "--gamma", "2"], "gamma"),
        ([SMALL, "--concurrency", "4:8"], "1 to 4 requests"),
        ([SMALL, "--concurrency", "4:x"], "MAX:AT"),
        ([SMALL, "--concurrency", "0"], "--concurrency"),
        ([SMALL, "--noise", "0"], "noise"),
        ([SMALL, "--noise", "nan"], "noise"),
        ([SMALL, "--noise", "100"], "field '--noise': got 100.0, expected a percentage above 0 and below 100"),
        ([SMALL, "--concurrency", "99999999"], "field 'concurrency': times 6 tokens a request is no step"),
        ([SMALL, "--draws", "100001"], "field 'draws': got 100001, expected an integer in 1..100000"),
        ([SMALL, "--experts", "8"], "EXPERTS:ACTIVE"),
        ([SMALL, "--experts", "4:8"], "ACTIVE < EXPERTS"),
        ([SMALL, "--experts", "8:2", "--expert-gb", "10"], "needs both"),
        ([SMALL, "--bandwidth", "8"], "--experts only"),
        ([SMALL, "--experts", "8:2", "--expert-gb", "1e300", "--bandwidth", "1"], "got 1e+300, expected a number from"),
        ([SMALL, "--experts", "8:2", "--expert-gb", "1", "--bandwidth", "1e-300"], "'terabytes_s': got 1e-300"),
        ([SMALL, "--context", "100"], "the profile names none"),
        ([SMALL, "--seed", "-1"], "seed"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments, "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
