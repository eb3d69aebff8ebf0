"""What a sweep knows of the cache of compiled code before it starts processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

kernels = importlib.import_module("dsim.kernel.cache")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "_cache_folder", lambda: tmp_path)
    return tmp_path


def test_the_mark_is_set_once_all_built_in_code_was_imported(monkeypatch, folder):
    monkeypatch.setattr(kernels, "_COMPILED", (("json", "decoder.py"), ("json", "never.py")))
    kernels.note_warm()
    assert not kernels.is_warm()
    monkeypatch.setattr(kernels, "_COMPILED", (("json", "decoder.py"),))
    kernels.note_warm()
    kernels.note_warm()
    assert kernels.is_warm()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("change", ["version", "machine", "stamp", "size"])
def test_the_mark_of_another_state_does_not_count(change, monkeypatch, folder, tmp_path_factory):
    source = tmp_path_factory.mktemp("sources") / "loop.py"
    source.write_text("pass\n")
    stamp = source.stat().st_mtime_ns
    monkeypatch.setattr(kernels, "_source_files", lambda: [source])
    monkeypatch.setattr(kernels, "_COMPILED", ())
    kernels.note_warm()
    assert kernels.is_warm()
    if change == "version":
        monkeypatch.setattr(kernels, "_version", lambda name: "99")
    elif change == "machine":
        monkeypatch.setattr("platform.node", lambda: "another")
    elif change == "stamp":
        os.utime(source, ns=(stamp, stamp + 1000))
    else:
        source.write_text("pass  # and more\n")
        os.utime(source, ns=(stamp, stamp))
    assert not kernels.is_warm()


def test_sources_that_are_no_files_are_not_warm(monkeypatch, folder):
    monkeypatch.setattr(kernels, "_source_files", lambda: [folder / "archive.zip" / "loop.py"])
    assert not kernels.is_warm()


def test_what_is_compiled_on_import_is_among_the_sources():
    for package, name in kernels._COMPILED:
        assert name in dict(kernels._SOURCES)[package]


def test_asking_imports_no_numba():
    code = "import sys; from dsim.kernel.cache import is_warm; is_warm(); sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
