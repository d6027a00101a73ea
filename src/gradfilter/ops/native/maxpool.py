"""Max pooling that leaves patch means behind, and in which of the cells in reach the maxima lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradfilter.geometry.tiling import count_dtype
from gradfilter.geometry.windows import Windows
from gradfilter.ops.check import COUNTS
from gradfilter.ops.constants import find_target
from gradfilter.ops.native.library import CHANNELS, call, is_here, is_readable
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import INT64, MAP, POINTER, Record, Task

_TASK = Task(
    Record(
        "max_pool",
        *((MAP, "map"), (POINTER, "x y mean winners rows columns")),
        (INT64, "h w kh kw dh dw places across count_bytes"),
    )
)
_ROUTE = Task(Record("max_route", (INT64, "n c cells in_cells places count_bytes"), (POINTER, "g winners target gx")))
MOST_PLACES = 255
"""Places in reach that a byte can name: those of the winners at patch 1."""


class Pooled(NamedTuple):
    """The result of a max pooling.

    Attributes:
        y: The maxima.
        mean: Their patch means [N, C, H', W']; `None` at patch 1.
        winners: Per output cell and input cell in reach, how many pixels took their maximum there [N, C, H', W', reach];
            at patch 1 and a reach of at most 255 cells the place in reach itself, bytes [N, C, H, W].
    """

    y: Tensor
    mean: Tensor | None
    winners: Tensor


def can_max_pool(x: Tensor) -> bool:
    """Tell whether the library runs max pooling of x: a map of float32 in channels_last memory, not of few channels."""
    last = is_readable(x) and x.is_contiguous(memory_format=torch.channels_last)
    return last and x.dtype is torch.float32 and x.shape[1] >= CHANNELS


def max_pool(x: Tensor, windows: Windows) -> Pooled | None:
    """Return the maxima of windows over x with their patch means and winners."""
    if not can_max_pool(x) or x.shape[2:] != windows.in_size or windows.taps is None or windows.tables is None:
        return None
    n, c, h, w = x.shape
    (rows, columns), size, patch = windows.taps, windows.size, windows.out_patch
    places, single = rows.reach * columns.reach, patch == (1, 1)
    cells, named = windows.out_cells, single and places <= MOST_PLACES
    y = empty((n, c, *size), torch.float32, torch.channels_last)
    mean = None if single else empty((n, c, *cells), torch.float32, torch.channels_last)
    if named:
        winners = empty((n, c, *size), torch.uint8, torch.channels_last)
    else:
        winners = empty((n, *cells, places, c), count_dtype(patch)).permute(0, 4, 1, 2, 3)
    pointers = (x.data_ptr(), y.data_ptr(), 0 if mean is None else mean.data_ptr(), winners.data_ptr())
    task = _TASK.pack(
        *(n, c, *size, *patch, 1, 0),
        *pointers,
        *(table.ctypes.data for table in windows.tables),
        *(h, w, rows.place.shape[1], columns.place.shape[1], rows.dilation, columns.dilation),
        *(places, columns.reach, 0 if named else winners.element_size()),
    )
    call(_TASK, task, x, y, mean, winners)
    return Pooled(y, mean, winners)


def max_route(g: Tensor, winners: Tensor, windows: Windows) -> Tensor | None:
    """Return the sums over input cells of g times the counts of winners."""
    n, c, h, w = g.shape
    if not (is_readable(g) and g.dtype is torch.float32 and (h, w) == windows.out_cells and is_here(winners)):
        return None
    named = winners.dim() == 4 and windows.out_patch == (1, 1)  # else these are counts, and have another shape
    places = windows.reach[0] * windows.reach[1]
    shape = (n, c, h, w) if named else (n, c, h, w, places)
    if winners.shape != shape or (winners.dtype is not torch.uint8 if named else winners.dtype not in COUNTS):
        return None
    order = winners.permute(0, 2, 3, 1) if named else winners.permute(0, 2, 3, 4, 1)
    if not order.is_contiguous():
        return None
    target, in_cells = find_target(windows, g), windows.in_cells
    g = g.contiguous(memory_format=torch.channels_last)
    gx = torch.zeros(n, *in_cells, c, dtype=torch.float32, device="cpu")
    size = (n, c, h * w, in_cells[0] * in_cells[1], places, 0 if named else winners.element_size())
    task = _ROUTE.pack(*size, g.data_ptr(), winners.data_ptr(), target.data_ptr(), gx.data_ptr())
    call(_ROUTE, task, g, winners, target, gx, gx)
    return gx.permute(0, 3, 1, 2)
