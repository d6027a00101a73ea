"""Data sets that have a name: read from small copies of their layouts."""

import os
import pickle
import struct
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from data_folders import DAMAGED, IMAGE, TEXT, colour, make_classes, make_files
from gradfilter.data import find_sets, load_data
from gradfilter.data.sets import find_root, register
from gradfilter.errors import DataError, MissingExtraError, SettingsError
from gradfilter.models.extras import import_extra
from gradfilter.models.torchvision_ops import declare_torchvision_ops

SHARED = Path(os.environ.get("GRADFILTER_SHARED", Path(__file__).resolve().parents[2] / "shared" / "data"))
declare_torchvision_ops()  # tests patch torchvision, and so import it

FETCHED = [name for name, info in find_sets().items() if info.source != "scikit-learn, embedded"]


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


def make_mnist(folder):
    for part, count in (("train", 6), ("t10k", 4)):
        images = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((1, 28, 28), np.uint8)
        write_idx(folder / "raw" / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / "raw" / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8))


def make_cifar(root, monkeypatch, *, folder, files, key, classes):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    (root / folder).mkdir()
    for number, name in enumerate(files):
        pixels = np.full((2, 3072), number, np.uint8)
        (root / folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 1], "fine_labels": [0, 1]}))
    (root / folder / ("batches.meta" if key == "label_names" else "meta")).write_bytes(pickle.dumps({key: classes}))


def make_pets(root):
    ids = {"trainval": ["Abyssinian_1", "american_bulldog_1"], "test": ["Abyssinian_2", "american_bulldog_2"]}
    make_files(root / "oxford-iiit-pet" / "images", {f"{name}.jpg": IMAGE for names in ids.values() for name in names})
    folder = root / "oxford-iiit-pet" / "annotations"
    folder.mkdir()
    for part, names in ids.items():
        lines = [f"{name} {label} 1 1\n" for label, name in enumerate(names, start=1)]
        (folder / f"{part}.txt").write_text("".join(lines))


def make_cub(root):
    files = ["001.Black_footed_Albatross/a.jpg", "001.Black_footed_Albatross/b.jpg", "002.Laysan_Albatross/c.jpg"]
    files += ["002.Laysan_Albatross/d.jpg"]
    make_files(root / "CUB_200_2011" / "images", dict.fromkeys(files, IMAGE))
    tables = {
        "images": files,
        "classes": ["001.Black_footed_Albatross", "002.Laysan_Albatross"],
        "image_class_labels": [1, 1, 2, 2],
        "train_test_split": [1, 0, 0, 1],
    }
    for name, values in tables.items():
        lines = [f"{number} {value}\n" for number, value in enumerate(values, start=1)]
        (root / "CUB_200_2011" / f"{name}.txt").write_text("".join(lines))


def load(name, root, **options):
    return load_data(name, root=str(root), **options)


# What there is


def test_the_list_says_what_there_is():
    sets = find_sets()
    assert set(sets) == set("cifar10 cifar100 mnist fashion-mnist imagenet pets flowers102 cub200 digits".split())
    assert all(info.name == name and info.description and "\n" not in info.description for name, info in sets.items())
    assert (sets["pets"].classes, dict(sets["pets"].counts)) == (37, {"train": 3680, "test": 3669})


def test_a_name_is_taken_once():
    with pytest.raises(SettingsError, match=r"there is a data set 'digits' already: .* Give the new one another name"):
        register("digits", "mine", classes=2, counts={})(find_sets()["digits"].load)


def test_where_sets_are_looked_for(monkeypatch):
    monkeypatch.delenv("GRADFILTER_DATA", raising=False)
    assert find_root() == Path.home() / ".cache" / "gradfilter" / "data"
    monkeypatch.setenv("GRADFILTER_DATA", "/somewhere")
    assert find_root() == Path("/somewhere")
    assert find_root("/given") == Path("/given")


# Each of them


def test_digits_need_no_files(tmp_path):
    data = load("digits", tmp_path / "nowhere", val_share=0.25, seed=3)
    assert (len(data.train) + len(data.val), data.test, data.train.flips) == (1797, None, False)
    assert data.train.classes == tuple("0123456789")
    images = np.stack([np.asarray(data.val.read(index)) for index in range(len(data.val))])
    assert (images.shape[1:], images.dtype, images.min(), images.max()) == ((8, 8, 3), np.uint8, 0, 255)
    assert load("digits", tmp_path, val_share=0.25, seed=3).val.names == data.val.names
    assert load("digits", tmp_path, val_share=0.25, seed=4).val.names != data.val.names
    whole = np.array(data.train.counts()) + np.array(data.val.counts())
    assert np.abs(np.array(data.val.counts()) - whole / 4).max() <= 0.5


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_and_its_like(tmp_path, name, folder):
    make_mnist(tmp_path / folder)
    data = load(name, tmp_path)
    assert (data.train.labels, data.val.labels, data.test) == ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3), None)
    assert (data.train.names[5], data.val.name, len(data.train.classes)) == (f"{name}/train/5", f"{name}/test", 10)
    assert colour(data.train.read(5)) == (5, 5, 5)
    assert data.train.flips == (name == "fashion-mnist")
    assert data.train.classes[:2] == (("0", "1") if name == "mnist" else ("T-shirt/top", "Trouser"))


