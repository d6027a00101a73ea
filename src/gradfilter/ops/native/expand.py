"""A pointwise and a depthwise convolution, each with what follows it, without the map between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradfilter.geometry.tiling import Pair
from gradfilter.ops.native.conv import (
    DENSE,
    DEPTHWISE,
    are_cells,
    are_readable,
    can_convolve,
    can_finish,
    find_fitting,
    is_ending,
    make_cells,
    pack_task,
    prefers,
)
from gradfilter.ops.native.library import call, is_plain
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import Record, Task
from gradfilter.ops.native.values import Cells, Ending, Expanded, Fused

_TASK = Task(Record("expand", (DENSE, "first"), (DEPTHWISE, "second")))
_PANEL = 32
"""Channels of the smallest unit of work at the widest level."""
_FEW_PIXELS = 36
"""Pixels of a map from which on one call is faster."""


def can_expand(x: Tensor, w: Tensor, taps: Tensor) -> bool:
    """Tell whether the library runs a pointwise convolution and a depthwise one of its result.

    Args:
        x: The input [N, C, H, W]: for the library, float32 in channels_last memory.
        w: The pointwise weight [D, C, 1, 1].
        taps: The depthwise weight [D, 1, kh, kw].
    """
    one = (1, 1)
    return (
        can_convolve(x, w, one, (0, 0), one, 1) == "dense"
        and w.shape[1:] == (x.shape[1], *one)
        and is_plain(taps, (w.shape[0], 1, *taps.shape[2:]))
    )


def fits_expand(x: Tensor, w: Tensor, taps: Tensor, stride: Pair, padding: Pair, dilation: Pair, out_size: Pair) -> bool:
    """Tell whether a pointwise weight and a depthwise one fit an input that the library can read, and each other."""
    one, channels = (1, 1), w.shape[0]
    hidden = (x.shape[0], channels, *x.shape[2:])
    return (
        w.shape[1:] == (x.shape[1], *one)
        and is_plain(taps, (w.shape[0], 1, *taps.shape[2:]))
        and find_fitting(x.shape, w.shape, one, (0, 0), one, 1, (hidden[2], hidden[3])) == "dense"
        and find_fitting(hidden, taps.shape, stride, padding, dilation, channels, out_size) == "depthwise"
    )


def prefers_expand(x: Sequence[int], w: Sequence[int]) -> bool:
    """Tell whether one call is faster than one convolution after the other, on torch's number of threads.

    Measured on AVX2 and AVX-512, 3 to 700 inputs, maps of 7 to 200 pixels a side, patches of 1 to 14, on one thread: in 0.65
    to 1.0 of the time of two calls, least where the hidden map is large and its inputs are few. Not on maps of a few pixels,
    of which too little is computed at once, nor where there are fewer channels and images than keep all threads busy.

    Args:
        x: The shape of the input [N, C, H, W].
        w: The shape of the pointwise weight [D, C, 1, 1].
    """
    units, threads = x[0] * max(w[0] // _PANEL, 1), torch.get_num_threads()
    balanced = 4 * units >= 3 * threads * -(-units // threads)
    return balanced and x[2] * x[3] >= _FEW_PIXELS and prefers("dense", w, (1, 1), (x[2], x[3]))


def expand(
    x: Tensor,
    w: Tensor,
    middle: Ending,
    taps: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    out_size: Pair,
    end: Ending,
    cells: Cells | None = None,
) -> Expanded | None:
    """Return a depthwise convolution of a pointwise one, each with what follows it, and what is pooled of both."""
    if not (are_readable(x, w) and fits_expand(x, w, taps, stride, padding, dilation, out_size)):
        return None
    images, channels, one, none = x.shape[0], w.shape[0], (1, 1), (0, 0)
    shape, out_shape = (images, channels, *x.shape[2:]), (images, channels, *out_size)
    if not (can_finish(shape, None) and can_finish(out_shape, None)):
        return None
    if not (is_ending(middle, channels) and is_ending(end, channels)):
        return None
    if cells is None:
        cells = make_cells(shape, middle)
    elif not are_cells(cells, shape, middle.act, middle.patch):
        return None
    out = Fused(empty(out_shape, torch.float32, torch.channels_last), *make_cells(out_shape, end))
    first, held = pack_task("dense", x, x.shape, w, shape, middle, None, None, cells, one, one, none)
    where = stride, dilation, padding
    second, also = pack_task("depthwise", None, shape, taps, out_shape, end, None, out.y, Cells(*out[1:]), *where)
    call(_TASK, first + second, *held, *cells, *also, *out)
    return Expanded(cells, out)
