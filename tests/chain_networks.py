"""The networks of `layer_chains`, and the rounding of their pixels.

Every part can also say, in double precision, how large the rounding errors of a run in single precision are (`spread`), and
so which pixels are within rounding of a kink of their activation, or of the maximum of their window (`find_close`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layer_chains import Act, Chain, Conv, Pad, Pool, Residual, Step

UNIT = 2.0**-24
"""Half the distance from 1 to the next number in single precision: the relative error of one rounding."""
CLOSE = 10.0
"""Pixels are close to a kink up to so many standard deviations of their rounding error."""
LEAST = 1e-12
"""How far from a kink a pixel is put."""
KINKS = {"relu": (0.0,), "relu6": (0.0, 6.0), "leaky_relu": (0.0,), "hardswish": (-3.0, 3.0), "silu": ()}
"""Where the derivative of an activation jumps."""


class Pixel(NamedTuple):
    """A pixel close to a kink.

    Attributes:
        part: The number of the part whose input it is.
        at: Its index [n, c, h, w].
        step: What has to be added to it to lie on the other side, in double precision.
        kink: Where the kink is; `None` for a pixel that is second in a window.
    """

    part: int
    at: tuple[int, ...]
    step: float
    kink: float | None = None


class Spread(NamedTuple):
    """A map in double precision, and the variance of the rounding error that a single run has there."""

    x: Tensor
    v: Tensor


class Probe:
    """What looks at a run from inside: it sees what each part reads and what each layer returns."""

    def read(self, part: int, x: Tensor) -> Tensor:
        """Return what a part with a kink shall read."""
        return x

    def layer(self, part: ConvPart, x: Tensor, y: Tensor) -> None:
        """Look at a layer's input and output."""

    def head(self, x: Tensor) -> None:
        """Look at what the head reads."""


class ReadAll(Probe):
    """Keep a copy of what parts with a kink read."""

    def __init__(self) -> None:
        self.maps: dict[int, Tensor] = {}

    def read(self, part: int, x: Tensor) -> Tensor:
        self.maps[part] = x.detach().clone()
        return x


class ConvPart(nn.Module):
    """A `Conv`."""

    def __init__(self, step: Conv, channels: int, number: int, generator: torch.Generator) -> None:
        super().__init__()
        groups = {"one": 1, "two": 2, "depthwise": channels}[step.groups]
        self.number = number
        self.conv = nn.Conv2d(channels, step.out, step.kernel, step.stride, step.padding, step.dilation, groups, step.bias)
        self.norm = nn.BatchNorm2d(step.out) if step.norm else None

        def fill(values: Tensor | None, mean: float, deviation: float) -> None:
            if values is not None:
                values.data.normal_(mean, deviation, generator=generator)

        fill(self.conv.weight, 0, (2 / self.conv.weight[0].numel()) ** 0.5)
        fill(self.conv.bias, 0, 0.3)
        if self.norm is not None:
            fill(self.norm.running_mean, 0, 0.3)
            fill(self.norm.weight, 1.2, 0.3)
            fill(self.norm.bias, 0, 0.5)
            assert self.norm.running_var is not None
            self.norm.running_var.uniform_(0.5, 2, generator=generator)

    def forward(self, x: Tensor, probe: Probe | None) -> Tensor:
        y = self.conv(x)
        y = y if self.norm is None else self.norm(y)
        if probe is not None:
            probe.layer(self, x, y)
        return y

    def spread(self, x: Spread, close: list[Pixel]) -> Spread:
        """Return the result and the variance of its rounding.

        The library multiplies the kernel by the norm's factor beforehand, torch the result: both are allowed for.
        """
        conv, norm = self.conv, self.norm
        terms = conv.weight[0].numel() + 2
        z = conv(x.x)
        v = conv._conv_forward(x.v + terms / 4 * UNIT**2 * x.x**2, conv.weight**2, None) + UNIT**2 * z**2
        if conv.bias is not None:
            v = v + terms / 4 * UNIT**2 * conv.bias[:, None, None] ** 2
        if norm is None:
            return Spread(z, v)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        taken = norm.running_mean * scale
        y = F.batch_norm(z, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0, norm.eps)
        own = terms / 4 * (norm.bias - taken) ** 2 + norm.bias**2 + taken**2
        return Spread(y, v * scale[:, None, None] ** 2 + UNIT**2 * (own[:, None, None] + y**2))


