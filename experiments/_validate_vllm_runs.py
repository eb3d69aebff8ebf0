"""Validation case `vllm-four-runs`: the second half of four measured vLLM runs, predicted from the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joblib
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter
from tqdm import tqdm

from dsim.plotstyle import INK, SOFT, caption, legend, new_figure, save_figure, style
from dsim.telemetry import Records
from experiments._validate import Case, RunOptions, Tables, bootstrap_interval, draw_errors, predictions
from experiments._validate_vllm_page import TARGETS, headline, page_section
from experiments._vllm_runs import ABLATIONS, FULL, Fit, Run, Variant, fit, latencies, load_runs, replay, times_of

FloatArray = npt.NDArray[np.float64]

NAME = "vllm-four-runs"
METRICS = tuple((name, stat) for name in ("ttft", "tpot", "e2e") for stat in (50, 90, 99))


def run_case(options: RunOptions) -> dict[str, pd.DataFrame]:
    """Fit and predict; `quick`: one run, three replays."""
    runs = load_runs()[:1] if options.quick else load_runs()
    variants = (FULL, *ABLATIONS) if options.ablate else (FULL,)
    tasks = [(run, variant) for variant in variants for run in runs if variant.applies(run)]
    parallel = joblib.Parallel(n_jobs=min(options.jobs, len(tasks)), return_as="generator", batch_size=1)
    work = parallel(joblib.delayed(_task)(run, variant, 3 if options.quick else 20) for run, variant in tasks)
    bar = tqdm(work, total=len(tasks), desc="fits", unit="fit", mininterval=1.0)
    done = {(run.name, variant.name): one for (run, variant), one in zip(tasks, bar, strict=True)}
    full = {run.name: done[run.name, FULL.name] for run in runs}
    tables = {
        "validation": predictions([row for run in runs for row in _rows(run, *full[run.name])]),
        "constants": pd.DataFrame([_constants(run, full[run.name][0]) for run in runs]),
        "requests": pd.concat([_requests(run, full[run.name][1]) for run in runs], ignore_index=True),
        "series": pd.concat([_series(run, full[run.name][1]) for run in runs], ignore_index=True),
    }
    if options.ablate:
        tables["ablation"] = pd.DataFrame(
            [
                _ablated(run, variant, *done[run.name, variant.name])
                for run in runs
                for variant in variants
                if variant.applies(run)
            ]
        )
    return tables


def _task(run: Run, variant: Variant, replays: int) -> tuple[Fit, Records]:
    found = fit(run, variant, replays=replays)
    return found, replay(run, found.cost, variant)


def statistics(run: Run, first_s: FloatArray, last_s: FloatArray, rows: slice) -> dict[str, float]:
    """Throughput (output tokens of these requests from the first one's arrival to the last one's end), percentiles."""
    found = latencies(run, first_s, last_s, rows)
    seconds = float(last_s[rows].max() - run.arrival_s[rows].min())
    result = {"throughput_tok_s": float(run.output[rows].sum()) / seconds}
    return result | {f"{name}_p{p}_ms": float(np.percentile(found[name], p)) for name, p in METRICS}


def _rows(run: Run, found: Fit, records: Records) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    total = run.arrival_s.size
    for use, part in (("fitted", slice(0, run.half)), ("scored", slice(run.half, total))):
        predicted = statistics(run, *times_of(records), part)
        measured = statistics(run, run.first_s, run.last_s, part)
        values = latencies(run, run.first_s, run.last_s, part)
        for metric, value in predicted.items():
            row: dict[str, Any] = {
                "case": NAME,
                "arm": run.name,
                "load": f"requests {part.start}-{part.stop - 1}",
                "metric": metric,
                "unit": "tok/s" if metric == "throughput_tok_s" else "ms",
                "predicted": value,
                "measured": measured[metric],
                "use": use,
                "target": TARGETS.get(metric, np.nan) if use == "scored" else np.nan,
                "n_scored": part.stop - part.start,
                "cost_source": found.cost.label,
                "drafts_source": "none",
                "extrapolated": records.extrapolated,
            }
            if metric != "throughput_tok_s":
                name, stat, _ = metric.split("_")
                row["low"], row["high"] = bootstrap_interval(values[name], float(stat[1:]))
            rows.append(row)
    return rows


def _constants(run: Run, found: Fit) -> dict[str, Any]:
    machine, cost = found.machine, found.cost
    return {
        "arm": run.name,
        "bandwidth_gb_s": machine.bandwidth_gb_s,
        "stated_bandwidth_gb_s": run.memory_gb_s,
        "compute_tflop_s": machine.compute_tflop_s,
        "overhead_ms": machine.overhead_ms,
        "request_ms": machine.request_ms,
        "link_gb_s": machine.link_gb_s if run.work.gpus > 1 else np.nan,
        "misfit": found.misfit,
        "replays": found.replays,
        "fitted_min_tokens": cost.min_tokens,
        "fitted_max_tokens": cost.max_tokens,
        "fitted_max_requests": cost.max_verify_requests,
        "fitted_min_context": int(cost.contexts[0]),
        "fitted_max_context": int(cost.contexts[1]),
    }


def _requests(run: Run, records: Records) -> pd.DataFrame:
    everything = slice(0, run.arrival_s.size)
    measured = latencies(run, run.first_s, run.last_s, everything)
    predicted = latencies(run, *times_of(records), everything)
    table: dict[str, Any] = {"arm": run.name, "request": np.arange(run.arrival_s.size), "arrival_s": run.arrival_s}
    for name in ("ttft", "tpot", "e2e"):
        table |= {
            f"{name}_measured_ms": np.round(measured[name], 3),
            f"{name}_predicted_ms": np.round(predicted[name], 3),
        }
    table["preemptions_predicted"] = records.requests["preemptions"]
    return pd.DataFrame(table)


def _series(run: Run, records: Records) -> pd.DataFrame:
    """Output tokens a second, measured and predicted. The measured seconds start somewhat before the first arrival."""
    ends = records.steps["end_ns"] / 1e9
    produced = records.steps["committed"] + records.steps["first_tokens"]
    last = max(int(np.ceil(ends[-1])), int(run.series["second"].max()))
    predicted = np.bincount(np.ceil(ends).astype(np.int64), weights=produced, minlength=last + 1)[1:]
    measured = np.zeros(last)
    measured[run.series["second"].to_numpy(dtype=np.int64) - 1] = run.series["output_tokens"]
    return pd.DataFrame(
        {
            "arm": run.name,
            "second": np.arange(1, last + 1),
            "measured_tokens": measured.astype(np.int64),
            "predicted_tokens": predicted.astype(np.int64),
        }
    )


def _ablated(run: Run, variant: Variant, found: Fit, records: Records) -> dict[str, Any]:
    part = slice(run.half, run.arrival_s.size)
    predicted, measured = statistics(run, *times_of(records), part), statistics(run, run.first_s, run.last_s, part)
    errors = {f"{metric}_error": predicted[metric] / measured[metric] - 1 for metric in ("ttft_p50_ms", *TARGETS)}
    return {"arm": run.name, "variant": variant.name, "without": variant.without, "misfit": found.misfit} | errors


# -- figures ---------------------------------------------------------------------------------------------

_PREDICTED = "#D55E00"


def draw_case(tables: Tables, folder: Path, stem: str) -> None:
    """Errors; and distributions and output rate of each run."""
    draw_errors(
        tables["validation"],
        folder,
        stem,
        title="Four vLLM runs without speculation: second half predicted from the first",
        note="Filled: the second half of each run's requests (predicted). Hollow: the first half (fitted). Step times: "
        "bytes and operations counted, machine constants fitted to the first half. Arrivals and lengths: recorded. "
        "Measurements: vLLM 0.19.0 runs published with LLMServingSim (MIT).",
    )
    _draw_distributions(tables, folder, f"{stem}-distributions")


@style()
def _draw_distributions(tables: Tables, folder: Path, stem: str) -> None:
    table = tables["validation"]
    arms = list(dict.fromkeys(table["arm"]))
    half = int(table[table["use"] == "fitted"]["n_scored"].max())
    fig, axes = new_figure(
        3,
        len(arms),
        width=9.2,
        height=1.95 * len(arms) + 0.5,
        title=f"Requests from number {half} on: TTFT, TPOT, output rate",
    )
    caption(
        fig,
        "Black: measured. Dashed: predicted; of these requests the fit knew arrivals and lengths only. Right: output "
        "tokens of all requests of the run, second by second; vertical line: the first predicted request arrives.",
    )
    for row, arm in enumerate(arms):
        mine = tables["requests"][(tables["requests"]["arm"] == arm)]
        for ax, name in ((axes[row, 0], "ttft"), (axes[row, 1], "tpot")):
            _cumulative(ax, mine[mine["request"] >= half], name)
        axes[row, 0].set_title(arm)
        series, ax = tables["series"][tables["series"]["arm"] == arm], axes[row, 2]
        ax.plot(series["second"], series["measured_tokens"], color=INK, linewidth=1.0, label="measured")
        ax.plot(
            series["second"],
            series["predicted_tokens"],
            color=_PREDICTED,
            linewidth=1.2,
            linestyle="--",
            label="predicted",
        )
        ax.axvline(float(mine.loc[mine["request"] == half, "arrival_s"].iloc[0]), color=SOFT, linewidth=0.8)
        ax.set_ylim(0, 1.25 * float(series[["measured_tokens", "predicted_tokens"]].to_numpy().max()))
        ax.set_xlabel("seconds")
        ax.set_ylabel("output tok/s")
        if row == 0:
            legend(ax, "upper right", ncols=2)
    save_figure(fig, folder, stem)


def _cumulative(ax: Axes, requests: pd.DataFrame, name: str) -> None:
    scale = 1e-3 if name == "ttft" else 1.0
    share = (np.arange(len(requests)) + 0.5) / len(requests)
    wide = False
    for kind, color, dash in (("measured", INK, "-"), ("predicted", _PREDICTED, "--")):
        values = np.sort(requests[f"{name}_{kind}_ms"].to_numpy(dtype=np.float64)) * scale
        wide = wide or values[-1] > 20 * values[0]
        ax.plot(values, share, color=color, linewidth=1.4, linestyle=dash)
    if wide:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_ylim(0, 1)
    ax.set_ylabel("share of requests")
    ax.set_xlabel("TTFT, s" if name == "ttft" else "TPOT, ms")


CASE = Case(
    name=NAME,
    title="Four vLLM runs without speculation",
    run=run_case,
    draw=draw_case,
    page=page_section,
    headline=headline,
)
