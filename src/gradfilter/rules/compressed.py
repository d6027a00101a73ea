"""The weight gradient of a convolution whose input is held compressed, from core and factors."""

from __future__ import annotations

import math

from torch import Tensor

from gradfilter import ops
from gradfilter.geometry.convolution import Geometry
from gradfilter.keep import Tucker
from gradfilter.keep.contract import contract, find_order, find_sizes
from gradfilter.keep.tucker import times
from gradfilter.ops import to_tensor


def conv_gradients(
    g: Tensor, kept: Tensor | Tucker | None, w: Tensor, geometry: Geometry, *, need_gx: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx and gw of a convolution's coarse twin, as `ops.conv_gradients` does, from whatever was kept of the input."""
    if not isinstance(kept, Tucker):
        return ops.conv_gradients(g, kept, w, geometry, need_gx=need_gx)
    gx = ops.conv_gradients(g, None, w, geometry, need_gx=True)[0] if need_gx else None
    return gx, compressed_gradient(g, kept, w, geometry)


def compressed_gradient(g: Tensor, kept: Tucker, w: Tensor, geometry: Geometry) -> Tensor:
    """Return gw [Co, Ci/groups, kh, kw] from core and factors of the input, which is not rebuilt.

    Equation: with x̄ = core × U_N × U_C × U_H × U_W,
        gw[o,c,u,v] = Σ G[n,o,i,j] · U_N[n,a] · U_C[c,b] · (T_u U_H)[i,p] · (T_v U_W)[j,q] · core[a,b,p,q].
    Cost: that of the cheaper of two ways. All at once, two operands at a time in the best order; or with rows and columns whole
    again, as the gradient of a convolution of a few images (the rank of the batch) with a few channels (their rank).
    """
    operands, result = spell_gradient(g, kept, w, geometry)
    terms, tensors = tuple(operands), tuple(operands.values())
    if not geometry.is_single_tap:
        products, _ = find_order(terms, result, find_sizes(terms, tensors))
        channels = kept.core.shape[1] if geometry.groups == 1 else w.shape[1]
        taps = math.prod((*geometry.out_cells, *w.shape[2:]))
        if kept.factors[2:] == (None, None) or products > len(kept.core) * len(w) * channels * taps:
            return convolved_gradient(g, kept.expand((2, 3)), w, geometry)
    gw = contract(terms, tensors, result)
    gw = gw[..., None, None] if geometry.is_single_tap else gw
    return gw.reshape(*w.shape[:2], *gw.shape[3:]).expand_as(w)


def spell_gradient(g: Tensor, kept: Tucker, w: Tensor, geometry: Geometry) -> tuple[dict[str, Tensor], str]:
    """Return gw as one contraction: its operands by the labels of their axes, and the labels of the result.

    Groups are a label of their own, z, so that depthwise kernels take no detour through dense ones. Capitals are ranks.
    """
    groups, (factor_n, factor_c, *spatial), core = geometry.groups, kept.factors, kept.core
    operands, labels = {"nzoij": g.unflatten(1, (groups, -1))}, "n"
    if factor_n is not None:
        operands["nN"], labels = factor_n, "N"
    if factor_c is not None:
        operands["zcC"], labels = factor_c.unflatten(0, (groups, -1)), labels + "C"
    else:
        core, labels = core.unflatten(1, (groups, -1)), labels + "zc"
    for factor, out, tap, matrix, cells in zip(spatial, "ij", "uv", geometry.stacked, geometry.out_cells, strict=True):
        rank = out.upper()
        if not geometry.is_single_tap:
            taps = to_tensor(matrix, g).unflatten(0, (-1, cells))
            operands[tap + out + rank] = taps if factor is None else taps @ factor
        elif factor is not None:
            operands[out + rank] = factor
        labels += out if geometry.is_single_tap and factor is None else rank
    return {**operands, labels: core}, "zoc" if geometry.is_single_tap else "zocuv"


def convolved_gradient(g: Tensor, kept: Tucker, w: Tensor, geometry: Geometry) -> Tensor:
    """Return gw where rows and columns are whole: by way of the images and channels of the core."""
    factor_n, factor_c, _, _ = kept.factors
    g = g if factor_n is None else times(g, factor_n, 0)
    if factor_c is None or geometry.groups > 1:
        core = kept.expand((1,)).core
        return ops.conv_gradients(g, core, w, geometry, need_gx=False)[1]  # type: ignore[return-value]
    few = g.new_empty(()).expand(len(w), kept.core.shape[1], *w.shape[2:])
    gw = ops.conv_gradients(g, kept.core, few, geometry, need_gx=False)[1]
    assert gw is not None
    return times(gw, factor_c.t(), 1)
