"""Keeps of low rank whose size is fixed: Subspace and Fixed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradfilter.errors import BudgetError, InputError, PlanError
from gradfilter.keep.base import Keep, State
from gradfilter.keep.low_rank import LowRank, check_energy
from gradfilter.keep.tucker import (
    Ranks,
    Tucker,
    choose_ranks,
    correlate,
    count_numbers,
    cut,
    decompose,
    draw,
    find_most_ranks,
    find_rank,
    iterate,
    project,
    times,
    widen,
)
from gradfilter.units import parse_amount

RANKS = re.compile(r"\d{1,9}(x\d{1,9})*")
RANKS_CHOSEN, CHOSEN_FOR = "ranks", "lengths"


@dataclass(frozen=True)
class Sized(LowRank):
    """What keeps share whose ranks are chosen once: given, or from the spectra of the first batch.

    Attributes:
        rank: Rank of each mode, or one for all; never more than a mode is long.
        energy: Share of the energy that each mode is to keep, of the first batch, or of the first larger one.
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
                object.__setattr__(self, "memory", math.ceil(parse_amount("memory", self.memory)))
            except BudgetError as error:
                raise PlanError(f"{name}: {error}") from error
        if self.rank is not None:
            ranks = tuple(self.rank) if isinstance(self.rank, tuple | list) else (self.rank,)
            if not ranks or any(isinstance(r, bool) or not isinstance(r, int) or r < 1 for r in ranks):
                raise PlanError(f"{name} got rank={self.rank!r}. Give a whole number of at least 1, or one for each mode.")
            object.__setattr__(self, "rank", min(ranks) if len(ranks) == 1 else ranks)

    @property
    def is_lossless(self) -> bool:
        return self.energy == 1

    @property
    def calibrates(self) -> bool:
        return self.rank is None

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
            lengths = state.tensors[CHOSEN_FOR].tolist()
            if any(x.shape[mode] > n for mode, n in zip(modes, lengths, strict=False)):
                return None  # chosen for smaller inputs: all of their directions may not be all there are now
        if ranks is None:
            return None
        if isinstance(ranks, int):
            ranks = (ranks,) * len(modes)
        if len(ranks) != len(modes):
            if self.rank is None:
                return None  # of an input with other axes
            raise InputError(
                f"layer '{state.layer}' keeps an input of shape {list(x.shape)} as '{self}', which has {len(ranks)} ranks for "
                f"{len(modes)} modes. Give a rank for each mode or one for all, or name the layer in the plan."
            )
        given = dict(zip(modes, ranks, strict=True))
        full = tuple(min(given.get(mode, length), length) for mode, length in enumerate(x.shape))
        if self.memory is not None and count_numbers(x.shape, full) * x.element_size() > float(self.memory):
            return None
        return full

    def choose(self, x: Tensor, energies: dict[int, Tensor], state: State) -> Ranks:
        """Return ranks of all modes, chosen by the energies of those that are compressed."""
        if self.energy is not None:
            return tuple(
                find_rank(energies[mode], self.energy) if mode in energies else length for mode, length in enumerate(x.shape)
            )
        assert self.memory is not None
        values = [energies[mode].clamp(min=0).cpu().numpy() if mode in energies else None for mode in range(x.dim())]
        whole = [np.append(np.zeros(n - 1), np.inf) if v is None else v for v, n in zip(values, x.shape, strict=True)]
        ranks = choose_ranks(whole, self.count_allowed(x))
        return self.check_fits(ranks, x, state)

    def count_allowed(self, x: Tensor) -> int:
        """Return how many numbers of the precision of x fit into the memory."""
        assert self.memory is not None
        return int(float(self.memory)) // x.element_size()

    def check_fits(self, ranks: Ranks | None, x: Tensor, state: State) -> Ranks:
        """Return ranks, unless there are none."""
        modes = self.find_modes(x)
        if ranks is None:
            least = count_numbers(x.shape, [1 if mode in modes else n for mode, n in enumerate(x.shape)]) * x.element_size()
            raise InputError(
                f"layer '{state.layer}' cannot keep an input of shape {list(x.shape)} in {self.memory} B: with ranks of one it "
                f"takes {least} B. Give more, or a coarser patch."
            )
        return ranks

    def remember_ranks(self, ranks: Ranks, x: Tensor, state: State) -> None:
        """Remember the ranks of the modes that are compressed, and how long these are."""
        state.tensors[RANKS_CHOSEN] = torch.tensor([ranks[mode] for mode in self.find_modes(x)])
        state.tensors[CHOSEN_FOR] = torch.tensor([x.shape[mode] for mode in self.find_modes(x)])

    def expect_ranks(self, x: Tensor, state: State) -> Ranks | None:
        """Return the ranks on shapes alone: known ones, or the most that a memory allows; None for an energy's."""
        ranks = self.give_ranks(x, state)
        if ranks is None and self.energy is None:
            whole = tuple(mode for mode in range(x.dim()) if mode not in self.find_modes(x))
            ranks = self.check_fits(find_most_ranks(tuple(x.shape), whole, self.count_allowed(x)), x, state)
        return ranks


