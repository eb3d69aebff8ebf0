"""Measured runs of the engine on this machine: their files, what their steps cost by the profile, and their bank.

`measure_engine.py` writes them, `_validate_here.py` predicts them. A measurement is a folder::

    measurement.json   what was run, on what
    NAME.csv, .toml    the profile (see `dsim.profile`); NAME is in measurement.json
    passes.csv         the profile's passes by size: medians, spread, and what they take at the machine's usual speed
    host.csv           host time of the passes
    pilot.csv          the pilot profile's passes by size: what the policies were told that steps cost
    pilot_host.csv     host time of the pilot's passes
    runs.csv           a row a run
    requests.csv       a row a request of a run
    bank.npz           recorded drafts at the prompts of the runs (where --bank was given)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

from dsim.cost import Additive, Points, StepModel
from dsim.cost.points import Curve
from dsim.drafts import Bank, make_bank, read_bank
from dsim.drafts.bank import BankHeader
from dsim.errors import InputError
from dsim.metrics import summarize
from dsim.options import HostCost, ReplicaConfig
from dsim.prices import ArmPrices, DraftCost
from dsim.profile import Profile, read_profile
from dsim.telemetry import REQUEST_COLUMNS, STEP_COLUMNS, Records

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FORMAT, VERSION = "dsim-engine-measurement", 1
#: KV blocks of the replica that stands for the engine, whose caches hold every batch.
_ENOUGH_BLOCKS = 1 << 20
#: Metrics of a run that go into runs.csv.
METRICS = (
    "n_scored",
    "throughput_tok_s",
    "tps_per_user",
    "tpot_p50_ms",
    "tpot_p90_ms",
    "ttft_p50_ms",
    "ttft_p90_ms",
    "e2e_p50_ms",
    "accepted_length",
    "verification_budget",
    "mean_batch_requests",
    "mean_step_ms",
    "steps",
    "window_seconds",
)


@dataclass(frozen=True)
class Measured:
    """What `measurement.json` says. All but `rounds` and `about` must agree for a measurement to go on.

    Attributes
    ----------
    profile
        Name of the profile.
    target, drafter
        Name of the target, and the drafter: its digest and what it is.
    gamma, temperature, temperatures
        Block size; of the sampling; divisors of the confidence logits.
    arms, users
        Policies, and loads.
    requests, per_user, max_tokens, prefill_chunk
        A run asks max(requests, per_user * users) prompts; answers are cut; prompt tokens a step.
    prompts
        `prompts_hash` of all prompts of the largest run.
    contexts
        Shortest and longest text that was profiled.
    passes
        Passes of each size a round.
    seed, same_texts, threads, clock
        As the command line has them.
    rounds
        How many there are.
    about
        Machine, versions, models: in words.
    """

    profile: str
    target: str
    drafter: str
    gamma: int
    temperature: float
    temperatures: tuple[float, ...]
    arms: tuple[str, ...]
    users: tuple[int, ...]
    requests: int
    per_user: int
    max_tokens: int
    prefill_chunk: int
    prompts: str
    contexts: tuple[int, int]
    passes: int
    seed: int
    same_texts: bool
    threads: int
    clock: str
    rounds: int
    about: dict[str, str]

    def count(self, users: int) -> int:
        """Requests of a run."""
        return max(self.requests, self.per_user * users)

    def write(self, path: Path) -> None:
        """As JSON."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")


