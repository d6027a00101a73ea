"""Batch, group and instance norm at patch resolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter import ops
from gradfilter.carriers import Carry, Out, carry, coarse, make_carrier
from gradfilter.deferred import can_defer, make_recipe
from gradfilter.emit import defer, emit, finish, wrap
from gradfilter.errors import InputError
from gradfilter.geometry.tiling import Pair, is_map, map_size
from gradfilter.keep import Kept
from gradfilter.keep.base import load, save
from gradfilter.ops import normalise
from gradfilter.rules.conv import ConvNorm, ConvOrigin
from gradfilter.tensor import EXPECTED_EXITS, PatchTensor, hold_map, is_live, mean, pixels, rule

# Divides by a window of neighbouring channels: a coarse form would need the moments of all channels with all others.
EXPECTED_EXITS.add(F.local_response_norm)


class NormEval(Carry):
    """Carry a gradient back through a batch norm in eval mode.

    Equation, Cost, Exact when: see `ops.norm_eval_gradients`. Saves x̄ where γ is trained; behind a trained convolution
    `ConvNorm` saves nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        mu: Tensor,
        var: Tensor,
        eps: float,
        x_bar: Kept | None,
        out: Out,
    ) -> tuple[Tensor, Tensor]:
        save(ctx, [x_bar], gamma, mu, var)
        ctx.eps = eps
        return carry(ctx, carrier.shape, out)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        x_bar, gamma, mu, var = load(ctx)
        need_gx, _, need_beta = ctx.needs_input_grad[:3]
        found = ops.norm_eval_gradients(g, x_bar, ops.FixedNorm(gamma, mu, var, ctx.eps), need_gx, need_beta)
        return *found, *[None] * 5


