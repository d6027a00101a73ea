"""PatchTensor: a value at pixel resolution whose gradient lives at patch resolution.

Every activation inside a *region* is a `PatchTensor`: the full-resolution value, computed without autograd, plus a
*carrier*, a coarse tensor with one cell per patch that takes part in autograd and has no storage of its own. The carrier's
value would be the patch mean of the activation, so its gradient is the patch **sum** of the pixel gradient.

The value is itself the output of `Exit(carrier)`. Whatever by-passes `__torch_function__` (other people's
`autograd.Function`s, scripted code, full backward hooks) therefore finds an ordinary tensor with the right gradient:
an exact exit, never a lost gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map_only

from gradfilter.carriers import Leave, is_exit
from gradfilter.deferred import (
    METADATA,
    SET_DATA,
    Handle,
    pixels,
    plain_torch,
    resolve,
)
from gradfilter.errors import InputError, RuleError
from gradfilter.geometry.tiling import MAP, Layout, Pair, count_cells, is_map
from gradfilter.keep import Kept
from gradfilter.ops.operator import is_recorded
from gradfilter.ops.pooling import pool_mean
from gradfilter.regions import EXPECTED, Choices

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class Rule(NamedTuple):
    """What the carrier does for a torch function.

    Attributes:
        run: Called as `run(func, args, kwargs)`.
        any_layout: Whether it takes PatchTensors in any layout, not only maps [N, C, H, W].
    """

    run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    any_layout: bool


RULES: dict[Callable[..., Any], Rule] = {}
"""The rule of each torch function that has one."""


def rule(*functions: Callable[..., Any], any_layout: bool = False) -> Callable[[AnyFunction], AnyFunction]:
    """Register a rule: what the carrier does for these torch functions.

    A rule takes the function and then torch's own arguments, or, for functions that differ in those, `(func, args, kwargs)`.
    It is called where at least one argument is a PatchTensor, with PatchTensors acting as plain tensors. It returns the
    result, or `NotImplemented` for a case it does not cover, which then is an exit, or `REGION_ENDS` for a case in which a
    region is meant to end. Arguments that it does not know make an exit, too.

    Args:
        functions: The torch functions.
        any_layout: Whether the rule takes PatchTensors in any layout. Without it, it is asked about maps [N, C, H, W] only.
    """

    def register(new: AnyFunction) -> AnyFunction:
        run = new if tuple(signature(new).parameters) == ("func", "args", "kwargs") else bind(new)
        for func in functions:
            if func in RULES:
                raise RuleError(
                    f"{resolve_name(func) or func} already has the rule {RULES[func].run.__name__!r}. A function has one rule: "
                    "extend that one, or remove it from gradfilter.tensor.RULES first."
                )
            RULES[func] = Rule(run, any_layout)
        return new

    return register


def bind(new: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that takes torch's own arguments as one that takes `(func, args, kwargs)`."""

    @wraps(new)
    def bound(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return new(func, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from within the rule
            return NotImplemented

    return bound


EXPECTED_EXITS: set[Callable[..., Any]] = set()
"""Functions at which a region is meant to end: no warning there."""
REGION_ENDS = object()
"""What a rule returns where a region is meant to end: an exit, and no warning."""


class PatchTensor(Handle):
    """A full-resolution value with a coarse carrier in autograd: [N, C, H, W] and [N, C, H', W'], or in another layout.

    Attributes:
        carrier: NaN everywhere and without storage: only its place in the graph matters.
        spatial: Which axes are rows and columns; the carrier has the same axes.
        choices: What the latest planned layer decided.
        origin: How this tensor was made, where the next rule can make use of it (a conv before its batch norm).
        borrowed: Whether the value belongs to a tensor that somebody else still holds.
        appointed: The weight of the planned layer that is about to read this tensor, and what that layer has decided.
        consumed: Whether a rule has used it, so that its gradient takes the carrier's way.
        ended: Whether the region ends at this very tensor.
        kept: What layers hold of the means, by patch, keep and precision, shared by all handles on the value.
    """

    carrier: Tensor
    spatial: Layout
    choices: Choices
    origin: Any
    borrowed: bool = False
    appointed: tuple[Tensor, Choices] | None = None
    consumed: bool = False
    ended: bool = False
    kept: dict[tuple[Any, ...], Kept]
    seen_version: int = -1  # that of no tensor: one that was not made by `wrap` is not live

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the rule of `func`; without one, exit: run it exactly on the values."""
        for kind in types:
            if not issubclass(kind, PatchTensor) and issubclass(kind, Handle):
                return NotImplemented  # frozen maps are asked first: they become plain tensors, with the gradient they have
        with plain_torch():
            if func in METADATA:
                return func(*args, **(kwargs or {}))
            found = RULES.get(func) if torch.is_grad_enabled() else None
            if found is None and getattr(func, "__name__", "") == "__set__":  # autograd sets attributes, too, from within
                sets_data = func == SET_DATA and isinstance(args[0], PatchTensor)
                if sets_data:
                    args[0].watch.settle()
                if sets_data and args[0].recipe is not None:  # whose means and slopes somebody may have been promised
                    resolve(args[0])
                func(*args, **(kwargs or {}))
                if sets_data:  # another storage: not the carrier's value
                    args[0].value, args[0].seen_version = args[1].detach(), -1
                return None
            if func is Tensor.tolist:  # which torch refuses for tensors with a `__torch_dispatch__`
                return pixels(args[0]).tolist()
            given = find_patch_tensors(args)
            if kwargs:
                kwargs = dict(kwargs)
                if not args and "input" in kwargs and "condition" not in kwargs:  # which comes first in `where`
                    args = (kwargs.pop("input"),)
                    given = find_patch_tensors(args)
                given += find_patch_tensors(kwargs.values())
            else:
                kwargs = {}
            for x in given:
                if x.borrowed:
                    check_not_borrowed(x)
                if x.watch.waiting:
                    x.watch.settle()
            result = None
            live = [x for x in given if x.requires_grad and is_live(x)]
            if found is not None and (found.any_layout or all(is_map(x, x.spatial) for x in live)):
                result = found.run(func, args, kwargs)
                if result is not NotImplemented and result is not REGION_ENDS:
                    for x in live:
                        x.consumed |= x is not result
                    return result
            expected = result is REGION_ENDS or func in EXPECTED_EXITS
            for x in given:  # who sees the value now may change it later
                if x.recipe is not None:
                    resolve(x)
                if not x.watch.closed:
                    x.watch.close()
            if is_recorded():
                args = tree_map_only(PatchTensor, make_ordinary, args)
                kwargs = {key: tree_map_only(PatchTensor, make_ordinary, value) for key, value in kwargs.items()}
            result = func(*args, **kwargs)
            for x in given:
                check_not_borrowed(x)
            if live and (carries_grad(result) or not all(is_live(x) for x in live)):
                reason = "it has no patch rule" if found is None else "its patch rule does not cover these arguments"
                note_exit(live, func, EXPECTED if expected else reason)
            return result


def call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a torch function by its rule, from within another rule, where PatchTensors act as plain tensors."""
    return PatchTensor.__torch_function__(func, (), args, kwargs)


def note_exit(live: list[PatchTensor], func: Callable[..., Any], reason: str = EXPECTED) -> None:
    """Record that a function ended a region, and mark the places in the graph where it did."""
    first = live[0].choices
    first.log.note(first.layer, func, EXPECTED if first.features else reason)
    for x in live:
        node: Any = x.grad_fn
        output = x.output_nr
        while node is not None and not is_exit(node, output):  # a view is an exit at what it views
            node, output = node.next_functions[0] if node.next_functions else (None, 0)
        if node is not None:
            node.noted = True


def is_live(x: Any) -> TypeGuard[PatchTensor]:
    """Tell whether x is a PatchTensor whose carrier still belongs to its value.

    A function without a rule that writes in place, through an alias or not, leaves an ordinary tensor with an ordinary
    graph behind; the version counter shows it. So does `detach_`, which the need for a gradient shows.
    """
    return (
        isinstance(x, PatchTensor)
        and x._version == x.seen_version
        and not x.ended
        and x.requires_grad == x.carrier.requires_grad
    )


def check_not_borrowed(x: PatchTensor, written: bool = False) -> None:
    """Refuse an in-place change of a layer's own input: the tensor outside the layer would keep the old gradient."""
    if x.borrowed and (written or x._version != x.seen_version):
        raise InputError(
            f"layer '{x.choices.layer}' changes its input in place inside its own forward. The tensor it was given is shared "
            "with the code outside, whose gradient would be wrong. Use the out-of-place function there (inplace=False)."
        )


NUMBERS = {int, float, bool, str, type(None)}


def find_patch_tensors(values: Iterable[Any]) -> list[PatchTensor]:
    """List the PatchTensors in nested tuples and lists of arguments."""
    found: list[PatchTensor] = []
    for value in values:
        kind = type(value)
        if kind in NUMBERS:  # most arguments, which need not be asked twice
            continue
        if isinstance(value, PatchTensor):
            found.append(value)
        elif kind is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is int:  # strides, paddings
            continue
        elif isinstance(value, (tuple, list)):
            found += find_patch_tensors(value)
    return found


def find_live(values: Iterable[Any]) -> list[PatchTensor]:
    """List the live PatchTensors with a gradient in nested tuples and lists of arguments."""
    return [x for x in find_patch_tensors(values) if x.requires_grad and is_live(x)]


def carries_grad(result: Any) -> bool:
    """Tell whether a result holds a tensor that autograd follows."""
    if isinstance(result, (tuple, list)):
        return any(carries_grad(value) for value in result)
    return isinstance(result, Tensor) and result.requires_grad


def spatial_size(x: PatchTensor) -> Pair:
    """Return the size `(h, w)` of the map that x is, in any layout."""
    return x.spatial.size(x.shape)


def carrier_layout(x: PatchTensor) -> Layout:
    """Return the layout of the carrier of x: the same axes, cells in place of pixels."""
    return x.spatial.with_size(count_cells(spatial_size(x), x.patch))


def leave(x: PatchTensor) -> Tensor:
    """Return x as a plain tensor with its gradient, for a tracer, which does not know PatchTensors."""
    return Leave.apply(x.carrier, pixels(x), x.patch, x.spatial, x.choices, PatchTensor)  # type: ignore[return-value]


def make_ordinary(x: PatchTensor) -> Tensor:
    """Return x as a plain tensor for a tracer, with its gradient where it has one."""
    if not x.requires_grad:
        return pixels(x)
    return leave(x) if is_live(x) else x.as_subclass(Tensor)


def mean(x: PatchTensor) -> Tensor:
    """Return the patch means of x, in its layout, computed once for all consumers."""
    if x.patch not in x.means:
        with torch.no_grad():
            x.means[x.patch] = pool_mean(pixels(x), x.patch, x.spatial)
    return x.means[x.patch]


def keep_input(
    x: PatchTensor, pooled: Tensor, choices: Choices, dtype: torch.dtype, channels: int = 1, *, copied: bool = False
) -> Kept:
    """Return what a layer holds of its input until backward; layers with the same input and the same keep hold it once.

    Args:
        x: The input.
        pooled: What the weight gradient needs of it, most often its patch means.
        choices: Those of the layer.
        dtype: The precision in which it is needed.
        channels: The axis of the channels.
        copied: Whether torch's own function holds a copy of x: x may then be changed in place before backward.
    """
    key, shared = (x.patch, choices.keep, dtype), pooled is x.means.get(x.patch)
    kept = x.kept.get(key) if shared else None
    if kept is None:
        kept = choices.keep.compress(pooled.to(dtype), choices.state, channels)
    if copied:  # at patch 1 the means are the value itself
        is_value = partial(torch._C._is_alias_of, pixels(x))  # type: ignore[attr-defined]
        kept = kept._replace(tensors=tuple(t.clone() if is_value(t) else t for t in kept.tensors))
    if shared:
        x.kept[key] = kept
    return kept


def hold_map(x: Tensor | None, choices: Choices, layout: Layout = MAP) -> Kept | None:
    """Return what is held of a map that backward needs and that is no layer's input: a derivative, a normalised input."""
    if x is None:
        return None
    channels = 1 if x.dim() - 1 in layout.axes else x.dim() - 1
    return choices.keep.around.compress(x, choices.state, channels)
