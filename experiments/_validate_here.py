"""Validation case `here`: runs of the real engine on this machine, predicted from its profile and a recorded bank.

The measurement is a folder that `measure_engine.py --bank` wrote: ``results/measure_engine``, or the one that the
variable ``DSIM_MEASUREMENT`` names. Where there is neither, the shipped one is predicted (another machine's).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from tqdm import tqdm

from dsim.drafts import BankDrafts
from dsim.errors import InputError
from dsim.metrics import summarize
from dsim.options import HostCost
from dsim.plotstyle import INK, SOFT, arm_styles, caption, legend, new_figure, save_figure, style
from dsim.policy import Policy, PolicyView, load_policy
from dsim.prices import ArmPrices, DraftCost
from dsim.serve import serve
from dsim.workload import ClosedLoop
from experiments._common import print_table
from experiments._engine_runs import (
    Measurement,
    Prices,
    by_text_domain,
    engine_config,
    fitted_host,
    long_enough,
    mean_context,
    open_measurement,
    prompt_name,
    told_prices,
)
from experiments._validate import Case, RunOptions, Tables, percent, predictions
from experiments._validate_here_page import ALLOWED, headline, machine_repeatability, page_section

IntArray = npt.NDArray[np.int64]

NAME = "here"
#: Where measurements are looked for: a variable, then the default output of measure_engine.py, then what is shipped.
VARIABLE = "DSIM_MEASUREMENT"
RESULTS = Path("results/measure_engine")
SHIPPED = Path(str(resources.files("dsim") / "data" / "validation" / "here"))
#: Simulations of a run: which of a prompt's recorded texts a request meets is drawn anew in each.
DRAWS = 8
METRICS = {
    "throughput_tok_s": "tok/s",
    "tps_per_user": "tok/s",
    "ttft_p50_ms": "ms",
    "accepted_length": "tokens",
    "verification_budget": "tokens",
}


def measurement_folder() -> Path:
    """The measurement that is predicted.

    Raises
    ------
    InputError
        There is none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    for folder in (RESULTS, SHIPPED):
        if (folder / "measurement.json").is_file():
            return folder
    raise InputError(
        "there is no measurement",
        file=RESULTS,
        expected=f"one by experiments/measure_engine.py --bank, or {VARIABLE}=FOLDER",
    )


# -- one prediction --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """The model, or the model without one mechanism."""

    name: str
    without: str
    prices: Callable[[Prices], Prices] = lambda prices: prices
    whole_prompts: bool = False  # a prompt's token at the price of a verified one
    free_prompts: bool = False  # prompts of one token
    domains: bool = False  # drafts of any text of the prompt's domain
    any_length: bool = False  # drafts of texts that are shorter than the answer, too
    own_prices: bool = False  # policies know the simulator's prices, not the pilot's
    statistic: str = "mean_ms"  # what a pass of the profile costs: a run sums its steps up
    drift: bool = False  # each run at the machine's speed meanwhile
    short: bool = False  # texts at the shortest profiled length


FULL = Variant("full", "nothing")
ABLATIONS = (
    Variant("medians", "means (medians of all hours)", statistic="median_ms"),
    Variant(
        "drift",
        "means (the usual speed, times what the passes within the run say of the machine's drift)",
        statistic="usual_ms",
        drift=True,
    ),
    Variant("no-host", "host time", prices=lambda prices: replace(prices, host=HostCost())),
    Variant("short-texts", "the length of the texts (all as short as the shortest)", short=True),
    Variant("whole-prompts", "the lower price of a prompt's tokens", whole_prompts=True),
    Variant("free-prompts", "prompts in the steps", free_prompts=True),
    Variant("domains", "the run's own prompts (drafts of any text of the domain)", domains=True),
    Variant(
        "any-length",
        "the answers' lengths in the drafts (texts that end before the answer are replayed, too)",
        any_length=True,
    ),
    Variant("own-prices", "what the policies were told (they know the simulated prices)", own_prices=True),
)


