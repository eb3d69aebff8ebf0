"""vLLM's profile cache: what its start-up profiling measured for adaptive verification.

Facts from the engine's source, https://github.com/vllm-project/vllm, pull request 52233 (the cache file,
``vllm/v1/worker/adaptive_verification_profile_cache.py``) and pull request 47808 (how the curves become prices,
``vllm/v1/worker/gpu/spec_decode/adaptive_verification.py``). The engine takes a file only if ``schema`` is 1, its
``factors`` equal those of the running engine, ``fingerprint`` is their SHA-256 and ``checksum`` that of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dsim.engines.checks import (
    Number,
    digest,
    is_int,
    need,
    need_finite,
    need_int,
    need_list,
    need_number,
    need_sha256,
    need_sizes,
    require,
    rest_of,
)
from dsim.engines.table import FloatArray, PriceTable
from dsim.lookup import StepTable, captured_then_linear

SCHEMA = 1

Curve = tuple[tuple[int, Number], ...]


@dataclass(frozen=True, kw_only=True)
class VllmProfileCache(PriceTable):
    """Milliseconds of the draft pass by requests, and of the target's pass by tokens in the step.

    A step costs draft[requests] + verify[tokens]. Both curves are priced at the next profiled size, under a running
    maximum. Above the capture limit the verify curve is linear between the sizes above it, and from the limit to the
    first of them that one's price holds. Beyond the last size the line through the last two goes on.

    Parameters
    ----------
    draft_curve, verify_curve
        (requests, ms) and (tokens, ms), sizes strictly increasing, >= 1, ms > 0: medians, without the running maximum.
    schema, fingerprint, factors
        What the engine recognizes itself by; None where the file has none.
    signed
        Whether the file has a ``checksum``. It is computed when written.

    Examples
    --------
    >>> cache = VllmProfileCache(draft_curve=((1, 1.0), (4, 2.0)), verify_curve=((2, 10.0), (4, 20.0)))
    >>> cache.prices(3, 5).tolist()
    [12.0, 12.0, 12.0, 22.0, 22.0, 27.0]
    """

    format: ClassVar[str] = "vllm"

    draft_curve: Curve
    verify_curve: Curve
    schema: int | None = None
    fingerprint: str | None = None
    factors: Mapping[str, Any] | None = None
    signed: bool = False

    __hash__ = None

    FIELDS: ClassVar[tuple[str, ...]] = ("draft_curve", "verify_curve", "schema", "fingerprint", "factors", "checksum")

    def __post_init__(self) -> None:
        for name in ("draft_curve", "verify_curve"):
            _check_curve(getattr(self, name), name)
        need(
            self.schema is None or (is_int(self.schema) and self.schema == SCHEMA),
            "schema",
            self.schema,
            f"{SCHEMA} (dsim reads no other)",
        )
        if self.factors is not None:
            need(isinstance(self.factors, Mapping), "factors", self.factors, "an object")
            need_finite(self.factors, "factors")
            sizes = self._profiled("capture_sizes")
            if sizes is not None and sizes != []:
                need_sizes(sizes, "factors.profile.capture_sizes")
        if self.fingerprint is not None:
            need_sha256(self.fingerprint, "fingerprint")
        if self.fingerprint is not None and self.factors is not None:
            expected = digest(self.factors)
            need(self.fingerprint == expected, "fingerprint", self.fingerprint, f"the SHA-256 of 'factors', {expected}")

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> VllmProfileCache:
        """From the file's object."""
        require(raw, ("draft_curve", "verify_curve"))
        found: dict[str, Any] = {key: raw[key] for key in ("schema", "fingerprint", "factors") if key in raw}
        for key, value in found.items():
            need(value is not None, key, value, "a value, or no such field")
        found |= {name: _check_curve(raw[name], name) for name in ("draft_curve", "verify_curve")}
        cache = cls(**found, signed="checksum" in raw, extra=rest_of(raw, cls.FIELDS))
        if cache.signed:
            expected = cache.to_json()["checksum"]
            what = f"{expected} (somebody changed the file; the engine ignores it, dsim reads it without 'checksum')"
            need(raw["checksum"] == expected, "checksum", raw["checksum"], what)
        return cache

    def to_json(self) -> dict[str, Any]:
        """See `PriceTable.to_json`."""
        found: dict[str, Any] = {}
        for key in ("schema", "fingerprint", "factors"):
            if getattr(self, key) is not None:
                found[key] = getattr(self, key)
        found["draft_curve"] = [list(point) for point in self.draft_curve]
        found["verify_curve"] = [list(point) for point in self.verify_curve]
        found |= self.extra
        if self.signed:
            found["checksum"] = digest(found)
        return found

    def _profiled(self, key: str) -> Any:
        profile = (self.factors or {}).get("profile")
        return profile.get(key) if isinstance(profile, Mapping) else None

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Token counts with a captured graph, as ``factors`` name them; empty where they do not."""
        return tuple(self._profiled("capture_sizes") or ())

    @property
    def capture_limit(self) -> int:
        """The largest of them; 0 where none is named: every size is then priced at the next one."""
        return self.captured_sizes[-1] if self.captured_sizes else 0

    @property
    def is_flat(self) -> bool:
        """See `PriceTable.is_flat`."""
        return max(ms for _, ms in self.verify_curve) == self.verify_curve[0][1]

    @property
    def largest(self) -> int:
        """See `PriceTable.largest`."""
        return self.verify_curve[-1][0]

    def draft_ms(self, requests: int) -> float:
        """Milliseconds of the draft pass of so many requests."""
        need_int(requests, "requests", 0)
        sizes, ms = _columns(self.draft_curve)
        return float(StepTable(sizes, ms, "next", running_max=True).prices(requests)[requests])

    def verify_prices(self, last: int) -> FloatArray:
        """float64[last + 1]: milliseconds of the target's pass by the tokens in it."""
        return captured_then_linear(*_columns(self.verify_curve), self.capture_limit, last)

    def _build(self, requests: int, last: int) -> FloatArray:
        return self.verify_prices(last) + self.draft_ms(requests)


def _check_curve(curve: Any, name: str) -> Curve:
    need_list(curve, name, of="[size, milliseconds] pairs")
    last = 0
    for i, point in enumerate(curve):
        pair = isinstance(point, list | tuple) and len(point) == 2
        need(pair, f"{name}[{i}]", point, "[size, milliseconds]")
        size, ms = point
        expected = "an integer >= 1" if i == 0 else f"an integer > {last} (sizes must increase)"
        need(is_int(size) and size > last, f"{name}[{i}][0]", size, expected)
        need_int(size, f"{name}[{i}][0]", 1)
        need_number(ms, f"{name}[{i}][1]", zero=False)
        last = size
    return tuple((size, ms) for size, ms in curve)


def _columns(curve: Curve) -> tuple[np.ndarray[Any, np.dtype[np.int64]], FloatArray]:
    sizes, ms = zip(*curve, strict=True)
    return np.array(sizes, dtype=np.int64), np.array(ms, dtype=np.float64)
