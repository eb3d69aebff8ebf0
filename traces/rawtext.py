"""A file's text in blocks of whole lines, plain or gzip (told apart by content); refuse what is no trace at all."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from dsim.errors import InputError

#: Bytes of text that are read at a time.
BLOCK_BYTES = 1 << 21

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class RawText:
    """Lines of one file: UTF-8 bytes with ``\\n`` line ends, no BOM, no blank lines at the end.

    Parameters
    ----------
    file
        What error messages call the file.
    data
        The bytes, at least one.
    """

    file: str
    data: bytes = field(repr=False)

    @cached_property
    def lines(self) -> list[bytes]:
        """All lines; line `i` of an error message is ``lines[i - 1]``."""
        return self.data.split(b"\n")

    def line(self, number: int) -> str:
        """Line `number` (from 1) as text."""
        return self._decode(self.lines[number - 1], number)

    @property
    def first_line(self) -> str:
        """Line 1 as text (does not split the text)."""
        end = self.data.find(b"\n")
        return self._decode(self.data if end < 0 else self.data[:end], 1)

    def _decode(self, content: bytes, number: int) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text ({error.reason})", file=self.file, line=number) from error


def blocks(path: Path | Traversable, file: str, *, seen: Callable[[bytes], object] | None = None) -> Iterator[bytes]:
    """Read and unpack `path`, under the name `file`, in blocks of about `BLOCK_BYTES`.

    Parameters
    ----------
    seen
        Called with the bytes of the file as they lie on disk, piece by piece and to the last one.

    Yields
    ------
    bytes
        Whole lines as `RawText` has them, each block without its last line end. The first has two lines at least, if
        the file has.

    Raises
    ------
    InputError
        Missing or unreadable file, damaged gzip, an empty file, a Git LFS pointer, UTF-16 text.
    """
    pending, before = b"", True
    for number, piece in enumerate(_pieces(path, file, seen or (lambda _data: None))):
        data = piece if number else _without_mark(piece, file)
        pending += data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data
        # The last line with something on it waits: whether the blank ones behind it are the file's end is not known.
        end = len(pending.rstrip())
        cut = pending.rfind(b"\n", 0, end)
        if cut < 0 or (before and pending.count(b"\n", 0, cut) < 1):
            continue
        before = False
        yield pending[:cut]
        pending = pending[cut + 1 :]
    pending = pending.rstrip()
    if pending:
        yield pending
    elif before:
        raise InputError("the file is empty", file=file, expected="a header and at least one request")


def _pieces(path: Path | Traversable, file: str, seen: Callable[[bytes], object]) -> Iterator[bytes]:
    """The unpacked bytes. No piece ends between the two characters of a line end."""
    try:
        with path.open("rb") as stored:
            stream: Any = io.BufferedReader(_Watched(stored, seen), 1 << 20)
            if stream.peek(2)[:2] == _GZIP_MAGIC:
                stream = gzip.GzipFile(fileobj=stream)
            # The first piece is large enough for what a file may begin with.
            while data := stream.read(max(BLOCK_BYTES, len(_LFS_POINTER))):
                while data.endswith(b"\r") and (more := stream.read(1)):
                    data += more
                yield data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"damaged or truncated gzip file ({error})", file=file, expected="a complete gzip file"
        ) from error
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or error})", file=file) from error


class _Watched(io.RawIOBase):
    """A binary file that shows somebody what was read from it."""

    def __init__(self, stream: Any, seen: Callable[[bytes], object]) -> None:
        self._stream, self._seen = stream, seen

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._seen(data)
        buffer[: len(data)] = data
        return len(data)


def _without_mark(data: bytes, file: str) -> bytes:
    """The first bytes of a file's text, without a byte order mark."""
    if data.startswith(_LFS_POINTER):
        raise InputError(
            "this is a Git LFS pointer, not the data (the repository was checked out without LFS)",
            file=file,
            line=1,
            expected="the file itself: run `git lfs pull` where it came from",
        )
    if data.startswith(_UTF16_BOMS):
        raise InputError("this is UTF-16 text", file=file, line=1, expected="UTF-8 text")
    return data.removeprefix(_UTF8_BOM)
