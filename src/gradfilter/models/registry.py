"""The table of model names: what each expects of its input, how it is built, how its weight files name things."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from gradfilter.errors import ModelNameError

Build = Callable[[int], nn.Module]
PairKeys = Callable[[Sequence[str], Sequence[str]], dict[str, str]]


class Resettable(Protocol):
    """What every registered model can do besides being a module; timm's models have the same method."""

    def reset_classifier(self, num_classes: int, /) -> None:
        """Replace the classifier by one with random weights."""
        ...


@dataclass(frozen=True)
class ModelInfo:
    """Say what a model expects and where its weights come from.

    Attributes:
        name: The name that `make_model` takes.
        resolution: Height and width of the images it was trained on, in pixels.
        mean: Per channel, to subtract from images in [0, 1].
        std: Per channel, to divide by afterwards.
        classes: Number of outputs of the published weights.
        weights_from: Where the published weights are found.
    """

    name: str
    resolution: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    classes: int
    weights_from: str


@dataclass(frozen=True)
class Entry:
    """Hold one row of the table.

    Attributes:
        info: What users see.
        build: Makes the model with random weights for a number of classes.
        pair_keys: Maps our state_dict keys to those of a weight file; takes both lists of keys, in order.
        pretrained: Finds the weight file that a pip package carries; None where there is no such package.
    """

    info: ModelInfo
    build: Build
    pair_keys: PairKeys
    pretrained: Callable[[], Path] | None = None


_entries: dict[str, Entry] = {}


def register(info: ModelInfo, *, pair_keys: PairKeys, pretrained: Callable[[], Path] | None = None) -> Callable[[Build], Build]:
    """Register the decorated function as the builder of `info.name`; a name that is taken is refused."""

    def decorate(build: Build) -> Build:
        if info.name in _entries:
            raise ModelNameError(f"A model named {info.name!r} is registered already. Choose another name.")
        _entries[info.name] = Entry(info, build, pair_keys, pretrained)
        return build

    return decorate


def find_models() -> dict[str, ModelInfo]:
    """List the models that `make_model` builds, by name."""
    return {name: _entries[name].info for name in sorted(_entries)}


def get_entry(name: str) -> Entry:
    """Look up a model, or raise an error that lists near names."""
    if name in _entries:
        return _entries[name]
    near = difflib.get_close_matches(name, _entries, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ModelNameError(f"No model is named {name!r}. {hint}The models are {', '.join(sorted(_entries))}.")
