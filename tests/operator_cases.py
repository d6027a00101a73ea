"""One row per operator and kind of argument: reference, kernel, fake, registration and gradient are checked for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import oracles
from cases import draw
from gradfilter import ops
from gradfilter.geometry.axes import Axis
from gradfilter.geometry.convolution import Geometry, make_geometry
from gradfilter.geometry.tiling import Layout, count_cells
from gradfilter.geometry.windows import Windows, make_windows

Args = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An operator with arguments, and what it computes written another way.

    Attributes:
        name: The operator's name, and what is special of the arguments.
        make: Returns the arguments by name, tensors in float64.
        oracle: Called with the arguments, returns the result, slowly: tensors and `None` as the operator orders them.
        has_kernel: Whether the C library computes it where its arguments are float32 in channels-last memory.
        tolerance: How far the kernel may be from the reference, relative to the largest number: both are single precision.
    """

    name: str
    make: Callable[[], Args]
    oracle: Callable[..., Any]
    has_kernel: bool = True
    tolerance: float = 1e-5

    @property
    def operator(self) -> Any:
        """The operator."""
        return ops.OPERATORS[self.name.partition(" ")[0]]

    def __str__(self) -> str:
        """Return the test id."""
        return self.name.replace(" ", "-")


def list_parts(result: Any) -> list[Tensor | None]:
    """List the tensors of a result, and where there are none."""
    return tree_leaves(result, is_leaf=lambda part: part is None)


def move(args: Args, device: str) -> Args:
    """Return arguments whose tensors are others of the same shape, strides and dtype."""
    return tree_map_only(Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), args)


SIZE, PATCH = (7, 10), (3, 4)
CELLS = count_cells(SIZE, PATCH)
N, C = 2, 16
TOKENS = Layout(1, 1, SIZE, 2)
NHWC = Layout(1, 2)
RELU6, LEAKY = ops.RELU6, ops.Act(ops.LEAKY, slope=0.25)


