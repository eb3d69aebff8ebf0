"""Result tables of trained drafters: reading and checking them, and what two experiments draw of them.

A row is one trained drafter on one domain of held-out text (`RESULTS`), or one timing of a drafting step (`LATENCY`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from dsim.errors import InputError
from dsim.figures_drafts import (
    ALL,
    PAPER_TARGET,
    drafter_of,
    drafter_style,
    end_labels,
    row_name,
    share_limits,
    value_line,
)
from experiments._banks import domain_order

#: Columns of results; alpha_1, alpha_2, ... (conditional acceptance by position) may follow, to the longest block.
RESULTS = (
    "drafter",
    "head",
    "layers",
    "gamma",
    "anchors",
    "temperature",
    "domain",
    "tau",
    "tau_low",
    "tau_high",
)
#: Columns of timings: ``draft_ms`` is the whole draft of a block, ``head_ms`` the sequential head's part of it,
#: ``verify_ms`` the target's pass over the block.
LATENCY = ("head", "gamma", "layers", "vocab", "device", "draft_ms", "head_ms", "verify_ms", "repeats")
HEADS = ("none", "markov", "gated", "rnn")
_TEXT = ("drafter", "head", "domain", "device")
_WHOLE = ("layers", "gamma", "anchors", "vocab", "repeats")


def read_results(path: str | Path | None, shipped: str, option: str = "--results") -> pd.DataFrame:
    """Results of trained drafters, checked; with columns ``key`` and ``label`` (of the drafter) added.

    Where a drafter has no row ``all``, the mean over its domains, equally weighted, is added without an interval.

    Raises
    ------
    InputError
        No such file, missing columns, values out of range (with line and field), or a row twice.
    """
    table, file = _read(path, shipped, RESULTS, option)
    for position, row in enumerate(table.to_dict("records"), start=2):
        if row["head"] not in HEADS:
            _bad(file, position, "head", row["head"], f"one of {', '.join(HEADS)}")
        if not row["temperature"] >= 0:
            _bad(file, position, "temperature", row["temperature"], "a number >= 0")
        if not 1 <= row["tau"] <= row["gamma"] + 1:
            _bad(file, position, "tau", row["tau"], f"1 to gamma + 1 = {row['gamma'] + 1}")
        if row["tau_low"] > row["tau"]:
            _bad(file, position, "tau_low", row["tau_low"], f"at most tau = {row['tau']:g}, or nothing")
        if row["tau_high"] < row["tau"]:
            _bad(file, position, "tau_high", row["tau_high"], f"at least tau = {row['tau']:g}, or nothing")
    _once(table, ["drafter", "head", "layers", "gamma", "anchors", "temperature", "domain"], file)
    named = table["drafter"] + " " + table["head"]
    # A gated head is a variant of the Markov head that the paper does not chart: it looks and is called otherwise.
    table["key"] = [text if text.endswith(" gated") else drafter_of(text) or text for text in named]
    table["label"] = [drafter_style(key).label for key in table["key"]]
    _one(table, "temperature", file)
    return _with_means(table)


def read_latency(path: str | Path | None, shipped: str, option: str = "--latency") -> pd.DataFrame:
    """Timings of drafting steps, checked; with columns ``key`` and ``overhead`` (head over the rest of a round)."""
    table, file = _read(path, shipped, LATENCY, option)
    for position, row in enumerate(table.to_dict("records"), start=2):
        if row["head"] not in HEADS:
            _bad(file, position, "head", row["head"], f"one of {', '.join(HEADS)}")
        if not row["draft_ms"] > 0:
            _bad(file, position, "draft_ms", row["draft_ms"], "a number > 0")
        if not 0 <= row["head_ms"] < row["draft_ms"]:
            _bad(file, position, "head_ms", row["head_ms"], f"at least 0 and below draft_ms = {row['draft_ms']:g}")
        if not row["verify_ms"] > 0:
            _bad(file, position, "verify_ms", row["verify_ms"], "a number > 0")
    _once(table, ["head", "gamma", "layers", "vocab", "device"], file)
    keys = {"none": "dflash", "markov": "dspark", "rnn": "dspark-rnn", "gated": "dspark gated"}
    table["key"] = table["head"].map(keys)
    table["overhead"] = table["head_ms"] / (table["draft_ms"] + table["verify_ms"] - table["head_ms"])
    return table


def shipped_results(name: str) -> Path | None:
    """The shipped table of that name, if there is one."""
    item = resources.files("dsim") / "data" / "drafter" / name
    return Path(str(item)) if item.is_file() else None


def _read(
    path: str | Path | None, shipped: str, columns: Sequence[str], option: str
) -> tuple[pd.DataFrame, str | Path]:
    file = shipped_results(shipped) if path is None else Path(path)
    needs = f"a CSV with the columns {', '.join(columns)}"
    if file is None:
        raise InputError(f"no {shipped} comes with this dsim", field=option, expected=needs)
    try:
        with Path(file).open(encoding="utf-8", newline="") as stream:
            header, *rows = list(csv.reader(stream, strict=True)) or [[]]
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=file, field=option, expected=needs) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"is no CSV ({error})", file=file, field=option, expected=needs) from None
    for name in columns:
        if header.count(name) != 1:
            raise InputError("missing column", file=file, line=1, field=name, expected=", ".join(columns))
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise InputError(file=file, line=line, value=",".join(row), expected=f"{len(header)} fields")
    table = pd.DataFrame(rows, columns=header, dtype=str)
    if table.empty:
        raise InputError("has no rows", file=file, field=option, expected=needs)
    numbers = [name for name in table.columns if name in columns and name not in _TEXT]
    numbers += [name for name in table.columns if re.fullmatch(r"alpha_\d+", name) and name not in columns]
    for name in numbers:
        table[name] = [_number(text, name, file, line) for line, text in enumerate(table[name], start=2)]
    for name in _TEXT:
        if name in columns:
            for line, text in enumerate(table[name], start=2):
                if not text.strip():
                    _bad(file, line, name, text, "a name")
    return table, file


def _number(text: str, name: str, file: str | Path, line: int) -> float | int:
    empty = name in ("tau_low", "tau_high") or name.startswith("alpha_")
    if empty and not text.strip():
        return float("nan")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        _bad(file, line, name, text, "a finite number" + (", or nothing" if empty else ""))
    if name in _WHOLE and (value != int(value) or value < 1):
        _bad(file, line, name, text, "an integer >= 1")
    if name.startswith("alpha_") and not 0 <= value <= 1:
        _bad(file, line, name, text, "a probability")
    return int(value) if name in _WHOLE else value


def _bad(file: str | Path, line: int, field: str, value: object, expected: str) -> None:
    raise InputError(file=file, line=line, field=field, value=value, expected=expected)


def _once(table: pd.DataFrame, keys: list[str], file: str | Path) -> None:
    again = np.flatnonzero(table.duplicated(keys).to_numpy())
    if again.size:
        line = int(again[0]) + 2
        raise InputError("stands there twice", file=file, line=line, expected=f"one row for each {', '.join(keys)}")


def _one(table: pd.DataFrame, field: str, file: str | Path) -> None:
    values = sorted(table[field].unique())
    if len(values) > 1:
        raise InputError("several values cannot be compared", file=file, field=field, value=values, expected="one")


def _with_means(table: pd.DataFrame) -> pd.DataFrame:
    keys = ["drafter", "head", "layers", "gamma", "anchors", "temperature", "key", "label"]
    rows = []
    for values, part in table.groupby(keys, sort=False):
        if ALL not in set(part["domain"]):
            rows.append(dict(zip(keys, values, strict=True)) | {"domain": ALL, "tau": float(part["tau"].mean())})
    return pd.concat([table, pd.DataFrame(rows)], ignore_index=True) if rows else table


def only(table: pd.DataFrame, field: str, chosen: int | None, option: str) -> pd.DataFrame:
    """The rows of one value of a column: the chosen one, or the only one there is."""
    known = sorted(table[field].unique().tolist())
    listed = ", ".join(str(value) for value in known)
    if chosen is None and len(known) > 1:
        raise InputError(f"the results have several {field}", field=option, expected=f"one of {listed}")
    value = known[0] if chosen is None else chosen
    if value not in known:
        raise InputError("is not in the results", field=option, value=value, expected=f"one of {listed}")
    return table[table[field] == value]


def unambiguous(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The table, if each drafter has one row for each domain and value of `by`; else an error that names them."""
    keys = ["label", "domain", *by]
    again = table[table.duplicated(keys)]
    if len(again):
        row = again.iloc[0]
        raise InputError(
            f"{row['label']} was trained several times",
            field="anchors",
            value=sorted(table.loc[(table[keys] == row[keys]).all(axis=1), "anchors"].tolist()),
            expected=f"one row for each drafter, domain and {', '.join(by)}",
        )
    return table


