"""What does a step cost on this GPU? Times a decoder of a given shape and a DSpark drafter, and writes a profile.

Weights are random and made on the device: time depends on the shapes, and on which experts the tokens hit (they are
distinct and random). Sizes are visited from coarse to fine and what is timed is saved as it goes, so a run that ends
early, by --minutes or otherwise, leaves a profile that can be used. docs/profile-gpu.md says what a timed step is.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter
from tqdm import tqdm

from dsim.errors import InputError
from dsim.gpu_profile.decoder import graphable
from dsim.gpu_profile.grid import Case, Grid, Memory, layer_cache_elements, plan_memory, schedule
from dsim.gpu_profile.measure import Bench, Drift, Timed, measure, profile_of
from dsim.gpu_profile.shapes import DECODER_KEYS, DRAFTER_KEYS, PRESETS, DecoderShape, DrafterShape, models
from dsim.gpu_profile.timers import timer_for
from dsim.plotstyle import GRID, INK, SOFT, caption, legend, new_figure, save_figure, style
from dsim.profile import Profile, write_profile
from dsim.schema import parse_override
from experiments._common import OneLineParser, positive_int, print_table, run_main, staged_output

#: Seconds between two savings of what is timed so far, and those kept for the figure and the table at the end.
SAVE_EVERY_S, KEPT_S = 5.0, 10.0
#: Memory that a run on the CPU may take: toy shapes only.
CPU_BYTES = 4 << 30
_clock = time.monotonic
_COLORS = ("#56B4E9", "#0072B2", "#332288", "#009E73", "#D55E00", "#CC79A7")


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = OneLineParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example, below eight minutes on a data-center GPU: "
        "profile_gpu.py --preset qwen3-8b --contexts 512,2048,8192 --minutes 8",
    )
    cli.add_argument("--preset", default="qwen3-8b", help=f"one of {', '.join(PRESETS)} (default: %(default)s)")
    cli.add_argument(
        "--set",
        metavar="KEY=N",
        dest="changes",
        action="append",
        default=[],
        help=f"change one size of the preset: {', '.join(DECODER_KEYS)}, or of its drafter: "
        f"{', '.join('drafter.' + key for key in DRAFTER_KEYS)}; may be repeated",
    )
    cli.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for toy shapes (default: %(default)s)")
    cli.add_argument(
        "--contexts",
        type=_sizes,
        default=(512, 2048, 8192),
        metavar="N,N",
        help="tokens of each request in the KV cache (default: 512,2048,8192)",
    )
    cli.add_argument(
        "--draft-context", type=positive_int, metavar="N", help="the one for drafts (default: the middle of --contexts)"
    )
    cli.add_argument(
        "--tokens-per-request",
        type=_sizes,
        default=(4,),
        metavar="N,N",
        help="l + 1: a step of B tokens is ceil(B / N) requests; several are for the additive fit only (default: 4)",
    )
    cli.add_argument(
        "--max-requests", type=positive_int, default=256, metavar="N", help="in a step (default: %(default)s)"
    )
    cli.add_argument(
        "--capture-limit",
        type=positive_int,
        default=1024,
        metavar="N",
        help="largest captured size; below it those of vLLM (default: %(default)s)",
    )
    cli.add_argument(
        "--eager",
        type=_sizes,
        metavar="N,N",
        help="sizes above it, or none (default: 1.5, 2, 4, 8 and 16 times the capture limit)",
    )
    cli.add_argument(
        "--prefill", type=_sizes, metavar="N,N", help="prompt lengths, or none (default: 128, 256 and so on to 8192)"
    )
    cli.add_argument(
        "--repeats", type=positive_int, default=5, metavar="N", help="of a size, the cold one kept (default: 5)"
    )
    cli.add_argument(
        "--minutes", type=_minutes, default=8.0, metavar="X", help="most that the run may take (default: 8)"
    )
    cli.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and tokens (default: %(default)s)")
    cli.add_argument("--name", metavar="NAME", help="of the profile (default: from device and preset)")
    cli.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the results (default: results/profile_gpu/NAME)"
    )
    return cli


def _sizes(text: str) -> tuple[int, ...]:
    if text.strip() == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got '{text}', expected integers with commas between, or none") from None


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"got '{text}', expected a number > 0")
    return value


@dataclass(frozen=True)
class Plan:
    """What is timed, on what, and where it goes."""

    target: DecoderShape
    drafter: DrafterShape
    grid: Grid
    device: torch.device
    name: str
    out: Path
    repeats: int
    minutes: float
    seed: int


def plan_of(given: argparse.Namespace) -> Plan:
    """The options, checked as far as that goes without using the device.

    Raises
    ------
    InputError
        Options that contradict each other, an unknown preset, no such device.
    """
    changes = dict(parse_override(text) for text in given.changes)
    if len(changes) < len(given.changes):
        raise InputError("a size is set twice", field="--set", value=given.changes, expected="each size once")
    target, drafter = models(given.preset, changes)
    grid = grid_of(given, target.vocabulary)
    if grid.largest > target.vocabulary:
        raise InputError(
            "the tokens of a pass are distinct",
            field="vocabulary",
            value=target.vocabulary,
            expected=f"at least the largest pass, {grid.largest} tokens",
        )
    device = device_of(given.device)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    parts = [hardware, given.preset, *(["custom"] if changes else [])]
    name = given.name or "-".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise InputError(field="--name", value=name, expected="lower-case letters, digits, '.', '_' and '-'")
    out = given.out or Path("results") / "profile_gpu" / name
    return Plan(target, drafter, grid, device, name, out, given.repeats, given.minutes, given.seed)


def grid_of(given: argparse.Namespace, vocabulary: int) -> Grid:
    """The sizes; defaults that would exceed the vocabulary are left out."""
    limit, contexts = given.capture_limit, given.contexts
    eager, prefill = given.eager, given.prefill
    if eager is None:
        eager = tuple(sorted({n * limit // 2 for n in (3, 4, 8, 16, 32) if limit < n * limit // 2 <= vocabulary}))
    if prefill is None:
        prefill = tuple(2**n for n in range(7, 14) if 2**n <= vocabulary)
    middle = contexts[len(contexts) // 2] if contexts else 0
    return Grid(
        contexts=contexts,
        capture_limit=limit,
        eager=eager,
        tokens_per_request=given.tokens_per_request,
        max_requests=given.max_requests,
        draft_context=given.draft_context if given.draft_context is not None else middle,
        prefill=prefill,
    )


def device_of(name: str) -> torch.device:
    """The device of that name, if it is there."""
    expected = "a CUDA device (cuda, cuda:N) that is there, or cpu with a toy --preset (tiny, tiny-moe)"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(field="--device", value=name, expected=expected) from None
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= found):
        raise InputError(f"there are {found} CUDA devices here", field="--device", value=name, expected=expected)
    return device


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the profile and its figure."""
    began = _clock()
    plan = plan_of(options().parse_args(argv))
    with staged_output(plan.out):
        pass  # what is wrong with the folder is said before anything is timed
    profile = timed_profile(plan, began)
    summary(profile)
    with staged_output(plan.out) as work:
        draw(work, profile)
    file = plan.out / f"{plan.name}.toml"
    print(f"\nprofile: {file}\nnext: python experiments/profile_report.py {file}")