def read_measured(path: Path) -> Measured:
    """A `measurement.json`, its keys checked.

    Raises
    ------
    InputError
        It is not there, is no JSON, or has other keys.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path, expected="a measurement") from None
    except ValueError as error:
        raise InputError(f"is not JSON ({error})", file=path) from None
    if not isinstance(raw, dict) or (raw.pop("format", None), raw.pop("version", None)) != (FORMAT, VERSION):
        raise InputError(file=path, field="format, version", expected=f"{FORMAT}, {VERSION}")
    names = set(Measured.__dataclass_fields__)
    for key in sorted(raw.keys() ^ names):
        raise InputError("missing key" if key in names else "unknown key", file=path, field=key)
    lists = {key: tuple(raw[key]) for key in ("temperatures", "arms", "users", "contexts")}
    return Measured(**{**raw, **lists})


# -- what a step costs by the profile --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prices:
    """A profile's prices for the simulated engine.

    A step of the simulator has one price for all of its tokens, but a prompt's token runs no LM head and attends to no
    long text. So a prompt is replayed with as many tokens as its pass costs by the verify prices (`equivalents`), and
    texts are priced at the run's mean length (`at`), which is known before it runs.

    Attributes
    ----------
    cost
        Fitted verify and draft prices by true context.
    host
        Host time of a step.
    prefill_ms, prefill_tokens
        The prefill samples' sizes and medians; a single token is free of them (its price is that of a verified one).
    """

    cost: StepModel
    host: HostCost
    prefill_tokens: FloatArray
    prefill_ms: FloatArray

    @classmethod
    def of(cls, passes: pd.DataFrame, name: str, host: HostCost, *, statistic: str = "usual_ms") -> Prices:
        """From the table of a profile's passes (passes.csv).

        Parameters
        ----------
        passes
            A row a size: kind, context, requests, tokens, and milliseconds.
        name
            Of the profile.
        statistic
            The column that is the price: ``usual_ms``, ``median_ms`` or ``mean_ms``.

        Raises
        ------
        InputError
            It lacks passes of a kind, or a second context.
        """
        kinds = dict(list(passes.groupby("kind")))
        contexts = np.unique(passes["context"][passes["kind"] == "verify"]).astype(np.int64)
        for kind, enough in (
            ("verify", contexts.size == 2),
            ("draft", "draft" in kinds),
            ("prefill", "prefill" in kinds),
        ):
            if not enough:
                expected = "two contexts" if kind == "verify" else "at least one"
                raise InputError("lacks passes", file=name, field="kind", value=kind, expected=expected)
        laws = []
        for context in contexts.tolist():
            here = kinds["verify"][kinds["verify"]["context"] == context].sort_values(["tokens", "requests"])
            columns = (here[name].to_numpy(dtype=np.int64) for name in ("tokens", "requests"))
            laws.append(free_additive(Points(*columns, here[statistic].to_numpy(), 0)))
        curves = {}
        for kind, by in (("draft", "requests"), ("prefill", "tokens")):
            ordered = kinds[kind].sort_values(by)
            curves[kind] = Curve(ordered[by].to_numpy(dtype=np.int64), ordered[statistic].to_numpy(), stepped=False)
        cost = StepModel(
            label=f"measured:{name}:additive",
            gpus=1,
            captured_sizes=np.empty(0, dtype=np.int64),
            capture_limit=0,
            contexts=contexts,
            fits=tuple(laws),
            draft=curves["draft"],
            prefill=curves["prefill"],
            draft_included=False,
            allow_extrapolation=False,
        )
        return cls(cost, host, curves["prefill"].sizes.astype(np.float64), curves["prefill"].ms)

    def verify_ms(self, requests: float, tokens: FloatArray, context: float) -> FloatArray:
        """Milliseconds of passes with so many verified tokens (not whole ones are between their neighbors)."""
        low, high = (float(value) for value in self.cost.contexts[[0, -1]])
        last = int(np.ceil(np.max(tokens)))
        table = self.cost.verify_table(max(1, round(requests)), last, min(max(context, low), high))
        return np.interp(tokens, np.arange(last + 1), table)

    def equivalents(self, prompts: IntArray, chunk: int) -> IntArray:
        """int64[N]: verified tokens that cost as much as prompts of so many tokens, a chunk of them a step."""
        middle = float(self.cost.contexts.mean())
        sizes = np.arange(1, chunk + 1)
        # Where fewer tokens take longer, as many count as the same time buys.
        table = np.minimum.accumulate(self.verify_ms(1, sizes.astype(np.float64), middle)[::-1])[::-1]
        shortest, ms = self.prefill_tokens[0], np.interp(sizes, self.prefill_tokens, self.prefill_ms)
        found = np.interp(ms, table, sizes)
        # Shorter than the shortest timed: in proportion.
        found = np.where(sizes < shortest, np.interp(self.prefill_ms[0], table, sizes) * sizes / shortest, found)
        whole = np.concatenate([[0], np.maximum(1, np.rint(found))]).astype(np.int64)
        return prompts // chunk * whole[chunk] + whole[prompts % chunk]

    def step_ms(self, steps: Mapping[str, IntArray], share: float, *, drafting: bool) -> FloatArray:
        """Milliseconds of steps that were measured, by what was in them.

        Parameters
        ----------
        steps
            Columns of `dsim.telemetry.STEP_COLUMNS`.
        share
            Verified tokens that a prompt's token costs.
        drafting
            Whether a drafter ran.
        """
        found = np.empty(steps["requests"].size)
        context = steps["context_tokens"] / np.maximum(steps["requests"], 1)
        tokens = steps["requests"] + steps["drafts"] + share * steps["prefill_tokens"]
        for i, requests in enumerate(steps["requests"].tolist()):
            found[i] = self.verify_ms(requests, tokens[i : i + 1], context[i])[0] + self.host.ms(requests)
            if drafting and requests:
                found[i] += self.cost.draft_ms(requests)
        return found

    def at(self, context: float) -> StepModel:
        """The prices at one length of the texts, between the profiled ones.

        The simulator rounds contexts to 64 tokens, which is little for long texts and half of these.
        """
        low, high = (float(value) for value in self.cost.contexts[[0, -1]])
        share = min(max((context - low) / (high - low), 0.0), 1.0)
        first, last = (law.points for law in (self.cost.fits[0], self.cost.fits[-1]))
        law = free_additive(replace(first, ms=(1 - share) * first.ms + share * last.ms))
        return replace(self.cost, contexts=np.array([round(context)]), fits=(law,))

    def scaled(self, factor: float) -> Prices:
        """The prices of a machine that takes so much longer for everything."""
        cost, host = self.cost, self.host
        laws = [
            replace(
                law,
                points=replace(law.points, ms=factor * law.points.ms),
                theta=factor * law.theta,
                alpha=factor * law.alpha,
            )
            for law in cost.fits
            if isinstance(law, Additive)
        ]
        draft = cost.draft if cost.draft is None else replace(cost.draft, ms=factor * cost.draft.ms)
        return Prices(
            replace(cost, fits=tuple(laws), draft=draft),
            replace(host, base_ms=factor * host.base_ms, per_request_ms=factor * host.per_request_ms),
            self.prefill_tokens,
            factor * self.prefill_ms,
        )


def mean_context(prompts: IntArray, output: IntArray) -> float:
    """Mean length of the texts over the output tokens of a run: a workload's own, whatever the times."""
    return float((output * (prompts + output / 2)).sum() / output.sum())


