"""From an image to a network's input."""

import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image

from gradfilter.data import Transform, make_transforms
from gradfilter.errors import SettingsError
from gradfilter.models.extras import import_extra

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def make_photo(width, height):
    generator = np.random.default_rng(width * height)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def make_small():
    """An image with a bright spot in its middle."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[3:5, 3:5] = 255
    return Image.fromarray(pixels)


def draws(transform, image, count=40):
    results = []
    for seed in range(count):
        torch.manual_seed(seed)
        results.append(transform(image))
    return results


@pytest.mark.parametrize("augment", ["none", "flip", "standard"])
@pytest.mark.parametrize("size", [(8, 8), (31, 20), (32, 32), (100, 10), (10, 100), (300, 200), (37, 36), (1, 1), (33, 1)])
def test_any_size_becomes_the_resolution(augment, size):
    for transform in make_transforms(32, MEAN, STD, augment, flips=True):
        result = transform(make_photo(*size))
        assert (result.shape, result.dtype, result.is_contiguous()) == ((3, 32, 32), torch.float32, True)
        assert result.isfinite().all()


def test_evaluation_is_resize_crop_and_normalise():
    """Against torchvision's own classes."""
    v2 = import_extra("torchvision.transforms.v2", "this test")
    parts = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    large = v2.Compose([v2.Resize(round(56 / 0.875)), v2.CenterCrop(56), *parts])
    small = v2.Compose([v2.Resize((56, 56)), *parts])
    _, transform = make_transforms(56, MEAN, STD, "standard", flips=True)
    for size in [(300, 200), (64, 65), (56, 56), (20, 300)]:
        torch.testing.assert_close(transform(make_photo(*size)), large(make_photo(*size)))
    for size in [(55, 55), (28, 28), (20, 40)]:
        torch.testing.assert_close(transform(make_photo(*size)), small(make_photo(*size)))


def test_without_augmentation_training_is_evaluation():
    train, evaluation = make_transforms(32, MEAN, STD, "none", flips=True)
    assert train is evaluation
    assert not train.is_random


@pytest.mark.parametrize("size", [(20, 20), (60, 50)])
def test_flip_mirrors_every_other_image_and_no_more(size):
    train, evaluation = make_transforms(32, MEAN, STD, "flip", flips=True)
    plain = evaluation(make_photo(*size))
    results = draws(train, make_photo(*size), 60)
    mirrored = [torch.equal(result, plain.flip(-1)) for result in results]
    assert all(was or torch.equal(result, plain) for result, was in zip(results, mirrored, strict=True))
    assert 15 < sum(mirrored) < 45
    assert train.is_random


def test_nothing_is_mirrored_where_that_changes_the_class():
    train, evaluation = make_transforms(32, MEAN, STD, "flip", flips=False)
    assert (train, train.is_random) == (evaluation, False)
    assert not make_transforms(32, MEAN, STD, "standard", flips=False)[0].mirror


def test_standard_shifts_a_small_image_by_an_eighth():
    train, _ = make_transforms(64, (0, 0, 0), (1, 1, 1), "standard", flips=False)
    moved = set()
    for result in draws(train, make_small(), 100):
        rows, columns = (torch.nonzero(result[0].amax(axis) > 0.5).flatten() for axis in (1, 0))
        moved.add((round((rows.float().mean().item() - 31.5) / 8), round((columns.float().mean().item() - 31.5) / 8)))
    assert moved == set(itertools.product((-1, 0, 1), repeat=2))


def test_standard_crops_a_large_image():
    """A ramp tells where the crop was: never less than 0.35 of the area, never beyond the image."""
    ramp = np.zeros((100, 100, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(100), np.arange(100)[:, None]
    train, _ = make_transforms(50, (0, 0, 0), (1, 1, 1), "standard", flips=True)
    shares, signs = [], set()
    for result in draws(train, Image.fromarray(ramp), 100):
        across, down = (result[0, 25, -1] - result[0, 25, 0]).item() * 255, (result[1, -1, 25] - result[1, 0, 25]).item() * 255
        shares.append(abs(across) * down / 100**2)
        signs.add(across > 0)
    assert 0.3 < min(shares) < 0.5
    assert 0.8 < max(shares) <= 1.0
    assert signs == {True, False}


@pytest.mark.parametrize("size", [(20, 20), (60, 50)])
def test_chance_is_torchs_own(size):
    train, _ = make_transforms(32, MEAN, STD, "standard", flips=True)
    first = draws(train, make_photo(*size))
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    states = random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    assert all(torch.equal(a, b) for a, b in zip(first, draws(train, make_photo(*size)), strict=True))
    assert (random.getstate(), repr(np.random.get_state())) == states  # noqa: NPY002
    assert len({tuple(result.flatten()[:50].tolist()) for result in first}) > 10


def test_an_image_is_left_as_it_was():
    image = make_photo(20, 20)
    before = image.tobytes()
    for transform in make_transforms(20, MEAN, STD, "standard", flips=True):
        transform(image)
    assert image.tobytes() == before


def test_the_repr_tells_transforms_apart():
    plain = Transform(32, MEAN, STD)
    others = [
        Transform(33, MEAN, STD),
        Transform(32, STD, STD),
        Transform(32, MEAN, MEAN),
        Transform(32, MEAN, STD, crop="random"),
        Transform(32, MEAN, STD, mirror=True),
    ]
    assert len({repr(transform) for transform in [plain, *others]}) == 6
    assert repr(make_transforms(32, list(MEAN), list(STD), "none", flips=True)[1]) == repr(plain)
    assert repr(pickle.loads(pickle.dumps(plain))) == repr(plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "strong"}, r"augment is 'strong', which is not known\. Choose one of: none, flip, standard"),
        ({"resolution": 0}, r"resolution is 0, but it is a number of pixels"),
        ({"mean": (0.5,)}, r"mean has 1 numbers, but images have 3 channels"),
        ({"std": (0.5, 0.5)}, r"std has 2 numbers"),
        ({"std": (0.5, 0.5, 0)}, r"std is \(0\.5, 0\.5, 0\.0\), and channels are divided by it\. Give numbers above 0"),
        ({"std": (0.5, 0.5, float("nan"))}, r"std is .*nan"),
    ],
)
def test_settings_that_cannot_be(options, message):
    with pytest.raises(SettingsError, match=message):
        make_transforms(**{"resolution": 32, "mean": MEAN, "std": STD, "augment": "none", "flips": True, **options})
