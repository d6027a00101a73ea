"""One training step of a model as one graph of operators: forward, and after it backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library, register_fake
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from gradfilter.deferred import plain_torch
from gradfilter.errors import InputError, NotCompilableError
from gradfilter.tensor import is_live, leave

_LIBRARY = Library("gradfilter", "FRAGMENT")
_LIBRARY.define("tangent(Tensor y) -> Tensor")
_LIBRARY.impl("tangent", lambda y: torch.zeros_like(y), "CompositeExplicitAutograd")
register_fake("gradfilter::tangent", lambda y: torch.empty_like(y), lib=_LIBRARY)
TANGENT = torch.ops.gradfilter.tangent.default
"""Stands in a graph for the gradient of an output: what is recorded before the first one is forward, the rest backward."""


@dataclass
class Joint:
    """A recorded step.

    Attributes:
        graph: From the inputs to the outputs and then the gradients, with `TANGENT` nodes between forward and backward.
        inputs: The tensors with which it was recorded, in order.
        outputs: How many outputs there are.
        differentiable: Which of them have a gradient, in the order of the `TANGENT` nodes.
        trained: Which inputs have a gradient, in the order of the gradients.
    """

    graph: GraphModule
    inputs: list[Tensor]
    outputs: int
    differentiable: list[int]
    trained: list[int]


def trace(run: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> Joint:
    """Record a step of a model that runs under the eager engine, its maps with channels last, as the library reads them.

    Random numbers are drawn in the order of memory. Where there are some for each pixel, maps stay laid out as they are.

    Args:
        run: The model, from its inputs to a sequence of tensors.
        inputs: Its inputs: parameters, buffers and images. They are not changed.

    Raises:
        NotCompilableError: An output is no tensor, a keep reads values, or a tensor is changed in a way that no graph shows.
    """
    strides = find_strides(run, inputs)
    joint = trace_as(run, inputs, lay_out, strides)
    draws = any(map(draws_for_map, joint.graph.graph.nodes))
    return trace_as(run, inputs, lambda x: x, strides) if draws else joint


def find_strides(run: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]) -> list[tuple[int, ...] | None]:
    """Return the strides that outputs have in eager mode, where whoever reads them may rely on them; `None` for no tensor."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return [y.stride() if isinstance(y, Tensor) else None for y in run(*(x.detach().clone() for x in inputs))]


def draws_for_map(node: Node) -> bool:
    """Tell whether a node draws random numbers for a map that is laid out with channels last."""
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return drawn and any(isinstance(x, Tensor) and not x.is_contiguous() for x in tree_leaves(node.meta.get("val")))


def trace_as(
    run: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    arrange: Callable[[Tensor], Tensor],
    strides: Sequence[tuple[int, ...] | None],
) -> Joint:
    """Record a step of a model that runs under the eager engine.

    Args:
        run: The model, from its inputs to a sequence of tensors.
        inputs: Its inputs: parameters, buffers and images. They are not changed.
        arrange: Lays out inputs that are no parameters.
        strides: Those of the outputs.

    Raises:
        NotCompilableError: See `trace`.
    """
    trained = [i for i, x in enumerate(inputs) if x.requires_grad] if torch.is_grad_enabled() else []
    differentiable: list[int] = []

    def step(*given: Tensor) -> Sequence[Tensor | None]:
        leaves = list(given)
        for i in trained:
            leaves[i] = given[i].detach().requires_grad_()
        outputs = [end_region(y) for y in run(*leaves)]
        if any(x.requires_grad for i, x in enumerate(leaves) if i not in trained):
            raise NotCompilableError("an input is changed in place to values that have a gradient. Change a copy of it.")
        differentiable[:] = [i for i, y in enumerate(outputs) if y.requires_grad]
        results = [restride(y.detach(), wanted) for y, wanted in zip(outputs, strides, strict=True)]
        if not differentiable:
            return results
        ends = [outputs[i] for i in differentiable]
        tangents = [TANGENT(y.detach()) for y in ends]
        return [*results, *torch.autograd.grad(ends, [leaves[i] for i in trained], tangents, allow_unused=True)]

    with torch.random.fork_rng(devices=[]):
        # What a model changes in place, such as running statistics, is changed here, too: on copies.
        copies = [(x if isinstance(x, Parameter) else arrange(x)).detach().clone() for x in inputs]
        examples = [x.requires_grad_(i in trained) for i, x in enumerate(copies)]
        try:
            graph = make_fx(step, tracing_mode="real")(*examples)
        except InputError as error:
            raise NotCompilableError(str(error)) from error
        except TypeError as error:
            if "Multiple dispatch" not in str(error):
                raise
            raise NotCompilableError(
                "an activation is read past torch's functions, by .data, or changed through a view: no graph can tell its "
                "gradient. Use detach() for .data, and functions that return a new tensor."
            ) from error
    count = len(find_results(graph)) - (len(trained) if differentiable else 0)
    return Joint(graph, [x.detach() for x in copies], count, differentiable, trained)


def lay_out(x: Tensor) -> Tensor:
    """Return a map as the library reads it: its channels last."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def restride(y: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return a tensor of these strides, where one of the two usual memory formats has them, else as it is."""
    if y.stride() == strides:
        return y
    for memory_format in (torch.contiguous_format, torch.channels_last)[: 2 if y.dim() == 4 else 1]:
        if torch.empty_like(y, memory_format=memory_format, device="meta").stride() == strides:
            return y.contiguous(memory_format=memory_format)
    return y


def end_region(y: Any) -> Tensor:
    """Return an output of the model as a plain tensor."""
    if not isinstance(y, Tensor):
        raise NotCompilableError(f"an output of the graph is a {type(y).__name__}, where programs return tensors alone.")
    with plain_torch():
        return leave(y) if is_live(y) else y


def find_results(graph: GraphModule) -> list[Node | None]:
    """Return the nodes that a graph returns."""
    (end,) = graph.graph.find_nodes(op="output")
    return list(end.args[0])  # type: ignore[arg-type]
