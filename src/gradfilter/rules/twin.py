"""The coarse twin of a convolution: the same convolution between patch-constant maps, and its gradients.

Coarse tensors are small and their channels many, so products run over channels-last rows [N · cells, C]: a few large
matrix products, and no copies where maps are channels-last already.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter import native
from gradfilter.keep import Tucker
from gradfilter.keep.contract import contract, find_order, find_sizes
from gradfilter.keep.tucker import times
from gradfilter.native import AxisTiles
from gradfilter.patches import Lift, Pair, apply_axes, is_nhwc, to_tensor
from gradfilter.rules.geometry import Geometry, find_coefficients, find_joint_taps, find_taps
from gradfilter.tensor import is_traced

LARGE = 100_000
"""From so many numbers per image on, gw is faster in products of shifted maps than in torch's convolution_backward."""
FEW = 64 * 64
"""Up to so many pairs of channels, calls cost more than products."""
LEAST_CELLS = 4
"""With fewer cells than that, the library's products would take less time than packing the weight for them."""
Gradients = tuple[Tensor | None, Tensor | None]


def conv_gradients(g: Tensor, kept: Tensor | Tucker | None, w: Tensor, geometry: Geometry, *, need_gx: bool) -> Gradients:
    """Return gx [N, Ci, H', W'] and gw [Co, Ci/groups, kh, kw] of the coarse twin.

    Equation: with T the tap matrices (design §2, Galerkin projection of the convolution onto patch-constant maps),
        gx = Σ_uv T_uᵀ (w[u,v]ᵀ G) T_v,        gw[u,v] = Σ G · (T_u x̄ T_vᵀ).
    Cost: about 1/r² of the exact backward, and half of that by Winograd's F(2×2, 3×3) where the library runs it. Elsewhere as
    one ordinary convolution with the lifted kernel where every patch is whole, else as matrix products with T.
    Exact when: gx always is the exact projection; gw when x is constant in each patch, and for 1×1 kernels.

    Args:
        g: Patch sums of the gradient of the output [N, Co, H', W'].
        kept: What was kept of the input; `None` where no weight gradient is asked for.
        w: The weight.
        geometry: The convolution.
        need_gx: Whether the gradient of the input is asked for.
    """
    if kept is None and not need_gx:  # a bias may train alone
        return None, None
    if isinstance(kept, Tucker):
        gx = conv_gradients(g, None, w, geometry, need_gx=True)[0] if need_gx else None
        return gx, compressed_gradient(g, kept, w, geometry)
    if geometry.is_single_tap:
        return single_tap_gradients(g, kept, w, geometry, need_gx)
    depthwise = geometry.groups == w.shape[0] and w.shape[1] == 1
    if depthwise and w.dtype is torch.float32 and not is_traced() and native.can_pair(g, kept, *geometry.pairs):
        return paired_gradients(g, kept, w, geometry, need_gx)
    if geometry.groups == 1 and geometry.tiles is not None and not is_traced() and prefers_tiles(g, kept, w, geometry.tiles):
        return native.tile_gradients(g, kept, w, *geometry.tiles, need_gx=need_gx)
    if geometry.lifts is not None and not is_traced() and prefers_lift(g, w, geometry, geometry.lifts, depthwise):
        return lifted_gradients(g, kept, w, geometry, geometry.lifts, need_gx)
    if prefers_products(g, geometry):
        return product_gradients(g, kept, w, geometry, need_gx)
    if geometry.is_small and geometry.groups == 1:
        return dense_gradients(g, kept, w, geometry, need_gx)
    if geometry.is_small and depthwise:
        return depthwise_gradients(g, kept, w, geometry, need_gx)
    return separable_gradients(g, kept, w, geometry, need_gx)


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
        return conv_gradients(g, core, w, geometry, need_gx=False)[1]  # type: ignore[return-value]
    few = g.new_empty(()).expand(len(w), kept.core.shape[1], *w.shape[2:])
    gw = conv_gradients(g, kept.core, few, geometry, need_gx=False)[1]
    assert gw is not None
    return times(gw, factor_c.t(), 1)


