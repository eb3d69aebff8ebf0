"""Small recorded banks for tests: made up, with the header of a recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dsim.drafts import Bank, BankHeader, make_bank, write_bank

DOMAINS = ("math", "code", "chat")


def recorded_bank(
    gamma: int = 7,
    *,
    drafter: str = "dspark",
    source: str = "tiny",
    domains: tuple[str, ...] = DOMAINS,
    texts: int = 12,
    length: int = 160,
    ragged: int = 40,
    seed: int = 0,
    temperatures: tuple[float, ...] | None = None,
    over: float = 0.0,
) -> Bank:
    """A bank whose confidences are calibrated, or wrong by `over` logits.

    logit(alpha) = level + what the head sees + what it does not; every position of a block is seen anew, texts
    differ, and domains have levels of their own. c is the mean of alpha given what is seen.
    """
    rng = np.random.default_rng(seed)
    many = len(domains) * texts
    lengths = length + rng.integers(0, ragged + 1, many)
    rows = int(lengths.sum())
    domain = np.arange(many) % len(domains)
    level = np.linspace(0.9, 0.0, len(domains))[np.repeat(domain, lengths)]
    text = np.repeat(rng.normal(0, 0.5, many), lengths)
    seen = (level + text)[:, None] + rng.normal(0, 1.2, (rows, gamma)) - 0.1 * np.arange(gamma)
    unseen = rng.normal(0, 0.8, (rows, gamma))
    alpha = 1 / (1 + np.exp(-(seen + unseen)))
    accepted = np.logical_and.accumulate(rng.random(alpha.shape) < alpha, axis=1).sum(axis=1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    mean = ((1 / (1 + np.exp(-(seen[..., None] + 0.8 * nodes)))) * weights).sum(axis=-1) / weights.sum()
    temperatures = (1.0,) * gamma if temperatures is None else temperatures
    header = BankHeader(
        gamma, "recorded", drafter, "tiny-target", source, "CC0-1.0", domains, -10.0, 10.0, temperatures
    )
    return make_bank(
        header,
        confidence_logit=(np.log(mean / (1 - mean)) + over) * np.asarray(temperatures),
        alpha=alpha,
        accepted=accepted,
        bounds=np.concatenate([[0], np.cumsum(lengths)]),
        domain=domain,
    )


def write_shipped(folder: Path) -> None:
    """The banks that the shipped scenarios ask for, by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    write_bank(recorded_bank(7, drafter="dspark", texts=20, length=220), folder / "smollm2-dspark.npz")
    write_bank(recorded_bank(5, drafter="mtp", texts=20, length=220, seed=1), folder / "smollm2-mtp5.npz")
