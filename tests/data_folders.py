"""Small folders of images to test on."""

from pathlib import Path

import numpy as np
from PIL import Image

from gradfilter.data import ImageSet

IMAGE, DAMAGED, TEXT, FOLDER = "image", "damaged", "text", "folder"


def make_files(root: Path, files: dict[str, str]) -> Path:
    """Write files of these kinds, by path below the root; every image is of another colour."""
    for number, (name, kind) in enumerate(files.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == FOLDER:
            path.mkdir()
        elif kind == TEXT:
            path.write_text("no image")
        else:
            make_image(number).save(path)
        if kind == DAMAGED:
            path.write_bytes(path.read_bytes()[:45])  # the header is whole, the pixels are not
    return root


def make_image(number: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    return Image.new("RGB", size, (number % 256, number // 256, 99))


def make_classes(prefix: str = "", **counts: int) -> dict[str, str]:
    """List good images for `make_files`, so many per class."""
    return {f"{prefix}{name}/{number:03}.png": IMAGE for name, count in counts.items() for number in range(count)}


class Colours:
    """A reader without files: image i is of colour i."""

    def __call__(self, index: int) -> Image.Image:
        return make_image(index)


def make_set(labels: list[int] | tuple[int, ...], classes: int | None = None, name: str = "colours") -> ImageSet:
    count = classes or max(labels, default=0) + 1
    names = tuple(f"{name}/{index}" for index in range(len(labels)))
    return ImageSet(name, tuple(f"class{index}" for index in range(count)), tuple(labels), names, Colours())


def colour(image: Image.Image) -> tuple[int, ...]:
    """The colour of an image of one colour."""
    pixels = np.asarray(image).reshape(-1, 3)
    assert (pixels == pixels[0]).all()
    return tuple(pixels[0].tolist())


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Write an image of these pixels, [H, W, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
