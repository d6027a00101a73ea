"""Activations at their kinks, at NaN and at infinity: value and slope are torch's, in the library and without it.

torch contradicts itself in three places, and then it is said here what we take:

- hardtanh and ReLU6 at NaN: slope 1 in its scalar code (the last few numbers of a row), 0 in its vectors. We take 1.
- hardswish, ELU, CELU and SELU at NaN: slope 1 in its scalar code, NaN in its vectors. At patch 1 we have what torch gives at
  that place; the mean slope of a patch is NaN, for no NaN in a map shall end in a finite gradient.
- hardtanh in place, in half precision, with a bound that is no number of it: torch finds the piece in the rounded result, on
  which pixels beyond the bound have slope 1. We take the slope that it has out of place, 0.
"""

import copy
import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfilter as gf
import gradfilter.rules
import oracles
from gradfilter import deferred, ops
from gradfilter.bench.setup import shake_
from gradfilter.emit import enter
from gradfilter.geometry.tiling import Tiling
from gradfilter.ops import native
from gradfilter.ops.native.conv import run_kernel
from gradfilter.tensor import Choices, PatchTensor

ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x, inplace=False: F.hardtanh(x, -0.7, 0.3, inplace),
    "hardtanh_without_top": lambda x, inplace=False: F.hardtanh(x, -0.5, math.inf, inplace),
    "hardtanh_without_bottom": lambda x, inplace=False: F.hardtanh(x, -math.inf, 3.0, inplace),
    "leaky_relu": lambda x, inplace=False: F.leaky_relu(x, 0.25, inplace),
    "leaky_relu_above_1": lambda x, inplace=False: F.leaky_relu(x, 2.0, inplace),
    "leaky_relu_0": lambda x, inplace=False: F.leaky_relu(x, 0.0, inplace),
    "rrelu": lambda x, inplace=False: F.rrelu(x, 0.1, 0.3, False, inplace),
    "threshold": lambda x, inplace=False: F.threshold(x, 0.5, -2.0, inplace),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "elu": lambda x, inplace=False: F.elu(x, 1.0, inplace),
    "celu": lambda x, inplace=False: F.celu(x, 1.0, inplace),
    "selu": F.selu,
    "mish": F.mish,
    "gelu": lambda x, inplace=False: F.gelu(x),
    "softplus": lambda x, inplace=False: F.softplus(x),
    "softshrink": lambda x, inplace=False: F.softshrink(x),
    "hardshrink": lambda x, inplace=False: F.hardshrink(x),
    "clamp": lambda x, inplace=False: x.clamp_(-0.7, 6) if inplace else x.clamp(-0.7, 6),
    "clamp_min": lambda x, inplace=False: x.clamp_min(0),
    "clamp_max": lambda x, inplace=False: x.clamp_max(3),
    "maximum": lambda x, inplace=False: torch.maximum(x, torch.zeros((), dtype=x.dtype)),
}
STEEP_AT_NAN = ("relu6", "hardtanh", "hardtanh_without_bottom")
NAN_AT_NAN = ("hardswish", "elu", "celu", "selu", "hardtanh_without_top")
"""Those of which torch has two slopes at NaN. The last one runs in torch, whose slope at NaN is 0 or 1."""
INPLACE = {name for name in ACTIVATIONS if name not in ("gelu", "softplus", "softshrink", "hardshrink", "maximum")} - {
    "clamp_min",
    "clamp_max",
}
KINKS = (0.0, -0.0, 6.0, 3.0, -3.0, 0.5, -0.5, 0.3, -0.7, 1.0, -1.0, 20.0)
LAYOUTS = (torch.contiguous_format, torch.channels_last)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@contextmanager
def run_in(path):
    """Run in the library, in torch, or in the library with nothing that waits."""
    if path == "torch":
        with native.off():
            yield
    elif path == "at once":
        with deferred.at_once():
            yield
    else:
        yield


PATHS = ("library", "torch", "at once")


def find_points(dtype, *extra):
    """Return the kinks, their neighbours on both sides, and the numbers in `extra`."""
    kinks = torch.tensor(KINKS, dtype=torch.float64).to(dtype)
    wide = torch.tensor(math.inf, dtype=dtype)
    above, below = torch.nextafter(kinks, wide), torch.nextafter(kinks, -wide)
    return torch.cat([kinks, above, below, torch.tensor([*extra], dtype=dtype)])


def make_map(dtype, layout, *extra, shape=(2, 20, 9, 11), seed=0):
    """Return a map with all points somewhere, NaN in at most a tenth of its pixels."""
    points, generator = find_points(dtype, *extra), torch.Generator().manual_seed(seed)
    x = points[torch.randint(len(points), shape, generator=generator)]
    return x.contiguous(memory_format=layout)