@dataclass(frozen=True)
class Asked:
    """The requests of a run, as `dsim.workload.Workload`: prompt i is domain i unless domains are given."""

    prompt: IntArray
    output: IntArray
    domains: tuple[str, ...]
    domain_of: tuple[int, ...]

    def lengths(self, i: int) -> tuple[int, int]:
        """See `dsim.workload.Workload`."""
        row = i % self.prompt.size
        return int(self.prompt[row]), int(self.output[row])

    def domain(self, i: int) -> int:
        """See `dsim.workload.Workload`."""
        return self.domain_of[i % self.prompt.size]

    def arrival_ns(self, i: int) -> int:
        """All are there from the start."""
        return 0


class Told:
    """A policy that is told what the engine's was: prices of the pilot, and prompts by their own tokens.

    Parameters
    ----------
    policy
        The policy that plans.
    prices
        Of the pilot.
    prompt
        Mean length of the run's prompts: with it the lengths of the texts are told from what they have produced.
    stretch
        Tokens of a prompt that one replayed token stands for.
    """

    def __init__(self, policy: Policy, prices: ArmPrices, prompt: float, stretch: float) -> None:
        self.traits = policy.traits
        self._policy, self._prices, self._prompt, self._stretch = policy, prices, prompt, stretch
        if hasattr(policy, "observe"):
            self.observe = policy.observe

    def plan(self, view: PolicyView) -> IntArray:
        """See `dsim.policy.Policy`."""
        prices, count = self._prices, view.requests
        prompts = min(round(self._stretch * (view.base_tokens - count)), prices.max_tokens - count * (1 + view.gamma))
        return self._policy.plan(
            view._replace(
                verify_ms=prices.verify(count, self._prompt + 1 + float(view.produced.mean()))[1],
                draft_ms=prices.draft_ns[count] * 1e-6,
                base_tokens=count + max(0, prompts),
                host_hidden_ms=prices.host_hidden_ns[count] * 1e-6,
                host_exposed_ms=prices.host_exposed_ns[count] * 1e-6,
            )
        )


@dataclass(frozen=True)
class Cell:
    """One run to predict."""

    arm: str
    users: int
    round: int


def predict(found: Measurement, cell: Cell, variant: Variant = FULL, *, draws: int = DRAWS) -> dict[str, Any]:
    """Means of the simulated run's metrics over `draws` simulations, and its sources.

    What goes in of the run itself: which prompts were asked, and how long the answers were. (The variant ``drift`` also
    knows how slow the machine was meanwhile, by the passes between the run's steps: `Measurement.drift`.)
    """
    measured = found.measured
    host = fitted_host(found.host)
    prices = variant.prices(Prices.of(found.passes, found.profile.name, host, statistic=variant.statistic))
    if variant.drift:
        prices = prices.scaled(found.drift(cell.arm, cell.users, cell.round))
    rows = found.requests
    rows = rows[(rows["arm"] == cell.arm) & (rows["users"] == cell.users) & (rows["round"] == cell.round)]
    prompts, output = (rows[name].to_numpy(dtype=np.int64) for name in ("prompt_tokens", "output_tokens"))
    chunk = measured.prefill_chunk
    replayed = prices.equivalents(prompts, chunk)
    if variant.whole_prompts or variant.free_prompts:
        replayed = prompts if variant.whole_prompts else np.ones_like(prompts)
    else:
        chunk = int(prices.equivalents(np.array([chunk]), chunk)[0])
    drafting = cell.arm != "none"
    gamma = measured.gamma if drafting else 0
    names = tuple(prompt_name(i) for i in range(prompts.size))
    domain_of = tuple(range(prompts.size))
    bank = found.bank if drafting else None
    if drafting and bank is None:
        raise InputError("has no bank", file=found.folder, expected="a measurement with measure_engine.py --bank")
    if bank is not None and variant.domains:
        bank = by_text_domain(bank)
        names = bank.header.domains
        domain_of = tuple(names.index(name) for name in rows["domain"])
    elif bank is not None and not variant.any_length:
        bank = long_enough(bank, output)
        names = bank.header.domains
    policy = load_policy(cell.arm)
    if drafting and not variant.own_prices:
        told = told_prices(found.pilot, found.pilot_host, measured)
        policy = Told(policy, told, float(prompts.mean()), float(prompts.sum() / replayed.sum()))
    cost = prices.at(float(measured.contexts[0]) if variant.short else mean_context(prompts, output))
    runs = []
    for draw in range(draws if drafting else 1):
        drafts = BankDrafts(bank, gamma=gamma, seed=1000 * cell.round + draw) if drafting and bank is not None else None
        records = serve(
            replicas=1,
            config=engine_config(cell.users, gamma, chunk, prices.host),
            cost=cost,
            drafts=drafts,
            draft_cost=DraftCost(),
            policy=policy,
            stream=Asked(replayed, output, names, domain_of),
            load=ClosedLoop(users=cell.users, scored=prompts.size, steady=False),
        )
        runs.append({name: summarize(records)[name] for name in METRICS} | {"extrapolated": records.extrapolated})
    table = pd.DataFrame(runs)
    return {
        "arm": cell.arm,
        "users": cell.users,
        "round": cell.round,
        **{name: float(table[name].mean()) for name in METRICS},
        "accepted_length_sd": float(table["accepted_length"].std(ddof=0)),
        "extrapolated": bool(table["extrapolated"].any()),
        "cost_source": prices.cost.label,
        "drafts_source": "none" if drafts is None else drafts.label,
    }


