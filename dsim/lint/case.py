"""What is linted: a profile's price table, and the use that somebody wants to make of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dsim.cost import Points, StepModel, fit, verify_points
from dsim.cost.model import Fit
from dsim.errors import InputError
from dsim.lint.decision import DraftSample, FloatArray, best_budget
from dsim.lookup import LOOKUP_RULES
from dsim.profile import IntArray, Profile

#: Most different loads that are looked at, spread evenly from 1 to the largest.
MOST_LOADS = 256
#: Largest step (tokens) that is looked at, and most noisy tables: every one of them is an array.
MOST_TOKENS, MOST_DRAWS = 1 << 22, 100_000
#: What gigabytes and terabytes a second can be.
LEAST, MOST = 1e-9, 1e9


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: how many weights a batch has to read.

    Parameters
    ----------
    experts, active
        Routed experts of a layer, and how many of them a token uses.
    gigabytes, terabytes_s
        Weights of all routed experts on one replica, and its memory bandwidth (all GPUs together); both or neither.
    """

    experts: int
    active: int
    gigabytes: float | None = None
    terabytes_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.active < self.experts:
            raise InputError(
                field="experts", value=f"{self.experts}:{self.active}", expected="EXPERTS:ACTIVE, 1 <= ACTIVE < EXPERTS"
            )
        if (self.gigabytes is None) != (self.terabytes_s is None):
            raise InputError("needs both the experts' weights and the memory bandwidth", field="experts")
        for name in ("gigabytes", "terabytes_s"):
            value = getattr(self, name)
            if value is not None and not LEAST <= value <= MOST:
                raise InputError(field=name, value=value, expected=f"a number from {LEAST:g} to {MOST:g}")

    def touched(self, tokens: float) -> float:
        """Share of the experts that a batch reads if every token is routed evenly and by itself.

        >>> round(Mixture(256, 8).touched(1), 4), round(Mixture(256, 8).touched(32), 2)
        (0.0312, 0.64)
        """
        return float(1.0 - (1.0 - self.active / self.experts) ** tokens)

    def read_ms(self, tokens: float) -> float:
        """Milliseconds to read the touched experts; NaN where weights and bandwidth are not given."""
        if self.gigabytes is None or self.terabytes_s is None:
            return float("nan")
        return self.gigabytes / self.terabytes_s * self.touched(tokens)


@dataclass(frozen=True, eq=False)
class Setting:
    """How the table will be used.

    Parameters
    ----------
    sample
        Drafts; its block size is gamma.
    concurrency, at
        Most requests in decode at once, and how many there usually are: 1 <= at <= concurrency.
    lookup
        How the engine reads the table between its sizes (`dsim.lookup.LOOKUP_RULES`); None: not known.
    noise
        Half width of the noise band, a fraction.
    draws, seed
        Noisy tables to try, and the seed of their noise.
    mixture
        The model's experts, where it is known to have some.
    """

    sample: DraftSample
    concurrency: int
    at: int
    lookup: str | None = None
    noise: float = 0.03
    draws: int = 200
    seed: int = 0
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InputError(field="concurrency", value=self.concurrency, expected="an integer >= 1")
        if self.reach > MOST_TOKENS:
            raise InputError(
                f"times {1 + self.gamma} tokens a request is no step",
                field="concurrency",
                value=self.concurrency,
                expected=f"at most {MOST_TOKENS // (1 + self.gamma)}",
            )
        if not 1 <= self.at <= self.concurrency:
            raise InputError(
                "operating point", field="concurrency", value=self.at, expected=f"1 to {self.concurrency} requests"
            )
        if self.lookup is not None and self.lookup not in LOOKUP_RULES:
            raise InputError(field="lookup", value=self.lookup, expected=f"one of {', '.join(LOOKUP_RULES)}")
        if not 0 < self.noise < 1:
            raise InputError(field="noise", value=self.noise, expected="a number between 0 and 1")
        if not 1 <= self.draws <= MOST_DRAWS:
            raise InputError(field="draws", value=self.draws, expected=f"an integer in 1..{MOST_DRAWS}")
        if self.seed < 0:
            raise InputError(field="seed", value=self.seed, expected="an integer >= 0")

    @property
    def gamma(self) -> int:
        """Drafts a request."""
        return self.sample.gamma

    @property
    def reach(self) -> int:
        """Most tokens that a step of drafts can hold: the concurrency, times one more than gamma."""
        return self.concurrency * (1 + self.gamma)

    @property
    def loads(self) -> list[int]:
        """Numbers of requests that are looked at, ascending; the operating point is one of them."""
        spread = np.linspace(1, self.concurrency, min(self.concurrency, MOST_LOADS)).round().astype(int)
        return sorted({*spread.tolist(), self.at})


