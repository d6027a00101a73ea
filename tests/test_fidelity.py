"""Gradients without a trace, and how close filtered ones are to exact ones."""

import copy
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfilter as gf
from gradfilter.errors import GradFilterError, InputError
from gradfilter.fidelity import find_gradients
from helpers_safety import make_images, make_labels
from train_nets import small


def make_model(plan=None, seed=0):
    """A network with batch norms and dropout in training mode, in float64, under a plan."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = small().double()
    return gf.apply_(model, plan or gf.Plan.all(gf.Backward(patch=2), batch_norm="train"))


def make_batch(n=3, seed=1):
    return make_images(n, (14, 11), seed), make_labels(n, seed + 1)


def snapshot(model):
    """All that must not change: gradients, hooks, buffers (the objects and what they hold), modes, random state."""
    hooks = [
        [(key, id(hook)) for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks") for key, hook in
         getattr(m, kind).items()]
        for m in model.modules()
    ]  # fmt: skip
    buffers = {name: (id(b), b._version, b.tolist()) for name, b in model.named_buffers()}
    gradients = {name: None if p.grad is None else (id(p.grad), p.grad.tolist()) for name, p in model.named_parameters()}
    state = {name: (id(p), p.requires_grad, p._version) for name, p in model.named_parameters()}
    return hooks, buffers, gradients, state, [m.training for m in model.modules()], torch.get_rng_state().tolist()


def with_some_grads(model):
    """Give every other parameter a gradient."""
    for p in list(model.parameters())[::2]:
        p.grad = torch.full_like(p, 7.0)
    return model


@pytest.mark.parametrize("plan", [None, gf.Plan.last(1, gf.Backward(patch=4))], ids=["all", "last1"])
def test_gradients_are_those_of_backward(plan):
    model, (x, y) = make_model(plan), make_batch()
    twin = copy.deepcopy(model)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)
        F.cross_entropy(twin(x), y).backward()
    found = find_gradients(model, (x, y))
    assert list(found) == [name for name, p in twin.named_parameters() if p.requires_grad]
    for name, g in found.items():
        torch.testing.assert_close(g, twin.get_parameter(name).grad, rtol=0, atol=0)
        assert not g.requires_grad


def test_gradients_leave_no_trace():
    model = with_some_grads(make_model())
    model.get_submodule("4").eval()
    before = snapshot(model)
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    first, second = find_gradients(model, make_batch()), find_gradients(model, make_batch())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.rand(3), drawn)
    torch.set_rng_state(torch.tensor(before[-1], dtype=torch.uint8))
    assert snapshot(model) == before


def test_gradients_leave_a_graph_that_waits_for_its_backward_alone():
    model, (x, y) = make_model(), make_batch()
    loss = F.cross_entropy(model.eval()(x), y)
    find_gradients(model, (x, y))
    loss.backward()


def test_gradients_set_off_no_hooks_of_parameters():
    model, calls = make_model(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(calls.append)
    find_gradients(model, make_batch())
    assert calls == []


def test_default_loss_takes_the_first_of_several_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small().double().eval()

        def forward(self, x):
            return {"scores": self.net(x), "map": x}

    model, batch = Two(), make_batch()
    wanted = find_gradients(model.net, batch)
    assert {name.removeprefix("net."): g.tolist() for name, g in find_gradients(model, batch).items()} == {
        name: g.tolist() for name, g in wanted.items()
    }


def fail(outputs, targets):
    raise RuntimeError("no loss today")


WRONG = {
    "no scalar": (lambda out, y: F.cross_entropy(out, y, reduction="none"), r"a tensor of shape \[3\].*mean"),
    "a number": (lambda out, y: 3.0, "a float.*mean"),
    "detached": (lambda out, y: out.detach().mean(), "no gradient"),
    "not finite": (lambda out, y: out.mean() * float("nan"), "loss is nan"),
    "an infinite gradient": (lambda out, y: (out - out).abs().sqrt().sum(), "gradient of '.*' is not finite"),
    "an error": (fail, r"fails on outputs of shape \[3, 5\] and targets of shape \[3\].*no loss today"),
    "of something else": (lambda out, y: torch.ones(1, requires_grad=True).sum(), "no trained parameter takes part"),
}


@pytest.mark.parametrize(("loss", "message"), WRONG.values(), ids=WRONG)
def test_a_loss_that_has_no_gradient_is_refused(loss, message):
    model = with_some_grads(make_model())
    before = snapshot(model)
    with pytest.raises(InputError, match=message):
        find_gradients(model, make_batch(), loss)
    assert snapshot(model) == before


def test_wrong_shapes_are_refused():
    model, (x, y) = with_some_grads(make_model()), make_batch()
    before = snapshot(model)
    with pytest.raises(GradFilterError, match=r"the model fails on images of shape \[3, 2, 14, 11\]"):
        find_gradients(model, (x[:, :2], y))
    with pytest.raises(InputError, match=r"outputs of shape \[3, 5\] and targets of shape \[2\]"):
        find_gradients(model, (x, y[:2]))
    with pytest.raises(InputError, match=r"the batch is a Tensor.*\(images, labels\)"):
        find_gradients(model, cast(Any, x))
    assert snapshot(model) == before


def test_nothing_to_train_is_refused():
    with pytest.raises(InputError, match="no parameter to train"):
        find_gradients(small().requires_grad_(False), make_batch())
