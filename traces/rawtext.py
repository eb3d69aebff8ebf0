"""Get a file's text into memory, plain or gzip (told apart by content); refuse what is no trace at all."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path

from dsim.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class RawText:
    """The text of one file: UTF-8 bytes with ``\\n`` line ends, no BOM, no blank lines at the end.

    Parameters
    ----------
    file
        What error messages call the file.
    data
        The bytes, at least one.
    digest
        First 12 hex digits of the SHA-256 of the file as it lies on disk.
    """

    file: str
    data: bytes = field(repr=False)
    digest: str

    @cached_property
    def lines(self) -> list[bytes]:
        """All lines; line `i` of an error message is ``lines[i - 1]``."""
        return self.data.split(b"\n")

    def line(self, number: int) -> str:
        """Line `number` (from 1) as text."""
        return self._decode(self.lines[number - 1], number)

    @property
    def first_line(self) -> str:
        """Line 1 as text (does not split the file)."""
        end = self.data.find(b"\n")
        return self._decode(self.data if end < 0 else self.data[:end], 1)

    def _decode(self, content: bytes, number: int) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text ({error.reason})", file=self.file, line=number) from error


def load(path: Path | Traversable, file: str) -> RawText:
    """Read and unpack `path`, under the name `file`.

    Raises
    ------
    InputError
        Missing or unreadable file, damaged gzip, an empty file, a Git LFS pointer, UTF-16 text.
    """
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or error})", file=file) from error
    data = stored
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(
                f"damaged or truncated gzip file ({error})", file=file, expected="a complete gzip file"
            ) from error
    if data.startswith(_LFS_POINTER):
        raise InputError(
            "this is a Git LFS pointer, not the data (the repository was checked out without LFS)",
            file=file,
            line=1,
            expected="the file itself: run `git lfs pull` where it came from",
        )
    if data.startswith(_UTF16_BOMS):
        raise InputError("this is UTF-16 text", file=file, line=1, expected="UTF-8 text")
    data = data.removeprefix(_UTF8_BOM)
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    data = data.rstrip()
    if not data:
        raise InputError("the file is empty", file=file, expected="a header and at least one request")
    return RawText(file=file, data=data, digest=hashlib.sha256(stored).hexdigest()[:12])