def free_additive(points: Points) -> Additive:
    """Milliseconds of a pass = theta(tokens) + alpha(requests), by least squares of the relative errors.

    Unlike `dsim.cost.additive` it may fall: with few rows, matrix products on a CPU take another way at some sizes, and
    a pass over three tokens takes longer than one over four.

    Raises
    ------
    InputError
        Batches share no token counts, so that requests and tokens cannot be told apart.
    """
    knots, token = np.unique(points.tokens, return_inverse=True)
    batches, request = np.unique(points.requests, return_inverse=True)
    design = np.hstack([np.eye(knots.size)[token], np.eye(batches.size)[request][:, 1:]])
    found, _, rank, _ = np.linalg.lstsq(design / points.ms[:, None], np.ones(points.ms.size), rcond=None)
    if rank < design.shape[1]:
        raise InputError("does not tell requests from tokens", file="profile", field="verify", value=len(points.ms))
    return Additive(points, 0.0, knots, found[: knots.size], batches, np.concatenate([[0.0], found[knots.size :]]))


def fitted_host(host: pd.DataFrame) -> HostCost:
    """base + per_request * R through the medians by batch (columns ``requests`` and ``ms``), neither below 0."""
    medians = host.groupby("requests")["ms"].median()
    batches, ms = medians.index.to_numpy(dtype=np.float64), medians.to_numpy()
    design = np.stack([np.ones(batches.size), batches], axis=1)[:, : min(2, batches.size)]
    # Relative errors: a small batch's overhead counts as much as a large one's. (A coarse clock may read 0.)
    weights = 1 / np.maximum(ms, 1e-3)
    constants = [*nnls(design * weights[:, None], ms * weights)[0].tolist(), 0.0]
    return HostCost(base_ms=constants[0], per_request_ms=constants[1], power=1.0)


def engine_config(users: int, gamma: int, chunk: int, host: HostCost) -> ReplicaConfig:
    """The engine as the simulator knows it: host and passes take turns."""
    return ReplicaConfig(
        max_seqs=users,
        token_budget=users * (1 + gamma) + chunk,
        prefill_chunk=chunk,
        colocated=True,
        kv_blocks=_ENOUGH_BLOCKS,
        overlapped=False,
        host=host,
    )


def told_prices(passes: pd.DataFrame, host: pd.DataFrame, measured: Measured) -> ArmPrices:
    """What the policies of the runs were told that steps cost, from the pilot's tables."""
    constants = fitted_host(host)
    cost = Prices.of(passes, measured.profile, constants).cost
    config = engine_config(measured.users[-1], measured.gamma, measured.prefill_chunk, constants)
    return ArmPrices(cost, config, measured.gamma, DraftCost(), measured.users[-1])


