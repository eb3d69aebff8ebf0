"""Is this price table fit for a planner, at my load?

Looks a profile over for what has gone wrong in the field (docs/profile-lint.md): a table that is flat or too coarse, a
look-up that hides the stairs, dips, the end of the captured graphs, a drafter without a price, dummy tokens, noise.
Prints each finding with its numbers and what to do, and draws them on the curve. Nothing is simulated: a finding's loss
is that of the best number of drafts in one step, chosen on the wrong prices and paid at the right ones.

Exit code: 0 nothing at or above --fail-on, 1 something, 2 bad input.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter

from dsim.convert import to_profile
from dsim.engines import read_price_table
from dsim.errors import InputError
from dsim.lint import (
    SEVERITIES,
    Case,
    Finding,
    Mixture,
    NoiseBand,
    Setting,
    draft_sample,
    lint,
    make_case,
    noise_band,
    usual_concurrency,
)
from dsim.lookup import LOOKUP_RULES
from dsim.plotstyle import GRID, INK, SOFT, agg_renderer, caption, legend, new_figure, panel_title, save_figure, style
from dsim.profile import DEFAULT_PROFILE, Profile, load_profile, shipped_profiles
from dsim.wording import counted
from experiments._common import OneLineParser, positive_int, print_table, run_main, staged_output, write_csv
from experiments._sources import cost_words, drafts_words
from experiments.profile_report import chosen_context

#: How the engines read their own tables.
LOOKUP_OF = {"sglang-diagonal": "floor", "sglang-additive": "linear", "trtllm-v1": "linear", "vllm": "next"}
_COLORS = {"error": "#B2432F", "warning": "#C98A00", "info": "#4C78A8"}
NEVER = "never"


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = OneLineParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"shipped profiles: {', '.join(shipped_profiles())}",
    )
    cli.add_argument(
        "profile",
        nargs="?",
        default=DEFAULT_PROFILE,
        help="a shipped profile's name, the .csv or .toml of another one, or an engine's table (.json) "
        "(default: %(default)s)",
    )
    cli.add_argument(
        "--acceptance",
        metavar="DRAFTS",
        default="dsv4",
        help="what is drafted: PRESET or PRESET:DRAFTER (synthetic), a bank's name or .npz, a .json curve by domain, "
        "or 0.9,0.8,... by position (default: %(default)s)",
    )
    cli.add_argument("--gamma", metavar="N", type=positive_int, help="block size (default: that of the drafts)")
    cli.add_argument(
        "--concurrency",
        metavar="MAX[:AT]",
        type=_concurrency,
        help="most requests in decode, and the usual number (default: what the profile was made for, and a quarter)",
    )
    cli.add_argument(
        "--lookup",
        choices=LOOKUP_RULES,
        help="how the engine reads the table between its sizes (default: an engine's table as that engine does; "
        "otherwise not known, all are looked at)",
    )
    cli.add_argument(
        "--noise",
        metavar="PERCENT",
        type=float,
        default=3.0,
        help="half width of the noise band (default: %(default)g)",
    )
    cli.add_argument(
        "--draws", metavar="N", type=positive_int, default=200, help="noisy tables to try (default: %(default)s)"
    )
    cli.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the noise (default: %(default)s)")
    cli.add_argument(
        "--experts",
        metavar="N:ACTIVE",
        type=_experts,
        help="the model is a mixture: routed experts, and how many a token uses",
    )
    cli.add_argument("--expert-gb", metavar="GB", type=float, help="weights of all routed experts on one replica")
    cli.add_argument(
        "--bandwidth", metavar="TB/S", type=float, help="memory bandwidth of one replica, all GPUs together"
    )
    cli.add_argument("--context", type=int, metavar="TOKENS", help="which profiled context (default: the shortest)")
    cli.add_argument(
        "--fail-on",
        choices=(*SEVERITIES, NEVER),
        default="error",
        help="exit code 1 from this severity on (default: %(default)s)",
    )
    cli.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where profile_lint.png, .svg and findings.csv go (default: results/profile_lint/PROFILE)",
    )
    return cli


def _pair(text: str, expected: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"got '{text}', expected {expected}")
    return int(parts[0]), int(parts[1])


def _concurrency(text: str) -> tuple[int, int | None]:
    if ":" in text:
        return _pair(text, "MAX or MAX:AT, integers >= 1")
    return positive_int(text), None


def _experts(text: str) -> tuple[int, int]:
    return _pair(text, "EXPERTS:ACTIVE, integers >= 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings, write the files; returns the exit code."""
    args = options().parse_args(argv)
    profile, rule, told = opened(args.profile)
    if args.lookup is None:
        args.lookup = rule
    for line in told:
        print(f"{args.profile}: {line}")
    case = make_case(profile, setting_of(args, profile), chosen_context(profile, args.context))
    band = noise_band(case)
    found = lint(case, band)
    report(case, found)
    out = args.out if args.out is not None else Path("results") / "profile_lint" / profile.name
    with staged_output(out) as work:
        write_csv(table(case, found), work / "findings.csv")
        draw(work, case, found, band)
        names = sorted(path.name for path in work.iterdir())
    print(f"\nfiles: {', '.join(names)}\nwritten to {out}")
    return exit_code(found, args.fail_on)


