"""Read a trace by name or path; the format is found by the first line, never by the file's name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from dsim.errors import InputError
from traces.azure import AZURE
from traces.base import Trace
from traces.burstgpt import BURSTGPT
from traces.mooncake import MOONCAKE
from traces.rawtext import RawText, blocks
from traces.rows import Part, TraceFormat, to_trace
from traces.vidur import VIDUR

#: Formats in the order in which they are tried.
FORMATS: tuple[TraceFormat, ...] = (AZURE, VIDUR, BURSTGPT, MOONCAKE)

_SUFFIXES = (".gz", ".csv", ".jsonl", ".json", ".txt")


class _Shipped(NamedTuple):
    file: str
    source: str


_AZURE_2023 = (
    "Azure/AzurePublicDataset @ b469a11, data/AzureLLMInferenceTrace_{}.csv (CC-BY-4.0; Patel et al., ISCA 2024)"
)

#: `traces/data/PROVENANCE.md` has the whole story.
_SHIPPED = {
    "azure2023-code": _Shipped("azure2023_code.csv.gz", _AZURE_2023.format("code")),
    "azure2023-conv": _Shipped("azure2023_conv.csv.gz", _AZURE_2023.format("conv")),
    "mooncake-conversation": _Shipped(
        "mooncake_conversation_head2007.jsonl.gz",
        "kvcache-ai/Mooncake @ 3b5a594, FAST25-release/traces/conversation_trace.jsonl, "
        "first 2,007 of 12,031 rows (Apache-2.0; Qin et al., FAST 2025)",
    ),
}


def shipped_traces() -> tuple[str, ...]:
    """Names of the traces that come with the package."""
    return tuple(_SHIPPED)


def trace_file(name_or_path: str | Path) -> Path | Traversable:
    """The file of a trace: that of a shipped one by its name, any other by its path, whether it is there or not."""
    if isinstance(name_or_path, str) and name_or_path in _SHIPPED:
        return resources.files("traces") / "data" / _SHIPPED[name_or_path].file
    return Path(name_or_path)


def read_trace(
    name_or_path: str | Path,
    *,
    format: str | TraceFormat | None = None,
    sort: bool = False,
    drop_zero: bool = False,
    window: tuple[float, float] | None = None,
) -> Trace:
    """Read a shipped trace by name, or a file (plain or gzip).

    Parameters
    ----------
    name_or_path
        A name from `shipped_traces`, or a path. A shipped name is that trace whatever files there are: a file of that
        name is ``./name``, here as in a scenario.
    format
        Name of a built-in format or an object like `traces.rows.TraceFormat`. None: found by the first line.
    sort
        Repair rows that go back in time by a stable sort. Without it they are an error.
    drop_zero
        Leave out rows with a length of 0 (failed requests in BurstGPT). Without it they are an error.
    window
        Start and end, seconds: the same as ``read_trace(...).window(*window)``, in the memory that the window needs
        whatever the length of the file. All rows are checked.

    Returns
    -------
    Trace
        Its ``source`` names the file, the format and every repair that changed something.

    Raises
    ------
    InputError
        For anything that is wrong with the file or a value in it: file, line, field, value, expected.

    Examples
    --------
    >>> trace = read_trace("azure2023-conv")
    >>> len(trace), int(trace.prompt_tokens[0]), int(trace.output_tokens[0])
    (19366, 374, 44)
    """
    path: Path | Traversable
    if isinstance(name_or_path, str) and name_or_path in _SHIPPED:
        name, shipped = name_or_path, _SHIPPED[name_or_path]
        path, file = resources.files("traces") / "data" / shipped.file, f"traces/data/{shipped.file}"
    elif not isinstance(name_or_path, (str, Path)):
        raise InputError(field="trace", value=repr(name_or_path), expected="a name or a path")
    else:
        path, shipped = Path(name_or_path), None
        if not path.exists():
            raise InputError(
                "no such file",
                file=path,
                expected=f"a path or the name of a shipped trace: {', '.join(_SHIPPED)}",
            )
        name, file = path.name, str(path)
        while Path(name).suffix in _SUFFIXES:
            name = Path(name).stem
    digest = hashlib.sha256()
    stream = blocks(path, file, seen=digest.update)
    first = next(stream)
    chosen = _choose(RawText(file, first), format)
    unread = [chain([first], stream)]

    def parts() -> Iterator[Part]:
        return _parts(unread.pop() if unread else blocks(path, file), chosen, file)

    def source() -> str:
        if shipped is not None:
            return shipped.source
        return f"{path.name} ({chosen.name}, sha256 {digest.hexdigest()[:12]})"

    return to_trace(parts, file=file, name=name, source=source, sort=sort, drop_zero=drop_zero, window=window)


def _parts(stream: Iterable[bytes], format: TraceFormat, file: str) -> Iterator[Part]:
    """The rows of a file, block by block."""
    if not getattr(format, "rowwise", False):
        stream = [b"\n".join(stream)]
    # The lines up to the first row stand before every block: what the header and the first row say holds for all.
    head, repeated, line = b"", 0, 1
    for data in stream:
        try:
            rows = format.rows(RawText(file, head + data))
        except InputError as error:
            if error.line is None or error.line <= repeated:
                raise
            where = error.line - repeated - 1 + line
            raise InputError(
                error.message, file=file, line=where, field=error.field, value=error.value, expected=error.expected
            ) from error
        yield Part(rows, skip=1, line=line) if head else Part(rows, skip=0, line=rows.first_line)
        line += data.count(b"\n") + 1
        if not head:
            repeated = rows.first_line
            head = b"\n".join([*data.split(b"\n", repeated)[:repeated], b""])


def _choose(text: RawText, format: str | TraceFormat | None) -> TraceFormat:
    """The format asked for, or the one whose fields the first line holds. All its fields must be there."""
    if format is None:
        candidates = FORMATS
    elif isinstance(format, str):
        candidates = tuple(known for known in FORMATS if known.name == format)
        if not candidates:
            raise InputError(
                field="format", value=format, expected=f"one of {', '.join(known.name for known in FORMATS)}"
            )
    else:
        candidates = (format,)
    nearest, most = None, 0
    for candidate in candidates:
        names = candidate.names(text)
        held = sum(field in names for field in candidate.fields)
        if held == len(candidate.fields):
            return candidate
        if held > most:
            nearest, most = candidate, held
    if nearest is None:
        raise InputError(
            "this header belongs to no known trace format"
            if format is None
            else f"this header is not that of the format '{candidates[0].name}'",
            file=text.file,
            line=1,
            value=text.first_line[:120],
            expected=" or ".join(f"{known.name} ({', '.join(known.fields)})" for known in candidates),
        )
    names = nearest.names(text)
    missing = next(field for field in nearest.fields if field not in names)
    raise InputError(
        f"column '{missing}' is missing",
        file=text.file,
        line=1,
        field=missing,
        value=", ".join(names),
        expected=f"the columns of the format '{nearest.name}': {', '.join(nearest.fields)}",
    )
