"""The gradients of a dense convolution of two or three coarse taps per axis between patch-constant maps."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.geometry.convolution import TILE, AxisTiles
from gradfilter.ops.native.library import CHANNELS, call, is_plain, is_readable
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import FLOAT, INT64, POINTER, Record, Task

_AXIS = Record("tile_axis", (POINTER, "tiles"), (INT64, "count in out"), (f"{FLOAT}[4][3]", "taps"))
_TASK = Task(
    Record("backward", (_AXIS, "rows columns"), (INT64, "n co ci"), (POINTER, "g x w"), (INT64, "last"), (POINTER, "gx gw"))
)
Record.from_dtype("axis_tile", TILE)


def can_tile(g: Tensor, x: Tensor | None, w: Tensor, rows: AxisTiles, columns: AxisTiles) -> bool:
    """Tell whether the library runs these gradients: float32 on a CPU, whole vectors of channels on both sides."""
    (n, co), ci = g.shape[:2], w.shape[1]
    plain = is_plain(w, (co, ci, 3, 3)) and is_plain(x, (n, ci, rows.cells[0], columns.cells[0]))
    return co % CHANNELS == ci % CHANNELS == 0 and plain and g.dtype is torch.float32 and is_readable(g)


def tile_gradients(
    g: Tensor, x: Tensor | None, w: Tensor, rows: AxisTiles, columns: AxisTiles, *, need_gx: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the convolution that the tiles describe.

    They are gx [N, Ci, H', W'], channels last, and gw [Co, Ci, 3, 3], in the memory order of the weight.

    Args:
        g: The gradient of the output [N, Co, H', W']: one that `can_tile`.
        x: The input [N, Ci, H', W']; `None` where gw is not requested.
        w: The weight [Co, Ci, 3, 3].
        rows: The tiles along the rows.
        columns: The same along the columns.
        need_gx: Whether gx is requested.
    """
    (co, ci), layout = w.shape[:2], torch.channels_last
    g = g.contiguous(memory_format=layout)
    x = None if x is None else x.contiguous(memory_format=layout)
    order = layout if w.is_contiguous(memory_format=layout) else torch.contiguous_format
    kernel = w.detach().contiguous(memory_format=order) if need_gx else None
    gx = empty((g.shape[0], ci, rows.cells[0], columns.cells[0]), torch.float32, layout) if need_gx else None
    gw = None if x is None else empty((co, ci, 3, 3), torch.float32, order)
    tensors = (g, x, kernel, gx, gw)
    g_at, x_at, w_at, gx_at, gw_at = (0 if v is None else v.data_ptr() for v in tensors)
    last = order is layout
    task = _TASK.pack(*rows.fields, *columns.fields, g.shape[0], co, ci, g_at, x_at, w_at, last, gx_at, gw_at)
    call(_TASK, task, *tensors)
    return gx, gw
