"""One run of a scenario: its inputs, and `simulate`."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dsim.compiled import why_not
from dsim.cost import StepCost, fit
from dsim.drafts import (
    Bank,
    BankDrafts,
    DomainTilt,
    DraftSource,
    OnlineCalibration,
    OnlineSts,
    Tilt,
    load_bank,
    preset_spec,
    published_curve,
    read_curve,
    read_temperatures,
    recalibrated,
    synthetic_bank,
    tilt,
)
from dsim.drafts.quality import parse_quality
from dsim.errors import InputError
from dsim.metrics import Slo, summarize
from dsim.options import HostCost, ReplicaConfig
from dsim.policy import Policy, load_policy
from dsim.prices import DraftCost
from dsim.probe import StepProbe, watched
from dsim.profile import load_profile
from dsim.schema import (
    MIN_WARMUP,
    SHAPE,
    SHIPPED_BANKS,
    ArmSection,
    ClusterSection,
    DrafterSection,
    DraftsSection,
    LiveSection,
    Scenario,
    SyntheticSection,
    WorkloadSection,
    load_scenario,
)
from dsim.serve import serve
from dsim.telemetry import Records
from dsim.tracecache import open_trace
from dsim.workload import ClosedLoop, OpenLoop, RequestStream
from traces import (
    Empirical,
    Fixed,
    Gamma,
    Independent,
    Lognormal,
    OnOff,
    Poisson,
    Trace,
    WindowError,
    synthetic_trace,
)

__all__ = [
    "Point",
    "Result",
    "Scenario",
    "check_scenario",
    "cost_of",
    "load_scenario",
    "simulate",
    "trace_of",
]

#: Default of a key that belongs to steady measurements only.
DEFAULT_EDGE_FRACTION = 0.1


# -- inputs ----------------------------------------------------------------------------------------------


def _stamp(*names: object) -> tuple[object, ...]:
    """What tells whether files have changed since they were opened; None for what is no file."""
    paths = [Path(name) if isinstance(name, str) else None for name in names]
    found = [None if path is None or not path.is_file() else path.stat() for path in paths]
    return tuple(None if now is None else (now.st_ino, now.st_size, now.st_mtime_ns) for now in found)


@lru_cache(maxsize=16)
def _trace(workload: WorkloadSection, _files: tuple[object, ...]) -> Trace:
    try:
        if workload.synthetic is None:
            return _read(workload, workload.window_s)
        s = workload.synthetic
        trace = synthetic_trace(s.requests, arrivals=_arrivals(s), lengths=_lengths(s, workload), seed=s.seed)
        return trace if workload.window_s is None else trace.window(*workload.window_s)
    except WindowError as error:
        raise InputError(
            error.message,
            file=error.file,
            field="workload.window_s",
            value=list(workload.window_s or ()),
            expected=error.expected,
        ) from None


def _arrivals(s: SyntheticSection) -> Poisson | Gamma | OnOff:
    if s.cv is not None:
        return Gamma(s.rate, s.cv)
    if s.on_s is not None and s.off_s is not None:
        return OnOff(s.rate, s.on_s, s.off_s)
    return Poisson(s.rate)


def _read(workload: WorkloadSection, window: tuple[float, float] | None = None) -> Trace:
    assert workload.trace is not None
    return open_trace(workload.trace, window=window, sort=workload.sort, drop_zero=workload.drop_zero)


def _lengths(s: SyntheticSection, workload: WorkloadSection) -> Independent | Empirical:
    if s.lengths == "empirical":
        return Empirical(_read(workload))
    assert s.prompt_mean is not None
    assert s.output_mean is not None
    if s.sigma is not None:
        return Independent(Lognormal(s.prompt_mean, sigma=s.sigma), Lognormal(s.output_mean, sigma=s.sigma))
    return Independent(Fixed(round(s.prompt_mean)), Fixed(round(s.output_mean)))


def trace_of(scenario: Scenario) -> Trace:
    """The scenario's trace, window applied."""
    return _trace(scenario.workload, _stamp(scenario.workload.trace))


#: Preset of scenarios that name none.
DEFAULT_PRESET = "dsv4"


