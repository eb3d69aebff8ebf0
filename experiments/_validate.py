"""The frame of `validate.py`: what a prediction is, its errors, the figure, and the page made from the tables.

A case is a module with a `CASE`; `experiments/_validate_vllm_runs.py` is one. Its `run` returns tables by file name, of
which ``validation`` has the columns of `COLUMNS`; figures and the page are made from the tables alone, so that they can
be made again from CSV files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from dsim.errors import InputError
from dsim.plotstyle import GRID, INK, SOFT, arm_styles, caption, legend, new_figure, save_figure, style

Tables = Mapping[str, pd.DataFrame]

#: Columns of ``validation.csv``, one row a predicted number.
COLUMNS = (
    "case",
    "arm",  # what was run: an engine with a model, or a policy
    "load",  # text: concurrency, or which requests
    "metric",  # as `dsim.metrics` names it
    "unit",
    "predicted",
    "measured",  # empty where nobody measured it, or where it is not known here
    "low",  # 95 % bootstrap interval of the measured value over its requests, where there are requests
    "high",
    "error",  # predicted / measured - 1
    "use",  # one of USES
    "target",  # largest |error| that was asked for, as a fraction; empty: none
    "n_scored",  # requests behind the number
    "cost_source",
    "drafts_source",
    "extrapolated",
)

#: ``scored``: no part of a fit saw it. ``fitted``: the fit did. ``unknown``: no measurement to compare with.
USES = ("scored", "fitted", "unknown")

_LATENCIES = [f"{name}_{stat}_ms" for name in ("ttft", "tpot", "e2e") for stat in ("p50", "p90", "p99")]
METRIC_WORDS = {
    "throughput_tok_s": "throughput",
    "tps_per_user": "tok/s/user",
    **{metric: metric[:-3].upper().replace("_", " ") for metric in _LATENCIES},
}


@dataclass(frozen=True)
class Case:
    """One validation.

    Parameters
    ----------
    name, title
        Of the command line; of the page.
    run
        Called with `RunOptions`; returns the tables by name, ``validation`` among them.
    draw
        Called with tables, a folder and a stem: writes ``STEM*.png``.
    page
        The case's section of docs/validation.md, from its tables; headings of level 3 and below.
    headline
        One sentence for README.
    """

    name: str
    title: str
    run: Callable[[RunOptions], dict[str, pd.DataFrame]]
    draw: Callable[[Tables, Path, str], None]
    page: Callable[[Tables], str]
    headline: Callable[[Tables], str]


@dataclass(frozen=True)
class RunOptions:
    """What the command line asks of a case: processes; a small run to see whether it works; ablations too."""

    jobs: int = 1
    quick: bool = False
    ablate: bool = False


# -- predictions and their errors ------------------------------------------------------------------------


def predictions(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as the table of `COLUMNS`; ``error`` is computed here, and what may be left out is empty.

    Raises
    ------
    InputError
        An unknown column or use, a measurement that is missing where it is scored or present where it is unknown, or a
        prediction that is no positive number.
    """
    table = pd.DataFrame([dict(row) for row in rows])
    for name in table.columns:
        if name not in COLUMNS:
            raise InputError("unknown column", field=str(name), expected=f"one of {', '.join(COLUMNS)}")
    for name in ("measured", "low", "high", "target"):
        table[name] = pd.to_numeric(table[name]) if name in table else np.nan
    for name in (
        "case",
        "arm",
        "load",
        "metric",
        "unit",
        "predicted",
        "use",
        "n_scored",
        "cost_source",
        "extrapolated",
    ):
        if name not in table or table[name].isna().any():
            raise InputError("is missing", field=name, expected="a value in every row")
    table["drafts_source"] = table.get("drafts_source", pd.Series("none", index=table.index)).fillna("none")
    for row in table.to_dict("records"):
        _check(row)
    keys = table[["case", "arm", "load", "metric"]]
    if keys.duplicated().any():
        twice = keys[keys.duplicated()].iloc[0].tolist()
        raise InputError("is predicted twice", field="metric", value=twice, expected="one row each")
    table["error"] = table["predicted"] / table["measured"] - 1.0
    return table[list(COLUMNS)]


