"""How much is left above today's policy, and what would it take to get it?

One scenario, one drafter, three loads. Today's policy (dspark:lag=2) is changed in one respect at a time: what its
confidences are worth, how old they are, how it searches, how it reads the prices of steps and which ones it counts.
Every variant meets the same requests with the same drafts and luck, so differences are paired seed by seed. The figure
is a waterfall: from the best fixed block length at each load, over today's policy, one that is not a step behind, and
one that knows every draft's exact chance, to an oracle that knows what will be accepted. Beside it stand the regret of
every decision against the best budget under the exact probabilities, and what simple planners lose in a single step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dsim.compare import Paired, holm, paired
from dsim.drafts.quality import measured, parse_quality
from dsim.errors import InputError
from dsim.figures import caption, new_figure, save_figure
from dsim.intervals import MIN_SEEDS
from dsim.plotstyle import INK, SOFT, panel_title, style
from dsim.probe import StepRegret
from dsim.scenario import bank_of, tilt_of
from dsim.schema import Scenario, is_replaced, parse_scenario
from dsim.sweep import grid, run
from dsim.wording import signed
from experiments._common import (
    parser,
    positive_int,
    print_table,
    refuse_loads,
    refuse_sets,
    run_main,
    run_options,
    scenario_of,
    sources_note,
    staged_output,
    write_csv,
    write_scenario,
    written,
)
from experiments._losses import loss_table

TODAY = "dspark:lag=2"
NO_LAG = "lab:capacity_lag=0"
LAGS = (0, 1, 2, 4, 16)
THROUGHPUT = "throughput_tok_s_gpu"
#: Waterfall: rung, policy, confidences. The first rung is the best of `FIXED`.
RUNGS = (
    ("today's policy\n(dspark, lag 2)", TODAY, "recorded"),
    ("no staleness\n(lag 0)", NO_LAG, "recorded"),
    ("perfect probabilities", NO_LAG, "perfect"),
    ("knowing the outcome\n(oracle)", "oracle", "recorded"),
)
WATERFALL, FIXED, BEST = "waterfall", "fixed k", "best possible"
GAIN = ("gain", "gain_lo", "gain_hi")
#: Means over seeds that every row has beside throughput and speed.
MEANS = (
    "accepted_length",
    "verification_budget",
    "acceptance_rate",
    "tpot_p99_ms",
    "regret_mean",
    "regret_p90",
    "regret_p99",
)
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#8A8A8A")
_TITLE = "How far is today's policy from the best possible? Throughput above the best fixed length"


@dataclass(frozen=True)
class Variant:
    """One line of the study: a policy, and what its confidences are worth."""

    group: str
    name: str
    policy: str
    confidence: str | Mapping[str, float] = "recorded"
    calibration: str | None = None  # None: the drafter's own
    gamma: int | None = None  # None: the scenario's

    @property
    def drafter(self) -> str:
        """Ending of the name of the drafter that has these confidences; empty for the drafter itself."""
        quality = parse_quality(self.confidence)
        return "raw" if self.calibration is not None else "" if quality is None else quality.label

    @property
    def arm(self) -> str:
        """Name of the arm: variants of several groups that are one arm are run once."""
        return f"{self.policy}{'' if self.gamma is None else '/0'}{f' {self.drafter}' if self.drafter else ''}"


def variants(gamma: int, domains: Sequence[str], raw: str | None) -> list[Variant]:
    """All lines of the study, group by group.

    Parameters
    ----------
    gamma
        Block size.
    domains
        Text domains that occur; with fewer than two there is no bias between them.
    raw
        The `calibration` of a drafter that shows the head's raw confidences; None where they are what is recorded.
    """
    made = [Variant(FIXED, "no speculation", "none", gamma=0)]
    made += [Variant(FIXED, f"k = {k}", f"fixed:k={k}") for k in range(1, gamma + 1)]
    group = BEST
    made += [
        Variant(group, "today", TODAY),
        Variant(group, "no staleness", NO_LAG),
        Variant(group, "no staleness, whole step priced", f"{NO_LAG},price=step"),
        Variant(group, "perfect probabilities, lag 2", TODAY, "perfect"),
        Variant(group, "perfect probabilities, no staleness", NO_LAG, "perfect"),
        Variant(group, "the same, whole step priced", f"{NO_LAG},price=step", "perfect"),
        Variant(group, "clairvoyant (oracle)", "oracle"),
    ]
    group = "confidence quality"
    levels = [f"overconfident:{e:g}" for e in (0.05, 0.1, 0.2)] + ["underconfident:0.1"]
    made += [Variant(group, "perfect", TODAY, "perfect"), Variant(group, "recorded, calibrated", TODAY)]
    if raw is not None:
        made.append(Variant(group, "recorded, raw", TODAY, calibration=raw))
    made += [
        Variant(group, f"{level.partition(':')[0]}, ECE {100 * float(level.partition(':')[2]):g} %", TODAY, level)
        for level in levels
    ]
    if len(domains) > 1:
        made.append(Variant(group, "constant by domain", TODAY, "constant:domain"))
    made.append(Variant(group, "constant", TODAY, "constant"))
    if len(domains) > 1:
        made.append(Variant(group, "shuffled within domain", TODAY, "shuffled:domain"))
    made.append(Variant(group, "shuffled", TODAY, "shuffled"))
    group = "staleness of the budget"
    made += [Variant(group, f"{lag} steps", f"lab:capacity_lag={lag}" if lag != 2 else TODAY) for lag in LAGS]
    group = "staleness of the allocation"
    made += [Variant(group, f"{lag} steps", f"lab:allocation_lag={lag}" if lag else TODAY) for lag in LAGS]
    group = "staleness of both"
    made += [
        Variant(group, f"{lag} steps", f"lab:capacity_lag={lag}{f',allocation_lag={lag}' if lag else ''}")
        for lag in LAGS
    ]
    group = "search"
    made.append(Variant(group, "global, exact prices", NO_LAG))
    stop = f"{NO_LAG},search=early-stop"
    for name, lookup in (
        ("exact prices", ""),
        ("line through captured sizes", ",lookup=linear"),
        ("line through every 64th", ",lookup=linear,probes=64"),
        ("line through 1, 2, 4, 8, ...", ",lookup=linear,probes=doubling"),
    ):
        made.append(Variant(group, f"early stop, {name}", f"{stop}{lookup}"))
    group = "look-up"
    made.append(Variant(group, "exact", TODAY))
    for sizes, probes in (
        ("captured sizes", ""),
        ("every 64th", ",probes=64"),
        ("1, 2, 4, 8, ...", ",probes=doubling"),
    ):
        for rule in ("next", "linear", "floor"):
            made.append(Variant(group, f"{rule}, {sizes}", f"lab:lookup={rule}{probes}"))
    group = "what is priced"
    made.append(Variant(group, "target's pass", TODAY))
    made.append(Variant(group, "target's and drafter's", "lab:price=draft"))
    made.append(Variant(group, "whole step, host included", "lab:price=step"))
    if len(domains) > 1:
        group = "bias by domain"
        made.append(Variant(group, "none added", TODAY))
        for size in (0.5, 1.0, 2.0):
            shifts = dict(zip(domains, np.linspace(size, -size, len(domains)).round(6).tolist(), strict=True))
            shown = ", ".join(f"{domain} {logits:+g}" for domain, logits in shifts.items())
            made.append(Variant(group, f"{shown} logits", TODAY, {d: b for d, b in shifts.items() if b}))
    return made


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = parser(__doc__, out="results/headroom")
    cli.add_argument(
        "--users", metavar="N,N,...", default="8,64,256", help="concurrent users: the loads (default: %(default)s)"
    )
    cli.add_argument(
        "--drafter", metavar="NAME", default="dspark", help="the scenario's drafter to study (default: %(default)s)"
    )
    cli.add_argument("--waterfall", action="store_true", help="only what the figure needs: a quarter of the runs")
    return cli


def main(argv: Sequence[str] | None = None) -> None:
    """Run all variants, print the tables, write the files."""
    args = options().parse_args(argv)
    refuse_loads(args, "--users")
    refuse_sets(args, {"arms": "no arms: the study has its own"})
    scenario = scenario_of(args)
    users = _users(args.users)
    study, lines = study_of(scenario, args.drafter, only_waterfall=args.waterfall)
    with staged_output(args.out) as out:
        points = grid(study, users=users)
        print(
            f"{len(study.arms)} arms x {len(users)} loads x {study.measure.seeds} seeds = {len(points)} runs",
            flush=True,
        )
        runs = run(study, points, probe=StepRegret, **run_options(args, study)).table
        table = headroom_table(runs, lines, confidence_table(study, lines, args.drafter))
        losses = loss_table(scenario, args.drafter, batches=20 if args.quick else 100)
        rungs = table[table["group"] == WATERFALL]
        report(table, losses)
        print(f"\n{verdict(rungs)}")
        write_csv(table, out / "headroom.csv")
        write_csv(losses, out / "headroom_losses.csv")
        write_csv(runs, out / "headroom_runs.csv")
        write_scenario(study, out / "scenario.toml")
        draw(rungs, runs, study, out)
        written(out)
    print(f"written to {args.out}")


def _users(text: str) -> list[int]:
    try:
        users = [positive_int(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        users = []
    if not users or len(set(users)) < len(users):
        raise InputError(field="--users", value=text, expected="distinct integers >= 1, such as 8,64,256")
    return sorted(users)


def study_of(scenario: Scenario, drafter: str, *, only_waterfall: bool = False) -> tuple[Scenario, list[Variant]]:
    """The scenario with the study's arms and the drafters that they need, and the study's lines."""
    if drafter not in scenario.drafters:
        raise InputError(field="--drafter", value=drafter, expected=f"one of {', '.join(scenario.drafters)}")
    if scenario.drafts.source == "live":
        raise InputError(
            "live drafts are not paired, and their acceptance probabilities are not known beforehand",
            field="drafts.source",
            value="live",
            expected="recorded, tilted or synthetic",
        )
    gamma, section = scenario.drafts.gamma, scenario.drafters[drafter]
    if gamma < 1:
        raise InputError(field="drafts.gamma", value=gamma, expected=">= 1: there is nothing to decide without drafts")
    for key, refused in (
        ("confidence", section.confidence != "recorded"),
        ("calibration", section.calibration == "online"),
    ):
        if refused:
            field = f"drafters.{drafter}.{key}"
            raise InputError("the study varies this itself", field=field, value=getattr(section, key))
    lines = variants(gamma, _domains(scenario, drafter), _raw(scenario, drafter))
    if only_waterfall:
        rungs = {variant.arm for variant in waterfall(lines[0])}
        lines = [one for one in lines if one.group == FIXED or (one.group == BEST and one.arm in rungs)]
    raw = scenario.model_dump(mode="python")
    for variant in lines:
        if variant.drafter:
            made = dict(raw["drafters"][drafter])
            replaced = not isinstance(variant.confidence, Mapping) and is_replaced(variant.confidence)
            own = "bank" if replaced else section.calibration
            made |= {"confidence": variant.confidence, "calibration": variant.calibration or own}
            # Its drafts are those of the drafter, by name if it names no bank.
            made["like"] = None if scenario.names_all(section) else section.like or drafter
            raw["drafters"][f"{drafter}-{variant.drafter}"] = made
    raw["arms"] = tuple(
        {"name": one.arm, "policy": one.policy, "drafter": _drafter(drafter, one), "gamma": one.gamma}
        for one in {variant.arm: variant for variant in lines}.values()
    )
    return parse_scenario(raw), lines


def _drafter(drafter: str, variant: Variant) -> str:
    return f"{drafter}-{variant.drafter}" if variant.drafter else drafter


def _domains(scenario: Scenario, drafter: str) -> list[str]:
    """Domains that the requests come from, in the bank's order."""
    known = bank_of(scenario, drafter).header.domains
    wanted = scenario.drafts.domains
    return [name for name in known if wanted is None or wanted.get(name, 0.0) > 0]


