"""Layers that wait for what comes behind them: nobody sees that they do."""

import copy
import gc
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch.utils._pytree import tree_map_only

import gradfilter as gf
from cases import make_torchvision
from deferred_nets import assert_same, count_saved, draw_images, in_order, make_parts, run_both, run_step
from deferred_uses import EXPANDED, USES, make_use
from gradfilter import ops
from gradfilter.bench.setup import shake_
from gradfilter.emit import DeferredTensor
from gradfilter.errors import InputError
from gradfilter.ops import native
from random_networks import networks, sizes

pytestmark = pytest.mark.skipif(not native.is_on(), reason="the C library is not built")

ALL = USES | EXPANDED
IMAGES = {"channels_last": ((2, 3, 9, 10), 2, True), "pixels": ((2, 3, 9, 10), 1, True), "contiguous": ((1, 3, 5, 5), 3, False)}
"""Shape, patch and memory format; the last has one image, and maps that are not whole patches."""


def make_plan(patch=2):
    return gf.Plan.all(gf.Backward(patch=patch), batch_norm="eval")


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.filterwarnings("ignore")
def test_uses(name, images):
    shape, patch, channels_last = IMAGES[images]
    x = draw_images(*shape, channels_last=channels_last)
    assert_same(*run_both(make_parts(make_use(ALL[name])), x, make_plan(patch)))


@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.parametrize("patch", [2, 3])
@pytest.mark.filterwarnings("ignore")
def test_uses_of_expansions(name, patch):
    assert_same(*run_both(make_parts(make_use(EXPANDED[name])), draw_images(2, 3, 9, 10), make_plan(patch)))


@pytest.mark.parametrize("choice", [{"kernel": "lumped"}, {"keep": gf.Int8(stochastic=False)}], ids=str)
def test_other_choices_behind_expansions(choice):
    plan = gf.Plan.all(gf.Backward(patch=2, **choice), batch_norm="eval")
    assert_same(*run_both(make_parts(make_use(EXPANDED["mobile"])), draw_images(2, 3, 9, 10), plan))


def test_expansions_and_taps_run_as_one(monkeypatch):
    """Without this, the tests above could pass for want of anything to test."""
    calls, run = [], ops.expand
    monkeypatch.setattr(ops, "expand", lambda *args: calls.append(args) or run(*args))
    for count, name in enumerate(("mobile", "pad_before_taps"), 1):
        model = gf.apply_(make_parts(make_use(EXPANDED[name])), make_plan())
        run_step(model, draw_images(2, 3, 9, 10))
        assert len(calls) == count


def test_what_has_a_gradient_is_computed_for_it():
    """Of a map that nobody has read, not even torch's functions on the way to a gradient."""
    outputs: list[Any] = []
    model = gf.apply_(make_parts(lambda net, x: outputs.append(net.expand(x)) or x), make_plan())
    grads = []
    for order in (nullcontext, in_order):
        model.zero_grad()
        with order():
            model(draw_images(2, 3, 9, 10))
            y = outputs.pop()
            assert (y.recipe is not None) == (order is nullcontext)
            arguments = (y,), (torch.ones(y.shape),), False, False, ()
            torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
                *arguments, allow_unreachable=True, accumulate_grad=True
            )
        grads.append([model.get_parameter(f"{name}.weight").grad for name in ("grow", "grow_norm", "taps", "stem")])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


BYPASSES = {
    "norm": "c = net.wide(x); b = net.norm(c); scripted_inplace(c); return F.relu(b)",
    "pad": "h = F.relu(net.conv(x)); p = F.pad(h, (1, 1, 1, 1)); scripted_inplace(h); return F.conv2d(p, net.three.weight)",
}


@pytest.mark.parametrize("name", BYPASSES)
def test_changes_by_compiled_code_under_what_waits_are_refused(name):
    model = gf.apply_(make_parts(make_use(BYPASSES[name])), make_plan())
    with pytest.raises(InputError, match="was changed in place between a layer that reads it and the function behind"):
        model(draw_images(2, 3, 9, 10))


def test_a_gradient_of_what_is_gone_is_refused():
    outputs: list[Any] = []
    model = gf.apply_(make_parts(lambda net, x: outputs.append(net.expand(x)) or x), make_plan())
    model(draw_images(2, 3, 9, 10))
    carrier = outputs.pop().carrier
    gc.collect()
    with pytest.raises(InputError, match="whose output was never computed"):
        carrier.backward(torch.ones(carrier.shape))


