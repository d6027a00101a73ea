"""MCUNet: two networks of inverted residuals that were searched for microcontrollers."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from gradfilter.models.registry import Entry, ModelInfo, register


class Row(NamedTuple):
    """Describe one inverted residual; `expand` is False where there is no 1x1 convolution in front."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    hidden: int
    skip: bool
    expand: bool = True


_STEM = 16
_CLASSES = 1000

IN2_ROWS = (
    Row(16, 8, 3, 1, 16, False, expand=False),
    Row(8, 16, 5, 2, 24, False),
    Row(16, 16, 7, 1, 96, True),
    Row(16, 16, 3, 1, 80, True),
    Row(16, 16, 5, 1, 80, True),
    Row(16, 24, 3, 2, 80, False),
    Row(24, 24, 7, 1, 144, True),
    Row(24, 24, 5, 1, 144, True),
    Row(24, 40, 7, 2, 96, False),
    Row(40, 40, 5, 1, 200, True),
    Row(40, 48, 3, 1, 200, False),
    Row(48, 48, 5, 1, 240, True),
    Row(48, 48, 3, 1, 192, True),
    Row(48, 96, 5, 2, 288, False),
    Row(96, 96, 5, 1, 384, True),
    Row(96, 96, 5, 1, 288, True),
    Row(96, 96, 3, 1, 384, True),
    Row(96, 160, 5, 1, 480, False),
)

IN3_ROWS = (
    Row(16, 8, 3, 1, 16, False, expand=False),
    Row(8, 16, 7, 2, 24, False),
    Row(16, 16, 3, 1, 80, True),
    Row(16, 16, 7, 1, 80, True),
    Row(16, 16, 5, 1, 64, True),
    Row(16, 24, 5, 2, 80, False),
    Row(24, 24, 5, 1, 120, True),
    Row(24, 24, 5, 1, 120, True),
    Row(24, 40, 3, 2, 120, False),
    Row(40, 40, 7, 1, 240, True),
    Row(40, 40, 5, 1, 160, True),
    Row(40, 48, 5, 1, 200, False),
    Row(48, 48, 7, 1, 240, True),
    Row(48, 48, 3, 1, 240, True),
    Row(48, 96, 3, 2, 288, False),
    Row(96, 96, 7, 1, 480, True),
    Row(96, 96, 3, 1, 384, True),
    Row(96, 160, 7, 1, 480, False),
)


class ConvNorm(nn.Sequential):
    """Chain a convolution, its BatchNorm and, unless switched off, a ReLU6."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: bool = True) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
        # torch's default shrinks the signal at each layer: with BatchNorm in eval, none of it would reach the end.
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        layers: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, bn=nn.BatchNorm2d(outputs))
        if act:
            layers["act"] = nn.ReLU6(inplace=True)
        super().__init__(layers)


class InvertedResidual(nn.Module):
    """Expand the channels, filter each by itself, project to few channels; add the input where shapes allow."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.skip = row.skip
        self.expand = ConvNorm(row.inputs, row.hidden) if row.expand else None
        self.depthwise = ConvNorm(row.hidden, row.hidden, row.kernel, row.stride, groups=row.hidden)
        self.project = ConvNorm(row.hidden, row.outputs, act=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, inputs, H, W]` to `[N, outputs, ceil(H / stride), ceil(W / stride)]`."""
        y = x if self.expand is None else self.expand(x)
        y = self.project(self.depthwise(y))
        return x + y if self.skip else y


class MCUNet(nn.Module):
    """Chain a strided stem, the inverted residuals of a table, a global mean and a linear classifier."""

    def __init__(self, rows: Sequence[Row], classes: int) -> None:
        super().__init__()
        self.stem = ConvNorm(3, _STEM, kernel=3, stride=2)
        self.blocks = nn.Sequential(*(InvertedResidual(row) for row in rows))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(rows[-1].outputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images `[N, 3, H, W]` to logits `[N, classes]`."""
        return self.classifier(self.pool(self.blocks(self.stem(x))).flatten(1))


# Our prefix -> that of the public files. Within a block the files have one more level.
_PUBLIC_TOP = {"stem": "first_conv", "classifier": "classifier.linear"}
_PUBLIC_PART = {"expand": "inverted_bottleneck", "depthwise": "depth_conv", "project": "point_linear"}


def _public_key(key: str) -> str:
    top, rest = key.split(".", 1)
    if top != "blocks":
        return f"{_PUBLIC_TOP[top]}.{rest}"
    index, part, rest = rest.split(".", 2)
    return f"blocks.{index}.mobile_inverted_conv.{_PUBLIC_PART[part]}.{rest}"


def _pair_keys(own: Sequence[str], _public: Sequence[str]) -> dict[str, str]:
    return {key: _public_key(key) for key in own}


def _register(name: str, rows: Sequence[Row], resolution: int) -> None:
    half = (0.5, 0.5, 0.5)
    info = ModelInfo(name, resolution, half, half, _CLASSES, f"the {name} ImageNet file of github.com/mit-han-lab/mcunet")
    register(Entry(info, lambda classes: MCUNet(rows, _CLASSES if classes is None else classes), _pair_keys))


_register("mcunet-in2", IN2_ROWS, 160)
_register("mcunet-in3", IN3_ROWS, 176)
