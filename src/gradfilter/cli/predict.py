"""`gradfilter predict`: what is in these images?"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradfilter.cli.eval import add_evaluate
from gradfilter.errors import SettingsError
from gradfilter.train.labelled import LabelledFolder
from gradfilter.train.use import Prediction, Trained, find_image_files

FOLDER = Path("predictions")
"""Where masks are written to where nothing is said."""


def run(argv: list[str]) -> int:
    """Label images, or folders of them, with the model of a run; a model that labels pixels writes masks."""
    parser = argparse.ArgumentParser(prog="gradfilter predict", description=run.__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a checkpoint in it")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files, or folders of them")
    parser.add_argument("--top", type=int, metavar="N", help="name the first N classes (default: 1, or all that pixels have)")
    parser.add_argument("--format", choices=("text", "csv", "json"), default="text", help="of what is printed (default: text)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"for masks/ and overlays/ (default: {FOLDER}/)")
    parser.add_argument("--overwrite", action="store_true", help="replace masks and overlays that are there")
    add_evaluate(parser)
    args = parser.parse_args(argv)
    trained = Trained.load(args.run, args.evaluate)
    labels_pixels = trained.task.unit == "pixel"
    if not labels_pixels and (args.out or args.overwrite):
        raise SettingsError(f"--out and --overwrite are for masks, but '{trained.file}' labels whole images. Leave them out.")
    files, skipped = find_image_files(args.images)
    for line in skipped:
        print(f"skipped {line}", file=sys.stderr)
    folder = LabelledFolder.plan(args.out or FOLDER, files, args.overwrite) if labels_pixels else None
    rows = (make_row(found, args.top, trained, folder) for found in trained.predict(files))
    show(rows, args.format, "share" if labels_pixels else "probability")
    return 0


def make_row(found: Prediction, top: int | None, trained: Trained, folder: LabelledFolder | None) -> dict[str, Any]:
    """Return what is printed of an image, after its mask is written, where it has one."""
    if folder is None or found.labels is None:
        return {"file": found.file, "classes": found.classes[: max(1, top or 1)]}
    seen = [(name, share) for name, share in found.classes if share > 0]
    written = folder.write(found, trained)
    return {"file": found.file, **written, "classes": seen[: max(1, top or len(seen))]}


def show(rows: Iterator[dict[str, Any]], form: str, number: str) -> None:
    """Print rows, each as soon as it is there, but for JSON."""
    if form == "json":
        pairs = [{**row, "classes": [{"class": name, number: p} for name, p in row["classes"]]} for row in rows]
        print(json.dumps(pairs, indent=1))
    elif form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(["file", "rank", "class", number])
        for row in rows:
            writer.writerows((row["file"], rank, name, f"{p:.4f}") for rank, (name, p) in enumerate(row["classes"], 1))
    else:
        for row in rows:
            print(f"{row['file']}: {', '.join(f'{name} {p:.1%}' for name, p in row['classes'])}")
