"""Images with masks: folders and named sets."""

import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradfilter.data import IGNORE, find_sets, load_data, load_masks
from gradfilter.data.mask_names import ADE20K, CAMVID, CITYSCAPES, VOC
from gradfilter.data.masks import Coding, join_values
from gradfilter.errors import DataError, SettingsError
from mask_folders import SIZE, make_pairs, make_parts, write_image, write_mask

SHARED = Path(os.environ.get("GRADFILTER_SHARED", Path(__file__).resolve().parents[2] / "shared" / "data"))


def labels(images, index=0):
    return sorted(np.unique(np.asarray(images.read_mask(index))).tolist())


def refuse(folder, **options) -> str:
    with pytest.raises(DataError) as error:
        load_masks(str(folder), **options)
    return str(error.value)


def test_parts_are_taken(tmp_path):
    data = load_masks(str(make_parts(tmp_path / "street", train=3, val=2, test=1)))
    assert data.test is not None
    assert (data.train.name, len(data.train), len(data.val), len(data.test)) == ("street/train", 3, 2, 1)
    assert data.train.names[0] == "train/images/000.jpg"
    assert data.train.classes == ("class 0", "class 1", "class 2")
    assert data.train.read(0).size == data.train.read_mask(0).size == SIZE
    assert labels(data.train) == [0, 1, 2]
    assert data.train.counts() == (3, 3, 3)
    assert data.train.pixels() == (120, 120, 120)
    assert not data.made


def test_parts_below_images_and_masks(tmp_path):
    for part, count in (("training", 2), ("validation", 1)):
        for number in range(count):
            write_image(tmp_path / "images" / part / f"{number}.jpg")
            write_mask(tmp_path / "annotations" / part / f"{number}.png", [0, 1])
    data = load_masks(str(tmp_path))
    assert (len(data.train), len(data.val), data.test) == (2, 1, None)


def test_test_is_held_out_where_there_is_no_val(tmp_path):
    data = load_masks(str(make_parts(tmp_path, train=3, test=2)))
    assert (data.val.names[0], data.test) == ("test/images/000.jpg", None)


def test_a_folder_without_parts_is_split_by_the_seed(tmp_path):
    folder = str(make_pairs(tmp_path, 20))
    data, again, other = (load_masks(folder, seed=seed) for seed in (0, 0, 1))
    assert data.made
    assert len(data.val) == 4
    assert sorted(data.train.names + data.val.names) == [f"images/{number:03}.jpg" for number in range(20)]
    assert data.val.names == again.val.names != other.val.names


def test_nested_files_are_paired_and_hidden_ones_left_alone(tmp_path):
    make_parts(tmp_path, train=1, val=1)
    write_image(tmp_path / "train" / "images" / "town" / "000.jpg")
    write_mask(tmp_path / "train" / "masks" / "town" / "000.png", [2])
    (tmp_path / "train" / "images" / ".DS_Store").write_text("")
    data = load_masks(str(tmp_path))
    assert data.train.names == ("train/images/000.jpg", "train/images/town/000.jpg")
    assert labels(data.train, 1) == [2]


def test_linked_folders_are_followed(tmp_path):
    folder = make_parts(tmp_path / "data", train=1, val=1)
    make_pairs(tmp_path / "elsewhere", 2, start=1)
    for kind in ("images", "masks"):
        (folder / "train" / kind / "town").symlink_to(tmp_path / "elsewhere" / kind)
    assert load_masks(str(folder)).train.names == tuple(f"train/images/{name}.jpg" for name in ("000", "town/001", "town/002"))


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    make_parts(tmp_path, train=1, val=1)
    for kind in ("images", "masks"):  # of both kinds alike: no file misses its partner
        (tmp_path / "train" / kind / "town").mkdir()
    scan = os.scandir

    def refuse_town(path):
        if Path(path).name == "town":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse_town)
    assert f"{tmp_path / 'train' / 'images' / 'town'} cannot be listed: Permission denied" in refuse(tmp_path)


def test_classes_by_order(tmp_path):
    make_parts(tmp_path, train=1, val=1)
    (tmp_path / "classes.txt").write_text("road\nvoid\ntree\n")
    data = load_masks(str(tmp_path))
    assert data.train.classes == ("road", "tree")
    assert labels(data.train) == [0, 1, IGNORE]
    assert data.train.pixels() == (40, 40)


def test_classes_by_value(tmp_path):
    for part in ("train", "val"):
        make_pairs(tmp_path / part, 1, (7, 255, 100))
    (tmp_path / "classes.txt").write_text("7 road\n255 old tree\n100 void\n")
    data = load_masks(str(tmp_path))
    assert data.train.classes == ("road", "old tree")
    assert np.asarray(data.train.read_mask(0))[0].tolist() == [0] * 4 + [1] * 4 + [IGNORE] * 4


