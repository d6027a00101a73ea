"""Amounts as people write them: 64MB, 20ms, 1.5G."""

from __future__ import annotations

import math
import re

from gradfilter.errors import BudgetError

AMOUNT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-zµ]*)\s*", re.IGNORECASE)
BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
SECONDS = {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60}
FLOPS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
UNITS = {"memory": (BYTES, "64MB, 1.5GiB"), "time": (SECONDS, "20ms, 0.5s"), "flops": (FLOPS, "800M, 1.5G")}
"""For each kind of amount, what its units are worth, in lower case, and examples."""


def parse_amount(kind: str, value: str | float) -> float:
    """Return an amount in bytes, seconds or operations.

    Args:
        kind: "memory", "time" or "flops".
        value: A number, or a number with a unit. MB is a million bytes, MiB is 2²⁰; capitals do not count.

    Raises:
        BudgetError: It is neither, or not above zero.
    """
    units, examples = UNITS[kind]
    match = AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, str | float | int) or (isinstance(value, str) and not match):
        raise BudgetError(f"{kind} is {value!r}, which is no amount. Give a number and a unit, e.g. {examples}.")
    if match is not None and match[2].lower() not in units:
        known = ", ".join(unit for unit in units if unit)
        raise BudgetError(f"{kind} is {value!r}, and {match[2]!r} is no unit of it. The units are {known}: e.g. {examples}.")
    try:
        amount = float(match[1]) * units[match[2].lower()] if match is not None else float(value)
    except OverflowError:
        amount = math.inf
    if not (0 < amount < math.inf):
        raise BudgetError(f"{kind} is {value!r}. A budget is a finite amount above zero, e.g. {examples}.")
    return amount


def show_amount(kind: str, amount: float) -> str:
    """Return an amount as people write it, with three digits."""
    steps = {"memory": ("B", "kB", "MB", "GB"), "flops": ("", "k", "M", "G", "T"), "time": ("µs", "ms", "s")}[kind]
    number = amount * 1e6 if kind == "time" else amount
    place = min(len(steps) - 1, int(math.log10(number) // 3)) if number >= 1 else 0
    value = number / 1000**place
    if value >= 999.5 and place < len(steps) - 1:  # which three digits would write as 1000
        value, place = value / 1000, place + 1
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {steps[place]}".strip()
