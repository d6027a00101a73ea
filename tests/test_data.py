"""Folders of images: what is found, what is skipped, what is refused, and how they are split."""

import contextlib
import os
import re
import subprocess
import sys
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_folders import DAMAGED, FOLDER, IMAGE, TEXT, make_classes, make_files, make_image
from gradfilter.data import load_data
from gradfilter.data.split import split_labels
from gradfilter.errors import DataError, SettingsError

TWO = make_classes(cat=5, dog=5)


def load(root, files=None, **options):
    return load_data(str(make_files(root, files or {})), **options)


# What is found


def test_a_folder_of_classes_is_split(tmp_path):
    data = load(tmp_path, make_classes(cat=10, dog=20), val_share=0.3)
    assert data.train.classes == data.val.classes == ("cat", "dog")
    assert (data.train.counts(), data.val.counts(), data.test) == ((7, 14), (3, 6), None)
    assert sorted(data.train.names + data.val.names) == sorted(make_classes(cat=10, dog=20))
    assert data.skipped == ()


@pytest.mark.parametrize(
    ("parts", "val", "test"),
    [
        (("train", "val"), "val", None),
        (("train", "valid"), "valid", None),
        (("Train", "Validation", "Test"), "Validation", "Test"),
        (("train", "val", "test"), "val", "test"),
        (("train", "test"), "test", None),
    ],
)
def test_given_parts_are_taken(tmp_path, parts, val, test):
    files = {f"{part}/{name}": IMAGE for part in parts for name in ("cat/1.png", "dog/1.jpg")}
    data = load(tmp_path, files)
    assert data.train.names == (f"{parts[0]}/cat/1.png", f"{parts[0]}/dog/1.jpg")
    assert data.val.names == (f"{val}/cat/1.png", f"{val}/dog/1.jpg")
    assert (data.test.names if data.test else None) == (test and (f"{test}/cat/1.png", f"{test}/dog/1.jpg"))


def test_a_train_folder_alone_is_split(tmp_path):
    data = load(tmp_path, make_classes("train/", cat=4, dog=4))
    assert (data.train.counts(), data.val.counts()) == ((3, 3), (1, 1))


def test_a_class_may_be_called_train(tmp_path):
    assert load(tmp_path, make_classes(train=4, plane=4)).train.classes == ("plane", "train")


def test_nested_files_count_and_hidden_ones_do_not(tmp_path):
    nested = {"cat/a/b/1.PNG": IMAGE, "cat/.hidden.png": DAMAGED, "cat/.cache/1.png": IMAGE, ".git/1.png": IMAGE}
    data = load(tmp_path, nested | make_classes(dog=2))
    assert sorted(data.train.names + data.val.names) == ["cat/a/b/1.PNG", "dog/000.png", "dog/001.png"]
    assert data.skipped == ()


def test_linked_classes_are_followed(tmp_path):
    make_files(tmp_path / "elsewhere", make_classes(cats=3))
    make_files(tmp_path / "data", make_classes(dog=3))
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "elsewhere" / "cats")
    assert load(tmp_path / "data").train.classes == ("cat", "dog")


def test_a_relative_folder_has_a_name(tmp_path, monkeypatch):
    make_files(tmp_path / "photos", TWO)
    monkeypatch.chdir(tmp_path / "photos")
    data = load_data(".")
    assert data.train.name == "photos"
    assert data.train.fingerprint() == load_data(str(tmp_path / "photos")).train.fingerprint()


# What is skipped

