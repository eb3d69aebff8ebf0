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


def captured_or_all(captured: IntArray, last: int) -> IntArray:
    """int64[S] ascending: the sizes that an engine times that times its captured ones, up to a largest step of `last`.

    Where nothing is captured nothing is padded, and every size counts as timed.
    """
    return np.unique(np.minimum(captured, last)) if captured.size else np.arange(1, last + 1)
