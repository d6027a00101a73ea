"""The time of a training step, as a ratio to inference and to exact backprop, alternating in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.bench.report import Report
from gradfilter.bench.setup import EXACT, INFERENCE, make_batch, prepare
from gradfilter.models import make_model

METHODS = (INFERENCE, EXACT, "patch 2", "patch 4", "grid 4", "patch 2 lumped")


def measure(model: str, batch: int, pixels: int, rounds: int, threads: int) -> Report:
    """Return the step time by method: medians over rounds in which all methods take turns."""
    torch.set_num_threads(threads)
    report = Report(
        f"step-{model}",
        f"Time of a training step: {model}, all layers, batch {batch}, {pixels} px, {threads} thread(s)",
        f"python -m gradfilter.bench step --model {model} --batch {batch} --pixels {pixels} --threads {threads}",
        ("method", "step / inference", "step / exact", "forward / inference", "backward / inference"),
    )
    images, labels = make_batch(batch, pixels)
    runs = {method: make_run(make_model(model), method, images, labels) for method in METHODS}
    times: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for turn in range(rounds + 1):
        for method, run in runs.items():
            result = run()
            if turn:  # the first round warms up
                times[method].append(result)

    def ratio(method: str, base: str, part: Callable[[tuple[float, float]], float]) -> str:
        return f"{statistics.median(part(a) / sum(b) for a, b in zip(times[method], times[base], strict=True)):.2f}"

    for method in METHODS:
        parts = [ratio(method, INFERENCE, lambda t, i=i: t[i]) for i in (0, 1)]
        report.rows.append((method, ratio(method, INFERENCE, sum), ratio(method, EXACT, sum), *parts))
    report.remarks = [
        "Inference: eager eval-mode forward of the unmodified model under inference_mode. Step: forward, loss, backward, SGD "
        f"update. Channels last on all sides; median of {rounds} ratios, each within one round.",
    ]
    return report


def make_run(network: nn.Module, method: str, images: Tensor, labels: Tensor) -> Callable[[], tuple[float, float]]:
    """Return a function that does one step and tells the seconds of its forward and of the rest."""
    network = prepare(network.to(memory_format=torch.channels_last), method)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def infer() -> tuple[float, float]:
        start = time.perf_counter()
        with torch.inference_mode():
            network(images)
        return time.perf_counter() - start, 0.0

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        loss = F.cross_entropy(network(images), labels)
        middle = time.perf_counter()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return middle - start, time.perf_counter() - middle

    return infer if method == INFERENCE else step
