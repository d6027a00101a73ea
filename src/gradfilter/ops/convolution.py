"""Convolutions together with what follows them: norm, residual, activation, patch means and slopes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.geometry.tiling import Pair, count_cells, count_dtype
from gradfilter.ops.activation import check_act, norm_act
from gradfilter.ops.check import Check
from gradfilter.ops.native import conv, fused
from gradfilter.ops.native import expand as expansion
from gradfilter.ops.native.values import IDENTITY, Act, Cells, Ending, Expanded, Fused, is_smooth
from gradfilter.ops.operator import operator


def check_places(
    check: Check, x: Sequence[int], w: Sequence[int], stride: Pair, padding: Pair, dilation: Pair, out_size: Pair
) -> None:
    """Check where a convolution of a map reads. Zeros behind the end of the map are as many as its output takes."""
    for name, pair, least in (
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", dilation, 1),
        ("out_size", out_size, 1),
    ):
        check.pair(name, pair, least)
    ends = ((n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(out_size, stride, w[2:], dilation, strict=True))
    zeros = tuple(max(p, end - p - n) for end, p, n in zip(ends, padding, x[2:], strict=True))
    if max(zeros) > conv.MOST_ZEROS:
        given = f"= {out_size}, for which {zeros} zeros are read around the map"
        check.refuse("out_size", given, f"Give sizes that take at most {conv.MOST_ZEROS}.")


def check_cells(check: Check, cells: Cells | None, shape: Sequence[int], act: Act, patch: Pair, like: Tensor) -> None:
    """Check that patch means and slopes of an output of this shape can be written to tensors that were given for them."""
    if cells is None:
        return
    check.instance("cells", cells, Cells)
    sizes = (*shape[:2], *count_cells((shape[2], shape[3]), patch))
    has_mean, has_slope = patch != (1, 1), patch != (1, 1) and act.kind != IDENTITY.kind
    counts = count_dtype(patch) if has_slope and not is_smooth(act) else None
    for name, x, is_wanted, dtype in (("mean", cells.mean, has_mean, None), ("slope", cells.slope, has_slope, counts)):
        if (x is not None) != is_wanted:
            check.refuse(f"cells.{name}", f"of type {type(x).__name__}", "Give the cells that make_cells makes.")
        if x is None:
            continue
        if dtype is None:
            check.shape(f"cells.{name}", x, sizes, like)
        else:
            check.counts(f"cells.{name}", x, like)
            if x.shape != sizes or x.dtype is not dtype:
                given = f"of shape {list(x.shape)} and {x.dtype}"
                check.refuse(f"cells.{name}", given, f"Give {dtype} of shape {list(sizes)}.")
        check.apart(f"cells.{name}", x)


def check_convolve(
    check: Check,
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
) -> None:
    """Check the arguments of `convolve`."""
    n, channels, _, _ = check.map("x", x)
    outputs, inputs, _, _ = check.weight("w", w, x)
    check.whole("groups", groups)
    if groups < 1 or outputs % groups or inputs * groups != channels:
        wanted = f"x has {channels} channels, w takes {inputs} in each of {groups} groups and gives {outputs}."
        check.refuse("groups", f"= {groups}", wanted)
    check_places(check, x.shape, w.shape, stride, padding, dilation, out_size)
    check.shape("bias", bias, (outputs,), x)
    for name, row in (("scale", scale), ("shift", shift)):
        check.row(name, row, outputs, x)
    check_act(check, "act", act)
    check.pair("patch", patch)
    check.addend("residual", residual, (n, outputs, *out_size), x)
    check_cells(check, cells, (n, outputs, *out_size), act, patch, x)


@operator(kernel=conv.convolve, check=check_convolve, eager=("cells",))
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
) -> Fused:
    """Return act(conv(x) · scale + shift + residual) with its patch means and slopes.

    Equation: y = act((w ∗ x + b)·scale + shift + residual); means and slopes as in `norm_act`.
    Cost: the convolution's 2·Ci/groups·kh·kw operations per output pixel; what follows is done in the cache.
    Exact when: always.

    Nothing is differentiable: a rule says what the gradient is.

    Args:
        x: The input [N, Ci, H, W].
        w: The weight [Co, Ci/groups, kh, kw].
        bias: The convolution's own bias [Co], or `None`.
        stride: The stride `(h, w)`.
        padding: Zeros before the first row and column; those after the last follow from `out_size`.
        dilation: The dilation `(h, w)`.
        groups: The groups.
        out_size: Size `(h, w)` of the output.
        scale: One factor per channel [Co], or `None` for 1.
        shift: One term per channel [Co], or `None` for 0.
        act: The activation.
        patch: The patch `(h, w)`.
        residual: A map of the output's shape to add before the activation.
        cells: Where patch means and slopes go, as `make_cells` makes them; `None` for new tensors.
    """
    h, width = ((n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(out_size, stride, w.shape[2:], dilation, strict=True))
    after = max(h - padding[0] - x.shape[2], 0), max(width - padding[1] - x.shape[3], 0)
    with torch.no_grad():
        padded = F.pad(x, (padding[1], after[1], padding[0], after[0]))[:, :, :h, :width]
        y = F.conv2d(padded, w, bias, stride, 0, dilation, groups)
        return give_cells(norm_act.reference(y, scale, shift, act, patch, residual), cells)


def give_cells(found: Fused, cells: Cells | None) -> Fused:
    """Return a result whose patch means and slopes are written to tensors that were given for them.

    As the library writes them: autograd, which may have saved these tensors, does not know of it.
    """
    if cells is None:
        return found
    for given, new in zip(cells, found[1:], strict=True):
        if given is not None and new is not None:
            given.data.copy_(new)
    return Fused(found.y, *cells)


def check_expand(
    check: Check,
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
) -> None:
    """Check the arguments of `expand`."""
    n, channels, *size = check.map("x", x)
    hidden = check.weight("w", w, x)[0]
    check.shape("w", w, (hidden, channels, 1, 1))
    kernel = check.map("taps", taps, x)[2:]
    check.shape("taps", taps, (hidden, 1, *kernel))
    check_places(check, x.shape, taps.shape, stride, padding, dilation, out_size)
    for name, ending in (("middle", middle), ("end", end)):
        check.instance(name, ending, Ending)
        check.shape(f"{name}.bias", ending.bias, (hidden,), x)
        for field in ("scale", "shift"):
            check.row(f"{name}.{field}", getattr(ending, field), hidden, x)
        check_act(check, f"{name}.act", ending.act)
        check.pair(f"{name}.patch", ending.patch)
    check_cells(check, cells, (n, hidden, *size), middle.act, middle.patch, x)


@operator(kernel=expansion.expand, check=check_expand, eager=("cells",))
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
) -> Expanded:
    """Return a depthwise convolution of a pointwise one, each with what follows it, without the map between them.

    Equation: hidden = act(w ∗ x · scale + shift), y = act(taps ∗ hidden · scale + shift), each with its own ending; patch means
    and slopes of both.
    Cost: that of both convolutions; the hidden map, the largest of a mobile network, is never in memory as a whole.
    Exact when: always.

    Nothing is differentiable: a rule says what the gradient is.

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
        cells: Where patch means and slopes of the hidden map go, as `make_cells` makes them; `None` for new tensors.
    """
    one, size = (1, 1), (x.shape[2], x.shape[3])
    hidden = convolve(x, w, middle.bias, one, (0, 0), one, 1, size, *middle[1:])
    out = convolve(hidden.y, taps, end.bias, stride, padding, dilation, len(w), out_size, *end[1:])
    return Expanded(Cells(*give_cells(hidden, cells)[1:]), out)


def check_fold(check: Check, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> None:
    """Check the arguments of `fold_norm`."""
    check.number("eps", eps)
    check.tensor("mean", mean)
    check.tensor("var", var)
    if mean.dim() != 1:
        check.refuse("mean", f"of shape {list(mean.shape)}", "Give one number per channel.")
    for name, row in (("gamma", gamma), ("beta", beta), ("var", var)):
        check.row(name, row, len(mean), mean)


@operator(kernel=fused.fold, check=check_fold)
def fold_norm(gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return a batch norm with fixed statistics as a scale and a shift per channel, in single precision.

    Equation: scale = γ/√(var + eps), shift = β − mean·scale.
    Cost: a few operations per channel, in double precision.
    Exact when: always.

    Args:
        gamma: Its factors [C], or `None` for 1.
        beta: Its terms [C], or `None` for 0.
        mean: Its running means [C].
        var: Its running variances [C].
        eps: What is added to them.
    """
    with torch.no_grad():
        scale = (var.double() + eps).rsqrt()
        scale = scale if gamma is None else scale * gamma
        shift = -mean * scale if beta is None else beta - mean * scale
        return scale.float(), shift.float()
