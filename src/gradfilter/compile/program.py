"""Programs: the steps of a graph, packed, on memory that is laid out beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gradfilter.compile.memory import place, place_apart
from gradfilter.compile.record import Buffer, Tape, TaskStep, View, find_buffers
from gradfilter.ops.native.library import load
from gradfilter.ops.native.memory import LARGE, empty


class Source(NamedTuple):
    """Where a buffer that is there before the first step lies.

    Attributes:
        index: In which of the tensors that the program is given.
        shift: How many bytes it begins behind that tensor's first element.
    """

    index: int
    shift: int


class Run(NamedTuple):
    """Tasks that follow each other, and run in one call of the library.

    Attributes:
        begin: Where they begin, in bytes.
        size: Their bytes.
        words: Which addresses in them are known only when they run.
    """

    begin: int
    size: int
    words: list[tuple[int, Buffer, int]]


@dataclass(eq=False)
class Call:
    """A call of torch.

    Attributes:
        func: The operator.
        args: Its arguments, views in place of tensors.
        kwargs: The same by name.
        results: A view for each tensor that it returns and that is read.
    """

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[View | None]


@dataclass(eq=False)
class Workspace:
    """What one call of a program writes to, and the next one uses again.

    Attributes:
        packed: The tasks.
        arena: The memory of what lives within the call.
        calls: For each call of torch its arguments, with tensors on the arena in them, and what is still to be put in.
    """

    packed: np.ndarray
    arena: Tensor
    calls: dict[Call, Prepared] = field(default_factory=dict)


class Prepared(NamedTuple):
    """The arguments of a call of torch.

    Attributes:
        args: By place.
        kwargs: By name.
        late: Those that differ from call to call: where they go, their key there, and the view, or a list of views.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    late: list[tuple[Any, Any, Any]]


