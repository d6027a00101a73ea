"""Batches of images in a seeded order, from any place in it.

Nothing random is kept between batches: the order of an epoch is a function of the seed and the epoch, what is done to an image
a function of the seed, the view and the image. So a run can go on from any batch, and workers change nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gradfilter.data import ImageSet, MaskSet, MaskTransform, Transform
from gradfilter.errors import DataError, GradFilterError
from gradfilter.train.lock import leave_locks

ORDER, VIEW, STEP = range(1, 4)
"""What a seed is for, so that no two uses of one seed draw the same numbers."""
GRACE = 10
"""Seconds that a worker works on after it was told to end."""


def mix(*numbers: int) -> int:
    """Return a seed that is a function of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def seeded(*numbers: int, device: torch.device | None = None) -> Iterator[None]:
    """Let torch's functions without a generator argument (transforms, dropout) draw as these numbers say; restore after.

    On the CPU, and on a device where one is named: the processes that load images must not touch an accelerator.
    """
    seed, devices = mix(*numbers), [] if device is None or device.type != "cuda" else [device]
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond: too long for each image
        for accelerator in devices:
            with torch.cuda.device(accelerator):
                torch.cuda.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Rows(Dataset[Any]):
    """The transformed images of a set: row `view * len(images) + i` is view `view` of image i."""

    images: ImageSet
    transform: Transform
    seed: int

    def __getitem__(self, row: int) -> tuple[int, Tensor]:
        view, index = divmod(row, len(self.images))
        image = self.images.read(index)
        if not self.transform.is_random:
            return row, self.transform(image)
        with seeded(self.seed, VIEW, view, index):
            return row, self.transform(image)

    def __getitems__(self, rows: list[int]) -> list[tuple[Any, ...]] | GradFilterError:
        """Give a batch, or the error that an image leads to: raised in a worker, it would have a traceback in its text."""
        try:
            return [self[row] for row in rows]
        except GradFilterError as error:
            return error

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class MaskRows(Rows):
    """The same of images with masks: each image comes with its labels."""

    images: MaskSet  # pyright: ignore[reportIncompatibleVariableOverride]
    transform: MaskTransform  # pyright: ignore[reportIncompatibleVariableOverride]

    def __getitem__(self, row: int) -> tuple[int, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        view, index = divmod(row, len(self.images))
        generator = torch.Generator().manual_seed(mix(self.seed, VIEW, view, index)) if self.transform.is_random else None
        return row, *self.transform(self.images.read(index), self.images.read_mask(index), generator)


def shuffle(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the images in an epoch."""
    return torch.from_numpy(np.random.default_rng([seed, ORDER, epoch]).permutation(count))


def load(rows: Rows, batches: Sequence[Tensor], workers: int) -> Iterator[tuple[Tensor, ...]]:
    """Give batches of rows: the rows, their images [N, 3, H, W], channels last, and, of images with masks, labels [N, H, W]."""
    loader = DataLoader(
        rows,
        batch_sampler=[batch.tolist() for batch in batches],
        num_workers=workers,
        generator=torch.Generator(),  # or the global one is drawn from
        collate_fn=collate,
        worker_init_fn=start_worker,
    )
    for batch in loader:
        if isinstance(batch, GradFilterError):
            raise batch
        yield batch


@contextmanager
def explain_workers() -> Iterator[None]:
    """Say what to do where a worker has died, which torch tells of at any moment."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise DataError(
            f"a process that loads images has died ({str(error).rstrip('. ')}). Memory may have run out: give fewer --workers, "
            "or a smaller --batch."
        ) from error


def start_worker(worker: int) -> None:
    """Let a worker work on for a while when all processes of a run are told to end: the step at work needs it."""
    leave_locks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE))


def collate(items: list[tuple[Any, ...]] | GradFilterError) -> tuple[Tensor, ...] | GradFilterError:
    """Return the rows, the images and, where there are masks, the labels of a batch; an error as it is."""
    if isinstance(items, GradFilterError):
        return items
    rows, images, *masks = zip(*items, strict=True)
    batch = torch.stack(images).contiguous(memory_format=torch.channels_last)
    return torch.tensor(rows), batch, *(torch.stack(labels) for labels in masks)
