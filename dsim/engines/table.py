"""What the tables of all engines have in common: prices as the engine's planner reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dsim.engines.checks import need_int

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """An engine's cost table.

    Attributes
    ----------
    format
        Its name in `dsim.engines.FORMATS`.
    depends_on_requests
        Whether `prices` varies with the number of requests.
    extra
        Fields of the file that the engine does not read. They are written back as they stood.
    """

    format: ClassVar[str]

    extra: Mapping[str, Any] = field(default_factory=dict)
    _kept: dict[int, FloatArray] = field(default_factory=dict, init=False, repr=False, compare=False)

    __hash__ = None  # type: ignore[assignment]

    @property
    def depends_on_requests(self) -> bool:
        """Whether `prices` varies with the number of requests."""
        return True

    @property
    def gamma(self) -> int | None:
        """Drafts of a whole block, where the table is for blocks of one size; None where it is for any."""
        return None

    @property
    def is_flat(self) -> bool:
        """Whether no price changes with the tokens: verifying everything is then always best."""
        raise NotImplementedError

    @property
    def largest(self) -> int:
        """Most tokens of a step that the table has a size for."""
        raise NotImplementedError

    def reach(self, requests: int) -> int:
        """Most tokens of a step of so many requests that the table has a size for."""
        return self.largest

    def prices(self, requests: int, last: int) -> FloatArray:
        """Milliseconds of a step by the tokens in it, read by the engine's own rule.

        Parameters
        ----------
        requests
            Requests in decode, >= 0.
        last
            Last index of the table, >= 0.

        Returns
        -------
        float64[last + 1], read-only: what the engine's planner divides the expected tokens by. Tables are kept,
        so asking again costs nothing. Entries below the smallest possible step are filled by the same rule.
        """
        need_int(requests, "requests", 0)
        need_int(last, "last", 0)
        key = requests if self.depends_on_requests else 0
        kept = self._kept.get(key)
        if kept is None or kept.size <= last:
            # Steps grow by a few tokens at a time: without room to spare every step would build a table.
            kept = self._build(requests, max(last, 2 * last if kept is not None else 0, min(self.largest, 1 << 14)))
            kept.flags.writeable = False
            self._kept[key] = kept
        return kept[: last + 1]

    def _build(self, requests: int, last: int) -> FloatArray:
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The file's object: every field that was read, and no other."""
        raise NotImplementedError
