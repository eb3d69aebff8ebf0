"""Traces in the cache: the same arrays, by content, and never trusted when damaged."""

from __future__ import annotations

import os

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
    return tmp_path / "cache" / "traces-2"


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


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"half"])
def test_a_damaged_copy_is_made_again(write, monkeypatch, cache, damage):
    path = write()
    first = open_trace(str(path))
    (copy,) = cache.iterdir()
    good = copy.read_bytes()
    copy.write_bytes(good[: len(good) // 2] if damage == b"half" else damage)
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
    copy.write_bytes(data)
    assert_same(open_trace(str(path)), first)


def test_any_flipped_bit_means_that_it_is_made_again(write, monkeypatch, cache):
    """In the heads of the archive and of its arrays, too, where a bit may change their lengths."""
    path = write()
    first = open_trace(str(path))
    (copy,) = cache.iterdir()
    good = copy.read_bytes()
    calls = reads(monkeypatch)
    heads = [at for at in range(len(good)) if good[at : at + 2] in (b"PK", b"\x93N")]
    places = [0, 31, len(good) - 1, *(at + more for at in heads for more in range(0, 60, 7) if at + more < len(good))]
    for n, at in enumerate(places):
        damaged = bytearray(good)
        damaged[at] ^= 1 << n % 8
        copy.write_bytes(damaged)
        assert_same(open_trace(str(path)), first)
        assert len(calls) == n + 1
        assert copy.read_bytes() == good
    assert len(places) > 50


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