@lru_cache(maxsize=16)
def _bank(drafter: str, bank: str | None, section: DraftsSection, _files: tuple[object, ...]) -> Bank:
    if bank is not None:
        return load_bank(bank)
    if section.source != "synthetic":
        return load_bank(SHIPPED_BANKS[drafter])
    shape = {name: float(getattr(section, name)) for name in SHAPE[2:] if getattr(section, name) is not None}
    preset = section.preset or DEFAULT_PRESET
    return synthetic_bank(preset_spec(preset, drafter, auc=section.auc, ece=section.ece, **shape))


@lru_cache(maxsize=16)
def _calibrated(bank: Bank, drafter: str, calibration: str, _files: tuple[object, ...]) -> Bank:
    plain = (1.0,) * bank.header.gamma
    chosen = plain if calibration == "none" else read_temperatures(calibration, bank.header.gamma)
    if chosen == bank.header.temperatures:
        raise InputError(
            "changes nothing: the bank has these temperatures already",
            field=f"drafters.{drafter}.calibration",
            value=calibration,
            expected="'bank'",
        )
    return recalibrated(bank, chosen)


def bank_of(scenario: Scenario, drafter: str) -> Bank:
    """The bank of one of the scenario's drafters, with the temperatures that the scenario wants."""
    # What does not shape a bank is left out: it could not be hashed, and would only split the cache.
    section = scenario.drafts.model_copy(update={"domains": None, "tilt": None, "gamma": 0})
    wanted = scenario.drafters[drafter]
    bank = _bank(wanted.like or drafter, wanted.bank, section, _stamp(wanted.bank))
    if wanted.calibration in ("bank", "online"):
        return bank
    return _calibrated(bank, drafter, wanted.calibration, _stamp(wanted.calibration))


@lru_cache(maxsize=16)
def _level(
    bank: Bank,
    drafter: str,
    preset: str,
    to: str | tuple[tuple[str, tuple[float, ...]], ...] | None,
    _files: tuple[object, ...],
) -> DomainTilt:
    if isinstance(to, tuple):
        return tilt(bank, to=dict(to), name="scenario")
    if to is not None and to.endswith(".json"):
        return tilt(bank, to=read_curve(to), name=Path(to).name)
    curve = published_curve(to or preset, drafter)
    # A published curve may know more domains than the bank.
    known = {domain: values for domain, values in curve.items() if domain in bank.header.domains}
    return tilt(bank, to=known or curve, name=to or preset)


def level_of(scenario: Scenario, drafter: str, bank: Bank) -> DomainTilt | None:
    """The tilt that gives a drafter's bank its published level; None where drafts are not tilted."""
    if scenario.drafts.source != "tilted":
        return None
    wanted = scenario.drafters[drafter]
    to = wanted.tilt_to
    key = tuple(sorted(to.items())) if isinstance(to, dict) else to
    return _level(bank, wanted.like or drafter, scenario.drafts.preset or DEFAULT_PRESET, key, _stamp(key))


def cost_of(scenario: Scenario) -> StepCost:
    """The scenario's cost model, fitted."""
    section = scenario.cost
    options: dict[str, Any] = {} if section.running_max is None else {"running_max": section.running_max}
    return fit(load_profile(section.profile), section.fit, allow_extrapolation=section.allow_extrapolation, **options)


