"""What a training step costs beside exact backprop of the same layers, measured on the user's own model and images."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from gradfilter.apply import freeze_, remove_
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.environment import find_free_memory
from gradfilter.loss import Loss, StepLoss
from gradfilter.measure import MOST_SHARE, find_time, median, take_turns
from gradfilter.plan import Plan
from gradfilter.report.results import Cost
from gradfilter.train.feed import untouched


def measure_cost(model: nn.Module, plan: Plan, images: Tensor, labels: Tensor, loss: Loss) -> Cost:
    """Measure saved bytes and the time of a step of the model as it is, and of exact backprop of what the plan trains.

    Saved bytes are with those of the loss, which are most of all where every pixel has a label.
    Both take turns in one process, and the ratio is the median over rounds. Where an exact step might not fit into memory, its
    bytes are predicted (they are the measured ones to the byte) and its time is unknown.
    """
    exact = freeze_(remove_(copy.deepcopy(model)), plan).train()
    twin = copy.deepcopy(model).train()
    with untouched(exact), untouched(twin):
        bound = StepLoss(loss, labels)
        saved, exact_saved = measure_saved_bytes(twin, images, loss=bound), predict_saved_bytes(exact, images, loss=bound)
        fits = exact_saved < MOST_SHARE * find_free_memory()
        runs = {"step": lambda: time_step(twin, images, labels, loss), "inference": lambda: time_inference(twin, images)}
        if fits:
            exact_saved = measure_saved_bytes(exact, images, loss=bound)
            runs["exact"] = lambda: time_step(exact, images, labels, loss)
        times = take_turns(runs)
    ratio = [a / b for a, b in zip(times["step"], times.get("exact", []), strict=False)]
    return Cost(
        batch=len(images),
        resolution=images.shape[-1],
        saved_bytes=saved,
        exact_saved_bytes=exact_saved,
        step_ratio=median(ratio),
        step_seconds=median(times["step"]),
        exact_step_seconds=median(times.get("exact", [])),
        inference_seconds=median(times["inference"]),
    )


def time_step(model: nn.Module, images: Tensor, labels: Tensor, loss: Loss) -> float:
    """Return the seconds of forward, loss and backward."""
    start = find_time(images)
    loss(model.train()(images), labels).backward()
    seconds = find_time(images) - start
    model.zero_grad()
    return seconds


def time_inference(model: nn.Module, images: Tensor) -> float:
    """Return the seconds of a forward pass in eval mode."""
    model.eval()
    start = find_time(images)
    with torch.inference_mode():
        model(images)
    return find_time(images) - start
