"""Random small networks, assembled from everything that has a patch rule.

A network is drawn as a tree of `Spec`s, which prints as Python: a failing example can be pasted into a test as it is. Parts
take maps of any size, since the same network is run on other images too: what does not fit a small map is left out there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradfilter.bench.setup import shake_

MOST_CHANNELS = 16
LARGEST = 26
"""Maps grow up to this side, so that a chain of upsamplings stays small."""


class Part(nn.Module):
    """A piece of a network, from a map of so many channels (a multiple of 4) to a map of `channels` channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels


@dataclass(frozen=True)
class Spec:
    """A part, before it is made."""

    kind: type[Part]
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"spec({', '.join([self.kind.__name__, *(f'{k}={v!r}' for k, v in self.options.items())])})"

    def make(self, channels: int) -> Part:
        return self.kind(channels, **self.options)


def spec(kind: type[Part], /, **options: Any) -> Spec:
    return Spec(kind, options)


def side(x: Tensor) -> int:
    return min(x.shape[2], x.shape[3])


class Chain(Part):
    """Parts one after the other; too many channels are projected to few."""

    def __init__(self, channels: int, steps: Sequence[Spec]) -> None:
        super().__init__(channels)
        self.parts = nn.ModuleList()
        for step in steps:
            if self.channels > MOST_CHANNELS:
                self.parts.append(Conv(self.channels, out=4, kernel=(1, 1)))
                self.channels = 4
            part = step.make(self.channels)
            self.parts.append(part)
            self.channels = part.channels

    def forward(self, x: Tensor) -> Tensor:
        past = [x]
        for part in self.parts:
            past.append(part(x, past) if isinstance(part, Recall) else part(x))
            x = past[-1]
        return x


class StandardConv(nn.Conv2d):
    """A convolution whose weight is itself a function of a parameter."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        w = self.weight.flatten(1)
        w = ((w - w.mean(1, keepdim=True)) / (w.var(1, unbiased=False, keepdim=True) + 1e-3).sqrt()).view_as(self.weight)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Conv(Part):
    """A convolution of any shape, perhaps with its batch norm; a map that is too small for the kernel is padded."""

    def __init__(
        self,
        channels: int,
        out: int = 4,
        kernel: tuple[int, int] = (3, 3),
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] | str = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: str = "one",
        norm: str = "none",
        standard: bool = False,
        bias: bool = True,
    ) -> None:
        out = channels * (out // 4) if groups == "depthwise" else out
        super().__init__(out)
        count = {"one": 1, "two": 2, "depthwise": channels}[groups]
        stride = (1, 1) if padding == "same" else stride
        make = StandardConv if standard else nn.Conv2d
        self.conv = make(channels, out, kernel, stride, padding, dilation, count, bias)
        self.norm = nn.Identity() if norm == "none" else Norm(out, norm)

    def forward(self, x: Tensor) -> Tensor:
        padding = (0, 0) if isinstance(self.conv.padding, str) else self.conv.padding
        missing = [
            max(0, self.conv.dilation[i] * (self.conv.kernel_size[i] - 1) + 1 - 2 * padding[i] - x.shape[2 + i]) for i in (0, 1)
        ]
        if any(missing) and self.conv.padding != "same":
            x = F.pad(x, (0, missing[1], 0, missing[0]))
        return self.norm(self.conv(x))


class TransposedConv(Part):
    def __init__(
        self,
        channels: int,
        kernel: tuple[int, int] = (2, 2),
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
        norm: str = "none",
    ) -> None:
        super().__init__(channels)
        extra = (stride[0] - 1, max(0, stride[1] - 2))
        self.conv = nn.ConvTranspose2d(channels, channels, kernel, stride, padding, extra, groups, True, dilation)
        self.crop = padding
        self.norm = nn.Identity() if norm == "none" else Norm(channels, norm)

    def forward(self, x: Tensor) -> Tensor:
        c = self.conv
        reach = [c.dilation[i] * (c.kernel_size[i] - 1) + c.output_padding[i] + 1 - 2 * self.crop[i] for i in (0, 1)]
        sizes = [(x.shape[2 + i] - 1) * c.stride[i] + reach[i] for i in (0, 1)]
        return x if min(sizes) < 1 or max(sizes) > LARGEST else self.norm(c(x))


class LastNorm(nn.Module):
    """A layer norm of channels, as ConvNeXt's stem has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


