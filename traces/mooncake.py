"""Mooncake traces: one JSON object a line, milliseconds, prompts as ids of hashed blocks of 512 tokens.

https://github.com/kvcache-ai/Mooncake (FAST25-release); Qin et al., FAST 2025.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dsim.errors import InputError
from traces.base import MAX_SECONDS, MAX_TOKENS, PREFIX_BLOCK_TOKENS
from traces.rawtext import RawText
from traces.rows import Rows

_TIME, _PROMPT, _OUTPUT, _BLOCKS = "timestamp", "input_length", "output_length", "hash_ids"


@dataclass(frozen=True)
class MooncakeFormat:
    """Mooncake's JSON lines (implements `traces.rows.TraceFormat`)."""

    name: str = "mooncake"
    fields: tuple[str, ...] = (_TIME, _PROMPT, _OUTPUT, _BLOCKS)

    rowwise: ClassVar[bool] = True

    def names(self, text: RawText) -> list[str]:
        return list(_object(text, 1)) if text.first_line.lstrip().startswith("{") else []

    def rows(self, text: RawText) -> Rows:
        times: list[float] = []
        lengths: dict[str, list[int]] = {_PROMPT: [], _OUTPUT: []}
        blocks: list[tuple[int, ...]] = []
        for line in range(1, len(text.lines) + 1):
            row = _object(text, line)
            for field in self.fields:
                if field not in row:
                    raise InputError(
                        f"'{field}' is missing",
                        file=text.file,
                        line=line,
                        field=field,
                        value=", ".join(row),
                        expected=f"the keys {', '.join(self.fields)}",
                    )
            times.append(_milliseconds(text, line, row[_TIME]))
            for field, values in lengths.items():
                values.append(_integer(text, line, field, row[field]))
            blocks.append(_block_ids(text, line, row[_BLOCKS], row[_PROMPT]))
        milliseconds = np.array(times)
        return Rows(
            arrival_s=(milliseconds - milliseconds[0]) / 1e3,
            prompt_tokens=np.array(lengths[_PROMPT], dtype=np.int64),
            output_tokens=np.array(lengths[_OUTPUT], dtype=np.int64),
            fields=(_TIME, _PROMPT, _OUTPUT),
            first_line=1,
            prefix_blocks=tuple(blocks),
            raw=lambda row, field: _written(_object(text, row + 1)[field]),
        )


MOONCAKE = MooncakeFormat()


def _object(text: RawText, line: int) -> dict[str, Any]:
    content = text.line(line)
    try:
        found = json.loads(content)
        problem = None if isinstance(found, dict) else f"a JSON {type(found).__name__}"
    except (ValueError, RecursionError) as error:
        problem = f"not valid JSON ({error})"
    if problem is not None:
        raise InputError(
            problem if content.strip() else "blank line",
            file=text.file,
            line=line,
            value=_shortened(content),
            expected="one JSON object a line",
        )
    return found  # type: ignore[no-any-return]


def _milliseconds(text: RawText, line: int, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and abs(value) <= MAX_SECONDS * 1e3:  # NaN fails this
        return float(value)
    raise InputError(
        file=text.file,
        line=line,
        field=_TIME,
        value=_written(value),
        expected=f"a finite number of milliseconds, at most {MAX_SECONDS * 1e3:g}",
    )


def _integer(text: RawText, line: int, field: str, value: object) -> int:
    # A zero passes here: `to_trace` refuses it or, if asked to, leaves the row out.
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    raise InputError(
        file=text.file,
        line=line,
        field=field,
        value=_written(value),
        expected=f"an integer from 1 to {MAX_TOKENS}",
    )


def _block_ids(text: RawText, line: int, value: object, prompt: int) -> tuple[int, ...]:
    if prompt == 0:
        return ()
    count = -(-prompt // PREFIX_BLOCK_TOKENS)
    if isinstance(value, list) and len(value) == count and set(map(type, value)) == {int} and min(value) >= 0:
        return tuple(value)
    raise InputError(
        f"{len(value)} block ids" if isinstance(value, list) else None,
        file=text.file,
        line=line,
        field=_BLOCKS,
        value=_written(value),
        expected=f"{count} integers >= 0, one a block of {PREFIX_BLOCK_TOKENS} of {prompt} prompt tokens",
    )


def _written(value: object) -> str:
    """The value as JSON text, cut where it is long."""
    return _shortened(json.dumps(value))


def _shortened(content: str) -> str:
    return content if len(content) <= 80 else content[:77] + "..."
