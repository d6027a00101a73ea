"""conv2d and conv_transpose2d at patch resolution, alone and with the batch norm behind them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfilter import ops
from gradfilter.carriers import Carry, Out, carry, coarse
from gradfilter.deferred import convolve, find_inside
from gradfilter.emit import defer, emit
from gradfilter.geometry.axes import Axis
from gradfilter.geometry.convolution import Geometry, make_geometry
from gradfilter.geometry.tiling import Pair, make_pair, map_size
from gradfilter.keep import FULL, Kept, Tucker
from gradfilter.keep.base import load, save
from gradfilter.ops import apply_axes, pool_mean
from gradfilter.recipe import Recipe, surround
from gradfilter.regions import Choices
from gradfilter.rules.compressed import conv_gradients
from gradfilter.rules.shape import Padded
from gradfilter.tensor import PatchTensor, is_live, keep_input, mean, pixels, rule


def pool_input(x: PatchTensor, geometry: Geometry) -> Tensor:
    """Return what backward needs of the layer's input to give the weight gradient.

    The patch means x̄ [N, Ci, H', W']; for a pointwise kernel the means of the pixels that are read, at the output's
    resolution (exact, and no more bytes); for the lumped kernel the means under each output cell.
    """
    if geometry.is_pointwise:
        rows, columns = geometry.rows, geometry.columns
        if rows.stride == columns.stride == 1 and x.patch == geometry.out_patch:
            return mean(x)
        value = pixels(x)[:, :, :: rows.stride, :: columns.stride]
        return pool_mean(value[:, :, : rows.out_size, : columns.out_size], geometry.out_patch)
    if geometry.lumped:
        return apply_axes(mean(x), *geometry.stacked)
    return mean(x)


def orient(w: Tensor, geometry: Geometry) -> Tensor:
    """Turn the weight of a transposed convolution [Ci, Co/groups, kh, kw] into that of a convolution [Co, Ci/groups, kh, kw].

    And back; the weight of a convolution stays as it is.
    """
    if not geometry.is_transposed:
        return w
    return w.unflatten(0, (geometry.groups, -1)).transpose(1, 2).flatten(0, 1)


class Conv(Carry):
    """Carry a gradient back through conv2d or conv_transpose2d.

    Equation, Cost, Exact when: see `ops.conv_gradients`; gb = ΣG. Saves the kept input where the weight is trained.
    """

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, w: Tensor, b: Tensor | None, kept: Kept | None, geometry: Geometry, out: Out
    ) -> tuple[Tensor, Tensor]:
        save(ctx, [kept], w if ctx.needs_input_grad[0] else None)
        ctx.geometry, ctx.w_shape = geometry, w.shape
        return carry(ctx, (*out.value.shape[:2], *geometry.out_cells), out)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        kept, w = load(ctx)
        w = orient(g.new_empty(()).expand(ctx.w_shape) if w is None else w.to(g.dtype), ctx.geometry)
        gx, gw = conv_gradients(g, kept, w, ctx.geometry, need_gx=ctx.needs_input_grad[0])
        gb = g.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return gx, None if gw is None else orient(gw, ctx.geometry), gb, None, None, None


class ConvOrigin(NamedTuple):
    """A convolution as the batch norm behind it needs to know it."""

    carrier: Tensor
    w: Tensor
    b: Tensor | None
    kept: Kept | None
    geometry: Geometry


class ConvNorm(Carry):
    """Carry a gradient back through a convolution and the eval-mode batch norm behind it, as one function.

    Equation, Cost, Exact when: see `ops.conv_norm_gradients`. The affine parameters train and nothing more is kept for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        w: Tensor,
        b: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        mu: Tensor,
        var: Tensor,
        eps: float,
        kept: Kept | None,
        geometry: Geometry,
        out: Out,
    ) -> tuple[Tensor, Tensor]:
        save(ctx, [kept], w, b, gamma, mu, var)
        ctx.geometry, ctx.eps = geometry, eps
        return carry(ctx, (*out.value.shape[:2], *geometry.out_cells), out)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        kept, w, b, gamma, mu, var = load(ctx)
        need_gx, need_gw, need_gb, need_gamma, need_beta = ctx.needs_input_grad[:5]
        norm, geometry = ops.FixedNorm(gamma, mu, var, ctx.eps), ctx.geometry
        w = orient(w, geometry)
        if isinstance(kept, Tucker):  # no tensor, which operators take
            found = ops.conv_norm_gradients_by(
                lambda g, w: conv_gradients(g, kept, w, geometry, need_gx=need_gx), g, w, b, norm, need_gb, need_gamma
            )
        else:
            found = ops.conv_norm_gradients(g, kept, w, b, norm, geometry, need_gx, need_gb, need_gamma)
        gw = orient(found.gw, geometry) if need_gw and found.gw is not None else None
        return found.gx, gw, found.gb, found.g_gamma, found.g_beta if need_beta else None, *[None] * 6


def resolve_padding(padding: str | int | tuple[int, ...], kernel: Pair, dilation: Pair, fold: tuple[int, ...]) -> Pair:
    """Return the zeros before the first row and column, with a preceding zero pad folded in.

    "same" puts the odd zero after, as torch does.
    """
    left, _, top, _ = fold
    if padding == "valid":
        return top, left
    if padding == "same":
        before = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
        return before[0] + top, before[1] + left
    h, w = as_pair(padding)
    return h + top, w + left


