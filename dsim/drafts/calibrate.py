"""Calibration of confidences by Sequential Temperature Scaling (STS).

The scheduler needs the *size* of a survival probability, not only its rank (DSpark paper, arXiv 2607.05147,
section 3.2.1, "Post-hoc Calibration"). A confidence is c_k = sigmoid(z_k / T_k); the order within a position is that
of the logits z_k whatever the temperature T_k > 0 is.

`fit_sts` finds the temperatures on held-out blocks, left to right, as in the paper; `fit_bank`, `split_blocks` and
`calibrated` do it with banks, `read_temperatures` and `write_temperatures` exchange them with engines.
`dsim.drafts.online` keeps them up with a drifting workload.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.drafts.bank import Bank, recalibrated
from dsim.drafts.reliability import RELIABILITY_BINS, auc, bin_gaps, ece, visited_rows
from dsim.errors import InputError
from dsim.files import replacing
from dsim.sigmoid import expit
from dsim.strictjson import load_json, need_object

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Temperatures that a fit may choose, lowest and highest.
BOUNDS = (0.25, 4.0)
#: Temperatures in between, evenly on a log scale: steps of 2 %.
GRID = 129
#: Blocks that a bin must hold.
MIN_BIN = 50


@dataclass(frozen=True)
class StsFit:
    """Temperatures, and what they do to the blocks they were fitted on.

    Attributes
    ----------
    temperatures
        Divisors of the confidence logits by position.
    ece_before, ece_after
        Calibration error of the cumulative product by position, with all temperatures 1 and with the fitted ones:
        the published definition (equal-width bins, none joined).
    auc
        Discrimination of the calibrated cumulative product by position; NaN where one class is empty.
    survivors
        Blocks whose first k drafts were accepted.
    n
        Blocks.
    at_bound
        Whether a temperature was moved towards the lowest or highest allowed, where the error is still falling: it
        takes wider bounds, more blocks, or more than a temperature.
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    auc: tuple[float, ...]
    survivors: tuple[int, ...]
    n: int
    at_bound: tuple[bool, ...]


def fit_sts(
    logits: npt.NDArray[np.floating[Any]],
    accepted: npt.NDArray[np.integer[Any]],
    *,
    alpha: npt.NDArray[np.floating[Any]] | None = None,
    grid: int = GRID,
    bins: int = RELIABILITY_BINS,
    min_bin: int = MIN_BIN,
    bounds: tuple[float, float] = BOUNDS,
    noise: float = 1.0,
) -> StsFit:
    """Sequential Temperature Scaling on held-out blocks.

    Position by position, left to right: the temperature on a 1-D grid whose cumulative product c_1 ... c_k has the
    smallest ECE over *all* blocks against "the first k drafts were accepted", earlier temperatures fixed (paper,
    section 3.2.1). Ties go to the temperature nearest to 1 on a log scale.

    Two rules are ours, because the plain minimum runs to the ends of the grid where few blocks survive:

    - neighboring bins are joined until each holds `min_bin` blocks;
    - errors that differ by less than chance are ties. One temperature fitted to pure noise lowers the ECE by about
      s / sqrt(K), with s the standard error of the mean label and K the number of bins. The choice is the
      temperature nearest to 1 whose ECE is within ``noise`` times that of the smallest. With many blocks this
      vanishes; with few the position stays as it is until the blocks show that it should not.

    Parameters
    ----------
    logits
        [N, gamma] confidence logits before any temperature.
    accepted
        [N] drafts accepted when the whole block is verified.
    alpha
        [N, gamma] acceptance probabilities. If given, the label of position k is alpha_1 ... alpha_k instead of the
        outcome: the exact probability of that outcome for the block as it was drafted (alpha_k past a rejection is
        conditional on the drafts before it, which is what the product needs). It has the same expectation and much
        less noise. Engines do not see it.
    grid
        Temperatures, evenly spaced on a log scale between the bounds (1 is always among them).
    bins
        Equal-width bins of [0, 1].
    min_bin
        Blocks that a bin must hold; 0 joins none.
    bounds
        Lowest and highest temperature.
    noise
        Standard errors that make a tie; 0 for the plain minimum of the paper. Blocks count as independent, which
        neighboring ones are not quite: a larger value is more careful.

    Raises
    ------
    InputError
        Arrays out of shape or range, or options that contradict each other.
    """
    z, counts, known = _checked_blocks(logits, accepted, alpha)
    values = _grid(grid, bounds)
    need(bins >= 1, "bins", bins, "an integer >= 1")
    need(min_bin >= 0, "min_bin", min_bin, "an integer >= 0")
    need(0 <= noise < float("inf"), "noise", noise, "a number >= 0")
    n, gamma = z.shape
    distance = np.round(np.abs(np.log(values)), 9)
    survival, raw = np.ones(n), np.ones(n)
    chosen, before, after, areas, at_bound = [], [], [], [], []
    for k in range(gamma):
        label = counts > k
        target = label.astype(np.float64) if known is None else known[:, k]
        errors, chance = np.empty(values.size), np.empty(values.size)
        for i, temperature in enumerate(values):
            product = survival * expit(z[:, k] / temperature)
            gaps, held = bin_gaps(product, target, bins, min_bin)
            errors[i] = np.abs(gaps).sum() / n
            # Variance of the labels if this temperature were the right one.
            spread = product * (1 - product) if known is None else (target - product) ** 2
            chance[i] = np.sqrt(spread.sum() / held) / n
        tied = errors <= errors.min() + noise * chance + 1e-12
        best = int(np.lexsort((errors, distance, ~tied))[0])
        chosen.append(float(values[best]))
        moved = distance[best] > distance.min()
        at_bound.append(bool(moved and np.argmin(errors) in (0, values.size - 1)))
        survival, raw = survival * expit(z[:, k] / values[best]), raw * expit(z[:, k])
        before.append(ece(raw, target, bins))
        after.append(ece(survival, target, bins))
        areas.append(auc(survival, label))
    return StsFit(
        temperatures=tuple(chosen),
        ece_before=tuple(before),
        ece_after=tuple(after),
        auc=tuple(areas),
        survivors=tuple(int(np.count_nonzero(counts > k)) for k in range(gamma)),
        n=n,
        at_bound=tuple(at_bound),
    )