class NormTrain(Function):
    """Carry a gradient back through a norm with the statistics of its input: batch, group or instance norm.

    Equation, Cost, Exact when: see `ops.norm_train_gradients`. Saves x̂̄.
    """

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        x_hat: Kept,
        inverse: Tensor,
        patch: Pair,
        y: Tensor,
    ) -> Tensor:
        """Save for backward; `inverse` is 1/σ, [C] for a batch and [N, groups] for groups."""
        save(ctx, [x_hat], inverse, gamma)
        ctx.size, ctx.patch = map_size(y), patch
        return make_carrier(carrier.shape, y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        x_hat, inverse, gamma = load(ctx)
        found = ops.norm_train_gradients(g, x_hat, inverse, gamma, ctx.size, ctx.patch, *ctx.needs_input_grad[:3])
        return *found, *[None] * 4


@rule(F.batch_norm, any_layout=True)
def batch_norm(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise the value and hand the carrier on; one rule with the convolution before it where the two meet."""
    if not is_live(input) or (running_mean is None) != (running_var is None):  # torch says what is wrong
        return NotImplemented
    if not is_map(input, input.spatial):
        return normalise_features(func, input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = input
    if training:
        if x.numel() == x.shape[1]:
            raise InputError(
                f"a batch norm in train mode behind layer '{x.choices.layer}' got {list(x.shape)}: one value per channel has "
                "no variance. Use a larger batch or image, or batch_norm='eval'."
            )
        with torch.no_grad():
            y, mu, inverse = normalise_batch(pixels(x), weight, bias, running_mean, running_var, momentum, eps)
        return finish_norm(x, weight, bias, mu, inverse, y)
    recipe = None
    if running_mean is not None and running_var is not None and can_defer(x):
        recipe = make_recipe(x).normalise(running_mean, running_var, weight, bias, eps)
    trains_gamma = weight is not None and weight.requires_grad
    origin = x.origin
    if isinstance(origin, ConvOrigin) and (origin.kept is not None or not trains_gamma):
        function = ConvNorm
        args = (*origin[:3], weight, bias, running_mean, running_var, eps, origin.kept, origin.geometry)
    else:
        function = NormEval
        x_bar = hold_map(mean(x), x.choices) if trains_gamma else None
        args = (x.carrier, weight, bias, running_mean, running_var, eps, x_bar)
    if recipe is not None:
        return defer(recipe, function, x.patch, x.choices, *args)
    with torch.no_grad():
        y = F.batch_norm(pixels(x), running_mean, running_var, weight, bias, False, momentum, eps)
    return emit(function, Out(y, x.patch, x.choices, PatchTensor, x.spatial), *args)


def normalise_batch(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mu: Tensor | None,
    var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the batch norm of x with its own statistics, their mean and 1/σ; running ones, where there are, move.

    `torch.native_batch_norm` does the same, but its schema does not say that it changes running statistics: a graph made of
    operators that return all that they change, as torch.export makes it, would lose that.
    """
    if mu is None or var is None:
        return torch.ops.aten._native_batch_norm_legit.no_stats(x, gamma, beta, True, momentum, eps)
    return torch.ops.aten._native_batch_norm_legit.default(x, gamma, beta, mu, var, True, momentum, eps)


def normalise_features(func: Any, x: PatchTensor, *args: Any) -> Any:
    """Normalise features [N, C] or [N, C, L] by the rule for maps: at patch 1 it is all one which axes are rows and columns."""
    if x.patch != (1, 1) or x.dim() > 3 or x.spatial.prefix:
        return NotImplemented
    shape = (*x.shape[:2], -1, 1)
    y = batch_norm(func, wrap(pixels(x).reshape(shape), x.carrier.reshape(shape), (1, 1), x.choices), *args)
    if not is_live(y):
        return y.reshape(x.shape) if isinstance(y, Tensor) else y
    return wrap(pixels(y).reshape(x.shape), y.carrier.reshape(x.shape), (1, 1), x.choices, layout=x.spatial)


def finish_norm(x: PatchTensor, weight: Tensor | None, bias: Tensor | None, mu: Tensor, inverse: Tensor, y: Tensor) -> Any:
    """Return the result of a norm of x with the statistics of its input, [C] of a batch or [N, groups]."""
    if y.element_size() < 4:
        inverse = inverse.float()  # the precision of these differs between devices
    with torch.no_grad():
        spread = [s if s.dim() == 1 else s.repeat_interleave(x.shape[1] // s.shape[1], 1) for s in (mu, inverse)]
        x_hat = hold_map(normalise(mean(x), spread[0], spread[1]), x.choices)
    return finish(x, y, NormTrain.apply(x.carrier, weight, bias, x_hat, inverse, x.patch, y))  # type: ignore[arg-type]


@rule(F.group_norm, torch.group_norm)
def group_norm(
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Normalise groups of channels of each image and hand the carrier on."""
    # torch refuses a group of one value, and a number of groups that does not divide the channels: leave it to say so.
    if not is_live(input) or input.numel() == num_groups or input.shape[1] % num_groups:
        return NotImplemented
    x = input
    n, channels, h, w = x.shape
    with torch.no_grad():
        value = to_dense(pixels(x))
        y, mu, inverse = torch.native_group_norm(value, weight, bias, n, channels, h * w, num_groups, eps)
    return finish_norm(x, weight, bias, mu, inverse, y)


def to_dense(x: Tensor) -> Tensor:
    """Return x [N, C, H, W] contiguous, channels last or not, as it is laid out."""
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


@rule(F.instance_norm)
def instance_norm(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise each channel of each image, or with running statistics as a batch norm does."""
    if not is_live(input) or (running_mean is None) != (running_var is None):
        return NotImplemented
    if not use_input_stats:
        return batch_norm(func, input, running_mean, running_var, weight, bias, False, momentum, eps)
    x = input
    n, channels, h, w = x.shape
    if h * w == 1:  # torch refuses a single value: leave it to say so
        return NotImplemented
    with torch.no_grad():
        # As torch does it: a batch norm of one image, with a channel for each channel of each image.
        gamma, beta, mus, variances = (None if p is None else p.repeat(n) for p in (weight, bias, running_mean, running_var))
        value = pixels(x).reshape(1, n * channels, h, w)
        y, mu, inverse = normalise_batch(value, gamma, beta, mus, variances, momentum, eps)
    result = finish_norm(x, weight, bias, mu.reshape(n, channels), inverse.reshape(n, channels), y.reshape(x.shape))
    # After the norm has saved its tensors, as in torch: where a checkpoint runs it again, it goes no further than that.
    with torch.no_grad():
        for statistic, moved in ((running_mean, mus), (running_var, variances)):
            if statistic is not None and moved is not None:
                statistic.copy_(moved.reshape(n, channels).mean(0))
    return result
