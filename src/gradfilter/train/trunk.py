"""Run a network without its trunk: the part that depends on the images alone, and on nothing that is trained.

A forward pass is recorded call by call. A call belongs to the *trunk* where the images enter into it, and nothing
trained or random does.
What trained calls read of the trunk's results is the *cut*. Later the same Python code of the model runs again, with every call
of the trunk answered from the record: tensors of the cut are the ones given, all others are placeholders without data. So any
model can be run behind its trunk, unchanged and without being traced or rewritten; where a model does something that a record
cannot answer for, that is found while recording, and refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from gradfilter.errors import GradFilterError
from gradfilter.tensor import plain_torch

READERS = frozenset(
    getattr(Tensor, name)
    for name in "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __complex__ equal allclose is_nonzero".split()
) | {torch.equal, torch.allclose, torch.is_nonzero}
"""Functions that hand values of a tensor to Python, where they can steer what the model does next."""


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
        value = float("nan") if self.dtype.is_floating_point else 0
        return torch.full((), value, dtype=self.dtype, device=self.device).expand(self.shape)


@dataclass
class Call:
    """One call of a torch function, as recorded.

    Attributes:
        function: What was called.
        trunk: Whether it belongs to the trunk.
        kind: How a call of the trunk is answered: "skip" by placeholders, "cut" by a tensor of the cut, "view" by running it
            on one, "same" by its own argument, which it changed, "nothing" by None.
        answer: What that takes: specs in the structure of the result; the number in the cut; the argument's position.
    """

    function: Callable[..., Any]
    trunk: bool = False
    kind: str = "run"
    answer: Any = None


@dataclass
class Record:
    """A forward pass, as recorded for one size of batch, in one mode (training or not).

    Attributes:
        calls: All calls that make or change tensors, in order.
        asks: Functions that tell of a tensor all but its values (its shape, say): they run as ever.
        cut: Specs of the tensors that trained calls read of the trunk.
        input: The place of the images themselves in the cut, where trained calls read them.
        ready: For each call after which tensors of the cut have their final values: which ones.
        images: Spec of the images.
        used: Names of the parameters and buffers that the trunk uses.
    """

    calls: list[Call] = field(default_factory=list)
    asks: set[Callable[..., Any]] = field(default_factory=set)
    cut: list[Spec] = field(default_factory=list)
    input: int | None = None
    ready: dict[int, list[int]] = field(default_factory=dict)
    images: Spec | None = None
    used: list[str] = field(default_factory=list)


class Recorder(TorchFunctionMode):
    """Record a forward pass: notes every call, and by storages what depends on the images and what on trained parameters."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        """Start with what is known before the first call."""
        super().__init__()
        named = [*model.named_parameters(), *model.named_buffers()]
        self.names = {storage(tensor): name for name, tensor in named}
        self.calls: list[Call] = []
        self.asks: set[Callable[..., Any]] = set()
        self.results: list[Any] = []  # keeps every storage alive, so that its address stays its own
        self.base: dict[int, tuple[int, Tensor]] = {storage(images): (-1, images)}
        self.written: dict[int, int] = {}
        self.trained: set[int] = set()
        self.read: dict[int, None] = {}
        self.used: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call and file it."""
        kwargs = kwargs or {}
        given = find_tensors((args, kwargs))
        with plain_torch():
            versions = [x._version for x in given]
        state = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        drew = not torch.equal(state, torch.default_generator.get_state())
        with plain_torch():
            changed = [i for i, (x, v) in enumerate(zip(given, versions, strict=True)) if x._version != v]
            if changed or find_tensors(result):
                self.results.append((given, result))
                self.file(Call(func), given, changed, result, drew)
            elif func in READERS and any(storage(x) in self.base and storage(x) not in self.trained for x in given):
                raise TrunkError(f"{name_of(func)} reads values of an activation, on which the frozen layers then depend")
            else:
                self.asks.add(func)
        return result

    def file(self, call: Call, given: list[Tensor], changed: list[int], result: Any, drew: bool) -> None:
        """Decide what a call is: the trunk's, one to run each time (trained, or random), or one apart from all images."""
        made = find_tensors(result)
        index = len(self.calls)
        self.calls.append(call)
        if drew or any(storage(x) in self.trained for x in given) or any(x.requires_grad for x in made):
            before = set(self.trained)
            self.trained.update(storage(x) for x in made)
            self.trained.update(storage(given[i]) for i in changed)
            self.read.update({storage(x): None for x in given if storage(x) in self.base and storage(x) not in before})
        elif any(storage(x) in self.base for x in given):
            self.used.update({self.names[storage(x)]: None for x in given if storage(x) in self.names})
            self.file_trunk(call, index, given, changed, made, result)

    def file_trunk(
        self, call: Call, index: int, given: list[Tensor], changed: list[int], made: list[Tensor], result: Any
    ) -> None:
        """Decide how a call of the trunk is answered later."""
        call.trunk = True
        for i in changed:
            key = storage(given[i])
            if key in self.read:
                raise TrunkError(f"{name_of(call.function)} changes an activation in place that trained layers have read")
            if key not in self.base:
                raise TrunkError(
                    f"{name_of(call.function)} changes a tensor in place that is no activation of the frozen layers"
                )
            self.written[key] = index
        if changed:
            same = [i for i in changed if any(given[i] is x for x in made)]
            call.kind, call.answer = ("same", same[0]) if same else ("nothing", None)
        elif any(storage(x) not in self.base for x in made):
            for x in made:
                self.base.setdefault(storage(x), (index, x))
            call.kind, call.answer = "skip", tree_map(lambda x: Spec.of(x) if isinstance(x, Tensor) else x, result)
        else:
            specs = tree_map(lambda x: Spec.of(x) if isinstance(x, Tensor) else x, result)
            call.kind, call.answer = "view", (specs, [storage(x) for x in made])

    def finish(self, images: Tensor) -> Record:
        """Return the record: the cut is what trained calls have read."""
        record = Record(self.calls, self.asks, images=Spec.of(images), used=list(self.used))
        places = {key: i for i, key in enumerate(self.read)}
        for key, place in places.items():
            index, tensor = self.base[key]
            spec = Spec.of(tensor)
            if spec.shape[:1] != tuple(images.shape[:1]) or spec.order[:1] != (0,):
                raise TrunkError(
                    f"a trained layer reads a tensor of shape {list(spec.shape)}, which has no share for each image"
                )
            record.cut.append(spec)
            record.ready.setdefault(self.written.get(key, index), []).append(place)
            if index < 0:
                record.input = place
            elif len(find_tensors(self.results[index][1])) != 1:
                raise TrunkError(f"{name_of(self.calls[index].function)} gives several tensors at once to trained layers")
            else:
                self.calls[index].kind, self.calls[index].answer = "cut", place
        for call in self.calls:
            if call.kind == "view":
                specs, keys = call.answer
                call.kind, call.answer = ("view", None) if all(key in places for key in keys) else ("skip", specs)
        if not record.cut:
            raise TrunkError("no trained layer reads anything of the images")
        return record