def over_layout(function: Callable[[Tensor], Tensor], x: Tensor, layout: Layout, size: tuple[int, int]) -> Tensor:
    """Apply a function of maps to a tensor in NHWC or in tokens behind a prefix."""
    if layout == NHWC:
        return function(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    head, rest = x[:, : layout.prefix], x[:, layout.prefix :]
    y = function(rest.transpose(1, 2).reshape(len(x), -1, *size))
    return torch.cat([head, y.flatten(2).transpose(1, 2)], 1)


def count_by_loops(steep: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return counts per patch, or at patch 1 eight bits to a byte."""
    if patch != (1, 1):
        return oracles.pool(steep.double(), patch, "sum").to(torch.uint8)
    bits = [int(b) for b in steep.flatten()]
    bits += [0] * (-len(bits) % 8)
    return torch.tensor([sum(b << i for i, b in enumerate(bits[k : k + 8])) for k in range(0, len(bits), 8)], dtype=torch.uint8)


def find_derivative(z: Tensor, act: ops.Act) -> tuple[Tensor, Tensor]:
    """Return an activation of z and its derivative, which autograd gives."""
    functions = {
        ops.CLAMP: lambda z: torch.clamp(z, act.lo, act.hi if act.hi < math.inf else None),
        ops.LEAKY: lambda z: F.leaky_relu(z, act.slope),
        ops.HARDSWISH.kind: F.hardswish,
        ops.SILU.kind: F.silu,
        ops.IDENTITY.kind: lambda z: z * 1,
    }
    z = z.detach().requires_grad_()
    y = functions[act.kind](z)
    return y.detach(), torch.autograd.grad(y.sum(), z)[0]


def finish(z: Tensor, act: ops.Act, patch: tuple[int, int]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y = act(z) with its patch means and slopes."""
    y, derivative = find_derivative(z, act)
    if patch == (1, 1):
        return y, None, None
    if not act.kind:
        return y, oracles.pool(y, patch, "mean"), None
    steep = act.kind in (ops.CLAMP, ops.LEAKY)
    slope = count_by_loops(derivative == 1, patch) if steep else oracles.pool(derivative, patch, "mean")
    return y, oracles.pool(y, patch, "mean"), slope


def run_norm_act(x: Tensor, scale: Any, shift: Any, act: ops.Act, patch: Any, residual: Tensor | None = None) -> Any:
    z = x if scale is None else x * scale[:, None, None]
    z = z if shift is None else z + shift[:, None, None]
    return finish(z if residual is None else z + residual, act, patch)


def run_convolve(
    x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, out_size: Any, *ending: Any
) -> Any:
    scale, shift, act, patch, residual = ending
    after = [
        (o - 1) * s + (k - 1) * d + 1 - n - p
        for o, s, k, d, n, p in zip(out_size, stride, w.shape[2:], dilation, x.shape[2:], padding, strict=True)
    ]
    y = F.conv2d(F.pad(x, (padding[1], after[1], padding[0], after[0])), w, bias, stride, 0, dilation, groups)
    assert y.shape[2:] == tuple(out_size)
    return run_norm_act(y, scale, shift, act, patch, residual)


def run_expand(
    x: Tensor, w: Tensor, middle: Any, taps: Tensor, stride: Any, padding: Any, dilation: Any, out_size: Any, end: Any
) -> Any:
    hidden = run_convolve(x, w, middle.bias, (1, 1), (0, 0), (1, 1), 1, x.shape[2:], *middle[1:], None)
    out = run_convolve(hidden[0], taps, end.bias, stride, padding, dilation, len(w), out_size, *end[1:], None)
    return *hidden[1:], *out


def run_conv_gradients(g: Tensor, kept: Tensor | None, w: Tensor, geometry: Geometry, need_gx: bool) -> Any:
    """Return gx and gw by torch's own backward between patch-constant maps; a lumped kernel is not the lift's projection."""
    rows, columns = geometry.rows, geometry.columns
    size, out_size = (rows.in_size, columns.in_size), (rows.out_size, columns.out_size)
    patch, out_patch = (rows.in_patch, columns.in_patch), geometry.out_patch
    after = [(a.out_size - 1) * a.stride + (a.kernel - 1) * a.dilation + 1 - a.in_size - a.before for a in (rows, columns)]
    pads = (columns.before, after[1], rows.before, after[0])

    def run(x: Tensor, w: Tensor) -> Tensor:
        strides, dilations = (rows.stride, columns.stride), (rows.dilation, columns.dilation)
        return F.conv2d(F.pad(x, pads), w, None, strides, 0, dilations, geometry.groups)

    x = torch.zeros(len(g), w.shape[1] * geometry.groups, *size, dtype=g.dtype)
    if kept is not None:
        x = oracles.unpool(kept, patch, size)
    gx, (gw,) = oracles.coarse_backward(run, x, [w], g, patch, out_patch, params_see_projection=True)
    assert out_size == (rows.out_size, columns.out_size)
    return gx if need_gx else None, gw if kept is not None else None


def run_conv_norm(
    g: Tensor,
    kept: Any,
    w: Tensor,
    b: Any,
    norm: ops.FixedNorm,
    geometry: Geometry,
    need_gx: bool,
    need_gb: bool,
    need_gamma: bool,
) -> Any:
    """Return the gradients by differentiating the folded kernel."""
    assert norm.gamma is not None
    gamma, w_leaf = norm.gamma.clone().requires_grad_(), w.clone().requires_grad_()
    sigma = (norm.var + norm.eps).sqrt()
    folded = w_leaf * (gamma / sigma)[:, None, None, None]
    gx, gv = run_conv_gradients(g, kept, folded.detach(), geometry, need_gx)
    total = g.sum((0, 2, 3))
    shift = ((0 if b is None else b) - norm.mu) * gamma / sigma
    loss = (shift * total).sum() if gv is None else (folded * gv).sum() + (shift * total).sum()
    gw, g_gamma = torch.autograd.grad(loss, [w_leaf, gamma], allow_unused=True)
    gb = total * (norm.gamma / sigma) if need_gb else None
    return gx, gw, gb, g_gamma if need_gamma and gw is not None else None, total


def run_norm_eval(g: Tensor, x_bar: Any, norm: ops.FixedNorm, need_gx: bool, need_beta: bool) -> Any:
    x = (g * 0 if x_bar is None else x_bar).clone().requires_grad_()
    assert norm.gamma is not None
    gamma, beta = norm.gamma.clone().requires_grad_(), torch.zeros_like(norm.mu).requires_grad_()
    y = F.batch_norm(x, norm.mu, norm.var, gamma, beta, False, 0, norm.eps)
    gx, g_gamma, g_beta = torch.autograd.grad(y, [x, gamma, beta], g)
    return gx if need_gx else None, None if x_bar is None else g_gamma, g_beta if need_beta else None


def run_norm_train(
    g: Tensor,
    x_hat: Tensor,
    inverse: Tensor,
    gamma: Any,
    size: Any,
    patch: Any,
    need_gx: bool,
    need_gamma: bool,
    need_beta: bool,
) -> Any:
    """Return the gradients by torch's own backward of a norm of a patch-constant map, of which x̂ are the normalised means."""
    x = oracles.unpool(x_hat, patch, size)
    affine = [torch.ones(g.shape[1], dtype=g.dtype) if gamma is None else gamma, torch.zeros(g.shape[1], dtype=g.dtype)]
    if inverse.dim() == 1:
        x = x / inverse[:, None, None]

        def run(x: Tensor, *affine: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, *affine, training=True, eps=1e-30)
    else:
        groups = inverse.shape[1]
        x = (x.unflatten(1, (groups, -1)) / inverse[:, :, None, None, None]).flatten(1, 2)

        def run(x: Tensor, *affine: Tensor) -> Tensor:
            return F.group_norm(x, groups, *affine, eps=1e-30)

    gx, (g_gamma, g_beta) = oracles.coarse_backward(run, x, affine, g, patch, patch)
    return gx if need_gx else None, g_gamma if need_gamma else None, g_beta if need_beta else None


def make_normal(inverse: bool = True, groups: int | None = None) -> tuple[Tensor, Tensor]:
    """Return patch means that are exactly normalised over a map of SIZE, and their 1/σ."""
    x = oracles.unpool(draw(N, C, *CELLS, seed=1), PATCH, SIZE)
    axes = (0, 2, 3) if groups is None else (2, 3, 4)
    parts = x if groups is None else x.unflatten(1, (groups, -1))
    axes = axes if groups is None else (2, 3, 4)
    mu, var = parts.mean(axes, keepdim=True), parts.var(axes, correction=0, keepdim=True)
    x_hat = ((parts - mu) * var.rsqrt()).reshape(x.shape)
    return oracles.pool(x_hat, PATCH, "mean"), var.rsqrt().flatten() if groups is None else var.rsqrt().reshape(N, groups)


def run_max_pool(x: Tensor, windows: Windows) -> Any:
    """Return maxima, means and winners, counted pixel by pixel."""
    if windows.is_adaptive:
        y, indices = F.adaptive_max_pool2d(x, windows.size, return_indices=True)
    else:
        where = windows.kernel, windows.stride, windows.padding, windows.dilation, windows.has_ceiling
        y, indices = F.max_pool2d(x, *where, return_indices=True)
    reach, single = windows.reach[0] * windows.reach[1], windows.out_patch == (1, 1)
    counts = torch.zeros(*x.shape[:2], *windows.out_cells, reach, dtype=torch.uint8)
    for n, c, i, j in itertools.product(*map(range, y.shape)):
        row, column = divmod(int(indices[n, c, i, j]), x.shape[3])
        cell = i // windows.out_patch[0], j // windows.out_patch[1]
        down = row // windows.in_patch[0] - int(windows.first[0][cell[0]])
        along = column // windows.in_patch[1] - int(windows.first[1][cell[1]])
        counts[n, c, *cell, down * windows.reach[1] + along] += 1
    if single:
        return y, None, counts.argmax(-1).to(torch.uint8)
    return y, oracles.pool(y, windows.out_patch, "mean"), counts


def run_max_route(g: Tensor, winners: Tensor, windows: Windows) -> Tensor:
    """Return the gradient of the input, cell by cell."""
    gx = g.new_zeros(*g.shape[:2], *windows.in_cells)
    for i, j, k in itertools.product(*map(range, windows.out_cells), range(windows.reach[0] * windows.reach[1])):
        down, along = divmod(k, windows.reach[1])
        row = min(int(windows.first[0][i]) + down, windows.in_cells[0] - 1)
        column = min(int(windows.first[1][j]) + along, windows.in_cells[1] - 1)
        won = winners[:, :, i, j] == k if winners.dim() == 4 else winners[:, :, i, j, k]
        gx[:, :, row, column] += torch.where(won == 0, 0, g[:, :, i, j] * won)
    return gx


def run_scale(g: Tensor, count: Tensor, slopes: Any, size: Any, patch: Any, layout: Any = None) -> Tensor:
    """Return the gradient by the mean slope of each patch."""
    low, high = slopes
    if patch == (1, 1):
        bits = [int(b) >> i & 1 for b in count for i in range(8)][: g.numel()]
        return g * (low + (high - low) * torch.tensor(bits, dtype=g.dtype).reshape(g.shape))
    ones = torch.ones(1, 1, *size, dtype=g.dtype)
    if layout is None:
        return g * (low + (high - low) * count / oracles.pool(ones, patch, "sum"))
    cells = count_cells(size, patch)
    areas = oracles.pool(ones, patch, "sum").expand(1, 1, *cells)
    areas = areas.permute(0, 2, 3, 1) if layout == NHWC else torch.cat([torch.ones(1, 2, 1), areas.flatten(2).mT], 1)
    return g * (low + (high - low) * count / areas)


def run_cross_entropy(x: Tensor, target: Tensor, weight: Any, ignore_index: int) -> Any:
    x = x.detach().requires_grad_()
    y = F.cross_entropy(x, target, weight, ignore_index=ignore_index, reduction="sum")
    return y.detach(), torch.autograd.grad(y, x)[0]


def run_fold(gamma: Any, beta: Any, mean: Tensor, var: Tensor, eps: float) -> Any:
    zero, one = torch.zeros(1, len(mean), dtype=mean.dtype), torch.ones(1, len(mean), dtype=mean.dtype)
    at_zero, at_one = (F.batch_norm(x, mean, var, gamma, beta, False, 0, eps)[0] for x in (zero, one))
    return (at_one - at_zero).float(), at_zero.float()


def make_conv(kernel: int, stride: int, patch: int, out_patch: int, groups: int = 1, lumped: bool = False) -> Geometry:
    """Return a convolution of a map of 9 by 11 pixels."""
    rows, columns = (
        Axis(kernel, stride, 1, kernel // 2, n, (n + 2 * (kernel // 2) - kernel) // stride + 1, patch, out_patch)
        for n in (9, 11)
    )
    return make_geometry(rows, columns, groups, lumped)


def make_gradients(geometry: Geometry, outputs: int = C, inputs: int = C, kept: bool = True, need_gx: bool = True) -> Args:
    """Return the arguments of `conv_gradients`."""
    kernel = geometry.rows.kernel, geometry.columns.kernel
    cells = geometry.out_cells if geometry.is_single_tap else geometry.in_cells
    x = draw(N, inputs, *cells, seed=1) if kept else None
    w = draw(outputs, inputs // geometry.groups, *kernel, seed=2)
    return {"g": draw(N, outputs, *geometry.out_cells), "kept": x, "w": w, "geometry": geometry, "need_gx": need_gx}


def make_norm(channels: int = C) -> ops.FixedNorm:
    """Return a batch norm with fixed statistics."""
    return ops.FixedNorm(draw(channels, seed=5), draw(channels, seed=6), draw(channels, seed=7).abs() + 0.5, 1e-3)


def make_conv_norm(
    geometry: Geometry, bias: bool = True, need_gb: bool = True, need_gamma: bool = True, **options: Any
) -> Args:
    """Return the arguments of `conv_norm_gradients`."""
    args = make_gradients(geometry, **options)
    b = draw(len(args["w"]), seed=4) if bias else None
    need_gx = args.pop("need_gx")
    return {
        **{name: args[name] for name in ("g", "kept", "w")},
        "b": b,
        "norm": make_norm(len(args["w"])),
        "geometry": geometry,
        "need_gx": need_gx,
        "need_gb": need_gb,
        "need_gamma": need_gamma,
    }


def make_ending(act: ops.Act, patch: tuple[int, int], seed: int) -> ops.Ending:
    """Return what follows a convolution to C channels."""
    return ops.Ending(draw(C, seed=seed), draw(C, seed=seed + 1), draw(C, seed=seed + 2), act, patch)


def make_convolution(w: Tensor, x: Tensor, out_size: Any, act: ops.Act, residual: bool = False, **where: Any) -> Args:
    """Return the arguments of `convolve`."""
    outputs = len(w)
    places = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, **where}
    return {
        "x": x,
        "w": w,
        "bias": draw(outputs, seed=4),
        **places,
        "out_size": out_size,
        "scale": draw(outputs, seed=5),
        "shift": draw(outputs, seed=6),
        "act": act,
        "patch": PATCH,
        "residual": draw(len(x), outputs, *out_size, seed=7) if residual else None,
    }


def make_cells(act: ops.Act) -> ops.Cells:
    """Return where patch means and slopes of a map of C channels go."""
    shape = N, C, *CELLS
    slopes = torch.zeros(shape, dtype=torch.uint8 if act.kind in (ops.CLAMP, ops.LEAKY) else torch.float64)
    return ops.Cells(torch.zeros(shape, dtype=torch.float64), slopes if act.kind else None)


POOL = make_windows((9, 10), (5, 5), (2, 2), (2, 3), (3, 3), (2, 2), (1, 1), (1, 1))
ONE = make_windows((9, 10), (5, 5), (2, 2), (1, 1), (3, 3), (2, 2), (1, 1), (1, 1))
ADAPTIVE = make_windows((9, 10), (3, 4), (2, 2), (2, 2))


def count(shape: tuple[int, ...], most: int, seed: int = 3) -> Tensor:
    """Return drawn counts."""
    return torch.randint(0, most + 1, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


CASES = [
    Case("pool_mean", lambda: {"x": draw(N, C, *SIZE), "patch": PATCH}, lambda x, patch: oracles.pool(x, patch, "mean")),
    Case("pool_mean at patch 1", lambda: {"x": draw(N, C, *SIZE), "patch": (1, 1)}, lambda x, patch: x),
    Case(
        "pool_mean of tokens",
        lambda: {"x": draw(N, 72, C), "patch": PATCH, "layout": TOKENS},
        lambda x, patch, layout: over_layout(lambda m: oracles.pool(m, patch, "mean"), x, layout, SIZE),
        has_kernel=False,
    ),
    Case("pool_sum", lambda: {"x": draw(N, C, *SIZE), "patch": PATCH}, lambda x, patch: oracles.pool(x, patch, "sum")),
    Case(
        "pool_sum of NHWC",
        lambda: {"x": draw(N, *SIZE, C), "patch": PATCH, "layout": NHWC},
        lambda x, patch, layout: over_layout(lambda m: oracles.pool(m, patch, "sum"), x, layout, SIZE),
        has_kernel=False,
    ),
    Case("unpool", lambda: {"x_bar": draw(N, C, *CELLS), "patch": PATCH, "size": SIZE}, oracles.unpool),
    Case(
        "unpool of tokens",
        lambda: {"x_bar": draw(N, 2 + CELLS[0] * CELLS[1], C), "patch": PATCH, "size": SIZE, "layout": TOKENS},
        lambda x, patch, size, layout: over_layout(lambda m: oracles.unpool(m, patch, size), x, layout, CELLS),
        has_kernel=False,
    ),
    Case(
        "map_axes",
        lambda: {"x": draw(N, C, *CELLS), "rows": draw(5, CELLS[0], seed=1), "columns": draw(4, CELLS[1], seed=2)},
        lambda x, rows, columns: torch.einsum("ih,nchw,jw->ncij", rows, x, columns),
        has_kernel=False,
    ),
    Case(
        "map_axes of columns alone",
        lambda: {"x": draw(N, C, *CELLS), "rows": None, "columns": draw(4, CELLS[1], seed=2)},
        lambda x, rows, columns: torch.einsum("nchw,jw->nchj", x, columns),
        has_kernel=False,
    ),
    *(
        Case(
            f"norm_act {act.kind}",
            lambda act=act: {
                "x": draw(N, C, *SIZE) * 3,
                "scale": draw(C, seed=1),
                "shift": draw(C, seed=2),
                "act": act,
                "patch": PATCH,
                "residual": draw(N, C, *SIZE, seed=3),
            },
            run_norm_act,
        )
        for act in (ops.IDENTITY, RELU6, LEAKY, ops.HARDSWISH, ops.SILU)
    ),
    *(
        Case(
            f"norm_act {name}",
            lambda act=act: {"x": draw(N, C, *SIZE) * 3, "scale": None, "shift": None, "act": act, "patch": PATCH},
            run_norm_act,
        )
        for name, act in (
            ("of an identity with bounds", ops.Act(ops.IDENTITY.kind, -1.0)),
            ("of a smooth activation with bounds", ops.Act(ops.HARDSWISH.kind, 0.0, 6.0, 0.5)),
            ("of bounds beyond single precision", ops.Act(ops.CLAMP, -1e300, 1.0)),
        )
    ),
    Case(
        "norm_act at patch 1",
        lambda: {"x": draw(N, C, *SIZE), "scale": None, "shift": None, "act": ops.RELU, "patch": (1, 1)},
        run_norm_act,
    ),
    Case(
        "count_steep",
        lambda: {"x": draw(N, C, *SIZE) * 4, "act": RELU6, "patch": PATCH},
        lambda x, act, patch: count_by_loops((x > 0) & (x < 6), patch),
        has_kernel=False,
    ),
    Case(
        "count_steep at patch 1",
        lambda: {"x": draw(1, 3, *SIZE), "act": LEAKY, "patch": (1, 1)},
        lambda x, act, patch: count_by_loops(x > 0, patch),
        has_kernel=False,
    ),
    Case(
        "scale_by_counts",
        lambda: {
            "g": draw(N, C, *CELLS),
            "count": count((N, C, *CELLS), 2),
            "slopes": (0.25, 1.0),
            "size": SIZE,
            "patch": PATCH,
        },
        run_scale,
    ),
    Case(
        "scale_by_counts at patch 1",
        lambda: {
            "g": draw(1, 3, *SIZE),
            "count": count((27,), 255),
            "slopes": (0.0, 1.0),
            "size": SIZE,
            "patch": (1, 1),
        },
        run_scale,
        has_kernel=False,
    ),
    Case(
        "scale_by_counts of NHWC",
        lambda: {
            "g": draw(N, *CELLS, C),
            "count": count((N, *CELLS, C), 2),
            "slopes": (0.0, 1.0),
            "size": SIZE,
            "patch": PATCH,
            "layout": NHWC,
        },
        run_scale,
        has_kernel=False,
    ),
    Case(
        "convolve depthwise",
        lambda: make_convolution(draw(C, 1, 3, 3), draw(N, C, *SIZE, seed=1), SIZE, RELU6, residual=True, groups=C),
        run_convolve,
    ),
    Case(
        "convolve dense",
        lambda: make_convolution(draw(20, 5, 3, 3), draw(N, 5, *SIZE, seed=1), (4, 5), ops.SILU, stride=(2, 2)),
        run_convolve,
    ),
    Case(
        "convolve winograd",
        lambda: make_convolution(draw(C, C, 3, 3), draw(N, C, *SIZE, seed=1), SIZE, LEAKY),
        run_convolve,
    ),
    Case(
        "convolve in groups",
        lambda: make_convolution(draw(8, 2, 3, 2), draw(N, 4, *SIZE, seed=1), (9, 8), ops.HARDSWISH, groups=2, padding=(2, 0)),
        run_convolve,
        has_kernel=False,
    ),
    Case(
        "expand",
        lambda: {
            "x": draw(N, 6, *SIZE),
            "w": draw(C, 6, 1, 1, seed=1),
            "middle": make_ending(RELU6, PATCH, 10),
            "taps": draw(C, 1, 3, 3, seed=2),
            "stride": (2, 1),
            "padding": (1, 1),
            "dilation": (1, 1),
            "out_size": (4, 10),
            "end": make_ending(ops.IDENTITY, (2, 2), 20),
        },
        run_expand,
        tolerance=3e-5,
    ),
    Case(
        "fold_norm",
        lambda: {
            "gamma": draw(C, seed=5),
            "beta": draw(C, seed=8),
            "mean": draw(C, seed=6),
            "var": draw(C, seed=7).abs() + 0.5,
            "eps": 1e-3,
        },
        run_fold,
    ),
    Case("max_pool", lambda: {"x": draw(N, C, 9, 10), "windows": POOL}, run_max_pool),
    Case("max_pool at patch 1", lambda: {"x": draw(N, C, 9, 10), "windows": ONE}, run_max_pool),
    Case("max_pool adaptive", lambda: {"x": draw(N, C, 9, 10), "windows": ADAPTIVE}, run_max_pool, has_kernel=False),
    Case(
        "max_route",
        lambda: {
            "g": draw(N, C, *POOL.out_cells),
            "winners": count((N, *POOL.out_cells, 9, C), 6).permute(0, 4, 1, 2, 3),
            "windows": POOL,
        },
        run_max_route,
    ),
    Case(
        "max_route at patch 1",
        lambda: {"g": draw(N, C, *ONE.out_cells), "winners": count((N, C, *ONE.out_cells), 3), "windows": ONE},
        run_max_route,
    ),
    Case("conv_gradients by tiles", lambda: make_gradients(make_conv(3, 1, 2, 2)), run_conv_gradients),
    Case("conv_gradients by pairs", lambda: make_gradients(make_conv(5, 2, 4, 2, groups=C), C, C), run_conv_gradients),
    Case("conv_gradients of one tap", lambda: make_gradients(make_conv(1, 1, 2, 2)), run_conv_gradients),
    Case("conv_gradients of gw alone", lambda: make_gradients(make_conv(3, 1, 2, 2), need_gx=False), run_conv_gradients),
    Case("conv_gradients of gx alone", lambda: make_gradients(make_conv(3, 1, 2, 2), kept=False), run_conv_gradients),
    Case(
        "conv_gradients in groups",
        lambda: make_gradients(make_conv(3, 2, 4, 2, groups=2), 8, 4),
        run_conv_gradients,
        has_kernel=False,
    ),
    Case(
        "conv_gradients at patch 1", lambda: make_gradients(make_conv(3, 1, 1, 1), 6, 4), run_conv_gradients, has_kernel=False
    ),
    Case(
        "conv_gradients of nothing",
        lambda: make_gradients(make_conv(3, 1, 2, 2), kept=False, need_gx=False),
        run_conv_gradients,
        has_kernel=False,
    ),
    Case("conv_norm_gradients", lambda: make_conv_norm(make_conv(3, 1, 2, 2)), run_conv_norm),
    Case(
        "conv_norm_gradients of few cells",
        lambda: make_conv_norm(make_conv(3, 1, 6, 6), bias=False, need_gb=False),
        run_conv_norm,
    ),
    Case(
        "conv_norm_gradients of a frozen weight",
        lambda: make_conv_norm(make_conv(3, 1, 2, 2), need_gamma=False, kept=False),
        run_conv_norm,
        has_kernel=False,
    ),
    Case(
        "norm_eval_gradients",
        lambda: {
            "g": draw(N, C, *CELLS),
            "x_bar": draw(N, C, *CELLS, seed=1),
            "norm": make_norm(),
            "need_gx": True,
            "need_beta": True,
        },
        run_norm_eval,
        has_kernel=False,
    ),
    Case(
        "norm_eval_gradients of gx alone",
        lambda: {"g": draw(N, C, *CELLS), "x_bar": None, "norm": make_norm(), "need_gx": True, "need_beta": False},
        run_norm_eval,
        has_kernel=False,
    ),
    *(
        Case(
            f"norm_train_gradients {kind}",
            lambda groups=groups: {
                **dict(zip(("x_hat", "inverse"), make_normal(groups=groups), strict=True)),
                "g": draw(N, C, *CELLS),
                "gamma": draw(C, seed=5),
                "size": SIZE,
                "patch": PATCH,
                "need_gx": True,
                "need_gamma": True,
                "need_beta": True,
            },
            run_norm_train,
            has_kernel=False,
        )
        for kind, groups in (("of a batch", None), ("of groups", 4), ("of instances", C))
    ),
    Case(
        "cross_entropy_gradient",
        lambda: {
            "x": draw(N, 5, *SIZE),
            "target": count((N, *SIZE), 4).long(),
            "weight": draw(5, seed=1).abs(),
            "ignore_index": 2,
        },
        run_cross_entropy,
        has_kernel=False,
    ),
]

WRITING = [
    Case(
        "norm_act to a target",
        lambda: {
            "x": draw(N, C, *SIZE) * 3,
            "scale": draw(C, seed=1),
            "shift": draw(C, seed=2),
            "act": RELU6,
            "patch": PATCH,
            "residual": None,
            "out": torch.zeros(N, C, *SIZE, dtype=torch.float64),
        },
        run_norm_act,
    ),
    *(
        Case(
            f"convolve to cells {act.kind}",
            lambda act=act: {
                **make_convolution(draw(C, 1, 3, 3), draw(N, C, *SIZE, seed=1), SIZE, act, groups=C),
                "cells": make_cells(act),
            },
            run_convolve,
        )
        for act in (ops.IDENTITY, RELU6, ops.SILU)
    ),
    Case(
        "expand to cells",
        lambda: {**next(case for case in CASES if case.name == "expand").make(), "cells": make_cells(RELU6)},
        run_expand,
    ),
]
"""Arguments with tensors to write to, which graphs do not have."""
