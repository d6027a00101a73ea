"""The C library on views: whatever memory maps, weights and gradients are in, results are those of torch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gradfilter
from gradfilter import ops
from gradfilter.emit import enter
from gradfilter.geometry.axes import Axis
from gradfilter.geometry.convolution import make_geometry
from gradfilter.geometry.tiling import Tiling, count_cells
from gradfilter.geometry.windows import make_windows
from gradfilter.ops import native
from gradfilter.ops.native.affine import ScaledGradient
from gradfilter.ops.native.pooling import can_scale
from gradfilter.ops.norm import finish_norm_gradients, scale_norm_gradient
from gradfilter.tensor import Choices, PatchTensor
from native_cases import STEPS, axes, draw_eighths
from views import compare, places, some, views

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")

quick = settings(deadline=None, max_examples=120)
few = st.integers(1, 3)
channels = st.integers(16, 34)
sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))
sides = st.tuples(st.integers(1, 5), st.integers(1, 5))
seeds = st.integers(0, 99)
acts = st.sampled_from(STEPS)
kinds = st.sampled_from([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64])
"""The dtypes of a map."""


def rows(*others):
    """Draw views of several rows of numbers per channel, each with its dtype; or none of one."""
    kind = st.sampled_from([torch.float32, torch.float32, *others])
    return st.lists(st.none() | st.tuples(views, kind), min_size=3, max_size=3)


def make_rows(drawn, count, seed, most=16):
    """Return the rows that were drawn, of `count` numbers each."""
    numbers = [draw_eighths(count, seed=seed + i, most=most) for i in range(len(drawn))]
    return [None if row is None else row[0](x.to(row[1])) for row, x in zip(drawn, numbers, strict=True)]


class TestPasses:
    @quick
    @given(
        shape=st.tuples(few, st.integers(1, 20), st.integers(1, 9), st.integers(1, 9)),
        patch=sides,
        act=st.sampled_from([*STEPS, ops.HARDSWISH, ops.SILU]),
        kind=kinds,
        maps=some(2),
        beside=rows(torch.float64, torch.bfloat16),
        other_kind=st.none() | kinds,
        out=st.sampled_from(["new", "x"]) | places,
        seed=seeds,
    )
    def test_norm_act(self, shape, patch, act, kind, maps, beside, other_kind, out, seed):
        view, over = maps
        assume(out != "x" or view.expanded is None)
        _, scale, shift = make_rows(beside, shape[1], seed)
        numbers = draw_eighths(*shape, seed=seed + 5, most=32)
        residual = None if other_kind is None else over(draw_eighths(*shape, seed=seed + 6, most=32).to(other_kind))

        def run():
            x = view(numbers.to(kind))
            target = None if out == "new" else x if out == "x" else out(torch.zeros_like(x))
            fused = ops.norm_act(x, scale, shift, act, patch, residual, target)
            assert target is None or fused.y is target
            return fused

        compare(run)

    @quick
    @given(
        shape=st.tuples(few, st.integers(1, 20), st.integers(1, 9), st.integers(1, 9)),
        patch=sides,
        kind=kinds,
        view=views,
        over=views,
        seed=seeds,
    )
    def test_pool_and_unpool(self, shape, patch, kind, view, over, seed):
        x = view(draw_eighths(*shape, seed=seed, most=32).to(kind))
        cells = over(draw_eighths(*shape[:2], *count_cells(shape[2:], patch), seed=seed, most=32).to(kind))
        compare(lambda: (ops.pool_mean(x, patch), ops.pool_sum(x, patch), ops.unpool(cells, patch, shape[2:])))

    @quick
    @given(count=st.integers(1, 9), maps=some(4), has=st.booleans(), seed=seeds)
    def test_fold(self, count, maps, has, seed):
        numbers = [draw_eighths(count, seed=seed + i, most=16) for i in range(4)]
        gamma, beta, mean, var = (view(v) for view, v in zip(maps, (*numbers[:3], numbers[3].abs()), strict=True))
        compare(lambda: ops.fold_norm(gamma if has else None, beta if has else None, mean, var, 1e-3))

    @pytest.mark.parametrize("shift", [-40, -1, 0, 1, 40, 120])
    @pytest.mark.parametrize("target", ["scale", "shift"])
    def test_a_target_that_overlaps_a_row(self, shift, target):
        def run():
            memory = draw_eighths(400, seed=1, most=32)
            x = draw_eighths(1, 6, 4, 5, seed=2, most=32)
            rows = {"scale": None, "shift": None, target: memory[130:136]}
            out = memory[130 + shift : 250 + shift].view(1, 6, 4, 5)
            return ops.norm_act(x, rows["scale"], rows["shift"], ops.RELU, (2, 2), None, out)

        compare(run)

    @pytest.mark.parametrize("shift", [-40, -1, 0, 1, 40, 120])
    @pytest.mark.parametrize("target", ["x", "residual"])
    def test_a_target_that_overlaps_what_is_read(self, shift, target):
        def run():
            memory = draw_eighths(400, seed=1, most=32)
            read, other = memory[130:250].view(1, 6, 4, 5), draw_eighths(1, 6, 4, 5, seed=2, most=32)
            maps = (read, other) if target == "x" else (other, read)
            out = memory[130 + shift : 250 + shift].view(1, 6, 4, 5)
            return ops.norm_act(maps[0], None, None, ops.RELU, (2, 2), maps[1], out)

        compare(run)


class TestConvolutions:
    @quick
    @given(
        kernel=st.sampled_from(["depthwise", "dense", "winograd"]),
        n=few,
        inputs=st.integers(2, 20),
        outputs=channels,
        over=axes(),
        across=axes(),
        patch=sides,
        act=acts,
        maps=some(3),
        beside=rows(torch.float64),
        has_residual=st.booleans(),
        seed=seeds,
    )
    def test_convolve(self, kernel, n, inputs, outputs, over, across, patch, act, maps, beside, has_residual, seed):
        if kernel == "winograd":
            inputs, over, across = 16 + inputs, *((a[0], 3, 1, 1, 1, a[0]) for a in (over, across))
        inputs, group = (outputs, 1) if kernel == "depthwise" else (inputs, inputs)
        assume(group * over[1] * across[1] <= 512)
        _, _, stride, dilation, padding, size = zip(over, across, strict=True)
        x = maps[0](draw_eighths(n, inputs, over[0], across[0], seed=seed, most=8))
        w = maps[1](draw_eighths(outputs, group, over[1], across[1], seed=seed + 9, most=8))
        residual = maps[2](draw_eighths(n, outputs, *size, seed=seed + 8, most=32)) if has_residual else None
        bias, scale, shift = make_rows(beside, outputs, seed)
        bias = None if bias is None else bias if bias.dtype is torch.float32 else bias.float()
        ends = size, scale, shift, act, patch, residual
        groups = outputs if kernel == "depthwise" else 1
        compare(lambda: ops.convolve(x, w, bias, stride, padding, dilation, groups, *ends))

    @quick
    @given(
        n=few,
        inputs=st.integers(2, 20),
        hidden=channels,
        over=axes(),
        across=axes(),
        tiling=st.tuples(sides, sides),
        both=st.tuples(acts, acts),
        maps=some(3),
        beside=st.tuples(rows(), rows()),
        seed=seeds,
    )
    def test_expand(self, n, inputs, hidden, over, across, tiling, both, maps, beside, seed):
        _, _, stride, dilation, padding, size = zip(over, across, strict=True)
        x = maps[0](draw_eighths(n, inputs, over[0], across[0], seed=seed, most=4))
        w = maps[1](4 * draw_eighths(hidden, inputs, 1, 1, seed=seed + 1, most=2))
        taps = maps[2](4 * draw_eighths(hidden, 1, over[1], across[1], seed=seed + 2, most=2))
        (b, scale, shift), (b_too, scale_too, shift_too) = (make_rows(row, hidden, seed, most=4) for row in beside)
        middle = ops.Ending(b, scale, shift, both[0], tiling[0])
        end = ops.Ending(b_too, scale_too, shift_too, both[1], tiling[1])
        compare(lambda: ops.expand(x, w, middle, taps, stride, padding, dilation, size, end))


axis = st.builds(
    Axis,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    before=st.integers(0, 2),
    in_size=st.integers(1, 12),
    out_size=st.integers(1, 12),
    in_patch=st.integers(1, 4),
    out_patch=st.integers(1, 4),
)
same = st.builds(lambda size, patch: Axis(3, 1, 1, 1, size, size, patch, patch), st.integers(2, 20), st.integers(1, 4))
single = st.builds(lambda size, patch: Axis(1, 1, 1, 0, size, size, patch, patch), st.integers(2, 12), st.integers(1, 4))
WAYS = {"pairs": axis, "tiles": same, "single": single}
"""The library's ways of a coarse twin: pairs of cells for depthwise kernels, tiles for 3x3 ones, products where outputs read
one cell each."""


class TestGradients:
    @pytest.mark.parametrize("way", WAYS)
    @quick
    @given(
        data=st.data(),
        lumped=st.booleans(),
        n=few,
        channels=st.tuples(st.sampled_from([16, 16, 32, 20]), st.sampled_from([16, 48])),
        maps=some(3),
        kind=st.sampled_from([torch.float32, torch.float32, torch.float32, torch.float64]),
        need=st.tuples(st.booleans(), st.booleans()),
        seed=seeds,
    )
    def test_of_a_coarse_twin(self, way, data, lumped, n, channels, maps, kind, need, seed):
        over, across = data.draw(st.tuples(WAYS[way], WAYS[way]))
        co, ci = (channels[0], 1) if way == "pairs" else channels
        geometry = make_geometry(over, across, co if way == "pairs" else 1, lumped)
        g = maps[0](draw_eighths(n, co, *geometry.out_cells, seed=seed, most=16).to(kind))
        w = maps[2](draw_eighths(co, ci, over.kernel, across.kernel, seed=seed + 1, most=16).to(kind))
        cells = geometry.out_cells if geometry.is_single_tap else geometry.in_cells
        x = draw_eighths(n, geometry.groups * ci, *cells, seed=seed + 2, most=16).to(kind)
        kept = maps[1](x) if need[0] else None
        compare(lambda: ops.conv_gradients(g, kept, w, geometry, need_gx=need[1]), 1e-4)

    @quick
    @given(
        shape=st.tuples(few, st.integers(1, 40), st.integers(1, 6), st.integers(1, 6)),
        maps=some(4),
        has_gamma=st.booleans(),
        scales=st.booleans(),
        seed=seeds,
    )
    def test_norm_back(self, shape, maps, has_gamma, scales, seed):
        g = maps[0](draw_eighths(*shape, seed=seed, most=16))
        gamma, mu, var = (draw_eighths(shape[1], seed=seed + i, most=16) for i in range(3))
        gamma, mu, var = (place(v) for place, v in zip(maps[1:], (gamma, mu, var.abs() + 0.125), strict=True))
        norm = ops.FixedNorm(gamma if has_gamma else None, mu, var, 1e-3)
        compare(lambda: scale_norm_gradient(g, norm, scales))

    @quick
    @given(
        shape=st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from([1, 3]), st.sampled_from([1, 3])),
        maps=some(7),
        scaled=st.booleans(),
        need=st.tuples(st.booleans(), st.booleans()),
        seed=seeds,
    )
    def test_norm_end(self, shape, maps, scaled, need, seed):
        numbers = [draw_eighths(shape[0], seed=seed + i, most=16) for i in range(5)]
        mu, var, b = (place(v) for place, v in zip(maps[2:5], (numbers[0], numbers[1].abs() + 0.125, numbers[2]), strict=True))
        scale, total = maps[5](numbers[3].abs() + 0.125), maps[6](numbers[4])
        norm = ops.FixedNorm(None, mu, var, 1e-3)
        back = ScaledGradient(scale, total, torch.ones(1) if scaled else None)
        w = maps[1](draw_eighths(*shape, seed=seed + 5, most=16))
        gw = draw_eighths(*shape, seed=seed + 6, most=16)
        compare(lambda: finish_norm_gradients(maps[0](gw), w, b, norm, back, *need))


def run_rule(call, x, patch, view, seed):
    """Return the result of a rule and the gradient of x, for a view as the gradient of the carrier."""
    x = x.detach().requires_grad_()
    y = call(enter(x, Choices("layer", Tiling(patch=patch))))
    assert isinstance(y, PatchTensor), "the rule did not run: this was an exit"
    g = view(draw_eighths(*y.carrier.shape, seed=seed, most=16))
    return y.detach(), torch.autograd.grad(y.carrier, x, g)[0]


CALLS = {
    "relu": F.relu,
    "leaky": lambda x: F.leaky_relu(x, 0.25),
    "relu6": F.relu6,
    "max pooling": lambda x: F.max_pool2d(x, 3, 2, 1),
    "halves": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
}


class TestRules:
    @quick
    @given(
        name=st.sampled_from([*CALLS]),
        shape=st.tuples(few, channels, st.integers(2, 9), st.integers(2, 9)),
        patch=sides,
        maps=some(2),
        seed=seeds,
    )
    def test_activations_and_max_pooling(self, name, shape, patch, maps, seed):
        x = maps[0](draw_eighths(*shape, seed=seed, most=16))
        compare(lambda: run_rule(CALLS[name], x, patch, maps[1], seed + 1))

    @quick
    @given(n=few, channels=channels, cells=sizes, dtype=st.sampled_from([torch.uint8, torch.int16]), maps=some(2))
    def test_counts_of_winners(self, n, channels, cells, dtype, maps):
        generator = torch.Generator().manual_seed(1)
        g = maps[0](draw_eighths(n, channels, *cells, seed=2, most=16))
        counts = torch.randint(0, 9, (n, *cells, 4, channels), generator=generator).to(dtype)
        winners = maps[1](counts.permute(0, 4, 1, 2, 3))
        size = 2 * cells[0], 2 * cells[1]
        windows = make_windows((size[0] + 1, size[1] + 1), size, (2, 2), (2, 2), (2, 2), (1, 1), (0, 0), (1, 1))
        assume(windows.reach == (2, 2))
        compare(lambda: ops.max_route(g, winners, windows))

    @quick
    @given(shape=st.tuples(few, channels, st.integers(1, 6), st.integers(1, 6)), maps=some(2))
    def test_counts_of_pixels(self, shape, maps):
        g = maps[0](draw_eighths(*shape, seed=1, most=16))
        count = maps[1](torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(2), dtype=torch.int16))
        if can_scale(g, count):
            got = ops.scale_by_counts(g, count, (0.0, 1.0), (2 * shape[2], 2 * shape[3]), (2, 2))
            torch.testing.assert_close(got, g * count / 4)


def test_other_tensors_give_what_dense_ones_do():
    x = draw_eighths(2, 6, 8, 10, seed=0, most=64)
    strange = {
        "double": x.double(),
        "strided": x[:, ::2],
        "every other pixel": x[:, :, ::2, ::2],
        "transposed": x.transpose(2, 3),
        "a subclass": torch.nn.Parameter(x),
        "negated": torch._neg_view(x),
    }
    for name, tensor in strange.items():
        dense = tensor.detach().float().clone(memory_format=torch.contiguous_format)
        assert native.can_run(dense)
        assert not native.can_run(tensor), name
        got, expected = (ops.norm_act(t, None, None, ops.RELU6, (2, 2)) for t in (tensor, dense))
        for g, e in zip(got, expected, strict=True):
            assert g is not None
            assert e is not None
            torch.testing.assert_close(g.to(e.dtype), e, rtol=0, atol=0)
    assert not native.can_run(x[:0])
    assert ops.norm_act(x[:0], None, None, ops.RELU6, (2, 2)).y.shape == (0, 6, 8, 10)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_a_batch_norm_with_a_negated_view(name):
    def run():
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(24)
        model = torch.nn.Sequential(torch.nn.Conv2d(24, 24, 3, padding=1), norm, torch.nn.ReLU(), torch.nn.Conv2d(24, 24, 1))
        value = torch.rand(24) + 0.5
        value = torch._neg_view(-value)
        setattr(norm, name, torch.nn.Parameter(value) if name in ("weight", "bias") else value)
        assert getattr(norm, name).is_neg()
        gradfilter.apply_(model.eval(), gradfilter.Plan.all(gradfilter.Backward(patch=2)))
        x = torch.rand(2, 24, 9, 9).contiguous(memory_format=torch.channels_last)
        y = model(x)
        y.square().sum().backward()
        return y.detach(), [p.grad for p in model.parameters()]

    compare(run, 1e-4)
