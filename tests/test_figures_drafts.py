"""Figures about drafters: looks, published tables, labels that do not touch."""

from __future__ import annotations

from itertools import pairwise

import matplotlib
import numpy as np
import pytest

from dsim.errors import InputError
from dsim.figures_drafts import (
    ALL,
    DRAFTERS,
    PAPER_DRAFTERS,
    _spread,
    comparable,
    drafter_key,
    drafter_of,
    drafter_style,
    end_labels,
    grouped_points,
    histogram_axes,
    one_title_a_column,
    published_acceptance,
    published_depth,
    published_draft_length,
    published_lengths,
    published_round,
    published_sweep,
    reliability_axes,
    room_at_right,
    share_limits,
    value_line,
)
from dsim.plotstyle import agg_renderer, caption, new_figure, panel_title, style
from dsim.published import published


def test_every_drafter_has_a_look_of_its_own() -> None:
    looks = [drafter_style(name) for name in DRAFTERS]
    for field in ("label", "color", "marker"):
        assert len({getattr(look, field) for look in looks}) == len(looks)
    assert set(PAPER_DRAFTERS.values()) < set(DRAFTERS)
    assert drafter_style("mine").label == "mine"
    assert drafter_style("mine").color == drafter_style("mine").color
    assert [drafter_of(name) for name in ("DSpark-rnn", "smollm2-dspark", "EAGLE3", "mtp 1 layers", "medusa")] == [
        "dspark-rnn", "dspark", "eagle3", "mtp", None,
    ]  # fmt: skip


def test_table_1_gives_the_gains_that_the_paper_prints() -> None:
    """Macro-averages over nine benchmarks: +30.9, 26.7, 30.0 % over Eagle3 and +16.3, 18.4, 18.3 % over DFlash."""
    table = published("paper_table1")
    assert len(table) == 4 * 3 * 9
    means = table.groupby(["target", "drafter"])["accepted_length"].mean().unstack()
    targets = ["Qwen3-4B", "Qwen3-8B", "Qwen3-14B"]
    over = 100 * (means["DSpark"] / means["Eagle3"] - 1)
    assert over[targets].round(1).tolist() == [30.9, 26.7, 30.0]
    over = 100 * (means["DSpark"] / means["DFlash"] - 1)
    assert over[targets].tolist() == pytest.approx([16.3, 18.4, 18.3], abs=0.06)
    lengths = published_lengths().set_index(["drafter", "domain"])["accepted_length"]
    assert [round(lengths["dspark", domain], 2) for domain in ("math", "code", "chat")] == [5.57, 5.12, 3.49]
    assert lengths["dspark", ALL] == pytest.approx(means.loc["Qwen3-4B", "DSpark"])


def test_the_published_tables_agree_with_each_other() -> None:
    """Table 1 is Fig. 3 at 5 layers, Fig. 4 at gamma 7, and what the curves of Fig. 2 add up to."""
    lengths = published_lengths().set_index(["drafter", "domain"])["accepted_length"]
    depth = published_depth().set_index(["drafter", "domain", "layers"])["accepted_length"]
    length = published_draft_length().set_index(["drafter", "domain", "gamma"])["accepted_length"]
    curves = published_acceptance()
    for drafter in ("dspark", "dflash"):
        for domain in ("math", "code", "chat", ALL):
            assert depth[drafter, domain, 5] == pytest.approx(lengths[drafter, domain], abs=0.006)
            assert length[drafter, domain, 7] == pytest.approx(lengths[drafter, domain], abs=0.006)
            if domain != ALL:
                curve = curves[(curves["drafter"] == drafter) & (curves["domain"] == domain)]["acceptance"]
                assert 1 + np.cumprod(curve).sum() == pytest.approx(lengths[drafter, domain], rel=0.02)
    gains = [
        round(100 * (length["dspark", domain, 15] / length["dflash", domain, 15] - 1))
        for domain in ("math", "code", "chat")
    ]
    assert gains == [30, 26, 22]
    rounds = published_round().set_index(["drafter", "gamma"])["overhead"]
    assert [round(100 * rounds["dspark", gamma], 1) for gamma in (3, 7, 11, 15)] == [0.2, 0.6, 0.9, 1.3]
    assert len(published_sweep()) == 4 * 10


def test_a_mean_over_other_domains_is_not_compared() -> None:
    table = published_lengths()
    assert set(comparable(table, ("chat", "math", "code"))["domain"]) == {"math", "code", "chat", ALL}
    assert set(comparable(table, ("chat", ALL))["domain"]) == {"chat"}
    assert comparable(table, ("poems",)).empty


def test_labels_are_moved_apart_and_stay_inside() -> None:
    found = _spread(np.array([10.0, 11.0, 12.0, 60.0]), 8.0, 0.0, 100.0)
    assert np.diff(found).min() >= 8 - 1e-3
    assert found[3] == 60
    assert found[1] == pytest.approx(11, abs=0.1)
    low = _spread(np.array([1.0, 2.0, 3.0]), 8.0, 0.0, 100.0)
    assert low[0] == pytest.approx(0, abs=0.1)
    assert np.diff(low).min() > 6


