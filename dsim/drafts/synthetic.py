"""A generator of draft banks with a wanted acceptance curve, discrimination and calibration error.

Model, for trajectory i of a domain, position t and draft k (all latents standard normal):

    x_{i,t,k} = spread * (sqrt(w_r) s_i + sqrt(w_t) z_{i,t+k} + sqrt(w_e) e_{i,t,k})
    alpha_{i,t,k} = sigmoid(mu_k + x_{i,t,k})

s_i makes requests differ; z is a first-order autoregression along the *text*, so neighboring positions and
neighboring blocks are alike; e is the draft's own. mu_k is solved so that the conditional acceptance over the
steps that full verification visits is the wanted one. A confidence is what a noisy look at x supports:

    o_{i,t,k} = x_{i,t,k} + nu_k * noise,   c_{i,t,k} = sigmoid(b_{k,0} + sum_{j<=k} b_{k,j} o_{i,t,j} + over_k)

b is the logistic regression of alpha_k on the looks so far, among the expected survivors (a calibrated head);
nu_k is solved for the AUC and over_k >= 0 (overconfidence) for the ECE of the cumulative product, left to right.
Everything that this module makes is labeled synthetic.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from dsim.drafts.bank import Bank, BankHeader, cached_bank, make_bank
from dsim.drafts.reliability import auc, ece, visited_rows
from dsim.errors import InputError
from dsim.sigmoid import expit, logit

FloatArray = npt.NDArray[np.float64]

_LOGIT_LIMIT = 10.0
_NOISE_LIMIT = 60.0
_OVER_LIMIT = 6.0


@dataclass(frozen=True)
class SyntheticSpec:
    """What to generate.

    Parameters
    ----------
    drafter, source
        Labels; `source` names where the curve comes from.
    acceptance
        By domain: conditional acceptance at positions 1..gamma, each in (0, 1).
    auc, ece
        Wanted discrimination and calibration error of the cumulative confidence, by position. The AUC holds on the
        `reference` domain, and the head's noise found there serves all domains; the ECE holds in every domain, or
        is the nearest that a calibrated head comes to.
    spread
        Standard deviation of logit(alpha) around its mean, logits.
    request_share, text_share
        Shares of that variance between requests and along the text; the rest is the draft's own.
    autocorrelation
        Lag-1 correlation of the text's part.
    trajectories, length
        Texts a domain, and their length in tokens.
    seed
        Seed of the latents. Drafters generated with one seed read the same texts (same s, z and luck).
    strict
        Raise where the spread cannot give the wanted AUC or ECE; otherwise the nearest that it can give.
    """

    drafter: str
    source: str
    acceptance: Mapping[str, tuple[float, ...]]
    auc: tuple[float, ...]
    ece: tuple[float, ...]
    spread: float = 2.0
    request_share: float = 0.2
    text_share: float = 0.5
    autocorrelation: float = 0.8
    trajectories: int = 192
    length: int = 1100
    seed: int = 0
    strict: bool = True
    notes: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        gamma = self.gamma
        for domain, curve in self.acceptance.items():
            if len(curve) != gamma or not all(0 < a < 1 for a in curve):
                raise InputError(
                    field=f"acceptance.{domain}",
                    value=list(curve),
                    expected=f"{gamma} numbers strictly between 0 and 1",
                )
        for name, low, high in (("auc", 0.5, 1.0), ("ece", 0.0, 0.5)):
            values = getattr(self, name)
            if len(values) != gamma or not all(low <= v <= high for v in values):
                raise InputError(field=name, value=list(values), expected=f"{gamma} numbers in [{low}, {high}]")
        for name, low, high in (("spread", 0.05, 5.0), ("request_share", 0.0, 1.0), ("text_share", 0.0, 1.0)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(field=name, value=value, expected=f"a number in [{low}, {high}]")
        if self.request_share + self.text_share > 1:
            raise InputError(
                field="text_share",
                value=self.text_share,
                expected=f"at most 1 - request_share = {1 - self.request_share}",
            )
        if not 0 <= self.autocorrelation < 1:
            raise InputError(field="autocorrelation", value=self.autocorrelation, expected="a number in [0, 1)")
        if self.trajectories < 1 or self.length <= gamma + 1:
            raise InputError(field="length", value=self.length, expected=f"more than gamma + 1 = {gamma + 1}")

    @property
    def reference(self) -> str:
        """The domain on which `auc` and `ece` hold: chat where there is one (Fig. 6 is Alpaca), else the first."""
        return "chat" if "chat" in self.acceptance else next(iter(self.acceptance))

    @property
    def gamma(self) -> int:
        """Block size."""
        if not self.acceptance:
            raise InputError(field="acceptance", value={}, expected="at least one domain")
        return len(next(iter(self.acceptance.values())))


@dataclass(frozen=True)
class _Latents:
    """One domain's random numbers, drawn once and reused while the parameters are solved for."""

    x: FloatArray  # [rows, gamma], standard deviation `spread`
    noise: FloatArray  # [rows, gamma]
    luck: FloatArray  # [rows, gamma], uniform
    bounds: npt.NDArray[np.int64]


