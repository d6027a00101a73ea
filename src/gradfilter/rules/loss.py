"""Losses of every pixel at patch resolution: cross-entropy of maps of logits, and losses of single values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter import ops
from gradfilter.carriers import coarse
from gradfilter.errors import InputError
from gradfilter.keep import Kept, hold
from gradfilter.keep.base import load, save
from gradfilter.ops import apply_axes, pool_sum
from gradfilter.rules.channels import LogProbabilities
from gradfilter.rules.elementwise import elementwise
from gradfilter.rules.functions import differentiate
from gradfilter.rules.reduce import run_reduction
from gradfilter.rules.resample import Interpolated
from gradfilter.tensor import PatchTensor, is_live, pixels, rule

MOST_AT_ONCE = 2**22
"""How many values are differentiated at a time, or one image: the gradient of all pixels exists for those alone."""
REDUCTIONS = ("mean", "sum")


class PixelLoss(Function):
    """Leave a region through the sum or the mean of a loss of every pixel.

    Equation: G = gy·S/M, S the patch sums of ∂loss/∂x: for cross-entropy of (softmax − one-hot)·weight; M is 1 for a sum, for
    a mean what torch divides by. Of logits that are an interpolation y = P_h x P_wᵀ, S are those of P_hᵀ ∂loss/∂y P_w.
    Cost: loss and gradient at once, a few images at a time: labels take as much as the logits of those once more, other
    targets three times, as torch's own backward does; one product backward. Saves S, a number per cell and class; neither
    logits nor probabilities are kept.
    Exact when: always.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, sums: Kept, divisor: Tensor | None, y: tuple[Tensor]) -> Tensor:
        save(ctx, [sums], divisor)
        return y[0]

    @staticmethod
    @coarse
    def backward(ctx: Any, gy: Tensor) -> Any:
        sums, divisor = load(ctx)
        # Where all labels are to be ignored torch's mean is NaN, and its gradient zero.
        return sums * (gy if divisor is None else gy / divisor.where(divisor != 0, 1)), None, None, None


