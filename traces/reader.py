"""Read a trace by name or path; the format is found by the first line, never by the file's name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import NamedTuple

from dsim.errors import InputError
from traces.azure import AZURE
from traces.base import Trace
from traces.burstgpt import BURSTGPT
from traces.mooncake import MOONCAKE
from traces.rawtext import RawText, load
from traces.rows import TraceFormat, to_trace
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


def read_trace(
    name_or_path: str | Path,
    *,
    format: str | TraceFormat | None = None,
    sort: bool = False,
    drop_zero: bool = False,
) -> Trace:
    """Read a shipped trace by name, or a file (plain or gzip).

    Parameters
    ----------
    name_or_path
        A name from `shipped_traces`, or a path. A file called like a shipped trace is reached as ``./name``.
    format
        Name of a built-in format or an object like `traces.rows.TraceFormat`. None: found by the first line.
    sort
        Repair rows that go back in time by a stable sort. Without it they are an error.
    drop_zero
        Leave out rows with a length of 0 (failed requests in BurstGPT). Without it they are an error.

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
    if isinstance(name_or_path, str) and name_or_path in _SHIPPED:
        name = name_or_path
        shipped = _SHIPPED[name]
        text = load(resources.files("traces") / "data" / shipped.file, f"traces/data/{shipped.file}")
        chosen = _choose(text, format)
        source = shipped.source
    elif not isinstance(name_or_path, (str, Path)):
        raise InputError(field="trace", value=repr(name_or_path), expected="a name or a path")
    else:
        path = Path(name_or_path)
        if not path.exists():
            raise InputError(
                "no such file",
                file=path,
                expected=f"a path or the name of a shipped trace: {', '.join(_SHIPPED)}",
            )
        name = path.name
        while Path(name).suffix in _SUFFIXES:
            name = Path(name).stem
        text = load(path, str(path))
        chosen = _choose(text, format)
        source = f"{path.name} ({chosen.name}, sha256 {text.digest})"
    return to_trace(chosen.rows(text), text, name=name, source=source, sort=sort, drop_zero=drop_zero)


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
