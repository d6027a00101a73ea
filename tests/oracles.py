"""Slow truth: loops written from the equations, and projections around torch's own exact backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Pair = tuple[int, int]


def patches_of(size: Pair, patch: Pair) -> list[tuple[int, int, slice, slice]]:
    """List the patches of a map: cell row, cell column, pixel rows, pixel columns."""
    return [
        (i, j, slice(top, min(top + patch[0], size[0])), slice(left, min(left + patch[1], size[1])))
        for i, top in enumerate(range(0, size[0], patch[0]))
        for j, left in enumerate(range(0, size[1], patch[1]))
    ]


def pool(x: Tensor, patch: Pair, reduce: str) -> Tensor:
    """Pool by loops; `reduce` is "mean" or "sum" over the real pixels."""
    cells = patches_of((x.shape[2], x.shape[3]), patch)
    out = x.new_zeros(*x.shape[:2], cells[-1][0] + 1, cells[-1][1] + 1)
    for i, j, rows, columns in cells:
        out[:, :, i, j] = getattr(x[:, :, rows, columns], reduce)((2, 3))
    return out


def unpool(x_bar: Tensor, patch: Pair, size: Pair) -> Tensor:
    """Repeat each cell over its patch, by loops."""
    out = x_bar.new_zeros(*x_bar.shape[:2], *size)
    for i, j, rows, columns in patches_of(size, patch):
        out[:, :, rows, columns] = x_bar[:, :, i, j, None, None]
    return out


def spread(g: Tensor, patch: Pair, size: Pair) -> Tensor:
    """Return the patch-constant pixel gradient whose patch sums are g."""
    areas = pool(g.new_ones(1, 1, *size), patch, "sum")
    return unpool(g / areas, patch, size)


def project(x: Tensor, patch: Pair) -> Tensor:
    """Return the patch-constant map nearest to x."""
    return unpool(pool(x, patch, "mean"), patch, (x.shape[2], x.shape[3]))


def coarse_backward(
    f: Callable[..., Tensor],
    x: Tensor,
    params: Sequence[Tensor],
    g: Tensor,
    patch: Pair,
    out_patch: Pair,
    *,
    params_see_projection: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Project, apply the exact pixel-resolution Jacobian, project.

    Args:
        f: The function at pixel resolution, called as f(x, *params).
        x: Its input.
        params: Further inputs that need a gradient.
        g: Patch sums of the gradient of the output.
        patch: Patch of the input.
        out_patch: Patch of the output.
        params_see_projection: Whether the gradient of the params uses the projected input, as a kernel's does.

    Returns:
        Patch sums of the gradient of x, and the gradients of the params.
    """
    x = x.detach().requires_grad_()
    params = [p.detach().requires_grad_() for p in params]
    y = f(x, *params)
    gy = spread(g, out_patch, (y.shape[2], y.shape[3]))
    gx, *gp = torch.autograd.grad(y, [x, *params], gy)
    if params_see_projection and params:
        gp = torch.autograd.grad(f(project(x.detach(), patch), *params), params, gy)
    return pool(gx, patch, "sum"), list(gp)


def lumped_by_loops(x: Tensor, w: Tensor, gy: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return g̃x and g̃w of the gradient-filtering paper (CVPR 2023, facts §1) for stride 1 and "same" padding.

    g̃y = mean of gy over each patch; g̃x[n,ci,p] = Σ_co g̃y[n,co,p] Σ_uv w[co,ci,u,v], constant inside a patch;
    g̃w[co,ci,u,v] = Σ_np x̃[n,ci,p] g̃y[n,co,p] with x̃ the sum of x over the patch, the same for every tap.
    """
    gx, gw = torch.zeros_like(x), torch.zeros_like(w)
    for n, (_, _, rows, columns) in itertools.product(range(len(x)), patches_of((x.shape[2], x.shape[3]), (r, r))):
        for co, ci in itertools.product(range(w.shape[0]), range(w.shape[1])):
            g_mean = gy[n, co, rows, columns].mean()
            gx[n, ci, rows, columns] += g_mean * w[co, ci].sum()
            gw[co, ci] += x[n, ci, rows, columns].sum() * g_mean
    return gx, gw


def tap_matrix_by_loops(
    kernel: int, stride: int, dilation: int, before: int, in_size: int, out_size: int, in_patch: int, out_patch: int
) -> Tensor:
    """Return T_u[I, J] = (1/|I|) · #{ i in I : s·i + d·u − p in J, a real pixel }, by loops."""
    out_cells, in_cells = -(-out_size // out_patch), -(-in_size // in_patch)
    t = torch.zeros(kernel, out_cells, in_cells, dtype=torch.float64)
    for u, i in itertools.product(range(kernel), range(out_size)):
        position = stride * i + dilation * u - before
        area = min((i // out_patch + 1) * out_patch, out_size) - i // out_patch * out_patch
        if 0 <= position < in_size:
            t[u, i // out_patch, position // in_patch] += 1 / area
    return t
