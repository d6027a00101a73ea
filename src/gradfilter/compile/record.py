"""Lower a graph to steps: packed tasks of the C library, and calls of torch between them.

Each node of the graph runs once, but nothing is computed: tasks are written down where the library would run them, and torch's
operators give tensors whose numbers are not set. So the code that packs a task in eager mode packs those of a program, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gradfilter.compile.interpret import interpret
from gradfilter.errors import NotCompilableError
from gradfilter.geometry.tiling import is_nhwc
from gradfilter.ops.native.library import RECORDING
from gradfilter.ops.native.memory import plain_memory
from gradfilter.ops.native.task import Task
from gradfilter.ops.operator import to_shape

aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
EMPTY |= {aten.new_empty_strided.default}
"""Operators that return memory and set no numbers."""
COPIES = {aten.clone.default, aten._to_copy.default}
"""Operators that return a copy of their first argument, in another layout or dtype."""
ANY_LAYOUT = {aten.convolution.default, aten.constant_pad_nd.default, aten.native_batch_norm.default}
ANY_LAYOUT |= {aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats}
"""Operators that are no pointwise ones, and compute the same whatever the strides of their arguments are."""
MOVES = {aten.t.default, aten.permute.default, aten.transpose.int, aten.expand.default, aten.unsqueeze.default}
MOVES |= {aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.squeeze.dims, aten.split.Tensor, aten.unbind.int}
"""Operators that show a tensor of any strides in another way."""
VIEWS = {aten._unsafe_view.default: aten.view.default}
"""Operators that return a view, whatever their schema says, and what says so."""


@dataclass(eq=False)
class Buffer:
    """Memory that steps read and write.

    Attributes:
        tensor: What stood for it while a graph was recorded; one on its whole storage.
        kind: Where it comes from: "input", "constant", "blank" for memory that steps fill, "made" for what torch allocates.
        first: The step that first touches it.
        last: The step that last does.
    """

    tensor: Tensor
    kind: str = "constant"
    first: int = -1
    last: int = -1

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.tensor.untyped_storage().nbytes()


@dataclass(frozen=True)
class View:
    """A tensor on a buffer."""

    buffer: Buffer
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def show(self, storage: torch.UntypedStorage, shift: int = 0) -> Tensor:
        """Return the tensor where its buffer begins so many bytes behind the start of a storage."""
        offset = self.offset + shift // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype).set_(storage, offset, self.size, self.stride)

    def fits(self, x: Tensor) -> bool:
        """Tell whether a tensor has the shape and the strides that were recorded."""
        return x.stride() == self.stride and x.shape == self.size and x.dtype is self.dtype


@dataclass
class TaskStep:
    """A task of the library: what it is, its packed struct, and where in that addresses stand: byte, buffer and offset."""

    task: Task
    packed: bytes
    pointers: list[tuple[int, Buffer, int]]


@dataclass
class CallStep:
    """A call of torch: an operator, its arguments with views in place of tensors, and views for what it returns."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[View | None]


