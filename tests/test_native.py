"""The C library: equal to torch over drawn maps, at every level of the instruction set; its threads and its memory."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cases import draw
from gradfilter import ops
from gradfilter.geometry.tiling import count_cells, count_dtype
from gradfilter.ops import native
from gradfilter.ops.native.library import find_team
from gradfilter.ops.native.pooling import can_scale
from gradfilter.ops.pooling import pool_map

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")

LAYOUTS = (torch.contiguous_format, torch.channels_last)
STEPS = (ops.IDENTITY, ops.RELU, ops.RELU6, ops.Act(ops.CLAMP, -1.5, 2.0), ops.Act(ops.LEAKY, slope=0.25))
ACTS = (*STEPS, ops.HARDSWISH, ops.SILU)

shapes = st.tuples(st.integers(1, 3), st.integers(1, 37), st.integers(1, 13), st.integers(1, 21))
sides = st.tuples(st.integers(1, 6), st.integers(1, 6)) | st.sampled_from([(1, 1), (4, 4), (7, 1), (16, 16), (20, 30)])
layouts = st.sampled_from(LAYOUTS)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
quick = settings(deadline=None, max_examples=60)


@pytest.fixture(params=["torch's", "its own"])
def two_threads(request):
    """Run a test on two threads, torch's or the library's."""
    library = native.load()
    assert library is not None
    if request.param == "its own":
        library.gf_set_team(None)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
    library.gf_set_team(find_team())


def draw_eighths(*shape, seed, most=64):
    """Return numbers of few bits: products and sums of a few of them are exact, in whatever order they are added."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator) / 8