def usual_concurrency(profile: Profile, gamma: int) -> int:
    """The most requests that a profile was made for: its largest draft batch, or its longest step in whole blocks."""
    batches = profile.samples.of("draft").requests if "draft" in profile.samples.kind else np.empty(0, dtype=np.int64)
    if not batches.size:
        batches = profile.samples.of("verify").requests
    known = int(batches.max(initial=0))
    return known if known > 0 else max(1, int(profile.samples.of("verify").tokens.max()) // (1 + gamma))


@dataclass(frozen=True, eq=False)
class Case:
    """A profile and a setting, with the price laws that the checks compare. Built by `make_case`.

    Parameters
    ----------
    points
        Warm medians at the chosen context.
    law
        What a planner would believe: the staircase under a running maximum, or bias + alpha + theta where token
        counts were timed with several request counts.
    raw
        The same without the running maximum: what was measured.
    cost
        The model, for draft prices.
    context
        Its position among the profile's contexts.
    """

    profile: Profile
    setting: Setting
    points: Points
    law: Fit
    raw: Fit
    cost: StepModel
    context: int
    _tables: dict[tuple[int, int], FloatArray] = field(default_factory=dict, init=False, repr=False)

    def table(self, law: Fit, requests: int) -> FloatArray:
        """float64[reach + 1]: milliseconds of a target pass by its tokens under a law; entry 0 is not used."""
        key = (id(law), requests if law.depends_on_requests else 0)
        known = self._tables.get(key)
        if known is None:
            known = priced(law, requests, np.arange(self.setting.reach + 1))
            first = max(1, key[1])  # a step has a token a request
            if not (known[first:] > 0).all():
                tokens = first + int(np.argmin(known[first:] > 0))
                raise InputError(
                    f"the fit's price of {tokens} tokens and {requests} requests is no duration",
                    file=self.profile.name,
                    field="ms",
                    value=float(known[tokens]),
                    expected="times that rise with the tokens and the requests",
                )
            if law is self.law or law is self.raw:  # others do not outlive the call, and their id may come again
                self._tables[key] = known
        return known

    def verify_ms(self, requests: int, law: Fit | None = None) -> FloatArray:
        """float64[requests * gamma + 1]: the target pass by drafts verified, under `law` (None: the believed one)."""
        table = self.table(self.law if law is None else law, requests)
        return table[requests : requests * (1 + self.setting.gamma) + 1]

    def draft_ms(self, requests: int) -> float:
        """One pass of the profiled drafter; 0 where drafting has no price of its own."""
        curve = self.cost.draft
        if curve is None:
            return 0.0
        return curve.at(requests if curve.sizes.size > 1 else min(requests, int(curve.sizes[-1])))

    def step_ms(self, requests: int, law: Fit | None = None) -> FloatArray:
        """Draft and target pass together, by drafts verified."""
        return np.asarray(self.draft_ms(requests) + self.verify_ms(requests, law))

    def chosen(self, requests: int) -> int:
        """Drafts that the believed prices make worth verifying."""
        return best_budget(self.setting.sample.step_tokens(requests), self.step_ms(requests))


def priced(law: Fit, requests: int, tokens: IntArray) -> FloatArray:
    """A law's prices, held where a single profiled size (or a single eager one) cannot be continued."""
    sizes = law.points.tokens
    eager = sizes[law.points.eager]
    single = sizes[0] == sizes[-1] or (eager.size > 0 and eager[0] == eager[-1])
    return law.price(requests, np.clip(tokens, 1, sizes[-1] if single else None))


def make_case(profile: Profile, setting: Setting, context: int = 0) -> Case:
    """Fit what the checks need.

    Parameters
    ----------
    context
        Position among the profile's contexts (`dsim.cost.verify_points`).

    Raises
    ------
    InputError
        No such context, or a profile that no law fits.
    """
    contexts, points = verify_points(profile)
    if not 0 <= context < len(points):
        raise InputError(field="context", value=context, expected=f"0 to {len(points) - 1}, of {contexts.tolist()}")
    chosen = points[context]
    several = np.unique(chosen.tokens).size < chosen.tokens.size
    model = "additive" if several else "staircase"
    options = {} if several else {"running_max": True}
    cost = fit(profile, model, allow_extrapolation=True, **options)
    law = cost.fits[context]
    raw = law if several else fit(profile, model, allow_extrapolation=True, running_max=False).fits[context]
    return Case(profile, setting, chosen, law, raw, cost, context)


def noisy(case: Case, factors: FloatArray) -> Fit:
    """The believed law, had the medians come out `factors` times as long."""
    points = case.points
    law = case.law.refit(replace(points, ms=points.ms * factors))
    if law is None:
        raise RuntimeError("lint invariant violated: the same sizes do not determine the law any more")
    return law
