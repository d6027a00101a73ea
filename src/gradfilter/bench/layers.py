"""The backward of one convolution after the other, against torch's exact one and against what must be read and written."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradfilter.apply import apply_
from gradfilter.bench.report import Report
from gradfilter.bench.setup import parse_backward
from gradfilter.geometry.axes import Axis
from gradfilter.geometry.convolution import Geometry, make_geometry
from gradfilter.geometry.tiling import Pair, count_cells
from gradfilter.measure import take_turns
from gradfilter.ops.conv_backward import conv_gradients
from gradfilter.ops.pooling import pool_mean, pool_sum
from gradfilter.plan import Plan

KERNEL = 3
METHODS = ("patch 2", "patch 4", "patch 7", "patch 2 lumped", "patch 4 lumped")
LONE = ("patch 2", "patch 4", "patch 7")
LAYOUTS = {"channels last": torch.channels_last, "channels first": torch.contiguous_format}
Run = Callable[[], Any]


class Layer(NamedTuple):
    """A 3×3 convolution with stride 1 and padding 1, of as many channels as it has inputs."""

    channels: int
    size: Pair

    def __str__(self) -> str:
        """Return how reports name it."""
        return f"{self.channels} ch, {self.size[0]}×{self.size[1]}"


LAYERS = (
    Layer(128, (120, 160)),
    Layer(256, (60, 80)),
    Layer(512, (30, 40)),
    Layer(512, (14, 14)),
    Layer(256, (14, 14)),
    Layer(128, (28, 28)),
    Layer(64, (56, 56)),
)
"""Those on which the gradient-filtering paper measures its speed."""


def measure(layers: Sequence[Layer], batch: int, rounds: int, threads: Sequence[int]) -> list[Report]:
    """Return two reports: gradients at patch resolution, and a lone layer with gradients of pixels on both sides."""
    command = f"python -m gradfilter.bench layers --batch {batch} --rounds {rounds} --threads {' '.join(map(str, threads))}"
    coarse = Report(
        "layers",
        f"Backward of 3×3 convolutions at patch resolution, batch {batch}",
        command,
        (
            "layer",
            "threads",
            "method",
            "times faster than exact",
            "times fewer products",
            "share",
            "time / two products",
            "exact layout",
        ),
    )
    lone = Report(
        "layers-alone",
        f"Backward of a lone 3×3 convolution, gradients of pixels on both sides, batch {batch}",
        command,
        ("layer", "threads", "method", "time / bound", "bound's product share", "times faster than exact"),
    )
    for layer in layers:
        data = make_data(layer, batch)
        for count in threads:
            torch.set_num_threads(count)
            add_rows(coarse, lone, layer, count, *data, rounds)
    coarse.remarks = [
        "Exact: torch's convolution_backward, in the layout that is faster. Ours: the coarse twin from kept patch means and "
        "patch sums of the output's gradient, channels last. Both give the gradients of input and weight. Share: times faster "
        "by times fewer multiplications, patches cut off by the border counted whole. Two products: the lumped kernel's, "
        "by torch and by themselves, on matrices of their sizes: what is left of its backward.",
        f"Medians of {rounds} ratios, each within one round.",
    ]
    lone.remarks = [
        "Bound: the time to read gy once (its sum), to write gx once (a fill of new memory), and of the coarse product.",
        f"Medians of {rounds} ratios, each within one round.",
    ]
    return [coarse, lone]


def make_data(layer: Layer, batch: int) -> tuple[Tensor, Tensor, nn.Conv2d]:
    """Return random input and gradient of the output, channels last, and the layer itself."""
    generator = torch.Generator().manual_seed(0)
    shape = batch, layer.channels, *layer.size
    x, gy = (torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last) for _ in range(2))
    conv = nn.Conv2d(layer.channels, layer.channels, KERNEL, padding=1, bias=False)
    with torch.no_grad():
        conv.weight.normal_(0, 0.05, generator=generator)
    return x, gy, conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def add_rows(
    coarse: Report, lone: Report, layer: Layer, threads: int, x: Tensor, gy: Tensor, conv: nn.Conv2d, rounds: int
) -> None:
    """Measure one layer at one number of threads."""
    exact = {name: make_exact(x, gy, conv.weight, layout) for name, layout in LAYOUTS.items()}
    trial = time_rounds(exact, 1)
    layout = min(trial, key=lambda name: trial[name][0])
    geometries = {method: find_geometry(layer, method) for method in METHODS}
    runs: dict[str, Run] = {"exact": exact.pop(layout)}
    exact.clear()  # the slower layout's copies
    runs |= {method: make_coarse(x, gy, conv.weight, geometry) for method, geometry in geometries.items()}
    lumped = {method: geometry for method, geometry in geometries.items() if geometry.lumped}
    runs |= {f"{method}, products": make_products(x, geometry) for method, geometry in lumped.items()}
    runs |= {f"{method}, alone": make_lone(x, gy, conv, method) for method in LONE}
    runs |= {"read": gy.sum, "write": lambda: torch.full_like(x, 0.5)}
    times = time_rounds(runs, rounds)
    for method, geometry in geometries.items():
        faster, fewer = median_ratio(times["exact"], times[method]), find_ratio(layer, geometry)
        bound = f"{median_ratio(times[method], times[f'{method}, products']):.2f}" if geometry.lumped else "–"
        figures = f"{faster:.2f}", f"{fewer:.2f}", f"{faster / fewer:.2f}", bound
        coarse.rows.append((str(layer), threads, method, *figures, layout))
    for method in LONE:
        bounds = [sum(parts) for parts in zip(times["read"], times["write"], times[method], strict=True)]
        alone = times[f"{method}, alone"]
        ratios = (alone, bounds), (times[method], bounds), (times["exact"], alone)
        lone.rows.append((str(layer), threads, method, *(f"{median_ratio(*pair):.2f}" for pair in ratios)))


def find_geometry(layer: Layer, method: str) -> Geometry:
    """Return the geometry of a layer under a method."""
    choice = parse_backward(method)
    assert isinstance(choice.patch, int)
    rows, columns = (Axis(KERNEL, 1, 1, 1, n, n, min(choice.patch, n), min(choice.patch, n)) for n in layer.size)
    return make_geometry(rows, columns, 1, choice.kernel == "lumped")


def find_ratio(layer: Layer, geometry: Geometry) -> float:
    """Return how many times fewer multiplications the coarse twin has than the convolution."""
    cells = count_cells(layer.size, geometry.out_patch)
    taps = KERNEL**2 if geometry.lumped else 1
    return taps * layer.size[0] * layer.size[1] / (cells[0] * cells[1])


def make_exact(x: Tensor, gy: Tensor, w: Tensor, layout: torch.memory_format) -> Run:
    """Return torch's backward of the layer in a layout."""
    x, gy, w = (t.detach().contiguous(memory_format=layout) for t in (x, gy, w))
    geometry = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    return lambda: torch.ops.aten.convolution_backward(gy, x, w, None, *geometry)


