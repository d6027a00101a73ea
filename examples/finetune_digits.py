"""Fine-tune a pretrained network on real images with filtered gradients, beside exact backprop.

EfficientNet-Lite0 with its ImageNet weights learns scikit-learn's digits: 1,797 real scans of 8×8 pixels, here upscaled to
96×96, because no package carries larger images. The point is not the accuracy, which any method reaches on digits, but what it
costs: both runs train the same layers from the same start on the same batches, and the bytes that autograd holds are measured.

    python examples/finetune_digits.py [--patch 2 | --grid 4] [--last 8] [--epochs 2]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.cost import measure_saved_bytes
from gradfilter.models import find_models, make_model

MODEL = "efficientnet-lite0"
PIXELS = 96
BATCH = 32


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return train images and labels, test images and labels: a seeded split, images normalised for the model."""
    from sklearn import datasets

    digits = datasets.load_digits()
    info = find_models()[MODEL]
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, PIXELS, mode="bilinear").expand(-1, 3, -1, -1)
    images = (images - torch.tensor(info.mean)[:, None, None]) / torch.tensor(info.std)[:, None, None]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:960], order[1280:]
    return images[train], labels[train], images[test], labels[test]


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the model gets right."""
    model.eval()
    with torch.inference_mode():
        right = [(model(x).argmax(1) == y).sum() for x, y in zip(images.split(64), labels.split(64), strict=True)]
    return float(sum(right)) / len(labels)


def main() -> None:
    """Train side by side, one batch each in turn, and print the comparison."""
    parser = argparse.ArgumentParser(description="Fine-tune on digits: filtered gradients beside exact ones.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--patch", type=int, help="side of the patch in pixels of each layer's map")
    size.add_argument("--grid", type=int, help="patches per side at every resolution (default 4)")
    parser.add_argument("--last", type=int, default=8, help="how many convolutions to train (default 8)")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    images, labels, test_images, test_labels = load_digits()
    start = make_model(MODEL, weights="pretrained", classes=10, generator=torch.Generator().manual_seed(0))
    methods = {"exact": gf.Backward(patch=1), "gradfilter": gf.Backward(patch=args.patch, grid=args.grid)}
    models, optimizers, saved = {}, {}, {}
    for name, backward in methods.items():
        model = gf.apply_(copy.deepcopy(start), gf.Plan.last(args.last, backward))
        saved[name] = measure_saved_bytes(model.train(), images[:BATCH])
        models[name], optimizers[name] = model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    plain = freeze_like(copy.deepcopy(start), models["exact"])
    saved["exact"] = measure_saved_bytes(plain, images[:BATCH])
    models["exact"], optimizers["exact"] = plain, torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9)

    print(f"{MODEL}, ImageNet weights, last {args.last} convolutions and the classifier, {methods['gradfilter']}")
    print(f"{len(labels)} digits for training, {len(test_labels)} for testing, upscaled from 8×8 to {PIXELS}×{PIXELS}")
    print(f"before: {accuracy(start, test_images, test_labels):.1%} right\n")
    seconds: dict[str, list[float]] = {name: [] for name in models}
    generator = torch.Generator().manual_seed(1)
    for epoch in range(args.epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            for name, model in models.items():
                begin = time.perf_counter()
                loss = F.cross_entropy(set_training(model)(images[batch]), labels[batch])
                optimizers[name].zero_grad()
                loss.backward()
                optimizers[name].step()
                seconds[name].append(time.perf_counter() - begin)
        print(f"epoch {epoch + 1} of {args.epochs}", file=sys.stderr)

    print(f"{'':12}{'accuracy':>10}{'held by autograd':>20}{'step time':>12}")
    for name, model in models.items():
        right = accuracy(model, test_images, test_labels)
        print(f"{name:12}{right:>10.1%}{saved[name] / 1e6:>17.2f} MB{statistics.median(seconds[name]) * 1e3:>9.0f} ms")
    ratios = [a / b for a, b in zip(seconds["gradfilter"], seconds["exact"], strict=True)]
    print(f"\ngradfilter holds {saved['exact'] / saved['gradfilter']:.1f}x fewer bytes; a step takes "
          f"{statistics.median(ratios):.2f} of the time of exact backprop (median of {len(ratios)} alternating steps).")  # fmt: skip


def freeze_like(model: nn.Module, other: nn.Module) -> nn.Module:
    """Train the same parameters of a plain model, with torch's own backward, as the other trains."""
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        parameter.requires_grad_(twin.requires_grad)
    return set_training(model)


def set_training(model: nn.Module) -> nn.Module:
    """Put a model in training mode with batch norms in eval mode, as a plan does."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


if __name__ == "__main__":
    main()
