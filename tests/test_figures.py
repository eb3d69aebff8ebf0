"""Figures: what is drawn is what the data say, captions stay clear of the axes, equal figures are equal bytes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dsim.errors import InputError
from dsim.figures import (
    PATH_POINTS,
    _log_log_path,
    annotate_match,
    arm_style,
    arm_styles,
    caption,
    cloud_axes,
    frontier_axes,
    legend,
    load_axes,
    load_fit,
    new_figure,
    overlay_published,
    panel_title,
    save_figure,
    seeds_note,
)
from dsim.frontier import SPEED, THROUGHPUT, frontier_curve, matched_table, throughput_at
from dsim.plotstyle import agg_renderer
from dsim.published import published

KNOWN = ["none", "mtp1", "mtp5", "fixed5", "threshold", "dspark-alg1", "dspark", "oracle"]


def runs(arms: dict[str, float], seeds: int = 5) -> pd.DataFrame:
    """Arms with throughput = factor x 4000 x (1 - speed / 220) at five loads, 1 % apart between seeds."""
    rows = [
        (arm, seed, load, speed, factor * 4000 * (1 - speed / 220) * (1 + 0.01 * (seed - 2)), 2.0 + factor)
        for arm, factor in arms.items()
        for seed in range(seeds)
        for load, speed in zip([1, 16, 64, 128, 256], [200.0, 160.0, 120.0, 80.0, 50.0], strict=True)
    ]
    columns = ["arm", "seed", "concurrency", SPEED, THROUGHPUT, "verification_budget"]
    return pd.DataFrame(rows, columns=columns)


TWO = runs({"mtp1": 1.0, "dspark": 1.4})


def lines_by_label(ax: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (
            list(map(float, line.get_xdata()[:: line.get_markevery() or 1])),
            list(map(float, line.get_ydata()[:: line.get_markevery() or 1])),
        )
        for line in ax.lines
        if not str(line.get_label()).startswith("_")
    }


def demo(directory: Path) -> list[Path]:
    """A figure with every part in it."""
    fig, axes = new_figure(3, title="Everything")
    caption(fig, "Step times: measured. Acceptance: synthetic. " * 6)
    frontier_axes(axes[0, 0], TWO, ["mtp1", "dspark"])
    table = matched_table(TWO, speeds=[100.0], throughputs=[1500.0])
    for _, row in table.iterrows():
        assert annotate_match(axes[0, 0], row)
    rng = np.random.default_rng(0)
    windows = pd.DataFrame({"arm": "dspark", SPEED: rng.uniform(50, 200, 300)})
    windows[THROUGHPUT] = 20 * (220 - windows[SPEED]) * rng.uniform(0.8, 1, 300)
    cloud_axes(axes[0, 1], windows, ["dspark"])
    load_axes(axes[0, 2], TWO, ["mtp1", "dspark"], "verification_budget")
    overlay_published(axes[0, 2], "budget")
    legend(axes[0, 2])
    panel_title(axes[0, 2], "Budget")
    return save_figure(fig, directory, "demo")


def digests(paths: list[Path]) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def test_equal_figures_are_equal_bytes_in_this_and_in_another_process(tmp_path: Path) -> None:
    first = demo(tmp_path)
    assert [path.name for path in first] == ["demo.png", "demo.svg"]
    wanted = digests(first)
    again = tmp_path / "again"
    again.mkdir()
    assert digests(demo(again)) == wanted
    other = tmp_path / "other"
    other.mkdir()
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import test_figures as t;"
        "print(*t.digests(t.demo(pathlib.Path(sys.argv[2]))))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(other)],
        capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77", "PATH": ""},
    )  # fmt: skip
    assert ran.stdout.split() == wanted


def test_the_last_digit_of_a_layout_does_not_reach_the_file(tmp_path: Path) -> None:
    """The layout's solver may leave positions an ulp apart from one time to the next."""
    wanted = None
    for nudge in (0.0, 1e-15, -1e-15):
        fig, axes = new_figure(2)
        frontier_axes(axes[0, 0], TWO, ["mtp1", "dspark"])
        fig.draw_without_rendering()
        fig.set_layout_engine("none")
        for ax in axes[0]:
            left, bottom, width, height = ax.get_position().bounds
            ax.set_position((left + nudge, bottom, width - nudge, height))
        found = digests(save_figure(fig, tmp_path, "a"))
        wanted = wanted or found
        assert found == wanted


