"""The ways to the same gradients: of a coarse twin, of max pooling's winners, of maps in either layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import oracles
from cases import draw
from gradfilter import ops
from gradfilter.geometry.axes import Axis, overlap_axis
from gradfilter.geometry.convolution import cut_tiles, find_tiles, make_geometry
from gradfilter.geometry.tiling import count_cells, is_nhwc, map_size
from gradfilter.geometry.windows import make_windows
from gradfilter.ops import constants, conv_backward, conv_products, max_pooling, native
from gradfilter.ops.conv_products import lifted_gradients, prefers_shifts, product_gradients, separable_gradients
from gradfilter.ops.native.backward import can_tile, tile_gradients
from gradfilter.ops.native.pairs import can_pair, pair_gradients
from gradfilter.ops.native.single import can_single, single_gradients
from gradfilter.ops.pooling import apply_axes, unpool
from gradfilter.rules.conv import as_pair

quick = settings(deadline=None, max_examples=100)
axes = st.builds(
    Axis,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    before=st.integers(-1, 3),
    in_size=st.integers(1, 15),
    out_size=st.integers(1, 15),
    in_patch=st.integers(1, 5),
    out_patch=st.integers(1, 5),
    transposed=st.booleans(),
)
FORMATS = {True: torch.channels_last, False: torch.contiguous_format}
layouts = st.sampled_from([*FORMATS.values()])


def make_map(channels, cells, layout, seed):
    return draw(2, channels, *cells, seed=seed).contiguous(memory_format=layout)


@quick
@given(axes, axes, layouts, layouts, st.booleans())
def test_one_product_per_tap_gives_what_tap_matrices_on_unfolded_maps_give(rows, columns, layout, other, need_gx):
    assume(rows.transposed == columns.transposed)
    geometry = make_geometry(rows, columns, 1, False)
    g, kept = make_map(3, geometry.out_cells, layout, 1), make_map(2, geometry.in_cells, other, 2)
    w = draw(3, 2, rows.kernel, columns.kernel, seed=3).contiguous(memory_format=other)
    want = separable_gradients(g, kept, w, geometry, True)
    gx, gw = product_gradients(g, kept, w, geometry, need_gx)
    torch.testing.assert_close(gw, want[1])
    assert (gx is not None) == need_gx
    if gx is not None:
        torch.testing.assert_close(gx, want[0])
        torch.testing.assert_close(product_gradients(g, None, w, geometry, True), (gx, None))


def test_products_write_the_weight_gradient_in_the_layout_of_a_channels_last_kernel():
    axis = Axis(3, 1, 1, 1, 14, 14, 4, 4)
    geometry = make_geometry(axis, axis, 1, False)
    g, kept = (make_map(8, (4, 4), torch.channels_last, seed) for seed in (1, 2))
    gx, gw = ops.conv_gradients(g, kept, draw(8, 8, 3, 3), geometry, need_gx=True)
    assert gx is not None
    assert gw is not None
    assert gx.is_contiguous(memory_format=torch.channels_last)
    assert gw.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.usefixtures("level")
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(axes, axes, layouts, layouts, st.sampled_from([16, 23, 64, 90, 150]), st.integers(1, 3), st.booleans())
def test_pairs_of_cells_give_what_tap_matrices_on_unfolded_maps_give(rows, columns, layout, other, channels, n, need_gx):
    assume(rows.transposed == columns.transposed)
    geometry = make_geometry(rows, columns, channels, False)
    sizes, formats = (geometry.out_cells, geometry.in_cells), (layout, other)
    maps = [draw(n, channels, *cells, seed=i) for i, cells in enumerate(sizes)]
    w = draw(channels, 1, rows.kernel, columns.kernel, seed=3)
    want = separable_gradients(maps[0], maps[1], w, geometry, True)
    g, kept = (x.float().contiguous(memory_format=f) for x, f in zip(maps, formats, strict=True))
    if not can_pair(g, kept, *geometry.pairs):
        assert not len(geometry.coefficients)  # a kernel that reads padding alone
        return
    gx, gw = pair_gradients(g, kept, w.float(), geometry, need_gx=need_gx)
    torch.testing.assert_close((gx, gw), want if need_gx else (None, want[1]), rtol=1e-4, atol=1e-4, check_dtype=False)
    if gx is not None:
        assert gx.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(pair_gradients(g, None, w.float(), geometry, need_gx=True)[0], gx)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kernel", "groups"), [(3, 16), (3, 1), (1, 1)])
def test_no_gradient_where_none_is_asked_for(kernel, groups):
    """As of a convolution of whose parameters the bias alone trains."""
    axis = Axis(kernel, 1, 1, kernel // 2, 12, 12, 4, 4)
    geometry = make_geometry(axis, axis, groups, False)
    g, w = make_map(16, (3, 3), torch.channels_last, 1).float(), draw(16, 16 // groups, kernel, kernel).float()
    assert ops.conv_gradients(g, None, w, geometry, need_gx=False) == (None, None)


threes = st.builds(
    Axis,
    kernel=st.just(3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    before=st.integers(0, 3),
    in_size=st.integers(1, 40),
    out_size=st.integers(1, 40),
    in_patch=st.integers(1, 7),
    out_patch=st.integers(1, 7),
    transposed=st.booleans(),
)
same = st.builds(
    lambda size, patch, dilation: Axis(3, 1, dilation, dilation, size, size, patch, patch),
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(1, 2),
)
"""Those of most networks: a map as large as the input, one tiling."""
channels = st.sampled_from([16, 32, 48, 80])


@pytest.mark.usefixtures("level")
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(st.one_of(same, threes), st.one_of(same, threes), layouts, layouts, channels, channels, st.integers(1, 3), st.booleans())
def test_tiles_give_what_tap_matrices_on_unfolded_maps_give(rows, columns, layout, other, co, ci, n, need_gx):
    assume(rows.transposed == columns.transposed)
    geometry = make_geometry(rows, columns, 1, False)
    assume(geometry.tiles is not None)
    assert geometry.tiles is not None
    maps = draw(n, co, *geometry.out_cells, seed=1), draw(n, ci, *geometry.in_cells, seed=2)
    w = draw(co, ci, 3, 3, seed=3).contiguous(memory_format=other)
    want = separable_gradients(*maps, w, geometry, True)
    g, kept = (x.float().contiguous(memory_format=f) for x, f in zip(maps, (layout, other), strict=True))
    assert can_tile(g, kept, w.float(), *geometry.tiles)
    got = tile_gradients(g, kept, w.float(), *geometry.tiles, need_gx=need_gx)
    assert (got[0] is not None) == need_gx
    for mine, theirs, order in zip(got, want, (torch.channels_last, other), strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=3e-5 * float(theirs.abs().max()) + 1e-6)
            assert mine.is_contiguous(memory_format=order)
    if need_gx:
        alone = tile_gradients(g, None, w.float(), *geometry.tiles, need_gx=True)
        assert torch.equal(alone[0], got[0])  # type: ignore[arg-type]
        assert alone[1] is None


@pytest.mark.parametrize(
    ("size", "patch", "positions"),
    [
        (16, 4, [4, 4]),
        (14, 4, [4, 4, 1]),  # the last two cells share a tile, and one product adds what it lacks
        (7, 4, [4, 1]),
        (18, 4, [4, 4, 3]),  # a partial cell alone
        (4, 4, [3]),
    ],
)
def test_partial_patches_take_few_products(size, patch, positions):
    tiles = find_tiles(Axis(3, 1, 1, 1, size, size, patch, patch))
    assert tiles is not None
    assert tiles.tiles["positions"].tolist() == positions


@pytest.mark.parametrize(
    ("size", "patch", "outs"),
    [
        (56, 14, [2, 2]),
        (28, 14, [2]),
        (14, 4, [2, 2, 1]),  # a partial patch: a further tile adds what the last cell lacks
        (14, 14, [1]),
    ],
)
def test_two_coarse_taps_behind_a_stride_take_three_products_per_tile(size, patch, outs):
    found = find_tiles(Axis(3, 2, 1, 1, size, size // 2, patch, patch // 2))
    assert found is not None
    assert found.tiles["outs"].tolist() == outs
    assert found.tiles["positions"].tolist() == [3] * len(outs)


def test_tiles_of_an_axis_have_four_positions_or_one_other_number():
    cells = np.eye(6)
    shifted, partial, other = cells[0:3], np.array([2 * cells[1] - cells[2], cells[2], -cells[2]]), cells[[5, 0, 3]]
    tiles = cut_tiles(np.array([shifted, partial, other]))
    assert [tile[:3] for tile in tiles] == [(0, 2, 4), (1, 1, 3), (2, 1, 3)]
    (_, _, _, both), (_, _, _, rest), (_, _, _, alone) = tiles
    np.testing.assert_array_equal(both[:3], shifted)
    np.testing.assert_array_equal(both[1] + rest[0], partial[0])  # what the second cell has of the first tap
    np.testing.assert_array_equal(both[2:], partial[1:])
    np.testing.assert_array_equal(alone[:3], other)


@pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
@pytest.mark.parametrize("threads", [1, 2])
def test_rounds_of_tiles_add_up(threads):
    axis = Axis(3, 1, 1, 1, 79, 79, 2, 2)
    geometry = make_geometry(axis, axis, 1, False)
    g, kept = (make_map(32, (40, 40), torch.channels_last, seed) for seed in (1, 2))
    w = draw(32, 32, 3, 3)
    want = product_gradients(g, kept, w, geometry, True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = ops.conv_gradients(g.float(), kept.float(), w.float(), geometry, need_gx=True)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3, check_dtype=False)


@pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
@pytest.mark.parametrize(
    ("size", "patch", "channels", "last", "runs"),
    [
        (14, 7, 144, True, True),
        (14, 4, 144, True, True),  # 3 whole cells and a partial one: two tiles, and what the last one lacks
        (7, 4, 144, True, True),  # 1 + 1: the same
        (7, 7, 144, True, False),  # one cell
        (7, 7, 144, False, True),  # and a weight that others copy
        (7, 7, 64, True, True),  # few channels
        (14, 7, 120, True, False),  # no whole vectors
    ],
)
def test_tiles_are_the_way_where_they_save_products_calls_or_copies(size, patch, channels, last, runs, monkeypatch):
    calls = []
    monkeypatch.setattr(
        conv_backward.backward, "tile_gradients", lambda *arguments, **_: calls.append(arguments) or (None, None)
    )
    axis = Axis(3, 1, 1, 1, size, size, patch, patch)
    geometry = make_geometry(axis, axis, 1, False)
    g, kept = (make_map(channels, geometry.out_cells, torch.channels_last, seed) for seed in (1, 2))
    w = draw(channels, channels, 3, 3).contiguous(memory_format=FORMATS[last])
    ops.conv_gradients(g.float(), kept.float(), w.float(), geometry, need_gx=True)
    assert len(calls) == runs
    ops.conv_gradients(g, kept, w, geometry, need_gx=True)
    with native.off():
        ops.conv_gradients(g.float(), kept.float(), w.float(), geometry, need_gx=True)
    assert len(calls) == runs


def multiply_single(g, x, w):
    return torch.einsum("noij,oc->ncij", g, w.sum((2, 3))), torch.einsum("noij,ncij->oc", g, x)


@pytest.mark.usefixtures("level")
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([1, 3, 8, 16, 24, 56, 90]),
    st.sampled_from([16, 24, 33, 64, 90, 200]),
    st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 30)),
    st.sampled_from([(1, 1), (3, 3), (1, 5)]),
    st.tuples(layouts, layouts, layouts),
    st.sampled_from([(True, True), (True, False), (False, True)]),
    st.booleans(),
)
def test_products_of_a_single_tap_give_those_of_whole_matrices(co, ci, cells, kernel, formats, needs, dense):
    n, *cells = cells
    maps = draw(n, co, *cells, seed=1), draw(n, ci, *cells, seed=2), draw(co, ci, *kernel, seed=3)
    g, x, w = (v.float().contiguous(memory_format=layout) for v, layout in zip(maps, formats, strict=True))
    w = w if dense else torch.stack([w, w], 4)[..., 0]
    assert can_single(g, x if needs[1] else None, w)
    want = multiply_single(*maps)
    got = single_gradients(g, x if needs[1] else None, w, need_gx=needs[0])
    for mine, theirs, need in zip(got, want, needs, strict=True):
        assert (mine is not None) == need
        if mine is not None:
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
@pytest.mark.parametrize(
    ("side", "co", "ci"),
    [
        (5, 40, 72),  # one part, whose channels threads share
        (20, 40, 72),  # four parts, and their channels
        (40, 16, 20),  # parts alone
    ],
)
def test_products_of_a_single_tap_are_the_same_on_any_number_of_threads(side, co, ci):
    maps = draw(4, co, side, side, seed=1), draw(4, ci, side, side, seed=2), draw(co, ci, 3, 3, seed=3)
    g, x, w = (v.float() for v in maps)
    got = run_on_threads(lambda: single_gradients(g, x, w, need_gx=True))
    check_sums(got, multiply_single(*maps))


@pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
@pytest.mark.parametrize(
    ("n", "channels"),
    [
        (13, 24),  # images in parts alone
        (13, 150),  # parts and blocks of channels
        (3, 64),  # a part for each image
        (13, 520),  # blocks alone
    ],
)
def test_pairs_of_cells_are_the_same_on_any_number_of_threads(n, channels):
    axis = Axis(5, 1, 1, 2, 50, 50, 4, 4)
    geometry = make_geometry(axis, axis, channels, False)
    maps = [draw(n, channels, 13, 13, seed=seed) for seed in (1, 2)]
    w = draw(channels, 1, 5, 5, seed=3)
    g, kept = (x.float().contiguous(memory_format=torch.channels_last) for x in maps)
    got = run_on_threads(lambda: pair_gradients(g, kept, w.float(), geometry, need_gx=True))
    check_sums(got, separable_gradients(maps[0], maps[1], w, geometry, True))


def run_on_threads(run):
    """Return two gradients, which must have the same bits on any number of threads."""
    before, got = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got.append(run())
    finally:
        torch.set_num_threads(before)
    for other in got[1:]:
        assert all(map(torch.equal, got[0], other))
    return got[0]


def check_sums(got, want):
    """Check that gradients are what they should be, as long sums in single precision can be."""
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
def test_long_sums_of_a_single_tap_round_as_short_ones_do():
    g, x = (torch.full((8, 1024, 32, 32), 0.1).contiguous(memory_format=torch.channels_last) for _ in range(2))
    _, gw = single_gradients(g, x, torch.ones(1024, 1024, 1, 1), need_gx=False)
    assert gw is not None
    torch.testing.assert_close(gw.double(), torch.full(gw.shape, 8192 * float(g[0, 0, 0, 0]) ** 2).double(), rtol=5e-6, atol=0)


KINDS = {"single": (16, 1, True), "tiles": (16, 1, False), "pairs": (1, 16, False)}
"""Input channels of a weight, groups, and whether its kernel is lumped."""
WRONG = {
    "dtype": lambda kept: kept.bfloat16(),
    "images": lambda kept: kept[:1],
    "channels": lambda kept: kept[:, :8],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_the_library_does_not_read_what_it_cannot(kind, wrong):
    """What is kept comes back through hooks of the user's on saved tensors."""
    (ci, groups, lumped), axis = KINDS[kind], Axis(3, 1, 1, 1, 14, 14, 4, 4)
    geometry = make_geometry(axis, axis, groups, lumped)
    g, kept = (make_map(16, (4, 4), torch.channels_last, seed).float() for seed in (1, 2))
    with pytest.raises((RuntimeError, ValueError)):
        ops.conv_gradients(g, WRONG[wrong](kept), draw(16, ci, 3, 3).float(), geometry, need_gx=True)


@pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
@pytest.mark.parametrize("kind", KINDS)
def test_negated_views_keep_their_sign(kind):
    (ci, groups, lumped), axis = KINDS[kind], Axis(3, 1, 1, 1, 14, 14, 4, 4)
    geometry = make_geometry(axis, axis, groups, lumped)
    g, kept = (make_map(16, (4, 4), torch.channels_last, seed).float() for seed in (1, 2))
    w = draw(16, ci, 3, 3).float()
    want = ops.conv_gradients(g, kept, w, geometry, need_gx=True)
    turn = torch._neg_view
    for turned in ((turn(g), -kept, -w), (-g, turn(kept), -w), (-g, -kept, turn(w))):
        got = ops.conv_gradients(*turned, geometry, need_gx=True)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
@pytest.mark.parametrize(
    ("co", "ci", "cells", "runs"),
    [
        (24, 24, (2, 2), True),
        (24, 12, (2, 2), False),  # no whole vector
        (1, 24, (2, 2), False),  # a product of a matrix and a vector
        (24, 24, (1, 1), False),  # two cells: the weight is more work than they are
    ],
)
def test_products_of_a_single_tap_are_the_librarys_in_single_precision(co, ci, cells, runs, monkeypatch):
    calls = []
    monkeypatch.setattr(
        conv_backward.single, "single_gradients", lambda *arguments, **_: calls.append(arguments) or (None, None)
    )
    axis = Axis(3, 1, 1, 1, 4 * cells[0], 4 * cells[0], 4, 4)
    geometry = make_geometry(axis, axis, 1, True)
    g, kept = (make_map(channels, cells, torch.channels_last, seed) for seed, channels in enumerate((co, ci)))
    w = draw(co, ci, 3, 3)
    ops.conv_gradients(g.float(), kept.float(), w.float(), geometry, need_gx=True)
    assert len(calls) == runs
    for dtype in (torch.float64, torch.bfloat16):
        ops.conv_gradients(g.to(dtype), kept.to(dtype), w.to(dtype), geometry, need_gx=True)
    with native.off():
        ops.conv_gradients(g.float(), kept.float(), w.float(), geometry, need_gx=True)
    assert len(calls) == runs


