"""What keeps remember, and what they hold: saved, copied, checkpointed, counted to the byte."""

import copy
import io
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradfilter as gf
from gradfilter.cost import measure_saved_by_layer, measure_saved_bytes, predict_saved_bytes
from gradfilter.errors import PlanError
from gradfilter.hooks import find_states
from gradfilter.keep import State
from gradfilter.keep.low_rank import LowRank
from helpers_safety import (
    Net,
    allow_exits,
    applied,
    assert_close,
    gradients,
    grads_of,
    loss_of,
    make_everything,
    make_images,
    make_labels,
    make_net,
    plain,
    randomise,
)
from keep_cases import KEEPS

every_keep = pytest.mark.parametrize("case", KEEPS, ids=str)
STATEFUL = [gf.Int8(), gf.Subspace(rank=2), gf.Subspace(energy=0.9), gf.Subspace(memory="3KB"), gf.Fixed(energy=0.9, batches=3)]
every_state = pytest.mark.parametrize("keep", STATEFUL, ids=str)


class Inverted(nn.Module):
    """An inverted residual block, as in MobileNetV2."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.shortcut = stride == 1 and channels == out
        wide = 4 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.shortcut else self.layers(x)


def make_mobile() -> nn.Module:
    """Return a small network of inverted residual blocks."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
    blocks = [Inverted(8, 8, 1), Inverted(8, 12, 2), Inverted(12, 12, 1)]
    return randomise(nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3)))


NETWORKS = {
    "residual": partial(make_net, dtype=torch.float32),
    "inverted": make_mobile,
    "everything": make_everything,
}


def state_of(model):
    """Return copies of all that keeps remember."""
    return {name: tensor.clone() for name, tensor in gf.keep_state(model).items()}


def assert_equal(got, want):
    """Compare by name, bit by bit."""
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


# Bytes


GATES = {"everything": 6 * 6 * 4 + 2}
"""A gate of one pixel is torch's own under full, and a region under a keep, where the derivative of its sigmoid (6 images of 6
channels) and the bits of its ReLU (12) are held besides its output."""
SIZED = [("inverted", {"patch": 1}), ("residual", {"patch": 1}), ("inverted", {"patch": 2}), ("everything", {"grid": 4})]


@pytest.mark.parametrize(("name", "size"), SIZED, ids=str)
def test_measured_saved_bytes_are_the_predicted_ones(name, size):
    """To the byte where the size is fixed; no more than predicted where it depends on the batch."""
    model, images = NETWORKS[name](), make_images(6, (24, 19), dtype=torch.float32)
    sizes = {}
    for case in KEEPS:
        gf.apply_(model, gf.Plan.all(gf.Backward(**size, keep=case.keep)))
        predicted = predict_saved_bytes(model, images)
        assert not gf.keep_state(model), "predicting leaves no trace"
        measured = sizes[str(case)] = measure_saved_bytes(model, images)
        if case.fixed:
            assert measured == predicted, case
        elif case.keep.name in ("svd", "hosvd"):
            assert measured <= predicted, case
        elif case.keep.name == "subspace":  # known since the first batch
            assert predict_saved_bytes(model, images) == measure_saved_bytes(model, images) == measured, case
        if case.exact:
            assert measured <= sizes["full"] + GATES.get(name, 0), case
    assert sizes["int8"] < 0.75 * sizes["full"]
    assert sizes["hosvd:0.8"] < sizes["hosvd:0.99"] < sizes["full"]


@pytest.mark.parametrize("kind", [gf.Subspace, gf.Fixed])
@pytest.mark.parametrize(("name", "size"), SIZED, ids=str)
def test_no_layer_holds_more_of_its_input_than_its_budget(name, kind, size, monkeypatch):
    held, predicted = [], []

    def compress(keep, x, state, channels=1, run=LowRank.compress):
        kept = run(keep, x, state, channels)
        (predicted if x.is_meta else held).append(sum(tensor.nbytes for tensor in kept.tensors))
        return kept

    monkeypatch.setattr(LowRank, "compress", compress)
    model = gf.apply_(NETWORKS[name](), gf.Plan.all(gf.Backward(**size, keep=kind(memory=6000))))
    for n in (6, 8, 2, 6):
        images = make_images(n, (24, 19), dtype=torch.float32)
        model(images)
        predict_saved_bytes(model, images)
    assert len(held) == len(predicted) > 20
    assert max(held) <= 6000
    assert max(predicted) <= 6000


