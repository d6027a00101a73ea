"""How close filtered gradients are to exact ones: EfficientNet-Lite0 with its ImageNet weights on a folder of photographs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gradfilter.apply import apply_, freeze_
from gradfilter.bench.report import Report
from gradfilter.bench.setup import parse_backward
from gradfilter.cost import measure_saved_bytes
from gradfilter.errors import GradFilterError
from gradfilter.fidelity import compare, find_gradients
from gradfilter.models import ModelInfo, find_models, make_model
from gradfilter.plan import Backward, Plan

MODEL = "efficientnet-lite0"
METHODS = (
    *(f"patch {r} lumped" for r in (2, 4, 7)),
    *(f"patch {r}" for r in (2, 4, 7)),
    *(f"grid {n}" for n in (14, 7, 4, 2)),
)
IMAGES = (".jpg", ".jpeg", ".png")


def measure(
    data: Path, label: str, batch: int, batches: int, blocks: int, pixels: int, methods: Sequence[str] = METHODS
) -> Report:
    """Return the cosine to the exact gradient by method, over several batches."""
    report = Report(
        f"fidelity-{label}",
        f"Fidelity: {MODEL}, ImageNet weights, last {blocks} blocks and head, {label}, batch {batch}, {pixels} px",
        f"python -m gradfilter.bench fidelity --data PHOTOS --label {label} --batches {batches}",
        ("method", "cosine, conv weights", "spread", "cosine, all trained", "norm ratio", "kB held per image"),
    )
    files = find_images(data)
    classes = sorted({find_class(file) for file in files})
    generator = np.random.default_rng(0)
    results: dict[str, list[tuple[float, float, float, float]]] = {method: [] for method in methods}
    for _ in range(batches):
        chosen = [files[i] for i in generator.permutation(len(files))[:batch]]
        images = torch.stack([load_image(file, pixels, find_models()[MODEL]) for file in chosen])
        labels = torch.tensor([classes.index(find_class(file)) for file in chosen])
        model = make_model(MODEL, weights="pretrained", classes=len(classes), generator=torch.Generator().manual_seed(0))
        exact = find_gradients(freeze_(model, make_plan(model, blocks, Backward())), (images, labels))
        kernels = [name for name, g in exact.items() if g.dim() == 4]
        for method in methods:
            apply_(model, make_plan(model, blocks, parse_backward(method)))
            gradients = find_gradients(model, (images, labels))
            held = measure_saved_bytes(model, images) / batch / 1e3
            convs = compare(gradients, exact, kernels)
            results[method].append((convs.cosine, compare(gradients, exact).cosine, convs.norm_ratio, held))
    for method, values in results.items():
        conv, everything, ratio, held = (statistics.mean(column) for column in zip(*values, strict=True))
        spread = max(v[0] for v in values) - min(v[0] for v in values)
        report.rows.append((method, f"{conv:.3f}", f"{spread:.3f}", f"{everything:.3f}", f"{ratio:.3f}", f"{held:.0f}"))
    report.remarks = [
        f"Mean over {batches} batches; spread: largest less smallest cosine. All trained: conv weights, batch norm affines and "
        f"the classifier, a fresh one for {len(classes)} classes. Norm ratio: of the conv weights, filtered to exact."
    ]
    return report


def find_images(folder: Path) -> list[Path]:
    """List the images below a folder."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGES)
    if not files:
        raise GradFilterError(f"no {' or '.join(IMAGES)} file below {str(folder)!r}. Give a folder of photographs with --data.")
    return files


def find_class(file: Path) -> str:
    """Return the class of an image: its folder, or, in a folder of all images, its name up to the last underscore."""
    return file.parent.name if file.parent.name != "images" else file.stem.rpartition("_")[0]


def load_image(file: Path, pixels: int, info: ModelInfo) -> Tensor:
    """Return an image [3, pixels, pixels], normalised as the model expects."""
    from PIL import Image

    image = np.asarray(Image.open(file).convert("RGB").resize((pixels, pixels), Image.Resampling.BILINEAR), dtype=np.float32)
    normal = (image / 255 - np.array(info.mean, np.float32)) / np.array(info.std, np.float32)
    return torch.from_numpy(normal).permute(2, 0, 1).contiguous()


def make_plan(model: nn.Module, blocks: int, backward: Backward) -> Plan:
    """Return the plan that trains the last blocks, the head and the classifier."""
    names = [name for name, _ in model.named_modules() if name.startswith("blocks.") and name.count(".") == 2]
    return Plan(dict.fromkeys([*names[-blocks:], "conv_head", "bn2", "classifier"], backward))
