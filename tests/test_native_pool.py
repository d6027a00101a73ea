"""Max pooling in the C library: equal to torch's over drawn maps, windows and patches, at every level; so are gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradfilter import ops
from gradfilter.emit import enter
from gradfilter.geometry.tiling import Tiling, map_size
from gradfilter.geometry.windows import make_windows
from gradfilter.ops import native
from gradfilter.ops.constants import find_target
from gradfilter.ops.max_pooling import count_winners
from gradfilter.ops.native import maxpool
from gradfilter.ops.pooling import pool_mean
from gradfilter.rules import pooling
from gradfilter.tensor import Choices, PatchTensor

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")

FILLS = ("ties", "numbers", "nan", "low")

POOLINGS = {
    "resnet": lambda x: F.max_pool2d(x, 3, 2, 1),
    "halves": lambda x: F.max_pool2d(x, [2, 2]),
    "odd": lambda x: torch.max_pool2d(x, (2, 3), (1, 2), (1, 1), (2, 1), ceil_mode=True),
    "wide": lambda x: F.max_pool2d(x, kernel_size=5, stride=1, padding=2),
}

pairs = st.tuples(st.integers(1, 5), st.integers(1, 5))
quick = settings(deadline=None, max_examples=60)


def make_map(shape, fill, seed):
    """Return a channels_last map of small integers with many ties, of distinct numbers, with NaN, or mostly of -inf."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    odd = torch.rand(shape, generator=generator)
    if fill != "numbers":
        x = x.round()  # with zeros of both signs
    if fill == "nan":
        x[odd < 0.2] = math.nan
    if fill == "low":
        x[odd < 0.8] = -math.inf
    return x.contiguous(memory_format=torch.channels_last)


def check(x, options, in_patch, out_patch):
    """Compare the library with torch: maxima and winners bit for bit. Return whether the library covers the case."""
    y, indices = F.max_pool2d(x, *options, return_indices=True)
    size = map_size(y)
    assert pooling.find_size(map_size(x), *options) == size
    windows = make_windows(map_size(x), size, in_patch, out_patch, *options[:4])
    got = maxpool.max_pool(x, windows)
    if windows.taps is None:
        assert got is None
        return False
    assert got is not None
    assert torch.equal(got.y.view(torch.int32), y.view(torch.int32))
    want = count_winners(indices, windows)
    assert got.winners.dtype == want.dtype
    assert torch.equal(got.winners, want)
    assert (got.mean is None) == (out_patch == (1, 1))
    if got.mean is not None:
        torch.testing.assert_close(got.mean, ops.pool_mean(y, out_patch), rtol=1e-5, atol=1e-5, equal_nan=True)
    return True