@every_keep
def test_a_frozen_weight_holds_nothing(case):
    """And under no_grad nothing is held or remembered at all."""
    model, images = make_mobile(), make_images(4, dtype=torch.float32).requires_grad_()
    model.get_submodule("0").requires_grad_(False)
    gf.apply_(model, gf.Plan.all(gf.Backward(patch=2, keep=case.keep)))
    with torch.no_grad():
        model(images)
    model.eval()(images.detach())
    before = state_of(model)
    with torch.inference_mode():
        model(images.detach())
    assert_equal(state_of(model), before)
    held = measure_saved_by_layer(model.train(), images)
    assert held["0.0"] == 4 * 8 * 5 * 4  # what the activation behind it counts, a byte per patch
    assert not any(name.startswith("0.0.") for name in gf.keep_state(model))


def test_no_grad_touches_no_state():
    for keep in STATEFUL:
        model = applied(make_net(), gf.Backward(patch=2, keep=keep))
        with torch.no_grad():
            model(make_images())
        assert not gf.keep_state(model)


# State


def train(model, batches):
    """Return the gradients of each of some steps, the weights moving between them."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found = []
    for images in batches:
        found.append(gradients(model, images))
        optimizer.step()
    return found


def save_and_load(model, plan):
    """Return a new model that goes on from what files of the first one hold."""
    file = io.BytesIO()
    torch.save((model.state_dict(), gf.keep_state(model)), file)
    file.seek(0)
    weights, state = torch.load(file)
    again = gf.apply_(make_net(seed=9), plan).train()
    again.load_state_dict(weights)
    return gf.load_keep_state_(again, state)


COPIES = {
    "deepcopy": lambda model, plan: copy.deepcopy(model),
    "pickle": lambda model, plan: pickle.loads(pickle.dumps(model)),
    "files": save_and_load,
}


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES.keys())
@every_state
def test_a_copy_goes_on_as_the_model_does(keep, again):
    plan = gf.Plan.all(gf.Backward(patch=2, keep=keep))
    model = gf.apply_(make_net(), plan).train()
    batches = [make_images(4, seed=seed) for seed in range(5)]
    train(model, batches[:2])
    twin = again(model, plan)
    before = state_of(model)
    assert before
    assert_equal(state_of(twin), before)
    want = train(model, batches[2:])
    assert_equal(state_of(twin), before)  # it is the copy's own
    for got, expected in zip(train(twin, batches[2:]), want, strict=True):
        assert_equal(got, expected)
    assert_equal(state_of(twin), state_of(model))


@every_state
def test_without_its_state_a_model_does_not_go_on_as_before(keep):
    """The comparison above could have failed."""
    model = applied(make_net(), gf.Backward(patch=2, keep=keep))
    batches = [make_images(4, seed=seed) for seed in range(3)]
    train(model, batches[:2])
    twin = gf.load_keep_state_(copy.deepcopy(model), {})
    assert not gf.keep_state(twin)
    (got,), (want,) = train(twin, batches[2:]), train(model, batches[2:])
    assert not torch.equal(got["block1.conv1.weight"], want["block1.conv1.weight"])


def test_state_of_other_layers_is_refused_and_nothing_changes():
    model = applied(make_net(), gf.Backward(patch=2, keep=gf.Subspace(rank=2)))
    gradients(model)
    before = gf.keep_state(model)
    with pytest.raises(PlanError, match=r"layer 'block9\.conv', which the plan of this Net does not name\. Apply"):
        gf.load_keep_state_(model, {**before, "block9.conv.factor0": torch.zeros(2, 2)})
    assert_equal(gf.keep_state(model), before)


@every_state
def test_a_plan_applied_again_starts_anew(keep):
    plan = gf.Plan.all(gf.Backward(patch=2, keep=keep))
    model = gf.apply_(make_net(), plan).train()
    first = gradients(model)
    gradients(model)
    gf.apply_(gf.remove_(model), plan)
    assert not gf.keep_state(model)
    assert_equal(gradients(model), first)


@every_keep
@pytest.mark.parametrize("size", [{"patch": 2}, {"grid": 3}], ids=str)
def test_batches_and_images_of_other_sizes(case, size):
    """A smaller last batch, a larger image, and back again: finite gradients, exact ones where the keep is exact."""
    model, full = (applied(make_net(), gf.Backward(**size, keep=keep)) for keep in (case.keep, gf.Full()))
    for n, image in [(6, (19, 15)), (2, (19, 15)), (6, (19, 15)), (3, (33, 32)), (1, (9, 8)), (8, (19, 15))]:
        images = make_images(n, image)
        got, want = gradients(model, images), gradients(full, images)
        if case.exact:
            assert_close(got, want)
        assert all(g.isfinite().all() for g in got.values() if g is not None)


def test_another_batch_size_keeps_the_factors_of_the_other_modes():
    model = gf.apply_(nn.Sequential(nn.Conv2d(3, 4, 3)).double(), gf.Plan.all(gf.Backward(patch=1, keep=gf.Subspace(rank=2))))
    model(make_images(6)).sum().backward()
    before = state_of(model)
    (state,) = find_states(model).values()
    state.tensors["factor1"] = -state.tensors["factor1"]  # a mark that a new start would not have, and a step keeps
    model(make_images(4)).sum().backward()
    after = state_of(model)
    assert after["0.factor0"].shape == (4, 2)
    assert after["0.factor1"].shape == before["0.factor1"].shape
    kept = project_onto(after["0.factor1"], before["0.factor1"])
    assert kept > 0.9


def project_onto(a, b):
    """Return which share of one orthonormal factor lies in the span of another."""
    return float((b.t() @ a).square().sum() / a.shape[1])


@every_keep
def test_two_runs_from_one_state_are_equal_and_the_global_generator_is_untouched(case):
    model = applied(make_net(), gf.Backward(patch=2, keep=case.keep))
    batches = [make_images(4, seed=seed) for seed in range(2)]
    twin = copy.deepcopy(model)
    random = torch.get_rng_state()
    first = train(model, batches)
    assert torch.equal(torch.get_rng_state(), random)
    torch.manual_seed(99)
    for got, want in zip(train(twin, batches), first, strict=True):
        assert_equal(got, want)


def test_layers_draw_numbers_of_their_own():
    """The same input in two layers, and in one layer twice, is rounded in different ways."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x.clone())

    model = gf.apply_(Twice().double(), gf.Plan.all(gf.Backward(patch=1, keep=gf.Int8())))
    found = []
    for _ in range(2):
        model.zero_grad()
        model(make_images()).square().sum().backward()
        found += [p.grad for name, p in model.named_parameters() if name.endswith("weight")]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


