"""What several commands share: flags, a quiet screen, folders to write to."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradfilter.cli.screen import make_screen
from gradfilter.errors import SettingsError
from gradfilter.plan import Plan
from gradfilter.train.watch import Watch

MODEL_HELP = (
    "a name of gradfilter.models, torchvision or timm (torchvision/NAME and timm/NAME tell the two apart), or module:function "
    "for a function of your own that takes no arguments and returns the model"
)
OVERRIDES = ("patch", "grid", "kernel", "keep", "trunk")
"""The flags that override a plan's choices."""


def add_model_and_plan(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a model and a plan."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--encoder", metavar="NAME", help="what is in front of a decoder such as deeplabv3 (default: resnet18)")
    add_plan(parser)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a plan."""
    parser.add_argument(
        "--plan", default="all", help="which layers to train: all (default), head, decoder, last4, or a plan in a YAML file"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--patch", type=int, metavar="N", help="side of a patch in pixels of each layer's map; overrides the plan's"
    )
    size.add_argument(
        "--grid", type=int, metavar="N", help="patches per side, at every resolution (default: 4); overrides the plan's"
    )
    parser.add_argument("--kernel", choices=("lift", "lumped"), help="the coarse kernel (default: lift); overrides the plan's")
    parser.add_argument(
        "--keep", help="how inputs of layers are held until backward: int8, hosvd:0.8, subspace:64KB, ...; overrides the plan's"
    )
    parser.add_argument(
        "--trunk",
        choices=("float32", "bfloat16"),
        help="what frozen layers before the first trained one compute in (default: float32); overrides the plan's",
    )


def make_plan(args: argparse.Namespace, **choices: Any) -> Plan:
    """Return the plan that the flags name, with their overrides and others."""
    given = {name: getattr(args, name) for name in OVERRIDES}
    trunk = given.pop("trunk")
    plan = Plan.parse(args.plan).override(**given, **choices)
    return dataclasses.replace(plan, trunk=trunk or plan.trunk)


@contextmanager
def watching() -> Iterator[Watch]:
    """Yield a screen that is told what happens, with Lightning's own greetings off it."""
    logging.getLogger("lightning").setLevel(logging.WARNING)
    screen = make_screen(sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield screen
    finally:
        screen.close()


@contextmanager
def writing_to(folder: Path, flag: str = "--out") -> Iterator[None]:
    """Make the folder that a flag names; say so where it, or what is written to it inside, cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise SettingsError(f"{flag} {folder} cannot be written: {error.strerror or error}. Give another folder.") from error