def as_pair(value: Any) -> Pair:
    """Return an int or a sequence of one or two ints, as torch's functions take them, as a pair."""
    if type(value) is tuple and len(value) == 2:  # as modules have them
        return value
    if isinstance(value, int):
        return make_pair(value)
    values = tuple(value)
    return (values[0], values[-1])


@lru_cache(maxsize=4096)
def find_geometry(
    kernel: Pair,
    stride: Pair,
    dilation: Pair,
    before: Pair,
    size: Pair,
    out_size: Pair,
    patch: Pair,
    out_patch: Pair,
    groups: int,
    lumped: bool,
    transposed: bool = False,
) -> Geometry:
    """Return the geometry of a convolution from pairs `(h, w)`."""
    pairs = kernel, stride, dilation, before, size, out_size, patch, out_patch
    rows, columns = (Axis(*(pair[i] for pair in pairs), transposed=transposed) for i in (0, 1))
    return make_geometry(rows, columns, groups, lumped)


def find_choices(x: PatchTensor, weight: Tensor) -> Choices:
    """Return what the layer with this weight has decided for its input x; else what the layer before has."""
    appointed, x.appointed = x.appointed, None
    return appointed[1] if appointed is not None and appointed[0] is weight else x.choices


@rule(torch.conv2d)
def conv2d(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Run conv2d on the values and hand its carrier on."""
    if not is_live(input) or isinstance(weight, PatchTensor) or input.dim() != 4:
        return NotImplemented
    x, choices = input, find_choices(input, weight)
    stride, dilation = as_pair(stride), as_pair(dilation)
    pads, unpadded = (0, 0, 0, 0), x
    if isinstance(x.origin, Padded) and x.origin.is_intact:
        # Patches of a padded map would straddle those of the map: take the map itself and let the kernel pad.
        pads, unpadded = x.origin.pads, x.origin.x
    inside, around = find_inside(x) if unpadded is not x else (x, pads)
    zeros = None if isinstance(padding, str) else surround(as_pair(padding), around)
    joins = choices.keep == FULL and choices.kernel == "lift"
    y = convolve(inside, weight, bias, stride, zeros, dilation, groups, joins)
    if y is None:
        with torch.no_grad():
            y = func(pixels(x), weight, bias, stride, padding, dilation, groups)
    kernel, size, out_size = map_size(weight), map_size(unpadded), (y.shape[2], y.shape[3])
    before = resolve_padding(padding, kernel, dilation, pads)
    out_patch = choices.tiling.patch_for(out_size)
    lumped = choices.kernel == "lumped" and kernel != (1, 1)
    geometry = find_geometry(kernel, stride, dilation, before, size, out_size, unpadded.patch, out_patch, groups, lumped)
    return finish_conv(choices, unpadded, weight, bias, geometry, y, copied=unpadded is not x)


def finish_conv(
    choices: Choices,
    read: PatchTensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    y: Tensor | Recipe,
    *,
    copied: bool = False,
) -> Tensor:
    """Return the result y, or the one that a recipe will give, of a convolution.

    Args:
        choices: Those of the layer.
        read: What it reads: its input, or what that is the padded map of.
        weight: Its weight.
        bias: Its bias.
        geometry: The convolution.
        y: The value, or how it is computed.
        copied: Whether torch's own convolution reads a copy, a padded one, of what this one reads.
    """
    kept = None
    if weight.requires_grad and isinstance(y, Recipe) and y.before is not None:
        ended = y.before.ended  # what it reads waits, and so do the means of that
        assert ended is not None
        assert ended.cells.mean is not None
        kept = Kept((ended.cells.mean,), ended.promise)
    elif weight.requires_grad:
        dtype = y.x.dtype if isinstance(y, Recipe) else y.dtype
        kept = keep_input(read, pool_input(read, geometry), choices, dtype, copied=copied)
    origin = ConvOrigin(read.carrier, weight, bias, kept, geometry)
    if isinstance(y, Recipe):
        return defer(y, Conv, geometry.out_patch, choices, *origin, origin=origin)
    return emit(Conv, Out(y, geometry.out_patch, choices, PatchTensor), *origin, origin=origin)


@rule(torch.conv_transpose2d)
def conv_transpose2d(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Run conv_transpose2d on the values and hand its carrier on.

    A transposed convolution is a convolution whose taps read (i + p − d·u)/s, where that is whole. kernel="lumped" means the
    lift here: most taps of an output pixel read nothing, so a kernel replaced by its sum has no scale of its own.
    """
    if not is_live(input) or isinstance(weight, PatchTensor):
        return NotImplemented
    x = input
    with torch.no_grad():
        y = func(pixels(x), weight, bias, stride, padding, output_padding, groups, dilation)
    stride, padding, dilation = as_pair(stride), as_pair(padding), as_pair(dilation)
    size, out_size = map_size(x), map_size(y)
    out_patch = x.choices.tiling.patch_for(out_size)
    geometry = find_geometry(
        map_size(weight), stride, dilation, padding, size, out_size, x.patch, out_patch, groups, False, transposed=True
    )
    return finish_conv(x.choices, x, weight, bias, geometry, y)
