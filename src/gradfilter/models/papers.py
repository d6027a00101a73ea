"""The decoders of the gradient-filtering paper's networks for segmentation, as its FLOPs tell them.

All on a dilated encoder of stride 8 but UPerNet, whose encoder has stride 32. A convolution is followed by batch norm and ReLU.
segmentation-models-pytorch has networks of the same names whose decoders are others: its PSPNet fuses with a 1×1 convolution,
its DeepLabV3 projects before a 3×3 one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NETS = {
    "PSPNet-R18": ("PaperPSPNet", "resnet18"),
    "PSPNet-MBV2": ("PaperPSPNet", "mobilenet_v2"),
    "FCN-R18": ("PaperFCN", "resnet18"),
    "DeepLabV3-R18": ("PaperDeepLabV3", "resnet18"),
    "DeepLabV3-MBV2": ("PaperDeepLabV3", "mobilenet_v2"),
    "UPerNet-R18": ("PaperUPerNet", "resnet18"),
}
"""The networks by the paper's names for them: the class that puts each together, and its encoder."""
CHANNELS = 128
UPERNET_CHANNELS = 512
WINDOWS = (1, 2, 3, 6)
RATES = (12, 24, 36)


def make_block(inputs: int, outputs: int, kernel: int = 3, dilation: int = 1, stride: int = 1) -> nn.Sequential:
    """Return a convolution with its batch norm and ReLU; the map keeps its size but for the stride."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, dilation * (kernel // 2), dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def enlarge(x: Tensor, size: Sequence[int]) -> Tensor:
    """Return a map at another size."""
    return x if x.shape[-2:] == tuple(size) else F.interpolate(x, tuple(size), mode="bilinear", align_corners=False)


class Pyramid(nn.Module):
    """PSPNet's decoder: the last map beside its means over 1, 4, 9 and 36 windows."""

    def __init__(self, channels: Sequence[int], width: int = CHANNELS) -> None:
        super().__init__()
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(windows), *make_block(channels[-1], width, 1)) for windows in WINDOWS
        )
        self.fuse = make_block(channels[-1] + len(WINDOWS) * width, width)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return a map of the size of the last one."""
        x = maps[-1]
        return self.fuse(torch.cat([x, *(enlarge(pool(x), x.shape[-2:]) for pool in self.pools)], 1))


class Atrous(nn.Module):
    """DeepLabV3's decoder: the last map through a 1×1 and three dilated convolutions, beside its mean."""

    def __init__(self, channels: Sequence[int], width: int = CHANNELS) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.AdaptiveAvgPool2d(1), *make_block(channels[-1], width, 1))
        dilated = [make_block(channels[-1], width, dilation=rate) for rate in RATES]
        self.branches = nn.ModuleList([make_block(channels[-1], width, 1), *dilated])
        self.fuse = make_block(width * (2 + len(RATES)), width)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return a map of the size of the last one."""
        x = maps[-1]
        return self.fuse(torch.cat([enlarge(self.image(x), x.shape[-2:]), *(branch(x) for branch in self.branches)], 1))


class Plain(nn.Module):
    """FCN's decoder: two convolutions, and a third that sees their input too."""

    def __init__(self, channels: Sequence[int], width: int = CHANNELS) -> None:
        super().__init__()
        self.convs = nn.Sequential(make_block(channels[-1], width), make_block(width, width))
        self.fuse = make_block(channels[-1] + width, width)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return a map of the size of the last one."""
        return self.fuse(torch.cat([maps[-1], self.convs(maps[-1])], 1))


class Unified(nn.Module):
    """UPerNet's decoder: a pyramid on the last map, added to the three before it from the top down, all fused."""

    def __init__(self, channels: Sequence[int], width: int = UPERNET_CHANNELS) -> None:
        super().__init__()
        self.pyramid = Pyramid(channels, width)
        self.laterals = nn.ModuleList(make_block(inputs, width, 1) for inputs in channels[-4:-1])
        self.smooth = nn.ModuleList(make_block(width, width) for _ in self.laterals)
        self.fuse = make_block(4 * width, width)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return a map of the size of the fourth map from the end."""
        levels = [self.pyramid(maps)]
        for lateral, x in zip(reversed(self.laterals), reversed(maps[-4:-1]), strict=True):
            levels.append(lateral(x) + enlarge(levels[-1], x.shape[-2:]))
        smooth = [conv(level) for conv, level in zip(self.smooth, levels[:0:-1], strict=True)]
        size = smooth[0].shape[-2:]
        return self.fuse(torch.cat([*smooth[:1], *(enlarge(level, size) for level in (*smooth[1:], levels[0]))], 1))


PAPERS: dict[str, tuple[type[nn.Module], int, int]] = {
    "PaperPSPNet": (Pyramid, CHANNELS, 8),
    "PaperDeepLabV3": (Atrous, CHANNELS, 8),
    "PaperFCN": (Plain, CHANNELS, 8),
    "PaperUPerNet": (Unified, UPERNET_CHANNELS, 32),
}
"""From a name to the decoder, its channels, and the stride of the encoder's last map."""