def predicted(found: Measurement, variant: Variant, jobs: int, draws: int) -> pd.DataFrame:
    """A row a run."""
    keys = found.runs[["arm", "users", "round"]].itertuples(index=False)
    cells = [Cell(str(arm), int(users), int(number)) for arm, users, number in keys]
    work = joblib.Parallel(n_jobs=min(jobs, len(cells)), return_as="generator")(
        joblib.delayed(predict)(found, cell, variant, draws=draws) for cell in cells
    )
    return pd.DataFrame(list(tqdm(work, total=len(cells), desc=variant.name, unit="run", mininterval=1.0)))


# -- tables ----------------------------------------------------------------------------------------------


def run_case(options: RunOptions) -> dict[str, pd.DataFrame]:
    """Predict every run; `quick`: those of the first round, one simulation each."""
    found = open_measurement(measurement_folder())
    if options.quick:
        found = replace(found, runs=found.runs[found.runs["round"] == found.runs["round"].min()])
    draws = 1 if options.quick else DRAWS
    table = predicted(found, FULL, options.jobs, draws)
    cells = compared(found.runs, table)
    tables = {
        "validation": predictions(_rows(cells)),
        "cells": cells,
        "machine": _machine(found),
    }
    print(
        "\nThe errors beside the repeatability (half the range over the rounds; machine: of the time of the same work; "
        "after drift: less what the passes between its steps showed; luck: of the texts, one standard deviation)"
    )
    print_table(_beside(cells))
    if options.ablate:
        rows = [_ablated(FULL, cells)]
        for variant in ABLATIONS:
            rows.append(_ablated(variant, compared(found.runs, predicted(found, variant, options.jobs, draws))))
        tables["ablation"] = pd.DataFrame(rows)
    return tables


