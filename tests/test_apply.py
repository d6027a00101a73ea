"""Tests of `apply_`, `remove_` and `describe`: what changes in a model, and what must not."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradfilter as gf
from gradfilter.errors import ExitWarning, PlanError
from gradfilter.keep import HOSVD, Int8
from gradfilter.tensor import PatchTensor
from helpers_safety import (
    Block,
    Net,
    applied,
    assert_close,
    assert_differ,
    gradients,
    grads_of,
    loss_of,
    make_images,
    make_net,
    plain,
    randomise,
    seeded,
)

HOOK_DICTS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks",
)  # fmt: skip
TAIL = gf.Plan({"block2": gf.Backward(patch=2), "fc": gf.Backward()})


def snapshot(model: nn.Module) -> dict[Any, Any]:
    """Return everything about a model that `apply_` might touch, by identity."""
    state: dict[Any, Any] = {"keys": list(model.state_dict())}
    for name, module in model.named_modules():
        state[name] = (id(module), type(module), sorted(vars(module)), module.training)
        for kind in HOOK_DICTS:
            state[name, kind] = {key: id(hook) for key, hook in getattr(module, kind).items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        hooks = tensor._backward_hooks or {}
        state["tensor", name] = (id(tensor), tensor._version, tensor.requires_grad, tensor.dtype, list(hooks))
    return state


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def moved(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    """Name the batch norms whose statistics are not what they were."""
    return {name.rpartition(".")[0] for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


class OpLog(TorchDispatchMode):
    """List the operators that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# Identity


def test_apply_and_remove_return_the_same_object():
    net = make_net()
    assert gf.apply_(net, TAIL) is net
    assert gf.remove_(net) is net


def test_apply_keeps_parameters_buffers_modules_and_keys():
    net = make_net()
    before, values = snapshot(net), copy.deepcopy(net.state_dict())
    gf.apply_(net, TAIL)
    after = snapshot(net)
    assert after["keys"] == before["keys"]
    for name, _ in net.named_modules():
        assert after[name] == before[name]
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, values[name])
    for name, _ in net.named_parameters():
        assert after["tensor", name][0] == before["tensor", name][0]


def test_an_optimizer_made_before_apply_steps_the_trained_parameters():
    net = make_net().train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    gf.apply_(net, TAIL)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
    changed = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trained(net)
    assert changed == {name for name in before if name.startswith(("block2", "fc"))}


