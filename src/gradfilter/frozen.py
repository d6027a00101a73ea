"""FrozenTensor: an activation before the first trained layer, where nothing needs a gradient.

Frozen convolutions, norms and activations run as inference does, only with fewer passes over memory: a batch norm, a residual
and an activation are one. See `gradfilter.deferred` for why nobody notices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradfilter import native
from gradfilter.deferred import (
    METADATA,
    Handle,
    Watch,
    can_add,
    can_defer,
    make_placeholder,
    make_recipe,
    pixels,
    plain_torch,
    resolve,
    run_act,
    run_on_values,
    wait,
)
from gradfilter.recipe import Recipe, find_convolution, find_norm, watch
from gradfilter.rules.conv import as_pair
from gradfilter.rules.elementwise import STEP_FUNCTIONS, find_step, make_act
from gradfilter.rules.functions import find_functions, is_inplace

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
    """A map without a gradient, computed or deferred."""

    __torch_dispatch__ = classmethod(run_on_values)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what is registered for `func`, else `func` itself on the values."""
        kwargs = kwargs or {}
        with plain_torch():
            if func in METADATA:
                return func(*(x.value if isinstance(x, FrozenTensor) else x for x in args), **kwargs)
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, FrozenTensor)]
            for x in given:
                x.watch.settle()
            run = FROZEN.get(func)
            if run is not None and not any(needs_gradient(x) for x in (*args, *kwargs.values())):
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


def needs_gradient(x: Any) -> bool:
    """Tell whether an argument makes the result of a function need a gradient: a frozen map does if it was told to."""
    value = x.value if isinstance(x, FrozenTensor) else x
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def give(x: FrozenTensor) -> Tensor:
    """Return the value of a map to code that may change it later."""
    if x.recipe is not None:
        resolve(x)
    x.watch.close()
    return x.value


def freeze_map(x: Tensor) -> FrozenTensor:
    """Return a second handle on a plain tensor, which somebody else holds and may change."""
    y = make_frozen(x.detach())
    y.watch.closed = True
    return y


def make_frozen(value: Tensor, recipe: Recipe | None = None) -> FrozenTensor:
    """Return a frozen map of a value, or of a recipe for one and a value that stands for it."""
    x: FrozenTensor = Tensor._make_subclass(FrozenTensor, value)  # type: ignore[assignment]
    x.value, x.means, x.watch = value, {}, Watch()
    if recipe is not None:
        wait(x, recipe)
    return x


def defer_frozen(recipe: Recipe) -> FrozenTensor:
    """Return a frozen map whose value is computed later."""
    return make_frozen(make_placeholder(recipe), recipe)


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
    value = pixels(x)
    if can_defer(x) and not isinstance(padding, str):
        pairs = as_pair(stride), as_pair(padding), as_pair(dilation)
        conv = find_convolution(value, weight, bias, *pairs, groups)
        if conv is not None:
            return defer_frozen(Recipe(value, watch(x), conv))
    return make_frozen(func(value, weight, bias, stride, padding, dilation, groups))


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
    norm = find_norm(x, running_mean, running_var, weight, bias, eps)
    return NotImplemented if norm is None else defer_frozen(make_recipe(x).normalise(norm))


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
        return defer_frozen(recipe)
    wait(x, recipe)
    return x


@frozen(*STEP_FUNCTIONS)
def step(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an activation in one pass with what waits for it."""
    x = args[0]
    if not isinstance(x, FrozenTensor) or x.recipe is None:
        return NotImplemented
    start, end, slope = find_step(func, args, kwargs)
    if start > end:
        return NotImplemented
    inplace = is_inplace(func, kwargs)
    with torch.no_grad():
        fused = run_act(x, make_act(start, end, slope), inplace)
    if fused is None:
        return NotImplemented
    return x if inplace else make_frozen(fused.y)


def can_freeze(x: Any) -> bool:
    """Tell whether frozen layers may go on from x with fewer passes than torch's."""
    return (
        isinstance(x, Tensor)
        and not x.requires_grad
        and x.dim() == 4
        and native.can_run(x)
        and torch._C._len_torch_function_stack() == 0
        and not torch.is_autocast_enabled("cpu")
    )
