"""Draft sources: what a drafter drafts, how sure it is, and what the target accepts."""

from dsim.drafts.bank import Bank, BankHeader, check_bank, make_bank, read_bank, recalibrated, write_bank
from dsim.drafts.presets import PRESETS, preset_curves, preset_spec
from dsim.drafts.source import BankDrafts, DraftSource, Tilt
from dsim.drafts.synthetic import SyntheticSpec, bank_report, generate, synthetic_bank

__all__ = [
    "PRESETS",
    "Bank",
    "BankDrafts",
    "BankHeader",
    "DraftSource",
    "SyntheticSpec",
    "Tilt",
    "bank_report",
    "check_bank",
    "generate",
    "make_bank",
    "preset_curves",
    "preset_spec",
    "read_bank",
    "recalibrated",
    "synthetic_bank",
    "write_bank",
]
