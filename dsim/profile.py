"""Measured step times of one machine: the `Profile`, its two files, and the profiles that come with dsim.

A profile is two files side by side. ``NAME.csv`` holds the samples, one timed forward pass a row::

    kind,tokens,requests,context_tokens,ms,repeat
    verify,8,,8192,5.3451,1
    draft,,16,8192,1.3171,1

``NAME.toml`` says what was measured (see `Profile`). `docs/cost-model.md` has a complete example.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
StrArray = npt.NDArray[np.str_]

#: The profile that scenarios use unless they name another.
DEFAULT_PROFILE = "b300x4-dsv4-flash-0731"

SAMPLE_KINDS = ("verify", "draft", "prefill")
PROFILE_KINDS = ("measured", "derived")
COLUMNS = ("kind", "tokens", "requests", "context_tokens", "ms", "repeat")

#: Stands in the integer arrays where a cell of the CSV is empty.
MISSING = -1

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_DIGITS = re.compile(r"[0-9]+")
_SIZE_EXPECTED = "an integer >= 1"
_REPEAT_EXPECTED = "an integer >= 0"
_MS_EXPECTED = "a finite number > 0"


@dataclass(frozen=True, eq=False)
class Samples:
    """Timed forward passes as aligned arrays, one entry a pass.

    Parameters
    ----------
    kind
        str[N]: ``verify`` (the target scores a batch), ``draft`` (one pass of the drafter) or ``prefill``
        (one prompt alone).
    tokens
        int64[N]: tokens in the pass; `MISSING` is allowed for drafts, whose size is `requests`.
    requests
        int64[N]: requests in the pass; `MISSING` where the measurement does not say.
    context_tokens
        int64[N]: tokens already in each request's KV cache; `MISSING` where the measurement does not say.
    ms
        float64[N]: duration, milliseconds.
    repeat
        int64[N]: number of the pass among those of its size; the lowest is the first, cold one.
    """

    kind: StrArray
    tokens: IntArray
    requests: IntArray
    context_tokens: IntArray
    ms: FloatArray
    repeat: IntArray

    def __post_init__(self) -> None:
        for item in fields(self):
            dtype = {"kind": np.str_, "ms": np.float64}.get(item.name, np.int64)
            given = np.asarray(getattr(self, item.name))
            with np.errstate(invalid="ignore"):  # NaN in a column of integers is refused below
                array: npt.NDArray[Any] = given.astype(dtype)
            if dtype is np.int64 and given.size and not np.array_equal(given, array):
                raise InputError(field=item.name, value=given.tolist(), expected="integers")
            array.setflags(write=False)
            object.__setattr__(self, item.name, array)
        shapes = {item.name: getattr(self, item.name).shape for item in fields(self)}
        if len(set(shapes.values())) != 1 or self.ms.ndim != 1:
            raise InputError(field="samples", value=shapes, expected="six one-dimensional arrays of one length")

    def __len__(self) -> int:
        return int(self.ms.size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Samples) and all(
            np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]

    def of(self, kind: str) -> Samples:
        """The samples of one kind, in their order."""
        keep = self.kind == kind
        return Samples(**{item.name: getattr(self, item.name)[keep] for item in fields(self)})


@dataclass(frozen=True, eq=False)
class Profile:
    """Step times of one model on one machine, with where they come from.

    Parameters
    ----------
    name
        Lower-case name, the stem of the two files.
    hardware, model, engine
        What was measured, in words.
    gpus
        Accelerators that one replica occupies; 1, and a word in `notes`, where the source does not say.
    captured_sizes
        int64[S] strictly increasing: token counts for which the engine holds a captured graph (a smaller
        step is padded to the next one). Empty where unknown or none.
    capture_limit
        The largest of them: above it the engine runs eagerly. 0 where nothing is captured.
    source, license
        Where the figures come from, and under what terms.
    kind
        ``measured``: timed steps or their published medians. ``derived``: computed from other figures.
    samples
        The timed passes.
    notes
        Accuracy, context, what was changed.
    draft_included
        The verify samples time the whole step, drafting included, so that a draft costs nothing more.

    Raises
    ------
    InputError
        Anything that the description above rules out, no verify samples, sizes out of order, or a repeated
        (kind, size, context, repeat).
    """

    name: str
    hardware: str
    gpus: int
    model: str
    engine: str
    captured_sizes: IntArray
    capture_limit: int
    source: str
    license: str
    kind: str
    samples: Samples
    notes: str = ""
    draft_included: bool = False

    def __post_init__(self) -> None:
        _check_identity({key: getattr(self, key) for key in _IDENTITY}, None, "")
        sizes = np.array(self.captured_sizes, dtype=np.int64)
        sizes.setflags(write=False)
        object.__setattr__(self, "captured_sizes", sizes)
        _check_samples(self.samples, None, None)
        if self.draft_included and "draft" in self.samples.kind:
            raise InputError(
                "has draft samples, so its verify samples cannot include the draft",
                file=self.name,
                field="draft_included",
                value=True,
                expected="false",
            )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Profile)
            and all(getattr(self, key) == getattr(other, key) for key in _IDENTITY if key != "captured_sizes")
            and np.array_equal(self.captured_sizes, other.captured_sizes)
            and self.samples == other.samples
        )

    __hash__ = None  # type: ignore[assignment]


#: Keys of the TOML file: type, and whether it must be there.
_IDENTITY: dict[str, tuple[type, bool]] = {
    "name": (str, True),
    "hardware": (str, True),
    "gpus": (int, True),
    "model": (str, True),
    "engine": (str, True),
    "kind": (str, True),
    "captured_sizes": (list, True),
    "capture_limit": (int, True),
    "draft_included": (bool, False),
    "source": (str, True),
    "license": (str, True),
    "notes": (str, False),
}


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with dsim, in alphabetical order."""
    folder = files("dsim") / "data" / "profiles"
    return tuple(sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".toml")))


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by its name, or any other by the path of one of its two files.

    >>> load_profile("b300x4-dsv4-flash-0731").gpus
    4
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith((".csv", ".toml")) or "/" in text or os.sep in text:
        return read_profile(name_or_path)
    if text not in shipped_profiles():
        raise InputError(
            "unknown profile",
            field="profile",
            value=text,
            expected=f"one of {', '.join(shipped_profiles())}, or the path of a profile's .csv or .toml file",
        )
    folder = files("dsim") / "data" / "profiles"
    csv_file, toml_file = folder / f"{text}.csv", folder / f"{text}.toml"
    return _parse(csv_file.read_bytes(), toml_file.read_bytes(), f"{text}.csv", f"{text}.toml")


