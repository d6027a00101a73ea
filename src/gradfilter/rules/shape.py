"""Functions that put maps together or copy them: pad, cat, stack, conversions; and those that watch a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter.carriers import AxisMap, coarse, make_carrier
from gradfilter.deferred import make_placeholder, pad_later, wait
from gradfilter.emit import DeferredTensor, finish, wrap
from gradfilter.errors import InputError
from gradfilter.geometry.axes import PAD_MODES, pad_axis
from gradfilter.geometry.tiling import is_map
from gradfilter.rules.meet import meet
from gradfilter.tensor import PatchTensor, find_live, is_live, note_exit, pixels, rule, spatial_size


class Padded(NamedTuple):
    """A zero pad, for the convolution behind it to fold in."""

    x: PatchTensor
    pads: tuple[int, int, int, int]
    version: int

    @property
    def is_intact(self) -> bool:
        """Tell whether x still is what was padded: a rule may have changed it in place since."""
        return is_live(self.x) and self.x.seen_version == self.version


@rule(F.pad, torch._C._nn.pad, any_layout=True)  # type: ignore[attr-defined]  (the latter is what Dynamo records)
def pad(func: Any, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """Pad or crop any axes.

    Equation: `AxisMap` with the coarse matrix of the pad; a zero pad folds into the convolution behind it. The carrier is
    padded along the other axes as the value is.
    Cost: as `AxisMap`; saves nothing.
    Exact when: always, for the gradient that the two tilings can carry.
    """
    if not is_live(input) or len(pad) % 2 or mode not in PAD_MODES:
        return NotImplemented
    x, layout = input, input.spatial
    amounts = [(0, 0)] * x.dim()
    for i in range(len(pad) // 2):
        amounts[-1 - i] = (pad[2 * i], pad[2 * i + 1])
    (top, bottom), (left, right) = amounts[layout.rows], amounts[layout.columns]
    if layout.tokens:
        if bottom or top < 0:
            return NotImplemented
        # Empty tokens in front of a grid: each is a patch by itself.
        layout, top, left = replace(layout, prefix=layout.prefix + top), 0, 0
    else:
        amounts[layout.rows] = amounts[layout.columns] = (0, 0)
    others = any(any(amount) for amount in amounts)
    pads = left, right, top, bottom
    # Zeros around what a crop has left are another map.
    folds = mode == "constant" and not value and min(pads) >= 0 and is_map(x, layout) and not others
    recipe = pad_later(x, pads) if folds else None
    if recipe is not None:
        y = make_placeholder(recipe)
    else:
        with torch.no_grad():
            y = func(pixels(x), pad, mode, value)
    if not y.numel() or (others and mode != "constant"):
        return NotImplemented
    carrier, patch = x.carrier, x.patch
    if others:
        carrier = F.pad(carrier, [n for amount in reversed(amounts) for n in amount])
    if any(pads):
        (h, w), patch = spatial_size(x), x.choices.tiling.patch_for(layout.size(y.shape))
        rows = pad_axis(h, top, bottom, mode, x.patch[0], patch[0])
        columns = pad_axis(w, left, right, mode, x.patch[1], patch[1])
        carrier: Tensor = AxisMap.apply(carrier, rows, columns, layout)  # type: ignore[assignment]
    origin = Padded(x, pads, x.seen_version) if folds else None
    if recipe is None:
        return wrap(y, carrier, patch, x.choices, origin, layout)
    padded = wrap(y, carrier, patch, x.choices, origin, layout, DeferredTensor)
    wait(padded, recipe)
    return padded


class Cat(Function):
    """Carry a gradient back through a concatenation along another axis than rows and columns.

    Equation: each part gets its slice of G.
    Cost: nothing; saves nothing.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, axis: int, *carriers: Tensor) -> Tensor:
        ctx.axis, ctx.sizes = axis, [c.shape[axis] for c in carriers]
        shape = list(carriers[0].shape)
        shape[axis] = sum(ctx.sizes)
        return make_carrier(shape, carriers[0])

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, *g.split(ctx.sizes, ctx.axis)


