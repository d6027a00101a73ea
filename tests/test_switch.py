"""What a thread switches off: the library, memory that is used again, waiting. Other threads see nothing of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import gradfilter as gf
from gradfilter import ops
from gradfilter.deferred import at_once, may_compute, may_wait
from gradfilter.ops import native
from gradfilter.ops.native import affine, backward, fused, library, pairs, single
from helpers_safety import gradients, make_images, make_net

needs_library = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")


def takes_blocks() -> bool:
    """Tell whether a large tensor is on memory that is used again."""
    before = native.block_bytes().used
    x = native.empty((1 << 20,))
    return native.block_bytes().used >= before + x.nbytes


SWITCHES = {
    "library": pytest.param(native.off, native.is_on, marks=needs_library),
    "memory": pytest.param(native.plain_memory, takes_blocks, marks=needs_library),
    "waiting": pytest.param(at_once, may_wait),
    "fused passes": pytest.param(at_once, may_compute),
}
switches = pytest.mark.parametrize(("hold_off", "is_on"), SWITCHES.values(), ids=SWITCHES.keys())
Hold = Callable[[], AbstractContextManager[None]]
Ask = Callable[[], bool]


@switches
def test_it_nests_and_comes_back_after_errors(hold_off: Hold, is_on: Ask):
    assert is_on()
    with hold_off():
        with hold_off():
            assert not is_on()
        assert not is_on()
        with pytest.raises(KeyError), hold_off():
            raise KeyError
        assert not is_on()
    assert is_on()


@switches
def test_other_threads_do_not_see_it(hold_off: Hold, is_on: Ask):
    inside, looked = threading.Event(), threading.Event()

    def hold() -> tuple[bool, bool]:
        with hold_off():
            inside.set()
            assert looked.wait(60)
            within = is_on()
        return within, is_on()

    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(hold)
        assert inside.wait(60)
        try:
            assert is_on()
            assert pool.submit(is_on).result()
            with hold_off():
                assert pool.submit(is_on).result()  # a thread that runs already
                with ThreadPoolExecutor(1) as started:
                    assert started.submit(is_on).result()
            assert is_on()
        finally:
            looked.set()
        assert held.result() == (False, True)


@switches
def test_a_generator_holds_it_off_until_it_is_closed(hold_off: Hold, is_on: Ask):
    def generate() -> Generator[bool]:
        with hold_off():
            yield is_on()
            yield is_on()

    first, second = generate(), generate()
    assert [next(first), next(second)] == [False, False]
    first.close()  # not the one that came last
    assert not is_on()
    assert list(second) == [False]
    assert is_on()


@switches
def test_tasks_do_not_see_each_others(hold_off: Hold, is_on: Ask):
    async def hold(inside: asyncio.Event, looked: asyncio.Event) -> None:
        with hold_off():
            inside.set()
            await looked.wait()
            assert not is_on()

    async def look() -> None:
        inside, looked = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(hold(inside, looked))
        await inside.wait()
        assert is_on()
        looked.set()
        await task
        assert is_on()

    asyncio.run(look())


@needs_library
def test_a_backward_runs_in_the_thread_that_calls_it(monkeypatch: pytest.MonkeyPatch):
    """Whether the library is off there holds for the backward too, and for nobody's beside it."""
    model = gf.apply_(make_net(dtype=torch.float32), gf.Plan.all(gf.Backward(patch=2))).train()
    called: dict[str, set[int]] = {}
    call = library.call

    def count(name: str, *args: object) -> int:
        called.setdefault(name, set()).add(threading.get_ident())
        return call(name, *args)  # type: ignore[arg-type]

    for module in (affine, backward, fused, pairs, single):
        monkeypatch.setattr(module, "call", count)
    with native.off():
        gradients(model, make_images(dtype=torch.float32))
    assert not called
    with native.off(), ThreadPoolExecutor(1) as pool:
        pool.submit(gradients, model, make_images(dtype=torch.float32)).result()
    assert called
    assert threading.get_ident() not in set().union(*called.values())


