"""Run a graph node by node: on tensors whose numbers nobody reads, to write it down, or on real ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gradfilter.geometry.convolution import Geometry
from gradfilter.geometry.windows import Windows
from gradfilter.ops.operator import OPERATORS, flatten


def interpret(
    graph: Graph,
    inputs: Sequence[Tensor],
    owner: GraphModule,
    held: list[Any] | None = None,
    enter: Callable[[Node], None] | None = None,
) -> list[Tensor | None]:
    """Return the results of a graph of torch's operators and ours.

    Args:
        graph: The graph.
        inputs: Its inputs.
        owner: Has the graph's constants.
        held: Where to add the tables that operators are given, of which tasks know the address.
        enter: Called before each node.
    """
    values: dict[Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if enter is not None:
            enter(node)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = find_attribute(owner, node)
        elif node.op == "call_function":
            values[node] = run_node(node, values, [] if held is None else held)
    (end,) = graph.find_nodes(op="output")
    return [None if node is None else values[node] for node in end.args[0]]


def find_attribute(owner: GraphModule, node: Node) -> Any:
    """Return a constant of a graph."""
    value: Any = owner
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def run_node(node: Node, values: dict[Node, Any], held: list[Any]) -> Any:
    """Run a function of a graph."""
    arguments: Any = map_arg((node.args, node.kwargs), lambda n: values[n])
    args, kwargs = arguments
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target.namespace == "gradfilter":  # type: ignore[union-attr]
        made = OPERATORS[node.target._opname]  # type: ignore[union-attr]
        given = made.unpack(list(args))
        held += [x for x in given.values() if isinstance(x, (Geometry, Windows))]
        found = list(flatten(made.result, made._run((), given)))
        return found[0] if len(found) == 1 else found
    return node.target(*args, **kwargs)  # type: ignore[operator]
