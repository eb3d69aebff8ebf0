"""Traces in the cache: the same arrays, by content, and never trusted when damaged."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from dsim import tracecache
from dsim.errors import InputError
from dsim.scenario import load_scenario, trace_of
from dsim.tracecache import open_trace
from traces import read_trace

HEAD = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces-3"


@pytest.fixture
def write(tmp_path):
    def write_file(rows=6000, tokens=100, name="t.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEAD + "".join(f"{i / 4:.2f},{tokens + i},{1 + i % 50}\n" for i in range(rows)))
        return path

    return write_file


def reads(monkeypatch):
    calls = []
    monkeypatch.setattr(tracecache, "read_trace", lambda name, **o: calls.append(name) or read_trace(name, **o))
    return calls


def assert_same(a, b):
    assert (a.name, a.kind, a.source) == (b.name, b.kind, b.source)
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes()


@pytest.mark.parametrize("window", [None, (10.0, 20.0)])
def test_the_second_time_it_comes_from_the_cache(write, monkeypatch, cache, window):
    path = write()
    assert path.stat().st_size > 1 << 16
    calls = reads(monkeypatch)
    first, second = open_trace(str(path), window=window), open_trace(str(path), window=window)
    assert len(calls) == 1
    assert len(list(cache.iterdir())) == 1
    for found in (first, second):
        assert_same(found, read_trace(path, window=window))


def test_shipped_traces_keep_their_names_and_sources(monkeypatch):
    calls = reads(monkeypatch)
    for _ in range(2):
        assert_same(open_trace("azure2023-code"), read_trace("azure2023-code"))
    assert calls == ["azure2023-code"]


def test_content_window_and_repairs_count_and_the_folder_does_not(write, monkeypatch):
    calls = reads(monkeypatch)
    path, elsewhere = write(), write(name="other/t.csv")
    open_trace(str(path))
    open_trace(str(elsewhere))
    assert len(calls) == 1
    open_trace(str(path), window=(0.0, 9.0))
    open_trace(str(path), sort=True)
    open_trace(str(path), drop_zero=True)
    open_trace(str(write(tokens=200)))
    assert len(calls) == 5
    named = write(name="u.csv", tokens=200)
    assert open_trace(str(named)).name == "u"


def put(copy, data):
    """Another file in its place: what was opened before stays as it was."""
    copy.unlink()
    copy.write_bytes(data)


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"half", b"longer"])
def test_a_damaged_copy_is_made_again(write, monkeypatch, cache, damage):
    path = write()
    first = open_trace(str(path))
    (copy,) = cache.iterdir()
    good = copy.read_bytes()
    put(copy, {b"half": good[: len(good) // 2], b"longer": good + b"x"}.get(damage, damage))
    calls = reads(monkeypatch)
    assert_same(open_trace(str(path)), first)
    assert len(calls) == 1
    assert_same(open_trace(str(path)), first)
    assert len(calls) == 1


def test_a_flipped_bit_is_noticed(write, monkeypatch, cache):
    path = write()
    first = open_trace(str(path))
    (copy,) = cache.iterdir()
    data = bytearray(copy.read_bytes())
    at = data.find(np.array([150, 151], dtype=np.int64).tobytes())
    assert at > 0
    data[at] ^= 1
    put(copy, data)
    assert_same(open_trace(str(path)), first)


def test_any_flipped_bit_means_that_it_is_made_again(write, monkeypatch, cache):
    """In the array's head and behind the array, too, where a bit may change a length."""
    path = write()
    first = open_trace(str(path))
    (copy,) = cache.iterdir()
    good = copy.read_bytes()
    calls = reads(monkeypatch)
    behind = good.find(b'{"name"')
    assert 0 < behind < len(good) - 41
    places = [*range(0, 130, 7), 3000, behind - 1, *range(behind, len(good), 7), len(good) - 33, len(good) - 1]
    for n, at in enumerate(places):
        damaged = bytearray(good)
        damaged[at] ^= 1 << n % 8
        put(copy, damaged)
        assert_same(open_trace(str(path)), first)
        assert len(calls) == n + 1
        assert copy.read_bytes() == good
    assert len(places) > 40