def prefers_tiles(g: Tensor, kept: Tensor | None, w: Tensor, tiles: tuple[AxisTiles, AxisTiles]) -> bool:
    """Tell whether the library's Winograd kernel is the cheapest way.

    Measured on one core with AVX-512, 16 to 512 channels, batches of 1 to 32, maps of 1 to 28 cells per side. Where tiles of
    two cells save products: 1.1 to 5 times faster than the others at batch 8 and more, and 0.96 to 2.5 times at batch 1
    with 512 channels. Where there are no such tiles, on maps of one cell: 0.74 to 1.02 times with 256 channels and more, but
    1.1 to 5 times with few.
    """
    saves = any((axis.tiles["outs"] > 1).any() for axis in tiles)
    return (saves or w.shape[0] * w.shape[1] <= FEW) and native.can_tile(g, kept, w, *tiles)


def prefers_lift(g: Tensor, w: Tensor, geometry: Geometry, lifts: tuple[Lift, Lift], depthwise: bool) -> bool:
    """Tell whether an ordinary convolution with the lifted kernel is the cheaper way.

    On small maps matrix products are, but for depthwise kernels of three coarse taps, for which torch has fast code as long
    as the map is no smaller than the kernel, and for strides that leave more than a few cells. Lifting costs a few passes
    over the kernel, tap matrices a few over the unfolded input: on larger maps take the smaller.
    """
    taps = max(len(a.matrix) for a in lifts)
    if math.prod(len(a.matrix) for a in lifts) > 4 * w.shape[2] * w.shape[3]:
        return False  # far-apart taps of a dilated kernel: the lifted kernel would be mostly zeros
    if geometry.is_small and depthwise:
        return taps <= min(3, *geometry.in_cells)
    if geometry.is_small and geometry.groups == 1:
        return geometry.out_cells[0] * geometry.out_cells[1] > 16 and not prefers_products(g, geometry)
    return w.shape[0] // geometry.groups <= g.shape[0] * g.shape[2] * g.shape[3] or all(a.is_identity for a in lifts)


def to_rows(x: Tensor) -> Tensor:
    """Return x [N, C, H', W'] as rows of channels [N · cells, C]."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def to_map(rows: Tensor, n: int, cells: Pair) -> Tensor:
    """Return rows of channels as a channels-last map [N, C, H', W']."""
    return rows.reshape(n, *cells, rows.shape[-1]).permute(0, 3, 1, 2)


def sum_taps(w: Tensor) -> Tensor:
    """Return the weight's sum over its taps [Co, Ci/groups]."""
    return w[:, :, 0, 0] if w.shape[2] == w.shape[3] == 1 else w.sum((2, 3))


def prefers_single(g: Tensor, kept: Tensor | None, w: Tensor) -> bool:
    """Tell whether the library's two products are the cheaper ones.

    Measured against torch's on one core and on two, 16 to 1280 channels, 4 to 153,600 cells: 1.05 to 1.4 and 1.0 to 2.8 times
    faster with AVX-512, 0.98 to 1.5 and 0.98 to 1.7 times with AVX2 beside torch's AVX-512. On one cell, 0.4 to 0.8 times, and
    as slow for one output channel, of which torch's are products of a matrix and a vector.
    """
    return w.shape[0] > 1 and g.numel() >= LEAST_CELLS * g.shape[1] and native.can_single(g, kept, w)


