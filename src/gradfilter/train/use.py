"""Use what a run has made: judge it on labelled images, label others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from gradfilter.data import Evaluate, ImageSet, MaskSet
from gradfilter.data.check import check_files
from gradfilter.data.images import FileReader
from gradfilter.errors import CheckpointError, DataError, SettingsError
from gradfilter.models import make_model
from gradfilter.train.batches import explain_workers
from gradfilter.train.checkpoint import load_checkpoint
from gradfilter.train.feed import Feed
from gradfilter.train.folder import BEST, CONFIG
from gradfilter.train.job import choose_images, make_fabric
from gradfilter.train.judge import Judged, judge
from gradfilter.train.settings import Settings
from gradfilter.train.task import Task, find_task
from gradfilter.train.watch import Watch

Part = Literal["val", "test", "train"]


@dataclass(frozen=True)
class Prediction:
    """What a trained model says of an image.

    Attributes:
        file: The image's.
        classes: The classes, each with its probability, or its share of the pixels; the largest first.
        labels: Of its pixels, [H, W], where these have labels.
    """

    file: str
    classes: list[tuple[str, float]]
    labels: Tensor | None


@dataclass(frozen=True)
class Trained:
    """A trained model, as a checkpoint describes it.

    Attributes:
        model: In eval mode, without a plan.
        task: What it has learnt.
        classes: Names of its outputs.
        transform: From image to input.
        file: Where it comes from.
        held_out: Fingerprint of the images that the run held out, without their contents.
        evaluate: How it sees images where pixels get labels.
        values: What stands for each class in mask files.
        batch: How many images it is used for at a time, where nothing is said.
    """

    model: nn.Module
    task: Task
    classes: tuple[str, ...]
    transform: Any
    file: Path
    held_out: str
    evaluate: Evaluate
    values: tuple[int, ...]
    batch: int

    @classmethod
    def load(cls, run: str | Path, evaluate: Evaluate | None = None) -> Trained:
        """Load the best weights of a run, given its folder, or a checkpoint, given its file.

        Args:
            run: The folder or the file.
            evaluate: How to show images to a model that labels pixels, where not as in the run.
        """
        path = Path(run)
        file = path / BEST if path.is_dir() else path
        weights, _, about = load_checkpoint(file)
        task, classes = find_task(about.get("task", "classify")), tuple(about["classes"])
        if evaluate and "evaluate" not in about:
            raise SettingsError(
                f"--evaluate {evaluate} is for --task segment, but '{file}' is of --task {task.name}. Leave it out."
            )
        model = make_model(about["model"], classes=len(classes))
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(
                f"the weights of '{file}' do not fit the model {about['model']!r} any more: {error}"
            ) from error
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        _, transform = task.make_transforms(about["resolution"], about["mean"], about["std"], "none", flips=False)
        frame = evaluate or about.get("evaluate", "whole")
        values = tuple(about.get("values") or range(len(classes)))
        batch = about.get("batch", 64)
        return cls(model.eval(), task, classes, transform, file, about["held_out"], frame, values, batch)

    def judge(self, images: Any, batch: int | None = None, workers: int = 0, watch: Watch | None = None) -> Judged:
        """Run over labelled images, an `ImageSet` or a `MaskSet`; their classes have to be the model's."""
        if images.classes != self.classes:
            raise DataError(explain_classes(images, self))
        fabric = make_fabric(Settings(), Path())
        device: Any = fabric.device
        common: dict[str, Any] = {"task": self.task, "evaluate": self.evaluate, "views": None, "seed": 0, "training": False}
        feed = Feed(images, self.transform, self.model.to(device), device, batch or self.batch, workers=workers, **common)
        with explain_workers():
            return judge(self.model, feed, fabric, watch or Watch())

    def predict(self, files: Sequence[str | Path]) -> Iterator[Prediction]:
        """Label image files, or their pixels."""
        names = [str(file) for file in files]
        reader = FileReader(Path(), tuple(names), tuple("" for _ in names))
        for start in range(0, len(names), self.batch):
            chunk = names[start : start + self.batch]
            with torch.inference_mode():
                found = self.task.predict(self, [reader(start + i) for i in range(len(chunk))])
            for name, (shares, labels) in zip(chunk, found, strict=True):
                order = shares.argsort(descending=True, stable=True).tolist()
                yield Prediction(name, [(self.classes[i], float(shares[i])) for i in order], labels)


def find_judged_images(trained: Trained, data: str | None, part: Part) -> Any:
    """Return the images to judge a model on: a part of the run's own data, or of others.

    Of other images without a split all are taken. Where they turn out to be the run's own, in another place, only those are
    that the run held out.
    """
    settings = load_settings(trained.file)
    if data is None:
        loaded = choose_images(settings, Watch(), None)
        if loaded.val.fingerprint(contents=False) != trained.held_out:
            raise DataError(
                f"the images of the run in '{trained.file.parent}' are not what they were: some that would be held out now "
                "may have been trained on. Give other images with --data."
            )
    else:
        loaded = trained.task.load(dataclasses.replace(settings, data=data, strict=False, download=False))
        if part == "val" and loaded.made and loaded.val.fingerprint(contents=False) != trained.held_out:
            return loaded.join()
    images = {"train": loaded.train, "val": loaded.val, "test": loaded.test}[part]
    if images is None:
        raise DataError(f"the data have no {part} part. Give --part val.")
    return images


def load_settings(checkpoint: Path) -> Settings:
    """Return the settings of the run that wrote a checkpoint."""
    path = checkpoint.parent / CONFIG
    try:
        return Settings.from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the settings of the run, '{path}', cannot be read: {error}. It lies beside the checkpoint: move both together."
        ) from error


def find_image_files(paths: Iterable[str | Path]) -> tuple[list[str], tuple[str, ...]]:
    """Return the image files among files and folders, and "path: reason" for those that cannot be read."""
    found: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"'{path}' does not exist. Give image files, or folders of them.")
        below = (file for file in path.rglob("*") if not any(part.startswith(".") for part in file.relative_to(path).parts))
        inside = sorted(file for file in below if file.is_file())
        found += [str(file) for file in (inside if path.is_dir() else [path])]
    checked = check_files(found)
    if not checked.stamps:
        reasons = f": {checked.skipped[0]}" if checked.skipped else ""
        raise DataError(f"there is no image among {', '.join(map(str, paths))}{reasons}. Give image files, or folders of them.")
    return [file for file in found if file in checked.stamps], checked.skipped


def explain_classes(images: ImageSet | MaskSet, trained: Trained) -> str:
    """Return the error text for images of other classes."""
    ours, theirs = set(trained.classes), set(images.classes)
    sides = [
        f"only in {what}: {', '.join(sorted(names)[:5])}{', …' if len(names) > 5 else ''}"
        for what, names in ((images.name, theirs - ours), ("the model", ours - theirs))
        if names
    ]
    return (
        f"{images.name} has other classes than the model of {trained.file} ({'; '.join(sides) or 'in another order'}). Give "
        f"data with {trained.task.layout}."
    )
