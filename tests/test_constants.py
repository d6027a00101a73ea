"""After the first steps nothing is copied from the host, and no value is read there: on other devices each would be a wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import gradfilter as gf
from cases import MODELS, draw
from gradfilter.ops import native, norm
from segment_nets import CLASSES, make_segmenter, segment_loss

CONSTRUCTORS = ("tensor", "as_tensor", "asarray", "from_numpy")
READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "_unique2")
"""Operators whose result, or the size of it, waits for values."""
PLANS = {
    "patch 4": gf.Plan({"*": gf.Backward(patch=4)}),
    "grid 4": gf.Plan({"*": gf.Backward(grid=4)}, batch_norm="train"),
    "lumped": gf.Plan({"*": gf.Backward(patch=(3, 4), kernel="lumped")}),
    "patch 1": gf.Plan({"*": gf.Backward(patch=1)}),
}


class Pooled(nn.Module):
    """All ways to a smaller and a larger map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, padding=1), nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.third, self.last = nn.ConvTranspose2d(8, 8, 3, 2), nn.Conv2d(8, 16, 1, 2)
        self.norm, self.shuffle = nn.GroupNorm(2, 8), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.hardswish(self.first(x)), 3, 2, 1, ceil_mode=True)
        x = F.leaky_relu(self.norm(F.avg_pool2d(self.second(x), 3, 2, 1)))
        x = F.interpolate(F.silu(self.third(x)), scale_factor=1.5, mode="bilinear")
        x = self.shuffle(self.last(F.adaptive_max_pool2d(F.pad(x, (1, 2, 0, 1), "reflect"), 9)))
        return F.adaptive_avg_pool2d(x[:, :, 1:], 3).flatten(1)


def record_waits(step: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the third of three steps makes of the host's values or reads there, the library being off."""
    with native.off():
        for _ in range(2):
            step()
        seen: list[str] = []

        def watch(name: str) -> Callable[..., Tensor]:
            real = getattr(torch, name)
            return lambda *args, **kwargs: seen.append(name) or real(*args, **kwargs)

        with monkeypatch.context() as patched, profile(activities=[ProfilerActivity.CPU]) as profiled:
            for name in CONSTRUCTORS:
                patched.setattr(torch, name, watch(name))
            step()
    names = [event.name.removeprefix("aten::") for event in profiled.events() or ()]
    return seen + [name for name in names if name in READS]


def test_what_waits_is_seen(monkeypatch):
    x = torch.arange(3.0)
    seen = record_waits(lambda: (torch.tensor(x.tolist()), float(x[0]), x[x > 1], bool(x[0])), monkeypatch)
    assert sorted(set(seen)) == ["_local_scalar_dense", "is_nonzero", "nonzero", "tensor"]


@pytest.fixture
def as_elsewhere(monkeypatch):
    """Let the factors of batch norms not be read, which is done on a CPU alone."""
    monkeypatch.setattr(norm, "scale_in_torch", lambda g, fixed, scales, real=norm.scale_in_torch: real(g, fixed, False))


def check_classifier(model: nn.Module, plan: gf.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a classifier on maps that end in partial patches."""
    model = gf.apply_(model, plan).train()
    x, labels = draw(2, 3, 70, 58).float(), torch.tensor([1, 2])
    assert record_waits(lambda: F.cross_entropy(model(x), labels).backward(), monkeypatch) == []


@pytest.mark.parametrize("plan", ["patch 4", "grid 4"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "mobilenet_v3_small"])
@pytest.mark.usefixtures("as_elsewhere")
def test_classifiers_wait_for_nothing(name, plan, monkeypatch):
    check_classifier(MODELS[name](), PLANS[plan], monkeypatch)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.usefixtures("as_elsewhere")
def test_smaller_and_larger_maps_wait_for_nothing(plan, monkeypatch):
    check_classifier(Pooled(), PLANS[plan], monkeypatch)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["aspp", "pyramid", "lateral", "concatenated"])
@pytest.mark.usefixtures("as_elsewhere")
def test_segmenters_wait_for_nothing(name, plan, monkeypatch):
    model = gf.apply_(make_segmenter(name, torch.float32), PLANS[plan]).train()
    x, labels = draw(2, 3, 48, 40).float(), torch.randint(CLASSES, (2, 48, 40), generator=torch.Generator().manual_seed(0))
    assert record_waits(lambda: segment_loss(model(x), labels).backward(), monkeypatch) == []
