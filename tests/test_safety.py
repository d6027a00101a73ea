"""Tests that nothing is ever silently wrong: code that by-passes the rules, aliases, in-place functions, other frames.

Most cases put a module between the two blocks of a small residual network. At patch 1 the gradient of every parameter must
be that of plain autograd; at patch 2 that of the same network with an explicit exit in the place of the by-pass.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradfilter as gf
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.errors import DoubleBackwardError, ExitWarning, GradFilterError, InputError
from gradfilter.tensor import PatchTensor
from helpers_safety import (
    CLASSES,
    Gradients,
    Net,
    applied,
    assert_close,
    assert_differ,
    ddp_worker,
    gradients,
    grads_of,
    loss_of,
    make_images,
    make_labels,
    make_net,
    plain,
    randomise,
)

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
    return x.view(x.shape)


def leave_behind(_m: nn.Module, _args: Any, y: Any) -> Tensor:
    """End the region behind a module, as a forward hook."""
    return leave(y)


# By-passes


class Square(torch.autograd.Function):
    """Somebody else's Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gy


class Doubled(torch.autograd.Function):
    """Somebody else's Function that works in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gy


class Same(torch.autograd.Function):
    """Somebody else's Function that returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * gy


def gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def scripted_gate(x: Tensor) -> Tensor:
    scripted: Any = torch.jit.script(gate)
    return scripted(x)


def traced_gate(x: Tensor) -> Tensor:
    traced: Any = torch.jit.trace(gate, torch.ones_like(x.detach()))
    return traced(x)


def per_image(x: Tensor) -> Tensor:
    return x * x.mean()


def hooked_tanh() -> nn.Module:
    module = nn.Tanh()
    module.register_full_backward_hook(lambda *_: None)
    return module


def hooked_norm() -> nn.Module:
    module = nn.BatchNorm2d(5)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda _m, gx, _gy: (2 * gx[0],))
    return module


def watched(x: Tensor) -> Tensor:
    x.register_hook(lambda g: 2 * g)
    return x * x


def retained(x: Tensor) -> Tensor:
    x.retain_grad()
    return x * x


BY_PASSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor] | None]] = {
    "autograd.Function": (partial(Run, Square.apply), torch.square),
    "autograd.Function on a view": (partial(Run, lambda x: Square.apply(x[:, :, 1:])), lambda x: x[:, :, 1:].square()),
    "autograd.Function in place": (partial(Run, lambda x: Doubled.apply(x.clone())), lambda x: 2 * x),
    "autograd.Function that returns its input": (partial(Run, Same.apply), lambda x: 3 * x - 2 * x.detach()),
    "jit.script": (partial(Run, scripted_gate), gate),
    "jit.trace": (partial(Run, traced_gate), gate),
    "vmap": (partial(Run, torch.vmap(per_image)), lambda x: torch.stack([per_image(image) for image in x])),
    "func.grad": (partial(Run, torch.func.grad(lambda x: x.pow(3).sum())), lambda x: 3 * x.square()),
    "full backward hook": (hooked_tanh, torch.tanh),
    "full backward hooks that change the gradient": (hooked_norm, None),
    "tensor hook": (partial(Run, watched), lambda x: (2 * x - x.detach()).square()),
    "retain_grad": (partial(Run, retained), lambda x: x * x),
    "out of a list": (partial(Run, lambda x: torch.stack([x, x.tanh()]).sum(0)), None),
    "numpy-like indexing": (partial(Run, lambda x: x[..., torch.arange(7, -1, -1)]), None),
    "detach": (partial(Run, lambda x: x + x.detach() * x), None),
    "no_grad inside": (partial(Run, lambda x: x * torch.no_grad()(torch.sigmoid)(x)), None),
}


