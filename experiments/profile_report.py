"""What does a step cost on this machine, and how well do the cost models say it?

Prints a profile's identity, the errors of the fits (on the data and leaving one size out) and prices at a few
sizes; draws measured points against the fitted curves, and steps per second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from dsim.cost import FITS, ErrorSummary, Points, RooflineModel, StepModel, fit, verify_points
from dsim.errors import InputError
from dsim.plotstyle import GRID, INK, SOFT, caption, legend, new_figure, save_figure, style
from dsim.policy import parse_spec
from dsim.profile import DEFAULT_PROFILE, MISSING, Profile, load_profile, shipped_profiles
from experiments._common import OneLineParser, run_main, staged_output, write_csv

_COLORS = {
    "staircase": "#0072B2",
    "additive": "#009E73",
    "roofline": "#D55E00",
    "roofline-moe": "#CC79A7",
    "what-if": "#AA8800",
}
_DASHES = ("-", "--", "-.", ":")
_LAWS = {
    "roofline": "overhead + max(m0 + m2 B, c1 B)",
    "roofline-moe": "overhead + max(m0 + m1 (1 - exp(-B / b0)) + m2 B, c1 B)",
}


def parser() -> argparse.ArgumentParser:
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
        help="name of a shipped profile, or the .csv or .toml of another one (default: %(default)s)",
    )
    cli.add_argument("--fit", choices=(*FITS, "all"), default="all", help="which cost model (default: all that apply)")
    cli.add_argument(
        "--what-if",
        metavar="NAME:bandwidth=X,compute=Y",
        help="also draw a roofline on other hardware, X times the memory bandwidth and Y times the arithmetic "
        "(either may be left out): that of --fit, or of all roofline-moe where it applies",
    )
    cli.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="which of several profiled contexts to draw (default: the shortest)",
    )
    cli.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where profile_report.png, .svg, residuals.csv and errors.csv go "
        "(default: results/profile_report/PROFILE)",
    )
    return cli


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report and write its files."""
    report(parser().parse_args(argv))


def report(args: argparse.Namespace) -> None:
    """Everything that the script prints and writes."""
    profile = load_profile(args.profile)
    models = fitted(profile, args.fit)
    if args.what_if is not None:
        models["what-if"] = what_if(models, args.what_if)
    context = chosen_context(profile, args.context)
    errors = error_table(models)

    print(identity(profile))
    print(f"prefill   priced from the {next(iter(models.values())).prefill_source}")
    print("\nErrors of the fits, % of the measured time")
    print(errors_text(errors))
    for name, model in models.items():
        for note in model.notes:
            print(f"  {name}: {note}")
    for name, model in models.items():
        if isinstance(model, RooflineModel):
            print(roofline_text(name, model))
    print("\nMilliseconds by tokens in the step")
    print(price_text(profile, models, context))

    out = args.out if args.out is not None else Path("results") / "profile_report" / profile.name
    written = write(out, profile, models, context, errors)
    print("\nWritten: " + ", ".join(str(path) for path in written))


def fitted(profile: Profile, which: str) -> dict[str, StepModel]:
    """The asked-for fits by name; of ``all``, those that the profile determines (the others are named)."""
    models: dict[str, StepModel] = {}
    refused: list[InputError] = []
    for name in FITS if which == "all" else (which,):
        try:
            models[name] = fit(profile, name)
        except InputError as error:
            if which != "all":
                raise
            refused.append(error)
            print(f"{name} does not apply: {error}")
    if not models:
        raise refused[0]
    return models


def what_if(models: dict[str, StepModel], spec: str) -> RooflineModel:
    """The last of the rooflines on the hardware that ``NAME:bandwidth=X,compute=Y`` describes."""
    rooflines = [model for model in models.values() if isinstance(model, RooflineModel)]
    if not rooflines:
        raise InputError(
            "needs a roofline fit", field="--what-if", value=spec, expected="--fit roofline, roofline-moe or all"
        )
    name, params = parse_spec(spec)
    for key, value in params.items():
        if key not in ("bandwidth", "compute") or isinstance(value, str | bool):
            raise InputError(
                field="--what-if",
                value=spec,
                expected="NAME:bandwidth=NUMBER,compute=NUMBER (one may be left out)",
            )
    return rooflines[-1].on_hardware(name=name, **{key: float(value) for key, value in params.items()})


def chosen_context(profile: Profile, asked: int | None) -> int:
    """Position of the context to draw among the profile's contexts."""
    contexts, _ = verify_points(profile)
    if asked is None:
        return 0
    if asked not in contexts:
        known = ", ".join(str(value) for value in contexts.tolist()) or "no --context: the profile names none"
        raise InputError("was not profiled", field="--context", value=asked, expected=known)
    return int(np.flatnonzero(contexts == asked)[0])


