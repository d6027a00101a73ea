"""Cross-entropy of maps of logits with its gradient at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.errors import InputError
from gradfilter.ops.check import Check
from gradfilter.ops.operator import operator


def check_cross_entropy(check: Check, x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> None:
    """Check the arguments of `cross_entropy_gradient`."""
    check.tensor("x", x)
    if x.dim() < 2 or x.shape[1] == 0:
        check.refuse("x", f"of shape {list(x.shape)}", "Give logits [N, C, ...].")
    if not isinstance(target, Tensor) or target.dtype is not torch.int64:
        given = f"of dtype {target.dtype}" if isinstance(target, Tensor) else f"of type {type(target).__name__}"
        check.refuse("target", given, "Give the labels as int64.")
    check.dense("target", target)
    check.device("target", target, x)
    if target.shape != (len(x), *x.shape[2:]):
        check.refuse("target", f"of shape {list(target.shape)}", f"Give one label per pixel, {[len(x), *x.shape[2:]]}.")
    check.shape("weight", weight, (x.shape[1],), x)
    check.whole("ignore_index", ignore_index)


@operator(check=check_cross_entropy)
@torch.no_grad()
def cross_entropy_gradient(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of logits with labels, summed over all pixels, and its gradient.

    Equation: loss = −Σ_i weight[t_i]·log softmax(x_i)[t_i], gradient = (softmax(x_i) − one-hot(t_i))·weight[t_i]; both 0 where
    the label t_i is ignored.
    Cost: four passes over the logits, in the memory of their logarithms; autograd takes three times that.
    Exact when: always.

    Args:
        x: The logits [N, C, ...].
        target: A label for each pixel [N, ...].
        weight: The weight of each class [C], or `None` for 1.
        ignore_index: The label of pixels that do not count.
    """
    g = F.log_softmax(x, 1)
    try:
        y = F.nll_loss(g, target, weight, ignore_index=ignore_index, reduction="sum")
    except IndexError as error:
        wanted = f"Give labels from 0 to {x.shape[1] - 1}, or {ignore_index}, which is ignored."
        raise InputError(f"gradfilter::cross_entropy_gradient got target with a label out of range. {wanted}") from error
    real = target != ignore_index
    label = target.where(real, 0).unsqueeze(1)
    scale = real.unsqueeze(1).to(g.dtype) if weight is None else weight[label] * real.unsqueeze(1)
    return y, g.exp_().mul_(scale).scatter_add_(1, label, -scale)