def make_coarse(x: Tensor, gy: Tensor, w: Tensor, geometry: Geometry) -> Run:
    """Return the backward of the coarse twin."""
    kept, g, w = pool_mean(x, geometry.out_patch), pool_sum(gy, geometry.out_patch), w.detach()
    return torch.no_grad()(lambda: conv_gradients(g, kept, w, geometry, need_gx=True))


def make_products(x: Tensor, geometry: Geometry) -> Run:
    """Return the two matrix products of the lumped kernel, of cells with channels and with themselves."""
    generator = torch.Generator().manual_seed(1)
    rows, channels = x.shape[0] * geometry.out_cells[0] * geometry.out_cells[1], x.shape[1]
    g, kept = (torch.randn(rows, channels, generator=generator) for _ in range(2))
    w = torch.randn(channels, channels, generator=generator)
    return lambda: (g @ w, g.t() @ kept)


def make_lone(x: Tensor, gy: Tensor, conv: nn.Conv2d, method: str) -> Run:
    """Return the backward of the layer as a region of its own: its gradients enter and leave as those of pixels."""
    model = nn.Sequential(nn.Conv2d(conv.in_channels, conv.out_channels, KERNEL, padding=1, bias=False))
    model.load_state_dict({"0.weight": conv.weight})
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    apply_(model.train(), Plan.all(parse_backward(method)))
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    return lambda: torch.autograd.grad(y, [leaf, model[0].weight], gy, retain_graph=True)  # type: ignore[list-item]


def time_rounds(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run in rounds in which all take turns."""

    def find_seconds(run: Run) -> float:
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        del result  # only now: glibc may give all that was freed before back to the system on the way, a few milliseconds
        return seconds

    return take_turns({name: partial(find_seconds, run) for name, run in runs.items()}, rounds)


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of two runs, round by round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
