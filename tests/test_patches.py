"""Geometry: pools, areas, tap matrices, lift, grids."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from cases import draw
from gradfilter.geometry.axes import Axis, lift_axis, lumped_matrix, overlap_axis, tap_matrices
from gradfilter.geometry.tiling import Tiling, count_cells, grid_patch
from gradfilter.ops.constants import make_areas
from gradfilter.ops.pooling import pool_mean, pool_sum, unpool

sizes = st.tuples(st.integers(1, 13), st.integers(1, 13))
sides = st.tuples(st.integers(1, 6), st.integers(1, 6))
axes = st.builds(
    Axis,
    kernel=st.integers(1, 7),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    before=st.integers(-1, 6),
    in_size=st.integers(1, 30),
    out_size=st.integers(1, 30),
    in_patch=st.integers(1, 8),
    out_patch=st.integers(1, 8),
)
quick = settings(deadline=None, max_examples=200)


@quick
@given(sizes, sides)
def test_pools_are_the_loops(size, patch):
    x = draw(2, 3, *size)
    torch.testing.assert_close(pool_mean(x, patch), oracles.pool(x, patch, "mean"))
    torch.testing.assert_close(pool_sum(x, patch), oracles.pool(x, patch, "sum"))
    areas = torch.as_tensor(make_areas(size, patch, x)).expand(1, 1, *count_cells(size, patch))
    torch.testing.assert_close(areas.double(), oracles.pool(torch.ones_like(x[:1, :1]), patch, "sum"))
    assert areas.sum() == size[0] * size[1]


@quick
@given(sizes, sides)
def test_unpool_is_the_loop_and_the_adjoint_of_the_sum(size, patch):
    x, cells = draw(1, 2, *size), count_cells(size, patch)
    g = draw(1, 2, *cells, seed=1)
    spread = unpool(g, patch, size)
    torch.testing.assert_close(spread, oracles.unpool(g, patch, size))
    torch.testing.assert_close((spread * x).sum(), (g * pool_sum(x, patch)).sum())


@quick
@given(axes)
def test_tap_matrices_are_the_loops(axis):
    expected = oracles.tap_matrix_by_loops(
        axis.kernel, axis.stride, axis.dilation, axis.before, axis.in_size, axis.out_size, axis.in_patch, axis.out_patch
    )
    np.testing.assert_allclose(tap_matrices(axis), expected.numpy(), atol=1e-12)


@quick
@given(axes)
def test_lift_is_a_convolution_with_the_tap_matrices(axis):
    lift = lift_axis(axis)
    if lift is None:
        return
    taps = torch.tensor(tap_matrices(axis))
    x = draw(1, 1, taps.shape[2])
    padded = torch.nn.functional.pad(x, (lift.before, lift.after))
    for u in range(axis.kernel):
        kernel = torch.tensor(lift.matrix.values[:, u])[None, None]
        coarse = torch.nn.functional.conv1d(padded, kernel, stride=lift.stride, dilation=lift.dilation)
        torch.testing.assert_close(coarse[0, 0], taps[u] @ x[0, 0])


@pytest.mark.parametrize(("size", "regular"), [(16, True), (14, False), (15, False)])
def test_lift_exists_where_all_patches_are_whole(size, regular):
    axis = Axis(kernel=3, stride=1, dilation=1, before=1, in_size=size, out_size=size, in_patch=4, out_patch=4)
    assert (lift_axis(axis) is not None) == regular


def test_lift_of_patch_one_is_the_kernel_itself():
    for dilation in (1, 36):
        size = 13 * dilation
        axis = Axis(5, 2, dilation, 2 * dilation, in_size=size, out_size=(size + 1) // 2, in_patch=1, out_patch=1)
        lift = lift_axis(axis)
        assert lift is not None
        assert lift.is_identity
        assert lift.dilation == dilation


@quick
@given(axes)
def test_lumped_matrix_keeps_the_mean(axis):
    rows = lumped_matrix(axis).sum(-1)
    assert np.all(np.isclose(rows, 1) | np.isclose(rows, 0))
    if axis.stride * (axis.out_size - 1) + axis.stride + axis.dilation * (axis.kernel - 1) // 2 - axis.before <= axis.in_size:
        if axis.dilation * (axis.kernel - 1) // 2 >= axis.before:
            np.testing.assert_allclose(rows, 1)


@quick
@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 8))
def test_regrid_is_project_after_unpool(size, in_patch, out_patch):
    matrix = overlap_axis(size, in_patch, out_patch).values
    x_bar = draw(1, 1, 1, matrix.shape[1])
    pixels = oracles.unpool(x_bar, (1, in_patch), (1, size))
    np.testing.assert_allclose(matrix @ x_bar.flatten().numpy(), oracles.pool(pixels, (1, out_patch), "mean").flatten().numpy())


@pytest.mark.parametrize(
    ("image", "grid", "maps"),
    [
        (224, 4, {112: 32, 56: 16, 28: 8, 14: 4, 7: 2}),
        (224, 7, {112: 16, 56: 8, 28: 4, 14: 2, 7: 1}),
        (224, 14, {112: 8, 56: 4, 28: 2, 14: 1, 7: 1}),
        (224, 2, {112: 64, 56: 32, 28: 16, 14: 8, 7: 4}),
        (176, 4, {88: 32, 44: 16, 22: 8, 11: 4, 6: 2}),
        (32, 4, {32: 8, 16: 4, 8: 2}),
        (288, 4, {144: 48, 36: 12, 9: 3}),
    ],
)
def test_grid_gives_cells_that_line_up_through_the_network(image, grid, maps):
    tiling = Tiling(grid=(grid, grid), image=(image, image))
    assert {size: tiling.patch_for((size, size))[0] for size in maps} == maps


@given(st.integers(1, 600), st.integers(1, 600), st.integers(1, 40))
def test_grid_patch_is_between_one_and_the_map(size, image, grid):
    assert 1 <= grid_patch(size, grid, image) <= size


@given(sides, sizes)
def test_a_patch_larger_than_the_map_is_one_patch(patch, size):
    h, w = Tiling(patch=(patch[0] * 20, patch[1] * 20)).patch_for(size)
    assert count_cells(size, (h, w)) == (1, 1)
