"""Choices, images and states of models that the measurements share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradfilter.plan import Backward

EXACT = "exact"
INFERENCE = "inference"


def freeze_statistics_(model: nn.Module) -> nn.Module:
    """Put batch norms in eval mode, affine trained: what a plan does by default, for a model without one."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


DROPPING = ("DropPath", "DropBlock2d", "StochasticDepth")
"""Modules of timm and torchvision that drop paths and blocks at random."""


def shake_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give batch norms statistics and affines as training would, so that no gradient is trivially right; nothing is dropped."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor, fill in (
                (module.running_mean, lambda t: t.normal_(0, 0.1, generator=generator)),
                (module.running_var, lambda t: t.uniform_(0.5, 2, generator=generator)),
                (module.weight, lambda t: t.uniform_(0.5, 1.5, generator=generator)),
                (module.bias, lambda t: t.normal_(0, 0.1, generator=generator)),
            ):
                if tensor is not None:
                    fill(tensor.data)
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ in DROPPING:
            for name in ("p", "drop_prob"):
                if hasattr(module, name):
                    setattr(module, name, 0.0)
    return model


def parse_backward(text: str) -> Backward:
    """Return the `Backward` that prints as `text`: "patch 4", "grid 4", "patch 2 lumped"."""
    choice, size, *kernel = text.split()
    options: dict[str, Any] = {choice: int(size)}
    return Backward(**options, kernel="lumped" if kernel == ["lumped"] else "lift")


def make_images(batch: int, pixels: int) -> Tensor:
    """Return random images."""
    return torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
