"""Kernels of the operators in a small C library, on memory that is used again.

Each function here runs one operator by the library and returns `None` for arguments that the library does not take: the
operator then runs its reference. Nothing here is called but by operators, and by code that lets operations wait for each other
(`deferred`, `recipe`, `frozen`), measures the library or switches it off. `GRADFILTER_NATIVE=0` in the environment switches it
off for the process, `with native.off():` for the calling thread: then everything runs in torch, with equal results.
"""

from gradfilter.ops.native.conv import can_read, find_kernel, make_cells, prefers
from gradfilter.ops.native.expand import can_expand, prefers_expand
from gradfilter.ops.native.library import can_run, find_library, has_tangent, is_on, is_watched, load, off
from gradfilter.ops.native.memory import BlockBytes, block_bytes, empty, plain_memory, trim

__all__ = [
    "BlockBytes",
    "block_bytes",
    "can_expand",
    "can_read",
    "can_run",
    "empty",
    "find_kernel",
    "find_library",
    "has_tangent",
    "is_on",
    "is_watched",
    "load",
    "make_cells",
    "off",
    "plain_memory",
    "prefers",
    "prefers_expand",
    "trim",
]
