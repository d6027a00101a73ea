"""Separable linear maps at patch resolution: average pooling, interpolation, pixel shuffles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from gradfilter.carriers import AxisMap, coarse, make_carrier
from gradfilter.emit import finish
from gradfilter.geometry.axes import AxisMatrix, project_matrix, shuffle_axis, unshuffle_axis
from gradfilter.geometry.tiling import Matrix, Pair, map_size
from gradfilter.ops import apply_axes
from gradfilter.rules.conv import as_pair
from gradfilter.rules.reduce import fill_size, run_reduction
from gradfilter.tensor import PatchTensor, is_live, pixels, rule


def find_matrix(f: Callable[[Tensor], Tensor], size: int) -> Matrix:
    """Return the pixel matrix P [out_size, size] of a linear map along one axis: what it makes of each unit vector.

    Args:
        f: The map, called once with [1, size, 1, size]: a unit vector per channel, along the columns. Along rows of a map
            that is one pixel wide, torch 2.13 gives wrong antialiased interpolations.
        size: Pixels of its input.
    """
    # A tracer must not record this, nor shapes alone be computed: the matrix is a constant.
    with _disable_current_modes():
        return f(torch.from_numpy(np.eye(size)).reshape(1, size, 1, size))[0, :, 0].numpy().T


def map_axes(x: PatchTensor, y: Tensor, make_axis: Callable[[int, int, int], AxisMatrix]) -> Any:
    """Finish a rule whose map is y = P_h x P_wᵀ.

    Args:
        x: The input.
        y: The value of the output.
        make_axis: Called with an axis (0 or 1) and the two patches there, returns its coarse matrix.
    """
    patch = x.choices.tiling.patch_for(map_size(y))
    rows, columns = (make_axis(i, x.patch[i], patch[i]) for i in (0, 1))
    return finish(x, y, AxisMap.apply(x.carrier, rows, columns), patch=patch)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def avg_pool_axis(
    size: int, window: tuple[int, int, int], ceil_mode: bool, count_include_pad: bool, divisor: int | None, *patch: int
) -> AxisMatrix:
    """Return the coarse matrix of average pooling along one axis; `window` is (kernel, stride, padding)."""
    kernel, stride, padding = window

    def pool(units: Tensor) -> Tensor:
        return F.avg_pool2d(units, (1, kernel), (1, stride), (0, padding), ceil_mode, count_include_pad, divisor)

    return AxisMatrix(project_matrix(find_matrix(pool, size), *patch))


@rule(F.avg_pool2d)
def avg_pool2d(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Take means over windows.

    Equation: `AxisMap` with the coarse matrices of the pooling.
    Cost: as `AxisMap`; saves nothing.
    Exact when: always, for the gradient that the two tilings can carry.
    """
    if not is_live(input):
        return NotImplemented
    x, stride = input, stride or kernel_size
    with torch.no_grad():
        y = func(pixels(x), kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    windows = list(zip(as_pair(kernel_size), as_pair(stride), as_pair(padding), strict=True))
    # The divisor of both axes together goes to the rows; the columns are plain sums then.
    divisors = (divisor_override, 1 if divisor_override else None)

    def make_axis(i: int, *patch: int) -> AxisMatrix:
        return avg_pool_axis(x.shape[2 + i], windows[i], ceil_mode, count_include_pad, divisors[i], *patch)

    return map_axes(x, y, make_axis)


@lru_cache(maxsize=4096)
def adaptive_pool_axis(size: int, out_size: int, *patch: int) -> AxisMatrix:
    """Return the coarse matrix of adaptive average pooling along one axis."""
    matrix = find_matrix(lambda units: F.adaptive_avg_pool2d(units, (1, out_size)), size)
    return AxisMatrix(project_matrix(matrix, *patch))


@rule(F.adaptive_avg_pool2d)
def adaptive_avg_pool2d(func: Any, input: Tensor, output_size: Any) -> Any:
    """Take means over as many windows as asked for.

    Equation: `AxisMap` with the coarse matrices of the pooling; one window is the mean over space and leaves the region.
    Cost: as `AxisMap`; saves nothing.
    Exact when: always, for the gradient that the two tilings can carry.
    """
    if not is_live(input):
        return NotImplemented
    x = input
    size = fill_size(output_size, x)
    if size != (1, 1) and size == map_size(x):
        return finish(x, pixels(x).clone(), x.carrier)
    if size == (1, 1):
        return run_reduction(lambda z: func(z, output_size), x, {2, 3}, "mean")
    with torch.no_grad():
        y = func(pixels(x), output_size)
    return map_axes(x, y, lambda i, *patch: adaptive_pool_axis(x.shape[2 + i], size[i], *patch))


@lru_cache(maxsize=4096)
def interpolate_axis(
    size: int, out_size: int, scale: float | None, options: tuple[tuple[str, Any], ...], *patch: int
) -> AxisMatrix:
    """Return the coarse matrix of an interpolation along one axis.

    With a scale factor torch takes that and not the ratio of the sizes for where pixels lie.
    """
    wanted = {"size": (1, out_size)} if scale is None else {"scale_factor": (1.0, scale)}
    matrix = find_matrix(lambda units: F.interpolate(units, **wanted, **dict(options)), size)
    return AxisMatrix(project_matrix(matrix, *patch))


@dataclass(frozen=True)
class InterpolatedAxes:
    """Say how an interpolation acts on rows and columns.

    Attributes:
        size: The size `(h, w)` of its input.
        out_size: That of its output.
        scales: The scale factor of each axis, `None` where a size was asked for.
        options: All other arguments.
    """

    size: Pair
    out_size: Pair
    scales: tuple[float | None, float | None]
    options: tuple[tuple[str, Any], ...]

    def make_axis(self, i: int, in_patch: int, out_patch: int) -> AxisMatrix:
        """Return the coarse matrix of an axis, 0 or 1."""
        return interpolate_axis(self.size[i], self.out_size[i], self.scales[i], self.options, in_patch, out_patch)


class Interpolated(NamedTuple):
    """What an interpolation was made of, for a loss behind it to take the gradient there.

    The map itself is not held: only its place in the graph counts.
    """

    carrier: Tensor
    patch: Pair
    axes: InterpolatedAxes


@rule(F.interpolate)
def interpolate(func: Any, input: Tensor, size: Any = None, scale_factor: Any = None, **options: Any) -> Any:
    """Make a map larger or smaller, in any of torch's modes.

    Equation: `AxisMap` with the coarse matrices of the interpolation.
    Cost: as `AxisMap`; saves nothing.
    Exact when: always, for the gradient that the two tilings can carry.
    """
    # Torch's own dispatch gives all but the input as keywords.
    if not is_live(input):
        return NotImplemented
    x = input
    with torch.no_grad():
        y = func(pixels(x), size, scale_factor, **options)
    h, w = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor, scale_factor)
    scales = None if h is None else float(h), None if w is None else float(w)
    axes = InterpolatedAxes(map_size(x), map_size(y), scales, tuple(sorted(options.items())))
    y = map_axes(x, y, axes.make_axis)
    if isinstance(y, PatchTensor):
        y.origin = Interpolated(x.carrier, x.patch, axes)
    return y


