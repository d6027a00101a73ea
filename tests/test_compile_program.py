"""Programs: memory laid out beforehand, bytes as in eager mode, what is printed of them, several calls at once."""

import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradfilter as gf
from gradfilter.bench.setup import shake_
from gradfilter.compile.memory import place, place_apart, round_up
from gradfilter.compile.program import Program, Run
from gradfilter.compile.programs import Compiled
from gradfilter.compile.record import Buffer
from gradfilter.models import make_model
from gradfilter.ops import native

needs_library = pytest.mark.skipif(native.load() is None, reason="the C library was not built")


@st.composite
def draw_buffers(draw):
    """Return buffers with some sizes and lifetimes."""
    found = []
    for size, first, length in draw(
        st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 8)), max_size=30)
    ):
        found.append(Buffer(torch.empty(size, dtype=torch.uint8), "blank", first, first + length))
    return found


@given(draw_buffers())
def test_buffers_that_live_at_once_lie_apart(buffers):
    offsets, end = place(buffers)
    for i, a in enumerate(buffers):
        assert offsets[a] % 64 == 0
        assert offsets[a] + a.bytes <= end
        for b in buffers[:i]:
            meet = a.first <= b.last and b.first <= a.last
            apart = offsets[a] + a.bytes <= offsets[b] or offsets[b] + b.bytes <= offsets[a]
            assert apart or not meet
    if buffers:
        alive = [sum(round_up(b.bytes) for b in buffers if b.first <= step <= b.last) for step in range(30)]
        assert max(alive) <= end <= place_apart(buffers)[1]


def make_step(name="mobilenet_v2", pixels=64, batch=2, backward=None):
    """Return a model under a plan, compiled, an input, and what its first call has made."""
    torch.manual_seed(0)
    model = shake_(make_model(name, generator=torch.Generator().manual_seed(0))).eval()
    gf.apply_(model, gf.Plan.all(backward or gf.Backward(grid=4)))
    x = torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend="gradfilter")
    return model, compiled, x


def train(model, call, x):
    """Return the gradients of one step."""
    for p in model.parameters():
        p.grad = None
    call(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def find_programs(model) -> list[Compiled]:
    """Return what was compiled of a model."""
    from gradfilter.hooks import find_applied

    applied = find_applied(model)
    assert applied is not None
    return [program for reference in applied.programs if (program := reference()) is not None]


def assert_close(found, expected, tolerance=2e-5):
    """Check that gradients are equal to rounding."""
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        assert (found[name] - g).norm() <= tolerance * g.norm() + 1e-9, name


def count_saved(call, x, model):
    """Return the bytes that autograd holds of a forward, but for parameters, buffers and the input."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    held: dict[int, int] = {}

    def note(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = call(x)
    del y
    return sum(held.values())


@needs_library
@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
@pytest.mark.parametrize("last", [True, False], ids=["nhwc", "nchw"])
def test_as_many_bytes_are_held_as_in_eager_mode(name, last):
    model, compiled, x = make_step(name)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    expected = train(model, model, x)
    assert_close(train(model, compiled, x), expected)
    (program,) = find_programs(model)
    held = count_saved(compiled, x, model)
    assert held == pytest.approx(count_saved(model, x, model), rel=0.02)
    assert program.forward.block_bytes <= held


@needs_library
def test_a_step_is_a_few_calls_of_the_library():
    """Convolution, norm, residual, activation, means and slopes are one task; tasks in a row are one call."""
    model, compiled, x = make_step(pixels=128, backward=gf.Backward(patch=4))
    train(model, compiled, x)
    (program,) = find_programs(model)
    tasks = sum(isinstance(step, Run) for step in program.forward.steps)
    assert program.forward.tasks > 60
    assert len(program.forward.steps) < 40
    assert tasks < 20


def test_what_is_compiled_is_told():
    model, compiled, x = make_step()
    assert "nothing is compiled yet" in gf.program(model)
    train(model, compiled, x)
    told = gf.program(model)
    if native.load() is None:
        assert "nothing is compiled yet" in told
        return
    assert "inputs [2, 3, 64, 64]" in told
    assert "features.18.0" in told
    assert "convolve + norm + clamp" in told
    assert "conv_norm_gradients" in told
    assert "held until backward" in told
    assert "no plan applied" in gf.program(nn.Conv2d(3, 3, 1))


@needs_library
def test_two_threads_train_through_one_program():
    model, compiled, x = make_step()
    expected = train(model, compiled, x)
    found, weights = {}, [p for p in model.parameters() if p.requires_grad]

    def work(number):
        for _ in range(3):
            found[number] = torch.autograd.grad(compiled(x).square().mean(), weights)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for gradients in found.values():
        assert_close(dict(zip(expected, gradients, strict=True)), expected)


@needs_library
def test_a_thousand_calls_hold_no_more_than_ten():
    model, compiled, x = make_step(pixels=32, batch=1)

    def count():
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    for _ in range(10):
        train(model, compiled, x)
    before = count()
    for _ in range(1000):
        train(model, compiled, x)
    assert count() <= before
    (program,) = find_programs(model)
    assert len(program.forward.free) == 1


@needs_library
def test_inference_is_a_program_that_holds_nothing():
    model, compiled, x = make_step()
    with torch.no_grad():
        y, expected = compiled(x), model(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    (program,) = find_programs(model)
    assert program.backward is None
    assert program.forward.block_bytes == 0
    assert isinstance(program.forward, Program)
