"""The panels that the project's figures are made of.

A figure is built in this order: `new_figure`, `caption`, the panels, `save_figure`. The caption comes early
because the figure grows by it, and labels are placed in the room that is left. The style itself, colors and
files are in `dsim.plotstyle` and can be imported from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from dsim.errors import InputError
from dsim.frontier import LOAD, SPEED, THROUGHPUT, fitted_frontier, nondominated
from dsim.intervals import MIN_SEEDS, mean_interval
from dsim.plotstyle import (
    INK,
    LEADING_ARMS,
    ArmStyle,
    agg_renderer,
    arm_style,
    arm_styles,
    caption,
    legend,
    new_figure,
    panel_title,
    save_figure,
    style,
)
from dsim.published import published

__all__ = [
    "BUDGET",
    "ArmStyle",
    "annotate_match",
    "arm_style",
    "arm_styles",
    "caption",
    "cloud_axes",
    "frontier_axes",
    "legend",
    "load_axes",
    "load_fit",
    "new_figure",
    "overlay_published",
    "panel_title",
    "save_figure",
    "seeds_note",
]

FloatArray = npt.NDArray[np.float64]

BUDGET = "verification_budget"


def seeds_note(df: pd.DataFrame) -> str:
    """The sentence of a caption that says what points and bars are, from the column ``seed``."""
    n = int(df["seed"].nunique())
    if n == 1:
        return "Points: one seed, no interval."
    bars = "95 % t intervals" if n >= MIN_SEEDS else "ranges"
    return f"Points: means over {n} seeds; bars: {bars} over the seeds."


@style()
def frontier_axes(
    ax: Axes,
    df: pd.DataFrame,
    arms: Sequence[str],
    label_users: bool = True,
    *,
    load: str = LOAD,
    log: bool = False,
    legend_loc: str | None = "upper right",
) -> None:
    """Draw throughput (tok/s/GPU) against speed (tok/s/user), one line an arm, one point a load.

    Every point is the mean over seeds, with thin bars for the interval over seeds in both directions. Within
    an arm the points that none of its own points dominates are filled and joined by a solid line; dominated
    ones are hollow, and a faint dotted line shows the order of loads through all of them.

    Parameters
    ----------
    ax
        From `new_figure`. Limits are set here; place the caption before (see the module's text).
    df
        One row a run: arm, seed, `load`, tps_per_user, throughput_tok_s_gpu.
    arms
        Which arms, in the order of the legend.
    label_users
        Write the number of users beside a few points of the leading arms, where there is room.
    log
        Logarithmic axes.
    legend_loc
        Where the legend goes; None: no legend.
    """
    _require(df, arms, ("seed", load, SPEED, THROUGHPUT))
    styles = arm_styles(arms)
    drawn: dict[str, pd.DataFrame] = {}
    for order, arm in enumerate(arms):
        means = _means(df[df["arm"] == arm], load)
        drawn[arm] = means
        x, y = means["x"].to_numpy(), means["y"].to_numpy()
        look, lead = styles[arm], arm in LEADING_ARMS
        z = 3 + 0.01 * order + (1 if lead else 0)
        kept = nondominated(x, y)
        if not kept.all():
            ax.plot(x, y, color=look.color, linewidth=0.8, linestyle=":", alpha=0.7, zorder=z)
        front = np.flatnonzero(kept)[np.argsort(x[kept], kind="stable")]
        ax.errorbar(
            x,
            y,
            xerr=np.abs(means[["x_lo", "x_hi"]].to_numpy().T - x),
            yerr=np.abs(means[["y_lo", "y_hi"]].to_numpy().T - y),
            fmt="none",
            ecolor=look.color,
            elinewidth=0.8,
            alpha=0.65,
            zorder=z,
        )
        size = _marker_size(look.marker)
        # The line is the one that `dsim.frontier` reads matched values from: straight in logarithms.
        line_x, line_y = _log_log_path(x[front], y[front])
        ax.plot(
            line_x,
            line_y,
            color=look.color,
            linestyle=look.linestyle,
            linewidth=1.9 if lead else 1.2,
            marker=look.marker,
            markevery=PATH_POINTS,
            markersize=size,
            markeredgewidth=1.2 if look.marker == "x" else 0.6,
            markeredgecolor=look.color if look.marker == "x" else "white",
            label=arm,
            zorder=z,
        )
        ax.plot(
            x[~kept],
            y[~kept],
            linestyle="none",
            marker=look.marker,
            markersize=size - 0.6,
            markerfacecolor="white",
            markeredgecolor=look.color,
            markeredgewidth=0.9,
            zorder=z + 0.3,
        )
    ax.set_xlabel("tok/s/user (1 / median TPOT)")
    ax.set_ylabel("output tok/s/GPU")
    if log:
        ax.set_xscale("log")
        ax.set_yscale("log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(_plain))
            axis.set_minor_formatter(FuncFormatter(_plain_125))
    else:
        _from_zero(ax)
        ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    # The limits must not move any more when labels are placed by pixels.
    ax.set_xlim(ax.get_xlim())
    ax.set_ylim(ax.get_ylim())
    if legend_loc is not None:
        legend(ax, legend_loc)
    if label_users:
        _label_loads(ax, drawn, styles)


#: Points of a drawn line from one operating point to the next (every so many carry a marker).
PATH_POINTS = 24


def _log_log_path(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The points, and between them `PATH_POINTS` - 1 others on a line that is straight in log-log coordinates."""
    at = np.linspace(0, x.size - 1, PATH_POINTS * (x.size - 1) + 1)
    known = np.arange(x.size)
    logarithmic = bool(np.all(x > 0) and np.all(y > 0))
    line_x, line_y = (
        np.exp(np.interp(at, known, np.log(values))) if logarithmic else np.interp(at, known, values)
        for values in (x, y)
    )
    # The operating points themselves, without the rounding of exp(log(...)).
    line_x[::PATH_POINTS], line_y[::PATH_POINTS] = x, y
    return line_x, line_y


def _from_zero(ax: Axes, *, vertical: bool = True) -> None:
    """Start linear axes at zero, with just enough room below it that a marker at zero is not cut."""
    right, top = ax.get_xlim()[1], ax.get_ylim()[1]
    ax.set_xlim(-0.012 * right, right)
    if vertical:
        ax.set_ylim(-0.015 * top, top)


def _marker_size(marker: str) -> float:
    return {"*": 8.5, "D": 4.8, "x": 5.0, "P": 6.0, "s": 5.2}.get(marker, 5.8)


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:,.0f}" if value >= 1 or value == 0 else f"{value:g}"


