"""Elementwise functions at patch resolution: activations, dropout, sums, scales."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from gradfilter.patches import Pair, count_dtype, make_areas, map_size, pool_mean, pool_sum
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


class Derivative(Function):
    """Carry a gradient back through an elementwise f.

    Equation: Gx = G · D with D the mean over the patch of f′(z).
    Cost: one product; saves D, one number per cell.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, derivative: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(derivative)
        return make_carrier(carrier.shape, y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        (derivative,) = ctx.saved_tensors
        return g * derivative, None, None


class StepDerivative(Function):
    """Carry a gradient back through a piecewise linear f with two slopes.

    Equation: Gx = G · (low + (high − low)·count/|I|), count = the pixels of the patch on the steep piece.
    Cost: one product; saves the counts: a byte per cell while a patch has at most 255 pixels, two above, a bit at patch 1.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, steep: Tensor, slopes: tuple[float, float], patch: Pair) -> Tensor:
        ctx.size, ctx.patch, ctx.slopes = map_size(steep), patch, slopes
        ctx.save_for_backward(count_steep(steep, patch))
        return make_carrier(carrier.shape, carrier)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        (count,) = ctx.saved_tensors
        low, high = ctx.slopes
        share = steep_share(count, ctx.size, ctx.patch, g)
        return g * (share if (low, high) == (0, 1) else low + (high - low) * share), None, None, None


def count_steep(steep: Tensor, patch: Pair) -> Tensor:
    """Return how many pixels of each patch are set, in the smallest integers that hold a whole patch.

    Args:
        steep: 1 or 0 per pixel, floating point.
        patch: The patch.
    """
    if patch == (1, 1):
        return pack_bits(steep)
    # Half precision counts to 256 or 2048 only.
    return pool_sum(steep if steep.element_size() > 2 else steep.float(), patch).to(count_dtype(patch))


def steep_share(count: Tensor, size: Pair, patch: Pair, g: Tensor) -> Tensor:
    """Return which share of the pixels of each patch is set, for the counts of `count_steep`."""
    if patch == (1, 1):
        return unpack_bits(count, g.shape).to(g.dtype)
    return count.to(g.dtype) / make_areas(size, patch, g)


def pack_bits(mask: Tensor) -> Tensor:
    """Return a mask as bytes of eight bits [⌈numel/8⌉], in the mask's logical order."""
    flat = F.pad(mask.reshape(-1).ne(0).to(torch.uint8), (0, -mask.numel() % 8)).reshape(-1, 8)
    return (flat * bit_weights(mask.device)).sum(1, dtype=torch.uint8)


def bit_weights(device: torch.device) -> Tensor:
    """Return the values of the eight bits of a byte."""
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """Return the boolean mask of `pack_bits`."""
    return (packed[:, None] & bit_weights(packed.device)).ne(0).reshape(-1)[: math.prod(shape)].reshape(shape)


def is_inplace(func: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether a call writes into its first argument."""
    name = func.__name__
    return bool(kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def find_functions(*names: str) -> set[Any]:
    """List torch's functions of these names, as functions and as methods, in place or not."""
    spaces = (F, torch, Tensor)
    return {getattr(space, n) for name in names for n in (name, f"{name}_") for space in spaces if hasattr(space, n)}


def find_steep(y: Tensor, start: float, end: float) -> Tensor:
    """Return 1 where y lies strictly between two bounds and 0 elsewhere, in one pass."""
    one = torch.ones((), dtype=y.dtype, device=y.device).expand(y.shape)
    if end == math.inf:
        return torch.ops.aten.threshold_backward(one, y, start)
    return torch.ops.aten.hardtanh_backward(one, y, start, end)


STEPS = {
    "relu": lambda: (0.0, math.inf, 0.0),
    "relu6": lambda: (0.0, 6.0, 0.0),
    "hardtanh": lambda min_val=-1.0, max_val=1.0: (min_val, max_val, 0.0),
    "leaky_relu": lambda negative_slope=0.01: (0.0, math.inf, negative_slope),
}
"""Functions with slope 1 strictly between two bounds and a constant slope elsewhere: (from, to, slope outside)."""


@rule(*find_functions(*STEPS))
def step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a piecewise linear activation; which piece a pixel is on shows in the result, so it may be in place."""
    x, inplace = args[0], is_inplace(func, kwargs)
    if not is_live(x):
        return NotImplemented
    options = {k: v for k, v in kwargs.items() if k != "inplace"}
    start, end, slope = STEPS[func.__name__.rstrip("_")](*args[1:], **options)
    if slope < 0:
        return NotImplemented
    with torch.no_grad():
        y = func(pixels(x), *args[1:], **kwargs)
        steep = find_steep(y, start, end)
    return finish(x, y, StepDerivative.apply(x.carrier, steep, (slope, 1.0), x.patch), inplace=inplace)


SMOOTH = (
    "celu elu gelu hardshrink hardsigmoid hardswish logsigmoid mish rrelu selu silu softplus softshrink softsign tanh "
    "tanhshrink threshold sigmoid abs clamp clamp_max clamp_min clip cos erf exp expm1 log log1p log2 neg negative pow "
    "reciprocal rsqrt sin sqrt square __pow__ __neg__ __abs__"
).split()
DROPOUTS = "alpha_dropout dropout dropout2d feature_alpha_dropout".split()


@rule(*find_functions(*SMOOTH, *DROPOUTS))
def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run any elementwise function; autograd itself gives the derivative, of which the patch means are kept."""
    x, inplace = args[0], is_inplace(func, kwargs)
    others = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, Tensor)]
    if not is_live(x) or any(v.requires_grad for v in others):
        return NotImplemented
    if func.__name__ in DROPOUTS and not kwargs.get("training", True):
        return x
    z = pixels(x).detach().requires_grad_()
    # What autograd saves here is gone a line later: checkpoints and offloaders that watch saved tensors need not see it.
    with torch.enable_grad(), saved_tensors_hooks(unchanged, unchanged):
        y = func(z.clone() if inplace else z, *args[1:], **kwargs)
        if y is z:
            return x
        if y.shape != x.shape or not y.requires_grad:
            return NotImplemented
        (derivative,) = torch.autograd.grad(y, z, torch.ones_like(y))
    y = y.detach()
    if inplace:
        pixels(x).copy_(y)
    return finish(x, y, Derivative.apply(x.carrier, pool_mean(derivative, x.patch), y), inplace=inplace)