@rule(torch.cat, torch.concat, torch.concatenate, any_layout=True)
def cat(func: Any, tensors: Any, dim: int = 0, axis: int | None = None) -> Any:
    """Concatenate channels. The finest patch of the parts holds for all; a plain part enters the region there."""
    axis = dim if axis is None else axis
    if puts_in_front(tensors, axis):
        return put_in_front(func, tensors, axis)
    met = meet(tensors)
    if met is None or axis % tensors[0].dim() in met.layout.axes:
        return NotImplemented
    with torch.no_grad():
        y = func([pixels(t) for t in tensors], axis)
    return met.finish(y, Cat.apply(axis, *met.carriers))  # type: ignore[arg-type]


def puts_in_front(tensors: Any, axis: int) -> bool:
    """Tell whether plain tokens (a class token) are put in front of a grid of tokens."""
    *front, last = tensors
    if not is_live(last) or not last.spatial.tokens or axis % last.dim() != last.spatial.rows:
        return False
    return all(not find_live([t]) and t.dim() == last.dim() and t.dtype == last.dtype for t in front)


def put_in_front(func: Any, tensors: Any, axis: int) -> Any:
    """Put plain tokens in front of a grid of tokens; each is a patch by itself."""
    *front, last = tensors
    with torch.no_grad():
        y = func([pixels(t) for t in tensors], axis)
    prefix = last.spatial.prefix + sum(t.shape[axis] for t in front)
    carrier: Tensor = Cat.apply(axis, *front, last.carrier)  # type: ignore[assignment]
    return wrap(y, carrier, last.patch, last.choices, layout=replace(last.spatial, prefix=prefix))


@rule(torch.stack, any_layout=True)
def stack(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Stack maps along a new axis, as `cat`."""
    met = meet(tensors)
    if met is None:
        return NotImplemented
    with torch.no_grad():
        y = func([pixels(t) for t in tensors], dim)
    dim %= y.dim()
    rows, columns = (axis + (dim <= axis) for axis in (met.layout.rows, met.layout.columns))
    layout = replace(met.layout, rows=rows, columns=columns)
    carrier: Tensor = Cat.apply(dim, *(c.unsqueeze(dim) for c in met.carriers))  # type: ignore[assignment]
    return wrap(y, carrier, met.patch, met.choices, layout=layout)


class Copy(Function):
    """Carry a gradient back through a change of dtype, device or memory format.

    Equation: Gx = G.
    Cost: a conversion of G; saves nothing.
    Exact when: always.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, y: Tensor) -> Tensor:
        ctx.device = carrier.device
        return make_carrier(carrier.shape, y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.to(ctx.device), None


@rule(
    Tensor.to, Tensor.contiguous, Tensor.clone, torch.clone, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
    Tensor.type_as, Tensor.cpu, Tensor.cuda, any_layout=True,
)  # fmt: skip
def copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy or convert the value; the carrier follows."""
    x = args[0]
    if not is_live(x):
        return NotImplemented
    value = pixels(x)
    with torch.no_grad():
        y = func(value, *args[1:], **kwargs)
    if y is value:
        return x
    if not y.dtype.is_floating_point:
        return y
    return finish(x, y, Copy.apply(x.carrier, y))  # type: ignore[arg-type]


@rule(torch.autograd.grad, any_layout=True)
def grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse the gradient of an activation that rules have used: at pixel resolution it does not exist."""
    for x in find_live((args[1:], kwargs.get("inputs"))):
        if x.consumed:
            raise InputError(
                f"torch.autograd.grad was asked for an activation behind layer '{x.choices.layer}', whose gradient exists at "
                "patch resolution only. Call retain_grad() on the activation before it is used, e.g. in a forward hook."
            )
    return func(*args, **kwargs)


@rule(Tensor.register_hook, Tensor.retain_grad, any_layout=True)
def watch_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """End the region at a tensor whose pixel gradient somebody wants to see: only there does it exist."""
    x = args[0]
    if is_live(x):
        if x.consumed:
            raise InputError(
                f"{func.__name__} was called on an activation behind layer '{x.choices.layer}' after it was used. "
                "Their gradient exists at patch resolution only. Call it before the activation is used, e.g. in a forward hook."
            )
        x.ended = True
        note_exit([x], func)
    return func(*args, **kwargs)
