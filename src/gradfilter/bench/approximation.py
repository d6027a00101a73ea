"""How close the rules that approximate are: norms and softmax of channels, on the maps of a trained network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.bench.fidelity import MODEL, find_images, load_image
from gradfilter.bench.report import Report
from gradfilter.emit import enter
from gradfilter.geometry.tiling import Pair, Tiling, map_size
from gradfilter.models import find_models, make_model
from gradfilter.ops.constants import make_areas
from gradfilter.ops.pooling import pool_sum, unpool
from gradfilter.regions import Choices
from gradfilter.tensor import PatchTensor

PATCHES = (2, 4, 7)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm over channels": lambda x: F.layer_norm(x, x.shape[-1:]),
    "RMS norm over channels": lambda x: F.rms_norm(x, x.shape[-1:]),
    "softmax over channels": lambda x: x.softmax(-1),
    "normalize over channels": lambda x: F.normalize(x, dim=-1),
}


def measure(data: Path, label: str, batch: int, pixels: int) -> Report:
    """Return, by function and patch, the cosine of the approximated gradient to the exact one, both at patch resolution."""
    report = Report(
        f"approximation-{label}",
        f"Rules that approximate: gradient of their input on the maps of {MODEL}, {label}, batch {batch}, {pixels} px",
        f"python -m gradfilter.bench approximation --data PHOTOS --label {label}",
        ("function", "map", *(f"patch {patch}: cosine" for patch in PATCHES), *(f"patch {patch}: error" for patch in PATCHES)),
    )
    files = find_images(data)
    chosen = [files[i] for i in np.random.default_rng(0).permutation(len(files))[:batch]]
    maps = find_maps(torch.stack([load_image(file, pixels, find_models()[MODEL]) for file in chosen]))
    for name, function in FUNCTIONS.items():
        for x, gy in maps:
            pairs = [compare(function, x, gy, (patch, patch)) for patch in PATCHES]
            size = f"{x.shape[1]} × {x.shape[2]}×{x.shape[3]}"
            cosines, errors = zip(*pairs, strict=True)
            report.rows.append((name, size, *(f"{c:.4f}" for c in cosines), *(f"{e:.3f}" for e in errors)))
    report.remarks = [
        "The map is the output of a stage of the network, the gradient that of the cross-entropy towards another class, there. "
        "Exact: the pixel-resolution Jacobian applied to the patch-constant gradient, then summed over patches. Error: of the "
        "approximation, relative to the exact norm. At patch 1 both are the same to rounding."
    ]
    return report


def find_maps(images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of the network's stages and the loss gradient at each."""
    model = make_model(MODEL, weights="pretrained").eval().requires_grad_(False)
    outputs: list[Tensor] = []
    blocks = model.get_submodule("blocks")

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs.append(output)

    handles = [stage.register_forward_hook(keep) for stage in blocks.children()]
    scores = model(images.requires_grad_())
    for handle in handles:
        handle.remove()
    labels = scores.detach().topk(2).indices[:, 1]
    gradients = torch.autograd.grad(F.cross_entropy(scores, labels), outputs)
    return [(x.detach(), g) for x, g in zip(outputs, gradients, strict=True)]


def compare(function: Callable[[Tensor], Tensor], x: Tensor, gy: Tensor, patch: Pair) -> tuple[float, float]:
    """Return the cosine and the relative error of a rule's gradient against the exact one, at patch resolution."""
    x = x.clone().requires_grad_()
    choices = Choices("map", Tiling(patch=patch))
    y = function(enter(x, choices).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    assert isinstance(y, PatchTensor)
    g = pool_sum(gy, y.patch)
    (got,) = torch.autograd.grad(y.carrier, x, g)
    constant = unpool(g / make_areas(map_size(x), y.patch, g), y.patch, map_size(x))
    (want,) = torch.autograd.grad(function(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), x, constant)
    got, want = (pool_sum(t, y.patch).flatten().double() for t in (got, want))
    return float(F.cosine_similarity(got, want, 0)), float((got - want).norm() / want.norm())
