"""docs/sweeps.md: its code runs, and its numbers of columns and options are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")


def test_the_blocks_of_the_sweeps_page_run(capsys):
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "<docs>", "exec"), {"__name__": "docs"})
        (expected,) = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert capsys.readouterr().out == expected + "\n"