def leave_before(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Run(lambda x: function(leave(x)))


@allow_exits
@pytest.mark.parametrize("make_middle", [row[0] for row in BY_PASSES.values()], ids=BY_PASSES.keys())
def test_by_passes_are_exact_at_patch_1(make_middle):
    net = make_net(make_middle())
    assert_close(gradients(applied(net)), gradients(plain(net)))


WITH_TWIN = {name: row for name, row in BY_PASSES.items() if row[1] is not None}


@allow_exits
@pytest.mark.parametrize("backward", BACKWARDS[1:], ids=str)
@pytest.mark.parametrize(("make_middle", "twin"), WITH_TWIN.values(), ids=WITH_TWIN.keys())
def test_by_passes_equal_an_explicit_exit(make_middle, twin, backward):
    net, exiting = make_net(make_middle()), make_net(leave_before(twin))
    got, expected = gradients(applied(net, backward)), gradients(applied(exiting, backward))
    assert_close(got, expected, 1e-11)
    assert_differ(got, gradients(plain(net)), "stem.0.weight")


@allow_exits
def test_a_module_with_a_full_backward_hook_sees_the_gradients_of_its_pixels():
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def look(name: str) -> Any:
        return lambda _m, gx, gy: seen.update({name: (gx[0].clone(), gy[0].clone())})

    net = make_net(nn.Tanh())
    for name, model in (("plain", plain(net)), ("ours", applied(net))):
        model.get_submodule("middle").register_full_backward_hook(look(name))
        gradients(model)
    for ours, theirs in zip(seen["ours"], seen["plain"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@allow_exits
@pytest.mark.parametrize("where", ["conv", "norm", "relu", "block", "model"])
@pytest.mark.parametrize("backward", BACKWARDS[:2], ids=str)
def test_full_backward_hooks_anywhere(where, backward):
    net = make_net()
    for relu in net.modules():
        if isinstance(relu, nn.ReLU):
            relu.inplace = False
    counts: dict[str, int] = {"plain": 0, "ours": 0}
    module = {"conv": "block1.conv2", "norm": "block2.bn1", "relu": "stem.2", "block": "block2", "model": ""}[where]

    def count(name: str) -> Any:
        return lambda *_: counts.update({name: counts[name] + 1})

    ours, theirs = applied(net, backward), plain(net)
    ours.get_submodule(module).register_full_backward_hook(count("ours"))
    theirs.get_submodule(module).register_full_backward_hook(count("plain"))
    images = make_images().requires_grad_()
    got, expected = gradients(ours, images), gradients(theirs, images)
    assert counts["ours"] == counts["plain"] == 1
    if backward.patch == 1:
        assert_close(got, expected)
    else:
        assert all(g is not None and g.isfinite().all() and g.any() for g in got.values())


class Watch(nn.Module):
    """Keep the activation that passes, with its gradient."""

    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x.retain_grad()
        self.seen = x
        return x


def test_retain_grad_gives_the_gradient_of_the_pixels():
    net = make_net(Watch())
    ours, theirs = applied(net), plain(net)
    assert_close(gradients(ours), gradients(theirs))
    grads = [model.get_submodule("middle").seen.grad for model in (ours, theirs)]  # type: ignore[union-attr]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


def test_watching_a_gradient_is_listed_and_does_not_warn():
    net = applied(make_net(Watch()), gf.Backward(patch=2))
    gradients(net)
    assert "exit behind block1.conv2: torch.Tensor.retain_grad (expected)" in gf.describe(net)


@pytest.mark.parametrize("watch", ["retain_grad", "register_hook"])
def test_a_gradient_that_is_watched_too_late_is_right_or_refused(watch):
    """The activation has been used by the time somebody asks for its gradient."""
    grads: list[Tensor] = []
    net = make_net(nn.Tanh())
    for model in (plain(net), applied(net)):
        seen: list[Any] = []
        model.get_submodule("middle").register_forward_hook(lambda _m, _args, y, seen=seen: seen.append(y))
        loss = loss_of(model)
        try:
            seen[0].retain_grad() if watch == "retain_grad" else seen[0].register_hook(grads.append)
        except GradFilterError:
            break
        loss.backward()
        if watch == "retain_grad":
            grads.append(seen[0].grad)
    else:
        assert len(grads) == 2, "the hook never fired"
        assert grads[1] is not None
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-12)
    assert len(grads) > 0


def test_the_gradient_of_the_images():
    net = make_net()
    images, again = make_images().requires_grad_(), make_images().requires_grad_()
    loss_of(applied(net), images).backward()
    loss_of(plain(net), again).backward()
    torch.testing.assert_close(images.grad, again.grad, rtol=1e-9, atol=1e-12)


# Checkpointing


class Checkpointed(nn.Module):
    """Run the parts of a network under activation checkpointing."""

    def __init__(self, net: Net, parts: str, reentrant: bool) -> None:
        super().__init__()
        self.net, self.parts, self.reentrant = net, parts.split(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for name in ("stem", "block1", "middle", "block2"):
            part = self.net.get_submodule(name)
            x = checkpoint(part, x, use_reentrant=self.reentrant) if name in self.parts else part(x)  # type: ignore[assignment]
        return self.net.fc(self.net.pool(x).flatten(1))


CHECKPOINTS = ["block1", "block2", "block1 block2", "middle", "block1 middle block2"]


@allow_exits
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("parts", CHECKPOINTS)
def test_checkpointing_is_exact_at_patch_1(parts, reentrant):
    net = make_net(nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.SiLU()))
    got = gradients(applied(Checkpointed(net, parts, reentrant)))
    assert_close({name.removeprefix("net."): g for name, g in got.items()}, gradients(plain(net)))


@pytest.mark.parametrize("backward", BACKWARDS[1:], ids=str)
@pytest.mark.parametrize("parts", CHECKPOINTS)
def test_checkpointing_by_saved_tensors_changes_nothing(parts, backward):
    net = make_net(nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.SiLU(), nn.Dropout(0.5)))
    results = []
    for listed in (parts, ""):
        torch.manual_seed(7)
        results.append(gradients(applied(Checkpointed(net, listed, False), backward)))
    assert_close(results[0], results[1], 1e-12)


@allow_exits
@pytest.mark.parametrize("backward", BACKWARDS[1:], ids=str)
def test_reentrant_checkpointing_equals_explicit_exits_around_the_block(backward):
    net = make_net()
    exiting = copy.deepcopy(net)
    exiting.block1.register_forward_pre_hook(lambda _m, args: leave(args[0]))
    exiting.block1.register_forward_hook(leave_behind)
    got = gradients(applied(Checkpointed(net, "block1", True), backward))
    expected = gradients(applied(exiting, backward))
    assert_close({name.removeprefix("net."): g for name, g in got.items()}, expected, 1e-11)


@allow_exits
def test_checkpointing_with_a_grid_and_two_image_sizes_before_backward():
    """What is computed again in backward sees the image of its own forward, not the latest.

    A reentrant checkpoint gives its block plain tensors, which say nothing of their image: there the latest one decides.
    """
    net, sizes = make_net(), [(32, 32), (40, 40)]
    results: list[Gradients] = []
    for together in (False, True):
        model = applied(Checkpointed(net, "block1", False), gf.Backward(grid=4))
        losses = []
        for size in sizes:
            losses.append(loss_of(model, make_images(size=size)))
            if not together:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        results.append(grads_of(model))
    assert_close(results[1], results[0], 1e-11)


# Autocast


def relative_error(got: Gradients, expected: Gradients) -> float:
    a = torch.cat([g.double().flatten() for g in got.values() if g is not None])
    b = torch.cat([g.double().flatten() for g in expected.values() if g is not None])
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
def test_autocast(batch_norm):
    net = make_net(nn.SiLU(), dtype=torch.float32)
    images = make_images(3, dtype=torch.float32)
    theirs = copy.deepcopy(net).train(batch_norm == "train")
    exact = gradients(copy.deepcopy(theirs), images)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(theirs, images)
        got = gradients(applied(net, batch_norm=batch_norm), images)
    assert {g.dtype for g in got.values() if g is not None} == {torch.float32}
    assert relative_error(expected, exact) > 1e-3  # bfloat16 was really in use
    assert relative_error(got, exact) < 2 * relative_error(expected, exact) + 0.01
    assert relative_error(got, expected) < 0.06


@pytest.mark.parametrize("backward", BACKWARDS[1:], ids=str)
def test_autocast_at_patch_resolution(backward):
    net = make_net(nn.SiLU(), dtype=torch.float32)
    images = make_images(3, dtype=torch.float32)
    model = applied(net, backward)
    expected = gradients(model, images)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, images)
    model.zero_grad()
    loss.backward()  # outside of autocast, as torch recommends
    got = grads_of(model)
    assert {g.dtype for g in got.values() if g is not None} == {torch.float32}
    assert relative_error(got, expected) < 0.06


