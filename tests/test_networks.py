"""Whole networks: exact at patch 1, and the memory that is really saved."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfilter as gf
from cases import MODELS, draw, make_pair, seeded
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from helpers_safety import find_unexpected


def gradients(model, x, labels):
    """Return the loss and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), labels)
    names, params = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    gx, *gp = torch.autograd.grad(loss, [x, *params])
    return loss.detach(), {"input": gx, **dict(zip(names, gp, strict=True))}


def set_batch_norm(model, training):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(training)
    return model


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_patch_one_is_exact_backprop(name, batch_norm):
    model, exact = make_pair(name)
    set_batch_norm(exact, batch_norm == "train")
    gf.apply_(model, gf.Plan.all(gf.Backward(patch=1), batch_norm=batch_norm))
    x, labels = draw(3, 3, 66, 70), torch.randint(10, (3,), generator=seeded())
    (loss, got), (want_loss, want) = gradients(model, x, labels), gradients(exact, x, labels)
    assert loss == want_loss
    assert got.keys() == want.keys() == {"input", *(n for n, _ in exact.named_parameters())}
    scale = max(float(g.norm()) for g in want.values())
    for key, g in want.items():
        # Some gradients are zero but for rounding (an offset in front of a batch norm): those are held against the largest.
        assert float((got[key] - g).norm()) <= 1e-9 * float(g.norm()) + 1e-12 * scale, key
    for key, buffer in exact.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    assert not find_unexpected(model)


@pytest.mark.parametrize(
    "backward", [gf.Backward(patch=1), gf.Backward(patch=3), gf.Backward(), gf.Backward(patch=2, kernel="lumped")]
)
@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_saved_bytes_are_the_measured_ones(name, batch_norm, backward):
    model = MODELS[name]().train()
    gf.apply_(model, gf.Plan.all(backward, batch_norm=batch_norm))
    x = torch.zeros(2, 3, 66, 70)
    assert predict_saved_bytes(model, x) == measure_saved_bytes(model, x)


@pytest.mark.parametrize(("patch", "times"), [(4, 30), (2, 8)])
def test_mobilenet_v2_holds_a_fraction(patch, times):
    model = set_batch_norm(MODELS["mobilenet_v2"]().train(), training=False)
    x = torch.zeros(2, 3, 224, 224)
    exact = measure_saved_bytes(model, x)
    gf.apply_(model, gf.Plan.all(gf.Backward(patch=patch)))
    assert all(p.requires_grad for p in model.parameters())
    assert measure_saved_bytes(model, x) * times <= exact


class Block(nn.Module):
    """A residual block with every kind of neighbour that keeps full-resolution tensors in torch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(channels, 2 * channels, 1, bias=False), nn.BatchNorm2d(2 * channels)
        self.depthwise = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels, bias=False)
        self.norm2, self.project = nn.BatchNorm2d(2 * channels), nn.Conv2d(2 * channels, channels, 1)
        self.norm3 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu6(self.norm1(self.expand(x)))
        y = F.hardswish(self.norm2(self.depthwise(y)))
        return F.relu(x + self.norm3(self.project(y)), inplace=True)


def test_saved_bytes_are_the_sum_of_what_the_rules_say():
    """By hand: each conv its pooled input, ReLU6 and ReLU a byte per cell, hardswish a number; batch norm nothing."""
    n, c, cells = 2, 4, 5 * 6
    model = nn.Sequential(nn.Conv2d(3, c, 3, 2, 1), Block(c), Block(c), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 5))
    gf.apply_(model, gf.Plan.all(gf.Backward(patch=4)))
    x = torch.zeros(n, 3, 38, 46)  # 19×23 behind the stem: partial patches on both sides
    stem, block = 4 * n * 3 * 10 * 12, n * cells * (4 * c + 2 * c + 4 * 2 * c + 4 * 2 * c + 4 * 2 * c + c)
    assert measure_saved_bytes(model, x) == stem + 2 * block + 4 * n * c


def test_memory_is_really_saved_where_filtering_layer_by_layer_saves_nothing():
    """Facts §3.5: behind each filtered conv, batch norm and ReLU keep full-resolution tensors in the reference code.

    Torch holds nine maps here, the input and two per layer; we hold 1/r² of four maps and as many bytes.
    """
    layers = [m for _ in range(4) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
    model = set_batch_norm(nn.Sequential(*layers).train(), training=False)
    x = torch.zeros(2, 16, 32, 32)
    exact = measure_saved_bytes(copy.deepcopy(model), x)
    gf.apply_(model, gf.Plan.all(gf.Backward(patch=2)))
    assert measure_saved_bytes(model, x) * 7.2 == exact
    gf.apply_(model, gf.Plan.all(gf.Backward(patch=4)))
    assert measure_saved_bytes(model, x) * 28.8 == exact


@pytest.mark.parametrize("backward", [gf.Backward(patch=2), gf.Backward(grid=4), gf.Backward(patch=4, kernel="lumped")])
def test_training_lowers_the_loss(backward):
    model = MODELS["mcunet-in3"]().train()
    gf.apply_(model, gf.Plan.all(backward, batch_norm="train"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(8, 3, 64, 64, generator=seeded())
    labels = torch.arange(8) % 4
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_format_changes_nothing(memory_format):
    model, twin = make_pair("mcunet-in3")
    x, labels = draw(2, 3, 50, 50), torch.tensor([1, 2])
    for m in (model, twin):
        gf.apply_(m, gf.Plan.all(gf.Backward(patch=3)))
    twin.to(memory_format=memory_format)  # pyright: ignore[reportCallIssue]
    (_, got), (_, want) = gradients(model, x, labels), gradients(twin, x.contiguous(memory_format=memory_format), labels)
    for key, g in want.items():
        torch.testing.assert_close(got[key], g, rtol=1e-9, atol=1e-12)
