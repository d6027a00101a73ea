"""Programs: the steps of a graph, packed, on memory that is laid out beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradfilter.compile.memory import place, place_apart
from gradfilter.compile.record import Buffer, CallStep, Tape, TaskStep, View, find_buffers
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


@dataclass
class Workspace:
    """What one call of a program writes to, and the next one uses again.

    Attributes:
        packed: The tasks.
        arena: The memory of what lives within the call.
        shown: Tensors on the arena, by view.
    """

    packed: np.ndarray
    arena: Tensor
    shown: dict[View, Tensor] = field(default_factory=dict)


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
        self.results = tape.results[:results]
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
        self.steps: list[Run | CallStep] = []
        for is_task, group in groupby(self.tape.steps, key=lambda step: isinstance(step, TaskStep)):
            if not is_task:
                self.steps += group  # type: ignore[arg-type]
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

    def _find_last_uses(self) -> None:
        """Find after which step each tensor that torch has made is no longer read."""
        held = {*self.made, *(view.buffer for view in self.results if view is not None)}
        last: dict[Buffer, int] = {}
        for i, step in enumerate(self.steps):
            used = [b for _, b, _ in step.words] if isinstance(step, Run) else find_buffers(step)
            last |= {b: i for b in used if b.kind == "made" and b not in held}
        self.drop: list[list[Buffer]] = [[] for _ in self.steps]
        for buffer, i in last.items():
            self.drop[i].append(buffer)
        for i, step in enumerate(self.steps):
            if isinstance(step, CallStep):  # what nobody reads may have another shape than it has on shapes alone
                read = {view.buffer for view in step.results if view is not None and (view.buffer in held or last[view.buffer] > i)}
                step.results = [view if view is not None and view.buffer in read else None for view in step.results]

    def take(self) -> Workspace:
        """Return a workspace that no other call uses."""
        try:
            return self.free.pop()
        except IndexError:
            return Workspace(self.packed.copy(), torch.empty(self.arena_bytes, dtype=torch.uint8))

    def __call__(self, given: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor]] | None:
        """Run it.

        Args:
            given: The tensors that `sources` refers to, laid out as those with which it was recorded.

        Returns:
            Results and what backward reads: a block of bytes, and the tensors that torch made. `None` where the library says
            that values call for another way.
        """
        space = self.take()
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
        for buffer in self.fresh:
            values[buffer] = x = empty_like(buffer.tensor)
            addresses[self.numbers[buffer]] = x.data_ptr()
        for number, index, shift in self._given:
            addresses[number] = given[index].data_ptr() + shift
        packed = space.packed
        packed[self.words] = addresses[self.word_numbers] + self.word_offsets
        start, threads, run = packed.ctypes.data, torch.get_num_threads(), load().gf_run_tasks  # type: ignore[union-attr]

        def show(view: View) -> Tensor:
            """Return the tensor that a view is in this call."""
            buffer = view.buffer
            if buffer in self.within:
                found = space.shown.get(view)
                if found is None:
                    found = space.shown[view] = view.show(space.arena.untyped_storage(), self.within[buffer])
                return found
            if buffer in values:
                x = values[buffer]
                return x if view.fits(x) else view.show(x.untyped_storage())
            if buffer in self.kept:
                return view.show(block.untyped_storage(), self.kept[buffer])
            if buffer.kind == "constant":
                return view.show(buffer.tensor.untyped_storage())
            index, shift = self.sources[buffer]
            x = given[index]
            return view.show(x.untyped_storage(), x.storage_offset() * x.dtype.itemsize + shift)

        for i, step in enumerate(self.steps):
            if isinstance(step, Run):
                for word, buffer, offset in step.words:
                    packed[word] = values[buffer].untyped_storage().data_ptr() + offset
                code = run(start + step.begin, step.size, threads)
                if code > 0:
                    return None
                if code < 0:
                    raise MemoryError("gradfilter's native library found no memory for its scratch; use a smaller batch")
            else:
                found = step.func(*tree_map_only(View, show, step.args), **tree_map_only(View, show, step.kwargs))
                made = [found] if isinstance(found, Tensor) else found
                for view, x in zip(step.results, made, strict=False):
                    if view is not None:
                        values[view.buffer] = x if view.fits(x) else copy_to(x, view)
            for buffer in self.drop[i]:
                values.pop(buffer, None)
        results = [None if view is None else show(view) for view in self.results]
        return results, [block, *(values[buffer] for buffer in self.made)]


def find_places(offsets: dict[Buffer, int], numbers: dict[Buffer, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of some buffers, and their offsets."""
    found = np.array([(numbers[b], offset) for b, offset in offsets.items() if b in numbers], dtype=np.uint64).reshape(-1, 2)
    return found[:, 0].astype(np.int64), found[:, 1].copy()


def empty_like(x: Tensor) -> Tensor:
    """Return a tensor laid out as another; a large one on memory that is used again: page faults cost more than filling it."""
    if x.nbytes >= LARGE and x.is_contiguous():
        return empty(x.shape, x.dtype)
    if x.nbytes >= LARGE and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return empty(x.shape, x.dtype, torch.channels_last)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def copy_to(x: Tensor, view: View) -> Tensor:
    """Return a tensor laid out as it was recorded."""
    return torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(x)
