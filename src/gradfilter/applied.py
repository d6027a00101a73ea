"""The record of what a plan has done to a model, and what all hooks that it leaves there have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradfilter.geometry.tiling import Pair
from gradfilter.marks import Owner, drop_key, make_key
from gradfilter.plan import Plan, Resolved
from gradfilter.regions import Log


@dataclass
class Applied:
    """What `apply_` or `freeze_` has done to a model, and what its latest forward met: all that `describe` and `remove_` need.

    Attributes:
        plan: The plan.
        resolved: The plan spelled out.
        frozen: The parameters that it froze.
        is_exact: Whether that is all, and the rest is trained with torch's own backward.
        log: Regions and exits.
        image: Size of the network's input.
        patches: The patch of each planned layer that ran at patch resolution.
        exact: Why a planned layer that saw a map or tokens ran exactly.
        paused: Whether layers run with torch's own backward for a while, see `exactly`.
        compiled: The shapes of the inputs with which each graph that was captured of the model was compiled first, by the
            marks in it; empty where nothing was compiled.
        programs: The programs of the model.
    """

    plan: Plan
    resolved: Resolved
    frozen: list[nn.Parameter]
    is_exact: bool
    log: Log = field(default_factory=Log)
    image: Pair | None = None
    patches: dict[str, Pair] = field(default_factory=dict)
    exact: dict[str, str] = field(default_factory=dict)
    paused: bool = False
    compiled: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)
    programs: list[ref[Any]] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: it is not compiled."""
        return {**self.__dict__, "compiled": {}, "programs": []}


@dataclass
class Hook(ABC):
    """What `apply_` leaves on a module. A class at module level, so that models still copy and pickle.

    Attributes:
        applied: The record that all hooks of a plan share.
        handles: What takes the hook off again.
        key: What its marks are called.
        owner: The module it is on.
    """

    applied: Applied
    handles: list[RemovableHandle] = field(default_factory=list, kw_only=True)
    key: str = field(default="", kw_only=True, compare=False)
    owner: Owner = field(default=Owner(None), kw_only=True, repr=False, compare=False)

    def attach(self, module: nn.Module) -> None:
        """Put the hook in front of a module's forward."""
        self.handles.append(module.register_forward_pre_hook(self, with_kwargs=True))
        self.owner, self.key = Owner(module), make_key(self, self.name)

    @property
    def name(self) -> str:
        """What to call the hook in a graph."""
        return type(self).__name__

    @abstractmethod
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run before the module's forward, or leave a mark in the graph that `torch.compile` captures."""

    def act(self, key: str, x: Tensor) -> Any:
        """Do to a tensor what the hook does where `torch.compile` has left its mark."""
        result = self(self.owner.find(), (x,), {})  # type: ignore[arg-type]
        return x if result is None else result[0][0]

    def detach(self) -> None:
        """Take the hook off again."""
        drop_key(self.key)
        for handle in self.handles:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill a copy, which has marks of its own."""
        for name, value in state.items():
            setattr(self, name, value)
        self.key = make_key(self, self.name)
