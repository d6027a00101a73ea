"""What the training loop takes its batches from: images for the whole model, or cached cuts for the part behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfilter.apply import keep_state, load_keep_state_
from gradfilter.data import Evaluate, ImageSet, MaskSet, MaskTransform, Transform
from gradfilter.errors import SettingsError
from gradfilter.hooks import find_applied
from gradfilter.outputs import find_logits
from gradfilter.train.batches import load, seeded, shuffle
from gradfilter.train.cache import Cache, Place, build_cache, make_key, refuse_trunk
from gradfilter.train.record import Record, TrunkError
from gradfilter.train.task import CLASSIFY, Task
from gradfilter.train.trunk import Trunk
from gradfilter.train.watch import Watch, follow


@dataclass
class Feed:
    """Batches of one set of images, ready to run.

    Attributes:
        images: The set.
        transform: From image to input.
        model: The model to run them through.
        device: Where it is.
        batch: Images per batch.
        views: How many views of each image there are, in turn; None for a new one each epoch.
        seed: Of the augmentation.
        workers: Processes that load images.
        training: Whether the model runs in training mode.
        cache: The cuts of all images and views, where they are kept.
        trunk: Runs the model on them.
        records: Of its forward, by number of images: a whole batch, and the last one of an epoch.
        task: What is learnt of the images.
        evaluate: How images with masks are shown to the model where it is judged.
    """

    images: ImageSet | MaskSet
    transform: Transform | MaskTransform
    model: nn.Module
    device: torch.device
    batch: int
    views: int | None
    seed: int
    workers: int
    training: bool
    cache: Cache | None = None
    trunk: Trunk | None = None
    records: dict[int, Record] = field(default_factory=dict)
    task: Task = CLASSIFY
    evaluate: Evaluate = "whole"

    def __post_init__(self) -> None:
        """Keep the labels as a tensor; those of pixels are loaded with their images."""
        self.labels = torch.tensor(self.images.labels) if isinstance(self.images, ImageSet) else torch.empty(0)
        self.rows = self.task.make_rows(self.images, self.transform, self.seed)

    def make_input(self, count: int) -> Tensor:
        """Return the first images of the set, as the model gets them."""
        return self.make_batch(count)[0]

    def make_batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first images of the set, as the model gets them, and their labels."""
        rows, images, *loaded = next(load(self.rows, [torch.arange(min(count, len(self.images)))], 0))
        return images.to(self.device), self.find_labels(rows, loaded)

    def first(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the first batches of the first epoch: images and labels."""
        batches = shuffle(len(self.images), self.seed, 0).split(self.batch)[:count]
        for rows, images, *loaded in load(self.rows, batches, self.workers):
            yield images.to(self.device), self.find_labels(rows, loaded)

    def find_labels(self, rows: Tensor, loaded: Sequence[Tensor]) -> Tensor:
        """Return the labels of a batch: those that were loaded with it, or else the images'."""
        return (loaded[0].long() if loaded else self.labels[rows % len(self.images)]).to(self.device)

    def keep(self, place: Place, folder: Path, watch: Watch, shared: dict[str, Cache] | None = None) -> None:
        """Compute what the frozen layers make of every image and view, or find it on disk; take it from there from now on."""
        applied = find_applied(self.model)
        if applied is not None and applied.plan.trunk == "bfloat16" and not applied.is_exact:
            raise SettingsError(
                f"--cache {place} keeps what frozen layers make of an image as the model computes it, but the plan has a trunk "
                "in bfloat16, which saves nothing where frozen layers run once. Use --trunk float32, or --cache off."
            )
        trunk = Trunk(self.model)
        views = self.views if self.views is not None and self.transform.is_random else 1
        count = len(self.images)
        whole = torch.arange(min(self.batch, count))
        last = count % len(whole) or len(whole)
        self.records = {size: self.record(trunk, size) for size in {len(whole), last}}
        with self.mode(), untouched(self.model):
            about = self.images.fingerprint(), repr(self.transform), f"{views} views, seed {self.seed}"
            key = make_key(trunk, self.records[len(whole)], *about)
            batches = [rows + view * count for view in range(views) for rows in torch.arange(count).split(self.batch)]
            loaded = follow(load(self.rows, batches, self.workers), "trunk cache", views * count, watch)
            self.cache = build_cache(
                trunk,
                map(self.pack, loaded),
                self.pack(next(load(self.rows, [whole], 0)))[1:],
                views * count,
                last=last,
                place=place,
                folder=folder,
                key=key,
                tell=watch.tell,
                shared=shared,
            )
        self.trunk = trunk

    def pack(self, loaded: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return rows, images and labels as a cache takes them: labels of pixels are bytes."""
        rows, images, *labels = loaded
        return rows, images.to(self.device), *(x.to(torch.uint8) for x in labels)

    def record(self, trunk: Trunk, size: int) -> Record:
        """Record a forward of so many images, without content: only their shape matters."""
        side = self.transform.resolution
        empty = torch.zeros(size, 3, side, side, device=self.device).contiguous(memory_format=torch.channels_last)
        with self.mode(), untouched(self.model):
            try:
                return trunk.find_record(empty)
            except TrunkError as error:
                refuse_trunk(str(error))

    def run(self, order: Tensor, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Give batches of images in this order, from batch number `start`: labels, and a function that runs the model."""
        view = epoch if self.views is None else epoch % self.views
        offset = view * len(self.images) if self.transform.is_random else 0
        batches = (order + offset).split(self.batch)[start:]
        yield from self.run_cut(batches) if self.cache is not None else self.run_images(batches)

    def run_images(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Give batches that run through the whole model."""
        for rows, images, *loaded in load(self.rows, batches, self.workers):
            yield self.find_labels(rows, loaded), lambda images=images: self.take(self.model(images.to(self.device)))

    def run_cut(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Give batches that run from the cut."""
        assert self.cache is not None
        for rows in batches:
            record = self.records[len(rows)]
            stored = self.cache.read(rows)
            cut = [x.to(self.device) for x in stored[: len(record.cut)]]
            yield self.find_labels(rows, stored[len(cut) :]), lambda cut=cut, record=record: self.forward_cut(cut, record)

    def forward_cut(self, cut: list[Tensor], record: Record) -> Tensor:
        """Run the model from the cut."""
        assert self.trunk is not None
        try:
            return self.take(self.trunk.run(record, cut))
        except TrunkError as error:
            refuse_trunk(str(error))

    def take(self, outputs: Any) -> Any:
        """Return what the model says: in training all of it, for the loss to take what it needs, else the scores alone."""
        return outputs if self.training else find_logits(outputs)

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Put the model in this feed's mode for a while."""
        before = self.model.training
        self.model.train(self.training)
        try:
            yield
        finally:
            self.model.train(before)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Let a model run without a trace: statistics that moved are put back, and so are what keeps remember and random states."""
    remembered = keep_state(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with seeded(0):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        load_keep_state_(model, remembered)
