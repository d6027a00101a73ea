"""Keeps that hold a tensor as a core and a factor per mode, and the two whose ranks every batch decides: SVD and HOSVD."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradfilter.errors import PlanError
from gradfilter.keep.base import Keep, Kept, State, hold
from gradfilter.keep.precision import FULL, Int8
from gradfilter.keep.tucker import (
    Tucker,
    expect_factor,
    find_factor,
    project,
)


@dataclass(frozen=True)
class LowRank(Keep):
    """What keeps of low rank share."""

    def compress(self, x: Tensor, state: State, channels: int = 1) -> Kept:
        if x.numel() == 0 or not (x.is_meta or has_squares(x)):
            return hold(x)  # what has no decomposition is passed on as it is: not a number, to where it can be seen
        try:
            with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):  # energies need their precision
                found = self.decompose(x, state)
        except torch.linalg.LinAlgError:  # it has one, but nobody finds it: no reason to end a run
            return hold(x)
        if found is None and x.is_meta and not self.is_lossless:
            return hold(torch.empty_like(x))  # at most: not x itself, which other layers may hold too, as factors are not
        if found is None or sum(tensor.numel() for tensor in found.tensors) >= x.numel():
            return hold(x)
        return Kept(found.tensors, Reassemble(tuple(factor is not None for factor in found.factors)))

    @abstractmethod
    def decompose(self, x: Tensor, state: State) -> Tucker | None:
        """Return x in compressed form; None for as it is."""

    @property
    @abstractmethod
    def is_lossless(self) -> bool:
        """Whether all energy is kept."""

    @property
    def around(self) -> Keep:
        return FULL if self.is_lossless else Int8(stochastic=False)


def has_squares(x: Tensor) -> bool:
    """Tell whether the squares of x, and their sum, neither overflow nor vanish, but where x is zero."""
    low, high = (float(value) for value in torch.aminmax(x))
    info = torch.finfo(x.dtype if x.element_size() > 2 else torch.float32)
    square = max(-low, high) * max(-low, high)
    return square == 0 == low == high or info.tiny / info.eps <= square <= info.max / x.numel()


@dataclass(frozen=True)
class Reassemble:
    """Open a tensor that is held as a core and factors.

    Attributes:
        has_factor: For each mode, whether it has one.
    """

    has_factor: tuple[bool, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> Tucker:
        core, *factors = tensors
        return Tucker(core, tuple(factors.pop(0) if has else None for has in self.has_factor))


def check_energy(name: str, energy: Any) -> float:
    """Return a share of the energy, checked."""
    if isinstance(energy, bool) or not isinstance(energy, int | float) or not 0 < energy <= 1:
        raise PlanError(f"{name} got energy={energy!r}. Give the share of the energy to keep, above 0 and up to 1.")
    return float(energy)


@dataclass(frozen=True)
class HOSVD(LowRank):
    """Hold core and factors of the higher-order singular value decomposition that keeps a share of the energy in each mode.

    Equation: x̂ = x ×₁ U₁U₁ᵀ ×₂ U₂U₂ᵀ …, U_k the leading left singular vectors of the unfolding of mode k, the fewest with
    Σσ² ≥ ε·Σσ² (HOSVD_ε, "Activation Map Compression through Tensor Decomposition", NeurIPS 2024). So
    |x − x̂|² ≤ (number of modes)·(1 − ε)·|x|², and |gw − ĝw| ≤ |G|·|x − x̂| for a 1×1 kernel or a Linear layer; with K taps √K
    times that at patch 1, and a little more at the rim where the last patch of a map is a partial one.
    Cost: Π ranks + Σ rank·length numbers, those of `Full` at most; forward a Gram matrix per mode, gw from core and factors.
    Exact when: ε is 1: all ranks are kept.

    Attributes:
        energy: ε.
    """

    energy: float
    name = "hosvd"

    def __post_init__(self) -> None:
        """Check the energy."""
        object.__setattr__(self, "energy", check_energy(type(self).__name__, self.energy))

    @property
    def is_lossless(self) -> bool:
        return self.energy == 1

    def find_modes(self, x: Tensor) -> Sequence[int]:
        """Return the modes that are compressed."""
        return range(x.dim())

    def decompose(self, x: Tensor, state: State) -> Tucker | None:
        if x.is_meta:
            for mode in self.find_modes(x) if self.energy < 1 else ():
                expect_factor(x, mode)
            return None
        modes = self.find_modes(x)
        return project(x, [find_factor(x, mode, self.energy) if mode in modes else None for mode in range(x.dim())])

    @property
    def options(self) -> str:
        return repr(self.energy)

    @classmethod
    def from_options(cls, text: str) -> Keep:
        try:
            return cls(float(text))
        except ValueError as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"keep {cls.name!r} got {text!r}. Give the share of the energy to keep, '{cls.name}:0.8'."
            ) from error


@dataclass(frozen=True)
class SVD(HOSVD):
    """Hold the singular value decomposition of the images' matrix [N, the rest] that keeps a share of the energy.

    Equation: x̂ = U·Uᵀ·x, U the leading left singular vectors over the batch, the fewest with Σσ² ≥ ε·Σσ² (SVD_ε of the HOSVD
    paper): |x − x̂|² ≤ (1 − ε)·|x|².
    Cost: rank·(N + numbers per image), those of `Full` at most; forward one Gram matrix [N, N].
    Exact when: ε is 1.
    """

    name = "svd"

    def find_modes(self, x: Tensor) -> Sequence[int]:
        return (0,)
