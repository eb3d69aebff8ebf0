"""What the engines' policies share: the parameter `table` (a name, or an engine file), and the sizes that are timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dsim.errors import InputError
from dsim.policy import IntArray

if TYPE_CHECKING:
    from dsim.engines import PriceTable


def pinned_table(table: object, named: tuple[str, ...]) -> PriceTable | None:
    """The engine file that `table` is the path of; None where it is one of the names.

    Raises
    ------
    InputError
        Neither a name nor a file, or a file that is no price table.
    """
    if table in named:
        return None
    if not isinstance(table, str) or not Path(table).is_file():
        raise InputError(field="table", value=table, expected=f"{', '.join(named)} or the path of an engine file")
    # Only where a file is named: no other policy needs the readers.
    from dsim.engines import read_price_table

    return read_price_table(table)


def need_block(found: PriceTable | None, table: str, gamma: int) -> None:
    """Refuse a pinned table that is for blocks of another size than the arm's `gamma` drafts.

    A table of exact graphs (``trtllm-v2``) prices whole blocks of one size; read for another, it would answer with
    prices of steps that its engine does not have.

    Raises
    ------
    InputError
        Names the file and its field.
    """
    if found is not None and found.gamma not in (None, gamma):
        raise InputError(
            f"the table is for blocks of {found.gamma} drafts, and the arm's have {gamma}",
            file=table,
            field="engine_fingerprint.max_draft_len",
            value=found.gamma,
            expected=f"{gamma}, or an arm with gamma = {found.gamma}",
        )


def captured_or_all(captured: IntArray, last: int) -> IntArray:
    """int64[S] ascending: the sizes that an engine times that times its captured ones, up to a largest step of `last`.

    Where nothing is captured nothing is padded, and every size counts as timed.
    """
    return np.unique(np.minimum(captured, last)) if captured.size else np.arange(1, last + 1)
