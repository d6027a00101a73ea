"""Regions: where activations are at patch resolution, what was decided there, and where and why that ends."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name

from gradfilter.errors import ExitWarning
from gradfilter.geometry.tiling import Tiling
from gradfilter.keep import FULL, Keep, State

EXPECTED = "expected"
"""The reason of an exit at a function where regions are meant to end."""


Seen = tuple[dict[str, dict[str, None]], dict[str, int], dict[tuple[str, str], str]]
"""What a forward met: regions, ranks and exits, as `Log` has them."""


@dataclass
class Log:
    """Remember, for one model and its latest forward, which regions there were and where they ended.

    Attributes:
        regions: For the layer at which a region was entered, the planned layers in it, in the order they ran.
        ranks: The place of each planned layer in the order in which they ran.
        exits: From the latest planned layer and the function to the reason, `EXPECTED` where no other was needed.
        warned: Whether somebody was told about an exit that nobody expected: once per model is enough.
        bypasses: The exits by code that by-passes torch functions, found in the graph of the first forward; `None` before.
        shared: While a forward runs, what is known of the tensors at which regions were entered; `None` outside of one.
    """

    regions: dict[str, dict[str, None]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    exits: dict[tuple[str, str], str] = field(default_factory=dict)
    warned: bool = False
    bypasses: dict[tuple[str, str], str] | None = None
    shared: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Any]] | None = None

    def start(self) -> None:
        """Forget the forward before."""
        self.regions.clear()
        self.ranks.clear()
        self.exits = dict(self.bypasses or {})
        self.shared = {}

    def finish(self) -> None:
        """Let go of what the layers of a forward share: from here on only what the graph holds is needed."""
        self.shared = None

    def list_seen(self) -> Seen:
        """Return the regions, ranks and exits of this forward, for programs that repeat it."""
        return dict(self.regions), dict(self.ranks), dict(self.exits)

    def recall(self, seen: Seen) -> None:
        """Note what an earlier forward has met, and a program now repeats."""
        for mine, found in zip((self.regions, self.ranks, self.exits), seen, strict=True):
            mine.update(found)  # type: ignore[arg-type]

    def share(self, x: Tensor, where: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what layers share that enter regions at the same tensor, at the same place: branches behind a frozen layer."""
        if self.shared is None or x.is_inference():  # which does not tell whether it was changed
            return make()
        key = (id(x), x._version, *where)
        owner, found = self.shared.get(key, (None, None))
        if owner is None or owner() is not x:
            found = make()
            self.shared[key] = weakref.ref(x), found
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: it shares nothing with a forward that was broken off."""
        return {**self.__dict__, "shared": None}

    def join(self, region: str, layer: str) -> None:
        """Record that a planned layer runs in a region."""
        self.regions.setdefault(region, {}).setdefault(layer)
        self.ranks.setdefault(layer, len(self.ranks))

    def note(self, layer: str, func: Callable[..., Any] | str, reason: str = EXPECTED) -> None:
        """Record an exit; warn about the first one that nobody expected."""
        name = func if isinstance(func, str) else resolve_name(func) or getattr(func, "__name__", repr(func))
        self.exits.setdefault((layer, name), reason)
        if reason != EXPECTED and not self.warned:
            self.warned = True
            warnings.warn(
                f"the region behind layer '{layer}' ends at {name}: {reason}. Gradients stay right, but from here on they "
                "are held at pixel resolution until the next planned layer. To keep them at patch resolution, use a function "
                "that has a patch rule, or give this one a rule with gradfilter.tensor.rule, as docs/rules.md shows. "
                "gradfilter.describe(model) lists every exit.",
                ExitWarning,
                stacklevel=count_inner_frames() + 1,
            )

    def find_unexpected(self) -> dict[tuple[str, str], str]:
        """List the exits that nobody expected, and their reasons."""
        return {key: reason for key, reason in self.exits.items() if reason != EXPECTED}


def count_inner_frames() -> int:
    """Return how many frames lie between the caller and the first line outside torch and this package."""
    frame, count = sys._getframe(1), 0
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "gradfilter"):
        frame, count = frame.f_back, count + 1
    return count


@dataclass(frozen=True)
class Choices:
    """What the latest planned layer decided: it holds for everything behind that layer, until the next one.

    Attributes:
        layer: The layer.
        tiling: How maps are cut into patches.
        kernel: "lift" or "lumped".
        log: Where exits are recorded.
        region: The layer at which the region was entered.
        keep: How the inputs of layers are held until backward.
        state: What the keep remembers.
        features: Whether there is no map here, only features of which less is held: a region at patch 1 that may end anywhere.
    """

    layer: str
    tiling: Tiling
    kernel: str = "lift"
    log: Log = field(default_factory=Log, compare=False, repr=False)
    region: str = field(default="", compare=False)
    keep: Keep = FULL
    state: State = field(default_factory=State, compare=False, repr=False)
    features: bool = False

    @property
    def rank(self) -> int:
        """The place of the layer in the order in which layers ran."""
        return self.log.ranks.get(self.layer, -1)
