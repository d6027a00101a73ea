"""Random chains of the layers that the C library has kernels for, and a judge of what it makes of them.

A chain is run three times: in single precision with the library, in single precision by torch alone, and in double precision
by torch alone, which is the truth. Both single runs must be as close to the truth as rounding allows (`TOLERANCE`), with one
exception. Where a pixel lies within rounding of a kink of its activation, either side of the kink is right, and so is either
of two equal maxima of a pooling. A gradient counts those pixels, so it changes by a finite step, however small the rounding.

No looser tolerance tells such a step from a defect. So the judge finds these pixels (`find_close`), in double precision and
with an estimate of the rounding of each number, and then either moves the biases until there are none (`move_away`), or sets
the truth to the other side of the kink (`Sides`), pixel by pixel, until it is the one that a single run has computed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import native
from gradfilter.errors import ExitWarning

UNIT = 2.0**-24
"""Half the distance from 1 to the next number in single precision: the relative error of one rounding."""
CLOSE = 10.0
"""Pixels are close to a kink up to so many standard deviations of their rounding error."""
TOLERANCE = 256 * UNIT
"""How far a gradient of a single run may be from the truth, relative to the sum of absolute values that it is a sum of.

An upper bound of rounding would be `UNIT` times the number of terms, about 1000 in all layers that a gradient has come
through. Rounding errors have either sign, so they add up as the root of that, about 30, and layers multiply them.
"""
FEW_SIDES = 5
"""Up to so many close pixels, all combinations of sides are tried."""
HEAD = 0
"""The number of the head; parts count from 1."""

Pair = tuple[int, int]


class Pixel(NamedTuple):
    """A pixel close to a kink.

    Attributes:
        part: The number of the part whose input it is.
        at: Its index [n, c, h, w].
        step: What has to be added to it to lie on the other side, in double precision.
    """

    part: int
    at: tuple[int, ...]
    step: float


class Spread(NamedTuple):
    """A map in double precision, and the variance of the rounding error that a single run has there."""

    x: Tensor
    v: Tensor


@dataclass(frozen=True)
class Conv:
    """A convolution, perhaps with the batch norm behind it. `groups`: "one", "two" or "depthwise"."""

    out: int
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: str = "one"
    bias: bool = False
    norm: bool = True


@dataclass(frozen=True)
class Act:
    """An activation; `bounds` are those of hardtanh, or the slope of leaky ReLU."""

    name: str
    inplace: bool = False
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pool:
    """A max or average pooling."""

    kind: str
    kernel: Pair = (2, 2)
    stride: Pair = (2, 2)
    padding: Pair = (0, 0)
    ceil_mode: bool = False


@dataclass(frozen=True)
class Pad:
    """Zeros around a map: left, right, top, bottom."""

    zeros: tuple[int, int, int, int]


@dataclass(frozen=True)
class Residual:
    """Steps whose result is added to their input."""

    steps: tuple[Step, ...]
    swapped: bool = False


Step = Conv | Act | Pool | Pad | Residual


@dataclass(frozen=True)
class Chain:
    """All that a step of training is made from. It prints as Python: a chain that fails can be pasted into a test.

    Attributes:
        steps: The layers.
        channels: The channels of the input.
        size: Its size `(h, w)`.
        batch: Its images.
        backward: The options of `gf.Backward`.
        last: How many layers are trained; `None` for all.
        seed: That of all numbers.
        moves: How many times biases have been moved since.
    """

    steps: tuple[Step, ...]
    channels: int = 16
    size: Pair = (8, 8)
    batch: int = 1
    backward: tuple[tuple[str, Any], ...] = (("patch", 2),)
    last: int | None = None
    seed: int = 0
    moves: int = 0

    def make_plan(self) -> gf.Plan:
        """Return the plan."""
        backward = gf.Backward(**dict(self.backward))
        return gf.Plan.all(backward) if self.last is None else gf.Plan.last(self.last, backward)

    def make(self) -> tuple[Network, Tensor]:
        """Return the network and its input, always with the same numbers, in single precision."""
        generator = torch.Generator().manual_seed(self.seed)
        network = Network(self.steps, self.channels, generator)
        x = torch.randn(self.batch, self.channels, *self.size, generator=generator) * 2
        for move in range(self.moves):
            draw = torch.Generator().manual_seed(move)
            with torch.no_grad():
                for p in (x, *(p for p in network.parameters() if p.dim() == 1)):
                    p.add_(torch.randn(p.shape, generator=draw), alpha=1e-3)
        return network, x.contiguous(memory_format=torch.channels_last)


class Probe:
    """What looks at a run from inside: it sees what each part reads and what each layer returns."""

    def read(self, part: int, x: Tensor) -> Tensor:
        """Return what a part with a kink shall read."""
        return x

    def layer(self, part: ConvPart, x: Tensor, y: Tensor) -> None:
        """Look at a layer's input and output."""

    def head(self, x: Tensor) -> None:
        """Look at what the head reads."""


