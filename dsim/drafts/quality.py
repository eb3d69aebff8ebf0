"""Confidences of another quality for the same drafts: how much does a scheduler owe to what it knows?

A `Quality` replaces or distorts the confidences of a bank, after its temperatures and its tilt. What is drafted and
accepted, and the luck, stay as they are, so that runs that differ in it are paired draft by draft.

======================= ================================================================================================
``recorded``            as the bank has them (no `Quality`)
``perfect``             alpha_k: the exact probability that the draft is accepted, given the drafts before it
``constant``            one number a position: the drafter's mean acceptance, nothing about this draft or text
``constant:domain``     the same by domain
``shuffled``            the block of confidences of another, random place: right on average, and of the same spread,
                        but about something else
``shuffled:domain``     of a random place of the same domain
``overconfident:E``     logits shifted up by one number, so that the mean ECE over positions is E (0.1 is 10 %)
``underconfident:E``    the same, downwards
``{code = b, ...}``     logits shifted by domain
======================= ================================================================================================

"Right on average" is over the blocks that decoding with full verification visits, as everywhere in `dsim.drafts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import scipy

from dsim.drafts.bank import Bank
from dsim.drafts.reliability import weighted_auc, weighted_ece
from dsim.drafts.tilt import MAX_TILT, DomainTilt, Tilt, alpha_table, shifted, tilted_bank, visit_weights
from dsim.errors import InputError
from dsim.sigmoid import expit

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

KINDS = ("perfect", "constant", "shuffled", "overconfident", "underconfident", "bias")
EXPECTED = (
    "recorded, perfect, constant, constant:domain, shuffled, shuffled:domain, overconfident:ECE, underconfident:ECE, "
    "or logits by domain"
)
#: Largest ECE that may be asked for.
MAX_ECE = 0.5
# Blocks that an ECE is solved on; of more every n-th is taken.
_BLOCKS = 1 << 17
_SEED = 0x5EED


@dataclass(frozen=True)
class Quality:
    """What is done to confidences; `parse_quality` reads one.

    Attributes
    ----------
    kind
        One of `KINDS`.
    by_domain
        ``constant`` and ``shuffled``: domain by domain.
    ece
        ``overconfident`` and ``underconfident``: the wanted ECE of the cumulative product, mean over positions, a
        fraction.
    bias
        ``bias``: logits by domain; 0 for domains that are not named.
    """

    kind: str
    by_domain: bool = False
    ece: float = 0.0
    bias: tuple[tuple[str, float], ...] = ()

    @property
    def label(self) -> str:
        """How `drafts_source` names it, without spaces or commas.

        >>> parse_quality("shuffled:domain").label, parse_quality({"code": 0.5, "chat": -1}).label
        ('shuffled-by-domain', 'bias(code+0.5/chat-1)')
        """
        if self.kind == "bias":
            return f"bias({'/'.join(f'{name}{logits:+g}' for name, logits in self.bias)})"
        return f"{self.kind}{'-by-domain' if self.by_domain else ''}{f'-{self.ece:g}' if self.ece else ''}"


def parse_quality(given: object) -> Quality | None:
    """The quality that a scenario names; None for ``recorded``.

    Parameters
    ----------
    given
        Text as in the module's table, or a mapping of domains to logits.

    Raises
    ------
    InputError
        Anything else.

    Examples
    --------
    >>> parse_quality("overconfident:0.1")
    Quality(kind='overconfident', by_domain=False, ece=0.1, bias=())
    """
    if isinstance(given, Mapping):
        return _bias(given)
    kind, colon, rest = str(given).partition(":")
    if given == "recorded":
        return None
    if given == "perfect":
        return Quality("perfect")
    if kind in ("constant", "shuffled") and (not colon or rest == "domain"):
        return Quality(kind, by_domain=bool(colon))
    if kind in ("overconfident", "underconfident"):
        try:
            wanted = float(rest)
        except ValueError:
            wanted = 0.0
        if 0 < wanted < MAX_ECE:
            return Quality(kind, ece=wanted)
        raise InputError(field="confidence", value=given, expected=f"{kind}:ECE with 0 < ECE < {MAX_ECE:g}")
    raise InputError(field="confidence", value=given, expected=EXPECTED)


def _bias(given: Mapping[object, object]) -> Quality:
    found = []
    for domain, logits in given.items():
        number = isinstance(logits, int | float) and not isinstance(logits, bool)
        if not isinstance(logits, int | float) or not number or not abs(logits) <= MAX_TILT:
            expected = f"a number between -{MAX_TILT:g} and {MAX_TILT:g}"
            raise InputError(field=f"confidence.{domain}", value=logits, expected=expected)
        found.append((str(domain), float(logits)))
    if not any(logits for _, logits in found):
        raise InputError("changes nothing", field="confidence", value=dict(found), expected="a logit that is not 0")
    return Quality("bias", bias=tuple(found))


@lru_cache(maxsize=16)
def graded(bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int, quality: Quality) -> Float32Array:
    """float32[N, gamma]: the confidences of a bank in blocks of `gamma`, tilted, then of that quality.

    Raises
    ------
    InputError
        A domain that the bank does not have, or an ECE that no shift gives.
    """
    if quality.kind == "perfect":
        return alpha_by_row(bank, tilt, gamma).astype(np.float32)
    if quality.kind == "constant":
        return _constant(bank, tilt, gamma, quality.by_domain)
    confidence = tilted_confidence(bank, tilt, gamma)
    if quality.kind == "shuffled":
        return confidence[_random_rows(bank, tilt, gamma, quality.by_domain)]
    if quality.kind == "bias":
        by = _by_domain(bank, quality.bias)[row_domains(bank)]
        return shifted(confidence, by[:, None]).astype(np.float32)
    by_all = ece_shift(bank, tilt, gamma, quality.ece, up=quality.kind == "overconfident")
    return shifted(confidence, by_all).astype(np.float32)


def tilted_confidence(bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int) -> Float32Array:
    """float32[N, gamma]: the confidences that replay sees."""
    return bank.confidence[:, :gamma] if tilt is None else tilted_bank(bank, tilt, gamma).confidence


def row_domains(bank: Bank) -> IntArray:
    """int64[N]: index of each row's domain."""
    return np.repeat(bank.domain.astype(np.int64), np.diff(bank.bounds))