def domains_of(table: pd.DataFrame) -> list[str]:
    """Domains in the order of figures, the mean over them last."""
    names = [name for name in dict.fromkeys(table["domain"]) if name != ALL]
    return [*domain_order(names), ALL]


def trained_note(table: pd.DataFrame) -> str:
    """The sentences of a caption that say what was trained and measured here."""
    anchors = table["anchors"]
    low, high = int(anchors.min()), int(anchors.max())
    many = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    bars = " Bars: 95 % intervals over the held-out texts." if table["tau_low"].notna().any() else ""
    return (
        f"Recorded: drafters trained here on {many} anchors each, T = {table['temperature'].iloc[0]:g}; "
        f"'{ALL}': mean over domains, equally weighted.{bars}"
    )


def draw_lines(ax: Axes, results: pd.DataFrame, domain: str, x: str) -> None:
    """Accepted length of each drafter against a column, with its intervals."""
    part = results[results["domain"] == domain]
    for key, own in part.groupby("key", sort=False):
        own = own.sort_values(x)
        value_line(ax, own[x], own["tau"], drafter_style(str(key)), low=own["tau_low"], high=own["tau_high"])


def draw_published(ax: Axes, paper: pd.DataFrame, domain: str, x: str) -> None:
    """The same of a published table (columns drafter, domain, accepted_length and `x`)."""
    for key, own in paper[paper["domain"] == domain].groupby("drafter", sort=False):
        value_line(ax, own[x], own["accepted_length"], drafter_style(str(key)), hollow=True)


