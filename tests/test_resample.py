"""Rules that change the size of a map or leave it: reductions, resampling, transposed convolutions, group norms."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import gradfilter as gf
import oracles
from cases import draw
from gradfilter.cost import count_saved, measure_saved_bytes, predict_saved_bytes
from gradfilter.emit import enter
from gradfilter.errors import ExitWarning
from gradfilter.geometry.axes import Axis, lift_axis
from gradfilter.rules.resample import interpolate_axis
from gradfilter.tensor import PatchTensor
from helpers_safety import find_unexpected
from test_rules import choose, clamp, kernels, run_or_skip, run_rule, sides, sizes

REDUCTIONS = {
    "sum": lambda x: x.sum((2, 3)),
    "sum_axis": lambda x: torch.sum(x, axis=(-1, 2), keepdim=True),  # pyright: ignore[reportCallIssue]
    "amax": lambda x: x.amax((2, 3)),
    "amax_dim": lambda x: torch.amax(x, dim=(2, 3)),
    "amin": lambda x: x.amin((-2, -1), True),
    "std": lambda x: x.std((2, 3)),
    "std_correction": lambda x: torch.std(x, [3, 2], correction=0, keepdim=True),
    "var": lambda x: torch.var(x, dim=(2, 3), unbiased=False),
    "norm": lambda x: x.norm(dim=(2, 3)),
    "norm_three": lambda x: torch.norm(x, 3, (2, 3), keepdim=True),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 1, (2, 3)),
    "logsumexp": lambda x: x.logsumexp((2, 3)),
    "logsumexp_keepdim": lambda x: torch.logsumexp(x, dim=[-2, -1], keepdim=True),
    "adaptive_max": lambda x: F.adaptive_max_pool2d(x, 1),
    "adaptive_max_pair": lambda x: F.adaptive_max_pool2d(x, output_size=(1, 1)),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("name", REDUCTIONS)
@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides, ties=st.booleans())
def test_a_reduction_leaves_a_region_as_the_projected_jacobian(name, size, patch, ties):
    f = REDUCTIONS[name]
    x = draw(2, 3, *size)
    x = (x.round() if ties else x).requires_grad_()
    y = f(enter(x, choose(patch)))  # an exit would warn, and a warning is an error
    assert type(y) is torch.Tensor
    gy = draw(*y.shape, seed=2)
    (got,) = torch.autograd.grad(y, x, gy)
    leaf = x.detach().requires_grad_()
    exact = f(leaf)
    torch.testing.assert_close(y, exact, rtol=0, atol=0, equal_nan=True)
    (pixels,) = torch.autograd.grad(exact, leaf, gy)
    torch.testing.assert_close(got, oracles.project(pixels, clamp(patch, x)), equal_nan=True)


EXITS = {
    "one_axis": lambda x: x.sum(2),
    "channels": lambda x: x.amax((1, 2)),
    "lp_pool": lambda x: F.lp_pool2d(x, 2, 2),
    "adaptive_max_indices": lambda x: F.adaptive_max_pool2d(x, 1, return_indices=True)[0],
}


@pytest.mark.parametrize("name", EXITS)
def test_other_reductions_are_exits_and_exact(name):
    f = EXITS[name]
    x = draw(2, 3, 7, 6).requires_grad_()
    with pytest.warns(ExitWarning):
        y = f(enter(x, choose((2, 4))))
    gy = draw(*y.shape, seed=2)
    leaf = x.detach().requires_grad_()
    (pixels,) = torch.autograd.grad(f(leaf), leaf, gy)
    torch.testing.assert_close(torch.autograd.grad(y, x, gy)[0], oracles.project(pixels, (2, 4)))


@pytest.mark.parametrize(("f", "numbers"), [(lambda x: x.sum((2, 3)), 0), (lambda x: x.amax((2, 3)), 2 * 3 * 4 * 2)])
def test_a_sum_keeps_nothing_and_a_reduction_one_number_per_cell(f, numbers):
    px = enter(draw(2, 3, 7, 6).requires_grad_(), choose((2, 4)))
    assert count_saved(lambda: f(px)) == 8 * numbers


# Transposed convolutions

small = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(deadline=None, max_examples=300)
@given(
    group=st.integers(1, 3),
    multiple=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=small,
    dilation=small,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    output_padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    size=sizes,
    patch=sides,
    bias=st.booleans(),
    norm=st.booleans(),
    chosen=kernels,
)
def test_any_transposed_conv_is_the_projected_jacobian(
    group, multiple, kernel, stride, dilation, padding, output_padding, size, patch, bias, norm, chosen
):
    """Alone and with the batch norm behind it; the lumped kernel is the lift here."""
    channels = group * multiple
    mu, var = draw(channels, seed=5), draw(channels, seed=6).abs() + 0.5

    def f(x, w, b=None, gamma=None, beta=None):
        y = F.conv_transpose2d(x, w, b, stride, padding, output_padding, group, dilation)
        return y if gamma is None else F.batch_norm(y, mu, var, gamma, beta)

    x, w = draw(2, 2 * group, *size), draw(2 * group, multiple, *kernel, seed=1)
    params = [w, *(draw(channels, seed=s) for s in range(7, 7 + (3 if norm else bias)))]
    expected = run_or_skip(f, x, *params)
    y, gx, gp, g, out_patch = run_rule(f, x, params, patch, kernel=chosen)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    want_gx, want_gp = oracles.coarse_backward(f, x, params, g, clamp(patch, x), out_patch, params_see_projection=True)
    for got, want in zip([gx, *gp], [want_gx, *want_gp], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kernel", "taps", "padding"), [(2, 1, 0), (4, 3, 1)], ids=["unet", "dcgan"])
def test_a_transposed_conv_between_aligned_cells_is_an_ordinary_coarse_convolution(kernel, taps, padding):
    """Cells twice the pixels on a map twice as large: a U-Net's 2×2 kernel has one coarse tap, the mean of its own."""
    lift = lift_axis(Axis(kernel, 2, 1, padding, in_size=8, out_size=16, in_patch=2, out_patch=4, transposed=True))
    assert lift is not None
    assert (lift.stride, len(lift.matrix)) == (1, taps)
    assert lift.matrix.values.sum(0) == pytest.approx([0.5] * kernel)


