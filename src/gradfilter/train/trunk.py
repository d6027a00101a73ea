"""Run a network without its trunk: the part that depends on the images alone, and on nothing that is trained.

A forward pass is recorded (see `gradfilter.train.record`). Later the same Python code of the model runs again, with every call
of the trunk answered from the record: tensors of the cut are the ones given, all others are placeholders without data. So any
model can be run behind its trunk, unchanged and without being traced or rewritten; where a model does something that a record
cannot answer for, that is found while recording, or while the cut is computed, and refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from gradfilter.deferred import at_once, plain_torch
from gradfilter.train.record import (
    Call,
    Part,
    Record,
    Recorder,
    Spec,
    TrunkError,
    describe,
    find_names,
    find_parts,
    find_tensors,
    name_of,
)


class Capture(TorchFunctionMode):
    """Run a recorded forward to the end of its trunk, and take the cut's tensors; calls of the trunk must be as recorded."""

    def __init__(self, model: nn.Module, record: Record) -> None:
        """Start at the first call."""
        super().__init__()
        self.names, self.record, self.calls = find_names(model), record, iter(enumerate(record.calls))
        self.made: dict[int, Tensor] = {}
        self.taken: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call; take what has its final values with it."""
        if func in self.record.asks:
            return func(*args, **(kwargs or {}))
        index, call = next(self.calls, (-1, None))
        if call is None or call.function != func:
            raise make_error(call, func)
        result = func(*args, **(kwargs or {}))
        with plain_torch():
            if call.text and call.text != describe(self.names, (args, kwargs or {}, result)):
                raise TrunkError(f"{name_of(func)} does not get or give the same for all images: numbers, weights, shapes")
            if call.kind == "cut":
                self.made[call.answer] = result
            elif call.kind == "several":
                parts = zip(find_parts(call.answer), find_tensors(result), strict=True)
                self.made.update((part.place, x) for part, x in parts if part.place is not None)
            self.take(index)
        return result

    def take(self, index: int) -> None:
        """Copy the tensors that are ready; stop the forward where the trunk ends."""
        for place in self.record.ready.get(index, ()):
            self.taken[place] = self.made[place].detach().clone(memory_format=torch.preserve_format)
        if index >= self.record.end:
            raise Reached


class Reached(Exception):  # noqa: N818 (no error, but torch runs hooks that clean up after an Exception only)
    """Ends a forward behind the trunk."""


class Replay(TorchFunctionMode):
    """Run a recorded forward again, with the trunk's calls answered from the record and from the cut."""

    def __init__(self, record: Record, cut: Sequence[Tensor]) -> None:
        """Start at the first call."""
        super().__init__()
        self.calls, self.asks, self.cut = iter(record.calls), record.asks, cut

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of the trunk, run any other."""
        if func in self.asks:
            return func(*args, **(kwargs or {}))
        call = next(self.calls, None)
        if call is None or call.function != func:
            raise make_error(call, func)
        match call.kind:
            case "skip":
                return call.answer
            case "cut":
                return self.cut[call.answer]
            case "several":
                return tree_map_only(
                    Part, lambda part: part.spec.placeholder if part.place is None else self.cut[part.place], call.answer
                )
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
        images = images.clone()  # models may write into it
        recorder = Recorder(self.model, images)
        with torch.enable_grad(), at_once(), recorder:
            output = self.model(images)
        return recorder.finish(images, output)

    def compute(self, images: Tensor) -> list[Tensor]:
        """Return the tensors of the cut for these images."""
        record = self.find_record(images)
        images = images.clone()
        capture = Capture(self.model, record)
        if record.input is not None:
            capture.made[record.input] = images
        try:
            capture.take(-1)
            with torch.no_grad(), capture:
                self.model(images)
        except Reached:
            return [capture.taken[place] for place in range(len(record.cut))]
        raise TrunkError("a second forward pass did not come as far as the first one")

    def run(self, record: Record, cut: Sequence[Tensor]) -> Any:
        """Return the model's output for a cut, which the model may change: it is good for one run."""
        images = record.images.placeholder if record.input is None else cut[record.input]
        with Replay(record, cut):
            return self.model(images)

    def fingerprint(self, record: Record) -> str:
        """Return a digest of all that the cut depends on besides the images: the calls, and the tensors they use."""
        digest = hashlib.sha256(torch.__version__.encode())
        for call in record.calls:
            if call.text:
                place = call.answer if call.kind == "cut" else [part.place for part in find_parts(call.answer)]
                digest.update(f"{name_of(call.function)} {call.text} {call.kind} {place}\n".encode())
        digest.update(f"{record.input} {record.cut}".encode())
        for tensor in record.used:
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def make_error(call: Call | None, function: Callable[..., Any]) -> TrunkError:
    """Return the error for a call of another function than the recorded one."""
    expected = "its end" if call is None else name_of(call.function)
    return TrunkError(f"the model calls {name_of(function)} where its first forward pass came to {expected}")
