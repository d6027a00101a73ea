"""Carriers, and what is kept for backward."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import gradfilter as gf
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.tensor import PatchTensor
from helpers_safety import (
    PLANS,
    applied,
    assert_close,
    find_unexpected,
    gradients,
    grads_of,
    loss_of,
    make_everything,
    make_images,
    make_net,
    plain,
)

# Carriers, and what is kept


def test_every_kind_of_rule_in_one_network_is_exact_at_patch_1():
    net = make_everything(torch.float64)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ours = gf.apply_(copy.deepcopy(net), PLANS["patch 1"])
    assert_close(gradients(ours), gradients(plain(net)))
    assert not find_unexpected(ours)


def test_carriers_are_nan_and_without_storage():
    net = gf.apply_(make_everything(), PLANS["patch 2"])
    carriers: list[Tensor] = []

    def look(_m: nn.Module, _args: Any, y: Any) -> None:
        if isinstance(y, PatchTensor):
            carriers.append(y.carrier)
            assert y.carrier.shape == (*y.shape[:2], *(-(-n // p) for n, p in zip(y.shape[2:], y.patch, strict=True)))

    for module in net.modules():
        module.register_forward_hook(look)
    net(make_images(dtype=torch.float32))
    assert len(carriers) > 20
    for carrier in carriers:
        assert carrier.isnan().all()
        assert carrier.untyped_storage().nbytes() == carrier.element_size()
        assert carrier.requires_grad


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_all_that_is_kept_goes_through_saved_tensors(plan):
    """Kept copies are all that backward may use: the tensors themselves are overwritten before it."""
    model = gf.apply_(make_everything(), plan).train()
    torch.manual_seed(5)
    expected = gradients(model, make_images(dtype=torch.float32))
    storages: dict[int, tuple[Any, ...]] = {}
    known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            storages[x.untyped_storage().data_ptr()] = (x.detach(), x.untyped_storage())
        return x.detach().clone()

    torch.manual_seed(5)
    model.zero_grad()
    with saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(model, make_images(dtype=torch.float32))
    for x, _ in storages.values():
        if x.is_floating_point():
            torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).data.fill_(float("nan"))
    loss.backward()
    assert len(storages) > 5
    assert_close(grads_of(model), expected, 1e-6)


def test_saving_on_the_host_changes_nothing():
    model = applied(make_net(nn.SiLU()), gf.Backward(patch=2))
    expected = gradients(model)
    with save_on_cpu():
        assert_close(gradients(model), expected, 0)


def test_a_pack_hook_that_raises_stops_the_forward():
    def pack(x: Tensor) -> Tensor:
        raise MemoryError("no room")

    model = applied(make_net(), gf.Backward(patch=2))
    with pytest.raises(MemoryError, match="no room"), saved_tensors_hooks(pack, lambda x: x):
        model(make_images())
    assert all(m.training for m in model.modules())


def activations_alive(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Return how many of a model's inner maps are alive between forward and backward, and how many there were."""
    maps: dict[int, tuple[StorageWeakRef, Any]] = {}

    def look(module: nn.Module, _args: Any, y: Any) -> None:
        if y.dim() == 4 and y.shape[-1] > 1 and not isinstance(module, nn.Identity):
            maps[y.untyped_storage()._cdata] = (StorageWeakRef(y.untyped_storage()), weakref.ref(y))

    handles = [m.register_forward_hook(look) for m in model.modules()]
    loss = loss_of(model, images)
    for handle in handles:
        handle.remove()
    gc.collect()
    alive = sum(not storage.expired() or tensor() is not None for storage, tensor in maps.values())
    loss.backward()
    return alive, len(maps)


def test_no_map_of_full_resolution_stays_alive():
    net, images = make_everything(), make_images(dtype=torch.float32)
    alive, total = activations_alive(gf.apply_(copy.deepcopy(net), gf.Plan.all(gf.Backward(patch=4))), images)
    assert total >= 10
    assert alive == 0
    alive, total = activations_alive(plain(net), images)
    assert alive > total / 2


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("size", [(19, 15), (33, 32)])
def test_predicted_saved_bytes_are_those_measured(plan, size):
    model = gf.apply_(make_everything(), plan).train()
    images = make_images(3, size, dtype=torch.float32)
    measured = measure_saved_bytes(model, images)
    assert predict_saved_bytes(model, images) == measured
    assert predict_saved_bytes(model, images.to("meta")) == measured
    assert measured > 0


@pytest.mark.parametrize("prepare", [plain, partial(applied, backward=gf.Backward(patch=3))], ids=["plain", "patch 3"])
def test_predicted_saved_bytes_of_a_residual_network(prepare):
    model = prepare(make_net(nn.GELU()))
    assert predict_saved_bytes(model, make_images()) == measure_saved_bytes(model, make_images())


def test_saved_bytes_fall_with_the_patch():
    net, images = make_everything(), make_images(2, (64, 64), dtype=torch.float32)
    sizes = [
        measure_saved_bytes(gf.apply_(copy.deepcopy(net), gf.Plan.all(gf.Backward(patch=n))), images) for n in (1, 2, 4, 8)
    ]
    exact = measure_saved_bytes(plain(net), images)
    assert exact > 1.2 * sizes[0]
    assert all(a > 2.5 * b for a, b in pairwise(sizes))


def test_two_layers_that_read_the_same_map_keep_its_means_once():
    class Twin(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 1)
            self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return torch.cat([conv(x) for conv in self.convs], 1).mean((2, 3))

    one, two = (
        measure_saved_bytes(gf.apply_(Twin(n), gf.Plan.all(gf.Backward(patch=2))), make_images(dtype=torch.float32))
        for n in (1, 2)
    )
    assert one == two


class MetaOnly(TorchDispatchMode):
    """Count the bytes of real tensors that operators make."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self.made += x.numel() * x.element_size()
        return result


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_prediction_allocates_nothing_and_touches_nothing(plan):
    model = gf.apply_(make_everything(), plan).train()
    state = copy.deepcopy(model.state_dict())
    versions = {name: t._version for name, t in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    images = make_images(dtype=torch.float32).to("meta")
    with MetaOnly() as mode:
        predict_saved_bytes(model, images)
    assert mode.made <= 4096  # constants of a few numbers
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert torch.equal(tensor, state[name])
        assert tensor._version == versions[name]
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_prediction_for_a_batch_that_fits_nowhere():
    model = gf.apply_(make_everything(), PLANS["patch 2"])
    one = predict_saved_bytes(model, torch.empty(1, 3, 224, 224, device="meta"))
    many = predict_saved_bytes(model, torch.empty(100_000, 3, 224, 224, device="meta"))
    assert 0.99 < many / (100_000 * one) <= 1