def test_a_small_partial_patch_is_not_mixed():
    assert find_tiles(Axis(3, 1, 1, 1, 17, 17, 8, 8)) is not None
    assert find_tiles(Axis(3, 1, 1, 1, 19, 19, 9, 9)) is None


@pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
def test_pairs_are_the_way_of_depthwise_kernels_in_single_precision(monkeypatch):
    calls = []
    monkeypatch.setattr(conv_backward.pairs, "pair_gradients", lambda *arguments, **_: calls.append(arguments) or (None, None))
    axis = Axis(3, 1, 1, 1, 14, 14, 4, 4)
    geometry = make_geometry(axis, axis, 16, False)
    g, kept = (make_map(16, (4, 4), torch.channels_last, seed) for seed in (1, 2))
    w = draw(16, 1, 3, 3)
    ops.conv_gradients(g.float(), kept.float(), w.float(), geometry, need_gx=True)
    assert len(calls) == 1
    for dtype in (torch.float64, torch.bfloat16):
        ops.conv_gradients(g.to(dtype), kept.to(dtype), w.to(dtype), geometry, need_gx=True)
    assert len(calls) == 1


@quick
@given(axes, axes, st.booleans())
def test_shifted_maps_give_the_gradient_of_a_lifted_kernel(rows, columns, need_gx):
    geometry = make_geometry(*(replace(a, stride=1, dilation=1, transposed=False) for a in (rows, columns)), 1, False)
    lifts = geometry.lifts
    assume(lifts is not None)
    g, kept = (make_map(channels, cells, torch.channels_last, channels) for channels, cells in
               ((3, geometry.out_cells), (2, geometry.in_cells)))  # fmt: skip
    assume(all(a.stride == 1 and a.dilation == 1 and min(a.before, a.after) >= 0 for a in lifts))  # type: ignore[union-attr]
    w = draw(3, 2, rows.kernel, columns.kernel, seed=3)
    want = lifted_gradients(g, kept, w, geometry, lifts, need_gx)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_products, "prefers_shifts", lambda *arguments: True)
        got = lifted_gradients(g, kept, w, geometry, lifts, need_gx)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want)


