"""Small networks for segmentation: one decoder of each kind that people use, behind the same encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers_safety import randomise

CLASSES = 5
WIDTHS = (6, 8, 10)
"""Channels of the encoder's maps, at strides 2, 4 and 8."""


def block(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """Return a convolution with its batch norm and ReLU."""
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Pooled(nn.Module):
    """A pyramid's level: means over a few windows, enlarged again."""

    def __init__(self, inputs: int, outputs: int, windows: int) -> None:
        super().__init__()
        self.pool, self.conv = nn.AdaptiveAvgPool2d(windows), block(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.conv(self.pool(x)), x.shape[2:], mode="bilinear", align_corners=False)


class Aspp(nn.Module):
    """DeepLab's: dilated convolutions that reach far beyond the map, and its mean."""

    def __init__(self) -> None:
        super().__init__()
        wide = [block(WIDTHS[2], 6, dilation=d) for d in (6, 12, 18)]
        self.parts = nn.ModuleList([block(WIDTHS[2], 6, 1), *wide, Pooled(WIDTHS[2], 6, 1)])
        self.project = nn.Sequential(block(30, 8, 1), nn.Dropout(0.0))
        self.skip, self.fuse = block(WIDTHS[1], 4, 1), block(12, 8)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        x = self.project(torch.cat([part(maps[2]) for part in self.parts], 1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        return self.fuse(torch.cat([x, self.skip(maps[1])], 1))


class Pyramid(nn.Module):
    """PSPNet's, and UPerNet's first step."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Pooled(WIDTHS[2], 3, windows) for windows in (1, 2, 3, 6)])
        self.fuse = block(WIDTHS[2] + 12, 8)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return self.fuse(torch.cat([maps[2], *(part(maps[2]) for part in self.parts)], 1))


class Lateral(nn.Module):
    """A feature pyramid: maps added from the top down, all of them summed up at the largest size."""

    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.ModuleList([nn.Conv2d(width, 8, 1) for width in WIDTHS])
        self.smooth = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()) for _ in WIDTHS]
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        x, outputs = None, []
        for lateral, smooth, y in reversed(list(zip(self.lateral, self.smooth, maps, strict=True))):
            x = lateral(y) if x is None else F.interpolate(x, y.shape[2:]) + lateral(y)
            outputs.append(smooth(x))
        return torch.stack([F.interpolate(y, maps[0].shape[2:], mode="bilinear") for y in outputs]).sum(0)


class Concatenated(nn.Module):
    """A U-Net: maps enlarged one by one and joined with those of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(WIDTHS[2], 8, 2, 2)
        self.first, self.second = block(8 + WIDTHS[1], 8), block(8 + WIDTHS[0], 8)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        x = self.first(torch.cat([self.enlarge(maps[2]), maps[1]], 1))
        return self.second(torch.cat([F.interpolate(x, scale_factor=2), maps[0]], 1))


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "aspp": Aspp,
    "pyramid": Pyramid,
    "lateral": Lateral,
    "concatenated": Concatenated,
}


class Segmenter(nn.Module):
    """An encoder, a decoder, logits at the size of the labels, and those of an auxiliary head."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.stem, self.second = block(3, WIDTHS[0], stride=2), block(WIDTHS[0], WIDTHS[1], stride=2)
        self.third = nn.Sequential(block(WIDTHS[1], WIDTHS[2], stride=2), block(WIDTHS[2], WIDTHS[2], dilation=2))
        self.decoder = decoder
        self.classifier, self.auxiliary = nn.Conv2d(8, CLASSES, 1), nn.Conv2d(WIDTHS[2], CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.stem(x)
        second = self.second(first)
        maps = (first, second, self.third(second))
        logits = {"out": self.classifier(self.decoder(maps)), "aux": self.auxiliary(maps[2])}
        return {k: F.interpolate(y, x.shape[2:], mode="bilinear", align_corners=False) for k, y in logits.items()}


def make_segmenter(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    return randomise(Segmenter(DECODERS[name]()).to(dtype))


def segment_loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Return the loss of the logits and of the auxiliary ones; label 255 does not count."""
    return sum(s * F.cross_entropy(y, labels, ignore_index=255) for s, y in zip((1.0, 0.4), outputs.values(), strict=False))  # type: ignore[return-value]
