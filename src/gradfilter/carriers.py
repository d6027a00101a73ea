"""Carriers: the coarse tensors that autograd follows, and the functions between them and values at pixel resolution."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from gradfilter.errors import DoubleBackwardError
from gradfilter.geometry.axes import AxisMatrix
from gradfilter.geometry.tiling import MAP, Layout, Pair, count_cells
from gradfilter.ops.constants import make_areas
from gradfilter.ops.pooling import apply_axes, pool_sum, unpool
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
        g = grads[0] if len(grads) == 1 else add_exit(ctx, *grads)
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        device = g.device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # shapes alone have no autocast
            with torch.autocast(device, enabled=False):
                return backward(ctx, g)
        return backward(ctx, g)

    return guarded


def add_exit(ctx: Any, gy: Tensor | None, g: Tensor | None) -> Tensor | None:
    """Return the gradient of a `Carry`: that of its carrier, and that of `Exit` where the value was used outside the rules."""
    if gy is None:
        return g
    out = pool_sum(gy, ctx.patch, ctx.layout)
    return out if g is None else g + out


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


class Out(NamedTuple):
    """The value that a function of a region gives beside its carrier.

    Attributes:
        value: The value, which is not computed yet where it waits.
        patch: The patch of the carrier.
        choices: What the latest planned layer decided.
        kind: The class of the result.
        layout: Which axes are rows and columns.
    """

    value: Tensor
    patch: Pair
    choices: Choices
    kind: type[PatchTensor]
    layout: Layout = MAP


class Carry(Function):
    """A function of a region that gives the value and the carrier at once: what `Exit` would be a second function for.

    Its forward returns `carry(ctx, ...)`; its backward, guarded by `coarse`, is given the sum of both gradients.
    """


def carry(ctx: Any, cells: Iterable[int], out: Out, changed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the results of a `Carry`: the value, or the tensor that was changed in place, and a carrier of so many cells."""
    ctx.set_materialize_grads(False)  # most values have no gradient of their own
    ctx.patch, ctx.layout, ctx.choices = out.patch, out.layout, out.choices
    if changed is None:
        # As in `Exit`, no view of anything that autograd knows.
        return Tensor._make_subclass(out.kind, out.value), make_carrier(cells, out.value)
    ctx.mark_dirty(changed)
    return changed, make_carrier(cells, out.value)


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


def is_exit(node: Any, output: int) -> bool:
    """Tell whether an output of a place in the graph is a value of a region, so that whoever uses it there ends the region."""
    made_by = getattr(node, "_forward_cls", None)
    return output == 0 and made_by is not None and (made_by in (Exit, Rebind) or issubclass(made_by, Carry))


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
        return unpool(mean, ctx.patch, ctx.size, ctx.layout), None, None


class AxisMap(Function):
    """Apply a linear map that acts on rows and columns alone: regrid, pad, crop, average pooling, interpolation.

    Equation: ȳ = M_h x̄ M_wᵀ, so Gx = M_hᵀ G M_w, with M the projection of the pixel map onto patch-constant maps.
    Cost: two small matrix products per image backward; saves nothing.
    Exact when: always, for the gradient that the two tilings can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, rows: AxisMatrix, columns: AxisMatrix, layout: Layout = MAP) -> Tensor:
        cells = len(rows), len(columns)
        ctx.rows, ctx.columns, ctx.layout = rows, columns, layout.with_size(cells)
        return make_carrier(layout.resize(carrier.shape, cells), carrier)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        return apply_axes(g, ctx.rows.T, ctx.columns.T, ctx.layout), None, None, None
