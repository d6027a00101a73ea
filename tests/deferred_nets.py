"""A small network whose forward a test writes, run with the C library and without it: nobody may see a difference."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import deferred, frozen
from gradfilter.bench.setup import shake_
from gradfilter.errors import ExitWarning
from gradfilter.ops import native
from gradfilter.rules import norm

Use = Callable[[Any, Tensor], Any]


class Parts(nn.Module):
    """Layers of all kinds that wait, for a forward that is given from outside; `wide` alone runs in torch at once.

    Attributes:
        use: The forward: takes this network and a map [N, 16, H, W], returns a map of 16 channels.
        seen: What a forward or a hook wants to look at later.
    """

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.seen: list[Any] = []
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv, self.norm = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.deep, self.deep_norm = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)
        self.wide, self.wide_norm = nn.Conv2d(16, 16, 5, padding=2, groups=2), nn.BatchNorm2d(16)
        self.last, self.last_norm = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)
        self.three, self.three_norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.narrow = nn.Conv2d(16, 8, 1)
        self.grow, self.grow_norm = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.taps, self.taps_norm = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16)

    def hide(self, x: Tensor, inplace: bool = False) -> Tensor:
        """Return the map between an expansion and its depthwise convolution, which waits for that."""
        return F.relu6(self.grow_norm(self.grow(self.narrow(x))), inplace)

    def expand(self, x: Tensor) -> Tensor:
        """Return the depthwise convolution of such a map."""
        return self.taps_norm(self.taps(self.hide(x, inplace=True)))

    def pad(self, x: Tensor) -> Tensor:
        """Return a map with zeros around it, as large as x, which wait for a convolution."""
        return F.pad(F.relu6(self.three_norm(F.conv2d(x, self.three.weight))), (1, 1, 0, 2))

    def frame(self, x: Tensor) -> Tensor:
        """Return the same around a map that waits for a depthwise one."""
        return F.pad(self.hide(F.conv2d(x, self.three.weight)), (2, 0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        x = self.use(self, x)
        x = F.relu6(self.last_norm(self.last(x)))
        return self.head(x.mean((2, 3)))


class Outcome(NamedTuple):
    """What a training step shows to its user."""

    y: Tensor | None
    loss: Tensor | None
    grads: dict[str, Tensor | None]
    seen: list[Any]
    error: type[Exception] | None


def make_parts(use: Use) -> Parts:
    """Return the network with weights that no gradient is trivially right for, always the same ones."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return shake_(Parts(use)).train()  # type: ignore[return-value]


def draw_images(*shape: int, channels_last: bool = True) -> Tensor:
    """Return seeded images in single precision."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def run_step(model: nn.Module, x: Tensor, loss_of: Callable[[Any], Tensor] | None = None) -> Outcome:
    """Run a forward and a backward; an error of the user's making is an outcome, too."""
    model.zero_grad()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        torch.manual_seed(3)
        try:
            y = model(x)
            loss = loss_of(y) if loss_of else F.cross_entropy(y, torch.arange(len(y)) % 5)
            loss.backward()
        except Exception as error:
            return Outcome(None, None, {}, [], type(error))
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    shown = y.detach() if isinstance(y, Tensor) else None
    return Outcome(shown, loss.detach(), grads, list(getattr(model, "seen", [])), None)


def count_saved(model: nn.Module, x: Tensor) -> int:
    """Return the bytes that autograd holds after a forward, nobody watching operators: as a training step does it."""
    held = {p.data_ptr() for p in (*model.parameters(), *model.buffers(), x)}
    saved: dict[int, int] = {}
    alive: list[Tensor] = []  # no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            alive.append(tensor)
            if tensor.numel() and tensor.data_ptr() not in held:
                saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(x)
        del y
    return sum(saved.values())


@contextmanager
def in_order() -> Iterator[None]:
    """Let every function run in torch, at the moment at which it is called."""
    with native.off(), pytest.MonkeyPatch.context() as patched:
        for module in (norm, frozen, deferred):
            patched.setattr(module, "can_defer", lambda x: False)
        yield


def run_both(
    model: nn.Module, x: Tensor, plan: gf.Plan, loss_of: Callable[[Any], Tensor] | None = None, prepare: Any = None
) -> tuple[Outcome, Outcome]:
    """Run a step of two copies of a model, with the library and without."""
    outcomes = []
    for is_off in (False, True):
        copied = copy.deepcopy(model)
        gf.apply_(copied, plan)
        if prepare:
            prepare(copied)
        if is_off:
            with in_order():
                outcomes.append(run_step(copied, x.clone(), loss_of))
        else:
            outcomes.append(run_step(copied, x.clone(), loss_of))
    return outcomes[0], outcomes[1]


def assert_same(got: Outcome, want: Outcome, rtol: float = 1e-4) -> None:
    """Compare two outcomes to rounding; a gradient is held against its own norm and the largest."""
    assert got.error == want.error
    if want.error is not None:
        return
    for a, b in ((got.y, want.y), (got.loss, want.loss)):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True)
    assert got.grads.keys() == want.grads.keys()
    largest = max(float(g.nan_to_num(0, 0, 0).norm()) for g in want.grads.values() if g is not None)
    for name, g in want.grads.items():
        mine = got.grads[name]
        if g is None or mine is None:
            assert mine is g, name
        else:
            assert mine.isfinite().equal(g.isfinite()), name
            off = float((mine - g).nan_to_num(0, 0, 0).norm())
            assert off <= rtol * float(g.nan_to_num(0, 0, 0).norm()) + 1e-2 * rtol * largest, name
    assert len(got.seen) == len(want.seen)
    for a, b in zip(got.seen, want.seen, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a.detach() * 1, b.detach() * 1, rtol=rtol, atol=rtol)
        else:
            assert a == b
