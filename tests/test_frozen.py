"""Frozen layers before the first trained one: they run as ever, only in fewer passes."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import gradfilter as gf
from cases import make_torchvision
from deferred_nets import assert_same, draw_images, in_order, make_parts, run_both, run_step
from deferred_uses import EXPANDED, FROZEN_USES, USES, make_use
from gradfilter import ops
from gradfilter.bench.setup import shake_
from gradfilter.frozen import FrozenTensor
from gradfilter.ops import native

pytestmark = pytest.mark.skipif(not native.is_on(), reason="the C library is not built")

PLAN = gf.Plan({"last": gf.Backward(patch=2)})
ALL_USES = {**USES, **FROZEN_USES}


@pytest.mark.parametrize("name", ALL_USES)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_uses(name, channels_last):
    x = draw_images(2, 3, 9, 10, channels_last=channels_last)
    assert_same(*run_both(make_parts(make_use(ALL_USES[name])), x, PLAN))


@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.filterwarnings("ignore")
def test_uses_of_expansions(name):
    assert_same(*run_both(make_parts(make_use(EXPANDED[name])), draw_images(2, 3, 9, 10), PLAN))


def test_expansions_and_taps_run_as_one(monkeypatch):
    calls, run = [], ops.expand
    monkeypatch.setattr(ops, "expand", lambda *args: calls.append(args) or run(*args))
    for count, name in enumerate(("mobile", "pad_before_taps"), 1):
        run_step(gf.apply_(make_parts(make_use(EXPANDED[name])), PLAN), draw_images(2, 3, 9, 10))
        assert len(calls) == count


def test_something_waits():
    seen = []
    model = gf.apply_(make_parts(lambda net, x: seen.append(net.norm(net.conv(x))) or F.relu(seen[0])), PLAN)
    model(draw_images(2, 3, 9, 10))
    assert type(seen[0]) is FrozenTensor
    assert seen[0].recipe is not None


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "shufflenet_v2_x0_5", "mobilenet_v3_small", "densenet121"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.filterwarnings("ignore")
def test_models(name, count):
    model = shake_(make_torchvision(name)).train()
    plan = gf.Plan.last(count, gf.Backward(patch=2))
    assert_same(*run_both(model, draw_images(2, 3, 64, 64), plan, lambda y: y.square().mean()), rtol=1e-3)


class Trunk(nn.Module):
    """The frozen layers alone."""

    def __init__(self, parts: nn.Module) -> None:
        super().__init__()
        self.parts: Any = parts

    def forward(self, x):
        net = self.parts
        return F.relu(net.norm(net.conv(F.relu(net.stem_norm(net.stem(x))))))


def run_traced(trunk, x):
    traced: Any = torch.jit.trace(trunk, x, check_trace=False)
    return traced(x * 0.3 + 1)


def run_vmapped(trunk, x):
    return torch.func.vmap(lambda image: trunk(image[None])[0])(x)


def run_forward(trunk, x):
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(trunk(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert tangent is not None
        return tangent.clone()


def run_jvp(trunk, x):
    return torch.func.jvp(trunk, (x,), (torch.ones_like(x),))[1]


def run_gradient(trunk, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(trunk(x).square().sum(), x)[0]


def run_no_grad(trunk, x):
    with torch.no_grad():
        return trunk(x)


def run_inference(trunk, x):
    with torch.inference_mode():
        return trunk(x).clone()


def run_of_inference(trunk, x):
    with torch.inference_mode():
        x = x.clone()
    return trunk(x) * 1


def run_autocast(trunk, x):
    with torch.autocast("cpu", torch.bfloat16):
        return trunk(x).float()


def run_removed(trunk, x):
    trunk(x)
    gf.remove_(trunk.parts)
    trunk.eval()(x).sum().backward()
    return trunk.parts.stem.weight.grad


def run_in_train_mode(trunk, x):
    trunk.train()(x)
    return torch.cat([*trunk.parts.norm.buffers()][:2])


RUNS = [run_traced, run_vmapped, run_forward, run_jvp, run_gradient, run_no_grad, run_inference, run_of_inference]
RUNS += [run_autocast, run_removed, run_in_train_mode]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore")
def test_trunk_alone(run):
    model = make_parts(make_use(USES["plain"]))
    x = draw_images(2, 3, 9, 10)
    got = run(Trunk(gf.apply_(copy.deepcopy(model), PLAN)), x)
    with in_order():
        want = run(Trunk(gf.apply_(copy.deepcopy(model), PLAN)), x)
    torch.testing.assert_close(got * 1, want, rtol=1e-4, atol=1e-5)


def test_outputs_are_plain():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.last = Trunk(make_parts(make_use(USES["plain"]))), nn.Conv2d(16, 16, 1)

        def forward(self, x):
            h = self.parts(x)
            return {"features": h, "y": [self.last(h)]}

    model = gf.apply_(Features(), gf.Plan({"last": gf.Backward(patch=2)}))
    assert type(model(draw_images(2, 3, 9, 10))["features"]) is torch.Tensor


def test_gradient_of_a_feature():
    """A frozen map that is told to need a gradient gets it."""
    grads = []
    for _ in range(2):
        kept = []
        model: Any = gf.apply_(make_parts(make_use(USES["plain"])), PLAN)
        model.norm.register_forward_hook(lambda _, args, out, kept=kept: kept.append(out.requires_grad_()) or kept[0])
        if grads:
            with in_order():
                run_step(model, draw_images(2, 3, 9, 10))
        else:
            run_step(model, draw_images(2, 3, 9, 10))
        grads.append(kept[0].grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-7)
