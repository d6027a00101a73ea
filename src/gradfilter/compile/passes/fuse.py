"""Fuse what follows a convolution into it: norm, residual, activation, patch means and slopes; and a depthwise one behind it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from gradfilter.geometry.tiling import MAP, Pair
from gradfilter.ops import CLAMP, HARDSWISH, IDENTITY, LEAKY, SILU, Act, native
from gradfilter.ops.native.conv import find_fitting

aten, own = torch.ops.aten, torch.ops.gradfilter
NORMS = {
    aten.native_batch_norm.default: (5, 7),
    aten._native_batch_norm_legit.default: (5, 7),
    aten._native_batch_norm_legit_no_training.default: (None, 6),
}
"""Batch norms: where the arguments `training` and `eps` stand. Before them stand x, γ, β, mean and variance."""
ACTS: dict[Any, Callable[..., Act]] = {
    aten.relu.default: lambda: Act(CLAMP),
    aten.hardtanh.default: lambda lo=-1.0, hi=1.0: Act(CLAMP, lo, hi),
    aten.clamp.default: lambda lo=None, hi=None: Act(CLAMP, -math.inf if lo is None else lo, math.inf if hi is None else hi),
    aten.clamp_min.default: lambda lo: Act(CLAMP, lo),
    aten.leaky_relu.default: lambda slope=0.01: Act(LEAKY, 0.0, math.inf, slope),
    aten.silu.default: lambda: SILU,
    aten.hardswish.default: lambda: HARDSWISH,
}
"""Activations that one pass computes together with what is before and behind them."""


class Pass(NamedTuple):
    """A map, and what follows it that one pass computes.

    Attributes:
        start: The map.
        norm: The batch norm.
        residual: What is added.
        act: The activation.
        last: The node of the result.
        mean: The node of its patch means.
        slope: The node of its slopes.
        patch: The patch of both.
        counts: Further counts of steep pixels.
    """

    start: Node
    norm: Node | None
    residual: Node | None
    act: Act
    last: Node
    mean: Node | None
    slope: Node | None
    patch: Pair
    counts: list[Node]


def fuse_passes(graph: Graph) -> None:
    """Let norm, residual, activation, patch means and slopes behind a map be one `norm_act`."""
    for node in list(graph.nodes):
        if not node._erased and is_start(node):
            found = find_pass(node)
            if found is not None:
                replace_pass(graph, found)


def is_start(node: Node) -> bool:
    """Tell whether passes may begin behind a node: at convolutions, and at norms, sums and activations of other maps."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.dtype is torch.float32 and has_users(node)


def has_users(node: Node) -> bool:
    """Tell whether a convolution gave a map, or whether anything behind it is worth a pass."""
    return node.target is aten.convolution.default


def find_pass(start: Node) -> Pass | None:
    """Return what one pass can compute behind a map."""
    last, norm, residual, act = start, None, None, IDENTITY
    norm = next((user for user in start.users if is_fixed_norm(user, start)), None)
    if norm is not None and len(start.users) == 1:
        given = [user for user in norm.users if user.target is operator.getitem and user.args[1] == 0]
        if len(given) != 1:
            return None
        last = given[0]
    else:
        norm = None
    if len(last.users) == 1:
        (user,) = last.users
        if user.target is aten.add.Tensor and not user.kwargs and fits_residual(user, last):
            residual = next(arg for arg in user.args if arg is not last)
            last = user
    before = last
    steps = [user for user in before.users if user.target in ACTS and user.args[0] is before]
    counts = [user for user in before.users if is_count(user, before)]
    if len(steps) == 1 and len(before.users) == 1 + len(counts):
        act = ACTS[steps[0].target](*steps[0].args[1:])
        last = steps[0]
    else:
        counts = []
    mean = next((user for user in last.users if is_pooled(user, last)), None)
    if last is start:
        return None
    slope = None
    if act != IDENTITY:
        counts += [user for user in last.users if is_count(user, last)]
        fitting = [user for user in counts if to_act(user.args[1]) == act]
        if len(fitting) != len(counts):
            return None
        apart = (1, 1) if mean is None else tuple(mean.args[1])
        slope = next(
            (user for user in counts if tuple(user.args[2]) != (1, 1) and apart in ((1, 1), tuple(user.args[2]))), None
        )
    patch = (1, 1)
    for found in (mean, slope):
        if found is not None:
            patch = tuple(found.args[1 if found is mean else 2])
    return Pass(start, norm, residual, act, last, mean, slope, patch, [user for user in counts if user is not slope])


