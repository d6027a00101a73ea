"""Odd layouts and odd spellings: whatever a model writes, gradients are torch's at patch 1, and losses at any patch.

With an input that is constant in each patch and functions that act on every pixel alike, gradients are torch's at any patch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import gradfilter as gf
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.hooks import find_applied
from helpers_safety import allow_exits, assert_close, find_unexpected, grads_of, randomise

CHANNELS = 6
Function = Callable[["Layouts", Tensor], Any]


class Layouts(nn.Module):
    """A 1×1 convolution and a function behind it, which may use trained parameters."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 1)
        self.function = function
        self.matrix = nn.Parameter(torch.zeros(CHANNELS, CHANNELS))
        self.vector = nn.Parameter(torch.zeros(CHANNELS))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.norm = nn.BatchNorm3d(CHANNELS)
        self.groups = nn.GroupNorm(2, CHANNELS)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.stem(x))


def make(function: Function) -> nn.Module:
    model = Layouts(function).double().eval()
    randomise(model)
    return model


def make_patches(n: int, size: tuple[int, int], patch: int) -> Tensor:
    """Return images that are constant in each patch."""
    cells = torch.randn(n, 3, *(-(-side // patch) for side in size), generator=torch.Generator().manual_seed(1)).double()
    return cells.repeat_interleave(patch, 2).repeat_interleave(patch, 3)[:, :, : size[0], : size[1]].clone()


def weigh(output: Any) -> Tensor:
    """Return a loss of any tensors, that has another gradient at every pixel."""
    parts = output if isinstance(output, (tuple, list)) else [output]
    waves = [torch.arange(t.numel(), dtype=t.dtype).mul(1.7).sin().reshape(t.shape) + 0.1 for t in parts]
    return torch.stack([(t * wave + 0.1 * t * t).sum() for t, wave in zip(parts, waves, strict=True)]).sum()


def run(model: nn.Module, images: Tensor) -> tuple[float, dict[str, Tensor | None]]:
    model.zero_grad()
    loss = weigh(model(images))
    loss.backward()
    return float(loss.detach()), grads_of(model)


def write_first(x: Tensor) -> Tensor:
    """Write into the first channel: a function without a rule, behind which x is an ordinary tensor."""
    y = x * 2
    y[:, 0] = 0.5
    return y


def pair(x: Tensor, dim: int) -> Tensor:
    return torch.stack([x, x.tanh()], dim)


VIEWS: dict[str, Function] = {
    "map of two axes": lambda m, x: (x[0, 0] * m.scalar).tanh(),
    "map of two axes, reduced": lambda m, x: x.mean((0, 1)).tanh(),
    "map of two axes against a map of four": lambda m, x: x * x.sum(1)[0],
    "tokens alone": lambda m, x: x[0, 0].flatten().tanh(),
    "axis behind columns": lambda m, x: x.unsqueeze(-1).tanh() * m.scalar,
    "axis behind columns, by index": lambda m, x: F.relu(x[..., None]) * 2,
    "stack behind columns": lambda m, x: pair(x, -1).softmax(-1),
    "maximum behind columns": lambda m, x: pair(x, -1).max(-1).values,
    "channels behind columns": lambda m, x: F.linear(x.unsqueeze(-1) * m.vector, m.matrix).tanh(),
    "batch norm of five axes": lambda m, x: m.norm(pair(x, -1)),
    "group norm of five axes": lambda m, x: m.groups(pair(x, -1)),
    "prelu of five axes": lambda m, x: F.prelu(pair(x, -1), m.vector),
    "squeeze": lambda m, x: x.squeeze().tanh(),
    "squeeze of columns": lambda m, x: x.squeeze(-1).tanh() * m.scalar,
    "squeeze of rows and columns": lambda m, x: x.squeeze((2, 3)).tanh(),
    "squeeze of a channel": lambda m, x: x[:, :1].permute(0, 2, 3, 1).squeeze(-1).tanh(),
    "narrow to all rows": lambda m, x: x.narrow(2, 0, x.shape[2]).tanh(),
    "split into all columns": lambda m, x: x.split([x.shape[3]], 3)[0].tanh(),
    "49 channels and a new axis": lambda m, x: torch.cat([x] * 9, 1)[:, :49].unsqueeze(1).tanh(),
}
SPELLINGS: dict[str, Function] = {
    "max(other=)": lambda m, x: torch.max(x, other=0.5 * x + 0.1),
    "max(axis=)": lambda m, x: torch.max(x, axis=1)[0],  # type: ignore[call-overload]
    "max(dim=, keepdim=)": lambda m, x: torch.max(x, dim=1, keepdim=True).values * x,
    "sum(dim=[])": lambda m, x: x.sum(dim=[]) * x,
    "matmul(other=)": lambda m, x: torch.matmul(x.permute(0, 2, 3, 1), other=m.matrix),
    "repeat(repeats=)": lambda m, x: x.repeat(repeats=(1, 2, 1, 1)).tanh(),  # type: ignore[call-arg]
    "complex factor": lambda m, x: (x * (2 + 1j)).imag + (x + 1j).real,
    "where(condition=)": lambda m, x: torch.where(condition=x > 0, input=x, other=torch.zeros_like(x.detach())),
    "einsum, a broadcast weight": lambda m, x: torch.einsum("nchw,dc->ndhw", x, m.matrix[:, :1]),
    "einsum, a broadcast map": lambda m, x: torch.einsum("nchw,c->nchw", x[:, :1], m.vector),
    "einsum of what was written to": lambda m, x: torch.einsum("dc,nchw->ndhw", m.matrix, write_first(x)),
    "einsum of what was written to, first": lambda m, x: torch.einsum("nchw,dc->ndhw", write_first(x), m.matrix),
}
SIZES = [(2, (8, 12)), (1, (5, 7)), (2, (1, 7)), (1, (6, 1)), (1, (1, 1))]


@allow_exits
@pytest.mark.parametrize("function", [*VIEWS.values(), *SPELLINGS.values()], ids=[*VIEWS, *SPELLINGS])
@pytest.mark.parametrize("patch", [1, 2, 3, 20])
def test_gradients_are_those_of_torch(function, patch):
    """At a patch of 20 every carrier is one cell, which no function must take for an axis to drop."""
    model = make(function)
    for n, size in SIZES:
        images = make_patches(n, size, patch)
        ours = gf.apply_(copy.deepcopy(model), gf.Plan.all(gf.Backward(patch=patch)))
        (loss, got), (expected_loss, expected) = run(ours, images), run(model, images)
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        assert_close(got, expected)
        assert measure_saved_bytes(ours, images) == predict_saved_bytes(ours, images)


TRACED: dict[str, Function] = {
    "permute": lambda m, x: F.gelu(F.linear(x.permute(0, 2, 3, 1), m.matrix)).permute(0, 3, 1, 2),
    "tokens": lambda m, x: x.flatten(2).transpose(1, 2).reshape(len(x), -1, 2, 3).softmax(-1),
    "chunk": lambda m, x: torch.cat([x.chunk(2, 1)[1], x.chunk(2, 1)[0].tanh()], 1),
    "index": lambda m, x: x[:, 1:4, None].tanh() * m.scalar,
    "crop": lambda m, x: x[:, :, 1:, ::2].tanh(),
    "expand": lambda m, x: x[:, :1].expand(-1, CHANNELS, -1, -1) * m.vector[:, None, None],
    "max": lambda m, x: x.max(1).values.tanh(),
}


@pytest.mark.parametrize("function", TRACED.values(), ids=TRACED.keys())
@pytest.mark.parametrize("patch", [1, 2])
def test_views_trace(function, patch):
    model = gf.apply_(make(function), gf.Plan.all(gf.Backward(patch=patch)))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def step(images: Tensor, params: dict[str, Tensor]) -> list[Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = weigh(functional_call(model, leaves, (images,)))
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return [loss.detach(), *(g for g in grads if g is not None)]

    graph = make_fx(step)(make_patches(2, (8, 12), 1), params)
    images = make_patches(2, (8, 12), 2)
    for got, expected in zip(graph(images, params), step(images, params), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


OUTPUTS: dict[str, Function] = {
    "permute": lambda m, x: x.permute(0, 2, 3, 1),
    "tokens in a tuple": lambda m, x: (x, [x.tanh().flatten(2).transpose(1, 2)]),
    "slice in a dictionary": lambda m, x: {"a": x[:, :2], "b": x.mean((2, 3))},
}


@pytest.mark.parametrize("function", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_an_output_that_is_a_view_is_no_by_pass(function):
    model = gf.apply_(make(function), gf.Plan.all(gf.Backward(patch=2)))
    model(make_patches(1, (8, 12), 1))
    found = find_applied(model)
    assert found is not None
    assert found.log.bypasses == {}
    assert not find_unexpected(model)


def test_multi_head_attention_is_an_expected_exit():
    attention = nn.MultiheadAttention(CHANNELS, 2, batch_first=True).double()
    model = make(lambda m, x: attention(*[x.flatten(2).transpose(1, 2)] * 3)[0])
    gf.apply_(model, gf.Plan.all(gf.Backward(patch=2)))
    weigh(model(make_patches(2, (8, 12), 2))).backward()
    assert not find_unexpected(model)