def _raw(scenario: Scenario, drafter: str) -> str | None:
    """The `calibration` that shows raw confidences where the drafter's own does not."""
    section = scenario.drafters[drafter]
    plain = scenario.model_copy(
        update={"drafters": scenario.drafters | {drafter: section.model_copy(update={"calibration": "bank"})}}
    )
    cooled = any(t != 1 for t in bank_of(plain, drafter).header.temperatures)
    if section.calibration == "bank":
        return "none" if cooled else None
    return None if section.calibration == "none" else "none" if cooled else "bank"


def confidence_table(study: Scenario, lines: Sequence[Variant], drafter: str) -> dict[str, tuple[float, float]]:
    """ECE and AUC of the cumulative confidence, means over positions, by `Variant.drafter`."""
    found = {}
    for variant in {variant.drafter: variant for variant in lines}.values():
        bank = bank_of(study, _drafter(drafter, variant))
        tilt = tilt_of(study, _drafter(drafter, variant), bank)
        errors, areas = measured(bank, tilt, study.drafts.gamma, parse_quality(variant.confidence))
        found[variant.drafter] = float(errors.mean()), float(np.mean(areas))
    return found


def best_fixed(runs: pd.DataFrame, lines: Sequence[Variant], users: int) -> Variant:
    """The fixed length with the highest mean throughput at a load."""
    fixed = [variant for variant in lines if variant.group == FIXED]
    return max(fixed, key=lambda variant: float(runs_of(runs, variant.arm, users)[THROUGHPUT].mean()))