def test_a_model_in_bfloat16():
    net = make_net(nn.SiLU(), dtype=torch.bfloat16)
    images = make_images(3, dtype=torch.bfloat16)
    got = gradients(applied(net), images)
    assert {g.dtype for g in got.values() if g is not None} == {torch.bfloat16}
    assert relative_error(got, gradients(plain(net), images)) < 0.06


# Several processes


def test_ddp_averages_the_gradients_of_the_processes(tmp_path):
    backwards = [gf.Backward(patch=1), gf.Backward(grid=2)]
    torch.multiprocessing.spawn(ddp_worker, (2, str(tmp_path / "store"), backwards, str(tmp_path / "out.pt")), nprocs=2)
    images, labels = make_images(4), make_labels(4)
    for backward, got in zip(backwards, torch.load(tmp_path / "out.pt"), strict=True):
        model = applied(make_net(), backward)
        for rank in range(2):
            (loss_of(model, images[rank::2], labels[rank::2]) / 2).backward()
        assert_close(got, grads_of(model), 1e-11)


# In place


def add_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y += x
    return torch.tanh(y)


def residual_after_relu(x: Tensor) -> Tensor:
    y = x * 2
    y = F.relu(y, inplace=True) + x
    return F.relu(y + x, inplace=True)


def scaled_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.mul_(torch.arange(1.0, 6.0, dtype=x.dtype)[:, None, None])
    y.sub_(0.5).div_(3).add_(x, alpha=0.25)
    return y


def slice_relu(x: Tensor) -> Tensor:
    y = x - 0.5
    y[:, :2].relu_()
    return y * x


def slice_relu_then_rules(x: Tensor) -> Tensor:
    y = x - 0.5
    y[:, 1:4].mul_(3)
    return F.silu(y, inplace=True) + x


def narrow_relu(x: Tensor) -> Tensor:
    y = x - 0.5
    first, second = y.narrow(1, 0, 2), y.narrow(1, 2, 3)
    first.relu_()
    return torch.cat([second * 2, first], 1) + y


def view_before_rule(x: Tensor) -> Tensor:
    y = x - 0.5
    part = y[:, :, 1:]
    y.relu_()
    return y + part.mean((2, 3), keepdim=True) * F.pad(part, (0, 0, 1, 0))


def whole_view_before_rule(x: Tensor) -> Tensor:
    y = x - 0.5
    flat = y.view(len(y), -1)
    y += x
    return y * flat.mean()


def alias_before_rule(x: Tensor) -> Tensor:
    y = x - 0.5
    z = y
    z.relu_()
    return y + x * 2


def without_rule(x: Tensor) -> Tensor:
    y = x - 0.5
    y.addcmul_(x, x)
    return F.relu(y, inplace=True)


def index_assignment(x: Tensor) -> Tensor:
    y = x - 0.5
    y[:, 0] = 0
    y[:, 1] = x[:, 2] * 2
    return y.relu_() + x


def copy_over(x: Tensor) -> Tensor:
    y = x - 0.5
    y.copy_(x * x)
    return y + x


def zeroed(x: Tensor) -> Tensor:
    y = x - 0.5
    z = y.detach()
    z.mul_(0.5)  # through an alias, as data: the value changes, the gradient does not
    return torch.tanh(y) + x


def mixed_dtype(x: Tensor) -> Tensor:
    y = x - 0.5
    y += torch.ones(5, 1, 1, dtype=torch.float32) / 3
    y *= torch.tensor(2)
    return y


