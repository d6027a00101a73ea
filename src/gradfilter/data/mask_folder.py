"""Find, pair and check the images and masks of a folder.

Three layouts: `images/` beside `masks/`; the same two below `train/`, `val/`, `test/`; and these below `images/` and `masks/`.
Nothing is skipped: whatever is wrong with a file stops, with its name.
"""

import logging
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradfilter.data.check import check_file, count_threads, listed, make_stamp
from gradfilter.data.folder import walk_files
from gradfilter.data.images import Data, FileReader
from gradfilter.data.masks import IGNORE, VALUES, Coding, MaskReader, MaskSet, join_values, read_values
from gradfilter.data.split import split_labels
from gradfilter.errors import DataError

_log = logging.getLogger(__name__)

CLASSES = "classes.txt"
"""The file that names the classes: a line each, in the order of their values, or each with its value in front."""
VOID = ("void", "ignore", "ignored", "unlabelled", "unlabeled")
"""Names in it that are no class: pixels of their values do not count."""
MASKS = ("masks", "labels", "annotations")
PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}

Pairs = list[tuple[Path, Path]]
"""Images, each with its mask."""


@dataclass(frozen=True)
class _Checked:
    """What is known of a pair of files: their stamps, and the pixels of the mask with each value, [256]."""

    image: str
    mask: str
    areas: np.ndarray


def load_mask_folder(folder: Path, *, val_share: float, seed: int, coding: Coding | None = None) -> Data[MaskSet]:
    """Load the images and masks of a folder.

    Args:
        folder: In one of the three layouts.
        val_share: Share of the images to hold out where the folder has no such part.
        seed: Chooses which.
        coding: What the values in its masks mean. By default its file classes.txt says it, or else the values count from 0,
            as far as the training masks have them, and 255 is ignored.
    """
    pairs = {part: pair_files(images, masks) for part, (images, masks) in _find_parts(folder).items()}
    return make_mask_data(folder.resolve().name, folder, pairs, read_coding(folder) or coding, val_share, seed)


def make_mask_data(
    name: str, folder: Path, pairs: Mapping[str, Pairs], coding: Coding | None, val_share: float = 0.2, seed: int = 0
) -> Data[MaskSet]:
    """Check pairs of files, by part, and make the sets of them; a single part is split."""
    checked = {part: _check_pairs(folder, found) for part, found in pairs.items()}
    first = next(iter(pairs))
    seen = "train" if "train" in pairs else first
    coding = coding or _guess_coding(folder, pairs[seen], checked[seen])
    _refuse_unknown(folder, pairs, checked, coding)
    sets = {part: _make_set(name, folder, part, pairs[part], checked[part], coding) for part in pairs}
    if len(sets) == 1:
        data = _split(sets[first], val_share, seed)
    else:
        if "val" not in sets:  # then test/ is the part that is held out
            sets["val"] = sets.pop("test")
        data = Data(sets["train"], sets["val"], sets.get("test"))
    _refuse_empty(folder, data)
    return data


def pair_files(images: Path, masks: Path, image_end: str = "", mask_end: str = "") -> Pairs:
    """Find the mask of every image: the same path below its folder, but for the extension and for given ends before it."""
    found, partners = _find_files(images, image_end), _find_files(masks, mask_end)
    alone = [f"{found[stem]} has no mask {masks / stem}{mask_end}.*" for stem in found if stem not in partners]
    alone += [f"{partners[stem]} has no image {images / stem}{image_end}.*" for stem in partners if stem not in found]
    if alone:
        raise DataError(
            f"{images} and {masks}: {listed(alone)}. Every image needs a mask of the same name: add what is missing, or remove "
            "its partner."
        )
    if not found:
        raise DataError(f"{images} has no files. Put images in it, and their masks of the same names in {masks}.")
    return [(path, partners[stem]) for stem, path in found.items()]


