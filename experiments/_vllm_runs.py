"""Four measured vLLM runs without speculation, their replay, and the fit of a step's law to the first half of each.

The step's law is `dsim.cost.work`: bytes and operations counted from the model's sizes, and four constants of the
machine (five where two GPUs talk). The constants are those with which the replay of the whole arrival history gives the
first half of the requests their measured TTFT and TPOT. Of the other half only arrivals and lengths go in.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from dsim.cluster import run_cluster
from dsim.cost.work import Machine, StepWork, WorkCost, decoder_work
from dsim.errors import InputError
from dsim.gpu_profile.shapes import DecoderShape
from dsim.options import ReplicaConfig
from dsim.policy import load_policy
from dsim.prices import DraftCost
from dsim.telemetry import Records
from dsim.workload import OpenLoop, RequestStream
from traces import Trace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: A TTFT error counts in units of the measured TTFT and this (seconds): a short one is not worth more than it.
_TTFT_FLOOR_S = 0.25
#: Residuals beyond this count less and less (soft L1). A cold first step is far beyond it, and so are requests at the
#: edge of a full KV cache, who are admitted or not by a hair.
_ROBUST_SCALE = 0.05
#: The fit walks on for so many replays that are no better than the best one; its shortest step from that, as a share.
_PATIENCE, _SHORTEST = 3, 0.2
#: How the fit holds on to its start (see `fit`); so much of the start is added, so that a constant may become 0.
_PULL, _NEAR_ZERO = 0.1, 0.05
#: KV blocks where the run's own number is not known and was not reached.
_ENOUGH_BLOCKS = 1 << 20
#: Longest context that a run may have, tokens.
_LONGEST = 1 << 17


# -- what was measured -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """One measured run.

    Parameters
    ----------
    name, title
        Short, and in words.
    work
        What its model's step does on each GPU.
    memory_gb_s
        Memory bandwidth that the source states for the GPU.
    max_seqs, token_budget, block_tokens
        vLLM's max_num_seqs, max_num_batched_tokens and block_size, for each data-parallel rank.
    kv_blocks
        num_gpu_blocks; None where it is not known and the cache was never full.
    arrival_s, first_s, last_s
        float64[N]: arrival, first and last token of each request, seconds from the first arrival.
    prompt, output
        int64[N]: tokens.
    series
        Second by second: second, prompt_tokens, output_tokens, running, waiting. Drawn only.
    """

    name: str
    title: str
    work: StepWork
    memory_gb_s: float
    max_seqs: int
    token_budget: int
    block_tokens: int
    kv_blocks: int | None
    arrival_s: FloatArray
    first_s: FloatArray
    last_s: FloatArray
    prompt: IntArray
    output: IntArray
    series: pd.DataFrame

    @property
    def half(self) -> int:
        """Requests that are fitted; those from this number on are predicted."""
        return self.arrival_s.size // 2


_REQUEST_COLUMNS = ("request", "arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "last_token_s")
_SERIES_COLUMNS = ("second", "prompt_tokens", "output_tokens", "running", "waiting")


def load_runs() -> tuple[Run, ...]:
    """The four shipped runs, in the order of runs.toml."""
    folder = files("dsim") / "data" / "validation" / "vllm_runs"
    described = tomllib.loads((folder / "runs.toml").read_text(encoding="utf-8"))
    runs = []
    for one in described["runs"]:
        table, series = (
            _columns((folder / f"{one['name']}{end}.csv").read_text(encoding="utf-8"), f"{one['name']}{end}.csv", names)
            for end, names in (("", _REQUEST_COLUMNS), ("-series", _SERIES_COLUMNS))
        )
        shape = DecoderShape(one["shape"], **described["shapes"][one["shape"]])
        runs.append(
            Run(
                name=one["name"],
                title=one["title"],
                work=decoder_work(shape, tensor_parallel=one["tensor_parallel"], data_parallel=one["data_parallel"]),
                memory_gb_s=one["memory_gb_s"],
                max_seqs=one["max_num_seqs"],
                token_budget=one["max_num_batched_tokens"],
                block_tokens=one["block_size"],
                kv_blocks=one.get("num_gpu_blocks"),
                arrival_s=table["arrival_s"],
                first_s=table["first_token_s"],
                last_s=table["last_token_s"],
                prompt=table["prompt_tokens"].astype(np.int64),
                output=table["output_tokens"].astype(np.int64),
                series=pd.DataFrame(series),
            )
        )
    return tuple(runs)


def _columns(text: str, file: str, names: Sequence[str]) -> dict[str, FloatArray]:
    rows = list(csv.reader(io.StringIO(text)))
    if not rows or tuple(rows[0]) != tuple(names):
        raise InputError(file=file, line=1, field="columns", value=rows[:1], expected=", ".join(names))
    for line, row in enumerate(rows[1:], start=2):
        for name, cell in zip(names, row, strict=False):
            try:
                fine = np.isfinite(float(cell)) and float(cell) >= 0
            except ValueError:
                fine = False
            if not fine or len(row) != len(names):
                raise InputError(file=file, line=line, field=name, value=cell, expected="a finite number >= 0")
    return {name: np.array([float(row[i]) for row in rows[1:]]) for i, name in enumerate(names)}


# -- the replay ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """The model, or the model without one mechanism.

    Parameters
    ----------
    name, without
        For tables; the mechanism, in words.
    applies
        Whether the run has the mechanism.
    work
        What the step does instead.
    engine
        Options of the engine instead.
    fixed
        Constants that are not fitted, by their name in `Machine`.
    """

    name: str
    without: str
    applies: Callable[[Run], bool] = lambda run: True
    work: Callable[[StepWork], StepWork] = lambda work: work
    engine: Mapping[str, Any] | None = None
    fixed: Mapping[str, float] | None = None


FULL = Variant("full", "nothing")
ABLATIONS = (
    Variant("admit-at-once", "admission a step ahead", engine={"admit_ahead": False}),
    Variant("no-cache-reads", "reading the KV cache", work=lambda work: replace(work, kv_bytes=0.0)),
    Variant(
        "no-compute",
        "the compute bound (tokens cost nothing but the link)",
        work=lambda work: replace(work, token_flop=0.0, expert_flop=0.0),
        fixed={"compute_tflop_s": 1.0},
    ),
    Variant("no-overhead", "the fixed overhead of a step", fixed={"overhead_ms": 0.0}),
    Variant("no-request-cost", "the cost of a request in decode", fixed={"request_ms": 0.0}),
    Variant(
        "no-link",
        "the link between the GPUs",
        applies=lambda run: run.work.gpus > 1,
        work=lambda work: replace(work, link_bytes=0.0),
        fixed={"link_gb_s": 1.0},
    ),
    Variant(
        "all-experts",
        "idle experts (every step reads all of them)",
        applies=lambda run: run.work.experts > 0,
        work=lambda work: replace(work, experts_per_token=work.experts),
    ),
    Variant("whole-prompts", "the token budget of a step", engine={"token_budget": 1 << 16, "prefill_chunk": 1 << 16}),
    Variant(
        "no-kv-limit",
        "the end of the KV cache",
        applies=lambda run: run.kv_blocks is not None,
        engine={"kv_blocks": _ENOUGH_BLOCKS},
    ),
)


def engine_of(run: Run, variant: Variant = FULL) -> ReplicaConfig:
    """vLLM's scheduler as the run had it. Data-parallel ranks step together: one engine with all their slots."""
    ranks = run.work.ranks
    budget = run.token_budget * ranks
    options: dict[str, Any] = {
        "max_seqs": run.max_seqs * ranks,
        "token_budget": budget,
        "prefill_chunk": budget,
        "colocated": True,
        "block_tokens": run.block_tokens,
        # Block 0 stands for "no block" in vLLM and is never given out.
        "kv_blocks": _ENOUGH_BLOCKS if run.kv_blocks is None else run.kv_blocks - 1,
        "admit_ahead": True,
    }
    return ReplicaConfig(**(options | dict(variant.engine or {})))


