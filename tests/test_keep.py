"""Keeps give the gradients they promise: exact where all is held, within their bounds elsewhere."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import gradfilter as gf
from cases import draw, seeded
from gradfilter.keep import KEEPS as NAMES
from gradfilter.keep import Keep, State, Tucker
from gradfilter.keep.tucker import find_rank
from gradfilter.rules import compressed
from keep_cases import EXACT, KEEPS, LAYERS, InFactors, Product, assert_same, differentiate, differentiate_planned, restore

COARSE = [{"patch": 2}, {"patch": 4}, {"grid": 3}, {"patch": 2, "kernel": "lumped"}]


def test_every_keep_has_a_row():
    assert {case.keep.name for case in KEEPS} == set(NAMES)


# Exact where all is held


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_at_patch_1_exact_keeps_are_torch_and_every_keep_has_its_input_and_bias_gradient(layer):
    x = layer.make_input()
    want = differentiate(layer.make_network(), x)
    for case in KEEPS:
        got = differentiate_planned(layer, x, patch=1, keep=case.keep)
        assert_same(got, want, None if case.exact else ("x", "layer.bias"))


@pytest.mark.parametrize("backward", COARSE, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_at_any_patch_exact_keeps_are_full(layer, backward):
    x = layer.make_input()
    want = differentiate_planned(layer, x, **backward)
    for case in EXACT:
        assert_same(differentiate_planned(layer, x, **backward, keep=case.keep), want)


@pytest.mark.parametrize("backward", [{"patch": 1}, *COARSE], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_full_factors_are_full(layer, backward):
    """The algebra from core and factors, forced by square factors of every mode."""
    x = layer.make_input()
    keep = InFactors((999,) * 5)
    assert_same(differentiate_planned(layer, x, **backward, keep=keep), differentiate_planned(layer, x, **backward))


RANKS = [(1, 2, 3, 2), (1, 0, 0, 0), (0, 2, 0, 0), (0, 0, 3, 2), (1, 0, 0, 2), (1, 2, 0, 0)]


@pytest.mark.parametrize("backward", [{"patch": 1}, {"patch": 4}], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_truncated_factors_are_the_tensor_they_make(layer, backward, monkeypatch):
    """Whichever modes have a factor, both ways give the weight gradient that the tensor rebuilt gives."""
    x = layer.make_input(2, (9, 6))
    for ranks in RANKS:
        want = differentiate_planned(layer, x, **backward, keep=InFactors((0, *ranks), rebuilt=True))
        for products in (0, math.inf):  # contract all at once, or convolve
            monkeypatch.setattr(compressed, "find_order", lambda *_, products=products: (products, None))
            assert_same(differentiate_planned(layer, x, **backward, keep=InFactors((0, *ranks))), want)


def test_truncated_factors_change_the_gradient():
    """The comparisons above could have failed."""
    layer = LAYERS[0]
    x = layer.make_input()
    exact, other = (differentiate_planned(layer, x, patch=1, keep=keep) for keep in (gf.Full(), InFactors((1, 2, 3, 2))))
    assert (exact["layer.weight"] - other["layer.weight"]).norm() > 0.1 * exact["layer.weight"].norm()


@pytest.mark.parametrize("keep", [gf.HOSVD(1), gf.SVD(1), gf.Subspace(energy=1), gf.Fixed(energy=1)], ids=str)
def test_all_the_energy_keeps_what_rounding_would_drop(keep):
    """One huge and many tiny singular values: in float32 the first alone sums up to the total."""
    x = torch.full((6, 5, 4, 4), 1e4) + 1e-2 * draw(6, 5, 4, 4).float()
    assert torch.equal(restore(keep, x), x)


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=20), energy=st.floats(0.01, 1))
@example(values=[1.0, *[1e-12] * 9], energy=1.0)
@example(values=[0.0, 0.0], energy=0.5)
def test_find_rank_is_the_smallest_that_finds_the_energy(values, energy):
    energies = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    rank, total = find_rank(energies, energy), float(energies.sum())
    assert 1 <= rank <= len(energies)
    if energy == 1:
        assert rank == len(energies)
    else:
        assert float(energies[:rank].sum()) >= energy * total * (1 - 1e-12)
        assert rank == 1 or float(energies[: rank - 1].sum()) < energy * total * (1 + 1e-12)


# Bounds


@pytest.mark.parametrize("case", [case for case in KEEPS if case.lost], ids=str)
@settings(deadline=None, max_examples=40)
@given(
    shape=st.one_of(*(st.tuples(*[st.integers(1, 6)] * n) for n in (2, 3, 4))),
    seed=st.integers(0, 99),
    decay=st.floats(0, 3),
    offset=st.floats(-3, 3),
)
def test_what_is_lost_is_within_its_bound(case, shape, seed, decay, offset):
    x = draw(*shape, seed=seed) + offset
    for axis, n in enumerate(shape):  # spectra that fall
        scale = torch.arange(1, n + 1, dtype=x.dtype) ** -decay
        x = x * scale.reshape(-1, *[1] * (len(shape) - 1 - axis))
    error = float((restore(case.keep, x) - x).square().sum())
    assert error <= case.lost(x) * (1 + 1e-9) + 1e-20


ZERO_PADDED = [
    layer
    for layer in LAYERS
    if isinstance(conv := layer.make_network().layer, nn.Conv2d | nn.ConvTranspose2d) and conv.padding_mode == "zeros"
]


@pytest.mark.parametrize("layer", ZERO_PADDED, ids=str)
def test_the_error_of_the_weight_gradient_is_within_its_bound(layer):
    """|gw − ĝw| ≤ √K·|G|·|x − x̂| at patch 1, for K taps."""
    x, network = layer.make_input(), layer.make_network()
    want, g = differentiate(network, x)["layer.weight"], draw(*network(x).shape, seed=5)
    conv = network.layer
    is_pointwise = isinstance(conv, nn.Conv2d) and conv.kernel_size == (1, 1) and conv.padding == (0, 0)
    held = x[:, :, :: conv.stride[0], :: conv.stride[1]] if is_pointwise else x
    for keep in (gf.HOSVD(0.7), gf.SVD(0.7), gf.Subspace(rank=2), gf.Fixed(rank=2)):
        got = differentiate_planned(layer, x, patch=1, keep=keep)["layer.weight"]
        bound = math.sqrt(math.prod(conv.kernel_size)) * g.norm() * (restore(keep, held) - held).norm()
        assert (got - want).norm() <= bound * (1 + 1e-9) + 1e-12


# Eight bits


def spread_of(samples):
    """Return the mean of samples [n, …] and its standard error."""
    return samples.mean(0), samples.std(0) / math.sqrt(len(samples))


@pytest.mark.parametrize("keep", [gf.Int8(), gf.Int8(group=5)], ids=str)
def test_stochastic_rounding_has_no_bias(keep):
    x, state = draw(2, 3, 4, 5) * 3 + 1, State("layer")
    mean, error = spread_of(torch.stack([restore(keep, x, state) for _ in range(1000)]))
    moved = error > 1e-12  # the ends of a range are met exactly
    assert moved.sum() > x.numel() / 2
    z = ((mean - x)[moved] / error[moved]).square()
    # χ² of independent means: within five standard deviations of its expectation.
    assert abs(float(z.sum()) - len(z)) < 5 * math.sqrt(2 * len(z)) * 1.5
    # What has never moved in a thousand draws lies within a hundredth of a step of a level.
    torch.testing.assert_close(mean[~moved], x[~moved], rtol=0, atol=0.01 * float(x.amax() - x.amin()) / 255)


def test_rounding_to_the_nearest_would_be_caught():
    x, state = draw(2, 3, 4, 5) * 3 + 1, State("layer")
    nearest = restore(gf.Int8(stochastic=False), x)
    _, error = spread_of(torch.stack([restore(gf.Int8(), x, state) for _ in range(200)]))
    moved = error > 1e-12
    assert ((nearest - x)[moved] / error[moved]).square().mean() > 10


def test_the_weight_gradient_of_stochastic_rounding_has_no_bias():
    layer = LAYERS[0]
    x = layer.make_input(2, (6, 5))
    want = differentiate(layer.make_network(), x)["layer.weight"]
    network = gf.apply_(layer.make_network(), gf.Plan.all(gf.Backward(patch=1, keep=gf.Int8())))
    mean, error = spread_of(torch.stack([differentiate(network, x)["layer.weight"] for _ in range(300)]))
    assert error.min() > 0
    assert ((mean - want) / error).abs().max() < 4.5
    assert 0.8 < float(((mean - want) / error).square().mean()) < 1.25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
def test_eight_bits_are_off_by_less_than_a_step(dtype, stochastic, scale):
    x = (draw(4, 3, 5, 5) * scale).to(dtype)
    if not x.isfinite().all():
        pytest.skip("the numbers do not fit the precision")
    got = restore(gf.Int8(stochastic=stochastic), x)
    assert got.dtype == dtype
    steps = (x.double().amax((0, 2, 3)) - x.double().amin((0, 2, 3)))[:, None, None] / 255
    slack = 4 * torch.finfo(dtype).eps * x.double().abs().max() + torch.finfo(dtype).tiny
    assert ((got.double() - x.double()).abs() <= steps * (1 if stochastic else 0.5) + slack).all()


def test_constant_channels_are_exact_in_eight_bits():
    x = torch.tensor([0.1, -7e5, 3e-9])[None, :, None, None].expand(2, 3, 4, 4)
    for keep in (gf.Int8(), gf.Int8(stochastic=False), gf.Int8(group=16)):
        assert torch.equal(restore(keep, x), x)


def test_one_channel_of_huge_numbers_does_not_cost_the_others_their_bits():
    x = draw(4, 3, 5, 5)
    x[:, 1] *= 1e12
    error = (restore(gf.Int8(stochastic=False), x) - x).abs().amax((0, 2, 3))
    assert error[0] < 0.02
    assert error[2] < 0.02
    assert error[1] > 1e6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("case", KEEPS, ids=str)
def test_what_is_no_number_is_not_hidden(case, value):
    layer = LAYERS[0]
    x = layer.make_input()
    x[1, 2, 3, 4] = value
    gradients = differentiate_planned(layer, x, patch=1, keep=case.keep)
    assert not gradients["layer.weight"][:, 2].isfinite().all()
    assert gradients["layer.bias"].isfinite().all()


@pytest.mark.parametrize("scale", [1e25, 1e-25, 0.0])
@pytest.mark.parametrize("case", [case for case in KEEPS if case.lost], ids=str)
def test_huge_and_tiny_numbers_are_held_as_well_as_others(case, scale):
    """Their squares are no numbers of float32."""
    x, state = draw(4, 3, 5, 6).float() * scale, State("layer")
    got = restore(case.keep, x, state)
    error = ((got.double() - x.double()) / (scale or 1)).square().sum()
    assert error <= case.lost(x.double() / (scale or 1)) * (1 + 1e-4) + 1e-10
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())


@pytest.mark.parametrize("case", KEEPS, ids=str)
def test_one_batch_of_huge_numbers_leaves_no_trace(case):
    state = State("layer")
    for scale in (1, 1e30, 1):
        got = restore(case.keep, draw(4, 3, 5, 6).float() * scale, state)
    assert got.isfinite().all()


@pytest.mark.parametrize("case", KEEPS, ids=str)
def test_an_empty_batch_has_a_gradient_of_zero(case):
    layer = LAYERS[0]
    gradients = differentiate_planned(layer, layer.make_input(0), patch=1, keep=case.keep)
    assert gradients["layer.weight"].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", KEEPS, ids=str)
def test_the_precision_of_the_input_comes_back(case, dtype):
    x = (draw(5, 6, 7, 8) * 30 + 60).to(dtype)
    kept = case.keep.compress(x, State("layer"))
    opened = kept.open(kept.tensors)
    got = opened.expand().core if isinstance(opened, Tucker) else opened
    assert got.dtype == dtype
    if case.lost:
        slack = 40 * torch.finfo(dtype).eps ** 2 * float(x.double().square().sum())
        assert (got.double() - x.double()).square().sum() <= case.lost(x.double()) * 1.01 + slack
    if case.keep.name == "subspace" and not case.exact:
        assert isinstance(opened, Tucker), "numbers of which the sum is above what half precision holds"


def test_bfloat16_is_off_by_the_eighth_bit_at_most():
    x = torch.randn(100_000, generator=seeded()) * torch.logspace(-30, 30, 100_000)
    error = ((restore(gf.BFloat16(), x.reshape(10, -1)).reshape(-1) - x) / x).abs().max()
    assert 2**-9 < error <= 2**-8


@dataclass(frozen=True)
class Recorded(gf.Full):
    """For tests: hold everything, and note which axis is said to be the channels."""

    seen: list[int] = field(default_factory=list, compare=False)

    def compress(self, x, state, channels=1):
        self.seen.append(channels)
        return super().compress(x, state, channels)


@pytest.mark.parametrize("labels", ["nc", "ab", "zy", "kq", "BC", "xe", "tu", "rs"])
def test_the_channels_of_an_einsum_are_the_last_axis_in_common(labels):
    """Whatever the labels are: sets of letters have another order in each process."""
    n, c = labels
    gate = Product((3, 6), lambda x, w: torch.einsum(f"{n}{c}hw,{n}{c}->{n}{c}hw", x, w)).double()
    keep = Recorded()
    differentiate(gf.apply_(gate, gf.Plan.all(gf.Backward(patch=1, keep=keep))), draw(3, 4, 5, 5))
    assert keep.seen == [1, 1]


def test_a_keep_without_its_own_name_is_not_registered():
    assert Keep not in NAMES.values()
    assert InFactors not in NAMES.values()
