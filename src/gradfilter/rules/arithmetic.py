"""Sums and products at patch resolution: residuals, offsets, factors, gates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradfilter.carriers import Carry, Out, carry, coarse, make_carrier
from gradfilter.deferred import can_add, wait
from gradfilter.emit import defer, emit_into, finish
from gradfilter.geometry.tiling import Layout, Pair, count_cells
from gradfilter.keep import Kept, hold
from gradfilter.keep.base import load, save
from gradfilter.ops import pool_mean
from gradfilter.rules.elementwise import Derivative, elementwise
from gradfilter.rules.functions import find_functions, is_inplace
from gradfilter.rules.meet import Meeting, broadcast, meet
from gradfilter.tensor import PatchTensor, find_live, hold_map, is_live, leave, mean, pixels, rule, spatial_size


class Add(Carry):
    """Carry a gradient back through a·x + b·y between PatchTensors.

    Equation: Gx = a·G, Gy = b·G.
    Cost: nothing where the factor is 1; saves nothing.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: float, b: float, changed: Tensor | None, out: Out) -> tuple[Tensor, Tensor]:
        ctx.a, ctx.b = a, b
        return carry(ctx, x.shape, out, changed)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        return scaled(g, ctx.a), scaled(g, ctx.b), None, None, None, None


def scaled(g: Tensor, factor: float) -> Tensor:
    """Return factor · g, g itself where the factor is 1."""
    return g if factor == 1 else g * factor


class Offset(Function):
    """Carry a gradient back through a·x + b·s, s constant over space.

    Equation: Gx = a·G, gs = b·ΣG over the patches (and the axes along which s is broadcast).
    Cost: nothing where the factor is 1; saves nothing.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, s: Tensor | None, a: float, b: float, value: Tensor) -> Tensor:
        ctx.a, ctx.b, ctx.shape = a, b, None if s is None else s.shape
        return make_carrier(carrier.shape, value)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        gs = scaled(g, ctx.b).sum_to_size(ctx.shape) if ctx.needs_input_grad[1] else None
        return scaled(g, ctx.a), gs, None, None, None


class Scale(Function):
    """Carry a gradient back through x·s, s constant over space.

    Equation: Gx = G·s, gs = Σ G·x̄ over the patches (and the axes along which s is broadcast).
    Cost: two products; saves s, and x̄ where s needs a gradient.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, s: Tensor, x_bar: Kept | None, value: Tensor) -> Tensor:
        save(ctx, [x_bar], s if ctx.needs_input_grad[0] else None)
        ctx.shape = s.shape
        return make_carrier(carrier.shape, value)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        x_bar, s = load(ctx)
        gs = (g * x_bar).sum_to_size(ctx.shape) if x_bar is not None else None
        return g * s if s is not None else None, gs, None, None


