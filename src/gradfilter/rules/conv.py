"""conv2d at patch resolution, alone and with the batch norm behind it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter import patches
from gradfilter.patches import Axis, Lift, Matrix, Pair, apply_axes, count_cells, make_pair, map_size
from gradfilter.rules.shape import Padded
from gradfilter.tensor import PatchTensor, coarse, is_live, make_carrier, mean, pixels, rule, wrap


@dataclass(frozen=True)
class Geometry:
    """The shape of one convolution between two tiled maps, everything but batch, channels and weights."""

    rows: Axis
    columns: Axis
    groups: int
    lumped: bool

    @property
    def out_patch(self) -> Pair:
        """The patch of the output."""
        return self.rows.out_patch, self.columns.out_patch

    @property
    def out_cells(self) -> Pair:
        """The number of output patches."""
        return count_cells((self.rows.out_size, self.columns.out_size), self.out_patch)

    @cached_property
    def is_pointwise(self) -> bool:
        """Tell whether each output pixel reads one real input pixel: a 1×1 kernel without padding."""
        return all(
            a.kernel == 1 and a.before == 0 and a.stride * (a.out_size - 1) < a.in_size for a in (self.rows, self.columns)
        )

    @cached_property
    def taps(self) -> tuple[Matrix, Matrix]:
        """The tap matrices per axis [taps, out cells, in cells]; the lumped kernel has one tap."""
        make = patches.lumped_matrix if self.lumped else patches.tap_matrices
        return make(self.rows), make(self.columns)

    @cached_property
    def is_single_tap(self) -> bool:
        """Tell whether the coarse kernel has one tap: the input is then kept as the output cells see it."""
        return self.is_pointwise or self.lumped

    @cached_property
    def lifts(self) -> tuple[Lift, Lift] | None:
        """The coarse twin as an ordinary convolution, where partial patches do not forbid it."""
        rows, columns = patches.lift_axis(self.rows), patches.lift_axis(self.columns)
        return None if rows is None or columns is None else (rows, columns)

    @cached_property
    def stacked(self) -> tuple[Matrix, Matrix]:
        """The tap matrices with taps and output cells on one axis, [taps · out cells, in cells]."""
        rows, columns = self.taps
        return rows.reshape(-1, rows.shape[-1]), columns.reshape(-1, columns.shape[-1])


make_geometry = lru_cache(maxsize=4096)(Geometry)


def keep_input(x: PatchTensor, geometry: Geometry) -> Tensor:
    """Return what backward needs of the layer's input to give the weight gradient.

    The patch means x̄ [N, Ci, H', W']; for a pointwise kernel the means of the pixels that are read, at the output's
    resolution (exact, and no more bytes); for the lumped kernel the means under each output cell.
    """
    if geometry.is_pointwise:
        rows, columns = geometry.rows, geometry.columns
        if rows.stride == columns.stride == 1 and x.patch == geometry.out_patch:
            return mean(x)
        value = pixels(x)[:, :, :: rows.stride, :: columns.stride]
        return patches.pool_mean(value[:, :, : rows.out_size, : columns.out_size], geometry.out_patch)
    if geometry.lumped:
        over, across = geometry.taps
        return apply_axes(mean(x), over[0], across[0])
    return mean(x)


def is_traced() -> bool:
    """Tell whether a graph is being recorded: then only operators that export are used."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def conv_gradients(
    g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, *, need_gx: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx [N, Ci, H', W'] and gw [Co, Ci/groups, kh, kw] of the coarse twin.

    Equation: with T the tap matrices (design §2, Galerkin projection of the convolution onto patch-constant maps),
        gx = Σ_uv T_uᵀ (w[u,v]ᵀ G) T_v,        gw[u,v] = Σ G · (T_u x̄ T_vᵀ).
    Cost: about 1/r² of the exact backward. As one ordinary convolution with the lifted kernel where every patch is whole,
    else as matrix products with T.
    Exact when: gx always is the exact projection; gw when x is constant in each patch, and for 1×1 kernels.
    """
    if geometry.is_single_tap:
        return single_tap_gradients(g, kept, w, geometry, need_gx)
    # Lifting costs a few passes over the kernel, tap matrices a few over the unfolded input: take the smaller.
    few_weights = w.shape[0] // geometry.groups <= g.shape[0] * g.shape[2] * g.shape[3]
    if geometry.lifts is not None and not is_traced() and (few_weights or all(a.is_identity for a in geometry.lifts)):
        return lifted_gradients(g, kept, w, geometry, geometry.lifts, need_gx)
    return tap_gradients(g, kept, w, geometry, need_gx)


def single_tap_gradients(
    g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx and gw where each output cell reads one coarse value per channel: two matrix products.

    With the lumped kernel (facts: gradient filtering, CVPR 2023) the kernel is its sum over taps, and all taps share one
    gradient: gx = Lᵀ (Σ_uv w[u,v])ᵀ G L, gw[u,v] = Σ G · (L x̄ Lᵀ).
    """
    gx = gw = None
    if kept is not None:
        gw = grouped_outer(g, kept[:, :, None], geometry.groups).reshape(*w.shape[:2], 1, 1).expand_as(w)
    if need_gx:
        spread = grouped_product(w.sum((2, 3))[..., None], g, geometry.groups)
        rows, columns = geometry.taps
        gx = apply_axes(spread[:, :, 0], rows[0].T, columns[0].T)
    return gx, gw


