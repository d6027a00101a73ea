"""Gradients without a trace, and how close filtered ones are to exact ones."""

import copy
import json
import math
import re
import subprocess
import sys
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfilter as gf
from gradfilter.cost import measure_saved_bytes
from gradfilter.errors import GradFilterError, InputError
from gradfilter.fidelity import Closeness, compare, find_gradients
from gradfilter.hooks import exactly, find_applied
from gradfilter.spectrum import find_snr
from gradfilter.table import Table
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


# fidelity


def exact_twin(model):
    return gf.freeze_(gf.remove_(copy.deepcopy(model)), gf.Plan.all(batch_norm="train"))


def test_patch_1_is_exact():
    model = make_model(gf.Plan.all(gf.Backward(patch=1), batch_norm="train"))
    found = gf.fidelity(model, make_batch())
    for layer in (*found.layers.values(), found.overall):
        assert layer.cosine.mean == pytest.approx(1, abs=1e-12)
        assert layer.snr_db.smallest > 100
        assert layer.norm_ratio.mean == pytest.approx(1, abs=1e-9)


def test_values_are_those_of_a_direct_computation():
    model, batches = make_model(), [make_batch(seed=1), make_batch(seed=5)]
    found = gf.fidelity(model, batches)
    layers = {"0": ["0.weight", "1.weight", "1.bias"], "3": ["3.weight", "4.weight", "4.bias"]}
    layers |= {"7": ["7.weight", "7.bias"], "12": ["12.weight", "12.bias"]}
    assert list(found.layers) == list(layers)
    everything = [name for names in layers.values() for name in names]
    for layer, values in (*found.layers.items(), ("all", found.overall)):
        wanted = {"cosine": [], "snr_db": [], "norm_ratio": []}
        for batch in batches:
            chosen = layers.get(layer, everything)
            a, b = (
                torch.cat([gradients[name].flatten() for name in chosen])
                for gradients in (find_gradients(model, batch), find_gradients(exact_twin(model), batch))
            )
            wanted["cosine"].append(float(F.cosine_similarity(a, b, 0)))
            wanted["norm_ratio"].append(float(a.norm() / b.norm()))
            wanted["snr_db"].append(float(20 * torch.log10(b.norm() / (b - a).norm())))
        for measure, direct in wanted.items():
            spread = getattr(values, measure)
            assert spread.mean == pytest.approx(sum(direct) / 2)
            assert (spread.smallest, spread.largest) == pytest.approx((min(direct), max(direct)))
    assert found.batches == 2
    assert found.layers["3"].cosine.smallest < found.layers["3"].cosine.largest
    assert found.layers["12"].patch is None
    assert found.layers["3"].patch == (2, 2)


def test_one_batch_or_several():
    model, batch = make_model(), make_batch()
    one = gf.fidelity(model, batch)
    assert one == gf.fidelity(model, list(batch)) == gf.fidelity(model, [batch])
    assert one.overall == gf.fidelity(model, (batch, batch)).overall
    assert gf.fidelity(model, iter([batch, batch])).batches == 2
    with pytest.raises(InputError, match="no batch"):
        gf.fidelity(model, [])


def test_the_model_comes_out_as_it_was():
    model = with_some_grads(make_model())
    before = snapshot(model)
    gf.fidelity(model, make_batch())
    assert snapshot(model) == before
    calls = iter([F.cross_entropy, fail])  # exact backprop is what fails
    with pytest.raises(InputError, match="no loss today"):
        gf.fidelity(model, make_batch(), lambda out, y: next(calls)(out, y))
    assert snapshot(model) == before
    filtered = find_gradients(model, make_batch())
    assert filtered["3.weight"].tolist() != find_gradients(exact_twin(model), make_batch())["3.weight"].tolist()


def test_without_a_plan_there_is_nothing_to_compare():
    with pytest.raises(InputError, match=r"no plan.*apply_"):
        gf.fidelity(small(), make_batch())
    with pytest.raises(InputError, match=r"no plan.*this very module"):
        gf.fidelity(nn.Sequential(make_model()), make_batch())


