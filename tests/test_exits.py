"""Exits are seen and named; bad inputs are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import gradfilter as gf
from gradfilter.errors import ExitWarning, InputError
from helpers_safety import (
    Run,
    StandardisedConv,
    allow_exits,
    applied,
    assert_close,
    assert_differ,
    gradients,
    make_images,
    make_net,
    plain,
)

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
    exits = [line for line in gf.describe(model).splitlines() if "no patch rule" in line]
    assert exits == [f"  exit at torch.{name} behind block1.conv2: it has no patch rule" for name in ("sort", "cumsum")]


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
    assert gf.describe(model).count("exit") == gf.describe(model).count("exit at the mean over space") == 1
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


def test_forward_mode_differentiation_is_refused():
    images = make_images()
    with forward_ad.dual_level(), pytest.raises(InputError, match="forward-mode"):
        applied(make_net(), gf.Backward(patch=2))(forward_ad.make_dual(images, torch.ones_like(images)))


@pytest.mark.parametrize("args", [(), ("no tensor",), (None,)], ids=["nothing", "text", "none"])
def test_what_is_no_tensor_is_left_to_the_layer_to_refuse(args):
    layer = nn.Conv2d(3, 4, 3)
    with pytest.raises(TypeError) as plain:
        layer(*args)
    gf.apply_(layer, gf.Plan.all())
    with pytest.raises(TypeError) as planned:
        layer(*args)
    assert str(planned.value) == str(plain.value)


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


class Cube(torch.autograd.Function):
    """Somebody's own function, which no torch function tells of."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gy):  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gy


@torch.library.custom_op("gradfilter_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


torch.library.register_autograd("gradfilter_tests::twice", lambda ctx, gy: 2 * gy)

CUSTOM = {
    "Cube": lambda x: Cube.apply(x),
    "gradfilter_tests.twice": lambda x: twice(x),
    "on a view": lambda x: Cube.apply(x.permute(0, 2, 3, 1)[..., :3]).repeat(1, 1, 1, 2)[..., :5].permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_a_custom_op_trains_correctly_with_one_warning_that_says_what_to_do(name):
    net = make_net(Run(CUSTOM[name]))
    model = applied(net)
    with pytest.warns(ExitWarning) as caught:
        got = gradients(model)
    gradients(model)  # a second warning would be an error here
    assert_close(got, gradients(plain(net)))
    (message,) = [str(w.message) for w in caught if issubclass(w.category, ExitWarning)]
    assert "behind layer 'block1.conv2'" in message
    assert (name if name != "on a view" else "Cube") in message
    assert "docs/rules.md" in message
    assert "behind block1.conv2" in gf.describe(model)


class Residuals(nn.Module):
    """Two residual blocks in either order of the sum, then a function without a rule."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.stem, self.one, self.two = (nn.Conv2d(n, 4, 3, padding=1).double() for n in (3, 4, 4))
        self.swap = swap

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (self.one, self.two):
            x = block(x) + x if self.swap else x + block(x)
        return x.cumsum(1).mean((2, 3))


@pytest.mark.parametrize("swap", [False, True])
def test_behind_a_residual_the_latest_layer_counts(swap):
    model = gf.apply_(Residuals(swap), gf.Plan.all(gf.Backward(patch=2)))
    with pytest.warns(ExitWarning, match="behind layer 'two' ends at torch.Tensor.cumsum"):
        model(make_images())


def test_a_view_changed_in_place_is_named_as_such():
    def triple(x: Tensor) -> Tensor:
        y = x * 1.0
        y.permute(0, 2, 3, 1).mul_(3)
        return y * 2

    net = make_net(Run(triple))
    model = applied(net)
    with pytest.warns(ExitWarning, match="a view of an activation was changed in place"):
        got = gradients(model)
    assert_close(got, gradients(plain(net)))


def test_data_set_on_an_activation_is_an_exit():
    def double(x: Tensor) -> Tensor:
        y = x * 1.0
        y.data = y.data * 2
        return y * 3

    net = make_net(Run(double))
    model = applied(net)
    with pytest.warns(ExitWarning):
        got = gradients(model)
    assert_close(got, gradients(plain(net)))


def test_transforms_and_empty_maps_are_refused():
    model = applied(make_net())
    with pytest.raises(InputError, match=r"stem\.0.*torch\.func"):
        torch.func.grad(lambda x: model(x).sum())(make_images())
    with pytest.raises(InputError, match=r"stem\.0.*\[2, 3, 0, 5\].*empty"):
        model(torch.zeros(2, 3, 0, 5, dtype=torch.float64))
