"""Linear maps of the channels, in any layout: `linear`, `matmul` and `einsum` at patch resolution."""

from __future__ import annotations

import string
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gradfilter.carriers import coarse, make_carrier
from gradfilter.emit import finish, wrap
from gradfilter.geometry.tiling import Layout, count_cells
from gradfilter.keep import Kept, Tucker
from gradfilter.keep.base import load, save
from gradfilter.keep.contract import contract
from gradfilter.rules.functions import find_functions
from gradfilter.tensor import EXPECTED_EXITS, REGION_ENDS, PatchTensor, is_live, keep_input, mean, pixels, rule, spatial_size

# Attention mixes every place of a map with every other: that is no map of patches any more.
EXPECTED_EXITS.update({F.scaled_dot_product_attention, F.multi_head_attention_forward})


def outer(g: Tensor, kept: Tensor | Tucker) -> Tensor:
    """Return Σ Gᵀ x̄ over all patches: the gradient of a matrix that maps the last axis."""
    if isinstance(kept, Tucker):
        batch = string.ascii_lowercase[: g.dim() - 1]
        return multiply_kept(g, f"{batch}y", kept, f"{batch}x", "yx")
    return g.reshape(-1, g.shape[-1]).t() @ kept.reshape(-1, kept.shape[-1])


def multiply_kept(g: Tensor, g_term: str, kept: Tensor | Tucker, x_term: str, result: str) -> Tensor:
    """Return einsum(g, x → result) of what was kept of x."""
    if not isinstance(kept, Tucker):
        return torch.einsum(f"{g_term},{x_term}->{result}", g, kept)
    letters = dict(
        zip(dict.fromkeys(x_term + g_term + result), string.ascii_lowercase, strict=False)
    )  # a user's may be capitals
    x_term, g_term, result = ("".join(letters[label] for label in term) for term in (x_term, g_term, result))
    terms, tensors = kept.spell(x_term)
    return contract([g_term, *terms], [g, *tensors], result)


def is_regrouped(x: Tensor, *groups: Sequence[int]) -> bool:
    """Tell whether torch copies x to make one axis of each group of its axes, as it does before a matrix product."""
    for group in groups:
        axes = [axis for axis in group if x.shape[axis] != 1]
        if any(x.stride(outer) != x.stride(inner) * x.shape[inner] for outer, inner in pairwise(axes)):
            return True
    return False


class Linear(Function):
    """Carry a gradient back through a linear map of the last axis.

    Equation: Gx = G·w, gw = Σ Gᵀ x̄, gb = Σ G over all patches: a 1×1 convolution in another layout.
    Cost: two matrix products, 1/r² of the exact ones; saves x̄ where w is trained.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, w: Tensor, b: Tensor | None, kept: Kept | None, y: Tensor) -> Tensor:
        save(ctx, [kept], w if ctx.needs_input_grad[0] else None)
        return make_carrier((*carrier.shape[:-1], y.shape[-1]), y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        kept, w = load(ctx)
        gx = gw = gb = None
        rows = g.reshape(-1, g.shape[-1])
        if w is not None:
            gx = (rows @ w.to(g.dtype)).reshape(*g.shape[:-1], w.shape[1])
        if kept is not None:
            gw = outer(g, kept)
        if ctx.needs_input_grad[2]:
            gb = rows.sum(0)
        return gx, gw, gb, None, None


@rule(F.linear, any_layout=True)
def linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Map the channels of a map or of tokens, the channels being the last axis."""
    if not is_live(input) or isinstance(weight, PatchTensor):
        return NotImplemented
    x = input
    if x.dim() - 1 in x.spatial.axes:
        return REGION_ENDS  # a mixer's map of all places to all places, as attention is
    if weight.dim() != 2:
        return NotImplemented
    with torch.no_grad():
        y = func(pixels(x), weight, bias)
        kept, last = None, x.dim() - 1
        if weight.requires_grad:
            copied = is_regrouped(pixels(x), range(last), (last,))
            kept = keep_input(x, mean(x), x.choices, y.dtype, last, copied=copied)
    return finish(x, y, Linear.apply(x.carrier, weight, bias, kept, y))  # type: ignore[arg-type]


@rule(*find_functions("matmul", "__matmul__", "bmm", inplace=False), any_layout=True)
def matmul(func: Any, input: Tensor, other: Tensor) -> Any:
    """Map the channels by a matrix: on the right of channels last (`Linear`), on the left of tokens last (`Einsum`).

    The product of a map with another one, or with what was made of one, is attention, at which the region ends.
    """
    if is_live(input) and not is_live(other) and other.dim() == 2:
        return linear(lambda value, weight, _: func(value, weight.t()), input, other.t())
    if is_live(other) and not is_live(input) and input.dim() == 2 and other.spatial.rows == other.dim() - 1:
        batch = string.ascii_lowercase[: other.dim() - 2]
        return einsum(torch.einsum, (f"yx,{batch}xz->{batch}yz", input, other), {})
    attention = all(v.requires_grad and v.dim() > 2 for v in (input, other))
    return REGION_ENDS if attention else NotImplemented


