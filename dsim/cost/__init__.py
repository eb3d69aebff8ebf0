"""What a step costs: models fitted to a `Profile`, all of them a `StepCost`. See `docs/cost-model.md`."""

from __future__ import annotations

from typing import Any

from dsim.cost.additive import Additive, fit_additive
from dsim.cost.model import ErrorSummary, StepCost, StepModel
from dsim.cost.points import Points, curve, one_request_count, verify_points
from dsim.cost.roofline import Roofline, RooflineModel, fit_roofline
from dsim.cost.staircase import Staircase, fit_staircase
from dsim.errors import InputError
from dsim.profile import Profile

__all__ = [
    "FITS",
    "Additive",
    "ErrorSummary",
    "Points",
    "Roofline",
    "RooflineModel",
    "Staircase",
    "StepCost",
    "StepModel",
    "fit",
    "verify_points",
]

#: Names of the fits.
FITS = ("staircase", "additive", "roofline", "roofline-moe")


def fit(
    profile: Profile,
    model: str = "staircase",
    *,
    running_max: bool = True,
    allow_extrapolation: bool = False,
) -> StepModel:
    """Fit a step cost to a profile.

    Parameters
    ----------
    profile
        Measured steps.
    model
        ``staircase``: the medians, priced at the next captured size. ``additive``: bias + alpha(requests) +
        theta(tokens). ``roofline``: smooth, from an overhead, a memory and a compute term, each a straight line.
        ``roofline-moe``: the same with a memory term that saturates as a batch touches all experts. The last
        two are a `RooflineModel`.
    running_max
        Of the staircase: a larger step is never cheaper. The others are non-decreasing by construction and
        refuse False.
    allow_extrapolation
        Continue in a straight line where the profile ends, instead of raising. Label what comes out.

    Raises
    ------
    InputError
        Unknown name (the known ones are listed), or a profile that does not determine the model.

    Examples
    --------
    >>> from dsim.profile import load_profile
    >>> fit(load_profile("b300x4-dsv4-flash-0731"), "roofline").label
    'measured:b300x4-dsv4-flash-0731:roofline'
    """
    if model not in FITS:
        raise InputError("unknown fit", field="fit", value=model, expected=f"one of {', '.join(FITS)}")
    if model != "staircase" and not running_max:
        raise InputError(
            f"the {model} fit is non-decreasing by construction",
            field="running_max",
            value=False,
            expected="True, or the staircase fit",
        )
    contexts, points = verify_points(profile)
    stepped = model == "staircase" and profile.capture_limit > 0
    common: dict[str, Any] = {
        "label": f"{profile.kind}:{profile.name}:{model}",
        "gpus": profile.gpus,
        "captured_sizes": profile.captured_sizes,
        "capture_limit": profile.capture_limit,
        "contexts": contexts,
        "draft": curve(profile, "draft", stepped=stepped, running_max=running_max),
        "prefill": curve(profile, "prefill", stepped=False, running_max=running_max),
        "draft_included": profile.draft_included,
        "allow_extrapolation": allow_extrapolation,
    }
    if model == "additive":
        additive = [fit_additive(item) for item in points]
        why = dict.fromkeys(note for _, note in additive if note is not None)
        return StepModel(fits=tuple(law for law, _ in additive), notes=tuple(why), **common)

    for item in points:
        one_request_count(item, profile, model)
    if model == "staircase":
        stairs = tuple(fit_staircase(item, running_max=running_max) for item in points)
        return StepModel(fits=stairs, **common)
    rooflines = [fit_roofline(item, profile.name, model) for item in points]
    notes = dict.fromkeys(note for _, found in rooflines for note in found)
    return RooflineModel(fits=tuple(law for law, _ in rooflines), notes=tuple(notes), **common)
