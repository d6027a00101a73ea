"""A pointwise and a depthwise convolution, each with what follows it, without the map between them."""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from gradfilter.native.conv import DENSE, DEPTHWISE, can_convolve, can_finish, convolve, fill_fields, make_cells, prefers
from gradfilter.native.library import call
from gradfilter.native.memory import empty
from gradfilter.native.values import Cells, Ending, Expanded, Fused, Pair, count_cells, count_dtype, is_smooth

_EXPAND = struct.Struct(DENSE.format + DEPTHWISE.format)
"""`gf_expand` of conv.h."""
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
        and type(taps) in (Tensor, Parameter)
        and taps.dtype is torch.float32
        and taps.device == x.device
        and taps.shape[:2] == (len(w), 1)
    )


def prefers_expand(x: Tensor, w: Tensor) -> bool:
    """Tell whether one call is faster than one convolution after the other, on torch's number of threads.

    Measured on AVX2 and AVX-512, 3 to 700 inputs, maps of 7 to 200 pixels a side, patches of 1 to 14, on one thread: in 0.65
    to 1.0 of the time of two calls, least where the hidden map is large and its inputs are few. Not on maps of a few pixels,
    of which too little is computed at once, nor where there are fewer channels and images than keep all threads busy.

    Args:
        x: The input [N, C, H, W].
        w: The pointwise weight [D, C, 1, 1].
    """
    units, threads = len(x) * max(len(w) // _PANEL, 1), torch.get_num_threads()
    balanced = 4 * units >= 3 * threads * -(-units // threads)
    return balanced and x.shape[2] * x.shape[3] >= _FEW_PIXELS and prefers("dense", w, (1, 1), (x.shape[2], x.shape[3]))


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
    mean: Tensor | None = None,
    slope: Tensor | None = None,
) -> Expanded:
    """Return act(depthwise(hidden) · scale + shift) of hidden = act(pointwise(x) · scale + shift), and what is pooled of both.

    Runs in the library where `can_expand` says so, else in torch. Nothing is differentiable.

    Args:
        x: The input [N, C, H, W].
        w: The pointwise weight [D, C, 1, 1].
        middle: What follows the pointwise convolution.
        taps: The depthwise weight [D, 1, kh, kw].
        stride: The depthwise stride `(h, w)`.
        padding: Zeros before the first row and column of the hidden map; those after the last follow from `out_size`.
        dilation: The depthwise dilation `(h, w)`.
        out_size: Size `(h, w)` of the output.
        end: What follows the depthwise convolution.
        mean: Where the means of the hidden map go; `None` for a new tensor.
        slope: Where its slopes go; `None` for a new tensor.
    """
    shape, out_shape = (len(x), len(w), *x.shape[2:]), (len(x), len(w), *out_size)
    _check(shape, middle, mean, slope)
    runs = can_expand(x, w, taps) and can_finish(shape, middle.patch, None) and can_finish(out_shape, end.patch, None)
    if not (runs and _is_writable(mean) and _is_writable(slope)):
        return _expand_in_turn(x, w, middle, taps, stride, padding, dilation, out_size, end, mean, slope)
    hidden = make_cells(shape, middle, mean, slope)
    out = Fused(empty(out_shape, torch.float32, torch.channels_last), *make_cells(out_shape, end))
    first, held = fill_fields(x, w, shape, middle, None, hidden)
    second, also = fill_fields(None, taps, out_shape, end, None, out)
    first += [x.shape[1], *shape[2:], 1, 1, 1, 1, 1, 1, 0, 0]
    second += [*shape[2:], *taps.shape[2:], *stride, *dilation, *padding]
    call("expand", _EXPAND.pack(*first, *second))
    del held, also
    for given in (mean, slope):
        if given is not None and not given.is_inference():
            increment_version(given)
    return Expanded(hidden, out)


def _check(shape: tuple[int, ...], middle: Ending, mean: Tensor | None, slope: Tensor | None) -> None:
    """Refuse destinations that the means and slopes of the hidden map do not fit."""
    pooled = middle.patch != (1, 1)
    cells = (*shape[:2], *count_cells((shape[2], shape[3]), middle.patch))
    dtype = torch.float32 if is_smooth(middle.act) else count_dtype(middle.patch)
    if mean is not None and not (pooled and mean.shape == cells):
        raise ValueError(f"mean is {tuple(mean.shape)}; the patch means of the hidden map are {cells if pooled else 'none'}")
    sloped = pooled and middle.want_slope and middle.act.kind
    if slope is not None and not (sloped and slope.shape == cells and slope.dtype is dtype):
        wanted = f"{dtype} {cells}" if sloped else "none"
        raise ValueError(f"slope is {slope.dtype} {tuple(slope.shape)}; the slopes of the hidden map are {wanted}")


def _is_writable(given: Tensor | None) -> bool:
    """Tell whether the library can write a destination of the right shape, if it is one."""
    return given is None or (
        type(given) is Tensor
        and given.is_cpu
        and given.dtype in (torch.float32, torch.uint8, torch.int16, torch.int32)
        and given.is_contiguous(memory_format=torch.channels_last)
    )


def _expand_in_turn(
    x: Tensor,
    w: Tensor,
    middle: Ending,
    taps: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    out_size: Pair,
    end: Ending,
    mean: Tensor | None,
    slope: Tensor | None,
) -> Expanded:
    """Return the same by one convolution after the other."""
    one, size = (1, 1), (x.shape[2], x.shape[3])
    bias, scale, shift, act, patch, want_slope = middle
    hidden = convolve("dense", x, w, bias, one, (0, 0), one, size, scale, shift, act, patch, want_slope=want_slope)
    bias, scale, shift, act, patch, want_slope = end
    ends = bias, stride, padding, dilation, out_size, scale, shift, act, patch
    out = convolve("depthwise", hidden.y, taps, *ends, want_slope=want_slope)
    return Expanded(Cells(_hand_over(hidden.mean, mean), _hand_over(hidden.slope, slope)), out)


def _hand_over(result: Tensor | None, given: Tensor | None) -> Tensor | None:
    """Return a result in its destination, if there is one."""
    return result if result is None or given is None else given.copy_(result)
