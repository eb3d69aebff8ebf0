"""The work of `measure_engine.py`, piece by piece: timed passes and a run, in one file each, and what comes of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from dsim.drafter.build import Drafter
from dsim.drafter.engine import PARTS, Engine, EngineOptions, EngineRequest, serve_closed_loop
from dsim.drafter.prompts import Prompt
from dsim.drafter.target import LlamaTarget
from dsim.drafter.timing import EngineBench, Pass, Size, StoppableClock, pass_ms, samples_of
from dsim.drafts import Bank
from dsim.errors import InputError
from dsim.files import replacing
from dsim.policy import load_policy
from dsim.prices import ArmPrices
from dsim.profile import SAMPLE_KINDS, Profile
from dsim.telemetry import REQUEST_COLUMNS, STEP_COLUMNS, Records
from experiments._engine_runs import Measured, Prices, fitted_host, records_from, run_row, table_of, told_prices

#: Passes of each size in the pilot profile, whose medians are its prices; the first one is cold.
PILOT_PASSES = 3
CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "cpu": time.process_time_ns}


@dataclass(frozen=True, eq=False)
class Plan:
    """All that a measurement needs, opened.

    Attributes
    ----------
    measured
        What measurement.json will say.
    target, drafter
        The models.
    prompts, requests
        Of the largest run.
    sizes
        Of a profile.
    bank
        The part of the bank that is about the prompts; None without --bank.
    """

    measured: Measured
    target: LlamaTarget
    drafter: Drafter
    prompts: tuple[Prompt, ...]
    requests: tuple[EngineRequest, ...]
    sizes: tuple[Size, ...]
    bank: Bank | None

    @property
    def options(self) -> EngineOptions:
        """Of an engine for the runs."""
        measured = self.measured
        return EngineOptions(
            max_requests=measured.users[-1],
            max_prompt=max(len(request.prompt) for request in self.requests),
            max_tokens=measured.max_tokens,
            prefill_chunk=measured.prefill_chunk,
            temperature=measured.temperature,
            seed=measured.seed,
        )

    @property
    def clock(self) -> Callable[[], int]:
        """Nanoseconds."""
        return CLOCKS[self.measured.clock]

    def runs(self, number: int) -> list[tuple[str, int]]:
        """Policies and users of a round, in an order of its own."""
        cells = [(arm, users) for users in self.measured.users for arm in self.measured.arms]
        random = np.random.Generator(np.random.Philox(key=[self.measured.seed, number]))
        return [cells[i] for i in random.permutation(len(cells))]

    @property
    def turns(self) -> range:
        """Numbers of the runs of a round."""
        return range(len(self.measured.arms) * len(self.measured.users))

    def passes(self, number: int) -> list[list[Size]]:
        """The passes of a round, run by run, in an order of their own.

        What a batch of some users costs is timed while runs of so many users go on; what no run has, in all of them.
        """
        random = np.random.Generator(np.random.Philox(key=[self.measured.seed + 1, number]))
        runs = self.runs(number)
        turns: list[list[Size]] = [[] for _ in runs]
        for users in (*self.measured.users, None):
            mine = [size for size in self.sizes if self._users_of(size) == users]
            whose = [i for i, (_, own) in enumerate(runs) if users in (None, own)]
            drawn = [mine[i] for _ in range(self.measured.passes) for i in random.permutation(len(mine)).tolist()]
            for place, size in enumerate(drawn):
                turns[whose[place * len(whose) // len(drawn)]].append(size)
        return [[turn[i] for i in random.permutation(len(turn)).tolist()] for turn in turns]

    def _users_of(self, size: Size) -> int | None:
        return size.requests if size.kind != "prefill" and size.requests in self.measured.users else None


# -- pieces ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Timed passes, and the run that came after them (the pilot has none)."""

    passes: tuple[Pass, ...]
    arm: str = ""
    users: int = 0
    records: Records | None = None
    parts: dict[str, np.ndarray] | None = None


def piece_file(parts: Path, number: int, turn: int) -> Path:
    """Where a run of a round is kept."""
    return parts / f"round-{number:02d}-{turn:03d}.npz"