def label_lines(ax: Axes, table: pd.DataFrame, x: str, y: str, at: float) -> None:
    """Names of the drafters at the ends of the lines of the mean over domains (or of all rows)."""
    by = "key" if "key" in table else "drafter"
    rows = table[table["domain"] == ALL] if "domain" in table else table
    last = rows.sort_values(x).groupby(by, sort=False).last()
    looks = [drafter_style(str(key)) for key in last.index]
    points = zip(last[x].tolist(), last[y].tolist(), looks, strict=True)
    end_labels(ax, [(left, level, look.label, look.color) for left, level, look in points], at=at)


def name_rows(axes: npt.NDArray[np.object_], results: pd.DataFrame) -> None:
    """Name the rows of panels, and give each one vertical scale."""
    row_name(axes[0, 0], f"recorded: trained here, T = {results['temperature'].iloc[0]:g}", "accepted length tau")
    if len(axes) > 1:
        row_name(axes[1, 0], f"published: {PAPER_TARGET}, T = 1", "accepted length tau")
    for row in axes:
        share_limits(row)


def whole_ticks(ax: Axes, values: npt.ArrayLike) -> None:
    """Ticks at the values that occur, with room at both ends."""
    at = np.unique(np.asarray(values, dtype=np.float64))
    room = 0.08 * max(float(at[-1] - at[0]), 1.0)
    ax.set_xlim(float(at[0]) - room, float(at[-1]) + room)
    ax.set_xticks(at.tolist(), [f"{value:g}" for value in at])