# Norms


def test_instance_norm_moves_its_statistics_as_torch_does():
    x = draw(3, 4, 5, 6)
    moved = []
    for value in (x, enter(x.clone().requires_grad_(), choose((2, 2)))):
        norm = nn.InstanceNorm2d(4, track_running_stats=True, dtype=torch.float64)
        norm(value)
        moved.append(norm.state_dict())
    assert moved[0].keys() == moved[1].keys()
    for name, statistic in moved[0].items():
        assert torch.equal(statistic, moved[1][name]), name


@pytest.mark.parametrize("norm", [nn.GroupNorm(3, 3), nn.InstanceNorm2d(3)], ids=["group", "instance"])
def test_a_norm_of_single_values_is_refused_in_torchs_words(norm):
    with pytest.raises(ValueError, match="Expected more than 1"):
        norm(enter(torch.ones(1, 3, 1, 1, requires_grad=True), choose((1, 1))))


def test_local_response_norm_ends_a_region_without_a_warning():
    x = draw(2, 3, 7, 6).requires_grad_()
    y = nn.LocalResponseNorm(2)(enter(x, choose((2, 4))))
    assert not isinstance(y, PatchTensor)
    gy = draw(*y.shape, seed=2)
    leaf = x.detach().requires_grad_()
    (pixels,) = torch.autograd.grad(nn.LocalResponseNorm(2)(leaf), leaf, gy)
    torch.testing.assert_close(torch.autograd.grad(y, x, gy)[0], oracles.project(pixels, (2, 4)))


# A whole network


class Hourglass(nn.Module):
    """A network that goes through every rule of this file and leaves through a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.group, self.instance = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.InstanceNorm2d(8, affine=True),
        )
        self.middle, self.up, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8)
        self.mix, self.classify = nn.Conv2d(18, 6, 3), nn.Linear(12, 5)

    def forward(self, x):
        x = F.avg_pool2d(F.relu(self.group(self.stem(x))), 2, ceil_mode=True)
        y = self.norm(self.up(F.relu(self.instance(self.middle(F.adaptive_avg_pool2d(x, (6, 7)))))))
        parts = [F.pixel_unshuffle(F.pixel_shuffle(F.interpolate(y, scale_factor=2.5, mode="bilinear"), 2), 2)]
        parts += [F.interpolate(part, size=(30, 35), mode="bicubic") for part in (x, F.pixel_shuffle(self.middle(x), 2) * 2)]
        z = self.mix(torch.cat(parts, 1))
        return self.classify(torch.cat([z.amax((2, 3)), F.relu(z).logsumexp((2, 3))], 1))


def make_hourglass(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Hourglass().to(dtype)


def test_a_network_of_these_rules_is_exact_at_patch_one():
    net, model = make_hourglass(), gf.apply_(make_hourglass(), gf.Plan.all(gf.Backward(patch=1), batch_norm="train"))
    x = draw(2, 3, 21, 18)
    got, want = model(x), net(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for a, b in zip(
        *(torch.autograd.grad(y.square().sum(), [m.get_parameter(n) for n in names]) for m, y in ((model, got), (net, want))),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not find_unexpected(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", [gf.Backward(patch=1), gf.Backward(patch=(2, 3)), gf.Backward(grid=3)], ids=str)
def test_predicted_saved_bytes_are_the_measured_ones(backward, dtype):
    model = gf.apply_(make_hourglass(dtype), gf.Plan.all(backward))
    x = torch.zeros(2, 3, 21, 18, dtype=dtype)
    interpolate_axis.cache_clear()  # the matrices are made on the way, where only shapes are computed
    assert predict_saved_bytes(model, x) == measure_saved_bytes(model, x)


def test_a_network_of_these_rules_traces():
    model = gf.apply_(make_hourglass(), gf.Plan.all(gf.Backward(patch=(2, 3)), batch_norm="train"))
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def step(x, params):
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = functional_call(model, leaves, (x,)).square().sum()
        return torch.autograd.grad(loss, list(leaves.values()))

    interpolate_axis.cache_clear()
    graph = make_fx(step)(draw(2, 3, 21, 18), params)
    assert not [node for node in graph.graph.nodes if "convolution_backward" in str(node.target)]
    x = draw(2, 3, 21, 18, seed=1)
    for got, want in zip(graph(x, params), step(x, params), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
