"""Named synthetic drafters whose acceptance curves are published measurements.

==================== ========================= ==============================================================
preset               drafters                  acceptance
==================== ========================= ==============================================================
``dsv4`` (default)   dspark, mtp (gamma 5)     code: golden accepted lengths of DeepSeek-V4-Pro's two heads
                                               (InferenceX, thinking on); math and chat: code shifted by the
                                               logit differences of DSpark's curves in the paper's Fig. 2
``qwen3-4b``         dspark, dflash, eagle3    Fig. 2 of the paper (arXiv 2607.05147) as it stands
                     (gamma 7)
``dsv4-flash-0731``  dspark (gamma 7)          two samples of 23 and 55 drafts, pooled (vllm-ascend#13640);
                                               one domain, "mixed"
==================== ========================= ==============================================================

Discrimination and calibration of the confidences default to the paper's Fig. 6 (after STS), measured there on
one dataset (Alpaca, Qwen3-4B) and assumed here for every drafter and domain.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from dsim.drafts.synthetic import SyntheticSpec, by_position
from dsim.drafts.tilt import check_curve
from dsim.errors import InputError
from dsim.published import published_rows
from dsim.sigmoid import expit, logit
from dsim.strictjson import load_json

PRESETS = ("dsv4", "qwen3-4b", "dsv4-flash-0731")

_GOLDEN = {"dspark": "dsv4-pro-0813 dspark", "mtp": "dsv4-pro mtp"}
_GOLDEN_GAMMA = 5
_FIG2 = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3"}
_FLASH_0731 = {
    "vllm-ascend#13640 DSV4-Flash-0731 A2 sample1": 23,
    "vllm-ascend#13640 DSV4-Flash-0731 A2 sample2": 55,
}


def preset_curves(preset: str) -> dict[str, dict[str, tuple[float, ...]]]:
    """Conditional acceptance by drafter, domain and position.

    Raises
    ------
    InputError
        Unknown preset; the known ones are listed.
    """
    if preset not in PRESETS:
        raise InputError(field="preset", value=preset, expected=f"one of {', '.join(PRESETS)}")
    return {"dsv4": _dsv4, "qwen3-4b": _qwen3_4b, "dsv4-flash-0731": _flash_0731}[preset]()


def published_curve(name: str, drafter: str | None = None) -> dict[str, tuple[float, ...]]:
    """Conditional acceptance by domain and position, of one drafter of a preset.

    Parameters
    ----------
    name
        ``PRESET:DRAFTER``, or ``PRESET`` for its drafter called `drafter`.

    Raises
    ------
    InputError
        Unknown preset, or no such drafter there; the known ones are listed.

    Examples
    --------
    >>> [round(value, 2) for value in published_curve("qwen3-4b:dflash")["code"]]
    [0.86, 0.84, 0.81, 0.82, 0.82, 0.82, 0.8]
    """
    preset, colon, own = name.partition(":")
    curves = preset_curves(preset)
    chosen = own if colon else drafter
    if chosen not in curves:
        known = ", ".join(f"{preset}:{one}" for one in curves)
        raise InputError(
            f"preset '{preset}' has no acceptance curve of drafter '{chosen}'",
            field="tilt_to",
            value=name,
            expected=f"one of {known}",
        )
    return curves[chosen]


def read_curve(path: str | Path) -> dict[str, tuple[float, ...]]:
    """An acceptance curve from a JSON file: ``{"code": [0.8, 0.7], "chat": [0.6, 0.5]}``.

    Raises
    ------
    InputError
        No such file, no JSON, or no curve.
    """
    return check_curve(load_json(path, 'an acceptance curve, {"DOMAIN": [numbers], ...}'), path)


def preset_spec(
    preset: str,
    drafter: str,
    *,
    auc: tuple[float, ...] | None = None,
    ece: tuple[float, ...] | None = None,
    **shape: float,
) -> SyntheticSpec:
    """The generator's spec of one drafter of a preset.

    Parameters
    ----------
    auc, ece
        By position (one value: for all positions); None: the paper's Fig. 6.
    shape
        ``spread``, ``request_share``, ``text_share``, ``autocorrelation`` of `SyntheticSpec`.
    """
    curves = preset_curves(preset)
    if drafter not in curves:
        raise InputError(
            f"preset '{preset}' has no drafter '{drafter}'",
            field="drafter",
            expected=f"one of {', '.join(curves)}",
        )
    acceptance = curves[drafter]
    gamma = len(next(iter(acceptance.values())))
    fig6 = fig6_defaults(gamma)
    return SyntheticSpec(
        drafter=drafter,
        source=preset,
        acceptance=acceptance,
        auc=_all_positions(auc, gamma, "auc") or fig6["auc"],
        ece=_all_positions(ece, gamma, "ece") or fig6["ece"],
        strict=auc is not None or ece is not None,
        notes="acceptance curve published; spread, autocorrelation and confidences synthetic",
        **shape,  # type: ignore[arg-type]
    )


def _all_positions(values: tuple[float, ...] | None, gamma: int, field: str) -> tuple[float, ...] | None:
    if values is None:
        return None
    if len(values) == 1:
        return tuple(values) * gamma
    if len(values) != gamma:
        raise InputError(field=field, value=list(values), expected=f"1 number, or {gamma} (one a position)")
    return tuple(values)


@lru_cache
def fig6_defaults(gamma: int) -> Mapping[str, tuple[float, ...]]:
    """AUC and ECE (a fraction) by position: Fig. 6 at 1, 3, 5, 7; linear between, constant beyond."""
    rows = published_rows("paper_fig6_ece_auc")
    return {
        "auc": by_position({int(row["position"]): float(row["auc"]) for row in rows}, gamma),
        "ece": by_position({int(row["position"]): float(row["ece_after_pct"]) / 100 for row in rows}, gamma),
    }


def _fig2(drafter: str) -> dict[str, tuple[float, ...]]:
    rows = [row for row in published_rows("paper_fig2") if row["drafter"] == _FIG2[drafter]]
    return {
        domain: _ordered([row for row in rows if row["domain"] == domain.capitalize()], "position", "cond_acceptance")
        for domain in ("code", "math", "chat")
    }


def _ordered(rows: list[dict[str, str]], by: str, column: str) -> tuple[float, ...]:
    """A column's numbers in the order of another one's."""
    return tuple(float(row[column]) for row in sorted(rows, key=lambda row: int(row[by])))


def _qwen3_4b() -> dict[str, dict[str, tuple[float, ...]]]:
    return {drafter: _fig2(drafter) for drafter in _FIG2}


def _dsv4() -> dict[str, dict[str, tuple[float, ...]]]:
    fig2 = {domain: logit(np.asarray(curve[:_GOLDEN_GAMMA])) for domain, curve in _fig2("dspark").items()}
    table = [row for row in published_rows("accept_golden_al_inferencex") if row["mode"] == "thinking_on"]
    curves = {}
    for drafter, head in _GOLDEN.items():
        rows = [row for row in table if row["head"] == head]
        length = np.array(_ordered(rows, "num_speculative_tokens", "acceptance_length")[:_GOLDEN_GAMMA])
        # AL(k) - AL(k - 1) is the chance that draft k is reached and accepted.
        survival = np.diff(length, prepend=1.0)
        code = survival / np.concatenate([[1.0], survival[:-1]])
        curves[drafter] = {
            domain: tuple(float(v) for v in expit(logit(code) + fig2[domain] - fig2["code"])) for domain in fig2
        }
    return curves


def _flash_0731() -> dict[str, dict[str, tuple[float, ...]]]:
    table = published_rows("accept_per_position")
    counts = np.zeros(7)
    for source, drafts in _FLASH_0731.items():
        rows = [row for row in table if row["source"] == source]
        # The fractions are counts over 23 and 55 drafts, printed with three digits.
        counts += np.rint(np.array(_ordered(rows, "position", "accepted_fraction_of_drafts")) * drafts)
    reached = np.concatenate([[sum(_FLASH_0731.values())], counts[:-1]])
    return {"dspark": {"mixed": tuple(float(v) for v in counts / reached)}}
