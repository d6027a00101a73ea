"""A compiled step: a forward and a backward program, two halves of one autograd.Function."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import Graph
from torch.nn import Parameter

from gradfilter.compile.capture import Capture
from gradfilter.compile.cut import cut
from gradfilter.compile.interpret import interpret
from gradfilter.compile.listing import list_rows, make_lines
from gradfilter.compile.passes.clean import (
    erase_copies,
    erase_dead,
    erase_same,
    find_bases,
    find_written,
    has_loose_changes,
    make_functional,
    name_statistics,
)
from gradfilter.compile.passes.expand import fuse_expansions
from gradfilter.compile.passes.fuse import fuse_passes, lower_sums
from gradfilter.compile.passes.pad import merge_padding
from gradfilter.compile.program import Program, Source
from gradfilter.compile.record import Buffer, View, record
from gradfilter.compile.trace import trace
from gradfilter.errors import DoubleBackwardError, NotCompilableError
from gradfilter.ops.native.library import load

logger = logging.getLogger(__name__)
JOINT_PASSES: tuple[Callable[[Graph], None], ...] = (erase_same, name_statistics, make_functional, erase_copies)
"""Passes over the graph of a whole step, in order."""
FORWARD_PASSES: tuple[Callable[[Graph], None], ...] = (fuse_passes, merge_padding, fuse_expansions, erase_dead)
"""Passes over the forward graph, in order."""
ORDERED_PASSES: tuple[Callable[[Graph], None], ...] = (erase_dead,)
"""Passes over a forward graph whose functions change what others read: none that moves a function."""
BACKWARD_PASSES: tuple[Callable[[Graph], None], ...] = (lower_sums, erase_dead)
"""Passes over the backward graph, in order."""


def make_program(capture: Capture, inputs: Sequence[Any]) -> Callable[..., Any] | None:
    """Return what runs a captured graph as a program, for inputs of these shapes; `None` where the C library is not there.

    Args:
        capture: The graph.
        inputs: What it is called with first: tensors, and numbers that stay what they are.

    Raises:
        NotCompilableError: Something in the graph cannot be compiled.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    check_tensors(tensors)
    return None if load() is None else Compiled(capture.run, inputs)


def run_passes(name: str, passes: Sequence[Callable[[Graph], None]], graph: Graph) -> None:
    """Run passes over a graph. The logger prints it before the first and behind each one, at the level DEBUG."""
    logger.debug("%s, before passes:\n%s", name, graph)
    for edit in passes:
        edit(graph)
        logger.debug("%s, after %s:\n%s", name, edit.__name__, graph)


