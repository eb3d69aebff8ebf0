"""What a sweep knows of the cache of compiled code before it starts processes."""

from __future__ import annotations

import importlib
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


@pytest.mark.parametrize("change", ["version", "machine", "stamp"])
def test_the_mark_of_another_state_does_not_count(change, monkeypatch, folder):
    monkeypatch.setattr(kernels, "_COMPILED", ())
    kernels.note_warm()
    assert kernels.is_warm()
    if change == "version":
        monkeypatch.setattr(kernels, "_version", lambda name: "99")
    elif change == "machine":
        monkeypatch.setattr("platform.node", lambda: "another")
    else:
        monkeypatch.setattr(kernels, "_source_files", lambda: [folder / "loop.py"])
        (folder / "loop.py").write_text("pass\n")
    assert not kernels.is_warm()


def test_the_built_in_code_is_what_numba_compiles_on_import():
    for package, name in kernels._COMPILED:
        assert name in dict(kernels._SOURCES)[package]
        assert importlib.util.find_spec(f"{package}.{name.removesuffix('.py')}") is not None


def test_asking_imports_no_numba():
    code = "import sys; from dsim.kernel.cache import is_warm; is_warm(); sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