def read_coding(folder: Path) -> Coding | None:
    """Read what the values in masks mean from the folder's classes.txt; None where it has none."""
    path = folder / CLASSES
    if not path.exists():
        return None
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}. Write the names of the classes in it, a line each.") from error
    rows = [line.partition(" ") for line in lines]
    if all(first.isdecimal() and name for first, _, name in rows):
        named = {int(first): name.strip() for first, _, name in rows}
    else:
        named = dict(enumerate(lines))
    if len(named) < len(lines) or max(named, default=0) >= VALUES:
        raise DataError(
            f"{path}: two lines have the same value, or one is above {VALUES - 1}. Give each class a value of its own."
        )
    ignored = {value for value, name in named.items() if name.casefold() in VOID}
    classes = {value: name for value, name in named.items() if value not in ignored}
    if len(classes) < 2:
        raise DataError(f"{path} names {len(classes)} classes. Name two or more, a line each.")
    twice = [name for name, count in Counter(classes.values()).items() if count > 1]
    if twice:
        raise DataError(
            f"{path} names {', '.join(map(repr, twice))} more than once. Give each class a name of its own: two values cannot "
            "stand for one class."
        )
    ignored |= {IGNORE} - classes.keys()
    return Coding(tuple(classes.values()), tuple(classes), tuple(sorted(ignored)))


def _find_parts(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Find the folders of images and masks, by part; a single part "" is the folder itself."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Give one with images/ and masks/, or with these below train/ and val/.")
    whole = _find_masks(folder)
    if whole is not None:
        images = folder / "images"
        parts = {part: (images / path.name, whole / path.name) for part, path in _find_part_folders(images).items()}
        return _check_parts(folder, parts) if parts else {"": (images, whole)}
    parts = {}
    for part, path in _find_part_folders(folder).items():
        masks = _find_masks(path)
        if masks is None:
            raise DataError(f"{path} has no images/ beside {' or '.join(f'{name}/' for name in MASKS)}. Put both into it.")
        parts[part] = (path / "images", masks)
    if not parts:
        raise DataError(
            f"{folder} has no images with masks. Expected: {folder / 'images'} and {folder / 'masks'}, or "
            f"{folder / 'train' / 'images'} and {folder / 'train' / 'masks'}, with files of the same names."
        )
    return _check_parts(folder, parts)


def _check_parts(folder: Path, parts: dict[str, tuple[Path, Path]]) -> dict[str, tuple[Path, Path]]:
    if "train" not in parts:
        raise DataError(f"{folder} has {', '.join(parts)} but no part to train on. Add train/.")
    return parts


def _find_masks(folder: Path) -> Path | None:
    """Find the folder of masks beside images/."""
    found = [folder / name for name in MASKS if (folder / name).is_dir()]
    if len(found) > 1:
        raise DataError(f"{folder} has both {found[0].name}/ and {found[1].name}/. Keep one of them.")
    return found[0] if found and (folder / "images").is_dir() else None


def _find_part_folders(folder: Path) -> dict[str, Path]:
    parts: dict[str, Path] = {}
    for part, names in PARTS.items():
        found = [folder / name for name in names if (folder / name).is_dir()]
        if len(found) > 1:
            raise DataError(f"{folder} has both {found[0].name}/ and {found[1].name}/. Keep one of them.")
        if found:
            parts[part] = found[0]
    return parts


