"""How a map is cut into patches: sizes, areas, fixed patches and grids, and which axes of a tensor are rows and columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

Pair = tuple[int, int]
Matrix = np.ndarray
LIMIT = 1 << 31
"""What all sizes and distances stay below, so that no product of two of them overflows."""


def count_dtype(patch: Pair) -> torch.dtype:
    """Return the smallest integers that count the pixels of a patch."""
    area = patch[0] * patch[1]
    return torch.uint8 if area <= 255 else torch.int16 if area <= 32767 else torch.int32


def count_cells(size: Pair, patch: Pair) -> Pair:
    """Return how many patches, partial ones included, cover a map of `size`."""
    return -(-size[0] // patch[0]), -(-size[1] // patch[1])


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

    @property
    def numbers(self) -> tuple[int, ...]:
        """All attributes, one after the other."""
        return self.rows, self.columns, *(self.tokens or (0, 0)), self.prefix

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


def layout_from(numbers: Sequence[int]) -> Layout:
    """Return the layout with these `numbers`."""
    rows, columns, height, width, prefix = numbers
    return Layout(rows, columns, (height, width) if height else None, prefix)


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
