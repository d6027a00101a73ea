"""The gradients of a dense convolution of three coarse taps per axis between patch-constant maps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gradfilter.native.library import CHANNELS, call, can_run, is_plain
from gradfilter.native.memory import empty
from gradfilter.native.task import FLOAT, INT32, INT64, POINTER, Record, Task

_AXIS = Record("tile_axis", (POINTER, "tiles"), (INT64, "count in out"), (f"{FLOAT}[4][3]", "taps"))
_TASK = Task(Record("backward", (_AXIS, "rows columns"), (INT64, "n co ci"), (POINTER, "g x w gx gw")))
TILE = Record("axis_tile", (INT32, "out outs in seen positions plain"), (f"{FLOAT}[4][4]", "mix")).make_dtype()
"""`gf_axis_tile` of backward.h."""


@dataclass(frozen=True, eq=False)
class AxisTiles:
    """The tiles of one axis: one or two output cells each, and the input cells that these read.

    Attributes:
        tiles: An array of `TILE`.
        taps: What becomes of the kernel's three taps [4, 3].
        cells: The number of input and of output cells.
    """

    tiles: np.ndarray
    taps: np.ndarray
    cells: tuple[int, int]

    @cached_property
    def fields(self) -> tuple[int | float, ...]:
        """The fields of `gf_tile_axis`."""
        return self.tiles.ctypes.data, len(self.tiles), *self.cells, *self.taps.flat


def can_tile(g: Tensor, x: Tensor | None, w: Tensor, rows: AxisTiles, columns: AxisTiles) -> bool:
    """Tell whether the library runs these gradients: float32 on a CPU, whole vectors of channels on both sides."""
    (n, co), ci = g.shape[:2], w.shape[1]
    plain = is_plain(w, (co, ci, 3, 3)) and is_plain(x, (n, ci, rows.cells[0], columns.cells[0]))
    return co % CHANNELS == ci % CHANNELS == 0 and plain and g.dtype is torch.float32 and can_run(g)


def tile_gradients(
    g: Tensor, x: Tensor | None, w: Tensor, rows: AxisTiles, columns: AxisTiles, *, need_gx: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx [N, Ci, H', W'] and gw [Co, Ci, 3, 3], both channels last, of the convolution that the tiles describe.

    Args:
        g: The gradient of the output [N, Co, H', W']: one that `can_tile`.
        x: The input [N, Ci, H', W']; `None` where gw is not asked for.
        w: The weight [Co, Ci, 3, 3].
        rows: The tiles along the rows.
        columns: The same along the columns.
        need_gx: Whether gx is asked for.
    """
    (co, ci), layout = w.shape[:2], torch.channels_last
    g = g.contiguous(memory_format=layout)
    x = None if x is None else x.contiguous(memory_format=layout)
    kernel = w.detach().permute(0, 2, 3, 1).contiguous() if need_gx else None
    gx = empty((len(g), ci, rows.cells[0], columns.cells[0]), torch.float32, layout) if need_gx else None
    gw = None if x is None else empty((co, 3, 3, ci))
    tensors = (g, x, kernel, gx, gw)
    pointers = (0 if v is None else v.data_ptr() for v in tensors)
    call(_TASK, _TASK.pack(*rows.fields, *columns.fields, len(g), co, ci, *pointers), *tensors)
    return gx, None if gw is None else gw.permute(0, 3, 1, 2)
