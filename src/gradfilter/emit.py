"""The results of rules: a value, a carrier, and the handle on both that the model gets.

A rule whose result is one function of autograd emits it (`emit`, `emit_into`, and `defer` where the value waits); others wrap
what they have (`wrap`, `finish`, `share`). `enter` starts a region, `regrid` goes on with another patch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradfilter.carriers import AxisMap, Carry, Enter, Exit, Out, Rebind, call_function, make_carrier
from gradfilter.deferred import Watch, make_placeholder, pixels, run_on_values, wait
from gradfilter.geometry.axes import overlap_axis
from gradfilter.geometry.tiling import MAP, Layout, Pair, count_cells
from gradfilter.ops.operator import is_recorded
from gradfilter.recipe import Recipe
from gradfilter.regions import Choices
from gradfilter.tensor import PatchTensor, carrier_layout, check_not_borrowed, spatial_size


def wrap(
    value: Tensor,
    carrier: Tensor,
    patch: Pair,
    choices: Choices,
    origin: Any = None,
    layout: Layout = MAP,
    kind: type[PatchTensor] = PatchTensor,
) -> PatchTensor:
    """Return a PatchTensor of a fresh value and its carrier."""
    x: PatchTensor = call_function(Exit, carrier, (value,), patch, layout, choices, kind)  # type: ignore[assignment]
    return adopt(x, carrier, Out(value, patch, choices, kind, layout), origin)


def adopt(x: PatchTensor, carrier: Tensor, out: Out, origin: Any = None) -> PatchTensor:
    """Give a new handle on a value all that it knows."""
    x.carrier, x.origin = carrier, origin
    x.value, x.patch, x.choices, _, x.spatial = out
    x.means, x.kept, x.watch, x.seen_version = {}, {}, Watch(), x._version
    return x


def emit(function: type[Carry], out: Out, *args: Any, origin: Any = None, recipe: Recipe | None = None) -> Tensor:
    """Return the result of a rule that is one function of autograd: a PatchTensor, or a plain one without a gradient.

    Args:
        function: Called with `args` and, last, `out`.
        out: The value; with a recipe, what stands for it until it is computed.
        args: The carrier and whatever else the function takes.
        origin: How the result was made.
        recipe: How the value is computed.
    """
    x, carrier = call_function(function, *args, out)
    if not carrier.requires_grad:
        if recipe is None:
            return out.value
        with torch.no_grad():
            return recipe.run().y
    adopt(x, carrier, out, origin)
    if recipe is not None:
        wait(x, recipe)
    return x


def emit_into(x: PatchTensor | None, function: type[Carry], out: Out, *args: Any) -> Tensor:
    """Return the result of a rule that may have worked in place on x, as `emit` does.

    Args:
        x: The tensor that was changed and is the result; `None` for a new one.
        function: Called with `args`, then x, and last `out`.
        out: The value.
        args: The carrier and whatever else the function takes.
    """
    if x is None:
        return emit(function, out, *args, None)
    check_not_borrowed(x, written=True)
    x.patch = out.patch
    if is_recorded() or x._is_view():  # of a view torch has to know more than `carry` tells
        return rebind(x, call_function(function, *args, None, out)[1])
    x.detach_()
    return renew(x, call_function(function, *args, x, out)[1])


def rebind(x: PatchTensor, carrier: Tensor) -> PatchTensor:
    """Give x, whose value a rule has just changed in place, its new carrier."""
    check_not_borrowed(x, written=True)
    if not is_recorded():
        if not x._is_view():
            x.detach_()
        call_function(Rebind, x, carrier)
    return renew(x, carrier)


def renew(x: PatchTensor, carrier: Tensor) -> PatchTensor:
    """Let x, whose value was changed in place, know nothing of what it was before."""
    x.carrier, x.origin, x.consumed, x.seen_version = carrier, None, False, x._version
    x.means, x.kept = {}, {}
    return x


def finish(
    x: PatchTensor,
    value: Tensor,
    carrier: Tensor,
    *,
    inplace: bool = False,
    patch: Pair | None = None,
    mean: Tensor | None = None,
) -> Tensor:
    """Return the result of a rule on x: a PatchTensor, or a plain tensor where nothing needs a gradient."""
    patch = patch or x.patch
    if inplace:
        x.patch = patch
        y = rebind(x, carrier)
    elif not carrier.requires_grad:
        return value
    else:
        y = wrap(value, carrier, patch, x.choices, layout=x.spatial)
    if mean is not None:
        y.means[patch] = mean
    return y


def make_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a view as torch makes it, with torch's own graph; `None` for a tracer, which does not know PatchTensors."""
    return None if is_recorded() else func(*args, **kwargs)


