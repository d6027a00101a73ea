"""Keeps that hold every number, in fewer bits: Full, BFloat16, Int8."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradfilter.errors import PlanError
from gradfilter.keep.base import Keep, Kept, State, hold

LEVELS = 255
"""The largest number of eight bits."""


@dataclass(frozen=True)
class Full(Keep):
    """Hold the tensor itself.

    Equation: x̂ = x.
    Cost: 4 bytes per number in single precision.
    Exact when: always.
    """

    name = "full"
    traceable = True

    def compress(self, x: Tensor, state: State, channels: int = 1) -> Kept:
        return hold(x)

    @property
    def around(self) -> Keep:
        return self


FULL = Full()
"""What holds where nothing is said."""


@dataclass(frozen=True)
class BFloat16(Keep):
    """Hold the tensor in bfloat16.

    Equation: x̂ = x·(1 + δ) with |δ| ≤ 2⁻⁸, so each entry of gw is off by at most 2⁻⁸·Σ |G|·|x|.
    Cost: 2 bytes per number; one pass forward, one backward.
    Exact when: the numbers have at most eight significant bits.
    """

    name = "bfloat16"
    traceable = True

    def compress(self, x: Tensor, state: State, channels: int = 1) -> Kept:
        return Kept((x.to(torch.bfloat16),), Widen(x.dtype)) if x.element_size() > 2 else hold(x)

    @property
    def around(self) -> Keep:
        return self


@dataclass(frozen=True)
class Widen:
    """Open a tensor that is held in a lower precision."""

    dtype: torch.dtype

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].to(self.dtype)


@dataclass(frozen=True)
class Int8(Keep):
    """Hold the tensor in eight bits, with a range per channel or per group of numbers.

    Equation: q = ⌊(x − lo)/s + u⌋ with s = (hi − lo)/255, x̂ = lo + s·q. u is drawn from (0, 1), of which 16 bits (stochastic
    rounding, as in ActNN, ICML 2021), or 1/2.
    Cost: 1 byte per number and two numbers per range; four passes forward, one backward.
    Exact when: on average, with stochastic rounding: E[x̂] = x (to 2⁻¹⁷·s), so E[gw] is what `Full` gives. |x̂ − x| < s with it,
    and ≤ s/2 without, so each entry of gw is off by at most s·Σ |G|, and half that.

    Attributes:
        group: So many numbers share a range; None for one range per channel.
        stochastic: Round up or down at random, without bias, or to the nearest.
    """

    group: int | None = None
    stochastic: bool = True
    name = "int8"

    def __post_init__(self) -> None:
        """Check the options."""
        if self.group is not None and (isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 2):
            raise PlanError(f"Int8 got group={self.group!r}. Give how many numbers share a range, at least 2.")

    @property
    def traceable(self) -> bool:  # type: ignore[override]
        return not self.stochastic

    def compress(self, x: Tensor, state: State, channels: int = 1) -> Kept:
        if x.numel() == 0:
            return hold(x)
        shape, dtype = x.shape, x.dtype
        axes = [axis for axis in range(x.dim()) if axis != channels % x.dim()]
        if self.group is not None:
            flat = x.reshape(-1)
            x, axes = torch.cat([flat, flat[-1:].expand(-len(flat) % self.group)]).reshape(-1, self.group), [1]
        x = x if x.element_size() > 2 else x.float()
        low, high = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
        step = ((high - low) / LEVELS).clamp(min=torch.finfo(x.dtype).tiny)
        levels = (x - low).div_(step).add_(0.5)
        if self.stochastic:
            levels.add_(self.draw_noise(levels, state), alpha=2.0**-16).add_(2.0**-17)
        return Kept((levels.clamp_(max=LEVELS).to(torch.uint8), low, step), Rescale(shape, dtype))

    def draw_noise(self, like: Tensor, state: State) -> Tensor:
        """Return 16 random bits per number, −2¹⁵ to 2¹⁵ − 1, from the layer's own generator; drawn four at a time."""
        words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
        if not like.is_meta:
            seed = zlib.crc32(state.layer.encode()) << 24 | state.count("draws") % 2**24
            words.random_(-(2**63), None, generator=torch.Generator(like.device).manual_seed(seed))
        return words.view(torch.int16).as_strided(like.shape, like.stride())

    @property
    def around(self) -> Keep:
        return Int8(stochastic=False)

    @property
    def options(self) -> str:
        words = [] if self.group is None else [str(self.group)]
        return ",".join(words if self.stochastic else [*words, "nearest"])

    @classmethod
    def from_options(cls, text: str) -> Keep:
        words = text.split(",") if text else []
        sizes = [word for word in words if word.isascii() and word.isdigit()]
        if len(sizes) > 1 or set(words) - {*sizes, "nearest"}:
            raise PlanError(f"keep 'int8' got {text!r}. Write 'int8', 'int8:64' for a range per 64 numbers, or 'int8:nearest'.")
        return cls(int(sizes[0]) if sizes else None, "nearest" not in words)


@dataclass(frozen=True)
class Rescale:
    """Open a tensor that is held in eight bits."""

    shape: torch.Size
    dtype: torch.dtype

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        levels, low, step = tensors
        x = torch.addcmul(low, levels.to(step.dtype), step).to(self.dtype)
        return x if x.shape == self.shape else x.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)