SKIPPED = {
    "damaged image": ({"cat/x.png": DAMAGED}, r"cat/x\.png: .+"),
    "text that is called an image": ({"cat/x.jpg": TEXT}, r"cat/x\.jpg: not an image, or damaged at its beginning"),
    "no image": ({"cat/x.txt": TEXT}, r"cat/x\.txt: not an image file \(extension '\.txt'\)"),
    "no extension": ({"cat/x": TEXT}, r"cat/x: not an image file \(no extension\)"),
    "format that needs another program": ({"cat/x.eps": TEXT}, r"cat/x\.eps: not an image file \(extension '\.eps'\)"),
    "loose image": ({"x.png": IMAGE}, r"x\.png: not in a class folder"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped_files_are_named_and_stop_the_strict(tmp_path, case):
    files, line = SKIPPED[case]
    data = load(tmp_path, TWO | files)
    assert len(data.train) + len(data.val) == len(TWO)
    (skipped,) = data.skipped
    assert re.fullmatch(f"{re.escape(str(tmp_path))}/{line}", skipped)
    with pytest.raises(DataError, match=rf"1 file cannot be used: .*{line}\. Mend or remove .* without strict"):
        load(tmp_path, strict=True)


def test_what_lies_beside_the_parts_is_named(tmp_path):
    files = make_classes("train/", cat=1, dog=1) | make_classes("test/", cat=1, dog=1)
    data = load(tmp_path, files | {"notes.txt": TEXT, "extra/1.png": IMAGE})
    assert data.skipped == (f"{tmp_path}/extra: not in train, test", f"{tmp_path}/notes.txt: not in train, test")


def test_broken_links_and_pipes_are_skipped(tmp_path):
    make_files(tmp_path, TWO)
    (tmp_path / "cat" / "link.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    lines = load(tmp_path).skipped
    assert lines == (
        f"{tmp_path}/cat/link.png: No such file or directory",
        f"{tmp_path}/cat/pipe.png: not a regular file",
    )


@pytest.mark.parametrize("side", [15, 30])  # Pillow warns of the one and raises on the other
def test_decompression_bombs_are_skipped(tmp_path, monkeypatch, side):
    make_files(tmp_path, TWO)
    make_image(0, (side, side)).save(tmp_path / "dog" / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        skipped = load(tmp_path).skipped
    assert said == []
    assert skipped == (f"{tmp_path}/dog/bomb.png: too large to be decoded safely (over 150 pixels)",)


def test_many_skipped_files_are_counted(tmp_path):
    with pytest.raises(DataError, match=r"30 files cannot be used: .*cat/b19\.png: [^;]*; and 10 more\. Mend"):
        load(tmp_path, TWO | {f"cat/b{number:02}.png": DAMAGED for number in range(30)}, strict=True)


def test_large_files_are_checked_in_threads_and_warnings_stay_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr("gradfilter.data.check._SMALL_FILE", 0)
    monkeypatch.setattr("gradfilter.data.check._CHUNK", 2)
    before = list(warnings.filters)
    data = load(tmp_path, TWO | {"cat/x.png": DAMAGED})
    assert (len(data.train) + len(data.val), len(data.skipped)) == (10, 1)
    assert warnings.filters == before


# What is refused

PARTS = make_classes("train/", cat=2, dog=2)

REFUSED = {
    "nothing": ({}, r"has no images in class folders\. Expected: .*<class>/<image>"),
    "loose files only": ({"1.png": IMAGE, "2.png": IMAGE}, r"no images in class folders \(files in no class folder: 2\)"),
    "empty class": (TWO | {"owl": FOLDER}, r"there are no files in class 'owl'\. Add images"),
    "two empty classes": (TWO | {"owl": FOLDER, "elk/deep": FOLDER}, r"there are no files in classes 'elk', 'owl'"),
    "single class": (make_classes(cat=3), r"has a single class, 'cat'\. Give two classes or more"),
    "class of damaged images": (
        TWO | {"owl/1.png": DAMAGED, "owl/2.txt": TEXT},
        r"no file can be read in class 'owl': .*owl/1\.png: .*owl/2\.txt: not an image file .*Mend the files",
    ),
    "nothing can be read": ({"cat/1.png": DAMAGED, "dog/1.png": TEXT}, r"no file can be read in classes 'cat', 'dog'"),
    "class missing in val": (
        PARTS | make_classes("val/", cat=1, owl=1),
        r"train and val have different classes \(only in train: dog; only in val: owl\)\. Give both the same classes",
    ),
    "class more in test": (
        PARTS | make_classes("val/", cat=1, dog=1) | make_classes("test/", cat=1, dog=1, owl=1),
        r"train and test have different classes \(only in test: owl\)",
    ),
    "empty class in val": (
        PARTS | make_classes("val/", cat=1) | {"val/dog": FOLDER},
        r"val: there are no files in class 'dog'",
    ),
    "no train": (make_classes("val/", cat=1, dog=1), r"has val/ but no train/\. Add train/<class>/"),
    "two vals": (PARTS | make_classes("val/", cat=1, dog=1) | {"valid": FOLDER}, r"has both val/ and valid/\. Keep one"),
    "no class of two": (make_classes(cat=1, dog=1), r"no class has two images, so none can be held out\. Add images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_folders_are_refused(tmp_path, case):
    files, message = REFUSED[case]
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, files)
    assert str(tmp_path) in str(caught.value) or tmp_path.name in str(caught.value)


@pytest.mark.parametrize("name", ["", "photoz", "no/such/folder"])
def test_a_folder_that_is_not_there(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=rf"data '{name}' is neither a folder nor a known set\. Give a folder .* or one of: cifar10,"
    ):
        load_data(name)


def test_a_name_that_is_nearly_known():
    with pytest.raises(DataError, match=r"data 'cifar-10' is neither .* Did you mean 'cifar10'\?"):
        load_data("cifar-10")


def test_a_file_for_a_folder(tmp_path):
    make_files(tmp_path, {"1.png": IMAGE})
    with pytest.raises(DataError, match=r"1\.png is a file, where a folder of images is expected\. Give the folder"):
        load_data(str(tmp_path / "1.png"))


@pytest.mark.parametrize("unreadable", ["", "cat"])
def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch, unreadable):
    make_files(tmp_path, TWO)
    scandir = os.scandir

    def refuse(path):
        if str(path) == str(tmp_path / unreadable):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # a test may run as root, whom no mode keeps out
    with pytest.raises(DataError, match=rf"{tmp_path / unreadable} cannot be listed: Permission denied\. Make it readable"):
        load_data(str(tmp_path))


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_links_that_lead_back(tmp_path, target):
    make_files(tmp_path / "data", TWO | {"cat/deep/1.png": IMAGE})
    (tmp_path / "data" / "cat" / "deep" / "loop").symlink_to(target)
    with pytest.raises(
        DataError, match=r"cat/deep/loop is a link to a folder that it lies in, so it never ends\. Remove the link"
    ):
        load(tmp_path / "data")


def test_a_link_to_itself(tmp_path):
    make_files(tmp_path, TWO)
    (tmp_path / "owl").symlink_to("owl")
    with pytest.raises(DataError, match=r"owl cannot be followed: .*\. Remove the link"):
        load(tmp_path)


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_is_a_share(tmp_path, share):
    with pytest.raises(SettingsError, match=r"val_share is .* between 0 and 1"):
        load(tmp_path, TWO, val_share=share)


# Splits


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_a_split_is_whole_stratified_and_seeded(labels, share, seed):
    train, val = split_labels(labels, share, seed)
    assert sorted(train + val) == list(range(len(labels)))
    assert list(train) == sorted(train)
    assert list(val) == sorted(val)
    for label in set(labels):
        count, held_out = labels.count(label), sum(labels[index] == label for index in val)
        assert abs(held_out - share * count) <= 1
        assert (1 <= held_out < count) if count > 1 else held_out == 0
    assert split_labels(labels, share, seed) == (train, val)


def test_other_seeds_hold_out_other_images():
    labels = [0, 1] * 50
    assert len({split_labels(labels, 0.2, seed)[1] for seed in range(20)}) == 20


def test_more_images_of_a_later_class_leave_a_split_as_it_was():
    _, few = split_labels([0] * 20 + [1] * 20, 0.25, 3)
    _, more = split_labels([0] * 20 + [1] * 40, 0.25, 3)
    assert [index for index in few if index < 20] == [index for index in more if index < 20]


def test_how_the_file_system_lists_files_does_not_matter(tmp_path, monkeypatch):
    expected = load(tmp_path, make_classes(cat=9, dog=9) | {"cat/deep/1.png": IMAGE})
    scandir = os.scandir
    for backwards in (False, True):

        def listing(path, backwards=backwards):
            return contextlib.nullcontext(sorted(scandir(path), key=lambda entry: entry.name, reverse=backwards))

        monkeypatch.setattr(os, "scandir", listing)
        found = load_data(str(tmp_path))
        assert (found.train.names, found.val.names) == (expected.train.names, expected.val.names)
        assert found.train.fingerprint() == expected.train.fingerprint()


def test_nothing_is_imported_before_it_is_needed():
    code = "import sys, gradfilter.data; print({'PIL', 'torchvision', 'sklearn', 'timm'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