def find_slope(function, name, x):
    """Return torch's slope out of place, at NaN as it is said above."""
    x = x.clone().requires_grad_()
    slope = torch.autograd.grad(function(x), x, torch.ones_like(x))[0]
    if name in STEEP_AT_NAN:
        slope = slope.masked_fill(x.isnan(), 1)
    return slope


def close(got, want, dtype):
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


EXTRA = {"finite": (), "infinite": (math.inf, -math.inf), "nan": (math.nan, math.nan)}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
class TestActivation:
    @pytest.mark.parametrize("patch", [(1, 1), (2, 3), (1, 2)], ids=str)
    def test_value_and_slope(self, name, dtype, layout, path, patch):
        function = ACTIVATIONS[name]
        for extra in EXTRA.values():
            x = make_map(dtype, layout, *extra)
            expected, slope = function(x), find_slope(function, name, x)
            doubtful = x.isnan() if name in NAN_AT_NAN else torch.zeros_like(x, dtype=torch.bool)
            if patch != (1, 1):
                doubtful = oracles.pool(doubtful.double(), patch, "sum") > 0
                slope = oracles.pool(slope.double(), patch, "mean").to(dtype)
            for inplace in (False, True) if name in INPLACE else (False,):
                y, given, gx = self.run(function, x, patch, path, inplace)
                exact = name != "silu" or patch == (1, 1) or path == "torch" or dtype is torch.float64
                if exact:
                    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
                else:
                    close(y, expected, dtype)
                close(gx[~doubtful], (given * slope)[~doubtful], dtype)
                if patch != (1, 1) and name != "hardtanh_without_top":
                    assert gx[doubtful].isnan().all()

    def run(self, function, x, patch, path, inplace):
        """Return the value, a gradient of it, and what comes back, both at patch resolution."""
        x = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with run_in(path):
            y = function((enter(x, Choices("layer", Tiling(patch=patch), "lift")) * 1.0), inplace)
            assert isinstance(y, PatchTensor), "the rule did not run: this was an exit"
            g = torch.randint(1, 9, y.carrier.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)
            (gx,) = torch.autograd.grad(y.carrier, x, g)
            gx = oracles.pool(gx.double(), patch, "sum").to(x.dtype) if patch != (1, 1) else gx
            return y.detach(), g, gx

    def test_gradients_of_nan_end_where_torch_has_them_end(self, name, dtype, layout, path):
        """On a flat piece torch does not multiply: NaN does not pass. Elsewhere it does."""
        function = ACTIVATIONS[name]
        x = make_map(dtype, layout).requires_grad_()
        with run_in(path):
            y = function(enter(x, Choices("layer", Tiling(patch=(1, 1)), "lift")) * 1.0)
            assert isinstance(y, PatchTensor)
            g = torch.randint(1, 9, y.carrier.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
            g.view(-1)[::3], g.view(-1)[1::3] = math.nan, math.inf
            (got,) = torch.autograd.grad(y.carrier, x, g)
        (want,) = torch.autograd.grad(function(x), x, g)
        close(got, want, dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "channels_last"])
