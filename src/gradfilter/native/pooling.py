"""Patch means and sums of a map, cells over their patches, and gradients of activations from counts per patch."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.native.fused import memory_format, run_pass
from gradfilter.native.library import DTYPES, call, can_run, is_plain
from gradfilter.native.memory import empty
from gradfilter.native.reference import pool, torch_unpool
from gradfilter.native.task import FLOAT, INT64, MAP, POINTER, Record, Task
from gradfilter.native.values import IDENTITY, Pair, count_cells

_TASK = Task(Record("unpool", (MAP, "map"), (POINTER, "cells y")))
_SLOPE = Task(Record("slope", (MAP, "map"), (POINTER, "g counts gx"), (FLOAT, "low high"), (INT64, "count_bytes")))


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
    call(_TASK, task, x_bar, y)
    return y


def can_scale(g: Tensor, count: Tensor) -> bool:
    """Tell whether the library multiplies a gradient with slopes: float32 cells, and their counts in the same memory order."""
    layout = memory_format(g)
    plain = is_plain(count, g.shape, count.dtype) and count.is_contiguous(memory_format=layout)
    return can_run(g) and g.dtype is torch.float32 and plain


def scale_by_counts(g: Tensor, count: Tensor, slopes: tuple[float, float], size: Pair, patch: Pair) -> Tensor:
    """Return g · (low + (high − low) · count / |I|), where `can_scale` says so.

    Args:
        g: A gradient at patch resolution [N, C, H', W'].
        count: How many pixels of each patch have the slope `high`.
        slopes: The slopes `(low, high)`.
        size: The map's `(h, w)`.
        patch: The patch `(h, w)`.
    """
    gx = torch.empty_like(g)
    layout = (not g.is_contiguous(), DTYPES[g.dtype])
    pointers = g.data_ptr(), count.data_ptr(), gx.data_ptr()
    task = _SLOPE.pack(*g.shape[:2], *size, *patch, *layout, *pointers, *slopes, count.element_size())
    call(_SLOPE, task, g, count, gx)
    return gx
