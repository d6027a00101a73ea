"""Amounts as people write them."""

import pytest

from gradfilter.errors import BudgetError
from gradfilter.units import parse_amount, show_amount


@pytest.mark.parametrize(
    ("kind", "value", "amount"),
    [
        ("memory", "64MB", 64e6),
        ("memory", " 1.5 GiB ", 1.5 * 2**30),
        ("memory", "512kb", 512e3),
        ("memory", "100", 100),
        ("memory", 2_000_000, 2e6),
        ("memory", "1e3 B", 1e3),
        ("time", "20ms", 0.02),
        ("time", 0.5, 0.5),
        ("flops", "1.5G", 1.5e9),
    ],
)
def test_amounts(kind, value, amount):
    assert parse_amount(kind, value) == pytest.approx(amount, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("memory", "64 MBs", "'MBs' is no unit of it. The units are b, kb, mb,"),
        ("memory", "64 M B", "which is no amount. Give a number and a unit, e.g. 64MB"),
        ("memory", "lots", "which is no amount"),
        ("memory", "", "which is no amount"),
        ("memory", "0MB", "finite amount above zero"),
        ("memory", -5, "finite amount above zero"),
        ("memory", "-5MB", "finite amount above zero"),
        ("memory", float("nan"), "finite amount above zero"),
        ("memory", float("inf"), "finite amount above zero"),
        ("memory", True, "which is no amount"),
        ("memory", None, "which is no amount"),
        ("time", "64MB", "'MB' is no unit of it"),
        ("flops", "2s", "'s' is no unit of it"),
    ],
)
def test_what_is_no_amount(kind, value, text):
    with pytest.raises(BudgetError, match=text) as error:
        parse_amount(kind, value)
    assert str(error.value).startswith(f"{kind} is {value!r}")


@pytest.mark.parametrize(
    ("kind", "amount", "text"),
    [
        ("memory", 5120, "5.12 kB"),
        ("memory", 999_904, "1.00 MB"),
        ("memory", 0.3, "0.30 B"),
        ("memory", 64e6, "64.0 MB"),
        ("memory", 5e15, "5000000 GB"),
        ("time", 0.268, "268 ms"),
        ("flops", 479_169_061, "479 M"),
        ("flops", 12, "12.0"),
    ],
)
def test_amounts_are_shown_with_three_digits(kind, amount, text):
    assert show_amount(kind, amount) == text
