"""Timed forward passes, and what must hold for them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.errors import InputError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
StrArray = npt.NDArray[np.str_]

SAMPLE_KINDS = ("verify", "draft", "prefill")

#: Stands in the integer arrays where a cell of the CSV is empty.
MISSING = -1

SIZE_EXPECTED = "an integer >= 1"
REPEAT_EXPECTED = "an integer >= 0"
MS_EXPECTED = "a finite number > 0"

#: Most tokens or requests of a step, and most of anything else that is counted: prices are arrays as long as a step.
LARGEST_STEP, LARGEST_COUNT = 1 << 22, 1 << 30
#: Milliseconds of a pass: a nanosecond at least, eleven days at most.
SHORTEST_MS, LONGEST_MS = 1e-6, 1e9


def size_limit(kind: str, name: str) -> int:
    """The largest value of a column of integers, in samples of a kind."""
    return LARGEST_STEP if kind != "prefill" and name in ("tokens", "requests") else LARGEST_COUNT


@dataclass(frozen=True, eq=False)
class Samples:
    """Timed forward passes as aligned arrays, one entry a pass.

    Parameters
    ----------
    kind
        str[N]: ``verify`` (the target scores a batch), ``draft`` (one pass of the drafter) or ``prefill``
        (one prompt alone).
    tokens
        int64[N]: tokens in the pass; `MISSING` is allowed for drafts, whose size is `requests`.
    requests
        int64[N]: requests in the pass; `MISSING` where the measurement does not say.
    context_tokens
        int64[N]: tokens already in each request's KV cache; `MISSING` where the measurement does not say.
    ms
        float64[N]: duration, milliseconds.
    repeat
        int64[N]: number of the pass among those of its size; the lowest is the first, cold one.
    """

    kind: StrArray
    tokens: IntArray
    requests: IntArray
    context_tokens: IntArray
    ms: FloatArray
    repeat: IntArray

    def __post_init__(self) -> None:
        for item in fields(self):
            dtype = {"kind": np.str_, "ms": np.float64}.get(item.name, np.int64)
            given = np.asarray(getattr(self, item.name))
            if dtype is np.int64 and given.dtype == object:  # an integer that no int64 holds, among others
                raise InputError(field=item.name, value=given.tolist(), expected=f"integers of at most {LARGEST_COUNT}")
            with np.errstate(invalid="ignore"):  # NaN in a column of integers is refused below
                array: npt.NDArray[Any] = given.astype(dtype)
            if dtype is np.int64 and given.size and not np.array_equal(given, array):
                raise InputError(field=item.name, value=given.tolist(), expected="integers")
            array.setflags(write=False)
            object.__setattr__(self, item.name, array)
        shapes = {item.name: getattr(self, item.name).shape for item in fields(self)}
        if len(set(shapes.values())) != 1 or self.ms.ndim != 1:
            raise InputError(field="samples", value=shapes, expected="six one-dimensional arrays of one length")

    def __len__(self) -> int:
        return int(self.ms.size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Samples) and all(
            np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]

    def of(self, kind: str) -> Samples:
        """The samples of one kind, in their order."""
        keep = self.kind == kind
        return Samples(**{item.name: getattr(self, item.name)[keep] for item in fields(self)})


def check_samples(samples: Samples, file: str | None = None, lines: Sequence[int] | None = None) -> None:
    """Refuse what several cells or rows get wrong together, and whatever arrays built in memory get wrong alone.

    `file` and `lines` (of each sample) are where the samples were read from, for the errors.
    """

    def refuse(index: int, message: str | None, name: str, value: object, expected: str) -> InputError:
        line = lines[index] if lines is not None else None
        return InputError(message, file=file, line=line, field=name, value=value, expected=expected)

    previous: dict[tuple[str, int], tuple[int, int]] = {}
    seen: dict[tuple[str, int, tuple[int, int], int], int] = {}
    given: dict[tuple[str, str], bool] = {}
    for i in range(len(samples)):
        kind, repeat, ms = str(samples.kind[i]), int(samples.repeat[i]), float(samples.ms[i])
        tokens, requests = int(samples.tokens[i]), int(samples.requests[i])
        context = int(samples.context_tokens[i])
        if kind not in SAMPLE_KINDS:
            raise refuse(i, None, "kind", kind, f"one of {', '.join(SAMPLE_KINDS)}")
        main = "requests" if kind == "draft" else "tokens"
        for name, value in (("tokens", tokens), ("requests", requests), ("context_tokens", context)):
            if value < 1 and (value != MISSING or name == main):
                raise refuse(i, None, name, value, SIZE_EXPECTED)
            if value > size_limit(kind, name):
                raise refuse(i, None, name, value, f"at most {size_limit(kind, name)}")
        if repeat < 0:
            raise refuse(i, None, "repeat", repeat, REPEAT_EXPECTED)
        if not math.isfinite(ms) or ms <= 0:
            raise refuse(i, None, "ms", ms, MS_EXPECTED)
        if not SHORTEST_MS <= ms <= LONGEST_MS:
            raise refuse(i, None, "ms", ms, f"a number from {SHORTEST_MS:g} to {LONGEST_MS:g}")

        for name, value in (("requests", requests), ("context_tokens", context)):
            if given.setdefault((kind, name), value != MISSING) != (value != MISSING):
                raise refuse(
                    i,
                    f"some {kind} samples give {name} and some do not",
                    name,
                    "" if value == MISSING else value,
                    "a value in every row or in none",
                )
        size = (requests, tokens) if kind == "draft" else (tokens, requests)
        if size < previous.get((kind, context), size):
            before = previous[kind, context]
            at = 1 if size[0] == before[0] else 0
            name = main if at == 0 else ("tokens" if kind == "draft" else "requests")
            raise refuse(
                i,
                f"the sizes of the {kind} samples are not increasing",
                name,
                size[at],
                f"{before[at]} or more, the size of the row before",
            )
        previous[kind, context] = size
        key = (kind, context, size, repeat)
        if key in seen:
            where = f"line {lines[seen[key]]}" if lines is not None else f"sample {seen[key]}"
            raise refuse(
                i,
                f"{kind} sample of this size, context and repeat stands already at {where}",
                "repeat",
                repeat,
                "a repeat number of its own",
            )
        seen[key] = i
    if "verify" not in samples.kind:
        raise InputError("has no verify samples", file=file, field="kind", expected="at least one 'verify' row")
