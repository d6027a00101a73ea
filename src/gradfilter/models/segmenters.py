"""Networks that label every pixel: the decoders of segmentation-models-pytorch, and torchvision's FCN, behind any encoder."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gradfilter.errors import GradFilterError, ModelNameError
from gradfilter.models.extras import import_extra
from gradfilter.models.papers import PAPERS, enlarge, make_block, trim_
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
    "unetplusplus": "UnetPlusPlus",
    "unet++": "UnetPlusPlus",
    "linknet": "Linknet",
    "segformer": "Segformer",
    **{name.lower(): name for name in PAPERS},
}
"""Our names, without dashes and underscores, and what segmentation-models-pytorch calls them; FCN is made here.

"paper-pspnet" and so on are the gradient-filtering paper's own.
"""
SEGMENTERS = (
    *("fcn", "deeplabv3", "deeplabv3plus", "pspnet", "upernet", "fpn", "unet", "unetplusplus", "linknet", "segformer"),
    *(f"paper-{name.removeprefix('Paper').lower()}" for name in PAPERS),
)
"""The names as they are listed, each once."""
DEFAULT_ENCODER = "resnet18"
CLASSES = 21  # of Pascal VOC: as many as a model has by itself
RESOLUTION = 512  # of the papers
HEAD = "segmentation_head."
AUXILIARY = "/auxiliary"
SECOND = "auxiliary."
STEM = tuple(f"encoder.conv1.{place}." for place in range(7))
"""The three convolutions of the papers' stem, where a classifier has one: they are fresh."""
ALIASES = {"efficientnet-lite0": "tu-tf_efficientnet_lite0"}
"""Our names of encoders that segmentation-models-pytorch has under others.

Its own "timm-tf_efficientnet_lite0" has another padding and another eps in batch norms than the weights were trained with.
"""


def find_decoder(name: str) -> str | None:
    """Return what a name stands for if it is one of a decoder."""
    return DECODERS.get(name.replace("-", "").replace("_", "").lower())


def find_encoder(name: str) -> str:
    """Return what segmentation-models-pytorch calls an encoder."""
    return ALIASES.get(name.replace("_", "-").lower(), name)


def find_plain(name: str) -> tuple[str, str] | None:
    """Return class and encoder of the network of segmentation-models-pytorch that a name stands for; None for all others."""
    decoder, encoder, auxiliary = split_name(name)
    kind = find_decoder(decoder)
    return None if kind is None or kind in ("FCN", *PAPERS) or auxiliary else (kind, find_encoder(encoder))


class Segmenter(nn.Module):
    """Label pixels: an encoder, a decoder and a classifier, whose scores are enlarged to the image's size.

    Attributes:
        auxiliary: None, or a second, small decoder and classifier on the last map but one, for training only: its scores are
            returned behind the network's own, in training mode. It comes first, not to be counted among the last layers.
        encoder: From images to maps [N, C, H, W], the largest first.
        decoder: From these to one map.
        segmentation_head: The classifier.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, head: nn.Module, auxiliary: nn.Module | None = None) -> None:
        super().__init__()
        self.auxiliary, self.encoder, self.decoder, self.segmentation_head = auxiliary, encoder, decoder, head

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the scores of every class for every pixel, [N, classes, H, W]."""
        maps = self.encoder(x)
        scores = enlarge(self.segmentation_head(self.decoder(maps)), x.shape[-2:])
        if self.auxiliary is None or not self.training:
            return scores
        return scores, enlarge(self.auxiliary(maps[-2]), x.shape[-2:])


class OnLast(nn.Sequential):
    """Layers that see the last of several maps."""

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return what they make of it."""
        return super().forward(maps[-1])


def split_name(name: str) -> tuple[str, str, bool]:
    """Return the decoder of a network's name, its encoder, and whether it has an auxiliary head: "unet/resnet18/auxiliary"."""
    bare = name.removesuffix(AUXILIARY)
    decoder, _, encoder = bare.partition("/")
    return decoder, encoder or DEFAULT_ENCODER, bare != name


