"""`gradfilter presets`: the papers' recipes."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

from gradfilter.errors import SettingsError
from gradfilter.table import align
from gradfilter.train.presets import find_presets


def run(argv: list[str]) -> int:
    """List the papers' recipes that 'train --preset' knows."""
    parser = argparse.ArgumentParser(prog="gradfilter presets", description=run.__doc__)
    parser.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="e.g. 'cifar10-mcunet-*'")
    args = parser.parse_args(argv)
    found = [preset for name, preset in find_presets().items() if fnmatchcase(name, args.pattern)]
    if not found:
        raise SettingsError(f"no preset matches {args.pattern!r}. 'gradfilter presets' lists them all.")
    rows = [(p.name, *((f"{p.published.accuracy:.1f} %", p.published.paper) if p.published else ("–", "–"))) for p in found]
    print("\n".join(align(("preset", "published accuracy", "paper"), rows)))
    return 0
