"""What a run learns: one label for each image, or one for each pixel. All that differs between the two is here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.data import (
    FRAMES,
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
from gradfilter.outputs import find_logits, find_outputs
from gradfilter.scores import SCORES, Scores, find_mean_iou
from gradfilter.train.batches import MaskRows, Rows
from gradfilter.train.samples import find_image_samples, find_mask_samples

if TYPE_CHECKING:
    from PIL.Image import Image

    from gradfilter.data.frames import Whole
    from gradfilter.train.feed import Feed
    from gradfilter.train.settings import Settings
    from gradfilter.train.use import Trained


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: As `--task` has it.
        scores: What gets a label, and how models are scored.
        layout: What data for it have to have, to be of the same classes as others.
        ignore: The label of units that do not count; None where all do.
        load: From settings to data.
        make_transforms: From resolution, mean, std, augmentation and flips to transforms for training and evaluation.
        make_rows: From images, transform and seed to what batches are loaded from.
        find_labels: From a set to labels that are drawn from evenly.
        count_right: From scores [N, classes, ...] and labels to how many of the N images' worth are right.
        certainty: What tables say of the score and of how sure it is; "{images}" held-out images.
        run: From a feed to labels and the model's scores, [N, classes, ...], of all its images in turn, as they are judged.
        keep: From scores and labels to what is kept of each image, to choose which to show in the report.
        find_samples: From a feed and what was kept of its images to those that are shown.
        describe: From settings and images to what using the weights takes, besides what all tasks need.
        predict: From a trained model and images to the share of each class in what the model says of them, [classes], and
            labels [H, W] of their pixels, where these have some.
    """

    name: str
    scores: Scores
    layout: str
    ignore: int | None
    load: Callable[[Settings], Data[Any]]
    make_transforms: Callable[..., tuple[Any, Any]]
    make_rows: Callable[[Any, Any, int], Rows]
    find_labels: Callable[[Any], Sequence[int]]
    count_right: Callable[[Tensor, Tensor], float]
    certainty: str
    run: Callable[[Feed], Iterator[tuple[Tensor, Tensor]]]
    keep: Callable[[Tensor, Tensor], Tensor]
    find_samples: Callable[[Feed, Tensor], tuple[Any, ...]]
    describe: Callable[[Settings, Any], Mapping[str, Any]]
    predict: Callable[[Trained, Sequence[Image]], list[tuple[Tensor, Tensor | None]]]

    @property
    def metric(self) -> str:
        """Return what the score is called by which the best epoch is chosen."""
        return self.scores.metric

    @property
    def unit(self) -> str:
        """Return what gets a label."""
        return self.scores.unit

    def rate(self, confusion: np.ndarray) -> float:
        """Return the score by which the best epoch is chosen."""
        return self.scores.overall[self.metric](confusion)

    def make_loss(self, settings: Settings, images: Any) -> Loss:
        """Return the loss that is trained on, from a model's outputs and labels."""
        smoothing, ignore = settings.label_smoothing, self.ignore_index
        weights = find_class_weights(images) if settings.class_weights == "balanced" else torch.ones(len(images.classes))

        def loss(outputs: Any, labels: Tensor) -> Tensor:
            return F.cross_entropy(find_logits(outputs), labels, label_smoothing=smoothing)

        def loss_of_some(outputs: Any, labels: Tensor) -> Tensor:
            scores, *others = find_outputs(outputs)
            if settings.auxiliary and not others:
                raise SettingsError(
                    f"--auxiliary {settings.auxiliary} is for a model with an auxiliary head, and --model {settings.model} "
                    "gives one output only: leave it out."
                )
            total = loss_of_one(scores, labels)
            return total + settings.auxiliary * loss_of_one(others[0], labels) if settings.auxiliary else total

        def loss_of_one(logits: Tensor, labels: Tensor) -> Tensor:
            scale = weights.to(logits.device, torch.float32)
            total = F.cross_entropy(logits, labels, scale, label_smoothing=smoothing, ignore_index=ignore, reduction="sum")
            real = labels != ignore  # and no choice of labels by it: this must run on shapes alone
            # torch's own mean is NaN where nothing in a batch counts
            return total / (scale[labels.where(real, 0)] * real).sum().clamp(min=1e-6)

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


