"""Let convolutions take in the zeros around the map that they read."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from gradfilter.ops.native.conv import find_fitting

aten, own = torch.ops.aten, torch.ops.gradfilter


def merge_padding(graph: Graph) -> None:
    """Let convolutions that the library computes read the map inside its zeros."""
    for node in list(graph.nodes):
        if node.target is not own.convolve.default or not is_zero_padding(node.args[0]):
            continue
        pad = node.args[0]
        inside, (left, _, top, _), w = pad.args[0], pad.args[1], node.args[1].meta["val"]
        _, _, _, stride, (h, width), dilation, groups, size = node.args[:8]
        padding = h + top, width + left
        shape, places = tuple(inside.meta["val"].shape), (tuple(stride), padding, tuple(dilation))
        if find_fitting(shape, tuple(w.shape), *places, groups, tuple(size)) is not None:
            node.update_arg(0, inside)
            node.update_arg(4, list(padding))
    graph.eliminate_dead_code()


def is_zero_padding(node: Node) -> bool:
    """Tell whether a node puts zeros around a map, and takes nothing away."""
    if node.target is not aten.constant_pad_nd.default:
        return False
    zeros, value = node.args[1], node.args[2] if len(node.args) > 2 else 0
    return len(zeros) == 4 and min(zeros) >= 0 and not value  # type: ignore[arg-type]
