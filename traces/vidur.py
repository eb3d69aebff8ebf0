"""The three-column CSV of the Vidur simulator: seconds from the start, prompt tokens, output tokens.

https://github.com/microsoft/vidur (data/processed_traces)
"""

from __future__ import annotations

from traces.csvformat import CsvFormat

VIDUR = CsvFormat(name="vidur", time="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens", clock="s")
