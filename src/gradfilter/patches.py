"""Pixel and patch geometry: pool, unpool, areas, tap and overlap matrices, lift.

Patches tile a map from its top-left corner; the last row and column may be partial. A *mean* is over the real pixels of a
patch, |I| is the number of real pixels of patch I. Everything here is a pure function; matrices are per axis, built once
per geometry with numpy and cached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]
Matrix = np.ndarray


def make_pair(value: int | Pair) -> Pair:
    """Return `value` as a pair `(h, w)`."""
    return value if isinstance(value, tuple) else (value, value)


def map_size(x: Tensor) -> Pair:
    """Return the spatial size `(h, w)` of x [N, C, H, W]."""
    return x.shape[-2], x.shape[-1]


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
            return min(self.patch[0], size[0]), min(self.patch[1], size[1])
        assert self.grid is not None
        assert self.image is not None
        h, w = (grid_patch(n, g, s) for n, g, s in zip(size, self.grid, self.image, strict=True))
        return h, w


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


def count_dtype(patch: Pair) -> torch.dtype:
    """Return the smallest integers that count the pixels of a patch."""
    area = patch[0] * patch[1]
    return torch.uint8 if area <= 255 else torch.int16 if area <= 32767 else torch.int32


def count_cells(size: Pair, patch: Pair) -> Pair:
    """Return how many patches, partial ones included, cover a map of `size`."""
    return -(-size[0] // patch[0]), -(-size[1] // patch[1])


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


def make_areas(size: Pair, patch: Pair, like: Tensor) -> Tensor | float:
    """Return |I| for every patch [H', W'] on the device of `like`, or one number where all patches are whole.

    In single precision at least: half precision counts to 2048 or to 256 only.
    """
    areas = find_areas(size, patch)
    if isinstance(areas, float):
        return areas
    dtype = like.dtype if like.element_size() > 2 else torch.float32
    return torch.from_numpy(areas).to(device=like.device, dtype=dtype)


def to_tensor(matrix: Matrix, like: Tensor) -> Tensor:
    """Return a constant as a tensor with the dtype and device of `like`."""
    return torch.from_numpy(matrix).to(device=like.device, dtype=like.dtype)


def pool_mean(x: Tensor, patch: Pair) -> Tensor:
    """Return the mean of x [N, C, H, W] over the real pixels of each patch."""
    if patch == (1, 1):
        return x
    return F.avg_pool2d(x, patch, patch, ceil_mode=True, count_include_pad=False)


def pool_sum(x: Tensor, patch: Pair) -> Tensor:
    """Return the sum of x [N, C, H, W] over the real pixels of each patch."""
    if patch == (1, 1):
        return x
    return F.avg_pool2d(x, patch, patch, ceil_mode=True, divisor_override=1)


def unpool(x_bar: Tensor, patch: Pair, size: Pair) -> Tensor:
    """Repeat each cell of x_bar [N, C, H', W'] over its patch, up to a map of `size`."""
    if patch == (1, 1):
        return x_bar
    h, w = x_bar.shape[-2:]
    full = x_bar[..., :, None, :, None].expand(*x_bar.shape[:2], h, patch[0], w, patch[1])
    return full.reshape(*x_bar.shape[:2], h * patch[0], w * patch[1])[..., : size[0], : size[1]]


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


@lru_cache(maxsize=4096)
def overlap_axis(size: int, in_patch: int, out_patch: int) -> Matrix:
    """Return the regrid matrix [out cells, in cells]: the share of output patch I that lies in input patch J."""
    return project_axis(np.arange(size)[:, None], size, in_patch, out_patch)[0]


PAD_MODES = {"constant": None, "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@lru_cache(maxsize=4096)
def pad_axis(size: int, before: int, after: int, mode: str, in_patch: int, out_patch: int) -> Matrix:
    """Return the coarse matrix [out cells, in cells] of padding one axis, in any of torch's modes.

    A negative amount crops. Padding with a constant reads no pixel there.
    """
    source = np.arange(size)[max(0, -before) : size - max(0, -after)]
    grow = (max(0, before), max(0, after))
    numpy_mode = PAD_MODES[mode]
    source = np.pad(source, grow, constant_values=-1) if numpy_mode is None else np.pad(source, grow, mode=numpy_mode)  # type: ignore[call-overload]
    return project_axis(source[:, None], size, in_patch, out_patch)[0]


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution between two tiled maps."""

    kernel: int
    stride: int
    dilation: int
    before: int
    in_size: int
    out_size: int
    in_patch: int
    out_patch: int


