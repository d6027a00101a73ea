"""Build any network by name: one of ours, torchvision's or timm's, or what a user's own function returns."""

import difflib
import importlib
import inspect
import os
import sys
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gradfilter.errors import GradFilterError, ModelNameError
from gradfilter.models.extras import import_extra
from gradfilter.models.registry import find_models, get_entry
from gradfilter.models.weights import random_weights_from

PACKAGES = ("torchvision", "timm")
"""Where a bare name is looked up after ours, in this order: a name that both have is torchvision's."""


def make_network(name: str, *, generator: torch.Generator | None = None, **options: Any) -> nn.Module:
    """Build a network by name with random weights, on the CPU. Nothing is downloaded.

    Args:
        name: One of `find_models`; a name that `torchvision.models.list_models()` or `timm.list_models()` gives, bare (one
            that both have is torchvision's) or behind "torchvision/" or "timm/"; or "module:function" for a function of the
            user's own that returns a model. The module is looked up in the current directory too, as `python -m` does.
        generator: Source of all random weights, as for `make_model`.
        options: Arguments for whatever builds the network, e.g. `num_classes=10` for timm and torchvision.

    Raises:
        ModelNameError: The name is not known, or there is no such module or function.
        MissingExtraError: timm or torchvision is asked for and not installed.
        GradFilterError: The user's module or function failed, or it returned something else than a model.
    """
    with random_weights_from(generator):
        if ":" in name:
            return call_function(name, options)
        if name in find_models():
            entry = get_entry(name)
            return entry.build(options.pop("classes", entry.info.classes), **options)
        return make_listed(name, **options)


def make_listed(name: str, **options: Any) -> nn.Module:
    """Build a network that torchvision or timm lists, under whatever random state and device there is."""
    prefix, _, bare = name.rpartition("/")
    for package in PACKAGES:
        if prefix == package or (not prefix and find_spec(package)):
            module = import_extra(package, f"Model {name!r}")
            if bare in list_names(package):
                return module.create_model(bare, **options) if package == "timm" else make_torchvision(module, bare, options)
    if not prefix and not any(find_spec(package) for package in PACKAGES):
        import_extra(PACKAGES[0], f"Model {name!r}, which is none of ours ({', '.join(find_models())}),")
    raise ModelNameError(explain_unknown(name))


def make_torchvision(package: ModuleType, name: str, options: dict[str, Any]) -> nn.Module:
    """Build one of torchvision's networks."""
    builder = package.models.get_model_builder(name)
    if "weights_backbone" in inspect.signature(builder).parameters:
        options = {"weights_backbone": None, **options}  # the default would be downloaded
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The default weight initialization", FutureWarning)
        return builder(weights=None, **options)


def list_names(package: str) -> list[str]:
    """List the networks that torchvision or timm can build."""
    module = import_extra(package, f"The list of {package}'s models")
    return module.list_models() if package == "timm" else module.models.list_models()


def explain_unknown(name: str) -> str:
    """Return the error text for a name that nobody knows, with near ones from every source that is installed."""
    installed = [package for package in PACKAGES if find_spec(package)]
    known = [*find_models(), *(f"{package}/{listed}" for package in installed for listed in list_names(package))]
    bare = name.rpartition("/")[2]
    near = difflib.get_close_matches(bare, [full.rpartition("/")[2] for full in known], n=4, cutoff=0.6)
    full = [full for wanted in dict.fromkeys(near) for full in known if full.rpartition("/")[2] == wanted]
    hint = f"Did you mean {', '.join(map(repr, full[:-1]))}{' or ' * (len(full) > 1)}{full[-1]!r}? " if full else ""
    missing = "".join(f" (not installed here: {package})" for package in PACKAGES if package not in installed)
    return (
        f"No model is named {name!r}. {hint}Ours are {', '.join(find_models())}; the others are those of torchvision and of "
        f"timm{missing}. For a model of your own, give 'module:function'."
    )


def call_function(name: str, options: dict[str, Any]) -> nn.Module:
    """Build a model with a function of the user's own, named "module:function"."""
    path, _, attribute = name.partition(":")
    target: Any = import_user_module(path, name)
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [key for key in vars(target) if not key.startswith("_") and callable(getattr(target, key))]
            raise ModelNameError(
                f"{name!r}: module {path!r} has no {attribute!r}. It has {', '.join(public[:8]) or 'no functions'}."
            )
        target = getattr(target, part)
    if not callable(target):
        raise ModelNameError(
            f"{name!r} is a {type(target).__name__}, not a function. Give a function without arguments that returns a model."
        )
    try:
        model = target(**options)
    except GradFilterError:
        raise
    except Exception as error:
        raise GradFilterError(
            f"{name!r} failed with {type(error).__name__}: {error}. It is called without arguments and has to return a model."
        ) from error
    if not isinstance(model, nn.Module):
        raise GradFilterError(f"{name!r} returned a {type(model).__name__}. Let it return the model, a torch.nn.Module.")
    return model


def import_user_module(path: str, name: str) -> ModuleType:
    """Import a user's module, from the current directory too."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(error.name + ".")):
            raise ModelNameError(
                f"{name!r}: there is no module {error.name!r}, neither installed nor in {here!r}. Give the module as in an "
                "import statement, e.g. 'package.nets:make_net' for package/nets.py, from the folder that holds it."
            ) from error
        raise GradFilterError(f"{name!r}: importing {path!r} failed: {error}. Install what it needs.") from error
    except Exception as error:
        raise GradFilterError(
            f"{name!r}: importing {path!r} failed with {type(error).__name__}: {error}. Mend the module first; "
            f"'python -c \"import {path}\"' shows where."
        ) from error