def columns(trace):
    return trace.arrival_s, trace.prompt_tokens, trace.output_tokens


def test_all_processes_share_the_pages_of_one_file(write, cache):
    path = write()
    for found in (open_trace(str(path)), open_trace(str(path))):
        for column in columns(found):
            base = column
            while isinstance(base, np.ndarray):
                held, base = base, base.base
            assert isinstance(base, mmap.mmap), type(held)
            assert type(column) is np.ndarray
            with pytest.raises(ValueError, match="read-only"):
                column[0] = 1
    # Its pages stay where the file goes.
    (copy,) = cache.iterdir()
    copy.unlink()
    assert_same(found, read_trace(path))
    assert_same(found.window(10.0, 20.0), read_trace(path).window(10.0, 20.0))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's account of memory")
def test_a_trace_takes_no_memory_of_the_process_that_opens_it(tmp_path):
    path, rows = tmp_path / "long.csv", 400_000
    path.write_text(HEAD + "".join(f"{i / 4:.2f},{100 + i % 999},{1 + i % 50}\n" for i in range(rows)))
    code = (
        "import pathlib, re, sys\n"
        "from dsim.tracecache import open_trace\n"
        "def own():\n"
        "    return int(re.search(r'RssAnon:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())[1])\n"
        "open_trace('azure2023-code')\n"
        "before = own()\n"
        "trace = open_trace(sys.argv[1])\n"
        "print(len(trace), trace.output_tokens.sum(), own() - before)\n"
    )
    run = [sys.executable, "-c", code, str(path)]
    subprocess.run(run, check=True, capture_output=True)
    length, tokens, more_kib = map(int, subprocess.run(run, check=True, capture_output=True, text=True).stdout.split())
    assert (length, tokens) == (rows, rows // 50 * sum(range(1, 51)))
    # As copies the three columns would be 9400 KiB.
    assert more_kib < 3000


def test_what_other_versions_have_kept_is_left_alone(write, monkeypatch, cache):
    path = write()
    open_trace(str(path))
    old = cache.rename(cache.with_name("traces-2"))
    before = {item.name: item.read_bytes() for item in old.iterdir()}
    calls = reads(monkeypatch)
    open_trace(str(path))
    assert len(calls) == 1
    assert {item.name: item.read_bytes() for item in old.iterdir()} == before


def test_a_file_that_is_changed_while_it_is_read_is_not_kept(write, monkeypatch, cache):
    path = write()

    def edited_first(name, **options):
        write(tokens=200)
        return read_trace(name, **options)

    monkeypatch.setattr(tracecache, "read_trace", edited_first)
    open_trace(str(path))
    assert not cache.exists()
    monkeypatch.setattr(tracecache, "read_trace", read_trace)
    assert open_trace(str(write())).prompt_tokens[0] == 100


def test_a_pipe_in_the_cache_is_not_waited_for(write, cache):
    path = write()
    first = open_trace(str(path))
    (copy,) = cache.iterdir()
    copy.unlink()
    os.mkfifo(copy)
    assert_same(open_trace(str(path)), first)


def test_small_files_prefix_blocks_and_very_long_traces_are_not_kept(write, monkeypatch, cache):
    open_trace(str(write(rows=100)))
    open_trace("mooncake-conversation")
    monkeypatch.setattr(tracecache, "MOST", 5999)
    open_trace(str(write()))
    assert not cache.exists()


def test_without_a_cache_traces_are_read(write, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path / "file"))
    assert_same(open_trace(str(write())), read_trace(write()))


def test_errors_are_those_of_the_reader(tmp_path, write):
    with pytest.raises(InputError, match="no such file"):
        open_trace(str(tmp_path / "nowhere.csv"))
    path = write()
    path.write_text(path.read_text() + "1,1,1\n")
    with pytest.raises(InputError, match="time goes backwards"):
        open_trace(str(path))


def test_a_scenario_sees_that_its_files_have_changed(write):
    path = write(rows=50)
    scenario = load_scenario("decode-node", {"workload.trace": str(path)})
    assert len(trace_of(scenario)) == 50
    write(rows=60)
    assert len(trace_of(scenario)) == 60
