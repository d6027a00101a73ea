"""Max pooling at patch resolution."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter import native
from gradfilter.carriers import coarse, make_carrier
from gradfilter.emit import finish
from gradfilter.patches import Pair, count_cells, count_dtype, is_nhwc, make_areas, map_size, pool_sum
from gradfilter.rules.conv import as_pair
from gradfilter.rules.reduce import fill_size, run_reduction
from gradfilter.tensor import PatchTensor, is_live, pixels, rule


class Windows(NamedTuple):
    """Where the windows of a max pooling lie, in cells: the winner of an output pixel is in one of few input cells.

    Attributes:
        first: Per axis, for each output cell the first input cell that its windows reach.
        reach: Per axis, how many input cells from there on they can reach.
        in_cells: Cells of the input.
        in_patch: Patch of the input.
        out_patch: Patch of the output.
        end: What all indices are smaller than: that of a window which sees nothing but padding may lie outside the map.
    """

    first: tuple[np.ndarray, np.ndarray]
    reach: Pair
    in_cells: Pair
    in_patch: Pair
    out_patch: Pair
    end: int

    def target(self, device: torch.device) -> Tensor:
        """Return the input cell of each (output cell, place in reach), flat [out cells · reach]."""
        h, w = (
            np.minimum(first[:, None] + np.arange(reach), cells - 1)
            for first, reach, cells in zip(self.first, self.reach, self.in_cells, strict=True)
        )
        flat = h[:, None, :, None] * self.in_cells[1] + w[None, :, None, :]
        return torch.tensor(flat.reshape(-1), device=device)


Spans = tuple[np.ndarray, np.ndarray]
"""Along one axis, the first and the last pixel of each window; they may lie in the padding."""


def find_windows(x: PatchTensor, size: Pair, out_patch: Pair, spans: tuple[Spans, Spans]) -> Windows:
    """Return the windows of a max pooling from x to a map of `size`."""
    first, reach = [], []
    for i, (start, end) in enumerate(spans):
        begin = np.arange(0, size[i], out_patch[i])
        low = np.maximum(start[begin], 0) // x.patch[i]
        last = np.minimum(begin + out_patch[i], size[i]) - 1
        high = np.minimum(end[last], x.shape[2 + i] - 1) // x.patch[i]
        first.append(low)
        reach.append(int((high - low).max()) + 1)
    (_, last_row), (_, last_column) = spans
    end = max(x.shape[2], int(last_row.max()) + 1) * x.shape[3] + max(0, int(last_column.max()) + 1 - x.shape[3])
    in_cells = count_cells(map_size(x), x.patch)
    return Windows((first[0], first[1]), (reach[0], reach[1]), in_cells, x.patch, out_patch, end)


def count_winners(indices: Tensor, width: int, windows: Windows) -> Tensor:
    """Return, per output cell and input cell in reach, how many pixels took their maximum there.

    Bytes [N, C, H', W', reach] while a patch has at most 255 pixels; at patch 1 the place itself, [N, C, H, W].
    """
    places = windows.reach[0] * windows.reach[1]
    if windows.out_patch == (1, 1) and places <= 255:
        return find_places(indices, width, windows).to(torch.uint8)
    bits = places * count_bits(windows)
    if bits <= 24:
        return count_packed(indices, width, windows, torch.float32)
    if bits <= 53 and indices.device.type != "mps":  # which has no double precision
        return count_packed(indices, width, windows, torch.float64)
    return count_scattered(indices, width, windows)


def find_places(indices: Tensor, width: int, windows: Windows) -> Tensor:
    """Return for each output pixel in which of the cells in reach its maximum lies [N, C, H, W]."""
    rows, columns = (
        torch.tensor(np.repeat(first, patch)[:size], device=indices.device)
        for first, patch, size in zip(windows.first, windows.out_patch, map_size(indices), strict=True)
    )
    down = indices // width // windows.in_patch[0] - rows[:, None]
    place = down * windows.reach[1] + indices % width // windows.in_patch[1] - columns
    # A window that sees nothing but padding is -inf, and its index, as torch gives it, may lie outside the map.
    return place.clamp(0, windows.reach[0] * windows.reach[1] - 1)


def count_bits(windows: Windows) -> int:
    """Return how many bits count the pixels of an output patch."""
    return (windows.out_patch[0] * windows.out_patch[1]).bit_length()


def count_packed(indices: Tensor, width: int, windows: Windows, dtype: torch.dtype) -> Tensor:
    """Count by one look-up and one pooling: a number holds the counts of all cells in reach, a few bits each.

    Cells in reach of one output cell differ in their row and column modulo the reach: that says which bits are whose.
    """
    bits, reach, device = count_bits(windows), windows.reach, indices.device
    row, column = np.divmod(np.arange(windows.end), width)
    lane = row // windows.in_patch[0] % reach[0] * reach[1] + column // windows.in_patch[1] % reach[1]
    table = torch.tensor(2.0 ** (bits * lane), dtype=dtype, device=device)
    last = is_nhwc(indices)
    order = indices.permute(0, 2, 3, 1) if last else indices
    ones = table.index_select(0, order.reshape(-1)).reshape(order.shape)
    packed = pool_sum(ones.permute(0, 3, 1, 2) if last else ones, windows.out_patch).long().contiguous()
    h, w = ((first[:, None] + np.arange(n)) % n for first, n in zip(windows.first, reach, strict=True))
    shift = bits * (h[:, None, :, None] * reach[1] + w[None, :, None, :])
    shifts = torch.tensor(shift.reshape(*packed.shape[2:], -1), device=device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).to(count_dtype(windows.out_patch))


def count_scattered(indices: Tensor, width: int, windows: Windows) -> Tensor:
    """Count one pixel after the other, for patches and reaches of any size."""
    n, c, h, w = indices.shape
    places = windows.reach[0] * windows.reach[1]
    out_h, out_w = count_cells((h, w), windows.out_patch)
    cell_rows, cell_columns = (
        torch.arange(size, device=indices.device) // patch for size, patch in zip((h, w), windows.out_patch, strict=True)
    )
    slot = (cell_rows[:, None] * out_w + cell_columns) * places + find_places(indices, width, windows)
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
        g, target = g / make_areas(ctx.size, ctx.windows.out_patch, g), ctx.windows.target(g.device)
        gx = native.max_route(g, winners, target, ctx.windows.in_cells)
        if gx is not None:
            return gx, None, None, None
        if winners.dim() == 4:
            winners = F.one_hot(winners.long(), ctx.windows.reach[0] * ctx.windows.reach[1])
        n, c, h, w = ctx.shape
        gx = g.new_zeros(n, c, h * w)
        gx.index_add_(2, target, (g[..., None] * winners.to(g.dtype)).reshape(n, c, -1))
        return gx.reshape(ctx.shape), None, None, None


def route(x: PatchTensor, y: Tensor, indices: Tensor, spans: tuple[Spans, Spans]) -> Tensor:
    """Return the result of a max pooling whose gradient goes where the maxima were."""
    patch = x.choices.tiling.patch_for(map_size(y))
    windows = find_windows(x, map_size(y), patch, spans)
    with torch.no_grad():
        winners = count_winners(indices, x.shape[3], windows)
    return finish(x, y, MaxPool.apply(x.carrier, winners, windows, y), patch=patch)  # type: ignore[arg-type]


def find_taps(x: PatchTensor, windows: Windows, spans: tuple[Spans, Spans], dilation: Pair) -> list[native.Taps]:
    """Return per axis where the taps of the windows are, and in which of the cells in reach."""
    taps = []
    for i, (start, end) in enumerate(spans):
        pixel = np.arange(0, end[0] - start[0] + 1, dilation[i]) + start[:, None]
        inside = (pixel >= 0) & (pixel < x.shape[2 + i])
        lead = inside.argmax(1)
        pixel += lead[:, None] * dilation[i]
        cell = np.repeat(windows.first[i], windows.out_patch[i])[: len(start)]
        place = pixel // windows.in_patch[i] - cell[:, None]
        taps.append(native.Taps(pixel[:, 0], inside.sum(1), place, dilation[i], windows.reach[i]))
    return taps


def route_taps(x: PatchTensor, size: Pair, spans: tuple[Spans, Spans], dilation: Pair) -> Tensor | None:
    """Return what `route` returns, from the library; `None` where a window sees nothing but padding."""
    patch = x.choices.tiling.patch_for(size)
    windows = find_windows(x, size, patch, spans)
    rows, columns = find_taps(x, windows, spans, dilation)
    if not (rows.count.all() and columns.count.all()):
        return None
    y, mean, winners = native.max_pool(pixels(x), rows, columns, patch)
    return finish(x, y, MaxPool.apply(x.carrier, winners, windows, y), patch=patch, mean=mean)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def find_size(size: Pair, *options: Any) -> Pair:
    """Return the size of a map of `size` after max pooling, or raise as torch does; torch's own answer takes a while."""
    return map_size(F.max_pool2d(torch.empty((1, 1, *size), device="meta"), *options))


def find_spans(size: Pair, kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Spans, Spans]:
    """Return per axis the spans of the windows of a max pooling to a map of `size`."""
    steps = zip(*map(as_pair, (kernel_size, stride, padding, dilation)), size, strict=True)
    rows, columns = ((start := np.arange(n) * s - p, start + d * (k - 1)) for k, s, p, d, n in steps)
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
    rows, columns = (
        (np.arange(out) * n // out, -(-(np.arange(out) + 1) * n // out) - 1)
        for n, out in zip(map_size(input), size, strict=True)
    )
    return route(input, y, indices, (rows, columns))
