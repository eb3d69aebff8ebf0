"""A scenario as one validated TOML file: hardware, engine, drafters, workload, load and arms.

Unknown keys, values out of range and options that contradict each other are errors that name the file, the line
and the field.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from dsim.drafts.quality import parse_quality
from dsim.drafts.tilt import check_curve
from dsim.errors import InputError
from traces import shipped_traces

Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[^$\x00-\x1f]+$")]  # "$" would start a formula in figures
Finite = Annotated[float, Field(allow_inf_nan=False)]

MIN_WARMUP = 3


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CostSection(_Section):
    """Which profile prices a step, and how it is fitted."""

    profile: str = "b300x4-dsv4-flash-0731"
    fit: Literal["staircase", "additive", "roofline", "roofline-moe"] = "staircase"
    running_max: bool | None = None
    allow_extrapolation: bool = False


class HostSection(_Section):
    """Host time of a step: base_ms + per_request_ms * R ** power, of which a fraction hides behind the GPU."""

    base_ms: NotNegative = 0.0
    per_request_ms: NotNegative = 0.0
    power: Annotated[float, Field(gt=0, le=2)] | None = None
    hidden_fraction: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _no_idle_option(self) -> HostSection:
        if self.power is not None and self.per_request_ms == 0:
            raise ValueError("'power' is not used by per_request_ms = 0")
        if self.hidden_fraction is not None and self.base_ms == 0 and self.per_request_ms == 0:
            raise ValueError("'hidden_fraction' is not used where there is no host time")
        return self


class ClusterSection(_Section):
    """Replicas and their engine options (`dsim.options.ReplicaConfig`)."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    router: Literal["round-robin", "least-tokens", "power-of-two"] | None = None
    max_seqs: Annotated[int, Field(ge=1, le=65536)] = 256
    token_budget: Annotated[int, Field(ge=1, le=1 << 22)] = 8192
    prefill: Literal["disaggregated", "colocated"] = "disaggregated"
    prefill_chunk: PositiveInt | None = None
    block_tokens: PositiveInt = 64
    kv_blocks: PositiveInt = 65536
    scheduling: Literal["overlapped", "synchronous"] = "overlapped"
    clip_to_remaining: bool = False
    admit_ahead: bool = False
    host: HostSection = HostSection()

    @model_validator(mode="after")
    def _no_idle_option(self) -> ClusterSection:
        if self.router is not None and self.replicas == 1:
            raise ValueError("'router' is not used by one replica")
        if self.prefill_chunk is not None and self.prefill == "disaggregated":
            raise ValueError("'prefill_chunk' is not used by prefill = 'disaggregated'")
        if self.admit_ahead and self.prefill == "disaggregated":
            raise ValueError("'admit_ahead' is not used by prefill = 'disaggregated'")
        host = self.host
        silent = host.base_ms == 0 and host.per_request_ms == 0
        if self.scheduling == "synchronous":
            if self.admit_ahead:
                raise ValueError("'admit_ahead' is not used by scheduling = 'synchronous'")
            if silent:
                raise ValueError("scheduling = 'synchronous' changes nothing where there is no host time")
            if host.hidden_fraction is not None:
                raise ValueError("'host.hidden_fraction' is not used by scheduling = 'synchronous'")
        elif not silent and host.hidden_fraction is None:
            raise ValueError("'host.hidden_fraction' is missing for scheduling = 'overlapped' with host time")
        return self


class TiltSection(_Section):
    """Shift of the drafter's quality in logits, one value or one a position."""

    alpha: Annotated[tuple[Finite, ...], Field(min_length=1)] = (0.0,)
    confidence: Annotated[tuple[Finite, ...], Field(min_length=1)] = (0.0,)


Source = Literal["recorded", "tilted", "synthetic", "live"]
SOURCES: tuple[str, ...] = get_args(Source)


class LiveSection(_Section):
    """Models of live drafting (`dsim.drafter.live`). `temperature` of target and drafter (None: the drafter's own)."""

    target: str = "smollm2"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    temperature: Positive | None = None

    @field_validator("target")
    @classmethod
    def _known_target(cls, given: str) -> str:
        if given not in ("smollm2", "tiny") and not re.match(r"hf:.", given):
            raise ValueError(f"got '{given}', expected smollm2, tiny or hf:PATH")
        return given


