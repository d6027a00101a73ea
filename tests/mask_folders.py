"""Small folders of images with masks to test on."""

from pathlib import Path

import numpy as np
from PIL import Image

from data_folders import make_image

SIZE = (12, 10)


def write_mask(path: Path, values: list[int], size: tuple[int, int] = SIZE) -> None:
    """Write a mask whose columns have these values, in stripes of equal width as far as that goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    row = np.array([values[x * len(values) // width] for x in range(width)], np.uint8)
    Image.fromarray(np.tile(row, (height, 1))).save(path)


def write_image(path: Path, number: int = 0, size: tuple[int, int] = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_image(number, size).save(path)


def make_pairs(folder: Path, count: int, values: tuple[int, ...] = (0, 1, 2), start: int = 0) -> Path:
    """Write images/ and masks/ of so many files."""
    for number in range(start, start + count):
        write_image(folder / "images" / f"{number:03}.jpg", number)
        write_mask(folder / "masks" / f"{number:03}.png", list(values))
    return folder


def make_parts(folder: Path, **counts: int) -> Path:
    """Write a folder with these parts of so many images."""
    for part, count in counts.items():
        make_pairs(folder / part, count)
    return folder