def dropped_in_place(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    y = F.dropout(x * 2, 0.4, True, True)
    y = F.dropout2d(y, 0.4, True, True)
    return F.leaky_relu_(y, 0.2) + x


def pooled_to_its_own_size(x: Tensor) -> Tensor:
    y = x - 0.5
    z = F.adaptive_avg_pool2d(y, (y.shape[2], y.shape[3]))
    z.relu_()
    return y + z * 2


def dropout_of_nothing(x: Tensor) -> Tensor:
    y = x - 0.5
    z = F.dropout(y, 0.0, True)
    z.relu_()
    return y + z * 2


def detached_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.detach_()
    return y * 3 + x


def stopped_copy(x: Tensor) -> Tensor:
    return x + (x * 2).detach() + (x * 3).data


def contiguous_then_in_place(x: Tensor) -> Tensor:
    y = x - 0.5
    z = y.contiguous()
    z.relu_()
    return y + z


def out_of_a_clone(x: Tensor) -> Tensor:
    y = x.clone()
    y.relu_()
    return y * 2 + x


IN_PLACE = [
    add_in_place, residual_after_relu, scaled_in_place, slice_relu, slice_relu_then_rules, narrow_relu, view_before_rule,
    whole_view_before_rule, alias_before_rule, without_rule, index_assignment, copy_over, zeroed, mixed_dtype, dropped_in_place,
    pooled_to_its_own_size, dropout_of_nothing, detached_in_place, stopped_copy, contiguous_then_in_place, out_of_a_clone,
]  # fmt: skip


@allow_exits
@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_in_place_and_aliased_use_is_exact_at_patch_1(function):
    net = make_net(Run(function))
    ours, theirs = applied(net), plain(net)
    torch.testing.assert_close(ours(make_images()), theirs(make_images()), rtol=1e-10, atol=1e-10)
    assert_close(gradients(ours), gradients(theirs))


def chunk_relu(x: Tensor) -> Tensor:
    y = x - 0.5
    first, second = y.chunk(2, 1)
    first.relu_()
    return torch.cat([second, first], 1)


@allow_exits
@pytest.mark.parametrize("prepare", [plain, applied])
def test_in_place_use_of_a_chunk_is_refused_as_by_torch(prepare):
    with pytest.raises(RuntimeError, match="returns multiple views"):
        gradients(prepare(make_net(Run(chunk_relu))))


@pytest.mark.parametrize("backward", BACKWARDS, ids=str)
def test_in_place_modules_give_what_their_out_of_place_twins_give(backward):
    net = make_net(nn.Sequential(nn.Hardswish(inplace=True), nn.ReLU6(inplace=True)))
    twin = copy.deepcopy(net)
    for module in twin.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]
    assert_close(gradients(applied(net, backward)), gradients(applied(twin, backward)), 1e-12)


def test_a_shared_residual_is_not_overwritten():
    net = make_net()
    kept: list[Any] = []

    def look(_m: nn.Module, _args: Any, y: Any) -> None:
        kept.extend([y, y.detach().clone()])

    net.middle.register_forward_hook(look)
    gradients(applied(net, gf.Backward(patch=2)))
    assert type(kept[0]) is PatchTensor
    assert torch.equal(kept[0].detach(), kept[1])


def test_the_images_are_not_overwritten():
    images, again = make_images(), make_images()
    gradients(applied(make_net(), gf.Backward(patch=2)), images)
    assert torch.equal(images, again)


def test_an_index_assignment_is_listed_as_an_exit():
    net = applied(make_net(Run(lambda x: set_first(x * 2))), gf.Backward(patch=2))
    with pytest.warns(ExitWarning, match="__setitem__"):
        gradients(net)
    assert "__setitem__" in gf.describe(net)


def set_first(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


# Arguments by keyword, odd numbers


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid(input=)": lambda x: torch.sigmoid(input=x),
    "relu(input=)": lambda x: torch.relu(input=x),
    "clone(input=)": lambda x: torch.clone(input=x),
    "add(input=, other=)": lambda x: torch.add(input=x, other=x),
    "mul(input=, other=)": lambda x: torch.mul(input=x, other=2),
    "conv2d(input=, weight=)": lambda x: F.conv2d(
        input=x, weight=torch.ones(5, 1, 3, 3, dtype=x.dtype), padding="same", groups=5
    ),
    "F.relu(x, True)": lambda x: F.relu(x * 2, True),
    "a whole number in a tensor": lambda x: x / torch.tensor(3),
    "division of a number": lambda x: 1 / (x + 9),
    "subtraction from a number": lambda x: 1 - x,
    "leaky_relu with a negative slope": lambda x: F.leaky_relu(x - 0.5, -0.2),
    "hardtanh": lambda x: F.hardtanh(x, 0.1, 0.7),
    "power": lambda x: x**2,
    "where": lambda x: torch.where(x > 0.3, x, 2 * x),
    "to(copy=True)": lambda x: x.to(x.dtype, copy=True),
    "torch.dropout without training": lambda x: torch.dropout(x, 0.5, False),
    "cat with a plain tensor": lambda x: torch.cat([x, torch.ones_like(x), x], -3)[:, 3:8],
    "mean without axes": lambda x: x * x.mean(),
    "mean over one axis": lambda x: x * x.mean(3, keepdim=True),
    "product of two": lambda x: x * torch.tanh(x),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) * 2,
}


