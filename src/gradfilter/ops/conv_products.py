"""The gradients of a convolution's coarse twin in torch: one function per way to compute them.

Coarse tensors are small and their channels many, so products run over channels-last rows [N · cells, C]: a few large
matrix products, and no copies where maps are channels-last already.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.geometry.axes import Lift
from gradfilter.geometry.convolution import SMALL, Geometry
from gradfilter.geometry.tiling import Pair, is_nhwc
from gradfilter.ops.constants import find_joint_taps, find_taps
from gradfilter.ops.pooling import apply_axes

LARGE = 100_000
"""From so many elements per image on, gw is faster in products of shifted maps than in torch's convolution_backward."""
Gradients = tuple[Tensor | None, Tensor | None]


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


def single_tap_gradients(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Gradients:
    """Return gx and gw where each output cell reads one coarse value per channel: two matrix products.

    With the lumped kernel (gradient filtering, CVPR 2023) the kernel is its sum over taps, and all taps share one
    gradient: gx = Lᵀ (Σ_uv w[u,v])ᵀ G L, gw[u,v] = Σ G · (L x̄ Lᵀ).
    """
    gx = gw = None
    if geometry.groups == 1:
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
    return finish_single(gx, gw, w, geometry)


def finish_single(gx: Tensor | None, gw: Tensor | None, w: Tensor, geometry: Geometry) -> Gradients:
    """Return gx on the cells of the input and gw for every tap, from those of the values that output cells read."""
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
    return geometry.groups == 1 and in_h * in_w <= out_h * out_w and g.element_size() > 2


def prefers_unfolding(g: Tensor, geometry: Geometry, need_gx: bool) -> bool:
    """Tell whether gw alone is cheaper from the unfolded input, in two products, than in one product per tap.

    Measured on one core, 3 to 256 input channels: 1.01 to 19 times faster up to these sizes, and 0.4 to 1.6 times beyond.
    """
    cells = geometry.out_cells[0] * geometry.out_cells[1]
    return not need_gx and geometry.groups == 1 and geometry.is_small and (cells <= 16 or len(g) * cells <= SMALL)


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
