"""SGLang's files: the two kinds of SPS table, and temperatures.

Facts from the engine's source, https://github.com/sgl-project/sglang, directory
``python/sglang/srt/speculative/dspark_components`` (``dspark_sps.py``, ``dspark_sts.py``), and from pull request
35413, which measures additive tables while graphs are captured. The engine ignores fields that it does not know;
they are kept in `extra`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from dsim.engines.checks import (
    Number,
    need,
    need_int,
    need_number,
    need_numbers,
    need_sizes,
    require,
    rest_of,
)
from dsim.engines.table import FloatArray, PriceTable
from dsim.errors import InputError
from dsim.lookup import StepTable


@dataclass(frozen=True, kw_only=True)
class SglangDiagonal(PriceTable):
    """Steps per second by tokens in the step, timed along one diagonal (so many tokens a request).

    The price of a step is that of the next *smaller* probe: just before a probe the planner believes in the price of
    the one before. Below the first probe its price holds, above the last one that one's.

    Parameters
    ----------
    sample_batch_tokens
        Probes, tokens, strictly increasing, >= 1. A single one is what the engine calls uninitialized: a flat
        curve, under which it verifies everything.
    sample_steps_per_sec
        Steps per second at each, > 0.
    max_batch_tokens
        Largest step that the table was made for. The engine checks that it is at least the last probe and reads it
        for nothing else.

    Examples
    --------
    >>> table = SglangDiagonal(sample_batch_tokens=(2, 4), sample_steps_per_sec=(100.0, 50.0), max_batch_tokens=4)
    >>> table.prices(1, 5).tolist()
    [10.0, 10.0, 10.0, 10.0, 20.0, 20.0]
    """

    format: ClassVar[str] = "sglang-diagonal"

    sample_batch_tokens: tuple[int, ...]
    sample_steps_per_sec: tuple[Number, ...]
    max_batch_tokens: int

    __hash__ = None

    FIELDS: ClassVar[tuple[str, ...]] = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")

    def __post_init__(self) -> None:
        need_sizes(self.sample_batch_tokens, "sample_batch_tokens")
        need_numbers(self.sample_steps_per_sec, "sample_steps_per_sec", len(self.sample_batch_tokens), zero=False)
        need_int(self.max_batch_tokens, "max_batch_tokens", self.sample_batch_tokens[-1])

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SglangDiagonal:
        """From the file's object."""
        require(raw, cls.FIELDS)
        need_sizes(raw["sample_batch_tokens"], "sample_batch_tokens")
        need_numbers(raw["sample_steps_per_sec"], "sample_steps_per_sec", len(raw["sample_batch_tokens"]), zero=False)
        return cls(
            sample_batch_tokens=tuple(raw["sample_batch_tokens"]),
            sample_steps_per_sec=tuple(raw["sample_steps_per_sec"]),
            max_batch_tokens=raw["max_batch_tokens"],
            extra=rest_of(raw, cls.FIELDS),
        )

    def to_json(self) -> dict[str, Any]:
        """See `PriceTable.to_json`."""
        return {
            "sample_batch_tokens": list(self.sample_batch_tokens),
            "sample_steps_per_sec": list(self.sample_steps_per_sec),
            "max_batch_tokens": self.max_batch_tokens,
            **self.extra,
        }

    @property
    def depends_on_requests(self) -> bool:
        """Never: one price a token count."""
        return False

    @property
    def is_flat(self) -> bool:
        """See `PriceTable.is_flat`."""
        return len(set(self.sample_steps_per_sec)) == 1

    @property
    def largest(self) -> int:
        """See `PriceTable.largest`."""
        return self.sample_batch_tokens[-1]

    def _build(self, requests: int, last: int) -> FloatArray:
        ms = 1000.0 / np.array(self.sample_steps_per_sec, dtype=np.float64)
        return StepTable(np.array(self.sample_batch_tokens), ms, "floor").prices(last)


