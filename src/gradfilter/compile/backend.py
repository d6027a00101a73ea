"""What `torch.compile(model, backend="gradfilter")` calls with each graph that Dynamo captures."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import SkipFrame
from torch._dynamo.variables.builder import VariableBuilder
from torch.compiler import _compile_session_context
from torch.fx import GraphModule

from gradfilter import hooks, marks
from gradfilter.compile.capture import Capture
from gradfilter.compile.programs import Compiled, make_program
from gradfilter.emit import DeferredTensor
from gradfilter.errors import NotCompilableError, SettingsError
from gradfilter.frozen import FrozenTensor
from gradfilter.regions import Seen
from gradfilter.tensor import PatchTensor

logger = logging.getLogger(__name__)
ENGINE = "carriers deferred emit frozen geometry hooks keep marks ops recipe regions rules spectrum tensor".split()
"""The modules and packages that run as they are, wherever they are called from."""
MOST_SHAPES = 8
"""How many shapes of the input a user may name."""
EAGERLY = "a part of a model that is compiled runs eagerly, with the same gradients, but slower: %s"
Shape = tuple[int, ...]


def gradfilter(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of a model under a plan: a backend of `torch.compile`.

    What is compiled is the graph with inputs of certain shapes: those that the user names, else the first ones that it is
    called with. Inputs of other shapes run eagerly under the same plan. So whether a batch runs compiled depends on its shape
    and on the plan.

    Args:
        gm: The graph.
        example_inputs: What it will be called with.
        options: May have "shapes", a list of shapes of the network's input, as in
            `torch.compile(model, backend="gradfilter", options={"shapes": [(8, 3, 224, 224), (1, 3, 224, 224)]})`.
    """
    shapes = read_options(options or {})
    try:
        capture = Capture(gm, example_inputs)
    except NotCompilableError as error:
        logger.warning(EAGERLY, error)
        raise SkipFrame(str(error)) from None  # and Dynamo lets the function run as it is
    if not capture.keys:
        return gm.forward  # no plan: torch's own functions
    if not capture.planned:
        return capture.run  # frozen layers alone
    if has_number_inputs(gm):
        logger.warning(EAGERLY, "numbers, as the momentum of a norm, became inputs of the graph. Leave out dynamic=True.")
        return capture.run
    return Programs(capture, gm, example_inputs, shapes)


def has_number_inputs(gm: GraphModule) -> bool:
    """Tell whether numbers of the model are inputs of a graph, as tensors without axes."""
    graph_args = [node.meta.get("grapharg") for node in gm.graph.nodes if node.op == "placeholder"]
    return any(getattr(arg, "pass_arg_as_tensor", False) for arg in graph_args)


def read_options(options: Mapping[str, Any]) -> frozenset[Shape]:
    """Return the shapes that a user names."""
    unknown = set(options) - {"shapes"}
    if unknown:
        raise SettingsError(f"the backend 'gradfilter' got the option '{min(unknown)}'. It has one: shapes=[(N, C, H, W), …].")
    shapes = options.get("shapes", ())
    try:
        named = frozenset(tuple(int(n) for n in shape) for shape in shapes)
    except TypeError:
        raise SettingsError(f"the option shapes is {shapes!r}. It takes a list of shapes, as [(8, 3, 224, 224)].") from None
    if len(named) > MOST_SHAPES:
        raise SettingsError(
            f"the option shapes names {len(named)} shapes. Each has a program of its own: name {MOST_SHAPES} at most."
        )
    return named