def identity(profile: Profile) -> str:
    """The profile's own words, and what it holds."""
    counts = ", ".join(
        f"{len(profile.samples.of(kind))} {kind}"
        for kind in ("verify", "draft", "prefill")
        if len(profile.samples.of(kind))
    )
    captured = "none named"
    if profile.capture_limit:
        sizes = profile.captured_sizes
        captured = f"{sizes.size} sizes, {sizes[0]} to {profile.capture_limit} tokens"
    rows = {
        "profile": f"{profile.name} ({profile.kind})",
        "hardware": profile.hardware,
        "gpus": str(profile.gpus),
        "model": profile.model,
        "engine": profile.engine,
        "graphs": captured,
        "samples": counts,
        "draft": "included in the verify times" if profile.draft_included else "",
        "source": profile.source,
        "license": profile.license,
        "notes": profile.notes,
    }
    return "\n".join(f"{key:9s} {value}" for key, value in rows.items() if value)


def error_table(models: dict[str, StepModel]) -> pd.DataFrame:
    """One row a fit and branch: in-sample and leave-one-size-out |relative error| (fractions)."""
    rows = []
    for name, model in models.items():
        if name == "what-if":
            continue
        inside, outside = model.residuals(), model.loo()
        for branch in dict.fromkeys(inside["branch"]):
            row: dict[str, Any] = {"fit": name, "cost_source": model.label, "branch": branch}
            for kind, frame in (("in_sample", inside), ("loo", outside)):
                summary = ErrorSummary.of(frame, branch)
                row |= {
                    f"{kind}_n": summary.n,
                    f"{kind}_median": summary.median,
                    f"{kind}_p90": summary.p90,
                    f"{kind}_max": summary.max,
                }
            rows.append(row)
    return pd.DataFrame(rows)


def errors_text(errors: pd.DataFrame) -> str:
    """The error table for the terminal."""
    lines = [
        f"{'':24s}{'in-sample':>28s}      {'leave one size out':>28s}",
        f"{'fit':14s}{'branch':10s}{'sizes':>7s}{'median':>7s}{'p90':>7s}{'max':>7s}"
        f"      {'sizes':>7s}{'median':>7s}{'p90':>7s}{'max':>7s}",
    ]
    for row in errors.to_dict("records"):
        cells = [
            f"{row[kind + '_n']:7d}"
            + "".join(f"{_percent(row[f'{kind}_{what}']):>7s}" for what in ("median", "p90", "max"))
            for kind in ("in_sample", "loo")
        ]
        lines.append(f"{row['fit']:14s}{row['branch']:10s}{cells[0]}      {cells[1]}")
    return "\n".join(lines)


def _percent(fraction: float) -> str:
    return "-" if np.isnan(fraction) else f"{100 * fraction:.2f}"


def roofline_text(name: str, model: RooflineModel) -> str:
    """The roofline's parameters, one line a context."""
    lines = [f"\n{name}: T(B) = {_LAWS[model.laws[0].form]}, ms"]
    for law in model.laws:
        shown = [
            (key, value)
            for key, value in zip(("overhead", "m0", "m1", "b0", "m2", "c1"), law.parameters, strict=True)
            if law.saturates or key not in ("m1", "b0")
        ]
        bound = law.compute_bound_from
        lines.append(
            "  "
            + "  ".join(f"{key} {0.0 if value < 1e-9 else value:.5g}" for key, value in shown)
            + (f"  (compute-bound from {bound} tokens)" if bound else "  (never compute-bound)")
        )
    return "\n".join(lines)


def price_text(profile: Profile, models: dict[str, StepModel], context: int) -> str:
    """Prices side by side at sizes that show the shape: powers of two, the limit, the end."""
    points = verify_points(profile)[1][context]
    last = int(points.tokens[-1])
    limit = profile.capture_limit
    sizes = {2**power for power in range(last.bit_length()) if 2**power <= last} | {last}
    if 0 < limit < last:
        sizes |= {limit, limit + 1}
    requests = _request_levels(points)[0]
    lines = [f"{'tokens':>8s}{'measured':>12s}" + "".join(f"{name:>14s}" for name in models)]
    for size in sorted(sizes):
        found = np.flatnonzero((points.tokens == size) & (points.requests == requests))
        measured = f"{points.ms[found[0]]:.3f}" if found.size else ""
        prices = "".join(f"{_table(m, requests, last, context)[size]:14.3f}" for m in models.values())
        lines.append(f"{size:8d}{measured:>12s}{prices}")
    if requests != MISSING and points.requests.min() != points.requests.max():
        lines.append(f"  measured and additive: at {requests} requests")
    return "\n".join(lines)


def _request_levels(points: Points) -> list[int]:
    """Request counts to draw: all, where tokens were timed with several; otherwise one, without effect."""
    levels = np.unique(points.requests).tolist()
    several = np.unique(points.tokens).size < points.tokens.size
    return levels if several else [levels[0]]


