"""Gradients of the paper's segmentation networks, with its layers and patch sizes: how close, and what autograd holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.apply import apply_, freeze_, remove_
from gradfilter.bench.report import Report
from gradfilter.cost import count_saved
from gradfilter.data import IGNORE, MaskSet, load_masks, make_mask_transforms
from gradfilter.fidelity import Batch, compare, find_gradients
from gradfilter.models import find_info, make_model
from gradfilter.models.papers import NETS as PAPERS
from gradfilter.models.papers import find_patches
from gradfilter.plan import Backward, Plan
from gradfilter.train.batches import MaskRows, load, shuffle

PRETRAINED = "efficientnet-lite0"
NETS = PAPERS | {
    f"{name}-Lite0": (f"Paper{name}", PRETRAINED) for name in ("PSPNet", "DeepLabV3", "UPerNet")
}  # with an encoder that has weights; only decoders are trained, whose layers have the same names
DEPTHS = {"PSPNet-Lite0": (5,), "DeepLabV3-Lite0": (5,)}
RATE = 0.01
COLUMNS = ("cosine lift", "cosine lumped", "MB exact", "MB lift", "MB lumped", "exact / lift")


def measure(data: Path, label: str, batch: int, batches: int, pixels: int, steps: int, only: str = "") -> Report:
    """Return cosine and saved bytes for each network and depth, over several batches."""
    report = Report(
        f"segment-{label}",
        f"The paper's segmentation networks with its layers and patch sizes: {label}, batch {batch}, {pixels} px",
        f"python -m gradfilter.bench segment --data FOLDER --label {label} --batch {batch} --batches {batches} "
        f"--pixels {pixels} --steps {steps}",
        ("model", "layers", "patch sizes", *COLUMNS),
    )
    images = load_masks(str(data.absolute())).train
    for name in [name for name in NETS if only in name]:
        model, seen = make_calibrated(NETS[name], images, batch, pixels, steps)
        drawn = [next(seen) for _ in range(batches)]
        for layers in DEPTHS.get(name, (5, 10)):
            patches = find_layers(NETS[name], layers)
            report.rows.append((name, layers, describe(patches), *measure_net(model, patches, drawn)))
    report.remarks = [
        "Cosine to the exact gradient of the 5 or 10 layers together: their weights, and the affine of the batch norms behind "
        f"them; mean over {batches} batches of photographs. MB are what autograd really holds at the end of the loss; exact is "
        "torch's own backprop of the same layers. The classifier is trained too, and filtered as the layer before it is.",
        "Lite0 is EfficientNet-Lite0 with its ImageNet weights in front of the paper's decoders; ResNet18 (R18) and "
        "MobileNetV2 (MBV2) have random weights. Batch norms without pretrained statistics have those of these photographs. "
        f"The classifier of each was trained alone for {steps} steps (Adam, {RATE}) beforehand, as the paper does; decoders "
        "are untrained.",
    ]
    return report


def find_layers(net: tuple[str, str], layers: int) -> dict[str, int]:
    """Return the patch sizes of the layers that are trained."""
    decoder, encoder = net
    return find_patches(decoder, "resnet18" if encoder == PRETRAINED else encoder, layers)


def describe(patches: dict[str, int]) -> str:
    """Return patch sizes, in the order of the plan, those of the decoder first; the classifier's is left out."""
    return ", ".join(f"{name.removesuffix('*')} {patch}" for name, patch in patches.items() if name != "segmentation_head")


def make_calibrated(
    net: tuple[str, str], images: MaskSet, batch: int, pixels: int, steps: int
) -> tuple[nn.Module, Iterator[Batch]]:
    """Return a network whose classifier is trained, and batches that it has not seen."""
    weights = "pretrained" if net[1] == PRETRAINED else None
    model = make_model(net[0], encoder=net[1], weights=weights, classes=len(images.classes))
    seen = draw(images, batch, pixels, net[1])
    set_norms_(model, model if weights is None else model.get_submodule("decoder"), [next(seen)[0] for _ in range(4)])
    freeze_(model, Plan.last(0))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for _ in range(steps):
        x, labels = next(seen)
        optimizer.zero_grad()
        find_loss(model(x), labels).backward()
        optimizer.step()
    model.zero_grad()
    return model, seen


def set_norms_(model: nn.Module, part: nn.Module, inputs: list[Tensor]) -> None:
    """Give the batch norms of a part of a model the statistics of what they see, in place; leave the model in eval mode."""
    model.eval()
    norms = [m for m in part.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().reset_running_stats()
        norm.momentum = None  # the mean over all that is seen
    with torch.no_grad():
        for x in inputs:
            model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum


def draw(images: MaskSet, batch: int, pixels: int, encoder: str) -> Iterator[Batch]:
    """Give batches of images and labels without end."""
    info = find_info("unet", encoder)
    transform, _ = make_mask_transforms(pixels, info.mean, info.std, "none", True)
    epoch = 0
    while True:
        order = shuffle(len(images), 0, epoch)[: len(images) // batch * batch]
        for _, x, labels in load(MaskRows(images, transform, 0), order.split(batch), 0):
            yield x, labels
        epoch += 1


def measure_net(model: nn.Module, patches: dict[str, int], batches: list[Batch]) -> Iterator[str]:
    """Give the cells of a row: `COLUMNS`."""
    exact_model = freeze_(remove_(model), make_plan(patches)).train()
    exact = [find_gradients(exact_model, batch, find_loss) for batch in batches]
    held = {"exact": find_held(exact_model, batches[0])}
    names = [name for name in exact[0] if not name.startswith("segmentation_head.")]
    cosines: dict[str, float] = {}
    for kernel in ("lift", "lumped"):
        apply_(model, make_plan(patches, kernel)).train()
        found = [find_gradients(model, batch, find_loss) for batch in batches]
        cosines[kernel] = statistics.mean(compare(*pair, names).cosine for pair in zip(found, exact, strict=True))
        held[kernel] = find_held(model, batches[0])
    yield from (f"{cosine:.3f}" for cosine in cosines.values())
    yield from (f"{size / 1e6:.2f}" for size in held.values())
    yield f"{held['exact'] / held['lift']:.1f}"


def make_plan(patches: dict[str, int], kernel: Literal["lift", "lumped"] = "lift") -> Plan:
    """Return the plan of these patch sizes."""
    return Plan({name: Backward(patch=patch, kernel=kernel) for name, patch in patches.items()})


def find_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of the pixels that count."""
    return F.cross_entropy(logits, labels, ignore_index=IGNORE)


def find_held(model: nn.Module, batch: Batch) -> int:
    """Return the bytes that autograd holds at the end of the loss."""
    x, labels = batch
    return count_saved(lambda: find_loss(model(x), labels), [*model.parameters(), *model.buffers(), x, labels])
