"""From a PIL image and its mask to the normalised input of a network and its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gradfilter.data.masks import IGNORE
from gradfilter.data.transforms import Augment, make_transforms, normalise
from gradfilter.errors import SettingsError

if TYPE_CHECKING:
    from PIL.Image import Image

SCALES = (0.5, 2.0)
JITTER = 0.4
"""Brightness, contrast and saturation change by up to this share."""
HUE = 12
"""Hue turns by up to so many 256ths of a circle."""


@dataclass(frozen=True)
class MaskTransform:
    """Map a PIL image and its mask to a float tensor [3, resolution, resolution] and labels [resolution, resolution].

    The image is scaled so that its long side fits, and what is left below or beside it is of the mean colour, with labels
    `IGNORE`. Labels are never mixed: masks take the nearest pixel. The `repr` says all that the result depends on, besides
    the generator.

    Attributes:
        resolution: Side of the result in pixels.
        mean: Subtracted from each channel, on a scale of 0 to 1.
        std: Each channel is divided by it.
        scales: The image is made larger by a factor between these, at random; of what does not fit then, a part is cut out.
        mirror: Whether every other image, at random, is mirrored.
        jitter: Whether brightness, contrast, saturation and hue change at random.
    """

    resolution: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scales: tuple[float, float] = (1.0, 1.0)
    mirror: bool = False
    jitter: bool = False

    @property
    def is_random(self) -> bool:
        """Whether the same image can give different results."""
        return self.mirror or self.jitter or self.scales != (1.0, 1.0)

    def __call__(self, image: Image, mask: Image, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Transform one image and its mask; chance is the generator's alone."""
        if self.is_random and generator is None:
            raise SettingsError("a random transform was given no generator. Give a torch.Generator with a seed of its own.")
        size, box = self._choose(image.size, generator)
        from PIL.Image import Resampling

        image = image.resize(size, Resampling.BILINEAR, box)
        mask = mask.resize(size, Resampling.NEAREST, box)
        if self.jitter:
            assert generator is not None
            image = _jitter(image, generator)
        pixels, labels = normalise(image, self.mean, self.std), torch.from_numpy(np.asarray(mask).astype(np.int64))
        if self.mirror and _draw(generator) < 0.5:
            pixels, labels = pixels.flip(-1), labels.flip(-1)
        return self._pad(pixels, labels)

    def fit(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size (w, h) at which an image of some size is seen, where chance has no part in it."""
        return self._choose(size, None)[0]

    def _choose(
        self, size: tuple[int, int], generator: torch.Generator | None
    ) -> tuple[tuple[int, int], tuple[float, float, float, float]]:
        """Choose the size (w, h) of what is seen, and the box of the image that it comes from."""
        low, high = self.scales
        scale = self.resolution / max(size)
        scale *= low if low == high else low * (high / low) ** _draw(generator)
        scaled = [max(1, round(side * scale)) for side in size]
        seen = [min(side, self.resolution) for side in scaled]
        starts = [
            int(_draw(generator) * (all_ - part + 1)) if all_ > part else 0 for all_, part in zip(scaled, seen, strict=True)
        ]
        (left, right), (top, bottom) = (
            (start * side / all_, (start + part) * side / all_)
            for start, part, side, all_ in zip(starts, seen, size, scaled, strict=True)
        )
        return (seen[0], seen[1]), (left, top, min(right, size[0]), min(bottom, size[1]))

    def _pad(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Fill up to the resolution."""
        height, width = labels.shape
        x = torch.zeros(3, self.resolution, self.resolution)
        y = torch.full((self.resolution, self.resolution), IGNORE)
        x[:, :height, :width] = pixels
        y[:height, :width] = labels
        return x, y


def make_mask_transforms(
    resolution: int, mean: Sequence[float], std: Sequence[float], augment: Augment, flips: bool
) -> tuple[MaskTransform, MaskTransform]:
    """Make the transforms for (training, evaluation).

    Args:
        resolution: Side of the network's input in pixels.
        mean: Of the three channels, on a scale of 0 to 1.
        std: Of the three channels.
        augment: "none": train as evaluated; "flip": mirrored at random; "standard": made smaller or larger, cut, mirrored and
            recoloured at random.
        flips: Whether a mirrored image is as good; if not, none is mirrored.
    """
    _, checked = make_transforms(resolution, mean, std, augment, flips)
    plain = MaskTransform(checked.resolution, checked.mean, checked.std)
    if augment == "none":
        return plain, plain
    full = augment == "standard"
    scales = SCALES if full else plain.scales
    return MaskTransform(plain.resolution, plain.mean, plain.std, scales, mirror=flips, jitter=full), plain


def _draw(generator: torch.Generator | None) -> float:
    return float(torch.rand((), generator=generator))


def _jitter(image: Image, generator: torch.Generator) -> Image:
    """Change the colours of an image."""
    from PIL import Image, ImageEnhance

    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = kind(image).enhance(1 + JITTER * (2 * _draw(generator) - 1))
    hue, saturation, value = image.convert("HSV").split()
    turn = round(HUE * (2 * _draw(generator) - 1))
    turned = Image.fromarray(np.asarray(hue) + np.uint8(turn % 256))
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")