class Branches(nn.Module):
    """Convolutions of one map, which may change in place between them."""

    def __init__(self, count: int, changes: bool = False) -> None:
        super().__init__()
        self.first, self.changes = nn.Conv2d(3, 4, 1), changes
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.first(x), []
        for conv in self.convs:
            found.append(conv(x))
            x = x.mul_(2) if self.changes else x
        return torch.cat(found, 1).mean((2, 3))


behind_layers = pytest.mark.parametrize("layers", ["*", "convs.*"], ids=["behind a trained layer", "behind a frozen one"])


@behind_layers
@every_keep
def test_layers_that_read_one_map_hold_it_once(case, layers):
    """As `Full` does."""
    plan, images = gf.Plan({layers: gf.Backward(patch=2, keep=case.keep)}), make_images(4, dtype=torch.float32)
    one, two = (measure_saved_bytes(gf.apply_(randomise(Branches(n)), plan), images) for n in (1, 2))
    assert one == two


def test_what_layers_share_is_let_go_with_the_forward():
    model = gf.apply_(Branches(2), gf.Plan({"convs.*": gf.Backward(patch=2)}))
    means: list[weakref.ref[Tensor]] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        means.extend(weakref.ref(x) for x in args[0].means.values())

    model.get_submodule("convs.1").register_forward_pre_hook(look)
    model(make_images(4, dtype=torch.float32))  # and its graph is gone
    assert [x() for x in means] == [None]


def test_a_forward_that_breaks_off_leaves_a_model_that_copies():
    model = gf.apply_(Branches(2), gf.Plan({"convs.*": gf.Backward(patch=2)}))
    model.get_submodule("convs.1").register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(make_images(4, dtype=torch.float32))
    copy.deepcopy(model)


