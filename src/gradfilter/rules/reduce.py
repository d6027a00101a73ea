"""Reductions at patch resolution: over space, where most regions end, and over channels, where they go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradfilter.carriers import coarse, make_carrier
from gradfilter.emit import wrap
from gradfilter.geometry.tiling import Layout, Pair, count_cells, map_size
from gradfilter.keep import Kept
from gradfilter.keep.base import load, save
from gradfilter.ops import make_areas, pool_mean, pool_sum
from gradfilter.rules.elementwise import elementwise
from gradfilter.rules.functions import differentiate, find_functions
from gradfilter.tensor import PatchTensor, hold_map, is_live, pixels, rule, spatial_size


class Spread(Function):
    """Leave a region through the sum or the mean over space, and perhaps other axes.

    Equation: G = gy·|I|, for the mean gy·|I| over the number of values.
    Cost: nothing to speak of; saves nothing.
    Exact when: always.
    """

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, y: tuple[Tensor], size: Pair, patch: Pair, layout: Layout, kept: list[int], count: int
    ) -> Tensor:
        ctx.shape, ctx.size, ctx.patch, ctx.layout, ctx.kept, ctx.count = carrier.shape, size, patch, layout, kept, count
        return y[0]

    @staticmethod
    @coarse
    def backward(ctx: Any, gy: Tensor) -> Any:
        gy = gy.reshape(ctx.kept)
        areas = make_areas(ctx.size, ctx.patch, gy.expand(ctx.shape), ctx.layout)
        return (gy * (areas / ctx.count)).expand(ctx.shape), None, None, None, None, None, None


class Reduction(Function):
    """Leave a region through any function of each channel of each image, or of all of them.

    Equation: G = gy · Σ over the patch of ∂y/∂x.
    Cost: one product; saves the sums, one number per cell.
    Exact when: always.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, derivative: Kept, y: tuple[Tensor], kept: list[int]) -> Tensor:
        save(ctx, [derivative])
        ctx.kept = kept
        return y[0]

    @staticmethod
    @coarse
    def backward(ctx: Any, gy: Tensor) -> Any:
        (derivative,) = load(ctx)
        return gy.reshape(ctx.kept) * derivative, None, None, None