class Shuffle(Function):
    """Carry a gradient back through a pixel shuffle, which lays r² channels out as the pixels of an r times larger map.

    Equation: Gx[c·r² + f·r + e] = S_fᵀ G[c] S_e, with S_f the projection of filling every r-th pixel from f on.
    Cost: two small matrix products per image; saves nothing.
    Exact when: always, for the gradient that the two tilings can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, rows: AxisMatrix, columns: AxisMatrix, factor: int) -> Tensor:
        ctx.rows, ctx.columns, ctx.shape, ctx.factor = rows, columns, carrier.shape, factor
        return make_carrier((len(carrier), carrier.shape[1] // factor**2, len(rows), len(columns)), carrier)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        slots = apply_axes(g, ctx.rows.T, ctx.columns.T)
        slots = slots.unflatten(3, (ctx.factor, -1)).unflatten(2, (ctx.factor, -1))
        return slots.transpose(3, 4).reshape(ctx.shape), None, None, None


class Unshuffle(Function):
    """Carry a gradient back through a pixel unshuffle, which lays the pixels of each r×r block out as channels.

    Equation: Gx[c] = Σ_fe U_fᵀ G[c·r² + f·r + e] U_e, with U_f the projection of reading every r-th pixel from f on.
    Cost: two small matrix products per image; saves nothing.
    Exact when: always, for the gradient that the two tilings can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, rows: AxisMatrix, columns: AxisMatrix, factor: int) -> Tensor:
        ctx.rows, ctx.columns, ctx.factor = rows, columns, factor
        cells = len(rows) // factor, len(columns) // factor
        return make_carrier((len(carrier), carrier.shape[1] * factor**2, *cells), carrier)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        slots = g.unflatten(1, (-1, ctx.factor, ctx.factor)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return apply_axes(slots, ctx.rows.T, ctx.columns.T), None, None, None


SHUFFLES = {"pixel_shuffle": (Shuffle, shuffle_axis), "pixel_unshuffle": (Unshuffle, unshuffle_axis)}


@rule(torch.pixel_shuffle)
def pixel_shuffle(func: Any, input: Tensor, upscale_factor: int) -> Any:
    """Turn channels into pixels: `Shuffle`."""
    return shuffle_pixels(func, input, upscale_factor)


@rule(torch.pixel_unshuffle)
def pixel_unshuffle(func: Any, input: Tensor, downscale_factor: int) -> Any:
    """Turn pixels into channels: `Unshuffle`."""
    return shuffle_pixels(func, input, downscale_factor)


def shuffle_pixels(func: Any, x: Tensor, factor: int) -> Any:
    """Return a pixel shuffle or unshuffle of x."""
    if not is_live(x):
        return NotImplemented
    with torch.no_grad():
        y = func(pixels(x), factor)
    if factor == 1:
        return finish(x, y.clone(), x.carrier)
    function, make_axis = SHUFFLES[func.__name__]
    patch = x.choices.tiling.patch_for(map_size(y))
    rows, columns = (make_axis(x.shape[2 + i], factor, x.patch[i], patch[i]) for i in (0, 1))
    return finish(x, y, function.apply(x.carrier, rows, columns, factor), patch=patch)  # type: ignore[arg-type]
