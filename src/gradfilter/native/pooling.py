"""Patch means and sums of a map, and cells over their patches."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from gradfilter.native.fused import memory_format, run_pass
from gradfilter.native.library import DTYPES, call, can_run
from gradfilter.native.memory import empty
from gradfilter.native.reference import pool, torch_unpool
from gradfilter.native.values import IDENTITY, Pair, count_cells

_TASK = struct.Struct("6q 2i 2Q")
"""`gf_unpool` of kernels.h."""


def pool_mean(x: Tensor, patch: Pair) -> Tensor:
    """Return the mean of x [N, C, H, W] over the real pixels of each patch."""
    return _pool(x, patch, sums=False)


def pool_sum(x: Tensor, patch: Pair) -> Tensor:
    """Return the sum of x [N, C, H, W] over the real pixels of each patch."""
    return _pool(x, patch, sums=True)


def needs_graph(x: Tensor) -> bool:
    """Tell whether autograd follows what is done with x: the library is no part of its graph."""
    return x.requires_grad and torch.is_grad_enabled()


def _pool(x: Tensor, patch: Pair, *, sums: bool) -> Tensor:
    if not can_run(x) or needs_graph(x):
        return pool(x, patch, sums=sums)
    n, c, h, w = x.shape
    cells = empty((n, c, *count_cells((h, w), patch)), x.dtype, memory_format(x))
    run_pass(x, None, IDENTITY, patch, mean=cells, sums=sums)
    return cells


def unpool(x_bar: Tensor, patch: Pair, size: Pair) -> Tensor:
    """Repeat each cell of x_bar [N, C, H', W'] over its patch, up to a map of `size`.

    Args:
        x_bar: The cells.
        patch: The patch `(h, w)`.
        size: The map's `(h, w)`.
    """
    if not can_run(x_bar) or needs_graph(x_bar):
        return torch_unpool(x_bar, patch, size)
    n, c = x_bar.shape[:2]
    y = empty((n, c, *size), x_bar.dtype, memory_format(x_bar))
    layout = (not x_bar.is_contiguous(), DTYPES[x_bar.dtype])
    task = _TASK.pack(n, c, *size, *patch, *layout, x_bar.data_ptr(), y.data_ptr())
    call("unpool", task)
    return y