def test_training_with_a_plan_lowers_the_loss():
    net = applied(make_net(), gf.Backward(grid=2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_state_dict_goes_from_a_model_with_a_plan_to_one_without_and_back():
    net, other = make_net(seed=0), make_net(seed=5)
    gf.apply_(net, TAIL)
    other.load_state_dict(net.state_dict())
    net.load_state_dict(other.state_dict())
    assert_close(gradients(applied(other, gf.Backward(patch=2))), gradients(applied(net, gf.Backward(patch=2))), 0)


@pytest.mark.filterwarnings("ignore::gradfilter.errors.ExitWarning")
def test_other_peoples_hooks_keep_firing_and_stay():
    net = make_net()
    fired: list[str] = []

    def log(name: str) -> Any:
        return lambda *_: fired.append(name)

    handles = []
    for when in ("before", "after"):
        if when == "after":
            gf.apply_(net, gf.Plan.all(gf.Backward(patch=2)))
        handles += [
            net.register_forward_pre_hook(log(f"model pre {when}")),
            net.block2.conv1.register_forward_pre_hook(log(f"conv pre {when}")),
            net.block2.conv1.register_forward_hook(log(f"conv {when}")),
            net.block2.bn1.register_forward_hook(log(f"norm {when}")),
            net.block2.register_full_backward_hook(log(f"backward {when}")),
            net.fc.weight.register_hook(log(f"parameter {when}")),
        ]
    gradients(net)
    expected = [
        f"{what} {when}"
        for when in ("before", "after")
        for what in "model pre,conv pre,conv,norm,backward,parameter".split(",")
    ]
    assert sorted(fired) == sorted(expected)
    fired.clear()
    gf.remove_(net)
    gradients(net)
    assert sorted(fired) == sorted(expected)
    for handle in handles:
        handle.remove()


# Frozen and trained


@pytest.mark.parametrize(
    ("plan", "prefixes"),
    [
        (TAIL, ("block2", "fc")),
        (gf.Plan.last(1), ("block2.conv2", "block2.bn2", "fc")),
        (gf.Plan({"block1.conv1": gf.Backward(patch=2)}), ("block1.conv1", "block1.bn1")),
        (gf.Plan({"block1.conv1": gf.Backward(patch=2)}, rest="exact"), ("",)),
        (gf.Plan.all(), ("",)),
    ],
)
def test_exactly_the_layers_of_the_plan_are_trained_also_after_train(plan, prefixes):
    net = make_net()
    everything = trained(net)
    gf.apply_(net, plan)
    for _ in range(2):
        assert trained(net) == {name for name in everything if name.startswith(prefixes)}
        net.train()
        gradients(net)
    assert {name for name, p in net.named_parameters() if p.grad is not None} == trained(net)


def test_gradients_of_a_part_equal_those_of_exact_backprop_at_patch_1():
    net = make_net()
    reference = gradients(plain(net))
    part = gf.apply_(copy.deepcopy(net), gf.Plan({"block1.conv2": gf.Backward(patch=1), "fc": gf.Backward()})).train()
    names = {"block1.conv2.weight", "block1.bn2.weight", "block1.bn2.bias", "fc.weight", "fc.bias"}
    assert_close(gradients(part), {name: g if name in names else None for name, g in reference.items()})


def test_what_the_user_froze_stays_frozen_through_apply_reapply_and_remove():
    net = make_net()
    frozen = {"block2.conv1.weight", "fc.bias", "stem.0.weight"}
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    before = trained(net)
    for plan in (TAIL, gf.Plan.all(), gf.Plan.last(1), gf.Plan({"fc": gf.Backward()}, rest="exact")):
        gf.apply_(net, plan)
        assert not trained(net) & frozen
    gf.remove_(net)
    assert trained(net) == before


@pytest.mark.parametrize("planned", ["block1.conv2", "middle"])
def test_a_weight_shared_with_a_frozen_layer_is_trained(planned):
    net = make_net(nn.Conv2d(5, 5, 3, padding=1, bias=False))
    net.block1.conv2.weight = net.middle.weight  # type: ignore[assignment]
    gf.apply_(net, gf.Plan({planned: gf.Backward(patch=1)}))
    assert net.block1.conv2.weight.requires_grad
    gf.remove_(net)
    assert trained(net) == {name for name, _ in net.named_parameters()}


@pytest.mark.parametrize("mode", ["eval", "train", "frozen"])
def test_batch_norm_modes(mode):
    net = make_net()
    gf.apply_(net, gf.Plan({"block2.conv1": gf.Backward(patch=2), "fc": gf.Backward()}, batch_norm=mode)).train()
    before = statistics(net)
    gradients(net)
    assert moved(before, net) == ({"block2.bn1"} if mode == "train" else set())
    affine = {"block2.bn1.weight", "block2.bn1.bias"}
    assert trained(net) & affine == (set() if mode == "frozen" else affine)
    assert (net.block2.bn1.weight.grad is None) == (mode == "frozen")


@pytest.mark.parametrize("mode", ["eval", "train", "frozen"])
def test_statistics_do_not_move_in_eval_mode(mode):
    net = gf.apply_(make_net(), gf.Plan.all(gf.Backward(patch=2), batch_norm=mode)).eval()
    before = statistics(net)
    gradients(net)
    assert not moved(before, net)


def test_batch_norm_train_is_that_of_a_model_in_training_mode():
    net = make_net()
    ours, theirs = applied(net, batch_norm="train"), copy.deepcopy(net).train()
    assert_close(gradients(ours, make_images(3)), gradients(theirs, make_images(3)))
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)
    assert_differ(grads_of(ours), gradients(applied(net), make_images(3)), "stem.0.weight")


def test_statistics_of_frozen_layers_do_not_move_without_gradients_either():
    net = gf.apply_(make_net(), TAIL).train()
    before = statistics(net)
    with torch.no_grad():
        net(make_images())
    assert not moved(before, net)


def test_training_flags_are_as_the_user_set_them():
    net = gf.apply_(make_net(), gf.Plan.last(2)).train()
    net.get_submodule("block1.bn2").eval()
    flags = {name: m.training for name, m in net.named_modules()}
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            net(make_images())
        assert {name: m.training for name, m in net.named_modules()} == flags


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("cannot go on")


def test_training_flags_survive_a_forward_that_fails():
    net = gf.apply_(make_net(Fails()), gf.Plan.last(2)).train()
    with pytest.raises(RuntimeError, match="cannot go on"):
        net(make_images())
    assert all(m.training for m in net.modules())


@pytest.mark.parametrize("first", [True, False], ids=["hook before apply_", "hook after apply_"])
def test_training_flags_survive_a_hook_that_fails(first):
    def fail(*_: object) -> None:
        raise RuntimeError("cannot go on")

    net = make_net().train()
    if first:
        net.stem[1].register_forward_pre_hook(fail)
    gf.apply_(net, gf.Plan.last(2))
    if not first:
        net.stem[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="cannot go on"):
        net(make_images())
    assert all(m.training for m in net.modules())


def test_batch_norm_without_statistics_normalises_by_the_batch():
    net = make_net()
    net.block1.bn1 = nn.BatchNorm2d(5, track_running_stats=False, dtype=torch.float64)
    assert_close(gradients(applied(net)), gradients(plain(net)))


# Remove, replace, refuse


def test_remove_restores_everything():
    net = make_net()
    net.fc.bias.requires_grad_(False)
    net.block1.register_forward_hook(lambda *_: None)
    before, exact = snapshot(net), gradients(plain(net))
    gf.apply_(net, TAIL).train()
    gradients(net)
    net.zero_grad()
    gf.remove_(net)
    after = snapshot(net)
    assert after == {**before, **{name: (*before[name][:3], True) for name, _ in net.named_modules()}}
    assert_close(gradients(net.eval()), exact, 0)


def test_remove_without_a_plan_does_nothing():
    net = make_net()
    before = snapshot(net)
    gf.remove_(net)
    assert snapshot(net) == before


def test_remove_twice():
    net = gf.apply_(make_net(), TAIL)
    gf.remove_(net)
    before = snapshot(net)
    gf.remove_(net)
    assert snapshot(net) == before


def test_remove_after_a_frozen_layer_was_taken_out():
    net = gf.apply_(make_net(nn.Conv2d(5, 5, 1)), gf.Plan.last(1))
    net.middle = nn.Identity()
    gf.remove_(net)
    assert trained(net) == {name for name, _ in net.named_parameters()}


def test_reapply_replaces_the_plan():
    net = make_net()
    once = gf.apply_(copy.deepcopy(net), gf.Plan.all(gf.Backward(patch=3))).train()
    for plan in (TAIL, gf.Plan.all(gf.Backward(patch=2), batch_norm="train"), gf.Plan.all(gf.Backward(patch=3))):
        gf.apply_(net, plan)
    assert {key: len(v) for key, v in snapshot(net).items() if isinstance(v, dict)} == {
        key: len(v) for key, v in snapshot(once).items() if isinstance(v, dict)
    }
    assert_close(gradients(net.train()), gradients(once), 0)
    assert gf.describe(net) == gf.describe(once)


BAD_PLANS = [
    (gf.Plan({"nowhere": gf.Backward()}), "matches no"),
    (gf.Plan({"fc": gf.Backward(), "block9": gf.Backward()}), "'block9' matches no"),
    (gf.Plan.last(99), "the model has 5"),
    (gf.Plan({}), "trains nothing"),
    ({"*": gf.Backward()}, "apply_ got dict"),
    (gf.Backward(), "apply_ got Backward"),
    (None, "apply_ got NoneType"),
]


@pytest.mark.parametrize(("plan", "says"), BAD_PLANS)
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_a_bad_plan_changes_nothing(plan, says, again):
    net = make_net().train()
    net.stem[0].weight.requires_grad_(False)
    net.block1.register_forward_hook(lambda *_: None)
    if again:
        gf.apply_(net, TAIL)
    before, expected, text = snapshot(net), gradients(copy.deepcopy(net)), gf.describe(net)
    with pytest.raises(PlanError, match=says):
        gf.apply_(net, plan)
    assert snapshot(net) == before
    assert gf.describe(net) == text
    assert_close(gradients(net), expected, 0)


def test_a_plan_for_frozen_layers_alone_is_refused_with_the_remedy():
    net = make_net()
    net.fc.requires_grad_(False)
    with pytest.raises(PlanError, match=r"never un-freezes: call model\.requires_grad_\(True\)"):
        gf.apply_(net, gf.Plan({"fc": gf.Backward()}))


@pytest.mark.parametrize("inner_first", [True, False], ids=["part first", "whole first"])
def test_a_plan_on_a_part_and_a_plan_on_the_whole_do_not_mix(inner_first):
    net = make_net().train()
    plans = [(net.block2, gf.Plan.all(gf.Backward(patch=2))), (net, TAIL)]
    (first, plan), (second, other) = plans if inner_first else plans[::-1]
    gf.apply_(first, plan)
    before = snapshot(net)
    with pytest.raises(PlanError, match="already runs under a plan"):
        gf.apply_(second, other)
    assert snapshot(net) == before
    gf.remove_(first)
    gf.apply_(second, other)


# Copies

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: save_and_load(model),
}


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("seen", [False, True], ids=["fresh", "after a step"])
@pytest.mark.parametrize("backward", [gf.Backward(patch=2), gf.Backward(grid=2)], ids=str)
def test_copies_train_alike_and_are_independent(make_copy, seen, backward):
    net = gf.apply_(make_net(), gf.Plan({"block1.conv2": backward, "block2": backward, "fc": backward})).train()
    if seen:
        gradients(net)
    twin = make_copy(net)
    expected, before = gradients(net), snapshot(net)
    assert_close(gradients(twin), expected, 0)
    assert gf.describe(twin) == gf.describe(net)

    gf.remove_(twin)
    assert gf.describe(twin) == "Net: no plan applied."
    assert trained(twin) == {name for name, _ in net.named_parameters()}
    assert_close(gradients(twin.eval()), gradients(plain(make_net())), 0)
    assert snapshot(net) == before
    assert_close(gradients(net), expected, 0)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES.keys())
