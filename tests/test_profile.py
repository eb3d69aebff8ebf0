"""Profiles: what is read, what is refused, and that files round-trip."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.errors import InputError
from dsim.profile import (
    DEFAULT_PROFILE,
    MISSING,
    Profile,
    Samples,
    load_profile,
    read_profile,
    shipped_profiles,
    write_profile,
)

CSV = """\
kind,tokens,requests,context_tokens,ms,repeat
verify,1,,8192,7.5,0
verify,1,,8192,5.1,1
verify,8,,8192,5.4,0
verify,16,,8192,9.25,0
draft,,1,8192,0.9,0
draft,,4,8192,1.2,0
prefill,512,1,,20.5,0
"""
TOML = """\
name = "box"
hardware = "1x Box"
gpus = 1
model = "Model"
engine = "Engine"
kind = "measured"
captured_sizes = [1, 8]
capture_limit = 8
source = "a bench"
license = "CC0-1.0"
notes = "quiet \\"machine\\""
"""


def put(folder: Path, csv: str = CSV, toml: str = TOML) -> Path:
    (folder / "box.csv").write_text(csv)
    (folder / "box.toml").write_text(toml)
    return folder / "box.csv"


def refusal(folder: Path, csv: str = CSV, toml: str = TOML) -> InputError:
    path = put(folder, csv, toml)
    with pytest.raises(InputError) as caught:
        read_profile(path)
    return caught.value


def test_reads_what_is_there(tmp_path: Path) -> None:
    profile = read_profile(put(tmp_path))
    samples = profile.samples
    assert samples.kind.tolist() == ["verify"] * 4 + ["draft"] * 2 + ["prefill"]
    assert samples.tokens.tolist() == [1, 1, 8, 16, MISSING, MISSING, 512]
    assert samples.requests.tolist() == [MISSING] * 4 + [1, 4, 1]
    assert samples.context_tokens.tolist() == [8192] * 6 + [MISSING]
    assert samples.ms.tolist() == [7.5, 5.1, 5.4, 9.25, 0.9, 1.2, 20.5]
    assert samples.repeat.tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert profile.captured_sizes.tolist() == [1, 8]
    assert (profile.capture_limit, profile.gpus, profile.draft_included) == (8, 1, False)
    assert profile.notes == 'quiet "machine"'
    assert read_profile(tmp_path / "box.toml") == profile
    assert load_profile(str(tmp_path / "box.toml")) == profile
    assert not samples.ms.flags.writeable


def test_column_order_byte_order_mark_and_blank_lines_do_not_matter(tmp_path: Path) -> None:
    rows = [line.split(",") for line in CSV.splitlines()]
    turned = "\r\n".join(",".join(reversed(row)) for row in rows) + "\r\n\r\n"
    expected = read_profile(put(tmp_path))
    put(tmp_path)
    (tmp_path / "box.csv").write_bytes(b"\xef\xbb\xbf" + turned.encode())
    assert read_profile(tmp_path / "box.csv") == expected


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "value", "expected"),
    [
        ("verify,8,,8192,5.4,0", "verify,8,,8192,nan,0", 4, "ms", "nan", "a finite number > 0"),
        ("verify,8,,8192,5.4,0", "verify,8,,8192,inf,0", 4, "ms", "inf", "a finite number > 0"),
        ("verify,8,,8192,5.4,0", "verify,8,,8192,0,0", 4, "ms", "0", "a finite number > 0"),
        ("verify,8,,8192,5.4,0", "verify,8,,8192,-5.4,0", 4, "ms", "-5.4", "a finite number > 0"),
        ("verify,8,,8192,5.4,0", "verify,8,,8192,,0", 4, "ms", "", "a finite number > 0"),
        ("verify,8,,8192,5.4,0", "verify,8,,8192,fast,0", 4, "ms", "fast", "a finite number > 0"),
        ("verify,8,,8192,5.4,0", "verify,8,,8192,1e-320,0", 4, "ms", 1e-320, "a number from 1e-06 to 1e+09"),
        ("verify,8,,8192,5.4,0", "verify,8,,8192,1e308,0", 4, "ms", 1e308, "a number from 1e-06 to 1e+09"),
        ("verify,8,,8192,5.4,0", f"verify,{9 * '9'},,8192,5.4,0", 4, "tokens", "999999999", "at most 4194304"),
        ("verify,8,,8192,5.4,0", f"verify,{30 * '9'},,8192,5.4,0", 4, "tokens", 30 * "9", "at most 4194304"),
        ("verify,8,,8192,5.4,0", f"verify,8,,{10 * '9'},5.4,0", 4, "context_tokens", 10 * "9", "at most 1073741824"),
        ("draft,,4,8192,1.2,0", f"draft,,{10 * '9'},8192,1.2,0", 7, "requests", 10 * "9", "at most 4194304"),
        ("verify,8,,8192,5.4,0", "verify,0,,8192,5.4,0", 4, "tokens", "0", "an integer >= 1"),
        ("verify,8,,8192,5.4,0", "verify,-8,,8192,5.4,0", 4, "tokens", "-8", "an integer >= 1"),
        ("verify,8,,8192,5.4,0", "verify,8.0,,8192,5.4,0", 4, "tokens", "8.0", "an integer >= 1"),
        ("verify,8,,8192,5.4,0", "verify,,,8192,5.4,0", 4, "tokens", "", "an integer >= 1"),
        ("draft,,4,8192,1.2,0", "draft,,,8192,1.2,0", 7, "requests", "", "an integer >= 1"),
        ("draft,,4,8192,1.2,0", "draft,,0,8192,1.2,0", 7, "requests", "0", "an integer >= 1"),
        ("verify,8,,8192,5.4,0", "verify,8,,0,5.4,0", 4, "context_tokens", "0", "an integer >= 1"),
        ("verify,8,,8192,5.4,0", "verify,8,,8192,5.4,", 4, "repeat", "", "an integer >= 0"),
        ("verify,8,,8192,5.4,0", "verify,8,,8192,5.4,-1", 4, "repeat", "-1", "an integer >= 0"),
        ("verify,8,,8192,5.4,0", "decode,8,,8192,5.4,0", 4, "kind", "decode", "verify, draft, prefill"),
        ("verify,8,,8192,5.4,0", "verify,8,8192,5.4,0", 4, None, "5 cells", "6, as the header"),
        ("verify,1,,8192,5.1,1", "verify,1,,8192,5.1,0", 3, "repeat", 0, "a repeat number of its own"),
        ("verify,16,,8192,9.25,0", "verify,4,,8192,9.25,0", 5, "tokens", 4, "8 or more"),
        ("draft,,4,8192,1.2,0", "draft,,1,8192,1.2,0", 7, "repeat", 0, "a repeat number of its own"),
        ("verify,8,,8192,5.4,0", "verify,8,2,8192,5.4,0", 4, "requests", 2, "a value in every row or in none"),
        ("verify,8,,8192,5.4,0", "verify,8,,,5.4,0", 4, "context_tokens", "", "a value in every row or in none"),
        (",ms,repeat", ",repeat", 1, "ms", None, None),
        (",ms,repeat", ",ms,repeat,host", 1, "host", None, "only kind"),
        (",ms,repeat", ",ms,repeat,ms", 1, None, "kind,tokens,requests,context_tokens,ms,repeat,ms", None),
    ],
)
def test_bad_cell(
    tmp_path: Path, old: str, new: str, line: int, field: str, value: object, expected: str | None
) -> None:
    assert old in CSV
    error = refusal(tmp_path, CSV.replace(old, new))
    assert error.file == str(tmp_path / "box.csv")
    assert (error.line, error.field, error.value) == (line, field, value)
    assert (expected or "") in (error.expected or "")


def test_sizes_out_of_order_in_drafts(tmp_path: Path) -> None:
    csv = CSV.replace("draft,,1,8192,0.9,0", "draft,,8,8192,0.9,0")
    error = refusal(tmp_path, csv)
    assert (error.line, error.field, error.value) == (7, "requests", 4)
    assert "not increasing" in str(error)


def test_requests_must_increase_within_a_token_count(tmp_path: Path) -> None:
    csv = "kind,tokens,requests,context_tokens,ms,repeat\nverify,8,4,,1.0,0\nverify,8,2,,1.0,0\n"
    error = refusal(tmp_path, csv)
    assert (error.line, error.field, error.value) == (3, "requests", 2)


def test_each_context_has_its_own_order(tmp_path: Path) -> None:
    rows = "verify,8,,100,1.0,0\nverify,16,,100,2.0,0\nverify,8,,900,1.5,0\nverify,16,,900,2.5,0\n"
    profile = read_profile(put(tmp_path, CSV.splitlines()[0] + "\n" + rows))
    assert profile.samples.context_tokens.tolist() == [100, 100, 900, 900]


@pytest.mark.parametrize("csv", ["", "\n"])
def test_empty_file(tmp_path: Path, csv: str) -> None:
    error = refusal(tmp_path, csv)
    assert (error.line, error.file) == (1, str(tmp_path / "box.csv"))
    assert "is empty" in str(error)


@pytest.mark.parametrize("rows", [[], [4, 5]])
def test_no_verify_samples(tmp_path: Path, rows: list[int]) -> None:
    header, *lines = CSV.splitlines()
    error = refusal(tmp_path, "\n".join([header, *(lines[i] for i in rows)]) + "\n")
    assert "no verify samples" in str(error)


def test_not_text_and_not_csv(tmp_path: Path) -> None:
    path = put(tmp_path)
    path.write_bytes(CSV.encode() + b"verify,\xff,,8192,1,0\n")
    with pytest.raises(InputError, match="line 9: is not UTF-8"):
        read_profile(path)
    error = refusal(tmp_path, CSV.replace("verify,8,", 'verify,"8,'))
    assert "not valid CSV" in str(error)


@pytest.mark.parametrize(
    ("old", "new", "field", "line", "value", "expected"),
    [
        ('engine = "Engine"\n', "", "engine", None, None, None),
        ("gpus = 1", 'gpus = 1\nowner = "me"', "owner", 4, None, "one of name"),
        ("gpus = 1", "gpus = 0", "gpus", 3, 0, "an integer >= 1"),
        ("gpus = 1", "gpus = 1.0", "gpus", 3, 1.0, "an integer >= 1"),
        ("gpus = 1", "gpus = true", "gpus", 3, True, "an integer >= 1"),
        ('"1x Box"', '" "', "hardware", 2, " ", "text that is not empty"),
        ('kind = "measured"', 'kind = "guessed"', "kind", 6, "guessed", "one of measured, derived"),
        ("[1, 8]", "[8, 1]", "captured_sizes", 7, 1, "an integer > 8"),
        ("[1, 8]", "[1, 8, 8]", "captured_sizes", 7, 8, "an integer > 8"),
        ("gpus = 1", f"gpus = {10**12}", "gpus", 3, 10**12, "at most 4194304"),
        ("[1, 8]", f"[1, {10**30}]", "captured_sizes", 7, 10**30, "at most 4194304"),
        ("[1, 8]", "[0, 8]", "captured_sizes", 7, 0, "an integer > 0"),
        ("[1, 8]", "[1, 8.0]", "captured_sizes", 7, 8.0, "an integer > 1"),
        ("[1, 8]", "8", "captured_sizes", 7, 8, "a list"),
        ("capture_limit = 8", "capture_limit = 16", "capture_limit", 8, 16, "8 (the largest captured size)"),
        ("[1, 8]", "[]", "capture_limit", 8, 8, "0 (nothing is captured)"),
        ('name = "box"', 'name = "other"', "name", 1, "other", "'box', as the file"),
        ('name = "box"', 'name = "My Box"', "name", 1, "My Box", "lower-case"),
        ("gpus = 1", "gpus = 1\ndraft_included = 1", "draft_included", 4, 1, "true or false"),
    ],
)
def test_bad_identity(
    tmp_path: Path, old: str, new: str, field: str, line: int | None, value: object, expected: str | None
) -> None:
    assert old in TOML
    error = refusal(tmp_path, toml=TOML.replace(old, new))
    assert error.file == str(tmp_path / "box.toml")
    assert (error.field, error.line, error.value) == (field, line, value)
    assert (expected or "") in (error.expected or "")


def test_broken_toml_and_missing_half(tmp_path: Path) -> None:
    error = refusal(tmp_path, toml=TOML.replace("gpus = 1", "gpus = "))
    assert error.line == 3
    path = put(tmp_path)
    (tmp_path / "box.toml").unlink()
    with pytest.raises(InputError, match=r"box\.toml: cannot be read"):
        read_profile(path)
    with pytest.raises(InputError, match="expected the path of a profile"):
        read_profile(tmp_path / "box.txt")


@pytest.mark.parametrize(
    ("value", "message"), [("9" * 5000, r"is not valid TOML \(Exceeds the limit"), ("[" * 5000, "is nested too deeply")]
)
def test_toml_that_is_too_much_for_a_parser(tmp_path: Path, value: str, message: str) -> None:
    error = refusal(tmp_path, toml=TOML.replace("gpus = 1", f"gpus = {value}"))
    assert re.search(message, str(error))
    assert len(str(error)) < 500


def test_draft_included_contradicts_draft_samples(tmp_path: Path) -> None:
    error = refusal(tmp_path, toml=TOML + "draft_included = true\n")
    assert (error.field, error.expected) == ("draft_included", "false")


def test_arrays_in_memory_are_checked_too(tmp_path: Path) -> None:
    good = read_profile(put(tmp_path))
    fields = {name: getattr(good.samples, name) for name in Samples.__dataclass_fields__}

    def rebuilt(**changed: object) -> Profile:
        samples = Samples(**{**fields, **changed})
        return Profile("b", "h", 1, "m", "e", np.array([1, 8]), 8, "s", "l", "measured", samples)

    assert rebuilt().samples == good.samples
    for changed, field in (
        ({"ms": np.where(np.arange(7) == 2, np.nan, fields["ms"])}, "ms"),
        ({"tokens": np.where(np.arange(7) == 2, 0, fields["tokens"])}, "tokens"),
        ({"repeat": fields["repeat"] - 1}, "repeat"),
        ({"tokens": fields["tokens"] + 0.5}, "tokens"),
        ({"tokens": np.full(7, np.nan)}, "tokens"),
        ({"ms": fields["ms"][:3]}, "samples"),
        ({"kind": np.array([*fields["kind"][:6], "sleep"])}, "kind"),
    ):
        with pytest.raises(InputError) as caught:
            rebuilt(**changed)
        assert caught.value.field == field
    with pytest.raises(InputError, match="gpus"):
        Profile("b", "h", 0, "m", "e", np.array([1, 8]), 8, "s", "l", "measured", good.samples)


def test_write_is_atomic_and_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = read_profile(put(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    assert write_profile(profile, out / "box.toml") == out / "box.csv"
    first = {file.name: file.read_bytes() for file in out.iterdir()}
    assert sorted(first) == ["box.csv", "box.toml"]
    assert read_profile(out / "box.csv") == profile
    write_profile(read_profile(out / "box.csv"), out / "box.csv")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == first

    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "replace", full)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(OSError, match="no space left"):
        write_profile(profile, other / "box.csv")
    assert os.listdir(other) == []
    with pytest.raises(InputError, match="expected 'case', as the file"):
        write_profile(profile, out / "case.csv")


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = sorted(data.draw(st.sets(st.integers(1, 20000), min_size=1, max_size=8)))
    ms = st.floats(1e-6, 1e9)
    rows = [
        ("verify", tokens, MISSING, context, data.draw(ms), repeat)
        for context in data.draw(st.sampled_from([(MISSING,), (5,), (5, 900)]))
        for tokens in sizes
        for repeat in range(data.draw(st.integers(1, 3)))
    ]
    kind, tokens, requests, contexts, durations, repeat = zip(*rows, strict=True)
    captured = sorted(data.draw(st.sets(st.integers(1, 20000), max_size=40)))
    text = st.text(min_size=1).filter(lambda value: value.strip() != "" and "\r" not in value)
    profile = Profile(
        name="p",
        hardware=data.draw(text),
        gpus=data.draw(st.integers(1, 64)),
        model=data.draw(text),
        engine="e",
        captured_sizes=np.array(captured, dtype=np.int64),
        capture_limit=captured[-1] if captured else 0,
        source=data.draw(text),
        license="l",
        kind=data.draw(st.sampled_from(["measured", "derived"])),
        samples=Samples(np.array(kind), *(np.array(x) for x in (tokens, requests, contexts, durations, repeat))),
        notes=data.draw(st.text().filter(lambda value: "\r" not in value)),
        draft_included=data.draw(st.booleans()),
    )
    folder = tmp_path_factory.mktemp("round")
    assert read_profile(write_profile(profile, folder / "p.csv")) == profile


def test_shipped_profiles() -> None:
    names = shipped_profiles()
    assert DEFAULT_PROFILE in names
    assert len(names) >= 5
    for name in names:
        profile = load_profile(name)
        assert profile.name == name
        assert profile.source
        assert profile.license
    with pytest.raises(InputError, match=f"unknown profile, got 'b300', expected one of {names[0]}"):
        load_profile("b300")


def test_default_profile_is_the_b300() -> None:
    profile = load_profile(DEFAULT_PROFILE)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16)]
    assert profile.captured_sizes.tolist() == sizes
    assert (profile.capture_limit, profile.gpus, profile.kind) == (1024, 4, "measured")
    verify, draft = profile.samples.of("verify"), profile.samples.of("draft")
    assert np.unique(verify.tokens).tolist() == [*sizes, 1536, 2048, 4096, 8192, 16384]
    assert len(verify) == 88 * 5
    assert np.unique(draft.requests).tolist() == [1, 2, 4, *range(8, 257, 8)]
    assert set(profile.samples.context_tokens.tolist()) == {8192}
