"""Random chains of the layers that the C library has kernels for; they print as Python.

`chain_networks` makes networks of them, `chain_judge` compares what the library and torch compute.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradfilter as gf

Pair = tuple[int, int]


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
        planted: How many biases have been chosen so that a pixel lies at a kink, but for the rounding of the bias.
    """

    steps: tuple[Step, ...]
    channels: int = 16
    size: Pair = (8, 8)
    batch: int = 1
    backward: tuple[tuple[str, Any], ...] = (("patch", 2),)
    last: int | None = None
    seed: int = 0
    moves: int = 0
    planted: int = 0

    def make_plan(self) -> gf.Plan:
        """Return the plan."""
        backward = gf.Backward(**dict(self.backward))
        return gf.Plan.all(backward) if self.last is None else gf.Plan.last(self.last, backward)


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
        padding = tuple(p if n + 2 * p >= k else k // 2 for n, p, k in zip(self.size, padding, kernel, strict=True))
        return [self.conv(self.random.choice(WIDTHS), kernel, self.stride(), padding=padding), self.act()]

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
        steps = [
            self.conv(self.random.choice(WIDTHS), (3, 3)),
            self.act(),
            self.conv(channels, self.random.choice(((3, 3), (1, 1)))),
        ]
        return [Residual(tuple(steps), self.chance(0.5)), self.act()]

    def pool(self) -> list[Step]:
        """Draw a pooling."""
        kernel, stride, padding = self.random.choice(
            (((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((3, 3), (1, 1), (1, 1)))
        )
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
    size = (
        {"grid": drawer.random.randint(1, 4)}
        if drawer.chance(0.25)
        else {"patch": drawer.random.choice((1, 2, 2, 2, 3, 4, (2, 3)))}
    )
    last = drawer.random.randint(1, 3) if drawer.chance(0.3) else None
    channels, image = drawer.start
    last = None if last is None else min(last, count_convs(steps))
    return Chain(tuple(steps), channels, image, drawer.random.randint(1, 3), tuple({**size, **kernel}.items()), last, seed)


def count_convs(steps: Sequence[Step]) -> int:
    """Count the convolutions of some steps."""
    return sum(count_convs(s.steps) if isinstance(s, Residual) else isinstance(s, Conv) for s in steps)