class Programs:
    """A captured graph that runs as a program for some shapes of its inputs, and eagerly for all others."""

    def __init__(self, capture: Capture, gm: GraphModule, inputs: Sequence[Any], named: frozenset[Shape]) -> None:
        """Start without programs.

        Args:
            capture: The graph.
            gm: The same as Dynamo has captured it.
            inputs: What it will be called with.
            named: The shapes of the network's input that the user names; where there are none, the first ones are compiled.
        """
        self.capture, self.named = capture, named
        places = [node for node in gm.graph.nodes if node.op == "placeholder"]
        # All shapes in a graph follow from its symbols, which Dynamo passes as numbers. Most often there are none.
        self.symbols = [i for i, value in enumerate(inputs) if not isinstance(value, Tensor)]
        static = [node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") for node in places]  # parameters, buffers
        self.data = [i for i, kind in enumerate(static) if kind is None]
        self.programs: dict[tuple[int, ...], Callable[..., Any]] = {}
        self.told = False
        self.seen: Seen | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        symbols = tuple([inputs[i] for i in self.symbols])
        program = self.programs.get(symbols)
        if program is None:
            program = self.find(symbols, inputs)
        if self.seen is not None:
            self.capture.find_applied().log.recall(self.seen)
        return program(*inputs)

    def find(self, symbols: tuple[int, ...], inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs inputs that have no program yet."""
        shapes = tuple(tuple(inputs[i].shape) for i in self.data if isinstance(inputs[i], Tensor))
        if not self.is_compiled_for(shapes):
            return self.capture.run
        # Recording a program changes how modules are called, in all threads. So Dynamo, of which this is the lock, captures
        # nothing meanwhile; and the flag tells compiled models that other threads call that it is not they who are traced.
        with compile_lock, _compile_session_context():
            if symbols not in self.programs:
                self.programs[symbols] = program = make_program_or_run(self.capture, inputs)
                applied = self.capture.find_applied()
                if isinstance(program, Compiled):
                    applied.programs.append(weakref.ref(program))
                    if torch.is_grad_enabled():
                        self.seen = applied.log.list_seen()
        return self.programs[symbols]

    def is_compiled_for(self, shapes: tuple[Shape, ...]) -> bool:
        """Tell whether inputs of these shapes are compiled; say so once where they are not."""
        if self.named:
            found, compiled_for = not self.named.isdisjoint(shapes), tuple(self.named)
        else:
            # Kept with the plan and not here: what makes Dynamo capture the graph again, a layer that is thawed say, is no
            # reason to compile another shape.
            compiled = self.capture.find_applied().compiled
            compiled_for = compiled.setdefault((torch.is_grad_enabled(), *self.capture.keys), shapes)
            found = compiled_for == shapes
        if not found and not self.told:
            self.told = True
            logger.warning(
                "inputs of shapes %s run eagerly, and slower: compiled are %s. Name the shapes to compile: "
                'torch.compile(model, backend="gradfilter", options={"shapes": [...]}).',
                describe_shapes(shapes),
                describe_shapes(compiled_for),
            )
        return found


def describe_shapes(shapes: Sequence[Shape]) -> str:
    """Return shapes as text."""
    return ", ".join(str(list(shape)) for shape in shapes)


def make_program_or_run(capture: Capture, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a program for a graph with inputs of these shapes; where it has none, say why, and let it run eagerly."""
    start = time.monotonic()
    try:
        program = make_program(capture, inputs)
        logger.info("compiled %d planned layers in %.1f s", len(capture.keys), time.monotonic() - start)
    except NotCompilableError as error:
        logger.warning(EAGERLY, error)
        return capture.run
    except Exception as error:  # of whatever the model calls; where the model is wrong, the eager engine says so
        logger.warning(EAGERLY, f"compiling it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return capture.run
    return capture.run if program is None else program


def let_engine_run() -> None:
    """Keep Dynamo from capturing what the eager engine does: it would compile a hundred small graphs of no use.

    Hooks are inlined where a model is captured: there they leave marks. Whoever calls them otherwise runs them as they are.
    """
    for name in ENGINE:
        trace_rules.add(f"gradfilter.{name}")
    for module in (hooks, marks):
        trace_rules.BUILTIN_INLINE_WHEN_CALLED.add(str(module.__file__))
    for trace_numpy in (False, True):  # a setting of Dynamo, which has a table for each of its values
        table = VariableBuilder._type_dispatch_impl(trace_numpy)
        table.update(dict.fromkeys((PatchTensor, DeferredTensor, FrozenTensor), skip_frame))

    # Under DistributedDataParallel Dynamo would hand over graphs in pieces, with inputs of which none is a parameter.
    torch._dynamo.config.optimize_ddp = False


def skip_frame(builder: VariableBuilder, value: Any) -> Any:
    """Let a function that meets a tensor of the eager engine run as it is: behind a break in the graph, say."""
    raise SkipFrame(f"a {type(value).__name__} is for the eager engine of gradfilter")


let_engine_run()