def read_profile(path: str | Path) -> Profile:
    """Read NAME.csv and NAME.toml; `path` is either of them.

    Raises
    ------
    InputError
        With file, line, field, value and what was expected, at the first thing that is wrong.
    """
    csv_path, toml_path = _pair(path)
    texts = []
    for file in (csv_path, toml_path):
        try:
            texts.append(file.read_bytes())
        except OSError as error:
            raise InputError(
                f"cannot be read ({error.strerror})",
                file=file,
                expected="a profile: NAME.csv and NAME.toml side by side",
            ) from None
    return _parse(texts[0], texts[1], str(csv_path), str(toml_path))


def write_profile(profile: Profile, path: str | Path) -> Path:
    """Write NAME.csv and NAME.toml (each is renamed into place when complete) and return the CSV's path.

    `path` is that of either file; its stem must be the profile's name. Reading the files back gives an equal
    profile.
    """
    csv_path, toml_path = _pair(path)
    if csv_path.stem != profile.name:
        raise InputError(file=csv_path, field="name", value=profile.name, expected=f"'{csv_path.stem}', as the file")
    pending = [(csv_path, _csv_text(profile.samples)), (toml_path, _toml_text(profile))]
    temporary = [file.with_name(f".{file.name}.{os.getpid()}.tmp") for file, _ in pending]
    try:
        for (_, text), part in zip(pending, temporary, strict=True):
            part.write_text(text, encoding="utf-8", newline="\n")
        for (file, _), part in zip(pending, temporary, strict=True):
            part.replace(file)
    finally:
        for part in temporary:
            part.unlink(missing_ok=True)
    return csv_path


