"""Use what a run has made: judge it on labelled images, classify others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import nn

from gradfilter.data import ImageSet, Transform, load_data, make_transforms
from gradfilter.data.check import check_files
from gradfilter.data.images import FileReader
from gradfilter.errors import CheckpointError, DataError
from gradfilter.models import make_model
from gradfilter.outputs import find_logits
from gradfilter.train.batches import explain_workers
from gradfilter.train.checkpoint import load_checkpoint
from gradfilter.train.feed import Feed
from gradfilter.train.folder import BEST, CONFIG
from gradfilter.train.job import choose_images, make_fabric
from gradfilter.train.judge import Judged, judge
from gradfilter.train.settings import Settings
from gradfilter.train.watch import Watch

Part = Literal["val", "test", "train"]


@dataclass(frozen=True)
class Classifier:
    """A trained classifier, as a checkpoint describes it.

    Attributes:
        model: In eval mode, without a plan.
        classes: Names of its outputs.
        transform: From image to input.
        file: Where it comes from.
        held_out: Fingerprint of the images that the run held out, without their contents.
    """

    model: nn.Module
    classes: tuple[str, ...]
    transform: Transform
    file: Path
    held_out: str

    @classmethod
    def load(cls, run: str | Path) -> Classifier:
        """Load the best weights of a run, given its folder, or a checkpoint, given its file."""
        path = Path(run)
        file = path / BEST if path.is_dir() else path
        weights, _, about = load_checkpoint(file)
        if about.get("task", "classify") != "classify":
            raise CheckpointError(
                f"'{file}' is of a run with --task {about['task']}, and no classifier. Its weights load with make_model("
                f"{about['model']!r}, weights='{file}')."
            )
        model = make_model(about["model"], classes=len(about["classes"]))
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(
                f"the weights of '{file}' do not fit the model {about['model']!r} any more: {error}"
            ) from error
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        _, transform = make_transforms(about["resolution"], about["mean"], about["std"], "none", flips=False)
        return cls(model.eval(), tuple(about["classes"]), transform, file, about["held_out"])

    def judge(self, images: ImageSet, batch: int = 64, workers: int = 0, watch: Watch | None = None) -> Judged:
        """Run over labelled images; their classes have to be the classifier's."""
        if images.classes != self.classes:
            raise DataError(explain_classes(images, self))
        fabric = make_fabric(Settings(), Path())
        device: Any = fabric.device
        feed = Feed(images, self.transform, self.model.to(device), device, batch, None, 0, workers, training=False)
        with explain_workers():
            return judge(self.model, feed, fabric, watch or Watch())

    def predict(self, files: Sequence[str | Path], batch: int = 64) -> Iterator[tuple[str, list[tuple[str, float]]]]:
        """Classify image files: each file with its classes, the likeliest first, and their probabilities."""
        names = [str(file) for file in files]
        reader = FileReader(Path(), tuple(names), tuple("" for _ in names))
        for start in range(0, len(names), batch):
            chunk = names[start : start + batch]
            images = torch.stack([self.transform(reader(start + i)) for i in range(len(chunk))])
            with torch.inference_mode():
                rows = find_logits(self.model(images.contiguous(memory_format=torch.channels_last))).softmax(1)
            for name, row in zip(chunk, rows, strict=True):
                order = row.argsort(descending=True, stable=True).tolist()
                yield name, [(self.classes[i], float(row[i])) for i in order]


def find_judged_images(classifier: Classifier, data: str | None, part: Part) -> ImageSet:
    """Return the images to judge a classifier on: a part of the run's own data, or of others.

    Of other images without a split all are taken. Where they turn out to be the run's own, in another place, only those are
    that the run held out.
    """
    if data is None:
        loaded = choose_images(load_settings(classifier.file), Watch(), None)
        if loaded.val.fingerprint(contents=False) != classifier.held_out:
            raise DataError(
                f"the images of the run in '{classifier.file.parent}' are not what they were: some that would be held out now "
                "may have been trained on. Give other images with --data."
            )
    else:
        settings = load_settings(classifier.file)
        loaded = load_data(data, root=settings.root, val_share=settings.val_share, seed=settings.seed)
        if part == "val" and loaded.made and loaded.val.fingerprint(contents=False) != classifier.held_out:
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


def explain_classes(images: ImageSet, classifier: Classifier) -> str:
    """Return the error text for images of other classes."""
    ours, theirs = set(classifier.classes), set(images.classes)
    sides = [
        f"only in {what}: {', '.join(sorted(names)[:5])}{', …' if len(names) > 5 else ''}"
        for what, names in ((images.name, theirs - ours), ("the classifier", ours - theirs))
        if names
    ]
    return (
        f"{images.name} has other classes than the classifier of {classifier.file} ({'; '.join(sides)}). Give images with a "
        "folder for each of its classes, named alike."
    )