def opened(name: str) -> tuple[Profile, str | None, list[str]]:
    """A profile, or one made of an engine's table: how that engine reads it (if known), and what was lost."""
    if not name.endswith(".json"):
        return load_profile(name), None, []
    table = read_price_table(name)
    stem = re.sub(r"[^a-z0-9._-]+", "-", Path(name).stem.lower()).lstrip("._-") or "table"
    profile, told = to_profile(table, stem, source=Path(name).name)
    return profile, LOOKUP_OF.get(table.format), told


def setting_of(args: argparse.Namespace, profile: Profile) -> Setting:
    """The setting that the options describe."""
    sample = draft_sample(args.acceptance)
    if args.gamma is not None:
        sample = sample.cut(args.gamma)
    most, at = args.concurrency or (usual_concurrency(profile, sample.gamma), None)
    mixture = None
    if args.experts is not None:
        mixture = Mixture(*args.experts, args.expert_gb, args.bandwidth)
    elif args.expert_gb is not None or args.bandwidth is not None:
        raise InputError("are used with --experts only", field="--expert-gb, --bandwidth")
    if not 0 < args.noise < 100:
        raise InputError(field="--noise", value=args.noise, expected="a percentage above 0 and below 100")
    return Setting(
        sample,
        concurrency=most,
        at=max(1, most // 4) if at is None else at,
        lookup=args.lookup,
        noise=args.noise / 100,
        draws=args.draws,
        seed=args.seed,
        mixture=mixture,
    )


def exit_code(found: Sequence[Finding], fail_on: str) -> int:
    """1 where a finding is at least as grave as `fail_on`."""
    if fail_on == NEVER:
        return 0
    return int(any(SEVERITIES.index(item.severity) <= SEVERITIES.index(fail_on) for item in found))


def report(case: Case, found: Sequence[Finding]) -> None:
    """The findings for the terminal."""
    setting, profile = case.setting, case.profile
    print(f"{profile.name}: {profile.model}, {profile.hardware}")
    print(
        f"up to {counted(setting.concurrency, 'request')} in decode, usually {setting.at}; "
        f"{counted(setting.gamma, 'draft')} each ({setting.sample.label}); steps of up to "
        f"{counted(setting.reach, 'token')}"
    )
    counts = ", ".join(f"{sum(item.severity == name for item in found)} {name}" for name in SEVERITIES)
    print(f"\nfindings: {counts}\n")
    if not found:
        return
    rows = table(case, found)
    shown = rows[["number", "severity", "check"]].copy()
    for name in ("loss_at", "loss_mean", "loss_worst"):
        shown[f"{name} %"] = 100 * rows[name]
    print_table(shown.rename(columns={"number": "#"}), digits=3)
    print(
        f"throughput lost: at {counted(setting.at, 'request')}, mean over all loads, at worst; "
        "- where the check cannot tell"
    )
    for number, item in enumerate(found, start=1):
        print(f"\n{number}. {item.severity}: {item.check}")
        for text, mark in ((item.evidence, "   "), (item.advice, "   do: ")):
            print(textwrap.fill(text, 110, initial_indent=mark, subsequent_indent="   "))


def table(case: Case, found: Sequence[Finding]) -> pd.DataFrame:
    """One row a finding."""
    rows = []
    for number, item in enumerate(found, start=1):
        low, high = item.tokens or (pd.NA, pd.NA)
        loss = item.loss
        rows.append(
            {
                "number": number,
                "severity": item.severity,
                "check": item.check,
                "tokens_low": low,
                "tokens_high": high,
                "loss_at": np.nan if loss is None else loss.at,
                "loss_mean": np.nan if loss is None else loss.mean,
                "loss_worst": np.nan if loss is None else loss.worst,
                "loss_worst_requests": pd.NA if loss is None else loss.worst_at,
                "requests": case.setting.at,
                "max_requests": case.setting.concurrency,
                "gamma": case.setting.gamma,
                "evidence": item.evidence,
                "advice": item.advice,
                "cost_source": case.cost.label,
                "drafts_source": case.setting.sample.label,
                "extrapolated": case.setting.reach > case.points.tokens[-1],
            }
        )
    columns = [
        *("number", "severity", "check", "tokens_low", "tokens_high", "loss_at", "loss_mean", "loss_worst"),
        *("loss_worst_requests", "requests", "max_requests", "gamma", "evidence", "advice", "cost_source"),
        *("drafts_source", "extrapolated"),
    ]
    whole = ("tokens_low", "tokens_high", "loss_worst_requests")
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(whole, "Int64"))