class Capture(TorchFunctionMode):
    """Run a recorded forward as far as its cut, and take the cut's tensors."""

    def __init__(self, record: Record, images: Tensor) -> None:
        """Take the images where they are in the cut themselves."""
        super().__init__()
        self.record, self.calls = record, iter(enumerate(record.calls))
        self.taken: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {} if record.input is None else {record.input: images}
        self.take(-1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call; take what has its final values with it."""
        if func in self.record.asks:
            return func(*args, **(kwargs or {}))
        index, call = follow(self.calls, func)
        result = func(*args, **(kwargs or {}))
        if call.kind == "cut":
            self.made[call.answer] = result
        self.take(index)
        return result

    def take(self, index: int) -> None:
        """Copy the tensors that are ready; stop the forward after the last of them."""
        for place in self.record.ready.get(index, ()):
            with plain_torch():
                self.taken[place] = self.made[place].detach().clone(memory_format=torch.preserve_format)
        if len(self.taken) == len(self.record.cut):
            raise Reached


class Reached(BaseException):
    """Ends a forward at the cut. No error: models that catch errors must not catch it."""


class Replay(TorchFunctionMode):
    """Run a recorded forward again, with the trunk's calls answered from the record and from the cut."""

    def __init__(self, record: Record, cut: Sequence[Tensor]) -> None:
        """Start at the first call."""
        super().__init__()
        self.calls, self.asks, self.cut = iter(enumerate(record.calls)), record.asks, cut

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of the trunk, run any other."""
        if func in self.asks:
            return func(*args, **(kwargs or {}))
        _, call = follow(self.calls, func)
        match call.kind:
            case "skip":
                return tree_map(lambda x: x.placeholder if isinstance(x, Spec) else x, call.answer)
            case "cut":
                return self.cut[call.answer]
            case "same":
                return find_tensors((args, kwargs or {}))[call.answer]
            case "nothing":
                return None
        return func(*args, **(kwargs or {}))


class Trunk:
    """The trunk of a model: computes the cut for images, and runs the model on a cut.

    Records are made as they are needed, one for each size of batch and mode.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take a model under a plan, or with frozen parameters."""
        self.model = model
        self.records: dict[Any, Record] = {}

    def find_record(self, images: Tensor) -> Record:
        """Return the record for images like these."""
        key = (Spec.of(images), self.model.training, torch.is_autocast_enabled(images.device.type))
        if key not in self.records:
            self.records[key] = self.record(images)
        return self.records[key]

    def record(self, images: Tensor) -> Record:
        """Record a forward pass, with gradients, so that what is trained shows."""
        recorder = Recorder(self.model, images)
        with torch.enable_grad(), recorder:
            self.model(images)
        return recorder.finish(images)

    def compute(self, images: Tensor) -> list[Tensor]:
        """Return the tensors of the cut for these images."""
        record = self.find_record(images)
        capture = None
        try:
            capture = Capture(record, images)
        except Reached:
            return [images]
        try:
            with torch.no_grad(), capture:
                self.model(images)
        except Reached:
            return [capture.taken[place] for place in range(len(record.cut))]
        raise TrunkError("a second forward pass did not come as far as the first one")

    def run(self, record: Record, cut: Sequence[Tensor]) -> Any:
        """Return the model's output for a cut."""
        assert record.images is not None
        images = record.images.placeholder if record.input is None else cut[record.input]
        with Replay(record, cut):
            return self.model(images)

    def fingerprint(self, record: Record) -> str:
        """Return a digest of all that the cut depends on besides the images: the calls, and the weights they use."""
        digest = hashlib.sha256(torch.__version__.encode())
        for call in record.calls:
            if call.trunk:
                digest.update(f"{name_of(call.function)} {call.answer if call.kind == 'skip' else call.kind}".encode())
        state = self.model.state_dict(keep_vars=True)
        for name in record.used:
            tensor = state.get(name)
            if tensor is not None:
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def follow(calls: Iterator[tuple[int, Call]], function: Callable[..., Any]) -> tuple[int, Call]:
    """Return the next recorded call, which has to be one of the same function."""
    index, call = next(calls, (0, None))
    if call is None or call.function != function:
        expected = "its end" if call is None else name_of(call.function)
        raise TrunkError(f"the model calls {name_of(function)} where its first forward pass came to {expected}")
    return index, call


def find_tensors(tree: Any) -> list[Tensor]:
    """List the tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage(x: Tensor) -> int:
    """Return what tells a tensor's memory from that of others."""
    return x.untyped_storage()._cdata


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name as users know it."""
    return resolve_name(function) or getattr(function, "__name__", repr(function))