def _check(row: Mapping[Any, Any]) -> None:
    where = f"{row['case']}, {row['arm']}, {row['load']}, {row['metric']}"
    if row["use"] not in USES:
        raise InputError(where, field="use", value=row["use"], expected=f"one of {', '.join(USES)}")
    if not np.isfinite(row["predicted"]) or row["predicted"] <= 0:
        raise InputError(where, field="predicted", value=row["predicted"], expected="a finite number > 0")
    if bool(np.isfinite(row["measured"]) and row["measured"] > 0) == (row["use"] == "unknown"):
        expected = "none where it is unknown, a number > 0 otherwise"
        raise InputError(where, field="measured", value=row["measured"], expected=expected)
    if not (row["target"] > 0 or np.isnan(row["target"])):
        raise InputError(where, field="target", value=row["target"], expected="a fraction > 0, or none")


def error_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Median and worst |error| of the scored rows: a row a metric, and ``all``.

    Columns: metric, n, median, worst, worst_arm, worst_load, target (the metric's; empty: none), within (rows with a
    target that meet it), n_target.
    """
    scored = table[table["use"] == "scored"]
    groups = [(str(metric), rows) for metric, rows in scored.groupby("metric", sort=False)]
    found = []
    for metric, rows in [*groups, ("all", scored)]:
        if rows.empty:
            continue
        size = rows["error"].abs()
        worst = rows.loc[size.idxmax()]
        aimed = rows[rows["target"].notna()]
        targets = aimed["target"].unique()
        found.append(
            {
                "metric": metric,
                "n": len(rows),
                "median": float(size.median()),
                "worst": float(size.max()),
                "worst_arm": worst["arm"],
                "worst_load": worst["load"],
                "target": float(targets[0]) if targets.size == 1 and metric != "all" else np.nan,
                "within": int((aimed["error"].abs() <= aimed["target"]).sum()),
                "n_target": len(aimed),
            }
        )
    return pd.DataFrame(found)


def bootstrap_interval(
    values: npt.NDArray[np.float64], percent: float, *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % bootstrap percentile interval of a percentile over requests.

    It says how far the statistic moves when other requests of the same run are drawn. Requests that share batches are
    not independent, so it is no interval over repetitions of the run.

    >>> bootstrap_interval(np.full(20, 3.0), 99)
    (3.0, 3.0)
    """
    rng = np.random.default_rng(seed)
    drawn = values[rng.integers(values.size, size=(resamples, values.size))]
    low, high = np.quantile(np.percentile(drawn, percent, axis=1), (0.025, 0.975))
    return float(low), float(high)


