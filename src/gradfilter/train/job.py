"""All that a run needs, made from its settings: data, model, plan, optimizer. Nothing here trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradfilter.apply import apply_, freeze_
from gradfilter.data import Data, ImageSet, MaskSet
from gradfilter.errors import SettingsError
from gradfilter.fidelity import Loss
from gradfilter.files import remove_drafts
from gradfilter.hooks import find_applied
from gradfilter.keep import FULL
from gradfilter.models import find_info, join_encoder, make_model
from gradfilter.models.extras import import_extra
from gradfilter.models.segmenters import add_auxiliary
from gradfilter.plan import Plan, find_layers
from gradfilter.planner import Chosen, choose_plan
from gradfilter.report.results import Layer
from gradfilter.survey import MEMORY
from gradfilter.train.batches import mix
from gradfilter.train.cache import Cache
from gradfilter.train.checkpoint import check_folder
from gradfilter.train.feed import Feed, untouched
from gradfilter.train.folder import LOGS, PLAN
from gradfilter.train.settings import Settings
from gradfilter.train.task import Task, find_task
from gradfilter.train.watch import Watch

SURVEYED = 2
"""A plan for a budget is chosen on so many batches."""
WEIGHTS, LIMIT = 16, 18
"""More uses of a seed, besides those of `gradfilter.train.batches`."""


@dataclass
class Job:
    """A run, ready to start.

    Attributes:
        settings: With resolution, mean and std filled in.
        folder: Where everything is written.
        data: The images; `train` is the part to train on.
        model: Under its plan.
        plan: The plan.
        fabric: Lightning's device, precision and loggers.
        optimizer: Over the trained parameters.
        train: Batches to train on.
        val: Batches held out.
        watch: Is told what happens.
        saved_bytes: What autograd holds for a batch, once measured.
    """

    settings: Settings
    folder: Path
    data: Data
    model: nn.Module
    plan: Plan
    fabric: Any
    optimizer: torch.optim.Optimizer
    train: Feed
    val: Feed
    watch: Watch
    saved_bytes: int = 0

    @property
    def task(self) -> Task:
        """Return what is learnt."""
        return find_task(self.settings.task)

    @cached_property
    def loss(self) -> Loss:
        """Return the loss that is trained on."""
        return make_loss(self.settings, self.data.train)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Return what tells the images from others, by what they are for."""
        return {"training images": self.data.train.fingerprint(), "held-out images": self.data.val.fingerprint()}

    @property
    def trained(self) -> list[nn.Parameter]:
        """Return the trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def batches(self) -> int:
        """Return the number of steps in an epoch."""
        return -(-len(self.data.train) // self.settings.batch)

    def describe_model(self) -> dict[str, Any]:
        """Return what it takes to use the weights: the model's name, its classes and its input."""
        settings, classes = self.settings, list(self.data.train.classes)
        return {
            "task": settings.task,
            "model": settings.model,
            "classes": classes,
            "resolution": settings.resolution,
            "mean": list(settings.mean or ()),
            "std": list(settings.std or ()),
            "held_out": self.data.val.fingerprint(contents=False),
            **self.task.describe(settings, self.data.train),
        }

    def describe_layers(self) -> tuple[Layer, ...]:
        """Return what becomes of every layer; its patch where a forward pass has told it."""
        applied = find_applied(self.model)
        assert applied is not None
        planned = applied.resolved.convs | applied.resolved.linears
        layers: list[Layer] = []
        for name, module in find_layers(self.model).items():
            trained = any(p.requires_grad for p in module.parameters())
            patch = applied.patches.get(name)
            choice = planned.get(name) if trained and patch else None
            backward = "frozen" if not trained else "exact" if choice is None else str(choice)
            keep = None if choice is None or choice.keep == FULL else str(choice.keep)
            layers.append(Layer(name, backward, patch, trained, sum(p.numel() for p in module.parameters()), keep))
        return tuple(layers)


