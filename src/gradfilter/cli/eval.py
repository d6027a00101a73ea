"""`gradfilter eval`: how good is the model of a run?"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, get_args

from gradfilter.cli.screen import make_screen
from gradfilter.data import Evaluate
from gradfilter.errors import SettingsError
from gradfilter.scores import Scores
from gradfilter.table import NOTHING, align
from gradfilter.train.judge import Judged
from gradfilter.train.use import Trained, find_judged_images


def run(argv: list[str]) -> int:
    """Judge the model of a run on held-out images, or on others."""
    parser = argparse.ArgumentParser(prog="gradfilter eval", description=run.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or a checkpoint in it")
    parser.add_argument("--data", metavar="DATA", help="other images than the run's: a folder as for training, or a known set")
    parser.add_argument("--part", choices=("val", "test", "train"), default="val", help="which part of the data (default: val)")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="images at a time (default: 64, or where masks are made the run's)"
    )
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that load images (default: 0)")
    add_evaluate(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    if (args.batch is not None and args.batch < 1) or args.workers < 0:
        raise SettingsError(f"--batch {args.batch} --workers {args.workers} cannot be: give at least 1 and 0.")
    trained = Trained.load(args.run, args.evaluate)
    images = find_judged_images(trained, args.data, args.part)
    judged = trained.judge(images, args.batch, args.workers, make_screen(sys.stderr))
    scores = trained.task.scores
    overall = {name: rate(judged.confusion) for name, rate in scores.overall.items()}
    if args.json:
        print(json.dumps({"data": images.name, "images": len(images), **to_plain(overall, judged, scores, trained.classes)}))
        return 0
    print("\n".join(make_lines(judged.confusion, scores, trained.classes)))
    rates = ", ".join(f"{name} {rate:.2%}" for name, rate in overall.items())
    print(f"\n{rates}, loss {judged.loss:.3f}, {len(images)} images of {images.name}")
    return 0


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Add the flag that says how images are shown to a model that labels pixels."""
    text = "show images whole, or through windows, to a model that labels pixels (default: as in the run)"
    parser.add_argument("--evaluate", choices=get_args(Evaluate), help=text)


def to_plain(overall: dict[str, float], judged: Judged, scores: Scores, classes: tuple[str, ...]) -> dict[str, Any]:
    """Return all scores as JSON can hold them."""
    by_class = {name: rate(judged.confusion).tolist() for name, rate in scores.by_class.items()}
    plain = {**overall, "loss": judged.loss, "classes": classes, **by_class, "confusion": judged.confusion}
    return {name: to_known(value) for name, value in plain.items()}


def to_known(value: Any) -> Any:
    """Return a value with None for NaN, which JSON does not have."""
    if isinstance(value, list):
        return [to_known(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def make_lines(confusion: tuple[tuple[int, ...], ...], scores: Scores, classes: tuple[str, ...]) -> list[str]:
    """Return a table of the classes."""
    by_class = [rate(confusion) for rate in scores.by_class.values()]
    rows = [
        (name, f"{sum(row):,}", *(show_share(rates[i]) for rates in by_class), find_rival(row, i, classes))
        for i, (name, row) in enumerate(zip(classes, confusion, strict=True))
    ]
    return align(("class", f"{scores.unit}s", *scores.by_class, "most often taken for"), rows)


def show_share(share: float) -> str:
    """Return a share in percent."""
    return NOTHING if math.isnan(share) else f"{share:.1%}"


def find_rival(row: tuple[int, ...], own: int, classes: tuple[str, ...]) -> str:
    """Return the class that images or pixels of one class are most often taken for."""
    count, i = max((count, -i) for i, count in enumerate(row) if i != own)
    return f"{classes[-i]} ({count:,})" if count else "–"