def compared(runs: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """A row a policy and load: means over the rounds, measured and predicted, and half the range of what was measured.

    ``NAME``, ``NAME_predicted``, ``NAME_half_range`` (a share) for every metric; ``time_ratio``: measured time of the
    run's own steps over the profile's prices for them; ``machine``: half the range of that ratio over the rounds;
    ``machine_after_drift``: the same after what the passes within the runs say of the machine's drift was taken out;
    ``luck``: standard deviation that other texts of the same prompts give the mean accepted length, a share.
    """
    both = runs.merge(table, on=["arm", "users", "round"], suffixes=("", "_predicted"))
    rows = []
    for (arm, users), found in both.groupby(["arm", "users"], sort=False):
        row: dict[str, Any] = {"arm": arm, "users": users, "rounds": len(found)}
        for name in METRICS:
            row[name] = found[name].mean()
            row[f"{name}_predicted"] = found[f"{name}_predicted"].mean()
            row[f"{name}_half_range"] = _half_range(found[name])
        steady = found["time_ratio"] / found["drift"]
        row["time_ratio"], row["machine"] = found["time_ratio"].mean(), _half_range(found["time_ratio"])
        row["machine_after_drift"] = _half_range(steady)
        row["luck"] = np.sqrt((found["accepted_length_sd"] ** 2).mean() / len(found)) / row["accepted_length"]
        row |= {name: found[name].iloc[0] for name in ("cost_source", "drafts_source")}
        row |= {"extrapolated": bool(found["extrapolated"].any()), "scored": int(found["n_scored"].sum())}
        rows.append(row)
    return pd.DataFrame(rows)


def _half_range(values: pd.Series) -> float:
    return float((values.max() - values.min()) / 2 / values.mean())


def _beside(cells: pd.DataFrame) -> pd.DataFrame:
    shown: dict[str, Any] = {"arm": cells["arm"], "users": cells["users"], "rounds": cells["rounds"]}
    for name, word in (("throughput_tok_s", "throughput"), ("tps_per_user", "tok/s/user"), ("accepted_length", "tau")):
        shown[f"{word} error"] = [percent(v, sign=True) for v in cells[f"{name}_predicted"] / cells[name] - 1]
        shown[f"{word} spread"] = [percent(value) for value in cells[f"{name}_half_range"]]
    shown["luck"] = [percent(value) for value in cells["luck"]]
    shown["step times"] = [percent(value, sign=True) for value in 1 / cells["time_ratio"] - 1]
    shown["machine"] = [percent(value) for value in cells["machine"]]
    return pd.DataFrame(shown | {"after drift": [percent(value) for value in cells["machine_after_drift"]]})


def _rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    allowed = ALLOWED + machine_repeatability(cells)
    return [
        {
            "case": NAME,
            "arm": cell["arm"],
            "load": f"{cell['users']} user{'s' if cell['users'] > 1 else ''}",
            "metric": metric,
            "unit": unit,
            "predicted": cell[f"{metric}_predicted"],
            "measured": cell[metric],
            "use": "scored",
            "target": allowed if metric in ("throughput_tok_s", "tps_per_user") else np.nan,
            "n_scored": cell["scored"],
            "cost_source": cell["cost_source"],
            "drafts_source": cell["drafts_source"],
            "extrapolated": cell["extrapolated"],
        }
        for cell in cells.to_dict("records")
        for metric, unit in METRICS.items()
        if not _known_beforehand(cell["arm"], metric)
    ]


def _known_beforehand(arm: str, metric: str) -> bool:
    """Whether the policy alone says what the metric is: nothing to predict, and no error to be proud of."""
    if metric == "verification_budget":
        return arm == "none" or arm.startswith("fixed")
    return metric == "accepted_length" and arm == "none"


def _machine(found: Measurement) -> pd.DataFrame:
    """What was measured on what, as names and values."""
    measured = found.measured
    said = {
        "processor": measured.about["processor"],
        "torch": measured.about["torch"],
        "threads": str(measured.threads),
        "clock": measured.clock,
        "target": measured.target,
        "drafter": measured.drafter,
        "gamma": str(measured.gamma),
        "temperature": f"{measured.temperature:g}",
        "rounds": str(measured.rounds),
        "texts": "the same in every round" if measured.same_texts else "sampled anew in every round",
        "max_tokens": str(measured.max_tokens),
        "prefill_chunk": str(measured.prefill_chunk),
        "profile": found.profile.name,
        "passes": str(len(found.profile.samples)),
        "contexts": f"{measured.contexts[0]} and {measured.contexts[1]}",
        "bank": "none" if found.bank is None else f"{found.bank.accepted.size:,} positions",
        "answers": "0" if found.bank is None else str(json.loads(found.bank.header.notes).get("answers", 1)),
    }
    return pd.DataFrame({"name": list(said), "value": list(said.values())})


def _ablated(variant: Variant, cells: pd.DataFrame) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": variant.name, "without": variant.without}
    for name in ("throughput_tok_s", "tps_per_user"):
        error = cells[f"{name}_predicted"] / cells[name] - 1
        row |= {
            f"{name}_mean_error": float(error.mean()),
            f"{name}_median_abs_error": float(error.abs().median()),
            f"{name}_worst_abs_error": float(error.abs().max()),
        }
    return row


# -- figures ---------------------------------------------------------------------------------------------


@style()
def draw_case(tables: Tables, folder: Path, stem: str) -> None:
    """Throughput and tok/s/user of every policy by load, measured and predicted; the errors beside what was allowed."""
    cells = tables["cells"]
    said = tables["machine"].set_index("name")["value"]
    fig, axes = new_figure(
        3, width=13.0, height=4.6, title="Our own engine on this machine: measured, and predicted from its profile"
    )
    caption(
        fig,
        f"{said['target']}, {said['drafter'].partition(' ')[0]} drafter, gamma {said['gamma']}, on "
        f"{said['processor']}, {said['threads']} thread(s). Filled with bars: measured, mean and range of "
        f"{said['rounds']} rounds (texts {said['texts']}). Rings: predicted by replaying the requests with the "
        "profile's step times and the bank's drafts; of the runs only prompts and answer lengths went in. Right: gray, "
        "what was allowed: 3 % and the machine's repeatability.",
    )
    for ax, name, label in (
        (axes[0, 0], "throughput_tok_s", "throughput, tok/s"),
        (axes[0, 1], "tps_per_user", "tok/s/user"),
    ):
        _draw_loads(ax, cells, name, label)
    _draw_cell_errors(axes[0, 2], cells)
    save_figure(fig, folder, stem)


def _draw_loads(ax: Axes, cells: pd.DataFrame, name: str, label: str) -> None:
    arms = list(dict.fromkeys(cells["arm"]))
    looks = arm_styles(arms)
    users = sorted(cells["users"].unique())
    for index, arm in enumerate(arms):
        rows = cells[cells["arm"] == arm].sort_values("users")
        place = np.array([users.index(value) for value in rows["users"]]) + 0.09 * (index - (len(arms) - 1) / 2)
        y, look = rows[name].to_numpy(), looks[arm]
        ax.errorbar(
            place, y, yerr=y * rows[f"{name}_half_range"], color=look.color, marker=look.marker, linestyle="none",
            markersize=5, elinewidth=1.0, label=arm, zorder=3,
        )  # fmt: skip
        ax.plot(
            place, rows[f"{name}_predicted"], linestyle="none", marker="o", markersize=9, markerfacecolor="none",
            markeredgecolor=look.color, markeredgewidth=1.0, zorder=4,
        )  # fmt: skip
    ax.set_xticks(range(len(users)), [str(value) for value in users])
    ax.set_xlabel("users")
    ax.set_ylabel(label)
    ax.set_ylim(bottom=0)
    ax.set_title(f"{label[0].upper()}{label[1:]}; rings: predicted")
    if name == "throughput_tok_s":
        legend(ax, "upper left")


def _draw_cell_errors(ax: Axes, cells: pd.DataFrame) -> None:
    arms = list(dict.fromkeys(cells["arm"]))
    looks = arm_styles(arms)
    allowed = 100 * (ALLOWED + machine_repeatability(cells))
    ax.axvspan(-allowed, allowed, color=INK, alpha=0.12, linewidth=0)
    ax.axvline(0.0, color=SOFT, linewidth=0.9)
    users = sorted(cells["users"].unique())
    for index, arm in enumerate(arms):
        rows = cells[cells["arm"] == arm]
        place = np.array([users.index(value) for value in rows["users"]]) + 0.1 * (index - (len(arms) - 1) / 2)
        for name, fill in (("throughput_tok_s", looks[arm].color), ("tps_per_user", "white")):
            error = 100 * (rows[f"{name}_predicted"] / rows[name] - 1)
            ax.plot(
                error, place, linestyle="none", marker=looks[arm].marker, markersize=5, color=looks[arm].color,
                markerfacecolor=fill, markeredgewidth=1.0,
            )  # fmt: skip
    ax.set_yticks(range(len(users)), [f"{value} user{'s' if value > 1 else ''}" for value in users])
    ax.set_ylim(len(users) - 0.4, -0.6)
    ax.set_xlabel("error, % (filled: throughput, hollow: tok/s/user)")
    ax.set_title("Errors of the prediction")


CASE = Case(
    name=NAME,
    title="Our own engine on one machine",
    run=run_case,
    draw=draw_case,
    page=page_section,
    headline=headline,
)