def test_files_hold_no_date_and_no_program_version(tmp_path: Path) -> None:
    fig, _ = new_figure()
    png, svg = save_figure(fig, tmp_path, "plain")
    text = svg.read_text(encoding="utf-8")
    assert "<dc:date>" not in text
    assert matplotlib.__version__ not in text
    assert b"Software" not in png.read_bytes()
    assert b"tIME" not in png.read_bytes()


def test_the_users_own_configuration_changes_nothing(tmp_path: Path) -> None:
    fig, axes = new_figure()
    frontier_axes(axes[0, 0], TWO, ["mtp1", "dspark"])
    wanted = digests(save_figure(fig, tmp_path, "a"))
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 20, "axes.grid": False, "svg.hashsalt": "x"}):
        fig, axes = new_figure()
        frontier_axes(axes[0, 0], TWO, ["mtp1", "dspark"])
        assert digests(save_figure(fig, tmp_path, "a")) == wanted
        assert matplotlib.rcParams["font.size"] == 20  # and it is left as it was


def test_pyplot_is_never_loaded() -> None:
    code = "import sys, dsim.figures; print('matplotlib.pyplot' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_known_arms_have_colors_of_their_own() -> None:
    styles = [arm_style(name) for name in KNOWN]
    assert len({style.color for style in styles}) == len({style.marker for style in styles}) == len(KNOWN)
    apart = [
        np.abs(np.subtract(to_rgb(a.color), to_rgb(b.color))).max() for i, a in enumerate(styles) for b in styles[:i]
    ]
    assert min(apart) > 0.15


def test_unknown_arms_have_stable_looks_that_do_not_collide() -> None:
    assert arm_style("mine") == arm_style("mine")
    names = [f"policy-{i}" for i in range(8)]
    styles = arm_styles([*names, "mtp1"])
    assert list(styles) == [*names, "mtp1"]
    assert len({styles[name].color for name in names}) == 8
    assert len({styles[name].marker for name in names}) == 7  # there are no more
    assert styles["mtp1"] == arm_style("mtp1")
    assert arm_styles(reversed(names)) == {name: styles[name] for name in names}  # order does not matter


def boxes(fig: Figure) -> tuple[float, float, float, float]:
    """Caption's bottom and top, lowest edge of all axes with their labels, caption's right edge over width."""
    fig.draw_without_rendering()
    renderer = agg_renderer(fig)
    note = fig.texts[0].get_window_extent(renderer)
    lowest = min(ax.get_tightbbox(renderer).y0 for ax in fig.axes)
    return note.y0, note.y1, lowest, note.x1 / fig.bbox.width


@pytest.mark.parametrize("words", [1, 30, 400])
@pytest.mark.parametrize("panels", [(1, 1), (2, 2)])
def test_a_caption_wraps_and_never_touches_the_axes(words: int, panels: tuple[int, int]) -> None:
    fig, axes = new_figure(*panels)
    frontier_axes(axes[0, 0], TWO, ["mtp1", "dspark"])
    height = fig.get_size_inches()[1]
    text = " ".join(["measured"] * words)
    lines = caption(fig, text)
    assert " ".join(lines) == text
    bottom, top, lowest, right = boxes(fig)
    assert 0 <= bottom < top <= lowest
    assert right <= 1.0
    assert fig.get_size_inches()[1] > height  # the figure grew; the axes were not squeezed


def test_a_caption_keeps_paragraphs_cuts_endless_words_and_shows_dollars() -> None:
    fig, _ = new_figure(width=3.0)
    lines = caption(fig, "first\nsecond costs $5 and $6\n" + "x" * 300)
    assert lines[:2] == ["first", "second costs $5 and $6"]
    assert "".join(lines[2:]) == "x" * 300
    assert boxes(fig)[3] <= 1.0
    with pytest.raises(RuntimeError, match="caption already"):
        caption(fig, "another")


def test_frontier_draws_means_over_seeds_in_order_of_speed() -> None:
    fig, axes = new_figure()
    frontier_axes(axes[0, 0], TWO, ["dspark", "mtp1"])
    drawn = lines_by_label(axes[0, 0])
    assert list(drawn) == ["dspark", "mtp1"]
    x, y = drawn["mtp1"]
    assert x == [50.0, 80.0, 120.0, 160.0, 200.0]
    assert y == pytest.approx([4000 * (1 - v / 220) for v in x])
    assert [text.get_text() for text in axes[0, 0].get_legend().get_texts()] == ["dspark", "mtp1"]
    assert fig.axes == [axes[0, 0]]


