"""A file that is read in blocks gives what it gives as a whole: the same bytes, the same errors, less memory."""

import gzip
import hashlib
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.errors import InputError
from traces import rawtext, read_trace
from traces.rows import Rows

WHOLE = 1 << 30
HEADS = {
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
    "mooncake": "",
}


def line(kind, seconds, prompt, output):
    if kind == "vidur":
        return f"{seconds:.3f},{prompt},{output}\n"
    if kind == "azure":
        clock = f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}.{round(seconds % 1 * 1e3) % 1000:03d}"
        return f"2024-05-10 00:{clock},{prompt},{output}\n"
    if kind == "burstgpt":
        return f"{seconds:.3f},ChatGPT,{prompt},{output},0,Conversation log\n"
    head = f'{{"timestamp": {seconds * 1e3:.0f}, "input_length": {prompt}, "output_length": {output}, '
    return f'{head}"hash_ids": {list(range(-(-prompt // 512)))}}}\n'


def text_of(kind, rows):
    return HEADS[kind] + "".join(line(kind, *row) for row in rows)


def read(path, size, **options):
    """The trace, or its error, of a file that is read in blocks of so many bytes."""
    before = rawtext.BLOCK_BYTES
    rawtext.BLOCK_BYTES = size
    try:
        return read_trace(path, **options)
    except InputError as error:
        return error
    finally:
        rawtext.BLOCK_BYTES = before


def cut(trace, window):
    try:
        return trace if isinstance(trace, InputError) or window is None else trace.window(*window)
    except InputError as error:
        return error


def assert_same(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, InputError):
        assert a.message == b.message
        if a.file is not None:  # a window of a trace that was read knows no file any more
            assert a.file == b.file
        assert (a.line, a.field, a.value, a.expected) == (b.line, b.field, b.value, b.expected)
        return
    assert (a.name, a.kind, a.source, a.prefix_blocks) == (b.name, b.kind, b.source, b.prefix_blocks)
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert getattr(a, name).dtype == getattr(b, name).dtype
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes()


SECONDS = st.floats(0, 3000, allow_subnormal=False).map(lambda s: round(s, 3))
ROWS = st.lists(st.tuples(SECONDS, st.integers(0, 3000), st.integers(0, 900)), min_size=1, max_size=40)
WINDOWS = st.none() | st.tuples(st.floats(0, 2000), st.floats(0, 3500) | st.just(math.inf))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(HEADS)),
    rows=ROWS,
    window=WINDOWS,
    in_order=st.booleans(),
    sort=st.booleans(),
    drop_zero=st.booleans(),
    zeros=st.booleans(),
    size=st.integers(42, 600),
    packed=st.booleans(),
)
def test_blocks_and_windows_change_nothing(
    tmp_path_factory, kind, rows, window, in_order, sort, drop_zero, zeros, size, packed
):
    if not zeros:
        rows = [(second, prompt + 1, output + 1) for second, prompt, output in rows]
    if in_order:
        rows = sorted(rows, key=lambda row: row[0])
    data = text_of(kind, rows).encode()
    path = tmp_path_factory.getbasetemp() / "blocks.dat"
    path.write_bytes(gzip.compress(data) if packed else data)
    options = {"sort": sort, "drop_zero": drop_zero}
    whole = cut(read(path, WHOLE, **options), window)
    if window is not None and not window[0] < window[1]:
        assert isinstance(read(path, size, window=window, **options), InputError)
        return
    in_blocks = read(path, size, window=window, **options)
    if isinstance(whole, InputError) and not zeros:
        assert_same(whole, in_blocks)
    elif isinstance(whole, InputError):
        # Of several things that are wrong, the one in the first block is named.
        assert isinstance(in_blocks, InputError)
        assert in_blocks.line is None or in_blocks.line <= whole.line or in_blocks.field != whole.field
    else:
        assert_same(whole, in_blocks)


