"""Traces, or windows of them, as plain arrays in the cache: read once, opened by every process of a sweep."""

from __future__ import annotations

import hashlib
import json
import zipfile
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from dsim.files import cache_dir, file_digest, replacing
from traces import Trace, read_trace, trace_file

#: Bytes of a file from which on its arrays are kept, and requests up to which they are.
LARGE, MOST = 1 << 16, 1 << 22


def open_trace(
    name_or_path: str, *, window: tuple[float, float] | None = None, sort: bool = False, drop_zero: bool = False
) -> Trace:
    """`traces.read_trace` of a name or path; the second time from the cache, unless its rows are few or very many.

    What is kept goes by the file's content: a process has to look at the file (a second a gigabyte), not to read it.
    """
    path = trace_file(name_or_path)
    if not isinstance(path, Path) or not path.is_file() or path.stat().st_size < LARGE:
        return read_trace(name_or_path, window=window, sort=sort, drop_zero=drop_zero)
    shipped = str(path) != str(name_or_path)
    question = [file_digest(path), name_or_path if shipped else path.name, shipped, window, sort, drop_zero]
    key = hashlib.sha256(json.dumps([*question, _reader_digest()]).encode()).hexdigest()
    kept = cache_dir() / "traces-1" / f"{key}.npz"
    try:
        return _read(kept)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        pass  # not there, or damaged (InputError is a ValueError): it can be made again
    trace = read_trace(name_or_path, window=window, sort=sort, drop_zero=drop_zero)
    if trace.prefix_blocks is None and len(trace) <= MOST:
        _write(trace, kept)
    return trace


@cache
def _reader_digest() -> str:
    """Digest of the code that reads traces."""
    digest = hashlib.sha256()
    for item in sorted(resources.files("traces").iterdir(), key=lambda item: item.name):
        if item.name.endswith(".py"):
            digest.update(item.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Trace:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as kept:
        about = json.loads(kept["about"].tobytes())
        return Trace(
            name=about["name"],
            kind=about["kind"],
            source=about["source"],
            arrival_s=kept["arrival_s"],
            prompt_tokens=kept["prompt_tokens"],
            output_tokens=kept["output_tokens"],
        )


def _write(trace: Trace, path: Path) -> None:
    about = json.dumps({"name": trace.name, "kind": trace.kind, "source": trace.source})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("wb") as stream:
            np.savez(
                stream,
                about=np.frombuffer(about.encode(), dtype=np.uint8),
                arrival_s=trace.arrival_s,
                prompt_tokens=trace.prompt_tokens,
                output_tokens=trace.output_tokens,
            )
    except OSError:
        return  # nowhere to keep it
