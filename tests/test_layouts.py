"""Rules in any layout: views, channels-last maps, tokens, and functions of two maps."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracles
from cases import CHANNELS, PAIRS, REARRANGED, draw
from gradfilter.emit import enter
from gradfilter.geometry.tiling import Layout, Tiling
from gradfilter.rules.view import align
from gradfilter.tensor import Choices, PatchTensor
from test_rules import choose, clamp, run_or_skip, run_rule, sides, sizes


@pytest.mark.parametrize("name", REARRANGED)
@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides, n=st.integers(1, 3))
def test_rearranged_maps_are_the_projected_jacobian(name, size, patch, n):
    function = REARRANGED[name]
    x = draw(n, 2 * CHANNELS, *size)
    params = [draw(*shape, seed=20 + i) for i, shape in enumerate(function.params)]
    expected = run_or_skip(function.call, x.clone(), *params)
    y, gx, gp, g, out_patch = run_rule(function.call, x, params, patch)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    want_gx, want_gp = oracles.coarse_backward(function.call, x, params, g, clamp(patch, x), out_patch)
    torch.testing.assert_close(gx, want_gx, rtol=1e-9, atol=1e-9)
    for got, want in zip(gp, want_gp, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("plain", [False, True], ids=["both maps", "one enters"])
@pytest.mark.parametrize("name", PAIRS)
@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides, other=sides, narrow=st.booleans())
def test_functions_of_two_maps_are_the_projected_jacobian(name, plain, size, patch, other, narrow):
    """The finer patch holds where two meet; one of the two may have a single channel."""
    f = PAIRS[name]
    a = draw(2, CHANNELS, *size).requires_grad_()
    b = draw(2, 1 if narrow else CHANNELS, *size, seed=1).requires_grad_()
    expected = f(a, b)
    y = f(enter(a, choose(patch)) * 1.0, b if plain else enter(b, choose(other)) * 1.0)
    assert isinstance(y, PatchTensor)
    torch.testing.assert_close(y.detach(), expected.detach(), rtol=0, atol=0)
    g = draw(*y.carrier.shape, seed=4)
    got = torch.autograd.grad(y.carrier, [a, b], g)
    want = torch.autograd.grad(expected, [a, b], oracles.spread(g, y.patch, size))
    for x, p, gx, wx in zip((a, b), (patch, y.patch if plain else other), got, want, strict=True):
        p, wx = clamp(p, x), oracles.project(wx, y.patch)
        torch.testing.assert_close(oracles.pool(gx, p, "sum"), oracles.pool(wx, p, "sum"), rtol=1e-9, atol=1e-9)


NORMS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (CHANNELS,), w, b, 1e-3), 2),
    "layer_norm_plain": (lambda x: F.layer_norm(x, (CHANNELS,)), 0),
    "rms_norm": (lambda x, w: F.rms_norm(x, (CHANNELS,), w, 1e-3), 1),
    "rms_norm_plain": (lambda x: F.rms_norm(x, (CHANNELS,)), 0),
    "softmax": (lambda x: x.softmax(-1), 0),
    "log_softmax": (lambda x: F.log_softmax(x, dim=-1), 0),
}


@pytest.mark.parametrize("name", NORMS)
@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides)
def test_norms_of_channels_are_exact_where_maps_are_constant_in_patches(name, size, patch):
    f, count = NORMS[name]
    params = [draw(CHANNELS, seed=20 + i) for i in range(count)]
    x = oracles.project(draw(2, CHANNELS, *size), clamp(patch, draw(1, 1, *size)))

    def channels_last(x, *params):
        return f(x.permute(0, 2, 3, 1), *params).permute(0, 3, 1, 2)

    y, gx, gp, g, out_patch = run_rule(channels_last, x, params, patch)
    torch.testing.assert_close(y, channels_last(x, *params), rtol=1e-12, atol=1e-12)
    want_gx, want_gp = oracles.coarse_backward(channels_last, x, params, g, clamp(patch, x), out_patch)
    for got, want in zip([gx, *gp], [want_gx, *want_gp], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_channels_have_torchs_own_value_in_any_precision(name, dtype, autocast):
    f, count = NORMS[name]
    x = (1e-3 * draw(2, 4, 5, CHANNELS)).to(dtype).requires_grad_()
    params = [draw(CHANNELS, seed=i).to(dtype) for i in range(count)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = f(x, *params)
        y = f(enter(x, choose((2, 2)), Layout(1, 2)), *params)
    assert isinstance(y, PatchTensor)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y.detach(), expected.detach(), rtol=0, atol=0)
    assert torch.autograd.grad(y, x, torch.ones_like(expected))[0].isfinite().all()


def test_softmax_by_loops():
    """The stated equation on maps that are not constant in patches: the diagonal of the mean Jacobian is exact."""
    x = draw(1, 4, 6, 5)
    _, gx, _, g, patch = run_rule(lambda x: x.softmax(1), x, [], (3, 2))
    p = x.softmax(1)
    p_bar, v = oracles.pool(p, patch, "mean"), oracles.pool(p * (1 - p), patch, "mean")
    d = (v / (p_bar * (1 - p_bar))).sqrt()
    for i in range(g.shape[2]):
        for j in range(g.shape[3]):
            a, scale = (d * p_bar)[0, :, i, j], d[0, :, i, j]
            jacobian = torch.diag(scale * a) - torch.outer(a, a)
            torch.testing.assert_close(jacobian.diag(), v[0, :, i, j])
            torch.testing.assert_close(gx[0, :, i, j], jacobian @ g[0, :, i, j])


def test_layer_norm_by_loops():
    """The stated equation, cell by cell, on maps that are not constant in patches."""
    x, gamma = draw(1, 5, 6, 7), draw(5, seed=1)
    f = lambda x, w: F.layer_norm(x.permute(0, 2, 3, 1), (5,), w, None, 1e-5).permute(0, 3, 1, 2)  # noqa: E731
    _, gx, (g_gamma,), g, patch = run_rule(f, x, [gamma], (4, 3))
    s = (x.var(1, unbiased=False) + 1e-5).rsqrt()
    x_hat = (x - x.mean(1, keepdim=True)) * s[:, None]
    x_bar, s_bar = oracles.pool(x_hat, patch, "mean"), oracles.pool(s[:, None], patch, "mean")
    want, want_gamma = torch.zeros_like(g), torch.zeros_like(gamma)
    for i in range(g.shape[2]):
        for j in range(g.shape[3]):
            h, xb = gamma * g[0, :, i, j], x_bar[0, :, i, j]
            want[0, :, i, j] = s_bar[0, 0, i, j] * (h - h.mean() - xb * (h * xb).mean())
            want_gamma += g[0, :, i, j] * xb
    torch.testing.assert_close(gx, want)
    torch.testing.assert_close(g_gamma, want_gamma)


@pytest.mark.parametrize(
    ("shape", "wanted", "layout", "expected"),
    [
        ((2, 6, 5, 7), (2, 3, 2, 5, 7), Layout(2, 3), Layout(3, 4)),
        ((2, 6, 5, 7), (12, 5, 7), Layout(2, 3), Layout(1, 2)),
        ((2, 6, 5, 7), (2, 6, 35), Layout(2, 3), Layout(2, 2, (5, 7))),
        ((2, 6, 5, 7), (2, 30, 7), Layout(2, 3), None),
        ((2, 6, 5, 7), (2, 210), Layout(2, 3), None),
        ((2, 5, 7, 6), (2, 35, 6), Layout(1, 2), Layout(1, 1, (5, 7))),
        ((2, 7, 5, 6), (2, 35, 6), Layout(2, 1), None),
        ((2, 35, 6), (2, 5, 7, 3, 2), Layout(1, 1, (5, 7)), Layout(1, 2)),
        ((2, 35, 6), (2, 7, 5, 6), Layout(1, 1, (5, 7)), None),
        ((2, 35, 6), (2, 35, 3, 2), Layout(1, 1, (5, 7)), Layout(1, 1, (5, 7))),
        ((2, 36, 6), (2, 6, 6, 6), Layout(1, 1, (5, 7), 1), None),
        ((2, 1, 1, 1), (2, 1, 1), Layout(2, 3), Layout(1, 2)),
        ((1, 4, 1, 5), (4, 1, 5), Layout(2, 3), Layout(1, 2)),
        ((2, 6, 4, 4), (2, 6, 2, 2, 4), Layout(2, 3), None),
        ((2, 4, 4), (2, 4, 4, 1), Layout(1, 2), Layout(1, 2)),
    ],
)
def test_a_reshape_keeps_track_of_rows_and_columns(shape, wanted, layout, expected):
    assert align(shape, wanted, layout) == expected


def test_tokens_with_a_prefix_pool_the_grid_alone():
    x = draw(2, 1 + 4 * 6, 3).requires_grad_()
    layout = Layout(1, 1, (4, 6), prefix=1)
    px = enter(x, Choices("layer", Tiling(patch=(2, 3))), layout)
    w = draw(5, 3, seed=2).requires_grad_()
    y = F.linear(px, w)
    gy = draw(2, 25, 5, seed=3)
    gx, gw = torch.autograd.grad(y, [x, w], gy)

    def project(t: Tensor) -> Tensor:
        grid = t[:, 1:].transpose(1, 2).reshape(2, -1, 4, 6)
        return torch.cat([t[:, :1], oracles.project(grid, (2, 3)).flatten(2).transpose(1, 2)], 1)

    torch.testing.assert_close(gx, project(gy) @ w.detach())
    torch.testing.assert_close(gw, project(gy).flatten(0, 1).T @ x.detach().flatten(0, 1))
    assert px.carrier.shape == (2, 1 + 2 * 2, 3)


@settings(deadline=None, max_examples=30)
@given(size=sizes, patch=sides, start=st.integers(0, 3), step=st.integers(1, 3))
def test_crops_read_the_pixels_that_stay(size, patch, start, step):
    assume(start < size[0])
    f = lambda x: x[:, 1:, start::step, : max(1, size[1] - 1)]  # noqa: E731
    x = draw(2, CHANNELS, *size)
    _, gx, _, g, out_patch = run_rule(f, x, [], patch)
    want_gx, _ = oracles.coarse_backward(f, x, [], g, clamp(patch, x), out_patch)
    torch.testing.assert_close(gx, want_gx, rtol=1e-9, atol=1e-9)


REDUCTIONS = {
    "mean": lambda x: x.mean((1, 2)),
    "mean_tokens": lambda x: x.flatten(1, 2).mean(1),
    "norm": lambda x: x.norm(p=2, dim=(1, 2), keepdim=True),
    "amax": lambda x: x.amax((1, 2)),
    "sum_all": lambda x: x.sum(),
    "max_all": lambda x: x.max(),
    "mean_all_but_one": lambda x: x.mean((0, 1, 2)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(deadline=None, max_examples=15)
@given(size=sizes, patch=sides)
def test_reductions_over_space_leave_from_any_layout(name, size, patch):
    f = lambda x: REDUCTIONS[name](x.permute(0, 2, 3, 1))  # noqa: E731
    x = draw(2, CHANNELS, *size).requires_grad_()
    y, expected = f(enter(x, choose(patch)) * 1.0), f(x)
    assert type(y) is Tensor
    torch.testing.assert_close(y.detach(), expected.detach(), rtol=0, atol=1e-14)
    gy = draw(1, *y.shape, seed=3)[0]
    (got,), (want,) = torch.autograd.grad(y, x, gy), torch.autograd.grad(expected, x, gy)
    p = clamp(patch, x)
    torch.testing.assert_close(oracles.pool(got, p, "sum"), oracles.pool(want, p, "sum"))


@pytest.mark.parametrize("pads", [False, True])
@settings(deadline=None, max_examples=20)
@given(size=sizes, patch=sides)
def test_a_class_token_in_front_is_a_patch_by_itself(pads, size, patch):
    x, token = draw(2, CHANNELS, *size).requires_grad_(), draw(1, 1, CHANNELS, seed=1).requires_grad_()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.cat([token.expand(2, -1, -1), x.flatten(2).transpose(1, 2)], dim=1) * 2
        padded = F.pad(tokens, (0, 0, 2, 0))[:, 2:] if pads else tokens
        return padded[:, :1] if pads else padded[:, 0], padded[:, 1:].transpose(1, 2).reshape(x.shape)

    (head, y), (want_head, want_y) = f(enter(x, choose(patch))), f(x)
    assert isinstance(y, PatchTensor)
    g, g_head = draw(*y.carrier.shape, seed=4), draw(*head.shape, seed=5)
    got = torch.autograd.grad([y.carrier, head], [x, token], [g, g_head])
    want = torch.autograd.grad([want_y, want_head], [x, token], [oracles.spread(g, y.patch, size), g_head])
    torch.testing.assert_close(oracles.pool(got[0], y.patch, "sum"), oracles.pool(want[0], y.patch, "sum"))
    torch.testing.assert_close(got[1], want[1])


@pytest.mark.parametrize("dim", [1, (2, 3)], ids=["channels", "space"])
def test_normalize_is_exact_at_patch_one(dim):
    x = draw(2, CHANNELS, 5, 4)
    f = lambda x: F.normalize(x, dim=dim)  # noqa: E731  # pyright: ignore[reportArgumentType]
    y, gx, _, g, _ = run_rule(f, x, [], (1, 1))
    torch.testing.assert_close(y, f(x), rtol=0, atol=1e-14)
    torch.testing.assert_close(gx, oracles.coarse_backward(f, x, [], g, (1, 1), (1, 1))[0])


SPELLINGS = {
    "max other": lambda x, y: torch.max(x, other=y),
    "matmul other": lambda x, y: torch.matmul(x.permute(0, 2, 3, 1), other=draw(CHANNELS, CHANNELS)).permute(0, 3, 1, 2),
    "mean of no axes": lambda x, y: x.mean(dim=[]) * y,
    "repeat by name": lambda x, y: x.repeat(repeats=(1, 1, 1, 1)) * y,
    "norm of unknown p": lambda x, y: x.norm(p="fro", dim=1, keepdim=True) * y,
    "squeeze all": lambda x, y: (x[:1, :1].squeeze() + y[0, 0])[None, None],
    "narrow to all": lambda x, y: x.narrow(2, 0, x.shape[2]) * y,
    "conv by name": lambda x, y: F.conv2d(input=x, weight=draw(2, CHANNELS, 1, 1), bias=None),
    "cat by name": lambda x, y: torch.cat(tensors=[x, y], dim=1),
    "pad by name": lambda x, y: F.pad(input=x, pad=(1, 1)),
    "einsum of a list": lambda x, y: torch.einsum("nchw,nchw->nhw", [x, y])[:, None],
    "einsum with dots": lambda x, y: torch.einsum("n...,n...->n...", x, y),
    "left matrix": lambda x, y: torch.matmul(draw(4, CHANNELS), x.flatten(2)).unflatten(2, x.shape[2:]),
    "vector": lambda x, y: (x.permute(0, 2, 3, 1) @ draw(CHANNELS))[:, None],
    "interpolate by name": lambda x, y: F.interpolate(input=x, scale_factor=2, mode="nearest"),
    "softmax by name": lambda x, y: torch.softmax(input=x, dim=1),
}


@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.filterwarnings("ignore::gradfilter.errors.ExitWarning")
def test_every_spelling_is_right_by_a_rule_or_by_an_exit(name, ended):
    """An argument that a rule does not know, or a tensor whose region has ended, makes an exit and no error."""
    f = SPELLINGS[name]
    x, y = (draw(2, CHANNELS, 8, 8, seed=seed).requires_grad_() for seed in (0, 1))

    def run(x: Tensor, y: Tensor) -> Tensor:
        x, y = x * 1.5, y * 1.5
        if ended:
            x.retain_grad()
        return f(x, y)

    expected, got = run(x, y), run(enter(x, choose((1, 1))), enter(y, choose((1, 1))))
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=0, atol=1e-13)
    gy = draw(*expected.shape, seed=2)
    grads = [torch.autograd.grad(z, [x, y], gy, allow_unused=True, materialize_grads=True) for z in (got, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    coarse = run(enter(x, choose((8, 8))), enter(y, choose((8, 8))))
    torch.testing.assert_close(coarse.detach(), expected.detach(), rtol=0, atol=1e-13)
    torch.autograd.grad(coarse, [x, y], gy, allow_unused=True)