GOOD = [(float(i), 100 + i, 10 + i) for i in range(60)]
SIZES = (42, 100, 333, 1500)


def found_alike(path):
    """What reading the whole file at once says, and in blocks of any of these sizes, too."""
    whole = read(path, WHOLE)
    for size in SIZES:
        assert_same(whole, read(path, size))
    return whole


@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize("row", [0, 1, 2, 30, 58, 59])
@pytest.mark.parametrize("bad", ["x", "", "-1", "1.5", "9" * 12])
def test_one_bad_value_is_found_wherever_it_lies(tmp_path, kind, row, bad):
    lines = text_of(kind, GOOD).splitlines(keepends=True)
    place = row + (kind != "mooncake")
    lines[place] = lines[place].replace(str(100 + row), bad, 1)
    path = tmp_path / "bad.dat"
    path.write_text("".join(lines))
    whole = found_alike(path)
    assert whole.line == place + 1
    for size in SIZES:
        assert_same(whole, read(path, size, window=(0.0, 1.0)))


@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize("row", [1, 2, 30, 59])
def test_a_row_that_goes_back_in_time_is_found_wherever_it_lies(tmp_path, kind, row):
    rows = list(GOOD)
    rows[row] = (row - 1.5 if row > 1 else 0.0, 100, 10)
    rows[0] = (0.5, 100, 10) if row == 1 else rows[0]
    path = tmp_path / "back.dat"
    path.write_text(text_of(kind, rows))
    assert found_alike(path).message == "time goes backwards"


@pytest.mark.parametrize("bad", ["1,2\n", "\n", '1,"2,3\n', "1,2,3,4\n"])
@pytest.mark.parametrize("row", [1, 30, 59])
def test_a_line_of_another_shape_is_found_wherever_it_lies(tmp_path, bad, row):
    lines = text_of("vidur", GOOD).splitlines(keepends=True)
    lines.insert(row, bad)
    path = tmp_path / "shape.csv"
    path.write_text("".join(lines))
    assert found_alike(path).line == row + 1


def test_times_with_and_without_an_offset_in_different_blocks(tmp_path):
    lines = text_of("azure", GOOD).splitlines(keepends=True)
    lines[50] = lines[50].replace(",150,", "Z,150,").replace(",149,", "Z,149,")
    path = tmp_path / "zones.csv"
    path.write_text("".join(lines))
    whole = read(path, WHOLE)
    assert "with and without an offset" in whole.message
    assert whole.line == 51
    assert_same(whole, read(path, 80))


def test_blank_lines_at_the_end_may_be_longer_than_a_block(tmp_path):
    path = tmp_path / "ends.csv"
    path.write_text(text_of("vidur", GOOD) + "\n  \n\t" * 200)
    assert_same(read(path, WHOLE), read(path, 42))
    path.write_text(text_of("vidur", GOOD) + "\n  \n\t" * 200 + "99,1,1\n")
    assert read(path, 42).line == 62
    assert_same(read(path, WHOLE), read(path, 42))


def test_line_ends_that_lie_across_blocks(tmp_path):
    plain, other = tmp_path / "plain" / "t.csv", tmp_path / "other" / "t.csv"
    for path in (plain, other):
        path.parent.mkdir()
    plain.write_text(text_of("vidur", GOOD))
    for end in ("\r\n", "\r"):
        other.write_bytes(text_of("vidur", GOOD).replace("\n", end).encode())
        for size in range(42, 75):
            found, expected = read(other, size), read(plain, WHOLE)
            assert found.arrival_s.tobytes() == expected.arrival_s.tobytes()
            assert found.output_tokens.tobytes() == expected.output_tokens.tobytes()


def test_the_digest_is_of_the_whole_file(tmp_path):
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(text_of("vidur", GOOD).encode()))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    assert digest in read(path, 42, window=(0.0, 5.0)).source