class Sides(Probe):
    """Put pixels on the other side of their kink, and note how large the sums are that gradients are made of.

    Attributes:
        pixels: The pixels.
        inputs: Per layer, the largest absolute values of its input's channels.
        sums: Per layer, the sums over pixels of the absolute gradient of its output, per channel.
    """

    def __init__(self, pixels: Sequence[Pixel] = ()) -> None:
        self.pixels = pixels
        self.inputs: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}

    def read(self, part: int, x: Tensor) -> Tensor:
        mine = [p for p in self.pixels if p.part == part]
        if not mine:
            return x
        steps = torch.zeros(x.shape, dtype=x.dtype)
        for pixel in mine:
            steps[pixel.at] = pixel.step
        return x + steps

    def layer(self, part: ConvPart, x: Tensor, y: Tensor) -> None:
        self.inputs[part.number] = largest(x.detach() * 1)
        carrier = getattr(y, "carrier", y)
        if carrier.requires_grad:
            carrier.register_hook(lambda g: self.sums.__setitem__(part.number, level(g.abs().sum((0, 2, 3)))))

    def head(self, x: Tensor) -> None:
        self.inputs[HEAD] = largest(x.detach() * 1)


class ReadAll(Probe):
    """Keep a copy of what parts with a kink read."""

    def __init__(self) -> None:
        self.maps: dict[int, Tensor] = {}

    def read(self, part: int, x: Tensor) -> Tensor:
        self.maps[part] = x.detach().clone()
        return x


