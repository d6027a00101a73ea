"""List models by name: ours, those that label pixels, and what torchvision and timm have."""

from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec

from gradfilter.errors import MissingExtraError, ModelNameError
from gradfilter.models.extras import import_extra
from gradfilter.models.network import PACKAGES, find_entry, list_names
from gradfilter.models.registry import Entry, find_models, find_registered
from gradfilter.models.segmenters import SEGMENTERS
from gradfilter.models.weights import build_shapes, random_weights_from

_COUNTED = 50


@dataclass(frozen=True)
class ModelRow:
    """Say of one model what a user chooses by.

    Attributes:
        name: The name that `make_model` takes.
        parameters: How many it has; None where that was not computed.
        resolution: Height and width of the images it was trained on, in pixels.
        weights_from: Where published weights are found; "none" where nobody is known to publish them.
    """

    name: str
    parameters: int | None
    resolution: int
    weights_from: str


def list_models(pattern: str | None = None) -> list[ModelRow]:
    """List models, ours first.

    Args:
        pattern: A shell glob on the names of ours, of networks for segmentation (with the encoder that they have by
            themselves), of torchvision's classifiers and timm's models, with or without the "torchvision/" or "timm/" in
            front; without wildcards, a part of the name. None for ours alone.

    Returns:
        One row per model. Parameters are counted where there are at most 50 rows.

    Raises:
        ModelNameError: No name matches.
    """
    names = list(find_models()) if pattern is None else find_names(pattern)
    counted = len(names) <= _COUNTED
    return [make_row(find_entry(name), counted) for name in names]


def find_names(pattern: str) -> list[str]:
    """Return the names that a pattern matches, each as short as `make_model` understands it."""
    wanted = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    found = [name for name in find_models() if matches(name, wanted)]
    found += [name for name in SEGMENTERS if matches(name, wanted) and find_spec("segmentation_models_pytorch")]
    taken = set(list_names("torchvision")) if find_spec("torchvision") else set()
    for package in PACKAGES:
        for bare in list_classifiers(package) if find_spec(package) else []:
            full = f"{package}/{bare}"
            if find_registered(full) or not (matches(bare, wanted) or matches(full, wanted)):
                continue
            is_clear = not find_registered(bare) and (package == "torchvision" or bare not in taken)
            found.append(bare if is_clear else full)
    if not found:
        places = " and ".join(["ours", *(f"{package}'s" for package in PACKAGES if find_spec(package))])
        raise ModelNameError(
            f"No model matches {pattern!r}, of {places}. Give a part of a name, or a pattern such as 'mobilenet*'."
        )
    return found


def matches(name: str, pattern: str) -> bool:
    """Tell whether a shell glob matches a name; case does not count."""
    return fnmatchcase(name.lower(), pattern.lower())


def list_classifiers(package: str) -> list[str]:
    """List the models of torchvision or timm that take images and return logits."""
    if package == "timm":
        return list_names(package)
    models = import_extra(package, "The list of torchvision's models").models
    return models.list_models(module=models)


def make_row(entry: Entry, counted: bool) -> ModelRow:
    """Return the row of a model; its parameters are not known where a package is missing that builds it."""
    parameters = None
    if counted:
        with suppress(MissingExtraError), random_weights_from(None):
            parameters = sum(p.numel() for p in build_shapes(entry).parameters())
    return ModelRow(entry.info.name, parameters, entry.info.resolution, entry.info.weights_from)
