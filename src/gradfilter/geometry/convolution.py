"""The geometry of a convolution between tiled maps, and the tables that the gradients of its coarse twin need.

The coarse twin is the same convolution between maps that are constant in each patch: a linear map from input cells to output
cells (docs/operators.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache

import numpy as np

from gradfilter.errors import InputError
from gradfilter.geometry import axes as along
from gradfilter.geometry.axes import Axis, AxisMatrix, Lift
from gradfilter.geometry.tiling import Matrix, Pair, count_cells

SMALL = 64
"""Up to so many cells, both axes of the tap matrices fit in one matrix."""


@dataclass(frozen=True, eq=False)
class AxisPairs:
    """Along one axis, the pairs of an input cell and an output cell that reads it, as a sparse matrix in compressed rows.

    A pair has a coefficient per tap, T_u[output cell, input cell]. Few of these rows of coefficients differ: they are numbered.

    Attributes:
        start: Where the pairs of each input cell begin in `pairs`, and where the last ones end [in cells + 1].
        pairs: Output cell, and number of the row of coefficients, of each pair [pairs, 2], ordered by input cell.
        out: The number of output cells.
        coefficients: The number of rows of coefficients that differ.
    """

    start: np.ndarray
    pairs: np.ndarray
    out: int
    coefficients: int

    @cached_property
    def fields(self) -> tuple[int, ...]:
        """The fields of `gf_pair_axis`."""
        return self.start.ctypes.data, self.pairs.ctypes.data, len(self.start) - 1, self.out, self.coefficients


TILE = np.dtype([*((name, "i4") for name in ("out", "outs", "in", "seen", "positions", "plain")), ("mix", "f4", (4, 4))])
"""A tile, as the C library reads it."""


@dataclass(frozen=True, eq=False)
class AxisTiles:
    """The tiles of one axis: one or two output cells each, and the input cells that these read.

    Attributes:
        tiles: An array of `TILE`.
        taps: What becomes of the kernel's three taps [4, 3].
        cells: The number of input and of output cells.
    """

    tiles: np.ndarray
    taps: np.ndarray
    cells: tuple[int, int]

    @cached_property
    def fields(self) -> tuple[int | float, ...]:
        """The fields of `gf_tile_axis`."""
        return self.tiles.ctypes.data, len(self.tiles), *self.cells, *self.taps.flat


@dataclass(frozen=True, eq=False)
class Geometry:
    """The shape of one convolution between two tiled maps, everything but batch, channels and weights.

    Compared by identity: `make_geometry` makes each once.
    """

    rows: Axis
    columns: Axis
    groups: int
    lumped: bool

    def __post_init__(self) -> None:
        """Refuse what is no axis, and a number of groups that no convolution has."""
        if not (isinstance(self.rows, Axis) and isinstance(self.columns, Axis)):
            raise InputError(f"a convolution got rows = {self.rows!r}, columns = {self.columns!r}. Give an Axis each.")
        if not isinstance(self.groups, int) or self.groups < 1:
            raise InputError(f"a convolution got groups = {self.groups!r}. Give at least 1.")

    @property
    def numbers(self) -> tuple[int, ...]:
        """All attributes, one after the other."""
        return *(int(n) for axis in (self.rows, self.columns) for n in astuple(axis)), self.groups, int(self.lumped)

    @cached_property
    def out_patch(self) -> Pair:
        """The patch of the output."""
        return self.rows.out_patch, self.columns.out_patch

    @cached_property
    def out_cells(self) -> Pair:
        """The number of output patches."""
        return count_cells((self.rows.out_size, self.columns.out_size), self.out_patch)

    @property
    def is_transposed(self) -> bool:
        """Tell whether this is a transposed convolution."""
        return self.rows.transposed

    @cached_property
    def is_pointwise(self) -> bool:
        """Tell whether each output pixel reads one real input pixel: a 1×1 kernel without padding."""
        return not self.is_transposed and all(
            a.kernel == 1 and a.before == 0 and a.stride * (a.out_size - 1) < a.in_size for a in (self.rows, self.columns)
        )

    @cached_property
    def taps(self) -> tuple[Matrix, Matrix]:
        """The tap matrices per axis [taps, out cells, in cells]; the lumped kernel has one tap."""
        make = along.lumped_matrix if self.lumped else along.tap_matrices
        return make(self.rows), make(self.columns)

    @cached_property
    def is_single_tap(self) -> bool:
        """Tell whether each output cell reads one value per channel: the input is then kept as those values."""
        return self.is_pointwise or self.lumped

    @cached_property
    def is_aligned(self) -> bool:
        """Tell whether, with one tap, output cells are input cells."""
        return all(matrix.is_identity for matrix in self.stacked)

    @cached_property
    def lifts(self) -> tuple[Lift, Lift] | None:
        """The coarse twin as an ordinary convolution, where partial patches do not forbid it."""
        rows, columns = along.lift_axis(self.rows), along.lift_axis(self.columns)
        return None if rows is None or columns is None else (rows, columns)

    @cached_property
    def in_cells(self) -> Pair:
        """The number of input patches."""
        return count_cells((self.rows.in_size, self.columns.in_size), (self.rows.in_patch, self.columns.in_patch))

    @cached_property
    def is_small(self) -> bool:
        """Tell whether the maps have few cells."""
        return max(self.in_cells[0] * self.in_cells[1], self.out_cells[0] * self.out_cells[1]) <= SMALL

    @cached_property
    def joint_taps(self) -> Matrix:
        """Both axes of the tap matrices in one: [out cells, taps, in cells], rows and columns flattened."""
        rows, columns = self.taps
        joint = np.einsum("uij,vkl->ikuvjl", rows, columns)
        return joint.reshape(rows.shape[1] * columns.shape[1], len(rows) * len(columns), -1)

    @cached_property
    def pairs(self) -> tuple[AxisPairs, AxisPairs]:
        """Per axis the pairs of an input cell and an output cell that reads it, each with its row of `coefficients`."""
        return find_pairs(self.taps[0])[0], find_pairs(self.taps[1])[0]

    @cached_property
    def coefficients(self) -> Matrix:
        """The weight of each tap in the coefficient of a pair of cells, both axes in one: [coefficients, taps]."""
        rows, columns = (find_pairs(taps)[1] for taps in self.taps)
        return np.kron(rows, columns)

    @cached_property
    def mix(self) -> np.ndarray:
        """The `coefficients` as the library reads them."""
        return np.ascontiguousarray(self.coefficients, np.float32)

    @cached_property
    def tiles(self) -> tuple[AxisTiles, AxisTiles] | None:
        """The tiles of Winograd's F(2×2, 3×3) per axis, where the kernel has three taps and its coarse twin two or three."""
        rows, columns = find_tiles(self.rows), find_tiles(self.columns)
        return None if rows is None or columns is None else (rows, columns)

    @cached_property
    def stacked(self) -> tuple[AxisMatrix, AxisMatrix]:
        """The tap matrices with taps and output cells on one axis, [taps · out cells, in cells]."""
        rows, columns = (AxisMatrix(taps.reshape(-1, taps.shape[-1])) for taps in self.taps)
        return rows, columns


