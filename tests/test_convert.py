"""``python -m dsim.convert``: what comes out, what is said to be lost, and what cannot be."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import engine_files
import numpy as np
import pytest
from banks import recorded_bank
from engine_files import FILES, write
from hypothesis import given
from hypothesis import strategies as st

from dsim.convert import main, steps_per_second, to_profile
from dsim.cost import fit
from dsim.drafts import read_bank, read_temperatures, write_bank
from dsim.engines import FORMATS, parse_engine_file, read_engine_file
from dsim.errors import InputError
from dsim.profile import MISSING, Profile, Samples, load_profile, write_profile

TABLES = [name for name in FORMATS if name != "sts"]


def run(capsys, *arguments) -> list[str]:
    """The command's lines; it must succeed."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out.splitlines()


def refused(capsys, *arguments) -> str:
    """The command's error; it must fail, in one line, and leave no file behind."""
    folder = Path(arguments[1]).parent
    before = sorted(folder.rglob("*"))
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
    return err


def refused_anywhere(capsys, *arguments) -> str:
    """The command's error, in one line."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def loaded(path: Path):
    return json.loads(path.read_text())


def made_profile(
    name: str,
    verify: list[tuple],
    draft: list[tuple[int, float]] = (),
    prefill: list[tuple[int, float]] = (),
    captured: tuple[int, ...] = (),
    included: bool = False,
) -> Profile:
    """A profile of (tokens, requests, context, ms) and (size, ms) rows; None where not given."""
    rows = [("verify", m, r, c, ms) for m, r, c, ms in verify]
    rows += [("draft", None, n, None, ms) for n, ms in draft] + [("prefill", n, None, None, ms) for n, ms in prefill]
    columns = [[MISSING if cell is None else cell for cell in column] for column in zip(*rows, strict=True)]
    return Profile(
        name=name,
        hardware="x",
        gpus=1,
        model="x",
        engine="x",
        captured_sizes=np.array(captured, dtype=np.int64),
        capture_limit=captured[-1] if captured else 0,
        source="x",
        license="x",
        kind="measured",
        samples=Samples(*(np.array(c) for c in columns), repeat=np.zeros(len(rows), dtype=np.int64)),
        draft_included=included,
    )


def saved(folder: Path, *arguments, **options) -> Path:
    profile = made_profile(*arguments, **options)
    return write_profile(profile, folder / f"{profile.name}.csv").with_suffix(".toml")


# -- engine to engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_of_the_same_format_is_exact(tmp_path, capsys, name):
    lines = run(capsys, write(tmp_path, FILES[name]()), tmp_path / "out.json")
    assert lines == [f"wrote {tmp_path / 'out.json'}", "nothing was lost"]
    assert loaded(tmp_path / "out.json") == FILES[name]()


@pytest.mark.parametrize(
    ("name", "raw", "like"),
    [
        ("sglang-diagonal", engine_files.diagonal(), False),
        ("sglang-diagonal", engine_files.diagonal() | {"max_batch_tokens": 99, "note": "mine"}, True),
        ("sglang-additive", engine_files.additive(), False),
        ("sglang-additive", engine_files.additive() | {"bs_probes": [1], "alpha_seconds": [0.0]}, False),
        ("trtllm-v1", engine_files.trtllm_v1(), True),
        ("trtllm-v2", engine_files.trtllm_v2(), True),
        ("vllm", {key: engine_files.vllm()[key] for key in ("draft_curve", "verify_curve")}, False),
        ("vllm", engine_files.vllm(), True),
    ],
    ids=str,
)
def test_a_table_that_becomes_a_profile_comes_back_exactly(tmp_path, capsys, name, raw, like):
    table = write(tmp_path, raw)
    run(capsys, table, tmp_path / "mid.toml")
    more = ["--like", table] if like else []
    run(capsys, tmp_path / "mid.toml", tmp_path / "back.json", "--format", name, *more)
    found = loaded(tmp_path / "back.json")
    if name == "trtllm-v2":
        # The origin of the numbers is the profile now.
        for item in found["measurements"]:
            assert item.pop("source_result_sha256") != "c" * 64
        for item in raw["measurements"]:
            item.pop("source_result_sha256")
    assert found == raw


def test_an_additive_table_comes_back_with_the_same_prices_however_its_constant_is_split(tmp_path, capsys):
    raw = engine_files.additive() | {"alpha_seconds": [0.002, 0.003, 0.0055], "theta_seconds": [0.004, 0.006, 0.018]}
    run(capsys, write(tmp_path, raw), tmp_path / "mid.toml")
    run(capsys, tmp_path / "mid.toml", tmp_path / "back.json", "--format", "sglang-additive")
    back = loaded(tmp_path / "back.json")
    assert back["bias_seconds"] == pytest.approx(0.016)
    assert back["alpha_seconds"] == engine_files.additive()["alpha_seconds"]
    for requests in (1, 3, 8, 20):
        np.testing.assert_allclose(
            parse_engine_file(back).prices(requests, 80), parse_engine_file(raw).prices(requests, 80), rtol=1e-9
        )


ODD_SPLIT = {
    "bias_seconds": 0.0013,
    "alpha_seconds": [0.0021, 0.00310007, 0.0056],
    "theta_seconds": [0.0042, 0.006, 0.0183],
}


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("sglang-additive", engine_files.additive() | ODD_SPLIT),
        (
            "trtllm-v1",
            engine_files.trtllm_v1()
            | {"fixed_overhead_ms": 1.3, "batch_overhead_ms": [2.1, 3.10007, 5.6], "step_time_ms": [4.2, 6.0, 18.3]},
        ),
    ],
)
def test_like_gives_an_additive_table_its_own_split_back(tmp_path, capsys, name, raw):
    table = write(tmp_path, raw)
    run(capsys, table, tmp_path / "mid.toml")
    more = ("--format", name, "--like", table)
    split = "- sizes and sums are those of --like: bias, alpha and theta are split as there"
    assert split in run(capsys, tmp_path / "mid.toml", tmp_path / "back.json", *more)
    assert loaded(tmp_path / "back.json") == raw
    # Another price, or another size, and it is another table: the usual split.
    sums, sizes = ("theta_seconds", "m_probes") if name == "sglang-additive" else ("step_time_ms", "token_counts")
    for field, place, value in ((sums, 1, raw[sums][1] * 1.001), (sizes, 2, raw[sizes][2] + 1)):
        other = {**raw, field: [value if i == place else old for i, old in enumerate(raw[field])]}
        more = ("--format", name, "--like", write(tmp_path, other, "other.json"))
        assert split not in run(capsys, tmp_path / "mid.toml", tmp_path / "usual.json", *more)
        assert loaded(tmp_path / "usual.json")[sums] != raw[sums]


def test_additive_tables_change_engines_without_a_change_of_price(tmp_path, capsys):
    lines = run(capsys, write(tmp_path, engine_files.additive()), tmp_path / "v1.json", "--format", "trtllm-v1")
    # 10 ms, of which the line through 0 ms at 8 tokens and 2 ms at 16 takes the 2 ms below its first size.
    found = loaded(tmp_path / "v1.json")
    assert found["fixed_overhead_ms"] == pytest.approx(8.0)
    assert found["step_time_ms"] == pytest.approx([2.0, 4.0, 16.0])
    assert found["batch_overhead_ms"] == pytest.approx([0.0, 1.0, 3.5])
    assert not [line for line in lines if "planner" in line]
    run(capsys, tmp_path / "v1.json", tmp_path / "back.json", "--format", "sglang-additive")
    assert loaded(tmp_path / "back.json") == engine_files.additive()


def test_a_table_of_two_axes_has_a_diagonal_and_the_rest_is_said_to_be_lost(tmp_path, capsys):
    table = write(tmp_path, engine_files.additive())
    lines = run(capsys, table, tmp_path / "d.json", "--format", "sglang-diagonal", "--gamma", 3)
    found = loaded(tmp_path / "d.json")
    # 4 tokens a request: 2, 4 and 8 requests have 8, 16 and 32 tokens.
    assert found["sample_batch_tokens"] == [8, 16, 32]
    assert found["sample_steps_per_sec"] == pytest.approx([100.0, 1000 / (10 + 1 + 2), 1000 / (10 + 3.5 + 6)])
    assert "- prices off the diagonal of 4 tokens a request are dropped" in lines
    # 15 tokens of 8 requests: OUT has the 10 ms of 8 tokens, IN 10 + 3.5 + 1.75. 32 of 2 requests: 19.5 against 16.
    (line,) = [line for line in lines if "planner" in line]
    low, high = 100 * (10 / 15.25 - 1), 100 * (19.5 / 16 - 1)
    assert line.endswith(f"by {low:.2f} % (8 requests, 15 tokens) to +{high:.2f} % (2 requests, 32 tokens)")


# -- to a profile ------------------------------------------------------------------------------------------


def test_a_diagonal_becomes_verify_samples_with_requests_where_the_block_size_is_told(tmp_path, capsys):
    table = write(tmp_path, engine_files.diagonal())
    lines = run(capsys, table, tmp_path / "one.toml", "--gamma", 7, "--set", "gpus=2", "--set", "hardware=2x box")
    profile = load_profile(tmp_path / "one.csv")
    assert profile.samples.tokens.tolist() == [8, 16, 32, 64]
    assert profile.samples.requests.tolist() == [1, 2, 4, 8]
    assert profile.samples.ms.tolist() == [1000 / rate for rate in engine_files.diagonal()["sample_steps_per_sec"]]
    assert (profile.gpus, profile.hardware, profile.draft_included) == (2, "2x box", True)
    assert (profile.source, profile.engine, profile.kind) == ("table.json", "SGLang", "measured")
    assert lines[0] == f"wrote {tmp_path / 'one.toml'} and {tmp_path / 'one.csv'}"
    assert any("draft_included = true" in line for line in lines)
    run(capsys, table, tmp_path / "two.csv")
    assert set(load_profile(tmp_path / "two.csv").samples.requests.tolist()) == {MISSING}


def test_what_is_named_is_not_said_to_be_assumed(tmp_path, capsys):
    table = write(tmp_path, engine_files.diagonal())
    assert any("draft_included = true" in line for line in run(capsys, table, tmp_path / "x.toml"))
    named = run(capsys, table, tmp_path / "x.toml", "--set", "draft_included=false")
    assert not any("draft_included" in line for line in named)
    assert not load_profile(str(tmp_path / "x.toml")).draft_included


def test_a_context_that_is_none_is_dropped_and_said(tmp_path, capsys):
    raw = engine_files.vllm()
    raw["factors"]["profile"]["context_len"] = True
    del raw["fingerprint"], raw["checksum"]
    told = run(capsys, write(tmp_path, raw), tmp_path / "x.toml")
    assert "- factors.profile.context_len = True is dropped: it is no number of tokens" in told
    assert load_profile(str(tmp_path / "x.toml")).samples.context_tokens.tolist() == [MISSING] * 8


def test_files_have_the_usual_permissions(tmp_path, capsys):
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode
    write_bank(recorded_bank(3), tmp_path / "bank.npz")
    run(capsys, write(tmp_path, engine_files.sts()), tmp_path / "sts.json")
    run(capsys, tmp_path / "sts.json", tmp_path / "temperatures.json", "--format", "temperatures")
    for name in ("bank.npz", "sts.json", "temperatures.json"):
        assert (tmp_path / name).stat().st_mode == usual, name
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bank.npz",
        "sts.json",
        "table.json",
        "temperatures.json",
        "usual",
    ]


def test_a_vllm_cache_becomes_a_profile_that_prices_steps_as_the_engine_does(tmp_path, capsys):
    run(capsys, write(tmp_path, engine_files.vllm()), tmp_path / "v.toml")
    profile = load_profile(tmp_path / "v.toml")
    assert (profile.gpus, profile.engine, profile.model) == (4, "vLLM 0.99", "example/model")
    assert profile.captured_sizes.tolist() == [1, 2, 4, 8]
    assert set(profile.samples.context_tokens.tolist()) == {4096}
    cost, table = fit(profile), parse_engine_file(engine_files.vllm())
    np.testing.assert_allclose(cost.verify_table(1, 16)[1:], table.verify_prices(16)[1:])
    assert [cost.draft_ms(n) for n in (1, 2)] == [table.draft_ms(n) for n in (1, 2)]


def charged(lines: list[str]) -> list[str]:
    return [line for line in lines if "dsim charges" in line]


def test_an_imported_table_is_said_to_be_read_otherwise_by_its_engine(tmp_path, capsys):
    # The staircase is straight between samples that are not captured: at 31 tokens 15 / 16 of the way from 1000 / 95.25
    # to 20 ms, where the engine still has the price of 16.
    lines = charged(run(capsys, write(tmp_path, engine_files.diagonal()), tmp_path / "d.toml"))
    before, after = 1000 / 95.25, 20.0
    most = (before + (after - before) * 15 / 16) / before - 1
    assert lines == [
        "- what dsim charges for a step of OUT (staircase) differs from what the engine reads from IN by +0.00 % (1 "
        f"requests, 8 tokens) to {100 * most:+.2f} % (1 requests, 31 tokens)"
    ]
    # Without captured sizes this engine prices every step at the next size: 30.5 ms at 9 tokens, and the line 14.75.
    bare = {key: engine_files.vllm()[key] for key in ("draft_curve", "verify_curve")}
    (line,) = charged(run(capsys, write(tmp_path, bare), tmp_path / "v.toml"))
    assert f"by {100 * ((9 + 21 / 4 + 0.5) / 30.5 - 1):.2f} % (1 requests, 9 tokens) to +0.00 %" in line
    # Exact graphs: 8 requests of 12 tokens are padded to 24, whose 7 ms are not those of the smaller graph.
    (line,) = charged(run(capsys, write(tmp_path, engine_files.trtllm_v2()), tmp_path / "t.toml"))
    assert f"by {100 * (5.2 / 7.0 - 1):.2f} % (8 requests, 12 tokens)" in line


@pytest.mark.parametrize(
    "raw", [engine_files.additive(), engine_files.trtllm_v1(), engine_files.vllm()], ids=["a", "1", "v"]
)
def test_nothing_is_said_where_both_rules_agree(tmp_path, capsys, raw):
    assert not charged(run(capsys, write(tmp_path, raw), tmp_path / "same.toml"))


def test_an_additive_table_becomes_two_axes_of_sums(tmp_path, capsys):
    run(capsys, write(tmp_path, engine_files.additive()), tmp_path / "a.toml")
    profile = load_profile(tmp_path / "a.toml")
    rows = list(zip(profile.samples.tokens.tolist(), profile.samples.requests.tolist(), strict=True))
    assert rows == [(8, 2), (8, 4), (8, 8), (16, 2), (64, 2)]
    assert profile.samples.ms == pytest.approx([10.0, 11.0, 13.5, 12.0, 24.0])
    assert (profile.kind, profile.draft_included) == ("derived", True)
    # What the simulator charges is the engine's own price, on the grid and off it.
    assert fit(profile, "additive").verify_table(3, 40)[40] == pytest.approx(10 + 0.5 + 8)


def test_a_v2_table_becomes_whole_steps_with_the_native_path_as_a_whole_block(tmp_path, capsys):
    lines = run(capsys, write(tmp_path, engine_files.trtllm_v2()), tmp_path / "t.toml")
    samples = load_profile(tmp_path / "t.toml").samples
    rows = list(zip(samples.tokens.tolist(), samples.requests.tolist(), samples.ms.tolist(), strict=True))
    assert rows == [(12, 4, 5.2), (16, 4, 5.6), (20, 4, 6.0), (24, 8, 7.0), (40, 8, 8.0)]
    assert "- iteration_drain_guard is dropped" in lines


def test_the_flat_table_of_an_engine_that_was_never_timed_becomes_a_profile(tmp_path, capsys):
    run(capsys, write(tmp_path, {"token_counts": [0], "step_time_ms": [1.0]}), tmp_path / "flat.toml")
    samples = load_profile(tmp_path / "flat.toml").samples
    assert (samples.tokens.tolist(), samples.ms.tolist()) == ([1], [1.0])


def test_a_v1_table_that_may_be_of_an_early_engine_is_told(tmp_path, capsys):
    table = write(tmp_path, {"token_counts": [8, 16], "step_time_ms": [1.0, 2.0]})
    assert any("_meta.lookup is not 'interp'" in line for line in run(capsys, table, tmp_path / "early.toml"))
    table = write(tmp_path, engine_files.trtllm_v1())
    assert not any("_meta.lookup" in line for line in run(capsys, table, tmp_path / "today.toml"))


def test_a_file_that_cannot_be_written_ends_in_one_line(tmp_path, capsys):
    (tmp_path / "x.json").mkdir()
    err = refused(capsys, write(tmp_path, engine_files.sts()), tmp_path / "x.json")
    assert "x.json, field 'OUT': is a folder" in err
    # A profile is two files: none is written where one cannot be.
    (tmp_path / "y.toml").mkdir()
    err = refused(capsys, write(tmp_path, engine_files.diagonal()), tmp_path / "y.csv")
    assert "y.toml, field 'OUT': is a folder" in err
    if Path("/proc").is_dir():
        assert "/proc/x.json: cannot be written" in refused_anywhere(capsys, tmp_path / "table.json", "/proc/x.json")


@given(st.decimals(min_value="0.001", max_value="100000", places=6))
def test_a_rate_printed_to_a_millionth_survives_milliseconds(rate):
    assert steps_per_second(1000.0 / float(rate)) == float(rate)


@given(st.floats(min_value=1e-3, max_value=1e6))
def test_any_rate_survives_milliseconds_within_its_last_digit(rate):
    back = steps_per_second(1000.0 / rate)
    assert 1000.0 / back == 1000.0 / rate
    assert abs(back - rate) <= 2 * np.spacing(rate)


def test_a_rate_that_changes_its_last_digit_is_told(tmp_path):
    rng = np.random.default_rng(0)
    rates = sorted(rng.uniform(900, 1000, 200), reverse=True)
    table = parse_engine_file(
        {"sample_batch_tokens": list(range(1, 201)), "sample_steps_per_sec": rates, "max_batch_tokens": 200}
    )
    changed = [rate for rate in rates if steps_per_second(1000.0 / rate) != rate]
    assert changed
    _, told = to_profile(table, "x", source="x")
    assert any(text.startswith(f"{len(changed)} rates come back") for text in told)


# -- from a profile ----------------------------------------------------------------------------------------

#: A dip at 4 tokens, an eager size, a draft curve, a prefill.
SMALL = {
    "verify": [(1, None, 2048, 5.0), (2, None, 2048, 7.0), (4, None, 2048, 6.5), (8, None, 2048, 9.0)],
    "draft": [(1, 0.5), (2, 0.75)],
    "prefill": [(64, 20.0)],
    "captured": (1, 2, 4, 8),
}


def test_a_profile_becomes_a_vllm_cache_and_comes_back(tmp_path, capsys):
    small = saved(tmp_path, "small", **SMALL)
    lines = run(capsys, small, tmp_path / "v.json", "--format", "vllm")
    found = loaded(tmp_path / "v.json")
    assert found["verify_curve"] == [[1, 5.0], [2, 7.0], [4, 6.5], [8, 9.0]]
    assert found["draft_curve"] == [[1, 0.5], [2, 0.75]]
    assert found["factors"]["profile"] == {"capture_sizes": [1, 2, 4, 8], "context_len": 2048}
    assert "- 1 verify sizes are dips: they are kept, and the engine flattens them (running maximum)" in lines
    assert "- prefill samples are dropped (1)" in lines
    assert any("--like" in line for line in lines)
    # The engine's prices are those of the staircase: no difference is reported.
    assert not [line for line in lines if "planner" in line]
    run(capsys, tmp_path / "v.json", tmp_path / "again.toml")
    again, was = load_profile(tmp_path / "again.toml"), load_profile(small)
    assert again.samples.of("verify") == was.samples.of("verify")
    assert again.captured_sizes.tolist() == [1, 2, 4, 8]


def test_a_profile_becomes_a_diagonal_with_the_draft_folded_in_where_the_block_size_is_told(tmp_path, capsys):
    small = saved(tmp_path, "small", **SMALL)
    lines = run(capsys, small, tmp_path / "d.json", "--format", "sglang-diagonal")
    found = loaded(tmp_path / "d.json")
    assert found["sample_steps_per_sec"] == pytest.approx([1000 / 5, 1000 / 7, 1000 / 6.5, 1000 / 9])
    assert found["max_batch_tokens"] == 8
    assert "- draft curve dropped (2 sizes): --gamma N folds it in" in lines
    assert "- captured sizes are dropped (4): a step has the price of the next smaller probe" in lines
    assert any(line.startswith("- 1 probes are faster than the one before (dips)") for line in lines)
    run(capsys, small, tmp_path / "d3.json", "--format", "sglang-diagonal", "--gamma", 3)
    # 1, 2 and 4 tokens are one request's, 8 tokens those of two.
    assert loaded(tmp_path / "d3.json")["sample_steps_per_sec"] == pytest.approx(
        [1000 / 5.5, 1000 / 7.5, 1000 / 7.0, 1000 / 9.75]
    )
    # 3 tokens a request: 4 tokens take two of them, 8 take three, and three have no draft price.
    lines = run(capsys, small, tmp_path / "d2.json", "--format", "sglang-diagonal", "--gamma", 2)
    assert loaded(tmp_path / "d2.json")["sample_batch_tokens"] == [1, 2, 4]
    assert loaded(tmp_path / "d2.json")["sample_steps_per_sec"] == pytest.approx([1000 / 5.5, 1000 / 7.5, 1000 / 7.25])
    assert "- 1 sizes above 4 tokens have no draft price: dropped" in lines


def test_a_profile_becomes_an_additive_table_with_the_draft_in_alpha(tmp_path, capsys):
    lines = run(capsys, saved(tmp_path, "small", **SMALL), tmp_path / "a.json", "--format", "sglang-additive")
    found = loaded(tmp_path / "a.json")
    assert found["bs_probes"] == [1, 2]
    assert found["alpha_seconds"] == pytest.approx([0.0, 0.00025])
    # The dip is flattened between 6.5 and 7 ms, by least squares of relative errors; the ends stay.
    table = parse_engine_file(found)
    assert table.prices(1, 8)[[1, 8]] == pytest.approx([5.5, 9.5])
    flat = (1 / 6.5 + 1 / 7) / (1 / 6.5**2 + 1 / 7**2)
    assert table.prices(1, 8)[[2, 4]] == pytest.approx([flat + 0.5] * 2)
    assert f"the fit is off by {100 * (1 - flat / 7):.2f} % at most" in "\n".join(lines)


def test_eager_sizes_are_compared_apart(tmp_path, capsys):
    verify = [*SMALL["verify"], (16, None, 2048, 40.0)]
    small = saved(tmp_path, "small", **SMALL | {"verify": verify})
    lines = run(capsys, small, tmp_path / "d.json", "--format", "sglang-diagonal", "--gamma", 7)
    shown = [line for line in lines if "planner" in line]
    assert [("up to 8 tokens" in line, " above by" in line) for line in shown] == [(True, False), (False, True)]
    # 9 to 15 tokens cost 40 ms and the draft pass; OUT has the 9.5 ms of 8 tokens of one request.
    assert f"{100 * (9.5 / 40.75 - 1):.2f} % (2 requests, 9 tokens)" in shown[1]


def test_one_context_is_chosen_and_the_others_are_said_to_be_dropped(tmp_path, capsys):
    verify = [(1, None, c, ms) for c, ms in ((512, 5.0), (2048, 6.0))] + [(8, None, 512, 9.0), (8, None, 2048, 12.0)]
    two = saved(tmp_path, "two", verify=verify, draft=[(1, 0.5)])
    lines = run(capsys, two, tmp_path / "v.json", "--format", "vllm")
    assert loaded(tmp_path / "v.json")["verify_curve"] == [[1, 5.0], [8, 9.0]]
    assert "- contexts dropped: 2048; prices are those at 512 tokens (--context)" in lines
    run(capsys, two, tmp_path / "v.json", "--format", "vllm", "--context", 2048)
    assert loaded(tmp_path / "v.json")["verify_curve"] == [[1, 6.0], [8, 12.0]]
    err = refused(capsys, two, tmp_path / "x.json", "--format", "vllm", "--context", 1000)
    assert "field '--context': got 1000, expected one of 512, 2048" in err


def test_a_vllm_cache_like_the_engines_own_has_its_sizes_and_its_identity(tmp_path, capsys):
    like = write(tmp_path, engine_files.vllm(), "like.json")
    verify = [(1, None, None, 5.0), (4, None, None, 8.0), (8, None, None, 10.0), (32, None, None, 60.0)]
    small = saved(tmp_path, "small", verify=verify, draft=[(1, 0.5), (4, 1.0)], captured=(1, 4, 8))
    lines = run(capsys, small, tmp_path / "v.json", "--format", "vllm", "--like", like)
    found = loaded(tmp_path / "v.json")
    # 2 tokens run padded to 4; 12 and 16 are eager, and the first eager size's price holds down to the limit.
    assert found["verify_curve"] == [[1, 5.0], [2, 8.0], [4, 8.0], [8, 10.0], [12, 60.0], [16, 60.0]]
    assert found["draft_curve"] == [[1, 0.5], [2, 1.0]]
    assert found["factors"] == engine_files.vllm()["factors"]
    assert read_engine_file(tmp_path / "v.json").signed
    assert "- 3 sizes of the engine's verify curve were not profiled; the fit prices them" in lines
    short = saved(tmp_path, "short", verify=verify[:2], draft=[(1, 0.5), (4, 1.0)])
    err = refused(capsys, short, tmp_path / "x.json", "--format", "vllm", "--like", like)
    assert "the engine profiled a size of 8 tokens, which the profile does not reach" in err


def test_a_v2_table_needs_the_engines_own_and_fills_its_cells(tmp_path, capsys):
    small = saved(
        tmp_path,
        "small",
        verify=[(12, 4, None, 5.0), (20, 4, None, 7.0), (20, 8, None, 8.0), (40, 8, None, 13.0)],
        included=True,
    )
    err = refused(capsys, small, tmp_path / "x.json", "--format", "trtllm-v2")
    assert "field '--like': a v2 table is bound to one engine by its fingerprint" in err
    like = write(tmp_path, engine_files.trtllm_v2(), "like.json")
    lines = run(capsys, small, tmp_path / "t.json", "--format", "trtllm-v2", "--like", like)
    tables = loaded(tmp_path / "t.json")["cost_tables"]
    # Timed: 12 and 20 tokens of 4 requests, 40 of 8. Between: 16 tokens of 4, 24 of 8 (1 ms more than of 4).
    assert tables["4"] == {"token_counts": [0, 12, 16], "step_time_ms": [7.0, 5.0, 6.0]}
    assert tables["8"] == {"token_counts": [0, 24], "step_time_ms": [13.0, pytest.approx(8 + 5 * 4 / 20)]}
    assert "- 2 cells (G, V) were not profiled and come from the additive fit: (4, 16), (8, 24)" in lines


@pytest.mark.parametrize("name", ["sglang-diagonal", "sglang-additive", "trtllm-v1", "vllm"])
def test_the_shipped_profile_becomes_every_format_and_the_file_reads_back(tmp_path, capsys, name):
    lines = run(capsys, "b300x4-dsv4-flash-0731", tmp_path / "t.json", "--format", name)
    assert read_engine_file(tmp_path / "t.json").format == name
    assert "- repeats are dropped: a size has its warm median" in lines


# -- temperatures ------------------------------------------------------------------------------------------


def test_temperatures_become_what_dsim_reads(tmp_path, capsys):
    path = write(tmp_path, engine_files.sts(), "sts.json")
    # The error names the way out, and that way is the one.
    with pytest.raises(InputError, match=r"'dataset': unknown key.*convert sts\.json OUT\.json --format temperatures'"):
        read_temperatures(path, 3)
    lines = run(capsys, path, tmp_path / "t.json", "--format", "temperatures")
    assert lines[1:] == ["- dropped: dataset, num_samples, ece_after"]
    assert read_temperatures(tmp_path / "t.json", 3) == (1.25, 0.9, 1.0)
    # TensorRT-LLM's spelling.
    other = write(tmp_path, {"sts_temperatures": [1.25, 0.9, 1], "max_draft_len": 3}, "trt.json")
    with pytest.raises(InputError, match=r"'sts_temperatures': unknown key.*convert trt\.json OUT\.json"):
        read_temperatures(other, 3)
    run(capsys, other, tmp_path / "t2.json", "--format", "temperatures")
    assert read_temperatures(tmp_path / "t2.json", 3) == (1.25, 0.9, 1.0)
    # And the other way: a file of dsim's is one of the engines'.
    run(capsys, tmp_path / "t.json", tmp_path / "back.json")
    assert read_engine_file(tmp_path / "back.json").temperatures == (1.25, 0.9, 1.0)


def test_a_banks_temperatures_become_a_file(tmp_path, capsys):
    write_bank(recorded_bank(3, temperatures=(1.5, 1.0, 0.5)), tmp_path / "bank.npz")
    run(capsys, tmp_path / "bank.npz", tmp_path / "t.json")
    assert read_temperatures(tmp_path / "t.json", 3) == (1.5, 1.0, 0.5)


# -- logs --------------------------------------------------------------------------------------------------

LINES = [
    {"request": r, "position": p, "step": p, "confidences": [0.9, 0.5], "verified": 2, "accepted": a, "domain": "chat"}
    for r in range(4)
    for p, a in ((0, 0), (1, 1), (3, 0), (4, 1), (6, 0), (7, 1), (9, 0))
]


def test_a_log_becomes_a_bank_that_says_what_it_is(tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    arguments = tmp_path / "mine.jsonl", tmp_path / "bank.npz", "--set", "drafter=dspark", "--seed", 3
    lines = run(capsys, *arguments)
    header = read_bank(tmp_path / "bank.npz").header
    assert (header.kind, header.source, header.drafter, header.gamma) == ("visited", "mine", "dspark", 2)
    assert lines[1] == "- drafts_source is 'visited:mine:dspark'"
    assert lines[2].startswith("- visited positions only, 28 of 40 (70 %): ")
    assert any(line.startswith("- position 2: ") for line in lines)
    first = (tmp_path / "bank.npz").read_bytes()
    run(capsys, *arguments)
    assert (tmp_path / "bank.npz").read_bytes() == first


# -- what cannot be ----------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {name: write(tmp_path, FILES[name](), f"{name}.json") for name in FORMATS}
    write_bank(recorded_bank(3), tmp_path / "bank.npz")
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "idle.jsonl").write_text(
        "".join(json.dumps(line | {"verified": 0, "accepted": 0}) + "\n" for line in LINES)
    )
    one_domain, other = LINES[0] | {"domain": "a\nb"}, LINES[1] | {"domain": "b"}
    (tmp_path / "lines.jsonl").write_text(json.dumps(one_domain) + "\n" + json.dumps(other))
    two = saved(tmp_path, "two", verify=[(8, 2, None, 5.0), (8, 4, None, 6.0), (16, 2, None, 7.0)], included=True)
    one = saved(tmp_path, "one", verify=[(8, None, None, 5.0), (16, None, None, 7.0)])
    for arguments, message in [
        # conversions
        ((paths["sts"], "x.toml"), "sts cannot become profile"),
        ((paths["sts"], "x.json", "--format", "vllm"), "sts cannot become vllm"),
        ((two, "x.json", "--format", "sts"), "a profile cannot become sts"),
        ((two, "y.toml"), "a profile cannot become profile"),
        ((two, "x.npz"), "a profile cannot become bank"),
        ((paths["vllm"], "x.npz"), "vllm cannot become bank"),
        (("log.jsonl", "x.json", "--format", "vllm"), "a confidence log cannot become vllm"),
        (("bank.npz", "x.toml"), "a bank cannot become profile"),
        ((two, "x.json", "--format", "vllm"), "has several request counts at one token count"),
        ((one, "x.json", "--format", "vllm"), "of this profile it has no draft samples"),
        ((two, "x.json", "--format", "sglang-diagonal"), "a diagonal table has one, expected a block size"),
        ((two, "x.json", "--format", "sglang-diagonal", "--gamma", "9"), "no profiled batch size has its diagonal"),
        ((paths["sglang-additive"], "x.json", "--format", "vllm"), "vLLM prices"),
        ((one, "x.json", "--format", "trtllm-v2", "--like", paths["trtllm-v2"]), "a v2 table holds whole steps"),
        (
            (paths["sglang-diagonal"], "x.toml", "--gamma", "5"),
            "the table has a size of 8 tokens, which is no multiple of 6",
        ),
        # names
        ((two, "x.json"), "field '--format': OUT's name does not tell it"),
        (("log.jsonl", "x.json"), "field '--format': OUT's name does not tell it"),
        ((paths["vllm"], "x.json", "--format", "profile"), "got '.json', expected .toml or .csv for profile"),
        ((paths["vllm"], "x.txt"), "got '.txt', expected .json for vllm"),
        (("table.txt", "x.json"), "table.txt, field 'IN': cannot be told from its name"),
        (("none.json", "x.json"), "none.json: cannot be read"),
        ((paths["vllm"], "none/x.json"), "there is no such folder"),
        ((paths["vllm"], "Big Name.toml"), "field 'OUT': a profile is named like its file, got 'Big Name'"),
        # options that would change nothing, or nonsense
        (
            (paths["vllm"], "x.json", "--gamma", "5"),
            "--gamma': has an effect only where a diagonal table is read or made",
        ),
        ((paths["sglang-diagonal"], "x.json", "--gamma", "7"), "--gamma': has an effect only where"),
        ((one, "x.json", "--format", "sglang-diagonal", "--gamma", "3"), "changes nothing: there is no draft curve"),
        ((one, "x.json", "--format", "sglang-diagonal", "--gamma", "0"), "got 0, expected an integer >= 1"),
        (
            (paths["vllm"], "x.toml", "--context", "8"),
            "--context': has an effect only where a table is made of a profile",
        ),
        ((one, "x.json", "--format", "sglang-diagonal", "--context", "8"), "the profile has one context at most"),
        ((paths["vllm"], "x.toml", "--seed", "1"), "--seed': has an effect only where a bank is made of a log"),
        (
            (paths["vllm"], "x.toml", "--like", paths["vllm"]),
            "--like': has an effect only where an engine's table is made",
        ),
        ((one, "x.json", "--format", "sglang-diagonal", "--like", paths["vllm"]), "is of another format, got 'vllm'"),
        ((one, "x.json", "--format", "sglang-diagonal", "--set", "gpus=2"), "no --set: OUT has nothing"),
        ((paths["vllm"], "x.toml", "--set", "name=a"), "field '--set name': got 'a', expected one of hardware, gpus"),
        ((paths["vllm"], "x.toml", "--set", "gpus=0"), "field 'gpus': got 0"),
        ((paths["vllm"], "x.toml", "--set", "gpus"), "expected KEY=VALUE"),
        ((paths["vllm"], "x.toml", "--set", "gpus=1", "--set", "gpus=2"), "field '--set gpus': is given twice, got 2"),
        ((one, "x.json", "--format", "sglang-diagonal", "--gamma", f"{10**24}"), "'--gamma': got 1000000000000000"),
        (("log.jsonl", "x.npz", "--seed", f"{1 << 64}"), f"'--seed': got {1 << 64}, expected at most {(1 << 64) - 1}"),
        (("log.jsonl", "x.npz", "--set", "drafter=3"), "field '--set drafter': got 3, expected text"),
        # logs that tell nothing, and text that would break the line
        (("idle.jsonl", "x.npz"), "error: idle.jsonl, field 'verified': no draft of the log was verified"),
        (("lines.jsonl", "x.npz"), "field 'domain': got 'b', expected 'a\\nb', as in line 1"),
        (("here\nthere.json", "x.json"), "here there.json: cannot be read"),
    ]:
        assert message in refused(capsys, *arguments), arguments


def test_it_never_writes_onto_what_it_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, engine_files.diagonal(), "one.json")
    write(tmp_path, engine_files.vllm(), "cache.json")
    saved(tmp_path, "box", [(8, None, None, 10.0), (16, None, None, 12.0)], draft=[(1, 1.0)])
    (tmp_path / "linked.json").symlink_to("one.json")
    read = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for arguments, name in (
        (("one.json", "one.json"), "one.json"),
        (("one.json", "./one.json", "--format", "sglang-additive"), "one.json"),
        (("one.json", "linked.json", "--format", "sglang-additive"), "linked.json"),
        (("box.toml", "box.csv"), "box.toml"),
        (("box.csv", "cache.json", "--format", "vllm", "--like", "cache.json"), "cache.json"),
    ):
        assert f"{name}, field 'OUT': would replace what it is made of" in refused(capsys, *arguments), arguments
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == read
    # A shipped profile's name is no file here, and what happens to be called like it is none of its.
    assert "wrote b300x4-dsv4-flash-0731.json" in run(
        capsys, "b300x4-dsv4-flash-0731", "b300x4-dsv4-flash-0731.json", "--format", "vllm"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.json"], "the following arguments are required: OUT"),
        (["a.json", "b.json", "--gamma", "five"], "argument --gamma: invalid int value: 'five'"),
        (["a.json", "b.json", "--format", "nope"], "argument --format: invalid choice"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert message in err


def test_help_names_every_option_and_every_format(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("IN", "OUT", "--format", "--like", "--gamma", "--context", "--seed", "--set", *FORMATS, "bank"):
        assert word in text


def test_it_runs_as_a_module(tmp_path, capsys, monkeypatch):
    path = write(tmp_path, engine_files.diagonal())
    monkeypatch.setattr(sys, "argv", ["convert", str(path), str(tmp_path / "x.json")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dsim.convert", run_name="__main__")
    assert ended.value.code == 0
    assert "nothing was lost" in capsys.readouterr().out