@allow_exits
@pytest.mark.parametrize("function", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_functions_in_every_spelling_are_exact_at_patch_1(function):
    net = make_net(Run(function))
    assert_close(gradients(applied(net)), gradients(plain(net)))


def test_division_by_zero_is_infinite_as_in_torch():
    model = gf.apply_(nn.Sequential(nn.Conv2d(3, 2, 1), Run(lambda x: x / 0)), gf.Plan.all(gf.Backward(patch=2)))
    assert not model(make_images(dtype=torch.float32)).isfinite().any()


# Weights that are functions of parameters


class Standardised(nn.Module):
    """Weight standardisation."""

    def forward(self, w: Tensor) -> Tensor:
        w = w - w.mean((1, 2, 3), keepdim=True)
        return w / (w.square().mean((1, 2, 3), keepdim=True) + 1e-6).sqrt()


def weight_norm(conv: nn.Conv2d) -> None:
    parametrizations.weight_norm(conv)


def standardise(conv: nn.Conv2d) -> None:
    parametrize.register_parametrization(conv, "weight", Standardised())


@pytest.mark.parametrize("parametrise", [weight_norm, standardise])
@pytest.mark.parametrize("backward", BACKWARDS[:2], ids=str)
def test_parametrised_weights(parametrise, backward):
    net = make_net()
    for conv in (net.block1.conv1, net.block2.conv2):
        parametrise(conv)
    if backward.patch == 1:
        assert_close(gradients(applied(net)), gradients(plain(net)))
    # The same gradient of the weight, pulled back by hand through the function of the parameters.
    got, twin = gradients(applied(net, backward)), make_net()
    for name in ("block1.conv1", "block2.conv2"):
        twin.get_parameter(f"{name}.weight").data.copy_(net.get_submodule(name).weight)  # type: ignore[arg-type]
    expected = gradients(applied(twin, backward))
    for name in ("block1.conv1", "block2.conv2"):
        conv = net.get_submodule(name)
        params = dict(conv.named_parameters())
        pulled = torch.autograd.grad(conv.weight, list(params.values()), expected[f"{name}.weight"])  # type: ignore[arg-type]
        assert_close({key: got[f"{name}.{key}"] for key in params}, dict(zip(params, pulled, strict=True)))


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.conv2d(x, Standardised()(self.weight), self.bias, self.stride, self.padding, self.dilation, self.groups)


def test_a_layer_that_computes_its_own_weight():
    net = make_net(StandardisedConv(5, 5, 3, 1, 1))
    assert_close(gradients(applied(net)), gradients(plain(net)))


def test_a_weight_shared_by_two_layers():
    net = make_net(nn.Conv2d(5, 5, 3, padding=1, bias=False))
    net.block1.conv2.weight = net.middle.weight  # type: ignore[assignment]
    assert_close(gradients(applied(net)), gradients(plain(net)))


def test_a_layer_that_is_called_twice():
    conv = nn.Conv2d(5, 5, 3, padding=1)
    net = make_net(nn.Sequential(conv, nn.ReLU(), conv))
    assert_close(gradients(applied(net)), gradients(plain(net)))
    assert_differ(gradients(applied(net, gf.Backward(patch=2))), gradients(plain(net)), "middle.0.weight")


@pytest.mark.parametrize("names", [("weight",), ("bias",), ("weight", "bias")], ids=" ".join)
@pytest.mark.parametrize("layer", ["middle.0", "middle.1"])
@pytest.mark.parametrize("backward", BACKWARDS[:2], ids=str)
def test_parameters_frozen_one_by_one(layer, names, backward):
    net = make_net(nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5)))
    expected = gradients(applied(net, backward))
    for name in names:
        net.get_parameter(f"{layer}.{name}").requires_grad_(False)
        expected[f"{layer}.{name}"] = None
    got = gradients(applied(net, backward))
    if backward.patch != 1 and layer == "middle.0" and "weight" in names:
        # Without a kept input the scale of the norm takes its gradient from the norm's own input: another projection.
        assert_close({"": got.pop("middle.1.weight")}, {"": expected.pop("middle.1.weight")}, 0.2)
    assert_close(got, expected, 1e-11)


# Graphs