NORMS = {
    "eval": lambda c: nn.BatchNorm2d(c).eval(),
    "train": nn.BatchNorm2d,
    "plain": lambda c: nn.BatchNorm2d(c, affine=False),
    "group": lambda c: nn.GroupNorm(2, c),
    "layer": LastNorm,
    "one group": lambda c: nn.GroupNorm(1, c),
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
    "instance running": lambda c: nn.InstanceNorm2d(c, track_running_stats=True),
}


class Norm(Part):
    """A norm; not of a few numbers, whose gradient is what rounding leaves of it."""

    is_oracle = False

    def __init__(self, channels: int, kind: str = "eval") -> None:
        super().__init__(channels)
        self.norm = NORMS[kind](channels)

    def forward(self, x: Tensor) -> Tensor:
        if side(x) < 2:
            return x
        y = self.norm(x)
        if self.is_oracle and y.requires_grad:
            # Torch 2.13's batch norm gives wrong gradients for a gy of one image with the strides of transposed tokens.
            y.register_hook(Tensor.contiguous)
        return y


class Activation(Part):
    def __init__(self, channels: int, name: str = "ReLU", inplace: bool = False) -> None:
        super().__init__(channels)
        make = getattr(nn, name)
        self.function = make(inplace=True) if inplace and name in INPLACE else make()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


INPLACE = ["ReLU", "ReLU6", "SiLU", "Hardswish", "LeakyReLU", "ELU", "Mish", "Hardsigmoid"]
ACTIVATIONS = [*INPLACE, "GELU", "Sigmoid", "Tanh", "Softplus", "PReLU", "Hardtanh"]


class Dropout(Part):
    """Dropout of values, channels or, as stochastic depth does it, images; whoever runs the network sets the seed."""

    def __init__(self, channels: int, p: float = 0.0, kind: str = "values", inplace: bool = False) -> None:
        super().__init__(channels)
        self.p, self.kind, self.inplace = p, kind, inplace

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "images":
            keep = x.new_empty(len(x), 1, 1, 1).bernoulli_(1 - self.p)
            return x * (keep / (1 - self.p))
        return (F.dropout if self.kind == "values" else F.dropout2d)(x, self.p, True, self.inplace)