def _plain_125(value: float, _position: int | None = None) -> str:
    lead = f"{value:.0e}"[0]
    return _plain(value) if lead in "25" else ""


def _require(df: pd.DataFrame, arms: Sequence[str], columns: Sequence[str]) -> None:
    for column in ("arm", *columns):
        if column not in df.columns:
            raise InputError(f"the table has no column '{column}'", field=column, expected=", ".join(("arm", *columns)))
    known = list(dict.fromkeys(df["arm"]))
    for arm in arms:
        if arm not in known:
            raise InputError(f"no runs of arm '{arm}'", field="arms", expected=f"some of {known}")
    if not arms:
        raise InputError("no arm to draw", field="arms", expected=f"some of {known}")


def _means(rows: pd.DataFrame, load: str) -> pd.DataFrame:
    """Mean and interval over seeds at each load: columns load, x, x_lo, x_hi, y, y_lo, y_hi."""
    found = []
    for value, group in rows.groupby(load, sort=True):
        across = mean_interval(group[SPEED].to_numpy())
        up = mean_interval(group[THROUGHPUT].to_numpy())
        found.append((value, across.mean, across.lo, across.hi, up.mean, up.lo, up.hi))
    means = pd.DataFrame(found, columns=["load", "x", "x_lo", "x_hi", "y", "y_lo", "y_hi"])
    # A load that no seed measured (no request scored) has no point.
    return means.dropna().reset_index(drop=True)


_LABEL_PT = 7.0
_LABEL_ID = "dsim-load"
_OFFSETS = ((5, 5), (-5, -5), (6, 0), (0, 7), (-6, 0), (0, -7), (5, -5), (-5, 5), (10, 6), (-10, -6))


