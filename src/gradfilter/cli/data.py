"""`gradfilter data`: what can be trained on?"""

from __future__ import annotations

import argparse

from gradfilter.data.sets import find_root, find_sets
from gradfilter.table import align


def run(argv: list[str]) -> int:
    """List the data sets that 'train --data' knows."""
    argparse.ArgumentParser(prog="gradfilter data", description=run.__doc__).parse_args(argv)
    rows = [
        (
            info.name,
            info.task,
            info.classes,
            ", ".join(f"{part} {count:,}" for part, count in info.counts.items()),
            info.source,
        )
        for info in find_sets(None).values()
    ]
    print("\n".join(align(("data", "task", "classes", "images", "from"), rows)))
    print(
        f"\nThey are looked for in {find_root()} (or --root), and fetched with --download. Or give a folder of your own, with "
        "one folder per class, or images/ and masks/."
    )
    return 0
