"""Draft sources: what a drafter drafts, how sure it is, and what the target accepts."""

from dsim.drafts.bank import (
    Bank,
    BankHeader,
    check_bank,
    load_bank,
    make_bank,
    read_bank,
    recalibrated,
    shipped_banks,
    write_bank,
)
from dsim.drafts.calibrate import (
    StsFit,
    apply_temperatures,
    calibrated,
    fit_bank,
    fit_sts,
    read_temperatures,
    split_blocks,
    write_temperatures,
)
from dsim.drafts.logs import bank_from_log, read_log
from dsim.drafts.online import OnlineCalibration, OnlineSts
from dsim.drafts.presets import PRESETS, preset_curves, preset_spec, published_curve, read_curve
from dsim.drafts.source import BankDrafts, DraftSource
from dsim.drafts.synthetic import SyntheticSpec, bank_report, generate, synthetic_bank
from dsim.drafts.tilt import DomainTilt, Tilt, expected_acceptance, tilt

__all__ = [
    "PRESETS",
    "Bank",
    "BankDrafts",
    "BankHeader",
    "DomainTilt",
    "DraftSource",
    "OnlineCalibration",
    "OnlineSts",
    "StsFit",
    "SyntheticSpec",
    "Tilt",
    "apply_temperatures",
    "bank_from_log",
    "bank_report",
    "calibrated",
    "check_bank",
    "expected_acceptance",
    "fit_bank",
    "fit_sts",
    "generate",
    "load_bank",
    "make_bank",
    "preset_curves",
    "preset_spec",
    "published_curve",
    "read_bank",
    "read_curve",
    "read_log",
    "read_temperatures",
    "recalibrated",
    "shipped_banks",
    "split_blocks",
    "synthetic_bank",
    "tilt",
    "write_bank",
    "write_temperatures",
]