def _label_loads(ax: Axes, drawn: Mapping[str, pd.DataFrame], styles: Mapping[str, ArmStyle]) -> None:
    """Write loads beside a few points, each where it covers neither a line, a point nor another label.

    A label that fits nowhere is left out: fewer labels beat a cluttered figure.
    """
    named = [arm for arm in drawn if arm in LEADING_ARMS] or list(drawn)[:2]
    renderer = _laid_out(ax)
    obstacles = _pixels(ax)
    taken: list[Bbox] = []
    box = ax.get_legend()
    if box is not None:
        taken.append(box.get_window_extent(renderer))
    frame = ax.get_window_extent(renderer)
    # The arm furthest out is labeled on its outer side, the others on the inner side first.
    outermost = max(named, key=lambda arm: float((drawn[arm]["x"] * drawn[arm]["y"]).max()))
    for arm in named:
        means = drawn[arm]
        wanted = _few(means["load"].tolist())
        first = True
        for load, x, y in means[["load", "x", "y"]].to_numpy(dtype=np.float64).tolist():
            if load not in wanted:
                continue
            text = ax.annotate(
                f"{load:g} user{'' if load == 1 else 's'}" if first else f"{load:g}",
                (x, y),
                xytext=(0, 0),
                textcoords="offset points",
                fontsize=_LABEL_PT,
                color=_darker(styles[arm].color),
                zorder=8,
                path_effects=[withStroke(linewidth=1.8, foreground="white")],
            )
            text.set_in_layout(False)
            text.set_gid(_LABEL_ID)
            offsets = _OFFSETS if arm == outermost else (*_OFFSETS[1::2], *_OFFSETS[::2])
            placed = _place(text, offsets, obstacles, taken, frame, renderer)
            if placed is None:
                text.remove()
            else:
                taken.append(placed)
                first = False


def _laid_out(ax: Axes) -> Any:
    """Lay the figure out, so that pixels mean something, and return what measures them."""
    fig = ax.figure
    if not isinstance(fig, Figure):
        raise RuntimeError("axes of a sub-figure cannot be labeled")
    fig.draw_without_rendering()
    return agg_renderer(fig)


def _place(
    text: Any,
    offsets: Sequence[tuple[float, float]],
    obstacles: FloatArray,
    taken: Sequence[Bbox],
    frame: Bbox,
    renderer: Any,
) -> Bbox | None:
    """Put a text at the first offset (points) where it covers nothing; None where there is no such place."""
    for dx, dy in offsets:
        _shift(text, dx, dy)
        box = _padded(text.get_window_extent(renderer), 1)
        inside = box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1
        if inside and not _covered(box, obstacles) and not any(box.overlaps(other) for other in taken):
            return box
    return None


def _shift(text: Any, dx: float, dy: float) -> None:
    text.set_position((dx, dy))
    text.set_ha("left" if dx > 0 else "right" if dx < 0 else "center")
    text.set_va("bottom" if dy > 0 else "top" if dy < 0 else "center")


def _padded(box: Bbox, pixels: float) -> Bbox:
    return Bbox.from_extents(box.x0 - pixels, box.y0 - pixels, box.x1 + pixels, box.y1 + pixels)


def _covered(box: Bbox, pixels: FloatArray) -> int:
    """How many of the pixel positions [n, 2] lie in the box."""
    x, y = pixels[:, 0], pixels[:, 1]
    return int(((x >= box.x0) & (x <= box.x1) & (y >= box.y0) & (y <= box.y1)).sum())


def _pixels(ax: Axes) -> FloatArray:
    """All lines of the axes as pixel positions, dense enough that no label slips between two of them."""
    along = np.linspace(0.0, 1.0, 60)[:, None]
    pieces = [np.empty((0, 2))]
    for line in ax.lines:
        corners = np.asarray(ax.transData.transform(line.get_xydata()), dtype=np.float64)
        pieces.append(corners)
        if line.get_linestyle() != "None":
            pieces += [a + along * (b - a) for a, b in pairwise(corners)]
    return np.concatenate(pieces)


def _few(loads: Sequence[float], most: int = 5) -> list[float]:
    """The lowest, the highest and a few in between."""
    if len(loads) <= most:
        return list(loads)
    chosen = np.unique(np.round(np.linspace(0, len(loads) - 1, most)).astype(int))
    return [loads[index] for index in chosen]


def _darker(color: str) -> tuple[float, float, float]:
    red, green, blue = to_rgb(color)
    return (0.75 * red, 0.75 * green, 0.75 * blue)


