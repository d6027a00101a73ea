"""Between pixels and patches: patch means and sums, cells over their patches, and linear maps of cells."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from gradfilter.geometry.axes import AxisMatrix
from gradfilter.geometry.tiling import MAP, Layout, Pair, count_cells, is_map, is_nhwc, over_map
from gradfilter.ops.check import Check, is_whole
from gradfilter.ops.constants import make_areas, to_tensor
from gradfilter.ops.native import pooling as native
from gradfilter.ops.operator import operator


def check_layout(check: Check, name: str, x: Tensor, layout: Layout) -> Pair:
    """Check that x has the axes of a layout; return the size of its map."""
    check.tensor(name, x)
    check.instance("layout", layout, Layout)
    if is_map(x, layout):
        return check.map(name, x)[2:]
    check_axes_of(check, layout)
    if max(layout.rows, layout.columns) >= x.dim() or 0 in x.shape[1:]:
        check.refuse(name, f"of shape {list(x.shape)}", f"Give one with rows and columns on axes {layout.axes}, not empty.")
    if layout.tokens and x.shape[layout.rows] != layout.prefix + layout.tokens[0] * layout.tokens[1]:
        wanted = f"{layout.prefix} + {layout.tokens[0]}·{layout.tokens[1]} tokens on axis {layout.rows}"
        check.refuse(name, f"of shape {list(x.shape)}", f"Give one with {wanted}.")
    return layout.size(x.shape)


def check_axes_of(check: Check, layout: Layout) -> None:
    """Check that a layout has two axes, or a size for the one that both are merged into."""
    check.instance("layout", layout, Layout)
    if layout.tokens is not None:
        check.pair("layout.tokens", layout.tokens)
    numbers = layout.rows, layout.columns, layout.prefix
    if not all(map(is_whole, numbers)) or (layout.rows == layout.columns) != (layout.tokens is not None):
        check.refuse(
            "layout", f"= {layout}", "Give an axis for rows and one for columns, or one for both and its tokens (h, w)."
        )
    if min(numbers) < 0 or (layout.prefix and layout.tokens is None):
        check.refuse("layout", f"= {layout}", "Give axes counted from the first, and a prefix of at least 0 to tokens alone.")


def check_pixels(check: Check, x: Tensor, patch: Pair, layout: Layout = MAP) -> None:
    """Check a map of pixels and its patch."""
    check_layout(check, "x", x, layout)
    check.pair("patch", patch)


def check_cells(check: Check, x_bar: Tensor, patch: Pair, size: Pair, layout: Layout = MAP) -> None:
    """Check cells of a map of `size`."""
    check.pair("patch", patch)
    check.pair("size", size)
    check_axes_of(check, layout)
    cells = count_cells(size, patch)
    if check_layout(check, "x_bar", x_bar, layout.with_size(cells)) != cells:
        check.refuse("x_bar", f"of shape {list(x_bar.shape)}", f"A map of {size} has {cells} patches of {patch}.")


def pool_map(x: Tensor, patch: Pair, *, sums: bool = False) -> Tensor:
    """Return means or sums of x [N, C, H, W] over the real pixels of each patch; half precision adds in single."""
    wide = x.float() if x.element_size() == 2 else x
    divisor = 1 if sums else None
    return F.avg_pool2d(wide, patch, patch, ceil_mode=True, count_include_pad=False, divisor_override=divisor).to(x.dtype)


def spread_mean(g: Tensor, shape: Sequence[int], patch: Pair, layout: Layout) -> Tensor:
    """Return the gradient of x behind its patch means."""
    return unpool(g / make_areas(layout.size(shape), patch, g, layout), patch, layout.size(shape), layout)


@operator(kernel=native.pool_mean, check=check_pixels, adjoint=spread_mean)
def pool_mean(x: Tensor, patch: Pair, layout: Layout = MAP) -> Tensor:
    """Return the patch means of x: its mean over the real pixels of each patch.

    Equation: x̄_I = (1/|I|) Σ_{i ∈ I} x_i; the coarse value of an activation (docs/how-it-works.md).
    Cost: one pass over x; H·W additions per channel.
    Exact when: always. Half precision adds in single precision.

    Args:
        x: A map [N, C, H, W], or a tensor in another layout.
        patch: The patch `(h, w)`.
        layout: Which axes are rows and columns.
    """
    if patch == (1, 1):
        return x
    if is_map(x, layout):
        return pool_map(x, patch)
    return over_map(x, layout, lambda m: pool_mean(m, patch))


def spread_sum(g: Tensor, shape: Sequence[int], patch: Pair, layout: Layout) -> Tensor:
    """Return the gradient of x behind its patch sums."""
    return unpool(g, patch, layout.size(shape), layout)


@operator(kernel=native.pool_sum, check=check_pixels, adjoint=spread_sum)
def pool_sum(x: Tensor, patch: Pair, layout: Layout = MAP) -> Tensor:
    """Return the patch sums of x: its sum over the real pixels of each patch.

    Equation: Σ_{i ∈ I} x_i; the coarse gradient of an activation with the pixel gradient x.
    Cost: one pass over x; H·W additions per channel.
    Exact when: always. Half precision adds in single precision.

    Args:
        x: A map [N, C, H, W], or a tensor in another layout.
        patch: The patch `(h, w)`.
        layout: Which axes are rows and columns.
    """
    if patch == (1, 1):
        return x
    if is_map(x, layout):
        return pool_map(x, patch, sums=True)
    return over_map(x, layout, lambda m: pool_sum(m, patch))


def sum_cells(g: Tensor, shape: Sequence[int], patch: Pair, size: Pair, layout: Layout) -> Tensor:
    """Return the gradient of cells that were repeated over their patches."""
    return pool_sum(g, patch, layout.with_size(size))


@operator(kernel=native.unpool, check=check_cells, adjoint=sum_cells)
def unpool(x_bar: Tensor, patch: Pair, size: Pair, layout: Layout = MAP) -> Tensor:
    """Repeat each cell of x_bar over its patch.

    Equation: x_i = x̄_I for i ∈ I, the transpose of `pool_sum`.
    Cost: one pass over the result; no arithmetic.
    Exact when: always.

    Args:
        x_bar: The cells [N, C, H', W'], or in another layout.
        patch: The patch `(h, w)`.
        size: The size `(h, w)` of the map.
        layout: Which axes are rows and columns.
    """
    if patch == (1, 1):
        return x_bar
    patch = min(patch[0], size[0]), min(patch[1], size[1])
    if not is_map(x_bar, layout):
        return over_map(x_bar, layout.with_size(count_cells(size, patch)), lambda cells: unpool(cells, patch, size))
    (n, c, h, w), (over, across) = x_bar.shape, patch
    if is_nhwc(x_bar):
        full = x_bar.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, h, over, w, across, c)
        full = full.reshape(n, h * over, w * across, c).permute(0, 3, 1, 2)
    else:  # along rows first: the copies of whole rows are then fast ones
        full = x_bar[..., None].expand(n, c, h, w, across).reshape(n, c, h, 1, w * across)
        full = full.expand(n, c, h, over, w * across).reshape(n, c, h * over, w * across)
    return full[..., : size[0], : size[1]]


def check_axes(check: Check, x: Tensor, rows: Tensor | None, columns: Tensor | None) -> None:
    """Check cells and the matrices that act on them."""
    _, _, h, w = check.map("x", x)
    for name, matrix, size in (("rows", rows, h), ("columns", columns, w)):
        if matrix is not None:
            check.tensor(name, matrix, x)
            if matrix.dim() != 2 or matrix.shape[1] != size:
                check.refuse(name, f"of shape {list(matrix.shape)}", f"Give a matrix [cells, {size}].")


def map_back(g: Tensor, shape: Sequence[int], rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return the gradient of cells behind `map_axes`."""
    return map_axes(g, None if rows is None else rows.t(), None if columns is None else columns.t())