class ActPart(nn.Module):
    """An `Act`."""

    def __init__(self, step: Act, number: int) -> None:
        super().__init__()
        self.step, self.number = step, number
        self.kinks = step.bounds if step.name == "hardtanh" else KINKS[step.name]

    def run(self, x: Tensor, inplace: bool) -> Tensor:
        """Return the activation of x."""
        return getattr(F, self.step.name)(x, *self.step.bounds, inplace=inplace)

    def forward(self, x: Tensor, probe: Probe | None) -> Tensor:
        if probe is not None and self.kinks:
            x = probe.read(self.number, x)
        return self.run(x, self.step.inplace)

    def spread(self, x: Spread, close: list[Pixel]) -> Spread:
        """Return the result and the variance of its rounding; note pixels close to a kink."""
        z, v = x
        y = self.run(z, False)
        with torch.enable_grad():
            leaf = z.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.run(leaf, False).sum(), leaf)
        for kink in self.kinks:
            near = ((z - kink).abs() <= CLOSE * v.sqrt()) & (v > 0)
            slope = torch.where(near, 1.5, slope)
            for at in near.nonzero().tolist():
                off = float(z[tuple(at)]) - kink
                close.append(Pixel(self.number, tuple(at), -off - (LEAST if off > 0 else -LEAST), kink))
        return Spread(y, v * slope**2 + UNIT**2 * self.find_own(z, y))

    def find_own(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the variance, in squares of `UNIT`, of what the activation itself rounds."""
        if self.step.name == "hardswish":
            return (4 + z**2) * (z > -3)
        if self.step.name == "silu":  # the library's exponential is exact to 2e-7
            return 64 * y**2
        return y**2 if self.step.name == "leaky_relu" else torch.zeros_like(y)


class PoolPart(nn.Module):
    """A `Pool`."""

    def __init__(self, step: Pool, number: int) -> None:
        super().__init__()
        self.step, self.number = step, number

    def run(self, x: Tensor) -> Tensor:
        """Return the pooled map."""
        step = self.step
        if step.kind == "max":
            return F.max_pool2d(x, step.kernel, step.stride, step.padding, 1, step.ceil_mode)
        return F.avg_pool2d(x, step.kernel, step.stride, step.padding, step.ceil_mode, False)

    def forward(self, x: Tensor, probe: Probe | None) -> Tensor:
        if probe is not None and self.step.kind == "max":
            x = probe.read(self.number, x)
        return self.run(x)

    def spread(self, x: Spread, close: list[Pixel]) -> Spread:
        """Return the result and the variance of its rounding; note pixels that are close to the maximum of their window."""
        z, v = x
        y, step = self.run(z), self.step
        if step.kind == "avg":
            return Spread(y, self.run(v) + UNIT**2 * step.kernel[0] * step.kernel[1] * self.run(z.abs()) ** 2)
        close.extend(self.find_ties(z, v, y))
        return Spread(y, self.run(v))

    def find_ties(self, z: Tensor, v: Tensor, y: Tensor) -> list[Pixel]:
        """Return the pixels that are second in a window, by no more than rounding."""
        (n, c), step = z.shape[:2], self.step
        best, where = F.max_pool2d(z, step.kernel, step.stride, step.padding, 1, step.ceil_mode, return_indices=True)
        found: dict[tuple[int, ...], float] = {}
        (kh, kw), (sh, sw), (ph, pw) = step.kernel, step.stride, step.padding
        h, w = z.shape[2:]
        first = v.flatten(2).gather(2, where.flatten(2)).reshape(best.shape)
        for u, t in product(range(kh), range(kw)):
            rows = torch.arange(best.shape[2]) * sh - ph + u
            columns = torch.arange(best.shape[3]) * sw - pw + t
            inside = ((rows >= 0) & (rows < h))[:, None] & ((columns >= 0) & (columns < w))
            flat = rows.clamp(0, h - 1)[:, None] * w + columns.clamp(0, w - 1)
            index = flat.flatten().expand(n, c, -1)
            value, variance = (m.flatten(2).gather(2, index).reshape(best.shape) for m in (z, v))
            total = first + variance
            gap = best - value  # equal ones are one number twice, as behind overlapping windows, in any precision
            near = inside & (gap > 0) & (gap <= CLOSE * total.sqrt())
            for at in near.nonzero().tolist():
                pixel = (*at[:2], int(rows[at[2]]), int(columns[at[3]]))
                found[pixel] = max(found.get(pixel, 0.0), float(gap[tuple(at)]) + LEAST)
        return [Pixel(self.number, at, gap) for at, gap in found.items()]


class PadPart(nn.Module):
    """A `Pad`."""

    def __init__(self, step: Pad) -> None:
        super().__init__()
        self.zeros = step.zeros

    def forward(self, x: Tensor, probe: Probe | None) -> Tensor:
        return F.pad(x, self.zeros)

    def spread(self, x: Spread, close: list[Pixel]) -> Spread:
        """Return the result and the variance of its rounding."""
        return Spread(F.pad(x.x, self.zeros), F.pad(x.v, self.zeros))


class ResidualPart(nn.Module):
    """A `Residual`."""

    def __init__(self, parts: nn.ModuleList, swapped: bool) -> None:
        super().__init__()
        self.parts, self.swapped = parts, swapped

    def forward(self, x: Tensor, probe: Probe | None) -> Tensor:
        y = x
        for part in self.parts:
            y = part(y, probe)
        return x + y if self.swapped else y + x

    def spread(self, x: Spread, close: list[Pixel]) -> Spread:
        """Return the result and the variance of its rounding."""
        y = x
        for part in self.parts:
            y = part.spread(y, close)  # type: ignore[operator]
        z = x.x + y.x
        return Spread(z, x.v + y.v + UNIT**2 * z**2)


class Network(nn.Module):
    """The layers of a chain, a mean over pixels and a classifier."""

    def __init__(self, steps: Sequence[Step], channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.count = 0
        self.parts, channels = self.make_parts(steps, channels, generator)
        self.head = nn.Linear(channels, 5)
        self.head.weight.data.normal_(0, channels**-0.5, generator=generator)
        self.head.bias.data.normal_(0, 0.3, generator=generator)

    def make_parts(self, steps: Sequence[Step], channels: int, generator: torch.Generator) -> tuple[nn.ModuleList, int]:
        """Return the modules of some steps, and the channels behind them."""
        parts = nn.ModuleList()
        for step in steps:
            self.count += 1
            if isinstance(step, Conv):
                parts.append(ConvPart(step, channels, self.count, generator))
                channels = step.out
            elif isinstance(step, Residual):
                parts.append(ResidualPart(self.make_parts(step.steps, channels, generator)[0], step.swapped))
            elif isinstance(step, Pad):
                parts.append(PadPart(step))
            else:
                parts.append(ActPart(step, self.count) if isinstance(step, Act) else PoolPart(step, self.count))
        return parts, channels

    def forward(self, x: Tensor, probe: Probe | None = None) -> Tensor:
        for part in self.parts:
            x = part(x, probe)
        if probe is not None:
            probe.head(x)
        return self.head(x.mean((2, 3)))


def make_network(chain: Chain) -> tuple[Network, Tensor]:
    """Return the network and its input, always with the same numbers, in single precision."""
    generator = torch.Generator().manual_seed(chain.seed)
    network = Network(chain.steps, chain.channels, generator)
    x = torch.randn(chain.batch, chain.channels, *chain.size, generator=generator) * 2
    for number in range(chain.planted):
        plant(network, x, random.Random(f"{chain.seed} {number}"))
    for move in range(chain.moves):
        draw = torch.Generator().manual_seed(move)
        with torch.no_grad():
            for p in (x, *(p for p in network.parameters() if p.dim() == 1)):
                p.add_(torch.randn(p.shape, generator=draw), alpha=1e-3)
    return network, x.contiguous(memory_format=torch.channels_last)


def plant(network: Network, x: Tensor, draw: random.Random) -> None:
    """Choose a bias in front of an activation so that one of its pixels lies at a kink, where there is such a bias."""
    pairs = []
    for parts in (m for m in network.modules() if isinstance(m, nn.ModuleList)):
        for conv, act in pairwise(parts):
            if isinstance(conv, ConvPart) and isinstance(act, ActPart) and act.kinks:
                bias = conv.conv.bias if conv.norm is None else conv.norm.bias
                pairs += [(bias, act)] if bias is not None else []
    if not pairs:
        return
    bias, act = draw.choice(pairs)
    seen = ReadAll()
    with torch.no_grad():
        copy.deepcopy(network).double().eval()(x.double(), seen)
        z = seen.maps[act.number]
        at = tuple(draw.randrange(n) for n in z.shape)
        bias[at[1]] += draw.choice(act.kinks) - float(z[at])


def find_close(exact: Network, x: Tensor) -> list[Pixel]:
    """Return the pixels that are within rounding of a kink, or of the maximum of a window."""
    close: list[Pixel] = []
    with torch.no_grad():
        at = Spread(x, torch.zeros_like(x))
        for part in exact.parts:
            at = part.spread(at, close)  # type: ignore[operator]
    return close
