"""An expansion and its depthwise convolution in one call: equal to one after the other, over drawn shapes, at every level."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradfilter import ops
from gradfilter.ops import native
from native_cases import STEPS, acts, axes, batches, channels, draw_eighths, last, on_threads, parts, sides

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")

quick = settings(deadline=None, max_examples=60)


def draw_halves(*shape, seed):
    """Return numbers of so few bits that sums of products of three of them are exact."""
    return 4 * draw_eighths(*shape, seed=seed, most=2)


def draw_ending(channels, act, patch, has, seed):
    """Return what follows a convolution, with those of bias, scale and shift that it is to have."""
    bias, shift = (draw_eighths(channels, seed=seed + i, most=16) for i in range(2))
    values = bias, 2 * draw_halves(channels, seed=seed + 2), shift
    bias, scale, shift = (v if h else None for v, h in zip(values, has, strict=False))
    return ops.Ending(bias, scale, shift, act, patch)


def compare(x, w, middle, taps, rows, columns, end, cells=None):
    """Check one call against torch, one convolution after the other; return what the call gave."""
    _, _, stride, dilation, padding, out = zip(rows, columns, strict=True)
    assert native.can_expand(x, w, taps)
    run = partial(ops.expand, x, w, middle, taps, stride, padding, dilation, out, end)
    got = run(cells)
    with native.off():
        expected = run()
    same(got.hidden, expected.hidden, 0.0 if middle.act in STEPS else 1e-5)
    if middle.act in STEPS:
        same(got.out, expected.out, 0.0 if end.act in STEPS else 1e-5)
    else:
        same(got.out[:2], expected.out[:2], 1e-4)
        # What is rounded may be on the other side of a step: counts are those of its own y. Hardswish's derivative has steps.
        if end.act in STEPS:
            again = ops.norm_act.reference(got.out.y, None, None, end.act, end.patch)
            same(got.out[2:], again[2:], 0.0)
        elif end.act == ops.SILU:
            same(got.out[2:], expected.out[2:], 1e-4)
    return got


def same(got, expected, tolerance):
    """Check that two results agree in all they have."""
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if e is not None:
            assert g.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(g, e, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("level")
class TestEqualsTorch:
    @quick
    @given(
        n=batches,
        c=st.integers(1, 20),
        d=channels,
        rows=axes(),
        columns=axes(),
        patches=st.tuples(sides, sides),
        both=st.tuples(acts, acts),
        has=parts,
        has_too=parts,
        seed=st.integers(0, 99),
    )
    def test_drawn(self, n, c, d, rows, columns, patches, both, has, has_too, seed):
        x = last(draw_eighths(n, c, rows[0], columns[0], seed=seed, most=4))
        w, taps = draw_halves(d, c, 1, 1, seed=seed + 1), draw_halves(d, 1, rows[1], columns[1], seed=seed + 2)
        middle = draw_ending(d, both[0], patches[0], has, seed + 3)
        end = draw_ending(d, both[1], patches[1], has_too, seed + 6)
        with on_threads(1 + seed % 2):
            compare(x, w, middle, taps, rows, columns, end)

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("both", [(ops.RELU6, ops.RELU6), (ops.HARDSWISH, ops.SILU)])
    @pytest.mark.parametrize(
        ("n", "c", "d", "size", "window", "patches"),
        [
            (1, 16, 96, (112, 112), (3, 2, 1), (4, 4)),  # a ring of several steps
            (1, 8, 24, (112, 112), (7, 2, 1), (2, 7)),  # rows of y that end between two steps
            (1, 3, 40, (90, 300), (5, 1, 4), (50, 40)),  # patches and windows higher than a step
            (3, 5, 200, (29, 15), (3, 1, 1), (4, 4)),  # several units of channels per image
        ],
    )
    def test_maps_that_no_step_holds(self, n, c, d, size, window, patches, both, threads):
        k, s, dilation = window
        before = dilation * (k - 1) // 2
        x, w = last(draw_eighths(n, c, *size, seed=0, most=4)), draw_halves(d, c, 1, 1, seed=1)
        rows, columns = ((side, k, s, dilation, before, (side - 1) // s + 1) for side in size)
        middle, end = (
            ops.Ending(None, None, draw_eighths(d, seed=3, most=8), act, (p, p)) for act, p in zip(both, patches, strict=True)
        )
        with on_threads(threads):
            compare(x, w, middle, draw_halves(d, 1, k, k, seed=2), rows, columns, end)

    def test_an_output_that_no_cache_holds(self):
        """Such maps are written past the caches."""
        x, w = last(draw_eighths(2, 4, 200, 331, seed=0, most=4)), draw_halves(32, 4, 1, 1, seed=1)
        ending = ops.Ending(None, None, draw_eighths(32, seed=2, most=8), ops.RELU6, (4, 4))
        rows, columns = (200, 3, 1, 1, 1, 200), (331, 3, 1, 1, 1, 331)
        compare(x, w, ending, draw_halves(32, 1, 3, 3, seed=3), rows, columns, ending)


def make_block(n=2, side=13, act=ops.RELU6):
    """Return a small block: x, w, middle, taps, rows, columns, end."""
    x, w = last(draw_eighths(n, 5, side, side, seed=0, most=4)), draw_halves(24, 5, 1, 1, seed=1)
    middle, end = (ops.Ending(None, None, draw_eighths(24, seed=i, most=8), act, (4, 4)) for i in (2, 3))
    axis = (side, 3, 1, 1, 1, side)
    return x, w, middle, draw_halves(24, 1, 3, 3, seed=4), axis, axis, end


def test_rounds_like_torch_on_ordinary_numbers():
    generator = torch.Generator().manual_seed(0)
    x, w = last(torch.randn(2, 40, 30, 30, generator=generator)), torch.randn(64, 40, 1, 1, generator=generator) / 6
    taps, shift = torch.randn(64, 1, 5, 5, generator=generator) / 5, torch.randn(64, generator=generator)
    ending, ends = ops.Ending(None, None, shift, ops.SILU, (4, 4)), ((2, 2), (2, 2), (1, 1), (15, 15))
    got = ops.expand(x, w, ending, taps, *ends, ending)
    with native.off():
        expected = ops.expand(x, w, ending, taps, *ends, ending)
    for g, e in zip((*got.hidden, *got.out), (*expected.hidden, *expected.out), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


def test_writes_where_it_is_told_to():
    block = make_block()
    x, w, middle, taps, _, _, end = block
    mean, slope = last(torch.full((2, 24, 4, 4), 7.0)), last(torch.full((2, 24, 4, 4), 99, dtype=torch.uint8))
    versions = mean._version, slope._version
    got = compare(*block, cells=ops.Cells(mean, slope))
    assert got.hidden.mean is mean
    assert got.hidden.slope is slope
    assert (mean._version, slope._version) == versions  # they may have been saved for backward
    again = torch.empty(2, 24, 4, 4), torch.empty(2, 24, 4, 4, dtype=torch.uint8)
    with native.off():
        got = ops.expand(x, w, middle, taps, (1, 1), (1, 1), (1, 1), (13, 13), end, ops.Cells(*again))
    assert got.hidden.mean is again[0]
    assert again[0]._version == again[1]._version == 0
    assert torch.equal(again[0], mean)
    assert torch.equal(again[1], slope)


def test_infinities_and_nan_stay():
    x, w, _, _, _, _, end = make_block()
    x[0, 0, 0, 0], x[0, 1, 5, 5], x[1, 2, 2, 2] = float("nan"), float("inf"), -float("inf")
    taps = torch.ones(24, 1, 1, 1)
    for act in STEPS:
        ending = end._replace(act=act)
        run = partial(ops.expand, x, w, ending, taps, (1, 1), (0, 0), (1, 1), (13, 13), ending)
        got = run()
        with native.off():
            expected = run()
        for g, e in zip((*got.hidden, *got.out), (*expected.hidden, *expected.out), strict=True):
            assert (g is None) == (e is None)
            if g is not None and e is not None:
                assert torch.equal(g.nan_to_num(7), e.nan_to_num(7))


def test_runs_in_torch_what_the_library_cannot():
    x, w, middle, taps, _, _, end = make_block()
    expected = ops.expand(x, w, middle, taps, (1, 1), (1, 1), (1, 1), (13, 13), end)
    for image in (x.contiguous(), x.double()):
        v, u = w.to(image.dtype), taps.to(image.dtype)
        assert not native.can_expand(image, v, u)
        got = ops.expand(image, v, middle, u, (1, 1), (1, 1), (1, 1), (13, 13), end)
        for g, e in zip((*got.hidden, *got.out), (*expected.hidden, *expected.out), strict=True):
            assert g is not None
            assert e is not None
            torch.testing.assert_close(g.to(e.dtype), e, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("w", "taps", "fits"),
    [
        ((24, 5, 1, 1), (24, 1, 3, 5), True),
        ((24, 5, 3, 1), (24, 1, 3, 3), False),
        ((8, 5, 1, 1), (8, 1, 3, 3), False),
        ((24, 5, 1, 1), (48, 1, 3, 3), False),
        ((24, 5, 1, 1), (24, 24, 3, 3), False),
        ((24, 1, 1, 1), (24, 1, 3, 3), False),
    ],
)
def test_says_which_pairs_it_runs(w, taps, fits):
    x = last(torch.zeros(1, 5, 9, 9))
    assert native.can_expand(x, torch.zeros(w), torch.zeros(taps)) == fits


@pytest.mark.parametrize(
    ("shape", "channels", "threads", "faster"),
    [
        ((32, 16, 112, 112), 96, 2, True),
        ((32, 16, 112, 112), 96, 1, True),
        ((1, 16, 112, 112), 96, 2, True),
        ((1, 8, 112, 112), 24, 2, False),
        ((1, 8, 112, 112), 24, 1, True),
        ((32, 160, 3, 3), 960, 1, False),
        ((32, 960, 7, 7), 960, 1, False),
    ],
)
def test_says_where_it_is_faster(shape, channels, threads, faster):
    with on_threads(threads):
        assert native.prefers_expand(shape, (channels, shape[1], 1, 1)) == faster
