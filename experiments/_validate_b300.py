"""Validation case `vllm-b300-flash`: a measured vLLM server at six loads, from its profile and three constants."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from tqdm import tqdm

from dsim.drafts import Tilt
from dsim.drafts.quality import measured as measured_quality
from dsim.drafts.quality import parse_quality
from dsim.errors import InputError
from dsim.plotstyle import INK, SOFT, caption, legend, new_figure, save_figure, style
from experiments._b300_flash import (
    ABLATIONS,
    ALL_ACCEPTED,
    FULL,
    LOADS,
    METRICS,
    NOSPEC,
    SEEDS,
    SHOWN,
    SPECULATIVE,
    Arm,
    Cell,
    Constants,
    Fitted,
    Played,
    Variant,
    bank_of,
    curve_at,
    fit_constants,
    fit_level,
    load_measured,
    mean_length,
    play,
    prices,
    published_levels,
)
from experiments._validate import BANDS, Case, RunOptions, Tables, predictions
from experiments._validate_b300_page import NAME, TARGET, headline, page_section

#: Confidences of the adaptive arm's head: what is assumed of it first, then what else it could be.
QUALITIES = ("recorded", "perfect", "overconfident:0.05", "overconfident:0.1", "constant")
ADAPTIVE = SPECULATIVE[-1]


# -- running ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ArmRun:
    """What was replayed of one arm: its level, and runs by load, seed by seed, at that level and the published ones."""

    arm: Arm
    level: float
    published: tuple[float, float, float]
    own: Mapping[int, tuple[Played, ...]]
    others: tuple[Mapping[int, Cell], ...]


def run_case(options: RunOptions) -> dict[str, pd.DataFrame]:
    """Fit and predict; `quick`: one seed, three arms, three loads."""
    seeds, loads = (SEEDS[:1], (1, 16, 128)) if options.quick else (SEEDS, LOADS)
    arms = (SPECULATIVE[0], SPECULATIVE[3], ADAPTIVE) if options.quick else SPECULATIVE
    found = fit_constants(loads=loads, seeds=seeds)
    runs = _all(options.jobs, "arms", _run_arm, [(arm, found.constants, loads, seeds) for arm in (NOSPEC, *arms)])
    cells = pd.DataFrame([_cell_row(run, users) for run in runs for users in loads])
    tables = {
        "validation": predictions([row for run in runs for users in loads for row in _rows(run, users)]),
        "cells": cells,
        "constants": _constants(found),
        "arms": pd.DataFrame([_arm_row(run) for run in runs if run.arm.gamma]),
    }
    if options.ablate:
        heads = [(one, found.constants, loads) for one in QUALITIES]
        tables["confidence"] = pd.DataFrame(_all(options.jobs, "confidences", _head_row, heads))
        variants = [(variant,) for variant in (FULL, *ABLATIONS)]
        tables["ablation"] = pd.DataFrame(_all(options.jobs, "ablations", _ablated, variants))
    return tables


def _all(jobs: int, what: str, call: Any, tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
    parallel = joblib.Parallel(n_jobs=min(jobs, len(tasks)), return_as="generator", batch_size=1)
    work = parallel(joblib.delayed(call)(*task) for task in tasks)
    return list(tqdm(work, total=len(tasks), desc=what, mininterval=1.0))


def _run_arm(arm: Arm, constants: Constants, loads: Sequence[int], seeds: Sequence[int]) -> ArmRun:
    if not arm.gamma:
        own = {users: tuple(_slim(play(arm, users, constants, seed=seed)) for seed in seeds) for users in loads}
        return ArmRun(arm, 0.0, (0.0, 0.0, 0.0), own, ())
    level = fit_level(arm, constants, seeds=seeds)
    low, high = published_levels(arm.gamma)
    published = (0.0, low, high)
    own = {
        users: tuple(_slim(play(arm, users, constants, level=level, seed=seed)) for seed in seeds) for users in loads
    }
    others = tuple(
        {users: _mean([play(arm, users, constants, level=one, seed=seed).cell for seed in seeds]) for users in loads}
        for one in published
    )
    return ArmRun(arm, level, published, own, others)


def _slim(run: Played) -> Played:
    """The run with the columns of steps that tables need: the rest is megabytes on the way to another process."""
    steps = {name: run.records.steps[name] for name in ("batch_tokens", "prefill_tokens")}
    return replace(run, records=replace(run.records, steps=steps, requests={}))


def _mean(cells: Sequence[Cell]) -> Cell:
    return Cell(*(float(np.mean([getattr(cell, metric) for cell in cells])) for metric in METRICS))


# -- tables ----------------------------------------------------------------------------------------------


def use_of(arm: Arm, users: int) -> str:
    """What became of a measured cell: the fit saw no speculation and every arm's one user."""
    if arm is NOSPEC or arm.name == NOSPEC.name or users == 1:
        return "fitted"
    return "scored" if (arm.name, users) in load_measured() else "unknown"