# -- one run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """Which run of a scenario: an arm, a load and a seed.

    Parameters
    ----------
    users
        Closed loop with that many users; None: open loop.
    rate_scale
        Open loop at that multiple of the trace's own rate; None: closed loop.
    """

    arm: str
    seed: int
    users: int | None = None
    rate_scale: float | None = None

    def __post_init__(self) -> None:
        # NumPy's numbers become Python's own: the same point is the same, in tables and in what is kept of it.
        for name, kind, expected in (
            ("seed", operator.index, "an integer"),
            ("users", operator.index, "an integer"),
            ("rate_scale", float, "a number"),
        ):
            value = getattr(self, name)
            if value is None and name != "seed":
                continue
            try:
                object.__setattr__(self, name, kind(value))
            except (TypeError, ValueError):
                raise InputError(field=name, value=value, expected=expected) from None


@dataclass(frozen=True)
class Result:
    """One run: the records, the row that goes into tables, and the width of telemetry windows (seconds)."""

    records: Records
    row: dict[str, Any]
    window_s: float


@dataclass(frozen=True)
class _Seeds:
    order: int
    domain: int
    trajectory: int
    router: int


def _spawn(seed: int) -> _Seeds:
    """Separate streams for order and offset, domain, trajectory and luck, router."""
    words = np.random.SeedSequence(seed).generate_state(4, dtype=np.uint64)
    return _Seeds(*(int(word) for word in words))


def check_scenario(scenario: Scenario, arms: Sequence[str] | None = None) -> None:
    """Open every input and build every policy once, so that errors come before the work."""
    cost, trace = cost_of(scenario), trace_of(scenario)
    longest = int(trace.prompt_tokens.max())
    bounded = scenario.cluster.prefill == "disaggregated" and not scenario.cost.allow_extrapolation
    if bounded and longest > cost.max_prefill_tokens:
        raise InputError(
            f"the trace has a prompt of {longest} tokens, and {cost.label} prices prompts up to "
            f"{cost.max_prefill_tokens}",
            field="cost.allow_extrapolation",
            value=False,
            expected="true, another profile, or a trace with shorter prompts",
        )
    domains: dict[tuple[str, ...], str] = {}
    for arm in scenario.arms:
        if arms is not None and arm.name not in arms:
            continue
        _policy(scenario, arm)
        drafts = _drafts(scenario, arm, 0)
        if drafts is not None:
            domains.setdefault(tuple(sorted(_domain_weights(scenario, drafts))), arm.name)
    if len(domains) > 1:
        (one, first), (two, second) = list(domains.items())[:2]
        raise InputError(
            f"arms '{first}' and '{second}' draft for other domains ({', '.join(one)} against {', '.join(two)}), "
            "so they would not meet the same requests",
            field="drafts.domains",
            expected="weights of domains that both have",
        )


def compiles(scenario: Scenario, arm: str) -> bool:
    """Whether runs of an arm can be compiled, so far as its policy decides that. Its kernel is compiled by the way."""
    return scenario.drafts.source != "live" and why_not(_policy(scenario, scenario.arm(arm)), None) is None


def _policy(scenario: Scenario, arm: ArmSection) -> Policy:
    policy = load_policy(arm.policy)
    gamma, needed = scenario.gamma(arm), policy.traits.needs_gamma
    if 0 < gamma < needed:
        raise InputError(
            f"arm '{arm.name}': policy '{arm.policy}' needs blocks of at least {needed}",
            field="gamma",
            value=gamma,
            expected=f">= {needed}, or 0 for no drafts",
        )
    return policy


def _drafts(scenario: Scenario, arm: ArmSection, seed: int, requests: int = 1) -> DraftSource | None:
    """The arm's draft source; `requests`: most that can be in decode at once."""
    gamma = scenario.gamma(arm)
    if gamma == 0:
        return None
    wanted = scenario.drafters[arm.drafter]
    calibration = wanted.calibration
    if scenario.drafts.source == "live":
        live = _live(scenario, arm, gamma, seed, requests)
        return OnlineCalibration(live, OnlineSts((1.0,) * gamma)) if calibration == "online" else live
    bank, quality = bank_of(scenario, arm.drafter), parse_quality(wanted.confidence)
    try:
        drafts = BankDrafts(bank, gamma=gamma, seed=seed, tilt=tilt_of(scenario, arm.drafter, bank), quality=quality)
    except InputError as error:
        if error.field is None or not error.field.startswith("confidence"):
            raise
        field = f"drafters.{arm.drafter}.{error.field}"
        raise InputError(error.message, field=field, value=error.value, expected=error.expected) from None
    if calibration == "online":
        # The map is learned anew in every run.
        return OnlineCalibration(drafts, OnlineSts((1.0,) * gamma))
    if calibration != "bank":
        drafts.label += ":uncalibrated" if calibration == "none" else ":recalibrated"
    return drafts


def tilt_of(scenario: Scenario, drafter: str, bank: Bank) -> Tilt | DomainTilt | None:
    """All that is done to the level of one of the scenario's drafters: its curve, and `drafts.tilt` on top."""
    section, level = scenario.drafts.tilt, level_of(scenario, drafter, bank)
    shift = None if section is None else Tilt(section.alpha, section.confidence)
    if level is not None and shift is not None:
        return replace(level, then=shift)
    return level or shift


