"""The project's plotting style: colors and markers of the arms, figures, captions, files.

Figures are `matplotlib.figure.Figure` objects on the Agg canvas: no pyplot, no global state, no display. One
color and marker belongs to one arm in every figure. The colors are those of Okabe and Ito, which stay apart
under the common forms of color blindness; the markers say the same once more. `dsim.figures` has the panels.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine

from dsim.errors import InputError

INK = "#222222"
SOFT = "#6B6B6B"
GRID = "#E6E6E6"

_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so glyphs do not depend on the machine
    "font.size": 8.5,
    "text.color": INK,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9A9A9A",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": "#9A9A9A",
    "ytick.color": "#9A9A9A",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    # Labels of minor ticks (log axes) in line with those of the longer major ones.
    "xtick.minor.pad": 5.0,
    "ytick.minor.pad": 5.0,
    "legend.fontsize": 8,
    "legend.frameon": True,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "legend.handlelength": 2.2,
    "legend.labelspacing": 0.35,
    # Laid out at the resolution it is saved at: text is hinted, and captions are measured to the pixel.
    "figure.dpi": 160,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "dsim",
}


@contextmanager
def style() -> Iterator[None]:
    """The project's settings on top of matplotlib's defaults, whatever the user's own configuration says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, _STYLE))
        yield


def agg_renderer(fig: Figure) -> Any:
    """What measures texts and boxes in pixels of this figure."""
    return cast(Any, fig.canvas).get_renderer()


@dataclass(frozen=True, slots=True)
class ArmStyle:
    """How one arm looks: a color, a marker and a line style, as matplotlib names them."""

    color: str
    marker: str
    linestyle: str = "-"


_KNOWN_ARMS: dict[str, ArmStyle] = {
    "none": ArmStyle("#7F7F7F", "x"),
    "mtp1": ArmStyle("#0072B2", "s"),
    "mtp3": ArmStyle("#0072B2", "<", "--"),
    "mtp5": ArmStyle("#56B4E9", "^"),
    "fixed5": ArmStyle("#CC79A7", "D"),
    "threshold": ArmStyle("#009E73", "v"),
    "dspark-alg1": ArmStyle("#E69F00", "P"),
    "dspark": ArmStyle("#D55E00", "o"),
    "oracle": ArmStyle("#000000", "*", "--"),
}
_SPARE_COLORS = ("#882255", "#117733", "#332288", "#AA8800", "#44AA99", "#995533", "#6699CC", "#555555")
_SPARE_MARKERS = ("h", ">", "p", "d", "8", "<", "H")
# The two arms that the paper compares are drawn a little heavier than the rest.
LEADING_ARMS = ("mtp1", "dspark")