def _find_files(folder: Path, end: str) -> dict[str, Path]:
    """List the files below a folder, by path without its extension and without the end before that."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder, but its partner is there. Add it.")
    files: dict[str, Path] = {}
    for path in map(Path, walk_files(folder)):
        stem = path.relative_to(folder).with_suffix("").as_posix()
        if not stem.endswith(end):
            continue
        stem = stem.removesuffix(end)
        if stem in files:
            raise DataError(f"{files[stem]} and {path} have the same name. Images and masks are paired by name: remove one.")
        files[stem] = path
    return files


def _check_pairs(folder: Path, pairs: Pairs) -> list[_Checked]:
    """Decode every image and mask once."""
    checked: list[_Checked] = []
    wrong: list[str] = []
    # As in `check_files`: filters of warnings belong to the process.
    with warnings.catch_warnings(), ThreadPoolExecutor(count_threads([str(image) for image, _ in pairs])) as pool:
        warnings.simplefilter("ignore")
        for done, result in enumerate(pool.map(_check_pair, pairs), start=1):
            (wrong if isinstance(result, str) else checked).append(result)  # pyright: ignore[reportArgumentType]
            if done % 1000 == 0:
                _log.info("checked %d of %d images with masks", done, len(pairs))
    if wrong:
        raise DataError(f"{folder}: {listed(wrong)}. Put these files right, or remove each with its partner.")
    return checked


def _check_pair(pair: tuple[Path, Path]) -> _Checked | str:
    """Return what is known of a pair, or what is wrong with it."""
    path, mask = pair
    try:
        stamp, size = check_file(str(path))
    except DataError as error:
        return f"{path}: {error}"
    try:
        values = read_values(mask)
        mask_stamp = make_stamp(str(mask))
    except DataError as error:
        return f"{mask}: {error}"
    height, width = values.shape
    if (width, height) != size:
        return f"{mask}: it is of {width}x{height} pixels, but its image {path} is of {size[0]}x{size[1]}"
    return _Checked(stamp, mask_stamp, np.bincount(values.ravel(), minlength=VALUES))


def _guess_coding(folder: Path, pairs: Pairs, checked: Sequence[_Checked]) -> Coding:
    """Take the values of training masks as labels from 0 on; 255 is ignored."""
    found = np.flatnonzero(np.sum([pair.areas for pair in checked], axis=0)[:IGNORE]).tolist()
    count = len(found)
    if found != list(range(count)) or count < 2:
        odd = [value for place, value in enumerate(found) if value != place]  # those behind the first gap
        masks = [str(mask) for (_, mask), known in zip(pairs, checked, strict=True) if known.areas[odd].any()]
        where = f" ({join_values(odd)} in {listed(masks)})" if masks else ""
        raise DataError(
            f"{folder}: its training masks have the values {join_values(found)} (besides {IGNORE}, which is ignored){where}, "
            "and labels of two classes or more count from 0 without a gap. Put the masks right, or write a file "
            f"{folder / CLASSES} that names the classes, a line each with the value in front, such as '7 road', or '0 void' "
            "for what is to be ignored."
        )
    return Coding.make_plain([f"class {value}" for value in found])


def _refuse_unknown(
    folder: Path, pairs: Mapping[str, Pairs], checked: Mapping[str, Sequence[_Checked]], coding: Coding
) -> None:
    lines = []
    for part, found in pairs.items():
        for (_, mask), known in zip(found, checked[part], strict=True):
            values = coding.find_unknown(known.areas)
            if values:
                lines.append(f"{mask}: {join_values(values)} in {int(known.areas[values].sum()):,} pixels")
    if lines:
        raise DataError(
            f"{folder}: masks have labels that stand for nothing: {listed(lines)}. There may be {coding.describe()}. Put the "
            f"masks right, or name the classes in {folder / CLASSES}, a line each, 'void' for what is to be ignored."
        )


def _refuse_empty(folder: Path, data: Data[MaskSet]) -> None:
    """Stop where there is nothing to learn, or nothing to judge by: in no mask a pixel that counts."""
    for what, images in (("to train on", data.train), ("held out", data.val)):
        if not images.areas.any():
            raise DataError(
                f"{folder}: in the masks of the {len(images)} images {what}, {images.name}, no pixel is of a class: all are to "
                f"be ignored. Put the masks right, or the values in {folder / CLASSES}."
            )


def _make_set(name: str, folder: Path, part: str, pairs: Pairs, checked: Sequence[_Checked], coding: Coding) -> MaskSet:
    files, masks = (tuple(os.path.relpath(path, folder) for path in paths) for paths in zip(*pairs, strict=True))
    areas = np.stack([known.areas for known in checked])[:, list(coding.values)]
    return MaskSet(
        f"{name}/{part}" if part else name,
        coding.classes,
        tuple(file.replace(os.sep, "/") for file in files),
        FileReader(folder, files, tuple(known.image for known in checked)),
        MaskReader(folder, masks, tuple(known.mask for known in checked), coding),
        areas,
        values=coding.values,
    )


def _split(images: MaskSet, val_share: float, seed: int) -> Data[MaskSet]:
    train, val = split_labels([0] * len(images), val_share, seed)
    if not val:
        raise DataError(
            f"{images.name} has a single image, so none can be held out. Add images, or give folders train/ and val/."
        )
    return Data(images.select(train), images.select(val), None, made=True)