def _pair(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    if path.suffix not in (".csv", ".toml"):
        raise InputError(file=path, expected="the path of a profile's .csv or .toml file")
    return path.with_suffix(".csv"), path.with_suffix(".toml")


def _decode(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError("is not UTF-8 text", file=file, line=line) from None


def _parse(csv_data: bytes, toml_data: bytes, csv_file: str, toml_file: str) -> Profile:
    identity = _parse_toml(_decode(toml_data, toml_file), toml_file)
    samples = _parse_csv(_decode(csv_data, csv_file), csv_file)
    return Profile(samples=samples, **identity)


def _parse_toml(text: str, file: str) -> dict[str, Any]:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"at line (\d+)", str(error))
        raise InputError(f"is not valid TOML ({error})", file=file, line=int(match[1]) if match else None) from None
    for key in found:
        if key not in _IDENTITY:
            raise InputError(
                "unknown key",
                file=file,
                line=_toml_line(text, key),
                field=key,
                expected=f"one of {', '.join(_IDENTITY)}",
            )
    for key, (_, required) in _IDENTITY.items():
        if required and key not in found:
            raise InputError("is missing", file=file, field=key)
    found = {"notes": "", "draft_included": False, **found}
    _check_identity(found, file, text)
    stem = Path(file).stem
    if found["name"] != stem:
        raise InputError(
            file=file,
            line=_toml_line(text, "name"),
            field="name",
            value=found["name"],
            expected=f"'{stem}', as the file",
        )
    return found


def _toml_line(text: str, key: str) -> int | None:
    match = re.search(rf"^[ \t]*\[*[ \t]*\"?{re.escape(key)}\b", text, re.MULTILINE)
    return text.count("\n", 0, match.start()) + 1 if match else None


def _check_identity(found: dict[str, Any], file: str | None, text: str) -> None:
    def refuse(key: str, value: object, expected: str) -> InputError:
        return InputError(file=file, line=_toml_line(text, key), field=key, value=value, expected=expected)

    for key in ("name", "hardware", "model", "engine", "source", "license", "kind", "notes"):
        value = found[key]
        if not isinstance(value, str) or (not value.strip() and key != "notes"):
            raise refuse(key, value, "text" if key == "notes" else "text that is not empty")
    if not _NAME.fullmatch(found["name"]):
        raise refuse("name", found["name"], "lower-case letters, digits, '.', '_' and '-'")
    if found["kind"] not in PROFILE_KINDS:
        raise refuse("kind", found["kind"], f"one of {', '.join(PROFILE_KINDS)}")
    if not isinstance(found["draft_included"], bool):
        raise refuse("draft_included", found["draft_included"], "true or false")
    if not _is_int(found["gpus"]) or found["gpus"] < 1:
        raise refuse("gpus", found["gpus"], _SIZE_EXPECTED)

    sizes = found["captured_sizes"]
    if isinstance(sizes, np.ndarray):
        sizes = sizes.tolist()
    if not isinstance(sizes, list | tuple):
        raise refuse("captured_sizes", sizes, "a list of token counts (empty where nothing is captured)")
    last = 0
    for size in sizes:
        if not _is_int(size) or size <= last:
            raise refuse("captured_sizes", size, f"an integer > {last} (the sizes must increase)")
        last = int(size)
    limit = found["capture_limit"]
    if not _is_int(limit) or limit != last:
        why = "the largest captured size" if last else "nothing is captured"
        raise refuse("capture_limit", limit, f"{last} ({why})")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _parse_csv(text: str, file: str) -> Samples:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    lines: list[int] = []
    try:
        header = next(reader, None)
        if not header:
            raise InputError("is empty", file=file, line=1, expected=f"the columns {', '.join(COLUMNS)}")
        _check_header(header, file)
        for row in reader:
            line = reader.line_num
            if not row:
                continue
            if len(row) != len(header):
                raise InputError(
                    file=file, line=line, value=f"{len(row)} cells", expected=f"{len(header)}, as the header"
                )
            for name, value in _parse_row(dict(zip(header, row, strict=True)), file, line).items():
                columns[name].append(value)
            lines.append(line)
    except csv.Error as error:
        raise InputError(f"is not valid CSV ({error})", file=file, line=reader.line_num) from None
    samples = Samples(**{name: np.array(values) for name, values in columns.items()})
    _check_samples(samples, file, lines)
    return samples


def _check_header(header: list[str], file: str) -> None:
    for name in COLUMNS:
        if name not in header:
            raise InputError("column is missing", file=file, line=1, field=name)
    for name in header:
        if name not in COLUMNS:
            raise InputError("unknown column", file=file, line=1, field=name, expected=f"only {', '.join(COLUMNS)}")
    if len(set(header)) != len(header):
        raise InputError("a column is named twice", file=file, line=1, value=",".join(header))


def _parse_row(cells: dict[str, str], file: str, line: int) -> dict[str, Any]:
    kind = cells["kind"].strip()
    if kind not in SAMPLE_KINDS:
        raise InputError(file=file, line=line, field="kind", value=kind, expected=f"one of {', '.join(SAMPLE_KINDS)}")
    row: dict[str, Any] = {"kind": kind}
    size = "requests" if kind == "draft" else "tokens"
    for name in ("tokens", "requests", "context_tokens", "repeat"):
        text = cells[name].strip()
        required = name in (size, "repeat")
        if not text and not required:
            row[name] = MISSING
            continue
        lowest = 0 if name == "repeat" else 1
        if not _DIGITS.fullmatch(text) or int(text) < lowest:
            raise InputError(
                file=file,
                line=line,
                field=name,
                value=text,
                expected=_REPEAT_EXPECTED if name == "repeat" else _SIZE_EXPECTED,
            )
        row[name] = int(text)
    try:
        row["ms"] = float(cells["ms"])
    except ValueError:
        row["ms"] = math.nan
    if not math.isfinite(row["ms"]) or row["ms"] <= 0:
        raise InputError(file=file, line=line, field="ms", value=cells["ms"].strip(), expected=_MS_EXPECTED)
    return row


def _check_samples(samples: Samples, file: str | None, lines: Sequence[int] | None) -> None:
    """Everything that concerns several cells or rows; also guards profiles built in memory."""

    def refuse(index: int, message: str | None, name: str, value: object, expected: str) -> InputError:
        line = lines[index] if lines is not None else None
        return InputError(message, file=file, line=line, field=name, value=value, expected=expected)

    previous: dict[tuple[str, int], tuple[int, int]] = {}
    seen: dict[tuple[str, int, tuple[int, int], int], int] = {}
    given: dict[tuple[str, str], bool] = {}
    for i in range(len(samples)):
        kind, repeat, ms = str(samples.kind[i]), int(samples.repeat[i]), float(samples.ms[i])
        tokens, requests = int(samples.tokens[i]), int(samples.requests[i])
        context = int(samples.context_tokens[i])
        if kind not in SAMPLE_KINDS:
            raise refuse(i, None, "kind", kind, f"one of {', '.join(SAMPLE_KINDS)}")
        main = "requests" if kind == "draft" else "tokens"
        for name, value in (("tokens", tokens), ("requests", requests), ("context_tokens", context)):
            if value < 1 and (value != MISSING or name == main):
                raise refuse(i, None, name, value, _SIZE_EXPECTED)
        if repeat < 0:
            raise refuse(i, None, "repeat", repeat, _REPEAT_EXPECTED)
        if not math.isfinite(ms) or ms <= 0:
            raise refuse(i, None, "ms", ms, _MS_EXPECTED)

        for name, value in (("requests", requests), ("context_tokens", context)):
            if given.setdefault((kind, name), value != MISSING) != (value != MISSING):
                raise refuse(
                    i,
                    f"some {kind} samples give {name} and some do not",
                    name,
                    "" if value == MISSING else value,
                    "a value in every row or in none",
                )
        size = (requests, tokens) if kind == "draft" else (tokens, requests)
        if size < previous.get((kind, context), size):
            before = previous[kind, context]
            at = 1 if size[0] == before[0] else 0
            name = main if at == 0 else ("tokens" if kind == "draft" else "requests")
            raise refuse(
                i,
                f"the sizes of the {kind} samples are not increasing",
                name,
                size[at],
                f"{before[at]} or more, the size of the row before",
            )
        previous[kind, context] = size
        key = (kind, context, size, repeat)
        if key in seen:
            where = f"line {lines[seen[key]]}" if lines is not None else f"sample {seen[key]}"
            raise refuse(
                i,
                f"{kind} sample of this size, context and repeat stands already at {where}",
                "repeat",
                repeat,
                "a repeat number of its own",
            )
        seen[key] = i
    if "verify" not in samples.kind:
        raise InputError("has no verify samples", file=file, field="kind", expected="at least one 'verify' row")


def _csv_text(samples: Samples) -> str:
    rows = [",".join(COLUMNS)]
    for i in range(len(samples)):
        sizes = (samples.tokens[i], samples.requests[i], samples.context_tokens[i])
        cells = ["" if value == MISSING else str(int(value)) for value in sizes]
        rows.append(",".join([str(samples.kind[i]), *cells, repr(float(samples.ms[i])), str(int(samples.repeat[i]))]))
    return "\n".join(rows) + "\n"


def _toml_text(profile: Profile) -> str:
    # Imported here: only writing a profile needs it.
    import tomli_w

    parts = []
    for key in _IDENTITY:
        value = getattr(profile, key)
        if key == "captured_sizes":
            # tomli_w would give every size a line of its own.
            sizes = [str(size) for size in value.tolist()]
            lines = [", ".join(sizes[i : i + 16]) for i in range(0, len(sizes), 16)]
            inner = "".join(f"\n    {line}," for line in lines)
            parts.append(f"captured_sizes = [{inner}{chr(10) if lines else ''}]\n")
        else:
            plain = int(value) if _is_int(value) else value
            parts.append(tomli_w.dumps({key: plain}))
    return "".join(parts)