def same(got, expected, tolerance=0.0):
    """Check that two results agree in all they have."""
    for name, g, e in zip(got._fields, got, expected, strict=True):
        assert (g is None) == (e is None), name
        if e is not None:
            assert g.dtype == e.dtype
            spread = tolerance if e.is_floating_point() else 0
            torch.testing.assert_close(
                g, e, rtol=spread, atol=spread, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.usefixtures("level")
class TestPass:
    @quick
    @given(
        shape=shapes,
        patch=sides,
        layout=layouts,
        dtype=dtypes,
        act=st.sampled_from(ACTS),
        parts=st.tuples(*[st.booleans()] * 5),
        seed=st.integers(0, 99),
    )
    def test_equals_torch(self, shape, patch, layout, dtype, act, parts, seed):
        has_scale, has_shift, has_residual, inplace, odd = parts
        x = draw_eighths(*shape, seed=seed).to(dtype)
        if odd:
            # torch's own slope of hardswish at NaN depends on where in the tensor it is.
            values = (math.inf, -math.inf) if act == ops.HARDSWISH else (math.inf, -math.inf, math.nan)
            x.view(-1)[seed % x.numel()] = values[seed % len(values)]
        x = x.contiguous(memory_format=layout)
        scale = draw_eighths(shape[1], seed=seed + 1, most=16) if has_scale else None
        shift = draw_eighths(shape[1], seed=seed + 2) if has_shift else None
        residual = draw_eighths(*shape, seed=seed + 3).to(dtype) if has_residual else None
        expected = ops.norm_act.reference(x, scale, shift, act, patch, residual)
        assert native.can_run(x)
        got = ops.norm_act(x, scale, shift, act, patch, residual, out=x if inplace else None)
        tolerance = 0.0 if act in STEPS else 4e-6 if dtype is torch.float32 else 8e-3
        same(got, expected, tolerance)
        assert (got.y.data_ptr() == x.data_ptr()) == inplace
        assert got.y.is_contiguous(memory_format=layout)
        if got.mean is not None:
            assert got.mean.is_contiguous(memory_format=layout)

    @quick
    @given(shape=shapes, patch=sides, layout=layouts, dtype=dtypes, seed=st.integers(0, 99))
    def test_pools_and_unpools_like_torch(self, shape, patch, layout, dtype, seed):
        x = draw_eighths(*shape, seed=seed).to(dtype).contiguous(memory_format=layout)
        for got, sums in ((ops.pool_mean(x, patch), False), (ops.pool_sum(x, patch), True)):
            torch.testing.assert_close(got, pool_map(x, patch, sums=sums), rtol=0, atol=0)
            assert got.is_contiguous(memory_format=layout)
        cells = draw_eighths(*shape[:2], *count_cells(shape[2:], patch), seed=seed).to(dtype).contiguous(memory_format=layout)
        got = ops.unpool(cells, patch, shape[2:])
        torch.testing.assert_close(got, ops.unpool.reference(cells, patch, shape[2:]), rtol=0, atol=0)

    @quick
    @given(
        shape=shapes,
        patch=sides,
        layout=layouts,
        other=layouts,
        slopes=st.sampled_from([(0.0, 1.0), (0.25, 1.0)]),
        seed=st.integers(0, 99),
    )
    def test_scales_gradients_by_counts(self, shape, patch, layout, other, slopes, seed):
        assume(patch != (1, 1))  # counts are bits there
        steep = draw(*shape, seed=seed) > 0
        size, (low, high) = (shape[2], shape[3]), slopes
        count = pool_map(steep.float(), patch, sums=True).to(count_dtype(patch)).contiguous(memory_format=layout)
        g = draw(*count.shape, seed=seed + 1).float().contiguous(memory_format=other)
        assert can_scale(g, count)
        got = ops.scale_by_counts(g, count, slopes, size, patch)
        assert got.is_contiguous(memory_format=layout)
        torch.testing.assert_close(got, g * (low + (high - low) * pool_map(steep.float(), patch)))

    def test_scales_only_what_it_can_read(self):
        g, count = draw(2, 3, 4, 5).float(), torch.ones(2, 3, 4, 5, dtype=torch.uint8)
        assert can_scale(g, count)
        assert can_scale(g, count.contiguous(memory_format=torch.channels_last))
        assert not can_scale(g.double(), count)
        assert not can_scale(g[:, :2], count[:, :2])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_rounds_like_torch_on_ordinary_numbers(self, layout):
        x = draw(2, 40, 30, 30).float().contiguous(memory_format=layout)
        scale, shift = draw(40, seed=1).float(), draw(40, seed=2).float()
        for act in ACTS:
            got = ops.norm_act(x, scale, shift, act, (4, 4))
            expected = ops.norm_act.reference(x, scale, shift, act, (4, 4))
            torch.testing.assert_close(got.y, expected.y)
            torch.testing.assert_close(got.mean, expected.mean)

    def test_silu_over_its_whole_range(self):
        x = torch.linspace(-120, 120, 32 * 64).view(1, 32, 8, 8)
        got, expected = (f(x, None, None, ops.SILU, (2, 1)) for f in (ops.norm_act, ops.norm_act.reference))
        torch.testing.assert_close(got.y, expected.y, rtol=1e-6, atol=1e-30)
        torch.testing.assert_close(got.slope, expected.slope, rtol=1e-5, atol=1e-6)

    @pytest.mark.usefixtures("two_threads")
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("act", ACTS)
    def test_two_threads_do_what_one_does(self, act, layout):
        x = draw(3, 96, 41, 43).float().contiguous(memory_format=layout)
        two = ops.norm_act(x, None, None, act, (4, 4))
        torch.set_num_threads(1)
        same(two, ops.norm_act(x, None, None, act, (4, 4)))

    def test_large_patches_count_in_wider_integers(self):
        x = torch.ones(1, 3, 200, 200)
        for side, dtype in ((15, torch.uint8), (16, torch.int16), (200, torch.int32)):
            slope = ops.norm_act(x, None, None, ops.RELU, (side, side)).slope
            assert slope is not None
            assert slope.dtype == dtype
            assert slope[0, 0, 0, 0] == side * side


class TestWhatItTakes:
    def test_residual_and_out_of_another_layout(self):
        x, residual = draw_eighths(2, 6, 8, 10, seed=0), draw_eighths(2, 6, 8, 10, seed=1)
        expected = ops.norm_act.reference(x, None, None, ops.RELU, (3, 3), residual)
        for other in (residual.contiguous(memory_format=torch.channels_last), residual.transpose(2, 3).clone().transpose(2, 3)):
            same(ops.norm_act(x, None, None, ops.RELU, (3, 3), other), expected)
            out = torch.empty_like(other)
            same(ops.norm_act(x, None, None, ops.RELU, (3, 3), residual, out=out), expected)
            torch.testing.assert_close(out, expected.y)

    def test_channel_numbers_of_another_dtype_or_stride(self):
        x, numbers = draw(2, 6, 8, 10).float(), draw(12)
        for scale in (numbers[:6], numbers.float()[::2]):
            same(
                ops.norm_act(x, scale, scale, ops.RELU, (3, 3)),
                ops.norm_act.reference(x, scale.float(), scale.float(), ops.RELU, (3, 3)),
                1e-6,
            )

    def test_in_place_is_seen_by_autograd(self):
        x = draw(1, 2, 4, 4).float()
        version = x._version
        ops.norm_act(x, None, None, ops.RELU, (2, 2), out=x)
        assert x._version > version

    def test_switches(self):
        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        x = draw(1, 2, 4, 4).float()
        with native.off():
            assert not native.can_run(x)
        with Watch():
            assert not native.can_run(x)
        assert native.can_run(x)

    @pytest.mark.parametrize("affine", [True, False])
    def test_fold_is_batch_norm(self, affine):
        x, mean, var = draw(2, 7, 5, 5).float(), draw(7, seed=1).float(), draw(7, seed=2).float().abs()
        gamma, beta = (draw(7, seed=3).float(), draw(7, seed=4).float()) if affine else (None, None)
        expected = torch.nn.functional.batch_norm(x, mean, var, gamma, beta, eps=1e-3)
        scale, shift = ops.fold_norm(gamma, beta, mean, var, 1e-3)
        torch.testing.assert_close(ops.norm_act(x, scale, shift, ops.IDENTITY, (1, 1)).y, expected, rtol=1e-5, atol=1e-5)
        with native.off():
            for ours, torchs in zip((scale, shift), ops.fold_norm(gamma, beta, mean, var, 1e-3), strict=True):
                torch.testing.assert_close(ours, torchs)


GRAIN = 1 << 16
"""What sizes of blocks are rounded up to."""


def find_gap():
    """Return the bytes that a block has behind it: some where the address sanitizer watches them."""
    return GRAIN if hasattr(native.load(), "__asan_init") else 0


class TestMemory:
    @pytest.fixture(autouse=True)
    def fresh(self):
        """Start with no block kept."""
        native.trim()
        yield
        native.trim()

    def test_blocks_come_back_and_are_used_again(self):
        before, gap = native.block_bytes().used, find_gap()
        x = native.empty((4, 96, 64, 64), torch.float32, torch.channels_last)
        assert x.shape == (4, 96, 64, 64)
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert native.block_bytes().used - before == x.nbytes + gap
        address = x.data_ptr()
        assert address % 64 == 0
        x.fill_(1)
        view = x[1:]
        del x
        assert native.block_bytes().kept == 0  # the view holds it
        del view
        assert native.block_bytes().used == before
        half, rest = native.empty((4 * 96 * 32, 64)), native.empty((4 * 96 * 32 - gap // 256, 64))
        assert half.data_ptr() == address
        assert rest.data_ptr() == address + half.nbytes + gap
        del half, rest  # neighbours become one block again
        assert native.empty((4 * 96 * 64, 64)).data_ptr() == address

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int16, torch.int32])
    def test_dtypes(self, dtype):
        x = native.empty((2, 3, 1000, 1000), dtype)
        assert x.dtype == dtype
        assert x.is_contiguous()
        assert native.block_bytes().used
        assert x.fill_(3).sum() == 3 * x.numel()

    @settings(deadline=None, max_examples=50)
    @given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60))
    def test_what_is_kept_is_bounded(self, requests):
        native.trim()
        held = []
        for megabytes, free in requests:
            if free and held:
                held.pop(0)
            held.append(native.empty((megabytes, 1 << 20), torch.uint8))
            used, kept, most = native.block_bytes()
            assert used + kept <= most + most // 8 + GRAIN
            assert most >= used >= sum(x.nbytes for x in held)
        starts = sorted((x.data_ptr(), x.nbytes) for x in held)
        for (start, size), (following, _) in itertools.pairwise(starts):
            assert start + size <= following

    def test_small_ones_and_plain_memory_are_torchs(self):
        before = native.block_bytes().used
        small = native.empty((10, 10))
        with native.plain_memory():
            large = native.empty((1024, 1024))
        with native.off():
            other = native.empty((1024, 1024))
        assert native.block_bytes().used == before
        assert small.shape == (10, 10)
        assert large.shape == other.shape == (1024, 1024)