def count_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of the library adds its thread."""
    called, call = [], library.call

    def count(*args: object) -> int:
        called.append(threading.get_ident())
        return call(*args)  # type: ignore[arg-type]

    for module in (affine, fused):
        monkeypatch.setattr(module, "call", count)
    return called


@needs_library
def test_a_level_of_forward_differentiation_is_for_dual_tensors_alone(monkeypatch: pytest.MonkeyPatch):
    """torch has one level for all threads: the library goes by the tensors, so that no other thread loses it."""
    called, opened, looked = count_kernels(monkeypatch), threading.Event(), threading.Event()
    x = torch.randn(2, 16, 4, 4, generator=torch.Generator().manual_seed(0))
    scale = torch.full((16,), 2.0)

    def hold() -> torch.Tensor:
        with forward_ad.dual_level():
            opened.set()
            assert looked.wait(60)
            dual = forward_ad.make_dual(x, x)
            assert not native.can_run(dual)
            tangent = forward_ad.unpack_dual(ops.pool_mean(dual, (2, 2))).tangent
            assert tangent is not None
            return tangent.clone()

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        assert opened.wait(60)
        try:
            assert forward_ad._current_level >= 0
            assert native.is_on()
            assert native.can_run(x)
            ops.norm_act(x, scale, None, ops.RELU, (2, 2))
            assert called == [threading.get_ident()]
        finally:
            looked.set()
        torch.testing.assert_close(held.result(), ops.pool_mean(x, (2, 2)))


DUALS: dict[str, Callable[..., Any]] = {
    "the map": lambda dual, x, v: ops.norm_act(dual(x), v, None, ops.IDENTITY, (2, 2)).y,
    "a factor": lambda dual, x, v: ops.norm_act(x, dual(v), None, ops.IDENTITY, (2, 2)).y,
    "within a norm": lambda dual, x, v: (
        ops.conv_norm_gradients_by(
            lambda g, w: (g, None), x, torch.ones(16, 1, 1, 1), None, ops.FixedNorm(dual(v), v, v, 0.0), True, False
        ).gb
    ),
    "by name": lambda dual, x, v: ops.norm_act(x=x, scale=None, shift=dual(v), act=ops.IDENTITY, patch=(2, 2)).y,
}
"""Functions of a map and a row of numbers, linear in the one that is made dual."""


@pytest.mark.parametrize("function", DUALS.values(), ids=DUALS.keys())
def test_a_tangent_is_not_lost(function):
    x, v = torch.ones(2, 16, 4, 4), torch.full((16,), 4.0)
    none = function(torch.zeros_like, x, v)
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(function(lambda x: forward_ad.make_dual(x, x), x, v))
        torch.testing.assert_close(tangent, y - none)


@needs_library
@pytest.mark.parametrize("place", ["image", "0.weight", "0.bias", "1.weight", "1.bias"])
@pytest.mark.parametrize("trunk", ["float32", "bfloat16"])
def test_frozen_layers_keep_a_tangent(place, trunk):
    """Their functions wait for each other in the library, but not for a parameter that is dual."""
    norm = nn.BatchNorm2d(32)
    layers = nn.Sequential(nn.Conv2d(16, 32, 3), norm, nn.ReLU(), nn.Conv2d(32, 16, 1)).eval()
    images = torch.randn(2, 16, 9, 9, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=torch.channels_last)
    nn.init.constant_(norm.bias, 9.0)  # no pixel near the kink, across which bfloat16 might move it
    model = nn.Sequential(layers, nn.Conv2d(16, 4, 1))

    def run(trunk: nn.Module) -> torch.Tensor | None:
        values = {**dict(trunk.named_parameters()), **dict(trunk.named_buffers()), "image": images}
        with forward_ad.dual_level():
            values[place] = forward_ad.make_dual(values[place].detach(), torch.ones_like(values[place]))
            y = torch.func.functional_call(trunk, values, values["image"])
            tangent = forward_ad.unpack_dual(y).tangent
            return None if tangent is None else tangent.detach().clone()

    expected = run(layers)
    gf.apply_(model, gf.Plan.last(1, gf.Backward(patch=2), trunk=trunk))
    got = run(layers)
    assert expected is not None
    assert got is not None
    assert (got - expected).norm() <= (1e-5 if trunk == "float32" else 0.05) * expected.norm()