def test_end_labels_stand_beside_the_panel_within_the_figure() -> None:
    fig, axes = new_figure(1, width=5, height=3, title="t")
    caption(fig, "words " * 60)
    ax = axes[0, 0]
    for level in (0.50, 0.51, 0.52):
        value_line(ax, [1, 2, 3], [0.9, 0.7, level], drafter_style("dflash"), low=[0.8, 0.6, 0.4], high=[1, 0.8, 0.6])
    room_at_right(fig, 1.2)
    end_labels(ax, [(3, level, f"name {level}", "#000000") for level in (0.50, 0.51, 0.52)] + [(3, np.nan, "no", "k")])
    renderer = agg_renderer(fig)
    fig.draw_without_rendering()
    texts = [text for text in ax.texts if text.get_text().startswith("name")]
    boxes = [super(type(text), text).get_window_extent(renderer) for text in texts]
    assert len(boxes) == 3
    boxes.sort(key=lambda box: box.y0)
    assert all(lower.y1 <= upper.y0 + 4 for lower, upper in pairwise(boxes))
    assert all(box.x1 <= fig.bbox.x1 for box in boxes)
    assert all(box.x0 >= ax.transData.transform((3, 0.5))[0] for box in boxes)
    assert "no" not in [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(("many", "rows"), [(2, 1), (9, 2)])
def test_the_key_lists_ours_and_published_between_title_and_panels(many: int, rows: int) -> None:
    fig, axes = new_figure(3, width=9, height=4, title="Accepted length")
    caption(fig, "words " * 60)
    for ax in axes[0]:
        value_line(ax, [1, 2], [0.5, 0.6], drafter_style("dspark"))
        panel_title(ax, "Two\nlines")
    drafter_key(
        fig,
        [(f"drafter number {i}", drafter_style("dspark"), bool(i)) for i in range(many)],
        published=[drafter_style("eagle3")],
        kinds=("recorded", "published"),
    )
    (key,) = fig.legends
    names = [text.get_text() for text in key.get_texts()]
    assert sorted(names) == sorted(
        [*(f"drafter number {i}" for i in range(many)), "Eagle3", "filled: recorded", "hollow: published"]
    )
    fig.draw_without_rendering()
    renderer = agg_renderer(fig)
    box = key.get_window_extent(renderer)
    assert box.x1 <= fig.bbox.x1
    assert box.y1 <= fig._suptitle.get_window_extent(renderer).y0
    assert all(ax.get_tightbbox(renderer).y1 <= box.y0 + 1 for ax in axes[0])
    levels = {round(text.get_window_extent(renderer).y0) for text in key.get_texts()}
    assert len(levels) == rows


def test_what_is_drawn_is_what_is_given() -> None:
    _, axes = new_figure(4, width=12, height=3, title="t")
    look = drafter_style("dspark")
    ax = axes[0, 0]
    value_line(ax, [1, 2], [0.5, 0.6], look, low=[0.4, np.nan], high=[0.6, np.nan])
    assert ax.lines[0].get_ydata().tolist() == [0.5, 0.6]
    assert [segment.tolist() for segment in ax.collections[0].get_segments()] == [[[1.0, 0.4], [1.0, 0.6]]]
    grouped_points(axes[0, 1], ["math", "all"], [(look, {"all": (2.0, 1.9, 2.1), "x": (9, 9, 9)}, False, False)])
    assert axes[0, 1].lines[0].get_xydata().tolist() == [[1.0, 2.0]]
    reliability_axes(axes[0, 2], [("a", [0.1, 0.5, 0.9], [0.2, 0.4, np.nan], [50, 3, 0], "k", False)], few=10)
    solid = next(line for line in axes[0, 2].lines if line.get_label() == "a")
    assert solid.get_xydata().tolist() == [[0.1, 0.2]]
    assert [line.get_xydata().tolist() for line in axes[0, 2].lines if line.get_alpha()] == [[[0.5, 0.4]]]
    histogram_axes(axes[0, 3], [0.0, 0.5], [0.25, 0.75], "k")
    assert [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in axes[0, 3].patches] == [
        (0.0, 0.5, 0.25), (0.5, 0.5, 0.75),
    ]  # fmt: skip
    share_limits(axes[0, :2], low=0.0, high=3.0)
    assert axes[0, 1].get_ylim() == (0.0, 3.0)
    with pytest.raises(InputError, match="one a column"):
        one_title_a_column(axes, ["a"])


def test_a_wide_caption_stays_inside_the_saved_figure() -> None:
    fig, _ = new_figure(4, width=13, height=3, title="t")
    caption(fig, "Recorded: drafters trained here, blocks of seven, il ll ii. " * 12)
    with style():
        assert fig.dpi == matplotlib.rcParams["savefig.dpi"]
    renderer = agg_renderer(fig)
    (text,) = [item for item in fig.texts if len(item.get_text()) > 100]
    assert text.get_window_extent(renderer).x1 <= fig.bbox.x1