def prepare(settings: Settings, watch: Watch, data: Data | None = None) -> Job:
    """Make a run from its settings, which are filled in; what can be found wrong before training is found here."""
    folder = settings.folder
    for package in ("matplotlib", "torchmetrics", "safetensors.torch"):  # not after hours of training
        import_extra(package, "gradfilter train")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    plan, fabric = None if settings.memory else settings.make_plan(), make_fabric(settings, folder)
    data = choose_images(settings, watch, data)
    model = make_new_model(settings, data.train)
    if plan is None:
        plan = find_plan_for(settings, data, model.to(fabric.device), fabric, watch)
    (freeze_ if settings.exact else apply_)(model, plan)
    size = sum(p.numel() * p.element_size() * (4 if p.requires_grad else 2) for p in model.parameters())
    check_folder(folder, 2 * size)  # best and last, and a draft of each, with the optimizer's state
    model.to(fabric.device)
    train, val = make_feeds(settings, data, model, fabric.device)
    check_last_batch(settings, plan, train)
    return Job(settings, folder, data, model, plan, fabric, make_optimizer(settings, model), train, val, watch)


def fill_cache(job: Job, shared: dict[str, Cache] | None = None) -> None:
    """Compute what the frozen layers make of all images, where the settings say so; the model has its weights by now."""
    settings, own = job.settings, job.folder / "cache"
    remove_drafts(own)  # but not those in a folder that is shared: they may be another run's, which is at work
    if settings.cache != "off":
        with job.fabric.autocast():  # as the loop runs it
            for feed in (job.train, job.val):
                feed.keep(settings.cache, Path(settings.cache_folder or own), job.watch, shared)


def fill_in(settings: Settings) -> Settings:
    """Return the settings with what is not said taken from the model, and with absolute paths."""
    info, name = find_info(settings.model, settings.encoder), join_encoder(settings.model, settings.encoder)
    return dataclasses.replace(
        settings.make_absolute(),
        model=add_auxiliary(name) if settings.auxiliary else name,
        encoder=None,
        resolution=settings.resolution or info.resolution,
        mean=settings.mean or info.mean,
        std=settings.std or info.std,
    )


def choose_images(settings: Settings, watch: Watch, data: Data | None) -> Data:
    """Load the data where they are not given; take the part, and as many of its images, as the settings say."""
    task = find_task(settings.task)
    data = data or task.load(settings)
    train = data.train
    if settings.parts > 1 or settings.partition is not None:
        partition = find_partition(settings, train)
        for i, kl in enumerate(partition.kl_divergence()):
            mine = " (trained on)" if i == settings.part else ""
            watch.tell(f"part {i} of {len(partition.parts)}: {len(partition.parts[i])} images, KL divergence {kl:.3f}{mine}")
        train = train.select(partition.parts[settings.part])
    if settings.limit is not None and settings.limit < len(train):
        train = train.select(draw_evenly(task.find_labels(train), settings.limit, settings.seed))
    watch.tell(describe_balance("to train on", train))
    watch.tell(describe_balance("held out", data.val))
    for line in data.skipped[:10]:
        watch.tell(f"skipped {line}")
    if len(data.skipped) > 10:
        watch.tell(f"skipped {len(data.skipped) - 10} more files, see the report")
    return dataclasses.replace(data, train=train)


def find_partition(settings: Settings, images: ImageSet) -> Any:
    """Return the partition that the settings describe: from its file where there is one, else made and kept there."""
    from gradfilter.data.partition import Partition, make_partition

    if settings.partition is not None and Path(settings.partition).exists():
        partition = Partition.load(settings.partition, images)
        if settings.part >= len(partition.parts):
            raise SettingsError(
                f"--part {settings.part} is none of the {len(partition.parts)} parts in '{settings.partition}', which count "
                "from 0. Give another one."
            )
        return partition
    partition = make_partition(images, settings.parts, shards=settings.shards, seed=settings.seed)
    if settings.partition is not None:
        partition.save(settings.partition)
    return partition


def draw_evenly(given: Sequence[int], count: int, seed: int) -> list[int]:
    """Return the indices of so many images, in equal numbers from all labels as far as they have them."""
    generator = np.random.default_rng([seed, LIMIT])
    order = generator.permutation(len(given))
    labels = np.asarray(given)[order]
    rank = np.zeros(len(given), dtype=np.int64)
    for label in np.unique(labels):
        rank[labels == label] = np.arange((labels == label).sum())
    return sorted(order[np.lexsort((order, rank))[:count]].tolist())


def describe_balance(what: str, images: ImageSet | MaskSet) -> str:
    """Return one line on how many images each class has, or is seen in."""
    counts = images.counts()
    least, most = int(np.argmin(counts)), int(np.argmax(counts))
    line = f"{len(images)} images {what}, {len(images.classes)} classes"
    if counts[least] == counts[most]:
        return f"{line} of {counts[most]} each"
    return f"{line}: from {counts[least]} ({images.classes[least]}) to {counts[most]} ({images.classes[most]}) each"


