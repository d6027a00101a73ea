"""Images: how files are read, and what a set of them is."""

import contextlib
import os
import pickle
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_folders import Colours, colour, make_classes, make_files, make_image, make_set
from gradfilter.data import ImageSet, load_data, read_rgb
from gradfilter.data.images import ArrayReader
from gradfilter.errors import DataError

TWO = make_classes(cat=5, dog=5)


# How images are read


def save(path, image, **options):
    image.save(path, **options)
    return read_rgb(path)


def test_grey_16_bit_and_black_and_white(tmp_path):
    assert colour(save(tmp_path / "1.png", Image.new("L", (4, 4), 77))) == (77, 77, 77)
    assert colour(save(tmp_path / "2.png", Image.new("1", (4, 4), 1))) == (255, 255, 255)
    deep = Image.fromarray(np.full((4, 4), 200 * 256 + 17, dtype=np.uint16))
    assert colour(save(tmp_path / "3.png", deep)) == (200, 200, 200)
    assert colour(save(tmp_path / "4.tif", deep)) == (200, 200, 200)


def test_palettes_and_cmyk(tmp_path):
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    assert colour(save(tmp_path / "1.gif", red)) == (255, 0, 0)
    assert colour(save(tmp_path / "2.png", red.convert("P"))) == (255, 0, 0)
    assert np.allclose(colour(save(tmp_path / "3.jpg", red.convert("CMYK"))), (255, 0, 0), atol=6)


def test_transparency_becomes_white(tmp_path):
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert colour(save(tmp_path / "1.png", clear)) == (255, 255, 255)
    assert colour(save(tmp_path / "2.png", half)) == (127, 127, 127)
    assert colour(save(tmp_path / "3.png", Image.new("LA", (4, 4), (0, 0)))) == (255, 255, 255)
    assert colour(save(tmp_path / "4.png", Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3))) == (255, 255, 255)
    assert colour(save(tmp_path / "5.gif", Image.new("P", (4, 4), 3), transparency=3)) == (255, 255, 255)


@pytest.mark.parametrize("pixels", [np.full((4, 4), 0.5, np.float32), np.full((4, 4), 1 << 20, np.int32)])
def test_pixels_of_unknown_range_are_refused(tmp_path, pixels):
    with pytest.raises(DataError, match=r"its pixels are .* of unknown range; save it with 8 or 16 bits"):
        save(tmp_path / "1.tif", Image.fromarray(pixels))


UPRIGHT = {
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
    8: np.rot90,
}
"""What the Exif standard says is to be done to the rows and columns that are stored."""


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_images_are_turned_upright(tmp_path, orientation):
    stored = np.arange(3 * 5 * 3, dtype=np.uint8).reshape(3, 5, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = save(tmp_path / "1.png", Image.fromarray(stored), exif=exif)
    assert np.array_equal(np.asarray(image), UPRIGHT[orientation](stored))


def test_damaged_exif_does_not_spoil_an_image(tmp_path):
    assert colour(save(tmp_path / "1.png", make_image(5), exif=b"Exif\0\0II*\0\xff\xff\xff\xff")) == (5, 0, 99)


@settings(deadline=None)
@given(st.data())
def test_damage_anywhere_is_reported_as_such(tmp_path_factory, data):
    """Whatever Pillow makes of damaged bytes, there comes an image or a reason."""
    kind = data.draw(st.sampled_from(["png", "jpg", "gif", "tif", "webp", "bmp", "ppm", "tga"]))
    path = tmp_path_factory.mktemp("damage") / f"1.{kind}"
    make_image(3).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(DataError):
            assert read_rgb(path).mode == "RGB"


def test_a_file_that_goes_away_is_named(tmp_path):
    data = load_data(str(make_files(tmp_path, TWO)))
    (tmp_path / data.train.names[0]).unlink()
    with pytest.raises(
        DataError, match=r"cat/\d+\.png: No such file or directory\. Put the file right, or remove it, and start again"
    ):
        data.train.read(0)


# Sets


def test_a_set_reads_its_images(tmp_path):
    files = make_classes(cat=4, dog=4)
    data = load_data(str(make_files(tmp_path, files)))
    for part in (data.train, data.val):
        for index, name in enumerate(part.names):
            assert colour(part.read(index)) == (list(files).index(name), 0, 99)
            assert part.classes[part.labels[index]] == name.partition("/")[0]


def test_a_selection_of_a_selection_reads_the_right_images():
    images = make_set([0, 1, 0, 1, 2]).select([4, 2, 0, 3]).select([3, 0])
    assert (images.labels, images.names, len(images)) == ((1, 2), ("colours/3", "colours/4"), 2)
    assert [colour(images.read(index))[0] for index in range(2)] == [3, 4]
    assert images.counts() == (0, 1, 1)


def test_sets_can_be_pickled(tmp_path):
    images = load_data(str(make_files(tmp_path, TWO))).train
    again = pickle.loads(pickle.dumps(images))
    assert again.fingerprint() == images.fingerprint()
    assert colour(again.read(2)) == colour(images.read(2))


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ((0, 1), ("a",), r"2 labels for 1 images"),
        ((0, 2), ("a", "b"), r"labels from 0 to 2 for 2 classes"),
        ((-1,), ("a",), r"from -1"),
    ],
)
def test_sets_must_fit(labels, names, message):
    with pytest.raises(DataError, match=message):
        ImageSet("toy", ("x", "y"), labels, names, Colours())


def test_any_change_changes_the_fingerprint():
    pixels = np.zeros((2, 4, 4), np.uint8)
    changed = pixels.copy()
    changed[1, 3, 3] = 1
    sets = [
        ImageSet("toy", ("x", "y"), (0, 1), ("a", "b"), ArrayReader(pixels)),
        ImageSet("toy", ("x", "z"), (0, 1), ("a", "b"), ArrayReader(pixels)),
        ImageSet("toy", ("x", "y"), (1, 1), ("a", "b"), ArrayReader(pixels)),
        ImageSet("toy", ("x", "y"), (0, 1), ("a", "c"), ArrayReader(pixels)),
        ImageSet("toy", ("x", "y"), (0, 1), ("a", "b"), ArrayReader(changed)),
        ImageSet("toy", ("x", "y"), (0, 1), ("a", "b"), Colours()),
        ImageSet("toy", ("x", "y"), (0,), ("a",), ArrayReader(pixels)),
    ]
    assert len({images.fingerprint() for images in sets}) == len(sets)
    assert sets[0].fingerprint() == sets[0].select([0, 1]).fingerprint() != sets[0].select([1, 0]).fingerprint()
    assert sets[0].fingerprint(contents=False) == sets[4].fingerprint(contents=False) != sets[0].fingerprint()
    assert sets[5].fingerprint() == sets[5].select([0, 1]).fingerprint()


def test_a_changed_file_changes_the_fingerprint(tmp_path):
    before = load_data(str(make_files(tmp_path, TWO))).train
    assert load_data(str(tmp_path)).train.fingerprint() == before.fingerprint()
    path = tmp_path / before.names[0]
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    after = load_data(str(tmp_path)).train
    assert after.fingerprint() != before.fingerprint()
    assert after.fingerprint(contents=False) == before.fingerprint(contents=False)