@pytest.mark.parametrize("text", ["1 a\n1 b\n", "0 a\n256 b\n", "a\n", "a\nvoid\n", "", "a\nb\na\n"])
def test_classes_that_cannot_be(tmp_path, text):
    make_parts(tmp_path, train=1, val=1)
    (tmp_path / "classes.txt").write_text(text)
    assert "classes.txt" in refuse(tmp_path)


def test_255_is_ignored(tmp_path):
    for part in ("train", "val"):
        make_pairs(tmp_path / part, 1, (0, 1, 255))
    data = load_masks(str(tmp_path))
    assert labels(data.train) == [0, 1, IGNORE]
    assert data.train.classes == ("class 0", "class 1")


@pytest.mark.parametrize("mode", ["P", "1", "I;16"])
def test_masks_of_other_kinds(tmp_path, mode):
    make_parts(tmp_path, train=2, val=1)
    path = tmp_path / "train" / "masks" / "001.png"
    mask = Image.new(mode, SIZE, 1)
    if mode == "P":
        mask.putpalette([9, 9, 9, 200, 0, 0])  # labels are indices, not colours
    mask.save(path)
    assert labels(load_masks(str(tmp_path)).train, 1) == [1]


def break_label(folder):
    write_mask(folder / "val" / "masks" / "001.png", [0, 9])
    return "val/masks/001.png", "9 in 60 pixels"


def break_size(folder):
    write_mask(folder / "val" / "masks" / "001.png", [0], (12, 9))
    return "val/masks/001.png", "12x9 pixels, but its image"


def break_mask_missing(folder):
    (folder / "val" / "masks" / "001.png").unlink()
    return "val/images/001.jpg", "has no mask"


def break_image_missing(folder):
    (folder / "val" / "images" / "001.jpg").unlink()
    return "val/masks/001.png", "has no image"


def break_mask(folder):
    path = folder / "val" / "masks" / "001.png"
    path.write_bytes(path.read_bytes()[:45])
    return "val/masks/001.png", "Put these files right"


def break_image(folder):
    (folder / "val" / "images" / "001.jpg").write_text("no image")
    return "val/images/001.jpg", "not an image"


def break_text(folder):
    path = folder / "val" / "images" / "001.txt"
    (folder / "val" / "images" / "001.jpg").rename(path)
    return "val/images/001.txt", "not an image file"


def break_colours(folder):
    write_image(folder / "val" / "masks" / "001.png")
    return "val/masks/001.png", "its pixels are colours (mode RGB)"


def break_jpeg(folder):
    (folder / "val" / "masks" / "001.png").unlink()
    Image.new("L", SIZE).save(folder / "val" / "masks" / "001.jpg")
    return "val/masks/001.jpg", "JPEG changes pixels"


def break_depth(folder):
    Image.new("I;16", SIZE, 300).save(folder / "val" / "masks" / "001.png")
    return "val/masks/001.png", "labels are below 256"


def break_twin(folder):
    write_image(folder / "val" / "images" / "001.png")
    return "val/images/001.png", "have the same name"


BROKEN = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("spoil", BROKEN)
def test_a_file_that_is_wrong_is_named_with_the_reason(tmp_path, spoil):
    name, reason = spoil(make_parts(tmp_path, train=2, val=3))
    text = refuse(tmp_path)
    assert str(tmp_path / name) in text
    assert reason in text
    assert "002" not in text


def test_values_with_gaps_need_names(tmp_path):
    make_pairs(tmp_path, 4, (0, 128))
    text = refuse(tmp_path)
    assert "0 and 128" in text
    assert str(tmp_path / "classes.txt") in text


def test_the_mask_with_a_value_behind_a_gap_is_named(tmp_path):
    make_parts(tmp_path, train=3, val=1)
    write_mask(tmp_path / "train" / "masks" / "001.png", [0, 9])
    text = refuse(tmp_path)
    assert f"0 to 2 and 9 (besides 255, which is ignored) (9 in {tmp_path / 'train' / 'masks' / '001.png'})" in text
    assert "000" not in text


