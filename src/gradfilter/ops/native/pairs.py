"""The gradients of a depthwise convolution between patch-constant maps."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.geometry.convolution import AxisPairs, Geometry
from gradfilter.ops.native.library import CHANNELS, call, is_plain, is_readable
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import INT64, POINTER, Record, Task

_AXIS = Record("pair_axis", (POINTER, "start pairs"), (INT64, "in out coefficients"))
_TASK = Task(Record("pairs", (_AXIS, "rows columns"), (INT64, "n c taps"), (POINTER, "mix g x w gx gw")))
_MOST_COEFFICIENTS = 256
"""Those of one channel: with more of them, a unit of work would not stay in the cache."""


def can_pair(g: Tensor, x: Tensor | None, rows: AxisPairs, columns: AxisPairs) -> bool:
    """Tell whether the library runs these gradients: float32 on a CPU, not of few channels, nor of no or very many taps."""
    few = 0 < rows.coefficients * columns.coefficients <= _MOST_COEFFICIENTS
    plain = is_plain(x, (*g.shape[:2], len(rows.start) - 1, len(columns.start) - 1))
    return few and plain and g.dtype is torch.float32 and g.shape[1] >= CHANNELS and is_readable(g)


def pair_gradients(
    g: Tensor, x: Tensor | None, w: Tensor, geometry: Geometry, *, need_gx: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx and gw with one kernel per channel in one pass over the pairs of cells that meet.

    A pair (i, j) has the coefficient q = Σ_uv T_u[i,j] T_v[i,j] w[u,v], and few of these differ: with q_k that of a pair,
    gx_j = Σ g_i q_k and gq_k = Σ g_i x_j, from which gw by the same sum over k.

    Args:
        g: The gradient of the output [N, C, H', W']: one that `can_pair`.
        x: The input [N, C, H', W']; `None` where gw is not requested.
        w: The weight [C, 1, kh, kw].
        geometry: The convolution.
        need_gx: Whether gx is requested.
    """
    (rows, columns), (n, c), layout = geometry.pairs, g.shape[:2], torch.channels_last
    g = g.contiguous(memory_format=layout)
    x = None if x is None else x.contiguous(memory_format=layout)
    weight = w.detach().contiguous() if need_gx else None
    gx = empty((n, c, *geometry.in_cells), torch.float32, layout) if need_gx else None
    gw = None if x is None else empty(w.shape)
    tensors = (g, x, weight, gx, gw)
    pointers = (0 if v is None else v.data_ptr() for v in tensors)
    taps = w.shape[2] * w.shape[3]
    call(_TASK, _TASK.pack(*rows.fields, *columns.fields, n, c, taps, geometry.mix.ctypes.data, *pointers), *tensors)
    return gx, gw
