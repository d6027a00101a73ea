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
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.cost import measure_saved_bytes
from gradfilter.models import find_models, make_model

MODEL = "efficientnet-lite0"
PIXELS = 96
BATCH = 32


def load_digits(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `count` train images and their labels, test images and labels: a seeded split, normalised for the model."""
    from sklearn import datasets

    digits: Any = datasets.load_digits()
    info = find_models()[MODEL]
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, PIXELS, mode="bilinear").expand(-1, 3, -1, -1)
    images = (images - torch.tensor(info.mean)[:, None, None]) / torch.tensor(info.std)[:, None, None]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: min(count, 1280)], order[1280:]
    images = images.contiguous(memory_format=torch.channels_last)
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
    parser.add_argument("--last", type=int, help="train only so many convolutions and the classifier (default: all layers)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=960, help="how many digits to learn from, of 1,280 (default 960)")
    args = parser.parse_args()

    images, labels, test_images, test_labels = load_digits(args.images)
    start = make_model(MODEL, weights="pretrained", classes=10, generator=torch.Generator().manual_seed(0))
    start.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    backward = gf.Backward(patch=args.patch, grid=args.grid)
    plan = gf.Plan.all(backward) if args.last is None else gf.Plan.last(args.last, backward)
    filtered = gf.apply_(copy.deepcopy(start), plan)
    runs = {"exact": Run(freeze_like(copy.deepcopy(start), filtered)), "gradfilter": Run(filtered)}

    trained = "all layers" if args.last is None else f"the last {args.last} convolutions and the classifier"
    print(f"{MODEL} from ImageNet weights, training {trained}, {backward}, batch {BATCH}")
    print(f"{len(labels)} digits to learn, {len(test_labels)} to test, scans of 8×8 pixels upscaled to {PIXELS}×{PIXELS}")
    print(f"right before training: {accuracy(start, test_images, test_labels):.1%}\n")
    generator = torch.Generator().manual_seed(1)
    steps = args.epochs * -(-len(labels) // BATCH)
    for epoch in range(args.epochs):
        for i, batch in enumerate(torch.randperm(len(labels), generator=generator).split(BATCH)):
            rate = 0.01 * (1 - (epoch * steps // args.epochs + i) / steps)
            losses = {name: run.step(images[batch], labels[batch], rate) for name, run in runs.items()}
        print(f"epoch {epoch + 1} of {args.epochs}: loss " + ", ".join(f"{k} {v:.3f}" for k, v in losses.items()))

    saved = {name: measure_saved_bytes(set_training(run.model), images[:BATCH]) for name, run in runs.items()}
    print(f"\n{'':12}{'accuracy':>10}{'held by autograd':>20}{'step time':>12}")
    for name, run in runs.items():
        right, time_ms = accuracy(run.model, test_images, test_labels), 1e3 * statistics.median(run.seconds)
        print(f"{name:12}{right:>10.1%}{saved[name] / 1e6:>17.1f} MB{time_ms:>9.0f} ms")
    ratio = statistics.median(a / b for a, b in zip(runs["gradfilter"].seconds, runs["exact"].seconds, strict=True))
    print(
        f"\ngradfilter holds {saved['exact'] / saved['gradfilter']:.1f}x fewer bytes, and a step takes {ratio:.2f} of the time "
        f"of exact backprop (median of {steps} alternating steps)."
    )


class Run:
    """One model in training, and how long its steps took."""

    def __init__(self, model: nn.Module) -> None:
        """Start with a fresh optimizer."""
        self.model = model
        self.seconds: list[float] = []
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor, rate: float) -> float:
        """Train on one batch with the papers' gradient clip; return the loss."""
        begin = time.perf_counter()
        loss = F.cross_entropy(set_training(self.model)(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 2.0)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begin)
        return float(loss.detach())


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
