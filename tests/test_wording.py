"""Numbers in sentences: digits, signs, and no negative zero."""

from __future__ import annotations

import pytest

from dsim.wording import counted, percent, signed


@pytest.mark.parametrize(
    ("fraction", "digits", "text"),
    [
        (0.25, 1, "+25.0"),
        (-0.25, 0, "-25"),
        (0.0, 1, "0.0"),
        (-0.0, 0, "0"),
        (-0.0004, 1, "0.0"),
        (-0.0006, 1, "-0.1"),
        (0.004, 0, "0"),
        (0.00004, 2, "0.00"),
        (0.00006, 2, "+0.01"),
    ],
)
def test_signed(fraction, digits, text):
    assert signed(fraction, digits) == text


def test_counted_and_percent():
    assert (counted(0, "draft"), counted(1, "draft"), counted(2048, "draft")) == ("0 drafts", "1 draft", "2,048 drafts")
    assert (percent(0.00994), percent(0.0101), percent(0.9994), percent(1.0)) == ("0.99 %", "1.0 %", "99.9 %", "100 %")