class DraftsSection(_Section):
    """Where drafts come from. `auc`, `ece`, `spread` ... shape synthetic confidences (None: the preset's).

    `source` says what becomes of a drafter: ``recorded`` replays its bank, ``tilted`` replays it at the level of the
    preset's curves, ``synthetic`` generates one from the preset if the drafter names none, ``live`` runs drafter and
    target themselves.
    """

    source: Source = "tilted"
    preset: str | None = None
    gamma: Annotated[int, Field(ge=0, le=64)] = 5
    domains: dict[str, NotNegative] | None = None
    auc: tuple[Annotated[float, Field(ge=0.5, le=1)], ...] | None = None
    ece: tuple[Annotated[float, Field(ge=0, le=0.5)], ...] | None = None
    spread: Positive | None = None
    request_share: Annotated[float, Field(ge=0, le=1)] | None = None
    text_share: Annotated[float, Field(ge=0, le=1)] | None = None
    autocorrelation: Annotated[float, Field(ge=0, lt=1)] | None = None
    tilt: TiltSection | None = None
    live: LiveSection | None = None

    @model_validator(mode="after")
    def _no_idle_option(self) -> DraftsSection:
        if self.source in ("recorded", "live") and self.preset is not None:
            raise ValueError(f"'preset' is not used by source = '{self.source}'")
        if self.source == "live" and self.tilt is not None:
            raise ValueError("'tilt' is not used by source = 'live'")
        if self.source != "live" and self.live is not None:
            raise ValueError(f"'live' is not used by source = '{self.source}'")
        for name in SHAPE if self.source != "synthetic" else ():
            if getattr(self, name) is not None:
                raise ValueError(f"'{name}' shapes synthetic drafts; it is not used by source = '{self.source}'")
        return self


#: Keys of `DraftsSection` that shape generated drafts.
SHAPE = ("auc", "ece", "spread", "request_share", "text_share", "autocorrelation")


