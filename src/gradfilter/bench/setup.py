"""Models, plans and batches that the measurements share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradfilter.apply import apply_
from gradfilter.errors import ModelNameError
from gradfilter.models import find_models, make_model
from gradfilter.models.torchvision_ops import declare_torchvision_ops
from gradfilter.plan import Backward, Plan

EXACT = "exact"
INFERENCE = "inference"


def make_network(name: str) -> nn.Module:
    """Return a network with random weights: one of ours, or one of torchvision's."""
    if name in find_models():
        return make_model(name)
    declare_torchvision_ops()
    import torchvision

    if name not in torchvision.models.list_models():
        raise ModelNameError(f"No model is named {name!r}. Ours are {', '.join(find_models())}; the others are torchvision's.")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torchvision.models.get_model(name)


def freeze_statistics_(model: nn.Module) -> nn.Module:
    """Put batch norms in eval mode, affine trained: what a plan does by default, for a model without one."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def prepare(model: nn.Module, method: str) -> nn.Module:
    """Put a model into the state a method trains it in, all layers: "exact", "inference", "patch 4", "grid 4 lumped"."""
    if method == INFERENCE:
        return model.eval()
    model.train()
    if method == EXACT:
        return freeze_statistics_(model)
    return apply_(model, Plan.all(parse_backward(method)))


def parse_backward(text: str) -> Backward:
    """Return the `Backward` that prints as `text`: "patch 4", "grid 4", "patch 2 lumped"."""
    choice, size, *kernel = text.split()
    options: dict[str, Any] = {choice: int(size)}
    return Backward(**options, kernel="lumped" if kernel == ["lumped"] else "lift")


def make_batch(batch: int, pixels: int) -> tuple[Tensor, Tensor]:
    """Return random images, channels last, and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator).contiguous(memory_format=torch.channels_last)
    return images, torch.randint(10, (batch,), generator=generator)