def synthetic_bank(spec: SyntheticSpec) -> Bank:
    """The bank of a spec, from the cache if this code made it before on this machine."""
    text = repr((sorted(asdict(spec).items(), key=lambda kv: kv[0]), np.__version__, scipy.__version__, _code()))
    return cached_bank("synthetic-" + hashlib.sha256(text.encode()).hexdigest()[:40], lambda: generate(spec))


@cache
def _code() -> str:
    """The text of all modules that shape a bank, so that a change of any makes new ones."""
    folder = resources.files("dsim.drafts")
    return "".join(
        (folder / name).read_text(encoding="utf-8") for name in ("synthetic.py", "reliability.py", "bank.py")
    )


def generate(spec: SyntheticSpec) -> Bank:
    """Generate a bank.

    Raises
    ------
    InputError
        An AUC or ECE that the spec's spread cannot give; the reachable range is named.
    """
    parts = {name: _texts(spec, curve, i) for i, (name, curve) in enumerate(spec.acceptance.items())}
    nu = _solve_noise(spec, parts[spec.reference])
    rows = spec.trajectories * spec.length
    bounds = np.arange(len(parts) * spec.trajectories + 1, dtype=np.int64) * spec.length
    header = BankHeader(
        gamma=spec.gamma,
        kind="synthetic",
        drafter=spec.drafter,
        target="none",
        source=spec.source,
        license="Apache-2.0",
        domains=tuple(spec.acceptance),
        logit_low=-_LOGIT_LIMIT,
        logit_high=_LOGIT_LIMIT,
        temperatures=(1.0,) * spec.gamma,
        notes=spec.notes,
    )
    if rows * len(parts) != int(bounds[-1]):
        raise RuntimeError("synthetic bank invariant violated: rows do not fill the trajectories")
    return make_bank(
        header,
        confidence_logit=np.concatenate([_confidence_logits(spec, name, part, nu) for name, part in parts.items()]),
        alpha=np.concatenate([part.alpha for part in parts.values()]),
        accepted=np.concatenate([part.accepted for part in parts.values()]),
        bounds=bounds,
        domain=np.repeat(np.arange(len(parts)), spec.trajectories),
    )