def need(condition: bool, field: str, value: object, expected: str) -> None:
    """InputError by field unless the condition holds."""
    if not condition:
        raise InputError(field=field, value=value, expected=expected)


def _checked_blocks(
    logits: npt.ArrayLike, accepted: npt.ArrayLike, alpha: npt.ArrayLike | None
) -> tuple[FloatArray, IntArray, FloatArray | None]:
    """Logits, counts, and the cumulative product of alpha."""
    z, counts = np.asarray(logits, dtype=np.float64), np.asarray(accepted)
    need(z.ndim == 2 and z.size > 0, "logits", z.shape, "an array [N, gamma]")
    need(bool(np.all(np.isfinite(z))), "logits", "a number that is not finite", "finite numbers")
    n, gamma = z.shape
    whole = counts.shape == (n,) and np.issubdtype(counts.dtype, np.integer)
    need(whole, "accepted", f"{counts.dtype}{list(counts.shape)}", f"integers [{n}]")
    low, high = int(counts.min()), int(counts.max())
    need(low >= 0 and high <= gamma, "accepted", low if low < 0 else high, f"0..gamma = {gamma}")
    if alpha is None:
        return z, counts.astype(np.int64), None
    probability = np.asarray(alpha, dtype=np.float64)
    need(probability.shape == z.shape, "alpha", probability.shape, f"an array {z.shape}")
    inside = bool(np.all((probability >= 0) & (probability <= 1)))
    need(inside, "alpha", "a number out of range", "probabilities in [0, 1]")
    return z, counts.astype(np.int64), np.multiply.accumulate(probability, axis=1)


def _grid(size: int, bounds: tuple[float, float]) -> FloatArray:
    need(len(bounds) == 2 and 0 < bounds[0] < bounds[1] < float("inf"), "bounds", bounds, "0 < low < high, finite")
    need(size >= 2, "grid", size, "an integer >= 2")
    values = np.geomspace(*bounds, size)
    values[np.abs(np.log(values)) < 1e-9] = 1.0
    if bounds[0] < 1 < bounds[1] and not np.any(values == 1):
        values = np.sort(np.append(values, 1.0))
    return values


def apply_temperatures(logits: npt.ArrayLike, temperatures: npt.ArrayLike) -> FloatArray:
    """float64[N, gamma]: conditional confidences sigmoid(logits / temperatures).

    Parameters
    ----------
    logits
        [N, gamma] confidence logits.
    temperatures
        gamma divisors > 0.

    Examples
    --------
    >>> apply_temperatures([[0.0, 2.0]], (1.0, 2.0)).round(3).tolist()
    [[0.5, 0.731]]
    """
    z = np.asarray(logits, dtype=np.float64)
    need(z.ndim == 2, "logits", z.shape, "an array [N, gamma]")
    return np.asarray(expit(z / np.asarray(checked_temperatures(temperatures, z.shape[1]))), dtype=np.float64)


# -- files -----------------------------------------------------------------------------------------------


def checked_temperatures(
    temperatures: Any, gamma: int | None = None, *, file: str | Path | None = None
) -> tuple[float, ...]:
    """The temperatures as floats, or an InputError that names the one that is none.

    Parameters
    ----------
    temperatures
        A sequence of finite numbers > 0, one a position.
    gamma
        How many there must be; None: at least one.
    file
        Where they stand, for the message.
    """
    values = temperatures.tolist() if isinstance(temperatures, np.ndarray) else temperatures
    expected = "a list of finite numbers > 0" if gamma is None else f"{gamma} finite numbers > 0"
    if not isinstance(values, list | tuple) or not values or (gamma is not None and len(values) != gamma):
        raise InputError(file=file, field="temperatures", value=values, expected=expected)
    found = []
    for i, value in enumerate(values):
        number = _number(value)
        if number is None:
            raise InputError(file=file, field=f"temperatures[{i}]", value=repr(value), expected="a finite number > 0")
        found.append(number)
    return tuple(found)


