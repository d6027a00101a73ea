"""Fuse what follows a map into one pass: norm, residual, activation, patch means and slopes; with the convolution before it."""

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
NORMS: dict[Any, tuple[int | None, int]] = {
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
"""Torch's activations that a pass computes, too. Frozen layers have them; in a region they are `norm_act` already."""


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
    """

    start: Node
    norm: Node | None
    residual: Node | None
    act: Act
    last: Node
    mean: Node | None
    slope: Node | None
    patch: Pair


def fuse_passes(graph: Graph) -> None:
    """Let norm, residual, activation, patch means and slopes behind a map be one pass, with the convolution before it."""
    for is_start in (is_convolution, is_sum, is_before_norm):  # a convolution takes in what it can before others look
        for node in list(graph.nodes):
            if not node._erased and is_map(node) and is_start(node):
                found = find_pass(node)
                if found is not None:
                    replace_pass(graph, found)


def lower_sums(graph: Graph) -> None:
    """Let sums of two maps, as where residual branches meet, be tasks of the library: a row of tasks goes on over them."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        x = node.args[0]
        if isinstance(x, Node) and is_map(x) and is_residual(node, x):
            with graph.inserting_before(node):
                new = graph.call_function(own.norm_act.default, (x, None, None, list(IDENTITY), [1, 1], node.args[1]))
                y = graph.call_function(operator.getitem, (new, 0))
            y.meta = dict(node.meta)
            node.replace_all_uses_with(y)
            graph.erase_node(node)


def is_map(node: Node) -> bool:
    """Tell whether a node is a map [N, C, H, W] in single precision."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.dtype is torch.float32


def is_convolution(node: Node) -> bool:
    """Tell whether a node is a convolution."""
    return node.target is aten.convolution.default


def is_sum(node: Node) -> bool:
    """Tell whether a node is a map that is added to another, whose sum is activated."""
    return any(
        is_step(last) for user in node.users if user.target is aten.add.Tensor and user.args[0] is node for last in user.users
    )


def is_before_norm(node: Node) -> bool:
    """Tell whether a node is normalised with fixed statistics."""
    return any(is_fixed_norm(user, node) for user in node.users)


def find_pass(start: Node) -> Pass | None:
    """Return what one pass can compute behind a map."""
    last, residual, act, mean, slope, patch = start, None, IDENTITY, None, None, (1, 1)
    norms = [user for user in start.users if is_fixed_norm(user, start)]
    norm = norms[0] if norms and (len(start.users) == 1 or not is_convolution(start)) else None
    if norm is not None:
        given = [user for user in norm.users if user.target is operator.getitem and user.args[1] == 0]
        if len(given) != 1:
            return None
        last = given[0]
    sums = [user for user in last.users if is_residual(user, last)]
    if sums and (len(last.users) == 1 or last is start):
        residual = next(arg for arg in sums[0].all_input_nodes if arg is not last)
        last = sums[0]
    steps = [user for user in last.users if is_step(user)]
    if steps and (len(last.users) == 1 or last is start):
        step = steps[0]
        target: Any = step.target
        if target is own.norm_act.default:
            act, patch = to_act(step.args[3]), to_pair(step.args[4])
            parts = {user.args[1]: user for user in step.users}
            last, mean, slope = parts[0], parts.get(1), parts.get(2)
        else:
            act, last = ACTS[target](*step.args[1:]), step
    if mean is None and slope is None:
        mean = next((user for user in last.users if is_pooled(user, last)), None)
        patch = (1, 1) if mean is None else to_pair(mean.args[1])
    if is_convolution(start):
        is_worth = last is not start or find_kernel(start) is not None
    else:  # torch adds as fast, and means alone are a pass anyway
        is_worth = norm is not None or act != IDENTITY
    if not is_worth:
        return None
    return Pass(start, norm, residual, act, last, mean, slope, patch)


def is_fixed_norm(node: Node, x: Node) -> bool:
    """Tell whether a node is a batch norm of x with running statistics."""
    if node.target not in NORMS or node.args[0] is not x:
        return False
    training, _ = NORMS[node.target]
    return training is None or node.args[training] is False


def is_residual(node: Node, x: Node) -> bool:
    """Tell whether a node adds another map of the same shape and dtype to x."""
    others = [arg for arg in node.args if arg is not x]
    if node.target is not aten.add.Tensor or node.kwargs or len(others) != 1 or not isinstance(others[0], Node):
        return False
    a, b = x.meta.get("val"), others[0].meta.get("val")
    return isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype


def is_step(node: Node) -> bool:
    """Tell whether a node is an activation and nothing else."""
    return node.target in ACTS or (node.target is own.norm_act.default and not any(node.args[i] for i in (1, 2, 5)))


def is_pooled(node: Node, x: Node) -> bool:
    """Tell whether a node has the patch means of x."""
    if node.target is not own.pool_mean.default or node.args[0] is not x:
        return False
    layout: Any = node.args[2]
    return to_pair(node.args[1]) != (1, 1) and tuple(layout) == MAP.numbers


def to_pair(numbers: Any) -> Pair:
    """Return the pair that a graph has as a list of numbers."""
    h, w = numbers
    return h, w


def to_act(numbers: Any) -> Act:
    """Return the activation that a graph has as a list of numbers."""
    return Act(int(numbers[0]), *numbers[1:])


def replace_pass(graph: Graph, found: Pass) -> None:
    """Put one `norm_act`, or a convolution that ends in it, in the place of what it computes."""
    start, last = found.start, found.last
    # Means and slopes may be read before the map itself is.
    with graph.inserting_after(last.args[0] if last.target is operator.getitem else last):  # type: ignore[arg-type]
        anchor = graph.call_function(operator.getitem, ())  # where new nodes go; it reads nothing, for users are counted
    with graph.inserting_before(anchor):
        scale = shift = None
        if found.norm is not None:
            gamma, beta, mean, var = found.norm.args[1:5]
            target: Any = found.norm.target
            eps = found.norm.args[NORMS[target][1]]
            folded = graph.call_function(own.fold_norm.default, (gamma, beta, mean, var, eps))
            scale, shift = (graph.call_function(operator.getitem, (folded, i)) for i in (0, 1))
        ending = scale, shift, list(found.act), list(found.patch), found.residual
        where = find_kernel(start) if is_convolution(start) and (len(start.users) == 1 or last is start) else None
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
    graph.erase_node(anchor)
    last.replace_all_uses_with(y, delete_user_cb=lambda user: user is not y)
    for node, value in pooled:
        value.meta = dict(node.meta)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def find_kernel(conv: Node) -> tuple[Any, ...] | None:
    """Return stride, padding, dilation, groups and size of a convolution for which the library's kernel is the fastest way."""
    args: Any = conv.args
    x, w, _, stride, padding, dilation, transposed, _, groups = args
    x_shape, w_shape, size = (tuple(node.meta["val"].shape) for node in (x, w, conv))
    if transposed or len(x_shape) != 4 or x.meta["val"].dtype is not torch.float32:
        return None
    pairs = to_pair(stride), to_pair(padding), to_pair(dilation)
    kernel = find_fitting(x_shape, w_shape, *pairs, groups, size[2:])  # type: ignore[arg-type]
    if kernel is None or not native.prefers(kernel, w_shape, pairs[0], size[2:]):  # type: ignore[arg-type]
        return None
    return *map(list, pairs), groups, list(size[2:])
