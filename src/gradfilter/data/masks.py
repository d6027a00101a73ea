"""Images with masks, which have a label for every pixel, wherever they come from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradfilter.data.decode import find_formats
from gradfilter.data.images import JoinedReader, identify, select_reader
from gradfilter.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

IGNORE = 255
"""The label of pixels that do not count, in every mask that is read, whatever its file has there."""
VALUES = 256
"""How many values a pixel of a mask file can have."""


@dataclass(frozen=True)
class Coding:
    """Say which values in mask files stand for which class.

    Attributes:
        classes: Names of the classes; a label is an index into them.
        values: The value in files of each class.
        ignored: The values of pixels that do not count.
    """

    classes: tuple[str, ...]
    values: tuple[int, ...]
    ignored: tuple[int, ...] = (IGNORE,)

    def __post_init__(self) -> None:
        values = (*self.values, *self.ignored)
        if len(self.classes) != len(self.values) or len(set(values)) < len(values) or not set(values) <= set(range(VALUES)):
            raise DataError(
                f"{len(self.classes)} classes have the values {self.values}, and {self.ignored} are ignored. Give each class a "
                f"value of its own, between 0 and {VALUES - 1}."
            )

    @classmethod
    def make_plain(cls, classes: Sequence[str], ignored: Sequence[int] = (IGNORE,)) -> Coding:
        """Make the coding in which the values are the labels."""
        return cls(tuple(classes), tuple(range(len(classes))), tuple(ignored))

    def make_table(self) -> np.ndarray:
        """Return the label of every value, [256] bytes; values that are not known are ignored."""
        table = np.full(VALUES, IGNORE, np.uint8)
        table[list(self.values)] = np.arange(len(self.values))
        return table

    def find_unknown(self, areas: np.ndarray) -> list[int]:
        """List the values that a mask has and that stand for nothing, from its pixels of each value, [256]."""
        known = {*self.values, *self.ignored}
        return [value for value in np.flatnonzero(areas).tolist() if value not in known]

    def describe(self) -> str:
        """Say which values there may be."""
        ignored = f", and {join_values(self.ignored)} ignored" if self.ignored else ""
        return f"{join_values(self.values)} for {len(self.classes)} classes{ignored}"


@dataclass(frozen=True, eq=False)
class MaskSet:
    """Images with masks.

    Attributes:
        name: What messages and reports call the set.
        classes: Names of the classes; a label is an index into them.
        names: What names each image: its file below the data folder.
        read: Gives image i as a PIL image in RGB; see `ImageSet`.
        read_mask: Gives mask i as a PIL image of the same size: in each pixel a label, or `IGNORE`.
        areas: Pixels of each class in each mask, [N, classes].
        flips: Whether a mirrored image with its mirrored mask is as good.
        values: What stands for each class in mask files; none where it is the label.
    """

    name: str
    classes: tuple[str, ...]
    names: tuple[str, ...]
    read: Callable[[int], Image]
    read_mask: Callable[[int], Image]
    areas: np.ndarray
    flips: bool = True
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.areas.shape != (len(self.names), len(self.classes)):
            raise DataError(
                f"{self.name}: areas have the shape {self.areas.shape} for {len(self.names)} images of {len(self.classes)} "
                "classes. Give one number per image and class."
            )

    def __len__(self) -> int:
        return len(self.names)

    def select(self, indices: Sequence[int]) -> MaskSet:
        """Make the set of some of the images, in the order given; the readers are shared."""
        chosen = tuple(int(index) for index in indices)
        return dataclasses.replace(
            self,
            names=tuple(self.names[index] for index in chosen),
            read=select_reader(self.read, chosen),
            read_mask=select_reader(self.read_mask, chosen),
            areas=self.areas[list(chosen)],
        )

    def join(self, other: MaskSet) -> MaskSet:
        """Make the set of these images and another's behind them."""
        return dataclasses.replace(
            self,
            names=(*self.names, *other.names),
            read=JoinedReader(self.read, len(self), other.read),
            read_mask=JoinedReader(self.read_mask, len(self), other.read_mask),
            areas=np.concatenate([self.areas, other.areas]),
        )

    def counts(self) -> tuple[int, ...]:
        """Count the images in which each class is seen."""
        return tuple((self.areas > 0).sum(0).tolist())

    def pixels(self) -> tuple[int, ...]:
        """Count the pixels of each class."""
        return tuple(self.areas.sum(0).tolist())

    def fingerprint(self, contents: bool = True) -> str:
        """Hash the set, so that any change of it changes the result; see `ImageSet.fingerprint`."""
        digest = hashlib.sha256(json.dumps([self.classes, self.names]).encode())
        digest.update(np.ascontiguousarray(self.areas, dtype=np.int64).tobytes())
        for index in range(len(self)) if contents else ():
            digest.update(f"{identify(self.read, index)}\n{identify(self.read_mask, index)}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class MaskReader:
    """Read masks from files below a folder; `stamps` are their sizes and times of change when they were found."""

    folder: Path
    files: tuple[str, ...]
    stamps: tuple[str, ...]
    coding: Coding

    def __call__(self, index: int) -> Image:
        """Read one mask."""
        from PIL import Image

        path = self.folder / self.files[index]
        try:
            values = read_values(path)
        except DataError as error:
            raise DataError(f"{path}: {error}. Put the file right, or remove it and its image, and start again.") from error
        return Image.fromarray(self.coding.make_table()[values])

    def identify(self, index: int) -> str:
        """Tell the contents of one file, and what they mean, from another."""
        return f"{self.stamps[index]} {self.coding.values} {self.coding.ignored}"


def read_values(path: str | Path) -> np.ndarray:
    """Read a mask file as it is: [H, W], bytes.

    Raises:
        DataError: The file cannot be read, or has colours where labels are expected. The text is the reason alone.
    """
    from PIL import Image, UnidentifiedImageError

    if Path(path).suffix.lower() == ".mat":
        return _read_sbd(path)
    try:
        with open(path, "rb") as file, Image.open(file, formats=find_formats()) as image:
            if image.format == "JPEG":
                raise DataError("JPEG changes pixels, so labels in it cannot be trusted; save masks as PNG")
            image.load()
            if image.mode not in ("L", "P", "1") and not image.mode.startswith("I"):
                raise DataError(
                    f"its pixels are colours (mode {image.mode}), where a mask has one label each; save it as grey or palette"
                )
            values = np.asarray(image)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError("not an image, or damaged at its beginning") from error
    except Exception as error:  # on damaged files the decoders raise whatever it happens to lead to
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(reason or str(error) or type(error).__name__) from error
    return _make_bytes(values)


def join_values(values: Sequence[int]) -> str:
    """Write values shortly: "0 to 10 and 255"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1] if words else "none"


def _make_bytes(values: np.ndarray) -> np.ndarray:
    if values.dtype != np.bool_ and values.size and (values.min() < 0 or values.max() >= VALUES):
        raise DataError(f"it has labels from {values.min()} to {values.max()}, and labels are below {VALUES}")
    return values.astype(np.uint8)


def _read_sbd(path: str | Path) -> np.ndarray:
    """Read a mask of the Semantic Boundaries Dataset, which keeps them as MATLAB files."""
    from gradfilter.models.extras import import_extra

    scipy = import_extra("scipy.io", "reading masks of SBD")
    try:
        return _make_bytes(np.asarray(scipy.loadmat(path)["GTcls"][0]["Segmentation"][0]))
    except OSError as error:
        raise DataError(str(error.strerror or error)) from error
    except Exception as error:  # as in `read_values`
        raise DataError(f"not a mask of SBD, or damaged ({error or type(error).__name__})") from error
