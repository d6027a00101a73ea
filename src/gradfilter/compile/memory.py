"""Lay out the memory of a program: buffers whose lifetimes do not meet share an address."""

from __future__ import annotations

from collections.abc import Iterable

from gradfilter.compile.record import Buffer

ALIGNMENT = 64
"""Bytes: a line of the cache, and the widest vector."""


def place_apart(buffers: Iterable[Buffer]) -> tuple[dict[Buffer, int], int]:
    """Return an offset for each buffer, one behind the other, and the bytes of all."""
    offsets, end = {}, 0
    for buffer in buffers:
        offsets[buffer] = end
        end += round_up(buffer.bytes)
    return offsets, end


def place(buffers: Iterable[Buffer]) -> tuple[dict[Buffer, int], int]:
    """Return an offset for each buffer, so that those which are alive in the same step lie apart, and the bytes of all.

    The largest come first; each takes the lowest gap that is free for as long as it lives.
    """
    placed: list[tuple[int, int, Buffer]] = []
    offsets, end = {}, 0
    for buffer in sorted(buffers, key=lambda b: (-b.bytes, b.first)):
        size, at = round_up(buffer.bytes), 0
        meeting = sorted((a, z) for a, z, other in placed if other.first <= buffer.last and buffer.first <= other.last)
        for begin, stop in meeting:
            if at + size <= begin:
                break
            at = max(at, stop)
        offsets[buffer] = at
        placed.append((at, at + size, buffer))
        end = max(end, at + size)
    return offsets, end


def round_up(size: int) -> int:
    """Return the bytes that a buffer of some size takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT
