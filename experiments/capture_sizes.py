"""Which graph sizes should be captured, for my load?

A step runs padded to the next captured size; above the largest it runs eagerly. Every graph costs memory and start-up
time. Given how many tokens the steps have, this finds the sizes that lose least throughput under a limit on their
number or memory, exactly (dynamic programming), and compares them with the profile's own. The steps come from a
simulation at --loads (default; a policy that adapts fills the sizes it finds, so it is given a graph for every size),
from requests x verify lengths (--lengths), or from a file (--steps, CSV with the columns tokens and weight). With
--check both sets are simulated: a policy that adapts makes the best of either.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from dsim.capture import (
    CURVES,
    LARGEST_STEP,
    CaptureSets,
    FloatArray,
    GraphPrices,
    IntArray,
    StepLoad,
    best_sets,
    candidate_sizes,
    captured_profile,
    graph_prices,
    load_of_lengths,
    lost_throughput,
    step_load,
)
from dsim.compare import paired
from dsim.cost import StepCost, verify_points
from dsim.errors import InputError
from dsim.figures import caption, legend, new_figure, panel_title, save_figure
from dsim.plotstyle import SOFT, style
from dsim.profile import Profile, load_profile, write_profile
from dsim.scenario import Result, cost_of
from dsim.schema import Scenario
from dsim.sweep import grid, run
from dsim.wording import counted, percent
from experiments._common import (
    arm_of,
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

OWN, BEST = "the profile's own", "best of that number"
#: Graphs to choose where the profile has none of its own and nothing else says.
DEFAULT_GRAPHS = 32


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = parser(__doc__, default_seeds="2", out="results/capture_sizes")
    cli.add_argument("--profile", metavar="NAME", help="short for --set cost.profile=NAME")
    cli.add_argument(
        "--loads",
        metavar="N:SHARE,...",
        type=parse_loads,
        help="users (with --lengths: requests in a step) and their shares of the time "
        f"(default: {DEFAULT_LOADS}, as far as the profile reaches)",
    )
    cli.add_argument("--arm", metavar="SPEC", help="whose steps, as in ab.py (default: dspark)")
    cli.add_argument(
        "--lengths",
        metavar="L:SHARE,...",
        type=lambda text: parse_loads(text, lowest=0),
        help="no simulation: each request verifies L drafts, with these shares",
    )
    cli.add_argument("--steps", metavar="FILE.csv", type=Path, help="no simulation: steps by their tokens and weight")
    cli.add_argument(
        "--graphs", metavar="N", type=positive_int, help="most graphs (default: as many as the profile has, or 32)"
    )
    cli.add_argument("--memory-mib", metavar="MIB", type=_positive, help="memory for all graphs; needs --graph-mib")
    cli.add_argument("--graph-mib", metavar="MIB", type=_positive, help="memory of one graph")
    cli.add_argument(
        "--multiple", metavar="N", type=positive_int, default=1, help="sizes are multiples of N (default: %(default)s)"
    )
    cli.add_argument(
        "--largest",
        metavar="TOKENS",
        type=positive_int,
        help="largest size (default: the largest timed in a graph; beyond it prices are extrapolated)",
    )
    cli.add_argument(
        "--curve",
        choices=CURVES,
        default="smooth",
        help="price of a graph: smooth (any size, a fitted law) or measured (timed sizes, dips included; default: "
        "%(default)s)",
    )
    cli.add_argument(
        "--eager-factor", metavar="X", type=_positive, help="an eager step costs X graphs, where none was timed"
    )
    cli.add_argument("--check", action="store_true", help="simulate the arm with both sets")
    return cli


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (np.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"got '{text}', expected a number > 0")
    return value


@dataclass(frozen=True)
class Steps:
    """Steps of a workload.

    Parameters
    ----------
    load
        How many tokens they have.
    other_ms
        Mean time of a step beside the target's pass: drafting, and the host.
    drafts_source, trace_source
        Where they come from.
    extrapolated
        Whether the simulation left the profiled sizes.
    """

    load: StepLoad
    other_ms: float
    drafts_source: str
    trace_source: str
    note: str
    extrapolated: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Find the sets, print the table, write the files."""
    cli = options()
    args = cli.parse_args(argv)
    if args.steps is not None and (args.lengths is not None or args.loads is not None):
        cli.error("--steps says what the steps are; --loads and --lengths do not apply")
    if (args.memory_mib is None) != (args.graph_mib is None):
        cli.error("--memory-mib and --graph-mib need each other")
    simulated = args.steps is None and args.lengths is None
    if not (simulated or args.check):
        refuse_simulation(cli, args)
    override(args, "cost.profile", args.profile, "--profile")
    refuse_loads(args, "--loads")
    refuse_sets(args, dict.fromkeys(("cost.fit", "cost.running_max"), "--curve says what a graph costs"))
    scenario = scenario_of(args, seeds=2)
    profile, cost = load_profile(scenario.cost.profile), cost_of(scenario)
    if args.check and (not profile.captured_sizes.size or args.curve != "smooth"):
        raise InputError(
            "needs two sets to compare", field="--check", expected="a profile with captured sizes, and --curve smooth"
        )
    loads = args.loads or loads_within(
        parse_loads(DEFAULT_LOADS), min(cost.max_requests or cost.max_tokens, scenario.cluster.max_seqs)
    )
    study = (
        with_arms(scenario, [arm_of(scenario, "dspark" if args.arm is None else args.arm)])
        if simulated or args.check
        else None
    )
    with staged_output(args.out) as out:
        if study is not None and simulated:
            steps = simulated_steps(study, loads, every_size(profile, args), run_options(args, study))
        elif args.steps is not None:
            steps = Steps(read_steps(args.steps), 0.0, f"file:{args.steps.name}", "none", f"Steps: {args.steps.name}.")
        else:
            steps = steps_of_lengths(loads, args.lengths, cost)
        own = profile.captured_sizes
        last = max(int(steps.load.tokens[-1]), args.largest or 0, profile.capture_limit)
        prices = graph_prices(profile, last, curve=args.curve, eager_factor=args.eager_factor)
        candidates = candidate_sizes(steps.load, prices, multiple=args.multiple, largest=args.largest)
        most = allowed_graphs(args, own)
        sets = best_sets(steps.load, prices, candidates, max(most, own.size, 64))
        chosen = sets.sizes(min(most, sets.ms.size - 1))
        table = compared(steps, prices, sets, own, chosen, args)
        report(table, steps, prices, own, chosen, args)
        write_csv(table, out / "capture_sizes.csv")
        write_csv(step_table(steps.load, own, chosen), out / "steps.csv")
        files = {"best": captured_profile(profile, prices, chosen, f"{profile.name}-best")} if chosen.size else {}
        if own.size and args.curve == "smooth":
            files["own"] = captured_profile(profile, prices, own, f"{profile.name}-own")
        if args.check and study is not None:
            check(study, files, loads, run_options(args, study), out)
        for item in files.values():
            write_profile(item, out / f"{item.name}.csv")
        write_scenario(scenario, out / "scenario.toml")
        draw(table, steps, prices, sets, own, chosen, scenario, out)
        written(out)
    print(f"written to {args.out}")


