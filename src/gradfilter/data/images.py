"""Labelled images, wherever they come from."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import numpy as np

from gradfilter.data.decode import read_rgb
from gradfilter.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class ImageSet:
    """Labelled images.

    Attributes:
        name: What messages and reports call the set.
        classes: Names of the classes; a label is an index into them.
        labels: One label per image.
        names: What names each image: its file below the data folder, or for example "digits/17".
        read: Gives image i as a PIL image in RGB. It can be pickled, because the workers of a DataLoader call it. A reader with
            a method `identify(i) -> str` says cheaply what tells one content from another; else the pixels do.
        flips: Whether a mirrored image is still of its class (not so for digits).
    """

    name: str
    classes: tuple[str, ...]
    labels: tuple[int, ...]
    names: tuple[str, ...]
    read: Callable[[int], "Image"]
    flips: bool = True

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.names):
            raise DataError(f"{self.name}: {len(self.labels)} labels for {len(self.names)} images. Give one label per image.")
        if self.labels and not 0 <= min(self.labels) <= max(self.labels) < len(self.classes):
            raise DataError(
                f"{self.name}: labels from {min(self.labels)} to {max(self.labels)} for {len(self.classes)} classes. "
                f"Labels must lie between 0 and {len(self.classes) - 1}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Sequence[int]) -> "ImageSet":
        """Make the set of some of the images, in the order given; the reader is shared."""
        chosen = tuple(int(index) for index in indices)
        return dataclasses.replace(
            self,
            labels=tuple(self.labels[index] for index in chosen),
            names=tuple(self.names[index] for index in chosen),
            read=select_reader(self.read, chosen),
        )

    def join(self, other: "ImageSet") -> "ImageSet":
        """Make the set of these images and another's behind them."""
        labels, names = (*self.labels, *other.labels), (*self.names, *other.names)
        return dataclasses.replace(self, labels=labels, names=names, read=JoinedReader(self.read, len(self), other.read))

    def counts(self) -> tuple[int, ...]:
        """Count the images of each class."""
        return tuple(np.bincount(np.asarray(self.labels, dtype=np.int64), minlength=len(self.classes)).tolist())

    def fingerprint(self, contents: bool = True) -> str:
        """Hash the set, so that any change of it changes the result.

        Args:
            contents: Whether to hash, besides classes, labels and names, what tells contents apart: of files the size and
                the time of change, which a copy of the files may not have.
        """
        digest = hashlib.sha256(json.dumps([self.classes, self.labels, self.names]).encode())
        for index in range(len(self)) if contents else ():
            digest.update(identify(self.read, index).encode() + b"\n")
        return digest.hexdigest()


class Joinable(Protocol):
    """A set of images that another one of its kind can be put behind."""

    def join(self, other: Self) -> Self:
        """Make the set of these images and another's behind them."""
        ...


Part = TypeVar("Part", bound=Joinable)


@dataclass(frozen=True)
class Data(Generic[Part]):
    """The parts of a data set, and the files that were left out, each as "path: reason"; `made`: the split is ours.

    The parts are of one kind: an `ImageSet` each, or a `MaskSet`.
    """

    train: Part
    val: Part
    test: Part | None
    skipped: tuple[str, ...] = ()
    made: bool = False

    def join(self) -> Part:
        """Return the images of train and val as one set: what it was before it was split."""
        return self.train.join(self.val)


@dataclass(frozen=True)
class FileReader:
    """Read images from files below a folder; `stamps` are their sizes and times of change when they were found."""

    folder: Path
    files: tuple[str, ...]
    stamps: tuple[str, ...]

    def __call__(self, index: int) -> "Image":
        """Read one image."""
        path = self.folder / self.files[index]
        try:
            return read_rgb(path)
        except DataError as error:
            raise DataError(f"{path}: {error}. Put the file right, or remove it, and start again.") from error

    def identify(self, index: int) -> str:
        """Tell the contents of one file from another."""
        return self.stamps[index]


@dataclass(frozen=True, eq=False)
class ArrayReader:
    """Read images from one array, [N, H, W] for grey and [N, H, W, 3] for colour, of bytes."""

    pixels: np.ndarray

    def __call__(self, index: int) -> "Image":
        """Give one image."""
        from PIL import Image

        image = Image.fromarray(self.pixels[index])
        return image if image.mode == "RGB" else image.convert("RGB")

    def identify(self, index: int) -> str:
        """Tell one image from another."""
        return hashlib.sha256(self.pixels[index].tobytes()).hexdigest()


@dataclass(frozen=True)
class _Selection:
    """Some images of another reader."""

    read: Callable[[int], "Image"]
    indices: tuple[int, ...]

    def __call__(self, index: int) -> "Image":
        return self.read(self.indices[index])

    def identify(self, index: int) -> str:
        return identify(self.read, self.indices[index])


@dataclass(frozen=True)
class JoinedReader:
    """The images of one reader, `count` of them, and behind them those of another."""

    first: Callable[[int], "Image"]
    count: int
    second: Callable[[int], "Image"]

    def __call__(self, index: int) -> "Image":
        """Read one image."""
        return self.first(index) if index < self.count else self.second(index - self.count)


def select_reader(read: Callable[[int], "Image"], indices: tuple[int, ...]) -> _Selection:
    """Make a reader of some images of another."""
    if isinstance(read, _Selection):  # keep chains of selections short
        return _Selection(read.read, tuple(read.indices[index] for index in indices))
    return _Selection(read, indices)


def identify(read: Callable[[int], "Image"], index: int) -> str:
    """Tell one image of a reader from another: cheaply where it says how, else by its pixels."""
    if hasattr(read, "identify"):
        return read.identify(index)
    image = read(index)
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()