class ChannelReduction(Function):
    """Carry a gradient back through a reduction of the channels of each pixel.

    Equation: Gx = G · D with D the mean over the patch of ∂y/∂x; for a sum D is 1, for a mean 1 over their number.
    Cost: one product; saves D, one number per cell and channel, but for sums and means.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, derivative: Kept | None, factor: float, kept: list[int], shape: list[int], y: Tensor
    ) -> Tensor:
        save(ctx, [derivative])
        ctx.factor, ctx.kept, ctx.shape = factor, kept, carrier.shape
        return make_carrier(shape, y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        (derivative,) = load(ctx)
        g = g.reshape(ctx.kept) * (ctx.factor if derivative is None else derivative)
        return g.expand(ctx.shape), None, None, None, None, None


def run_reduction(func: Callable[[Tensor], Tensor], x: PatchTensor, axes: set[int], kind: str) -> Any:
    """Return func(x), which reduces x over some axes: both spatial ones, or none of them.

    Args:
        func: The reduction.
        x: Its input.
        axes: The axes that it reduces.
        kind: "sum" and "mean" need no derivative.
    """
    spatial = set(x.spatial.axes)
    over_space = spatial <= axes
    if not over_space and spatial & axes:
        return NotImplemented
    count = math.prod(x.shape[axis] for axis in axes) if kind == "mean" else 1
    derivative = None
    if kind in ("sum", "mean"):
        with torch.no_grad():
            y = func(pixels(x))
    else:
        z = pixels(x).detach().requires_grad_()
        y, (derivative,) = differentiate(lambda: func(z), [z])
        y = y.detach()
    kept = [1 if axis in axes else n for axis, n in enumerate(x.carrier.shape)]
    if over_space:
        x.choices.log.note(x.choices.layer, f"the {kind} over space")
    if over_space and derivative is None:
        return Spread.apply(x.carrier, (y,), spatial_size(x), x.patch, x.spatial, kept, count)
    if over_space:
        assert derivative is not None
        sums = hold_map(pool_sum(derivative, x.patch, x.spatial), x.choices, x.spatial)
        return Reduction.apply(x.carrier, sums, (y,), kept)
    removed = 0 if y.dim() == x.dim() else 1
    rows, columns = (a - removed * sum(axis < a for axis in axes) for a in (x.spatial.rows, x.spatial.columns))
    layout = Layout(rows, columns, x.spatial.tokens, x.spatial.prefix)
    shape = layout.resize(y.shape, count_cells(spatial_size(x), x.patch))
    slopes = None if derivative is None else hold_map(pool_mean(derivative, x.patch, x.spatial), x.choices, x.spatial)
    carrier: Tensor = ChannelReduction.apply(x.carrier, slopes, 1 / count, kept, shape, y)  # type: ignore[assignment]
    return wrap(y, carrier, x.patch, x.choices, layout=layout)


DIM_PLACES = {
    torch.mean: 1, Tensor.mean: 1, torch.sum: 1, Tensor.sum: 1, torch.amax: 1, Tensor.amax: 1, torch.amin: 1, Tensor.amin: 1,
    torch.std: 1, Tensor.std: 1, torch.var: 1, Tensor.var: 1, torch.logsumexp: 1, Tensor.logsumexp: 1,
    torch.norm: 2, Tensor.norm: 2, torch.linalg.vector_norm: 2,
}  # fmt: skip
"""Reductions over given axes, and where among their arguments those are."""


def find_axes(x: Tensor, dim: Any) -> set[int] | None:
    """Return the axes that a `dim` argument names, all where it names none; `None` for what is no axes."""
    if dim is None or dim == () or dim == []:
        return set(range(x.dim()))
    dims = dim if isinstance(dim, (tuple, list)) else [dim]
    return {d % x.dim() for d in dims} if all(type(d) is int for d in dims) else None


@rule(*DIM_PLACES, any_layout=True)
def reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce over both spatial axes, or over others; over one of the two it is an exit."""
    if not args or not is_live(args[0]) or kwargs.get("out") is not None:
        return NotImplemented
    x, place = args[0], DIM_PLACES[func]
    axes = find_axes(x, args[place] if len(args) > place else kwargs.get("dim", kwargs.get("axis")))
    if axes is None:
        return NotImplemented
    return run_reduction(lambda z: func(z, *args[1:], **kwargs), x, axes, func.__name__)


@rule(*find_functions("max", "min", inplace=False), any_layout=True)
def extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the larger or smaller of two maps, or the largest or smallest value of one over all axes or over one."""
    if len(args) > 1 and isinstance(args[1], Tensor):
        return elementwise(func, args, kwargs)
    if not args or not is_live(args[0]) or set(kwargs) - {"dim", "keepdim"}:
        return NotImplemented
    x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is None:
        return run_reduction(func, x, set(range(x.dim())), func.__name__)
    with torch.no_grad():
        both = func(pixels(x), *args[1:], **kwargs)
    values = run_reduction(lambda z: func(z, *args[1:], **kwargs)[0], x, {dim % x.dim()}, func.__name__)
    return NotImplemented if values is NotImplemented else type(both)((values, both[1]))


@rule(*find_functions("gather", inplace=False), any_layout=True)
def gather(func: Any, input: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Any:
    """Take one channel of each pixel, that of its label: a reduction of the channels."""
    axis = dim % input.dim()
    if not is_live(input) or kwargs or axis in input.spatial.axes:
        return NotImplemented
    if list(index.shape) != [1 if i == axis else n for i, n in enumerate(input.shape)]:
        return NotImplemented
    return run_reduction(lambda z: func(z, dim, index), input, {axis}, func.__name__)


def fill_size(output_size: Any, x: Tensor) -> Pair:
    """Return the output size of an adaptive pooling of x, in which `None` is the size that the map has."""
    size = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    h, w = (n if wanted is None else wanted for wanted, n in zip(size, map_size(x), strict=True))
    return h, w
