"""The way back through a batch norm in the C library: equal to torch's over drawn shapes and layouts, at every level."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradfilter import ops
from gradfilter.ops import native
from gradfilter.ops.native import affine
from gradfilter.ops.norm import finish_in_torch, finish_norm_gradients, scale_in_torch, scale_norm_gradient

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")

EPS = 1e-3
quick = settings(deadline=None, max_examples=80)
FORMATS = {True: torch.channels_last, False: torch.contiguous_format}


def draw_values(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_norm(channels, seed, zero=False):
    """Return factors, means and variances, one factor of them 0 or none."""
    gamma, mu, var = (draw_values(channels, seed=seed + i) for i in range(3))
    gamma[0] = 0 if zero else 1
    return gamma, mu, var.abs() + 0.1


def same(got, expected):
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            # Sums may cancel: what is rounded is of the order of their terms, which is 1.
            torch.testing.assert_close(g, e, rtol=1e-5, atol=4e-6 * (1 + float(e.abs().max())))


@contextmanager
def note_calls():
    """List the names of the tasks that the library runs."""
    names, run = [], affine.call
    affine.call = lambda task, *rest: (names.append(task.name), run(task, *rest))[1]
    try:
        yield names
    finally:
        affine.call = run


@pytest.mark.usefixtures("level")
class TestEqualsTorch:
    @quick
    @given(
        shape=st.tuples(st.integers(1, 5), st.integers(1, 150), st.integers(1, 9), st.integers(1, 9)),
        has_gamma=st.booleans(),
        zero=st.booleans(),
        scales=st.booleans(),
        threads=st.integers(1, 2),
        kernel=st.sampled_from([None, (1, 1, 1), (5, 3, 3), (20, 1, 3)]),
        last=st.booleans(),
        seed=st.integers(0, 99),
    )
    def test_norm_back(self, shape, has_gamma, zero, scales, threads, kernel, last, seed):
        gamma, mu, var = make_norm(shape[1], seed, zero)
        g = draw_values(*shape, seed=seed + 5).contiguous(memory_format=torch.channels_last)
        w = draw_values(shape[1], *kernel, seed=seed + 6).contiguous(memory_format=FORMATS[last]) if kernel else None
        args = g, ops.FixedNorm(gamma if has_gamma else None, mu, var, EPS), scales, w
        torch.set_num_threads(threads)
        with note_calls() as calls:
            got = scale_norm_gradient(*args)
        torch.set_num_threads(1)
        assert calls == ["norm_back"]
        assert (got.scaled is None) == (not scales or (has_gamma and zero))
        with native.off():
            expected = scale_norm_gradient(*args)
        assert (got.folded is None) == (w is None or got.scaled is not None)
        same(got, expected)
        if w is not None and got.folded is not None:
            assert got.folded.stride() == w.stride()

    @quick
    @given(
        shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3, 5]), st.sampled_from([1, 3])),
        has_bias=st.booleans(),
        scaled=st.booleans(),
        last=st.tuples(st.booleans(), st.booleans()),
        lumped=st.booleans(),
        need=st.tuples(st.booleans(), st.booleans()),
        seed=st.integers(0, 99),
    )
    def test_norm_end(self, shape, has_bias, scaled, last, lumped, need, seed):
        norm = ops.FixedNorm(*make_norm(shape[0], seed), EPS)
        w, gw = (
            draw_values(*shape, seed=seed + i).contiguous(memory_format=FORMATS[f]) for i, f in zip((5, 6), last, strict=True)
        )
        gw = gw[:, :, :1, :1].expand_as(w) if lumped else gw  # one gradient for all taps
        g = draw_values(2, shape[0], 3, 3, seed=seed + 7)
        back = scale_in_torch(g, norm, scaled)
        bias = draw_values(shape[0], seed=seed + 8) if has_bias else None
        rest = w, bias, norm, back, *need
        expected = finish_in_torch(gw.clone(), *rest)
        with note_calls() as calls:
            got = finish_norm_gradients(gw, *rest)
        assert calls == ["norm_end"]
        same(got, expected)
        assert got[0].is_contiguous(memory_format=FORMATS[last[0]])


def test_what_the_library_cannot_read_runs_in_torch():
    norm = ops.FixedNorm(*make_norm(20, 0), EPS)
    g = draw_values(2, 20, 3, 5, seed=1)  # in another memory order
    w, gw = draw_values(20, 4, 3, 3, seed=2), draw_values(20, 4, 3, 3, seed=3)
    with note_calls() as calls:
        back = scale_norm_gradient(g, norm, True)
        same(back, scale_in_torch(g, norm, True))
        finish_norm_gradients(gw, w.transpose(2, 3), None, norm, back, True, True)
        finish_norm_gradients(gw.transpose(2, 3), w, None, norm, back, True, True)
        gamma, mu, var = (v.double() for v in make_norm(20, 0))
        wide = scale_norm_gradient(g.double(), ops.FixedNorm(gamma, mu, var, EPS), True)
    assert wide.scaled is not None
    assert wide.scaled.dtype is torch.float64
    assert calls == []
