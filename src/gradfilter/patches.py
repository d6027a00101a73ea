"""Pixel and patch geometry: pool, unpool, areas, tap and overlap matrices, lift.

Patches tile a map from its top-left corner; the last row and column may be partial. A *mean* is over the real pixels of a
patch, |I| is the number of real pixels of patch I. Everything here is a pure function; matrices are per axis, built once
per geometry with numpy and cached, and so are the tensors made of them: on another device than a CPU each is a copy that the
host waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradfilter import native
from gradfilter.native.values import Pair, count_cells, count_dtype

__all__ = ["Pair", "count_cells", "count_dtype"]
Matrix = np.ndarray
Made = TypeVar("Made")


def make_pair(value: int | Pair) -> Pair:
    """Return `value` as a pair `(h, w)`."""
    return value if isinstance(value, tuple) else (value, value)


def map_size(x: Tensor) -> Pair:
    """Return the spatial size `(h, w)` of x [N, C, H, W]."""
    return x.shape[-2], x.shape[-1]


@dataclass(frozen=True)
class Layout:
    """Say which axes of a tensor are the rows and columns of its map.

    Attributes:
        rows: Axis of the rows.
        columns: Axis of the columns; the same axis where both are merged, row by row, into tokens.
        tokens: Size `(h, w)` of the map behind a merged axis; `None` where rows and columns have an axis each.
        prefix: Tokens before the map's own on a merged axis (a class token): each is a patch by itself.
    """

    rows: int
    columns: int
    tokens: Pair | None = None
    prefix: int = 0

    def size(self, shape: Sequence[int]) -> Pair:
        """Return the spatial size `(h, w)` of a tensor of this shape."""
        return self.tokens or (shape[self.rows], shape[self.columns])

    @property
    def axes(self) -> tuple[int, ...]:
        """The spatial axes."""
        return (self.rows,) if self.tokens else (self.rows, self.columns)

    def resize(self, shape: Sequence[int], size: Pair) -> list[int]:
        """Return `shape` with another spatial size."""
        out = list(shape)
        if self.tokens:
            out[self.rows] = self.prefix + size[0] * size[1]
        else:
            out[self.rows], out[self.columns] = size
        return out

    def with_size(self, size: Pair) -> Layout:
        """Return the layout of a tensor with the same axes and another spatial size, such as the carrier."""
        return replace(self, tokens=size) if self.tokens else self


MAP = Layout(2, 3)
"""The layout of a map [N, C, H, W]."""


def is_map(x: Tensor, layout: Layout) -> bool:
    """Tell whether a tensor in a layout is a map [N, C, H, W]."""
    return x.dim() == 4 and (layout is MAP or layout == MAP)


def is_nhwc(x: Tensor) -> bool:
    """Tell whether a map [N, C, H, W] lies in memory as [N, H, W, C], without gaps, and not as [N, C, H, W] as well."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def over_map(x: Tensor, layout: Layout, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of maps [A, B, H, W] to the spatial axes of a tensor in any layout."""
    if is_map(x, layout):
        return function(x)
    if layout.tokens:
        axis = layout.rows
        head, x = x.split((layout.prefix, x.shape[axis] - layout.prefix), axis)
        y = over_map(x.unflatten(axis, layout.tokens), Layout(axis, axis + 1), function).flatten(axis, axis + 1)
        return torch.cat([head, y], axis) if layout.prefix else y
    last = x.movedim((layout.rows, layout.columns), (-2, -1))
    others = last.shape[:-2]
    y = function(last.flatten(0, -4) if last.dim() > 3 else last[(None,) * (4 - last.dim())])
    return y.reshape(*others, *y.shape[-2:]).movedim((-2, -1), (layout.rows, layout.columns))


