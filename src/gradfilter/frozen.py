"""FrozenTensor: an activation before the first trained layer, where nothing needs a gradient.

Frozen convolutions, norms and activations run as inference does, only with fewer passes over memory: a batch norm, a residual
and an activation are one. See `gradfilter.deferred` for why nobody notices.

On demand they compute in bfloat16. That, too, is nobody's business: to all other code such a map is one in single precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from gradfilter.deferred import (
    METADATA,
    SET_DATA,
    Handle,
    Watch,
    can_add,
    can_defer,
    convolve,
    find_inside,
    make_placeholder,
    make_recipe,
    may_wait,
    pad_later,
    pixels,
    plain_torch,
    resolve,
    run_act,
    wait,
    wait_with,
)
from gradfilter.environment import has_bfloat16
from gradfilter.ops import native
from gradfilter.recipe import Recipe, surround
from gradfilter.rules.conv import as_pair
from gradfilter.rules.elementwise import STEP_FUNCTIONS, find_step, is_odd, make_act
from gradfilter.rules.functions import find_functions, is_inplace

DTYPE = getattr(Tensor, "dtype").__get__  # noqa: B009 (by its name it would be a dtype to a type checker)
FROZEN: dict[Callable[..., Any], Callable[..., Any]] = {}
"""What a frozen map does for a torch function; all others run on the value, and give plain tensors."""


def frozen(*functions: Callable[..., Any]) -> Callable[[Any], Any]:
    """Register what frozen maps do for torch functions: called with the function and torch's own arguments."""

    def register(run: Any) -> Any:
        for func in functions:
            FROZEN[func] = run
        return run

    return register


class FrozenTensor(Handle):
    """A map without a gradient, computed or deferred.

    Attributes:
        outer: The dtype that it has to other code, where the frozen part computes in bfloat16; else `None`.
    """

    outer: torch.dtype | None = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operator of torch on values: what by-passes torch's functions ends here."""
        args = tree_map_only(Handle, read, args)
        return func(*args, **tree_map_only(Handle, read, kwargs or {}))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what is registered for `func`, else `func` itself on the values."""
        kwargs = kwargs or {}
        with plain_torch():
            if func in METADATA:
                return ask(func, *args, **kwargs)
            given, trained = [], False
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor):
                    trained = trained or needs_gradient(x)
                    if isinstance(x, FrozenTensor):
                        given.append(x)
                        if x.watch.waiting:
                            x.watch.settle()
            run = FROZEN.get(func)
            if run is not None and not trained:
                try:
                    y = run(func, *args, **kwargs)
                except TypeError:  # arguments that it does not know
                    y = NotImplemented
                if y is not NotImplemented:
                    return y
            args = tree_map_only(FrozenTensor, give, args)
            kwargs = {key: tree_map_only(FrozenTensor, give, value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        # In place, x itself is the result, unless it has a gradient now: that is its value's.
        return next((x for x in given if x.value is result and not result.requires_grad), result)


def ask(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a map says of itself to other code."""
    if isinstance(x, FrozenTensor) and x.outer is not None:
        if func == DTYPE:
            return x.outer
        if func == Tensor.element_size:
            return x.outer.itemsize
    return func(x.value if isinstance(x, FrozenTensor) else x, *args, **kwargs)


def needs_gradient(x: Tensor) -> bool:
    """Tell whether an argument makes the result of a function need a gradient or a tangent: a frozen map does if told to."""
    value = x.value if isinstance(x, FrozenTensor) else x
    return (value.requires_grad and torch.is_grad_enabled()) or (forward_ad._current_level >= 0 and native.has_tangent(value))


def give(x: FrozenTensor) -> Tensor:
    """Return the value of a map to code that may change it later."""
    if x.recipe is not None:
        resolve(x)
    x.watch.close()
    if x.outer is not None and x.value.dtype is not x.outer:
        x.value = x.value.to(x.outer)
        SET_DATA(x, x.value)  # whoever changes the value changes the map
    return x.value


def read(x: Handle) -> Tensor:
    """Return the value of a map to an operator of torch."""
    return give(x) if isinstance(x, FrozenTensor) and x.outer is not None else pixels(x)


def freeze_map(x: Tensor, trunk: str = "float32") -> FrozenTensor:
    """Return a second handle on a plain tensor, which somebody else holds and may change, or a copy of it in bfloat16."""
    if trunk == "bfloat16" and x.dtype is torch.float32:
        return make_frozen(x.detach().to(torch.bfloat16), outer=x.dtype)
    y = make_frozen(x.detach())
    y.watch.closed = True
    return y


def make_frozen(value: Tensor, recipe: Recipe | None = None, outer: torch.dtype | None = None) -> FrozenTensor:
    """Return a frozen map of a value, or of a recipe for one and a value that stands for it."""
    x: FrozenTensor = Tensor._make_subclass(FrozenTensor, value)  # type: ignore[assignment]
    x.value, x.means, x.watch, x.outer = value, {}, Watch(), outer
    if recipe is not None:
        wait(x, recipe)
    return x