def check_tensors(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that programs cannot read."""
    for x in tensors:
        if not x.is_cpu or x.layout is not torch.strided:
            raise NotCompilableError(
                f"a tensor is on {x.device} in the layout {x.layout}. Programs run on the CPU on dense tensors."
            )


class Compiled:
    """A model's step for inputs of one shape."""

    def __init__(self, run: Callable[..., Sequence[Any]], given: Sequence[Any]) -> None:
        """Record, cut, fuse and lower a step.

        Args:
            run: The model under the eager engine.
            given: What it is called with: tensors, and numbers that stay what they are.

        Raises:
            NotCompilableError: Something in the model cannot be compiled.
        """
        self.places = [i for i, x in enumerate(given) if isinstance(x, Tensor)]
        inputs = [given[i] for i in self.places]
        self.owners = [weakref.ref(x) for x in inputs]
        rest = list(given)

        def run_tensors(*tensors: Tensor) -> Sequence[Any]:
            """Run the model on tensors."""
            for i, x in zip(self.places, tensors, strict=True):
                rest[i] = x
            return run(*rest)

        joint = trace(run_tensors, inputs)
        run_passes("step", JOINT_PASSES, joint.graph.graph)
        halves = cut(joint)
        run_passes("forward", ORDERED_PASSES if has_loose_changes(halves.forward) else FORWARD_PASSES, halves.forward)
        if halves.backward is not None:
            run_passes("backward", BACKWARD_PASSES, halves.backward)
        self.changed = find_changed_inputs(halves.forward, inputs)
        self.joint, self.halves = joint, halves
        tape, results = record(halves.forward, joint.inputs, joint.graph)
        self.given = tape.inputs
        # Parameters and buffers stay laid out as they are, or Dynamo captures anew; images come in any layout.
        self.loose = [
            i
            for i, (x, view) in enumerate(zip(inputs, tape.inputs, strict=True))
            if x.stride() != view.stride or (x.dim() > 1 and not isinstance(x, Parameter))
        ]
        sources = {view.buffer: Source(i, -find_start(view)) for i, view in enumerate(tape.inputs)}
        handed = tape.results[halves.outputs :]
        self.forward = Program(tape, sources, handed, halves.outputs)
        self.backward: Program | None = None
        if halves.backward is not None:
            self._make_backward(handed, results)
        self.forward.release()
        if self.backward is not None:
            self.backward.release()
        places: list[int | None] = list(range(len(inputs)))
        self.rows = {"forward": list_rows(halves.forward, places)}
        if halves.backward is not None:
            self.rows["backward"] = list_rows(halves.backward, [*[None] * halves.saved, *halves.read])
        self.shapes = [list(inputs[i].shape) for i in self.loose]
        joint.inputs.clear()

    def _make_backward(self, handed: list[View | None], results: list[Tensor | None]) -> None:
        """Lower the backward graph, whose inputs are what forward hands on."""
        joint, halves, forward = self.joint, self.halves, self.forward
        saved = results[halves.outputs :]
        tangents = [torch.empty_like(results[i]) for i in joint.differentiable]  # type: ignore[arg-type]
        read = [joint.inputs[i] for i in halves.read]
        tape, _ = record(halves.backward, [*saved, *read, *tangents], joint.graph)  # type: ignore[arg-type, list-item]
        # What backward is given: the block, tensors that torch made, inputs of the step, outputs, gradients of outputs.
        self.saved_inputs = list(dict.fromkeys([*halves.read, *(self._find_input(v) for v in handed if self._is_input(v))]))
        self.saved_outputs = [i for i, v in enumerate(forward.results) if v is not None and is_shared(v, handed)]
        first_made, first_input = 1, 1 + len(forward.made)
        first_output = first_input + len(self.saved_inputs)
        first_tangent = first_output + len(self.saved_outputs)
        sources: dict[Buffer, Source] = {}
        for view, mine in zip(handed, tape.inputs[: len(handed)], strict=True):
            assert view is not None
            buffer, inside = view.buffer, find_start(view) - find_start(mine)
            if buffer in forward.kept:
                sources[mine.buffer] = Source(0, forward.kept[buffer] + inside)
            elif buffer in forward.made:
                sources[mine.buffer] = Source(first_made + forward.made.index(buffer), inside)
            elif buffer.kind == "input":
                i = self._find_input(view)
                sources[mine.buffer] = Source(first_input + self.saved_inputs.index(i), inside - find_start(self.given[i]))
            elif buffer.kind == "constant":
                mine.buffer.kind = "constant"
            else:
                shown = [forward.results[i] for i in self.saved_outputs]
                place = next(k for k, result in enumerate(shown) if result is not None and result.buffer is buffer)
                sources[mine.buffer] = Source(first_output + place, inside - find_start(shown[place]))  # type: ignore[arg-type]
        rest = tape.inputs[len(handed) :]
        for i, view in zip(halves.read, rest, strict=False):
            sources[view.buffer] = Source(first_input + self.saved_inputs.index(i), -find_start(view))
        self.tangents = rest[len(read) :]
        for k, view in enumerate(self.tangents):
            sources[view.buffer] = Source(first_tangent + k, 0)
        self.reached = find_reached(halves.backward, len(tangents))  # type: ignore[arg-type]
        self.backward = Program(tape, sources, [], len(tape.results))

    def _is_input(self, view: View | None) -> bool:
        return view is not None and view.buffer.kind == "input"

    def _find_input(self, view: View | None) -> int:
        return next(i for i, mine in enumerate(self.given) if view is not None and mine.buffer is view.buffer)

    def describe(self, names: Mapping[int, str]) -> list[str]:
        """Return lines that tell what runs: layer, operators, shape and bytes of the result.

        Args:
            names: The name of the module that has a parameter or buffer, by its id.
        """
        layers = {i: names[id(x)] for i, owner in enumerate(self.owners) if (x := owner()) is not None and id(x) in names}
        lines = [f"inputs {', '.join(map(str, self.shapes))}"]
        programs = {"forward": self.forward, "backward": self.backward}
        for half, rows in self.rows.items():
            program = programs[half]
            assert program is not None
            lines.append(f"{half}: {program.summarise()}")
            lines += make_lines(rows, layers)
        return lines

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        """Run the model."""
        inputs = [given[i] for i in self.places]
        if self.backward is None:
            return tuple(run_forward(self, inputs)[0])  # type: ignore[arg-type]
        return Step.apply(self, *inputs)  # type: ignore[return-value]


def find_start(view: View) -> int:
    """Return how many bytes a tensor begins behind the start of its buffer."""
    return view.offset * view.dtype.itemsize


def find_changed_inputs(graph: Graph, inputs: Sequence[Tensor]) -> list[int]:
    """Return which inputs a graph changes in place.

    Raises:
        NotCompilableError: What it changes has a gradient, or memory that another input shows, too.
    """
    bases = find_bases(graph)
    found = [i for i, node in enumerate(graph.find_nodes(op="placeholder")) if node in bases]
    storages = Counter(x.untyped_storage().data_ptr() for x in inputs)
    for i in found:
        if inputs[i].requires_grad and not inputs[i].is_leaf:
            raise NotCompilableError(
                "an input that has a gradient is changed in place. Use functions that return a new tensor."
            )
        if storages[inputs[i].untyped_storage().data_ptr()] > 1:
            raise NotCompilableError("an input is changed in place whose memory another input shows, too.")
    return found


def find_reached(graph: Graph, tangents: int) -> list[frozenset[int]]:
    """Return for each result of a backward graph the gradients of outputs that it is made of.

    Args:
        graph: The graph.
        tangents: How many gradients of outputs there are: the last inputs of the graph.
    """
    nodes = graph.find_nodes(op="placeholder")
    made_of = {node: frozenset[int]() for node in nodes} | {node: frozenset((i,)) for i, node in enumerate(nodes[-tangents:])}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            made_of[node] = frozenset[int]().union(*(made_of[x] for x in node.all_input_nodes))
            for x in find_written(node):  # and all that shows the same memory, where functions change it
                made_of[x] |= made_of[node]
    (end,) = graph.find_nodes(op="output")
    return [frozenset() if node is None else made_of[node] for node in end.args[0]]


def is_shared(view: View, others: Sequence[View | None]) -> bool:
    """Tell whether a result's memory is among what is handed on."""
    return view.buffer.kind != "input" and any(other is not None and other.buffer is view.buffer for other in others)


def run_forward(step: Compiled, inputs: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor], list[Tensor]]:
    """Run forward; return outputs, what it hands on, and its inputs as they were read."""
    given = list(inputs)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for i in step.loose:
            view = step.given[i]
            if not view.fits(inputs[i]):
                given[i] = torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(inputs[i])
        found = step.forward(given)
        assert found is not None  # it has no task that says otherwise
        for i in step.changed:
            if given[i] is not inputs[i]:
                inputs[i].copy_(given[i])
    return *found, given


