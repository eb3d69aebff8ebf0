"""Request traces: readers for public formats, synthetic workloads, and the traces that are shipped."""

from traces.base import PREFIX_BLOCK_TOKENS, Trace, WindowError
from traces.reader import FORMATS, read_trace, shipped_traces, trace_file
from traces.rows import Rows, TraceFormat
from traces.synthetic import (
    Empirical,
    Fixed,
    Gamma,
    Independent,
    Lognormal,
    OnOff,
    Poisson,
    synthetic_trace,
)

__all__ = [
    "FORMATS",
    "PREFIX_BLOCK_TOKENS",
    "Empirical",
    "Fixed",
    "Gamma",
    "Independent",
    "Lognormal",
    "OnOff",
    "Poisson",
    "Rows",
    "Trace",
    "TraceFormat",
    "WindowError",
    "read_trace",
    "shipped_traces",
    "synthetic_trace",
    "trace_file",
]