def runs_of(runs: pd.DataFrame, arm: str, users: int) -> pd.DataFrame:
    """The runs of an arm at a load, by seed."""
    return runs[(runs["arm"] == arm) & (runs["concurrency"] == users)].set_index("seed")


def headroom_table(
    runs: pd.DataFrame, lines: Sequence[Variant], confidences: Mapping[str, tuple[float, float]]
) -> pd.DataFrame:
    """One row a group, variant and load: means, and paired differences from today's policy and the best fixed k.

    Differences are fractions of the other's mean, ``gain`` (waterfall only: over the rung before) one of the best fixed
    k's. ``p_holm`` is Holm's adjustment of the differences from today's policy over all arms at a load.
    """
    rows: list[dict[str, Any]] = []
    for users in runs["concurrency"].drop_duplicates():
        best = best_fixed(runs, lines, users)
        today, fixed = runs_of(runs, TODAY, users), runs_of(runs, best.arm, users)
        others = [arm for arm in runs["arm"].drop_duplicates() if arm != TODAY]
        p = {arm: paired(today[THROUGHPUT], runs_of(runs, arm, users)[THROUGHPUT]).p for arm in others}
        adjusted = dict(zip(p, holm(list(p.values())), strict=True))
        before = fixed
        for variant in (*waterfall(best), *lines):
            mine = runs_of(runs, variant.arm, users)
            against = paired(today[THROUGHPUT], mine[THROUGHPUT])
            gain = paired(before[THROUGHPUT], mine[THROUGHPUT])
            step = (gain.difference, gain.lo, gain.hi) if variant.group == WATERFALL else (np.nan,) * 3
            before = mine
            ece, auc = confidences[variant.drafter]
            rows.append(
                {
                    "group": variant.group,
                    "variant": variant.name,
                    "policy": variant.policy,
                    "confidence": variant.drafter or "recorded",
                    "gamma": int(mine["gamma"].iloc[0]),
                    "concurrency": users,
                    "best_fixed": best.name,
                    "n_seeds": against.n_seeds,
                    THROUGHPUT: float(mine[THROUGHPUT].mean()),
                    **_differences("throughput_vs_today", against),
                    "p_holm": adjusted.get(variant.arm, np.nan),
                    **_differences("throughput_vs_fixed", paired(fixed[THROUGHPUT], mine[THROUGHPUT])),
                    **{name: d / fixed[THROUGHPUT].mean() for name, d in zip(GAIN, step, strict=True)},
                    "tps_per_user": float(mine["tps_per_user"].mean()),
                    **_differences("tps_vs_today", paired(today["tps_per_user"], mine["tps_per_user"])),
                    **_differences("tps_vs_fixed", paired(fixed["tps_per_user"], mine["tps_per_user"])),
                    "interval": against.kind,
                    **{name: float(mine[name].mean()) for name in MEANS},
                    "confidence_ece": ece,
                    "confidence_auc": auc,
                    "cost_source": mine["cost_source"].iloc[0],
                    "drafts_source": mine["drafts_source"].iloc[0],
                    "trace_source": mine["trace_source"].iloc[0],
                    "extrapolated": bool(mine["extrapolated"].any()),
                    "n_scored": int(mine["n_scored"].sum()),
                }
            )
    table = pd.DataFrame(rows)
    order = {group: i for i, group in enumerate(dict.fromkeys([WATERFALL, *(variant.group for variant in lines)]))}
    return table.sort_values("group", key=lambda names: names.map(order), kind="stable", ignore_index=True)