class Product(Function):
    """Carry a gradient back through x·y between PatchTensors: gates.

    Equation: Gx = G·ȳ, Gy = G·x̄, since G is constant in each patch.
    Cost: two products; saves x̄ and ȳ.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, x_bar: Kept, y_bar: Kept, value: Tensor) -> Tensor:
        save(ctx, [x_bar if ctx.needs_input_grad[1] else None, y_bar if ctx.needs_input_grad[0] else None])
        return make_carrier(x.shape, value)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        x_bar, y_bar = load(ctx)
        return None if y_bar is None else g * y_bar, None if x_bar is None else g * x_bar, None, None, None


def is_spatially_constant(other: Tensor, x: PatchTensor) -> bool:
    """Tell whether `other`, broadcast against x, has one value over all of the map, as a number per channel has."""
    new = x.dim() - other.dim()
    return new >= 0 and all(axis < new or other.shape[axis - new] == 1 for axis in x.spatial.axes)


def is_map(other: Any, x: PatchTensor) -> bool:
    """Tell whether `other` has a gradient of its own at every place of the map, which may be a map of one pixel."""
    return isinstance(other, Tensor) and other.requires_grad and (is_live(other) or not is_spatially_constant(other, x))


def expand_carrier(x: PatchTensor, y: Tensor) -> Tensor | None:
    """Return the carrier of x broadcast to the shape of a result y, or `None` where that has other axes or another map."""
    if y.is_complex():
        return None  # the gradient of a real map at a complex result is a real part: an exit
    if y.shape == x.shape:
        return x.carrier
    size = spatial_size(x)
    if y.dim() != x.dim() or x.spatial.resize(y.shape, size) != list(y.shape):
        return None
    return x.carrier.expand(x.spatial.resize(y.shape, count_cells(size, x.patch)))


def order(first: Any, second: Any, inplace: bool) -> tuple[PatchTensor, Any] | None:
    """Return the PatchTensor that decides and the other argument; a map of one pixel (a gate) is a plain tensor."""
    pair = [first, second]
    live = [v for v in pair if is_live(v)]
    if not live or (inplace and not is_live(first)):
        return None
    if len(live) == 2 and (1, 1) in (sizes := [spatial_size(v) for v in pair]) and sizes[0] != sizes[1]:
        small = sizes.index((1, 1))
        if inplace and small == 0:
            return None
        pair[small] = leave(pair[small])
    return (pair[0], pair[1]) if is_live(pair[0]) else (pair[1], pair[0])


def run_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], a: float, b: float) -> Any:
    """Return a·first + b·second, computed by `func` itself, where at least one of the two is a live PatchTensor."""
    inplace = is_inplace(func, kwargs)
    ordered = order(args[0], args[1], inplace)
    if ordered is None:
        return NotImplemented
    x, other = ordered
    if x is not args[0]:
        a, b = b, a
    met = None
    if is_map(other, x):  # a plain residual enters the region where it meets it
        met = meet([x, other], broadcast(x, other))
        if met is None:
            return NotImplemented
    if met is not None and a == b == 1 and is_live(other):
        if can_add(x, other):
            return add_deferred(x, other, met, inplace)
        if not inplace and can_add(other, x):
            return add_deferred(other, x, met, inplace)
    with torch.no_grad():
        y = func(*map(value_of, args), **kwargs)
    if met is not None:
        return emit_into(x if inplace else None, Add, met.make_out(y), *met.carriers, a, b)
    carrier = expand_carrier(x, y)
    if carrier is None:
        return NotImplemented
    trained = isinstance(other, Tensor) and other.requires_grad
    if trained or a != 1 or y.dtype != x.dtype:
        carrier = Offset.apply(carrier, other if trained else None, a, b, y)
    return finish(x, y, carrier, inplace=inplace)  # type: ignore[arg-type]


def add_deferred(x: PatchTensor, residual: PatchTensor, met: Meeting, inplace: bool) -> Tensor:
    """Return the sum of a deferred x and a residual, deferred."""
    assert x.recipe is not None
    value = pixels(residual)
    recipe = x.recipe.add(residual, value)
    if not inplace:
        return defer(recipe, Add, met.patch, met.choices, *met.carriers, 1, 1, None)
    wait(x, recipe)
    return emit_into(x, Add, met.make_out(value), *met.carriers, 1, 1)


def value_of(argument: Any) -> Any:
    """Return an argument of a function as its values alone take it."""
    return pixels(argument) if isinstance(argument, PatchTensor) else argument


@rule(*find_functions("add", "__add__", "__radd__", "__iadd__"), any_layout=True)
def add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add PatchTensors (residuals), numbers, and plain tensors: constant over space, frozen, or entering here."""
    if len(args) != 2 or set(kwargs) - {"alpha"}:
        return NotImplemented
    return run_sum(func, args, kwargs, 1, kwargs.get("alpha", 1))