def refuse_simulation(cli: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Options that say how steps are simulated, where none are."""
    given = {"--arm": args.arm, "--seeds": args.seeds, "--drafts": args.drafts, "--quick": args.quick or None}
    for option, value in given.items():
        if value is not None:
            cli.error(f"{option} is about simulated steps; with --steps or --lengths it applies to --check only")
    for key, value in args.overrides.items():
        if not key.startswith("cost."):
            expected = "a key of [cost]: with --steps or --lengths nothing is simulated but for --check"
            raise InputError("is not used", field=f"--set {key}", value=value, expected=expected)


def allowed_graphs(args: argparse.Namespace, own: IntArray) -> int:
    """The limit on the number of graphs: the tighter one of those given."""
    limits = [args.graphs] if args.graphs is not None else []
    if args.memory_mib is not None:
        limits.append(int(min(args.memory_mib // args.graph_mib, LARGEST_STEP)))
        if limits[-1] < 1:
            raise InputError(
                "no graph fits", field="--memory-mib", value=args.memory_mib, expected=f">= {args.graph_mib:g}"
            )
    return min(limits) if limits else int(own.size) or DEFAULT_GRAPHS


# -- the steps -------------------------------------------------------------------------------------------


def steps_of(result: Result) -> tuple[IntArray, float, float]:
    """Of one run's measuring window: how many steps had how many tokens, their whole time (ms), the window (s)."""
    records = result.records
    low, high = records.window_ns
    inside = (records.steps["end_ns"] > low) & (records.steps["end_ns"] <= high) & (records.steps["requests"] > 0)
    counts = np.bincount(records.steps["batch_tokens"][inside])
    return counts, float(records.steps["step_ns"][inside].sum()) / 1e6, (high - low) / 1e9


def every_size(profile: Profile, args: argparse.Namespace) -> Profile:
    """The profile with a graph for every size that could be captured."""
    top = int(verify_points(profile)[1][0].tokens[-1]) if args.largest is None else args.largest
    prices = graph_prices(profile, top, curve=args.curve, eager_factor=args.eager_factor)
    sizes = np.arange(args.multiple, min(top, prices.known if args.largest is None else top) + 1, args.multiple)
    return captured_profile(profile, prices, sizes[np.isfinite(prices.graph[sizes])], f"{profile.name}-every-size")


def on_profile(study: Scenario, profile: Profile, folder: Path) -> Scenario:
    """The scenario on another profile, which is written to a folder; priced by captured sizes."""
    path = write_profile(profile, folder / f"{profile.name}.csv")
    section = study.cost.model_copy(update={"profile": str(path), "fit": "staircase", "running_max": True})
    return study.model_copy(update={"cost": section})


def pooled(
    users: Sequence[int], extracts: Sequence[tuple[IntArray, float, float]], loads: Mapping[int, float]
) -> tuple[FloatArray, float]:
    """Steps by their tokens, and their time (ms), in a mean second: each run counts by its load's share of the time."""
    total, spent = np.zeros(max(counts.size for counts, _, _ in extracts)), 0.0
    for load, (counts, ms, seconds) in zip(users, extracts, strict=True):
        share = loads[int(load)] / seconds
        total[: counts.size] += share * counts
        spent += share * ms
    return total, spent


def simulated_steps(study: Scenario, loads: Mapping[int, float], profile: Profile, how: dict[str, Any]) -> Steps:
    """Steps of the arm at the loads; a load's share is one of the time, so fast steps count more often."""
    (arm,) = (arm.name for arm in study.arms)
    with tempfile.TemporaryDirectory() as folder:
        study = on_profile(study, profile, Path(folder))
        cost = cost_of(study)
        sweep = run(study, grid(study, arms=[arm], users=list(loads)), extract=steps_of, **how)
    total, spent = pooled(sweep.table["concurrency"].tolist(), sweep.extracts, loads)
    load = step_load(np.arange(total.size), total)
    context = float(cost.contexts[0]) if cost.depends_on_context else None
    verify = cost.verify_table(1, total.size, context)
    # What the simulated steps took beyond their target pass.
    other = max(0.0, spent / total.sum() - float(load.weight @ verify[load.tokens]))
    table = sweep.table
    return Steps(
        load,
        other,
        str(table["drafts_source"].iloc[0]),
        str(table["trace_source"].iloc[0]),
        f"Steps: simulated, {arm}, at {', '.join(map(str, loads))} users, with a graph for every size. "
        f"{sources_note(study, table)}",
        bool(table["extrapolated"].any()),
    )


def steps_of_lengths(loads: Mapping[int, float], lengths: Mapping[int, float], cost: StepCost) -> Steps:
    """Steps of R requests that verify so many drafts each."""
    draft = 0.0
    if max(lengths) > 0 and cost.max_requests:
        draft = sum(share * cost.draft_ms(min(requests, cost.max_requests)) for requests, share in loads.items())
    words = ", ".join(f"{length}: {share:.3g}" for length, share in lengths.items())
    return Steps(
        load_of_lengths(loads, lengths),
        draft,
        f"given:lengths:{words}",
        "none",
        f"Steps: requests x verify lengths ({words}), independent (assumed).",
    )


#: Columns of a file of steps, and those that this script writes beside them.
STEP_COLUMNS = ("tokens", "weight", "steps", "own_runs_as", "best_runs_as")
#: Largest weight: sums of them are to be finite.
MOST_WEIGHT = 1e12


def read_steps(path: Path) -> StepLoad:
    """Steps from a CSV: ``tokens``, and ``weight`` (or ``steps``, or none: one a row).

    Raises
    ------
    InputError
        With file, line, field, value and what was expected, at the first thing that is wrong.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            tokens, weights = _read_columns(reader, path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot be read ({why})", file=path, field="--steps") from None
    except csv.Error as error:
        raise InputError(f"is no CSV ({error})", file=path, line=reader.line_num, field="--steps") from None
    try:
        return step_load(tokens, weights)
    except InputError as error:
        raise InputError(
            error.message, file=path, field=error.field, value=error.value, expected=error.expected
        ) from None


def _read_columns(reader: Any, path: Path) -> tuple[list[int], list[float]]:
    header = [name.strip() for name in next(reader, [])]
    known = f"tokens, and weight or steps if wanted ({', '.join(STEP_COLUMNS[3:])} are not read)"
    for name in header:
        if name not in STEP_COLUMNS or header.count(name) > 1:
            what = "unknown column" if name not in STEP_COLUMNS else "column is named twice"
            raise InputError(what, file=path, line=1, field=name, expected=known)
    if "tokens" not in header:
        raise InputError("column is missing", file=path, line=1, field="tokens", expected=known)
    if "weight" in header and "steps" in header:
        raise InputError("says the same as 'weight'", file=path, line=1, field="steps", expected="one of the two")
    weight = next((name for name in ("weight", "steps") if name in header), None)
    tokens: list[int] = []
    weights: list[float] = []
    for row in reader:
        if not row:
            continue
        line, cells = reader.line_num, dict(zip(header, row, strict=False))
        if len(row) != len(header):
            raise InputError(file=path, line=line, value=f"{len(row)} cells", expected=f"{len(header)}, as the header")
        size = _number(cells["tokens"])
        if not 1 <= size <= LARGEST_STEP or size != int(size):
            expected = f"an integer in 1..{LARGEST_STEP}"
            raise InputError(file=path, line=line, field="tokens", value=cells["tokens"], expected=expected)
        tokens.append(int(size))
        often = 1.0 if weight is None else _number(cells[weight])
        if not 0 <= often <= MOST_WEIGHT:
            expected = f"a number from 0 to {MOST_WEIGHT:g}"
            raise InputError(file=path, line=line, field=weight, value=cells[str(weight)], expected=expected)
        weights.append(often)
    return tokens, weights


def _number(text: str) -> float:
    try:
        return float("nan" if "_" in text else text)
    except ValueError:
        return float("nan")


# -- the answer ------------------------------------------------------------------------------------------


def compared(
    steps: Steps, prices: GraphPrices, sets: CaptureSets, own: IntArray, chosen: IntArray, args: argparse.Namespace
) -> pd.DataFrame:
    """One row a set: the profile's own, the best one allowed, usual lists, and the best of every number."""
    last = int(steps.load.tokens[-1])
    top = min(last, prices.known if args.largest is None else args.largest)
    rows: list[tuple[str, IntArray]] = []
    if own.size:
        rows.append((OWN, own))
        rows.append(("best, as many", sets.sizes(min(own.size, sets.ms.size - 1))))
    rows.append(("best, as allowed", chosen))
    powers = 2 ** np.arange(0, int(np.log2(top)) + 1)
    rows.append(("powers of two", np.unique(np.append(powers, top))))
    rows.append(("every 64th", np.unique(np.append(np.arange(64, top + 1, 64), top))))
    rows += [(BEST, sets.sizes(count)) for count in range(1, sets.ms.size)]
    ideal = prices.ideal(steps.load)
    found = []
    for name, sizes in rows:
        ms = prices.padded(steps.load, sizes)
        found.append(
            {
                "set": name,
                "graphs": sizes.size,
                "lost_throughput": lost_throughput(ms, ideal, steps.other_ms),
                "verify_ms": ms,
                "ideal_ms": ideal,
                "other_ms": steps.other_ms,
                "padding": _padding(steps.load, sizes),
                "eager_steps": float(steps.load.weight[steps.load.tokens > (sizes[-1] if sizes.size else 0)].sum()),
                "memory_mib": sizes.size * args.graph_mib if args.graph_mib is not None else np.nan,
                "sizes": " ".join(map(str, sizes.tolist())),
                "cost_source": prices.label,
                "drafts_source": steps.drafts_source,
                "trace_source": steps.trace_source,
                "extrapolated": bool(steps.extrapolated or (sizes.size and sizes[-1] > prices.known)),
            }
        )
    return pd.DataFrame(found)


def _padding(load: StepLoad, sizes: IntArray) -> float:
    """Share of the tokens in graphs that are padding."""
    place = np.searchsorted(sizes, load.tokens)
    inside = place < sizes.size
    if not inside.any():
        return 0.0
    ran, wanted = load.weight[inside] @ sizes[place[inside]], load.weight[inside] @ load.tokens[inside]
    return float(1.0 - wanted / ran)


def step_table(load: StepLoad, own: IntArray, chosen: IntArray) -> pd.DataFrame:
    """The distribution, and where each step runs under both sets (empty: eagerly)."""

    def runs(sizes: IntArray) -> pd.arrays.IntegerArray:
        place = np.searchsorted(sizes, load.tokens)
        inside = place < sizes.size
        values = np.where(inside, np.append(sizes, 0)[np.minimum(place, sizes.size)], 0)
        return pd.arrays.IntegerArray(values.astype(np.int64), ~inside)

    return pd.DataFrame(
        {"tokens": load.tokens, "weight": load.weight, "own_runs_as": runs(own), "best_runs_as": runs(chosen)}
    )


def report(
    table: pd.DataFrame, steps: Steps, prices: GraphPrices, own: IntArray, chosen: IntArray, args: argparse.Namespace
) -> None:
    """The comparison and the answer, for the terminal."""
    shown = table[table["set"] != BEST][
        ["set", "graphs", "lost_throughput", "verify_ms", "padding", "eager_steps"]
    ].copy()
    for name in ("lost_throughput", "padding", "eager_steps"):
        shown[name] = 100 * shown[name]
    print(
        f"\nmean step: {prices.ideal(steps.load):.2f} ms at best, and {steps.other_ms:.2f} ms beside it; {prices.label}"
    )
    print_table(
        shown.rename(columns={"lost_throughput": "lost %", "padding": "padding %", "eager_steps": "eager steps %"}),
        digits=3,
    )
    losses = table[table["set"] == BEST].set_index("graphs")["lost_throughput"]
    for limit in (0.05, 0.02, 0.01):
        enough = losses[losses <= limit]
        print(
            f"lost at most {100 * limit:g} %: "
            + (f"{int(enough.index[0])} graphs are enough" if len(enough) else "not with these sizes")
        )
    if own.size:
        best, mine = table[table["set"] == "best, as allowed"].iloc[0], table[table["set"] == OWN].iloc[0]
        print(
            f"the profile's own {own.size} sizes lose {100 * mine['lost_throughput']:.2f} %; "
            f"the best {chosen.size} lose {100 * best['lost_throughput']:.2f} %"
        )
    above = float(steps.load.weight[steps.load.tokens > prices.known].sum())
    if above > 0 and args.largest is None:
        print(
            f"{100 * above:.1f} % of the steps lie above the largest size that was timed in a graph "
            f"({prices.known:,}): --largest {int(steps.load.tokens[-1])} looks further, at extrapolated prices"
        )
    print("\ncapture: " + ", ".join(map(str, chosen.tolist())))


def check(
    study: Scenario, files: Mapping[str, Profile], loads: Mapping[int, float], how: dict[str, Any], out: Path
) -> None:
    """Simulate the arm with the sets that were written, and compare them pair by pair."""
    if "own" not in files or "best" not in files:
        raise InputError(
            "needs two sets to compare", field="--check", expected="a profile with captured sizes, and --curve smooth"
        )
    (arm,) = (arm.name for arm in study.arms)
    tables = {}
    for which, profile in files.items():
        other = on_profile(study, profile, out)
        tables[which] = run(other, grid(other, arms=[arm], users=list(loads)), **how).table
    rows = []
    for users in loads:
        a, b = (
            tables[name][tables[name]["concurrency"] == users].set_index("seed")["throughput_tok_s"]
            for name in ("own", "best")
        )
        pair = paired(a, b)
        rows.append(
            {
                "users": users,
                "own_tok_s": pair.mean_a,
                "best_tok_s": pair.mean_b,
                "gain": pair.relative,
                "gain_lo": pair.relative_lo,
                "gain_hi": pair.relative_hi,
                "interval": pair.kind,
                "cost_source": tables["best"]["cost_source"].iloc[0],
                "drafts_source": tables["best"]["drafts_source"].iloc[0],
                "extrapolated": bool(tables["best"]["extrapolated"].any()),
                "n_scored": int(a.size and tables["best"]["n_scored"].min()),
            }
        )
    table = pd.DataFrame(rows)
    print(f"\nsimulated, {arm}: throughput with the best set against the profile's own, both on the same curve")
    shown = table[["users", "own_tok_s", "best_tok_s"]].copy()
    for name in ("gain", "gain_lo", "gain_hi"):
        shown[f"{name} %"] = 100 * table[name]
    print_table(shown)
    write_csv(table, out / "check.csv")


@style()
def draw(
    table: pd.DataFrame,
    steps: Steps,
    prices: GraphPrices,
    sets: CaptureSets,
    own: IntArray,
    chosen: IntArray,
    scenario: Scenario,
    out: Path,
) -> None:
    """Loss against the number of graphs, and the sizes under the steps' distribution."""
    fig, axes = new_figure(2, width=11.5, height=4.4, title=_title(table, prices.label.split(":")[1]))
    beyond = ""
    if table["extrapolated"].any():
        beyond = f", extrapolated above {prices.known:,} tokens"
    caption(
        fig,
        f"{steps.note} Prices of graphs: {prices.label}{beyond}. Lost: against a graph for every size, drafting and "
        "host time in both. The best sets are exact for these steps.",
    )
    left, right = axes[0]
    _losses(left, table, chosen)
    panel_title(left, "What is lost, by the number of graphs")
    _sizes(right, steps.load, own, chosen)
    panel_title(right, "How large the steps are, and where graphs are")
    save_figure(fig, out, "capture_sizes")


def _title(table: pd.DataFrame, name: str) -> str:
    """What the profile's own graphs lose, and what the chosen ones do."""
    rows = table.drop_duplicates("set").set_index("set")
    words = []
    for which, what in ((OWN, "its own"), ("best, as allowed", "the best")):
        if which in rows.index:
            graphs, lost = int(rows["graphs"][which]), float(rows["lost_throughput"][which])
            loses = f"{'loses' if graphs == 1 else 'lose'} {percent(lost)}"
            words.append(f"{what} {counted(graphs, 'graph')} {loses}" if np.isfinite(lost) else f"{what}: no price")
    return f"{name}: {', '.join(words)}"


def _losses(ax: Axes, table: pd.DataFrame, chosen: IntArray) -> None:
    best = table[table["set"] == BEST]
    ax.plot(best["graphs"], best["lost_throughput"], color="#D55E00", linewidth=1.8, label="best sets", zorder=3)
    looks = {
        OWN: ("s", "#0072B2"),
        "powers of two": ("^", SOFT),
        "every 64th": ("v", SOFT),
        "best, as allowed": ("o", "#D55E00"),
    }
    shown = table[table["set"].isin(looks)]
    # Points lie on each other where little is lost, so what they are stands in the legend, with its numbers.
    for row in shown.sort_values("lost_throughput", ascending=False).to_dict("records"):
        marker, color = looks[row["set"]]
        if np.isfinite(row["lost_throughput"]):
            label = f"{row['set']}: {counted(row['graphs'], 'graph')}, {percent(row['lost_throughput'])} lost"
            look = {"linestyle": "none", "markersize": 6.5, "label": label}
            ax.plot(row["graphs"], row["lost_throughput"], marker=marker, color=color, zorder=4, **look)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    ax.set_xlim(0.9, 1.9 * max(float(table["graphs"].max()), 2.0))
    # Room for the legend above the highest of the points.
    top = max(0.02, 1.7 * float(shown["lost_throughput"].max()))
    ax.set_ylim(-0.03 * top, top)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{100 * value:g} %"))
    ax.set_xlabel("captured graphs")
    ax.set_ylabel("throughput lost")
    legend(ax, "upper right")


def _sizes(ax: Axes, load: StepLoad, own: IntArray, chosen: IntArray) -> None:
    last = int(load.tokens[-1])
    edges = np.unique(np.concatenate([[0.5], np.geomspace(1, last + 1, 60).round() + 0.5]))
    ax.hist(load.tokens, bins=edges, weights=load.weight, color="#BBBBBB", zorder=2)
    top = ax.get_ylim()[1]
    ax.set_ylim(-0.2 * top, 1.05 * top)
    for level, sizes, color, word in ((-0.06, own, "#0072B2", "own"), (-0.14, chosen, "#D55E00", "best")):
        if sizes.size:
            ax.vlines(sizes, (level - 0.028) * top, (level + 0.028) * top, color=color, linewidth=0.9, zorder=3)
            ax.text(
                1.005,
                level * top,
                f" {word}, {sizes.size}",
                transform=ax.get_yaxis_transform(),
                va="center",
                color=color,
                fontsize=8,
            )
    ax.set_xscale("log", base=2)
    ax.set_xlim(0.8, 1.1 * max(last, int(own[-1]) if own.size else 1))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,g}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{100 * value:g} %" if value >= 0 else ""))
    ax.set_xlabel("tokens in the step")
    ax.set_ylabel("share of the steps")


if __name__ == "__main__":
    run_main(main)
