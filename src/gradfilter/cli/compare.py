"""`gradfilter compare`: all flags of `gradfilter train`, and the plans to compare; the runs; one table and one picture."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import warnings
from collections import deque
from pathlib import Path
from typing import Any

from gradfilter.cli.screen import make_screen
from gradfilter.cli.train import Command, parse_values, tidy
from gradfilter.errors import SettingsError
from gradfilter.train import InterruptedRunError, Settings
from gradfilter.train.compare import PICTURE, STORED, compare, find_folder
from gradfilter.train.variants import KEYS, USUAL

COMPARE = Command(
    "compare",
    "Train several plans side by side, each as a run of its own: one table, and one picture of accuracy, memory and time.",
    "[--config FILE] [--preset NAME] [--data DATA] [--model MODEL] [--plan PLAN] [--SETTING VALUE] [--try VARIANT]...",
    find_folder,
    STORED,
    {
        "try": {
            "type": list[str],
            "default": [],
            "metavar": "VARIANT",
            "help": f"A plan to compare, once for each: words key=value, where key is one of {', '.join(KEYS)}; 'exact'; or a "
            f"plan file. What it leaves out is as the settings say. Where none is given: {', '.join(USUAL)}.",
        },
        "seeds": {"type": int, "default": 1, "metavar": "N", "help": "Train each plan with so many seeds, from --seed on."},
    },
)


def run(argv: list[str]) -> int:
    """Train several plans side by side, and compare what came of them."""
    settings, tries, seeds = parse(argv)
    logging.getLogger("lightning").setLevel(logging.WARNING)  # its greeting
    screen = make_screen(sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            compared = compare(settings, tries, seeds, screen)
    except InterruptedRunError as error:
        screen.close()
        print(f"\n{error}. All is saved. {describe_resume(settings)}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:  # between two runs, or a second time
        screen.close()
        is_there = (find_folder(settings) / STORED).exists()
        print(f"\nstopped at once. {describe_resume(settings) if is_there else ''}", file=sys.stderr)
        return 130
    finally:
        screen.close()
    print(compared.table.to_markdown())
    picture = compared.folder / PICTURE
    print(f"picture: {picture}" if picture.exists() else f"folder: {compared.folder}")
    return 0


def parse(argv: list[str]) -> tuple[Settings, list[str], int]:
    """Return the settings that all variants have in common, the variants, and the number of seeds."""
    values: dict[str, Any] = parse_values(gather(tidy(argv)), COMPARE)
    tries, seeds = values.pop("try"), values.pop("seeds")
    return Settings.from_dict(values), tries, seeds


def gather(argv: list[str]) -> list[str]:
    """Return arguments with all `--try` as one list, which replaces that of a YAML file."""
    tries: list[str] = []
    others: list[str] = []
    rest = deque(argv)
    while rest:
        flag, equals, value = rest.popleft().partition("=")
        if flag != "--try":
            others.append(flag + equals + value)
            continue
        if not equals and not rest:
            raise SettingsError("--try: which plan? Give one, as in --try patch=2.")
        tries.append(value if equals else rest.popleft())
    return [*others, f"--try={json.dumps(tries)}"] if tries else others


def describe_resume(settings: Settings) -> str:
    """Return the command that goes on with a comparison."""
    folder: Path = find_folder(settings)
    command = shlex.join(["gradfilter", "compare", "--config", str(folder / STORED), "--resume"])
    return f"Go on with:\n\n    {command}\n"
