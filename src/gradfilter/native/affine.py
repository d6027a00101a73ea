"""The way back through a batch norm with fixed statistics, around that through the convolution in front of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradfilter.native.library import call, can_run, is_plain, is_row
from gradfilter.native.memory import empty
from gradfilter.native.task import DOUBLE, INT64, POINTER, Record, Task

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


class NormBack(NamedTuple):
    """What a batch norm does to the gradient that it gets.

    Attributes:
        scale: γ/σ [C].
        total: ΣG [C], over all but the channels.
        scaled: G·γ/σ, or `None` where that goes with the kernel.
    """

    scale: Tensor
    total: Tensor
    scaled: Tensor | None


def norm_back(g: Tensor, norm: FixedNorm, scales: bool) -> NormBack:
    """Return what a batch norm does to the gradient g [N, C, H', W'] of its result.

    Args:
        g: The gradient.
        norm: The batch norm.
        scales: Whether G·γ/σ is asked for; it is not given where a factor is 0.
    """
    gamma, _, var, eps = norm
    if not (_is_rows(g) and _are_readable(gamma, var)):
        return torch_norm_back(g, norm, scales)
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
    return NormBack(scale, total, None if code else scaled)


def torch_norm_back(g: Tensor, norm: FixedNorm, scales: bool) -> NormBack:
    """Return what `norm_back` returns, by torch's own functions. That no γ is 0 is read on a CPU alone, where it is free."""
    gamma, _, var, eps = norm
    scale = (var + eps).rsqrt()
    scale = scale if gamma is None else gamma * scale
    total = g.sum((0, 2, 3)).to(scale.dtype)
    scales = scales and g.dtype == scale.dtype and (g.is_meta or (g.is_cpu and (gamma is None or bool(gamma.all()))))
    return NormBack(scale, total, g * scale[:, None, None] if scales else None)


def norm_end(
    gw: Tensor, w: Tensor, b: Tensor | None, norm: FixedNorm, back: NormBack, need_gamma: bool, need_gb: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of kernel, factors γ and bias, from the kernel's gradient for what `norm_back` has given.

    Args:
        gw: The gradient [Co, Ci/groups, kh, kw] of the kernel w for the scaled gradient, or of w·γ/σ; may be changed.
        w: The kernel.
        b: The convolution's bias.
        norm: The batch norm.
        back: What `norm_back` has returned.
        need_gamma: Whether the gradient of γ is asked for.
        need_gb: Whether that of the bias is.
    """
    _, mu, var, eps = norm
    if not (_are_alike(gw, w) and _are_readable(*back[:2], b, mu, var)):
        return torch_norm_end(gw, w, b, norm, back, need_gamma, need_gb)
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


def torch_norm_end(
    gw: Tensor, w: Tensor, b: Tensor | None, norm: FixedNorm, back: NormBack, need_gamma: bool, need_gb: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what `norm_end` returns, by torch's own functions."""
    gw, g_gamma = gw.to(w.dtype), None
    if need_gamma:
        along = (gw * w).sum((1, 2, 3))
        along = along if back.scaled is None else along / back.scale
        mean = -norm.mu if b is None else b - norm.mu
        g_gamma = torch.addcmul(along, mean, back.total) * (norm.var + norm.eps).rsqrt()
    if back.scaled is None:
        gw = gw * back.scale.to(w.dtype)[:, None, None, None]
    return gw, g_gamma, back.total * back.scale if need_gb else None


def _is_rows(g: Tensor) -> bool:
    """Tell whether the library can read a gradient: rows of channels in single precision."""
    return g.dtype is torch.float32 and can_run(g) and g.is_contiguous(memory_format=torch.channels_last)


def _are_alike(gw: Tensor, w: Tensor) -> bool:
    """Tell whether the library can read a kernel and its gradient: dense, in the same order."""
    if not (gw.dtype is torch.float32 and is_plain(w, gw.shape) and can_run(gw)):
        return False
    last = torch.channels_last
    alike = gw.is_contiguous(memory_format=last) and w.is_contiguous(memory_format=last)
    return alike or (gw.is_contiguous() and w.is_contiguous())


def _are_readable(*values: Tensor | None) -> bool:
    """Tell whether the library can read one number per channel of each."""
    return all([is_row(v) for v in values])  # noqa: C419 (half the time)
