"""Depthwise and dense convolutions that end in scale, shift, residual, activation, patch means and slopes."""

from __future__ import annotations

import math
import struct

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from gradfilter.native.library import call, can_run
from gradfilter.native.memory import empty
from gradfilter.native.reference import torch_norm_act
from gradfilter.native.values import Act, Cells, Ending, Fused, Pair, count_cells, count_dtype, is_smooth

DEPTHWISE = struct.Struct("6q 4i 3f i 7Q 4Q 10q")
DENSE = struct.Struct("6q 4i 3f i 7Q 4Q 11q")
"""`gf_depthwise`, and `gf_dense` of conv.h, which is Winograd's, too."""
_LEAST_CHANNELS = 16
"""`GF_LEAST_CHANNELS` of conv.h."""
_MOST_PIXELS = 1 << 24
"""Pixels of a patch that single precision counts."""
_MANY_INPUTS = 768
"""Input channels from which on torch is faster at kernels of one pixel."""
_MANY_IN_STRIPS = 65
"""Input channels from which on it is at others, whose weights then no longer stay in the cache."""
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
    if not (can_run(x) and x.dtype is torch.float32 and x.is_contiguous(memory_format=torch.channels_last)):
        return None
    if type(w) not in (Tensor, Parameter) or w.dtype is not torch.float32 or w.device != x.device:
        return None
    if w.shape[0] < _LEAST_CHANNELS:
        return None
    if groups == w.shape[0] == x.shape[1]:
        return "depthwise"
    if groups > 1:
        return None
    square = w.shape[2:] == (3, 3) and stride == dilation == (1, 1) and max(padding) <= 2
    return "winograd" if square and w.shape[1] >= _LEAST_CHANNELS else "dense"


def prefers(kernel: str, w: Tensor, stride: Pair, out_size: Pair) -> bool:
    """Tell whether a convolution is faster in the library than in torch with `norm_act` after it.

    Measured on AVX2, 16 to 1024 channels, batches of 1 to 32. Dense: ahead of torch by up to 1.3 (by 2 to 4 where torch's
    map would be on fresh pages) unless there are many numbers under a pixel. Winograd: ahead of torch by 1.2 to 2 wherever
    it saves a third of the products; it does not where maps have one row, or three by three pixels, for tiles hang over
    their ends.

    Args:
        kernel: What `can_convolve` says.
        w: The weight, as torch has it.
        stride: The stride `(h, w)`.
        out_size: Size `(h, w)` of the output.
    """
    if kernel == "winograd":
        tiles = math.prod(-(-n // 2) for n in out_size)
        return 2 * 9 * math.prod(out_size) >= 3 * 16 * tiles
    alone = w.shape[2:] == stride == (1, 1)
    return kernel == "depthwise" or w.shape[1] < (_MANY_INPUTS if alone else _MANY_IN_STRIPS)


def convolve(
    kernel: str,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    out_size: Pair,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    patch: Pair,
    residual: Tensor | None = None,
    want_slope: bool = True,
) -> Fused:
    """Return act(conv(x) · scale + shift + residual) with its patch means and slopes.

    Runs in the library where `can_convolve` says so, else in torch. Nothing is differentiable.

    Args:
        kernel: What `can_convolve` says: "depthwise" for one filter per channel, the others for a kernel without groups.
        x: The input [N, C, H, W].
        w: The weight, as torch has it.
        bias: The convolution's own bias, or `None`.
        stride: The stride `(h, w)`.
        padding: Zeros before the first row and column; those after the last follow from `out_size`.
        dilation: The dilation `(h, w)`.
        out_size: Size `(h, w)` of the output.
        scale: One factor per channel, or `None` for 1.
        shift: One term per channel, or `None` for 0.
        act: The activation.
        patch: The patch `(h, w)`.
        residual: A map of the output's shape to add before the activation.
        want_slope: Whether the slope is asked for.
    """
    groups = len(w) if kernel == "depthwise" else 1
    shape = (len(x), len(w), *out_size)
    runs = can_convolve(x, w, stride, padding, dilation, groups) == kernel and can_finish(shape, patch, residual)
    if not runs:
        ends = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(out_size, stride, w.shape[2:], dilation, strict=True)]
        after = [end - before - n for end, before, n in zip(ends, padding, x.shape[2:], strict=True)]
        with torch.no_grad():
            padded = F.pad(x, (padding[1], after[1], padding[0], after[0]))
            y = F.conv2d(padded, w, bias, stride, 0, dilation, groups)
        return torch_norm_act(y, scale, shift, act, patch, residual, None, want_slope)
    y = empty(shape, torch.float32, torch.channels_last)
    end = Ending(bias, scale, shift, act, patch, want_slope)
    result = Fused(y, *make_cells(shape, end))
    fields, held = fill_fields(x, w, shape, end, residual, result)
    geometry = (*x.shape[2:], *w.shape[2:], *stride, *dilation, *padding)
    if kernel == "depthwise":
        call("depthwise", DEPTHWISE.pack(*fields, *geometry))
    else:
        call(kernel, DENSE.pack(*fields, x.shape[1], *geometry))
    del held
    return result


def can_finish(shape: tuple[int, ...], patch: Pair, residual: Tensor | None) -> bool:
    """Tell whether the library can finish an output of this shape."""
    plain = residual is None or (
        type(residual) is Tensor
        and residual.shape == shape
        and residual.dtype is torch.float32
        and residual.is_contiguous(memory_format=torch.channels_last)
    )
    return plain and min(shape) > 0 and patch[0] * patch[1] <= _MOST_PIXELS


def make_cells(shape: tuple[int, ...], end: Ending, mean: Tensor | None = None, slope: Tensor | None = None) -> Cells:
    """Return tensors for the patch means and slopes of an output, as far as it has any: new ones where none are given."""
    if end.patch == (1, 1):
        return Cells(None, None)
    cells, layout = (*shape[:2], *count_cells((shape[2], shape[3]), end.patch)), torch.channels_last
    mean = empty(cells, torch.float32, layout) if mean is None else mean
    if not (end.want_slope and end.act.kind):
        return Cells(mean, None)
    dtype = torch.float32 if is_smooth(end.act) else count_dtype(end.patch)
    return Cells(mean, empty(cells, dtype, layout) if slope is None else slope)


def fill_fields(
    x: Tensor | None, w: Tensor, shape: tuple[int, ...], end: Ending, residual: Tensor | None, result: Fused | Cells
) -> tuple[list[int | float], list[Tensor | None]]:
    """Return the fields that both structs begin with, and what must live until the call is over."""
    bias, scale, shift, act, patch, _ = end
    with torch.no_grad():
        if bias is not None:
            bias = bias if scale is None else bias * scale
            shift = bias if shift is None else shift + bias
        held = [x, w.contiguous(), *(v if v is None else v.float().contiguous() for v in (scale, shift))]
    y = result.y if isinstance(result, Fused) else None
    mean, slope = result.mean, result.slope
    count = 0 if slope is None else slope.element_size()
    fields = [*shape, *(_UNPOOLED if patch == (1, 1) else patch), 1, 0, act.kind, count, act.lo, act.hi, act.slope, 0]
    pointers = [None, residual, y, None, None, mean, slope, *held]
    return [*fields, *(0 if v is None else v.data_ptr() for v in pointers)], held
