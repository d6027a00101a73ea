"""What a report shows of a model: some held-out images with what it says of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from gradfilter.report.results import MaskSample, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

    from gradfilter.train.feed import Feed

SAMPLES = 12
"""How many images of each kind, right and wrong, a report shows."""
THUMBNAIL = 128
RANKS = {"best": 1.0, "worst": 0.0, "median": 0.5, "lower quartile": 0.25, "upper quartile": 0.75}
"""Which images with masks a report shows: where they are among all, from the lowest score to the highest."""
SCENE = 360


def find_image_samples(feed: Feed, probabilities: Tensor) -> tuple[Sample, ...]:
    """Choose what to show: the images that the model is most wrong about, and some that it gets right, of all classes."""
    confidence, predicted = probabilities.max(1)
    right = predicted == feed.labels.cpu()
    wrong = [i for i in confidence.argsort(descending=True, stable=True).tolist() if not right[i]][:SAMPLES]
    return tuple(make_sample(feed, i, int(predicted[i]), float(confidence[i])) for i in [*pick_evenly(feed, right), *wrong])


def pick_evenly(feed: Feed, right: Tensor) -> list[int]:
    """Return images that were classified rightly, from as many classes as possible."""
    by_class: dict[int, list[int]] = {}
    for index in right.nonzero().flatten().tolist():
        by_class.setdefault(int(feed.labels[index]), []).append(index)
    turns = range(max(map(len, by_class.values()), default=0))
    return [by_class[label][turn] for turn in turns for label in sorted(by_class) if turn < len(by_class[label])][:SAMPLES]


def make_sample(feed: Feed, index: int, predicted: int, confidence: float) -> Sample:
    """Return one image with its prediction."""
    image = feed.images.read(index)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return Sample(feed.images.names[index], int(feed.labels[index]), predicted, confidence, image)


def find_mask_samples(feed: Feed, scores: Tensor) -> tuple[MaskSample, ...]:
    """Choose what to show: the images with the lowest, the median and the highest score, and some between.

    Args:
        feed: The held-out images, and the model.
        scores: Of each of them; NaN where nothing of one counts, which is not shown.
    """
    ranked = [i for i in scores.argsort(stable=True).tolist() if not scores[i].isnan()]
    if not ranked:
        return ()
    places: dict[int, str] = {}
    for rank, share in RANKS.items():  # of few images, one has several ranks
        places.setdefault(round(share * (len(ranked) - 1)), rank)
    chosen = {ranked[place]: places[place] for place in sorted(places)}
    outputs = feed.task.run(dataclasses.replace(feed, images=feed.images.select(list(chosen)), cache=None, trunk=None))
    return tuple(
        make_mask_sample(feed, index, rank, float(scores[index]), output, labels)
        for (index, rank), (labels, output) in zip(chosen.items(), outputs, strict=True)
    )


def make_mask_sample(feed: Feed, index: int, rank: str, score: float, output: Tensor, labels: Tensor) -> MaskSample:
    """Return one image with its labels [1, H, W] and the model's scores [1, classes, H, W]."""
    image = feed.images.read(index)
    image.thumbnail((SCENE, SCENE))
    truth, predicted = (shrink(x[0], image.size) for x in (labels, output.argmax(1)))
    return MaskSample(feed.images.names[index], rank, score, image, truth, predicted)


def shrink(labels: Tensor, size: tuple[int, int]) -> Image:
    """Return labels [H, W] as an image of size (w, h)."""
    from PIL import Image

    full = Image.fromarray(labels.cpu().numpy().astype(np.uint8))
    return full.resize(size, Image.Resampling.NEAREST)
