"""Filtered gradients in a training loop of one's own: two lines more than without.

EfficientNet-Lite0 learns scikit-learn's digits, 320 of them, in ten steps of 32.

    python examples/own_loop.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import gradfilter as gf
from gradfilter.cost import measure_saved_bytes
from gradfilter.data import load_data, make_transforms
from gradfilter.models import find_info, make_model

MODEL, PIXELS = "efficientnet-lite0", 96


def main() -> None:
    """Train, and print the loss and what autograd holds."""
    info, digits = find_info(MODEL), load_data("digits").train
    transform, _ = make_transforms(PIXELS, info.mean, info.std, "none", flips=False)
    model = make_model(MODEL, weights="pretrained", classes=10, generator=torch.Generator().manual_seed(0))
    gf.freeze_(model, gf.Plan.all())  # what a plan freezes, with torch's own backward: the exact twin
    images = torch.stack([transform(digits.read(i)) for i in range(320)])
    exact = measure_saved_bytes(model, images[:32])

    gf.apply_(model, gf.Plan.all(gf.Backward(grid=4)))
    filtered = measure_saved_bytes(model, images[:32])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for rows in torch.randperm(320, generator=torch.Generator().manual_seed(0)).split(32):
        loss = F.cross_entropy(model(images[rows]), torch.tensor(digits.labels)[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        print(f"loss {loss.item():.3f}")
    print(f"autograd held {filtered / 1e6:.1f} MB per step; exact backprop would hold {exact / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
