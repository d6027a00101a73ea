"""The gradient-filtering paper's analysis, against sums written out."""

import math

import pytest
import torch

from gradfilter.spectrum import dct, find_dc_ratio, find_dc_share, find_paper_snr, find_patch_snr, find_snr, make_dct


def slow_dct(x):
    h, w = x.shape
    out = torch.zeros(h, w, dtype=torch.float64)
    for k in range(h):
        for m in range(w):
            total = 0.0
            for i in range(h):
                for j in range(w):
                    total += (
                        float(x[i, j])
                        * math.cos(math.pi * (2 * i + 1) * k / 2 / h)
                        * math.cos(math.pi * (2 * j + 1) * m / 2 / w)
                    )
            out[k, m] = total * math.sqrt((2 if k else 1) / h * (2 if m else 1) / w)
    return out


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (1, 4), (1, 1)])
def test_dct_is_its_sum_and_keeps_energy(shape):
    x = draw(*shape)
    torch.testing.assert_close(dct(x), slow_dct(x))
    assert float(dct(x).square().sum()) == pytest.approx(float(x.square().sum()))


@pytest.mark.parametrize("shape", [(4, 2, 3, 3), (3, 1, 5, 5), (2, 3, 1, 7)])
def test_dc_ratio_is_dc_against_the_largest_other_energy(shape):
    weight = draw(*shape) + 0.5
    energies = sum(slow_dct(kernel) ** 2 for kernel in weight.flatten(0, 1))
    assert isinstance(energies, torch.Tensor)
    first, *others = energies.flatten().tolist()
    assert find_dc_ratio(weight) == pytest.approx(first / max(others))
    met = [bool((e[0] >= e[1:]).all()) for k in weight.flatten(0, 1) for e in [(slow_dct(k) ** 2).flatten()]]
    assert find_dc_share(weight) == pytest.approx(sum(met) / len(met))


def test_dc_ratio_at_its_ends():
    assert find_dc_ratio(torch.tensor([[[[1.0, -1.0]]]])) == pytest.approx(0)
    assert math.isnan(find_dc_ratio(torch.ones(4, 4, 1, 1)))
    assert math.isnan(find_dc_share(torch.ones(4, 4, 1, 1)))
    assert math.isnan(find_dc_ratio(torch.zeros(4, 4, 3, 3)))


@pytest.mark.parametrize("r", [1, 2, 3, 4, 7])
def test_snr_formulas_against_direct_computation(r):
    """Ours is that of the patch's mean; the paper's that of the mean divided by r² once more."""
    gy = draw(r, r, seed=r) + 0.3
    signal, mean = float(gy.square().sum()), float(gy.mean())
    if r > 1:
        assert find_patch_snr(gy) == pytest.approx(signal / float((gy - mean).square().sum()))
        assert find_snr(gy[None, None], (r, r)) == pytest.approx(find_patch_snr(gy))
        assert find_paper_snr(gy) == pytest.approx(signal / float((gy - mean / r**2).square().sum()))
        assert find_paper_snr(gy) < find_patch_snr(gy)
    else:
        assert find_snr(gy[None, None], (1, 1)) == math.inf


def test_snr_of_a_constant_patch():
    """Nothing is lost, but the paper's formula says 2.5 dB at patch 2."""
    assert find_snr(torch.ones(1, 1, 2, 2), (2, 2)) == math.inf
    assert find_patch_snr(torch.ones(2, 2)) > 1e12
    assert find_paper_snr(torch.ones(2, 2)) == pytest.approx(16 / 9)


def test_snr_of_a_map_with_partial_patches():
    gy = draw(2, 3, 5, 4)
    lost = gy.clone()
    for i in (0, 3):
        for j in (0, 3):
            cell = lost[..., i : i + 3, j : j + 3]
            cell -= cell.mean((2, 3), keepdim=True)
    assert find_snr(gy, (3, 3)) == pytest.approx(float(gy.square().sum() / lost.square().sum()))


def test_proposition_1_holds_where_it_is_proved():
    """One patch that wraps around: a kernel with its energy at DC smoothes, one without roughens."""
    gy = draw(4, 4) + 0.2
    for seed in range(20):
        kernel = draw(4, 4, seed=seed).abs()  # by its frequencies, as the proof has it
        smooth = kernel.clone()
        smooth[0, 0] = kernel.max()
        gx = make_dct(4).T @ (smooth * dct(gy)) @ make_dct(4)
        assert find_patch_snr(gx) >= find_patch_snr(gy)
        assert find_paper_snr(gx) >= find_paper_snr(gy)
