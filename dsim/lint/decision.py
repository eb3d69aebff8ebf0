"""The yardstick of the checks: what a planner decides from a price table, and what that is worth on another one.

No simulation. One step of R requests whose drafts are like those of a sample; the planner takes the number of drafts
with the most expected tokens a millisecond, and the same number is then charged at the true prices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsim.drafts import load_bank, preset_spec, read_curve, shipped_banks, synthetic_bank
from dsim.drafts.presets import PRESETS
from dsim.drafts.reliability import visited_rows
from dsim.errors import InputError

FloatArray = npt.NDArray[np.float64]

#: Most blocks that are kept of a bank: every n-th of those that decoding visits.
SAMPLE_BLOCKS = 4096
#: A draft less likely than this counts as worthless where "everything is verified" is asked.
WORTHLESS = 0.01


@dataclass(frozen=True, eq=False)
class DraftSample:
    """Drafted blocks as a planner sees them, taken at their word (as if the confidences were calibrated).

    Parameters
    ----------
    survival
        float64[N, gamma]: chance that all drafts up to a position are accepted, one row a block.
    label
        Where they come from.

    Raises
    ------
    InputError
        No block, values outside 0..1, or a survival that rises along the block.

    Examples
    --------
    Two kinds of requests: the drafts of the first are better, so they are verified first.

    >>> sample = DraftSample(np.array([[0.8, 0.6], [0.4, 0.2]]), "two kinds")
    >>> sample.step_tokens(2).round(9).tolist()
    [2.0, 2.8, 3.4, 3.8, 4.0]
    """

    survival: FloatArray
    label: str
    _budget: FloatArray = field(init=False, repr=False)
    _value: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        survival = np.array(self.survival, dtype=np.float64)
        if survival.ndim != 2 or survival.size == 0:
            raise InputError(field="survival", value=survival.shape, expected="an array [blocks, gamma], not empty")
        if not ((survival >= 0) & (survival <= 1)).all() or (np.diff(survival, axis=1) > 1e-9).any():
            raise InputError(field="survival", expected="probabilities that never rise along a block")
        blocks = survival.shape[0]
        best = np.sort(survival, axis=None)[::-1]
        object.__setattr__(self, "survival", survival)
        object.__setattr__(self, "_budget", np.arange(survival.size + 1) / blocks)
        object.__setattr__(self, "_value", np.concatenate([[0.0], np.cumsum(best)]) / blocks)

    @property
    def gamma(self) -> int:
        """Drafts a block."""
        return int(self.survival.shape[1])

    @property
    def worthwhile(self) -> float:
        """Drafts a request that survive with a chance of at least `WORTHLESS`."""
        return float(np.count_nonzero(self.survival >= WORTHLESS) / self.survival.shape[0])

    def step_tokens(self, requests: int) -> FloatArray:
        """float64[requests * gamma + 1]: expected tokens of a step by drafts verified, the best ones first.

        Exact where the requests' blocks are in the sample's proportions, linear between: with few requests the
        luck of which blocks are drafted is averaged over.
        """
        drafts = np.arange(requests * self.gamma + 1)
        return np.asarray(requests * (1.0 + np.interp(drafts / requests, self._budget, self._value)))

    def cut(self, gamma: int) -> DraftSample:
        """The first `gamma` drafts of every block."""
        if not 1 <= gamma <= self.gamma:
            raise InputError(
                f"the drafts of {self.label} have blocks of {self.gamma}",
                field="gamma",
                value=gamma,
                expected=f"1 to {self.gamma}",
            )
        if gamma == self.gamma:
            return self
        return DraftSample(self.survival[:, :gamma], f"{self.label}:first-{gamma}-of-{self.gamma}")


def draft_sample(spec: str) -> DraftSample:
    """Drafts by description.

    Parameters
    ----------
    spec
        ``PRESET`` or ``PRESET:DRAFTER`` (``dsv4``, ``qwen3-4b:eagle3``): blocks of the synthetic bank. A shipped
        bank's name, or the path of a ``.npz`` bank: its blocks. A ``.json`` curve: one block a domain, as likely as
        the others. Numbers ``0.9,0.8,0.7``: conditional acceptance by position, the same for all.

    Raises
    ------
    InputError
        None of these; the known names are listed.

    Examples
    --------
    >>> draft_sample("0.5,0.5").survival.tolist()
    [[0.5, 0.25]]
    """
    preset, _, drafter = spec.partition(":")
    if preset in PRESETS:
        bank = synthetic_bank(preset_spec(preset, drafter or "dspark"))
    elif spec.endswith(".npz") or spec in shipped_banks():
        bank = load_bank(spec)
    elif spec.endswith(".json"):
        curve = read_curve(spec)
        return DraftSample(np.cumprod(np.array(list(curve.values())), axis=1), f"curve:{Path(spec).name}")
    else:
        return DraftSample(np.cumprod(np.array([_numbers(spec)]), axis=1), f"curve:{spec}")
    rows = visited_rows(bank.accepted, bank.bounds, bank.usable())
    rows = rows[:: -(-rows.size // SAMPLE_BLOCKS)]
    survival = np.multiply.accumulate(bank.confidence[rows].astype(np.float64), axis=1)
    header = bank.header
    return DraftSample(survival, f"{header.kind}:{header.source}:{header.drafter}")


def _numbers(spec: str) -> list[float]:
    try:
        values = [float(text) for text in spec.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 1 for value in values):
        known = ", ".join([*PRESETS, *shipped_banks()])
        raise InputError(
            field="acceptance",
            value=spec,
            expected=f"one of {known}; PRESET:DRAFTER; a bank (.npz) or a curve (.json); or probabilities 0.9,0.8,...",
        )
    return values


#: Milliseconds of a step by drafts verified, given the number of requests: float64[requests * gamma + 1].
Prices = Callable[[int], FloatArray]


def best_budget(tokens: FloatArray, ms: FloatArray) -> int:
    """Number of drafts with the most tokens a millisecond; the fewest where several tie.

    >>> best_budget(np.array([2.0, 2.8, 3.4]), np.array([10.0, 13.0, 17.0]))
    1
    """
    return int((tokens / ms).argmax())


@dataclass(frozen=True)
class Loss:
    """Throughput lost by deciding on wrong prices, as fractions of the best that the true ones allow.

    Parameters
    ----------
    at
        At the operating point.
    mean, worst
        Over the loads looked at, all alike.
    worst_at
        Requests at which `worst` occurs (the fewest).
    """

    at: float
    mean: float
    worst: float
    worst_at: int


def loss_of(sample: DraftSample, loads: list[int], at: int, believed: Prices, true: Prices) -> Loss:
    """What deciding on the `believed` prices loses where the `true` ones are paid.

    Parameters
    ----------
    loads
        Numbers of requests to look at; `at` is one of them.
    """
    losses = []
    for requests in loads:
        tokens, ms = sample.step_tokens(requests), true(requests)
        chosen = best_budget(tokens, believed(requests))
        rates = tokens / ms
        losses.append(1.0 - float(rates[chosen] / rates.max()))
    worst = int(np.argmax(losses))
    return Loss(losses[loads.index(at)], float(np.mean(losses)), losses[worst], loads[worst])