class DrafterSection(_Section):
    """One drafter: its drafts, and what one costs in passes of the profiled drafter.

    `bank` is a shipped name or a path (None: the one in `SHIPPED_BANKS`, or a generated one where drafts are
    synthetic), `tilt_to` its own curve where drafts are tilted (None: the preset's), `weights` the drafter itself where
    drafts are live (None: that of the shipped bank; an untrained one for the tiny target). `like` is the drafter whose
    bank, curve and weights it takes where it names none (None: its own name). `confidence` distorts what policies see
    of it (`dsim.drafts.quality`). `cost_note` says where the cost comes from (None: measured for one whole pass a
    block, assumed otherwise).
    """

    like: str | None = None
    bank: str | None = None
    weights: str | None = None
    tilt_to: str | dict[str, tuple[float, ...]] | None = None
    calibration: str = "bank"
    confidence: str | dict[str, float] = "recorded"
    passes: Literal["block", "token"] = "block"
    cost_scale: Annotated[float, Field(gt=0, le=1e4)] = 1.0
    cost_note: Annotated[str, Field(pattern=r"^[^;,:\s]+$")] | None = None

    @field_validator("tilt_to", mode="before")
    @classmethod
    def _a_curve(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            try:
                return check_curve(given)
            except InputError as error:
                raise ValueError(str(error)) from None
        if given is not None and not isinstance(given, str):
            raise ValueError(f"got {given!r}, expected PRESET, PRESET:DRAFTER, a .json file, or a curve by domain")
        return given

    @field_validator("calibration")
    @classmethod
    def _known_calibration(cls, given: str) -> str:
        if given not in CALIBRATIONS and not given.endswith(".json"):
            raise ValueError(f"got '{given}', expected one of {', '.join(CALIBRATIONS)}, or a .json file")
        return given

    @field_validator("confidence", mode="before")
    @classmethod
    def _a_quality(cls, given: Any) -> Any:
        try:
            quality = parse_quality(given)
        except InputError as error:
            raise ValueError(str(error)) from None
        return dict(quality.bias) if quality is not None and quality.bias else given

    @model_validator(mode="after")
    def _temperatures_that_are_seen(self) -> DrafterSection:
        if self.calibration not in ("bank", "online") and is_replaced(self.confidence):
            raise ValueError(f"'calibration' is not used by confidence = '{self.confidence}'")
        return self


def is_replaced(confidence: str | dict[str, float]) -> bool:
    """Whether nothing of a drafter's own confidences is left."""
    return isinstance(confidence, str) and confidence.startswith(("perfect", "constant"))


#: What can be done to a drafter's confidences, beside the temperatures of a file.
CALIBRATIONS = ("bank", "none", "online")


class SyntheticSection(_Section):
    """A synthetic workload (`traces.synthetic_trace`): arrivals and lengths.

    ``cv`` belongs to gamma arrivals, ``on_s`` and ``off_s`` to on-off ones, the means (and ``sigma``, lognormal) to
    fixed and lognormal lengths; ``empirical`` lengths are drawn from the workload's trace.
    """

    requests: Annotated[int, Field(ge=1, le=50_000_000)] = 10_000
    arrivals: Literal["poisson", "gamma", "onoff"] = "poisson"
    rate: Positive = 5.0
    cv: Positive | None = None
    on_s: Positive | None = None
    off_s: Positive | None = None
    lengths: Literal["fixed", "lognormal", "empirical"] = "lognormal"
    prompt_mean: Positive | None = None
    output_mean: Positive | None = None
    sigma: Positive | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _no_idle_option(self) -> SyntheticSection:
        needs = {
            "cv": self.arrivals == "gamma",
            "on_s": self.arrivals == "onoff",
            "off_s": self.arrivals == "onoff",
            "prompt_mean": self.lengths != "empirical",
            "output_mean": self.lengths != "empirical",
            "sigma": self.lengths == "lognormal",
        }
        for name, needed in needs.items():
            if needed != (getattr(self, name) is not None):
                kind = f"arrivals = '{self.arrivals}', lengths = '{self.lengths}'"
                raise ValueError(f"'{name}' is {'missing for' if needed else 'not used by'} {kind}")
        return self


class WorkloadSection(_Section):
    """Lengths and arrivals: a trace (shipped name or file), a synthetic workload, or synthetic arrivals with a
    trace's lengths. `sort` and `drop_zero` are the reader's explicit repairs."""

    trace: str | None = None
    window_s: tuple[NotNegative, Annotated[float, Field(gt=0)]] | None = None
    order: Literal["shuffled", "trace"] = "shuffled"
    sort: bool = False
    drop_zero: bool = False
    synthetic: SyntheticSection | None = None

    @model_validator(mode="after")
    def _source(self) -> WorkloadSection:
        empirical = self.synthetic is not None and self.synthetic.lengths == "empirical"
        if self.trace is None and (self.synthetic is None or empirical):
            raise ValueError("a trace is missing (a shipped name or a file)")
        if self.trace is None and (self.sort or self.drop_zero):
            raise ValueError("'sort' and 'drop_zero' repair a trace; there is none")
        if self.trace is not None and self.synthetic is not None and not empirical:
            raise ValueError("a trace beside a synthetic workload is used by lengths = 'empirical' only")
        return self


class LoadSection(_Section):
    """Closed loop: `users`; open loop: `rate_scales` times the trace's own rate, `requests` issued.

    `stagger_s` (2), `warmup_per_user` (3) and `edge_fraction` (0.1) belong to steady measurements.
    """

    users: Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...], Field(min_length=1)] = (
        1,
        8,
        16,
        32,
        64,
        96,
        128,
        160,
        192,
        224,
        256,
    )
    think_s: NotNegative = 0.0
    stagger_s: NotNegative | None = None
    warmup_per_user: Annotated[int, Field(ge=1, le=10_000)] | None = None
    scored_min: PositiveInt = 200
    scored_per_user: PositiveInt = 4
    rate_scales: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0)
    requests: PositiveInt | Literal["all"] = 1000
    edge_fraction: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    window_s: Annotated[float, Field(ge=1e-3, le=1e6)] = 2.0


class MeasureSection(_Section):
    """`steady`: warm-up discarded, population full; `whole-run`: a benchmark client, ramp and drain included."""

    mode: Literal["steady", "whole-run"] = "steady"
    seeds: Annotated[int, Field(ge=1, le=100_000)] = 5


