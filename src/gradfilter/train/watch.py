"""What is told while a run goes on: to the user's screen, and to log files."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradfilter.files import replace_file
from gradfilter.report.results import Epoch


@dataclass(frozen=True)
class Step:
    """How far a run is.

    Attributes:
        epoch: Number of the epoch, from 1.
        epochs: How many there are.
        batch: Batches of this epoch that are done.
        batches: How many there are.
        loss: Mean over the epoch so far.
        accuracy: Share of training images classified rightly, over the epoch so far.
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


class Watch:
    """Is told what happens in a run. This one ignores it; the command line shows it."""

    def tell(self, text: str) -> None:
        """Take a line of text."""

    def step(self, step: Step) -> None:
        """Take note of a step."""

    def epoch(self, epoch: Epoch, epochs: int, is_best: bool) -> None:
        """Take note of an epoch."""


def write_csv(path: Path, history: Sequence[Epoch]) -> None:
    """Write the epochs as CSV: the whole history each time, so that it is right after a resumed run too."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([field.name for field in dataclasses.fields(Epoch)])
    writer.writerows(dataclasses.astuple(epoch) for epoch in history)
    replace_file(path, text.getvalue())