def waterfall(best: Variant) -> list[Variant]:
    """The rungs at a load, given its best fixed length."""
    first = Variant(WATERFALL, f"best fixed length: {best.name}", best.policy, gamma=best.gamma)
    return [first, *(Variant(WATERFALL, " ".join(name.split()), policy, quality) for name, policy, quality in RUNGS)]


def _differences(name: str, found: Paired) -> dict[str, float]:
    return {name: found.relative, f"{name}_lo": found.relative_lo, f"{name}_hi": found.relative_hi}


def verdict(rungs: pd.DataFrame) -> str:
    """One sentence a load, from the waterfall's rows."""
    sentences = []
    for users, part in rungs.groupby("concurrency", sort=False):
        today, lag, perfect, oracle = (signed(value) for value in part["gain"].iloc[1:])
        left = 100 * part["throughput_vs_today"].iloc[-1]
        sentences.append(
            f"{users} users: today's policy is {today} % over the best fixed length ({part['best_fixed'].iloc[0]}). "
            f"The oracle is {left:.1f} % above it; of that way (in % of the fixed length's throughput) {lag} is "
            f"staleness, {perfect} better probabilities, {oracle} the outcomes, which nobody can know."
        )
    return "\n".join(sentences)


def report(table: pd.DataFrame, losses: pd.DataFrame) -> None:
    """The printed tables."""
    print("\nthroughput (tok/s/GPU): from the best fixed length to the oracle")
    rungs = table[table["group"] == WATERFALL].reset_index(drop=True)
    shown = rungs[["concurrency", "variant", THROUGHPUT, "tps_per_user"]].copy()
    shown["above it %"] = [signed(value) for value in rungs["throughput_vs_fixed"]]
    shown["gain % [lo, hi]"] = [
        "" if i % (len(RUNGS) + 1) == 0 else f"{signed(gain, 2)} [{signed(lo, 2)}, {signed(hi, 2)}]"
        for i, (gain, lo, hi) in enumerate(rungs[list(GAIN)].to_numpy())
    ]
    print_table(shown)
    users = table["concurrency"].drop_duplicates().tolist()
    for group in table["group"].drop_duplicates().tolist()[1:]:
        part = table[table["group"] == group]
        print(f"\n{group}: throughput against today's policy, % [interval], and mean regret a step, %")
        first = part[part["concurrency"] == users[0]]
        shown = pd.DataFrame({"variant": first["variant"].tolist()})
        for load in users:
            here = part[part["concurrency"] == load]
            shown[f"{load} users"] = [_difference_text(row) for _, row in here.iterrows()]
            shown[f"regret at {load}"] = _percent(here["regret_mean"])
        if group in ("confidence quality", "bias by domain"):
            shown["ECE %"] = _percent(first["confidence_ece"])
            shown["AUC"] = first["confidence_auc"].tolist()
        print_table(shown, digits=3)
    few = bool((table["n_seeds"] < MIN_SEEDS).any())
    print("[lo, hi]: " + ("range of fewer than five seeds" if few else "95 % paired t interval; *: shown after Holm"))
    print("\nloss of one step against the best budget, %, by requests in the batch (* a captured size)")
    names = [f"{n}{'*' if on else ''}" for n, on in losses[["requests", "captured"]].drop_duplicates().to_numpy()]
    for column, what in (("loss", ""), ("loss_if_exact", " (if the confidences were exact)")):
        wide = losses.pivot_table(index="planner", columns="requests", values=column, sort=False)
        wide = wide.apply(_percent).set_axis(names, axis=1).reset_index()
        print_table(wide.rename(columns={"planner": f"planner{what}"}), digits=3)


