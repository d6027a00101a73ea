"""Tables of keeps, and of layers whose input they hold: a new keep is one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import gradfilter as gf
from cases import CONVS, draw
from gradfilter.keep import Keep, Kept, State, Tucker, hold
from gradfilter.keep.low_rank import Reassemble
from gradfilter.keep.tucker import project
from helpers_safety import randomise


@dataclass(frozen=True)
class KeepCase:
    """A keep and what it promises.

    Attributes:
        keep: The keep.
        fixed: Whether the bytes it holds are known before the first batch.
        exact: Whether it holds every number as it is.
        lost: From x to the most that |x − x̂|² can be; None where nothing is promised of any one batch.
    """

    keep: Keep
    fixed: bool = False
    exact: bool = False
    lost: Callable[[Tensor], float] | None = None

    def __str__(self) -> str:
        """Return the test id."""
        return str(self.keep)


def share_of(share: float) -> Callable[[Tensor], float]:
    """Return a bound that is a share of the energy."""
    return lambda x: share * float(x.square().sum())


def per_mode(energy: float, first: int = 0) -> Callable[[Tensor], float]:
    """Return the bound of a decomposition that keeps a share of the energy in each mode."""
    return lambda x: (x.dim() - first) * (1 - energy) * float(x.square().sum()) + 1e-12


def in_steps(group: int | None, share: float) -> Callable[[Tensor], float]:
    """Return the bound of eight bits: each number is off by a share of the step of its channel (axis 1) or group."""

    def lost(x: Tensor) -> float:
        parts = x.transpose(0, 1).flatten(1) if group is None else x.reshape(-1)
        if group is not None:
            parts = torch.cat([parts, parts[-1:].expand(-len(parts) % group)]).reshape(-1, group)
        steps = (parts.amax(1) - parts.amin(1)) / 255
        return float((share * steps).square().sum()) * parts.shape[1] * (1 + 1e-9)

    return lost


KEEPS = [
    KeepCase(gf.Full(), fixed=True, exact=True, lost=share_of(0)),
    KeepCase(gf.BFloat16(), fixed=True, lost=share_of(2**-16)),
    KeepCase(gf.Int8(), fixed=True, lost=in_steps(None, 1)),
    KeepCase(gf.Int8(stochastic=False), fixed=True, lost=in_steps(None, 0.5)),
    KeepCase(gf.Int8(group=7), fixed=True, lost=in_steps(7, 1)),
    KeepCase(gf.Int8(group=64, stochastic=False), fixed=True, lost=in_steps(64, 0.5)),
    KeepCase(gf.SVD(0.8), lost=share_of(0.2)),
    KeepCase(gf.SVD(1.0), fixed=True, exact=True, lost=share_of(0)),
    KeepCase(gf.HOSVD(0.8), lost=per_mode(0.8)),
    KeepCase(gf.HOSVD(0.99), lost=per_mode(0.99)),
    KeepCase(gf.HOSVD(1.0), fixed=True, exact=True, lost=share_of(0)),
    KeepCase(gf.Subspace(rank=2), fixed=True),
    KeepCase(gf.Subspace(rank=10**6), fixed=True, exact=True, lost=share_of(0)),
    KeepCase(gf.Subspace(rank=3, warm_start=False), fixed=True),
    KeepCase(gf.Subspace(energy=0.9), lost=per_mode(0.9)),
    KeepCase(gf.Subspace(energy=1.0), fixed=True, exact=True, lost=share_of(0)),
    KeepCase(gf.Subspace(memory="2KB")),
    KeepCase(gf.Subspace(memory="1GB"), exact=True, lost=share_of(0)),
    KeepCase(gf.Fixed(rank=2), fixed=True),
    KeepCase(gf.Fixed(rank=10**6, batches=1), fixed=True, exact=True, lost=share_of(0)),
    KeepCase(gf.Fixed(energy=0.9, batches=2), lost=per_mode(0.9, first=1)),
    KeepCase(gf.Fixed(energy=1.0), fixed=True, exact=True, lost=share_of(0)),
    KeepCase(gf.Fixed(memory="2KB")),
]
"""Every keep with every option."""
EXACT = [case for case in KEEPS if case.exact]


def open_kept(kept: Kept) -> Tensor:
    """Return what was held as a tensor."""
    opened = kept.open(kept.tensors)
    return opened.expand().core if isinstance(opened, Tucker) else opened


def restore(keep: Keep, x: Tensor, state: State | None = None, channels: int = 1) -> Tensor:
    """Return x̂: x compressed and opened again."""
    return open_kept(keep.compress(x, state or State("layer"), channels))


@dataclass(frozen=True)
class InFactors(Keep):
    """For tests: hold random orthonormal factors of given ranks, whatever that costs; or what these make of x, rebuilt.

    Attributes:
        ranks: Of the modes, the last of the input's; 0 for a mode without a factor.
        rebuilt: Whether x̂ itself is held.
        seed: Of the factors.
    """

    ranks: tuple[int, ...]
    rebuilt: bool = False
    seed: int = 0

    def compress(self, x: Tensor, state: State, channels: int = 1) -> Kept:
        ranks = self.ranks[-x.dim() :]
        factors = [make_factor(n, r, self.seed + mode) for mode, (n, r) in enumerate(zip(x.shape, ranks, strict=True))]
        tucker = project(x, factors)
        if self.rebuilt:
            return hold(tucker.expand().core)
        return Kept(tucker.tensors, Reassemble(tuple(factor is not None for factor in factors)))

    @property
    def around(self) -> Keep:
        return gf.Full()

    def __str__(self) -> str:
        """Return the test id."""
        return f"{self.ranks} rebuilt" if self.rebuilt else str(self.ranks)


def make_factor(length: int, rank: int, seed: int) -> Tensor | None:
    """Return an orthonormal factor, square where the rank is that large; None for no rank."""
    return torch.linalg.qr(draw(length, min(rank, length), seed=seed)).Q if rank else None


class Wrapped(nn.Module):
    """A layer alone in a network: what is tested is `layer`, whose input is the network's, or behind a pointwise conv."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Tokens(nn.Module):
    """A Linear layer on what a convolution gives: features, tokens, or a map with channels last."""

    def __init__(self, layout: str, channels: int = 4) -> None:
        super().__init__()
        self.layout, self.enter, self.layer = layout, nn.Conv2d(channels, 6, 1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.layout == "features":
            return self.layer(x.mean((2, 3)))
        if self.layout == "tokens":
            return self.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Weight(nn.Module):
    """A bare weight."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class Product(nn.Module):
    """A product of a convolution's result and a weight, by a function."""

    def __init__(self, weight: tuple[int, ...], run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.layer, self.run = nn.Conv2d(4, 6, 1), Weight(*weight), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.enter(x), self.layer.weight)


@dataclass(frozen=True)
class Layer:
    """A layer: how to make a network of it, and its input.

    Attributes:
        name: For test ids.
        make: Makes the network; what is tested is its part `layer`.
        channels: Of the input.
    """

    name: str
    make: Callable[[], nn.Module]
    channels: int = 4

    def __str__(self) -> str:
        """Return the test id."""
        return self.name

    def make_network(self) -> nn.Module:
        """Return the network in float64, always with the same weights."""
        return randomise(self.make().double())

    def make_input(self, n: int = 3, size: tuple[int, int] = (13, 10), seed: int = 0) -> Tensor:
        """Return an input whose size is no multiple of a patch."""
        return draw(n, self.channels, *size, seed=seed)


def conv(name: str, kernel: Any, channels: tuple[int, int] = (4, 6), transposed: bool = False, **options: Any) -> Layer:
    """Return a row with one convolution."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    return Layer(name, lambda: Wrapped(kind(*channels, kernel, **options)), channels[0])


def split_heads(x: Tensor) -> Tensor:
    """Return channels as two heads."""
    return x.unflatten(1, (2, 3))


LAYERS = [
    *(
        conv(str(c), c.kernel, c.channels, stride=c.stride, padding=c.padding, dilation=c.dilation, groups=c.groups)
        for c in CONVS
    ),
    # Where public code for compressed activations crashes or is silently wrong.
    conv("stride 2 dilation 2", 3, stride=2, dilation=2, padding=2),
    conv("1x3", (1, 3)),
    conv("3x1", (3, 1)),
    conv("2 groups", 3, groups=2, padding=1),
    conv("3 groups", 3, (6, 9), groups=3, padding=1),
    conv("2 groups 1x1", 1, groups=2),
    # The rest of what there is.
    conv("5x5 dilation 3", 5, dilation=3, padding=6),
    conv("7x7 stride (2, 1)", 7, stride=(2, 1), padding=3),
    conv("depthwise", 3, (4, 4), groups=4, padding=1),
    conv("depthwise 5x5 valid", 5, (4, 4), groups=4),
    conv("depthwise 1x1", 1, (4, 4), groups=4),
    conv("depthwise multiplier 3 stride 2", 3, (4, 12), groups=4, stride=2, padding=1),
    conv("kernel larger than the map", (15, 11), padding=(7, 5)),
    conv("one channel", 3, (1, 1), padding=1),
    conv("no bias", 3, bias=False),
    conv("same dilation 2", 3, padding="same", dilation=2),
    conv("reflect", 3, padding=1, padding_mode="reflect"),
    conv("circular", (3, 5), padding=(1, 2), padding_mode="circular"),
    conv("replicate stride 2", 3, padding=2, padding_mode="replicate", stride=2),
    conv("transposed", 3, transposed=True, stride=2, padding=1, output_padding=1),
    conv("transposed 1x1", 1, transposed=True),
    conv("transposed depthwise", 4, (4, 4), transposed=True, stride=2, padding=1, groups=4),
    conv("transposed 2 groups dilation 2", 3, transposed=True, groups=2, dilation=2),
    Layer("Linear of features", lambda: Tokens("features")),
    Layer("Linear of tokens", lambda: Tokens("tokens")),
    Layer("Linear of a map", lambda: Tokens("map")),
    Layer("einsum", lambda: Product((5, 6), lambda x, w: torch.einsum("nchw,dc->ndhw", x, w))),
    Layer("einsum of heads", lambda: Product((2, 3, 5), lambda x, w: torch.einsum("nGChw,GCd->nGdhw", split_heads(x), w))),
    Layer("einsum of no common axis", lambda: Product((2,), lambda x, w: torch.einsum("nchw,d->ndchw", x, w).flatten(1, 2))),
    Layer("matmul", lambda: Product((6, 5), lambda x, w: (x.permute(0, 2, 3, 1) @ w).permute(0, 3, 1, 2))),
    Layer("matmul from the left", lambda: Product((5, 6), lambda x, w: w @ x.flatten(2))),
]
"""Every kind of layer that holds its input."""


def differentiate(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the input and of all parameters, for a fixed gradient of the output."""
    x = x.clone().requires_grad_()
    y = network(x)
    named = dict(network.named_parameters())
    found = torch.autograd.grad((y * draw(*y.shape, seed=5).to(y.dtype)).sum(), [x, *named.values()])
    return dict(zip(["x", *named], found, strict=True))


@cache
def share_network(layer: Layer) -> nn.Module:
    """Return a layer's network, one for all tests that put a plan of their own on it."""
    return layer.make_network()


def differentiate_planned(layer: Layer, x: Tensor, **backward: Any) -> dict[str, Tensor]:
    """Return the gradients of a layer's network under a plan."""
    return differentiate(gf.apply_(share_network(layer), gf.Plan.all(gf.Backward(**backward))), x)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], names: tuple[str, ...] | None = None) -> None:
    """Compare gradients, relative to the norm of each."""
    assert got.keys() == want.keys()
    for name, g in want.items():
        if names is None or name in names:
            error = float((got[name] - g).norm() / g.norm().clamp(min=1e-12))
            assert error <= 1e-9, f"{name}: relative error {error:.2e}"