def _rows(run: ArmRun, users: int) -> list[dict[str, Any]]:
    arm, predicted = run.arm, _mean([one.cell for one in run.own[users]])
    known, first = load_measured().get((arm.name, users)), run.own[users][0]
    use = use_of(arm, users)
    return [
        {
            "case": NAME,
            "arm": arm.name,
            "load": f"{users} users" if users > 1 else "1 user",
            "metric": metric,
            "unit": "tok/s",
            "predicted": getattr(predicted, metric),
            "measured": np.nan if known is None else getattr(known, metric),
            "use": use,
            "target": TARGET if use == "scored" else np.nan,
            "n_scored": int(first.summary["n_scored"]),
            "cost_source": f"{prices().label};host=fitted",
            "drafts_source": first.drafts_source,
            "extrapolated": any(one.records.extrapolated for one in run.own[users]),
        }
        for metric in METRICS
    ]


def _cell_row(run: ArmRun, users: int) -> dict[str, Any]:
    arm, played = run.arm, run.own[users]
    predicted, known = _mean([one.cell for one in played]), load_measured().get((arm.name, users))
    row: dict[str, Any] = {"case": NAME, "arm": arm.name, "concurrency": users}
    for metric in METRICS:
        row[metric] = getattr(predicted, metric)
    for metric in METRICS:
        value = np.nan if known is None else getattr(known, metric)
        row |= {f"{metric}_measured": value, f"{metric}_error": row[metric] / value - 1.0}
    row["use"] = use_of(arm, users)
    speeds = [one.cell.throughput_tok_s for one in played]
    row["seed_spread"] = max(speeds) / min(speeds) - 1.0
    for name, index in (("published", 0), ("published_low", 1), ("published_high", 2)):
        for metric in METRICS:
            row[f"{metric}_{name}"] = getattr(run.others[index][users], metric) if run.others else np.nan
    for name, of in (
        ("mean_step_ms", lambda one: one.summary["mean_step_ms"]),
        ("tokens_per_step", lambda one: one.summary["accepted_length"]),
        ("verification_budget", lambda one: one.summary["verification_budget"]),
        ("eager_steps", lambda one: one.eager),
        ("steps_with_prompts", lambda one: float(np.mean(one.records.steps["prefill_tokens"] > 0))),
    ):
        row[name] = float(np.mean([of(one) for one in played]))
    return row


def _constants(found: Fitted) -> pd.DataFrame:
    constants = found.constants
    return pd.DataFrame(
        [
            {
                "offset_ms": constants.offset_ms,
                "root_ms": constants.root_ms,
                "gap_ms": constants.gap_ms,
                "misfit": found.misfit,
                "replays": found.replays,
            }
        ]
    )


def _arm_row(run: ArmRun) -> dict[str, Any]:
    arm, known = run.arm, load_measured()[run.arm.name, 1]
    predicted = _mean([one.cell for one in run.own[1]])
    lengths = [mean_length(curve_at(level, arm.gamma)) for level in run.published]
    return {
        "arm": arm.name,
        "policy": arm.policy,
        "gamma": arm.gamma,
        "level": run.level,
        "tokens_per_step": float(np.mean([one.summary["accepted_length"] for one in run.own[1]])),
        "tps_per_user_error": predicted.tps_per_user / known.tps_per_user - 1.0,
        "throughput_tok_s_error": predicted.throughput_tok_s / known.throughput_tok_s - 1.0,
        "published_tokens_per_step": lengths[0],
        "published_low": lengths[1],
        "published_high": lengths[2],
    }


