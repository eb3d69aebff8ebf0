"""drafter_depth.py and draft_length.py: reading results, ratios, files, bad input."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from dsim.errors import InputError
from experiments import draft_length, drafter_depth
from experiments._common import run_main
from experiments._trained import LATENCY, RESULTS, read_latency, read_results

HEAD = ",".join([*RESULTS, "alpha_1", "alpha_2"])


def run(module: ModuleType, *arguments: str) -> int:
    """Exit code of a script."""
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: module.main(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def results(path: Path, rows: list[str], header: str = HEAD) -> str:
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def drafter(name: str, head: str, layers: int, gamma: int, tau: float) -> list[str]:
    """Rows of three domains: tau, 0.2 above and 0.3 below."""
    return [
        f"{name},{head},{layers},{gamma},150000,0.6,{domain},{tau + more:.4f},{tau + more - 0.05:.4f},"
        f"{tau + more + 0.05:.4f},0.5,"
        for domain, more in (("math", 0.2), ("code", 0.0), ("chat", -0.3))
    ]


def test_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*drafter("dspark", "markov", 1, 7, 1.7), *drafter("dspark", "markov", 2, 7, 1.9)]
    rows += [*drafter("dflash", "none", 1, 7, 1.5), *drafter("dflash", "none", 2, 7, 1.6)]
    file = results(tmp_path / "depth.csv", [*rows, *drafter("dspark", "markov", 2, 3, 1.6)])
    assert run(drafter_depth, "--results", file, "--out", str(tmp_path / "out")) == 2
    assert "the results have several gamma, expected one of 3, 7" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(drafter_depth, "--results", file, "--gamma", "7", "--out", str(tmp_path / "out")) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "drafter_depth.csv",
        "drafter_depth.png",
        "drafter_depth.svg",
    ]
    table = pd.read_csv(tmp_path / "out" / "drafter_depth.csv").set_index(["drafter", "layers", "domain"])
    assert len(table) == 4 * 4
    mean = table.loc[("DSpark", 2, "all")]
    assert mean["tau"] == pytest.approx(1.9 - 0.1 / 3)  # added here: the file has no row for it
    assert pd.isna(mean["tau_low"])
    assert mean["over_deepest_dflash"] == pytest.approx((1.9 - 0.1 / 3) / (1.6 - 0.1 / 3))
    assert table.loc[("DSpark", 2, "math"), "published"] == pytest.approx((5.7002 + 5.3167 + 4.4386) / 3)
    assert table.loc[("DSpark", 2, "math"), "published_over_5_layer_dflash"] == pytest.approx(
        (5.7002 + 5.3167 + 4.4386) / (5.3993 + 4.8538 + 4.153)
    )
    assert pd.isna(table.loc[("DFlash", 2, "math"), "published"])


def test_length_and_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for gamma, more in ((3, 0.0), (7, 0.2)) for row in drafter("dspark", "rnn", 2, gamma, 1.8 + more)]
    rows += [row for gamma in (3, 7) for row in drafter("dflash", "none", 2, gamma, 1.7)]
    file = results(tmp_path / "length.csv", rows)
    times = [
        f"{head},{gamma},2,8192,cpu,{10 + gamma * cost},{gamma * cost},90,50"
        for head, cost in (("none", 0), ("markov", 0.1), ("rnn", 0.2))
        for gamma in (3, 7)
    ]
    latency = results(tmp_path / "latency.csv", times, ",".join(LATENCY))
    assert run(draft_length, "--results", file, "--latency", latency, "--out", str(tmp_path / "a")) == 0
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "draft_length.csv", "draft_length.png", "draft_length.svg", "latency.csv", "sequential_head.png",
        "sequential_head.svg",
    ]  # fmt: skip
    table = pd.read_csv(tmp_path / "a" / "draft_length.csv").set_index(["drafter", "gamma", "domain"])
    assert table.loc[("DSpark-RNN", 7, "code"), "over_dflash"] == pytest.approx(2.0 / 1.7)
    assert table.loc[("DSpark-RNN", 7, "all"), "published_over_dflash"] == pytest.approx(1.194, abs=1e-3)
    cost = pd.read_csv(tmp_path / "a" / "latency.csv").set_index(["head", "gamma"])
    assert cost.loc[("rnn", 7), "overhead"] == pytest.approx(0.014)
    assert cost.loc[("markov", 7), "published_round_overhead"] == pytest.approx(190.333 / 189.274 - 1)
    assert "what the sequential head adds" in capsys.readouterr().out
    # Results alone: no timings are read; the rest is the same, byte for byte.
    assert run(draft_length, "--results", file, "--out", str(tmp_path / "b")) == 0
    alone = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert alone == files[:3]
    for name in alone:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_row_for_all_domains_is_taken_as_it_is(tmp_path: Path) -> None:
    rows = [*drafter("dspark", "markov", 1, 7, 1.7), "dspark,markov,1,7,150000,0.6,all,1.66,1.6,1.7,,"]
    table = read_results(results(tmp_path / "a.csv", rows), "depth.csv")
    (own,) = table[table["domain"] == "all"].to_dict("records")
    assert (own["tau"], own["tau_low"], own["key"], own["label"]) == (1.66, 1.6, "dspark", "DSpark")


GOOD = "dspark,markov,1,7,1000,0.6,math,1.9,1.8,2.0,0.5,0.4"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("dspark,gru,1,7,1000,0.6,math,1.9,1.8,2.0,0.5,0.4", "line 3, field 'head': got 'gru'"),
        ("dspark,markov,1.5,7,1000,0.6,math,1.9,1.8,2.0,0.5,0.4", "line 3, field 'layers': got '1.5', expected an int"),
        ("dspark,markov,2,7,1000,-1,math,1.9,1.8,2.0,0.5,0.4", "field 'temperature': got -1.0"),
        ("dspark,markov,2,7,1000,0.6,math,0.9,,,0.5,0.4", "field 'tau': got 0.9, expected 1 to gamma + 1 = 8"),
        ("dspark,markov,2,7,1000,0.6,math,nan,,,0.5,0.4", "field 'tau': got 'nan', expected a finite number"),
        ("dspark,markov,2,7,1000,0.6,math,1.9,1.95,2.0,0.5,0.4", "field 'tau_low': got 1.95, expected at most tau"),
        ("dspark,markov,2,7,1000,0.6,math,1.9,1.8,1.85,0.5,0.4", "field 'tau_high': got 1.85, expected at least tau"),
        ("dspark,markov,2,7,1000,0.6,math,1.9,1.8,2.0,1.5,0.4", "field 'alpha_1': got '1.5', expected a probability"),
        ("dspark,markov,2,7,1000,0.6,,1.9,1.8,2.0,0.5,0.4", "field 'domain': got '', expected a name"),
        ("dspark,markov,2,7,1000,0.6,math,1.9,1.8,2.0", "line 3: got 'dspark,markov,2"),
        (GOOD, "line 3: stands there twice"),
        ("dspark,markov,2,7,1000,1.0,math,1.9,1.8,2.0,0.5,0.4", "field 'temperature': several values"),
    ],
)
def test_bad_results(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_results(results(tmp_path / "a.csv", [GOOD, row]), "depth.csv")
    assert "a.csv" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("markov,7,2,8192,cpu,0,0,9,5", "field 'draft_ms'"),
        ("markov,7,2,8192,cpu,3,3,9,5", "field 'head_ms': got 3.0, expected at least 0 and below draft_ms = 3"),
        ("markov,7,2,8192,cpu,3,1,9,0", "field 'repeats'"),
        ("markov,7,2,8192,cpu,3,1,0,5", "field 'verify_ms': got 0.0, expected a number > 0"),
        ("none,7,2,8192,,3,0,9,5", "field 'device'"),
    ],
)
def test_bad_timings(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_latency(results(tmp_path / "l.csv", [row], ",".join(LATENCY)), "latency.csv")
    assert message in str(caught.value)


@pytest.mark.parametrize("module", [drafter_depth, draft_length])
def test_files_that_are_no_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments._trained.shipped_results", lambda name: None)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    cases = [
        ([], "comes with this dsim"),
        (["--results", str(tmp_path / "absent.csv")], "cannot be read (No such file or directory)"),
        (["--results", str(tmp_path)], "cannot be read"),
        (["--results", str(tmp_path / "bytes.csv")], "is no CSV"),
        (["--results", results(tmp_path / "empty.csv", [], "")], "missing column"),
        (["--results", results(tmp_path / "head.csv", [])], "has no rows"),
        (["--results", results(tmp_path / "tau.csv", [], HEAD.replace("tau,", ""))], "field 'tau': missing column"),
        (
            ["--results", results(tmp_path / "two.csv", [GOOD, GOOD.replace("1000", "2000")])],
            "DSpark was trained several times",
        ),
    ]
    for given, message in cases:
        assert run(module, *given, "--out", str(tmp_path / "out")) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
