"""One measured vLLM server under a closed loop: its data, its replay, and the few constants that are fitted.

The server is the one of the profile ``b300x4-dsv4-flash-0731``. Step and draft times are the profile's. Three constants
(`Constants`) are fitted to the row without speculation; one number an arm, the level of its acceptance, to the arm's
cell at one user. Everything else follows.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, least_squares
from scipy.special import expit, logit

from dsim.cost import fit
from dsim.cost.model import Fit as Law
from dsim.cost.model import StepModel
from dsim.cost.points import Points
from dsim.drafts import Bank, BankDrafts, Tilt, preset_curves, preset_spec, synthetic_bank
from dsim.drafts.quality import Quality
from dsim.errors import InputError
from dsim.metrics import summarize
from dsim.options import HostCost, ReplicaConfig
from dsim.policy import load_policy
from dsim.prices import DraftCost
from dsim.profile import Profile, Samples, load_profile
from dsim.published import published
from dsim.serve import serve
from dsim.telemetry import Records
from dsim.workload import ClosedLoop, RequestStream
from traces import Trace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

PROFILE = "b300x4-dsv4-flash-0731"
#: Acceptance curve, whose shape every arm has: two samples of this checkpoint's drafts, pooled (vllm-ascend#13640).
PRESET = "dsv4-flash-0731"
#: Drafts in each of the two samples.
PUBLISHED_DRAFTS = (23, 55)

LOADS = (1, 16, 32, 64, 128, 256)
#: Prompt lengths, order and luck of the replays whose mean is the prediction.
SEEDS = (0, 1, 2, 3, 4)

#: The largest level: every draft is accepted.
ALL_ACCEPTED = 20.0
_ENOUGH_BLOCKS = 1 << 20
#: A fit stops after so many rounds; a level is searched from 0 in steps that begin here, and found this closely.
_ROUNDS, _FIRST_STEP, _CLOSE = 8, 0.3125, 1e-3


@dataclass(frozen=True)
class Arm:
    """What was served: drafts a block (0: no speculation), and who decides how many are verified."""

    name: str
    policy: str
    gamma: int


NOSPEC = Arm("nospec", "none", 0)
SPECULATIVE = (
    Arm("k1", "fixed:k=1", 1),
    Arm("k3", "fixed:k=3", 3),
    Arm("k5", "fixed:k=5", 5),
    Arm("k7", "fixed:k=7", 7),
    Arm("adaptive", "vllm-adaptive", 7),
)
#: Fixed lengths whose output was valid: what adapting must not lose to.
VALID_FIXED = ("k5", "k7")


@dataclass(frozen=True)
class Cell:
    """Two numbers of one run: 1 / median TPOT (tok/s), and all output tokens over the whole run (tok/s)."""

    tps_per_user: float
    throughput_tok_s: float

    def log_ratio(self, other: Cell) -> FloatArray:
        """float64[2]: logarithms of this cell's numbers over another's."""
        mine, its = (np.array([c.tps_per_user, c.throughput_tok_s]) for c in (self, other))
        return np.asarray(np.log(mine / its), dtype=np.float64)


METRICS = ("tps_per_user", "throughput_tok_s")


@dataclass(frozen=True)
class Workload:
    """The run's requests and engine limits, as in run.toml."""

    requests: int
    requests_one_user: int
    output_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prompt_tokens: float
    prompt_sigma: float

    def count(self, users: int) -> int:
        """Requests of a run."""
        return self.requests_one_user if users == 1 else self.requests


@dataclass(frozen=True)
class Constants:
    """What the row without speculation gives: a step's time beside the GPU's, and a user's time between requests.

    Parameters
    ----------
    offset_ms, root_ms
        A step of R requests takes ``offset + root * sqrt(R)`` milliseconds beyond the profile's. The offset is the
        host's fixed part less what the profile's long contexts cost, and may be negative.
    gap_ms
        From a request's last token to the next one's arrival in the engine: client, network, tokenizer.
    """

    offset_ms: float
    root_ms: float
    gap_ms: float


