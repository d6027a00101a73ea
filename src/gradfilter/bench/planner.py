"""The planner against plans that a user would try by hand, on photographs that it did not see."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gradfilter.apply import apply_, freeze_
from gradfilter.bench.fidelity import find_class, find_images, load_image
from gradfilter.bench.report import Report
from gradfilter.cost import measure_saved_bytes
from gradfilter.fidelity import find_gradients
from gradfilter.keep import FULL, parse_keep
from gradfilter.models import find_info, make_model
from gradfilter.plan import Backward, Plan, find_layers
from gradfilter.planner import Outlook
from gradfilter.survey import MEMORY
from gradfilter.units import show_amount

SIZES = (*(Backward(patch=r) for r in (1, 2)), *(Backward(grid=n) for n in (1, 2, 4, 7, 14)))
KEEPS = ("full", "int8")
DEPTHS = (0, 4, 16)
BUDGETS = 5
"""So many budgets, evenly spread over two decades."""

Batch = tuple[Tensor, Tensor]
Gradients = Mapping[str, Tensor]


def measure(data: Path, label: str, model: str, weights: str, batch: int, batches: int, pixels: int) -> Report:
    """Return, for budgets over two decades, the plan that was chosen beside its rivals that hold no more bytes."""
    source = weights if weights in ("pretrained", "random") else "FILE"
    report = Report(
        f"planner-{label}-{model}",
        f"The planner: {model}, {label}, batch {batch}, {pixels} px",
        f"python -m gradfilter.bench planner --data PHOTOS --label {label} --model {model} --weights {source} --batch {batch} "
        f"--batches {batches} --pixels {pixels}",
        (
            *("budget", "joint", "expected", "joint held", "layers trained", "not held whole", "gap, %"),
            *("patch only", "patch only held", "best uniform", "its held", "which"),
        ),
    )
    files = find_images(data)
    classes = sorted({find_class(file) for file in files})
    order = np.random.default_rng(0).permutation(len(files))
    info = find_info(model)

    def make_batch(number: int) -> Batch:
        chosen = [files[i] for i in order[number * batch : (number + 1) * batch]]
        images = torch.stack([load_image(file, pixels, info) for file in chosen])
        return images, torch.tensor([classes.index(find_class(file)) for file in chosen])

    start = None if weights == "random" else weights
    network = make_model(model, weights=start, classes=len(classes), generator=torch.Generator().manual_seed(0)).train()
    sample, unseen = [make_batch(i) for i in range(2)], [make_batch(2 + i) for i in range(batches)]
    exact = [find_gradients(freeze_(network, Plan.all()), pair) for pair in unseen]
    rivals = {name: judge(network, plan, unseen, exact) for name, plan in list_rivals(network).items()}
    most = max(held for held, _ in rivals.values())
    outlooks = [Outlook.make(network, sample, None, (MEMORY,), batch, keep) for keep in (None, "full")]
    for budget in [most * 10 ** (-2 * i / (BUDGETS - 1)) * 0.9 for i in reversed(range(BUDGETS))]:
        joint, patch_only = [outlook.choose({MEMORY: budget}) for outlook in outlooks]
        (held, cosine), (held_whole, cosine_whole) = [judge(network, c.plan, unseen, exact) for c in (joint, patch_only)]
        name = max((n for n, (bytes_held, _) in rivals.items() if bytes_held <= budget), key=lambda n: rivals[n][1])
        shown = [show_amount(MEMORY, amount) for amount in (budget, held, held_whole, rivals[name][0])]
        trained = f"{len(joint.plan.layers)} of {len(joint.survey.layers)}"
        keeps = Counter(b.keep.name for b in joint.plan.layers.values() if b.keep != FULL)
        report.rows.append(
            (
                *(shown[0], f"{cosine:.4f}", f"{joint.cosine:.4f}", shown[1], trained),
                *(", ".join(f"{n} {kind}" for kind, n in sorted(keeps.items())), f"{100 * joint.gap:.2f}"),
                *(f"{cosine_whole:.4f}", shown[2], f"{rivals[name][1]:.4f}", shown[3], name),
            )
        )
    report.remarks = [
        f"Cosine to the exact gradient of all parameters, those that are not trained counting as zero, over {batches} batches "
        "that the planner did not see. Joint: the plan chooses layers, patches and keeps; patch only: inputs are held whole. "
        f"Uniform: {len(rivals)} plans, all or the last n layers at one patch or grid and in one keep; the best of those that "
        "hold no more than the budget, by its own cosine on the same batches. Held: measured. Gap: share of the gradient's "
        "energy by which a plan could at most be better, by what the planner measured.",
    ]
    return report


def list_rivals(network: nn.Module) -> dict[str, Plan]:
    """Return the plans that treat all layers, or the last n, alike."""
    convs = sum(isinstance(layer, nn.Conv2d) for layer in find_layers(network).values())
    sizes = [replace(size, keep=parse_keep(keep)) for size in SIZES for keep in KEEPS]
    rivals = {f"all {size}": Plan.all(size) for size in sizes}
    return rivals | {f"last {n} {size}": Plan.last(n, size) for n in DEPTHS if n < convs for size in sizes[: None if n else 1]}


def judge(network: nn.Module, plan: Plan, batches: Sequence[Batch], exact: Sequence[Gradients]) -> tuple[int, float]:
    """Return the bytes that a plan holds, measured, and its cosine to the whole exact gradient over all batches."""
    apply_(network, plan)
    dot = square = whole = 0.0
    for batch, true in zip(batches, exact, strict=True):
        found = find_gradients(network, batch)
        dot += sum(float((found[name] * true[name]).sum()) for name in found)
        square += sum(float(g.square().sum()) for g in found.values())
        whole += sum(float(g.square().sum()) for g in true.values())
    return measure_saved_bytes(network, batches[0][0]), dot / math.sqrt(square * whole)