def replay(run: Run, cost: WorkCost, variant: Variant = FULL, *, only_half: bool = False) -> Records:
    """The whole arrival history; `only_half`: until the fitted requests have ended."""
    trace = Trace(run.name, "recorded", "see PROVENANCE.md", run.arrival_s, run.prompt, run.output)
    return run_cluster(
        replicas=1,
        config=engine_of(run, variant),
        cost=cost,
        drafts=None,
        draft_cost=DraftCost(),
        policy=load_policy("none"),
        stream=RequestStream(trace, {"any": 1.0}, order_seed=0, domain_seed=0, order="trace"),
        load=OpenLoop(requests=len(trace), cooldown=len(trace) - run.half if only_half else 0),
    )


def cost_of(run: Run, machine: Machine, variant: Variant = FULL) -> WorkCost:
    """The step's law of a run with these constants, wherever the engine may go."""
    engine = engine_of(run, variant)
    return WorkCost(
        label=f"fitted:{run.name}:work",
        work=variant.work(run.work),
        machine=machine,
        max_tokens=max(engine.token_budget, engine.max_seqs),
        max_verify_requests=engine.max_seqs,
        contexts=np.array([0, _LONGEST]),
        allow_extrapolation=True,
    )


def latencies(run: Run, first_s: FloatArray, last_s: FloatArray, rows: slice) -> dict[str, FloatArray]:
    """TTFT, TPOT and E2E of some requests, milliseconds (every output of these runs has several tokens)."""
    first, last = first_s[rows], last_s[rows]
    return {
        "ttft": 1e3 * (first - run.arrival_s[rows]),
        "tpot": 1e3 * (last - first) / (run.output[rows] - 1),
        "e2e": 1e3 * (last - run.arrival_s[rows]),
    }


