"""Tucker decompositions: a tensor as a small core and a factor per mode.

x ≈ core ×₁ U₁ ×₂ U₂ … A *mode* is an axis; the *unfolding* of a mode is the matrix with that axis as its rows. Its squared
singular values are the energies of the mode, and the energy that a factor U finds is |Uᵀ·unfolding|².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ranks = tuple[int, ...]
LEAST_RANDOM = 192
"""Modes shorter than this are decomposed whole: there is nothing to gain from random directions."""
SHARE_RANDOM = 8
"""Random directions are tried for an eighth of a mode: if they do not hold the energy, it is decomposed whole."""


@dataclass(frozen=True)
class Tucker:
    """A tensor in compressed form.

    Attributes:
        core: The core, as long in each mode as its rank.
        factors: For each mode an orthonormal factor [length, rank]; None for a mode that is whole.
    """

    core: Tensor
    factors: tuple[Tensor | None, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The core and the factors."""
        return self.core, *(factor for factor in self.factors if factor is not None)

    def spell(self, labels: str) -> tuple[list[str], list[Tensor]]:
        """Return core and factors as the operands of a contraction: their labels, and they.

        Args:
            labels: Lower-case labels of the modes; that of a compressed mode is on its factor, its capital on the core.
        """
        has = [factor is not None for factor in self.factors]
        core = "".join(label.upper() if h else label for label, h in zip(labels, has, strict=True))
        return [core, *(label + label.upper() for label, h in zip(labels, has, strict=True) if h)], list(self.tensors)

    def expand(self, modes: Sequence[int] | None = None) -> Tucker:
        """Return the same with some modes, or all, whole again."""
        core, factors = self.core, list(self.factors)
        for mode in range(core.dim()) if modes is None else modes:
            if (factor := factors[mode]) is not None:
                core, factors[mode] = times(core, factor.t(), mode), None
        return Tucker(core, tuple(factors))


def widen(x: Tensor) -> Tensor:
    """Return x in single precision at least."""
    return x if x.element_size() > 2 else x.float()


def find_memory_order(x: Tensor) -> list[int]:
    """Return the axes in the order in which they lie in memory: a channels-last map has its channels last."""
    order = sorted(range(x.dim()), key=lambda axis: -x.stride(axis))
    return order if x.permute(order).is_contiguous() else list(range(x.dim()))


def to_slabs(x: Tensor, mode: int, order: Sequence[int]) -> Tensor:
    """Return x as [what comes before a mode, the mode, what comes after it] in an order of axes: no copy in that of memory."""
    place = order.index(mode)
    shape = [x.shape[axis] for axis in order]
    return x.permute(*order).reshape(math.prod(shape[:place]), shape[place], math.prod(shape[place + 1 :]))