def test_taking_the_plan_off_the_original_leaves_the_copy(make_copy):
    net = gf.apply_(make_net(), TAIL).train()
    twin, expected = make_copy(net), gradients(net)
    gf.remove_(net)
    assert_close(gradients(twin), expected, 0)


# Without gradients


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("backward", [gf.Backward(patch=2), gf.Backward(), gf.Backward(patch=2, kernel="lumped")], ids=str)
def test_nothing_extra_runs_without_gradients(mode: str, context: type[AbstractContextManager[None]], backward):
    net, images = make_net(), make_images()
    ours = gf.apply_(copy.deepcopy(net), gf.Plan.all(backward)).train(mode == "train")
    with context(), OpLog() as expected:
        y = net.eval()(images)
    with context(), OpLog() as got:
        z = ours(images)
    assert type(z) is Tensor
    assert torch.equal(z, y)
    assert got.names == expected.names


def test_a_frozen_model_runs_nothing_extra_with_gradients_on():
    net, images = make_net(), make_images()
    ours = gf.apply_(copy.deepcopy(net), gf.Plan.all(gf.Backward(patch=2))).requires_grad_(False)
    with OpLog() as expected:
        y = net.requires_grad_(False).eval()(images)
    with OpLog() as got:
        z = ours(images)
    assert torch.equal(z, y)
    assert got.names == expected.names


