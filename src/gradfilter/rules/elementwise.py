"""Functions of one map or several, pixel by pixel, at patch resolution: activations, dropout, maxima, quotients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradfilter import ops
from gradfilter.carriers import Carry, Out, carry, coarse, make_carrier
from gradfilter.deferred import run_act, wait, wait_with
from gradfilter.emit import defer, emit_into, finish
from gradfilter.geometry.tiling import Pair, is_map, map_size
from gradfilter.keep import FULL, Kept, hold
from gradfilter.keep.base import load, save
from gradfilter.ops import CLAMP, HARDSWISH, LEAKY, SILU, Act, Fused, cut, find_share, is_told_by_result, pool_mean
from gradfilter.rules.functions import differentiate, find_functions, is_inplace
from gradfilter.rules.meet import broadcast, meet
from gradfilter.tensor import PatchTensor, hold_map, is_live, pixels, rule


class Derivative(Carry):
    """Carry a gradient back through an elementwise f of one or more maps.

    Equation: Gx = G · D with D the mean over the patch of ∂f/∂x, for each map x.
    Cost: one product per map; saves D, one number per cell and map.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, derivatives: tuple[Kept, ...], *rest: Any) -> tuple[Tensor, Tensor]:
        carrier, *_, changed, out = rest  # a carrier for each map
        save(ctx, derivatives)
        return carry(ctx, carrier.shape, out, changed)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:-2]
        return None, *(g * d if need else None for d, need in zip(load(ctx), needed, strict=True)), None, None


class CutDerivative(Derivative):
    """Carry a gradient back through an elementwise f of pieces, some of them constant.

    Equation: Gx = G · D, and 0 where D is 0, even if G is NaN or infinite.
    Cost: two passes over each map at patch resolution; saves D, one number per cell and map.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:-2]
        return None, *(cut(g * d, d) if need else None for d, need in zip(load(ctx), needed, strict=True)), None, None


class StepDerivative(Carry):
    """Carry a gradient back through a piecewise linear f with two slopes.

    Equation, Cost, Exact when: see `ops.scale_by_counts`. Saves the counts: a byte per cell while a patch has at most 255
    pixels, two above, a bit at patch 1.
    """

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, count: Kept, slopes: tuple[float, float], changed: Tensor | None, out: Out
    ) -> tuple[Tensor, Tensor]:
        ctx.size, ctx.slopes = out.layout.size(out.value.shape), slopes
        save(ctx, [count])
        return carry(ctx, carrier.shape, out, changed)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        (count,) = load(ctx)
        return ops.scale_by_counts(g, count, ctx.slopes, ctx.size, ctx.patch, ctx.layout), *[None] * 4


STEPS = {
    "relu": lambda: (0.0, math.inf, 0.0),
    "relu6": lambda: (0.0, 6.0, 0.0),
    "hardtanh": lambda min_val=-1.0, max_val=1.0: (min_val, max_val, 0.0),
    "leaky_relu": lambda negative_slope=0.01: (0.0, math.inf, negative_slope),
}
"""Functions with slope 1 strictly between two bounds and a constant slope elsewhere: (from, to, slope outside)."""


STEP_FUNCTIONS = find_functions(*STEPS)


def find_step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float, float]:
    """Return the entry of `STEPS` that a call means."""
    options = {k: v for k, v in kwargs.items() if k != "inplace"}
    return STEPS[func.__name__.rstrip("_")](*args[1:], **options)


def make_act(start: float, end: float, slope: float) -> Act:
    """Return an entry of `STEPS` as the fused pass knows it."""
    return Act(LEAKY if slope else CLAMP, start, end, slope)


def is_odd(func: Any, end: float, slope: float) -> bool:
    """Tell whether a function with an entry in `STEPS` is none of them at infinity.

    A leaky ReLU of slope 0 is NaN at -inf, and a hardtanh without an upper bound flat at +inf.
    """
    name = func.__name__.rstrip("_")
    return (name == "leaky_relu" and slope == 0) or (name == "hardtanh" and end == math.inf)


@rule(*STEP_FUNCTIONS, any_layout=True)
def step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a piecewise linear activation; which piece a pixel is on shows in the result, so it may be in place."""
    x, inplace = args[0], is_inplace(func, kwargs)
    if not is_live(x):
        return NotImplemented
    start, end, slope = find_step(func, args, kwargs)
    if slope < 0 or start > end:
        return NotImplemented
    if is_odd(func, end, slope):
        return elementwise(func, args, kwargs)
    act, slopes, fused = make_act(start, end, slope), (slope, 1.0), None
    if is_map(x, x.spatial):
        later = end_later(x, act, inplace, lambda count: (StepDerivative, x.carrier, count, slopes))
        if later is not None:
            return later
        if x.patch != (1, 1) or is_told_by_result(act, x.dtype):
            fused = run_act(x, act, inplace)
    if fused is None:
        with torch.no_grad():
            value = pixels(x)
            count = ops.count_steep(value, act, x.patch, x.spatial)  # before it is overwritten
            fused = Fused(func(value, *args[1:], **kwargs), None, count)
    y, mean, count = fused
    if count is None:
        with torch.no_grad():
            count = ops.count_steep(y, act, x.patch, x.spatial)
    return emit_act(x, y, mean, inplace, StepDerivative, x.carrier, hold(count), slopes)


