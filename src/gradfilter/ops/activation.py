"""Activations with the norm and residual in front of them, their patch means, and their slopes per patch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.geometry.tiling import MAP, Layout, Pair, count_cells, count_dtype, is_nhwc
from gradfilter.ops.check import Check, is_whole
from gradfilter.ops.constants import make_areas
from gradfilter.ops.native import fused, pooling
from gradfilter.ops.native.values import CLAMP, HARDSWISH, IDENTITY, LEAKY, SILU, Act, Fused, is_smooth
from gradfilter.ops.operator import operator
from gradfilter.ops.pooling import check_axes_of, check_pixels, pool_map, pool_sum

KINDS = (IDENTITY.kind, CLAMP, LEAKY, HARDSWISH.kind, SILU.kind)
MOST = torch.finfo(torch.float32).max


def check_act(check: Check, name: str, act: Act) -> None:
    """Check that an activation is one that passes know."""
    check.instance(name, act, Act)
    if not is_whole(act.kind) or act.kind not in KINDS:
        check.refuse(f"{name}.kind", f"= {act.kind!r:.80}", f"The kinds are {', '.join(map(str, KINDS))}.")
    for field, value in zip(("lo", "hi", "slope"), act[1:], strict=True):
        check.number(f"{name}.{field}", value)
        if act.kind == CLAMP and value != value:
            check.refuse(f"{name}.{field}", f"= {value}", "Give bounds that are numbers, or infinite.")


def check_norm_act(
    check: Check,
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    patch: Pair,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Check the arguments of `norm_act`."""
    _, channels, _, _ = check.map("x", x)
    check.row("scale", scale, channels, x)
    check.row("shift", shift, channels, x)
    check_act(check, "act", act)
    check.pair("patch", patch)
    check.addend("residual", residual, x.shape, x)
    check.target("out", out, x.shape, x)


