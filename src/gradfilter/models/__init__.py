"""Build the networks that gradfilter is measured on, by name, with local weights."""

import os
from typing import cast

import torch
from torch import nn

from gradfilter.errors import GradFilterError
from gradfilter.models import cifar_resnet, efficientnet_lite, mcunet  # noqa: F401 (importing a family registers it)
from gradfilter.models.network import make_network
from gradfilter.models.registry import ModelInfo, Resettable, find_models, get_entry
from gradfilter.models.weights import load_weights_, random_weights_from, weights_path

__all__ = ["ModelInfo", "find_models", "make_model", "make_network"]


def make_model(
    name: str,
    *,
    weights: str | os.PathLike[str] | None = None,
    classes: int | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Build a model by name, on the CPU, in training mode.

    Args:
        name: One of the names that `find_models` lists.
        weights: Path of a local weight file; "pretrained" for the weights that an installed pip package carries;
            None for random weights.
        classes: Number of outputs. Where it differs from what the weights were trained for, the classifier is
            replaced by a fresh one.
        generator: Source of all random weights. It advances, so a second call with it gives other weights. Without one,
            every call gives the same weights. The global random state is neither read nor changed.

    Raises:
        ModelNameError: The name is not known.
        WeightsError: The weights are missing, unreadable, or made for another model.
        MissingExtraError: An optional package is not installed.
    """
    entry = get_entry(name)
    path = weights_path(entry, weights)
    outputs = entry.info.classes if classes is None else classes
    if outputs < 1:
        raise GradFilterError(f"classes={outputs} was given to model {name!r}. A classifier needs at least one class.")
    with random_weights_from(generator):
        if path is None:
            return entry.build(outputs)
        model = entry.build(entry.info.classes)
        load_weights_(model, path, entry)
        if outputs != entry.info.classes:
            cast(Resettable, model).reset_classifier(outputs)
        return model
