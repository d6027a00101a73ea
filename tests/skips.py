"""What tests were skipped for, and how to get it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

REMEDIES = (
    ("chromium", "Chromium", "apt-get install chromium"),
    (
        "aarch64-linux-gnu-gcc",
        "a compiler and an emulator for ARM",
        "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static",
    ),
    (
        "shared data",
        "real images and weights",
        "put pets.tar.gz, camvid.tar.gz and weights/ into a folder, set GRADFILTER_SHARED to it (-rs says which is missing)",
    ),
    ("C library", "the C library", "leave GRADFILTER_NATIVE unset; apt-get install cmake gcc, then make native"),
    ("cmake", "CMake", "apt-get install cmake"),
    ("compiler", "a C compiler", "apt-get install gcc"),
    ("'onnx", "ONNX Runtime", "pip install --constraint constraints.txt --editable '.[bench]'"),
    ("is not installed", "a Python package", "make setup (-rs says which one)"),
    ("could not import", "a Python package", "make setup (-rs says which one)"),
)
"""Part of the reason that a skipped test gives, what it lacks, and how to get that. The first row that fits counts."""


def describe_skips(reasons: Iterable[str]) -> list[str]:
    """Return a line for each thing that skipped tests lack, the one that most tests lack first, and one for all other skips."""
    lacks: Counter[str] = Counter()
    for reason in reasons:
        found = (f"for want of {what}: {remedy}" for part, what, remedy in REMEDIES if part in reason)
        lacks[next(found, "for other reasons: -rs lists them")] += 1
    return [f"{count:5} {why}" for why, count in lacks.most_common()]
