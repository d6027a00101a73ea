"""The operators of a coarse step: what each computes (a reference in torch), its kernel, and its entry in torch's registry.

Rules compute with what this package exports and with torch's own functions, and with nothing else; docs/operators.md lists the
operators. An operator knows tensors and geometry alone: no carriers, no plans, no rules. Some exports are no operators but what
surrounds them: types of arguments, constants of a geometry (`make_areas`, `to_tensor`), and steps of a formula that a rule has
in common with an operator (`cut`, `find_share`, `normalise`).
"""

from gradfilter.ops.activation import count_steep, cut, find_share, is_told_by_result, norm_act, scale_by_counts
from gradfilter.ops.constants import make_areas, to_tensor
from gradfilter.ops.conv_backward import conv_gradients, conv_norm_gradients, conv_norm_gradients_by
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
from gradfilter.ops.norm import norm_eval_gradients, norm_train_gradients, normalise
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
    "conv_norm_gradients_by",
    "convolve",
    "count_steep",
    "cross_entropy_gradient",
    "cut",
    "expand",
    "find_decompositions",
    "find_share",
    "fold_norm",
    "is_told_by_result",
    "make_areas",
    "map_axes",
    "max_pool",
    "max_route",
    "norm_act",
    "norm_eval_gradients",
    "norm_train_gradients",
    "normalise",
    "pool_mean",
    "pool_sum",
    "scale_by_counts",
    "to_tensor",
    "unpool",
]