def test_exact_runs_have_no_patches():
    model, x = make_model(), make_batch()[0]
    applied = find_applied(model)
    assert applied is not None
    with exactly(applied):
        assert measure_saved_bytes(model, x) == measure_saved_bytes(exact_twin(model), x)
    assert measure_saved_bytes(model, x) < measure_saved_bytes(exact_twin(model), x)


def test_other_parameters_stand_under_their_module():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
            self.act = nn.PReLU()
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            return self.act(self.conv(x)).mean((2, 3)) * self.scale

    model = gf.apply_(Odd().double(), gf.Plan.all(gf.Backward(patch=2)))
    found = gf.fidelity(model, make_batch())
    assert list(found.layers) == ["", "conv", "act"]
    assert "| (model) |" in str(found)


def test_a_gradient_that_is_missing_counts_as_zero():
    g = torch.tensor([3.0, 4.0])
    assert compare({}, {"w": g}) == Closeness(0, 0, 0)
    assert compare({"w": g}, {"w": g}) == Closeness(1, math.inf, 1)
    assert math.isnan(compare({"w": g}, {"w": 0 * g}).cosine)
    assert compare({"w": g, "b": g[:1]}, {"w": g}).snr_db == pytest.approx(10 * math.log10(25 / 9))
    assert compare({"w": -2 * g, "b": g}, {"w": g, "b": g}, ["w"]) == Closeness(-1, -10 * math.log10(9), 2)


def test_table_reads_well_and_is_plain_json(tmp_path):
    found = gf.fidelity(make_model(), [make_batch(seed=1), make_batch(seed=5)])
    table = found.to_table()
    table.save(tmp_path / "fidelity")
    data = json.loads((tmp_path / "fidelity.json").read_text())
    rows = {row["layer"]: row for row in data["rows"]}
    assert rows["3"]["cosine"]["smallest"] == found.layers["3"].cosine.smallest
    assert rows["12"]["SNR of gy (dB)"] is None
    text = (tmp_path / "fidelity.md").read_text()
    assert text == str(found)
    assert re.search(r"\| 3 +\| 2 +\| 0\.\d{4} \[0\.\d{4}, 0\.\d{4}\] \|", text)


def test_infinite_numbers_survive_json(tmp_path):
    table = Table("t", {"a": str, "b": str}, [(math.inf, {"x": -math.inf, "y": math.nan})])
    table.save(tmp_path / "t")
    row = json.loads((tmp_path / "t.json").read_text())["rows"][0]
    assert float(row["a"]) == math.inf
    assert row["b"] == {"x": "-inf", "y": None}


def test_gy_is_the_exact_gradient_at_the_outputs_of_layers():
    """Also where the next layer changes the output in place."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)
    ).double()
    x, y = make_images(2, (15, 13)), make_labels(2)
    net(x)
    convs = [net[0], net[2]]
    outputs, h = [], x
    for m in net:
        h = m(h.clone())
        if m in convs:
            outputs.append(h)
            h = h.clone()
    wanted = [10 * math.log10(find_snr(g, (2, 2))) for g in torch.autograd.grad(F.cross_entropy(h, y), outputs)]
    found = gf.fidelity(gf.apply_(net, gf.Plan.all(gf.Backward(patch=2))), (x, y))
    assert found.depth == ("2", "0")
    snr = [found.layers[name].gy_snr_db for name in ("0", "2")]
    assert [s and s.mean for s in snr] == pytest.approx(wanted)
    assert found.rising_share == float(wanted[0] >= wanted[1])


def test_core_imports_no_extras():
    """In a fresh process: fidelity is core, and a picture is drawn only on demand."""
    code = (
        "import sys, gradfilter, gradfilter.report.fidelity, gradfilter.bench.fidelity; "
        "print({'matplotlib', 'timm', 'torchvision', 'lightning', 'PIL'} & sys.modules.keys(), gradfilter.fidelity.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() fidelity"
