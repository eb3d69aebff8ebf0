"""Serving metrics from a run's records, with the field's names and definitions.

====================== ==================================================================================
TTFT                   first token - arrival
TPOT                   (last token - first token) / (n - 1), per request with n >= 2 output tokens
ITL                    gap between a request's bursts: the step's duration, once a request in decode
``tps_per_user``       1 / median TPOT
throughput             output tokens of the measuring window / its length; per GPU: divided by the GPUs
accepted length        tokens a request and step, bonus included, before the cut at the output's end
verification budget    1 + mean verify length
acceptance rate        accepted / verified drafts
goodput                scored requests that meet the SLO, a second
====================== ==================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError
from dsim.telemetry import Records

FloatArray = npt.NDArray[np.float64]
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Slo:
    """Latency targets in milliseconds; None: no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


def summarize(records: Records, slo: Slo | None = None) -> dict[str, float]:
    """One number a metric, over the scored requests and the measuring window.

    Returns
    -------
    dict
        NaN where a metric has nothing to stand on (no drafts verified, no request with two tokens).
    """
    requests, steps = records.requests, records.steps
    first, last = records.scored
    scored = slice(first, last)
    arrival, start, end = (requests[name][scored] for name in ("arrival_ns", "first_ns", "finish_ns"))
    if np.any(end < 0):
        raise RuntimeError("metrics invariant violated: a scored request has not ended")
    tokens = requests["output_tokens"][scored]
    ttft = (start - arrival) / 1e6
    several = tokens >= 2
    tpot = (end - start)[several] / 1e6 / (tokens[several] - 1)
    e2e = (end - arrival) / 1e6
    low, high = records.window_ns
    seconds = (high - low) / 1e9
    inside = _run_of((steps["end_ns"] > low) & (steps["end_ns"] <= high))
    s = {name: column[inside] for name, column in steps.items()}
    if records.colocated:
        firsts = int(s["first_tokens"].sum())
    else:
        firsts = int(np.count_nonzero((requests["first_ns"] > low) & (requests["first_ns"] <= high)))
    produced = int(s["committed"].sum()) + firsts
    decoding = int(s["requests"].sum())
    drafts, accepted = int(s["drafts"].sum()), int(s["accepted"].sum())
    throughput = produced / seconds
    result = {
        "n_scored": float(last - first),
        "sim_seconds": records.end_ns / 1e9,
        "window_seconds": seconds,
        "throughput_tok_s": throughput,
        "throughput_tok_s_gpu": throughput / records.gpus,
        "request_throughput": float(np.count_nonzero((requests["finish_ns"] > low) & (requests["finish_ns"] <= high)))
        / seconds,
        "tps_per_user": 1e3 / float(np.median(tpot)) if tpot.size else float("nan"),
        "tps_per_user_mean": float(np.mean(1e3 / tpot)) if tpot.size else float("nan"),
        "accepted_length": _ratio(decoding + accepted, decoding),
        "verification_budget": _ratio(decoding + drafts, decoding),
        "acceptance_rate": _ratio(accepted, drafts),
        "acceptance_rate_with_bonus": _ratio(decoding + accepted, decoding + drafts),
        "committed_tokens": float(produced),
        "wasted_tokens_per_step": _ratio(drafts - accepted, s["drafts"].size),
        "fallback_steps": float(np.count_nonzero((s["drafts"] == 0) & (s["requests"] > 0))),
        "steps": float(s["drafts"].size),
        "mean_batch_requests": _weighted_mean(s["requests"], s["step_ns"]),
        "mean_step_ms": float(s["step_ns"].mean() / 1e6) if s["step_ns"].size else float("nan"),
        "busy_fraction": float(s["step_ns"].sum() / (high - low) / records.replicas),
        "preemptions": float(requests["preemptions"].sum()),
        "goodput_rps": _goodput(slo, ttft, tpot, several, seconds),
    }
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)):
        result |= _spread(name, values)
    result |= _spread_weighted("itl", s["step_ns"] / 1e6, s["requests"])
    return result