@operator(check=check_axes, adjoint=map_back)
def map_axes(x: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Apply a linear map of rows and one of columns: regrid, pad, crop, average pooling, interpolation.

    Equation: y = M_h x M_wᵀ over the last two axes; backward of a pixel map P with M = (its projection onto patches)ᵀ.
    Cost: two small matrix products per image; nothing for a matrix that is not there.
    Exact when: always.

    Args:
        x: Cells [N, C, H', W'].
        rows: The matrix M_h [cells, H']; `None` for the identity.
        columns: The matrix M_w [cells, W'], likewise.
    """
    if is_nhwc(x):
        n, c, h, w = x.shape
        x = x.permute(0, 2, 3, 1)
        if rows is not None:
            x = (rows @ x.reshape(n, h, w * c)).reshape(n, len(rows), w, c)
        if columns is not None:
            x = columns @ x
        return x.permute(0, 3, 1, 2)
    if columns is not None:
        x = x @ columns.t()
    return x if rows is None else rows @ x


def apply_axes(x: Tensor, rows: AxisMatrix, columns: AxisMatrix, layout: Layout = MAP) -> Tensor:
    """Return rows · x · columnsᵀ over the spatial axes of x, by `map_axes`; identities cost nothing."""
    over, across = (None if matrix.is_identity else to_tensor(matrix, x) for matrix in (rows, columns))
    if over is None and across is None:
        return x
    return over_map(x, layout, lambda cells: map_axes(cells, over, across))
