"""The page of validation case `vllm-four-runs`, made from its tables."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments._validate import METRIC_WORDS, Tables, error_summary, markdown, number, percent, readable_summary

#: Largest |error| that was asked for.
TARGETS = {"throughput_tok_s": 0.05, "tpot_p50_ms": 0.05, "ttft_p90_ms": 0.15}


def page_section(tables: Tables) -> str:
    """The case's part of docs/validation.md."""
    table = tables["validation"]
    scored = table[table["use"] == "scored"]
    half = int(scored["n_scored"].iloc[0])
    parts = [
        _PROTOCOL.format(half=half),
        "### The errors\n",
        "Predicted, measured, and the error, of what was asked for:\n",
        markdown(_targets(scored)),
        "\nAll scored numbers of the four runs:\n",
        markdown(readable_summary(error_summary(table)).drop(columns="within target")),
        "\n![Predicted against measured](figures/validation-vllm-four-runs.png)\n",
        "![Distributions](figures/validation-vllm-four-runs-distributions.png)\n",
        "### P99\n",
        _P99.format(half=half),
        markdown(_tails(scored)),
        "\n### The constants\n",
        _CONSTANTS,
        markdown(_constants(tables["constants"])),
        _extrapolation(scored),
    ]
    if "ablation" in tables:
        parts += ["### What each mechanism is worth\n", _ABLATION, *_ablation(tables["ablation"])]
        parts += ["### What explains the rest\n", _residuals(scored, tables["ablation"])]
    parts += ["### Not modeled in this case\n", _LIMITS]
    return "\n".join(parts)


_PROTOCOL = """\
### What was predicted, and how

Four runs of vLLM 0.19.0 that others measured and published, each of 300 ShareGPT prompts at recorded times, with forced
output lengths and no speculation: a dense 8B model on one GPU of two kinds (on the smaller one the KV cache overflows
and requests are preempted), a dense 32B model on two GPUs (tensor parallel), and a mixture of experts on two (data
parallel with expert parallel). [Where the data come from](../dsim/data/validation/PROVENANCE.md).

- **Split.** The first {half} requests by arrival are fitted, the other {half} are predicted. The whole arrival history
  is replayed for both; of the predicted requests only arrivals and lengths go in.
- **Engine.** As the run's configuration has it: 2,048 tokens a step, chunked prefill, first come first served, the
  limits of sequences and KV blocks, preemption by recomputation, asynchronous scheduling (`admit_ahead`). None of it is
  fitted. The two data-parallel ranks step together and are replayed as one engine with the slots of both.
- **Step time.** `dsim.cost.work`: the bytes and operations of a step are counted from the model's published sizes. Four
  constants turn them into time (five where GPUs talk), and nothing else is fitted. They are those with which the
  *replayed* first half has the measured TTFT and TPOT, request by request.
- **Definitions.** Throughput: output tokens of the half, from its first arrival to its last token, drain included.
  TTFT and E2E count from the client's arrival time.
"""

_P99 = """\
The P99 of {half} requests is nearly the second largest value. The interval is a 95 % bootstrap over the measured
requests: what drawing other requests would do, not what running again would.
"""

_CONSTANTS = """\
Each run has its own. No bandwidth may exceed the one that the source states for the GPU, and all are held to their
starting values with about the weight of one request, so that what a run does not determine stays where it was.
A bandwidth at its bound says that the law would rather have more. *Misfit* is the error of the replayed first half.
"""

_ABLATION = """\
One mechanism is left out, the constants are fitted again to the first half, and the second half is predicted again. All
columns but *misfit* are errors of the second half. A small change means that the other constants make up for the
mechanism *in this run*, not that it is small.
"""

_LIMITS = """\
- The prefix cache: here a preempted request computes its whole context again, while vLLM finds those of its blocks that
  nobody has overwritten. A part of what is left in the run on the RTX 4090 may be this.
- Attention inside a prompt (operations grow with the square of its length), captured graph sizes, choice of kernels: a
  step's cost is smooth in tokens.
- Data-parallel ranks with unequal batches: the slower one sets the pace; here they are one.
- The first step after start-up, which compiles and takes several times as long.
- How a fit carries over to another load, model or day: fitted and predicted half are of the same run.
"""


def _one(scored: pd.DataFrame, arm: str, metric: str) -> pd.Series:
    return scored[(scored["arm"] == arm) & (scored["metric"] == metric)].iloc[0]


