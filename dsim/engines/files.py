"""Reading and writing engine files; the format is recognized by its fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsim.engines.sglang import SPELLINGS, SglangAdditive, SglangDiagonal, StsTemperatures
from dsim.engines.table import PriceTable
from dsim.engines.trtllm import TrtllmV1, TrtllmV2
from dsim.engines.vllm import VllmProfileCache
from dsim.errors import InputError
from dsim.files import replacing
from dsim.strictjson import load_json, need_object

EngineFile = SglangDiagonal | SglangAdditive | StsTemperatures | TrtllmV1 | TrtllmV2 | VllmProfileCache

#: All formats by name.
FORMATS: dict[str, type[EngineFile]] = {
    kind.format: kind
    for kind in (SglangDiagonal, SglangAdditive, TrtllmV1, TrtllmV2, VllmProfileCache, StsTemperatures)
}

# A field that only this format has. The order decides for files that mix formats, which are then refused.
_MARKS: dict[str, tuple[str, ...]] = {
    "trtllm-v2": ("schema_version", "cost_tables", "engine_fingerprint", "measurements"),
    "vllm": ("verify_curve", "draft_curve"),
    "sglang-additive": ("bias_seconds", "m_probes", "theta_seconds"),
    "sglang-diagonal": ("sample_batch_tokens", "sample_steps_per_sec"),
    "trtllm-v1": ("token_counts", "step_time_ms"),
    "sts": SPELLINGS,
}


def format_of(raw: Mapping[str, Any]) -> str:
    """Name of the format of a file's object.

    Raises
    ------
    InputError
        Fields of no format, or of two.
    """
    found = [name for name, marks in _MARKS.items() if any(mark in raw for mark in marks)]
    if not found:
        known = "; ".join(f"{name}: {', '.join(marks)}" for name, marks in _MARKS.items())
        raise InputError("is of no known format", value=sorted(raw), expected=f"fields of one of them ({known})")
    if len(found) > 1:
        shown = ", ".join(next(mark for mark in _MARKS[name] if mark in raw) for name in found)
        raise InputError(f"mixes formats ({', '.join(found)})", value=shown, expected="the fields of one format")
    return found[0]


def parse_engine_file(raw: Mapping[str, Any], file: str | Path | None = None) -> EngineFile:
    """An engine file from its JSON object; `file` is its name in errors."""
    try:
        return FORMATS[format_of(raw)].from_json(raw)
    except InputError as error:
        raise InputError(
            error.message, file=file, field=error.field, value=error.value, expected=error.expected
        ) from None


def read_engine_file(path: str | Path) -> EngineFile:
    """Read a table or temperatures of SGLang, TensorRT-LLM or vLLM.

    Raises
    ------
    InputError
        With file, field, value and what was expected, at the first thing that is wrong.
    """
    return parse_engine_file(need_object(load_json(path, "an engine's JSON file"), path), path)


def read_price_table(path: str | Path) -> PriceTable:
    """Read a cost table, whatever engine it is from; temperatures are refused.

    >>> read_price_table("table.json").prices(requests=8, last=40)  # doctest: +SKIP
    """
    found = read_engine_file(path)
    if isinstance(found, StsTemperatures):
        kinds = ", ".join(name for name in FORMATS if name != found.format)
        raise InputError("holds temperatures, no prices", file=path, expected=f"a table: {kinds}")
    return found


def write_engine_file(found: PriceTable | StsTemperatures, path: str | Path) -> None:
    """Write an engine file, atomically. Reading it back gives an equal one."""
    path = Path(path)
    text = json.dumps(found.to_json(), allow_nan=False) + "\n"
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