def single_tap_gradients(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients:
    """Return gx and gw where each output cell reads one coarse value per channel: two matrix products.

    With the lumped kernel (gradient filtering, CVPR 2023) the kernel is its sum over taps, and all taps share one
    gradient: gx = Lᵀ (Σ_uv w[u,v])ᵀ G L, gw[u,v] = Σ G · (L x̄ Lᵀ).
    """
    gx = gw = None
    if geometry.groups == 1 and not is_traced() and prefers_single(g, kept, w):
        gx, gw = native.single_gradients(g, kept, w, need_gx=need_gx)
    elif geometry.groups == 1:
        rows = to_rows(g)
        if kept is not None:
            gw = rows.t() @ to_rows(kept)
        if need_gx:
            gx = to_map(rows @ sum_taps(w), len(g), geometry.out_cells)
    elif geometry.groups == w.shape[0] and w.shape[1] == 1:
        gw = None if kept is None else (g * kept).sum((0, 2, 3))
        gx = g * sum_taps(w)[:, :, None] if need_gx else None
    else:
        if kept is not None:
            gw = grouped_outer(g, kept[:, :, None], geometry.groups)
        if need_gx:
            gx = grouped_product(sum_taps(w)[..., None], g, geometry.groups)[:, :, 0]
    if gx is not None and not geometry.is_aligned:
        over, across = geometry.stacked
        gx = apply_axes(gx, over.T, across.T)
    return gx, None if gw is None else gw.reshape(*w.shape[:2], 1, 1).expand_as(w)


def dense_gradients(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients:
    """Return gx and gw on small maps: one product with the joint tap matrix, one with the kernel."""
    gx = gw = None
    n, rows = len(g), to_rows(g)
    joint = find_joint_taps(geometry, g)
    out, taps, cells = joint.shape
    joint = joint.reshape(out * taps, cells)
    if kept is not None:
        unfolded = joint @ to_rows(kept).reshape(n, cells, kept.shape[1])
        gw = rows.t() @ unfolded.reshape(n * out, taps * kept.shape[1])
        gw = gw.reshape(w.shape[0], *w.shape[2:], w.shape[1]).permute(0, 3, 1, 2)
    if need_gx:
        spread = rows @ w.permute(0, 2, 3, 1).reshape(w.shape[0], -1)
        gx = to_map(joint.t() @ spread.reshape(n, out * taps, w.shape[1]), n, geometry.in_cells)
    return gx, gw


def prefers_products(g: Tensor, geometry: Geometry) -> bool:
    """Tell whether one product per tap on the cells of the input is the cheapest way where the kernel is not lifted.

    It is unless a stride leaves fewer cells to work on at the output. Its sums run through memory, so not in half precision.
    """
    (out_h, out_w), (in_h, in_w) = geometry.out_cells, geometry.in_cells
    return geometry.groups == 1 and in_h * in_w <= out_h * out_w and g.element_size() > 2 and not is_traced()


def product_gradients(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients:
    """Return gx and gw by one matrix product each per tap, in place and without copies of a channels-last kernel.

    Seen from the cells of the input, U_uv = T_uᵀ G T_v serves both: gx = Σ_uv U_uv w[u,v], gw[u,v] = U_uvᵀ x̄. Rows are cells
    first, images second, so that the tap matrices act in few large products as well.
    """
    (n, co), ci, (h, width), (in_h, in_w) = g.shape[:2], w.shape[1], geometry.out_cells, geometry.in_cells
    rows, columns = find_taps(geometry, g)
    by_cell = g.permute(2, 3, 0, 1).reshape(h, width * n * co)
    x = gw = gx = kernel = None
    if kept is not None:
        x = kept.permute(2, 3, 0, 1).reshape(-1, ci)
        gw = g.new_empty(co, *w.shape[2:], ci)
    if need_gx:
        kernel = w.permute(0, 2, 3, 1).contiguous()
        gx = g.new_zeros(in_h * in_w * n, ci)
    for u, row in enumerate(rows):
        over = (by_cell if row is None else row @ by_cell).reshape(in_h, width, n * co)
        for v, column in enumerate(columns):
            seen = over if column is None else column.expand(in_h, in_w, width).bmm(over)
            seen = seen.reshape(in_h * in_w * n, co)
            if gx is not None and kernel is not None:
                gx.addmm_(seen, kernel[:, u, v])
            if gw is not None and x is not None:
                torch.mm(seen.t(), x, out=gw[:, u, v])
    if gx is not None:
        gx = gx.reshape(in_h, in_w, n, ci).permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)
    return gx, None if gw is None else gw.permute(0, 3, 1, 2)


def depthwise_gradients(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients:
    """Return gx and gw on small maps with one kernel per channel: each channel's coarse operator as one small matrix.

    Q_c = Σ_uv w_c[u,v] T_u ⊗ T_v [out cells, in cells], so gx = Q_cᵀ G and gQ_c = G x̄ᵀ, from which gw by the same sum.
    """
    gx = gw = None
    n, channels = g.shape[:2]
    joint = find_joint_taps(geometry, g)
    out, taps, cells = joint.shape
    joint = joint.transpose(0, 1).reshape(taps, out * cells)
    # Copies, for a batched product of views on channels-last maps is a loop over channels.
    by_channel = g.transpose(0, 1).reshape(channels, n, out).contiguous()
    if kept is not None:
        g_operator = by_channel.transpose(1, 2) @ kept.transpose(0, 1).reshape(channels, n, cells).contiguous()
        gw = (g_operator.reshape(channels, -1) @ joint.t()).reshape(w.shape)
    if need_gx:
        operator = (w.reshape(channels, taps) @ joint).reshape(channels, out, cells)
        gx = (by_channel @ operator).transpose(0, 1).reshape(n, channels, *geometry.in_cells)
    return gx, gw


def paired_gradients(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients:
    """Return gx and gw with one kernel per channel in one pass over the pairs of cells that meet.

    A pair (i, j) takes q = Σ_uv T_u[i,j] T_v[i,j] w[u,v] of the kernel, and few of these differ: gw from gq by the same sum.
    """
    taps = find_coefficients(geometry, g)
    q = taps @ w.reshape(len(w), -1).t() if need_gx else None
    gx, gq = native.pair_gradients(g, kept, q, *geometry.pairs)
    return gx, None if gq is None else (gq.t() @ taps).reshape(w.shape)


def grouped_outer(g: Tensor, unfolded: Tensor, groups: int) -> Tensor:
    """Return Σ over images and cells of G · input per group: g [N, Co, …], unfolded [N, Ci, K, …] to [Co, Ci/groups, K]."""
    n, co = g.shape[:2]
    ci, taps = unfolded.shape[1:3]
    cells = g.shape[2] * g.shape[3]
    left = g.reshape(n, groups, co // groups, cells).permute(1, 2, 0, 3).reshape(groups, co // groups, n * cells)
    right = unfolded.reshape(n, groups, ci // groups * taps, cells).permute(1, 0, 3, 2)
    right = right.reshape(groups, n * cells, ci // groups * taps)
    return (left @ right).reshape(co, ci // groups, taps)


def grouped_product(w: Tensor, g: Tensor, groups: int) -> Tensor:
    """Return wᵀ G per group and tap: w [Co, Ci/groups, K], g [N, Co, H', W'] to [N, Ci, K, H', W']."""
    n, co, h, width = g.shape
    ci, taps = w.shape[1] * groups, w.shape[2]
    kernel = w.reshape(groups, co // groups, w.shape[1] * taps).transpose(1, 2)
    return (kernel @ g.reshape(n, groups, co // groups, h * width)).reshape(n, ci, taps, h, width)


def separable_gradients(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients:
    """Return gx and gw on maps of any size and with any groups, the tap matrices applied one axis at a time."""
    gx = gw = None
    (kh, kw), (h, width) = w.shape[2:], geometry.out_cells
    rows, columns = geometry.stacked
    if kept is not None:
        unfolded = apply_axes(kept, rows, columns)
        unfolded = unfolded.reshape(*kept.shape[:2], kh, h, kw, width).transpose(3, 4)
        gw = grouped_outer(g, unfolded.reshape(*kept.shape[:2], kh * kw, h, width), geometry.groups).reshape(w.shape)
    if need_gx:
        spread = grouped_product(w.reshape(*w.shape[:2], kh * kw), g, geometry.groups)
        spread = spread.reshape(*spread.shape[:2], kh, kw, h, width).transpose(3, 4)
        gx = apply_axes(spread.reshape(*spread.shape[:2], kh * h, kw * width), rows.T, columns.T)
    return gx, gw


def lifted_gradients(
    g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, lifts: tuple[Lift, Lift], need_gx: bool
) -> Gradients:
    """Return gx and gw through one ordinary convolution with the lifted kernel A_h w A_wᵀ on the coarse maps."""
    rows, columns = lifts
    kernel = apply_axes(w, rows.matrix, columns.matrix)
    if kept is not None and prefers_shifts(g, kept, geometry, lifts):
        gw = shifted_gradient(g, kept, lifts)
        gx = convolve_back(g, kept, kernel.contiguous(), geometry, lifts, True, False)[0] if need_gx else None
    else:
        gx, gw = convolve_back(g, kept, kernel, geometry, lifts, need_gx, kept is not None)
    return gx, None if gw is None else apply_axes(gw, rows.matrix.T, columns.matrix.T)


def convolve_back(
    g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, lifts: tuple[Lift, Lift], need_gx: bool, need_gw: bool
) -> Gradients:
    """Return gx and gw of an ordinary convolution with the lifted kernel w, by torch."""
    rows, columns = lifts
    in_cells = geometry.in_cells
    pads = [columns.before, columns.after, rows.before, rows.after]
    symmetric = rows.is_symmetric and columns.is_symmetric
    if kept is None:
        cells = in_cells if symmetric else (in_cells[0] + pads[2] + pads[3], in_cells[1] + pads[0] + pads[1])
        padded = g.new_empty(()).expand(g.shape[0], w.shape[1] * geometry.groups, *cells)
    else:
        padded = kept if symmetric else F.pad(kept, pads)
    gx, gw, _ = torch.ops.aten.convolution_backward(
        g,
        padded,
        w,
        None,
        [rows.stride, columns.stride],
        [rows.before, columns.before] if symmetric else [0, 0],
        [rows.dilation, columns.dilation],
        False,
        [0, 0],
        geometry.groups,
        [need_gx, need_gw, False],
    )
    return gx if gx is None or symmetric else F.pad(gx, [-p for p in pads]), gw


def prefers_shifts(g: Tensor, kept: Tensor, geometry: Geometry, lifts: tuple[Lift, Lift]) -> bool:
    """Tell whether products of shifted maps are the cheaper way to gw: on large maps, which torch reorders."""
    large = geometry.groups == 1 and min(g.shape[1], kept.shape[1]) * g.shape[2] * g.shape[3] >= LARGE
    plain = all(a.stride == 1 and a.dilation == 1 and min(a.before, a.after) >= 0 for a in lifts)
    return large and plain and g.is_cpu and g.element_size() > 2 and all(is_nhwc(x) for x in (g, kept))


def shifted_gradient(g: Tensor, kept: Tensor, lifts: tuple[Lift, Lift]) -> Tensor:
    """Return the gradient of the lifted kernel, stride 1: one product per tap and image, while that is in the cache.

    Rows of the padded input are as wide as those of the output with zeros behind them, so tap (u, v) of the flattened cells
    of one is a shift of the other.
    """
    rows, columns = lifts
    (co, ci), (kh, kw) = (g.shape[1], kept.shape[1]), (len(rows.matrix), len(columns.matrix))
    gw = g.new_zeros(co, kh, kw, ci)
    for image, gradient in zip(kept.permute(0, 2, 3, 1), g.permute(0, 2, 3, 1), strict=True):
        x = F.pad(image, [0, 0, columns.before, columns.after, rows.before, rows.after])
        width = x.shape[1]
        x = x.reshape(-1, ci)
        by_cell = F.pad(gradient, [0, 0, 0, kw - 1]).reshape(-1, co)
        count = len(by_cell) - (kw - 1)
        by_channel = by_cell[:count].t()
        for u in range(kh):
            for v in range(kw):
                first = u * width + v
                gw[:, u, v].addmm_(by_channel, x[first : first + count])
    return gw.permute(0, 3, 1, 2)
