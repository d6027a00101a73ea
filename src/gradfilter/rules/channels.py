"""Functions of the channels of one pixel: layer norm, RMS norm, softmax.

Their Jacobian at a pixel is a matrix between channels that changes from pixel to pixel. Its exact mean over a patch needs the
second moments of all pairs of channels; here the product of the means stands for the mean of the products, which is exact at
patch 1 and where the normalised values are constant in each patch. `docs/rules.md` states how close that is on real maps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter.carriers import coarse, make_carrier
from gradfilter.emit import finish
from gradfilter.keep import Kept
from gradfilter.keep.base import load, save
from gradfilter.ops import pool_mean
from gradfilter.rules.functions import find_functions
from gradfilter.tensor import REGION_ENDS, PatchTensor, call, hold_map, is_live, pixels, rule


class ChannelNorm(Function):
    """Carry a gradient back through a norm over the channels of each pixel: layer norm, or RMS norm.

    Equation: at a pixel y = γ·x̂ + β with x̂ = (x − μ)·s, s = 1/σ, both of the pixel (RMS norm: μ = 0). With h = γ·G and
    patch means x̂̄ and s̄,
        Gx = s̄·(h − ⟨h⟩ − x̂̄·⟨h·x̂̄⟩),   ⟨·⟩ the mean over channels (no ⟨h⟩ for RMS norm),   gγ = Σ G·x̂̄,   gβ = Σ G.
    Cost: a few passes over G; saves x̂̄ and s̄.
    Exact when: s and x̂ are constant in each patch, so at patch 1; gγ and gβ always.
    """

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        x_hat: Kept,
        s: Tensor,
        centred: bool,
        y: Tensor,
    ) -> Tensor:
        save(ctx, [x_hat], s, gamma)
        ctx.centred = centred
        return make_carrier(carrier.shape, y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        x_hat, s, gamma = load(ctx)
        need_gx, need_gamma, need_beta = ctx.needs_input_grad[:3]
        gx = g_gamma = g_beta = None
        if need_gx:
            h = g if gamma is None else g * gamma.to(g.dtype)
            gx = h - x_hat * (h * x_hat).mean(-1, keepdim=True)
            gx = s * (gx - h.mean(-1, keepdim=True) if ctx.centred else gx)
        if need_gamma:
            g_gamma = (g * x_hat).reshape(-1, g.shape[-1]).sum(0)
        if need_beta:
            g_beta = g.reshape(-1, g.shape[-1]).sum(0)
        return gx, g_gamma, g_beta, None, None, None, None


def run_channel_norm(norm: Callable[[Tensor], Tensor], x: Any, normalized_shape: Any, affine: Any, eps: float | None) -> Any:
    """Return the norm of x over its last axis; over more axes than the channels it is an exit.

    Args:
        norm: The norm itself, which decides about precision.
        x: Its input.
        normalized_shape: The axes that it normalises.
        affine: γ and β for layer norm; γ alone for RMS norm, which takes no mean off.
        eps: What is added to the mean square; `None` for torch's choice, that of single precision at least.
    """
    if not is_live(x) or len(tuple(normalized_shape)) != 1 or x.dim() - 1 in x.spatial.axes:
        return NotImplemented
    with torch.no_grad():
        y = norm(pixels(x))
        value = pixels(x).to(torch.promote_types(y.dtype, torch.float32))
        centred = len(affine) == 2
        value = value - value.mean(-1, keepdim=True) if centred else value
        s = (value.square().mean(-1, keepdim=True) + (torch.finfo(value.dtype).eps if eps is None else eps)).rsqrt()
        x_hat, s_bar = (pool_mean(t, x.patch, x.spatial).to(y.dtype) for t in (value * s, s))
        held = hold_map(x_hat, x.choices, x.spatial)
    gamma, beta = (*affine, None)[:2]
    return finish(x, y, ChannelNorm.apply(x.carrier, gamma, beta, held, s_bar, centred, y))  # type: ignore[arg-type]


@rule(F.layer_norm, torch.layer_norm, any_layout=True)
def layer_norm(
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Normalise the channels of each pixel, the channels being the last axis: `ChannelNorm`."""
    return run_channel_norm(
        lambda x: func(x, normalized_shape, weight, bias, eps), input, normalized_shape, (weight, bias), eps
    )


