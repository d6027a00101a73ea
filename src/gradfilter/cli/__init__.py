"""The command line `gradfilter`: one module per sub-command, and the table that names them."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap

from gradfilter.errors import GradFilterError
from gradfilter.models.torchvision_ops import declare_torchvision_ops

COMMANDS = {
    "train": "Fine-tune a classifier on a folder of images, with filtered gradients.",
    "compare": "Train several plans side by side: one table, and one picture of accuracy, memory and time.",
    "eval": "Judge the classifier of a run on held-out images, or on others.",
    "predict": "Classify images, or folders of them, with the classifier of a run.",
    "models": "List models, their parameters, and where weights come from.",
    "presets": "List the papers' recipes that 'train --preset' knows.",
    "data": "List the data sets that 'train --data' knows.",
    "check": "Run one training step of a model on random images, under a plan; tell what the plan does, meets and saves.",
    "cost": "Tell flops, bytes and time of a training step by layer, under a plan and exactly.",
    "bench": "Measure the price of a training step in inference passes, beside exact backprop and other peers.",
    "plan": "Choose layers and patch sizes for the most useful gradient within a budget of memory, time or flops.",
    "fidelity": "Compare the gradients of a plan with exact backprop, layer by layer, on your images.",
}
"""Sub-commands by name: each is the function `run` of the module of that name."""


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command.

    Returns:
        0; 1 where what it checks is not right; 2 for an error; 130 when it was interrupted; 141, as of programs that die of it,
        when nobody reads its output any more.
    """
    try:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:  # None where it was closed from the start
                sys.stdout.flush()  # not at exit, where nobody can catch what comes of it
    except BrokenPipeError:  # the reader, head or less, has seen enough
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())
        return 141


def run(arguments: list[str]) -> int:
    """Run one sub-command; errors that a user can mend become one line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(make_help())
        return 0 if arguments else 2
    name, *rest = arguments
    try:
        if name not in COMMANDS:
            raise GradFilterError(f"there is no command {name!r}. The commands are {', '.join(COMMANDS)}.")
        declare_torchvision_ops()
        return importlib.import_module(f"gradfilter.cli.{name}").run(rest)
    except GradFilterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def make_help() -> str:
    """Return the overview of all commands."""
    width = max(map(len, COMMANDS)) + 4
    lines = [
        textwrap.fill(text, 100, initial_indent=f"  {name}".ljust(width), subsequent_indent=" " * width)
        for name, text in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: gradfilter COMMAND ...",
            "",
            "Train convolutional networks on small machines: forward at pixel resolution, backward at patch resolution.",
            "",
            *lines,
            "",
            "'gradfilter COMMAND --help' tells what each takes.",
        ]
    )
