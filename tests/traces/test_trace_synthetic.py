"""Synthetic traces: statistics within three standard errors, streams, and refused parameters.

Each statistical test draws once with a fixed seed. The standard errors are those of the estimator, written out
where they are used.
"""

import math

import numpy as np
import pytest

from dsim.errors import InputError
from traces import (
    Empirical,
    Fixed,
    Gamma,
    Independent,
    Lognormal,
    OnOff,
    Poisson,
    Trace,
    read_trace,
    synthetic_trace,
)

FIXED = Independent(Fixed(100), Fixed(20))
N = 100_000


def gaps_of(arrivals, seed=1, requests=N):
    trace = synthetic_trace(requests, arrivals=arrivals, lengths=FIXED, seed=seed)
    assert len(trace) == requests
    return np.diff(trace.arrival_s)


def check_mean_and_cv(gaps, rate, cv):
    """Sample mean and CV against the wanted, three standard errors each.

    The CV's error is by the delta method, with moments of the sample standardized by the *wanted* mean and
    standard deviation.
    """
    mean, sd, n = 1.0 / rate, cv / rate, gaps.size
    assert abs(gaps.mean() - mean) < 3.0 * sd / math.sqrt(n)
    z = (gaps - mean) / sd
    # d(cv)/cv = (z^2 - 1)/2 - cv * z, averaged over the sample
    error = np.std((z**2 - 1.0) / 2.0 - cv * z) / math.sqrt(n)
    assert abs(gaps.std() / gaps.mean() / cv - 1.0) < 3.0 * error


@pytest.mark.parametrize("rate", [0.01, 5.0, 4000.0])
def test_poisson(rate):
    gaps = gaps_of(Poisson(rate))
    check_mean_and_cv(gaps, rate, 1.0)
    # An exponential exceeds its mean with probability 1/e.
    share = (gaps > 1.0 / rate).mean()
    assert abs(share - math.exp(-1.0)) < 3.0 * math.sqrt(math.exp(-1.0) * (1.0 - math.exp(-1.0)) / gaps.size)


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.0, 3.0])
def test_gamma(cv):
    check_mean_and_cv(gaps_of(Gamma(5.0, cv)), 5.0, cv)


def test_gamma_with_cv_one_is_exponential():
    share = (gaps_of(Gamma(2.0, 1.0)) > 0.5).mean()
    assert abs(share - math.exp(-1.0)) < 3.0 * math.sqrt(0.2326 / N)


@pytest.mark.parametrize(("rate", "on_s", "off_s"), [(5.0, 2.0, 8.0), (5.0, 1.0, 0.5), (0.2, 30.0, 30.0)])
def test_on_off_keeps_the_mean_rate_and_has_the_known_cv(rate, on_s, off_s):
    arrivals = OnOff(rate, on_s, off_s)
    check_mean_and_cv(gaps_of(arrivals), rate, arrivals.cv)


def test_the_cv_of_on_off_by_hand():
    # rate 5, phases of 2 s and 8 s: 1 + 2 * 5 * 64 / 10 = 65
    assert OnOff(5.0, 2.0, 8.0).cv == math.sqrt(65.0)


def test_on_off_rate_within_the_bursts():
    """With off phases of 1000 s every gap above 100 s holds one or more; the others are those of the burst."""
    gaps = gaps_of(OnOff(0.1, 50.0, 1000.0))
    within = gaps[gaps < 100.0]
    # On phases run at 0.1 * 1050 / 50 = 2.1/s and end at 1/50: a gap within is exponential with their sum
    # (but for the off phases under 100 s: 10 % of the 1 % of gaps that hold one, allowed for by the 2 %).
    assert within.mean() == pytest.approx(1.0 / 2.12, rel=0.02 + 3.0 / math.sqrt(within.size), abs=0.05)
    # A gap holds at least one off phase with probability (1/50) / (2.1 + 1/50).
    p = 0.02 / 2.12
    far = (gaps > 100.0).mean()
    expected = p * math.exp(-0.1)  # single off phases above 100 s; two in a row add p^2, 1e-4
    assert abs(far - expected) < 3.0 * math.sqrt(p / gaps.size) + p**2


