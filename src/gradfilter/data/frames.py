"""How a network sees an image that it is to label pixel by pixel, and how its scores come back to the image's own size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.data.mask_transforms import MaskTransform
from gradfilter.data.transforms import normalise

if TYPE_CHECKING:
    from PIL.Image import Image

Evaluate = Literal["whole", "window"]


@dataclass(frozen=True)
class Whole:
    """Show the whole image at once, scaled as for training; scores are scaled back.

    Attributes:
        transform: That of evaluation: without chance.
    """

    transform: MaskTransform

    def cut(self, image: Image) -> Tensor:
        """Return what the network sees of an image, [K, 3, resolution, resolution]."""
        return self.transform(image, image.getchannel(0))[0][None]

    def join(self, scores: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the scores [classes, H, W] of an image of size (w, h), from those of what was seen of it."""
        width, height = self.transform.fit(size)
        return F.interpolate(scores[..., :height, :width], size[::-1], mode="bilinear", align_corners=False)[0]


@dataclass(frozen=True)
class Window(Whole):
    """Show the image at its own size, through windows that overlap by a third; where they do, the mean of the scores counts.

    An image that is smaller than a window is filled up with the mean colour.
    """

    def cut(self, image: Image) -> Tensor:
        """Return the windows, row by row."""
        side = self.transform.resolution
        pixels = normalise(image, self.transform.mean, self.transform.std)
        height, width = pixels.shape[1:]
        pixels = F.pad(pixels, (0, max(0, side - width), 0, max(0, side - height)))
        windows = [pixels[:, top : top + side, left : left + side] for top, left in self.place((width, height))]
        return torch.stack(windows)

    def join(self, scores: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the mean of the scores at each pixel."""
        side, (width, height) = self.transform.resolution, size
        total = scores.new_zeros(scores.shape[1], max(side, height), max(side, width))
        times = scores.new_zeros(total.shape[1:])
        for window, (top, left) in zip(scores, self.place(size), strict=True):
            total[:, top : top + side, left : left + side] += window
            times[top : top + side, left : left + side] += 1
        return (total / times)[:, :height, :width]

    def place(self, size: tuple[int, int]) -> list[tuple[int, int]]:
        """Return where the windows of an image of size (w, h) begin: (top, left) each; the last ones end with the image."""
        side = self.transform.resolution
        stride = max(1, side * 2 // 3)
        lasts = (max(0, length - side) for length in size)
        lefts, tops = ([min(start, last) for start in range(0, last + stride, stride)] for last in lasts)
        return list(product(tops, lefts))


FRAMES: dict[Evaluate, type[Whole]] = {"whole": Whole, "window": Window}
"""By what `--evaluate` calls them."""
