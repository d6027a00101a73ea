"""`gradfilter presets`: the papers' recipes."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from pathlib import Path

from gradfilter.errors import SettingsError
from gradfilter.models import join_encoder
from gradfilter.models.network import find_entry
from gradfilter.table import align
from gradfilter.train.presets import Preset, find_presets


def run(argv: list[str]) -> int:
    """List the papers' recipes that 'train --preset' knows."""
    parser = argparse.ArgumentParser(prog="gradfilter presets", description=run.__doc__)
    parser.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="e.g. 'cifar10-mcunet-*'")
    args = parser.parse_args(argv)
    found = [preset for name, preset in find_presets().items() if fnmatchcase(name, args.pattern)]
    if not found:
        raise SettingsError(f"no preset matches {args.pattern!r}. 'gradfilter presets' lists them all.")
    nothing = ("–", "–")
    published = [(str(p.published), p.published.paper) if p.published else nothing for p in found]
    rows = [(p.name, describe_weights(p), *result) for p, result in zip(found, published, strict=True)]
    print("\n".join(align(("preset", "weights", "published accuracy", "paper"), rows)))
    return 0


def describe_weights(preset: Preset) -> str:
    """Return where a recipe's weights come from: where no package or hub carries them, the user has to give a file."""
    weights = str(preset.settings["weights"])
    model = join_encoder(preset.settings["model"], preset.settings.get("encoder"))
    if weights == "pretrained" and not find_entry(model).is_carried:
        return "give --weights FILE"
    return weights if weights in ("pretrained", "random") else f"of {Path(weights).parent.name}"