class Program:
    """A graph as an array of tasks, with calls of torch between them.

    Attributes:
        arena_bytes: Bytes of what lives within a call.
        block_bytes: Bytes of what it hands on to backward, in one block.
        kept: Where in that block each buffer begins.
        made: Buffers of torch that are handed on as tensors of their own.
    """

    def __init__(self, tape: Tape, sources: dict[Buffer, Source], hand_on: Sequence[View | None], results: int) -> None:
        """Lay out memory and pack the steps.

        Args:
            tape: The steps.
            sources: Where the buffers lie that are there before.
            hand_on: What backward reads.
            results: How many of the tape's results are for the caller.
        """
        self.tape, self.sources = tape, sources
        self.inputs, self.results = tape.inputs, tape.results[:results]
        buffers = list(dict.fromkeys([b for step in tape.steps for b in find_buffers(step)]))
        given_back = [view.buffer for view in self.results if view is not None]
        self.fresh = list(dict.fromkeys(b for b in given_back if b.kind == "blank"))
        later = list(dict.fromkeys(view.buffer for view in hand_on if view is not None and view.buffer not in self.fresh))
        self.kept, self.block_bytes = place_apart(b for b in later if b.kind == "blank")
        self.made = [b for b in later if b.kind == "made"]
        within = [b for b in buffers if b.kind == "blank" and b not in self.kept and b not in self.fresh]
        self.within, self.arena_bytes = place(within)
        self.constants = [b for b in buffers if b.kind == "constant"]
        self.numbers = {buffer: i for i, buffer in enumerate(dict.fromkeys([*buffers, *self.fresh, *self.kept]))}
        self.free: list[Workspace] = []
        self._pack()
        self._find_last_uses()

    def _pack(self) -> None:
        """Pack all tasks into one array, and note where in it addresses stand."""
        packed, words, known = bytearray(), [], []
        self.steps: list[Run | Call] = []
        for is_task, group in groupby(self.tape.steps, key=lambda step: isinstance(step, TaskStep)):
            if not is_task:
                self.steps += [Call(step.func, list(step.args), step.kwargs, step.results) for step in group]  # type: ignore[union-attr]
                continue
            begin, late = len(packed), []
            for step in group:
                assert isinstance(step, TaskStep)
                packed += step.task.header
                for at, buffer, offset in step.pointers:
                    word = (len(packed) + at) // 8
                    if buffer.kind == "made":
                        late.append((word, buffer, offset))
                    else:
                        words.append(word)
                        known.append((self.numbers[buffer], offset))
                packed += step.packed
            self.steps.append(Run(begin, len(packed) - begin, late))
        self.packed = np.frombuffer(bytes(packed) + bytes(-len(packed) % 8), dtype=np.uint64)
        self.words = np.array(words, dtype=np.int64)
        pairs = np.array(known, dtype=np.uint64).reshape(-1, 2)
        self.word_numbers, self.word_offsets = pairs[:, 0].astype(np.int64), pairs[:, 1].copy()
        numbers = self.numbers
        self._fixed = np.zeros(len(numbers), dtype=np.uint64)
        for buffer in self.constants:
            self._fixed[numbers[buffer]] = buffer.tensor.untyped_storage().data_ptr()
        self._within = find_places(self.within, numbers)
        self._kept = find_places(self.kept, numbers)
        self._given = [(numbers[b], *source) for b, source in self.sources.items() if b in numbers]
        # Most results are all of a new tensor, which is then allocated as the result has it.
        whole = {view.buffer: view for view in self.results if view is not None and view.is_whole}
        self._new = []
        for buffer in self.fresh:
            x = whole.get(buffer)
            like = (x.size, x.stride, x.dtype) if x else (buffer.tensor.shape, buffer.tensor.stride(), buffer.tensor.dtype)
            self._new.append((buffer, numbers[buffer], *like))
        self._returned = [
            (view, view.buffer if view is not None and view.buffer in self.fresh and whole.get(view.buffer) == view else None)
            for view in self.results
        ]

    def _find_last_uses(self) -> None:
        """Find after which step each tensor that torch has made is no longer read, and which ones nobody reads."""
        held = {*self.made, *(view.buffer for view in self.results if view is not None)}
        last: dict[Buffer, int] = {}
        for i, step in enumerate(self.steps):
            used = [b for _, b, _ in step.words] if isinstance(step, Run) else list_buffers((step.args, step.kwargs))
            last |= {b: i for b in used if b.kind == "made"}
        self.drop: list[list[Buffer]] = [[] for _ in self.steps]
        for buffer, i in last.items():
            if buffer not in held:
                self.drop[i].append(buffer)
        for step in self.steps:
            if isinstance(step, Call):  # what nobody reads may have another shape than shapes alone say
                step.results = [
                    view if view and (view.buffer in held or view.buffer in last) else None for view in step.results
                ]

    def make_workspace(self) -> Workspace:
        """Return a new workspace."""
        space = Workspace(self.packed.copy(), torch.empty(self.arena_bytes, dtype=torch.uint8))
        storage = space.arena.untyped_storage()

        def show(x: Any) -> Any:
            """Return a tensor for a view that is the same in all calls, else the view."""
            if isinstance(x, View) and x.buffer in self.within:
                return x.show(storage, self.within[x.buffer])
            return x.show(x.buffer.tensor.untyped_storage()) if isinstance(x, View) and x.buffer.kind == "constant" else x

        for step in self.steps:
            if isinstance(step, Call):
                args, kwargs = [show(x) for x in step.args], {key: show(x) for key, x in step.kwargs.items()}
                items = [(args, i, x) for i, x in enumerate(args)] + [(kwargs, key, x) for key, x in kwargs.items()]
                late = [item for item in items if list_buffers(item[2])]
                space.calls[step] = Prepared(args, kwargs, late)
        return space

    def summarise(self) -> str:
        """Return in one line what it runs, and on how much memory."""
        calls = sum(isinstance(step, Call) for step in self.steps)
        text = f"{self.tasks} tasks in {len(self.steps) - calls} calls of the library, {calls} calls of torch"
        text += f", {self.arena_bytes:,} B of memory"
        held = self.block_bytes + sum(buffer.bytes for buffer in self.made)
        return text + (f", {held:,} B held until backward" if held else "")

    def release(self) -> None:
        """Forget the tensors that stood for memory while the graph was recorded."""
        for buffer in self.numbers:
            if buffer.kind != "constant":
                buffer.tensor = buffer.tensor.to("meta")
        self.held = self.tape.held
        self.tasks = sum(isinstance(step, TaskStep) for step in self.tape.steps)
        del self.tape

    def __call__(self, given: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor]] | None:
        """Run it.

        Args:
            given: The tensors that `sources` refers to, laid out as those with which it was recorded.

        Returns:
            Results and what backward reads: a block of bytes, and the tensors that torch made. `None` where the library says
            that values call for another way.
        """
        try:
            space = self.free.pop()
        except IndexError:
            space = self.make_workspace()
        try:
            return self._run(space, given)
        finally:
            self.free.append(space)

    def _run(self, space: Workspace, given: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor]] | None:
        block = empty((self.block_bytes,), torch.uint8)
        values: dict[Buffer, Tensor] = {}
        addresses = self._fixed.copy()
        numbers, offsets = self._within
        addresses[numbers] = offsets + np.uint64(space.arena.data_ptr())
        numbers, offsets = self._kept
        addresses[numbers] = offsets + np.uint64(block.data_ptr())
        for buffer, number, size, stride, dtype in self._new:
            values[buffer] = x = allocate(size, stride, dtype)
            addresses[number] = x.data_ptr()
        for number, index, shift in self._given:
            addresses[number] = given[index].data_ptr() + shift
        packed = space.packed
        packed[self.words] = addresses[self.word_numbers] + self.word_offsets
        start, threads, run = packed.ctypes.data, torch.get_num_threads(), load().gf_run_tasks  # type: ignore[union-attr]

        def show(view: View) -> Tensor:
            """Return the tensor that a view is in this call."""
            buffer = view.buffer
            if buffer in values:
                x = values[buffer]
                return x if view.fits(x) else view.show(x.untyped_storage())
            if buffer in self.kept:
                return view.show(block.untyped_storage(), self.kept[buffer])
            if buffer in self.within:
                return view.show(space.arena.untyped_storage(), self.within[buffer])
            return self.show_input(view, given)

        for step, drop in zip(self.steps, self.drop, strict=True):
            if isinstance(step, Run):
                for word, buffer, offset in step.words:
                    packed[word] = values[buffer].untyped_storage().data_ptr() + offset
                code = run(start + step.begin, step.size, threads)
                if code:
                    if code > 0:
                        return None
                    raise MemoryError("gradfilter's native library found no memory for its scratch; use a smaller batch")
            else:
                args, kwargs, late = space.calls[step]
                for place, key, view in late:
                    place[key] = show(view) if isinstance(view, View) else tree_map_only(View, show, view)
                found = step.func(*args, **kwargs)
                made = (found,) if isinstance(found, Tensor) else found or ()
                for view, x in zip(step.results, made, strict=False):
                    if view is not None:
                        values[view.buffer] = x if view.fits(x) else copy_to(x, view)
                for place, key, view in late:
                    place[key] = view  # nothing of this call stays alive
            for buffer in drop:
                values.pop(buffer, None)
        results = [
            values[whole] if whole is not None else None if view is None else show(view) for view, whole in self._returned
        ]
        return results, [block, *(values[buffer] for buffer in self.made)]

    def show_input(self, view: View, given: Sequence[Tensor]) -> Tensor:
        """Return the tensor that a view on memory is that is there before the first step.

        Args:
            view: The view.
            given: What the program is called with.
        """
        if view.buffer.kind == "constant":
            return view.show(view.buffer.tensor.untyped_storage())
        index, shift = self.sources[view.buffer]
        x = given[index]
        if view.offset * view.dtype.itemsize + shift == 0 and view.fits(x):
            return x
        return view.show(x.untyped_storage(), int(x.storage_offset()) * x.dtype.itemsize + shift)


def list_buffers(x: Any) -> list[Buffer]:
    """Return the buffers of all views in nested tuples, lists and dicts."""
    return [leaf.buffer for leaf in tree_leaves(x) if isinstance(leaf, View)]


def find_places(offsets: dict[Buffer, int], numbers: dict[Buffer, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of some buffers, and their offsets."""
    found = np.array([(numbers[b], offset) for b, offset in offsets.items() if b in numbers], dtype=np.uint64).reshape(-1, 2)
    return found[:, 0].astype(np.int64), found[:, 1].copy()


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose numbers are not set; a large map or kernel on memory of the library, where its pages are there."""
    if len(size) == 4 and math.prod(size) * dtype.itemsize >= LARGE:
        for order in (torch.contiguous_format, torch.channels_last):
            x = empty(size, dtype, order)
            if x.stride() == tuple(stride):
                return x
    return torch.empty_strided(size, stride, dtype=dtype)


def copy_to(x: Tensor, view: View) -> Tensor:
    """Return a tensor laid out as it was recorded."""
    return torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(x)