@dataclass
class Tape:
    """What a graph does.

    Attributes:
        steps: In order.
        inputs: The views of the graph's inputs.
        results: The views of its results.
        layers: The node of each step, for readers.
        held: What must live as long as the steps.
    """

    steps: list[TaskStep | CallStep] = field(default_factory=list)
    inputs: list[View] = field(default_factory=list)
    results: list[View | None] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Writes down what torch and the library are asked to compute, and computes nothing."""

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__()
        self.tape = Tape()
        self.buffers: dict[int, Buffer] = {}
        self.places: list[tuple[int, int]] = []
        self.node: Node | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what an operator returns, as far as shapes tell."""
        kwargs = kwargs or {}
        args = self.lay_out(func, args)
        func = VIEWS.get(func, func)
        if torch.Tag.data_dependent_output in func.tags or func is aten._local_scalar_dense.default:
            raise NotCompilableError(f"{func} reads the values of a tensor, which no program can know beforehand.")
        schema = func._schema
        if func in EMPTY:
            return self.make_blank(func(*args, **kwargs))
        if any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
            return func(*args, **kwargs)
        if schema.is_mutable:
            return self.add_change(func, args, kwargs)
        found = func(*tree_map_only(Tensor, to_shape, args), **on_shapes(kwargs))
        made = [found] if isinstance(found, Tensor) else list(found)
        if func is aten.convolution.default and is_nhwc(args[0]):  # as torch does it on a CPU, whatever shapes alone say
            made = [x.contiguous(memory_format=torch.channels_last) for x in made]
        made = self.correct(func, made)
        new = [x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in made]
        given, options = self.find_views(args, kwargs)
        out = find_out(func)
        if isinstance(found, Tensor) and (out is not None or func in COPIES):
            view = self.find_view(self.make_blank(new[0]))  # type: ignore[arg-type]
            if out is None:
                self.add(CallStep(aten.copy_.default, (view, given[0]), {}, []))
            else:
                known = {a.name for a in out[0]._schema.arguments}
                options = {key: x for key, x in options.items() if key in known}
                self.add(CallStep(out[0], given, {**options, out[1]: view}, []))
            return new[0]
        views = [None if x is None else self.find_view(x) for x in new]
        for view in views:
            if view is not None:
                view.buffer.kind = "made"
        self.add(CallStep(func, given, options, views))
        return new[0] if isinstance(found, Tensor) else type(found)(new) if isinstance(found, (list, tuple)) else tuple(new)

    def lay_out(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments with the strides that they had when the graph was recorded, where the operator may rely on them.

        Passes and the library lay out results as they like. Some operators view their argument, or take for granted what
        autograd makes sure of: the backward of a weight norm reads its gradient as if it were contiguous.
        """
        if self.node is None or func is not self.node.target or func in COPIES | ANY_LAYOUT | MOVES or keeps_strides(func):
            return args
        found = list(args)
        for i, (x, node) in enumerate(zip(args, self.node.args, strict=False)):
            seen = node.meta.get("val") if isinstance(node, Node) else None
            if not isinstance(x, Tensor) or not isinstance(seen, Tensor) or x.stride() == seen.stride() or 0 in seen.stride():
                continue
            info = func._schema.arguments[i].alias_info
            if info is None or not info.is_write:
                found[i] = self.make_blank(torch.empty_strided(seen.shape, seen.stride(), dtype=x.dtype))
                self.add(CallStep(aten.copy_.default, (self.find_view(found[i]), self.find_view(x)), {}, []))
        return tuple(found)

    def add_change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add a call that changes some of its arguments; return what it returns, those arguments perhaps among it."""
        if torch.Tag.inplace_view in func.tags:
            raise NotCompilableError(f"{func} changes the shape of a tensor in place. Use the function without the underscore.")
        schema = func._schema
        names = {a.name: kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(schema.arguments)}
        written = {name: names[a.name] for a in schema.arguments if a.alias_info for name in a.alias_info.before_set}
        changed = [next(iter(r.alias_info.before_set)) if r.alias_info else None for r in schema.returns]
        made: Sequence[Any] = ()
        if None in changed:
            found = func(*tree_map_only(Tensor, to_shape, args), **on_shapes(kwargs))
            made = self.correct(func, [found] if isinstance(found, Tensor) else found)
        results, views = [], []
        for i, name in enumerate(changed):
            if name is not None:
                results.append(written[name])
                views.append(None)
                continue
            results.append(torch.empty_strided(made[i].shape, made[i].stride(), dtype=made[i].dtype))
            views.append(self.find_view(results[-1]))
            views[-1].buffer.kind = "made"
        self.add(CallStep(func, *self.find_views(args, kwargs), views))
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def correct(self, func: Any, made: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return results as they were when the step was recorded, where shapes alone say something else.

        Some operators have other results on a CPU than on shapes alone: batch norms with running statistics none of the batch.
        """
        value = None if self.node is None else self.node.meta.get("val")
        seen = [value] if isinstance(value, Tensor) else value
        if self.node is None or func is not self.node.target or not isinstance(seen, (list, tuple)) or len(seen) != len(made):
            return made
        pairs = zip(made, seen, strict=True)
        return [x if x is None or is_alike(x, y) else to_shape(y) for x, y in pairs]

    def enter(self, node: Node) -> None:
        """Note which node runs."""
        self.node = node

    def make_blank(self, x: Tensor) -> Tensor:
        """Note that a tensor is memory that steps fill; return it."""
        self.find_view(x).buffer.kind = "blank"
        return x

    def note(self, task: Task, packed: bytes) -> None:
        """Write down a task."""
        pointers = []
        for at, address in task.record.find_pointers(packed):
            found = self.find_buffer(address)
            if found is not None:
                pointers.append((at, *found))
        self.add(TaskStep(task, packed, pointers))

    def add(self, step: TaskStep | CallStep) -> None:
        """Add a step."""
        place = len(self.tape.steps)
        self.tape.steps.append(step)
        self.tape.nodes.append("" if self.node is None else self.node.name)
        for buffer in find_buffers(step):
            buffer.first = place if buffer.first < 0 else buffer.first
            buffer.last = place

    def find_view(self, x: Tensor) -> View:
        """Return a tensor as a view of its buffer."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.buffers:
            self.buffers[key] = Buffer(x)
            self.places = []
        return View(self.buffers[key], x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def find_views(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments with views in place of tensors; what nobody has made is a constant."""
        return tree_map_only(Tensor, self.find_view, args), tree_map_only(Tensor, self.find_view, kwargs)

    def find_buffer(self, address: int) -> tuple[Buffer, int] | None:
        """Return the buffer at an address, and the offset in it; `None` for memory that is no tensor's."""
        if not self.places:
            self.starts = sorted((b.tensor.untyped_storage().data_ptr(), key) for key, b in self.buffers.items() if b.bytes)
            self.places = self.starts
        i = bisect_right(self.places, (address, 1 << 64)) - 1
        if i < 0:
            return None
        start, key = self.places[i]
        buffer = self.buffers[key]
        return (buffer, address - start) if address < start + buffer.bytes else None


def is_alike(x: Tensor, y: Any) -> bool:
    """Tell whether two tensors have the same shape, strides and dtype; what is no tensor is like all."""
    return not isinstance(y, Tensor) or (x.shape == y.shape and x.stride() == y.stride() and x.dtype is y.dtype)


STRIDED = {aten.hardswish.default, aten.hardswish_backward.default}
"""Operators that read and write tensors of any strides as they are, though torch does not mark them so."""


@lru_cache
def keeps_strides(func: Any) -> bool:
    """Tell whether an operator reads and writes tensors of any strides as they are: pointwise and structured ones do."""
    structured = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutogradNonFunctional")
    return structured or torch.Tag.pointwise in func.tags or func in STRIDED


@lru_cache
def find_out(func: Any) -> tuple[Any, str] | None:
    """Return the form of an operator that writes its result to a tensor, and the name of that argument, where torch has one."""
    if not keeps_strides(func):  # others may change the strides of the tensor to which they write
        return None
    arguments = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [a.name for a in other._schema.arguments if a.is_out]
        same = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out] == arguments
        if len(outs) == 1 and same and torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "CPU"):
            return other, outs[0]
    return None


def on_shapes(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for a call on shapes alone."""
    return {key: torch.device("meta") if key == "device" else x for key, x in tree_map_only(Tensor, to_shape, kwargs).items()}


def find_buffers(step: TaskStep | CallStep) -> list[Buffer]:
    """Return the buffers that a step reads or writes."""
    if isinstance(step, TaskStep):
        return [buffer for _, buffer, _ in step.pointers]
    found: list[Buffer] = []
    tree_map_only(View, lambda view: found.append(view.buffer), (step.args, step.kwargs, step.results))
    return found


def record(graph: Graph, inputs: Sequence[Tensor], owner: GraphModule) -> tuple[Tape, list[Tensor | None]]:
    """Lower a graph to steps.

    Args:
        graph: A forward or a backward graph.
        inputs: Tensors as it will be given, whose numbers nobody reads.
        owner: Has the graph's constants.

    Returns:
        The steps, and the tensors that stood for the results.

    Raises:
        NotCompilableError: Something in it reads values of tensors.
    """
    recorder, stand_ins = Recorder(), []
    tape = recorder.tape
    for x in inputs:
        if x.untyped_storage()._cdata in recorder.buffers:  # parts of one storage, which they may not be when it runs
            x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        view = recorder.find_view(x)
        view.buffer.kind = "input"
        tape.inputs.append(view)
        stand_ins.append(x)
    RECORDING.note = recorder.note
    try:
        with torch.no_grad(), plain_memory(), recorder:
            results = interpret(graph, stand_ins, owner, tape.held, recorder.enter)
    finally:
        RECORDING.note = None
    tape.results = [None if x is None else recorder.find_view(x) for x in results]
    return tape, results