def alpha_by_row(bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int) -> FloatArray:
    """float64[N, gamma]: acceptance probabilities under a tilt, within (0, 1)."""
    table = alpha_table(bank, tilt, gamma)
    return np.asarray(table[row_domains(bank)[:, None], np.arange(gamma), bank.alpha_bytes[:, :gamma]])


def _by_domain(bank: Bank, bias: tuple[tuple[str, float], ...]) -> FloatArray:
    domains = bank.header.domains
    shifts = np.zeros(len(domains))
    for name, logits in bias:
        if name not in domains:
            raise InputError(
                "the bank has no such domain",
                field=f"confidence.{name}",
                value=logits,
                expected=f"one of {', '.join(domains)}",
            )
        shifts[domains.index(name)] = logits
    return shifts


def _constant(bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int, by_domain: bool) -> Float32Array:
    """Mean survivals, taken apart into conditional probabilities, so that their products are right on average."""
    weights, owner = visit_weights(bank, tilt, gamma), row_domains(bank)
    group = owner if by_domain else np.zeros_like(owner)
    survival = np.multiply.accumulate(alpha_by_row(bank, tilt, gamma), axis=1)
    many = int(group.max()) + 1
    mean = np.array([np.bincount(group, weights * column, many) for column in survival.T]).T
    mean = np.column_stack([np.bincount(group, weights, many), mean])
    conditional = mean[:, 1:] / mean[:, :-1]
    return np.asarray(conditional[group], dtype=np.float32)


def _random_rows(bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int, by_domain: bool) -> IntArray:
    """int64[N]: for each row one that is drawn, with replacement, by how often decoding visits it.

    A permutation of all rows would not be right on average: decoding visits hard text more often.
    """
    weights, owner = visit_weights(bank, tilt, gamma), row_domains(bank)
    luck = np.random.default_rng(_SEED).random(weights.size)
    drawn = np.empty(weights.size, dtype=np.int64)
    group = owner if by_domain else np.zeros_like(owner)
    for members in (np.flatnonzero(group == i) for i in range(int(group.max()) + 1)):
        reached = np.add.accumulate(weights[members])
        place = np.searchsorted(reached, luck[members] * reached[-1], side="right")
        drawn[members] = members[np.minimum(place, members.size - 1)]
    return drawn


@lru_cache(maxsize=64)
def ece_shift(bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int, wanted: float, *, up: bool) -> float:
    """The one shift of all confidence logits under which the mean ECE over positions is `wanted`.

    Raises
    ------
    InputError
        No shift upwards (`up`) or downwards reaches it; the range is named.
    """
    logits, survival, weights = _blocks(bank, tilt, gamma)

    def error(shift: float) -> float:
        predicted = np.multiply.accumulate(expit(logits + shift), axis=1)
        return float(np.mean([weighted_ece(predicted[:, k], survival[:, k], weights) for k in range(gamma)]))

    end = MAX_TILT if up else -MAX_TILT
    low, high = error(0.0), error(end)
    if not low < wanted < high:
        raise InputError(
            f"the confidences of drafter '{bank.header.drafter}' cannot have this ECE",
            field="confidence",
            value=wanted,
            expected=f"more than {low:.4f}, what it is without a shift, and less than {high:.4f}",
        )
    return (
        float(scipy.optimize.brentq(lambda share: error(share * end) - wanted, 0.0, 1.0, xtol=1e-6, maxiter=60)) * end
    )


def _blocks(bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Blocks that decoding visits: confidence logits, exact survival (both [n, gamma]), weights [n]."""
    weights = visit_weights(bank, tilt, gamma)
    rows = np.flatnonzero(weights)
    rows = rows[:: -(-rows.size // _BLOCKS)]
    confidence = np.clip(tilted_confidence(bank, tilt, gamma)[rows].astype(np.float64), 2.0**-24, 1 - 2.0**-24)
    survival = np.multiply.accumulate(alpha_by_row(bank, tilt, gamma)[rows], axis=1)
    return np.log(confidence / (1 - confidence)), survival, weights[rows]


def measured(
    bank: Bank, tilt: Tilt | DomainTilt | None, gamma: int, quality: Quality | None
) -> tuple[FloatArray, FloatArray]:
    """ECE and AUC by position, float64[gamma] each, of a bank's confidences at a quality.

    Of the cumulative product against the exact survival, over the blocks that decoding visits.
    """
    confidence = tilted_confidence(bank, tilt, gamma) if quality is None else graded(bank, tilt, gamma, quality)
    weights = visit_weights(bank, tilt, gamma)
    rows = np.flatnonzero(weights)
    predicted = np.multiply.accumulate(confidence[rows].astype(np.float64), axis=1)
    survival = np.multiply.accumulate(alpha_by_row(bank, tilt, gamma)[rows], axis=1)
    columns = [(predicted[:, k], survival[:, k], weights[rows]) for k in range(gamma)]
    return np.array([weighted_ece(*c) for c in columns]), np.array([weighted_auc(*c) for c in columns])