class Pool(Part):
    def __init__(
        self,
        channels: int,
        kind: str = "max",
        kernel: tuple[int, int] = (2, 2),
        stride: tuple[int, int] = (2, 2),
        padding: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(channels)
        pads = (kernel[0] // 2, kernel[1] // 2) if padding else (0, 0)
        self.pool: nn.Module = nn.MaxPool2d(kernel, stride, pads, ceil_mode=ceil_mode)
        if kind != "max":
            self.pool = nn.AvgPool2d(kernel, stride, pads, ceil_mode, count_include_pad=kind == "avg padded")
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        return x if any(n < k for n, k in zip(x.shape[2:], self.kernel, strict=True)) else self.pool(x)


class Resize(Part):
    """A map of another size, given as such or as a scale."""

    def __init__(
        self,
        channels: int,
        mode: str = "adaptive",
        size: tuple[int, int] = (2, 2),
        scale: tuple[float, float] | None = None,
        corners: bool = False,
    ) -> None:
        super().__init__(channels)
        self.mode, self.size, self.scale = mode, size, scale
        self.options = {"align_corners": corners} if mode in ("bilinear", "bicubic") else {}

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "adaptive":
            return F.adaptive_avg_pool2d(x, self.size)
        if self.scale is None:
            return F.interpolate(x, self.size, mode=self.mode, **self.options)
        sizes = [int(n * s) for n, s in zip(x.shape[2:], self.scale, strict=True)]
        if min(sizes) < 1 or max(sizes) > LARGEST:
            return x
        return F.interpolate(x, scale_factor=self.scale, mode=self.mode, **self.options)


class Shuffle(Part):
    """Pixels to channels or channels to pixels, with a 1×1 convolution that keeps the number of channels."""

    def __init__(self, channels: int, kind: str = "down") -> None:
        super().__init__(channels)
        wide = (channels, 4 * channels) if kind == "up" else (4 * channels, channels)
        self.kind, self.conv = kind, nn.Conv2d(*wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        if self.kind == "up":
            return x if 2 * max(h, w) > LARGEST else F.pixel_shuffle(self.conv(x), 2)
        x = F.pad(x, (0, w % 2, 0, h % 2))
        if self.kind == "slices":
            quarters = [x[..., i::2, j::2] for i in (0, 1) for j in (0, 1)]
            return self.conv(torch.cat(quarters, 1))
        return self.conv(F.pixel_unshuffle(x, 2))


class ChannelShuffle(Part):
    def __init__(self, channels: int, kind: str = "view", groups: int = 2) -> None:
        super().__init__(channels)
        self.kind, self.groups = kind, groups

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "torch":
            return F.channel_shuffle(x, self.groups)
        n, c, h, w = x.shape
        if self.kind == "unbind":
            return torch.cat(x.view(n, self.groups, c // self.groups, h, w).unbind(1)[::-1], 1)
        if self.kind == "index":
            return x[:, torch.arange(c).flip(0).tolist()]
        return x.reshape(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class Pad(Part):
    def __init__(
        self, channels: int, mode: str = "constant", pads: tuple[int, int, int, int] = (1, 1, 1, 1), value: float = 0.0
    ) -> None:
        super().__init__(channels)
        self.mode, self.pads, self.value = mode, pads, value

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "constant":
            crops = side(x) > 2 * abs(min(self.pads))
            return F.pad(x, self.pads, value=self.value) if crops else x
        return F.pad(x, [abs(p) for p in self.pads], self.mode) if side(x) > 3 else x


class Thin(Part):
    """The parameter-free shortcut of CIFAR ResNets: every second pixel, channels filled up with zeros."""

    def __init__(self, channels: int, widen: bool = False, start: int = 0, step: int = 2) -> None:
        super().__init__(channels + 4 * widen)
        self.widen, self.start, self.step = widen, start, step

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, self.start :: self.step, :: self.step] if side(x) > self.start else x
        return F.pad(x, (0, 0, 0, 0, 2, 2)) if self.widen else x


class BlurPool(Part):
    kernel: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("kernel", (row[:, None] * row).expand(channels, 1, 3, 3).clone())

    def forward(self, x: Tensor) -> Tensor:
        if side(x) < 2:
            return x
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), self.kernel, stride=2, groups=self.channels)


class Gate(Part):
    """Attention over channels or places: one factor for a whole map, or one for each pixel."""

    def __init__(self, channels: int, kind: str = "se") -> None:
        super().__init__(channels)
        self.kind = kind
        if kind in ("se", "se pool"):
            self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)
        elif kind == "linear":
            self.linear = nn.Linear(channels, channels)
        elif kind == "eca":
            self.conv = nn.Conv1d(1, 1, 3, padding=1)
        elif kind == "spatial":
            self.conv = nn.Conv2d(2, 1, 7, padding=3)
        elif kind == "pixels":
            self.conv = nn.Conv2d(channels, channels, 1)
        elif kind == "response":
            self.gamma, self.beta = (nn.Parameter(torch.rand(1, channels, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("se", "se pool"):
            s = x.mean((2, 3), keepdim=True) if self.kind == "se" else F.adaptive_avg_pool2d(x, 1)
            return x * self.up(F.relu(self.down(s))).sigmoid()
        if self.kind == "linear":
            return x * torch.sigmoid(self.linear(x.amax((2, 3))))[:, :, None, None]
        if self.kind == "eca":
            s = self.conv(x.mean((2, 3)).unsqueeze(1)).sigmoid()
            return x * s.view(len(x), -1, 1, 1).expand_as(x)
        if self.kind == "spatial":
            s = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
            return x * self.conv(s).sigmoid()
        if self.kind == "pixels":
            return x * F.hardsigmoid(self.conv(x))
        if self.kind == "softmax":
            return x * x.softmax(1)
        strength = x.norm(p=2, dim=(2, 3), keepdim=True)
        return x + self.beta + self.gamma * (x * (strength / (strength.mean(1, keepdim=True) + 0.1)))


class LastBlock(Part):
    """A block that works on channels-last maps, or on tokens, with linear layers, layer norm and layer scale."""

    def __init__(self, channels: int, kind: str = "nhwc", norm: bool = True, scale: bool = True) -> None:
        super().__init__(channels)
        self.kind, self.depthwise = kind, nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels) if norm else nn.Identity()
        self.wide, self.narrow = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)
        self.scale = nn.Parameter(torch.rand(channels)) if scale else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x)
        h, w = y.shape[2:]
        y = y.permute(0, 2, 3, 1) if self.kind == "nhwc" else y.flatten(2).transpose(1, 2)
        y = self.narrow(F.gelu(self.wide(self.norm(y))))
        y = y if self.scale is None else self.scale * y
        if self.kind == "nhwc":
            return x + y.permute(0, 3, 1, 2)
        if self.kind == "unflatten":
            return x + y.transpose(1, 2).unflatten(2, (h, w))
        return x + y.transpose(1, 2).reshape(len(x), -1, h, w)


class Fit(Part):
    """Bring a map to the shape of another: the channels by a 1×1 convolution, or cut off and filled up with zeros."""

    def __init__(self, channels: int, out: int, projects: bool = True, resize: str = "bilinear") -> None:
        super().__init__(out)
        self.conv = nn.Conv2d(channels, out, 1, bias=False) if projects and channels != out else None
        self.missing, self.resize = out - channels, resize

    def forward(self, x: Tensor, like: Tensor) -> Tensor:  # type: ignore[override]
        if self.conv is not None:
            x = self.conv(x)
        elif self.missing:
            x = F.pad(x, (0, 0, 0, 0, 0, self.missing)) if self.missing > 0 else x[:, : self.channels]
        if x.shape[2:] == like.shape[2:]:
            return x
        if self.resize == "adaptive":
            return F.adaptive_avg_pool2d(x, (like.shape[2], like.shape[3]))
        if self.resize == "pad":
            return F.pad(x, (0, like.shape[3] - x.shape[3], 0, like.shape[2] - x.shape[2]))
        return F.interpolate(x, like.shape[2:], mode=self.resize)


JOINS = {
    "add": lambda a, b: a + b,
    "iadd": lambda a, b: a.add_(b),
    "sub": torch.sub,
    "mul": torch.mul,
    "gate": lambda a, b: a * b.sigmoid(),
    "imul": lambda a, b: a.mul_(b.tanh()),
    "div": lambda a, b: a / (1.5 + b.tanh()),
    "maximum": torch.maximum,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "stack": lambda a, b: torch.stack([a, b], 1).mean(1),
    "interleave": lambda a, b: torch.stack([a, b], 2).flatten(1, 2),
    "cat": lambda a, b: torch.cat([a, b], 1),
}
TWICE_AS_MANY = ("interleave", "cat")


class Join(Part):
    """Two maps to one; the second is brought to the shape of the first."""

    def __init__(self, channels: int, other: int, how: str, projects: bool, resize: str) -> None:
        super().__init__(channels * 2 if how in TWICE_AS_MANY else channels)
        self.how, self.fit = how, Fit(other, channels, projects, resize)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        return JOINS[self.how](a, self.fit(b, a))


class Branches(Part):
    """Two ways from one map, which meet again; without steps a way is the shortcut of a residual block."""

    def __init__(
        self,
        channels: int,
        steps: Sequence[Spec] = (),
        shortcut: Sequence[Spec] = (),
        how: str = "add",
        projects: bool = True,
        resize: str = "bilinear",
    ) -> None:
        super().__init__(channels)
        self.steps, self.shortcut = Chain(channels, steps), Chain(channels, shortcut)
        self.join = Join(self.steps.channels, self.shortcut.channels, how, projects, resize)
        self.channels = self.join.channels

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.steps(x), self.shortcut(x))


class Split(Part):
    """Channels apart, a way for each half, and together again."""

    def __init__(
        self,
        channels: int,
        kind: str = "chunk",
        first: Sequence[Spec] = (),
        second: Sequence[Spec] = (),
        how: str = "cat",
        resize: str = "bilinear",
    ) -> None:
        super().__init__(channels)
        self.kind, self.width = kind, channels // 2
        # Parts take multiples of four channels: a convolution in front of each way where a half is none.
        odd = self.width % 4 != 0
        self.enter = nn.ModuleList(Conv(self.width, kernel=(1, 1)) if odd else nn.Identity() for _ in (first, second))
        ways = [Chain(4 if odd else self.width, way) for way in (first, second)]
        self.ways = nn.ModuleList(ways)
        self.join = Join(ways[0].channels, ways[1].channels, how, True, resize)
        self.channels = self.join.channels

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "chunk":
            halves = x.chunk(2, 1)
        elif self.kind == "split":
            halves = torch.split(x, [self.width, self.width], dim=1)
        elif self.kind == "tensor_split":
            halves = x.tensor_split(2, 1)
        elif self.kind == "slices":
            halves = (x[:, : self.width], x[:, self.width :])
        else:
            halves = x.view(len(x), 2, self.width, *x.shape[2:]).unbind(1)
        first, second = (way(enter(h)) for way, enter, h in zip(self.ways, self.enter, halves, strict=True))
        return self.join(first, second)


class Recall(Part):
    """Meet an earlier map of the same chain, as U-Net and DenseNet do."""

    def __init__(self, channels: int, back: int = 1, how: str = "cat", resize: str = "bilinear") -> None:
        super().__init__(channels * 2 if how in TWICE_AS_MANY else channels)
        self.back, self.how, self.resize, self.own = back, how, resize, channels

    def forward(self, x: Tensor, past: list[Tensor]) -> Tensor:  # type: ignore[override]
        other = past[-1 - self.back % len(past)]
        fit = Fit(other.shape[1], self.own, False, self.resize)
        return JOINS[self.how](x, fit(other, x))


class Checkpoint(Part):
    """Parts that run again in backward."""

    def __init__(self, channels: int, steps: Sequence[Spec] = ()) -> None:
        chain = Chain(channels, steps)
        super().__init__(chain.channels)
        self.chain = chain

    def forward(self, x: Tensor) -> Tensor:
        result = checkpoint(self.chain, x, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result


HEADS = {
    "mean": lambda x: x.mean((2, 3)),
    "mean of rows": lambda x: x.mean([-2, -1], keepdim=True).flatten(1),
    "adaptive": lambda x: torch.flatten(F.adaptive_avg_pool2d(x, 1), 1),
    "amax": lambda x: x.amax((2, 3)),
    "max pool": lambda x: F.adaptive_max_pool2d(x, 1).flatten(1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).mean(1),
    "sum": lambda x: x.permute(0, 2, 3, 1).sum((1, 2)) / 10,
    "both": lambda x: x.mean((2, 3)) + x.amax((2, 3)),
    "flatten": lambda x: F.adaptive_avg_pool2d(x, 2).flatten(1),
    "view": lambda x: F.interpolate(x, (2, 2)).reshape(len(x), -1),
}


class Network(nn.Module):
    """A stem convolution, parts, a pooling and a classifier, in float64."""

    def __init__(self, stem: Spec, steps: Sequence[Spec], head: str) -> None:
        super().__init__()
        first = stem.make(4)
        chain = Chain(first.channels, steps)
        self.features, self.head = nn.Sequential(first, chain), head
        self.classifier = nn.Linear(chain.channels * (4 if head in ("flatten", "view") else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(HEADS[self.head](self.features(x)))


@dataclass(frozen=True)
class Drawn:
    """All that a network is made from."""

    stem: Spec
    steps: list[Spec]
    head: str = "mean"

    def make(self) -> Network:
        """Return the network, always with the same weights."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = Network(self.stem, self.steps, self.head)
            modes = {m: m.training for m in network.modules()}
            # Statistics and affines as training would leave them; dropout stays as drawn.
            for module in network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    shake_(module)
                if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
                    nn.init.uniform_(module.weight, 0.5, 1.5)
                    nn.init.normal_(module.bias, 0, 0.1)
        assert all(m.training == mode for m, mode in modes.items())
        return network.double()


POOLS = ("max", "avg", "avg padded")
MODES = ("adaptive", "nearest", "nearest-exact", "bilinear", "bicubic", "area")
GATES = ("se", "se pool", "linear", "eca", "spatial", "pixels", "softmax", "response")
LAYOUTS = ("nhwc", "reshape", "unflatten")
ORDERS = ("view", "torch", "unbind", "index")
SHUFFLES = ("down", "up", "slices")
PADS = ("constant", "reflect", "replicate", "circular")
DROPS = ("values", "channels", "images")
SPLITS = ("chunk", "split", "tensor_split", "slices", "unbind")

EVERY = [
    *(spec(Conv, norm=kind) for kind in NORMS),
    spec(Conv, standard=True),
    spec(TransposedConv, stride=(2, 1)),
    *(spec(Activation, name=name, inplace=inplace) for name in ACTIVATIONS for inplace in (False, True)),
    *(spec(Pool, kind=kind) for kind in POOLS),
    *(spec(Resize, mode=mode, size=(3, 8)) for mode in MODES),
    *(spec(Gate, kind=kind) for kind in GATES),
    *(spec(LastBlock, kind=kind) for kind in LAYOUTS),
    *(spec(ChannelShuffle, kind=kind) for kind in ORDERS),
    *(spec(Shuffle, kind=kind) for kind in SHUFFLES),
    *(spec(Pad, mode=mode, pads=(1, 2, 0, 1)) for mode in PADS),
    *(spec(Dropout, p=0.3, kind=kind) for kind in DROPS),
    spec(Thin, widen=True),
    spec(BlurPool),
    *(spec(Branches, steps=[spec(Conv, out=8)], how=how) for how in JOINS),
    *(spec(Split, kind=kind, first=[spec(Conv)]) for kind in SPLITS),
    spec(Checkpoint, steps=[spec(Conv, norm="train"), spec(Activation)]),
]
"""Every kind of part once, so that none is left to chance."""


def pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw a pair, most often of equals."""
    return st.one_of(values.map(lambda v: (v, v)), st.tuples(values, values))


def one_of(*names: str) -> st.SearchStrategy[str]:
    return st.sampled_from(names)


def parts(kind: type[Part], /, **options: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    """Draw a part: always what kind it is, but any other option may keep its default."""
    chosen = {name: options.pop(name) for name in ("kind", "name", "mode", "how") if name in options}
    return st.fixed_dictionaries(chosen, optional=options).map(lambda drawn: Spec(kind, drawn))


small, norms = st.integers(1, 3), st.sampled_from(list(NORMS))
resizes, hows = one_of("bilinear", "nearest", "bicubic", "adaptive", "pad"), st.sampled_from(list(JOINS))

convs = parts(
    Conv,
    out=st.sampled_from([4, 8, 12]),
    kernel=pairs(st.sampled_from([1, 2, 3, 4, 5, 7])),
    stride=pairs(small),
    padding=st.one_of(pairs(st.integers(0, 3)), st.just("same")),
    dilation=pairs(small),
    groups=one_of("one", "two", "depthwise"),
    norm=norms,
    standard=st.booleans(),
    bias=st.booleans(),
)

simple = st.one_of(
    parts(Activation, name=st.sampled_from(ACTIVATIONS), inplace=st.booleans()),
    convs,
    parts(Norm, kind=norms),
    parts(
        Pool,
        kind=one_of(*POOLS),
        kernel=pairs(small),
        stride=pairs(small),
        padding=st.booleans(),
        ceil_mode=st.booleans(),
    ),
    parts(
        TransposedConv,
        kernel=pairs(st.integers(1, 4)),
        stride=pairs(small),
        padding=pairs(st.integers(0, 2)),
        dilation=pairs(st.integers(1, 2)),
        groups=st.sampled_from([1, 2, 4]),
        norm=norms,
    ),
    parts(
        Resize,
        mode=one_of(*MODES),
        size=pairs(st.integers(1, 9)),
        scale=pairs(st.sampled_from([2.0, 0.5, 1.7, 0.6])),
        corners=st.booleans(),
    ),
    parts(Gate, kind=one_of(*GATES)),
    parts(LastBlock, kind=one_of(*LAYOUTS), norm=st.booleans(), scale=st.booleans()),
    parts(ChannelShuffle, kind=one_of(*ORDERS), groups=st.sampled_from([2, 4])),
    parts(Shuffle, kind=one_of(*SHUFFLES)),
    parts(
        Pad,
        mode=one_of(*PADS),
        pads=st.tuples(*[st.integers(-1, 2)] * 4),
        value=st.sampled_from([0.0, 0.7]),
    ),
    parts(Thin, widen=st.booleans(), start=st.integers(0, 2), step=small),
    parts(BlurPool),
    parts(Dropout, p=st.sampled_from([0.0, 0.3]), kind=one_of(*DROPS), inplace=st.booleans()),
)
recalls = parts(Recall, back=st.integers(1, 4), how=hows, resize=resizes)


def nest(inner: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    """Draw a part that has other parts in it."""
    steps = st.lists(st.one_of(inner, simple, recalls), max_size=3)
    return st.one_of(
        parts(Branches, steps=steps, shortcut=steps, how=hows, projects=st.booleans(), resize=resizes),
        parts(
            Split,
            kind=one_of(*SPLITS),
            first=steps,
            second=steps,
            how=hows,
            resize=resizes,
        ),
        parts(Checkpoint, steps=steps),
    )


steps = st.lists(st.one_of(simple, recalls, st.recursive(simple, nest, max_leaves=4)), min_size=1, max_size=6)
networks = st.builds(Drawn, stem=convs, steps=steps, head=st.sampled_from(list(HEADS)))
sizes = pairs(st.integers(5, 24))
