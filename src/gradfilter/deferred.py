"""Deferred evaluation: a tensor whose value is computed when somebody reads it, together with what is done to it.

torch calls a batch norm, a sum and an activation one after the other, each a pass over the whole map. A deferred tensor lets
the first ones wait for the last, so that one pass does it all. Until then it shows NaN and holds a `Recipe`. Functions that
know recipes take it over; all others find the value as ever: those that go through `__torch_function__` are given it there,
and whatever by-passes that (compiled and scripted code, transforms) calls operators of torch, which come by
`__torch_dispatch__`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradfilter import ops
from gradfilter.carriers import make_carrier
from gradfilter.geometry.tiling import Pair
from gradfilter.keep.base import Promise, is_saving_watched
from gradfilter.ops import IDENTITY, Act, Ending, Fused, native
from gradfilter.ops.native import make_cells
from gradfilter.ops.operator import is_recorded
from gradfilter.recipe import Ended, Padding, Recipe, Zeros, find_convolution, start
from gradfilter.switch import Switch

plain_torch = torch._C.DisableTorchFunctionSubclass
"""Context in which tensors of this package are ordinary tensors: rules run inside it."""
SET_DATA = getattr(Tensor, "data").__set__  # noqa: B009 (by its name it would be a tensor to a type checker)

METADATA: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in "shape dtype device layout ndim requires_grad grad_fn is_leaf grad".split()),
    *(getattr(Tensor, name) for name in "size dim numel nelement __len__ is_floating_point is_complex element_size".split()),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""What can be asked of a tensor without its values being there, or being shown to anybody."""


_switch = Switch("waiting")


@contextmanager
def at_once() -> Iterator[None]:
    """Let nothing wait that the calling thread runs: for whoever looks at what each function gives."""
    with _switch.hold_off():
        yield


def may_wait() -> bool:
    """Tell whether functions may wait for each other."""
    return not _switch.depth()


def may_compute() -> bool:
    """Tell whether functions may run in the library, for all that does not hang on their arguments."""
    return not _switch.depth() and not torch.is_autocast_enabled("cpu")


class Watch:
    """Who waits for the value of a tensor to be used, shared by all handles on it.

    A deferred tensor reads its sources when it is resolved, so none of them may change before that. Whatever is done with a
    source resolves those that wait for it first, and nobody waits for a tensor that code outside the rules can change.

    Attributes:
        closed: Whether nobody may wait any more.
        waiting: The deferred tensors that read this one.
    """

    __slots__ = ("closed", "waiting")

    def __init__(self, closed: bool = False) -> None:
        """Start with nobody."""
        self.closed = closed
        self.waiting: list[weakref.ref[Handle]] = []

    def settle(self) -> None:
        """Resolve the tensors that wait."""
        waiting, self.waiting = self.waiting, []
        for reference in waiting:
            x = reference()
            if x is not None and x.recipe is not None:
                resolve(x)

    def close(self) -> None:
        """Resolve the tensors that wait, and let nobody wait from now on."""
        self.settle()
        self.closed = True


class Handle(Tensor):
    """A tensor that knows its value as a plain one, or how to compute it.

    Attributes:
        value: The value alone: a plain tensor without gradient, on the same storage. NaN where it is not yet computed.
        patch: Side of the patch `(h, w)` in pixels of this map.
        means: Patch means by patch, shared by all handles on the value.
        watch: Who waits for the value, shared likewise.
        recipe: How the value is computed, where it is not yet.
    """

    value: Tensor
    patch: Pair = (1, 1)
    means: dict[Pair, Tensor]
    watch: Watch = Watch(closed=True)
    recipe: Recipe | None = None


