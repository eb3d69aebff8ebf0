"""Files that serving engines read and write: cost tables and temperatures. See `docs/engine-files.md`.

One module an engine, one frozen class a format. Every cost table has ``prices(requests, last)``: milliseconds by
tokens in the step, as that engine's planner reads its table.
"""

from dsim.engines.files import (
    FORMATS,
    EngineFile,
    format_of,
    parse_engine_file,
    read_engine_file,
    read_price_table,
    write_engine_file,
)
from dsim.engines.sglang import SglangAdditive, SglangDiagonal, StsTemperatures
from dsim.engines.table import PriceTable
from dsim.engines.trtllm import TrtllmV1, TrtllmV2
from dsim.engines.vllm import VllmProfileCache

__all__ = [
    "FORMATS",
    "EngineFile",
    "PriceTable",
    "SglangAdditive",
    "SglangDiagonal",
    "StsTemperatures",
    "TrtllmV1",
    "TrtllmV2",
    "VllmProfileCache",
    "format_of",
    "parse_engine_file",
    "read_engine_file",
    "read_price_table",
    "write_engine_file",
]
