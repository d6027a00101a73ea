"""The recipes of the papers as named presets, all from the tables of this file.

A name is `{data}-{model}-{layers}-{method}`, as in "cifar10-mcunet-last4-patch2"; "cifar10-mcunet-hosvd0.8" is a short one.
Segmentation has a decoder and an encoder for a model, as in "voc12aug-pspnet-resnet18-last5-lumped".
The papers are GF, "Efficient On-device Training via Gradient Filtering" (CVPR 2023, arXiv 2301.00330), and HOSVD, "Activation
Map Compression through Tensor Decomposition" (NeurIPS 2024, arXiv 2411.06346).
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any

from gradfilter.errors import SettingsError
from gradfilter.models.papers import NETS, find_patches

_HALF = (0.5, 0.5, 0.5)

# Where the papers are silent, ours: a cosine without warm-up, no weight decay, the usual crops and mirroring.
_CIFAR = {
    "weights": "pretrained",
    "resolution": 224,
    "mean": _HALF,
    "std": _HALF,
    "augment": "standard",
    "epochs": 50,
    "warmup": 0,
    "batch": 128,
    "schedule": "cosine",
    "clip": 2.0,
    "batch_norm": "eval",
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "seed": 0,
}
# The fine-tuning starts where "imagenet-MODEL-pretrain" ends, on the other part. A shard is about as large as a class.
_IMAGENET = {
    "parts": 2,
    "shards": 500,
    "partition": "imagenet-parts.json",
    "resolution": 224,
    "augment": "standard",
    "epochs": 90,
    "warmup": 4,
    "batch": 64,
    "schedule": "cosine",
    "clip": 2.0,
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "seed": 0,
}
_FINETUNE = {**_IMAGENET, "part": 1, "batch_norm": "eval"}
_PRETRAIN = {**_IMAGENET, "part": 0, "batch_norm": "train", "weights": "random", "plan": "all", "exact": True}

_CIFAR_LAYERS = ("last1", "last2", "last3", "last4", "all")
_OTHER_LAYERS = ("last2", "last4", "all")
_DATA = {
    "cifar10": (_CIFAR, _CIFAR_LAYERS),
    "cifar100": (_CIFAR, _CIFAR_LAYERS),
    "imagenet": (_FINETUNE, _OTHER_LAYERS),
    "cub200": (_CIFAR, _OTHER_LAYERS),
    "flowers102": (_CIFAR, _OTHER_LAYERS),
    "pets": (_CIFAR, _OTHER_LAYERS),
}
# The MCUNet of the papers has a wider last block than this one, as their memory figures tell; it is the nearest here.
_MODELS = {"mobilenetv2": "mobilenet_v2", "resnet18": "resnet18", "resnet34": "resnet34", "mcunet": "mcunet-in3"}
_METHODS: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    **{f"patch{side}": {"patch": side, "kernel": "lift"} for side in (2, 4, 7)},
    **{f"lumped{side}": {"patch": side, "kernel": "lumped"} for side in (2, 4, 7)},  # the papers' own filter
    "grid4": {"grid": 4, "kernel": "lift"},
    **{
        f"{kind}{energy}": {"patch": 1, "kernel": "lift", "keep": f"{kind}:{energy}"}
        for kind, energy in (("hosvd", 0.8), ("hosvd", 0.9), ("svd", 0.8))
    },
}
# 20,000 steps of 8 images are 15 epochs of the 10,582 images of VOC12Aug, and 54 of the 2,975 of Cityscapes. Ours where the
# paper is silent: the schedule, no clipping. Only where the whole encoder is trained does the auxiliary head do anything.
_SEGMENT = {
    "task": "segment",
    "data": "voc12aug",
    "resolution": 512,
    "augment": "standard",
    "epochs": 15,
    "warmup": 0,
    "batch": 8,
    "schedule": "poly",
    "clip": 0.0,
    "batch_norm": "eval",
    "optimizer": "sgd",
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "seed": 0,
}
_WHOLE = {"plan": "all", "exact": True, "auxiliary": 0.4}
# The long side of Cityscapes' images, of 512×1024 pixels here, is the resolution.
_CITYSCAPES = {**_SEGMENT, **_WHOLE, "data": "cityscapes", "resolution": 1024, "epochs": 54, "batch_norm": "train"}
_SEGMENTERS = {f"{name.partition('-')[0]}-{net[1].replace('_', '')}".lower(): net for name, net in NETS.items()}
_SEGMENT_METHODS: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "lift": {"kernel": "lift"},
    "lumped": {"kernel": "lumped"},  # the paper's own filter
}
_SHORT = {"cifar10-mcunet-hosvd0.8": "cifar10-mcunet-last4-hosvd0.8"}
"""Shorter names: the HOSVD paper's own example."""

