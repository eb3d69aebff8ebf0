"""What a simulation returns: one row a step, one row a request. Everything else is computed from these."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

#: Columns of the step log. Times in integer nanoseconds of simulated time.
STEP_COLUMNS = (
    "end_ns",  # when the step ended
    "step_ns",  # how long it took
    "replica",
    "requests",  # R, in decode
    "prefill_tokens",  # prompt tokens in the same step
    "drafts",  # draft tokens verified
    "accepted",  # of those, accepted (before the cut at the output's end)
    "committed",  # output tokens that decode produced
    "first_tokens",  # output tokens that prefill chunks produced (a prompt's last chunk)
    "batch_tokens",  # all tokens the target processed
    "queue",  # requests waiting at the replica
    "context_tokens",  # of all requests in decode together; 0 where prices do not depend on the context
)


class StepLog:
    """Append-only table of steps: rows collect in a list, and full lists are packed into int64 blocks.

    Memory grows linearly (8 bytes a column and step) and nothing that is packed is ever copied again until
    `table`. Appending to a list costs a tenth of writing into an array row.
    """

    def __init__(self, block_rows: int = 8192) -> None:
        self._block_rows = block_rows
        self._full: list[IntArray] = []
        self._rows: list[tuple[int, ...]] = []

    def append(self, row: tuple[int, ...]) -> None:
        """Add one step, in the order of `STEP_COLUMNS`."""
        self._rows.append(row)
        if len(self._rows) == self._block_rows:
            self._full.append(self._pack())
            self._rows = []

    def _pack(self) -> IntArray:
        count = len(self._rows) * len(STEP_COLUMNS)
        return np.fromiter(chain.from_iterable(self._rows), dtype=np.int64, count=count).reshape(-1, len(STEP_COLUMNS))

    def __len__(self) -> int:
        return len(self._full) * self._block_rows + len(self._rows)

    def table(self) -> dict[str, IntArray]:
        """The columns, in the order in which the steps ended."""
        rows = np.concatenate([*self._full, self._pack()])
        return {name: np.ascontiguousarray(rows[:, i]) for i, name in enumerate(STEP_COLUMNS)}


#: Columns of the request table. -1 where it has not happened.
REQUEST_COLUMNS = (
    "arrival_ns",  # issued by the client
    "first_ns",  # first output token
    "finish_ns",  # last output token
    "prompt_tokens",
    "output_tokens",  # asked for
    "generated_tokens",  # produced by the end of the run
    "domain",
    "replica",
    "preemptions",
)


class RequestLog:
    """One row a request, by request number. Plain lists: single elements are written, one at a time."""

    def __init__(self) -> None:
        self.arrival_ns: list[int] = []
        self.first_ns: list[int] = []
        self.finish_ns: list[int] = []
        self.prompt_tokens: list[int] = []
        self.output_tokens: list[int] = []
        self.generated_tokens: list[int] = []
        self.domain: list[int] = []
        self.replica: list[int] = []
        self.preemptions: list[int] = []

    def add(self, arrival_ns: int, prompt: int, output: int, domain: int) -> int:
        """A new request; returns its number."""
        self.arrival_ns.append(arrival_ns)
        self.first_ns.append(-1)
        self.finish_ns.append(-1)
        self.prompt_tokens.append(prompt)
        self.output_tokens.append(output)
        self.generated_tokens.append(0)
        self.domain.append(domain)
        self.replica.append(-1)
        self.preemptions.append(0)
        return len(self.arrival_ns) - 1

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def table(self) -> dict[str, IntArray]:
        """The columns as int64 arrays."""
        return {name: np.asarray(getattr(self, name), dtype=np.int64) for name in REQUEST_COLUMNS}


@dataclass(frozen=True)
class Records:
    """All that a simulation returns.

    Attributes
    ----------
    steps, requests
        Columns by name: `STEP_COLUMNS`, `REQUEST_COLUMNS`.
    scored
        First and last-plus-one number of the requests that are scored.
    window_ns
        Start and end of the measuring window.
    end_ns
        When the simulation stopped.
    replicas, gpus
        Replicas, and GPUs of all of them together.
    colocated
        First tokens come from steps (`first_tokens`), not from prefill nodes.
    extrapolated
        A step left the profiled grid.
    """

    steps: dict[str, IntArray]
    requests: dict[str, IntArray]
    scored: tuple[int, int]
    window_ns: tuple[int, int]
    end_ns: int
    replicas: int
    gpus: int
    colocated: bool
    extrapolated: bool