def test_cifar10(tmp_path, monkeypatch):
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    make_cifar(
        tmp_path,
        monkeypatch,
        folder="cifar-10-batches-py",
        files=[*batches, "test_batch"],
        key="label_names",
        classes=["airplane", "automobile"],
    )
    data = load("cifar10", tmp_path)
    assert (data.train.classes, data.train.labels, len(data.val)) == (("airplane", "automobile"), (0, 1) * 5, 2)
    assert (colour(data.train.read(9)), colour(data.val.read(0))) == ((4, 4, 4), (5, 5, 5))


def test_cifar100(tmp_path, monkeypatch):
    make_cifar(
        tmp_path,
        monkeypatch,
        folder="cifar-100-python",
        files=["train", "test"],
        key="fine_label_names",
        classes=["apple", "aquarium_fish"],
    )
    assert load("cifar100", tmp_path).train.classes == ("apple", "aquarium fish")


def test_pets(tmp_path):
    make_pets(tmp_path)
    data = load("pets", tmp_path)
    assert data.train.classes == data.val.classes == ("Abyssinian", "American Bulldog")
    assert (data.train.names, data.train.labels) == (("images/Abyssinian_1.jpg", "images/american_bulldog_1.jpg"), (0, 1))
    assert data.val.names == ("images/Abyssinian_2.jpg", "images/american_bulldog_2.jpg")
    assert data.train.read(1).size == (12, 10)


def test_flowers(tmp_path, monkeypatch):
    io = import_extra("scipy.io", "this test")
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda *_: True)
    folder = tmp_path / "flowers-102"
    labels = np.array([*range(1, 103), 1, 2])
    make_files(folder / "jpg", {f"image_{number:05}.jpg": IMAGE for number in range(1, 105)})
    io.savemat(folder / "imagelabels.mat", {"labels": labels})
    io.savemat(folder / "setid.mat", {"trnid": np.arange(1, 103), "valid": np.array([103, 104]), "tstid": np.array([3, 4])})
    data = load("flowers102", tmp_path)
    assert data.test is not None
    assert (len(data.train), data.val.labels, data.test.labels) == (102, (0, 1), (2, 3))
    assert data.train.classes[0] == "pink primrose"
    assert data.val.names == ("jpg/image_00103.jpg", "jpg/image_00104.jpg")


def test_cub(tmp_path):
    make_cub(tmp_path)
    data = load("cub200", tmp_path)
    assert data.train.classes == ("Black footed Albatross", "Laysan Albatross")
    assert data.train.names == ("images/001.Black_footed_Albatross/a.jpg", "images/002.Laysan_Albatross/d.jpg")
    assert (data.train.labels, data.val.labels) == ((0, 1), (0, 1))


def test_imagenet_is_not_decoded_beforehand(tmp_path):
    parts = {f"{part}/{wnid}/1.JPEG": TEXT for part in ("train", "val") for wnid in ("n01440764", "n01443537")}
    make_files(tmp_path / "imagenet", parts)
    data = load("imagenet", tmp_path)
    assert (data.train.classes, data.train.labels) == (("n01440764", "n01443537"), (0, 1))
    assert data.val.names == ("val/n01440764/1.JPEG", "val/n01443537/1.JPEG")
    with pytest.raises(DataError, match=r"1\.JPEG: not an image, or damaged"):
        data.train.read(0)


def test_all_of_imagenet_has_names(tmp_path):
    wnids = [f"n{number:08}" for number in range(1000)]
    make_files(tmp_path / "imagenet", {f"{part}/{wnid}/1.JPEG": TEXT for part in ("train", "val") for wnid in wnids})
    assert load("imagenet", tmp_path).train.classes[:2] == ("tench", "goldfish")


# What is not there