def _head_row(name: str, constants: Constants, loads: Sequence[int]) -> dict[str, Any]:
    """The adaptive arm with another head, its acceptance fitted again to its own cell."""
    quality, seeds = parse_quality(name), SEEDS[:1]
    level = fit_level(ADAPTIVE, constants, seeds=seeds, quality=quality)
    ece, auc = measured_quality(bank_of(), Tilt((level,), (level,)), ADAPTIVE.gamma, quality)
    row: dict[str, Any] = {"confidence": name, "ece": float(ece.mean()), "auc": float(auc.mean()), "level": level}
    for users in loads:
        run = play(ADAPTIVE, users, constants, level=level, seed=seeds[0], quality=quality)
        row[f"throughput_{users}"] = run.cell.throughput_tok_s
    return row


def _ablated(variant: Variant) -> dict[str, Any]:
    """One mechanism left out: constants and levels fitted again, one seed."""
    seeds = SEEDS[:1]
    found = fit_constants(variant, seeds=seeds)
    arms = {arm.name: arm for arm in SPECULATIVE}
    levels, out_of_reach = {}, []
    for name in ("k1", "k5", "k7", "adaptive"):
        try:
            levels[name] = fit_level(arms[name], found.constants, variant=variant, seeds=seeds)
        except InputError:
            # A step so slow that even a drafter that is always right does not give the measured speed.
            levels[name] = ALL_ACCEPTED
            out_of_reach.append(name)

    def cell(name: str, users: int) -> Cell:
        return play(arms[name], users, found.constants, level=levels[name], seed=seeds[0], variant=variant).cell

    scored = [users for users in LOADS if use_of(arms["k1"], users) == "scored"]
    errors = np.array([np.exp(cell("k1", n).log_ratio(load_measured()["k1", n])) - 1.0 for n in scored])
    row = {
        "variant": variant.name,
        "change": variant.change,
        "offset_ms": found.constants.offset_ms,
        "root_ms": found.constants.root_ms,
        "gap_ms": found.constants.gap_ms,
        "misfit": found.misfit,
        "k1_median_error": float(np.median(np.abs(errors))),
        "k1_worst_error": float(np.abs(errors).max()),
        "k1_mean_error": float(errors.mean()),
        "out_of_reach": " ".join(out_of_reach),
    }
    return row | {f"{name}_{users}": cell(name, users).throughput_tok_s for name, users in SHOWN}


# -- figures ---------------------------------------------------------------------------------------------

#: Color and marker by arm; Okabe and Ito's colors.
LOOKS = {
    "nospec": ("#7F7F7F", "x"),
    "k1": ("#0072B2", "s"),
    "k3": ("#56B4E9", "<"),
    "k5": ("#CC79A7", "D"),
    "k7": ("#009E73", "v"),
    "adaptive": ("#D55E00", "o"),
}
_TITLES = {"throughput_tok_s": "Throughput, tok/s (four GPUs)", "tps_per_user": "tok/s and user (1 / median TPOT)"}


def draw_case(tables: Tables, folder: Path, stem: str) -> None:
    """Predictions and measurements by load with the scored errors; and what each mechanism is worth."""
    _draw_loads(tables, folder, stem)
    if "ablation" in tables:
        _draw_mechanisms(tables, folder, f"{stem}-mechanisms")


@style()
def _draw_loads(tables: Tables, folder: Path, stem: str) -> None:
    cells = tables["cells"]
    title = "A vLLM server predicted from its profile and a run without speculation"
    fig, axes = new_figure(3, width=9.6, height=4.0, title=title)
    caption(
        fig,
        "Lines: predicted. Marks: measured; hollow: seen by a fit (no speculation, and every arm's one user), filled: "
        "scored (k = 1, whose output was invalid: cost only). Lines without marks: no measurement is known here. Band: "
        "the adaptive arm with the published acceptance of this checkpoint (78 drafts), 95 %. Step and draft times: "
        "measured (4x B300, DeepSeek-V4-Flash-0731, vLLM). Prompt lengths: assumed. Acceptance: published curve, its "
        "level from one user. Confidences and spread of acceptance: synthetic.",
    )
    for ax, metric in zip(axes[0], ("throughput_tok_s", "tps_per_user"), strict=False):
        _loads(ax, cells, metric)
        ax.set_title(_TITLES[metric])
    _errors(axes[0][2], cells)
    _collapse(axes[0][0], cells)
    legend(axes[0][0], "upper left")
    marks = [
        Line2D([], [], linestyle="none", marker="s", markersize=5, color=INK, label="measured, scored"),
        Line2D(
            [],
            [],
            linestyle="none",
            marker="s",
            markersize=5,
            color=INK,
            markerfacecolor="white",
            label="measured, fitted",
        ),
    ]
    legend(axes[0][1], "upper right", handles=marks)
    save_figure(fig, folder, stem)


