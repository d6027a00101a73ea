"""The operators of a coarse step: what each computes (a reference in torch), its kernel, and its entry in torch's registry.

Rules compute with these functions and with torch's own, and with nothing else; docs/operators.md lists them. An operator knows
tensors and geometry alone: no carriers, no plans, no rules.
"""

from gradfilter.ops.activation import count_steep, norm_act, scale_by_counts
from gradfilter.ops.conv_backward import conv_gradients, conv_norm_gradients
from gradfilter.ops.convolution import convolve, expand, fold_norm
from gradfilter.ops.loss import cross_entropy_gradient
from gradfilter.ops.max_pooling import max_pool, max_route
from gradfilter.ops.native.affine import FixedNorm
from gradfilter.ops.native.values import (
    CLAMP,
    HARDSWISH,
    IDENTITY,
    LEAKY,
    RELU,
    RELU6,
    SILU,
    Act,
    Cells,
    Ending,
    Expanded,
    Fused,
)
from gradfilter.ops.norm import norm_eval_gradients, norm_train_gradients
from gradfilter.ops.operator import OPERATORS, find_decompositions
from gradfilter.ops.pooling import apply_axes, map_axes, pool_mean, pool_sum, unpool

__all__ = [
    "CLAMP",
    "HARDSWISH",
    "IDENTITY",
    "LEAKY",
    "OPERATORS",
    "RELU",
    "RELU6",
    "SILU",
    "Act",
    "Cells",
    "Ending",
    "Expanded",
    "FixedNorm",
    "Fused",
    "apply_axes",
    "conv_gradients",
    "conv_norm_gradients",
    "convolve",
    "count_steep",
    "cross_entropy_gradient",
    "expand",
    "find_decompositions",
    "fold_norm",
    "map_axes",
    "max_pool",
    "max_route",
    "norm_act",
    "norm_eval_gradients",
    "norm_train_gradients",
    "pool_mean",
    "pool_sum",
    "scale_by_counts",
    "unpool",
]
