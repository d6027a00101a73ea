"""Where the windows of a max pooling lie between tiled maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import numpy as np

from gradfilter.errors import InputError
from gradfilter.geometry.tiling import LIMIT, Pair, count_cells

_MOST_TAPS = 1 << 24
"""Taps along one axis that a table may have."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Along one axis, the first and the last pixel of each window; they may lie in the padding."""

    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, eq=False)
class Taps:
    """Along one axis, where the windows of a max pooling meet the map.

    Attributes:
        first: For each output pixel, the first pixel of its window on the map.
        count: How many taps of the window are on the map.
        place: The number, among the cells in reach, of the cell of each of those taps, ascending [out, kernel]; the entries
            after the first `count` are not read.
        dilation: Pixels from one tap to the next.
        reach: How many input cells the windows of one output cell can reach.
    """

    first: np.ndarray
    count: np.ndarray
    place: np.ndarray
    dilation: int
    reach: int


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a max pooling, and the input cells in reach of each output cell: those that its windows touch.

    Compared by identity: `make_windows` makes each once.

    Attributes:
        in_size: Size of the input.
        size: Size of the output.
        in_patch: Patch of the input.
        out_patch: Patch of the output.
        kernel: Size of a window; (0, 0) for windows of about equal size, as many as the output has pixels.
        stride: Pixels from one window to the next.
        padding: Padding before the first row and column.
        dilation: Pixels from one tap of a window to the next.
    """

    in_size: Pair
    size: Pair
    in_patch: Pair
    out_patch: Pair
    kernel: Pair = (0, 0)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def __post_init__(self) -> None:
        """Refuse sizes that no max pooling has."""
        for field in fields(self):
            name, pair = field.name, getattr(self, field.name)
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(n, int) for n in pair)):
                raise InputError(f"the windows of a max pooling got {name} = {pair!r}. Give two whole numbers (h, w).")
            if not (name in ("kernel", "padding") or min(pair) > 0) or not 0 <= min(pair) <= max(pair) < LIMIT:
                raise InputError(f"the windows of a max pooling got {name} = {pair}. Give at least 1, and less than {LIMIT}.")
        if self.is_adaptive:
            return
        if 0 in self.kernel:
            raise InputError(f"the windows of a max pooling got kernel = {self.kernel}, padding = {self.padding}.")
        sides = list(zip(self.in_size, self.kernel, self.stride, self.padding, self.dilation, strict=True))
        sizes = {ceiling: tuple(count_windows(*side, ceiling) for side in sides) for ceiling in (False, True)}
        if self.size not in sizes.values() or any(p > k // 2 for p, k in zip(self.padding, self.kernel, strict=True)):
            raise InputError(
                f"the windows of a max pooling got size = {self.size}. Torch's of a map of {self.in_size} by kernel = "
                f"{self.kernel}, stride = {self.stride}, padding = {self.padding}, dilation = {self.dilation} has another."
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """All attributes, one after the other."""
        pairs = self.in_size, self.size, self.in_patch, self.out_patch, self.kernel, self.stride, self.padding, self.dilation
        return tuple(number for pair in pairs for number in pair)

    @property
    def is_adaptive(self) -> bool:
        """Whether the windows are of about equal size."""
        return self.kernel == (0, 0)

    @cached_property
    def has_ceiling(self) -> bool:
        """Whether the last window may hang over the padding: `ceil_mode`."""
        sides = zip(self.in_size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return self.size != tuple(count_windows(*side, False) for side in sides)

    @cached_property
    def spans(self) -> tuple[Spans, Spans]:
        """The spans of the windows along rows and columns."""
        if self.is_adaptive:
            rows, columns = map(divide_windows, self.size, self.in_size)
        else:
            rows, columns = map(space_windows, self.size, self.kernel, self.stride, self.padding, self.dilation)
        return rows, columns

    @cached_property
    def ranges(self) -> tuple[tuple[np.ndarray, int], tuple[np.ndarray, int]]:
        """Per axis, for each output cell the first input cell that its windows reach, and how many from there on at most."""
        found = []
        for i, span in enumerate(self.spans):
            begin = np.arange(0, self.size[i], self.out_patch[i])
            low = np.maximum(span.start[begin], 0) // self.in_patch[i]
            last = np.minimum(begin + self.out_patch[i], self.size[i]) - 1
            high = np.minimum(span.end[last], self.in_size[i] - 1) // self.in_patch[i]
            found.append((low, int((high - low).max()) + 1))
        return found[0], found[1]

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Rows and columns as the C library reads them: first, count and the places in reach of each output pixel."""
        if self.taps is None:
            return None
        rows, columns = self.taps
        return lay_table(rows, columns.reach), lay_table(columns, 1)

    @property
    def first(self) -> tuple[np.ndarray, np.ndarray]:
        """Per axis, for each output cell the first input cell that its windows reach."""
        return self.ranges[0][0], self.ranges[1][0]

    @property
    def reach(self) -> Pair:
        """Per axis, how many input cells from there on they can reach."""
        return self.ranges[0][1], self.ranges[1][1]

    @cached_property
    def in_cells(self) -> Pair:
        """Cells of the input."""
        return count_cells(self.in_size, self.in_patch)

    @cached_property
    def out_cells(self) -> Pair:
        """Cells of the output."""
        return count_cells(self.size, self.out_patch)

    @cached_property
    def end(self) -> int:
        """What all indices are smaller than: that of a window which sees nothing but padding may lie outside the map."""
        (height, width), (rows, columns) = self.in_size, self.spans
        return max(height, int(rows.end.max()) + 1) * width + max(0, int(columns.end.max()) + 1 - width)

    @property
    def bits(self) -> int:
        """How many bits count the pixels of an output patch."""
        return (self.out_patch[0] * self.out_patch[1]).bit_length()

    @cached_property
    def taps(self) -> tuple[Taps, Taps] | None:
        """Per axis where the taps of windows of one size are; `None` where one sees nothing but padding, or for too many."""
        if self.is_adaptive or max(n * k for n, k in zip(self.size, self.kernel, strict=True)) > _MOST_TAPS:
            return None
        rows, columns = (self.find_taps(i) for i in (0, 1))
        return (rows, columns) if rows.count.all() and columns.count.all() else None

    def find_taps(self, i: int) -> Taps:
        """Return where the taps of the windows are along an axis, and in which of the cells in reach."""
        span, dilation = self.spans[i], self.dilation[i]
        pixel = np.arange(0, span.end[0] - span.start[0] + 1, dilation) + span.start[:, None]
        inside = (pixel >= 0) & (pixel < self.in_size[i])
        lead = inside.argmax(1)
        pixel += lead[:, None] * dilation
        cell = np.repeat(self.first[i], min(self.out_patch[i], self.size[i]))[: len(span.start)]
        place = pixel // self.in_patch[i] - cell[:, None]
        return Taps(pixel[:, 0], inside.sum(1), place, dilation, self.reach[i])


