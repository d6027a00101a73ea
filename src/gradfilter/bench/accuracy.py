"""Does it learn? One model, one data set, one recipe: exact backprop, filtered gradients and keeps, paired by seed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gradfilter.bench.report import Report
from gradfilter.data.sets import Task
from gradfilter.errors import GradFilterError
from gradfilter.plan import Plan
from gradfilter.report import Results
from gradfilter.report.outcomes import find_outcomes, make_table
from gradfilter.report.pareto import make_paired_pareto
from gradfilter.train import Settings, train
from gradfilter.train.cache import Place
from gradfilter.train.compare import find_results
from gradfilter.train.settings import Optimizer
from gradfilter.train.task import find_task

HEAD, EXACT = "head only", "exact"
ALONE: dict[str, Any] = {"plan": "head", "patch": 1}
"""The classifier alone, with its exact gradient where it is a convolution."""
METHODS: dict[str, dict[str, Any]] = {
    EXACT: {"exact": True},
    **{f"lift, patch {r}": {"patch": r} for r in (2, 4, 7)},
    **{f"lift, grid {n}": {"grid": n} for n in (4, 7, 12, 16)},
    **{f"lumped, patch {r}": {"patch": r, "kernel": "lumped"} for r in (2, 4, 7)},
    "lumped, grid 12": {"grid": 12, "kernel": "lumped"},
    **{f"HOSVD {energy}": {"patch": 1, "keep": f"hosvd:{energy}"} for energy in (0.8, 0.9)},
    "SVD 0.8": {"patch": 1, "keep": "svd:0.8"},
    "Subspace 0.8": {"patch": 1, "keep": "subspace:0.8"},
    "Int8": {"patch": 1, "keep": "int8"},
    **{f"lift, patch {r} × Int8": {"patch": r, "keep": "int8"} for r in (2, 3)},
    "lift, grid 12 × Int8": {"grid": 12, "keep": "int8"},
    "lumped, patch 2 × Int8": {"patch": 2, "kernel": "lumped", "keep": "int8"},
    "lift, patch 2 × HOSVD 0.8": {"patch": 2, "keep": "hosvd:0.8"},
}
RECIPE: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4, "clip": 2.0}
OPTIMIZERS: dict[Optimizer, str] = {"sgd": "SGD with momentum 0.9", "adam": "Adam", "adamw": "AdamW"}
NAMES = {"all": "all layers", "decoder": "the decoder"}
"""What plans train; those of the last convolutions are not among them."""


@dataclass(frozen=True)
class Depth:
    """How much of the model is trained, on how many images, how often, and at which learning rate.

    Attributes:
        plan: What is trained.
        images: On how many images; None for all.
        epochs: How often each is seen.
        lr: Learning rate.
        batch: Images per step.
        cache: Where the trunk's results are kept.
        head_lr: Learning rate where the classifier alone is trained.
        calibrate: Whether methods start from the classifier of the run that trained it alone, with the same seed, as in the
            papers' segmentation runs. A fresh classifier spoils pretrained layers in its first hundred steps.
        task: What is learnt.
        pixels: Side of the images; the model's own where not given.
        optimizer: What makes steps of gradients.
        start: What the weights were trained on, for the title.
    """

    plan: str
    images: int | None
    epochs: int
    lr: float
    batch: int
    cache: Place
    head_lr: float
    calibrate: bool = False
    task: Task = "classify"
    pixels: int | None = None
    optimizer: Optimizer = "sgd"
    start: str = "ImageNet"

    @property
    def what(self) -> str:
        """Return what is trained, in words."""
        return NAMES.get(self.plan, f"the last {self.plan.removeprefix('last')} convolutions and the classifier")


def measure(
    data: Path, label: str, model: str, weights: str, depth: Depth, seeds: int, work: Path, globs: Sequence[str] = ("*",)
) -> Report:
    """Return the accuracy, or mIoU, by method: mean over seeds, difference to exact paired by seed, and what it costs.

    Every run is a `gradfilter train` in a folder of its own below `work`; those that are done are not run again.
    """
    methods = choose_methods(globs, depth)
    loaded = find_task(depth.task).load(Settings(task=depth.task, data=str(data.absolute())))
    results: dict[str, list[Results]] = {method: [] for method in methods}
    for seed in range(seeds):
        for method, choices in methods.items():
            start = weights
            if depth.calibrate and method != HEAD:
                start = f"{results[HEAD][-1].settings['out']}/best.safetensors"
            settings = make_settings(data, model, start, depth, seed, work, method, choices)
            results[method].append(find_results(settings) or train(settings, data=loaded))
            print(f"{depth.plan}, {method}, seed {seed}: {results[method][-1].best.val_accuracy:.2%}", flush=True)
    return make_report(label, model, depth, results, globs)


def choose_methods(globs: Sequence[str], depth: Depth) -> dict[str, dict[str, Any]]:
    """Return the methods that a glob names, and those that they are compared with or start from, in the order of the table."""
    methods = {HEAD: ALONE, **METHODS}
    for glob in globs:
        if not any(is_named(method, [glob]) for method in methods):
            raise GradFilterError(f"--methods {glob!r} is none of the methods, which are: {'; '.join(methods)}.")
    needed = {EXACT, HEAD} if depth.calibrate else {EXACT}
    return {name: choices for name, choices in methods.items() if name in needed or is_named(name, globs)}


def is_named(method: str, globs: Sequence[str]) -> bool:
    """Tell whether a glob names a method, in capitals or not."""
    return any(fnmatchcase(method.lower(), glob.lower()) for glob in globs)


def make_settings(
    data: Path, model: str, weights: str, depth: Depth, seed: int, work: Path, method: str, choices: dict[str, Any]
) -> Settings:
    """Return the settings of one run."""
    plan = choices.get("plan", depth.plan)
    name = "-".join([depth.plan, method.replace(", ", "-").replace(" × ", "-").replace(" ", ""), f"seed{seed}"])
    return Settings(
        task=depth.task,
        data=str(data.absolute()),
        model=model,
        weights=weights,
        resolution=depth.pixels,
        limit=depth.images,
        augment="none",
        epochs=depth.epochs,
        val_every=depth.epochs,
        optimizer=depth.optimizer,
        lr=depth.head_lr if method == HEAD else depth.lr,
        batch=depth.batch,
        seed=seed,
        cache=depth.cache,
        cache_folder=str(work / "cache"),
        out=str(work / name),
        overwrite=True,
        measure=seed == 0,
        **RECIPE,
        **{"plan": plan, **choices},
    )


def make_report(label: str, model: str, depth: Depth, results: dict[str, list[Results]], globs: Sequence[str]) -> Report:
    """Return the table of all runs of one depth, and its picture."""
    first = results[EXACT][0]
    title = f"Accuracy: {model}, {depth.start} weights, {label}, {depth.what} trained, {first.settings['resolution']} px"
    outcomes = find_outcomes(results, EXACT)
    table = make_table(title, outcomes, EXACT)
    command = make_command(label, model, depth, len(results[EXACT]), globs)
    report = Report(
        f"accuracy-{label}-{model.replace('/', '-')}-{depth.plan}", title, command, list(table.columns), list(table.to_cells())
    )
    report.remarks = describe_runs(depth, first, len(results[EXACT]), list(results))
    report.picture = make_paired_pareto(title, outcomes, EXACT)
    return report


def make_command(label: str, model: str, depth: Depth, seeds: int, globs: Sequence[str]) -> str:
    """Return the command that repeats the runs."""
    options = {"task": depth.task if depth.task != "classify" else None, "pixels": depth.pixels}
    options |= {"optimizer": depth.optimizer if depth.optimizer != "sgd" else None}
    options |= {"start": shlex.quote(depth.start) if depth.start != "ImageNet" else None}
    options |= {"label": label, "model": model, "plan": depth.plan, "images": depth.images, "epochs": depth.epochs}
    options |= {"lr": depth.lr, "head-lr": depth.head_lr, "batch": depth.batch, "seeds": seeds, "cache": depth.cache}
    words = [f"--{name} {value}" for name, value in options.items() if value is not None]
    words += ["--calibrate"] if depth.calibrate else []
    words += ["--methods", *map(shlex.quote, globs)] if "*" not in globs else []
    return " ".join(["python -m gradfilter.bench accuracy --data FOLDER --weights FILE --work FOLDER", *words])


def describe_runs(depth: Depth, first: Results, seeds: int, methods: Sequence[str]) -> list[str]:
    """Return the remarks below the table."""
    start = "All but the first row start from the weights of the first, of the same seed. " if depth.calibrate else ""
    norms, task = Plan.from_yaml(first.plan).batch_norm, find_task(depth.task)
    drawn = "order, new layers and, if not all are trained on, the choice of images are the seed's, the same for every method"
    remarks = [
        f"{first.train_images} training images, {depth.epochs} epochs, {OPTIMIZERS[depth.optimizer]}, learning rate {depth.lr} "
        f"({depth.head_lr} for the classifier alone) falling along a cosine, batch {depth.batch}, weight decay 1e-4, gradient "
        f"clip 2, batch norms of trained layers in {norms} mode, no augmentation. {start}{count_seeds(seeds)}: {drawn}.",
        task.certainty.format(images=first.val_images)
        + (" The standard error is that of the difference to exact, paired by seed." if seeds > 1 else ""),
        f"MB held: what autograd holds for a batch of {depth.batch}, measured. Step / exact: time of a training step, frozen "
        "layers included, median of alternating rounds in one process; that of the classifier alone is compared "
        "by way of inference.",
    ]
    if any(METHODS.get(method, {}).get("patch") == 1 for method in methods):
        remarks.append(
            "Where a keep stands alone, the patch is 1: the gradient has every pixel. Subspace 0.8 has at all times the ranks "
            "that HOSVD 0.8 has on the first batch."
        )
    if HEAD in methods and depth.task == "segment" and not depth.calibrate:
        remarks.append(f"{HEAD.capitalize()}: the last convolution, behind a decoder that stays as it is at the start.")
    return remarks


def count_seeds(seeds: int) -> str:
    """Return a number of seeds in words."""
    return "One seed" if seeds == 1 else f"{seeds} seeds"
