"""The page of validation case `vllm-b300-flash`, made from its tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from experiments._b300_flash import METRICS, SEEDS, SHOWN, VALID_FIXED, load_workload
from experiments._validate import Tables, error_summary, markdown, number, percent

NAME = "vllm-b300-flash"
#: Largest |error| that was asked for, of any scored number, and of their median.
TARGET, MEDIAN_TARGET = 0.15, 0.05
#: How far adapting may fall below the best valid fixed length, from that many users on.
MOST_BEHIND, FROM_USERS = 0.05, 16


def page_section(tables: Tables) -> str:
    """The case's part of docs/validation.md."""
    cells, arms = tables["cells"], tables["arms"]
    parts = [
        _protocol(cells),
        "### What was fitted\n",
        _fitted(tables["constants"].iloc[0]),
        markdown(_arms(arms)),
        "\n### The errors\n",
        _errors_text(tables["validation"]),
        markdown(_errors(cells)),
        f"\n![Predictions and measurements by load](figures/validation-{NAME}.png)\n",
        "### The predictions\n",
        _PREDICTIONS,
        *(f"{text}:\n\n{markdown(_predictions(cells, metric))}\n" for metric, text in _WORDS.items()),
        "### Who wins where\n",
        _crossovers_text(cells),
        markdown(_crossovers(cells)),
        "",
    ]
    if "ablation" in tables:
        parts += [
            "### What each mechanism is worth here\n",
            _ABLATION,
            markdown(_ablation(tables["ablation"])),
            _out_of_reach(tables["ablation"]),
            f"\n![What each mechanism is worth](figures/validation-{NAME}-mechanisms.png)\n",
            "### What explains what\n",
            _residuals(cells, tables["ablation"]),
        ]
    if "confidence" in tables:
        parts += [
            "### The confidences of the adaptive arm\n",
            _CONFIDENCES,
            markdown(_confidences(tables["confidence"])),
        ]
    parts += ["\n### What this case leaves out\n", _LIMITS]
    return "\n".join(parts)


def _protocol(cells: pd.DataFrame) -> str:
    work, spread = load_workload(), cells["seed_spread"]
    return f"""\
### What was asked, and how it was answered

One server was measured by others at 1 to 256 concurrent users: vLLM with DeepSeek-V4-Flash-0731 on 4x B300 (tensor
parallel), without speculation, with fixed k = 1, 3, 5 and 7, and with adaptive verification. Its step and draft times
were published as curves, which are the shipped profile `b300x4-dsv4-flash-0731`. Known here are the runs without
speculation and with k = 1 at every load, and every arm at one user. All other cells were measured too, and were not
known when the predictions below were made. [Where the data come from](../dsim/data/validation/PROVENANCE.md).

- **The run.** The whole of it is replayed, ramp and drain included: {work.requests} requests ({work.requests_one_user}
  with one user) of {work.output_tokens} output tokens each, sent by as many users as the load says, who start together
  and send the next request when the last one is answered. `tok/s/user` is 1 / median TPOT; throughput is all output
  tokens over the run's length. Predictions are means over {len(SEEDS)} draws of prompts and luck, among which
  throughput differs by {percent(float(spread.median()))} (median over the cells) and at most {percent(spread.max())}.
- **The engine.** At most {work.max_num_seqs} requests and {work.max_num_batched_tokens:,} tokens in a step (vLLM's
  default for an API server on such a GPU: assumed), prompts in the same steps as decode, admission a step ahead
  (asynchronous scheduling). A step costs what the next captured size costs; above 1,024 tokens it runs eagerly. Prices
  are the warm medians as measured, while the adaptive policy plans with vLLM's own table (a running maximum).
- **Prompts.** SPEED-Bench's qualitative prompts, whose lengths are not known here. Assumed: lognormal, on average
  {work.prompt_tokens:g} tokens that must be computed (sigma {work.prompt_sigma:g}). A count of the same prompts with
  another model's tokenizer comes to about 300; a prefix cache that saw them at another load leaves fewer to compute.
- **Step time beyond the profile.** `offset + root x sqrt(requests)`, the square root because a rough first look had
  found it; other powers are among the changes below.
- **Acceptance.** The published curve of this checkpoint by position (two samples of 23 and 55 drafts, pooled), shifted
  in logits for each arm such that its cell at one user comes out. Its spread over requests and text, and the
  confidences (calibrated, AUC as in the paper's Fig. 6), are the shipped preset's, which is synthetic.
- **Seen by a fit, and not scored:** the row without speculation (the constants) and every arm's cell at one user (its
  acceptance). **Scored:** k = 1 at 16 to 256 users. Its output was invalid on this checkpoint, as was that of k = 3, so
  it shows what steps cost and nothing else.
- **Seen by the author:** the scored cells, while the model was made. No constant is fitted to them, and the square
  root, the requests and 200 tokens a prompt were the assumptions to start from; but other forms were tried with these
  errors in view, those in the table of changes below among them. The cells that are not known here are the blind test.
"""