@dataclass(frozen=True)
class Tiling:
    """Say how maps of any size are cut into patches.

    Attributes:
        patch: Side of the patch on every map, for the papers' fixed size; `None` for a grid.
        grid: Number of patches per side, the same at every resolution; `None` for a fixed size.
        image: Size `(h, w)` of the network's input, to which a grid refers.
    """

    patch: Pair | None = None
    grid: Pair | None = None
    image: Pair | None = None

    def patch_for(self, size: Pair) -> Pair:
        """Return the patch `(h, w)` on a map of `size`; a patch never exceeds its map."""
        if self.patch is not None:
            (h, w), (most_h, most_w) = self.patch, size
            return h if h < most_h else most_h, w if w < most_w else most_w
        assert self.grid is not None
        assert self.image is not None
        h, w = (grid_patch(n, g, s) for n, g, s in zip(size, self.grid, self.image, strict=True))
        return h, w


make_tiling = lru_cache(maxsize=4096)(Tiling)
PIXELS = Tiling(patch=(1, 1))
"""The finest tiling: every pixel is a patch."""


@lru_cache(maxsize=4096)
def grid_patch(size: int, grid: int, image: int) -> int:
    """Return the side of one of `grid` patches on a map of `size` pixels inside a network that sees `image` pixels.

    The cell, in pixels of the image, is the smallest multiple of a power of two q that is at least image / grid, with q
    the largest power of two up to image / grid and up to 32, the deepest stride of nearly all networks. So cells line up
    through strides of two, and coarse strides are 1.
    """
    wanted = image / grid
    q = 2 ** min(5, max(0, math.floor(math.log2(max(wanted, 1)))))
    cell = math.ceil(wanted / q) * q
    return min(size, max(1, round(cell * size / image)))


@lru_cache(maxsize=4096)
def axis_areas(size: int, patch: int) -> Matrix:
    """Return the number of real pixels of each cell along one axis."""
    starts = np.arange(0, size, patch)
    return np.minimum(starts + patch, size) - starts


@lru_cache(maxsize=4096)
def find_areas(size: Pair, patch: Pair) -> Matrix | float:
    """Return |I| for every patch [H', W'], or one number where all patches are whole."""
    if size[0] % patch[0] == size[1] % patch[1] == 0:
        return float(patch[0] * patch[1])
    return np.multiply.outer(axis_areas(size[0], patch[0]), axis_areas(size[1], patch[1])).astype(np.float64)


def make_areas(size: Pair, patch: Pair, like: Tensor, layout: Layout = MAP) -> Tensor | float:
    """Return |I| for every patch, to act on `like` in its layout, or one number where all patches are whole.

    In single precision at least: half precision counts to 2048 or to 256 only.
    """
    areas = find_areas(size, patch)
    if isinstance(areas, float) and not layout.prefix:
        return areas
    return lay_areas((size, patch, layout, like.dim()), like)


def can_hold(like: Tensor) -> bool:
    """Tell whether constants made for `like` are ordinary tensors, which later calls may share.

    They are not while a graph is recorded, operators are counted or run on shapes alone, nor within torch.func or
    inference_mode.
    """
    if like.is_meta or torch.is_inference_mode_enabled():
        return False
    return not (torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())


def constant(make: Callable[[Any, torch.dtype, torch.device], Made]) -> Callable[[Any, Tensor], Made]:
    """Let a function of a geometry make its tensors once for each dtype and device of `like`, the tensor they act on."""
    hold = lru_cache(maxsize=256)(make)

    @wraps(make)
    def find(key: Any, like: Tensor) -> Made:
        return (hold if can_hold(like) else make)(key, like.dtype, like.device)

    return find