def _collapse(ax: Axes, cells: pd.DataFrame) -> None:
    rows = cells[(cells["arm"] == "k7") & (cells["concurrency"] == 128)]
    if not rows.empty:
        place = (LOADS.index(128), float(rows["throughput_tok_s"].iloc[0]))
        ax.annotate(
            "8 x 128 = 1,024 tokens:\nevery prompt leaves\nthe captured graphs", place, xytext=(12, -58),
            textcoords="offset points", ha="center", fontsize=7.5, color=LOOKS["k7"][0],
            arrowprops={"arrowstyle": "-", "color": LOOKS["k7"][0], "linewidth": 0.8},
        )  # fmt: skip


def _loads(ax: Axes, cells: pd.DataFrame, metric: str) -> None:
    for arm, (color, marker) in LOOKS.items():
        rows = cells[cells["arm"] == arm].sort_values("concurrency")
        if rows.empty:
            continue
        heavy = arm == "adaptive"
        ax.plot(
            _at(rows["concurrency"]), rows[metric], color=color, linewidth=2.0 if heavy else 1.2, label=arm, zorder=3
        )
        if heavy:
            low, high = rows[f"{metric}_published_low"], rows[f"{metric}_published_high"]
            ax.fill_between(_at(rows["concurrency"]), low, high, color=color, alpha=0.14, linewidth=0, zorder=1)
        known = rows[rows["use"] != "unknown"]
        face = [color if use == "scored" else "white" for use in known["use"]]
        look: dict[str, Any] = {"facecolors": face, "edgecolors": color} if marker != "x" else {"color": color}
        at = _at(known["concurrency"])
        ax.scatter(at, known[f"{metric}_measured"], s=26, marker=marker, linewidths=1.1, zorder=4, **look)
    _users(ax)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.10g}"))


def _at(users: pd.Series) -> list[int]:
    """Loads are evenly spaced."""
    return [LOADS.index(int(one)) for one in users]


def _users(ax: Axes) -> None:
    ax.set_xticks(range(len(LOADS)), [str(users) for users in LOADS])
    ax.set_xlabel("concurrent users")


def _errors(ax: Axes, cells: pd.DataFrame) -> None:
    for half, shade in zip(BANDS, (0.12, 0.06), strict=True):
        ax.axhspan(-100 * half, 100 * half, color=INK, alpha=shade, linewidth=0, zorder=1)
    ax.axhline(0.0, color=SOFT, linewidth=0.9, zorder=2)
    scored, fitted = cells[cells["use"] == "scored"], cells[(cells["arm"] == "nospec")]
    for rows, name in ((fitted, "nospec, fitted"), (scored, "k1, scored")):
        for metric, line, marker in (("throughput_tok_s", "-", "o"), ("tps_per_user", "--", "^")):
            color = LOOKS[str(rows["arm"].iloc[0])][0]
            words = "throughput" if metric == "throughput_tok_s" else "tok/s/user"
            ax.plot(
                _at(rows["concurrency"]), 100 * rows[f"{metric}_error"], color=color, linestyle=line, linewidth=1.1,
                marker=marker, markersize=4.5, markerfacecolor=color if "scored" in name else "white",
                label=f"{name}: {words}", zorder=3,
            )  # fmt: skip
    _users(ax)
    ax.set_ylim(-19, 19)
    ax.set_ylabel("error of the prediction, %")
    ax.set_title("Errors; bands: 5 and 15 %")
    legend(ax, "upper left", ncols=1)


#: Changes that the figure shows; the page and ``ablation.csv`` have all.
SHOWN_CHANGES = 8
#: Where the axes end at the latest, percent: one bar or mark must not flatten the others.
_EDGE = 100.0


def largest_changes(table: pd.DataFrame, most: int = SHOWN_CHANGES) -> pd.DataFrame:
    """The rows of ``ablation`` that matter most, the largest first.

    A change counts by the most that it moves: the worst error of k = 1, or a prediction of another arm, in shares.
    """
    full, rest = table[table["variant"] == "full"].iloc[0], table[table["variant"] != "full"]
    moved = [(rest["k1_worst_error"] - float(full["k1_worst_error"])).abs()]
    moved += [(rest[f"{name}_{users}"] / float(full[f"{name}_{users}"]) - 1.0).abs() for name, users in SHOWN]
    size = np.max(np.array(moved), axis=0)
    return rest.iloc[np.argsort(-size, kind="stable")[:most]]


