"""`gradfilter train`: settings from flags, a YAML file or a preset; the run; how to go on with it."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
import sys
import typing
import warnings
from typing import Any

from gradfilter.cli.screen import make_screen
from gradfilter.errors import SettingsError
from gradfilter.models.extras import import_extra
from gradfilter.report import Results
from gradfilter.train import InterruptedRunError, Settings, train
from gradfilter.train.presets import get_preset
from gradfilter.train.run import CONFIG

FLAGS = {field.name for field in dataclasses.fields(Settings)}


def run(argv: list[str]) -> int:
    """Fine-tune a classifier on a folder of images, with filtered gradients."""
    settings = parse(argv)
    logging.getLogger("lightning").setLevel(logging.WARNING)  # its greeting
    screen = make_screen(sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            results = train(settings, screen)
    except InterruptedRunError as error:
        screen.close()
        print(f"\n{error}. All is saved. Go on with:\n\n    {describe_resume(settings)}\n", file=sys.stderr)
        return 130
    finally:
        screen.close()
    print(describe_results(results, settings))
    return 0


def parse(argv: list[str]) -> Settings:
    """Return the settings: what the flags say, then the YAML file, then the preset, then the defaults."""
    argv = tidy(argv)
    values = parse_with(argv, {})
    settings = Settings.from_dict(values)
    if settings.resume and not any(argument.startswith("--config") for argument in argv):
        stored = settings.folder / CONFIG
        if stored.exists():
            argv = ["--config", str(stored), *argv]
            values = parse_with(argv, {})
    if values.get("preset"):
        values = parse_with(argv, get_preset(values["preset"]))
    return Settings.from_dict(values)


def parse_with(argv: list[str], defaults: dict[str, Any]) -> dict[str, Any]:
    """Parse the flags over other defaults."""
    jsonargparse = import_extra("jsonargparse", "gradfilter train")
    parser = jsonargparse.ArgumentParser(
        prog="gradfilter train",
        description="Fine-tune a classifier on a folder of images, with filtered gradients.",
        usage="gradfilter train [--config FILE] [--preset NAME] [--data DATA] [--model MODEL] [--plan PLAN] [--SETTING VALUE]",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="A YAML file of settings, as a run writes it; flags override it.")
    parser.add_class_arguments(Settings, None)
    if defaults:
        parser.set_defaults(defaults)
    try:
        values = parser.parse_args(argv).as_dict()
    except jsonargparse.ArgumentError as error:
        raise SettingsError(explain(str(error))) from error
    return {name: value for name, value in values.items() if name in FLAGS}


def tidy(argv: list[str]) -> list[str]:
    """Return arguments as the parser takes them: '-' in names of flags is '_', and a switch alone means true."""
    switches = {f"--{name}" for name, kind in typing.get_type_hints(Settings).items() if kind is bool}
    tidied: list[str] = []
    for i, argument in enumerate(argv):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = "--" + name[2:].replace("-", "_") + equals + value
        tidied.append(argument)
        if argument in switches and argv[i + 1 : i + 2] not in (["true"], ["false"]):
            tidied.append("true")
    return tidied


def explain(text: str) -> str:
    """Return a parser's error as one of ours: which flag, what is wrong, what would be right."""
    text = " ".join(text.split())
    unknown = re.search(r"(?:unrecognized arguments: |Key \"?)(?:--)?(\w+)", text)
    if unknown and unknown[1] not in FLAGS:
        near = difflib.get_close_matches(unknown[1], FLAGS, 1, 0.6)
        hint = f"Did you mean --{near[0]}? " if near else ""
        return f"there is no setting {unknown[1]!r}. {hint}'gradfilter train --help' lists them all."
    return re.sub(r'^Parser key "(\w+)":', r"--\1:", text) + ". 'gradfilter train --help' tells what each setting takes."


def describe_resume(settings: Settings) -> str:
    """Return the command that goes on with a run."""
    return f"gradfilter train --config {settings.folder / CONFIG} --resume"


def describe_results(results: Results, settings: Settings) -> str:
    """Return the last lines of a run: what came of it, and where it is."""
    best, cost = results.best, results.cost
    beside = f", {results.beside.name} {results.beside.accuracy:.1%}," if results.beside else ""
    line = f"accuracy {best.val_accuracy:.1%}{beside} on {sum(results.val_counts)} held-out images (epoch {best.epoch})"
    if cost is not None:
        fewer = cost.exact_saved_bytes / max(1, cost.saved_bytes)
        line += f"; autograd held {cost.saved_bytes / 1e6:.1f} MB, {fewer:.1f}x fewer than the"
        line += f" {cost.exact_saved_bytes / 1e6:.1f} MB of exact backprop"
        if cost.step_ratio == cost.step_ratio:  # not NaN
            line += f"; a step took {cost.step_seconds * 1e3:.0f} ms, {cost.step_ratio:.2f} of an exact one"
    return f"{line}\nreport: {settings.folder / 'report.html'}\nweights: {settings.folder / results.weights_file}"