# -- the data --------------------------------------------------------------------------------------------

_COLUMNS = ("arm", "concurrency", *METRICS)


def _folder() -> Any:
    return files("dsim") / "data" / "validation" / "vllm_b300_flash"


@lru_cache(maxsize=1)
def load_workload() -> Workload:
    """The shipped run.toml."""
    return Workload(**tomllib.loads((_folder() / "run.toml").read_text(encoding="utf-8")))


@lru_cache(maxsize=1)
def load_measured() -> Mapping[tuple[str, int], Cell]:
    """The shipped cells by arm and users."""
    return read_measured((_folder() / "measured.csv").read_text(encoding="utf-8"), "measured.csv")


def read_measured(text: str, file: str) -> dict[tuple[str, int], Cell]:
    """Cells by arm and users, from CSV text.

    Raises
    ------
    InputError
        Other columns, an unknown arm, a load that was not run, a number that is not positive, or a cell given twice.
    """
    rows = list(csv.reader(io.StringIO(text)))
    if not rows or tuple(rows[0]) != _COLUMNS:
        raise InputError(file=file, line=1, field="columns", value=rows[:1], expected=", ".join(_COLUMNS))
    arms, cells = [arm.name for arm in (NOSPEC, *SPECULATIVE)], {}
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(_COLUMNS):
            raise InputError(file=file, line=line, value=row, expected=f"{len(_COLUMNS)} cells")
        if row[0] not in arms:
            raise InputError(file=file, line=line, field="arm", value=row[0], expected=f"one of {', '.join(arms)}")
        if row[1] not in [str(users) for users in LOADS]:
            known = ", ".join(str(users) for users in LOADS)
            raise InputError(file=file, line=line, field="concurrency", value=row[1], expected=f"one of {known}")
        values = [_positive(cell, file, line, name) for name, cell in zip(METRICS, row[2:], strict=True)]
        key = (row[0], int(row[1]))
        if key in cells:
            raise InputError(file=file, line=line, value=list(key), expected="each arm and load once")
        cells[key] = Cell(*values)
    return cells