def unchanged(x: Tensor) -> Tensor:
    """Return x."""
    return x


class PReLU(Function):
    """Carry a gradient back through PReLU.

    Equation: Gx = G · (w + (1 − w)·count/|I|), gw = Σ G · mean over the patch of min(0, z).
    Cost: two products; saves the counts, and one number per cell where w is trained.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, w: Tensor, steep: Tensor, below: Tensor | None, patch: Pair) -> Tensor:
        ctx.size, ctx.patch = map_size(steep), patch
        ctx.save_for_backward(count_steep(steep, patch), below, w)
        return make_carrier(carrier.shape, carrier)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        count, below, w = ctx.saved_tensors
        slope = w.to(g.dtype)[:, None, None]
        share = steep_share(count, ctx.size, ctx.patch, g)
        gw = None
        if below is not None:
            gw = (g * below).sum((0, 2, 3))
            gw = gw if len(w) > 1 else gw.sum().reshape(w.shape)
        return g * (slope + (1 - slope) * share), gw, None, None, None


@rule(torch.prelu)
def prelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run PReLU with its trained slope."""
    if kwargs or len(args) != 2 or not is_live(args[0]):
        return NotImplemented
    x, w = args
    with torch.no_grad():
        value = pixels(x)
        y = func(value, w)
        below = pool_mean(value.clamp(max=0), x.patch) if w.requires_grad else None
        steep = find_steep(value, 0, math.inf)
    return finish(x, y, PReLU.apply(x.carrier, w, steep, below, x.patch))  # type: ignore[arg-type]


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