_PAPERS = {"GF": "CVPR 2023, arXiv 2301.00330", "HOSVD": "NeurIPS 2024, arXiv 2411.06346"}
# Top-1 accuracy in percent, by layers. What the papers call their filter at patch size r is lumped{r} here.
_PUBLISHED = """
    GF    cifar10    resnet18    exact    last1 91.7 last2 93.6 last3 93.7 last4 94.4
    GF    cifar10    resnet18    lumped2  last1 91.5 last2 92.7 last3 92.8 last4 93.9
    GF    cifar10    resnet18    lumped4  last1 91.4 last2 92.7 last3 92.8 last4 93.3
    GF    cifar10    resnet18    lumped7  last1 91.5 last2 91.5 last3 91.7 last4 92.6
    GF    cifar10    resnet34    exact    last1 94.2 last2 96.6 last3 96.6 last4 96.8
    GF    cifar10    resnet34    lumped2  last1 94.2 last2 96.6 last3 96.5 last4 96.6
    GF    cifar10    resnet34    lumped4  last1 94.3 last2 96.4 last3 96.4 last4 96.1
    GF    cifar10    resnet34    lumped7  last1 94.2 last2 95.8 last3 96.0 last4 96.0
    GF    cifar100   resnet18    exact    last1 73.8 last2 77.6 last3 77.6 last4 78.0
    GF    cifar100   resnet18    lumped2  last1 73.7 last2 75.6 last3 75.6 last4 76.4
    GF    cifar100   resnet18    lumped4  last1 73.7 last2 74.9 last3 74.9 last4 75.2
    GF    cifar100   resnet18    lumped7  last1 73.7 last2 74.1 last3 74.1 last4 75.4
    GF    cifar100   resnet34    exact    last1 76.9 last2 82.0 last3 82.1 last4 83.0
    GF    cifar100   resnet34    lumped2  last1 77.0 last2 81.1 last3 81.1 last4 82.0
    GF    cifar100   resnet34    lumped4  last1 76.9 last2 80.4 last3 80.4 last4 80.5
    GF    cifar100   resnet34    lumped7  last1 76.9 last2 80.4 last3 80.3 last4 80.3
    GF    imagenet   mobilenetv2 exact    all 75.1 last2 63.1 last4 62.2
    GF    imagenet   mobilenetv2 lumped2  last2 63.1 last4 63.4
    GF    imagenet   resnet18    exact    all 73.1 last2 70.4 last4 72.3
    GF    imagenet   resnet18    lumped2  last2 68.6 last4 68.5
    GF    imagenet   mcunet      exact    all 68.5 last2 62.1 last4 64.9
    GF    imagenet   mcunet      lumped2  last2 61.8 last4 64.4
    GF    imagenet   resnet34    exact    all 70.8 last2 69.6 last4 72.3
    GF    imagenet   resnet34    lumped2  last2 68.6 last4 70.6
    HOSVD cub200     mobilenetv2 exact    all 52.9 last2 48.4 last4 53.1
    HOSVD cub200     mobilenetv2 lumped2  last2 46.7 last4 50.2
    HOSVD cub200     mobilenetv2 lumped7  last2 46.6 last4 46.4
    HOSVD cub200     mobilenetv2 hosvd0.8 last2 44.2 last4 48.9
    HOSVD cub200     mcunet      exact    all 30.8 last2 9.6 last4 12.4
    HOSVD cub200     mcunet      lumped2  last2 10.0 last4 12.3
    HOSVD cub200     mcunet      lumped7  last2 9.6 last4 10.3
    HOSVD cub200     mcunet      hosvd0.8 last2 9.1 last4 8.2
    HOSVD flowers102 mobilenetv2 exact    all 80.7 last2 80.5 last4 83.0
    HOSVD flowers102 mobilenetv2 lumped2  last2 80.9 last4 82.7
    HOSVD flowers102 mobilenetv2 lumped7  last2 81.0 last4 81.4
    HOSVD flowers102 mobilenetv2 hosvd0.8 last2 79.1 last4 81.5
    HOSVD flowers102 mcunet      exact    all 45.6 last2 39.3 last4 44.1
    HOSVD flowers102 mcunet      lumped2  last2 39.1 last4 42.6
    HOSVD flowers102 mcunet      lumped7  last2 38.3 last4 41.6
    HOSVD flowers102 mcunet      hosvd0.8 last2 35.6 last4 31.5
    HOSVD pets       mobilenetv2 exact    all 89.8 last2 88.4 last4 89.5
    HOSVD pets       mobilenetv2 lumped2  last2 88.3 last4 89.2
    HOSVD pets       mobilenetv2 lumped7  last2 88.7 last4 88.9
    HOSVD pets       mobilenetv2 hosvd0.8 last2 88.3 last4 89.2
    HOSVD pets       mcunet      exact    all 75.2 last2 40.6 last4 49.2
    HOSVD pets       mcunet      lumped2  last2 40.5 last4 49.1
    HOSVD pets       mcunet      lumped7  last2 40.5 last4 44.2
    HOSVD pets       mcunet      hosvd0.8 last2 18.6 last4 18.8
    HOSVD cifar10    mobilenetv2 exact    all 95.3 last2 88.1 last4 89.5
    HOSVD cifar10    mobilenetv2 lumped2  last2 87.9 last4 89.3
    HOSVD cifar10    mobilenetv2 lumped7  last2 86.1 last4 86.3
    HOSVD cifar10    mobilenetv2 hosvd0.8 last2 85.6 last4 88.5
    HOSVD cifar10    mcunet      exact    all 91.2 last2 72.3 last4 83.6
    HOSVD cifar10    mcunet      lumped2  last2 71.2 last4 82.5
    HOSVD cifar10    mcunet      lumped7  last2 70.9 last4 78.4
    HOSVD cifar10    mcunet      hosvd0.8 last2 65.5 last4 77.3
"""
# GF: mIoU and mAcc in percent after the classifier is calibrated, exact with all layers, with 5, with 10, filtered 5, 10.
_PUBLISHED_MASKS = """
    pspnet-resnet18       12.86 19.74 55.01 68.02 39.54 51.86 53.15 67.10 39.34 51.86 50.88 64.73
    pspnet-mobilenetv2    14.20 20.46 48.48 61.48 36.35 47.09 46.01 58.70 36.14 46.86 44.90 57.50
    fcn-resnet18          10.95 15.69 45.22 58.80 27.41 37.90 43.87 57.58 27.42 37.88 36.30 48.82
    deeplabv3-resnet18    13.95 20.62 58.32 71.72 40.85 53.16 54.65 68.64 33.09 44.33 47.11 60.28
    deeplabv3-mobilenetv2 21.96 36.15 55.66 68.95 38.21 49.35 47.95 61.49 35.47 46.35 45.53 58.99
    upernet-resnet18      14.71 21.82 64.88 77.13 47.93 61.67 48.83 63.02 47.04 60.44 48.00 62.07
"""
_MASK_COLUMNS = ("calibrated", "all-exact", "last5-exact", "last10-exact", "last5-lumped", "last10-lumped")