_GAIN_ID = "dsim-gain"
# Shorter than its head and its foot together, an arrow is a blot.
_SHORT_ARROW_PT = 9.0
# Where a gain may stand: share of the way along its arrow, and offsets in points, best first.
_GAIN_PLACES: dict[bool, tuple[tuple[float, tuple[tuple[float, float], ...]], ...]] = {
    True: (
        *((share, ((5, 0), (-5, 0))) for share in (0.5, 0.35, 0.65, 0.2, 0.8)),
        (1.0, ((5, 5), (-5, 5), (5, -5))),
        (0.0, ((-5, -5), (5, -5))),
    ),
    False: (
        *((share, ((0, -5), (0, 5))) for share in (0.5, 0.35, 0.65)),
        (1.0, ((6, 0), (5, -5), (5, 5), (-5, -5))),
        (0.0, ((5, -5), (-6, 0))),
    ),
}


@style()
def annotate_match(ax: Axes, row: Mapping[str, Any] | pd.Series, text: str | None = None) -> bool:
    """Draw one matched comparison: a dashed arrow from the baseline to the arm, and the gain beside it.

    Equal speed gives a vertical arrow ("+35 % throughput"), equal throughput a horizontal one ("+60 %
    tok/s/user"); one of each from the same baseline point makes the corner of the paper's Fig. 7. Where the two points
    nearly coincide a dot stands for the arrow. Limits must be final.

    Parameters
    ----------
    row
        A row of `dsim.frontier.matched_table` (matched_on, anchor, value, baseline_value, ratio are read).
    text
        Other words than the gain.

    Returns
    -------
    bool
        False, and nothing is drawn, where the row was not reached.
    """
    anchor, value, base, ratio = (float(row[name]) for name in ("anchor", "value", "baseline_value", "ratio"))
    if np.isnan([anchor, value, base, ratio]).any():
        return False
    upright = str(row["matched_on"]) == SPEED
    start, end = ((anchor, base), (anchor, value)) if upright else ((base, anchor), (value, anchor))
    others = _pixels(ax)
    ax.plot(*start, marker="o", color=INK, markersize=3.4, zorder=7)
    arrow = ax.lines[-1]
    a, b = ax.transData.transform([start, end])
    if np.abs(b - a).max() >= _SHORT_ARROW_PT * _laid_out(ax).points_to_pixels(1.0):
        ax.plot(*zip(start, end, strict=True), color=INK, linewidth=1.0, linestyle=(0, (3.5, 2)), zorder=6)
        arrow = ax.lines[-1]
        grows = value >= base
        head = ("^" if grows else "v") if upright else (">" if grows else "<")
        ax.plot(*end, marker=head, color=INK, markersize=5.0, markeredgewidth=0, zorder=7)
    gain = f"{100 * (ratio - 1):+.0f} %"
    words = text if text is not None else f"{gain} {'throughput' if upright else 'tok/s/user'}"
    _place_gain(ax, words, start, end, upright, others, arrow)
    return True


def _place_gain(
    ax: Axes,
    words: str,
    start: tuple[float, float],
    end: tuple[float, float],
    upright: bool,
    others: FloatArray,
    arrow: Artist,
) -> None:
    """Write the gain beside its arrow, where it covers least; load labels in the way are taken out."""
    renderer = _laid_out(ax)
    gains = [_padded(item.get_window_extent(renderer), 1) for item in ax.texts if item.get_gid() == _GAIN_ID]
    best: tuple[float, Any] | None = None
    for share, offsets in _GAIN_PLACES[upright]:
        for dx, dy in offsets:
            label = ax.annotate(
                words,
                _between(ax, start, end, share),
                xytext=(0, 0),
                textcoords="offset points",
                fontsize=7.5,
                fontweight="bold",
                color=INK,
                zorder=9,
                parse_math=False,
                bbox={
                    "boxstyle": "square,pad=0.15",
                    "facecolor": "white",
                    "edgecolor": "none",
                    "alpha": 0.85,
                },
                gid=_GAIN_ID,
            )
            label.set_in_layout(False)
            _shift(label, dx, dy)
            box = _padded(label.get_window_extent(renderer), 1)
            cost = _covered(box, others) + 1000.0 * sum(box.overlaps(other) for other in gains)
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = (cost, label)
            else:
                label.remove()
    if best is None:
        raise RuntimeError("no place was tried for the gain")
    covered = [_padded(best[1].get_window_extent(renderer), 1), _padded(arrow.get_window_extent(renderer), 1)]
    for item in [item for item in ax.texts if item.get_gid() == _LABEL_ID]:
        extent = item.get_window_extent(renderer)
        if any(extent.overlaps(box) for box in covered):
            item.remove()


