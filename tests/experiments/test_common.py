"""The experiments' shared parts: options, whole-or-absent output, exit codes, tables."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from experiments._common import (
    drafts_note,
    format_table,
    parse_override,
    parser,
    print_table,
    run_main,
    run_options,
    scenario_of,
    scenario_path,
    sources_note,
    staged_output,
    write_csv,
)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write(out: Path, files: list[str], error: BaseException | None = None) -> None:
    with staged_output(out) as stage:
        for file in files:
            (stage / file).parent.mkdir(exist_ok=True)
            (stage / file).write_text("new")
        if error is not None:
            raise error


def test_defaults_and_types(tmp_path: Path) -> None:
    args = parser("What it answers.", default_seeds="10", out="results/ab").parse_args([])
    assert (args.seeds, args.quick, args.overrides, args.out) == (None, False, {}, Path("results/ab"))
    assert args.drafts is None
    assert args.jobs >= 1
    assert args.scenario.name == "decode-node.toml"
    file = tmp_path / "mine.toml"
    file.write_text("")
    options = ["--scenario", str(file), "--seeds", "3", "--jobs", "2", "--out", "x", "--quick"]
    args = parser("d").parse_args([*options, "--set", "a.b=3", "--set", "name=roof line"])
    assert (args.scenario, args.seeds, args.jobs, args.out, args.quick) == (file, 3, 2, Path("x"), True)
    assert args.overrides == {"a.b": 3, "name": "roof line"}
    assert parser("d").parse_args([]).overrides == {}  # nothing is kept from the call before


def how(*options: str) -> dict[str, object]:
    args = parser("d").parse_args(options)
    return run_options(args, scenario_of(args))


def test_how_runs_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DSIM_STORE")
    plain = {"jobs": 3, "engine": "auto", "backend": "loky", "address": None}
    assert how("--jobs", "3") == plain | {"store": tmp_path / "cache" / "runs-1"}
    assert how("--jobs", "3", "--store", "none") == plain | {"store": None}
    assert how("--store", str(tmp_path / "mine"))["store"] == tmp_path / "mine"
    assert how("--engine", "step", "--store", "none")["engine"] == "step"
    there = how("--backend", "dask", "--address", "10.0.0.1:8786", "--store", "none")
    assert (there["backend"], there["address"]) == ("dask", "10.0.0.1:8786")
    monkeypatch.setenv("DSIM_STORE", str(tmp_path / "variable"))
    assert how()["store"] == tmp_path / "variable"
    # Where nobody asked for a store, nobody has to do without a result.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSIM_STORE", str(tmp_path / "file"))
    assert how()["store"] is None
    assert "results are not kept: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "h:1"], "field '--address': needs --backend dask or ray, got 'h:1'"),
        (["--backend", "ray"], "field '--backend': needs --address, got 'ray', expected HOST:PORT"),
        (["--backend", "dask", "--address", "h:1", "--jobs", "2"], "field '--jobs': is not used with --backend dask"),
        (["--backend", "dask", "--address", "h:1", "--drafts", "live"], "live drafts run in this process"),
        (["--store", "/dev/null"], "field 'store': is a file"),
    ],
)
def test_contradictions_in_how_runs_are_made(options: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        how(*options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "argument --seeds: got '0', expected an integer >= 1"),
        (["--seeds", "2.5"], "argument --seeds: got '2.5', expected an integer >= 1"),
        (["--jobs", "-1"], "argument --jobs: got '-1', expected an integer >= 1"),
        (["--set", "novalue"], "expected KEY=VALUE"),
        (["--set", "a=1", "--set", "a=2"], "'a' is set twice"),
        (["--scenario", "absent.toml"], "scenario not found"),
        (["--drafts", "guessed"], "argument --drafts: invalid choice: 'guessed' (choose from"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parser("d").parse_args(options)
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert message in text


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parser("What it answers.").parse_args(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(
        option in text
        for option in (
            *("What it answers.", "--scenario", "--seeds", "--jobs", "--out", "--drafts", "--quick", "--set"),
            *("--store", "--backend", "--address", "--engine"),
        )
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", ("a", 1)),
        ("a.b-c = 2.5", ("a.b-c", 2.5)),
        ("a=true", ("a", True)),
        ("a=[1, 2]", ("a", [1, 2])),
        ('a="1"', ("a", "1")),
        ("policy=dspark:lag=2", ("policy", "dspark:lag=2")),
    ],
)
def test_override_values_are_toml_or_text(text: str, expected: tuple[str, object]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["", "a", "=1", "a=", "a b=1", "a..b=1", ".=1"])
def test_malformed_overrides_are_errors(text: str) -> None:
    with pytest.raises(InputError):
        parse_override(text)


def test_shipped_scenarios_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert scenario_path("decode-node").is_file()
    assert scenario_path("decode-node") == scenario_path("decode-node.toml")
    with pytest.raises(InputError, match=r"absent.*decode-node"):
        scenario_path("absent")


@pytest.mark.parametrize("source", ["recorded", "tilted", "synthetic"])
def test_drafts_is_short_for_the_scenarios_source(source: str) -> None:
    args = parser("d").parse_args(["--drafts", source])
    assert scenario_of(args).drafts.source == source
    assert args.overrides == {}
    args = parser("d").parse_args(["--drafts", source, "--set", "drafts.source=recorded"])
    with pytest.raises(InputError, match=f"'--drafts': is given twice, got '{source}', expected --drafts or --set"):
        scenario_of(args)


def test_captions_say_in_words_where_numbers_come_from() -> None:
    scenario = scenario_of(parser("d").parse_args([]))
    own = "recorded:dsim:dspark markov 2 layers"
    table = pd.DataFrame(
        {
            "drafter": ["none", "dspark"],
            "cost_source": ["measured:b300x4-dsv4-flash-0731:staircase"] * 2,
            "drafts_source": ["none", f"{own}:first-5-of-7"],
            "trace_source": ["recorded:azure2023-conv"] * 2,
            "extrapolated": [False, False],
        }
    )
    assert sources_note(scenario, table) == (
        "Step times: measured (DeepSeek-V4-Flash-0731 on 4x NVIDIA B300, tensor parallel 4, profile "
        "b300x4-dsv4-flash-0731), priced at the next captured size. Drafts: recorded from this project's own small "
        "drafters (DSpark, Markov head, 2 layers, blocks cut to 5 of 7) on texts of SmolLM2-135M-Instruct. Requests: "
        "Azure LLM inference trace 2023, conversation (recorded); results are conditional on this trace. Prompts are "
        "prefilled elsewhere at the profile's times, without a queue (assumed). No host overhead (assumed)."
    )
    plain = drafts_note(scenario, table)
    table["drafts_source"] = ["none", f"tilted:dsv4:{own}:first-5-of-7"]
    level = "DeepSeek-V4's published level (preset dsv4; math and chat derived from code)"
    moved = f"; tilted: luck and confidences as recorded, their level moved to {level}."
    assert drafts_note(scenario, table) == plain[:-1] + moved
    # Of another bank than the scenario's nobody knows the target; a label of no known kind stands as it is.
    table["drafts_source"] = ["none", "recorded:me:mine"]
    table["cost_source"] = "measured:x:staircase"
    assert "Step times: measured (profile x), fit staircase. " in sources_note(scenario, table)
    assert drafts_note(scenario, table) == "Drafts: recorded from me (mine)."
    table["cost_source"] = "what-if:fast:x:roofline"
    assert sources_note(scenario, table).startswith("Step times what-if:fast:x:roofline. ")


def test_staged_output_moves_all_files_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with staged_output(out) as stage:
        (stage / "a.csv").write_text("1")
        (stage / "sub").mkdir()
        (stage / "sub" / "b.csv").write_text("2")
        assert not (out / "a.csv").exists()
    assert names(out) == ["a.csv", "sub", "sub/b.csv"]
    assert (out / "sub" / "b.csv").read_text() == "2"


def test_staged_output_replaces_its_own_files_and_keeps_others(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("old")
    (tmp_path / "a.csv").write_text("old")
    with staged_output(tmp_path) as stage:
        (stage / "a.csv").write_text("new")
    assert names(tmp_path) == ["a.csv", "old.csv"]
    assert (tmp_path / "a.csv").read_text() == "new"
    assert (tmp_path / "old.csv").read_text() == "old"


@pytest.mark.parametrize("error", [RuntimeError("boom"), InputError("bad"), KeyboardInterrupt()])
def test_nothing_partial_is_left_after_a_failure(tmp_path: Path, error: BaseException) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "a.csv").write_text("old")
    for out in (kept, tmp_path / "new" / "out"):
        with pytest.raises(type(error)):
            write(out, ["a.csv", "b.csv"], error)
    assert names(tmp_path) == ["kept", "kept/a.csv"]
    assert (kept / "a.csv").read_text() == "old"


def test_a_file_in_the_way_is_an_error_before_anything_moves(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for out in (file, file / "below"):
        with pytest.raises(InputError, match="is a file"), staged_output(out):
            pytest.fail("the block must not run")
    (tmp_path / "out" / "z.csv").mkdir(parents=True)
    with pytest.raises(InputError, match="is a folder"):
        write(tmp_path / "out", ["a.csv", "z.csv"])
    assert names(tmp_path / "out") == ["z.csv"]
    (tmp_path / "out2").mkdir()
    (tmp_path / "out2" / "sub").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        write(tmp_path / "out2", ["a.csv", "sub/b.csv"])
    assert names(tmp_path / "out2") == ["sub"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Simulated: as root no folder refuses.
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(InputError, match=r"--out.*Permission denied"), staged_output(tmp_path / "new"):
        pytest.fail("the block must not run")
    monkeypatch.undo()
    assert names(tmp_path) == []
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match="Permission denied"), staged_output(tmp_path / "new"):
        pytest.fail("the block must not run")
    monkeypatch.undo()
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(InputError, match="Permission denied"), staged_output(tmp_path):
            pytest.fail("the block must not run")
        tmp_path.chmod(0o700)


def test_results_have_the_usual_permissions(tmp_path: Path) -> None:
    with staged_output(tmp_path / "out") as stage:
        (stage / "sub").mkdir()
        (stage / "sub" / "a").write_text("")
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode
    assert (tmp_path / "out" / "sub").stat().st_mode == plain.stat().st_mode


def raising(error: BaseException | None, code: int | None = None) -> int | None:
    if error is not None:
        raise error
    return code


@pytest.mark.parametrize(
    ("error", "code", "expected", "message"),
    [
        (None, None, 0, ""),
        (None, 3, 3, ""),
        (
            InputError(file="a.csv", line=3, field="tokens", value=-1, expected="an\ninteger"),
            None,
            2,
            "error: a.csv, line 3, field 'tokens': got -1, expected an integer\n",
        ),
        (KeyboardInterrupt(), None, 130, "interrupted\n"),
    ],
)
def test_run_main_exit_codes(
    error: BaseException | None, code: int | None, expected: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: raising(error, code))
    assert stop.value.code == expected
    assert capsys.readouterr().err == message


def test_run_main_does_not_hide_defects() -> None:
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)


def test_a_script_ends_with_code_2_and_no_traceback() -> None:
    code = "from experiments._common import run_main, parser\nrun_main(lambda: parser('d').parse_args(['--jobs', '0']))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: argument --jobs")
    assert "Traceback" not in ran.stderr


def test_csv_bytes(tmp_path: Path) -> None:
    df = pd.DataFrame(
        {
            "arm": ["mtp1", 'a, "b"'],
            "seed": [1, 2],
            "value": [0.1 + 0.2, np.nan],
            "small": [1e-17, 1.0],
            "yes": [True, False],
        }
    )
    write_csv(df, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_bytes() == (
        b'arm,seed,value,small,yes\nmtp1,1,0.30000000000000004,1e-17,True\n"a, ""b""",2,,1.0,False\n'
    )


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_csv_floats_read_back_as_the_same_numbers(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    write_csv(pd.DataFrame({"x": values}), path)
    assert [float(line) for line in path.read_text().splitlines()[1:]] == values


def test_table_is_aligned_with_sensible_digits(capsys: pytest.CaptureFixture[str]) -> None:
    df = pd.DataFrame(
        {
            "arm": ["mtp1", "dspark"],
            "users": [1, 256],
            "tok/s": [12345.678, 261.04],
            "ratio": [1.0, 1.34567],
            "p": [0.5, 0.0000123],
            "n": [5.0, np.nan],
            "ok": [True, False],
            "zero": [0.0, -0.0],
        }
    )
    print_table(df)
    assert capsys.readouterr().out.splitlines() == [
        "arm     users  tok/s  ratio        p  n  ok   zero",
        "mtp1        1  12346  1.000   0.5000  5  yes     0",
        "dspark    256    261  1.346  1.2e-05  -  no      0",
    ]


def test_table_shows_missing_texts_and_empty_tables() -> None:
    assert format_table(pd.DataFrame({"a": [None, "x\ny"]})).splitlines() == ["a", "-", "x y"]
    assert format_table(pd.DataFrame({"a": [], "b": []})) == "a  b"
    assert format_table(pd.DataFrame({"a": [np.nan, np.nan]})).splitlines() == ["a", "-", "-"]
    assert format_table(pd.DataFrame({"x": [-0.0001, 5.0]})).splitlines()[1].strip() == "-1.0e-04"


def test_arms_are_refused_where_a_script_has_its_own(tmp_path):
    for script in ("headroom", "choose_k"):
        main = importlib.import_module(f"experiments.{script}").main
        with pytest.raises(InputError, match=r"'arms.0.policy': is not used by this script, got 'none', expected "):
            main(["--set", "arms.0.policy=none", "--out", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("headroom", []),
        ("choose_k", []),
        ("capture_sizes", []),
    ],
)
def test_the_loads_of_a_scenario_are_refused_where_an_option_sets_them(script, options, tmp_path):
    main = importlib.import_module(f"experiments.{script}").main
    with pytest.raises(InputError, match=r"'load.users': is not used by this script, got \[4\], expected --"):
        main([*options, "--set", "load.users=[4]", "--out", str(tmp_path / "out")])
    with pytest.raises(InputError, match=r"'load.window_s': is not used by this script, got 3, expected a key"):
        main([*options, "--set", "load.window_s=3", "--out", str(tmp_path / "out")])
