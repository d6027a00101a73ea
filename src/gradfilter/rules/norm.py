"""Batch norm at patch resolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter.errors import InputError
from gradfilter.patches import Pair, make_areas, map_size
from gradfilter.rules.conv import ConvNorm, ConvOrigin
from gradfilter.tensor import coarse, finish, is_live, make_carrier, mean, pixels, rule


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Shape per-channel values [C] to act on `like` [N, C, H', W']."""
    return values.to(like.dtype)[:, None, None]


class NormEval(Function):
    """Carry a gradient back through a batch norm in eval mode.

    Equation: Gx = G·γ/σ, gβ = Σ G, gγ = Σ G·(x̄ − μ)/σ.
    Cost: one pass over G; saves x̄ where γ is trained (behind a trained conv `ConvNorm` saves nothing).
    Exact when: always, for the gradient that the tiling can carry.
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
        x_bar: Tensor | None,
        y: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_bar, gamma, mu, var)
        ctx.eps = eps
        return make_carrier(carrier.shape, y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        x_bar, gamma, mu, var = ctx.saved_tensors
        need_gx, need_gamma, need_beta = ctx.needs_input_grad[:3]
        inverse = (var + ctx.eps).rsqrt()
        scale = inverse if gamma is None else gamma * inverse
        gx = g * per_channel(scale, g) if need_gx else None
        g_gamma = g_beta = None
        if need_gamma:
            x_hat = (x_bar - per_channel(mu, x_bar)) * per_channel(inverse, x_bar)
            g_gamma = (g * x_hat).sum((0, 2, 3))
        if need_beta:
            g_beta = g.sum((0, 2, 3))
        return gx, g_gamma, g_beta, None, None, None, None, None


class NormTrain(Function):
    """Carry a gradient back through a batch norm with the statistics of the batch.

    Equation: with x̂̄ the patch means of the normalised input and M = N·H·W,
        Gx = (γ/σ)(G − |I|·ΣG/M − |I|·x̂̄·Σ(G·x̂̄)/M),   gγ = Σ G·x̂̄,   gβ = Σ G.
    Cost: two passes over G; saves x̂̄.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        x_hat: Tensor,
        inverse: Tensor,
        patch: Pair,
        y: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_hat, inverse, gamma)
        ctx.size, ctx.patch = map_size(y), patch
        return make_carrier(carrier.shape, y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        x_hat, inverse, gamma = ctx.saved_tensors
        need_gx, need_gamma, need_beta = ctx.needs_input_grad[:3]
        total, along = g.sum((0, 2, 3)), (g * x_hat).sum((0, 2, 3))
        gx = None
        if need_gx:
            share = make_areas(ctx.size, ctx.patch, g) / (g.shape[0] * ctx.size[0] * ctx.size[1])
            scale = inverse if gamma is None else gamma * inverse
            centred = g - share * (total[:, None, None] + x_hat * along[:, None, None])
            gx = centred * per_channel(scale, g)
        g_gamma = along if need_gamma else None
        g_beta = total if need_beta else None
        return gx, g_gamma, g_beta, None, None, None, None


@rule(F.batch_norm)
def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalise the value and hand the carrier on; one rule with the convolution before it where the two meet."""
    return run_batch_norm(*args, **kwargs)


def run_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Apply the rule with torch's argument names."""
    if not is_live(input):
        return NotImplemented
    x = input
    if training:
        if x.numel() == x.shape[1]:
            raise InputError(
                f"a batch norm in train mode behind layer '{x.choices.layer}' got {list(x.shape)}: one value per channel has "
                "no variance. Use a larger batch or image, or batch_norm='eval'."
            )
        with torch.no_grad():
            y, mu, inverse = torch.native_batch_norm(pixels(x), weight, bias, running_mean, running_var, True, momentum, eps)
            x_bar = mean(x)
            x_hat = (x_bar - per_channel(mu, x_bar)) * per_channel(inverse, x_bar)
        return finish(x, y, NormTrain.apply(x.carrier, weight, bias, x_hat, inverse, x.patch, y))  # type: ignore[arg-type]
    with torch.no_grad():
        y = F.batch_norm(pixels(x), running_mean, running_var, weight, bias, False, momentum, eps)
    statistics = (running_mean, running_var, eps)
    trains_gamma = weight is not None and weight.requires_grad
    origin = x.origin
    if isinstance(origin, ConvOrigin) and (origin.kept is not None or not trains_gamma):
        carrier = ConvNorm.apply(origin.carrier, origin.w, origin.b, weight, bias, *statistics, origin.kept, origin.geometry, y)
    else:
        carrier = NormEval.apply(x.carrier, weight, bias, *statistics, mean(x) if trains_gamma else None, y)
    return finish(x, y, carrier)  # type: ignore[arg-type]