def _draw(spec: SyntheticSpec, domain: int) -> _Latents:
    texts, length, gamma = spec.trajectories, spec.length, spec.gamma
    shared = np.random.default_rng(np.random.SeedSequence([spec.seed, domain]))
    request = shared.standard_normal((texts, 1, 1))
    innovation = shared.standard_normal((texts, length + gamma))
    luck = shared.random((texts * length, gamma))
    drafter = int.from_bytes(hashlib.sha256(spec.drafter.encode()).digest()[:4], "little")
    own = np.random.default_rng(np.random.SeedSequence([spec.seed, domain, drafter]))
    phi = spec.autocorrelation
    # Stationary start: the first value has the long-run variance 1, the innovations sqrt(1 - phi^2).
    innovation[:, 1:] *= np.sqrt(1 - phi**2)
    text = scipy.signal.lfilter([1.0], [1.0, -phi], innovation, axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(text[:, 1:], gamma, axis=1)[:, :length]
    rest = 1 - spec.request_share - spec.text_share
    x = np.sqrt(spec.text_share) * windows + np.sqrt(spec.request_share) * request
    if rest > 0:
        x = x + np.sqrt(rest) * own.standard_normal((texts, length, gamma))
    return _Latents(
        x=np.ascontiguousarray((spec.spread * x).reshape(-1, gamma)),
        noise=own.standard_normal((texts * length, gamma)),
        luck=luck,
        bounds=np.arange(texts + 1, dtype=np.int64) * length,
    )


@dataclass(frozen=True)
class _Domain:
    latents: _Latents
    alpha: FloatArray
    accepted: npt.NDArray[np.int64]
    visited: npt.NDArray[np.int64]


def _texts(spec: SyntheticSpec, curve: tuple[float, ...], index: int) -> _Domain:
    latents = _draw(spec, index)
    usable = np.diff(latents.bounds) - (spec.gamma + 1)
    target = np.asarray(curve)
    mu = logit(target)
    # The steps that are visited depend on what is accepted, which depends on mu: a few rounds settle it.
    for _ in range(8):
        accepted = _leading(latents.luck < expit(mu + latents.x))
        visited = visited_rows(accepted, latents.bounds, usable)
        previous = mu
        mu = _solve_means(latents.x[visited], mu, target)
        if np.max(np.abs(mu - previous)) < 1e-4:
            break
    alpha = expit(mu + latents.x)
    accepted = _leading(latents.luck < alpha)
    return _Domain(latents, alpha, accepted, visited_rows(accepted, latents.bounds, usable))


def _leading(survives: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.asarray(np.logical_and.accumulate(survives, axis=1).sum(axis=1), dtype=np.int64)


def _solve_means(x: FloatArray, start: FloatArray, target: FloatArray) -> FloatArray:
    """mu_k with sum_rows(w_k alpha_k) / sum_rows(w_k) = target_k, w_k = prod_{i<k} alpha_i (expected survivors)."""
    weight = np.ones(x.shape[0])
    mu = start.copy()
    for k in range(x.shape[1]):
        mu[k] = _solve_offset(x[:, k], weight, float(target[k]))
        weight = weight * expit(mu[k] + x[:, k])
    return mu


def _solve_offset(score: FloatArray, weight: FloatArray, mean: float) -> float:
    """The offset b with weighted mean of sigmoid(score + b) equal to `mean` (Newton steps, kept in brackets)."""
    total = weight.sum()
    low, high, b = -40.0, 40.0, 0.0
    for _ in range(60):
        p = expit(score + b)
        gap = float((weight * p).sum() / total) - mean
        if abs(gap) < 1e-9:
            break
        low, high = (b, high) if gap < 0 else (low, b)
        slope = float((weight * p * (1 - p)).sum() / total)
        step = b - gap / slope if slope > 1e-12 else np.nan
        b = step if low < step < high else (low + high) / 2
    return b


def _solve_noise(spec: SyntheticSpec, domain: _Domain) -> FloatArray:
    """Noise nu_k of the confidence head, left to right, from the AUC on the reference domain."""
    nu = np.zeros(spec.gamma)
    walk = _Walk(domain)
    label = domain.accepted[domain.visited]
    for k in range(spec.gamma):
        where = f"{spec.drafter}, {spec.reference}, position {k + 1}"
        slack = 0.005 if spec.strict else 1.0
        nu[k] = _reach(partial(_auc_at, walk.block(k), label > k), spec.auc[k], 0.0, _NOISE_LIMIT, "auc", where, slack)
        walk.advance(k, float(nu[k]), _over(spec, spec.reference, walk, k, float(nu[k]))[1])
    return nu


def _over(spec: SyntheticSpec, name: str, walk: _Walk, k: int, nu: float) -> tuple[FloatArray, FloatArray]:
    """Coefficients of the calibrated head at position k, and its logits, both with the overconfidence added."""
    block = walk.block(k)
    coefficients, score = block.fit(nu)
    over = _reach(
        partial(_ece_at, score, block.survival, block.weight * block.alpha),
        spec.ece[k],
        0.0,
        _OVER_LIMIT,
        "ece",
        f"{spec.drafter}, {name}, position {k + 1}",
        0.004 if spec.strict and name == spec.reference else 1.0,
    )
    coefficients[0] += over
    return coefficients, score + over


def _confidence_logits(spec: SyntheticSpec, name: str, domain: _Domain, nu: FloatArray) -> FloatArray:
    """[rows, gamma] confidence logits of a domain under a head with this noise, with the wanted ECE where it can be."""
    latents = domain.latents
    walk = _Walk(domain)
    looks = latents.x + nu * latents.noise
    logits = np.empty_like(looks)
    for k in range(nu.size):
        coefficients, seen = _over(spec, name, walk, k, float(nu[k]))
        logits[:, k] = coefficients[0] + looks[:, : k + 1] @ coefficients[1:]
        walk.advance(k, float(nu[k]), seen)
    return logits


class _Walk:
    """The visited steps of a domain, draft position by draft position."""

    def __init__(self, domain: _Domain) -> None:
        rows = domain.visited
        self.x, self.noise = domain.latents.x[rows], domain.latents.noise[rows]
        self.alpha = domain.alpha[rows]
        self.looks = [np.ones(rows.size)]
        self.survival = np.ones(rows.size)  # cumulative confidence
        self.weight = np.ones(rows.size)  # cumulative acceptance probability

    def block(self, k: int) -> _Block:
        looks = np.stack(self.looks, axis=1)
        return _Block(looks, self.x[:, k], self.noise[:, k], self.alpha[:, k], self.weight, self.survival)

    def advance(self, k: int, nu: float, logits: FloatArray) -> None:
        self.looks.append(self.x[:, k] + nu * self.noise[:, k])
        self.survival = self.survival * expit(logits)
        self.weight = self.weight * self.alpha[:, k]


@dataclass(frozen=True)
class _Block:
    """What is known at one draft position: earlier looks, and the survivors' weights."""

    looks: FloatArray  # [n, k + 1], a constant and the looks at earlier positions
    x: FloatArray
    noise: FloatArray
    alpha: FloatArray
    weight: FloatArray
    survival: FloatArray

    def fit(self, nu: float) -> tuple[FloatArray, FloatArray]:
        """Logistic regression of alpha on the looks, weighted by the expected survivors: coefficients, scores."""
        design = np.column_stack([self.looks, self.x + nu * self.noise])
        beta = np.zeros(design.shape[1])
        beta[-1] = 1 / (1 + nu)
        beta[0] = _solve_offset(
            design[:, -1] * beta[-1], self.weight, float(np.average(self.alpha, weights=self.weight))
        )
        for _ in range(25):
            p = expit(design @ beta)
            gradient = design.T @ (self.weight * (self.alpha - p))
            hessian = (design * (self.weight * p * (1 - p))[:, None]).T @ design
            step = np.linalg.solve(hessian, gradient)
            beta = beta + step
            if np.max(np.abs(step)) < 1e-7:
                break
        return beta, design @ beta


def _auc_at(block: _Block, label: npt.NDArray[np.bool_], nu: float) -> float:
    return auc(block.survival * expit(block.fit(nu)[1]), label)


def _ece_at(score: FloatArray, survival: FloatArray, weight: FloatArray, over: float) -> float:
    return ece(survival * expit(score + over), weight)


def _reach(
    value: Callable[[float], float],
    wanted: float,
    low: float,
    high: float,
    field: str,
    where: str,
    slack: float,
) -> float:
    """The argument in [low, high] at which `value` is `wanted`; an end of the range if that is within `slack`."""
    first, last = value(low), value(high)
    if (first - wanted) * (last - wanted) < 0:
        return float(scipy.optimize.brentq(lambda t: value(t) - wanted, low, high, xtol=1e-3, maxiter=40))
    best, reached = (low, first) if abs(first - wanted) <= abs(last - wanted) else (high, last)
    if abs(reached - wanted) > slack:
        between = f"between {min(first, last):.3f} and {max(first, last):.3f}"
        raise InputError(
            f"cannot be reached ({where}); a larger spread widens the range",
            field=field,
            value=round(wanted, 4),
            expected=between,
        )
    return best


def bank_report(bank: Bank) -> dict[str, dict[str, list[float]]]:
    """Per domain, over the steps that full verification visits: conditional acceptance, AUC and ECE by position.

    Returns
    -------
    ``{domain: {"acceptance": [gamma], "auc": [gamma], "ece": [gamma], "tau": [1]}}``; ECE against the stored
    alpha's cumulative product (the outcome's expectation).
    """
    visited = visited_rows(bank.accepted, bank.bounds, bank.usable())
    owner = bank.domain[np.searchsorted(bank.bounds, visited, side="right") - 1]
    report: dict[str, dict[str, list[float]]] = {}
    for i, name in enumerate(bank.header.domains):
        rows = visited[owner == i]
        accepted = bank.accepted[rows].astype(np.int64)
        survival = np.multiply.accumulate(bank.confidence[rows].astype(np.float64), axis=1)
        truth = np.multiply.accumulate(bank.alpha_bytes[rows] / 255.0, axis=1)
        reached = [float(np.mean(accepted >= k)) for k in range(bank.header.gamma + 1)]
        report[name] = {
            "acceptance": [b / a if a else float("nan") for a, b in itertools.pairwise(reached)],
            "auc": [auc(survival[:, k], accepted > k) for k in range(bank.header.gamma)],
            "ece": [ece(survival[:, k], truth[:, k]) for k in range(bank.header.gamma)],
            "tau": [1 + float(accepted.mean())],
        }
    return report


def by_position(values: Mapping[int, float], gamma: int) -> tuple[float, ...]:
    """Values known at some positions (1-based), linear in between and constant beyond, at positions 1..gamma."""
    known = sorted(values.items())
    points: Any = np.interp(np.arange(1, gamma + 1), [k for k, _ in known], [v for _, v in known])
    return tuple(float(v) for v in points)
