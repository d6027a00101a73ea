"""What the documents say runs."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradfilter as gf
from gradfilter.tensor import RULES
from helpers_safety import Run, applied, assert_close, gradients, make_net, plain

DOCS = Path(__file__).parents[1] / "docs"


@torch.library.custom_op("mylib::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def swish_backward(ctx, gy):
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(x)
    return gy * (s + x * s * (1 - s))


swish.register_autograd(swish_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("mylib::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_autograd(lambda ctx, gy: 2 * gy)


@pytest.fixture
def own_rules():
    """The rules of docs/rules.md, registered as the document does and taken off again."""
    before = dict(RULES)
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "rules.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(block, {"torch": torch})
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize("call", [swish, torch.ops.mylib.swish, twice], ids=["swish", "swish by name", "twice"])
def test_a_custom_op_with_a_rule_of_its_own_is_no_exit(call):
    net = make_net(Run(lambda x: call(x)))
    assert_close(gradients(applied(net)), gradients(plain(net)))
    model = applied(net, gf.Backward(patch=2))
    gradients(model)  # an exit would warn, and a warning is an error here
    assert "region: stem.0 to block2.conv2 (6 layers)" in gf.describe(model)
