"""The library's convolutions: equal to torch's, with what follows them, over drawn shapes and at every level."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradfilter import ops
from gradfilter.ops import native
from gradfilter.ops.native.conv import can_convolve, run_kernel
from native_cases import STEPS, acts, axes, batches, channels, draw_eighths, last, on_threads, parts, sides

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")

quick = settings(deadline=None, max_examples=60)


@st.composite
def threes(draw):
    """Draw one axis of a convolution with a kernel of three: the same as `axes` gives."""
    size, before, after = draw(st.integers(1, 21)), draw(st.integers(0, 2)), draw(st.integers(0, 5))
    return size, 3, 1, 1, before, max(size + before + after - 2, 1)


def draw_ends(shape, has, seed):
    """Return bias, scale, shift and residual, as far as there are any."""
    values = [draw_eighths(shape[1], seed=seed + i, most=16) for i in range(3)]
    values.append(last(draw_eighths(*shape, seed=seed + 3, most=32)))
    return [v if h else None for v, h in zip(values, has, strict=False)]


def same(got, expected, act):
    """Check that two results agree in all they have: to the last bit, where the activation is a step."""
    tolerance = 0.0 if act in STEPS else 4e-6
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if e is not None:
            assert g.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(g, e, rtol=tolerance, atol=tolerance)


def run_windows(x, w, rows, columns, bias, scale, shift, act, patch, residual, kernel="dense"):
    """Return what the library gives and what torch does, for one filter per channel or for a kernel without groups."""
    groups, kernel = (len(w), "depthwise") if w.shape[1] == 1 else (1, kernel)
    _, _, stride, dilation, padding, out = zip(rows, columns, strict=True)
    assert can_convolve(x, w, stride, padding, dilation, groups) == kernel
    run = partial(run_kernel, kernel)
    got = run(x, w, bias, stride, padding, dilation, out, scale, shift, act, patch, residual)
    ends = [(o - 1) * s + (k - 1) * d + 1 for _, k, s, d, _, o in (rows, columns)]
    after = [max(end - p - n, 0) for end, (n, _, _, _, p, _) in zip(ends, (rows, columns), strict=True)]
    padded = F.pad(x, (padding[1], after[1], padding[0], after[0]))[:, :, : ends[0], : ends[1]]
    y = F.conv2d(padded, w, None, stride, 0, dilation, groups)
    if bias is not None:
        y += bias[:, None, None]
    return got, ops.norm_act.reference(last(y), scale, shift, act, patch, residual)


def run_pointwise(x, w, bias, scale, shift, act, patch, residual):
    """Return what the library gives and what torch does."""
    assert can_convolve(x, w, (1, 1), (0, 0), (1, 1), 1) == "dense"
    one, size = (1, 1), (x.shape[2], x.shape[3])
    got = run_kernel("dense", x, w, bias, one, (0, 0), one, size, scale, shift, act, patch, residual)
    y = F.conv2d(x, w)
    if bias is not None:
        y += bias[:, None, None]
    return got, ops.norm_act.reference(last(y), scale, shift, act, patch, residual)


@pytest.mark.usefixtures("level")
class TestEqualsTorch:
    @quick
    @given(n=batches, c=channels, rows=axes(), columns=axes(), patch=sides, act=acts, has=parts, seed=st.integers(0, 99))
    def test_depthwise(self, n, c, rows, columns, patch, act, has, seed):
        x = last(draw_eighths(n, c, rows[0], columns[0], seed=seed, most=16))
        w = draw_eighths(c, 1, rows[1], columns[1], seed=seed + 9, most=8)
        bias, scale, shift, residual = draw_ends((n, c, rows[-1], columns[-1]), has, seed)
        with on_threads(1 + seed % 2):
            same(*run_windows(x, w, rows, columns, bias, scale, shift, act, patch, residual), act)

    @quick
    @given(
        n=batches,
        c=st.integers(2, 4) | st.integers(5, 20),
        d=channels,
        rows=axes(),
        columns=axes(),
        patch=sides,
        act=acts,
        has=parts,
        seed=st.integers(0, 99),
    )
    def test_dense(self, n, c, d, rows, columns, patch, act, has, seed):
        assume(c * rows[1] * columns[1] <= 512)
        assume(c < 16 or (rows[1], columns[1]) != (3, 3))  # those may be Winograd's
        x = last(draw_eighths(n, c, rows[0], columns[0], seed=seed, most=16))
        w = draw_eighths(d, c, rows[1], columns[1], seed=seed + 9, most=8)
        bias, scale, shift, residual = draw_ends((n, d, rows[-1], columns[-1]), has, seed)
        with on_threads(1 + seed % 2):
            same(*run_windows(x, w, rows, columns, bias, scale, shift, act, patch, residual), act)

    @quick
    @given(
        n=batches,
        c=st.integers(1, 53),
        d=channels,
        size=st.tuples(st.integers(1, 13), st.integers(1, 13)),
        patch=sides,
        act=acts,
        has=parts,
        seed=st.integers(0, 99),
    )
    def test_pointwise(self, n, c, d, size, patch, act, has, seed):
        x = last(draw_eighths(n, c, *size, seed=seed, most=16))
        w = draw_eighths(d, c, 1, 1, seed=seed + 9, most=8)
        bias, scale, shift, residual = draw_ends((n, d, *size), has, seed)
        with on_threads(1 + seed % 2):
            same(*run_pointwise(x, w, bias, scale, shift, act, patch, residual), act)

    @quick
    @given(
        n=batches,
        c=channels,
        d=channels,
        rows=threes(),
        columns=threes(),
        patch=sides,
        act=acts,
        has=parts,
        seed=st.integers(0, 99),
    )
    def test_winograd(self, n, c, d, rows, columns, patch, act, has, seed):
        """Its transforms of numbers of few bits are exact, too: not even rounding differs."""
        x = last(draw_eighths(n, c, rows[0], columns[0], seed=seed, most=8))
        w = draw_eighths(d, c, 3, 3, seed=seed + 9, most=8)
        bias, scale, shift, residual = draw_ends((n, d, rows[-1], columns[-1]), has, seed)
        ends = bias, scale, shift, act, patch, residual, "winograd"
        with on_threads(1 + seed % 2):
            same(*run_windows(x, w, rows, columns, *ends), act)

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("act", [ops.RELU, ops.HARDSWISH])
    @pytest.mark.parametrize(
        ("n", "c", "d", "size", "patch"),
        [
            (5, 24, 200, (7, 7), (4, 4)),  # several images at once, several parts of panels
            (2, 24, 104, (61, 39), (4, 4)),  # several patch rows of an image at once
            (2, 16, 72, (33, 70), (33, 70)),  # one patch of more tiles than are transformed at once
            (1, 1500, 16, (9, 20), (3, 2)),  # so many inputs that fewer are
        ],
    )
    def test_winograd_divides_its_work(self, n, c, d, size, patch, act, threads):
        x, w = last(draw_eighths(n, c, *size, seed=0, most=4)), draw_eighths(d, c, 3, 3, seed=1, most=4)
        shift, residual = draw_eighths(d, seed=2, most=16), last(draw_eighths(n, d, *size, seed=3, most=32))
        rows, columns = ((side, 3, 1, 1, 1, side) for side in size)
        with on_threads(threads):
            ends = None, None, shift, act, patch, residual, "winograd"
            same(*run_windows(x, w, rows, columns, *ends), act)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_maps_that_no_cache_holds(self, threads):
        """Such maps are written past the caches, and their rows computed in several bands."""
        x = last(draw_eighths(2, 32, 200, 331, seed=0, most=16))
        scale, shift = draw_eighths(32, seed=1, most=16), draw_eighths(32, seed=2, most=16)
        residual = last(draw_eighths(2, 32, 200, 331, seed=3, most=32))
        rows, columns = (200, 3, 1, 1, 1, 200), (331, 3, 1, 1, 1, 331)
        w, v = draw_eighths(32, 1, 3, 3, seed=4, most=8), draw_eighths(32, 32, 1, 1, seed=5, most=8)
        u = draw_eighths(32, 32, 3, 3, seed=6, most=8)
        ends = (None, scale, shift, ops.RELU6, (4, 4), residual)
        with on_threads(threads):
            same(*run_windows(x, w, rows, columns, *ends), ops.RELU6)
            same(*run_windows(x, u, rows, columns, *ends, kernel="winograd"), ops.RELU6)
            same(*run_pointwise(x, v, *ends), ops.RELU6)


def test_many_inputs_and_outputs():
    x, w = last(draw_eighths(3, 700, 7, 7, seed=0, most=16)), draw_eighths(330, 700, 1, 1, seed=1, most=8)
    same(*run_pointwise(x, w, None, None, None, ops.RELU6, (4, 4), None), ops.RELU6)


def test_rounds_like_torch_on_ordinary_numbers():
    generator = torch.Generator().manual_seed(0)
    x = last(torch.randn(2, 40, 30, 30, generator=generator))
    mean, var, gamma, beta = torch.rand(4, 40, generator=generator).unbind()
    scale, shift = ops.fold_norm(gamma, beta, mean, var, 1e-5)

    def normalise(y):
        return F.silu(F.batch_norm(y, mean, var, gamma, beta))

    w = torch.randn(40, 1, 5, 5, generator=generator)
    got = run_kernel("depthwise", x, w, None, (1, 1), (2, 2), (1, 1), (30, 30), scale, shift, ops.SILU, (4, 4))
    assert got is not None
    torch.testing.assert_close(got.y, normalise(F.conv2d(x, w, None, 1, 2, 1, 40)), rtol=1e-4, atol=1e-5)
    w = torch.randn(40, 40, 1, 1, generator=generator)
    got = run_kernel("dense", x, w, None, (1, 1), (0, 0), (1, 1), (30, 30), scale, shift, ops.SILU, (4, 4))
    assert got is not None
    torch.testing.assert_close(got.y, normalise(F.conv2d(x, w)), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("c", "side"), [(64, 28), (512, 7)])
def test_winograd_rounds_no_worse_than_torch(c, side):
    """Against float64; measured: root mean square errors of 0.6 times those of torch's own float32."""
    generator = torch.Generator().manual_seed(0)
    x, w = last(torch.randn(2, c, side, side, generator=generator)), torch.randn(c, c, 3, 3, generator=generator)
    one, ends = (1, 1), (None, None, ops.IDENTITY, (1, 1))
    found = run_kernel("winograd", x, w, ends[0], one, one, one, (side, side), *ends)
    assert found is not None
    got = found.y
    truth = F.conv2d(x.double(), w.double(), padding=1)
    ours, torchs = ((y - truth).square().mean().sqrt() for y in (got, F.conv2d(x, w, padding=1)))
    assert ours < 2 * torchs


