"""What by-passes `__torch_function__` still gives right gradients: functions, hooks, checkpoints, autocast, processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradfilter as gf
from gradfilter.errors import GradFilterError
from helpers_safety import (
    BACKWARDS,
    Gradients,
    Net,
    Run,
    allow_exits,
    applied,
    assert_close,
    assert_differ,
    ddp_worker,
    gradients,
    grads_of,
    leave,
    leave_behind,
    loss_of,
    make_images,
    make_labels,
    make_net,
    plain,
)

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
    assert "exit at torch.Tensor.retain_grad behind block1.conv2: expected" in gf.describe(net)


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
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_checkpointing_with_a_grid_and_two_image_sizes_before_backward(reentrant):
    """What is computed again in backward must see the image of its own forward, not the latest."""
    net, sizes = make_net(), [(32, 32), (40, 40)]
    results: list[Gradients] = []
    for together in (False, True):
        model = applied(Checkpointed(net, "block1", reentrant), gf.Backward(grid=4))
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
    keeps = (gf.Full(), gf.Int8(), gf.HOSVD(0.8), gf.Subspace(energy=0.9), gf.Fixed(rank=2))
    backwards = [gf.Backward(patch=1), *(gf.Backward(grid=2, keep=keep) for keep in keeps)]
    torch.multiprocessing.spawn(ddp_worker, (2, str(tmp_path / "store"), backwards, str(tmp_path / "out.pt")), nprocs=2)
    images, labels = make_images(4), make_labels(4)
    for backward, got in zip(backwards, torch.load(tmp_path / "out.pt"), strict=True):
        each = []
        for rank in range(2):  # each process has keeps of its own, which remember its own images
            model = applied(make_net(), backward)
            (loss_of(model, images[rank::2], labels[rank::2]) / 2).backward()
            each.append(grads_of(model))
        assert_close(got, {name: each[0][name] + each[1][name] for name in got}, 1e-11)