def emit_act(x: PatchTensor, y: Tensor, mean: Tensor | None, inplace: bool, function: type[Carry], *args: Any) -> Tensor:
    """Return an activation of x with the value y: the result of `function` with these arguments."""
    out = Out(y, x.patch, x.choices, PatchTensor, x.spatial)
    z = emit_into(x if inplace else None, function, out, *args)
    if mean is not None and isinstance(z, PatchTensor):
        z.means[z.patch] = mean
    return z


def end_later(x: PatchTensor, act: Act, inplace: bool, call: Callable[[Kept], tuple[Any, ...]]) -> Tensor | None:
    """Return an activation of x that waits for the convolution behind it; `None` where it does not.

    Args:
        x: The map.
        act: The activation.
        inplace: Whether x itself is the result.
        call: From what will be known of the slopes to the function of autograd and its arguments.
    """
    recipe = wait_with(x, act) if x.patch != (1, 1) and x.choices.keep == FULL else None
    if recipe is None:
        return None
    assert recipe.ended is not None
    assert recipe.ended.cells.slope is not None
    function, *args = call(Kept((recipe.ended.cells.slope,), recipe.ended.promise))
    if not inplace:
        return defer(recipe, function, x.patch, x.choices, *args, None)
    wait(x, recipe)
    return emit_act(x, x.value, None, inplace, function, *args)


ACTIVATIONS = (
    "celu elu gelu hardshrink hardsigmoid hardswish logsigmoid mish rrelu selu silu softplus softshrink softsign tanh "
    "tanhshrink threshold sigmoid"
).split()
"""Functions whose slopes are all of the same order: a few bits hold them."""
FUNCTIONS = (
    "abs clamp clamp_max clamp_min clip cos erf exp expm1 log log1p log2 neg negative pow "
    "reciprocal rsqrt sin sqrt square __pow__ __rpow__ __neg__ __abs__ maximum minimum where lerp addcmul addcdiv "
    "atan2 hypot __rtruediv__ __rdiv__ exp2 cosh sinh tan atan erfc sinc xlogy logit masked_fill"
).split()
DROPOUTS = "alpha_dropout dropout dropout2d feature_alpha_dropout".split()


CUTS = (
    "clamp clamp_max clamp_min clip hardshrink hardsigmoid hardswish hardtanh masked_fill maximum minimum softshrink "
    "threshold _threshold where"
).split()
"""Functions with pieces of slope 0 on which torch does not multiply with it."""
NAN_SLOPES = "celu elu hardswish selu".split()
"""Functions whose derivative at NaN is NaN in torch's vectors and 1 in its scalar code: it depends on the place in memory."""


SMOOTH = {"hardswish": HARDSWISH, "silu": SILU}
"""Functions that the fused pass knows, with their derivatives."""


def run_smooth(x: PatchTensor, act: Act, inplace: bool) -> Tensor | None:
    """Return an activation of a map in one pass with what waits for it, `None` where there is no such pass."""
    if (later := end_later(x, act, inplace, lambda slope: (Derivative, (slope,), x.carrier))) is not None:
        return later
    with torch.no_grad():
        fused = run_act(x, act, inplace)
        slope = None if fused is None else hold_map(fused.slope, x.choices, x.spatial)
    if fused is None or slope is None:
        return None
    return emit_act(x, fused.y, fused.mean, inplace, Derivative, (slope,), x.carrier)