def _number(value: object) -> float | None:
    """A finite number > 0 as a float, or None. True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if 0 < number < float("inf") else None


def read_temperatures(path: str | Path, gamma: int) -> tuple[float, ...]:
    """Temperatures of a file in the engines' format, ``{"temperatures": [T_1, ..., T_gamma]}``.

    Engines write more beside them (a data set, errors before and after); `dsim.engines.StsTemperatures` reads and keeps
    that, and ``python -m dsim.convert`` drops it by name.

    Raises
    ------
    InputError
        No such file, no JSON, other keys, another length, or a value that is no finite number > 0.
    """
    path = Path(path)
    raw = need_object(load_json(path, '{"temperatures": [...]}'), path, expected='an object {"temperatures": [...]}')
    for key in raw:
        if key != "temperatures":
            how = f"python -m dsim.convert {path.name} OUT.json --format temperatures"
            raise InputError(
                "unknown key",
                file=path,
                field=key,
                expected=f"temperatures only ('{how}' leaves out what an engine's file has beside them, and names it)",
            )
    if "temperatures" not in raw:
        raise InputError("missing key", file=path, field="temperatures")
    return checked_temperatures(raw["temperatures"], gamma, file=path)


def write_temperatures(path: str | Path, temperatures: npt.ArrayLike | StsFit) -> None:
    """Write temperatures in the engines' format, atomically; numbers survive the round trip exactly."""
    path = Path(path)
    values = temperatures.temperatures if isinstance(temperatures, StsFit) else temperatures
    text = json.dumps({"temperatures": list(checked_temperatures(values))}) + "\n"
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


# -- banks -----------------------------------------------------------------------------------------------


def split_blocks(bank: Bank, fraction: float, seed: int = 0) -> tuple[Bank, Bank]:
    """Two banks without a text in common: one to fit on, one to evaluate on.

    Blocks of one text overlap and share its difficulty, so whole trajectories are drawn, domain by domain.

    Parameters
    ----------
    bank
        The bank to split. Domains need two trajectories each.
    fraction
        Share of each domain's trajectories in the first bank, in (0, 1); each side gets at least one.
    seed
        Seed of the draw. Banks with the same texts (drafters of one preset) are split alike.
    """
    need(0 < fraction < 1, "fraction", fraction, "a number strictly between 0 and 1")
    first = np.zeros(bank.domain.size, dtype=np.bool_)
    for i, name in enumerate(bank.header.domains):
        members = np.flatnonzero(bank.domain == i)
        if members.size < 2:
            raise InputError(
                f"domain '{name}' cannot be split", field="domain", value=members.size, expected="2 trajectories"
            )
        taken = min(max(round(fraction * members.size), 1), members.size - 1)
        rng = np.random.default_rng(np.random.SeedSequence([seed, i]))
        first[rng.permutation(members)[:taken]] = True
    return _of_trajectories(bank, np.flatnonzero(first)), _of_trajectories(bank, np.flatnonzero(~first))


def _of_trajectories(bank: Bank, which: IntArray) -> Bank:
    lengths = np.diff(bank.bounds)[which]
    rows = np.concatenate([np.arange(bank.bounds[t], bank.bounds[t + 1]) for t in which])
    return replace(
        bank,
        confidence=bank.confidence[rows],
        confidence_bytes=bank.confidence_bytes[rows],
        alpha_bytes=bank.alpha_bytes[rows],
        accepted=bank.accepted[rows],
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        domain=bank.domain[which],
    )


def fit_bank(bank: Bank, *, expected: bool = False, **options: Any) -> StsFit:
    """`fit_sts` on the blocks of a bank that decoding with full verification visits.

    The temperatures that the bank already has are left out: those found replace them.

    Parameters
    ----------
    bank
        Not the one to evaluate on (`split_blocks`).
    expected
        Labels from the bank's alpha instead of its outcomes (`fit_sts`, ``alpha``).
    options
        Of `fit_sts`.
    """
    header = bank.header
    rows = visited_rows(bank.accepted, bank.bounds, bank.usable())
    step = (header.logit_high - header.logit_low) / 255
    logits = header.logit_low + bank.confidence_bytes[rows] * step
    alpha = bank.alpha_bytes[rows] / 255.0 if expected else None
    return fit_sts(logits, bank.accepted[rows], alpha=alpha, **options)


def calibrated(bank: Bank, calibration: Bank | StsFit | Sequence[float] | npt.NDArray[np.floating[Any]]) -> Bank:
    """The same bank with calibrated confidences.

    Parameters
    ----------
    bank
        The bank to calibrate.
    calibration
        Temperatures by position, an `StsFit`, or a bank of other texts of the same drafter to fit them on
        (`fit_bank`; `split_blocks` makes one).
    """
    if isinstance(calibration, Bank):
        calibration = fit_bank(calibration)
    if isinstance(calibration, StsFit):
        calibration = calibration.temperatures
    return recalibrated(bank, checked_temperatures(calibration, bank.header.gamma))