def _fitted(constants: pd.Series) -> str:
    host = number(16 * constants["root_ms"])
    offset = "of the host, less what the profile's 8,192 tokens of context cost against some hundreds here"
    gap = "from a user's last token to the next arrival: client, network, tokenizer. Read off the cell at one user"
    return f"""\
Three constants, all from the row without speculation (misfit {percent(constants["misfit"])}: root mean square of its 12
relative errors):

| constant | value | meaning |
|---|---|---|
| offset | {constants["offset_ms"]:+.2f} ms a step | {offset} |
| root | {constants["root_ms"]:.2f} ms x sqrt(requests) | host time that grows: {host} ms at 256 requests |
| gap | {number(constants["gap_ms"])} ms a request | {gap} |

And one number an arm. *Tokens a step* are those of the replay at one user; *published* is the pooled curve as it
stands, with the 95 % interval of its 78 drafts (binomial at each position).
"""


def _arms(arms: pd.DataFrame) -> pd.DataFrame:
    rows = list(arms.itertuples())
    return pd.DataFrame(
        {
            "arm": arms["arm"],
            "level, logits": [f"{row.level:+.2f}" for row in rows],
            "tokens a step": [f"{row.tokens_per_step:.2f}" for row in rows],
            "published (interval)": [
                f"{row.published_tokens_per_step:.2f} ({row.published_low:.2f} to {row.published_high:.2f})"
                for row in rows
            ],
            "tok/s/user at one user": [percent(row.tps_per_user_error, sign=True) for row in rows],
            "throughput": [percent(row.throughput_tok_s_error, sign=True) for row in rows],
        }
    )


def _errors_text(table: pd.DataFrame) -> str:
    overall = error_summary(table).set_index("metric").loc["all"]
    met = "met" if overall["median"] <= MEDIAN_TARGET and overall["worst"] <= TARGET else "missed"
    return f"""\
Over the {overall["n"]} scored numbers the median absolute error is {percent(overall["median"])} (asked for: at most
{percent(MEDIAN_TARGET, 0)}) and the worst {percent(overall["worst"])} (at most {percent(TARGET, 0)}): {met}.
"""


def _errors(cells: pd.DataFrame) -> pd.DataFrame:
    known = cells[cells["arm"].isin(["nospec", "k1"])]
    shown: dict[str, Any] = {"arm": known["arm"], "users": known["concurrency"]}
    for metric in METRICS:
        head = "tok/s/user" if metric == "tps_per_user" else "throughput, tok/s"
        shown[f"{head}: predicted / measured"] = [
            f"{number(row[metric])} / {number(row[f'{metric}_measured'])}" for _, row in known.iterrows()
        ]
        shown[f"{head}: error"] = [percent(value, sign=True) for value in known[f"{metric}_error"]]
    shown["use"] = known["use"]
    return pd.DataFrame(shown)


_WORDS = {"throughput_tok_s": "Throughput, tok/s of all four GPUs", "tps_per_user": "tok/s and user"}

_PREDICTIONS = """\
All arms at all loads, as in [cells.csv](validation/vllm-b300-flash/cells.csv). In parentheses: with the published
acceptance instead of the arm's own, the 95 % interval of its 78 drafts. Bold: a cell whose measurement is not known
here.
"""


