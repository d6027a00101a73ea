"""`gradfilter bench`: what is a training step, in inference passes?"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from gradfilter.bench import curves, price
from gradfilter.bench.allocator import DEFAULT, KEEP, set_allocator
from gradfilter.bench.report import Report
from gradfilter.bench.sides import DEFAULT_PLANS
from gradfilter.bench.step import Case
from gradfilter.cli.common import MODEL_HELP, OVERRIDES, add_plan, make_plan, writing_to
from gradfilter.errors import SettingsError
from gradfilter.models import find_info
from gradfilter.models.extras import import_extra
from gradfilter.plan import Plan


def run(argv: list[str]) -> int:
    """Measure a training step beside inference: under plans, exactly, checkpointed, compiled, filtered layer by layer."""
    args = make_parser().parse_args(argv)
    cases, plans = make_cases(args), make_plans(args)
    picture = args.save is not None
    if picture:
        import_extra("matplotlib", "gradfilter bench --save")  # not after minutes
        with writing_to(args.save, "--save"):
            pass
    elif args.curves:
        raise SettingsError("--curves draws a picture, and needs a place for it: give --save FOLDER.")
    set_allocator(args.allocator)
    options = price.Options(
        args.rounds, args.compile, args.memory, args.allocator, picture, tell, args.peers == "all", fresh=True
    )
    command = shlex.join(["gradfilter", "bench", *argv])
    report = price.measure(cases, plans, options, command)
    show(report, args.save)
    if args.curves:
        show(curves.measure(cases[0], *next(iter(plans.items())), options, command), args.save)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Say what `gradfilter bench` takes."""
    parser = argparse.ArgumentParser(
        prog="gradfilter bench",
        description=run.__doc__,
        epilog="Without a plan: all layers at patch 4, the last 4 at patch 2, all at grid 4, all at grid 7.",
    )
    parser.add_argument("--model", default="mobilenet_v2", help=f"{MODEL_HELP} (default: mobilenet_v2)")
    parser.add_argument("--weights", help="a weight file, or 'pretrained' (default: random ones)")
    add_plan(parser)
    parser.set_defaults(plan=None)
    parser.add_argument("--batch", type=int, nargs="+", default=[32], metavar="N", help="images per step (default: 32)")
    parser.add_argument("--pixels", type=int, metavar="N", help="side of the images (default: the model's own)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], metavar="N", help="threads of torch (default: 1)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds in which all take turns (default: 7)")
    parser.add_argument(
        "--compile",
        type=float,
        default=300,
        metavar="SECONDS",
        help="how long torch.compile may take (default: 300; 0: none)",
    )
    parser.add_argument(
        "--peers", choices=("all", "none"), default="all", help="measure exact training and its variants, too (default: all)"
    )
    parser.add_argument("--memory", action="store_true", help="measure resident memory too, each method in fresh processes")
    parser.add_argument("--curves", action="store_true", help="also vary batch, image, patch and threads, one at a time")
    parser.add_argument(
        "--allocator",
        choices=(DEFAULT, KEEP),
        default=DEFAULT,
        help="whether the process keeps what it frees, on all sides (glibc; default: as the C library does by itself)",
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write tables as Markdown and JSON, and pictures, there")
    return parser


def make_cases(args: argparse.Namespace) -> list[Case]:
    """Return what to run: each batch with each number of threads."""
    pixels = find_info(args.model).resolution if args.pixels is None else args.pixels
    for name, values in (("batch", args.batch), ("threads", args.threads), ("pixels", [pixels]), ("rounds", [args.rounds])):
        if min(values) < 1:
            raise SettingsError(f"--{name} is {min(values)}, but must be at least 1.")
    if args.compile < 0:
        raise SettingsError(f"--compile is {args.compile:g} seconds. Give how long it may take, or 0 to leave it out.")
    batches, threads = dict.fromkeys(args.batch), dict.fromkeys(args.threads)
    return [Case(args.model, args.weights, batch, pixels, count) for count in threads for batch in batches]


def make_plans(args: argparse.Namespace) -> dict[str, Plan]:
    """Return the plans by name: the one that flags name, or the usual ones."""
    if args.plan is None and all(getattr(args, name) is None for name in OVERRIDES):
        return DEFAULT_PLANS
    args.plan = args.plan or "all"
    plan = make_plan(args)
    choices = " and ".join(dict.fromkeys(map(str, plan.layers.values())))
    return {f"{'all layers' if args.plan == 'all' else args.plan}, {choices}": plan}


def show(report: Report, folder: Path | None) -> None:
    """Print a report, and write it."""
    tell("")
    print(report.to_markdown())
    if folder is not None:
        with writing_to(folder, "--save"):
            report.save(folder)
        print(f"table and picture: {folder / report.name}.md, .json, .png\n")


def tell(text: str) -> None:
    """Say on one line of a terminal what is being done; elsewhere nothing."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
