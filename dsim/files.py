"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to; when the block ends the file takes the place of `path`, when it raises nothing stays."""
    path = Path(path)
    # A folder of its own, so that the file gets the usual permissions (those of mkstemp are private).
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as folder:
        part = Path(folder) / path.name
        yield part
        os.replace(part, path)
