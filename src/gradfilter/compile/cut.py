"""Cut the graph of a step into a forward and a backward graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from gradfilter.compile.passes.clean import find_aliases, find_written
from gradfilter.compile.trace import TANGENT, Joint, find_results
from gradfilter.errors import NotCompilableError


@dataclass
class Halves:
    """A step in two graphs.

    Attributes:
        forward: From the inputs of the step to its outputs, and then what backward reads of forward.
        backward: From what it reads of forward, then the inputs that it reads, then the gradients of outputs, to gradients.
        saved: The nodes of the forward graph that backward reads.
        read: Which inputs backward reads.
        outputs: How many outputs there are.
    """

    forward: Graph
    backward: Graph | None
    saved: int
    read: list[int]
    outputs: int


def cut(joint: Joint) -> Halves:
    """Cut a step where its backward begins.

    What was recorded in forward runs in forward, but for views, which are made again where they are read.

    Raises:
        NotCompilableError: Random numbers are drawn in backward.
    """
    graph = joint.graph.graph
    results = find_results(joint.graph)
    nodes = list(graph.nodes)
    tangents = [node for node in nodes if node.target is TANGENT]
    inputs = [node for node in nodes if node.op == "placeholder"]
    if not tangents:
        return Halves(graph, None, 0, [], joint.outputs)
    begin = nodes.index(tangents[0])
    views = {node: base for node, base in find_aliases(graph).items() if not find_written(node)}
    behind = [node for node in nodes[begin:] if node.op != "output" and node not in tangents]
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in behind):
        raise NotCompilableError(
            "a backward draws random numbers: a checkpoint with dropout inside computes its part again with the same ones, "
            "which no graph can tell. Put the dropout outside of the checkpoint."
        )
    needed = find_needed(behind, set(nodes[:begin]), views)
    again = [node for node in nodes[:begin] if node in needed and node in views]
    saved = [node for node in nodes[:begin] if node in needed and node not in views and node not in inputs]
    read = [i for i, node in enumerate(inputs) if node in needed]

    backward = Graph()
    new = {node: backward.placeholder(node.name) for node in saved}
    new |= {inputs[i]: backward.placeholder(inputs[i].name) for i in read}
    new |= {node: backward.placeholder(node.name) for node in tangents}
    for node, copy in new.items():
        copy.meta = dict(node.meta)
    for node in [*again, *behind]:
        new[node] = backward.node_copy(node, lambda n: new[n])
    gradients = results[joint.outputs :]
    backward.output([None if node is None else new[node] for node in gradients])

    (end,) = graph.find_nodes(op="output")
    end.args = ([*results[: joint.outputs], *saved],)
    for node in reversed(nodes[begin:]):
        if node.op != "output":
            graph.erase_node(node)
    graph.eliminate_dead_code()
    backward.eliminate_dead_code()
    return Halves(graph, backward, len(saved), read, joint.outputs)


def find_needed(behind: list[Node], front: set[Node], views: dict[Node, Node]) -> set[Node]:
    """Return the nodes of forward that backward reads, and those whose views it reads."""
    needed: set[Node] = set()
    todo = [node for user in behind for node in user.all_input_nodes if node in front]
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in views:
            todo += node.all_input_nodes
    return needed