def _live(scenario: Scenario, arm: ArmSection, gamma: int, seed: int, requests: int) -> DraftSource:
    """Drafter and target themselves. The simulator runs without their libraries: they are imported here, if at all."""
    models, drafter = scenario.drafts.live or LiveSection(), scenario.drafters[arm.drafter]
    own = drafter.like or arm.drafter
    shipped = None if models.target == "tiny" else SHIPPED_BANKS.get(own)
    try:
        drafts: DraftSource = importlib.import_module("dsim.drafter.sources").open_live(
            target=models.target,
            device=models.device,
            drafter=own,
            weights=drafter.weights or shipped,
            gamma=gamma,
            seed=seed,
            temperature=models.temperature,
            calibration="bank" if drafter.calibration == "online" else drafter.calibration,
            max_rows=requests,
        )
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "dsim"):
            raise
        raise InputError(
            f"live drafting needs '{name}', which is not installed: pip install 'dspark-sim[drafter]'",
            field="drafts.source",
            value="live",
        ) from error
    return drafts


def _domain_weights(scenario: Scenario, drafts: DraftSource | None) -> dict[str, float]:
    """Weights by domain; without a drafter the domains make no difference."""
    wanted = scenario.drafts.domains
    if drafts is None:
        return dict(wanted) if wanted else {"any": 1.0}
    if wanted is None:
        return dict.fromkeys(drafts.domains, 1.0)
    for name in wanted:
        if name not in drafts.domains:
            raise InputError(
                "the draft source has no such domain",
                field=f"drafts.domains.{name}",
                value=wanted[name],
                expected=f"one of {', '.join(drafts.domains)}",
            )
    return dict(wanted)


def _replica_config(section: ClusterSection) -> ReplicaConfig:
    return ReplicaConfig(
        max_seqs=section.max_seqs,
        token_budget=section.token_budget,
        prefill_chunk=section.prefill_chunk or section.token_budget,
        colocated=section.prefill == "colocated",
        block_tokens=section.block_tokens,
        kv_blocks=section.kv_blocks,
        overlapped=section.scheduling == "overlapped",
        host=HostCost(**section.host.model_dump(exclude_none=True)),
        clip_to_remaining=section.clip_to_remaining,
        admit_ahead=section.admit_ahead,
    )


def _default_stagger_s(trace: Trace, cost: StepCost) -> float:
    """About the time of one request alone at four tokens a step.

    Long enough to part the users, short enough that all have started when the first is through its warm-up.
    """
    context = float(cost.contexts[0]) if cost.depends_on_context else None
    return float(trace.output_tokens.mean()) * float(cost.verify_table(1, 1, context)[1]) / 4e3


def _load(scenario: Scenario, point: Point, trace: Trace, cost: StepCost) -> ClosedLoop | OpenLoop:
    load, rows = scenario.load, len(trace)
    steady = scenario.measure.mode == "steady"
    if (point.users is None) == (point.rate_scale is None):
        raise InputError(field="point", value=point, expected="either users or a rate scale")
    if point.users is not None:
        stagger = 0.0
        if steady:
            stagger = _default_stagger_s(trace, cost) if load.stagger_s is None else load.stagger_s
        return ClosedLoop(
            users=point.users,
            think_s=load.think_s,
            stagger_s=stagger,
            warmup_per_user=load.warmup_per_user or MIN_WARMUP,
            scored=scenario.scored(point.users),
            steady=steady,
        )
    requests = rows if load.requests == "all" else load.requests
    if requests > rows:
        raise InputError(field="load.requests", value=requests, expected=f'at most the trace\'s {rows} rows, or "all"')
    fraction = DEFAULT_EDGE_FRACTION if load.edge_fraction is None else load.edge_fraction
    edge = int(fraction * requests) if steady else 0
    return OpenLoop(requests=requests, warmup=edge, cooldown=edge)


def _draft_note(drafter: DrafterSection, gamma: int, *, included: bool) -> str:
    """What a draft costs and where that comes from, unless it is the measured drafter itself."""
    if included:
        # The profile's steps hold its own drafter: nothing else can be priced, and no speculation is overpriced.
        if gamma and (drafter.cost_scale != 1.0 or (drafter.passes == "token" and gamma > 1)):
            raise InputError(
                "the profile's steps include its own drafter's pass; another drafter has no price there",
                field="drafters.cost_scale",
                value=drafter.cost_scale,
                expected="1.0 and passes = 'block', or a profile with draft samples",
            )
        return ";draft=included"
    if not gamma:
        return ""
    measured = drafter.passes == "block" and drafter.cost_scale == 1.0
    note = drafter.cost_note or ("measured" if measured else "assumed")
    if measured and note == "measured":
        return ""
    return f";draft={gamma if drafter.passes == 'token' else 1}x{drafter.cost_scale:.3g}:{note}"