@behind_layers
@pytest.mark.parametrize("keep", [gf.Int8(stochastic=False), gf.HOSVD(0.8), gf.Subspace(rank=2)], ids=str)
def test_a_map_that_has_changed_in_place_is_held_anew(keep, layers):
    plan = gf.Plan({layers: gf.Backward(patch=1, keep=keep)})
    model = gf.apply_(randomise(Branches(2, changes=True).double()), plan)
    weights = [p for p in model.parameters() if p.dim() == 4][1:]
    found = model(make_images(4)).chunk(2, 1)
    first, second = (torch.autograd.grad(y.sum(), w, retain_graph=True)[0] for y, w in zip(found, weights, strict=True))
    torch.testing.assert_close(second.sum((0, 2, 3)), 2 * first.sum((0, 2, 3)), rtol=1e-6, atol=1e-6)


@every_keep
def test_a_module_used_twice_in_one_forward(case):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.end = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.conv(self.conv(x).relu()[:, :, 1:, ::2]).mean((2, 3)))

    net = randomise(Twice().double())
    for _ in range(2):
        got = gradients(model := applied(net, gf.Backward(patch=1, keep=case.keep)))
        assert all(g is not None and g.isfinite().all() for g in got.values())
        if case.exact:
            assert_close(gradients(model), gradients(plain(net)))


class Checkpointed(nn.Module):
    """Run the blocks of a network again in backward."""

    def __init__(self, net: Net, reentrant: bool | None) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        for block in (self.net.block1, self.net.block2):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return self.net.fc(self.net.pool(x).flatten(1))


@allow_exits
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@every_keep
def test_checkpointing(case, reentrant):
    model = applied(Checkpointed(make_net(), reentrant), gf.Backward(patch=1, keep=case.keep))
    want = applied(Checkpointed(make_net(), None), gf.Backward(patch=1, keep=case.keep))
    for seed in range(4):
        images = make_images(4, seed=seed)
        got, expected = gradients(model, images), gradients(want, images)
        assert all(g is not None and g.isfinite().all() for g in got.values())
        if case.exact or case.keep.traceable or case.keep.name in ("svd", "hosvd", "fixed"):
            assert_close(got, expected)
    if case.keep.name == "fixed":
        states = [find_states(m)[name] for m in (model, want) for name in ("net.block1.conv1",)]
        assert_equal(states[0].tensors, states[1].tensors)


@every_keep
def test_autocast(case):
    """In bfloat16 the layer's input is held in it, and energies are still those of single precision."""
    net, images = make_net(dtype=torch.float32), make_images(6, dtype=torch.float32)
    model, full = (applied(net, gf.Backward(patch=1, keep=keep)) for keep in (case.keep, gf.Full()))
    found = []
    for each in (model, full):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(each, images)
        loss.backward()
        found.append(grads_of(each))
    assert all(g is not None and g.dtype == torch.float32 and g.isfinite().all() for g in found[0].values())
    if case.exact:
        assert_close(*found, tolerance=1e-6)
    for name, tensor in gf.keep_state(model).items():
        assert tensor.dtype != torch.bfloat16 or "factor" in name


def test_energy_is_kept_under_autocast():
    x = torch.randn(6, 8, 9, 9, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -2, 8)[:, None, None]
    with torch.autocast("cpu", torch.bfloat16):
        kept = gf.HOSVD(0.999).compress(x, State("layer"))
    want = gf.HOSVD(0.999).compress(x, State("layer"))
    assert [tensor.shape for tensor in kept.tensors] == [tensor.shape for tensor in want.tensors]
    assert all(torch.equal(a, b) for a, b in zip(kept.tensors, want.tensors, strict=True))


@allow_exits
@pytest.mark.parametrize("look", [gf.cost, gf.fidelity, gf.describe, predict_saved_bytes], ids=lambda f: f.__name__)
@pytest.mark.parametrize("keep", [gf.Int8(), gf.Subspace(memory="3KB"), gf.Fixed(rank=2)], ids=str)
def test_looking_leaves_the_state_as_it_was(keep, look):
    model, images = applied(make_net(), gf.Backward(patch=2, keep=keep)), make_images(4)
    for _ in range(2):
        before = state_of(model)
        if look is gf.describe:
            look(model)
        elif look is predict_saved_bytes:
            look(model, images)
        else:
            look(model, (images, make_labels(4)))
        assert_equal(state_of(model), before)
        gradients(model)
