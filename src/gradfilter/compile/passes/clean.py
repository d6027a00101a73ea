"""Take out of a graph what changes nothing."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
"""Operators that return their argument as it is."""


def erase_same(graph: Graph) -> None:
    """Take out operators that return their argument: a program has no autograd that would tell the two apart."""
    for node in list(graph.nodes):
        if node.target in SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def erase_copies(graph: Graph) -> None:
    """Take out copies of a whole map into another one: what is copied serves as well."""
    for node in list(graph.nodes):
        if node.target is aten.copy.default and len(node.args) == 2:
            old, new = (arg.meta.get("val") if isinstance(arg, Node) else None for arg in node.args)
            if old is not None and new is not None and is_alike(old, new):
                node.replace_all_uses_with(node.args[1])
                graph.erase_node(node)


def is_alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Tell whether two tensors differ in nothing but values."""
    return x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype and x.device == y.device


def erase_dead(graph: Graph) -> None:
    """Take out what nobody reads."""
    graph.eliminate_dead_code()


def find_aliases(graph: Graph) -> dict[Node, Node]:
    """Return for each node whose result is a view the node whose memory it shows."""
    base: dict[Node, Node] = {}
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not node.all_input_nodes or not any(result.alias_info for result in schema.returns):
            continue
        first = node.args[0]
        if isinstance(first, Node):
            base[node] = base.get(first, first)
    return base


def make_functional(graph: Graph) -> None:
    """Let functions that change their argument return a new tensor, where nothing else shows the memory that they change.

    Passes then see plain values. What stays is a change of an input, such as running statistics, or of a tensor with views.
    """
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.name.endswith("_") or not isinstance(node.args[0], Node):
            continue
        changed, same, base = node.args[0], find_functional(node.target), find_aliases(graph)
        if same is None or changed.op == "placeholder" or changed in base:
            continue
        if any(of is changed and view < node for view, of in base.items()):
            continue
        node.target = same
        after = {user for user in changed.users if node < user}
        changed.replace_all_uses_with(node, delete_user_cb=lambda user, after=after: user in after)


def find_functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the operator that computes the same and changes nothing."""
    name = target._schema.name.partition("::")[2].removesuffix("_")
    packet = getattr(aten, name, None)
    return getattr(packet, target._overloadname, None) if target.namespace == "aten" and packet is not None else None
