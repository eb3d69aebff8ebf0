"""A draft length by batch size, from a table: vLLM's dynamic speculative decoding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsim.errors import InputError
from dsim.kernel import Kernel
from dsim.policy import BasePolicy, IntArray, PolicyView, Traits

_FORM = "ranges FIRST-LAST=K joined by '/', from batch size 1 up, for example 1-64=3/65-128=1/129-=0"


class BatchTable(BasePolicy):
    """Verify the first k drafts of every request, with k looked up by the number of requests in decode.

    Parameters
    ----------
    table
        Ranges ``FIRST-LAST=K`` joined by ``/``: both ends are included, the first range starts at 1, they ascend
        and do not overlap, and the last one may be left open (``129-=0``). Or vLLM's list of
        ``[first, last, k]``. A batch size between two ranges has the k of the one before it, and one beyond the
        last range has that range's k, so a table may be shorter than the batch.

    Attributes
    ----------
    starts, lengths
        First batch size and k of each range.

    Raises
    ------
    InputError
        Not such a table.

    Examples
    --------
    >>> from dsim.policy import make_view
    >>> policy = BatchTable("1-1=3/2-4=1")
    >>> sizes = (1, 2, 9)
    >>> [policy.plan(make_view(np.full((n, 5), 0.9), np.ones(6 * n + 1))).tolist()[0] for n in sizes]
    [3, 1, 1]
    >>> BatchTable([[1, 64, 3], [65, 512, 0]])
    BatchTable(table='1-64=3/65-512=0')

    References
    ----------
    vLLM, dynamic speculative decoding (``num_speculative_tokens_per_batch_size``),
    https://docs.vllm.ai/en/latest/features/speculative_decoding/dynamic_speculative_decoding/ and
    https://github.com/vllm-project/vllm/pull/32374; the default table is the first one of that page.

    Differences from vLLM: it counts all requests of a step, those whose prompt is still being processed too,
    and picks the k of the drafts that are verified in the step after; here the requests in decode now count.
    There k is how many tokens are *drafted*, so that k = 0 saves the drafter; here the arm's block is drafted
    and paid for whatever the table says. A k above the block is clipped there and an error here
    (`Traits.needs_gamma`). Differences from the paper (DSpark, arXiv 2607.05147,
    https://arxiv.org/abs/2607.05147): it has no such table; nothing here looks at confidences or prices.
    """

    def __init__(self, table: str | Sequence[Sequence[int]] = "1-64=3/65-128=1/129-512=0") -> None:
        ranges = _parsed(table) if isinstance(table, str) else _listed(table)
        last = 0
        for first, end, k in ranges:
            if not last < first <= (first if end is None else end) or (not last and first != 1) or k < 0:
                raise _no_table(table)
            last = end if end is not None else 1 << 62
        self.table = "/".join(f"{first}-{'' if end is None else end}={k}" for first, end, k in ranges)
        self.starts = [first for first, _, _ in ranges]
        self.lengths = [k for _, _, k in ranges]
        self.traits = Traits(cost_driven=False, needs_gamma=max(self.lengths))

    def plan(self, view: PolicyView) -> IntArray:
        if not view.requests:
            return np.zeros(0, dtype=np.int64)
        return np.minimum(view.caps, self.lengths[bisect_right(self.starts, view.requests) - 1])

    def kernel(self) -> Kernel:
        """See `dsim.kernel.Kernel`."""
        from policies import _kernels

        params = [float(value) for pair in zip(self.starts, self.lengths, strict=True) for value in pair]
        return Kernel(_kernels.batch_table, params=tuple(params))


def _parsed(table: str) -> list[tuple[int, int | None, int]]:
    ranges = []
    for item in table.split("/"):
        sizes, equals, k = item.partition("=")
        first, dash, last = sizes.partition("-")
        if not (equals and dash and _is_count(first) and _is_count(k) and (not last or _is_count(last))):
            raise _no_table(table)
        ranges.append((int(first), int(last) if last else None, int(k)))
    return ranges


def _listed(table: Any) -> list[tuple[int, int | None, int]]:
    if not isinstance(table, Sequence) or not table:
        raise _no_table(table)
    for entry in table:
        if not isinstance(entry, Sequence) or len(entry) != 3 or not all(type(value) is int for value in entry):
            raise _no_table(table)
    return [(first, last, k) for first, last, k in table]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _no_table(table: object) -> InputError:
    return InputError(field="table", value=table, expected=_FORM)
