"""Synthetic workloads: an arrival process and a model of the lengths, drawn from one seed.

Arrival processes (`Poisson`, `Gamma`, `OnOff`) have ``times(requests, rng)``, models of both lengths
(`Independent`, `Empirical`) have ``pairs(requests, rng)``, models of one length (`Fixed`, `Lognormal`) have
``draw(requests, rng)``; each is a frozen dataclass of its parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dsim.errors import InputError
from traces.base import MAX_TOKENS, FloatArray, IntArray, Trace

#: Keeps an absurd `OnOff` from filling the memory.
_MOST_PHASES = 10_000_000


class Arrivals(Protocol):
    """A stationary arrival process, seen from one of its arrivals."""

    def times(self, requests: int, rng: np.random.Generator) -> FloatArray:
        """float64[requests]: arrival times in seconds from the first, which is 0; non-decreasing."""
        ...


class Lengths(Protocol):
    """A joint model of prompt and output lengths."""

    def pairs(self, requests: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """int64[requests] prompt tokens and int64[requests] output tokens, each >= 1."""
        ...


class TokenCount(Protocol):
    """A model of one length."""

    def draw(self, requests: int, rng: np.random.Generator) -> IntArray:
        """int64[requests], each >= 1."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Independent users: exponential gaps.

    Parameters
    ----------
    rate
        Mean arrival rate, requests a second.
    """

    rate: float

    def __post_init__(self) -> None:
        _positive("rate", self.rate)

    def times(self, requests: int, rng: np.random.Generator) -> FloatArray:
        return _from_gaps(rng.exponential(1.0 / self.rate, requests - 1))


@dataclass(frozen=True)
class Gamma:
    """Independent gamma-distributed gaps: burstier than Poisson for cv > 1, smoother for cv < 1.

    Parameters
    ----------
    rate
        Mean arrival rate, requests a second.
    cv
        Coefficient of variation of the gaps (standard deviation over mean); 1 is Poisson. From 0.01 to 100.
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _positive("rate", self.rate)
        _positive("cv", self.cv)
        if not 0.01 <= self.cv <= 100.0:
            raise InputError(field="cv", value=self.cv, expected="from 0.01 to 100")

    def times(self, requests: int, rng: np.random.Generator) -> FloatArray:
        shape = self.cv**-2.0
        return _from_gaps(rng.gamma(shape, 1.0 / (self.rate * shape), requests - 1))


