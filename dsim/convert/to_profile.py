"""An engine's cost table as a `Profile`: samples at the table's own sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dsim.convert.from_profile import steps_per_second
from dsim.engines import PriceTable, SglangAdditive, SglangDiagonal, TrtllmV1, TrtllmV2, VllmProfileCache
from dsim.engines.checks import LARGEST_SIZE, is_int
from dsim.errors import InputError
from dsim.profile import MISSING, Profile, Samples

#: A sample: kind, tokens, requests, context, milliseconds.
_Sample = tuple[str, int, int, int, float]


def to_profile(
    table: PriceTable,
    name: str,
    *,
    source: str,
    gamma: int | None = None,
    identity: Mapping[str, Any] | None = None,
) -> tuple[Profile, list[str]]:
    """A profile with one sample a size of the table.

    Parameters
    ----------
    table
        What an engine's file holds.
    name
        Of the profile.
    source
        What to call the file.
    gamma
        Block size that a diagonal table was timed at: tokens = (gamma + 1) x requests. None: requests are not given.
    identity
        Keys of the profile's TOML file to set instead of what the engine's file tells.

    Raises
    ------
    InputError
        `gamma` for another table than a diagonal one, or one that its sizes do not fit.
    """
    if gamma is not None and not isinstance(table, SglangDiagonal):
        raise InputError("only a diagonal table has one", field="--gamma", value=gamma, expected="no --gamma")
    found: dict[str, Any] = {
        "hardware": "not named",
        "gpus": 1,
        "model": "not named",
        "kind": "measured",
        "captured_sizes": [],
        "draft_included": True,
        "source": source,
        "license": "not named",
        "notes": f"From an engine's file, format {table.format}; gpus = 1 unless the file names them.",
    }
    if isinstance(table, SglangDiagonal):
        samples, more, told = _diagonal(table, gamma)
        if "draft_included" not in (identity or {}):
            told.append(
                "draft_included = true: the table does not say whether its steps include the draft, which has no price"
            )
    elif isinstance(table, SglangAdditive | TrtllmV1):
        samples, more, told = _additive(table)
    elif isinstance(table, TrtllmV2):
        samples, more, told = _exact(table)
    elif isinstance(table, VllmProfileCache):
        samples, more, told = _curves(table)
    else:
        raise InputError(f"the format {table.format} has no profile", value=table.format)
    if table.extra:
        told.append(f"fields that are no prices are dropped: {', '.join(table.extra)}")
    found |= more | dict(identity or {})
    sizes = found["captured_sizes"]
    kinds, tokens, requests, contexts, ms = zip(*samples, strict=True)
    profile = Profile(
        name=name,
        samples=Samples(
            kind=np.array(kinds),
            tokens=np.array(tokens),
            requests=np.array(requests),
            context_tokens=np.array(contexts),
            ms=np.array(ms, dtype=np.float64),
            repeat=np.zeros(len(samples), dtype=np.int64),
        ),
        capture_limit=sizes[-1] if sizes else 0,
        **found,
    )
    return profile, told


def _diagonal(table: SglangDiagonal, gamma: int | None) -> tuple[list[_Sample], dict[str, Any], list[str]]:
    samples = []
    for tokens, rate in zip(table.sample_batch_tokens, table.sample_steps_per_sec, strict=True):
        if gamma is not None and tokens % (gamma + 1):
            raise InputError(
                f"the table has a size of {tokens} tokens, which is no multiple of {gamma + 1}",
                field="--gamma",
                value=gamma,
                expected="the block size that the table was timed at",
            )
        samples.append(("verify", tokens, MISSING if gamma is None else tokens // (gamma + 1), MISSING, 1000.0 / rate))
    told = []
    if gamma is None:
        told.append("requests are not given: the table does not say how many (--gamma N: tokens = (N + 1) x requests)")
    if table.max_batch_tokens != table.largest:
        told.append(f"max_batch_tokens = {table.max_batch_tokens} is dropped (the engine reads it for nothing)")
    inexact = [
        f"{rate!r}"
        for rate, (*_, ms) in zip(table.sample_steps_per_sec, samples, strict=True)
        if steps_per_second(ms) != rate
    ]
    if inexact:
        told.append(
            f"{len(inexact)} rates come back from milliseconds with another last digit: {', '.join(inexact[:3])}"
        )
    return samples, {"engine": "SGLang"}, told


def _additive(table: SglangAdditive | TrtllmV1) -> tuple[list[_Sample], dict[str, Any], list[str]]:
    told = ["how the constant is split over bias, alpha and theta is dropped: only their sum is a step's time"]
    if isinstance(table, SglangAdditive):
        engine, tokens, batches = "SGLang", list(table.m_probes), list(table.bs_probes)
    else:
        engine, tokens, batches = "TensorRT-LLM", list(table.token_counts), list(table.batch_sizes or ())
        if table.minimum_predicted_gain is not None:
            told.append(f"minimum_predicted_gain = {table.minimum_predicted_gain} is dropped")
        if not table.interpolated:
            told.append(
                "_meta.lookup is not 'interp': an early engine may be meant, which took the next smaller size's time; "
                "prices are those of today's straight lines"
            )
        if tokens[0] == 0:
            tokens[0] = 1
            tokens = sorted(set(tokens))
            told.append("the size of 0 tokens is dropped: 1 token costs what the line from it says")
    if len(batches) < 2:
        batches = [MISSING]
        told.append("requests are not given: the table has one batch size at most, so prices do not depend on it")
    base = batches[0]
    # Two axes determine alpha and theta; the rest of the grid would say it again.
    at = next((size for size in tokens if size >= batches[-1]), tokens[-1])
    pairs = sorted({(size, base) for size in tokens} | {(at, batch) for batch in batches})
    samples = [("verify", m, r, MISSING, float(table.prices(max(r, 0), m)[m])) for m, r in pairs]
    what = f"bias + alpha + theta, summed on two axes ({base} requests; {at} tokens)" if base != MISSING else "sums"
    more = {"engine": engine, "kind": "derived", "notes": f"Not samples: {what}. The drafter is part of alpha."}
    return samples, more, told


def _exact(table: TrtllmV2) -> tuple[list[_Sample], dict[str, Any], list[str]]:
    most, found = table.max_draft_len + 1, table.engine_fingerprint
    cells, controls = [], 0
    for graph, (budgets, ms) in table.cost_tables.items():
        for budget, time in zip(budgets, ms, strict=True):
            if budget == graph * most:
                controls += 1
            else:
                cells.append((budget or graph * most, graph, float(time)))
    told = ["minimum_predicted_gain, engine_fingerprint and the origins of the measurements are dropped"]
    if table.iteration_drain_guard is not None:
        told.append("iteration_drain_guard is dropped")
    if controls:
        told.append(f"{controls} cells that submit the whole block are dropped: the native path runs there")
    more = {
        "engine": f"TensorRT-LLM {found['source_head']}",
        "hardware": f"{found['gpu']}, one of {found['gpu_count']} ranks ({found['topology']})",
        "notes": "Whole steps of one rank at exact graphs; a whole block is the native path. gpus = 1: a rank.",
    }
    return [("verify", m, r, MISSING, ms) for m, r, ms in sorted(cells)], more, told


def _curves(table: VllmProfileCache) -> tuple[list[_Sample], dict[str, Any], list[str]]:
    factors = table.factors or {}

    def part(section: str, key: str) -> Any:
        inner = factors.get(section)
        return inner.get(key) if isinstance(inner, Mapping) else None

    told = []
    context = part("profile", "context_len")
    if not _is_size(context):
        if context is not None:
            told.append(f"factors.profile.context_len = {context!r} is dropped: it is no number of tokens")
        context = MISSING
    samples: list[_Sample] = [("verify", m, MISSING, context, float(ms)) for m, ms in table.verify_curve]
    samples += [("draft", MISSING, r, context, float(ms)) for r, ms in table.draft_curve]
    more: dict[str, Any] = {"engine": "vLLM", "captured_sizes": list(table.captured_sizes), "draft_included": False}
    if isinstance(part("software", "vllm"), str):
        more["engine"] = f"vLLM {part('software', 'vllm')}"
    if isinstance(part("hardware", "device_name"), str) and part("hardware", "device_name"):
        more["hardware"] = part("hardware", "device_name")
    if isinstance(part("model", "model"), str) and part("model", "model"):
        more["model"] = part("model", "model")
    ranks = [part("parallel", key) for key in ("tp", "pp")]
    if all(_is_size(rank) for rank in ranks):
        more["gpus"] = ranks[0] * ranks[1]
    if not table.captured_sizes:
        told.append("captured sizes are not given: the file has no factors.profile.capture_sizes")
    if table.factors is not None or table.signed:
        told.append("factors, fingerprint and checksum are dropped (--like FILE puts them back)")
    return samples, more, told


def _is_size(value: object) -> bool:
    return isinstance(value, int) and is_int(value) and 1 <= value <= LARGEST_SIZE
