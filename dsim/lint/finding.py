"""A finding of the lint, and how its numbers are said."""

from __future__ import annotations

from dataclasses import dataclass

from dsim.lint.decision import Loss
from dsim.wording import counted, percent

#: The gravest first.
SEVERITIES = ("error", "warning", "info")

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
    """

    check: str
    severity: str
    evidence: str
    advice: str
    tokens: tuple[int, int] | None = None
    loss: Loss | None = None


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
