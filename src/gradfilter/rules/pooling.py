"""Max pooling at patch resolution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter import native
from gradfilter.carriers import coarse, make_carrier
from gradfilter.emit import finish
from gradfilter.patches import Pair, constant, count_cells, count_dtype, is_nhwc, make_areas, map_size, pool_sum
from gradfilter.rules.conv import as_pair
from gradfilter.rules.reduce import fill_size, run_reduction
from gradfilter.tensor import PatchTensor, is_live, pixels, rule


@dataclass(frozen=True, eq=False)
class Spans:
    """Along one axis, the first and the last pixel of each window; they may lie in the padding."""

    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, eq=False)
class Windows:
    """Where the windows of a max pooling lie, in cells: the winner of an output pixel is in one of few input cells.

    `find_windows` makes each once, as `make_geometry` does.

    Attributes:
        width: Columns of the input.
        size: Size of the output.
        first: Per axis, for each output cell the first input cell that its windows reach.
        reach: Per axis, how many input cells from there on they can reach.
        in_cells: Cells of the input.
        in_patch: Patch of the input.
        out_patch: Patch of the output.
        end: What all indices are smaller than: that of a window which sees nothing but padding may lie outside the map.
    """

    width: int
    size: Pair
    first: tuple[np.ndarray, np.ndarray]
    reach: Pair
    in_cells: Pair
    in_patch: Pair
    out_patch: Pair
    end: int

    @property
    def bits(self) -> int:
        """How many bits count the pixels of an output patch."""
        return (self.out_patch[0] * self.out_patch[1]).bit_length()


@lru_cache(maxsize=256)
def find_windows(in_size: Pair, in_patch: Pair, size: Pair, out_patch: Pair, spans: tuple[Spans, Spans]) -> Windows:
    """Return the windows of a max pooling from a map of `in_size` to one of `size`."""
    first, reach = [], []
    for i, span in enumerate(spans):
        begin = np.arange(0, size[i], out_patch[i])
        low = np.maximum(span.start[begin], 0) // in_patch[i]
        last = np.minimum(begin + out_patch[i], size[i]) - 1
        high = np.minimum(span.end[last], in_size[i] - 1) // in_patch[i]
        first.append(low)
        reach.append(int((high - low).max()) + 1)
    (height, width), (rows, columns) = in_size, spans
    end = max(height, int(rows.end.max()) + 1) * width + max(0, int(columns.end.max()) + 1 - width)
    in_cells = count_cells(in_size, in_patch)
    return Windows(width, size, (first[0], first[1]), (reach[0], reach[1]), in_cells, in_patch, out_patch, end)


@constant
def find_target(windows: Windows, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the input cell of each (output cell, place in reach), flat [out cells · reach]."""
    h, w = (
        np.minimum(first[:, None] + np.arange(reach), cells - 1)
        for first, reach, cells in zip(windows.first, windows.reach, windows.in_cells, strict=True)
    )
    flat = h[:, None, :, None] * windows.in_cells[1] + w[None, :, None, :]
    return torch.tensor(flat.reshape(-1), device=device)