@rule(*find_functions(*ACTIVATIONS, *FUNCTIONS, *DROPOUTS), any_layout=True)
def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run any elementwise function; autograd itself gives the derivatives, of which the patch means are kept.

    A plain tensor with a gradient among the arguments enters the region here.
    """
    inplace = is_inplace(func, kwargs)
    if func.__name__ in DROPOUTS and is_live(args[0]):
        # In place, a dropout of nothing does not touch its input: torch allows it on parts that must not be changed.
        if not kwargs.get("training", True) or (inplace and kwargs.get("p") == 0):
            return args[0]
    act = SMOOTH.get(func.__name__.rstrip("_"))
    if act is not None and is_live(args[0]) and args[0].patch != (1, 1) and is_map(args[0], args[0].spatial):
        if (y := run_smooth(args[0], act, inplace)) is not None:
            return y
    places = [i for i, v in enumerate(args) if isinstance(v, Tensor) and v.requires_grad]
    if any(isinstance(v, Tensor) and v.requires_grad for v in kwargs.values()) or (inplace and not is_live(args[0])):
        return NotImplemented
    shape = broadcast(*(v for v in args if isinstance(v, Tensor)))
    met = meet([args[i] for i in places], shape)
    if met is None:
        return NotImplemented
    values = [pixels(args[i]).expand(shape).requires_grad_() for i in places]
    replaced = list(args)
    for i, z in zip(places, values, strict=True):
        replaced[i] = z.clone() if inplace and i == 0 else z
    y, grads = differentiate(lambda: func(*replaced, **kwargs), values)
    if y is values[0]:
        return args[0]
    if not grads or y.shape != shape:
        return NotImplemented
    y, name = y.detach(), func.__name__.rstrip("_")
    if met.patch != (1, 1) and name in NAN_SLOPES:  # before the values are overwritten
        grads = [d if d is None else d.masked_fill(z.isnan(), math.nan) for d, z in zip(grads, values, strict=True)]
    if inplace:
        pixels(args[0]).copy_(y)
    grads = [torch.zeros_like(y) if d is None else d for d in grads]
    slopes = [pool_mean(d, met.patch, met.layout) for d in grads]
    bounded = name in (*ACTIVATIONS, *DROPOUTS)
    derivatives = tuple(hold_map(d, met.choices, met.layout) if bounded else hold(d) for d in slopes)
    function = CutDerivative if name in CUTS and (met.patch == (1, 1) or name != "hardswish") else Derivative
    return emit_into(args[0] if inplace else None, function, met.make_out(y), derivatives, *met.carriers)


class PReLU(Function):
    """Carry a gradient back through PReLU.

    Equation: Gx = G · (w + (1 − w)·count/|I|), gw = Σ G · mean over the patch of min(0, z).
    Cost: two products; saves the counts, and one number per cell where w is trained.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, w: Tensor, count: Tensor, below: Kept | None, size: Pair, patch: Pair) -> Tensor:
        ctx.size, ctx.patch = size, patch
        save(ctx, [below], count, w)
        return make_carrier(carrier.shape, carrier)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        below, count, w = load(ctx)
        slope = w.to(g.dtype)[:, None, None]
        share = find_share(count, ctx.size, ctx.patch, g)
        gw = None
        if below is not None:
            gw = cut(g * below, share - 1).sum((0, 2, 3))
            gw = gw if len(w) > 1 else gw.sum().reshape(w.shape)
        return g * (slope + (1 - slope) * share), gw, *[None] * 4


@rule(torch.prelu)
def prelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run PReLU with its trained slope."""
    if kwargs or len(args) != 2 or not is_live(args[0]):
        return NotImplemented
    x, w = args
    with torch.no_grad():
        value = pixels(x)
        y = func(value, w)
        below = hold_map(pool_mean(value.clamp(max=0), x.patch), x.choices) if w.requires_grad else None
        count = ops.count_steep(value, Act(LEAKY), x.patch)
    return finish(x, y, PReLU.apply(x.carrier, w, count, below, map_size(y), x.patch))  # type: ignore[arg-type]