def level(sums: Tensor) -> Tensor:
    """Return sums per channel, none smaller than their mean: a channel's own may cancel, its rounding does not."""
    return sums.maximum(sums.mean())


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute values of the channels, by `level`."""
    return level(x.abs().amax((0, 2, 3)))


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
        where = conv.stride, conv.padding, conv.dilation, conv.groups
        z = conv(x.x)
        v = F.conv2d(x.v + terms / 4 * UNIT**2 * x.x**2, conv.weight**2, None, *where) + UNIT**2 * z**2
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

    def scales(self, seen: Sides) -> dict[str, Tensor]:
        """Return, by parameter, the sums of absolute values that its gradient is a sum of."""
        conv, norm = self.conv, self.norm
        total, x = seen.sums[self.number], seen.inputs[self.number]
        factor, found = torch.ones_like(total), {}
        x = x.reshape(conv.groups, -1).amax(1).repeat_interleave(len(total) // conv.groups)[:, None] if conv.groups > 1 else x
        folded = (total[:, None] * x)[..., None, None].expand_as(conv.weight)
        if norm is not None:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            inverse = (norm.running_var + norm.eps).rsqrt()
            factor = (norm.weight * inverse).abs()
            mean = norm.running_mean if conv.bias is None else norm.running_mean - conv.bias
            found["norm.weight"] = level(((folded * conv.weight).abs().sum((1, 2, 3)) + mean.abs() * total) * inverse)
            found["norm.bias"] = total
        found["conv.weight"] = folded * factor[:, None, None, None]
        found["conv.bias"] = total * factor
        return found


KINKS = {"relu": (0.0,), "relu6": (0.0, 6.0), "leaky_relu": (0.0,), "hardswish": (-3.0, 3.0), "silu": ()}


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
        y, name = self.run(z, False), self.step.name
        with torch.enable_grad():
            leaf = z.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.run(leaf, False).sum(), leaf)
        for kink in self.kinks:
            near = ((z - kink).abs() <= CLOSE * v.sqrt()) & (v > 0)
            slope = torch.where(near, 1.5, slope)
            for at in near.nonzero().tolist():
                off = float(z[tuple(at)]) - kink
                close.append(Pixel(self.number, tuple(at), -off - (1e-12 if off > 0 else -1e-12)))
        own = {"hardswish": (4 + z**2) * (z > -3), "silu": 64 * y**2}.get(name, y**2 if name == "leaky_relu" else torch.zeros(()))
        return Spread(y, v * slope**2 + UNIT**2 * own)


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
            near = inside & (flat != where) & (best - value <= CLOSE * total.sqrt()) & (total > 0)
            for at in near.nonzero().tolist():
                pixel = (*at[:2], int(rows[at[2]]), int(columns[at[3]]))
                found[pixel] = max(found.get(pixel, 0.0), float((best - value)[tuple(at)]) + 1e-12)
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


class Run(NamedTuple):
    """The output and the gradients of a step; those of parameters that are not trained are left out."""

    values: dict[str, Tensor]


def run_step(model: Network, x: Tensor, probe: Probe | None = None) -> Run:
    """Run a step of training on a network under a plan."""
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        y = model(x, probe)
    (y * make_weights(y)).sum().backward()
    return Run({"y": y.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}})


def make_weights(y: Tensor) -> Tensor:
    """Return what outputs are multiplied with: the loss is a sum without kinks."""
    return torch.linspace(-1, 1.5, y.numel(), dtype=y.dtype).cos().reshape(y.shape)


class Judge:
    """A chain's network in single and double precision, and the truth."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.network, self.x = chain.make()
        self.exact = chain.make()[0].double()
        self.close = find_close(self.exact, self.x.double())
        for network in (self.network, self.exact):
            gf.apply_(network, chain.make_plan())
        seen = Sides()
        self.truth = self.run_exact(seen)
        self.scales = find_scales(self.exact, seen, self.truth.values["y"])

    def run_exact(self, sides: Sides) -> Run:
        """Return the truth for some sides of the close pixels."""
        with native.off():
            return run_step(self.exact, self.x.double(), sides)

    def run_library(self) -> Run:
        """Return what the library computes."""
        return run_step(self.network, self.x)

    def run_torch(self) -> Run:
        """Return what torch computes in single precision."""
        with native.off():
            return run_step(self.network, self.x)

    def error(self, run: Run, truth: Run | None = None) -> tuple[float, str]:
        """Return the largest error of a run relative to the sums of absolute values, and of what it is."""
        truth = self.truth if truth is None else truth
        assert run.values.keys() == truth.values.keys()
        errors = {}
        for name, value in truth.values.items():
            off = (run.values[name].double() - value.double()).abs()
            # Nothing but zeros has no rounding.
            errors[name] = float((off / self.scales[name]).where(off > 0, 0).max())
        worst = max(errors, key=errors.__getitem__)
        return errors[worst], worst

    def agrees(self, run: Run) -> bool:
        """Tell whether a run is the truth but for rounding."""
        return self.error(run)[0] <= TOLERANCE

    def find_sides(self, run: Run) -> tuple[float, list[Pixel]]:
        """Return the error of a run for the sides that it has taken, and which pixels are on the other side there."""
        if len(self.close) <= FEW_SIDES:
            flags = product((False, True), repeat=len(self.close))
            choices = [[p for p, other in zip(self.close, others, strict=True) if other] for others in flags]
            tried = [(self.error(run, self.run_exact(Sides(pixels)))[0], pixels) for pixels in choices]
            return min(tried, key=lambda pair: pair[0])
        best: tuple[float, list[Pixel]] = (self.error(run)[0], [])
        for _ in range(3):  # one after the other, as long as that helps
            before = best[0]
            for pixel in self.close:
                other = [p for p in best[1] if p != pixel] if pixel in best[1] else [*best[1], pixel]
                best = min(best, (self.error(run, self.run_exact(Sides(other)))[0], other), key=lambda pair: pair[0])
                if best[0] <= TOLERANCE:
                    return best
            if best[0] == before:
                break
        return best


