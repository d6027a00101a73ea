"""The C library's calls of a training step: recorded in one step, and made again without anything between them."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradfilter.errors import GradFilterError
from gradfilter.ops import native
from gradfilter.ops.native import library
from gradfilter.ops.native.task import read_task

CALLERS = "gradfilter.ops.native."
"""The modules that pack tasks: while one runs, all that it points to is in their functions' variables."""

Memory = torch.UntypedStorage | np.ndarray


class Recording:
    """The calls of one step, and the memory that they read and write.

    Attributes:
        tasks: Each call's bytes, a packed task behind its header, in order.
        codes: What each of them returned.
        memory: All that the tasks point to, by its address. It stays alive, so no two tasks share what the step's allocators
            would have given out twice.
        starts: Memory that a task changes in place, as bytes, with what was in it before. Without it a gradient, scaled anew in
            each replay, would end in numbers so small that processors are slow at them.
    """

    def __init__(self) -> None:
        self.tasks: list[bytes] = []
        self.codes: list[int] = []
        self.memory: dict[int, Memory] = {}
        self.starts: dict[int, tuple[Tensor, Tensor]] = {}

    def hold(self, given: bytes, frame: FrameType) -> None:
        """Hold what a task points to, which runs next.

        Args:
            given: The packed task behind its header.
            frame: The function that runs it.

        Raises:
            GradFilterError: A pointer is not found in the variables of its callers.
        """
        found = {}
        for variables in find_variables(frame):
            found |= {find_span(memory)[0]: memory for memory in find_memory(variables.values())}
        spans = [find_span(memory) for memory in found.values()]
        task, packed = read_task(given)
        for _, address in task.record.find_pointers(packed):
            if not any(begin <= address < end for begin, end in spans):
                raise GradFilterError(
                    f"a task {task.name!r} points to memory that no variable of its callers holds, so it cannot be replayed."
                )
        self.memory |= found
        for tensor in find_changed(frame):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.starts:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportArgumentType]
                self.starts[storage.data_ptr()] = whole, whole.clone()

    def join(self) -> list[tuple[bytes, int]]:
        """Return the tasks in as few calls as possible, each with the code that it returns.

        A call ends with a task that returns another code than 0: the library would not run what follows.
        """
        calls: list[tuple[bytes, int]] = []
        part: list[bytes] = []
        for at, (task, code) in enumerate(zip(self.tasks, self.codes, strict=True), 1):
            part.append(task)
            if code or at == len(self.tasks):
                calls.append((b"".join(part), code))
                part = []
        return calls

    def make_replay(self, joined: bool) -> Callable[[], float]:
        """Return a function that makes the calls again, and tells their seconds.

        Args:
            joined: Whether to make as few calls as possible; else there is one for each task.
        """
        calls = self.join() if joined else list(zip(self.tasks, self.codes, strict=True))
        orders = [(task, len(task)) for task, _ in calls]
        codes = [code for _, code in calls]

        def run() -> float:
            run_tasks, threads = load().gf_run_tasks, torch.get_num_threads()
            start = time.perf_counter()
            found = [run_tasks(task, size, threads) for task, size in orders]
            seconds = time.perf_counter() - start
            if found != codes:
                raise GradFilterError("a replayed task of the C library ends otherwise than in the step it was recorded in.")
            for tensor, content in self.starts.values():
                tensor.copy_(content)
            return seconds

        return run


def record(step: Callable[[], Any]) -> Recording:
    """Return the C library's calls of a training step that has run before, all of them made in the thread that calls.

    Raises:
        GradFilterError: There is no library, or holding the step's memory changes what the step calls.
    """
    plain, held = Recording(), Recording()
    for recording, hold in ((plain, False), (held, True)):
        with recorded(recording, hold):
            step()
    if not held.tasks:
        raise GradFilterError("the step calls no task of the C library, so there is nothing to replay.")
    if [find_kind(task) for task in plain.tasks] != [find_kind(task) for task in held.tasks]:
        raise GradFilterError("the step calls other tasks of the C library while its memory is held, so they are not replayed.")
    return held


@contextmanager
def recorded(recording: Recording, hold: bool) -> Iterator[None]:
    """Add all calls of the library to a recording, and hold what they point to where that is requested."""
    loaded = load()
    run_tasks = loaded.gf_run_tasks

    def run(given: bytes, size: int, threads: int) -> int:
        if hold:
            recording.hold(given, sys._getframe(1))
        code = run_tasks(given, size, threads)
        recording.tasks.append(given)
        recording.codes.append(code)
        return code

    loaded.gf_run_tasks = run
    try:
        yield
    finally:
        loaded.gf_run_tasks = run_tasks


def load() -> Any:
    """Return the C library; refuse to go on without it."""
    loaded = native.load()
    if loaded is None:
        raise GradFilterError(
            "the floor is the C library's calls, and there is no C library. Install gradfilter again with a C compiler, and "
            "leave GRADFILTER_NATIVE unset."
        )
    return loaded


def find_kind(given: bytes) -> tuple[str, list[int]]:
    """Return what one step's task has in common with another's: its name, and which of its pointers are equal or null."""
    task, packed = read_task(given)
    addresses = [0, *(address for _, address in task.record.find_pointers(packed))]
    return task.name, [addresses.index(address) for address in addresses]


def find_variables(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield the variables of a function and of its callers, up to the operator that packed the task."""
    while frame is not None and frame.f_globals["__name__"].startswith(CALLERS):
        yield dict(frame.f_locals)
        frame = frame.f_back


def find_memory(values: Iterable[Any]) -> Iterator[Memory]:
    """Yield the memory of tensors and arrays in some values.

    Storages instead of tensors: a step looks at references to a tensor to decide whether a result may be written in its place,
    and should decide as ever.
    """
    for leaf in tree_leaves(list(values)):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()
        elif isinstance(leaf, np.ndarray):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            yield from (value for value in vars(leaf).values() if isinstance(value, np.ndarray))


def find_span(memory: Memory) -> tuple[int, int]:
    """Return where memory begins and ends."""
    begin = memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr()
    return begin, begin + (memory.nbytes if isinstance(memory, np.ndarray) else memory.nbytes())


def find_changed(frame: FrameType | None) -> list[Tensor]:
    """Return the tensors that a task changes in place: `library.call` is told of these twice."""
    while frame is not None and frame.f_code is not library.call.__code__:
        frame = frame.f_back if frame.f_globals["__name__"].startswith(CALLERS) else None
    if frame is None:
        return []
    tensors = [tensor for tensor in frame.f_locals["tensors"] if tensor is not None]
    places = [tensor.data_ptr() for tensor in tensors]
    return [tensor for tensor, place in zip(tensors, places, strict=True) if place and places.count(place) > 1]