def times_of(records: Records) -> tuple[FloatArray, FloatArray]:
    return records.requests["first_ns"] / 1e9, records.requests["finish_ns"] / 1e9


# -- the fit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fit:
    """A fit of one run.

    Attributes
    ----------
    machine
        The constants.
    misfit
        Robust cost per residual of the replayed first half.
    replays
        How often the half was replayed.
    cost
        The law, its region cut to what the fitted half went through.
    """

    machine: Machine
    misfit: float
    replays: int
    cost: WorkCost


def bounds_of(run: Run) -> dict[str, tuple[float, float, float]]:
    """Lowest, first and highest value of each constant. No bandwidth is above the one that the source states."""
    bounds = {
        "bandwidth_gb_s": (0.3 * run.memory_gb_s, 0.9 * run.memory_gb_s, run.memory_gb_s),
        "compute_tflop_s": (10.0, 200.0, 2000.0),
        "overhead_ms": (0.0, 3.0, 100.0),
        "request_ms": (0.0, 0.02, 2.0),
    }
    return bounds | ({"link_gb_s": (1.0, 15.0, 100.0)} if run.work.gpus > 1 else {})


def residuals(run: Run, first_s: FloatArray, last_s: FloatArray) -> FloatArray:
    """float64[2 * half]: relative errors of the fitted requests' TPOT and TTFT, from all requests' times."""
    rows = slice(0, run.half)
    measured = latencies(run, run.first_s, run.last_s, rows)
    found = latencies(run, first_s, last_s, rows)
    ttft = (found["ttft"] - measured["ttft"]) / (measured["ttft"] + 1e3 * _TTFT_FLOOR_S)
    return np.concatenate([np.log(found["tpot"] / measured["tpot"]), ttft])


def misfit(errors: FloatArray) -> float:
    """Mean soft-L1 loss of residuals, as a relative error: small ones count as their square."""
    return float(_ROBUST_SCALE * np.sqrt(2 * np.mean(np.sqrt(1 + (errors / _ROBUST_SCALE) ** 2) - 1)))


class Schedule:
    """A replayed schedule, held fast: which steps there were, and which of them each fitted request waited for.

    With the schedule fixed, the times of all tokens are sums of step times, so that constants can be fitted without
    replaying. A request's first token is counted from the last moment before its arrival at which nobody waited: from
    there on a slower step delays it, before that it does not.
    """

    def __init__(self, run: Run, records: Records) -> None:
        steps, requests = records.steps, records.requests
        rows = slice(0, run.half)
        self.run = run
        self.steps = (steps["requests"], steps["batch_tokens"], steps["context_tokens"])
        ends = steps["end_ns"]
        arrival = requests["arrival_ns"][rows]
        self.first = np.searchsorted(ends, requests["first_ns"][rows])
        self.last = np.searchsorted(ends, requests["finish_ns"][rows])
        # Steps that end at or before the arrival, and of those the last one that left nobody waiting; -1: the start.
        free = np.where(steps["queue"] == 0, np.arange(ends.size), -1)
        before = np.searchsorted(ends, arrival, side="right") - 1
        self.anchor = np.where(before >= 0, np.maximum.accumulate(free)[before], -1)
        self.waited_s = (arrival - np.where(self.anchor >= 0, ends[self.anchor], 0)) / 1e9
        idle = np.diff(ends - steps["step_ns"], prepend=0)[1:] - steps["step_ns"][:-1]
        self.gap_s = np.concatenate([[int(ends[0] - steps["step_ns"][0])], idle]) / 1e9

    def residuals(self, cost: WorkCost) -> FloatArray:
        """`residuals` if these steps took as long as `cost` says."""
        run, ends = self.run, np.cumsum(cost.steps_ms(*self.steps) / 1e3 + self.gap_s)
        from_s = np.where(self.anchor >= 0, ends[self.anchor], 0.0) + self.waited_s
        first = run.arrival_s[: run.half] + ends[self.first] - from_s
        return residuals(run, first, first + ends[self.last] - ends[self.first])


