"""What a run shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import time
from typing import IO, Any

from gradfilter.models.extras import import_extra
from gradfilter.report import Epoch
from gradfilter.train.watch import Step, Watch, Work

QUIET = 30.0
"""Seconds between two plain lines within an epoch, or other work."""


def make_screen(stream: IO[str] | None) -> Lines:
    """Return what fits the stream, which is None where the program was started with it closed."""
    if stream is None:
        return Lines(io.StringIO())
    return Bar(stream) if stream.isatty() else Lines(stream)


class Lines(Watch):
    """Plain lines: one for each epoch, and within long ones and other long work, one every half a minute."""

    def __init__(self, stream: IO[str]) -> None:
        """Write to a stream."""
        self.stream = stream
        self.said = time.monotonic()

    def tell(self, text: str) -> None:
        """Write a line."""
        print(text, file=self.stream, flush=True)
        self.said = time.monotonic()

    def step(self, step: Step) -> None:
        """Write a line where there was none for long."""
        if time.monotonic() - self.said > QUIET:
            self.tell(
                f"epoch {step.epoch} of {step.epochs}, batch {step.batch} of {step.batches}: {describe(step, self.metric)}"
            )

    def work(self, work: Work) -> None:
        """Write a line where there was none for long."""
        if time.monotonic() - self.said > QUIET:
            self.tell(f"{work.what}: {work.done} of {work.total}, {format_time(work.seconds_left)} left")

    def epoch(self, epoch: Epoch, epochs: int, is_best: bool) -> None:
        """Write what came of an epoch."""
        held_out = "" if epoch.val_accuracy != epoch.val_accuracy else f", held out {epoch.val_accuracy:.1%}"
        self.tell(
            f"epoch {epoch.epoch} of {epochs}: loss {epoch.train_loss:.3f}, {self.metric} {epoch.train_accuracy:.1%}{held_out}"
            f"{' (best)' if is_best else ''}, {epoch.images_per_second:.0f} images/s, {format_time(epoch.seconds)}"
        )

    def close(self) -> None:
        """End what is on the screen."""


class Bar(Lines):
    """A progress bar for the epoch or other work, and a line for each epoch that is done."""

    bar: Any = None
    title = ""

    def tell(self, text: str) -> None:
        """Write a line above the bar."""
        self.close()
        super().tell(text)

    def step(self, step: Step) -> None:
        """Move the bar."""
        self.show(f"epoch {step.epoch}/{step.epochs}", step.batch, step.batches, describe(step, self.metric))

    def work(self, work: Work) -> None:
        """Move a bar of the work's own."""
        self.show(work.what, work.done, work.total, f"{format_time(work.seconds_left)} left")
        if work.done == work.total:
            self.close()

    def show(self, title: str, done: int, total: int, text: str) -> None:
        """Move the bar of this title, in place of any other."""
        if title != self.title:
            self.close()
        if self.bar is None:
            tqdm = import_extra("tqdm", "The progress bar")
            self.title = title
            self.bar = tqdm.tqdm(
                total=total,
                file=self.stream,
                desc=title,
                bar_format="{desc} {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt}{postfix}",
                leave=False,
                dynamic_ncols=True,
            )
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def describe(step: Step, metric: str) -> str:
    """Return a step's figures in one line."""
    return (
        f"loss {step.loss:.3f}, {metric} {step.accuracy:.1%}, {step.images_per_second:.0f} images/s, "
        f"{step.saved_bytes / 1e6:.1f} MB held, {format_time(step.seconds_left)} left"
    )


def format_time(seconds: float) -> str:
    """Return a duration for reading."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min" if minutes else f"{rest} s"