@operator(kernel=fused.norm_act, check=check_norm_act, eager=("out",))
def norm_act(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    patch: Pair,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Fused:
    """Return y = act(x · scale + shift + residual) with its patch means and its slopes per patch.

    Equation: z = x·scale + shift + residual, y = act(z), ȳ_I = (1/|I|) Σ_{i ∈ I} y_i; of a clamp or a leaky activation the
    count of pixels of I on the steep piece, of a smooth one (1/|I|) Σ_{i ∈ I} act′(z_i).
    Cost: one pass over x; four operations per pixel and those of the activation.
    Exact when: always. Half precision is computed in single precision and rounded once.

    Nothing is differentiable: a rule says what the gradient is.

    Args:
        x: The map [N, C, H, W].
        scale: One factor per channel [C], or `None` for 1.
        shift: One term per channel [C], or `None` for 0.
        act: The activation.
        patch: The patch `(h, w)`.
        residual: A map of x's shape to add before the activation.
        out: Where y goes; may be x.
    """
    with torch.no_grad():
        z, act = x.float() if x.element_size() == 2 else x, fit_act(act, x)
        if scale is not None:
            z = z * scale.to(z.dtype)[:, None, None]
        if shift is not None:
            z = z + shift.to(z.dtype)[:, None, None]
        if residual is not None:
            z = z + residual
        y = activate(z, act).to(x.dtype)
        slope = pool_slope(z, y, act, patch) if act.kind != IDENTITY.kind and patch != (1, 1) else None
        if out is not None:  # which may be z
            y = out.copy_(y)
        elif y is x:
            y = x.clone()
        return Fused(y, None if patch == (1, 1) else pool_map(y, patch), slope)


def fit_act(act: Act, x: Tensor) -> Act:
    """Return an activation with numbers that x is compared with: in single precision, those beyond all others are infinite."""
    if x.dtype is torch.float64 or not any(MOST < abs(n) < math.inf for n in act[1:]):
        return act
    return Act(act.kind, *(math.copysign(math.inf, n) if abs(n) > MOST else n for n in act[1:]))


def activate(z: Tensor, act: Act) -> Tensor:
    """Return act(z)."""
    if act.kind == CLAMP:
        return F.relu(z) if act.hi == math.inf and act.lo == 0 else torch.clamp(z, act.lo, act.hi)
    if act.kind == LEAKY:
        return F.leaky_relu(z, act.slope)
    if act.kind == IDENTITY.kind:
        return z
    return F.hardswish(z) if act.kind == HARDSWISH.kind else F.silu(z)


def pool_slope(z: Tensor, y: Tensor, act: Act, patch: Pair) -> Tensor:
    """Return the number of pixels with slope 1 per patch, or the mean of the derivative of a smooth activation."""
    if is_smooth(act):
        backward = torch.ops.aten.hardswish_backward if act.kind == HARDSWISH.kind else torch.ops.aten.silu_backward
        slope = backward(torch.ones((), dtype=z.dtype, device=z.device).expand_as(z), z)
        if act.kind == HARDSWISH.kind:  # at NaN torch's vectors give NaN, but the last few numbers of a row 1
            slope = slope.masked_fill(z.isnan(), math.nan)
        return pool_map(slope, patch).to(y.dtype)
    # Half precision counts to 256 or 2048 only.
    return pool_map(is_steep(z, y.to(z.dtype), act).float(), patch, sums=True).to(count_dtype(patch))


def is_steep(z: Tensor, y: Tensor, act: Act) -> Tensor:
    """Tell where the slope is 1. At NaN it is between bounds, and not with a leaky kink, as torch's scalar code has it."""
    if act.kind == LEAKY:
        return y > 0
    flat = (y <= act.lo).logical_or_(z <= act.lo)
    if act.hi < math.inf:
        # A bound that is rounded to half precision may lie between the bounds: y alone does not tell.
        flat.logical_or_(y >= act.hi).logical_or_(z >= act.hi)
    return flat.logical_not_()


def check_count(check: Check, x: Tensor, act: Act, patch: Pair, layout: Layout = MAP) -> None:
    """Check the arguments of `count_steep`."""
    check_pixels(check, x, patch, layout)
    check_act(check, "act", act)
    if act.kind not in (CLAMP, LEAKY):
        check.refuse(
            "act.kind", f"= {act.kind}", f"Give a clamp, {CLAMP}, or a leaky activation, {LEAKY}: others have no pieces."
        )


@operator(check=check_count)
def count_steep(x: Tensor, act: Act, patch: Pair, layout: Layout = MAP) -> Tensor:
    """Return how many pixels of each patch are on the steep piece of a clamp or a leaky activation: where its slope is 1.

    Equation: c_I = #{ i ∈ I : lo < x_i < hi }, of a leaky one #{ i ∈ I : x_i > 0 }, in the smallest integers that hold |I|; at
    patch 1 a bit per pixel, eight to a byte, [⌈numel/8⌉] in the logical order of x.
    Cost: three passes over x.
    Exact when: always. NaN counts as between bounds, and not as above 0: torch's scalar code has it so.

    Args:
        x: The argument of the activation or its result, a map or a tensor in another layout.
        act: The activation.
        patch: The patch `(h, w)`.
        layout: Which axes are rows and columns.
    """
    return count_set(find_steep(x, act), patch, layout)


def find_steep(x: Tensor, act: Act) -> Tensor:
    """Tell where an activation has slope 1, from its argument or its result.

    At NaN the slope is 1, and that of a leaky one the one below 0, as torch's scalar code has it: its vectors have 0 at NaN
    between two bounds, so that what torch gives there depends on the place of the pixel in memory.
    """
    if act.kind == LEAKY:
        return x > 0
    act = fit_act(act, x)
    wide = x.float() if x.element_size() == 2 else x  # torch does not round the bounds to half precision here
    flat = wide <= act.lo
    if act.hi < math.inf:
        flat.logical_or_(wide >= act.hi)
    return flat.logical_not_()


def is_told_by_result(act: Act, dtype: torch.dtype) -> bool:
    """Tell whether the result shows which piece a pixel is on: a bound that is rounded may lie between the bounds."""
    return dtype.itemsize > 2 or all(torch.tensor(bound, dtype=dtype).item() == bound for bound in (act.lo, act.hi))


def count_set(steep: Tensor, patch: Pair, layout: Layout = MAP) -> Tensor:
    """Return how many pixels of each patch are set in a tensor of booleans, as `count_steep` does."""
    if patch == (1, 1):
        return pack_bits(steep)
    # Half precision counts to 256 or 2048 only.
    return pool_sum(steep.float(), patch, layout).to(count_dtype(patch))


def find_share(count: Tensor, size: Pair, patch: Pair, g: Tensor, layout: Layout = MAP) -> Tensor:
    """Return which share of the pixels of each patch is set, for the counts of `count_steep`."""
    if patch == (1, 1):
        return unpack_bits(count, g.shape).to(g.dtype)
    return count.to(g.dtype) / make_areas(size, patch, g, layout)


GATHER, SPREAD, PLACES = 0x0102040810204080, 0x0101010101010101, 0x8040201008040201 - 2**64
"""Factors and a mask for eight bytes as one number. Times GATHER, byte i, 0 or 1, is bit i of the highest byte: no other term
of the product reaches it, and none carries into it. Times SPREAD, a byte is in all eight; PLACES has bit i of byte i."""


def pack_bits(mask: Tensor) -> Tensor:
    """Return a mask of booleans as bytes of eight bits [⌈numel/8⌉], in the mask's logical order."""
    flat = F.pad(mask.reshape(-1), (0, -mask.numel() % 8))
    return flat.view(torch.int64).mul(GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """Return the boolean mask of `pack_bits`."""
    spread = packed.to(torch.int64).mul_(SPREAD).bitwise_and_(PLACES)
    return spread.view(torch.uint8).ne(0)[: math.prod(shape)].reshape(shape)


def check_scale(
    check: Check, g: Tensor, count: Tensor, slopes: tuple[float, float], size: Pair, patch: Pair, layout: Layout = MAP
) -> None:
    """Check the arguments of `scale_by_counts`."""
    check.tensor("g", g)
    check.counts("count", count, g)
    check.slopes("slopes", slopes)
    check.pair("patch", patch)
    check.pair("size", size)
    check_axes_of(check, layout)
    cells = count_cells(size, patch)
    if max(layout.axes) >= g.dim() or list(g.shape) != layout.resize(g.shape, cells):
        check.refuse("g", f"of shape {list(g.shape)}", f"A map of {size} has {cells} patches of {patch}.")
    wanted = [-(-g.numel() // 8)] if patch == (1, 1) else list(g.shape)
    if list(count.shape) != wanted:
        check.refuse("count", f"of shape {list(count.shape)}", f"Give counts of shape {wanted}, as count_steep does.")


def scale_again(
    g: Tensor, shape: torch.Size, count: Tensor, slopes: tuple[float, float], size: Pair, patch: Pair, layout: Layout
) -> Tensor:
    """Return the gradient of a gradient that was multiplied with slopes."""
    return scale_by_counts(g, count, slopes, size, patch, layout)


@operator(kernel=pooling.scale_by_counts, check=check_scale, adjoint=scale_again)
def scale_by_counts(
    g: Tensor, count: Tensor, slopes: tuple[float, float], size: Pair, patch: Pair, layout: Layout = MAP
) -> Tensor:
    """Return the gradient in front of a step activation: g times its mean slope over each patch.

    Equation: Gx_I = G_I · (low + (high − low) · c_I/|I|); 0 where the slope is 0, even if G is NaN or infinite, as in torch.
    Cost: one pass over g; three operations per cell.
    Exact when: always, for a gradient that is constant in each patch.

    Args:
        g: The patch sums of the gradient [N, C, H', W'], or in another layout.
        count: The counts of `count_steep`.
        slopes: The slopes `(low, high)`, off and on the steep piece.
        size: The size `(h, w)` of the map.
        patch: The patch `(h, w)`.
        layout: Which axes are rows and columns.
    """
    low, high = slopes
    if patch == (1, 1) and low == 0:
        order = torch.channels_last if g.dim() == 4 and is_nhwc(g) else torch.contiguous_format
        gx = torch.ops.aten.threshold_backward(g, unpack_bits(count, g.shape).to(g.dtype, memory_format=order), 0)
        return gx if high == 1 else gx * high
    share = find_share(count, size, patch, g, layout)
    if low != 0:
        return g * (low + (high - low) * share)
    return cut(g * (share if high == 1 else high * share), count)


def cut(gx: Tensor, slope: Tensor) -> Tensor:
    """Return gx, and 0 where the slope, or the count of steep pixels, is 0: torch does not multiply there.

    So no NaN or infinity passes.
    """
    return torch.where(slope == 0, 0, gx)
