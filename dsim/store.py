"""A folder of results: one file a run, called by what the run depends on, whole or not there.

A file is JSON: the run's row of the table, and what a script made of its records. It holds its own name and a
checksum, so that one which is damaged, or lies there under another's name, is noticed and made again. Several
processes may use one folder at a time: the same name means the same content, whoever writes it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dsim.errors import InputError
from dsim.files import cache_dir, replacing
from dsim.strictjson import load_json, need_object

FORMAT = "dsim-run"
VERSION = 1
_MARK = "dsim-store.json"
_MARK_TEXT = '{"format": "dsim-store", "version": 1}\n'
#: Kinds of arrays that can be kept: fixed sizes, little-endian, no objects.
_DTYPES = ("<f8", "<f4", "<i8", "<i4", "|u1", "|b1")
#: Seconds after which what somebody began to write and left is cleared away.
_STALE_S = 86_400.0

#: A row of the table, and what `extract` made of the run (None without one).
Outcome = tuple[dict[str, Any], Any]


def default_store() -> str:
    """Where scripts keep results unless they are told otherwise: ``$DSIM_STORE``, or a folder of the cache."""
    return os.environ.get("DSIM_STORE") or str(cache_dir() / "runs-1")


class Store:
    """Results in a folder.

    Parameters
    ----------
    folder
        Made if it is not there.

    Raises
    ------
    InputError
        A file, a folder with other things in it, one of another version, or one that cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder) / "runs")
    ...     store.put("0" * 64, ({"arm": "none", "steps": 12.0}, None))
    ...     store.get("0" * 64), store.get("1" * 64)
    (({'arm': 'none', 'steps': 12.0}, None), None)
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claim()
            self._clear()
        except FileExistsError:
            raise InputError("is a file", file=folder, field="store", expected="a folder for results") from None
        except OSError as error:
            raise InputError(
                f"cannot be written ({error.strerror or error})", file=folder, field="store", expected="a folder"
            ) from None

    def _claim(self) -> None:
        mark = self.folder / _MARK
        if mark.is_file():
            if mark.read_bytes() != _MARK_TEXT.encode():
                raise InputError("is a store of another version of dsim", file=self.folder, field="store")
            if not os.access(self.folder, os.W_OK):
                raise PermissionError("not writable")
            return
        if any(not item.name.startswith(".partial-") and item.name != _MARK for item in self.folder.iterdir()):
            raise InputError(
                "holds other things and no store", file=self.folder, field="store", expected="a new or empty folder"
            )
        with replacing(mark) as part:
            part.write_text(_MARK_TEXT, encoding="utf-8")

    def _clear(self) -> None:
        for item in self.folder.glob(".partial-*"):
            try:
                if time.time() - item.stat().st_mtime > _STALE_S:
                    shutil.rmtree(item, ignore_errors=True)
            except OSError:  # somebody else has just finished with it
                continue

    def path(self, key: str) -> Path:
        """The file of a run."""
        return self.folder / f"{key}.json"

    def get(self, key: str) -> Outcome | None:
        """What was kept under a key; None: nothing.

        Raises
        ------
        InputError
            A file that is damaged, or that belongs to something else; what is no file.
        """
        path = self.path(key)
        try:
            # One look: between two, another process may put the file there.
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(mode):  # a pipe would be waited for
            raise InputError("is no file", file=path)
        kept = need_object(load_json(path, "a result"), path)
        if set(kept) != {"format", "version", "key", "row", "extract", "sha256"}:
            raise InputError("is no result", file=path, value=", ".join(kept))
        for name, expected in (("format", FORMAT), ("version", VERSION), ("key", key)):
            if kept[name] != expected:
                raise InputError(file=path, field=name, value=kept[name], expected=repr(expected))
        if kept["sha256"] != _checksum(kept["row"], kept["extract"]):
            raise InputError("is damaged: the checksum is that of other content", file=path)
        row = need_object(kept["row"], path)
        for name, value in row.items():
            if not (value is None or isinstance(value, str | int | float)):
                raise InputError(file=path, field=name, value=value, expected="a number, a text or nothing")
        return row, value_of(kept["extract"], path)

    def put(self, key: str, outcome: Outcome) -> None:
        """Keep a result, in place of what is there.

        Raises
        ------
        InputError
            A value that has no plain form (`plain`).
        OSError
            The file cannot be written.
        """
        row, extract = {name: plain_number(value) for name, value in outcome[0].items()}, plain(outcome[1])
        content = {"format": FORMAT, "version": VERSION, "key": key, "row": row, "extract": extract}
        text = json.dumps(content | {"sha256": _checksum(row, extract)}, separators=(",", ":"))
        with replacing(self.path(key)) as part:
            part.write_text(text + "\n", encoding="utf-8")


def _checksum(row: Any, extract: Any) -> str:
    return hashlib.sha256(json.dumps([row, extract], separators=(",", ":")).encode()).hexdigest()


def plain_number(value: Any) -> Any:
    """A value of a row as Python's own type: NumPy's numbers would make columns of other kinds."""
    return value.item() if isinstance(value, np.generic) else value


def plain(value: Any) -> Any:
    """What JSON can hold of numbers, texts, arrays, and lists, tuples and dicts of them; `value_of` is the way back.

    Raises
    ------
    InputError
        Something else.

    Examples
    --------
    >>> plain((1, np.array([0.5])))
    {'tuple': [1, {'array': ['<f8', [1], 'AAAAAAAA4D8=']}]}
    """
    value = plain_number(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: plain(item) for key, item in value.items()}}
    if isinstance(value, np.ndarray) and value.dtype.str in _DTYPES:
        packed = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [value.dtype.str, list(value.shape), packed]}
    raise InputError(
        "cannot be kept in a store",
        field="extract",
        value=f"{type(value).__name__} {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__,
        expected=f"numbers, texts, arrays ({', '.join(_DTYPES)}), and lists, tuples and dicts of them",
    )


def value_of(node: Any, file: str | Path | None = None) -> Any:
    """The value that `plain` made `node` of.

    Raises
    ------
    InputError
        It made no such thing.
    """
    if isinstance(node, list):
        return [value_of(item, file) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        (kind, inner) = next(iter(node.items()))
        if kind == "tuple" and isinstance(inner, list):
            return tuple(value_of(item, file) for item in inner)
        if kind == "dict" and isinstance(inner, dict):
            return {key: value_of(item, file) for key, item in inner.items()}
        if kind == "array" and isinstance(inner, list) and len(inner) == 3:
            return _array(inner[0], inner[1], inner[2], file)
    raise InputError(file=file, field="extract", value=", ".join(node), expected="one of tuple, dict, array")


def _array(dtype: Any, shape: Any, packed: Any, file: str | Path | None) -> Any:
    sound = dtype in _DTYPES and isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    try:
        data = base64.b64decode(packed, validate=True) if sound else b""
    except (TypeError, ValueError):
        sound, data = False, b""
    if not sound or len(data) != np.dtype(dtype).itemsize * math.prod(shape):
        raise InputError("holds no such array", file=file, field="extract", value=f"{dtype} {shape}")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