def _run_images(feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
    for labels, forward in feed.run(torch.arange(len(feed.images)), 0):
        yield labels, forward().float()


def _run_pixels(feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
    """Give labels [1, H, W] and scores [1, classes, H, W] of each image, at the size of its mask."""
    images: Any = feed.images
    transform: Any = feed.transform
    frame = FRAMES[feed.evaluate](transform)
    for index, scores in enumerate(_run_frames(feed, frame)):
        mask = images.read_mask(index)
        labels = torch.from_numpy(np.asarray(mask).astype(np.int64))
        yield labels[None].to(feed.device), frame.join(scores, mask.size)[None]


def _run_frames(feed: Feed, frame: Whole) -> Iterator[Tensor]:
    """Give the scores of what is seen of each image, [K, classes, H, W]."""
    if feed.evaluate == "whole":  # as in training: in batches, by workers, from a cache
        yield from (scores[None] for _, batch in _run_images(feed) for scores in batch)
    else:
        for index in range(len(feed.images)):
            yield run_frame(feed.model, frame, feed.images.read(index), feed.batch, feed.device)


def run_frame(model: nn.Module, frame: Whole, image: Image, batch: int, device: torch.device) -> Tensor:
    """Return the scores of what a model sees of an image, [K, classes, H, W].

    Args:
        model: In eval mode.
        frame: How it sees the image.
        image: The image.
        batch: Run so many windows at a time.
        device: Where the model is.
    """
    seen = frame.cut(image).contiguous(memory_format=torch.channels_last)
    return torch.cat([find_logits(model(some.to(device))).float() for some in seen.split(batch)])


def _find_own_iou(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mIoU of each image."""
    return torch.tensor([find_mean_iou(count_pixels(*pair)) for pair in zip(scores.split(1), labels.split(1), strict=True)])


def _predict_images(trained: Trained, images: Sequence[Image]) -> list[tuple[Tensor, Tensor | None]]:
    inputs = torch.stack([trained.transform(image) for image in images])
    rows = find_logits(trained.model(inputs.contiguous(memory_format=torch.channels_last))).softmax(1)
    return [(row, None) for row in rows]


def _predict_pixels(trained: Trained, images: Sequence[Image]) -> list[tuple[Tensor, Tensor | None]]:
    frame, found = FRAMES[trained.evaluate](trained.transform), []
    for image in images:
        scores = run_frame(trained.model, frame, image, trained.batch, torch.device("cpu"))
        labels = frame.join(scores, image.size).argmax(0)
        found.append((torch.bincount(labels.flatten(), minlength=len(trained.classes)) / labels.numel(), labels))
    return found


def _describe_pixels(settings: Settings, images: MaskSet) -> dict[str, Any]:
    return {"evaluate": settings.evaluate, "values": list(images.values), "batch": settings.batch}


CLASSIFY = Task(
    name="classify",
    scores=SCORES["classify"],
    layout="a folder for each class, named alike",
    ignore=None,
    load=_load_images,
    make_transforms=make_transforms,
    make_rows=Rows,
    find_labels=lambda images: images.labels,
    count_right=_count_images,
    certainty="Accuracy is that after the last epoch, on {images} held-out images. Its interval is Wilson's, of all tested "
    "images: it leaves out what a seed does.",
    run=_run_images,
    keep=lambda scores, labels: scores.softmax(1),
    find_samples=find_image_samples,
    describe=lambda settings, images: {},
    predict=_predict_images,
)
SEGMENT = Task(
    name="segment",
    scores=SCORES["segment"],
    layout="a file classes.txt that names the same classes in the same order",
    ignore=IGNORE,
    load=_load_masks,
    make_transforms=make_mask_transforms,
    make_rows=MaskRows,
    find_labels=lambda images: [0] * len(images),
    count_right=_rate_batch,
    certainty="mIoU and mAcc are those after the last epoch, of all pixels of {images} held-out images together. They have no "
    "interval: pixels of one image are not independent, and seeds differ.",
    run=_run_pixels,
    keep=_find_own_iou,
    find_samples=find_mask_samples,
    describe=_describe_pixels,
    predict=_predict_pixels,
)
TASKS = {task.name: task for task in (CLASSIFY, SEGMENT)}
