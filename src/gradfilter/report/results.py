"""What a training run found out: plain records that the training loop fills and the report draws."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradfilter.errors import GradFilterError
from gradfilter.scores import SCORES, Scores

if TYPE_CHECKING:
    from PIL.Image import Image


class ResultsError(GradFilterError, ValueError):
    """Report results that contradict themselves, or that were not written by gradfilter."""


@dataclass(frozen=True)
class Epoch:
    """Hold the figures of one epoch; what was not measured is NaN.

    Args:
        epoch: Number of the epoch, counted from 1.
        train_loss: Mean loss over the training images.
        train_accuracy: Share of training images classified rightly, 0 to 1; for segmentation mIoU, mean over batches.
        val_loss: Mean loss over the held-out images.
        val_accuracy: Share of held-out images classified rightly, 0 to 1; for segmentation mIoU.
        lr: Learning rate at the end of the epoch.
        images_per_second: Training images per second.
        seconds: Duration of the epoch, validation included.
        val_mean_accuracy: Share of each class's held-out images, or pixels, classified rightly, mean over classes (mAcc).
    """

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    lr: float
    images_per_second: float
    seconds: float
    val_mean_accuracy: float = math.nan

    @property
    def is_judged(self) -> bool:
        """Tell whether held-out images were looked at: with `--val_every` they are not after every epoch."""
        return not (math.isnan(self.val_loss) and math.isnan(self.val_accuracy))


@dataclass(frozen=True)
class Layer:
    """Hold what was done with one layer.

    Args:
        name: Dotted name of the module.
        backward: How its gradient was made: "patch 2", "grid 4 int8", "exact" or "frozen".
        patch: Patch size `(h, w)` that it came to, None for a layer that is not filtered.
        trained: Whether its weights were trained.
        parameters: Number of parameters.
        keep: How its input was held until backward, None for as it is.
    """

    name: str
    backward: str
    patch: tuple[int, int] | None
    trained: bool
    parameters: int
    keep: str | None = None


@dataclass(frozen=True)
class Cost:
    """Hold what a training step cost, measured beside exact back-propagation of the same layers.

    Args:
        batch: Images per step.
        resolution: Side of the images in pixels.
        saved_bytes: Bytes that autograd held for one step.
        exact_saved_bytes: The same with exact back-propagation.
        step_ratio: Median ratio of the step times, this plan to exact.
        step_seconds: Median time of a step.
        exact_step_seconds: Median time of an exact step.
        inference_seconds: Median time of a forward pass without gradients.
    """

    batch: int
    resolution: int
    saved_bytes: int
    exact_saved_bytes: int
    step_ratio: float
    step_seconds: float
    exact_step_seconds: float
    inference_seconds: float


@dataclass(frozen=True)
class Beside:
    """Hold what another run came to, to show it beside this one.

    Args:
        name: What to call it, for example "exact".
        accuracy: Share of held-out images that it classified rightly, 0 to 1.
    """

    name: str
    accuracy: float


@dataclass(frozen=True)
class Sample:
    """Hold one held-out image with what the model said about it.

    Args:
        name: File name, or another name by which the user finds the image.
        label: Index of the true class.
        predicted: Index of the class that the model chose.
        confidence: Probability of that class, 0 to 1.
        image: A thumbnail.
    """

    name: str
    label: int
    predicted: int
    confidence: float
    image: "Image" = field(repr=False, compare=False)


@dataclass(frozen=True)
class MaskSample:
    """Hold one held-out image with the labels of its pixels, and with those that the model gave them.

    Args:
        name: File name, or another name by which the user finds the image.
        rank: Where it is among all held-out images: "best", "median", "worst".
        score: Its own mIoU.
        image: A thumbnail.
        truth: An image of its size with a label in each pixel, 255 where none counts.
        predicted: The same with the model's labels.
    """

    name: str
    rank: str
    score: float
    image: "Image" = field(repr=False, compare=False)
    truth: "Image" = field(repr=False, compare=False)
    predicted: "Image" = field(repr=False, compare=False)


@dataclass(frozen=True)
class Results:
    """Hold all that a run found out, except for the sample images.

    Args:
        model: Name of the model.
        data: Name or folder of the data.
        classes: Names of the classes.
        train_counts: Training images per class.
        val_counts: Held-out images per class.
        settings: The resolved settings of the run.
        plan: The plan as YAML.
        history: The epochs, in order.
        best_epoch: `Epoch.epoch` of the epoch whose weights were kept as best.
        confusion: Held-out images, or their pixels, by true class (row) and predicted class (column), at the best epoch.
        layers: The layers, from input to output.
        cost: Measured cost, None where it was not measured.
        skipped: One line for each file that was not read, with the reason.
        environment: Versions, machine, seeds.
        weights_file: File name of the best weights, in the folder of the report.
        beside: Another run to compare with, None where none was named.
        held_out: How many images were held out, and
        trained_on: how many were trained on; None in old results of runs that classify, of which the counts tell it.
    """

    model: str
    data: str
    classes: tuple[str, ...]
    train_counts: tuple[int, ...]
    val_counts: tuple[int, ...]
    settings: dict[str, Any]
    plan: str
    history: tuple[Epoch, ...]
    best_epoch: int
    confusion: tuple[tuple[int, ...], ...]
    layers: tuple[Layer, ...]
    cost: Cost | None
    skipped: tuple[str, ...]
    environment: dict[str, str]
    weights_file: str
    beside: Beside | None = None
    held_out: int | None = None
    trained_on: int | None = None

    def __post_init__(self) -> None:
        classes = len(self.classes)
        lengths = {
            "train_counts": len(self.train_counts),
            "val_counts": len(self.val_counts),
            "rows of confusion": len(self.confusion),
            **{f"columns of row {i} of confusion": len(row) for i, row in enumerate(self.confusion)},
        }
        wrong = [f"{length} {what}" for what, length in lengths.items() if length != classes]
        if wrong:
            raise ResultsError(f"Results have {classes} classes but {wrong[0]}: give one for each class.")
        epochs = [epoch.epoch for epoch in self.history]
        if self.best_epoch not in epochs:
            known = f"the epochs {epochs[0]} to {epochs[-1]}" if epochs else "no epochs"
            raise ResultsError(f"Results name {self.best_epoch} as the best epoch; their history has {known}.")

    @property
    def best(self) -> Epoch:
        """The epoch whose weights were kept as best."""
        return next(epoch for epoch in self.history if epoch.epoch == self.best_epoch)

    @property
    def metric(self) -> str:
        """What the score is called: "accuracy" of images, or "mIoU" where pixels have labels."""
        return self.scores.metric

    @property
    def task(self) -> str:
        """What was learnt; runs of before there were tasks have learnt to classify."""
        return self.settings.get("task", "classify")

    @property
    def scores(self) -> Scores:
        """What gets a label, and how the model is scored."""
        return SCORES[self.task]

    @property
    def val_images(self) -> int:
        """How many images were held out."""
        return sum(self.val_counts) if self.held_out is None else self.held_out

    @property
    def train_images(self) -> int:
        """How many images were trained on."""
        return sum(self.train_counts) if self.trained_on is None else self.trained_on

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON can hold them: NaN and infinity become the strings "nan", "inf" and "-inf"."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Results":
        """Rebuild results from what `to_dict` returned, or from its JSON."""
        try:
            values = dict(data)
            values.pop("loading", None)  # runs of before 0.1.0 have it
            values["history"] = tuple(_epoch(epoch) for epoch in values["history"])
            values["layers"] = tuple(_layer(layer) for layer in values["layers"])
            values["cost"] = None if values["cost"] is None else _cost(values["cost"])
            values["beside"] = None if values.get("beside") is None else _beside(values["beside"])
            values["confusion"] = tuple(tuple(row) for row in values["confusion"])
            for name in ("classes", "train_counts", "val_counts", "skipped"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ResultsError(
                f"These are not the results of a gradfilter run: {error!r}. Give an unchanged results.json."
            ) from error


def _plain(value: Any) -> Any:
    """Return `value` in lists, string-keyed dicts, strings, finite numbers, booleans and None."""
    match value:
        case None | bool() | str():
            return value
        case numbers.Integral():  # numpy's numbers are among these
            return int(value)
        case numbers.Real():
            return float(value) if math.isfinite(value) else str(float(value))
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
        case _:
            return str(value)


def _numbers(data: Mapping[str, Any], integers: tuple[str, ...]) -> dict[str, Any]:
    """Return `data` with floats where JSON has "nan" or dropped the decimal point, except for the fields in `integers`."""
    return {name: value if name in integers else float(value) for name, value in data.items()}


def _epoch(data: Mapping[str, Any]) -> Epoch:
    return Epoch(**_numbers(data, ("epoch",)))


def _layer(data: Mapping[str, Any]) -> Layer:
    height_width = data["patch"]
    return Layer(**{**data, "patch": None if height_width is None else (height_width[0], height_width[1])})


def _cost(data: Mapping[str, Any]) -> Cost:
    return Cost(**_numbers(data, ("batch", "resolution", "saved_bytes", "exact_saved_bytes")))


def _beside(data: Mapping[str, Any]) -> Beside:
    return Beside(**_numbers(data, ("name",)))
