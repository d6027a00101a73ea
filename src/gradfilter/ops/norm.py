"""The gradients of batch, group and instance norms at patch resolution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradfilter.geometry.tiling import Pair, count_cells
from gradfilter.ops.check import Check
from gradfilter.ops.constants import make_areas
from gradfilter.ops.native import affine
from gradfilter.ops.native.affine import FixedNorm, ScaledGradient
from gradfilter.ops.native.library import is_watched
from gradfilter.ops.operator import operator, run_kernel


class NormGradients(NamedTuple):
    """The gradients of a norm's input, factors γ and terms β, as far as they are requested."""

    gx: Tensor | None
    g_gamma: Tensor | None
    g_beta: Tensor | None


def to_maps(values: Tensor, like: Tensor) -> Tensor:
    """Shape values per channel [C], or per image and channel [N, C], to act on `like` [N, C, H', W']."""
    return values.to(like.dtype)[..., None, None]


def normalise(x_bar: Tensor, mu: Tensor, inverse: Tensor) -> Tensor:
    """Return x̂̄ of the patch means x̄ [N, C, H', W'] and statistics [C] or [N, C]."""
    return (x_bar - to_maps(mu, x_bar)) * to_maps(inverse, x_bar)


def check_norm(check: Check, g: Tensor, norm: FixedNorm, channels: int) -> None:
    """Check a norm's parameters and statistics."""
    check.instance("norm", norm, FixedNorm)
    check.number("norm.eps", norm.eps)
    if norm.mu is None or norm.var is None:
        check.refuse("norm", "without mu or var", "Give a mean and a variance for each channel.")
    for field in ("gamma", "mu", "var"):
        check.row(f"norm.{field}", getattr(norm, field), channels, g)


def check_eval(check: Check, g: Tensor, x_bar: Tensor | None, norm: FixedNorm, need_gx: bool, need_beta: bool) -> None:
    """Check the arguments of `norm_eval_gradients`."""
    channels = check.map("g", g)[1]
    check.shape("x_bar", x_bar, g.shape, g)
    check_norm(check, g, norm, channels)


@operator(check=check_eval)
def norm_eval_gradients(g: Tensor, x_bar: Tensor | None, norm: FixedNorm, need_gx: bool, need_beta: bool) -> NormGradients:
    """Return the gradients of a batch norm in eval mode.

    Equation: Gx = G·γ/σ, gγ = Σ G·(x̄ − μ)/σ, gβ = Σ G over all but the channels.
    Cost: one pass over G, and two over x̄ where γ is trained.
    Exact when: always, for a gradient that is constant in each patch.

    Args:
        g: The patch sums of the gradient of the result [N, C, H', W'].
        x_bar: The patch means of the input; `None` where gγ is not requested.
        norm: The norm.
        need_gx: Whether Gx is requested.
        need_beta: Whether gβ is.
    """
    inverse = (norm.var + norm.eps).rsqrt()
    scale = inverse if norm.gamma is None else norm.gamma * inverse
    gx = g * to_maps(scale, g) if need_gx else None
    g_gamma = None if x_bar is None else (g * normalise(x_bar, norm.mu, inverse)).sum((0, 2, 3))
    return NormGradients(gx, g_gamma, g.sum((0, 2, 3)) if need_beta else None)


def share_sums(sums: Tensor, shared: int, is_batch: bool) -> Tensor:
    """Add up sums [N, C] over the batch, or over groups of `shared` channels, and give each channel the result."""
    if is_batch:
        return sums.sum(0)
    return sums.unflatten(1, (-1, shared)).sum(2).repeat_interleave(shared, 1)


def check_train(
    check: Check,
    g: Tensor,
    x_hat: Tensor,
    inverse: Tensor,
    gamma: Tensor | None,
    size: Pair,
    patch: Pair,
    need_gx: bool,
    need_gamma: bool,
    need_beta: bool,
) -> None:
    """Check the arguments of `norm_train_gradients`."""
    n, channels, h, w = check.map("g", g)
    check.map("x_hat", x_hat, g)
    if x_hat.shape != g.shape:
        check.refuse("x_hat", f"of shape {list(x_hat.shape)}", f"Give one of shape {list(g.shape)}.")
    check.tensor("inverse", inverse)
    check.device("inverse", inverse, g)
    batch, groups = inverse.shape == (channels,), inverse.dim() == 2 and len(inverse) == n
    if not batch and (not groups or inverse.shape[1] == 0 or channels % inverse.shape[1]):
        check.refuse("inverse", f"of shape {list(inverse.shape)}", f"Give [{channels}] for a batch, or [{n}, groups].")
    check.row("gamma", gamma, channels, g)
    check.pair("patch", patch)
    check.pair("size", size)
    if count_cells(size, patch) != (h, w):
        check.refuse("g", f"of shape {list(g.shape)}", f"A map of {size} has {count_cells(size, patch)} patches of {patch}.")


