"""Linear maps along one axis between tiled maps, as matrices that act on cells.

Matrices are built once per geometry with numpy and cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from gradfilter.errors import InputError
from gradfilter.geometry.tiling import LIMIT, Matrix, axis_areas


@dataclass(frozen=True, eq=False)
class AxisMatrix:
    """A matrix that acts on one axis of a map.

    Compared by identity: the functions that make them are cached, so `to_tensor` finds the tensor of each again.
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


def is_identity(matrix: Matrix) -> bool:
    """Tell whether a matrix is the identity."""
    if matrix.shape[-1] != matrix.shape[-2] or matrix[0, 0] != 1 or matrix[-1, -1] != 1:
        return False
    return bool((matrix == np.eye(len(matrix))).all())


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

    def __post_init__(self) -> None:
        """Refuse sizes that no convolution has."""
        for name in ("kernel", "stride", "dilation", "in_size", "out_size", "in_patch", "out_patch"):
            n = getattr(self, name)
            if not isinstance(n, int) or not 1 <= n < LIMIT:
                raise InputError(f"one axis of a convolution got {name} = {n!r}. Give at least 1, and less than {LIMIT}.")
        if not isinstance(self.before, int) or not -LIMIT < self.before < LIMIT:
            raise InputError(f"one axis of a convolution got before = {self.before!r}. Give a number of zeros below {LIMIT}.")


@dataclass(frozen=True)
class Lift:
    """One axis of the coarse twin of a convolution, as an ordinary convolution of cells.

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
