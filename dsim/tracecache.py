"""Traces, or windows of them, as arrays in the cache: read once, and mapped into every process of a sweep."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from importlib import resources
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from dsim.files import cache_dir, file_digest, replacing
from traces import Trace, read_trace, trace_file

#: Bytes of a file from which on its arrays are kept, and requests up to which they are.
LARGE, MOST = 1 << 16, 1 << 22
#: Columns of what is kept, an ``.npy`` of int64[3, n]; the bits of float64 where the trace has seconds.
_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
#: Behind the array: what the trace says of itself (JSON), the length of that in eight bytes, and the SHA-256 of all in
#: front of it.
_LENGTH, _CHECKSUM = 8, 32


def open_trace(
    name_or_path: str, *, window: tuple[float, float] | None = None, sort: bool = False, drop_zero: bool = False
) -> Trace:
    """`traces.read_trace` of a name or path; the second time from the cache, unless its rows are few or very many.

    What is kept goes by the file's content: a process has to look at the file (a second a gigabyte), not to read it.
    The arrays are then read-only maps of one file, whose pages all processes share.
    """
    path = trace_file(name_or_path)
    if not isinstance(path, Path) or not path.is_file() or path.stat().st_size < LARGE:
        return read_trace(name_or_path, window=window, sort=sort, drop_zero=drop_zero)
    shipped = str(path) != str(name_or_path)
    content = file_digest(path)
    question = [content, name_or_path if shipped else path.name, shipped, window, sort, drop_zero]
    key = hashlib.sha256(json.dumps([*question, _reader_digest()]).encode()).hexdigest()
    kept = cache_dir() / "traces-3" / f"{key}.npy"
    trace = _read(kept)
    if trace is not None:
        return trace
    trace = read_trace(name_or_path, window=window, sort=sort, drop_zero=drop_zero)
    # Not if the file has been changed since: what was read may be other content.
    if trace.prefix_blocks is None and len(trace) <= MOST and file_digest(path) == content:
        _write(trace, kept)
        return _read(kept) or trace  # this process, too, shares it from now on
    return trace


@cache
def _reader_digest() -> str:
    """Digest of the code that reads traces."""
    digest = hashlib.sha256()
    for item in sorted(resources.files("traces").iterdir(), key=lambda item: item.name):
        if item.name.endswith(".py"):
            digest.update(item.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Trace | None:
    """A trace that was kept; None: there is none, or it is damaged and can be made again."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END) - _CHECKSUM
            # Nothing is made of the content before it is known to be what was written.
            if end < _LENGTH or _checksum(stream, end) != stream.read():
                return None
            stream.seek(end - _LENGTH)
            length = int.from_bytes(stream.read(_LENGTH), "little")
            stream.seek(end - _LENGTH - length)
            about = json.loads(stream.read(length))
        # A plain view of the map: numpy.memmap's own indexing costs microseconds.
        return _mapped(about, np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)))
    except OSError:
        return None


def _mapped(about: dict[str, str], table: np.ndarray[Any, np.dtype[np.int64]]) -> Trace:
    """A trace whose columns are rows of a map. They were a trace's before; its own checks would copy them."""
    arrival, prompt, output = table
    values = about | {
        "arrival_s": arrival.view(np.float64),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "prefix_blocks": None,
    }
    trace = object.__new__(Trace)
    for name, value in values.items():
        object.__setattr__(trace, name, value)
    return trace


def _write(trace: Trace, path: Path) -> None:
    about = json.dumps({"name": trace.name, "kind": trace.kind, "source": trace.source}).encode()
    table = np.stack([getattr(trace, name).view(np.int64) for name in _COLUMNS])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("w+b") as stream:
            np.save(stream, table, allow_pickle=False)
            stream.write(about + len(about).to_bytes(_LENGTH, "little"))
            stream.write(_checksum(stream, stream.tell()))
    except OSError:
        return  # nowhere to keep it


def _checksum(stream: BufferedReader | BufferedRandom, end: int) -> bytes:
    """SHA-256 of a file up to a place, where it then stands."""
    digest = hashlib.sha256()
    stream.seek(0)
    while end:
        piece = stream.read(min(end, 1 << 20))
        if not piece:
            break
        digest.update(piece)
        end -= len(piece)
    return digest.digest()