def _table(model: StepModel, requests: int, last: int, context: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    at = float(model.contexts[context]) if model.depends_on_context else None
    return model.verify_table(max(requests, 0), last, at)


def write(out: Path, profile: Profile, models: dict[str, StepModel], context: int, errors: pd.DataFrame) -> list[Path]:
    """All files of the report, or none."""
    with staged_output(out) as work:
        draw(work, profile, models, context)
        write_csv(residuals(models), work / "residuals.csv")
        write_csv(errors, work / "errors.csv")
        names = sorted(path.name for path in work.iterdir())
    return [out / name for name in names]


def residuals(models: dict[str, StepModel]) -> pd.DataFrame:
    """Measured and fitted milliseconds of every size and fit; error_kind is ``in-sample`` or ``loo``."""
    frames = []
    for name, model in models.items():
        if name == "what-if":
            continue
        for kind, frame in (("in-sample", model.residuals()), ("loo", model.loo())):
            frame.insert(0, "error_kind", kind)
            frame.insert(0, "cost_source", model.label)
            frame.insert(0, "fit", name)
            frames.append(frame)
    return pd.concat([frame for frame in frames if len(frame)], ignore_index=True)


@style()
def draw(folder: Path, profile: Profile, models: dict[str, StepModel], context: int) -> None:
    """The figure: step time and steps per second by tokens in the step."""
    points = verify_points(profile)[1][context]
    levels = _request_levels(points)
    last = int(points.tokens[-1])
    fig, axes = new_figure(2, width=11.0, height=4.6, title=f"{profile.name}: {profile.model}, {profile.hardware}")
    caption(fig, _caption(profile, models, context))
    left, right = axes[0]
    tokens = np.arange(1, last + 1)
    for ax, rate in ((left, False), (right, True)):
        for name, model in models.items():
            for level, requests in enumerate(levels if model.depends_on_requests else levels[:1]):
                ms = _table(model, requests, last, context)[1:]
                _curve(ax, tokens, 1e3 / ms if rate else ms, profile.capture_limit, name, level, requests, model)
        shown = 1e3 / points.ms if rate else points.ms
        eager = points.eager
        word = "measured" if profile.kind == "measured" else "published components"
        for part, fill, label in ((~eager, INK, word), (eager, "white", f"{word}, eager")):
            if part.any():
                ax.plot(
                    points.tokens[part],
                    shown[part],
                    linestyle="none",
                    marker="o",
                    markersize=3.0,
                    markerfacecolor=fill,
                    markeredgecolor=INK,
                    markeredgewidth=0.7,
                    label=label,
                    zorder=2.5,
                )
        _dress(ax, points, last, rate)
    left.set_title("Step time")
    right.set_title("Steps per second, SPS(B)")
    legend(left, "upper left")
    save_figure(fig, folder, "profile_report")


def _curve(
    ax: Axes,
    tokens: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    limit: int,
    name: str,
    level: int,
    requests: int,
    model: StepModel,
) -> None:
    """One model's line, broken at the capture limit: the cliff is a jump, not a slope."""
    label = f"{name}, {requests} requests" if model.depends_on_requests else name
    if name == "what-if":
        what, hardware, _, form = model.label.split(":")
        label = f"{what}:{hardware} ({form})"
    cut = int(np.searchsorted(tokens, limit, side="right")) if limit else tokens.size
    stepped = name == "staircase" and limit > 0
    for part, piece in enumerate((slice(None, cut), slice(cut, None))):
        if tokens[piece].size:
            ax.plot(
                tokens[piece],
                values[piece],
                color=_COLORS[name],
                linestyle=_DASHES[level % len(_DASHES)],
                linewidth=1.3,
                drawstyle="steps-mid" if stepped and part == 0 else "default",
                label=label if part == 0 else None,
                zorder=3,
            )


def _dress(ax: Axes, points: Points, last: int, rate: bool) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xlim(0.9 * float(points.tokens[0]), 1.12 * last)
    if not rate:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(_minor if axis is ax.yaxis and not rate else lambda *_: ""))
    ax.set_xlabel("tokens in the step, B")
    ax.set_ylabel("steps per second" if rate else "ms")
    if points.eager.any():
        ax.axvspan(points.limit, 1.12 * last, color=GRID, alpha=0.6, linewidth=0, zorder=0)
        ax.text(
            (points.limit * 1.12 * last) ** 0.5,
            0.97 if rate else 0.03,
            f"eager, above {points.limit}",
            transform=ax.get_xaxis_transform(),
            ha="center",
            va="top" if rate else "bottom",
            fontsize=7.5,
            color=SOFT,
        )


def _minor(value: float, _position: int | None = None) -> str:
    return f"{value:g}" if f"{value:.0e}"[0] in "25" else ""


def _caption(profile: Profile, models: dict[str, StepModel], context: int) -> str:
    contexts, _ = verify_points(profile)
    at = f" Context {int(contexts[context])} tokens." if contexts.size else ""
    dots = (
        "Points: upper median of the warm repeats of each size."
        if profile.kind == "measured"
        else "Points: computed from published components, not timed steps."
    )
    return f"{dots}{at} Lines: {', '.join(model.label for model in models.values())}. Source: {profile.source}."


if __name__ == "__main__":
    run_main(main)
