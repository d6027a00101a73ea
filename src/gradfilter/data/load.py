"""From what the user says the data is to the images."""

import difflib
import logging
from pathlib import Path

from gradfilter.data.decode import require_pillow
from gradfilter.data.folder import load_folder
from gradfilter.data.images import Data, ImageSet
from gradfilter.data.mask_folder import load_mask_folder, read_coding
from gradfilter.data.mask_sets import CODINGS
from gradfilter.data.masks import MaskSet
from gradfilter.data.sets import Request, Task, find_root, find_sets, load_set
from gradfilter.data.split import check_val_share
from gradfilter.errors import DataError

_log = logging.getLogger(__name__)


def load_data(
    data: str,
    *,
    root: str | None = None,
    val_share: float = 0.2,
    seed: int = 0,
    strict: bool = False,
    download: bool = False,
) -> Data[ImageSet]:
    """Load labelled images.

    Args:
        data: The name of a known set, or a folder: `<class>/*`, or `train/<class>/*` beside `val/` (`valid/`,
            `validation/`) and/or `test/`. Where only `test/` is given it becomes `val`, the one part that is held out.
        root: Where named sets are kept; by default $GRADFILTER_DATA, or a folder in the user's cache.
        val_share: Share of the images of each class to hold out where the data has no such part.
        seed: Chooses which images are held out.
        strict: Whether a file that cannot be read is an error; otherwise it is skipped and listed.
        download: Whether a named set may be fetched.
    """
    require_pillow()
    check_val_share(val_share)
    if _is_set(data, "classify"):
        return load_set(data, Request(find_root(root), val_share, seed, strict, download))
    folder = _find_folder(data, "classify", "a folder with one folder of images per class")
    return load_folder(folder, val_share=val_share, seed=seed, strict=strict)


def load_masks(
    data: str, *, root: str | None = None, val_share: float = 0.2, seed: int = 0, download: bool = False
) -> Data[MaskSet]:
    """Load images with masks, which have a label for every pixel.

    Args:
        data: The name of a known set, or a folder: `images/` beside `masks/` (`labels/`, `annotations/`), with files of the
            same names; or these two below `train/`, `val/` and `test/`, or these below the two. Its file `classes.txt` names
            the classes; without it a folder of a known set's name has that set's, and any other has labels from 0 on.
        root: Where named sets are kept; by default $GRADFILTER_DATA, or a folder in the user's cache.
        val_share: Share of the images to hold out where the data has no such part.
        seed: Chooses which images are held out.
        download: Whether a named set may be fetched.

    Raises:
        DataError: A file cannot be read, has no partner, or another size than that; a mask has a label that stands for nothing.
    """
    require_pillow()
    check_val_share(val_share)
    if _is_set(data, "segment"):
        return load_set(data, Request(find_root(root), val_share, seed, download=download))
    folder = _find_folder(data, "segment", "a folder with images/ and masks/, or with these below train/ and val/")
    name = folder.resolve().name
    if name in CODINGS and read_coding(folder) is None:
        _log.warning("the folder %s is named like the known set %r: its masks are read as that set's", folder, name)
    return load_mask_folder(folder, val_share=val_share, seed=seed, coding=CODINGS.get(name))


def _is_set(data: str, task: Task) -> bool:
    """Tell whether a word names a known set; say so where a folder has the same name."""
    if data not in find_sets(task):
        return False
    if Path(data).expanduser().is_dir():
        _log.warning("data %r is taken as the known set, not as the folder of that name; for that, say './%s'", data, data)
    return True


def _find_folder(data: str, task: Task, what: str) -> Path:
    """Find the folder that a word names."""
    folder, sets, others = Path(data).expanduser(), find_sets(task), find_sets(None)
    if data and folder.exists():
        return folder
    if data in others:
        raise DataError(f"the data set {data!r} is for --task {others[data].task}. Give that, or one of: {', '.join(sets)}.")
    near = difflib.get_close_matches(data, sets, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise DataError(f"data {data!r} is neither a folder nor a known set. {hint}Give {what}, or one of: {', '.join(sets)}.")
