"""What is told while a run goes on: to the user's screen, and to log files."""

from __future__ import annotations

import csv
import dataclasses
import io
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gradfilter.files import replace_file
from gradfilter.report.results import Epoch

Batch = TypeVar("Batch", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Step:
    """How far a run is.

    Attributes:
        epoch: Number of the epoch, from 1.
        epochs: How many there are.
        batch: Batches of this epoch that are done.
        batches: How many there are.
        loss: Mean over the epoch so far.
        accuracy: The task's score on training images, over the epoch so far.
        images_per_second: Over the epoch so far.
        saved_bytes: What autograd holds for a batch, measured when the run began.
        seconds_left: Of the whole run, estimated.
    """

    epoch: int
    epochs: int
    batch: int
    batches: int
    loss: float
    accuracy: float
    images_per_second: float
    saved_bytes: int
    seconds_left: float


@dataclass(frozen=True)
class Work:
    """How far a long piece of work is that is no training.

    Attributes:
        what: What it is.
        done: Images of it that are done.
        total: How many there are.
        seconds_left: Of this work, estimated.
    """

    what: str
    done: int
    total: int
    seconds_left: float


class Watch:
    """Is told what happens in a run. This one ignores it; the command line shows it.

    Attributes:
        metric: What the score of a run is called.
    """

    metric = "accuracy"

    def tell(self, text: str) -> None:
        """Take a line of text."""

    def step(self, step: Step) -> None:
        """Take note of a step."""

    def work(self, work: Work) -> None:
        """Take note of work between the steps."""

    def epoch(self, epoch: Epoch, epochs: int, is_best: bool) -> None:
        """Take note of an epoch."""


def follow(batches: Iterable[Batch], what: str, total: int, watch: Watch) -> Iterator[Batch]:
    """Give batches, tuples that begin with a tensor of one number per image, and tell after each how far the work is."""
    begin, done = time.perf_counter(), 0
    for batch in batches:
        yield batch
        done += len(batch[0])
        watch.work(Work(what, done, total, (time.perf_counter() - begin) / done * (total - done)))


def write_csv(path: Path, history: Sequence[Epoch]) -> None:
    """Write the epochs as CSV: the whole history each time, so that it is right after a resumed run too."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([field.name for field in dataclasses.fields(Epoch)])
    writer.writerows(dataclasses.astuple(epoch) for epoch in history)
    replace_file(path, text.getvalue())