@pytest.mark.parametrize(("part", "what"), [("train", "2 images to train on"), ("val", "1 images held out")])
def test_masks_in_which_nothing_counts(tmp_path, part, what):
    make_parts(tmp_path, train=2, val=1)
    (tmp_path / "classes.txt").write_text("road\ntree\nsky\n")
    for mask in (tmp_path / part / "masks").iterdir():
        write_mask(mask, [IGNORE])
    assert f"{what}, {tmp_path.name}/{part}, no pixel is of a class" in refuse(tmp_path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: (folder / "photos").mkdir(), "has no images with masks"),
        (lambda folder: (folder / "train" / "images").mkdir(parents=True), "has no images/ beside masks/"),
        (lambda folder: make_parts(folder, val=1), "no part to train on"),
        (lambda folder: make_parts(folder, train=1, val=1, valid=1), "both val/ and valid/"),
        (lambda folder: [(folder / name).mkdir() for name in ("images", "masks")], "has no files"),
        (lambda folder: [(folder / name).mkdir() for name in ("images", "masks", "labels")], "both masks/ and labels/"),
        (lambda folder: make_pairs(folder, 1), "a single image"),
    ],
)
def test_folders_that_cannot_be_trained_on(tmp_path, make, reason):
    make(tmp_path)
    text = refuse(tmp_path)
    assert str(tmp_path.name) in text
    assert reason in text


def test_words_that_name_nothing(tmp_path):
    assert "Did you mean 'camvid'?" in refuse("camvit")
    assert "is for --task classify" in refuse("cifar10")
    with pytest.raises(DataError, match="is for --task segment"):
        load_data("camvid")
    with pytest.raises(SettingsError, match="val_share"):
        load_masks(str(tmp_path), val_share=2)


def test_a_file_that_changes_later_is_named(tmp_path):
    data = load_masks(str(make_parts(tmp_path, train=1, val=1)))
    (tmp_path / "train" / "masks" / "000.png").write_text("")
    with pytest.raises(DataError, match=r"train/masks/000\.png: .*\. Put the file right"):
        data.train.read_mask(0)


def test_a_selection_has_its_own_areas_and_can_be_pickled(tmp_path):
    make_parts(tmp_path, train=2, val=1)
    write_mask(tmp_path / "train" / "masks" / "001.png", [1])
    images = load_masks(str(tmp_path)).train
    second = pickle.loads(pickle.dumps(images.select([1])))
    assert (second.names, second.counts()) == (("train/images/001.jpg",), (0, 1, 0))
    assert labels(second) == [1]


def test_the_fingerprint_tells_of_files_names_and_meaning(tmp_path):
    make_parts(tmp_path, train=2, val=1)
    first = load_masks(str(tmp_path)).train
    assert load_masks(str(tmp_path)).train.fingerprint() == first.fingerprint()
    os.utime(tmp_path / "train" / "masks" / "001.png", ns=(0, 0))
    touched = load_masks(str(tmp_path)).train
    assert touched.fingerprint() != first.fingerprint()
    assert touched.fingerprint(contents=False) == first.fingerprint(contents=False)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    assert load_masks(str(tmp_path)).train.fingerprint(contents=False) != first.fingerprint(contents=False)


def test_values_are_written_shortly():
    assert join_values([255, 3, 1, 2, 0]) == "0 to 3 and 255"
    assert join_values([5, 6]) == "5 and 6"
    assert join_values([1, 3, 255]) == "1, 3 and 255"
    assert join_values([]) == "none"


@pytest.mark.parametrize(("values", "ignored"), [((0, 0), ()), ((0, 1), (1,)), ((0, 256), ()), ((0,), ())])
def test_codings_that_cannot_be(values, ignored):
    with pytest.raises(DataError, match="a value of its own"):
        Coding(("a", "b"), values, ignored)


def test_the_sets_have_their_classes():
    sets = find_sets("segment")
    assert {name: info.classes for name, info in sets.items()} == {
        "camvid": 11,
        "voc12aug": 21,
        "cityscapes": 19,
        "ade20k": 150,
    }
    for names in (CAMVID, VOC, CITYSCAPES):
        assert len(set(names)) == len(names)
    assert not set(find_sets("segment")) & set(find_sets())


@pytest.mark.parametrize("name", list(find_sets("segment")))
def test_a_set_that_is_not_there(tmp_path, name):
    text = refuse(name, root=str(tmp_path), download=True)
    assert f"the data set {name!r} was not found" in text
    assert f"Expected: {tmp_path / find_sets('segment')[name].layout}" in text
    assert "--download" not in text


@pytest.mark.parametrize("by_name", [True, False])
def test_camvid(tmp_path, by_name):
    for part in ("train", "val"):
        make_pairs(tmp_path / "camvid" / part, 1, (0, 10, 11))
    data = load_masks("camvid", root=str(tmp_path)) if by_name else load_masks(f"{tmp_path}/camvid/")
    assert data.train.classes == CAMVID
    assert labels(data.train) == [0, 10, IGNORE]


