"""Random chains of layers: what the C library makes of them is what torch makes of them, but for rounding."""

import os
from dataclasses import replace

import pytest
import torch

from chain_judge import TOLERANCE, Judge, make_weights, native
from gradfilter import ops
from layer_chains import Act, Chain, Conv, Pad, Pool, Residual, draw_chain

pytestmark = pytest.mark.skipif(not native.is_on(), reason="the C library was not built, or is switched off")

CHAINS = int(os.environ.get("GRADFILTER_CHAINS", "160"))
"""How many chains: a second of one core is enough for about 20."""
EVERY = 20
"""Chains in one test."""


@pytest.fixture
def some_level(start):
    """Run a test at one of the levels of the instruction set that this CPU has, the next one at the next."""
    library = native.load()
    assert library is not None
    library.gf_set_level(start // EVERY % (library.gf_best_level() + 1))
    yield
    library.gf_set_level(-1)


@pytest.mark.usefixtures("some_level")
@pytest.mark.parametrize("start", range(0, CHAINS, EVERY))
def test_chains_away_from_kinks(start):
    """Away from kinks there is nothing but rounding, so the tolerance is one for rounding alone.

    The sums of the library are in another order than torch's, and those of Winograd's convolution of other numbers. Both are
    held against double precision, by the sum of absolute values: relative to a gradient itself, which may cancel, rounding
    has no bound. `TOLERANCE` says how much that is; a pixel on the wrong side of a kink, or a count that is off by one, is
    far more (`test_one_count_is_seen`).
    """
    for seed in range(start, start + EVERY):
        judge = Judge(draw_chain(seed), away=True)
        for name, run in (("library", judge.run_library()), ("torch", judge.run_torch())):
            assert judge.agrees(run), f"{name}: {judge.error(run)} in {judge.chain}"


def make_chain(seed: int, *steps, **options) -> Chain:
    """Return a chain of 16 channels with a pixel at a kink."""
    return Chain(steps, seed=seed, planted=1, **options)


WINOGRAD = Conv(16, (3, 3), padding=(1, 1), bias=True, norm=False)
DEPTHWISE = Conv(48, (3, 3), padding=(1, 1), groups="depthwise")
KINKED = {
    "relu": (WINOGRAD, Act("relu")),
    "relu6": (Conv(16), Act("relu6", inplace=True), Conv(24)),
    "leaky_relu": (WINOGRAD, Act("leaky_relu", bounds=(0.01,)), Conv(16, (3, 3), padding=(1, 1))),
    "hardtanh": (Conv(32, (5, 5), (2, 2), (2, 2)), Act("hardtanh", bounds=(-1.0, 1.0)), Conv(16)),
    "hardswish": (WINOGRAD, Act("hardswish"), Conv(16)),
    "mobile": (Residual((Conv(48), Act("relu6"), DEPTHWISE, Act("relu6"), Conv(16))),),
    "pad": (Conv(48), Act("relu"), Pad((1, 1, 1, 1)), replace(DEPTHWISE, padding=(0, 0)), Act("relu"), Conv(16)),
    "pool": (WINOGRAD, Act("relu"), Pool("max", (3, 3), (2, 2), (1, 1)), Conv(16)),
}


@pytest.mark.parametrize("name", KINKED)
def test_at_kinks_each_run_takes_one_side(name):
    """A bias puts a pixel at a kink, but for its rounding: either side is right, and then all else is as exact as ever."""
    seen = 0
    for seed in range(6):
        judge = Judge(make_chain(seed, *KINKED[name], size=(9, 10)))
        seen += bool(judge.close)
        for run in (judge.run_library(), judge.run_torch()):
            error, pixels = judge.find_sides(run)
            assert error <= TOLERANCE, f"{error}, {pixels} in {judge.chain}"
    assert seen  # without this, the test could pass for want of kinks


@pytest.mark.parametrize("seed", [20085, 20087, 20376, 20476])
def test_two_pixels_at_kinks(seed):
    """A step at one kink moves what is behind it by rounding, so that the side of another depends on it (20087).

    Where a channel reads nothing but zeros, all its pixels are the same number, and all are on one side (20476).
    """
    judge = Judge(replace(draw_chain(seed), planted=2))
    for run in (judge.run_library(), judge.run_torch()):
        error, pixels = judge.find_sides(run)
        assert error <= TOLERANCE, f"{error}, {pixels} in {judge.chain}"


@pytest.mark.parametrize("seed", range(4))
def test_the_step_at_a_kink_is_one_pixel(seed):
    """What is between the two sides of a ReLU: the count of steep pixels of one patch, by one, and nothing else.

    The gradient of a patch is multiplied with its share of steep pixels. One more of them adds what this one pixel passes on.
    """
    judge = Judge(make_chain(seed, WINOGRAD, Act("relu"), size=(6, 8), backward=(("patch", 2),)))
    (pixel,) = judge.close
    image, channel = pixel.at[:2]
    _, sides = judge.find_sides(judge.truth)
    assert sides == []
    flat, steep = judge.run_other_sides(judge.close)
    step = (steep["parts.0.conv.bias"] - flat["parts.0.conv.bias"]).detach()
    weights = make_weights(judge.truth["y"]) @ judge.exact.head.weight.detach()  # the gradient of the means
    want = torch.zeros_like(step)
    want[channel] = weights[image, channel] / (6 * 8)  # of a mean over 48 pixels, that of one
    torch.testing.assert_close(step, want, rtol=1e-9, atol=1e-12)
    for run in (judge.run_library(), judge.run_torch()):
        biases = run["parts.0.conv.bias"].double()
        nearest = min((flat, steep), key=lambda truth: (biases - truth["parts.0.conv.bias"]).abs().max())
        torch.testing.assert_close(biases, nearest["parts.0.conv.bias"], rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("size", [(8, 8), (13, 14)])
def test_one_count_is_seen(size, monkeypatch):
    """A defect by which one pixel of one patch is counted on the wrong side, away from kinks, is beyond the tolerance."""
    steps = Conv(32, (3, 3), padding=(1, 1)), Act("relu"), Conv(16, (3, 3), padding=(1, 1)), Act("silu")
    judge = Judge(Chain(steps, size=size, batch=3), away=True)
    assert judge.agrees(judge.run_library())
    scale, wrong = ops.scale_by_counts.kernel, []
    assert scale is not None

    def miscount(g, count, *rest):
        usual = (g.abs() - g.abs().median()).abs()  # a patch with a gradient like that of others
        at = usual == usual.min()
        wrong.append(int(at.sum()))
        return scale(g, torch.where(at, (count.int() - 1).abs(), count).to(count), *rest)

    monkeypatch.setattr(ops.scale_by_counts, "kernel", miscount)
    assert not judge.agrees(judge.run_library())
    assert wrong == [1]