def arm_style(name: str) -> ArmStyle:
    """The look of one arm: fixed for the project's own arms, drawn from its name's hash for any other."""
    if name in _KNOWN_ARMS:
        return _KNOWN_ARMS[name]
    return _spare(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"))


def _spare(number: int) -> ArmStyle:
    number %= len(_SPARE_COLORS) * len(_SPARE_MARKERS)
    return ArmStyle(_SPARE_COLORS[number % len(_SPARE_COLORS)], _SPARE_MARKERS[number // len(_SPARE_COLORS)], "-.")


def arm_styles(names: Iterable[str]) -> dict[str, ArmStyle]:
    """`arm_style` for all arms of a figure; unknown names that would look alike step on to the next look.

    Colors differ as long as there are enough of them, and so do markers.
    """
    styles: dict[str, ArmStyle] = {}
    colors: set[str] = set()
    markers: set[str] = set()
    ordered = list(dict.fromkeys(names))
    for name in sorted(ordered):
        look = arm_style(name)
        if name not in _KNOWN_ARMS:
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
            looks = [_spare(number + step) for step in range(len(_SPARE_COLORS) * len(_SPARE_MARKERS))]
            fresh = [one for one in looks if one.color not in colors] or looks[:1]
            look = next((one for one in fresh if one.marker not in markers), fresh[0])
            colors.add(look.color)
            markers.add(look.marker)
        styles[name] = look
    return {name: styles[name] for name in ordered}


@style()
def new_figure(
    ncols: int = 1,
    nrows: int = 1,
    *,
    width: float | None = None,
    height: float | None = None,
    title: str | None = None,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, npt.NDArray[np.object_]]:
    """An empty figure in the project's style.

    Parameters
    ----------
    ncols, nrows
        Panels.
    width, height
        Inches; None: 7.2 wide for one column, 5.2 a column for more; 4.5 high, 3.2 a row for more.
    title
        Bold line above all panels.
    sharex, sharey
        Whether all panels share an axis.

    Returns
    -------
    fig, axes
        ``axes`` is object[nrows, ncols] of `matplotlib.axes.Axes`.
    """
    for name, value in (("ncols", ncols), ("nrows", nrows)):
        if value < 1:
            raise InputError(field=name, value=value, expected="an integer >= 1")
    wide = width if width is not None else (7.2 if ncols == 1 else 5.2 * ncols)
    high = height if height is not None else (4.5 if nrows == 1 else 3.2 * nrows)
    fig = Figure(figsize=(wide, high), layout="constrained")
    FigureCanvasAgg(fig)
    axes = fig.subplots(nrows, ncols, squeeze=False, sharex=sharex, sharey=sharey)
    if title is not None:
        fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", parse_math=False)
    return fig, axes


_CAPTION_ID = "dsim-caption"
_CAPTION_PT = 7.2


@style()
def caption(fig: Figure, text: str) -> list[str]:
    """Write the honesty caption below the axes: what is measured, published, synthetic or assumed.

    The text is wrapped to the figure's width and the figure grows by its height, so that the caption can
    neither overlap the axes nor squeeze them. Newlines in the text are kept.

    Returns
    -------
    list of str
        The lines as set.
    """
    if any(item.get_gid() == _CAPTION_ID for item in fig.texts):
        raise RuntimeError("the figure has a caption already")
    width, height = (float(value) for value in fig.get_size_inches())
    margin = 0.12
    lines = _wrapped(fig, text, (width - 2 * margin) * fig.dpi)
    needed = len(lines) * _CAPTION_PT * 1.25 / 72 + 2 * margin
    fig.set_size_inches(width, height + needed)
    share = needed / (height + needed)
    fig.text(
        margin / width,
        share - margin / (height + needed),
        "\n".join(lines),
        ha="left",
        va="top",
        fontsize=_CAPTION_PT,
        linespacing=1.15,
        color=SOFT,
        gid=_CAPTION_ID,
        parse_math=False,
    ).set_in_layout(False)
    engine = fig.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(rect=(0.0, share, 1.0, 1.0 - share))
    return lines


def _wrapped(fig: Figure, text: str, pixels: float) -> list[str]:
    """Greedy line breaking by measured width; a single word wider than the line is cut."""
    renderer = agg_renderer(fig)
    font = FontProperties(family=["DejaVu Sans"], size=_CAPTION_PT)

    @cache  # words repeat, and measuring is the slow part
    def width(word: str) -> float:
        return float(renderer.get_text_width_height_descent(word, font, ismath=False)[0])

    def longest(word: str) -> int:
        return max(1, bisect_right(range(1, len(word)), pixels, key=lambda end: width(word[:end])))

    gap = width("a a") - 2 * width("a")
    lines: list[str] = []
    for paragraph in text.strip().split("\n"):
        line, used = "", 0.0
        for word in paragraph.split():
            if line and used + gap + width(word) <= pixels:
                line, used = f"{line} {word}", used + gap + width(word)
                continue
            if line:
                lines.append(line)
            rest = word
            while width(rest) > pixels:
                head = longest(rest)
                lines.append(rest[:head])
                rest = rest[head:]
            line, used = rest, width(rest)
        lines.append(line)
    return lines


@style()
def save_figure(fig: Figure, directory: str | Path, stem: str) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``; equal figures give equal bytes (no dates, no random ids).

    Returns
    -------
    list of Path
        The PNG, then the SVG.

    Raises
    ------
    InputError
        The directory does not exist, or the stem is not a plain file name.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError("not a directory", file=folder, expected="an existing directory for the figure")
    if not stem or Path(stem).name != stem:
        raise InputError(field="stem", value=stem, expected="a file name without folder")
    _settle(fig)
    png, svg = folder / f"{stem}.png", folder / f"{stem}.svg"
    fig.savefig(png, format="png", facecolor="white", metadata={"Software": None})
    fig.savefig(svg, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return [png, svg]


def _settle(fig: Figure) -> None:
    """Lay the figure out for good, with positions rounded far below a pixel.

    The layout's solver walks over sets of objects, so the last digit of a position hangs on their addresses; an SVG
    names clip paths by it.
    """
    fig.draw_without_rendering()
    for ax in fig.axes:
        if ax.get_axes_locator() is None:
            left, bottom, width, height = (round(value, 9) for value in ax.get_position(original=True).bounds)
            ax.set_position((left, bottom, width, height))
    fig.set_layout_engine("none")


@style()
def legend(ax: Axes, loc: str = "best", **options: Any) -> None:
    """A legend in the project's style."""
    cast(Any, ax).legend(loc=loc, **options)


@style()
def panel_title(ax: Axes, text: str) -> None:
    """The title of one panel, at its left edge."""
    ax.set_title(text, parse_math=False)
