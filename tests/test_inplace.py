"""In-place and aliased use, and every spelling of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.errors import ExitWarning
from gradfilter.tensor import PatchTensor
from helpers_safety import (
    BACKWARDS,
    Run,
    allow_exits,
    applied,
    assert_close,
    gradients,
    make_images,
    make_net,
    plain,
)

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
    assert isinstance(kept[0], PatchTensor)
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
