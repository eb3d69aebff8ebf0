"""Files that are whole or not there, what is in them, and where those are kept that can be made again."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import platformdirs


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to; when the block ends the file takes the place of `path`, when it raises nothing stays."""
    path = Path(path)
    # A folder of its own, so that the file gets the usual permissions (those of mkstemp are private).
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as folder:
        part = Path(folder) / path.name
        yield part
        os.replace(part, path)


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's content, in hex. A file that looks unchanged (inode, size, time) is not read again.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    path = Path(path).resolve()
    now = path.stat()
    return _digest(path, now.st_ino, now.st_size, now.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest(path: Path, _inode: int, _size: int, _time: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def cache_dir() -> Path:
    """Folder for what can be made again: ``$DSIM_CACHE_DIR``, or the user's cache folder."""
    override = os.environ.get("DSIM_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("dsim", appauthor=False))