def test_bursts_show_as_dispersion_of_counts():
    """Variance over mean of the counts in windows of 10 s: 1 for Poisson, far above for bursts."""

    def dispersion(arrivals):
        times = synthetic_trace(N, arrivals=arrivals, lengths=FIXED, seed=3).arrival_s
        counts = np.bincount((times / 10.0).astype(int))[:-1]
        return counts.var() / counts.mean(), counts.size

    poisson, windows = dispersion(Poisson(5.0))
    assert abs(poisson - 1.0) < 3.0 * math.sqrt(2.0 / windows)
    smooth, _ = dispersion(Gamma(5.0, 0.3))
    assert smooth < 0.3
    bursty, _ = dispersion(OnOff(5.0, 2.0, 8.0))
    assert bursty > 20.0


def test_fixed_lengths():
    trace = synthetic_trace(7, arrivals=Poisson(1.0), lengths=FIXED, seed=0)
    assert trace.prompt_tokens.tolist() == [100] * 7
    assert trace.output_tokens.tolist() == [20] * 7


@pytest.mark.parametrize("lengths", [Lognormal(1000.0, sigma=0.8), Lognormal(1000.0, median=726.149)])
def test_lognormal_lengths(lengths):
    # A median of 1000 * exp(-0.8^2 / 2) = 726.149 makes sigma 0.8.
    assert lengths.log_sigma == pytest.approx(0.8, rel=1e-6)
    tokens = synthetic_trace(N, arrivals=Poisson(1.0), lengths=Independent(lengths, Fixed(1)), seed=2).prompt_tokens
    sd = 1000.0 * math.sqrt(math.exp(0.64) - 1.0)
    assert abs(tokens.mean() - 1000.0) < 3.0 * sd / math.sqrt(N)
    logs = np.log(tokens)
    assert abs(logs.std() - 0.8) < 3.0 * 0.8 / math.sqrt(2.0 * N)
    assert abs((tokens < 726.149).mean() - 0.5) < 3.0 * 0.5 / math.sqrt(N)


def test_lognormal_lengths_are_at_least_one():
    short = Independent(Lognormal(1.0, sigma=1.5), Lognormal(2.0, sigma=0.1))
    trace = synthetic_trace(1000, arrivals=Poisson(1.0), lengths=short, seed=2)
    assert trace.prompt_tokens.min() == 1
    assert abs(trace.prompt_tokens.mean() - 1.0) < 1.0


def test_prompt_and_output_are_independent_streams():
    both = Lognormal(500.0, sigma=1.0)
    trace = synthetic_trace(N, arrivals=Poisson(1.0), lengths=Independent(both, both), seed=4)
    correlation = np.corrcoef(np.log(trace.prompt_tokens), np.log(trace.output_tokens))[0, 1]
    assert abs(correlation) < 3.0 / math.sqrt(N)


def test_empirical_draws_whole_rows():
    rows = Trace("rows", "recorded", "by hand", [0, 1, 2, 3], [10, 20, 30, 40], [1, 2, 3, 4], ((0,), (), (), ()))
    trace = synthetic_trace(20_000, arrivals=Poisson(1.0), lengths=Empirical(rows), seed=5)
    assert (trace.prompt_tokens == 10 * trace.output_tokens).all()
    counts = np.bincount(trace.output_tokens, minlength=5)[1:]
    assert (np.abs(counts - 5000) < 3.0 * math.sqrt(20_000 * 0.25 * 0.75)).all()
    assert trace.prefix_blocks is None


def test_empirical_keeps_the_correlation_of_a_real_trace():
    real = read_trace("azure2023-conv")
    drawn = synthetic_trace(N, arrivals=Poisson(1.0), lengths=Empirical(real), seed=6)
    for field in ("prompt_tokens", "output_tokens"):
        values = getattr(real, field)
        assert abs(getattr(drawn, field).mean() - values.mean()) < 3.0 * values.std() / math.sqrt(N)
    of = [np.corrcoef(trace.prompt_tokens, trace.output_tokens)[0, 1] for trace in (real, drawn)]
    assert abs(of[0]) > 0.05
    assert abs(of[0] - of[1]) < 3.0 * 2.0 / math.sqrt(N)


def draw(seed=1, arrivals=None, lengths=None, requests=500):
    return synthetic_trace(
        requests,
        arrivals=arrivals or OnOff(5.0, 2.0, 8.0),
        lengths=lengths or Independent(Lognormal(100.0, sigma=1.0), Lognormal(50.0, median=40.0)),
        seed=seed,
    )


def test_same_seed_same_bytes():
    for arrivals in (Poisson(3.0), Gamma(3.0, 2.0), OnOff(3.0, 1.0, 1.0)):
        one, two, other = draw(1, arrivals), draw(1, arrivals), draw(2, arrivals)
        for field in ("arrival_s", "prompt_tokens", "output_tokens"):
            assert getattr(one, field).tobytes() == getattr(two, field).tobytes()
            assert getattr(one, field).tobytes() != getattr(other, field).tobytes()


