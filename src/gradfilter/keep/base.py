"""What a keep is, what it holds, and what it remembers."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradfilter.errors import InputError, PlanError

KEEPS: dict[str, type[Keep]] = {}
"""The keeps by name."""


class Kept(NamedTuple):
    """What is held of a tensor.

    Attributes:
        tensors: What autograd saves.
        open: From these tensors, in backward, to the tensor itself or to its compressed form.
    """

    tensors: tuple[Tensor, ...]
    open: Callable[[Sequence[Tensor]], Any]


def hold(x: Tensor) -> Kept:
    """Return a tensor as it is."""
    return Kept((x,), take)


def take(tensors: Sequence[Tensor]) -> Tensor:
    """Return a tensor that was held as it is."""
    return tensors[0]


class Promise:
    """What opens patch means and slopes of a map that waits: autograd saves them before they are computed.

    Attributes:
        kept: Whether they are there.
        resolve: What computes a tensor that waits.
        waiting: The tensors with which they are computed.
    """

    __slots__ = ("kept", "resolve", "waiting")

    def __init__(self, resolve: Callable[[Any], None]) -> None:
        """Start with nothing computed."""
        self.kept, self.resolve = False, resolve
        self.waiting: list[weakref.ref[Any]] = []

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a tensor that was held as it is, once it is computed."""
        self.keep()
        return tensors[0]

    def keep(self) -> None:
        """Compute what has not been: somebody has a gradient without having had a value, or looks at what is saved."""
        for reference in () if self.kept else self.waiting:
            x = reference()
            if x is not None and x.recipe is not None and not self.kept:
                self.resolve(x)
        if not self.kept:
            raise InputError(
                "a gradient came back to a layer whose output was never computed, for nobody read it and it is gone. Hold the "
                "tensors that you differentiate until backward is over."
            )


def save(ctx: Any, kept: Sequence[Kept | None], *others: Tensor | None) -> None:
    """Save what is held of some tensors, and other tensors as they are, for the backward of a function."""
    if is_saving_watched():
        for entry in kept:
            if entry is not None and isinstance(entry.open, Promise):
                entry.open.keep()
    held, tensors = [], []
    for entry in kept:
        held.append(None if entry is None else (len(entry.tensors), entry.open))
        if entry is not None:
            tensors += entry.tensors
    ctx.held = held
    ctx.save_for_backward(*tensors, *others)


def is_saving_watched() -> bool:
    """Tell whether somebody looks at tensors when autograd saves them: hooks that pack them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]


def load(ctx: Any) -> tuple[Any, ...]:
    """Return what `save` has saved, in its order: tensors, or `Tucker` where they are held compressed."""
    saved, place, opened = ctx.saved_tensors, 0, []
    for entry in ctx.held:
        opened.append(None if entry is None else entry[1](saved[place : place + entry[0]]))
        place += 0 if entry is None else entry[0]
    return *opened, *saved[place:]


@dataclass
class State:
    """What a keep remembers of a layer from step to step. It is copied, pickled and saved with the layer.

    Attributes:
        layer: The layer's name, from which its random numbers come.
        tensors: By name. They are replaced, never changed in place: a graph may hold them.
    """

    layer: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """Return a number that goes up by one with each call, from zero."""
        count = int(self.tensors.get(name, 0))
        self.tensors[name] = torch.tensor(count + 1)
        return count


@dataclass(frozen=True)
class Keep(ABC):
    """A way to hold a tensor until backward.

    Attributes:
        name: What users call it.
        traceable: Whether it reads no values of tensors and remembers nothing, so that a graph of it can be recorded.
    """

    name: ClassVar[str]
    traceable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Register a keep that has a name of its own."""
        if "name" in cls.__dict__:
            if cls.name in KEEPS:
                raise PlanError(
                    f"there is a keep {cls.name!r} already, {KEEPS[cls.name].__name__}. Give {cls.__name__} another name."
                )
            KEEPS[cls.name] = cls

    @abstractmethod
    def compress(self, x: Tensor, state: State, channels: int = 1) -> Kept:
        """Return what to hold of x.

        On shapes alone (torch's meta device) that is of the size that it has for any x, and of the largest it can have where
        the size depends on x. State is not touched then.

        Args:
            x: The tensor, without gradient.
            state: The layer's.
            channels: The axis of the channels.
        """

    @property
    @abstractmethod
    def around(self) -> Keep:
        """How other maps that backward needs are held: derivatives of activations, normalised inputs."""

    @property
    def calibrates(self) -> bool:
        """Whether the first batch decides how much is held."""
        return False

    @property
    def options(self) -> str:
        """The options in one word, as `from_options` reads them."""
        return ""

    @classmethod
    def from_options(cls, text: str) -> Keep:
        """Return the keep with options in one word."""
        if text:
            raise PlanError(f"keep {cls.name!r} takes no options, but got {text!r}. Write '{cls.name}'.")
        return cls()

    def __str__(self) -> str:
        """Return the keep as a user writes it."""
        return f"{self.name}:{self.options}" if self.options else self.name


def parse_keep(value: Any) -> Keep:
    """Return the keep that a text names, such as "int8", "hosvd:0.8" or "subspace:64KB"."""
    if isinstance(value, Keep):
        return value
    name, _, options = value.strip().partition(":") if isinstance(value, str) else ("", "", "")
    if name.lower() not in KEEPS:
        raise PlanError(f"{value!r} is no keep. The keeps are {', '.join(KEEPS)}, with options as in 'hosvd:0.8'.")
    return KEEPS[name.lower()].from_options(options.strip())