@style()
def draw(folder: Path, case: Case, found: Sequence[Finding], band: NoiseBand) -> None:
    """The curve with the findings on it, and what is decided on it at each load."""
    setting = case.setting
    fig, axes = new_figure(2, width=9.4, height=4.6, title=f"Profile lint: {case.profile.name}")
    caption(fig, _caption(case, found))
    left, right = axes[0]
    _curve(left, case)
    words = _marks(left, case, found)
    panel_title(left, "The table, and where the findings are")
    _decisions(right, case, band)
    panel_title(right, f"What is decided on it, and on {setting.draws} noisy copies")
    _keep_inside(left, words)
    save_figure(fig, folder, "profile_lint")


def _caption(case: Case, found: Sequence[Finding]) -> str:
    unplaced = [
        f"{number} {item.check} ({item.severity}): {item.gloss}"
        for number, item in enumerate(found, start=1)
        if item.tokens is None
    ]
    listed = f"Of the whole table: {'; '.join(unplaced)}. " if unplaced else "" if found else "No findings. "
    timed = "upper medians of warm passes" if case.profile.kind == "measured" else "computed from published components"
    return (
        f"Findings: red errors, amber warnings, blue for information; numbers as in findings.csv. {listed}\n"
        f"Dots: {timed}. Line: price of a step as a planner reads it. "
        f"{cost_words({case.cost.label: 'none'}, case.profile)} {drafts_words([case.setting.sample.label])} "
        "Confidences are taken at their word; the decision is the best number of drafts in one step, not simulated. "
        f"Source: {case.profile.source}."
    )


