"""Was a mixture of experts timed on dummy tokens? They are routed alike, so most experts are never read."""

from __future__ import annotations

import numpy as np

from dsim.lint.case import Case
from dsim.lint.decision import FloatArray
from dsim.lint.finding import Finding
from dsim.profile import IntArray
from dsim.wording import counted, percent

#: Expert reads that are this many times what the measured rise has room for are suspicious, and out of the question.
UNDERPRICED_WARNING, UNDERPRICED_ERROR = 2.0, 4.0


def dummy_tokens(case: Case) -> list[Finding]:
    """Timed on dummy tokens? They all go to the same experts, so a mixture of experts looks like a dense model."""
    found = []
    if "dummy" in case.profile.notes.lower():
        found.append(
            Finding(
                "dummy-profile",
                "warning",
                "the profile says that it was timed on dummy tokens: they are routed alike, so the weights of most "
                "experts are never read (a dense model does not mind)",
                _REAL_TEXT,
            )
        )
    points = case.points.take(~case.points.eager)
    if np.unique(points.tokens).size < points.tokens.size:  # the sizes of one batch, so that only the tokens vary
        points = points.take(points.requests == points.requests[0])
    tokens, ms = points.tokens, points.ms
    mixture = case.setting.mixture
    if tokens.size < 3:
        return found
    if mixture is not None and np.isfinite(mixture.read_ms(1)):
        found += _reads(case, tokens, ms)
    shape = _bend(tokens, ms, None if mixture is None else mixture.experts / mixture.active)
    if shape is None:
        return found
    first, last, high, early, late = shape
    if early < late:
        known = mixture is not None
        found.append(
            Finding(
                "dummy-profile",
                "warning" if known else "info",
                f"one more token costs {1e3 * early:.1f} us between {first} and {last} tokens and {1e3 * late:.1f} us "
                f"above {high}: a dense model's shape. In a mixture of experts the first tokens are the dear ones, "
                "because each loads experts that no other one needs",
                _REAL_TEXT
                if known
                else f"if the model is a mixture of experts (--experts), {_REAL_TEXT}; a dense model is like this",
                (first, last),
            )
        )
    return found


_REAL_TEXT = "time the steps again with real text of your workload, spread over different requests"


def _bend(tokens: IntArray, ms: FloatArray, scale: float | None) -> tuple[int, int, int, float, float] | None:
    """Slopes (ms a token) of the curve's beginning and end; None where the sizes do not show both.

    The beginning is the first two sizes, or more where they lie close: up to `scale` tokens (by then two thirds of the
    experts are read), or a sixteenth of the last size where no scale is known. The end is its upper half.
    """
    reach = tokens[-1] / 16 if scale is None else scale
    if scale is not None and tokens[0] > scale:
        return None  # most experts are read already by the smallest step
    end = max(1, int(np.searchsorted(tokens, reach, side="right")) - 1)
    start = max(end, int(np.searchsorted(tokens, tokens[-1] / 2, side="right")) - 1)
    if start >= tokens.size - 1:
        return None
    early = (ms[end] - ms[0]) / (tokens[end] - tokens[0])
    late = (ms[-1] - ms[start]) / (tokens[-1] - tokens[start])
    return int(tokens[0]), int(tokens[end]), int(tokens[start]), float(early), float(late)


def _reads(case: Case, tokens: IntArray, ms: FloatArray) -> list[Finding]:
    """Measured times against the time that the touched experts take to read."""
    mixture = case.setting.mixture
    assert mixture is not None
    reads = np.array([mixture.read_ms(float(size)) for size in tokens.tolist()])
    too_fast = np.flatnonzero(ms < reads)
    if too_fast.size:
        i = int(too_fast[np.argmax(reads[too_fast] / ms[too_fast])])
        return [
            Finding(
                "dummy-profile",
                "error",
                f"a step of {counted(int(tokens[i]), 'token')} reads {percent(mixture.touched(float(tokens[i])))} of "
                f"the experts, which takes {reads[i]:.2f} ms at {mixture.terabytes_s:g} TB/s, and was timed at "
                f"{ms[i]:.2f} ms: under-priced at least {reads[i] / ms[i]:.1f}x",
                _REAL_TEXT,
                (int(tokens[i]), int(tokens[i])),
            )
        ]
    rises, expected = ms[1:] - ms[0], reads[1:] - reads[0]
    inside = tokens[1:] <= 3 * mixture.experts / mixture.active
    if not inside.any():
        return []
    # Against the medians' own uncertainty: a rise below the noise counts as one of the noise's size.
    factor = expected[inside] / np.maximum(rises[inside], case.setting.noise * ms[0])
    i = int(np.argmax(factor))
    if factor[i] < UNDERPRICED_WARNING:
        return []
    size = int(tokens[1:][inside][i])
    return [
        Finding(
            "dummy-profile",
            "error" if factor[i] >= UNDERPRICED_ERROR else "warning",
            f"from {tokens[0]} to {counted(size, 'token')} the experts to read grow from "
            f"{percent(mixture.touched(float(tokens[0])))} to {percent(mixture.touched(float(size)))}, which takes "
            f"{expected[inside][i]:.2f} ms more; timed were {rises[inside][i]:.2f} ms more: the rise is under-priced "
            f"{factor[i]:.1f}x",
            _REAL_TEXT,
            (int(tokens[0]), size),
        )
    ]
