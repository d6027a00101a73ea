"""Numbers and names as a reader wants them: short, and harmless wherever they came from."""

import math
import re

NOTHING = "–"
"""Stands for a number that there is not."""

_SPACE = "\N{NO-BREAK SPACE}"  # a number stays on one line with its unit

# What HTML and SVG may not contain: control characters, non-characters, and the surrogates that bad bytes in file names become.
_FORBIDDEN = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """Return `text` with every character that HTML or SVG forbids replaced by U+FFFD."""
    return _FORBIDDEN.sub("\ufffd", text)


def shorten(text: str, length: int) -> str:
    """Return `text` on one line, cut in the middle to `length` characters."""
    text = " ".join(clean(text).split())
    if len(text) <= length:
        return text
    tail = (length - 1) // 3
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share of 0 to 1 in percent."""
    return f"{100 * share:.{digits}f}{_SPACE}%" if math.isfinite(share) else NOTHING


def three_digits(number: float) -> str:
    """Return a positive number with three significant digits, without an exponent where it is readable without."""
    if not math.isfinite(number):
        return NOTHING
    if number and not 1e-4 <= abs(number) < 1e6:
        return f"{number:.3g}"
    digits = 2 - math.floor(math.log10(abs(float(f"{number:.3g}")))) if number else 0
    return f"{number:,.{min(max(digits, 0), 6)}f}"


def byte_size(count: float) -> str:
    """Return a number of bytes in B, kB, MB or GB (powers of 1000)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{three_digits(count / size)}{_SPACE}{unit}"
    return f"{count:.0f}{_SPACE}B"


def duration(seconds: float) -> str:
    """Return a time as a person would say it."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 0.9995:
        return f"{three_digits(1000 * seconds)}{_SPACE}ms"
    if seconds < 99.5:
        return f"{three_digits(seconds)}{_SPACE}s"
    minutes = round(seconds / 60)
    return f"{minutes}{_SPACE}min" if minutes < 60 else f"{minutes // 60}{_SPACE}h {minutes % 60:02d}{_SPACE}min"


def how_many_fewer(count: float, exact: float) -> str:
    """Return how many times fewer (or more) `count` is than `exact`; "" where the question makes no sense."""
    if not (count > 0 and exact > 0):
        return ""
    return f"{three_digits(exact / count)}× fewer" if count <= exact else f"{three_digits(count / exact)}× more"


def ratio(number: float) -> str:
    """Return how many times as large one thing is as another."""
    return f"{number:.2f}×" if math.isfinite(number) else NOTHING


def half_interval(share: float, count: int) -> float:
    """Return half the width of the 95 % interval (Wilson) of a share seen in `count` trials; NaN without trials."""
    if not count or not math.isfinite(share):
        return math.nan
    z = 1.96
    return z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
