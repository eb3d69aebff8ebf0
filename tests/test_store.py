"""Results in files: what can be kept comes back as it was, and what lies there by mistake is refused."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dsim.errors import InputError
from dsim.store import Store, default_store, plain, value_of

KEY, OTHER = "0" * 64, "1" * 64
ROW = {"arm": "a", "steps": 12.0, "nothing": None, "seed": 3, "paired": True, "third": 1 / 3, "nan": math.nan}

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from([-0.0, math.inf, 5e-324])
)
ARRAYS = st.sampled_from(["<f8", "<f4", "<i8", "<i4", "|u1", "|b1"]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0))
)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


def same(a, b):
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and repr(a) == repr(b)


@given(VALUES)
def test_what_is_plain_comes_back_as_it_was(value):
    assert same(value, value_of(json.loads(json.dumps(plain(value)))))


def test_numpy_numbers_become_pythons_own():
    assert same(plain([np.float64(0.5), np.int32(3), np.bool_(True)]), [0.5, 3, True])


def test_a_result_is_one_file_and_comes_back(tmp_path):
    store = Store(tmp_path / "a" / "b")
    assert store.get(KEY) is None
    extract = ({"time_s": np.array([0.5, 1.0])}, 3)
    store.put(KEY, (ROW | {"steps": np.float64(12.0)}, extract))
    row, found = Store(tmp_path / "a" / "b").get(KEY)
    assert same(row, ROW)
    assert same(found, extract)
    assert store.get(OTHER) is None
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [f"{KEY}.json", "dsim-store.json"]


def test_equal_results_are_equal_files(tmp_path):
    store = Store(tmp_path)
    store.put(KEY, (ROW, None))
    first = store.path(KEY).read_bytes()
    store.put(KEY, (dict(ROW), None))
    assert store.path(KEY).read_bytes() == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: kept | {"key": OTHER}, "field 'key': got '1111"),
        (lambda kept: kept | {"version": 2}, "field 'version': got 2, expected 1"),
        (lambda kept: kept | {"format": "other"}, "field 'format': got 'other'"),
        (lambda kept: kept | {"more": 1}, "is no result"),
        (lambda kept: kept | {"row": kept["row"] | {"steps": 13.0}}, "is damaged: the checksum"),
        (lambda kept: kept | {"extract": 1}, "is damaged: the checksum"),
        (lambda kept: [kept], "expected a JSON object"),
    ],
)
def test_what_is_not_the_result_is_refused(tmp_path, change, message):
    store = Store(tmp_path)
    store.put(KEY, (ROW, None))
    store.path(KEY).write_text(json.dumps(change(json.loads(store.path(KEY).read_text()))))
    with pytest.raises(InputError, match=message) as caught:
        store.get(KEY)
    assert caught.value.file == str(store.path(KEY))


def test_a_pipe_at_a_results_place_is_refused(tmp_path):
    store = Store(tmp_path)
    os.mkfifo(store.path(KEY))
    with pytest.raises(InputError, match="is no file") as caught:
        store.get(KEY)
    assert caught.value.file == str(store.path(KEY))


@pytest.mark.parametrize(
    "node",
    [
        {"array": ["|O", [1], "AAAA"]},
        {"array": ["<f8", [2], "AAAAAAAA4D8="]},
        {"array": ["<f8", [-1], "AAAAAAAA4D8="]},
        {"array": ["<f8", [1], "AAAAAAAA4D8"]},
        {"array": ["<f8", [1], 5]},
        {"array": ["<f8", 1]},
        {"array": [["<f8"], [1], "AAAAAAAA4D8="]},
        {"pickle": "gASVAAAA"},
        {"tuple": [], "dict": {}},
        {"tuple": {}},
        {},
    ],
)
def test_what_plain_never_made_is_refused(node):
    with pytest.raises(InputError, match="field 'extract'"):
        value_of(node, "f.json")


@pytest.mark.parametrize("value", [object(), {1: 2}, np.array([None]), np.array(["a"]), {"a": {3}}, 1j])
def test_what_cannot_be_kept_is_refused(value):
    with pytest.raises(InputError, match="cannot be kept in a store"):
        plain(value)


def test_a_folder_that_is_no_store_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        Store(tmp_path / "file")
    with pytest.raises(InputError, match="holds other things and no store"):
        Store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "dsim-store.json").write_text('{"format": "dsim-store", "version": 2}\n')
    with pytest.raises(InputError, match="another version"):
        Store(newer)
    with pytest.raises(InputError, match="cannot be written"):
        Store("/proc/nothing/here")


def test_what_a_killed_process_left_is_cleared_away_after_a_day(tmp_path):
    store = Store(tmp_path)
    for name in (".partial-old", ".partial-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{KEY}.json").write_text("half")
    long_ago = time.time() - 90_000
    os.utime(tmp_path / ".partial-old", (long_ago, long_ago))
    assert Store(tmp_path).get(KEY) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-new", "dsim-store.json"]
    assert store.get(KEY) is None


def test_several_writers_of_one_store(tmp_path):
    """Whoever reads while others write finds nothing or all of it."""
    problems, start = [], threading.Barrier(4)

    def work():
        start.wait()
        store = Store(tmp_path / "runs")
        for i in range(30):
            key = f"{i % 3:064d}"
            try:
                found = store.get(key)
                if found is not None and found[0] != {"i": i % 3}:
                    problems.append(found)
                store.put(key, ({"i": i % 3}, None))
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_a_result_that_another_process_puts_there_at_the_moment_of_looking(tmp_path, monkeypatch):
    store, key, real, looked = Store(tmp_path / "runs"), "0" * 64, Path.stat, []

    def stat(self, **options):
        if self == store.path(key) and not looked:
            looked.append(self)
            Store(tmp_path / "runs").put(key, ({"i": 1}, None))
            raise FileNotFoundError(errno.ENOENT, "not yet", self)
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert store.get(key) is None
    assert looked
    assert store.get(key) == ({"i": 1}, None)


def test_where_scripts_keep_results(tmp_path, monkeypatch):
    monkeypatch.delenv("DSIM_STORE")
    monkeypatch.setenv("DSIM_CACHE_DIR", str(tmp_path))
    assert default_store() == str(tmp_path / "runs-1")
    monkeypatch.setenv("DSIM_STORE", "none")
    assert default_store() == "none"
