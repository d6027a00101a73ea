"""Keeps that a planner chooses from: each layer's own ranks, from the spectra of its input, and several keeps in one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradfilter.keep import FULL, Int8, Keep, Kept, State, Subspace
from gradfilter.keep.low_rank import has_squares
from gradfilter.keep.tucker import Ranks, choose_ranks, count_numbers, find_energies

Kind = Keep | float
"""A keep for all layers, or the share of an input's numbers that core and factors may be: each layer then has its own ranks."""
KINDS: tuple[Kind, ...] = (1 / 128, 1 / 32, Int8(), FULL)
"""What is tried in every family, from the smallest to the largest."""
LEAST_NUMBERS = 1024
"""Inputs with fewer numbers are not decomposed."""


def stand_for(kind: Kind) -> Keep:
    """Return a keep that treats what is around a layer as a kind does."""
    return kind if isinstance(kind, Keep) else Subspace(rank=1)


@dataclass
class Candidates:
    """The keeps that a layer may have in a family.

    Attributes:
        kinds: Their kinds.
        scale: Images of a training step for one of the sample.
        inputs: The shapes and types of the layer's inputs in a training step, each with the axis of its channels.
        keeps: For each kind the keep that is measured, and the one for a plan. Their ranks differ in the mode of the batch.
    """

    kinds: tuple[Kind, ...]
    scale: Fraction
    inputs: list[tuple[Ranks, torch.dtype, int]] = field(default_factory=list)
    keeps: list[tuple[Keep, Keep]] = field(default_factory=list)

    def add(self, x: Tensor, channels: int) -> None:
        """Take note of an input of the layer; keeps are chosen by the first."""
        self.inputs.append(((math.ceil(len(x) * self.scale), *x.shape[1:]), x.dtype, channels))
        if not self.keeps:
            self.keeps = self.choose(x)
        elif x.dim() != len(self.inputs[0][0]):  # ranks are for one number of modes
            self.keeps = [pair if isinstance(kind, Keep) else (FULL, FULL) for kind, pair in self.pairs]

    @property
    def pairs(self) -> list[tuple[Kind, tuple[Keep, Keep]]]:
        """The kinds, and the keeps of each."""
        return list(zip(self.kinds, self.keeps, strict=True))

    def choose(self, x: Tensor) -> list[tuple[Keep, Keep]]:
        """Return the keeps of all kinds; `Full` where an input is too small to be decomposed, or cannot be."""
        shape, shares = self.inputs[0][0], [kind for kind in self.kinds if not isinstance(kind, Keep)]
        ranks: dict[Kind, Ranks | None] = {}
        if shares and x.dim() > 1 and math.prod(shape) >= LEAST_NUMBERS and has_squares(x):
            energies = [find_energies(x, mode).cpu().numpy() for mode in range(x.dim())]
            ranks = {share: choose_ranks(energies, int(share * x.numel())) for share in shares}
        keeps: list[tuple[Keep, Keep]] = []
        for kind in self.kinds:
            if isinstance(kind, Keep):
                keeps.append((kind, kind))
            elif found := ranks.get(kind):
                planned = min(math.ceil(found[0] * self.scale), shape[0]), *found[1:]
                keeps.append((Subspace(rank=found), Subspace(rank=planned)))
            else:
                keeps.append((FULL, FULL))
        return keeps

    def count_bytes(self, keep: Keep) -> int:
        """Return the bytes that a keep holds of the layer's inputs in a training step."""
        return sum(count_bytes(keep, *entry) for entry in self.inputs)

    def find_planned(self) -> list[Keep | None]:
        """Return the keep of each kind for a plan; None for one that is not smaller than those that find more."""
        if not self.inputs:  # the layer holds its input some other way
            return [*[None] * (len(self.kinds) - 1), FULL]
        planned: list[Keep | None] = []
        least = math.inf
        for _, (_, keep) in reversed(self.pairs):
            size = self.count_bytes(keep)
            planned.append(keep if size < least else None)
            least = min(least, size)
        return planned[::-1]


@dataclass(frozen=True, eq=False)
class Several(Keep):
    """Hold inputs in several ways at once, of which backward opens the active one.

    The gradient that a layer passes on does not depend on how its own input is held: one forward serves a backward pass for
    each kind. Layers are told apart by their state.

    Attributes:
        layers: The candidates of each layer.
        switch: Says which one is active, and whether candidates are chosen, as they are after the first forward.
    """

    layers: dict[str, Candidates]
    switch: Switch

    @property
    def around(self) -> Keep:
        """What is around layers is held whole: it is not what is compared."""
        return FULL

    def compress(self, x: Tensor, state: State, channels: int = 1) -> Kept:
        """Return what all candidates of the layer hold of x; the first forward chooses them."""
        candidates = self.layers[state.layer]
        if not self.switch.settled or not candidates.keeps:
            candidates.add(x, channels)
        kept = [keep.compress(x, State(state.layer), channels) for keep, _ in candidates.keeps]
        ends = np.cumsum([len(entry.tensors) for entry in kept]).tolist()
        opens = tuple(entry.open for entry in kept)
        return Kept(tuple(t for entry in kept for t in entry.tensors), OpenActive(self.switch, opens, (0, *ends)))


@dataclass
class Switch:
    """What all layers share while several keeps are measured.

    Attributes:
        active: The place of the kind that backward opens.
        settled: Whether candidates are chosen.
    """

    active: int = 0
    settled: bool = False


@lru_cache(maxsize=4096)
def count_bytes(keep: Keep, shape: Ranks, dtype: torch.dtype, channels: int) -> int:
    """Return the bytes that a keep holds of a tensor, the largest it can be."""
    if isinstance(keep, Subspace) and isinstance(keep.rank, tuple):
        ranks = [min(rank, length) for rank, length in zip(keep.rank, shape, strict=True)]
        return min(count_numbers(shape, ranks), math.prod(shape)) * dtype.itemsize
    x = torch.empty(shape, dtype=dtype, device="meta")
    return sum(tensor.nbytes for tensor in keep.compress(x, State(), channels).tensors)


@dataclass(frozen=True)
class OpenActive:
    """Open the active one of several.

    Attributes:
        switch: Says which one that is.
        opens: How each is opened.
        ends: Where the tensors of each begin, and where the last ends.
    """

    switch: Switch
    opens: tuple[Any, ...]
    ends: tuple[int, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Return what was held by the active one."""
        place = self.switch.active
        return self.opens[place](tensors[self.ends[place] : self.ends[place + 1]])