def _percent(fractions: pd.Series) -> list[float]:
    """Percent to read: what is below a thousandth of one is nothing."""
    return [float(value) for value in (100 * fractions).round(3)]


def _difference_text(row: pd.Series) -> str:
    middle, low, high = (signed(row[f"throughput_vs_today{end}"]) for end in ("", "_lo", "_hi"))
    return f"{middle} [{low}, {high}]{'*' if row['p_holm'] <= 0.05 else ''}"


@style()
def draw(rungs: pd.DataFrame, runs: pd.DataFrame, study: Scenario, out: Path) -> None:
    """The waterfall: one panel a load."""
    loads = rungs["concurrency"].drop_duplicates().tolist()
    # One line of title is as wide as three panels.
    narrow = len(loads) < 3
    fig, axes = new_figure(
        ncols=len(loads),
        width=max(5.6, 2.2 + 2.5 * len(loads)),
        height=3.5 if narrow else 3.3,
        sharey=True,
        sharex=True,
        title=_TITLE.replace("? ", "?\n") if narrow else _TITLE,
    )
    seeds = study.measure.seeds
    bars = "95 % paired t intervals of each gain" if seeds >= MIN_SEEDS else "ranges of each gain"
    used = runs[runs["drafts_source"].isin(rungs["drafts_source"])]
    caption(
        fig,
        f"{sources_note(study, used)} {seeds} paired seeds; black lines: {bars}. The fixed length is the best of each "
        "load, in hindsight. Perfect probabilities: the exact chance of each draft. The oracle knows what will be "
        "accepted (and looks no further than one step). With lag 0 the search is not lossless.",
    )
    for ax, users in zip(axes[0], loads, strict=True):
        _panel(ax, rungs[rungs["concurrency"] == users], users)
    axes[0, 0].set_yticks(range(len(RUNGS) + 1), ["best fixed length", *(name for name, _, _ in RUNGS)])
    axes[0, 0].set_ylim(len(RUNGS) + 0.6, -0.6)
    save_figure(fig, out, "headroom")


