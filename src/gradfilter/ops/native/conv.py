"""Depthwise and dense convolutions that end in scale, shift, residual, activation, patch means and slopes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gradfilter.geometry.tiling import LIMIT, Pair, count_cells, count_dtype
from gradfilter.ops.native.fused import NORM_ACT, are_rows, as_floats, is_known
from gradfilter.ops.native.library import CHANNELS, call, can_run, is_plain, is_readable
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import INT64, POINTER, Record, Task
from gradfilter.ops.native.values import IDENTITY, NO_CELLS, Act, Cells, Ending, Fused, is_smooth

_BEGIN, _SIZES = ((NORM_ACT, "after"), (POINTER, "x weight scale shift")), "h w kh kw sh sw dh dw top left"
DEPTHWISE = Record("depthwise", *_BEGIN, (INT64, _SIZES))
DENSE = Record("dense", *_BEGIN, (INT64, f"inputs {_SIZES}"))
_TASKS = {"depthwise": Task(DEPTHWISE), "dense": Task(DENSE), "winograd": Task(DENSE, "winograd")}
_HEAD, _POINTERS, _DEPTHWISE_TAIL = DEPTHWISE.split("after.x", "h")
_, _, _DENSE_TAIL = DENSE.split("after.x", "inputs")
"""Both begin alike. Only the pointers change from step to step; what is around them is packed once."""
_MANY_INPUTS = 768
"""Input channels from which on torch is faster at kernels of one pixel."""
_MANY_IN_STRIPS = 65
"""Input channels from which on it is at others, whose weights then no longer stay in the cache."""
MOST_ZEROS = 1 << 16
"""Zeros around a map, per side, that a caller may ask for: more would be a mistake, and fill the memory."""
_UNPOOLED = (4, 8)
"""The unit of work where nothing is pooled."""


def can_convolve(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> str | None:
    """Return which of the library's kernels runs a convolution: "depthwise", "dense", "winograd", or `None`.

    Kernels of 3x3 without a stride "winograd" computes with 2.25 times fewer products than "dense".

    Args:
        x: The input [N, C, H, W]: for the library, float32 in channels_last memory.
        w: The weight, as torch has it.
        stride: The stride `(h, w)`.
        padding: Zeros before the first row and column.
        dilation: The dilation `(h, w)`.
        groups: The groups.
    """
    if not can_read(x, w):
        return None
    return find_kernel(w.shape, x.shape[1], stride, padding, dilation, groups)


def can_read(x: Tensor, w: Tensor) -> bool:
    """Tell whether the library is on and can read an input and a weight."""
    return can_run(x) and are_readable(x, w)


def are_readable(x: Tensor, w: Tensor) -> bool:
    """Tell whether the library can read an input and a weight."""
    last = torch.channels_last
    return is_readable(x) and x.dtype is torch.float32 and x.is_contiguous(memory_format=last) and is_plain(w, w.shape)


@lru_cache(maxsize=4096)
def find_kernel(shape: tuple[int, ...], inputs: int, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> str | None:
    """Return the kernel for a weight of this shape."""
    if shape[0] < CHANNELS:
        return None
    if groups == shape[0] == inputs:
        return "depthwise"
    if groups > 1:
        return None
    square = shape[2:] == (3, 3) and stride == dilation == (1, 1) and max(padding) <= 2
    return "winograd" if square and shape[1] >= CHANNELS else "dense"


def prefers(kernel: str, w: Sequence[int], stride: Pair, out_size: Pair) -> bool:
    """Tell whether a convolution is faster in the library than in torch with `norm_act` after it.

    Measured on AVX2, 16 to 1024 channels, batches of 1 to 32. Dense: ahead of torch by up to 1.3 (by 2 to 4 where torch's
    map would be on fresh pages) unless there are many numbers under a pixel. Winograd: ahead of torch by 1.2 to 2 wherever
    it saves a third of the products; it does not where maps have one row, or three by three pixels, for tiles hang over
    their ends.

    Args:
        kernel: What `can_convolve` says.
        w: The shape of the weight, as torch has it.
        stride: The stride `(h, w)`.
        out_size: Size `(h, w)` of the output.
    """
    if kernel == "winograd":
        tiles = math.prod(-(-n // 2) for n in out_size)
        return 2 * 9 * math.prod(out_size) >= 3 * 16 * tiles
    alone = w[2:] == stride == (1, 1)
    return kernel == "depthwise" or w[1] < (_MANY_INPUTS if alone else _MANY_IN_STRIPS)


def find_fitting(
    x: tuple[int, ...], w: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair, groups: int, out_size: Pair
) -> str | None:
    """Return the kernel for an input and a weight of these shapes and an output of this size, `None` where they do not fit."""
    if not isinstance(out_size, tuple):
        return None
    return _find_fitting(x, w, groups, *stride, *padding, *dilation, *out_size)


@lru_cache(maxsize=4096, typed=True)  # 1.0 is not 1 here
def _find_fitting(x: tuple[int, ...], w: tuple[int, ...], groups: int, *places: int) -> str | None:
    """Return what `find_fitting` does, for stride, padding, dilation and size one after the other."""
    if len(w) != 4 or not all(type(n) is int for n in (groups, *places)):
        return None
    stride, padding, dilation, out_size = zip(places[::2], places[1::2], strict=True)
    if groups < 1 or x[1] != w[1] * groups or w[0] % groups or 0 in w:
        return None
    if min(padding) < 0 or min(*stride, *dilation, *out_size) < 1 or max(places) >= LIMIT:
        return None
    ends = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(out_size, stride, w[2:], dilation, strict=True)]
    h, width = (max(p, end - p - n) for end, p, n in zip(ends, padding, x[2:], strict=True))
    if max(h, width) > MOST_ZEROS:
        return None
    return find_kernel(w, x[1], stride, (h, width), dilation, groups)


def convolve(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    out_size: Pair,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    act: Act = IDENTITY,
    patch: Pair = (1, 1),
    residual: Tensor | None = None,
    cells: Cells | None = None,
) -> Fused | None:
    """Return act(conv(x) · scale + shift + residual) with its patch means and slopes."""
    if not are_readable(x, w):
        return None
    kernel = find_fitting(x.shape, w.shape, stride, padding, dilation, groups, out_size)
    if kernel is None:
        return None
    return run_kernel(kernel, x, w, bias, stride, padding, dilation, out_size, scale, shift, act, patch, residual, cells)


def run_kernel(
    kernel: str,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    out_size: Pair,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    act: Act = IDENTITY,
    patch: Pair = (1, 1),
    residual: Tensor | None = None,
    cells: Cells | None = None,
) -> Fused | None:
    """Return what `convolve` returns, by one of the library's kernels, for an input and a weight that it can read."""
    shape = (x.shape[0], w.shape[0], *out_size)
    if not (can_finish(shape, residual) and is_ending(Ending(bias, scale, shift, act, patch), shape[1])):
        return None
    y = empty(shape, torch.float32, torch.channels_last)
    end = Ending(bias, scale, shift, act, patch)
    if cells is None:
        cells = make_cells(shape, end)
    elif not are_cells(cells, shape, act, patch):
        return None
    where = stride, dilation, padding
    task, held = pack_task(kernel, x, x.shape, w, shape, end, residual, y, cells, *where)
    call(_TASKS[kernel], task, *held, residual, y, *cells)
    return Fused(y, *cells)