def _targets(scored: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for arm in dict.fromkeys(scored["arm"]):
        row: dict[str, Any] = {"run": arm}
        for metric, target in TARGETS.items():
            one = _one(scored, arm, metric)
            head = f"{METRIC_WORDS[metric]}, {one['unit']} (within {percent(target, 0)})"
            row[head] = f"{one['predicted']:,.1f} / {one['measured']:,.1f}: {percent(one['error'], sign=True)}"
        rows.append(row)
    return pd.DataFrame(rows)


def _tails(scored: pd.DataFrame) -> pd.DataFrame:
    tails = scored[scored["metric"].str.contains("_p99_")]
    return pd.DataFrame(
        {
            "run": tails["arm"],
            "metric": tails["metric"].map(METRIC_WORDS),
            "measured, ms": tails["measured"],
            "95 % interval": [f"{number(row.low)} to {number(row.high)}" for row in tails.itertuples()],
            "predicted, ms": tails["predicted"],
            "error": [percent(value, sign=True) for value in tails["error"]],
            "inside": ["yes" if row.low <= row.predicted <= row.high else "no" for row in tails.itertuples()],
        }
    )


def _constants(constants: pd.DataFrame) -> pd.DataFrame:
    rows = list(constants.itertuples())
    return pd.DataFrame(
        {
            "run": constants["arm"],
            "memory, GB/s (stated)": [f"{row.bandwidth_gb_s:,.0f} ({row.stated_bandwidth_gb_s:,.0f})" for row in rows],
            "compute, TFLOP/s": constants["compute_tflop_s"],
            "a step, ms": constants["overhead_ms"],
            "a request in decode, ms": constants["request_ms"],
            "link, GB/s": constants["link_gb_s"],
            "misfit": [percent(value) for value in constants["misfit"]],
            "replays": constants["replays"],
        }
    )


def _extrapolation(scored: pd.DataFrame) -> str:
    left = list(dict.fromkeys(scored["arm"][scored["extrapolated"].astype(bool)]))
    if not left:
        return "\nNo run has steps outside the range (tokens, requests, mean context) of its fitted half.\n"
    return (
        f"\nSome steps of {', '.join(left)} lie outside the range (tokens, requests, mean context) of the fitted half: "
        "its rows say `extrapolated`.\n"
    )


_ABLATION_COLUMNS = {
    "ttft_p50_ms_error": "TTFT P50",
    "ttft_p90_ms_error": "TTFT P90",
    "tpot_p50_ms_error": "TPOT P50",
    "throughput_tok_s_error": "throughput",
}


def _ablation(ablation: pd.DataFrame) -> list[str]:
    found = []
    for arm in dict.fromkeys(ablation["arm"]):
        rows = ablation[ablation["arm"] == arm]
        shown = {f"{arm}, without": rows["without"], "misfit": [percent(value) for value in rows["misfit"]]}
        shown |= {word: [percent(v, sign=True) for v in rows[name]] for name, word in _ABLATION_COLUMNS.items()}
        found.append(f"{markdown(pd.DataFrame(shown))}\n")
    return found


def _residuals(scored: pd.DataFrame, ablation: pd.DataFrame) -> str:
    def value(arm: str, variant: str, column: str) -> float:
        rows = ablation[(ablation["arm"] == arm) & (ablation["variant"] == variant)]
        return float(rows[column].iloc[0])

    def change(arm: str, variant: str, column: str) -> str:
        signed = column != "misfit"
        before, after = (percent(value(arm, name, column), sign=signed) for name in ("full", variant))
        return f"from {before} to {after}"

    small, dense = "pro6000-llama-3.1-8b", "pro6000x2-qwen3-32b"
    moe, full = "pro6000x2-qwen3-30b-a3b", "rtx4090-llama-3.1-8b"
    jump = _one(scored, full, "ttft_p90_ms")
    return f"""\
- **Admission a step ahead** is the largest term of a short TTFT. Without it the misfit goes
  {change(small, "admit-at-once", "misfit")} ({small}) and {change(moe, "admit-at-once", "misfit")} ({moe}), and the
  median TTFT's error of the latter {change(moe, "admit-at-once", "ttft_p50_ms_error")}. Where requests queue for a
  minute it hardly counts.
- **The compute bound** carries the prefill: without it the throughput's error of {small} goes
  {change(small, "no-compute", "throughput_tok_s_error")}. Where there is a link, the fit makes the link pay instead.
- **Cache reads, link and idle experts** tell in the drain, when the batch gets small: the throughput's error of {dense}
  goes {change(dense, "no-cache-reads", "throughput_tok_s_error")} without cache reads and
  {change(dense, "no-link", "throughput_tok_s_error")} without the link, that of {moe}
  {change(moe, "all-experts", "throughput_tok_s_error")} if every step read all experts. The fitted half has hardly a
  step with a small batch, so what is left of the throughput's errors comes from the drain too.
- **The end of the KV cache** makes the run on the RTX 4090: without it hardly anybody waits there. The P90 of its TTFT
  ({percent(float(jump["error"]), sign=True)}) lies on a jump, because requests enter in cohorts when earlier ones end;
  the measured one's own bootstrap interval is {jump["low"] / 1e3:,.0f} to {jump["high"] / 1e3:,.0f} s.
- **The median TTFT of {moe}** ({percent(value(moe, "full", "ttft_p50_ms_error"), sign=True)}) is a few steps long: two
  ranks with queues and batches of their own are one engine here.
"""


def headline(tables: Tables) -> str:
    """One sentence for README."""
    table = tables["validation"]
    overall = error_summary(table).set_index("metric").loc["all"]
    scored = table[table["use"] == "scored"]
    worst = {metric: float(scored.loc[scored["metric"] == metric, "error"].abs().max()) for metric in TARGETS}
    return (
        f"Fitted to the first half of four published vLLM runs without speculation, dsim predicts {overall['n']} "
        "numbers of their second half (throughput, TTFT, TPOT, E2E) with a median error of "
        f"{percent(overall['median'])} and {percent(overall['worst'])} at worst; throughput within "
        f"{percent(worst['throughput_tok_s'])}, median TPOT within {percent(worst['tpot_p50_ms'])}, P90 TTFT within "
        f"{percent(worst['ttft_p90_ms'])}."
    )
