"""What the documents say runs."""

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradfilter as gf
from gradfilter.cost_table import show_bytes
from gradfilter.tensor import RULES
from helpers_safety import Run, applied, assert_close, gradients, make_net, plain

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", [*DOCS.glob("*.md"), *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


CLEAN = (
    "resnet18 resnet18d resnetrs50 resnetv2_18 resnetv2_50x1_bit resnext50_32x4d regnetx_002 regnety_002 "
    "mobilenetv1_100 mobilenetv2_050 mobilenet_v2 mobilenet_v3_small mobilenetv3_large_075 "
    "mobilenetv4_conv_small_050 mobilenetv4_hybrid_medium efficientnet_b0 efficientnet_lite0 mnasnet_050 "
    "ghostnet_050 shufflenet_v2_x0_5 densenet121 vgg11 inception_v3 inception_v4 inception_resnet_v2 dla46x_c "
    "hrnet_w18_small repvgg_a0 convnext_atto convnext_tiny cspresnet50 UNet "
).split()
"""Networks without an unexpected exit, by promise."""


def test_the_coverage_table_keeps_its_promises():
    """The committed table; tests/test_coverage.py measures a part of it again."""
    rows = json.loads((DOCS / "results" / "coverage.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) >= 60
    assert all(float(row["patch-1 error"]) <= 1e-8 for row in rows)
    exits = {row["network"].rpartition(":")[2]: row["unexpected exits"] for row in rows}
    assert {name: exits.get(name) for name in CLEAN} == dict.fromkeys(CLEAN, "none")
    assert statistics.median(float(row["ratio"].rstrip("x")) for row in rows) >= 12


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


def test_the_bytes_of_a_loss_are_those_of_cost():
    table = (
        (DOCS / "rules.md").read_text(encoding="utf-8").split("| loss of every pixel | kept |\n|---|---|\n")[1].split("\n\n")[0]
    )
    said = [row.split("|")[2].strip() for row in table.splitlines()]
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 12, 1), torch.nn.Upsample(scale_factor=8, mode="bilinear")).train()
    images = torch.empty(4, 3, 45, 60, device="meta")
    found = [gf.cost(gf.apply_(model, gf.Plan.all(gf.Backward(patch=patch))), images) for patch in (4, 1)]
    sides = [*(one.plan for one in found), found[0].exact]
    assert said == [show_bytes(side.layers["(loss)"].saved_bytes) for side in sides]