def test_values_are_those_of_the_unmodified_model():
    net = make_net()
    torch.testing.assert_close(
        applied(net, gf.Backward(patch=2))(make_images()), plain(net)(make_images()), rtol=1e-12, atol=1e-12
    )


def test_every_activation_of_the_region_is_a_patch_tensor_and_the_output_is_plain():
    net = gf.apply_(make_net(), gf.Plan({"block2": gf.Backward(patch=2), "fc": gf.Backward()}))
    kinds: dict[str, type] = {}
    for name, module in net.named_modules():
        module.register_forward_hook(lambda _m, _args, y, name=name: kinds.update({name: type(y)}))
    net(make_images())
    inside = {name for name, kind in kinds.items() if issubclass(kind, PatchTensor)}
    assert inside == {name for name in kinds if name.startswith("block2")}


# Describe


def test_apply_takes_a_module():
    with pytest.raises(PlanError, match=r"got a list where it takes a model"):
        gf.apply_([make_net()], gf.Plan.all())  # type: ignore[arg-type]


def test_describe_without_a_plan():
    assert gf.describe(make_net()) == "Net: no plan applied."


def test_describe_after_freeze_speaks_of_no_patches():
    plan = gf.Plan({"block2.conv1": gf.Backward(patch=2), "fc": gf.Backward(grid=3)}, batch_norm="frozen")
    model = gf.freeze_(make_net(), plan)
    expected = [
        "Net: 2 layers trained exactly, rest frozen, batch norm frozen",
        "layer         trained",
        "------------  -----------",
        "block2.conv1  weight",
        "fc            weight bias",
    ]
    assert gf.describe(model).splitlines() == expected
    gradients(model)
    assert gf.describe(model).splitlines() == expected
    assert "at patch resolution" in gf.describe(gf.apply_(model, plan))