@dataclass(frozen=True)
class Lift:
    """The coarse twin of one axis as an ordinary convolution.

    Attributes:
        matrix: A [coarse taps, taps]; the coarse kernel of one axis is A times the kernel.
        stride: Coarse stride s·ro/ri.
        before: Coarse zero padding before the first cell.
        after: Coarse padding after the last cell; negative where the last cells are not read.
    """

    matrix: Matrix
    stride: int
    before: int
    after: int

    @property
    def is_identity(self) -> bool:
        """Tell whether the coarse kernel is the kernel itself."""
        return is_identity(self.matrix)

    @property
    def is_symmetric(self) -> bool:
        """Tell whether padding both sides alike reads the same cells: a longer far side is cut off by the stride."""
        return self.before >= 0 and 0 <= self.before - self.after < self.stride


def tap_source(axis: Axis) -> Matrix:
    """Return which input pixel each tap reads for each output pixel [out_size, kernel], -1 in the padding."""
    position = axis.stride * np.arange(axis.out_size)[:, None] + axis.dilation * np.arange(axis.kernel) - axis.before
    return np.where((position >= 0) & (position < axis.in_size), position, -1)


@lru_cache(maxsize=4096)
def tap_matrices(axis: Axis) -> Matrix:
    """Return T [taps, out cells, in cells], the Galerkin projection of each tap onto patch-constant maps.

    T_u[I, J] = (1/|I|) · #{ i in I : s·i + d·u − p in J, a real pixel }.
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


@lru_cache(maxsize=4096)
def lift_axis(axis: Axis) -> Lift | None:
    """Return the axis as an ordinary coarse convolution, or `None` where partial patches make it irregular.

    A[δ, u] = (1/ro) · #{ i in [0, ro) : ⌊(s·i + d·u − p)/ri⌋ = δ }, and T_u[I, J] = A[J − I·s·ro/ri, u] in every row.
    """
    span = axis.stride * axis.out_patch
    if span % axis.in_patch:
        return None
    stride = span // axis.in_patch
    position = axis.stride * np.arange(axis.out_patch)[:, None] + axis.dilation * np.arange(axis.kernel) - axis.before
    delta = position // axis.in_patch
    first, last = int(delta.min()), int(delta.max())
    matrix = np.zeros((last - first + 1, axis.kernel))
    np.add.at(matrix, (delta - first, np.broadcast_to(np.arange(axis.kernel), delta.shape)), 1.0 / axis.out_patch)

    taps = tap_matrices(axis)
    out_cells, in_cells = taps.shape[1:]
    column = np.arange(in_cells) - stride * np.arange(out_cells)[:, None] - first
    inside = (column >= 0) & (column < len(matrix))
    toeplitz = np.where(inside, matrix[np.clip(column, 0, len(matrix) - 1)].transpose(2, 0, 1), 0.0)
    lift = Lift(matrix, stride, -first, (out_cells - 1) * stride + len(matrix) + first - in_cells)
    crops_all = min(lift.before, lift.after) <= -in_cells
    return lift if not crops_all and np.allclose(toeplitz, taps, rtol=0, atol=1e-12) else None


def apply_axes(x: Tensor, rows: Matrix, columns: Matrix) -> Tensor:
    """Return rows · x · columnsᵀ over the last two axes of x [N, C, H', W']; identities cost nothing."""
    if not is_identity(columns):
        x = x @ to_tensor(columns.T, x)
    if not is_identity(rows):
        x = to_tensor(rows, x) @ x
    return x


def is_identity(matrix: Matrix) -> bool:
    """Tell whether a matrix is the identity."""
    if matrix.shape[-1] != matrix.shape[-2] or matrix[0, 0] != 1 or matrix[-1, -1] != 1:
        return False
    return bool((matrix == np.eye(len(matrix))).all())