def _panel(ax: Axes, part: pd.DataFrame, users: int) -> None:
    panel_title(ax, f"{users} users")
    ax.axvline(0, color=INK, linewidth=1.2)
    level = f"{part['best_fixed'].iloc[0]}: {part[THROUGHPUT].iloc[0]:,.0f} tok/s/GPU"
    ax.annotate(level, (0, 0), xytext=(5, 0), textcoords="offset points", va="center", color=SOFT)
    end = 0.0
    for i, (_, row) in enumerate(part.iloc[1:].iterrows(), start=1):
        start, end = end, 100 * row["throughput_vs_fixed"]
        ax.barh(i, end - start, left=start, height=0.62, color=_COLORS[i - 1], zorder=2.5)
        ax.plot([start, start], [i - 1, i + 0.31], color="0.6", linewidth=0.8, zorder=2)
        low, high = (start + 100 * row[name] for name in ("gain_lo", "gain_hi"))
        ax.plot([low, high], [i, i], color=INK, linewidth=1.1, zorder=3)
        ax.annotate(
            f"{signed((end - start) / 100)} %",
            (max(start, end, high), i),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
            color=_COLORS[i - 1] if i < len(RUNGS) else SOFT,
        )
    ax.grid(visible=False, axis="y")
    ax.margins(x=0.22)
    ax.set_xlabel("% above the best fixed length")


if __name__ == "__main__":
    run_main(main)