def _positive(cell: str, file: str, line: int, name: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = np.nan
    if not (np.isfinite(value) and value > 0):
        raise InputError(file=file, line=line, field=name, value=cell, expected="a finite number > 0")
    return value


# -- the model, and the model without a mechanism --------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """The model with one thing changed.

    Parameters
    ----------
    name, change
        For tables; what is left out or changed, in words.
    workload
        Fields of `Workload` instead.
    power
        Of the requests, in the host time.
    fixed
        Constants that are not fitted.
    by_tokens
        The root is of the step's tokens, not of its requests.
    prompts
        Whether prompts bring their tokens into the steps (False: one token each).
    cached_block
        Tokens of a prefix-cache block of which a prompt's whole ones are found; 0: none are.
    graphs_end
        Whether steps beyond the captured sizes run eagerly (False: they go on along the captured ones).
    cold
        Every step costs what the first pass of its size did.
    running_max
        A larger step is never cheaper.
    draft_scale
        Cost of a draft, in the profile's.
    admit_ahead
        Who joins a step is settled a step before.
    whole_run
        Ramp and drain are part of the run (False: a window in which all users are busy).
    request_share
        Share of the variance of acceptance (logits) that lies between requests; None: the preset's.
    """

    name: str = "full"
    change: str = "nothing"
    workload: tuple[tuple[str, float], ...] = ()
    power: float = 0.5
    fixed: tuple[tuple[str, float], ...] = ()
    by_tokens: bool = False
    prompts: bool = True
    cached_block: int = 0
    graphs_end: bool = True
    cold: bool = False
    running_max: bool = False
    draft_scale: float = 1.0
    admit_ahead: bool = True
    whole_run: bool = True
    request_share: float | None = None

    @property
    def served(self) -> Workload:
        """The run, with this variant's fields."""
        changes: Any = dict(self.workload)
        return replace(load_workload(), **changes)


FULL = Variant()
ABLATIONS = (
    Variant("no-host", "no host time", fixed=(("offset_ms", 0.0), ("root_ms", 0.0))),
    Variant("flat-host", "host time: a constant", fixed=(("root_ms", 0.0),)),
    Variant("power-0.4", "host time: power 0.4 of the requests", power=0.4),
    Variant("power-0.6", "host time: power 0.6 of the requests", power=0.6),
    Variant("linear-host", "host time: in proportion to the requests", power=1.0),
    Variant("host-by-tokens", "host time: root of the tokens", by_tokens=True),
    Variant("no-gap", "users are back at once", fixed=(("gap_ms", 0.0),)),
    Variant("no-prompts", "prompts take no tokens in the steps", prompts=False),
    Variant("prompts-100", "prompts of 100 tokens", workload=(("prompt_tokens", 100.0),)),
    Variant("prompts-300", "prompts of 300 tokens", workload=(("prompt_tokens", 300.0),)),
    Variant(
        "warm-cache",
        "prompts of 300 tokens, whole blocks of 256 cached",
        workload=(("prompt_tokens", 300.0),),
        cached_block=256,
    ),
    Variant("equal-prompts", "prompts of one length", workload=(("prompt_sigma", 0.0),)),
    Variant("no-graph-end", "captured graphs without end", graphs_end=False),
    Variant("chunks-2048", "2,048 tokens a step", workload=(("max_num_batched_tokens", 2048),)),
    Variant("chunks-16384", "16,384 tokens a step", workload=(("max_num_batched_tokens", 16384),)),
    Variant("admit-at-once", "no admission a step ahead", admit_ahead=False),
    Variant("steady-window", "a steady window, no ramp and drain", whole_run=False),
    Variant("free-drafts", "drafts cost nothing", draft_scale=0.0),
    Variant("cold-steps", "every step as dear as a cold one", cold=True),
    Variant("running-max", "prices under a running maximum", running_max=True),
    Variant("requests-alike", "requests alike in acceptance", request_share=0.0),
)
#: Cells whose predicted throughput ablations show: arm and users.
SHOWN = (("k5", 16), ("k5", 128), ("k7", 128), ("adaptive", 16), ("adaptive", 128), ("adaptive", 256))


@dataclass(frozen=True, eq=False)
class RootOfTokens:
    """A law of verify steps with ``root * sqrt(tokens)`` milliseconds on top of another."""

    law: Law
    root_ms: float

    @property
    def points(self) -> Points:
        """Those of the law below."""
        return self.law.points

    @property
    def depends_on_requests(self) -> bool:
        """As the law below."""
        return self.law.depends_on_requests

    def price(self, requests: int, tokens: IntArray) -> FloatArray:
        """Milliseconds at each of `tokens`."""
        return np.asarray(self.law.price(requests, tokens) + self.root_ms * np.sqrt(tokens), dtype=np.float64)

    def refit(self, points: Points) -> None:
        """It is not fitted to points."""
        return


@lru_cache(maxsize=8)
def prices(graphs_end: bool = True, cold: bool = False, running_max: bool = False) -> StepModel:
    """The profile's step and draft times, or what a `Variant` makes of them."""
    profile = load_profile(PROFILE)
    if cold:
        profile = _first_passes(profile)
    if not graphs_end:
        profile = _endless_graphs(profile)
    cost = fit(profile, "staircase", running_max=running_max)
    assert isinstance(cost, StepModel)
    return cost


def _first_passes(profile: Profile) -> Profile:
    samples = profile.samples
    keep = np.zeros(len(samples), dtype=bool)
    for kind in ("verify", "draft"):
        size = samples.tokens if kind == "verify" else samples.requests
        for one in np.unique(size[samples.kind == kind]):
            mine = np.flatnonzero((samples.kind == kind) & (size == one))
            keep[mine[np.argmin(samples.repeat[mine])]] = True
    columns = ("kind", "tokens", "requests", "context_tokens", "ms", "repeat")
    return replace(profile, samples=Samples(**{name: getattr(samples, name)[keep] for name in columns}))


def _endless_graphs(profile: Profile) -> Profile:
    """Above the captured sizes, the line through the largest of them and the one at half its tokens."""
    samples, limit = profile.samples, profile.capture_limit
    table = fit(profile, "staircase", running_max=False).verify_table(1, limit)
    slope = (table[limit] - table[limit // 2]) / (limit - limit // 2)
    beyond = (samples.kind == "verify") & (samples.tokens > limit)
    line = np.where(beyond, table[limit] + slope * (samples.tokens - limit), samples.ms)
    return replace(profile, samples=replace(samples, ms=line))


@lru_cache(maxsize=4)
def bank_of(request_share: float | None = None) -> Bank:
    """Synthetic drafts with the published acceptance of this checkpoint."""
    shape: Any = {} if request_share is None else {"request_share": request_share}
    return synthetic_bank(preset_spec(PRESET, "dspark", **shape))


def published_curve() -> FloatArray:
    """float64[7]: conditional acceptance by position, the two samples pooled."""
    return np.array(preset_curves(PRESET)["dspark"]["mixed"])


def prompt_tokens(work: Workload, requests: int, seed: int, cached_block: int = 0) -> IntArray:
    """int64[requests]: lognormal lengths, of which whole cached blocks (never the last token) need no computing."""
    rng = np.random.default_rng([seed, 1])
    sigma = work.prompt_sigma
    drawn = np.exp(sigma * rng.standard_normal(requests) - sigma**2 / 2) * work.prompt_tokens
    tokens = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return np.asarray((tokens - 1) % cached_block + 1 if cached_block else tokens, dtype=np.int64)


# -- the replay ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Played:
    """One replayed run: its cell, all of its statistics, its records, and where its drafts came from."""

    cell: Cell
    summary: Mapping[str, float]
    records: Records
    drafts_source: str

    @property
    def eager(self) -> float:
        """Share of the steps that went beyond the captured graphs."""
        limit = prices().capture_limit
        return float(np.mean(self.records.steps["batch_tokens"] > limit))


def play(
    arm: Arm,
    users: int,
    constants: Constants,
    *,
    level: float = 0.0,
    seed: int = 0,
    variant: Variant = FULL,
    quality: Quality | None = None,
) -> Played:
    """Replay one run: all of its requests in a closed loop, from the first to the last token.

    Parameters
    ----------
    level
        Shift of the logits of acceptance (and of the confidences with them) against the published curve.
    quality
        Other confidences for the same drafts.
    """
    work, requests = variant.served, variant.served.count(users)
    drafts = None
    if arm.gamma:
        tilt = Tilt((level,), (level,)) if level else None
        bank = bank_of(variant.request_share)
        drafts = BankDrafts(bank, gamma=arm.gamma, seed=seed, tilt=tilt, quality=quality)
    prompts = np.ones(requests, dtype=np.int64)
    if variant.prompts:
        prompts = prompt_tokens(work, requests, seed, variant.cached_block)
    trace = Trace(
        "speed-bench", "synthetic", "lengths assumed", np.zeros(requests), prompts,
        np.full(requests, work.output_tokens),
    )  # fmt: skip
    cost = prices(variant.graphs_end, variant.cold, variant.running_max)
    root = constants.root_ms
    if variant.by_tokens:
        cost, root = replace(cost, fits=tuple(RootOfTokens(law, root) for law in cost.fits)), 0.0
    budget = int(work.max_num_batched_tokens)
    records = serve(
        replicas=1,
        config=ReplicaConfig(
            max_seqs=work.max_num_seqs,
            token_budget=budget,
            prefill_chunk=budget,
            colocated=True,
            kv_blocks=_ENOUGH_BLOCKS,
            host=HostCost(constants.offset_ms, root, variant.power),
            admit_ahead=variant.admit_ahead,
        ),
        cost=cost,
        drafts=drafts,
        draft_cost=DraftCost(scale=variant.draft_scale),
        policy=load_policy(arm.policy),
        stream=RequestStream(
            trace, {"any": 1.0} if drafts is None else {"mixed": 1.0}, order_seed=0, domain_seed=0, order="trace"
        ),
        load=ClosedLoop(users, think_s=constants.gap_ms / 1e3, scored=requests, steady=not variant.whole_run),
    )
    summary = summarize(records)
    cell = Cell(summary["tps_per_user"], summary["throughput_tok_s"])
    return Played(cell, summary, records, "none" if drafts is None else drafts.label)


# -- what is fitted --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitted:
    """Constants, the root mean square of the row's relative errors with them, and how often it was replayed."""

    constants: Constants
    misfit: float
    replays: int


def fit_constants(
    variant: Variant = FULL,
    *,
    loads: Sequence[int] = LOADS,
    seeds: Sequence[int] = SEEDS,
    measured: Mapping[tuple[str, int], Cell] | None = None,
) -> Fitted:
    """Constants with which the replayed row without speculation is closest to the measured one.

    Offset and root: least squares over the logarithms of tok/s/user and throughput at every load, which count alike. A
    run's schedule jumps with the constants, so derivatives are taken over 5 %. Gap: what the cell at one user leaves.
    A request there takes as long as its throughput says, of which the decode is what its TPOT says, the first token
    what the replay says, and the gap is the rest. (With more users the gap decides little but in how many steps a
    user is back, so that a fit to those loads would only chase jumps.)
    """
    known = load_measured() if measured is None else measured
    # Both are counted from `zero` in `unit`, and start at 1: 0 ms, and 16 ms at 256 requests. A step must keep a
    # positive length, and the profile's shortest takes 5 ms.
    zero = {"offset_ms": -1.0, "root_ms": 0.0}
    unit = {"offset_ms": 1.0, "root_ms": 16.0 / 256.0**variant.power}
    lowest = {"offset_ms": -3.0, "root_ms": 0.0}
    fixed = dict(variant.fixed)
    names = [name for name in zero if name not in fixed]
    replays = 0

    def constants(x: Sequence[float]) -> Constants:
        found = {name: zero[name] + unit[name] * float(u) for name, u in zip(names, x, strict=True)}
        tried = Constants(**({"gap_ms": 0.0} | found | fixed))
        if "gap_ms" in fixed:
            return tried
        first_ms = [play(NOSPEC, 1, tried, seed=seed, variant=variant).summary["ttft_mean_ms"] for seed in seeds]
        return replace(tried, gap_ms=gap_ms(known[NOSPEC.name, 1], float(np.mean(first_ms)), variant.served))

    def errors(x: Sequence[float]) -> FloatArray:
        nonlocal replays
        replays += 1
        tried, rows = constants(x), []
        for users in loads:
            runs = [play(NOSPEC, users, tried, seed=seed, variant=variant) for seed in seeds]
            rows.append(np.mean([run.cell.log_ratio(known[NOSPEC.name, users]) for run in runs], axis=0))
        return np.concatenate(rows)

    if not names:
        return Fitted(constants(()), _rms(errors(())), replays)
    bounds = ([lowest[name] for name in names], np.full(len(names), np.inf))
    best = least_squares(
        errors, np.ones(len(names)), bounds=bounds, diff_step=0.05, max_nfev=_ROUNDS, xtol=1e-3, ftol=1e-3
    )
    return Fitted(constants(best.x), _rms(best.fun), replays)


def gap_ms(alone: Cell, first_ms: float, work: Workload) -> float:
    """Milliseconds between a lone user's requests: what is left of the run beside first tokens and decode.

    There is one gap fewer than requests.

    >>> work = Workload(880, 11, 512, 256, 8192, 200.0, 1.0)
    >>> round(gap_ms(Cell(200.0, 512 / 2.6), 15.0, work), 6)  # 2600 ms a request: 15, 511 x 5, and 10/11 of the gap
    33.0

    Raises
    ------
    InputError
        Nothing is left: the run took less time than its decode.
    """
    decode_ms = 1e3 * (work.output_tokens - 1) / alone.tps_per_user
    rest = 1e3 * work.output_tokens / alone.throughput_tok_s - decode_ms - first_ms
    if rest < 0:
        raise InputError(
            "one user's throughput is higher than the decode speed allows",
            field="throughput_tok_s",
            value=alone.throughput_tok_s,
            expected=f"at most {1e3 * work.output_tokens / (decode_ms + first_ms):.4g}",
        )
    return rest * work.requests_one_user / (work.requests_one_user - 1)


def _rms(errors: FloatArray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def fit_level(
    arm: Arm,
    constants: Constants,
    *,
    variant: Variant = FULL,
    seeds: Sequence[int] = SEEDS,
    quality: Quality | None = None,
    target: Cell | None = None,
) -> float:
    """The level of acceptance with which the arm's cell at one user comes out (mean of its two numbers' errors).

    Raises
    ------
    InputError
        No level gives the cell: it is faster than if every draft were accepted.
    """
    aim = load_measured()[arm.name, 1] if target is None else target

    def error(level: float) -> float:
        runs = [play(arm, 1, constants, level=level, seed=s, variant=variant, quality=quality) for s in seeds]
        return float(np.mean([run.cell.log_ratio(aim) for run in runs]))

    # More acceptance is faster, but for the luck of which drafts it turns: a bracket, and then any root in it.
    at = error(0.0)
    inner, outer = 0.0, -np.sign(at) * _FIRST_STEP
    while at and np.sign(error(outer)) == np.sign(at):
        inner, outer = outer, 2.0 * outer
        if abs(outer) > ALL_ACCEPTED:
            raise InputError(
                f"no level of acceptance gives arm '{arm.name}' its speed at one user",
                field="tps_per_user",
                value=aim.tps_per_user,
                expected="a speed between those of no accepted draft and of all accepted",
            )
    return float(brentq(error, inner, outer, xtol=_CLOSE)) if at else 0.0


# -- the published positions -----------------------------------------------------------------------------


def curve_at(level: float, k: int) -> FloatArray:
    """float64[k]: conditional acceptance of the published curve, logits shifted."""
    return np.asarray(expit(logit(published_curve()[:k]) + level), dtype=np.float64)


def mean_length(curve: FloatArray) -> float:
    """Tokens a step of a conditional acceptance curve, bonus included: 1 + sum of its cumulative products."""
    return float(1.0 + np.cumprod(curve).sum())


def published_counts() -> tuple[IntArray, IntArray]:
    """int64[7] twice: drafts accepted, and drafts that were reached, by position, in both samples together."""
    table = published("accept_per_position")
    counts = np.zeros(7, dtype=np.int64)
    for number, drafts in enumerate(PUBLISHED_DRAFTS, start=1):
        rows = table[table["source"] == f"vllm-ascend#13640 DSV4-Flash-0731 A2 sample{number}"]
        fractions = rows.sort_values("position")["accepted_fraction_of_drafts"].to_numpy()
        counts += np.rint(fractions * drafts).astype(np.int64)
    return counts, np.concatenate([[sum(PUBLISHED_DRAFTS)], counts[:-1]])


def published_levels(k: int, draws: int = 20_000) -> tuple[float, float]:
    """95 % interval of the published acceptance of blocks of k, as shifts of the whole curve.

    At each position the accepted drafts are binomial out of those that reached it. With Jeffreys' prior the curve is
    drawn, which gives an interval of the accepted length; the levels are the shifts of the pooled curve that have its
    two ends.
    """
    accepted, reached = (counts[:k] for counts in published_counts())
    rng = np.random.default_rng(0)
    curves = rng.beta(accepted + 0.5, reached - accepted + 0.5, size=(draws, k))
    low, high = np.quantile(1.0 + np.cumprod(curves, axis=1).sum(axis=1), (0.025, 0.975))
    ends = [brentq(lambda s, e=end: mean_length(curve_at(s, k)) - e, -10.0, 10.0) for end in (low, high)]
    return float(ends[0]), float(ends[1])