def timed_profile(plan: Plan, began: float) -> Profile:
    """Run the plan, saving what there is every few seconds and when it ends, however it ends.

    Raises
    ------
    InputError
        The shape does not fit, or the time did not suffice for one size.
    """
    cuda = plan.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    budget = 60.0 * plan.minutes
    timer = timer_for(plan.device)
    done: list[Timed] = []
    drift = Drift()
    with timer.session():
        graphs = timer.graphs and (not plan.target.experts or graphable(plan.device))
        cases = schedule(plan.grid, plan.drafter, graphs=graphs)
        free = torch.cuda.mem_get_info(plan.device)[0] if cuda else CPU_BYTES
        memory = plan_memory(plan.target, plan.drafter, cases, item_bytes=dtype.itemsize, free_bytes=free)
        bench = Bench(plan.target, plan.drafter, memory, device=plan.device, dtype=dtype, seed=plan.seed)

        def save() -> Profile:
            profile = profile_of(
                done,
                name=plan.name,
                hardware=hardware_text(plan.device),
                model=model_text(plan, dtype),
                engine=engine_text(plan, graphs),
                source="experiments/profile_gpu.py of dsim",
                notes=notes_text(plan, cases, memory, len(done), drift),
            )
            with staged_output(plan.out) as work:
                write_profile(profile, work / f"{plan.name}.toml")
            return profile

        saved = _clock()
        results = measure(
            cases,
            bench.step,
            timer,
            repeats=plan.repeats,
            drift=drift,
            deadline=began + budget - min(KEPT_S, 0.1 * budget),
            clock=_clock,
        )
        try:
            with tqdm(results, total=len(cases), unit="size", desc=plan.name) as bar:
                for item in bar:
                    done.append(item)
                    bar.set_postfix_str(f"{item.case}: {np.median(item.ms):.3f} ms", refresh=False)
                    if _clock() - saved > SAVE_EVERY_S:
                        save()
                        saved = _clock()
        except BaseException:
            if done:
                save()
                print(f"kept: {len(done)} of {len(cases)} sizes, {plan.out / plan.name}.toml", file=sys.stderr)
            raise
        if not done:
            raise InputError("no size was timed", field="--minutes", value=plan.minutes, expected="more minutes")
        return save()


