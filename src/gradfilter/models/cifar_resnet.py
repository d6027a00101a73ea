"""The small ResNets for 32x32 images of the original paper (He et al. 2015, section 4.2)."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.models.registry import IMAGENET_MEAN, IMAGENET_STD, Entry, ModelInfo, register

_WIDTHS = (16, 32, 64)
_CLASSES = 10


class PadShortcut(nn.Module):
    """Keep every second pixel and add channels of zeros on both sides: a shortcut without weights ("option A")."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, C, H, W]` to `[N, C + extra, ceil(H / 2), ceil(W / 2)]`."""
        side = self.extra // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, side, self.extra - side))


class BasicBlock(nn.Module):
    """Add two 3x3 convolutions to a shortcut; the first has stride 2 where the number of channels grows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        grows = outputs > inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2 if grows else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU(inplace=True)
        self.shortcut = PadShortcut(outputs - inputs) if grows else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, inputs, H, W]` to `[N, outputs, H, W]`, or to half the side where channels grow."""
        y = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.act(y + self.shortcut(x))


class CifarResNet(nn.Module):
    """Chain a stem, three stages of `blocks` basic blocks, a global mean and a linear classifier."""

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        first, second, third = _WIDTHS
        self.conv1 = nn.Conv2d(3, first, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.act = nn.ReLU(inplace=True)
        self.layer1 = _make_stage(first, first, blocks)
        self.layer2 = _make_stage(first, second, blocks)
        self.layer3 = _make_stage(second, third, blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(third, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images `[N, 3, H, W]` to logits `[N, classes]`."""
        x = self.act(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.classifier(self.pool(x).flatten(1))


def _make_stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(inputs, outputs), *(BasicBlock(outputs, outputs) for _ in range(blocks - 1)))


def _pair_keys(own: Sequence[str], _public: Sequence[str]) -> dict[str, str]:
    # The public files were saved from a DataParallel wrapper, hence their prefix.
    return {key: "module." + key.replace("classifier.", "linear.") for key in own}


def _register(name: str, blocks: int, file: str) -> None:
    published = f"{file} of github.com/akamaster/pytorch_resnet_cifar10"
    info = ModelInfo(name, 32, IMAGENET_MEAN, IMAGENET_STD, _CLASSES, published)
    register(Entry(info, lambda classes: CifarResNet(blocks, _CLASSES if classes is None else classes), _pair_keys))


_register("cifar-resnet20", 3, "resnet20-12fca82f.th")
_register("cifar-resnet56", 9, "resnet56-4bfd9763.th")
