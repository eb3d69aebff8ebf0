"""The page of validation case `here`, made from its tables."""

from __future__ import annotations

import numpy as np
import pandas as pd

from experiments._validate import Tables, error_summary, markdown, percent, readable_summary

#: Largest |error| that was asked for, on top of the machine's own repeatability.
ALLOWED = 0.03


def machine_repeatability(cells: pd.DataFrame) -> float:
    """Half the range over the rounds of the time that the same work took, as a share: root mean square of the cells.

    "The same work": the run's own steps, priced by the profile. 0 where there was one round only.
    """
    return _root_mean_square(cells["machine"])


def _root_mean_square(values: pd.Series) -> float:
    return float(np.sqrt(np.mean(values.to_numpy(dtype=np.float64) ** 2)))


def page_section(tables: Tables) -> str:
    """The case's part of docs/validation.md."""
    cells, table = tables["cells"], tables["validation"]
    said = tables["machine"].set_index("name")["value"].astype(str)
    parts = [
        _PROTOCOL.format(
            target=said["target"],
            drafter=said["drafter"].partition(" ")[0],
            gamma=said["gamma"],
            processor=said["processor"],
            threads=said["threads"],
            rounds=said["rounds"],
            clock=said["clock"],
            texts=said["texts"],
            contexts=said["contexts"],
            bank=said["bank"],
            answers=said.get("answers", "1"),
        ),
        "### The errors\n",
        _REPEATABILITY.format(
            machine=percent(machine_repeatability(cells)),
            after=percent(_root_mean_square(cells["machine_after_drift"])),
            judged=_judged(table),
        ),
        markdown(_cells(cells)),
        "\nAll scored numbers:\n",
        markdown(readable_summary(error_summary(table))),
        "\n![Measured and predicted](figures/validation-here.png)\n",
        "### Where the errors come from\n",
        _SOURCES,
        markdown(_sources(cells)),
    ]
    if "ablation" in tables:
        parts += ["\n### What each mechanism is worth\n", _ABLATION, markdown(_ablation(tables["ablation"]))]
    parts += ["\n### Not modeled in this case\n", _LIMITS]
    return "\n".join(parts)


_PROTOCOL = """\
### What was predicted, and how

`experiments/measure_engine.py` ran a real speculative-decoding engine ([drafter.md](drafter.md#the-engine)): {target}
and a {drafter} drafter (gamma {gamma}) in float32 on {processor}, {threads} thread(s), {clock} clock; closed loops of
some users, ramp and drain inside, in {rounds} rounds (texts: {texts}). Between the steps of the runs single passes of
given sizes were timed, so that profile and runs saw the same machine.

- **What went in of the runs**: which prompts were asked, and how long the answers were. Both are the workload; neither
  says how long anything took. Times, accepted lengths and budgets are predicted.
- **Step times**: means of the profile's passes over all hours (a run sums its steps up), what a token costs plus what a
  request costs, at the run's mean length of text (texts of {contexts} tokens were timed). Drafts by requests. Host time
  as profiled. Nothing is fitted to a run.
- **Prompts** are prefilled in the steps, a chunk a step. A prompt's token runs no LM head, and the simulator has one
  price for a step's tokens: a prompt is replayed with as many tokens as its pass costs by the verify prices.
- **Drafts** are replayed from a bank: the same drafter, recorded on texts that the target wrote to the same prompts at
  another time ({bank}, {answers} texts a prompt). A request meets the texts of its own prompt that are as long as its
  answer; where none is, it goes on in another one from the start.
- **Policies** are the same code in both, and are told the same: in the engine they knew the prices of a pilot profile,
  three passes of each size, and so do the simulated ones.
"""

_REPEATABILITY = """\
Allowed were 3 % on top of the machine's repeatability. That is {machine}: half the range, over the rounds, of the time
that a run's own steps took against the profile's prices of them (root mean square over policies and loads; {after} when
what the passes between the steps say of the machine's drift is taken out). {judged} *Spread* is half the range of the
measured number itself; where the rounds sampled other texts, their luck is in it too.
"""

_SOURCES = """\
A run's own steps (requests, tokens, contexts as they were) priced by the profile: *step times* is how much too long or
too short that is, with nothing else in it. *Accepted length* is the error of the drafts: what the replayed texts gave
against what the run's own texts did; *luck* is how far other texts of the same prompts move the mean of the rounds,
one standard deviation. Step times, drafts and budgets together make the error of the throughput.
"""

