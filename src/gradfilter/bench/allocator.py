"""Whether the C library gives freed memory back to the system: what an eager pass takes depends on it."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

from gradfilter.errors import SettingsError

DEFAULT, KEEP = "default", "keep"
SETTINGS = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_TOP_PAD": (-2, 200_000_000)}
"""What glibc is told (malloc.h's number of a setting, and its value): no block from the system alone, none given back."""
REMARKS = {
    DEFAULT: "Allocator: the C library's own; glibc gives every freed block above 32 MB back to the system at once, and what "
    "comes next is new pages again.",
    KEEP: "Allocator: on all sides freed memory stays with the process (--allocator keep).",
}


def set_allocator(choice: str, mallopt: Callable[[int, int], int] | None = None) -> None:
    """Let the process keep what it frees, with "keep"; there is no way back.

    Raises:
        SettingsError: The C library is not glibc, or refuses.
    """
    if choice == DEFAULT:
        return
    if mallopt is None:
        if platform.libc_ver()[0] != "glibc":
            raise SettingsError("--allocator keep is for glibc's malloc, which this Python does not run on. Drop it.")
        mallopt = ctypes.CDLL(None).mallopt
    for name, (number, value) in SETTINGS.items():
        if not mallopt(number, value):
            raise SettingsError(f"--allocator keep: glibc refuses {name}={value}. Drop it.")