FORK = """
import os, torch
from gradfilter import ops
from gradfilter.ops import native
x = torch.arange(2.0 * 64 * 64 * 64).view(2, 64, 64, 64).remainder(7)
torch.set_num_threads(2)  # and no function of torch that would use them: its own threads do not outlive a fork
run = lambda: [t.numpy() for t in ops.norm_act(x, None, None, ops.RELU6, (4, 4))]
expected = run()
kept = native.empty((64, 1 << 20), torch.uint8)
del kept
children = []
for _ in range(3):
    child = os.fork()
    if not child:
        ok = all((a == b).all() for a, b in zip(run(), expected))
        native.empty((64, 1 << 20), torch.uint8).numpy().fill(1)
        os._exit(0 if ok else 1)
    run()
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are found another way")
def test_it_runs_on_the_threads_that_torch_has():
    assert (find_team() is not None) == ("OpenMP not found" not in torch.__config__.parallel_info())


def test_forked_children_have_threads_of_their_own():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("two_threads")
def test_several_callers_at_once():
    from concurrent.futures import ThreadPoolExecutor

    maps = [draw(2, 64, 48, 48, seed=seed).float() for seed in range(8)]

    def run(x):
        return ops.norm_act(x, None, None, ops.RELU6, (4, 4))

    expected = [run(x) for x in maps]
    with ThreadPoolExecutor(4) as callers:
        for got, wanted in zip(callers.map(run, maps), expected, strict=True):
            same(got, wanted)


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_environment_switches_it_off(value, monkeypatch):
    monkeypatch.setenv("GRADFILTER_NATIVE", value)
    assert (native.find_library() is not None) == (value == "1")


def test_a_file_that_is_no_library_is_named_and_passed_over(tmp_path, monkeypatch, caplog):
    (tmp_path / "libgradfilter.so").write_text("no library")
    monkeypatch.setenv("GRADFILTER_NATIVE_LIBRARY", str(tmp_path / "libgradfilter.so"))
    assert native.load.__wrapped__() is None
    assert "libgradfilter.so" in caplog.text
