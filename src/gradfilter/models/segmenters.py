"""Networks that label every pixel: the decoders of segmentation-models-pytorch, and torchvision's FCN, behind any encoder."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.errors import GradFilterError, ModelNameError
from gradfilter.models.extras import import_extra
from gradfilter.models.registry import IMAGENET_MEAN, IMAGENET_STD, Entry, ModelInfo, pair_plainly
from gradfilter.models.weights import find_shapes, pair_keys

DECODERS = {
    "fcn": "FCN",
    "deeplabv3": "DeepLabV3",
    "deeplabv3plus": "DeepLabV3Plus",
    "deeplabv3+": "DeepLabV3Plus",
    "pspnet": "PSPNet",
    "upernet": "UPerNet",
    "fpn": "FPN",
    "unet": "Unet",
}
"""Our names, without dashes and underscores, and what segmentation-models-pytorch calls them; FCN is made here."""
DEFAULT_ENCODER = "resnet18"
CLASSES = 21  # of Pascal VOC: as many as a model has by itself
RESOLUTION = 512  # of the papers
HEAD = "segmentation_head."
ALIASES = {"efficientnet-lite0": "tu-tf_efficientnet_lite0"}
"""Our names of encoders that segmentation-models-pytorch has under others.

Its own "timm-tf_efficientnet_lite0" has another padding and another eps in batch norms than the weights were trained with.
"""


def find_decoder(name: str) -> str | None:
    """Return what a name stands for if it is one of a decoder."""
    return DECODERS.get(name.replace("-", "").replace("_", "").lower())


class FCN(nn.Module):
    """Label pixels as torchvision's FCN does: its head on the last map of a dilated encoder, enlarged to the image's size.

    Attributes:
        encoder: Gives maps [N, C, H, W], the last one of stride 8.
        decoder: All of the head but the last layer.
        segmentation_head: Its last layer: the classifier.
    """

    def __init__(self, encoder: nn.Module, channels: int, classes: int) -> None:
        super().__init__()
        *layers, last = import_extra("torchvision.models.segmentation.fcn", "Model 'fcn'").FCNHead(channels, classes)
        self.encoder, self.decoder, self.segmentation_head = encoder, nn.Sequential(*layers), nn.Sequential(last)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of every class for every pixel, [N, classes, H, W]."""
        scores = self.segmentation_head(self.decoder(self.encoder(x)[-1]))
        return F.interpolate(scores, x.shape[-2:], mode="bilinear", align_corners=False)


def make_segmenter_entry(name: str, decoder: str, encoder: str, classifier: Entry | None) -> Entry:
    """Describe a segmentation network.

    Args:
        name: What the user calls it.
        decoder: One of the values of `DECODERS`.
        encoder: A name of segmentation-models-pytorch, "tu-" and a name of timm, or one of `ALIASES`.
        classifier: The classifier that has this encoder, where one is known: its weights are the encoder's.
    """
    encoder = ALIASES.get(encoder, encoder)
    known = classifier.info if classifier else None
    info = ModelInfo(
        name,
        RESOLUTION,
        known.mean if known else IMAGENET_MEAN,
        known.std if known else IMAGENET_STD,
        None,
        f"of the encoder alone: {known.weights_from}" if known else "of the encoder alone: segmentation-models-pytorch's hub",
    )

    def build(classes: int | None) -> nn.Module:
        return _build(name, decoder, encoder, CLASSES if classes is None else classes)

    return Entry(
        info,
        build,
        pair_plainly,
        classifier.package if classifier else None,
        download=lambda: _make_encoder(name, encoder, weights="imagenet"),
        complete=lambda tensors: _complete(tensors, build, classifier),
    )


def _build(name: str, decoder: str, encoder: str, classes: int) -> nn.Module:
    smp = _import(name)
    with _explain(name, encoder):
        if decoder != "FCN":
            return getattr(smp, decoder)(encoder, encoder_weights=None, classes=classes)
        made = _make_encoder(name, encoder, weights=None, output_stride=8)
        return FCN(made, made.out_channels[-1], classes)


def _make_encoder(name: str, encoder: str, **options: Any) -> Any:
    return _import(name).encoders.get_encoder(encoder, **options)


def _import(name: str) -> Any:
    return import_extra("segmentation_models_pytorch", f"Model {name!r}")


@contextmanager
def _explain(name: str, encoder: str) -> Iterator[None]:
    """Say what is wrong with an encoder, which segmentation-models-pytorch says in many ways."""
    try:
        yield
    except (GradFilterError, NotImplementedError):  # the latter: it cannot be built on the meta device
        raise
    except Exception as error:
        if not isinstance(error, KeyError) and "Unknown model" not in str(error):
            raise GradFilterError(
                f"Model {name!r} cannot be built: {str(error).rstrip('.!')}. Take another encoder, e.g. {DEFAULT_ENCODER!r}."
            ) from error
        names = [*ALIASES, *_import(name).encoders.get_encoder_names()]
        near = difflib.get_close_matches(encoder, names, n=3)
        hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ModelNameError(
            f"Model {name!r}: no encoder is named {encoder!r}. {hint}There are {', '.join(names[:4])} and others of "
            "segmentation-models-pytorch, and all of timm's behind 'tu-', such as 'tu-mobilenetv4_conv_small'."
        ) from error


def _complete(
    tensors: Mapping[str, Tensor], build: Callable[[int | None], nn.Module], classifier: Entry | None
) -> dict[str, Tensor]:
    """Return the tensors of a network but for its classifier where those of an encoder are given: the decoder is fresh."""
    if any(key.removeprefix("module.").startswith(("decoder.", HEAD)) for key in tensors):
        return dict(tensors)
    whole = {key: value for key, value in build(None).state_dict().items() if not key.startswith(HEAD)}
    named = dict(tensors)
    if classifier is not None:
        pairs = pair_keys(classifier, list(find_shapes(classifier, None)), tensors)
        named |= {ours: tensors[theirs] for ours, theirs in pairs.items() if theirs in tensors}
    found = {}
    for key, value in whole.items():
        bare = key.removeprefix("encoder.")
        if bare == key:
            found[key] = value
            continue
        # timm's networks are a part of what segmentation-models-pytorch makes of them
        given = named.get(bare, named.get(bare.removeprefix("model.")))
        if given is not None:
            found[key] = given
    return found