@pytest.mark.parametrize("name", ["relu", "relu6", "hardtanh"])
def test_flat_patches_stop_gradients_of_nan(name, layout, path):
    function, patch = ACTIVATIONS[name], (2, 2)
    x = torch.full((1, 16, 4, 6), -1.0)
    x[..., 2:4] = 0.1
    x = x.contiguous(memory_format=layout).requires_grad_()
    with run_in(path):
        y = function(enter(x, Choices("layer", Tiling(patch=patch), "lift")))
        assert isinstance(y, PatchTensor)
        (gx,) = torch.autograd.grad(y.carrier, x, torch.full(y.carrier.shape, math.nan))
    assert gx[..., 2:4].isnan().all()
    assert (gx[..., :2] == 0).all()
    assert (gx[..., 4:] == 0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extra", EXTRA.values(), ids=EXTRA)
def test_prelu(extra, dtype, path):
    x, w = make_map(dtype, torch.contiguous_format, *extra), torch.full((20,), 0.25, dtype=dtype)
    g = torch.randint(1, 9, x.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    if not extra:
        g.view(-1)[x.view(-1).gt(0).nonzero()[0]] = math.nan  # on the steep piece it does not reach the weight
    results = []
    for patch in ((1, 1), None):
        inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
        if patch is None:
            y = F.prelu(*inputs)
            results.append((y.detach(), *torch.autograd.grad(y, inputs, g)))
            continue
        with run_in(path):
            y = F.prelu(enter(inputs[0], Choices("layer", Tiling(patch=patch), "lift")), inputs[1])
            assert isinstance(y, PatchTensor)
            results.append((y.detach(), *torch.autograd.grad(y.carrier, inputs, g)))
    for got, want in zip(*results, strict=True):
        close(got, want, dtype) if dtype is not torch.bfloat16 else torch.testing.assert_close(
            got, want, rtol=4e-2, atol=1, equal_nan=True
        )


def test_prelu_has_its_slope_below_at_nan_in_a_patch():
    x = torch.tensor([1.0, math.nan, -1.0, 2.0]).view(1, 1, 2, 2).requires_grad_()
    y = F.prelu(enter(x, Choices("layer", Tiling(patch=(2, 2)), "lift")), torch.tensor([0.5]))
    assert isinstance(y, PatchTensor)
    (gx,) = torch.autograd.grad(y.carrier, x, torch.full(y.carrier.shape, 4.0))
    assert gx.sum() == 4 * (1 + 0.5 + 0.5 + 1) / 4


STEPS = (
    ops.RELU,
    ops.RELU6,
    ops.Act(ops.CLAMP, -0.7, 0.3),
    ops.Act(ops.LEAKY, slope=0.25),
    ops.Act(ops.LEAKY, slope=0.0),
)
ACTS = (*STEPS, ops.IDENTITY, ops.HARDSWISH, ops.SILU)
needs_library = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")


def same(got, want, act, dtype=torch.float32):
    """Check that two results agree: to the last bit in counts and, where nothing is added up, in values."""
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if g is not None and g.is_floating_point():
            close(g, w, dtype)
        elif g is not None:
            torch.testing.assert_close(g, w, rtol=0, atol=0)


@needs_library
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("act", ACTS, ids=str)
class TestPasses:
    @pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "channels_last"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_norm_act(self, act, dtype, layout):
        for extra in (*EXTRA.values(), (math.nan, math.inf, -math.inf)):
            for channels in (3, 16, 37):
                x = make_map(dtype, layout, *extra, shape=(2, channels, 9, 11))
                shift = torch.zeros(channels)
                shift[0], shift[-1], shift[1] = math.nan, math.inf, -math.inf
                for numbers in (None, shift):
                    for patch in ((1, 1), (4, 4), (2, 3), (20, 20)):
                        want = ops.norm_act.reference(x, None, numbers, act, patch)
                        got = ops.norm_act(x, None, numbers, act, patch)
                        same(got, want, act, dtype)

    @pytest.mark.parametrize("kernel", ["depthwise", "dense", "pointwise", "winograd"])
    @pytest.mark.parametrize("patch", [(1, 1), (4, 4), (2, 3)], ids=str)
    def test_convolutions(self, act, kernel, patch):
        """A NaN of one pixel reaches the outputs that it does in torch; Winograd's transforms spread it over their tiles."""
        torch.manual_seed(0)
        channels = 48
        x = torch.randint(-16, 17, (2, channels, 13, 14), generator=torch.Generator().manual_seed(0)) / 8
        if kernel != "winograd":
            x[0, 3, 5, 7], x[1, 5, 2, 2], x[1, 40, 12, 13] = math.nan, math.inf, -math.inf
        x = x.contiguous(memory_format=torch.channels_last)
        side = {"depthwise": 3, "dense": 5, "pointwise": 1, "winograd": 3}[kernel]
        w = torch.randint(-8, 9, (channels, 1 if kernel == "depthwise" else channels, side, side)) / 8
        bias = torch.zeros(channels)
        bias[0], bias[17], bias[-1] = math.nan, math.inf, -math.inf
        scale, shift = torch.full((channels,), 0.5), torch.full((channels,), 0.125)
        name, pad = ("dense" if kernel == "pointwise" else kernel), side // 2
        residual = x.nan_to_num(0.5, 0, 0).roll(3).contiguous(memory_format=torch.channels_last)
        for other in (None, residual):
            where, ends = (bias, (1, 1), (pad, pad), (1, 1)), ((13, 14), scale, shift, act, patch, other)
            want = ops.convolve.reference(x, w, *where, channels if kernel == "depthwise" else 1, *ends)
            same(run_kernel(name, x, w, *where, *ends), want, act)

    def test_expand(self, act):
        if act.lo == -0.7:  # of few bits, or sums of what it gives depend on their order
            act = ops.Act(ops.CLAMP, -0.75, 0.25)
        torch.manual_seed(0)
        x = torch.randint(-16, 17, (2, 8, 13, 14), generator=torch.Generator().manual_seed(0)) / 8
        x[0, 3, 5, 7], x[1, 5, 2, 2] = math.nan, math.inf
        x = x.contiguous(memory_format=torch.channels_last)
        w, taps = torch.randint(-8, 9, (48, 8, 1, 1)) / 8, torch.randint(-8, 9, (48, 1, 3, 3)) / 8
        bias = torch.zeros(48)
        bias[0], bias[17], bias[-1] = math.nan, math.inf, -math.inf
        middle = ops.Ending(bias, None, None, act, (4, 4))
        end = ops.Ending(bias.roll(1), None, None, act, (2, 3))
        run = (x, w, middle, taps, (1, 1), (1, 1), (1, 1), (13, 14), end)
        with native.off():
            want = ops.expand(*run)
        got = ops.expand(*run)
        same(got.hidden, want.hidden, act)
        same(got.out, want.out, act)


class ScalarReLU6(torch.autograd.Function):
    """ReLU6 with the slope that torch's scalar code has at NaN."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.relu6(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g.masked_fill((x <= 0) | (x >= 6), 0)


def run_scalar_relu6(x):
    return ScalarReLU6.apply(x)


class Tiny(nn.Module):
    """Convolution, norm, activation, twice, and a last convolution."""

    def __init__(self, function, groups):
        super().__init__()
        self.function = function
        self.first, self.first_norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 16, 1 if groups == 1 else 3, groups=groups), nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 4, 3)

    def forward(self, x):
        x = self.function(self.first_norm(self.first(x)))
        x = self.function(self.second_norm(self.second(x)))
        return self.last(x)


def step(model, x):
    """Return the output and the gradients of a loss through which NaN comes back."""
    model.zero_grad()
    y = model(x)
    y.square().mean((2, 3))[:, :2].sum().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["relu", "relu6", "leaky_relu", "leaky_relu_0", "hardswish", "hardsigmoid", "silu", "elu"])
def test_networks(name, odd, path):
    """At patch 1 all gradients are torch's, in trained layers and behind frozen ones."""
    function = ACTIVATIONS[name]
    for layout in LAYOUTS:
        for groups in (1, 16):
            for inplace in (False, True):
                torch.manual_seed(5)
                model = shake_(Tiny(lambda x, inplace=inplace: function(x, inplace=inplace), groups)).eval()
                x = torch.randn(2, 3, 12, 13).contiguous(memory_format=layout)
                x[1, 0, 3, 4] = odd
                exact = copy.deepcopy(model)
                if name == "relu6":
                    exact.function = run_scalar_relu6  # type: ignore[assignment]
                want = step(exact, x)
                for trained in ("*", "last"):
                    ours = copy.deepcopy(model)
                    gf.apply_(ours, gf.Plan({trained: gf.Backward(patch=1)}))
                    with run_in(path):
                        got = step(ours, x)
                    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4, equal_nan=True)
                    for key, g in got[1].items():
                        if g is None:
                            assert trained == "last"
                            continue
                        torch.testing.assert_close(g, want[1][key], rtol=1e-3, atol=1e-3, equal_nan=True, msg=f"{key} {groups}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("trunk", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    ["relu", "relu6", "hardtanh", "leaky_relu", "leaky_relu_0", "leaky_relu_below_0", "hardtanh_without_top", "hardswish"],
)
def test_frozen_layers(name, trunk, path):
    """A bias of each channel sets what the activation reads there: a kink, NaN, infinity."""
    below = {"leaky_relu_below_0": lambda x, inplace=False: F.leaky_relu(x, -0.5)}
    function = {**ACTIVATIONS, **below}[name]
    model = Tiny(lambda x: function(x), 16).eval()
    with torch.no_grad():
        model.first.weight.zero_()
        nn.init.zeros_(model.first.bias)  # type: ignore[arg-type]
        model.first_norm.eps = 0.0
        points = find_points(torch.bfloat16, math.nan, math.inf, -math.inf).float()
        model.first_norm.bias.copy_(points[torch.arange(-13, 3)])
    x = torch.randn(2, 3, 12, 13).contiguous(memory_format=torch.channels_last)
    seen = []
    model.second.register_forward_pre_hook(lambda m, args: seen.append(args[0] * 1))
    model(x)
    gf.apply_(model, gf.Plan({"last": gf.Backward(patch=2)}, trunk=trunk))
    with run_in(path):
        model(x)
    got, want = seen[1].detach(), seen[0].detach()
    close(got.float(), want, torch.bfloat16 if trunk == "bfloat16" else torch.float32)
    assert got.signbit().equal(want.signbit())
