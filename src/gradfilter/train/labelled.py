"""The folder that masks of a model's making are written to: masks/ and overlays/, named as the images are."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradfilter.data import read_rgb
from gradfilter.data.check import listed
from gradfilter.errors import DataError, SettingsError
from gradfilter.files import replace_file
from gradfilter.report.colours import find_colours, lay_over

if TYPE_CHECKING:
    from PIL.Image import Image

    from gradfilter.train.use import Prediction, Trained

KINDS = ("masks", "overlays")


@dataclass(frozen=True)
class LabelledFolder:
    """Which image's mask goes where.

    Attributes:
        folder: The folder.
        names: From image file to the name of its mask and its overlay, below masks/ and overlays/.
    """

    folder: Path
    names: dict[str, str]

    @classmethod
    def plan(cls, folder: Path, files: Sequence[str], overwrite: bool) -> LabelledFolder:
        """Name the masks of image files as these are named, below the folder that all are in; raise before any is written.

        Raises:
            DataError: Two images would have masks of one name.
            SettingsError: Files are there already, and are not to be replaced.
        """
        above = os.path.commonpath([os.path.abspath(Path(file).parent) for file in files])
        names = {file: Path(os.path.relpath(os.path.abspath(file), above)).with_suffix(".png").as_posix() for file in files}
        first: dict[str, str] = {}
        for file, name in names.items():
            if first.setdefault(name, file) != file:
                raise DataError(
                    f"'{first[name]}' and '{file}' would both have the mask '{name}'. Label them one after the other, with "
                    "another --out each."
                )
        there = [str(path) for name in names.values() for kind in KINDS if (path := folder / kind / name).exists()]
        if there and not overwrite:
            raise SettingsError(f"{listed(there)} exists already. Replace it with --overwrite, or give another --out.")
        return cls(folder, names)

    def write(self, found: Prediction, trained: Trained) -> dict[str, str]:
        """Write the mask of an image, with values as in the masks that were trained on, and its overlay; return where."""
        assert found.labels is not None
        labels = found.labels.numpy().astype(np.uint8)
        pictures: dict[str, Image] = {
            "masks": make_mask(labels, trained),
            "overlays": lay_over(read_rgb(found.file), labels, len(trained.classes)),
        }
        written = {kind: self.folder / kind / self.names[found.file] for kind in KINDS}
        for kind, path in written.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, to_png(pictures[kind]))
            except OSError as error:
                raise SettingsError(
                    f"'{path}' cannot be written: {error.strerror or error}. Make room, or give another folder with --out."
                ) from error
        return {kind.removesuffix("s"): str(path) for kind, path in written.items()}


def make_mask(labels: np.ndarray, trained: Trained) -> Image:
    """Return a mask whose pixels have the values of their classes, and are shown in the classes' colours."""
    from PIL import Image

    values = np.asarray(trained.values, np.uint8)
    palette = np.zeros((256, 3), np.uint8)
    palette[values] = find_colours(len(values))
    mask = Image.fromarray(values[labels]).convert("P")
    mask.putdata(values[labels].flatten())
    mask.putpalette(palette.tobytes())
    return mask


def to_png(image: Image) -> bytes:
    """Return an image as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