@dataclass(frozen=True, kw_only=True)
class SglangAdditive(PriceTable):
    """Seconds of a step as bias + alpha(requests) + theta(tokens).

    Both curves are linear between their probes and hold the first and the last value outside them. The draft pass is
    part of alpha where the engine made the table itself.

    Parameters
    ----------
    bias_seconds
        Seconds, > 0 (the engine refuses 0; its own tables have 1e-9).
    bs_probes, alpha_seconds
        Requests, strictly increasing, >= 1, and seconds, >= 0.
    m_probes, theta_seconds
        Tokens in the step, strictly increasing, >= 1, and seconds, >= 0.

    Examples
    --------
    >>> table = SglangAdditive(
    ...     bias_seconds=0.001,
    ...     bs_probes=(1, 3),
    ...     alpha_seconds=(0.0, 0.002),
    ...     m_probes=(1, 3),
    ...     theta_seconds=(0.004, 0.008),
    ... )
    >>> table.prices(2, 4).round(9).tolist()
    [6.0, 6.0, 8.0, 10.0, 10.0]
    """

    format: ClassVar[str] = "sglang-additive"

    bias_seconds: Number
    bs_probes: tuple[int, ...]
    alpha_seconds: tuple[Number, ...]
    m_probes: tuple[int, ...]
    theta_seconds: tuple[Number, ...]

    __hash__ = None

    FIELDS: ClassVar[tuple[str, ...]] = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")

    def __post_init__(self) -> None:
        need_number(self.bias_seconds, "bias_seconds", zero=False)
        for sizes, values in (("bs_probes", "alpha_seconds"), ("m_probes", "theta_seconds")):
            need_sizes(getattr(self, sizes), sizes)
            need_numbers(getattr(self, values), values, len(getattr(self, sizes)), zero=True)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SglangAdditive:
        """From the file's object."""
        require(raw, cls.FIELDS)
        for sizes, values in (("bs_probes", "alpha_seconds"), ("m_probes", "theta_seconds")):
            need_sizes(raw[sizes], sizes)
            need_numbers(raw[values], values, len(raw[sizes]), zero=True)
        return cls(
            bias_seconds=raw["bias_seconds"],
            bs_probes=tuple(raw["bs_probes"]),
            alpha_seconds=tuple(raw["alpha_seconds"]),
            m_probes=tuple(raw["m_probes"]),
            theta_seconds=tuple(raw["theta_seconds"]),
            extra=rest_of(raw, cls.FIELDS),
        )

    def to_json(self) -> dict[str, Any]:
        """See `PriceTable.to_json`."""
        return {
            "bias_seconds": self.bias_seconds,
            "bs_probes": list(self.bs_probes),
            "alpha_seconds": list(self.alpha_seconds),
            "m_probes": list(self.m_probes),
            "theta_seconds": list(self.theta_seconds),
            **self.extra,
        }

    @property
    def depends_on_requests(self) -> bool:
        """Whether alpha is more than a constant."""
        return len(set(self.alpha_seconds)) > 1

    @property
    def is_flat(self) -> bool:
        """See `PriceTable.is_flat`."""
        return len(set(self.theta_seconds)) == 1

    @property
    def largest(self) -> int:
        """See `PriceTable.largest`."""
        return self.m_probes[-1]

    def _build(self, requests: int, last: int) -> FloatArray:
        alpha = np.interp(requests, self.bs_probes, self.alpha_seconds)
        ms = 1000.0 * (float(self.bias_seconds) + alpha + np.array(self.theta_seconds, dtype=np.float64))
        return StepTable(np.array(self.m_probes), ms, "linear", hold=True).prices(last)


#: The two spellings of the one field of a file of temperatures: SGLang's, and TensorRT-LLM's.
SPELLINGS = ("temperatures", "sts_temperatures")


@dataclass(frozen=True, kw_only=True)
class StsTemperatures:
    """Temperatures of Sequential Temperature Scaling, as SGLang and TensorRT-LLM keep them.

    SGLang writes ``temperatures`` (and, optionally, ``dataset``, ``num_samples``, ``ece_before``, ``ece_after``),
    TensorRT-LLM ``sts_temperatures``, or both; either reads both. What dsim reads
    (`dsim.drafts.calibrate.read_temperatures`) is ``temperatures`` alone.

    Parameters
    ----------
    temperatures
        Divisors of the confidence logits by position, > 0.
    spellings
        Which of `SPELLINGS` the file has.
    extra
        All other fields, as they stand.
    """

    format: ClassVar[str] = "sts"

    temperatures: tuple[Number, ...]
    spellings: tuple[str, ...] = ("temperatures",)
    extra: Mapping[str, Any] = field(default_factory=dict)

    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        need_numbers(self.temperatures, self.spellings[0], len(self.temperatures), zero=False)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StsTemperatures:
        """From the file's object."""
        spellings = tuple(key for key in raw if key in SPELLINGS)
        if not spellings:
            raise InputError("is missing", field=SPELLINGS[0])
        for key in spellings:
            need(isinstance(raw[key], list) and bool(raw[key]), key, raw[key], "a list of finite numbers > 0")
            need_numbers(raw[key], key, len(raw[key]), zero=False)
        first = raw[spellings[0]]
        for key in spellings[1:]:
            need(raw[key] == first, key, raw[key], f"the same numbers as in '{spellings[0]}'")
        if "max_draft_len" in raw:
            need(
                raw["max_draft_len"] == len(first), "max_draft_len", raw["max_draft_len"], f"{len(first)} temperatures"
            )
        return cls(temperatures=tuple(first), spellings=spellings, extra=rest_of(raw, SPELLINGS))

    def to_json(self) -> dict[str, Any]:
        """The file's object."""
        return {**{key: list(self.temperatures) for key in self.spellings}, **self.extra}