def trim_(encoder: Any, name: str) -> list[int]:
    """Make an encoder of segmentation-models-pytorch the paper's, in place; return the channels of its maps.

    A ResNet has three 3×3 convolutions for a stem; MobileNetV2 ends before its last 1×1 convolution, with 320 channels.
    """
    channels = list(encoder.out_channels)
    if name.startswith("resnet"):
        encoder.conv1 = nn.Sequential(
            *make_block(3, 32, stride=2), *make_block(32, 32), nn.Conv2d(32, channels[1], 3, padding=1, bias=False)
        )
    elif name == "mobilenet_v2":
        encoder.features[-1] = nn.Identity()
        channels[-1] = encoder.features[-2].conv[-2].out_channels
    return channels


ATROUS = {"decoder.branches.[01]": 3, "decoder.branches.2": 6, "decoder.branches.3": 9, "decoder.fuse": 3}
UNIFIED = {"decoder.fuse": 8, "decoder.smooth.0": 8, "decoder.smooth.1": 4, "decoder.smooth.2": 2, "decoder.pyramid.fuse": 2}
LATERALS = {"decoder.laterals.0": 8, "decoder.laterals.1": 4, "decoder.laterals.2": 2, "decoder.pyramid.pools.[23]": 2}
LAST_STAGE = "encoder.layer4.?.conv?"
PATCHES: dict[tuple[str, str], dict[int, dict[str, int]]] = {
    ("PaperPSPNet", "resnet18"): {5: {"decoder": 4}, 10: {"decoder": 4, LAST_STAGE: 4}},
    ("PaperPSPNet", "mobilenet_v2"): {
        5: {"decoder": 4},
        10: {"decoder": 4, "encoder.features.17": 4, "encoder.features.16.conv.[12]*": 4},
    },
    ("PaperFCN", "resnet18"): {
        5: {"decoder": 4, "encoder.layer4.1": 4},
        10: {"decoder": 2, "encoder.layer4": 2, "encoder.layer3.1": 2},
    },
    ("PaperDeepLabV3", "resnet18"): {5: ATROUS, 10: {**ATROUS, "decoder.image": 3, LAST_STAGE: 2}},
    ("PaperDeepLabV3", "mobilenet_v2"): {
        5: ATROUS,
        10: {**ATROUS, "decoder.image": 3, "encoder.features.17": 3, "encoder.features.16.conv.2": 3},
    },
    ("PaperUPerNet", "resnet18"): {5: UNIFIED, 10: {**UNIFIED, **LATERALS}},
}
"""By decoder, encoder and how many layers are trained: the layers, as a plan names them, and the patch sizes of each.

The classifier, which is trained too, is not among the 5 or 10. The tenth of PSPNet with ResNet18 is the projection on a
shortcut, which the FLOPs leave out: it stays as it is.
"""


def find_patches(decoder: str, encoder: str, layers: int) -> dict[str, int]:
    """Return the patch sizes of the layers that the paper trains; the classifier has that of the layer before it."""
    patches = PATCHES[decoder, encoder][layers]
    return {**patches, "segmentation_head": patches.get("decoder.fuse", patches.get("decoder", 1))}
