"""The panels of figures about drafters: acceptance, thresholds, reliability, depth and block length.

One color and marker belongs to one drafter in every figure (`drafter_style`). What was published is drawn thin, dotted
and hollow (`PUBLISHED`), what was recorded or measured here solid. Figures are built as in `dsim.figures`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from dsim.errors import InputError
from dsim.plotstyle import GRID, INK, SOFT, agg_renderer, arm_styles, panel_title, style
from dsim.published import published
from dsim.wording import DRAFTER_NAMES

FloatArray = npt.NDArray[np.float64]

#: The mean over domains, in tables and figures.
ALL = "all"


class DrafterStyle:
    """How one drafter looks and what it is called."""

    __slots__ = ("color", "label", "marker")

    def __init__(self, label: str, color: str, marker: str) -> None:
        self.label, self.color, self.marker = label, color, marker


_LOOKS = {
    "dspark": ("#D55E00", "o"),
    "dspark-rnn": ("#CC79A7", "D"),
    "dflash": ("#0072B2", "s"),
    "eagle3": ("#009E73", "v"),
    "mtp": ("#56B4E9", "^"),
}
_DRAFTERS = {key: DrafterStyle(name, *_LOOKS[key]) for key, name in DRAFTER_NAMES.items()}
#: Drafters in the order of figures.
DRAFTERS = tuple(_DRAFTERS)
#: Names in the published tables.
PAPER_DRAFTERS = {
    "DSpark": "dspark",
    "DSpark-markov": "dspark",
    "DSpark-rnn": "dspark-rnn",
    "DFlash": "dflash",
    "Eagle3": "eagle3",
}
#: The published target of Figs. 2 to 6.
PAPER_TARGET = "Qwen3-4B"
#: Line of what was published.
PUBLISHED: dict[str, Any] = {"linestyle": (0, (1.5, 1.5)), "linewidth": 1.2}


def drafter_of(text: str) -> str | None:
    """Key of the drafter that a description names (``dspark rnn 2 layers``, ``smollm2-mtp5``), or None.

    >>> [drafter_of(text) for text in ("dspark markov 2 layers", "smollm2-dspark-rnn", "DFlash", "mtp5", "mine")]
    ['dspark', 'dspark-rnn', 'dflash', 'mtp', None]
    """
    lower = text.lower()
    for key in ("dspark", "dflash", "eagle3", "mtp"):
        if key in lower:
            return "dspark-rnn" if key == "dspark" and "rnn" in lower else key
    return None


def drafter_style(drafter: str) -> DrafterStyle:
    """The look of a drafter: fixed for those of `DRAFTERS`, drawn from its name for any other."""
    if drafter in _DRAFTERS:
        return _DRAFTERS[drafter]
    look = arm_styles([drafter])[drafter]
    return DrafterStyle(drafter, look.color, look.marker)


# -- published curves ------------------------------------------------------------------------------------


def published_acceptance() -> pd.DataFrame:
    """Fig. 2: columns drafter (key), domain (``all``: the mean over domains), position, acceptance."""
    table = published("paper_fig2").rename(columns={"cond_acceptance": "acceptance"})
    return _keyed(table, ["position"], "acceptance")


def published_lengths() -> pd.DataFrame:
    """Table 1, Qwen3-4B: columns drafter, domain, accepted_length (the mean of the domain's benchmarks)."""
    table = published("paper_table1")
    return _keyed(table[table["target"] == PAPER_TARGET], [], "accepted_length")


def published_depth() -> pd.DataFrame:
    """Fig. 3: columns drafter, domain, layers, accepted_length (the mean of the domain's benchmarks)."""
    return _keyed(published("paper_fig3").rename(columns={"depth_layers": "layers"}), ["layers"], "accepted_length")


def published_draft_length() -> pd.DataFrame:
    """Fig. 4: columns drafter, domain, gamma, accepted_length."""
    return _keyed(published("paper_fig4"), ["gamma"], "accepted_length")


def comparable(table: pd.DataFrame, domains: Sequence[str]) -> pd.DataFrame:
    """The rows of a published table that belong to these domains; their mean only where the domains are the same."""
    same = set(table["domain"]) - {ALL} == set(domains) - {ALL}
    keep = table["domain"].isin([name for name in domains if name != ALL]) | (same & (table["domain"] == ALL))
    return table[keep]


def published_round() -> pd.DataFrame:
    """Fig. 4, right: columns drafter, gamma, latency_ms and overhead (over DFlash's round, a fraction)."""
    table = published("paper_fig4_latency")
    table["drafter"] = table["drafter"].map(PAPER_DRAFTERS)
    base = table[table["drafter"] == "dflash"].set_index("gamma")["latency_ms"]
    table["overhead"] = table["latency_ms"] / table["gamma"].map(base) - 1
    return table[["drafter", "gamma", "latency_ms", "overhead"]]


def published_sweep() -> pd.DataFrame:
    """Fig. 5: columns domain, threshold, tau (accepted tokens, bonus included), rejected, acceptance_rate."""
    table = published("paper_fig5").rename(
        columns={"accepted_tokens_per_step": "tau", "rejected_tokens_per_step": "rejected"}
    )
    table["acceptance_rate"] = table["acceptance_rate_pct"] / 100
    table["domain"] = table["domain"].str.lower()
    table = table[["domain", "threshold", "tau", "rejected", "acceptance_rate"]]
    every = table.groupby("threshold", sort=True)[["tau", "rejected", "acceptance_rate"]].mean().reset_index()
    every.insert(0, "domain", ALL)
    return pd.concat([table, every], ignore_index=True)


def _keyed(table: pd.DataFrame, by: list[str], value: str) -> pd.DataFrame:
    """Drafters by key, domains in lower case and averaged over benchmarks; then the mean over domains."""
    table = table.assign(drafter=table["drafter"].map(PAPER_DRAFTERS), domain=table["domain"].str.lower())
    means = table.groupby(["drafter", "domain", *by], sort=False)[value].mean().reset_index()
    every = means.groupby(["drafter", *by], sort=False)[value].mean().reset_index()
    every.insert(1, "domain", ALL)
    return pd.concat([means, every], ignore_index=True)


# -- figures ---------------------------------------------------------------------------------------------


# -- lines -----------------------------------------------------------------------------------------------


@style()
def value_line(
    ax: Axes,
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    look: DrafterStyle,
    *,
    low: npt.ArrayLike | None = None,
    high: npt.ArrayLike | None = None,
    dashed: bool = False,
    label: str | None = None,
    hollow: bool = False,
    size: float = 5.0,
    joined: bool = True,
) -> None:
    """A line with a marker a point, and thin bars from `low` to `high` where both are known.

    Parameters
    ----------
    dashed
        A second bank of the same drafter: dashed, markers in a lighter color.
    hollow
        What was published: thin, dotted, hollow markers.
    joined
        Draw the line between the points.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    options: dict[str, Any] = {"linestyle": (0, (4, 2)) if dashed else "-", "linewidth": 1.7}
    if hollow:
        options = dict(PUBLISHED)
    if not joined:
        options["linestyle"] = "none"
    if low is not None and high is not None:
        lows, highs = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        known = ~(np.isnan(lows) | np.isnan(highs) | np.isnan(ys))
        ax.vlines(xs[known], lows[known], highs[known], color=look.color, linewidth=1.1, alpha=0.55, zorder=2.6)
    ax.plot(
        xs,
        ys,
        color=look.color,
        marker=look.marker,
        markersize=size,
        label=label,
        **_faces(look, hollow, dashed),
        zorder=2.2 if hollow else 3,
        **options,
    )


@style()
def sweep_line(
    ax: Axes,
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    look: DrafterStyle,
    *,
    band: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    hollow: bool = False,
) -> None:
    """A line of many points with a band between two others; published ones have hollow markers."""
    if band is not None:
        low, high = (np.asarray(edge, dtype=np.float64) for edge in band)
        ax.fill_between(np.asarray(x, dtype=np.float64), low, high, color=look.color, alpha=0.18, linewidth=0, zorder=2)
    if hollow:
        value_line(ax, x, y, look, hollow=True, size=4.0)
    else:
        ax.plot(np.asarray(x), np.asarray(y), color=look.color, linewidth=1.8, zorder=3)


def _faces(look: DrafterStyle, hollow: bool, light: bool) -> dict[str, Any]:
    if not (hollow or light):
        return {"markerfacecolor": look.color, "markeredgecolor": "white", "markeredgewidth": 0.6}
    face = "white" if hollow else tuple(1 - 0.35 * (1 - part) for part in to_rgb(look.color))
    return {"markerfacecolor": face, "markeredgecolor": look.color, "markeredgewidth": 1.0}


@style()
def end_labels(
    ax: Axes, labels: Sequence[tuple[float, float, str, str]], *, gap_pt: float = 8.5, at: float | None = None
) -> None:
    """Names at the right ends of lines, moved apart where they would touch.

    Call it when the limits are final and all panels are drawn: places are found in pixels.

    Parameters
    ----------
    labels
        (x, y, text, color) of each line's last point; those with a NaN are left out.
    gap_pt
        Least distance of two names, points.
    at
        Where all names begin, on the horizontal axis; None: behind each line's own end.
    """
    placed = [item for item in labels if np.isfinite(item[0]) and np.isfinite(item[1])]
    if not placed:
        return
    fig = ax.figure
    if not isinstance(fig, Figure):
        raise RuntimeError("axes of a sub-figure cannot be labeled")
    fig.draw_without_rendering()
    agg_renderer(fig)
    per_pt = fig.dpi / 72
    order = sorted(placed, key=lambda item: item[1])
    points = np.array([ax.transData.transform((x, y)) for x, y, _, _ in order])
    frame = ax.get_window_extent()
    heights = _spread(points[:, 1], gap_pt * per_pt, frame.y0, frame.y1)
    start = None if at is None else float(ax.transData.transform((at, 0.0))[0])
    for (x, y, text, color), (left, level), height in zip(order, points, heights, strict=True):
        note = ax.annotate(
            text,
            (x, y),
            xytext=(11 + (0.0 if start is None else (start - left) / per_pt), (height - level) / per_pt),
            textcoords="offset points",
            va="center",
            ha="left",
            fontsize=7.8,
            color=color,
            annotation_clip=False,
            path_effects=[withStroke(linewidth=2.0, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0.5, "shrinkB": 3.5},
            parse_math=False,
        )
        note.set_in_layout(False)


def room_at_right(fig: Figure, inches: float) -> None:
    """Keep room at the right of all panels for `end_labels` (after the caption is placed)."""
    engine = fig.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        left, bottom, _, height = cast(Any, engine.get()["rect"])
        engine.set(rect=(left, bottom, 1 - inches / float(fig.get_size_inches()[0]) - left, height))


def share_limits(axes: Sequence[Axes], *, low: float | None = None, high: float | None = None) -> None:
    """One vertical scale for panels side by side, named at the first only."""
    found = np.array([ax.get_ylim() for ax in axes])
    bottom, top = float(found[:, 0].min()), float(found[:, 1].max())
    pad = 0.03 * (top - bottom)
    bottom = bottom - pad if low is None else low
    top = top + pad if high is None else high
    for i, ax in enumerate(axes):
        ax.set_ylim(bottom, top)
        if i:
            ax.tick_params(axis="y", labelleft=False)


def _spread(wanted: FloatArray, gap: float, low: float, high: float) -> FloatArray:
    """Sorted positions moved apart to at least `gap`, as near to the wanted ones as a few rounds bring them."""
    found = wanted.astype(np.float64).copy()
    for _ in range(200):
        moved = False
        for i in range(found.size - 1):
            short = gap - (found[i + 1] - found[i])
            if short > 1e-6:
                found[i] -= short / 2
                found[i + 1] += short / 2
                moved = True
        found = np.clip(found, low, max(high, low))
        if not moved:
            break
    return found


@style()
def positions_axes(ax: Axes, gamma: int) -> None:
    """Draft positions 1 to gamma on the horizontal axis."""
    ax.set_xlim(0.6, gamma + 0.4)
    ax.set_xticks(range(1, gamma + 1))


@style()
def row_name(ax: Axes, what: str, unit: str) -> None:
    """The vertical axis's name, with a line above it that says where the row comes from."""
    ax.set_ylabel(f"{what}\n{unit}", linespacing=1.35)


@style()
def text_in(ax: Axes, text: str, *, x: float = 0.04, y: float = 0.96, color: str = INK, size: float = 7.6) -> None:
    """A few words inside the axes (in shares of them), the left upper corner at (x, y)."""
    ax.text(
        x,
        y,
        text,
        transform=ax.transAxes,
        ha="left",
        va="top",
        fontsize=size,
        color=color,
        linespacing=1.3,
        parse_math=False,
        path_effects=[withStroke(linewidth=2.0, foreground="white")],
        zorder=6,
    )


# -- groups ----------------------------------------------------------------------------------------------


@style()
def grouped_points(
    ax: Axes,
    groups: Sequence[str],
    series: Sequence[tuple[DrafterStyle, Mapping[str, tuple[float, float, float]], bool, bool]],
    *,
    width: float = 0.64,
) -> None:
    """Points with bars side by side, a cluster a group.

    Parameters
    ----------
    groups
        Names on the horizontal axis.
    series
        Of each drafter: its look, {group: (value, low, high)}, whether it is published (hollow) and whether it is a
        second bank of its drafter (dashed).
    width
        Of a cluster.
    """
    many = len(series)
    for i, (look, values, hollow, dashed) in enumerate(series):
        shift = 0.0 if many == 1 else width * (i / (many - 1) - 0.5)
        own = [group for group in groups if group in values]
        at = [groups.index(group) + shift for group in own]
        parts = np.array([values[group] for group in own]).reshape(-1, 3)
        value_line(
            ax,
            at,
            parts[:, 0],
            look,
            low=parts[:, 1],
            high=parts[:, 2],
            hollow=hollow,
            dashed=dashed,
            joined=False,
            size=5.6,
        )
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.set_xticks(range(len(groups)), list(groups))
    ax.tick_params(axis="x", length=0)
    ax.grid(visible=False, axis="x")
    for edge in range(1, len(groups)):
        ax.axvline(edge - 0.5, color=GRID, linewidth=0.7, zorder=0)


@style()
def drafter_key(
    fig: Figure,
    entries: Sequence[tuple[str, DrafterStyle, bool]],
    *,
    published: Sequence[DrafterStyle] = (),
    kinds: tuple[str, str] | None = None,
) -> None:
    """Rows of markers and names between the figure's title and its panels. Call it after the caption is placed.

    Parameters
    ----------
    entries
        (label, look, whether it is a second bank of its drafter) of what is drawn filled.
    published
        Looks of drafters that are drawn hollow only.
    kinds
        What filled and what hollow markers stand for; None: not said.
    """
    faces = [(label, look.marker, _faces(look, hollow=False, light=light)) for label, look, light in entries]
    faces += [(look.label, look.marker, _faces(look, hollow=True, light=False)) for look in published]
    if kinds is not None:
        plain = DrafterStyle("", SOFT, "o")
        faces += [(f"filled: {kinds[0]}", "o", _faces(plain, hollow=False, light=False))]
        faces += [(f"hollow: {kinds[1]}", "o", _faces(plain, hollow=True, light=False))]
    handles = [
        Line2D([], [], linestyle="none", marker=marker, markersize=5.6, label=label, **face)
        for label, marker, face in faces
    ]
    width, height = (float(value) for value in fig.get_size_inches())
    for rows in range(1, len(handles) + 1):
        key = cast(Any, fig).legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.02 / width, 1 - _TITLE_IN / height),
            ncols=-(-len(handles) // rows),
            handlelength=0.8,
            handletextpad=0.4,
            columnspacing=1.4,
            borderpad=0.3,
            borderaxespad=0.0,
        )
        key.set_in_layout(False)
        fig.draw_without_rendering()
        box = key.get_window_extent(agg_renderer(fig))
        if box.width <= fig.bbox.width:
            break
        key.remove()
    engine = fig.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        left, bottom, wide, high = cast(Any, engine.get()["rect"])
        engine.set(rect=(left, bottom, wide, high - float(box.height) / float(fig.bbox.height)))


