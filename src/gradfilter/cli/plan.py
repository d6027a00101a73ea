"""`gradfilter plan`: a budget in, a plan out, for one's own model and images."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gradfilter.cli.common import watching, writing_to
from gradfilter.cli.train import parse
from gradfilter.errors import BudgetError, SettingsError
from gradfilter.files import replace_file
from gradfilter.models.extras import import_extra
from gradfilter.planner import Chosen
from gradfilter.report.front import make_front_picture
from gradfilter.train.job import choose_images, choose_plan_for, fill_in, make_fabric, make_new_model
from gradfilter.train.settings import Settings
from gradfilter.train.watch import Watch
from gradfilter.units import UNITS, parse_amount


def run(argv: list[str]) -> int:
    """Choose which layers to train, and at which patch size, for the most useful gradient within a budget."""
    args, rest = make_parser().parse_known_args(argv)
    budgets = {kind: value for kind in UNITS if (value := getattr(args, kind)) is not None}
    if not budgets:
        raise BudgetError("there is no budget to plan for. Give --memory 64MB, --time 200ms or --flops 20G, or several.")
    for kind, value in budgets.items():
        parse_amount(kind, value)  # before anything is loaded
    settings = fill_in(parse(rest))
    if given := settings.find_plan_flags():
        raise SettingsError(f"a budget chooses layers, patches and keeps itself: drop {', '.join(given)}.")
    import_extra("matplotlib", "gradfilter plan")
    if args.out is not None:
        with writing_to(args.out):  # before anything is measured
            pass
    with watching() as screen:
        chosen = choose(settings, budgets, screen)
    print(chosen)
    if args.out is None:
        print("--out FOLDER keeps the plan, for 'gradfilter train --plan FOLDER/plan.yaml'.")
    else:
        save(chosen, settings, args.out)
        print(f"plan: {args.out / 'plan.yaml'}; table and picture: {args.out / 'plan.md'}, plan.json, plan.png")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Say what `gradfilter plan` takes besides the settings of `gradfilter train`."""
    parser = argparse.ArgumentParser(
        prog="gradfilter plan",
        usage="gradfilter plan --memory 64MB [--time 200ms] [--flops 20G] [--out FOLDER] [--data DATA] [--model MODEL] "
        "[--batch N] [--SETTING VALUE]",
        description=run.__doc__,
        epilog="Data and model are set as in 'gradfilter train', whose --help lists all settings: --data, --model, --weights, "
        "--resolution, --augment, --batch_norm, --trunk, --batch, --seed, --config, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--memory", metavar="BYTES", help="what autograd may hold for a batch, e.g. 64MB")
    parser.add_argument("--time", metavar="SECONDS", help="what a step may take on this machine, e.g. 200ms")
    parser.add_argument("--flops", metavar="FLOPS", help="what a step may compute, forward and backward, e.g. 20G")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write plan.yaml, plan.md, plan.json and plan.png there")
    return parser


def choose(settings: Settings, budgets: dict[str, str], watch: Watch) -> Chosen:
    """Make data and model as a training run would, and choose."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    fabric = make_fabric(settings, settings.folder)
    data = choose_images(settings, watch, None)
    model = make_new_model(settings, data.train).to(fabric.device)
    return choose_plan_for(settings, data, model, fabric, budgets)


def save(chosen: Chosen, settings: Settings, folder: Path) -> None:
    """Write the plan, the table and the picture."""
    with writing_to(folder):
        chosen.plan.save(folder / "plan.yaml")
        chosen.to_table().save(folder / "plan")
        replace_file(folder / "plan.png", make_front_picture(chosen, f"{settings.model} on {Path(settings.data).name}"))
