"""A finding of the lint, and how its numbers are said."""

from __future__ import annotations

from dataclasses import dataclass

from dsim.lint.decision import Loss
from dsim.wording import counted, percent

#: The gravest first.
SEVERITIES = ("error", "warning", "info")

#: What each check is about, in a few words for a figure.
GLOSSES = {
    "flat-table": "every draft looks free",
    "beyond-table": "steps that nobody timed",
    "resolution": "too few sizes where the decision falls",
    "captured-sizes": "captured sizes are not named",
    "hidden-stair": "the look-up misses a step in price",
    "flattened-dips": "cheap sizes are charged too much",
    "cliff": "whole blocks leave the captured graphs",
    "draft-cost": "what a draft costs",
    "draft-unpriced": "the draft's time left out of the price",
    "dummy-profile": "too fast for real text?",
    "thin-evidence": "few passes, or computed prices",
    "noise": "does noise change the decision?",
}

#: Share of the throughput whose loss makes a finding a warning, and an error.
LOSS_WARNING, LOSS_ERROR = 0.01, 0.05
#: Below this loss, at any load, there is nothing to report.
LOSS_NOTHING = 0.001


@dataclass(frozen=True)
class Finding:
    """One thing that a profile, or the use that is made of it, should be questioned about.

    Parameters
    ----------
    check
        Name of the check, as in the docs.
    severity
        ``error``: the table misleads, or lacks what is needed. ``warning``: it costs something, or may. ``info``: worth
        knowing.
    evidence
        What was found, with numbers.
    advice
        What to do about it.
    tokens
        The step sizes it is about, smallest and largest; None where it is about the whole table.
    loss
        Throughput lost, where the check can tell.
    where
        What sets it apart from other findings of its check; may be empty.
    """

    check: str
    severity: str
    evidence: str
    advice: str
    tokens: tuple[int, int] | None = None
    loss: Loss | None = None
    where: str = ""

    @property
    def gloss(self) -> str:
        """What it is about, in a few words."""
        return GLOSSES[self.check] + (f" {self.where}" if self.where else "")


def graded(loss: float) -> str:
    """Severity of a lost share of the throughput.

    >>> graded(0.06), graded(0.02), graded(0.002)
    ('error', 'warning', 'info')
    """
    return "error" if loss >= LOSS_ERROR else "warning" if loss >= LOSS_WARNING else "info"


def lost(loss: Loss, at: int) -> str:
    """A loss in words."""
    return (
        f"Throughput lost: {percent(loss.at)} at {counted(at, 'request')}, {percent(loss.mean)} over all loads, "
        f"{percent(loss.worst)} at worst ({counted(loss.worst_at, 'request')})"
    )