def test_errors_name_what_was_called():
    for function in (gf.apply_, gf.freeze_):
        name = function.__name__
        with pytest.raises(PlanError, match=f"^{name} got a int where it takes a model"):
            function(3, gf.Plan.all())  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=f"^{name} got Backward where it takes a Plan"):
            function(make_net(), gf.Backward())  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=f"the plan trains nothing: .* {name} freezes, it never un-freezes"):
            function(make_net().requires_grad_(False), gf.Plan.all())


def test_describe_before_and_after_a_forward():
    net = gf.apply_(make_net(), gf.Plan({"block2.conv1": gf.Backward(patch=(2, 3)), "fc": gf.Backward()}))
    text = gf.describe(net)
    assert text.splitlines()[0] == "Net: 1 layer at patch resolution, rest frozen, batch norm eval"
    assert text.splitlines()[1].split() == ["layer", "backward", "patch", "trained"]
    assert "block2.conv1  patch (2, 3)  ?      weight" in text
    assert "none seen yet; run a forward pass" in text
    assert "block1" not in text
    net(make_images())
    text = gf.describe(net)
    assert "block2.conv1  patch (2, 3)  2x3    weight" in text
    assert "none seen yet" not in text
    assert [line.split()[0] for line in text.splitlines()[3:-2]] == ["block2.conv1", "block2.bn1", "fc"]
    assert text.splitlines()[-2:] == [
        "region: block2.conv1",
        "  exit at the mean over space behind block2.conv1: expected",
    ]


def test_describe_has_a_column_of_keeps_where_there_are_any():
    plan = gf.Plan({"block2.conv1": gf.Backward(patch=2, keep=HOSVD(0.8)), "block2": gf.Backward(grid=16), "fc": gf.Backward()})
    net = gf.apply_(make_net(), plan)
    net(make_images())
    lines = [line.split("  ") for line in gf.describe(net).splitlines()]
    cells = {words[0]: [word.strip() for word in words if word.strip()] for words in lines}
    assert cells["layer"] == ["layer", "backward", "patch", "keep", "trained"]
    assert cells["block2.conv1"] == ["block2.conv1", "patch 2", "2", "hosvd:0.8", "weight"]
    assert cells["block2.conv2"][3] == "full"
    assert cells["block2.bn1"] == ["block2.bn1", "-", "-", "-", "weight bias"]


def test_describe_is_not_changed_by_a_forward_without_gradients():
    net = gf.apply_(make_net(), TAIL)
    text = gf.describe(net)
    with torch.no_grad():
        net(make_images())
    assert gf.describe(net) == text


