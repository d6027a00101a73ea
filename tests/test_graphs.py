"""Weights that are functions of parameters, and how graphs are used."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import gradfilter as gf
from gradfilter.errors import DoubleBackwardError
from helpers_safety import (
    BACKWARDS,
    Standardised,
    StandardisedConv,
    applied,
    assert_close,
    assert_differ,
    gradients,
    grads_of,
    loss_of,
    make_images,
    make_net,
    plain,
    randomise,
)

# Weights that are functions of parameters


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
