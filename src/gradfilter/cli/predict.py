"""`gradfilter predict`: what is in these images?"""

from __future__ import annotations

import argparse
import csv
import json
import sys

from gradfilter.train.use import Classifier, find_image_files


def run(argv: list[str]) -> int:
    """Classify images, or folders of them, with the classifier of a run."""
    parser = argparse.ArgumentParser(prog="gradfilter predict", description=run.__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a checkpoint in it")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files, or folders of them")
    parser.add_argument("--top", type=int, default=1, metavar="N", help="name the N likeliest classes (default: 1)")
    parser.add_argument("--format", choices=("text", "csv", "json"), default="text", help="of what is printed (default: text)")
    args = parser.parse_args(argv)
    classifier = Classifier.load(args.run)
    files, skipped = find_image_files(args.images)
    for line in skipped:
        print(f"skipped {line}", file=sys.stderr)
    rows = ((file, classes[: max(1, args.top)]) for file, classes in classifier.predict(files))
    if args.format == "json":
        data = [{"file": file, "classes": [{"class": name, "probability": p} for name, p in found]} for file, found in rows]
        print(json.dumps(data, indent=1))
    elif args.format == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(["file", "rank", "class", "probability"])
        writer.writerows((file, rank, name, f"{p:.4f}") for file, found in rows for rank, (name, p) in enumerate(found, 1))
    else:
        for file, found in rows:
            print(f"{file}: {', '.join(f'{name} {p:.1%}' for name, p in found)}")
    return 0
