"""Every rule against the slow truth: project, apply the exact pixel-resolution Jacobian, project."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cases
import gradfilter.rules  # noqa: F401
import oracles
from cases import CHANNELS, CONVS, FUNCTIONS, draw
from gradfilter.emit import enter, regrid
from gradfilter.errors import InputError, RuleError
from gradfilter.geometry.tiling import Tiling, count_cells
from gradfilter.tensor import RULES, Choices, PatchTensor, rule

sizes = st.tuples(st.integers(1, 17), st.integers(1, 17))
sides = st.tuples(st.integers(1, 6), st.integers(1, 6))
kernels = st.sampled_from(["lift", "lumped"])


def choose(patch, kernel="lift"):
    return Choices("layer", Tiling(patch=patch), kernel)


def run_rule(f, x, params, patch, *, kernel="lift", seed=9):
    """Return the patch gradient of x and the gradients of the params for a random G, and G with its patch."""
    x = x.clone().requires_grad_()
    params = [p.clone().requires_grad_() for p in params]
    y = f(enter(x, choose(patch, kernel)), *params)
    assert isinstance(y, PatchTensor), "the rule did not run: this was an exit"
    g = draw(*y.carrier.shape, seed=seed)
    gx, *gp = torch.autograd.grad(y.carrier, [x, *params], g)
    return y.detach(), oracles.pool(gx, clamp(patch, x), "sum"), gp, g, y.patch


def clamp(patch, x):
    return min(patch[0], x.shape[2]), min(patch[1], x.shape[3])


def run_or_skip(f, *args):
    """Run torch's own function; sizes that torch refuses are not for us either."""
    try:
        y = f(*args)
    except (RuntimeError, ValueError):
        assume(False)
    else:
        assume(y.numel())
        return y


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides, n=st.integers(1, 3))
def test_rule_is_the_projected_jacobian(function, size, patch, n):
    assume(not function.statistics or n * size[0] * size[1] > 1)
    x = draw(n, CHANNELS, *size) + 0.05
    params = [draw(*shape, seed=20 + i) for i, shape in enumerate(function.params)]
    expected = run_or_skip(function.call, x.clone(), *params)
    assume(expected.isfinite().all())
    y, gx, gp, g, out_patch = run_rule(function.call, x, params, patch)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    want_gx, want_gp = oracles.coarse_backward(function.call, x, params, g, clamp(patch, x), out_patch)
    torch.testing.assert_close(gx, want_gx, rtol=1e-9, atol=1e-9)
    for got, want in zip(gp, want_gp, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


small = st.tuples(st.integers(1, 3), st.integers(1, 3))
convs = st.builds(
    lambda group, multiple, **shape: cases.Conv(channels=(2 * group, group * multiple), groups=group, **shape),
    group=st.integers(1, 3),
    multiple=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=small,
    dilation=small,
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)


@settings(deadline=None, max_examples=300)
@given(conv=convs, size=sizes, patch=sides, n=st.integers(1, 2), bias=st.booleans())
def test_any_conv_is_the_projected_jacobian(conv, size, patch, n, bias):
    check_conv(conv, size, patch, n, bias)


@pytest.mark.parametrize("conv", CONVS, ids=str)
@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides, n=st.integers(1, 2), bias=st.booleans())
def test_conv_is_the_projected_jacobian(conv, size, patch, n, bias):
    """Facts §3.2: valid convs, groups, depth multipliers, dilated 5×5, non-square kernels, on which the reference fails."""
    check_conv(conv, size, patch, n, bias)