def test_dominated_points_are_hollow_and_off_the_line() -> None:
    df = runs({"mtp5": 1.0})
    df.loc[df["concurrency"] == 256, THROUGHPUT] = 100.0  # slower and less throughput than at 128 users
    _, axes = new_figure()
    frontier_axes(axes[0, 0], df, ["mtp5"], label_users=False)
    assert lines_by_label(axes[0, 0])["mtp5"][0] == [80.0, 120.0, 160.0, 200.0]
    hollow = [line for line in axes[0, 0].lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in hollow] == [[50.0]]


def test_user_labels_are_few_inside_and_do_not_overlap() -> None:
    df = runs(dict.fromkeys(KNOWN, 1.0) | {"dspark": 1.4, "oracle": 1.45})
    fig, axes = new_figure()
    frontier_axes(axes[0, 0], df, KNOWN)
    renderer = agg_renderer(fig)
    texts = axes[0, 0].texts
    assert 2 <= len(texts) <= 10
    assert any(text.get_text().endswith(("user", "users")) for text in texts)
    extents = [text.get_window_extent(renderer) for text in texts]
    frame = axes[0, 0].get_window_extent(renderer)
    assert not any(a.overlaps(b) for i, a in enumerate(extents) for b in extents[:i])
    assert all(frame.contains(*box.min) and frame.contains(*box.max) for box in extents)
    _, bare = new_figure()
    frontier_axes(bare[0, 0], df, KNOWN, label_users=False)
    assert not bare[0, 0].texts


def test_frontier_takes_one_seed_and_loads_without_a_value() -> None:
    df = runs({"mtp1": 1.0}, seeds=1)
    df.loc[0, SPEED] = np.nan
    _, axes = new_figure()
    frontier_axes(axes[0, 0], df, ["mtp1"], log=True, legend_loc=None)
    assert len(lines_by_label(axes[0, 0])["mtp1"][0]) == 4
    assert axes[0, 0].get_legend() is None
    assert axes[0, 0].get_xscale() == "log"


def test_annotate_match_draws_the_gain_or_nothing() -> None:
    _, axes = new_figure()
    ax = axes[0, 0]
    frontier_axes(ax, TWO, ["mtp1", "dspark"], label_users=False)
    table = matched_table(TWO, speeds=[100.0, 300.0], throughputs=[1500.0])
    assert [annotate_match(ax, row) for _, row in table.iterrows()] == [True, False, True]
    words = [text.get_text() for text in ax.texts]
    assert words[0] == "+40 % throughput"
    assert words[1].endswith("% tok/s/user")
    base = table["baseline_value"].iloc[0]
    arrow = next(line for line in ax.lines if list(line.get_xdata()) == [100.0, 100.0])
    assert list(arrow.get_ydata()) == pytest.approx([base, 1.4 * base], rel=1e-3)
    assert annotate_match(ax, table.iloc[0], text="own words")
    assert ax.texts[-1].get_text() == "own words"


def test_a_gain_too_small_for_an_arrow_is_a_dot_with_its_words() -> None:
    close = runs({"mtp1": 1.0, "dspark": 1.001})
    _, axes = new_figure()
    ax = axes[0, 0]
    frontier_axes(ax, close, ["mtp1", "dspark"], label_users=False)
    before = len(ax.lines)
    (row,) = (row for _, row in matched_table(close, speeds=[100.0], throughputs=()).iterrows())
    assert annotate_match(ax, row)
    assert [(line.get_marker(), len(line.get_xdata())) for line in ax.lines[before:]] == [("o", 1)]
    assert [text.get_text() for text in ax.texts] == ["+0 % throughput"]


def test_load_fit_returns_a_polynomial_exactly() -> None:
    load = np.array([1.0, 8, 16, 32, 64, 96, 128, 256])
    value = 5.9 - 0.2 * np.sqrt(load) + 0.001 * load
    x, y = load_fit(np.repeat(load, 3), np.repeat(value, 3))
    np.testing.assert_allclose(y, 5.9 - 0.2 * np.sqrt(x) + 0.001 * x, rtol=1e-9)
    assert (x[0], x[-1]) == (1.0, 256.0)