@dataclass(frozen=True)
class Published:
    """What a paper reports.

    Attributes:
        accuracy: In percent; of segmentation the mIoU.
        paper: Which paper.
        class_accuracy: The mean over classes, mAcc, in percent; of segmentation alone.
    """

    accuracy: float
    paper: str
    class_accuracy: float | None = None

    def __str__(self) -> str:
        if self.class_accuracy is None:
            return f"{self.accuracy:.1f} %"
        return f"mIoU {self.accuracy:.2f}, mAcc {self.class_accuracy:.2f}"


@dataclass(frozen=True)
class Preset:
    """Hold one recipe.

    Attributes:
        name: As given to `--preset`.
        settings: What it sets, by the names of `gradfilter.train.Settings`.
        published: What a paper reports for it, where one does.
    """

    name: str
    settings: Mapping[str, Any]
    published: Published | None = None


def find_presets() -> dict[str, Preset]:
    """List the presets by name."""
    return dict(_make_presets())


def get_preset(name: str) -> dict[str, Any]:
    """Return the settings of a preset.

    Raises:
        SettingsError: There is no such preset; near names are given.
    """
    presets = _make_presets()
    if name in presets:
        return dict(presets[name].settings)
    near = difflib.get_close_matches(name, presets, n=3, cutoff=0.6)
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    data, models, methods = (", ".join(table) for table in (_DATA, _MODELS, _METHODS))
    raise SettingsError(
        f"No preset is named {name!r}. {hint}Names are DATA-MODEL-LAYERS-METHOD, imagenet-MODEL-pretrain, and "
        f"{', '.join(_SHORT)}. DATA: {data}. MODEL: {models}. LAYERS: "
        f"{', '.join(_CIFAR_LAYERS)}; for all but CIFAR {', '.join(_OTHER_LAYERS)}. METHOD: {methods}. Of segmentation: "
        f"voc12aug-NET-last5-METHOD, -last10-METHOD, -all-exact, -calibrated and cityscapes-NET-pretrain. NET: "
        f"{', '.join(_SEGMENTERS)}. METHOD: {', '.join(_SEGMENT_METHODS)}."
    )


