"""Small networks and comparisons for the tests of `apply_` and of what must never be silently wrong.

Classes and functions are at module level, so that models pickle and processes can be spawned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.hooks import find_applied

Gradients = Mapping[str, Tensor | None]
CLASSES = 3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_images(n: int = 2, size: tuple[int, int] = (19, 15), seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, 3, *size, generator=seeded(seed), dtype=torch.float64).to(dtype)


def make_labels(n: int = 2, seed: int = 2) -> Tensor:
    return torch.randint(CLASSES, (n,), generator=seeded(seed))


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all parameters and statistics from a seed of their own."""
    generator = seeded(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        scale = 1.4 / max(1, p[0].numel()) ** 0.5 if p.dim() > 1 else 0.2
        p.copy_(noise * scale + (1 if p.dim() == 1 and name.endswith("weight") else 0))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            noise = torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
            buffer.copy_(noise + 0.5 if name.endswith("var") else noise - 0.5)
    return model


class Block(nn.Module):
    """A residual block that works in place wherever it can."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += identity
        return self.relu(y)


class Net(nn.Module):
    """A residual network of odd widths; `middle` runs between its two blocks, inside every region."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1, bias=False), nn.BatchNorm2d(5), nn.ReLU(inplace=True))
        self.block1 = Block(5, 5)
        self.middle = middle or nn.Identity()
        self.block2 = Block(5, 7, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.middle(self.block1(self.stem(x))))
        return self.fc(self.pool(x).flatten(1))


def make_net(middle: nn.Module | None = None, seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    net = Net(middle).to(dtype)
    randomise(net, seed)
    return net


def applied(model: nn.Module, backward: gf.Backward | None = None, **options: Any) -> nn.Module:
    """Return a copy of a model, in training mode, with one way of going backward for all its layers."""
    return gf.apply_(copy.deepcopy(model), gf.Plan.all(backward or gf.Backward(patch=1), **options)).train()


def plain(model: nn.Module) -> nn.Module:
    """Return a copy of a model that runs as a plan lets it run: the statistics of its batch norms do not move."""
    return copy.deepcopy(model).eval()


def find_unexpected(model: nn.Module) -> dict[tuple[str, str], str]:
    """Return the exits that nobody expected, of the latest forward."""
    found = find_applied(model)
    assert found is not None
    return found.log.find_unexpected()


def loss_of(model: Callable[..., Tensor], images: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
    images = make_images() if images is None else images
    return F.cross_entropy(model(images), make_labels(len(images)) if labels is None else labels)


def gradients(model: nn.Module, images: Tensor | None = None) -> dict[str, Tensor | None]:
    """Return the gradients of one step for every parameter."""
    model.zero_grad()
    loss_of(model, images).backward()
    return grads_of(model)


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_close(got: Gradients, expected: Gradients, tolerance: float = 1e-9) -> None:
    """Compare gradients parameter by parameter, relative to the norm of each."""
    assert got.keys() == expected.keys()
    for name, g in got.items():
        wanted = expected[name]
        assert (g is None) == (wanted is None), f"{name}: {g is None=}, {wanted is None=}"
        if g is not None and wanted is not None:
            error = (g - wanted).norm() / wanted.norm().clamp(min=1e-12)
            assert error <= tolerance, f"{name}: relative error {error:.2e}"


def assert_differ(got: Gradients, expected: Gradients, name: str) -> None:
    """Make sure that a comparison could have failed: these two are not the same computation."""
    g, wanted = got[name], expected[name]
    assert g is not None
    assert wanted is not None
    assert (g - wanted).norm() > 1e-3 * wanted.norm()


def ddp_worker(rank: int, world: int, store: str, backwards: list[gf.Backward], out: str) -> None:
    """Train one step per way of going backward, on this rank's share of the batch; rank 0 writes the gradients down."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        images, labels = make_images(4), make_labels(4)
        results = []
        for backward in backwards:
            model = nn.parallel.DistributedDataParallel(applied(make_net(), backward))
            loss_of(model, images[rank::world], labels[rank::world]).backward()
            results.append(grads_of(model.module))
        if rank == 0:
            torch.save(results, out)
        torch.distributed.barrier()  # who leaves first takes gloo's threads from under the other
    finally:
        torch.distributed.destroy_process_group()


BACKWARDS = [gf.Backward(patch=1), gf.Backward(patch=2), gf.Backward(grid=2), gf.Backward(patch=2, kernel="lumped")]
allow_exits = pytest.mark.filterwarnings("ignore::gradfilter.errors.ExitWarning")


class Run(nn.Module):
    """Run a function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def leave(x: Tensor) -> Tensor:
    """End the region explicitly: a function without a rule, which changes nothing."""
    return x.as_strided(x.shape, x.stride())


def leave_behind(_m: nn.Module, _args: Any, y: Any) -> Tensor:
    """End the region behind a module, as a forward hook."""
    return leave(y)


class Everything(nn.Module):
    """Every kind of rule in one region."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True))
        self.depthwise = nn.Sequential(nn.Conv2d(6, 6, 5, padding=2, groups=6), nn.BatchNorm2d(6), nn.Hardswish(inplace=True))
        self.point = nn.Sequential(nn.Conv2d(6, 6, 1), nn.PReLU(6), nn.Dropout(0.25))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 2, 1), nn.ReLU(), nn.Conv2d(2, 6, 1), nn.Sigmoid())
        self.mirror = nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect")
        self.alone = nn.BatchNorm2d(6)
        self.frozen = nn.Conv2d(6, 6, 3, padding=1).requires_grad_(False)
        self.branch = nn.Sequential(nn.Conv2d(6, 4, (1, 3), (1, 2), (0, 1), bias=False), nn.LeakyReLU(0.1))
        self.other = nn.Sequential(nn.Conv2d(6, 3, 3, (1, 2), 1), nn.BatchNorm2d(3, affine=False), nn.GELU())
        self.scale = nn.Parameter(torch.ones(7, 1, 1))
        self.last = nn.Conv2d(7, 8, 3, groups=1)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.point(self.depthwise(x))
        y = y * self.squeeze(y) + x
        y = self.frozen(self.alone(self.mirror(y))) - 0.5 * x
        y = torch.cat([self.branch(y), F.relu(self.other(y))], 1) * self.scale
        y = self.last(F.pad(y.contiguous(), (1, 1, 0, 2)))
        return self.fc(torch.flatten(y.mean((2, 3)), 1))


def make_everything(dtype: torch.dtype = torch.float32) -> nn.Module:
    return randomise(Everything().to(dtype))


PLANS = {
    "patch 1": gf.Plan.all(gf.Backward(patch=1)),
    "patch 2": gf.Plan.all(gf.Backward(patch=2)),
    "patch (2, 3)": gf.Plan.all(gf.Backward(patch=(2, 3))),
    "patch 17": gf.Plan.all(gf.Backward(patch=17)),
    "lumped": gf.Plan.all(gf.Backward(patch=2, kernel="lumped")),
    "grid 2": gf.Plan.all(gf.Backward(grid=2)),
    "train": gf.Plan.all(gf.Backward(patch=2), batch_norm="train"),
    "frozen norms": gf.Plan.all(gf.Backward(patch=3), batch_norm="frozen"),
    "last 3": gf.Plan.last(3, gf.Backward(patch=2)),
    "rest exact": gf.Plan({"branch": gf.Backward(patch=4), "point": gf.Backward(grid=3)}, rest="exact"),
    "mixed": gf.Plan({"stem": gf.Backward(patch=2), "last": gf.Backward(patch=3), "*": gf.Backward(patch=1)}),
}


class Standardised(nn.Module):
    """Weight standardisation."""

    def forward(self, w: Tensor) -> Tensor:
        w = w - w.mean((1, 2, 3), keepdim=True)
        return w / (w.square().mean((1, 2, 3), keepdim=True) + 1e-6).sqrt()


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.conv2d(x, Standardised()(self.weight), self.bias, self.stride, self.padding, self.dilation, self.groups)
