"""Rooflines: a smooth step time from a memory term, a compute term and an overhead, in two forms.

``roofline`` is the textbook one, whose memory term is a straight line. ``roofline-moe`` adds the experts that a
growing batch touches. Which one a user wants is a choice and never follows from the number of sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import scipy

from dsim.cost.model import StepModel
from dsim.cost.points import Curve, Points, price_between
from dsim.errors import InputError
from dsim.profile import FloatArray, IntArray

#: The two forms, and the fewest captured sizes that each is fitted to.
MIN_SIZES = {"roofline": 4, "roofline-moe": 10}

# Relative residuals above this count less and less (soft L1): the measured staircase has steps of a few
# percent that a smooth curve is not meant to follow.
_ROBUST_SCALE = 0.03
# Weight of the preference for calling constant time overhead (see Roofline). Far below any residual.
_TIE_BREAK = 1e-3
# The compute term is kept where the robust cost of the fit falls by this share with it, and is reported as
# weakly supported up to the second number.
_MIN_GAIN, _WEAK_GAIN = 0.005, 0.1


@dataclass(frozen=True, eq=False)
class Roofline:
    """T(B) = overhead + max(m0 + m1 (1 - exp(-B / b0)) + m2 B, c1 B) for B tokens, milliseconds.

    Parameters
    ----------
    form
        ``roofline`` (m1 is 0, and b0 has no effect) or ``roofline-moe``.
    points
        The medians that were fitted (captured sizes), and those above the limit.
    overhead
        Time that neither bandwidth nor arithmetic explains: launches, collectives.
    m0, m1, b0, m2
        Memory term. In a mixture of experts B tokens touch about 1 - exp(-B / b0) of the experts, so the
        weights to read grow by m1 and saturate; m2 is traffic per token; m0 weights that are always read.
    c1
        Compute term per token; 0 where the measurements are no worse explained without it.
    compute_gain
        By how much the compute term lowers the robust cost of the fit, as a fraction. Near 0 it is weakly
        supported.
    eager_ms
        float64[E]: prices of the points above the capture limit (running maximum); the law leaves them alone.

    Notes
    -----
    Without a compute term, m0 and the overhead are one constant; it is then counted as overhead, so that a
    what-if does not speed up what was not shown to be bandwidth.
    """

    form: str
    points: Points
    overhead: float
    m0: float
    m1: float
    b0: float
    m2: float
    c1: float
    compute_gain: float
    eager_ms: FloatArray

    @property
    def saturates(self) -> bool:
        """Whether the memory term has the part that saturates."""
        return self.form == "roofline-moe"

    @property
    def parameters(self) -> FloatArray:
        """float64[6]: overhead, m0, m1, b0, m2, c1."""
        return np.array([self.overhead, self.m0, self.m1, self.b0, self.m2, self.c1])

    @property
    def compute_bound_from(self) -> int | None:
        """Fewest tokens at which the compute term exceeds the memory term, within the fitted sizes."""
        tokens = np.arange(1, int(self.points.tokens[~self.points.eager][-1]) + 1)
        above = np.flatnonzero(self.c1 * tokens > _memory(self.parameters, tokens))
        return int(tokens[above[0]]) if above.size else None

    def smooth(self, tokens: IntArray) -> FloatArray:
        """The law itself, at any number of tokens."""
        return _law(self.parameters, tokens)

    @property
    def depends_on_requests(self) -> bool:
        """Never."""
        return False

    def price(self, requests: int, tokens: IntArray) -> FloatArray:
        """Milliseconds at each of `tokens`; `requests` has no effect."""
        # Below the smallest profiled step its price holds, as in the other fits.
        ms = self.smooth(np.maximum(tokens, self.points.tokens[0]))
        eager = self.points.eager
        if eager.any():
            above = tokens > self.points.limit
            at_limit = self.smooth(np.array([self.points.limit]))[0]
            kept = price_between(self.points.tokens[eager], self.eager_ms, tokens[above], stepped=False)
            ms[above] = np.maximum(kept, at_limit)
        return ms

    def refit(self, points: Points) -> Roofline | None:
        """The same form fitted to other points, started from this law; None with fewer points than parameters."""
        inside = points.take(~points.eager)
        if inside.tokens.size < (6 if self.saturates else 4):
            return None
        x, _ = _minimize(inside, [self.parameters], saturates=self.saturates, compute=self.c1 > 0.0)
        return _build(self.form, points, x, self.compute_gain)


class RooflineModel(StepModel):
    """A `StepModel` whose laws are rooflines, and which answers what-ifs."""

    @property
    def laws(self) -> tuple[Roofline, ...]:
        """One roofline for each context."""
        return tuple(law for law in self.fits if isinstance(law, Roofline))

    def on_hardware(self, *, bandwidth: float = 1.0, compute: float = 1.0, name: str) -> RooflineModel:
        """The same engine and model on other hardware: an estimate, and labeled so.

        Parameters
        ----------
        bandwidth, compute
            Memory bandwidth and arithmetic throughput of the other hardware as multiples of this one's.
        name
            Its name, for the label.

        Notes
        -----
        The memory term is divided by `bandwidth` and the compute term by `compute`. Overhead and the eager
        branch stay: launches do not speed up. The form stays, and ends the label. Of the draft curve, what the
        smallest batch costs stays and the rest is divided by the smaller factor; of measured prefills, the
        shortest stays and the rest is divided by `compute`.

        Raises
        ------
        InputError
            Factors that are not positive or both 1, or a compute factor where the profile shows no compute
            bound.
        """
        for field, factor in (("bandwidth", bandwidth), ("compute", compute)):
            if not np.isfinite(factor) or factor <= 0:
                raise InputError(field=field, value=factor, expected="a finite number > 0")
        if bandwidth == 1.0 and compute == 1.0:
            raise InputError("changes nothing", field="bandwidth", value=1.0, expected="a factor other than 1")
        if not name.strip() or ":" in name:
            raise InputError(field="name", value=name, expected="the other hardware's name, without ':'")
        if compute != 1.0 and all(law.c1 == 0.0 for law in self.laws):
            raise InputError(
                f"{self.label} never becomes compute-bound, so nothing is known about another compute speed",
                field="compute",
                value=compute,
                expected="1, or a profile that reaches the compute bound",
            )
        laws = tuple(
            replace(
                law,
                m0=law.m0 / bandwidth,
                m1=law.m1 / bandwidth,
                m2=law.m2 / bandwidth,
                c1=law.c1 / compute,
            )
            for law in self.laws
        )
        profile, form = self.label.split(":")[-2:]
        return replace(
            self,
            label=f"what-if:{name}:{profile}:{form}",
            fits=laws,
            draft=_scaled(self.draft, min(bandwidth, compute)),
            prefill=_scaled(self.prefill, compute),
            notes=(
                f"bandwidth x {bandwidth:g}, compute x {compute:g}: an estimate, not a measurement",
                *(f"measured: {note}" for note in self.notes),
            ),
        )


def fit_roofline(points: Points, profile_name: str, form: str) -> tuple[Roofline, tuple[str, ...]]:
    """Robust bounded least squares on relative errors, from a fixed set of starting points.

    Parameters
    ----------
    points, profile_name
        What to fit, and its name for errors.
    form
        ``roofline`` or ``roofline-moe``.

    Returns
    -------
    The law, and notes on what it does not determine.

    Raises
    ------
    InputError
        Fewer captured sizes than `MIN_SIZES` of the form.
    """
    inside = points.take(~points.eager)
    if inside.tokens.size < MIN_SIZES[form]:
        raise InputError(
            f"too few sizes for the {form} fit",
            file=profile_name,
            field="tokens",
            value=f"{inside.tokens.size} sizes",
            expected=f"at least {MIN_SIZES[form]} verify sizes up to the capture limit",
        )
    saturates = form == "roofline-moe"
    starts = _starts(inside, saturates=saturates)
    without, cost_without = _minimize(inside, starts, saturates=saturates, compute=False)
    x, cost = _minimize(inside, starts, saturates=saturates, compute=True)
    gain = 1.0 - cost / cost_without if cost_without > 0.0 else 0.0
    law = _build(form, points, x, gain)
    if gain < _MIN_GAIN or law.compute_bound_from is None:
        law = _build(form, points, without, 0.0)
    notes = []
    if law.c1 == 0.0:
        notes.append("no compute bound seen within the profiled sizes: compute what-ifs are refused")
    elif law.compute_gain < _WEAK_GAIN:
        notes.append(
            f"compute bound from {law.compute_bound_from} tokens is weakly supported "
            f"(it lowers the robust cost of the fit by {100 * law.compute_gain:.1f} %)"
        )
    return law, tuple(notes)


def _memory(x: FloatArray, tokens: IntArray) -> FloatArray:
    _, m0, m1, b0, m2, _ = x
    return np.asarray(m0 - m1 * np.expm1(-tokens / b0) + m2 * tokens)


def _law(x: FloatArray, tokens: IntArray) -> FloatArray:
    return np.asarray(x[0] + np.maximum(_memory(x, tokens), x[5] * tokens))


def _gradient(x: FloatArray, tokens: IntArray) -> FloatArray:
    """float64[tokens, 6]: derivatives of `_law` by its parameters (at a kink those of the memory term)."""
    _, _, m1, b0, _, c1 = x
    decay = np.exp(-tokens / b0)
    memory = (_memory(x, tokens) >= c1 * tokens).astype(np.float64)
    columns = [
        np.ones(tokens.size),
        memory,
        memory * (1.0 - decay),
        memory * (-m1 * decay * tokens / b0**2),
        memory * tokens,
        (1.0 - memory) * tokens,
    ]
    return np.stack(columns, axis=1)


def _starts(points: Points, *, saturates: bool) -> list[FloatArray]:
    """Starts that differ in where the curve bends: by saturation, or only where the compute bound begins."""
    first, last = float(points.ms[0]), float(points.ms[-1])
    largest = float(points.tokens[-1])
    rise = max(last - first, 1e-6)
    slope = rise / largest
    if saturates:  # over scales of the saturation, with the compute bound early, late or beyond the sizes
        return [
            np.array([0.8 * first, 0.1 * first, 0.5 * rise, scale * largest, 0.5 * slope, c * slope])
            for scale in (0.03, 0.1, 0.3)
            for c in (0.5, 1.0, 1.5)
        ]
    starts = []
    for share in (0.1, 0.5, 0.9):  # of the first step's time, called overhead
        overhead, m0 = share * first, (1.0 - share) * first
        c1 = (last - overhead) / largest
        for bend in (0.1, 0.3, 0.6):  # of the largest size: the two lines through the ends meet there
            starts.append(np.array([overhead, m0, 0.0, largest, max(c1 - m0 / (bend * largest), 0.0), c1]))
    return starts


def _minimize(points: Points, starts: list[FloatArray], *, saturates: bool, compute: bool) -> tuple[FloatArray, float]:
    top, largest = float(points.ms.max()), float(points.tokens[-1])
    unit = np.array([top, top, top, largest, top / largest, top / largest])
    # In units of the curve's own size. b0 beyond the last size would only be a second linear term.
    low = np.array([0.0, 0.0, 0.0, 1.0 / largest, 0.0, 0.0])
    high = np.array([1.0, 1.0, 3.0, 1.0, 3.0, 3.0])
    free = np.array([True, compute, saturates, saturates, True, compute])

    def full(z: FloatArray) -> FloatArray:
        x = np.array([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
        x[free] = z
        return np.asarray(x * unit, dtype=np.float64)

    def residuals(z: FloatArray) -> FloatArray:
        x = full(z)
        relative = _law(x, points.tokens) / points.ms - 1.0
        return np.append(relative, _TIE_BREAK * x[1] / top)

    def jacobian(z: FloatArray) -> FloatArray:
        x = full(z)
        slopes = _gradient(x, points.tokens) / points.ms[:, None]
        tie = np.array([0.0, _TIE_BREAK / top, 0.0, 0.0, 0.0, 0.0])
        return np.asarray((np.vstack([slopes, tie]) * unit)[:, free])

    best: tuple[FloatArray, float] | None = None
    for start in starts:
        z0 = np.clip(start / unit, low + 1e-9, high - 1e-9)[free]
        found = scipy.optimize.least_squares(
            residuals,
            z0,
            jac=jacobian,
            bounds=(low[free], high[free]),
            loss="soft_l1",
            f_scale=_ROBUST_SCALE,
            xtol=1e-10,
            ftol=1e-10,
            gtol=1e-10,
            max_nfev=300,
        )
        # A later start must be better by more than rounding, so that the choice does not hang on noise.
        if best is None or found.cost < best[1] * (1.0 - 1e-9):
            best = (full(found.x), float(found.cost))
    if best is None:
        raise RuntimeError("roofline fit without a starting point")
    return best


def _build(form: str, points: Points, x: FloatArray, gain: float) -> Roofline:
    eager_ms = np.maximum.accumulate(points.ms[points.eager])
    overhead, m0, m1, b0, m2, c1 = (float(value) for value in x)
    return Roofline(form, points, overhead, m0, m1, b0, m2, c1, gain, eager_ms)


def _scaled(curve: Curve | None, factor: float) -> Curve | None:
    if curve is None:
        return None
    return replace(curve, ms=curve.ms[0] + (curve.ms - curve.ms[0]) / factor)
