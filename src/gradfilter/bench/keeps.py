"""What keeps cost and save: steps and saved bytes beside exact backprop, and the time to compress beside full SVDs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gradfilter.apply import apply_, freeze_
from gradfilter.bench.fidelity import find_class, find_images, load_image
from gradfilter.bench.report import Report
from gradfilter.bench.setup import EXACT, shake_
from gradfilter.cost import Trial, make_sgd, measure_saved_bytes
from gradfilter.cost_table import Seconds
from gradfilter.keep import HOSVD, SVD, Int8, Keep, State, Subspace
from gradfilter.keep.tucker import unfold
from gradfilter.loss import StepLoss
from gradfilter.measure import find_time, median, take_turns
from gradfilter.models import find_info, make_model
from gradfilter.plan import Backward, Plan, find_last

METHODS: dict[str, Backward | None] = {
    EXACT: None,
    "lift, patch 2": Backward(patch=2),
    "patch 1": Backward(patch=1),
    "HOSVD 0.8": Backward(patch=1, keep=HOSVD(0.8)),
    "Subspace 0.8": Backward(patch=1, keep=Subspace(energy=0.8)),
    "SVD 0.8": Backward(patch=1, keep=SVD(0.8)),
    "Int8": Backward(patch=1, keep=Int8()),
    "lift, patch 2 × Int8": Backward(patch=2, keep=Int8()),
    "lift, patch 2 × HOSVD 0.8": Backward(patch=2, keep=HOSVD(0.8)),
}
COMPRESSED: dict[str, Keep] = {
    "HOSVD 0.8": HOSVD(0.8),
    "Subspace 0.8": Subspace(energy=0.8),
    "SVD 0.8": SVD(0.8),
    "Int8": Int8(),
}
FULL_SVDS = "full SVDs"
DEPTHS = (2, 4)
SIZES = {"resnet18": (32, 224)}
"""Images per batch and their pixels by model; those of the papers' MCUNet for all others."""
USUAL_SIZE = (128, 176)


def measure(
    data: Path, label: str, model: str, weights: str, batch: int | None, pixels: int | None, rounds: int, threads: int
) -> list[Report]:
    """Return two tables: the step and what it holds by method, and the time to compress the inputs by layer."""
    torch.set_num_threads(threads)
    usual = SIZES.get(model, USUAL_SIZE)
    batch, pixels = batch or usual[0], pixels or usual[1]
    images, labels, classes = load_batch(data, model, batch, pixels)
    network = make_network(model, weights, classes)
    is_random = weights == "random"
    where = (
        f"{model}, {'random' if is_random else 'ImageNet'} weights, {label}, batch {len(images)}, {pixels} px, "
        f"{threads} thread(s)"
    )
    command = (
        f"python -m gradfilter.bench keeps --data FOLDER --label {label} --model {model} "
        f"--weights {'random' if is_random else 'FILE'} --batch {batch} --pixels {pixels} --rounds {rounds} --threads {threads}"
    )
    return [
        measure_steps(Report(f"keeps-{model}", f"Keeps: {where}", command, ()), network, images, labels, rounds),
        measure_overhead(Report(f"keeps-overhead-{model}", f"Time to compress: {where}", command, ()), network, images, rounds),
    ]


def load_batch(data: Path, model: str, batch: int, pixels: int) -> tuple[Tensor, Tensor, int]:
    """Return images drawn from a folder, channels last, their labels, and how many classes there are."""
    files, info = find_images(data), find_info(model)
    classes = sorted({find_class(file) for file in files})
    chosen = [files[i] for i in np.random.default_rng(0).permutation(len(files))[:batch]]
    images = torch.stack([load_image(file, pixels, info) for file in chosen])
    labels = torch.tensor([classes.index(find_class(file)) for file in chosen])
    return images.contiguous(memory_format=torch.channels_last), labels, len(classes)


def make_network(model: str, weights: str, classes: int) -> nn.Module:
    """Return a model in training mode, channels last; one without weights gets batch norms as training would give it."""
    start = None if weights == "random" else weights
    network = make_model(model, weights=start, classes=classes, generator=torch.Generator().manual_seed(0))
    network = network if start else shake_(network)
    return network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]


