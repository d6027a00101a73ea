"""Floating point operations: formulas, and whole networks against torch's own counter."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cases import MODELS
from gradfilter.flops import aten, count_flops

PRODUCTS = {aten.convolution, aten.convolution_backward, aten.mm, aten.addmm, aten.bmm}


class Count(TorchDispatchMode):
    """Add up flops: of convolutions and matrix products, and of everything."""

    products = total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flops = count_flops(func, args, kwargs or {}, out)
        self.total += flops
        self.products += flops if func.overloadpacket in PRODUCTS else 0
        return out


def count(run):
    with Count() as mode:
        result = run()
    return mode, result


def count_torch(run):
    with FlopCounterMode(display=False) as mode:
        result = run()
    return mode.get_total_flops(), result


def empty(*shape: int, grad: bool = False) -> Tensor:
    return torch.empty(*shape, device="meta", requires_grad=grad)


def test_products_of_resnet18_are_those_that_torch_counts():
    model, images = MODELS["resnet18"]().to("meta"), empty(2, 3, 96, 96)
    forward, y = count(lambda: model(images))
    expected, z = count_torch(lambda: model(images))
    assert forward.products == expected
    assert count(lambda: y.sum().backward())[0].products == count_torch(lambda: z.sum().backward())[0]
    assert forward.products < forward.total < 1.02 * forward.products


def test_the_backward_of_a_grouped_convolution_is_counted_per_group():
    """Torch counts the forward per group too, but the gradients as if every channel met every other."""
    layer, x = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False, device="meta"), empty(2, 8, 6, 5, grad=True)
    forward, y = count(lambda: layer(x))
    expected, z = count_torch(lambda: layer(x))
    assert forward.products == expected == 2 * 9 * 2 * 8 * 6 * 5
    assert count(lambda: y.backward(torch.empty_like(y)))[0].products == 2 * forward.products
    assert count_torch(lambda: z.backward(torch.empty_like(z)))[0] > 2 * forward.products


X = (2, 4, 6, 5)
SIZE = 2 * 4 * 6 * 5
CALLS = {
    "conv with a bias": (lambda x: F.conv2d(x, empty(7, 4, 3, 3), empty(7), padding=1), 2 * 7 * 30 * (2 * 4 * 9 + 1)),
    "transposed conv": (lambda x: F.conv_transpose2d(x, empty(4, 7, 2, 2), stride=2), 2 * SIZE * 7 * 4),
    "matrix product": (lambda x: x.flatten(1) @ empty(120, 3), 2 * 2 * 120 * 3),
    "batch norm, eval": (lambda x: F.batch_norm(x, empty(4), empty(4)), 2 * SIZE),
    "batch norm, train": (lambda x: F.batch_norm(x, empty(4), empty(4), training=True), 5 * SIZE),
    "ReLU": (F.relu, SIZE),
    "addition": (lambda x: x + x, SIZE),
    "sum": (lambda x: x.sum((2, 3)), SIZE),
    "average pooling": (lambda x: F.avg_pool2d(x, 2), 4 * 2 * 4 * 3 * 2),
    "softmax": (lambda x: x.softmax(1), 5 * SIZE),
    "views": (lambda x: x.permute(0, 2, 3, 1).reshape(2, -1)[:, :3], 0),
    "copies": (lambda x: torch.cat([x, x.clone()], 1), 0),
    "integers": (lambda x: torch.zeros(5, dtype=torch.int64, device="meta") + 1, 0),
}


@pytest.mark.parametrize(("call", "flops"), CALLS.values(), ids=CALLS)
def test_an_operator_counts_what_its_definition_says(call, flops):
    assert count(lambda: call(empty(*X)))[0].total == flops
