"""Scale, shift, residual and activation in one pass that leaves patch means and slopes behind."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradfilter.geometry.tiling import Pair, count_cells, count_dtype
from gradfilter.ops.check import FLOATS
from gradfilter.ops.native.library import DTYPES, PLAIN, call, is_plain, is_readable, is_row, run
from gradfilter.ops.native.memory import empty
from gradfilter.ops.native.task import DOUBLE, FLOAT, INT32, INT64, MAP, POINTER, Record, Task
from gradfilter.ops.native.values import SILU, Act, Fused, is_smooth

NORM_ACT = Record(
    "norm_act",
    *((MAP, "map"), (INT32, "kind count_bytes"), (FLOAT, "lo hi leak"), (INT32, "sums")),
    (POINTER, "x residual y scale shift mean slope"),
)
_TASK = Task(NORM_ACT)
_FOLD = Task(Record("fold", (POINTER, "gamma beta mean var"), (DOUBLE, "eps"), (INT64, "c"), (POINTER, "scale shift")))
_MOST_PIXELS = 1 << 24
"""Pixels of a patch that single precision counts."""


def memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format of a dense map."""
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def run_pass(
    x: Tensor,
    y: Tensor | None,
    act: Act,
    patch: Pair,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    mean: Tensor | None = None,
    slope: Tensor | None = None,
    sums: bool = False,
) -> None:
    """Call the library's pass on tensors that it can read, all of one layout."""
    n, c, h, w = x.shape
    task = _TASK.pack(
        n,
        c,
        h,
        w,
        patch[0],
        patch[1],
        not x.is_contiguous(),
        DTYPES[x.dtype],
        act.kind,
        0 if slope is None else slope.element_size(),
        act.lo,
        act.hi,
        act.slope,
        sums,
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if y is None else y.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if shift is None else shift.data_ptr(),
        0 if mean is None else mean.data_ptr(),
        0 if slope is None else slope.data_ptr(),
    )
    call(_TASK, task, x, residual, y, scale, shift, mean, slope)


def norm_act(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    patch: Pair,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Fused | None:
    """Return y = act(x · scale + shift + residual) with its patch means and slopes."""
    shape, dtype = x.shape, x.dtype
    plain = is_readable(x) and is_plain(residual, shape, dtype) and is_plain(out, shape, dtype)
    if not (plain and is_known(act, patch) and are_rows(shape[1], scale, shift)):
        return None
    layout = memory_format(x)
    if residual is not None:
        residual = residual.contiguous(memory_format=layout)
    scale, shift = as_floats(scale), as_floats(shift)
    if out is not None and not _is_target(out, layout, x, residual, scale, shift):
        return None
    y = empty(x.shape, x.dtype, layout) if out is None else out
    mean = slope = None
    if patch != (1, 1):
        n, c, h, w = x.shape
        cells = (n, c, *count_cells((h, w), patch))
        mean = empty(cells, x.dtype, layout)
        if act.kind:
            slope = empty(cells, x.dtype if is_smooth(act) else count_dtype(patch), layout)
    run_pass(x, y, act, patch, scale=scale, shift=shift, residual=residual, mean=mean, slope=slope)
    if out is not None and not out.is_inference():
        increment_version(out)
    return Fused(y, mean, slope)


def is_known(act: Act, patch: Pair) -> bool:
    """Tell whether passes know an activation, whose bounds are numbers, and count the pixels of a patch."""
    (h, w), (kind, lo, hi, _) = patch, act
    known = type(kind) is int and 0 <= kind <= SILU.kind and lo == lo and hi == hi
    return known and isinstance(patch, tuple) and type(h) is type(w) is int and h > 0 < w and h * w <= _MOST_PIXELS


def are_rows(channels: int, *values: Tensor | None) -> bool:
    """Tell whether each of the values is one number per channel in main memory, or not there."""
    return all(  # of a list: half the time
        [  # noqa: C419
            v is None
            or (
                type(v) in PLAIN
                and v.shape == (channels,)
                and v.is_cpu
                and v.layout is torch.strided
                and v.dtype in FLOATS
                and v.data_ptr() != 0
            )
            for v in values
        ]
    )


def _is_target(out: Tensor, layout: torch.memory_format, x: Tensor, residual: Tensor | None, *rows: Tensor | None) -> bool:
    """Tell whether y can go to a tensor: in memory like x, and nothing in it is overwritten before it is read.

    Maps may be the target itself; rows are read to the end.
    """
    if out.is_inference() and not torch.is_inference_mode_enabled():
        return False
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    maps_apart = all(m is None or m.data_ptr() == begin or not _meets(m, begin, end) for m in (x, residual))
    return (
        out.is_contiguous(memory_format=layout)
        and maps_apart
        and not any(r is not None and _meets(r, begin, end) for r in rows)
    )


def _meets(read: Tensor, begin: int, end: int) -> bool:
    """Tell whether a dense tensor has numbers between two addresses."""
    return read.data_ptr() < end and begin < read.data_ptr() + read.nbytes


def as_floats(values: Tensor | None) -> Tensor | None:
    """Return one number per channel as the library reads them."""
    if values is None or is_row(values):
        return values
    return values.detach().to(torch.float32).contiguous().resolve_neg()


def fold(gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """Return batch normalisation with fixed statistics as a scale and a shift per channel, in single precision."""
    shape, single = mean.shape, torch.float32
    plain = [  # the same as `are_rows` and `is_row` of each: every norm asks
        v is None
        or (
            type(v) in PLAIN
            and v.dtype is single
            and v.shape == shape
            and v.layout is torch.strided
            and v.is_cpu
            and v.is_contiguous()
            and not v.is_neg()
            and v.data_ptr() != 0
        )
        for v in (gamma, beta, mean, var)
    ]
    if len(shape) != 1 or False in plain:
        return None
    scale, shift = torch.empty_like(mean), torch.empty_like(mean)
    task = _FOLD.pack(
        0 if gamma is None else gamma.data_ptr(),
        0 if beta is None else beta.data_ptr(),
        mean.data_ptr(),
        var.data_ptr(),
        eps,
        mean.shape[0],
        scale.data_ptr(),
        shift.data_ptr(),
    )
    run(_FOLD, task)
    return scale, shift
