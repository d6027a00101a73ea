"""Functions that leave the map alone and rearrange the other axes: views, channel shuffles, NHWC, tokens.

What such a function does to the value it does to the carrier too, since both have the same axes and differ in the size of
the spatial ones only. Torch's own function runs on both: a view of a carrier, which has no storage, costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradfilter.carriers import AxisMap
from gradfilter.emit import finish, make_view, share, wrap
from gradfilter.geometry.axes import AxisMatrix, project_axis
from gradfilter.geometry.tiling import Layout, count_cells
from gradfilter.rules.functions import find_functions
from gradfilter.rules.meet import move_layout
from gradfilter.tensor import REGION_ENDS, PatchTensor, is_live, pixels, rule, spatial_size

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Strides of axes that can be told apart: none is another one times a size, as the stride of a new axis is."""


def follow_axes(func: Callable[..., Any], x: PatchTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the layout of each result of a view function, by watching where the strides of an empty tensor go.

    `None` for a result whose rows and columns are not those of x, whole.
    """
    strides = PRIMES[: x.dim()]
    probe = torch.empty_strided(x.shape, strides, device="meta")
    found = func(probe, *args, **kwargs)

    def locate(y: Tensor) -> Layout | None:
        places = []
        for axis in (x.spatial.rows, x.spatial.columns):
            matches = [i for i, stride in enumerate(y.stride()) if stride == strides[axis]]
            if not matches or y.shape[matches[0]] != x.shape[axis]:
                return None
            places.append(matches[0])
        return Layout(places[0], places[1], x.spatial.tokens, x.spatial.prefix)

    return locate(found) if isinstance(found, Tensor) else [locate(y) for y in found]


@rule(
    *find_functions(
        "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze", "chunk", "split",
        "split_with_sizes", "tensor_split", "unbind", "narrow", "select", inplace=False,
    ),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
    any_layout=True,
)  # fmt: skip
def rearrange(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move, split, drop or add axes, or cut pieces off them, rows and columns staying whole.

    Equation: ȳ = f(x̄), so Gx = fᵀ(G): torch's own backward of the view, at patch resolution.
    Cost: none forward, a copy of G at most backward; saves nothing.
    Exact when: always, for the gradient that the tiling can carry.
    """
    x = args[0]
    if not is_live(x):
        return NotImplemented
    layouts = follow_axes(func, x, args[1:], kwargs) if x.dim() <= len(PRIMES) else None
    if layouts is None or (isinstance(layouts, list) and None in layouts):
        return NotImplemented
    with torch.no_grad():
        values = func(pixels(x), *args[1:], **kwargs)
    try:
        carriers = func(x.carrier, *args[1:], **kwargs)
    except RuntimeError:  # names a number of rows, which is not that of cells: `narrow` to all of them
        return NotImplemented
    views = make_view(func, args, kwargs)
    if isinstance(layouts, Layout):
        return share(x, views, values, carriers, layouts)
    views = [None] * len(values) if views is None else views
    return type(values)(share(x, *parts) for parts in zip(views, values, carriers, layouts, strict=True))


def count_behind(shape: Sequence[int], axis: int) -> int:
    """Return how many elements lie behind one step along an axis: its stride in a contiguous tensor."""
    return math.prod(shape[axis + 1 :])


def align(shape: Sequence[int], wanted: Sequence[int], layout: Layout) -> Layout | None:
    """Return where rows and columns are after a reshape from one shape to another, or `None` where they do not stay whole.

    Rows and columns may stay as they are, merge into tokens, or come out of tokens again; around them anything goes. A
    reshape moves no element, so an axis is the same one if as many elements lie behind it.
    """

    def find(size: int, behind: int, other: int | None = None) -> int | None:
        places = [j for j, n in enumerate(wanted) if n == size and count_behind(wanted, j) == behind and j != other]
        return places[-1] if places else None

    behind = count_behind(shape, layout.columns)
    if layout.tokens:
        whole, columns = find(shape[layout.rows], behind), find(layout.tokens[1], behind)
        rows = find(layout.tokens[0], behind * layout.tokens[1], columns)
        apart = None if rows is None or columns is None or layout.prefix else Layout(rows, columns)
        # Where a side is one pixel both fit: with more axes than before, tokens have become a map again.
        if whole is None or (apart is not None and len(wanted) > len(shape)):
            return apart
        return Layout(whole, whole, layout.tokens, layout.prefix)
    columns = find(shape[layout.columns], behind)
    rows = find(shape[layout.rows], count_behind(shape, layout.rows), columns)
    if rows is not None and columns is not None:
        return Layout(rows, columns)
    size = layout.size(shape)
    whole = find(size[0] * size[1], behind) if layout.columns == layout.rows + 1 else None
    return None if whole is None else Layout(whole, whole, size)


def takes_shape(func: Any, args: tuple[Any, ...]) -> Any:
    """Give a plain tensor the shape of a PatchTensor, which has no other part in it."""
    if isinstance(args[0], PatchTensor) or len(args) != 2 or not is_live(args[1]):
        return NotImplemented
    return func(args[0], pixels(args[1]))


@rule(
    *find_functions("reshape", "view", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", inplace=False),
    any_layout=True,
)
def reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split and merge axes, rows and columns staying whole or merging into tokens; a flat feature vector ends the region.

    Equation, Cost, Exact when: as `rearrange`.
    """
    x = args[0]
    if not is_live(x):
        return takes_shape(func, args)
    value = pixels(x)
    with torch.no_grad():
        y = func(value, *args[1:], **kwargs)
    if y is value:
        return x
    if y.dtype != x.dtype:
        return NotImplemented
    layout = align(x.shape, y.shape, x.spatial)
    if layout is None:
        return REGION_ENDS if y.dim() <= 2 else NotImplemented
    carrier = x.carrier.reshape(layout.resize(y.shape, count_cells(spatial_size(x), x.patch)))
    if y._base is None:  # a copy: reshape cannot always make a view
        return wrap(y, carrier, x.patch, x.choices, layout=layout)
    return share(x, make_view(func, args, kwargs), y, carrier, layout)


@rule(Tensor.expand, Tensor.expand_as, any_layout=True)
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat axes of size one, or add axes in front; rows and columns stay.

    Equation, Cost, Exact when: as `rearrange`.
    """
    x = args[0]
    if not is_live(x):
        return takes_shape(func, args)
    with torch.no_grad():
        y = func(pixels(x), *args[1:], **kwargs)
    layout = move_layout(x.spatial, y.dim() - x.dim())
    if layout.size(y.shape) != spatial_size(x) or y.shape[layout.rows] != x.shape[x.spatial.rows]:
        return NotImplemented
    carrier = x.carrier.expand(layout.resize(y.shape, count_cells(spatial_size(x), x.patch)))
    return share(x, make_view(func, args, kwargs), y, carrier, layout)


DIMS: dict[str, Callable[..., Any]] = {
    "flip": lambda *dims, **named: named.get("dims", dims[0] if dims and not isinstance(dims[0], int) else dims),
    "roll": lambda shifts, dims=(): dims,
    "index_select": lambda dim, index: dim,
    "repeat_interleave": lambda repeats, dim=None, output_size=None: () if dim is None else dim,
    "repeat": lambda *times, **named: [
        i for i, n in enumerate(named.get("repeats") or (times[0] if len(times) == 1 else times)) if n != 1
    ],
    "channel_shuffle": lambda groups: 1,
    "native_channel_shuffle": lambda groups: 1,
}
"""Functions that copy along some axes: which ones, from their arguments behind the input; none stands for all."""


@rule(*find_functions(*DIMS, inplace=False), any_layout=True)
def shuffle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reorder or repeat entries of the other axes.

    Equation: as `rearrange`.
    Cost: a copy of G backward; saves indices where they are a tensor.
    Exact when: always, for the gradient that the tiling can carry.
    """
    x = args[0]
    if not is_live(x):
        return NotImplemented
    dims = DIMS[func.__name__](*args[1:], **kwargs)
    dims = [d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)]
    if not dims or set(dims) & set(x.spatial.axes):
        return NotImplemented
    with torch.no_grad():
        y = func(pixels(x), *args[1:], **kwargs)
    if y.dim() != x.dim():
        return NotImplemented
    return finish(x, y, func(x.carrier, *args[1:], **kwargs))


@lru_cache(maxsize=4096)
def crop_axis(size: int, start: int, stop: int, step: int, in_patch: int, out_patch: int) -> AxisMatrix:
    """Return the coarse matrix [out cells, in cells] of taking every `step`-th pixel of one axis."""
    return AxisMatrix(project_axis(np.arange(start, stop, step)[:, None], size, in_patch, out_patch)[0])


def spell_out(index: Any, dim: int) -> list[Any]:
    """Return an index with an entry for every axis: `None` for a new one, whole slices in place of an ellipsis."""
    index = list(index) if isinstance(index, tuple) else [index]
    at = next((n for n, i in enumerate(index) if i is Ellipsis), len(index))
    missing = dim - sum(i is not None and i is not Ellipsis for i in index)
    return [*index[:at], *[slice(None)] * missing, *index[at + 1 :]]


def is_view(index: list[Any]) -> bool:
    """Tell whether an index of numbers, slices and new axes makes a view."""
    return all(i is None or isinstance(i, slice) or type(i) is int for i in index)


def takes_entries(index: list[Any]) -> bool:
    """Tell whether an index takes a list of entries of one axis, and all of the others."""
    entries = [i for i in index if not isinstance(i, slice)]
    if len(entries) != 1:
        return False
    if isinstance(entries[0], list):
        return all(type(n) is int for n in entries[0])
    return isinstance(entries[0], Tensor) and entries[0].dim() == 1 and entries[0].dtype == torch.long


@rule(Tensor.__getitem__, any_layout=True)
def getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index: numbers and slices on the other axes, or a list of entries of one of them; slices crop or thin out the map.

    Equation: as `rearrange`; a crop is an `AxisMap` whose matrix reads the pixels that stay.
    Cost: as `rearrange`, `AxisMap`; saves indices where they are a tensor.
    Exact when: always, for the gradient that the two tilings can carry.
    """
    x = args[0]
    if not is_live(x):
        return NotImplemented
    index = spell_out(args[1], x.dim())
    if not is_view(index) and not takes_entries(index):
        return NotImplemented
    axis = out = 0
    dropped = 0
    places: dict[int, int] = {}
    kept: dict[int, range] = {}
    for n, i in enumerate(index):
        if i is not None and axis in x.spatial.axes:
            if not isinstance(i, (int, slice)):
                return NotImplemented
            taken = range(x.shape[axis])[i]
            if x.spatial.prefix and (taken if isinstance(taken, int) else max(taken, default=0)) < x.spatial.prefix:
                return REGION_ENDS  # the class token, taken to the classifier
            if isinstance(taken, int):
                return NotImplemented
            places[axis], kept[axis] = out, taken
            if taken == range(taken.start, x.shape[axis]) and taken.start <= x.spatial.prefix:
                dropped = taken.start  # of the prefix
            index[n] = slice(dropped, None)  # for the carrier
        axis, out = axis + (i is not None), out + (type(i) is not int)
    with torch.no_grad():
        y = func(pixels(x), args[1])
    layout = Layout(places[x.spatial.rows], places[x.spatial.columns], x.spatial.tokens, x.spatial.prefix - dropped)
    carrier = x.carrier[tuple(index)]
    whole = all(len(r) == x.shape[axis] - dropped for axis, r in kept.items())
    if whole:
        if is_view(index):
            return share(x, make_view(func, args, kwargs), y, carrier, layout)
        return wrap(y, carrier, x.patch, x.choices, layout=layout)
    if x.spatial.tokens or not y.numel() or not is_view(index):
        return NotImplemented
    patch = x.choices.tiling.patch_for(layout.size(y.shape))
    rows, columns = (
        crop_axis(x.shape[axis], kept[axis].start, kept[axis].stop, kept[axis].step, x.patch[i], patch[i])
        for i, axis in enumerate((x.spatial.rows, x.spatial.columns))
    )
    cropped: Tensor = AxisMap.apply(carrier, rows, columns, layout)  # type: ignore[assignment]
    return share(x, make_view(func, args, kwargs), y, cropped, layout, patch)
