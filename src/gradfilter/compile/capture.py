"""A graph that Dynamo has captured of a model under a plan, run by the eager engine."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint, noop_context_fn

from gradfilter.errors import NotCompilableError
from gradfilter.hooks import Applied, FrozenStatistics, PlannedLayer
from gradfilter.marks import find_hook
from gradfilter.tensor import PatchTensor

BATCH_NORMS = F.batch_norm, torch.batch_norm
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
TRAINING = 5
"""The place of the argument `training` of both."""


class Capture:
    """A graph that Dynamo has captured, in which marks act as the hooks that left them.

    Attributes:
        keys: The keys of the marks, in the order in which they run.
        planned: Whether a layer in the graph is to run at patch resolution.
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """Let the marks in a graph act.

        Args:
            gm: The graph as Dynamo has captured it; it is left as it is.
            inputs: What Dynamo would call it with: parameters and buffers are those of the model.

        Raises:
            NotCompilableError: A batch norm whose statistics are frozen computes in a way of its own.
        """
        self.keys: list[str] = []
        self.planned = False
        self._module = self._rewrite(gm, inputs)

    def run(self, *inputs: Any) -> Any:
        """Run the graph, rules and all, on real tensors or on those of a tracer; return what Dynamo wants as its outputs."""
        return self._module.forward(*inputs)

    def find_applied(self) -> Applied:
        """Return what the plan has done to the model."""
        return find_hook(self.keys[0]).applied

    def _rewrite(self, gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        """Return a copy of a graph in which marks act, with all graphs inside it.

        Args:
            gm: The graph.
            inputs: What it is called with, where that is known.
        """
        new = GraphModule(gm, copy.deepcopy(gm.graph))
        placeholders = [node for node in new.graph.nodes if node.op == "placeholder"]
        real: dict[Node, Any] = dict(zip(placeholders, inputs, strict=False))
        nodes = {id(value): node for node, value in real.items() if isinstance(value, Tensor)}
        for node in list(new.graph.nodes):
            if node.op == "get_attr":
                real[node] = find_attribute(new, node.target)
            elif node.target is torch.ops.gradfilter.mark:
                self._replace(node, nodes)
            else:
                parts: list[Any] = [real.get(arg) if isinstance(arg, Node) else None for arg in node.args]
                body = next((i for i, part in enumerate(parts) if isinstance(part, GraphModule)), None)
                if body is not None:  # a function that is called with a graph and its inputs
                    setattr(new, node.args[body].target, self._rewrite(parts[body], parts[body + 1 :]))
                if node.target is CHECKPOINT:
                    node.target = run_checkpoint
        new.meta.update(gm.meta)
        new.recompile()
        return new

    def _replace(self, node: Node, nodes: dict[int, Node]) -> None:
        """Put what a hook does in the place of its mark.

        Args:
            node: The mark.
            nodes: The nodes of parameters and buffers, by their ids.
        """
        x, key = cast(tuple[Node, str], node.args)
        hook = find_hook(key)
        self.keys.append(key)
        if isinstance(hook, FrozenStatistics):
            freeze_statistics(hook.owner.find(), nodes)
            node.replace_all_uses_with(x)
            node.graph.erase_node(node)
            return
        weight = None
        if isinstance(hook, PlannedLayer):
            self.planned = True
            # Not the attribute: a parametrization would compute it, and a spectral norm move its estimate.
            weight = nodes.get(id(getattr(hook.owner.find(), "_parameters", {}).get("weight")))
        node.target, node.args = act, (x, key, weight)


def act(x: Tensor, key: str, weight: Tensor | None) -> Any:
    """Do what a hook does in front of its module, of which the weight is this tensor: a tracer has one of its own."""
    y = find_hook(key).act(key, x)
    if weight is not None and isinstance(y, PatchTensor) and y.appointed is not None:
        y.appointed = weight, y.appointed[1]
    return y


def run_checkpoint(body: GraphModule, *inputs: Any, **options: Any) -> Any:
    """Run a part of a graph as `torch.utils.checkpoint` does: the operator in the graph would draw random numbers anew."""
    contexts = body.meta.get("_checkpoint_context_fn", noop_context_fn)
    return checkpoint(body.forward, *inputs, **{**options, "use_reentrant": False, "context_fn": contexts})


def find_attribute(module: nn.Module, target: str) -> Any:
    """Return what a graph finds under a dotted name."""
    found: Any = module
    for name in target.split("."):
        found = getattr(found, name)
    return found


def freeze_statistics(norm: Any, nodes: dict[int, Node]) -> None:
    """Let a batch norm run in eval mode, as `FrozenStatistics` does: by its statistics, which it neither counts nor moves."""
    mean, counter = (nodes.get(id(norm._buffers.get(name))) for name in ("running_mean", "num_batches_tracked"))
    found = False
    for node in list(mean.users) if mean is not None else ():
        if node.target in BATCH_NORMS:
            found = True
            if "training" in node.kwargs:
                node.update_kwarg("training", False)
            elif len(node.args) > TRAINING:
                node.update_arg(TRAINING, False)
    if counter is not None:
        for node in [user for user in counter.users if user.target in ("add_", operator.iadd)]:
            node.replace_all_uses_with(counter)
            node.graph.erase_node(node)
    if norm.training and norm._buffers.get("running_mean") is not None and not found:
        raise NotCompilableError(
            f"a {type(norm).__name__} whose statistics are frozen does not call torch.nn.functional.batch_norm. "
            'Call model.eval(), or use Plan(batch_norm="train").'
        )
