"""A small U-Net, for what classifiers do not have: maps that are enlarged again and joined with earlier ones."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DoubleConv(nn.Sequential):
    """Chain two 3x3 convolutions, each with a batch norm and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            conv = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Halve the map twice by max pooling, double it by a transposed convolution and by interpolation, join what matches."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.down = nn.ModuleList([DoubleConv(3, width), DoubleConv(width, 2 * width), DoubleConv(2 * width, 4 * width)])
        self.pool = nn.MaxPool2d(2)
        self.enlarge = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up = nn.ModuleList([DoubleConv(4 * width, 2 * width), DoubleConv(3 * width, width)])
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images `[N, 3, H, W]`, their sides multiples of 4, to logits per pixel `[N, classes, H, W]`."""
        fine = self.down[0](x)
        middle = self.down[1](self.pool(fine))
        x = self.enlarge(self.down[2](self.pool(middle)))
        x = self.up[0](torch.cat([middle, x], 1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.classifier(self.up[1](torch.cat([fine, x], 1)))