def add_auxiliary(name: str) -> str:
    """Return the name of a network with an auxiliary head; what is none of ours may have one of its own."""
    decoder, encoder, _ = split_name(name)
    return f"{decoder}/{encoder}{AUXILIARY}" if find_decoder(decoder) else name


def make_segmenter_entry(name: str, decoder: str, encoder: str, classifier: Entry | None, auxiliary: bool = False) -> Entry:
    """Describe a segmentation network.

    Args:
        name: What the user calls it.
        decoder: One of the values of `DECODERS`.
        encoder: A name of segmentation-models-pytorch, "tu-" and a name of timm, or one of `ALIASES`.
        classifier: The classifier that has this encoder, where one is known: its weights are the encoder's.
        auxiliary: Whether it has an auxiliary head.
    """
    encoder = find_encoder(encoder)
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
        return _build(name, decoder, encoder, CLASSES if classes is None else classes, auxiliary)

    return Entry(
        info,
        build,
        pair_plainly,
        classifier.package if classifier else None,
        download=lambda: _make_encoder(name, encoder, weights=True if encoder.startswith("tu-") else "imagenet"),
        complete=lambda tensors: _complete(tensors, build, classifier),
    )


def _build(name: str, decoder: str, encoder: str, classes: int, auxiliary: bool) -> nn.Module:
    with _explain(name, encoder):
        if decoder in PAPERS:
            make, width, stride = PAPERS[decoder]
            made = _make_encoder(name, encoder, weights=None, output_stride=stride)
            channels = trim_(made, encoder)
            parts = made, make(channels), nn.Sequential(nn.Conv2d(width, classes, 1))
        elif decoder == "FCN":
            made = _make_encoder(name, encoder, weights=None, output_stride=8)
            channels = made.out_channels
            head = import_extra("torchvision.models.segmentation.fcn", f"Model {name!r}").FCNHead
            *layers, last = head(channels[-1], classes)
            parts = made, OnLast(*layers), nn.Sequential(last)
        else:
            model = getattr(_import(name), decoder)(encoder, encoder_weights=None, classes=classes)
            if not auxiliary:
                return model
            channels = model.encoder.out_channels
            parts = model.encoder, model.decoder, model.segmentation_head
        return Segmenter(*parts, auxiliary=_make_auxiliary(channels[-2], classes) if auxiliary else None)


def _make_auxiliary(channels: int, classes: int) -> nn.Module:
    width = max(1, channels // 4)
    return nn.Sequential(*make_block(channels, width), nn.Conv2d(width, classes, 1))


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
    """Return the tensors of a network but for its classifier where those of an encoder are given: the decoder is fresh.

    An auxiliary head is fresh too where the file has none, and dropped where the network has none.
    """
    bare = {key.removeprefix("module."): value for key, value in tensors.items()}
    if any(key.startswith(("decoder.", HEAD)) for key in bare):
        classes = next((value.shape[0] for key, value in bare.items() if key.startswith(HEAD) and value.ndim), None)
        second = {key: value for key, value in build(classes).state_dict().items() if key.startswith(SECOND)}
        kept = {key: value for key, value in bare.items() if not key.startswith(SECOND)}
        return kept | second | {key: value for key, value in bare.items() if key in second}
    whole = {key: value for key, value in build(None).state_dict().items() if not key.startswith((HEAD, f"{SECOND}3."))}
    named = dict(tensors)
    if classifier is not None:
        pairs = pair_keys(classifier, list(find_shapes(classifier, None)), tensors)
        named |= {ours: tensors[theirs] for ours, theirs in pairs.items() if theirs in tensors}
    found = {}
    for key, value in whole.items():
        bare = key.removeprefix("encoder.")
        # timm's networks are a part of what segmentation-models-pytorch makes of them
        given = value if bare == key else named.get(bare, named.get(bare.removeprefix("model.")))
        if given is None and key.startswith(STEM):
            given = value
        if given is not None:
            found[key] = given
    return found