def test_second_derivatives_are_refused():
    model = applied(make_net(), gf.Backward(patch=2))
    loss = loss_of(model)
    with pytest.raises(DoubleBackwardError, match=r"create_graph=True.*gradfilter\.remove_"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(DoubleBackwardError):
        loss_of(model, make_images().requires_grad_()).backward(create_graph=True)


@pytest.mark.parametrize("backward", BACKWARDS, ids=str)
def test_retain_graph_and_backward_twice_accumulates(backward):
    model = applied(make_net(nn.SiLU()), backward)
    once = gradients(model)
    model.zero_grad()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    assert_close(grads_of(model), once, 0)
    loss.backward()
    assert_close(grads_of(model), {name: 2 * g for name, g in once.items() if g is not None}, 1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("backward", BACKWARDS, ids=str)
def test_two_forwards_before_two_backwards_accumulate(backward):
    model = applied(make_net(), backward)
    batches = [make_images(seed=3), make_images(3, (11, 13), seed=4)]
    first, second = (gradients(model, images) for images in batches)
    model.zero_grad()
    losses = [loss_of(model, images) for images in batches]
    for loss in losses:
        loss.backward()
    total = {
        name: g + h for (name, g), h in zip(first.items(), second.values(), strict=True) if g is not None and h is not None
    }
    assert_close(grads_of(model), total, 1e-12)


def test_torch_autograd_grad_gives_what_backward_gives():
    model = applied(make_net(), gf.Backward(patch=2))
    grads = torch.autograd.grad(loss_of(model), list(model.parameters()))
    assert_close(dict(zip(dict(model.named_parameters()), grads, strict=True)), gradients(model), 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backward", BACKWARDS, ids=str)
def test_a_bad_number_in_the_gradient_stays_visible(bad, backward):
    model = applied(make_net(nn.SiLU()), backward)
    y = model(make_images())
    gy = torch.zeros_like(y)
    gy[0, 1] = bad
    y.backward(gy)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert not p.grad.isfinite().all(), name


@pytest.mark.parametrize("backward", BACKWARDS[:2], ids=str)
def test_a_bad_pixel_in_the_gradient_stays_visible(backward):
    model = gf.apply_(randomise(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 2, 3))), gf.Plan.all(backward))
    y = model(make_images(dtype=torch.float32))
    gy = torch.zeros(y.shape)
    gy[1, 0, 3, 4] = float("nan")
    y.backward(gy)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert p.grad.isnan().any(), name


def test_an_empty_batch_gives_zero_gradients():
    net = make_net()
    for model in (applied(net, gf.Backward(patch=2)), plain(net)):
        model(make_images(0)).sum().backward()
        assert not any(p.grad is None or p.grad.any() for p in model.parameters())


# Carriers, and what is kept


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


def test_every_kind_of_rule_in_one_network_is_exact_at_patch_1():
    net = make_everything(torch.float64)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ours = gf.apply_(copy.deepcopy(net), PLANS["patch 1"])
    assert_close(gradients(ours), gradients(plain(net)))
    assert "exit" not in gf.describe(ours)


def test_carriers_are_nan_and_without_storage():
    net = gf.apply_(make_everything(), PLANS["patch 2"])
    carriers: list[Tensor] = []

    def look(_m: nn.Module, _args: Any, y: Any) -> None:
        if type(y) is PatchTensor:
            carriers.append(y.carrier)
            assert y.carrier.shape == (*y.shape[:2], *(-(-n // p) for n, p in zip(y.shape[2:], y.patch, strict=True)))

    for module in net.modules():
        module.register_forward_hook(look)
    net(make_images(dtype=torch.float32))
    assert len(carriers) > 20
    for carrier in carriers:
        assert carrier.isnan().all()
        assert carrier.untyped_storage().nbytes() == carrier.element_size()
        assert carrier.requires_grad


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_all_that_is_kept_goes_through_saved_tensors(plan):
    """Kept copies are all that backward may use: the tensors themselves are overwritten before it."""
    model = gf.apply_(make_everything(), plan).train()
    torch.manual_seed(5)
    expected = gradients(model, make_images(dtype=torch.float32))
    storages: dict[int, tuple[Any, ...]] = {}
    known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            storages[x.untyped_storage().data_ptr()] = (x.detach(), x.untyped_storage())
        return x.detach().clone()

    torch.manual_seed(5)
    model.zero_grad()
    with saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(model, make_images(dtype=torch.float32))
    for x, _ in storages.values():
        if x.is_floating_point():
            torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).data.fill_(float("nan"))
    loss.backward()
    assert len(storages) > 5
    assert_close(grads_of(model), expected, 1e-6)


def test_saving_on_the_host_changes_nothing():
    model = applied(make_net(nn.SiLU()), gf.Backward(patch=2))
    expected = gradients(model)
    with save_on_cpu():
        assert_close(gradients(model), expected, 0)


def test_a_pack_hook_that_raises_stops_the_forward():
    def pack(x: Tensor) -> Tensor:
        raise MemoryError("no room")

    model = applied(make_net(), gf.Backward(patch=2))
    with pytest.raises(MemoryError, match="no room"), saved_tensors_hooks(pack, lambda x: x):
        model(make_images())
    assert all(m.training for m in model.modules())


def activations_alive(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Return how many of a model's inner maps are alive between forward and backward, and how many there were."""
    maps: dict[int, tuple[StorageWeakRef, Any]] = {}

    def look(module: nn.Module, _args: Any, y: Any) -> None:
        if y.dim() == 4 and y.shape[-1] > 1 and not isinstance(module, nn.Identity):
            maps[y.untyped_storage()._cdata] = (StorageWeakRef(y.untyped_storage()), weakref.ref(y))

    handles = [m.register_forward_hook(look) for m in model.modules()]
    loss = loss_of(model, images)
    for handle in handles:
        handle.remove()
    gc.collect()
    alive = sum(not storage.expired() or tensor() is not None for storage, tensor in maps.values())
    loss.backward()
    return alive, len(maps)


def test_no_map_of_full_resolution_stays_alive():
    net, images = make_everything(), make_images(dtype=torch.float32)
    alive, total = activations_alive(gf.apply_(copy.deepcopy(net), gf.Plan.all(gf.Backward(patch=4))), images)
    assert total >= 10
    assert alive == 0
    alive, total = activations_alive(plain(net), images)
    assert alive > total / 2


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("size", [(19, 15), (33, 32)])
def test_predicted_saved_bytes_are_those_measured(plan, size):
    model = gf.apply_(make_everything(), plan).train()
    images = make_images(3, size, dtype=torch.float32)
    measured = measure_saved_bytes(model, images)
    assert predict_saved_bytes(model, images) == measured
    assert predict_saved_bytes(model, images.to("meta")) == measured
    assert measured > 0


@pytest.mark.parametrize("prepare", [plain, partial(applied, backward=gf.Backward(patch=3))], ids=["plain", "patch 3"])
def test_predicted_saved_bytes_of_a_residual_network(prepare):
    model = prepare(make_net(nn.GELU()))
    assert predict_saved_bytes(model, make_images()) == measure_saved_bytes(model, make_images())


def test_saved_bytes_fall_with_the_patch():
    net, images = make_everything(), make_images(2, (64, 64), dtype=torch.float32)
    sizes = [
        measure_saved_bytes(gf.apply_(copy.deepcopy(net), gf.Plan.all(gf.Backward(patch=n))), images) for n in (1, 2, 4, 8)
    ]
    exact = measure_saved_bytes(plain(net), images)
    assert exact > 1.2 * sizes[0]
    assert all(a > 2.5 * b for a, b in pairwise(sizes))


def test_two_layers_that_read_the_same_map_keep_its_means_once():
    class Twin(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 1)
            self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return torch.cat([conv(x) for conv in self.convs], 1).mean((2, 3))

    one, two = (
        measure_saved_bytes(gf.apply_(Twin(n), gf.Plan.all(gf.Backward(patch=2))), make_images(dtype=torch.float32))
        for n in (1, 2)
    )
    assert one == two


class MetaOnly(TorchDispatchMode):
    """Count the bytes of real tensors that operators make."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self.made += x.numel() * x.element_size()
        return result


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_prediction_allocates_nothing_and_touches_nothing(plan):
    model = gf.apply_(make_everything(), plan).train()
    state = copy.deepcopy(model.state_dict())
    versions = {name: t._version for name, t in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    images = make_images(dtype=torch.float32).to("meta")
    with MetaOnly() as mode:
        predict_saved_bytes(model, images)
    assert mode.made <= 4096  # constants of a few numbers
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert torch.equal(tensor, state[name])
        assert tensor._version == versions[name]
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_prediction_for_a_batch_that_fits_nowhere():
    model = gf.apply_(make_everything(), PLANS["patch 2"])
    one = predict_saved_bytes(model, torch.empty(1, 3, 224, 224, device="meta"))
    many = predict_saved_bytes(model, torch.empty(100_000, 3, 224, 224, device="meta"))
    assert 0.99 < many / (100_000 * one) <= 1


# Exits


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x, dim=1).values + torch.cumsum(x, 2)


def test_an_unknown_function_warns_once_with_its_name_and_layer_and_is_exact():
    net = make_net(Odd())
    model = applied(net)
    with pytest.warns(ExitWarning) as caught:
        got = gradients(model)
    gradients(model)  # a second warning would be an error here
    messages = [str(w.message) for w in caught if issubclass(w.category, ExitWarning)]
    assert len(messages) == 1
    assert "'block1.conv2' ends at torch.sort: it has no patch rule" in messages[0]
    assert_close(got, gradients(plain(net)))
    exits = [line for line in gf.describe(model).splitlines() if line.startswith("exit")]
    assert exits == [f"exit behind block1.conv2: torch.{name} (it has no patch rule)" for name in ("sort", "cumsum")]


def test_the_warning_points_at_the_line_that_left_the_region():
    with pytest.warns(ExitWarning) as caught:
        gradients(applied(make_net(Odd()), gf.Backward(patch=2)))
    assert caught[0].filename == __file__


def test_each_model_warns_for_itself():
    for _ in range(2):
        with pytest.warns(ExitWarning):
            gradients(applied(make_net(Odd()), gf.Backward(patch=2)))


def ask_metadata(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    assert (x.size(), x.size(1), x.dim(), x.ndim, len(x), x.numel()) == (x.shape, c, 4, 4, n, n * c * h * w)
    assert (x.dtype, x.device.type, x.layout, x.is_cuda) == (torch.float64, "cpu", torch.strided, False)
    assert x.is_floating_point()
    assert x.is_contiguous()
    assert x.requires_grad
    assert not x.is_leaf
    assert x.grad_fn is not None
    assert x.stride()
    assert torch.is_tensor(x)
    assert torch.numel(x) == x.nelement()
    assert x.element_size() == 8
    assert x.data_ptr()
    assert x._version >= 0
    assert repr(x.shape)
    assert isinstance(x.detach().sum().item(), float)
    assert x.detach().isfinite().all()
    assert torch.isfinite(x).all()
    assert (x > x.detach().min()).any()
    assert x.argmax() >= 0
    return x


def test_asking_for_metadata_is_no_exit():
    model = applied(make_net(Run(ask_metadata)), gf.Backward(patch=2))
    got = gradients(model)
    assert "exit" not in gf.describe(model)
    assert_close(got, gradients(applied(make_net(), gf.Backward(patch=2))), 0)


# Bad inputs


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (torch.zeros(3, 9, 9), r"layer 'stem\.0' got a tensor of shape \[3, 9, 9\].*x\[None\]"),
        (torch.zeros(2, 3, 9, 9, dtype=torch.uint8), r"layer 'stem\.0' got a tensor of dtype torch\.uint8.*x\.float\(\) / 255"),
        (torch.zeros(2, 3, 9, 9, dtype=torch.int64), r"layer 'stem\.0' got a tensor of dtype torch\.int64"),
    ],
)
def test_bad_inputs_are_refused_with_the_layer_and_the_remedy(images, says):
    with pytest.raises(InputError, match=says):
        applied(make_net(), gf.Backward(patch=2))(images)


class Greedy(nn.Conv2d):
    """A layer that writes into its input."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__(5, 5, 3, padding=1)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.write(x)
        return super().forward(x)


class Residual(nn.Module):
    """Use the input of a layer once more behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x


@pytest.mark.parametrize(
    "write",
    [
        lambda x: F.relu(x, inplace=True),
        lambda x: x.mul_(2),
        lambda x: x.add_(x.detach()),
        lambda x: x.zero_(),
        lambda x: x.__setitem__((slice(None), 0), 0.0),
        lambda x: F.hardswish(x, inplace=True),
        lambda x: x.addcmul_(x.detach(), x.detach()),
        lambda x: x[:, :2].mul_(2),
    ],
    ids="relu mul add zero setitem hardswish addcmul slice".split(),
)
@allow_exits
def test_a_layer_that_changes_its_input_in_place_is_refused(write):
    model = applied(make_net(Residual(Greedy(write))), gf.Backward(patch=2))
    with pytest.raises(InputError, match=r"layer 'middle\.layer' changes its input in place.*inplace=False"):
        gradients(model)


def test_a_layer_called_by_keyword():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(5, 5, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(input=x)

    net = make_net(Named())
    model = applied(net)
    assert_close(gradients(model), gradients(plain(net)))
    assert "middle.conv          patch 1   1 " in gf.describe(model)


def test_a_layer_called_by_a_keyword_of_its_own():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = StandardisedConv(5, 5, 3, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x=x)

    net = make_net(Named())
    assert_close(gradients(applied(net)), gradients(plain(net)))


@pytest.mark.parametrize("patch", [(10, 8), (99, 99), (10, 99)])
def test_a_patch_larger_than_the_map_is_one_patch(patch):
    net = make_net()
    plans = [gf.Plan({"block1": gf.Backward(patch=p), "fc": gf.Backward()}) for p in ((10, 8), patch)]
    first, second = (gradients(gf.apply_(copy.deepcopy(net), plan)) for plan in plans)
    assert_close(second, first, 0)
    assert_differ(first, gradients(plain(net)), "block1.conv1.weight")


# Tracing


def make_step(model: nn.Module) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return a whole training step as a function of its inputs and parameters."""

    def step(images: Tensor, labels: Tensor, lr: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = F.cross_entropy(functional_call(model, leaves, (images,)), labels)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return loss.detach(), {name: p.detach() - lr * g for (name, p), g in zip(leaves.items(), grads, strict=True)}

    return step


@pytest.mark.parametrize("backward", [gf.Backward(patch=1), gf.Backward(patch=2), gf.Backward(grid=2)], ids=str)
def test_a_whole_step_traces_to_a_graph_that_trains(backward):
    model = applied(make_net(nn.Hardswish()), backward)
    params = {name: p.detach() for name, p in model.named_parameters()}
    step, lr = make_step(model), torch.tensor(0.05, dtype=torch.float64)
    graph = make_fx(step)(make_images(), make_labels(), lr, params)
    targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert "aten.convolution.default" in targets
    assert not [name for name in targets if name.startswith("aten.convolution_backward")]

    images, labels = make_images(seed=11), make_labels(seed=12)
    loss, updated = graph(images, labels, lr, params)
    expected_loss, expected = step(images, labels, lr, params)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=1e-12)
    assert_close(updated, expected, 1e-9)
    assert_differ(updated, params, "stem.0.weight")

    losses = []
    for _ in range(8):
        loss, params = graph(images, labels, lr, params)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("plan", [PLANS["patch 2"], PLANS["lumped"], PLANS["train"]], ids=["patch 2", "lumped", "train"])
def test_every_kind_of_rule_traces(plan):
    net = make_everything(torch.float64)
    net.get_submodule("point.2").p = 0.0  # type: ignore[assignment]
    model = gf.apply_(net, plan).train()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    lr = torch.tensor(0.05, dtype=torch.float64)
    graph = make_fx(make_step(model))(make_images(), make_labels(), lr, params)
    model.load_state_dict({**model.state_dict(), **buffers})
    args = (make_images(seed=11), make_labels(seed=12), lr, params)
    assert_close(graph(*args)[1], make_step(model)(*args)[1], 1e-9)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(5, 2, 1), nn.Conv2d(2, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


def test_a_squeeze_excite_traces_without_convolution_backward():
    model = applied(make_net(SqueezeExcite()), gf.Backward(patch=2))
    params = {name: p.detach() for name, p in model.named_parameters()}
    graph = make_fx(make_step(model))(make_images(), make_labels(), torch.tensor(0.05, dtype=torch.float64), params)
    assert not [node for node in graph.graph.nodes if "convolution_backward" in str(node.target)]


# Imports


def test_the_core_import_is_lean():
    heavy = "timm torchvision sklearn lightning scipy PIL flwr onnx pandas matplotlib hypothesis pytest".split()
    code = f"import sys, gradfilter, gradfilter.cost; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