make_windows = lru_cache(maxsize=256)(Windows)


def windows_from(numbers: Sequence[int]) -> Windows:
    """Return the windows with these `numbers`."""
    return make_windows(*zip(numbers[::2], numbers[1::2], strict=True))


def count_windows(size: int, kernel: int, stride: int, padding: int, dilation: int, has_ceiling: bool) -> int:
    """Return how many windows torch has along one axis; with a ceiling the last one may hang over, but begins on the map."""
    rest = size + 2 * padding - dilation * (kernel - 1) - 1  # pixels for the windows behind the first one
    if not has_ceiling:
        return rest // stride + 1
    count = -(-rest // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding else count


def space_windows(count: int, kernel: int, stride: int, padding: int, dilation: int) -> Spans:
    """Return along one axis the spans of so many windows of a max pooling."""
    start = np.arange(count) * stride - padding
    return Spans(start, start + dilation * (kernel - 1))


def divide_windows(count: int, size: int) -> Spans:
    """Return along one axis the spans of so many windows of about equal size."""
    number = np.arange(count)
    return Spans(number * size // count, -(-(number + 1) * size // count) - 1)


def lay_table(taps: Taps, step: int) -> np.ndarray:
    """Return one axis as the C library reads it, with `step` from one place in reach to the next."""
    return np.ascontiguousarray(np.column_stack([taps.first, taps.count, taps.place * step]), dtype=np.int32)