def share(
    x: PatchTensor, view: Tensor | None, value: Tensor, carrier: Tensor, layout: Layout, patch: Pair | None = None
) -> PatchTensor:
    """Return a view of x as a PatchTensor.

    Args:
        x: The tensor viewed.
        view: The view that `make_view` returns: where it is torch's own, autograd knows that the two share a storage, and
            in-place functions on either are right for both.
        value: The same view of the value.
        carrier: The carrier of the view.
        layout: The layout of the view.
        patch: The patch, where it is not that of x.
    """
    if view is None:
        return wrap(value, carrier, patch or x.patch, x.choices, layout=layout)
    y = view.as_subclass(PatchTensor)
    y.carrier, y.value, y.patch, y.choices, y.origin, y.spatial = carrier, value, patch or x.patch, x.choices, None, layout
    y.means, y.kept, y.watch, y.seen_version, y.borrowed = {}, {}, Watch(closed=True), y._version, x.borrowed
    x.watch.close()  # a change of the view changes x, too
    return y


class DeferredTensor(PatchTensor):
    """A PatchTensor whose value is computed when somebody reads it."""

    __torch_dispatch__ = classmethod(run_on_values)


def defer(recipe: Recipe, function: type[Carry], patch: Pair, choices: Choices, *args: Any, origin: Any = None) -> Tensor:
    """Return a map whose value is computed later, the result of `function` with these arguments; see `emit`."""
    out = Out(make_placeholder(recipe), patch, choices, DeferredTensor)
    return emit(function, out, *args, origin=origin, recipe=recipe)


def enter(x: Tensor, choices: Choices, layout: Layout = MAP) -> PatchTensor:
    """Start a region at x."""
    patch = choices.tiling.patch_for(layout.size(x.shape))
    entered = borrow(wrap(x.detach(), enter_carrier(x, patch, layout), patch, choices, layout=layout))
    entered.watch.close()  # somebody outside holds it, and may change it
    entered.means, entered.kept = choices.log.share(x, (patch, layout), lambda: ({}, {}))
    return entered


def enter_carrier(x: Tensor, patch: Pair, layout: Layout = MAP) -> Tensor:
    """Return a carrier for a plain tensor x."""
    if x.requires_grad:
        return Enter.apply(x, patch, layout)  # type: ignore[return-value]
    return make_carrier(layout.resize(x.shape, count_cells(layout.size(x.shape), patch)), x)


def borrow(x: PatchTensor) -> PatchTensor:
    """Mark x as a second handle on somebody's tensor."""
    x.borrowed = True
    return x


def regrid_carrier(x: PatchTensor, patch: Pair) -> Tensor:
    """Return the carrier of x at another patch size."""
    if patch == x.patch:
        return x.carrier
    rows, columns = (overlap_axis(n, i, o) for n, i, o in zip(spatial_size(x), x.patch, patch, strict=True))
    return AxisMap.apply(x.carrier, rows, columns, carrier_layout(x))  # type: ignore[return-value]


def regrid(x: PatchTensor, patch: Pair, choices: Choices) -> PatchTensor:
    """Return x with another patch size, or under another layer's choices; the value is shared, not copied."""
    if patch == x.patch and choices == x.choices:
        return x
    origin = x.origin if patch == x.patch else None
    again = borrow(wrap(pixels(x), regrid_carrier(x, patch), patch, choices, origin, x.spatial))
    again.means, again.kept, again.watch, x.consumed = x.means, x.kept, x.watch, True
    return again