class Einsum(Function):
    """Carry a gradient back through an einsum of a map and a plain tensor that leaves rows and columns alone.

    Equation: with y = einsum("x,w->y"), Gx = einsum("y,w->x")(G, w), gw = einsum("y,x->w")(G, x̄).
    Cost: 1/r² of the exact ones; saves x̄ where w is trained, w where x is.
    Exact when: always, for the gradient that the tiling can carry.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, w: Tensor, kept: Kept | None, terms: tuple[str, str, str], y: Tensor) -> Tensor:
        save(ctx, [kept], w if ctx.needs_input_grad[0] else None)
        ctx.terms = terms
        sizes = {**dict(zip(terms[1], w.shape, strict=True)), **dict(zip(terms[0], carrier.shape, strict=True))}
        return make_carrier([sizes[label] for label in terms[2]], y)

    @staticmethod
    @coarse
    def backward(ctx: Any, g: Tensor) -> Any:
        kept, w = load(ctx)
        x_term, w_term, y_term = ctx.terms
        gx = None if w is None else torch.einsum(f"{y_term},{w_term}->{x_term}", g, w.to(g.dtype))
        gw = None if kept is None else multiply_kept(g, y_term, kept, x_term, w_term)
        return gx, gw, None, None, None


def regroups(x: Tensor, x_term: str, w_term: str, y_term: str, first: bool) -> bool:
    """Tell whether torch's einsum of x and another tensor copies x: it makes them factors of one matrix product.

    Args:
        x: The tensor.
        x_term: Its labels.
        w_term: The labels of the other tensor.
        y_term: The labels of the result.
        first: Whether x is the left one of the two.
    """
    summed = sorted(set(x_term) - set(y_term))  # as torch orders them
    if not summed:
        return False  # torch multiplies them as they are
    batch = [label for label in y_term if label in x_term and label in w_term]
    own = [label for label in y_term if label in x_term and label not in w_term]
    groups = (batch, own, summed) if first else (batch, summed, own)
    return is_regrouped(x, *([x_term.index(label) for label in group] for group in groups))


@rule(torch.einsum, any_layout=True)
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Contract the channels of a map with a plain tensor; a contraction of two maps is attention."""
    equation, *operands = args
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    live = [bool(is_live(v)) for v in operands]
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation or not any(live):
        return NotImplemented
    if all(live):
        return REGION_ENDS
    inputs, _, y_term = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if [len(term) for term in terms] != [v.dim() for v in operands]:
        return NotImplemented  # torch says what is wrong
    place = live.index(True)
    x, w = operands[place], operands[1 - place]
    x_term, w_term = terms[place], terms[1 - place]
    labels = [x_term[axis] for axis in (x.spatial.rows, x.spatial.columns)]
    # Each label once, none summed in one operand alone, rows and columns through from x to y.
    plain_sum = set(x_term) - set(w_term) - set(y_term) | set(w_term) - set(x_term) - set(y_term)
    repeated = any(len(set(term)) < len(term) for term in (x_term, w_term, y_term))
    if plain_sum or repeated or set(labels) & set(w_term) or not set(labels) <= set(y_term):
        return NotImplemented
    sizes = dict(zip(x_term, x.shape, strict=True))
    if any(n != sizes.get(label, n) for label, n in zip(w_term, w.shape, strict=True)):
        return NotImplemented  # one of the two is broadcast
    with torch.no_grad():
        y = func(equation, *(pixels(v) for v in operands))
        shared = [axis for axis, label in enumerate(x_term) if label in w_term]
        channels = shared[-1] if shared else 1
        kept = None
        if w.requires_grad:
            copied = regroups(pixels(x), x_term, w_term, y_term, place == 0)
            kept = keep_input(x, mean(x), x.choices, y.dtype, channels, copied=copied)
    layout = Layout(y_term.index(labels[0]), y_term.index(labels[1]), x.spatial.tokens, x.spatial.prefix)
    assert list(y.shape) == layout.resize(y.shape, spatial_size(x))
    carrier: Tensor = Einsum.apply(x.carrier, w, kept, (x_term, w_term, y_term), y)  # type: ignore[assignment]
    assert list(carrier.shape) == layout.resize(y.shape, count_cells(spatial_size(x), x.patch))
    return wrap(y, carrier, x.patch, x.choices, layout=layout)
