"""The gradients of a batch norm with fixed statistics, around those of the convolution in front of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradfilter.ops.native.fused import are_rows
from gradfilter.ops.native.library import call, is_plain, is_readable, is_row
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import DOUBLE, INT64, POINTER, Record, Task

_BACK = Task(
    Record("norm_back", (INT64, "rows c k"), (DOUBLE, "eps"), (POINTER, "g gamma var scale total scaled weight folded"))
)
_END = Task(
    Record(
        "norm_end",
        *((INT64, "c outer inner channel_step outer_step inner_step"), (DOUBLE, "eps"), (INT64, "is_scaled")),
        (POINTER, "weight bias mean var scale total gw g_gamma g_bias out"),
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
        folded: The kernel w·γ/σ where that is so, and w is given.
    """

    scale: Tensor
    total: Tensor
    scaled: Tensor | None
    folded: Tensor | None = None


def scale_norm_gradient(g: Tensor, norm: FixedNorm, scales: bool, w: Tensor | None = None) -> ScaledGradient | None:
    """Return γ/σ, the sum of the gradient g [N, C, H', W'] over all but the channels, and G·γ/σ where no factor is 0.

    Where that is not requested, the kernel w·γ/σ in place of it, if the library can read w.
    """
    gamma, _, var, eps = norm
    if not (_is_rows(g) and are_rows(g.shape[1], gamma, var) and _are_readable(gamma, var)):
        return None
    channels = g.shape[1]
    scale, total = empty((channels,)), empty((channels,))
    scaled = torch.empty_like(g) if scales else None
    folded = None
    if w is not None and not scales and len(w) == channels:
        layout = _find_layout(w)
        folded = None if layout is None else empty(w.shape, torch.float32, layout)
    task = _BACK.pack(
        g.numel() // channels,
        channels,
        0 if folded is None else folded.numel() // channels,
        eps,
        g.data_ptr(),
        0 if gamma is None else gamma.data_ptr(),
        var.data_ptr(),
        scale.data_ptr(),
        total.data_ptr(),
        0 if scaled is None else scaled.data_ptr(),
        0 if folded is None else w.data_ptr(),  # type: ignore[union-attr]
        0 if folded is None else folded.data_ptr(),
    )
    code = call(_BACK, task, g, gamma, var, scale, total, scaled, None if folded is None else w, folded)
    return ScaledGradient(scale, total, None if code else scaled, folded)


def finish_norm_gradients(
    gw: Tensor, w: Tensor, b: Tensor | None, norm: FixedNorm, back: ScaledGradient, need_gamma: bool, need_gb: bool
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Return the gradients of kernel, in the kernel's memory order, of factors γ and bias; gw may be changed."""
    _, mu, var, eps = norm
    rows, layout = (back.scale, back.total, b, mu, var), _find_layout(w)
    if layout is None or not (is_plain(gw, w.shape) and are_rows(w.shape[0], *rows) and _are_readable(*rows)):
        return None
    tap = _find_tap_step(gw)
    if tap is None:
        return None
    channels, inputs, kh, kw = w.shape
    sizes, steps = [inputs, kh * kw], [gw.stride(1), tap]
    if layout is torch.channels_last:
        sizes.reverse()
        steps.reverse()
    # One that is dense in this order is changed in place.
    out = gw if gw.is_contiguous(memory_format=layout) else empty(w.shape, torch.float32, layout)
    g_gamma = empty((channels,)) if need_gamma else None
    gb = empty((channels,)) if need_gb else None
    task = _END.pack(
        channels,
        *sizes,
        gw.stride(0),
        *steps,
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
        out.data_ptr(),
    )
    changed = out if out is not gw or back.scaled is None else None
    call(_END, task, w, b, mu, var, back.scale, back.total, gw, changed, g_gamma, gb)
    return out, g_gamma, gb


def _is_rows(g: Tensor) -> bool:
    """Tell whether the library can read a gradient: rows of channels in single precision."""
    return g.dtype is torch.float32 and is_readable(g) and g.is_contiguous(memory_format=torch.channels_last)


def _find_layout(w: Tensor) -> torch.memory_format | None:
    """Return the memory order of a kernel that the library can read, or `None`: dense float32."""
    if not (w.dim() == 4 and is_plain(w, w.shape)):
        return None
    if w.is_contiguous():
        return torch.contiguous_format
    return torch.channels_last if w.is_contiguous(memory_format=torch.channels_last) else None


def _find_tap_step(gw: Tensor) -> int | None:
    """Return how many numbers lie from one tap of a kernel's gradient to the next, if it is the same for all."""
    (_, _, kh, kw), (_, _, down, across) = gw.shape, gw.stride()
    if kw == 1:
        return down
    return across if kh == 1 or down == kw * across else None


def _are_readable(*values: Tensor | None) -> bool:
    """Tell whether the library can read one number per channel of each."""
    return all([is_row(v) for v in values])  # noqa: C419 (half the time)