@rule(*find_functions("sub", "subtract", "__sub__", "__isub__"), any_layout=True)
def sub(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Subtract, as `add`."""
    if len(args) != 2 or set(kwargs) - {"alpha"}:
        return NotImplemented
    return run_sum(func, args, kwargs, 1, -kwargs.get("alpha", 1))


@rule(torch.rsub, Tensor.__rsub__, any_layout=True)
def rsub(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Subtract from the second argument, as `add`."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    return run_sum(func, args, kwargs, -1, 1)


def mean_at(x: Tensor, patch: Pair, layout: Layout, changing: bool) -> Tensor:
    """Return the patch means of an argument that is about to change or not: at patch 1 they are the value itself."""
    means = mean(x) if is_live(x) and patch == x.patch else pool_mean(pixels(x), patch, layout)
    return means.clone() if changing and patch == (1, 1) else means


def multiply_maps(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: PatchTensor, other: Tensor) -> Any:
    """Return x · other, both with a gradient at every place of the map."""
    inplace = is_inplace(func, kwargs)
    shape = broadcast(x, other)
    if not is_live(other):
        other = other.reshape(*[1] * (len(shape) - other.dim()), *other.shape)
    met = meet([x, other], shape)
    if met is None:
        return NotImplemented
    with torch.no_grad():
        means = [mean_at(v, met.patch, v.spatial if is_live(v) else met.layout, inplace) for v in (x, other)]
        means = [hold_map(m, met.choices, met.layout) for m in means]
        y = func(*map(value_of, args), **kwargs)
    return met.finish(y, Product.apply(*met.carriers, *means, y), x if inplace else None)  # type: ignore[arg-type]


def run_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: PatchTensor, factor: Any) -> Any:
    """Return x · factor, computed by `func` itself, the factor being a number, constant over space, or frozen."""
    inplace = is_inplace(func, kwargs)
    trained = isinstance(factor, Tensor) and factor.requires_grad
    x_bar = mean_at(x, x.patch, x.spatial, inplace) if trained else None
    with torch.no_grad():
        y = func(*map(value_of, args), **kwargs)
    carrier = expand_carrier(x, y)
    if carrier is None:
        return NotImplemented
    if not isinstance(factor, Tensor):
        carrier = Offset.apply(carrier, None, factor, 0, y)
    elif is_spatially_constant(factor, x):
        carrier = Scale.apply(carrier, factor, hold_map(x_bar, x.choices, x.spatial), y)
    else:
        # Broadcast over the map, but not over the other axes: less to keep.
        frozen = factor.to(y.dtype).reshape(*[1] * (y.dim() - factor.dim()), *factor.shape)
        frozen = frozen.expand(x.spatial.resize(frozen.shape, spatial_size(x)))
        slopes = (hold(pool_mean(frozen, x.patch, x.spatial)),)
        out = Out(y, x.patch, x.choices, PatchTensor, x.spatial)
        return emit_into(x if inplace else None, Derivative, out, slopes, carrier)
    return finish(x, y, carrier, inplace=inplace)  # type: ignore[arg-type]


@rule(*find_functions("mul", "multiply", "__mul__", "__rmul__", "__imul__"), any_layout=True)
def mul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply: PatchTensors (gates), by a number, by a tensor constant over space (squeeze-excite, layer scale)."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    ordered = order(args[0], args[1], is_inplace(func, kwargs))
    if ordered is None:
        return NotImplemented
    x, factor = ordered
    if is_map(factor, x):
        return multiply_maps(func, args, kwargs, x, factor)
    return run_product(func, args, kwargs, x, factor)


@rule(*find_functions("div", "divide", "true_divide", "__truediv__", "__itruediv__"), any_layout=True)
def div(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Divide: by a number, by a tensor constant over space, by a frozen map; else as any elementwise function."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    x, divisor = args
    if not is_live(x) or find_live([divisor]) or is_map(divisor, x):
        return elementwise(func, args, kwargs)
    if not isinstance(divisor, Tensor):
        return run_product(func, args, kwargs, x, 1 / divisor if divisor else math.inf)
    return run_product(func, args, kwargs, x, 1 / divisor.to(x.dtype))