@constant
def lay_areas(key: tuple[Pair, Pair, Layout, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return |I| for every patch of a map of some size, to act on tensors of some layout and number of axes."""
    size, patch, layout, dims = key
    areas = np.broadcast_to(find_areas(size, patch), count_cells(size, patch))
    if layout.tokens:
        areas = np.concatenate([np.ones(layout.prefix), areas.reshape(-1)])
    elif layout.rows > layout.columns:
        areas = areas.T
    areas = areas.reshape(layout.resize([1] * dims, count_cells(size, patch)))
    return torch.tensor(areas, dtype=dtype if dtype.itemsize > 2 else torch.float32, device=device)


@dataclass(frozen=True, eq=False)
class AxisMatrix:
    """A matrix that acts on one axis of a map.

    What makes them is cached: two are the same if they are one object, which is all that `to_tensor` need compare.
    """

    values: Matrix

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def T(self) -> AxisMatrix:  # noqa: N802
        """The transposed matrix."""
        return AxisMatrix(self.values.T)

    @cached_property
    def is_identity(self) -> bool:
        """Tell whether it is the identity."""
        return is_identity(self.values)


@constant
def to_tensor(matrix: AxisMatrix, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix as a tensor."""
    return torch.tensor(matrix.values, dtype=dtype, device=device)


def pool_mean(x: Tensor, patch: Pair, layout: Layout = MAP) -> Tensor:
    """Return the mean of x over the real pixels of each patch."""
    if patch == (1, 1):
        return x
    return over_map(x, layout, lambda m: native.pool_mean(m, patch))


def pool_sum(x: Tensor, patch: Pair, layout: Layout = MAP) -> Tensor:
    """Return the sum of x over the real pixels of each patch."""
    if patch == (1, 1):
        return x
    return over_map(x, layout, lambda m: native.pool_sum(m, patch))


def unpool(x_bar: Tensor, patch: Pair, size: Pair, layout: Layout = MAP) -> Tensor:
    """Repeat each cell of x_bar over its patch, up to a map of `size`."""
    if patch == (1, 1):
        return x_bar
    return over_map(x_bar, layout.with_size(count_cells(size, patch)), lambda cells: native.unpool(cells, patch, size))


def project_axis(source: Matrix, in_size: int, in_patch: int, out_patch: int) -> Matrix:
    """Project a gather of pixels onto patch-constant maps, along one axis.

    Args:
        source: For each output pixel, the input pixels it reads, [out_size, taps]; -1 where it reads nothing.
        in_size: Pixels of the input.
        in_patch: Patch of the input.
        out_patch: Patch of the output.

    Returns:
        [taps, out cells, in cells] with entry (1/|I|) · #{ i in I : source[i, tap] in J }.
    """
    out_size, taps = source.shape
    out_cells, in_cells = -(-out_size // out_patch), -(-in_size // in_patch)
    weight = np.repeat(1.0 / axis_areas(out_size, out_patch), axis_areas(out_size, out_patch))
    matrix = np.zeros((taps, out_cells, in_cells))
    pixel, tap = np.nonzero(source >= 0)
    np.add.at(matrix, (tap, pixel // out_patch, source[pixel, tap] // in_patch), weight[pixel])
    return matrix


def project_matrix(matrix: Matrix, in_patch: int, out_patch: int) -> Matrix:
    """Project a linear map of pixels [out_size, in_size] onto patch-constant maps, along one axis.

    Returns:
        M [out cells, in cells] with M[I, J] = (1/|I|) Σ_{i in I} Σ_{j in J} P[i, j].
    """
    out_size, in_size = matrix.shape
    sums = np.add.reduceat(matrix, np.arange(0, out_size, out_patch), axis=0)
    sums = np.add.reduceat(sums, np.arange(0, in_size, in_patch), axis=1)
    return sums / axis_areas(out_size, out_patch)[:, None]


@lru_cache(maxsize=4096)
def shuffle_axis(size: int, factor: int, in_patch: int, out_patch: int) -> AxisMatrix:
    """Return the coarse matrices of a pixel shuffle, side by side: slot f fills the pixels factor·i + f.

    [out cells, factor · in cells].
    """
    pixel = np.arange(size * factor)[:, None]
    source = np.where(pixel % factor == np.arange(factor), pixel // factor, -1)
    return AxisMatrix(np.hstack(project_axis(source, size, in_patch, out_patch)))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def unshuffle_axis(size: int, factor: int, in_patch: int, out_patch: int) -> AxisMatrix:
    """Return the coarse matrices of a pixel unshuffle, one below the other: slot f reads the pixels factor·i + f.

    [factor · out cells, in cells].
    """
    source = factor * np.arange(size // factor)[:, None] + np.arange(factor)
    return AxisMatrix(np.vstack(project_axis(source, size, in_patch, out_patch)))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def overlap_axis(size: int, in_patch: int, out_patch: int) -> AxisMatrix:
    """Return the regrid matrix [out cells, in cells]: the share of output patch I that lies in input patch J."""
    return AxisMatrix(project_axis(np.arange(size)[:, None], size, in_patch, out_patch)[0])


PAD_MODES = {"constant": None, "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@lru_cache(maxsize=4096)
def pad_axis(size: int, before: int, after: int, mode: str, in_patch: int, out_patch: int) -> AxisMatrix:
    """Return the coarse matrix [out cells, in cells] of padding one axis, in any of torch's modes.

    A negative amount crops. Padding with a constant reads no pixel there.
    """
    source = np.arange(size)[max(0, -before) : size - max(0, -after)]
    grow = (max(0, before), max(0, after))
    numpy_mode = PAD_MODES[mode]
    source = np.pad(source, grow, constant_values=-1) if numpy_mode is None else np.pad(source, grow, mode=numpy_mode)  # type: ignore[call-overload]
    return AxisMatrix(project_axis(source[:, None], size, in_patch, out_patch)[0])


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution between two tiled maps.

    Attributes:
        before: Zeros before the first pixel; of a transposed convolution, the pixels cropped there.
        transposed: Whether the stride spreads the input instead of the output.
    """

    kernel: int
    stride: int
    dilation: int
    before: int
    in_size: int
    out_size: int
    in_patch: int
    out_patch: int
    transposed: bool = False


@dataclass(frozen=True)
class Lift:
    """The coarse twin of one axis as an ordinary convolution.

    Attributes:
        matrix: A [coarse taps, taps]; the coarse kernel of one axis is A times the kernel.
        stride: Coarse stride s·ro/ri; of a transposed convolution ro/(s·ri).
        dilation: Cells between coarse taps.
        before: Coarse zero padding before the first cell.
        after: Coarse padding after the last cell; negative where the last cells are not read.
    """

    matrix: AxisMatrix
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def is_identity(self) -> bool:
        """Tell whether the coarse kernel is the kernel itself."""
        return self.matrix.is_identity

    @property
    def is_symmetric(self) -> bool:
        """Tell whether padding both sides alike reads the same cells: a longer far side is cut off by the stride."""
        return self.before >= 0 and 0 <= self.before - self.after < self.stride


def tap_position(axis: Axis, count: int) -> tuple[Matrix, Matrix]:
    """Return where each tap of the first `count` output pixels reads, padding included, and whether it reads at all.

    Tap u of pixel i reads s·i + d·u − p; transposed, it reads (i + p − d·u)/s where that is whole. Both [count, kernel].
    """
    pixel, offset = np.arange(count)[:, None], axis.dilation * np.arange(axis.kernel) - axis.before
    if not axis.transposed:
        position = axis.stride * pixel + offset
        return position, np.ones_like(position, dtype=bool)
    spread = pixel - offset
    return spread // axis.stride, spread % axis.stride == 0


def tap_source(axis: Axis) -> Matrix:
    """Return which input pixel each tap reads for each output pixel [out_size, kernel], -1 where it reads none."""
    position, reads = tap_position(axis, axis.out_size)
    return np.where(reads & (position >= 0) & (position < axis.in_size), position, -1)


@lru_cache(maxsize=4096)
def tap_matrices(axis: Axis) -> Matrix:
    """Return T [taps, out cells, in cells], the Galerkin projection of each tap onto patch-constant maps.

    T_u[I, J] = (1/|I|) · #{ i in I : s·i + d·u − p in J, a real pixel }; transposed, (i + p − d·u)/s.
    """
    return project_axis(tap_source(axis), axis.in_size, axis.in_patch, axis.out_patch)


@lru_cache(maxsize=4096)
def lumped_matrix(axis: Axis) -> Matrix:
    """Return L [1, out cells, in cells]: which input cells lie under each output cell, in equal shares of pixels.

    The lumped kernel forgets where its taps are: an output pixel stands over the s input pixels at its centre,
    s·i + c … s·i + c + s − 1 with c = ⌊d(k−1)/2⌋ − p, and a patch over the union of those of its pixels.
    """
    centre = axis.dilation * (axis.kernel - 1) // 2 - axis.before
    position = axis.stride * np.arange(axis.out_size)[:, None] + centre + np.arange(axis.stride)
    source = np.where((position >= 0) & (position < axis.in_size), position, -1)
    under = project_axis(source, axis.in_size, axis.in_patch, axis.out_patch).sum(0, keepdims=True)
    total = under.sum(-1, keepdims=True)
    return np.divide(under, total, out=np.zeros_like(under), where=total > 0)


def lift_patch(axis: Axis) -> tuple[Matrix, int, int] | None:
    """Return A [coarse taps, taps] of a whole patch inside the map, the first coarse tap and the coarse stride, if it is whole.

    A[δ, u] = (1/ro) · #{ i in [0, ro) : ⌊(s·i + d·u − p)/ri⌋ = δ }.
    """
    over, under = (1, axis.stride) if axis.transposed else (axis.stride, 1)
    stride, rest = divmod(over * axis.out_patch, under * axis.in_patch)
    if rest:
        return None
    position, reads = tap_position(axis, axis.out_patch)
    pixel, tap = np.nonzero(reads)
    delta = position[pixel, tap] // axis.in_patch
    first, last = int(delta.min()), int(delta.max())
    matrix = np.zeros((last - first + 1, axis.kernel))
    np.add.at(matrix, (delta - first, tap), 1.0 / axis.out_patch)
    return matrix, first, stride


@lru_cache(maxsize=4096)
def lift_axis(axis: Axis) -> Lift | None:
    """Return the axis as an ordinary coarse convolution, or `None` where partial patches make it irregular.

    T_u[I, J] = A[J − I·s·ro/ri, u] in every row.
    """
    lifted = lift_patch(axis)
    if lifted is None:
        return None
    matrix, first, stride = lifted
    taps = tap_matrices(axis)
    out_cells, in_cells = taps.shape[1:]
    column = np.arange(in_cells) - stride * np.arange(out_cells)[:, None] - first
    inside = (column >= 0) & (column < len(matrix))
    toeplitz = np.where(inside, matrix[np.clip(column, 0, len(matrix) - 1)].transpose(2, 0, 1), 0.0)
    spacing = int(np.gcd.reduce(np.flatnonzero(matrix.any(1)))) or 1  # that of a dilated kernel, where patches are small
    after = (out_cells - 1) * stride + len(matrix) + first - in_cells
    lift = Lift(AxisMatrix(matrix[::spacing]), stride, spacing, -first, after)
    crops_all = min(lift.before, lift.after) <= -in_cells
    return lift if not crops_all and np.allclose(toeplitz, taps, rtol=0, atol=1e-12) else None


def apply_axes(x: Tensor, rows: AxisMatrix, columns: AxisMatrix) -> Tensor:
    """Return rows · x · columnsᵀ over the last two axes of x [N, C, H', W']; identities cost nothing."""
    if is_nhwc(x):
        n, c, h, w = x.shape
        x = x.permute(0, 2, 3, 1)
        if not rows.is_identity:
            x = (to_tensor(rows, x) @ x.reshape(n, h, w * c)).reshape(n, len(rows), w, c)
        if not columns.is_identity:
            x = to_tensor(columns, x) @ x
        return x.permute(0, 3, 1, 2)
    if not columns.is_identity:
        x = x @ to_tensor(columns, x).t()
    if not rows.is_identity:
        x = to_tensor(rows, x) @ x
    return x


def is_identity(matrix: Matrix) -> bool:
    """Tell whether a matrix is the identity."""
    if matrix.shape[-1] != matrix.shape[-2] or matrix[0, 0] != 1 or matrix[-1, -1] != 1:
        return False
    return bool((matrix == np.eye(len(matrix))).all())
