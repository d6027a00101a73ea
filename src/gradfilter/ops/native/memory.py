"""Large tensors on memory that is used again."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfilter.ops.native.library import is_on, load
from gradfilter.ops.native.task import INT32, INT64, Record
from gradfilter.switch import Switch

_REQUEST = Record("request", (f"{INT64}[8]", "shape strides"), (INT64, "bytes"), (INT32, "axes code bits"))
_BYTES = Record("memory", (INT64, "used kept most"))
_MOST_AXES = 8
LARGE = 1 << 20
"""Bytes from which on a block is worth keeping: smaller ones stay in torch's allocator without a page fault."""

_CODES = {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.uint8: (1, 8), torch.int16: (0, 16), torch.int32: (0, 32)}
"""DLPack's names for dtypes: kind and bits."""
_NAME = b"dltensor"
_switch = Switch("memory that is used again")


class BlockBytes(NamedTuple):
    """Bytes of large blocks: in use, kept free for the next request, and the most that were in use at once."""

    used: int
    kept: int
    most: int


@lru_cache(maxsize=4096)
def _make_request(shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format) -> bytes | None:
    """Return the request to the library for a large tensor; `None` where torch's own allocator serves better."""
    if dtype not in _CODES or len(shape) > _MOST_AXES:
        return None
    code, bits = _CODES[dtype]
    size = math.prod(shape) * bits // 8
    if size < LARGE:
        return None
    order = [0, 2, 3, 1] if memory_format is torch.channels_last else list(range(len(shape)))
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    rest = [0] * (_MOST_AXES - len(shape))
    return _REQUEST.pack(*shape, *rest, *strides, *rest, size, len(shape), code, bits)


@lru_cache(maxsize=1)
def _find_wrap() -> Callable[..., Any]:
    """Return Python's own function that wraps an address in a capsule."""
    wrap = ctypes.pythonapi.PyCapsule_New
    wrap.argtypes, wrap.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
    return wrap


def empty(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Return a CPU tensor whose numbers are not set; a large one on a block that comes back when the tensor is freed."""
    request = _make_request(shape if isinstance(shape, tuple) else tuple(shape), dtype, memory_format)
    if request is None or _switch.depth() or not is_on():
        return torch.empty(shape, dtype=dtype, device="cpu", memory_format=memory_format)
    address = load().gf_make_tensor(request)  # type: ignore[union-attr]
    if not address:
        return torch.empty(shape, dtype=dtype, device="cpu", memory_format=memory_format)
    return torch._C._from_dlpack(_find_wrap()(address, _NAME, None))


@contextmanager
def plain_memory() -> Iterator[None]:
    """Take all memory that the calling thread asks for from torch's own allocator, as measurements of it need."""
    with _switch.hold_off():
        yield


def trim() -> None:
    """Give all blocks that are free back to the system."""
    library = load()
    if library is not None:
        library.gf_trim()


def block_bytes() -> BlockBytes:
    """Return how many bytes of large blocks are in use and kept."""
    library, numbers = load(), ctypes.create_string_buffer(_BYTES.size)
    if library is not None:
        library.gf_block_bytes(numbers)
    return BlockBytes(*_BYTES.unpack(numbers))
