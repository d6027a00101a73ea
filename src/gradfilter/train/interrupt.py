"""End a run when asked to from outside: after the step at work, with a checkpoint."""

from __future__ import annotations

import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradfilter.errors import GradFilterError


class InterruptedRunError(GradFilterError, RuntimeError):
    """Report a run that was stopped from outside, after its checkpoint was written."""


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Let Ctrl-C and SIGTERM end the run after the step at work, with a checkpoint; a second one ends it at once."""
    asked: list[int] = []

    def ask(number: int, frame: types.FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, before[number])

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before: dict[int, Any] = {number: signal.signal(number, ask) for number in numbers}
    except ValueError:  # not the main thread: then signals are somebody else's
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
