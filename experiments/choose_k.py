"""How many drafts should be verified at my load, should it depend on the load, and where is speculation off?

Runs every fixed number of drafts k of one drafter, no speculation (k = 0), and policies that adapt, at several loads
with the same requests, drafts and luck. Says the best k at each load, the best single k over a distribution of loads,
what adapting adds over either (paired intervals over seeds), and at which loads drafting does not pay. A load is a
number of users who each have one request at a time; its share is one of the time.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.patches import Rectangle

from dsim.compare import Paired, paired
from dsim.errors import InputError
from dsim.figures import caption, new_figure, panel_title, save_figure
from dsim.intervals import MIN_SEEDS
from dsim.plotstyle import INK, style
from dsim.scenario import cost_of
from dsim.schema import Scenario
from dsim.sweep import grid, run
from dsim.wording import counted, signed
from experiments._common import (
    override,
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
    with_arms,
    write_csv,
    write_scenario,
    written,
)
from experiments._loads import DEFAULT_LOADS, loads_within, parse_loads

METRIC = "throughput_tok_s"
OFF = "off"
#: Adaptive policies that are looked at unless --adaptive says otherwise.
DEFAULT_ADAPTIVE = ("dspark:lag=2", "vllm-adaptive")
COLUMNS = [
    "arm",
    "policy",
    "drafter",
    "gamma",
    "concurrency",
    "seed",
    "share",
    "throughput_tok_s",
    "throughput_tok_s_gpu",
    "tps_per_user",
    "tpot_p99_ms",
    "accepted_length",
    "verification_budget",
    "acceptance_rate",
    "mean_step_ms",
    "cost_source",
    "drafts_source",
    "trace_source",
    "extrapolated",
    "n_scored",
]


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = parser(__doc__, out="results/choose_k")
    cli.add_argument("--profile", metavar="NAME", help="short for --set cost.profile=NAME")
    cli.add_argument(
        "--drafter", metavar="NAME", default="dspark", help="the scenario's drafter (default: %(default)s)"
    )
    cli.add_argument(
        "--max-k", metavar="N", type=positive_int, help="largest k, and the adaptive block size (default: drafts.gamma)"
    )
    cli.add_argument(
        "--domains",
        metavar="NAME:SHARE,...",
        type=_domains,
        help="mix of text (default: the scenario's drafts.domains)",
    )
    cli.add_argument(
        "--loads",
        metavar="N:SHARE,...",
        type=parse_loads,
        help=f"users and their shares of the time (default: {DEFAULT_LOADS}, as far as the profile reaches; live: the "
        "scenario's load.users, alike)",
    )
    cli.add_argument(
        "--adaptive",
        metavar="SPEC[;SPEC...]",
        help=f"policies that adapt, separated by semicolons, or none (default: {';'.join(DEFAULT_ADAPTIVE)})",
    )
    return cli


def _domains(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in text.split(","):
        name, colon, share = item.partition(":")
        try:
            weight = float(share) if colon else 1.0
        except ValueError:
            weight = -1.0
        if not name or name in found or not (np.isfinite(weight) and weight >= 0):
            raise argparse.ArgumentTypeError(f"got '{item}', expected NAME:SHARE, each name once and SHARE >= 0")
        found[name] = weight
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the arms, print table and advice, write the files."""
    args = options().parse_args(argv)
    refuse_sets(args, {"arms": "--max-k and --adaptive say what is run"})
    override(args, "cost.profile", args.profile, "--profile")
    override(args, "drafts.domains", args.domains, "--domains")
    base = scenario_of(args)
    refuse_loads(args, None if args.loads is None and base.drafts.source == "live" else "--loads")
    scenario = study(base, args.drafter, args.max_k, adaptive_specs(args.adaptive))
    loads = args.loads or default_loads(scenario)
    if args.quick and args.loads is None:
        middle = sorted(loads)[:: max(1, len(loads) // 3)]
        loads = {users: loads[users] / sum(loads[n] for n in middle) for users in middle}
    with staged_output(args.out) as out:
        table = run(scenario, grid(scenario, users=list(loads)), **run_options(args, scenario)).table
        table["share"] = table["concurrency"].map(loads)
        found = Answer(table, loads, tuple(arm.name for arm in scenario.arms))
        by_load, overall = load_table(found), overall_table(found)
        report(found, by_load, overall, scenario)
        lines = advice(found, by_load, overall)
        print("\n" + "\n".join(lines))
        write_csv(table[COLUMNS].astype({"n_scored": int}), out / "choose_k.csv")
        write_csv(by_load, out / "choose_k_loads.csv")
        write_csv(overall, out / "choose_k_overall.csv")
        (out / "advice.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        write_scenario(scenario, out / "scenario.toml")
        draw(found, overall, scenario, out)
        written(out)
    print(f"written to {args.out}")


def adaptive_specs(text: str | None) -> list[str]:
    """The policies of --adaptive; without it those of `DEFAULT_ADAPTIVE`."""
    if text is None:
        return list(DEFAULT_ADAPTIVE)
    if text.strip() == "none":
        return []
    specs = [spec.strip() for spec in text.split(";")]
    if not all(specs) or len(set(specs)) < len(specs):
        raise InputError(field="--adaptive", value=text, expected="policy specs separated by ';', each once, or none")
    return specs


def study(scenario: Scenario, drafter: str, most: int | None, adaptive: Sequence[str]) -> Scenario:
    """The scenario with an arm for no speculation, every k (blocks of k) and every policy (the largest blocks)."""
    most = scenario.drafts.gamma if most is None else most
    if most < 1:
        raise InputError("there is nothing to choose", field="drafts.gamma", value=most, expected="an integer >= 1")
    arms: list[dict[str, Any]] = [{"name": OFF, "policy": "none", "gamma": 0}]
    arms += [{"name": f"k={k}", "policy": f"fixed:k={k}", "drafter": drafter, "gamma": k} for k in range(1, most + 1)]
    arms += [{"name": spec, "policy": spec, "drafter": drafter, "gamma": most} for spec in adaptive]
    return with_arms(scenario, arms)


def default_loads(scenario: Scenario) -> dict[int, float]:
    """`DEFAULT_LOADS` as far as profile and batch reach; in a live scenario its own loads, all alike."""
    if scenario.drafts.source == "live":
        return {users: 1 / len(scenario.load.users) for users in sorted(scenario.load.users)}
    cost = cost_of(scenario)
    reach = min(cost.max_requests or cost.max_tokens, scenario.cluster.max_seqs)
    return loads_within(parse_loads(DEFAULT_LOADS), scenario.cluster.replicas * reach)


# -- the answer ------------------------------------------------------------------------------------------


class Answer:
    """The runs, as throughput by arm, load and seed.

    Attributes
    ----------
    loads
        Users and their share of the time, ascending.
    fixed, adaptive
        Names of the arms: off and k = 1, 2, ... in that order; those that adapt.
    best
        By load: the fixed arm with the highest mean (the smaller k where two are equal).
    single
        The fixed arm with the most tokens over all loads.
    sources
        Columns of the CSVs that say where the numbers come from.
    """

    def __init__(self, table: pd.DataFrame, loads: Mapping[int, float], arms: Sequence[str]) -> None:
        self.loads = dict(sorted(loads.items()))
        self.table = table
        self.fixed = [name for name in arms if name == OFF or re.fullmatch(r"k=\d+", name)]
        self.adaptive = [name for name in arms if name not in self.fixed]
        self._rates = table.set_index(["arm", "concurrency", "seed"])[METRIC].sort_index()
        self.best = {users: max(self.fixed, key=lambda arm: self.mean(arm, users)) for users in self.loads}
        self.single = max(self.fixed, key=lambda arm: float(self.over_loads(arm).mean()))
        costs = table.loc[table["arm"] != OFF, "cost_source"]
        drafts = table.loc[table["arm"] != OFF, "drafts_source"]
        self.sources = {
            "cost_source": "|".join(costs.drop_duplicates()),
            "drafts_source": "|".join(drafts.drop_duplicates()),
            "trace_source": str(table["trace_source"].iloc[0]),
            "extrapolated": bool(table["extrapolated"].any()),
            "n_seeds": int(table["seed"].nunique()),
            "n_scored": int(table["n_scored"].min()),
        }

    def rates(self, arm: str, users: int) -> pd.Series[float]:
        """Throughput by seed, tok/s."""
        found: pd.Series[float] = self._rates.loc[arm, users]
        return found

    def mean(self, arm: str, users: int) -> float:
        """Its mean over the seeds."""
        return float(self.rates(arm, users).mean())

    def over_loads(self, arm: str | Mapping[int, str]) -> pd.Series[float]:
        """By seed: tokens a second over the whole distribution, of one arm or of one arm a load."""
        parts = [
            share * self.rates(arm if isinstance(arm, str) else arm[users], users)
            for users, share in self.loads.items()
        ]
        total: pd.Series[float] = sum(parts[1:], parts[0])
        return total

    def gain(self, users: int, arm: str, over: str) -> Paired:
        """Throughput of an arm against another at a load, paired by seed."""
        return paired(self.rates(over, users), self.rates(arm, users))


def load_table(found: Answer) -> pd.DataFrame:
    """One row a load and arm: throughput against the best fixed k there, the best single k and no speculation."""
    rows = []
    for users, share in found.loads.items():
        ranked = sorted(found.fixed, key=lambda arm: -found.mean(arm, users))
        for arm in (*found.fixed, *found.adaptive):
            row: dict[str, Any] = {
                "users": users,
                "share": share,
                "arm": arm,
                "kind": "fixed" if arm in found.fixed else "adaptive",
                "throughput_tok_s": found.mean(arm, users),
                "best_fixed": found.best[users],
                "rank_of_fixed": ranked.index(arm) + 1 if arm in found.fixed else pd.NA,
            }
            for name, over in (("best_fixed", found.best[users]), ("best_single", found.single), ("off", OFF)):
                row |= _interval(f"over_{name}", found.gain(users, arm, over))
            rows.append(row | found.sources)
    return pd.DataFrame(rows).astype({"rank_of_fixed": "Int64"})


def overall_table(found: Answer) -> pd.DataFrame:
    """One row an arm over the whole distribution; ``best k at each load`` switches k by the load."""
    switching = found.over_loads(found.best)
    rows = []
    for name in (*found.fixed, "best k at each load", *found.adaptive):
        served = switching if name == "best k at each load" else found.over_loads(name)
        worst = min(
            (found.mean(name, users) / found.mean(found.best[users], users) - 1 for users in found.loads)
            if name in (*found.fixed, *found.adaptive)
            else [0.0]
        )
        row: dict[str, Any] = {
            "arm": name,
            "throughput_tok_s": float(served.mean()),
            "best_single": name == found.single,
            "worst_load_over_best_fixed": worst,
        }
        for label, over in (("each_load", switching), ("best_single", found.over_loads(found.single))):
            row |= _interval(f"over_{label}", paired(over, served))
        rows.append(row | found.sources)
    return pd.DataFrame(rows)


def _interval(name: str, pair: Paired) -> dict[str, Any]:
    return {
        name: pair.relative,
        f"{name}_lo": pair.relative_lo,
        f"{name}_hi": pair.relative_hi,
        "interval": pair.kind,
    }


def report(found: Answer, by_load: pd.DataFrame, overall: pd.DataFrame, scenario: Scenario) -> None:
    """The tables for the terminal."""
    print(f"\nthroughput against the best fixed k of each load, % (tok/s of that in the last row); {scenario.name}")
    wide = by_load.pivot(index="arm", columns="users", values="over_best_fixed").loc[[*found.fixed, *found.adaptive]]
    shown = wide.map(signed)
    last = {users: f"{found.mean(found.best[users], users):,.0f}" for users in found.loads}
    shown = pd.concat([shown, pd.DataFrame([last], index=["best, tok/s"])]).reset_index(names="arm")
    shown.columns = [str(name) for name in shown.columns]
    print_table(shown)
    print("\nover the distribution of loads (tok/s are those of a mean second)")
    listed = overall[["arm", "throughput_tok_s"]].copy()
    for name, title in (
        ("over_each_load", "against best k at each load %"),
        ("over_best_single", "against single k %"),
    ):
        listed[title] = [_percent(row, name) for row in overall.to_dict("records")]
    print_table(listed)
    kind = "95 % t intervals over seeds" if found.sources["n_seeds"] >= MIN_SEEDS else "ranges over seeds, no verdict"
    print(f"[lo, hi]: {kind}, paired; the best k is chosen on the same seeds")


def _percent(row: Mapping[str, Any], name: str) -> str:
    middle, low, high = (row[f"{name}{part}"] for part in ("", "_lo", "_hi"))
    if low == high == 0:
        return "0"
    return f"{signed(middle)} [{signed(low)}, {signed(high)}]"


def advice(found: Answer, by_load: pd.DataFrame, overall: pd.DataFrame) -> list[str]:
    """The answer in sentences."""
    lines = [_at_load(found, users) for users in found.loads]
    lines += _off(found)
    total = overall.set_index("arm")
    single, whole = total.loc[found.single], found.fixed[-1]
    if set(found.best.values()) == {found.single}:
        lines.append(f"one k for all these loads: {_k(found.single)}, the best at each of them")
    else:
        lines.append(
            f"one k for all these loads: {_k(found.single)}, {_change(single, 'over_each_load')} against the best k at "
            f"each load, {signed(single['worst_load_over_best_fixed'])} % at its worst load"
        )
    for arm in found.adaptive:
        row = total.loc[arm]
        line = (
            f"{arm} over all loads: {_change(row, 'over_each_load')} against the best k at each load, "
            f"{_change(row, 'over_best_single')} against {_k(found.single)} everywhere"
        )
        if found.single != whole:
            line += f", {_change_pair(paired(found.over_loads(whole), found.over_loads(arm)))} against {_k(whole)}"
        lines.append(line)
    return lines


def _k(arm: str) -> str:
    return "no speculation" if arm == OFF else arm.replace("=", " = ")


def _change(row: Mapping[str, Any] | pd.Series, name: str) -> str:
    return f"{signed(row[name])} % [{signed(row[f'{name}_lo'])}, {signed(row[f'{name}_hi'])}]"


def _change_pair(pair: Paired) -> str:
    return f"{signed(pair.relative)} % [{signed(pair.relative_lo)}, {signed(pair.relative_hi)}]"


def _at_load(found: Answer, users: int) -> str:
    best = found.best[users]
    line = f"at {counted(users, 'user')}: {_k(best)}"
    if best != OFF:
        line += f", {_change_pair(found.gain(users, best, OFF))} over no speculation"
    others = [arm for arm in found.fixed if arm != best]
    near = [arm for arm in others if _no_worse(found.gain(users, arm, best))]
    if near:
        line += f" ({', '.join(_k(arm) for arm in near)}: no difference shown)"
    parts = [f"{arm} {_change_pair(found.gain(users, arm, best))}" for arm in found.adaptive]
    if parts:
        line += f"; against that {', '.join(parts)}"
    return line


def _no_worse(pair: Paired) -> bool:
    """Whether the seeds leave open that an arm is as good."""
    return bool(pair.relative_hi >= 0)


def speculation_off(found: Answer) -> list[tuple[int, str]]:
    """By load: ``on`` (the interval of some k >= 1 is above no speculation), ``off`` (all are below) or ``open``."""
    states = []
    for users in found.loads:
        pairs = [found.gain(users, arm, OFF) for arm in found.fixed if arm != OFF]
        if any(pair.relative_lo > 0 for pair in pairs):
            states.append((users, "on"))
        elif all(pair.relative_hi < 0 for pair in pairs):
            states.append((users, "off"))
        else:
            states.append((users, "open"))
    return states


def _off(found: Answer) -> list[str]:
    states = speculation_off(found)
    if all(state == "on" for _, state in states):
        whole = found.fixed[-1]
        losing = [users for users in found.loads if found.gain(users, whole, OFF).relative_hi < 0]
        line = f"speculation pays at every load up to {states[-1][0]} users, with the right k"
        if losing:
            line += f"; {_k(whole)} loses against no speculation at {_listed(losing)} users"
        return [line]
    parts = []
    for word, text in (
        ("off", "every k loses against no speculation"),
        ("open", "no k is shown to be better than none"),
    ):
        at = [users for users, state in states if state == word]
        if at:
            parts.append(f"at {_listed(at)} users {text}: speculation off there")
    on = [users for users, state in states if state == "on"]
    off = [users for users, state in states if state != "on"]
    if on and off and max(on) < min(off):
        parts.append(f"so it is to be switched off between {max(on)} and {min(off)} users")
    return ["; ".join(parts)]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


# -- the figure ------------------------------------------------------------------------------------------


@style()
def draw(found: Answer, overall: pd.DataFrame, scenario: Scenario, out: Path) -> None:
    """A map: every arm at every load, in percent of the best fixed k there."""
    arms = [*found.fixed, *found.adaptive]
    drafter = next((arm.drafter for arm in scenario.arms if scenario.gamma(arm)), "none")
    fig, axes = new_figure(
        width=3.4 + 0.95 * (len(found.loads) + 1),
        height=1.5 + 0.36 * len(arms),
        title=f"How many drafts to verify: {drafter}, {scenario.name}",
    )
    caption(
        fig,
        "Cells: throughput against the best fixed k of that load, %, mean over "
        f"{counted(found.sources['n_seeds'], 'seed')}. Framed: the best fixed k. Last column: all loads by their share "
        "of the time (assumed unless given), against the best k at each load. "
        f"{sources_note(scenario, found.table)}",
    )
    ax = axes[0, 0]
    values = np.array(
        [[found.mean(arm, users) / found.mean(found.best[users], users) - 1 for users in found.loads] for arm in arms]
    )
    served = overall.set_index("arm")["over_each_load"]
    cells = 100 * np.column_stack([values, [served[arm] for arm in arms]])
    _cells(ax, cells, len(found.fixed))
    for column, users in enumerate(found.loads):
        _frame(ax, column, found.fixed.index(found.best[users]))
    _frame(ax, len(found.loads), found.fixed.index(found.single))
    ax.set_xticks(
        range(len(found.loads) + 1),
        [*(f"{users}\n{100 * share:.0f} %" for users, share in found.loads.items()), "all\nloads"],
    )
    labels = ["no speculation", *(_k(arm) for arm in found.fixed[1:]), *found.adaptive]
    ax.set_yticks(range(len(arms)), labels)
    ax.set_xlabel("concurrent users, and share of the time")
    panel_title(
        ax, f"Throughput against the best fixed k at each load, % (colors end at {_DARKEST:+g} and {_GREENEST:+g})"
    )
    save_figure(fig, out, "choose_k")


#: Percent at which the colors end: what lies beyond has a number and no darker cell.
_DARKEST, _GREENEST = -30, 10
_MAP = LinearSegmentedColormap.from_list("loss", ["#B2432F", "#F2C9B8", "#FFFFFF", "#BFE3CC", "#1B7F4C"])


def _cells(ax: Axes, cells: np.ndarray[Any, np.dtype[np.float64]], fixed: int) -> None:
    norm = TwoSlopeNorm(vcenter=0.0, vmin=_DARKEST, vmax=_GREENEST)
    ax.imshow(np.clip(cells, _DARKEST, _GREENEST), cmap=_MAP, norm=norm, aspect="auto", interpolation="nearest")
    for (row, column), value in np.ndenumerate(cells):
        best = abs(value) < 0.05
        ax.text(
            column,
            row,
            "0" if best else f"{value:+.1f}" if abs(value) < 9.95 else f"{value:+.0f}",
            ha="center",
            va="center",
            fontsize=8.5,
            color="white" if value < -22 else INK,
        )
    ax.grid(visible=False)
    ax.set_xticks(np.arange(cells.shape[1]) - 0.5, minor=True)
    ax.tick_params(which="both", length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    for edge, place in (("h", fixed - 0.5), ("v", cells.shape[1] - 1.5)):
        (ax.axhline if edge == "h" else ax.axvline)(place, color="white", linewidth=5)
    for i in range(1, cells.shape[1]):
        ax.axvline(i - 0.5, color="white", linewidth=1)
    for i in range(1, cells.shape[0]):
        ax.axhline(i - 0.5, color="white", linewidth=1)


def _frame(ax: Axes, column: int, row: int) -> None:
    ax.add_patch(Rectangle((column - 0.47, row - 0.44), 0.94, 0.88, fill=False, edgecolor=INK, linewidth=1.8, zorder=5))


if __name__ == "__main__":
    run_main(main)
