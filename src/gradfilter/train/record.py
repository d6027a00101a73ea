"""Record a forward pass, call by call: what belongs to its trunk, and what trained calls read of that.

A call belongs to the *trunk* where the images enter into it, and nothing trained or random does. What trained calls read of the
trunk's results, and what the model gives out of them, is the *cut*. Tensors are followed by their storages, so that views and
functions that work in place are what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from gradfilter.errors import GradFilterError
from gradfilter.tensor import plain_torch

READERS = frozenset(
    getattr(Tensor, name)
    for name in "item tolist numpy __array__ __dlpack__ __bool__ __int__ __float__ __index__ __complex__ __contains__ equal "
    "allclose is_nonzero".split()
) | {torch.equal, torch.allclose, torch.is_nonzero}
"""Functions that hand values of a tensor to Python, where they can steer what the model does next."""
MAKERS = frozenset(getattr(Tensor, f"new_{name}") for name in "empty empty_strided zeros ones full".split()) | {
    getattr(torch, f"{name}_like") for name in "empty zeros ones full rand randn randint".split()
}
"""Functions that look at the shape and type of a tensor alone."""
PLAIN = (type(None), int, float, complex, str, bytes, slice, EllipsisType)
PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments whose text says all about them."""


class TrunkError(GradFilterError, RuntimeError):
    """Report a network that cannot be run without its trunk."""


@dataclass(frozen=True)
class Spec:
    """What is recorded of a tensor: all but its values.

    Attributes:
        shape: With the batch in front.
        dtype: Of its numbers.
        order: Its axes, from the largest stride to the smallest, so that a copy can be given the same layout in memory.
        device: Where it is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    device: torch.device = field(repr=False)  # a cache is the same wherever it was computed

    @classmethod
    def of(cls, x: Tensor) -> Spec:
        """Return the spec of a tensor."""
        axes = range(x.dim())
        return cls(tuple(x.shape), x.dtype, tuple(sorted(axes, key=lambda axis: (-x.stride(axis), axis))), x.device)

    @property
    def bytes(self) -> int:
        """Return how many bytes one image's share takes."""
        return self.dtype.itemsize * torch.Size(self.shape[1:]).numel()

    @cached_property
    def placeholder(self) -> Tensor:
        """Return a tensor that looks the same and has no data: what reads it by mistake reads NaN."""
        value = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        return torch.full((), value, dtype=self.dtype, device=self.device).expand(self.shape)


@dataclass
class Call:
    """One call of a torch function, as recorded.

    Attributes:
        function: What was called.
        text: What a call of the trunk was given and gave: numbers, names of weights, shapes. Empty for other calls.
        kind: How a call is answered: "run" by running it, "skip" by a placeholder, "cut" by a tensor of the cut, "several" by
            any of these, "view" by running it on what is there, "same" by its own argument, which it changed, "nothing" by
            None.
        answer: What that takes: the placeholder; the place in the cut; a tree of these; the argument's position.
    """

    function: Callable[..., Any]
    text: str = ""
    kind: str = "run"
    answer: Any = None


@dataclass(frozen=True)
class Part:
    """One tensor among several results of a call: its memory, while recording; its place in the cut, or None, after."""

    spec: Spec
    key: int
    place: int | None = None


@dataclass
class Record:
    """A forward pass, as recorded for one size of batch, in one mode (training or not).

    Attributes:
        calls: All calls that make or change tensors, in order.
        asks: Functions that tell of a tensor all but its values (its shape, say): they run as ever.
        images: Spec of the images.
        used: The tensors besides activations that the trunk uses: weights, what is computed of them, constants.
        cut: Specs of the tensors that trained calls read of the trunk.
        input: The place of the images themselves in the cut, where trained calls read them.
        ready: For each call after which tensors of the cut have their final values: which ones.
        end: The last call of the trunk that is no view.
    """

    calls: list[Call]
    asks: set[Callable[..., Any]]
    images: Spec
    used: list[Tensor]
    cut: list[Spec] = field(default_factory=list)
    input: int | None = None
    ready: dict[int, list[int]] = field(default_factory=dict)
    end: int = -1


