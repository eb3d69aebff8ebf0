"""BurstGPT: seconds since the start of the collection, with or without the later files' session columns.

Failed requests stand in the log with a length of 0. They are refused like any other length below 1, unless
``read_trace(..., drop_zero=True)`` says to leave them out.

https://github.com/HPMLL/BurstGPT
"""

from __future__ import annotations

from traces.csvformat import CsvFormat

BURSTGPT = CsvFormat(name="burstgpt", time="Timestamp", prompt="Request tokens", output="Response tokens", clock="s")