@constant
def find_first(windows: Windows, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return per axis, for each output pixel, the first input cell that the windows of its cell reach."""
    rows, columns = (
        torch.tensor(np.repeat(first, patch)[:size], device=device)
        for first, patch, size in zip(windows.first, windows.out_patch, windows.size, strict=True)
    )
    return rows, columns


@constant
def find_lanes(windows: Windows, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return per axis numbers of which the product, for each input pixel, counts it once in the bits of its cell.

    Cells in reach of one output cell differ in their row and column modulo the reach: that says which bits are whose. Double
    precision where single does not hold all of them.
    """
    (over, across), (high, wide), bits = windows.in_patch, windows.reach, windows.bits
    rows = np.arange(-(-windows.end // windows.width)) // over % high * wide
    columns = np.arange(windows.width) // across % wide
    precision = torch.float64 if high * wide * bits > SINGLE else torch.float32
    down, along = (torch.tensor(2.0 ** (bits * lane), dtype=precision, device=device) for lane in (rows, columns))
    return down, along


@constant
def find_shifts(windows: Windows, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return where the bits of each cell in reach of each output cell begin [H', W', reach]."""
    h, w = ((first[:, None] + np.arange(n)) % n for first, n in zip(windows.first, windows.reach, strict=True))
    shift = windows.bits * (h[:, None, :, None] * windows.reach[1] + w[None, :, None, :])
    return torch.tensor(shift.reshape(len(h), len(w), -1), device=device)


SINGLE, DOUBLE = 24, 53
"""The bits of whole numbers that each precision holds."""


def count_winners(indices: Tensor, windows: Windows) -> Tensor:
    """Return, per output cell and input cell in reach, how many pixels took their maximum there.

    Bytes [N, C, H', W', reach] while a patch has at most 255 pixels; at patch 1 the place itself, [N, C, H, W].
    """
    places = windows.reach[0] * windows.reach[1]
    if windows.out_patch == (1, 1) and places <= 255:
        return find_places(indices, windows).to(torch.uint8)
    most = SINGLE if indices.device.type == "mps" else DOUBLE  # which has no double precision
    return (count_packed if places * windows.bits <= most else count_scattered)(indices, windows)


def find_places(indices: Tensor, windows: Windows) -> Tensor:
    """Return for each output pixel in which of the cells in reach its maximum lies [N, C, H, W]."""
    rows, columns = find_first(windows, indices)
    down = indices // windows.width // windows.in_patch[0] - rows[:, None]
    place = down * windows.reach[1] + indices % windows.width // windows.in_patch[1] - columns
    # A window that sees nothing but padding is -inf, and its index, as torch gives it, may lie outside the map.
    return place.clamp(0, windows.reach[0] * windows.reach[1] - 1)


def count_packed(indices: Tensor, windows: Windows) -> Tensor:
    """Count by one look-up and one pooling: a number holds the counts of all cells in reach, a few bits each."""
    last = is_nhwc(indices)
    order = indices.permute(0, 2, 3, 1) if last else indices
    down, along = find_lanes(windows, indices)
    ones = torch.outer(down, along).reshape(-1).index_select(0, order.reshape(-1)).reshape(order.shape)
    packed = pool_sum(ones.permute(0, 3, 1, 2) if last else ones, windows.out_patch).long().contiguous()
    counts = (packed[..., None] >> find_shifts(windows, indices)) & (2**windows.bits - 1)
    return counts.to(count_dtype(windows.out_patch))


def count_scattered(indices: Tensor, windows: Windows) -> Tensor:
    """Count one pixel after the other, for patches and reaches of any size."""
    n, c, h, w = indices.shape
    places = windows.reach[0] * windows.reach[1]
    out_h, out_w = count_cells((h, w), windows.out_patch)
    cell_rows, cell_columns = (
        torch.arange(size, device=indices.device) // patch for size, patch in zip((h, w), windows.out_patch, strict=True)
    )
    slot = (cell_rows[:, None] * out_w + cell_columns) * places + find_places(indices, windows)
    counts = torch.zeros(n * c, out_h * out_w * places, dtype=torch.float32, device=indices.device)
    counts.scatter_add_(1, slot.reshape(n * c, -1), torch.ones((), device=indices.device).expand(n * c, h * w))
    return counts.to(count_dtype(windows.out_patch)).reshape(n, c, out_h, out_w, places)


class MaxPool(Function):
    """Carry a gradient back through max pooling.

    Equation: Gx[J] = Σ_I G_I/|I| · #{ i in I : the maximum of window i lies in J }.
    Cost: one pass over the counts; saves them, a byte per cell and neighbouring cell.
    Exact when: always, for the gradient that the two tilings can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, winners: Tensor, windows: Windows, y: Tensor) -> Tensor:
        ctx.windows, ctx.size, ctx.shape = windows, map_size(y), carrier.shape
        ctx.save_for_backward(winners)
        return make_carrier((*y.shape[:2], *count_cells(ctx.size, windows.out_patch)), y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        (winners,) = ctx.saved_tensors
        g, target = g / make_areas(ctx.size, ctx.windows.out_patch, g), find_target(ctx.windows, g)
        gx = native.max_route(g, winners, target, ctx.windows.in_cells)
        if gx is not None:
            return gx, None, None, None
        if winners.dim() == 4:
            places = torch.arange(ctx.windows.reach[0] * ctx.windows.reach[1], device=g.device)
            winners = winners[..., None] == places  # torch's `one_hot` reads its values
        n, c, h, w = ctx.shape
        gx = g.new_zeros(n, c, h * w)
        gx.index_add_(2, target, (g[..., None] * winners.to(g.dtype)).reshape(n, c, -1))
        return gx.reshape(ctx.shape), None, None, None


def route(x: PatchTensor, y: Tensor, indices: Tensor, spans: tuple[Spans, Spans]) -> Tensor:
    """Return the result of a max pooling whose gradient goes where the maxima were."""
    patch = x.choices.tiling.patch_for(map_size(y))
    windows = find_windows(map_size(x), x.patch, map_size(y), patch, spans)
    with torch.no_grad():
        winners = count_winners(indices, windows)
    return finish(x, y, MaxPool.apply(x.carrier, winners, windows, y), patch=patch)  # type: ignore[arg-type]


def find_taps(in_size: Pair, windows: Windows, spans: tuple[Spans, Spans], dilation: Pair) -> list[native.Taps]:
    """Return per axis where the taps of the windows are, and in which of the cells in reach."""
    taps = []
    for i, span in enumerate(spans):
        pixel = np.arange(0, span.end[0] - span.start[0] + 1, dilation[i]) + span.start[:, None]
        inside = (pixel >= 0) & (pixel < in_size[i])
        lead = inside.argmax(1)
        pixel += lead[:, None] * dilation[i]
        cell = np.repeat(windows.first[i], windows.out_patch[i])[: len(span.start)]
        place = pixel // windows.in_patch[i] - cell[:, None]
        taps.append(native.Taps(pixel[:, 0], inside.sum(1), place, dilation[i], windows.reach[i]))
    return taps


def route_taps(x: PatchTensor, size: Pair, spans: tuple[Spans, Spans], dilation: Pair) -> Tensor | None:
    """Return what `route` returns, from the library; `None` where a window sees nothing but padding."""
    patch = x.choices.tiling.patch_for(size)
    windows = find_windows(map_size(x), x.patch, size, patch, spans)
    rows, columns = find_taps(map_size(x), windows, spans, dilation)
    if not (rows.count.all() and columns.count.all()):
        return None
    y, mean, winners = native.max_pool(pixels(x), rows, columns, patch)
    return finish(x, y, MaxPool.apply(x.carrier, winners, windows, y), patch=patch, mean=mean)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def find_size(size: Pair, *options: Any) -> Pair:
    """Return the size of a map of `size` after max pooling, or raise as torch does; torch's own answer takes a while."""
    return map_size(F.max_pool2d(torch.empty((1, 1, *size), device="meta"), *options))


@lru_cache(maxsize=256)
def space_windows(count: int, kernel: int, stride: int, padding: int, dilation: int) -> Spans:
    """Return along one axis the spans of so many windows of a max pooling."""
    start = np.arange(count) * stride - padding
    return Spans(start, start + dilation * (kernel - 1))


@lru_cache(maxsize=256)
def divide_windows(count: int, size: int) -> Spans:
    """Return along one axis the spans of so many windows of about equal size."""
    number = np.arange(count)
    return Spans(number * size // count, -(-(number + 1) * size // count) - 1)


def find_spans(size: Pair, kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Spans, Spans]:
    """Return per axis the spans of the windows of a max pooling to a map of `size`."""
    rows, columns = map(space_windows, size, *map(as_pair, (kernel_size, stride, padding, dilation)))
    return rows, columns


@rule(F.max_pool2d, torch.max_pool2d)
def max_pool2d(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Take the maxima of windows: `MaxPool`."""
    if not is_live(input) or return_indices or input.dim() != 4:
        return NotImplemented
    value, result = pixels(input), None
    if native.can_max_pool(value):
        options = (tuple(v) if isinstance(v, list) else v for v in (kernel_size, stride, padding, dilation, ceil_mode))
        size = find_size(map_size(value), *options)
        spans = find_spans(size, kernel_size, stride or kernel_size, padding, dilation)
        result = route_taps(input, size, spans, as_pair(dilation))
    if result is not None:
        return result
    with torch.no_grad():
        y, indices = F.max_pool2d(value, kernel_size, stride, padding, dilation, ceil_mode, return_indices=True)
    return route(input, y, indices, find_spans(map_size(y), kernel_size, stride or kernel_size, padding, dilation))


@rule(F.adaptive_max_pool2d)
def adaptive_max_pool2d(func: Any, input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """Take the maxima of windows of about equal size: `MaxPool`; one window is the maximum over space, `Reduction`."""
    if not is_live(input) or return_indices or input.dim() != 4:
        return NotImplemented
    size = fill_size(output_size, input)
    if size == (1, 1):
        return run_reduction(lambda z: func(z, output_size), input, {2, 3}, "max")
    with torch.no_grad():
        y, indices = F.adaptive_max_pool2d(pixels(input), size, return_indices=True)
    rows, columns = map(divide_windows, size, map_size(input))
    return route(input, y, indices, (rows, columns))
