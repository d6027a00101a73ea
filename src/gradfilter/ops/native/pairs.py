"""The gradients of a depthwise convolution between patch-constant maps."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.geometry.convolution import AxisPairs
from gradfilter.ops.native.library import CHANNELS, call, is_plain, is_readable
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import INT64, POINTER, Record, Task

_AXIS = Record("pair_axis", (POINTER, "start pairs"), (INT64, "in out coefficients"))
_TASK = Task(Record("pairs", (_AXIS, "rows columns"), (INT64, "n c"), (POINTER, "g x q gx gq")))
_MOST_COEFFICIENTS = 256
"""Those of one channel: with more of them, a unit of work would not stay in the cache."""


def can_pair(g: Tensor, x: Tensor | None, rows: AxisPairs, columns: AxisPairs) -> bool:
    """Tell whether the library runs these gradients: float32 on a CPU, not of few channels, nor of no or very many taps."""
    few = 0 < rows.coefficients * columns.coefficients <= _MOST_COEFFICIENTS
    plain = is_plain(x, (*g.shape[:2], len(rows.start) - 1, len(columns.start) - 1))
    return few and plain and g.dtype is torch.float32 and g.shape[1] >= CHANNELS and is_readable(g)


def pair_gradients(
    g: Tensor, x: Tensor | None, q: Tensor | None, rows: AxisPairs, columns: AxisPairs
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx and gq: with q_k the coefficient of a pair of cells (i, j), gx_j = Σ g_i q_k and gq_k = Σ g_i x_j.

    Args:
        g: The gradient of the output [N, C, H', W']: one that `can_pair`.
        x: The input [N, C, H', W']; `None` where gq is not requested.
        q: The coefficients of rows and columns [K, C], dense; `None` where gx is not requested.
        rows: The pairs along the rows.
        columns: The same along the columns.
    """
    n, c = g.shape[:2]
    cells, layout = (len(rows.start) - 1, len(columns.start) - 1), torch.channels_last
    g = g.contiguous(memory_format=layout)
    x = None if x is None else x.contiguous(memory_format=layout)
    gx = None if q is None else empty((n, c, *cells), torch.float32, layout)
    gq = None if x is None else empty((rows.coefficients * columns.coefficients, c))
    tensors = (g, x, q, gx, gq)
    pointers = (0 if v is None else v.data_ptr() for v in tensors)
    call(_TASK, _TASK.pack(*rows.fields, *columns.fields, n, c, *pointers), *tensors)
    return gx, gq
