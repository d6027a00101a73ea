"""Images are judged at the size of their masks, whole or through windows; truth is a loop over single pixels."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from gradfilter.data import FRAMES, IGNORE, MaskSet, MaskTransform
from gradfilter.data.frames import Window
from gradfilter.report import MaskSample
from gradfilter.scores import find_mean_iou
from gradfilter.train.feed import Feed
from gradfilter.train.job import make_fabric
from gradfilter.train.judge import find_samples, judge
from gradfilter.train.settings import Settings
from gradfilter.train.task import SEGMENT
from gradfilter.train.watch import Watch

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
SIZES = [(20, 14), (7, 19), (16, 16), (5, 3), (23, 31), (1, 40)]
"""Widths and heights, smaller and larger than the windows."""


def make_image(size, seed=0):
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8))


def make_set(sizes=SIZES, classes=4):
    """Make images of odd, differing sizes, with labels and pixels that do not count."""
    generator = np.random.default_rng(1)
    images = [make_image(size, seed) for seed, size in enumerate(sizes)]
    masks = [generator.integers(0, classes, size[::-1]).astype(np.uint8) for size in sizes]
    for mask in masks:
        mask[generator.random(mask.shape) < 0.2] = IGNORE
    areas = np.stack([np.bincount(mask.ravel(), minlength=256)[:classes] for mask in masks])
    names = tuple(f"{number}.png" for number in range(len(sizes)))
    labels = [Image.fromarray(mask) for mask in masks]
    return MaskSet("odd", tuple("abcd"[:classes]), names, images.__getitem__, labels.__getitem__, areas)


def make_model(kernel, seed=0, classes=4):
    """Make a network that keeps the size; with a kernel of 1 it sees nothing but a pixel."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Conv2d(3, classes, kernel, padding=kernel // 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def make_feed(images, model, resolution, evaluate, batch=4, workers=0):
    transform = MaskTransform(resolution, MEAN, STD)
    common = {"views": None, "seed": 0, "workers": workers, "training": False, "task": SEGMENT, "evaluate": evaluate}
    return Feed(images, transform, model, torch.device("cpu"), batch, **common)


def judge_feed(feed):
    return judge(feed.model, feed, make_fabric(Settings(device="cpu"), Path()), Watch())


def show(feed, kept) -> list[MaskSample]:
    return [sample for sample in find_samples(feed, kept) if isinstance(sample, MaskSample)]


