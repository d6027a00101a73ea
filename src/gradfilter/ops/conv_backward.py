"""The gradients of a convolution's coarse twin, alone and with the norm behind it.

The coarse twin is the same convolution between maps that are constant in each patch (docs/operators.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfilter.geometry.convolution import AxisTiles, Geometry
from gradfilter.ops.check import Check
from gradfilter.ops.conv_products import (
    Gradients,
    dense_gradients,
    depthwise_gradients,
    finish_single,
    lifted_gradients,
    prefers_lift,
    prefers_products,
    prefers_unfolding,
    product_gradients,
    separable_gradients,
    single_tap_gradients,
)
from gradfilter.ops.native import affine, backward, pairs, single
from gradfilter.ops.native.affine import FixedNorm
from gradfilter.ops.native.library import is_plain
from gradfilter.ops.norm import check_norm, finish_norm_gradients, fold_kernel, scale_norm_gradient
from gradfilter.ops.operator import operator

FEW = 128 * 128
"""Up to so many pairs of channels, calls cost more than products."""
LEAST_CELLS = 4
"""With fewer cells than that, the library's products would take less time than packing the weight for them."""


def check_conv(
    check: Check, g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool | None = None
) -> None:
    """Check the arguments of `conv_gradients`."""
    check.map("g", g)
    check.weight("w", w, g)
    check_coarse(check, g, kept, w, geometry)


def check_coarse(check: Check, g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry) -> None:
    """Check that gradient, input and weight are those of a geometry."""
    check.instance("geometry", geometry, Geometry)
    outputs, inputs, *kernel = w.shape
    if outputs % geometry.groups:
        check.refuse("w", f"of shape {list(w.shape)}", f"Give one whose outputs {geometry.groups} groups divide.")
    if kernel != [geometry.rows.kernel, geometry.columns.kernel]:
        check.refuse(
            "w", f"of shape {list(w.shape)}", f"Its geometry has a {geometry.rows.kernel}×{geometry.columns.kernel} kernel."
        )
    check.shape("g", g, (len(g), outputs, *geometry.out_cells))
    cells = geometry.out_cells if geometry.is_single_tap else geometry.in_cells
    check.shape("kept", kept, (len(g), inputs * geometry.groups, *cells), g)