def percent(fraction: float, digits: int = 1, *, sign: bool = False) -> str:
    """A fraction as text, ``-`` for no value.

    >>> percent(0.0432), percent(-0.01, sign=True), percent(-0.001, 0), percent(float("nan"))
    ('4.3 %', '-1.0 %', '0 %', '-')
    """
    if np.isnan(fraction):
        return "-"
    text = f"{100 * fraction:{'+' if sign else ''}.{digits}f}"
    return f"{f'{0:.{digits}f}' if float(text) == 0 else text} %"


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The validation table for people: fewer columns, errors in percent."""
    kept = table[["arm", "load", "metric", "predicted", "measured"]].copy()
    kept["error"] = [percent(value, sign=True) for value in table["error"]]
    kept["target"] = ["" if np.isnan(value) else f"<= {percent(value, 0)}" for value in table["target"]]
    kept["use"] = table["use"]
    return kept


def number(value: float) -> str:
    """A number as text with four significant digits, or as an integer where it has more.

    >>> number(0.012345), number(41.873), number(154004.2)
    ('0.01235', '41.87', '154,004')
    """
    digits = 3 - int(np.floor(np.log10(abs(value)))) if value else 0
    return f"{value:,.{min(max(digits, 0), 6)}f}"


def readable_summary(summary: pd.DataFrame) -> pd.DataFrame:
    """`error_summary` for people."""
    return pd.DataFrame(
        {
            "metric": summary["metric"],
            "n": summary["n"],
            "median abs. error": [percent(value) for value in summary["median"]],
            "worst abs. error": [percent(value) for value in summary["worst"]],
            "worst at": summary["worst_arm"] + ", " + summary["worst_load"],
            "within target": [
                f"{row.within} of {row.n_target}" + ("" if np.isnan(row.target) else f" (<= {percent(row.target, 0)})")
                if row.n_target
                else "-"
                for row in summary.itertuples()
            ],
        }
    )


def markdown(table: pd.DataFrame) -> str:
    """A table as Markdown: numbers with four significant digits, nothing for no value.

    Raises
    ------
    InputError
        A cell or a name with a vertical bar, which would end the column.
    """
    texts = [*table.columns, *(value for name in table for value in table[name] if isinstance(value, str))]
    for text in texts:
        if "|" in str(text):
            raise InputError(field="cell", value=text, expected="a text without '|'")
    lines = ["| " + " | ".join(str(name) for name in table.columns) + " |", "|" + "---|" * len(table.columns)]
    for row in table.itertuples(index=False):
        lines.append("| " + " | ".join(_cell(value) for value in row) + " |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else number(float(value))
    return str(value)


# -- figures ---------------------------------------------------------------------------------------------

#: Half widths of the shaded bands, fractions.
BANDS = (0.05, 0.15)


@style()
def draw_errors(table: pd.DataFrame, folder: Path, stem: str, *, title: str, note: str) -> None:
    """Predicted against measured with bands of 5 and 15 %, and the error of every scored number, metric by metric.

    A gray bar reaches as far as the metric's `target`.
    """
    known = table[table["use"] != "unknown"]
    scored = known[known["use"] == "scored"]
    arms = list(dict.fromkeys(table["arm"]))
    looks = arm_styles(arms)
    metrics = list(dict.fromkeys(scored["metric"]))
    fig, axes = new_figure(2, width=9.2, height=max(3.9, 1.1 + 0.29 * len(metrics)), title=title)
    caption(fig, note)
    left, right = axes[0]
    _agreement(left, known, arms)
    for i, metric in enumerate(metrics):
        rows = scored[scored["metric"] == metric]
        target = rows["target"].dropna()
        if len(target):
            half = 100 * float(target.iloc[0])
            right.plot([-half, half], [i, i], color=INK, linewidth=6.0, alpha=0.12, solid_capstyle="butt", zorder=1)
        for arm in arms:
            mine = rows[rows["arm"] == arm]
            right.scatter(
                100 * mine["error"], [i] * len(mine), s=30, color=looks[arm].color, marker=looks[arm].marker,
                linewidths=1.1 if looks[arm].marker == "x" else 0, alpha=0.9, zorder=3,
            )  # fmt: skip
    right.axvline(0.0, color=SOFT, linewidth=0.9, zorder=2)
    right.set_yticks(range(len(metrics)), [METRIC_WORDS.get(metric, metric) for metric in metrics])
    right.set_ylim(len(metrics) - 0.4, -0.6)
    reach = max(6.0, 1.12 * float(100 * scored["error"].abs().max()))
    right.set_xlim(-reach, reach)
    right.set_xlabel("error of the prediction, %")
    aimed = scored["target"].notna().any()
    right.set_title("Error of every scored number" + ("\n(gray bar: the error allowed)" if aimed else ""))
    save_figure(fig, folder, stem)


def _agreement(ax: Axes, known: pd.DataFrame, arms: Sequence[str]) -> None:
    looks = arm_styles(arms)
    values = known[["measured", "predicted"]].to_numpy()
    low, high = float(values.min()) / 1.5, float(values.max()) * 1.5
    line = np.array([low, high])
    for half, shade in zip(BANDS, (0.16, 0.08), strict=True):
        ax.fill_between(line, line * (1 - half), line * (1 + half), color=INK, alpha=shade, linewidth=0, zorder=1)
    ax.plot(line, line, color=SOFT, linewidth=0.8, zorder=2)
    for arm in arms:
        for use, fill in (("scored", looks[arm].color), ("fitted", "white")):
            rows = known[(known["arm"] == arm) & (known["use"] == use)]
            if rows.empty:
                continue
            ax.plot(
                rows["measured"], rows["predicted"], linestyle="none", marker=looks[arm].marker, markersize=5.0,
                markerfacecolor=fill, markeredgecolor=looks[arm].color, markeredgewidth=0.9,
                label=arm if use == "scored" else None, zorder=4 if use == "scored" else 3,
            )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.grid(which="minor", color=GRID, linewidth=0.4)
    ax.set_xlabel("measured (ms; throughput: tok/s)")
    ax.set_ylabel("predicted")
    ax.set_title("Predicted against measured\n(gray bands: 5 and 15 % off)")
    legend(ax, "upper left")


# -- the page --------------------------------------------------------------------------------------------

PAGE_HEAD = """# Validation