# -- rows of runs.csv ------------------------------------------------------------------------------------


def run_row(records: Records, parts: Mapping[str, IntArray]) -> dict[str, float]:
    """A measured run's metrics, and mean milliseconds a step by part."""
    found = summarize(records)
    row = {name: found[name] for name in METRICS}
    return row | {f"{name}_ms": float(values.mean()) * 1e-6 for name, values in parts.items()}


def records_from(steps: IntArray, requests: IntArray) -> Records:
    """A run's records from its two tables: [n, STEP_COLUMNS], [k, REQUEST_COLUMNS]."""
    columns = {name: np.ascontiguousarray(steps[:, i]) for i, name in enumerate(STEP_COLUMNS)}
    end = int(columns["end_ns"][-1])
    return Records(
        steps=columns,
        requests={name: np.ascontiguousarray(requests[:, i]) for i, name in enumerate(REQUEST_COLUMNS)},
        scored=(0, len(requests)),
        window_ns=(0, end),
        end_ns=end,
        replicas=1,
        gpus=1,
        colocated=True,
        extrapolated=False,
    )


def table_of(columns: Mapping[str, IntArray], names: Sequence[str]) -> IntArray:
    """int64[n, columns]: the inverse of `records_from` for one table."""
    return np.stack([columns[name] for name in names], axis=1)


# -- the bank --------------------------------------------------------------------------------------------


#: Prompts of the largest run: each is a domain of the bank, and what a run leaves out is another one.
MOST_PROMPTS = 254


def prompt_name(index: int) -> str:
    """The domain of a prompt in `bank_of_prompts`."""
    return f"prompt-{index:03d}"


def bank_of_prompts(bank: Bank, domains: Sequence[str], prompts: str, temperatures: Sequence[float]) -> Bank:
    """The part of a recorded bank that is about the first prompts of its split, each prompt a domain of its own.

    So a replayed request drafts on texts that answer its own prompt: what the target wrote then, not in the runs. A
    prompt whose recorded answer was too short for replay takes the texts of the next one of its domain.

    Parameters
    ----------
    bank
        As `record_banks.py` writes it.
    domains
        Of each prompt, by name; at most `MOST_PROMPTS`.
    prompts
        `prompts_hash` of as many prompts as the bank was recorded on.
    temperatures
        Divisors of the confidence logits that the runs had, one a position.

    Raises
    ------
    InputError
        The bank does not say which prompts it holds, or holds others or fewer.
    """
    try:
        notes = json.loads(bank.header.notes)
        asked, draws, left_out = int(notes["prompts_asked"]), int(notes["draws"]), set(notes["left_out"])
        answers = int(notes.get("answers", 1))
    except (ValueError, TypeError, KeyError):
        raise InputError(
            "does not say which prompts it was recorded on",
            file="bank",
            field="notes",
            expected="prompts_asked, draws and left_out: a bank of this version's record_banks.py",
        ) from None
    if notes.get("prompts") != prompts:
        raise InputError(
            "was recorded on other prompts", file="bank", field="prompts", value=notes.get("prompts"), expected=prompts
        )
    if len(domains) > MOST_PROMPTS:
        raise InputError(
            "a bank has so many domains at most",
            field="prompts",
            value=len(domains),
            expected=f"at most {MOST_PROMPTS} in the largest run",
        )
    if len(domains) > asked:
        raise InputError(
            "holds too few prompts", file="bank", field="prompts", value=asked, expected=f"at least {len(domains)}"
        )
    held = [index % asked for index in range(asked * answers) for _ in range(draws) if index not in left_out]
    if len(held) != bank.domain.size:
        raise InputError(
            "does not fit its notes", file="bank", field="left_out", value=bank.domain.size, expected=f"{len(held)}"
        )
    texts: dict[int, list[int]] = {}
    for text, index in enumerate(held):
        texts.setdefault(index, []).append(text)
    chosen, domain = [], []
    for index, name in enumerate(domains):
        own = index if index in texts else _stand_in(index, name, domains, texts)
        chosen += texts[own]
        domain += [index] * len(texts[own])
    rows = np.concatenate([np.arange(bank.bounds[text], bank.bounds[text + 1]) for text in chosen])
    header = bank.header
    span = (header.logit_high - header.logit_low) / 255
    kept = {key: value for key, value in notes.items() if key != "left_out"}
    return make_bank(
        BankHeader(
            **{
                **asdict(header),
                "domains": tuple(prompt_name(index) for index in range(len(domains))),
                "temperatures": tuple(temperatures) or (1.0,) * header.gamma,
                "notes": json.dumps({**kept, "text_domains": list(domains)}, sort_keys=True),
            }
        ),
        confidence_logit=header.logit_low + bank.confidence_bytes[rows] * span,
        alpha=bank.alpha_bytes[rows] / 255.0,
        accepted=bank.accepted[rows],
        bounds=np.concatenate([[0], np.cumsum([int(bank.bounds[t + 1] - bank.bounds[t]) for t in chosen])]),
        domain=np.array(domain),
    )