def find_close(exact: Network, x: Tensor) -> list[Pixel]:
    """Return the pixels that are within rounding of a kink, or of the maximum of a window."""
    close: list[Pixel] = []
    with torch.no_grad():
        at = Spread(x, torch.zeros_like(x))
        for part in exact.parts:
            at = part.spread(at, close)  # type: ignore[operator]
    return close


def find_scales(exact: Network, seen: Sides, y: Tensor) -> dict[str, Tensor]:
    """Return, by name, the sums of absolute values that output and gradients are sums of."""
    scales: dict[str, Tensor] = {}
    for name, part in exact.named_modules():
        if isinstance(part, ConvPart) and part.number in seen.sums:
            scales |= {f"{name}.{key}": value.detach() for key, value in part.scales(seen).items()}
    head, total, means = exact.head, make_weights(y).abs().sum(0), seen.inputs[HEAD]  # means are no larger than pixels
    scales["head.weight"], scales["head.bias"] = level(total)[:, None] * means, level(total)
    scales["y"] = ((head.weight.abs() * means).sum(1) + head.bias.abs()).detach()
    return scales


def move_away(chain: Chain, most: int = 30) -> Chain:
    """Return the chain with biases moved by about a thousandth, as often as it takes until no pixel is close to a kink."""
    for moves in range(most):
        moved = replace(chain, moves=chain.moves + moves)
        network, x = moved.make()
        if not find_close(network.double(), x.double()):
            return moved
    raise AssertionError(f"pixels stay close to kinks: {chain}")


WIDTHS, SIDES = (16, 16, 32, 32, 48, 17, 20, 24), (3, 5, 7, 8, 9, 10, 11, 12, 13, 14)
ACTS = ("relu", "relu", "relu6", "relu6", "hardswish", "silu", "leaky_relu", "hardtanh")