def test_load_fit_follows_the_published_curves() -> None:
    """A shape check of the fit itself: within 1.5 % of the paper's own lines."""
    for name, column in (("paper_fig8_budget", "verification_budget"), ("paper_fig8_throughput", THROUGHPUT)):
        table = published(name)
        part = table[(table["model"] == "V4-Flash") & (table["arm"] == "DSpark-5") & (table["note"] == "")]
        part = part[part["concurrency"] >= 8].sort_values("concurrency")
        x, y = load_fit(part["concurrency"], part[column], points=500)
        np.testing.assert_allclose(np.interp(part["concurrency"], x, y), part[column], rtol=0.015)


def test_load_fit_with_little_or_bad_data() -> None:
    assert load_fit([4.0, 4.0], [1.0, 2.0])[0].size == 0
    np.testing.assert_allclose(load_fit([1.0, 4.0], [1.0, 2.0])[1][[0, -1]], [1.0, 2.0])
    assert load_fit([1.0, 4.0, 9.0], [1.0, np.nan, 3.0])[1][-1] == pytest.approx(3.0)
    for load, value in (([-1.0, 1.0], [1.0, 1.0]), ([1.0], [1.0, 2.0]), ([1.0, 2.0], [np.inf, 1.0])):
        with pytest.raises(InputError):
            load_fit(load, value)


def test_load_axes_join_means_when_no_fit_is_wanted() -> None:
    _, axes = new_figure()
    load_axes(axes[0, 0], TWO, ["dspark"], "verification_budget", fit=False, legend_loc="best")
    x, y = lines_by_label(axes[0, 0])["dspark"]
    assert x == [1.0, 16.0, 64.0, 128.0, 256.0]
    assert y == pytest.approx([3.4] * 5)


def test_overlays_are_the_published_numbers_and_say_so() -> None:
    _, axes = new_figure(3)
    for ax, what in zip(axes[0], ("frontier", "throughput", "budget"), strict=True):
        overlay_published(ax, what, "V4-Pro")
        assert sorted(lines_by_label(ax)) == ["DSpark-5, V4-Pro (published)", "MTP-1, V4-Pro (published)"]
    x, y = lines_by_label(axes[0, 2])["MTP-1, V4-Pro (published)"]
    assert set(np.round(y, 2)) == {2.0}
    assert max(x) <= 200  # nothing beyond the axis that a reader of the paper sees
    overlay_published(axes[0, 0], "frontier", scale=0.5)
    assert "MTP-1, V4-Flash x 0.5 (published)" in lines_by_label(axes[0, 0])


def test_bad_input_is_named(tmp_path: Path) -> None:
    fig, axes = new_figure()
    ax = axes[0, 0]
    with pytest.raises(InputError, match="no runs of arm 'x'"):
        frontier_axes(ax, TWO, ["x"])
    with pytest.raises(InputError, match="no arm to draw"):
        frontier_axes(ax, TWO, [])
    with pytest.raises(InputError, match=f"no column '{SPEED}'"):
        cloud_axes(ax, TWO.drop(columns=SPEED), ["mtp1"])
    with pytest.raises(InputError, match="no column 'rate'"):
        load_axes(ax, TWO, ["mtp1"], "rate")
    with pytest.raises(InputError, match="what"):
        overlay_published(ax, "fig9")
    with pytest.raises(InputError, match="V4-Flash, V4-Pro"):
        overlay_published(ax, "budget", "V5")
    with pytest.raises(InputError, match="scale"):
        overlay_published(ax, "budget", scale=0.0)
    with pytest.raises(InputError, match="ncols"):
        new_figure(0)
    with pytest.raises(InputError, match="existing directory"):
        save_figure(fig, tmp_path / "absent", "a")
    with pytest.raises(InputError, match="stem"):
        save_figure(fig, tmp_path, "../a")


def test_the_note_on_seeds_says_what_the_bars_are() -> None:
    assert seeds_note(TWO) == "Points: means over 5 seeds; bars: 95 % t intervals over the seeds."
    assert "ranges" in seeds_note(runs({"mtp1": 1.0}, seeds=3))
    assert seeds_note(runs({"mtp1": 1.0}, seeds=1)) == "Points: one seed, no interval."


def test_the_drawn_line_is_the_one_that_matched_values_come_from() -> None:
    x, y = np.array([100.0, 200.0, 400.0]), np.array([4000.0, 1500.0, 100.0])
    path_x, path_y = _log_log_path(x, y)
    np.testing.assert_array_equal(path_x[::PATH_POINTS], x)
    curve = frontier_curve(x, y)
    np.testing.assert_allclose(throughput_at(path_x, curve), path_y, rtol=1e-12)
