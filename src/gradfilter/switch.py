"""What the calling thread switches off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Switch:
    """Something that is on, unless the calling thread is inside `hold_off`.

    Other threads do not see it: those that run already, and those that are started inside. `asyncio` tasks and what is run by
    `asyncio.to_thread` start with what holds where they are made. A generator that yields inside `hold_off` holds it off for
    its caller too, until it is resumed or closed; that has to be in the same thread.

    Attributes:
        depth: Returns how many times the calling thread is inside; a context variable is read faster than `threading.local`.
    """

    def __init__(self, name: str) -> None:
        """Start on in all threads; the name is for debuggers."""
        self._depth = ContextVar(name, default=0)
        self.depth = self._depth.get

    @contextmanager
    def hold_off(self) -> Iterator[None]:
        """Switch it off in the calling thread; calls nest."""
        self._depth.set(self.depth() + 1)
        try:
            yield
        finally:
            self._depth.set(self.depth() - 1)