def is_ending(end: Ending, channels: int) -> bool:
    """Tell whether the library knows what follows a convolution, and can read it."""
    bias, scale, shift, act, patch = end
    return is_known(act, patch) and are_rows(channels, bias, scale, shift) and (bias is None or bias.dtype is torch.float32)


def can_finish(shape: tuple[int, ...], residual: Tensor | None) -> bool:
    """Tell whether the library can finish an output of this shape with a residual."""
    ordered = residual is None or residual.is_contiguous(memory_format=torch.channels_last)
    return is_plain(residual, shape) and ordered and min(shape) > 0


@lru_cache(maxsize=4096)
def find_cells(shape: tuple[int, ...], patch: Pair, kind: int) -> tuple[tuple[int, ...], torch.dtype | None] | None:
    """Return the shape of the patch means of an output and the dtype of its slopes, as far as it has any."""
    if patch == (1, 1):
        return None
    cells = (shape[0], shape[1], *count_cells((shape[2], shape[3]), patch))
    return cells, (torch.float32 if is_smooth(Act(kind)) else count_dtype(patch)) if kind else None


def make_cells(shape: Sequence[int], end: Ending) -> Cells:
    """Return new tensors for the patch means and slopes of an output, as far as it has any."""
    found = find_cells(tuple(shape), end.patch, end.act.kind)
    if found is None:
        return NO_CELLS
    cells, dtype = found
    mean = empty(cells, torch.float32, torch.channels_last)
    return Cells(mean, None if dtype is None else empty(cells, dtype, torch.channels_last))


