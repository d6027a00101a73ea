"""Take out of a graph what changes nothing."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from gradfilter.ops.operator import to_shape

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
    changed = find_changed(graph)
    for node in list(graph.nodes):
        if node.target is aten.copy.default and len(node.args) == 2 and changed.isdisjoint({node, node.args[1]}):
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
    """Return for each node whose result shows the memory of another one the node whose memory that is.

    A function that changes its argument returns it, so it counts; so do the parts of a split.
    """
    base: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.target is operator.getitem:
            if node.args[0] in base:
                base[node] = base[node.args[0]]
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or not node.all_input_nodes or not any(result.alias_info for result in schema.returns):
            continue
        first = node.args[0]
        if isinstance(first, Node):
            base[node] = base.get(first, first)
    return base


def find_changed(graph: Graph) -> set[Node]:
    """Return the nodes whose memory some function changes: passes must not read them at another place of the graph."""
    base, changed = find_aliases(graph), set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            changed |= {base.get(x, x) for x in find_written(node)}
    return changed | {view for view, of in base.items() if of in changed}


def has_loose_changes(graph: Graph) -> bool:
    """Tell whether a graph changes memory that it reads before, or in another way: its functions must then stay in order.

    Statistics and counters are inputs that functions change, and that nothing else reads. Random numbers are new memory that
    one function after the other changes, before anything reads it.
    """
    aliases = find_aliases(graph)
    writers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for x in find_written(node):
            writers.setdefault(aliases.get(x, x), []).append(node)
    for base, nodes in writers.items():
        if base.op == "placeholder":
            if any(user not in nodes for user in base.users):
                return True
            continue
        for node in nodes:  # each changes what the one before has returned, and nobody else reads that
            if list(base.users) != [node]:
                return True
            base = node
    return False


def find_bases(graph: Graph) -> set[Node]:
    """Return the nodes whose memory some function changes, but no views of them."""
    return find_changed(graph) - find_aliases(graph).keys()


def find_written(node: Node) -> list[Node]:
    """Return the arguments that a function writes to."""
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    given = {a.name: node.args[i] if i < len(node.args) else node.kwargs.get(a.name) for i, a in enumerate(arguments)}
    names = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
    return [x for name in names for x in tree_leaves(given[name]) if isinstance(x, Node)]


def make_functional(graph: Graph) -> None:
    """Let functions that change their argument return a new tensor, where nothing else shows the memory that they change.

    Passes then see plain values. What stays is a change of an input, such as running statistics, or of a tensor with views.
    """
    base = find_aliases(graph)
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.name.endswith("_") or not isinstance(node.args[0], Node):
            continue
        changed, same = node.args[0], find_functional(node.target)
        if same is None or changed.op == "placeholder" or changed in base:
            continue
        if any(of is changed and view < node for view, of in base.items()) or not gives_same(same, node):
            continue
        node.target = same
        after = {user for user in changed.users if node < user}
        changed.replace_all_uses_with(node, delete_user_cb=lambda user, after=after: user in after)
        base = find_aliases(graph)


def gives_same(functional: torch._ops.OpOverload, node: Node) -> bool:
    """Tell whether a function gives a tensor of the shape and the dtype that the one has which a node changes in place."""
    args, kwargs = tree_map_only(Node, lambda x: to_shapes(x.meta.get("val")), (node.args, node.kwargs))
    try:
        found = functional(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):  # no such form on shapes alone
        return False
    return isinstance(found, torch.Tensor) and found.shape == args[0].shape and found.dtype is args[0].dtype


def to_shapes(value: Any) -> Any:
    """Return tensors without values in place of tensors."""
    return tree_map_only(torch.Tensor, to_shape, value)


def find_functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the operator that computes the same and changes nothing."""
    name = target._schema.name.partition("::")[2].removesuffix("_")
    packet = getattr(aten, name, None)
    return getattr(packet, target._overloadname, None) if target.namespace == "aten" and packet is not None else None


def name_statistics(graph: Graph) -> None:
    """Let batch norms say which statistics they change, and let their backward read no statistics that it does not need.

    `native_batch_norm` moves running statistics though its schema does not say so. Its backward is given those, too, which the
    next forward has moved, and in eval mode those of the batch, which are empty.
    """
    for node in list(graph.nodes):
        if node.target is aten.native_batch_norm.default and node.args[5]:
            x, gamma, beta, mean, var, *rest = node.args
            has = mean is not None and var is not None
            legit = aten._native_batch_norm_legit
            node.target = legit.default if has else legit.no_stats
            node.args = (x, gamma, beta, *((mean, var) if has else ()), *rest)
        elif node.target is aten.native_batch_norm_backward.default:
            for i in (3, 4) if node.args[7] else (5, 6):
                node.update_arg(i, None)
