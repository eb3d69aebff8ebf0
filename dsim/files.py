"""Files that are whole or not there, and where those are kept that can be made again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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


def cache_dir() -> Path:
    """Folder for what can be made again: ``$DSIM_CACHE_DIR``, or the user's cache folder."""
    override = os.environ.get("DSIM_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("dsim", appauthor=False))
