"""From a PIL image to the normalised input of a network."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gradfilter.errors import SettingsError
from gradfilter.models.extras import import_extra

if TYPE_CHECKING:
    from PIL.Image import Image

Augment = Literal["none", "flip", "standard"]

_CROP_SHARE = 0.875  # of the short side, as is usual for ImageNet
_LEAST_AREA = 0.35  # of the image, in a random crop
_SHIFT = 8  # a small image moves by up to an eighth of its side


@dataclass(frozen=True)
class Transform:
    """Map a PIL image to a float tensor [3, resolution, resolution].

    An image that is smaller than the resolution in both sides is stretched to it; of others a square is cut out. Random choices
    are drawn from torch's own generator. The `repr` says all that the result depends on, besides that generator.

    Attributes:
        resolution: Side of the result in pixels.
        mean: Subtracted from each channel, on a scale of 0 to 1.
        std: Each channel is divided by it.
        crop: "centre" cuts out the middle; "random" cuts out a random rectangle, or shifts a small image.
        mirror: Whether every other image, at random, is mirrored.
    """

    resolution: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop: Literal["centre", "random"] = "centre"
    mirror: bool = False

    @property
    def is_random(self) -> bool:
        """Whether the same image can give different results."""
        return self.mirror or self.crop == "random"

    def __call__(self, image: "Image") -> Tensor:
        """Transform one image."""
        if max(image.size) < self.resolution:
            image = _stretch(_shift(image) if self.crop == "random" else image, self.resolution)
        elif self.crop == "random":
            image = _random_crop(image, self.resolution)
        else:
            image = _centre_crop(image, self.resolution)
        if self.mirror and torch.rand(()) < 0.5:
            image = _functional().horizontal_flip(image)
        return normalise(image, self.mean, self.std)


def make_transforms(
    resolution: int, mean: Sequence[float], std: Sequence[float], augment: Augment, flips: bool
) -> tuple[Transform, Transform]:
    """Make the transforms for (training, evaluation).

    Args:
        resolution: Side of the network's input in pixels.
        mean: Of the three channels, on a scale of 0 to 1.
        std: Of the three channels.
        augment: "none": train as evaluated; "flip": mirrored at random; "standard": random crops and mirrored at random.
        flips: Whether a mirrored image is still of its class; if not, none is mirrored.
    """
    if augment not in get_args(Augment):
        raise SettingsError(f"augment is {augment!r}, which is not known. Choose one of: {', '.join(get_args(Augment))}.")
    if resolution < 1:
        raise SettingsError(f"resolution is {resolution}, but it is a number of pixels. Give 1 or more.")
    plain = Transform(int(resolution), _three("mean", mean), _three("std", std))
    if not all(value > 0 for value in plain.std):
        raise SettingsError(f"std is {plain.std}, and channels are divided by it. Give numbers above 0.")
    if augment == "none":
        return plain, plain
    crop = "random" if augment == "standard" else "centre"
    return Transform(plain.resolution, plain.mean, plain.std, crop, mirror=flips), plain


def _three(name: str, values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) != 3:
        raise SettingsError(f"{name} has {len(values)} numbers, but images have 3 channels. Give 3 numbers.")
    red, green, blue = (float(value) for value in values)
    return red, green, blue


@functools.cache
def _functional() -> ModuleType:
    return import_extra("torchvision.transforms.v2.functional", "preparing images")


def _stretch(image: "Image", side: int) -> "Image":
    return _functional().resize(image, [side, side], antialias=True)


def _centre_crop(image: "Image", side: int) -> "Image":
    functional = _functional()
    return functional.center_crop(functional.resize(image, [round(side / _CROP_SHARE)], antialias=True), [side, side])


def _random_crop(image: "Image", side: int) -> "Image":
    return _cropper(side)(image)


@functools.cache
def _cropper(side: int) -> Callable[["Image"], "Image"]:
    v2 = import_extra("torchvision.transforms.v2", "preparing images")
    return v2.RandomResizedCrop(side, scale=(_LEAST_AREA, 1.0), antialias=True)


def _shift(image: "Image") -> "Image":
    """Move an image by up to an eighth of each side; what comes into view is black."""
    width, height = image.size
    left, top = (_draw_shift(max(1, round(side / _SHIFT))) for side in (width, height))
    return _functional().crop(image, top, left, height, width)


def _draw_shift(most: int) -> int:
    return int(torch.randint(-most, most + 1, ()))


def normalise(image: "Image", mean: tuple[float, float, float], std: tuple[float, float, float]) -> Tensor:
    """Make a contiguous float tensor of (pixel / 255 - mean) / std."""
    # In numpy, without threads: those of torch cost more than so small a task takes, and far more where cores are busy.
    pixels = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)).astype(np.float32)
    shift, scale = (np.array([255 * value for value in values], np.float32).reshape(3, 1, 1) for values in (mean, std))
    pixels -= shift
    pixels /= scale
    return torch.from_numpy(pixels)
