"""Is this price table fit for a planner? Findings about a profile and the use that is made of it.

`docs/profile-lint.md` describes every check. Nothing is simulated: see `dsim.lint.decision` for the yardstick.
"""

from __future__ import annotations

from dsim.lint.case import Case, Mixture, Setting, make_case, usual_concurrency
from dsim.lint.checks import CHECKS
from dsim.lint.decision import DraftSample, Loss, draft_sample
from dsim.lint.finding import GLOSSES, SEVERITIES, Finding
from dsim.lint.noise import NoiseBand, noise, noise_band

__all__ = [
    "CHECKS",
    "GLOSSES",
    "SEVERITIES",
    "Case",
    "DraftSample",
    "Finding",
    "Loss",
    "Mixture",
    "NoiseBand",
    "Setting",
    "draft_sample",
    "lint",
    "make_case",
    "noise",
    "noise_band",
    "usual_concurrency",
]


def lint(case: Case, band: NoiseBand | None = None) -> tuple[Finding, ...]:
    """All findings, the gravest first; within a severity in the order of the checks.

    Parameters
    ----------
    case
        From `make_case`.
    band
        The noisy decisions, where they are known already (`noise_band`).

    Examples
    --------
    >>> from dsim.profile import load_profile
    >>> setting = Setting(draft_sample("0.9,0.8,0.7,0.6,0.5"), concurrency=256, at=64, draws=20)
    >>> found = lint(make_case(load_profile("b300x4-dsv4-flash-0731"), setting))
    >>> [finding.severity for finding in found if finding.check == "cliff"]
    ['warning']
    """
    found = [finding for check in CHECKS for finding in check(case)]
    found += noise(case, band)
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
