"""Max pooling in the C library: equal to torch's over drawn maps, windows and patches, at every level; so are gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradfilter import native, patches
from gradfilter.rules import pooling

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")

LEVELS = range(native.load().gf_best_level() + 1) if native.load() else ()  # type: ignore[union-attr]
FILLS = ("ties", "numbers", "nan", "low")

pairs = st.tuples(st.integers(1, 5), st.integers(1, 5))
quick = settings(deadline=None, max_examples=200)


class Map:
    """What `find_windows` and `find_taps` ask of a PatchTensor."""

    def __init__(self, x, patch):
        self.shape, self.patch = x.shape, patch


@pytest.fixture(params=LEVELS, ids=lambda level: f"level{level}")
def level(request):
    """Run a test at each level that this CPU has."""
    library = native.load()
    assert library is not None
    assert library.gf_set_level(request.param) == request.param
    yield request.param
    library.gf_set_level(-1)


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
    size = patches.map_size(y)
    assert pooling.find_size(patches.map_size(x), *options) == size
    spans = pooling.find_spans(size, *options[:4])
    given_map = Map(x, in_patch)
    windows = pooling.find_windows(given_map, size, out_patch, spans)  # type: ignore[arg-type]
    rows, columns = pooling.find_taps(given_map, windows, spans, options[3])  # type: ignore[arg-type]
    if not (rows.count.all() and columns.count.all()):
        return False
    got = native.max_pool(x, rows, columns, out_patch)
    assert torch.equal(got.y.view(torch.int32), y.view(torch.int32))
    want = pooling.count_winners(indices, x.shape[3], windows)
    assert got.winners.dtype == want.dtype
    assert torch.equal(got.winners, want)
    assert (got.mean is None) == (out_patch == (1, 1))
    if got.mean is not None:
        torch.testing.assert_close(got.mean, native.pool_mean(y, out_patch), rtol=1e-5, atol=1e-5, equal_nan=True)
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