class Recorder(TorchFunctionMode):
    """Record a forward pass: notes every call, and by storages what depends on the images and what on trained parameters."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        """Start with what is known before the first call."""
        super().__init__()
        self.names = find_names(model)
        self.buffers = {storage(buffer) for buffer in model.buffers()}
        self.trained = {storage(parameter) for parameter in model.parameters() if parameter.requires_grad}
        self.calls: list[Call] = []
        self.asks: set[Callable[..., Any]] = set()
        self.seen: dict[int, StorageWeakRef] = {}  # without keeping data, so that no storage gets the address of another
        self.older: set[int] = set()
        self.changed: set[int] = set()
        self.base: dict[int, tuple[int, Spec]] = {storage(images): (-1, Spec.of(images))}
        self.written: dict[int, int] = {}
        self.read: dict[int, None] = {}
        self.used: dict[int, Tensor] = {}
        self.steered: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call and file it."""
        kwargs = kwargs or {}
        given = find_tensors((args, kwargs))
        with plain_torch():
            before = [self.look(x) for x in given]
        drawn = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        drew = not torch.equal(drawn, torch.default_generator.get_state())
        with plain_torch():
            made = find_tensors(result)
            after = [self.look(x) for x in given]
            changed = [x for x, old, new in zip(given, before, after, strict=True) if not is_same(old, new)]
            self.note_storages(given, made, changed)
            if changed or made:
                if any(old[:3] != new[:3] for old, new in zip(before, after, strict=True)):
                    raise TrunkError(f"{name_of(func)} gives a tensor another shape or other memory in place")
                call = Call(func, describe(self.names, (args, kwargs, result)))
                self.file(call, given, made, changed, drew, result)
            else:
                self.note_ask(func, given)
        return result

    def note_storages(self, given: list[Tensor], made: list[Tensor], changed: list[Tensor]) -> None:
        """Note which memory is older than this forward pass, and which is written to."""
        self.older.update(storage(x) for x in given if storage(x) not in self.seen)
        self.changed.update(storage(x) for x in changed)
        self.seen.update((storage(x), StorageWeakRef(x.untyped_storage())) for x in (*given, *made))

    def look(self, x: Tensor) -> tuple[Any, ...]:
        """Return what shows a change of a tensor: of buffers the values too, which batch norm changes silently."""
        version = -1 if x.is_inference() else x._version
        return storage(x), x.shape, x.stride(), version, x.clone() if storage(x) in self.buffers else None

    def note_ask(self, func: Callable[..., Any], given: list[Tensor]) -> None:
        """Refuse a function that hands values of the trunk to Python; remember one that does so with trained ones."""
        self.asks.add(func)
        keys = [storage(x) for x in given] if func in READERS else []
        if any(key in self.trained for key in keys):
            self.steered = name_of(func)
        elif any(key in self.base for key in keys):
            raise TrunkError(f"{name_of(func)} reads values of an activation, which may decide what the model does next")

    def file(self, call: Call, given: list[Tensor], made: list[Tensor], changed: list[Tensor], drew: bool, result: Any) -> None:
        """Decide what a call is: the trunk's, one to run each time (trained, or random), or one apart from all images."""
        index = len(self.calls)
        self.calls.append(call)
        if drew or any(x.requires_grad or storage(x) in self.trained for x in (*given, *made)):
            self.note_read(given if call.function not in MAKERS else [])
            self.trained.update(storage(x) for x in (*made, *changed))
        elif any(storage(x) in self.base for x in given):
            if self.steered:
                raise TrunkError(f"{self.steered} reads trained or random values, on which frozen layers may then depend")
            self.used.update((id(x), x) for x in given if storage(x) not in self.base)
            self.file_trunk(call, index, given, made, changed, result)
            return
        call.text = ""

    def note_read(self, tensors: list[Tensor]) -> None:
        """Note which of these tensors are the trunk's: they are the cut. What is still blank is made each time instead."""
        for key in map(storage, tensors):
            call = self.calls[self.base[key][0]] if key in self.base else None
            if call and call.function in MAKERS and key not in self.written:
                del self.base[key]
                call.text, call.kind = "", "run"
            elif call and key not in self.trained:
                self.read[key] = None

    def file_trunk(
        self, call: Call, index: int, given: list[Tensor], made: list[Tensor], changed: list[Tensor], result: Any
    ) -> None:
        """Decide how a call of the trunk is answered later."""
        for x in changed:
            key, name = storage(x), self.names.get(storage(x))
            if key in self.read:
                raise TrunkError(f"{name_of(call.function)} changes an activation in place that trained layers have read")
            if key not in self.base:
                what = f"'{name}'" if name else "a tensor that is no activation of the frozen layers"
                raise TrunkError(f"{name_of(call.function)} changes {what} in place")
            self.written[key] = index
        if changed:
            same = [i for i, x in enumerate(given) if any(x is y for y in changed) and any(x is y for y in made)]
            call.kind, call.answer = ("same", same[0]) if same else ("nothing", None)
            return
        is_view = all(storage(x) in self.base for x in made)
        for x in made:
            self.base.setdefault(storage(x), (index, Spec.of(x)))
        call.kind = "view" if is_view else "skip" if isinstance(result, Tensor) else "several"
        call.answer = tree_map(lambda x: Part(Spec.of(x), storage(x)) if isinstance(x, Tensor) else x, result)

    def finish(self, images: Tensor, output: Any) -> Record:
        """Return the record: the cut is what trained calls have read, and what the model gives out."""
        with plain_torch():
            self.note_read(find_tensors(output))
        self.check_used()
        record = Record(self.calls, self.asks, Spec.of(images), list(self.used.values()))
        places = {key: place for place, key in enumerate(self.read)}
        for key, place in places.items():
            index, spec = self.base[key]
            if spec.shape[:1] != tuple(images.shape[:1]):
                raise TrunkError(
                    f"a trained layer reads a tensor of shape {list(spec.shape)}, which has no share for each image in front"
                )
            record.cut.append(spec)
            record.ready.setdefault(self.written.get(key, index), []).append(place)
            record.input = place if index < 0 else record.input
        for index, call in enumerate(self.calls):
            record.end = index if call.text and call.kind != "view" else record.end
            self.fill_in(call, places)
        if not record.cut:
            raise TrunkError("no trained layer reads anything of the images")
        return record

    def fill_in(self, call: Call, places: dict[int, int]) -> None:
        """Say how a call is answered, now that the cut is known."""
        if call.kind == "view":
            if any(part.key in places or part.key not in self.base for part in find_parts(call.answer)):
                call.answer = None
                return
            call.kind, places = "skip" if isinstance(call.answer, Part) else "several", {}
        if call.kind == "skip":
            place = places.get(call.answer.key)
            call.kind, call.answer = ("skip", call.answer.spec.placeholder) if place is None else ("cut", place)
        elif call.kind == "several":
            call.answer = tree_map_only(Part, lambda part: Part(part.spec, part.key, places.get(part.key)), call.answer)

    def check_used(self) -> None:
        """Refuse a trunk that uses what the forward pass itself changes and keeps, a running average for example."""
        with plain_torch():
            for key in map(storage, self.used.values()):
                if key in self.older and key in self.changed:
                    what = f"'{self.names[key]}'" if key in self.names else "a tensor"
                    raise TrunkError(f"the model changes {what} each time it runs, and frozen layers use it")