def normalise(image):
    pixels = torch.from_numpy(np.asarray(image).astype(np.float32)).permute(2, 0, 1) / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def score_by_loop(model, image, side, evaluate):
    """Return the scores [classes, H, W] of an image: for windows, pixel by pixel, the mean over those that have the pixel."""
    width, height = image.size
    if evaluate == "whole":
        scale = side / max(width, height)
        seen = [max(1, round(length * scale)) for length in (width, height)]
        small = normalise(image.resize(seen, Image.Resampling.BILINEAR))
        scores = model(F.pad(small, (0, side - seen[0], 0, side - seen[1]))[None])
        return F.interpolate(scores[:, :, : seen[1], : seen[0]], (height, width), mode="bilinear")[0]
    canvas = torch.zeros(3, max(height, side), max(width, side))
    canvas[:, :height, :width] = normalise(image)
    step, windows = max(1, 2 * side // 3), {}
    for top in range(0, max(height, side), step):
        for left in range(0, max(width, side), step):
            place = min(top, canvas.shape[1] - side), min(left, canvas.shape[2] - side)
            windows[place] = model(canvas[None, :, place[0] : place[0] + side, place[1] : place[1] + side])[0]
    scores = torch.zeros(4, height, width)
    for y in range(height):
        for x in range(width):
            seen = [
                window[:, y - top, x - left]
                for (top, left), window in windows.items()
                if top <= y < top + side and left <= x < left + side
            ]
            scores[:, y, x] = torch.stack(seen).mean(0)
    return scores


@pytest.mark.parametrize("evaluate", FRAMES)
@pytest.mark.parametrize("side", [9, 16])
def test_scores_are_those_of_a_loop_over_pixels(evaluate, side):
    model, images = make_model(3), make_set()
    frame = FRAMES[evaluate](MaskTransform(side, MEAN, STD))
    with torch.no_grad():
        for index in range(len(images)):
            image = images.read(index)
            seen = frame.cut(image)
            assert seen.shape[1:] == (3, side, side)
            scores = frame.join(model(seen), image.size)
            torch.testing.assert_close(scores, score_by_loop(model, image, side, evaluate), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("evaluate", FRAMES)
@pytest.mark.parametrize("batch", [1, 4])
def test_pixels_are_counted_at_the_size_of_their_masks(evaluate, batch):
    model, images, side = make_model(3), make_set(), 9
    table, loss = np.zeros((4, 4), int), 0.0
    own = []
    for index in range(len(images)):
        with torch.no_grad():
            scores = score_by_loop(model, images.read(index), side, evaluate)
        mask, mine = np.asarray(images.read_mask(index)), np.zeros((4, 4), int)
        for y, x in np.argwhere(mask != IGNORE):
            mine[mask[y, x], int(scores[:, y, x].argmax())] += 1
            loss -= float(scores[:, y, x].log_softmax(0)[mask[y, x]])
        table += mine
        own.append(find_mean_iou(mine))
    judged = judge_feed(make_feed(images, model, side, evaluate, batch))
    assert judged.confusion == tuple(map(tuple, table.tolist()))
    assert judged.accuracy == pytest.approx(find_mean_iou(table))
    assert judged.loss == pytest.approx(loss / table.sum(), rel=1e-4)
    assert judged.kept.tolist() == pytest.approx(own)
    assert table.sum() == images.areas.sum()


def test_a_network_that_sees_single_pixels_says_the_same_whole_and_through_windows():
    images = make_set([(20, 14), (11, 20), (20, 20)])  # whole images at scale 1, of 20 pixels
    model = make_model(1)
    whole = judge_feed(make_feed(images, model, 20, "whole"))
    assert len(FRAMES["window"](MaskTransform(7, MEAN, STD)).cut(images.read(0))) == 5 * 3
    for side in (7, 20, 33):
        through = judge_feed(make_feed(images, model, side, "window"))
        assert through.confusion == whole.confusion
        assert through.loss == pytest.approx(whole.loss)


def test_windows_overlap_by_a_third_and_end_with_the_image():
    window = Window(MaskTransform(6, MEAN, STD))
    assert window.place((15, 6)) == [(0, 0), (0, 4), (0, 8), (0, 9)]
    assert window.place((14, 7)) == [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4), (1, 8)]
    assert window.place((2, 3)) == [(0, 0)]


def test_workers_change_nothing():
    images = make_set()
    first, second = (judge_feed(make_feed(images, make_model(3), 9, "whole", workers=number)) for number in (0, 1))
    assert first.confusion == second.confusion


def test_the_worst_the_median_and_the_best_image_are_shown():
    images = make_set([(9 + number, 8) for number in range(9)])
    feed = make_feed(images, make_model(3), 9, "window")
    judged = judge_feed(feed)
    samples = show(feed, judged.kept)
    assert [sample.rank for sample in samples] == ["worst", "lower quartile", "median", "upper quartile", "best"]
    assert [sample.score for sample in samples] == pytest.approx(sorted(judged.kept.tolist())[::2])
    for sample in samples:
        index = images.names.index(sample.name)
        assert sample.image.size == images.read(index).size
        assert np.array_equal(np.asarray(sample.truth), np.asarray(images.read_mask(index)))
        scores = score_by_loop(feed.model, images.read(index), 9, "window")
        assert (np.asarray(sample.predicted) == scores.argmax(0).numpy()).mean() > 0.99


@pytest.mark.parametrize(("count", "ranks"), [(1, ["best"]), (2, ["worst", "best"]), (3, ["worst", "median", "best"])])
def test_of_few_images_each_is_shown_once(count, ranks):
    feed = make_feed(make_set(SIZES[:count]), make_model(1), 9, "whole")
    samples = show(feed, judge_feed(feed).kept)
    assert [sample.rank for sample in samples] == ranks
    assert len({sample.name for sample in samples}) == count


def test_images_of_which_nothing_counts_are_not_shown():
    feed = make_feed(make_set(SIZES[:2]), make_model(1), 9, "whole")
    assert [s.name for s in show(feed, torch.tensor([math.nan, 0.5]))] == ["1.png"]
    assert find_samples(feed, torch.tensor([math.nan, math.nan])) == ()
