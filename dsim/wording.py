"""How numbers are said in sentences and tables."""

from __future__ import annotations

#: What the drafters are called, by their keys in scenarios, in the order of figures.
DRAFTER_NAMES = {
    "dspark": "DSpark",
    "dspark-rnn": "DSpark-RNN",
    "dflash": "DFlash",
    "eagle3": "Eagle3",
    "mtp": "MTP",
}


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "request"), counted(1024, "token")
    ('1 request', '1,024 tokens')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent(fraction: float) -> str:
    """A share in words, with as many digits as it deserves.

    >>> percent(0.0042), percent(0.123), percent(4.06)
    ('0.42 %', '12.3 %', '406 %')
    """
    value = 100 * fraction
    return f"{value:.2f} %" if abs(value) < 1 else f"{value:.1f} %" if abs(value) < 100 else f"{value:.0f} %"


def signed(fraction: float, digits: int = 1) -> str:
    """A difference in percent with its sign; what rounds to nothing has none.

    >>> signed(0.0123), signed(-0.05, 0), signed(-0.00001)
    ('+1.2', '-5', '0.0')
    """
    text = f"{100 * fraction:+.{digits}f}"
    return text if float(text) else f"{0.0:.{digits}f}"