def _predictions(cells: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = []
    for users in sorted(cells["concurrency"].unique()):
        row: dict[str, Any] = {"users": users}
        for _, cell in cells[cells["concurrency"] == users].iterrows():
            text = number(cell[metric])
            text = f"**{text}**" if cell["use"] == "unknown" else text
            low, high = cell[f"{metric}_published_low"], cell[f"{metric}_published_high"]
            row[cell["arm"]] = text if np.isnan(low) else f"{text} ({number(low)} to {number(high)})"
        rows.append(row)
    return pd.DataFrame(rows)


def _pivot(cells: pd.DataFrame) -> pd.DataFrame:
    return cells.pivot_table(index="concurrency", columns="arm", values="throughput_tok_s")


def _crossovers(cells: pd.DataFrame) -> pd.DataFrame:
    table = _pivot(cells)
    best = table[[name for name in VALID_FIXED if name in table]]
    cell = cells.set_index(["arm", "concurrency"])
    rows = []
    for users in table.index:
        row: dict[str, Any] = {"users": users}
        row["best valid fixed length"] = str(best.loc[users].idxmax())
        row["adaptive against it"] = percent(table.loc[users, "adaptive"] / best.loc[users].max() - 1, sign=True)
        row["adaptive against no speculation"] = percent(
            table.loc[users, "adaptive"] / table.loc[users, "nospec"] - 1, sign=True
        )
        row["k7 against no speculation"] = percent(table.loc[users, "k7"] / table.loc[users, "nospec"] - 1, sign=True)
        for name in ("k7", "adaptive"):
            row[f"eager steps, {name}"] = percent(float(cell.loc[(name, users), "eager_steps"]), 0)
        rows.append(row)
    return pd.DataFrame(rows)


def _crossovers_text(cells: pd.DataFrame) -> str:
    table = _pivot(cells)
    high = table[table.index >= FROM_USERS]
    behind = float((high["adaptive"] / high[[name for name in VALID_FIXED if name in high]].max(axis=1) - 1).min())
    word = "never" if behind >= -MOST_BEHIND else "sometimes"
    fall = float(table.loc[128, "k7"] / table.loc[64, "k7"] - 1) if {64, 128} <= set(table.index) else np.nan
    return f"""\
From {FROM_USERS} users on, adaptive's throughput is {word} more than {percent(MOST_BEHIND, 0)} below that of the best
valid fixed length (k = 5 or 7): the least favorable load has {percent(behind, sign=True)}. Fixed k = 7 collapses at 128
users: 8 x 128 tokens are 1,024, so that any prompt in the step leaves the captured graphs (20.6 to 104 ms); its
throughput goes {percent(fall, sign=True)} from 64 to 128 users. The adaptive policy sees the prompt's tokens and
verifies fewer drafts in such a step.
"""


_ABLATION = """\
One thing is left out or changed at a time; constants and acceptance are fitted again to the same cells (one seed, so
that a percent is noise). *Misfit* is that of the row without speculation; the errors are those of k = 1 at 16 to 256
users; on the right, how predicted throughput changes. What matters on the right and not on the left is something that
the scored cells do not test.
"""


def _ablation(ablation: pd.DataFrame) -> pd.DataFrame:
    full = ablation[ablation["variant"] == "full"].iloc[0]
    lost = ["*" if isinstance(text, str) and text else "" for text in ablation["out_of_reach"]]
    shown: dict[str, Any] = {
        "changed": [f"{text}{star}" for text, star in zip(ablation["change"], lost, strict=True)],
        "misfit": [percent(value) for value in ablation["misfit"]],
        "k1: median": [percent(value) for value in ablation["k1_median_error"]],
        "worst": [percent(value) for value in ablation["k1_worst_error"]],
        "mean": [percent(value, sign=True) for value in ablation["k1_mean_error"]],
    }
    for name, users in SHOWN:
        column = ablation[f"{name}_{users}"]
        change = column / float(full[f"{name}_{users}"]) - 1
        shown[f"{name} at {users}"] = [
            number(value) if variant == "full" else percent(moved, 0, sign=True)
            for variant, value, moved in zip(ablation["variant"], column, change, strict=True)
        ]
    return pd.DataFrame(shown)


def _out_of_reach(ablation: pd.DataFrame) -> str:
    if not any(isinstance(text, str) and text for text in ablation["out_of_reach"]):
        return ""
    return (
        "\n\\* A step at one user is then so slow that not even a drafter that is always right gives some arm's\n"
        "measured speed: its drafts are all accepted there, and the row says no more than that the change is wrong.\n"
    )


def _residuals(cells: pd.DataFrame, ablation: pd.DataFrame) -> str:
    table = ablation.set_index("variant")
    cell = cells.set_index(["arm", "concurrency"])

    def value(variant: str, column: str, *, sign: bool = False) -> str:
        return percent(float(table.loc[variant, column]), sign=sign)

    def moved(variant: str, column: str) -> str:
        return percent(float(table.loc[variant, column] / table.loc["full", column] - 1), 0, sign=True)

    def error(arm: str, users: int, metric: str = "throughput_tok_s") -> str:
        return percent(float(cell.loc[(arm, users), f"{metric}_error"]), sign=True)

    return f"""\
- **Host time** explains most. The misfit goes from {value("full", "misfit")} to {value("no-host", "misfit")} without
  it, to {value("flat-host", "misfit")} if it is a constant and to {value("linear-host", "misfit")} in proportion to
  the requests; powers of 0.4 and 0.6 have {value("power-0.4", "misfit")} and {value("power-0.6", "misfit")}. That it
  belongs to requests and not to tokens is what the scored cells say: counted by tokens, k = 1 comes out
  {value("host-by-tokens", "k1_mean_error", sign=True)} on average. (Experts that real tokens wake and dummy ones do not
  would grow with tokens. At k = 1 there is no sign of them, but its output was invalid.)
- **Prompts in the steps, and the end of the captured graphs**, decide k = 5 and k = 7 at 128 users
  ({moved("no-prompts", "k5_128")} and {moved("no-prompts", "k7_128")} without the first,
  {moved("no-graph-end", "k5_128")} and {moved("no-graph-end", "k7_128")} without the second) and hardly anything at 16.
- **How long prompts are** matters in between, and the row without speculation cannot tell (misfit
  {value("prompts-100", "misfit")} with 100 tokens, {value("prompts-300", "misfit")} with 300). At 128 users 100 or 300
  instead of 200 move k = 5 by {moved("prompts-100", "k5_128")} and {moved("prompts-300", "k5_128")}, adaptive by
  {moved("prompts-100", "adaptive_128")} and {moved("prompts-300", "adaptive_128")}, k = 7 by
  {moved("prompts-100", "k7_128")} and {moved("prompts-300", "k7_128")}.
- **What is left at 128 users** ({error("nospec", 128)} without speculation, {error("k1", 128)} with k = 1, throughput)
  has two signs, so that no host time mends both. Shorter prompts mend the second (with 100 tokens the worst error is
  {value("prompts-100", "k1_worst_error")}); so would a draft of one token that costs less than the profiled block.
- **What is left at 256 users without speculation** ({error("nospec", 256)} throughput,
  {error("nospec", 256, "tps_per_user")} tok/s/user) no price mends, because the two disagree: the replay spends more
  time outside of decode (first tokens, ramp, drain) than the run did.
- **Synchrony.** Requests that accept alike stay in step and share their prompts' steps: k = 7 at 128 users then moves
  by {moved("requests-alike", "k7_128")}, and by {moved("no-gap", "k7_128")} if users are back a step earlier.
- **Cold steps and the budget**: with every step at its cold price k = 1 is off by up to
  {value("cold-steps", "k1_worst_error")}; 2,048 tokens a step fit the row without speculation worse
  ({value("chunks-2048", "misfit")}). 16,384 tokens a step, admission at once and the running maximum change little.
"""


_CONFIDENCES = """\
The adaptive policy spends its budget by confidences, and nobody published this head's. Assumed is a calibrated head
(*recorded*). Others, with the acceptance fitted again to the cell at one user (throughput, one seed):
"""


def _confidences(table: pd.DataFrame) -> pd.DataFrame:
    loads = [name for name in table.columns if name.startswith("throughput_")]
    shown: dict[str, Any] = {
        "confidences": table["confidence"],
        "ECE": [percent(value) for value in table["ece"]],
        "AUC": [f"{value:.2f}" for value in table["auc"]],
    }
    for name in loads:
        first = float(table[name].iloc[0])
        shown[_users(name.removeprefix("throughput_"))] = [
            number(value) if i == 0 else percent(value / first - 1, sign=True) for i, value in enumerate(table[name])
        ]
    return pd.DataFrame(shown)


def _users(count: str) -> str:
    return f"{count} user" if count == "1" else f"{count} users"


_LIMITS = """\
- The real prompts, their order, and which of them a prefix cache knew.
- Experts: the profile was timed with dummy tokens, which may wake fewer experts than real ones. A part of what is
  called host time here may be that.
- The context: the profile has 8,192 tokens of synthetic context, the run some hundreds. The cost model does not know,
  so `extrapolated` says nothing about it.
- What speculation costs the host beyond a step without it (rejection sampling, the planner), and a draft's cost by its
  length: the profile has one draft curve, of the block that was profiled.
- A user's time between requests is the same for all; jitter would smear the waves.
- How a model serves text that makes sense, at k = 1: its acceptance and its experts are those of invalid output.
"""


def headline(tables: Tables) -> str:
    """One sentence for README."""
    overall = error_summary(tables["validation"]).set_index("metric").loc["all"]
    return (
        "From the profile of another vLLM server and three constants fitted to its run without speculation, dsim "
        "predicts what k = 1 costs at 16 to 256 users (throughput and tok/s/user) with a median error of "
        f"{percent(overall['median'])} and {percent(overall['worst'])} at worst."
    )