@pytest.mark.usefixtures("level")
class TestMaxPool:
    @quick
    @given(
        shape=st.tuples(st.integers(1, 2), st.integers(16, 75), st.integers(1, 15), st.integers(1, 15)),
        kernel=pairs,
        stride=pairs,
        padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        ceil=st.booleans(),
        in_patch=pairs,
        out_patch=pairs,
        fill=st.sampled_from(FILLS),
        seed=st.integers(0, 999),
    )
    def test_equals_torch(self, shape, kernel, stride, padding, dilation, ceil, in_patch, out_patch, fill, seed):
        for n, k, p, d in zip(shape[2:], kernel, padding, dilation, strict=True):
            assume(p <= k // 2 and d * (k - 1) < n + 2 * p)
        assume(check(make_map(shape, fill, seed), (kernel, stride, padding, dilation, ceil), in_patch, out_patch))

    @pytest.mark.parametrize("fill", FILLS)
    @pytest.mark.parametrize("patch", [(1, 1), (2, 2), (4, 4), (16, 16), (200, 200)], ids=str)
    def test_resnet_stem(self, fill, patch):
        options = ((3, 3), (2, 2), (1, 1), (1, 1), False)
        assert check(make_map((2, 64, 29, 30), fill, 1), options, (4, 4), patch)

    def test_patch_one_with_a_reach_beyond_a_byte(self):
        assert check(make_map((1, 16, 20, 20), "ties", 2), ((17, 17), (1, 1), (8, 8), (1, 1), False), (1, 1), (1, 1))

    def test_maps_past_the_caches(self):
        assert check(make_map((2, 64, 290, 290), "ties", 3), ((3, 3), (2, 2), (1, 1), (1, 1), False), (4, 4), (4, 4))


def run_rule(call, x, patch, seed):
    """Return the maxima, their means, and the gradient of x for a drawn gradient of the carrier."""
    x = x.detach().requires_grad_()
    y = call(enter(x, Choices("layer", Tiling(patch=patch))))
    assert isinstance(y, PatchTensor), "the rule did not run: this was an exit"
    g = torch.randn(y.carrier.shape, generator=torch.Generator().manual_seed(seed))
    return y.detach(), y.means, torch.autograd.grad(y.carrier, x, g)[0]


@pytest.fixture
def calls(monkeypatch):
    """Note the calls of the library's max pooling."""
    calls, run = [], maxpool.call

    def note(task, *args):
        if task.name == "max_pool":
            calls.append(task)
        return run(task, *args)

    monkeypatch.setattr(maxpool, "call", note)
    return calls


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("patch", [(1, 1), (2, 2), (3, 1), (4, 4), (30, 30)], ids=str)
def test_the_rule_equals_its_torch_path(name, patch, calls):
    call, x = POOLINGS[name], make_map((2, 24, 13, 18), "ties", 4)
    y, means, gx = run_rule(call, x, patch, 5)
    assert len(calls) == 1
    with native.off():
        want_y, _, want_gx = run_rule(call, x, patch, 5)
    assert len(calls) == 1
    assert torch.equal(y, want_y)
    torch.testing.assert_close(gx, want_gx)
    for side, mean in means.items():
        torch.testing.assert_close(mean, pool_mean(want_y, side))
    assert bool(means) == (patch != (1, 1))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_counts_of_any_width_are_routed(dtype):
    generator = torch.Generator().manual_seed(11)
    g = torch.randint(-8, 9, (2, 21, 3, 5), generator=generator).float()
    counts = torch.randint(0, 200, (2, 3, 5, 6, 21), generator=generator).to(dtype)
    windows = make_windows((12, 18), (6, 9), (2, 2), (2, 2), (3, 2), (2, 2), (1, 0), (1, 1))
    assert (windows.in_cells, windows.out_cells, windows.reach) == ((6, 9), (3, 5), (3, 2))
    target = find_target(windows, g)
    got = maxpool.max_route(g, counts.permute(0, 4, 1, 2, 3), windows)
    want = torch.zeros(2, 6 * 9, 21)
    want.index_add_(1, target, (g.permute(0, 2, 3, 1)[:, :, :, None] * counts).reshape(2, -1, 21))
    assert got is not None
    assert torch.equal(got, want.reshape(2, 6, 9, 21).permute(0, 3, 1, 2))


def test_what_the_library_does_not_cover_runs_in_torch(calls):
    call, x = POOLINGS["resnet"], make_map((2, 24, 13, 18), "ties", 6)
    others = (x.contiguous(), x.double(), x[:, :15].contiguous(memory_format=torch.channels_last), x[..., ::2])
    for other in others:
        assert torch.equal(run_rule(call, other, (2, 2), 7)[0], call(other))
    low = make_map((1, 16, 1, 9), "ties", 8)  # row -1 and row 1 of a map of one row
    y = run_rule(lambda x: F.max_pool2d(x, (2, 1), 1, (1, 0), (2, 1)), low, (2, 2), 9)[0]
    assert (y == -math.inf).all()
    assert not calls


def test_arguments_that_torch_refuses_raise_its_errors():
    x = enter(make_map((1, 16, 6, 6), "ties", 10).requires_grad_(), Choices("layer", Tiling(patch=(2, 2))))
    for options in ((3, 0), ((2, 2, 2),), (2, 2, 2), (9,)):
        with pytest.raises(RuntimeError):
            F.max_pool2d(x, *options)  # type: ignore[call-overload]
