"""What convolutions take for themselves on a CPU while they run: found by measuring torch's allocator, operator by operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradfilter.flops import aten
from gradfilter.shapes import is_channels_last

SMALL = 20480
"""A single image of at most so many values is convolved without oneDNN, by torch itself."""


def count_scratch(operator: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that an operator takes for itself on a CPU while it runs, on top of its results.

    oneDNN convolves, with kernels larger than 1×1, on copies in a layout of its own: of input, weight and output where maps
    are not channels-last, of the weight alone where they are. The copy of the result is made when the others can be gone.
    """
    if operator.overloadpacket is aten.convolution:
        x, w = args[0], args[1]
        if not uses_onednn(x, w, int(args[8])):
            return 0
        return w.nbytes if is_channels_last(x) else max(find_copy(x) + w.nbytes, out.nbytes)
    if operator.overloadpacket is aten.convolution_backward:
        g, x, w, mask = args[0], args[1], args[2], args[10]
        groups = int(args[9])
        if not uses_onednn(x, w, groups):
            return 0
        if is_channels_last(x):
            return 2 * w.nbytes if mask[1] else w.nbytes
        gx = max(g.nbytes + w.nbytes, find_copy(x)) if mask[0] else 0
        wide = groups > 1 and max(w.shape[2:]) > 3  # oneDNN then needs no copies
        gw = max(find_copy(x) + g.nbytes, w.nbytes) if mask[1] and not wide else 0
        return max(gx, gw)
    return 0


def uses_onednn(x: Tensor, w: Tensor, groups: int) -> bool:
    """Tell whether torch gives a convolution to oneDNN, and that makes copies."""
    if x.dim() != 4 or x.dtype != torch.float32 or w.shape[2:].numel() == 1:
        return False
    return groups > 1 or min(w.shape[2:]) > 3 or len(x) > 1 or x.numel() > SMALL


def find_copy(x: Tensor) -> int:
    """Return the bytes of a map's copy; images are read as they are."""
    return x.nbytes if x.shape[1] > 3 else 0