def _stand_in(index: int, name: str, domains: Sequence[str], texts: Mapping[int, list[int]]) -> int:
    others = [other for other, domain in enumerate(domains) if domain == name and other in texts]
    if not others:
        raise InputError("has no text of this domain", file="bank", field="domains", value=name)
    return min(others, key=lambda other: ((other - index) % len(domains), other))


def long_enough(bank: Bank, output: IntArray) -> Bank:
    """The bank of prompts without the texts that end before the answer of their prompt does, where others do not.

    Replay goes on in another text where one ends, from its beginning, and beginnings are easier to draft.

    Parameters
    ----------
    bank
        Of `bank_of_prompts`.
    output
        int64[N]: output tokens of the requests; request i asks prompt i.
    """
    usable, domain, names = bank.usable(), bank.domain.copy(), bank.header.domains
    for prompt, tokens in enumerate(output.tolist()):
        mine = np.flatnonzero(domain == prompt)
        # At its last step a request has all tokens but one, or fewer: rows are counted from its first token.
        domain[mine[usable[mine] < min(tokens - 1, int(usable[mine].max()))]] = len(names)
    return replace(bank, header=replace(bank.header, domains=(*names, "left-out")), domain=domain)


def by_text_domain(bank: Bank) -> Bank:
    """The same texts, told apart by their domains only."""
    names = json.loads(bank.header.notes)["text_domains"]
    domains = tuple(dict.fromkeys(names))
    header = replace(bank.header, domains=domains)
    return replace(bank, header=header, domain=np.array([domains.index(names[i]) for i in bank.domain], dtype=np.uint8))


# -- a measurement, opened -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measurement:
    """A folder that `measure_engine.py` wrote.

    Attributes
    ----------
    folder, measured, profile, bank
        Where; what was run; the profile; recorded drafts, None where there are none.
    passes, host, pilot, pilot_host, runs, requests
        The tables of those names.
    """

    folder: Path
    measured: Measured
    profile: Profile
    passes: pd.DataFrame
    host: pd.DataFrame
    pilot: pd.DataFrame
    pilot_host: pd.DataFrame
    runs: pd.DataFrame
    requests: pd.DataFrame
    bank: Bank | None

    def drift(self, arm: str, users: int, number: int) -> float:
        """How slow the machine was while a run ran, by the passes timed between its steps (1: as usual)."""
        rows = self.runs
        mine = rows[(rows["arm"] == arm) & (rows["users"] == users) & (rows["round"] == number)]
        return float(mine["drift"].iloc[0])


def open_measurement(folder: Path) -> Measurement:
    """Open a measurement.

    Raises
    ------
    InputError
        A file is missing or damaged, or a table has other columns.
    """
    measured = read_measured(folder / "measurement.json")
    tables = {}
    passes = ("kind", "context", "requests", "tokens", "usual_ms", "median_ms", "mean_ms")
    for name, columns in (
        ("passes", passes),
        ("host", ("round", "requests", "ms")),
        ("pilot", passes),
        ("pilot_host", ("round", "requests", "ms")),
        ("runs", ("round", "arm", "users", "drift", "time_ratio", *METRICS)),
        ("requests", ("round", "arm", "users", "request", "domain", "prompt_tokens", "output_tokens")),
    ):
        file = folder / f"{name}.csv"
        try:
            tables[name] = pd.read_csv(file, keep_default_na=False, na_values=[""])
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read ({error})", file=file) from None
        for column in columns:
            if column not in tables[name]:
                raise InputError("column is missing", file=file, line=1, field=column)
    bank = folder / "bank.npz"
    return Measurement(
        folder=folder,
        measured=measured,
        profile=read_profile(folder / f"{measured.profile}.toml"),
        bank=read_bank(bank) if bank.is_file() else None,
        **tables,
    )
