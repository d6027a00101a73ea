"""Areas, matrices and tables of a geometry as tensors: each made once per dtype and device.

On another device than a CPU each is a copy that the host waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gradfilter.geometry.axes import AxisMatrix, is_identity
from gradfilter.geometry.convolution import Geometry
from gradfilter.geometry.tiling import MAP, Layout, Pair, count_cells, find_areas
from gradfilter.geometry.windows import Windows
from gradfilter.ops.native.library import RECORDING

Made = TypeVar("Made")


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
        if RECORDING.note is not None:  # where nothing is computed, but constants have to be there
            with _disable_current_modes():
                return hold(key, like.dtype, like.device)
        return (hold if can_hold(like) else make)(key, like.dtype, like.device)

    return find


def make_areas(size: Pair, patch: Pair, like: Tensor, layout: Layout = MAP) -> Tensor | float:
    """Return |I| for every patch, to act on `like` in its layout, or one number where all patches are whole.

    In single precision at least: half precision counts to 2048 or to 256 only.
    """
    areas = find_areas(size, patch)
    if isinstance(areas, float) and not layout.prefix:
        return areas
    return lay_areas((size, patch, layout, like.dim()), like)


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


@constant
def to_tensor(matrix: AxisMatrix, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix as a tensor."""
    return torch.tensor(matrix.values, dtype=dtype, device=device)


@constant
def find_taps(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the tap matrices per axis, transposed [in cells, out cells]; `None` for an identity."""
    rows, columns = (
        [None if is_identity(tap) else torch.tensor(tap.T, dtype=dtype, device=device) for tap in taps]
        for taps in geometry.taps
    )
    return rows, columns


@constant
def find_joint_taps(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return both axes of the tap matrices in one [out cells, taps, in cells]."""
    return torch.tensor(geometry.joint_taps, dtype=dtype, device=device)


@constant
def find_target(windows: Windows, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the input cell of each (output cell, place in reach), flat [out cells · reach]."""
    h, w = (
        np.minimum(first[:, None] + np.arange(reach), cells - 1)
        for first, reach, cells in zip(windows.first, windows.reach, windows.in_cells, strict=True)
    )
    flat = h[:, None, :, None] * windows.in_cells[1] + w[None, :, None, :]
    return torch.tensor(flat.reshape(-1), device=device)


@constant
def find_first(windows: Windows, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return per axis, for each output pixel, the first input cell that the windows of its cell reach."""
    rows, columns = (
        torch.tensor(np.repeat(first, min(patch, size))[:size], device=device)
        for first, patch, size in zip(windows.first, windows.out_patch, windows.size, strict=True)
    )
    return rows, columns


@constant
def find_lanes(windows: Windows, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a factor for each row and each column of the input, to count winners of all cells in reach in one number.

    The product of both factors of a pixel is a power of two, 2^(bits·lane), with one lane per cell in reach. A sum of such
    numbers over the winners of an output patch holds in each lane, `bits` wide, how many winners its cell has. Example: a reach
    of (1, 2) and 3 bits. Winners in the left cell add 2^0 = 1, those in the right one 2^3 = 8. Two on the left and four on the
    right add up to 34 = 0b100_010.

    The lane of a cell is its row and column modulo the reach, which differ for all cells in reach of one output cell. Double
    precision where single does not hold that many bits.
    """
    (over, across), (high, wide), bits = windows.in_patch, windows.reach, windows.bits
    rows = np.arange(-(-windows.end // windows.in_size[1])) // over % high * wide
    columns = np.arange(windows.in_size[1]) // across % wide
    precision = torch.float64 if high * wide * bits > SINGLE else torch.float32
    down, along = (torch.tensor(2.0 ** (bits * lane), dtype=precision, device=device) for lane in (rows, columns))
    return down, along


@constant
def find_shifts(windows: Windows, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return where the bits of each cell in reach of each output cell begin [H', W', reach]."""
    h, w = ((first[:, None] + np.arange(n)) % n for first, n in zip(windows.first, windows.reach, strict=True))
    shift = windows.bits * (h[:, None, :, None] * windows.reach[1] + w[None, :, None, :])
    return torch.tensor(shift.reshape(len(h), len(w), -1), device=device)


SINGLE, DOUBLE = 24, 53
"""The bits of whole numbers that each precision holds."""