def _trace_source(workload: WorkloadSection, trace: Trace) -> str:
    """Kind and name of the trace, and what was done to it."""
    done = [
        text
        for text, applies in (
            ("lengths-of-" + (workload.trace or "").rpartition("/")[2], workload.trace and workload.synthetic),
            ("window", workload.window_s is not None),
            ("sorted", workload.sort),
            ("zeros-dropped", workload.drop_zero),
        )
        if applies
    ]
    return ":".join([trace.kind, trace.name, *done])


def simulate(
    scenario: Scenario,
    point: Point,
    *,
    cost: StepCost | None = None,
    probe: StepProbe | None = None,
    engine: str = "auto",
) -> Result:
    """Run one arm at one load with one seed.

    Parameters
    ----------
    scenario, point
        What to run.
    cost
        The scenario's cost model if it is already fitted.
    probe
        Sees every decision of the policy; its columns go into the row. It changes nothing.
    engine
        See `dsim.serve.serve`. It changes nothing but the time that the run takes.

    Returns
    -------
    Result
        Byte-identical for equal arguments on one machine and environment.
    """
    arm = scenario.arm(point.arm)
    seeds = _spawn(point.seed)
    cost = cost_of(scenario) if cost is None else cost
    room = scenario.cluster.replicas * scenario.cluster.max_seqs
    drafts = _drafts(scenario, arm, seeds.trajectory, min(room, point.users or room))
    policy = _policy(scenario, arm)
    if probe is not None and drafts is not None:
        drafts, policy = watched(drafts, policy, probe)
    trace = trace_of(scenario)
    open_loop = point.rate_scale is not None
    if point.rate_scale is not None:
        trace = trace.scaled(point.rate_scale)
    stream = RequestStream(
        trace,
        _domain_weights(scenario, drafts),
        order_seed=seeds.order,
        domain_seed=seeds.domain,
        order="trace" if open_loop else scenario.workload.order,
        offset=open_loop and scenario.workload.order == "shuffled",
    )
    drafter = scenario.drafters.get(arm.drafter, DrafterSection())
    records = serve(
        engine,
        replicas=scenario.cluster.replicas,
        config=_replica_config(scenario.cluster),
        cost=cost,
        drafts=drafts,
        draft_cost=DraftCost(scale=drafter.cost_scale, per_token=drafter.passes == "token"),
        policy=policy,
        stream=stream,
        load=_load(scenario, point, trace, cost),
        router=scenario.cluster.router or "round-robin",
        router_seed=seeds.router,
        slo_tpot_ms=float("nan") if scenario.slo.tpot_ms is None else scenario.slo.tpot_ms,
    )
    low, high = records.window_ns
    if not np.any((records.steps["end_ns"] > low) & (records.steps["end_ns"] <= high)):
        raise InputError(
            f"arm '{arm.name}' at {point.users or point.rate_scale}: no step lies in the measuring window of "
            f"{(high - low) / 1e9:g} s",
            field="load",
            expected="a lower rate, more requests, or outputs of two tokens and more",
        )
    slo = Slo(scenario.slo.ttft_ms, scenario.slo.tpot_ms)
    gamma = 0 if drafts is None else drafts.gamma
    cost_source = cost.label + _draft_note(drafter, gamma, included=getattr(cost, "draft_included", False))
    identity: dict[str, Any] = {
        "arm": arm.name,
        "policy": arm.policy,
        "drafter": arm.drafter if drafts is not None else "none",
        "gamma": scenario.gamma(arm),
        "concurrency": point.users,
        "rate_scale": point.rate_scale,
        "seed": point.seed,
    }
    sources = {
        "cost_source": cost_source,
        "drafts_source": "none" if drafts is None else drafts.label,
        "trace_source": _trace_source(scenario.workload, trace),
        "paired": drafts is None or drafts.paired,
        "extrapolated": records.extrapolated,
    }
    seen = {} if probe is None else probe.columns(records)
    return Result(records, identity | summarize(records, slo) | seen | sources, scenario.load.window_s)