class Step(Function):
    """A step of a model under a plan: forward at pixel resolution, backward at patch resolution."""

    @staticmethod
    def forward(ctx: Any, step: Compiled, *inputs: Tensor) -> Any:
        """Run the forward program, and save what it hands on."""
        outputs, handed, given = run_forward(step, inputs)
        ctx.step = step
        ctx.set_materialize_grads(False)
        same = [inputs[i] if given[i].data_ptr() == inputs[i].data_ptr() else given[i] for i in step.saved_inputs]
        ctx.save_for_backward(*handed, *same, *(outputs[i] for i in step.saved_outputs))
        flat = [y for i, y in enumerate(outputs) if i not in step.joint.differentiable]
        ctx.mark_non_differentiable(*(y for y in flat if y is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Run the backward program."""
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "a filtered gradient was requested with create_graph=True. The backward pass at patch resolution has no "
                "second derivative. Call backward() without create_graph, or gradfilter.remove_(model) first."
            )
        step, saved = ctx.step, ctx.saved_tensors
        tangents = []
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for i, view in zip(step.joint.differentiable, step.tangents, strict=True):
                g = gradients[i]
                if g is None or not view.fits(g):
                    new = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
                    g = new.zero_() if g is None else new.copy_(g)
                tangents.append(g)
            found = step.backward([*saved, *tangents])
            results = interpret_backward(step, [*saved, *tangents]) if found is None else found[0]
        known = {k for k, i in enumerate(step.joint.differentiable) if gradients[i] is not None}
        result: list[Tensor | None] = [None] * (1 + len(step.given))
        for i, g, reached in zip(step.joint.trained, results, step.reached, strict=True):
            result[1 + i] = None if known.isdisjoint(reached) else g  # what the loss does not use has no gradient, not one of 0
        return tuple(result)


def interpret_backward(step: Compiled, given: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients, computed operator by operator: where values call for another way than the program's tasks."""
    assert step.backward is not None
    inputs = [step.backward.show_input(view, given) for view in step.backward.inputs]
    return interpret(step.halves.backward, inputs, step.joint.graph)  # type: ignore[arg-type]