def test_only_large_maps_are_shifted():
    for size, large in ((32, True), (16, False)):
        axis = Axis(3, 1, 1, 1, size, size, 1, 1)
        geometry = make_geometry(axis, axis, 1, False)
        g, kept = (torch.zeros(1, 100, size, size).contiguous(memory_format=torch.channels_last) for _ in range(2))
        assert prefers_shifts(g, kept, geometry, geometry.lifts) == large  # type: ignore[arg-type]
        assert not prefers_shifts(g.bfloat16(), kept.bfloat16(), geometry, geometry.lifts)  # type: ignore[arg-type]
        assert not prefers_shifts(g.contiguous(), kept, geometry, geometry.lifts)  # type: ignore[arg-type]


def find_taps(like, size):
    axis = Axis(3, 1, 1, 1, size, size, 2, 2)
    return constants.find_taps(make_geometry(axis, axis, 1, False), like)[0]


def test_constants_are_held():
    like = torch.zeros(1)
    assert find_taps(like, 9) is find_taps(like, 9)
    assert find_taps(like, 9) is not find_taps(like.double(), 9)


@pytest.mark.parametrize(
    ("size", "context"), [(10, lambda: torch.device("meta")), (11, torch.inference_mode), (12, FakeTensorMode)]
)
def test_constants_made_in_a_mode_are_not_held(size, context):
    like = torch.zeros(1)
    with context():
        inside = find_taps(torch.zeros(1), size)
    taps = find_taps(like, size)
    assert inside is not taps
    assert all(tap is None or (tap.device == like.device and not tap.is_inference()) for tap in taps)


