"""Reading and writing a profile's two files, and finding those that come with dsim."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from dsim.errors import InputError
from dsim.profile.profile import IDENTITY, Profile, check_identity, is_int
from dsim.profile.samples import (
    MISSING,
    MS_EXPECTED,
    REPEAT_EXPECTED,
    SAMPLE_KINDS,
    SIZE_EXPECTED,
    Samples,
    check_samples,
    size_limit,
)

COLUMNS = ("kind", "tokens", "requests", "context_tokens", "ms", "repeat")

# Keys of the TOML file that may be left out, and what they are then.
_OPTIONAL: dict[str, Any] = {"draft_included": False, "notes": ""}
_DIGITS = re.compile(r"[0-9]+")


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
    except RecursionError:
        raise InputError("is nested too deeply", file=file) from None
    except ValueError as error:  # no TOML, or an integer of thousands of digits
        match = re.search(r"at line (\d+)", str(error))
        raise InputError(f"is not valid TOML ({error})", file=file, line=int(match[1]) if match else None) from None
    for key in found:
        if key not in IDENTITY:
            raise InputError(
                "unknown key",
                file=file,
                line=_toml_line(text, key),
                field=key,
                expected=f"one of {', '.join(IDENTITY)}",
            )
    for key in IDENTITY:
        if key not in found and key not in _OPTIONAL:
            raise InputError("is missing", file=file, field=key)
    found = _OPTIONAL | found
    check_identity(found, file, lambda key: _toml_line(text, key))
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
    check_samples(samples, file, lines)
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
        digits, most = _DIGITS.fullmatch(text) is not None, size_limit(kind, name)
        # Python refuses to convert thousands of digits.
        if digits and (len(text.lstrip("0")) > len(str(most)) or int(text) > most):
            raise InputError(file=file, line=line, field=name, value=text, expected=f"at most {most}")
        if not digits or int(text) < lowest:
            raise InputError(
                file=file,
                line=line,
                field=name,
                value=text,
                expected=REPEAT_EXPECTED if name == "repeat" else SIZE_EXPECTED,
            )
        row[name] = int(text)
    try:
        row["ms"] = float(cells["ms"])
    except ValueError:
        row["ms"] = math.nan
    if not math.isfinite(row["ms"]) or row["ms"] <= 0:
        raise InputError(file=file, line=line, field="ms", value=cells["ms"].strip(), expected=MS_EXPECTED)
    return row


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
    for key in IDENTITY:
        value = getattr(profile, key)
        if key == "captured_sizes":
            # tomli_w would give every size a line of its own.
            sizes = [str(size) for size in value.tolist()]
            lines = [", ".join(sizes[i : i + 16]) for i in range(0, len(sizes), 16)]
            inner = "".join(f"\n    {line}," for line in lines)
            parts.append(f"captured_sizes = [{inner}{chr(10) if lines else ''}]\n")
        else:
            plain = int(value) if is_int(value) else value
            parts.append(tomli_w.dumps({key: plain}))
    return "".join(parts)