make_geometry = lru_cache(maxsize=4096)(Geometry)


def geometry_from(numbers: Sequence[int]) -> Geometry:
    """Return the geometry with these `numbers`."""
    *axes, groups, lumped = numbers
    rows, columns = (Axis(*n[:-1], transposed=bool(n[-1])) for n in (axes[:9], axes[9:]))
    return make_geometry(rows, columns, groups, bool(lumped))


def find_pairs(taps: Matrix) -> tuple[AxisPairs, Matrix]:
    """Return the pairs of cells with an entry in T [taps, out cells, in cells], and their distinct rows of coefficients."""
    in_cell, out_cell = np.nonzero(taps.any(0).T)
    distinct, number = np.unique(taps[:, out_cell, in_cell].T, axis=0, return_inverse=True)
    pairs = np.column_stack([out_cell, number.reshape(-1)]).astype(np.int32)
    start = np.searchsorted(in_cell, np.arange(taps.shape[2] + 1)).astype(np.int32)
    return AxisPairs(start, pairs, taps.shape[1], len(distinct)), distinct


TRANSFORM = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
"""What F(2×2, 3×3) makes of three taps."""
MOST_MIXED = 8
"""The largest weight in such a sum, pixels of a patch by those of a partial one: rounding errors grow by as much."""