def fit(run: Run, variant: Variant = FULL, *, replays: int = 20) -> Fit:
    """Constants with which the replay of the first half's requests is closest to their measured TPOT and TTFT.

    Replay, hold the schedule fast, fit the constants to it by bounded least squares (soft L1), replay with them, and so
    on, until `_PATIENCE` replays in a row are no better than the best; then ever shorter steps from the best one, as
    long as one of them helps. A schedule jumps with the constants, so a search that differentiates the replays
    themselves is lost in its jumps.

    Constants that a run does not tell apart stay near their start: being off by a factor e weighs as much as an error
    of `_PULL` of one request.
    """
    fixed = dict(variant.fixed or {})
    bounds = {name: values for name, values in bounds_of(run).items() if name not in fixed}
    low, start, high = (np.array(column) for column in zip(*bounds.values(), strict=True))
    limits = (low / start, high / start)

    def machine(x: FloatArray) -> Machine:
        return Machine(**dict(zip(bounds, (x * start).tolist(), strict=True)) | fixed)

    def errors(x: FloatArray, schedule: Schedule) -> FloatArray:
        pull = _PULL * np.log((x + _NEAR_ZERO) / (1 + _NEAR_ZERO))
        return np.concatenate([schedule.residuals(cost_of(run, machine(x), variant)), pull])

    def refit(trial: _Trial) -> FloatArray:
        x0, held = np.clip(trial.x, limits[0] + 1e-9, limits[1] - 1e-9), (Schedule(run, trial.records),)
        found = least_squares(errors, x0, bounds=limits, loss="soft_l1", f_scale=_ROBUST_SCALE, args=held)
        return np.asarray(found.x)

    def tried(x: FloatArray) -> _Trial:
        records = replay(run, cost_of(run, machine(x), variant), variant, only_half=True)
        return _Trial(misfit(residuals(run, *times_of(records))), x, records)

    best = last = tried(np.ones(start.size))
    used, worse, step = 1, 0, 0.5
    while used < replays and worse < _PATIENCE:
        last, used = tried(refit(last)), used + 1
        worse = 0 if last.misfit < best.misfit else worse + 1
        best = last if worse == 0 else best
    while used < replays and step >= _SHORTEST:
        trial, used = tried(best.x + step * (refit(best) - best.x)), used + 1
        step = 1.0 if trial.misfit < best.misfit else step / 2
        best = trial if trial.misfit < best.misfit else best
    found = machine(best.x)
    return Fit(found, best.misfit, used, region(run, found, variant, best.records))


@dataclass(frozen=True, eq=False)
class _Trial:
    """Constants in units of the start, and what came of them."""

    misfit: float
    x: FloatArray
    records: Records


def region(run: Run, machine: Machine, variant: Variant, records: Records) -> WorkCost:
    """The law, cut to the steps that the fitted half went through."""
    steps = records.steps
    decoding = steps["requests"] > 0
    mean = steps["context_tokens"][decoding] / steps["requests"][decoding]
    return replace(
        cost_of(run, machine, variant),
        min_tokens=int(steps["batch_tokens"].min()),
        max_tokens=int(steps["batch_tokens"].max()),
        max_verify_requests=int(steps["requests"].max()),
        contexts=np.array([np.floor(mean.min()), np.ceil(mean.max())], dtype=np.int64),
    )