def test_describe_shows_what_the_user_froze():
    net = make_net()
    net.block2.conv1.weight.requires_grad_(False)
    lines = gf.describe(gf.apply_(net, gf.Plan({"block2": gf.Backward(patch=2)}))).splitlines()
    assert next(line for line in lines if line.startswith("block2.conv1")).split()[-1] == "-"


class Sorts(nn.Module):
    """Functions without a rule, inside a region."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x, dim=1).values.cumsum(1)


def test_describe_lists_exits_with_layer_function_and_reason():
    net = gf.apply_(make_net(Sorts()), gf.Plan.all(gf.Backward(patch=2)))
    net.pool = nn.Identity()
    net.fc = nn.Linear(7 * 5 * 4, 3, dtype=torch.float64)
    with pytest.warns(ExitWarning):
        net(make_images())
    lines = gf.describe(net).splitlines()
    assert lines[lines.index("region: stem.0 to block1.conv2 (3 layers)") :] == [
        "region: stem.0 to block1.conv2 (3 layers)",
        "  exit at torch.sort behind block1.conv2: it has no patch rule",
        "region: block2.downsample.0",
        "region: block2.conv1 to block2.conv2 (2 layers)",
        "  exit at torch.Tensor.flatten behind block2.conv2: expected",
    ]


def test_describe_tells_a_case_that_a_rule_does_not_cover():
    net = applied(make_net(Flips()), gf.Backward(patch=2))
    with pytest.warns(ExitWarning, match="does not cover these arguments"):
        net(make_images())
    assert "torch.Tensor.flip behind block1.conv2: its patch rule does not cover these arguments" in gf.describe(net)


class Flips(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(2)


def test_describe_flags_a_grid_that_makes_a_layer_exact():
    net = applied(make_net(), gf.Backward(grid=16))
    net(make_images(size=(16, 16)))
    lines = gf.describe(net).splitlines()
    assert "1 (exact: the map is no larger than the grid)" in next(line for line in lines if line.startswith("block2.conv2"))
    net(make_images(size=(128, 128)))
    assert "(exact" not in gf.describe(net)
    net = applied(make_net(), gf.Backward(grid=16, keep=Int8()))
    net(make_images(size=(16, 16)))
    last = next(line for line in gf.describe(net).splitlines() if line.startswith("block2.conv2"))
    assert "  1 (the map is no larger than the grid)  int8" in last  # gx is exact there, gw is not


# Grid


class Pyramid(nn.Module):
    """Maps of 112, 56, 28, 14 and 7 pixels for an image of 224."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(nn.Conv2d(3 if i == 0 else 2, 2, 3, 2, 1) for i in range(5)))
        self.last = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stages(x)).mean((2, 3))


