"""The colours of classes, as far apart as so many can be, and pictures of labels in them."""

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

IGNORED = (206, 209, 214)
"""Of pixels that do not count: the only grey."""
WRONG = (224, 86, 20)
"""Of pixels that were labelled wrongly."""
OVERLAY = 0.6
"""How opaque labels are that lie over an image."""

_TO_CONES = np.array(
    [
        [0.4122214708, 0.2119034982, 0.0883024619],
        [0.5363325363, 0.6806995451, 0.2817188376],
        [0.0514459929, 0.1073969566, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 1.9779984951, 0.0259040371],
        [0.7936177850, -2.4285922050, 0.7827717662],
        [-0.0040720468, 0.4505937099, -0.8086757660],
    ]
)
_FIRST = (38, 118, 200)
_LEVELS = 16  # of each channel, among the colours to choose from
_LIGHTNESS = (0.36, 0.92)  # what is darker or lighter is hard to name
_CHROMA = (0.06, 0.17)  # what is less is nearly grey, what is more glares


@functools.cache
def find_colours(count: int) -> np.ndarray:
    """Return colours [count, 3], bytes: each as far as can be from those before it, as the eye sees distance (OKLab).

    So the first ones differ most, and the colour of a class depends on nothing but its index.
    """
    levels = np.linspace(0, 255, _LEVELS).round()
    choices = np.array([_FIRST, *np.stack(np.meshgrid(levels, levels, levels), -1).reshape(-1, 3)])
    lab = _to_oklab(choices / 255)
    chroma = np.hypot(lab[:, 1], lab[:, 2])
    good = (chroma > _CHROMA[0]) & (chroma < _CHROMA[1]) & (lab[:, 0] > _LIGHTNESS[0]) & (lab[:, 0] < _LIGHTNESS[1])
    choices, lab = choices[good], lab[good]
    others = _to_oklab(np.array([IGNORED, WRONG]) / 255)
    chosen, distance = [0], np.linalg.norm(lab[:, None] - others, axis=2).min(1)
    while len(chosen) < count:
        distance = np.minimum(distance, np.linalg.norm(lab - lab[chosen[-1]], axis=1))
        chosen.append(int(distance.argmax()))
    return choices[chosen[:count]].astype(np.uint8)


def to_hex(colour: np.ndarray | tuple[int, int, int]) -> str:
    """Return a colour as CSS has it."""
    red, green, blue = (int(value) for value in colour)
    return f"#{red:02x}{green:02x}{blue:02x}"


def paint(labels: np.ndarray, classes: int) -> "Image":
    """Return labels [H, W] as a picture: the colours of the classes, and grey for what is none."""
    from PIL import Image

    palette = np.full((256, 3), IGNORED, np.uint8)
    palette[:classes] = find_colours(classes)
    return Image.fromarray(palette[labels])


def lay_over(image: "Image", labels: np.ndarray, classes: int) -> "Image":
    """Return an image with its labels [H, W] over it."""
    from PIL import Image

    return Image.blend(image.convert("L").convert("RGB"), paint(labels, classes), OVERLAY)


def paint_differences(image: "Image", truth: np.ndarray, predicted: np.ndarray, ignored: int) -> "Image":
    """Return an image, pale and without colours, with what was labelled wrongly in orange, and what does not count in grey."""
    from PIL import Image

    pale = 128 + np.asarray(image.convert("L").convert("RGB"), np.float32) / 2
    pale[truth == ignored] = IGNORED
    pale[(truth != ignored) & (truth != predicted)] = WRONG
    return Image.fromarray(pale.astype(np.uint8))


def _to_oklab(srgb: np.ndarray) -> np.ndarray:
    """Return colours [N, 3] of sRGB, 0 to 1, in OKLab, where equal distances look equally large.

    The matrices are those of its definition (Björn Ottosson, "A perceptual color space for image processing", 2020).
    """
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ _TO_CONES) @ _TO_LAB