def test_infinities_and_nan_stay():
    x, w = last(torch.zeros(1, 16, 4, 4)), torch.ones(16, 1, 1, 1)
    x[0, 0, 0, 0], x[0, 1, 1, 1], x[0, 2, 2, 2] = float("nan"), float("inf"), -float("inf")
    one = (4, 1, 1, 1, 0, 4)
    for act in STEPS:
        got, expected = run_windows(x, w, one, one, None, None, None, act, (2, 2), None)
        assert got is not None
        for g, e in zip(got, expected, strict=True):
            assert (g is None) == (e is None)
            if g is not None and e is not None:
                assert torch.equal(g.nan_to_num(7), e.nan_to_num(7))


def test_runs_in_torch_what_the_library_cannot():
    x, w = draw_eighths(2, 20, 9, 9, seed=0, most=16), draw_eighths(20, 1, 3, 3, seed=1, most=8)
    for image in (x, last(x).double(), last(x)[..., ::2]):
        assert can_convolve(image, w.to(image.dtype), (1, 1), (1, 1), (1, 1), 20) is None
    ends = (None, (1, 1), (1, 1), (1, 1), 20, (9, 9), None, None, ops.RELU6, (4, 4))
    with native.off():
        expected = ops.convolve(last(x), w, *ends)
    for got in (ops.convolve(x, w, *ends), ops.convolve(last(x), w, *ends)):
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "stride", "padding", "groups", "kernel"),
    [
        ((32, 32, 1, 1), (1, 1), (0, 0), 1, "dense"),
        ((32, 32, 1, 1), (2, 1), (0, 0), 1, "dense"),
        ((32, 32, 1, 1), (1, 1), (1, 0), 1, "dense"),
        ((32, 16, 1, 1), (1, 1), (0, 0), 2, None),
        ((8, 32, 1, 1), (1, 1), (0, 0), 1, None),
        ((32, 1, 3, 3), (2, 1), (1, 5), 32, "depthwise"),
        ((64, 1, 3, 3), (1, 1), (1, 1), 32, None),
        ((32, 32, 3, 3), (1, 1), (1, 1), 1, "winograd"),
        ((32, 32, 3, 3), (1, 1), (0, 2), 1, "winograd"),
        ((32, 32, 3, 3), (1, 1), (1, 3), 1, "dense"),
        ((32, 32, 3, 3), (2, 1), (1, 1), 1, "dense"),
        ((32, 32, 5, 3), (1, 1), (1, 1), 1, "dense"),
    ],
)
def test_says_which_convolutions_it_runs(shape, stride, padding, groups, kernel):
    x = last(torch.zeros(1, 32, 9, 9))
    assert can_convolve(x, torch.zeros(shape), stride, padding, (1, 1), groups) == kernel


def test_leaves_to_torch_what_torch_does_faster():
    size = 14, 14
    assert native.prefers("depthwise", (32, 1, 3, 3), (2, 2), size)
    assert native.prefers("dense", (32, 96, 1, 1), (1, 1), size)
    assert not native.prefers("dense", (320, 960, 1, 1), (1, 1), size)
    assert native.prefers("dense", (64, 3, 7, 7), (2, 2), size)
    assert native.prefers("dense", (128, 64, 3, 3), (2, 2), size)
    assert not native.prefers("dense", (256, 128, 3, 3), (2, 2), size)
    assert not native.prefers("dense", (256, 128, 1, 1), (2, 2), size)


@pytest.mark.parametrize(
    ("size", "faster"), [((2, 2), True), ((3, 3), False), ((3, 16), True), ((1, 32), False), ((7, 7), True), ((56, 56), True)]
)
def test_winograd_is_for_maps_that_its_tiles_fit(size, faster):
    assert native.prefers("winograd", (32, 32, 3, 3), (1, 1), size) == faster