def times(x: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """Return x with each fibre of a mode multiplied from the left by `matrix`ᵀ [length, new length]."""
    order = find_memory_order(x)
    slabs, matrix = to_slabs(x, mode, order), matrix.to(x.dtype)
    y = slabs.squeeze(2) @ matrix if slabs.shape[2] == 1 else matrix.t() @ slabs
    y = y.reshape([matrix.shape[1] if axis == mode else x.shape[axis] for axis in order])
    return y.permute([order.index(axis) for axis in range(x.dim())])


def correlate(x: Tensor, y: Tensor, mode: int) -> Tensor:
    """Return A·Bᵀ, A and B the unfoldings of a mode of x and of y, which differ in that mode at most.

    With few numbers before the mode, or few in it, slab by slab; else by unfolding, which copies.
    """
    order = find_memory_order(x)
    left, right = (to_slabs(widen(t), mode, order) for t in (x, y))
    if left.shape[2] == 1:
        return (right.squeeze(2).t() @ left.squeeze(2)).t()  # that way round: a few long rows are much faster
    if left.shape[0] == 1 or right.shape[1] <= left.shape[2]:
        return (left @ right.transpose(1, 2)).sum(0)
    return unfold(left, 1) @ unfold(right, 1).t()


def unfold(x: Tensor, mode: int) -> Tensor:
    """Return the unfolding of a mode [length, the rest]."""
    return x.movedim(mode, 0).reshape(x.shape[mode], -1)


def project(x: Tensor, factors: Sequence[Tensor | None]) -> Tucker:
    """Return x in given factors: core = x ×₁ U₁ᵀ ×₂ U₂ᵀ …, the mode that shrinks most first."""
    core = x
    shrink = {mode: factor.shape[1] / factor.shape[0] for mode, factor in enumerate(factors) if factor is not None}
    for mode in sorted(shrink, key=lambda mode: shrink[mode]):
        factor = factors[mode]
        assert factor is not None
        core = times(core, factor, mode)
    return Tucker(core.contiguous(), tuple(None if factor is None else factor.to(x.dtype) for factor in factors))


def count_numbers(shape: Sequence[int], ranks: Sequence[int]) -> int:
    """Return how many numbers a core and its factors are; a mode of full rank needs no factor."""
    return math.prod(ranks) + sum(r * d for r, d in zip(ranks, shape, strict=True) if r < d)


def find_rank(energies: Tensor, energy: float) -> int:
    """Return the smallest rank that finds a share of the energy, all of them for all of it.

    Args:
        energies: Of each direction, the largest first.
        energy: The share, in (0, 1].
    """
    if energy >= 1:  # a sum that reaches the total early by rounding must not drop any
        return len(energies)
    found = energies.clamp(min=0).cumsum(0)
    return min(int((found < energy * found[-1]).sum()) + 1, len(energies))


def decompose(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the energies and directions of a mode, the largest first, of the Gram matrix of its unfolding."""
    # In double precision: in single precision LAPACK's solver does not always converge where many energies are all but zero.
    energies, directions = torch.linalg.eigh(gram.double())
    return energies.flip(0), directions.flip(1).to(gram.dtype)


def find_energies(x: Tensor, mode: int) -> Tensor:
    """Return the energy of each direction of a mode, the largest first, in double precision as `decompose` does."""
    length, rest = x.shape[mode], x.numel() // x.shape[mode]
    matrix = unfold(widen(x), mode) if rest < length else None  # the smaller Gram matrix has all energies but zeros
    gram = correlate(x, x, mode) if matrix is None else matrix.t() @ matrix
    found = torch.linalg.eigvalsh(gram.double()).flip(0).clamp(min=0)
    return torch.cat([found, found.new_zeros(length - len(found))])


@lru_cache(maxsize=256)
def draw(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a random matrix, always the same one."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu").to(device=device, dtype=dtype)


def cut(directions: Tensor, rank: int) -> Tensor:
    """Return the first columns of a matrix in a storage of their own: a slice would hold all of it."""
    return directions[:, :rank].clone(memory_format=torch.contiguous_format)


def orthonormalise(matrix: Tensor) -> Tensor:
    """Return orthonormal columns of the same span, row by row in memory, as a checkpoint gives them back."""
    return torch.linalg.qr(matrix).Q.contiguous()


def iterate(x: Tensor, mode: int, start: Tensor) -> Tensor:
    """Return one step of subspace iteration: orthonormal columns that span A·(Aᵀ·U), A the unfolding of a mode."""
    x = widen(x)
    return orthonormalise(correlate(x, times(x, start, mode), mode))


def is_long(length: int, rest: int) -> bool:
    """Tell whether random directions are worth a try for a mode with so many numbers in each row of its unfolding."""
    return LEAST_RANDOM <= length <= SHARE_RANDOM * rest


def find_factor(x: Tensor, mode: int, energy: float) -> Tensor | None:
    """Return a factor [length, rank] that finds a share of the energy of a mode; None where that takes the whole mode.

    The rank is the smallest there is, from the eigenvalues of the Gram matrix of the unfolding A, or of AᵀA where that is the
    smaller one. On a long mode random directions are tried first (Halko, Martinsson and Tropp 2011, with one step of
    subspace iteration): the energy that they find is known exactly, so it never is less than was asked for; the rank may be a
    little above the smallest.
    """
    length = x.shape[mode]
    if energy >= 1 or length == 1:
        return None
    rest = x.numel() // length
    if is_long(length, rest):
        factor = try_random(x, mode, energy)
        if factor is not None:
            return factor
    if rest < length:
        matrix = unfold(widen(x), mode)
        energies, directions = decompose(matrix.t() @ matrix)
        return orthonormalise(matrix @ directions[:, : find_rank(energies, energy)])
    energies, directions = decompose(correlate(x, x, mode))
    rank = find_rank(energies, energy)
    return cut(directions, rank) if rank < length else None


def try_random(x: Tensor, mode: int, energy: float) -> Tensor | None:
    """Return a factor from an eighth as many random directions as a mode is long; None where these do not find the energy."""
    x, length = widen(x), x.shape[mode]
    factor = iterate(x, mode, draw(length, length // SHARE_RANDOM, x.device, x.dtype))
    within = times(x, factor, mode)
    energies, directions = decompose(correlate(within, within, mode))
    found = energies.clamp(min=0).cumsum(0)
    rank = int((found < energy * float(x.square().sum(dtype=torch.float64))).sum()) + 1
    return factor @ directions[:, :rank] if rank <= len(energies) else None


def expect_factor(x: Tensor, mode: int) -> None:
    """Run what `find_factor` runs on shapes alone, for those who count: of a long mode the random directions, which do."""
    length, rest = x.shape[mode], x.numel() // x.shape[mode]
    if is_long(length, rest):
        factor = iterate(x, mode, x.new_empty(length, length // SHARE_RANDOM))
        x = times(x, factor, mode)
        decompose(correlate(x, x, mode))
    elif length > 1:
        matrix = unfold(x, mode)
        decompose(matrix.t() @ matrix if rest < length else correlate(x, x, mode))


def list_ranks(shape: Sequence[int], numbers: int) -> NDArray[np.int64]:
    """Return ranks [modes, choices] whose core and factors are at most so many numbers, as large as can be in one mode.

    All ranks of all modes but the longest are there; that of the longest is then the largest that fits.
    """
    longest = int(np.argmax(shape))
    grid = np.meshgrid(*(np.arange(1, 2 if mode == longest else n + 1) for mode, n in enumerate(shape)), indexing="ij")
    ranks = np.stack([axis.reshape(-1) for axis in grid])
    volume = ranks.prod(0)
    rest = numbers - sum(np.where(ranks[m] < n, ranks[m] * n, 0) for m, n in enumerate(shape) if m != longest)
    length = shape[longest]
    largest = np.minimum(rest // (volume + length), length)
    ranks[longest] = np.where(volume * length <= rest, length, largest)  # whole, it needs no factor
    return ranks[:, ranks[longest] > 0]


def choose_ranks(energies: Sequence[NDArray[np.float64]], numbers: int) -> Ranks | None:
    """Return the ranks that lose least energy, summed over modes, while core and factors are at most so many numbers.

    The sum bounds the error of the decomposition: |x − x̂|² ≤ Σ over modes of what is lost (De Lathauwer 2000). Exactly: all
    ranks of all modes but the longest are tried, with the largest of the longest that fits.

    Args:
        energies: For each mode, the energy of each direction, the largest first.
        numbers: How many numbers there may be.

    Returns:
        A rank for each mode; None where even ranks of one do not fit.
    """
    ranks = list_ranks([len(values) for values in energies], numbers)
    lost = [np.append(np.cumsum(values[::-1])[::-1][1:], 0.0) for values in energies]  # by rank, from one
    loss = sum(values[r - 1] for values, r in zip(lost, ranks, strict=True))
    if not ranks.shape[1] or not np.isfinite(loss).any():
        return None
    return tuple(ranks[:, int(np.argmin(loss))].tolist())


@lru_cache(maxsize=4096)
def find_most_ranks(shape: tuple[int, ...], whole: tuple[int, ...], numbers: int) -> Ranks | None:
    """Return the ranks, of all that `choose_ranks` may return, whose core and factors are the most numbers.

    Args:
        shape: The length of each mode.
        whole: The modes that are not compressed.
        numbers: How many numbers there may be.
    """
    ranks = list_ranks(shape, numbers)
    ranks = ranks[:, np.all([ranks[mode] == shape[mode] for mode in whole], axis=0)] if whole else ranks
    if not ranks.shape[1]:
        return None
    count = ranks.prod(0) + sum(np.where(r < n, r * n, 0) for r, n in zip(ranks, shape, strict=True))
    return tuple(ranks[:, int(np.argmax(count))].tolist())
