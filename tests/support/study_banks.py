"""Small draft banks on the same texts, for the experiments that compare drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dsim.drafts import Bank, BankHeader, make_bank, write_bank

DOMAINS = ("math", "code", "chat")


def header(gamma: int, drafter: str = "dspark markov 2 layers", **other: Any) -> BankHeader:
    """A recorded bank's header; `notes` as the recorder writes them."""
    given: dict[str, Any] = {
        "target": "tiny",
        "domains": DOMAINS,
        "temperatures": (1.0,) * gamma,
        "notes": json.dumps({"temperature": 0.6, "draws": 1}),
    } | other
    return BankHeader(
        gamma=gamma,
        kind="recorded",
        drafter=drafter,
        source="dsim",
        license="CC0-1.0",
        logit_low=-8.0,
        logit_high=8.0,
        **given,
    )


def study_bank(
    quality: float,
    *,
    gamma: int = 3,
    texts: int = 6,
    length: int = 40,
    seed: int = 0,
    fade: float = 0.0,
    **other: Any,
) -> Bank:
    """A bank of `texts` texts a domain; those of one `texts`, `length` and `seed` have the same texts.

    logit(alpha) = quality + text + domain - fade x (position - 1) + noise; the outcomes' luck is the texts', too.
    """
    rng = np.random.default_rng(seed)
    domains = other.get("domains", DOMAINS)
    many = texts * len(domains)
    lengths = length + rng.integers(0, 8, many)
    domain = np.repeat(np.arange(len(domains)), texts)
    hard = np.repeat(rng.normal(0, 0.4, many) - 0.3 * domain, lengths)[:, None]
    rows = int(lengths.sum())
    luck, noise = rng.random((rows, 8))[:, :gamma], rng.normal(0, 0.8, (rows, 8))[:, :gamma]
    logits = quality + hard - fade * np.arange(gamma) + noise
    alpha = 1 / (1 + np.exp(-logits))
    return make_bank(
        header(gamma, **other),
        confidence_logit=logits * 0.9 + 0.4 * rng.normal(0, 1, logits.shape),
        alpha=alpha,
        accepted=np.logical_and.accumulate(luck < alpha, axis=1).sum(axis=1),
        bounds=np.concatenate([[0], np.cumsum(lengths)]),
        domain=domain,
    )


def hand_bank(
    texts: list[list[tuple[list[float], list[float], int]]], domain: list[int], gamma: int = 2, **other: Any
) -> Bank:
    """A bank row by row: of each text the blocks (confidences, alphas, accepted), then gamma + 1 rows of nothing."""
    blank: tuple[list[float], list[float], int] = ([0.5] * gamma, [0.0] * gamma, 0)
    rows = [block for text in texts for block in [*text, *[blank] * (gamma + 1)]]
    confidence = np.array([row[0] for row in rows])
    return make_bank(
        header(gamma, **other),
        confidence_logit=np.log(confidence / (1 - confidence)),
        alpha=np.array([row[1] for row in rows]),
        accepted=np.array([row[2] for row in rows]),
        bounds=np.cumsum([0, *(len(text) + gamma + 1 for text in texts)]),
        domain=np.array(domain),
    )


def saved(folder: Path, **banks: Bank) -> list[str]:
    """Write banks to NAME.npz; returns the paths as text."""
    paths = []
    for name, bank in banks.items():
        write_bank(bank, folder / f"{name}.npz")
        paths.append(str(folder / f"{name}.npz"))
    return paths