class Drawer:
    """Draws the steps of a chain, and keeps count of channels and pixels meanwhile."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.channels = self.random.choice((3, 8, *WIDTHS))
        self.start = self.channels, (self.side(), self.side())
        self.size = self.start[1]

    def side(self) -> int:
        """Draw a side of the input."""
        return self.random.choice(SIDES)

    def chance(self, share: float) -> bool:
        """Draw a yes or no."""
        return self.random.random() < share

    def act(self) -> Act:
        """Draw an activation."""
        name = self.random.choice(ACTS)
        bounds = {"hardtanh": self.random.choice(((-1.0, 1.0), (-2.0, 1.5))), "leaky_relu": (self.random.choice((0.01, 0.2)),)}
        return Act(name, self.chance(0.5), bounds.get(name, ()))

    def conv(self, out: int, kernel: Pair, stride: Pair = (1, 1), groups: str = "one", **options: Any) -> Conv:
        """Draw the rest of a convolution, with as many zeros as keep the size, where nothing else is said."""
        norm = self.chance(0.75)
        dilation = options.pop("dilation", (1, 1))
        padding = options.pop("padding", tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)))
        step = Conv(out, kernel, stride, padding, dilation, groups, self.chance(0.25 if norm else 0.8), norm)
        self.grow(kernel, stride, padding, dilation)
        self.channels = out
        return step

    def grow(self, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair = (1, 1)) -> None:
        """Note the size behind a window."""
        h, w = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(self.size, kernel, stride, padding, dilation, strict=True)
        )
        self.size = h, w

    def stride(self) -> Pair:
        """Draw a stride; small maps stay as they are."""
        if min(self.size) < 5 or self.chance(0.65):
            return 1, 1
        return self.random.choice(((2, 2), (2, 2), (1, 2), (2, 1)))

    def dense(self) -> list[Step]:
        """Draw a convolution of 3x3 or other pixels, and an activation."""
        kernel = self.random.choice(((3, 3), (3, 3), (3, 3), (1, 1), (5, 5), (3, 1), (1, 3), (2, 2)))
        padding = tuple(self.random.choice((k // 2, k // 2, k - 1, 0)) for k in kernel)
        room = all(n + 2 * p >= k for n, p, k in zip(self.size, padding, kernel, strict=True))
        return [self.conv(self.random.choice(WIDTHS), kernel, self.stride(), **({"padding": padding} if room else {})), self.act()]

    def grouped(self) -> list[Step]:
        """Draw a convolution of two groups, which the library leaves to torch, or a dilated one."""
        if self.channels % 2 == 0 and self.chance(0.5):
            return [self.conv(self.random.choice((16, 24, 32)), (3, 3), self.stride(), "two"), self.act()]
        groups = "depthwise" if self.chance(0.5) else "one"
        out = self.channels if groups == "depthwise" else self.random.choice(WIDTHS)
        return [self.conv(out, (3, 3), self.stride(), groups, dilation=self.random.choice(((2, 2), (1, 2)))), self.act()]

    def depthwise(self, stride: Pair | None = None) -> list[Step]:
        """Draw a depthwise convolution, perhaps behind zeros of its own, and perhaps an activation."""
        stride = self.stride() if stride is None else stride
        kernel = self.random.choice(((3, 3), (3, 3), (5, 5), (7, 7), (3, 5)))
        if self.chance(0.3):
            (kh, kw), (h, w) = kernel, self.size
            zeros = ((kw - 1) // 2, kw // 2, (kh - 1) // 2, kh // 2)
            self.size = h + kh - 1, w + kw - 1
            return [Pad(zeros), self.conv(self.channels, kernel, stride, "depthwise", padding=(0, 0))]
        return [self.conv(self.channels, kernel, stride, "depthwise")]

    def mobile(self) -> list[Step]:
        """Draw an expansion, a depthwise convolution and a projection: perhaps with a residual."""
        channels, stride = self.channels, self.stride()
        wide = self.random.choice((2, 3, 4)) * min(channels, 24)
        steps = [self.conv(wide, (1, 1)), self.act(), *self.depthwise(stride)]
        steps += [self.act()] if self.chance(0.8) else []
        stays = stride == (1, 1) and self.chance(0.7)
        steps.append(self.conv(channels if stays else self.random.choice(WIDTHS), (1, 1)))
        return [Residual(tuple(steps), self.chance(0.5))] if stays else steps

    def basic(self) -> list[Step]:
        """Draw a residual block of two convolutions, and the activation behind it."""
        channels = self.channels
        steps = [self.conv(self.random.choice(WIDTHS), (3, 3)), self.act(), self.conv(channels, self.random.choice(((3, 3), (1, 1))))]
        return [Residual(tuple(steps), self.chance(0.5)), self.act()]

    def pool(self) -> list[Step]:
        """Draw a pooling."""
        kernel, stride, padding = self.random.choice((((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((3, 3), (1, 1), (1, 1))))
        ceil_mode = stride == (2, 2) and all(n % 2 == 0 for n in self.size) and self.chance(0.3)
        self.grow(kernel, stride, padding)
        return [Pool(self.random.choice(("max", "max", "avg")), kernel, stride, padding, ceil_mode and kernel == (2, 2))]

    def steps(self) -> list[Step]:
        """Draw some steps."""
        kinds = [self.dense, self.dense, self.grouped, self.mobile, self.mobile, self.basic, self.pool]
        if self.channels >= 16:
            kinds.append(lambda: [*self.depthwise(), self.act()])
        if min(self.size) < 2:
            kinds = [self.mobile, self.dense]
        return self.random.choice(kinds)()


def draw_chain(seed: int) -> Chain:
    """Return the chain of a seed."""
    drawer = Drawer(seed)
    steps = [*drawer.dense()]
    for _ in range(drawer.random.randint(1, 4)):
        steps += drawer.steps()
    kernel = {"kernel": "lumped"} if drawer.chance(0.15) else {}
    size = {"grid": drawer.random.randint(1, 4)} if drawer.chance(0.25) else {"patch": drawer.random.choice((1, 2, 2, 2, 3, 4, (2, 3)))}
    last = drawer.random.randint(1, 3) if drawer.chance(0.3) else None
    channels, image = drawer.start
    last = None if last is None else min(last, count_convs(steps))
    return Chain(tuple(steps), channels, image, drawer.random.randint(1, 3), tuple({**size, **kernel}.items()), last, seed)


def count_convs(steps: Sequence[Step]) -> int:
    """Count the convolutions of some steps."""
    return sum(count_convs(s.steps) if isinstance(s, Residual) else isinstance(s, Conv) for s in steps)
