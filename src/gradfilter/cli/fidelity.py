"""`gradfilter fidelity`: how close are the gradients of a plan to exact ones, on one's own images?"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gradfilter.cli.common import watching, writing_to
from gradfilter.cli.train import parse
from gradfilter.errors import SettingsError
from gradfilter.fidelity import Fidelity, fidelity
from gradfilter.files import replace_file
from gradfilter.models.extras import import_extra
from gradfilter.report.fidelity import make_fidelity_picture
from gradfilter.train.job import choose_images, fill_in, make_fabric, make_feeds, make_loss, make_trained_model
from gradfilter.train.settings import Settings
from gradfilter.train.watch import Watch


def run(argv: list[str]) -> int:
    """Compare the gradients of a plan with exact backprop, layer by layer, on the first batches of a training run."""
    args, rest = make_parser().parse_known_args(argv)
    if args.batches < 1:
        raise SettingsError(f"--batches is {args.batches}, but must be at least 1.")
    settings = fill_in(parse(rest))
    if settings.exact:
        raise SettingsError("--exact leaves nothing to compare: drop it, and give a plan, --patch, --grid or --keep.")
    if args.out is not None:
        with writing_to(args.out):  # before anything is measured
            pass
    with watching() as screen:
        found = measure(settings, args.batches, screen)
    print(found)
    if args.out is not None:
        save(found, settings, args.out)
        print(f"table and picture: {args.out / 'fidelity.md'}, {args.out / 'fidelity.json'}, {args.out / 'fidelity.png'}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Say what `gradfilter fidelity` takes besides the settings of `gradfilter train`."""
    parser = argparse.ArgumentParser(
        prog="gradfilter fidelity",
        usage="gradfilter fidelity [--batches N] [--out FOLDER] [--data DATA] [--model MODEL] [--plan PLAN] [--SETTING VALUE]",
        description=run.__doc__,
        epilog="Data, model and plan are set as in 'gradfilter train', whose --help lists all settings: --data, --model, "
        "--weights, --resolution, --augment, --plan, --patch, --grid, --kernel, --keep, --batch_norm, --trunk, --batch, "
        "--seed, --config, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="how many batches to compare on (default: 4)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write fidelity.md, fidelity.json and fidelity.png there")
    return parser


def measure(settings: Settings, batches: int, watch: Watch) -> Fidelity:
    """Make data, model and plan as a training run would; compare on the first batches that it would see."""
    import_extra("matplotlib", "gradfilter fidelity")  # not after minutes
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    plan, fabric = settings.make_plan(), make_fabric(settings, settings.folder)
    data = choose_images(settings, watch, None)
    model = make_trained_model(settings, plan, data.train).to(fabric.device)
    feed, _ = make_feeds(settings, data, model, fabric.device)
    with fabric.autocast():
        return fidelity(model, feed.first(batches), make_loss(settings, data.train))


def save(found: Fidelity, settings: Settings, folder: Path) -> None:
    """Write the table and the picture."""
    choices = ", ".join(dict.fromkeys(map(str, settings.make_plan().layers.values())))
    title = f"{settings.model} on {Path(settings.data).name}, plan {settings.plan}, {choices}, batch {settings.batch}"
    picture = make_fidelity_picture(found, title)
    table = found.to_table()
    table.title = f"{table.title}: {title}"
    with writing_to(folder):
        table.save(folder / "fidelity")
        replace_file(folder / "fidelity.png", picture)
