"""Passes over maps in a small C library, on memory that is used again; in torch where there is no library.

`norm_act` is scale, shift, residual and activation of a map with patch means and slopes, in one pass; `convolve` is a
convolution that ends in such a pass; `scale_by_counts` is the gradient of an activation; `pool_mean`, `pool_sum` and `unpool`
go between pixels and patches; `max_pool` is max pooling with the cells in which the maxima lie; `pair_gradients` is the way
back through a depthwise convolution at patch resolution, `tile_gradients` through a dense one of 3×3 taps; `empty` makes large
tensors on blocks that come back. `GRADFILTER_NATIVE=0` in the environment, or `with native.off():`, switches the library off:
then everything runs in torch, with equal results.
"""

from gradfilter.native.backward import TILE, AxisTiles, can_tile, tile_gradients
from gradfilter.native.conv import can_convolve, convolve, prefers
from gradfilter.native.fused import fold, norm_act
from gradfilter.native.library import can_run, find_library, is_on, is_watched, load, off
from gradfilter.native.maxpool import Pooled, Taps, can_max_pool, max_pool, max_route
from gradfilter.native.memory import BlockBytes, block_bytes, empty, plain_memory, trim
from gradfilter.native.pairs import AxisPairs, can_pair, pair_gradients
from gradfilter.native.pooling import can_scale, pool_mean, pool_sum, scale_by_counts, unpool
from gradfilter.native.reference import torch_norm_act, torch_unpool
from gradfilter.native.values import CLAMP, HARDSWISH, IDENTITY, LEAKY, RELU, RELU6, SILU, Act, Fused

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
    "Fused",
    "Pooled",
    "Taps",
    "block_bytes",
    "can_convolve",
    "can_max_pool",
    "can_pair",
    "can_run",
    "can_scale",
    "can_tile",
    "convolve",
    "empty",
    "find_library",
    "fold",
    "is_on",
    "is_watched",
    "load",
    "max_pool",
    "max_route",
    "norm_act",
    "off",
    "pair_gradients",
    "plain_memory",
    "pool_mean",
    "pool_sum",
    "prefers",
    "scale_by_counts",
    "tile_gradients",
    "torch_norm_act",
    "torch_unpool",
    "trim",
    "unpool",
]
