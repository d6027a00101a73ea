"""Pooling at patch resolution: the global mean, where most regions end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter.patches import Pair, make_areas, map_size
from gradfilter.tensor import PatchTensor, coarse, is_live, pixels, rule


class GlobalMean(Function):
    """Leave a region through the mean over space.

    Equation: G = gy·|I|/(H·W).
    Cost: nothing to speak of; saves nothing.
    Exact when: always.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, y: tuple[Tensor], size: Pair, patch: Pair) -> Tensor:
        ctx.shape, ctx.size, ctx.patch = carrier.shape, size, patch
        return y[0]

    @staticmethod
    @coarse
    def backward(ctx: Any, gy: Tensor) -> Any:
        areas = make_areas(ctx.size, ctx.patch, gy) / (ctx.size[0] * ctx.size[1])
        return gy.reshape(*ctx.shape[:2], 1, 1) * areas, None, None, None


def global_mean(x: PatchTensor, y: Tensor) -> Any:
    """Give y, the means of x over space in any shape, its gradient."""
    return GlobalMean.apply(x.carrier, (y,), map_size(x), x.patch)


@rule(torch.mean, Tensor.mean)
def mean_over_space(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the mean over both spatial axes; other axes are an exit."""
    if len(args) > 2 or not args or not is_live(args[0]):
        return NotImplemented
    x = args[0]
    dim = args[1] if len(args) == 2 else kwargs.get("dim")
    if not isinstance(dim, (tuple, list)) or sorted(d % 4 for d in dim) != [2, 3] or x.dim() != 4:
        return NotImplemented
    with torch.no_grad():
        y = func(pixels(x), *args[1:], **kwargs)
    return global_mean(x, y)


@rule(F.adaptive_avg_pool2d)
def adaptive_avg_pool2d(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the mean over space; pooling to the size the map has changes nothing; other sizes are an exit."""
    x, output_size = args[0], args[1] if len(args) > 1 else kwargs["output_size"]
    if not is_live(x):
        return NotImplemented
    size = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    size = tuple(n if wanted is None else wanted for wanted, n in zip(size, x.shape[-2:], strict=True))
    if size != (1, 1):
        return x if size == map_size(x) else NotImplemented
    with torch.no_grad():
        y = func(pixels(x), output_size)
    return global_mean(x, y)
