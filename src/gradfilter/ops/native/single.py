"""The gradients of a dense convolution between patch-constant maps whose outputs read one cell each."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.ops.native.library import CHANNELS, call, is_plain, is_readable
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import INT64, POINTER, Record, Task

_TASK = Task(
    Record("single", (INT64, "cells co ci taps"), (POINTER, "g x w"), (INT64, "tap channel"), (POINTER, "gx gw")),
)


def can_single(g: Tensor, x: Tensor | None, w: Tensor) -> bool:
    """Tell whether the library runs these gradients: float32 on a CPU, a whole vector of input channels at least."""
    (n, co, *cells), (ci, *kernel) = g.shape, w.shape[1:]
    plain = is_plain(w, (co, ci, *kernel)) and is_plain(x, (n, ci, *cells))
    return ci >= CHANNELS and plain and g.dtype is torch.float32 and is_readable(g)


def single_gradients(g: Tensor, x: Tensor | None, w: Tensor, *, need_gx: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return gx [N, Ci, H', W'], channels last, and gw [Co, Ci]: gx = (Σ_uv w[u,v])ᵀ g, gw = Σ g · x for every tap.

    Args:
        g: The gradient of the output [N, Co, H', W']: one that `can_single`.
        x: What the output cells read [N, Ci, H', W']; `None` where gw is not requested.
        w: The weight [Co, Ci, kh, kw].
        need_gx: Whether gx is requested.
    """
    (n, co, *cells), (ci, *kernel), layout = g.shape, w.shape[1:], torch.channels_last
    g = g.contiguous(memory_format=layout)
    x = None if x is None else x.contiguous(memory_format=layout)
    weight, taps = None, kernel[0] * kernel[1]
    first = taps > 1 and w.is_contiguous()
    tap, channel = (1, taps) if first else (ci, 1)
    if need_gx:
        weight = w.detach() if first else w.detach().contiguous(memory_format=layout)
    gx = empty((n, ci, *cells), torch.float32, layout) if need_gx else None
    gw = None if x is None else empty((co, ci))
    tensors = (g, x, weight, gx, gw)
    g_at, x_at, w_at, gx_at, gw_at = (0 if v is None else v.data_ptr() for v in tensors)
    task = _TASK.pack(n * cells[0] * cells[1], co, ci, taps, g_at, x_at, w_at, tap, channel, gx_at, gw_at)
    call(_TASK, task, *tensors)
    return gx, gw