def find_way(x: PatchTensor, carrier: Tensor, origin: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the carrier that takes the gradient of a loss, and the function that sums a pixel gradient over its cells.

    Logits that were enlarged to the size of the labels hold no more than those before. A fixed patch gives them many times the
    cells, which would all be kept; where so, the loss takes the gradient to the cells in front of the interpolation. That is
    the exact sum there, too, for no gradient was averaged over patches in between.

    Args:
        x: The map that the loss is given.
        carrier: The carrier of the map whose pixel gradient is summed: that of x, most often.
        origin: How that map was made.
    """
    if not isinstance(origin, Interpolated) or origin.carrier.numel() > carrier.numel():
        return carrier, lambda g: pool_sum(g, x.patch, x.spatial)
    rows, columns = (origin.axes.make_axis(i, origin.patch[i], 1) for i in (0, 1))
    return origin.carrier, lambda g: apply_axes(g, rows.T, columns.T)


def run_loss(
    func: Any,
    x: PatchTensor,
    way: tuple[Tensor, Callable[[Tensor], Tensor]],
    compare: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    find_divisor: Callable[[], Tensor | int] | None,
) -> Any:
    """Return the sum of a loss of every pixel of x, or its mean.

    Args:
        func: Torch's function, for the record.
        x: Its input.
        way: What `find_way` returns.
        compare: From some images of x, and which ones they are, to their losses and the gradient of the sum of these.
        find_divisor: Returns what the sum is divided by, asked where torch has nothing against the targets.
    """
    carrier, sum_cells = way
    value = pixels(x).detach()
    images = max(1, MOST_AT_ONCE * len(value) // value.numel())
    total, sums, dtype = 0, [], x.dtype
    for start in range(0, len(value), images):
        chosen = slice(start, start + images)
        y, g = compare(value[chosen], chosen)
        wide, dtype = torch.promote_types(y.dtype, torch.float32), y.dtype  # half precision does not count so far
        with torch.no_grad():
            total = total + y.sum(dtype=wide)
            sums.append(sum_cells(g.to(wide)).to(carrier.dtype))
    assert isinstance(total, Tensor)
    divisor = None
    if find_divisor is not None:
        count = find_divisor()
        divisor = count.to(total) if isinstance(count, Tensor) else total.new_full((), count)
        total = total / divisor
    x.choices.log.note(x.choices.layer, func)
    # Held as it is: every gradient of the network comes from this one.
    return PixelLoss.apply(carrier, hold(torch.cat(sums)), divisor, (total.to(dtype),))


def compare_by_autograd(losses: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of every pixel of x and the gradient of their sum."""
    z = x.detach().requires_grad_()
    y, (g,) = differentiate(lambda: losses(z), [z])
    assert g is not None
    return y.detach(), g


def count_labels(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return how many pixels have a class, or the sum of the weights of these classes."""
    real = target != ignore_index
    return real.sum() if weight is None else (weight[target.where(real, 0)] * real).sum()


def has_gradient(*values: Any) -> bool:
    """Tell whether any of the values is a tensor that needs a gradient of its own."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


@rule(F.cross_entropy, F.nll_loss, any_layout=True)
def class_loss(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Compare the classes of every pixel with its label, or with probabilities: `PixelLoss`; unreduced, the region goes on."""
    x = input
    legacy = size_average is not None or reduce is not None
    if not is_live(x) or legacy or x.dim() < 3 or {0, 1} & set(x.spatial.axes) or has_gradient(target, weight):
        return NotImplemented
    is_label = not target.is_floating_point()
    wanted = (x.shape[0], *x.shape[2:]) if is_label else tuple(x.shape)
    if target.shape != wanted or not x.numel():
        return NotImplemented  # torch itself says what is wrong

    options |= {"weight": weight, "ignore_index": ignore_index, "reduction": "none"}
    if reduction == "none":
        return run_reduction(lambda z: func(z, target, **options), x, {1}, func.__name__)
    if reduction not in REDUCTIONS:
        return NotImplemented
    made_of = x if not isinstance(x.origin, LogProbabilities) or x.origin.axis != 1 else x.origin
    # Logarithms of probabilities are logits of the same probabilities: what is made of them has one gradient with its logits.
    loss = func if made_of is x else F.cross_entropy

    def compare(z: Tensor, chosen: slice) -> tuple[Tensor, Tensor]:
        if loss is F.cross_entropy and is_label and not options.get("label_smoothing") and z.element_size() > 2:
            try:
                return ops.cross_entropy_gradient(z, target[chosen], weight, ignore_index)
            except InputError as error:
                raise error.__cause__ or error from None  # the user called torch's function: in torch's words
        return compare_by_autograd(lambda z: loss(z, target[chosen], **options), z)

    def find_divisor() -> Tensor | int:
        return count_labels(target, weight, ignore_index) if is_label else x.numel() // x.shape[1]

    way = find_way(x, made_of.carrier, made_of.origin)
    return run_loss(func, x, way, compare, find_divisor if reduction == "mean" else None)


@rule(
    F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    any_layout=True,
)  # fmt: skip
def value_loss(
    func: Any,
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Compare every value with its target: `PixelLoss`; unreduced it is an elementwise function."""
    x = input
    legacy = size_average is not None or reduce is not None
    if not is_live(x) or legacy or 0 in x.spatial.axes or has_gradient(target, *options.values()):
        return NotImplemented
    weighted = "binary" not in func.__name__ and options.get("weight") is not None  # its mean is over weights
    if target.shape != x.shape or weighted or not x.numel():
        return NotImplemented
    if reduction == "none":
        return elementwise(func, (x, target), {**options, "reduction": reduction})
    if reduction not in REDUCTIONS:
        return NotImplemented
    fixed = {name: option for name, option in options.items() if not isinstance(option, Tensor)}
    tensors = {name: option.expand(x.shape) for name, option in options.items() if name not in fixed}

    def compare(z: Tensor, chosen: slice) -> tuple[Tensor, Tensor]:
        parts = {name: tensor[chosen] for name, tensor in tensors.items()}
        return compare_by_autograd(lambda z: func(z, target[chosen], reduction="none", **fixed, **parts), z)

    way = find_way(x, x.carrier, x.origin)
    return run_loss(func, x, way, compare, x.numel if reduction == "mean" else None)
