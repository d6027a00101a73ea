"""Find, check and label the images of a folder.

Two layouts: `<class>/*`, or `train/<class>/*` beside `val/` (or `valid/`, `validation/`) and/or `test/`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from gradfilter.data.check import check_files, listed, refuse_skipped
from gradfilter.data.images import Data, FileReader, ImageSet
from gradfilter.data.split import split_images
from gradfilter.errors import DataError

_VAL = ("val", "valid", "validation")
_PARTS = ("train", *_VAL, "test")

Stamps = dict[str, dict[str, str]]
"""The good files of a part: class, path, stamp."""


def load_folder(folder: Path, *, val_share: float, seed: int, strict: bool) -> Data:
    """Load the images of a folder; see `load_data`."""
    parts, loose = _find_parts(folder)
    skipped = [f"{path}: not in {', '.join(parts)}" for path in loose]
    found: dict[str, Stamps] = {}
    for part, path in parts.items():
        found[part], bad = _scan(path)
        skipped += bad
    if strict:
        refuse_skipped(str(folder), skipped)
    _check_same_classes(folder, found)
    sets = {part: _make_set(folder, part, stamps) for part, stamps in found.items()}
    if len(sets) == 1:
        train, val = split_images(next(iter(sets.values())), val_share, seed)
        return Data(train, val, None, tuple(skipped), made=True)
    if "val" not in sets:  # then test/ is the part that is held out
        sets["val"] = sets.pop("test")
    return Data(sets["train"], sets["val"], sets.get("test"), tuple(skipped))


def _find_parts(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Find the folders of the parts, and what lies beside them; a single part "" is the folder itself."""
    entries = _entries(folder)
    names = [entry.name for entry in entries if _is_folder(entry)]
    given = {name.casefold(): folder / name for name in names if name.casefold() in _PARTS}
    if "train" not in given and given and len(given) == len(names):
        there = ", ".join(f"{path.name}/" for path in given.values())
        raise DataError(f"{folder} has {there} but no train/. Add train/<class>/, or put the class folders right into it.")
    # A lone train/ beside other folders is a class of that name.
    if "train" not in given or (len(given) == 1 and len(names) > 1):
        return {"": folder}, []
    vals = [given[name] for name in _VAL if name in given]
    if len(vals) > 1:
        raise DataError(f"{folder} has both {vals[0].name}/ and {vals[1].name}/. Keep one of them.")
    parts = {
        "train": given["train"],
        **({"val": vals[0]} if vals else {}),
        **({"test": given["test"]} if "test" in given else {}),
    }
    return parts, [entry.path for entry in entries if folder / entry.name not in parts.values()]


def _scan(folder: Path) -> tuple[Stamps, list[str]]:
    """Find the class folders of one part, and decode every image; also give "path: reason" of what is skipped."""
    skipped: list[str] = []
    files: dict[str, list[str]] = {}
    for entry in _entries(folder):
        if _is_folder(entry):
            files[entry.name] = list(walk_files(Path(entry.path), (_identity(folder),)))
        else:
            skipped.append(f"{entry.path}: not in a class folder")
    if not files:
        loose = f" (files in no class folder: {len(skipped)})" if skipped else ""
        raise DataError(f"{folder} has no images in class folders{loose}. Expected: {folder / '<class>' / '<image>'}.")
    empty = [name for name, paths in files.items() if not paths]
    if empty:
        raise DataError(f"{folder}: there are no files in {_classes(empty)}. Add images, or remove what is empty.")
    checked = check_files([path for paths in files.values() for path in paths])
    good = {name: {path: checked.stamps[path] for path in paths if path in checked.stamps} for name, paths in files.items()}
    bad = [name for name, stamps in good.items() if not stamps]
    if bad:
        lines = [f"{path}: {checked.reasons[path]}" for name in bad for path in files[name]]
        raise DataError(
            f"{folder}: no file can be read in {_classes(bad)}: {listed(lines)}. Mend the files, or remove the folder."
        )
    if len(good) == 1:
        raise DataError(
            f"{folder} has a single class, {next(iter(good))!r}. Give two classes or more, each in a folder of its own."
        )
    return good, [*skipped, *checked.skipped]


def _check_same_classes(folder: Path, found: dict[str, Stamps]) -> None:
    for part in found.keys() - {"", "train"}:
        train, other = found["train"].keys(), found[part].keys()
        sides = [
            f"only in {name}: {', '.join(sorted(only))}"
            for name, only in (("train", train - other), (part, other - train))
            if only
        ]
        if sides:
            raise DataError(
                f"{folder}: train and {part} have different classes ({'; '.join(sides)}). Give both the same classes."
            )


def _make_set(folder: Path, part: str, stamps: Stamps) -> ImageSet:
    classes = tuple(stamps)
    rows = [
        (os.path.relpath(path, folder), stamp, label)
        for label, name in enumerate(classes)
        for path, stamp in stamps[name].items()
    ]
    files, found, labels = (tuple(column) for column in zip(*rows, strict=True))
    name = folder.resolve().name
    names = tuple(file.replace(os.sep, "/") for file in files)
    return ImageSet(f"{name}/{part}" if part else name, classes, labels, names, FileReader(folder, files, found))


def walk_files(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """Give the files below a folder, but for hidden ones; links are followed.

    Args:
        folder: The folder.
        above: Identifies the folders it lies in, to find links that lead back.
    """
    identity = _identity(folder)
    if identity in above:
        raise DataError(f"{folder} is a link to a folder that it lies in, so it never ends. Remove the link.")
    for entry in _entries(folder):
        if _is_folder(entry):
            yield from walk_files(Path(entry.path), (*above, identity))
        else:
            yield entry.path


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder without hidden entries, sorted by name: how the file system lists it does not matter."""
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


def _classes(names: list[str]) -> str:
    return f"class{'es' * (len(names) > 1)} {', '.join(map(repr, names))}"
