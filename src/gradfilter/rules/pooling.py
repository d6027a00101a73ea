"""Max pooling at patch resolution."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter import ops
from gradfilter.carriers import coarse, make_carrier
from gradfilter.emit import finish
from gradfilter.geometry.tiling import Pair, map_size
from gradfilter.geometry.windows import Windows, make_windows
from gradfilter.ops import make_areas
from gradfilter.rules.conv import as_pair
from gradfilter.rules.reduce import fill_size, run_reduction
from gradfilter.tensor import PatchTensor, is_live, pixels, rule


class MaxPool(Function):
    """Carry a gradient back through max pooling.

    Equation, Cost, Exact when: see `ops.max_route`. Saves the winners, a byte per cell and neighbouring cell.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, winners: Tensor, windows: Windows, y: Tensor) -> Tensor:
        ctx.windows = windows
        ctx.save_for_backward(winners)
        return make_carrier((*y.shape[:2], *windows.out_cells), y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        (winners,), windows = ctx.saved_tensors, ctx.windows
        g = g / make_areas(windows.size, windows.out_patch, g)
        return ops.max_route(g, winners, windows), None, None, None


def run_windows(x: PatchTensor, size: Pair, *window: Pair) -> Tensor:
    """Return the maxima of windows over x: of a kernel, stride, padding and dilation, or of about equal size.

    Args:
        x: The map.
        size: The size of the output.
        window: Kernel, stride, padding and dilation; none for windows of about equal size.
    """
    patch = x.choices.tiling.patch_for(size)
    windows = make_windows(map_size(x), size, x.patch, patch, *window)
    with torch.no_grad():
        y, mean, winners = ops.max_pool(pixels(x), windows)
    return finish(x, y, MaxPool.apply(x.carrier, winners, windows, y), patch=patch, mean=mean)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def find_size(size: Pair, *options: Any) -> Pair:
    """Return the size of a map of `size` after max pooling, or raise as torch does; torch's own answer takes a while."""
    return map_size(F.max_pool2d(torch.empty((1, 1, *size), device="meta"), *options))


@rule(F.max_pool2d, torch.max_pool2d)
def max_pool2d(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Take the maxima of windows: `MaxPool`."""
    if not is_live(input) or return_indices or input.dim() != 4:
        return NotImplemented
    options = (tuple(v) if isinstance(v, list) else v for v in (kernel_size, stride, padding, dilation, ceil_mode))
    size = find_size(map_size(input), *options)
    return run_windows(input, size, *map(as_pair, (kernel_size, stride or kernel_size, padding, dilation)))


@rule(F.adaptive_max_pool2d)
def adaptive_max_pool2d(func: Any, input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """Take the maxima of windows of about equal size: `MaxPool`; one window is the maximum over space, `Reduction`."""
    if not is_live(input) or return_indices or input.dim() != 4:
        return NotImplemented
    size = fill_size(output_size, input)
    if size == (1, 1):
        return run_reduction(lambda z: func(z, output_size), input, {2, 3}, "max")
    return run_windows(input, size)
