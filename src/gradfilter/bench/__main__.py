"""Command line of the benchmarks: argument parsing only."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from gradfilter.bench import (
    accuracy,
    approximation,
    before,
    cache,
    coverage,
    fidelity,
    floor,
    keeps,
    layers,
    paper,
    paper_segment,
    planner,
    profile,
    segment,
)
from gradfilter.errors import GradFilterError

HELP = {
    "data": "a folder of images, a folder per class; for accuracy with train and test, or with masks for --task segment",
    "label": "what to call them in the report",
    "model": "any name that gradfilter.models.make_model takes",
    "weights": "a weight file, 'pretrained' or 'random'",
    "plan": "all, head, decoder, last2, last4, …",
    "images": "train on so many images",
}
"""What several benchmarks take."""
ELSEWHERE = "Time, flops and bytes of a training step beside inference: 'gradfilter bench'."


def add(commands: Any, name: str, data: bool = False, **defaults: str | int | None) -> argparse.ArgumentParser:
    """Add a benchmark with those of the common arguments that it takes; without a default of text they are whole numbers."""
    sub = commands.add_parser(name)
    if data:
        sub.add_argument("--data", type=Path, required=True, help=HELP["data"])
        sub.add_argument("--label", default="photographs", help=HELP["label"])
    for key, default in defaults.items():
        sub.add_argument(f"--{key}", type=str if isinstance(default, str) else int, default=default, help=HELP.get(key))
    return sub


def add_lists(sub: argparse.ArgumentParser, **lists: tuple[str, ...] | tuple[int, ...]) -> None:
    """Add arguments that take several values, each with what is usual."""
    for name, usual in lists.items():
        listed = f"(default: {' '.join(map(str, usual))})"
        sub.add_argument(f"--{name}", type=type(usual[0]), nargs="+", metavar=name[0].upper(), help=listed)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m gradfilter.bench", description=__doc__, epilog=ELSEWHERE)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="also write Markdown, JSON and pictures there")
    commands = parser.add_subparsers(dest="command", required=True)
    sub = add(commands, "fidelity", data=True, batch=32, pixels=224)
    sub.add_argument("--batches", type=int, default=4)
    sub.add_argument("--blocks", type=int, default=9)
    sub = add(commands, "segment", data=True, batch=2, batches=2, pixels=256, steps=20)
    sub.add_argument("--only", default="", metavar="TEXT", help="networks whose names hold this, e.g. R18")
    sub = add(commands, "planner", data=True, model="efficientnet-lite0", weights="pretrained", batch=8, pixels=224)
    sub.add_argument("--batches", type=int, default=3)
    add(commands, "approximation", data=True, batch=32, pixels=224)
    sub = add(commands, "coverage", pixels=96)
    sub.add_argument("--only", default="*", metavar="GLOB", help='families to measure, e.g. "timm mobile*"')
    sub.add_argument("--sample", type=int, metavar="N", help="measure only N rows, evenly spaced")
    commands.add_parser("paper", help="the gradient-filtering paper's FLOPs and memory columns, regenerated")
    trained = {"data": True, "model": "mcunet-in3", "weights": "pretrained", "plan": "last4"}
    sub = add(commands, "accuracy", **trained, images=None, batch=64, pixels=None)
    sub.add_argument("--task", choices=("classify", "segment"), default="classify", help="a label for each image, or pixel")
    sub.add_argument("--start", default="ImageNet", metavar="TEXT", help="what the weights were trained on, for the title")
    sub.add_argument("--optimizer", choices=tuple(accuracy.OPTIMIZERS), default="sgd")
    sub.add_argument("--epochs", type=int, default=3)
    sub.add_argument("--lr", type=float, default=0.02)
    sub.add_argument("--head-lr", type=float, default=0.02, help="learning rate where the classifier alone is trained")
    sub.add_argument("--cache", choices=("off", "memory", "disk"), default="off", help="trunk cache, shared by all runs")
    sub.add_argument("--seeds", type=int, default=3)
    sub.add_argument("--calibrate", action="store_true", help="start all methods from the classifier that was trained alone")
    sub.add_argument("--methods", nargs="+", default=["*"], metavar="GLOB", help='run these, e.g. "lift*", beside exact')
    sub.add_argument("--work", type=Path, required=True, help="folder of the runs; those that are done are not run again")
    add(commands, "keeps", data=True, model="mcunet-in3", weights="pretrained", batch=None, pixels=None, rounds=7, threads=1)
    sub = add(commands, "layers", batch=32, rounds=5)
    sub.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    sub = add(commands, "profile", model="mobilenet_v2", batch=32, pixels=224, rounds=5, threads=1)
    sub.add_argument("--choice", default="patch4", help="patch4, grid4, …")
    add(commands, "cache", **trained, pixels=176, images=512, batch=32, rounds=3, threads=1)
    sub = add(commands, "before", pixels=224, rounds=before.ROUNDS)
    sub.add_argument("--package", type=Path, required=True, metavar="FOLDER", help="where pip has installed the older version")
    sub.add_argument("--commit", help="of the older version (default: what FOLDER/COMMIT says)")
    add_lists(sub, model=before.MODELS, plan=before.PLANS, batch=before.BATCHES, threads=before.THREADS)
    sub.add_argument("--quick", action="store_true", help="where not said otherwise, one model, batches 1 and 8, one thread")
    sub = add(commands, "floor", pixels=224, rounds=floor.ROUNDS)
    add_lists(sub, model=floor.MODELS, plan=floor.PLANS, batch=floor.BATCHES, threads=floor.THREADS)
    args = parser.parse_args(argv)
    try:
        if args.command == "accuracy":
            learnt = args.calibrate, args.task, args.pixels, args.optimizer, args.start
            depth = accuracy.Depth(args.plan, args.images, args.epochs, args.lr, args.batch, args.cache, args.head_lr, *learnt)
            runs = depth, args.seeds, args.work, args.methods
            reports = [accuracy.measure(args.data, args.label, args.model, args.weights, *runs)]
        elif args.command == "cache":
            settings = cache.make_settings(args.data, args.model, args.weights, args.plan)
            changes = {"resolution": args.pixels, "limit": args.images, "batch": args.batch, "threads": args.threads}
            reports = [cache.measure(dataclasses.replace(settings, **changes), args.label, args.rounds)]
        elif args.command == "fidelity":
            reports = [fidelity.measure(args.data, args.label, args.batch, args.batches, args.blocks, args.pixels)]
        elif args.command == "segment":
            figures = args.batch, args.batches, args.pixels, args.steps
            reports = [segment.measure(args.data, args.label, *figures, args.only)]
        elif args.command == "approximation":
            reports = [approximation.measure(args.data, args.label, args.batch, args.pixels)]
        elif args.command == "planner":
            figures = args.batch, args.batches, args.pixels
            reports = [planner.measure(args.data, args.label, args.model, args.weights, *figures)]
        elif args.command == "coverage":
            reports = [coverage.measure(args.only, args.sample, args.pixels)]
        elif args.command == "keeps":
            sizes = args.batch, args.pixels, args.rounds, args.threads
            reports = keeps.measure(args.data, args.label, args.model, args.weights, *sizes)
        elif args.command == "profile":
            choice = re.sub(r"(?<=[a-z])(?=[0-9])", " ", args.choice)
            reports = [profile.measure(args.model, choice, args.batch, args.pixels, args.rounds, args.threads)]
        elif args.command in ("before", "floor"):
            lists = {"models": args.model, "plans": args.plan, "batches": args.batch, "threads": args.threads}
            given = {**lists, "pixels": args.pixels, "rounds": args.rounds}
            if args.command == "before":
                reports = [before.measure(args.package, args.commit, before.make_choices(args.quick, **given))]
            else:
                reports = [floor.measure(floor.make_choices(**given))]
        elif args.command == "layers":
            reports = layers.measure(layers.LAYERS, args.batch, args.rounds, args.threads)
        else:
            reports = [paper.measure(), paper_segment.measure()]
    except GradFilterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for report in reports:
        print(report.to_markdown())
        if args.save:
            report.save(args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
