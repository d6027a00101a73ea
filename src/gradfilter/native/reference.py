"""The same passes in plain torch: what runs without the library, and the truth that it is tested against."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.native.values import CLAMP, HARDSWISH, IDENTITY, LEAKY, Act, Fused, Pair, count_dtype, is_smooth


def torch_norm_act(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    patch: Pair,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    want_slope: bool = True,
) -> Fused:
    """Return what `norm_act` returns, by torch's own functions; half precision is computed in single and rounded once."""
    with torch.no_grad():
        z = x.float() if x.element_size() == 2 else x
        if scale is not None:
            z = z * scale.to(z.dtype)[:, None, None]
        if shift is not None:
            z = z + shift.to(z.dtype)[:, None, None]
        if residual is not None:
            z = z + residual
        y = _activate(z, act).to(x.dtype)
        slope = _slope(z, y, act, patch) if want_slope and act != IDENTITY and patch != (1, 1) else None
        if out is not None:  # which may be z
            y = out.copy_(y)
        elif y is x:
            y = x.clone()
        if patch == (1, 1):
            return Fused(y, None, None)
        return Fused(y, pool(y, patch), slope)


def _activate(z: Tensor, act: Act) -> Tensor:
    if act.kind == CLAMP:
        return F.relu(z) if act.hi == math.inf and act.lo == 0 else torch.clamp(z, act.lo, act.hi)
    if act.kind == LEAKY:
        return F.leaky_relu(z, act.slope)
    if act == IDENTITY:
        return z
    return F.hardswish(z) if act == HARDSWISH else F.silu(z)


def _slope(z: Tensor, y: Tensor, act: Act, patch: Pair) -> Tensor:
    if is_smooth(act):
        backward = torch.ops.aten.hardswish_backward if act == HARDSWISH else torch.ops.aten.silu_backward
        slope = backward(torch.ones((), dtype=z.dtype, device=z.device).expand_as(z), z)
        if act == HARDSWISH:  # at NaN torch's vectors give NaN, but the last few numbers of a row 1
            slope = slope.masked_fill(z.isnan(), math.nan)
        return pool(slope, patch).to(y.dtype)
    # Half precision counts to 256 or 2048 only.
    return pool(_is_steep(z, y.to(z.dtype), act).float(), patch, sums=True).to(count_dtype(patch))


def _is_steep(z: Tensor, y: Tensor, act: Act) -> Tensor:
    """Tell where the slope is 1. At NaN it is between bounds, and not with a leaky kink, as torch's scalar code has it."""
    if act.kind == LEAKY:
        return y > 0
    flat = (y <= act.lo).logical_or_(z <= act.lo)
    if act.hi < math.inf:
        # A bound that is rounded to half precision may lie between the bounds: y alone does not tell.
        flat.logical_or_(y >= act.hi).logical_or_(z >= act.hi)
    return flat.logical_not_()


def pool(x: Tensor, patch: Pair, *, sums: bool = False) -> Tensor:
    """Return the mean, or the sum, of x [N, C, H, W] over the real pixels of each patch; half precision adds in single."""
    wide = x.float() if x.element_size() == 2 else x
    return F.avg_pool2d(wide, patch, patch, ceil_mode=True, count_include_pad=False, divisor_override=1 if sums else None).to(
        x.dtype
    )


def torch_unpool(x_bar: Tensor, patch: Pair, size: Pair) -> Tensor:
    """Repeat each cell of x_bar [N, C, H', W'] over its patch, up to a map of `size`."""
    (n, c, h, w), (over, across) = x_bar.shape, patch
    if not x_bar.is_contiguous() and x_bar.is_contiguous(memory_format=torch.channels_last):
        full = x_bar.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, h, over, w, across, c)
        full = full.reshape(n, h * over, w * across, c).permute(0, 3, 1, 2)
    else:  # along rows first: the copies of whole rows are then fast ones
        full = x_bar[..., None].expand(n, c, h, w, across).reshape(n, c, h, 1, w * across)
        full = full.expand(n, c, h, over, w * across).reshape(n, c, h * over, w * across)
    return full[..., : size[0], : size[1]]