def defer_frozen(recipe: Recipe, outer: torch.dtype | None) -> FrozenTensor:
    """Return a frozen map whose value is computed later."""
    return make_frozen(make_placeholder(recipe), recipe, outer)


@frozen(torch.conv2d)
def conv2d(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Convolve, now or, where the library has a kernel, later."""
    x = input
    if not isinstance(x, FrozenTensor) or x.dim() != 4:
        return NotImplemented
    inside, around = find_inside(x)
    zeros = None if isinstance(padding, str) else surround(as_pair(padding), around)
    where = as_pair(stride), zeros, as_pair(dilation), groups
    y = convolve(inside, weight, bias, *where)
    if y is not None:
        return defer_frozen(y, x.outer) if isinstance(y, Recipe) else make_frozen(y)
    if x.outer is not None:
        if weight.dtype is not x.outer or (bias is not None and bias.dtype is not x.outer):
            return NotImplemented
        return make_frozen(convolve_short(func, pixels(x), weight, bias, stride, padding, dilation, groups), outer=x.outer)
    return make_frozen(func(pixels(x), weight, bias, stride, padding, dilation, groups))


@frozen(F.pad, torch._C._nn.pad)  # type: ignore[attr-defined]
def pad(func: Any, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """Let zeros around a map wait for a convolution."""
    x = input
    if not isinstance(x, FrozenTensor) or mode != "constant" or value or len(pad) != 4 or x.dim() != 4:
        return NotImplemented
    recipe = pad_later(x, tuple(pad))
    return NotImplemented if recipe is None else defer_frozen(recipe, x.outer)


def convolve_short(func: Any, x: Tensor, w: Tensor, b: Tensor | None, *where: Any) -> Tensor:
    """Convolve in bfloat16, with sums in single precision.

    Processors without instructions for it compute the same on rounded numbers in single precision: torch's own way, number
    by number, takes ten times as long.
    """
    x, w, b = (None if v is None else v.detach().to(torch.bfloat16) for v in (x, w, b))  # type: ignore[assignment]
    if not x.is_cpu or has_bfloat16():
        return func(x, w, b, *where)
    return func(x.float(), w.float(), None if b is None else b.float(), *where).to(torch.bfloat16)


@frozen(F.batch_norm)
def batch_norm(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Let a norm in eval mode wait for what comes behind it."""
    x = input
    if training or running_mean is None or running_var is None or not isinstance(x, FrozenTensor) or not can_defer(x):
        return NotImplemented
    recipe = make_recipe(x).normalise(running_mean, running_var, weight, bias, eps)
    return NotImplemented if recipe is None else defer_frozen(recipe, x.outer)


@frozen(*find_functions("add", "__add__", "__radd__", "__iadd__"))
def add(func: Any, first: Any, second: Any) -> Any:
    """Let the sum of a deferred map and a residual wait, too."""
    if not isinstance(first, FrozenTensor) or not isinstance(second, FrozenTensor):
        return NotImplemented
    if can_add(first, second):
        x, residual = first, second
    elif can_add(second, first) and not is_inplace(func, {}):
        x, residual = second, first
    else:
        return NotImplemented
    assert x.recipe is not None
    recipe = x.recipe.add(residual, pixels(residual))
    if not is_inplace(func, {}):
        return defer_frozen(recipe, x.outer)
    wait(x, recipe)
    return x


@frozen(*STEP_FUNCTIONS)
def step(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an activation in one pass with what waits for it."""
    x = args[0]
    if not isinstance(x, FrozenTensor) or (x.recipe is None and x.outer is None):
        return NotImplemented
    start, end, slope = find_step(func, args, kwargs)
    if start > end or is_odd(func, end, slope):
        return NotImplemented
    inplace, act = is_inplace(func, kwargs), make_act(start, end, slope)
    recipe = wait_with(x, act)
    if recipe is not None and inplace:
        wait(x, recipe)
        return x
    if recipe is not None:
        return defer_frozen(recipe, x.outer)
    with torch.no_grad():
        fused = run_act(x, act, inplace)
    if fused is None and x.outer is None:
        return NotImplemented
    y = func(pixels(x), *args[1:], **kwargs) if fused is None else fused.y
    return x if inplace else make_frozen(y, outer=x.outer)


def can_shorten(x: Tensor) -> bool:
    """Tell whether a map may be rounded to bfloat16, by torch where there is no library."""
    return x.dtype is torch.float32 and not native.is_watched() and not native.has_tangent(x)


def can_freeze(x: Any, trunk: str = "float32") -> bool:
    """Tell whether frozen layers may go on from x with fewer passes than torch's, or in bfloat16."""
    return (
        isinstance(x, Tensor)
        and not x.requires_grad
        and x.dim() == 4
        and (native.can_run(x) or (trunk == "bfloat16" and can_shorten(x)))
        and may_wait()
        and torch._C._len_torch_function_stack() == 0  # a record of calls knows plain tensors alone
        and not torch.is_autocast_enabled(x.device.type)
    )
