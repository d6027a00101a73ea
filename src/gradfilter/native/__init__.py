"""Passes over maps in a small C library, on memory that is used again; in torch where there is no library.

`norm_act` is scale, shift, residual and activation of a map with patch means and slopes, in one pass; `convolve` is a
convolution that ends in such a pass, and `expand` a pointwise and a depthwise one without the map between them;
`scale_by_counts` is the gradient of an activation, `norm_back` and `norm_end` those of a batch norm; `pool_mean`, `pool_sum`
and `unpool` go between pixels and patches; `max_pool` is max pooling with the cells in which the maxima lie; `pair_gradients`
is the way back through a depthwise convolution at patch resolution, `tile_gradients` through a dense one of 3×3 taps,
`single_gradients` through one of a single tap; `empty` makes large tensors on blocks that come back.
`GRADFILTER_NATIVE=0` in the environment, or `with native.off():`, switches the library off: then everything runs in torch,
with equal results.
"""

from gradfilter.native.affine import FixedNorm, NormBack, norm_back, norm_end, torch_norm_back, torch_norm_end
from gradfilter.native.backward import TILE, AxisTiles, can_tile, tile_gradients
from gradfilter.native.conv import can_convolve, can_read, convolve, find_kernel, make_cells, prefers
from gradfilter.native.expand import can_expand, expand, prefers_expand
from gradfilter.native.fused import fold, norm_act
from gradfilter.native.library import can_run, find_library, is_on, is_watched, load, off
from gradfilter.native.maxpool import Pooled, Taps, can_max_pool, max_pool, max_route
from gradfilter.native.memory import BlockBytes, block_bytes, empty, plain_memory, trim
from gradfilter.native.pairs import AxisPairs, can_pair, pair_gradients
from gradfilter.native.pooling import can_scale, pool_mean, pool_sum, scale_by_counts, unpool
from gradfilter.native.reference import torch_norm_act, torch_unpool
from gradfilter.native.single import can_single, single_gradients
from gradfilter.native.values import CLAMP, HARDSWISH, IDENTITY, LEAKY, RELU, RELU6, SILU, Act, Cells, Ending, Expanded, Fused

__all__ = [
    "CLAMP",
    "HARDSWISH",
    "IDENTITY",
    "LEAKY",
    "RELU",
    "RELU6",
    "SILU",
    "TILE",
    "Act",
    "AxisPairs",
    "AxisTiles",
    "BlockBytes",
    "Cells",
    "Ending",
    "Expanded",
    "FixedNorm",
    "Fused",
    "NormBack",
    "Pooled",
    "Taps",
    "block_bytes",
    "can_convolve",
    "can_expand",
    "can_max_pool",
    "can_pair",
    "can_read",
    "can_run",
    "can_scale",
    "can_single",
    "can_tile",
    "convolve",
    "empty",
    "expand",
    "find_kernel",
    "find_library",
    "fold",
    "is_on",
    "is_watched",
    "load",
    "make_cells",
    "max_pool",
    "max_route",
    "norm_act",
    "norm_back",
    "norm_end",
    "off",
    "pair_gradients",
    "plain_memory",
    "pool_mean",
    "pool_sum",
    "prefers",
    "prefers_expand",
    "scale_by_counts",
    "single_gradients",
    "tile_gradients",
    "torch_norm_act",
    "torch_norm_back",
    "torch_norm_end",
    "torch_unpool",
    "trim",
    "unpool",
]
