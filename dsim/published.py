"""Published figures and tables that ship with the package, by name.

Facts and figures only; `PROVENANCE.md` in each data folder says where each file comes from.
"""

from __future__ import annotations

import csv
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

from dsim.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

_FOLDERS = {
    "paper": (
        "paper_fig2",
        "paper_fig3",
        "paper_fig4",
        "paper_fig4_latency",
        "paper_fig5",
        "paper_fig6",
        "paper_fig6_ece_auc",
        "paper_fig6_hist",
        "paper_fig7_anchors",
        "paper_fig7_lines",
        "paper_fig8_budget",
        "paper_fig8_throughput",
        "paper_table1",
    ),
    "acceptance": ("accept_golden_al_inferencex", "accept_per_position"),
}

#: Where each table lies below ``dsim/data``.
TABLES: dict[str, str] = {name: f"{folder}/{name}.csv" for folder, names in _FOLDERS.items() for name in names}


def published(name: str) -> pd.DataFrame:
    """One shipped table of published numbers.

    Parameters
    ----------
    name
        A key of `TABLES`, for example ``paper_fig7_lines``.

    Returns
    -------
    DataFrame
        A fresh frame with the file's columns; an empty text field stays an empty text, never NaN.

    Raises
    ------
    InputError
        Unknown name; the known ones are listed.

    Examples
    --------
    >>> published("paper_fig6_ece_auc")["auc"].tolist()
    [0.818, 0.812, 0.864, 0.907]
    """
    import pandas as pd

    with _path(name).open(encoding="utf-8") as stream:
        return pd.read_csv(stream, keep_default_na=False)


def published_rows(name: str) -> list[dict[str, str]]:
    """The rows of such a table as they stand, without pandas: importing that takes as long as several runs.

    Examples
    --------
    >>> [row["auc"] for row in published_rows("paper_fig6_ece_auc")]
    ['0.818', '0.812', '0.864', '0.907']
    """
    return list(csv.DictReader(_path(name).read_text(encoding="utf-8").splitlines()))


def _path(name: str) -> Traversable:
    if name not in TABLES:
        raise InputError(
            f"no published table '{name}'", field="published", expected=f"one of {', '.join(sorted(TABLES))}"
        )
    return resources.files("dsim").joinpath("data").joinpath(TABLES[name])