def hardware_text(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cpu":
        return f"CPU ({platform.machine()}), {torch.get_num_threads()} of {os.cpu_count()} threads"
    found = torch.cuda.get_device_properties(device)
    return f"1x {found.name}, {found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors"


def model_text(plan: Plan, dtype: torch.dtype) -> str:
    """Target and drafter in words."""
    t, d = plan.target, plan.drafter
    network = f"{t.experts} experts of {t.ffn}, {t.experts_per_token} a token" if t.experts else f"network {t.ffn}"
    return (
        f"shape of {t.name}, random weights, {str(dtype).removeprefix('torch.')}: {t.layers} layers, width {t.width}, "
        f"{t.heads} heads ({t.kv_heads} for keys) of {t.head_dim}, {network}, vocabulary {t.vocabulary}; "
        f"DSpark drafter: {d.layers} layers, block {d.gamma}, Markov rank {d.rank}, vocabulary {d.vocabulary}"
    )


def engine_text(plan: Plan, graphs: bool) -> str:
    """What ran it."""
    cuda = f", CUDA {torch.version.cuda}" if plan.device.type == "cuda" else ""
    how = f"CUDA graphs up to {plan.grid.capture_limit} tokens, eager above" if graphs else "no graphs"
    return f"dsim profile_gpu, PyTorch {torch.__version__}{cuda}; {how}"


def notes_text(plan: Plan, cases: Sequence[Case], memory: Memory, done: int, drift: Drift) -> str:
    """What somebody who uses the profile has to know."""
    grid, gamma = plan.grid, plan.drafter.gamma
    each = " or ".join(str(one) for one in grid.tokens_per_request)
    largest = max(layer_cache_elements(case, plan.target) for case in cases if case.kind != "draft")
    caches = min(plan.target.layers, memory.cache_elements // largest)
    return " ".join(
        [
            f"A verify step of B tokens is ceil(B / {each}) requests, at most {grid.max_requests}, whose lengths "
            "differ by at most one; its tokens are distinct and random. Logits and argmax of at most "
            f"{gamma + 1} tokens a request; no sampling, no collectives, no host.",
            f"Draft: context {grid.draft_context}, {min(gamma + 1, grid.draft_context)} tokens a request injected, "
            "tokens drawn. Prefill: one prompt, no context.",
            "Repeat 0 is cold. Replayed graphs: time of the device; eager passes: launches included. Kernels are "
            "PyTorch's own, one an operation: small steps cost more than in an engine that fuses them.",
            f"Of {plan.target.layers} layers {memory.held_layers} have weights and, in the largest step, {caches} a "
            "cache of their own; others take turns with them.",
            f"Drift: {drift}.",
            f"{done} of {len(cases)} sizes timed, coarse to fine." if done < len(cases) else "All sizes timed.",
        ]
    )


def warm(profile: Profile, kind: str) -> pd.DataFrame:
    """Warm repeats of one kind, one row a size: context, tokens, requests; median, min and max of the milliseconds."""
    samples = profile.samples.of(kind)
    table = pd.DataFrame(
        {
            "context": samples.context_tokens,
            "tokens": samples.tokens,
            "requests": samples.requests,
            "ms": samples.ms,
            "repeat": samples.repeat,
        }
    )
    sizes = ["context", "tokens", "requests"]
    # As the fits do: the cold repeat is left out where at least two others are there.
    several = table.groupby(sizes)["repeat"].transform("size") >= 3
    kept = table[(table["repeat"] > 0) | ~several].groupby(sizes)["ms"]
    return kept.agg(["median", "min", "max"]).reset_index()


def summary(profile: Profile) -> None:
    """Print what was measured: identity, then a table of each kind."""
    rows = {"hardware": profile.hardware, "model": profile.model, "engine": profile.engine, "notes": profile.notes}
    print("\n".join(f"{key:9s} {value}" for key, value in rows.items()))
    verify = warm(profile, "verify")
    limit = profile.capture_limit
    powers = 2 ** np.arange(20)
    shown = verify[verify["tokens"].isin([*powers, limit, verify["tokens"].max()])]
    table = shown.pivot_table(index=["tokens", "requests"], columns="context", values="median")
    table = table.rename(columns=lambda context: f"ms at {context}").reset_index()
    print("\nverify: warm medians by tokens in the step, for each context")
    print_table(table)
    for kind, size in (("draft", "requests"), ("prefill", "tokens")):
        found = warm(profile, kind)
        if len(found):
            print(f"\n{kind}: warm medians by {size}")
            print_table(found[found[size].isin([*powers, found[size].max()])][[size, "median", "min", "max"]])


@style()
def draw(folder: Path, profile: Profile) -> None:
    """The figure: milliseconds of verify steps by context, of drafts and of prefills."""
    limit = profile.capture_limit
    verify, draft, prefill = (warm(profile, kind) for kind in ("verify", "draft", "prefill"))
    panels = [
        ("verify", verify),
        *((name, part) for name, part in (("draft", draft), ("prefill", prefill)) if len(part)),
    ]
    fig, axes = new_figure(
        len(panels),
        width=4.4 * len(panels) if len(panels) > 1 else 7.2,
        height=4.2,
        title=f"{profile.name}: {profile.hardware}",
    )
    dots = "Points: medians of the warm repeats of each size; bars: their range."
    caption(fig, f"Measured on {profile.hardware}: {profile.model}. {profile.engine}. {dots}")
    for ax, (kind, table) in zip(axes[0], panels, strict=True):
        size = "requests" if kind == "draft" else "tokens"
        # Of several splits of a token count the one over the most requests is drawn.
        table = table.sort_values("requests").groupby(["context", size], as_index=False).last()
        for index, (context, at) in enumerate(table.groupby("context")):
            look = _COLORS[index % len(_COLORS)] if kind == "verify" else INK
            label = f"context {context}" if kind != "prefill" else "no context"
            _line(ax, at, size, look, label, limit if kind != "draft" else 0)
        ax.set_title({"verify": "Verify step", "draft": "Draft pass", "prefill": "Prefill of one prompt"}[kind])
        _dress(ax, table, size, limit if kind != "draft" else 0)
        legend(ax, "upper left")
    axes[0][0].set_ylabel("ms")
    save_figure(fig, folder, "profile_gpu")


def _line(ax: Axes, at: pd.DataFrame, size: str, color: str, label: str, limit: int) -> None:
    """Medians of one context, with the range of the warm repeats; captured and eager sizes are two lines."""
    eager = at[size] > limit if limit else at[size] < 0
    for part, fill, name in ((at[~eager], color, label), (at[eager], "white", None)):
        if not len(part):
            continue
        spread = np.stack([part["median"] - part["min"], part["max"] - part["median"]])
        ax.errorbar(
            part[size],
            part["median"],
            yerr=spread,
            color=color,
            marker="o",
            markersize=3.0,
            markerfacecolor=fill,
            markeredgewidth=0.7,
            linewidth=1.1,
            elinewidth=0.9,
            label=name,
        )


def _dress(ax: Axes, table: pd.DataFrame, size: str, limit: int) -> None:
    last = float(table[size].max())
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(0.9 * float(table[size].min()), 1.15 * last)
    ax.set_ylim(0.8 * float(table["min"].min()), 2.0 * float(table["max"].max()))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else ""))
    ax.set_xlabel({"tokens": "tokens, B", "requests": "requests"}[size])
    if 0 < limit < last:
        ax.axvspan(limit, 1.15 * last, color=GRID, alpha=0.6, linewidth=0, zorder=0)
        ax.text(
            (limit * 1.15 * last) ** 0.5,
            0.02,
            "eager",
            transform=ax.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=SOFT,
        )


if __name__ == "__main__":
    run_main(main)
