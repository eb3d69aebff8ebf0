"""Traces, or windows of them, as plain arrays in the cache: read once, opened by every process of a sweep."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import resources
from io import BufferedRandom, BufferedReader
from pathlib import Path

import numpy as np

from dsim.files import cache_dir, file_digest, replacing
from traces import Trace, read_trace, trace_file

#: Bytes of a file from which on its arrays are kept, and requests up to which they are.
LARGE, MOST = 1 << 16, 1 << 22
#: Bytes of the SHA-256 that stands before what is kept (an ``.npz``).
_SIZE = 32


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
    content = file_digest(path)
    question = [content, name_or_path if shipped else path.name, shipped, window, sort, drop_zero]
    key = hashlib.sha256(json.dumps([*question, _reader_digest()]).encode()).hexdigest()
    kept = cache_dir() / "traces-2" / key
    trace = _read(kept)
    if trace is not None:
        return trace
    trace = read_trace(name_or_path, window=window, sort=sort, drop_zero=drop_zero)
    # Not if the file has been changed since: what was read may be other content.
    if trace.prefix_blocks is None and len(trace) <= MOST and file_digest(path) == content:
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


def _read(path: Path) -> Trace | None:
    """A trace that was kept; None: there is none, or it is damaged and can be made again."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            # Nothing is made of the content before it is known to be what was written.
            if stream.read(_SIZE) != _checksum(stream):
                return None
            stream.seek(_SIZE)
            with np.load(stream, allow_pickle=False) as kept:
                about = json.loads(kept["about"].tobytes())
                return Trace(
                    name=about["name"],
                    kind=about["kind"],
                    source=about["source"],
                    arrival_s=kept["arrival_s"],
                    prompt_tokens=kept["prompt_tokens"],
                    output_tokens=kept["output_tokens"],
                )
    except OSError:
        return None


def _write(trace: Trace, path: Path) -> None:
    about = json.dumps({"name": trace.name, "kind": trace.kind, "source": trace.source})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("w+b") as stream:
            stream.write(bytes(_SIZE))
            np.savez(
                stream,
                about=np.frombuffer(about.encode(), dtype=np.uint8),
                arrival_s=trace.arrival_s,
                prompt_tokens=trace.prompt_tokens,
                output_tokens=trace.output_tokens,
            )
            stream.seek(_SIZE)
            checksum = _checksum(stream)
            stream.seek(0)
            stream.write(checksum)
    except OSError:
        return  # nowhere to keep it


def _checksum(stream: BufferedReader | BufferedRandom) -> bytes:
    """SHA-256 of what is left in a file."""
    return hashlib.file_digest(stream, "sha256").digest()
