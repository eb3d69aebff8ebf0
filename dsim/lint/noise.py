"""Would the decision be another one if the table were timed again?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsim.lint.case import Case, noisy
from dsim.lint.decision import FloatArray, Loss, best_budget
from dsim.lint.finding import Finding, graded, lost
from dsim.profile import IntArray
from dsim.wording import counted, percent

#: Loads at which the noise is tried.
NOISE_LOADS = 24


@dataclass(frozen=True)
class NoiseBand:
    """What a planner decides on noisy copies of the table, at some loads.

    Parameters
    ----------
    loads
        Numbers of requests.
    clean
        int64[L]: drafts chosen on the table as it is.
    chosen
        int64[L, draws]: drafts chosen on the noisy copies.
    losses
        float64[L, draws]: share of the throughput lost by them, at the prices of the table as it is.
    """

    loads: list[int]
    clean: IntArray
    chosen: IntArray
    losses: FloatArray


def noise_band(case: Case) -> NoiseBand:
    """Decide on noisy copies: every median times a factor of its own, uniform within the band, seeded."""
    setting = case.setting
    spread = np.linspace(1, setting.concurrency, NOISE_LOADS).round().astype(int)
    loads = sorted({*spread.tolist(), setting.at})
    rng = np.random.default_rng(setting.seed)
    factors = 1.0 + setting.noise * rng.uniform(-1.0, 1.0, (setting.draws, case.points.ms.size))
    tokens = [setting.sample.step_tokens(requests) for requests in loads]
    true = [values / case.step_ms(requests) for requests, values in zip(loads, tokens, strict=True)]
    chosen = np.empty((len(loads), setting.draws), dtype=np.int64)
    for draw in range(setting.draws):
        law = noisy(case, factors[draw])
        shared = None if law.depends_on_requests else case.table(law, 0)
        for i, requests in enumerate(loads):
            table = case.table(law, requests) if shared is None else shared
            chosen[i, draw] = best_budget(
                tokens[i], case.draft_ms(requests) + table[requests : requests * (1 + setting.gamma) + 1]
            )
    losses = np.array([1.0 - rates[chosen[i]] / rates.max() for i, rates in enumerate(true)])
    clean = np.array([int(rates.argmax()) for rates in true], dtype=np.int64)
    return NoiseBand(loads, clean, chosen, losses)


def noise(case: Case, band: NoiseBand | None = None) -> list[Finding]:
    """Would the decision be another one if the table were timed again?"""
    setting = case.setting
    band = noise_band(case) if band is None else band
    moved = band.chosen != band.clean[:, None]
    if not moved.any():
        return []
    i = band.loads.index(setting.at)
    far = np.abs(band.chosen - band.clean[:, None]) > np.array(band.loads)[:, None] / 2
    means = band.losses.mean(axis=1)
    worst = int(np.argmax(means))
    loss = Loss(float(means[i]), float(means.mean()), float(means[worst]), band.loads[worst])
    low, high = np.quantile(band.chosen[i], (0.05, 0.95)) / setting.at
    return [
        Finding(
            "noise",
            graded(max(loss.at, loss.mean)),
            f"with +-{percent(setting.noise)} noise on every size the decision at {counted(setting.at, 'request')} "
            f"changes in {percent(float(moved[i].mean()))} of {setting.draws} tables, by more than half a draft a "
            f"request in {percent(float(far[i].mean()))} (nine in ten tables: {low:.2f} to {high:.2f} drafts a "
            f"request; without noise {band.clean[i] / setting.at:.2f}). {lost(loss, setting.at)}; the unluckiest table "
            f"at {counted(setting.at, 'request')} loses {percent(float(band.losses[i].max()))}",
            "a changed decision that costs little is no harm; where it costs, time each size more often (the median of "
            "n passes has about 1.25 / sqrt(n) of one pass's spread) or smooth the table",
            (setting.at, setting.at * (1 + setting.gamma)),
            loss,
        )
    ]