_ABLATION = """\
One mechanism is left out and everything predicted again. The first predictions of the shipped measurement had each
run's drift and the usual speed. They were replaced by means after this table was seen: a run of some minutes holds too
few passes to tell its drift, and medians leave out what makes steps long.
"""

_LIMITS = """\
- Variation of a step's time: each size has its mean, and the machine the same speed at all hours.
- The policies' own planning time: passes are timed with verify lengths that were told.
- The shape of a batch: verify lengths that differ, and contexts that differ, are priced by their sums and means.
- The engine without a drafter: `none` is priced by passes of the engine that has one and keeps the states it needs.
- Another machine: these are the prices of one processor.
"""


def _pair(cells: pd.DataFrame, name: str, digits: int) -> list[str]:
    return [
        f"{row[f'{name}_predicted']:,.{digits}f} / {row[name]:,.{digits}f}: "
        f"{percent(row[f'{name}_predicted'] / row[name] - 1, sign=True)}"
        for row in cells.to_dict("records")
    ]


def _cells(cells: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "policy": cells["arm"],
            "users": cells["users"],
            "throughput, tok/s": _pair(cells, "throughput_tok_s", 1),
            "spread": [percent(value) for value in cells["throughput_tok_s_half_range"]],
            "tok/s/user": _pair(cells, "tps_per_user", 2),
            "spread ": [percent(value) for value in cells["tps_per_user_half_range"]],
            "accepted length": _pair(cells, "accepted_length", 2),
            "budget": _pair(cells, "verification_budget", 2),
        }
    )


def _sources(cells: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for users, found in cells.groupby("users", sort=True):
        drafting = found[found["arm"] != "none"]
        tau = drafting["accepted_length_predicted"] / drafting["accepted_length"] - 1
        times = 1 / found["time_ratio"] - 1
        rows.append(
            {
                "users": users,
                "step times, mean": percent(float(times.mean()), sign=True),
                "step times, worst": percent(float(times.loc[times.abs().idxmax()]), sign=True),
                "accepted length, mean": percent(float(tau.mean()), sign=True) if len(tau) else "-",
                "accepted length, worst": percent(float(tau.loc[tau.abs().idxmax()]), sign=True) if len(tau) else "-",
                "luck": percent(_root_mean_square(drafting["luck"])) if len(tau) else "-",
            }
        )
    return pd.DataFrame(rows)


def _ablation(ablation: pd.DataFrame) -> pd.DataFrame:
    shown: dict[str, object] = {"without": ablation["without"]}
    for name, word in (("throughput_tok_s", "throughput"), ("tps_per_user", "tok/s/user")):
        shown[f"{word}: mean error"] = [percent(value, sign=True) for value in ablation[f"{name}_mean_error"]]
        shown[f"{word}: median abs. error"] = [percent(value) for value in ablation[f"{name}_median_abs_error"]]
        shown[f"{word}: worst"] = [percent(value) for value in ablation[f"{name}_worst_abs_error"]]
    return pd.DataFrame(shown)


def _judged(table: pd.DataFrame) -> str:
    """How many of the numbers with a target meet it."""
    rows = error_summary(table).set_index("metric").loc[["throughput_tok_s", "tps_per_user"]]
    met, asked = int(rows["within"].sum()), int(rows["n_target"].sum())
    missed = "" if met == asked else f", {asked - met} {'is' if asked - met == 1 else 'are'} not"
    return f"{met} of {asked} errors are within that{missed}."


def headline(tables: Tables) -> str:
    """One sentence for README."""
    cells, table = tables["cells"], tables["validation"]
    summary = error_summary(table).set_index("metric")
    through, user = summary.loc["throughput_tok_s"], summary.loc["tps_per_user"]
    return (
        f"Of a real engine on one CPU ({cells['arm'].nunique()} policies at {cells['users'].nunique()} loads) dsim "
        "predicts throughput and tok/s/user from the engine's profile, recorded drafts and the requests' lengths with "
        f"median errors of {percent(through['median'])} and {percent(user['median'])} ("
        f"{percent(through['worst'])} and {percent(user['worst'])} at worst; 3 % and the machine's repeatability of "
        f"{percent(machine_repeatability(cells))} were allowed: {_judged(table)[:-1]})."
    )