def _between(ax: Axes, start: tuple[float, float], end: tuple[float, float], share: float) -> tuple[float, float]:
    """A point of the drawn segment, whatever the axes' scale."""
    a, b = ax.transData.transform([start, end])
    x, y = ax.transData.inverted().transform(a + share * (b - a))
    return float(x), float(y)


@style()
def cloud_axes(ax: Axes, df: pd.DataFrame, arms: Sequence[str], *, legend_loc: str | None = "upper right") -> None:
    """Telemetry windows of open-loop runs as a cloud an arm, with `fitted_frontier` along its upper edge.

    Parameters
    ----------
    df
        One row a window: arm, tps_per_user, throughput_tok_s_gpu (NaN or 0: nothing to draw).
    arms
        Which arms, in the order of the legend.
    """
    _require(df, arms, (SPEED, THROUGHPUT))
    styles = arm_styles(arms)
    for order, arm in enumerate(arms):
        rows = df[df["arm"] == arm]
        x, y = rows[SPEED].to_numpy(dtype=np.float64), rows[THROUGHPUT].to_numpy(dtype=np.float64)
        look = styles[arm]
        shown = (x > 0) & (y > 0)
        ax.scatter(
            x[shown],
            y[shown],
            s=5,
            color=look.color,
            alpha=_alpha(int(shown.sum())),
            linewidths=0,
            zorder=2,
            rasterized=True,
        )
        line_x, line_y = fitted_frontier(x, y)
        _fitted_line(ax, line_x, line_y, look, arm, 3 + 0.01 * order)
    # Room around a cloud that is small beside its distance from zero, and for the legend above it.
    right, top = ax.dataLim.max
    if np.isfinite([right, top]).all():
        ax.set_xlim(right=max(ax.get_xlim()[1], 1.06 * right))
        ax.set_ylim(top=max(ax.get_ylim()[1], 1.15 * top))
    _from_zero(ax)
    ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    ax.set_xlabel("tok/s/user (decode tokens a request-second)")
    ax.set_ylabel("output tok/s/GPU")
    if legend_loc is not None:
        legend(ax, legend_loc)