@cache
def _make_presets() -> Mapping[str, Preset]:
    published = _read_published()
    presets = [_make_pretrain(model) for model in _MODELS]
    for data, (recipe, layers) in _DATA.items():
        for model, plan, method in product(_MODELS, layers, _METHODS):
            name = f"{data}-{model}-{plan}-{method}"
            weights = {"weights": f"{_pretrain_folder(model)}/best.safetensors"} if data == "imagenet" else {}
            settings = {"data": data, "model": _MODELS[model], "plan": plan, **recipe, **weights, **_METHODS[method]}
            presets.append(Preset(name, MappingProxyType(settings), published.get(name)))
    presets += [preset for net in _SEGMENTERS for preset in _make_segmenters(net)]
    named = {preset.name: preset for preset in presets}
    named |= {short: replace(named[name], name=short) for short, name in _SHORT.items()}
    return MappingProxyType(named)


def _make_pretrain(model: str) -> Preset:
    settings = {"data": "imagenet", "model": _MODELS[model], **_PRETRAIN, "out": _pretrain_folder(model)}
    return Preset(f"imagenet-{model}-pretrain", MappingProxyType(settings))


def _make_segmenters(net: str) -> list[Preset]:
    """Return the recipes of a network: trained on Cityscapes, its classifier calibrated for VOC12Aug, then fine-tuned there."""
    decoder, encoder = _SEGMENTERS[net]
    before, calibrated = f"cityscapes-{net}-pretrain", f"voc12aug-{net}-calibrated"
    start = {"model": decoder, "encoder": encoder, "weights": f"runs/{calibrated}/best.safetensors"}
    found = {
        before: {**_CITYSCAPES, **start, "weights": "pretrained"},
        calibrated: {**_SEGMENT, **start, "weights": f"runs/{before}/best.safetensors", "plan": "head", "exact": True},
        f"voc12aug-{net}-all-exact": {**_SEGMENT, **start, **_WHOLE},
    }
    for layers, (method, choices) in product((5, 10), _SEGMENT_METHODS.items()):
        patches = {name: {"patch": patch} for name, patch in find_patches(decoder, encoder, layers).items()}
        plan = {"plan": json.dumps({"layers": patches})}
        found[f"voc12aug-{net}-last{layers}-{method}"] = {**_SEGMENT, **start, **plan, **choices}
    published = _read_published_masks()
    return [
        Preset(name, MappingProxyType({**settings, "out": f"runs/{name}"}), published.get(name))
        for name, settings in found.items()
    ]


def _pretrain_folder(model: str) -> str:
    return f"runs/imagenet-{model}-pretrain"


def _read_published() -> dict[str, Published]:
    found = {}
    for line in _PUBLISHED.strip().splitlines():
        paper, data, model, method, *cells = line.split()
        for layers, accuracy in zip(cells[::2], cells[1::2], strict=True):
            found[f"{data}-{model}-{layers}-{method}"] = Published(float(accuracy), _PAPERS[paper])
    return found


def _read_published_masks() -> dict[str, Published]:
    found = {}
    for line in _PUBLISHED_MASKS.strip().splitlines():
        net, *cells = line.split()
        numbers = [float(cell) for cell in cells]
        for column, mean_iou, class_accuracy in zip(_MASK_COLUMNS, numbers[::2], numbers[1::2], strict=True):
            found[f"voc12aug-{net}-{column}"] = Published(mean_iou, _PAPERS["GF"], class_accuracy)
    return found
