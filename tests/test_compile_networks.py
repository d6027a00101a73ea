"""Compiled steps of every kind of network have the gradients of the eager engine, and really are compiled."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import gradfilter as gf
from cases import MODELS, draw, seeded
from compile_nets import EAGER, NETWORKS, ODD, Dropouts, FactorsOfZero, Flat, MapEndsInPlace, Odd
from gradfilter.bench.setup import shake_
from gradfilter.compile import backend, programs
from gradfilter.errors import NotCompilableError
from gradfilter.ops import native
from gradfilter.tensor import PatchTensor, leave
from helpers_safety import randomise

pytestmark = [
    # Dynamo asks every tensor that a function is given for its gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.skipif(native.load() is None, reason="programs need the C library"),
]
State = dict[str, Tensor | None]
Loss = Callable[[Any], Tensor]


@pytest.fixture(autouse=True)
def fresh():
    """Let no test meet what another one has compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def made(monkeypatch):
    """List what became of each graph: the program, or the error for which it runs eagerly."""
    found, make = [], backend.make_program

    def spied(*args: Any) -> Any:
        try:
            found.append(make(*args))
        except Exception as error:
            found.append(error)
            raise
        return found[-1]

    monkeypatch.setattr(backend, "make_program", spied)
    return found


def make_loss(y: Any) -> Tensor:
    """Return the cross entropy of all outputs, of each pixel where one is a map of logits."""
    outputs = y.values() if isinstance(y, dict) else y if isinstance(y, tuple) else [y]
    losses = []
    for i, value in enumerate(outputs):
        if value.is_floating_point() and value.requires_grad:
            classes, shape = (value.shape[1], (len(value), *value.shape[2:])) if value.dim() > 1 else (len(value), ())
            losses.append((1 + i) * F.cross_entropy(value, torch.randint(classes, shape, generator=seeded(3))))
    return torch.stack(losses).sum()


def step(model: nn.Module, call: Callable[..., Any], images: Tensor, loss: Loss = make_loss) -> State:
    """Return all that a step leaves behind: loss, gradients, buffers, parameters, the image, random numbers."""
    model.zero_grad()
    torch.manual_seed(0)
    images = images.detach().clone(memory_format=torch.preserve_format).requires_grad_(images.requires_grad)
    value = loss(call(images))
    value.backward()
    state: State = {"loss": value.detach(), "image": images.detach(), "image.grad": images.grad, "drawn": torch.rand(3)}
    state |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    state |= dict(model.state_dict())
    return {name: None if x is None else x.detach().clone() for name, x in state.items()}


