"""How many floating point operations a torch operator does: a multiply-add counts as two.

Convolutions and matrix products count what their definition says, zeros of padding included, whatever algorithm runs.
Everything else counts one operation per element and elementary function: a ReLU, an exp or an addition is one. Moving data
(views, copies, concatenation, indexing, the choice between two tensors) counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Formula = Callable[..., int]
aten = torch.ops.aten
FORMULAS: dict[Any, Formula] = {}
"""From an operator to its formula, which takes the operator's arguments and, as `out`, its result."""
MOVES = {
    getattr(aten, name)
    for name in (
        "_reshape_alias _to_copy _unsafe_view alias arange as_strided bernoulli bernoulli_ cat clone constant_pad_nd "
        "contiguous copy copy_ detach empty empty_like empty_permuted empty_strided expand eye fill fill_ flip full "
        "full_like gather index index_put index_put_ index_select lift_fresh new_empty new_empty_strided "
        "new_full new_ones new_zeros normal_ ones ones_like permute pixel_shuffle pixel_unshuffle rand rand_like randn "
        "randn_like randperm reflection_pad2d reflection_pad2d_backward repeat replication_pad2d "
        "replication_pad2d_backward roll scalar_tensor scatter select_backward select_scatter slice_backward "
        "slice_scatter stack tril triu uniform_ upsample_nearest2d view where zero_ zeros zeros_like"
    ).split()
    if hasattr(aten, name)
}
"""Operators that compute nothing."""


def count_flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating point operations of one call of an operator of torch's lowest level."""
    packet = operator.overloadpacket
    if packet in MOVES or operator.is_view:
        return 0
    if packet in FORMULAS:
        return FORMULAS[packet](*args, **kwargs, out=out)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
    if not any(t.is_floating_point() for t in tensors):
        return 0
    return max(t.numel() for t in tensors)  # elementwise: all elements of the result; a reduction: all of its input


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Register a formula for operators, by name."""

    def register(new: Formula) -> Formula:
        FORMULAS.update({getattr(aten, name): new for name in names if hasattr(aten, name)})
        return new

    return register


@formula("convolution", "_convolution", "mkldnn_convolution")
def count_conv(x: Tensor, w: Tensor, bias: Tensor | None, *args: Any, out: Tensor, **_: Any) -> int:
    """2 · (input values under an output value) · (output values), the bias added; transposed: the roles swapped."""
    transposed = bool(args[3]) if len(args) > 3 else False
    products = (x if transposed else out).numel() * w.numel() // len(w)
    return 2 * products + (out.numel() if bias is not None else 0)


@formula("convolution_backward")
def count_conv_backward(g: Tensor, x: Tensor, w: Tensor, bias_sizes: Any, *args: Any, out: Any, **_: Any) -> int:
    """The gradients of input and weight cost what the convolution costs, each; that of the bias is a sum."""
    transposed, mask = bool(args[3]), args[6]
    products = (x if transposed else g).numel() * w.numel() // len(w)
    return 2 * products * (bool(mask[0]) + bool(mask[1])) + (g.numel() if mask[2] else 0)


@formula("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "native_group_norm", "native_layer_norm")
def count_norm(x: Tensor, *args: Any, out: Any, **_: Any) -> int:
    """Scale and shift: 2 per value; mean and variance of the batch: 3 more."""
    evaluates = len(args) > 4 and args[4] is False
    return (2 if evaluates else 5) * x.numel()


@formula("native_batch_norm_backward", "native_group_norm_backward", "native_layer_norm_backward")
def count_norm_backward(g: Tensor, x: Tensor, *args: Any, out: Any, **_: Any) -> int:
    """With statistics that do not move: 1 per value for gx, 3 for the affine; else 7, the sums ΣG and ΣG·x̂ among them."""
    evaluates = len(args) > 5 and args[5] is False
    if not evaluates:
        return 7 * g.numel()
    return ((1 if out[0] is not None else 0) + (3 if out[1] is not None else 0)) * g.numel()


@formula("max_pool2d_with_indices", "avg_pool2d")
def count_pool(x: Tensor, kernel: Any, *args: Any, out: Any, **_: Any) -> int:
    """One per value of the window and output value."""
    sides = [kernel, kernel] if isinstance(kernel, int) else [kernel[0], kernel[-1]]
    return sides[0] * sides[1] * tree_leaves(out)[0].numel()


@formula("avg_pool2d_backward")
def count_average_backward(g: Tensor, x: Tensor, kernel: Any, *args: Any, out: Any, **_: Any) -> int:
    """As many additions as the pooling itself."""
    return count_pool(x, kernel, out=g)


@formula("max_pool2d_with_indices_backward", "adaptive_max_pool2d_backward")
def count_scatter(g: Tensor, *args: Any, out: Any, **_: Any) -> int:
    """One addition per value of the gradient."""
    return g.numel()


@formula("upsample_bilinear2d", "upsample_bilinear2d_backward")
def count_bilinear(x: Tensor, *args: Any, out: Tensor, **_: Any) -> int:
    """Four products and three sums for each value of the larger map."""
    return 7 * max(x.numel(), out.numel())


@formula("_linalg_eigh", "linalg_eigh")
def count_eigh(x: Tensor, *args: Any, out: Any, **_: Any) -> int:
    """Tridiagonal form, its eigenvalues and eigenvectors, and back: 9·n³ (Golub and Van Loan, 8.3)."""
    return 9 * x.numel() * x.shape[-1]


@formula("linalg_qr")
def count_qr(x: Tensor, *args: Any, out: Any, **_: Any) -> int:
    """Householder's, the factor Q made: 4·(m·n² − n³/3) for an m × n matrix."""
    m, n = x.shape[-2:]
    return 4 * (3 * m * n * n - n**3) // 3


@formula("_softmax", "_log_softmax")
def count_softmax(x: Tensor, *args: Any, out: Any, **_: Any) -> int:
    """Largest value, difference, exponential, sum, quotient: 5 per value."""
    return 5 * x.numel()


@formula("_softmax_backward_data", "_log_softmax_backward_data")
def count_softmax_backward(g: Tensor, *args: Any, out: Any, **_: Any) -> int:
    """Product, sum, difference, product: 4 per value."""
    return 4 * g.numel()
