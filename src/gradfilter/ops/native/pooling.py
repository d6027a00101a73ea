"""Patch means and sums of a map, cells over their patches, and gradients of activations from counts per patch."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.geometry.tiling import LIMIT, MAP, Layout, Pair, count_cells, is_map
from gradfilter.ops.check import COUNTS
from gradfilter.ops.native import task as tasks
from gradfilter.ops.native.fused import memory_format, run_pass
from gradfilter.ops.native.library import DTYPES, call, is_plain, is_readable
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import FLOAT, INT64, POINTER, Record, Task
from gradfilter.ops.native.values import IDENTITY

_TASK = Task(Record("unpool", (tasks.MAP, "map"), (POINTER, "cells y")))
_SLOPE = Task(Record("slope", (tasks.MAP, "map"), (POINTER, "g counts gx"), (FLOAT, "low high"), (INT64, "count_bytes")))


def pool_mean(x: Tensor, patch: Pair, layout: Layout = MAP) -> Tensor | None:
    """Return the mean of a map x [N, C, H, W] over the real pixels of each patch."""
    return _pool(x, patch, layout, sums=False)


def pool_sum(x: Tensor, patch: Pair, layout: Layout = MAP) -> Tensor | None:
    """Return the sum of a map x [N, C, H, W] over the real pixels of each patch."""
    return _pool(x, patch, layout, sums=True)


def _pool(x: Tensor, patch: Pair, layout: Layout, *, sums: bool) -> Tensor | None:
    over, across = patch
    if not (is_readable(x) and is_map(x, layout) and _is_patch(patch, over, across)):
        return None
    n, c, h, w = x.shape
    if over == across == 1:
        return x
    cells = empty((n, c, *count_cells((h, w), patch)), x.dtype, memory_format(x))
    run_pass(x, None, IDENTITY, patch, mean=cells, sums=sums)
    return cells


def _is_patch(patch: Pair, over: int, across: int) -> bool:
    """Tell whether the two numbers of a patch are ones that the library computes with."""
    return isinstance(patch, tuple) and type(over) is type(across) is int and 0 < over < LIMIT and 0 < across < LIMIT


def unpool(x_bar: Tensor, patch: Pair, size: Pair, layout: Layout = MAP) -> Tensor | None:
    """Repeat each cell of x_bar [N, C, H', W'] over its patch, up to a map of `size`."""
    if not (is_readable(x_bar) and is_map(x_bar, layout) and _is_patch(patch, *patch) and _is_patch(size, *size)):
        return None
    if x_bar.shape[2:] != count_cells(size, patch):
        return None
    if patch == (1, 1):
        return x_bar
    n, c = x_bar.shape[:2]
    y = empty((n, c, *size), x_bar.dtype, memory_format(x_bar))
    kind = (not x_bar.is_contiguous(), DTYPES[x_bar.dtype])
    task = _TASK.pack(n, c, *size, *patch, *kind, x_bar.data_ptr(), y.data_ptr())
    call(_TASK, task, x_bar, y)
    return y


def can_scale(g: Tensor, count: Tensor) -> bool:
    """Tell whether the library multiplies a gradient with slopes: dense float32 cells, and their counts."""
    plain = is_readable(g) and g.dtype is torch.float32 and count.dtype in COUNTS and is_plain(count, g.shape, count.dtype)
    return plain and (count.is_contiguous() or count.is_contiguous(memory_format=torch.channels_last))


def scale_by_counts(
    g: Tensor, count: Tensor, slopes: tuple[float, float], size: Pair, patch: Pair, layout: Layout = MAP
) -> Tensor | None:
    """Return g · (low + (high − low) · count / |I|)."""
    if patch == (1, 1) or not can_scale(g, count) or not is_map(g, layout):
        return None
    if not (isinstance(slopes, tuple) and _is_patch(patch, *patch) and _is_patch(size, *size)):
        return None
    if g.shape[2:] != count_cells(size, patch):
        return None
    g = g.contiguous(memory_format=memory_format(count))
    gx = torch.empty_like(g)
    kind = (not g.is_contiguous(), DTYPES[g.dtype])
    pointers = g.data_ptr(), count.data_ptr(), gx.data_ptr()
    task = _SLOPE.pack(*g.shape[:2], *size, *patch, *kind, *pointers, *slopes, count.element_size())
    call(_SLOPE, task, g, count, gx)
    return gx