@rule(F.rms_norm, torch.rms_norm, any_layout=True)
def rms_norm(func: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """Divide the channels of each pixel by their root mean square: `ChannelNorm`."""
    return run_channel_norm(lambda x: func(x, normalized_shape, weight, eps), input, normalized_shape, (weight,), eps)


@rule(F.normalize, any_layout=True)
def normalize(func: Any, input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Divide by a norm over some axes.

    Equation: x / max(‖x‖, ε) by the rules of the norm, of `clamp_min` and of the quotient.
    Cost: that of the three.
    Exact when: the norm is constant in each patch: always where it is over space, at patch 1 where it is over channels.
    """
    if not is_live(input) or out is not None:
        return NotImplemented
    norm = call(torch.linalg.vector_norm, input, p, dim, True)
    return call(torch.div, input, call(torch.clamp_min, norm, eps))


class Softmax(Function):
    """Carry a gradient back through a softmax over the channels of each pixel.

    Equation: the mean of diag(p) − p pᵀ over a patch has the diagonal v = mean of p·(1 − p), which is kept as it is; for its
    other entries the product of means stands, scaled alike: with d² = v/(p̄·(1 − p̄)) and a = d·p̄,
        Gx = d·a·G − a·Σ_c a_c·G_c.
    Cost: a few passes over G; saves a and d·a, p̄ alone at patch 1.
    Exact when: p is constant in each patch, so at patch 1.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, a: Tensor, da: Tensor, axis: int, y: Tensor) -> Tensor:
        ctx.save_for_backward(a, da)
        ctx.axis = axis
        return make_carrier(carrier.shape, y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        a, da = ctx.saved_tensors
        return da * g - a * (a * g).sum(ctx.axis, keepdim=True), None, None, None, None


class LogSoftmax(Function):
    """Carry a gradient back through the logarithm of a softmax over the channels of each pixel.

    Equation: with p̄ the patch means of the softmax, Gx = G − p̄·Σ_c G_c.
    Cost: a few passes over G; saves p̄.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, p_bar: Tensor, axis: int, y: Tensor) -> Tensor:
        ctx.save_for_backward(p_bar)
        ctx.axis = axis
        return make_carrier(carrier.shape, y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        (p_bar,) = ctx.saved_tensors
        return g - p_bar * g.sum(ctx.axis, keepdim=True), None, None, None


class LogProbabilities(NamedTuple):
    """What the logarithm of a softmax was made of, for a loss behind it to take the gradient there."""

    carrier: Tensor
    axis: int
    origin: Any


@rule(*find_functions("softmax", "log_softmax", inplace=False), any_layout=True)
def softmax(func: Any, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Run a softmax over another axis than rows and columns; over those it is attention, at which the region ends."""
    if not is_live(input) or not isinstance(dim, int):
        return NotImplemented
    x = input
    if dim % x.dim() in x.spatial.axes:
        return REGION_ENDS
    log = func.__name__ == "log_softmax"
    with torch.no_grad():
        y = func(pixels(x), dim, *args, **kwargs)
        a = da = pool_mean(y.exp() if log else y, x.patch, x.spatial)
        if not log and x.patch != (1, 1):
            variance = pool_mean(y * (1 - y), x.patch, x.spatial)
            d = (variance / (a * (1 - a)).clamp_min(torch.finfo(a.dtype).tiny)).clamp(0, 1).sqrt()
            a, da = a * d, a * d.square()
    carrier = LogSoftmax.apply(x.carrier, a, dim, y) if log else Softmax.apply(x.carrier, a, da, dim, y)
    y = finish(x, y, carrier)  # type: ignore[arg-type]
    if log and isinstance(y, PatchTensor):
        y.origin = LogProbabilities(x.carrier, dim % x.dim(), x.origin)
    return y