How wrong is dsim? This page holds predictions against measurements that the predictions did not see. It is generated by
`python experiments/validate.py --docs` from the tables in `docs/validation`: no result in it was typed.

In all tables an error is predicted / measured - 1. A number that a fit has seen is marked `fitted` and never scored.
"""


PAGE_TAIL = """## When not to trust dsim

- **Outside what was measured.** A profile's grid, or the steps of a fitted run: beyond them prices are extrapolated.
  Profiles refuse that unless `cost.allow_extrapolation` says otherwise, and every row says `extrapolated`.
- **For tails that come from the machine.** A step of a size always takes the same time here: no jitter, stragglers,
  garbage collection, clock changes, other tenants. Simulated P99s come from batching, queueing and lengths alone.
- **For another engine, version or configuration** than the profile's. The same model on the same GPU can differ by tens
  of percent between two configurations of one engine.
- **For absolute numbers of synthetic drafts.** Their acceptance has published means and a shape of our choosing.
  Differences between policies on the same drafts inherit less of it than levels do.
- **For a server in overload without looking at time.** Beyond its capacity latencies grow with the length of the run.
- **For anything in the list of [what is left out](simulation.md#what-each-approximation-leaves-out)**: prefill tiers
  that saturate, transfer of caches, shared prefixes, faults.
- **For one run's edge.** Which request still enters a full batch or cache can hang on a millisecond, here as there.
  Percentiles that lie on such a jump are off by the jump, however good the step times are.
"""


def page(shipped: Mapping[str, tuple[Case, Tables]]) -> str:
    """docs/validation.md from the tables of the shipped cases, by name and in order."""
    parts = [PAGE_HEAD, "## Summary\n"]
    rows = []
    for case, tables in shipped.values():
        summary = error_summary(tables["validation"])
        overall = summary[summary["metric"] == "all"]
        if overall.empty:
            continue
        one = overall.iloc[0]
        rows.append(
            {
                "case": f"[{case.title}](validation.md#{anchor(case.title)})",
                "scored numbers": one["n"],
                "median abs. error": percent(one["median"]),
                "worst abs. error": percent(one["worst"]),
                "within their target": f"{one['within']} of {one['n_target']}",
            }
        )
    parts.append(markdown(pd.DataFrame(rows)) + "\n")
    for name, (case, tables) in shipped.items():
        command = f"`python experiments/validate.py --case {name}`"
        parts.append(f"## {case.title}\n\nCommand: {command}; tables: [{name}](validation/{name}/validation.csv).\n")
        parts.append(case.page(tables).strip() + "\n")
    parts.append(PAGE_TAIL)
    return "\n".join(parts)


def anchor(heading: str) -> str:
    """The anchor that Markdown renderers give a heading.

    >>> anchor("Four vLLM runs, no speculation")
    'four-vllm-runs-no-speculation'
    """
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