def measure_steps(report: Report, network: nn.Module, images: Tensor, labels: Tensor, rounds: int) -> Report:
    """Fill the table of steps: for each depth all methods take turns."""
    report.columns = (
        "trained",
        "method",
        "MB held",
        "times fewer",
        "step / exact",
        "forward / exact",
        "backward / exact",
        "ms",
    )
    for depth in DEPTHS:
        trials = {method: make_trial(network, depth, choices, images, labels) for method, choices in METHODS.items()}
        held = {method: measure_saved_bytes(trial.model, images) for method, trial in trials.items()}
        times = take_turns({method: trial.step for method, trial in trials.items()}, rounds)
        for method, own in times.items():
            figures = [f"{held[method] / 1e6:.2f}", f"{held[EXACT] / held[method]:.1f}"]
            figures += [f"{find_ratio(own, times[EXACT], part):.2f}" for part in ("step", "forward", "backward")]
            report.rows.append((f"last {depth}", method, *figures, f"{1e3 * median([seconds.step for seconds in own]):.0f}"))
    report.remarks = [
        "Trained: the last convolutions and the classifier; all methods run the frozen layers before them alike. MB held: all "
        "that autograd holds after forward, measured (parameters and buffers excluded). Step: forward and loss, backward, SGD "
        f"update. Ratios: median of {rounds} rounds in which all methods take turns, each within one round; forward and "
        "backward to exact's own. One batch, over and over: Subspace has chosen its ranks on it, so they are "
        "HOSVD's, and so are its bytes.",
    ]
    return report


def make_trial(network: nn.Module, depth: int, choices: Backward | None, images: Tensor, labels: Tensor) -> Trial:
    """Return a copy of the network that trains its last layers one way, ready to step."""
    twin = copy.deepcopy(network)
    if choices is None:
        freeze_(twin, Plan.last(depth))
    else:
        apply_(twin, Plan.last(depth, choices))
    optimizer = make_sgd([p for p in twin.parameters() if p.requires_grad])
    return Trial(twin, images, StepLoss(None, labels), optimizer)


def find_ratio(own: Sequence[Seconds], others: Sequence[Seconds], part: str) -> float:
    """Return the median over rounds of how long a part of the step takes beside another's."""
    return median([getattr(a, part) / getattr(b, part) for a, b in zip(own, others, strict=True)])


def measure_overhead(report: Report, network: nn.Module, images: Tensor, rounds: int) -> Report:
    """Fill the table of the time that it takes to compress the inputs of the last convolutions, layer by layer."""
    report.columns = ("layer", "input", f"{FULL_SVDS}, ms", *(f"{name}, ms" for name in COMPRESSED), "SVDs / HOSVD")
    inputs = find_inputs(network, max(DEPTHS), images)
    runs: dict[str, list[Callable[[], object]]] = {FULL_SVDS: [partial(decompose_fully, x) for x in inputs.values()]}
    for name, keep in COMPRESSED.items():
        runs[name] = [partial(keep.compress, x, State(layer)) for layer, x in inputs.items()]
    times = take_turns({name: partial(time_each, these, images) for name, these in runs.items()}, rounds)
    for number, (layer, x) in enumerate(inputs.items()):
        seconds = {name: [turn[number] for turn in turns] for name, turns in times.items()}
        report.rows.append((layer, "×".join(map(str, x.shape)), *find_figures(seconds)))
    total = {name: [sum(turn) for turn in turns] for name, turns in times.items()}
    report.rows.append((f"last {len(inputs)}", "", *find_figures(total)))
    report.remarks = [
        f"The inputs of the last {len(inputs)} convolutions in a forward pass. Full SVDs: torch.linalg.svd, "
        f"full_matrices=False, of all four unfoldings. Subspace is past its first batch. Medians of {rounds} rounds in which "
        "all take turns; SVDs / HOSVD: median of the ratios within each round.",
    ]
    return report


def find_inputs(network: nn.Module, depth: int, images: Tensor) -> dict[str, Tensor]:
    """Return the inputs of the last convolutions in a forward pass, by layer."""
    inputs: dict[str, Tensor] = {}
    network, names = copy.deepcopy(network), find_last(network, depth)
    layers = {name: layer for name, layer in network.named_modules() if name in names and isinstance(layer, nn.Conv2d)}

    def note(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name] = args[0].clone(memory_format=torch.preserve_format)  # whoever comes later may write into it

    for name, layer in layers.items():
        layer.register_forward_pre_hook(partial(note, name))
    with torch.no_grad():
        network.eval()(images)
    return inputs


def decompose_fully(x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the singular value decompositions of all unfoldings, as HOSVD is written in the papers."""
    return [torch.linalg.svd(unfold(x, mode), full_matrices=False) for mode in range(x.dim())]


def time_each(runs: Sequence[Callable[[], object]], images: Tensor) -> list[float]:
    """Return the seconds of each of several runs, one after the other."""
    times = [find_time(images)]
    for run in runs:
        run()
        times.append(find_time(images))
    return [b - a for a, b in pairwise(times)]


def find_figures(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the cells of a row: milliseconds of the full SVDs and of each keep, and how many HOSVDs the SVDs take."""
    ratio = median([a / b for a, b in zip(seconds[FULL_SVDS], seconds["HOSVD 0.8"], strict=True)])
    return [*(f"{1e3 * median(list(seconds[name])):.2f}" for name in (FULL_SVDS, *COMPRESSED)), f"{ratio:.1f}"]
