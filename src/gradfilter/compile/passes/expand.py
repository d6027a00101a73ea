"""Join a pointwise convolution and a depthwise one behind it, without the map between them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from gradfilter.ops import native

own = torch.ops.gradfilter


def fuse_expansions(graph: Graph) -> None:
    """Let a pointwise convolution and a depthwise one behind it be one `expand`, without the map between them."""
    for node in list(graph.nodes):
        if node._erased or node.target is not own.convolve.default or not is_expansion(node):
            continue
        parts = {user.args[1]: user for user in node.users}
        hidden = parts.get(0)
        if hidden is None or len(hidden.users) != 1:
            continue
        (second,) = hidden.users
        if not is_depthwise(second, hidden):
            continue
        replace_expansion(graph, node, parts, second)
    graph.eliminate_dead_code()


def is_expansion(node: Node) -> bool:
    """Tell whether a convolution widens a map of one-pixel windows, which one call with a depthwise one behind it pays for."""
    x, w, _, stride, padding, dilation, groups = node.args[:7]
    shape, weight = x.meta["val"].shape, w.meta["val"].shape  # type: ignore[union-attr]
    plain: bool = list(stride) == list(dilation) == [1, 1] and list(padding) == [0, 0] and groups == 1  # type: ignore[arg-type]
    residual = node.args[12] if len(node.args) > 12 else None
    return plain and weight[2:] == (1, 1) and residual is None and native.prefers_expand(tuple(shape), tuple(weight))


def is_depthwise(node: Node, x: Node) -> bool:
    """Tell whether a node is a depthwise convolution of x with a window of several pixels."""
    if node.target is not own.convolve.default or node.args[0] is not x:
        return False
    weight, groups = node.args[1].meta["val"].shape, node.args[6]  # type: ignore[union-attr]
    residual = node.args[12] if len(node.args) > 12 else None
    return groups == weight[0] and weight[1] == 1 and weight[2:] != (1, 1) and residual is None


def replace_expansion(graph: Graph, first: Node, parts: dict[Any, Node], second: Node) -> None:
    """Put one `expand` in the place of two convolutions."""
    x, w, bias, _, _, _, _, _, scale, shift, act, patch = first.args[:12]
    _, taps, taps_bias, stride, padding, dilation, _, size, *ending = second.args[:12]
    for node in second.all_input_nodes:  # the means of the first may be read before the second runs
        hoist(node, first)
    with graph.inserting_before(first):
        where = stride, padding, dilation, size
        middle, end = (bias, scale, shift, act, patch), (taps_bias, *ending)
        new = graph.call_function(own.expand.default, (x, w, *middle, taps, *where, *end))
    outer = {user.args[1]: user for user in second.users}
    for place, node in [(i - 1, parts.get(i)) for i in (1, 2)] + [(i + 2, outer.get(i)) for i in (0, 1, 2)]:
        if node is not None:
            with graph.inserting_before(first):
                value = graph.call_function(operator.getitem, (new, place))
            value.meta = dict(node.meta)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    graph.erase_node(second)


def hoist(node: Node, before: Node) -> None:
    """Move a node and what it reads in front of another one; what reads that other one stays where it is."""
    if node < before or before in node.all_input_nodes:
        return
    for x in node.all_input_nodes:
        hoist(x, before)
    before.prepend(node)
