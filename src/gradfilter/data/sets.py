"""The data sets that have a name: where they come from, and how each becomes images."""

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from gradfilter.data.check import check_files, make_stamp, refuse_skipped
from gradfilter.data.folder import load_folder
from gradfilter.data.images import ArrayReader, Data, FileReader, ImageSet
from gradfilter.data.split import split_images
from gradfilter.errors import DataError, MissingExtraError, SettingsError
from gradfilter.models.extras import import_extra

_log = logging.getLogger(__name__)

_BY_HAND = "by hand"
_CUB_ARCHIVE = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1"
_CUB_MD5 = "97eceeb196236b17998738112f37df78"


Task = Literal["classify", "segment"]


@dataclass(frozen=True)
class Request:
    """What the user asks of a named set; see `load_data`."""

    root: Path
    val_share: float = 0.2
    seed: int = 0
    strict: bool = False
    download: bool = False


@dataclass(frozen=True)
class SetInfo:
    """A named set.

    Attributes:
        name: What the user calls it.
        description: One line.
        classes: How many there are.
        counts: Images of each part.
        source: Where it comes from.
        layout: What is expected below the folder of all sets; nothing for a set that comes with a package.
        load: Loads it; raises `MissingSetError` where it is not there.
        task: "classify" where every image has a label, "segment" where it has a mask.
    """

    name: str
    description: str
    classes: int
    counts: Mapping[str, int]
    source: str
    layout: str
    load: Callable[[Request], Data]
    task: Task = "classify"


class MissingSetError(Exception):
    """Say inside this file that a set is not there, or not whole; users see a `DataError`."""


_SETS: dict[str, SetInfo] = {}


def find_sets(task: Task | None = "classify") -> dict[str, SetInfo]:
    """List the named sets for a task; None for those of all."""
    return {name: info for name, info in _SETS.items() if task in (None, info.task)}


def find_root(root: str | None = None) -> Path:
    """Find the folder of all sets: the one given, else $GRADFILTER_DATA, else one in the user's cache."""
    return Path(root or os.environ.get("GRADFILTER_DATA") or "~/.cache/gradfilter/data").expanduser()


def register(
    name: str,
    description: str,
    *,
    classes: int,
    counts: Mapping[str, int],
    source: str = "torchvision",
    layout: str = "",
    task: Task = "classify",
) -> Callable[[Callable[[Request], Data]], Callable[[Request], Data]]:
    """Make a function the loader of a named set; see `SetInfo`."""

    def enter(load: Callable[[Request], Data]) -> Callable[[Request], Data]:
        if name in _SETS:
            raise SettingsError(
                f"there is a data set {name!r} already: {_SETS[name].description}. Give the new one another name."
            )
        _SETS[name] = SetInfo(name, description, classes, counts, source, layout, load, task)
        return load

    return enter


def load_set(name: str, request: Request) -> Data:
    """Load a named set; where it is not there in its own layout, an image folder of its name will do."""
    info = _SETS[name]
    folder = request.root / name
    try:
        return info.load(dataclasses.replace(request, download=False))
    except MissingSetError as error:
        reason = str(error)
    if info.task == "classify" and (folder / "train").is_dir():
        return load_folder(folder, val_share=request.val_share, seed=request.seed, strict=request.strict)
    failed, fetch = "was not found", "" if info.source.endswith(_BY_HAND) else "fetch it with --download; "
    if request.download and fetch:
        try:
            return info.load(request)
        except MissingSetError as error:
            failed, fetch, reason = "could not be fetched; is there a network?", "", str(error)
    where = f"{fetch}name the folder it is in with --root or GRADFILTER_DATA"
    instead = (
        f"give its images as a folder, train/<class>/ and test/<class>/, with --data, or as {folder}; or take --data digits, "
        "which needs no files"
        if info.task == "classify"
        else "or give a folder with train/images/, train/masks/, val/images/ and val/masks/ with --data"
    )
    raise DataError(
        f"the data set {name!r} {failed} ({reason}). Expected: {request.root / info.layout}. Choices: {where}; {instead}."
    )


@register(
    "cifar10",
    "small photos of 10 kinds of things, 32x32",
    classes=10,
    counts={"train": 50000, "test": 10000},
    layout="cifar-10-batches-py",
)
def _load_cifar10(request: Request) -> Data:
    return _load_arrays("cifar10", "CIFAR10", request)