def check_same(found: State, expected: State, tolerance: float) -> None:
    """Check that two steps have left the same: tensors relative to themselves, small ones to the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(g.norm()) for name, g in expected.items() if g is not None and name.endswith(".grad"))
    for name, want in expected.items():
        got = found[name]
        assert (got is None) == (want is None), name
        if got is not None and want is not None:
            assert got.dtype == want.dtype, name
            scale = float(want.double().norm()) + (1e-2 * largest if name.endswith(".grad") else 1e-30)
            assert float((got.double() - want.double()).norm()) <= tolerance * scale, name


def run_plainly(model: nn.Module) -> Callable[[Tensor], Any]:
    """Return a model that gives plain tensors, as a compiled one does: a loss outside of it sees no `PatchTensor`."""
    return lambda x: tree_map_only(PatchTensor, leave, model(x))


def check(model: nn.Module, plan: gf.Plan, images: Tensor, tolerance: float = 1e-10, loss: Loss = make_loss) -> None:
    """Check two compiled steps, with a change of all parameters between them."""
    gf.apply_(model, plan)
    twin = copy.deepcopy(model)
    call = torch.compile(model, backend="gradfilter")
    for _ in range(2):
        check_same(step(model, call, images, loss), step(twin, run_plainly(twin), images, loss), tolerance)
        with torch.no_grad():
            for net in (model, twin):
                for p in net.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=1e-3)


def make_network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    return randomise(NETWORKS[name]().to(dtype)).train()


def make_odd(kind: type[Odd], dtype: torch.dtype = torch.float64) -> Odd:
    torch.manual_seed(0)
    model = kind()
    if type(model).prepare is Odd.prepare:
        randomise(model)
    model.to(dtype).train()
    if isinstance(model, Flat):
        model.flatten()
    if isinstance(model, FactorsOfZero):
        model.zero()
    return model


def make_images(name: str = "", dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(2, 3, *((16, 24) if name == "transformer" else (32, 32)), seed=4).to(dtype)


def is_compiled(made: list[Any]) -> bool:
    """Tell whether there were graphs, and each has become a program."""
    return bool(made) and all(isinstance(program, programs.Compiled) for program in made)


@pytest.mark.parametrize("name", MODELS)
def test_the_networks_of_the_table(name, made):
    model = shake_(MODELS[name]()).double().train()
    norm = "eval" if name in ("mcunet-in3", "resnet18") else "train"
    check(model, gf.Plan.all(gf.Backward(grid=4), batch_norm=norm), draw(2, 3, 40, 48))
    assert is_compiled(made)


SLOW = "deeplab", "u-net", "pyramid", "transformer"
PLANS = {
    "patch4": gf.Plan.all(gf.Backward(patch=4)),
    "grid4-train": gf.Plan.all(gf.Backward(grid=4), batch_norm="train"),
    "lumped-train": gf.Plan.all(gf.Backward(patch=3, kernel="lumped"), batch_norm="train"),
}


@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name in NETWORKS for plan in PLANS if name not in SLOW or plan == "patch4"]
)
def test_every_kind_of_network(name, plan, made):
    check(make_network(name), PLANS[plan], make_images(name))
    assert is_compiled(made)


def test_tokens_at_patch_resolution(made):
    plan = gf.Plan.all(gf.Backward(patch=2, tokens=(4, 6)))
    check(make_network("transformer"), plan, make_images("transformer"))
    assert is_compiled(made)


class WithLoss(nn.Module):
    """A network and its loss, of each pixel."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits = self.net(x)["out"]
        return F.cross_entropy(logits, logits.detach().argmin(1))


def test_the_loss_of_each_pixel_inside(made):
    """There the gradient takes the way that it takes in eager mode: in front of the interpolation of the logits."""
    check(WithLoss(make_network("pyramid")), PLANS["patch4"], make_images(), loss=lambda loss: loss)
    assert is_compiled(made)


@pytest.mark.parametrize("name", NETWORKS)
def test_patch_one_is_torchs_own_gradient(name, made):
    model, norm = make_network(name), "train" if name in ("residual", "dense", "u-net") else "eval"
    exact, images = copy.deepcopy(model), make_images(name)
    for module in exact.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(norm == "train")
    gf.apply_(model, gf.Plan.all(gf.Backward(patch=1), batch_norm=norm))
    found = step(model, torch.compile(model, backend="gradfilter"), images)
    check_same(found, step(exact, exact, images), 1e-9)
    assert is_compiled(made)


@pytest.mark.parametrize("name", ["residual", "squeeze-excite", "convnext", "transformer", "u-net"])
def test_single_precision(name, made):
    images = make_images(name, torch.float32)
    check(make_network(name, torch.float32), gf.Plan.all(gf.Backward(patch=2)), images, 1e-5)
    assert is_compiled(made)


@pytest.mark.parametrize("keep", ["int8:nearest", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_keeps(keep, dtype, made):
    plan = gf.Plan.all(gf.Backward(patch=2, keep=keep))
    check(make_network("squeeze-excite", dtype), plan, make_images(dtype=dtype), 1e-10 if dtype is torch.float64 else 1e-5)
    assert is_compiled(made)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.01, 0.9), lambda p: torch.optim.AdamW(p, 1e-3)])
def test_ten_steps(make, made):
    model = gf.apply_(make_network("branches"), gf.Plan.all(gf.Backward(grid=4), batch_norm="train"))
    twin = copy.deepcopy(model)
    call = torch.compile(model, backend="gradfilter")
    optimizers = [make(net.parameters()) for net in (model, twin)]
    for i in range(10):
        images = draw(2, 3, 32, 32, seed=i)
        found, expected = step(model, call, images), step(twin, run_plainly(twin), images)
        check_same(found, expected, 1e-8)
        for optimizer in optimizers:
            optimizer.step()
    assert is_compiled(made)
    assert len(made) == 1


