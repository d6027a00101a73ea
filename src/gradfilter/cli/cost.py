"""`gradfilter cost`: what does a training step take under this plan?"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gradfilter.accounting import count_as_paper
from gradfilter.apply import apply_
from gradfilter.cli.check import MODEL_HELP
from gradfilter.cost import cost
from gradfilter.errors import InputError, SettingsError
from gradfilter.models import find_info, make_model
from gradfilter.plan import Plan
from gradfilter.table import Table


def run(argv: list[str]) -> int:
    """Tell flops, saved bytes, peak and time of a training step on random images, by layer, under a plan and exactly."""
    args = make_parser().parse_args(argv)
    table = measure(args)
    print(table.to_markdown(), end="")
    if args.out is not None:
        save(table, args.out)
        print(f"\ntable: {args.out / 'cost.md'}, {args.out / 'cost.json'}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Say what `gradfilter cost` takes."""
    parser = argparse.ArgumentParser(prog="gradfilter cost", description=run.__doc__)
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--plan", default="all", help="which layers to train: all (default), head, last4, or a plan in a YAML file"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--patch", type=int, metavar="N", help="side of a patch in pixels of each layer's map; overrides the plan's"
    )
    size.add_argument(
        "--grid", type=int, metavar="N", help="patches per side, at every resolution (default: 4); overrides the plan's"
    )
    parser.add_argument("--kernel", choices=("lift", "lumped"), help="the coarse kernel (default: lift); overrides the plan's")
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


def measure(args: argparse.Namespace) -> Table:
    """Do as the options say."""
    plan = Plan.parse(args.plan).override(patch=args.patch, grid=args.grid, kernel=args.kernel)
    side = find_info(args.model).resolution if args.resolution is None else args.resolution
    if side < 1 or args.batch < 1:
        raise InputError(f"--resolution {side} --batch {args.batch} is no batch of images. Give whole numbers of at least 1.")
    model = apply_(make_model(args.model).train(), plan)
    images = torch.empty(args.batch, 3, side, side, device="meta")
    if args.accounting == "paper":
        table = count_as_paper(model, images).to_table()
    else:
        if not args.no_measure:
            images = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        table = cost(model, images, measure=not args.no_measure).to_table()
    title = [args.model, f"plan {args.plan}"]
    title += [f"{name} {value}" for name in ("patch", "grid", "kernel") if (value := getattr(args, name)) is not None]
    table.title = f"{table.title}: {', '.join(title)}"
    return table


def save(table: Table, folder: Path) -> None:
    """Write the table."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table.save(folder / "cost")
    except OSError as error:
        raise SettingsError(
            f"cannot write to --out {str(folder)!r}: {error.strerror or error}. Give another folder."
        ) from error
