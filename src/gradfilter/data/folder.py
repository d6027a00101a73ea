"""Find, check and label the images of a folder.

Two layouts: `<class>/*`, or `train/<class>/*` beside `val/` (or `valid/`, `validation/`) and/or `test/`.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gradfilter.data.decode import find_extensions, read_rgb
from gradfilter.data.images import Data, FileReader, ImageSet
from gradfilter.data.split import split_images
from gradfilter.errors import DataError

_log = logging.getLogger(__name__)

_VAL = ("val", "valid", "validation")
_PARTS = ("train", *_VAL, "test")
_LISTED = 20  # files named in an error
_CHUNK = 256  # files per task of the thread pool


def load_folder(folder: Path, *, val_share: float, seed: int, strict: bool) -> Data:
    """Read the images of a folder; see `load_data`."""
    parts = _find_parts(folder)
    scans = {part: _scan(folder, path) for part, path in parts.items()}
    skipped = tuple(line for scan in scans.values() for line in scan.skipped)
    if strict and skipped:
        raise DataError(
            f"{folder}: {len(skipped)} files cannot be used: {_listed(skipped)}. "
            "Remove or mend them, or leave out strict to skip them."
        )
    _check_same_classes(folder, scans)
    sets = {part: _make_set(folder, part, scan) for part, scan in scans.items()}
    if set(sets) == {"train"} or "" in sets:
        train, val = split_images(next(iter(sets.values())), val_share, seed)
        return Data(train, val, None, skipped)
    # Where only test/ is given it is the part that is held out.
    val = sets.get("val") or sets["test"]
    return Data(sets["train"], val, sets.get("test") if "val" in sets else None, skipped)


@dataclass(frozen=True)
class _Scan:
    """What a folder of class folders holds: files relative to the data folder, by class, each with its stamp."""

    files: dict[str, list[tuple[str, str]]]
    skipped: list[str]


def _find_parts(folder: Path) -> dict[str, Path]:
    """Find the folders of the parts; a single part "" is the folder itself, to be split."""
    names = [entry.name for entry in _entries(folder) if _is_folder(entry)]
    given = {name.casefold(): folder / name for name in names if name.casefold() in _PARTS}
    if "train" not in given:
        if given and len(given) == len(names):
            found = ", ".join(f"{path.name}/" for path in given.values())
            raise DataError(f"{folder} has {found} but no train/. Add train/<class>/, or put the class folders right into it.")
        return {"": folder}
    if len(given) == 1 and len(names) > 1:  # a class that is called "train", beside others
        return {"": folder}
    vals = [given[name] for name in _VAL if name in given]
    if len(vals) > 1:
        raise DataError(f"{folder} has both {vals[0].name}/ and {vals[1].name}/. Keep one of them.")
    parts = {"train": given["train"], "val": vals[0] if vals else None, "test": given.get("test")}
    return {part: path for part, path in parts.items() if path is not None}


def _scan(root: Path, folder: Path) -> _Scan:
    """Find the class folders of one part, decode every image once, and stop where a class has none."""
    skipped: list[str] = []
    found: dict[str, list[str]] = {}
    for entry in _entries(folder):
        if _is_folder(entry):
            found[entry.name] = list(_walk(Path(entry.path), (_identity(folder),)))
        else:
            skipped.append(f"{entry.path}: not in a class folder")
    if not found:
        loose = f" (its {len(skipped)} files are in no class folder)" if skipped else ""
        raise DataError(f"{folder} has no images in class folders{loose}. Expected {folder}/<class>/<image>.")
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise DataError(f"{folder}: no files in {_classes(empty)}. Add images, or remove the folders.")
    reasons = _check_files([path for files in found.values() for path in files])
    skipped += [f"{path}: {reason}" for path, reason in reasons.items()]
    good = {name: [path for path in files if path not in reasons] for name, files in found.items()}
    _check_classes(folder, good, skipped)
    return _Scan(
        {name: [(os.path.relpath(path, root), _stamp(path)) for path in files] for name, files in good.items()}, skipped
    )


def _check_classes(folder: Path, good: dict[str, list[str]], skipped: list[str]) -> None:
    bad = [name for name, files in good.items() if not files]
    if len(bad) == len(good):
        raise DataError(f"{folder} has no readable images: {_listed(skipped)}. Give a folder with images in class folders.")
    if bad:
        raise DataError(
            f"{folder}: no readable image in {_classes(bad)}: {_listed(skipped)}. Mend the files, or remove the folders."
        )
    if len(good) == 1:
        raise DataError(
            f"{folder} has a single class, {next(iter(good))!r}. A classifier needs two or more: one folder per class."
        )


def _check_same_classes(folder: Path, scans: dict[str, _Scan]) -> None:
    for part in [name for name in scans if name not in ("", "train")]:
        here, there = set(scans["train"].files), set(scans[part].files)
        if here != there:
            sides = [
                f"only in {name}: {', '.join(sorted(only))}"
                for name, only in (("train", here - there), (part, there - here))
                if only
            ]
            raise DataError(
                f"{folder}: train and {part} have different classes ({'; '.join(sides)}). Give both the same folders."
            )


def _make_set(folder: Path, part: str, scan: _Scan) -> ImageSet:
    classes = tuple(sorted(scan.files))
    rows = [(file, stamp, label) for label, name in enumerate(classes) for file, stamp in sorted(scan.files[name])]
    files, stamps, labels = (tuple(column) for column in zip(*rows, strict=True))
    names = tuple(file.replace(os.sep, "/") for file in files)
    name = f"{folder.name}/{part}" if part else folder.name
    return ImageSet(name, classes, labels, names, FileReader(folder, files, stamps))


def _walk(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Give the files below a folder; `above` identifies the folders it lies in, to find links that lead back."""
    identity = _identity(folder)
    if identity in above:
        raise DataError(f"{folder} is a link to a folder that it lies in, so it never ends. Remove the link.")
    for entry in _entries(folder):
        if _is_folder(entry):
            yield from _walk(Path(entry.path), (*above, identity))
        else:
            yield entry.path


def _check_files(paths: list[str]) -> dict[str, str]:
    """Decode every file once, and give the reasons of those that cannot be."""
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    reasons: dict[str, str] = {}
    # Filters of warnings belong to the process: set here, they hold in the threads.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        from PIL import Image

        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for done, found in enumerate(pool.map(_check_chunk, chunks), start=1):
            reasons.update(found)
            if done * _CHUNK % 10240 == 0:
                _log.info("checked %d of %d images", done * _CHUNK, len(paths))
    return reasons


def _check_chunk(paths: list[str]) -> dict[str, str]:
    reasons = {}
    for path in paths:
        try:
            _check_file(path)
        except DataError as error:
            reasons[path] = str(error)
    return reasons


def _check_file(path: str) -> None:
    extension = os.path.splitext(path)[1].lower()
    if extension not in find_extensions():
        raise DataError(f"not an image file (extension {extension!r})" if extension else "not an image file (no extension)")
    read_rgb(path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder by name, without hidden entries."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except NotADirectoryError as error:
        raise DataError(f"{folder} is a file, where a folder of images is expected. Give the folder.") from error
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}. Make it readable, or remove it.") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        raise DataError(f"{entry.path} cannot be followed: {error.strerror}. Remove the link.") from error


def _identity(folder: Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _stamp(path: str) -> str:
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


def _classes(names: list[str]) -> str:
    return f"class{'es' * (len(names) > 1)} {', '.join(map(repr, names))}"


def _listed(lines: list[str] | tuple[str, ...]) -> str:
    more = len(lines) - _LISTED
    return "; ".join(lines[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
