"""`gradfilter train`: settings from flags, a YAML file or a preset; the run; how to go on with it."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
import shlex
import sys
import typing
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradfilter.cli.screen import make_screen
from gradfilter.errors import SettingsError
from gradfilter.models.extras import import_extra
from gradfilter.report import Results
from gradfilter.train import InterruptedRunError, Settings, train
from gradfilter.train.folder import CONFIG
from gradfilter.train.presets import get_preset

FLAGS = {setting.name for setting in dataclasses.fields(Settings)}
NOTHING = {"--patch": "null", "--grid": "null", "--keep": "null", "--exact": "false"}
TAKES_PLACE = {
    "--patch": ("--grid", "--exact"),
    "--grid": ("--patch", "--exact"),
    "--keep": ("--exact",),
    "--exact=true": ("--keep",),
}
"""What a flag takes the place of in a preset or a file."""


def run(argv: list[str]) -> int:
    """Fine-tune a model on a folder of images, with filtered gradients."""
    settings = parse(argv)
    logging.getLogger("lightning").setLevel(logging.WARNING)  # its greeting
    screen = make_screen(sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            results = train(settings, screen)
    except InterruptedRunError as error:
        screen.close()
        print(f"\n{error}. All is saved. {describe_resume(settings)}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:  # before the first step, after the last, or a second time
        screen.close()
        is_there = (settings.folder / CONFIG).exists()
        print(f"\nstopped at once. {describe_resume(settings) if is_there else ''}", file=sys.stderr)
        return 130
    finally:
        screen.close()
    print(describe_results(results, settings))
    return 0


@dataclass(frozen=True)
class Command:
    """A command that takes all settings as flags, and perhaps some flags of its own.

    Attributes:
        name: Of the command.
        description: What it does.
        usage: What comes behind its name.
        find_folder: From settings to the folder of what it makes.
        stored: The file there that a resumed one takes its settings from.
        own: Its own flags, by name: the arguments of `add_argument`.
    """

    name: str
    description: str
    usage: str
    find_folder: Callable[[Settings], Path]
    stored: str
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def flags(self) -> set[str]:
        """Return the names of all flags."""
        return FLAGS | self.own.keys()


TRAIN = Command(
    "train",
    "Fine-tune a model on a folder of images, with filtered gradients.",
    "[--config FILE] [--preset NAME] [--data DATA] [--model MODEL] [--plan PLAN] [--SETTING VALUE]",
    lambda settings: settings.folder,
    CONFIG,
)


def parse(argv: list[str]) -> Settings:
    """Return the settings: what the flags say, then the YAML file, then the preset, then the defaults."""
    return Settings.from_dict(parse_values(tidy(argv), TRAIN))


def parse_values(argv: list[str], command: Command) -> dict[str, Any]:
    """Return the values of all flags of a command."""
    plain = [argument for argument in argv if not argument.startswith("--print_config")]
    values = parse_with(plain, {}, command)
    if values["resume"] and not any(argument.startswith("--config") for argument in argv):
        stored = find_folder(over_preset(plain, values, command), command) / command.stored
        if stored.exists():
            argv, plain = [f"--config={stored}", *argv], [f"--config={stored}", *plain]
            values = parse_with(plain, {}, command)
    return over_preset(argv, values, command)


def over_preset(argv: list[str], values: dict[str, Any], command: Command) -> dict[str, Any]:
    """Parse the flags over the defaults of the preset that they, or the YAML file, name."""
    return parse_with(argv, get_preset(values["preset"]) if values["preset"] else {}, command)


def find_folder(values: dict[str, Any], command: Command) -> Path:
    """Return the folder of a run of which not all settings are known yet."""
    return command.find_folder(
        Settings(**{name: values[name] for name in "out task data model encoder plan patch grid kernel keep exact".split()})
    )


def parse_with(argv: list[str], defaults: dict[str, Any], command: Command) -> dict[str, Any]:
    """Parse the flags over other defaults."""
    jsonargparse = import_extra("jsonargparse", f"gradfilter {command.name}")
    parser = jsonargparse.ArgumentParser(
        prog=f"gradfilter {command.name}",
        description=command.description,
        usage=f"gradfilter {command.name} {command.usage}",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="A YAML file of settings, as a run writes it; flags override it.")
    for name, options in command.own.items():
        parser.add_argument(f"--{name}", **options)
    parser.add_class_arguments(Settings, None)
    if defaults:
        parser.set_defaults(defaults)
    try:
        values = parser.parse_args(argv).as_dict()
    except jsonargparse.ArgumentError as error:
        raise SettingsError(explain(str(error), command)) from error
    return {name: value for name, value in values.items() if name in command.flags}


def tidy(argv: list[str]) -> list[str]:
    """Return arguments as the parser takes them.

    '-' in names of flags is '_', a switch alone means true, the YAML file comes first, for flags override it wherever they
    stand, and a size of patches, a keep and exact backprop take the place of a preset's.
    """
    switches = {f"--{name}" for name, kind in typing.get_type_hints(Settings).items() if kind is bool}
    configs: list[str] = []
    tidied: list[str] = []
    rest = deque(argv)
    while rest:
        flag, equals, value = rest.popleft().partition("=")
        if flag.startswith("--"):
            flag = "--" + flag[2:].replace("-", "_")
        if flag in switches and not equals:
            is_told = bool(rest) and rest[0].lower() in ("true", "false")
            equals, value = "=", rest.popleft().lower() if is_told else "true"
        elif flag in switches:
            value = value.lower()
        if flag == "--config" and not equals and rest:
            equals, value = "=", rest.popleft()
        (configs if flag == "--config" else tidied).append(flag + equals + value)
    given = {argument.partition("=")[0] for argument in tidied}
    replaced = {other for flag, others in TAKES_PLACE.items() if flag in {*given, *tidied} for other in others}
    return configs + tidied + [f"{flag}={NOTHING[flag]}" for flag in sorted(replaced - given)]


def explain(text: str, command: Command) -> str:
    """Return a parser's error as one of ours: which flag, what is wrong, what would be right."""
    text = " ".join(text.split())
    unknown = re.search(r"(?:unrecognized arguments: |Key \"?|Option ')(?:--)?(\w+)", text)
    if unknown and unknown[1] not in command.flags:
        near = difflib.get_close_matches(unknown[1], command.flags, 1, 0.6)
        hint = f"Did you mean --{near[0]}? " if near else ""
        return f"there is no setting {unknown[1]!r}. {hint}'gradfilter {command.name} --help' lists them all."
    text = re.sub(r'^Parser key "(\w+)":', r"--\1:", text)
    text = re.sub(r"Does not validate .*?Errors: - (.*?) - .*Given value: ", r"\1. Got value: ", text)
    text = re.sub(r"Expected a typing.Literal\[(.*?)\]", r"Expected one of \1", text)
    return re.sub(r"<class '(\w+)'>", r"\1", text) + f". 'gradfilter {command.name} --help' tells what each setting takes."


def describe_resume(settings: Settings) -> str:
    """Return the command that goes on with a run."""
    command = shlex.join(["gradfilter", "train", "--config", str(settings.folder / CONFIG), "--resume"])
    return f"Go on with:\n\n    {command}\n"


def describe_results(results: Results, settings: Settings) -> str:
    """Return the last lines of a run: what came of it, and where it is."""
    best, cost = results.best, results.cost
    beside = f", {results.beside.name} {results.beside.accuracy:.1%}," if results.beside else ""
    line = f"{results.metric} {best.val_accuracy:.1%}{beside} on {results.val_images} held-out images (epoch {best.epoch})"
    if cost is not None:
        fewer = cost.exact_saved_bytes / max(1, cost.saved_bytes)
        line += f"; autograd held {cost.saved_bytes / 1e6:.1f} MB, {fewer:.1f}x fewer than the"
        line += f" {cost.exact_saved_bytes / 1e6:.1f} MB of exact backprop"
        if cost.step_ratio == cost.step_ratio:  # not NaN
            line += f"; a step took {cost.step_seconds * 1e3:.0f} ms, {cost.step_ratio:.2f} of an exact one"
    return f"{line}\nreport: {settings.folder / 'report.html'}\nweights: {settings.folder / results.weights_file}"
