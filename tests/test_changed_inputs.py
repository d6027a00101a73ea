"""A map that is changed in place after a function has read it: where torch trains, so do we, with torch's gradients."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradfilter as gf
from cases import FUNCTIONS, PAIRS, REARRANGED, draw
from gradfilter.cost import measure_saved_bytes
from gradfilter.deferred import at_once
from gradfilter.errors import ExitWarning
from gradfilter.ops import native
from helpers_safety import Gradients, assert_close, grads_of, randomise

Change = Callable[[Tensor], Tensor]


def add_in_place(x: Tensor) -> Tensor:
    x += 0.25
    return x


def change_channels(x: Tensor) -> Tensor:
    x[:, :1].mul_(2)
    return x


CHANGES: dict[str, Change] = {
    "+=": add_in_place,
    "mul_": lambda x: x.mul_(2),
    "relu": lambda x: F.relu(x, inplace=True),
    "a view": change_channels,
    "without a rule": lambda x: x.addcmul_(x.detach().cos(), x.detach()),
}
"""Ways to change a map in place."""


def make_images(dtype: torch.dtype = torch.float64, channels_last: bool = False) -> Tensor:
    x = draw(2, 3, 8, 8).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def run(model: nn.Module, images: Tensor) -> Gradients | None:
    """Return the gradients of a step, or `None` where autograd says that a tensor it needs was changed."""
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        try:
            model(images).square().sum().backward()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return None
    return grads_of(model)


def run_plan(model: nn.Module, images: Tensor, plan: gf.Plan | None = None) -> Gradients | None:
    plan = plan or gf.Plan.all(gf.Backward(patch=1))
    return run(gf.apply_(copy.deepcopy(model), plan).train(), images)


# Every function


class Reader(nn.Module):
    """Read a map by a function, and change the map in place behind that.

    Attributes:
        second: Whether the second of two maps is changed.
    """

    def __init__(self, call: Callable[..., Tensor], count: int, channels: int, params: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, channels, 3, padding=1) for _ in range(count))
        self.call = call
        self.params = nn.ParameterList(nn.Parameter(draw(*shape, seed=9)) for shape in params)
        with torch.no_grad():
            y = call(*(draw(2, channels, 8, 8, seed=seed) for seed in range(count)), *self.params)
        self.last = nn.Conv2d(y.shape[1], 2, 1, bias=False)
        self.change: Change = add_in_place
        self.second = False

    def forward(self, images: Tensor) -> Tensor:
        maps = [conv(images) for conv in self.convs]
        y = self.call(*maps, *self.params)
        changed = self.change(maps[-1] if self.second else maps[0])
        return self.last(y).square().mean((2, 3)) + changed.mean((1, 2, 3))[:, None]


def make_reader(*args: object) -> Reader:
    return randomise(Reader(*args).double()).eval()  # type: ignore[return-value, arg-type]


READERS = {
    **{f.name: (f.call, 1, 3, f.params) for f in FUNCTIONS},
    **{f.name: (f.call, 1, 6, f.params) for f in REARRANGED.values()},
    **{f"{name}_of_two": (f, 2, 3) for name, f in PAIRS.items()},
}


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("args", READERS.values(), ids=READERS.keys())
def test_a_map_that_a_function_has_read_may_change_where_torch_lets_it(args, channels_last):
    model, images = make_reader(*args), make_images(channels_last=channels_last)
    for trains in (True, False) if model.params else (True,):
        model.params.requires_grad_(trains)
        for model.second in (False, True) if args[1] == 2 else (False,):
            for model.change in CHANGES.values():
                expected = run(copy.deepcopy(model), images)
                if expected is not None:
                    got = run_plan(model, images)
                    assert got is not None
                    assert_close(got, expected)


# Padding, which a convolution takes in


class Same(nn.Conv2d):
    """A convolution that pads its input itself, as ports of TensorFlow's do."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(F.pad(x, (1, 1, 1, 1)))


class PaddedNet(nn.Module):
    """Pad a map, convolve that, and change the map in place."""

    def __init__(self, pad: Change, conv: nn.Module, norm: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3, padding=1), conv, nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.pad = pad
        self.change: Change = add_in_place
        self.checkpoints = False

    def look(self, images: Tensor) -> Tensor:
        x = self.a(images)
        y = self.norm(self.b(self.pad(x)))
        x = self.change(x)
        x += y.mean((2, 3), keepdim=True)
        return x * 2

    def forward(self, images: Tensor) -> Tensor:
        x = checkpoint(self.look, images, use_reentrant=False) if self.checkpoints else self.look(images)
        return self.c(x)  # type: ignore[arg-type]