def run_on_values(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Run an operator of torch on values: the `__torch_dispatch__` of tensors that may be deferred."""
    args = tree_map_only(Handle, pixels, args)
    return func(*args, **tree_map_only(Handle, pixels, kwargs or {}))


def pixels(x: Tensor) -> Tensor:
    """Return the value of any tensor without its gradient, on the same storage."""
    if isinstance(x, Handle):
        if x.recipe is not None:
            resolve(x)
        return x.value
    return x.detach()


def can_defer(x: Handle) -> bool:
    """Tell whether the next function of x may wait: the library can read x, and nobody outside can change it."""
    return not x.watch.closed and may_compute() and x.dim() == 4 and (x.recipe is not None or native.can_run(x.value))


def make_recipe(x: Handle) -> Recipe:
    """Return a recipe to go on from: the one of a deferred convolution, else one that starts from the value of x."""
    recipe = x.recipe
    if recipe is not None and recipe.scale is None and recipe.residual is None and recipe.is_open:
        return recipe
    return start(pixels(x), x)


def can_add(x: Any, residual: Any) -> bool:
    """Tell whether the sum of a deferred x and a residual may wait, too."""
    return (
        isinstance(x, Handle)
        and isinstance(residual, Handle)
        and x.recipe is not None
        and x.recipe.residual is None
        and x.recipe.is_open
        and x is not residual
        and can_defer(residual)
        and residual.shape == x.shape
        and residual.dtype == x.dtype
    )


def make_placeholder(recipe: Recipe) -> Tensor:
    """Return what stands for a value that is not computed yet: NaN, without storage, with a version of its own."""
    return make_carrier(recipe.shape, recipe.x)


def wait(x: Handle, recipe: Recipe) -> None:
    """Give a deferred tensor its recipe, and let the sources know that it will read them."""
    x.recipe, reference, promise = recipe, weakref.ref(x), recipe.promise
    for source, _ in recipe.sources:
        if isinstance(source, Handle):
            source.watch.waiting.append(reference)
    if promise is not None:
        promise.waiting.append(reference)


def wait_with(x: Handle, act: Act) -> Recipe | None:
    """Return the recipe of an activation of x that may wait for a depthwise convolution, `None` where that is not likely.

    What backward needs of it, patch means and slopes, is saved before it is computed: nobody may look at it when it is.
    """
    recipe = x.recipe
    if recipe is None or not recipe.may_expand or is_saving_watched():
        return None
    cells = make_cells(recipe.shape, Ending(None, None, None, act, x.patch))
    return recipe._replace(ended=Ended(act, x.patch, cells, Promise(resolve)))


def pad_later(x: Handle, zeros: Zeros) -> Recipe | None:
    """Return the recipe of zeros around x, which wait for a convolution; `None` where they may not.

    Nothing but an activation that waits as well is left to wait inside them.
    """
    if not can_defer(x) or min(zeros) < 0:
        return None
    if x.recipe is not None and x.recipe.ended is None:
        resolve(x)
    left, right, top, bottom = zeros
    n, c, h, w = x.value.shape
    shape = n, c, top + h + bottom, left + w + right
    return Recipe(x.value, ((x, x._version),), shape, padding=Padding(zeros, x, pixels))


def find_inside(x: Handle) -> tuple[Any, Zeros]:
    """Return what a convolution of x reads, and the zeros around that: the map inside them where these wait, else x itself."""
    if x.recipe is None or x.recipe.padding is None:
        return x, (0, 0, 0, 0)
    return x.recipe.padding.x, x.recipe.padding.zeros


def convolve(
    x: Handle,
    w: Tensor,
    b: Tensor | None,
    stride: Pair,
    zeros: Zeros | None,
    dilation: Pair,
    groups: int,
    joins: bool = True,
) -> Recipe | Tensor | None:
    """Return the recipe of a convolution of x, its value where it may not wait; `None` where torch has to compute it.

    Args:
        x: What it reads [N, C, H, W].
        w: Its weight.
        b: Its bias.
        stride: The stride `(h, w)`.
        zeros: The zeros around x; `None` where they are not known.
        dilation: The dilation `(h, w)`.
        groups: The groups.
        joins: Whether it may run together with an expansion that waits for it.
    """
    if joins and x.recipe is not None and x.recipe.ended is not None and can_defer(x):
        recipe = x.recipe.follow(w, b, stride, zeros, dilation, groups)
        if recipe is not None:
            return recipe
    if zeros is None or not may_compute():
        return None
    value = pixels(x)
    conv = find_convolution(value, w, b, stride, zeros, dilation, groups)
    if conv is None:
        return None
    return conv.run(value).y if x.watch.closed else start(value, x, conv)


def resolve(x: Handle) -> None:
    """Compute the value of a deferred tensor."""
    assert x.recipe is not None
    with plain_torch(), torch.no_grad():
        if torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active():  # most often neither
            with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():
                settle(x, x.recipe.run(IDENTITY, x.patch, last=True))
        else:
            settle(x, x.recipe.run(IDENTITY, x.patch, last=True))


def settle(x: Handle, fused: Fused) -> None:
    """Give a deferred tensor its value, or that of a function of it that works in place."""
    x.recipe, x.value = None, fused.y
    SET_DATA(x, fused.y)
    if x.requires_grad:
        with torch._C._DisableTorchDispatch():
            x.value = x.detach()  # which has the version of x: autograd finds out when it changes after somebody has saved it
    if fused.mean is not None:
        x.means[x.patch] = fused.mean


def run_act(x: Handle, act: Act, inplace: bool) -> Fused | None:
    """Return an activation of a map with its patch means and slopes, in one pass that computes the map too if it is deferred.

    `None` where there is no such pass. In place, the value of x is changed; its carrier is for the caller to bind.
    """
    if x.recipe is not None and not x.recipe.is_open:
        resolve(x)
    if x.recipe is None:
        if is_recorded():  # a graph has one node for it
            fused = ops.norm_act(x.value, None, None, act, x.patch)
            return fused if not inplace else fused._replace(y=x.value.copy_(fused.y))
        if not native.can_run(x.value):
            return None
        return ops.norm_act(x.value, None, None, act, x.patch, out=x.value if inplace else None)
    fused = x.recipe.run(act, x.patch, last=inplace)
    if inplace:
        settle(x, fused)
    return fused
