"""Judge a model on held-out images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.models.extras import import_extra
from gradfilter.report.results import MaskSample, Sample
from gradfilter.train.feed import Feed
from gradfilter.train.watch import Watch, follow


@dataclass(frozen=True)
class Judged:
    """What a model makes of a set of images.

    Attributes:
        loss: Mean cross-entropy.
        accuracy: The task's score: share of images classified rightly, or mIoU.
        confusion: Images, or pixels, by true class (row) and predicted class (column).
        kept: What the task keeps of every image: the probability of every class, or the image's own mIoU.
    """

    loss: float
    accuracy: float
    confusion: tuple[tuple[int, ...], ...]
    kept: Tensor


def judge(model: nn.Module, feed: Feed, fabric: Any, watch: Watch) -> Judged:
    """Run a model over all images of a feed, in eval mode."""
    count, task = len(feed.images), feed.task
    torchmetrics = import_extra("torchmetrics", "Judging a model")
    make_table = torchmetrics.classification.MulticlassConfusionMatrix
    confusion = make_table(len(feed.images.classes), ignore_index=task.ignore).to(feed.device)
    kept: list[Tensor] = []
    loss = 0.0  # not torchmetrics' mean, which leaves NaN out
    model.eval()
    with torch.no_grad(), fabric.autocast():
        for labels, output in follow(task.run(feed), "judging", count, watch):
            loss += float(F.cross_entropy(output, labels, reduction="sum", ignore_index=task.ignore_index))
            confusion.update(output.argmax(1), labels)
            kept.append(task.keep(output, labels).cpu())
    table = confusion.compute().cpu()
    rows = tuple(tuple(int(n) for n in row) for row in table)
    return Judged(loss / max(1, int(table.sum())), task.rate(table.numpy()), rows, torch.cat(kept))


def find_samples(feed: Feed, kept: Tensor) -> tuple[Sample, ...] | tuple[MaskSample, ...]:
    """Choose what a report shows, from what the task has kept of every image."""
    feed.model.eval()
    with torch.no_grad():
        return feed.task.find_samples(feed, kept)