def test_the_clock_may_start_at_the_last_row(tmp_path):
    rows = [(100.0 + i, 10 + i, 1) for i in range(40)] + [(50.0, 7, 1)]
    path = tmp_path / "late.csv"
    path.write_text(text_of("vidur", rows))
    found = read(path, 60, sort=True, window=(50.0, 53.0))
    assert found.prompt_tokens.tolist() == [10, 11, 12]
    assert_same(read(path, WHOLE, sort=True).window(50.0, 53.0), found)


def test_rows_that_lie_too_far_apart(tmp_path):
    path = tmp_path / "far.csv"
    path.write_text(text_of("vidur", [(-8e9, 1, 1), (8e9, 1, 1)]))
    assert "spans too long a time" in read(path, WHOLE).message


class Wholly:
    """A format of somebody who knows nothing of blocks: times count back from the last row."""

    name, fields = "wholly", ("at", "in", "out")

    def names(self, text):
        return text.first_line.split(";")

    def rows(self, text):
        table = np.array([line.split(b";") for line in text.lines[1:]], dtype=np.float64)
        return Rows(table[:, 0] - table[-1, 0], table[:, 1], table[:, 2], fields=self.fields, first_line=2)


def test_a_format_that_does_not_say_that_it_is_rowwise_gets_the_whole_text(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("at;in;out\n" + "".join(f"{i};{5 + i};1\n" for i in range(50)))
    found = read(path, 42, format=Wholly(), window=(10.0, 13.0))
    assert found.prompt_tokens.tolist() == [15, 16, 17]
    assert found.arrival_s.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("window", [(1.0, 1.0), (-1.0, 2.0), (0.0, math.nan), ("0", 1)])
def test_a_window_that_is_none_is_refused_before_anything_is_read(tmp_path, window):
    with pytest.raises(InputError):
        read_trace("azure2023-conv", window=window)


# -- memory -------------------------------------------------------------------------------------------------

MEASURE = """
import pathlib, re, sys
from dsim.scenario import Point, simulate
from dsim.schema import load_scenario

def replay(path):
    changes = {"workload.trace": path, "workload.order": "trace", "workload.window_s": [100.0, 130.0]}
    changes |= {"load.requests": "all", "measure.mode": "whole-run", "cluster.kv_blocks": 1 << 20}
    # Step by step: nothing is compiled in between.
    row = simulate(load_scenario("decode-node", changes), Point("dspark", 0, rate_scale=1.0), engine="step").row
    # Not getrusage: its peak is at least what the parent had when it started this process.
    status = pathlib.Path("/proc/self/status").read_text()
    return row["n_scored"], int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])

(short, before), (requests, peak) = map(replay, sys.argv[1:])
print(int(short), int(requests), peak - before, peak)
"""


def write_long(path, rows):
    """A vidur file with 50 requests a second."""
    chance = random.Random(0)
    block = "".join(f"%d.{i:02d},{chance.randint(1, 4000)},{chance.randint(1, 500)}\n" for i in range(0, 100, 2))
    with path.open("w") as stream:
        stream.write(HEADS["vidur"])
        for second in range(rows // 50):
            stream.write(block % ((second,) * 50))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
@pytest.mark.parametrize("rows", [400_000, pytest.param(28_000_000, marks=pytest.mark.slow)])
def test_to_replay_a_window_of_a_long_file_takes_no_more_memory_than_one_of_a_short_file(tmp_path, rows):
    short, long = tmp_path / "short.csv", tmp_path / "long.csv"
    write_long(short, 150_000)  # more than one block
    write_long(long, rows)
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(short), str(long)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        # Neither window may come from an earlier run's cache.
        env=os.environ | {"DSIM_CACHE_DIR": str(tmp_path / "cache")},
    )
    *requests, more_kib, _ = map(int, ran.stdout.split())
    long.unlink()
    assert requests == [30 * 50, 30 * 50]
    # 28 million rows hold 600 MB of text, and their numbers 670 MB.
    assert more_kib < 40 * 1024
