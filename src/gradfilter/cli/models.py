"""`gradfilter models`: what can be trained?"""

from __future__ import annotations

import argparse

from gradfilter.models.listing import list_models
from gradfilter.models.segmenters import SEGMENTERS
from gradfilter.table import align


def run(argv: list[str]) -> int:
    """List models, their parameters, and where weights come from."""
    parser = argparse.ArgumentParser(prog="gradfilter models", description=run.__doc__)
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="also search segmentation networks, torchvision and timm, e.g. 'mobilenet*'",
    )
    args = parser.parse_args(argv)
    rows = [
        (row.name, f"{row.parameters:,}" if row.parameters is not None else "–", row.resolution, row.weights_from)
        for row in list_models(args.pattern)
    ]
    print("\n".join(align(("model", "parameters", "pixels", "pretrained weights"), rows)))
    if args.pattern is None:
        print(
            "\nAny model of timm and torchvision works by its name: 'gradfilter models PATTERN' finds them; a model of your "
            f"own as module:function. For --task segment: {', '.join(SEGMENTERS)}, each with any --encoder of "
            "segmentation-models-pytorch, or timm's behind 'tu-'."
        )
    return 0