def cut_factors(x: Tensor, directions: dict[int, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return the factors of the modes that are not whole, by the names that they have in a state."""
    return {f"factor{mode}": cut(v, ranks[mode]) for mode, v in directions.items() if ranks[mode] < x.shape[mode]}


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
                factor = self.find_factor(core, mode, ranks[mode], state)
                core, factors[mode] = times(core, factor, mode), factor.to(x.dtype)
        return Tucker(core.contiguous(), tuple(factors))

    def find_factor(self, x: Tensor, mode: int, rank: int, state: State) -> Tensor:
        """Return the factor of a mode: a step from that of the step before, two from random directions."""
        name, shape = f"factor{mode}", (x.shape[mode], rank)
        if x.is_meta:
            return iterate(x, mode, x.new_empty(shape))
        start = state.tensors.get(name) if self.warm_start else None
        if start is None or start.shape != shape:  # another size of batch or image
            start = iterate(x, mode, draw(*shape, x.device, widen(x).dtype))
        factor = iterate(x, mode, start.to(x.device))
        if self.warm_start:
            state.tensors[name] = factor
        return factor

    def calibrate(self, x: Tensor, state: State) -> Ranks:
        """Choose ranks by the spectra of x, and remember them and the factors."""
        found = {mode: decompose(correlate(x, x, mode)) for mode in self.find_modes(x)}
        ranks = self.choose(x, {mode: energies for mode, (energies, _) in found.items()}, state)
        self.remember_ranks(ranks, x, state)
        if self.warm_start:
            state.tensors.update(cut_factors(x, {mode: directions for mode, (_, directions) in found.items()}, ranks))
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


def is_again(x: Tensor, state: State) -> bool:
    """Tell whether x is the batch of the last call: a checkpoint runs a batch again in backward, which counts once."""
    mark = torch.stack([x.sum(dtype=torch.float64), x.square().sum(dtype=torch.float64)])
    before, state.tensors["mark"] = state.tensors.get("mark"), mark
    return before is not None and torch.equal(before.to(mark), mark)


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
        if (seen < self.batches and not is_again(x, state)) or self.give_ranks(x, state) is None:
            self.calibrate(x, state)
        ranks = self.give_ranks(x, state)
        assert ranks is not None
        factors: list[Tensor | None] = [None] * x.dim()
        for mode in self.find_modes(x):
            if ranks[mode] < x.shape[mode]:
                factor = state.tensors.get(f"factor{mode}")
                if factor is None or factor.shape != (x.shape[mode], ranks[mode]):  # another size of image
                    factor = cut(decompose(correlate(x, x, mode))[1], ranks[mode]).to(x.dtype)
                    state.tensors[f"factor{mode}"] = factor
                factors[mode] = factor.to(x)
        return project(x, factors)

    def calibrate(self, x: Tensor, state: State) -> None:
        """Add x to what the factors are made of, and choose ranks and factors anew."""
        seen = state.count("seen") + 1
        found = {}
        for mode in self.find_modes(x):
            gram = correlate(x, x, mode)
            before = state.tensors.pop(f"gram{mode}", None)
            gram = gram + before.to(gram) if before is not None and before.shape == gram.shape else gram
            if seen < self.batches:
                state.tensors[f"gram{mode}"] = gram
            found[mode] = decompose(gram)
        if self.rank is None:
            ranks = self.choose(x, {mode: energies for mode, (energies, _) in found.items()}, state)
            self.remember_ranks(ranks, x, state)
        ranks = self.give_ranks(x, state)
        assert ranks is not None
        factors = cut_factors(x, {mode: directions for mode, (_, directions) in found.items()}, ranks)
        state.tensors.update({name: factor.to(x.dtype) for name, factor in factors.items()})

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