def make_voc(root, names):
    folder = root / "VOCdevkit" / "VOC2012"
    for part, listed in names.items():
        path = folder / "ImageSets" / "Segmentation" / f"{part}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(listed) + "\n")
        for name in listed:
            write_image(folder / "JPEGImages" / f"{name}.jpg")
            write_mask(folder / "SegmentationClass" / f"{name}.png", [0, 20, 255])
    return folder


def test_voc_with_masks_added(tmp_path):
    folder = make_voc(tmp_path, {"train": ["a", "b"], "val": ["c"]})
    for name in "bcde":  # those of b and c are not taken: VOC has its own
        write_image(folder / "JPEGImages" / f"{name}.jpg")
        write_mask(folder / "SegmentationClassAug" / f"{name}.png", [1])
    data = load_masks("voc12aug", root=str(tmp_path))
    assert [Path(name).stem for name in data.train.names] == ["a", "b", "d", "e"]
    assert [labels(data.train, index) for index in range(4)] == [[0, 20, IGNORE]] * 2 + [[1]] * 2
    assert [Path(name).stem for name in data.val.names] == ["c"]
    assert data.train.classes == VOC


def test_voc_with_sbd(tmp_path):
    io = pytest.importorskip("scipy.io")
    make_voc(tmp_path, {"train": ["a"], "val": ["c"]})
    (tmp_path / "sbd" / "cls").mkdir(parents=True)
    for part, names in {"train": "ad", "val": "ce"}.items():
        (tmp_path / "sbd" / f"{part}.txt").write_text("\n".join(names))
        for name in names:
            write_image(tmp_path / "sbd" / "img" / f"{name}.jpg")
            mask = np.full(SIZE[::-1], 3, np.uint8)
            io.savemat(tmp_path / "sbd" / "cls" / f"{name}.mat", {"GTcls": {"Segmentation": mask}})
    data = load_masks("voc12aug", root=str(tmp_path))
    assert [Path(name).stem for name in data.train.names] == ["a", "d", "e"]
    assert labels(data.train, 1) == [3]
    (tmp_path / "sbd" / "cls" / "e.mat").write_text("no mask")
    assert f"{tmp_path / 'sbd' / 'cls' / 'e.mat'}: not a mask of SBD" in refuse("voc12aug", root=str(tmp_path))


@pytest.mark.parametrize(
    ("end", "values", "expected"),
    [("labelIds", [0, 7, 33, 29], [0, 18, IGNORE]), ("labelTrainIds", [0, 18, 255], [0, 18, IGNORE])],
)
def test_cityscapes(tmp_path, end, values, expected):
    folder = tmp_path / "cityscapes"
    for part in ("train", "val"):
        write_image(folder / "leftImg8bit" / part / "ulm" / "ulm_0_leftImg8bit.png")
        write_mask(folder / "gtFine" / part / "ulm" / f"ulm_0_gtFine_{end}.png", values)
        write_mask(folder / "gtFine" / part / "ulm" / "ulm_0_gtFine_instanceIds.png", [200])
    data = load_masks("cityscapes", root=str(tmp_path))
    assert labels(data.train) == expected
    assert data.val.names == ("leftImg8bit/val/ulm/ulm_0_leftImg8bit.png",)
    assert data.train.classes == CITYSCAPES


def test_cityscapes_without_masks(tmp_path):
    for part in ("train", "val"):
        write_image(tmp_path / "cityscapes" / "leftImg8bit" / part / "ulm" / "ulm_0_leftImg8bit.png")
        (tmp_path / "cityscapes" / "gtFine" / part).mkdir(parents=True)
    assert "labelIds.png. Unpack gtFine" in refuse("cityscapes", root=str(tmp_path))


def test_ade20k(tmp_path):
    folder = tmp_path / "ADEChallengeData2016"
    for part in ("training", "validation"):
        write_image(folder / "images" / part / "ADE_1.jpg")
        write_mask(folder / "annotations" / part / "ADE_1.png", [0, 1, 150])
    data = load_masks("ade20k", root=str(tmp_path))
    assert labels(data.train) == [0, 149, IGNORE]
    assert data.train.classes == ADE20K
    assert (ADE20K[0], ADE20K[12], ADE20K[149]) == ("wall", "person", "flag")


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "camvid.tar.gz").exists(), reason="the shared data is absent")
def test_the_real_camvid(tmp_path):
    with tarfile.open(SHARED / "camvid.tar.gz") as archive:
        archive.extractall(tmp_path / "camvid", filter="data")
    data = load_masks("camvid", root=str(tmp_path))
    assert data.test is not None
    found = {"train": len(data.train), "val": len(data.val), "test": len(data.test)}
    assert found == find_sets("segment")["camvid"].counts
    assert min(data.train.counts()) > 0