def test_arrivals_and_lengths_are_separate_streams():
    base, other = draw(), draw(arrivals=Poisson(1.0))
    assert other.prompt_tokens.tobytes() == base.prompt_tokens.tobytes()
    assert other.arrival_s.tobytes() != base.arrival_s.tobytes()
    other = draw(lengths=Independent(Fixed(3), Lognormal(50.0, median=40.0)))
    assert other.arrival_s.tobytes() == base.arrival_s.tobytes()
    assert other.output_tokens.tobytes() == base.output_tokens.tobytes()


def test_the_source_says_how_it_was_drawn():
    trace = draw(lengths=Empirical(read_trace("azure2023-code")))
    assert trace.kind == "synthetic"
    assert trace.source == (
        "synthetic: OnOff(rate=5.0, on_s=2.0, off_s=8.0), Empirical('azure2023-code', 8819 rows), seed 1"
    )


@pytest.mark.parametrize("arrivals", [Poisson(3.0), Gamma(3.0, 2.0), OnOff(3.0, 1.0, 1.0)])
def test_a_single_request(arrivals):
    assert draw(arrivals=arrivals, requests=1).arrival_s.tolist() == [0.0]


BAD = [0, -1.0, math.nan, math.inf, "3", None, True]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("rate", lambda v: Poisson(v)),
        ("rate", lambda v: Gamma(v, 1.0)),
        ("cv", lambda v: Gamma(1.0, v)),
        ("rate", lambda v: OnOff(v, 1.0, 1.0)),
        ("on_s", lambda v: OnOff(1.0, v, 1.0)),
        ("off_s", lambda v: OnOff(1.0, 1.0, v)),
        ("tokens", lambda v: Fixed(v)),
        ("mean", lambda v: Lognormal(v, sigma=1.0)),
    ],
)
def test_bad_parameters(field, make, value):
    with pytest.raises(InputError) as caught:
        make(value)
    shown = "'None'" if value is None else repr(value)
    assert str(caught.value).startswith(f"field '{field}': got {shown}, expected a")


@pytest.mark.parametrize(
    ("make", "field", "text"),
    [
        (lambda: Gamma(1.0, 1000.0), "cv", "from 0.01 to 100"),
        (lambda: Fixed(1.5), "tokens", "an integer"),
        (lambda: Lognormal(0.5, sigma=1.0), "mean", "at least 1"),
        (lambda: Lognormal(10.0), "sigma", "either sigma or median"),
        (lambda: Lognormal(10.0, sigma=1.0, median=5.0), "sigma", "either sigma or median"),
        (lambda: Lognormal(10.0, sigma=0.0), "sigma", "> 0"),
        (lambda: Lognormal(10.0, sigma=6.0), "sigma", "at most 5"),
        (lambda: Lognormal(10.0, median=10.0), "median", "below the mean"),
        (lambda: Lognormal(10.0, median=-1.0), "median", "> 0"),
        (lambda: Lognormal(1e9, median=1.0), "sigma", "at most 5"),
        (lambda: Independent(Fixed(1), 20), "output", "Fixed or Lognormal"),
        (lambda: Independent(None, Fixed(1)), "prompt", "Fixed or Lognormal"),
        (lambda: Empirical("azure2023-conv"), "trace", "a Trace"),
        (lambda: draw(requests=0), "requests", "from 1"),
        (lambda: draw(requests=10.0), "requests", "from 1"),
        (lambda: draw(requests=True), "requests", "from 1"),
        (lambda: draw(seed=-1), "seed", ">= 0"),
        (lambda: draw(seed=1.0), "seed", ">= 0"),
        (lambda: draw(seed=None), "seed", ">= 0"),
        (lambda: draw(arrivals="poisson"), "arrivals", "Poisson, Gamma or OnOff"),
        (lambda: draw(lengths=Fixed(3)), "lengths", "Independent or Empirical"),
        (lambda: draw(arrivals=OnOff(1.0, 1e-9, 1e-9)), "on_s", "phases"),
        (lambda: draw(arrivals=Poisson(1e-9)), "arrival_s", "at most 9e"),
        (lambda: draw(lengths=Independent(Lognormal(2e9, sigma=1.0), Fixed(1))), None, "was drawn"),
    ],
)
def test_refused(make, field, text):
    with pytest.raises(InputError, match=text) as caught:
        make()
    assert caught.value.field == field