@pytest.mark.parametrize("norm", ["eval", "train"])
@pytest.mark.parametrize("kind", ODD)
def test_odd_networks(kind, norm, made):
    check(make_odd(kind), gf.Plan.all(gf.Backward(patch=4), batch_norm=norm), make_images())
    assert is_compiled(made)


@pytest.mark.filterwarnings("ignore::gradfilter.errors.ExitWarning")
@pytest.mark.parametrize("kind", EAGER)
def test_networks_that_run_eagerly(kind, made, caplog):
    with caplog.at_level(logging.WARNING):
        check(make_odd(kind), gf.Plan.all(gf.Backward(patch=4)), make_images())
    assert made
    assert all(isinstance(error, NotCompilableError) for error in made)
    assert EAGER[kind] in caplog.text


@pytest.mark.parametrize("keep", ["int8", "hosvd:0.9"])
def test_keeps_that_read_values_run_eagerly(keep, made, caplog):
    model = gf.apply_(make_odd(Odd), gf.Plan.all(gf.Backward(patch=4, keep=keep)))
    step(model, torch.compile(model, backend="gradfilter"), make_images())
    assert [type(error) for error in made] == [NotCompilableError]
    assert f"'{keep}', which reads values" in caplog.text


def test_what_is_not_foreseen_runs_eagerly(made, caplog, monkeypatch):
    monkeypatch.setattr(programs, "trace", lambda *args: 1 / 0)
    check(make_odd(Odd), gf.Plan.all(gf.Backward(patch=4)), make_images())
    assert [type(error) for error in made] == [ZeroDivisionError]
    assert "compiling it raised ZeroDivisionError: division by zero" in caplog.text


@pytest.mark.parametrize("used", [0, 1])
def test_what_only_unused_outputs_reach_has_no_gradient(used, made):
    images = make_images()
    check(
        make_network("u-net"),
        PLANS["patch4"],
        images,
        loss=lambda y: F.cross_entropy(list(y.values())[used], images[:, 0].long() % 5),
    )
    assert is_compiled(made)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_factors_of_zero(dtype, made, monkeypatch):
    """The library's task for the gradient of a batch norm divides by its factor, and says so where that is 0."""
    runs, interpret = [], programs.interpret_backward
    monkeypatch.setattr(programs, "interpret_backward", lambda *args: runs.append(0) or interpret(*args))
    images = make_images(dtype=dtype)
    check(make_odd(FactorsOfZero, dtype), gf.Plan.all(gf.Backward(patch=4)), images, 1e-10 if dtype is torch.float64 else 1e-5)
    assert is_compiled(made)
    assert bool(runs) == (dtype is torch.float32)


@pytest.mark.parametrize("make", [lambda x: x.requires_grad_(), lambda x: x.transpose(2, 3)], ids=["grad", "strided"])
@pytest.mark.parametrize("name", ["residual", "branches"])
def test_images_of_other_kinds(name, make, made):
    check(make_network(name), PLANS["grid4-train"], make(make_images()))
    assert is_compiled(made)


def test_outputs_are_laid_out_as_in_eager_mode(made):
    model = gf.apply_(make_odd(MapEndsInPlace), PLANS["patch4"])
    images, call = make_images(), torch.compile(model, backend="gradfilter")
    for x in (images, images.contiguous(memory_format=torch.channels_last)):
        assert call(x).stride() == model(x).stride()
    assert is_compiled(made)


def test_two_programs_of_one_model_draw_on(made):
    """Random numbers go on from step to step, and the compiling call draws none of its own."""
    model = gf.apply_(make_odd(Dropouts), PLANS["patch4"])
    twin, images = copy.deepcopy(model), make_images()
    call = torch.compile(model, backend="gradfilter")
    torch.manual_seed(0)
    found = [call(images).detach() for _ in range(3)]
    torch.manual_seed(0)
    for y in found:
        torch.testing.assert_close(y, twin(images).detach())
    assert is_compiled(made)
