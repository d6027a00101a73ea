"""Carriers: the coarse tensors that autograd follows, and the functions between them and values at pixel resolution."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradfilter import patches
from gradfilter.errors import DoubleBackwardError
from gradfilter.patches import MAP, Layout, Matrix, Pair, count_cells, make_areas, pool_sum
from gradfilter.regions import Choices

if TYPE_CHECKING:
    from gradfilter.tensor import PatchTensor


def coarse(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Guard a backward at patch resolution: first derivatives only, and not in autocast's lower precision."""

    @wraps(backward)
    def guarded(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "a filtered gradient was asked for with create_graph=True. The backward pass at patch resolution has no "
                "second derivative. Call backward() without create_graph, or gradfilter.remove_(model) first."
            )
        device = grads[0].device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # shapes alone have no autocast
            with torch.autocast(device, enabled=False):
                return backward(ctx, *grads)
        return backward(ctx, *grads)

    return guarded


APPLY: Any = torch._C._FunctionBase.__dict__["apply"]  # type: ignore[attr-defined]


def call_function(function: type[Function], *args: Any) -> Any:
    """Call a function of autograd, by the short way where no transform need be asked: a network calls hundreds of them."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return APPLY.__get__(None, function)(*args)


def make_carrier(shape: Iterable[int], like: Tensor) -> Tensor:
    """Return a tensor of NaN with the dtype and device of `like` and one element of storage.

    NaN and not zero: a carrier that somebody reads by accident must show.
    """
    if like.is_cpu and torch._C._len_torch_dispatch_stack() == 0:
        return find_nan(tuple(shape), like.dtype).data
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(*shape)


@lru_cache(maxsize=1024)
def find_nan(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of NaN on a CPU; carriers are aliases of it, each with a version of its own."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.full((), float("nan"), dtype=dtype, device="cpu").expand(shape)


class Exit(Function):
    """Turn a carrier into its value.

    Equation: backward is sum-pool(gy), the adjoint of "the value is constant in each patch" (design: projection).
    Cost: nothing forward, one pass over gy backward; saves nothing.
    Exact when: always, for the gradient that the region can carry.
    """

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, value: tuple[Tensor], patch: Pair, layout: Layout, choices: Choices, kind: type[PatchTensor]
    ) -> Tensor:
        ctx.patch, ctx.layout, ctx.choices = patch, layout, choices
        # Made here, from a tensor that autograd does not know as an input, the result is no view: in-place functions work.
        return Tensor._make_subclass(kind, value[0])

    @staticmethod
    @coarse
    def backward(ctx: Any, gy: Tensor) -> Any:
        return pool_sum(gy, ctx.patch, ctx.layout), None, None, None, None, None


class Leave(Exit):
    """`Exit` as a plain tensor."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, carrier: Tensor, value: Tensor, patch: Pair, layout: Layout, choices: Choices, kind: type[PatchTensor]
    ) -> Tensor:
        ctx.patch, ctx.layout = patch, layout
        return value.clone()


class Rebind(Function):
    """Give a value that a rule has changed in place its new carrier; backward is that of `Exit`.

    The value comes first: that is where torch, for a view, looks for the gradient of what was there before (there is none).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, carrier: Tensor) -> Tensor:
        ctx.patch, ctx.layout, ctx.choices = x.patch, x.spatial, x.choices  # type: ignore[attr-defined]
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @coarse
    def backward(ctx: Any, gy: Tensor) -> Any:
        zero = gy.new_zeros(()).expand_as(gy) if ctx.needs_input_grad[0] else None  # torch takes None for the whole base
        return zero, pool_sum(gy, ctx.patch, ctx.layout)


EXIT_NODES: tuple[Any, ...] = (Exit._backward_cls, Rebind._backward_cls)  # type: ignore[attr-defined]
"""The classes of the places in the graph where a region can end."""


class Enter(Function):
    """Start a region at a tensor that needs a gradient.

    Equation: the carrier is mean-pool(x), so gx = unpool(G / |I|).
    Cost: one pass over gx backward; saves nothing.
    Exact when: the gradient is constant in each patch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, patch: Pair, layout: Layout) -> Tensor:
        ctx.size, ctx.patch, ctx.layout = layout.size(x.shape), patch, layout
        return make_carrier(layout.resize(x.shape, count_cells(ctx.size, patch)), x)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        mean = g / make_areas(ctx.size, ctx.patch, g, ctx.layout)
        return patches.unpool(mean, ctx.patch, ctx.size, ctx.layout), None, None


class AxisMap(Function):
    """Apply a linear map that acts on rows and columns alone: regrid, pad, crop, average pooling, interpolation.

    Equation: ȳ = M_h x̄ M_wᵀ, so Gx = M_hᵀ G M_w, with M the projection of the pixel map onto patch-constant maps.
    Cost: two small matrix products per image backward; saves nothing.
    Exact when: always, for the gradient that the two tilings can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, rows: Matrix, columns: Matrix, layout: Layout = MAP) -> Tensor:
        cells = len(rows), len(columns)
        ctx.rows, ctx.columns, ctx.layout = rows, columns, layout.with_size(cells)
        return make_carrier(layout.resize(carrier.shape, cells), carrier)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        gx = patches.over_map(g, ctx.layout, lambda m: patches.apply_axes(m, ctx.rows.T, ctx.columns.T))
        return gx, None, None, None