class SloSection(_Section):
    """Latency targets for goodput."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None


class ArmSection(_Section):
    """Drafter + policy + block size."""

    name: Name
    policy: str
    drafter: str = "dspark"
    gamma: Annotated[int, Field(ge=0, le=64)] | None = None


#: Draft costs in passes of the profiled drafter: DSpark's and DFlash's block in one, an autoregressive head a layer
#: of three a token (assumed).
DEFAULT_DRAFTERS = {
    "dspark": DrafterSection(),
    "dflash": DrafterSection(),
    "mtp": DrafterSection(passes="token", cost_scale=1 / 3),
    "eagle3": DrafterSection(passes="token", cost_scale=1 / 3),
}

#: Recorded banks of drafters that name none: gamma 7, mtp gamma 5. Their drafters' weights have the same names.
SHIPPED_BANKS = {
    "dspark": "smollm2-dspark",
    "dflash": "smollm2-dflash",
    "mtp": "smollm2-mtp5",
    "eagle3": "smollm2-eagle3",
}


class Scenario(_Section):
    """A whole study: one engine and workload, several arms and loads. See `docs/scenarios.md`."""

    name: Name
    cost: CostSection = CostSection()
    cluster: ClusterSection = ClusterSection()
    drafts: DraftsSection = DraftsSection()
    drafters: dict[str, DrafterSection] = DEFAULT_DRAFTERS
    workload: WorkloadSection
    load: LoadSection = LoadSection()
    measure: MeasureSection = MeasureSection()
    slo: SloSection = SloSection()
    arms: Annotated[tuple[ArmSection, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two arms are called '{name}'")
        for arm in self.arms:
            if self.gamma(arm) and arm.drafter not in self.drafters:
                raise ValueError(
                    f"arm '{arm.name}': no drafter '{arm.drafter}', expected one of {', '.join(self.drafters)}"
                )
        load = self.load
        for name in ("users", "rate_scales"):
            if len(set(getattr(load, name))) < len(getattr(load, name)):
                raise ValueError(f"'load.{name}' holds a value twice")
        if self.measure.mode == "steady":
            if load.warmup_per_user is not None and load.warmup_per_user < MIN_WARMUP:
                raise ValueError(f"a steady measurement discards at least {MIN_WARMUP} requests a user")
        else:
            for name in ("stagger_s", "warmup_per_user", "edge_fraction"):
                if getattr(load, name) is not None:
                    raise ValueError(f"'load.{name}' is not used by measure.mode = 'whole-run'")
        self._check_drafters({arm.drafter for arm in self.arms if self.gamma(arm)})
        return self

    def _check_drafters(self, used: set[str]) -> None:
        source = self.drafts.source
        for name, drafter in self.drafters.items():
            if drafter.tilt_to is not None and source != "tilted":
                raise ValueError(f"'drafters.{name}.tilt_to' is not used by drafts.source = '{source}'")
            for key, idle in (("bank", source == "live"), ("weights", source != "live")):
                if getattr(drafter, key) is not None and idle:
                    raise ValueError(f"'drafters.{name}.{key}' is not used by drafts.source = '{source}'")
            key = "weights" if source == "live" else "bank"
            if drafter.like is not None and (drafter.like == name or self.names_all(drafter)):
                raise ValueError(f"'drafters.{name}.like' changes nothing")
            if source == "live" and drafter.confidence != "recorded":
                raise ValueError(f"'drafters.{name}.confidence' is not used by drafts.source = 'live'")
            own = drafter.like or name
            if name in used and source != "synthetic" and getattr(drafter, key) is None and own not in SHIPPED_BANKS:
                raise ValueError(f"drafter '{name}' has no {key}: 'drafters.{name}.{key}' is missing for '{source}'")
        tilt = self.drafts.tilt
        if tilt is not None and any(tilt.confidence) and used:
            seen = [name for name in used if not is_replaced(self.drafters[name].confidence)]
            if not seen:
                raise ValueError("'drafts.tilt.confidence' is not used: every drafter's confidences are replaced")
        given = [name for name in SHAPE if getattr(self.drafts, name) is not None]
        if given and all(self.drafters[name].bank is not None for name in used):
            raise ValueError(f"'drafts.{given[0]}' shapes synthetic drafts; every drafter has a bank")

    def names_all(self, drafter: DrafterSection) -> bool:
        """Whether a drafter names everything that another one's name could stand for."""
        if self.drafts.source == "live":
            return drafter.weights is not None
        return drafter.bank is not None and (self.drafts.source != "tilted" or drafter.tilt_to is not None)

    @field_validator("drafters", mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        return {**DEFAULT_DRAFTERS, **given} if isinstance(given, dict) else given

    def arm(self, name: str) -> ArmSection:
        """The arm of that name."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        known = ", ".join(arm.name for arm in self.arms)
        raise InputError("unknown arm", field="arm", value=name, expected=f"one of {known}")

    def gamma(self, arm: ArmSection) -> int:
        """Block size of an arm."""
        return self.drafts.gamma if arm.gamma is None else arm.gamma

    def scored(self, users: int) -> int:
        """Scored requests of a closed loop."""
        return max(self.load.scored_min, self.load.scored_per_user * users)

    def canonical(self) -> dict[str, Any]:
        """Plain nested dict without absent values: what is saved and hashed."""
        plain: dict[str, Any] = _lists(self.model_dump(mode="python", exclude_none=True))
        return plain


# -- reading ---------------------------------------------------------------------------------------------


def scenario_path(name_or_path: str | Path) -> Path:
    """The file of a scenario, given its path or the name of a shipped one (``decode-node``, ``colocated``).

    Raises
    ------
    InputError
        Neither a file nor a shipped name; the shipped ones are listed.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    folder = Path(str(resources.files("experiments") / "scenarios"))
    shipped = {file.stem: file for file in sorted(folder.glob("*.toml"))}
    name = str(name_or_path).removesuffix(".toml")
    if name in shipped:
        return shipped[name]
    raise InputError("scenario not found", file=path, expected=f"a TOML file or one of {', '.join(shipped)}")


def load_scenario(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Read and validate a scenario.

    Parameters
    ----------
    name_or_path
        TOML file, or the name of a shipped scenario.
    overrides
        Values by dotted key: ``{"load.users": [1, 8], "cost.fit": "roofline", "arms.0.gamma": 3}``.

    Raises
    ------
    InputError
        With file, line, field, value and expectation.
    """
    path = scenario_path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", file=path) from None
    try:
        raw = tomllib.loads(text)
    except RecursionError:
        raise InputError("is nested too deeply", file=path) from None
    except ValueError as error:
        line = re.search(r"line (\d+)", str(error))
        raise InputError(f"is not TOML ({error})", file=path, line=int(line[1]) if line else None) from None
    for key, value in (overrides or {}).items():
        _override(raw, key, value)
    scenario = parse_scenario(raw, path, text, tuple(overrides or ()))
    return resolve_files(scenario, path.parent)


def parse_scenario(
    raw: Mapping[str, Any], file: str | Path | None = None, text: str = "", overrides: Sequence[str] = ()
) -> Scenario:
    """Validate a nested dict. `file`, `text` and the overridden keys serve the error's location."""
    try:
        # Lists of TOML become tuples: the scenario is immutable.
        return Scenario.model_validate(_tuples(raw))
    except ValidationError as error:
        first = error.errors()[0]
        location = first["loc"]
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        message = {"Field required": "a value (the key is missing)"}.get(message, message)
        unknown = first["type"] == "extra_forbidden"
        dotted = ".".join(str(part) for part in location)
        if any(f"{dotted}.".startswith(f"{key}.") for key in overrides):
            file, text = "--set", ""  # the user wrote it there, not in the file
        raise InputError(
            "unknown key" if unknown else None if first["type"] != "value_error" else message,
            file=file,
            line=_line_of(text, location),
            field=dotted or None,
            value=None if first["type"] in ("value_error", "missing") else _lists(first["input"]),
            expected=_known_keys(location) if unknown else None if first["type"] == "value_error" else message,
        ) from None


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _known_keys(location: Sequence[int | str]) -> str | None:
    model: Any = Scenario
    for part in location[:-1]:
        if isinstance(part, int) or not isinstance(model, type) or not issubclass(model, BaseModel):
            continue
        field = model.model_fields.get(part)
        model = _section_of(field.annotation) if field else None
    if isinstance(model, type) and issubclass(model, BaseModel):
        return "one of " + ", ".join(model.model_fields)
    return None


def _section_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_of(inner)
        if found is not None:
            return found
    return None


def _line_of(text: str, location: Sequence[int | str]) -> int | None:
    """Line of a key in TOML text (1-based): its own line, or that of the table it belongs to."""
    keys = [str(part) for part in location if not isinstance(part, int)]
    index = next((part for part in location if isinstance(part, int)), 0)
    table: list[str] = []
    seen: dict[str, int] = {}
    best: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line)
        if header:
            table = [part.strip().strip('"') for part in header[2].split(".")]
            if header[1] == "[[":
                seen[header[2]] = seen.get(header[2], -1) + 1
            if table == keys[: len(table)] and seen.get(header[2], index) == index:
                best = number
            continue
        key = re.match(r'\s*"?([\w.-]+)"?\s*=', line)
        if key and [*table, *key[1].split(".")] == keys[: len(table) + len(key[1].split("."))]:
            if table and seen.get(".".join(table), index) != index:
                continue
            return number
    return best


def parse_override(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` with a dotted key; the value is read as TOML, or as plain text where it is not TOML.

    Examples
    --------
    >>> parse_override("cluster.max_seqs=128")
    ('cluster.max_seqs', 128)
    >>> parse_override("cost.fit=roofline")
    ('cost.fit', 'roofline')
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    good = all(re.fullmatch(r"[\w-]+", part) for part in key.split("."))
    if not equals or not good or not value:
        raise InputError(value=text, expected="KEY=VALUE with a dotted key, such as cluster.max_seqs=128")
    try:
        found = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key, value
    # Text of several lines that goes on with further keys is text, not a value with something lost.
    return key, found["value"] if len(found) == 1 else value


def _override(raw: dict[str, Any], key: str, value: Any) -> None:
    node: Any = raw
    parts = key.split(".")
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise InputError(field=key, value=part, expected=f"an index below {len(node)}")
            if last:
                node[int(part)] = value
            else:
                node = node[int(part)]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            else:
                node = node.setdefault(part, {})
        else:
            raise InputError(f"'{parts[i - 1]}' is a value, not a section", field=key, value=value)


def resolve_files(scenario: Scenario, folder: Path) -> Scenario:
    """Make the paths of banks, drafters, traces, profiles and policies absolute (relative to the scenario's folder)."""

    def absolute(text: str) -> str:
        # A path may hold colons itself.
        for name, _, rest in ((text, "", ""), text.partition(":")):
            for base in (folder, Path()):
                if name and (base / name).is_file():
                    return str((base / name).resolve()) + (f":{rest}" if rest else "")
        return text

    raw = scenario.model_dump(mode="python")
    raw["cost"]["profile"] = absolute(raw["cost"]["profile"])
    if raw["workload"]["trace"] not in (None, *shipped_traces()):  # a file of such a name is ./NAME
        raw["workload"]["trace"] = absolute(raw["workload"]["trace"])
    for drafter in raw["drafters"].values():
        # Anything else is the name of something that comes with dsim.
        files = (("bank", ".npz"), ("weights", ".safetensors"), ("tilt_to", ".json"), ("calibration", ".json"))
        for key, ending in files:
            if isinstance(drafter[key], str) and drafter[key].endswith(ending):
                drafter[key] = absolute(drafter[key])
    live = raw["drafts"]["live"]
    if live is not None and live["target"].startswith("hf:"):
        for base in (folder, Path()):
            if (base / live["target"][3:]).is_dir():
                live["target"] = f"hf:{(base / live['target'][3:]).resolve()}"
                break
    for arm in raw["arms"]:
        if ".py:" in arm["policy"]:
            arm["policy"] = absolute(arm["policy"])
        # An engine's table, ``sglang:table=sps.json``; a path that would not be one value of a spec stays as it is.
        arm["policy"] = re.sub(
            r"(?<=[:,]table=)[^,:=]+\.json(?=,|$)",
            lambda found: path if not set(path := absolute(found[0])) & set(",:=") else found[0],
            arm["policy"],
        )
    return Scenario.model_validate(raw)