def run_library(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients | None:
    """Return the gradients by the library where it has a kernel that is the cheapest way, else `None`."""
    if kept is None and not need_gx:
        return None  # nothing is read here that would be wrong
    if geometry.is_single_tap:
        if geometry.groups > 1 or not prefers_single(g, kept, w) or not is_sized(g, kept, w, geometry):
            return None
        gx, gw = single.single_gradients(g, kept, w, need_gx=need_gx)
        return finish_single(gx, gw, w, geometry)
    if geometry.groups == w.shape[0] and w.shape[1] == 1:
        if is_plain(w, w.shape) and pairs.can_pair(g, kept, *geometry.pairs) and is_sized(g, kept, w, geometry):
            return pairs.pair_gradients(g, kept, w, geometry, need_gx=need_gx)
    elif geometry.groups == 1 and geometry.tiles is not None and prefers_tiles(g, kept, w, geometry.tiles):
        if is_sized(g, kept, w, geometry):
            return backward.tile_gradients(g, kept, w, *geometry.tiles, need_gx=need_gx)
    return None


def is_sized(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry) -> bool:
    """Tell whether gradient and kernel are those of the geometry: the library reads as much as that says."""
    kernel = geometry.rows.kernel, geometry.columns.kernel
    return g.shape[1:] == (w.shape[0], *geometry.out_cells) and w.shape[2:] == kernel and w.shape[1] > 0


def prefers_tiles(g: Tensor, kept: Tensor | None, w: Tensor, tiles: tuple[AxisTiles, AxisTiles]) -> bool:
    """Tell whether the library's Winograd kernel is the cheapest way.

    Measured on one core, 16 to 512 channels, batches of 1 to 128, maps of 1 to 28 cells per side, with and without a stride.
    Where tiles of two cells save products: 1.1 to 17 times faster than the others with AVX-512. Where there are no such tiles,
    on maps of one cell: 1.1 to 11 times where the weight is not channels last, which the others copy, and 1.08 and more with
    up to 128 channels; beyond that, 0.5 to 1.06 times with AVX2 and 0.85 to 3 times with AVX-512.
    """
    saves = any((axis.tiles["outs"] > 1).any() for axis in tiles)
    few = w.shape[0] * w.shape[1] <= FEW
    wins = saves or few or not w.is_contiguous(memory_format=torch.channels_last)
    return wins and backward.can_tile(g, kept, w, *tiles)


def prefers_single(g: Tensor, kept: Tensor | None, w: Tensor) -> bool:
    """Tell whether the library's two products are the cheaper ones.

    Measured against torch's on one core and on two, 16 to 1280 channels, 4 to 153,600 cells: 1.05 to 1.4 and 1.0 to 2.8 times
    faster with AVX-512, 0.98 to 1.5 and 0.98 to 1.7 times with AVX2 versus torch's AVX-512. On one cell, 0.4 to 0.8 times, and
    as slow for one output channel, of which torch's are products of a matrix and a vector.
    """
    return w.shape[0] > 1 and g.numel() >= LEAST_CELLS * g.shape[1] and single.can_single(g, kept, w)


def spell_conv(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients:
    """Return the gradients in matrix products alone, which any exporter knows."""
    if geometry.is_single_tap:
        return single_tap_gradients(g, kept, w, geometry, need_gx)
    return separable_gradients(g, kept, w, geometry, need_gx)


@operator(kernel=run_library, check=check_conv, spelled=spell_conv)
def conv_gradients(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients:
    """Return gx [N, Ci, H', W'] and gw [Co, Ci/groups, kh, kw] of the coarse twin.

    Equation: with T the tap matrices, the Galerkin projection of the convolution onto patch-constant maps
    (docs/how-it-works.md),
        gx = Σ_uv T_uᵀ (w[u,v]ᵀ G) T_v,        gw[u,v] = Σ G · (T_u x̄ T_vᵀ).
    Cost: about 1/r² of the exact backward, and half of that by Winograd's F(2×2, 3×3) where the library runs it. Elsewhere as
    one ordinary convolution with the lifted kernel where every patch is whole, else as matrix products with T.
    Exact when: gx always is the exact projection; gw when x is constant in each patch, and for 1×1 kernels.

    Args:
        g: Patch sums of the gradient of the output [N, Co, H', W'].
        kept: What was kept of the input; `None` where no weight gradient is requested.
        w: The weight.
        geometry: The convolution.
        need_gx: Whether the gradient of the input is requested.
    """
    if kept is None and not need_gx:  # a bias may train alone
        return None, None
    if geometry.is_single_tap:
        return single_tap_gradients(g, kept, w, geometry, need_gx)
    depthwise = geometry.groups == w.shape[0] and w.shape[1] == 1
    if geometry.lifts is not None and prefers_lift(g, w, geometry, geometry.lifts, depthwise):
        return lifted_gradients(g, kept, w, geometry, geometry.lifts, need_gx)
    if prefers_products(g, geometry) and not prefers_unfolding(g, geometry, need_gx):
        return product_gradients(g, kept, w, geometry, need_gx)
    if geometry.is_small and geometry.groups == 1:
        return dense_gradients(g, kept, w, geometry, need_gx)
    if geometry.is_small and depthwise:
        return depthwise_gradients(g, kept, w, geometry, need_gx)
    return separable_gradients(g, kept, w, geometry, need_gx)


Conv = Callable[[Tensor, Tensor], Gradients]
"""Returns gx and gw of a convolution from a gradient [N, Co, H', W'] and a weight."""


class ConvNormGradients(NamedTuple):
    """The gradients of a convolution and the batch norm behind it, as far as they are requested."""

    gx: Tensor | None
    gw: Tensor | None
    gb: Tensor | None
    g_gamma: Tensor | None
    g_beta: Tensor


def check_conv_norm(
    check: Check,
    g: Tensor,
    kept: Tensor | None,
    w: Tensor,
    b: Tensor | None,
    norm: FixedNorm,
    geometry: Geometry,
    need_gx: bool,
    need_gb: bool,
    need_gamma: bool,
) -> None:
    """Check the arguments of `conv_norm_gradients`."""
    check.map("g", g)
    check_folded(check, g, w, b, norm)
    check_coarse(check, g, kept, w, geometry)


def check_folded(check: Check, g: Tensor, w: Tensor, b: Tensor | None, norm: FixedNorm) -> None:
    """Check a weight and bias with the norm that is folded into them."""
    check.weight("w", w)
    check.device("w", w, g)
    check.row("b", b, len(w), g)
    check_norm(check, g, norm, len(w))


def spell_conv_norm(
    g: Tensor, w: Tensor, b: Tensor | None, norm: FixedNorm, need_gb: bool, need_gamma: bool, **where: Any
) -> ConvNormGradients:
    """Return the gradients without reading a value: the kernel is what is scaled."""
    return join_norm(lambda g, w: conv_gradients(g, w=w, **where), g, w, b, norm, need_gb, need_gamma, may_scale=False)


def run_folded(
    g: Tensor,
    kept: Tensor | None,
    w: Tensor,
    b: Tensor | None,
    norm: FixedNorm,
    geometry: Geometry,
    need_gx: bool,
    need_gb: bool,
    need_gamma: bool,
) -> ConvNormGradients | None:
    """Return the gradients where the library reads all that the norm adds to those of the convolution, else `None`."""
    plain = isinstance(norm, FixedNorm) and isinstance(geometry, Geometry) and kept is not None and g.dtype is w.dtype
    if not plain or g.dim() != 4 or w.dim() != 4 or not is_sized(g, kept, w, geometry):
        return None
    g = make_dense(g)
    back = affine.scale_norm_gradient(g, norm, g.numel() < w.numel(), w)
    if back is None:
        return None
    back = fold_kernel(back, w, g)
    scaled, kernel = (g, back.folded) if back.scaled is None else (back.scaled, w)
    found = run_library(scaled, kept, kernel, geometry, need_gx)  # type: ignore[arg-type]
    gx, gw = conv_gradients(scaled, kept, kernel, geometry, need_gx) if found is None else found  # type: ignore[arg-type]
    end = None if gw is None else affine.finish_norm_gradients(gw, w, b, norm, back, need_gamma, need_gb)
    return None if end is None else ConvNormGradients(gx, end[0], end[2], end[1], back.total)


def make_dense(g: Tensor) -> Tensor:
    """Return a gradient in memory of its own where one number stands for many, as behind a mean: no kernel reads that."""
    return g.contiguous(memory_format=torch.channels_last) if 0 in g.stride() else g


@operator(kernel=run_folded, check=check_conv_norm, spelled=spell_conv_norm)
def conv_norm_gradients(
    g: Tensor,
    kept: Tensor | None,
    w: Tensor,
    b: Tensor | None,
    norm: FixedNorm,
    geometry: Geometry,
    need_gx: bool,
    need_gb: bool,
    need_gamma: bool,
) -> ConvNormGradients:
    """Return the gradients of a convolution and the eval-mode batch norm behind it.

    Equation: with v = w·γ/σ the folded kernel and gV the gradient of the coarse twin at v,
        gw = gV·γ/σ,   gb = gβ·γ/σ,   gβ = Σ G,   gγ = (⟨gV, w⟩ + (b − μ)·gβ)/σ   per output channel.
    Cost: that of `conv_gradients`; γ/σ goes with the smaller of gradient and kernel, for each takes a pass.
    Exact when: as `conv_gradients`; gγ is exact when gw is.

    Args:
        g: Patch sums of the gradient of the norm's result [N, Co, H', W'].
        kept: What was kept of the input; `None` where neither gw nor gγ is requested.
        w: The weight.
        b: The convolution's bias.
        norm: The norm.
        geometry: The convolution.
        need_gx: Whether the gradient of the input is requested.
        need_gb: Whether that of the bias is.
        need_gamma: Whether that of γ is.
    """
    return join_norm(lambda g, w: conv_gradients(g, kept, w, geometry, need_gx), g, w, b, norm, need_gb, need_gamma)


def conv_norm_gradients_by(
    conv: Conv, g: Tensor, w: Tensor, b: Tensor | None, norm: FixedNorm, need_gb: bool, need_gamma: bool
) -> ConvNormGradients:
    """Return what `conv_norm_gradients` does from the gradients that a function gives of the convolution.

    For inputs that are held as something else than a tensor, which no operator takes.

    Args:
        conv: Gives the gradients of the convolution.
        g: Patch sums of the gradient of the norm's result [N, Co, H', W'].
        w: The weight.
        b: The convolution's bias.
        norm: The norm.
        need_gb: Whether the gradient of the bias is requested.
        need_gamma: Whether that of γ is.
    """
    check = Check("conv_norm_gradients")
    check.map("g", g)
    check_folded(check, g, w, b, norm)
    return join_norm(conv, g, w, b, norm, need_gb, need_gamma)


def join_norm(
    conv: Conv,
    g: Tensor,
    w: Tensor,
    b: Tensor | None,
    norm: FixedNorm,
    need_gb: bool,
    need_gamma: bool,
    *,
    may_scale: bool = True,
) -> ConvNormGradients:
    """Return the gradients of a convolution, which a function gives, together with those of the norm behind it.

    `may_scale` allows to scale the gradient in place of the kernel, where it is smaller.
    """
    g = make_dense(g)
    back = scale_norm_gradient(g, norm, may_scale and g.dtype == w.dtype and g.numel() < w.numel(), w)
    gx, gw = conv(g, back.folded) if back.scaled is None else conv(back.scaled, w)  # type: ignore[arg-type]
    g_gamma = gb = None
    if gw is not None:
        gw, g_gamma, gb = finish_norm_gradients(gw, w, b, norm, back, need_gamma, need_gb)
    elif need_gb:
        gb = back.total * back.scale
    return ConvNormGradients(gx, gw, gb, g_gamma, back.total)
