"""Keeps that hold a tensor as a core and a factor per mode: SVD, HOSVD, Subspace, Fixed."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradfilter.errors import BudgetError, InputError, PlanError
from gradfilter.keep.base import Keep, Kept, State, hold
from gradfilter.keep.precision import FULL, Int8
from gradfilter.keep.tucker import (
    Ranks,
    Tucker,
    choose_ranks,
    count_numbers,
    decompose,
    draw,
    find_factor,
    find_rank,
    iterate,
    project,
    times,
    unfold,
)
from gradfilter.units import parse_amount

RANKS = re.compile(r"\d+(x\d+)*")
RANKS_CHOSEN = "ranks"


@dataclass(frozen=True)
class LowRank(Keep):
    """What keeps of low rank share."""

    def compress(self, x: Tensor, state: State, channels: int = 1) -> Kept:
        if x.numel() == 0 or not (x.is_meta or bool(torch.isfinite(x.sum()))):
            return hold(x)  # what has no decomposition is passed on as it is: not a number, to where it can be seen
        found = self.decompose(x, state)
        if found is None or sum(tensor.numel() for tensor in found.tensors) >= x.numel():
            return hold(x)
        return Kept(found.tensors, Reassemble(tuple(factor is not None for factor in found.factors)))

    @abstractmethod
    def decompose(self, x: Tensor, state: State) -> Tucker | None:
        """Return x in compressed form; None for as it is."""

    @property
    def around(self) -> Keep:
        return FULL if getattr(self, "energy", None) == 1 else Int8(stochastic=False)


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
    times that.
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

    def find_modes(self, x: Tensor) -> Sequence[int]:
        """Return the modes that are compressed."""
        return range(x.dim())

    def decompose(self, x: Tensor, state: State) -> Tucker | None:
        if x.is_meta:
            for mode in self.find_modes(x) if self.energy < 1 else ():
                decompose(unfold(x, mode) @ unfold(x, mode).t())  # for those who count
            return None
        modes = self.find_modes(x)
        return project(x, [find_factor(x, mode, self.energy) if mode in modes else None for mode in range(x.dim())])

    @property
    def options(self) -> str:
        return f"{self.energy:g}"

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


@dataclass(frozen=True)
class Sized(LowRank):
    """What keeps share whose ranks are chosen once: given, or from the spectra of the first batch.

    Attributes:
        rank: Rank of each mode, or one for all; never more than a mode is long.
        energy: Share of the energy that each mode is to keep, of the first batch.
        memory: Bytes that core and factors may take, "64KB": of all ranks that fit, those that lose least energy.
    """

    rank: int | Ranks | None = None
    energy: float | None = None
    memory: str | float | None = None

    def __post_init__(self) -> None:
        """Check that ranks are chosen one way."""
        name = type(self).__name__
        given = [key for key in ("rank", "energy", "memory") if getattr(self, key) is not None]
        if len(given) != 1:
            raise PlanError(f"{name} got {' and '.join(given) or 'no size'}. Give one of rank, energy and memory.")
        if self.energy is not None:
            object.__setattr__(self, "energy", check_energy(name, self.energy))
        if self.memory is not None:
            try:
                object.__setattr__(self, "memory", int(parse_amount("memory", self.memory)))
            except BudgetError as error:
                raise PlanError(f"{name}: {error}") from error
        if self.rank is not None:
            ranks = tuple(self.rank) if isinstance(self.rank, tuple | list) else (self.rank,)
            if not ranks or any(isinstance(r, bool) or not isinstance(r, int) or r < 1 for r in ranks):
                raise PlanError(f"{name} got rank={self.rank!r}. Give a whole number of at least 1, or one for each mode.")
            object.__setattr__(self, "rank", self.rank if isinstance(self.rank, int) else ranks)

    @property
    def size(self) -> str:
        """The size in one word."""
        if self.energy is not None:
            return repr(self.energy)
        if self.memory is not None:
            return f"{self.memory}B"
        return "x".join(map(str, self.rank)) if isinstance(self.rank, tuple) else str(self.rank)

    @classmethod
    def parse_size(cls, text: str) -> dict[str, Any]:
        """Return how a word chooses ranks: "8" and "8x32x3x3" are ranks, "0.8" an energy, "64KB" a memory."""
        if RANKS.fullmatch(text):
            ranks = [int(word) for word in text.split("x")]
            return {"rank": tuple(ranks) if len(ranks) > 1 else ranks[0]}
        try:
            return {"energy": float(text)}
        except ValueError:
            return {"memory": text}

    def find_modes(self, x: Tensor) -> range:
        """Return the modes that are compressed."""
        return range(x.dim())

    def give_ranks(self, x: Tensor, state: State) -> Ranks | None:
        """Return the ranks of all modes as far as they are known without looking at x."""
        modes = self.find_modes(x)
        ranks = self.rank
        if ranks is None and RANKS_CHOSEN in state.tensors:
            ranks = tuple(state.tensors[RANKS_CHOSEN].tolist())
        if ranks is None:
            return None
        if isinstance(ranks, int):
            ranks = (ranks,) * len(modes)
        if len(ranks) != len(modes):
            if self.rank is None:
                return None  # of an input with other axes
            raise InputError(
                f"layer '{state.layer}' keeps an input of shape {list(x.shape)} as '{self}', which has {len(ranks)} ranks for "
                f"{len(modes)} modes. Give a rank for each mode, or one for all."
            )
        given = dict(zip(modes, ranks, strict=True))
        full = tuple(min(given.get(mode, length), length) for mode, length in enumerate(x.shape))
        if self.memory is not None and count_numbers(x.shape, full) * x.element_size() > float(self.memory):
            return None  # chosen for smaller inputs
        return full

    def choose(self, x: Tensor, energies: dict[int, Tensor], state: State) -> Ranks:
        """Return ranks of all modes, chosen by the energies of those that are compressed."""
        if self.energy is not None:
            return tuple(
                find_rank(energies[mode], self.energy) if mode in energies else length for mode, length in enumerate(x.shape)
            )
        assert self.memory is not None
        values = [energies[mode].double().clamp(min=0).cpu().numpy() if mode in energies else None for mode in range(x.dim())]
        whole = [np.append(np.zeros(n - 1), np.inf) if v is None else v for v, n in zip(values, x.shape, strict=True)]
        ranks = choose_ranks(whole, int(float(self.memory)) // x.element_size())
        if ranks is None:
            least = count_numbers(x.shape, [1 if mode in energies else n for mode, n in enumerate(x.shape)]) * x.element_size()
            raise InputError(
                f"layer '{state.layer}' cannot keep an input of shape {list(x.shape)} in {self.memory} B: with ranks of one it "
                f"takes {least} B. Give more, or a coarser patch."
            )
        return ranks

    def expect_ranks(self, x: Tensor, state: State) -> Ranks | None:
        """Return the ranks on shapes alone: known ones, or those of spectra that fall evenly."""
        ranks = self.give_ranks(x, state)
        if ranks is None and self.energy is None:
            ranks = self.choose(x, {mode: torch.arange(x.shape[mode], 0, -1) for mode in self.find_modes(x)}, state)
        return ranks


@dataclass(frozen=True)
class Subspace(Sized):
    """Hold core and factors that one step of subspace iteration per training step keeps up to date.

    Equation: U_k ← qr(A_k·(A_kᵀ·U_k)), A_k the unfolding of mode k, U_k from the step before; x̂ = x ×₁ U₁U₁ᵀ … (ASI, "Beyond
    Low-rank Decomposition", ICML 2025). Modes are taken one after the other, each of what the ones before have left, the mode
    that shrinks most first: |x − x̂|² is the sum of what each mode loses of what it gets.
    Cost: Π ranks + Σ rank·length numbers; forward 4·numel·rank flops for the first mode, less for each further one.
    Exact when: no mode has more directions than its rank.

    Attributes:
        warm_start: Start from the factors of the step before, or from random ones.
    """

    warm_start: bool = True
    name = "subspace"

    def decompose(self, x: Tensor, state: State) -> Tucker | None:
        ranks = self.expect_ranks(x, state) if x.is_meta else self.give_ranks(x, state) or self.calibrate(x, state)
        if ranks is None:
            return None
        core, factors = x, list[Tensor | None]([None] * x.dim())
        for mode in sorted(range(x.dim()), key=lambda mode: ranks[mode] / x.shape[mode]):
            if ranks[mode] < x.shape[mode]:
                factor = self.find_factor(unfold(core, mode), mode, ranks[mode], state)
                core, factors[mode] = times(core, factor, mode), factor.to(x.dtype).contiguous()
        return Tucker(core.contiguous(), tuple(factors))

    def find_factor(self, matrix: Tensor, mode: int, rank: int, state: State) -> Tensor:
        """Return the factor of a mode: a step from that of the step before, two from random directions."""
        name, shape = f"factor{mode}", (len(matrix), rank)
        if matrix.is_meta:
            return iterate(matrix, matrix.new_empty(shape))
        start = state.tensors.get(name) if self.warm_start else None
        if start is None or start.shape != shape:  # another size of batch or image
            start = iterate(matrix, draw(*shape, matrix.device, matrix.dtype))
        factor = iterate(matrix, start.to(matrix))
        if self.warm_start:
            state.tensors[name] = factor
        return factor

    def calibrate(self, x: Tensor, state: State) -> Ranks:
        """Choose ranks by the spectra of x, and remember them and the factors."""
        found = {mode: decompose(unfold(x, mode) @ unfold(x, mode).t()) for mode in self.find_modes(x)}
        ranks = self.choose(x, {mode: energies for mode, (energies, _) in found.items()}, state)
        state.tensors[RANKS_CHOSEN] = torch.tensor(ranks)
        if self.warm_start:
            state.tensors.update({f"factor{mode}": v[:, : ranks[mode]].contiguous() for mode, (_, v) in found.items()})
        return ranks

    @property
    def options(self) -> str:
        return self.size if self.warm_start else f"{self.size},cold"

    @classmethod
    def from_options(cls, text: str) -> Keep:
        size, _, word = text.partition(",")
        if not size or word not in ("", "cold"):
            raise PlanError(
                f"keep 'subspace' got {text!r}. Write 'subspace:8' for a rank, 'subspace:0.8' for an energy or 'subspace:64KB' "
                "for a memory, and 'subspace:8,cold' to start from random directions each time."
            )
        return cls(**cls.parse_size(size), warm_start=not word)


@dataclass(frozen=True)
class Fixed(Sized):
    """Hold the core in factors that were calibrated on the first batches and never change.

    Equation: x̂ = x ×₂ U₂U₂ᵀ ×₃ U₃U₃ᵀ …, U_k the leading eigenvectors of Σ A_k·A_kᵀ over the calibration batches, A_k the
    unfolding of mode k (LANCE, arXiv 2509.21617). The batch is not compressed: the next one has other images. Over the
    calibration batches |x − x̂|² ≤ (number of compressed modes)·(1 − ε)·|x|²; of later ones nothing is promised.
    Cost: N·Π ranks numbers, and the factors Σ rank·length, which every step shares; forward one product per mode.
    Exact when: no mode has more directions than its rank.

    Attributes:
        batches: So many batches are for calibration.
    """

    batches: int = 8
    name = "fixed"

    def __post_init__(self) -> None:
        """Check the number of batches."""
        super().__post_init__()
        if isinstance(self.batches, bool) or not isinstance(self.batches, int) or self.batches < 1:
            raise PlanError(f"Fixed got batches={self.batches!r}. Give how many batches are for calibration, at least 1.")

    def find_modes(self, x: Tensor) -> range:
        return range(1, x.dim())

    def decompose(self, x: Tensor, state: State) -> Tucker | None:
        if x.is_meta:
            ranks = self.expect_ranks(x, state)
            lengths = zip(x.shape, ranks, strict=True) if ranks is not None else ()
            return None if ranks is None else project(x, [x.new_empty(n, r) if r < n else None for n, r in lengths])
        seen = int(state.tensors.get("seen", 0))
        if seen < self.batches or self.give_ranks(x, state) is None:
            self.calibrate(x, state)
        ranks = self.give_ranks(x, state)
        assert ranks is not None
        factors: list[Tensor | None] = [None] * x.dim()
        for mode in self.find_modes(x):
            if ranks[mode] < x.shape[mode]:
                factor = state.tensors.get(f"factor{mode}")
                if factor is None or factor.shape != (x.shape[mode], ranks[mode]):  # another size of image
                    factor = decompose(unfold(x, mode) @ unfold(x, mode).t())[1][:, : ranks[mode]].to(x.dtype).contiguous()
                    state.tensors[f"factor{mode}"] = factor
                factors[mode] = factor.to(x)
        return project(x, factors)

    def calibrate(self, x: Tensor, state: State) -> None:
        """Add x to what the factors are made of, and choose ranks and factors anew."""
        seen = state.count("seen") + 1
        found = {}
        for mode in self.find_modes(x):
            gram = unfold(x, mode) @ unfold(x, mode).t()
            before = state.tensors.pop(f"gram{mode}", None)
            gram = gram + before.to(gram) if before is not None and before.shape == gram.shape else gram
            if seen < self.batches:
                state.tensors[f"gram{mode}"] = gram
            found[mode] = decompose(gram)
        if self.rank is None:
            ranks = self.choose(x, {mode: energies for mode, (energies, _) in found.items()}, state)
            state.tensors[RANKS_CHOSEN] = torch.tensor(ranks[1:])
        ranks = self.give_ranks(x, state)
        assert ranks is not None
        state.tensors.update({f"factor{mode}": v[:, : ranks[mode]].to(x.dtype).contiguous() for mode, (_, v) in found.items()})

    @property
    def options(self) -> str:
        return self.size if self.batches == type(self).batches else f"{self.size},{self.batches}"

    @classmethod
    def from_options(cls, text: str) -> Keep:
        size, _, batches = text.partition(",")
        if not size or (batches and not (batches.isascii() and batches.isdigit())):
            raise PlanError(
                f"keep 'fixed' got {text!r}. Write 'fixed:8' for a rank, 'fixed:0.9' for an energy or 'fixed:64KB' for a "
                "memory, and 'fixed:0.9,4' to calibrate on four batches."
            )
        return cls(**cls.parse_size(size), batches=int(batches) if batches else cls.batches)