def write_piece(piece: Piece, path: Path) -> None:
    """One ``.npz`` without pickles, written whole or not at all."""
    sizes = [
        (SAMPLE_KINDS.index(one.size.kind), one.size.context, one.size.requests, one.size.tokens, *one.ns)
        for one in piece.passes
    ]
    arrays: dict[str, Any] = {
        "passes": np.array(sizes, dtype=np.int64).reshape(-1, 4 + len(PARTS)),
        "run": np.frombuffer(json.dumps({"arm": piece.arm, "users": piece.users}).encode(), dtype=np.uint8),
    }
    if piece.records is not None and piece.parts is not None:
        arrays["steps"] = table_of(piece.records.steps, STEP_COLUMNS)
        arrays["requests"] = table_of(piece.records.requests, REQUEST_COLUMNS)
        arrays["parts"] = table_of(piece.parts, PARTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("wb") as stream:
        np.savez_compressed(stream, **arrays)


def read_piece(path: Path) -> Piece:
    """The inverse of `write_piece`."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        said = json.loads(arrays["run"].tobytes())
        passes = tuple(
            Pass(Size(SAMPLE_KINDS[kind], context, requests, tokens), tuple(ns))
            for kind, context, requests, tokens, *ns in arrays["passes"].tolist()
        )
        if "steps" not in arrays:
            return Piece(passes, said["arm"], said["users"])
        parts = {name: arrays["parts"][:, i] for i, name in enumerate(PARTS)}
        return Piece(passes, said["arm"], said["users"], records_from(arrays["steps"], arrays["requests"]), parts)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise InputError(f"is no piece of a measurement ({error}); remove it", file=path) from None


# -- measuring -------------------------------------------------------------------------------------------


def measure(plan: Plan, parts: Path) -> None:
    """Do what is missing below `parts`: the pilot, then the runs, each with its passes."""
    measured = plan.measured
    pilot, runs = parts / "pilot.npz", [(number, turn) for number in range(measured.rounds) for turn in plan.turns]
    missing = [place for place in runs if not piece_file(parts, *place).is_file()]
    if not missing and pilot.is_file():
        return
    torch.set_num_threads(measured.threads)
    bench = EngineBench(plan.target, plan.drafter, plan.options, plan.sizes, plan.requests, clock=plan.clock)
    random = np.random.default_rng([measured.seed, 0])
    if pilot.is_file():
        for size in {size.requests: size for size in plan.sizes}.values():
            bench.time(size, random)  # cold in this process: not kept
    else:
        sizes = [plan.sizes[i] for _ in range(PILOT_PASSES) for i in random.permutation(len(plan.sizes)).tolist()]
        shown = tqdm(sizes, desc="pilot profile", unit="pass", mininterval=1.0)
        write_piece(Piece(tuple(bench.time(size, random) for size in shown)), pilot)
    prices = arm_prices(plan, read_piece(pilot).passes)
    with tqdm(total=len(runs), initial=len(runs) - len(missing), unit="run", smoothing=0.1, mininterval=1.0) as bar:
        for number, turn in missing:
            write_piece(run_of(plan, number, turn, prices, bench, bar), piece_file(parts, number, turn))
            bar.update()


def arm_prices(plan: Plan, passes: Sequence[Pass]) -> ArmPrices:
    """What the policies are told: the pilot's prices."""
    return told_prices(passes_table([passes]), host_table([(0, passes)]), plan.measured)


def run_of(plan: Plan, number: int, turn: int, prices: ArmPrices, bench: EngineBench, bar: tqdm[Any]) -> Piece:
    """One closed-loop run, with passes timed between its steps. The policy ``none`` runs without a drafter."""
    measured = plan.measured
    (arm, users), sizes = plan.runs(number)[turn], plan.passes(number)[turn]
    bar.set_description(f"round {number + 1} of {measured.rounds}, {arm}, {users} users")
    clock = StoppableClock(plan.clock)
    engine = Engine(
        plan.target,
        None if arm == "none" else plan.drafter,
        policy=load_policy(arm),
        prices=prices,
        options=replace(plan.options, max_requests=users, seed=measured.seed + (0 if measured.same_texts else number)),
        temperatures=() if arm == "none" else measured.temperatures,
        clock=clock,
    )
    requests = plan.requests[: measured.count(users)]
    random = np.random.default_rng([measured.seed, 1 + number, turn])
    passes: list[Pass] = []
    made, shown = 0, time.monotonic()

    def between(tokens: int, answered: int) -> None:
        """Time the passes that are due: evenly over the answers of the run."""
        nonlocal made, shown
        made += tokens
        with clock.stopped():
            while len(passes) < len(sizes) * (answered + 1) // (len(requests) + 1):
                passes.append(bench.time(sizes[len(passes)], random))
            if time.monotonic() - shown > 1.0:
                shown = time.monotonic()
                bar.set_postfix(tokens=made)

    run = serve_closed_loop(engine, requests, users, progress=between)
    return Piece(tuple(passes), arm, users, run.records, run.parts)


# -- what comes of it ------------------------------------------------------------------------------------


def profile_of(plan: Plan, passes: Sequence[Pass]) -> Profile:
    """The passes as a profile."""
    measured, about = plan.measured, plan.measured.about
    return Profile(
        name=measured.profile,
        hardware=about["processor"],
        gpus=1,
        model=f"{measured.target} with a {measured.drafter.partition(' ')[0]} drafter of {measured.gamma} tokens",
        engine=f"dsim.drafter.engine, float32, torch {about['torch']}, {measured.threads} thread(s)",
        captured_sizes=np.empty(0, dtype=np.int64),
        capture_limit=0,
        source="experiments/measure_engine.py",
        license="figures only (facts, not copyrightable)",
        kind="measured",
        samples=samples_of(passes),
        notes=f"{measured.clock} clock; passes timed between the runs of a measurement, spread over its rounds. "
        "Verify: the target's pass with sampling, at the shortest and the longest text of the runs. Draft: one pass "
        "for the block. Prefill: a prompt alone, whose tokens but the last run no LM head.",
    )


def host_table(rounds: Iterable[tuple[int, Sequence[Pass]]]) -> pd.DataFrame:
    """Host time of the passes with requests in decode: round, requests, ms."""
    rows = [
        {"round": number, "requests": one.size.requests, "ms": one.ms("plan", "rest")}
        for number, passes in rounds
        for one in passes
        if one.size.kind != "prefill"
    ]
    return pd.DataFrame(rows)


def usual_times(runs: Sequence[Sequence[Pass]]) -> tuple[dict[Size, float], list[float]]:
    """What the passes of each size take at the machine's usual speed, and how slow it was in each run (1: as usual).

    A pass's time is its size's times its run's, by least absolute deviations of the logarithms (least squares with
    weights, again and again): so a size that happened to be timed in slow runs is not taken for a slow size. Usual is
    the median over the runs. No pass is left out as cold: others came before.
    """
    found: dict[Size, list[tuple[int, float]]] = {}
    for run, passes in enumerate(runs):
        for one in passes:
            found.setdefault(one.size, []).append((run, pass_ms(one)))
    timed = [(i, *one) for i, all_ in enumerate(found.values()) for one in all_]
    size, run, ms = (np.array(column) for column in zip(*timed, strict=True))
    design = np.hstack([np.eye(len(found))[size], np.eye(len(runs))[run]])
    logs, weights = np.log(np.maximum(ms, 1e-9)), np.ones(ms.size)
    for _ in range(_REWEIGHTED):
        # Of all solutions the shortest: what no pass ties together stays near the rest.
        fitted = np.linalg.lstsq(design * weights[:, None], logs * weights, rcond=None)[0]
        weights = np.maximum(np.abs(logs - design @ fitted), _EXACT) ** -0.5
    slow = fitted[len(found) :]
    usual = np.median(slow[np.unique(run)])
    drift = np.where(np.isin(np.arange(len(runs)), run), np.exp(slow - usual), 1.0)
    return dict(zip(found, np.exp(fitted[: len(found)] + usual).tolist(), strict=True)), drift.tolist()


#: Rounds of reweighting, and the deviation (of a logarithm) below which all weigh the same.
_REWEIGHTED, _EXACT = 20, 0.01


def passes_table(runs: Sequence[Sequence[Pass]]) -> pd.DataFrame:
    """A row a size: how many passes, their median, quartiles and mean, the spread, and `usual_times`."""
    usual, _ = usual_times(runs)
    found: dict[Size, list[float]] = {}
    for one in (one for passes in runs for one in passes):
        found.setdefault(one.size, []).append(pass_ms(one))
    rows = []
    for size in sorted(found, key=lambda size: (SAMPLE_KINDS.index(size.kind), *asdict(size).values())):
        ms = np.array(found[size])
        low, middle, high = np.percentile(ms, (25, 50, 75))
        rows.append(
            asdict(size)
            | {"passes": ms.size, "median_ms": middle, "q1_ms": low, "q3_ms": high, "mean_ms": ms.mean()}
            | {"iqr_share": (high - low) / middle, "usual_ms": usual[size]}
        )
    return pd.DataFrame(rows)


def results(plan: Plan, parts: Path) -> dict[str, Any]:
    """Profile and tables from the pieces of all rounds."""
    measured = plan.measured
    places = [(number, turn) for number in range(measured.rounds) for turn in plan.turns]
    pieces = [read_piece(piece_file(parts, *place)) for place in places]
    timed = [piece.passes for piece in pieces]
    pilot = read_piece(parts / "pilot.npz").passes
    _, drift = usual_times(timed)
    sizes, host = passes_table(timed), host_table((number, own) for (number, _), own in zip(places, timed, strict=True))
    prices = Prices.of(sizes, measured.profile, fitted_host(host), statistic="mean_ms")
    runs, requests = [], []
    for (number, _), piece, slow in zip(places, pieces, drift, strict=True):
        assert piece.records is not None
        assert piece.parts is not None
        who = {"round": number, "arm": piece.arm, "users": piece.users}
        times = {"passes": len(piece.passes), "drift": slow, "time_ratio": time_ratio(prices, piece, measured)}
        runs.append(who | run_row(piece.records, piece.parts) | times)
        requests.append(_request_rows(plan, piece).assign(**who))
    by = ["round", "users", "order"]

    def sorted_by_run(table: pd.DataFrame) -> pd.DataFrame:
        order = table["arm"].map(measured.arms.index)
        return table.assign(order=order).sort_values(by, kind="stable", ignore_index=True).drop(columns="order")

    table = sorted_by_run(pd.DataFrame(runs))
    return {
        "profile": profile_of(plan, [one for own in timed for one in own]),
        "host": host,
        "pilot": passes_table([pilot]),
        "pilot_host": host_table([(0, pilot)]),
        "passes": sizes,
        "runs": table,
        "requests": sorted_by_run(pd.concat(requests, ignore_index=True)),
        "drift": table.groupby("round").agg(
            runs=("drift", "size"), passes=("passes", "sum"), drift=("drift", "median"), fastest=("drift", "min"),
            slowest=("drift", "max"),
        ).reset_index(),
    }  # fmt: skip


def time_ratio(prices: Prices, piece: Piece, measured: Measured) -> float:
    """Measured time of the run's steps over what the profile says that they cost, one by one."""
    assert piece.records is not None
    steps, prompts = piece.records.steps, piece.records.requests["prompt_tokens"]
    share = float(prices.equivalents(prompts, measured.prefill_chunk).sum() / prompts.sum())
    priced = prices.step_ms(steps, share, drafting=piece.arm != "none")
    return float(steps["step_ns"].sum() * 1e-6 / priced.sum())


def _request_rows(plan: Plan, piece: Piece) -> pd.DataFrame:
    assert piece.records is not None
    table = piece.records.requests
    first, last, output = table["first_ns"], table["finish_ns"], table["output_tokens"]
    return pd.DataFrame(
        {
            "request": np.arange(first.size),
            "domain": [plan.prompts[i].domain for i in range(first.size)],
            "prompt_tokens": table["prompt_tokens"],
            "output_tokens": output,
            "ttft_ms": (first - table["arrival_ns"]) * 1e-6,
            "tpot_ms": np.where(output > 1, (last - first) * 1e-6 / np.maximum(output - 1, 1), np.nan),
        }
    )


def repeatability(runs: pd.DataFrame) -> pd.DataFrame:
    """A row a cell: means over the rounds, and half the range of the rounds as a share of the mean.

    ``machine`` is that of the time ratio, the time of the same work; ``machine_after_drift`` that of what is left of it
    after the drift.
    """
    rows = []
    runs = runs.assign(steady_ratio=runs["time_ratio"] / runs["drift"])
    for (arm, users), found in runs.groupby(["arm", "users"], sort=False):
        row: dict[str, Any] = {"arm": arm, "users": users, "rounds": len(found)}
        for name in (
            "throughput_tok_s",
            "tps_per_user",
            "accepted_length",
            "verification_budget",
            "drift",
            "time_ratio",
            "steady_ratio",
        ):
            row[name] = found[name].mean()
            row[f"{name}_half_range"] = (found[name].max() - found[name].min()) / 2 / found[name].mean()
        rows.append(row)
    names = {"time_ratio_half_range": "machine", "steady_ratio_half_range": "machine_after_drift"}
    return pd.DataFrame(rows).rename(columns=names)
