"""What a run learns: one label for each image, or one for each pixel. All that differs between the two is here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.data import (
    IGNORE,
    Data,
    ImageSet,
    MaskSet,
    load_data,
    load_masks,
    make_mask_transforms,
    make_transforms,
)
from gradfilter.errors import SettingsError
from gradfilter.fidelity import Loss
from gradfilter.outputs import find_logits
from gradfilter.scores import find_mean_iou
from gradfilter.train.batches import MaskRows, Rows

if TYPE_CHECKING:
    from gradfilter.train.settings import Settings


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: As `--task` has it.
        metric: What the score is called by which the best epoch is chosen.
        unit: What gets a label.
        ignore: The label of units that do not count; None where all do.
        load: From settings to data.
        make_transforms: From resolution, mean, std, augmentation and flips to transforms for training and evaluation.
        make_rows: From images, transform and seed to what batches are loaded from.
        find_labels: From a set to labels that are drawn from evenly.
        count_right: From scores [N, classes, ...] and labels to how many of the N images' worth are right.
        rate: From confusion to score.
        keeps: Whether what the model says of every image is kept, to show some in the report.
    """

    name: str
    metric: str
    unit: str
    ignore: int | None
    load: Callable[[Settings], Data[Any]]
    make_transforms: Callable[..., tuple[Any, Any]]
    make_rows: Callable[[Any, Any, int], Rows]
    find_labels: Callable[[Any], Sequence[int]]
    count_right: Callable[[Tensor, Tensor], float]
    rate: Callable[[np.ndarray], float]
    keeps: bool

    def make_loss(self, settings: Settings, images: Any) -> Loss:
        """Return the loss that is trained on, from a model's outputs and labels."""
        smoothing, ignore = settings.label_smoothing, self.ignore_index
        weights = find_class_weights(images) if settings.class_weights == "balanced" else torch.ones(len(images.classes))

        def loss(outputs: Any, labels: Tensor) -> Tensor:
            return F.cross_entropy(find_logits(outputs), labels, label_smoothing=smoothing)

        def loss_of_some(outputs: Any, labels: Tensor) -> Tensor:
            logits = find_logits(outputs)
            scale = weights.to(logits.device, torch.float32)
            total = F.cross_entropy(logits, labels, scale, label_smoothing=smoothing, ignore_index=ignore, reduction="sum")
            # torch's own mean is NaN where nothing in a batch counts
            return total / scale[labels[labels != ignore]].sum().clamp(min=1e-6)

        return loss if self.ignore is None else loss_of_some

    @property
    def ignore_index(self) -> int:
        """Return the label to ignore as torch's losses take it; one that never is a label where none is."""
        return -100 if self.ignore is None else self.ignore

    def check_output(self, model: str, output: Tensor, images: Tensor, classes: int) -> None:
        """Raise unless a model gives a score for each class and whatever gets a label."""
        size = [] if self.unit == "image" else list(images.shape[2:])
        shape, expected = list(output.shape), [len(images), classes, *size]
        if shape != expected:
            kind = "A classifier" if self.unit == "image" else "A model for --task segment"
            raise SettingsError(
                f"--model {model} gives an output of shape {shape} for {len(images)} images of {classes} classes. {kind} gives "
                f"one score per {self.unit} and class, {expected}: take another model."
            )


def find_class_weights(images: MaskSet) -> Tensor:
    """Return weights that are larger for classes of fewer pixels: median frequency balancing.

    The frequency of a class is its share of the pixels of those images in which it is seen. A class that is never seen has the
    weight 1, which nothing depends on.
    """
    seen = images.areas > 0
    whole = (images.areas.sum(1, keepdims=True) * seen).sum(0)
    shares = np.divide(images.areas.sum(0), whole, out=np.full(len(whole), np.nan), where=whole > 0)
    return torch.from_numpy(np.nan_to_num(np.nanmedian(shares) / shares, nan=1.0))


def find_task(name: str) -> Task:
    """Return the task of a name."""
    return TASKS[name]


def _load_images(settings: Settings) -> Data[ImageSet]:
    return load_data(
        settings.data,
        root=settings.root,
        val_share=settings.val_share,
        seed=settings.seed,
        strict=settings.strict,
        download=settings.download,
    )


def _load_masks(settings: Settings) -> Data[MaskSet]:
    return load_masks(
        settings.data, root=settings.root, val_share=settings.val_share, seed=settings.seed, download=settings.download
    )


def _count_images(output: Tensor, labels: Tensor) -> float:
    return int((output.argmax(1) == labels).sum())


def _rate_batch(output: Tensor, labels: Tensor) -> float:
    """Return the mIoU of a batch, as so many images; 0 where nothing in it counts."""
    rate = find_mean_iou(count_pixels(output, labels))
    return 0.0 if math.isnan(rate) else rate * len(labels)


def count_pixels(output: Tensor, labels: Tensor) -> np.ndarray:
    """Count pixels by true and predicted class; those to ignore are left out."""
    classes = output.shape[1]
    seen = labels != IGNORE
    pairs = labels[seen] * classes + output.argmax(1)[seen]
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes).cpu().numpy()


def _share_right(table: np.ndarray) -> float:
    return float(np.diagonal(table).sum()) / float(table.sum())


CLASSIFY = Task(
    name="classify",
    metric="accuracy",
    unit="image",
    ignore=None,
    load=_load_images,
    make_transforms=make_transforms,
    make_rows=Rows,
    find_labels=lambda images: images.labels,
    count_right=_count_images,
    rate=_share_right,
    keeps=True,
)
SEGMENT = Task(
    name="segment",
    metric="mIoU",
    unit="pixel",
    ignore=IGNORE,
    load=_load_masks,
    make_transforms=make_mask_transforms,
    make_rows=MaskRows,
    find_labels=lambda images: [0] * len(images),
    count_right=_rate_batch,
    rate=find_mean_iou,
    keeps=False,
)
TASKS = {task.name: task for task in (CLASSIFY, SEGMENT)}