def describe(names: dict[int, str], tree: Any) -> str:
    """Return what can be said of arguments and results without the values of activations."""
    if isinstance(tree, Tensor):
        return f"{names.get(storage(tree), '')}{list(tree.shape)}{tree.dtype}"
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{key}: {describe(names, value)}' for key, value in tree.items())}}}"
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(describe(names, value) for value in tree)})"
    return repr(tree) if isinstance(tree, PLAIN) else type(tree).__name__


def is_same(state: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Tell whether a tensor looks as it did before."""
    return state[:-1] == other[:-1] and (state[-1] is None or torch.equal(state[-1], other[-1]))


def find_names(model: nn.Module) -> dict[int, str]:
    """Return the names of parameters and buffers by their memory."""
    return {storage(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def find_tensors(tree: Any) -> list[Tensor]:
    """List the tensors in arguments or results."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [x for value in values for x in find_tensors(value)]


def find_parts(tree: Any) -> list[Part]:
    """List the parts in the answer of a call."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Part)]


def storage(x: Tensor) -> int:
    """Return what tells a tensor's memory from that of others."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError) as error:  # sparse, nested, inside of torch.func's transforms
        raise TrunkError(f"a tensor of type {type(x).__name__} and {x.layout} has no memory that could be followed") from error


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name as users know it."""
    return resolve_name(function) or getattr(function, "__name__", repr(function))
