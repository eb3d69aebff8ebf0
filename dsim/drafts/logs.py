"""Confidence logs: what an engine saw of its drafts, as a bank of the positions that it visited.

A log has one JSON object a line, for every block that was drafted::

    {"request": 17, "position": 0, "step": 812, "confidences": [0.93, 0.71, 0.4], "verified": 2, "accepted": 1,
     "domain": "chat"}

(on one line). `docs/engine-files.md` has the fields, and the ten lines with which an engine writes them.

A log knows less than a recorded bank:

- *Where the engine did not go*, nothing was drafted. Another policy goes elsewhere, and then gets the block of a
  position nearby: one of the two visited ones before it and the two after it in the same request, by a hash.
- *What was not verified* is unknown. Where all of a block's verified drafts were accepted, the rest are accepted or
  not by a hash, with the probabilities below.
- *Acceptance probabilities* are unknown everywhere. The confidences stand for them, through a map z / T_k + b_k of
  their logits that is fitted, position by position, to the outcomes in the log (`OnlineSts`). So a policy that reads
  alpha sees no more than the confidences tell.

Visited positions are those where a step began: just after a rejected draft, or where the engine stopped. They are
harder than the rest, the more so the more was verified. Banks made of logs are of the kind ``visited``, which starts
their label wherever they are used.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsim.drafts.bank import Bank, BankHeader, make_bank
from dsim.drafts.luck import hash64, uniform
from dsim.drafts.online import OnlineSts
from dsim.errors import InputError
from dsim.sigmoid import logit
from dsim.strictjson import need_object, parse_json

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Fields of a line. All but `domain` are required.
FIELDS = ("request", "position", "step", "confidences", "verified", "accepted", "domain")
#: Domain of requests where the log names none.
ANY = "any"
#: Visited positions on either side that an unvisited one may take its block from.
NEAR = 2
# Confidence logits beyond this are stored as this.
_LOGIT_LIMIT = 16.0
_MOST_GAMMA = 64
#: Longest request: a bank has a row for every token between its first logged position and its last.
_MOST_TOKENS = 1 << 22
#: Most drafts of a bank that is made of a log, positions times gamma: making one takes some 50 bytes a draft.
_MOST_DRAFTS = 1 << 26


@dataclass(frozen=True, eq=False)
class ConfidenceLog:
    """The blocks of a log, ordered by request and position.

    Attributes
    ----------
    starts
        int64[R + 1]: first block of each request, and the end. Requests come in the order of their first line.
    domain
        int64[R]: index into `domains`.
    domains
        Names, in the order of their first line.
    position, step, verified, accepted
        int64[B].
    confidence
        float64[B, gamma], conditional.
    missed
        Steps of a request that are not in the log although a later one is, at the least.
    """

    starts: IntArray
    domain: IntArray
    domains: tuple[str, ...]
    position: IntArray
    step: IntArray
    verified: IntArray
    accepted: IntArray
    confidence: FloatArray
    missed: int

    @property
    def gamma(self) -> int:
        """Drafts a block."""
        return int(self.confidence.shape[1])


@dataclass(frozen=True)
class LogSummary:
    """What became of a log.

    Attributes
    ----------
    requests, dropped
        Requests in the log, and those left out because they are no longer than gamma + 1 tokens.
    blocks, rows
        Blocks of the requests kept, and their positions, visited or not.
    censored
        Blocks whose verified drafts were all accepted while some were not verified.
    missed
        See `ConfidenceLog`.
    observed
        By draft position: verified drafts whose predecessors were accepted.
    temperatures, bias
        The map from confidence to acceptance, by draft position.
    """

    requests: int
    dropped: int
    blocks: int
    rows: int
    censored: int
    missed: int
    observed: tuple[int, ...]
    temperatures: tuple[float, ...]
    bias: tuple[float, ...]


# -- reading ---------------------------------------------------------------------------------------------


def read_log(path: str | Path) -> ConfidenceLog:
    """Read a log; lines may come in any order.

    Raises
    ------
    InputError
        With file, line, field, value and what was expected, at the first line that is wrong or contradicts another.
    """
    path = Path(path)
    blocks: dict[tuple[str, str], list[_Block]] = {}
    gamma: tuple[int, int] | None = None
    try:
        with path.open(encoding="utf-8-sig") as stream:
            for number, text in enumerate(stream, start=1):
                if not text.strip():
                    continue
                key, block = _parse(text, path, number)
                if gamma is None:
                    gamma = len(block.confidence), number
                if len(block.confidence) != gamma[0]:
                    raise InputError(
                        file=path,
                        line=number,
                        field="confidences",
                        value=f"{len(block.confidence)} numbers",
                        expected=f"{gamma[0]}, as in line {gamma[1]}: one block size a log",
                    )
                blocks.setdefault(key, []).append(block)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path, expected="a confidence log") from None
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text", file=path, expected="a confidence log") from None
    if not blocks:
        raise InputError("is empty", file=path, line=1, expected="a JSON object a line")
    missed = 0
    for request in blocks.values():
        request.sort(key=lambda block: block.position)
        missed += _check_request(request, path)
    flat = [block for request in blocks.values() for block in request]
    domains = tuple(dict.fromkeys(request[0].domain for request in blocks.values()))
    return ConfidenceLog(
        starts=np.cumsum([0, *(len(request) for request in blocks.values())]),
        domain=np.array([domains.index(request[0].domain) for request in blocks.values()]),
        domains=domains,
        position=np.array([block.position for block in flat]),
        step=np.array([block.step for block in flat]),
        verified=np.array([block.verified for block in flat]),
        accepted=np.array([block.accepted for block in flat]),
        confidence=np.array([block.confidence for block in flat], dtype=np.float64),
        missed=missed,
    )


@dataclass(slots=True)
class _Block:
    line: int
    position: int
    step: int
    confidence: list[float]
    verified: int
    accepted: int
    domain: str


def _parse(text: str, file: Path, line: int) -> tuple[tuple[str, str], _Block]:
    def refuse(field: str, value: object, expected: str) -> InputError:
        return InputError(file=file, line=line, field=field, value=repr(value), expected=expected)

    raw = need_object(parse_json(text, file, line), file, line)
    for key in raw:
        if key not in FIELDS:
            raise InputError("unknown field", file=file, line=line, field=key, expected=f"one of {', '.join(FIELDS)}")
    for key in FIELDS[:-1]:
        if key not in raw:
            raise InputError("is missing", file=file, line=line, field=key)
    request, domain, values = raw["request"], raw.get("domain", ANY), raw["confidences"]
    if type(request) not in (int, str) or request == "":
        raise refuse("request", request, "an integer or text")
    if not isinstance(domain, str) or not domain:
        raise refuse("domain", domain, "text that is not empty")
    for key in ("position", "step", "verified", "accepted"):
        if type(raw[key]) is not int or not 0 <= raw[key] < 1 << 62:
            raise refuse(key, raw[key], "an integer >= 0")
    if raw["position"] >= _MOST_TOKENS:
        raise refuse("position", raw["position"], f"at most {_MOST_TOKENS - 1}")
    if not isinstance(values, list) or not 1 <= len(values) <= _MOST_GAMMA:
        raise refuse("confidences", values, f"a list of 1 to {_MOST_GAMMA} probabilities")
    for k, value in enumerate(values):
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise refuse(f"confidences[{k}]", value, "a probability in [0, 1]")
    if raw["verified"] > len(values):
        raise refuse("verified", raw["verified"], f"at most the {len(values)} drafts of the block")
    if raw["accepted"] > raw["verified"]:
        raise refuse("accepted", raw["accepted"], f"at most the {raw['verified']} drafts verified")
    block = _Block(line, raw["position"], raw["step"], values, raw["verified"], raw["accepted"], domain)
    return (type(request).__name__, str(request)), block


def _check_request(blocks: Sequence[_Block], file: Path) -> int:
    """Refuse blocks of one request that contradict each other; returns the steps that must be missing."""
    missed = 0
    for before, after in itertools.pairwise(blocks):
        if after.position == before.position:
            first, second = sorted((before.line, after.line))
            raise InputError(
                f"this request has a block at this position already in line {first}",
                file=file,
                line=second,
                field="position",
                value=after.position,
                expected="each (request, position) once",
            )
        following = before.position + before.accepted + 1
        told = f"line {before.line} accepts {before.accepted} drafts and adds a token"
        for field, value, good, expected in (
            ("domain", after.domain, after.domain == before.domain, f"{before.domain!r}, as in line {before.line}"),
            ("step", after.step, after.step > before.step, f"more than {before.step}, as in line {before.line} before"),
            ("position", after.position, after.position >= following, f"{following} or more ({told})"),
        ):
            if not good:
                raise InputError(file=file, line=after.line, field=field, value=value, expected=expected)
        missed += after.position > following
    return missed


# -- a bank ----------------------------------------------------------------------------------------------


def bank_from_log(
    log: ConfidenceLog,
    *,
    drafter: str = "logged",
    target: str = "not named",
    source: str = "log",
    license: str = "not named",
    seed: int = 0,
) -> tuple[Bank, LogSummary]:
    """A bank of visited positions.

    A request of the log is a trajectory, from its first logged position to its last token. Its last gamma + 1
    positions are never replayed, as in any bank, so requests of gamma + 1 tokens and fewer are left out.

    Parameters
    ----------
    log
        What `read_log` returns.
    drafter, target, source, license
        Of the header.
    seed
        Of the hashes that choose neighbors and the outcomes that were not observed. They are drawn here, once, so
        that all arms and seeds of a study meet the same drafts.

    Raises
    ------
    InputError
        Nothing was verified, no request is long enough, or the bank would be too large.

    Returns
    -------
    The bank, and what became of the log.
    """
    alpha, temperatures, bias = _acceptance(log)
    accepted, censored = _completed(log, alpha, seed)
    gamma, requests = log.gamma, log.starts.size - 1
    ends = log.position[log.starts[1:] - 1] + log.accepted[log.starts[1:] - 1] + 1
    lengths = ends - log.position[log.starts[:-1]]
    kept = np.flatnonzero(lengths > gamma + 1)
    if not kept.size:
        raise InputError(
            "no request of the log is long enough",
            field="position",
            value=f"{int(lengths.max())} tokens at most",
            expected=f"more than gamma + 1 = {gamma + 1}",
        )
    if int(lengths[kept].sum()) * gamma > _MOST_DRAFTS:
        longest = kept[np.argmax(lengths[kept])]
        raise InputError(
            f"{int(lengths[kept].sum())} positions of {gamma} drafts are too many for one bank (every position between "
            f"a request's first and last block counts; the longest has {int(lengths[longest])})",
            field="position",
            value=int(ends[longest] - 1),
            expected=f"at most {_MOST_DRAFTS // gamma} positions in all: fewer requests, or a part of the log",
        )
    rows = np.concatenate([_rows(log, int(r), int(lengths[r]), seed) for r in kept])
    domains = np.unique(log.domain[kept])
    blocks = np.concatenate([np.arange(log.starts[r], log.starts[r + 1]) for r in kept])
    k = np.arange(gamma)
    summary = LogSummary(
        requests=requests,
        dropped=requests - int(kept.size),
        blocks=int(blocks.size),
        rows=int(rows.size),
        censored=int(np.count_nonzero(censored[blocks])),
        missed=log.missed,
        observed=tuple(int(n) for n in (k < _seen(log)[:, None]).sum(axis=0)),
        temperatures=temperatures,
        bias=bias,
    )
    logits = np.clip(logit(log.confidence), -_LOGIT_LIMIT, _LOGIT_LIMIT)
    low, high = float(np.floor(logits.min())), float(np.ceil(logits.max()))
    header = BankHeader(
        gamma=gamma,
        kind="visited",
        drafter=drafter,
        target=target,
        source=source,
        license=license,
        domains=tuple(log.domains[i] for i in domains),
        logit_low=low,
        logit_high=max(high, low + 1),
        temperatures=(1.0,) * gamma,
        notes=json.dumps(
            {
                "visited": summary.blocks,
                "positions": summary.rows,
                "censored": summary.censored,
                "alpha": "confidences, calibrated on the log",
                "seed": seed,
            }
        ),
    )
    bank = make_bank(
        header,
        confidence_logit=logits[rows],
        alpha=alpha[rows],
        accepted=accepted[rows],
        bounds=np.concatenate([[0], np.cumsum(lengths[kept])]),
        domain=np.searchsorted(domains, log.domain[kept]),
    )
    return bank, summary


def _seen(log: ConfidenceLog) -> IntArray:
    """int64[B]: drafts whose outcome was observed: those accepted and, if it was verified, the first rejected one."""
    return np.minimum(log.verified, log.accepted + 1)


def _acceptance(log: ConfidenceLog) -> tuple[FloatArray, tuple[float, ...], tuple[float, ...]]:
    """Acceptance probabilities that the confidences stand for, and the map that makes them."""
    verified = int(np.count_nonzero(log.verified))
    if not verified:
        raise InputError("no draft of the log was verified", field="verified", value=0, expected="at least one above 0")
    # One fit to everything: nothing is forgotten, and the refit comes with the last block.
    reliability = OnlineSts((1.0,) * log.gamma, half_life=1e15, refit=verified)
    reliability.update(log.confidence, log.verified, log.accepted)
    alpha = reliability.apply(log.confidence).astype(np.float64)
    return alpha, reliability.temperatures, reliability.bias


def _completed(log: ConfidenceLog, alpha: FloatArray, seed: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """int64[B]: accepted drafts had all been verified, drawn where the log stops short; and bool[B]: where it does."""
    censored = (log.accepted == log.verified) & (log.verified < log.gamma)
    request = np.repeat(np.arange(log.starts.size - 1), np.diff(log.starts))
    k = np.arange(log.gamma)
    luck = uniform(seed, request[:, None], log.position[:, None], k[None, :])
    survives = np.where(k < log.accepted[:, None], True, luck < alpha)
    drawn = np.logical_and.accumulate(survives, axis=1).sum(axis=1)
    return np.where(censored, drawn, log.accepted), censored


def _rows(log: ConfidenceLog, request: int, length: int, seed: int) -> IntArray:
    """int64[length]: the block that stands at each position of a request, counted from its first logged one."""
    start, end = int(log.starts[request]), int(log.starts[request + 1])
    visited = log.position[start:end] - log.position[start]
    positions = np.arange(length)
    after = np.searchsorted(visited, positions)
    low, high = np.maximum(after - NEAR, 0), np.minimum(after + NEAR, visited.size)
    choice = hash64(seed + 1, request, positions) % (high - low).astype(np.uint64)
    block = low + choice.astype(np.int64)
    here = visited[np.minimum(after, visited.size - 1)] == positions
    return np.asarray(start + np.where(here, after, block), dtype=np.int64)
