"""Functions that move pixels and channels about: pad, cat, flatten, copies."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter.errors import InputError
from gradfilter.patches import PAD_MODES, map_size, pad_axis
from gradfilter.tensor import (
    EXPECTED_EXITS,
    AxisMap,
    PatchTensor,
    coarse,
    enter_carrier,
    find_live,
    finish,
    is_live,
    make_carrier,
    pixels,
    regrid_carrier,
    rule,
    wrap,
)

EXPECTED_EXITS.update({torch.flatten, Tensor.flatten})


class Padded(NamedTuple):
    """A zero pad, for the convolution behind it to fold in."""

    x: PatchTensor
    pads: tuple[int, int, int, int]
    version: int

    @property
    def is_intact(self) -> bool:
        """Tell whether x still is what was padded: a rule may have changed it in place since."""
        return is_live(self.x) and self.x.seen_version == self.version


@rule(F.pad)
def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pad or crop the spatial axes.

    Equation: `AxisMap` with the coarse matrix of the pad; a zero pad folds into the convolution behind it.
    Cost: as `AxisMap`; saves nothing.
    Exact when: always, for the gradient that the two tilings can carry.
    """
    return run_pad(func, *args, **kwargs)


def run_pad(func: Any, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """Apply the rule with torch's argument names."""
    if not is_live(input) or len(pad) > 4 or len(pad) % 2 or mode not in PAD_MODES:
        return NotImplemented
    x = input
    left, right, top, bottom = (*pad, 0, 0, 0, 0)[:4]
    with torch.no_grad():
        y = func(pixels(x), pad, mode, value)
    if not y.numel():
        return NotImplemented
    h, w = map_size(x)
    patch = x.choices.tiling.patch_for(map_size(y))
    rows = pad_axis(h, top, bottom, mode, x.patch[0], patch[0])
    columns = pad_axis(w, left, right, mode, x.patch[1], patch[1])
    carrier: Tensor = AxisMap.apply(x.carrier, rows, columns)  # type: ignore[assignment]
    pads = (left, right, top, bottom)
    folds = mode == "constant" and not value and min(pads) >= 0  # zeros around what a crop has left are another map
    return wrap(y, carrier, patch, x.choices, Padded(x, pads, x.seen_version) if folds else None)


class Cat(Function):
    """Carry a gradient back through a concatenation of channels.

    Equation: each part gets its slice of G.
    Cost: nothing; saves nothing.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, *carriers: Tensor) -> Tensor:
        ctx.channels = [c.shape[1] for c in carriers]
        first = carriers[0]
        return make_carrier((first.shape[0], sum(ctx.channels), *first.shape[2:]), first)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.split(ctx.channels, 1)


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate channels. The finest patch of the parts holds for all; a plain part enters the region there."""
    return run_cat(func, *args, **kwargs)


def run_cat(func: Any, tensors: Any, dim: int = 0, axis: int | None = None) -> Any:
    """Apply the rule with torch's argument names."""
    dim = dim if axis is None else axis
    live = find_live(tensors)
    if not live or any(t.dim() != 4 for t in tensors) or dim not in (1, -3):
        return NotImplemented
    if len({t.dtype for t in tensors}) > 1:
        return NotImplemented
    patch = finest(live)
    with torch.no_grad():
        y = func([pixels(t) for t in tensors], dim)
    carriers = [regrid_carrier(t, patch) if is_live(t) else enter_carrier(t, patch) for t in tensors]
    return finish(live[0], y, Cat.apply(*carriers), patch=patch)  # type: ignore[arg-type]


def finest(tensors: list[PatchTensor]) -> tuple[int, int]:
    """Return the smallest patch per axis: where patch sizes meet, no gradient is made coarser than it was."""
    return min(t.patch[0] for t in tensors), min(t.patch[1] for t in tensors)


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
    Tensor.type_as, Tensor.cpu, Tensor.cuda,
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


@rule(torch.autograd.grad)
def grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse the gradient of an activation that rules have used: at pixel resolution it does not exist."""
    for x in find_live((args[1:], kwargs.get("inputs"))):
        if x.consumed:
            raise InputError(
                f"torch.autograd.grad was asked for an activation behind layer '{x.choices.layer}', whose gradient exists at "
                "patch resolution only. Call retain_grad() on the activation before it is used, e.g. in a forward hook."
            )
    return func(*args, **kwargs)


@rule(Tensor.register_hook, Tensor.retain_grad)
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
        x.choices.log.note(x.choices.layer, func, "the gradient of this tensor is watched at pixel resolution", True)
    return func(*args, **kwargs)