def make_trained_model(settings: Settings, plan: Plan, images: ImageSet | MaskSet) -> nn.Module:
    """Return the model with its weights, for the classes of the images, under the plan."""
    return (freeze_ if settings.exact else apply_)(make_new_model(settings, images), plan)


def make_new_model(settings: Settings, images: ImageSet | MaskSet) -> nn.Module:
    """Return the model with its weights, for the classes of the images, without a plan."""
    generator = torch.Generator().manual_seed(mix(settings.seed, WEIGHTS))
    weights = None if settings.weights == "random" else settings.weights
    model = make_model(settings.model, weights=weights, classes=len(images.classes), generator=generator)
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return model.train()


def find_plan_for(settings: Settings, data: Data, model: nn.Module, fabric: Any, watch: Watch) -> Plan:
    """Return the plan for a budget of memory: that of the run to go on with, or one chosen on the first training batches."""
    kept = settings.folder / PLAN
    if settings.resume and kept.exists():
        return Plan.load(kept)
    assert settings.memory is not None
    chosen = choose_plan_for(settings, data, model, fabric, {MEMORY: settings.memory})
    watch.tell(
        f"plan for {settings.memory}: trains {len(chosen.plan.layers)} of {len(chosen.survey.layers)} layers, expected cosine "
        f"to the whole gradient {chosen.cosine:.3f}"
    )
    return chosen.plan


def choose_plan_for(
    settings: Settings, data: Data, model: nn.Module, fabric: Any, budgets: Mapping[str, str | float]
) -> Chosen:
    """Choose a plan on the first training batches, for budgets of a training step."""
    feed, _ = make_feeds(settings, data, model, fabric.device)
    options: dict[str, Any] = {"batch_norm": settings.choose_batch_norm(), "trunk": settings.trunk or "float32"}
    with fabric.autocast():
        return choose_plan(
            model, list(feed.first(SURVEYED)), make_loss(settings, data.train), budgets, settings.batch, **options
        )


def make_loss(settings: Settings, images: ImageSet | MaskSet) -> Loss:
    """Return the loss that is trained on, from a model's outputs and labels."""
    return find_task(settings.task).make_loss(settings, images)


def make_fabric(settings: Settings, folder: Path) -> Any:
    """Return Lightning's Fabric for the device and precision, with loggers."""
    fabric = import_extra("lightning.fabric", "gradfilter train")
    loggers = []
    if settings.tensorboard:
        import_extra("tensorboard", "--tensorboard")
        loggers.append(fabric.loggers.TensorBoardLogger(folder, name=LOGS, version=""))
    try:
        return fabric.Fabric(accelerator=settings.device, devices=1, precision=settings.precision, loggers=loggers)
    except (ValueError, RuntimeError) as error:
        raise SettingsError(f"--device {settings.device} --precision {settings.precision} cannot be had: {error}") from error


def make_feeds(settings: Settings, data: Data, model: nn.Module, device: torch.device) -> tuple[Feed, Feed]:
    """Return the batches to train on, and those held out."""
    assert settings.resolution is not None
    assert settings.mean is not None
    assert settings.std is not None
    task = find_task(settings.task)
    augmented, plain = task.make_transforms(
        settings.resolution, settings.mean, settings.std, settings.augment, flips=data.train.flips
    )
    common: dict[str, Any] = {"model": model, "device": device, "batch": settings.batch, "seed": settings.seed}
    common |= {"workers": settings.workers, "task": task, "evaluate": settings.evaluate}
    return (
        Feed(data.train, augmented, views=settings.views, training=True, **common),
        Feed(data.val, plain, views=None, training=False, **common),
    )


def check_last_batch(settings: Settings, plan: Plan, feed: Feed) -> None:
    """Refuse to come to a last batch of one image where torch's batch norm has no statistics for it."""
    if plan.batch_norm != "train" or (len(feed.images) % settings.batch or settings.batch) > 1:
        return
    try:
        with torch.no_grad(), feed.mode(), untouched(feed.model):
            feed.model(feed.make_input(1))
    except ValueError as error:
        raise SettingsError(
            f"--batch_norm train needs several values for its statistics, but {len(feed.images)} images in batches of "
            f"{settings.batch} end with a single one. Give another --batch, or --batch_norm eval."
        ) from error


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer over the trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(trained, momentum=settings.momentum, **common)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer](trained, **common)
