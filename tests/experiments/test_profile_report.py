"""The profile report: what it prints and writes, and that bad input leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from experiments import profile_report
from experiments._common import run_main

FILES = ["errors.csv", "profile_report.png", "profile_report.svg", "residuals.csv"]
SMALL = "gb10x2-inkling-small-nvfp4"


def run(*arguments: str) -> int:
    """Exit code of the script."""
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: profile_report.main(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_report_of_the_default_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "report"
    assert run("--out", str(out), "--what-if", "double:bandwidth=2") == 0
    text = capsys.readouterr().out
    assert "b300x4-dsv4-flash-0731 (measured)" in text
    assert "83 sizes, 1 to 1024 tokens" in text
    laws = [line for line in text.splitlines() if line.startswith("  overhead ")]
    assert [("b0" in line, "compute-bound from" in line) for line in laws] == [
        (False, False),
        (True, True),
        (True, True),
    ]
    assert "what-if: bandwidth x 2" in text
    price = next(line for line in text.splitlines() if line.split()[:1] == ["1024"])
    assert price.split()[1:3] == ["20.634", "20.634"]
    assert sorted(file.name for file in out.iterdir()) == FILES
    assert [file.name for file in out.parent.iterdir()] == ["report"]

    errors = pd.read_csv(out / "errors.csv")
    names = ["staircase", "additive", "roofline", "roofline-moe"]
    assert errors["fit"].tolist() == [name for name in names for _branch in range(2)]
    assert errors["in_sample_n"].tolist() == [83, 5] * 4
    residuals = pd.read_csv(out / "residuals.csv")
    assert set(residuals["error_kind"]) == {"in-sample", "loo"}
    row = residuals[(residuals["tokens"] == 192) & (residuals["fit"] == "staircase")].iloc[0]
    assert (row["measured_ms"], row["fitted_ms"]) == (10.5128, 11.3904)


def test_same_bytes_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(SMALL, "--out", str(tmp_path / name)) == 0
    for file in FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_fits_that_do_not_apply_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("unnamed-dsv4-pro-trtllm", "--out", str(tmp_path / "out")) == 0
    text = capsys.readouterr().out
    assert "staircase does not apply" in text
    assert "roofline does not apply" in text
    assert "at 32 requests" in text


def test_fits_that_lack_sizes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SMALL, "--what-if", "x:bandwidth=2", "--out", str(tmp_path / "out")) == 0
    text = capsys.readouterr().out
    assert "roofline-moe does not apply" in text
    assert text.count("T(B) = overhead + max(m0 + m2 B, c1 B), ms") == 2  # the what-if is of the other form
    errors = pd.read_csv(tmp_path / "out" / "errors.csv")
    assert errors["fit"].tolist() == ["staircase", "additive", "roofline"]


def test_a_profile_of_ones_own_with_two_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"verify,{b},,{c},{1 + b * c / 1e4},0" for c in (100, 900) for b in (1, 2, 4, 8)]
    (tmp_path / "mine.csv").write_text("kind,tokens,requests,context_tokens,ms,repeat\n" + "\n".join(rows) + "\n")
    keys = ("hardware", "model", "engine", "source", "license")
    (tmp_path / "mine.toml").write_text(
        "\n".join([f'{key} = "x"' for key in keys])
        + '\nname = "mine"\nkind = "measured"\ngpus = 1\ncaptured_sizes = []\ncapture_limit = 0\n'
    )
    arguments = [str(tmp_path / "mine.csv"), "--out", str(tmp_path / "out")]
    assert run(*arguments, "--context", "900") == 0
    price = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["8"])
    assert price.split()[1] == "1.720"
    assert run(*arguments, "--context", "500") == 2
    assert "expected 100, 900" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "unknown profile"),
        (["missing/box.csv"], "cannot be read"),
        (["rtx5090-qwen3-4b-dflash16", "--fit", "roofline"], "too few sizes"),
        ([SMALL, "--fit", "roofline-moe"], "expected at least 10 verify sizes"),
        ([SMALL, "--what-if", "x:compute=2"], "never becomes compute-bound"),
        ([SMALL, "--what-if", "x:speed=2"], "bandwidth=NUMBER"),
        ([SMALL, "--what-if", "x:bandwidth=fast"], "bandwidth=NUMBER"),
        ([SMALL, "--what-if", "x"], "changes nothing"),
        ([SMALL, "--fit", "additive", "--what-if", "x:bandwidth=2"], "needs a roofline fit"),
        ([SMALL, "--context", "100"], "the profile names none"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(*arguments, "--out", str(tmp_path / "out")) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(profile_report, "residuals", broken)
    with pytest.raises(RuntimeError, match="disk on fire"):
        profile_report.main([SMALL, "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    assert run(SMALL, "--out", str(tmp_path / "file")) == 2
    assert (tmp_path / "file").read_text() == "mine"
