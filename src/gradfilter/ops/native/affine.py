"""The gradients of a batch norm with fixed statistics, around those of the convolution in front of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradfilter.ops.native.fused import are_rows
from gradfilter.ops.native.library import call, is_plain, is_readable, is_row
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import DOUBLE, INT64, POINTER, Record, Task

_BACK = Task(Record("norm_back", (INT64, "rows c"), (DOUBLE, "eps"), (POINTER, "g gamma var scale total scaled")))
_END = Task(
    Record(
        "norm_end",
        *((INT64, "c k"), (DOUBLE, "eps"), (INT64, "is_scaled")),
        (POINTER, "weight bias mean var scale total gw g_gamma g_bias"),
    )
)


class FixedNorm(NamedTuple):
    """A batch norm with fixed statistics: γ·(x − μ)/√(var + eps) + β, one of each per channel.

    Attributes:
        gamma: Its factors, or `None` for 1.
        mu: Its means.
        var: Its variances.
        eps: What it adds to them.
    """

    gamma: Tensor | None
    mu: Tensor
    var: Tensor
    eps: float


class ScaledGradient(NamedTuple):
    """What a batch norm does to the gradient that it gets.

    Attributes:
        scale: γ/σ [C].
        total: ΣG [C], over all but the channels.
        scaled: G·γ/σ, or `None` where that goes with the kernel.
    """

    scale: Tensor
    total: Tensor
    scaled: Tensor | None


def scale_norm_gradient(g: Tensor, norm: FixedNorm, scales: bool) -> ScaledGradient | None:
    """Return γ/σ, the sum of the gradient g [N, C, H', W'] over all but the channels, and G·γ/σ where no factor is 0."""
    gamma, _, var, eps = norm
    if not (_is_rows(g) and are_rows(g.shape[1], gamma, var) and _are_readable(gamma, var)):
        return None
    channels = g.shape[1]
    scale, total = empty((channels,)), empty((channels,))
    scaled = torch.empty_like(g) if scales else None
    task = _BACK.pack(
        g.numel() // channels,
        channels,
        eps,
        g.data_ptr(),
        0 if gamma is None else gamma.data_ptr(),
        var.data_ptr(),
        scale.data_ptr(),
        total.data_ptr(),
        0 if scaled is None else scaled.data_ptr(),
    )
    code = call(_BACK, task, g, gamma, var, scale, total, scaled)
    return ScaledGradient(scale, total, None if code else scaled)


def finish_norm_gradients(
    gw: Tensor, w: Tensor, b: Tensor | None, norm: FixedNorm, back: ScaledGradient, need_gamma: bool, need_gb: bool
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Return the gradients of kernel, factors γ and bias; gw may be changed."""
    _, mu, var, eps = norm
    rows = back.scale, back.total, b, mu, var
    if not (_are_alike(gw, w) and are_rows(w.shape[0], *rows) and _are_readable(*rows)):
        return None
    channels = w.shape[0]
    g_gamma = empty((channels,)) if need_gamma else None
    gb = empty((channels,)) if need_gb else None
    task = _END.pack(
        channels,
        w.numel() // channels,
        eps,
        back.scaled is not None,
        w.data_ptr(),
        0 if b is None else b.data_ptr(),
        mu.data_ptr(),
        var.data_ptr(),
        back.scale.data_ptr(),
        back.total.data_ptr(),
        gw.data_ptr(),
        0 if g_gamma is None else g_gamma.data_ptr(),
        0 if gb is None else gb.data_ptr(),
    )
    changed = gw if back.scaled is None else None
    call(_END, task, w, b, mu, var, back.scale, back.total, gw, changed, g_gamma, gb)
    return gw, g_gamma, gb


def _is_rows(g: Tensor) -> bool:
    """Tell whether the library can read a gradient: rows of channels in single precision."""
    return g.dtype is torch.float32 and is_readable(g) and g.is_contiguous(memory_format=torch.channels_last)


def _are_alike(gw: Tensor, w: Tensor) -> bool:
    """Tell whether the library can read a kernel and its gradient: dense, in the same order."""
    if not (gw.dtype is torch.float32 and is_plain(w, gw.shape) and is_readable(gw)):
        return False
    last = torch.channels_last
    alike = gw.is_contiguous(memory_format=last) and w.is_contiguous(memory_format=last)
    return alike or (gw.is_contiguous() and w.is_contiguous())


def _are_readable(*values: Tensor | None) -> bool:
    """Tell whether the library can read one number per channel of each."""
    return all([is_row(v) for v in values])  # noqa: C419 (half the time)