PADS: dict[str, Change] = {
    "zero": lambda x: F.pad(x, (1, 1, 1, 1)),
    "uneven": lambda x: F.pad(x, (0, 2, 1, 3)),
    "nothing": lambda x: F.pad(x, (0, 0, 0, 0)),
    "crop": lambda x: F.pad(x, (-1, 3, 2, 0)),
    "only crop": lambda x: F.pad(x, (-1, -1, -2, 0)),
    "value": lambda x: F.pad(x, (1, 1, 1, 1), value=2.0),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "twice": lambda x: F.pad(F.pad(x, (1, 1, 1, 1)), (0, 1, 0, 1)),
    "two convolutions": lambda x: F.pad(x, (1, 1, 1, 1)) + F.pad(x, (1, 1, 1, 1)),
}
PADDED_CONVS: dict[str, Callable[[], nn.Module]] = {
    "3x3": lambda: nn.Conv2d(4, 4, 3),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, 2, groups=4),
    "1x1": lambda: nn.Conv2d(4, 4, 1),
    "strided 1x1": lambda: nn.Conv2d(4, 4, 1, 2),
    "same": lambda: Same(4, 4, 3),
    "frozen": lambda: nn.Conv2d(4, 4, 3).requires_grad_(False),
}


def assert_as_torch(model: PaddedNet, dtype: torch.dtype, plan: gf.Plan | None = None, patch: int = 1) -> None:
    """Compare a step at patch 1 with torch's, for all changes; at larger patches it runs."""
    model, trained = model.to(dtype), 0
    for model.change in CHANGES.values():
        expected = run(copy.deepcopy(model), make_images(dtype))
        if expected is not None:
            trained += 1
            got = run_plan(model, make_images(dtype), plan)
            assert got is not None
            if patch == 1:
                assert_close(got, expected, 1e-9 if dtype is torch.float64 else 1e-4)
    assert trained or model.pad is PADS["reflect"]  # whose backward in torch reads its input


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "at once"])
@pytest.mark.parametrize("library", [True, False], ids=["library", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["conv", "conv and norm"])
@pytest.mark.parametrize("pad", PADS.values(), ids=PADS.keys())
def test_a_padded_map_may_change_behind_its_convolution(pad, norm, dtype, library, waits):
    model = PaddedNet(pad, nn.Conv2d(4, 4, 3), norm)
    randomise(model).eval()
    with contextlib.nullcontext() if library else native.off(), contextlib.nullcontext() if waits else at_once():
        assert_as_torch(model, dtype)


def make_padded(conv: nn.Module, norm: bool = False) -> PaddedNet:
    """Return a network that pads with zeros: in front of the convolution, or inside of it."""
    pad = (lambda x: x) if isinstance(conv, Same) else PADS["zero"]
    return randomise(PaddedNet(pad, conv, norm)).eval()  # type: ignore[return-value]


@pytest.mark.parametrize("patch", [1, 2, (1, 2), 9], ids=str)
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("conv", PADDED_CONVS.values(), ids=PADDED_CONVS.keys())
def test_it_may_for_every_convolution_and_patch(conv, checkpoints, patch):
    model = make_padded(conv(), norm=True)
    model.checkpoints = checkpoints
    for dtype in (torch.float64, torch.float32):
        assert_as_torch(model, dtype, gf.Plan.all(gf.Backward(patch=patch)), patch if patch == 1 else 0)


@pytest.mark.parametrize(
    "plan",
    [
        gf.Plan({"a": gf.Backward(patch=1), "c": gf.Backward(patch=1)}, rest="exact"),
        gf.Plan({"b": gf.Backward(patch=1)}, rest="exact"),
        gf.Plan.all(gf.Backward(patch=1, kernel="lumped")),
    ],
    ids=["others", "alone", "lumped"],
)
@pytest.mark.parametrize("conv", ["3x3", "same"])
def test_it_may_under_every_plan(plan, conv):
    model = make_padded(PADDED_CONVS[conv]())
    assert_as_torch(model, torch.float64, plan, 0 if "lumped" in str(plan) else 1)


def test_a_map_of_one_pixel_is_its_own_mean():
    """At patch 2, too: a patch is no larger than its map."""
    model = randomise(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Conv2d(3, 4, 2), PixelUser())).double().eval()
    expected, got = run(copy.deepcopy(model), make_images()), run_plan(model, make_images(), gf.Plan.all(gf.Backward(patch=2)))
    assert expected is not None
    assert got is not None
    assert_close({"2.b.weight": got["2.b.weight"]}, {"2.b.weight": expected["2.b.weight"]})


class PixelUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.pad(x, (0, 0, 0, 0)))
        x *= 2
        return y + x


class Branches(nn.Module):
    """Several convolutions of one map, padded or not."""

    def __init__(self, pads: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1, padding=0) for _ in pads)
        self.pads = [int(pad) for pad in pads]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        parts = [conv(F.pad(x, [pad] * 4) if pad else x) for conv, pad in zip(self.convs, self.pads, strict=True)]
        return torch.stack([part.mean((2, 3)) for part in parts]).sum(0)


@pytest.mark.parametrize(("patch", "most"), [(1, 2), (2, 1)])
def test_a_copy_is_held_once_and_only_where_the_map_itself_is_held_already(patch, most):
    def measure(pads: str) -> int:
        return measure_saved_bytes(gf.apply_(Branches(pads), gf.Plan.all(gf.Backward(patch=patch))), make_images(torch.float32))

    parameters = measure("00") - measure("0")
    one = measure("0")
    held = 2 * 4 * (8 // patch) ** 2 * 4
    assert [measure(pads) - one for pads in ("1", "11", "110")] == [0, parameters, 2 * parameters]
    assert measure("01") == one + parameters + (most - 1) * held