@dataclass(frozen=True)
class OnOff:
    """Bursts: Poisson arrivals in "on" phases and none in "off" phases; phase durations are exponential.

    The rate in an "on" phase is ``rate * (on_s + off_s) / on_s``, so `rate` is the mean over both phases.
    Seen from an arrival this is a renewal process (the phase is then "on", and nothing else matters), whose
    gaps have squared coefficient of variation ``1 + 2 * rate * off_s**2 / (on_s + off_s)``
    (the interrupted Poisson process: A. Kuczura, Bell System Technical Journal 52(3), 1973).

    Parameters
    ----------
    rate
        Mean arrival rate, requests a second.
    on_s, off_s
        Mean durations of the phases, seconds.
    """

    rate: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        for name in ("rate", "on_s", "off_s"):
            _positive(name, getattr(self, name))

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps."""
        return math.sqrt(1.0 + 2.0 * self.rate * self.off_s**2 / (self.on_s + self.off_s))

    def times(self, requests: int, rng: np.random.Generator) -> FloatArray:
        # On a clock that stands still in "off" phases the arrivals are Poisson, and so are, independently,
        # the moments at which an "on" phase ends; each of those then takes one "off" phase of real time.
        on_rate = self.rate * (self.on_s + self.off_s) / self.on_s
        on_clock = _from_gaps(rng.exponential(1.0 / on_rate, requests - 1))
        # The number of ends up to the last arrival is Poisson; given the number they are uniform.
        expected_ends = on_clock[-1] / self.on_s
        if not expected_ends < _MOST_PHASES:
            raise InputError(
                f"the trace would need {expected_ends:.0f} phases",
                field="on_s",
                value=self.on_s,
                expected=f"phases of which {_MOST_PHASES} suffice (shorter ones are all but Poisson)",
            )
        ends = np.sort(rng.uniform(0.0, on_clock[-1], rng.poisson(expected_ends)))
        off = _from_gaps(rng.exponential(self.off_s, ends.size))
        return on_clock + off[np.searchsorted(ends, on_clock)]


@dataclass(frozen=True)
class Fixed:
    """Every length is `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _count("tokens", self.tokens)

    def draw(self, requests: int, rng: np.random.Generator) -> IntArray:
        return np.full(requests, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class Lognormal:
    """Lognormal lengths, rounded to the nearest integer, at least 1.

    Parameters
    ----------
    mean
        Mean of the lognormal, tokens, at least 1. (Rounding moves the mean of the lengths by less than one
        token, and by next to nothing where lengths of 1 are rare.)
    sigma
        Standard deviation of the logarithm, > 0 and at most 5.
    median
        Instead of `sigma`: the median, tokens, below the mean. Then ``sigma = sqrt(2 ln(mean / median))``.
    """

    mean: float
    sigma: float | None = None
    median: float | None = None

    def __post_init__(self) -> None:
        _positive("mean", self.mean)
        if self.mean < 1.0:
            raise InputError(field="mean", value=self.mean, expected="at least 1 token")
        if (self.sigma is None) == (self.median is None):
            raise InputError(
                field="sigma",
                value=f"sigma={self.sigma}, median={self.median}",
                expected="either sigma or median",
            )
        if self.sigma is not None:
            _positive("sigma", self.sigma)
        else:
            _positive("median", self.median)
            if not self.median < self.mean:  # type: ignore[operator]
                raise InputError(field="median", value=self.median, expected=f"below the mean, which is {self.mean}")
        if self.log_sigma > 5.0:
            raise InputError(
                "so wide a lognormal has its mean from draws that practically never come",
                field="sigma",
                value=self.log_sigma,
                expected="at most 5",
            )

    @property
    def log_sigma(self) -> float:
        """Standard deviation of the logarithm, given or made from the median."""
        if self.median is None:
            return float(self.sigma)  # type: ignore[arg-type]
        return math.sqrt(2.0 * math.log(self.mean / self.median))

    def draw(self, requests: int, rng: np.random.Generator) -> IntArray:
        sigma = self.log_sigma
        tokens = np.rint(rng.lognormal(math.log(self.mean) - 0.5 * sigma**2, sigma, requests))
        if tokens.max() > MAX_TOKENS:
            raise InputError(
                f"a length beyond {MAX_TOKENS} was drawn",
                value=repr(self),
                expected="a smaller mean or sigma",
            )
        return np.maximum(tokens, 1.0).astype(np.int64)


@dataclass(frozen=True)
class Independent:
    """Prompt and output lengths drawn independently of each other, each from its own model."""

    prompt: TokenCount
    output: TokenCount

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            if not callable(getattr(getattr(self, name), "draw", None)):
                raise InputError(
                    field=name, value=repr(getattr(self, name)), expected="a length model: Fixed or Lognormal"
                )

    def pairs(self, requests: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        prompt_rng, output_rng = rng.spawn(2)
        return self.prompt.draw(requests, prompt_rng), self.output.draw(requests, output_rng)


@dataclass(frozen=True)
class Empirical:
    """Whole rows of a trace, drawn with replacement: a prompt keeps its output. Prefix blocks are dropped."""

    trace: Trace

    def __post_init__(self) -> None:
        if not isinstance(self.trace, Trace):
            raise InputError(field="trace", value=repr(self.trace), expected="a Trace")

    def __repr__(self) -> str:
        return f"Empirical({self.trace.name!r}, {len(self.trace)} rows)"

    def pairs(self, requests: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        row = rng.integers(len(self.trace), size=requests)
        return self.trace.prompt_tokens[row], self.trace.output_tokens[row]


def synthetic_trace(
    requests: int, *, arrivals: Arrivals, lengths: Lengths, seed: int, name: str = "synthetic"
) -> Trace:
    """Draw a trace. The same arguments give the same bytes (on one version of NumPy).

    Arrivals and lengths come from separate streams of the seed: changing the arrival process leaves every
    length as it is, and the other way round.

    Parameters
    ----------
    requests
        Number of requests, >= 1.
    arrivals
        `Poisson`, `Gamma` or `OnOff`.
    lengths
        `Independent` or `Empirical`.
    seed
        Integer >= 0.

    Raises
    ------
    InputError
        For a parameter outside its range.

    Examples
    --------
    >>> lengths = Independent(prompt=Lognormal(mean=1000, median=600), output=Fixed(200))
    >>> trace = synthetic_trace(500, arrivals=Gamma(rate=4.0, cv=2.0), lengths=lengths, seed=1)
    >>> len(trace), trace.kind, int(trace.output_tokens.max())
    (500, 'synthetic', 200)
    """
    _count("requests", requests)
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        raise InputError(field="seed", value=_given(seed), expected="an integer >= 0")
    if not callable(getattr(arrivals, "times", None)):
        raise InputError(field="arrivals", value=repr(arrivals), expected="Poisson, Gamma or OnOff")
    if not callable(getattr(lengths, "pairs", None)):
        raise InputError(field="lengths", value=repr(lengths), expected="Independent or Empirical")
    arrival_rng, length_rng = np.random.default_rng(seed).spawn(2)
    prompt, output = lengths.pairs(int(requests), length_rng)
    return Trace(
        name=name,
        kind="synthetic",
        source=f"synthetic: {arrivals!r}, {lengths!r}, seed {seed}",
        arrival_s=arrivals.times(int(requests), arrival_rng),
        prompt_tokens=prompt,
        output_tokens=output,
    )


def _from_gaps(gaps: FloatArray) -> FloatArray:
    times = np.zeros(gaps.size + 1)
    np.cumsum(gaps, out=times[1:])
    return times


def _positive(name: str, value: object) -> None:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise InputError(field=name, value=_given(value), expected="a finite number > 0")


def _count(name: str, value: object) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not 1 <= value <= MAX_TOKENS:  # type: ignore[operator]
        raise InputError(field=name, value=_given(value), expected=f"an integer from 1 to {MAX_TOKENS}")


def _given(value: object) -> object:
    """`InputError` takes None for "not said"; here it is what was given."""
    return "None" if value is None else value
