"""Watch one training step: flops and saved bytes by layer, and how many bytes are alive at most."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradfilter.flops import count_flops
from gradfilter.loss import find_targets
from gradfilter.plan import find_layers
from gradfilter.scratch import count_scratch
from gradfilter.shapes import on_shapes, to_meta
from gradfilter.tensor import plain_torch

INPUT, LOSS = "(input)", "(loss)"
"""What comes before the first layer, and behind the model."""
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
"""The parts of a step."""

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Step:
    """What one training step costs.

    Attributes:
        flops: By part of the step and layer. What follows a layer (norm, activation, pooling) counts as that layer's.
        saved_bytes: What autograd holds between forward and backward, by the layer that saved it; "(loss)" is the loss's own.
        peak_bytes: Most bytes alive at once, on top of parameters, optimizer state and the batch itself.
        gradient_bytes: Those of the gradients.
        optimizer_bytes: Those of the optimizer's state.
    """

    flops: dict[str, dict[str, int]]
    saved_bytes: dict[str, int]
    peak_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    def count(self, part: str) -> int:
        """Return the flops of one part of the step."""
        return sum(self.flops[part].values())


def predict_step(
    model: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[[Any], Tensor], make_optimizer: MakeOptimizer | None = None
) -> Step:
    """Return what a step costs, without computing or allocating anything: the step runs on shapes alone.

    Args:
        model: With or without a plan.
        inputs: What the model is called with, or tensors of the same shapes on the meta device.
        loss: From the model's outputs on shapes to a scalar: a `StepLoss`, say.
        make_optimizer: From the trained parameters to an optimizer; None for a step without an update.
    """
    inputs = tuple(to_meta(x) for x in inputs)
    with on_shapes(model) as (run, state), follow(model) as places:
        trained = [tensor for tensor in state.values() if tensor.requires_grad]
        optimizer = make_optimizer(trained) if make_optimizer and trained else None
        if optimizer is not None:  # its state is there before the step that is counted
            for tensor in trained:
                tensor.grad = torch.zeros_like(tensor)
            optimizer.step()
            optimizer.zero_grad()
        with Meter(places, [*state.values(), *inputs, *find_state(optimizer), *find_targets(loss)]) as meter:
            saved = Saved(places)
            with saved:
                alive = run_forward(lambda: run(*inputs), loss, places)  # outputs too, until backward is done
            held = saved.count(state.values())
            alive[1].backward()
            if optimizer is not None:
                meter.part = UPDATE
                optimizer.step()
    gradients = sum(tensor.grad.nbytes for tensor in trained if tensor.grad is not None)
    update = sum(tensor.nbytes for tensor in find_state(optimizer))
    return Step({part: dict(flops) for part, flops in meter.flops.items()}, held, meter.peak, gradients, update)


def run_forward(run: Callable[[], Any], loss: Callable[[Any], Tensor] | None, places: Places | None = None) -> tuple[Any, Any]:
    """Run a forward pass and the loss, if there is one; return the outputs and its value, which keep the graph alive."""
    outputs = run()
    if places is not None:
        places.go(LOSS)
    return outputs, None if loss is None else loss(outputs)


def find_state(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """List the tensors of an optimizer's state."""
    return [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, Tensor)] if optimizer else []


class Places:
    """Remember which layer of a model a forward pass is at, and which made which part of autograd's graph.

    Attributes:
        now: The layer that ran last.
    """

    def __init__(self) -> None:
        """Start before the first layer."""
        self.now = INPUT
        self.names: list[str] = []
        self.starts: list[int] = []
        self.go(INPUT)

    def go(self, layer: str) -> None:
        """Say that a layer begins."""
        self.now = layer
        self.names.append(layer)
        self.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def find(self, node: Any) -> str:
        """Return the layer in whose time a node of the graph was made; parameters' own nodes belong to none."""
        place = bisect_right(self.starts, node._sequence_nr()) - 1
        return self.names[place] if place >= 0 else INPUT


