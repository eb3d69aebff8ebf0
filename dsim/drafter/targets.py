"""Targets by name, loaded when asked for."""

from __future__ import annotations

import torch

from dsim.drafter.target import Target
from dsim.errors import InputError

NAMES = ("smollm2", "tiny", "hf:PATH")


def pick_device(name: str) -> str:
    """``cpu``, ``cuda``, or ``auto``: the GPU where there is one.

    Raises
    ------
    InputError
        Another word, or no GPU where one was asked for.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(field="device", value=name, expected="auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device", field="device", value=name)
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def device_text(device: str) -> str:
    """A device in words, for provenance."""
    return str(torch.cuda.get_device_name()) if device == "cuda" else "cpu"


def load_target(name: str, *, device: str = "cpu") -> Target:
    """``smollm2`` (see ``make target-model``), ``tiny``, or ``hf:`` and a path or hub name.

    Raises
    ------
    InputError
        Unknown name, or its files are not there.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if name == "smollm2":
        from dsim.drafter import smollm2

        return smollm2.load(device=device, dtype=dtype)
    if name == "tiny":
        from dsim.drafter.tiny import tiny_target

        return tiny_target()
    if name.startswith("hf:") and name != "hf:":
        from dsim.drafter import hf

        return hf.load(name.removeprefix("hf:"), device=device, dtype=dtype)
    raise InputError(field="target", value=name, expected=f"one of {', '.join(NAMES)}")