def patches_of(model: nn.Module, images: Tensor) -> dict[str, tuple[int, int]]:
    """Return the patch of the input of every convolution, as the convolution itself sees it."""
    seen: dict[str, tuple[int, int]] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen[name] = args[0].patch

        return hook

    handles = [m.register_forward_pre_hook(note(n)) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    model(images)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("grid", "size", "patches"),
    [
        (4, 224, [64, 32, 16, 8, 4, 2]),  # R = 64: design.md
        (7, 224, [32, 16, 8, 4, 2, 1]),
        (14, 224, [16, 8, 4, 2, 1, 1]),
        (2, 224, [128, 64, 32, 16, 8, 4]),
        (1, 224, [224, 112, 56, 28, 14, 7]),
        (4, 160, [64, 32, 16, 8, 4, 2]),
        (4, 256, [64, 32, 16, 8, 4, 2]),
        (4, 32, [8, 4, 2, 1, 1, 1]),
        (1000, 224, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_grid_gives_every_map_its_patch(grid, size, patches):
    model = gf.apply_(randomise(Pyramid()), gf.Plan.all(gf.Backward(grid=grid)))
    images = torch.randn(1, 3, size, size, generator=seeded())
    assert patches_of(model, images) == dict(
        zip([f"stages.{i}" for i in range(5)] + ["last"], [(n, n) for n in patches], strict=True)
    )
    last = next(line for line in gf.describe(model).splitlines() if line.startswith("last"))
    assert f"grid {grid}" in last
    assert f" {patches[-1]} " in last


def test_grid_takes_each_axis_by_itself():
    model = gf.apply_(randomise(Pyramid()), gf.Plan.all(gf.Backward(grid=(4, 2))))
    found = patches_of(model, torch.randn(1, 3, 224, 128, generator=seeded()))
    assert found["last"] == (2, 2)
    assert found["stages.4"] == (4, 4)
    assert found["stages.0"] == (64, 64)


def test_grid_follows_the_image_of_each_forward():
    model = gf.apply_(randomise(Pyramid()), gf.Plan.all(gf.Backward(grid=4)))
    for size, patch in ((224, 4), (64, 1), (224, 4)):
        assert patches_of(model, torch.randn(1, 3, size, size, generator=seeded()))["stages.4"] == (patch, patch)


def test_patch_is_the_same_on_every_map_but_never_larger_than_it():
    model = gf.apply_(randomise(Pyramid()), gf.Plan.all(gf.Backward(patch=(5, 9))))
    found = patches_of(model, torch.randn(1, 3, 224, 224, generator=seeded()))
    assert found == {**dict.fromkeys([f"stages.{i}" for i in range(5)], (5, 9)), "last": (5, 7)}


def test_a_part_called_on_its_own_takes_its_input_for_the_image():
    model = Pyramid()
    gf.apply_(randomise(model), gf.Plan.all(gf.Backward(grid=4)))
    model.last(torch.randn(1, 2, 7, 7, generator=seeded())).mean((2, 3)).sum().backward()
    assert next(line for line in gf.describe(model).splitlines() if line.startswith("last")).split()[3] == "2"
    assert model.last.weight.grad is not None


def test_layers_with_their_own_patches_meet():
    plan = gf.Plan({"block1.conv1": gf.Backward(patch=3), "block2.conv1": gf.Backward(patch=(1, 2)), "*": gf.Backward(patch=2)})
    model = gf.apply_(make_net(), plan)
    found = patches_of(model, make_images())
    assert found["block1.conv1"] == (3, 3)
    assert found["block2.conv1"] == (1, 2)
    assert {found[name] for name in found if not name.endswith("conv1")} == {(2, 2)}
    assert all(g is not None and g.isfinite().all() for g in gradients(model).values())


# What the public code got wrong


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular", "replicate"])
@pytest.mark.parametrize(
    "geometry", [{}, {"stride": 2}, {"dilation": 2, "padding": 2}, {"stride": (2, 1), "padding": (2, 1)}], ids=str
)
def test_padding_modes_are_exact_at_patch_1(mode, geometry):
    block = nn.Sequential(
        nn.Conv2d(3, 5, 1),
        nn.Conv2d(5, 4, 3, padding_mode=mode, **{"padding": 1, **geometry}),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).double()
    net = randomise(block)
    assert_close(gradients(applied(net)), gradients(plain(net)))


def test_padding_mode_matters():
    def grads(mode: Any) -> Any:
        net = randomise(
            nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
            )
        )
        return gradients(applied(net.double(), gf.Backward(patch=2)))

    assert_differ(grads("circular"), grads("zeros"), "0.weight")


def test_strided_layers_have_the_right_scale():
    conv = nn.Conv2d(3, 4, 1, stride=2, bias=False, dtype=torch.float64)
    exact, ours = copy.deepcopy(conv), gf.apply_(conv, gf.Plan.all(gf.Backward(patch=2)))
    x, y = (make_images(2, (8, 8)).requires_grad_() for _ in range(2))
    exact(x).mean((2, 3)).sum().backward()
    ours(y).mean((2, 3)).sum().backward()
    torch.testing.assert_close(conv.weight.grad, exact.weight.grad)
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(y.grad.sum(), x.grad.sum())


def test_blocks_of_a_model_can_be_swapped_after_apply():
    net = gf.apply_(make_net(), gf.Plan({"block2": gf.Backward(patch=2), "fc": gf.Backward()})).train()
    block = Block(5, 7, 2).double()
    net.block2 = block
    assert isinstance(net, Net)
    gradients(net)
    assert block.conv1.weight.grad is not None