def enter(places: Places, layer: str, *_: Any) -> None:
    """Say that a layer begins; a forward pre-hook, but for the first two arguments."""
    places.go(layer)


@contextmanager
def follow(model: nn.Module) -> Iterator[Places]:
    """Yield the place of the forward passes that run inside."""
    places = Places()
    handles = [
        layer.register_forward_pre_hook(partial(enter, places, name), prepend=True)
        for name, layer in find_layers(model).items()
    ]
    try:
        yield places
    finally:
        for handle in handles:
            handle.remove()


class Held:
    """A saved tensor, alive as long as the graph that saved it."""

    def __init__(self, tensor: Tensor, place: str) -> None:
        """Hold a tensor that a layer saved."""
        self.tensor, self.place = tensor, place


class Saved(saved_tensors_hooks):
    """See what autograd saves while this is entered, and whether it still does."""

    def __init__(self, places: Places | None = None) -> None:
        """Start with nothing; with places, say which layer saved what."""
        self.places = places
        self.held: list[weakref.ref[Held]] = []
        super().__init__(self.pack, lambda entry: entry.tensor)

    def pack(self, tensor: Tensor) -> Held:
        """Note a tensor that is saved."""
        with plain_torch():
            # Without its place in the graph: a function that saves its result would hold itself.
            entry = Held(tensor.detach(), self.places.now if self.places else INPUT)
        self.held.append(weakref.ref(entry))
        return entry

    def count(self, exclude: Iterable[Tensor] = (), *, given: Iterable[Tensor] = (), shared: bool = True) -> dict[str, int]:
        """Return the bytes that are held now, by layer, deduplicated by storage.

        Args:
            exclude: Tensors that are there anyway.
            given: The inputs: of their storages only what they show counts, the rest is the caller's own.
            shared: Whether what several layers hold counts once, for the first; without it, for each as if it were alone.
        """
        sizes: dict[tuple[str, int], tuple[str, int]] = {}
        with plain_torch():
            known = {tensor.untyped_storage()._cdata for tensor in exclude}
            shown = {tensor.untyped_storage()._cdata: tensor.nbytes for tensor in given}
            for entry in [entry for held in self.held if (entry := held()) is not None]:
                storage = entry.tensor.untyped_storage()
                if storage._cdata not in known:
                    key = ("" if shared else entry.place, storage._cdata)
                    sizes.setdefault(key, (entry.place, shown.get(storage._cdata, storage.nbytes())))
        held: Counter[str] = Counter()
        for place, size in sizes.values():
            held[place] += size
        return dict(held)


class Meter(TorchDispatchMode):
    """Count flops by part and layer, and bytes alive, of everything that torch runs inside.

    Attributes:
        part: The part of the step, outside of backward.
        flops: By part and layer.
        peak: Most bytes alive at once.
    """

    def __init__(self, places: Places, exclude: Iterable[Tensor] = ()) -> None:
        """Start at nothing; the storages of `exclude` are there anyway."""
        super().__init__()
        self.places, self.part = places, FORWARD
        self.flops: dict[str, Counter[str]] = {part: Counter() for part in (FORWARD, BACKWARD, UPDATE)}
        self.alive: dict[int, weakref.ref[Any] | None] = {t.untyped_storage()._cdata: None for t in exclude}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        node = torch._C._current_autograd_node()
        part = BACKWARD if torch._C._current_graph_task_id() != -1 else self.part
        self.flops[part][self.places.find(node) if node is not None else self.places.now] += count_flops(
            func, args, kwargs, out
        )
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now + count_scratch(func, args, out))
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as alive until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.now += size
            self.alive[key] = weakref.ref(storage, lambda _: self.free(key, size))

    def free(self, key: int, size: int) -> None:
        """Count a storage as gone."""
        self.now -= size
        del self.alive[key]
