"""What a thread switches off: the library, memory that is used again, waiting. Other threads see nothing of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch

import gradfilter as gf
from gradfilter.deferred import at_once, may_compute, may_wait
from gradfilter.ops import native
from gradfilter.ops.native import affine, backward, fused, library, pairs, single
from helpers_safety import gradients, make_images, make_net

needs_library = pytest.mark.skipif(native.load() is None, reason="no library")


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