def are_cells(cells: Cells, shape: tuple[int, ...], act: Act, patch: Pair) -> bool:
    """Tell whether the library can write patch means and slopes to tensors: those are what `make_cells` makes."""
    (mean, slope), found = cells, find_cells(shape, patch, act.kind)
    if found is None or mean is None:
        return found is mean is slope is None
    wanted, dtype = found
    last = torch.channels_last
    if not (is_plain(mean, wanted) and mean.is_contiguous(memory_format=last)):
        return False
    if slope is None or dtype is None:
        return slope is dtype is None
    return is_plain(slope, wanted, dtype) and slope.is_contiguous(memory_format=last)


def pack_task(
    kernel: str,
    x: Tensor | None,
    x_shape: Sequence[int],
    w: Tensor,
    shape: tuple[int, ...],
    end: Ending,
    residual: Tensor | None,
    y: Tensor | None,
    cells: Cells,
    stride: Pair,
    dilation: Pair,
    padding: Pair,
) -> tuple[bytes, list[Tensor | None]]:
    """Return a task of the library, and what it reads besides a residual, which must live until it is done.

    Args:
        kernel: What `can_convolve` says.
        x: The input; `None` where the library has it already.
        x_shape: Its shape.
        w: The weight, as torch has it.
        shape: The shape of the output.
        end: What follows the convolution.
        residual: A map to add before the activation.
        y: The output; `None` where it stays in the library.
        cells: Where its patch means and slopes go.
        stride: The stride `(h, w)`.
        dilation: The dilation `(h, w)`.
        padding: Zeros before the first row and column.
    """
    bias, scale, shift, act, patch = end
    mean, slope = cells
    if bias is not None:
        with torch.no_grad():
            bias = bias if scale is None else bias * scale
            shift = bias if shift is None else shift + bias
    scale, shift, w = as_floats(scale), as_floats(shift), w.contiguous()
    head = _make_head(shape, _UNPOOLED if mean is None else patch, act, 0 if slope is None else slope.element_size())
    pointers = _POINTERS.pack(
        0,
        0 if residual is None else residual.data_ptr(),
        0 if y is None else y.data_ptr(),
        0,
        0,
        0 if mean is None else mean.data_ptr(),
        0 if slope is None else slope.data_ptr(),
        0 if x is None else x.data_ptr(),
        w.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if shift is None else shift.data_ptr(),
    )
    return head + pointers + _make_tail(kernel, tuple(x_shape), w.shape, stride, dilation, padding), [x, w, scale, shift]


@lru_cache(maxsize=4096)
def _make_head(shape: tuple[int, ...], patch: Pair, act: Act, count: int) -> bytes:
    """Return what a task begins with."""
    return _HEAD.pack(*shape, *patch, 1, 0, act.kind, count, act.lo, act.hi, act.slope, 0)


@lru_cache(maxsize=4096)
def _make_tail(kernel: str, x: tuple[int, ...], w: tuple[int, ...], stride: Pair, dilation: Pair, padding: Pair) -> bytes:
    """Return what a task ends with, for an input and a weight of these shapes."""
    numbers = (*x[2:], *w[2:], *stride, *dilation, *padding)
    return _DEPTHWISE_TAIL.pack(*numbers) if kernel == "depthwise" else _DENSE_TAIL.pack(x[1], *numbers)