@style()
def _draw_mechanisms(tables: Tables, folder: Path, stem: str) -> None:
    table = tables["ablation"]
    full, rest = table[table["variant"] == "full"].iloc[0], largest_changes(table)
    left_out = len(table) - 1 - len(rest)
    moves = {arm: 100 * (rest["{}_{}".format(*arm)] / float(full["{}_{}".format(*arm)]) - 1.0) for arm in SHOWN}
    worst, mean = (100 * rest[f"k1_{name}_error"].to_numpy(dtype=np.float64) for name in ("worst", "mean"))
    farthest = max(float(worst.max()), *(float(move.abs().max()) for move in moves.values()))
    fig, axes = new_figure(
        2,
        width=9.4,
        height=1.4 + 0.33 * len(rest),
        title=f"What is left out or changed, and what it does: the {len(rest)} that matter most",
        sharey=True,
    )
    caption(
        fig,
        "One mechanism is left out or changed; constants and acceptance are fitted again to the same cells. Left: the "
        "scored errors of k = 1 at 16 to 256 users (bar: worst, dot: mean with its sign; dashed: worst with everything "
        "in). Right: by how much predictions of other arms move; k5 at 128 is k = 5 at 128 users."
        + (" An arrow with its value: beyond the axis." if farthest > _EDGE else "")
        + (f" {left_out} smaller changes: in ablation.csv." if left_out else "")
        + " One seed.",
    )
    left, right = axes[0]
    places = np.arange(len(rest))
    edge = min(_EDGE, 1.08 * float(worst.max()))
    left.barh(places, np.minimum(worst, edge), color="#56B4E9", height=0.62, alpha=0.55, zorder=2)
    for at, value in zip(places[worst > edge], worst[worst > edge], strict=True):
        _beyond(left, edge, float(at), float(value), "#0072B2")
    left.scatter(np.clip(mean, -edge, edge), places, s=20, color="#0072B2", zorder=3)
    left.axvline(100 * float(full["k1_worst_error"]), color=INK, linewidth=0.9, linestyle="--", zorder=3)
    left.axvline(0.0, color=SOFT, linewidth=0.9, zorder=1)
    left.set_yticks(places, [textwrap.fill(str(text), 26) for text in rest["change"]])
    left.set_ylim(len(rest) - 0.4, -0.6)
    left.set_xlim(min(-5.0, 1.2 * float(mean.min())), edge)
    left.set_xlabel("error, %")
    left.set_title("Errors of k = 1")
    low, high = (min(_EDGE, 5.0 + max(float((sign * move).max()) for move in moves.values())) for sign in (-1, 1))
    for (name, users), move in moves.items():
        color, marker = LOOKS[name]
        change = move.to_numpy(dtype=np.float64)
        inside = (change >= -low) & (change <= high)
        face = color if users == 128 else "white" if users == 16 else "#555555"
        right.scatter(
            change[inside], places[inside], s=26, marker=marker, facecolors=face, edgecolors=color, linewidths=1.0,
            label=f"{name} at {users}", zorder=3,
        )  # fmt: skip
        for at, value in zip(places[~inside], change[~inside], strict=True):
            _beyond(right, high if value > 0 else -low, float(at), float(value), color)
    right.axvline(0.0, color=SOFT, linewidth=0.9, zorder=1)
    right.set_xlim(-low, high)
    right.set_xlabel("change of the predicted throughput, %")
    right.set_title("Predictions of other arms")
    legend(right, "lower right")
    save_figure(fig, folder, stem)


def _beyond(ax: Axes, edge: float, at: float, value: float, color: str) -> None:
    """An arrow at the edge of the axis with the value that lies beyond it."""
    side = 1 if value > 0 else -1
    ax.scatter(edge, at, s=34, marker=">" if side > 0 else "<", color=color, zorder=4, clip_on=False)
    ax.annotate(
        f"{value:+.0f} %", (edge, at), xytext=(-7 * side, 0), textcoords="offset points",
        ha="right" if side > 0 else "left", va="center", fontsize=7.5, color=color, zorder=4,
    )  # fmt: skip


CASE = Case(
    name=NAME,
    title="A vLLM server with speculation",
    run=run_case,
    draw=draw_case,
    page=page_section,
    headline=headline,
)