@pytest.mark.parametrize("name", FETCHED)
def test_a_set_that_is_not_there(tmp_path, name):
    root = tmp_path / "nowhere"
    with pytest.raises(DataError) as caught:
        load(name, root)
    text = str(caught.value)
    assert f"the data set '{name}' was not found" in text
    assert f"Expected: {root / find_sets()[name].layout}" in text
    assert f"or as {root / name}; or take --data digits" in text
    assert ("--download" in text) == (name != "imagenet")
    assert "download=" not in text
    assert not root.exists()


@pytest.mark.parametrize("name", [name for name in FETCHED if name != "imagenet"])
def test_a_set_that_cannot_be_fetched(tmp_path, monkeypatch, name):
    def fail(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    with pytest.raises(DataError) as caught:
        load(name, tmp_path, download=True)
    text = str(caught.value)
    assert f"the data set '{name}' could not be fetched; is there a network? (" in text
    assert "no route to host" in text
    assert "\n" not in text
    assert "--root or GRADFILTER_DATA; give its images as a folder" in text


def test_a_set_that_is_there_is_not_fetched(tmp_path, monkeypatch):
    make_pets(tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("fetched"))
    assert len(load("pets", tmp_path, download=True).train) == 2


def test_an_image_folder_of_the_name_will_do(tmp_path, monkeypatch):
    make_files(tmp_path / "cifar10", make_classes("train/", cat=2, dog=2) | make_classes("test/", cat=1, dog=1))
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("fetched"))
    data = load("cifar10", tmp_path, download=True)
    assert (data.train.counts(), data.val.counts(), data.train.name) == ((2, 2), (1, 1), "cifar10/train")


def test_a_folder_beside_the_name_is_said(tmp_path, monkeypatch, caplog):
    make_files(tmp_path / "digits", make_classes(cat=2, dog=2))
    monkeypatch.chdir(tmp_path)
    assert len(load_data("digits").train.classes) == 10
    assert "not as the folder of that name; for that, say './digits'" in caplog.text
    assert load_data("./digits").train.classes == ("cat", "dog")


def test_files_that_cannot_be_read_are_skipped(tmp_path):
    make_pets(tmp_path)
    make_files(tmp_path / "oxford-iiit-pet" / "images", {"Abyssinian_2.jpg": DAMAGED})
    data = load("pets", tmp_path)
    assert (len(data.val), len(data.skipped)) == (1, 1)
    assert "Abyssinian_2.jpg: " in data.skipped[0]
    with pytest.raises(DataError, match=r"pets: 1 file cannot be used: .*Abyssinian_2\.jpg"):
        load("pets", tmp_path, strict=True)


def test_a_class_that_is_lost_is_named(tmp_path):
    make_pets(tmp_path)
    (tmp_path / "oxford-iiit-pet" / "images" / "Abyssinian_1.jpg").unlink()
    with pytest.raises(DataError, match=r"'pets' was not found \(no training image can be read of Abyssinian\)"):
        load("pets", tmp_path)


@pytest.mark.parametrize("table", ["images", "image_class_labels", "train_test_split", "classes"])
def test_tables_that_do_not_fit(tmp_path, table):
    make_cub(tmp_path)
    path = tmp_path / "CUB_200_2011" / f"{table}.txt"
    path.write_text(path.read_text().rpartition("\n")[0].rpartition("\n")[0])
    with pytest.raises(DataError, match=r"'cub200' was not found \(the tables in .*CUB_200_2011 do not fit each other\)"):
        load("cub200", tmp_path)


def test_parts_of_imagenet_with_other_classes(tmp_path):
    make_files(tmp_path / "imagenet", make_classes("train/", n1=1, n2=1) | make_classes("val/", n1=1, n3=1))
    with pytest.raises(DataError, match=r"train/ and val/ in .*imagenet have different classes\. Give both the same"):
        load("imagenet", tmp_path)


def test_digits_without_their_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"the data set 'digits' needs .* Install it with: pip install scikit-learn"):
        load("digits", tmp_path)


def test_flowers_without_scipy(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda *_: True)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    (tmp_path / "flowers-102" / "jpg").mkdir(parents=True)
    with pytest.raises(
        MissingExtraError, match=r"needs the package 'scipy', which is not installed\. Install it with: pip install scipy$"
    ):
        load("flowers102", tmp_path)


@pytest.mark.shared
def test_the_real_pets(tmp_path):
    archive = SHARED / "pets.tar.gz"
    if not archive.exists():
        pytest.skip(f"shared data is absent: {archive} (set GRADFILTER_SHARED)")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    data = load("pets", tmp_path, strict=True)
    assert {"train": len(data.train), "test": len(data.val)} == find_sets()["pets"].counts
    assert len(data.train.classes) == find_sets()["pets"].classes
    assert min(data.train.counts()) > 90