@pytest.mark.parametrize(
    "name", ["mobile", "resnet_block", "norm_twice", "linear_bottleneck2", "squeeze_excite", "vgg", "smooth"]
)
@pytest.mark.parametrize("patch", [1, 2])
def test_saves_the_same_bytes(name, patch):
    model = gf.apply_(make_parts(make_use(ALL[name])), make_plan(patch))
    x = draw_images(2, 3, 9, 10)
    got = count_saved(model, x)
    with in_order():
        assert got == count_saved(model, x)


def test_something_waits():
    """Without this, the other tests could pass for want of anything to test."""
    seen = []
    model = gf.apply_(make_parts(lambda net, x: seen.append(net.norm(net.conv(x))) or F.relu(seen[0])), make_plan())
    model(draw_images(2, 3, 9, 10))
    assert type(seen[0]) is DeferredTensor
    assert seen[0].recipe is not None


@pytest.mark.parametrize("add", [lambda x, y: x + y, lambda x, y: y + x], ids=["residual_second", "residual_first"])
def test_sums_wait_on_either_side(add):
    def block(net, x):
        y = add(net.deep_norm(net.deep(F.relu(net.norm(net.conv(x))))), x)
        net.seen.append(y.recipe)
        return F.relu(y)

    model = make_parts(block)
    gf.apply_(model, make_plan())(draw_images(2, 3, 9, 10))
    assert model.seen[0].residual is not None


KEEPS = {
    "nobody": "return F.relu_(net.wide_norm(net.wide(x)))",
    "a_list": "y = net.wide(x); net.seen.append(y); return F.relu_(net.wide_norm(y))",
    "a_variable": "y = net.wide(x); return F.relu_(net.wide_norm(y))",
    "a_norm": "n = net.wide_norm(net.wide(x)); return F.relu(n)",
}


@pytest.mark.parametrize("keeper", KEEPS)
def test_takes_the_place_of_what_nobody_sees(keeper, monkeypatch):
    places, run = [], ops.norm_act

    def norm_act(x, scale, shift, act, patch, residual=None, out=None):
        places.append(out is x)
        return run(x, scale, shift, act, patch, residual, out)

    model = gf.apply_(make_parts(make_use(KEEPS[keeper])), make_plan())
    monkeypatch.setattr(ops, "norm_act", norm_act)
    model(draw_images(2, 3, 9, 10))
    assert any(places) == (keeper == "nobody")


@pytest.mark.parametrize("name", ["mobile", "resnet_block", "norm_twice", "linear_bottleneck2", "triple_sum", "slice_inplace"])
def test_bfloat16(name):
    model = make_parts(make_use(ALL[name]))
    x = draw_images(2, 3, 9, 10)
    assert_same(*run_both(model.bfloat16(), x.bfloat16(), make_plan(), lambda y: y.float().square().mean()), rtol=5e-2)


@pytest.mark.parametrize("name", ["mobile", "resnet_block", "norm_twice", "linear_bottleneck2", "triple_sum", "slice_inplace"])
def test_autocast(name):
    model = make_parts(make_use(ALL[name]))
    with torch.autocast("cpu", torch.bfloat16):
        outcomes = run_both(model, draw_images(2, 3, 9, 10), make_plan(), lambda y: y.float().square().mean())
    assert_same(*outcomes, rtol=2e-2)


MODELS = ["mobilenet_v2", "resnet18", "shufflenet_v2_x0_5", "mobilenet_v3_small", "efficientnet_b0", "densenet121"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_models(name):
    model = shake_(make_torchvision(name))
    x = draw_images(2, 3, 64, 64)
    plan = gf.Plan.all(gf.Backward(patch=2), batch_norm="eval")
    assert_same(*run_both(model, x, plan, lambda y: y.square().mean()), rtol=1e-3)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=networks, size=sizes)
def test_random_networks(drawn, size):
    model = drawn.make().float()
    x = draw_images(2, 4, *size)
    plan = gf.Plan.all(gf.Backward(patch=2), batch_norm="eval")
    # As much as one pixel on the other side of a kink makes, by rounding. What is left away from kinks: test_layer_chains.
    assert_same(*run_both(model, x, plan, lambda y: y.square().mean()), rtol=1e-2)


def run_two(model, x, y):
    """Return gradients of a backward after two forwards, between which nothing is done."""
    (model(x).sum() + model(y).square().sum()).backward()
    return model.wide.weight.grad


def run_after_error(model, x, y):
    """Return gradients of a step after one that failed between a norm and its activation."""
    handle = model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    return run_two(model, x, y)


def run_after_step(model, x, y):
    """Return what a hook has kept, and looks at after the optimizer's step."""
    kept = []
    for layer in (model.conv, model.norm, model.wide_norm):
        layer.register_forward_hook(lambda _, args, out: kept.append(out))
    run_two(model, x, y)
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.norm.running_mean.add_(1)
    return torch.stack([out.detach() * 1 for out in kept])


