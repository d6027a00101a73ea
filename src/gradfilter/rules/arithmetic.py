"""Sums and products at patch resolution: residuals, offsets, factors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradfilter.patches import map_size, pool_mean
from gradfilter.rules.elementwise import Derivative, find_functions, is_inplace
from gradfilter.rules.shape import finest
from gradfilter.tensor import (
    PatchTensor,
    coarse,
    enter_carrier,
    find_live,
    finish,
    is_live,
    leave,
    make_carrier,
    mean,
    pixels,
    regrid_carrier,
    rule,
)


class Add(Function):
    """Carry a gradient back through a·x + b·y between PatchTensors.

    Equation: Gx = a·G, Gy = b·G.
    Cost: nothing where the factor is 1; saves nothing.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: float, b: float, value: Tensor) -> Tensor:
        ctx.a, ctx.b = a, b
        return make_carrier(x.shape, value)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        return scaled(g, ctx.a), scaled(g, ctx.b), None, None, None


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
    def forward(ctx: Any, carrier: Tensor, s: Tensor, x_bar: Tensor | None, value: Tensor) -> Tensor:
        ctx.save_for_backward(s if ctx.needs_input_grad[0] else None, x_bar)
        ctx.shape = s.shape
        return make_carrier(carrier.shape, value)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        s, x_bar = ctx.saved_tensors
        gs = (g * x_bar).sum_to_size(ctx.shape) if x_bar is not None else None
        return g * s if s is not None else None, gs, None, None


def fits_inside(other: Tensor, x: Tensor) -> bool:
    """Tell whether `other` broadcasts to the shape of x without enlarging it."""
    return other.dim() <= x.dim() and all(o in (1, n) for o, n in zip(other.shape[::-1], x.shape[::-1], strict=False))


def is_spatially_constant(other: Tensor) -> bool:
    """Tell whether `other` has one value per channel or fewer when it meets a map."""
    return all(n == 1 for n in other.shape[-2:])


def run_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], a: float, b: float, first: Any, second: Any) -> Any:
    """Return a·first + b·second, computed by `func` itself, where at least one of the two is a live PatchTensor."""
    inplace = is_inplace(func, kwargs)
    if not is_live(first):
        if inplace or not is_live(second):
            return NotImplemented
        first, second, a, b = second, first, b, a
    x: PatchTensor = first
    other: Any = None
    entering = False
    if is_live(second):
        if second.shape != x.shape:
            return NotImplemented
        other = second
    elif isinstance(second, Tensor) and second.requires_grad and not is_spatially_constant(second):
        if second.shape != x.shape or second.dtype != x.dtype:
            return NotImplemented
        other, entering = second, True  # a plain residual enters the region where it meets it
    elif isinstance(second, Tensor) and not fits_inside(second, x):
        return NotImplemented
    with torch.no_grad():
        y = func(*(pixels(v) if type(v) is PatchTensor else v for v in args), **kwargs)
    if other is not None:
        patch = x.patch if entering else finest([x, other])
        carrier = enter_carrier(other, patch) if entering else regrid_carrier(other, patch)
        return finish(x, y, Add.apply(regrid_carrier(x, patch), carrier, a, b, y), inplace=inplace, patch=patch)
    trained = isinstance(second, Tensor) and second.requires_grad
    if not trained and a == 1 and y.dtype == x.dtype:
        return finish(x, y, x.carrier, inplace=inplace)
    return finish(x, y, Offset.apply(x.carrier, second if trained else None, a, b, y), inplace=inplace)


@rule(*find_functions("add", "__add__", "__radd__", "__iadd__"))
def add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add PatchTensors (residuals), numbers, and plain tensors that are frozen or constant over space."""
    if len(args) != 2 or set(kwargs) - {"alpha"}:
        return NotImplemented
    return run_sum(func, args, kwargs, 1, kwargs.get("alpha", 1), *args)


@rule(*find_functions("sub", "subtract", "__sub__", "__isub__"))
def sub(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Subtract, as `add`."""
    if len(args) != 2 or set(kwargs) - {"alpha"}:
        return NotImplemented
    return run_sum(func, args, kwargs, 1, -kwargs.get("alpha", 1), *args)


@rule(torch.rsub, Tensor.__rsub__)
def rsub(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Subtract from the second argument, as `add`."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    return run_sum(func, args, kwargs, -1, 1, *args)


def run_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: PatchTensor, factor: Any) -> Any:
    """Return x · factor, computed by `func` itself."""
    inplace = is_inplace(func, kwargs)
    if is_live(factor) and map_size(factor) == (1, 1) != map_size(x):
        factor = leave(factor)
    if isinstance(factor, Tensor):
        varies = not is_spatially_constant(factor)
        if type(factor) is PatchTensor or not fits_inside(factor, x) or (factor.requires_grad and varies):
            return NotImplemented
    else:
        varies = False
    x_bar = None
    if isinstance(factor, Tensor) and factor.requires_grad:
        # At patch 1 the means are the value itself, which is about to change.
        x_bar = mean(x).clone() if inplace and x.patch == (1, 1) else mean(x)
    with torch.no_grad():
        y = func(*(pixels(v) if type(v) is PatchTensor else v for v in args), **kwargs)
    if not isinstance(factor, Tensor):
        carrier = Offset.apply(x.carrier, None, factor, 0, y)
    elif varies:
        carrier = Derivative.apply(x.carrier, pool_mean(factor.to(y.dtype).expand(x.shape), x.patch), y)
    else:
        carrier = Scale.apply(x.carrier, factor, x_bar, y)
    return finish(x, y, carrier, inplace=inplace)  # type: ignore[arg-type]


@rule(*find_functions("mul", "multiply", "__mul__", "__rmul__", "__imul__"))
def mul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply by a number, by a tensor that is constant over space (squeeze-excite, layer scale), or by a frozen map."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    x, factor = args
    if not is_live(x):
        if is_inplace(func, kwargs) or not is_live(factor):
            return NotImplemented
        x, factor = factor, x
    return run_product(func, args, kwargs, x, factor)


@rule(*find_functions("div", "divide", "true_divide", "__truediv__", "__itruediv__"))
def div(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Divide by a number or a frozen tensor."""
    if len(args) != 2 or kwargs or not is_live(args[0]) or find_live(args[1]):
        return NotImplemented
    x, divisor = args
    if not isinstance(divisor, Tensor):
        return run_product(func, args, kwargs, x, 1 / divisor if divisor else math.inf)
    if divisor.requires_grad:
        return NotImplemented
    return run_product(func, args, kwargs, x, 1 / divisor.to(x.dtype))
