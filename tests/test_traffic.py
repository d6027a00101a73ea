"""Bytes that operators move, against those counted by hand. No times are checked."""

import pytest
import torch
from torch import nn

from gradfilter import Backward, Plan, apply_, ops
from gradfilter.bench.profile import find_rows, make_inference, make_step
from gradfilter.bench.traffic import count_bytes
from gradfilter.ops import native

native_only = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
last = torch.channels_last


def make_block():
    """Return a network whose stem is followed by a pointwise and a depthwise convolution, and its images."""
    stem, hidden = nn.Conv2d(3, 16, 3, padding=1), (nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6())
    out = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32), nn.ReLU6()
    head = nn.Conv2d(32, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    network = nn.Sequential(stem, *hidden, *out, *head).to(memory_format=last)  # type: ignore[call-overload]
    return network, torch.ones(2, 3, 8, 8).contiguous(memory_format=last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, last])
def test_an_inference_moves_what_its_layers_hold(layout):
    network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()).eval()
    images = torch.ones(2, 3, 8, 8).contiguous(memory_format=layout)
    network = network.to(memory_format=layout)  # type: ignore[call-overload]
    moved = count_bytes(make_inference(network, images))
    x, w, y = 4 * 2 * 3 * 64, 4 * 16 * 27, 4 * 2 * 16 * 64
    assert sum(size for name, size in moved.items() if "conv" in name) == x + w + y
    assert moved["aten::native_batch_norm"] == y + 4 * 4 * 16 + y
    assert moved["aten::clamp_min"] == 2 * y
    assert sum(moved.values()) == x + w + 5 * y + 4 * 4 * 16


X, Y = torch.arange(6.0), torch.zeros(2, 6)
OPERATORS = {
    "in place, of a tensor that repeats": (lambda: Y.add_(X.expand(2, 6)), {"aten::add_": 48 + 24 + 48}),
    "the same tensor twice": (lambda: X.mul(X), {"aten::mul": 24 + 24}),
    "a result that is given": (lambda: torch.neg(X, out=torch.empty(6)), {"aten::neg": 24 + 24}),
    "a list of tensors": (lambda: torch.cat([X, Y[0]]), {"aten::cat": 24 + 24 + 48}),
    "only a shape is read": (lambda: torch.zeros_like(Y), {"aten::zero_": 48}),
    "views and then a copy": (lambda: X.view(2, 3).t().contiguous(), {"aten::copy_": 24 + 24}),
    "nothing to copy": (lambda: X.contiguous().to(torch.float32).reshape(3, 2), {}),
    "another type": (lambda: X.double(), {"aten::copy_": 24 + 48}),
    "an answer": (lambda: torch.equal(X, Y[0]), {"aten::equal": 24 + 24}),
    "a question about shapes": (lambda: X.is_same_size(Y), {}),
    "memory alone": (lambda: Y.new_empty(5).resize_(7), {}),
}


@pytest.mark.parametrize(("run", "expected"), OPERATORS.values(), ids=OPERATORS)
def test_an_operator_reads_what_it_is_given_and_writes_what_it_changes(run, expected):
    assert {name: size for name, size in count_bytes(run).items() if size} == expected


@native_only
def test_a_map_inside_the_library_moves_nothing():
    maps, w, taps = torch.ones(2, 16, 8, 8).contiguous(memory_format=last), torch.ones(32, 16, 1, 1), torch.ones(32, 1, 3, 3)
    end = ops.Ending(None, None, None, ops.RELU6, (4, 4))
    one = (1, 1)
    moved = count_bytes(lambda: ops.expand(maps, w, end, taps, one, one, one, (8, 8), end))
    x, y, cells = 4 * 2 * 16 * 64, 4 * 2 * 32 * 64, 2 * 32 * 4
    assert moved["gradfilter::expand"] == x + 4 * 32 * 16 + 4 * 32 * 9 + y + 2 * (4 + 1) * cells


@native_only
def test_a_step_tells_what_the_library_moves():
    network, images = make_block()
    step = make_step(apply_(network.train(), Plan.all(Backward(patch=4))), images)
    step()
    moved = {name: size for name, size in count_bytes(step).items() if name.startswith("gradfilter::")}
    assert {"gradfilter::expand", "gradfilter::pairs", "gradfilter::single", "gradfilter::norm_back"} <= set(moved)
    assert all(moved.values())
    x, y, cells = 4 * 2 * 16 * 64, 4 * 2 * 32 * 64, 2 * 32 * 4
    folded = 2 * 2 * 4 * 32  # scale and shift of both batch norms
    assert moved["gradfilter::expand"] == x + 4 * 32 * 16 + 4 * 32 * 9 + y + folded + 2 * (4 + 1) * cells


def test_rows_add_up_to_all_that_moves():
    network, images = make_block()
    run = make_inference(network.eval(), images)
    rows = find_rows("inference", run, rounds=1)
    *operators, rest, everything = rows
    assert rest[5:] == (None, None)
    assert everything[5] == pytest.approx(sum(row[5] for row in operators))
    assert everything[5] * 1e6 == pytest.approx(sum(count_bytes(run).values()))
