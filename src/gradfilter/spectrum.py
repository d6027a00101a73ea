"""The gradient-filtering paper's analysis: frequencies of kernels and gradients, and what a patch's mean keeps of them.

GF is "Efficient On-device Training via Gradient Filtering" (CVPR 2023). Its Proposition 1: where a kernel has no more energy at
any frequency than at DC, the gradient behind the layer, gx, loses no more to the patches than the one before it, gy. Proved is
that for one channel, one sample, one patch; `gradfilter.fidelity` shows what holds in a network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradfilter.geometry.tiling import Pair, Tiling, map_size
from gradfilter.ops.pooling import pool_mean, unpool


def dct(x: Tensor) -> Tensor:
    """Return the orthonormal 2-D DCT-II over the last two axes, in float64.

    *Equation*: X = C_h x C_wᵀ with C_n[k, i] = √(c_k/n) · cos(π(2i + 1)k / 2n), c_0 = 1, c_k = 2. It keeps energy: ΣX² = Σx²,
    and X[0, 0]² is the number of values times the square of their mean.
    """
    x = x.detach().to("cpu", torch.float64)
    rows, columns = (make_dct(n) for n in map_size(x))
    return rows @ x @ columns.T


def make_dct(n: int) -> Tensor:
    """Return the matrix of the orthonormal DCT-II of n values."""
    i = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * n) * i[:, None] * (2 * i + 1)) * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    return matrix


def find_dc_ratio(weight: Tensor) -> float:
    """Return the DC energy of a layer's kernels against the largest other: above 1 as Proposition 1 needs it.

    *Equation*: E[0, 0] / max_{(u,v)≠(0,0)} E[u, v] with E[u, v] = Σ_{co,ci} Θ[co, ci, u, v]², Θ the 2-D DCT of the kernels
    [Co, Ci, h, w]. Energies are summed over a layer's kernels before the ratio is taken: a ratio per kernel has no mean worth
    naming, as single kernels may have next to no energy elsewhere. NaN for 1×1 kernels, which have no other frequency, and
    for zeros.
    """
    energy = dct(weight).square().sum((0, 1)).flatten()
    if energy.numel() == 1 or not bool(energy.any()):
        return math.nan
    return divide(float(energy[0]), float(energy[1:].max()))


def find_dc_share(weight: Tensor) -> float:
    """Return the share of a layer's single kernels that meet the condition of Proposition 1: Θ[0, 0]² ≥ Θ[u, v]² for all u, v.

    NaN for 1×1 kernels.
    """
    energy = dct(weight).square().flatten(0, 1).flatten(1)
    return float((energy[:, 0] >= energy[:, 1:].amax(1)).double().mean()) if energy.shape[1] > 1 else math.nan


def find_patch_snr(gy: Tensor) -> float:
    """Return the signal-to-noise ratio of a patch [r, r] that is replaced by its mean.

    *Equation*: Σgy² / Σ(gy − mean gy)² = (1 − Gy²[0,0]/ΣGy²)⁻¹, Gy the 2-D DCT of the patch: the mean keeps DC and nothing
    else. Infinite for a constant patch, 1 for one whose mean is 0.
    """
    share = find_dc_energy(gy)
    return divide(1.0, 1 - share) if share < 1 else math.inf


def find_paper_snr(gy: Tensor) -> float:
    """Return the signal-to-noise ratio of a patch [r, r] by the paper's formula, which is not that of the patch's mean.

    *Equation* (GF): (1 − (2r²−1)/r⁴ · Gy²[0,0]/ΣGy²)⁻¹. With the orthonormal DCT this is Σgy² / Σ(gy − mean gy / r²)²: it
    belongs to a filter that divides the mean by the number of pixels once more. At r = 2 a constant patch, of which nothing is
    lost, has 16/9 (2.5 dB) by it instead of ∞. At a given r both formulas grow with DC's share of the energy, so which of two
    patches has the better SNR, and with it Proposition 1, is the same for both.
    """
    area = gy.shape[-1] * gy.shape[-2]
    return divide(1.0, 1 - (2 * area - 1) / area**2 * find_dc_energy(gy))


def find_dc_energy(gy: Tensor) -> float:
    """Return DC's share of a patch's energy, Gy²[0,0]/ΣGy²."""
    energy = dct(gy).square()
    return divide(float(energy[0, 0]), float(energy.sum()))


def find_snr(gy: Tensor, patch: Pair) -> float:
    """Return the signal-to-noise ratio of a gradient [N, C, H, W] whose patches are replaced by their means.

    *Equation*: Σgy² / Σ(gy − mean of its patch)², over all patches: `find_patch_snr` for one. Infinite where nothing is lost.
    """
    return divide(*find_energies(gy, patch))


def find_energies(gy: Tensor, patch: Pair) -> tuple[float, float]:
    """Return the energy of a gradient [N, C, H, W], and that of what is lost when its patches are replaced by their means."""
    return find_energy(gy), find_energy(gy - unpool(pool_mean(gy, patch), patch, map_size(gy)))


def find_energy(x: Tensor) -> float:
    """Return the sum of squares, in float64 where the device has that."""
    return float(x.detach().to("cpu", torch.float64).square().sum())


def to_db(ratio: float) -> float:
    """Return a ratio of energies in decibel, 10·log10."""
    if math.isnan(ratio) or math.isinf(ratio):
        return ratio
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


def divide(a: float, b: float) -> float:
    """Return a / b; infinite where b alone is 0, NaN where both are."""
    return a / b if b else math.inf if a else math.nan


@dataclass
class GradientRecord:
    """What `record_snr` has seen.

    Attributes:
        order: The layers, in the order in which they ran.
        snr: The signal-to-noise ratio of the gradient at each layer's output.
    """

    order: list[str] = field(default_factory=list)
    snr: dict[str, float] = field(default_factory=dict)


@contextmanager
def record_snr(model: nn.Module, tilings: Mapping[str, Tiling]) -> Iterator[GradientRecord]:
    """Record what patches would keep of the gradients at layers' outputs, while the model runs forward and backward exactly.

    Args:
        model: The model.
        tilings: By layer, how its output is cut into patches.
    """
    record = GradientRecord()
    energies: dict[str, tuple[float, float]] = {}

    def watch(name: str, tiling: Tiling, y: Any) -> None:
        if not isinstance(y, Tensor) or y.dim() != 4 or not y.requires_grad:
            return

        def take(gy: Tensor) -> None:
            signal, lost = energies.get(name, (0.0, 0.0))  # a layer may run several times
            more = find_energies(gy, tiling.patch_for(map_size(gy)))
            energies[name] = signal + more[0], lost + more[1]
            record.snr[name] = divide(*energies[name])

        y.register_hook(take)
        if name not in record.order:
            record.order.append(name)

    handles = [
        model.get_submodule(name).register_forward_hook(lambda module, args, y, name=name, t=tiling: watch(name, t, y))
        for name, tiling in tilings.items()
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