#: Room that the figure's title takes, inches.
_TITLE_IN = 0.27


# -- reliability -----------------------------------------------------------------------------------------


@style()
def reliability_axes(
    ax: Axes,
    stages: Sequence[tuple[str, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike | None, str, bool]],
    *,
    few: int = 10,
) -> None:
    """A reliability diagram: observed share against the predicted one, and the diagonal.

    Parameters
    ----------
    stages
        (name, predicted, observed, blocks or None, color, hollow) of each line; bins without blocks are NaN.
    few
        Bins with fewer blocks are drawn faint and not joined.
    """
    ax.plot([0, 1], [0, 1], color=SOFT, linewidth=0.8, linestyle="--", zorder=1.5)
    for name, x, y, blocks, color, hollow in stages:
        xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
        held = np.ones(xs.size, dtype=np.bool_) if blocks is None else np.asarray(blocks) >= few
        sure = held & ~np.isnan(ys)
        line: dict[str, Any] = PUBLISHED if hollow else {"linestyle": "-", "linewidth": 1.5}
        ax.plot(
            xs[sure],
            ys[sure],
            color=color,
            marker="o",
            markersize=3.6,
            markerfacecolor="white" if hollow else color,
            markeredgecolor=color,
            markeredgewidth=0.8,
            label=name,
            zorder=3,
            **line,
        )
        unsure = ~held & ~np.isnan(ys)
        ax.plot(xs[unsure], ys[unsure], linestyle="none", marker="o", markersize=3.0, color=color, alpha=0.3, zorder=2)
    ax.set_xlim(-0.02, 1.02)
    ax.set_ylim(-0.02, 1.02)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])


@style()
def histogram_axes(ax: Axes, edges: npt.ArrayLike, share: npt.ArrayLike, color: str, *, hollow: bool = False) -> None:
    """Shares of blocks by bin of the prediction, as bars from zero."""
    left, height = np.asarray(edges, dtype=np.float64), np.asarray(share, dtype=np.float64)
    ax.bar(
        left,
        height,
        width=1 / left.size,
        align="edge",
        color="white" if hollow else color,
        edgecolor=color,
        linewidth=0.7,
        alpha=1.0 if hollow else 0.75,
        zorder=2,
    )
    ax.set_xlim(-0.02, 1.02)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    ax.yaxis.set_major_locator(MaxNLocator(2))
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


# -- checks ----------------------------------------------------------------------------------------------


def one_title_a_column(axes: npt.NDArray[np.object_], titles: Sequence[str]) -> None:
    """Titles above the first row of panels."""
    if len(titles) != axes.shape[1]:
        raise InputError(field="titles", value=len(titles), expected=f"{axes.shape[1]}, one a column")
    for ax, title in zip(axes[0], titles, strict=True):
        panel_title(ax, title)