def _run_of(inside: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_] | slice:
    """The same choice as a slice, which copies nothing, where it is one run, as a window of one replica's steps is."""
    first, count = int(inside.argmax()) if inside.size else 0, int(np.count_nonzero(inside))
    return slice(first, first + count) if inside[first : first + count].all() else inside


def _ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else float("nan")


def _weighted_mean(values: npt.NDArray[np.int64], weights: npt.NDArray[np.int64]) -> float:
    return float(np.average(values, weights=weights)) if values.size and weights.sum() else float("nan")


def _spread(name: str, values: FloatArray) -> dict[str, float]:
    if not values.size:
        return {f"{name}_{stat}_ms": float("nan") for stat in ("mean", *(f"p{p}" for p in _PERCENTILES))}
    cuts = np.percentile(values, _PERCENTILES)
    return {f"{name}_mean_ms": float(values.mean())} | {
        f"{name}_p{p}_ms": float(v) for p, v in zip(_PERCENTILES, cuts, strict=True)
    }


def _spread_weighted(name: str, values: FloatArray, weights: npt.NDArray[np.int64]) -> dict[str, float]:
    """Percentiles of values that stand for `weights` equal ones each (inverse of the empirical distribution)."""
    total = int(weights.sum())
    if not total:
        return _spread(name, np.empty(0))
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    result = {f"{name}_mean_ms": float(np.average(values, weights=weights))}
    for p in _PERCENTILES:
        result[f"{name}_p{p}_ms"] = float(values[order][np.searchsorted(reached, p / 100 * total)])
    return result


def _goodput(
    slo: Slo | None, ttft: FloatArray, tpot: FloatArray, several: npt.NDArray[np.bool_], seconds: float
) -> float:
    if slo is None or (slo.ttft_ms is None and slo.tpot_ms is None):
        return float("nan")
    good = np.ones(ttft.size, dtype=bool)
    if slo.ttft_ms is not None:
        good &= ttft <= slo.ttft_ms
    if slo.tpot_ms is not None:
        meets = np.ones(ttft.size, dtype=bool)
        meets[several] = tpot <= slo.tpot_ms
        good &= meets
    return float(np.count_nonzero(good)) / seconds


def windows(records: Records, width_s: float) -> dict[str, FloatArray]:
    """Telemetry windows of equal width over the measuring window (the dots of the paper's Figs. 7 and 8).

    Parameters
    ----------
    width_s
        Width, seconds.

    Returns
    -------
    dict
        ``time_s``, ``throughput_tok_s_gpu``, ``tps_per_user`` (decode tokens a request-second in decode),
        ``concurrency`` (mean requests in decode, all replicas), ``verification_budget``; windows without a
        decode step are left out.
    """
    if not width_s > 0:
        raise InputError(field="window_s", value=width_s, expected="a number > 0")
    steps = records.steps
    low, high = records.window_ns
    width = round(width_s * 1e9)
    count = (high - low) // width
    index = (steps["end_ns"] - 1 - low) // width
    inside = (steps["end_ns"] > low) & (index < count)
    s = {name: column[inside] for name, column in steps.items()}
    which = index[inside]

    def total(values: npt.NDArray[np.int64]) -> FloatArray:
        return np.asarray(np.bincount(which, weights=values, minlength=int(count)), dtype=np.float64)

    decode_ns = total(s["requests"] * s["step_ns"])
    requests = total(s["requests"])
    keep = requests > 0
    if records.colocated:
        tokens = total(s["committed"] + s["first_tokens"])
    else:
        first_ns = records.requests["first_ns"]
        first_ns = first_ns[(first_ns > low) & (first_ns <= low + count * width)]
        tokens = total(s["committed"]) + np.bincount((first_ns - 1 - low) // width, minlength=int(count))
    with np.errstate(invalid="ignore", divide="ignore"):
        result = {
            "time_s": (low + np.arange(int(count)) * width) / 1e9,
            "throughput_tok_s_gpu": tokens / width_s / records.gpus,
            "tps_per_user": total(s["committed"]) / (decode_ns / 1e9),
            "concurrency": decode_ns / width,
            "verification_budget": 1 + total(s["drafts"]) / requests,
        }
    return {name: values[keep] for name, values in result.items()}