def check_conv(conv, size, patch, n, bias):
    x, w = draw(n, conv.channels[0], *size), conv.make_weight()
    params = [w, draw(conv.channels[1], seed=3)] if bias else [w]
    expected = run_or_skip(conv, x, *params)
    y, gx, gp, g, out_patch = run_rule(conv, x, params, patch)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    # A 1×1 kernel without padding keeps the pixels it reads: its weight gradient sees the input itself.
    pointwise = conv.kernel == (1, 1) and conv.padding == (0, 0)
    want_gx, want_gp = oracles.coarse_backward(
        conv, x, params, g, clamp(patch, x), out_patch, params_see_projection=not pointwise
    )
    for got, want in zip([gx, *gp], [want_gx, *want_gp], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("conv", CONVS, ids=str)
@settings(deadline=None, max_examples=10)
@given(size=sizes, patch=sides, affine=st.booleans(), bias=st.booleans())
def test_conv_and_batch_norm_are_one_rule(conv, size, patch, affine, bias):
    channels = conv.channels[1]
    mu, var = draw(channels, seed=5), draw(channels, seed=6).abs() + 0.5

    def f(x, w, *rest):
        b, gamma, beta = [*rest[:1], *rest[1:]] if len(rest) == 3 else [None, *rest] if len(rest) == 2 else [None, None, None]
        return F.batch_norm(conv(x, w, b), mu, var, gamma, beta)

    x, w = draw(2, conv.channels[0], *size), conv.make_weight()
    params = [w]
    if affine:
        params += [draw(channels, seed=7)] * bias + [draw(channels, seed=8), draw(channels, seed=9)]
    run_or_skip(f, x, *params)
    _, gx, gp, g, out_patch = run_rule(f, x, params, patch)
    pointwise = conv.kernel == (1, 1) and conv.padding == (0, 0)
    want_gx, want_gp = oracles.coarse_backward(f, x, params, g, clamp(patch, x), out_patch, params_see_projection=not pointwise)
    for got, want in zip([gx, *gp], [want_gx, *want_gp], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(size=sizes, patch=sides, pads=st.tuples(*[st.integers(0, 3)] * 4))
def test_zero_pad_folds_into_the_convolution(size, patch, pads):
    conv = cases.Conv(padding=(0, 1), stride=(2, 1))
    w = conv.make_weight()
    x = draw(2, 4, *size)

    def f(x, w):
        return conv(F.pad(x, pads), w)

    run_or_skip(f, x, w)
    _, gx, gp, g, out_patch = run_rule(f, x, [w], patch)
    want_gx, want_gp = oracles.coarse_backward(f, x, [w], g, clamp(patch, x), out_patch, params_see_projection=True)
    torch.testing.assert_close(gx, want_gx, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gp[0], want_gp[0], rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(size=sizes, patch=sides, other=sides)
def test_regrid_is_the_projected_identity(size, patch, other):
    x = draw(2, 3, *size).requires_grad_()
    px = enter(x, choose(patch))
    py = regrid(px, clamp(other, x), choose(other))
    g = draw(*py.carrier.shape, seed=4)
    (gx,) = torch.autograd.grad(py.carrier, x, g)
    pixels = oracles.spread(g, clamp(other, x), size)
    torch.testing.assert_close(oracles.pool(gx, clamp(patch, x), "sum"), oracles.pool(pixels, clamp(patch, x), "sum"))


@pytest.mark.parametrize("inplace", [False, True])
@settings(deadline=None, max_examples=20)
@given(size=sizes, patch=sides, other=sides)
def test_where_patch_sizes_meet_the_finer_one_holds(inplace, size, patch, other):
    a, b = draw(2, 3, *size).requires_grad_(), draw(2, 3, *size, seed=1).requires_grad_()
    pa, pb = enter(a, choose(patch)) * 1.0, enter(b, choose(other)) * 1.0
    assert isinstance(pa, PatchTensor)
    assert isinstance(pb, PatchTensor)
    finest = min(pa.patch[0], pb.patch[0]), min(pa.patch[1], pb.patch[1])
    y = pa.add_(pb) if inplace else torch.cat([pa, pb], 1)
    assert isinstance(y, PatchTensor)
    assert y.patch == finest
    g = draw(*y.carrier.shape, seed=4)
    ga, gb = torch.autograd.grad(y.carrier, [a, b], g)
    pixels = oracles.spread(g, y.patch, size)
    want = (pixels, pixels) if inplace else (pixels[:, :3], pixels[:, 3:])
    for got, pixel, p in ((ga, want[0], clamp(patch, a)), (gb, want[1], clamp(other, b))):
        torch.testing.assert_close(oracles.pool(got, p, "sum"), oracles.pool(pixel, p, "sum"))


MEANS = {
    "mean": lambda x: x.mean((2, 3)),
    "mean_keepdim": lambda x: torch.mean(x, dim=[-1, -2], keepdim=True),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_pair": lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
    "flatten": lambda x: x.flatten(1),
    "exit": lambda x: torch.logsumexp(x, (2, 3)),
}


@pytest.mark.filterwarnings("ignore::gradfilter.errors.ExitWarning")
@pytest.mark.parametrize("name", MEANS)
@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides)
def test_the_way_out_of_a_region_is_the_projected_jacobian(name, size, patch):
    f = MEANS[name]
    x = draw(2, 3, *size).requires_grad_()
    y = f(enter(x, choose(patch)))
    assert type(y) is torch.Tensor
    gy = draw(*y.shape, seed=2)
    (got,) = torch.autograd.grad(y, x, gy)
    leaf = x.detach().requires_grad_()
    (pixels,) = torch.autograd.grad(f(leaf), leaf, gy)
    torch.testing.assert_close(got, oracles.project(pixels, clamp(patch, x)))


@pytest.mark.parametrize("r", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
def test_lumped_kernel_is_the_papers(r, size):
    x, w = draw(2, 3, *size).requires_grad_(), draw(4, 3, 3, 3, seed=1).requires_grad_()
    y = F.conv2d(enter(x, choose((r, r), "lumped")), w, padding=1)
    gy = draw(*y.shape, seed=2)
    gx, gw = torch.autograd.grad(y, [x, w], gy)
    want_gx, want_gw = oracles.lumped_by_loops(x.detach(), w.detach(), gy, r)
    torch.testing.assert_close(gw, want_gw)
    torch.testing.assert_close(gx, want_gx)


@pytest.mark.parametrize("kernel", ["lift", "lumped"])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_strided_layers_have_the_right_scale(kernel, stride, k):
    """Facts §3.1: the reference is s² too large. A constant gradient and a constant input give exact sums."""
    n = 12 * stride
    x, w = torch.ones(1, 2, n, n, dtype=torch.float64), draw(3, 2, k, k, seed=1)
    patch = (4, 4)
    for tensors in (x, w):
        tensors.requires_grad_()
    y = F.conv2d(enter(x, choose(patch, kernel)), w, stride=stride, padding=k // 2)
    exact = F.conv2d(x, w, stride=stride, padding=k // 2)
    gx, gw = torch.autograd.grad(y, [x, w], torch.ones_like(exact))
    want_gx, want_gw = torch.autograd.grad(exact, [x, w], torch.ones_like(exact))
    # Pixels of the rim see zeros of the padding, which a lumped kernel cannot know.
    rim = 0 if kernel == "lift" else 2 / n * k
    assert float(gw.norm() / want_gw.norm()) == pytest.approx(1, abs=1e-9 + rim)
    assert float(gx.sum() / want_gx.sum()) == pytest.approx(1, abs=1e-9 + 3 * rim)


def test_lift_at_patch_one_is_exact_backprop_and_lumped_is_not():
    """Facts §3.3."""
    x, w = draw(2, 3, 9, 9).requires_grad_(), draw(4, 3, 3, 3, seed=1).requires_grad_()
    gy = draw(2, 4, 9, 9, seed=2)
    exact = torch.autograd.grad(F.conv2d(x, w, padding=1), [x, w], gy)
    for kernel, is_exact in (("lift", True), ("lumped", False)):
        got = torch.autograd.grad(F.conv2d(enter(x, choose((1, 1), kernel)), w, padding=1), [x, w], gy)
        for a, b in zip(got, exact, strict=True):
            assert torch.allclose(a, b, atol=1e-12) == is_exact


def test_a_second_rule_for_a_function_is_refused():
    with pytest.raises(RuleError, match=r"conv2d.*already has"):
        rule(torch.conv2d)(lambda func, args, kwargs: None)
    assert RULES[torch.conv2d].run.__name__ == "conv2d"


def test_relu_keeps_a_bit_a_byte_or_two_per_cell():
    from gradfilter.cost import count_saved

    x = draw(1, 8, 32, 32).requires_grad_()
    for patch, expected in (((1, 1), 32 * 32), ((2, 2), 8 * 16 * 16), ((15, 17), 8 * 3 * 2), ((16, 16), 8 * 2 * 2 * 2)):
        px = enter(x, choose(patch))
        assert count_saved(lambda px=px: F.relu(px)) == expected
        assert count_cells((32, 32), patch) == px.carrier.shape[2:]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: F.conv2d(F.pad(x, (-1, 0, 0, -2)), w, padding=1),
        lambda x, w: F.conv2d(F.pad(F.pad(x, (1, 0, 2, 0)), (0, 3, 0, 1)), w),
    ],
    ids=["crop", "pad_of_pad"],
)
@pytest.mark.parametrize("patch", [(1, 1), (2, 3)])
def test_only_a_plain_zero_pad_folds(f, patch):
    x, w = draw(2, 4, 9, 8), cases.Conv().make_weight()
    _, gx, gp, g, out_patch = run_rule(f, x, [w], patch)
    want_gx, want_gp = oracles.coarse_backward(f, x, [w], g, patch, out_patch, params_see_projection=True)
    if patch == (1, 1):
        torch.testing.assert_close(gp[0], want_gp[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gx, want_gx, rtol=1e-9, atol=1e-9)
    assert float(F.cosine_similarity(gx.flatten(), want_gx.flatten(), 0)) > 0.8


def test_a_pad_does_not_fold_once_the_map_has_changed():
    x, w = draw(2, 4, 9, 8).requires_grad_(), cases.Conv().make_weight().requires_grad_()

    def f(x):
        y = x * 1.5
        padded = F.pad(y, (1, 1, 1, 1))
        y.relu_()
        return F.conv2d(padded, w) + F.conv2d(y, w, padding=1)

    got = f(enter(x, choose((1, 1))))
    gy = draw(*got.shape, seed=3)
    for a, b in zip(torch.autograd.grad(got, [x, w], gy), torch.autograd.grad(f(x), [x, w], gy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_plain_residual_enters_where_it_meets_the_region():
    a, b = draw(2, 3, 7, 8).requires_grad_(), draw(2, 3, 7, 8, seed=1).requires_grad_()
    for y in (enter(a, choose((2, 3))) * 2 + b, b + enter(a, choose((2, 3))) * 2):
        assert isinstance(y, PatchTensor)
        gy = draw(*y.shape, seed=2)
        ga, gb = torch.autograd.grad(y, [a, b], gy)
        torch.testing.assert_close(ga, oracles.project(2 * gy, (2, 3)))
        torch.testing.assert_close(gb, oracles.project(gy, (2, 3)))


def test_the_gradient_of_a_used_activation_is_refused():
    y = enter(draw(1, 3, 6, 6).requires_grad_(), choose((2, 2))) * 2
    z = F.relu(y)
    y.contiguous()
    with pytest.raises(InputError, match="patch resolution"):
        torch.autograd.grad(z.mean((2, 3)).sum(), y)
    with pytest.raises(InputError, match="patch resolution"):
        y.retain_grad()


def test_half_precision_counts_large_patches():
    x = torch.ones(1, 1, 300, 300, dtype=torch.bfloat16, requires_grad=True)
    y = F.relu(enter(x, choose((290, 290))))
    (gx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(gx, torch.ones_like(gx))


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm], ids=["batch", "instance"])
@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("momentum", [0.1, 1 / 3, 1.0])
def test_running_statistics_move_as_torchs_do(norm, held, dtype, precision, momentum):
    x = draw(3, CHANNELS, 7, 6).to(dtype)
    results = []
    for image in (x.clone(), enter(x.clone().requires_grad_(), choose((2, 2)))):
        mu, var = draw(CHANNELS, seed=5).to(precision), draw(CHANNELS, seed=6).abs().to(precision)
        y = norm(image, *((mu, var) if held else (None, None)), None, None, True, momentum)
        results.append([y.detach(), mu, var])
    for theirs, ours in zip(*results, strict=True):
        rtol = 2e-2 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)


def test_one_running_statistic_without_the_other_is_refused_as_by_torch():
    for image in (draw(3, CHANNELS, 7, 6), enter(draw(3, CHANNELS, 7, 6).requires_grad_(), choose((2, 2)))):
        with pytest.raises(ValueError, match="both be None or neither"):
            F.batch_norm(image, draw(CHANNELS), None, training=True)
