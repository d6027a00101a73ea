"""The data sets with masks that have a name, in the layouts that they come in."""

from pathlib import Path

from gradfilter.data.images import Data
from gradfilter.data.mask_folder import Pairs, load_mask_folder, make_mask_data, pair_files
from gradfilter.data.mask_names import ADE20K, CAMVID, CITYSCAPES, VOC
from gradfilter.data.masks import IGNORE, Coding, MaskSet
from gradfilter.data.sets import MissingSetError, Request, register
from gradfilter.errors import DataError

CODINGS = {
    "camvid": Coding.make_plain(CAMVID, ignored=(len(CAMVID), IGNORE)),
    "voc12aug": Coding.make_plain(VOC),
    # 0 is what belongs to none of the 150.
    "ade20k": Coding(ADE20K, tuple(range(1, len(ADE20K) + 1)), (0, IGNORE)),
}
"""What the values in masks mean, by set; a folder of the set's name is read in the same way."""

_CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_CITYSCAPES = {
    "_gtFine_labelTrainIds": Coding.make_plain(CITYSCAPES),
    "_gtFine_labelIds": Coding(CITYSCAPES, _CITYSCAPES_IDS, tuple(sorted({*range(34), IGNORE} - set(_CITYSCAPES_IDS)))),
}
"""Names of mask files end so; the first kind that is there is taken."""


@register(
    "camvid",
    "CamVid: street scenes from a car, 480x360",
    classes=len(CAMVID),
    counts={"train": 367, "val": 101, "test": 233},
    source="by hand",
    layout="camvid, with <part>/images and <part>/masks",
    task="segment",
)
def _load_camvid(request: Request) -> Data[MaskSet]:
    folder = request.root / "camvid"
    _require(folder / "train")
    return load_mask_folder(folder, val_share=request.val_share, seed=request.seed, coding=CODINGS["camvid"])


@register(
    "voc12aug",
    "Pascal VOC 2012 with the masks of SBD added: photos of 20 kinds of things",
    classes=len(VOC),
    counts={"train": 10582, "val": 1449},
    source="by hand",
    layout="VOCdevkit/VOC2012, with SegmentationClassAug/ in it or SBD's img/ and cls/ in sbd/ beside VOCdevkit",
    task="segment",
)
def _load_voc(request: Request) -> Data[MaskSet]:
    folder = request.root / "VOCdevkit" / "VOC2012"
    lists = {part: _read_names(folder / "ImageSets" / "Segmentation" / f"{part}.txt") for part in ("train", "val")}
    pairs = {part: [_find_voc(folder, name) for name in names] for part, names in lists.items()}
    held_out = {*lists["train"], *lists["val"]}  # VOC's own masks are the better ones where there are both
    pairs["train"] += _find_augmented(folder, request.root / "sbd", held_out)
    return make_mask_data("voc12aug", request.root, pairs, CODINGS["voc12aug"])


def _find_voc(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / "JPEGImages" / f"{name}.jpg", folder / "SegmentationClass" / f"{name}.png"


def _find_augmented(folder: Path, sbd: Path, known: set[str]) -> Pairs:
    """Find the images that SBD adds: their masks as PNG beside VOC's, or as SBD has them."""
    extra = folder / "SegmentationClassAug"
    if extra.is_dir():
        names = sorted({path.stem for path in extra.glob("*.png")} - known)
        return [(folder / "JPEGImages" / f"{name}.jpg", extra / f"{name}.png") for name in names]
    names = sorted({name for part in ("train", "val") for name in _read_names(sbd / f"{part}.txt")} - known)
    return [(sbd / "img" / f"{name}.jpg", sbd / "cls" / f"{name}.mat") for name in names]


@register(
    "cityscapes",
    "Cityscapes: street scenes of 50 cities, 2048x1024",
    classes=len(CITYSCAPES),
    counts={"train": 2975, "val": 500},
    source="cityscapes-dataset.com, by hand",
    layout="cityscapes, with leftImg8bit/ and gtFine/",
    task="segment",
)
def _load_cityscapes(request: Request) -> Data[MaskSet]:
    folder = request.root / "cityscapes"
    parts = {part: (folder / "leftImg8bit" / part, folder / "gtFine" / part) for part in ("train", "val")}
    for images, masks in parts.values():
        _require(images, masks)
    train = parts["train"][1]
    end = next((end for end in _CITYSCAPES if any(train.glob(f"*/*{end}.png"))), None)
    if end is None:
        raise DataError(
            f"{train} has no masks: no file */*{' or */*'.join(f'{end}.png' for end in _CITYSCAPES)}. Unpack gtFine."
        )
    pairs = {part: pair_files(images, masks, "_leftImg8bit", end) for part, (images, masks) in parts.items()}
    return make_mask_data("cityscapes", folder, pairs, _CITYSCAPES[end])


@register(
    "ade20k",
    "ADE20K (SceneParse150): scenes with 150 kinds of things",
    classes=len(ADE20K),
    counts={"train": 20210, "val": 2000},
    source="data.csail.mit.edu/places/ADEchallenge, by hand",
    layout="ADEChallengeData2016, with images/ and annotations/",
    task="segment",
)
def _load_ade20k(request: Request) -> Data[MaskSet]:
    folder = request.root / "ADEChallengeData2016"
    _require(folder / "images", folder / "annotations")
    return load_mask_folder(folder, val_share=request.val_share, seed=request.seed, coding=CODINGS["ade20k"])


def _require(*folders: Path) -> None:
    for folder in folders:
        if not folder.is_dir():
            raise MissingSetError(f"there is no folder {folder}")


def _read_names(path: Path) -> list[str]:
    """Read a list of images, a name on each line."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise MissingSetError(f"{path} cannot be read: {error.strerror}") from error