@operator(check=check_train)
def norm_train_gradients(
    g: Tensor,
    x_hat: Tensor,
    inverse: Tensor,
    gamma: Tensor | None,
    size: Pair,
    patch: Pair,
    need_gx: bool,
    need_gamma: bool,
    need_beta: bool,
) -> NormGradients:
    """Return the gradients of a norm with the statistics of its input: batch, group or instance norm.

    Equation: with x̂̄ the patch means of the normalised input, h = γ·G, and sums over what shares a statistic, M pixels
    (a channel of the batch; a group of channels of an image),
        Gx = (1/σ)(h − |I|·Σh/M − |I|·x̂̄·Σ(h·x̂̄)/M),   gγ = Σ G·x̂̄,   gβ = Σ G.
    Cost: four passes over G.
    Exact when: always, for a gradient that is constant in each patch.

    Args:
        g: The patch sums of the gradient of the result [N, C, H', W'].
        x_hat: x̂̄ [N, C, H', W'].
        inverse: 1/σ, [C] for a batch and [N, groups] for groups.
        gamma: The factors [C], or `None` for 1.
        size: The size `(h, w)` of the map.
        patch: The patch `(h, w)`.
        need_gx: Whether Gx is requested.
        need_gamma: Whether gγ is.
        need_beta: Whether gβ is.
    """
    total, along = (part.sum((2, 3), dtype=inverse.dtype) for part in (g, g * x_hat))
    gx = None
    if need_gx:
        n, channels = total.shape
        is_batch = inverse.dim() == 1
        shared = n if is_batch else channels // inverse.shape[1]
        share = make_areas(size, patch, g) / (max(shared, 1) * size[0] * size[1])
        inverse = inverse if is_batch else inverse.repeat_interleave(shared, 1)
        scale = inverse if gamma is None else gamma * inverse
        offset, slope = (share_sums(sums * scale, shared, is_batch) for sums in (total, along))
        gx = g * to_maps(scale, g) - share * (to_maps(offset, g) + x_hat * to_maps(slope, g))
    return NormGradients(gx, along.sum(0) if need_gamma else None, total.sum(0) if need_beta else None)


def scale_norm_gradient(g: Tensor, norm: FixedNorm, scales: bool, w: Tensor | None = None) -> ScaledGradient:
    """Return the first half of the backward of a batch norm in eval mode behind a convolution: what of it needs G alone.

    Equation: scale = γ/σ, total = Σ G over all but the channels, and either scaled = G·γ/σ or folded = w·γ/σ.
    Cost: one pass over G, and one over a kernel that is folded.

    Args:
        g: The gradient of the norm's result [N, C, H', W'].
        norm: The norm.
        scales: Whether `scaled`, the gradient of the convolution's result, is requested. It is `None` all the same where a
            factor γ is 0: the gradient of γ is a quotient by γ then. Telling that reads values, so it is done on a CPU alone.
        w: The kernel; where it is given and the gradient is not scaled, the result has it `folded`, in the gradient's dtype.
    """
    found = run_kernel(affine.scale_norm_gradient, (g, norm, scales, w))
    found = scale_in_torch(g, norm, scales) if found is None else found
    return found if w is None else fold_kernel(found, w, g)


def fold_kernel(found: ScaledGradient, w: Tensor, g: Tensor) -> ScaledGradient:
    """Return a result that has the kernel w·γ/σ, in the dtype of g, where it does not have the scaled gradient."""
    if found.scaled is not None or found.folded is not None:
        return found
    return found._replace(folded=(w * found.scale.to(w.dtype)[:, None, None, None]).to(g.dtype))


def has_factors(gamma: Tensor | None) -> bool:
    """Tell whether no factor of a batch norm is 0."""
    return gamma is None or bool(gamma.all())


def scale_in_torch(g: Tensor, norm: FixedNorm, scales: bool) -> ScaledGradient:
    """Return what `scale_norm_gradient` does, on any device and in any dtype."""
    scale = (norm.var + norm.eps).rsqrt()
    scale = scale if norm.gamma is None else norm.gamma * scale
    total = g.sum((0, 2, 3)).to(scale.dtype)
    scales = scales and g.dtype == scale.dtype and (g.is_meta or (g.is_cpu and not is_watched() and has_factors(norm.gamma)))
    return ScaledGradient(scale, total, g * scale[:, None, None] if scales else None)


KernelGradients = tuple[Tensor, Tensor | None, Tensor | None]
"""The gradients of a kernel, of γ and of the bias."""


def finish_norm_gradients(
    gw: Tensor, w: Tensor, b: Tensor | None, norm: FixedNorm, back: ScaledGradient, need_gamma: bool, need_gb: bool
) -> KernelGradients:
    """Return the second half: the gradients of kernel, factors γ and bias.

    Equation: with gV = gw/scale the gradient of the folded kernel w·γ/σ, gγ = (⟨gV, w⟩ + (b − μ)·ΣG)/σ, gb = ΣG·γ/σ.
    Cost: two passes over the kernel.

    Args:
        gw: The gradient [Co, Ci/groups, kh, kw] of the kernel w for the scaled gradient where there is one, else that of the
            folded kernel for G; may be changed.
        w: The kernel.
        b: The convolution's bias.
        norm: The batch norm.
        back: What `scale_norm_gradient` has returned.
        need_gamma: Whether the gradient of γ is requested.
        need_gb: Whether that of the bias is.
    """
    args = gw.to(w.dtype), w, b, norm, back, need_gamma, need_gb
    found = run_kernel(affine.finish_norm_gradients, args)
    return finish_in_torch(*args) if found is None else found


def finish_in_torch(
    gw: Tensor, w: Tensor, b: Tensor | None, norm: FixedNorm, back: ScaledGradient, need_gamma: bool, need_gb: bool
) -> KernelGradients:
    """Return what `finish_norm_gradients` does, on any device and in any dtype."""
    g_gamma = None
    if need_gamma:
        along = (gw * w).sum((1, 2, 3))
        along = along if back.scaled is None else along / back.scale
        mean = -norm.mu if b is None else b - norm.mu
        g_gamma = torch.addcmul(along, mean, back.total) * (norm.var + norm.eps).rsqrt()
    if back.scaled is None:
        gw = gw * back.scale.to(w.dtype)[:, None, None, None]
    return gw, g_gamma, back.total * back.scale if need_gb else None