def load_fit(
    load: npt.ArrayLike, value: npt.ArrayLike, *, degree: int = 4, points: int = 200
) -> tuple[FloatArray, FloatArray]:
    """A smooth line through a quantity against load (for drawing only): a polynomial in sqrt(load).

    Least squares over all runs; the root spreads small loads, where both throughput and budget bend most.
    The degree is lowered to half the number of different loads, so that few loads give a plain line.

    Parameters
    ----------
    load, value
        [n] runs or windows; pairs with a NaN are left out.

    Returns
    -------
    x, y
        float64[points] from the smallest to the largest load; empty arrays with fewer than two loads.
    """
    x, y = np.asarray(load, dtype=np.float64), np.asarray(value, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise InputError("load and value do not match", value=(x.shape, y.shape), expected="equally long lists")
    if (x < 0).any() or np.isinf(x).any() or np.isinf(y).any():
        raise InputError(field="load", expected="finite numbers, loads >= 0")
    usable = ~(np.isnan(x) | np.isnan(y))
    x, y = x[usable], y[usable]
    different = np.unique(x)
    if different.size < 2:
        return np.empty(0), np.empty(0)
    fitted = np.polynomial.Polynomial.fit(np.sqrt(x), y, min(degree, different.size // 2))
    grid = np.linspace(different[0], different[-1], points)
    return grid, np.asarray(fitted(np.sqrt(grid)), dtype=np.float64)


_LOAD_LABELS = {THROUGHPUT: "output tok/s/GPU", BUDGET: "verification budget\n(target tokens a request a step)"}


@style()
def load_axes(
    ax: Axes,
    df: pd.DataFrame,
    arms: Sequence[str],
    y: str,
    *,
    load: str = LOAD,
    fit: bool = True,
    xlabel: str = "concurrent requests",
    ylabel: str | None = None,
    legend_loc: str | None = None,
) -> None:
    """Draw a quantity against load: every run (or window) as a dot, a fitted line an arm (`load_fit`).

    Parameters
    ----------
    df
        One row a run or window: arm, `load` and the column `y`.
    arms
        Which arms, in the order of the legend.
    y
        ``throughput_tok_s_gpu``, ``verification_budget`` or any other numeric column.
    fit
        Draw the fitted line; otherwise the means by load are joined.
    """
    _require(df, arms, (load, y))
    styles = arm_styles(arms)
    many = max(int((df["arm"] == arm).sum()) for arm in arms) > 150
    for order, arm in enumerate(arms):
        rows = df[df["arm"] == arm].dropna(subset=[load, y])
        look = styles[arm]
        ax.scatter(
            rows[load],
            rows[y],
            s=6 if many else 16,
            color=look.color,
            marker="o" if many else look.marker,
            alpha=_alpha(len(rows)),
            linewidths=0.9 if look.marker == "x" and not many else 0,
            zorder=2,
            rasterized=many,
        )
        if fit:
            line_x, line_y = load_fit(rows[load].to_numpy(), rows[y].to_numpy())
        else:
            means = rows.groupby(load, sort=True)[y].mean()
            line_x, line_y = means.index.to_numpy(dtype=np.float64), means.to_numpy(dtype=np.float64)
        _fitted_line(ax, line_x, line_y, look, arm, 3 + 0.01 * order)
    _from_zero(ax, vertical=y == THROUGHPUT)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel if ylabel is not None else _LOAD_LABELS.get(y, y))
    if y == THROUGHPUT:
        ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    if y == BUDGET:
        ax.set_ylim(bottom=min(0.8, ax.get_ylim()[0]))
    if legend_loc is not None:
        legend(ax, legend_loc)


def _alpha(count: int) -> float:
    """Many dots are drawn fainter, so that density shows."""
    return float(np.clip(12 / np.sqrt(max(count, 1)), 0.12, 0.7))


def _fitted_line(ax: Axes, x: FloatArray, y: FloatArray, look: ArmStyle, label: str, zorder: float) -> None:
    # Drawn even when empty: the arm keeps its place in the legend.
    ax.plot(
        x,
        y,
        color=look.color,
        linestyle=look.linestyle,
        linewidth=1.9,
        label=label,
        zorder=zorder,
        path_effects=[withStroke(linewidth=3.2, foreground="white", alpha=0.8)],
    )


_OVERLAYS = {
    "frontier": ("paper_fig7_lines", "tps", THROUGHPUT),
    "throughput": ("paper_fig8_throughput", LOAD, THROUGHPUT),
    "budget": ("paper_fig8_budget", LOAD, BUDGET),
}
_PAPER_ARMS = {"MTP-1": "mtp1", "DSpark-5": "dspark"}


@style()
def overlay_published(ax: Axes, what: str, model: str = "V4-Flash", *, scale: float = 1.0) -> list[Artist]:
    """Add the paper's own lines (Figs. 7 and 8), thin and dashed, in the colors of the arms they belong to.

    The paper's hardware is not named, so absolute throughput is not comparable with a simulated machine;
    `scale` multiplies the published vertical values, and the legend says so.

    Parameters
    ----------
    what
        ``frontier`` (Fig. 7), ``throughput`` or ``budget`` (Fig. 8).
    model
        ``V4-Flash`` or ``V4-Pro``.
    scale
        Factor > 0; 1 leaves the published numbers as they are.

    Raises
    ------
    InputError
        Unknown figure or model, or a scale that is not a number > 0.
    """
    if what not in _OVERLAYS:
        raise InputError(field="what", value=what, expected=f"one of {', '.join(_OVERLAYS)}")
    if not (np.isfinite(scale) and scale > 0):
        raise InputError(field="scale", value=scale, expected="a number > 0")
    table, x, y = _OVERLAYS[what]
    rows = published(table)
    models = sorted(rows["model"].unique())
    if model not in models:
        raise InputError(field="model", value=model, expected=f"one of {', '.join(models)}")
    rows = rows[rows["model"] == model]
    if "note" in rows.columns:
        rows = rows[rows["note"] == ""]
    factor = "" if scale == 1.0 else f" x {scale:g}"
    lines: list[Artist] = []
    for paper_arm, arm in _PAPER_ARMS.items():
        part = rows[rows["arm"] == paper_arm].sort_values(x, kind="stable")
        lines += ax.plot(
            part[x],
            scale * part[y],
            color=_darker(arm_style(arm).color),
            linewidth=1.1,
            linestyle=(0, (1.5, 1.5)),
            label=f"{paper_arm}, {model}{factor} (published)",
            zorder=4,  # above the simulated lines, which are wider
        )
    return lines
