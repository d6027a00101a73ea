"""`gradfilter cost`: what does a training step take under this plan?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gradfilter.accounting import PaperCost, count_as_paper
from gradfilter.apply import apply_
from gradfilter.cli.common import OVERRIDES, add_model_and_plan, make_plan, writing_to
from gradfilter.cost import Cost, cost
from gradfilter.environment import find_environment
from gradfilter.errors import InputError, PlanError, SettingsError
from gradfilter.files import replace_file
from gradfilter.keep import FULL
from gradfilter.loss import Loss, draw_targets, find_score_shape
from gradfilter.models import find_info, join_encoder, make_model
from gradfilter.table import Table, to_plain
from gradfilter.train.settings import Settings
from gradfilter.train.task import CLASSIFY, SEGMENT, TASKS


def run(argv: list[str]) -> int:
    """Tell flops, saved bytes, peak and time of a training step on random images, by layer, under a plan and exactly."""
    args = make_parser().parse_args(argv)
    found = measure(args)
    table = found.to_table()
    title = [join_encoder(args.model, args.encoder), f"plan {args.plan}"]
    title += [f"{name} {value}" for name in OVERRIDES if (value := getattr(args, name)) is not None]
    table.title = f"{table.title}: {', '.join(title)}"
    if isinstance(found, Cost):
        table.remarks.append("Maps are channels-last, as in 'gradfilter train'.")
    print(table.to_markdown(), end="")
    if args.out is not None:
        save(table, found, args.out)
        print(f"\ntable: {args.out / 'cost.md'}, {args.out / 'cost.json'}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Say what `gradfilter cost` takes."""
    parser = argparse.ArgumentParser(prog="gradfilter cost", description=run.__doc__)
    add_model_and_plan(parser)
    parser.add_argument(
        "--task", choices=tuple(TASKS), help="whose loss a step has (default: as the model's output, of images or of pixels)"
    )
    parser.add_argument("--classes", type=int, metavar="N", help="how many classes there are (default: the model's own)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="images per step (default: 32)")
    parser.add_argument("--resolution", type=int, metavar="N", help="side of the images (default: the model's own)")
    parser.add_argument("--no-measure", action="store_true", help="predict from shapes alone, in seconds; no step is run")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write cost.md and cost.json there")
    parser.add_argument(
        "--accounting",
        choices=("real", "paper"),
        default="real",
        help="count all that a step takes (default), or what the gradient-filtering paper's tables count, for one image",
    )
    return parser


def measure(args: argparse.Namespace) -> Cost | PaperCost:
    """Do as the options say."""
    plan = make_plan(args)
    side = find_info(args.model, args.encoder).resolution if args.resolution is None else args.resolution
    if side < 1 or args.batch < 1:
        raise InputError(f"--resolution {side} --batch {args.batch} is no batch of images. Give whole numbers of at least 1.")
    if args.classes is not None and args.classes < 2:
        raise InputError(f"--classes {args.classes} leaves nothing to tell apart. Give at least 2.")
    model = apply_(make_model(args.model, classes=args.classes, encoder=args.encoder).train(), plan)
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.empty(args.batch, 3, side, side, device="meta", memory_format=torch.channels_last)
    if args.accounting == "paper":
        if any(backward.keep != FULL for backward in plan.layers.values()):
            raise PlanError("--accounting paper counts inputs as they are, as that paper holds them: drop it, or --keep.")
        return count_as_paper(model, images)
    if not args.no_measure:
        images = torch.empty_like(images, device="cpu").normal_(generator=torch.Generator().manual_seed(0))
    sample, loss = make_batch(model, images, args.task)
    return cost(model, sample, loss=loss)


def make_batch(model: nn.Module, images: Tensor, name: str | None) -> tuple[Any, Loss | None]:
    """Return images with targets that fit the model, and the loss that 'gradfilter train' has for them."""
    shape = find_score_shape(model, images)
    fitting = None if shape is None else CLASSIFY if len(shape) == 2 else SEGMENT
    if name is not None and fitting is not TASKS[name]:
        raise SettingsError(
            f"--task {name} asks for one score per {TASKS[name].unit} and class, which this model does not give. Take another "
            "model, or leave --task out."
        )
    if shape is None or fitting is None:
        return images, None
    loss = fitting.make_loss(Settings(), SimpleNamespace(classes=range(shape[1])))
    return (images, draw_targets(shape, images.device)), loss


def save(table: Table, found: Cost | PaperCost, folder: Path) -> None:
    """Write the table, and all numbers."""
    data = {**table.to_dict(), "environment": find_environment(), "cost": to_plain(dataclasses.asdict(found))}
    with writing_to(folder):
        replace_file(folder / "cost.md", table.to_markdown())
        replace_file(folder / "cost.json", json.dumps(data, indent=1, allow_nan=False) + "\n")