@lru_cache(maxsize=4096)
def find_tiles(axis: Axis) -> AxisTiles | None:
    """Return the tiles of an axis, or `None` where its coarse twin is not a kernel of two or three taps without a stride.

    Where all patches are whole, each output cell applies the lifted kernel A to three neighbouring input cells. Next to a
    partial patch it applies the same A to three weighted sums of input cells instead, the rows of E:
    T_u[I, J] = Σ_δ A[δ, u] E[I, δ, J]. E is found by solving for it. `cut_tiles` groups output cells into tiles, and each tile
    must read no more than four neighbouring input cells, because that is what the library loads for one.

    A coarse twin of two taps, as behind a stride that patches follow, has a third one of zeros. It may read anything: the next
    cell's second sum lets two cells share a tile. Of the products of a tile, the fourth is 0 then.
    """
    lifted = along.lift_patch(axis)
    if lifted is None or lifted[0].shape not in ((2, 3), (3, 3)) or lifted[2] != 1:
        return None
    matrix, taps = lifted[0], along.tap_matrices(axis)
    if np.linalg.det(matrix @ matrix.T) < 1e-12:
        return None
    out_cells, in_cells = taps.shape[1:]
    mixed = (np.linalg.pinv(matrix.T) @ taps.reshape(3, -1)).round(12)
    if not np.allclose(matrix.T @ mixed, taps.reshape(3, -1), rtol=0, atol=1e-9):
        return None
    mixed, positions_of_two = mixed.reshape(-1, out_cells, in_cells).transpose(1, 0, 2), 4
    if len(matrix) == 2:
        further = np.concatenate([mixed[1:, 1:], np.zeros((1, 1, in_cells))])
        mixed, positions_of_two = np.concatenate([mixed, further], 1), 3
        matrix = np.concatenate([matrix, np.zeros((1, 3))])
    tiles, seen = [], 0
    for out, outs, positions, mix in cut_tiles(mixed, positions_of_two):
        read = np.flatnonzero(mix.any(0))
        first = min(read.min(initial=seen), max(0, in_cells - 4))
        if first > seen or read.max(initial=first) >= first + 4 or np.abs(mix).max() > MOST_MIXED:
            return None  # cells that nobody reads, or far ones
        window = np.pad(mix, ((0, 0), (0, 4)))[:, first : first + 4]
        tiles.append((out, outs, first, seen, positions, first + 4 <= in_cells and along.is_identity(window), window))
        seen = max(seen, min(first + 4, in_cells))
    return AxisTiles(np.array(tiles, TILE), TRANSFORM @ matrix, (in_cells, out_cells)) if seen == in_cells else None


def cut_tiles(mixed: Matrix, positions_of_two: int = 4) -> list[tuple[int, int, int, Matrix]]:
    """Return tiles of one or two output cells, from the three weighted sums of input cells that each reads.

    Two output cells with one kernel of three taps read four values, v0 v1 v2 and v1 v2 v3: that takes four products by Winograd
    in place of six. So two cells share a tile where the second's sums are the first's, shifted by one. It is enough that its
    second sum is the first cell's third: where its first sum differs from the first cell's second, as next to a partial patch,
    a further tile of one product adds the difference, five products for two cells.

    Args:
        mixed: The sums E [out cells, 3, in cells].
        positions_of_two: The products of a tile of two cells: 3 where the third tap is 0.

    Returns:
        For each tile its first output cell, how many it has, the number of its products and the sums v [4, in cells].
    """
    tiles, out = [], 0
    while out < len(mixed):
        mix = np.zeros((4, mixed.shape[2]))
        mix[:3] = mixed[out]
        outs = 2 if out + 1 < len(mixed) and np.array_equal(mixed[out, 2], mixed[out + 1, 1]) else 1
        if outs == 2:
            mix[3] = mixed[out + 1, 2]
        tiles.append((out, outs, positions_of_two if outs == 2 else 3, mix))
        rest = mixed[out + 1, 0] - mixed[out, 1] if outs == 2 else np.zeros(1)
        if rest.any():
            tiles.append((out + 1, 1, 1, np.concatenate([rest[None], np.zeros((3, len(rest)))])))
        out += outs
    few = max((positions for _, _, positions, _ in tiles if positions < 4), default=4)  # the library asks for one number
    return [(out, outs, few if positions < 4 else 4, mix) for out, outs, positions, mix in tiles]
