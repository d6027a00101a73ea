"""Small networks of every kind, and networks that do odd things, for the tests of compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from helpers_safety import Net
from segment_nets import make_segmenter
from test_tokens import Tokens

CLASSES = 4


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Sequential:
    """Return a convolution with its batch norm."""
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Classifier(nn.Module):
    """A stem, a body that the class's own `run` is, and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.fc = conv(3, 8, stride=2), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.run(F.relu(self.stem(x))).mean((2, 3)))

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class SqueezeExcite(Classifier):
    """An inverted residual block with squeeze-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise, self.project = conv(8, 16, 1), conv(16, 16, 5, groups=16), conv(16, 8, 1)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def run(self, x: Tensor) -> Tensor:
        y = F.silu(self.depthwise(F.silu(self.expand(x))))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.project(y)


class Dense(Classifier):
    """A dense block, norms before convolutions, and its transition."""

    def __init__(self) -> None:
        super().__init__(10)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8 + 4 * i) for i in range(4)])
        self.convs = nn.ModuleList([nn.Conv2d(8 + 4 * i, 4, 3, padding=1, bias=False) for i in range(3)])
        self.transition = nn.Conv2d(20, 10, 1, bias=False)

    def run(self, x: Tensor) -> Tensor:
        maps = [x]
        for norm, layer in zip(self.norms, self.convs, strict=False):
            maps.append(layer(F.relu(norm(torch.cat(maps, 1)))))
        return F.avg_pool2d(self.transition(F.relu(self.norms[3](torch.cat(maps, 1)))), 2)


class ConvNext(Classifier):
    """A block with a wide depthwise convolution, a norm of channels and Linear layers on a map [N, H, W, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8)
        self.wide, self.narrow, self.scale = nn.Linear(8, 32), nn.Linear(32, 8), nn.Parameter(torch.ones(8))

    def run(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


class Branches(Classifier):
    """Two branches at two resolutions, joined in three ways."""

    def __init__(self) -> None:
        super().__init__(24)
        self.fine, self.coarse, self.mix = conv(8, 8), conv(8, 8, stride=2), conv(8, 8, 1)

    def run(self, x: Tensor) -> Tensor:
        a, b = F.hardswish(self.fine(x)), F.leaky_relu(self.coarse(F.max_pool2d(x, 3, 1, 1)))
        b = F.interpolate(self.mix(b), x.shape[2:], mode="bilinear")
        return torch.cat([a + b, a * b, torch.maximum(a, b)], 1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "residual": Net,
    "squeeze-excite": SqueezeExcite,
    "dense": Dense,
    "convnext": ConvNext,
    "branches": Branches,
    "transformer": Tokens,
    "deeplab": lambda: make_segmenter("aspp"),
    "u-net": lambda: make_segmenter("concatenated"),
    "pyramid": lambda: make_segmenter("lateral"),
}
"""The last three have two outputs, maps of logits: for the loss of each pixel, and an auxiliary one."""


class Odd(Classifier):
    """A network of a few layers; what is odd comes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.prepare()

    def prepare(self) -> None:
        """Add or change layers."""

    def middle(self, x: Tensor) -> Tensor:
        return x

    def run(self, x: Tensor) -> Tensor:
        return self.layer(self.middle(F.relu(self.norm(self.layer(x)))))


class EndsInPlace(Odd):
    """The output is a ReLU in place."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class MapEndsInPlace(Odd):
    """The output is a map and a ReLU in place."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.run(F.relu(self.stem(x))), inplace=True)


class ChangesView(Odd):
    """A view of a tensor without a gradient is changed."""

    def middle(self, x: Tensor) -> Tensor:
        gates = x.detach().clone()
        first, second = gates.chunk(2, 1)
        first.mul_(3)
        second[:, :2].neg_()
        return x * gates


class Aliases(Odd):
    """Outputs that are each other, and the input."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.view(len(y), 2, -1), y, x[:, :1], self.fc.weight


class Numbers(Odd):
    """Outputs of other dtypes."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.argmax(1), y > 0, torch.arange(3)


class SharedNorm(Odd):
    """A convolution and a norm are used twice, and what is between them."""

    def middle(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.layer(x)))


class WeightNorm(Odd):
    """Weights that are computed."""

    def prepare(self) -> None:
        self.layer = weight_norm(self.layer)
        self.stem[0] = weight_norm(self.stem[0])


class SpectralNorm(Odd):
    """A weight whose computation moves buffers."""

    def prepare(self) -> None:
        self.layer = spectral_norm(self.layer)


class Scales(Odd):
    """Parameters outside of layers."""

    def prepare(self) -> None:
        self.gain, self.share = nn.Parameter(torch.full((8, 1, 1), 0.3)), nn.Parameter(torch.tensor(0.7))
        self.place = nn.Parameter(torch.linspace(-1, 1, 8 * 16 * 16).reshape(1, 8, 16, 16))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.gain + x.tanh() * self.share + self.place


class Strided(Odd):
    """Parameters and buffers that are not contiguous."""

    def prepare(self) -> None:
        self.layer.weight = nn.Parameter(torch.randn(8, 8, 3, 3).permute(1, 0, 3, 2) * 0.2)
        self.fc.weight = nn.Parameter(torch.randn(8, 8)[:, ::2].t() * 0.3)
        self.norm.weight, self.norm.running_var = nn.Parameter(torch.ones(16)[::2]), torch.linspace(0.5, 2, 16)[::2]


class Flat(Odd):
    """All parameters are parts of one tensor."""

    def flatten(self) -> None:
        flat, begin = torch.cat([p.detach().flatten() for p in self.parameters()]), 0
        for p in self.parameters():
            p.data = flat[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()


class Dropouts(Odd):
    """Random numbers for each pixel, for each channel, and some that nobody reads."""

    def middle(self, x: Tensor) -> Tensor:
        F.dropout(x, 0.5, self.training)
        return F.dropout2d(F.dropout(x, 0.3, self.training), 0.2, self.training) + torch.rand_like(x) * x


class Average(Odd):
    """A buffer follows the activations."""

    average: Tensor

    def prepare(self) -> None:
        self.register_buffer("average", torch.zeros(2, 8, 16, 16))

    def middle(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach(), alpha=0.1)
        return x + self.average


class ChangesImage(Odd):
    """The input is changed in place."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(2).sub_(1))


class ClampsWeight(Odd):
    """A parameter is changed in forward."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Attends(Odd):
    """Torch's own attention, with dropout."""

    def prepare(self) -> None:
        self.attention = nn.MultiheadAttention(8, 2, 0.1, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(x.shape)


class Checkpointed(Odd):
    """A part is computed again in backward."""

    def middle(self, x: Tensor) -> Tensor:
        result = checkpoint(lambda y: F.relu(self.layer(y)), x, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result


class FactorsOfZero(Odd):
    """Batch norms with factors that are exactly 0."""

    def prepare(self) -> None:
        self.last = conv(8, 8)

    def zero(self) -> None:
        nn.init.zeros_(self.last[1].weight)  # type: ignore[arg-type]
        with torch.no_grad():
            self.norm.weight[::2] = 0

    def middle(self, x: Tensor) -> Tensor:
        return x + self.last(x)


class Constants(Odd):
    """Tensors that are made in forward."""

    def middle(self, x: Tensor) -> Tensor:
        ramp = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=x.dtype)[:, None, None]
        return x * ramp + torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)


class Padded(Odd):
    """Pads of all kinds."""

    def middle(self, x: Tensor) -> Tensor:
        y = F.pad(F.pad(x, (1, 0, 2, 1), mode="reflect"), (0, 1, 1, 1), mode="replicate")
        return F.pad(F.pad(y, (1, 2, 0, 1)), (1, 1, 1, 1), mode="circular")


ODD = [
    *(EndsInPlace, MapEndsInPlace, ChangesView, Aliases, Numbers, SharedNorm, WeightNorm, SpectralNorm, Scales, Strided, Flat),
    *(Dropouts, Average, ChangesImage, ClampsWeight, Attends, Checkpointed, FactorsOfZero, Constants, Padded),
]
"""Networks that are compiled like all others."""


class ChangesActivation(Odd):
    """A view of an activation is changed."""

    def middle(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, 1:3].relu_()
        return y


class ReadsData(Odd):
    """An activation is read past autograd."""

    def middle(self, x: Tensor) -> Tensor:
        return x + x.data


class ChecksDropout(Odd):
    """A part with dropout is computed again in backward."""

    def middle(self, x: Tensor) -> Tensor:
        result = checkpoint(lambda y: F.dropout(self.layer(y), 0.3, self.training), x, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result


class FillsImage(Odd):
    """The input is changed in place to values that have a gradient."""

    def forward(self, x: Tensor) -> Any:
        x[:, :, :16, :16] = self.stem(x)[:, :3]
        return super().forward(x)


EAGER: dict[type[Odd], str] = {
    ChangesActivation: "through a view",
    ReadsData: "by .data",
    ChecksDropout: "draws random numbers",
    FillsImage: "an input is changed in place",
}
"""Networks that run eagerly, and a part of the reason that is given."""