@register(
    "cifar100",
    "small photos of 100 kinds of things, 32x32",
    classes=100,
    counts={"train": 50000, "test": 10000},
    layout="cifar-100-python",
)
def _load_cifar100(request: Request) -> Data:
    return _load_arrays("cifar100", "CIFAR100", request)


@register("mnist", "handwritten digits, 28x28", classes=10, counts={"train": 60000, "test": 10000}, layout="MNIST/raw")
def _load_mnist(request: Request) -> Data:
    return _load_arrays("mnist", "MNIST", request, classes=tuple("0123456789"), flips=False)


@register(
    "fashion-mnist", "clothes and shoes, 28x28", classes=10, counts={"train": 60000, "test": 10000}, layout="FashionMNIST/raw"
)
def _load_fashion_mnist(request: Request) -> Data:
    return _load_arrays("fashion-mnist", "FashionMNIST", request)


@register(
    "pets",
    "Oxford-IIIT Pet: photos of 37 breeds of cats and dogs",
    classes=37,
    counts={"train": 3680, "test": 3669},
    layout="oxford-iiit-pet",
)
def _load_pets(request: Request) -> Data:
    parts = {"train": "trainval", "test": "test"}
    found = {part: _open("OxfordIIITPet", request, split=split) for part, split in parts.items()}
    rows = {part: (dataset._images, dataset._labels) for part, dataset in found.items()}
    return _make_files("pets", request.root / "oxford-iiit-pet", found["train"].classes, rows, request.strict)


@register(
    "flowers102",
    "Oxford 102 Flowers: photos of 102 kinds of flowers",
    classes=102,
    counts={"train": 1020, "val": 1020, "test": 6149},
    layout="flowers-102",
)
def _load_flowers(request: Request) -> Data:
    found = {part: _open("Flowers102", request, split=part) for part in ("train", "val", "test")}
    rows = {part: (dataset._image_files, dataset._labels) for part, dataset in found.items()}
    return _make_files("flowers102", request.root / "flowers-102", found["train"].classes, rows, request.strict)


@register(
    "imagenet",
    "ImageNet 2012: photos of 1000 kinds of things",
    classes=1000,
    counts={"train": 1281167, "val": 50000},
    source=f"image-net.org, {_BY_HAND}",
    layout="imagenet, with train/<wnid>/ and val/<wnid>/ or the archives",
)
def _load_imagenet(request: Request) -> Data:
    folder = request.root / "imagenet"
    rows = {}
    for part in ("train", "val"):
        if not (folder / part).is_dir():
            _log.info("unpacking the %s archive of ImageNet in %s", part, folder)
            _call(_datasets().ImageNet, folder, split=part)
        found = _call(_datasets().ImageFolder, folder / part)
        rows[part] = ([path for path, _ in found.samples], found.targets, tuple(found.classes))
    wnids = rows["train"][2]
    if rows["val"][2] != wnids:
        raise DataError(f"train/ and val/ in {folder} have different classes. Give both the same folders.")
    # Over a million photos take hours to decode: what cannot be read is found when its turn comes.
    sets = {
        part: _make_set("imagenet", part, folder, _name_wnids(wnids), paths, labels)
        for part, (paths, labels, _) in rows.items()
    }
    return Data(sets["train"], sets["val"], None)


def _name_wnids(wnids: tuple[str, ...]) -> tuple[str, ...]:
    """Give the classes of ImageNet their names, which are known in the order of all of them."""
    names = import_extra("torchvision", "ImageNet").models.ResNet18_Weights.DEFAULT.meta["categories"]
    return tuple(names) if len(wnids) == len(names) else wnids


@register(
    "cub200",
    "Caltech-UCSD Birds 200-2011: photos of 200 kinds of birds",
    classes=200,
    counts={"train": 5994, "test": 5794},
    source="data.caltech.edu",
    layout="CUB_200_2011",
)
def _load_cub(request: Request) -> Data:
    folder = request.root / "CUB_200_2011"
    if request.download and not folder.is_dir():
        utils = import_extra("torchvision.datasets.utils", "fetching a data set")
        _call(utils.download_and_extract_archive, _CUB_ARCHIVE, str(request.root), filename="CUB_200_2011.tgz", md5=_CUB_MD5)
    names, files, labels, training = (
        _call(_read_cub_table, folder / f"{table}.txt")
        for table in ("classes", "images", "image_class_labels", "train_test_split")
    )
    if not (files.keys() == labels.keys() == training.keys() and set(labels.values()) <= names.keys()):
        raise MissingSetError(f"the tables in {folder} do not fit each other")
    index = {number: position for position, number in enumerate(names)}
    rows = {
        part: ([folder / "images" / files[key] for key in keys], [index[labels[key]] for key in keys])
        for part, flag in (("train", "1"), ("test", "0"))
        for keys in [[key for key in files if training[key] == flag]]
    }
    # "001.Black_footed_Albatross"
    classes = [name.partition(".")[2].replace("_", " ") for name in names.values()]
    return _make_files("cub200", folder, classes, rows, request.strict)