def _curve(ax: Axes, case: Case) -> None:
    setting, points = case.setting, case.points
    last = max(setting.reach, int(points.tokens[-1]))
    wide = make_case(
        case.profile, replace(setting, concurrency=max(setting.at, -(-last // (1 + setting.gamma)))), case.context
    )
    tokens = np.arange(1, last + 1)
    ms = wide.table(wide.law, setting.at)[1 : last + 1]
    cut = case.profile.capture_limit if points.eager.any() else last
    for piece in (slice(None, cut), slice(cut, None)):
        ax.plot(tokens[piece], ms[piece], color=INK, linewidth=1.2, zorder=3)
    if case.cost.depends_on_requests:
        here = points.requests == points.requests[np.abs(points.requests - setting.at).argmin()]
    else:
        here = np.ones(points.tokens.size, dtype=bool)
    ax.plot(points.tokens[here], points.ms[here], "o", color=INK, markersize=2.6, zorder=3.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    low, high = setting.at, setting.at * (1 + setting.gamma)
    ax.axvspan(low, high, color="#9ECAE9", alpha=0.35, linewidth=0, zorder=0.5)
    ax.text(
        (low * high) ** 0.5,
        0.02,
        f"{counted(setting.at, 'request')}:\nnone to {setting.gamma} drafts",
        transform=ax.get_xaxis_transform(),
        ha="center",
        va="bottom",
        fontsize=7.5,
        color="#2F6690",
    )
    ax.axvline(setting.reach, color=SOFT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    ax.text(
        setting.reach,
        0.02,
        f" largest step:\n {setting.concurrency} x {1 + setting.gamma}",
        transform=ax.get_xaxis_transform(),
        ha="left",
        va="bottom",
        fontsize=7.5,
        color=SOFT,
    )
    ax.set_xlim(0.9 * min(float(points.tokens[0]), setting.at), 4 * setting.reach)
    shown = ms[: 4 * setting.reach]
    ax.set_ylim(0.7 * shown.min(), 1.4 * shown.max())
    top = ax.get_ylim()[1]  # findings stand above it, where no time is
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,g}"))
    ax.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,g}" if value <= top else ""))
    ax.yaxis.set_minor_formatter(
        FuncFormatter(lambda value, _position: f"{value:,g}" if value <= top and f"{value:.0e}"[0] in "25" else "")
    )
    ax.set_xlabel("tokens in the step")
    ax.set_ylabel("ms")


def _marks(ax: Axes, case: Case, found: Sequence[Finding]) -> list[Annotation]:
    """Each finding that has a place: a bar over its sizes with its number, and in words above it what it is."""
    low, high = ax.get_ylim()
    words = []
    placed = [(number, item) for number, item in enumerate(found, start=1) if item.tokens is not None]
    step = (high / low) ** 0.16
    ax.set_ylim(low, high * step ** len(placed) * 1.1)
    for row, (number, item) in enumerate(placed):
        assert item.tokens is not None
        y, color = high * step ** (len(placed) - row - 0.7), _COLORS[item.severity]
        first, last = item.tokens
        ax.plot([first, last], [y, y], color=color, linewidth=2.2, solid_capstyle="butt", zorder=4)
        ax.plot(
            [first], [y], marker="o", markersize=10, color=color, markeredgecolor="white", markeredgewidth=0.8, zorder=5
        )
        ax.text(first, y, str(number), ha="center", va="center_baseline", fontsize=6.8, color="white", zorder=6)
        text = ax.annotate(
            f"{item.check}: {item.gloss}",
            (first, y),
            xytext=(-5, 6),
            textcoords="offset points",
            va="bottom",
            fontsize=7.5,
            color=color,
            path_effects=[withStroke(linewidth=2.0, foreground="white")],
            zorder=6,
        )
        text.set_in_layout(False)
        words.append(text)
    return words


def _keep_inside(ax: Axes, words: Sequence[Annotation]) -> None:
    """Shift words to the left that would run out of the panel; call it when all panels are drawn."""
    fig = ax.figure
    assert isinstance(fig, Figure)
    fig.draw_without_rendering()
    renderer, frame = agg_renderer(fig), ax.get_window_extent()
    for text in words:
        over = (text.get_window_extent(renderer).x1 - frame.x1) / renderer.points_to_pixels(1.0)
        x, y = text.xyann
        text.xyann = (x - max(0.0, float(over)), y)


def _decisions(ax: Axes, case: Case, band: NoiseBand) -> None:
    setting = case.setting
    loads = np.array(setting.loads)
    chosen = np.array([case.chosen(requests) for requests in setting.loads]) / loads
    at = np.array(band.loads)
    low, high = np.quantile(band.chosen / at[:, None], (0.05, 0.95), axis=1)
    ax.axhline(
        setting.sample.worthwhile, color=SOFT, linewidth=1, linestyle=(0, (4, 3)), label="all drafts worth having"
    )
    ax.plot(loads, chosen, color=INK, linewidth=1.2, label="best on this table", zorder=3)
    ax.vlines(
        at,
        low,
        high,
        color="#D55E00",
        linewidth=3,
        alpha=0.6,
        label=f"nine in ten noisy copies ({100 * setting.noise:g} %)",
        zorder=4,
    )
    ax.plot([setting.at], [case.chosen(setting.at) / setting.at], "o", color=INK, markersize=5, zorder=5)
    ax.axvline(setting.at, color="#9ECAE9", linewidth=5, alpha=0.5, zorder=0.5)
    limit = case.profile.capture_limit
    if limit and limit < setting.reach:
        room = np.minimum(setting.gamma, np.maximum(limit / loads - 1, 0))
        ax.fill_between(loads, room, setting.gamma, color=GRID, linewidth=0, zorder=0.3)
        ax.text(
            0.985,
            0.985,
            f"eager: above {limit:,} tokens",
            transform=ax.transAxes,
            ha="right",
            va="top",
            fontsize=7.5,
            color=SOFT,
        )
    ax.set_ylim(-0.1, setting.gamma + 0.15)
    ax.set_xlim(0, setting.concurrency * 1.02)
    ax.set_xlabel("requests in decode")
    ax.set_ylabel("drafts verified a request")
    legend(ax, "lower left")


if __name__ == "__main__":
    run_main(main)
