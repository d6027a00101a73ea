"""Judge a model on held-out images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.models.extras import import_extra
from gradfilter.report.results import Sample
from gradfilter.train.feed import Feed
from gradfilter.train.watch import Watch, follow

SAMPLES = 12
"""How many images of each kind, right and wrong, a report shows."""
THUMBNAIL = 128


@dataclass(frozen=True)
class Judged:
    """What a model makes of a set of images.

    Attributes:
        loss: Mean cross-entropy.
        accuracy: The task's score: share of images classified rightly, or mIoU.
        confusion: Images, or pixels, by true class (row) and predicted class (column).
        probabilities: Of every class, for every image; none where pixels have labels.
    """

    loss: float
    accuracy: float
    confusion: tuple[tuple[int, ...], ...]
    probabilities: Tensor


def judge(model: nn.Module, feed: Feed, fabric: Any, watch: Watch) -> Judged:
    """Run a model over all images of a feed, in eval mode."""
    count, task = len(feed.images), feed.task
    torchmetrics = import_extra("torchmetrics", "Judging a model")
    make_table = torchmetrics.classification.MulticlassConfusionMatrix
    confusion = make_table(len(feed.images.classes), ignore_index=task.ignore).to(feed.device)
    probabilities: list[Tensor] = []
    loss = 0.0  # not torchmetrics' mean, which leaves NaN out
    model.eval()
    with torch.no_grad(), fabric.autocast():
        for labels, forward in follow(feed.run(torch.arange(count), 0), "judging", count, watch):
            output = forward().float()
            loss += float(F.cross_entropy(output, labels, reduction="sum", ignore_index=task.ignore_index))
            confusion.update(output.argmax(1), labels)
            probabilities += [output.softmax(1).cpu()] if task.keeps else []
    table = confusion.compute().cpu()
    rows = tuple(tuple(int(n) for n in row) for row in table)
    kept = torch.cat(probabilities) if probabilities else torch.empty(0)
    return Judged(loss / max(1, int(table.sum())), task.rate(table.numpy()), rows, kept)


def find_samples(feed: Feed, probabilities: Tensor) -> tuple[Sample, ...]:
    """Choose what to show: the images that the model is most wrong about, and some that it gets right, of all classes."""
    if not len(probabilities):
        return ()
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