def is_fixed_norm(node: Node, x: Node) -> bool:
    """Tell whether a node is a batch norm of x with running statistics."""
    if node.target not in NORMS or node.args[0] is not x:
        return False
    training, _ = NORMS[node.target]
    return training is None or node.args[training] is False


def fits_residual(node: Node, x: Node) -> bool:
    """Tell whether a sum adds a map of the same shape and dtype to x."""
    others = [arg for arg in node.args if arg is not x]
    if len(others) != 1 or not isinstance(others[0], Node):
        return False
    a, b = x.meta.get("val"), others[0].meta.get("val")
    return isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype


def is_count(node: Node, x: Node) -> bool:
    """Tell whether a node counts the steep pixels of x."""
    return node.target is own.count_steep.default and node.args[0] is x and is_map_layout(node.args[3:])


def is_pooled(node: Node, x: Node) -> bool:
    """Tell whether a node has the patch means of x."""
    return node.target is own.pool_mean.default and tuple(node.args[1]) != (1, 1) and is_map_layout(node.args[2:])


def is_map_layout(layout: Any) -> bool:
    """Tell whether an operator takes maps [N, C, H, W]."""
    return not layout or list(layout[0]) == list(MAP.numbers)


def to_act(numbers: Any) -> Act:
    """Return the activation that a graph has as a list of numbers."""
    return Act(int(numbers[0]), *numbers[1:])


def replace_pass(graph: Graph, found: Pass) -> None:
    """Put one `norm_act`, or a convolution that ends in it, in the place of what it computes."""
    start, last = found.start, found.last
    with graph.inserting_after(last):
        anchor = graph.call_function(operator.getitem, (last, 0))  # where new nodes go
    with graph.inserting_before(anchor):
        scale = shift = None
        if found.norm is not None:
            gamma, beta, mean, var = found.norm.args[1:5]
            eps = found.norm.args[NORMS[found.norm.target][1]]
            folded = graph.call_function(own.fold_norm.default, (gamma, beta, mean, var, eps))
            scale, shift = (graph.call_function(operator.getitem, (folded, i)) for i in (0, 1))
        ending = scale, shift, list(found.act), list(found.patch), found.residual
        where = find_kernel(start, found)
        if where is None:
            new = graph.call_function(own.norm_act.default, (start, *ending))
        else:
            new = graph.call_function(own.convolve.default, (*start.args[:3], *where, *ending))
        y = graph.call_function(operator.getitem, (new, 0))
        y.meta = dict(last.meta)
        pooled = [
            (node, graph.call_function(operator.getitem, (new, i)))
            for i, node in ((1, found.mean), (2, found.slope))
            if node is not None
        ]
        # Which piece a pixel is on shows in the result, too.
        pooled += [(node, graph.call_function(node.target, (y, *node.args[1:]))) for node in found.counts]
    graph.erase_node(anchor)
    last.replace_all_uses_with(y, delete_user_cb=lambda user: user is not y)
    for node, value in pooled:
        value.meta = dict(node.meta)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def find_kernel(conv: Node, found: Pass) -> tuple[Any, ...] | None:
    """Return stride, padding, dilation, groups and size of a convolution for which the library's kernel is the fastest way."""
    if conv.target is not aten.convolution.default:
        return None
    x, w, _, stride, padding, dilation, transposed, _, groups = conv.args
    x_val, w_val, y_val = (node.meta["val"] for node in (x, w, conv))  # type: ignore[union-attr]
    if transposed or x_val.dim() != 4 or len(padding) != 2 or x_val.dtype is not torch.float32:
        return None
    stride, padding, dilation, size = tuple(stride), tuple(padding), tuple(dilation), tuple(y_val.shape[2:])
    kernel = find_fitting(tuple(x_val.shape), tuple(w_val.shape), stride, padding, dilation, groups, size)
    if kernel is None or not native.prefers(kernel, tuple(w_val.shape), stride, size):
        return None
    return list(stride), list(padding), list(dilation), groups, list(size)


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
    plain = list(stride) == list(dilation) == [1, 1] and list(padding) == [0, 0] and groups == 1  # type: ignore[arg-type]
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
    with graph.inserting_before(second):
        where = stride, padding, dilation, size
        middle, end = (bias, scale, shift, act, patch), (taps_bias, *ending)
        new = graph.call_function(own.expand.default, (x, w, *middle, taps, *where, *end))
    outer = {user.args[1]: user for user in second.users}
    for place, node in [(i - 1, parts.get(i)) for i in (1, 2)] + [(i + 2, outer.get(i)) for i in (0, 1, 2)]:
        if node is not None:
            with graph.inserting_before(second):
                value = graph.call_function(operator.getitem, (new, place))
            value.meta = dict(node.meta)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    graph.erase_node(second)
