"""`gradfilter eval`: how good is the classifier of a run?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gradfilter.cli.screen import make_screen
from gradfilter.errors import SettingsError
from gradfilter.table import align
from gradfilter.train.use import Classifier, find_judged_images


def run(argv: list[str]) -> int:
    """Judge the classifier of a run on held-out images, or on others."""
    parser = argparse.ArgumentParser(prog="gradfilter eval", description=run.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or a checkpoint in it")
    parser.add_argument("--data", metavar="DATA", help="other images than the run's own: a folder per class, or a known set")
    parser.add_argument("--part", choices=("val", "test", "train"), default="val", help="which part of the data (default: val)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="images at a time (default: 64)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that load images (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    if args.batch < 1 or args.workers < 0:
        raise SettingsError(f"--batch {args.batch} --workers {args.workers} cannot be: give at least 1 and 0.")
    classifier = Classifier.load(args.run)
    images = find_judged_images(classifier, args.data, args.part)
    judged = classifier.judge(images, args.batch, args.workers, make_screen(sys.stderr))
    if args.json:
        result = {"data": images.name, "images": len(images), "accuracy": judged.accuracy, "loss": judged.loss}
        print(json.dumps({**result, "classes": classifier.classes, "confusion": judged.confusion}))
        return 0
    rows = [
        (name, sum(row), f"{row[i] / sum(row):.1%}" if sum(row) else "–", find_rival(row, i, classifier.classes))
        for i, (name, row) in enumerate(zip(classifier.classes, judged.confusion, strict=True))
    ]
    print("\n".join(align(("class", "images", "right", "most often taken for"), rows)))
    print(f"\naccuracy {judged.accuracy:.2%}, loss {judged.loss:.3f}, {len(images)} images of {images.name}")
    return 0


def find_rival(row: tuple[int, ...], own: int, classes: tuple[str, ...]) -> str:
    """Return the class that images of one class are most often taken for."""
    count, i = max((count, -i) for i, count in enumerate(row) if i != own)
    return f"{classes[-i]} ({count})" if count else "–"