def _read_cub_table(path: Path) -> dict[str, str]:
    """Read lines of a number and a value."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {key: value for key, _, value in (line.strip().partition(" ") for line in lines if line.strip())}


@register(
    "digits",
    "scikit-learn's handwritten digits, 8x8: comes with the package",
    classes=10,
    counts={"all": 1797},
    source="scikit-learn, embedded",
)
def _load_digits(request: Request) -> Data:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "the data set 'digits' needs the package 'sklearn', which is not installed. "
            "Install it with: pip install scikit-learn"
        ) from error
    found: Any = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)
    names = tuple(f"digits/{index}" for index in range(len(pixels)))
    labels = tuple(int(label) for label in found.target)
    images = ImageSet("digits", tuple("0123456789"), labels, names, ArrayReader(pixels), flips=False)
    return Data(*split_images(images, request.val_share, request.seed), None, made=True)


def _load_arrays(name: str, dataset: str, request: Request, classes: Sequence[str] = (), flips: bool = True) -> Data:
    """Load a set of torchvision that is in memory; its test part is the one held out."""
    sets = {}
    for part in ("train", "test"):
        found = _open(dataset, request, train=part == "train")
        proper = tuple(classes or (known.replace("_", " ") for known in found.classes))
        labels = tuple(int(label) for label in found.targets)
        names = tuple(f"{name}/{part}/{index}" for index in range(len(labels)))
        sets[part] = ImageSet(f"{name}/{part}", proper, labels, names, ArrayReader(np.asarray(found.data)), flips)
    return Data(sets["train"], sets["test"], None)


def _make_files(
    name: str, folder: Path, classes: Sequence[str], rows: Mapping[str, tuple[Sequence[Path], Sequence[int]]], strict: bool
) -> Data:
    """Make the parts of a set from paths and labels, without the files that cannot be read."""
    checked = check_files([str(path) for paths, _ in rows.values() for path in paths])
    if strict:
        refuse_skipped(name, checked.skipped)
    sets = {}
    for part, (paths, labels) in rows.items():
        good = [(path, label) for path, label in zip(paths, labels, strict=True) if str(path) in checked.stamps]
        sets[part] = _make_set(name, part, folder, classes, [path for path, _ in good], [label for _, label in good])
    lost = [name for name, count in zip(classes, sets["train"].counts(), strict=True) if not count]
    if lost:
        raise MissingSetError(f"no training image can be read of {', '.join(lost)}")
    val = sets["val"] if "val" in sets else sets.pop("test")
    return Data(sets["train"], val, sets.get("test"), checked.skipped)


def _make_set(
    name: str, part: str, folder: Path, classes: Sequence[str], paths: Sequence[str | Path], labels: Sequence[int]
) -> ImageSet:
    files = tuple(os.path.relpath(path, folder) for path in paths)
    stamps = tuple(make_stamp(str(path)) for path in paths)
    names = tuple(file.replace(os.sep, "/") for file in files)
    return ImageSet(f"{name}/{part}", tuple(classes), tuple(labels), names, FileReader(folder, files, stamps))


def _datasets() -> ModuleType:
    return import_extra("torchvision", "a named data set").datasets


def _open(dataset: str, request: Request, **choices: Any) -> Any:
    return _call(getattr(_datasets(), dataset), request.root, download=request.download, **choices)


def _call(function: Callable[..., Any], *args: Any, **choices: Any) -> Any:
    """Call what reads or fetches a set; whatever goes wrong, the set is not there, and the reason is told."""
    try:
        return function(*args, **choices)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingExtraError(
            f"this data set needs the package {package!r}, which is not installed. Install it with: pip install {package}"
        ) from error
    except Exception as error:
        # torchvision's own texts end in advice on its arguments, which are not ours.
        reason = " ".join(str(error).partition("You can use download")[0].split())
        raise MissingSetError(reason.rstrip(".") or type(error).__name__) from error
