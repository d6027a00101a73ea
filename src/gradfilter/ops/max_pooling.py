"""Max pooling with patch means and winners, and its gradient.

In reach of an output cell are the input cells that its windows touch; the winners say how many of the windows have their
maximum in each of them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.geometry.tiling import count_cells, count_dtype, is_nhwc
from gradfilter.geometry.windows import Windows
from gradfilter.ops.check import Check
from gradfilter.ops.constants import DOUBLE, SINGLE, find_first, find_lanes, find_shifts, find_target
from gradfilter.ops.native import maxpool as native
from gradfilter.ops.native.maxpool import MOST_PLACES, Pooled
from gradfilter.ops.operator import operator
from gradfilter.ops.pooling import pool_mean, pool_sum


def check_max_pool(check: Check, x: Tensor, windows: Windows) -> None:
    """Check the arguments of `max_pool`."""
    check.instance("windows", windows, Windows)
    size = check.map("x", x)[2:]
    if size != windows.in_size:
        check.refuse("x", f"of shape {list(x.shape)}", f"Its windows are those of a map of {windows.in_size}.")


@operator(kernel=native.max_pool, check=check_max_pool)
def max_pool(x: Tensor, windows: Windows) -> Pooled:
    """Return the maxima of windows over x with their patch means, and in which of the cells in reach the maxima lie.

    Equation: y_i = max over window i of x; winners[I, J] = #{ i ∈ I : the maximum of window i lies in input patch J }, for the
    input patches J that windows of I can reach; at patch 1 and a reach of at most 255 cells the place of J itself, a byte.
    Cost: one pass over x, kh·kw comparisons per output pixel.
    Exact when: always. Where values are equal, the first one in the window wins, as in torch.

    Nothing is differentiable: `max_route` is the gradient.

    Args:
        x: The map [N, C, H, W].
        windows: The windows.
    """
    size, one = windows.size, windows.out_patch == (1, 1)
    if windows.is_adaptive:
        y, indices = F.adaptive_max_pool2d(x, size, return_indices=True)
    else:
        where = windows.kernel, windows.stride, windows.padding, windows.dilation, windows.has_ceiling
        y, indices = F.max_pool2d(x, *where, return_indices=True)
    mean = None if one else pool_mean(y, windows.out_patch)
    return Pooled(y, mean, count_winners(indices, windows))


def count_winners(indices: Tensor, windows: Windows) -> Tensor:
    """Return, per output cell and input cell in reach, how many pixels took their maximum there.

    Bytes [N, C, H', W', reach] while a patch has at most 255 pixels; at patch 1 the place itself, [N, C, H, W].
    """
    places = windows.reach[0] * windows.reach[1]
    if windows.out_patch == (1, 1) and places <= MOST_PLACES:
        return find_places(indices, windows).to(torch.uint8)
    most = SINGLE if indices.device.type == "mps" else DOUBLE  # which has no double precision
    return (count_packed if places * windows.bits <= most else count_scattered)(indices, windows)


def find_places(indices: Tensor, windows: Windows) -> Tensor:
    """Return for each output pixel in which of the cells in reach its maximum lies [N, C, H, W]."""
    rows, columns = find_first(windows, indices)
    down = indices // windows.in_size[1] // windows.in_patch[0] - rows[:, None]
    place = down * windows.reach[1] + indices % windows.in_size[1] // windows.in_patch[1] - columns
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
    out_h, out_w = windows.out_cells
    cell_rows, cell_columns = (
        torch.arange(size, device=indices.device) // patch for size, patch in zip((h, w), windows.out_patch, strict=True)
    )
    slot = (cell_rows[:, None] * out_w + cell_columns) * places + find_places(indices, windows)
    counts = torch.zeros(n * c, out_h * out_w * places, dtype=torch.float32, device=indices.device)
    counts.scatter_add_(1, slot.reshape(n * c, h * w), torch.ones((), device=indices.device).expand(n * c, h * w))
    return counts.to(count_dtype(windows.out_patch)).reshape(n, c, out_h, out_w, places)


def check_route(check: Check, g: Tensor, winners: Tensor, windows: Windows) -> None:
    """Check the arguments of `max_route`."""
    check.instance("windows", windows, Windows)
    n, channels, *cells = check.map("g", g)
    check.counts("winners", winners, g)
    if tuple(cells) != count_cells(windows.size, windows.out_patch):
        check.refuse("g", f"of shape {list(g.shape)}", f"A map of {windows.size} has {windows.out_cells} patches.")
    places = windows.reach[0] * windows.reach[1]
    counts = (n, channels, *cells, places)
    named = (n, channels, *cells) if windows.out_patch == (1, 1) else counts
    if winners.shape not in (counts, named):
        check.refuse("winners", f"of shape {list(winners.shape)}", f"Give those of max_pool, {list(counts)}.")
    if winners.dim() == 4 and winners.dtype is not torch.uint8:
        check.refuse("winners", f"of dtype {winners.dtype}", "Give the bytes of max_pool, which name a cell in reach each.")


@operator(kernel=native.max_route, check=check_route)
def max_route(g: Tensor, winners: Tensor, windows: Windows) -> Tensor:
    """Return the gradient of a max pooling's input, at patch resolution: each output cell's goes where its maxima lie.

    Equation: Gx[J] = Σ_I G_I · winners[I, J], G_I the gradient per pixel of output patch I.
    Cost: one pass over the winners; two operations per output cell and cell in reach.
    Exact when: always, for a gradient that is constant in each patch. Where nothing was won the product is 0, even if G is NaN
    or infinite.

    Args:
        g: The gradient per pixel of each output cell [N, C, H', W'].
        winners: Those of `max_pool`.
        windows: The windows.
    """
    if winners.dim() == 4:
        places = torch.arange(windows.reach[0] * windows.reach[1], device=g.device)
        winners = winners[..., None] == places  # torch's `one_hot` reads its values
    n, c = g.shape[:2]
    h, w = windows.in_cells
    gx = g.new_zeros(n, c, h * w)
    routed = torch.where(winners == 0, 0, g[..., None] * winners)  # NaN and infinity go where something was won alone
    gx.index_add_(2, find_target(windows, g), routed.reshape(n, c, math.prod(routed.shape[2:])))
    return gx.reshape(n, c, h, w)