@quick
@given(
    st.tuples(st.integers(4, 15), st.integers(4, 15)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 1),
    st.integers(1, 2),
    st.booleans(),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    layouts,
)
def test_winners_are_counted_alike(size, kernel, stride, padding, dilation, ceil, in_patch, out_patch, layout):
    assume(padding <= kernel // 2 and dilation * (kernel - 1) < min(size))
    x = make_map(3, size, layout, 4)
    y, indices = F.max_pool2d(x, kernel, stride, padding, dilation, ceil, return_indices=True)
    assume(torch.isfinite(y).all())
    patch = min(in_patch[0], size[0]), min(in_patch[1], size[1])
    cells = min(out_patch[0], y.shape[2]), min(out_patch[1], y.shape[3])
    windows = make_windows(size, map_size(y), patch, cells, *map(as_pair, (kernel, stride, padding, dilation)))
    assume(windows.reach[0] * windows.reach[1] * windows.bits <= max_pooling.DOUBLE)
    want = max_pooling.count_scattered(indices, windows)
    assert torch.equal(max_pooling.count_packed(indices, windows), want)
    assert torch.equal(want.sum(-1)[0, 0], oracles.pool(torch.ones_like(y[:1, :1]), cells, "sum")[0, 0].to(torch.uint8))


@quick
@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_maps_keep_their_layout(size, patch):
    cells = count_cells(size, patch)
    first, last = (make_map(3, cells, layout, 5) for layout in (torch.contiguous_format, torch.channels_last))
    assert torch.equal(unpool(last, patch, size), unpool(first, patch, size))
    rows, columns = (overlap_axis(n, p, 3) for n, p in zip(size, patch, strict=True))
    got = apply_axes(last, rows, columns)
    torch.testing.assert_close(got, apply_axes(first, rows, columns))
    if is_nhwc(last):
        assert got.is_contiguous(memory_format=torch.channels_last)
