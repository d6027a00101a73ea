"""Reductions over space at patch resolution: where most regions end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from gradfilter.patches import Pair, make_areas, map_size, pool_sum
from gradfilter.rules.elementwise import unchanged
from gradfilter.tensor import PatchTensor, coarse, is_live, pixels, rule


class Spread(Function):
    """Leave a region through the sum or the mean over space.

    Equation: G = gy·|I|, for the mean gy·|I|/(H·W).
    Cost: nothing to speak of; saves nothing.
    Exact when: always.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, y: tuple[Tensor], size: Pair, patch: Pair, is_mean: bool) -> Tensor:
        ctx.shape, ctx.size, ctx.patch, ctx.is_mean = carrier.shape, size, patch, is_mean
        return y[0]

    @staticmethod
    @coarse
    def backward(ctx: Any, gy: Tensor) -> Any:
        areas = make_areas(ctx.size, ctx.patch, gy) / (ctx.size[0] * ctx.size[1] if ctx.is_mean else 1)
        return (gy.reshape(*ctx.shape[:2], 1, 1) * areas).expand(ctx.shape), None, None, None, None


def spread_over_space(x: PatchTensor, y: Tensor, *, is_mean: bool) -> Any:
    """Give y, the sums or means of x over space in any shape, its gradient."""
    return Spread.apply(x.carrier, (y,), map_size(x), x.patch, is_mean)


class Reduction(Function):
    """Leave a region through any function of each channel of each image.

    Equation: G = gy · Σ over the patch of ∂y/∂x.
    Cost: one product; saves the sums, one number per cell.
    Exact when: always.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, derivative: Tensor, y: tuple[Tensor]) -> Tensor:
        ctx.save_for_backward(derivative)
        return y[0]

    @staticmethod
    @coarse
    def backward(ctx: Any, gy: Tensor) -> Any:
        (derivative,) = ctx.saved_tensors
        return gy.reshape(*derivative.shape[:2], 1, 1) * derivative, None, None


def reduce_over_space(x: PatchTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a reduction of x; autograd itself gives the derivative, of which the patch sums are kept."""
    z = pixels(x).detach().requires_grad_()
    # What autograd saves here is gone a line later: checkpoints and offloaders that watch saved tensors need not see it.
    with torch.enable_grad(), saved_tensors_hooks(unchanged, unchanged):
        y = func(z, *args, **kwargs)
        (derivative,) = torch.autograd.grad(y, z, torch.ones_like(y))
    return Reduction.apply(x.carrier, pool_sum(derivative, x.patch), (y.detach(),))


DIM_PLACES = {
    torch.mean: 1, Tensor.mean: 1, torch.sum: 1, Tensor.sum: 1, torch.amax: 1, Tensor.amax: 1, torch.amin: 1, Tensor.amin: 1,
    torch.std: 1, Tensor.std: 1, torch.var: 1, Tensor.var: 1, torch.logsumexp: 1, Tensor.logsumexp: 1,
    torch.norm: 2, Tensor.norm: 2, torch.linalg.vector_norm: 2,
}  # fmt: skip
"""Reductions over given axes, and where among their arguments those are."""


@rule(*DIM_PLACES)
def over_space(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce over both spatial axes; other axes are an exit."""
    if not args or not is_live(args[0]) or kwargs.get("out") is not None:
        return NotImplemented
    x, place = args[0], DIM_PLACES[func]
    dim = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("axis"))
    if not isinstance(dim, (tuple, list)) or sorted(d % 4 for d in dim) != [2, 3]:
        return NotImplemented
    if func.__name__ not in ("sum", "mean"):
        return reduce_over_space(x, func, args[1:], kwargs)
    with torch.no_grad():
        y = func(pixels(x), *args[1:], **kwargs)
    return spread_over_space(x, y, is_mean=func.__name__ == "mean")


def fill_size(output_size: Any, x: Tensor) -> Pair:
    """Return the output size of an adaptive pooling of x, in which `None` is the size that the map has."""
    size = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    h, w = (n if wanted is None else wanted for wanted, n in zip(size, map_size(x), strict=True))
    return h, w


@rule(F.adaptive_max_pool2d)
def adaptive_max_pool2d(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the maximum over space; other sizes, and the indices, are an exit."""
    x, output_size = args[0], args[1] if len(args) > 1 else kwargs["output_size"]
    if not is_live(x) or fill_size(output_size, x) != (1, 1):
        return NotImplemented
    return reduce_over_space(x, func, (output_size,), {})
