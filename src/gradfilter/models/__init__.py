"""Build networks by name, with weights: ours, torchvision's, timm's, and a user's own."""

import os

import torch
from torch import nn

from gradfilter.errors import GradFilterError, ModelNameError
from gradfilter.models import cifar_resnet, efficientnet_lite, mcunet, torchvision_nets  # noqa: F401 (importing registers)
from gradfilter.models.listing import ModelRow, list_models
from gradfilter.models.network import find_entry
from gradfilter.models.registry import ModelInfo, find_models
from gradfilter.models.segmenters import SEGMENTERS, find_decoder
from gradfilter.models.sources import find_weights
from gradfilter.models.weights import build_with_weights, random_weights_from

__all__ = ["ModelInfo", "ModelRow", "find_info", "find_models", "list_models", "make_model"]


def make_model(
    name: str,
    *,
    weights: str | os.PathLike[str] | None = None,
    classes: int | None = None,
    generator: torch.Generator | None = None,
    encoder: str | None = None,
) -> nn.Module:
    """Build a model by name, on the CPU, in training mode.

    Args:
        name: One of `find_models`, where dashes and underscores do not count; a name of `torchvision.models.list_models()`
            or `timm.list_models()`, bare (ours come first, then torchvision's) or behind "torchvision/" or "timm/";
            "deeplabv3", "unet" or another of those that label pixels (`gradfilter models` names them), alone or with an
            encoder, "unet/mobilenet_v2"; or "module:function" for a function of the user's own that takes no arguments and
            returns a model. The module is looked up in the current directory too, as `python -m` does.
        weights: None for random weights; the path of a local file, .safetensors or what `torch.save` writes; "pretrained"
            for the published ones: from an installed pip package, or else from torchvision's or timm's hub (its local
            cache, then the network).
        classes: Number of outputs. Where it differs from what the weights were trained for, the classifier is
            replaced by a fresh one. None for as many as the weights have, or as the model has by itself.
        generator: Source of all random weights. It advances, so a second call with it gives other weights. Without one,
            every call gives the same weights. The global random state is neither read nor changed.
        encoder: What is in front of the decoder of a model that labels pixels: ours, segmentation-models-pytorch's, or
            timm's behind "tu-". Pretrained weights, and files that hold no decoder, are the encoder's.

    Raises:
        ModelNameError: The name is not known, or there is no such module or function.
        WeightsError: The weights are missing, unreadable, made for another model, or cannot be fetched.
        MissingExtraError: An optional package is not installed.
        GradFilterError: The user's function failed, or its model has no classifier to replace.
    """
    if classes is not None and classes < 1:
        raise GradFilterError(f"classes={classes} was given to model {name!r}. A classifier needs at least one class.")
    entry = find_entry(join_encoder(name, encoder))
    with random_weights_from(generator):
        if weights is None:
            return entry.build(classes).train()
        return build_with_weights(entry, find_weights(entry, weights), classes).train()


def join_encoder(name: str, encoder: str | None) -> str:
    """Return the one name of a model and its encoder."""
    if encoder is None:
        return name
    if not find_decoder(name):
        raise ModelNameError(
            f"encoder={encoder!r} was given with model {name!r}, which has none of its own. Leave it out, or take one of: "
            f"{', '.join(SEGMENTERS)}."
        )
    return f"{name}/{encoder}"


def find_info(name: str, encoder: str | None = None) -> ModelInfo:
    """Say what a model expects and where its weights come from, for any name that `make_model` takes.

    Raises:
        ModelNameError: The name is not known.
        MissingExtraError: An optional package is not installed.
    """
    return find_entry(join_encoder(name, encoder)).info
