"""From an image and its mask to a network's input and labels."""

import numpy as np
import pytest
import torch
from PIL import Image

from gradfilter.data import IGNORE, MaskTransform, make_mask_transforms
from gradfilter.errors import SettingsError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def make_pair(size=(48, 36), classes=5):
    """Return an image whose red channel, divided by 50, is its mask."""
    width, height = size
    mask = np.random.default_rng(0).integers(0, classes, (-(-height // 12), -(-width // 12))).astype(np.uint8)
    mask = mask.repeat(12, 0).repeat(12, 1)[:height, :width]
    image = np.stack([mask * 50, np.full_like(mask, 99), np.full_like(mask, 7)], -1)
    return Image.fromarray(image), Image.fromarray(mask)


def draw(seed):
    return torch.Generator().manual_seed(seed)


def test_evaluation_fits_the_image_and_fills_up():
    _, plain = make_mask_transforms(24, MEAN, STD, "none", flips=True)
    image, mask = make_pair()
    x, y = plain(image, mask)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((3, 24, 24), torch.float32, (24, 24), torch.int64)
    assert (y[18:] == IGNORE).all()
    assert (x[:, 18:] == 0).all()
    assert y[:18].tolist() == np.asarray(mask)[1::2, 1::2].tolist()
    assert x[1, :18].flatten().tolist() == pytest.approx([(99 / 255 - 0.4) / 0.3] * 18 * 24)


@pytest.mark.parametrize("size", [(48, 36), (31, 77), (5, 3), (24, 24), (1, 60)])
@pytest.mark.parametrize("augment", ["none", "flip", "standard"])
def test_any_size_becomes_the_resolution(augment, size):
    train, _ = make_mask_transforms(24, MEAN, STD, augment, flips=True)
    for seed in range(8):
        x, y = train(*make_pair(size), draw(seed))
        assert (x.shape, y.shape) == ((3, 24, 24), (24, 24))
        assert set(y.unique().tolist()) <= {0, 1, 2, 3, 4, IGNORE}
        assert x.isfinite().all()


@pytest.mark.parametrize("augment", ["flip", "standard"])
def test_chance_is_the_generators_alone(augment):
    train, _ = make_mask_transforms(24, MEAN, STD, augment, flips=True)
    pair = make_pair()
    before = torch.get_rng_state()
    first, again = train(*pair, draw(3)), train(*pair, draw(3))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({str(train(*pair, draw(seed))[1].tolist()) for seed in range(20)}) > 1
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(SettingsError, match="generator"):
        train(*pair)


def test_image_and_mask_move_together():
    train = MaskTransform(36, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), scales=(0.5, 2.0), mirror=True)
    image, mask = make_pair()
    for seed in range(30):
        x, y = train(image, mask, draw(seed))
        seen = y != IGNORE
        assert seen.any()
        same = (x[0] * 255 / 50).round() == y  # but between two classes, where colours are mixed
        assert same[seen].float().mean() > 0.8, seed
        assert (x[:, ~seen] == 0).all()


def test_scales_cover_their_range():
    train = MaskTransform(40, MEAN, STD, scales=(0.5, 2.0))
    pair = make_pair((40, 40))
    shares = [float((train(*pair, draw(seed))[1] != IGNORE).float().mean()) for seed in range(60)]
    assert min(shares) < 0.35  # half the side is a quarter of the area
    assert 20 < sum(share == 1 for share in shares) < 40  # half of them are made larger


def test_nothing_is_mirrored_where_that_is_not_as_good():
    pair = make_pair()
    plain = make_mask_transforms(24, MEAN, STD, "none", flips=True)[1](*pair)[1]
    for flips in (True, False):
        train, _ = make_mask_transforms(24, MEAN, STD, "flip", flips=flips)
        kinds = {torch.equal(train(*pair, draw(seed))[1], plain) for seed in range(20)}
        assert kinds == ({True, False} if flips else {True})


def test_jitter_changes_colours_and_not_labels():
    train = MaskTransform(48, MEAN, STD, jitter=True)
    pair = make_pair()
    plain = MaskTransform(48, MEAN, STD)(*pair)
    results = [train(*pair, draw(seed)) for seed in range(5)]
    assert all(torch.equal(y, plain[1]) for _, y in results)
    assert all(not torch.equal(x, plain[0]) for x, _ in results)
    assert len({str(x.tolist()) for x, _ in results}) == 5


def test_images_are_left_as_they_were():
    image, mask = make_pair()
    before = image.tobytes(), mask.tobytes()
    make_mask_transforms(24, MEAN, STD, "standard", flips=True)[0](image, mask, draw(0))
    assert (image.tobytes(), mask.tobytes()) == before


def test_without_augmentation_training_is_evaluation():
    train, plain = make_mask_transforms(24, MEAN, STD, "none", flips=True)
    assert train == plain
    assert not train.is_random


@pytest.mark.parametrize(("options", "message"), [({"augment": "x"}, "augment"), ({"resolution": 0}, "resolution")])
def test_settings_that_cannot_be(options, message):
    chosen = {"resolution": 24, "mean": MEAN, "std": STD, "augment": "none", "flips": True, **options}
    with pytest.raises(SettingsError, match=message):
        make_mask_transforms(**chosen)