def run_quantised(model, x, y):
    """Return gradients where weights are others during the forward of their layer alone."""
    own = {}

    def quantise(layer, args):
        own[layer] = layer.weight.data.clone()
        layer.weight.data = (layer.weight.data * 4).round() / 4

    def restore(layer, args, out):
        layer.weight.data.copy_(own[layer])

    for layer in (model.conv, model.norm, model.wide, model.last):
        layer.register_forward_pre_hook(quantise)
        layer.register_forward_hook(restore)
    return run_two(model, x, y)


def run_hooked(model, x, y):
    """Return what full backward hooks see; torch allows no change in place behind them."""
    model.use = make_use(USES["sum_used_twice"])
    seen = []
    for layer in (model.conv, model.norm, model.wide_norm, model.last):
        layer.register_full_backward_hook(lambda _, gx, gy: seen.append(gy[0].norm()))
    run_two(model, x, y)
    return torch.stack(seen)


@pytest.mark.parametrize("run", [run_two, run_after_error, run_after_step, run_quantised, run_hooked])
@pytest.mark.filterwarnings("ignore")
def test_around_the_forward(run):
    model = make_parts(make_use(USES["resnet_block"]))
    x, y = draw_images(2, 3, 9, 10), draw_images(2, 3, 9, 10) * 0.5 + 1
    got = run(gf.apply_(copy.deepcopy(model), make_plan()), x, y)
    with in_order():
        want = run(gf.apply_(copy.deepcopy(model), make_plan()), x, y)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_threads():
    model = make_parts(make_use(USES["resnet_block"]))
    models: Any = [gf.apply_(copy.deepcopy(model), make_plan()) for _ in range(3)]
    x = draw_images(2, 3, 9, 10)

    def train(model):
        for _ in range(5):
            model.zero_grad()
            run_two(model, x, x * 2)

    threads = [threading.Thread(target=train, args=(model,)) for model in models[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = run_two(models[0], x, x * 2)
    for model in models[1:]:
        torch.testing.assert_close(model.wide.weight.grad, want)


@pytest.mark.parametrize("name", "mobile resnet_block norm_twice iadd_used chunk_inplace checkpoint hook_tensor2".split())
def test_nothing_stays_behind(name):
    """All maps are gone after a step, without the garbage collector's help."""
    seen: list[weakref.ref] = []
    model: Any = gf.apply_(make_parts(make_use(ALL[name])), make_plan())
    for layer in (model.conv, model.norm, model.wide_norm, model.grow_norm, model.taps, model.last_norm):
        layer.register_forward_hook(lambda _, args, out: seen.append(weakref.ref(out)))
    run_step(model, draw_images(2, 3, 9, 10))  # imports and caches
    gc.collect()
    seen.clear()
    gc.disable()
    try:
        run_step(model, draw_images(2, 3, 9, 10))
        assert len(seen) >= 2
        assert all(reference() is None for reference in seen)
    finally:
        gc.enable()


class Scaled(torch.Tensor):
    """Weights that are held as small integers and a factor: their own address is that of nothing."""

    codes: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, strides=codes.stride())  # type: ignore[attr-defined]

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        args, kwargs = tree_map_only(cls, lambda w: w.codes.float() / 64, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_weights_of_another_class():
    outcomes = []
    for wrap in (Scaled, lambda codes: codes.float() / 64):
        model = gf.apply_(make_parts(make_use(EXPANDED["mobile"])), make_plan())
        for name in ("grow", "taps", "last"):
            conv = model.get_submodule(name)
            codes = torch.randint(-9, 9, conv.weight.shape, generator=torch.Generator().manual_seed(4), dtype=torch.int8)  # type: ignore[arg-type]
            conv.weight = torch.nn.Parameter(wrap(codes))
        outcomes.append(run_step(model, draw_images(2, 3, 9, 10)))
    assert_same(*outcomes)


def test_torchs_default_dtype_is_nobodys_business():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = make_parts(make_use(EXPANDED["mobile"]))

        def forward(self, x):
            return self.parts(F.max_pool2d(F.relu(self.parts.wide(self.parts.stem(x)))[:, :3], 2))

    x, outcomes = draw_images(2, 3, 18, 20), []
    for dtype in (torch.float32, torch.float64):
        model = gf.apply_(Net(), make_plan())
        torch.set_default_dtype(dtype)
        try:
            outcomes.append(run_step(model, x))
        finally:
            torch.set_default_dtype(torch.float32)
    assert outcomes[0].error is None
    assert_same(*outcomes)