def grouped_outer(g: Tensor, unfolded: Tensor, groups: int) -> Tensor:
    """Return Σ over images and cells of G · input per group: g [N, Co, ...], unfolded [N, Ci, K, ...] to [Co, Ci/groups, K]."""
    n, co = g.shape[:2]
    ci, taps = unfolded.shape[1:3]
    left = g.reshape(n, groups, co // groups, -1).permute(1, 2, 0, 3).reshape(groups, co // groups, -1)
    right = unfolded.reshape(n, groups, ci // groups * taps, -1).permute(1, 0, 3, 2).reshape(groups, left.shape[-1], -1)
    return (left @ right).reshape(co, ci // groups, taps)


def grouped_product(w: Tensor, g: Tensor, groups: int) -> Tensor:
    """Return wᵀ G per group and tap: w [Co, Ci/groups, K], g [N, Co, H', W'] to [N, Ci, K, H', W']."""
    n, co, h, width = g.shape
    ci, taps = w.shape[1] * groups, w.shape[2]
    if groups == co == ci:
        return w.reshape(1, co, taps, 1, 1) * g[:, :, None]
    kernel = w.reshape(groups, co // groups, w.shape[1] * taps).transpose(1, 2)
    return (kernel @ g.reshape(n, groups, co // groups, h * width)).reshape(n, ci, taps, h, width)


def tap_gradients(
    g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx and gw through the tap matrices: right at partial patches, and in operators that export."""
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
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx and gw through one ordinary convolution with the lifted kernel A_h w A_wᵀ on the coarse maps."""
    rows, columns = lifts
    in_cells = count_cells(
        (geometry.rows.in_size, geometry.columns.in_size), (geometry.rows.in_patch, geometry.columns.in_patch)
    )
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
        apply_axes(w, rows.matrix, columns.matrix),
        None,
        [rows.stride, columns.stride],
        [rows.before, columns.before] if symmetric else [0, 0],
        [1, 1],
        False,
        [0, 0],
        geometry.groups,
        [need_gx, kept is not None, False],
    )
    if gx is not None and not symmetric:
        gx = F.pad(gx, [-p for p in pads])
    if gw is not None:
        gw = apply_axes(gw, rows.matrix.T, columns.matrix.T)
    return gx, gw


class Conv(Function):
    """Carry a gradient back through conv2d; see `conv_gradients`. Saves the kept input where the weight is trained."""

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, w: Tensor, b: Tensor | None, kept: Tensor | None, geometry: Geometry, y: Tensor
    ) -> Tensor:
        ctx.save_for_backward(kept, w if ctx.needs_input_grad[0] else None)
        ctx.geometry, ctx.w_shape = geometry, w.shape
        return make_carrier((*y.shape[:2], *geometry.out_cells), y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        kept, w = ctx.saved_tensors
        w = g.new_empty(()).expand(ctx.w_shape) if w is None else w.to(g.dtype)
        gx, gw = conv_gradients(g, kept, w, ctx.geometry, need_gx=ctx.needs_input_grad[0])
        gb = g.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return gx, gw, gb, None, None, None


class ConvOrigin(NamedTuple):
    """A convolution as the batch norm behind it needs to know it."""

    carrier: Tensor
    w: Tensor
    b: Tensor | None
    kept: Tensor | None
    geometry: Geometry


class ConvNorm(Function):
    """Carry a gradient back through conv2d and the eval-mode batch norm behind it, as one function.

    Equation: with v = w·γ/σ the folded kernel and gV the gradient of the coarse twin at v,
        gw = gV·γ/σ,   gb = gβ·γ/σ,   gβ = Σ G,   gγ = (⟨gV, w⟩ + (b − μ)·gβ)/σ   per output channel.
    Cost: that of the convolution. The affine parameters train and nothing more is kept for them.
    Exact when: as `conv_gradients`; gγ is exact when gw is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        w: Tensor,
        b: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        mu: Tensor,
        var: Tensor,
        eps: float,
        kept: Tensor | None,
        geometry: Geometry,
        y: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(kept, w, b, gamma, mu, var)
        ctx.geometry, ctx.eps = geometry, eps
        return make_carrier((*y.shape[:2], *geometry.out_cells), y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        kept, w, b, gamma, mu, var = ctx.saved_tensors
        need_gx, need_gw, need_gb, need_gamma, need_beta = ctx.needs_input_grad[:5]
        sigma = (var + ctx.eps).sqrt()
        scale = 1 / sigma if gamma is None else gamma / sigma
        # The folded kernel takes the scale, so that neither G nor gx is touched once more.
        folded = (w * scale.to(w.dtype)[:, None, None, None]).to(g.dtype)
        gx, gv = conv_gradients(g, kept, folded, ctx.geometry, need_gx=need_gx)
        total = g.sum((0, 2, 3)).to(sigma.dtype) if need_gb or need_gamma or need_beta else None
        gw = gb = g_gamma = None
        if need_gw:
            assert gv is not None
            gw = gv.to(w.dtype) * scale.to(w.dtype)[:, None, None, None]
        if need_gb and b is not None:
            gb = total * scale
        if need_gamma:
            assert gv is not None
            shift = -mu if b is None else b - mu
            g_gamma = ((gv.to(w.dtype) * w).sum((1, 2, 3)) + shift * total) / sigma
        g_beta = total if need_beta else None
        return gx, gw, gb, g_gamma, g_beta, None, None, None, None, None, None


def resolve_padding(padding: str | int | tuple[int, ...], kernel: Pair, dilation: Pair, fold: tuple[int, ...]) -> Pair:
    """Return the zeros before the first row and column, with a preceding zero pad folded in.

    "same" puts the odd zero after, as torch does.
    """
    left, _, top, _ = fold
    if padding == "valid":
        return top, left
    if padding == "same":
        before = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
        return before[0] + top, before[1] + left
    h, w = as_pair(padding)
    return h + top, w + left


def as_pair(value: Any) -> Pair:
    """Return an int or a sequence of one or two ints, as torch's functions take them, as a pair."""
    if isinstance(value, int):
        return make_pair(value)
    values = tuple(value)
    return (values[0], values[-1])


@rule(torch.conv2d)
def conv2d(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run conv2d on the values and hand its carrier on."""
    return run_conv2d(func, *args, **kwargs)


def run_conv2d(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Apply the rule with torch's argument names."""
    if not is_live(input) or type(weight) is PatchTensor or input.dim() != 4:
        return NotImplemented
    x = input
    with torch.no_grad():
        y = func(pixels(x), weight, bias, stride, padding, dilation, groups)
    pads = (0, 0, 0, 0)
    if isinstance(x.origin, Padded) and is_live(x.origin.x):
        # Patches of a padded map would straddle those of the map: take the map itself and let the kernel pad.
        pads, unpadded = x.origin.pads, x.origin.x
    else:
        unpadded = x
    kernel, stride, dilation = (weight.shape[2], weight.shape[3]), as_pair(stride), as_pair(dilation)
    before = resolve_padding(padding, kernel, dilation, pads)
    out_patch = x.choices.tiling.patch_for(map_size(y))
    axes = [
        Axis(
            kernel[i], stride[i], dilation[i], before[i], unpadded.shape[2 + i], y.shape[2 + i], unpadded.patch[i], out_patch[i]
        )
        for i in (0, 1)
    ]
    lumped = x.choices.kernel == "lumped" and np.prod(kernel) > 1
    geometry = make_geometry(axes[0], axes[1], groups, lumped)
    kept = None
    if weight.requires_grad:
        with torch.no_grad():
            kept = keep_input(unpadded, geometry).to(y.dtype)
    carrier: Tensor = Conv.apply(unpadded.carrier, weight, bias, kept, geometry, y)  # type: ignore[assignment]
    if not carrier.requires_grad:
        return y
    return wrap(y, carrier, out_patch, x.choices, ConvOrigin(unpadded.carrier, weight, bias, kept, geometry))
